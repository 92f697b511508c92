//! Asynchronous training: every worker updates when it likes, and how old its gradients were is counted.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use kolo_core::{Error, Result};
use kolo_graph::{Grad, Graph, Operation, Variable};
use kolo_runtime::Session;

use super::place::home;
use super::sync_replicas::as_i64;
use crate::optim::{GradAndVar, Optimizer, leave_updates_to, wrap_training};
use crate::train::SessionHook;

/// Wraps an optimizer: updates are made by each worker on its own, and counted by how many updates of others came between
/// the reading of the variables and the update (the staleness).
///
/// With a bound, a worker that is more than that number of updates ahead of the slowest one waits for it (stale synchronous
/// parallel). A worker that is silent for the lease (a minute unless said) is not waited for.
///
/// ```
/// use kolo::cluster::AsyncReplicas;
/// use kolo::optim::{Optimizer, Sgd};
/// use kolo::{Session, train};
///
/// let g = kolo::graph();
/// let w = g.variable("w", 5.0f32);
/// let loss = w.read() * w.read();
/// let replicas = AsyncReplicas::new(Sgd::new(0.1), 0, 1).staleness_bound(4);
/// let train = replicas.minimize(loss, Some(train::global_step_or_create(&g)?))?;
/// let init = g.global_variables_initializer();
///
/// let session = Session::new(&g)?;
/// session.run_op(init)?;
/// for _ in 0..3 {
///     session.run_op(train)?;
/// }
/// let staleness = replicas.staleness(&session, &g)?;
/// assert_eq!(staleness[0].histogram[0], 3); // alone, every gradient is fresh
/// # Ok::<(), kolo::Error>(())
/// ```
pub struct AsyncReplicas {
    inner: Box<dyn Optimizer>,
    worker: usize,
    n_workers: usize,
    bound: Option<u64>,
    lease: Duration,
    made: RefCell<Option<Names>>,
}

/// What was added to a graph, by name.
#[derive(Clone)]
struct Names {
    state: String,
    leave: String,
}

/// How old the gradients of one worker were.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerStaleness {
    /// How many gradients had staleness 0, 1, …; the last class is all of that and above.
    pub histogram: Vec<u64>,
    /// How many updates it has made; one that was away for longer than its lease begins where the others were.
    pub clock: i64,
    /// How long ago it was heard of.
    pub heard: Duration,
}

impl WorkerStaleness {
    /// The mean staleness; what is in the last class counts as the least it may be.
    pub fn mean(&self) -> f64 {
        let n: u64 = self.histogram.iter().sum();
        let sum: f64 = self.histogram.iter().enumerate().map(|(age, &n)| age as f64 * n as f64).sum();
        if n == 0 { 0.0 } else { sum / n as f64 }
    }
}

impl AsyncReplicas {
    /// For worker number `worker` of `n_workers`.
    pub fn new(inner: impl Optimizer + 'static, worker: usize, n_workers: usize) -> AsyncReplicas {
        AsyncReplicas::boxed(Box::new(inner), worker, n_workers)
    }

    /// The same for an optimizer that is chosen at run time.
    pub fn boxed(inner: Box<dyn Optimizer>, worker: usize, n_workers: usize) -> AsyncReplicas {
        AsyncReplicas {
            inner,
            worker,
            n_workers,
            bound: None,
            lease: Duration::from_secs(60),
            made: RefCell::default(),
        }
    }

    /// How many updates a worker may be ahead of the slowest.
    #[must_use]
    pub fn staleness_bound(mut self, bound: u64) -> AsyncReplicas {
        self.bound = Some(bound);
        self
    }

