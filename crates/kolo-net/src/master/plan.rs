//! One signature of a session, cut by task and registered where its parts run.

use std::collections::HashMap;
use std::sync::Arc;

use kolo_core::{Error, Result};
use kolo_graph::wire::graph::{ExportOptions, export};
use kolo_graph::{
    Endpoint, Granularity, NodeId, Nodes, PartitionOptions, Request, partition, place, prune, with_client_ends,
};
use kolo_ops::comm::transfer::edge_key;
use kolo_ops::registry;

use super::graph::{Devices, PlacedNodes, Support, place_options};
use crate::peers::TaskName;
use crate::proto::ConfigProto;

/// What a client asks for, by name and in its own spelling.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Wanted {
    pub feeds: Vec<String>,
    pub fetches: Vec<String>,
    pub targets: Vec<String>,
    /// Tensors that stand in for others: `(from, to)`.
    pub connections: Vec<(String, String)>,
}

/// A part before it is registered.
pub(super) struct Part {
    pub task: TaskName,
    pub nodes: Nodes,
}

/// A signature, cut.
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
    /// Runs differ in order but not in what they do.
    pub fn sorted(mut self) -> Wanted {
        self.feeds.sort_unstable();
        self.fetches.sort_unstable();
        self.targets.sort_unstable();
        self
    }

    /// The nodes with all users of a connection's second tensor reading the first.
    fn connect(&self, nodes: &Nodes) -> Result<Nodes> {
        let mut joined = nodes.clone();
        for (from, to) in &self.connections {
            let (from_at, to_at) = (nodes.endpoint(from)?, nodes.endpoint(to)?);
            if nodes.output(from_at).dtype != nodes.output(to_at).dtype {
                return Err(Error::invalid_argument(format!(
                    "tensor_connection joins {from} and {to}, which are {} and {}",
                    nodes.output(from_at).dtype,
                    nodes.output(to_at).dtype
                )));
            }
            joined.redirect(to_at, from_at);
        }
        Ok(joined)
    }

    fn request(&self, nodes: &Nodes) -> Result<Request> {
        if self.fetches.is_empty() && self.targets.is_empty() {
            return Err(Error::invalid_argument("Must specify at least one target to fetch or execute."));
        }
        let feeds = self.feeds.iter().map(|name| nodes.endpoint(name)).collect::<Result<Vec<_>>>()?;
        let fetches = self.fetches.iter().map(|name| nodes.endpoint(name)).collect::<Result<Vec<_>>>()?;
        let mut seen = std::collections::HashSet::new();
        if let Some(twice) = feeds.iter().find(|at| !seen.insert(**at)) {
            let name = nodes.endpoint_name(*twice);
            return Err(Error::invalid_argument(format!("Endpoint \"{name}\" fed more than once.")));
        }
        // A target may be spelled as an output; only its node counts.
        let target = |name: &String| nodes.require(name.rsplit_once(':').map_or(name.as_str(), |(node, _)| node));
        Ok(Request { feeds, fetches, targets: self.targets.iter().map(target).collect::<Result<_>>()? })
    }
}

/// Cuts what `wanted` needs of the graph by task. `fresh` gives numbers that no other call of the session was given.
pub(super) fn cut(
    graph: &PlacedNodes,
    wanted: &Wanted,
    devices: &Devices,
    config: &ConfigProto,
    fresh: &mut dyn FnMut() -> u64,
) -> Result<Cut> {
    let request = wanted.request(&graph.nodes)?;
    let nodes = wanted.connect(&graph.nodes)?;
    let ends = with_client_ends(&nodes, &request, registry(), devices.client())?;
    let pruned = prune(&ends.nodes, &ends.request)?;
    let support = Support(devices);
    let options = place_options(config);
    let placed = place(&ends.nodes, &pruned.nodes, &devices.infos, &support, &graph.devices, &options)?;
    let options = PartitionOptions { granularity: Granularity::Task, ..PartitionOptions::default() };
    let partitions = partition(&placed, &pruned, registry(), &options, fresh)?;
    let parts = partitions.into_iter().map(|part| {
        let name = &devices.infos[part.device].name;
        Part { task: TaskName::new(&name.job, name.task), nodes: part.nodes }
    });
    let key = |id: NodeId| Ok(format!("{};0:0", edge_key(&ends.nodes.node(id).attrs)?));
    let is_needed = |id: NodeId| pruned.nodes.binary_search(&id).is_ok();
    let feed_keys = ends.feeds.iter().map(|&id| is_needed(id).then(|| key(id)).transpose());
    Ok(Cut {
        parts: parts.collect(),
        feed_keys: feed_keys.collect::<Result<_>>()?,
        fetch_keys: ends.fetches.iter().map(|&id| key(id)).collect::<Result<_>>()?,
        fetch_needs: request.fetches.iter().map(|&at| needs(&nodes, &request.feeds, at)).collect(),
    })
}

/// The feeds that an output depends on.
fn needs(nodes: &Nodes, feeds: &[Endpoint], at: Endpoint) -> Vec<usize> {
    let by_endpoint: HashMap<Endpoint, usize> = feeds.iter().enumerate().map(|(i, at)| (*at, i)).collect();
    let mut found = Vec::new();
    let mut seen = std::collections::HashSet::new();
    let mut stack = vec![at];
    while let Some(at) = stack.pop() {
        if let Some(&feed) = by_endpoint.get(&at) {
            found.push(feed);
            continue;
        }
        if seen.insert(at.node) {
            let node = nodes.node(at.node);
            stack.extend(node.inputs.iter().copied());
            stack.extend(node.control_inputs.iter().map(|&node| Endpoint { node, index: 0 }));
        }
    }
    found.sort_unstable();
    found.dedup();
    found
}

/// A part as a message. All attributes are written: TensorFlow 1.15 needs them.
pub(super) fn part_def(part: &Part) -> Result<kolo_graph::wire::proto::GraphDef> {
    export(&part.nodes, ExportOptions::default())
}

/// A signature, registered.
pub(super) struct StepPlan {
    pub wanted: Wanted,
    pub parts: Vec<RegisteredPart>,
    pub feed_keys: Vec<Option<String>>,
    pub fetch_keys: Vec<String>,
    pub fetch_needs: Vec<Vec<usize>>,
}

/// A part where it runs.
pub(super) struct RegisteredPart {
    /// As the task was given it, for clients that want to see it.
    pub graph_def: kolo_graph::wire::proto::GraphDef,
    pub task: TaskName,
    pub worker: Arc<dyn crate::services::WorkerService>,
    pub graph_handle: String,
    /// Feeds and fetches pass through it.
    pub is_own: bool,
}
