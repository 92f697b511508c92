//! The companion of a loop that runs its iterations backwards.
//!
//! ```text
//!   forward frame                                backward frame
//!
//!   0 ─ Enter ─ Merge ─ Switch ─ Add ─┐          n ─ Enter ─ Merge ─ Switch ─ Sub ─┐   (pivot)
//!                 ▲        │    │     │                         │              │   │
//!                 └── NextIteration ◄─┘ ▲        0 ◄─ Exit ◄────┘   StackPopV2 ◄───┤
//!   n ◄─ Exit ◄────────────┘    │       │                                │         │
//!                        StackPushV2 ───┘                           b_sync ─ NextIteration
//! ```
//!
//! The forward loop gets a counter, so that the backward loop knows how often to run, and pushes what the backward
//! iterations need onto stacks. Stacks are made where the gradients were asked for, one per value, even for loops within
//! loops: control edges put all pushes in one order (an iteration's pushes lie between its `Add` and its
//! `NextIteration`, an inner loop's between those of the outer one) and all pops in the opposite one. A value in a branch is
//! pushed only if the branch is taken; its pop is behind a `Switch` on the same predicate, which has a stack of its own.
//! What does not change in the loop needs no stack and enters the backward loop as it is.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::{Rc, Weak};

use kolo_core::{DType, Error, PartialShape, Result, Tensor};

use super::loops::{Guard, Loops};
use crate::describe::control_flow::{
    self, FlowScope, IsConstant, ScopeCore, capture, enter_constant, enter_control, is_constant_enter, raw,
};
use crate::describe::request::NodeRequest;
use crate::{Attrs, Endpoint, Flow, FrameId, Graph, Node, NodeId, Nodes, Operation, Output, Region, Work};

/// The graph whose gradients are taken, and what they have added to its loops.
pub(super) struct Source {
    /// The graph as it was before.
    nodes: Nodes,
    pub loops: Loops,
    /// The frame in which the gradients were asked for.
    pub base: Option<FrameId>,
    /// The scope in which they were.
    scope: Option<Rc<dyn FlowScope>>,
    /// Nodes that were added to forward loops.
    added: RefCell<HashMap<NodeId, Place>>,
    /// Stacks, as the forward loops see them.
    entered: RefCell<HashMap<(FrameId, Endpoint), Endpoint>>,
    /// Shapes that are taken in a forward loop, so that not the whole value is kept.
    shapes: RefCell<HashMap<(Endpoint, DType), Endpoint>>,
}

/// Where a node lives: its frame, and the branches of it.
struct Place {
    frame: Option<FrameId>,
    guards: Vec<Guard>,
    /// The node of the graph as it was that it was added for.
    owner: NodeId,
}

impl Source {
    pub(super) fn new(graph: &Graph, nodes: Nodes, loops: Loops, base: Option<FrameId>) -> Rc<Source> {
        Rc::new(Source {
            nodes,
            loops,
            base,
            scope: graph.flow_scope(),
            added: RefCell::default(),
            entered: RefCell::default(),
            shapes: RefCell::default(),
        })
    }

    /// The frame in which an output lives; `None` for what the gradients have added outside of forward loops.
    fn frame_of(&self, id: NodeId) -> Option<Option<FrameId>> {
        match id.index() < self.nodes.len() {
            true => Some(self.loops.of_node(&self.nodes, id)),
            false => self.added.borrow().get(&id).map(|place| place.frame),
        }
    }

    fn guards(&self, at: Endpoint) -> Vec<Guard> {
        match self.added.borrow().get(&at.node) {
            Some(place) => place.guards.clone(),
            None => self.loops.guards(&self.nodes, at),
        }
    }

    /// Adds nodes to a forward loop, connected as they are.
    fn forward<R>(&self, graph: &Graph, build: impl FnOnce() -> R) -> R {
        graph.with_flow(self.scope.clone(), || raw(graph, build))
    }

    fn place(&self, id: NodeId, place: Place) {
        self.added.borrow_mut().insert(id, place);
    }

