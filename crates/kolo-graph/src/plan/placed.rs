//! A placed graph: where every node goes, what it asked for, and what decided.

use std::fmt;

use kolo_core::DeviceSpec;

use crate::{DeviceInfo, NodeId, Nodes};

/// What decided where a node goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Rule {
    /// An earlier run put it there.
    Earlier,
    /// The program asked for it.
    Pinned,
    /// It must be with another node.
    Colocated,
    /// No wish; the first accelerator with a kernel.
    Accelerator,
    /// No wish and no accelerator with a kernel.
    Cpu,
    /// [`crate::Policy::Heuristic`]: where its input is.
    FollowsInput,
    /// [`crate::Policy::Heuristic`]: where its consumers are.
    FollowsConsumers,
    /// [`crate::Policy::Cost`]: where it ends first.
    Cost,
    /// Its pin has no kernel for it.
    SoftMissingKernel,
    /// Its pin does not exist.
    SoftMissingDevice,
}

impl Rule {
    /// True if a pin could not be kept.
    pub fn is_fallback(self) -> bool {
        matches!(self, Rule::SoftMissingKernel | Rule::SoftMissingDevice)
    }

    /// True if it decides about nodes that ask for nothing.
    pub(crate) fn needs_no_wish(self) -> bool {
        matches!(self, Rule::Accelerator | Rule::Cpu | Rule::FollowsInput | Rule::FollowsConsumers | Rule::Cost)
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Rule::Earlier => "placed in an earlier run",
            Rule::Pinned => "pinned",
            Rule::Colocated => "with the node it must share a device with",
            Rule::Accelerator => "first accelerator with a kernel",
            Rule::Cpu => "no accelerator has a kernel",
            Rule::FollowsInput => "where its input is",
            Rule::FollowsConsumers => "where its consumers are",
            Rule::Cost => "ends first there, by measured times",
            Rule::SoftMissingKernel => "fell back: no kernel on the pinned device",
            Rule::SoftMissingDevice => "fell back: the pinned device does not exist",
        })
    }
}

/// Where a node goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The fact: an index into the devices.
    pub device: usize,
    /// The wish: what the node itself asks for.
    pub wish: DeviceSpec,
    /// What decided.
    pub rule: Rule,
    /// What it or a node that it must be with asked for and did not get.
    pub missed: Option<DeviceSpec>,
}

/// A graph of which every node that a run needs has a device.
pub struct PlacedGraph<'a> {
    /// The whole graph.
    pub nodes: &'a Nodes,
    /// All devices.
    pub devices: Vec<DeviceInfo>,
    /// Where each node goes, by its number; `None` for nodes that the run does not need.
    pub placement: Vec<Option<Placed>>,
    /// How many nodes are not where they are pinned, in this run or since an earlier one.
    pub n_fallbacks: usize,
}

impl PlacedGraph<'_> {
    /// Where a node goes; `None` if the run does not need it.
    pub fn placed(&self, id: NodeId) -> Option<&Placed> {
        self.placement.get(id.index())?.as_ref()
    }

    /// The device a node goes to.
    pub fn device_of(&self, id: NodeId) -> Option<&DeviceInfo> {
        self.placed(id).map(|placed| &self.devices[placed.device])
    }
}

/// How a placement is written to a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// `a: (Add): /job:localhost/replica:0/task:0/device:CPU:0`
    New,
    /// `a: /job:localhost/replica:0/task:0/cpu:0`
    Old,
}

/// The lines that TensorFlow's `log_device_placement` prints.
pub fn log_lines(placed: &PlacedGraph<'_>, format: LogFormat) -> Vec<String> {
    let lines = placed.nodes.iter().filter_map(|(id, node)| {
        let DeviceInfo { name, .. } = placed.device_of(id)?;
        Some(match format {
            LogFormat::New => format!("{}: ({}): {name}", node.name, node.op()),
            LogFormat::Old => format!(
                "{}: /job:{}/replica:{}/task:{}/{}:{}",
                node.name,
                name.job,
                name.replica,
                name.task,
                name.kind.to_ascii_lowercase(),
                name.id
            ),
        })
    });
    lines.collect()
}
