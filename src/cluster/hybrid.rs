//! Training that is synchronous as long as everybody keeps up: a step waits for all workers, but only so long.

use std::cell::RefCell;
use std::time::Duration;

use kolo_core::{Error, Result};
use kolo_graph::{Grad, Graph, Operation, Variable};
use kolo_runtime::Session;

use super::meeting::{BarrierState, Meeting, MeetingHook, MeetingNames};
use super::place::home;
use super::sync_replicas::as_i64;
use crate::optim::{GradAndVar, Optimizer, leave_updates_to, wrap_training};

/// What becomes of a gradient that comes when its step is over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Late {
    /// It is not used.
    #[default]
    Drop,
    /// It takes part in the next update with weight `1 / (1 + steps late)`.
    Scale,
    /// It takes part in the next update in full.
    Queue,
}

impl Late {
    pub(super) fn word(self) -> &'static str {
        match self {
            Late::Drop => "drop",
            Late::Scale => "scale",
            Late::Queue => "queue",
        }
    }
}

/// Wraps an optimizer: an update is made from the mean gradient of the workers that came in time.
///
/// A step ends when all workers have pushed their gradients, or when `timeout` has passed since the first one and at least
/// `min_share` of them have. A worker that comes later goes on with the step that is on by then; what becomes of its gradient
/// is [`Late`]. Every gradient is counted by worker and step, and who is waited for can be read at any time:
/// [`HybridReplicas::state`].
///
/// An update takes the same workers' gradients for every variable: servers keep gradients apart by worker until the barrier
/// has decided, which takes their memory once per worker.
///
/// ```
/// use std::time::Duration;
/// use kolo::cluster::HybridReplicas;
/// use kolo::optim::{Optimizer, Sgd};
/// use kolo::train::{self, MonitoredTrainingSession, hooks::StopAtStep};
///
/// let g = kolo::graph();
/// let w = g.variable("w", 5.0f32);
/// let loss = w.read() * w.read();
/// // Worker 0 of 2; the other one never comes.
/// let hybrid = HybridReplicas::new(Sgd::new(0.1), 0, 2).timeout(Duration::from_millis(1)).min_share(0.5);
/// let train = hybrid.minimize(loss, Some(train::global_step_or_create(&g)?))?;
///
/// let hook = hybrid.hook(&g, true)?;
/// let mut session = MonitoredTrainingSession::new(&g).hook(hook).hook(StopAtStep::last(3)).build()?;
/// while !session.should_stop() {
///     session.run(&[], &[], &[train])?;
/// }
/// let state = hybrid.state(session.session()?, &g)?;
/// assert_eq!((state.workers[0].n_in_time, state.workers[1].last), (3, None));
/// session.close()?;
/// # Ok::<(), kolo::Error>(())
/// ```
pub struct HybridReplicas {
    inner: Box<dyn Optimizer>,
    worker: usize,
    n_workers: usize,
    timeout: Duration,
    min_share: f64,
    late: Late,
    made: RefCell<Option<MeetingNames>>,
}

impl HybridReplicas {
    /// For worker number `worker` of `n_workers`: waits 200 ms for three quarters of the workers, and drops what is late,
    /// unless told otherwise.
    pub fn new(inner: impl Optimizer + 'static, worker: usize, n_workers: usize) -> HybridReplicas {
        HybridReplicas::boxed(Box::new(inner), worker, n_workers)
    }

    /// The same for an optimizer that is chosen at run time.
    pub fn boxed(inner: Box<dyn Optimizer>, worker: usize, n_workers: usize) -> HybridReplicas {
        HybridReplicas {
            inner,
            worker,
            n_workers,
            timeout: Duration::from_millis(200),
            min_share: 0.75,
            late: Late::Drop,
            made: RefCell::default(),
        }
    }

    /// How long the first worker of a step waits for the others.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> HybridReplicas {
        self.timeout = timeout;
        self
    }

    /// The share of the workers that is waited for however long it takes, from 0 (one worker is enough) to 1.
    #[must_use]
    pub fn min_share(mut self, share: f64) -> HybridReplicas {
        self.min_share = share;
        self
    }

    /// What becomes of late gradients.
    #[must_use]
    pub fn late(mut self, late: Late) -> HybridReplicas {
        self.late = late;
        self
    }

    /// The hook with which a worker of a monitored session takes part; call it after the gradients were applied.
    pub fn hook(&self, graph: &Graph, is_chief: bool) -> Result<MeetingHook> {
        let names = self.names(graph)?;
        Ok(MeetingHook { label: "HybridReplicas", names, is_chief, every: None, n_runs: 0 })
    }

    /// Who has arrived, with which step, how long ago, and what became of every gradient. Any session over a graph with
    /// this optimizer may ask, at any time.
    pub fn state(&self, session: &Session, graph: &Graph) -> Result<BarrierState> {
        BarrierState::read(session, &self.names(graph)?.state)
    }

    fn names(&self, graph: &Graph) -> Result<MeetingNames> {
        let names = self.made.borrow().clone().filter(|names| graph.operation(&names.update).is_ok());
        names.ok_or_else(|| {
            Error::failed_precondition("HybridReplicas has nothing in this graph yet: apply the gradients first")
        })
    }
}

