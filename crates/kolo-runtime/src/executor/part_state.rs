//! The mutable state of a step on one device: inputs that have arrived, nodes that are ready, live loop iterations.
//!
//! Every value belongs to a frame and an iteration, and may be dead. The pending count of a node is the number of
//! inputs that it still waits for. A `Merge` waits for its control inputs and one live data input: its count is twice
//! the number of pending control inputs, plus one until a live input has arrived. Outputs are propagated with the
//! part's lock held.

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use kolo_core::{Error, Result, Tensor};
use kolo_graph::Flow;
use kolo_ops::{Cost, FrameIteration, Value};

use super::frame_id::FrameInstance;
use crate::compile::part::{CONTROL, Edge, End, NO_SLOT, NodePlan, PartPlan, PlanKernel};

/// A node that is ready, in one iteration of one frame.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Token {
    pub node: u32,
    pub frame: u32,
    pub iteration: u32,
    pub is_dead: bool,
}

/// See the module's documentation.
#[derive(Default)]
pub(crate) struct PartState {
    frames: Vec<Option<Frame>>,
    /// Child frames by (parent frame, parent iteration, plan's frame).
    children: HashMap<(u32, u32, u32), u32>,
    /// Small ready nodes, last in, first out: the newest values are still in the cache.
    small: Vec<Token>,
    /// Ready nodes worth a thread of their own, first in, first out.
    large: VecDeque<Token>,
    /// Runners that run a node now or look for one.
    pub n_runners: usize,
    /// Pending kernels that have released their thread, and feeds of a partial run that have not arrived.
    pub n_waiting: usize,
    /// The pending nodes and since when they wait, for reports.
    pub waiting: HashMap<u64, (u32, Instant)>,
    next_ticket: u64,
    pub finished: bool,
    /// `(fetch, value)` in order of arrival.
    pub fetched: Vec<(u32, Result<Tensor>)>,
}

struct Frame {
    plan: u32,
    parent: u32,
    parent_iteration: u32,
    instance: FrameInstance,
    iterations: VecDeque<Iteration>,
    /// The number of `iterations[0]`.
    first: u32,
    n_enters_missing: u32,
    /// Loop invariants: the `Enter` node and its value.
    invariants: Vec<(u32, Value)>,
    /// `NextIteration`s that are deferred because the maximum number of iterations is in flight.
    parked: Vec<(u32, Value)>,
    /// `Exit`s that were dead; those that were live.
    dead_exits: Vec<u32>,
    live_exits: Vec<u32>,
}

#[derive(Default)]
struct Iteration {
    pending: Vec<u32>,
    dead: Vec<u32>,
    slots: Vec<Value>,
    /// Nodes of this iteration that are ready or running.
    n_active: u32,
    n_children: u32,
}

impl PartState {
    /// Resets the state for a new step of `plan`: initial counts, roots ready.
    pub fn reset(&mut self, plan: &PartPlan) {
        let root = self.frames.first_mut().and_then(Option::take);
        self.frames.clear();
        self.children.clear();
        self.small.clear();
        self.large.clear();
        self.waiting.clear();
        self.fetched.clear();
        self.n_runners = 0;
        self.n_waiting = 0;
        self.finished = false;
        let mut root = root.unwrap_or_else(|| Frame::new(0, 0, 0, FrameInstance::default(), 0));
        if root.iterations.is_empty() {
            root.iterations.push_back(Iteration::default());
        }
        root.iterations.truncate(1);
        let iteration = &mut root.iterations[0];
        iteration.reset(plan, 0);
        self.frames.push(Some(root));
        let (iteration, mut ready) = self.arrivals(0, 0);
        for &node in plan.roots.iter().rev() {
            ready.push(plan, iteration, node, false);
        }
    }

