//! One run of a signature: the parts' states, who waits for them, and the first error.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::Thread;
use std::time::{Duration, Instant};

use kolo_core::{Error, Memory, Result, Tensor};
use kolo_device::cuda::{CudaDevice, outside_capture};
use kolo_graph::{Flow, Node};
use kolo_ops::{
    CancelToken, Done, FrameIteration, Input, KernelCtx, Outcome, OutputValue, Rendezvous, ResourceStore, StepServices,
};
use parking_lot::{Mutex, MutexGuard};

use super::capture::is_constant_call;
use super::plan::{NodePlan, PartPlan, PlanKernel};
use super::state::{State, Token, flow_outputs, read_references};
use crate::rendezvous::{LocalRendezvous, StepRendezvous};
use crate::trace::{NodeTrace, TraceSink};

/// How long the caller watches for work before it parks.
const SPIN: Duration = Duration::from_micros(40);

/// How long a cancelled step may take to unwind before the caller stops waiting for it.
const UNWIND: Duration = Duration::from_secs(10);

/// How many steps may run within each other on one thread's stack.
const MAX_DEPTH: usize = 4;

/// How long a thread that has other things to do runs nodes of a step.
const PATIENCE: Duration = Duration::from_millis(2);

/// Bytes of inputs from which on what was sent should not wait for a kernel.
const LARGE: usize = 128 << 10;

/// What a runner takes on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Share {
    /// Every node.
    All,
    /// Nodes that cost less than a hand-off.
    Small,
}

/// A step in flight.
pub(crate) struct Step {
    pub id: u64,
    parts: Vec<StepPart>,
    services: Services,
    error: Mutex<Option<Error>>,
    n_unfinished: AtomicUsize,
    /// No thread waits in it.
    is_detached: bool,
    caller: Caller,
    /// Called once when a step that nobody waits in is over.
    on_end: Mutex<Option<OnEnd>>,
    trace: Option<TraceSink>,
    start: Instant,
}

struct StepPart {
    plan: Arc<PartPlan>,
    state: Mutex<State>,
    /// The caller runs this part's nodes too.
    for_caller: bool,
}

/// A node that waits.
#[derive(Clone)]
pub struct NodeWait {
    /// The node.
    pub node: Arc<Node>,
    /// Its device.
    pub device: Arc<str>,
    /// For how long it has waited.
    pub lasts: Duration,
}

impl std::fmt::Display for NodeWait {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} '{}' on {} for {:.1?}", self.node.op(), self.node.name, self.device, self.lasts)
    }
}

/// Hears how a step ended: with its first error, or without one.
pub(crate) type OnEnd = Box<dyn FnOnce(Option<Error>) + Send>;

/// The thread in `Session::run`, which runs nodes and waits.
struct Caller {
    thread: Mutex<Thread>,
    notified: AtomicBool,
}

/// What kernels see of the step, apart from their own device.
struct Services {
    step_resources: Arc<ResourceStore>,
    transfers: Arc<dyn StepRendezvous>,
    rendezvous: Arc<dyn Rendezvous>,
    cancel: Arc<CancelToken>,
}

/// One node that is about to be computed.
#[derive(Clone, Copy)]
struct Call<'a> {
    token: Token,
    node: &'a NodePlan,
    frame_iteration: FrameIteration,
}

impl Call<'_> {
    fn ctx<'b>(
        &'b self,
        plan: &'b PartPlan,
        inputs: &'b mut [Input],
        outputs: &'b mut [Option<OutputValue>],
        services: &'b DeviceServices<'b>,
    ) -> KernelCtx<'b> {
        KernelCtx {
            node: &self.node.node,
            device: match plan.unit.device.host() {
                Some(host) if self.node.on_host => &**host,
                _ => &*plan.unit.device,
            },
            step: services,
            inputs,
            outputs,
            frame_iteration: self.frame_iteration,
            is_dead: self.token.is_dead,
        }
    }
}

