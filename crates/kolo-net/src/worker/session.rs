//! The graphs of one session of a master on this task.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kolo_core::{Error, Result};
use kolo_graph::Graph;
use kolo_graph::wire::graph::{ImportOptions, import};
use kolo_ops::registry;
use kolo_runtime::{FrameIds, Host, TaskGraph, TaskSession};
use parking_lot::Mutex;

use crate::proto::RegisterGraphRequest;

/// The version of graphs that TensorFlow 1.15 writes, the last with its way of numbering loops.
const LAST_WITH_PATHS: i32 = 134;

pub(super) struct Session {
    task: TaskSession,
    graphs: Mutex<HashMap<String, Arc<TaskGraph>>>,
    n_graphs: AtomicU64,
}

impl Session {
    pub fn new(host: &Host, is_isolated: bool) -> Session {
        let task = if is_isolated { TaskSession::isolated(host) } else { TaskSession::new(host) };
        Session { task, graphs: Mutex::default(), n_graphs: AtomicU64::new(0) }
    }

    /// Compiles a part of a graph and gives it a handle.
    pub fn register(&self, request: RegisterGraphRequest) -> Result<String> {
        let def = request.graph_def.unwrap_or_default();
        let producer = def.versions.as_ref().map_or(0, |versions| versions.producer);
        // Only masters of TensorFlow 2, and ours, send the session's options.
        let is_new = request.config_proto.is_some() || producer > LAST_WITH_PATHS;
        let frame_ids = if is_new { FrameIds::Mixed } else { FrameIds::Path };
        let graph = Graph::new(registry());
        import(&graph, &def, ImportOptions::default())?;
        let compiled = self.task.compile(&graph.snapshot(), frame_ids)?;
        let handle = format!("{:016x}", self.n_graphs.fetch_add(1, Ordering::Relaxed) + 1);
        self.graphs.lock().insert(handle.clone(), Arc::new(compiled));
        Ok(handle)
    }

    pub fn graph(&self, handle: &str) -> Result<Arc<TaskGraph>> {
        self.graphs.lock().get(handle).cloned().ok_or_else(|| not_found(handle))
    }

    pub fn deregister(&self, handle: &str) -> Result<()> {
        self.graphs.lock().remove(handle).map(drop).ok_or_else(|| not_found(handle))
    }
}

fn not_found(handle: &str) -> Error {
    Error::aborted(format!("Graph handle is not found: {handle}. Possibly, this worker just restarted."))
}
