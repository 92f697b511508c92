//! Which loop frame each node of a part belongs to, found from the structure alone: an `Enter` leads into a frame, an
//! `Exit` out of it, and everything else stays where its inputs are.

use kolo_core::{Error, Result};
use kolo_graph::{Flow, NodeId, Nodes};

/// The frames of a part. Frame 0 is outside of all loops.
pub(crate) struct Frames {
    /// The frame of each node. For `Enter` and `Exit`: the one they run in, which is the one their input is in.
    pub of_node: Vec<u32>,
    /// The frames.
    pub list: Vec<FrameShape>,
}

/// One frame, as the graph shows it.
pub(crate) struct FrameShape {
    /// The `frame_name` attribute; empty for frame 0.
    pub name: String,
    /// The frame around it.
    pub parent: u32,
    /// How many iterations may run at once.
    pub parallel_iterations: usize,
    /// How many `Enter` nodes lead into it.
    pub n_enters: u32,
}

/// Finds the frame of every node. Inputs that are fed come from outside of all loops and say nothing.
pub(crate) fn frames(nodes: &Nodes, is_fed: &dyn Fn(NodeId, usize) -> bool) -> Result<Frames> {
    let mut list = vec![FrameShape { name: String::new(), parent: 0, parallel_iterations: 1, n_enters: 0 }];
    let mut of_node: Vec<Option<u32>> = vec![None; nodes.len()];
    let mut consumers: Vec<Vec<u32>> = vec![Vec::new(); nodes.len()];
    let mut stack: Vec<(u32, u32)> = Vec::new();
    for (id, node) in nodes.iter() {
        let data = node.inputs.iter().enumerate().filter(|(i, _)| !is_fed(id, *i)).map(|(_, at)| at.node);
        let mut waits_for_nodes = false;
        for before in data.chain(node.control_inputs.iter().copied()) {
            consumers[before.index()].push(id.0);
            waits_for_nodes = true;
        }
        if !waits_for_nodes {
            stack.push((id.0, 0));
        }
    }
    while let Some((at, frame)) = stack.pop() {
        let node = nodes.node(NodeId(at));
        match of_node[at as usize] {
            Some(known) if known == frame => continue,
            Some(known) => {
                return Err(Error::invalid_argument(format!(
                    "The node '{}' has inputs from different frames: '{}' and '{}'",
                    node.name, list[known as usize].name, list[frame as usize].name
                )));
            }
            None => of_node[at as usize] = Some(frame),
        }
        let next = match node.def.flow {
            Flow::Enter => {
                let name = node.attrs.str("frame_name")?;
                let parallel = usize::try_from(node.attrs.int("parallel_iterations")?).unwrap_or(1).max(1);
                let child = match list.iter().position(|shape| shape.name == name && shape.parent == frame) {
                    Some(child) => child,
                    None => {
                        list.push(FrameShape {
                            name: name.to_owned(),
                            parent: frame,
                            parallel_iterations: parallel,
                            n_enters: 0,
                        });
                        list.len() - 1
                    }
                };
                list[child].n_enters += 1;
                child as u32
            }
            Flow::Exit if frame == 0 => {
                return Err(Error::invalid_argument(format!("'{}' leaves a loop that was never entered", node.name)));
            }
            Flow::Exit => list[frame as usize].parent,
            _ => frame,
        };
        stack.extend(consumers[at as usize].iter().map(|&consumer| (consumer, next)));
    }
    Ok(Frames { of_node: of_node.into_iter().map(|frame| frame.unwrap_or(0)).collect(), list })
}
