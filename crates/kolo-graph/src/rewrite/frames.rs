//! Frames: which loop each node of a step runs in, found from the graph's structure. The one reader of it: gradients,
//! partitioning and the executor all ask here.
//!
//! `Enter` leads into the frame that its `frame_name` says, `Exit` leads out of it, and every other node runs in the
//! frame that its inputs come from. As in TensorFlow, an `Enter` and an `Exit` both count as nodes *of* the loop:
//! an `Enter` takes its input from the frame around it, an `Exit` gives its output there.

use std::collections::HashMap;
use std::sync::Arc;

use kolo_core::{Error, Result};

use crate::plan::prune::{Feeds, describe_cycle, is_back_edge, needed_order};
use crate::{Endpoint, Flow, Node, NodeId, Nodes};

/// A loop's number among the [`Frames`] of a step. Outer loops have smaller numbers than the loops inside them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FrameId(pub u32);

/// One loop.
#[derive(Clone, Debug, PartialEq)]
pub struct Frame {
    /// Its `frame_name`.
    pub name: Arc<str>,
    /// The loop around it; `None` outside of all loops.
    pub parent: Option<FrameId>,
    /// How many of its iterations may run at once, as its first `Enter` says.
    pub parallel_iterations: i64,
    /// The nodes that lead into it.
    pub enters: Vec<NodeId>,
    /// Its predicate; a loop may lack one, but then it cannot span devices.
    pub loop_cond: Option<NodeId>,
}

/// The loops of a step.
#[derive(Clone, Debug, Default)]
pub struct Frames {
    list: Vec<Frame>,
    of: HashMap<NodeId, FrameId>,
}

impl Frames {
    /// All loops, outer ones before inner ones.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (FrameId, &Frame)> {
        self.list.iter().enumerate().map(|(i, frame)| (FrameId(i as u32), frame))
    }

    /// One of them.
    pub fn frame(&self, id: FrameId) -> &Frame {
        &self.list[id.0 as usize]
    }

    /// The loop that a node is of; `None` outside of loops.
    pub fn of(&self, node: NodeId) -> Option<FrameId> {
        self.of.get(&node).copied()
    }

    /// The loop that a node takes its inputs from: the one around it for an `Enter`.
    pub fn input_frame(&self, nodes: &Nodes, id: NodeId) -> Option<FrameId> {
        match nodes.node(id).def.flow {
            Flow::Enter => self.parent_of(id),
            _ => self.of(id),
        }
    }

    /// The loop that a node gives its outputs to: the one around it for an `Exit`.
    pub fn output_frame(&self, nodes: &Nodes, id: NodeId) -> Option<FrameId> {
        match nodes.node(id).def.flow {
            Flow::Exit => self.parent_of(id),
            _ => self.of(id),
        }
    }

    /// The names of the loops around a node, outermost first.
    pub fn path(&self, node: NodeId) -> Vec<Arc<str>> {
        let mut path = Vec::new();
        let mut at = self.of(node);
        while let Some(id) = at {
            path.push(self.frame(id).name.clone());
            at = self.frame(id).parent;
        }
        path.reverse();
        path
    }

    fn parent_of(&self, id: NodeId) -> Option<FrameId> {
        self.of(id).and_then(|frame| self.frame(frame).parent)
    }

    /// `frame 'f'`, or where nodes are that no loop holds.
    fn describe(&self, frame: Option<FrameId>) -> String {
        match frame {
            Some(id) => format!("in frame '{}'", self.frame(id).name),
            None => "outside of all loops".to_owned(),
        }
    }
}

