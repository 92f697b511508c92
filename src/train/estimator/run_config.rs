//! Where an estimator keeps its checkpoints, and which part of a job this process is.

use std::path::PathBuf;
use std::time::Duration;

use kolo_core::{DType, Error, PartialShape, Result};
use kolo_graph::{Graph, Operation};
use kolo_net::{ClusterSpec, Connect as _, ServerConfig};
use kolo_ops::io::FileAccess;
use kolo_ops::queue::FifoQueue;
use kolo_runtime::{Session, SessionConfig};

use crate::cluster::UpdateMode;
use crate::parallel::World;
use crate::place::{Environment, Place, RankSeat, TaskSeat, find};
use crate::strategy::{MultiWorkerMirrored, OneDevice, ParameterServer, Strategy};
use crate::train::Every;

/// The jobs whose tasks train.
const TRAINERS: [&str; 3] = ["chief", "master", "worker"];

/// How often a parameter server looks who has left.
const LOOK: Duration = Duration::from_millis(200);

/// The settings of an [`Estimator`](super::Estimator).
#[derive(Clone)]
pub struct RunConfig {
    pub(super) model_dir: PathBuf,
    pub(super) seed: i64,
    pub(super) save_every: Every,
    pub(super) keep: usize,
    part: JobPart,
    strategy: Option<Strategy>,
    mode: UpdateMode,
    devices: Vec<String>,
    server: fn() -> ServerConfig,
}

/// Which part of a job a process is.
#[derive(Clone, Debug, PartialEq)]
pub enum JobPart {
    /// The whole job.
    Alone,
    /// One of several that exchange gradients among themselves.
    Rank(RankSeat),
    /// A worker, or the chief, of a cluster with parameter servers.
    Worker(ClusterSpec, String, u32),
    /// A parameter server.
    Server(ClusterSpec, u32),
    /// It evaluates checkpoints, and takes no part in training.
    Evaluator,
}

impl JobPart {
    /// The part of a process that was found in this place. A cluster with a job `ps` has parameter servers; in one without, the chief
    /// (or master) and the workers exchange gradients among themselves, as ranks of any other launcher do.
    ///
    /// ```
    /// use kolo::place::{Environment, find};
    /// use kolo::train::JobPart;
    ///
    /// let config = r#"{"cluster": {"chief": ["a:1"], "worker": ["b:1"]}, "task": {"type": "worker", "index": 0}}"#;
    /// let place = find(&Environment::new([("TF_CONFIG", config)]))?.place;
    /// assert!(matches!(JobPart::of(place)?, JobPart::Rank(seat) if seat.place.rank == 1));
    /// # Ok::<(), kolo::Error>(())
    /// ```
    pub fn of(place: Place) -> Result<JobPart> {
        let TaskSeat { cluster, job, index } = match place {
            Place::Alone => return Ok(JobPart::Alone),
            Place::Rank(seat) => return Ok(JobPart::Rank(seat)),
            Place::Task(seat) => seat,
        };
        match job.as_str() {
            "evaluator" => Ok(JobPart::Evaluator),
            "ps" => Ok(JobPart::Server(cluster, index)),
            job if TRAINERS.contains(&job) => Ok(JobPart::Worker(cluster, job.to_owned(), index)),
            other => Err(Error::invalid_argument(format!(
                "TF_CONFIG: a task of job '{other}' has no part in an estimator's job; there are chief, master, worker, ps and evaluator"
            ))),
        }
    }
}

impl RunConfig {
    /// This process is the whole job. Checkpoints are in this directory: every 10 minutes, the newest five.
    pub fn local(model_dir: impl Into<PathBuf>) -> RunConfig {
        RunConfig::of(model_dir, JobPart::Alone)
    }

    /// The part of the job that `TF_CONFIG`, or another launcher's variables, say ([`find`]); the whole of it if there are none.
    pub fn from_env(model_dir: impl Into<PathBuf>) -> Result<RunConfig> {
        Ok(RunConfig::of(model_dir, JobPart::of(find(&Environment::own())?.place)?))
    }

    /// This part of the job.
    pub fn of(model_dir: impl Into<PathBuf>, part: JobPart) -> RunConfig {
        RunConfig {
            model_dir: model_dir.into(),
            seed: 1,
            save_every: Every::Secs(600.0),
            keep: 5,
            part,
            strategy: None,
            mode: UpdateMode::default(),
            devices: vec![String::new()],
            server: ServerConfig::default,
        }
    }

    /// The seed of initial values.
    #[must_use]
    pub fn seed(mut self, seed: i64) -> RunConfig {
        self.seed = seed;
        self
    }

    /// How often to save.
    #[must_use]
    pub fn save_every(mut self, every: Every) -> RunConfig {
        self.save_every = every;
        self
    }

    /// How many checkpoints to keep; 0 keeps all.
    #[must_use]
    pub fn keep_checkpoint_max(mut self, n: usize) -> RunConfig {
        self.keep = n;
        self
    }

    /// Trains with this strategy, for a process that is the whole job.
    #[must_use]
    pub fn train_distribute(mut self, strategy: &Strategy) -> RunConfig {
        self.strategy = Some(strategy.clone());
        self
    }