    /// Drops the values that the step still holds, so that a spare state keeps no tensors alive. A step that was stopped
    /// has left some in the slots.
    pub fn clear(&mut self, was_stopped: bool) {
        self.frames.truncate(1);
        if let Some(Some(root)) = self.frames.first_mut() {
            root.iterations.truncate(1);
            if was_stopped {
                root.iterations.iter_mut().for_each(|iteration| iteration.slots.clear());
            }
            root.invariants.clear();
            root.parked.clear();
        }
        self.fetched.clear();
    }

    /// The next node to run, small ones first: they may make more large ones ready.
    pub fn pop(&mut self) -> Option<Token> {
        self.small.pop().or_else(|| self.large.pop_front())
    }

    /// A node that costs less than a hand-over to another thread, or the only ready node if it is not long. If the
    /// pool has one thread, any node that is not long: that thread would only run in place of this one.
    pub fn pop_small(&mut self, plan: &PartPlan) -> Option<Token> {
        while let Some(token) = self.small.pop() {
            if token.is_dead || self.weight(plan, token) < LONG {
                return Some(token);
            }
            self.large.push_back(token);
        }
        let first = *self.large.front()?;
        match plan.unit.pool.max_threads() <= 1 && self.weight(plan, first) < LONG {
            true => self.large.pop_front(),
            false => None,
        }
    }

    /// Bytes of a node's inputs; 0 if it does no work, and more than any limit if it is not known to be short.
    fn weight(&self, plan: &PartPlan, token: Token) -> usize {
        let node = &plan.nodes[token.node as usize];
        let frame = self.frames[token.frame as usize].as_ref();
        let iteration = frame.and_then(|frame| frame.iterations.get((token.iteration - frame.first) as usize));
        match (node.cost, iteration) {
            // It is a step of its own, with a caller that waits for it and for the device.
            _ if matches!(node.kernel, PlanKernel::Segment(_)) => usize::MAX,
            (Cost::Inline, _) | (_, None) => 0,
            _ if !node.is_tiny && !node.pace.is_short() => usize::MAX,
            (Cost::Elements | Cost::Heavy, Some(iteration)) => n_bytes(plan, node, iteration, 0),
        }
    }

    /// Registers a kernel that releases its thread; returns the ticket for [`PartState::end_wait`].
    pub fn begin_wait(&mut self, node: u32) -> u64 {
        self.n_waiting += 1;
        self.next_ticket += 1;
        self.waiting.insert(self.next_ticket, (node, Instant::now()));
        self.next_ticket
    }

    /// A pending kernel has completed.
    pub fn end_wait(&mut self, ticket: u64) {
        self.n_waiting -= 1;
        self.waiting.remove(&ticket);
    }

    /// The number of ready nodes that are worth a thread of their own.
    pub fn n_large(&self) -> usize {
        self.large.len()
    }

    /// The number of ready nodes.
    pub fn n_ready(&self) -> usize {
        self.small.len() + self.large.len()
    }

    pub fn has_ready(&self) -> bool {
        !self.small.is_empty() || !self.large.is_empty()
    }

    /// Drops the ready nodes: the step has failed.
    pub fn drop_ready(&mut self) {
        self.small.clear();
        self.large.clear();
    }

    /// Moves the inputs of a node that is about to run to `inputs`.
    pub fn take_inputs(&mut self, plan: &PartPlan, token: Token, inputs: &mut Vec<Value>) {
        let node = &plan.nodes[token.node as usize];
        let iteration = self.iteration(token);
        let first = node.first_slot as usize;
        inputs.clear();
        inputs.extend(iteration.slots[first..first + node.n_inputs as usize].iter_mut().map(std::mem::take));
        for &(i, constant) in &node.constants {
            inputs[i as usize] = Value::Tensor(plan.constants[constant as usize].clone());
        }
    }

