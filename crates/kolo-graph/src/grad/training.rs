//! What an optimizer knows of a training step, as a value: losses, gradients in the order in which they become ready,
//! variables with their slots and updates, and which backward node belongs to which forward one.
//!
//! Everything is a name. Numbers of nodes change when a graph is exported, imported or cut into parts; names do not. A pass
//! asks for the nodes of the graph that it rewrites with [`Training::resolve`].

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use kolo_core::{Error, Result};

use super::ancestors;
use crate::describe::graph::GradientNode;
use crate::op::def::Grad;
use crate::plan::prune::Feeds;
use crate::rewrite::order::levels;
use crate::{Endpoint, Flow, Graph, Node, NodeId, Nodes, Operation, Output, Variable};

/// One output of a node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OutputName {
    /// The node.
    pub node: Arc<str>,
    /// Which of its outputs.
    pub index: u32,
}

impl OutputName {
    fn of(nodes: &Nodes, at: Endpoint) -> OutputName {
        OutputName { node: nodes.node(at.node).name.clone(), index: at.index }
    }
}

impl fmt::Display for OutputName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.node, self.index)
    }
}

/// One input of a node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct InputName {
    /// The node.
    pub node: Arc<str>,
    /// Its op. A node of this name with another op, such as a fused one, has other inputs.
    pub op: &'static str,
    /// Which of its inputs.
    pub input: usize,
}

/// The tensors of a gradient, or something for each of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GradParts<T> {
    /// A whole tensor.
    Dense(T),
    /// Rows of one, as in [`crate::IndexedSlices`].
    Slices {
        /// The rows.
        values: T,
        /// Which rows they are.
        indices: T,
    },
}

impl<T> GradParts<T> {
    /// The tensor, or the rows: what is scaled, summed and cast.
    pub fn values(&self) -> &T {
        match self {
            GradParts::Dense(values) | GradParts::Slices { values, .. } => values,
        }
    }

    /// Which rows they are, for rows.
    pub fn indices(&self) -> Option<&T> {
        match self {
            GradParts::Dense(_) => None,
            GradParts::Slices { indices, .. } => Some(indices),
        }
    }

    pub(crate) fn map<U>(&self, mut change: impl FnMut(&T) -> U) -> GradParts<U> {
        match self {
            GradParts::Dense(values) => GradParts::Dense(change(values)),
            GradParts::Slices { values, indices } => {
                GradParts::Slices { values: change(values), indices: change(indices) }
            }
        }
    }

    /// The same if there is something for each.
    pub(crate) fn all<U>(self, change: impl Fn(T) -> Option<U>) -> Option<GradParts<U>> {
        Some(match self {
            GradParts::Dense(values) => GradParts::Dense(change(values)?),
            GradParts::Slices { values, indices } => {
                GradParts::Slices { values: change(values)?, indices: change(indices)? }
            }
        })
    }

    fn iter(&self) -> impl Iterator<Item = &T> {
        [Some(self.values()), self.indices()].into_iter().flatten()
    }
}

impl From<Grad<'_>> for GradParts<Endpoint> {
    fn from(grad: Grad<'_>) -> GradParts<Endpoint> {
        match grad {
            Grad::Dense(output) => GradParts::Dense(output.endpoint()),
            Grad::Slices(slices) => {
                GradParts::Slices { values: slices.values.endpoint(), indices: slices.indices.endpoint() }
            }
        }
    }
}

/// When in a training step a node runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Region {
    /// What the loss is computed from. Gradients add to it what keeps values of a loop's iterations.
    Forward,
    /// From the losses' gradients to those of the variables.
    Backward,
    /// What else depends on gradients: clipping, updates, what waits for them.
    Update,
}

/// One value that was differentiated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    /// The value.
    pub value: OutputName,
    /// Its own gradient, with which backward begins: ones unless the caller gave another. What is multiplied with it scales
    /// all gradients.
    pub start: OutputName,
    /// Which of the [`Training`]'s backward passes begins here.
    pub pass: usize,
}

