//! One connection from the caller's side: sends calls, and delivers each response to its caller.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use kolo_core::{Error, Result, Tensor};
use parking_lot::Mutex;
use prost::Message as _;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::outbox::{Outbox, WireMessage};
use super::read::{Arrived, Reader};
use super::stream::Stream;
use super::{Allocate, Failure, Header, Kind, TensorHead};
use crate::wire::limits::MessageLimits;

/// The response to a call.
pub(super) struct Reply {
    pub head: Bytes,
    pub tensor: Option<(TensorHead, Tensor)>,
}

/// A connection. Dropping it closes it.
pub(super) struct Link {
    outbox: Arc<Outbox>,
    calls: Arc<Mutex<PendingCalls>>,
    next: AtomicU64,
    tasks: [JoinHandle<()>; 2],
}

#[derive(Default)]
struct PendingCalls {
    pending: HashMap<u64, PendingCall>,
    /// Set when the connection is lost: why no more responses will come.
    over: Option<Error>,
}

/// The receiver of a response.
enum PendingCall {
    /// A call.
    One(oneshot::Sender<Result<Reply>>),
    /// One of several tensors, by number.
    Each(Arc<dyn Fn(usize, Result<Reply>) + Send + Sync>, usize),
}

impl PendingCall {
    fn answer(self, answer: Result<Reply>) {
        match self {
            // The caller may have cancelled.
            PendingCall::One(sender) => drop(sender.send(answer)),
            PendingCall::Each(each, index) => each(index, answer),
        }
    }
}

impl Link {
    /// Takes over a connection after its greeting.
    pub fn new(stream: Stream, peer: String, limits: MessageLimits, allocate: Allocate) -> Arc<Link> {
        let stream = Arc::new(stream);
        let outbox = Arc::new(Outbox::new(stream.clone()));
        let calls: Arc<Mutex<PendingCalls>> = Arc::default();
        let writing = tokio::spawn(outbox.clone().drain());
        let guard = ReaderGuard { calls: calls.clone(), outbox: outbox.clone(), peer, why: None };
        let reading = tokio::spawn(read(stream, guard, limits, allocate));
        Arc::new(Link { outbox, calls, next: AtomicU64::new(1), tasks: [writing, reading] })
    }

    /// True once the connection is lost.
    pub fn is_over(&self) -> bool {
        self.calls.lock().over.is_some()
    }

    /// Calls a method. Dropping the future cancels the call.
    pub async fn call(&self, method: u8, request: &impl prost::Message) -> Result<Reply> {
        let call = self.next.fetch_add(1, Ordering::Relaxed);
        self.exchange(call, message(Kind::Request, method, call, request)).await
    }

    /// The part of a call that is the same for all messages.
    async fn exchange(&self, call: u64, message: WireMessage) -> Result<Reply> {
        let (sender, receiver) = oneshot::channel();
        {
            let mut calls = self.calls.lock();
            if let Some(over) = &calls.over {
                return Err(over.clone());
            }
            calls.pending.insert(call, PendingCall::One(sender));
        }
        let guard = CancelOnDrop { link: self, call };
        self.outbox.push(message)?;
        let answer = receiver.await;
        drop(guard);
        answer.unwrap_or_else(|_| Err(Error::unavailable("the connection was closed")))
    }

    /// Requests `n` tensors of a step, whose encoded [`super::Keys`] are `keys`. `each` is called once for each of
    /// them, on any thread, and not after the guard was dropped. The request is deferred: it is sent with the next
    /// call.
    pub fn receive(
        self: &Arc<Self>,
        step_id: u64,
        keys: &[u8],
        n: usize,
        each: Arc<dyn Fn(usize, Result<Reply>) + Send + Sync>,
    ) -> Result<Box<dyn Send>> {
        let first = self.next.fetch_add(n as u64, Ordering::Relaxed);
        {
            let mut calls = self.calls.lock();
            if let Some(over) = &calls.over {
                return Err(over.clone());
            }
            calls.pending.extend((0..n).map(|i| (first + i as u64, PendingCall::Each(each.clone(), i))));
        }
        let guard = CancelAllOnDrop { link: self.clone(), first, n: n as u64 };
        let n_head = 8 + keys.len();
        let mut head = Vec::with_capacity(super::HEADER + n_head);
        Header { kind: Kind::Receive, method: 0, is_shared: false, n_head, call: first, n_body: 0 }.write(&mut head);
        head.extend(step_id.to_le_bytes());
        head.extend(keys);
        self.outbox.push_later(WireMessage { head, body: None })?;
        Ok(Box::new(guard))
    }

    /// Flushes deferred messages.
    pub fn flush(&self) {
        self.outbox.flush_now();
    }

