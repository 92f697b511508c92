//! The other tasks of a cluster, as this task reaches them.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock, Weak};

use kolo_core::{DeviceSpec, Error, Result, Tensor};
use kolo_ops::{Received, RendezvousKey};
use parking_lot::Mutex;
use tokio::runtime::Handle;

use crate::cluster::ClusterSpec;
use crate::proto::RecvTensorRequest;
use crate::random::random_id;
use crate::services::WorkerService;
use crate::worker::transfers::{Fetch, Waiter};
use crate::worker::{LocalWorker, Worker};

/// A task of a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TaskName {
    /// `ps`, `worker`, …
    pub job: Arc<str>,
    /// Its number in the job.
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

/// `/job:ps/replica:0/task:0`
impl std::fmt::Display for TaskName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "/job:{}/replica:0/task:{}", self.job, self.task)
    }
}

/// Makes a connection to an address.
pub(crate) type Connect = Box<dyn Fn(&TaskName, &str) -> Arc<dyn WorkerService> + Send + Sync>;

/// Connections to all tasks, made when they are first needed.
pub(crate) struct Peers {
    pub own: TaskName,
    pub cluster: ClusterSpec,
    pub runtime: Handle,
    connect: Connect,
    connections: Mutex<HashMap<TaskName, Arc<dyn WorkerService>>>,
    own_worker: OnceLock<Weak<Worker>>,
}

impl Peers {
    pub fn new(own: TaskName, cluster: ClusterSpec, runtime: Handle, connect: Connect) -> Arc<Peers> {
        Arc::new(Peers { own, cluster, runtime, connect, connections: Mutex::default(), own_worker: OnceLock::new() })
    }

    /// Says who this task's worker is; calls to it stay in the process.
    pub fn set_own(&self, worker: &Arc<Worker>) {
        self.own_worker.get_or_init(|| Arc::downgrade(worker));
    }

    /// Every task of the cluster.
    pub fn tasks(&self) -> Vec<TaskName> {
        self.cluster.all_tasks().map(|(job, task, _)| TaskName::new(job, task)).collect()
    }

    /// How to reach a task.
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
        // What a dead tensor holds means nothing, and need not even be there.
        let tensor = match response.tensor {
            Some(tensor) => tensor.into_tensor()?,
            None if response.is_dead => Tensor::zeros(kolo_core::DType::F32, [0])?,
            None => return Err(Error::internal(format!("{task} answered without a tensor for {key}"))),
        };
        Ok(Received { tensor, is_dead: response.is_dead })
    }
}

/// Asks peers for tensors.
pub(crate) struct PeerFetch(pub Arc<Peers>);

impl Fetch for PeerFetch {
    fn fetch(&self, step_id: u64, key: &RendezvousKey, done: Waiter) -> Box<dyn Send> {
        let (peers, key) = (self.0.clone(), key.clone());
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
