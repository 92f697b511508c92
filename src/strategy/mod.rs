//! Strategies: how one program trains on one device, on several, on several machines. A strategy is no executor of its own: it is a
//! mesh of replicas, a function that says where variables go, and the passes or the optimizer by which replicas agree on an update.
//!
//! ```text
//! one_device.rs            one replica
//! mirrored.rs              a replica on each device of this process
//! multi_worker_mirrored.rs replicas on the devices of many processes, which exchange gradients (`CollectiveAllReduce`)
//! central_storage.rs       as mirrored, with variables in the host's memory
//! parameter_server.rs      replicas are workers; variables are on parameter servers
//! scope.rs                 what a program says inside: variables, `run`, `reduce`, `gather`, `minimize`
//! ```
//!
//! The batch that a program names is the global one: what all replicas in sync make one update of. Each gets an equal share.
//!
//! ```
//! use kolo::data::Dataset;
//! use kolo::optim::Sgd;
//! use kolo::parallel::ReduceOp;
//! use kolo::strategy::Mirrored;
//! use kolo::train::{Model, Trainer, global_step_or_create};
//! use kolo::{Tensor, nn, ops};
//!
//! let strategy = Mirrored::new(&["/cpu:0", "/cpu:1"]).build()?;
//! let g = kolo::graph();
//! g.set_seed(1);
//! let x = g.placeholder::<f32>("x", [None, Some(1)]);
//! let y = g.placeholder::<f32>("y", [None, Some(1)]);
//! let model = strategy.scope(&g, |scope| {
//!     let step = global_step_or_create(&g)?;
//!     let batch = [scope.split(x)?, scope.split(y)?];
//!     let losses = scope.run(&batch, |replica| {
//!         let line = nn::dense(replica.input(0), 1, "line");
//!         Ok(ops::mean_all(ops::square(line - replica.input(1))))
//!     })?;
//!     let train = scope.minimize(Sgd::new(0.1), &losses, Some(step))?;
//!     Ok(Model::new(&[x, y], scope.reduce(ReduceOp::Mean, &losses)?, train))
//! })?;
//!
//! let data = Dataset::new([Tensor::from([[1.0f32], [2.0]]), Tensor::from([[3.0f32], [6.0]])]).batch(2, true);
//! let mut trainer = Trainer::new(&g, model).strategy(&strategy).build()?;
//! assert!(trainer.fit(&data.repeat(300), &mut [])?.last_loss < 0.01);
//! # Ok::<(), kolo::Error>(())
//! ```

mod central_storage;
mod mirrored;
mod multi_worker_mirrored;
mod one_device;
mod parameter_server;
mod per_replica;
mod scope;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use kolo_core::{DeviceSpec, Error, Result};
use kolo_graph::{Graph, Node};
use kolo_runtime::{Session, SessionConfig};

use crate::data::Dataset;
use crate::parallel::DataParallel;
use crate::train::SessionSource;

pub use central_storage::CentralStorage;
pub use mirrored::Mirrored;
pub use multi_worker_mirrored::{CollectiveAllReduce, MultiWorkerMirrored};
pub use one_device::OneDevice;
pub(crate) use parameter_server::Seat;
pub use parameter_server::{ParameterServer, WorkerSeat};
pub use per_replica::PerReplica;
pub(crate) use scope::with_updates;
pub use scope::{Replica, Scope};

/// How replicas of a model train together. Made by [`OneDevice`], [`Mirrored`], [`MultiWorkerMirrored`], [`CentralStorage`] or
/// [`ParameterServer`]; a clone is the same strategy.
#[derive(Clone)]
pub struct Strategy {
    name: &'static str,
    mesh: Mesh,
    /// Where a node goes that no replica asks for: variables, and what is computed once for all replicas.
    home: Rc<dyn Fn(&Node) -> DeviceSpec>,
    peers: Peers,
    config: SessionConfig,
}

/// The replicas: on each of the devices of each of the processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mesh {
    /// The devices of this process, one for each of its replicas.
    pub devices: Vec<String>,
    /// Which of the processes this is.
    pub process: usize,
    /// How many processes there are, each with as many replicas.
    pub n_processes: usize,
}

