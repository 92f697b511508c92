//! Device names. A [`DeviceSpec`] is a constraint and may be partial (`/job:ps`, `/gpu:0`); a [`DeviceName`] identifies
//! a device and has all five parts (`/job:localhost/replica:0/task:0/device:CPU:0`).
//!
//! The grammar is TensorFlow's, slightly more lenient: `/gpu:0`, `/GPU:0`, `/device:GPU:0`, `/device:gpu:0`, `gpu:0`
//! and `/gpu` are accepted, parts may come in any order, and a later part overrides an earlier one. `*` means
//! unspecified.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::{Error, Result};

/// A possibly partial device name; a part that is `None` is unspecified.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceSpec {
    /// `/job:NAME`
    pub job: Option<Arc<str>>,
    /// `/replica:N`
    pub replica: Option<u32>,
    /// `/task:N`
    pub task: Option<u32>,
    /// The device type, in capitals: `CPU`, `GPU`, …
    pub kind: Option<Arc<str>>,
    /// The index among devices of its type.
    pub id: Option<u32>,
}

/// What to do when merged specs disagree on the device's type or number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MergeConflict {
    /// It is an error.
    Refuse,
    /// Leave the conflicting part unspecified (soft placement).
    Open,
}

impl DeviceSpec {
    /// Parses a name. The empty string and `/` specify nothing.
    pub fn parse(text: &str) -> Result<DeviceSpec> {
        let malformed = |why: &str| {
            Error::invalid_argument(format!(
                "Malformed device specification '{text}': {why}; write for example /job:worker/task:1/device:GPU:0 or /cpu:0"
            ))
        };
        let mut spec = DeviceSpec::default();
        let body = text.strip_prefix('/').unwrap_or(text);
        if body.is_empty() {
            return Ok(spec);
        }
        for part in body.split('/') {
            let mut fields = part.split(':');
            let key = fields.next().unwrap_or_default();
            let rest: Vec<&str> = fields.collect();
            match (key.to_ascii_lowercase().as_str(), rest.as_slice()) {
                ("job", [job]) => {
                    spec.job = open(job)
                        .map(|job| {
                            identifier(job).ok_or_else(|| malformed("a job is a letter, then letters, digits or _"))
                        })
                        .transpose()?
                        .map(Arc::from)
                }
                ("replica", [n]) => spec.replica = open(n).map(number).transpose().map_err(|why| malformed(&why))?,
                ("task", [n]) => spec.task = open(n).map(number).transpose().map_err(|why| malformed(&why))?,
                ("device", [kind]) => (spec.kind, spec.id) = (kind_of(kind).map_err(|why| malformed(&why))?, None),
                ("device", [kind, n]) => {
                    spec.kind = kind_of(kind).map_err(|why| malformed(&why))?;
                    spec.id = open(n).map(number).transpose().map_err(|why| malformed(&why))?;
                }
                (kind @ ("cpu" | "gpu"), []) => (spec.kind, spec.id) = (Some(kind.to_ascii_uppercase().into()), None),
                (kind @ ("cpu" | "gpu"), [n]) => {
                    spec.kind = Some(kind.to_ascii_uppercase().into());
                    spec.id = open(n).map(number).transpose().map_err(|why| malformed(&why))?;
                }
                _ => return Err(malformed(&format!("'{part}' is not a part of a device name"))),
            }
        }
        Ok(spec)
    }

    /// True if nothing is specified.
    pub fn is_empty(&self) -> bool {
        *self == DeviceSpec::default()
    }

    /// True if every part that is specified is the same in `name`.
    pub fn matches(&self, name: &DeviceName) -> bool {
        let of = |wish: &Option<u32>, fact: u32| wish.is_none_or(|wish| wish == fact);
        self.job.as_ref().is_none_or(|job| **job == *name.job)
            && of(&self.replica, name.replica)
            && of(&self.task, name.task)
            && self.kind.as_ref().is_none_or(|kind| **kind == *name.kind)
            && of(&self.id, name.id)
    }

    /// True if no part is specified differently in both.
    pub fn compatible(&self, other: &DeviceSpec) -> bool {
        fn agree<T: PartialEq>(a: &Option<T>, b: &Option<T>) -> bool {
            a.is_none() || b.is_none() || a == b
        }
        agree(&self.job, &other.job)
            && agree(&self.replica, &other.replica)
            && agree(&self.task, &other.task)
            && agree(&self.kind, &other.kind)
            && agree(&self.id, &other.id)
    }

