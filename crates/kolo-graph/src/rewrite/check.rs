//! What must be true of a graph after a pass, whatever the pass was for.

use kolo_core::{Error, Result};

use super::Rewriter;
use crate::describe::request::infer_again;
use crate::plan::prune::describe_cycle;
use crate::{Node, NodeId};

impl Rewriter<'_> {
    /// An `Internal` error that names what the pass broke:
    ///
    /// - names are unique;
    /// - every edge comes from a node that is there and has such an output;
    /// - changed nodes fit their op's signature, and the shapes that are noted for them do not contradict inference;
    /// - there are no cycles outside of loops;
    /// - nodes that stayed keep their device, their colocation groups and the line that made them.
    pub(crate) fn check(&self) -> Result<()> {
        let fed = self.fed()?;
        let ids = self.ids();
        for &id in &ids {
            let node = self.nodes.node(id);
            if self.nodes.find(&node.name) != Some(id) {
                return Err(broken(node, format_args!("has the name of another node")));
            }
            for at in node.inputs.iter().filter(|at| !fed.has(**at)) {
                let has_output = self.node(at.node).is_some_and(|maker| (at.index as usize) < maker.outputs.len());
                if !has_output {
                    return Err(broken(node, format_args!("reads {at:?}, which is not there")));
                }
            }
            let is_satisfied = |before: &NodeId| fed.satisfies(&self.nodes, *before);
            if let Some(before) = node.control_inputs.iter().find(|id| self.node(**id).is_none() && !is_satisfied(id)) {
                return Err(broken(node, format_args!("waits for {before:?}, which is not there")));
            }
        }
        for &(fetch, at) in self.fetches.iter().filter(|(_, at)| !fed.has(*at)) {
            if self.node(at.node).is_none_or(|node| node.outputs.len() <= at.index as usize) {
                return Err(Error::internal(format!("fetch {fetch} is {at:?}, which is not there")));
            }
        }
        if let Err(cycle) = self.order(&ids) {
            return Err(describe_cycle(&self.nodes, &cycle));
        }
        for &id in &ids {
            let node = self.nodes.node(id);
            if self.changed.contains(&id) {
                infer_again(self.registry, &self.nodes, node)?;
            }
            let Some(old) = (id.index() < self.before.len()).then(|| self.before.node(id)) else { continue };
            if old.device != node.device {
                return Err(broken(node, format_args!("asked for '{}' and now for '{}'", old.device, node.device)));
            }
            if old.op() == node.op() {
                let lost = old.colocation_groups().find(|group| !node.colocation_groups().any(|kept| kept == *group));
                if let Some(group) = lost {
                    return Err(broken(node, format_args!("is no longer colocated with '{group}'")));
                }
            }
            if old.source.is_some() && node.source.is_none() {
                return Err(broken(node, format_args!("has lost the line that made it")));
            }
        }
        Ok(())
    }
}

fn broken(node: &Node, what: std::fmt::Arguments<'_>) -> Error {
    Error::internal(format!("{} {what}", node.describe()))
}
