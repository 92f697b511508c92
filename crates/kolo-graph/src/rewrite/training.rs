//! A training step as the nodes of a graph that is rewritten.

use std::collections::HashMap;
use std::sync::Arc;

use kolo_core::Result;

use super::Rewriter;
use super::order::levels;
use crate::{Endpoint, GradParts, NodeId, OutputName, Region, Training};

/// The nodes of a [`Training`] that one graph has; see [`Training::resolve`]. What the run does not need, or what is in
/// another part, is left out.
#[derive(Clone, Debug)]
pub struct TrainingNodes {
    /// What a program runs for a step.
    pub op: Option<NodeId>,
    /// After it, all updates were made.
    pub update_op: Option<NodeId>,
    /// What was differentiated.
    pub losses: Vec<LossNodes>,
    /// The variables of which there is a gradient or an update, in the order in which their gradients become ready in this
    /// graph; see [`Training::variables`]. Those without a gradient come last.
    pub variables: Vec<VariableNodes>,
    forward_of: HashMap<NodeId, NodeId>,
    regions: HashMap<NodeId, Region>,
}

/// The nodes of a [`crate::Loss`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LossNodes {
    /// The value. A run that does not fetch it may do without.
    pub value: Option<Endpoint>,
    /// Its own gradient.
    pub start: Option<Endpoint>,
    /// Which backward pass begins here.
    pub pass: usize,
}

/// The nodes of a [`crate::TrainedVariable`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VariableNodes {
    /// The variable's name.
    pub name: Arc<str>,
    /// Its size, and that of its dense gradient.
    pub n_bytes: Option<usize>,
    /// The variable.
    pub handle: Option<NodeId>,
    /// Its gradients as backward makes them, with the number of the pass.
    pub gradients: Vec<(usize, GradParts<Endpoint>)>,
    /// The gradient that is applied, as the update reads it now.
    pub applied: Option<GradParts<Endpoint>>,
    /// The inputs by which the update reads it. Other variables have inputs of their own.
    pub reads: GradParts<Vec<(NodeId, usize)>>,
    /// After it, the variable is updated.
    pub update: Option<NodeId>,
    /// Its slots, by the optimizer's name for them.
    pub slots: Vec<(Arc<str>, NodeId)>,
}

impl Training {
    /// The nodes of this step that `graph` has, or `None` if it has no gradient and no update of it: every run of a session
    /// is planned with the same passes, those that initialize or evaluate too. An error if the graph has a cycle.
    ///
    /// ```
    /// use kolo_graph::{Attrs, Endpoint, Pass, Stage};
    ///
    /// // Each update reads a copy of its gradient, made in the order in which gradients become ready.
    /// let pass = Pass::new("copy-gradients", Stage::Graph, "an example", |graph, _| {
    ///     for training in graph.trainings().iter() {
    ///         let Some(step) = training.resolve(graph)? else { continue };
    ///         let mut last = None;
    ///         for variable in &step.variables {
    ///             let Some(applied) = &variable.applied else { continue };
    ///             let copy = graph.add("Identity", "copy", &[*applied.values()], Attrs::default())?;
    ///             last.replace(copy).into_iter().for_each(|last| graph.order_after(copy, last));
    ///             graph.redirect_inputs(variable.reads.values(), Endpoint { node: copy, index: 0 })?;
    ///         }
    ///     }
    ///     Ok(())
    /// });
    /// assert_eq!(pass.name(), "copy-gradients");
    /// ```
    pub fn resolve(&self, graph: &Rewriter<'_>) -> Result<Option<TrainingNodes>> {
        let output = |name: &OutputName| {
            let node = graph.find(&name.node)?;
            let has_it = graph.node(node).is_some_and(|node| (name.index as usize) < node.outputs.len());
            has_it.then_some(Endpoint { node, index: name.index })
        };
        let mut variables = Vec::with_capacity(self.variables.len());
        for variable in &self.variables {
            let reads = variable.reads.map(|reads| {
                let inputs = reads.iter().filter_map(|read| {
                    let id = graph.find(&read.node)?;
                    let node = graph.node(id)?;
                    (node.op() == read.op && read.input < node.inputs.len()).then_some((id, read.input))
                });
                inputs.collect::<Vec<_>>()
            });
            let first = |reads: Vec<(NodeId, usize)>| {
                let &(node, input) = reads.first()?;
                graph.node(node)?.inputs.get(input).copied()
            };
            let gradients = variable.gradients.iter().map(|(pass, grad)| Some((*pass, grad.map(output).all(|at| at)?)));
            let nodes = VariableNodes {
                name: variable.name.clone(),
                n_bytes: variable.n_bytes,
                handle: graph.find(&variable.name),
                gradients: gradients.flatten().collect(),
                applied: reads.clone().all(first),
                reads,
                update: graph.find(&variable.update),
                slots: variable
                    .slots
                    .iter()
                    .filter_map(|slot| Some((slot.slot.clone(), graph.find(&slot.variable)?)))
                    .collect(),
            };
            if !nodes.gradients.is_empty() || nodes.update.is_some() {
                variables.push(nodes);
            }
        }
        if variables.is_empty() {
            return Ok(None);
        }
        sort_by_readiness(graph, &mut variables)?;
        let losses = self.losses.iter().map(|loss| LossNodes {
            value: output(&loss.value),
            start: output(&loss.start),
            pass: loss.pass,
        });
        let losses: Vec<LossNodes> = losses.collect();
        let (forward_of, regions) = self.regions(graph, &losses);
        let (op, update_op) = (graph.find(&self.op), graph.find(&self.update_op));
        Ok(Some(TrainingNodes { op, update_op, losses, variables, forward_of, regions }))
    }

