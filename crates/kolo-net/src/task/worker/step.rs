//! Steps on one task: started by `RunGraph`, serve tensors to other tasks, and are ended by `CleanupGraph`.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use kolo_core::{Error, Result};
use kolo_ops::{Received, RendezvousKey};
use kolo_runtime::{NodeTrace, NodeWait, PartView, StepKind, StepRendezvous, TaskGraph, TaskStep};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot, watch};

use super::transfers::{Fetch, StepTransfers, Ticket, Transfers};

/// The number of finished steps that are remembered, so that a late request gets an error at once.
const N_OVER: usize = 10_000;

/// With fewer steps than this, a sweep is not worthwhile.
const LEAST_SWEPT: usize = 1_000;

/// All steps of a task that are not over.
pub(crate) struct Steps {
    own_prefix: Arc<str>,
    fetch: Arc<dyn Fetch>,
    state: Mutex<StepState>,
}

#[derive(Default)]
struct StepState {
    steps: HashMap<u64, Arc<Step>>,
    over: HashSet<u64>,
    over_order: VecDeque<u64>,
    /// When the number of steps reaches this, steps that exist only because of requests are swept.
    sweep_at: usize,
    n_ended: u64,
    last_ended: Option<Instant>,
}

/// One step on this task.
pub(crate) struct Step {
    pub id: u64,
    pub transfers: Arc<Transfers>,
    since: Instant,
    started: SystemTime,
    begun: AtomicBool,
    running: Mutex<Option<TaskStep>>,
    /// The step's result, once it has ended: its error, if it failed.
    end: watch::Sender<Option<Option<Error>>>,
    /// Why the step was cancelled, if it was.
    stop: watch::Sender<Option<Error>>,
}

impl Steps {
    pub fn new(own_prefix: Arc<str>, fetch: Arc<dyn Fetch>) -> Steps {
        Steps { own_prefix, fetch, state: Mutex::default() }
    }

    /// The step with this id. It is created on first mention, because another task may request a tensor before the
    /// master has told this one what to run.
    pub fn find_or_create(&self, id: u64) -> Result<Arc<Step>> {
        let mut state = self.state.lock();
        if state.over.contains(&id) {
            return Err(Error::aborted(format!("step {id} is over on this task")).into_derived());
        }
        if state.steps.len() >= state.sweep_at {
            state.steps.retain(|_, step| step.is_begun() || !step.transfers.is_empty());
            state.sweep_at = (2 * state.steps.len()).max(LEAST_SWEPT);
        }
        let make = || {
            Arc::new(Step {
                id,
                transfers: Arc::new(Transfers::new(id, self.own_prefix.clone(), self.fetch.clone())),
                since: Instant::now(),
                started: SystemTime::now(),
                begun: AtomicBool::new(false),
                running: Mutex::new(None),
                end: watch::Sender::new(None),
                stop: watch::Sender::new(None),
            })
        };
        Ok(state.steps.entry(id).or_insert_with(make).clone())
    }

    /// Flushes buffered requests to other tasks.
    pub fn flush(&self) {
        self.fetch.flush();
    }

    /// Ends a step on the master's request. Pending waits of the step fail.
    pub fn clean_up(&self, id: u64) {
        let step = {
            let mut state = self.state.lock();
            if state.over.insert(id) {
                state.over_order.push_back(id);
                if state.over_order.len() > N_OVER
                    && let Some(oldest) = state.over_order.pop_front()
                {
                    state.over.remove(&oldest);
                }
            }
            let step = state.steps.remove(&id);
            if step.as_ref().is_some_and(|step| step.is_begun()) {
                state.n_ended += 1;
                state.last_ended = Some(Instant::now());
            }
            step
        };
        if let Some(step) = step {
            step.stop(Error::aborted(format!("step {id} was ended by its master")).into_derived());
        }
    }

    /// How many steps have ended, and how long ago the last one did.
    pub fn progress(&self) -> (u64, Option<Duration>) {
        let state = self.state.lock();
        (state.n_ended, state.last_ended.map(|at| at.elapsed()))
    }

    /// The steps that are known and not over.
    pub fn all(&self) -> Vec<Arc<Step>> {
        self.state.lock().steps.values().cloned().collect()
    }
}

impl Step {
    /// Starts the graph's nodes; a step runs one graph.
    pub fn begin(&self, graph: &TaskGraph, kind: StepKind) -> Result<()> {
        if self.begun.swap(true, Ordering::AcqRel) {
            return Err(Error::aborted(format!("step {} runs on this task already", self.id)));
        }
        let end = self.end.clone();
        let transfers = Arc::new(StepTransfers(self.transfers.clone()));
        let running = graph.start(self.id, transfers, kind, Box::new(move |error| drop(end.send_replace(Some(error)))));
        *self.running.lock() = Some(running);
        Ok(())
    }

