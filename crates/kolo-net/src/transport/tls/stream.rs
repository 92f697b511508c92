//! A connection inside of TLS that is read and written as a `TcpStream` is: without waiting, and from any thread.
//!
//! Sealing takes nearly as long as writing to a socket does. So whoever sends something long only seals it, and a task of its
//! own, [`TlsStream::pump`], writes what is sealed meanwhile; what is short, and the end of what is long, is written at once.
//!
//! | state | who may touch it |
//! | --- | --- |
//! | `sealer` | whoever sends, one at a time; `out` may be locked while it is |
//! | `out` | whoever sends and whoever writes, for a moment; never across a system call |
//! | `opener` | whoever reads |

use std::collections::VecDeque;
use std::io::{self, IoSlice};

use bytes::BytesMut;
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::sync::Notify;

use super::records::{BATCH, Opener, SEALED_BATCH, Sealer};

/// So much may be sealed and not written before more is sealed.
const MOST_AHEAD: usize = 2 * BATCH;

/// The most batches of one system call.
const MAX_SLICES: usize = 64;

/// What is at least so long is sealed into a large buffer, of which so many are kept for later.
const LONG: usize = 64 << 10;
const MAX_SPARE: usize = 4;

/// The connection.
pub(crate) struct TlsStream {
    tcp: TcpStream,
    pub(super) sealer: Mutex<Sealer>,
    out: Mutex<Out>,
    pub(super) opener: Mutex<Opener>,
    /// The pump should look.
    wake: Notify,
    /// Where the pump runs.
    runtime: Handle,
    /// Whoever sends may go on.
    room: Notify,
}

/// What is sealed and not written.
#[derive(Default)]
struct Out {
    batches: VecDeque<Vec<u8>>,
    /// Bytes of the first batch that have left.
    n_written: usize,
    /// Bytes of all of them, with those that are being written.
    n_bytes: usize,
    /// Large buffers that are not in use.
    spare: Vec<Vec<u8>>,
    /// Somebody writes, and will look again.
    is_writing: bool,
    /// Why nothing can be sent any more.
    failed: Option<String>,
}

impl TlsStream {
    pub(super) fn new(tcp: TcpStream, sealer: Sealer, opener: Opener) -> TlsStream {
        let (sealer, opener, out) = (Mutex::new(sealer), Mutex::new(opener), Mutex::default());
        let (wake, room, runtime) = (Notify::new(), Notify::new(), Handle::current());
        TlsStream { tcp, sealer, out, opener, wake, room, runtime }
    }

    /// The socket.
    pub fn tcp(&self) -> &TcpStream {
        &self.tcp
    }

