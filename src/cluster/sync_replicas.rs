//! Synchronous training: the gradients of several workers become one update, as TensorFlow's `SyncReplicasOptimizer` does it.
//!
//! ```text
//! worker                                ps                                 chief's thread
//! gradients ── apply(local step) ──>  accumulator of each variable
//! dequeue <──────────────────────     sync_token_q        <── enqueue ──  take, apply, step += 1
//! local step = token
//! ```
//!
//! Names of shared objects are TensorFlow's (`<variable>:0/grad_accum`, `sync_token_q`), so that its workers and ours can
//! train together.

use std::cell::RefCell;
use std::time::Duration;

use kolo_core::{DType, Error, PartialShape, Result, Tensor};
use kolo_graph::{Grad, Graph, IndexedSlices, Operation, Output, Variable};
use kolo_ops::queue::{ConditionalAccumulator, FifoQueue, SparseConditionalAccumulator};

use super::chief::spawn_loop;
use super::place::home;
use crate::ops;
use crate::optim::{GradAndVar, Optimizer, leave_updates_to, wrap_training};
use crate::train::{CreatedContext, SessionHook, report_uninitialized_variables};

/// Wraps an optimizer: an update is made from the mean of the gradients of N workers, and workers wait for it.
///
/// Every worker runs the operation that [`minimize`](Optimizer::minimize) returns; the chief also runs the updates, in a
/// thread that the hook starts. If more workers take part than gradients are needed, the slowest of each step are backup:
/// their gradients come too late and are dropped, and they go on with the new step.
///
/// ```
/// use kolo::cluster::SyncReplicas;
/// use kolo::optim::{Optimizer, Sgd};
/// use kolo::train::{self, MonitoredTrainingSession, hooks::StopAtStep};
///
/// let g = kolo::graph();
/// let w = g.variable("w", 5.0f32);
/// let loss = w.read() * w.read();
/// let sync = SyncReplicas::new(Sgd::new(0.1), 1); // one worker, here
/// let train = sync.minimize(loss, Some(train::global_step_or_create(&g)?))?;
///
/// let hook = sync.make_session_run_hook(&g, true)?;
/// let mut session = MonitoredTrainingSession::new(&g).hook(hook).hook(StopAtStep::last(10)).build()?;
/// while !session.should_stop() {
///     session.run(&[], &[], &[train])?;
/// }
/// session.close()?;
/// # Ok::<(), kolo::Error>(())
/// ```
pub struct SyncReplicas {
    inner: Box<dyn Optimizer>,
    replicas_to_aggregate: usize,
    total_num_replicas: usize,
    made: RefCell<Option<Names>>,
}

/// What was added to a graph, by name.
#[derive(Clone, Debug)]
struct Names {
    chief_init: String,
    local_init: String,
    ready: String,
    sync: String,
    queue: String,
    close: String,
    global_step: String,
}

impl SyncReplicas {
    /// Applies `inner` to the mean of `replicas_to_aggregate` gradients, of as many workers.
    pub fn new(inner: impl Optimizer + 'static, replicas_to_aggregate: usize) -> SyncReplicas {
        SyncReplicas::boxed(Box::new(inner), replicas_to_aggregate)
    }

    /// The same for an optimizer that is chosen at run time.
    pub fn boxed(inner: Box<dyn Optimizer>, replicas_to_aggregate: usize) -> SyncReplicas {
        SyncReplicas {
            inner,
            replicas_to_aggregate,
            total_num_replicas: replicas_to_aggregate,
            made: RefCell::default(),
        }
    }

    /// How many workers there are. More than are aggregated: the others are backup. Fewer: some workers contribute more than
    /// one gradient to a step, which needs tokens from the start.
    #[must_use]
    pub fn total_num_replicas(mut self, total: usize) -> SyncReplicas {
        self.total_num_replicas = total;
        self
    }

    /// The hook with which a worker of a monitored session takes part; call it after the gradients were applied.
    pub fn make_session_run_hook(&self, graph: &Graph, is_chief: bool) -> Result<SyncReplicasHook> {
        Ok(SyncReplicasHook {
            names: self.names(graph)?,
            is_chief,
            n_tokens: self.replicas_to_aggregate,
            least_tokens: self.replicas_to_aggregate.saturating_sub(self.total_num_replicas),
            init_tokens: None,
        })
    }

