//! What a connection runs on: a socket, or TLS on a socket. Both are read and written without waiting, from any thread.

use std::io::{self, IoSlice};

use bytes::BytesMut;
use tokio::net::TcpStream;

use crate::tls::TlsStream;

/// The two ends of a connection's bytes.
pub(crate) enum Stream {
    /// As they are.
    Plain(TcpStream),
    /// Sealed.
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

    /// Reads what is there; 0 if the other side has ended the connection.
    pub fn try_read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Plain(tcp) => tcp.try_read(bytes),
            Stream::Tls(tls) => tls.try_read(bytes),
        }
    }

    /// The same, behind what the buffer holds and up to its capacity.
    pub fn try_read_buf(&self, buffer: &mut BytesMut) -> io::Result<usize> {
        match self {
            Stream::Plain(tcp) => tcp.try_read_buf(buffer),
            Stream::Tls(tls) => tls.try_read_buf(buffer),
        }
    }

    /// Writes what the socket takes. What was not counted must come again, first, in the next call.
    pub fn try_write_vectored(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Stream::Plain(tcp) => tcp.try_write_vectored(slices),
            Stream::Tls(tls) => tls.try_write_vectored(slices),
        }
    }

    /// Waits until a read that would have blocked is worth another try.
    pub async fn readable(&self) -> io::Result<()> {
        self.tcp().readable().await
    }

    /// The same for a write.
    pub async fn writable(&self) -> io::Result<()> {
        self.tcp().writable().await
    }

    /// Ends the connection in both directions, so that whoever reads it stops.
    pub fn shut_down(&self) {
        // One that has ended needs no end.
        let _ = socket2::SockRef::from(self.tcp()).shutdown(std::net::Shutdown::Both);
    }

    /// Writes all of it.
    pub async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.try_write_vectored(&[IoSlice::new(bytes)]) {
                Ok(n) => bytes = &bytes[n..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.writable().await?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reads until the bytes are full.
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
