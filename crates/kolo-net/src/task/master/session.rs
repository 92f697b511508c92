//! One client's session: its graph, the signatures it has run, and the tasks that take part.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kolo_core::{Error, Result};
use kolo_graph::wire::proto::GraphDef;
use kolo_graph::{Node, holds_state};
use parking_lot::{Mutex, RwLock};
use tokio::sync::{OnceCell, watch};
use tokio::task::JoinSet;

use super::graph::{Devices, PlacedNodes};
use super::partial::PartialStep;
use super::plan::{RegisteredPart, StepPlan, Wanted, cut, part_def};
use crate::task::peers::{Peers, TaskName};
use crate::transport::connection::{self, ConnectionId};
use crate::wire::proto;
use crate::wire::proto::ConfigProto;

/// The timeout for the tasks of a session to delete it.
const DELETE_DEADLINE: Duration = Duration::from_secs(10);

pub(super) struct Session {
    pub handle: String,
    pub config: ConfigProto,
    pub devices: Devices,
    /// The devices of all tasks, the own task's first.
    pub attributes: Vec<proto::DeviceAttributes>,
    pub tasks: Vec<TaskName>,
    pub peers: Arc<Peers>,
    graph: RwLock<Arc<PlacedNodes>>,
    /// Allows one extension at a time.
    extending: tokio::sync::Mutex<()>,
    plans: Mutex<HashMap<Wanted, Arc<OnceCell<Arc<StepPlan>>>>>,
    pub partial: Mutex<HashMap<String, Arc<PartialStep>>>,
    pub callables: Mutex<HashMap<i64, Arc<super::callable::Callable>>>,
    fresh: AtomicU64,
    pub next_handle: AtomicU64,
    /// True once the session is closed: its runs are cancelled then.
    closed: watch::Sender<bool>,
    usage: Mutex<SessionUsage>,
}

/// Who uses a session, and since when nobody does.
struct SessionUsage {
    last: Instant,
    /// The connections that have used it. A client may have several, and opens another when it has lost one.
    connections: Vec<Weak<ConnectionId>>,
    /// Whether a client in this process has used it; that closes it when it is done.
    is_local: bool,
}

impl Session {
    pub fn new(
        handle: String,
        config: ConfigProto,
        devices: Devices,
        attributes: Vec<proto::DeviceAttributes>,
        tasks: Vec<TaskName>,
        peers: Arc<Peers>,
    ) -> Session {
        Session {
            handle,
            config,
            devices,
            attributes,
            tasks,
            peers,
            // The first graph gets version 0, as in TensorFlow.
            graph: RwLock::new(Arc::new(PlacedNodes { version: -1, ..PlacedNodes::default() })),
            extending: tokio::sync::Mutex::default(),
            plans: Mutex::default(),
            partial: Mutex::default(),
            callables: Mutex::default(),
            fresh: AtomicU64::new(0),
            next_handle: AtomicU64::new(0),
            closed: watch::Sender::new(false),
            usage: Mutex::new(SessionUsage { last: Instant::now(), connections: Vec::new(), is_local: false }),
        }
    }

    /// Adds nodes to the graph. `expected` is the version that the client believes the graph has.
    pub async fn extend(self: &Arc<Self>, def: GraphDef, expected: Option<i64>) -> Result<i64> {
        let _one_at_a_time = self.extending.lock().await;
        self.check_open()?;
        let before = self.graph.read().clone();
        if let Some(expected) = expected
            && expected != before.version
        {
            return Err(Error::aborted(format!(
                "Current version is {} but caller expected {expected}.",
                before.version
            )));
        }
        let this = self.clone();
        let extended = self.blocking(move || before.extended(&def, &this.devices, &this.config)).await?;
        let version = extended.version;
        *self.graph.write() = Arc::new(extended);
        Ok(version)
    }

    /// The plan of a signature, registered with all tasks it needs. Concurrent runs of the same signature share one
    /// compilation.
    pub async fn plan(self: &Arc<Self>, wanted: Wanted) -> Result<Arc<StepPlan>> {
        let cell = {
            let mut plans = self.plans.lock();
            match plans.get(&wanted) {
                Some(cell) => cell.clone(),
                None => plans.entry(wanted.clone()).or_default().clone(),
            }
        };
        cell.get_or_try_init(|| self.register(wanted)).await.cloned()
    }

