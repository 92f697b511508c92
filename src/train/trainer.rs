//! A training loop for those who want none of their own: fit, evaluate, predict.

mod build;
mod model;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kolo_core::{Error, Result, Shape, Tensor};
use kolo_graph::{Graph, Operation, Output, Variable};
use kolo_runtime::Session;

use super::callback::{Callback, EpochReport, Flow, StepReport};
use super::own_state::{OfAllRanks, remove_orphans, write_beside};
use super::ranks::{Ranks, SaidByRank, TrainerState, check_evaluated, shares};
use super::step_calls::StepCalls;
use super::worker::Worker;
use super::{BackgroundSave, Every, Restored, Saver, Timer, read_global_step};
use crate::data::{Dataset, Position};
use crate::parallel::{Activity, ElasticRank, ExchangeReport, ReduceOp, SlowRank};
use crate::strategy::Strategy;

pub use self::build::TrainerBuilder;
pub use self::model::{Evaluation, Model};

/// Runs training, evaluation and prediction over data sets.
///
/// ```
/// use kolo::data::Dataset;
/// use kolo::optim::{Optimizer, Sgd};
/// use kolo::train::{Model, Trainer, global_step_or_create};
/// use kolo::{Tensor, ops};
///
/// let g = kolo::graph();
/// let x = g.placeholder::<f32>("x", [None, Some(1)]);
/// let y = g.placeholder::<f32>("y", [None, Some(1)]);
/// let w = g.variable("w", [[0.0f32]]);
/// let loss = ops::mean_all(ops::square(ops::matmul(x, w.read()) - y));
/// let train_op = Sgd::new(0.1).minimize(loss, Some(global_step_or_create(&g)?))?;
///
/// let data = Dataset::new([Tensor::from([[1.0f32], [2.0]]), Tensor::from([[3.0f32], [6.0]])]).batch(2, false);
/// let mut trainer = Trainer::new(&g, Model::new(&[x, y], loss, train_op)).build()?;
/// trainer.fit(&data.clone().repeat(50), &mut [])?;
/// assert!(trainer.evaluate(&data)?.loss < 1e-6); // w is 3 by now
/// # Ok::<(), kolo::Error>(())
/// ```
pub struct Trainer<'g> {
    graph: &'g Graph,
    model: Model<'g>,
    session: Arc<Session>,
    train: StepCalls<'g>,
    position: Variable<'g>,
    set_position: (Output<'g>, Operation<'g>),
    saver: Saver,
    checkpoints: Option<Checkpoints>,
    running: Option<(i64, BackgroundSave)>,
    /// The step of the newest whole checkpoint, so that it is not written twice.
    saved: Option<i64>,
    stop: Arc<AtomicBool>,
    restored: Option<Restored>,
    /// Whether it goes on from a place in the data.
    is_resumed: bool,
    /// The place in the data after the last step.
    at: Position,
    ranks: Option<Ranks<'g>>,
    /// Whether there are checkpoints, of any rank.
    may_save: bool,
    /// What a step would exchange if gradients went whole.
    whole_bytes: Option<f64>,
    strategy: Option<Strategy>,
    /// Its part in a cluster with parameter servers, and what it fetches in a step.
    worker: Option<(Worker<'g>, Vec<Output<'g>>)>,
    elastic: Option<ElasticRank>,
}

/// Where and how often to save.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    /// The directory, made if it is not there.
    pub dir: PathBuf,
    /// How often.
    pub every: Every,
    /// How many to keep; 0 keeps all.
    pub keep: usize,
}

/// How a call of [`Trainer::fit`] ended.
#[derive(Clone, Debug)]
pub struct FitReport {
    /// The global step.
    pub step: i64,
    /// Steps made by this call.
    pub n_steps: u64,
    /// Samples seen by this call.
    pub n_samples: u64,
    /// The loss of the last step; NaN if there was none.
    pub last_loss: f64,
    /// How long it took.
    pub took: Duration,
    /// True if a callback or the stop flag ended it before the data did.
    pub stopped: bool,
    /// Ranks for which all others had to wait, when that began.
    pub slow_ranks: Vec<SlowRank>,
    /// What this rank has exchanged with others, if there are any.
    pub exchange: Option<ExchangeReport>,
}

