//! Drafts: the nodes of a step on their way into partitions, and the nodes that partitioning adds.

use std::sync::Arc;

use kolo_core::{DType, Error, PartialShape, Result, Tensor};

use crate::plan::prune::Feeds;
use crate::rewrite::frames::FrameId;
use crate::{
    AttrValue, Attrs, DeviceInfo, Endpoint, Granularity, Node, NodeId, Nodes, OpRegistry, OutputInfo, PlacedGraph,
    Pruned,
};

/// A node on its way: its edges lead to other drafts, wherever those are.
pub(crate) struct Draft {
    pub node: Arc<Node>,
    pub inputs: Vec<Source>,
    /// Drafts that must run before it.
    pub control: Vec<usize>,
    pub device: usize,
    pub origin: Option<NodeId>,
    /// The loop its inputs come from, and the one its outputs go to.
    pub input_frame: Option<FrameId>,
    pub output_frame: Option<FrameId>,
}

#[derive(Clone, Copy)]
pub(crate) enum Source {
    Draft { draft: usize, index: u32 },
    Feed(usize),
}

impl Draft {
    pub(crate) fn input_drafts(&self) -> impl Iterator<Item = usize> + '_ {
        let data = self.inputs.iter().filter_map(|input| match input {
            Source::Draft { draft, .. } => Some(*draft),
            Source::Feed(_) => None,
        });
        data.chain(self.control.iter().copied())
    }
}

/// The nodes that a run needs, in their order.
pub(crate) fn drafts(placed: &PlacedGraph<'_>, pruned: &Pruned, feeds: &Feeds) -> Result<Vec<Draft>> {
    let draft_of = |id: NodeId| {
        let missing = || Error::internal(format!("node {id:?} is used but was pruned"));
        pruned.nodes.binary_search(&id).map_err(|_| missing())
    };
    let draft = |&id: &NodeId| {
        let node = placed.nodes.node(id);
        let source = |at: &Endpoint| match feeds.index(*at) {
            Some(feed) => Ok(Source::Feed(feed)),
            None => Ok(Source::Draft { draft: draft_of(at.node)?, index: at.index }),
        };
        let control = node.control_inputs.iter().filter(|&&control| !feeds.satisfies(placed.nodes, control));
        let device = placed.placed(id).ok_or_else(|| Error::internal(format!("'{}' has no device", node.name)))?.device;
        Ok(Draft {
            node: node.clone(),
            inputs: node.inputs.iter().map(source).collect::<Result<_>>()?,
            control: control.map(|&control| draft_of(control)).collect::<Result<_>>()?,
            device,
            origin: Some(id),
            input_frame: None,
            output_frame: None,
        })
    };
    pruned.nodes.iter().map(draft).collect()
}

/// Makes the nodes that partitioning adds.
pub(crate) struct NodeBuilder<'a> {
    pub nodes: &'a Nodes,
    pub devices: &'a [DeviceInfo],
    pub registry: &'a OpRegistry,
    pub fresh: &'a mut dyn FnMut() -> u64,
    pub granularity: Granularity,
}

impl NodeBuilder<'_> {
    /// `base` with a suffix that makes it a name no other node has.
    pub(crate) fn name(&mut self, base: &str) -> String {
        let suffix = match self.granularity {
            Granularity::Device => "_G",
            Granularity::Task => "_S",
        };
        self.unique(|n| format!("{base}{suffix}{n}"))
    }

    pub(crate) fn unique(&mut self, name: impl Fn(u64) -> String) -> String {
        loop {
            let name = name((self.fresh)());
            if self.nodes.find(&name).is_none() {
                return name;
            }
        }
    }

    pub(crate) fn node(
        &self,
        op: &str,
        name: String,
        device: usize,
        attrs: Vec<(&str, AttrValue)>,
        outputs: Vec<OutputInfo>,
        n_inputs: usize,
    ) -> Result<Node> {
        let mut all = Attrs::default();
        attrs.into_iter().for_each(|(name, value)| all.set(name, value));
        Ok(Node {
            name: name.into(),
            def: *self.registry.find(op)?.0,
            inputs: Vec::new(),
            control_inputs: Vec::new(),
            attrs: all,
            device: self.devices[device].name.spec(),
            outputs,
            ref_inputs: vec![false; n_inputs],
            source: None,
            device_source: None,
            unknown: None,
        })
    }

    /// An empty tensor, for when only the moment matters.
    pub(crate) fn empty(&self, name: String, device: usize) -> Result<Node> {
        let value = Tensor::zeros(DType::F32, [0usize])?;
        self.node("Const", name, device, vec![("dtype", DType::F32.into()), ("value", value.into())], vec![signal()], 0)
    }
}

/// What is known of an empty tensor.
pub(crate) fn signal() -> OutputInfo {
    OutputInfo { dtype: DType::F32, is_ref: false, shape: PartialShape::new(&[Some(0)]), handle: None }
}