    /// How long a silent worker is waited for. All workers must say the same.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> AsyncReplicas {
        self.lease = lease;
        self
    }

    /// The hook that tells the others when this worker has ended, so that nobody waits for it; needed only with a bound. Call
    /// it after the gradients were applied.
    pub fn hook(&self, graph: &Graph) -> Result<AsyncReplicasHook> {
        Ok(AsyncReplicasHook { leave: self.names(graph)?.leave })
    }

    fn names(&self, graph: &Graph) -> Result<Names> {
        self.made.borrow().clone().filter(|names| graph.operation(&names.state).is_ok()).ok_or_else(|| {
            Error::failed_precondition("AsyncReplicas has nothing in this graph yet: apply the gradients first")
        })
    }

    /// The staleness of every worker's gradients so far, by worker. Any session over a graph with this optimizer may ask.
    pub fn staleness(&self, session: &Session, graph: &Graph) -> Result<Vec<WorkerStaleness>> {
        let name = self.names(graph)?.state;
        let values =
            session.run_named(&[&format!("{name}:0"), &format!("{name}:1"), &format!("{name}:2")], &[], &[])?;
        let [histogram, clocks, ago] = values.as_slice() else {
            return Err(Error::internal("staleness has three parts"));
        };
        let n_classes = histogram.shape().dims().get(1).copied().unwrap_or(1).max(1);
        let lines = histogram.data::<i64>()?.chunks_exact(n_classes);
        let rest = clocks.data::<i64>()?.iter().zip(ago.data::<f32>()?);
        let worker = |(line, (&clock, &ago)): (&[i64], (&i64, &f32))| WorkerStaleness {
            histogram: line.iter().map(|n| n.unsigned_abs()).collect(),
            clock,
            heard: Duration::try_from_secs_f32(ago).unwrap_or_default(),
        };
        Ok(lines.zip(rest).map(worker).collect())
    }
}

impl Optimizer for AsyncReplicas {
    leave_updates_to!(self, self.inner);

    fn apply_gradients<'g>(
        &self,
        grads_and_vars: &[GradAndVar<'g>],
        global_step: Option<Variable<'g>>,
    ) -> Result<Operation<'g>> {
        let step = global_step.ok_or_else(|| {
            Error::invalid_argument("AsyncReplicas needs the global step to tell how old gradients are")
        })?;
        if self.worker >= self.n_workers {
            let text = format!("there is no worker {}: there are {}, from 0 on", self.worker, self.n_workers);
            return Err(Error::invalid_argument(text));
        }
        let graph = step.handle().graph();
        graph.check()?;
        let step_home = home(step.handle().operation());
        // Read when the step begins, beside the variables.
        let pulled = graph.device(&step_home, || graph.no_control_dependencies(|| as_i64(step.read_now())));
        let grads: Vec<Operation<'g>> = grads_and_vars
            .iter()
            .filter_map(|pair| match pair.grad? {
                Grad::Dense(grad) => Some(grad.operation()),
                Grad::Slices(slices) => Some(slices.values.operation()),
            })
            .collect();
        let pushed = graph.device(&step_home, || graph.control_dependencies(&grads, || as_i64(step.read_now())));
        let updated = self.inner.apply_gradients(grads_and_vars, global_step)?;
        let train = graph.name_scope("async_replicas", || {
            graph.device(&step_home, || {
                let lease = i64::try_from(self.lease.as_millis()).unwrap_or(i64::MAX);
                let object = graph.op("KoloStaleness").attr("shared_name", "kolo_staleness").attr("lease_ms", lease);
                let object = object.attr("n_workers", self.n_workers).out();
                let worker = graph.constant(self.worker as i64);
                let recorded = graph.control_dependencies(&[updated], || {
                    graph.op("KoloStalenessRecord").inputs([object, worker, pulled, pushed]).build()
                });
                let state = graph.op("KoloStalenessState").input(object).build();
                let leave = graph.op("KoloStalenessLeave").inputs([object, worker]).build();
                *self.made.borrow_mut() = Some(Names { state: state.name(), leave: leave.name() });
                match self.bound {
                    None => recorded,
                    Some(bound) => graph.control_dependencies(&[recorded], || {
                        let bound = graph.constant(i64::try_from(bound).unwrap_or(i64::MAX));
                        graph.op("KoloStalenessWait").inputs([object, worker, bound]).build()
                    }),
                }
            })
        });
        graph.check()?;
        wrap_training(updated, train, grads_and_vars)?;
        Ok(train)
    }

    fn slots<'g>(&self, graph: &'g Graph) -> Vec<Variable<'g>> {
        self.inner.slots(graph)
    }

    fn get_slot<'g>(&self, variable: Variable<'g>, slot: &str) -> Option<Variable<'g>> {
        self.inner.get_slot(variable, slot)
    }
}

