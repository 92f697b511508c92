//! The rendezvous table of one step on one task: values that kernels here have sent and nobody has fetched yet, and the
//! waiters for values that have not been sent yet.
//!
//! A `_Send` stores its value here and is done. A `_Recv` whose sender is a device of this task waits here; one whose
//! sender is elsewhere requests the value from that task, which responds from its own table. Either side may come
//! first, and a request may arrive before this task knows of the step at all.
//!
//! The values that a graph receives unconditionally are prefetched before it starts, with one request to each task
//! ([`Transfers::ask_ahead`]); a `_Recv` then waits for the response to that request.
//!
//! `tests/interleavings.rs` runs this file under shuttle, so it takes its lock from `super::sync`.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use kolo_core::{Error, Result};
use kolo_ops::{Received, Rendezvous, RendezvousKey};
use kolo_runtime::StepRendezvous;

use super::sync::Mutex;
use crate::task::services::{Delivery, Each, Group, Guard};

/// Requests values from other tasks.
pub(crate) trait Fetch: Send + Sync {
    /// Calls `done` once with the value or an error, on any thread. Dropping the guard cancels the request.
    fn fetch(&self, step_id: u64, key: &RendezvousKey, done: Waiter) -> Guard;

    /// Requests several values of one task at once; `each` is called once for each of them, on any thread. The request
    /// may be buffered until [`Fetch::flush`]. `None` if they must be requested one by one.
    fn fetch_group(&self, step_id: u64, group: &Group, each: Each) -> Option<Guard> {
        let _ = (step_id, group, each);
        None
    }

    /// Flushes buffered requests, unless the work that runs on this thread will flush them soon.
    fn flush(&self) {}
}

/// The callback for a value.
pub(crate) type Waiter = Box<dyn FnOnce(Result<Received>) + Send>;

/// The rendezvous table of one step.
pub(crate) struct Transfers {
    step_id: u64,
    /// `/job:ps/replica:0/task:0/`, the prefix of the names of this task's devices.
    own_prefix: Arc<str>,
    fetch: Arc<dyn Fetch>,
    state: Mutex<TransferTable>,
}

#[derive(Default)]
struct TransferTable {
    values: HashMap<RendezvousKey, Vec<Received>>,
    waiters: HashMap<RendezvousKey, Vec<Waiting>>,
    /// Pending requests to other tasks, by number.
    questions: HashMap<u64, Question>,
    /// Prefetched values: requested before a `_Recv` needs them.
    ahead: HashMap<RendezvousKey, Ahead>,
    /// The guards of the prefetch requests.
    ahead_guards: Vec<Guard>,
    has_asked_ahead: bool,
    /// Flushes the connections that may have buffered values sent to other tasks.
    unsent: Vec<Flush>,
    next: u64,
    aborted: Option<Error>,
}

impl TransferTable {
    fn take(&mut self, key: &RendezvousKey) -> Option<Received> {
        let values = self.values.get_mut(key)?;
        let value = values.remove(0);
        if values.is_empty() {
            self.values.remove(key);
        }
        Some(value)
    }
}

struct Waiting {
    number: u64,
    since: Instant,
    done: Waiter,
    /// Flushes what `done` may have buffered.
    flush: Option<Flush>,
}

type Flush = Arc<dyn Fn() + Send + Sync>;

/// The state of a prefetched value.
enum Ahead {
    /// Requested; no `_Recv` needs it yet.
    Asked,
    /// Requested, and a `_Recv` waits for it.
    Needed(Instant, Waiter),
    Arrived(Result<Received>),
}

struct Question {
    key: RendezvousKey,
    since: Instant,
    done: Option<Waiter>,
    /// Dropped when the response has arrived or is no longer wanted.
    guard: Option<Box<dyn Send>>,
}

/// Identifies a wait, to cancel it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticket(u64);

/// A transfer that a step waits for.
#[derive(Clone, Debug)]
pub(crate) struct Wait {
    /// The transfer.
    pub key: RendezvousKey,
    /// When the wait began.
    pub since: Instant,
    /// It was requested from another task.
    pub is_remote: bool,
}

impl Transfers {
    pub fn new(step_id: u64, own_prefix: Arc<str>, fetch: Arc<dyn Fetch>) -> Transfers {
        Transfers { step_id, own_prefix, fetch, state: Mutex::default() }
    }

    /// Takes a value that is available already.
    pub fn take(&self, key: &RendezvousKey) -> Option<Received> {
        self.state.lock().take(key)
    }

    /// Waits for a value that is sent on this task.
    pub fn wait(&self, key: RendezvousKey, done: Waiter) -> Ticket {
        self.wait_and_flush(key, done, None)
    }

