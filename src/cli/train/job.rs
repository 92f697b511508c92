//! Runs a recipe: trains, shows progress, saves checkpoints, tests, and prints the results.

use std::io::IsTerminal;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::data::Dataset;
use crate::train::summary::FileWriter;
use crate::train::{Callback, Checkpoints, Flow, Model, StepReport, Trainer};
use crate::{Error, Graph, Result, Session};
use serde_json::json;

use super::curve::Curve;
use super::options::Common;
use super::progress::{Progress, View};
use crate::cli::{print, signals};

/// What a recipe trains, and on what.
pub struct Job<'g> {
    /// The model.
    pub model: Model<'g>,
    /// What to train on, batched, shuffled and repeated.
    pub train: Dataset,
    /// What to test with, batched; every sample counts.
    pub test: Option<Dataset>,
    /// How often `train` goes through its samples.
    pub epochs: u64,
    /// What a sample is called, and how many of them one row is.
    pub unit: (&'static str, usize),
}

/// Trains. Returns the trainer, for a recipe that has something to show at the end.
pub fn run<'g>(graph: &'g Graph, common: &Common, job: Job<'g>) -> Result<Trainer<'g>> {
    let began = Instant::now();
    let stop = stop_on_ctrl_c();
    let mut builder =
        Trainer::new(graph, job.model).source(common.session_config()?).stop_flag(stop.clone()).resume(common.resume);
    if let Some(dir) = &common.checkpoint_dir {
        builder =
            builder.checkpoints(Checkpoints { dir: dir.clone(), every: common.checkpoint_every, keep: common.keep });
    }
    let mut trainer = builder.build()?;
    let view = View::choose(common.json);
    announce(&trainer, view)?;

    let mut progress = Progress::new(view, common.log_every, job.epochs).unit(job.unit.0, job.unit.1);
    let mut limit = common.max_steps.map(MaxSteps);
    let mut summaries = match &common.logdir {
        Some(dir) => Some(Summaries::new(dir, graph, common.log_every)?),
        None => None,
    };
    let is_complete = limit.as_ref().is_some_and(|limit| trainer.step().is_ok_and(|step| step >= limit.0));
    let report = {
        let mut callbacks: Vec<&mut dyn Callback> = vec![&mut progress];
        callbacks.extend(limit.as_mut().map(|limit| limit as &mut dyn Callback));
        callbacks.extend(summaries.as_mut().map(|summaries| summaries as &mut dyn Callback));
        match is_complete {
            true => None,
            false => Some(trainer.fit(&job.train, &mut callbacks)?),
        }
    };
    progress.clear();
    let was_stopped = stop.load(Ordering::Relaxed);
    let tested = match (&job.test, was_stopped) {
        (Some(test), false) => Some(trainer.evaluate(test)?),
        _ => None,
    };
    let accuracy = tested.as_ref().and_then(|t| t.metrics.iter().find(|(name, _)| name == "accuracy").map(|m| m.1));
    let step = trainer.step()?;
    let took = began.elapsed().as_secs_f64();
    let cost = report.as_ref().filter(|report| report.n_steps > 0).map(|report| report.last_loss);
    if let (Some(summaries), Some(accuracy)) = (&summaries, accuracy) {
        summaries.writer.add_scalar("test/accuracy", accuracy, step);
        summaries.writer.flush()?;
    }
    let curve = Curve { label: "loss", points: std::mem::take(&mut progress.losses) };
    if let Some(dir) = &common.logdir {
        let path = dir.join("loss.svg");
        std::fs::write(&path, curve.to_svg())
            .map_err(|e| Error::unavailable(format!("cannot write {}: {e}", path.display())))?;
    }
    if view == View::Json {
        print(json!({
            "event": "end", "step": step, "test_accuracy": accuracy, "test_loss": tested.as_ref().map(|t| t.loss),
            "total_time_s": took, "final_cost": cost, "stopped": was_stopped,
            "weights": format!("{:08x}", weights_checksum(graph, trainer.session())?),
        }))?;
        return Ok(trainer);
    }
    if view == View::Bar && std::io::stdout().is_terminal() && !curve.points.is_empty() {
        print(curve.to_text(60, 8))?;
    }
    if let Some(accuracy) = accuracy {
        print(format_args!("Test-Accuracy: {:.2}%", accuracy * 100.0))?;
    } else if let Some(tested) = &tested {
        print(format_args!("Test-Cost: {:.4}", tested.loss))?;
    }
    print(format_args!("Total Time: {took:.2}s"))?;
    if let Some(cost) = cost {
        print(format_args!("Final Cost: {cost:.4}"))?;
    }
    if was_stopped {
        match &common.checkpoint_dir {
            Some(_) => print(format_args!("Stopped at step {step}, saved. The same command with --resume goes on."))?,
            None => print(format_args!("Stopped at step {step}. With --checkpoint-dir it would have been saved."))?,
        }
    }
    Ok(trainer)
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

/// A flag that Ctrl-C or SIGTERM sets. A second Ctrl-C ends the process at once.
pub fn stop_on_ctrl_c() -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = stop.clone();
    signals::on_stop(move || {
        if flag.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
    });
    stop
}

/// A checksum over all variables that are saved, by name: equal for equal weights.
fn weights_checksum(graph: &Graph, session: &Session) -> Result<u32> {
    let mut variables = graph.global_variables();
    variables.sort_by_key(|variable| variable.name());
    let mut crc = 0;
    for variable in variables {
        crc = crc32c::crc32c_append(crc, variable.name().as_bytes());
        crc = crc32c::crc32c_append(crc, session.fetch(variable.read())?.host_bytes()?);
    }
    Ok(crc)
}

/// Stops at a global step.
struct MaxSteps(i64);

impl Callback for MaxSteps {
    fn on_step(&mut self, report: &StepReport<'_, '_>) -> Result<Flow> {
        Ok(if report.step >= self.0 { Flow::Stop } else { Flow::Continue })
    }
}

/// Writes loss and metrics to event files.
struct Summaries {
    writer: FileWriter,
    every: u64,
}

impl Summaries {
    fn new(dir: &Path, graph: &Graph, every: u64) -> Result<Summaries> {
        let writer = FileWriter::new(dir)?;
        writer.add_graph(graph)?;
        Ok(Summaries { writer, every: every.max(1) })
    }
}

impl Callback for Summaries {
    fn on_step(&mut self, report: &StepReport<'_, '_>) -> Result<Flow> {
        if report.step.unsigned_abs().is_multiple_of(self.every) {
            self.writer.add_scalar("train/loss", report.loss, report.step);
            if let Some(accuracy) = report.metric("accuracy") {
                self.writer.add_scalar("train/accuracy", accuracy, report.step);
            }
            let rate = report.n_samples as f64 / report.took.as_secs_f64().max(1e-9);
            self.writer.add_scalar("train/samples_per_second", rate, report.step);
        }
        Ok(Flow::Continue)
    }
}