/// [`StepServices`] for one device.
struct DeviceServices<'a> {
    step: &'a Step,
    resources: &'a Arc<ResourceStore>,
}

impl StepServices for DeviceServices<'_> {
    fn step_id(&self) -> u64 {
        self.step.id
    }
    fn resources(&self) -> &Arc<ResourceStore> {
        self.resources
    }
    fn step_resources(&self) -> &Arc<ResourceStore> {
        &self.step.services.step_resources
    }
    fn rendezvous(&self) -> &Arc<dyn Rendezvous> {
        &self.step.services.rendezvous
    }
    fn cancel(&self) -> &Arc<CancelToken> {
        &self.step.services.cancel
    }
}

impl Step {
    /// A step over these parts, ready to run. Feeds that come later are counted as waited for.
    pub fn new(
        id: u64,
        plans: &[Arc<PartPlan>],
        cancel: Arc<CancelToken>,
        traced: bool,
        feeds_come_later: bool,
    ) -> Arc<Step> {
        // The caller runs the part with most nodes; the others have threads of their own.
        let for_caller = (0..plans.len()).max_by_key(|&i| plans[i].nodes.len());
        let transfers = Arc::new(LocalRendezvous::default());
        Step::make(id, plans, transfers, cancel, traced, (for_caller, feeds_come_later), None)
    }

