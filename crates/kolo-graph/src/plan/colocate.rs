//! Colocation: which nodes must share a device, as sets found by union-find. Each set carries what its members ask for.
//!
//! Nodes share a device because one holds a reference or resource handle of the other, because they name the same
//! `_class` group, or because a loop's `Enter` and `NextIteration` hand their value to a `Merge`, which fires on either:
//! a transfer between them would wait for a value that only some iterations send.

use std::collections::HashMap;

use kolo_core::{DType, DeviceSpec, Error, MergeConflict, Result};

use crate::plan::place::Placement;
use crate::{Effects, Flow, Node, NodeId, Nodes, OwnedState};

/// A device that is asked for, and the node that did.
#[derive(Clone, Default)]
pub(crate) struct Wish {
    pub spec: DeviceSpec,
    pub by: Option<NodeId>,
}

/// All nodes in sets that share a device.
pub(crate) struct Sets {
    parent: Vec<u32>,
    /// Meaningful at the roots only.
    wishes: Vec<Wishes>,
}

#[derive(Clone, Default)]
struct Wishes {
    requested: Wish,
    /// What the nodes that hold state ask for; nobody else may override it.
    resource: Wish,
}

/// The sets of all nodes. What the nodes of this run need comes first, and conflicts in it are errors; nodes that are
/// not needed now join where they fit, so that a variable's place already suits the runs to come.
pub(crate) fn colocate(nodes: &Nodes, needed: &[NodeId], placement: Placement) -> Result<Sets> {
    let mut sets = Sets {
        parent: (0..nodes.len() as u32).collect(),
        wishes: nodes.iter().map(|(id, node)| Wishes::of(id, node)).collect(),
    };
    let mut groups = HashMap::new();
    for &id in needed {
        sets.unite_inputs(nodes, id)?;
    }
    for &id in needed {
        sets.unite_groups(nodes, id, placement, &mut groups)?;
    }
    let others = || nodes.iter().map(|(id, _)| id).filter(|id| needed.binary_search(id).is_err());
    for id in others() {
        // A conflict among nodes that this run does not need is reported by the run that does.
        let _ = sets.unite_inputs(nodes, id);
    }
    for id in others() {
        let _ = sets.unite_groups(nodes, id, placement, &mut groups);
    }
    sets.flatten();
    Ok(sets)
}

/// For each node, by its number, the first of those that it shares a device with, whichever run they belong to.
pub fn colocation_leaders(nodes: &Nodes) -> Result<Vec<NodeId>> {
    let sets = colocate(nodes, &[], Placement::Soft)?;
    Ok(nodes.iter().map(|(id, _)| sets.root(id)).collect())
}

impl Sets {
    /// The node that stands for the set of `id`: its member with the smallest number.
    pub(crate) fn root(&self, id: NodeId) -> NodeId {
        NodeId(self.parent[id.index()])
    }

    /// As [`Sets::root`], while sets are still growing; shortens the way for the next one.
    fn find(&mut self, id: NodeId) -> NodeId {
        let mut at = id.index();
        while self.parent[at] as usize != at {
            self.parent[at] = self.parent[self.parent[at] as usize];
            at = self.parent[at] as usize;
        }
        NodeId(at as u32)
    }

    /// Makes every node point at its root. Parents have smaller numbers, so one pass does it.
    fn flatten(&mut self) {
        for i in 0..self.parent.len() {
            self.parent[i] = self.parent[self.parent[i] as usize];
        }
    }

    /// What the set of `root` asks for: the wishes of its state, then those of the rest as far as they agree.
    pub(crate) fn wish(&self, root: NodeId) -> Wish {
        let Wishes { requested, resource } = &self.wishes[root.index()];
        match resource.spec.merge(&requested.spec, MergeConflict::Refuse) {
            Ok(spec) => Wish { spec, by: resource.by.or(requested.by) },
            Err(_) => resource.clone(),
        }
    }

    fn unite_inputs(&mut self, nodes: &Nodes, id: NodeId) -> Result<()> {
        let node = nodes.node(id);
        for (i, at) in node.inputs.iter().enumerate() {
            let by_reference = node.ref_inputs.get(i).copied().unwrap_or(false);
            let by_handle = nodes.output(*at).dtype == DType::Resource && !node.def.handles_from_anywhere;
            if by_reference || by_handle {
                self.unite_state(nodes, at.node, id)?;
            } else if node.def.flow == Flow::Merge
                && matches!(nodes.node(at.node).def.flow, Flow::Enter | Flow::NextIteration)
            {
                self.unite_preferring(id, at.node).map_err(|error| {
                    let source = nodes.node(at.node);
                    let pins = self.pins(nodes, id, at.node);
                    error.context(format_args!("{} must be with {}", source.describe(), node.describe())).and(pins)
                })?;
            }
        }
        Ok(())
    }