    /// The slots of a tiny node's inputs, with constants filled in, and the slot of its output, if it has only one;
    /// `None` if an input is missing or not tiny.
    pub fn tiny_slots(&mut self, plan: &PartPlan, token: Token) -> Option<(&mut [Value], &mut [Value])> {
        let node = &plan.nodes[token.node as usize];
        let slots = &mut self.iteration(token).slots;
        let inputs = node.first_slot as usize..(node.first_slot + node.n_inputs) as usize;
        let (inputs, output) = match node.only_slot {
            NO_SLOT => (slots.get_mut(inputs)?, Default::default()),
            slot => {
                let [inputs, output] = slots.get_disjoint_mut([inputs, slot as usize..slot as usize + 1]).ok()?;
                (inputs, output)
            }
        };
        for &(i, constant) in &node.constants {
            // Still there from the step before, unless its kernel took it.
            if inputs[i as usize].is_empty() {
                inputs[i as usize] = Value::Tensor(plan.constants[constant as usize].clone());
            }
        }
        let is_tiny = |input: &Value| matches!(input, Value::Tensor(tensor) if tensor.is_inline());
        inputs.iter().all(is_tiny).then_some((inputs, output))
    }

    /// As [`PartState::propagate`], for a node that has written its output to the destination slot.
    pub fn propagate_placed(&mut self, plan: &PartPlan, token: Token) {
        let node = &plan.nodes[token.node as usize];
        let (iteration, mut ready) = self.arrivals(token.frame, token.iteration);
        count_down(plan, iteration, &mut ready, plan.edges[node.outputs[0].edges.start as usize]);
        for edge in &plan.edges[node.control.start as usize..node.control.end as usize] {
            arrive(plan, iteration, &mut ready, *edge, Arrival::Nothing);
        }
        self.leave(plan, token);
    }

    /// The iteration of a token, as it is identified in transfers.
    pub fn frame_iteration(&self, token: Token) -> FrameIteration {
        if token.frame == 0 {
            return FrameIteration::default();
        }
        let frame = self.frames[token.frame as usize].as_ref().map_or(0, |frame| frame.instance.id());
        FrameIteration { frame, iteration: u64::from(token.iteration) }
    }

    /// Delivers a feed.
    pub fn feed(&mut self, plan: &PartPlan, edges: std::ops::Range<u32>, value: &Tensor) {
        self.activate(
            plan,
            0,
            0,
            &plan.edges[edges.start as usize..edges.end as usize],
            &mut Value::Tensor(value.clone()),
        );
    }

    /// Propagates the outputs of a node, which may make others ready.
    pub fn propagate(&mut self, plan: &PartPlan, token: Token, outputs: &mut [Value]) {
        let node = &plan.nodes[token.node as usize];
        match node.flow {
            Flow::Enter => {
                let value = outputs[0].take();
                self.enter(plan, token, node, value);
            }
            Flow::Exit => {
                let value = outputs[0].take();
                let frame = self.frame_mut(token.frame);
                match value {
                    Value::Empty => frame.dead_exits.push(token.node),
                    value => {
                        frame.live_exits.push(token.node);
                        let (parent, iteration) = (frame.parent, frame.parent_iteration);
                        self.deliver(plan, parent, iteration, node, &mut [value], false);
                    }
                }
            }
            Flow::NextIteration => {
                // A dead value ends the loop on this path.
                let value = outputs[0].take();
                if !value.is_empty() {
                    self.next_iteration(plan, token, value);
                }
            }
            _ => self.deliver(plan, token.frame, token.iteration, node, outputs, token.is_dead),
        }
        self.leave(plan, token);
    }

    /// Marks a node as done.
    fn leave(&mut self, plan: &PartPlan, token: Token) {
        // Nothing waits for the end of the outermost frame's only iteration; the step ends when nothing is ready.
        if token.frame != 0 {
            self.iteration(token).n_active -= 1;
            self.settle(plan, token.frame);
        }
    }