    /// A step that no thread waits in: [`Step::start`] begins it, `on_end` hears of its end.
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
                let mut state = plan.spare.lock().pop().unwrap_or_default();
                state.reset(plan);
                if feeds_come_later {
                    state.n_waiting = plan.feeds.len();
                }
                StepPart { plan: plan.clone(), state: Mutex::new(state), for_caller: Some(i) == for_caller }
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
            n_unfinished: AtomicUsize::new(plans.len()),
            is_detached: on_end.is_some(),
            caller: Caller { thread: Mutex::new(std::thread::current()), notified: AtomicBool::new(false) },
            on_end: Mutex::new(on_end),
            trace: traced.then(|| TraceSink::new(start)),
            start,
        })
    }

    /// Delivers feeds, by number.
    pub fn feed(self: &Arc<Self>, values: &[(usize, &Tensor)], was_waited_for: bool) {
        for part in &self.parts {
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
                let mut state = part.state.lock();
                if !state.aborted {
                    state.feed(&part.plan, feed.edges.clone(), copied.as_ref().unwrap_or(value));
                }
                if was_waited_for {
                    state.n_waiting -= 1;
                }
            }
        }
    }

    /// Begins a detached step. What costs less than a hand-off runs on this thread, all else on the devices' threads.
    pub fn start(self: &Arc<Self>) {
        if self.parts.is_empty() {
            return self.ended();
        }
        for index in 0..self.parts.len() {
            self.run_small(index);
        }
    }

    /// Runs what costs less than a hand-off here, and hands the rest over.
    fn run_small(self: &Arc<Self>, index: usize) {
        thread_local! {
            /// Steps within steps on this thread: what one sends may wake another.
            static DEPTH: Cell<usize> = const { Cell::new(0) };
        }
        let depth = DEPTH.get();
        if depth >= MAX_DEPTH {
            return self.spawn_runner(index);
        }
        DEPTH.set(depth + 1);
        self.run_part(index, self.join(index), Share::Small);
        DEPTH.set(depth);
    }

    /// Runs until the step is over, or until `enough` says so, or until `deadline`. The calling thread works too.
    pub fn run(self: &Arc<Self>, deadline: Option<Instant>, enough: &dyn Fn(&Step) -> bool) {
        for index in 0..self.parts.len() {
            if !self.parts[index].for_caller {
                self.spawn_runner(index);
            }
        }
        let mut deadline = deadline;
        loop {
            for index in 0..self.parts.len() {
                if self.parts[index].for_caller {
                    self.run_part(index, self.join(index), Share::All);
                }
            }
            if self.is_over() || enough(self) {
                return;
            }
            if !self.wait(deadline) {
                let waiting = self.describe_waits();
                let unwinding = self.error.lock().is_some();
                if unwinding {
                    // A kernel does not come back; the step is left to it.
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

    /// The thread that calls this is the one to wake from now on: parts of a partial run may come from several threads.
    pub fn adopt_caller(&self) {
        *self.caller.thread.lock() = std::thread::current();
    }

    /// True when nothing runs and nothing waits any more.
    pub fn is_over(&self) -> bool {
        self.n_unfinished.load(Ordering::Acquire) == 0
    }

    /// The step's end: its first error, or what was fetched, by number.
    pub fn finish(&self, n_fetches: usize) -> Result<Vec<Option<Tensor>>> {
        if let Some(error) = self.error.lock().clone() {
            return Err(error);
        }
        let mut values: Vec<Option<Tensor>> = vec![None; n_fetches];
        self.collect(&mut values)?;
        Ok(values)
    }

    /// Moves what has been fetched so far to `values`, by number.
    pub fn collect(&self, values: &mut [Option<Tensor>]) -> Result<()> {
        // All copies to the host are begun before the first is waited for.
        let mut copies = Vec::new();
        for part in &self.parts {
            let mut to_host = |fetch: u32, value: Tensor| -> Result<Tensor> {
                if !matches!(value.memory(), Memory::Cuda(_)) {
                    return Ok(value);
                }
                let start = Instant::now();
                let (copy, event) = part.plan.unit.device.copy(&value, Memory::Host)?;
                copies.push((event, fetch, &part.plan.unit.name, start, copy.n_bytes()));
                Ok(copy)
            };
            for (fetch, value) in part.state.lock().fetched.drain(..) {
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

    /// The fetches where they are, on the host or on a card, by number; the step's first error if it failed.
    pub fn take_fetched(&self) -> Result<Vec<(usize, Tensor)>> {
        if let Some(error) = self.error.lock().clone() {
            return Err(error);
        }
        let mut values = Vec::new();
        for part in &self.parts {
            for (fetch, value) in part.state.lock().fetched.drain(..) {
                values.push((fetch as usize, value?));
            }
            values.extend(part.plan.fetched_constants.iter().map(|(fetch, value)| (*fetch as usize, value.clone())));
        }
        Ok(values)
    }

    /// The numbers of the fetches that have arrived.
    pub fn has_fetched(&self, fetches: &[usize]) -> bool {
        let mut arrived = Vec::new();
        for part in &self.parts {
            arrived.extend(part.state.lock().fetched.iter().map(|(fetch, _)| *fetch as usize));
            arrived.extend(part.plan.fetched_constants.iter().map(|(fetch, _)| *fetch as usize));
        }
        self.error.lock().is_some() || fetches.iter().all(|fetch| arrived.contains(fetch))
    }

    /// The first error, if the step has failed.
    pub fn error(&self) -> Option<Error> {
        self.error.lock().clone()
    }

    /// What was recorded of each node, if asked for.
    pub fn take_trace(&self) -> Vec<NodeTrace> {
        self.trace.as_ref().map(TraceSink::take).unwrap_or_default()
    }

    /// Stops the step. The first error wins; later ones are its echoes.
    pub fn fail(&self, error: Error) {
        {
            let mut first = self.error.lock();
            match &*first {
                None => *first = Some(error.clone()),
                Some(earlier) if earlier.is_derived() && !error.is_derived() => *first = Some(error.clone()),
                Some(_) => return,
            }
        }
        for part in &self.parts {
            let mut state = part.state.lock();
            state.aborted = true;
            state.drop_ready();
        }
        let echo = Error::cancelled(format!("the step was stopped: {error}")).into_derived();
        self.services.transfers.abort(echo.clone());
        self.services.cancel.cancel(echo);
        for part in &self.parts {
            self.finish_part_if_idle(part, part.state.lock());
        }
    }

    /// What the step waits for now, for people.
    pub fn describe_waits(&self) -> String {
        let mut waits: Vec<String> = self.waits().iter().map(NodeWait::to_string).collect();
        for part in &self.parts {
            let n_runners = part.state.lock().n_runners;
            if n_runners > 0 {
                waits.push(format!("{n_runners} kernel(s) running on {}", part.plan.unit.name));
            }
        }
        waits.sort();
        if waits.is_empty() { "nothing that has a name".to_owned() } else { waits.join(", ") }
    }

    /// The nodes that have given up their threads and wait.
    pub fn waits(&self) -> Vec<NodeWait> {
        let mut waits = Vec::new();
        for part in &self.parts {
            let state = part.state.lock();
            waits.extend(state.waiting.values().map(|(node, since)| NodeWait {
                node: part.plan.nodes[*node as usize].node.clone(),
                device: part.plan.unit.name.clone(),
                lasts: since.elapsed(),
            }));
        }
        waits
    }

    /// How many threads run its kernels now.
    pub fn n_runners(&self) -> usize {
        self.parts.iter().map(|part| part.state.lock().n_runners).sum()
    }

    /// How many nodes are ready in parts that no thread works on. More than a moment of this is a fault of the executor.
    pub fn n_unattended(&self) -> usize {
        let unattended = |part: &StepPart| {
            let state = part.state.lock();
            if state.n_runners == 0 && !part.for_caller { state.n_ready() } else { 0 }
        };
        self.parts.iter().map(unattended).sum()
    }

    /// Parks the caller until there is something to do. False at the deadline.
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
                Some(deadline) => std::thread::park_timeout(deadline - now),
                None => std::thread::park(),
            }
        }
        true
    }

    fn notify_caller(&self) {
        self.caller.notified.store(true, Ordering::Release);
        self.caller.thread.lock().unpark();
    }

    /// Enters a part as a runner.
    fn join(&self, index: usize) -> MutexGuard<'_, State> {
        let mut state = self.parts[index].state.lock();
        state.n_runners += 1;
        state
    }

    /// Starts another runner for a part on its device's threads, if there may be one; on this thread otherwise.
    fn spawn_runner(self: &Arc<Self>, index: usize) {
        let part = &self.parts[index];
        part.state.lock().n_runners += 1;
        let step = self.clone();
        let spawned = part.plan.unit.pool.spawn_beside(usize::from(part.for_caller), move || {
            let state = step.parts[index].state.lock();
            step.run_part(index, state, Share::All);
        });
        if !spawned {
            let state = part.state.lock();
            self.run_part(index, state, Share::All);
        }
    }

    /// Runs a part's nodes; the runner has been counted already. A panic of the executor itself is our bug: the step fails
    /// and says so, instead of waiting for a runner that is gone.
    fn run_part(self: &Arc<Self>, index: usize, state: MutexGuard<'_, State>, share: Share) {
        let run = std::panic::AssertUnwindSafe(|| self.run_nodes(index, state, share));
        if let Err(panic) = std::panic::catch_unwind(run) {
            self.fail(panicked("the executor", &*panic));
            let part = &self.parts[index];
            let mut state = part.state.lock();
            state.n_runners -= 1;
            self.finish_part_if_idle(part, state);
        }
        if self.is_detached {
            self.services.transfers.flush();
        }
    }

    /// The runner's loop.
    fn run_nodes(self: &Arc<Self>, index: usize, state: MutexGuard<'_, State>, share: Share) {
        let part = &self.parts[index];
        let plan = &*part.plan;
        let services = DeviceServices { step: self, resources: &plan.unit.resources };
        let (mut inputs, mut outputs): (Vec<Input>, Vec<Option<OutputValue>>) = (Vec::new(), Vec::new());
        let mut state = state;
        let (begun, mut n_nodes) = (Instant::now(), 0u32);
        loop {
            n_nodes = n_nodes.wrapping_add(1);
            if share == Share::Small && n_nodes.is_multiple_of(64) && state.has_ready() && begun.elapsed() > PATIENCE {
                // Many small nodes are long too. This runner leaves before the next one comes: whoever makes a node ready leaves
                // it to a runner that is there, so none may be counted that will not look again.
                state.n_runners -= 1;
                drop(state);
                return self.spawn_runner(index);
            }
            let next = match share {
                _ if state.aborted => None,
                Share::All => state.pop(),
                Share::Small => state.pop_small(plan),
            };
            let Some(token) = next else {
                state.n_runners -= 1;
                if share == Share::Small && state.n_runners == 0 && !state.aborted && state.n_large() > 0 {
                    drop(state);
                    return self.spawn_runner(index);
                }
                return self.finish_part_if_idle(part, state);
            };
            let node = &plan.nodes[token.node as usize];
            if node.is_tiny && !token.is_dead {
                let call = Call { token, node, frame_iteration: state.frame_iteration(token) };
                if let Some(inputs) = state.tiny_inputs(plan, token) {
                    let result = self.compute(plan, call, inputs, &mut outputs, &services);
                    // Constants stay: they are tiny too, and the next step needs them again.
                    for (i, input) in inputs.iter_mut().enumerate() {
                        if node.constant_inputs >> i & 1 == 0 {
                            *input = Input::Empty;
                        }
                    }
                    match result {
                        Ok(()) => state.propagate(plan, token, &mut outputs),
                        Err(error) => {
                            drop(state);
                            outputs.clear();
                            self.fail(error.with_node(&node.node.name, node.node.op(), &plan.unit.name));
                            state = part.state.lock();
                        }
                    }
                    continue;
                }
            }
            state.take_inputs(plan, token, &mut inputs);
            // Control flow and dead nodes are only passed on; that needs no kernel and no unlocking.
            let is_passed_on = token.is_dead && node.flow != Flow::Transfer;
            if is_passed_on || matches!(node.kernel, PlanKernel::Flow | PlanKernel::Lend) {
                let passed = if is_passed_on {
                    outputs.clear();
                    outputs.resize_with(node.outputs.len(), || None);
                    Ok(())
                } else {
                    read_references(node, &mut inputs).and_then(|()| flow_outputs(node, &mut inputs, &mut outputs))
                };
                match passed {
                    Ok(()) => state.propagate(plan, token, &mut outputs),
                    Err(error) => {
                        drop(state);
                        self.fail(error.with_node(&node.node.name, node.node.op(), &plan.unit.name));
                        state = part.state.lock();
                    }
                }
                continue;
            }
            let call = Call { token, node, frame_iteration: state.frame_iteration(token) };
            let more = state.n_large() > 0 && state.n_runners < plan.unit.pool.max_threads();
            let ticket = matches!(node.kernel, PlanKernel::Async(_)).then(|| state.begin_wait(token.node));
            drop(state);
            if more {
                self.spawn_runner(index);
            }
            if let Some(ticket) = ticket {
                self.start_async(index, call, ticket, &mut inputs, &services);
                inputs.clear();
                state = part.state.lock();
                continue;
            }
            if self.is_detached && n_bytes(&inputs) >= LARGE {
                self.services.transfers.flush();
            }
            let result = self.compute(plan, call, &mut inputs, &mut outputs, &services);
            // Inputs die before the outputs are passed on, so that consumers may reuse their memory.
            inputs.clear();
            if let Err(error) = result {
                outputs.clear();
                self.fail(error.with_node(&node.node.name, node.node.op(), &plan.unit.name));
                state = part.state.lock();
                continue;
            }
            state = part.state.lock();
            state.propagate(plan, token, &mut outputs);
        }
    }

    fn compute(
        &self,
        plan: &PartPlan,
        call: Call<'_>,
        inputs: &mut [Input],
        outputs: &mut Vec<Option<OutputValue>>,
        services: &DeviceServices<'_>,
    ) -> Result<()> {
        let node = call.node;
        let start = self.trace.as_ref().map(|_| Instant::now());
        read_references(node, inputs)?;
        // Those of the node before have been taken; only their number may differ.
        debug_assert!(outputs.iter().all(Option::is_none));
        if outputs.len() != node.outputs.len() {
            outputs.resize_with(node.outputs.len(), || None);
        }
        let gpu = if node.may_fold { plan.unit.device.as_any().downcast_ref::<CudaDevice>() } else { None };
        let folds = gpu.filter(|gpu| is_constant_call(gpu, node, inputs));
        let mut ctx = call.ctx(plan, inputs, outputs, services);
        // A kernel that panics is our bug; it must not take the step's other threads down with it.
        let run = std::panic::AssertUnwindSafe(|| match &node.kernel {
            PlanKernel::Function(compute) => compute(&mut ctx),
            PlanKernel::Object(kernel) => kernel.compute(&mut ctx),
            PlanKernel::Null => null_outputs(&mut ctx),
            PlanKernel::Async(_) | PlanKernel::Flow | PlanKernel::Lend => {
                Err(Error::internal("not a synchronous kernel"))
            }
        });
        let run = || std::panic::catch_unwind(run).unwrap_or_else(|panic| Err(panicked("the kernel", &*panic)));
        match folds {
            None => run()?,
            Some(gpu) => {
                outside_capture(run)?;
                for output in outputs.iter().flatten() {
                    if let OutputValue::Tensor(tensor) = output {
                        gpu.keep_in_capture(tensor);
                    }
                }
            }
        }
        for (i, (output, info)) in outputs.iter().zip(&node.outputs).enumerate() {
            match output {
                Some(OutputValue::Tensor(tensor)) if tensor.dtype() != info.dtype => {
                    return Err(Error::internal(format!(
                        "output {i} is {}, declared as {}",
                        tensor.dtype(),
                        info.dtype
                    )));
                }
                Some(_) => {}
                None => return Err(Error::internal(format!("output {i} was not set"))),
            }
        }
        if let (Some(sink), Some(start)) = (&self.trace, start) {
            sink.record(&node.node, &plan.unit.name, start, outputs);
        }
        Ok(())
    }

    fn start_async(
        self: &Arc<Self>,
        index: usize,
        call: Call<'_>,
        ticket: u64,
        inputs: &mut [Input],
        services: &DeviceServices<'_>,
    ) {
        let plan = &self.parts[index].plan;
        let (step, token, start) = (self.clone(), call.token, Instant::now());
        let done = Done::new(move |outcome| step.finish_async(index, token, ticket, start, outcome));
        if let Err(error) = read_references(call.node, inputs) {
            return done.finish(Err(error));
        }
        if let PlanKernel::Async(kernel) = &call.node.kernel {
            kernel.start(&mut call.ctx(plan, inputs, &mut [], services), done);
        }
    }

    /// A waiting kernel has come back, on any thread.
    fn finish_async(
        self: &Arc<Self>,
        index: usize,
        token: Token,
        ticket: u64,
        start: Instant,
        outcome: Result<Outcome>,
    ) {
        let part = &self.parts[index];
        let plan = &*part.plan;
        let node = &plan.nodes[token.node as usize];
        let outputs: Result<Vec<Option<OutputValue>>> = outcome.and_then(|outcome| {
            if outcome.dead {
                return Ok(vec![None; node.outputs.len()]);
            }
            if outcome.outputs.len() != node.outputs.len() {
                return Err(Error::internal(format!(
                    "{} outputs, expected {}",
                    outcome.outputs.len(),
                    node.outputs.len()
                )));
            }
            Ok(outcome.outputs.into_iter().map(|tensor| Some(OutputValue::Tensor(tensor))).collect())
        });
        if let (Some(sink), Ok(outputs)) = (&self.trace, &outputs) {
            sink.record(&node.node, &plan.unit.name, start, outputs);
        }
        let mut outputs = outputs.unwrap_or_else(|error| {
            // Recorded before the count of waits goes down: the step must not end without its error.
            self.fail(error.with_node(&node.node.name, node.node.op(), &plan.unit.name));
            Vec::new()
        });
        let pass_on = std::panic::AssertUnwindSafe(|| {
            let mut state = part.state.lock();
            if !state.aborted {
                let is_dead = outputs.iter().any(Option::is_none) || (token.is_dead && outputs.is_empty());
                state.propagate(plan, Token { is_dead, ..token }, &mut outputs);
            }
        });
        // As for runners: this thread may be another step's, which must not be hit by our bug.
        if let Err(panic) = std::panic::catch_unwind(pass_on) {
            self.fail(panicked("the executor", &*panic));
        }
        part.state.lock().end_wait(ticket);
        self.kick(index);
    }

    /// Sees to it that somebody runs what has become ready, and that the end is noticed.
    fn kick(self: &Arc<Self>, index: usize) {
        let part = &self.parts[index];
        let state = part.state.lock();
        if !state.has_ready() {
            return self.finish_part_if_idle(part, state);
        }
        let nobody = state.n_runners == 0;
        let room = state.n_large() > 0 && state.n_runners < part.plan.unit.pool.max_threads();
        drop(state);
        if nobody && part.for_caller {
            self.notify_caller();
        } else if nobody && self.is_detached {
            self.run_small(index);
        } else if nobody || room {
            self.spawn_runner(index);
        }
    }

    fn finish_part_if_idle(&self, part: &StepPart, mut state: MutexGuard<'_, State>) {
        if state.finished || state.n_runners > 0 || state.n_waiting > 0 || state.has_ready() {
            return;
        }
        state.finished = true;
        drop(state);
        let is_last = self.n_unfinished.fetch_sub(1, Ordering::AcqRel) == 1;
        if is_last || part.for_caller {
            self.notify_caller();
        }
        if is_last {
            self.ended();
        }
    }

    /// Tells whoever wants to hear of the end of a detached step.
    fn ended(&self) {
        let on_end = self.on_end.lock().take();
        if let Some(on_end) = on_end {
            on_end(self.error());
        }
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        for part in &mut self.parts {
            let mut state = std::mem::take(part.state.get_mut());
            state.clear();
            part.plan.spare.lock().push(state);
        }
    }
}

fn n_bytes(inputs: &[Input]) -> usize {
    let one = |input: &Input| match input {
        Input::Tensor(tensor) => tensor.n_bytes(),
        Input::Reference(_) => LARGE,
        Input::Empty => 0,
    };
    inputs.iter().map(one).sum()
}

fn panicked(who: &str, panic: &(dyn std::any::Any + Send)) -> Error {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    Error::internal(format!("{who} panicked: {}", text.unwrap_or("no message")))
}

/// What a null device gives: zeros of the inferred shape, unknown sizes taken as 1.
fn null_outputs(ctx: &mut KernelCtx<'_>) -> Result<()> {
    if let Some(null) = ctx.device.as_null() {
        null.record_run(&ctx.node.name);
    }
    for i in 0..ctx.outputs.len() {
        let info = &ctx.node.outputs[i];
        let dims: Vec<usize> = info.shape.dims().unwrap_or(&[]).iter().map(|dim| dim.unwrap_or(1)).collect();
        let shape = kolo_core::Shape::new(&dims)?;
        let value = if ctx.node.op() == "Const" {
            ctx.attrs().tensor("value")?.clone()
        } else {
            ctx.allocate_zeroed(info.dtype, shape)?
        };
        ctx.set_output(i, value);
    }
    Ok(())
}