/// A variable in which an optimizer keeps something about another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slot {
    /// What the optimizer calls it, such as `m`.
    pub slot: Arc<str>,
    /// The variable, such as `w/Adam`.
    pub variable: Arc<str>,
}

/// One variable that is trained.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrainedVariable {
    /// The variable's name, which is also its node's.
    pub name: Arc<str>,
    /// Its size, and that of its dense gradient; `None` if the shape is not known.
    pub n_bytes: Option<usize>,
    /// Its gradients as backward makes them, with the number of the pass: before they are clipped, averaged or accumulated.
    /// One per backward pass that reaches the variable; none if what is applied was made in another way. Two variables
    /// may have one output as their gradient, and backward may read it as well.
    pub gradients: Vec<(usize, GradParts<OutputName>)>,
    /// The inputs by which the update reads the gradient that is applied. What they read is this variable's alone to change.
    pub reads: GradParts<Vec<InputName>>,
    /// The node after which the variable is updated.
    pub update: Arc<str>,
    /// Its slots.
    pub slots: Vec<Slot>,
}

/// A training step, as an optimizer has added it to a graph. [`Graph::training`] has it for the operation that `minimize` or
/// `apply_gradients` returned, and [`crate::Rewriter::trainings`] for a pass. Gradients that a program applies by itself, and
/// graphs that come from a file or another process, have none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Training {
    /// What a program runs for a step.
    pub op: Arc<str>,
    /// The node after which all updates were made. It is `op`, or the optimizer's own operation if another one is around it
    /// that makes updates elsewhere or now and then.
    pub update_op: Arc<str>,
    /// What was differentiated. One value in general; several where a model is on several devices, or where a program
    /// differentiates several values together.
    pub losses: Vec<Loss>,
    /// The variables, in the order in which their gradients become ready if every node takes as long as any other and runs as
    /// soon as it can: by the length of the longest path to the gradient (of the last, if there are several), and then in
    /// the order in which backward was described. So the order follows from the edges alone, and a pass gets it anew for
    /// the graph that it sees. A loop counts as one iteration.
    pub variables: Vec<TrainedVariable>,
    /// Variables that the optimizer keeps once for all others, such as `beta1_power`.
    pub scalars: Vec<Slot>,
    pub(crate) passes: Vec<Arc<BackwardPass>>,
}

impl Training {
    /// The node whose gradient needed this one: of a backward node the forward node that it belongs to, of a node that keeps
    /// values of a forward loop the node whose value it keeps. `None` for all others.
    pub fn forward_of(&self, node: &str) -> Option<&Arc<str>> {
        self.passes.iter().find_map(|pass| pass.added(node)).map(|added| &added.forward)
    }

    /// The backward nodes that belong to a forward node, in the order in which they were added.
    pub fn backward_of(&self, forward: &str) -> Vec<&Arc<str>> {
        let added = self.passes.iter().flat_map(|pass| &pass.added);
        let of = added.filter(|added| &*added.forward == forward && added.region == Region::Backward);
        of.map(|added| &added.node).collect()
    }

    /// The variable of this name, if it is trained.
    pub fn variable(&self, name: &str) -> Option<&TrainedVariable> {
        self.variables.iter().find(|variable| &*variable.name == name)
    }
}

/// What one call for gradients did.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct BackwardPass {
    /// What was differentiated, and the gradient it began with.
    losses: Vec<(Endpoint, Endpoint)>,
    /// What it was differentiated by, and the result.
    gradients: Vec<(Endpoint, GradParts<Endpoint>)>,
    /// What was added, in order.
    pub added: Vec<AddedNode>,
    by_name: HashMap<Arc<str>, usize>,
}

/// A node that gradients have added.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct AddedNode {
    pub node: Arc<str>,
    pub forward: Arc<str>,
    pub region: Region,
}

