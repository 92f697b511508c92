//! Collectives in one order on all ranks.
//!
//! The ranks of a group meet in each of its collectives one after the other, so all of them have to begin these in the same order.
//! A graph leaves the order of nodes open that do not depend on each other, and which one an executor begins first is a matter of
//! microseconds. This pass orders them all: by the longest path that leads to each, then by name. Ranks that run the same graph
//! get the same order; for those that do not, the groups themselves notice.

use std::collections::{HashMap, HashSet};

use kolo_core::Result;

use super::branches::{BranchNode, skipped_nodes};
use super::frames::frames;
use super::order::levels;
use super::{Pass, Rewriter, Stage};
use crate::{Endpoint, NodeId};

/// The pass that orders the collectives of a run, those of every group one after the other. What is in a loop, or in a branch that
/// a step may not take, keeps the order that the program gave it: waiting for such a node would skip who waits.
pub fn order_collectives() -> Pass {
    Pass::new(
        "order-collectives",
        Stage::Graph,
        "all ranks of a group begin its collectives in the same order, which the edges of a graph leave open",
        |graph, _| order(graph),
    )
}

fn order(graph: &mut Rewriter<'_>) -> Result<()> {
    if graph.iter().filter(|(_, node)| node.def.group.is_some()).nth(1).is_none() {
        return Ok(());
    }
    let ids = graph.ids();
    let levels = levels(&graph.nodes, &ids, &graph.fed()?)?;
    let left_alone = graph.conditional()?;
    let mut collectives: Vec<(String, u32, NodeId)> = Vec::new();
    for (i, &id) in ids.iter().enumerate() {
        let node = graph.nodes.node(id);
        if let Some(attr) = node.def.group.filter(|_| !left_alone.holds(id)) {
            collectives.push((node.attrs.str(attr)?.to_owned(), levels[i], id));
        }
    }
    // One order of all nodes for all groups: edges along it cannot close a cycle.
    collectives.sort_by(|(_, level, id), (_, other_level, other)| {
        let name = |id: &NodeId| &graph.nodes.node(*id).name;
        (level, name(id)).cmp(&(other_level, name(other)))
    });
    let mut last: HashMap<String, NodeId> = HashMap::new();
    for (group, _, id) in collectives {
        if let Some(before) = last.insert(group, id) {
            graph.order_after(id, before);
        }
    }
    Ok(())
}

/// Nodes that do not run exactly once in every step; see [`Rewriter::conditional`].
#[derive(Clone, Debug, Default)]
pub struct Conditional {
    /// Those that a step may skip, because a branch is not taken.
    pub skipped: HashSet<NodeId>,
    /// Those of loops.
    pub looped: HashSet<NodeId>,
}

impl Conditional {
    /// Whether a node is one of them.
    pub fn holds(&self, id: NodeId) -> bool {
        self.skipped.contains(&id) || self.looped.contains(&id)
    }
}

impl Rewriter<'_> {
    /// Nodes that do not run exactly once in every step. Who waits for one that is skipped is skipped, too; who is outside of a loop
    /// cannot wait for what is inside.
    pub fn conditional(&self) -> Result<Conditional> {
        let ids = self.ids();
        let frames = frames(&self.nodes, &ids, &self.feeds)?;
        let place = |id: NodeId| ids.binary_search(&id).ok();
        let source = |at: &Endpoint| place(at.node).filter(|_| !self.is_fed(*at)).map(|place| (place, at.index));
        let nodes: Vec<BranchNode<'_>> = ids
            .iter()
            .map(|&id| {
                let node = self.nodes.node(id);
                BranchNode {
                    node,
                    inputs: node.inputs.iter().map(source).collect(),
                    control: node.control_inputs.iter().filter_map(|id| place(*id)).collect(),
                    passes_on: node.passed_on().as_ref().and_then(source),
                    may_be_skipped: false,
                }
            })
            .collect();
        let order = self.order(&ids).map_err(|cycle| crate::plan::prune::describe_cycle(&self.nodes, &cycle))?;
        let order: Vec<usize> = order.into_iter().filter_map(place).collect();
        let skipped = skipped_nodes(&nodes, &order);
        let skipped = ids.iter().zip(skipped).filter(|(_, is_skipped)| *is_skipped).map(|(id, _)| *id).collect();
        let looped = ids.iter().copied().filter(|id| frames.of(*id).is_some()).collect();
        Ok(Conditional { skipped, looped })
    }
}