    /// The node of the graph as it was that a node belongs to: itself, or the one it was added for.
    fn owner(&self, id: NodeId) -> NodeId {
        self.added.borrow().get(&id).map_or(id, |place| place.owner)
    }

    /// The node that stands for a whole loop.
    pub(super) fn loop_owner(&self, frame: FrameId) -> NodeId {
        let shape = self.loops.frame(frame);
        shape.loop_cond.or(shape.enters.first().copied()).unwrap_or(NodeId::INVALID)
    }

    /// An output of the base frame as a forward loop sees it.
    fn enter<'g>(&self, graph: &'g Graph, frame: FrameId, at: Endpoint) -> Result<Output<'g>> {
        if let Some(&known) = self.entered.borrow().get(&(frame, at)) {
            return Ok(Output::new(graph, known));
        }
        let shape = self.loops.frame(frame);
        let outer = match shape.parent {
            Some(parent) if Some(parent) != self.base => self.enter(graph, parent, at)?,
            _ => Output::new(graph, at),
        };
        let entered = self.forward(graph, || {
            control_flow::enter(graph, outer, &shape.name, shape.parallel_iterations, IsConstant::Yes)
        });
        graph.check()?;
        self.entered.borrow_mut().insert((frame, at), entered.endpoint());
        Ok(entered)
    }

    /// Leads a loop variable that nobody used after the loop out of it.
    pub(super) fn exit<'g>(&self, graph: &'g Graph, frame: FrameId, switch: NodeId) -> Result<Output<'g>> {
        let last = Output::new(graph, Endpoint { node: switch, index: 0 });
        let exit = graph.with_gradient_of(switch, Region::Forward, || {
            self.forward(graph, || graph.op("Exit").input(last).try_build())
        })?;
        let guards = self.loops.loop_guards(frame).to_vec();
        self.place(exit.id(), Place { frame: self.loops.frame(frame).parent, guards, owner: switch });
        Ok(exit.output(0))
    }
}

/// A loop variable of a backward loop.
pub(super) struct BackwardVar<'g> {
    merge: Operation<'g>,
    switch: Operation<'g>,
    /// Its value in the body.
    pub value: Output<'g>,
}

/// The body of a backward loop, while it is being described.
pub(super) struct BackwardScope {
    core: ScopeCore,
    me: Weak<BackwardScope>,
    source: Rc<Source>,
    /// The loop it is the companion of.
    frame: FrameId,
    /// The name of its own frame.
    name: String,
    parallel_iterations: i64,
    forward: Counter,
    /// Runs before the forward counter goes around, whether or not the pushes in branches ran.
    forward_sync: Cell<Option<NodeId>>,
    /// Its own predicate and the way around of its own counter, before which all pops come; set once they are made.
    predicate: Cell<NodeId>,
    next: Cell<NodeId>,
    sync: Cell<Option<NodeId>>,
}

/// Counts the iterations of a forward loop.
struct Counter {
    /// Adds one; all pushes of an iteration come after it.
    add: NodeId,
    /// Goes around; all pushes of an iteration come before it.
    next: NodeId,
    /// How many iterations there were.
    total: Endpoint,
}

