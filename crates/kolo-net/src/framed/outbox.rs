//! The writing half of a connection: whoever has a frame writes it, as long as the socket takes it; the rest is left to one
//! task. So a small frame leaves without waking another thread, and frames that pile up leave in one system call.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::sync::Arc;

use kolo_core::{Error, Result, Tensor};
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::sync::Notify;

/// How many slices go into one system call.
const MAX_SLICES: usize = 64;

/// One frame.
pub(super) struct Frame {
    /// Header and head.
    pub head: Vec<u8>,
    /// The tensor whose bytes are the body.
    pub body: Option<Tensor>,
}

impl Frame {
    fn body(&self) -> &[u8] {
        // Whoever made the frame has looked at these bytes.
        self.body.as_ref().and_then(|tensor| tensor.host_bytes().ok()).unwrap_or(&[])
    }
}

/// Frames on their way out.
pub(super) struct Outbox {
    stream: Arc<TcpStream>,
    queue: Mutex<Queue>,
    /// The socket is full: the writing task should go on.
    wake: Notify,
}

#[derive(Default)]
struct Queue {
    frames: VecDeque<Frame>,
    /// Bytes of the first frame that have left.
    n_written: usize,
    is_flushing: bool,
    closed: Option<Error>,
}

enum Progress {
    Empty,
    Full,
}

impl Outbox {
    pub fn new(stream: Arc<TcpStream>) -> Outbox {
        Outbox { stream, queue: Mutex::default(), wake: Notify::new() }
    }

    /// Sends a frame, now or soon.
    pub fn push(&self, frame: Frame) -> Result<()> {
        {
            let mut queue = self.queue.lock();
            if let Some(error) = &queue.closed {
                return Err(error.clone());
            }
            queue.frames.push_back(frame);
            if queue.is_flushing {
                return Ok(());
            }
            queue.is_flushing = true;
        }
        match self.flush() {
            Ok(Progress::Empty) => {}
            // The writing task flushes from now on.
            Ok(Progress::Full) => self.wake.notify_one(),
            Err(error) => self.close(Error::unavailable(format!("the connection broke: {error}"))),
        }
        Ok(())
    }

    /// Refuses further frames. What was not sent is dropped.
    pub fn close(&self, error: Error) {
        let frames = {
            let mut queue = self.queue.lock();
            queue.closed.get_or_insert(error);
            std::mem::take(&mut queue.frames)
        };
        drop(frames);
        self.wake.notify_one();
    }

    /// Writes what the socket takes. Only whoever has set `is_flushing` may call it.
    fn flush(&self) -> io::Result<Progress> {
        loop {
            let (batch, n_written) = {
                let mut queue = self.queue.lock();
                if queue.frames.is_empty() {
                    queue.is_flushing = false;
                    return Ok(Progress::Empty);
                }
                (std::mem::take(&mut queue.frames), queue.n_written)
            };
            let written = self.write(&batch, n_written);
            // Frames that came meanwhile stand behind those that are left.
            let mut queue = self.queue.lock();
            let mut batch = batch;
            let mut n_written = n_written + *written.as_ref().unwrap_or(&0);
            while let Some(first) = batch.front() {
                let n = first.head.len() + first.body().len();
                if n_written < n {
                    break;
                }
                n_written -= n;
                batch.pop_front();
            }
            queue.n_written = n_written;
            if queue.closed.is_none() {
                batch.append(&mut queue.frames);
                queue.frames = batch;
            }
            drop(queue);
            match written {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Progress::Full),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn write(&self, batch: &VecDeque<Frame>, n_written: usize) -> io::Result<usize> {
        let mut skip = n_written;
        let mut slices = Vec::with_capacity(MAX_SLICES.min(2 * batch.len()));
        for bytes in batch.iter().flat_map(|frame| [&frame.head[..], frame.body()]) {
            let skipped = skip.min(bytes.len());
            skip -= skipped;
            if skipped < bytes.len() {
                slices.push(IoSlice::new(&bytes[skipped..]));
            }
            if slices.len() == MAX_SLICES {
                break;
            }
        }
        self.stream.try_write_vectored(&slices)
    }

    /// The writing task: goes on where a full socket stopped others. Ends when the outbox is closed.
    pub async fn drain(self: Arc<Self>) {
        loop {
            self.wake.notified().await;
            loop {
                if self.queue.lock().closed.is_some() {
                    return;
                }
                if let Err(error) = self.stream.writable().await {
                    return self.close(Error::unavailable(format!("the connection broke: {error}")));
                }
                match self.flush() {
                    Ok(Progress::Empty) => break,
                    Ok(Progress::Full) => {}
                    Err(error) => return self.close(Error::unavailable(format!("the connection broke: {error}"))),
                }
            }
        }
    }
}
