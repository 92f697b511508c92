//! A session's graph on the master: the nodes that clients have added so far, and their placement.

use std::collections::HashMap;

use kolo_core::{Code, DeviceName, Error, Result};
use kolo_graph::wire::graph::{ImportOptions, import};
use kolo_graph::wire::proto::GraphDef;
use kolo_graph::{
    DeviceInfo, Graph, KernelSupport, Node, NodeId, Nodes, PlaceOptions, Placement, Policy, holds_state, place,
};
use kolo_ops::{find_kernel, find_op, kernels_of, registry};

use crate::task::peers::TaskName;
use crate::wire::proto::ConfigProto;

/// The devices of a session, the client's first.
pub(super) struct Devices {
    pub own: TaskName,
    pub infos: Vec<DeviceInfo>,
}

impl Devices {
    /// Feeds enter and fetches leave here.
    pub fn client(&self) -> &DeviceInfo {
        &self.infos[0]
    }
}

/// The op table of this task, which is assumed for all tasks. An op that is missing from it may still run on a task
/// that it was pinned to.
pub(super) struct Support<'a>(pub &'a Devices);

impl KernelSupport for Support<'_> {
    fn has_kernel(&self, node: &Node, device: &DeviceName) -> bool {
        let is_elsewhere = *device.job != *self.0.own.job || device.task != self.0.own.task;
        let is_unknown = || find_op(node.op()).is_ok_and(|op| op.kernels.is_empty());
        find_kernel(node, device).is_ok() || is_elsewhere && node.device.task.is_some() && is_unknown()
    }

    fn kernels(&self, node: &Node) -> Vec<String> {
        find_op(node.op()).map(|op| kernels_of(op).map(|kernel| kernel.describe(op)).collect()).unwrap_or_default()
    }
}

/// The nodes so far and their devices.
#[derive(Clone, Default)]
pub(super) struct PlacedNodes {
    pub nodes: Nodes,
    pub version: i64,
    /// The devices of nodes, by node number. A node that could not be placed is missing; a run that needs it reports
    /// why.
    pub devices: HashMap<NodeId, usize>,
}

impl PlacedNodes {
    /// A copy of the graph with a client's additions.
    pub fn extended(&self, def: &GraphDef, devices: &Devices, config: &ConfigProto) -> Result<PlacedNodes> {
        let graph = Graph::of_nodes(registry(), self.nodes.clone());
        import(&graph, def, ImportOptions::default())?;
        graph.check()?;
        let nodes = graph.snapshot();
        // What cannot run has no device, and keeps nothing else from having one.
        let all: Vec<NodeId> = nodes.iter().filter(|(_, node)| node.unknown.is_none()).map(|(id, _)| id).collect();
        // Nodes with state stay where they are; all others may be placed anew.
        let stays = |(id, device): (&NodeId, &usize)| holds_state(nodes.node(*id)).then_some((*id, *device));
        let earlier: HashMap<NodeId, usize> = self.devices.iter().filter_map(stays).collect();
        let options = place_options(config);
        let placed = match place(&nodes, &all, &devices.infos, &Support(devices), &earlier, &options) {
            Ok(placed) => {
                let device = |&id: &NodeId| placed.placed(id).map(|placed| (id, placed.device));
                all.iter().filter_map(device).collect()
            }
            // An op that no task can run must not fail runs that do not need it.
            Err(error) if error.code() == Code::Unimplemented => earlier,
            Err(error) => return Err(error),
        };
        if config.log_device_placement {
            for &id in all.iter().filter(|id| id.index() >= self.nodes.len()) {
                let Some(&device) = placed.get(&id) else { continue };
                let (node, name) = (nodes.node(id), &devices.infos[device].name);
                tracing::info!(target: "kolo::placement", "{}: ({}): {name}", node.name, node.op());
            }
        }
        Ok(PlacedNodes { nodes, version: self.version + 1, devices: placed })
    }
}

/// The client's placement options. TensorFlow's masters use its heuristics.
pub(super) fn place_options(config: &ConfigProto) -> PlaceOptions {
    let placement = if config.allow_soft_placement { Placement::Soft } else { Placement::Strict };
    PlaceOptions { placement, policy: Policy::Heuristic, client_device: 0, ..PlaceOptions::default() }
}

/// Refuses options that a cluster cannot support.
pub(super) fn check_config(config: &ConfigProto) -> Result<()> {
    if config.use_per_session_threads || !config.session_inter_op_thread_pool.is_empty() {
        return Err(Error::invalid_argument(
            "Distributed session does not support session thread pool options (use_per_session_threads, \
             session_inter_op_thread_pool): servers choose their threads",
        ));
    }
    Ok(())
}