    /// Which nodes belong to which forward nodes, and when nodes run.
    fn regions(
        &self,
        graph: &Rewriter<'_>,
        losses: &[LossNodes],
    ) -> (HashMap<NodeId, NodeId>, HashMap<NodeId, Region>) {
        let (mut forward_of, mut regions) = (HashMap::new(), HashMap::new());
        let mut forward: Vec<NodeId> = losses.iter().filter_map(|loss| loss.value).map(|at| at.node).collect();
        for added in self.passes.iter().flat_map(|pass| &pass.added) {
            let owner = graph.find(&added.forward);
            forward.extend(owner);
            let Some(id) = graph.find(&added.node) else { continue };
            regions.insert(id, added.region);
            forward_of.extend(owner.map(|owner| (id, owner)));
        }
        let mut update: Vec<NodeId> = Vec::new();
        for (&id, _) in regions.iter().filter(|(_, region)| **region == Region::Backward) {
            update.extend(&graph.users[id.index()]);
        }
        while let Some(id) = forward.pop() {
            if let Some(node) = graph.node(id).filter(|_| !regions.contains_key(&id)) {
                regions.insert(id, Region::Forward);
                forward.extend(super::inputs_of(node));
            }
        }
        while let Some(id) = update.pop() {
            if graph.node(id).is_some() && !regions.contains_key(&id) {
                regions.insert(id, Region::Update);
                update.extend(&graph.users[id.index()]);
            }
        }
        (forward_of, regions)
    }
}

impl TrainingNodes {
    /// The forward node that a backward node belongs to, or that a node of a forward loop keeps the values of; `None` for
    /// others, and if the run does without the forward node.
    pub fn forward_of(&self, id: NodeId) -> Option<NodeId> {
        self.forward_of.get(&id).copied()
    }

    /// When in the step a node runs; `None` for what has no part in it, and for what was added since.
    pub fn region(&self, id: NodeId) -> Option<Region> {
        self.regions.get(&id).copied()
    }

    /// The inputs that read a gradient but are not backward's own: where it leaves backward. What is put there sees the
    /// gradient before it is clipped.
    pub fn leaving(&self, graph: &Rewriter<'_>, gradient: Endpoint) -> Vec<(NodeId, usize)> {
        let mut readers = graph.readers(gradient);
        readers.retain(|(id, _)| self.region(*id) != Some(Region::Backward));
        readers
    }
}

/// By the longest path to the last gradient, and then by number.
fn sort_by_readiness(graph: &Rewriter<'_>, variables: &mut [VariableNodes]) -> Result<()> {
    let ids = graph.ids();
    let levels = levels(&graph.nodes, &ids, &graph.fed()?)?;
    let level = |at: &Endpoint| (ids.binary_search(&at.node).map_or(0, |i| levels[i]), at.node);
    variables.sort_by_cached_key(|variable| {
        let ends = variable.gradients.iter().flat_map(|(_, grad)| [Some(grad.values()), grad.indices()]);
        let last = ends.flatten().map(level).max();
        (last.is_none(), last)
    });
    Ok(())
}
