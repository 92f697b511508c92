//! One connection from the caller's side: calls go out, answers come back to whoever asked.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use kolo_core::{Error, Result, Tensor};
use parking_lot::Mutex;
use prost::Message as _;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::outbox::{Frame, Outbox};
use super::read::{Arrived, Reader};
use super::stream::Stream;
use super::{Allocate, Failure, Header, Kind, TensorHead};
use crate::limits::MessageLimits;

/// A call's answer.
pub(super) struct Reply {
    pub head: Bytes,
    pub tensor: Option<(TensorHead, Tensor)>,
}

/// A connection. Dropping it ends it.
pub(super) struct Link {
    outbox: Arc<Outbox>,
    calls: Arc<Mutex<Calls>>,
    next: AtomicU64,
    tasks: [JoinHandle<()>; 2],
}

#[derive(Default)]
struct Calls {
    waiting: HashMap<u64, Waiting>,
    /// Why no more answers will come.
    over: Option<Error>,
}

/// Who wants an answer.
enum Waiting {
    /// A call.
    One(oneshot::Sender<Result<Reply>>),
    /// One of several tensors, by number.
    Each(Arc<dyn Fn(usize, Result<Reply>) + Send + Sync>, usize),
}

impl Waiting {
    fn answer(self, answer: Result<Reply>) {
        match self {
            // A caller that has given up does not mind.
            Waiting::One(sender) => drop(sender.send(answer)),
            Waiting::Each(each, index) => each(index, answer),
        }
    }
}

impl Link {
    /// Takes over a connection after its greeting.
    pub fn new(stream: Stream, peer: String, limits: MessageLimits, allocate: Allocate) -> Arc<Link> {
        let stream = Arc::new(stream);
        let outbox = Arc::new(Outbox::new(stream.clone()));
        let calls: Arc<Mutex<Calls>> = Arc::default();
        let writing = tokio::spawn(outbox.clone().drain());
        let end = End { calls: calls.clone(), outbox: outbox.clone(), peer, why: None };
        let reading = tokio::spawn(read(stream, end, limits, allocate));
        Arc::new(Link { outbox, calls, next: AtomicU64::new(1), tasks: [writing, reading] })
    }

    /// True once the connection is lost.
    pub fn is_over(&self) -> bool {
        self.calls.lock().over.is_some()
    }

    /// Calls a method. Dropping the future cancels the call.
    pub async fn call(&self, method: u8, request: &impl prost::Message) -> Result<Reply> {
        let call = self.next.fetch_add(1, Ordering::Relaxed);
        self.exchange(call, frame(Kind::Request, method, call, request)).await
    }

    /// The part of a call that is the same for all messages.
    async fn exchange(&self, call: u64, frame: Frame) -> Result<Reply> {
        let (sender, receiver) = oneshot::channel();
        {
            let mut calls = self.calls.lock();
            if let Some(over) = &calls.over {
                return Err(over.clone());
            }
            calls.waiting.insert(call, Waiting::One(sender));
        }
        let guard = GiveUp { link: self, call };
        self.outbox.push(frame)?;
        let answer = receiver.await;
        drop(guard);
        answer.unwrap_or_else(|_| Err(Error::unavailable("the connection was closed")))
    }

    /// Asks for `n` tensors of a step, which `keys` names as the wire wants it. `each` hears of each of them once, on any
    /// thread, and of none after the guard was dropped. The question goes out with the next call.
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
            calls.waiting.extend((0..n).map(|i| (first + i as u64, Waiting::Each(each.clone(), i))));
        }
        let guard = GiveUpMany { link: self.clone(), first, n: n as u64 };
        let n_head = 8 + keys.len();
        let mut head = Vec::with_capacity(super::HEADER + n_head);
        Header { kind: Kind::Receive, method: 0, is_shared: false, n_head, call: first, n_body: 0 }.write(&mut head);
        head.extend(step_id.to_le_bytes());
        head.extend(keys);
        self.outbox.push_later(Frame { head, body: None })?;
        Ok(Box::new(guard))
    }

    /// Sends what goes with the next call, now.
    pub fn flush(&self) {
        self.outbox.flush_now();
    }

    /// Ends the reading task from outside.
    #[cfg(test)]
    pub fn abort_reading(&self) {
        self.tasks[1].abort();
    }

    /// Says that a step is over, soon.
    pub fn end_step(&self, step_id: u64) -> Result<()> {
        self.outbox.push_later(bare(Kind::EndStep, step_id))
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

/// Tells the other side that an answer is not wanted any more.
struct GiveUp<'a> {
    link: &'a Link,
    call: u64,
}

