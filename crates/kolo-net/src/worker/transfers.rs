//! The transfers of one step on one task: values that kernels here have sent and nobody has fetched yet, and those who
//! wait for values.
//!
//! A `_Send` leaves its value here and is done. A `_Recv` whose sender is a device of this task waits here; one whose
//! sender is elsewhere asks that task, which answers from its own table. Either side may come first, and a question may
//! come before this task has heard of the step at all.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use kolo_core::{Error, Result};
use kolo_ops::{Received, Rendezvous, RendezvousKey};
use kolo_runtime::StepRendezvous;
use parking_lot::Mutex;

/// Asks another task for a value.
pub(crate) trait Fetch: Send + Sync {
    /// Calls `done` once with the value or an error, on any thread. Dropping the guard gives up the question.
    fn fetch(&self, step_id: u64, key: &RendezvousKey, done: Waiter) -> Box<dyn Send>;
}

/// Hears of a value.
pub(crate) type Waiter = Box<dyn FnOnce(Result<Received>) + Send>;

/// One step's table.
pub(crate) struct Transfers {
    step_id: u64,
    /// `/job:ps/replica:0/task:0/`, which names of own devices begin with.
    own_prefix: Arc<str>,
    fetch: Arc<dyn Fetch>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    values: HashMap<RendezvousKey, Vec<Received>>,
    waiters: HashMap<RendezvousKey, Vec<Waiting>>,
    /// Questions to other tasks that have not been answered, by number.
    questions: HashMap<u64, Question>,
    next: u64,
    aborted: Option<Error>,
}

impl State {
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
}

struct Question {
    key: RendezvousKey,
    since: Instant,
    done: Option<Waiter>,
    /// Dropped when the answer is there or not wanted any more.
    guard: Option<Box<dyn Send>>,
}

/// A wait that can be called off.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticket(u64);

/// One thing a step waits for.
#[derive(Clone, Debug)]
pub(crate) struct Wait {
    /// The transfer.
    pub key: RendezvousKey,
    /// Since when.
    pub since: Instant,
    /// Another task has been asked for it.
    pub is_remote: bool,
}

impl Transfers {
    pub fn new(step_id: u64, own_prefix: Arc<str>, fetch: Arc<dyn Fetch>) -> Transfers {
        Transfers { step_id, own_prefix, fetch, state: Mutex::default() }
    }

    /// Takes a value that is here already.
    pub fn take(&self, key: &RendezvousKey) -> Option<Received> {
        self.state.lock().take(key)
    }

    /// Waits for a value that is sent on this task.
    pub fn wait(&self, key: RendezvousKey, done: Waiter) -> Ticket {
        let mut state = self.state.lock();
        state.next += 1;
        let number = state.next;
        let result = match (state.aborted.clone(), state.take(&key)) {
            (Some(reason), _) => Err(reason.into_derived()),
            (None, Some(value)) => Ok(value),
            (None, None) => {
                state.waiters.entry(key).or_default().push(Waiting { number, since: Instant::now(), done });
                return Ticket(number);
            }
        };
        drop(state);
        done(result);
        Ticket(number)
    }

    /// Calls a wait off; nothing happens if it is over.
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

    /// True if there is nothing in it that somebody could miss.
    pub fn is_empty(&self) -> bool {
        let state = self.state.lock();
        state.values.is_empty() && state.waiters.is_empty() && state.questions.is_empty()
    }

    /// What is waited for.
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
        local.chain(remote).collect()
    }

    /// Asks the task that sends `key`.
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
        // The answer may have come meanwhile; then there is nothing left to guard.
        if let Some(question) = self.state.lock().questions.get_mut(&number) {
            question.guard = Some(guard);
        }
    }
}

/// What the executor is given: the table, which questions must be able to find again.
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
            return Ok(());
        }
        state.values.entry(key).or_default().push(value);
        Ok(())
    }

    fn recv(&self, key: RendezvousKey, done: Waiter) {
        match key.edge.starts_with(&*self.0.own_prefix) {
            true => drop(self.0.wait(key, done)),
            false => self.0.ask(key, done),
        }
    }
}