    pub fn is_begun(&self) -> bool {
        self.begun.load(Ordering::Acquire)
    }

    /// When this task created the step.
    pub fn since(&self) -> Instant {
        self.since
    }

    pub fn started(&self) -> SystemTime {
        self.started
    }

    /// Asks what the step does.
    pub fn look(&self) -> Asked {
        let running = self.running.lock().clone();
        let (tell, told) = mpsc::unbounded_channel();
        let n_parts = running.map_or(0, |running| running.look(move |view| drop(tell.send(view))));
        Asked { n_parts, told }
    }

    pub fn take_trace(&self) -> Vec<NodeTrace> {
        self.running.lock().as_ref().map(TaskStep::take_trace).unwrap_or_default()
    }

    /// Waits until all nodes have run.
    pub async fn end(&self) -> Result<()> {
        let mut end = self.end.subscribe();
        let end = end.wait_for(Option::is_some).await;
        match end.ok().and_then(|end| end.clone()) {
            Some(Some(error)) => Err(error),
            Some(None) => Ok(()),
            None => Err(Error::cancelled("the task is ending")),
        }
    }

    /// Waits until a value is sent on this task. A cancelled wait leaves the value for others.
    pub async fn wait_for(self: &Arc<Self>, key: RendezvousKey) -> Result<Received> {
        let (sender, receiver) = oneshot::channel();
        let done = Box::new(move |received| drop(sender.send(received)));
        let ticket = self.transfers.wait(key.clone(), done);
        let guard = GiveUp { step: self.clone(), key, ticket };
        let received = receiver.await.unwrap_or_else(|_| Err(Error::cancelled("the task is ending")));
        drop(guard);
        received
    }

    /// The error that an echo of it came from, if that happened in this task.
    pub fn cause_of(&self, error: Error) -> Error {
        let cause = || self.running.lock().as_ref().and_then(TaskStep::error).filter(|cause| !cause.is_derived());
        if error.is_derived() { cause().unwrap_or(error) } else { error }
    }

    /// Waits until the step is cancelled, and returns why.
    pub async fn stopped(&self) -> Error {
        let mut stop = self.stop.subscribe();
        let reason = stop.wait_for(Option::is_some).await;
        reason.ok().and_then(|reason| reason.clone()).unwrap_or_else(|| Error::cancelled("the task is ending"))
    }

    /// Cancels the step: kernels that wait return, and pending requests for its tensors fail.
    pub fn stop(&self, reason: Error) {
        self.stop.send_replace(Some(reason.clone()));
        let running = self.running.lock().clone();
        let has_ended = self.end.borrow().is_some();
        if let Some(running) = running.filter(|_| !has_ended) {
            running.fail(reason.clone());
        }
        StepTransfers(self.transfers.clone()).abort(reason);
    }

    /// Returns a guard that cancels the step if the call that runs it is dropped.
    pub fn stop_on_drop(self: &Arc<Self>) -> StopOnDrop {
        StopOnDrop(Some(self.clone()))
    }
}

/// A question what a step does, which its devices answer as soon as they can.
pub(crate) struct Asked {
    n_parts: usize,
    told: mpsc::UnboundedReceiver<PartView>,
}

/// What a step does.
pub(crate) struct Activity {
    /// The nodes that wait.
    pub waits: Vec<NodeWait>,
    /// The number of threads that run its kernels.
    pub n_runners: usize,
    /// The number of ready nodes that no thread runs.
    pub n_unattended: usize,
}

impl Asked {
    /// What is known by then. A device that has not answered is so busy that it runs at least one kernel.
    pub async fn answer(mut self, until: tokio::time::Instant) -> Activity {
        let mut views = Vec::with_capacity(self.n_parts);
        while views.len() < self.n_parts {
            match tokio::time::timeout_at(until, self.told.recv()).await {
                Ok(Some(view)) => views.push(view),
                Ok(None) | Err(_) => break,
            }
        }
        Activity {
            n_runners: views.iter().map(|view| view.n_runners).sum::<usize>() + self.n_parts - views.len(),
            n_unattended: views.iter().map(|view| view.n_unattended).sum(),
            waits: views.into_iter().flat_map(|view| view.waits).collect(),
        }
    }
}

pub(crate) struct StopOnDrop(Option<Arc<Step>>);

impl StopOnDrop {
    pub fn disarm(mut self) {
        self.0 = None;
    }
}

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        if let Some(step) = self.0.take() {
            step.stop(Error::cancelled("the master has given up the step"));
        }
    }
}

struct GiveUp {
    step: Arc<Step>,
    key: RendezvousKey,
    ticket: Ticket,
}

impl Drop for GiveUp {
    fn drop(&mut self) {
        self.step.transfers.give_up(&self.key, self.ticket);
    }
}