    fn deliver(
        &mut self,
        plan: &PartPlan,
        frame: u32,
        iteration: u32,
        node: &NodePlan,
        outputs: &mut [Value],
        is_dead: bool,
    ) {
        // Borrowed by fields, so that fetches can be recorded while values are delivered.
        let PartState { frames, small, large, fetched, .. } = self;
        let (iteration, mut ready) = arrivals(frames, small, large, frame, iteration);
        for (output, value) in node.outputs.iter().zip(outputs) {
            if !output.fetches.is_empty() {
                for &fetch in &plan.fetches[output.fetches.start as usize..output.fetches.end as usize] {
                    fetched.push((fetch, fetched_value(node, value)));
                }
            }
            let edges = output.edges.start as usize..output.edges.end as usize;
            arrive_all(plan, iteration, &mut ready, &plan.edges[edges], value);
        }
        for edge in &plan.edges[node.control.start as usize..node.control.end as usize] {
            let arrival = if is_dead { Arrival::Dead } else { Arrival::Nothing };
            arrive(plan, iteration, &mut ready, *edge, arrival);
        }
    }

    /// Delivers a value (empty: dead) along these edges, and leaves it empty.
    fn activate(&mut self, plan: &PartPlan, frame: u32, number: u32, edges: &[Edge], value: &mut Value) {
        let (iteration, mut ready) = self.arrivals(frame, number);
        arrive_all(plan, iteration, &mut ready, edges, value);
    }

    /// Delivers a control output: only counts change.
    fn activate_control(&mut self, plan: &PartPlan, frame: u32, number: u32, edges: &[Edge], is_dead: bool) {
        if edges.is_empty() {
            return;
        }
        let (iteration, mut ready) = self.arrivals(frame, number);
        for edge in edges {
            let arrival = if is_dead { Arrival::Dead } else { Arrival::Nothing };
            arrive(plan, iteration, &mut ready, *edge, arrival);
        }
    }

    /// The iteration that receives values, and the queues for nodes that become ready.
    fn arrivals(&mut self, frame: u32, number: u32) -> (&mut Iteration, Ready<'_>) {
        arrivals(&mut self.frames, &mut self.small, &mut self.large, frame, number)
    }

    fn enter(&mut self, plan: &PartPlan, token: Token, node: &NodePlan, mut value: Value) {
        let child = self.child_frame(plan, token, node.enters);
        let edges = &plan.edges[node.outputs[0].edges.start as usize..node.outputs[0].edges.end as usize];
        let control = &plan.edges[node.control.start as usize..node.control.end as usize];
        let frame = self.frame_mut(child);
        frame.n_enters_missing -= 1;
        let (first, last) = (frame.first, frame.first + frame.iterations.len() as u32);
        if node.is_constant {
            frame.invariants.push((token.node, value.clone()));
            for number in first..last {
                self.activate(plan, child, number, edges, &mut value.clone());
                self.activate_control(plan, child, number, control, value.is_empty());
            }
        } else {
            self.activate_control(plan, child, 0, control, value.is_empty());
            self.activate(plan, child, 0, edges, &mut value);
        }
        self.settle(plan, child);
    }

    fn child_frame(&mut self, plan: &PartPlan, token: Token, frame_plan: u32) -> u32 {
        let key = (token.frame, token.iteration, frame_plan);
        if let Some(&child) = self.children.get(&key) {
            return child;
        }
        let shape = &plan.frames[frame_plan as usize];
        let instance = match &self.frames[token.frame as usize] {
            Some(parent) => parent.instance.child(token.iteration, &shape.name, plan.frame_ids),
            None => FrameInstance::default(),
        };
        let mut frame = Frame::new(frame_plan, token.frame, token.iteration, instance, shape.n_enters);
        let mut iteration = Iteration::default();
        iteration.reset(plan, frame_plan);
        frame.iterations.push_back(iteration);
        let child = match self.frames.iter().skip(1).position(Option::is_none) {
            Some(free) => {
                self.frames[free + 1] = Some(frame);
                free as u32 + 1
            }
            None => {
                self.frames.push(Some(frame));
                self.frames.len() as u32 - 1
            }
        };
        self.children.insert(key, child);
        self.iteration(token).n_children += 1;
        child
    }