impl Drop for GiveUp<'_> {
    fn drop(&mut self) {
        if self.link.calls.lock().waiting.remove(&self.call).is_some() {
            // A connection that is gone has nothing left to cancel.
            let _ = self.link.outbox.push(bare(Kind::Cancel, self.call));
        }
    }
}

/// The same for all that are left of several tensors.
struct GiveUpMany {
    link: Arc<Link>,
    first: u64,
    n: u64,
}

impl Drop for GiveUpMany {
    fn drop(&mut self) {
        let mut calls = self.link.calls.lock();
        let left: Vec<Waiting> =
            (self.first..self.first + self.n).filter_map(|call| calls.waiting.remove(&call)).collect();
        drop(calls);
        if !left.is_empty() {
            // As above.
            let _ = self.link.outbox.push(bare(Kind::Cancel, self.first));
        }
    }
}

/// A frame that is only a header.
fn bare(kind: Kind, call: u64) -> Frame {
    let mut head = Vec::with_capacity(super::HEADER);
    Header { kind, method: 0, is_shared: false, n_head: 0, call, n_body: 0 }.write(&mut head);
    Frame { head, body: None }
}

/// A frame whose head is a message.
pub(super) fn frame(kind: Kind, method: u8, call: u64, message: &impl prost::Message) -> Frame {
    let n_head = message.encoded_len();
    let mut head = Vec::with_capacity(super::HEADER + n_head);
    Header { kind, method, is_shared: false, n_head, call, n_body: 0 }.write(&mut head);
    message.encode_raw(&mut head);
    Frame { head, body: None }
}

/// Belongs to the task that reads: when that ends, however it does, nobody is left waiting for answers.
struct End {
    calls: Arc<Mutex<Calls>>,
    outbox: Arc<Outbox>,
    peer: String,
    /// Why it ended, if it was not by a panic or from outside.
    why: Option<Error>,
}

impl Drop for End {
    fn drop(&mut self) {
        let peer = &self.peer;
        let over = self.why.take().unwrap_or_else(|| match std::thread::panicking() {
            true => Error::internal(format!("{peer}: the connection ended by a mistake of our own; the log says more")),
            false => Error::unavailable(format!("{peer}: the connection was closed")),
        });
        self.outbox.close(over.clone());
        let waiting = {
            let mut calls = self.calls.lock();
            calls.over = Some(over.clone());
            std::mem::take(&mut calls.waiting)
        };
        for waiting in waiting.into_values() {
            // One that cannot bear its answer must not keep the others from theirs.
            let answer = std::panic::AssertUnwindSafe(|| waiting.answer(Err(over.clone())));
            let _ = std::panic::catch_unwind(answer);
        }
    }
}

async fn read(stream: Arc<Stream>, mut end: End, limits: MessageLimits, allocate: Allocate) {
    let releases = Arc::downgrade(&end.outbox);
    let left = Arc::new(move |id: u32| {
        // A connection that is gone has no files either.
        let _ = releases.upgrade().map(|outbox| outbox.push_later(bare(Kind::Release, u64::from(id))));
    });
    let mut reader = Reader::new(&stream, limits, allocate, left);
    let why = loop {
        match reader.next().await {
            Ok(Some(arrived)) => deliver(&end.calls, arrived),
            Ok(None) => {
                break Error::unavailable(format!("{} has closed the connection; it may have ended", end.peer));
            }
            Err(error) => break error.context(&end.peer),
        }
    };
    end.why = Some(why);
}

fn deliver(calls: &Mutex<Calls>, arrived: Arrived) {
    let Arrived { header, head, tensor } = arrived;
    let Some(waiting) = calls.lock().waiting.remove(&header.call) else { return };
    let answer = match header.kind {
        Kind::Response => Ok(Reply { head, tensor }),
        Kind::Failure => Err(Failure::decode(head).map_or_else(
            |error| Error::data_loss(format!("an error that cannot be read: {error}")),
            Failure::into_error,
        )),
        Kind::Request | Kind::Cancel | Kind::Release | Kind::Receive | Kind::EndStep => {
            Err(Error::data_loss("a call where an answer was expected"))
        }
    };
    waiting.answer(answer);
}