    /// What the chief runs once before training: its local step, and the accumulators' steps.
    pub fn chief_init_op<'g>(&self, graph: &'g Graph) -> Result<Operation<'g>> {
        graph.operation(&self.names(graph)?.chief_init)
    }

    /// What every other worker runs once before training.
    pub fn local_step_init_op<'g>(&self, graph: &'g Graph) -> Result<Operation<'g>> {
        graph.operation(&self.names(graph)?.local_init)
    }

    /// Lists the variables that must have a value before the init ops may run; empty when they may.
    pub fn ready_for_local_init_op<'g>(&self, graph: &'g Graph) -> Result<Output<'g>> {
        graph.output(&self.names(graph)?.ready)
    }

    /// One update, which the chief runs over and over: waits for enough gradients, applies them, publishes the new step.
    pub fn sync_op<'g>(&self, graph: &'g Graph) -> Result<Operation<'g>> {
        graph.operation(&self.names(graph)?.sync)
    }

    /// Puts `n_tokens` into the token queue, for the chief to run once: with more than none, workers may begin their second
    /// step before the first update. At least as many as gradients are needed beyond the number of workers.
    pub fn init_tokens_op<'g>(&self, graph: &'g Graph, n_tokens: usize) -> Result<Operation<'g>> {
        let names = self.names(graph)?;
        init_tokens(graph, &names, n_tokens, self.replicas_to_aggregate.saturating_sub(self.total_num_replicas))
    }

    fn names(&self, graph: &Graph) -> Result<Names> {
        let names = self.made.borrow().clone().filter(|names| graph.operation(&names.sync).is_ok());
        names.ok_or_else(|| {
            Error::failed_precondition("SyncReplicas has nothing in this graph yet: apply the gradients first")
        })
    }

    /// The accumulator of one variable: what the worker does, what the chief gets, and how the accumulator begins.
    fn accumulate<'g>(
        &self,
        variable: Variable<'g>,
        grad: Grad<'g>,
        local_step: Output<'g>,
        global_step: Variable<'g>,
    ) -> Accumulated<'g> {
        let graph = local_step.graph();
        let shared = format!("{}:0/grad_accum", variable.name());
        let n_required = || graph.constant(i32::try_from(self.replicas_to_aggregate).unwrap_or(i32::MAX));
        match grad {
            Grad::Dense(grad) => {
                let name = "conditional_accumulator";
                let all = ConditionalAccumulator::new(graph, name, &shared, grad.dtype(), variable.shape());
                Accumulated {
                    apply: all.apply_grad(grad, local_step),
                    set_step: all.set_global_step(global_step.read()),
                    taken: all.take_grad(n_required()).into(),
                }
            }
            Grad::Slices(slices) => {
                let (name, any) = ("sparse_conditional_accumulator", PartialShape::scalar());
                let all = SparseConditionalAccumulator::new(graph, name, &shared, slices.values.dtype(), any);
                let indices = as_i64(slices.indices);
                let apply = all.apply_grad(indices, slices.values, local_step);
                let set_step = all.set_global_step(global_step.read());
                let taken = all.take_grad(n_required());
                let [indices, values, _] = taken.as_slice() else {
                    return Accumulated { apply, set_step, taken: Output::invalid(graph).into() };
                };
                let (values, indices) = (*values, *indices);
                let dense_shape = shape_of(graph, variable).unwrap_or(slices.dense_shape);
                Accumulated { apply, set_step, taken: Grad::Slices(IndexedSlices { values, indices, dense_shape }) }
            }
        }
    }
}

struct Accumulated<'g> {
    apply: Operation<'g>,
    set_step: Operation<'g>,
    taken: Grad<'g>,
}

/// The shape of a variable as a constant: an accumulator does not know how many rows there are.
pub(super) fn shape_of<'g>(graph: &'g Graph, variable: Variable<'_>) -> Option<Output<'g>> {
    let dims = variable.shape().known()?.iter().map(|&dim| dim as i64).collect::<Vec<_>>();
    Some(graph.constant(Tensor::vector(dims)))
}