/// The loops among `needed` (sorted), given what is fed: a fed value comes from outside of all loops, and so does an input
/// of a part that is [`Endpoint::from_feed`]. `InvalidArgument` for a loop that is malformed: inputs from different frames,
/// an `Exit` or `NextIteration` outside of a loop, two predicates, an `Enter` without a frame name, a frame that is entered
/// from two others. Takes time linear in nodes and edges, whatever the graph.
pub fn frames(nodes: &Nodes, needed: &[NodeId], feeds: &[Endpoint]) -> Result<Frames> {
    let mut frames = Frames::default();
    if !needed.iter().any(|&id| only_in_loops(nodes.node(id).def.flow)) {
        return Ok(frames);
    }
    let feeds = Feeds::new(nodes, feeds)?;
    let order = needed_order(nodes, needed, &feeds).map_err(|cycle| describe_cycle(nodes, &cycle))?;
    let mut by_name: HashMap<Arc<str>, FrameId> = HashMap::new();
    for &id in &order {
        let node = nodes.node(id);
        let around = frame_of_inputs(nodes, id, &feeds, &frames)?;
        let frame = match node.def.flow {
            Flow::Enter => Some(enter(nodes, id, around, &mut frames, &mut by_name)?),
            Flow::LoopCond => {
                let frame = inside(around, node)?;
                if let Some(first) = frames.list[frame.0 as usize].loop_cond.replace(id) {
                    return Err(malformed(format!(
                        "frame '{}' has two predicates, '{}' and '{}'",
                        frames.frame(frame).name,
                        nodes.node(first).name,
                        node.name
                    )));
                }
                around
            }
            Flow::Exit | Flow::NextIteration => Some(inside(around, node)?),
            Flow::Plain | Flow::Switch | Flow::Merge | Flow::ControlTrigger | Flow::Transfer => around,
        };
        if let Some(frame) = frame {
            frames.of.insert(id, frame);
        }
    }
    for &id in needed {
        for at in nodes.node(id).inputs.iter().filter(|at| !feeds.has(**at) && is_back_edge(nodes, at.node, id)) {
            if frames.of(at.node) != frames.of(id) {
                return Err(malformed(format!(
                    "'{}' is {}, but the '{}' that it goes round to is {}",
                    nodes.node(at.node).name,
                    frames.describe(frames.of(at.node)),
                    nodes.node(id).name,
                    frames.describe(frames.of(id))
                )));
            }
        }
    }
    Ok(frames)
}

fn only_in_loops(flow: Flow) -> bool {
    matches!(flow, Flow::Enter | Flow::Exit | Flow::NextIteration | Flow::LoopCond)
}

/// The frame that all inputs of a node come from. Edges that close loops do not count: they are looked at in the end.
fn frame_of_inputs(nodes: &Nodes, id: NodeId, feeds: &Feeds, frames: &Frames) -> Result<Option<FrameId>> {
    let node = nodes.node(id);
    let is_forward = |at: &Endpoint| feeds.has(*at) || !is_back_edge(nodes, at.node, id);
    let data = node.inputs.iter().filter(|at| is_forward(at)).map(|&at| {
        let frame = if feeds.has(at) { None } else { frames.output_frame(nodes, at.node) };
        (Edge::Data(at), frame)
    });
    let controls = node.control_inputs.iter().filter(|&&control| !feeds.satisfies(nodes, control));
    let controls = controls.map(|&control| (Edge::Control(control), frames.output_frame(nodes, control)));
    let mut edges = data.chain(controls);
    let Some((first, frame)) = edges.next() else { return Ok(None) };
    if let Some((other, seen)) = edges.find(|(_, seen)| *seen != frame) {
        return Err(malformed(format!(
            "{} has inputs from different frames: '{}' is {}, '{}' is {}",
            node.describe(),
            first.name(nodes),
            frames.describe(frame),
            other.name(nodes),
            frames.describe(seen)
        )));
    }
    Ok(frame)
}

/// Where an edge comes from, named only if it is the culprit.
enum Edge {
    Data(Endpoint),
    Control(NodeId),
}

impl Edge {
    fn name(&self, nodes: &Nodes) -> String {
        match self {
            Edge::Data(at) => at.feed().map_or_else(|| nodes.endpoint_name(*at), |feed| format!("feed {feed}")),
            Edge::Control(id) => format!("^{}", nodes.node(*id).name),
        }
    }
}

