//! A stream that knows whether its client has opened HTTP/2: sent the preface, and the head of the frame that must follow.
//! One that stops before that would be kept for ever, since pings begin after it.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::server::HTTP2_PREFACE;

/// A frame's length, type, flags and stream.
const FRAME_HEAD: usize = 9;

/// The stream.
pub(super) struct Opening<S> {
    stream: S,
    n_read: Arc<AtomicUsize>,
}

/// How far the opening has come.
pub(super) struct Progress(Arc<AtomicUsize>);

impl Progress {
    /// True once the client has sent enough.
    pub fn is_open(&self) -> bool {
        self.0.load(Ordering::Relaxed) >= HTTP2_PREFACE.len() + FRAME_HEAD
    }
}

impl<S> Opening<S> {
    pub fn new(stream: S) -> (Opening<S>, Progress) {
        let n_read = Arc::new(AtomicUsize::new(0));
        (Opening { stream, n_read: n_read.clone() }, Progress(n_read))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Opening<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(cx, buf);
        self.n_read.fetch_add(buf.filled().len() - before, Ordering::Relaxed);
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Opening<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