    /// Ends the reading task from outside.
    #[cfg(test)]
    pub fn abort_reading(&self) {
        self.tasks[1].abort();
    }

    /// Reports that a step is over. The message is deferred.
    pub fn end_step(&self, step_id: u64) -> Result<()> {
        self.outbox.push_later(header_only(Kind::EndStep, step_id))
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

/// Cancels a call that is still pending.
struct CancelOnDrop<'a> {
    link: &'a Link,
    call: u64,
}

impl Drop for CancelOnDrop<'_> {
    fn drop(&mut self) {
        if self.link.calls.lock().pending.remove(&self.call).is_some() {
            // A lost connection has nothing left to cancel.
            let _ = self.link.outbox.push(header_only(Kind::Cancel, self.call));
        }
    }
}

/// Cancels a request for several tensors if some are still pending.
struct CancelAllOnDrop {
    link: Arc<Link>,
    first: u64,
    n: u64,
}

impl Drop for CancelAllOnDrop {
    fn drop(&mut self) {
        let mut calls = self.link.calls.lock();
        let left: Vec<PendingCall> =
            (self.first..self.first + self.n).filter_map(|call| calls.pending.remove(&call)).collect();
        drop(calls);
        if !left.is_empty() {
            // As above.
            let _ = self.link.outbox.push(header_only(Kind::Cancel, self.first));
        }
    }
}

/// A message that is only a header.
fn header_only(kind: Kind, call: u64) -> WireMessage {
    let mut head = Vec::with_capacity(super::HEADER);
    Header { kind, method: 0, is_shared: false, n_head: 0, call, n_body: 0 }.write(&mut head);
    WireMessage { head, body: None }
}

/// A message whose head is `content`.
pub(super) fn message(kind: Kind, method: u8, call: u64, content: &impl prost::Message) -> WireMessage {
    let n_head = content.encoded_len();
    let mut head = Vec::with_capacity(super::HEADER + n_head);
    Header { kind, method, is_shared: false, n_head, call, n_body: 0 }.write(&mut head);
    content.encode_raw(&mut head);
    WireMessage { head, body: None }
}

/// Owned by the reading task: fails all pending calls when that task ends, however it does.
struct ReaderGuard {
    calls: Arc<Mutex<PendingCalls>>,
    outbox: Arc<Outbox>,
    peer: String,
    /// Why it ended; `None` if it panicked or was aborted.
    why: Option<Error>,
}

impl Drop for ReaderGuard {
    fn drop(&mut self) {
        let peer = &self.peer;
        let over = self.why.take().unwrap_or_else(|| match std::thread::panicking() {
            true => Error::internal(format!("{peer}: the connection ended by an internal error; see the log")),
            false => Error::unavailable(format!("{peer}: the connection was closed")),
        });
        self.outbox.close(over.clone());
        let waiting = {
            let mut calls = self.calls.lock();
            calls.over = Some(over.clone());
            std::mem::take(&mut calls.pending)
        };
        for waiting in waiting.into_values() {
            // A callback that panics must not keep the others from their response.
            let answer = std::panic::AssertUnwindSafe(|| waiting.answer(Err(over.clone())));
            let _ = std::panic::catch_unwind(answer);
        }
    }
}

async fn read(stream: Arc<Stream>, mut guard: ReaderGuard, limits: MessageLimits, allocate: Allocate) {
    let releases = Arc::downgrade(&guard.outbox);
    let left = Arc::new(move |id: u32| {
        // A lost connection has released its files.
        let _ = releases.upgrade().map(|outbox| outbox.push_later(header_only(Kind::Release, u64::from(id))));
    });
    let mut reader = Reader::new(&stream, limits, allocate, left);
    let why = loop {
        match reader.next().await {
            Ok(Some(arrived)) => deliver(&guard.calls, arrived),
            Ok(None) => {
                break Error::unavailable(format!("{} has closed the connection; it may have ended", guard.peer));
            }
            Err(error) => break error.context(&guard.peer),
        }
    };
    guard.why = Some(why);
}

fn deliver(calls: &Mutex<PendingCalls>, arrived: Arrived) {
    let Arrived { header, head, tensor } = arrived;
    let Some(waiting) = calls.lock().pending.remove(&header.call) else { return };
    let answer = match header.kind {
        Kind::Response => Ok(Reply { head, tensor }),
        Kind::Failure => Err(Failure::decode(head).map_or_else(
            |error| Error::data_loss(format!("an error that cannot be read: {error}")),
            Failure::into_error,
        )),
        Kind::Request | Kind::Cancel | Kind::Release | Kind::Receive | Kind::EndStep => {
            Err(Error::data_loss("a request where a response was expected"))
        }
    };
    waiting.answer(answer);
}
