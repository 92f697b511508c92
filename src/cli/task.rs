//! Flags that name a cluster and a task of it, or `TF_CONFIG` in their place.

use std::path::Path;

use crate::{ClusterSpec, Error, Result, TfConfig};

/// A cluster, and this process's task in it.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct TaskFlags {
    /// Use this cluster: JOB=HOST:PORT,HOST:PORT;JOB=... or a JSON file [default: $TF_CONFIG]
    #[arg(long, value_name = "TASKS")]
    pub cluster: Option<String>,
    /// Run a task of this job [default: $TF_CONFIG's]
    #[arg(long, value_name = "NAME")]
    pub job: Option<String>,
    /// Run the task with this index in the job [default: $TF_CONFIG's]
    #[arg(long, value_name = "N")]
    pub task: Option<String>,
}

impl TaskFlags {
    /// The cluster, and the job and index of this task.
    pub fn read(&self) -> Result<(ClusterSpec, String, u32)> {
        let environment = environment()?;
        let cluster = cluster(self.cluster.as_deref(), environment.as_ref())?;
        let from_environment = environment.and_then(|config| config.task);
        let job = self.job.clone().or_else(|| from_environment.as_ref().map(|task| task.job.clone()));
        let job = job.ok_or_else(|| {
            Error::invalid_argument(format!("which job is this task of? --job is one of {}", jobs(&cluster)))
        })?;
        let task = match (&self.task, from_environment) {
            (Some(text), _) => cluster.task_index(&job, text)?,
            (None, Some(task)) if self.job.is_none() => task.index,
            (None, _) => match cluster.tasks(&job).map(|(task, _)| task).collect::<Vec<_>>()[..] {
                [only] => only,
                // An index that is no number makes the message that names the valid ones.
                _ => cluster.task_index(&job, "")?,
            },
        };
        Ok((cluster, job, task))
    }
}

/// The contents of `TF_CONFIG`, if it is set.
pub fn environment() -> Result<Option<TfConfig>> {
    match std::env::var("TF_CONFIG") {
        Ok(text) if !text.trim().is_empty() => TfConfig::parse(&text).map(Some),
        _ => Ok(None),
    }
}

/// The cluster of a flag or a file, else that of the environment.
pub fn cluster(flag: Option<&str>, environment: Option<&TfConfig>) -> Result<ClusterSpec> {
    match (flag, environment.and_then(|config| config.cluster.clone())) {
        (Some(text), _) if Path::new(text).is_file() => ClusterSpec::read(Path::new(text)),
        (Some(text), _) => ClusterSpec::parse(text),
        (None, Some(cluster)) => Ok(cluster),
        (None, None) => Err(Error::invalid_argument(
            "no cluster: say --cluster 'ps=HOST:PORT;worker=HOST:PORT' --job NAME --task N, or set TF_CONFIG",
        )),
    }
}

fn jobs(cluster: &ClusterSpec) -> String {
    cluster.jobs().collect::<Vec<_>>().join(", ")
}
