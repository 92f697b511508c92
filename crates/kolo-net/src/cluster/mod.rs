//! The tasks of a cluster: jobs, task indices, addresses.
//!
//! A [`ClusterSpec`] is validated when it is constructed, from any source, so that a wrong one is refused by the first
//! process that reads it and not by a later one that waits for a task that will never start.

mod address;
mod text;
mod tf_config;

use std::collections::BTreeMap;
use std::fmt;

use kolo_core::{Error, Result};

use crate::wire::proto::{ClusterDef, JobDef};

pub(crate) use address::is_host_name;
pub use tf_config::{Task, TfConfig};

/// The tasks of a cluster: for each job, addresses by task index. Indices may have gaps.
///
/// ```
/// use kolo_net::cluster::ClusterSpec;
///
/// let cluster = ClusterSpec::parse("ps=ps0.example:2222; worker=w0.example:2222,w1.example:2222")?;
/// assert_eq!(cluster.address("worker", 1)?, "w1.example:2222");
/// assert_eq!(ClusterSpec::from_lists([("ps", vec!["[::1]:2222"])])?.n_tasks(), 1);
/// # Ok::<(), kolo_core::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct ClusterSpec {
    jobs: BTreeMap<String, BTreeMap<u32, String>>,
}

impl ClusterSpec {
    /// A cluster of these jobs, each with addresses by task index. Jobs without tasks are left out; a cluster of nothing else
    /// is an error.
    pub fn new(mut jobs: BTreeMap<String, BTreeMap<u32, String>>) -> Result<ClusterSpec> {
        if jobs.is_empty() {
            return Err(Error::invalid_argument("a cluster needs a job, such as worker=localhost:2222"));
        }
        let mut seen: BTreeMap<String, (String, u32)> = BTreeMap::new();
        for (job, tasks) in &jobs {
            check_job_name(job)?;
            if tasks.is_empty() && jobs.values().all(BTreeMap::is_empty) {
                return Err(Error::invalid_argument(format!("job '{job}' has no tasks")));
            }
            for (&task, address) in tasks {
                if i32::try_from(task).is_err() {
                    return Err(Error::invalid_argument(format!(
                        "job '{job}' has a task {task}; the largest is {}",
                        i32::MAX
                    )));
                }
                let parsed = address::parse(address).map_err(|error| error.context(format!("{job}:{task}")))?;
                // Port 0 means any free port, so several tasks may have it.
                if parsed.port != 0
                    && let Some((other_job, other_task)) = seen.insert(parsed.canonical(), (job.clone(), task))
                {
                    return Err(Error::invalid_argument(format!(
                        "{other_job}:{other_task} and {job}:{task} have the same address, {address}"
                    )));
                }
            }
        }
        jobs.retain(|_, tasks| !tasks.is_empty());
        Ok(ClusterSpec { jobs })
    }

    /// A cluster of these jobs, each with the addresses of tasks 0, 1, 2, ..
    pub fn from_lists<J, L, A>(jobs: impl IntoIterator<Item = (J, L)>) -> Result<ClusterSpec>
    where
        J: Into<String>,
        L: IntoIterator<Item = A>,
        A: Into<String>,
    {
        let mut all = BTreeMap::new();
        for (job, addresses) in jobs {
            let tasks: BTreeMap<u32, String> = (0..).zip(addresses.into_iter().map(Into::into)).collect();
            let job = job.into();
            if all.insert(job.clone(), tasks).is_some() {
                return Err(Error::invalid_argument(format!("job '{job}' is given twice")));
            }
        }
        ClusterSpec::new(all)
    }

    /// The jobs' names, in order.
    pub fn jobs(&self) -> impl Iterator<Item = &str> {
        self.jobs.keys().map(String::as_str)
    }

    /// The tasks of a job, in order; none if there is no such job.
    pub fn tasks(&self, job: &str) -> impl Iterator<Item = (u32, &str)> {
        self.jobs.get(job).into_iter().flatten().map(|(&task, address)| (task, address.as_str()))
    }

    /// All tasks, in order: job, index, address.
    pub fn all_tasks(&self) -> impl Iterator<Item = (&str, u32, &str)> {
        self.jobs().flat_map(|job| self.tasks(job).map(move |(task, address)| (job, task, address)))
    }

    /// The number of tasks.
    pub fn n_tasks(&self) -> usize {
        self.jobs.values().map(BTreeMap::len).sum()
    }

    /// A task's address; if there is no such task, an error that lists the existing ones.
    pub fn address(&self, job: &str, task: u32) -> Result<&str> {
        self.tasks_of(job)?.get(&task).map(String::as_str).ok_or_else(|| self.no_task(job, task))
    }

