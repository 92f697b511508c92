//! Nodes as plain data: what planning works on and sessions share.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use kolo_core::{DType, DeviceSpec, Error, PartialShape, Result};

use crate::op::registry::did_you_mean;
use crate::op::unknown::UnknownOp;
use crate::wire::proto::FunctionDefLibrary;
use crate::{AttrValue, Attrs, OpDef, Origin, Training};

/// A line of the user's program.
pub type Location = &'static std::panic::Location<'static>;

/// A node's number in its graph.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u32);

impl NodeId {
    /// Stands for a node that could not be made.
    pub(crate) const INVALID: NodeId = NodeId(u32::MAX);

    /// The number, as an index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

/// One output of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Endpoint {
    /// The node.
    pub node: NodeId,
    /// Which of its outputs.
    pub index: u32,
}

impl Endpoint {
    /// Stands for the value of feed number `feed` among the inputs of a partition's nodes: it comes from the caller of the
    /// run, not from a node.
    pub fn from_feed(feed: u32) -> Endpoint {
        Endpoint { node: NodeId::INVALID, index: feed }
    }

    /// Which feed it stands for, if it does.
    pub fn feed(self) -> Option<usize> {
        (self.node == NodeId::INVALID).then_some(self.index as usize)
    }
}

/// What is known of one output before it exists.
#[derive(Clone, Debug, PartialEq)]
pub struct OutputInfo {
    /// The element type.
    pub dtype: DType,
    /// A reference to a variable, not a value.
    pub is_ref: bool,
    /// The shape, as far as it is known.
    pub shape: PartialShape,
    /// For resource handles: what they refer to, where it is known.
    pub handle: Option<Arc<(DType, PartialShape)>>,
}

/// One operation in a graph.
#[derive(Clone)]
pub struct Node {
    /// Unique in the graph.
    pub name: Arc<str>,
    /// What it does.
    pub def: OpDef,
    /// Where its data comes from.
    pub inputs: Vec<Endpoint>,
    /// What must have run before it.
    pub control_inputs: Vec<NodeId>,
    /// Its attributes, defaults filled in.
    pub attrs: Attrs,
    /// The device it asks for; empty if it has no wish.
    pub device: DeviceSpec,
    /// What it will give.
    pub outputs: Vec<OutputInfo>,
    /// For each input, whether it is taken as a reference.
    pub ref_inputs: Vec<bool>,
    /// Where it was made, where that is known.
    pub source: Option<Origin>,
    /// Where its device was asked for.
    pub device_source: Option<Origin>,
    /// What the message said, if the op is not in the table: such a node can be fed and written again, but not run.
    pub unknown: Option<Arc<UnknownOp>>,
}

impl Node {
    /// The op's name.
    pub fn op(&self) -> &str {
        self.unknown.as_ref().map_or(self.def.name, |unknown| &unknown.op)
    }

    /// The names of its colocation groups (`loc:@NAME` entries of `_class`).
    pub fn colocation_groups(&self) -> impl Iterator<Item = &str> {
        let list = match self.attrs.find("_class") {
            Some(AttrValue::List(values)) => values.as_slice(),
            _ => &[],
        };
        list.iter().filter_map(|value| match value {
            AttrValue::Str(text) => std::str::from_utf8(text).ok()?.strip_prefix("loc:@"),
            _ => None,
        })
    }

    /// `Op 'name'`, with the line that made it where known.
    pub fn describe(&self) -> String {
        match &self.source {
            Some(Origin::Graph { file, .. }) => format!("{} '{}' ({file})", self.op(), self.name),
            Some(line) => format!("{} '{}' ({line})", self.op(), self.name),
            None => format!("{} '{}'", self.op(), self.name),
        }
    }

    /// ` (pinned at file:line)`, where it has a pin and that is known.
    pub fn pinned_at(&self) -> String {
        let line = self.device_source.as_ref().filter(|_| !self.device.is_empty());
        line.map_or(String::new(), |line| format!(" (pinned at {line})"))
    }
}

/// The nodes of a graph, as plain data, in the order they were made. Cloning shares the nodes.
#[derive(Clone, Default)]
pub struct Nodes {
    list: Vec<Arc<Node>>,
    by_name: HashMap<Arc<str>, NodeId>,
    library: Arc<FunctionDefLibrary>,
    trainings: Arc<[Arc<Training>]>,
}

