//! Trains in this process: shows progress, saves checkpoints, tests, and prints the results.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::time::Instant;

use crate::data::Dataset;
use crate::parallel::{ElasticRank, World, trains_batch_norm};
use crate::train::{Callback, Checkpoints, Flow, Model, StepReport, Trainer};
use crate::{Error, Graph, Result};
use serde_json::json;

use super::child;
use super::curve::Curve;
use super::ending::{Ending, LogFolder, weights_checksum};
use super::options::Common;
use super::progress::{Progress, View};
use super::recipe::Closing;
use crate::cli::{print, signals};

/// What to train, and on what.
pub struct Job<'g> {
    /// The model.
    pub model: Model<'g>,
    /// What to train on, batched, shuffled and repeated.
    pub train: Dataset,
    /// What to test with, batched; every sample counts.
    pub test: Option<Dataset>,
    /// How often to go through the data.
    pub epochs: u64,
    /// What a sample is called, and how many of them one row is.
    pub unit: (&'static str, usize),
    /// The last global step, if the data does not end before.
    pub last_step: Option<i64>,
    /// What to say about the trained model.
    pub closing: Option<Box<dyn Closing + 'g>>,
}

/// What one of several ranks keeps from one world to the next.
pub struct Member {
    /// The ranks; none while it looks for them.
    pub world: Option<World>,
    /// Its place in them, if they are those of an elastic training.
    pub rank: Option<ElasticRank>,
    /// Ends training after the current step.
    pub stop: Arc<AtomicBool>,
    began: Instant,
    /// Whether there is a training that it joins, or goes on with.
    is_under_way: bool,
    /// The losses so far.
    losses: Vec<(f64, f64)>,
}

impl Member {
    /// A rank that was started at the beginning, or in the place of another one; and what its launcher tells it.
    pub fn new(replaces: bool, has_parent: bool) -> (Member, Receiver<String>) {
        let stop = stop_on_ctrl_c();
        let lines = if has_parent { child::end_with_parent(stop.clone()) } else { mpsc::channel().1 };
        let (world, rank, is_under_way, losses) = (None, None, replaces, Vec::new());
        (Member { world, rank, stop, began: Instant::now(), is_under_way, losses }, lines)
    }

    /// Whether it joins a training that goes on, or goes on with one.
    pub fn is_under_way(&self) -> bool {
        self.is_under_way
    }
}