    fn next_iteration(&mut self, plan: &PartPlan, token: Token, value: Value) {
        let frame = self.frame_mut(token.frame);
        let next = token.iteration + 1;
        if next - frame.first >= frame.iterations.len() as u32 {
            let limit = plan.frames[frame.plan as usize].parallel_iterations;
            if frame.iterations.len() >= limit {
                frame.parked.push((token.node, value));
                return;
            }
            self.open_iteration(plan, token.frame);
        }
        self.arrive_at_iteration(plan, token.frame, next, token.node, value);
    }

    fn arrive_at_iteration(&mut self, plan: &PartPlan, frame: u32, number: u32, node: u32, value: Value) {
        let node = &plan.nodes[node as usize];
        let control = &plan.edges[node.control.start as usize..node.control.end as usize];
        self.activate_control(plan, frame, number, control, false);
        let edges = &plan.edges[node.outputs[0].edges.start as usize..node.outputs[0].edges.end as usize];
        self.activate(plan, frame, number, edges, &mut { value });
    }

    /// Begins the iteration after the last one, and delivers loop invariants to it.
    fn open_iteration(&mut self, plan: &PartPlan, frame_id: u32) {
        let frame = self.frame_mut(frame_id);
        let mut iteration = Iteration::default();
        iteration.reset(plan, frame.plan);
        frame.iterations.push_back(iteration);
        let number = frame.first + frame.iterations.len() as u32 - 1;
        for (node, mut value) in frame.invariants.clone() {
            let node = &plan.nodes[node as usize];
            let control = &plan.edges[node.control.start as usize..node.control.end as usize];
            self.activate_control(plan, frame_id, number, control, value.is_empty());
            let edges = &plan.edges[node.outputs[0].edges.start as usize..node.outputs[0].edges.end as usize];
            self.activate(plan, frame_id, number, edges, &mut value);
        }
    }

    /// Ends iterations of a frame in which nothing is pending, starts deferred ones, and ends the frame with its last
    /// iteration.
    fn settle(&mut self, plan: &PartPlan, frame_id: u32) {
        if frame_id == 0 {
            return;
        }
        loop {
            let frame = self.frame_mut(frame_id);
            let idle = |iteration: &Iteration| iteration.n_active == 0 && iteration.n_children == 0;
            if frame.n_enters_missing > 0 || !frame.iterations.front().is_some_and(idle) {
                return;
            }
            let more = frame.iterations.len() > 1 || !frame.parked.is_empty();
            if !more {
                break;
            }
            frame.iterations.pop_front();
            frame.first += 1;
            let parked = std::mem::take(&mut frame.parked);
            if let Some((node, _)) = parked.first() {
                debug_assert_eq!(plan.nodes[*node as usize].flow, Flow::NextIteration);
                self.open_iteration(plan, frame_id);
                let frame = self.frame_mut(frame_id);
                let number = frame.first + frame.iterations.len() as u32 - 1;
                for (node, value) in parked {
                    self.arrive_at_iteration(plan, frame_id, number, node, value);
                }
            }
        }
        self.end_frame(plan, frame_id);
    }

    fn end_frame(&mut self, plan: &PartPlan, frame_id: u32) {
        let Some(frame) = self.frames[frame_id as usize].take() else { return };
        self.children.remove(&(frame.parent, frame.parent_iteration, frame.plan));
        for exit in &frame.dead_exits {
            if frame.live_exits.contains(exit) {
                continue;
            }
            let node = &plan.nodes[*exit as usize];
            for edges in [&node.control, &node.outputs[0].edges] {
                let edges = &plan.edges[edges.start as usize..edges.end as usize];
                self.activate_control(plan, frame.parent, frame.parent_iteration, edges, true);
            }
            let fetches = &node.outputs[0].fetches;
            for &fetch in &plan.fetches[fetches.start as usize..fetches.end as usize] {
                let error = Error::invalid_argument(format!("the fetched tensor '{}' is dead", node.node.name));
                self.fetched.push((fetch, Err(error)));
            }
        }
        let parent = Token { node: 0, frame: frame.parent, iteration: frame.parent_iteration, is_dead: false };
        self.iteration(parent).n_children -= 1;
        self.settle(plan, frame.parent);
    }

