//! Where workers meet once per round: the graph's side of `KoloBarrier` and `KoloGradientStore`.
//!
//! Used for gradients in every step ([`super::HybridReplicas`]) and for the variables themselves now and then
//! ([`super::ParameterAveraging`]).

use std::sync::Arc;
use std::time::Duration;

use kolo_core::{DType, Error, Result, Tensor};
use kolo_graph::{Grad, Graph, IndexedSlices, Operation, Output, Variable};
use kolo_runtime::Session;

use super::chief::spawn_loop;
use super::place::home;
use super::sync_replicas::{as_i64, shape_of};
use crate::train::{CreatedContext, RunContext, RunValues, SessionHook};

/// The barrier of a graph, and this worker's place at it.
pub(super) struct Meeting<'g> {
    graph: &'g Graph,
    barrier: Output<'g>,
    /// The round that this worker takes part in; a local variable.
    round: Variable<'g>,
    anchor: Operation<'g>,
    worker: usize,
    n_workers: usize,
}

impl<'g> Meeting<'g> {
    /// A barrier shared under `name`, on the device of `step`.
    pub fn new(name: &str, step: Variable<'g>, worker: usize, n_workers: usize, late: &str) -> Result<Meeting<'g>> {
        if worker >= n_workers {
            return Err(Error::invalid_argument(format!(
                "there is no worker {worker}: there are {n_workers}, from 0 on"
            )));
        }
        let graph = step.handle().graph();
        graph.absolute_scope("", || {
            let barrier = graph.device(&home(step.handle().operation()), || {
                let builder = graph.op("KoloBarrier").name(name).attr("shared_name", name);
                builder.attr("n_workers", n_workers).attr("late", late).out()
            });
            // A node that is no variable is on the worker; the round stays with it whatever variables are told.
            let anchor = graph.group(&format!("{name}_anchor"), &[]);
            let round = graph.colocate_with(anchor, || {
                graph.new_variable(&format!("{name}_round"), Tensor::scalar(0i64)).local().build()
            });
            graph.check()?;
            Ok(Meeting { graph, barrier, round, anchor, worker, n_workers })
        })
    }

    /// A store beside `variable`, shared under `<variable>:0/<name>`.
    pub fn store(&self, variable: Variable<'g>, name: &str, dtype: DType) -> Output<'g> {
        let graph = self.graph;
        graph.device(&home(variable.handle().operation()), || {
            let builder = graph.op("KoloGradientStore").attr("shared_name", format!("{}:0/{name}", variable.name()));
            builder.attr("dtype", dtype).attr("shape", variable.shape()).attr("n_workers", self.n_workers).out()
        })
    }

    /// Leaves a value in a store.
    pub fn push(&self, store: Output<'g>, value: Grad<'g>) -> Operation<'g> {
        let graph = self.graph;
        graph.device(&home(store.operation()), || {
            let head = [store, graph.constant(self.worker as i64), self.round.read()];
            match value {
                Grad::Dense(value) => graph.op("KoloGradientPush").inputs(head).input(value).build(),
                Grad::Slices(rows) => {
                    let rows = [as_i64(rows.indices), rows.values];
                    graph.op("KoloGradientPushRows").inputs(head).inputs(rows).build()
                }
            }
        })
    }

    /// The mean of what the round's workers left, in the form of `like`.
    pub fn take(&self, store: Output<'g>, variable: Variable<'g>, round: &Round<'g>, like: Grad<'g>) -> Grad<'g> {
        let graph = self.graph;
        graph.device(&home(store.operation()), || {
            let inputs = [store, round.members, round.weights];
            match like {
                Grad::Dense(value) => {
                    graph.op("KoloGradientTake").inputs(inputs).attr("dtype", value.dtype()).out().into()
                }
                Grad::Slices(rows) => {
                    let taken = graph.op("KoloGradientTakeRows").inputs(inputs).attr("dtype", rows.values.dtype());
                    let taken = taken.build().outputs();
                    let [indices, values] = taken.as_slice() else { return Output::invalid(graph).into() };
                    let dense_shape = shape_of(graph, variable).unwrap_or(rows.dense_shape);
                    Grad::Slices(IndexedSlices { values: *values, indices: *indices, dense_shape })
                }
            }
        })
    }