impl BackwardPass {
    pub(super) fn new<'g>(
        nodes: &Nodes,
        (ys, starts): (&[Output<'g>], &[Endpoint]),
        (xs, grads): (&[Output<'g>], &[Option<Grad<'g>>]),
        added: &[GradientNode],
    ) -> BackwardPass {
        let name = |id: NodeId| nodes.node(id).name.clone();
        let added: Vec<AddedNode> = added
            .iter()
            .map(|of| AddedNode { node: name(of.id), forward: name(of.forward), region: of.region })
            .collect();
        BackwardPass {
            losses: ys.iter().map(|y| y.endpoint()).zip(starts.iter().copied()).collect(),
            gradients: xs.iter().zip(grads).filter_map(|(x, grad)| Some((x.endpoint(), (*grad)?.into()))).collect(),
            by_name: added.iter().enumerate().map(|(i, added)| (added.node.clone(), i)).collect(),
            added,
        }
    }

    fn added(&self, node: &str) -> Option<&AddedNode> {
        self.by_name.get(node).map(|&i| &self.added[i])
    }
}

/// One variable's update, as an optimizer has added it; for [`Graph::add_training`].
pub struct VariableUpdate<'g> {
    /// The variable.
    pub variable: Variable<'g>,
    /// The gradient that is applied.
    pub grad: Grad<'g>,
    /// The numbers of the nodes that were added for it.
    pub nodes: Range<usize>,
    /// After it, the variable is updated.
    pub update: Operation<'g>,
    /// What the optimizer keeps about the variable, by its own names for it.
    pub slots: Vec<(String, Variable<'g>)>,
}

impl Graph {
    /// The training steps that optimizers have added, in order.
    pub fn trainings(&self) -> Arc<[Arc<Training>]> {
        self.nodes().trainings().clone()
    }

    /// What is known of the training step that this operation runs, as `minimize` and `apply_gradients` return it.
    pub fn training(&self, op: Operation<'_>) -> Option<Arc<Training>> {
        let name = op.name();
        self.trainings().iter().find(|training| *training.op == *name).cloned()
    }