    /// Parses the index of a task of `job`. The error for anything else lists the valid ones.
    pub fn task_index(&self, job: &str, text: &str) -> Result<u32> {
        let tasks = self.tasks_of(job)?;
        match text.trim().parse::<u32>() {
            Ok(task) if tasks.contains_key(&task) => Ok(task),
            Ok(task) => Err(self.no_task(job, task)),
            Err(_) => Err(Error::invalid_argument(format!(
                "'{text}' is not a task of job '{job}', which has {}",
                self.valid_tasks(job)
            ))),
        }
    }

    /// A hash of the cluster.
    pub fn fingerprint(&self) -> u64 {
        // FNV-1a: the same on every machine and in every release.
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        for byte in self.to_string().bytes() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        hash
    }

    /// Describes where two clusters first differ; `None` if they are equal.
    pub fn first_difference(&self, other: &ClusterSpec) -> Option<String> {
        let (mut left, mut right) = (self.all_tasks(), other.all_tasks());
        loop {
            let (left, right) = (left.next(), right.next());
            if left == right {
                left?;
                continue;
            }
            let show = |task: Option<(&str, u32, &str)>| match task {
                Some((job, task, address)) => format!("{job}:{task} is {address}"),
                None => "no more tasks".to_owned(),
            };
            return Some(format!("{} here, {} there", show(left), show(right)));
        }
    }

    /// This cluster as a message.
    pub fn to_def(&self) -> ClusterDef {
        let job = self.jobs.iter().map(|(name, tasks)| JobDef {
            name: name.clone(),
            // `new` has checked that they fit.
            tasks: tasks
                .iter()
                .filter_map(|(&task, address)| Some((i32::try_from(task).ok()?, address.clone())))
                .collect(),
        });
        ClusterDef { job: job.collect() }
    }

    /// The cluster in a message.
    pub fn from_def(def: &ClusterDef) -> Result<ClusterSpec> {
        let mut jobs = BTreeMap::new();
        for job in &def.job {
            let mut tasks = BTreeMap::new();
            for (&task, address) in &job.tasks {
                let index = u32::try_from(task)
                    .map_err(|_| Error::invalid_argument(format!("job '{}' has a task {task}", job.name)))?;
                tasks.insert(index, address.clone());
            }
            if jobs.insert(job.name.clone(), tasks).is_some() {
                return Err(Error::invalid_argument(format!("job '{}' is given twice", job.name)));
            }
        }
        ClusterSpec::new(jobs)
    }

    fn tasks_of(&self, job: &str) -> Result<&BTreeMap<u32, String>> {
        self.jobs.get(job).ok_or_else(|| {
            let jobs: Vec<_> = self.jobs().collect();
            Error::invalid_argument(format!("the cluster has no job '{job}'; it has {}", jobs.join(", ")))
        })
    }

    fn no_task(&self, job: &str, task: u32) -> Error {
        Error::invalid_argument(format!("job '{job}' has no task {task}; it has {}", self.valid_tasks(job)))
    }

    /// `task 0`, `tasks 0 to 4`, or a list if there are gaps.
    fn valid_tasks(&self, job: &str) -> String {
        const SHOWN: usize = 20;
        let tasks: Vec<u32> = self.tasks(job).map(|(task, _)| task).collect();
        match tasks[..] {
            [only] => format!("task {only}"),
            [first, .., last] if (last - first) as usize + 1 == tasks.len() => format!("tasks {first} to {last}"),
            _ => {
                let shown: Vec<_> = tasks.iter().take(SHOWN).map(u32::to_string).collect();
                let more = if tasks.len() > SHOWN { ", …" } else { "" };
                format!("tasks {}{more}", shown.join(", "))
            }
        }
    }
}

/// One line per task: `worker:0 host:port`.
impl fmt::Display for ClusterSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.all_tasks().try_for_each(|(job, task, address)| writeln!(f, "{job}:{task} {address}"))
    }
}

impl fmt::Debug for ClusterSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(&self.jobs).finish()
    }
}

/// A job's name is a letter, then letters, digits and underscores, since it is a part of device names.
fn check_job_name(job: &str) -> Result<()> {
    let mut letters = job.bytes();
    let good = letters.next().is_some_and(|first| first.is_ascii_alphabetic())
        && letters.all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    match good {
        true => Ok(()),
        false => Err(Error::invalid_argument(format!(
            "'{job}' is not a job's name: a letter, then letters, digits and underscores"
        ))),
    }
}

#[cfg(test)]
mod tests;
