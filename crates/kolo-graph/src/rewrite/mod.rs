//! Rewrites: the one way to change a graph that is planned.
//!
//! A [`Rewriter`] holds a graph, or one part of it, while a pass changes it. Users are kept up to date, added nodes are
//! checked and inferred as if a program had asked for them, and a check says at the end whether the
//! graph is still one: edges lead somewhere, dtypes and shapes fit, only loops have cycles, and nodes that stayed kept
//! their device, their colocation and the line that made them.
//!
//! ```text
//! y = Relu(BiasAdd(MatMul(a, b), c))          replace(y, fused node)      y = FusedMatMul(a, b, c)
//!                                             merge(product, y)
//!                                             merge(bias, y)
//! ```
//!
//! Numbers of nodes stay what they are until the end: a removed node leaves a gap.

mod branches;
mod check;
mod collectives;
pub(crate) mod frames;
pub(crate) mod order;
mod outline;
mod pass;
#[cfg(test)]
mod tests;
mod text;
mod training;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use kolo_core::{Error, Result};

use crate::describe::request::{NodeRequest, complete};
use crate::plan::prune::{Feeds, Pruned, is_back_edge};
use crate::{Attrs, Endpoint, Node, NodeId, Nodes, OpRegistry, Origin, Partition, Training, Transfer};

pub use branches::{BranchNode, skipped_nodes};
pub use collectives::{Conditional, order_collectives};
pub use frames::{Frame, FrameId, Frames, frames};
pub use order::topological_order;
pub use outline::{Outlined, rewrite_part};
pub(crate) use pass::{BuiltIn, Run};
pub use pass::{Pass, PassContext, PassRecord, Stage, pipeline};
pub use training::{LossNodes, TrainingNodes, VariableNodes};

/// A graph while a pass changes it; see the [module](self).
pub struct Rewriter<'a> {
    registry: &'a OpRegistry,
    fresh: &'a mut dyn FnMut() -> u64,
    nodes: Nodes,
    is_live: Vec<bool>,
    /// For each node those that read or await it, once for each edge.
    users: Vec<Vec<NodeId>>,
    /// Outputs that the caller gives, by number, where edges still name the output itself.
    feeds: Vec<Endpoint>,
    fetches: Vec<(usize, Endpoint)>,
    targets: Vec<NodeId>,
    /// Nodes that were added or changed, for the check.
    changed: HashSet<NodeId>,
    /// How many nodes there were before.
    n_before: usize,
    /// The nodes of before, to hold the result against.
    before: Nodes,
}

