//! The threads of a step: they take ready nodes, run their kernels, and propagate the outputs.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_core::{Error, Result};
use kolo_device::Recorder;
use kolo_device::cpu::{Stopped, stoppable};
use kolo_graph::{Flow, Work};
use kolo_ops::{
    CancelToken, Cost, Done, FrameIteration, KernelCtx, Outcome, Rendezvous, ResourceStore, StepServices, Value,
};

use super::Step;
use super::part::{Held, Mail, Produced, StepPart};
use crate::capture::slot::is_constant_call;
use crate::capture::split::Segment;
use crate::compile::part::{NodePlan, PartPlan, PlanKernel};
use crate::executor::may_wait::MayWait;
use crate::executor::part_state::{PartState, Token, flow_outputs, read_references};
use crate::executor::sync::{patience, thread_local};

/// The maximum depth of steps that run nested on one thread's stack.
const MAX_DEPTH: usize = 4;

/// How long a borrowed thread, such as a network thread, runs nodes of a step.
const PATIENCE: Duration = patience(2_000);

/// How long a runner of a pool goes on while other jobs wait for a thread of that pool.
const SLICE: Duration = patience(1_000);

/// After how much work a runner looks up: takes in what others have left, lets others hold the part, and sees whether its
/// time is over. The unit is a tiny node.
const LOOK_EVERY: u32 = 64;

/// The work of a kernel that is always short, and of any other, in the same unit.
const SHORT_KERNEL: u32 = 8;
const ANY_KERNEL: u32 = LOOK_EVERY;

/// The size of a kernel's inputs, in bytes, from which buffered sends are flushed before it runs.
const LARGE: usize = 128 << 10;

/// Which nodes a runner takes, and until when.
#[derive(Clone, Copy)]
pub(super) enum Share {
    /// Every node: the caller's own thread. It leaves at the deadline.
    Caller(MayWait, Option<Instant>),
    /// Every node: a thread of the pool, which other steps need too.
    Pool(MayWait),
    /// Nodes that cost less than a hand-over: a thread that is borrowed, such as a network thread.
    Small,
    /// Every node: a borrowed thread, because the pool has none and the system has none left for it.
    Instead,
}

impl Share {
    fn may_wait(self) -> Option<MayWait> {
        match self {
            Share::Caller(may_wait, _) | Share::Pool(may_wait) => Some(may_wait),
            Share::Small | Share::Instead => None,
        }
    }

    fn is_small(self) -> bool {
        matches!(self, Share::Small)
    }
}