    fn frame_mut(&mut self, frame: u32) -> &mut Frame {
        self.frames[frame as usize].as_mut().expect("a frame lives as long as it has nodes that run")
    }

    fn iteration(&mut self, token: Token) -> &mut Iteration {
        let frame = self.frame_mut(token.frame);
        &mut frame.iterations[(token.iteration - frame.first) as usize]
    }
}

impl Frame {
    fn new(plan: u32, parent: u32, parent_iteration: u32, instance: FrameInstance, n_enters: u32) -> Frame {
        Frame {
            plan,
            parent,
            parent_iteration,
            instance,
            iterations: VecDeque::new(),
            first: 0,
            n_enters_missing: n_enters,
            invariants: Vec::new(),
            parked: Vec::new(),
            dead_exits: Vec::new(),
            live_exits: Vec::new(),
        }
    }
}

impl Iteration {
    fn reset(&mut self, plan: &PartPlan, frame: u32) {
        let frame = &plan.frames[frame as usize];
        self.pending.clear();
        self.pending.extend_from_slice(&frame.pending);
        self.dead.clear();
        self.dead.resize(frame.pending.len(), 0);
        // Nodes take their inputs from the slots when they run, so the slots are empty after a successful step.
        self.slots.resize_with(frame.n_slots as usize, Value::default);
        self.n_active = 0;
        self.n_children = 0;
    }
}

/// The outputs of a control-flow node, which the executor computes itself from its inputs. `None` is dead.
pub(crate) fn flow_outputs(node: &NodePlan, inputs: &mut [Value], outputs: &mut Vec<Value>) -> Result<()> {
    fn take(input: &mut Value) -> Result<Value> {
        match input.take() {
            Value::Empty => Err(Error::internal("an input did not arrive")),
            value => Ok(value),
        }
    }
    outputs.clear();
    if matches!(node.kernel, PlanKernel::Lend) {
        if let Value::Reference(cell) = &inputs[0]
            && !node.defers
        {
            // An uninitialised variable is an error even if the value is never used.
            cell.value()?;
        }
        outputs.push(take(&mut inputs[0])?);
        return Ok(());
    }
    match node.flow {
        Flow::Switch => {
            let predicate = match take(&mut inputs[1])? {
                Value::Tensor(tensor) => tensor.scalar_value::<bool>()?,
                Value::Reference(cell) => cell.value()?.scalar_value::<bool>()?,
                Value::Empty => return Err(Error::internal("a predicate did not arrive")),
            };
            let value = take(&mut inputs[0])?;
            outputs.extend(if predicate { [Value::Empty, value] } else { [value, Value::Empty] });
        }
        Flow::Merge => {
            let arrived = inputs.iter().position(|input| !matches!(input, Value::Empty));
            let index = arrived.ok_or_else(|| Error::internal("a merge ran without a live input"))?;
            let value = take(&mut inputs[index])?;
            outputs.extend([value, Value::Tensor(Tensor::scalar(index as i32))]);
        }
        Flow::Enter | Flow::Exit | Flow::NextIteration | Flow::LoopCond => outputs.push(take(&mut inputs[0])?),
        Flow::ControlTrigger | Flow::Plain | Flow::Transfer => {}
    }
    Ok(())
}