fn enter(
    nodes: &Nodes,
    id: NodeId,
    parent: Option<FrameId>,
    frames: &mut Frames,
    by_name: &mut HashMap<Arc<str>, FrameId>,
) -> Result<FrameId> {
    let node = nodes.node(id);
    let place = |error: Error| error.with_node(&node.name, node.op(), "");
    let name: Arc<str> = node.attrs.str("frame_name").map_err(place)?.into();
    if name.is_empty() {
        return Err(malformed(format!("The Enter node {} must have a frame name.", node.name)));
    }
    if let Some(&frame) = by_name.get(&name) {
        let known = frames.frame(frame);
        if known.parent != parent {
            return Err(malformed(format!(
                "Mismatched parent frames for \"{name}\": '{}' is {}, '{}' is {}",
                known.enters.first().map_or("", |&first| &nodes.node(first).name),
                frames.describe(known.parent),
                node.name,
                frames.describe(parent)
            )));
        }
        frames.list[frame.0 as usize].enters.push(id);
        return Ok(frame);
    }
    let frame = FrameId(frames.list.len() as u32);
    let parallel_iterations = node.attrs.int("parallel_iterations").map_err(place)?;
    frames.list.push(Frame { name: name.clone(), parent, parallel_iterations, enters: vec![id], loop_cond: None });
    by_name.insert(name, frame);
    Ok(frame)
}

fn inside(frame: Option<FrameId>, node: &Node) -> Result<FrameId> {
    frame.ok_or_else(|| malformed(format!("{} is not inside of a loop", node.describe())))
}