impl StepRendezvous for StepTransfers {
    fn abort(&self, reason: Error) {
        let (waiters, questions) = {
            let mut state = self.0.state.lock();
            if state.aborted.is_some() {
                return;
            }
            state.aborted = Some(reason.clone());
            state.values.clear();
            (std::mem::take(&mut state.waiters), std::mem::take(&mut state.questions))
        };
        let waiters = waiters.into_values().flatten().map(|waiting| waiting.done);
        for done in waiters.chain(questions.into_values().filter_map(|question| question.done)) {
            done(Err(reason.clone()));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use kolo_core::Tensor;

    use super::*;

    /// Keeps questions until the test answers them.
    #[derive(Default)]
    struct Asked(Mutex<Vec<(String, Waiter)>>);

    impl Fetch for Asked {
        fn fetch(&self, _: u64, key: &RendezvousKey, done: Waiter) -> Box<dyn Send> {
            self.0.lock().push((key.to_string(), done));
            Box::new(())
        }
    }

    fn key(task: u32) -> RendezvousKey {
        let device = |task| format!("/job:w/replica:0/task:{task}/device:CPU:0");
        RendezvousKey::parse(&format!("{};0000000000000001;{};edge;0:0", device(task), device(0))).unwrap()
    }

    fn table(asked: &Arc<Asked>) -> Arc<Transfers> {
        Arc::new(Transfers::new(7, "/job:w/replica:0/task:0/".into(), asked.clone()))
    }

    fn value(x: f32) -> Received {
        Received { tensor: Tensor::scalar(x), is_dead: false }
    }

    fn recv(table: &Arc<Transfers>, key: RendezvousKey) -> mpsc::Receiver<Result<f32>> {
        let (sender, receiver) = mpsc::channel();
        let done = Box::new(move |received: Result<Received>| {
            let value = received.and_then(|received| received.tensor.scalar_value::<f32>());
            sender.send(value).expect("the test listens");
        });
        StepTransfers(table.clone()).recv(key, done);
        receiver
    }

    #[test]
    fn own_values_meet_here_and_others_are_asked_for() {
        let asked = Arc::new(Asked::default());
        let table = table(&asked);
        let waiting = recv(&table, key(0));
        assert!(waiting.try_recv().is_err());
        StepTransfers(table.clone()).send(key(0), value(1.0)).unwrap();
        assert_eq!(waiting.try_recv().unwrap(), Ok(1.0));

        let waiting = recv(&table, key(1));
        assert!(table.waits()[0].is_remote);
        let (text, done) = asked.0.lock().pop().unwrap();
        assert_eq!(text, key(1).to_string());
        done(Ok(value(2.0)));
        assert_eq!(waiting.try_recv().unwrap(), Ok(2.0));
        assert!(table.is_empty());
    }

    #[test]
    fn aborting_answers_everyone_and_late_answers_are_dropped() {
        let asked = Arc::new(Asked::default());
        let table = table(&asked);
        let waits = [recv(&table, key(0)), recv(&table, key(1))];
        StepTransfers(table.clone()).abort(Error::cancelled("stop"));
        for wait in waits {
            assert_eq!(wait.try_recv().unwrap().unwrap_err().message(), "stop");
        }
        let (_, done) = asked.0.lock().pop().unwrap();
        done(Ok(value(1.0)));
        assert!(recv(&table, key(0)).try_recv().unwrap().is_err());
        assert!(StepTransfers(table.clone()).send(key(0), value(1.0)).is_err());
    }

    #[test]
    fn a_wait_that_was_given_up_takes_no_value() {
        let table = table(&Arc::default());
        let ticket = table.wait(key(0), Box::new(|_| panic!("nobody waits any more")));
        table.give_up(&key(0), ticket);
        StepTransfers(table.clone()).send(key(0), value(1.0)).unwrap();
        assert!(table.take(&key(0)).is_some());
        assert!(table.take(&key(0)).is_none());
    }
}
