//! One run of a signature: the states of the parts, the waiting caller or callback, and the first error.

mod part;
mod runner;
mod waits;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_core::{Error, Memory, Result, Tensor};
use kolo_ops::{CancelToken, Rendezvous, ResourceStore};

use super::may_wait::MayWait;
use super::part_state::PartState;
use super::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use super::sync::thread::{self, Thread};
use super::sync::{Mutex, patience};
use crate::capture::limits::Limits;
use crate::compile::part::PartPlan;
use crate::executor::rendezvous::{LocalRendezvous, StepRendezvous};
use crate::trace::{NodeTrace, TraceSink};
pub(crate) use part::Desk;
use part::{Held, Mail, StepPart};
use runner::Share;
pub use waits::{NodeWait, PartView};

/// How long the caller spins for work before it parks.
const SPIN: Duration = patience(40);

/// How long a cancelled step may take to unwind before the caller stops waiting for it.
const UNWIND: Duration = Duration::from_secs(10);

/// A step in flight.
pub(crate) struct Step {
    pub id: u64,
    parts: Vec<StepPart>,
    services: Services,
    error: Mutex<Option<Error>>,
    /// The step has failed: no new node starts. Runners read it before each node, so that whoever stops a step needs no
    /// lock of its parts.
    stopped: AtomicBool,
    n_unfinished: AtomicUsize,
    /// When the caller stops waiting, if it ever does.
    deadline: Mutex<Option<Instant>>,
    /// No thread waits for it.
    is_detached: bool,
    caller: Caller,
    /// Called once when a detached step is over.
    on_end: Mutex<Option<OnEnd>>,
    trace: Option<TraceSink>,
    start: Instant,
}

/// Callback for the end of a step, with its first error, if any.
pub(crate) type OnEnd = Box<dyn FnOnce(Option<Error>) + Send>;

/// The thread in `Session::run`, which runs nodes and waits.
struct Caller {
    thread: Mutex<Thread>,
    notified: AtomicBool,
}

/// The services that kernels get from the step, except those of their own device.
struct Services {
    step_resources: Arc<ResourceStore>,
    transfers: Arc<dyn StepRendezvous>,
    rendezvous: Arc<dyn Rendezvous>,
    cancel: Arc<CancelToken>,
}

impl Step {
    /// A step over these parts, ready to run. Feeds that arrive later count as pending.
    pub fn new(
        id: u64,
        plans: &[Arc<PartPlan>],
        cancel: Arc<CancelToken>,
        traced: bool,
        feeds_come_later: bool,
    ) -> Arc<Step> {
        // The caller runs the part with the most nodes; the others run on their devices' threads.
        let for_caller = (0..plans.len()).max_by_key(|&i| plans[i].nodes.len());
        let transfers = Arc::new(LocalRendezvous::default());
        Step::make(id, plans, transfers, cancel, traced, (for_caller, feeds_come_later), None)
    }

    /// A step that no thread waits for: [`Step::start`] begins it, and `on_end` is called when it is over.
    pub fn detached(
        id: u64,
        plans: &[Arc<PartPlan>],
        transfers: Arc<dyn StepRendezvous>,
        traced: bool,
        on_end: OnEnd,
    ) -> Arc<Step> {
        Step::make(id, plans, transfers, CancelToken::new(), traced, (None, false), Some(on_end))
    }

    fn make(
        id: u64,
        plans: &[Arc<PartPlan>],
        transfers: Arc<dyn StepRendezvous>,
        cancel: Arc<CancelToken>,
        traced: bool,
        (for_caller, feeds_come_later): (Option<usize>, bool),
        on_end: Option<OnEnd>,
    ) -> Arc<Step> {
        let parts = plans
            .iter()
            .enumerate()
            .map(|(i, plan)| {
                let n_waiting = if feeds_come_later { plan.feeds.len() } else { 0 };
                StepPart::new(plan, n_waiting, Some(i) == for_caller)
            })
            .collect();
        let services = Services {
            step_resources: ResourceStore::new("step", "step"),
            rendezvous: transfers.clone(),
            transfers,
            cancel,
        };
        let start = Instant::now();
        Arc::new(Step {
            id,
            parts,
            services,
            error: Mutex::new(None),
            stopped: AtomicBool::new(false),
            n_unfinished: AtomicUsize::new(plans.len()),
            deadline: Mutex::new(None),
            is_detached: on_end.is_some(),
            caller: Caller { thread: Mutex::new(thread::current()), notified: AtomicBool::new(false) },
            on_end: Mutex::new(on_end),
            trace: traced.then(|| TraceSink::new(start)),
            start,
        })
    }

