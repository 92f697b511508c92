//! A TLS connection with the interface of a `TcpStream`: reads and writes do not block, and may come from any thread.
//!
//! Encrypting takes nearly as long as writing to a socket. So a thread that sends a long message only encrypts it, and
//! an async task, [`TlsStream::pump`], writes the encrypted batches meanwhile. Short messages, and the last batch of a
//! long one, are written at once.
//!
//! | state | who may lock it |
//! | --- | --- |
//! | `sealer` | the sender, one at a time; `out` may be locked while it is |
//! | `out` | senders and the writer, briefly; never across a system call |
//! | `opener` | the reader |

use std::collections::VecDeque;
use std::io::{self, IoSlice};

use bytes::BytesMut;
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::sync::Notify;

use super::records::{BATCH, Opener, SEALED_BATCH, Sealer};

/// The high-water mark: with this many encrypted bytes unwritten, no more are encrypted.
const MOST_AHEAD: usize = 2 * BATCH;

/// The maximum number of batches in one system call.
const MAX_SLICES: usize = 64;

/// Data of at least this size is encrypted into a large buffer, of which up to `MAX_SPARE` are kept for reuse.
const LONG: usize = 64 << 10;
const MAX_SPARE: usize = 4;

/// A TLS connection after its handshake.
pub(crate) struct TlsStream {
    tcp: TcpStream,
    pub(super) sealer: Mutex<Sealer>,
    out: Mutex<Out>,
    pub(super) opener: Mutex<Opener>,
    /// Wakes the pump.
    wake: Notify,
    /// The runtime of the pump.
    runtime: Handle,
    /// Wakes a sender that waits for buffer space.
    room: Notify,
}

/// Batches that are encrypted and not written.
#[derive(Default)]
struct Out {
    batches: VecDeque<Vec<u8>>,
    /// Bytes of the first batch that have been written.
    n_written: usize,
    /// Bytes of all batches, including those that are being written.
    n_bytes: usize,
    /// Large buffers for reuse.
    spare: Vec<Vec<u8>>,
    /// A thread is writing, and will check for more batches before it stops.
    is_writing: bool,
    /// Why the connection can no longer send.
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

    /// Reads the available bytes; 0 if the other side has closed the connection.
    pub fn try_read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        self.opener.lock().read(bytes, |bytes| self.tcp.try_read(bytes))
    }

    /// The same, appending to the buffer up to its capacity; may return less than is available.
    pub fn try_read_buf(&self, buffer: &mut BytesMut) -> io::Result<usize> {
        self.opener.lock().read_buf(buffer, |bytes| self.tcp.try_read(bytes))
    }

    /// Waits until a read that would have blocked can be retried. Such a read has consumed all complete records, so
    /// waiting for the socket is enough.
    pub async fn readable(&self) -> io::Result<()> {
        self.tcp.readable().await
    }

    /// Accepts a prefix of `slices` and returns its length. It is written now, or later by the pump.
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
            // The pump writes this batch while the caller encrypts the next one.
            true => self.wake_pump(),
            false => self.write_now()?,
        }
        Ok(n)
    }

    /// Waits until a write that would have blocked can be retried.
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

    /// Has another thread write the encrypted batches.
    ///
    /// A worker thread of the runtime keeps the task that it woke last for itself, and runs it after the current one.
    /// Tasks woken before that one can be stolen by idle workers. So an empty task is spawned after the pump is woken.
    fn wake_pump(&self) {
        self.wake.notify_one();
        self.runtime.spawn(async {});
    }

    /// Writes encrypted batches as they are queued, until the connection fails.
    pub async fn pump(&self) {
        loop {
            if let Err(error) = self.flush().await {
                return self.fail(error.to_string());
            }
            self.wake.notified().await;
        }
    }

    /// Writes all encrypted batches, unless another thread is writing.
    pub async fn flush(&self) -> io::Result<()> {
        loop {
            match self.write_out() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.tcp.writable().await?,
                done => return done,
            }
        }
    }

    /// Whether all accepted bytes have been written.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.out.lock().n_bytes == 0
    }

    /// Writes until the socket is full; the pump writes the rest.
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
            // Batches queued meanwhile come after the unwritten ones.
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

    /// Marks the connection as failed. Shuts down the socket, so that the reader stops too and pending calls fail.
    fn fail(&self, why: String) {
        self.out.lock().failed.get_or_insert(why);
        self.room.notify_one();
        // It may be closed already.
        let _ = socket2::SockRef::from(&self.tcp).shutdown(std::net::Shutdown::Both);
    }
}

/// Fails the connection if a thread panics while it writes: `is_writing` would stay set and nothing be written any
/// more.
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
        // If the socket is full, the closing alert is dropped: it is not worth waiting for.
        if let Ok(goodbye) = self.sealer.get_mut().goodbye() {
            let out = self.out.get_mut();
            out.n_bytes += goodbye.len();
            out.batches.push_back(goodbye);
            let _ = self.write_out();
        }
    }
}
