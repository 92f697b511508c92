//! One rank's end: messages of bytes to other ranks, which are polled.
//!
//! MPI reads and writes the memory of a message until it says that it is done, and some of its messages cannot be called back. So a
//! message owns its memory, and leaves it behind if it is dropped before.

use std::ffi::{c_int, c_void};
use std::mem::ManuallyDrop;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use kolo_core::{Error, Result};

use super::library::{
    Code, Functions, Handle, MOST_ERROR_BYTES, Mpi, MpiKind, Opened, SERIALIZED, SUCCESS, Status, Word, line_of,
};

/// How long the other ranks may take to leave after this one.
const LEAVE: Duration = Duration::from_secs(60);

/// One rank's end of all ranks that `mpirun` has started. A process has at most one, once.
pub struct MpiEnd {
    /// `None` once it is given back.
    calls: Option<Box<dyn Calls>>,
    rank: usize,
    n_ranks: usize,
    version: String,
}

/// A message that is being sent.
#[must_use = "MPI goes on only while it is asked"]
pub struct Sending(Pending);

/// A message that is to arrive.
#[must_use = "MPI goes on only while it is asked"]
pub struct Receiving(Pending);

/// Memory that MPI uses until `request` is done.
struct Pending {
    request: Word,
    bytes: ManuallyDrop<Vec<u8>>,
    is_done: bool,
}

impl Pending {
    fn take(&mut self) -> Vec<u8> {
        // The memory is this process's alone again, and what remains here is empty.
        std::mem::take(&mut *self.bytes)
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if self.is_done {
            drop(self.take());
        }
    }
}

