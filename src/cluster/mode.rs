//! How the updates of many workers meet, as a choice: by flag, by name, in code.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use kolo_core::{Error, Result};
use kolo_graph::{Graph, Operation, Variable};

use super::{AsyncReplicas, HybridReplicas, Late, ParameterAveraging, SyncReplicas};
use crate::optim::{GradAndVar, Optimizer, leave_updates_to};
use crate::train::SessionHook;

/// How the updates of many workers meet.
///
/// ```
/// use std::time::Duration;
/// use kolo::cluster::{Late, UpdateMode};
///
/// let mode: UpdateMode = "hybrid timeout=200ms,min=0.75".parse()?;
/// assert_eq!(mode, UpdateMode::Hybrid { timeout: Duration::from_millis(200), min_share: 0.75, late: Late::Drop });
/// assert_eq!("sync".parse(), Ok(UpdateMode::Sync { replicas_to_aggregate: None }));
/// assert_eq!("async bound=4".parse(), Ok(UpdateMode::Async { staleness_bound: Some(4) }));
/// assert_eq!("average every=100".parse(), Ok(UpdateMode::Average { every: 100 }));
/// # Ok::<(), kolo::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum UpdateMode {
    /// Every worker when it likes: [`AsyncReplicas`].
    Async {
        /// How many updates a worker may be ahead of the slowest.
        staleness_bound: Option<u64>,
    },
    /// All together: [`SyncReplicas`].
    Sync {
        /// How many gradients make an update; as many as there are workers if absent. The workers beyond that are backup.
        replicas_to_aggregate: Option<usize>,
    },
    /// All together as long as they keep up: [`HybridReplicas`].
    Hybrid {
        /// How long the first worker of a step waits for the others.
        timeout: Duration,
        /// The share of the workers that is waited for in any case.
        min_share: f64,
        /// What becomes of late gradients.
        late: Late,
    },
    /// Each on its own, with the mean of the variables now and then: [`ParameterAveraging`].
    Average {
        /// After how many steps.
        every: u64,
    },
}

impl Default for UpdateMode {
    fn default() -> UpdateMode {
        UpdateMode::Async { staleness_bound: None }
    }
}

impl UpdateMode {
    /// Reads a flag (`sync`, `async`, `hybrid`, `average`) and its value, such as `timeout=200ms,min=0.75`.
    pub fn from_flag(flag: &str, value: Option<&str>) -> Result<UpdateMode> {
        let mut settings = Settings::parse(flag, value.unwrap_or(""))?;
        let mode = match flag.trim_start_matches("--") {
            "async" => UpdateMode::Async { staleness_bound: settings.number("bound")? },
            "sync" => UpdateMode::Sync { replicas_to_aggregate: settings.number("replicas")? },
            "hybrid" => UpdateMode::Hybrid {
                timeout: settings.duration("timeout")?.unwrap_or(Duration::from_millis(200)),
                min_share: settings.share("min")?.unwrap_or(0.75),
                late: settings.late("late")?.unwrap_or_default(),
            },
            "average" => UpdateMode::Average { every: settings.number("every")?.unwrap_or(10) },
            other => {
                return Err(Error::invalid_argument(format!(
                    "'{other}' is no update mode; there are async, sync, hybrid and average"
                )));
            }
        };
        settings.finish()?;
        match mode {
            UpdateMode::Sync { replicas_to_aggregate: Some(0) } | UpdateMode::Average { every: 0 } => {
                Err(Error::invalid_argument(format!("'{flag}' wants a number of 1 or more, not 0")))
            }
            mode => Ok(mode),
        }
    }

    /// Whether the model's variables belong on parameter servers; otherwise each worker has its own, and only their means are
    /// there ([`ParameterAveraging::servers`]).
    pub fn keeps_variables_on_servers(self) -> bool {
        !matches!(self, UpdateMode::Average { .. })
    }

