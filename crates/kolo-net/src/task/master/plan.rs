//! One signature of a session, partitioned by task and registered with the tasks that run its parts.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use kolo_core::{Error, Result};
use kolo_graph::wire::graph::{ExportOptions, export};
use kolo_graph::wire::proto::GraphDef;
use kolo_graph::{
    Endpoint, Ends, Granularity, ImplicitCopies, LoopControl, NodeId, Nodes, PlanRequest, Request, pipeline, plan,
};
use kolo_ops::comm::transfer::edge_key;
use kolo_ops::registry;

use super::graph::{Devices, PlacedNodes, Support, place_options};
use crate::task::peers::TaskName;
use crate::wire::proto::ConfigProto;

/// The feeds, fetches and targets of a run, by name as the client spells them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Wanted {
    pub feeds: Vec<String>,
    pub fetches: Vec<String>,
    pub targets: Vec<String>,
    /// Tensors that replace others: `(from, to)`.
    pub connections: Vec<(String, String)>,
}

/// A part before it is registered.
pub(super) struct Part {
    pub task: TaskName,
    pub nodes: Nodes,
}

/// A partitioned signature.
pub(super) struct Cut {
    pub parts: Vec<Part>,
    /// For each feed the key of its transfer; `None` if nothing needs it.
    pub feed_keys: Vec<Option<String>>,
    /// For each fetch the key of its transfer.
    pub fetch_keys: Vec<String>,
    /// For each fetch the feeds it depends on.
    pub fetch_needs: Vec<Vec<usize>>,
}

impl Wanted {
    /// Sorts the names: runs that differ only in order share a plan.
    pub fn sorted(mut self) -> Wanted {
        self.feeds.sort_unstable();
        self.fetches.sort_unstable();
        self.targets.sort_unstable();
        self
    }

    /// The tensors that replace others, resolved.
    fn connections(&self, nodes: &Nodes) -> Result<Vec<(Endpoint, Endpoint)>> {
        let mut joined = Vec::with_capacity(self.connections.len());
        for (from, to) in &self.connections {
            let (from_at, to_at) = (nodes.endpoint(from)?, nodes.endpoint(to)?);
            if nodes.output(from_at).dtype != nodes.output(to_at).dtype {
                return Err(Error::invalid_argument(format!(
                    "tensor_connection joins {from} and {to}, which are {} and {}",
                    nodes.output(from_at).dtype,
                    nodes.output(to_at).dtype
                )));
            }
            joined.push((from_at, to_at));
        }
        Ok(joined)
    }

    fn request(&self, nodes: &Nodes) -> Result<Request> {
        if self.fetches.is_empty() && self.targets.is_empty() {
            return Err(Error::invalid_argument("Must specify at least one target to fetch or execute."));
        }
        let feeds = self.feeds.iter().map(|name| nodes.endpoint(name)).collect::<Result<Vec<_>>>()?;
        let fetches = self.fetches.iter().map(|name| nodes.endpoint(name)).collect::<Result<Vec<_>>>()?;
        let mut seen = HashSet::new();
        if let Some(twice) = feeds.iter().find(|at| !seen.insert(**at)) {
            let name = nodes.endpoint_name(*twice);
            return Err(Error::invalid_argument(format!("Endpoint \"{name}\" fed more than once.")));
        }
        // A target may be spelled as an output; only its node matters.
        let target = |name: &String| nodes.require(name.rsplit_once(':').map_or(name.as_str(), |(node, _)| node));
        Ok(Request { feeds, fetches, targets: self.targets.iter().map(target).collect::<Result<_>>()? })
    }
}

/// Partitions the subgraph that `wanted` needs by task. `fresh` returns numbers that are unique in the session.
pub(super) fn cut(
    graph: &PlacedNodes,
    wanted: &Wanted,
    devices: &Devices,
    config: &ConfigProto,
    fresh: &mut dyn FnMut() -> u64,
) -> Result<Cut> {
    let plan = plan(
        &PlanRequest {
            nodes: &graph.nodes,
            request: &wanted.request(&graph.nodes)?,
            connections: &wanted.connections(&graph.nodes)?,
            registry: registry(),
            devices: &devices.infos,
            support: &Support(devices),
            earlier: &graph.devices,
            place: &place_options(config),
            copies: ImplicitCopies::Allowed,
            granularity: Granularity::Task,
            loops: LoopControl::Add,
            ends: Ends::Client(devices.client()),
            passes: &pipeline(&[]),
            show_after: None,
        },
        fresh,
    )?;
    let parts = plan.parts.into_iter().map(|part| {
        let name = &devices.infos[part.device].name;
        Part { task: TaskName::new(&name.job, name.task), nodes: part.nodes }
    });
    let key = |id: NodeId| Ok(format!("{};0:0", edge_key(&plan.nodes.node(id).attrs)?));
    Ok(Cut {
        parts: parts.collect(),
        feed_keys: plan.ends.feeds.iter().map(|id| id.map(key).transpose()).collect::<Result<_>>()?,
        fetch_keys: plan.ends.fetches.iter().map(|&id| key(id)).collect::<Result<_>>()?,
        fetch_needs: plan.ends.fetches.iter().map(|&id| needs(&plan.nodes, &plan.ends.feeds, id)).collect(),
    })
}

/// The feeds, by number, that a node depends on.
fn needs(nodes: &Nodes, feeds: &[Option<NodeId>], id: NodeId) -> Vec<usize> {
    let by_node: HashMap<NodeId, usize> =
        feeds.iter().enumerate().filter_map(|(i, node)| Some(((*node)?, i))).collect();
    let (mut found, mut seen, mut open) = (Vec::new(), HashSet::new(), vec![id]);
    while let Some(id) = open.pop() {
        if !seen.insert(id) {
            continue;
        }
        if let Some(&feed) = by_node.get(&id) {
            found.push(feed);
        }
        let node = nodes.node(id);
        open.extend(node.inputs.iter().map(|at| at.node).chain(node.control_inputs.iter().copied()));
    }
    found.sort_unstable();
    found
}

/// A part as a message. All attributes are written: TensorFlow 1.15 needs them.
pub(super) fn part_def(nodes: &Nodes) -> Result<GraphDef> {
    export(nodes, ExportOptions::default())
}

/// A registered signature.
pub(super) struct StepPlan {
    pub wanted: Wanted,
    pub parts: Vec<RegisteredPart>,
    pub feed_keys: Vec<Option<String>>,
    pub fetch_keys: Vec<String>,
    pub fetch_needs: Vec<Vec<usize>>,
}

/// A part that is registered with its task.
pub(super) struct RegisteredPart {
    /// For clients that request the partition graphs. Its constants are shared with the session's graph, not copied.
    pub nodes: Nodes,
    pub task: TaskName,
    pub worker: Arc<dyn crate::task::services::WorkerService>,
    pub graph_handle: String,
    /// Feeds and fetches pass through it.
    pub is_own: bool,
}