/// How replicas of several processes agree on an update.
#[derive(Clone)]
enum Peers {
    /// There are no other processes.
    None,
    /// By passes that average gradients among ranks.
    Ranks(Box<DataParallel>),
    /// By an optimizer that leaves updates to parameter servers.
    Servers(Rc<Seat>),
}

impl Mesh {
    /// The replicas of one process.
    fn of_process(devices: &[impl AsRef<str>]) -> Mesh {
        let devices = devices.iter().map(|device| device.as_ref().to_owned()).collect();
        Mesh { devices, process: 0, n_processes: 1 }
    }

    /// The number of replicas, over all processes.
    pub fn n_replicas(&self) -> usize {
        self.devices.len() * self.n_processes
    }

    /// What happens to a batch of `n` samples under the strategy of this name, if `n_in_sync` replicas make an update together.
    pub(crate) fn describe(&self, name: &str, n_in_sync: usize, n: usize) -> String {
        let Mesh { devices, n_processes, .. } = self;
        let count = |n: usize, one: &str, many: &str| format!("{n} {}", if n == 1 { one } else { many });
        let shape =
            format!("{} x {}", count(*n_processes, "process", "processes"), count(devices.len(), "device", "devices"));
        if n_in_sync < self.n_replicas() {
            return format!(
                "strategy {name}: a batch is {n}, that of one worker's update, since updates are not synchronous ({shape})"
            );
        }
        let (each, replicas) = (n / n_in_sync.max(1), count(n_in_sync, "replica", "replicas"));
        format!("strategy {name}: the global batch is {n}, {each} for each of {replicas} ({shape})")
    }

    fn check(&self, strategy: &str) -> Result<()> {
        if self.devices.is_empty() {
            return Err(Error::invalid_argument(format!("{strategy} needs at least one device, such as /cpu:0")));
        }
        for (i, device) in self.devices.iter().enumerate() {
            DeviceSpec::parse(device).map_err(|error| error.context(strategy))?;
            if self.devices[..i].contains(device) {
                return Err(Error::invalid_argument(format!(
                    "{strategy} was given {device} twice; a device has one replica (`towers` computes several shares of a batch on one)"
                )));
            }
        }
        Ok(())
    }
}

impl Strategy {
    /// A strategy whose variables go where `home` says.
    fn new(
        name: &'static str,
        mesh: Mesh,
        home: impl Fn(&Node) -> DeviceSpec + 'static,
        peers: Peers,
    ) -> Result<Strategy> {
        mesh.check(name)?;
        Ok(Strategy { name, mesh, home: Rc::new(home), peers, config: SessionConfig::default() })
    }

    /// Its name, such as `mirrored`.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The replicas.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// How many replicas make an update together: what a global batch is shared by.
    pub fn num_replicas_in_sync(&self) -> usize {
        match &self.peers {
            Peers::Servers(seat) if !seat.worker().is_in_sync() => self.mesh.devices.len(),
            _ => self.mesh.n_replicas(),
        }
    }

    /// The settings of sessions; their devices and passes are added.
    #[must_use]
    pub fn with_session_config(mut self, config: SessionConfig) -> Strategy {
        self.config = config;
        self
    }

