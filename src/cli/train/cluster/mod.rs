//! Training on a cluster: one command that starts all its processes, and what each worker among them does.

mod ended;
mod launch;
mod ps;
mod view;
mod worker;

use std::collections::BTreeSet;
use std::net::{TcpStream, ToSocketAddrs as _};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::cluster::UpdateMode;
use crate::strategy::WorkerSeat;
use crate::{ClusterSpec, Connect as _, Error, Result, Session, SessionConfig, TaskName};

use crate::cli::place::own_place;
use crate::cli::security::ServerSecurityFlags;
use crate::place::{Found, Place, TaskSeat};

pub use launch::launch;
pub use ps::keep_variables;
pub use worker::run;

/// Flags about the cluster.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct ClusterFlags {
    /// Start this many parameter servers on this machine
    #[arg(long, value_name = "N", help_heading = "Cluster")]
    pub ps: Option<usize>,
    /// Start this many workers on this machine, each with a share of the data
    #[arg(long, value_name = "N", help_heading = "Cluster")]
    pub workers: Option<usize>,
    /// Train synchronously: an update is the mean of all workers' gradients; replicas=N uses the first N and treats the
    /// rest as backup workers
    #[arg(long, value_name = "SETTINGS", num_args = 0..=1, default_missing_value = "", group = "mode", help_heading = "Cluster")]
    pub sync: Option<String>,
    /// Train asynchronously (the default); with bound=N, a worker more than N updates ahead of the slowest waits
    #[arg(long = "async", value_name = "SETTINGS", num_args = 0..=1, default_missing_value = "", group = "mode", help_heading = "Cluster")]
    pub asynchronous: Option<String>,
    /// Train synchronously with a timeout: timeout=200ms,min=0.75,late=drop|scale|queue
    #[arg(long, value_name = "SETTINGS", num_args = 0..=1, default_missing_value = "", group = "mode", help_heading = "Cluster")]
    pub hybrid: Option<String>,
    /// Join this cluster, whose processes are started by hand: ps=HOST:PORT;worker=HOST:PORT,HOST:PORT or a JSON file
    #[arg(long, value_name = "TASKS", requires = "task", help_heading = "Cluster")]
    pub cluster: Option<String>,
    /// Run this worker of --cluster, or another task, such as chief:0
    #[arg(long, value_name = "N", requires = "cluster", help_heading = "Cluster")]
    pub task: Option<String>,
    /// Train through a running server, `kolo serve` or TensorFlow's, as its worker
    #[arg(long, value_name = "grpc://HOST:PORT", conflicts_with_all = ["cluster", "task", "ps", "workers"], help_heading = "Cluster")]
    pub target: Option<String>,
    /// Wait this many seconds for the server of --target to come up
    #[arg(long, default_value_t = 30.0, value_name = "SECONDS", help_heading = "Cluster")]
    pub target_deadline: f64,
    /// Send tensors over TCP even between tasks on one machine [default: shared memory]
    #[arg(long, conflicts_with = "target", help_heading = "Cluster")]
    pub no_shared_memory: bool,
    /// Exit when standard input closes, that is, when the parent process has exited
    #[arg(long, hide = true)]
    pub with_parent: bool,
    #[command(flatten)]
    pub security: ServerSecurityFlags,
}

/// Where a worker's own task runs.
#[derive(Clone, Debug)]
pub enum TaskLocation {
    /// In this process, which serves it.
    Here(ClusterSpec),
    /// In a running server.
    At(String),
}

/// A worker's task in its cluster.
#[derive(Clone, Debug)]
pub struct Role {
    pub location: TaskLocation,
    /// The job that it is of: `worker`, or `chief` or `master`.
    pub job: String,
    /// Its index there.
    pub index: u32,
    /// Its number among all that train. The first is the chief.
    pub replica: usize,
    /// Whether the parameter servers run until they are told that the training has ended.
    pub ends_ps: bool,
    pub n_ps: usize,
    pub n_workers: usize,
    pub mode: UpdateMode,
}

impl ClusterFlags {
    /// True if this process is to start others.
    pub fn is_launcher(&self) -> bool {
        (self.ps.is_some() || self.workers.is_some()) && self.cluster.is_none()
    }

    /// True if flags say which cluster this process joins.
    pub fn is_joined(&self) -> bool {
        self.cluster.is_some() || self.target.is_some()
    }

    /// The task of this process, if it is in a cluster: as flags say, or else `TF_CONFIG`.
    pub fn role(&self) -> Result<Option<Role>> {
        if let Some(target) = &self.target {
            return self.role_of(target).map(Some);
        }
        let (Some(text), Some(task)) = (&self.cluster, &self.task) else {
            return match own_place()?.place {
                Place::Task(seat) => self.role_in(seat, "TF_CONFIG", true).map(Some),
                Place::Alone | Place::Rank(_) => Ok(None),
            };
        };
        let cluster = match Path::new(text).is_file() {
            true => ClusterSpec::read(Path::new(text))?,
            false => ClusterSpec::parse(text)?,
        };
        let (job, task) = task.rsplit_once(':').unwrap_or(("worker", task));
        let index = cluster.task_index(job, task)?;
        self.role_in(TaskSeat { cluster, job: job.to_owned(), index }, "--cluster", false).map(Some)
    }