impl Nodes {
    /// What optimizers know of the steps they have added; see [`Training`]. The nodes of a GraphDef have none.
    pub fn trainings(&self) -> &Arc<[Arc<Training>]> {
        &self.trainings
    }

    pub(crate) fn set_trainings(&mut self, trainings: Arc<[Arc<Training>]>) {
        self.trainings = trainings;
    }

    /// The functions that imported graphs brought along. Calls of them are written out as plain nodes on import, so
    /// nothing here is needed to run; they are kept for whoever the graph is written for.
    pub fn library(&self) -> &Arc<FunctionDefLibrary> {
        &self.library
    }

    pub(crate) fn set_library(&mut self, library: Arc<FunctionDefLibrary>) {
        self.library = library;
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// The node with this number.
    pub fn node(&self, id: NodeId) -> &Arc<Node> {
        &self.list[id.index()]
    }

    /// All nodes with their numbers.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (NodeId, &Arc<Node>)> {
        self.list.iter().enumerate().map(|(i, node)| (NodeId(i as u32), node))
    }

    /// What is known of an output.
    pub fn output(&self, at: Endpoint) -> &OutputInfo {
        &self.node(at.node).outputs[at.index as usize]
    }

    /// The node of this name.
    pub fn find(&self, name: &str) -> Option<NodeId> {
        self.by_name.get(name).copied()
    }

    /// The node of this name; an error that suggests a similar one otherwise.
    pub fn require(&self, name: &str) -> Result<NodeId> {
        self.find(name).ok_or_else(|| {
            let hint = did_you_mean(name, self.by_name.keys().map(|key| &**key));
            Error::not_found(format!("node '{name}' is not in the graph{hint}"))
        })
    }

    /// Reads `name` or `name:index`.
    pub fn endpoint(&self, text: &str) -> Result<Endpoint> {
        let (name, index) = match text.rsplit_once(':') {
            Some((name, index)) if self.find(text).is_none() => (
                name,
                index
                    .parse()
                    .map_err(|_| Error::invalid_argument(format!("'{text}' is not a tensor name such as 'x:0'")))?,
            ),
            _ => (text, 0),
        };
        let node = self.require(name)?;
        let n_outputs = self.node(node).outputs.len();
        if index as usize >= n_outputs {
            if let Some(unknown) = &self.node(node).unknown {
                return Err(unknown.error(self.node(node)));
            }
            return Err(Error::invalid_argument(format!(
                "'{name}' has {n_outputs} outputs, there is no '{name}:{index}'"
            )));
        }
        Ok(Endpoint { node, index })
    }

    /// `name:index`.
    pub fn endpoint_name(&self, at: Endpoint) -> String {
        format!("{}:{}", self.node(at.node).name, at.index)
    }

    /// Adds a node that is complete: inputs exist, names are unique. For rewrites.
    pub fn push(&mut self, node: Node) -> NodeId {
        let id = NodeId(self.list.len() as u32);
        self.by_name.insert(node.name.clone(), id);
        self.list.push(Arc::new(node));
        id
    }

    /// Makes all users of one output read another. For rewrites.
    pub fn redirect(&mut self, from: Endpoint, to: Endpoint) {
        for id in (0..self.list.len() as u32).map(NodeId) {
            if self.node(id).inputs.contains(&from) {
                let node = self.node_mut(id);
                node.inputs.iter_mut().filter(|at| **at == from).for_each(|at| *at = to);
            }
        }
    }

    /// Pins a node.
    pub fn pin(&mut self, id: NodeId, device: DeviceSpec, said: Origin) {
        let node = self.node_mut(id);
        (node.device, node.device_source) = (device, Some(said));
    }

    /// Puts another node in the place of one.
    pub(crate) fn replace(&mut self, id: NodeId, node: Node) {
        let old = &self.list[id.index()].name;
        if *old != node.name {
            self.by_name.remove(old);
            self.by_name.insert(node.name.clone(), id);
        }
        self.list[id.index()] = Arc::new(node);
    }

    pub(crate) fn truncate(&mut self, n_nodes: usize) {
        for node in self.list.drain(n_nodes.min(self.list.len())..) {
            self.by_name.remove(&node.name);
        }
    }

    pub(crate) fn node_mut(&mut self, id: NodeId) -> &mut Node {
        Arc::make_mut(&mut self.list[id.index()])
    }
}
