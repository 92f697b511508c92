//! The writing half of a connection: the sending thread writes its message to the socket itself until the socket is
//! full; one async task writes the rest. So a small message is sent without waking another thread, and queued messages
//! are sent in one system call.
//!
//! A system call, and the wakeup of the reader, cost more than a small message. So messages from one batch of work are
//! buffered until its end ([`Outbox::hold`]), and messages without urgency are deferred: they are flushed with the next
//! urgent message ([`Outbox::push_later`]), or within [`TICK`].
//!
//! `tests/interleavings.rs` runs this file under shuttle, so it takes its primitives from `super::sync`.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::sync::Arc;
use std::time::Duration;

use kolo_core::{Error, Result, Tensor};

use super::stream::Stream;
use super::sync::{AtomicBool, IDLE_TICKS, JoinHandle, Mutex, MutexGuard, Notify, Ordering, spawn, timeout};

/// The maximum number of slices in one system call.
const MAX_SLICES: usize = 64;

/// The interval at which deferred messages are flushed.
const TICK: Duration = Duration::from_millis(5);

/// One outgoing message.
pub(super) struct WireMessage {
    /// Header and head.
    pub head: Vec<u8>,
    /// The tensor whose bytes are the body.
    pub body: Option<Tensor>,
}

impl WireMessage {
    pub fn n_bytes(&self) -> usize {
        self.head.len() + self.body().len()
    }

    fn body(&self) -> &[u8] {
        // `tensor_message` has checked that these bytes are on the host.
        self.body.as_ref().and_then(|tensor| tensor.host_bytes().ok()).unwrap_or(&[])
    }
}

/// The outgoing messages of a connection.
pub(super) struct Outbox {
    stream: Arc<Stream>,
    pub(super) queue: Mutex<SendQueue>,
    /// Wakes the writing task: the socket is full, a message was deferred, or the outbox was closed.
    wake: Notify,
    /// The writing task flushes deferred messages every [`TICK`].
    is_ticking: AtomicBool,
}

#[derive(Default)]
pub(super) struct SendQueue {
    pub(super) messages: VecDeque<WireMessage>,
    /// Bytes of the first message that have been written.
    n_written: usize,
    is_flushing: bool,
    /// The socket is full: only the writing task flushes.
    is_full: bool,
    is_held: bool,
    /// A message was deferred since the last tick.
    has_deferred: bool,
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

    /// Queues a message and flushes the queue, unless it is on hold.
    pub fn push(&self, message: WireMessage) -> Result<()> {
        let mut queue = self.queue.lock();
        if let Some(error) = &queue.closed {
            return Err(error.clone());
        }
        queue.messages.push_back(message);
        self.send(queue);
        Ok(())
    }

    /// Queues a message without flushing: it is sent with the next one, or within [`TICK`].
    pub fn push_later(&self, message: WireMessage) -> Result<()> {
        let mut queue = self.queue.lock();
        if let Some(error) = &queue.closed {
            return Err(error.clone());
        }
        queue.messages.push_back(message);
        queue.has_deferred = true;
        drop(queue);
        if !self.is_ticking.swap(true, Ordering::AcqRel) {
            self.wake.notify_one();
        }
        Ok(())
    }

    /// Buffers messages until [`Outbox::release`]. Only the connection's reader does this, and only while it handles
    /// calls.
    pub fn hold(&self) {
        self.queue.lock().is_held = true;
    }

    /// Flushes the messages buffered since [`Outbox::hold`].
    pub fn release(&self) {
        let mut queue = self.queue.lock();
        queue.is_held = false;
        self.send(queue);
    }

    /// Flushes the queue, unless it is on hold.
    pub fn flush_now(&self) {
        self.send(self.queue.lock());
    }