fn arrivals<'a>(
    frames: &'a mut [Option<Frame>],
    small: &'a mut Vec<Token>,
    large: &'a mut VecDeque<Token>,
    frame: u32,
    number: u32,
) -> (&'a mut Iteration, Ready<'a>) {
    let in_frame = frames[frame as usize].as_mut().expect("values arrive only in frames that are alive");
    let iteration = &mut in_frame.iterations[(number - in_frame.first) as usize];
    (iteration, Ready { small, large, frame, number })
}

/// The value that a fetch of an output returns.
#[cold]
fn fetched_value(node: &NodePlan, value: &Value) -> Result<Tensor> {
    match value {
        Value::Tensor(tensor) => Ok(tensor.clone()),
        Value::Reference(cell) => cell.value(),
        Value::Empty => Err(Error::invalid_argument(format!(
            "the fetched tensor '{}' is dead: it is in a branch that was not taken",
            node.node.name
        ))),
    }
}

/// Delivers a value (empty: dead) along all of these edges; it is moved along the last one.
#[inline]
fn arrive_all(plan: &PartPlan, iteration: &mut Iteration, ready: &mut Ready<'_>, edges: &[Edge], value: &mut Value) {
    if let Some((last, others)) = edges.split_last() {
        let is_dead = value.is_empty();
        for edge in others {
            let arrival = if is_dead { Arrival::Dead } else { Arrival::Copy(value) };
            arrive(plan, iteration, ready, *edge, arrival);
        }
        let arrival = if is_dead { Arrival::Dead } else { Arrival::Value(value) };
        arrive(plan, iteration, ready, *last, arrival);
    }
    // It had no consumer, or a `Merge` that already has a value did not take it.
    *value = Value::Empty;
}

/// Delivers along one edge, and queues the node if that makes it ready.
#[inline]
fn arrive(plan: &PartPlan, iteration: &mut Iteration, ready: &mut Ready<'_>, edge: Edge, arrival: Arrival<'_>) {
    if edge.end == End::Merge {
        return arrive_at_merge(plan, iteration, ready, edge, arrival);
    }
    match arrival {
        Arrival::Value(value) => iteration.slots[edge.slot as usize] = value.take(),
        Arrival::Copy(value) => iteration.slots[edge.slot as usize] = value.clone(),
        Arrival::Nothing => {}
        Arrival::Dead => iteration.dead[edge.local as usize] = 1,
    }
    count_down(plan, iteration, ready, edge);
}

/// Decrements the pending count of the node at the end of an edge.
#[inline]
fn count_down(plan: &PartPlan, iteration: &mut Iteration, ready: &mut Ready<'_>, edge: Edge) {
    let local = edge.local as usize;
    iteration.pending[local] -= 1;
    if iteration.pending[local] == 0 {
        let is_dead = iteration.dead[local] != 0;
        if edge.end == End::Small {
            iteration.n_active += 1;
            ready.small.push(Token { node: edge.node, frame: ready.frame, iteration: ready.number, is_dead });
        } else {
            let is_dead = is_dead && plan.nodes[edge.node as usize].flow != Flow::ControlTrigger;
            ready.push(plan, iteration, edge.node, is_dead);
        }
    }
}

fn arrive_at_merge(
    plan: &PartPlan,
    iteration: &mut Iteration,
    ready: &mut Ready<'_>,
    edge: Edge,
    arrival: Arrival<'_>,
) {
    let node = &plan.nodes[edge.node as usize];
    let local = node.local as usize;
    let dead_needed = if ready.number == 0 { node.dead_needed.0 } else { node.dead_needed.1 };
    let value = match arrival {
        Arrival::Value(value) => value.take(),
        Arrival::Copy(value) => value.clone(),
        Arrival::Nothing | Arrival::Dead => Value::Empty,
    };
    let (is_ready, is_dead) = if edge.slot == CONTROL {
        iteration.pending[local] -= 2;
        let all_dead = iteration.dead[local] >= dead_needed;
        let count = iteration.pending[local];
        (count == 0 || (count == 1 && all_dead), count == 1)
    } else if !value.is_empty() {
        let count = iteration.pending[local];
        // Only the first live input counts.
        if count & 1 == 0 {
            return;
        }
        iteration.pending[local] = count & !1;
        iteration.slots[edge.slot as usize] = value;
        (count == 1, false)
    } else {
        iteration.dead[local] += 1;
        (iteration.pending[local] == 1 && iteration.dead[local] == dead_needed, true)
    };
    if is_ready {
        ready.push(plan, iteration, edge.node, is_dead);
    }
}