/// One node that is about to run.
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
        inputs: &'b mut [Value],
        outputs: &'b mut [Value],
        services: &'b DeviceServices<'b>,
    ) -> KernelCtx<'b> {
        KernelCtx {
            node: &self.node.node,
            device: match if self.node.on_host { plan.unit.device.host() } else { None } {
                Some(host) => &**host,
                None => &*plan.unit.device,
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
    /// Runs nodes that cost less than a hand-over on this thread, and hands the rest over. The runner is already
    /// registered.
    fn run_small<'a>(self: &'a Arc<Self>, index: usize, state: Held<'a>) {
        thread_local! {
            /// The depth of nested steps on this thread: a send of one step may wake up another.
            static DEPTH: Cell<usize> = const { Cell::new(0) };
        }
        let depth = DEPTH.with(Cell::get);
        if depth >= MAX_DEPTH {
            drop(state);
            return self.hand_over(index);
        }
        DEPTH.with(|cell| cell.set(depth + 1));
        self.run_part(index, state.looking_for_mail(self, index), Share::Small);
        DEPTH.with(|cell| cell.set(depth));
    }

    /// Registers a runner of a part.
    pub(super) fn join(self: &Arc<Self>, index: usize, may_wait: MayWait) -> Held<'_> {
        let mut state = self.hold(index, may_wait);
        state.n_runners += 1;
        state
    }

    /// Starts another runner for a part on its device's threads, if the pool allows one; otherwise runs on this
    /// thread.
    pub(super) fn spawn_runner(self: &Arc<Self>, index: usize, may_wait: MayWait) {
        drop(self.join(index, may_wait));
        self.hand_over(index);
    }

    /// Has a registered runner go on on one of the device's threads; if the pool has no threads, on this one. The
    /// registration passes to that runner, so that a thread that makes a node ready may rely on it.
    fn hand_over(self: &Arc<Self>, index: usize) {
        let (part, step) = (&self.parts[index], self.clone());
        let go_on = move |may_wait: Option<MayWait>| {
            let share = may_wait.map_or(Share::Instead, Share::Pool);
            match step.hold_again(index, share) {
                Some(state) => step.run_part(index, state, share),
                None => step.leave(index, None),
            }
        };
        if let Err(job) = part.plan.unit.pool.spawn_beside(usize::from(part.for_caller), Box::new(go_on)) {
            job(None);
        }
    }

    /// The part, for a registered runner that does not hold it. `None` if it may not wait: then it must leave.
    fn hold_again(self: &Arc<Self>, index: usize, share: Share) -> Option<Held<'_>> {
        match share.may_wait() {
            Some(may_wait) => Some(self.hold(index, may_wait)),
            None => self.try_hold(index),
        }
    }

    /// Has a registered runner leave, which does not hold the part. Whoever does goes on with what it has produced.
    fn leave(self: &Arc<Self>, index: usize, produced: Option<Produced>) {
        self.post(index, Mail::Left { produced });
    }

    /// Propagates outputs outside of a runner's loop, unless the step was stopped. An error is a panic of the executor, which
    /// fails the step, as in a runner: this thread may belong to another one, and somebody waits for this one.
    pub(super) fn propagate(
        &self,
        part: &StepPart,
        state: &mut PartState,
        token: Token,
        outputs: &mut [Value],
    ) -> Result<()> {
        if self.is_stopped() {
            return Ok(());
        }
        let propagate = std::panic::AssertUnwindSafe(|| state.propagate(&part.plan, token, outputs));
        std::panic::catch_unwind(propagate).map_err(|panic| panicked("the executor", &*panic))
    }

    /// Runs a part's nodes; the runner is already registered. A panic of the executor itself is a bug: the step fails
    /// with an error, instead of waiting for a runner that is gone.
    pub(super) fn run_part(self: &Arc<Self>, index: usize, state: Held<'_>, share: Share) {
        let run = std::panic::AssertUnwindSafe(|| self.run_nodes(index, state, share));
        if let Err(panic) = std::panic::catch_unwind(run) {
            self.fail(panicked("the executor", &*panic));
            self.leave(index, None);
        }
        if self.is_detached {
            self.services.transfers.flush();
        }
    }

    /// The runner's loop. The lock is held while tiny nodes and control flow run, which need no other, but not for longer
    /// than [`LOOK_EVERY`] of them.
    fn run_nodes(self: &Arc<Self>, index: usize, state: Held<'_>, share: Share) {
        let part = &self.parts[index];
        let plan = &*part.plan;
        let services = DeviceServices { step: self, resources: &plan.unit.resources };
        let (mut inputs, mut outputs): (Vec<Value>, Vec<Value>) = (Vec::new(), Vec::new());
        let mut state = state;
        let (begun, mut work) = (Instant::now(), 0u32);
        loop {
            if part.has_mail()
                && let Err(error) = self.take_mail(index, &mut state)
            {
                drop(state);
                self.fail(error);
                let Some(held) = self.hold_again(index, share) else { return self.leave(index, None) };
                state = held;
            }
            work += 1;
            if work >= LOOK_EVERY {
                work = 0;
                match share.may_wait() {
                    Some(may_wait) => state.bump(may_wait),
                    None => {
                        state.pass_on();
                        let Some(held) = self.hold_again(index, share) else { return self.leave(index, None) };
                        state = held;
                    }
                }
                match share {
                    Share::Caller(_, deadline) => {
                        if state.has_ready() && deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                            state.n_runners -= 1;
                            return;
                        }
                    }
                    Share::Pool(_) => {
                        if plan.unit.pool.has_queued() && begun.elapsed() >= SLICE {
                            drop(state);
                            return self.hand_over(index);
                        }
                    }
                    // Many small nodes take long too.
                    Share::Small => {
                        if state.has_ready() && begun.elapsed() > PATIENCE {
                            drop(state);
                            return self.hand_over(index);
                        }
                    }
                    Share::Instead => {}
                }
            }
            let next = match share {
                _ if self.is_stopped() => None,
                Share::Caller(..) | Share::Pool(_) | Share::Instead => state.pop(),
                Share::Small => state.pop_small(plan),
            };
            let Some(token) = next else {
                if share.is_small() && state.n_runners == 1 && !self.is_stopped() && state.n_large() > 0 {
                    drop(state);
                    return self.hand_over(index);
                }
                state.n_runners -= 1;
                return self.finish_part_if_idle(part, state);
            };
            let node = &plan.nodes[token.node as usize];
            if node.is_tiny && !token.is_dead {
                let call = Call { token, node, frame_iteration: state.frame_iteration(token) };
                if let Some((inputs, place)) = state.tiny_slots(plan, token) {
                    let is_placed = !place.is_empty();
                    let result = match is_placed {
                        true => self.compute(plan, call, inputs, place, &services),
                        false => {
                            outputs.resize_with(node.outputs.len(), Value::default);
                            self.compute(plan, call, inputs, &mut outputs, &services)
                        }
                    };
                    // Constants stay in their slots: they are tiny too, and the next step needs them again.
                    for (i, input) in inputs.iter_mut().enumerate() {
                        if node.constant_inputs >> i & 1 == 0 {
                            *input = Value::Empty;
                        }
                    }
                    match result {
                        Ok(()) if is_placed => state.propagate_placed(plan, token),
                        Ok(()) => state.propagate(plan, token, &mut outputs),
                        Err(error) => {
                            drop(state);
                            outputs.clear();
                            self.fail(error.with_node(&node.node.name, node.node.op(), &plan.unit.name));
                            let Some(held) = self.hold_again(index, share) else { return self.leave(index, None) };
                            state = held;
                        }
                    }
                    continue;
                }
            }
            state.take_inputs(plan, token, &mut inputs);
            // Control flow and dead nodes only propagate values, which needs no kernel and no unlocking.
            let is_passed_on = token.is_dead && node.flow != Flow::Transfer;
            if is_passed_on || matches!(node.kernel, PlanKernel::Flow | PlanKernel::Lend) {
                let passed = if is_passed_on {
                    outputs.clear();
                    outputs.resize_with(node.outputs.len(), Value::default);
                    Ok(())
                } else {
                    read_references(node, &mut inputs).and_then(|()| flow_outputs(node, &mut inputs, &mut outputs))
                };
                match passed {
                    Ok(()) => state.propagate(plan, token, &mut outputs),
                    Err(error) => {
                        drop(state);
                        self.fail(error.with_node(&node.node.name, node.node.op(), &plan.unit.name));
                        let Some(held) = self.hold_again(index, share) else { return self.leave(index, None) };
                        state = held;
                    }
                }
                continue;
            }
            let call = Call { token, node, frame_iteration: state.frame_iteration(token) };
            let more = state.n_large() > 0 && state.n_runners < plan.unit.pool.max_threads();
            state.n_runners += usize::from(more);
            let ticket = matches!(node.kernel, PlanKernel::Async(_)).then(|| state.begin_wait(token.node));
            drop(state);
            if more {
                self.hand_over(index);
            }
            if let Some(ticket) = ticket {
                work += SHORT_KERNEL;
                self.start_async(index, call, ticket, &mut inputs, &services);
                inputs.clear();
                let Some(held) = self.hold_again(index, share) else { return self.leave(index, None) };
                state = held;
                continue;
            }
            work += if node.cost == Cost::Inline { SHORT_KERNEL } else { ANY_KERNEL };
            if self.is_detached && n_bytes(&inputs) >= LARGE {
                self.services.transfers.flush();
            }
            outputs.resize_with(node.outputs.len(), Value::default);
            let is_timed = node.cost != Cost::Inline && (share.is_small() || !node.pace.is_short());
            let start = is_timed.then(Instant::now);
            let mut compute = || self.compute(plan, call, &mut inputs, &mut outputs, &services);
            let result = match node.is_stoppable {
                true => stoppable(self.services.cancel.flag(), compute),
                false => compute(),
            };
            if let Some(start) = start {
                node.pace.record(start.elapsed());
            }
            // Inputs are dropped before the outputs are propagated, so that consumers may reuse their memory.
            inputs.clear();
            if let Err(error) = result {
                outputs.clear();
                self.fail(error.with_node(&node.node.name, node.node.op(), &plan.unit.name));
                let Some(held) = self.hold_again(index, share) else { return self.leave(index, None) };
                state = held;
                continue;
            }
            let Some(held) = self.hold_again(index, share) else {
                return self.leave(index, Some(Produced { token, outputs }));
            };
            state = held;
            state.propagate(plan, token, &mut outputs);
        }
    }

    fn compute(
        &self,
        plan: &PartPlan,
        call: Call<'_>,
        inputs: &mut [Value],
        outputs: &mut [Value],
        services: &DeviceServices<'_>,
    ) -> Result<()> {
        let node = call.node;
        let start = self.trace.as_ref().map(|_| Instant::now());
        read_references(node, inputs)?;
        // The outputs of the previous node have been taken.
        debug_assert!(outputs.iter().all(Value::is_empty));
        if let PlanKernel::Segment(segment) = &node.kernel {
            return self.run_segment(segment, inputs, outputs);
        }
        let recorder = if node.may_fold { plan.unit.device.recorder() } else { None };
        let folds = recorder.filter(|recorder| is_constant_call(*recorder, node, inputs));
        let mut ctx = call.ctx(plan, inputs, outputs, services);
        match folds {
            None => call_kernel(node, &mut ctx)?,
            Some(recorder) => call_outside_recording(recorder, node, &mut ctx)?,
        }
        for (i, (output, info)) in outputs.iter().zip(&node.outputs).enumerate() {
            match output {
                Value::Tensor(tensor) if tensor.dtype() != info.dtype => {
                    return Err(Error::internal(format!(
                        "output {i} is {}, declared as {}",
                        tensor.dtype(),
                        info.dtype
                    )));
                }
                Value::Tensor(_) | Value::Reference(_) => {}
                Value::Empty => return Err(Error::internal(format!("output {i} was not set"))),
            }
        }
        if let (Some(sink), Some(start)) = (&self.trace, start) {
            sink.record(&node.node, &plan.unit.name, start, outputs);
        }
        Ok(())
    }

    /// Separate from [`Step::compute`], which is kept short for the many small nodes.
    #[inline(never)]
    fn run_segment(&self, segment: &Segment, inputs: &mut [Value], outputs: &mut [Value]) -> Result<()> {
        segment.run(self.id, &self.limits(), inputs, outputs)
    }

    fn start_async(
        self: &Arc<Self>,
        index: usize,
        call: Call<'_>,
        ticket: u64,
        inputs: &mut [Value],
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

    /// Completes a pending kernel. Called on any thread.
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
        let outputs: Result<Vec<Value>> = outcome.and_then(|outcome| {
            if outcome.dead {
                return Ok(vec![Value::Empty; node.outputs.len()]);
            }
            if outcome.outputs.len() != node.outputs.len() {
                return Err(Error::internal(format!(
                    "{} outputs, expected {}",
                    outcome.outputs.len(),
                    node.outputs.len()
                )));
            }
            Ok(outcome.outputs.into_iter().map(Value::Tensor).collect())
        });
        if let (Some(sink), Ok(outputs)) = (&self.trace, &outputs) {
            sink.record(&node.node, &plan.unit.name, start, outputs);
        }
        let produced = match outputs {
            Ok(outputs) => {
                let is_dead = outputs.iter().any(Value::is_empty) || (token.is_dead && outputs.is_empty());
                Some(Produced { token: Token { is_dead, ..token }, outputs })
            }
            Err(error) => {
                // Recorded before the pending count is decremented: the step must not end without its error.
                self.fail(error.with_node(&node.node.name, node.node.op(), &plan.unit.name));
                None
            }
        };
        self.post(index, Mail::Completed { ticket, produced });
    }

    /// Ensures that a runner takes the nodes that have become ready, and that the end of the step is noticed.
    pub(super) fn attend<'a>(self: &'a Arc<Self>, index: usize, state: Held<'a>) {
        let part = &self.parts[index];
        let mut state = state;
        if !state.has_ready() || self.is_stopped() {
            let is_over = self.mark_finished(&mut state);
            drop(state);
            if self.is_detached {
                // A kernel that sends once a device has copied its value has sent on this thread, and no runner
                // follows that would flush.
                self.services.transfers.flush();
            }
            if is_over {
                self.part_ended(part);
            }
            return;
        }
        let nobody = state.n_runners == 0;
        let room = state.n_large() > 0 && state.n_runners < part.plan.unit.pool.max_threads();
        if nobody && part.for_caller {
            drop(state);
            self.notify_caller();
        } else if nobody && self.is_detached {
            state.n_runners += 1;
            self.run_small(index, state);
        } else if nobody || room {
            state.n_runners += 1;
            drop(state);
            self.hand_over(index);
        }
    }
}