impl MpiEnd {
    /// Joins the ranks that `mpirun` has started, with the library of its kind: the one at `path`, or else the one that belongs to the
    /// launcher, or else that of the system.
    pub fn join(kind: MpiKind, path: Option<&Path>) -> Result<MpiEnd> {
        let Mpi { opened, version } = Mpi::open(kind, path)?;
        let calls: Box<dyn Calls> = match opened {
            Opened::OpenMpi(functions) => Box::new(functions),
            Opened::Mpich(functions) => Box::new(functions),
        };
        calls.init().map_err(|error| error.context(version.clone()))?;
        let mut end = MpiEnd { calls: Some(calls), rank: 0, n_ranks: 1, version };
        (end.rank, end.n_ranks) = end.calls()?.place()?;
        Ok(end)
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks.
    pub fn n_ranks(&self) -> usize {
        self.n_ranks
    }

    /// What the library says of itself.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Begins to send a message. Those to one rank with one tag arrive in this order.
    pub fn send(&mut self, to: usize, tag: u16, bytes: Vec<u8>) -> Result<Sending> {
        let (to, n) = (self.rank_number(to)?, length(bytes.len())?);
        let bytes = ManuallyDrop::new(bytes);
        let request = self.calls()?.isend(&bytes, n, to, tag.into())?;
        Ok(Sending(Pending { request, bytes, is_done: false }))
    }

    /// Begins to receive a message of `bytes.len()` bytes into `bytes`.
    pub fn receive(&mut self, from: usize, tag: u16, bytes: Vec<u8>) -> Result<Receiving> {
        let (from, n) = (self.rank_number(from)?, length(bytes.len())?);
        let mut bytes = ManuallyDrop::new(bytes);
        let request = self.calls()?.irecv(&mut bytes, n, from, tag.into())?;
        Ok(Receiving(Pending { request, bytes, is_done: false }))
    }

    /// Whether the memory of a message may be used again; gives it back then.
    pub fn sent(&mut self, message: &mut Sending) -> Result<Option<Vec<u8>>> {
        let pending = &mut message.0;
        Ok(self.test(pending)?.map(|_| pending.take()))
    }

    /// The message, if it has arrived. One that is shorter than expected is an error.
    pub fn received(&mut self, message: &mut Receiving) -> Result<Option<Vec<u8>>> {
        let pending = &mut message.0;
        let Some(status) = self.test(pending)? else { return Ok(None) };
        let found = self.calls()?.count(&status)?;
        let bytes = pending.take();
        match found == bytes.len() {
            true => Ok(Some(bytes)),
            false => {
                Err(Error::internal(format!("a message of {found} bytes came where {} were expected", bytes.len())))
            }
        }
    }

    fn test(&self, pending: &mut Pending) -> Result<Option<Status>> {
        if pending.is_done {
            return Err(Error::internal("a message of MPI was asked for again"));
        }
        let status = self.calls()?.test(&mut pending.request)?;
        pending.is_done = status.is_some();
        Ok(status)
    }

    /// A message of `N` bytes with this tag that some rank has sent, if there is one.
    pub fn poll<const N: usize>(&mut self, tag: u16) -> Result<Option<[u8; N]>> {
        let calls = self.calls()?;
        if !calls.probe_any(tag.into())? {
            return Ok(None);
        }
        let mut bytes = [0; N];
        calls.recv_any(&mut bytes, tag.into())?;
        Ok(Some(bytes))
    }

    fn calls(&self) -> Result<&dyn Calls> {
        self.calls.as_deref().ok_or_else(|| Error::internal("MPI was left"))
    }

    fn rank_number(&self, rank: usize) -> Result<c_int> {
        match rank < self.n_ranks {
            true => Ok(rank as c_int),
            false => Err(Error::internal(format!("a message of rank {rank} of {}", self.n_ranks))),
        }
    }
}

impl Drop for MpiEnd {
    /// Leaves, which takes until all ranks do: a launcher takes a process that ends without this for a failure.
    fn drop(&mut self) {
        let Some(calls) = self.calls.take() else { return };
        let (done, is_done) = mpsc::channel();
        let leave = move || {
            let result = calls.finalize();
            // Nobody listens any more if it took too long.
            let _ = done.send(result);
        };
        let left = match std::thread::Builder::new().name("kolo-mpi-leave".to_owned()).spawn(leave) {
            Ok(_) => is_done.recv_timeout(LEAVE),
            Err(error) => return tracing::error!("no thread to leave MPI with: {error}"),
        };
        match left {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!("rank {} cannot leave MPI: {error}", self.rank),
            Err(_) => tracing::warn!("rank {} ends although not all ranks have left MPI after {LEAVE:?}", self.rank),
        }
    }
}

fn length(n: usize) -> Result<c_int> {
    n.try_into().map_err(|_| Error::internal(format!("a message of {n} bytes is too long for MPI")))
}

/// The calls of either library, safe for a caller that keeps the memory of messages. One thread calls at a time.
trait Calls: Send {
    fn init(&self) -> Result<()>;
    fn place(&self) -> Result<(usize, usize)>;
    /// The bytes must stay where they are, unchanged, until `test` says that the request is done.
    fn isend(&self, bytes: &ManuallyDrop<Vec<u8>>, n: c_int, to: c_int, tag: c_int) -> Result<Word>;
    /// The bytes must stay where they are, and nobody may look at them, until `test` says that the request is done.
    fn irecv(&self, bytes: &mut ManuallyDrop<Vec<u8>>, n: c_int, from: c_int, tag: c_int) -> Result<Word>;
    fn test(&self, request: &mut Word) -> Result<Option<Status>>;
    fn count(&self, status: &Status) -> Result<usize>;
    fn probe_any(&self, tag: c_int) -> Result<bool>;
    fn recv_any(&self, bytes: &mut [u8], tag: c_int) -> Result<()>;
    fn finalize(&self) -> Result<()>;
}

// SAFETY: the handles are those of objects of the library that live as long as it, and it was told that any thread may call it, one
// at a time: `MpiEnd` is not for several at once.
unsafe impl<H: Handle> Send for Functions<H> {}

impl<H: Handle> Functions<H> {
    fn good(&self, what: &str, code: Code) -> Result<()> {
        if code == SUCCESS {
            return Ok(());
        }
        let (mut text, mut n) = ([0u8; MOST_ERROR_BYTES], 0);
        // SAFETY: there is room for the longest text of either library.
        unsafe { (self.error_string)(code, text.as_mut_ptr().cast(), &mut n) };
        Err(Error::unavailable(format!("MPI, {what}: {}", line_of(&text))))
    }
}

impl<H: Handle> Calls for Functions<H> {
    fn init(&self) -> Result<()> {
        let (mut is_initialized, mut provided) = (0, 0);
        // SAFETY: it writes a flag.
        self.good("asking whether it is in use", unsafe { (self.initialized)(&mut is_initialized) })?;
        if is_initialized != 0 {
            return Err(Error::failed_precondition("a process can join the ranks of MPI only once"));
        }
        let (nothing, no_words) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: it may be called without arguments of a command line, and writes a level.
        self.good("joining", unsafe { (self.init_thread)(nothing, no_words, SERIALIZED, &mut provided) })?;
        // SAFETY: both are handles of this library.
        self.good("asking for errors", unsafe { (self.comm_set_errhandler)(self.world, self.errors_return) })?;
        match provided >= SERIALIZED {
            true => Ok(()),
            false => Err(Error::failed_precondition("this library allows calls by a single thread only")),
        }
    }