    /// Wraps an optimizer for worker number `worker` of `n_workers`.
    pub fn wrap(self, inner: Box<dyn Optimizer>, worker: usize, n_workers: usize) -> Replicas {
        Replicas(match self {
            UpdateMode::Async { staleness_bound } => {
                let replicas = AsyncReplicas::boxed(inner, worker, n_workers);
                Kind::Async(match staleness_bound {
                    Some(bound) => replicas.staleness_bound(bound),
                    None => replicas,
                })
            }
            UpdateMode::Sync { replicas_to_aggregate } => {
                let n = replicas_to_aggregate.unwrap_or(n_workers);
                Kind::Sync(SyncReplicas::boxed(inner, n).total_num_replicas(n_workers))
            }
            UpdateMode::Hybrid { timeout, min_share, late } => {
                let replicas = HybridReplicas::boxed(inner, worker, n_workers);
                Kind::Hybrid(replicas.timeout(timeout).min_share(min_share).late(late))
            }
            UpdateMode::Average { every } => Kind::Average(ParameterAveraging::boxed(inner, every, worker, n_workers)),
        })
    }
}

impl FromStr for UpdateMode {
    type Err = Error;

    fn from_str(text: &str) -> Result<UpdateMode> {
        match text.trim().split_once([' ', ':']) {
            Some((flag, value)) => UpdateMode::from_flag(flag, Some(value)),
            None => UpdateMode::from_flag(text.trim(), None),
        }
    }
}

/// In the form that is read.
impl fmt::Display for UpdateMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            UpdateMode::Async { staleness_bound: None } => write!(f, "async"),
            UpdateMode::Async { staleness_bound: Some(bound) } => write!(f, "async bound={bound}"),
            UpdateMode::Sync { replicas_to_aggregate: None } => write!(f, "sync"),
            UpdateMode::Sync { replicas_to_aggregate: Some(n) } => write!(f, "sync replicas={n}"),
            UpdateMode::Hybrid { timeout, min_share, late } => {
                write!(f, "hybrid timeout={}ms,min={min_share},late={}", timeout.as_millis(), late.word())
            }
            UpdateMode::Average { every } => write!(f, "average every={every}"),
        }
    }
}

/// The settings of a flag that were not asked for yet.
struct Settings<'a> {
    flag: &'a str,
    list: Vec<(&'a str, &'a str)>,
    known: Vec<&'static str>,
}

impl<'a> Settings<'a> {
    fn parse(flag: &'a str, value: &'a str) -> Result<Settings<'a>> {
        let mut list: Vec<(&str, &str)> = Vec::new();
        for part in value.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let Some((key, value)) = part.split_once('=').map(|(key, value)| (key.trim(), value.trim())) else {
                return Err(Error::invalid_argument(format!(
                    "'{part}' of '{flag}' is not of the form key=value, such as timeout=200ms"
                )));
            };
            if list.iter().any(|(have, _)| *have == key) {
                return Err(Error::invalid_argument(format!("'{flag}' sets '{key}' twice")));
            }
            list.push((key, value));
        }
        Ok(Settings { flag, list, known: Vec::new() })
    }

    fn take(&mut self, key: &'static str) -> Option<&'a str> {
        self.known.push(key);
        let at = self.list.iter().position(|(have, _)| *have == key)?;
        Some(self.list.remove(at).1)
    }

    fn read<T>(&mut self, key: &'static str, wants: &str, read: impl Fn(&str) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.take(key) else { return Ok(None) };
        let flag = self.flag;
        let wrong = || Error::invalid_argument(format!("'{key}={value}' of '{flag}': wants {wants}"));
        read(value).ok_or_else(wrong).map(Some)
    }

    fn number<T: FromStr>(&mut self, key: &'static str) -> Result<Option<T>> {
        self.read(key, "a number, such as 4", |value| value.parse().ok())
    }

    fn share(&mut self, key: &'static str) -> Result<Option<f64>> {
        let wants = "a share from 0 to 1, such as 0.75";
        self.read(key, wants, |value| value.parse().ok().filter(|share| (0.0..=1.0).contains(share)))
    }

    fn late(&mut self, key: &'static str) -> Result<Option<Late>> {
        self.read(key, "drop, scale or queue", |value| {
            [Late::Drop, Late::Scale, Late::Queue].into_iter().find(|late| late.word() == value)
        })
    }

    fn duration(&mut self, key: &'static str) -> Result<Option<Duration>> {
        self.read(key, "a time, such as 200ms, 1.5s or 2m", |value| {
            let at = value.find(|c: char| c.is_ascii_alphabetic())?;
            let (number, unit) = value.split_at(at);
            let scale = match unit {
                "ms" => 0.001,
                "s" => 1.0,
                "m" => 60.0,
                _ => return None,
            };
            Duration::try_from_secs_f64(number.trim().parse::<f64>().ok()? * scale).ok()
        })
    }

    fn finish(self) -> Result<()> {
        match self.list.first() {
            None => Ok(()),
            Some((key, _)) => Err(Error::invalid_argument(format!(
                "'{}' has no setting '{key}'; it has {}",
                self.flag,
                self.known.join(", ")
            ))),
        }
    }
}