    /// Keeps what an optimizer knows of a step: `op` runs it, `updates` are its parts, `scalars` are variables that the
    /// optimizer keeps once for all others. For optimizers, when everything was added.
    pub fn add_training<'g>(
        &'g self,
        op: Operation<'g>,
        updates: &[VariableUpdate<'g>],
        scalars: &[(String, Variable<'g>)],
    ) -> Result<()> {
        self.check()?;
        let is_made = |update: &VariableUpdate<'g>| {
            let parts = GradParts::<Endpoint>::from(update.grad);
            let operations = [update.update, update.variable.handle().operation()];
            operations.iter().all(|op| op.is_valid()) && parts.iter().all(|at| at.node != NodeId::INVALID)
        };
        if !op.is_valid() || !updates.iter().all(is_made) {
            return Err(Error::invalid_argument("a part of the training step could not be made"));
        }
        let (all_passes, nodes) = (self.backward_passes(), self.nodes());
        let results = Results::new(&all_passes);
        let name = |id: NodeId| nodes.node(id).name.clone();
        let slot = |(slot, variable): &(String, Variable<'g>)| Slot {
            slot: slot.as_str().into(),
            variable: name(variable.handle().endpoint().node),
        };
        let variables = updates.iter().map(|update| {
            let handle = update.variable.handle();
            let grad = GradParts::<Endpoint>::from(update.grad);
            let variable = TrainedVariable {
                name: name(handle.endpoint().node),
                n_bytes: n_bytes(update.variable),
                gradients: Vec::new(),
                reads: grad.map(|&at| reads(&nodes, update.nodes.clone(), at)),
                update: name(update.update.id()),
                slots: update.slots.iter().map(slot).collect(),
            };
            (variable, results.behind(&nodes, handle.endpoint(), &grad), grad)
        });
        let training = Training {
            op: name(op.id()),
            update_op: name(op.id()),
            losses: Vec::new(),
            variables: Vec::new(),
            scalars: scalars.iter().map(slot).collect(),
            passes: Vec::new(),
        };
        let training = training.with_gradients(&nodes, &all_passes, variables.collect())?;
        let mut trainings = nodes.trainings().to_vec();
        drop(nodes);
        trainings.push(Arc::new(training));
        self.set_trainings(trainings);
        Ok(())
    }

    /// For an optimizer around another one, which has added `inner`: `op` runs the step, and `grads` are the gradients as
    /// they were before anything was accumulated or exchanged. `slots` are what it keeps about variables itself.
    pub fn wrap_training<'g>(
        &'g self,
        inner: Operation<'g>,
        op: Operation<'g>,
        grads: &[(Variable<'g>, Grad<'g>)],
        slots: &[(Variable<'g>, String, Variable<'g>)],
    ) -> Result<()> {
        self.check()?;
        if !inner.is_valid() || !op.is_valid() {
            return Err(Error::invalid_argument("a part of the training step could not be made"));
        }
        let (all_passes, nodes) = (self.backward_passes(), self.nodes());
        let results = Results::new(&all_passes);
        let mut trainings = nodes.trainings().to_vec();
        let name = |id: NodeId| nodes.node(id).name.clone();
        let inner = name(inner.id());
        let Some(training) = trainings.iter_mut().find(|training| training.op == inner) else { return Ok(()) };
        let variables = training.variables.iter().map(|variable| {
            let mut variable = variable.clone();
            let is_its = |of: &Variable<'g>| *nodes.node(of.handle().endpoint().node).name == *variable.name;
            let own = slots.iter().filter(|(of, ..)| is_its(of));
            let own: Vec<Slot> = own
                .map(|(_, slot, variable)| Slot {
                    slot: slot.as_str().into(),
                    variable: name(variable.handle().endpoint().node),
                })
                .collect();
            let given = grads.iter().find(|(of, _)| is_its(of));
            let given = given.map(|(of, grad)| (of.handle().endpoint(), GradParts::<Endpoint>::from(*grad)));
            variable.slots.extend(own);
            let (handle, grad) = given?;
            let found = results.behind(&nodes, handle, &grad);
            Some((variable, found, grad))
        });
        let Some(variables) = variables.collect::<Option<Vec<_>>>() else { return Ok(()) };
        let wrapped = Training { op: name(op.id()), ..Training::clone(training) };
        *training = Arc::new(wrapped.with_gradients(&nodes, &all_passes, variables)?);
        drop(nodes);
        self.set_trainings(trainings);
        Ok(())
    }
}

/// A gradient of a variable: the number of the call that made it, among all of the graph, and where it is.
type FoundGradient = (usize, GradParts<Endpoint>);

/// The results of all calls for gradients.
struct Results {
    of: HashMap<Endpoint, Vec<FoundGradient>>,
    nodes: HashSet<NodeId>,
}

impl Results {
    fn new(passes: &[Arc<BackwardPass>]) -> Results {
        let mut results = Results { of: HashMap::new(), nodes: HashSet::new() };
        for (i, pass) in passes.iter().enumerate() {
            for (x, grad) in &pass.gradients {
                results.of.entry(*x).or_default().push((i, grad.clone()));
                results.nodes.extend(grad.iter().map(|at| at.node));
            }
        }
        results
    }

