//! What gradients need to know of loops besides their frames ([`crate::frames`]): their variables, which are the merges
//! that a `NextIteration` comes back to, and the branches in which values and whole loops are.

use std::collections::{HashMap, HashSet};

use kolo_core::Result;

use super::ancestors;
use crate::{Endpoint, Flow, Frame, FrameId, Frames, Node, NodeId, Nodes, frames};

/// `Enter ─ Merge ─ Switch ─ … ─ NextIteration ─ Merge`.
#[derive(Debug)]
pub(super) struct LoopVar {
    pub enter: NodeId,
    pub merge: NodeId,
    pub switch: NodeId,
    pub next: NodeId,
    pub exits: Vec<NodeId>,
}

/// A node runs only if the predicate (an output of the same frame) chose this side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Guard {
    pub predicate: Endpoint,
    pub side: u32,
}

/// The variables of one loop, and where it is.
#[derive(Debug, Default)]
struct LoopShape {
    vars: Vec<LoopVar>,
    /// The branches, of the frame around it, in which the whole loop is.
    guards: Vec<Guard>,
}

/// All loops of a graph, and where its nodes are.
#[derive(Debug, Default)]
pub(super) struct Loops {
    frames: Frames,
    /// By the number of the frame.
    shapes: Vec<LoopShape>,
    /// The branches of its own frame that a node's outputs depend on, apart from the last part of `Switch`; only of
    /// nodes inside loops.
    guards: HashMap<NodeId, Vec<Guard>>,
    /// Nodes that make up loops, rather than what is computed in them.
    borders: HashSet<NodeId>,
}

impl Loops {
    /// Reads the structure. Nodes come after their inputs, but for the edges that close loops. A malformed loop is an error
    /// only if one of `outputs` depends on it.
    pub(super) fn of(nodes: &Nodes, outputs: &[NodeId]) -> Result<Loops> {
        let all: Vec<NodeId> = nodes.iter().map(|(id, _)| id).collect();
        let frames = frames(nodes, &all, &[]).or_else(|_| frames(nodes, &ancestors(nodes, outputs), &[]))?;
        let shapes = frames.iter().map(|_| LoopShape::default()).collect();
        let mut loops = Loops { frames, shapes, ..Loops::default() };
        if loops.shapes.is_empty() {
            return Ok(loops);
        }
        for (id, node) in nodes.iter() {
            let Some(frame) = loops.frames.of(id) else { continue };
            let guards = match node.def.flow {
                Flow::Enter => {
                    loops.borders.insert(id);
                    let guards = loops.guards_around(nodes, node);
                    let known = &mut loops.shapes[frame.0 as usize].guards;
                    let new: Vec<Guard> = guards.into_iter().filter(|guard| !known.contains(guard)).collect();
                    known.extend(new);
                    continue;
                }
                Flow::Exit => {
                    loops.borders.insert(id);
                    loops.loop_guards(frame).to_vec()
                }
                Flow::LoopCond => {
                    loops.borders.insert(id);
                    loops.guards_around(nodes, node)
                }
                _ => loops.guards_around(nodes, node),
            };
            if !guards.is_empty() {
                loops.guards.insert(id, guards);
            }
        }
        loops.find_variables(nodes);
        Ok(loops)
    }

    /// The guards of whatever a node waits for; of a merge, those that hold whichever side came.
    fn guards_around(&self, nodes: &Nodes, node: &Node) -> Vec<Guard> {
        let mut all: Vec<Guard> = Vec::new();
        if node.def.flow == Flow::Merge {
            let mut sides = node.inputs.iter().map(|&at| self.guards(nodes, at));
            all = sides.next().unwrap_or_default();
            sides.for_each(|side| all.retain(|guard| side.contains(guard)));
        } else {
            for &at in &node.inputs {
                let guards = self.guards(nodes, at);
                all.extend(guards.into_iter().filter(|guard| !all.contains(guard)).collect::<Vec<_>>());
            }
        }
        for &id in &node.control_inputs {
            let guards = self.guards.get(&id).into_iter().flatten();
            all.extend(guards.filter(|guard| !all.contains(guard)).copied().collect::<Vec<_>>());
        }
        all
    }

