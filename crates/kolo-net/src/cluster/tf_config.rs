//! `TF_CONFIG`: the cluster and this process's task in it, in one environment variable.

use kolo_core::{Error, Result};
use serde_json::{Map, Value};

use super::{ClusterSpec, text};

/// A task of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    /// The job, such as `worker`.
    pub job: String,
    /// The index in the job.
    pub index: u32,
}

/// The contents of `TF_CONFIG`.
///
/// ```
/// use kolo_net::cluster::TfConfig;
///
/// let config = TfConfig::parse(r#"{
///     "cluster": {"chief": ["host0:2222"], "ps": ["host1:2222"], "worker": ["host2:2222"]},
///     "task": {"type": "worker", "index": "0"}
/// }"#)?;
/// assert_eq!(config.task.as_ref().map(|task| task.job.as_str()), Some("worker"));
/// assert!(!config.is_chief());
/// # Ok::<(), kolo_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TfConfig {
    /// The cluster; `None` if there is only this process.
    pub cluster: Option<ClusterSpec>,
    /// The task of this process.
    pub task: Option<Task>,
    /// `cloud`, for example. Not used.
    pub environment: Option<String>,
}

/// A job that only evaluates, and so need not be in the cluster.
const EVALUATOR: &str = "evaluator";

/// Two names for the same role.
const CHIEFS: [&str; 2] = ["chief", "master"];

impl TfConfig {
    /// Reads the value of `TF_CONFIG`.
    pub fn parse(value: &str) -> Result<TfConfig> {
        let parsed: Value = serde_json::from_str(value).map_err(|error| text::not_json("TF_CONFIG", &error))?;
        let Value::Object(fields) = &parsed else {
            return Err(Error::invalid_argument(format!(
                "TF_CONFIG should be a JSON object, found {}",
                text::kind(&parsed)
            )));
        };
        read(fields).map_err(|error| error.context("TF_CONFIG"))
    }

    /// Whether this process is the chief: the `chief` or `master` task, or the first worker if there is neither, or the
    /// only process.
    pub fn is_chief(&self) -> bool {
        let (Some(cluster), Some(task)) = (&self.cluster, &self.task) else { return self.cluster.is_none() };
        if CHIEFS.iter().any(|chief| cluster.jobs().any(|job| job == *chief)) {
            return CHIEFS.contains(&task.job.as_str());
        }
        task.job == "worker" && cluster.tasks("worker").next().is_some_and(|(first, _)| first == task.index)
    }
}

fn read(fields: &Map<String, Value>) -> Result<TfConfig> {
    let cluster = match fields.get("cluster") {
        None | Some(Value::Null) => None,
        Some(Value::Object(jobs)) if jobs.is_empty() => None,
        Some(Value::Object(jobs)) => Some(text::from_object(jobs).map_err(|error| error.context("cluster"))?),
        Some(other) => return Err(expected("'cluster'", "an object of jobs", other)),
    };
    if let Some(cluster) = &cluster {
        check_chiefs(cluster)?;
    }
    let task = match fields.get("task") {
        None | Some(Value::Null) => None,
        Some(Value::Object(task)) if task.is_empty() => None,
        Some(Value::Object(task)) => Some(read_task(task, cluster.as_ref())?),
        Some(other) => return Err(expected("'task'", "an object with 'type' and 'index'", other)),
    };
    if let (Some(cluster), None) = (&cluster, &task)
        && cluster.n_tasks() > 1
    {
        return Err(Error::invalid_argument(
            "there is a cluster, but no 'task': which of its tasks is this process? Give {\"type\": .., \"index\": ..}",
        ));
    }
    let environment = match fields.get("environment") {
        None | Some(Value::Null) => None,
        Some(Value::String(environment)) => Some(environment.clone()),
        Some(other) => return Err(expected("'environment'", "a text", other)),
    };
    Ok(TfConfig { cluster, task, environment })
}

fn check_chiefs(cluster: &ClusterSpec) -> Result<()> {
    let chiefs: Vec<_> = cluster.all_tasks().filter(|(job, ..)| CHIEFS.contains(job)).collect();
    match chiefs[..] {
        [] | [_] => Ok(()),
        [(first, a, _), (second, b, _), ..] => Err(Error::invalid_argument(format!(
            "cluster: {first}:{a} and {second}:{b} cannot both lead; there is one chief (or master)"
        ))),
    }
}

fn read_task(task: &Map<String, Value>, cluster: Option<&ClusterSpec>) -> Result<Task> {
    let job = match task.get("type") {
        Some(Value::String(job)) => job.clone(),
        Some(other) => return Err(expected("task: 'type'", "a job's name", other)),
        None => return Err(Error::invalid_argument("task: 'type' is missing; it names this process's job")),
    };
    let index = match task.get("index") {
        // A missing index is 0, as in TensorFlow.
        None | Some(Value::Null) => "0".to_owned(),
        Some(Value::Number(number)) => number.to_string(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => return Err(expected("task: 'index'", "a task index", other)),
    };
    let known = cluster.filter(|cluster| cluster.jobs().any(|name| name == job));
    let index = match (known, cluster) {
        (Some(cluster), _) => cluster.task_index(&job, &index).map_err(|error| error.context("task"))?,
        (None, Some(cluster)) if job != EVALUATOR => {
            // The error lists the jobs.
            cluster.address(&job, 0).map_err(|error| error.context("task"))?;
            0
        }
        (None, _) => index
            .trim()
            .parse()
            .map_err(|_| Error::invalid_argument(format!("task: '{index}' is not a task index; 0, 1, 2, .. are")))?,
    };
    Ok(Task { job, index })
}

fn expected(what: &str, wanted: &str, found: &Value) -> Error {
    Error::invalid_argument(format!("{what} should be {wanted}, found {}", text::kind(found)))
}