    /// The gradients of `variable` from which the one that is applied was computed. Looks no further up than to the results
    /// of calls: what these were computed from is backward.
    fn behind(&self, nodes: &Nodes, variable: Endpoint, applied: &GradParts<Endpoint>) -> Vec<FoundGradient> {
        let mut missing = self.of.get(&variable).cloned().unwrap_or_default();
        let (mut found, mut seen) = (Vec::new(), HashSet::new());
        // The nearest first: a clipped gradient has its own one input away, and all others behind the norm.
        let mut open: VecDeque<Endpoint> = applied.iter().copied().collect();
        while let Some(at) = open.pop_front().filter(|_| !missing.is_empty()) {
            if !seen.insert(at) {
                continue;
            }
            let (here, rest): (Vec<_>, Vec<_>) = missing.into_iter().partition(|(_, grad)| *grad.values() == at);
            found.extend(here);
            missing = rest;
            if !self.nodes.contains(&at.node) {
                open.extend(&nodes.node(at.node).inputs);
            }
        }
        found.sort_by_key(|(pass, _)| *pass);
        found
    }
}

impl Training {
    /// The same, with these variables, the gradients of each, and where the gradient that it gets is; orders them.
    fn with_gradients(
        self,
        nodes: &Nodes,
        all_passes: &[Arc<BackwardPass>],
        variables: Vec<(TrainedVariable, Vec<FoundGradient>, GradParts<Endpoint>)>,
    ) -> Result<Training> {
        let mut used: Vec<usize> =
            variables.iter().flat_map(|(_, found, _)| found.iter().map(|(pass, _)| *pass)).collect();
        used.sort_unstable();
        used.dedup();
        let loss = |(pass, &number): (usize, &usize)| {
            let losses = all_passes[number].losses.iter();
            let named = losses.map(move |&(value, start)| Loss {
                value: OutputName::of(nodes, value),
                start: OutputName::of(nodes, start),
                pass,
            });
            named.collect::<Vec<_>>()
        };
        let losses = used.iter().enumerate().flat_map(loss).collect();
        // Ready when the last of its gradients is.
        let ends: Vec<Vec<NodeId>> = variables
            .iter()
            .map(|(_, found, grad)| {
                let grads = if found.is_empty() { vec![grad] } else { found.iter().map(|(_, grad)| grad).collect() };
                grads.into_iter().flat_map(GradParts::iter).map(|at| at.node).collect()
            })
            .collect();
        let needed = ancestors(nodes, &ends.concat());
        let levels = levels(nodes, &needed, &Feeds::new(nodes, &[])?)?;
        let ready_at = |ends: &[NodeId]| {
            let level = |id: NodeId| needed.binary_search(&id).map_or(0, |i| levels[i]);
            ends.iter().map(|&id| (level(id), id)).max()
        };
        let name = |(variable, found, _): (TrainedVariable, Vec<FoundGradient>, GradParts<Endpoint>)| {
            let gradients = found.iter().map(|(pass, grad)| {
                let pass = used.binary_search(pass).unwrap_or_default();
                (pass, grad.map(|&at| OutputName::of(nodes, at)))
            });
            TrainedVariable { gradients: gradients.collect(), ..variable }
        };
        let mut ordered: Vec<_> =
            variables.into_iter().zip(&ends).map(|(of, ends)| (ready_at(ends), name(of))).collect();
        ordered.sort_by_key(|(ready, _)| *ready);
        let variables = ordered.into_iter().map(|(_, variable)| variable).collect();
        let passes = used.iter().map(|&number| all_passes[number].clone()).collect();
        Ok(Training { losses, variables, passes, ..self })
    }
}

/// The inputs of `added` nodes that read `at`, possibly from within a branch.
fn reads(nodes: &Nodes, added: Range<usize>, at: Endpoint) -> Vec<InputName> {
    let leads_in = |node: &Node| matches!(node.def.flow, Flow::Switch | Flow::Enter);
    let comes_from = |mut source: Endpoint| loop {
        if source == at {
            return true;
        }
        let node = nodes.node(source.node);
        match node.inputs.first() {
            Some(&before) if leads_in(node) && before.node < source.node => source = before,
            _ => return false,
        }
    };
    let added = added.start..added.end.min(nodes.len());
    let ids = added.map(|i| NodeId(i as u32)).filter(|&id| !leads_in(nodes.node(id)));
    ids.flat_map(|id| {
        let node = nodes.node(id);
        let inputs = node.inputs.iter().enumerate().filter(|(_, source)| comes_from(**source));
        inputs.map(|(input, _)| InputName { node: node.name.clone(), op: node.def.name, input }).collect::<Vec<_>>()
    })
    .collect()
}

fn n_bytes(variable: Variable<'_>) -> Option<usize> {
    variable.shape().n_elements()?.checked_mul(variable.dtype().size()?)
}