    fn place(&self) -> Result<(usize, usize)> {
        let (mut rank, mut size) = (0, 0);
        // SAFETY: it writes a number.
        self.good("asking for the rank", unsafe { (self.comm_rank)(self.world, &mut rank) })?;
        // SAFETY: as above.
        self.good("asking for the number of ranks", unsafe { (self.comm_size)(self.world, &mut size) })?;
        Ok((rank as usize, size as usize))
    }

    fn isend(&self, bytes: &ManuallyDrop<Vec<u8>>, n: c_int, to: c_int, tag: c_int) -> Result<Word> {
        let mut request = H::of(0);
        // SAFETY: `n` is the length of the bytes, which a `Pending` keeps until the request is done.
        let code = unsafe { (self.isend)(bytes.as_ptr().cast(), n, self.byte, to, tag, self.world, &mut request) };
        self.good("sending", code)?;
        Ok(request.word())
    }

    fn irecv(&self, bytes: &mut ManuallyDrop<Vec<u8>>, n: c_int, from: c_int, tag: c_int) -> Result<Word> {
        let mut request = H::of(0);
        let to: *mut c_void = bytes.as_mut_ptr().cast();
        // SAFETY: `n` is the length of the bytes, which a `Pending` keeps, and shows to nobody, until the request is done.
        self.good("receiving", unsafe { (self.irecv)(to, n, self.byte, from, tag, self.world, &mut request) })?;
        Ok(request.word())
    }

    fn test(&self, request: &mut Word) -> Result<Option<Status>> {
        let (mut handle, mut is_done, mut status) = (H::of(*request), 0, Status::new());
        // SAFETY: the request is one that was not done so far; the status has room for either library's.
        let code = unsafe { (self.test)(&mut handle, &mut is_done, &mut status) };
        *request = handle.word();
        self.good("a message", code)?;
        Ok((is_done != 0).then_some(status))
    }

    fn count(&self, status: &Status) -> Result<usize> {
        let mut n = 0;
        // SAFETY: the status is one that the library has filled in.
        self.good("the length of a message", unsafe { (self.get_count)(status, self.byte, &mut n) })?;
        Ok(n.max(0) as usize)
    }

    fn probe_any(&self, tag: c_int) -> Result<bool> {
        let (mut is_there, mut status) = (0, Status::new());
        // SAFETY: it writes a flag and a status.
        let code = unsafe { (self.iprobe)(self.any_source, tag, self.world, &mut is_there, &mut status) };
        self.good("looking for messages", code)?;
        Ok(is_there != 0)
    }

    fn recv_any(&self, bytes: &mut [u8], tag: c_int) -> Result<()> {
        let (n, mut status) = (length(bytes.len())?, Status::new());
        let to: *mut c_void = bytes.as_mut_ptr().cast();
        // SAFETY: the call returns when the message is in the bytes, which have room for `n`; a longer message is an error.
        let code = unsafe { (self.recv)(to, n, self.byte, self.any_source, tag, self.world, &mut status) };
        self.good("receiving a notice", code)
    }

    fn finalize(&self) -> Result<()> {
        // SAFETY: this end is gone, so nobody calls the library after this.
        self.good("leaving", unsafe { (self.finalize)() })
    }
}