    /// The task of a parameter server, if `TF_CONFIG` says that this process is one.
    pub fn ps_seat(&self) -> Result<Option<TaskSeat>> {
        if self.is_joined() || self.ps.is_some() || self.workers.is_some() {
            return Ok(None);
        }
        Ok(match own_place() {
            Ok(Found { place: Place::Task(seat), .. }) if seat.job == "ps" => Some(seat),
            // What is wrong with it is said where a training begins.
            _ => None,
        })
    }

    fn role_in(&self, seat: TaskSeat, source: &str, ends_ps: bool) -> Result<Role> {
        let (n_ps, n_workers) = (seat.n_ps(), seat.n_replicas());
        let Some(replica) = seat.replica() else {
            let what = match seat.job.as_str() {
                "evaluator" => {
                    "looks on while others train, and `kolo train` has no evaluator: leave it out, the chief tests at the end"
                }
                "ps" => "keeps variables: start it with `kolo serve`",
                _ => "is none that trains: those are chief, master and worker",
            };
            return Err(Error::invalid_argument(format!(
                "{source} says that this is {}:{}, which {what}",
                seat.job, seat.index
            )));
        };
        if n_ps == 0 {
            return Err(Error::invalid_argument(format!("{source} has no job 'ps' to keep the variables")));
        }
        let TaskSeat { cluster, job, index } = seat;
        Ok(Role {
            location: TaskLocation::Here(cluster),
            job,
            index,
            replica,
            ends_ps,
            n_ps,
            n_workers,
            mode: self.mode()?,
        })
    }

    /// The task of a server in its cluster, as the server reports it.
    fn role_of(&self, target: &str) -> Result<Role> {
        let security = self.security.read()?;
        wait_for_server(target, self.target_deadline)?;
        let session = Session::connect_secured(target, &crate::graph(), SessionConfig::default(), &security)
            .map_err(|error| error.context("--target"))?;
        // A server names its own devices first.
        let tasks: Vec<TaskName> =
            session.list_devices().iter().map(|device| TaskName::new(&device.name.job, device.name.task)).collect();
        let count = |job: &str| tasks.iter().filter(|task| &*task.job == job).collect::<BTreeSet<_>>().len();
        let (n_ps, n_workers) = (count("ps"), count("worker"));
        match tasks.first() {
            Some(own) if &*own.job == "worker" && n_ps > 0 => {
                let (location, job, index) = (TaskLocation::At(target.to_owned()), own.job.to_string(), own.task);
                let (replica, mode) = (index as usize, self.mode()?);
                Ok(Role { location, job, index, replica, ends_ps: false, n_ps, n_workers, mode })
            }
            Some(own) if n_ps > 0 => Err(Error::invalid_argument(format!(
                "--target {target} is {own}; workers train, so give the address of one of those"
            ))),
            _ => Err(Error::invalid_argument(format!(
                "the cluster of --target {target} has no job 'ps' to keep the variables"
            ))),
        }
    }

    /// How updates of several workers meet.
    pub fn mode(&self) -> Result<UpdateMode> {
        let flags = [("--sync", &self.sync), ("--async", &self.asynchronous), ("--hybrid", &self.hybrid)];
        match flags.iter().find_map(|(flag, value)| value.as_ref().map(|value| (flag, value))) {
            Some((flag, value)) => UpdateMode::from_flag(flag, Some(value)),
            None => Ok(UpdateMode::default()),
        }
    }
}

impl Role {
    /// The worker that initialises, saves and tests.
    pub fn is_chief(&self) -> bool {
        self.replica == 0
    }

    /// What follows from its place among the workers.
    pub fn seat(&self) -> WorkerSeat {
        let replicas = (self.replica, self.n_workers);
        WorkerSeat::at(&self.job, self.index, replicas, self.n_ps, self.mode)
    }
}

/// Waits until somebody listens at `target`, for so many seconds: a session waits as long as it takes.
fn wait_for_server(target: &str, seconds: f64) -> Result<()> {
    let address = target
        .strip_prefix("grpc://")
        .ok_or_else(|| Error::invalid_argument(format!("--target '{target}' is not like grpc://HOST:PORT")))?;
    let patience = Duration::try_from_secs_f64(seconds)
        .map_err(|_| Error::invalid_argument(format!("--target-deadline {seconds} is not a number of seconds")))?;
    let deadline = Instant::now() + patience.min(Duration::from_secs(1 << 30));
    let mut pause = Duration::from_millis(10);
    loop {
        let Err(why) = reach(address, deadline) else { return Ok(()) };
        if Instant::now() + pause >= deadline {
            return Err(Error::deadline_exceeded(format!(
                "nobody answered at --target {target} in {seconds} s: {why}; start `kolo serve` there, or check the \
                 address (--target-deadline waits longer)"
            )));
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(250));
    }
}

/// Connects to any of a host's addresses, and hangs up.
fn reach(address: &str, deadline: Instant) -> std::io::Result<()> {
    let mut last = std::io::Error::new(std::io::ErrorKind::NotFound, "the name has no address");
    for address in address.to_socket_addrs()? {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(10));
        match TcpStream::connect_timeout(&address, left) {
            Ok(_) => return Ok(()),
            Err(error) => last = error,
        }
    }
    Err(last)
}