/// Runs a synchronous kernel. A panic in one is a bug; it must not take the step's other threads down.
#[inline]
fn call_kernel(node: &NodePlan, ctx: &mut KernelCtx<'_>) -> Result<()> {
    let call = std::panic::AssertUnwindSafe(|| match &node.kernel {
        PlanKernel::Function(compute) => compute(ctx),
        PlanKernel::Object(kernel) => kernel.compute(ctx),
        PlanKernel::Null => null_outputs(ctx),
        PlanKernel::Async(_) | PlanKernel::Flow | PlanKernel::Lend | PlanKernel::Segment(_) => {
            Err(Error::internal("not a synchronous kernel"))
        }
    });
    std::panic::catch_unwind(call).unwrap_or_else(|panic| match panic.is::<Stopped>() {
        true => Err(Error::cancelled("the step was stopped").into_derived()),
        false => Err(panicked("the kernel", &*panic)),
    })
}

/// Runs a kernel whose outputs are the same in every replay: once, now, and keeps its outputs.
#[cold]
fn call_outside_recording(recorder: &dyn Recorder, node: &NodePlan, ctx: &mut KernelCtx<'_>) -> Result<()> {
    let mut result = Ok(());
    recorder.outside_recording(&mut || result = call_kernel(node, ctx));
    result?;
    for output in ctx.outputs.iter() {
        if let Value::Tensor(tensor) = output {
            recorder.keep_in_recording(tensor);
        }
    }
    Ok(())
}