pub(super) fn as_i64(x: Output<'_>) -> Output<'_> {
    match x.dtype() {
        DType::I64 => x,
        _ => ops::cast(x, DType::I64),
    }
}

fn init_tokens<'g>(graph: &'g Graph, names: &Names, n_tokens: usize, least: usize) -> Result<Operation<'g>> {
    if n_tokens < least {
        return Err(Error::invalid_argument(format!(
            "Too few tokens to finish the first step: {n_tokens} (given) vs {least} (needed)"
        )));
    }
    let step = graph.find_variable(&names.global_step)?;
    let queue = graph.output(&names.queue)?;
    let operation = graph.device(&home(step.handle().operation()), || match n_tokens {
        0 => graph.group("no_init_tokens", &[]),
        n => {
            let tokens = ops::fill(&[n], step.read());
            graph.op("QueueEnqueueManyV2").input(queue).inputs([tokens]).build()
        }
    });
    graph.check()?;
    Ok(operation)
}

impl Optimizer for SyncReplicas {
    leave_updates_to!(self, self.inner);

    /// Adds what a worker runs, and returns it: pushes the gradients, then waits for a token. What the chief runs is added
    /// too.
    fn apply_gradients<'g>(
        &self,
        grads_and_vars: &[GradAndVar<'g>],
        global_step: Option<Variable<'g>>,
    ) -> Result<Operation<'g>> {
        let Some(first) = grads_and_vars.first() else {
            return Err(Error::invalid_argument("Must supply at least one variable"));
        };
        let step = global_step.ok_or_else(|| Error::invalid_argument("Global step is required to check staleness"))?;
        if self.replicas_to_aggregate == 0 || self.total_num_replicas == 0 {
            return Err(Error::invalid_argument("an update needs the gradients of at least one worker, not 0"));
        }
        let graph = first.variable.handle().graph();
        graph.check()?;
        let step_home = home(step.handle().operation());
        // A node that is no variable is on the worker; the local step stays with it whatever variables are told.
        let anchor = graph.absolute_scope("", || graph.group("sync_rep_anchor", &[]));
        let local_step = graph.colocate_with(anchor, || {
            let zero = Tensor::scalar(0i64);
            graph.absolute_scope("", || graph.new_variable("sync_rep_local_step", zero).local().build())
        });
        let local_init = local_step.assign(as_i64(step.read()));
        let ready = report_uninitialized_variables(graph, &graph.global_variables())?;
        let mut inits = vec![local_init];
        let mut applied = Vec::new();
        let mut taken = Vec::new();
        graph.name_scope("sync_replicas", || {
            for pair in grads_and_vars {
                let Some(grad) = pair.grad else {
                    taken.push(GradAndVar { grad: None, ..*pair });
                    continue;
                };
                let all = graph.device(&home(pair.variable.handle().operation()), || {
                    self.accumulate(pair.variable, grad, local_step.read(), step)
                });
                applied.push(all.apply);
                inits.push(all.set_step);
                taken.push(GradAndVar { grad: Some(all.taken), ..*pair });
            }
        });
        if applied.is_empty() {
            return self.inner.apply_gradients(grads_and_vars, global_step);
        }
        graph.absolute_scope("", || {
            graph.device(&step_home, || {
                let update = self.inner.apply_gradients(&taken, Some(step))?;
                let queue = FifoQueue::shared(graph, "sync_token_q", &[(DType::I64, PartialShape::scalar())], None);
                let token = graph.control_dependencies(&applied, || queue.dequeue());
                let token = *token.first().ok_or_else(|| Error::internal("a token queue without tokens"))?;
                let train = graph.colocate_with(anchor, || local_step.assign(token));
                let sync = graph.control_dependencies(&[update], || {
                    let n_tokens = self.total_num_replicas.max(self.replicas_to_aggregate);
                    queue.enqueue_many(&[ops::fill(&[n_tokens], as_i64(step.read_now()))])
                });
                let chief_init = graph.group("sync_rep_chief_init", &inits);
                graph.check()?;
                *self.made.borrow_mut() = Some(Names {
                    chief_init: chief_init.name(),
                    local_init: local_init.name(),
                    ready: ready.name(),
                    sync: sync.name(),
                    queue: queue.handle().name(),
                    close: queue.close().name(),
                    global_step: step.name(),
                });
                wrap_training(update, train, grads_and_vars)?;
                Ok(train)
            })
        })
    }

    fn slots<'g>(&self, graph: &'g Graph) -> Vec<Variable<'g>> {
        self.inner.slots(graph)
    }

    fn get_slot<'g>(&self, variable: Variable<'g>, slot: &str) -> Option<Variable<'g>> {
        self.inner.get_slot(variable, slot)
    }
}