    /// The parts of both. Different jobs, replicas or tasks are an error; different types or numbers are an error or
    /// become unspecified, depending on `conflict`.
    pub fn merge(&self, other: &DeviceSpec, conflict: MergeConflict) -> Result<DeviceSpec> {
        fn pick<T: Clone + PartialEq>(a: &Option<T>, b: &Option<T>) -> Option<Option<T>> {
            match (a, b) {
                (Some(x), Some(y)) if x != y => None,
                (a, b) => Some(a.clone().or_else(|| b.clone())),
            }
        }
        let refuse = |what: &str| {
            Error::invalid_argument(format!("Cannot merge devices with incompatible {what}: '{self}' and '{other}'"))
        };
        let (kind, id) = match (pick(&self.kind, &other.kind), pick(&self.id, &other.id), conflict) {
            (Some(kind), Some(id), _) => (kind, id),
            (None, _, MergeConflict::Refuse) => return Err(refuse("types")),
            (_, None, MergeConflict::Refuse) => return Err(refuse("ids")),
            (None, _, MergeConflict::Open) => (None, None),
            (Some(kind), None, MergeConflict::Open) => (kind, None),
        };
        Ok(DeviceSpec {
            job: pick(&self.job, &other.job).ok_or_else(|| refuse("jobs"))?,
            replica: pick(&self.replica, &other.replica).ok_or_else(|| refuse("replicas"))?,
            task: pick(&self.task, &other.task).ok_or_else(|| refuse("tasks"))?,
            kind,
            id,
        })
    }

    /// This spec with the parts that `inner` specifies replaced, as a device scope inside another one does. A type
    /// without a number drops the outer number.
    pub fn overridden_by(&self, inner: &DeviceSpec) -> DeviceSpec {
        DeviceSpec {
            job: inner.job.clone().or_else(|| self.job.clone()),
            replica: inner.replica.or(self.replica),
            task: inner.task.or(self.task),
            kind: inner.kind.clone().or_else(|| self.kind.clone()),
            id: if inner.kind.is_some() { inner.id } else { inner.id.or(self.id) },
        }
    }

    /// The full name, if every part is specified.
    pub fn full(&self) -> Option<DeviceName> {
        Some(DeviceName {
            job: self.job.clone()?,
            replica: self.replica?,
            task: self.task?,
            kind: self.kind.clone()?,
            id: self.id?,
        })
    }
}

/// `*` and the empty string mean unspecified.
fn open(text: &str) -> Option<&str> {
    (text != "*").then_some(text)
}

fn identifier(text: &str) -> Option<&str> {
    let mut chars = text.chars();
    let starts_well = chars.next().is_some_and(|c| c.is_ascii_alphabetic());
    (starts_well && chars.all(|c| c.is_ascii_alphanumeric() || c == '_')).then_some(text)
}

fn number(text: &str) -> Result<u32, String> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    text.parse().ok().filter(|_| digits).ok_or_else(|| format!("'{text}' is not a number from 0 to {}", u32::MAX))
}

fn kind_of(text: &str) -> Result<Option<Arc<str>>, String> {
    match open(text) {
        None => Ok(None),
        Some(kind) => identifier(kind)
            .map(|kind| Some(kind.to_ascii_uppercase().into()))
            .ok_or_else(|| format!("'{kind}' is not a device type")),
    }
}

impl FromStr for DeviceSpec {
    type Err = Error;
    fn from_str(text: &str) -> Result<DeviceSpec> {
        DeviceSpec::parse(text)
    }
}

impl fmt::Display for DeviceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(job) = &self.job {
            write!(f, "/job:{job}")?;
        }
        if let Some(replica) = self.replica {
            write!(f, "/replica:{replica}")?;
        }
        if let Some(task) = self.task {
            write!(f, "/task:{task}")?;
        }
        match (&self.kind, self.id) {
            (None, None) => Ok(()),
            (kind, id) => {
                write!(f, "/device:{}:", kind.as_deref().unwrap_or("*"))?;
                match id {
                    Some(id) => write!(f, "{id}"),
                    None => f.write_str("*"),
                }
            }
        }
    }
}

/// A full device name.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceName {
    /// `/job:NAME`; `localhost` in a local session.
    pub job: Arc<str>,
    /// `/replica:N`
    pub replica: u32,
    /// `/task:N`
    pub task: u32,
    /// The type, in capitals.
    pub kind: Arc<str>,
    /// The number among devices of its type.
    pub id: u32,
}

impl DeviceName {
    /// A device of the in-process session: `/job:localhost/replica:0/task:0/device:KIND:ID`.
    pub fn local(kind: &str, id: u32) -> DeviceName {
        DeviceName { job: "localhost".into(), replica: 0, task: 0, kind: kind.into(), id }
    }

    /// Parses a full name; a partial one is an error.
    pub fn parse(text: &str) -> Result<DeviceName> {
        DeviceSpec::parse(text)?
            .full()
            .ok_or_else(|| Error::invalid_argument(format!("'{text}' is not a full device name")))
    }

    /// The spec that only this device matches.
    pub fn spec(&self) -> DeviceSpec {
        DeviceSpec {
            job: Some(self.job.clone()),
            replica: Some(self.replica),
            task: Some(self.task),
            kind: Some(self.kind.clone()),
            id: Some(self.id),
        }
    }

    /// True if both are devices of one process.
    pub fn same_task(&self, other: &DeviceName) -> bool {
        self.job == other.job && self.replica == other.replica && self.task == other.task
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DeviceName { job, replica, task, kind, id } = self;
        write!(f, "/job:{job}/replica:{replica}/task:{task}/device:{kind}:{id}")
    }
}

