//! Replicas are workers of a cluster; variables are on parameter servers, to which workers bring their gradients.

use std::cell::RefCell;
use std::net::TcpListener;
use std::rc::Rc;
use std::sync::Arc;

use kolo_core::{DeviceSpec, Error, Result};
use kolo_graph::Graph;
use kolo_net::tls::Security;
use kolo_net::{ClusterSpec, Connect as _, Server, ServerConfig};
use kolo_runtime::{Session, SessionConfig};

use super::{Mesh, Peers, Strategy};
use crate::cluster::{ReplicaDeviceSetter, Replicas, UpdateMode};
use crate::optim::Optimizer;
use crate::place::TaskSeat;
use crate::train::{SessionHook, SessionSource};

/// Trains as one of the workers of a cluster with parameter servers: synchronously, asynchronously or in between ([`UpdateMode`]).
///
/// The global batch is what one update is made of: if updates are synchronous, each worker takes its share of it; if not, a worker's
/// update is of a whole batch. The chief (the job `chief` or `master`, or else the first worker) initialises, restores and saves.
///
/// ```no_run
/// use kolo::ClusterSpec;
/// use kolo::strategy::ParameterServer;
///
/// let cluster = ClusterSpec::parse("ps=alpha:2222;worker=beta:2222,gamma:2222")?;
/// let place = ParameterServer::new(&cluster, "worker", 1).mode("sync".parse()?);
/// let strategy = place.build()?; // on alpha: `ParameterServer::new(&cluster, "ps", 0).serve()?.join()?`
/// assert_eq!(strategy.num_replicas_in_sync(), 2);
/// # Ok::<(), kolo::Error>(())
/// ```
pub struct ParameterServer {
    cluster: ClusterSpec,
    job: String,
    task: u32,
    mode: UpdateMode,
    device: Option<String>,
    server: ServerConfig,
    listener: Option<TcpListener>,
}

impl ParameterServer {
    /// For this task of the cluster; asynchronous unless said.
    pub fn new(cluster: &ClusterSpec, job: &str, task: u32) -> ParameterServer {
        ParameterServer {
            cluster: cluster.clone(),
            job: job.to_owned(),
            task,
            mode: UpdateMode::default(),
            device: None,
            server: ServerConfig::default(),
            listener: None,
        }
    }

    /// How updates of several workers meet.
    #[must_use]
    pub fn mode(mut self, mode: UpdateMode) -> ParameterServer {
        self.mode = mode;
        self
    }

    /// The device of this task on which the worker computes; the placer chooses unless said.
    #[must_use]
    pub fn device(mut self, device: &str) -> ParameterServer {
        self.device = Some(device.to_owned());
        self
    }

    /// The settings of this task's server: its devices, how callers are authenticated, the folders it may write to.
    #[must_use]
    pub fn server_config(mut self, config: ServerConfig) -> ParameterServer {
        self.server = config;
        self
    }

    /// Serves on this socket, which listens already, and not on the address that the cluster gives.
    #[must_use]
    pub fn listener(mut self, listener: TcpListener) -> ParameterServer {
        self.listener = Some(listener);
        self
    }

    /// Serves this task: all that a parameter server does.
    pub fn serve(self) -> Result<Server> {
        match self.listener {
            Some(listener) => Server::on(listener, &self.cluster, &self.job, self.task, self.server),
            None => Server::new(&self.cluster, &self.job, self.task, self.server),
        }
    }

    /// The strategy of a worker. Its task is served until the last clone is dropped.
    pub fn build(self) -> Result<Strategy> {
        let worker = WorkerSeat::of(&self.cluster, &self.job, self.task, self.mode)?;
        if !self.mode.keeps_variables_on_servers() {
            return Err(Error::invalid_argument(format!(
                "strategy parameter-server keeps variables on servers, and mode '{}' with each worker; choose sync, async or hybrid",
                self.mode
            )));
        }
        let device = self.device.clone();
        let home = worker.setter(device.as_deref())?.device_fn()?;
        let security = self.server.security.clone();
        let server = self.serve()?;
        let (target, process, n_processes) = (server.target(), worker.worker, worker.n_workers);
        // Which task that is on, the function for nodes says.
        let mesh = Mesh { devices: vec![device.unwrap_or_default()], process, n_processes };
        let seat = Seat { worker, target, security, updates: RefCell::default(), _server: server };
        Strategy::new("parameter-server", mesh, home, Peers::Servers(Rc::new(seat)))
    }
}

/// Which worker of a cluster with parameter servers this is, and what follows from that.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerSeat {
    job: String,
    task: u32,
    worker: usize,
    n_workers: usize,
    n_ps: usize,
    mode: UpdateMode,
}

/// The jobs whose tasks train. The chief, or master, is the first worker.
const CHIEFS: [&str; 2] = ["chief", "master"];
const WORKER: &str = "worker";
const PS: &str = "ps";