    fn wait_and_flush(&self, key: RendezvousKey, done: Waiter, flush: Option<Flush>) -> Ticket {
        let mut state = self.state.lock();
        state.next += 1;
        let number = state.next;
        let result = match (state.aborted.clone(), state.take(&key)) {
            (Some(reason), _) => Err(reason.into_derived()),
            (None, Some(value)) => value.picked_up(),
            (None, None) => {
                state.waiters.entry(key).or_default().push(Waiting { number, since: Instant::now(), done, flush });
                return Ticket(number);
            }
        };
        drop(state);
        done(result);
        Ticket(number)
    }

    /// Waits for several values that are sent on this task, for a task that requested them together.
    pub fn wait_for_group(self: &Arc<Self>, keys: &Arc<[RendezvousKey]>, delivery: &Delivery) -> Guard {
        let mut tickets = Vec::with_capacity(keys.len());
        for (index, key) in keys.iter().enumerate() {
            let each = delivery.each.clone();
            let done = Box::new(move |received| each(index, received));
            tickets.push(self.wait_and_flush(key.clone(), done, Some(delivery.flush.clone())));
        }
        Box::new(GiveUpGroup { transfers: self.clone(), keys: keys.clone(), tickets })
    }

    /// Prefetches the values that a graph will receive. Only the first call for a step has an effect.
    pub fn ask_ahead(self: &Arc<Self>, groups: &[Group]) {
        {
            let mut state = self.state.lock();
            if groups.is_empty() || state.aborted.is_some() || std::mem::replace(&mut state.has_asked_ahead, true) {
                return;
            }
            let keys = groups.iter().flat_map(|group| group.keys.iter());
            state.ahead.extend(keys.map(|key| (key.clone(), Ahead::Asked)));
        }
        for group in groups {
            let (this, keys) = (Arc::downgrade(self), group.keys.clone());
            let each: Each = Arc::new(move |index: usize, received: Result<Received>| {
                if let (Some(this), Some(key)) = (this.upgrade(), keys.get(index)) {
                    this.arrived(key, received);
                }
            });
            let guard = self.fetch.fetch_group(self.step_id, group, each);
            let unasked = {
                let mut state = self.state.lock();
                match guard {
                    Some(guard) => {
                        // An abort that came meanwhile has missed this guard; it is dropped with the table.
                        state.ahead_guards.push(guard);
                        Vec::new()
                    }
                    None => group.keys.iter().filter_map(|key| state.ahead.remove_entry(key)).collect(),
                }
            };
            for (key, ahead) in unasked {
                if let Ahead::Needed(_, done) = ahead {
                    self.ask(key, done);
                }
            }
        }
    }

    /// Handles the response for a prefetched value.
    fn arrived(&self, key: &RendezvousKey, received: Result<Received>) {
        let done = {
            let mut state = self.state.lock();
            match state.ahead.remove_entry(key) {
                Some((_, Ahead::Needed(_, done))) => done,
                Some((key, Ahead::Asked)) => {
                    state.ahead.insert(key, Ahead::Arrived(received));
                    return;
                }
                Some((_, Ahead::Arrived(_))) | None => return,
            }
        };
        done(received);
    }

    /// Flushes values for other tasks that are still buffered.
    pub fn flush_values(&self) {
        let unsent = {
            let mut state = self.state.lock();
            if state.unsent.is_empty() {
                return;
            }
            std::mem::take(&mut state.unsent)
        };
        unsent.iter().for_each(|flush| flush());
    }

    /// Cancels a wait; no effect if it is over.
    pub fn give_up(&self, key: &RendezvousKey, Ticket(number): Ticket) {
        let mut state = self.state.lock();
        let Some(waiters) = state.waiters.get_mut(key) else { return };
        let given_up: Vec<Waiting> = waiters.extract_if(.., |waiting| waiting.number == number).collect();
        if waiters.is_empty() {
            state.waiters.remove(key);
        }
        drop(state);
        drop(given_up);
    }

    /// True if the table can be dropped: it has no values, no waiters and no pending requests.
    pub fn is_empty(&self) -> bool {
        let state = self.state.lock();
        state.values.is_empty() && state.waiters.is_empty() && state.questions.is_empty() && state.ahead.is_empty()
    }

    /// The pending waits, local and remote.
    pub fn waits(&self) -> Vec<Wait> {
        let state = self.state.lock();
        let local = state.waiters.iter().flat_map(|(key, waiters)| {
            waiters.iter().map(|waiting| Wait { key: key.clone(), since: waiting.since, is_remote: false })
        });
        let remote = state.questions.values().map(|question| Wait {
            key: question.key.clone(),
            since: question.since,
            is_remote: true,
        });
        let ahead = state.ahead.iter().filter_map(|(key, ahead)| match ahead {
            Ahead::Needed(since, _) => Some(Wait { key: key.clone(), since: *since, is_remote: true }),
            Ahead::Asked | Ahead::Arrived(_) => None,
        });
        local.chain(remote).chain(ahead).collect()
    }

