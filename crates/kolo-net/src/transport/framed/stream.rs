//! The byte stream under a connection: a socket, or TLS on a socket. Reads and writes do not block, and may come from
//! any thread.

use std::io::{self, IoSlice};
use std::os::fd::AsFd as _;
use std::sync::Arc;

use bytes::BytesMut;
use tokio::net::TcpStream;

use crate::transport::tls::TlsStream;

/// A byte stream in both directions.
pub(crate) enum Stream {
    /// Unencrypted.
    Plain(TcpStream),
    /// Encrypted.
    Tls(Box<TlsStream>),
}

impl Stream {
    fn tcp(&self) -> &TcpStream {
        match self {
            Stream::Plain(tcp) => tcp,
            Stream::Tls(tls) => tls.tcp(),
        }
    }

    pub fn is_tls(&self) -> bool {
        matches!(self, Stream::Tls(_))
    }

    /// Reads the available bytes; 0 if the other side has closed the connection.
    pub fn try_read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Plain(tcp) => tcp.try_read(bytes),
            Stream::Tls(tls) => tls.try_read(bytes),
        }
    }

    /// The same, appending to the buffer up to its capacity.
    pub fn try_read_buf(&self, buffer: &mut BytesMut) -> io::Result<usize> {
        match self {
            Stream::Plain(tcp) => tcp.try_read_buf(buffer),
            Stream::Tls(tls) => tls.try_read_buf(buffer),
        }
    }

    /// Writes a prefix of `slices` and returns its length. With TLS it may only be buffered, until [`Stream::pump`]
    /// writes it to the socket.
    pub fn try_write_vectored(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Stream::Plain(tcp) => tcp.try_write_vectored(slices),
            Stream::Tls(tls) => tls.try_write_vectored(slices),
        }
    }

    /// Waits until a read that would have blocked can be retried.
    pub async fn readable(&self) -> io::Result<()> {
        match self {
            Stream::Plain(tcp) => tcp.readable().await,
            Stream::Tls(tls) => tls.readable().await,
        }
    }

    /// Makes [`Stream::readable`] wait until the socket has `n` bytes; at least that many must still be expected.
    pub fn set_receive_low_water_mark(&self, n: usize) {
        // Failure only costs extra wakeups.
        let _ = kolo_device::set_receive_low_water_mark(self.tcp().as_fd(), n);
    }

    /// Waits until a write that would have blocked can be retried.
    pub async fn writable(&self) -> io::Result<()> {
        match self {
            Stream::Plain(tcp) => tcp.writable().await,
            Stream::Tls(tls) => tls.writable().await,
        }
    }

    /// Writes buffered bytes to the socket, for as long as the connection lives.
    pub async fn pump(self: Arc<Self>) {
        if let Stream::Tls(tls) = &*self {
            tls.pump().await;
        }
    }

    /// Shuts the connection down in both directions, so that its reader stops.
    pub fn shut_down(&self) {
        // It may be closed already.
        let _ = socket2::SockRef::from(self.tcp()).shutdown(std::net::Shutdown::Both);
    }

    /// Writes and flushes all bytes. For the greeting, before the pump runs.
    pub async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.try_write_vectored(&[IoSlice::new(bytes)]) {
                Ok(n) => bytes = &bytes[n..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => match self {
                    Stream::Plain(tcp) => tcp.writable().await?,
                    Stream::Tls(tls) => tls.flush().await?,
                },
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        match self {
            Stream::Plain(_) => Ok(()),
            Stream::Tls(tls) => tls.flush().await,
        }
    }

    /// Reads until `bytes` is full.
    pub async fn read_exact(&self, bytes: &mut [u8]) -> io::Result<()> {
        let mut at = 0;
        while at < bytes.len() {
            match self.try_read(&mut bytes[at..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => at += n,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.readable().await?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