/// The queues for nodes of one iteration that become ready.
struct Ready<'a> {
    small: &'a mut Vec<Token>,
    large: &'a mut VecDeque<Token>,
    frame: u32,
    number: u32,
}

impl Ready<'_> {
    fn push(&mut self, plan: &PartPlan, iteration: &mut Iteration, node: u32, is_dead: bool) {
        iteration.n_active += 1;
        let token = Token { node, frame: self.frame, iteration: self.number, is_dead };
        // If nothing else is ready, there is no work to share.
        let alone = self.small.is_empty() && self.large.is_empty();
        if plan.nodes[node as usize].is_late {
            return self.large.push_back(token);
        }
        if !alone && !is_dead && is_large(plan, &plan.nodes[node as usize], iteration) {
            self.large.push_back(token);
        } else {
            self.small.push(token);
        }
    }
}

/// The size of a node's inputs, in bytes, from which it may take milliseconds: too long for a network thread.
const LONG: usize = 4 << 20;

/// Whether a hand-over of the node to another thread pays off.
fn is_large(plan: &PartPlan, node: &NodePlan, iteration: &Iteration) -> bool {
    /// The size of a node's inputs, in bytes, from which it is worth a hand-over, which takes some microseconds.
    const ELEMENTS: usize = 256 << 10;
    const HEAVY: usize = 4 << 10;
    let threshold = match node.cost {
        Cost::Inline => return false,
        Cost::Elements => ELEMENTS,
        Cost::Heavy => HEAVY,
    };
    n_bytes(plan, node, iteration, threshold) >= threshold
}

/// The size of a node's inputs in bytes; a reference counts as `of_reference` bytes.
fn n_bytes(plan: &PartPlan, node: &NodePlan, iteration: &Iteration, of_reference: usize) -> usize {
    let slots = &iteration.slots[node.first_slot as usize..(node.first_slot + node.n_inputs) as usize];
    let constant_bytes: usize =
        node.constants.iter().map(|&(_, constant)| plan.constants[constant as usize].n_bytes()).sum();
    let arrived_bytes: usize = slots
        .iter()
        .map(|input| match input {
            Value::Tensor(tensor) => tensor.n_bytes(),
            Value::Reference(_) => of_reference,
            Value::Empty => 0,
        })
        .sum();
    arrived_bytes + constant_bytes
}

/// What is delivered along an edge. By reference, so that a value is moved only once, to its slot.
enum Arrival<'a> {
    /// A value to move; it is not empty.
    Value(&'a mut Value),
    /// A value that is delivered along other edges too.
    Copy(&'a Value),
    /// Nothing: a control edge carries no value.
    Nothing,
    /// A dead value.
    Dead,
}

/// Reads the references that a node takes as values. This happens now, when the node starts.
pub(crate) fn read_references(node: &NodePlan, inputs: &mut [Value]) -> Result<()> {
    if !node.has_references {
        return Ok(());
    }
    // A transfer also passes a reference on; it is read when it is received.
    let lends = node.lends || node.flow == Flow::Transfer;
    for (input, &by_reference) in inputs.iter_mut().zip(&node.node.ref_inputs) {
        if let Value::Reference(cell) = input {
            if !by_reference && !lends {
                let value = cell.value()?;
                *input = Value::Tensor(value);
            } else if !node.defers && !node.node.def.allows_uninitialized_input && !cell.is_initialized() {
                cell.value()?;
            }
        }
    }
    Ok(())
}