/// An optimizer for one of many workers; see [`UpdateMode::wrap`].
///
/// ```
/// use kolo::cluster::UpdateMode;
/// use kolo::optim::{Adam, Optimizer};
/// use kolo::train::{self, MonitoredTrainingSession, hooks::StopAtStep};
///
/// let g = kolo::graph();
/// let w = g.variable("w", 5.0f32);
/// let loss = w.read() * w.read();
/// let mode: UpdateMode = "sync".parse()?;
/// let optimizer = mode.wrap(Box::new(Adam::new(0.1)), 0, 1);
/// let train = optimizer.minimize(loss, Some(train::global_step_or_create(&g)?))?;
///
/// let hook = optimizer.hook(&g, true)?;
/// let mut session = MonitoredTrainingSession::new(&g).boxed_hook(hook).hook(StopAtStep::last(3)).build()?;
/// while !session.should_stop() {
///     session.run(&[], &[], &[train])?;
/// }
/// session.close()?;
/// # Ok::<(), kolo::Error>(())
/// ```
pub struct Replicas(Kind);

enum Kind {
    Async(AsyncReplicas),
    Sync(SyncReplicas),
    Hybrid(HybridReplicas),
    Average(ParameterAveraging),
}

impl Replicas {
    /// The hook with which a worker of a monitored session takes part; call it after the gradients were applied.
    pub fn hook<'g>(&self, graph: &'g Graph, is_chief: bool) -> Result<Box<dyn SessionHook<'g> + 'g>> {
        Ok(match &self.0 {
            Kind::Async(replicas) => Box::new(replicas.hook(graph)?),
            Kind::Sync(replicas) => Box::new(replicas.make_session_run_hook(graph, is_chief)?),
            Kind::Hybrid(replicas) => Box::new(replicas.hook(graph, is_chief)?),
            Kind::Average(replicas) => Box::new(replicas.hook(graph, is_chief)?),
        })
    }

    /// The same, where synchronous workers begin no step before the update of the one before: an update is then made of the gradients of
    /// all workers' batches, as one worker would with all of them, which costs the time in which workers could have been one step ahead.
    pub fn lockstep_hook<'g>(&self, graph: &'g Graph, is_chief: bool) -> Result<Box<dyn SessionHook<'g> + 'g>> {
        match &self.0 {
            Kind::Sync(replicas) => Ok(Box::new(replicas.make_session_run_hook(graph, is_chief)?.init_tokens(0))),
            Kind::Async(_) | Kind::Hybrid(_) | Kind::Average(_) => self.hook(graph, is_chief),
        }
    }

    /// The asynchronous optimizer, if it is one: for its staleness.
    pub fn as_async(&self) -> Option<&AsyncReplicas> {
        match &self.0 {
            Kind::Async(replicas) => Some(replicas),
            Kind::Sync(_) | Kind::Hybrid(_) | Kind::Average(_) => None,
        }
    }

    /// The hybrid optimizer, if it is one: for its barrier's state.
    pub fn as_hybrid(&self) -> Option<&HybridReplicas> {
        match &self.0 {
            Kind::Hybrid(replicas) => Some(replicas),
            Kind::Async(_) | Kind::Sync(_) | Kind::Average(_) => None,
        }
    }

    fn optimizer(&self) -> &dyn Optimizer {
        match &self.0 {
            Kind::Async(replicas) => replicas,
            Kind::Sync(replicas) => replicas,
            Kind::Hybrid(replicas) => replicas,
            Kind::Average(replicas) => replicas,
        }
    }
}

impl Optimizer for Replicas {
    leave_updates_to!(self, self.optimizer());