impl WorkerSeat {
    /// The seat of a task that trains.
    pub fn of(cluster: &ClusterSpec, job: &str, task: u32, mode: UpdateMode) -> Result<WorkerSeat> {
        let address = cluster.address(job, task)?;
        if job != WORKER && !CHIEFS.contains(&job) {
            return Err(Error::invalid_argument(format!(
                "{job}:{task} ({address}) does not train; the jobs chief, master and worker do, and ps keeps variables"
            )));
        }
        let seat = TaskSeat { cluster: cluster.clone(), job: job.to_owned(), index: task };
        let n_ps = seat.n_ps();
        if n_ps == 0 {
            return Err(Error::invalid_argument("the cluster has no job 'ps' to keep the variables"));
        }
        let worker = seat.replica();
        let worker = worker.ok_or_else(|| Error::internal("a task of the cluster is not among its tasks"))?;
        Ok(WorkerSeat::at(job, task, (worker, seat.n_replicas()), n_ps, mode))
    }

    /// That of task `task` of a job, which is one of so many that train.
    pub(crate) fn at(
        job: &str,
        task: u32,
        (worker, n_workers): (usize, usize),
        n_ps: usize,
        mode: UpdateMode,
    ) -> WorkerSeat {
        WorkerSeat { job: job.to_owned(), task, worker, n_workers, n_ps, mode }
    }

    /// Its number among all that train, from 0.
    pub fn worker(&self) -> usize {
        self.worker
    }

    /// How many train.
    pub fn n_workers(&self) -> usize {
        self.n_workers
    }

    /// How updates meet.
    pub fn mode(&self) -> UpdateMode {
        self.mode
    }

    /// Whether it initialises, restores and saves.
    pub fn is_chief(&self) -> bool {
        self.worker == 0
    }

    /// Whether an update is made from the gradients of all workers.
    pub fn is_in_sync(&self) -> bool {
        matches!(self.mode, UpdateMode::Sync { .. } | UpdateMode::Hybrid { .. })
    }

    /// Puts variables into the host memory of parameter servers, since every worker's values come and go through it, and all
    /// else here: on `device` of this task, if there is one.
    pub fn setter(&self, device: Option<&str>) -> Result<ReplicaDeviceSetter> {
        let mut own = device.map(DeviceSpec::parse).transpose()?.unwrap_or_default();
        (own.job, own.task) = (Some(self.job.as_str().into()), Some(self.task));
        let setter = ReplicaDeviceSetter::new(self.n_ps).ps_device("/job:ps/device:CPU:0");
        Ok(setter.worker_device(&own.to_string()))
    }

    /// The optimizer that the workers share.
    pub fn optimizer(&self, inner: Box<dyn Optimizer>) -> Replicas {
        self.mode.wrap(inner, self.worker, self.n_workers)
    }

    /// The settings of its sessions: they need no other worker.
    pub fn session_config(&self, own: &SessionConfig) -> SessionConfig {
        let task = format!("/job:{}/task:{}", self.job, self.task);
        SessionConfig {
            device_filters: vec![format!("/job:{PS}"), task],
            allow_soft_placement: own.allow_soft_placement,
            ..SessionConfig::default()
        }
    }

    /// How many global steps go through the data as often as one process would in `n_steps`.
    pub fn global_steps(&self, n_steps: u64) -> u64 {
        match self.mode {
            UpdateMode::Async { .. } => n_steps,
            _ => n_steps.div_ceil(self.n_workers as u64),
        }
    }
}

/// A worker that has sat down: its task is served, and its optimizer remembers what it added to the graph.
pub(crate) struct Seat {
    worker: WorkerSeat,
    target: String,
    security: Security,
    updates: RefCell<Option<Rc<Replicas>>>,
    _server: Server,
}

impl Seat {
    pub fn worker(&self) -> &WorkerSeat {
        &self.worker
    }

    /// The optimizer that the workers share, kept for [`Seat::hook`].
    pub fn wrap(&self, inner: Box<dyn Optimizer>) -> Rc<Replicas> {
        let updates = Rc::new(self.worker.optimizer(inner));
        *self.updates.borrow_mut() = Some(updates.clone());
        updates
    }

    /// The hook with which this worker's sessions take part.
    pub fn hook<'g>(&self, graph: &'g Graph) -> Result<Box<dyn SessionHook<'g> + 'g>> {
        let updates = self.updates.borrow().clone();
        let updates = updates.ok_or_else(|| {
            Error::failed_precondition(
                "the model has no training step of strategy parameter-server; make it with `minimize` of the strategy's scope",
            )
        })?;
        updates.lockstep_hook(graph, self.worker.is_chief())
    }

    pub fn source(&self, own: &SessionConfig) -> impl SessionSource + 'static + use<> {
        let (target, security, config) = (self.target.clone(), self.security.clone(), self.worker.session_config(own));
        move |graph: &Graph| Session::connect_secured(&target, graph, config.clone(), &security).map(Arc::new)
    }
}