impl BackwardScope {
    /// Adds a counter to the forward loop `frame`, and the loop that counts down from there, whose body is empty yet. In
    /// a loop, `outer` is that loop's companion.
    pub(super) fn open(
        graph: &Graph,
        source: &Rc<Source>,
        frame: FrameId,
        outer: Option<&BackwardScope>,
    ) -> Result<Rc<BackwardScope>> {
        let shape = source.loops.frame(frame);
        let forward = graph.with_gradient_of(source.loop_owner(frame), Region::Forward, || {
            count_forward(graph, source, frame, outer)
        })?;
        let scope = Rc::new_cyclic(|me| BackwardScope {
            core: ScopeCore::new(graph.flow_scope(), Some(graph.new_loop_id())),
            me: me.clone(),
            source: source.clone(),
            frame,
            name: graph.scoped_name("while_context"),
            parallel_iterations: shape.parallel_iterations,
            forward,
            forward_sync: Cell::new(None),
            predicate: Cell::new(NodeId::INVALID),
            next: Cell::new(NodeId::INVALID),
            sync: Cell::new(None),
        });
        let total = Output::new(graph, scope.forward.total);
        let enter = control_flow::enter(graph, total, &scope.name, scope.parallel_iterations, IsConstant::No);
        let one = graph.named_constant("b_count", 1i32);
        graph.check()?;
        scope.core.add(graph, enter.endpoint().node);
        let last = scope.inside(graph, || -> Result<Output<'_>> {
            let merge = graph.op("Merge").name("b_count").inputs([enter, enter]).try_build()?;
            scope.core.pivot.set(Some(merge.id()));
            let more = graph.op("GreaterEqual").input(merge.output(0)).input(one).out();
            let predicate = graph.op("LoopCond").name("b_count").input(more).try_build()?;
            scope.predicate.set(predicate.id());
            let switch = control_flow::switch(graph, merge.output(0), predicate.output(0))?;
            let index = graph.op("Sub").input(switch.output(1)).input(one).try_build()?;
            scope.core.pivot.set(Some(index.id()));
            let next = graph.op("NextIteration").name("b_count").input(index.output(0)).try_build()?;
            scope.next.set(next.id());
            graph.close_loop(merge.id(), 1, next.output(0).endpoint())?;
            Ok(switch.output(0))
        })?;
        let end = control_flow::exit(graph, last)?;
        if let Some(outer) = outer {
            // The pops of one run of this loop come before those of the next one.
            outer.sync_on(graph, end.endpoint().node)?;
        }
        Ok(scope)
    }

    /// Runs `build` as part of the body.
    pub(super) fn inside<R>(&self, graph: &Graph, build: impl FnOnce() -> R) -> R {
        let me = self.me.upgrade().map(|me| me as Rc<dyn FlowScope>);
        graph.with_flow(me, build)
    }

    /// A loop variable that begins as `start`, which lives outside, with what is known of its shape in every iteration.
    pub(super) fn variable<'g>(
        &self,
        graph: &'g Graph,
        start: Output<'g>,
        shape: Option<PartialShape>,
    ) -> Result<BackwardVar<'g>> {
        let enter = control_flow::enter(graph, start, &self.name, self.parallel_iterations, IsConstant::No);
        graph.check()?;
        if let Some(shape) = shape {
            graph.replace_output_shape(enter.endpoint(), shape);
        }
        self.core.add(graph, enter.endpoint().node);
        self.inside(graph, || {
            let merge = graph.op("Merge").inputs([enter, enter]).try_build()?;
            let predicate = Output::new(graph, Endpoint { node: self.predicate.get(), index: 0 });
            let switch = control_flow::switch(graph, merge.output(0), predicate)?;
            let value = graph.op("Identity").input(switch.output(1)).try_build()?.output(0);
            Ok(BackwardVar { merge, switch, value })
        })
    }

    /// Gives a variable its value in the next iteration. Returns its last value, outside.
    pub(super) fn close<'g>(&self, graph: &'g Graph, var: BackwardVar<'g>, next: Output<'g>) -> Result<Output<'g>> {
        graph.check()?;
        let next = self.inside(graph, || graph.op("NextIteration").input(next).try_build())?;
        graph.close_loop(var.merge.id(), 1, next.output(0).endpoint())?;
        control_flow::exit(graph, var.switch.output(0))
    }

    /// What a value of the forward loop is in the iteration that is being undone.
    fn value_of(&self, graph: &Graph, at: Endpoint) -> Result<Endpoint> {
        let source = &self.source;
        let node = graph.nodes().node(at.node).clone();
        if let Some(enter) = self.invariant(graph, at) {
            return capture(graph, self, enter.inputs[0]);
        }
        if node.def.work == Work::Constant {
            let copy = graph.op("Const").attr("dtype", node.outputs[0].dtype);
            let copy = copy.attr("value", node.attrs.tensor("value")?.clone());
            return Ok(self.inside(graph, || copy.try_build())?.output(0).endpoint());
        }
        let guards = source.guards(at);
        let stack = graph
            .with_gradient_of(source.owner(at.node), Region::Forward, || self.push(graph, at, !guards.is_empty()))?;
        let mut handle = Output::new(graph, capture(graph, self, stack)?);
        for guard in guards {
            let taken = Output::new(graph, capture(graph, self, guard.predicate)?);
            let sides = self.inside(graph, || control_flow::switch(graph, handle, taken))?;
            handle = sides.output(guard.side as usize);
        }
        let info = &node.outputs[at.index as usize];
        let pop =
            self.inside(graph, || graph.op("StackPopV2").input(handle).attr("elem_type", info.dtype).try_build())?;
        graph.replace_output_shape(pop.output(0).endpoint(), info.shape.clone());
        self.sync_on(graph, pop.id())?;
        Ok(pop.output(0).endpoint())
    }

    /// The constant `Enter` from which a value of the forward loop comes unchanged, if it does.
    fn invariant(&self, graph: &Graph, at: Endpoint) -> Option<std::sync::Arc<Node>> {
        let nodes = graph.nodes();
        let is_ref = nodes.output(at).is_ref;
        let mut node = nodes.node(at.node);
        // What depends on the gradient that arrives is dead in a branch that was not taken, so a switch is no hurdle.
        while node.passed_on().is_some() || node.def.flow == Flow::Switch {
            node = nodes.node(node.inputs.first()?.node);
        }
        // What a reference refers to may change from one iteration to the next.
        let unchanged = is_constant_enter(node) && node.outputs[0].is_ref == is_ref;
        unchanged.then(|| node.clone())
    }

    /// Keeps a value of every forward iteration on a stack, which lives where the gradients were asked for.
    fn push(&self, graph: &Graph, at: Endpoint, is_guarded: bool) -> Result<Endpoint> {
        let source = &self.source;
        let value = Output::new(graph, at);
        let stack = graph.with_flow(source.scope.clone(), || {
            let no_limit = graph.constant(-1i32);
            graph.op("StackV2").name("f_acc").input(no_limit).attr("elem_type", value.dtype()).try_build()
        })?;
        let handle = source.enter(graph, self.frame, stack.output(0).endpoint())?;
        let after = Operation::new(graph, self.forward.add);
        let push = source
            .forward(graph, || graph.op("StackPushV2").input(handle).input(value).control_input(after).try_build())?;
        if !is_guarded {
            graph.add_control_input(self.forward.next, push.id());
        } else if let Some(sync) = self.forward_sync.get() {
            graph.add_control_input(sync, push.id());
        } else {
            let sync =
                source.forward(graph, || graph.op("ControlTrigger").name("f_sync").control_input(push).try_build());
            self.forward_sync.set(Some(sync.clone()?.id()));
            graph.add_control_input(self.forward.next, sync?.id());
        }
        Ok(stack.output(0).endpoint())
    }

    /// The next backward iteration begins its pops after `node`.
    fn sync_on(&self, graph: &Graph, node: NodeId) -> Result<()> {
        if let Some(sync) = self.sync.get() {
            graph.add_control_input(sync, node);
            return Ok(());
        }
        let after = Operation::new(graph, node);
        let sync = self.inside(graph, || {
            raw(graph, || graph.op("ControlTrigger").name("b_sync").control_input(after).try_build())
        })?;
        self.sync.set(Some(sync.id()));
        graph.add_control_input(self.next.get(), sync.id());
        Ok(())
    }
}