    fn apply_gradients<'g>(
        &self,
        grads_and_vars: &[GradAndVar<'g>],
        global_step: Option<Variable<'g>>,
    ) -> Result<Operation<'g>> {
        self.optimizer().apply_gradients(grads_and_vars, global_step)
    }

    fn slots<'g>(&self, graph: &'g Graph) -> Vec<Variable<'g>> {
        self.optimizer().slots(graph)
    }

    fn get_slot<'g>(&self, variable: Variable<'g>, slot: &str) -> Option<Variable<'g>> {
        self.optimizer().get_slot(variable, slot)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::cluster::testing::{Problem, alone, on_workers, train_on};
    use crate::optim::Sgd;

    #[test]
    fn modes_are_read_as_they_are_written() {
        for text in [
            "async",
            "async bound=4",
            "sync",
            "sync replicas=3",
            "hybrid timeout=200ms,min=0.75,late=drop",
            "hybrid timeout=1500ms,min=1,late=queue",
            "average every=10",
        ] {
            assert_eq!(text.parse::<UpdateMode>().unwrap().to_string(), text);
        }
        let hybrid = UpdateMode::from_flag("--hybrid", Some("timeout=1.5s, late = scale")).unwrap();
        assert_eq!(hybrid.to_string(), "hybrid timeout=1500ms,min=0.75,late=scale");
        assert_eq!(
            UpdateMode::from_flag("hybrid", None).unwrap().to_string(),
            "hybrid timeout=200ms,min=0.75,late=drop"
        );
        assert_eq!(
            "hybrid:timeout=2m".parse::<UpdateMode>().unwrap().to_string(),
            "hybrid timeout=120000ms,min=0.75,late=drop"
        );
    }

    #[test]
    fn mistakes_say_what_is_wanted() {
        for (text, part) in [
            ("fast", "there are async, sync, hybrid and average"),
            ("hybrid timeout", "key=value"),
            ("hybrid timeout=200", "such as 200ms"),
            ("hybrid timeout=-1s", "such as 200ms"),
            ("hybrid timeout=1h", "such as 200ms"),
            ("hybrid min=75", "from 0 to 1"),
            ("hybrid min=nan", "from 0 to 1"),
            ("hybrid late=later", "drop, scale or queue"),
            ("hybrid min=0.5,min=0.6", "'min' twice"),
            ("hybrid max=1", "has no setting 'max'; it has timeout, min, late"),
            ("sync bound=1", "has no setting 'bound'; it has replicas"),
            ("sync replicas=0", "1 or more"),
            ("average every=0", "1 or more"),
            ("async bound=-1", "a number"),
        ] {
            let error = text.parse::<UpdateMode>().unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn every_mode_trains_two_workers() {
        for text in ["async bound=2", "sync", "hybrid timeout=60s,min=1", "average every=2"] {
            let mode: UpdateMode = text.parse().unwrap();
            let found = on_workers(2, |worker, host| {
                let g = kolo_ops::graph();
                let make = |_: &Graph, problem: &Problem<'_>, step| {
                    let replicas = mode.wrap(Box::new(Sgd::new(0.05)), worker, 2);
                    let train = replicas.minimize(problem.loss, Some(step)).unwrap().name();
                    (replicas, train)
                };
                let n_steps =
                    if matches!(mode, UpdateMode::Async { .. } | UpdateMode::Average { .. }) { 20 } else { 10 };
                train_on(
                    &g,
                    worker,
                    host,
                    n_steps,
                    !mode.keeps_variables_on_servers(),
                    make,
                    |replicas, g, is_chief| replicas.hook(g, is_chief).unwrap(),
                )
                .0
                .into_iter()
                .last()
            });
            // Ten steps of two workers bring all of them near to where ten steps with both batches lead. Where nobody waits for the
            // others, one may be done before another has begun.
            let found: Vec<_> = found.into_iter().flatten().collect();
            assert!(!found.is_empty(), "{text}: nobody made a step");
            let expected = alone(2, 10, &Sgd::new(0.05));
            for (found, expected) in found.iter().flat_map(|found| found.iter().zip(&expected)) {
                for (x, y) in found.data::<f32>().unwrap().iter().zip(expected.data::<f32>().unwrap()) {
                    assert!((x - y).abs() < 0.25, "{text}: {found:?} and {expected:?}");
                }
            }
        }
    }
}