    /// Delivers feeds, by number.
    pub fn feed(self: &Arc<Self>, values: &[(usize, &Tensor)], was_waited_for: bool) {
        for (index, part) in self.parts.iter().enumerate() {
            for feed in &part.plan.feeds {
                let Some((_, value)) = values.iter().find(|(i, _)| *i == feed.feed as usize) else { continue };
                let device = &part.plan.unit.device;
                let start = Instant::now();
                let copied = match feed.on_device {
                    true => device.copy(value, device.memory()).map(|(copy, _)| Some(copy)),
                    false => Ok(None),
                };
                if let (true, Some(sink)) = (feed.on_device, &self.trace) {
                    sink.record_copy(format!("feed {}", feed.feed), &part.plan.unit.name, start, value.n_bytes());
                }
                let copied = copied.unwrap_or_else(|error| {
                    self.fail(error.and(format!(" (feed {} of {})", feed.feed, part.plan.unit.name)));
                    None
                });
                let mut state = self.hold(index, MayWait::of_a_caller());
                if !self.is_stopped() {
                    state.feed(&part.plan, feed.edges.clone(), copied.as_ref().unwrap_or(value));
                }
                if was_waited_for {
                    state.n_waiting -= 1;
                }
            }
        }
    }

    /// Begins a detached step. Nodes that cost less than a hand-over run on this thread, all others on the devices'
    /// threads. Waits for nobody.
    pub fn start(self: &Arc<Self>) {
        if self.parts.is_empty() {
            return self.ended();
        }
        for index in 0..self.parts.len() {
            self.post(index, Mail::Look);
        }
    }

    /// Runs until the step is over, `enough` returns true, or `deadline`. The calling thread runs nodes too.
    pub fn run(self: &Arc<Self>, deadline: Option<Instant>, enough: &dyn Fn(&Arc<Step>) -> bool) {
        let may_wait = MayWait::of_a_caller();
        for index in 0..self.parts.len() {
            if !self.parts[index].for_caller {
                self.spawn_runner(index, may_wait);
            }
        }
        if deadline.is_some() {
            *self.deadline.lock() = deadline;
        }
        let mut deadline = deadline;
        loop {
            for index in 0..self.parts.len() {
                if self.parts[index].for_caller {
                    self.run_part(index, self.join(index, may_wait), Share::Caller(may_wait, deadline));
                }
            }
            if self.is_over() || enough(self) {
                return;
            }
            if !self.wait(deadline) {
                let waiting = self.describe_waits();
                let unwinding = self.error.lock().is_some();
                if unwinding {
                    // A kernel does not return; the step is abandoned to it.
                    return;
                }
                let after = self.start.elapsed();
                self.fail(Error::deadline_exceeded(format!(
                    "the step timed out after {after:.1?}; it waits for {waiting}"
                )));
                deadline = Some(Instant::now() + UNWIND);
            }
        }
    }

    /// The deadline and the cancellation for waits of this step outside of kernels.
    fn limits(&self) -> Limits {
        Limits::new(*self.deadline.lock(), self.services.cancel.clone())
    }

    /// Makes the calling thread the one to wake up: calls of a partial run may come from several threads.
    pub fn adopt_caller(&self) {
        *self.caller.thread.lock() = thread::current();
    }

    /// True when nothing is running and nothing is pending.
    pub fn is_over(&self) -> bool {
        self.n_unfinished.load(Ordering::Acquire) == 0
    }

    /// The result of the step: its first error, or the fetches, by number.
    pub fn finish(self: &Arc<Self>, n_fetches: usize) -> Result<Vec<Option<Tensor>>> {
        if let Some(error) = self.error.lock().clone() {
            return Err(error);
        }
        let mut values: Vec<Option<Tensor>> = vec![None; n_fetches];
        self.collect(&mut values)?;
        Ok(values)
    }

    /// Moves the fetches that have arrived to `values`, by number.
    pub fn collect(self: &Arc<Self>, values: &mut [Option<Tensor>]) -> Result<()> {
        // All copies to the host are started before the first is waited for.
        let mut copies = Vec::new();
        for (index, part) in self.parts.iter().enumerate() {
            let mut to_host = |fetch: u32, value: Tensor| -> Result<Tensor> {
                if value.memory().is_host() {
                    return Ok(value);
                }
                let start = Instant::now();
                let (copy, event) = part.plan.unit.device.copy(&value, Memory::Host)?;
                copies.push((event, fetch, &part.plan.unit.name, start, copy.n_bytes()));
                Ok(copy)
            };
            for (fetch, value) in self.hold(index, MayWait::of_a_caller()).fetched.drain(..) {
                values[fetch as usize] = Some(to_host(fetch, value?)?);
            }
            for (fetch, value) in &part.plan.fetched_constants {
                values[*fetch as usize] = Some(to_host(*fetch, value.clone())?);
            }
        }
        for (event, fetch, device, start, n_bytes) in copies {
            if let Some(event) = event {
                event.wait()?;
            }
            if let Some(sink) = &self.trace {
                sink.record_copy(format!("fetch {fetch}"), device, start, n_bytes);
            }
        }
        Ok(())
    }