/// Tells the others when a worker has ended; see [`AsyncReplicas::hook`].
pub struct AsyncReplicasHook {
    leave: String,
}

impl<'g> SessionHook<'g> for AsyncReplicasHook {
    fn name(&self) -> &'static str {
        "AsyncReplicas"
    }

    fn end(&mut self, session: &Arc<Session>) -> Result<()> {
        session.run_named(&[], &[], &[&self.leave]).map(|_| ())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use kolo_core::Tensor;

    use super::*;
    use crate::cluster::testing::on_workers;
    use crate::optim::Sgd;
    use crate::train::{global_step_or_create, read_global_step};

    #[test]
    fn updates_of_others_make_gradients_stale_and_the_bound_holds() {
        const N: usize = 40;
        let seen = on_workers(2, |worker, host| {
            let g = kolo_ops::graph();
            let replicas = AsyncReplicas::new(Sgd::new(1.0), worker, 2).staleness_bound(3);
            let (w, train) = g.device("/cpu:0", || {
                let w = g.variable("w", 0.0f32);
                let step = global_step_or_create(&g).unwrap();
                (w, replicas.minimize(w.read() * 1.0, Some(step)).unwrap())
            });
            let init = g.global_variables_initializer();
            let session = host.session(&g).unwrap();
            // Each sets the same zeros; the barrier of the test is that both begin before either trains.
            if worker == 0 {
                session.run_op(init).unwrap();
            } else {
                let ready = || session.fetch(w.read()).is_ok() && read_global_step(&session, &g).is_ok();
                let deadline = std::time::Instant::now() + Duration::from_secs(30);
                while !ready() {
                    assert!(std::time::Instant::now() < deadline, "the chief never initialised");
                    std::thread::yield_now();
                }
            }
            let mut most_ahead = 0;
            for _ in 0..N {
                session.run_op(train).unwrap();
                let clocks: Vec<i64> =
                    replicas.staleness(&session, &g).unwrap().iter().map(|worker| worker.clock).collect();
                most_ahead = most_ahead.max(clocks[worker] - clocks[1 - worker]);
            }
            let state = replicas.staleness(&session, &g).unwrap();
            (most_ahead, state, session.fetch(w.read()).unwrap())
        });
        // One who returned from its step was at most three ahead then, and it can only have been caught up with since.
        assert!(seen.iter().all(|(ahead, ..)| *ahead <= 3), "{seen:?}");
        let last = seen.iter().max_by_key(|(_, state, _)| state.iter().map(|w| w.clock).sum::<i64>()).unwrap();
        for worker in &last.1 {
            assert_eq!((worker.clock, worker.histogram.iter().sum::<u64>()), (N as i64, N as u64));
            assert!(worker.mean() >= 0.0);
        }
        assert_eq!(last.2, Tensor::scalar(-2.0 * N as f32), "no update is lost");
    }

    #[test]
    fn mistakes_are_named() {
        let g = kolo_ops::graph();
        let w = g.variable("w", 1.0f32);
        let step = global_step_or_create(&g).unwrap();
        let error = AsyncReplicas::new(Sgd::new(1.0), 0, 1).minimize(w.read(), None).unwrap_err().to_string();
        assert!(error.contains("needs the global step"), "{error}");
        let error = AsyncReplicas::new(Sgd::new(1.0), 3, 2).minimize(w.read(), Some(step)).unwrap_err().to_string();
        assert!(error.contains("no worker 3"), "{error}");
    }
}