/// Begins synchronous training in a monitored session, and on the chief makes the updates; see
/// [`SyncReplicas::make_session_run_hook`].
pub struct SyncReplicasHook {
    names: Names,
    is_chief: bool,
    n_tokens: usize,
    least_tokens: usize,
    init_tokens: Option<String>,
}

impl SyncReplicasHook {
    /// How many tokens the chief gives out before the first update: as many as gradients are aggregated unless said, as in
    /// TensorFlow, which lets each worker run one step ahead. With none, every gradient of a step is computed from the
    /// variables of that step.
    #[must_use]
    pub fn init_tokens(mut self, n_tokens: usize) -> SyncReplicasHook {
        self.n_tokens = n_tokens;
        self
    }
}

impl<'g> SessionHook<'g> for SyncReplicasHook {
    fn name(&self) -> &'static str {
        "SyncReplicas"
    }

    fn begin(&mut self, graph: &'g Graph) -> Result<()> {
        if self.is_chief {
            let operation = init_tokens(graph, &self.names, self.n_tokens, self.least_tokens)?;
            self.init_tokens = Some(operation.name());
        }
        Ok(())
    }

    fn after_create_session(&mut self, created: &CreatedContext<'_, 'g>) -> Result<()> {
        let session = created.session;
        let missing = session.run_named(&[&self.names.ready], &[], &[])?;
        let missing = missing.first().map(|names| names.strings().map(<[_]>::to_vec)).transpose()?.unwrap_or_default();
        if !missing.is_empty() {
            let names: Vec<_> = missing.iter().map(|name| String::from_utf8_lossy(name)).collect();
            return Err(Error::failed_precondition(format!(
                "Init operations did not make model ready for SyncReplicas: no value for {}",
                names.join(", ")
            )));
        }
        let init = if self.is_chief { &self.names.chief_init } else { &self.names.local_init };
        session.run_named(&[], &[], &[init])?;
        if let Some(tokens) = &self.init_tokens {
            session.run_named(&[], &[], &[tokens])?;
            spawn_loop("sync_replicas", session, created.coordinator, &self.names.sync)?;
        }
        Ok(())
    }

    /// The chief's end is the end of training: workers that wait for a token see the end of their input.
    fn end(&mut self, session: &std::sync::Arc<kolo_runtime::Session>) -> Result<()> {
        match self.is_chief {
            true => session.run_named(&[], &[], &[&self.names.close]).map(|_| ()),
            false => Ok(()),
        }
    }

    fn budget(&self) -> Duration {
        Duration::from_secs(1)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Arc;

    use kolo_core::Code;
    use kolo_runtime::{Host, Session, SessionConfig};

    use super::*;
    use crate::cluster::testing::{Problem, alone, on_workers};
    use crate::optim::{Adam, Momentum, Sgd};
    use crate::train::hooks::StopAtStep;
    use crate::train::{MonitoredTrainingSession, global_step_or_create};

    /// Trains for `n_steps` with `n` workers, one thread and one device each; the variables in the end.
    fn trained(n: usize, n_steps: i64, make: impl Fn() -> SyncReplicas + Sync) -> Vec<Tensor> {
        let values = on_workers(n, |worker, host| {
            let g = kolo_ops::graph();
            let device = format!("/cpu:{}", worker + 1);
            let problem = g.device(&device, || Problem::new(&g, "/cpu:0"));
            let sync = make();
            let step = g.device("/cpu:0", || global_step_or_create(&g)).unwrap();
            let train = g.device(&device, || sync.minimize(problem.loss, Some(step))).unwrap();
            let hook = sync.make_session_run_hook(&g, worker == 0).unwrap().init_tokens(0);
            let mut session = MonitoredTrainingSession::new(&g)
                .source(host.clone())
                .is_chief(worker == 0)
                .hook(hook)
                .hook(StopAtStep::last(n_steps))
                .build()
                .unwrap();
            let mut i = 0;
            while !session.should_stop() {
                session.run(&[], &problem.batch(worker, i), &[train]).unwrap();
                i += 1;
            }
            assert_eq!(i as i64, n_steps, "each worker took part in each step");
            let values = problem.values(session.session().unwrap());
            session.close().unwrap();
            values
        });
        values.into_iter().next().unwrap()
    }

    #[test]
    fn many_workers_equal_one_with_a_large_batch() {
        for n in [1, 2, 3] {
            let found = trained(n, 5, || SyncReplicas::new(Sgd::new(0.1), n));
            Problem::close(&found, &alone(n, 5, &Sgd::new(0.1)));
        }
        let found = trained(2, 6, || SyncReplicas::new(Momentum::new(0.1, 0.9), 2));
        Problem::close(&found, &alone(2, 6, &Momentum::new(0.1, 0.9)));
        let found = trained(2, 4, || SyncReplicas::new(Adam::new(0.05), 2));
        Problem::close(&found, &alone(2, 4, &Adam::new(0.05)));
    }

    /// One session that plays all parts, one step at a time.
    struct Play<'g> {
        session: Arc<Session>,
        g: &'g Graph,
        sync: SyncReplicas,
        train: Operation<'g>,
        x: Output<'g>,
        ids: Output<'g>,
        read: [Output<'g>; 3],
    }

    impl<'g> Play<'g> {
        fn new(g: &'g Graph, sync: SyncReplicas) -> Play<'g> {
            let w = g.variable("w", [0.0f32, 0.0]);
            let e = g.variable("e", [[0.0f32], [0.0], [0.0]]);
            let x = g.placeholder::<f32>("x", [Some(2)]);
            let ids = g.placeholder::<i64>("ids", [None]);
            let rows = ops::resource_gather(e.handle(), ids);
            let loss = ops::sum_all(w.read() * x) + ops::sum_all(rows);
            let step = global_step_or_create(g).unwrap();
            let train = sync.minimize(loss, Some(step)).unwrap();
            let init = g.global_variables_initializer();
            let operation_timeout = Some(Duration::from_secs(60));
            let config = SessionConfig { operation_timeout, ..SessionConfig::default() };
            let session = Arc::new(Session::with_config(g, config).unwrap());
            session.run_op(init).unwrap();
            Play { session, g, sync, train, x, ids, read: [w.read(), e.read(), step.read()] }
        }

        fn feeds(&self, x: f32, ids: &[i64]) -> Vec<(Output<'g>, Tensor)> {
            vec![(self.x, Tensor::from([x, x])), (self.ids, Tensor::vector(ids.to_vec()))]
        }

        fn floats(&self, i: usize) -> Vec<f32> {
            self.session.fetch(self.read[i]).unwrap().data::<f32>().unwrap().to_vec()
        }
    }

    #[test]
    fn late_gradients_are_dropped_and_rows_are_means_of_those_who_had_them() {
        let g = kolo_ops::graph();
        let play = Play::new(&g, SyncReplicas::new(Sgd::new(1.0), 2).total_num_replicas(3));
        let (session, sync) = (&play.session, &play.sync);
        session.run_op(sync.chief_init_op(&g).unwrap()).unwrap();
        let tokens = sync.init_tokens_op(&g, 3).unwrap();
        session.extend(&g).unwrap();
        session.run_op(tokens).unwrap();
        // Two of three are enough; the third comes before the update and counts, too.
        for (x, ids) in [(1.0, &[0i64, 1][..]), (3.0, &[1]), (5.0, &[1, 1])] {
            session.run(&[], &play.feeds(x, ids), &[play.train]).unwrap();
        }
        session.run_op(sync.sync_op(&g).unwrap()).unwrap();
        assert_eq!(play.floats(0), [-3.0, -3.0]);
        assert_eq!(play.floats(1), [-1.0, -(1.0 + 1.0 + 2.0) / 3.0, 0.0]);
        // The local step is still 0, of the initial tokens: this gradient is dropped.
        session.run(&[], &play.feeds(100.0, &[2]), &[play.train]).unwrap();
        let waits = play.session.clone();
        let sync_op = sync.sync_op(&g).unwrap().name();
        std::thread::scope(|scope| {
            let chief = scope.spawn(move || waits.run_named(&[], &[], &[&sync_op]).map(|_| ()));
            for x in [1.0, 2.0] {
                // Tokens of the update carry its number, so these count.
                session.run(&[], &play.feeds(x, &[2]), &[play.train]).unwrap();
            }
            chief.join().unwrap().unwrap();
        });
        assert_eq!(play.floats(0), [-4.5, -4.5]);
        assert_eq!(play.floats(1)[2], -1.0);
        assert_eq!(session.fetch(play.read[2]).unwrap(), Tensor::scalar(2i64));
        let _ = play.g;
    }

    #[test]
    fn names_are_tensorflows_and_mistakes_are_named() {
        let g = kolo_ops::graph();
        let sync = SyncReplicas::new(Sgd::new(1.0), 3).total_num_replicas(2);
        assert_eq!(sync.sync_op(&g).unwrap_err().code(), Code::FailedPrecondition);
        let play = Play::new(&g, sync);
        let node = |name: &str| g.operation(name).unwrap().node().unwrap();
        let dense = node("sync_replicas/conditional_accumulator");
        assert_eq!(
            (dense.op(), dense.attrs.str("shared_name").unwrap()),
            ("ResourceConditionalAccumulator", "w:0/grad_accum")
        );
        let sparse = node("sync_replicas/sparse_conditional_accumulator");
        assert_eq!(
            (sparse.op(), sparse.attrs.str("shared_name").unwrap()),
            ("SparseConditionalAccumulator", "e:0/grad_accum")
        );
        assert_eq!(sparse.attrs.shape("shape").unwrap(), &PartialShape::scalar());
        let queue = node("sync_token_q");
        assert_eq!((queue.op(), queue.attrs.str("shared_name").unwrap()), ("FIFOQueueV2", "sync_token_q"));
        assert_eq!(queue.attrs.int("capacity").unwrap(), -1);
        assert!(g.variables(|all| all.iter().any(|v| v.name == "sync_rep_local_step" && v.local)));
        assert!(g.operation("GradientDescent/update_w/ResourceApplyGradientDescent").is_ok());
        let error = play.sync.init_tokens_op(&g, 0).unwrap_err().to_string();
        assert!(error.contains("Too few tokens to finish the first step: 0 (given) vs 1 (needed)"), "{error}");
        let w = g.find_variable("w").unwrap();
        let pair = GradAndVar { grad: Some(g.constant([1.0f32, 1.0]).into()), variable: w };
        let error = SyncReplicas::new(Sgd::new(1.0), 1).apply_gradients(&[pair], None).unwrap_err().to_string();
        assert!(error.contains("Global step is required"), "{error}");
        assert!(
            SyncReplicas::new(Sgd::new(1.0), 0).apply_gradients(&[pair], g.find_variable("global_step").ok()).is_err()
        );
        assert!(SyncReplicas::new(Sgd::new(1.0), 1).apply_gradients(&[], None).is_err());
    }

    #[test]
    fn a_worker_that_waits_hears_of_the_end() {
        let host = Host::new(SessionConfig::default()).unwrap();
        let g = kolo_ops::graph();
        let w = g.variable("w", 1.0f32);
        let sync = SyncReplicas::new(Sgd::new(1.0), 2);
        let train = sync.minimize(w.read() * 2.0, Some(global_step_or_create(&g).unwrap())).unwrap();
        let hook = sync.make_session_run_hook(&g, true).unwrap().init_tokens(0);
        let mut chief = MonitoredTrainingSession::new(&g).source(host.clone()).hook(hook).build().unwrap();
        let worker = Arc::new(host.session(&g).unwrap());
        let name = train.name();
        std::thread::scope(|scope| {
            // Its gradient alone is not enough, so it waits; whether it waits already does not matter to the outcome.
            let waits = scope.spawn(move || worker.run_named(&[], &[], &[&name]).map(|_| ()));
            chief.close().unwrap();
            assert_eq!(waits.join().unwrap().unwrap_err().code(), Code::OutOfRange);
        });
    }
}
