//! What a trainer needs that is one rank of a world.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use kolo_core::{DType, Error, Result, Tensor};
use kolo_graph::{Graph, Operation, Output, Variable};
use kolo_runtime::Session;

use super::own_state::OwnState;
use crate::data::{Dataset, Position};
use crate::ops;
use crate::parallel::{
    RankTimes, ReduceOp, SlowRank, SlowRankWatch, WORLD, World, by_dtype_and_size, is_of_outer_step,
};

/// What a trainer knows that is needed to go on elsewhere: with other ranks, after one was lost.
#[derive(Clone)]
pub struct TrainerState {
    /// The global step.
    pub step: i64,
    /// The next batch.
    pub position: Position,
    values: Vec<(String, Tensor)>,
}

/// Variables that ranks give each other before they train.
pub(super) struct SharedVariables<'g> {
    /// With what their new values are fed to, and what assigns these.
    all: Vec<(Variable<'g>, Output<'g>, Operation<'g>)>,
}

impl<'g> SharedVariables<'g> {
    /// Those of `graph`: all that are saved, but for strings.
    pub fn new(graph: &'g Graph) -> SharedVariables<'g> {
        let variables = graph.global_variables();
        let assignable = |variable: Variable<'g>| {
            let value = graph.op("Placeholder").name("value").attr("dtype", variable.dtype());
            let value = value.attr("shape", variable.shape()).out();
            (variable, value, variable.assign(value))
        };
        let fixed = variables.into_iter().filter(|variable| variable.dtype().size().is_some());
        SharedVariables { all: graph.name_scope("shared_variables", || fixed.map(assignable).collect()) }
    }

    /// Gives all ranks the variables of the one that is farthest: the one with `state`, or else rank 0. Returns the
    /// place in the data where training goes on, if any rank had a state.
    pub fn share(&self, world: &World, session: &Session, state: Option<&TrainerState>) -> Result<Option<Position>> {
        let mine = match state {
            Some(TrainerState { step, position: Position { epoch, sample, seed }, .. }) => {
                [*step, *epoch as i64, *sample as i64, *seed as i64]
            }
            None => [-1; 4],
        };
        let all = world.all_gather(Tensor::from(mine))?;
        let all = all.data::<i64>()?;
        let step = |rank: usize| all[4 * rank];
        let root = (0..world.size()).rev().max_by_key(|rank| step(*rank)).unwrap_or(0);
        if let Some(state) = state.filter(|_| world.rank() == root) {
            self.assign(session, &state.values)?;
        }
        let variables: Vec<Variable<'g>> = self.all.iter().map(|(variable, ..)| *variable).collect();
        for bucket in by_dtype_and_size(&variables) {
            let reads: Vec<Output<'g>> = bucket.iter().map(|variable| variable.read()).collect();
            let values = world.broadcast(session.run(&reads, &[], &[])?, root)?;
            if world.rank() != root {
                let named: Vec<_> = bucket.iter().map(|variable| variable.name()).zip(values).collect();
                self.assign(session, &named)?;
            }
        }
        let [step, epoch, sample, seed] = [0, 1, 2, 3].map(|i| all[4 * root + i]);
        let position = Position { epoch: epoch as u64, sample: sample as u64, seed: seed as u64 };
        Ok((step >= 0).then_some(position))
    }

    fn assign(&self, session: &Session, values: &[(String, Tensor)]) -> Result<()> {
        let of = |(name, value): &(String, Tensor)| {
            let found = self.all.iter().find(|(variable, ..)| variable.name() == *name);
            let (_, new, assign) = found.ok_or_else(|| {
                Error::failed_precondition(format!(
                    "the state of a training has a variable '{name}', and this model has none"
                ))
            })?;
            Ok(((*new, value.clone()), *assign))
        };
        let (feeds, assigns): (Vec<_>, Vec<_>) = values.iter().map(of).collect::<Result<Vec<_>>>()?.into_iter().unzip();
        session.run(&[], &feeds, &assigns).map(drop)
    }