impl FitReport {
    /// Of no step.
    pub(super) fn none(step: i64) -> FitReport {
        FitReport {
            step,
            n_steps: 0,
            n_samples: 0,
            last_loss: f64::NAN,
            took: Duration::ZERO,
            stopped: false,
            slow_ranks: Vec::new(),
            exchange: None,
        }
    }
}

impl<'g> Trainer<'g> {
    /// A trainer of `model`, local and without checkpoints unless told otherwise.
    #[allow(clippy::new_ret_no_self)]
    pub fn new(graph: &'g Graph, model: Model<'g>) -> TrainerBuilder<'g> {
        TrainerBuilder::new(graph, model)
    }

    /// The session.
    pub fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// The checkpoint it went on from, if it did.
    pub fn restored(&self) -> Option<&Restored> {
        self.restored.as_ref()
    }

    /// The global step.
    pub fn step(&self) -> Result<i64> {
        Ok(read_global_step(&self.session, self.graph)?.unwrap_or(0))
    }

    /// The place in the data that the variables' values belong to: the next batch to train on.
    pub fn position(&self) -> Result<Position> {
        read_position(&self.session, self.position)
    }

    /// What is needed to go on in another trainer, with other ranks, if this one cannot: after [`Trainer::fit`] has failed
    /// because a rank was lost, and updates were atomic
    /// ([`DataParallel::atomic_updates`](crate::parallel::DataParallel::atomic_updates)). Waits for a checkpoint that is being
    /// written.
    pub fn state(&mut self) -> Result<TrainerState> {
        self.collect_save();
        let Some(ranks) = &self.ranks else {
            return Err(Error::failed_precondition("a trainer that is alone has checkpoints"));
        };
        ranks.variables.state(&self.session, self.step()?, self.at)
    }

    /// Trains on `data` until it ends, or something asks to stop. If the trainer was resumed, the data goes on where it was.
    pub fn fit(&mut self, data: &Dataset, callbacks: &mut [&mut dyn Callback]) -> Result<FitReport> {
        let result = self.fit_in_this_world(data, callbacks);
        if let Some(rank) = self.elastic.clone() {
            // Also after the last step: a rank may be lost while the model is tested.
            rank.keep(self.state().ok());
        }
        result
    }

    fn fit_in_this_world(&mut self, data: &Dataset, callbacks: &mut [&mut dyn Callback]) -> Result<FitReport> {
        let n_ranks = self.ranks.as_ref().map(|ranks| ranks.world.size());
        if let (Some(strategy), true) = (&self.strategy, self.ranks.as_ref().is_some_and(|ranks| !ranks.is_uneven)) {
            strategy.check_batches(data)?;
        }
        let mut batches = match &self.ranks {
            Some(ranks) => shares(data, &ranks.world, ranks.is_uneven)?.batches()?,
            None => match &self.strategy {
                Some(strategy) => strategy.distribute(data)?.batches()?,
                None => data.batches()?,
            },
        };
        if self.is_resumed && self.at != Position::default() {
            batches.restore(self.at)?;
        }
        let per_epoch = data.batches_per_epoch();
        let mut step = self.step()?;
        let mut report = FitReport::none(step);
        let metered = self.ranks.as_ref().map(|ranks| ranks.world.exchanged());
        let mut timer = self.checkpoints.as_ref().map(|checkpoints| Timer::new(checkpoints.every));
        if let Some(timer) = &mut timer {
            timer.acted(step);
        }
        callbacks.iter_mut().try_for_each(|callback| callback.on_begin(step))?;
        let (began, mut last) = (Instant::now(), Instant::now());
        let mut feeds = self.model.train_feeds.clone();
        // Ranks stop after the same step: each says with a step whether it was asked to, and learns from it whether one was.
        let is_asked_alone = |trainer: &Self| trainer.ranks.is_none() && trainer.stop.load(Ordering::Relaxed);
        let (mut is_agreed, mut slow_ranks, mut is_met) = (false, Vec::new(), true);
        while !is_agreed && !is_asked_alone(self) {
            let began_step = Instant::now();
            if let Some(ranks) = &self.ranks {
                ranks.world.begin_input(step + 1);
            }
            let Some(batch) = batches.next() else { break };
            let (batch, input) = (batch?, began_step.elapsed());
            let call = self.train.of(step + 1);
            // While they are apart, ranks do not talk.
            let are_apart = call.are_apart;
            let is_free = self.running.as_ref().is_none_or(|(_, save)| save.is_done());
            let saves = timer.as_ref().is_some_and(|timer| is_free && timer.is_due(step + 1));
            feeds.truncate(self.model.train_feeds.len());
            if let Some(ranks) = self.ranks.as_mut().filter(|_| !are_apart) {
                let wants_change = self.elastic.as_ref().is_some_and(ElasticRank::wants_change);
                let wants_to_stop = self.stop.load(Ordering::Relaxed);
                let said = SaidByRank { wants_to_stop, n_rows: batch.len(), saves, wants_change };
                feeds.push((ranks.says, ranks.say(said)));
            }
            self.note(Activity::Computing);
            let mut values = match &mut self.worker {
                None => self.model.run(call.callable, &batch.tensors, &feeds)?,
                Some((worker, watched)) => {
                    let columns = self.model.inputs.iter().copied().zip(batch.tensors.iter().cloned());
                    let feeds: Vec<_> = columns.chain(feeds.iter().cloned()).collect();
                    let Some(values) = worker.step(watched, &feeds, self.model.train_op)? else { break };
                    self.session = worker.session()?;
                    // Other workers make steps as well.
                    step = worker.global_step().unwrap_or(step + 1) - 1;
                    values
                }
            };
            // Before anything else can fail: the variables are one step further.
            self.at = batches.save();
            let mut n_samples = batch.len() * if are_apart { n_ranks.unwrap_or(1) } else { 1 };
            let (mut of_all, mut changes) = (None, false);
            if let (Some(ranks), Some(mean)) = (&mut self.ranks, values.pop_if(|_| n_ranks.is_some() && !are_apart)) {
                let heard = ranks.hear(&mean, began_step, input)?;
                is_agreed = heard.stops;
                changes = heard.changes && !heard.stops;
                n_samples = heard.n_rows;
                slow_ranks.extend(heard.slow);
                if heard.saves && !ranks.own.is_empty() {
                    of_all = Some(ranks.own.gather(&ranks.world, &self.session)?);
                }
            }
            if let Some(ranks) = &mut self.ranks {
                ranks.check(&self.session, false, are_apart)?;
            }
            is_met = !are_apart;
            let values = values.iter().map(number).collect::<Result<Vec<f64>>>()?;
            step += 1;
            let now = Instant::now();
            let loss = values[0];
            if !loss.is_finite() {
                return Err(not_finite(loss, step));
            }
            report = FitReport {
                step,
                n_steps: report.n_steps + 1,
                n_samples: report.n_samples + n_samples as u64,
                last_loss: loss,
                took: began.elapsed(),
                stopped: false,
                slow_ranks: Vec::new(),
                exchange: None,
            };
            let seen = StepReport {
                step,
                epoch: batch.epoch,
                batch: batch.index,
                batches_per_epoch: per_epoch,
                loss,
                metrics: &values[1..],
                names: &self.model.metrics,
                n_samples,
                took: now - last,
            };
            last = now;
            let mut flow = Flow::Continue;
            for callback in callbacks.iter_mut() {
                flow = flow.and(callback.on_step(&seen)?);
            }
            if batch.is_last_of_epoch {
                let epoch = EpochReport { epoch: batch.epoch, step, loss };
                for callback in callbacks.iter_mut() {
                    flow = flow.and(callback.on_epoch_end(&epoch, self)?);
                }
            }
            if let Some(timer) = &mut timer
                && timer.is_due(step)
                && self.running.as_ref().is_none_or(|(_, save)| save.is_done())
                // What ranks have of their own is there if it was said before the step that it would be needed.
                && self.has_all_to_save(are_apart, of_all.is_some())
            {
                timer.acted(step);
                self.save_position(batches.save())?;
                self.write_own(of_all.as_ref(), step)?;
                self.begin_save(step);
            }
            if flow == Flow::Stop {
                report.stopped = true;
                break;
            }
            if changes {
                return Err(Error::aborted(format!(
                    "after step {step} the ranks meet another one, which waits to be let in"
                )));
            }
        }
        report.stopped |= is_agreed || is_asked_alone(self);
        report.slow_ranks = slow_ranks;
        if let (Some(ranks), Some(before)) = (&self.ranks, metered) {
            let about = (self.whole_bytes, ranks.world.exchanges_beside());
            let steps = (report.n_steps, report.took);
            report.exchange = ExchangeReport::between(before, ranks.world.exchanged(), steps, about);
        }
        if let Some(ranks) = &mut self.ranks {
            if !is_met {
                ranks.variables.average(&ranks.world, &self.session)?;
                self.saved = None;
            }
            ranks.check(&self.session, true, false)?;
        }
        self.save_position(batches.save())?;
        self.save_own(step)?;
        if self.worker.is_some() {
            step = self.step()?;
            report.step = step;
        }
        self.finish_save(step)?;
        if let Some((worker, _)) = &mut self.worker {
            self.session = worker.end()?;
        }
        for callback in callbacks.iter_mut() {
            callback.on_end(&report)?;
        }
        Ok(report)
    }

    /// The mean loss and metrics over `data`, without training. Ranks share the data, each sample once, so all of them call it. What is
    /// evaluated must not itself be exchanged by ranks: [`Model::evaluate_with`].
    pub fn evaluate(&self, data: &Dataset) -> Result<Evaluation> {
        let Some(Ranks { world, .. }) = &self.ranks else { return self.model.evaluate(&self.session, data) };
        // What a strategy reports is reduced over its replicas.
        if world.size() > 1 && self.strategy.is_none() {
            check_evaluated(self.graph, &self.model.evaluated())?;
        }
        world.note(Activity::Evaluating);
        let sums = self.model.sums(&self.session, &data.clone().shard(world.rank(), world.size()))?;
        let sums = world.all_reduce(vec![Tensor::from(sums)], ReduceOp::Sum)?;
        self.model.evaluation_of(sums[0].data::<f64>()?.to_vec())
    }

    /// `output` for every sample of `data`, batch by batch joined along the first dimension. Only the inputs that the output
    /// depends on are used; `data` may have fewer columns than the model has inputs.
    pub fn predict(&self, data: &Dataset, output: Output<'g>) -> Result<Tensor> {
        let mut parts = Vec::new();
        for batch in data.batches()? {
            let batch = batch?;
            let feeds: Vec<(Output<'g>, Tensor)> =
                self.model.inputs.iter().copied().zip(batch.tensors.iter().cloned()).collect();
            let mut values = self.session.run(&[output], &feeds, &[])?;
            parts.extend(values.pop());
        }
        join_rows(&parts)
    }

    /// Writes a checkpoint now, if there is a directory for them, and waits for it.
    pub fn save(&mut self) -> Result<Option<String>> {
        let step = self.step()?;
        // The caller may have changed variables since the step was saved.
        self.collect_save();
        self.saved = None;
        self.save_own(step)?;
        self.finish_save(step)?;
        Ok(self.saver.last_checkpoints().pop())
    }

    /// Where checkpoints go.
    pub fn checkpoint_dir(&self) -> Option<&Path> {
        self.checkpoints.as_ref().map(|checkpoints| checkpoints.dir.as_path())
    }

    /// Whether a checkpoint can be written now.
    fn has_all_to_save(&self, are_apart: bool, has_own: bool) -> bool {
        !are_apart && self.ranks.as_ref().is_none_or(|ranks| has_own || ranks.own.is_empty())
    }

    /// Writes what ranks have of their own beside the checkpoint that comes next.
    fn write_own(&self, of_all: Option<&OfAllRanks>, step: i64) -> Result<()> {
        match (&self.checkpoints, of_all) {
            (Some(checkpoints), Some(of_all)) => {
                // The save before is done.
                remove_orphans(&checkpoints.dir);
                write_beside(of_all, &checkpoints.dir, step)
            }
            _ => Ok(()),
        }
    }

    /// The same, where all ranks know that a checkpoint comes.
    fn save_own(&mut self, step: i64) -> Result<()> {
        self.collect_save();
        let Some(ranks) = self.ranks.as_ref().filter(|ranks| !ranks.own.is_empty() && self.may_save) else {
            return Ok(());
        };
        let of_all = ranks.own.gather(&ranks.world, &self.session)?;
        self.write_own(Some(&of_all), step)
    }

    fn save_position(&self, position: Position) -> Result<()> {
        if self.checkpoints.is_none() {
            return Ok(());
        }
        let (new, assign) = self.set_position;
        let parts = [position.epoch as i64, position.sample as i64, position.seed as i64];
        self.session.run(&[], &[(new, Tensor::from(parts))], &[assign]).map(|_| ())
    }

    /// Says what this rank is busy with, if it is one of several.
    fn note(&self, activity: Activity) {
        if let Some(ranks) = &self.ranks {
            ranks.world.note(activity);
        }
    }

    /// Training is worth more than one checkpoint: a save that cannot begin is reported, and the next one tried in its time.
    fn begin_save(&mut self, step: i64) {
        if self.checkpoints.is_some() {
            self.note(Activity::Saving);
        }
        self.collect_save();
        let Some(checkpoints) = &self.checkpoints else { return };
        match self.saver.save_in_background(&self.session, checkpoints.dir.join("model.ckpt"), Some(step)) {
            Ok(save) => self.running = Some((step, save)),
            Err(error) => not_saved(step, &error),
        }
    }

    fn collect_save(&mut self) {
        let Some((step, save)) = self.running.take() else { return };
        match save.wait() {
            Ok(_) => self.saved = Some(step),
            Err(error) => not_saved(step, &error),
        }
    }

    /// The last checkpoint is waited for, and its failure is the caller's to know.
    fn finish_save(&mut self, step: i64) -> Result<()> {
        self.note(if self.checkpoints.is_some() { Activity::Saving } else { Activity::Other });
        self.collect_save();
        let Some(checkpoints) = &self.checkpoints else { return Ok(()) };
        if self.saved != Some(step) {
            self.saver.save(&self.session, checkpoints.dir.join("model.ckpt"), Some(step))?;
            self.saved = Some(step);
        }
        remove_orphans(&checkpoints.dir);
        Ok(())
    }
}