    /// What a worker does after `pushed`: waits for the others, and goes on with the next round.
    pub fn arrive(&self, pushed: &[Operation<'g>]) -> Operation<'g> {
        let graph = self.graph;
        let next = graph.device(&home(self.barrier.operation()), || {
            graph.control_dependencies(pushed, || {
                let inputs = [self.barrier, graph.constant(self.worker as i64), self.round.read()];
                graph.op("KoloBarrierArrive").inputs(inputs).out()
            })
        });
        graph.colocate_with(self.anchor, || self.round.assign(next))
    }

    /// What the chief waits for.
    pub fn wait(&self, min_share: f64, timeout: Duration) -> Round<'g> {
        let graph = self.graph;
        let timeout = i64::try_from(timeout.as_millis()).unwrap_or(i64::MAX);
        let outputs = graph.device(&home(self.barrier.operation()), || {
            let inputs = [self.barrier, graph.constant(min_share as f32), graph.constant(timeout)];
            graph.op("KoloBarrierWait").inputs(inputs).build().outputs()
        });
        match outputs.as_slice() {
            [members, weights, number] => Round { members: *members, weights: *weights, number: *number },
            _ => Round {
                members: Output::invalid(graph),
                weights: Output::invalid(graph),
                number: Output::invalid(graph),
            },
        }
    }

    /// Begins round `number`, under the control dependencies that are open.
    pub fn release(&self, number: Output<'g>) -> Operation<'g> {
        let graph = self.graph;
        graph.device(&home(self.barrier.operation()), || {
            graph.op("KoloBarrierRelease").inputs([self.barrier, as_i64(number)]).build()
        })
    }

    /// Says that this worker does not come any more.
    pub fn leave(&self) -> Operation<'g> {
        let graph = self.graph;
        graph.device(&home(self.barrier.operation()), || {
            let worker = graph.constant(self.worker as i64);
            graph.op("KoloBarrierLeave").inputs([self.barrier, worker]).build()
        })
    }

    /// Ends all waiting.
    pub fn close(&self) -> Operation<'g> {
        let graph = self.graph;
        graph.device(&home(self.barrier.operation()), || graph.op("KoloBarrierClose").input(self.barrier).build())
    }

    /// Sets this worker's round.
    pub fn begin_at(&self, number: Output<'g>) -> Operation<'g> {
        self.graph.colocate_with(self.anchor, || self.round.assign(as_i64(number)))
    }

    /// The operation of `KoloBarrierState`, for [`BarrierState::read`].
    pub fn state(&self) -> Operation<'g> {
        let graph = self.graph;
        graph.device(&home(self.barrier.operation()), || graph.op("KoloBarrierState").input(self.barrier).build())
    }
}

/// A round, as the chief learns of it.
pub(super) struct Round<'g> {
    members: Output<'g>,
    weights: Output<'g>,
    /// Its number.
    pub number: Output<'g>,
}

/// Who has arrived at a barrier, with which step, and how long ago; and what became of every gradient.
#[derive(Clone, Debug, PartialEq)]
pub struct BarrierState {
    /// The step of the round.
    pub step: i64,
    /// The workers, by number.
    pub workers: Vec<WorkerState>,
    /// The last late gradients, at most 1,024.
    pub late: Vec<LateGradient>,
}

/// A worker as its barrier knows it.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerState {
    /// In time for this round.
    pub has_arrived: bool,
    /// The step with which it came last, and how long ago that was; `None` if it never came.
    pub last: Option<(i64, Duration)>,
    /// Gradients that came in time.
    pub n_in_time: u64,
    /// Late ones that were dropped.
    pub n_dropped: u64,
    /// Late ones that were scaled.
    pub n_scaled: u64,
    /// Late ones that were queued.
    pub n_queued: u64,
}

