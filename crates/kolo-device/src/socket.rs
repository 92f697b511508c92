//! Socket options that the standard library does not have.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};

/// Sets `SO_RCVLOWAT`: the socket becomes readable only when `n` bytes are available, or when the connection ends. The
/// system may lower `n`. Reads are not affected: they return what is available.
pub fn set_receive_low_water_mark(socket: BorrowedFd<'_>, n: usize) -> io::Result<()> {
    let n = libc::c_int::try_from(n).unwrap_or(libc::c_int::MAX);
    // SAFETY: `socket` is open while it is borrowed, and the call reads one number of the length that it is told.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_RCVLOWAT,
            (&raw const n).cast(),
            size_of_val(&n) as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd as _;
    use std::time::Duration;

    use super::*;

    /// Whether the socket can be read within this time.
    fn is_readable(socket: &TcpStream, timeout: Duration) -> bool {
        let mut poll = libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one entry, which lives until the call returns.
        unsafe { libc::poll(&raw mut poll, 1, timeout.as_millis() as libc::c_int) == 1 }
    }

    #[test]
    fn a_reader_sleeps_until_enough_is_there() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut here = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut there, _) = listener.accept().unwrap();
        set_receive_low_water_mark(there.as_fd(), 1000).unwrap();
        here.write_all(&[1; 999]).unwrap();
        assert!(!is_readable(&there, Duration::from_millis(20)));
        here.write_all(&[2]).unwrap();
        assert!(is_readable(&there, Duration::from_secs(20)));
        let mut bytes = [0; 1000];
        there.read_exact(&mut bytes[..600]).unwrap();
        assert!(!is_readable(&there, Duration::ZERO));
        // A lower mark makes the buffered bytes readable.
        set_receive_low_water_mark(there.as_fd(), 1).unwrap();
        assert!(is_readable(&there, Duration::from_secs(20)));
        set_receive_low_water_mark(there.as_fd(), 1000).unwrap();
        drop(here);
        assert!(is_readable(&there, Duration::from_secs(20)), "the end of the connection");
    }
}
