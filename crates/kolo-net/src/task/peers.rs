//! Connections to the other tasks of a cluster.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use kolo_core::{DeviceSpec, Error, Result, Tensor};
use kolo_ops::{Received, RendezvousKey};
use parking_lot::Mutex;
use tokio::runtime::Handle;

use crate::cluster::ClusterSpec;
use crate::task::overdue::Mastered;
use crate::task::random::random_id;
use crate::task::services::{Each, Group, Guard, WorkerService};
use crate::task::worker::transfers::{Fetch, Waiter};
use crate::task::worker::{LocalWorker, Worker};
use crate::transport::batch::Batch;
use crate::wire::proto::{ClusterDef, RecvTensorRequest, RecvTensorResponse};

/// A task of a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TaskName {
    /// `ps`, `worker`, …
    pub job: Arc<str>,
    /// Its index in the job.
    pub task: u32,
}

impl TaskName {
    /// A task's name.
    pub fn new(job: &str, task: u32) -> TaskName {
        TaskName { job: job.into(), task }
    }

    /// The task that a device belongs to.
    pub fn of_device(device: &str) -> Result<TaskName> {
        let spec = DeviceSpec::parse(device)?;
        match (spec.job, spec.task) {
            (Some(job), Some(task)) => Ok(TaskName { job, task }),
            _ => Err(Error::invalid_argument(format!("'{device}' does not say which task it is of"))),
        }
    }
}

impl TaskName {
    /// `ps:0`, for people.
    pub fn short(&self) -> String {
        format!("{}:{}", self.job, self.task)
    }
}

/// `/job:ps/replica:0/task:0`
impl std::fmt::Display for TaskName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "/job:{}/replica:0/task:{}", self.job, self.task)
    }
}

/// Creates a connection to an address.
pub(crate) type Connect = Box<dyn Fn(&TaskName, &str) -> Arc<dyn WorkerService> + Send + Sync>;

/// Connections to all tasks, created on first use.
pub(crate) struct Peers {
    pub own: TaskName,
    pub cluster: ClusterSpec,
    pub runtime: Handle,
    /// The steps that this task is the master of.
    pub mastered: Arc<Mastered>,
    connect: Connect,
    connections: Mutex<HashMap<TaskName, Arc<dyn WorkerService>>>,
    own_worker: OnceLock<Weak<Worker>>,
}

impl Peers {
    pub fn new(own: TaskName, cluster: ClusterSpec, runtime: Handle, connect: Connect) -> Arc<Peers> {
        let (mastered, connections, own_worker) = (Arc::default(), Mutex::default(), OnceLock::new());
        Arc::new(Peers { own, cluster, runtime, mastered, connect, connections, own_worker })
    }

    /// Sets this task's worker; calls to it stay in the process.
    pub fn set_own(&self, worker: &Arc<Worker>) {
        self.own_worker.get_or_init(|| Arc::downgrade(worker));
    }

    /// Every task of the cluster.
    pub fn tasks(&self) -> Vec<TaskName> {
        self.cluster.all_tasks().map(|(job, task, _)| TaskName::new(job, task)).collect()
    }

    /// The tasks in a session's own cluster (`ConfigProto.cluster_def`), or all tasks if it has none. It may omit tasks
    /// of this cluster; other tasks, or other addresses, are refused.
    pub fn tasks_of(&self, cluster: Option<&ClusterDef>) -> Result<Vec<TaskName>> {
        let Some(cluster) = cluster.filter(|cluster| !cluster.job.is_empty()) else { return Ok(self.tasks()) };
        let cluster = ClusterSpec::from_def(cluster).map_err(|error| error.context("cluster_def"))?;
        let mut tasks = Vec::with_capacity(cluster.n_tasks());
        for (job, task, address) in cluster.all_tasks() {
            if self.cluster.address(job, task).ok() != Some(address) {
                return Err(Error::unimplemented(format!(
                    "the session's own cluster (ConfigProto.cluster_def) has {job}:{task} at {address}, which is not of this \
                     server's cluster; start the servers with that cluster"
                )));
            }
            tasks.push(TaskName::new(job, task));
        }
        Ok(tasks)
    }