    /// Requests `key` from the task that sends it.
    fn ask(self: &Arc<Self>, key: RendezvousKey, done: Waiter) {
        let number = {
            let mut state = self.state.lock();
            if let Some(reason) = &state.aborted {
                let reason = reason.clone().into_derived();
                drop(state);
                return done(Err(reason));
            }
            state.next += 1;
            let number = state.next;
            let question = Question { key: key.clone(), since: Instant::now(), done: Some(done), guard: None };
            state.questions.insert(number, question);
            number
        };
        let this = Arc::downgrade(self);
        let answer = Box::new(move |received: Result<Received>| {
            let Some(this) = this.upgrade() else { return };
            let question = this.state.lock().questions.remove(&number);
            if let Some(done) = question.and_then(|mut question| question.done.take()) {
                done(received);
            }
        });
        let guard = self.fetch.fetch(self.step_id, &key, answer);
        // If the response has arrived meanwhile, there is nothing left to cancel.
        if let Some(question) = self.state.lock().questions.get_mut(&number) {
            question.guard = Some(guard);
        }
    }
}

struct GiveUpGroup {
    transfers: Arc<Transfers>,
    keys: Arc<[RendezvousKey]>,
    tickets: Vec<Ticket>,
}

impl Drop for GiveUpGroup {
    fn drop(&mut self) {
        for (key, &ticket) in self.keys.iter().zip(&self.tickets) {
            self.transfers.give_up(key, ticket);
        }
    }
}

/// The rendezvous that the executor is given. It wraps the shared table, because responses need a handle to it.
pub(crate) struct StepTransfers(pub Arc<Transfers>);

impl Rendezvous for StepTransfers {
    fn send(&self, key: RendezvousKey, value: Received) -> Result<()> {
        let mut state = self.0.state.lock();
        if let Some(reason) = &state.aborted {
            return Err(reason.clone().into_derived());
        }
        if let Some(waiters) = state.waiters.get_mut(&key) {
            let waiting = waiters.remove(0);
            if waiters.is_empty() {
                state.waiters.remove(&key);
            }
            drop(state);
            (waiting.done)(Ok(value));
            if let Some(flush) = waiting.flush {
                let mut state = self.0.state.lock();
                if !state.unsent.iter().any(|known| Arc::ptr_eq(known, &flush)) {
                    state.unsent.push(flush);
                }
            }
            return Ok(());
        }
        state.values.entry(key).or_default().push(value);
        Ok(())
    }

    fn recv(&self, key: RendezvousKey, done: Waiter) {
        if key.edge.starts_with(&*self.0.own_prefix) {
            self.0.wait(key, done);
            return;
        }
        let mut state = self.0.state.lock();
        match state.ahead.remove_entry(&key) {
            Some((_, Ahead::Arrived(received))) => {
                drop(state);
                done(received);
            }
            Some((key, Ahead::Asked)) => {
                state.ahead.insert(key, Ahead::Needed(Instant::now(), done));
            }
            // It was received before; a second receive makes a request of its own.
            other @ (Some((_, Ahead::Needed(..))) | None) => {
                state.ahead.extend(other);
                drop(state);
                self.0.ask(key, done);
            }
        }
    }
}

impl StepRendezvous for StepTransfers {
    fn abort(&self, reason: Error) {
        let (waiters, questions, ahead, guards) = {
            let mut state = self.0.state.lock();
            if state.aborted.is_some() {
                return;
            }
            state.aborted = Some(reason.clone());
            state.values.clear();
            (
                std::mem::take(&mut state.waiters),
                std::mem::take(&mut state.questions),
                std::mem::take(&mut state.ahead),
                std::mem::take(&mut state.ahead_guards),
            )
        };
        let needed = ahead.into_values().filter_map(|ahead| match ahead {
            Ahead::Needed(_, done) => Some(done),
            Ahead::Asked | Ahead::Arrived(_) => None,
        });
        for waiting in waiters.into_values().flatten() {
            (waiting.done)(Err(reason.clone()));
            if let Some(flush) = waiting.flush {
                flush();
            }
        }
        for done in questions.into_values().filter_map(|question| question.done).chain(needed) {
            done(Err(reason.clone()));
        }
        drop(guards);
    }

    fn flush(&self) {
        self.0.flush_values();
    }
}
