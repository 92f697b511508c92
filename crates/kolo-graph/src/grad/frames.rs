//! The loops of a graph, read off its structure: a frame begins where `Enter` ops lead into it, and its variables are the
//! merges that a `NextIteration` comes back to.

use std::collections::{HashMap, HashSet};

use kolo_core::{Error, Result};

use crate::{Endpoint, Flow, Node, NodeId, Nodes};

/// A loop's number among the loops of a graph. A loop within another has the higher number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct FrameId(u32);

/// One loop.
#[derive(Debug)]
pub(super) struct Frame {
    /// The attribute that its `Enter` ops share.
    pub name: String,
    /// The loop around it.
    pub parent: Option<FrameId>,
    pub parallel_iterations: i64,
    pub enters: Vec<NodeId>,
    pub vars: Vec<LoopVar>,
    pub predicate: Option<NodeId>,
    /// The branches, of the frame around it, in which the whole loop lies.
    pub guards: Vec<Guard>,
}

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

/// All loops of a graph, and where its nodes lie.
#[derive(Debug, Default)]
pub(super) struct Frames {
    frames: Vec<Frame>,
    /// Where a node's outputs live; nodes outside of loops are left out.
    of: HashMap<NodeId, FrameId>,
    /// The branches of its own frame that a node's outputs depend on, apart from the last part of `Switch`; only of
    /// nodes inside loops.
    guards: HashMap<NodeId, Vec<Guard>>,
    /// Nodes that make up loops, rather than what is computed in them.
    borders: HashSet<NodeId>,
}

impl Frames {
    /// Reads the structure. Nodes come after their inputs, but for the edges that close loops.
    pub(super) fn of(nodes: &Nodes) -> Result<Frames> {
        let mut frames = Frames::default();
        if !nodes.iter().any(|(_, node)| node.def.flow == Flow::Enter) {
            return Ok(frames);
        }
        let mut by_name: HashMap<(Option<FrameId>, String), FrameId> = HashMap::new();
        for (id, node) in nodes.iter() {
            let around = frames.around(nodes, node);
            let inside = match node.def.flow {
                Flow::Enter => {
                    let name = node.attrs.str("frame_name")?.to_owned();
                    let parallel_iterations = node.attrs.int("parallel_iterations")?;
                    let guards = frames.guards_around(nodes, node);
                    let frame = *by_name.entry((around, name.clone())).or_insert_with(|| {
                        frames.frames.push(Frame {
                            name,
                            parent: around,
                            parallel_iterations,
                            enters: Vec::new(),
                            vars: Vec::new(),
                            predicate: None,
                            guards: Vec::new(),
                        });
                        FrameId(frames.frames.len() as u32 - 1)
                    });
                    let shape = &mut frames.frames[frame.0 as usize];
                    shape.enters.push(id);
                    shape
                        .guards
                        .extend(guards.into_iter().filter(|guard| !shape.guards.contains(guard)).collect::<Vec<_>>());
                    frames.borders.insert(id);
                    Some(frame)
                }
                Flow::Exit => {
                    let Some(frame) = around else {
                        return Err(Error::invalid_argument(format!("{} leaves no loop", node.describe())));
                    };
                    frames.borders.insert(id);
                    let guards = frames.frame(frame).guards.clone();
                    if !guards.is_empty() {
                        frames.guards.insert(id, guards);
                    }
                    frames.frame(frame).parent
                }
                Flow::LoopCond => {
                    if let Some(frame) = around {
                        frames.frames[frame.0 as usize].predicate = Some(id);
                    }
                    frames.borders.insert(id);
                    around
                }
                _ => around,
            };
            let Some(inside) = inside else { continue };
            frames.of.insert(id, inside);
            if !matches!(node.def.flow, Flow::Enter | Flow::Exit) {
                let guards = frames.guards_around(nodes, node);
                if !guards.is_empty() {
                    frames.guards.insert(id, guards);
                }
            }
        }
        frames.find_variables(nodes);
        Ok(frames)
    }

    /// The frame that a node's inputs live in.
    fn around(&self, nodes: &Nodes, node: &Node) -> Option<FrameId> {
        let forward = node.inputs.iter().find(|at| nodes.node(at.node).def.flow != Flow::NextIteration);
        match forward.or(node.inputs.first()) {
            Some(at) => self.of.get(&at.node).copied(),
            None => node.control_inputs.iter().find_map(|id| self.of.get(id)).copied(),
        }
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
            && self.of.contains_key(&at.node)
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
            let (Flow::Merge, Some(&frame)) = (node.def.flow, self.of.get(&id)) else { continue };
            let back = node.inputs.iter().find(|at| nodes.node(at.node).def.flow == Flow::NextIteration);
            let enter = node.inputs.iter().find(|at| nodes.node(at.node).def.flow == Flow::Enter);
            match (enter, back, switches.get(&id)) {
                (Some(enter), Some(back), Some(&switch)) => {
                    self.borders.extend([id, back.node]);
                    let exits = exits.remove(&switch).unwrap_or_default();
                    let var = LoopVar { enter: enter.node, merge: id, switch, next: back.node, exits };
                    self.frames[frame.0 as usize].vars.push(var);
                }
                // A loop whose body is still being described, or one that a rewrite drives; neither has gradients here.
                (Some(_), ..) => drop(self.borders.insert(id)),
                _ => {}
            }
        }
    }

    pub(super) fn frame(&self, id: FrameId) -> &Frame {
        &self.frames[id.0 as usize]
    }

    /// Where a node's outputs live.
    pub(super) fn of_node(&self, id: NodeId) -> Option<FrameId> {
        self.of.get(&id).copied()
    }

    /// The loop that a node is part of: `Enter` and `Exit` belong to the loop whose border they are.
    pub(super) fn home(&self, nodes: &Nodes, id: NodeId) -> Option<FrameId> {
        match nodes.node(id).def.flow {
            Flow::Exit => self.of_node(nodes.node(id).inputs[0].node),
            _ => self.of_node(id),
        }
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