fn malformed(what: String) -> Error {
    Error::invalid_argument(format!("Invalid loop structure: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{graph, while_loop};
    use crate::{Graph, Output};

    fn all(g: &Graph) -> Result<Frames> {
        g.check()?;
        let nodes = g.snapshot();
        let needed: Vec<NodeId> = nodes.iter().map(|(id, _)| id).collect();
        frames(&nodes, &needed, &[])
    }

    fn enter<'g>(g: &'g Graph, name: &str, frame: &str, x: Output<'g>) -> Output<'g> {
        g.op("Enter").name(name).input(x).attr("frame_name", frame).out()
    }

    fn check_fails(g: &Graph, expect: &str) {
        let error = all(g).unwrap_err();
        assert!(error.message().contains(expect), "{error}");
        assert_eq!(error.code(), kolo_core::Code::InvalidArgument);
    }

    #[test]
    fn a_loop_holds_its_nodes_and_nothing_else() {
        let g = while_loop("", "");
        let nodes = g.snapshot();
        let frames = all(&g).unwrap();
        assert_eq!(frames.iter().len(), 1);
        let (id, frame) = frames.iter().next().unwrap();
        assert_eq!((&*frame.name, frame.parent, frame.loop_cond), ("f", None, nodes.find("cond")));
        for (node, expect) in [("zero", None), ("enter", Some(id)), ("add", Some(id)), ("exit", Some(id))] {
            assert_eq!(frames.of(nodes.find(node).unwrap()), expect, "{node}");
        }
        let (enter, exit) = (nodes.find("enter").unwrap(), nodes.find("exit").unwrap());
        assert_eq!((frames.input_frame(&nodes, enter), frames.output_frame(&nodes, enter)), (None, Some(id)));
        assert_eq!((frames.input_frame(&nodes, exit), frames.output_frame(&nodes, exit)), (Some(id), None));
    }

    #[test]
    fn frames_nest() {
        let g = graph();
        let x = g.op("Source").out();
        let outer = enter(&g, "outer", "f", x);
        let inner = enter(&g, "inner", "g", outer);
        let back = g.op("Exit").input(inner).out();
        let frames = all(&g).unwrap();
        let path: Vec<String> = frames.path(inner.operation().id()).iter().map(|name| name.to_string()).collect();
        assert_eq!(path, ["f", "g"]);
        assert_eq!(frames.output_frame(&g.nodes(), back.operation().id()), frames.of(outer.operation().id()));
    }

    #[test]
    fn a_graph_without_loops_has_no_frames() {
        let g = graph();
        g.op("Neg").input(g.op("Source").out()).build();
        assert_eq!(all(&g).unwrap().iter().len(), 0);
    }

    #[test]
    fn malformed_loops_are_explained() {
        let g = graph();
        let x = g.op("Source").name("x").out();
        g.op("Add").name("a").input(enter(&g, "e", "f", x)).input(x).build();
        check_fails(&g, "has inputs from different frames: 'e:0' is in frame 'f', 'x:0' is outside of all loops");

        let g = graph();
        g.op("Exit").name("out").input(g.op("Source").out()).build();
        check_fails(&g, "Exit 'out'");

        let g = graph();
        let x = g.op("Source").out();
        enter(&g, "e", "", x);
        check_fails(&g, "The Enter node e must have a frame name.");

        let g = graph();
        let x = g.op("Source").out();
        let outer = enter(&g, "outer", "f", x);
        enter(&g, "one", "g", outer);
        enter(&g, "two", "g", x);
        check_fails(&g, "Mismatched parent frames for \"g\": 'one' is in frame 'f', 'two' is outside of all loops");

        let g = graph();
        let x = g.op("Flag").out();
        let e = enter(&g, "e", "f", x);
        g.op("LoopCond").name("one").input(e).build();
        g.op("LoopCond").name("two").input(e).build();
        check_fails(&g, "frame 'f' has two predicates, 'one' and 'two'");
    }

    #[test]
    fn a_value_fed_into_a_loop_comes_from_outside() {
        let g = while_loop("", "");
        let nodes = g.snapshot();
        let needed: Vec<NodeId> = nodes.iter().map(|(id, _)| id).collect();
        let fed = nodes.endpoint("add").unwrap();
        let error = frames(&nodes, &needed, &[fed]).unwrap_err();
        assert!(error.message().contains("is not inside of a loop"), "{error}");
    }

    /// A part has no node for what is fed.
    #[test]
    fn a_feed_of_a_part_comes_from_outside() {
        let g = graph();
        let x = g.op("Source").name("x").out();
        let inside = enter(&g, "e", "f", x);
        g.op("Add").name("a").input(inside).input(inside).build();
        let mut nodes = g.snapshot();
        let (e, a) = (nodes.find("e").unwrap(), nodes.find("a").unwrap());
        let needed: Vec<NodeId> = nodes.iter().map(|(id, _)| id).collect();
        nodes.node_mut(e).inputs[0] = Endpoint::from_feed(0);
        let read = frames(&nodes, &needed, &[]).unwrap();
        assert_eq!((read.of(a), read.input_frame(&nodes, e)), (Some(FrameId(0)), None));
        nodes.node_mut(a).inputs[1] = Endpoint::from_feed(7);
        let error = frames(&nodes, &needed, &[]).unwrap_err();
        assert!(error.message().contains("'e:0' is in frame 'f', 'feed 7' is outside of all loops"), "{error}");
    }

    /// Deep nesting costs no stack.
    #[test]
    fn a_deep_nest_of_loops_is_read() {
        let g = graph();
        let mut x = g.op("Source").out();
        for i in 0..10_000 {
            x = enter(&g, &format!("e{i}"), &format!("f{i}"), x);
        }
        for i in 0..10_000 {
            enter(&g, &format!("also{i}"), "f9999", g.output("e9998").unwrap());
        }
        let frames = all(&g).unwrap();
        assert_eq!((frames.iter().len(), frames.frame(FrameId(9_999)).enters.len()), (10_000, 10_001));
        assert_eq!(frames.path(x.operation().id()).len(), 10_000);
    }
}