/// A gradient that came when its round was over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LateGradient {
    /// Whose it was.
    pub worker: usize,
    /// The step it was computed for.
    pub step: i64,
    /// The step of the round in which it came.
    pub came_at: i64,
}

impl BarrierState {
    /// Reads the state by the name of its operation. It waits for nobody.
    pub(super) fn read(session: &Session, operation: &str) -> Result<BarrierState> {
        let names: Vec<String> = (0..6).map(|i| format!("{operation}:{i}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let values = session.run_named(&names, &[], &[])?;
        let [step, has_arrived, last, ago, counts, late] = values.as_slice() else {
            return Err(Error::internal("a barrier's state has six parts"));
        };
        let (has_arrived, last, ago) = (has_arrived.data::<bool>()?, last.data::<i64>()?, ago.data::<f32>()?);
        let worker = |(i, counts): (usize, &[i64])| {
            let count = |at: usize| counts.get(at).map_or(0, |&n| n.unsigned_abs());
            let ago = ago.get(i).and_then(|&ago| Duration::try_from_secs_f32(ago).ok());
            WorkerState {
                has_arrived: has_arrived.get(i).copied().unwrap_or(false),
                last: last.get(i).copied().zip(ago),
                n_in_time: count(0),
                n_dropped: count(1),
                n_scaled: count(2),
                n_queued: count(3),
            }
        };
        let late = late.data::<i64>()?.chunks_exact(4).map(|line| LateGradient {
            worker: usize::try_from(line[0]).unwrap_or(0),
            step: line[1],
            came_at: line[2],
        });
        Ok(BarrierState {
            step: step.scalar_value()?,
            workers: counts.data::<i64>()?.chunks_exact(4).enumerate().map(worker).collect(),
            late: late.collect(),
        })
    }
}

/// What a meeting added to a graph, by name.
#[derive(Clone, Debug)]
pub(super) struct MeetingNames {
    /// What the chief runs before training, and every other worker.
    pub chief_init: String,
    pub local_init: String,
    /// What the chief runs over and over.
    pub update: String,
    /// Ends all waiting, and that for this worker.
    pub close: String,
    pub leave: String,
    pub state: String,
}

/// Begins a worker's part in a monitored session, and on the chief makes the updates.
pub struct MeetingHook {
    pub(super) label: &'static str,
    pub(super) names: MeetingNames,
    pub(super) is_chief: bool,
    /// What to run every N runs, and the number of runs since.
    pub(super) every: Option<(u64, String)>,
    pub(super) n_runs: u64,
}

impl<'g> SessionHook<'g> for MeetingHook {
    fn name(&self) -> &'static str {
        self.label
    }

    fn after_create_session(&mut self, created: &CreatedContext<'_, 'g>) -> Result<()> {
        let session = created.session;
        if self.is_chief {
            session.run_named(&[], &[], &[&self.names.chief_init])?;
        }
        session.run_named(&[], &[], &[&self.names.local_init])?;
        if self.is_chief {
            spawn_loop(self.label, session, created.coordinator, &self.names.update)?;
        }
        Ok(())
    }

    fn after_run(&mut self, context: &RunContext<'_, 'g>, _values: &RunValues<'_>) -> Result<()> {
        let Some((every, operation)) = &self.every else { return Ok(()) };
        self.n_runs += 1;
        if self.n_runs.is_multiple_of((*every).max(1)) {
            context.session.run_named(&[], &[], &[operation])?;
        }
        Ok(())
    }

    /// The chief's end is the end of training: workers that wait see the end of their input. Nobody waits for a worker that
    /// has ended.
    fn end(&mut self, session: &Arc<Session>) -> Result<()> {
        let last = if self.is_chief { &self.names.close } else { &self.names.leave };
        session.run_named(&[], &[], &[last]).map(|_| ())
    }

    fn budget(&self) -> Duration {
        Duration::from_secs(60)
    }
}
