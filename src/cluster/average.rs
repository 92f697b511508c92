//! Parameter averaging: every worker trains variables of its own, and now and then all take their mean.

use std::cell::RefCell;
use std::time::Duration;

use kolo_core::{Error, Result};
use kolo_graph::{Graph, Initializer, Operation, Variable};
use kolo_runtime::Session;

use super::ReplicaDeviceSetter;
use super::meeting::{BarrierState, Meeting, MeetingHook, MeetingNames};
use super::place::home;
use super::saved::save_under;
use crate::optim::{GradAndVar, Optimizer, leave_updates_to};

/// Wraps an optimizer: each worker trains on its own, and every N steps all workers' variables are replaced by
/// their mean.
///
/// The trained variables become local to each worker, with the optimizer's slots, so the model must be described on the
/// worker's device, not under a [`ReplicaDeviceSetter`]. A second copy of each (`<variable>/average`) holds the mean, on the
/// device of the global step or where [`ParameterAveraging::servers`] says. Checkpoints hold the mean under the variable's own
/// name.
///
/// ```
/// use kolo::cluster::ParameterAveraging;
/// use kolo::optim::{Optimizer, Sgd};
/// use kolo::train::{self, MonitoredTrainingSession, hooks::StopAtStep};
///
/// let g = kolo::graph();
/// let w = g.variable("w", 5.0f32);
/// let loss = w.read() * w.read();
/// let averaging = ParameterAveraging::new(Sgd::new(0.1), 2, 0, 1); // every second step, worker 0 of 1
/// let train = averaging.minimize(loss, Some(train::global_step_or_create(&g)?))?;
///
/// let hook = averaging.hook(&g, true)?;
/// let mut session = MonitoredTrainingSession::new(&g).hook(hook).hook(StopAtStep::last(4)).build()?;
/// while !session.should_stop() {
///     session.run(&[], &[], &[train])?;
/// }
/// session.close()?;
/// # Ok::<(), kolo::Error>(())
/// ```
pub struct ParameterAveraging {
    inner: Box<dyn Optimizer>,
    every: u64,
    worker: usize,
    n_workers: usize,
    timeout: Duration,
    servers: Option<ReplicaDeviceSetter>,
    made: RefCell<Option<(MeetingNames, String)>>,
}

impl ParameterAveraging {
    /// For worker number `worker` of `n_workers`: averages after every `every` of its steps.
    pub fn new(inner: impl Optimizer + 'static, every: u64, worker: usize, n_workers: usize) -> ParameterAveraging {
        ParameterAveraging::boxed(Box::new(inner), every, worker, n_workers)
    }

    /// The same for an optimizer that is chosen at run time.
    pub fn boxed(inner: Box<dyn Optimizer>, every: u64, worker: usize, n_workers: usize) -> ParameterAveraging {
        let timeout = Duration::from_secs(30);
        ParameterAveraging { inner, every, worker, n_workers, timeout, servers: None, made: RefCell::default() }
    }

    /// How long the first worker waits for the others before the mean is taken without them; 30 seconds unless said.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> ParameterAveraging {
        self.timeout = timeout;
        self
    }

    /// Puts the means on parameter servers.
    #[must_use]
    pub fn servers(mut self, setter: ReplicaDeviceSetter) -> ParameterAveraging {
        self.servers = Some(setter);
        self
    }

    /// The hook with which a worker of a monitored session takes part; call it after the gradients were applied.
    pub fn hook(&self, graph: &Graph, is_chief: bool) -> Result<MeetingHook> {
        let (names, average) = self.names(graph)?;
        let every = Some((self.every, average));
        Ok(MeetingHook { label: "ParameterAveraging", names, is_chief, every, n_runs: 0 })
    }

    /// Who has arrived with which round, and how long ago.
    pub fn state(&self, session: &Session, graph: &Graph) -> Result<BarrierState> {
        BarrierState::read(session, &self.names(graph)?.0.state)
    }

    /// What a worker runs to take part in a mean; the hook does so by itself.
    pub fn average_op<'g>(&self, graph: &'g Graph) -> Result<Operation<'g>> {
        graph.operation(&self.names(graph)?.1)
    }

    fn names(&self, graph: &Graph) -> Result<(MeetingNames, String)> {
        let names = self.made.borrow().clone().filter(|(names, _)| graph.operation(&names.update).is_ok());
        names.ok_or_else(|| {
            Error::failed_precondition("ParameterAveraging has nothing in this graph yet: apply the gradients first")
        })
    }

    /// The copy of a variable that holds the mean.
    fn center<'g>(&self, variable: Variable<'g>, step: Variable<'g>) -> Result<Variable<'g>> {
        let graph = variable.handle().graph();
        let name = variable.name();
        let shape = variable.shape().known().ok_or_else(|| {
            Error::invalid_argument(format!("'{name}' has no known shape, so no mean can be kept of it"))
        })?;
        let initial = variable.initializer().node().and_then(|node| node.inputs.get(1).copied());
        let initial = initial.ok_or_else(|| Error::internal(format!("'{name}' has no initial value")))?;
        let make = || {
            let builder = graph.new_variable("average", Initializer::Output(initial)).shape(shape);
            builder.dtype(variable.dtype()).kind(variable.kind()).not_trainable().build()
        };
        let center = graph.no_device(|| {
            graph.absolute_scope(&name, || match &self.servers {
                Some(setter) => setter.apply(graph, make),
                None => Ok(graph.device(&home(step.handle().operation()), make)),
            })
        })?;
        graph.check()?;
        save_under(graph, center, &name);
        graph.make_local(variable);
        Ok(center)
    }
}