/// Trains, alone or as one of the ranks of a world. Only rank 0 shows anything.
pub fn run<'g>(graph: &'g Graph, common: &Common, job: Job<'g>, mut member: Option<&mut Member>) -> Result<()> {
    let began = member.as_ref().map_or_else(Instant::now, |member| member.began);
    let stop = member.as_ref().map_or_else(stop_on_ctrl_c, |member| member.stop.clone());
    if common.cluster.with_parent && member.is_none() {
        drop(child::end_with_parent(stop.clone()));
    }
    let world = member.as_ref().and_then(|member| member.world.clone());
    let mut config = common.session_config()?;
    let is_first = world.as_ref().is_none_or(|world| world.rank() == 0);
    let rank = member.as_ref().and_then(|member| member.rank.clone());
    let is_under_way = member.as_ref().is_some_and(|member| member.is_under_way)
        || rank.as_ref().is_some_and(|rank| rank.number() > 1);
    if let Some(world) = &world {
        common.gpu.choose_for(world, &mut config.gpu);
        if common.ranks.sync_batch_norm && !trains_batch_norm(graph) {
            return Err(Error::invalid_argument(
                "--sync-batch-norm: this model has no batch normalisation; leave it out",
            ));
        }
        config = common.ranks.data_parallel(world).configure(config);
    }
    let mut builder = Trainer::new(graph, job.model).source(config).stop_flag(stop.clone()).resume(common.resume);
    builder = builder.check_every(common.ranks.check_weights_every.unwrap_or(1000));
    if let Some(world) = &world {
        builder = builder.data_parallel(&common.ranks.data_parallel(world));
    }
    if let Some(rank) = &rank {
        builder = builder.elastic(rank);
    }
    if let Some(dir) = &common.checkpoint_dir {
        builder =
            builder.checkpoints(Checkpoints { dir: dir.clone(), every: common.checkpoint_every, keep: common.keep });
    }
    let mut trainer = builder.build()?;
    let view = View::choose(common.json);
    match is_under_way {
        false => announce(&trainer, view)?,
        true if is_first => announce_again(&trainer, view, world.as_ref().map_or(1, World::size))?,
        true => {}
    }

    let by_data = job.train.batches_per_epoch().map(|n| n as u64 * job.epochs);
    let total = by_data.into_iter().chain(job.last_step.map(i64::unsigned_abs)).min();
    let mut progress = Progress::new(view, common.log_every, job.epochs, total).unit(job.unit.0, job.unit.1);
    if let Some(member) = &mut member {
        member.is_under_way = true;
        progress.losses = std::mem::take(&mut member.losses);
    }
    let mut limit = job.last_step.map(LastStep);
    let logdir = common.logdir.as_deref().filter(|_| is_first);
    let mut log = logdir.map(|dir| LogFolder::new(dir, graph, common.log_every)).transpose()?;
    let is_complete = limit.as_ref().is_some_and(|limit| trainer.step().is_ok_and(|step| step >= limit.0));
    let report = {
        let mut callbacks: Vec<&mut dyn Callback> = Vec::new();
        callbacks.extend(is_first.then_some(&mut progress as &mut dyn Callback));
        callbacks.extend(limit.as_mut().map(|limit| limit as &mut dyn Callback));
        callbacks.extend(log.as_mut().map(|log| log as &mut dyn Callback));
        match is_complete {
            // It may have lost a rank while it saved.
            true if is_under_way => trainer.save().map(|_| None)?,
            true => None,
            false => match trainer.fit(&job.train, &mut callbacks) {
                Ok(report) => Some(report),
                Err(error) => {
                    progress.clear();
                    if let Some(member) = &mut member {
                        member.losses = std::mem::take(&mut progress.losses);
                    }
                    return Err(error);
                }
            },
        }
    };
    progress.clear();
    if let Some(member) = &mut member {
        // A rank may be lost while the model is tested.
        member.losses.clone_from(&progress.losses);
    }
    let trained_s = began.elapsed().as_secs_f64();
    // Ranks agree on it.
    let was_stopped = match &report {
        Some(report) if world.is_some() => report.stopped && limit.as_ref().is_none_or(|limit| report.step < limit.0),
        _ => stop.load(Ordering::Relaxed),
    };
    let ending = Ending {
        step: trainer.step()?,
        trained_s,
        tested: job.test.as_ref().filter(|_| !was_stopped).map(|test| trainer.evaluate(test)).transpose()?,
        text: match &job.closing {
            Some(closing) if !was_stopped && is_first => Some(closing.text(trainer.session())?),
            _ => None,
        },
        took_s: began.elapsed().as_secs_f64(),
        cost: report.as_ref().filter(|report| report.n_steps > 0).map(|report| report.last_loss),
        was_stopped,
        worker: None,
        n_ranks: world.as_ref().map(World::size),
        exchange: report.as_ref().and_then(|report| report.exchange),
    };
    if !is_first {
        return Ok(());
    }
    let curve = Curve { label: "loss", points: std::mem::take(&mut progress.losses) };
    if let Some(log) = &log {
        log.finish(&ending, &curve)?;
    }
    match view {
        View::Json => ending.print_json(weights_checksum(graph, trainer.session())?),
        View::Bar | View::Lines => ending.print_lines(common, view, &curve),
    }
}

/// Says where training goes on from, and which checkpoints were passed over.
fn announce(trainer: &Trainer<'_>, view: View) -> Result<()> {
    let Some(restored) = trainer.restored() else { return Ok(()) };
    for (prefix, error) in &restored.skipped {
        eprintln!("kolo: checkpoint {prefix} is damaged, passed over: {error}");
    }
    let step = trainer.step()?;
    match view {
        View::Json => print(json!({ "event": "resumed", "checkpoint": restored.prefix, "step": step })),
        _ => print(format_args!("Resumed from {} at step {step}", restored.prefix)),
    }
}

/// Says where training goes on after ranks were lost.
fn announce_again(trainer: &Trainer<'_>, view: View, n_ranks: usize) -> Result<()> {
    let step = trainer.step()?;
    match view {
        View::Json => print(json!({ "event": "recovered", "step": step, "ranks": n_ranks })),
        _ => print(format_args!("Going on with {n_ranks} ranks at step {step}")),
    }
}

/// A flag that Ctrl-C or SIGTERM sets, which is said at once: the step in progress may take long. A second Ctrl-C ends the
/// process.
pub fn stop_on_ctrl_c() -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = stop.clone();
    signals::on_stop(move || {
        if flag.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
        eprintln!("kolo: stopping after this step; Ctrl-C again to stop now");
    });
    stop
}

/// Stops at a global step.
struct LastStep(i64);

impl Callback for LastStep {
    fn on_step(&mut self, report: &StepReport<'_, '_>) -> Result<Flow> {
        Ok(if report.step >= self.0 { Flow::Stop } else { Flow::Continue })
    }
}