    /// The fetches in their current memory, on the host or on a GPU, by number; the step's first error if it failed.
    pub fn take_fetched(self: &Arc<Self>) -> Result<Vec<(usize, Tensor)>> {
        if let Some(error) = self.error.lock().clone() {
            return Err(error);
        }
        let mut values = Vec::new();
        for (index, part) in self.parts.iter().enumerate() {
            for (fetch, value) in self.hold(index, MayWait::of_a_caller()).fetched.drain(..) {
                values.push((fetch as usize, value?));
            }
            values.extend(part.plan.fetched_constants.iter().map(|(fetch, value)| (*fetch as usize, value.clone())));
        }
        Ok(values)
    }

    /// Whether these fetches, by number, have arrived.
    pub fn has_fetched(self: &Arc<Self>, fetches: &[usize]) -> bool {
        let mut arrived = Vec::new();
        for (index, part) in self.parts.iter().enumerate() {
            let state = self.hold(index, MayWait::of_a_caller());
            arrived.extend(state.fetched.iter().map(|(fetch, _)| *fetch as usize));
            arrived.extend(part.plan.fetched_constants.iter().map(|(fetch, _)| *fetch as usize));
        }
        self.error.lock().is_some() || fetches.iter().all(|fetch| arrived.contains(fetch))
    }

    /// The first error, if the step has failed.
    pub fn error(&self) -> Option<Error> {
        self.error.lock().clone()
    }

    /// The trace of each node, if requested.
    pub fn take_trace(&self) -> Vec<NodeTrace> {
        self.trace.as_ref().map(TraceSink::take).unwrap_or_default()
    }

    /// Stops the step. The first error is kept; later ones are its consequences. Waits for nobody: network threads call
    /// this.
    pub fn fail(self: &Arc<Self>, error: Error) {
        {
            let mut first = self.error.lock();
            match &*first {
                None => *first = Some(error.clone()),
                Some(earlier) if earlier.is_derived() && !error.is_derived() => *first = Some(error.clone()),
                Some(_) => return,
            }
        }
        self.stopped.store(true, Ordering::Release);
        let echo = Error::cancelled(format!("the step was stopped: {error}")).into_derived();
        self.services.transfers.abort(echo.clone());
        self.services.cancel.cancel(echo);
        // Runners leave by themselves, and the last one finishes its part; so does the last pending kernel, which was
        // just cancelled. A part that nobody attends to is left.
        for index in 0..self.parts.len() {
            self.post(index, Mail::Look);
        }
    }

    /// True once the step has failed: nothing more is run.
    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// Parks the caller until there is work. False at the deadline.
    fn wait(&self, deadline: Option<Instant>) -> bool {
        let start = Instant::now();
        while !self.caller.notified.swap(false, Ordering::AcqRel) {
            let now = Instant::now();
            if deadline.is_some_and(|deadline| now >= deadline) {
                return false;
            }
            if now - start < SPIN {
                for _ in 0..32 {
                    std::hint::spin_loop();
                }
                continue;
            }
            match deadline {
                Some(deadline) => thread::park_timeout(deadline - now),
                None => thread::park(),
            }
        }
        true
    }

    fn notify_caller(&self) {
        self.caller.notified.store(true, Ordering::Release);
        self.caller.thread.lock().unpark();
    }

    fn finish_part_if_idle(&self, part: &StepPart, mut state: Held<'_>) {
        let is_over = self.mark_finished(&mut state);
        drop(state);
        if is_over {
            self.part_ended(part);
        }
    }

    /// Marks a part as finished if nothing runs and nothing is pending in it. If true, the caller must call
    /// [`Step::part_ended`] after it has released the state.
    fn mark_finished(&self, state: &mut PartState) -> bool {
        if self.is_stopped() {
            // A kernel that was running when the step failed has made others ready, which no runner takes any more.
            state.drop_ready();
        }
        if state.finished || state.n_runners > 0 || state.n_waiting > 0 || state.has_ready() {
            return false;
        }
        state.finished = true;
        true
    }

    /// Called once for each part, when nothing runs and nothing is pending in it.
    fn part_ended(&self, part: &StepPart) {
        let is_last = self.n_unfinished.fetch_sub(1, Ordering::AcqRel) == 1;
        if is_last || part.for_caller {
            self.notify_caller();
        }
        if is_last {
            self.ended();
        }
    }

    /// Calls the callback for the end of a detached step.
    fn ended(&self) {
        let on_end = self.on_end.lock().take();
        if let Some(on_end) = on_end {
            on_end(self.error());
        }
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        let was_stopped = self.is_stopped();
        for part in self.parts.drain(..) {
            part.recycle(was_stopped);
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests;