    /// Flushes, unless another thread does or will, or the queue is on hold.
    fn send(&self, mut queue: MutexGuard<'_, SendQueue>) {
        if queue.is_flushing || queue.is_full || queue.is_held || queue.messages.is_empty() {
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

    /// Handles a write error: shuts the socket down, so that the reader stops too and pending calls fail.
    pub fn broke(&self, error: &io::Error) {
        self.close(Error::unavailable(format!("the connection broke: {error}")));
        self.stream.shut_down();
    }

    /// Refuses further messages and drops the unsent ones.
    pub fn close(&self, error: Error) {
        let messages = {
            let mut queue = self.queue.lock();
            queue.closed.get_or_insert(error);
            std::mem::take(&mut queue.messages)
        };
        drop(messages);
        self.wake.notify_one();
    }

    /// Writes until the queue is empty or the socket is full. Only the thread that has set `is_flushing` may call it.
    fn flush(&self) -> io::Result<Progress> {
        let _flushing = Flushing(self);
        loop {
            let (mut batch, n_written) = {
                let mut queue = self.queue.lock();
                if queue.messages.is_empty() {
                    (queue.is_flushing, queue.is_full, queue.has_deferred) = (false, false, false);
                    return Ok(Progress::Empty);
                }
                (std::mem::take(&mut queue.messages), queue.n_written)
            };
            let written = self.write(&batch, n_written);
            let mut n_written = n_written + *written.as_ref().unwrap_or(&0);
            // Written messages are dropped before the queue is locked: dropping a tensor may queue further messages.
            while let Some(n) = batch.front().map(WireMessage::n_bytes).filter(|&n| n <= n_written) {
                n_written -= n;
                batch.pop_front();
            }
            let mut queue = self.queue.lock();
            queue.n_written = n_written;
            // Messages queued meanwhile come after the unwritten ones.
            if queue.closed.is_none() {
                batch.append(&mut queue.messages);
                queue.messages = batch;
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

    fn write(&self, batch: &VecDeque<WireMessage>, n_written: usize) -> io::Result<usize> {
        let mut skip = n_written;
        let mut slices = Vec::with_capacity(MAX_SLICES.min(2 * batch.len()));
        for bytes in batch.iter().flat_map(|message| [&message.head[..], message.body()]) {
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

    /// The writing task: continues writing after the socket was full, and flushes deferred messages. Ends when the
    /// outbox is closed.
    pub async fn drain(self: Arc<Self>) {
        let _pump = Pump(spawn(self.stream.clone().pump()));
        let mut n_idle = 0;
        loop {
            if self.is_ticking.load(Ordering::Acquire) {
                // Woken or timed out, there may be something to do.
                let _ = timeout(TICK, self.wake.notified()).await;
            } else {
                self.wake.notified().await;
            }
            let (is_full, has_deferred) = {
                let mut queue = self.queue.lock();
                if queue.closed.is_some() {
                    return;
                }
                (queue.is_full, std::mem::take(&mut queue.has_deferred))
            };
            n_idle = if has_deferred { 0 } else { n_idle + 1 };
            if n_idle > IDLE_TICKS {
                self.is_ticking.store(false, Ordering::Release);
                // A message deferred between the check and the store saw a task that still ticked.
                if self.queue.lock().has_deferred {
                    self.is_ticking.store(true, Ordering::Release);
                }
                n_idle = 0;
            }
            if has_deferred && !is_full {
                self.flush_now();
            }
            while self.queue.lock().is_full {
                // A peer that reads nothing may never make room, so the end of the outbox must be noticed here too.
                let writable = tokio::select! {
                    biased;
                    writable = self.stream.writable() => writable,
                    () = self.wake.notified() => Ok(()),
                };
                if let Err(error) = writable {
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

/// The task that writes the stream's buffered bytes to the socket; aborted with the writing task.
struct Pump(JoinHandle<()>);

impl Drop for Pump {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Closes the connection if a thread panics while it flushes: `is_flushing` would stay set and nothing be sent any
/// more.
struct Flushing<'a>(&'a Outbox);

impl Drop for Flushing<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.broke(&io::Error::other("internal error; see the log"));
        }
    }
}
