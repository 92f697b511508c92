//! Gradients as a rewrite: walks the graph backwards from `ys`, asks every op on a path to `xs` for its rule, and sums
//! what arrives at each output. Only adds nodes; what was there stays as it was. Nodes are differentiated in topological order
//! from the last described to the first ([`topological_order`]), so the order of each sum follows from the graph alone.
//!
//! A loop is differentiated as a whole: it gets a companion that runs its iterations backwards ([`backward`]). What is a
//! loop is read off the graph ([`loops`]), so that imported graphs are differentiated like any other.

mod backward;
mod loops;
mod training;

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use kolo_core::{DType, Error, Result, Shape, Tensor};

use crate::describe::control_flow::is_constant_enter;
use crate::op::def::{Grad, Gradient, IndexedSlices};
use crate::plan::prune::describe_cycle;
use crate::rewrite::order::topological_order;
use crate::{Endpoint, Flow, FrameId, Graph, NodeId, Nodes, Operation, Output};
use backward::{BackwardScope, Source};
use loops::Loops;
pub(crate) use training::BackwardPass;
pub use training::{GradParts, InputName, Loss, OutputName, Region, Slot, TrainedVariable, Training, VariableUpdate};

/// What to do differently from [`gradients`].
#[derive(Clone, Default)]
pub struct GradientOptions<'g> {
    /// The gradients to start with, one per y; ones if absent.
    pub grad_ys: Vec<Option<Output<'g>>>,
    /// Outputs through which no gradient passes.
    pub stop_gradients: Vec<Output<'g>>,
    /// Puts each gradient op on the device of the op it belongs to.
    pub colocate_with_ops: bool,
}

/// The gradients of the sum of `ys` with respect to each of `xs`; `None` where no differentiable path leads from one to
/// the other. For a variable, pass its [`crate::Variable::handle`].
pub fn gradients<'g>(ys: &[Output<'g>], xs: &[Output<'g>]) -> Result<Vec<Option<Grad<'g>>>> {
    gradients_with(ys, xs, &GradientOptions::default())
}

/// [`gradients`], with options.
pub fn gradients_with<'g>(
    ys: &[Output<'g>],
    xs: &[Output<'g>],
    options: &GradientOptions<'g>,
) -> Result<Vec<Option<Grad<'g>>>> {
    let Some(first) = ys.first() else { return Ok(vec![None; xs.len()]) };
    let graph = first.graph();
    graph.check()?;
    let mut given = ys.iter().chain(xs).chain(options.grad_ys.iter().flatten());
    if given.any(|output| !output.is_valid()) {
        return Err(Error::invalid_argument("cannot differentiate what could not be made"));
    }
    for y in ys {
        if !y.dtype().is_float() {
            return Err(Error::invalid_argument(format!("cannot differentiate {y:?}: only floats have gradients")));
        }
    }
    let nodes = graph.snapshot();
    let ends: Vec<NodeId> = ys.iter().chain(xs).map(|output| output.endpoint().node).collect();
    let loops = Loops::of(&nodes, &ends)?;
    let frame_of = |output: &Output<'g>| loops.of_node(&nodes, output.endpoint().node);
    let level = frame_of(first);
    if let Some(other) = ys.iter().find(|y| frame_of(y) != level) {
        return Err(Error::invalid_argument(format!("{first:?} and {other:?} are not in the same loop")));
    }
    if let Some(inner) = xs.iter().find(|x| !loops.is_around(frame_of(x), level)) {
        return Err(Error::invalid_argument(format!("no gradient with respect to {inner:?}: it is in a while loop")));
    }
    let stops: HashSet<Endpoint> = options.stop_gradients.iter().map(|output| output.endpoint()).collect();
    let between = between(&nodes, ys, xs, &stops)?;
    let source = Source::new(graph, nodes.clone(), loops, level);
    let mut walk =
        Walk { graph, nodes: &nodes, source, between, stops, options, sums: Sums::default(), companions: Vec::new() };
    let mut starts = Vec::with_capacity(ys.len());
    let (result, added) = graph.noting_gradient_nodes(|| -> Result<Vec<Option<Grad<'g>>>> {
        graph.with_gradient_source(|| -> Result<()> {
            for (i, y) in ys.iter().enumerate() {
                let start = match options.grad_ys.get(i).copied().flatten() {
                    Some(given) => given,
                    None => graph.with_gradient_of(y.endpoint().node, Region::Backward, || ones_like(*y)),
                };
                starts.push(start.endpoint());
                walk.sums.add(y.endpoint(), start.into());
            }
            walk.level(level)
        })?;
        let total = |x: &Output<'g>| {
            graph.with_gradient_of(x.endpoint().node, Region::Backward, || walk.sums.total(graph, x.endpoint()))
        };
        xs.iter().map(total).collect()
    });
    graph.check()?;
    let result = result?;
    let pass = BackwardPass::new(&graph.nodes(), (ys, &starts), (xs, &result), &added);
    graph.add_backward_pass(pass);
    Ok(result)
}

