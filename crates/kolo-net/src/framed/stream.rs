//! What a connection runs on: a socket, or TLS on a socket. Both are read and written without waiting, from any thread.

use std::io::{self, IoSlice};
use std::os::fd::AsFd as _;
use std::sync::Arc;

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

    /// Takes the beginning of what `slices` hold, and says how much: a socket has it then, or [`Stream::pump`] gives it to one.
    pub fn try_write_vectored(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Stream::Plain(tcp) => tcp.try_write_vectored(slices),
            Stream::Tls(tls) => tls.try_write_vectored(slices),
        }
    }

    /// Waits until a read that would have blocked is worth another try.
    pub async fn readable(&self) -> io::Result<()> {
        match self {
            Stream::Plain(tcp) => tcp.readable().await,
            Stream::Tls(tls) => tls.readable().await,
        }
    }

    /// Lets [`Stream::readable`] wait until the socket has so many bytes. They must be known to come.
    pub fn wake_reader_at(&self, n: usize) {
        // A reader that is woken more often than it wants reads as well.
        let _ = kolo_device::wake_reader_at(self.tcp().as_fd(), n);
    }

    /// The same for a write.
    pub async fn writable(&self) -> io::Result<()> {
        match self {
            Stream::Plain(tcp) => tcp.writable().await,
            Stream::Tls(tls) => tls.writable().await,
        }
    }

    /// Writes what was taken and has not left yet, for as long as the connection lives.
    pub async fn pump(self: Arc<Self>) {
        if let Stream::Tls(tls) = &*self {
            tls.pump().await;
        }
    }

    /// Ends the connection in both directions, so that whoever reads it stops.
    pub fn shut_down(&self) {
        // One that has ended needs no end.
        let _ = socket2::SockRef::from(self.tcp()).shutdown(std::net::Shutdown::Both);
    }

    /// Writes all of it, before there is a pump.
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
