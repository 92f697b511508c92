//! What comes out of a training: the results for a person or a program, and the log folder.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use crate::parallel::ExchangeReport;
use crate::train::summary::FileWriter;
use crate::train::{Callback, Evaluation, Flow, StepReport};
use crate::{Error, Graph, Output, Result, Session};
use serde_json::json;

use super::curve::Curve;
use super::options::Common;
use super::progress::View;
use crate::cli::print;

/// How a training ended.
pub struct Ending {
    /// The global step.
    pub step: i64,
    /// Seconds of training.
    pub trained_s: f64,
    /// Seconds in all.
    pub took_s: f64,
    /// The last loss, if there was a step.
    pub cost: Option<f64>,
    /// The loss and metrics of the test data.
    pub tested: Option<Evaluation>,
    /// Whether it was asked to end.
    pub was_stopped: bool,
    /// What the recipe says about the model.
    pub text: Option<String>,
    /// Which worker of a cluster this is.
    pub worker: Option<WorkerEnding>,
    /// How many ranks trained, if it was with ranks.
    pub n_ranks: Option<usize>,
    /// What rank 0 has exchanged with the others.
    pub exchange: Option<ExchangeReport>,
}

/// What a worker adds.
pub struct WorkerEnding {
    pub task: usize,
    /// How many of the steps were its own.
    pub own_steps: u64,
}

impl Ending {
    fn accuracy(&self) -> Option<f64> {
        self.tested.as_ref()?.metrics.iter().find(|(name, _)| name == "accuracy").map(|(_, value)| *value)
    }

    /// One JSON object. `weights` is a checksum of all variables: equal for equal weights.
    pub fn print_json(&self, weights: u32) -> Result<()> {
        let mut end = json!({
            "event": "end", "step": self.step, "test_accuracy": self.accuracy(),
            "test_loss": self.tested.as_ref().map(|tested| tested.loss), "final_cost": self.cost,
            "train_time_s": self.trained_s, "total_time_s": self.took_s, "stopped": self.was_stopped,
            "weights": format!("{weights:08x}"), "text": self.text,
        });
        if let Some(worker) = &self.worker {
            end["task"] = json!(worker.task);
            end["own_steps"] = json!(worker.own_steps);
        }
        if let Some(n) = self.n_ranks {
            end["ranks"] = json!(n);
        }
        if let Some(exchange) = &self.exchange {
            end["bytes_per_step"] = json!(exchange.bytes_per_step);
            end["whole_bytes_per_step"] = json!(exchange.whole_bytes_per_step);
            end["exchange_share"] = json!(exchange.share_of_time);
            end["exchange_hidden"] = json!(exchange.hidden);
        }
        print(end)
    }

    /// A few lines, and the curve on a terminal.
    pub fn print_lines(&self, common: &Common, view: View, curve: &Curve) -> Result<()> {
        if view == View::Bar && std::io::stdout().is_terminal() && !curve.points.is_empty() {
            print(curve.to_text(60, 8))?;
        }
        if let Some(accuracy) = self.accuracy() {
            print(format_args!("Test-Accuracy: {:.2}%", accuracy * 100.0))?;
        } else if let Some(tested) = &self.tested {
            print(format_args!("Test-Cost: {:.4}", tested.loss))?;
        }
        print(format_args!("Total Time: {:.2}s", self.took_s))?;
        if let Some(cost) = self.cost {
            print(format_args!("Final Cost: {cost:.4}"))?;
        }
        if let Some(exchange) = self.exchange.filter(|_| self.n_ranks.is_some_and(|n| n > 1)) {
            print(exchanged(&exchange))?;
        }
        if self.was_stopped {
            print(stopped(self.step, common.checkpoint_dir.is_some()))?;
        }
        if let Some(text) = &self.text {
            print(text)?;
        }
        Ok(())
    }
}