/// One call of [`gradients`].
struct Walk<'a, 'g> {
    graph: &'g Graph,
    /// The graph as it was before the call.
    nodes: &'a Nodes,
    /// The loops, and what the gradients have added to them.
    source: Rc<Source>,
    between: HashSet<NodeId>,
    stops: HashSet<Endpoint>,
    options: &'a GradientOptions<'g>,
    sums: Sums<'g>,
    /// The backward loops that are being described, the innermost last.
    companions: Vec<Rc<BackwardScope>>,
}

/// What is differentiated in one piece.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Item {
    Node(NodeId),
    /// A whole loop, with the loops in it.
    Loop(FrameId),
}

impl<'g> Walk<'_, 'g> {
    /// Differentiates what is directly in one frame, loops within it as a whole.
    fn level(&mut self, level: Option<FrameId>) -> Result<()> {
        for item in self.backwards(level)? {
            match item {
                Item::Node(id) => self.differentiate(id)?,
                Item::Loop(frame) => self.differentiate_loop(frame)?,
            }
        }
        Ok(())
    }

    fn wanted(&self, at: Endpoint) -> bool {
        self.between.contains(&at.node) && !self.stops.contains(&at)
    }

    /// Adds the gradient of one node, all of which belongs to it.
    fn differentiate(&mut self, id: NodeId) -> Result<()> {
        self.graph.with_gradient_of(id, Region::Backward, || self.apply_rule(id))
    }

    /// Asks one op for the gradients of its inputs and adds them to the sums.
    fn apply_rule(&mut self, id: NodeId) -> Result<()> {
        let (graph, node) = (self.graph, self.nodes.node(id));
        let operation = Operation::new(graph, id);
        if !node.inputs.iter().any(|&at| self.wanted(at)) {
            return Ok(());
        }
        let mut arrived = Vec::with_capacity(node.outputs.len());
        for index in 0..node.outputs.len() as u32 {
            arrived.push(self.sums.total(graph, Endpoint { node: id, index })?);
        }
        if arrived.iter().all(Option::is_none) {
            return Ok(());
        }
        let scope = format!("{}_grad", node.name.replace('/', "_"));
        let build = || -> Result<Vec<Option<Grad<'g>>>> {
            match node.def.gradient {
                Gradient::Same => Ok(vec![arrived[0]]),
                // Gradients that are taken inside a loop body leave it as they are, one per iteration.
                Gradient::Flow if node.def.flow == Flow::Enter => Ok(vec![arrived[0]]),
                Gradient::None(_) => Ok(Vec::new()),
                Gradient::Refused(why) => {
                    Err(Error::invalid_argument(format!("{why} (gradient of {})", node.describe())))
                }
                Gradient::Rule(rule) => {
                    let dense = arrived.iter().map(|grad| grad.map(|grad| densify(graph, grad)).transpose());
                    rule(operation, &dense.collect::<Result<Vec<_>>>()?)
                }
                Gradient::Unstated | Gradient::Flow => {
                    Err(Error::unimplemented(format!("no gradient is known for {}", node.describe())))
                }
            }
        };
        let grads = self.scoped(&scope, operation, build)?;
        if grads.len() > node.inputs.len() {
            return Err(Error::internal(format!(
                "{} gradients for {} inputs of {}",
                grads.len(),
                node.inputs.len(),
                node.describe()
            )));
        }
        for (&input, grad) in node.inputs.iter().zip(grads) {
            if let Some(grad) = grad
                && self.wanted(input)
            {
                self.sums.add(input, grad);
            }
        }
        Ok(())
    }

    fn scoped<R>(&self, scope: &str, operation: Operation<'g>, build: impl FnOnce() -> R) -> R {
        let scoped = || self.graph.name_scope(scope, build);
        if self.options.colocate_with_ops { self.graph.colocate_with(operation, scoped) } else { scoped() }
    }

    /// Adds the loop that runs backwards: as many iterations as the loop made, the last one first. What counts its
    /// iterations belongs to the loop's predicate, what carries a gradient around to the variable's `Merge` or `Enter`.
    fn differentiate_loop(&mut self, frame: FrameId) -> Result<()> {
        let source = self.source.clone();
        let owner = source.loop_owner(frame);
        self.graph.with_gradient_of(owner, Region::Backward, || self.turn_loop_around(&source, frame))
    }

    fn turn_loop_around(&mut self, source: &Rc<Source>, frame: FrameId) -> Result<()> {
        let shape = source.loops.frame(frame);
        if !shape.enters.iter().any(|&enter| self.wanted(self.nodes.node(enter).inputs[0])) {
            return Ok(());
        }
        let mut arrived = Vec::new();
        for var in source.loops.vars(frame) {
            let mut parts = Vec::new();
            for &exit in &var.exits {
                parts.extend(self.sums.total(self.graph, Endpoint { node: exit, index: 0 })?);
            }
            arrived.push(parts);
        }
        if arrived.iter().all(Vec::is_empty) {
            return Ok(());
        }
        let scope = format!("{}_grad", shape.name.replace('/', "_"));
        self.graph.name_scope(&scope, || self.backward_loop(source, frame, arrived))
    }

    fn backward_loop(&mut self, source: &Rc<Source>, frame: FrameId, arrived: Vec<Vec<Grad<'g>>>) -> Result<()> {
        let (graph, shape) = (self.graph, source.loops.frame(frame));
        let scope = BackwardScope::open(graph, source, frame, self.companions.last().map(|outer| &**outer))?;

        // The variables that matter: gradients go around with them.
        let mut vars = Vec::new();
        for (var, parts) in source.loops.vars(frame).iter().zip(arrived) {
            let value = Endpoint { node: var.merge, index: 0 };
            if !self.between.contains(&var.merge) || !self.nodes.output(value).dtype.is_float() {
                continue;
            }
            let looped = graph.with_gradient_of(var.merge, Region::Backward, || {
                let start = match parts.as_slice() {
                    [] => {
                        let last = match var.exits.first() {
                            Some(&exit) => Output::new(graph, Endpoint { node: exit, index: 0 }),
                            None => source.exit(graph, frame, var.switch)?,
                        };
                        zeros_like(last)?
                    }
                    [grad] => densify(graph, *grad)?,
                    parts => densify(graph, sum(graph, parts)?)?,
                };
                scope.variable(graph, start, Some(self.nodes.output(value).shape.clone()))
            })?;
            self.sums.add(self.nodes.node(var.next).inputs[0], looped.value.into());
            vars.push((var, looped));
        }

        self.companions.push(scope.clone());
        let body = scope.inside(graph, || self.level(Some(frame)));
        self.companions.pop();
        body?;

        for (var, looped) in vars {
            let before = Endpoint { node: var.switch, index: 1 };
            let total = graph.with_gradient_of(var.merge, Region::Backward, || {
                let next = scope.inside(graph, || -> Result<Output<'g>> {
                    match self.sums.total(graph, before)? {
                        Some(grad) => densify(graph, grad),
                        None => zeros_like(Output::new(graph, before)),
                    }
                })?;
                scope.close(graph, looped, next)
            })?;
            let enters = self.nodes.node(var.enter).inputs[0];
            if self.wanted(enters) {
                self.sums.add(enters, total.into());
            }
        }

        // What every iteration sees gets a gradient from every iteration.
        for &enter in &shape.enters {
            let node = self.nodes.node(enter);
            if !is_constant_enter(node) || !self.wanted(node.inputs[0]) {
                continue;
            }
            let at = Endpoint { node: enter, index: 0 };
            let total = graph.with_gradient_of(enter, Region::Backward, || -> Result<Option<Output<'g>>> {
                let part = scope.inside(graph, || -> Result<Option<Output<'g>>> {
                    self.sums.total(graph, at)?.map(|grad| densify(graph, grad)).transpose()
                })?;
                let Some(part) = part else { return Ok(None) };
                let zeros = zeros_for(Output::new(graph, node.inputs[0]), part.dtype())?;
                let looped = scope.variable(graph, zeros, None)?;
                let next = scope.inside(graph, || looped.value + part);
                scope.close(graph, looped, next).map(Some)
            })?;
            let Some(total) = total else { continue };
            self.sums.add(node.inputs[0], total.into());
        }
        Ok(())
    }

    /// What is to be differentiated in one frame, each after all of its consumers, otherwise what was described last first.
    fn backwards(&self, level: Option<FrameId>) -> Result<Vec<Item>> {
        let loops = &self.source.loops;
        let is_base = level == self.source.base;
        let item_of = |id: NodeId| {
            let home = loops.home(id);
            if home == level {
                // What makes up the loop itself is differentiated with the loop.
                let outside = !loops.is_border(id) || (is_base && self.nodes.node(id).def.flow == Flow::Enter);
                outside.then_some(Item::Node(id))
            } else {
                loops.child_towards(level, home?).map(Item::Loop)
            }
        };
        let mut members: Vec<NodeId> = self.between.iter().copied().collect();
        members.sort_unstable_by_key(|id| Reverse(*id));
        let (mut items, mut position): (Vec<(Item, NodeId)>, HashMap<Item, usize>) = Default::default();
        let mut place: HashMap<NodeId, usize> = HashMap::with_capacity(members.len());
        for &id in &members {
            let Some(item) = item_of(id) else { continue };
            let at = *position.entry(item).or_insert_with(|| {
                items.push((item, id));
                items.len() - 1
            });
            place.insert(id, at);
        }
        // Gradients flow from consumers to producers, so an item needs its consumers.
        let mut needs: Vec<Vec<usize>> = vec![Vec::new(); items.len()];
        for id in &members {
            let Some(&consumer) = place.get(id) else { continue };
            let inputs = self.nodes.node(*id).inputs.iter().filter_map(|at| place.get(&at.node).copied());
            inputs.filter(|producer| *producer != consumer).for_each(|producer| needs[producer].push(consumer));
        }
        let order = topological_order(&needs).map_err(|cycle| {
            let cycle: Vec<NodeId> = cycle.into_iter().rev().map(|i| items[i].1).collect();
            describe_cycle(self.nodes, &cycle)
        })?;
        Ok(order.into_iter().map(|i| items[i].0).collect())
    }
}

