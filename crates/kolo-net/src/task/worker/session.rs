//! The graphs of one session of a master on this task.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kolo_core::{Error, Result};
use kolo_graph::wire::graph::{ImportOptions, import};
use kolo_graph::{Graph, Nodes};
use kolo_ops::comm::transfer::edge_key;
use kolo_ops::{FrameIteration, RendezvousKey, registry};
use kolo_runtime::{FrameIds, Host, TaskGraph, TaskSession};
use parking_lot::Mutex;
use prost::Message as _;

use crate::durability::variables::{Key, written};
use crate::task::peers::TaskName;
use crate::task::random::random_u64;
use crate::task::services::Group;
use crate::transport::framed::Keys;
use crate::wire::proto::RegisterGraphRequest;

/// The version of graphs that TensorFlow 1.15 writes, the last with its way of numbering loops.
const LAST_WITH_PATHS: i32 = 134;

/// A part of a graph, ready to run.
pub(super) struct Registered {
    pub graph: TaskGraph,
    /// The variables that it may write.
    pub written: Arc<BTreeSet<Key>>,
    /// What it receives from other tasks unconditionally.
    pub groups: Vec<Group>,
}

pub(super) struct Session {
    task: TaskSession,
    graphs: Mutex<HashMap<String, Arc<Registered>>>,
    /// Starts at a random number, so that a master that has not noticed a restart does not run a different graph.
    next_handle: AtomicU64,
}

impl Session {
    pub fn new(host: &Host, is_isolated: bool) -> Session {
        let task = if is_isolated { TaskSession::isolated(host) } else { TaskSession::new(host) };
        Session { task, graphs: Mutex::default(), next_handle: AtomicU64::new(random_u64()) }
    }

    /// Compiles a part of a graph and gives it a handle.
    pub fn register(&self, request: RegisterGraphRequest, own_prefix: &str) -> Result<String> {
        let def = request.graph_def.unwrap_or_default();
        let producer = def.versions.as_ref().map_or(0, |versions| versions.producer);
        // Only masters of TensorFlow 2, and Kolo's, send the session's options.
        let is_new = request.config_proto.is_some() || producer > LAST_WITH_PATHS;
        let frame_ids = if is_new { FrameIds::Mixed } else { FrameIds::Path };
        let graph = Graph::new(registry());
        import(&graph, &def, ImportOptions::default())?;
        let nodes = graph.snapshot();
        let registered = Registered {
            written: Arc::new(written(&nodes)),
            groups: groups(&nodes, own_prefix)?,
            graph: self.task.compile(&nodes, frame_ids)?,
        };
        let handle = format!("{:016x}", self.next_handle.fetch_add(1, Ordering::Relaxed));
        self.graphs.lock().insert(handle.clone(), Arc::new(registered));
        Ok(handle)
    }

    pub fn graph(&self, handle: &str) -> Result<Arc<Registered>> {
        self.graphs.lock().get(handle).cloned().ok_or_else(|| not_found(handle))
    }

    pub fn deregister(&self, handle: &str) -> Result<()> {
        self.graphs.lock().remove(handle).map(drop).ok_or_else(|| not_found(handle))
    }
}

/// The tensors of other tasks that a graph can prefetch, by task. A receive that waits for a control edge is not among
/// them: its value may depend on when it is fetched.
fn groups(nodes: &Nodes, own_prefix: &str) -> Result<Vec<Group>> {
    let mut by_task: BTreeMap<TaskName, Vec<RendezvousKey>> = BTreeMap::new();
    for (_, node) in nodes.iter() {
        let is_root = node.inputs.is_empty() && node.control_inputs.is_empty();
        if !is_root || !node.receives() {
            continue;
        }
        let key = RendezvousKey { edge: edge_key(&node.attrs)?, frame_iteration: FrameIteration::default() };
        if !key.edge.starts_with(own_prefix) {
            by_task.entry(TaskName::of_device(key.part(0))?).or_default().push(key);
        }
    }
    let group = |(task, keys): (TaskName, Vec<RendezvousKey>)| {
        let wire = Keys { key: keys.iter().map(RendezvousKey::to_string).collect() }.encode_to_vec().into();
        Group { task, keys: keys.into(), wire }
    };
    Ok(by_task.into_iter().map(group).collect())
}

fn not_found(handle: &str) -> Error {
    Error::aborted(format!("Graph handle is not found: {handle}. Possibly, this worker just restarted."))
}