/// A line about what ranks have exchanged.
fn exchanged(report: &ExchangeReport) -> String {
    let saved = match report.saved().map(|saved| (saved * 100.0).round()) {
        Some(percent) if percent >= 1.0 => format!(", {percent}% less than whole gradients"),
        _ => String::new(),
    };
    let (kilobytes, percent) = (report.bytes_per_step / 1000.0, report.share_of_time * 100.0);
    let hidden =
        report.hidden.map_or(String::new(), |hidden| format!(", {:.0}% of it beside backward", hidden * 100.0));
    format!("Exchanged: {kilobytes:.1} kB a step{saved}; {percent:.0}% of the time{hidden}")
}

/// What to say after Ctrl-C.
pub fn stopped(step: i64, is_saved: bool) -> String {
    match is_saved {
        true => format!("Stopped at step {step}, saved. The same command with --resume goes on."),
        false => format!("Stopped at step {step}. With --checkpoint-dir it would have been saved."),
    }
}

/// A checksum over all variables that are saved, by name: equal for equal weights.
pub fn weights_checksum(graph: &Graph, session: &Session) -> Result<u32> {
    /// Variables are fetched together up to this size, so that small ones do not cost a step each.
    const CHUNK: usize = 32 << 20;
    let mut variables = graph.global_variables();
    variables.sort_by_key(|variable| variable.name());
    let n_bytes = |read: &Output<'_>| {
        let n = read.shape().known().map_or(CHUNK, |shape| shape.n_elements());
        n.saturating_mul(read.dtype().size().unwrap_or(16))
    };
    let mut crc = 0;
    let mut rest = variables.as_slice();
    while !rest.is_empty() {
        let (mut reads, mut size) = (Vec::new(), 0usize);
        for variable in rest {
            let read = variable.read();
            size = size.saturating_add(n_bytes(&read));
            if size > CHUNK && !reads.is_empty() {
                break;
            }
            reads.push(read);
        }
        let (chunk, later) = rest.split_at(reads.len());
        for (variable, value) in chunk.iter().zip(session.run(&reads, &[], &[])?) {
            crc = crc32c::crc32c_append(crc, variable.name().as_bytes());
            crc = crc32c::crc32c_append(crc, value.host_bytes()?);
        }
        rest = later;
    }
    Ok(crc)
}

/// `--logdir`: event files and the loss curve.
pub struct LogFolder {
    dir: PathBuf,
    writer: FileWriter,
    every: u64,
}

impl LogFolder {
    /// Makes the folder and writes the graph.
    pub fn new(dir: &Path, graph: &Graph, every: u64) -> Result<LogFolder> {
        let writer = FileWriter::new(dir).map_err(|error| error.context("--logdir"))?;
        writer.add_graph(graph)?;
        Ok(LogFolder { dir: dir.to_owned(), writer, every: every.max(1) })
    }

    /// Adds a step.
    pub fn add(&self, report: &StepReport<'_, '_>) {
        self.writer.add_scalar("train/loss", report.loss, report.step);
        if let Some(accuracy) = report.metric("accuracy") {
            self.writer.add_scalar("train/accuracy", accuracy, report.step);
        }
        let rate = report.n_samples as f64 / report.took.as_secs_f64().max(1e-9);
        self.writer.add_scalar("train/samples_per_second", rate, report.step);
    }

    /// Adds the results and the curve.
    pub fn finish(&self, ending: &Ending, curve: &Curve) -> Result<()> {
        if let Some(accuracy) = ending.accuracy() {
            self.writer.add_scalar("test/accuracy", accuracy, ending.step);
        }
        self.writer.flush()?;
        let path = self.dir.join("loss.svg");
        std::fs::write(&path, curve.to_svg())
            .map_err(|error| Error::unavailable(format!("cannot write {}: {error}", path.display())))
    }
}

impl Callback for LogFolder {
    fn on_step(&mut self, report: &StepReport<'_, '_>) -> Result<Flow> {
        if report.step.unsigned_abs().is_multiple_of(self.every) {
            self.add(report);
        }
        Ok(Flow::Continue)
    }
}