/// The gradients that have arrived at each output so far.
#[derive(Default)]
struct Sums<'g> {
    parts: HashMap<Endpoint, Vec<Grad<'g>>>,
}

impl<'g> Sums<'g> {
    fn add(&mut self, at: Endpoint, grad: Grad<'g>) {
        self.parts.entry(at).or_default().push(grad);
    }

    /// The sum of what arrived at `at`, which replaces the parts.
    fn total(&mut self, graph: &'g Graph, at: Endpoint) -> Result<Option<Grad<'g>>> {
        let Some(parts) = self.parts.get_mut(&at) else { return Ok(None) };
        if parts.len() > 1 {
            *parts = vec![sum(graph, parts)?];
        }
        Ok(parts.first().copied())
    }
}

fn sum<'g>(graph: &'g Graph, parts: &[Grad<'g>]) -> Result<Grad<'g>> {
    let slices: Option<Vec<IndexedSlices<'g>>> = parts
        .iter()
        .map(|part| match part {
            Grad::Slices(slices) => Some(*slices),
            Grad::Dense(_) => None,
        })
        .collect();
    if let Some(slices) = slices {
        let axis = graph.constant(0i32);
        let concat = |pick: fn(&IndexedSlices<'g>) -> Output<'g>| {
            graph.op("ConcatV2").inputs(slices.iter().map(pick)).input(axis).out()
        };
        return Ok(Grad::Slices(IndexedSlices {
            values: concat(|slices| slices.values),
            indices: concat(|slices| slices.indices),
            dense_shape: slices[0].dense_shape,
        }));
    }
    let dense = parts.iter().map(|part| densify(graph, *part)).collect::<Result<Vec<_>>>()?;
    Ok(Grad::Dense(graph.op("AddN").inputs(dense).out()))
}

/// Rows as a whole tensor, rows that occur twice summed.
fn densify<'g>(graph: &'g Graph, grad: Grad<'g>) -> Result<Output<'g>> {
    match grad {
        Grad::Dense(output) => Ok(output),
        Grad::Slices(slices) => {
            let [zero, one] = [0i32, 1].map(|i| graph.constant([i]));
            let n_rows = graph
                .op("StridedSlice")
                .inputs([slices.dense_shape, zero, one, one])
                .attr("shrink_axis_mask", 1i64)
                .out();
            Ok(graph.op("UnsortedSegmentSum").inputs([slices.values, slices.indices, n_rows]).out())
        }
    }
}

impl<'g> Grad<'g> {
    /// The gradient as one tensor.
    pub fn dense(self) -> Result<Output<'g>> {
        match self {
            Grad::Dense(output) => Ok(output),
            Grad::Slices(slices) => densify(slices.values.graph(), self),
        }
    }
}

fn ones_like(y: Output<'_>) -> Output<'_> {
    let graph = y.graph();
    let one = crate::IntoOutput::into_output(1.0f32, graph, y.dtype());
    match y.shape().rank() {
        Some(0) => one,
        _ => graph.op("Fill").input(graph.op("Shape").input(y).out()).input(one).out(),
    }
}

/// The nodes through which a change of an x can reach a y.
fn between(nodes: &Nodes, ys: &[Output<'_>], xs: &[Output<'_>], stops: &HashSet<Endpoint>) -> Result<HashSet<NodeId>> {
    let carries = |at: &Endpoint| {
        let output = nodes.output(*at);
        !stops.contains(at) && (output.dtype.is_float() || output.dtype == DType::Resource)
    };
    let mut needed = HashSet::new();
    let mut stack: Vec<NodeId> = ys.iter().map(|y| y.endpoint().node).collect();
    while let Some(id) = stack.pop() {
        if needed.insert(id) {
            stack.extend(nodes.node(id).inputs.iter().filter(|at| carries(at)).map(|at| at.node));
        }
    }
    let mut consumers: HashMap<NodeId, Vec<NodeId>> = HashMap::new();
    for &id in &needed {
        for at in nodes.node(id).inputs.iter().filter(|at| carries(at)) {
            consumers.entry(at.node).or_default().push(id);
        }
    }
    let mut reached = HashSet::new();
    let mut stack: Vec<NodeId> = xs.iter().map(|x| x.endpoint().node).filter(|id| needed.contains(id)).collect();
    while let Some(id) = stack.pop() {
        if reached.insert(id) {
            stack.extend(consumers.get(&id).into_iter().flatten());
        }
    }
    refuse_second_order(nodes, &needed, xs)?;
    Ok(reached)
}

/// The gradient of a loop takes values from stacks, and no edge says which. A y that depends on such values, which in
/// turn depend on an x, would silently lack a part of its gradient.
fn refuse_second_order(nodes: &Nodes, needed: &HashSet<NodeId>, xs: &[Output<'_>]) -> Result<()> {
    let stack_of = |id: NodeId| {
        let mut at = nodes.node(id).inputs[0].node;
        while matches!(nodes.node(at).def.flow, Flow::Enter | Flow::Switch) {
            at = nodes.node(at).inputs[0].node;
        }
        at
    };
    let popped = needed.iter().filter(|id| nodes.node(**id).op() == "StackPopV2").map(|&id| stack_of(id));
    let popped: HashSet<NodeId> = popped.collect();
    if popped.is_empty() {
        return Ok(());
    }
    // Back edges are the only ones that point forwards, so going around until nothing changes ends soon.
    let mut depends: HashSet<NodeId> = xs.iter().map(|x| x.endpoint().node).collect();
    loop {
        let before = depends.len();
        for (id, node) in nodes.iter() {
            let carries = |at: &Endpoint| depends.contains(&at.node) && nodes.output(*at).dtype.is_float();
            let reads = |at: &Endpoint| depends.contains(&at.node) && nodes.output(*at).dtype == DType::Resource;
            if node.inputs.iter().any(|at| carries(at) || reads(at)) {
                depends.insert(id);
            }
        }
        if depends.len() == before {
            break;
        }
    }
    for (id, node) in nodes.iter().filter(|(_, node)| node.op() == "StackPushV2") {
        if depends.contains(&node.inputs[1].node) && popped.contains(&stack_of(id)) {
            return Err(Error::unimplemented("second-order gradients through while loops are not supported"));
        }
    }
    Ok(())
}

impl Graph {
    /// Zeros of a shape that is known.
    #[track_caller]
    pub fn zeros(&self, dtype: DType, shape: &Shape) -> Output<'_> {
        let zero = crate::IntoOutput::into_output(0.0f32, self, dtype);
        if shape.rank() == 0 {
            return zero;
        }
        let dims: Vec<i32> = shape.iter().map(|&dim| i32::try_from(dim).unwrap_or(i32::MAX)).collect();
        self.op("Fill").input(self.constant(Tensor::vector(dims))).input(zero).out()
    }
}

/// Zeros as large as a value will be.
fn zeros_like(value: Output<'_>) -> Result<Output<'_>> {
    zeros_for(value, value.dtype())
}

/// Zeros for the gradient of a value, or of the variable that a handle refers to.
fn zeros_for(value: Output<'_>, dtype: DType) -> Result<Output<'_>> {
    let graph = value.graph();
    let is_variable = value.dtype() == DType::Resource;
    let shape = if is_variable { value.handle().map(|(_, shape)| shape) } else { Some(value.shape()) };
    // Dimensions beyond int32 are left to the value itself.
    let small = |shape: &Shape| shape.iter().all(|&dim| i32::try_from(dim).is_ok());
    let zeros = match shape.and_then(|shape| shape.known()).filter(small) {
        Some(shape) => graph.zeros(dtype, &shape),
        None if is_variable => {
            let read = graph.op("ReadVariableOp").input(value).attr("dtype", dtype).out();
            graph.op("ZerosLike").input(read).out()
        }
        None => graph.op("ZerosLike").input(value).out(),
    };
    graph.check()?;
    Ok(zeros)
}

/// These nodes and all they depend on, sorted.
fn ancestors(nodes: &Nodes, of: &[NodeId]) -> Vec<NodeId> {
    let mut is_needed = vec![false; nodes.len()];
    let mut open = of.to_vec();
    while let Some(id) = open.pop() {
        if !std::mem::replace(&mut is_needed[id.index()], true) {
            let node = nodes.node(id);
            open.extend(node.inputs.iter().map(|at| at.node).chain(node.control_inputs.iter().copied()));
        }
    }
    nodes.iter().map(|(id, _)| id).filter(|id| is_needed[id.index()]).collect()
}