fn n_bytes(inputs: &[Value]) -> usize {
    let one = |input: &Value| match input {
        Value::Tensor(tensor) => tensor.n_bytes(),
        Value::Reference(_) => LARGE,
        Value::Empty => 0,
    };
    inputs.iter().map(one).sum()
}

fn panicked(who: &str, panic: &(dyn std::any::Any + Send)) -> Error {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    Error::internal(format!("{who} panicked: {}", text.unwrap_or("no message")))
}

/// The outputs on a null device: zeros of the inferred shape, with unknown sizes taken as 1.
fn null_outputs(ctx: &mut KernelCtx<'_>) -> Result<()> {
    if let Some(null) = ctx.device.as_null() {
        null.record_run(&ctx.node.name);
    }
    for i in 0..ctx.outputs.len() {
        let info = &ctx.node.outputs[i];
        let dims: Vec<usize> = info.shape.dims().unwrap_or(&[]).iter().map(|dim| dim.unwrap_or(1)).collect();
        let shape = kolo_core::Shape::new(&dims)?;
        let value = if ctx.node.def.work == Work::Constant {
            ctx.attrs().tensor("value")?.clone()
        } else {
            ctx.allocate_zeroed(info.dtype, shape)?
        };
        ctx.set_output(i, value);
    }
    Ok(())
}
