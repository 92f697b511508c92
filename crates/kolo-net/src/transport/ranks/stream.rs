//! A connection between ranks: a socket that never blocks, with TLS or without. Waiting is up to its users, who poll.

use std::io::{self, IoSlice, IoSliceMut, Read as _, Write as _};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio_rustls::rustls::Connection;

/// With TLS, the most bytes that are encrypted and not yet written.
const MOST_AHEAD: usize = 256 << 10;

/// One connection.
pub(super) struct Stream {
    tcp: TcpStream,
    tls: Option<Box<Connection>>,
}

impl Stream {
    pub fn new(tcp: TcpStream, tls: Option<Connection>) -> io::Result<Stream> {
        tcp.set_nonblocking(true)?;
        // Messages are small and answered, or large: holding back the end of one helps neither.
        tcp.set_nodelay(true)?;
        let tls = tls.map(|mut tls| {
            tls.set_buffer_limit(Some(MOST_AHEAD));
            Box::new(tls)
        });
        Ok(Stream { tcp, tls })
    }

    /// Reads what is there. `WouldBlock` if nothing is, 0 if the other side has closed the connection.
    pub fn read(&mut self, to: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let Some(tls) = &mut self.tls else { return self.tcp.read_vectored(to) };
        loop {
            match tls.reader().read_vectored(to) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // A connection that was cut off is as over as one that was closed: messages have known lengths.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(0),
                done => return done,
            }
            write_records(tls, &mut self.tcp)?;
            if tls.read_tls(&mut self.tcp)? == 0 {
                return Ok(0);
            }
            if let Err(error) = tls.process_new_packets() {
                // The alert says why, if the other side still reads.
                let _ = write_records(tls, &mut self.tcp);
                return Err(io::Error::new(io::ErrorKind::InvalidData, error));
            }
            write_records(tls, &mut self.tcp)?;
        }
    }

    /// Writes a beginning of what is given. `WouldBlock` if there is no room.
    pub fn write(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        let Some(tls) = &mut self.tls else { return self.tcp.write_vectored(from) };
        write_records(tls, &mut self.tcp)?;
        let n = tls.writer().write_vectored(from)?;
        write_records(tls, &mut self.tcp)?;
        match n {
            0 => Err(io::ErrorKind::WouldBlock.into()),
            n => Ok(n),
        }
    }

    /// Writes what is encrypted; whether nothing is left.
    pub fn flush(&mut self) -> io::Result<bool> {
        match &mut self.tls {
            None => Ok(true),
            Some(tls) => {
                write_records(tls, &mut self.tcp)?;
                Ok(!tls.wants_write() && !tls.is_handshaking())
            }
        }
    }

    /// Reads exactly this, for at most so long.
    pub fn read_exact_by(&mut self, mut to: &mut [u8], deadline: Instant) -> io::Result<()> {
        while !to.is_empty() {
            match self.read(&mut [IoSliceMut::new(to)]) {
                Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it closed the connection")),
                Ok(n) => to = &mut to[n..],
                Err(error) => self.wait(error, PollFlags::IN, deadline)?,
            }
        }
        Ok(())
    }

    /// Writes all of this, for at most so long.
    pub fn write_all_by(&mut self, mut from: &[u8], deadline: Instant) -> io::Result<()> {
        while !from.is_empty() {
            match self.write(&[IoSlice::new(from)]) {
                Ok(n) => from = &from[n..],
                Err(error) => self.wait(error, PollFlags::OUT, deadline)?,
            }
        }
        // In a handshake the rest goes with the next read.
        while self.tls.as_ref().is_some_and(|tls| tls.wants_write()) {
            self.wait(io::ErrorKind::WouldBlock.into(), PollFlags::OUT, deadline)?;
            self.flush()?;
        }
        Ok(())
    }

    /// Waits, if an operation would block, until it can be tried again.
    fn wait(&self, error: io::Error, flags: PollFlags, deadline: Instant) -> io::Result<()> {
        match error.kind() {
            io::ErrorKind::Interrupted => return Ok(()),
            io::ErrorKind::WouldBlock => {}
            _ => return Err(error),
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "it did not answer in time"));
        }
        // A write within a handshake may wait for something to read.
        let flags = if self.tls.is_some() { flags | PollFlags::IN } else { flags };
        wait_for(&mut [PollFd::new(self, flags)], left)
    }

    /// Another handle of the socket, to poll.
    pub fn socket(&self) -> io::Result<TcpStream> {
        self.tcp.try_clone()
    }

    /// The socket.
    pub fn tcp(&self) -> &TcpStream {
        &self.tcp
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.tcp.as_fd()
    }
}

/// Writes records until none are left or the socket is full.
fn write_records(tls: &mut Connection, tcp: &mut TcpStream) -> io::Result<()> {
    while tls.wants_write() {
        match tls.write_tls(tcp) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Waits until one of these is ready, for at most so long; may return early.
pub(super) fn wait_for(polled: &mut [PollFd<'_>], at_most: Duration) -> io::Result<()> {
    // Not less than a microsecond, or a caller with little time left would spin.
    let at_most = at_most.clamp(Duration::from_micros(1), Duration::from_secs(60));
    let time = Timespec { tv_sec: at_most.as_secs() as i64, tv_nsec: i64::from(at_most.subsec_nanos()) };
    match poll(polled, Some(&time)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
