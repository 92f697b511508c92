//! Clusters in flags and files.

use std::collections::BTreeMap;
use std::path::Path;

use kolo_core::{Code, Error, Result};
use serde_json::{Map, Value};

use super::ClusterSpec;

/// The size limit of a cluster file, far more than any cluster needs.
const MAX_FILE_BYTES: u64 = 1 << 24;

impl ClusterSpec {
    /// Parses `ps=host:port,host:port;worker=host:port`, or JSON.
    pub fn parse(text: &str) -> Result<ClusterSpec> {
        if text.trim_start().starts_with('{') {
            return ClusterSpec::from_json(text);
        }
        let jobs = text.split(';').filter(|job| !job.trim().is_empty()).map(|job| {
            let (name, addresses) = job.split_once('=').ok_or_else(|| {
                Error::invalid_argument(format!("'{}' in a cluster is not job=host:port,host:port", job.trim()))
            })?;
            let addresses: Vec<&str> = addresses.split(',').map(str::trim).collect();
            if let Some(task) = addresses.iter().position(|address| address.is_empty()) {
                let name = name.trim();
                return Err(Error::invalid_argument(format!(
                    "{name}:{task}: an address is missing before or after a comma"
                )));
            }
            Ok((name.trim(), addresses))
        });
        ClusterSpec::from_lists(jobs.collect::<Result<Vec<_>>>()?)
    }

    /// Parses a JSON object: `{"ps": ["host:port"], "worker": {"0": "host:port", "3": "host:port"}}`. It may also be
    /// the field `cluster` of an object, as in `TF_CONFIG`.
    pub fn from_json(text: &str) -> Result<ClusterSpec> {
        let value: Value = serde_json::from_str(text).map_err(|error| not_json("a cluster", &error))?;
        match &value {
            Value::Object(outer) => match outer.get("cluster") {
                Some(Value::Object(jobs)) if !jobs.is_empty() => from_object(jobs),
                _ => from_object(outer),
            },
            _ => Err(Error::invalid_argument("a cluster in JSON must be an object of jobs")),
        }
    }

    /// Reads a file in either form.
    pub fn read(path: &Path) -> Result<ClusterSpec> {
        let cannot = |code: Code, why: String| {
            Error::new(code, format!("the cluster '{}' cannot be read: {why}", path.display()))
        };
        let length = std::fs::metadata(path).map(|metadata| metadata.len());
        match length {
            Ok(length) if length > MAX_FILE_BYTES => {
                return Err(cannot(Code::ResourceExhausted, format!("{length} bytes")));
            }
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(cannot(Code::NotFound, error.to_string()));
            }
            Err(error) => return Err(cannot(Code::FailedPrecondition, error.to_string())),
        }
        let text =
            std::fs::read_to_string(path).map_err(|error| cannot(Code::FailedPrecondition, error.to_string()))?;
        // A file may have a job on each line.
        let text = if text.trim_start().starts_with('{') { text } else { text.replace('\n', ";") };
        ClusterSpec::parse(&text).map_err(|error| error.context(path.display()))
    }
}

/// Jobs from a JSON object: lists of addresses, or objects of addresses by task index.
pub(super) fn from_object(jobs: &Map<String, Value>) -> Result<ClusterSpec> {
    let address = |job: &str, task: &dyn std::fmt::Display, value: &Value| match value {
        Value::String(address) => Ok(address.clone()),
        other => {
            Err(Error::invalid_argument(format!("{job}:{task} should be an address in quotes, found {}", kind(other))))
        }
    };
    let mut all = BTreeMap::new();
    for (job, value) in jobs {
        let mut tasks = BTreeMap::new();
        match value {
            Value::Array(addresses) => {
                for (task, value) in (0u32..).zip(addresses) {
                    tasks.insert(task, address(job, &task, value)?);
                }
            }
            Value::Object(addresses) => {
                for (text, value) in addresses {
                    let task: u32 = text.parse().map_err(|_| {
                        Error::invalid_argument(format!("job '{job}': '{text}' is not a task index; 0, 1, 2, .. are"))
                    })?;
                    if tasks.insert(task, address(job, &task, value)?).is_some() {
                        return Err(Error::invalid_argument(format!("{job}:{task} is given twice")));
                    }
                }
            }
            other => {
                return Err(Error::invalid_argument(format!(
                    "job '{job}' should be a list of addresses, or an object of them by task index; found {}",
                    kind(other)
                )));
            }
        }
        all.insert(job.clone(), tasks);
    }
    ClusterSpec::new(all)
}

/// Describes a JSON value for error messages.
pub(super) fn kind(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Bool(_) | Value::Number(_) => value.to_string(),
        Value::String(text) => format!("the text '{}'", text.chars().take(80).collect::<String>()),
        Value::Array(_) => "a list".into(),
        Value::Object(_) => "an object".into(),
    }
}

pub(super) fn not_json(what: &str, error: &serde_json::Error) -> Error {
    Error::invalid_argument(format!("{what} is not JSON: {error}"))
}