    /// Describes a model for this strategy: variables that `body` makes go where the strategy keeps them. What `body` is given does the
    /// rest.
    pub fn scope<'g, R>(&self, graph: &'g Graph, body: impl FnOnce(&Scope<'_, 'g>) -> Result<R>) -> Result<R> {
        let scope = Scope::new(self, graph);
        let made = self.at_home(graph, || body(&scope))?;
        graph.check()?;
        Ok(made)
    }

    /// Runs `body`; what it adds goes where the strategy keeps variables.
    pub(crate) fn at_home<R>(&self, graph: &Graph, body: impl FnOnce() -> R) -> R {
        let home = self.home.clone();
        graph.device_fn(move |node| home(node), body)
    }

    /// This process's part of data whose batches are the global ones. An error if replicas cannot share the batches equally.
    pub fn distribute(&self, data: &Dataset) -> Result<Dataset> {
        self.check_batches(data)?;
        let Mesh { process, n_processes, .. } = self.mesh;
        Ok(match &self.peers {
            Peers::None => data.clone(),
            Peers::Ranks(_) => data.clone().split_batches(process, n_processes),
            Peers::Servers(seat) if seat.worker().is_in_sync() => data.clone().split_batches(process, n_processes),
            Peers::Servers(_) => data.clone().shard(process, n_processes),
        })
    }

    pub(crate) fn check_batches(&self, data: &Dataset) -> Result<()> {
        let ((n, is_always_full), n_replicas) = (data.batch_size(), self.num_replicas_in_sync());
        if n_replicas > 1 && (!n.is_multiple_of(n_replicas) || !is_always_full) {
            return Err(Error::invalid_argument(format!(
                "the global batch of {n} cannot be shared equally by {n_replicas} replicas of strategy {}{}; batch the data by {}, \
                 without a remainder",
                self.name,
                if is_always_full { "" } else { " (the last one may be smaller)" },
                n.next_multiple_of(n_replicas)
            )));
        }
        tracing::info!(target: "kolo::train", "{}", self.describe(n));
        Ok(())
    }

    /// What happens to a global batch of `n` samples, in words.
    ///
    /// ```
    /// use kolo::strategy::Mirrored;
    ///
    /// let strategy = Mirrored::new(&["/cpu:0", "/cpu:1"]).build()?;
    /// assert_eq!(strategy.describe(32), "strategy mirrored: the global batch is 32, 16 for each of 2 replicas (1 process x 2 devices)");
    /// # Ok::<(), kolo::Error>(())
    /// ```
    pub fn describe(&self, n: usize) -> String {
        self.mesh.describe(self.name, self.num_replicas_in_sync(), n)
    }

    /// Opens a session for a graph that was described in [`Strategy::scope`]. A [`Trainer`](crate::train::Trainer) does this by itself.
    pub fn session(&self, graph: &Graph) -> Result<Arc<Session>> {
        self.source()?.open(graph)
    }

    /// Where sessions come from.
    pub(crate) fn source(&self) -> Result<Box<dyn SessionSource>> {
        Ok(match &self.peers {
            Peers::None => Box::new(self.with_devices()?),
            Peers::Ranks(ranks) => Box::new(ranks.configure(self.with_devices()?)),
            Peers::Servers(seat) => Box::new(seat.source(&self.config)),
        })
    }

    /// The settings of sessions, with the devices of all replicas of this process.
    fn with_devices(&self) -> Result<SessionConfig> {
        let mut config = self.config.clone();
        for device in &self.mesh.devices {
            let spec = DeviceSpec::parse(device)?;
            let (Some(kind), Some(id)) = (&spec.kind, spec.id) else { continue };
            let n = config.device_count.entry(kind.to_string()).or_default();
            *n = (*n).max(id as usize + 1);
            // What has no kernel there, such as reading files, runs on the CPU.
            config.allow_soft_placement |= &**kind == "GPU";
        }
        Ok(config)
    }

    /// The ranks that train together, if that is how.
    pub(crate) fn ranks(&self) -> Option<&DataParallel> {
        match &self.peers {
            Peers::Ranks(ranks) => Some(ranks),
            Peers::None | Peers::Servers(_) => None,
        }
    }

    /// This process's seat among workers, if there are parameter servers.
    pub(crate) fn seat(&self) -> Option<&Rc<Seat>> {
        match &self.peers {
            Peers::Servers(seat) => Some(seat),
            Peers::None | Peers::Ranks(_) => None,
        }
    }
}

impl fmt::Debug for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Strategy").field("name", &self.name).field("mesh", &self.mesh).finish_non_exhaustive()
    }
}

/// All nodes on one device; wherever the placer puts them if the name is empty.
fn on(device: &str) -> Result<impl Fn(&Node) -> DeviceSpec + 'static + use<>> {
    let device = DeviceSpec::parse(device)?;
    Ok(move |_: &Node| device.clone())
}