    /// The branches of its own frame that an output depends on.
    pub(super) fn guards(&self, nodes: &Nodes, at: Endpoint) -> Vec<Guard> {
        let mut guards = self.guards.get(&at.node).cloned().unwrap_or_default();
        let node = nodes.node(at.node);
        if node.def.flow == Flow::Switch
            && nodes.node(node.inputs[1].node).def.flow != Flow::LoopCond
            && self.frames.of(at.node).is_some()
        {
            // A predicate under another name is the same predicate.
            let mut predicate = node.inputs[1];
            while let Some(at) = nodes.node(predicate.node).passed_on() {
                predicate = at;
            }
            let guard = Guard { predicate, side: at.index };
            if !guards.contains(&guard) {
                guards.push(guard);
            }
        }
        guards
    }

    fn find_variables(&mut self, nodes: &Nodes) {
        let mut exits: HashMap<NodeId, Vec<NodeId>> = HashMap::new();
        let mut switches: HashMap<NodeId, NodeId> = HashMap::new();
        for (id, node) in nodes.iter() {
            match node.def.flow {
                Flow::Exit => exits.entry(node.inputs[0].node).or_default().push(id),
                Flow::Switch if nodes.node(node.inputs[1].node).def.flow == Flow::LoopCond => {
                    switches.insert(node.inputs[0].node, id);
                    self.borders.insert(id);
                }
                _ => {}
            }
        }
        for (id, node) in nodes.iter() {
            let (Flow::Merge, Some(frame)) = (node.def.flow, self.frames.of(id)) else { continue };
            let back = node.inputs.iter().find(|at| nodes.node(at.node).def.flow == Flow::NextIteration);
            let enter = node.inputs.iter().find(|at| nodes.node(at.node).def.flow == Flow::Enter);
            match (enter, back, switches.get(&id)) {
                (Some(enter), Some(back), Some(&switch)) => {
                    self.borders.extend([id, back.node]);
                    let exits = exits.remove(&switch).unwrap_or_default();
                    let var = LoopVar { enter: enter.node, merge: id, switch, next: back.node, exits };
                    self.shapes[frame.0 as usize].vars.push(var);
                }
                // A loop whose body is still being described, or one that a rewrite drives; neither has gradients here.
                (Some(_), ..) => drop(self.borders.insert(id)),
                _ => {}
            }
        }
    }

    pub(super) fn frame(&self, id: FrameId) -> &Frame {
        self.frames.frame(id)
    }

    pub(super) fn vars(&self, id: FrameId) -> &[LoopVar] {
        &self.shapes[id.0 as usize].vars
    }

    /// The branches, of the frame around it, in which a whole loop is.
    pub(super) fn loop_guards(&self, id: FrameId) -> &[Guard] {
        &self.shapes[id.0 as usize].guards
    }

    /// Where a node's outputs live.
    pub(super) fn of_node(&self, nodes: &Nodes, id: NodeId) -> Option<FrameId> {
        self.frames.output_frame(nodes, id)
    }

    /// The loop that a node is part of: `Enter` and `Exit` belong to the loop whose border they are.
    pub(super) fn home(&self, id: NodeId) -> Option<FrameId> {
        self.frames.of(id)
    }

    /// True for nodes that make up a loop.
    pub(super) fn is_border(&self, id: NodeId) -> bool {
        self.borders.contains(&id)
    }

    /// True if `outer` is `inner` or around it.
    pub(super) fn is_around(&self, outer: Option<FrameId>, mut inner: Option<FrameId>) -> bool {
        while let Some(frame) = inner {
            if outer == Some(frame) {
                return true;
            }
            inner = self.frame(frame).parent;
        }
        outer.is_none()
    }

    /// The loop directly within `level` that is `inner` or around it; `None` if `inner` is elsewhere.
    pub(super) fn child_towards(&self, level: Option<FrameId>, mut inner: FrameId) -> Option<FrameId> {
        loop {
            match self.frame(inner).parent {
                parent if parent == level => return Some(inner),
                Some(parent) => inner = parent,
                None => return None,
            }
        }
    }
}