impl FlowScope for BackwardScope {
    fn core(&self) -> &ScopeCore {
        &self.core
    }

    fn bring_in(&self, graph: &Graph, at: Endpoint) -> Result<Endpoint> {
        if self.source.frame_of(at.node) == Some(Some(self.frame)) {
            return self.value_of(graph, at);
        }
        let at = self.core.seen_around(graph, at)?;
        enter_constant(graph, &self.core, &self.name, self.parallel_iterations, at)
    }

    fn bring_in_control(&self, graph: &Graph, id: NodeId) -> Result<NodeId> {
        enter_control(graph, self, id)
    }

    /// A shape is taken where the value is: keeping it costs less than keeping the value.
    fn adapt(&self, graph: &Graph, request: &mut NodeRequest) -> Result<()> {
        let (source, [at]) = (&self.source, request.inputs.as_slice()) else { return Ok(()) };
        let Some(frame) = source.frame_of(at.node).filter(|frame| *frame != source.base) else { return Ok(()) };
        if request.op != "Shape" {
            return Ok(());
        }
        let (at, value) = (*at, Output::new(graph, *at));
        let dtype = request.attrs.dtype("out_type").unwrap_or(DType::I32);
        if let Some(shape) = value.shape().known()
            && dtype == DType::I32
            && shape.iter().all(|&dim| i32::try_from(dim).is_ok())
        {
            request.op = "Const".to_owned();
            request.inputs.clear();
            request.attrs = Attrs::default();
            request.attrs.set("dtype", DType::I32);
            request.attrs.set("value", Tensor::vector(shape.iter().map(|&dim| dim as i32).collect::<Vec<_>>()));
            return Ok(());
        }
        let known = source.shapes.borrow().get(&(at, dtype)).copied();
        let shape = match known {
            Some(shape) => shape,
            None => {
                let owner = source.owner(at.node);
                let shape = graph.with_gradient_of(owner, Region::Forward, || {
                    source.forward(graph, || graph.op("Shape").input(value).attr("out_type", dtype).try_build())
                })?;
                source.place(shape.id(), Place { frame, guards: source.guards(at), owner });
                let shape = shape.output(0).endpoint();
                source.shapes.borrow_mut().insert((at, dtype), shape);
                shape
            }
        };
        request.op = "Identity".to_owned();
        request.inputs = vec![shape];
        request.attrs = Attrs::default();
        Ok(())
    }
}

