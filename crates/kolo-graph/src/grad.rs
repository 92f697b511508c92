//! Gradients as a rewrite: walks the graph backwards from `ys`, asks every op on a path to `xs` for its rule, and sums
//! what arrives at each output. Only adds nodes; what was there stays as it was.

use std::collections::{HashMap, HashSet};

use kolo_core::{DType, Error, Result};

use crate::op_def::{Grad, Gradient, IndexedSlices};
use crate::{Endpoint, Graph, NodeId, Nodes, Operation, Output};

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
    for y in ys {
        if !y.dtype().is_float() {
            return Err(Error::invalid_argument(format!("cannot differentiate {y:?}: only floats have gradients")));
        }
    }
    let nodes = graph.snapshot();
    let stops: HashSet<Endpoint> = options.stop_gradients.iter().map(|output| output.endpoint()).collect();
    let between = between(&nodes, ys, xs, &stops);
    let mut sums = Sums::default();
    graph.name_scope("gradients", || -> Result<()> {
        for (i, y) in ys.iter().enumerate() {
            let start = match options.grad_ys.get(i).copied().flatten() {
                Some(given) => given,
                None => ones_like(*y),
            };
            sums.add(y.endpoint(), start.into());
        }
        for id in backwards(&nodes, &between) {
            differentiate(graph, &nodes, id, &between, &stops, options, &mut sums)?;
        }
        Ok(())
    })?;
    let result = xs.iter().map(|x| sums.total(graph, x.endpoint())).collect::<Result<_>>();
    graph.check()?;
    result
}

/// Asks one op for the gradients of its inputs and adds them to the sums.
fn differentiate<'g>(
    graph: &'g Graph,
    nodes: &Nodes,
    id: NodeId,
    between: &HashSet<NodeId>,
    stops: &HashSet<Endpoint>,
    options: &GradientOptions<'g>,
    sums: &mut Sums<'g>,
) -> Result<()> {
    let node = nodes.node(id);
    let operation = Operation::new(graph, id);
    let wanted = |at: &Endpoint| between.contains(&at.node) && !stops.contains(at);
    if !node.inputs.iter().any(wanted) {
        return Ok(());
    }
    let mut arrived = Vec::with_capacity(node.outputs.len());
    for index in 0..node.outputs.len() as u32 {
        arrived.push(sums.total(graph, Endpoint { node: id, index })?);
    }
    if arrived.iter().all(Option::is_none) {
        return Ok(());
    }
    let scope = format!("{}_grad", node.name.replace('/', "_"));
    let build = || -> Result<Vec<Option<Grad<'g>>>> {
        match node.def.gradient {
            Gradient::Same => Ok(vec![arrived[0]]),
            Gradient::None(_) => Ok(Vec::new()),
            Gradient::Refused(why) => Err(Error::invalid_argument(format!("{why} (gradient of {})", node.describe()))),
            Gradient::Rule(rule) => {
                let dense = arrived.iter().map(|grad| grad.map(|grad| densify(graph, grad)).transpose());
                rule(operation, &dense.collect::<Result<Vec<_>>>()?)
            }
            Gradient::Unstated | Gradient::Flow => {
                Err(Error::unimplemented(format!("no gradient is known for {}", node.describe())))
            }
        }
    };
    let scoped = || graph.name_scope(&scope, build);
    let grads = if options.colocate_with_ops { graph.colocate_with(operation, scoped)? } else { scoped()? };
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
            && wanted(&input)
        {
            sums.add(input, grad);
        }
    }
    Ok(())
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
fn between(nodes: &Nodes, ys: &[Output<'_>], xs: &[Output<'_>], stops: &HashSet<Endpoint>) -> HashSet<NodeId> {
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
    reached
}

/// These nodes, each after all of its consumers among them.
fn backwards(nodes: &Nodes, among: &HashSet<NodeId>) -> Vec<NodeId> {
    let mut pending: HashMap<NodeId, usize> = among.iter().map(|&id| (id, 0)).collect();
    for &id in among {
        for at in &nodes.node(id).inputs {
            if let Some(count) = pending.get_mut(&at.node) {
                *count += 1;
            }
        }
    }
    let mut ready: Vec<NodeId> = among.iter().copied().filter(|id| pending[id] == 0).collect();
    // Sorted, so that the same graph always gets the same gradient graph.
    ready.sort_unstable();
    let mut order = Vec::with_capacity(among.len());
    while let Some(id) = ready.pop() {
        order.push(id);
        for at in &nodes.node(id).inputs {
            if let Some(count) = pending.get_mut(&at.node) {
                *count -= 1;
                if *count == 0 {
                    ready.push(at.node);
                }
            }
        }
    }
    order
}