fn not_saved(step: i64, error: &Error) {
    tracing::error!(
        target: "kolo::train",
        "could not save a checkpoint at step {step}: {error}; training goes on, earlier checkpoints stay"
    );
}

fn read_position(session: &Session, position: Variable<'_>) -> Result<Position> {
    match session.fetch(position.read())?.data::<i64>()? {
        [epoch, sample, seed] => Ok(Position { epoch: *epoch as u64, sample: *sample as u64, seed: *seed as u64 }),
        _ => Err(Error::internal("the input position has three parts")),
    }
}

/// A loss that no further step will mend.
pub(crate) fn not_finite(loss: f64, step: i64) -> Error {
    Error::invalid_argument(format!(
        "the loss is {loss} at step {step}; try a smaller learning rate, or clip the gradients"
    ))
}

/// A scalar of any number type.
pub(crate) fn number(value: &Tensor) -> Result<f64> {
    if let Ok(x) = value.scalar_value::<f32>() {
        return Ok(f64::from(x));
    }
    if let Ok(x) = value.scalar_value::<f64>() {
        return Ok(x);
    }
    if let Ok(x) = value.scalar_value::<half::bf16>() {
        return Ok(x.to_f64());
    }
    if let Ok(x) = value.scalar_value::<half::f16>() {
        return Ok(x.to_f64());
    }
    match value.integers()?.as_slice() {
        [x] => Ok(*x as f64),
        _ => Err(Error::invalid_argument(format!(
            "a loss or metric must be a scalar, this one is {}{}; take its mean",
            value.dtype(),
            value.shape()
        ))),
    }
}