    async fn register(self: &Arc<Self>, wanted: Wanted) -> Result<Arc<StepPlan>> {
        let (this, graph) = (self.clone(), self.graph.read().clone());
        let cut = self
            .blocking(move || {
                let mut fresh = || this.fresh.fetch_add(1, Ordering::Relaxed);
                let cut = cut(&graph, &wanted, &this.devices, &this.config, &mut fresh)?;
                let defs = cut.parts.iter().map(|part| part_def(&part.nodes)).collect::<Result<Vec<_>>>()?;
                Ok((wanted, cut, defs))
            })
            .await?;
        let (wanted, cut, defs) = cut;
        let mut registering = JoinSet::new();
        for (i, (part, def)) in cut.parts.into_iter().zip(defs).enumerate() {
            let worker = self.peers.task(&part.task)?;
            let is_own = part.task == self.peers.own;
            let request = proto::RegisterGraphRequest {
                session_handle: self.handle.clone(),
                graph_def: Some(def),
                graph_options: Some(self.config.graph_options.clone().unwrap_or_default()),
                create_worker_session_called: true,
                config_proto: Some(self.config.clone()),
                ..proto::RegisterGraphRequest::default()
            };
            registering.spawn(async move {
                let response =
                    worker.register_graph(request).await.map_err(|error| from_task(error, &part.task, is_own))?;
                let graph_handle = response.graph_handle;
                Ok::<_, Error>((i, RegisteredPart { nodes: part.nodes, task: part.task, worker, graph_handle, is_own }))
            });
        }
        let mut parts = Vec::new();
        while let Some(part) = registering.join_next().await {
            parts.push(part.map_err(|error| Error::internal(format!("RegisterGraph failed: {error}")))??);
        }
        parts.sort_by_key(|(i, _)| *i);
        let parts = parts.into_iter().map(|(_, part)| part).collect();
        let (feed_keys, fetch_keys, fetch_needs) = (cut.feed_keys, cut.fetch_keys, cut.fetch_needs);
        Ok(Arc::new(StepPlan { wanted, parts, feed_keys, fetch_keys, fetch_needs }))
    }

    /// Runs a long computation on a thread where it does not block other calls.
    async fn blocking<T: Send + 'static>(&self, work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
        let done = self.peers.runtime.spawn_blocking(work).await;
        done.map_err(|error| Error::internal(format!("the master failed: {error}")))?
    }

    /// Notes that the current call uses the session.
    pub fn touch(&self) {
        let mut usage = self.usage.lock();
        usage.last = Instant::now();
        let Some(connection) = connection::current() else {
            usage.is_local = true;
            return;
        };
        let is_known = usage.connections.iter().any(|known| known.as_ptr() == Arc::as_ptr(&connection));
        if !is_known {
            usage.connections.retain(|known| known.strong_count() > 0);
            usage.connections.push(Arc::downgrade(&connection));
        }
    }

    /// Whether its client has vanished: no connection that has used it is open, and none has for this long.
    pub fn is_abandoned(&self, lease: Duration) -> bool {
        let usage = self.usage.lock();
        let is_connected = usage.connections.iter().any(|known| known.strong_count() > 0);
        !usage.is_local && !is_connected && usage.last.elapsed() >= lease
    }

    /// Whether the graph keeps state in one of the containers. A session with state of its own shares none.
    pub fn uses_container(&self, is_it: impl Fn(&str) -> bool) -> bool {
        let graph = self.graph.read().clone();
        let uses = |node: &Node| holds_state(node) && is_it(node.attrs.str("container").unwrap_or_default());
        !self.config.isolate_session_state && graph.nodes.iter().any(|(_, node)| uses(node))
    }

    pub fn check_open(&self) -> Result<()> {
        match *self.closed.borrow() {
            false => Ok(()),
            true => Err(Error::failed_precondition("Session is closed.")),
        }
    }

    /// Returns when the session is closed.
    pub async fn closed(&self) -> Error {
        let mut closed = self.closed.subscribe();
        let _ = closed.wait_for(|closed| *closed).await;
        Error::cancelled("Step was cancelled by an explicit call to `Session::Close()`.")
    }

    /// Closes the session: its runs are cancelled, and all tasks delete it.
    pub async fn close(self: Arc<Self>) {
        self.closed.send_replace(true);
        self.partial.lock().clear();
        let mut deleting = JoinSet::new();
        for task in self.tasks.clone() {
            let Ok(worker) = self.peers.task(&task) else { continue };
            let request = proto::DeleteWorkerSessionRequest { session_handle: self.handle.clone() };
            deleting.spawn(async move {
                let answer = tokio::time::timeout(DELETE_DEADLINE, worker.delete_worker_session(request)).await;
                match answer {
                    Ok(Ok(_)) => {}
                    Ok(Err(error)) => tracing::debug!("{task} could not end its part of a session: {error}"),
                    Err(_) => tracing::warn!("{task} did not end its part of a session in {DELETE_DEADLINE:?}"),
                }
            });
        }
        while deleting.join_next().await.is_some() {}
    }
}

/// Adds the name of the task to an error from another task.
pub(super) fn from_task(error: Error, task: &TaskName, is_own: bool) -> Error {
    match is_own {
        true => error,
        false => error.prefixed(format_args!("From {task}:\n")),
    }
}