    /// How the updates of workers with parameter servers meet; asynchronously if not said.
    #[must_use]
    pub fn mode(mut self, mode: UpdateMode) -> RunConfig {
        self.mode = mode;
        self
    }

    /// The devices of each rank, each with a replica.
    #[must_use]
    pub fn devices(mut self, devices: &[impl AsRef<str>]) -> RunConfig {
        self.devices = devices.iter().map(|device| device.as_ref().to_owned()).collect();
        self
    }

    /// The settings of the server of a task: how callers are authenticated, say.
    #[must_use]
    pub fn server(mut self, config: fn() -> ServerConfig) -> RunConfig {
        self.server = config;
        self
    }

    /// This process's part.
    pub fn part(&self) -> &JobPart {
        &self.part
    }

    /// Whether this process saves and reports for all.
    pub fn is_chief(&self) -> bool {
        match &self.part {
            JobPart::Alone => true,
            JobPart::Rank(seat) => seat.place.rank == 0,
            JobPart::Worker(cluster, job, task) => {
                job != "worker" || (*task == 0 && !cluster.jobs().any(|job| job == "chief" || job == "master"))
            }
            JobPart::Server(..) | JobPart::Evaluator => false,
        }
    }

    /// How this process trains.
    pub(super) fn strategy(&self) -> Result<Strategy> {
        match (&self.part, &self.strategy) {
            (JobPart::Alone, Some(strategy)) => Ok(strategy.clone()),
            (JobPart::Alone, None) => match &self.devices[..] {
                [device] => OneDevice::new(device).build(),
                devices => crate::strategy::Mirrored::new(devices).build(),
            },
            (_, Some(strategy)) => Err(Error::invalid_argument(format!(
                "strategy {} is for a process that is the whole job, and this one is part of a cluster, which says how it trains; leave \
                 `train_distribute` out, or TF_CONFIG",
                strategy.name()
            ))),
            (JobPart::Rank(seat), None) => {
                let world = World::meet_at(seat, &(self.server)().security)?;
                MultiWorkerMirrored::new(&world).devices(&self.devices).build()
            }
            (JobPart::Worker(cluster, job, task), None) => {
                let mut server = (self.server)();
                server.files = FileAccess::under(std::slice::from_ref(&self.made_dir()?))?;
                let [device] = &self.devices[..] else {
                    return Err(Error::invalid_argument(format!(
                        "a worker of a cluster with parameter servers has one replica, and was given {} devices; start a worker for each",
                        self.devices.len()
                    )));
                };
                let place = ParameterServer::new(cluster, job, *task).mode(self.mode).server_config(server);
                if device.is_empty() { place } else { place.device(device) }.build()
            }
            (JobPart::Server(..) | JobPart::Evaluator, None) => Err(Error::failed_precondition(
                "a parameter server or an evaluator does not train; `train_and_evaluate` does what it has to do",
            )),
        }
    }

    /// Serves a parameter server's task until all that train have left.
    pub(super) fn serve(&self, cluster: &ClusterSpec, task: u32) -> Result<()> {
        let mut server = (self.server)();
        server.files = FileAccess::under(std::slice::from_ref(&self.made_dir()?))?;
        let security = server.security.clone();
        let server = ParameterServer::new(cluster, "ps", task).server_config(server).serve()?;
        let g = crate::graph();
        let n_left = departures(&g, task).size();
        let config = SessionConfig { device_filters: vec![format!("/job:ps/task:{task}")], ..SessionConfig::default() };
        let session = Session::connect_secured(&server.target(), &g, config, &security)?;
        let n = TRAINERS.into_iter().map(|job| cluster.tasks(job).count()).sum::<usize>();
        // A step that waited for them would be reported as one that takes too long.
        while session.fetch(n_left)?.scalar_value::<i32>()? < i32::try_from(n).unwrap_or(i32::MAX) {
            std::thread::sleep(LOOK);
        }
        drop(session);
        server.stop();
        server.join()
    }

    /// Tells the parameter servers that this worker has left.
    pub(super) fn leave(&self, cluster: &ClusterSpec, strategy: &Strategy) -> Result<()> {
        let g = crate::graph();
        let tell = |(task, _)| departures(&g, task).enqueue(&[g.constant(1i32)]);
        let told: Vec<Operation<'_>> = cluster.tasks("ps").map(tell).collect();
        strategy.session(&g)?.run(&[], &[], &told).map(drop)
    }

    fn made_dir(&self) -> Result<PathBuf> {
        std::fs::create_dir_all(&self.model_dir).map_err(|error| {
            Error::failed_precondition(format!("the folder '{}' cannot be made: {error}", self.model_dir.display()))
        })?;
        Ok(self.model_dir.clone())
    }
}

/// The queue on a parameter server into which each worker puts an element when it leaves.
fn departures(graph: &Graph, ps: u32) -> FifoQueue<'_> {
    graph.device(&format!("/job:ps/task:{ps}/device:CPU:0"), || {
        FifoQueue::shared(graph, "kolo_departures", &[(DType::I32, PartialShape::scalar())], None)
    })
}