    /// Makes all ranks' variables of floats their mean: for ranks that were apart when a training ended. What an outer optimizer keeps is
    /// the same on all ranks.
    pub fn average(&self, world: &World, session: &Session) -> Result<()> {
        let all = self.all.iter().map(|(variable, ..)| *variable);
        let apart: Vec<Variable<'g>> =
            all.filter(|of| of.dtype().is_float() && !is_of_outer_step(&of.name())).collect();
        for bucket in by_dtype_and_size(&apart) {
            let reads: Vec<Output<'g>> = bucket.iter().map(|variable| variable.read()).collect();
            let means = world.all_reduce(session.run(&reads, &[], &[])?, ReduceOp::Mean)?;
            let named: Vec<_> = bucket.iter().map(|variable| variable.name()).zip(means).collect();
            self.assign(session, &named)?;
        }
        Ok(())
    }

    /// The state of a training that is at this place in its data.
    pub fn state(&self, session: &Session, step: i64, position: Position) -> Result<TrainerState> {
        let reads: Vec<Output<'g>> = self.all.iter().map(|(variable, ..)| variable.read()).collect();
        let values = session.run(&reads, &[], &[])?;
        let values = self.all.iter().map(|(variable, ..)| variable.name()).zip(values).collect();
        Ok(TrainerState { step, position, values })
    }
}

/// One of several ranks that train together.
pub(super) struct Ranks<'g> {
    pub world: World,
    pub variables: SharedVariables<'g>,
    /// What each rank has of its own.
    pub own: OwnState<'g>,
    /// What this rank says with each step: whether it wants to stop, as 1, how many rows it has, whether it is about to save, whether it
    /// knows of somebody who waits to be let in, and its times of the step before, each in a place of its own between zeros, so that the
    /// mean over all ranks holds what everybody said.
    pub says: Output<'g>,
    /// Variables that all ranks have alike: where rank 0 was in the data when it last saved is its own.
    compared: Vec<Variable<'g>>,
    check_every: u64,
    /// Batches need not be shared equally: the loss is the mean over the samples of all ranks.
    pub is_uneven: bool,
    n_since_check: u64,
    times: RankTimes,
    slow: SlowRankWatch,
    /// When a rank was last named as slow.
    named: HashMap<usize, Instant>,
}

/// How many numbers are not of one rank alone.
const SAID_BY_ALL: usize = 4;

/// A rank that is slow now and then is not named more often than this.
const NAMED_AGAIN: Duration = Duration::from_secs(60);

/// What a rank says with a step that it is about to begin, beside its times.
pub(super) struct SaidByRank {
    pub wants_to_stop: bool,
    pub n_rows: usize,
    /// It saves after the step.
    pub saves: bool,
    /// It knows of somebody who waits to be let in.
    pub wants_change: bool,
}

/// What all ranks have said with a step.
pub(super) struct Heard {
    /// A rank wants to stop, so all do.
    pub stops: bool,
    /// The rows of all ranks.
    pub n_rows: usize,
    /// Rank 0 is about to save, so all give it what they have of their own.
    pub saves: bool,
    /// Somebody waits to be let in, so all leave this world.
    pub changes: bool,
    /// A rank that has become slow.
    pub slow: Option<SlowRank>,
}