    /// Reads what is there; 0 if the other side has ended the connection.
    pub fn try_read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        self.opener.lock().read(bytes, |bytes| self.tcp.try_read(bytes))
    }

    /// The same, behind what the buffer holds and up to its capacity; perhaps less than there is.
    pub fn try_read_buf(&self, buffer: &mut BytesMut) -> io::Result<usize> {
        self.opener.lock().read_buf(buffer, |bytes| self.tcp.try_read(bytes))
    }

    /// Waits until a read that would have blocked is worth another try: nothing that could be opened lies in front of the
    /// socket then.
    pub async fn readable(&self) -> io::Result<()> {
        self.tcp.readable().await
    }

    /// Takes the beginning of what `slices` hold, and says how much. It will be written, now or by the pump.
    pub fn try_write_vectored(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let n_all: usize = slices.iter().map(|slice| slice.len()).sum();
        if !self.has_room()? {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let mut sealer = self.sealer.lock();
        let mut batch = Vec::new();
        if n_all >= LONG {
            batch = self.out.lock().spare.pop().unwrap_or_else(|| Vec::with_capacity(SEALED_BATCH));
        }
        let sealed = sealer.seal(slices, &mut batch);
        if !batch.is_empty() {
            let mut out = self.out.lock();
            out.n_bytes += batch.len();
            out.batches.push_back(batch);
        }
        drop(sealer);
        let n = sealed.map_err(io::Error::other)?;
        match n < n_all {
            // There is more to seal while this is written.
            true => self.wake_pump(),
            false => self.write_now()?,
        }
        Ok(n)
    }

    /// Waits until a write that would have blocked is worth another try.
    pub async fn writable(&self) -> io::Result<()> {
        while !self.has_room()? {
            self.room.notified().await;
        }
        Ok(())
    }

    fn has_room(&self) -> io::Result<bool> {
        let out = self.out.lock();
        match &out.failed {
            Some(why) => Err(io::Error::new(io::ErrorKind::BrokenPipe, why.clone())),
            None => Ok(out.n_bytes < MOST_AHEAD),
        }
    }

    /// Lets another thread write what is sealed.
    ///
    /// A worker of the runtime keeps the task that it has woken last to itself, until it is done with its own. The ones before it
    /// may be taken by a worker that has nothing to do. So after the pump comes a task that does nothing.
    fn wake_pump(&self) {
        self.wake.notify_one();
        self.runtime.spawn(async {});
    }

    /// Writes what is sealed, as it comes, until the connection breaks.
    pub async fn pump(&self) {
        loop {
            if let Err(error) = self.flush().await {
                return self.fail(error.to_string());
            }
            self.wake.notified().await;
        }
    }

    /// Writes all that is sealed, unless somebody else does.
    pub async fn flush(&self) -> io::Result<()> {
        loop {
            match self.write_out() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.tcp.writable().await?,
                done => return done,
            }
        }
    }

    /// Whether all that was taken has left.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.out.lock().n_bytes == 0
    }

    /// Writes what the socket takes; the pump writes the rest.
    fn write_now(&self) -> io::Result<()> {
        match self.write_out() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.wake.notify_one();
                Ok(())
            }
            done => done,
        }
    }

    fn write_out(&self) -> io::Result<()> {
        let _writing = Writing(self);
        let mut batches = {
            let mut out = self.out.lock();
            if let Some(why) = &out.failed {
                return Err(io::Error::new(io::ErrorKind::BrokenPipe, why.clone()));
            }
            if out.is_writing || out.batches.is_empty() {
                return Ok(());
            }
            out.is_writing = true;
            std::mem::take(&mut out.batches)
        };
        let mut n_written = self.out.lock().n_written;
        loop {
            let slices: Vec<IoSlice<'_>> = batches
                .iter()
                .take(MAX_SLICES)
                .enumerate()
                .map(|(i, batch)| IoSlice::new(&batch[if i == 0 { n_written } else { 0 }..]))
                .collect();
            let written = match self.tcp.try_write_vectored(&slices) {
                Ok(0) => Err(io::ErrorKind::WriteZero.into()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(0),
                written => written,
            };
            let n = *written.as_ref().unwrap_or(&0);
            n_written += n;
            let mut out = self.out.lock();
            while batches.front().is_some_and(|batch| batch.len() <= n_written)
                && let Some(mut batch) = batches.pop_front()
            {
                n_written -= batch.len();
                if batch.capacity() >= SEALED_BATCH && out.spare.len() < MAX_SPARE {
                    batch.clear();
                    out.spare.push(batch);
                }
            }
            let was_full = out.n_bytes >= MOST_AHEAD;
            out.n_bytes -= n;
            if was_full && out.n_bytes < MOST_AHEAD {
                self.room.notify_one();
            }
            // What came meanwhile stands behind what is left.
            batches.append(&mut out.batches);
            match written {
                Ok(_) if !batches.is_empty() => {}
                Ok(_) => {
                    (out.is_writing, out.n_written) = (false, 0);
                    return Ok(());
                }
                Err(error) => {
                    (out.is_writing, out.n_written, out.batches) = (false, n_written, batches);
                    drop(out);
                    if error.kind() != io::ErrorKind::WouldBlock {
                        self.fail(error.to_string());
                    }
                    return Err(error);
                }
            }
        }
    }

    /// Nothing can be sent any more. Whoever reads must stop, too, or those who wait for answers wait for ever.
    fn fail(&self, why: String) {
        self.out.lock().failed.get_or_insert(why);
        self.room.notify_one();
        // One that has ended needs no end.
        let _ = socket2::SockRef::from(&self.tcp).shutdown(std::net::Shutdown::Both);
    }
}

/// Nobody else writes while somebody does; if that one panics, nobody ever will.
struct Writing<'a>(&'a TlsStream);

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail("a mistake of our own; the log says more".to_owned());
        }
    }
}

impl Drop for TlsStream {
    fn drop(&mut self) {
        // A goodbye that the socket does not take at once is not worth waiting for.
        if let Ok(goodbye) = self.sealer.get_mut().goodbye() {
            let out = self.out.get_mut();
            out.n_bytes += goodbye.len();
            out.batches.push_back(goodbye);
            let _ = self.write_out();
        }
    }
}
