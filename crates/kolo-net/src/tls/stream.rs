//! A connection inside of TLS that is read and written as a `TcpStream` is: without waiting, and from any thread.

use std::io::{self, IoSlice};

use bytes::BytesMut;
use parking_lot::Mutex;
use tokio::net::TcpStream;

use super::records::{Opener, Sealer};

/// The connection. Reading and writing do not wait for each other.
pub(crate) struct TlsStream {
    tcp: TcpStream,
    /// Locked by whoever writes.
    pub(super) sealer: Mutex<Sealer>,
    /// Locked by whoever reads.
    pub(super) opener: Mutex<Opener>,
}

impl TlsStream {
    pub(super) fn new(tcp: TcpStream, sealer: Sealer, opener: Opener) -> TlsStream {
        TlsStream { tcp, sealer: Mutex::new(sealer), opener: Mutex::new(opener) }
    }

    /// The socket, to wait for. There is nothing left to read in front of it once a read would have blocked.
    pub fn tcp(&self) -> &TcpStream {
        &self.tcp
    }

    /// Reads what is there; 0 if the other side has ended the connection.
    pub fn try_read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        let want = bytes.len();
        let mut rest = bytes;
        let take = |piece: &[u8]| {
            let (first, others) = std::mem::take(&mut rest).split_at_mut(piece.len());
            first.copy_from_slice(piece);
            rest = others;
        };
        self.opener.lock().read(want, take, |bytes| self.tcp.try_read(bytes))
    }

    /// The same, behind what the buffer holds and up to its capacity.
    pub fn try_read_buf(&self, buffer: &mut BytesMut) -> io::Result<usize> {
        let want = buffer.capacity() - buffer.len();
        self.opener.lock().read(want, |piece| buffer.extend_from_slice(piece), |bytes| self.tcp.try_read(bytes))
    }

    /// Writes what the socket takes. What was not counted must come again, first, in the next call.
    pub fn try_write_vectored(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.sealer.lock().write(slices, |slices| self.tcp.try_write_vectored(slices))
    }
}

impl Drop for TlsStream {
    fn drop(&mut self) {
        let tcp = &self.tcp;
        self.sealer.get_mut().close(|slices| tcp.try_write_vectored(slices));
    }
}