/// Tensors of the same type and row shape, one below the other.
pub(super) fn join_rows(parts: &[Tensor]) -> Result<Tensor> {
    let Some(first) = parts.first() else {
        return Err(Error::invalid_argument("there is nothing to predict for: the data has no samples"));
    };
    let row =
        first.shape().get(1..).map(<[usize]>::to_vec).ok_or_else(|| {
            Error::invalid_argument("a prediction must have one row per sample, this one is a scalar")
        })?;
    let mut n_rows = 0;
    for part in parts {
        if part.dtype() != first.dtype() || part.shape().get(1..) != Some(row.as_slice()) {
            return Err(Error::invalid_argument(format!(
                "batches predicted {}{} and {}{}, which cannot be joined",
                first.dtype(),
                first.shape(),
                part.dtype(),
                part.shape()
            )));
        }
        n_rows += part.shape()[0];
    }
    let dims: Vec<usize> = std::iter::once(n_rows).chain(row).collect();
    let mut joined = Tensor::zeros(first.dtype(), Shape::new(&dims)?)?;
    let bytes = joined.host_bytes_mut()?;
    let mut at = 0;
    for part in parts {
        let from = part.host_bytes()?;
        bytes[at..at + from.len()].copy_from_slice(from);
        at += from.len();
    }
    Ok(joined)
}