impl Optimizer for ParameterAveraging {
    leave_updates_to!(self, self.inner);

    /// Adds the worker's own update, and returns it. What takes the mean is added too.
    fn apply_gradients<'g>(
        &self,
        grads_and_vars: &[GradAndVar<'g>],
        global_step: Option<Variable<'g>>,
    ) -> Result<Operation<'g>> {
        let step = global_step.ok_or_else(|| {
            Error::invalid_argument("ParameterAveraging needs the global step: workers meet beside it")
        })?;
        if self.every == 0 {
            return Err(Error::invalid_argument("variables are averaged after every 1 or more steps, not 0"));
        }
        let train = self.inner.apply_gradients(grads_and_vars, global_step)?;
        let graph = step.handle().graph();
        self.inner.slots(graph).into_iter().for_each(|slot| graph.make_local(slot));
        let meeting = Meeting::new("kolo_averaging", step, self.worker, self.n_workers, "drop")?;
        let variables: Vec<Variable<'g>> =
            grads_and_vars.iter().filter(|pair| pair.grad.is_some()).map(|pair| pair.variable).collect();
        let centers = variables.iter().map(|&variable| self.center(variable, step)).collect::<Result<Vec<_>>>()?;
        graph.name_scope("parameter_averaging", || {
            let round = meeting.wait(0.0, self.timeout);
            let (mut pushed, mut set, mut pulled) = (Vec::new(), Vec::new(), Vec::new());
            for (&variable, &center) in variables.iter().zip(&centers) {
                let store = meeting.store(center, "kolo_values", variable.dtype());
                pushed.push(meeting.push(store, variable.read().into()));
                let mean = meeting.take(store, center, &round, variable.read().into()).dense()?;
                set.push(graph.colocate_with(center.handle().operation(), || center.assign(mean)));
            }
            let arrived = meeting.arrive(&pushed);
            let pull = |variable: Variable<'g>, center: Variable<'g>| {
                let mean = graph.colocate_with(center.handle().operation(), || center.read_now());
                graph.colocate_with(variable.handle().operation(), || variable.assign(mean))
            };
            graph.control_dependencies(&[arrived], || {
                pulled.extend(variables.iter().zip(&centers).map(|(&variable, &center)| pull(variable, center)));
            });
            let average = graph.group("average", &pulled);
            let update = graph.control_dependencies(&set, || meeting.release(round.number + 1));
            // At the beginning everybody takes the chief's values; rounds are counted from 0.
            let first: Vec<Operation<'g>> =
                variables.iter().zip(&centers).map(|(&variable, &center)| pull(variable, center)).collect();
            let zero = graph.constant(0i64);
            let chief_init = meeting.release(zero);
            let local_init = graph.group("init", &[first, vec![meeting.begin_at(zero)]].concat());
            let names = MeetingNames {
                chief_init: chief_init.name(),
                local_init: local_init.name(),
                update: update.name(),
                close: meeting.close().name(),
                leave: meeting.leave().name(),
                state: meeting.state().name(),
            };
            graph.check()?;
            *self.made.borrow_mut() = Some((names, average.name()));
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
    use kolo_core::Tensor;
    use kolo_runtime::Session;

    use super::*;
    use crate::cluster::testing::{Problem, on_workers, train_on};
    use crate::optim::{Momentum, Sgd};
    use crate::train::{Saver, global_step_or_create};

    #[test]
    fn workers_train_apart_and_meet_at_their_mean() {
        const EVERY: u64 = 3;
        let found = on_workers(2, |worker, host| {
            let g = kolo_ops::graph();
            let make = |_: &Graph, problem: &Problem<'_>, step| {
                let averaging = ParameterAveraging::new(Momentum::new(0.1, 0.9), EVERY, worker, 2);
                let train = averaging.minimize(problem.loss, Some(step)).unwrap().name();
                (averaging, train)
            };
            // Each worker makes six steps at least: they meet after three and after six.
            let (values, _) = train_on(&g, worker, host, 12, true, make, |averaging, g, is_chief| {
                Box::new(averaging.hook(g, is_chief).unwrap())
            });
            values.into_iter().nth(5).unwrap()
        });
        // The same by hand: two models of their own, and a mean after every third step.
        let models: Vec<_> = (0..2)
            .map(|_| {
                let g: &'static Graph = Box::leak(Box::new(kolo_ops::graph()));
                let problem = Problem::new(g, "");
                let train = Momentum::new(0.1, 0.9).minimize(problem.loss, None).unwrap();
                let init = g.global_variables_initializer();
                let value = g.placeholder::<f32>("value", kolo_core::PartialShape::unknown());
                let set: Vec<_> = g.trainable_variables().iter().map(|v| v.assign(value)).collect();
                let session = Session::new(g).unwrap();
                session.run_op(init).unwrap();
                (session, problem, train, value, set)
            })
            .collect();
        for i in 0..6 {
            for (worker, (session, problem, train, ..)) in models.iter().enumerate() {
                session.run(&[], &problem.batch(worker, i), &[*train]).unwrap();
            }
            if (i + 1) % EVERY as usize == 0 {
                let values: Vec<Vec<Tensor>> =
                    models.iter().map(|(session, problem, ..)| problem.values(session)).collect();
                for (at, (a, b)) in values[0].iter().zip(&values[1]).enumerate() {
                    let mean = a.data::<f32>().unwrap().iter().zip(b.data::<f32>().unwrap());
                    let mean = mean.map(|(a, b)| (a + b) / 2.0).collect();
                    let mean = Tensor::from_vec(a.shape().clone(), mean).unwrap();
                    for (session, _, _, value, set) in &models {
                        session.run(&[], &[(*value, mean.clone())], &[set[at]]).unwrap();
                    }
                }
            }
        }
        let expected = models[0].1.values(&models[0].0);
        Problem::close(&found[0], &expected);
        Problem::close(&found[1], &expected);
    }

    #[test]
    fn checkpoints_hold_the_mean_under_the_variables_name() {
        let dir = std::env::temp_dir().join(format!("kolo-average-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let prefix = dir.join("model").to_string_lossy().into_owned();
        let g = kolo_ops::graph();
        let w = g.variable("w", 3.0f32);
        let averaging = ParameterAveraging::new(Momentum::new(1.0, 0.5), 1, 0, 1);
        averaging.minimize(w.read() * 1.0, Some(global_step_or_create(&g).unwrap())).unwrap();
        let globals: Vec<String> = g.global_variables().iter().map(|variable| variable.name()).collect();
        assert_eq!(globals, ["global_step", "w/average"], "variables and slots are each worker's own");
        assert_eq!(g.trainable_variables().len(), 1);
        let init = g.global_variables_initializer();
        let saver = Saver::new(&g).unwrap();
        let session = Session::new(&g).unwrap();
        session.run_op(init).unwrap();
        saver.save(&session, &prefix, None).unwrap();
        // A program that does not average reads it.
        let g = kolo_ops::graph();
        let w = g.variable("w", 0.0f32);
        let saver = Saver::new(&g).unwrap();
        let session = Session::new(&g).unwrap();
        saver.restore(&session, &prefix).unwrap();
        assert_eq!(session.fetch(w.read()).unwrap(), Tensor::scalar(3.0f32));
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn mistakes_are_named() {
        let g = kolo_ops::graph();
        let w = g.variable("w", 1.0f32);
        let step = global_step_or_create(&g).unwrap();
        let error = |averaging: ParameterAveraging, step| averaging.minimize(w.read(), step).unwrap_err().to_string();
        assert!(error(ParameterAveraging::new(Sgd::new(1.0), 0, 0, 1), Some(step)).contains("not 0"));
        assert!(error(ParameterAveraging::new(Sgd::new(1.0), 1, 0, 1), None).contains("global step"));
    }
}
