//! The writing half of a connection: whoever has a frame writes it, as long as the socket takes it; the rest is left to one
//! task. So a small frame leaves without waking another thread, and frames that pile up leave in one system call.
//!
//! A system call, and what it wakes on the other side, costs more than a small frame. So frames that come from one batch of
//! work are held until its end ([`Outbox::hold`]), and a frame that nobody waits for goes with the next one that somebody does
//! ([`Outbox::push_later`]), or after [`TICK`].

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kolo_core::{Error, Result, Tensor};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use super::stream::Stream;

/// How many slices go into one system call.
const MAX_SLICES: usize = 64;

/// How long a frame that nobody waits for may lie.
const TICK: Duration = Duration::from_millis(5);

/// After so many ticks without such a frame nobody looks for them any more.
const IDLE_TICKS: u32 = 200;

/// One frame.
pub(super) struct Frame {
    /// Header and head.
    pub head: Vec<u8>,
    /// The tensor whose bytes are the body.
    pub body: Option<Tensor>,
}

impl Frame {
    pub fn n_bytes(&self) -> usize {
        self.head.len() + self.body().len()
    }

    fn body(&self) -> &[u8] {
        // Whoever made the frame has looked at these bytes.
        self.body.as_ref().and_then(|tensor| tensor.host_bytes().ok()).unwrap_or(&[])
    }
}

/// Frames on their way out.
pub(super) struct Outbox {
    stream: Arc<Stream>,
    queue: Mutex<Queue>,
    /// The socket is full, or frames may lie: the writing task should look.
    wake: Notify,
    /// The writing task looks by itself every [`TICK`].
    is_ticking: AtomicBool,
}

#[derive(Default)]
struct Queue {
    frames: VecDeque<Frame>,
    /// Bytes of the first frame that have left.
    n_written: usize,
    is_flushing: bool,
    /// The socket is full: the writing task alone flushes.
    is_full: bool,
    is_held: bool,
    /// Since the last tick a frame was left lying.
    is_lying: bool,
    closed: Option<Error>,
}

enum Progress {
    Empty,
    Full,
}

impl Outbox {
    pub fn new(stream: Arc<Stream>) -> Outbox {
        Outbox { stream, queue: Mutex::default(), wake: Notify::new(), is_ticking: AtomicBool::new(false) }
    }

    /// Sends a frame, now or at the end of what holds it.
    pub fn push(&self, frame: Frame) -> Result<()> {
        let mut queue = self.queue.lock();
        if let Some(error) = &queue.closed {
            return Err(error.clone());
        }
        queue.frames.push_back(frame);
        self.send(queue);
        Ok(())
    }

    /// Sends a frame with the next one, or soon.
    pub fn push_later(&self, frame: Frame) -> Result<()> {
        let mut queue = self.queue.lock();
        if let Some(error) = &queue.closed {
            return Err(error.clone());
        }
        queue.frames.push_back(frame);
        queue.is_lying = true;
        drop(queue);
        if !self.is_ticking.swap(true, Ordering::AcqRel) {
            self.wake.notify_one();
        }
        Ok(())
    }

    /// Holds frames back until [`Outbox::release`]. Only the connection's reader does this, and only while it works.
    pub fn hold(&self) {
        self.queue.lock().is_held = true;
    }

    /// Sends what was held back.
    pub fn release(&self) {
        let mut queue = self.queue.lock();
        queue.is_held = false;
        self.send(queue);
    }

    /// Sends what lies there.
    pub fn flush_now(&self) {
        self.send(self.queue.lock());
    }

    /// Writes, unless somebody else does or will.
    fn send(&self, mut queue: MutexGuard<'_, Queue>) {
        if queue.is_flushing || queue.is_full || queue.is_held || queue.frames.is_empty() {
            return;
        }
        queue.is_flushing = true;
        drop(queue);
        match self.flush() {
            Ok(Progress::Empty) => {}
            // The writing task flushes from now on.
            Ok(Progress::Full) => self.wake.notify_one(),
            Err(error) => self.broke(&error),
        }
    }