impl<'a> Rewriter<'a> {
    /// For the nodes of a whole graph that a run needs.
    pub(crate) fn of_graph(
        nodes: Nodes,
        pruned: &Pruned,
        registry: &'a OpRegistry,
        fresh: &'a mut dyn FnMut() -> u64,
    ) -> Rewriter<'a> {
        let mut is_live = vec![false; nodes.len()];
        pruned.nodes.iter().for_each(|id| is_live[id.index()] = true);
        let fetches = pruned.fetches.iter().copied().enumerate().collect();
        let (feeds, targets) = (pruned.feeds.clone(), pruned.targets.clone());
        Rewriter::new(nodes, is_live, (feeds, fetches, targets), registry, fresh)
    }

    /// For one part of a plan, cut from a graph with these training steps.
    pub(crate) fn of_part(
        part: &Partition,
        trainings: &Arc<[Arc<Training>]>,
        registry: &'a OpRegistry,
        fresh: &'a mut dyn FnMut() -> u64,
    ) -> Rewriter<'a> {
        let (mut nodes, fetches) = (part.nodes.clone(), part.fetches.clone());
        nodes.set_trainings(trainings.clone());
        let is_live = vec![true; nodes.len()];
        let mut rewriter = Rewriter::new(nodes, is_live, (Vec::new(), fetches, Vec::new()), registry, fresh);
        // A node of a part that nobody reads runs for itself: a target, a transfer, an effect.
        let ends = rewriter.ids().into_iter().filter(|id| rewriter.users[id.index()].is_empty());
        rewriter.targets = ends.collect();
        rewriter
    }

    fn new(
        nodes: Nodes,
        is_live: Vec<bool>,
        (feeds, fetches, targets): (Vec<Endpoint>, Vec<(usize, Endpoint)>, Vec<NodeId>),
        registry: &'a OpRegistry,
        fresh: &'a mut dyn FnMut() -> u64,
    ) -> Rewriter<'a> {
        let mut rewriter = Rewriter {
            registry,
            fresh,
            users: vec![Vec::new(); nodes.len()],
            n_before: is_live.iter().filter(|is_live| **is_live).count(),
            before: nodes.clone(),
            nodes,
            is_live,
            feeds,
            fetches,
            targets,
            changed: HashSet::new(),
        };
        for id in rewriter.ids() {
            rewriter.link(id);
        }
        rewriter
    }

    /// The numbers of all nodes, in their order.
    pub fn ids(&self) -> Vec<NodeId> {
        (0..self.is_live.len()).filter(|&i| self.is_live[i]).map(|i| NodeId(i as u32)).collect()
    }

    /// All nodes with their numbers.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (NodeId, &Arc<Node>)> {
        let live = |i: &usize| self.is_live[*i];
        (0..self.is_live.len()).filter(live).map(|i| NodeId(i as u32)).map(|id| (id, self.nodes.node(id)))
    }

    /// How many nodes there are.
    pub fn len(&self) -> usize {
        self.is_live.iter().filter(|is_live| **is_live).count()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        !self.is_live.contains(&true)
    }

    /// A node; `None` if it was removed, or for what stands for a feed.
    pub fn node(&self, id: NodeId) -> Option<&Arc<Node>> {
        self.is_live.get(id.index()).is_some_and(|is_live| *is_live).then(|| self.nodes.node(id))
    }

    /// The node of this name.
    pub fn find(&self, name: &str) -> Option<NodeId> {
        self.nodes.find(name).filter(|id| self.node(*id).is_some())
    }

    /// What optimizers know of the training steps of the graph; [`Training::resolve`] says whether, and where, it has them. A
    /// worker that gets its part from a master has none.
    pub fn trainings(&self) -> Arc<[Arc<Training>]> {
        self.nodes.trainings().clone()
    }

    /// The nodes that read this output, with the input they read it by.
    pub fn readers(&self, at: Endpoint) -> Vec<(NodeId, usize)> {
        let Some(users) = self.users.get(at.node.index()) else { return Vec::new() };
        let mut users = users.clone();
        users.sort_unstable();
        users.dedup();
        let inputs = |id: NodeId| {
            let inputs = self.nodes.node(id).inputs.iter().enumerate();
            inputs.filter(move |(_, input)| **input == at).map(move |(i, _)| (id, i)).collect::<Vec<_>>()
        };
        users.into_iter().flat_map(inputs).collect()
    }

    /// The nodes that wait for this one without reading it.
    pub fn waiters(&self, id: NodeId) -> Vec<NodeId> {
        let Some(users) = self.users.get(id.index()) else { return Vec::new() };
        let mut users = users.clone();
        users.retain(|user| self.nodes.node(*user).control_inputs.contains(&id));
        users.sort_unstable();
        users.dedup();
        users
    }

    /// Whether the caller of the run wants this output.
    pub fn is_fetched(&self, at: Endpoint) -> bool {
        self.fetches.iter().any(|(_, fetch)| *fetch == at)
    }

    /// Whether the caller of the run gives this output.
    pub fn is_fed(&self, at: Endpoint) -> bool {
        at.feed().is_some() || self.feeds.contains(&at)
    }

    /// The only node that reads this output, if nothing else needs the output or awaits its node. Gives up at the second
    /// reader: a constant may have thousands.
    pub fn sole_reader(&self, at: Endpoint) -> Option<NodeId> {
        let mut reader = None;
        for &user in self.users.get(at.node.index())? {
            let node = self.nodes.node(user);
            let n_reads = node.inputs.iter().filter(|input| **input == at).count();
            if n_reads > 1 || (n_reads == 1 && reader.is_some()) || node.control_inputs.contains(&at.node) {
                return None;
            }
            reader = reader.or((n_reads == 1).then_some(user));
        }
        reader.filter(|_| !self.is_fetched(at))
    }

    /// Whether all that reads this output satisfies `is_inside`; asks no further after the first that does not.
    pub fn is_read_only_by(&self, at: Endpoint, is_inside: impl Fn(NodeId) -> bool) -> bool {
        let reads = |user: NodeId| self.nodes.node(user).inputs.contains(&at);
        self.users.get(at.node.index()).is_none_or(|users| users.iter().all(|&user| is_inside(user) || !reads(user)))
    }

    /// Whether there is a way along edges of any kind from any of these nodes to `to`.
    pub fn reaches(&self, from: &[NodeId], to: NodeId) -> bool {
        let (mut seen, mut open) = (HashSet::new(), vec![to]);
        while let Some(id) = open.pop() {
            if from.contains(&id) {
                return true;
            }
            if let Some(node) = self.node(id).filter(|_| seen.insert(id)) {
                open.extend(node.inputs.iter().map(|at| at.node));
                open.extend(&node.control_inputs);
            }
        }
        false
    }

    /// Those of these nodes that depend on another of them, along edges of any kind. One walk for all of them.
    pub fn dependents_among(&self, group: &[NodeId]) -> HashSet<NodeId> {
        let of = |id: NodeId| self.users.get(id.index()).into_iter().flatten().copied();
        let (mut seen, mut open): (HashSet<NodeId>, Vec<NodeId>) =
            (HashSet::new(), group.iter().flat_map(|id| of(*id)).collect());
        while let Some(id) = open.pop() {
            if seen.insert(id) {
                open.extend(of(id));
            }
        }
        group.iter().copied().filter(|id| seen.contains(id)).collect()
    }

    /// `base`, or `base` with a number, so that no other node of the session has the name.
    pub fn fresh_name(&mut self, base: &str) -> String {
        if self.nodes.find(base).is_none() {
            return base.to_owned();
        }
        loop {
            let name = format!("{base}_R{}", (self.fresh)());
            if self.nodes.find(&name).is_none() {
                return name;
            }
        }
    }

    /// Adds a node: dtypes and shapes are inferred, and errors are those of a program that describes it. It asks for the
    /// device of the first of its inputs, and gets a fresh name near `name`.
    pub fn add(&mut self, op: &str, name: &str, inputs: &[Endpoint], attrs: Attrs) -> Result<NodeId> {
        if let Some(fed) = inputs.iter().find_map(|at| at.feed()) {
            return Err(Error::invalid_argument(format!(
                "{op} '{name}' cannot read feed {fed} of a part: of a fed value nothing is known there; add it in stage graph"
            )));
        }
        let near = inputs.iter().find_map(|at| self.node(at.node));
        let device = near.map(|node| node.device.clone()).unwrap_or_default();
        let source = near.and_then(|node| node.source.clone());
        let name = self.fresh_name(name);
        let request = NodeRequest {
            op: op.to_owned(),
            name: None,
            inputs: inputs.to_vec(),
            control_inputs: Vec::new(),
            attrs,
            device,
            source,
            device_source: None,
        };
        let node = complete(self.registry, &self.nodes, request, name)?;
        Ok(self.push(node))
    }

    /// Adds a node that is complete. Its name must be fresh.
    pub fn push(&mut self, node: Node) -> NodeId {
        let id = self.nodes.push(node);
        self.is_live.push(true);
        self.users.push(Vec::new());
        self.changed.insert(id);
        self.link(id);
        id
    }

    /// Puts another node in the place of one: users of its outputs read those of the new one.
    pub fn replace(&mut self, id: NodeId, node: Node) {
        self.unlink(id);
        self.nodes.replace(id, node);
        self.changed.insert(id);
        self.link(id);
    }

    /// Removes a node that became part of another: what waited for it waits for that one. Its readers must have been
    /// redirected, or be gone by the end.
    pub fn merge(&mut self, gone: NodeId, into: NodeId) {
        self.merge_all(&[gone], into);
    }

    /// [`Rewriter::merge`] for many nodes at once: what waited for several of them is changed once, so that a group that
    /// awaits thousands of updates is not copied for each of them.
    pub fn merge_all(&mut self, gone: &[NodeId], into: NodeId) {
        let gone: HashSet<NodeId> = gone.iter().copied().filter(|id| self.node(*id).is_some()).collect();
        let (mut sources, mut waiters): (Vec<NodeId>, Vec<NodeId>) = (Vec::new(), Vec::new());
        for &id in &gone {
            sources.extend(inputs_of(self.nodes.node(id)));
            waiters.extend(&self.users[id.index()]);
            self.is_live[id.index()] = false;
        }
        // In the order of their numbers, and each once, so that plans do not depend on the order of a set.
        for list in [&mut sources, &mut waiters] {
            list.sort_unstable();
            list.dedup();
        }
        for source in sources {
            if let Some(users) = self.users.get_mut(source.index()) {
                users.retain(|user| !gone.contains(user));
            }
        }
        for waiter in waiters.into_iter().filter(|id| !gone.contains(id)) {
            let awaits = &self.nodes.node(waiter).control_inputs;
            if !awaits.iter().any(|before| gone.contains(before)) {
                continue;
            }
            self.edit(waiter, |node| {
                node.control_inputs.retain(|before| !gone.contains(before));
                if waiter != into && !node.control_inputs.contains(&into) {
                    node.control_inputs.push(into);
                }
            });
        }
        self.targets.iter_mut().filter(|target| gone.contains(target)).for_each(|target| *target = into);
    }

    /// Makes all that read one output, fetches included, read another of the same dtype.
    pub fn redirect(&mut self, from: Endpoint, to: Endpoint) -> Result<()> {
        self.check_stand_in(from, to)?;
        for (reader, _) in self.readers(from) {
            self.edit(reader, |node| node.inputs.iter_mut().filter(|at| **at == from).for_each(|at| *at = to));
        }
        self.fetches.iter_mut().filter(|(_, at)| *at == from).for_each(|(_, at)| *at = to);
        Ok(())
    }

    /// Makes these inputs, and no others, read another output of the same dtype.
    pub fn redirect_inputs(&mut self, inputs: &[(NodeId, usize)], to: Endpoint) -> Result<()> {
        for &(reader, input) in inputs {
            let from = self.node(reader).and_then(|node| node.inputs.get(input).copied());
            let missing = || Error::invalid_argument(format!("node {reader:?} has no input {input}"));
            self.check_stand_in(from.ok_or_else(missing)?, to)?;
            self.edit(reader, |node| node.inputs[input] = to);
        }
        Ok(())
    }

    /// An error if one output cannot be read in the place of another.
    fn check_stand_in(&self, from: Endpoint, to: Endpoint) -> Result<()> {
        let dtype = |at: Endpoint| {
            let maker = (at.node.index() < self.nodes.len()).then(|| self.nodes.node(at.node))?;
            maker.outputs.get(at.index as usize).map(|output| output.dtype)
        };
        match (dtype(from), dtype(to)) {
            (Some(old), Some(new)) if old != new => Err(Error::invalid_argument(format!(
                "{} is {old} and cannot be read from {}, which is {new}",
                self.nodes.endpoint_name(from),
                self.nodes.endpoint_name(to)
            ))),
            _ => Ok(()),
        }
    }

    /// Puts `node`, which reads `at`, between `at` and all that read it now.
    pub fn splice(&mut self, at: Endpoint, node: NodeId) -> Result<()> {
        let own: Vec<usize> = self.readers(at).into_iter().filter(|(id, _)| *id == node).map(|(_, i)| i).collect();
        if own.is_empty() {
            return Err(Error::internal(format!("{node:?} does not read {at:?}, so it cannot be put behind it")));
        }
        self.redirect(at, Endpoint { node, index: 0 })?;
        self.edit(node, |node| own.iter().for_each(|&i| node.inputs[i] = at));
        Ok(())
    }

    /// Makes `later` run after `earlier`.
    pub fn order_after(&mut self, later: NodeId, earlier: NodeId) {
        if self.node(later).is_some_and(|node| !node.control_inputs.contains(&earlier)) {
            self.edit(later, |node| node.control_inputs.push(earlier));
        }
    }

    /// Copies nodes. Edges between them lead to the copies, edges from outside stay what they are, except for outputs
    /// that `instead` replaces. Names are fresh and end in `suffix`. Returns the copy of each.
    pub fn clone_region(
        &mut self,
        region: &[NodeId],
        instead: &HashMap<Endpoint, Endpoint>,
        suffix: &str,
    ) -> Result<HashMap<NodeId, NodeId>> {
        let mut copies = HashMap::with_capacity(region.len());
        for &id in region {
            let missing = || Error::invalid_argument(format!("node {id:?} is not in the graph"));
            let mut node = Node::clone(self.node(id).ok_or_else(missing)?);
            node.name = self.fresh_name(&format!("{}{suffix}", node.name)).into();
            copies.insert(id, self.push(node));
        }
        for &copy in copies.values() {
            self.edit(copy, |node| {
                for at in &mut node.inputs {
                    *at = match (instead.get(at), copies.get(&at.node)) {
                        (Some(other), _) => *other,
                        (None, Some(inside)) => Endpoint { node: *inside, ..*at },
                        (None, None) => *at,
                    };
                }
                node.control_inputs.iter_mut().for_each(|before| *before = *copies.get(before).unwrap_or(before));
            });
        }
        Ok(copies)
    }

    /// Removes nodes that nothing needs any more: nobody reads or awaits them, and the run did not ask for them.
    pub fn remove_dead(&mut self) {
        let wanted: HashSet<NodeId> =
            self.fetches.iter().map(|(_, at)| at.node).chain(self.targets.iter().copied()).collect();
        let mut open = self.ids();
        while let Some(id) = open.pop() {
            let Some(node) = self.node(id) else { continue };
            if wanted.contains(&id) || !self.users[id.index()].is_empty() {
                continue;
            }
            let before = inputs_of(node);
            open.extend(before);
            self.unlink(id);
            self.is_live[id.index()] = false;
        }
    }

    /// Changes a node in its place.
    pub fn edit(&mut self, id: NodeId, change: impl FnOnce(&mut Node)) {
        let mut node = Node::clone(self.nodes.node(id));
        change(&mut node);
        self.replace(id, node);
    }

    /// Notes this node as a user of its inputs.
    fn link(&mut self, id: NodeId) {
        for before in inputs_of(self.nodes.node(id)) {
            if let Some(users) = self.users.get_mut(before.index()) {
                users.push(id);
            }
        }
    }

    fn unlink(&mut self, id: NodeId) {
        for before in inputs_of(self.nodes.node(id)) {
            if let Some(users) = self.users.get_mut(before.index())
                && let Some(at) = users.iter().position(|user| *user == id)
            {
                users.swap_remove(at);
            }
        }
    }

    /// Whether anything was changed.
    pub(crate) fn has_changed(&self) -> bool {
        !self.changed.is_empty() || self.len() != self.n_before
    }

    /// The graph after the pass: all nodes under their numbers, and those that are left.
    pub(crate) fn into_graph(self) -> (Nodes, Pruned) {
        let pruned = Pruned {
            nodes: self.ids(),
            feeds: self.feeds,
            fetches: self.fetches.into_iter().map(|(_, at)| at).collect(),
            targets: self.targets,
        };
        (self.nodes, pruned)
    }

    /// The part after the pass, numbered anew, every node after its inputs.
    pub(crate) fn into_part(self, part: &Partition) -> Result<Partition> {
        let ids = self.ids();
        let order = self.order(&ids).map_err(|cycle| crate::plan::prune::describe_cycle(&self.nodes, &cycle))?;
        let mut number: Vec<Option<NodeId>> = vec![None; self.is_live.len()];
        order.iter().enumerate().for_each(|(new, old)| number[old.index()] = Some(NodeId(new as u32)));
        let renamed = |id: NodeId| {
            let missing = || Error::internal(format!("node {id:?} is needed and was removed"));
            number.get(id.index()).copied().flatten().ok_or_else(missing)
        };
        let mut nodes = Nodes::default();
        let mut origin = Vec::with_capacity(order.len());
        let mut feeds: Vec<(usize, Vec<(NodeId, usize)>)> = Vec::new();
        for (new, &old) in order.iter().enumerate() {
            let mut node = Node::clone(self.nodes.node(old));
            let id = NodeId(new as u32);
            for (i, at) in node.inputs.iter_mut().enumerate() {
                match at.feed() {
                    Some(feed) => match feeds.iter_mut().find(|(number, _)| *number == feed) {
                        Some((_, to)) => to.push((id, i)),
                        None => feeds.push((feed, vec![(id, i)])),
                    },
                    None => at.node = renamed(at.node)?,
                }
            }
            node.control_inputs = node.control_inputs.iter().map(|id| renamed(*id)).collect::<Result<_>>()?;
            node.control_inputs.sort_unstable();
            origin.push(part.origin.get(old.index()).copied().flatten());
            nodes.push(node);
        }
        feeds.sort_by_key(|(feed, _)| *feed);
        let place = |&(fetch, at): &(usize, Endpoint)| Ok((fetch, Endpoint { node: renamed(at.node)?, ..at }));
        // A transfer whose end became part of another node is no longer one of this part.
        let is_here = |transfer: &&Transfer| self.node(transfer.send).is_some();
        let place_transfer = |transfer: &Transfer| Ok(Transfer { send: renamed(transfer.send)?, ..transfer.clone() });
        let transfers = part.transfers.iter().filter(is_here).map(place_transfer).collect::<Result<_>>()?;
        Ok(Partition {
            device: part.device,
            nodes,
            origin,
            feeds,
            fetches: self.fetches.iter().map(place).collect::<Result<_>>()?,
            transfers,
        })
    }

    /// These nodes (sorted), each after its inputs; a cycle if there is one outside of loops.
    fn order(&self, ids: &[NodeId]) -> Result<Vec<NodeId>, Vec<NodeId>> {
        let is_fed = |at: &Endpoint| self.is_fed(*at);
        let position = |id: NodeId| ids.binary_search(&id).ok();
        let inputs: Vec<Vec<usize>> = ids
            .iter()
            .map(|&id| {
                let node = self.nodes.node(id);
                let data = node.inputs.iter().filter(|at| !is_fed(at) && !is_back_edge(&self.nodes, at.node, id));
                let data = data.map(|at| at.node);
                data.chain(node.control_inputs.iter().copied()).filter_map(position).collect()
            })
            .collect();
        let named = |order: Vec<usize>| order.into_iter().map(|i| ids[i]).collect();
        topological_order(&inputs).map(named).map_err(named)
    }

    /// What is fed, where edges name the fed output itself.
    fn fed(&self) -> Result<Feeds> {
        Feeds::new(&self.nodes, &self.feeds)
    }
}

/// Where a node's edges come from, once for each edge.
fn inputs_of(node: &Node) -> Vec<NodeId> {
    node.inputs
        .iter()
        .filter(|at| at.feed().is_none())
        .map(|at| at.node)
        .chain(node.control_inputs.iter().copied())
        .collect()
}

/// A node that does the work of several, under the name of `root`, the last of them. It waits for whatever they waited for.
pub fn fused_node(
    def: &crate::OpDef,
    root: &Node,
    of: &[&Node],
    inputs: Vec<Endpoint>,
    outputs: Vec<crate::OutputInfo>,
    attrs: Attrs,
) -> Node {
    let mut control_inputs: Vec<NodeId> = of.iter().flat_map(|node| node.control_inputs.iter().copied()).collect();
    control_inputs.sort_unstable();
    control_inputs.dedup();
    let source: Option<Origin> = root.source.clone().or_else(|| of.iter().find_map(|node| node.source.clone()));
    Node {
        name: root.name.clone(),
        def: *def,
        ref_inputs: vec![false; inputs.len()],
        inputs,
        control_inputs,
        attrs,
        device: root.device.clone(),
        outputs,
        source,
        device_source: root.device_source.clone(),
        unknown: None,
    }
}
