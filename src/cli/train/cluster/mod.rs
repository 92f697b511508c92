//! Training on a cluster: one command that starts all its processes, and what each worker among them does.

mod launch;
mod view;
mod worker;

use std::path::Path;

use kolo::cluster::{ReplicaDeviceSetter, SyncReplicas};
use kolo::optim::Optimizer;
use kolo::{ClusterSpec, Error, Result};

pub use launch::launch;
pub use worker::run;

/// Flags about the cluster.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct ClusterFlags {
    /// Starts so many parameter servers on this machine
    #[arg(long, value_name = "N", help_heading = "Cluster")]
    pub ps: Option<usize>,
    /// Starts so many workers on this machine, each with a share of the data
    #[arg(long, value_name = "N", help_heading = "Cluster")]
    pub workers: Option<usize>,
    /// Workers wait for each other: an update is the mean of all their gradients
    #[arg(long, conflicts_with = "asynchronous", help_heading = "Cluster")]
    pub sync: bool,
    /// Workers do not wait for each other (the default)
    #[arg(long = "async", help_heading = "Cluster")]
    pub asynchronous: bool,
    /// All tasks, for processes that are started by hand: ps=HOST:PORT;worker=HOST:PORT,HOST:PORT or a JSON file
    #[arg(long, value_name = "TASKS", requires = "task", help_heading = "Cluster")]
    pub cluster: Option<String>,
    /// Which worker of --cluster this process is
    #[arg(long, value_name = "N", requires = "cluster", help_heading = "Cluster")]
    pub task: Option<String>,
    /// Ends when standard input ends: whoever started this process is gone
    #[arg(long, hide = true)]
    pub with_parent: bool,
}

/// A worker's place in its cluster.
#[derive(Clone, Debug)]
pub struct Role {
    pub cluster: ClusterSpec,
    pub task: u32,
    pub n_ps: usize,
    pub n_workers: usize,
    pub is_sync: bool,
}

impl ClusterFlags {
    /// True if this process is to start others.
    pub fn is_launcher(&self) -> bool {
        (self.ps.is_some() || self.workers.is_some()) && self.cluster.is_none()
    }

    /// What this process is in a cluster, if it is in one.
    pub fn role(&self) -> Result<Option<Role>> {
        let (Some(text), Some(task)) = (&self.cluster, &self.task) else { return Ok(None) };
        let cluster = match Path::new(text).is_file() {
            true => ClusterSpec::read(Path::new(text))?,
            false => ClusterSpec::parse(text)?,
        };
        let task = cluster.task_index("worker", task)?;
        let (n_ps, n_workers) = (cluster.tasks("ps").count(), cluster.tasks("worker").count());
        if n_ps == 0 {
            return Err(Error::invalid_argument("--cluster has no job 'ps' to keep the variables"));
        }
        Ok(Some(Role { cluster, task, n_ps, n_workers, is_sync: self.sync }))
    }
}

impl Role {
    /// The worker that initialises, saves and tests.
    pub fn is_chief(&self) -> bool {
        self.task == 0
    }

    /// Puts variables on parameter servers and all else here.
    pub fn setter(&self) -> ReplicaDeviceSetter {
        ReplicaDeviceSetter::new(self.n_ps).worker_device(&format!("/job:worker/task:{}", self.task))
    }

    /// The optimizer that the workers share.
    pub fn optimizer(&self, inner: Box<dyn Optimizer>) -> Updates {
        match self.is_sync {
            true => Updates::Sync(SyncReplicas::boxed(inner, self.n_workers)),
            false => Updates::Async(inner),
        }
    }

    /// How many global steps go through the data as often as one process would in `n_steps`.
    pub fn global_steps(&self, n_steps: u64) -> u64 {
        match self.is_sync {
            true => n_steps.div_ceil(self.n_workers as u64),
            false => n_steps,
        }
    }
}

/// How updates of several workers meet.
pub enum Updates {
    Async(Box<dyn Optimizer>),
    Sync(SyncReplicas),
}

impl Updates {
    pub fn optimizer(&self) -> &dyn Optimizer {
        match self {
            Updates::Async(inner) => &**inner,
            Updates::Sync(sync) => sync,
        }
    }
}
