//! From a graph and a signature to compiled parts: prune, place, partition, compile.

use std::collections::HashMap;
use std::sync::Arc;

use kolo_core::{DeviceSpec, Result};
use kolo_graph::{Endpoint, NodeId, Nodes};

use crate::config::SessionConfig;
use crate::devices::Devices;
use crate::executor::plan::{KernelCache, Part, compile};
use crate::session::{FeedInfo, RunPlan, Wanted};

/// Where nodes were placed.
#[derive(Clone, Debug, Default)]
pub struct PlacementReport {
    /// One row per node, in graph order.
    pub rows: Vec<PlacementRow>,
}

/// Where one node was placed.
#[derive(Clone, Debug)]
pub struct PlacementRow {
    /// The node.
    pub node: String,
    /// Its op.
    pub op: &'static str,
    /// The device it asked for.
    pub wish: DeviceSpec,
    /// The device it got.
    pub device: String,
}

/// Plans runs; remembers where nodes were placed.
pub(crate) struct Planner {
    devices: Arc<Devices>,
    placed: HashMap<NodeId, usize>,
}

impl Planner {
    pub fn new(devices: Arc<Devices>, _config: &SessionConfig) -> Planner {
        Planner { devices, placed: HashMap::new() }
    }

    pub fn plan(&mut self, nodes: &Nodes, wanted: &Wanted, kernels: &KernelCache) -> Result<RunPlan> {
        let feeds = wanted
            .feeds
            .iter()
            .map(|&at| {
                let info = nodes.output(at);
                FeedInfo { name: nodes.endpoint_name(at), dtype: info.dtype, shape: info.shape.clone() }
            })
            .collect();
        // STUB single device
        let mut needed = vec![false; nodes.len()];
        let mut stack: Vec<NodeId> = wanted.targets.to_vec();
        let fed = |at: &Endpoint| wanted.feeds.iter().position(|f| f == at);
        stack.extend(wanted.fetches.iter().filter(|at| fed(at).is_none()).map(|at| at.node));
        while let Some(id) = stack.pop() {
            if std::mem::replace(&mut needed[id.index()], true) {
                continue;
            }
            let node = nodes.node(id);
            stack.extend(node.inputs.iter().filter(|at| fed(at).is_none()).map(|at| at.node));
            stack.extend(node.control_inputs.iter().copied());
        }
        let mut map = HashMap::new();
        let mut local = Nodes::default();
        for (id, _) in nodes.iter().filter(|(id, _)| needed[id.index()]) {
            map.insert(id, NodeId(map.len() as u32));
        }
        let mut fed_inputs = HashMap::new();
        for (id, node) in nodes.iter().filter(|(id, _)| needed[id.index()]) {
            let mut copy = (**node).clone();
            for (i, at) in copy.inputs.iter_mut().enumerate() {
                match fed(at) {
                    Some(feed) => {
                        fed_inputs.insert((map[&id], i), feed);
                        *at = Endpoint { node: NodeId(u32::MAX), index: 0 };
                    }
                    None => at.node = map[&at.node],
                }
            }
            copy.control_inputs.iter_mut().for_each(|c| *c = map[c]);
            local.push(copy);
        }
        let echoes: Vec<(usize, usize)> =
            wanted.fetches.iter().enumerate().filter_map(|(i, at)| fed(at).map(|f| (i, f))).collect();
        let fetches = wanted
            .fetches
            .iter()
            .enumerate()
            .filter(|(_, at)| fed(at).is_none())
            .map(|(i, at)| (i, Endpoint { node: map[&at.node], index: at.index }))
            .collect();
        let part = Part { nodes: &local, fed: fed_inputs, fetches };
        let plan = compile(&part, &self.devices.units[0], kernels)?;
        let is_constant = plan.roots.is_empty() && plan.feeds.is_empty();
        Ok(RunPlan { parts: vec![Arc::new(plan)], feeds, n_fetches: wanted.fetches.len(), echoes, is_constant })
    }

    pub fn report(&self, _nodes: &Nodes) -> PlacementReport {
        let _ = &self.placed;
        PlacementReport::default()
    }
}