impl<'g> Ranks<'g> {
    pub fn new(
        graph: &'g Graph,
        world: World,
        position: Variable<'g>,
        check_every: u64,
        is_uneven: bool,
    ) -> Result<Ranks<'g>> {
        let says = graph.placeholder::<f32>("rank_says", [Some(SAID_BY_ALL + 2 * world.size())]);
        let (times, slow) = (RankTimes::default(), SlowRankWatch::default());
        let variables = SharedVariables::new(graph);
        let is_compared = |variable: &Variable<'g>| variable.name() != position.name();
        let compared = graph.global_variables().into_iter().filter(is_compared).collect();
        let own = OwnState::of(graph)?;
        Ok(Ranks {
            world,
            variables,
            own,
            compared,
            says,
            check_every,
            is_uneven,
            n_since_check: 0,
            times,
            slow,
            named: HashMap::new(),
        })
    }

    /// What this rank says with the next step.
    pub fn say(&mut self, said: SaidByRank) -> Tensor {
        // What ranks did together between two steps is no step.
        self.world.take_first_begun();
        self.world.begin_exchanges();
        let (rank, size) = (self.world.rank(), self.world.size());
        let mut says = vec![0.0f32; SAID_BY_ALL + 2 * size];
        says[0] = f32::from(u8::from(said.wants_to_stop));
        says[1] = said.n_rows as f32;
        says[2] = f32::from(u8::from(said.saves));
        says[3] = f32::from(u8::from(said.wants_change));
        let own = [self.times.busy, self.times.input].map(|seconds| seconds as f32);
        says[SAID_BY_ALL + 2 * rank..][..2].copy_from_slice(&own);
        Tensor::vector(says)
    }

    /// Takes the mean of what all said with a step. This rank has begun it then, and its input took so long.
    pub fn hear(&mut self, mean: &Tensor, began: Instant, input: Duration) -> Result<Heard> {
        self.world.end_exchanges();
        let n = self.world.size() as f32;
        let all = mean.data::<f32>()?;
        let seconds = |x: f32| f64::from(x * n);
        let times = all[SAID_BY_ALL..].chunks_exact(2);
        let times = times.map(|of| RankTimes { busy: seconds(of[0]), input: seconds(of[1]) });
        let is_known = |slow: &SlowRank| self.named.get(&slow.rank).is_some_and(|at| at.elapsed() < NAMED_AGAIN);
        let slow = self.slow.observe(times.collect()).filter(|slow| !is_known(slow));
        self.named.extend(slow.map(|slow| (slow.rank, Instant::now())));
        if let Some(slow) = slow.filter(|_| self.world.rank() == 0) {
            tracing::warn!(target: "kolo::train", "{slow}");
        }
        let met = self.world.take_first_begun().unwrap_or(began);
        self.times = RankTimes { busy: (met - began).as_secs_f64(), input: input.as_secs_f64() };
        Ok(Heard {
            stops: all[0] > 0.0,
            n_rows: (all[1] * n).round() as usize,
            saves: all[2] > 0.0,
            changes: all[3] > 0.0,
            slow,
        })
    }

    /// Compares the variables of all ranks now and then, and if this is the end. Ranks that are apart are compared when they meet.
    pub fn check(&mut self, session: &Session, is_end: bool, are_apart: bool) -> Result<()> {
        self.n_since_check += 1;
        let is_due = self.check_every > 0 && self.n_since_check >= self.check_every;
        if is_end || (is_due && !are_apart) {
            self.n_since_check = 0;
            self.world.check_these(&self.compared, session)?;
        }
        Ok(())
    }
}

/// The means over all ranks, as floats.
pub(super) fn mean_of_ranks<'g>(graph: &'g Graph, values: &[Output<'g>]) -> Result<Vec<Output<'g>>> {
    let floats: Vec<Output<'g>> = values.iter().map(|value| ops::cast(*value, DType::F32)).collect();
    let means = graph.device("/device:CPU:0", || {
        let op = graph.op("KoloAllReduce").name("mean_of_ranks").inputs(floats);
        op.attr("group", WORLD).attr("reduction", "mean").build().outputs()
    });
    graph.check()?;
    Ok(means)
}

/// An error if a run of one of these values is a meeting of ranks, which have different numbers of batches when they evaluate.
pub(super) fn check_evaluated(graph: &Graph, values: &[Output<'_>]) -> Result<()> {
    let nodes = graph.snapshot();
    for value in values {
        let (mut seen, mut open) = (HashSet::new(), vec![value.operation().id()]);
        while let Some(id) = open.pop() {
            if !seen.insert(id) {
                continue;
            }
            let node = nodes.node(id);
            if node.def.group.is_some() {
                return Err(Error::invalid_argument(format!(
                    "ranks cannot evaluate '{}', which depends on {} '{}': each has its own number of batches, and in that node they meet; \
                     give the model the loss and the metrics of one rank's batch to evaluate with (`Model::evaluate_with`)",
                    value.name(),
                    node.op(),
                    node.name
                )));
            }
            open.extend(node.inputs.iter().map(|at| at.node));
            open.extend(&node.control_inputs);
        }
    }
    Ok(())
}

/// This rank's rows of each batch. The mean of the ranks' means is that of the batch only if all have as many, or if each is over
/// the samples of all.
pub(super) fn shares(data: &Dataset, world: &World, is_uneven: bool) -> Result<Dataset> {
    let (n, is_always_full) = data.batch_size();
    if !is_uneven && (!n.is_multiple_of(world.size()) || !is_always_full) {
        return Err(Error::invalid_argument(format!(
            "batches of {n} cannot be shared equally by {} ranks{}; batch the data by {}, without a remainder, or make the loss one over \
             the samples of all ranks (`mean_over_samples`, `uneven_batches`)",
            world.size(),
            if is_always_full { "" } else { " (the last one may be smaller)" },
            n.next_multiple_of(world.size())
        )));
    }
    Ok(data.clone().split_batches(world.rank(), world.size()))
}