    /// What was to be sent cannot be: whoever reads must stop, too, or those who wait for answers wait for ever.
    pub fn broke(&self, error: &io::Error) {
        self.close(Error::unavailable(format!("the connection broke: {error}")));
        self.stream.shut_down();
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
        let _flushing = Flushing(self);
        loop {
            let (mut batch, n_written) = {
                let mut queue = self.queue.lock();
                if queue.frames.is_empty() {
                    (queue.is_flushing, queue.is_full, queue.is_lying) = (false, false, false);
                    return Ok(Progress::Empty);
                }
                (std::mem::take(&mut queue.frames), queue.n_written)
            };
            let written = self.write(&batch, n_written);
            let mut n_written = n_written + *written.as_ref().unwrap_or(&0);
            // What has left is dropped before the queue is locked: a tensor's end may lead to further frames.
            while let Some(n) = batch.front().map(Frame::n_bytes).filter(|&n| n <= n_written) {
                n_written -= n;
                batch.pop_front();
            }
            let mut queue = self.queue.lock();
            queue.n_written = n_written;
            // Frames that came meanwhile stand behind those that are left.
            if queue.closed.is_none() {
                batch.append(&mut queue.frames);
                queue.frames = batch;
            }
            match written {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    (queue.is_flushing, queue.is_full) = (false, true);
                    return Ok(Progress::Full);
                }
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

    /// The writing task: goes on where a full socket stopped others, and sends what was left lying. Ends when the outbox is
    /// closed.
    pub async fn drain(self: Arc<Self>) {
        let _pump = Pump(tokio::spawn(self.stream.clone().pump()));
        let mut n_idle = 0;
        loop {
            if self.is_ticking.load(Ordering::Acquire) {
                // Either way there may be something to do.
                let _ = tokio::time::timeout(TICK, self.wake.notified()).await;
            } else {
                self.wake.notified().await;
            }
            let (is_full, is_lying) = {
                let mut queue = self.queue.lock();
                if queue.closed.is_some() {
                    return;
                }
                (queue.is_full, std::mem::take(&mut queue.is_lying))
            };
            n_idle = if is_lying { 0 } else { n_idle + 1 };
            if n_idle > IDLE_TICKS {
                self.is_ticking.store(false, Ordering::Release);
                // What came between the look and the store saw a task that still ticked.
                if self.queue.lock().is_lying {
                    self.is_ticking.store(true, Ordering::Release);
                }
                n_idle = 0;
            }
            if is_lying && !is_full {
                self.flush_now();
            }
            while self.queue.lock().is_full {
                if let Err(error) = self.stream.writable().await {
                    return self.broke(&error);
                }
                {
                    let mut queue = self.queue.lock();
                    if queue.closed.is_some() {
                        return;
                    }
                    queue.is_flushing = true;
                }
                match self.flush() {
                    Ok(Progress::Empty) => break,
                    Ok(Progress::Full) => {}
                    Err(error) => return self.broke(&error),
                }
            }
        }
    }
}

/// Gives to the socket what the stream has taken; ends with the writing task.
struct Pump(JoinHandle<()>);

impl Drop for Pump {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Nobody else writes while somebody does; if that one panics, nobody ever will.
struct Flushing<'a>(&'a Outbox);

impl Drop for Flushing<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.broke(&io::Error::other("a mistake of our own; the log says more"));
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt as _;
    use tokio::net::TcpStream;

    use super::*;

    fn bytes(text: &str) -> Frame {
        Frame { head: text.as_bytes().to_vec(), body: None }
    }

    async fn pair() -> (Arc<Outbox>, TcpStream) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (here, there) = tokio::join!(TcpStream::connect(listener.local_addr().unwrap()), listener.accept());
        (Arc::new(Outbox::new(Arc::new(Stream::Plain(here.unwrap())))), there.unwrap().0)
    }

    async fn expect(stream: &mut TcpStream, text: &str) {
        let mut found = vec![0; text.len()];
        let read = tokio::time::timeout(Duration::from_secs(20), stream.read_exact(&mut found)).await;
        read.expect("it comes").unwrap();
        assert_eq!(found, text.as_bytes());
    }

    #[tokio::test]
    async fn frames_keep_their_order_and_lie_only_as_long_as_they_may() {
        let (outbox, mut there) = pair().await;
        let task = tokio::spawn(outbox.clone().drain());
        outbox.push_later(bytes("one ")).unwrap();
        outbox.push(bytes("two ")).unwrap();
        expect(&mut there, "one two ").await;
        // Nobody sends anything after it: it goes by itself.
        outbox.push_later(bytes("three ")).unwrap();
        expect(&mut there, "three ").await;
        outbox.hold();
        outbox.push(bytes("four ")).unwrap();
        assert_eq!(outbox.queue.lock().frames.len(), 1, "held");
        outbox.push(bytes("five")).unwrap();
        outbox.release();
        expect(&mut there, "four five").await;
        outbox.close(Error::cancelled("enough"));
        assert!(outbox.push(bytes("six")).is_err() && outbox.push_later(bytes("six")).is_err());
        tokio::time::timeout(Duration::from_secs(20), task).await.expect("it ends").unwrap();
    }

    #[tokio::test]
    async fn more_than_the_socket_takes_arrives_whole() {
        let (outbox, mut there) = pair().await;
        let task = tokio::spawn(outbox.clone().drain());
        let text = "0123456789abcdef".repeat(1 << 16);
        for _ in 0..20 {
            outbox.push(bytes(&text)).unwrap();
        }
        for _ in 0..20 {
            expect(&mut there, &text).await;
        }
        outbox.close(Error::cancelled("enough"));
        tokio::time::timeout(Duration::from_secs(20), task).await.expect("it ends").unwrap();
    }
}