    /// The connection to a task.
    pub fn task(&self, name: &TaskName) -> Result<Arc<dyn WorkerService>> {
        if *name == self.own {
            let own = self.own_worker.get().and_then(Weak::upgrade);
            let own = own.ok_or_else(|| Error::unavailable("this task is ending"))?;
            return Ok(Arc::new(LocalWorker(own)));
        }
        let mut connections = self.connections.lock();
        if let Some(peer) = connections.get(name) {
            return Ok(peer.clone());
        }
        let address = self.cluster.address(&name.job, name.task)?;
        let peer = (self.connect)(name, address);
        connections.insert(name.clone(), peer.clone());
        Ok(peer)
    }

    async fn recv_tensor(self: Arc<Self>, step_id: u64, key: RendezvousKey) -> Result<Received> {
        let task = TaskName::of_device(key.part(0))?;
        let request = RecvTensorRequest {
            step_id: step_id as i64,
            rendezvous_key: key.to_string(),
            request_id: random_id(),
            ..RecvTensorRequest::default()
        };
        let response = self.task(&task)?.recv_tensor(request).await?;
        received(response).map_err(|error| error.context(format_args!("{task} for {key}")))
    }
}

/// The tensor in a response.
pub(crate) fn received(response: RecvTensorResponse) -> Result<Received> {
    // A dead tensor has no meaningful value, and may be missing.
    let tensor = match response.tensor {
        Some(tensor) => tensor.into_tensor()?,
        None if response.is_dead => Tensor::zeros(kolo_core::DType::F32, [0])?,
        None => return Err(Error::internal("an answer without a tensor")),
    };
    Ok(Received { is_dead: response.is_dead, ..Received::value(tensor) })
}

/// Fetches tensors from peers.
pub(crate) struct PeerFetch {
    peers: Arc<Peers>,
    /// Peers with requests that may not have been flushed.
    unsent: Mutex<Vec<Arc<dyn WorkerService>>>,
    has_unsent: AtomicBool,
}

impl PeerFetch {
    pub fn new(peers: Arc<Peers>) -> PeerFetch {
        PeerFetch { peers, unsent: Mutex::default(), has_unsent: AtomicBool::new(false) }
    }
}

impl Fetch for PeerFetch {
    fn fetch_group(&self, step_id: u64, group: &Group, each: Each) -> Option<Guard> {
        let peer = self.peers.task(&group.task).ok()?;
        let guard = peer.ask_tensors(step_id, group, each)?;
        self.unsent.lock().push(peer);
        self.has_unsent.store(true, Ordering::Release);
        Some(guard)
    }

    fn flush(&self) {
        if Batch::is_open() || !self.has_unsent.swap(false, Ordering::AcqRel) {
            return;
        }
        let unsent = std::mem::take(&mut *self.unsent.lock());
        unsent.iter().for_each(|peer| peer.flush());
    }

    fn fetch(&self, step_id: u64, key: &RendezvousKey, done: Waiter) -> Box<dyn Send> {
        let (peers, key) = (self.peers.clone(), key.clone());
        let runtime = peers.runtime.clone();
        let question = runtime.spawn(async move { done(peers.recv_tensor(step_id, key).await) });
        Box::new(AbortOnDrop(question))
    }
}

struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_may_bring_a_part_of_the_cluster_and_no_other() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let cluster = ClusterSpec::parse("ps=a:1,a:2;worker=b:1").unwrap();
        let connect: Connect = Box::new(|task, _| panic!("{task} is not needed"));
        let peers = Peers::new(TaskName::new("ps", 0), cluster, runtime.handle().clone(), connect);
        assert_eq!(peers.tasks_of(None).unwrap().len(), 3);
        assert_eq!(peers.tasks_of(Some(&ClusterDef::default())).unwrap().len(), 3);
        let tasks = |text: &str| peers.tasks_of(Some(&ClusterSpec::parse(text).unwrap().to_def()));
        assert_eq!(tasks("ps=a:1;worker=b:1").unwrap(), [TaskName::new("ps", 0), TaskName::new("worker", 0)]);
        for other in ["ps=a:1;worker=b:2", "ps=a:1,a:2,a:3", "chief=a:1"] {
            assert_eq!(tasks(other).unwrap_err().code(), kolo_core::Code::Unimplemented, "{other}");
        }
    }
}
