//! Trains in this process: shows progress, saves checkpoints, tests, and prints the results.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::data::Dataset;
use crate::parallel::{DataParallel, World};
use crate::train::{Callback, Checkpoints, Flow, Model, StepReport, Trainer};
use crate::{Graph, Result};
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

/// Trains, alone or as one of the ranks of a world. Only rank 0 shows anything.
pub fn run<'g>(graph: &'g Graph, common: &Common, job: Job<'g>, world: Option<World>) -> Result<()> {
    let began = Instant::now();
    let stop = stop_on_ctrl_c();
    if common.cluster.with_parent {
        child::end_with_parent(stop.clone());
    }
    let mut config = common.session_config()?;
    let is_first = world.as_ref().is_none_or(|world| world.rank() == 0);
    if let Some(world) = &world {
        common.gpu.choose_for(world, &mut config.gpu);
        config = DataParallel::new(world).configure(config);
    }
    let mut builder = Trainer::new(graph, job.model).source(config).stop_flag(stop.clone()).resume(common.resume);
    if let Some(world) = &world {
        builder = builder.world(world).check_every(common.ranks.check_weights_every.unwrap_or(1000));
    }
    if let Some(dir) = &common.checkpoint_dir {
        builder =
            builder.checkpoints(Checkpoints { dir: dir.clone(), every: common.checkpoint_every, keep: common.keep });
    }
    let mut trainer = builder.build()?;
    let view = View::choose(common.json);
    announce(&trainer, view)?;

    let by_data = job.train.batches_per_epoch().map(|n| n as u64 * job.epochs);
    let total = by_data.into_iter().chain(job.last_step.map(i64::unsigned_abs)).min();
    let mut progress = Progress::new(view, common.log_every, job.epochs, total).unit(job.unit.0, job.unit.1);
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
            true => None,
            false => Some(trainer.fit(&job.train, &mut callbacks)?),
        }
    };
    progress.clear();
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