impl Optimizer for HybridReplicas {
    leave_updates_to!(self, self.inner);

    /// Adds what a worker runs, and returns it: pushes the gradients, then waits for the end of the step. What the chief
    /// runs is added too.
    fn apply_gradients<'g>(
        &self,
        grads_and_vars: &[GradAndVar<'g>],
        global_step: Option<Variable<'g>>,
    ) -> Result<Operation<'g>> {
        let step = global_step
            .ok_or_else(|| Error::invalid_argument("HybridReplicas needs the global step to tell what is late"))?;
        if !(0.0..=1.0).contains(&self.min_share) {
            let text = format!("the least share of the workers is from 0 to 1, not {}", self.min_share);
            return Err(Error::invalid_argument(text));
        }
        let pairs: Vec<(Grad<'g>, Variable<'g>)> =
            grads_and_vars.iter().filter_map(|pair| Some((pair.grad?, pair.variable))).collect();
        if pairs.is_empty() {
            return self.inner.apply_gradients(grads_and_vars, global_step);
        }
        let graph = step.handle().graph();
        graph.check()?;
        let meeting = Meeting::new("kolo_hybrid", step, self.worker, self.n_workers, self.late.word())?;
        graph.name_scope("hybrid_replicas", || {
            let round = meeting.wait(self.min_share, self.timeout);
            let mut pushed = Vec::new();
            let mut taken = Vec::new();
            for &(grad, variable) in &pairs {
                let store = meeting.store(variable, "kolo_grads", variable.dtype());
                pushed.push(meeting.push(store, grad));
                taken.push(GradAndVar { grad: Some(meeting.take(store, variable, &round, grad)), variable });
            }
            let train = meeting.arrive(&pushed);
            let step_home = home(step.handle().operation());
            let applied = graph
                .absolute_scope("", || graph.device(&step_home, || self.inner.apply_gradients(&taken, Some(step))))?;
            let update = graph.control_dependencies(&[applied], || {
                let now = graph.device(&step_home, || as_i64(step.read_now()));
                meeting.release(now)
            });
            let names = MeetingNames {
                chief_init: meeting.release(step.read()).name(),
                local_init: meeting.begin_at(step.read()).name(),
                update: update.name(),
                close: meeting.close().name(),
                leave: meeting.leave().name(),
                state: meeting.state().name(),
            };
            graph.check()?;
            *self.made.borrow_mut() = Some(names);
            wrap_training(applied, train, grads_and_vars)?;
            Ok(train)
        })
    }

    fn slots<'g>(&self, graph: &'g Graph) -> Vec<Variable<'g>> {
        self.inner.slots(graph)
    }

    fn get_slot<'g>(&self, variable: Variable<'g>, slot: &str) -> Option<Variable<'g>> {
        self.inner.get_slot(variable, slot)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Arc;

    use kolo_core::{Code, Tensor};
    use kolo_runtime::SessionConfig;

    use super::*;
    use crate::cluster::testing::{Problem, alone, on_workers, train_on};
    use crate::ops;
    use crate::optim::{Momentum, Sgd};
    use crate::train::global_step_or_create;

    #[test]
    fn as_long_as_all_keep_up_it_equals_one_large_batch() {
        for late in [Late::Drop, Late::Scale, Late::Queue] {
            let found = on_workers(3, |worker, host| {
                let g = kolo_ops::graph();
                let make = |g: &Graph, problem: &Problem<'_>, step| {
                    let _ = g;
                    let hybrid = HybridReplicas::new(Momentum::new(0.1, 0.9), worker, 3).late(late);
                    let hybrid = hybrid.min_share(1.0).timeout(Duration::from_secs(60));
                    let train = hybrid.minimize(problem.loss, Some(step)).unwrap().name();
                    (hybrid, train)
                };
                let (values, hybrid) = train_on(&g, worker, host, 5, false, make, |hybrid, g, is_chief| {
                    Box::new(hybrid.hook(g, is_chief).unwrap())
                });
                (values.into_iter().last().unwrap(), worker == 0 && hybrid.names(&g).is_ok())
            });
            Problem::close(&found[0].0, &alone(3, 5, &Momentum::new(0.1, 0.9)));
            assert!(found[0].1);
        }
    }

    /// Two workers of three played by one session each, on one host.
    #[test]
    fn late_gradients_are_dropped_scaled_or_queued_and_counted() {
        // Rate 1 and gradients x: the variable is minus the sum of the updates.
        for (late, expected) in [
            (Late::Drop, [-2.0, -3.0]),
            // (1 + 10 / 2) / 1.5, and with row gradients the same.
            (Late::Scale, [-2.0, -2.0 - 6.0 / 1.5]),
            (Late::Queue, [-2.0, -2.0 - 11.0 / 2.0]),
        ] {
            let device_count = [("CPU".to_owned(), 3)].into();
            let operation_timeout = Some(Duration::from_secs(60));
            let config = SessionConfig { device_count, operation_timeout, ..SessionConfig::default() };
            let host = kolo_runtime::Host::new(config).unwrap();
            let build = |worker: usize| {
                let g = kolo_ops::graph();
                let names = g.device(&format!("/cpu:{}", worker + 1), || {
                    let (w, e) = g.device("/cpu:0", || (g.variable("w", [0.0f32]), g.variable("e", [[0.0f32], [0.0]])));
                    let x = g.placeholder::<f32>("x", [Some(1)]);
                    let rows = ops::resource_gather(e.handle(), g.constant([1i64]));
                    let loss = ops::sum_all(w.read() * x) + ops::sum_all(rows * x);
                    let step = g.device("/cpu:0", || global_step_or_create(&g).unwrap());
                    let hybrid = HybridReplicas::new(Sgd::new(1.0), worker, 2).late(late);
                    let hybrid = hybrid.min_share(0.5).timeout(Duration::from_millis(1));
                    let train = hybrid.minimize(loss, Some(step)).unwrap().name();
                    let read = [w.read().name(), e.read().name(), step.read().name()];
                    (hybrid.names(&g).unwrap(), train, read)
                });
                let init = g.global_variables_initializer().name();
                let local = g.local_variables_initializer().name();
                let session = Arc::new(host.session(&g).unwrap());
                (session, names, [init, local])
            };
            let (chief, (names, train, read), init) = build(0);
            let (slow, (slow_names, slow_train, _), slow_init) = build(1);
            chief.run_named(&[], &[], &[&init[0]]).unwrap();
            chief.run_named(&[], &[], &[&init[1]]).unwrap();
            slow.run_named(&[], &[], &[&slow_init[1]]).unwrap();
            for (session, op) in
                [(&chief, &names.chief_init), (&chief, &names.local_init), (&slow, &slow_names.local_init)]
            {
                session.run_named(&[], &[], &[op]).unwrap();
            }
            let step = |session: &Arc<Session>, train: &str, x: f32| {
                session.run_named(&[], &[("x", Tensor::from([x]))], &[train]).map(|_| ())
            };
            let one_update = |x: f32| {
                std::thread::scope(|scope| {
                    let update = scope.spawn(|| chief.run_named(&[], &[], &[&names.update]).map(|_| ()));
                    step(&chief, &train, x).unwrap();
                    update.join().unwrap().unwrap();
                });
            };
            one_update(2.0);
            // The slow worker's gradient is for step 0, which is over: it goes on at once.
            step(&slow, &slow_train, 10.0).unwrap();
            one_update(1.0);
            let values = chief.run_named(&[&read[0], &read[1], &read[2]], &[], &[]).unwrap();
            let value = values[0].data::<f32>().unwrap()[0];
            let wanted = if late == Late::Drop { -3.0 } else { expected[1] };
            assert!((value - wanted).abs() < 1e-5, "{late:?}: {value}");
            let row = values[1].data::<f32>().unwrap();
            assert!(row[0] == 0.0 && (row[1] - wanted).abs() < 1e-5, "{late:?}: {row:?}");
            assert_eq!(values[2], Tensor::scalar(2i64));
            let state = BarrierState::read(&slow, &slow_names.state).unwrap();
            assert_eq!((state.step, state.workers[0].n_in_time, state.workers[1].n_in_time), (2, 2, 0));
            let slow_counts = &state.workers[1];
            let counts = [slow_counts.n_dropped, slow_counts.n_scaled, slow_counts.n_queued];
            assert_eq!(counts, [Late::Drop, Late::Scale, Late::Queue].map(|kind| u64::from(kind == late)));
            assert_eq!(state.late.iter().map(|l| (l.worker, l.step, l.came_at)).collect::<Vec<_>>(), [(1, 0, 1)]);
            // Late once more, it is in step 2 with everybody then; the end of training ends its wait.
            step(&slow, &slow_train, 1.0).unwrap();
            std::thread::scope(|scope| {
                let waits = scope.spawn(|| step(&slow, &slow_train, 1.0));
                chief.run_named(&[], &[], &[&names.close]).unwrap();
                assert_eq!(waits.join().unwrap().unwrap_err().code(), Code::OutOfRange);
            });
        }
    }

    #[test]
    fn mistakes_are_named() {
        let g = kolo_ops::graph();
        let w = g.variable("w", 1.0f32);
        let step = global_step_or_create(&g).unwrap();
        let loss = w.read() * 2.0;
        let error = |hybrid: HybridReplicas, step| hybrid.minimize(loss, step).unwrap_err().to_string();
        assert!(error(HybridReplicas::new(Sgd::new(1.0), 0, 1), None).contains("needs the global step"));
        assert!(error(HybridReplicas::new(Sgd::new(1.0), 2, 2), Some(step)).contains("no worker 2"));
        assert!(error(HybridReplicas::new(Sgd::new(1.0), 0, 1).min_share(75.0), Some(step)).contains("not 75"));
        assert!(HybridReplicas::new(Sgd::new(1.0), 0, 1).hook(&g, true).is_err());
    }
}