/// Adds a counter to a forward loop.
fn count_forward(graph: &Graph, source: &Source, frame: FrameId, outer: Option<&BackwardScope>) -> Result<Counter> {
    let shape = source.loops.frame(frame);
    let Some(predicate) = shape.loop_cond else {
        return Err(Error::invalid_argument(format!("loop '{}' has no LoopCond", shape.name)));
    };
    let zero = || graph.op("Const").name("f_count").attr("dtype", DType::I32).attr("value", Tensor::scalar(0i32));
    let zero = match outer {
        None => graph.with_flow(source.scope.clone(), || zero().try_build())?,
        // The pushes of one run of this loop come before those of the next one.
        Some(outer) => {
            let after = Operation::new(graph, outer.forward.add);
            source.forward(graph, || zero().control_input(after).try_build())?
        }
    };
    source.forward(graph, || {
        let enter = control_flow::enter(graph, zero.output(0), &shape.name, shape.parallel_iterations, IsConstant::No);
        let merge = graph.op("Merge").name("f_count").inputs([enter, enter]).try_build()?;
        let predicate = Output::new(graph, Endpoint { node: predicate, index: 0 });
        let switch = control_flow::switch(graph, merge.output(0), predicate)?;
        let count = graph.op("Identity").name("f_count").input(switch.output(1)).try_build()?;
        let one = graph.op("Const").attr("dtype", DType::I32).attr("value", Tensor::scalar(1i32)).control_input(count);
        let add = graph.op("AddV2").input(count.output(0)).input(one.try_build()?.output(0)).try_build()?;
        let next = graph.op("NextIteration").name("f_count").input(add.output(0)).try_build()?;
        graph.close_loop(merge.id(), 1, next.output(0).endpoint())?;
        let total = graph.op("Exit").name("f_count").input(switch.output(0)).try_build()?;
        let guards = source.loops.loop_guards(frame).to_vec();
        source.place(total.id(), Place { frame: shape.parent, guards, owner: source.loop_owner(frame) });
        Ok(Counter { add: add.id(), next: next.id(), total: total.output(0).endpoint() })
    })
}