    /// `user` holds a reference or handle of `holder`, so it goes where that is, whatever it asks for.
    fn unite_state(&mut self, nodes: &Nodes, holder: NodeId, user: NodeId) -> Result<()> {
        self.unite_preferring(holder, user).map_err(|error| {
            Error::invalid_argument(format!(
                "Cannot place the graph because a reference or resource edge connects colocation groups with \
                 incompatible resource devices: {}. The edge src node is {}, and the dst node is {}{}",
                error.message(),
                nodes.node(holder).describe(),
                nodes.node(user).describe(),
                self.pins(nodes, holder, user)
            ))
        })
    }

    /// `; 'a' asks for '/cpu:0' (pinned at file:line) and …`: who asks for what in two sets that do not agree.
    fn pins(&mut self, nodes: &Nodes, first: NodeId, second: NodeId) -> String {
        let roots = [self.find(first), self.find(second)];
        let wishes = roots.iter().flat_map(|root| {
            let Wishes { requested, resource } = &self.wishes[root.index()];
            // What state asks for counts first; it is among what the set asks for, too.
            [resource, requested].into_iter().find_map(|wish| wish.by)
        });
        let said: Vec<String> = wishes
            .map(|by| {
                let node = nodes.node(by);
                format!("'{}' asks for '{}'{}", node.name, node.device, node.pinned_at())
            })
            .collect();
        if said.is_empty() { String::new() } else { format!("; {}", said.join(" and ")) }
    }

    /// Joins two sets; where they ask for different devices, `first`'s is kept. State that asks for different devices
    /// is an error.
    fn unite_preferring(&mut self, first: NodeId, second: NodeId) -> Result<()> {
        let (a, b) = (self.find(first), self.find(second));
        if a == b {
            return Ok(());
        }
        let (mine, theirs) = (&self.wishes[a.index()], &self.wishes[b.index()]);
        let resource = mine.resource.merge(&theirs.resource)?;
        let requested = mine.requested.merge(&theirs.requested).unwrap_or_else(|_| mine.requested.clone());
        self.link(a, b, Wishes { requested, resource });
        Ok(())
    }

    /// Joins the sets of all nodes that name a group. The node that the group is named after belongs to it unless it
    /// names a group itself; there need not be such a node.
    fn unite_groups<'a>(
        &mut self,
        nodes: &'a Nodes,
        id: NodeId,
        placement: Placement,
        groups: &mut HashMap<&'a str, NodeId>,
    ) -> Result<()> {
        for group in nodes.node(id).colocation_groups() {
            let leader = *groups.entry(group).or_insert_with(|| {
                let named = nodes.find(group).filter(|&leader| nodes.node(leader).colocation_groups().next().is_none());
                named.unwrap_or(id)
            });
            let (a, b) = (self.find(leader), self.find(id));
            if a == b {
                continue;
            }
            let (mine, theirs) = (&self.wishes[a.index()], &self.wishes[b.index()]);
            let merged = mine
                .resource
                .merge(&theirs.resource)
                .and_then(|resource| Ok(Wishes { requested: mine.requested.merge(&theirs.requested)?, resource }));
            match (merged, placement) {
                (Ok(wishes), _) => self.link(a, b, wishes),
                (Err(_), Placement::Soft) => {}
                (Err(error), Placement::Strict) => {
                    return Err(Error::invalid_argument(format!(
                        "Cannot colocate nodes {} and {} because {}{}",
                        nodes.node(leader).describe(),
                        nodes.node(id).describe(),
                        error.message(),
                        self.pins(nodes, leader, id)
                    )));
                }
            }
        }
        Ok(())
    }

    fn link(&mut self, a: NodeId, b: NodeId, wishes: Wishes) {
        // The smaller number is the root, so that messages name the node that was described first.
        let (root, child) = (a.min(b), a.max(b));
        self.parent[child.index()] = root.0;
        self.wishes[root.index()] = wishes;
    }
}

impl Wishes {
    fn of(id: NodeId, node: &Node) -> Wishes {
        if node.device.is_empty() {
            return Wishes::default();
        }
        let wish = Wish { spec: node.device.clone(), by: Some(id) };
        let resource = if holds_state(node) { wish.clone() } else { Wish::default() };
        Wishes { requested: wish, resource }
    }
}

impl Wish {
    fn merge(&self, other: &Wish) -> Result<Wish> {
        Ok(Wish { spec: self.spec.merge(&other.spec, MergeConflict::Refuse)?, by: self.by.or(other.by) })
    }
}

/// Variables, queues and their like: no inputs, and one output that refers to what they hold.
pub fn holds_state(node: &Node) -> bool {
    match node.outputs.as_slice() {
        [output] => node.inputs.is_empty() && (output.is_ref || output.dtype == DType::Resource),
        _ => false,
    }
}

/// A variable of either family: state that is one tensor.
pub fn is_variable(node: &Node) -> bool {
    node.def.effects == Effects::Owns(OwnedState::Variable)
}