impl fmt::Debug for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn check(text: &str, expect: &str) {
        assert_eq!(DeviceSpec::parse(text).map(|spec| spec.to_string()).as_deref(), Ok(expect), "{text}");
    }

    #[test]
    fn all_spellings_are_read() {
        check("", "");
        check("/", "");
        check("/cpu:0", "/device:CPU:0");
        check("/gpu:1", "/device:GPU:1");
        check("/GPU:1", "/device:GPU:1");
        check("/device:gpu:2", "/device:GPU:2");
        check("/device:GPU:2", "/device:GPU:2");
        check("GPU:2", "/device:GPU:2");
        check("/gpu", "/device:GPU:*");
        check("/cpu:*", "/device:CPU:*");
        check("/device:*:3", "/device:*:3");
        check("/job:ps/task:0", "/job:ps/task:0");
        check("/task:1/job:worker/cpu:0", "/job:worker/task:1/device:CPU:0");
        check("/job:a/job:b", "/job:b");
        check("/job:*/replica:0", "/replica:0");
        check("/job:localhost/replica:0/task:0/cpu:0", "/job:localhost/replica:0/task:0/device:CPU:0");
        check("/device:XLA_CPU:0", "/device:XLA_CPU:0");
    }

    #[test]
    fn anything_else_is_refused_by_name() {
        for text in [
            "cpu0",
            "/job:",
            "/job:1a",
            "/task:-1",
            "/task:+1",
            "/task:99999999999",
            "/device:",
            "/gpu:x",
            "//",
            "/tpu:0",
            "/job:a:b",
            "/gpu:0:1",
        ] {
            let error = DeviceSpec::parse(text).expect_err(text);
            assert!(error.message().contains(text), "{error}");
        }
    }

    #[test]
    fn merging_conflicts_are_refused_or_opened() {
        let merge = |a: &str, b: &str, conflict| {
            DeviceSpec::parse(a)
                .and_then(|a| a.merge(&DeviceSpec::parse(b)?, conflict))
                .map(|spec| spec.to_string())
                .map_err(|error| error.message().to_owned())
        };
        assert_eq!(merge("/job:ps", "/gpu:0", MergeConflict::Refuse), Ok("/job:ps/device:GPU:0".into()));
        assert_eq!(
            merge("/job:ps", "/job:worker", MergeConflict::Open),
            Err("Cannot merge devices with incompatible jobs: '/job:ps' and '/job:worker'".into())
        );
        assert!(merge("/gpu:0", "/cpu:0", MergeConflict::Refuse).is_err());
        assert_eq!(merge("/gpu:0", "/cpu:0", MergeConflict::Open), Ok("".into()));
        assert_eq!(merge("/gpu:0", "/gpu:1", MergeConflict::Open), Ok("/device:GPU:*".into()));
    }

    #[test]
    fn inner_scopes_override_part_by_part() {
        let nest =
            |a: &str, b: &str| DeviceSpec::parse(a).unwrap().overridden_by(&DeviceSpec::parse(b).unwrap()).to_string();
        assert_eq!(nest("/job:ps/cpu:0", "/gpu:1"), "/job:ps/device:GPU:1");
        assert_eq!(nest("/gpu:1", "/job:worker"), "/job:worker/device:GPU:1");
        assert_eq!(nest("/gpu:1", "/cpu"), "/device:CPU:*");
    }

    fn any_spec() -> impl Strategy<Value = DeviceSpec> {
        let word = || proptest::option::of("[a-z][a-z0-9_]{0,6}");
        let number = || proptest::option::of(any::<u32>());
        (word(), number(), number(), proptest::option::of("[A-Z][A-Z0-9_]{0,6}"), number()).prop_map(
            |(job, replica, task, kind, id)| DeviceSpec {
                job: job.map(Into::into),
                replica,
                task,
                kind: kind.map(Into::into),
                id,
            },
        )
    }

    proptest! {
        #[test]
        fn printing_and_parsing_are_inverse(spec in any_spec()) {
            prop_assert_eq!(DeviceSpec::parse(&spec.to_string()).unwrap(), spec);
        }

        #[test]
        fn parsing_never_panics(text in ".{0,40}") {
            let _ = DeviceSpec::parse(&text);
        }

        #[test]
        fn a_merge_is_compatible_with_both(a in any_spec(), b in any_spec()) {
            match a.merge(&b, MergeConflict::Refuse) {
                Ok(merged) => prop_assert!(merged.compatible(&a) && merged.compatible(&b) && a.compatible(&b)),
                Err(_) => prop_assert!(!a.compatible(&b)),
            }
        }

        #[test]
        fn a_full_name_matches_its_own_parts(spec in any_spec()) {
            let name = DeviceName {
                job: spec.job.clone().unwrap_or_else(|| "j".into()),
                replica: spec.replica.unwrap_or(0),
                task: spec.task.unwrap_or(0),
                kind: spec.kind.clone().unwrap_or_else(|| "CPU".into()),
                id: spec.id.unwrap_or(0),
            };
            prop_assert!(spec.matches(&name));
            prop_assert_eq!(DeviceName::parse(&name.to_string()).unwrap(), name);
        }
    }
}
