//! What a person sees while training runs: a bar on a terminal, plain lines in a pipe, JSON on request.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use crate::Result;
use crate::train::{Callback, EpochReport, FitReport, Flow, StepReport, Trainer};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;

use crate::cli::print;

/// How to show progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum View {
    /// A bar that moves.
    Bar,
    /// A line at a fixed interval of steps.
    Lines,
    /// One JSON object a line.
    Json,
}

impl View {
    /// JSON if requested, a bar on a terminal, lines otherwise.
    pub fn choose(json: bool) -> View {
        match (json, std::io::stdout().is_terminal() && std::io::stderr().is_terminal()) {
            (true, _) => View::Json,
            (false, true) => View::Bar,
            (false, false) => View::Lines,
        }
    }
}

/// Shows each step, and keeps the losses for the curve at the end.
pub struct Progress {
    view: View,
    every: u64,
    epochs: u64,
    /// The last step, if it is known.
    total: Option<u64>,
    /// What a sample is called: `samples`, `tokens`.
    unit: &'static str,
    /// How many units one sample is.
    units_per_sample: usize,
    bar: Option<ProgressBar>,
    window: Window,
    drawn: Instant,
    /// Step and loss, for every step.
    pub losses: Vec<(f64, f64)>,
}

/// Sums since the last line.
#[derive(Default)]
struct Window {
    n_steps: u64,
    n_samples: usize,
    took: Duration,
}

impl Window {
    fn rate(&self) -> f64 {
        self.n_samples as f64 / self.took.as_secs_f64().max(1e-9)
    }

    fn step_ms(&self) -> f64 {
        self.took.as_secs_f64() * 1e3 / self.n_steps.max(1) as f64
    }
}

impl Progress {
    /// Lines come every `every` steps. The bar is full at step `total`.
    pub fn new(view: View, every: u64, epochs: u64, total: Option<u64>) -> Progress {
        Progress {
            view,
            every: every.max(1),
            epochs,
            total,
            unit: "samples",
            units_per_sample: 1,
            bar: None,
            window: Window::default(),
            drawn: Instant::now(),
            losses: Vec::new(),
        }
    }

    /// Counts in another unit, such as `per_sample` tokens for a sample of text.
    pub fn unit(mut self, unit: &'static str, per_sample: usize) -> Self {
        (self.unit, self.units_per_sample) = (unit, per_sample);
        self
    }

    fn bar(&mut self, report: &StepReport<'_, '_>) -> &ProgressBar {
        let total = self.total;
        self.bar.get_or_insert_with(|| {
            let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::stderr_with_hz(10));
            bar.set_style(bar_style());
            bar.set_position(report.step.unsigned_abs());
            bar.reset_eta();
            bar
        })
    }

    fn draw(&mut self, report: &StepReport<'_, '_>) -> Result<()> {
        let rate = self.window.rate() * self.units_per_sample as f64;
        let accuracy = report.metric("accuracy");
        let (unit, epochs, step_ms) = (self.unit, self.epochs, self.window.step_ms());
        match self.view {
            View::Bar => {
                let accuracy =
                    accuracy.map_or(String::new(), |accuracy| format!(", accuracy {:.1}%", accuracy * 100.0));
                let epoch = report.epoch + 1;
                let message =
                    format!("epoch {epoch}/{epochs}, loss {:.4}{accuracy}, {} {unit}/s", report.loss, thousands(rate));
                let bar = self.bar(report);
                bar.set_message(message);
                bar.set_position(report.step.unsigned_abs());
            }
            View::Lines => {
                let of = report.batches_per_epoch.map_or(String::new(), |n| format!(" of {n}"));
                print(format_args!(
                    "Step: {}, Epoch: {}, Batch: {}{of}, Cost: {:.4}, AvgTime: {step_ms:.2}ms",
                    report.step,
                    report.epoch + 1,
                    report.batch + 1,
                    report.loss
                ))?;
            }
            View::Json => print(json!({
                "event": "step", "step": report.step, "epoch": report.epoch + 1, "batch": report.batch + 1,
                "loss": report.loss, "accuracy": accuracy, "step_ms": step_ms, "per_second": rate, "unit": unit,
            }))?,
        }
        self.window = Window::default();
        Ok(())
    }

    /// Clears the bar, so that what is printed next stands alone.
    pub fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

impl Callback for Progress {
    fn on_step(&mut self, report: &StepReport<'_, '_>) -> Result<Flow> {
        self.losses.push((report.step as f64, report.loss));
        self.window.n_steps += 1;
        self.window.n_samples += report.n_samples;
        self.window.took += report.took;
        let is_due = match self.view {
            // A terminal needs no more than a few pictures a second.
            View::Bar => self.drawn.elapsed() >= Duration::from_millis(100),
            _ => report.step.unsigned_abs().is_multiple_of(self.every),
        };
        if is_due {
            self.drawn = Instant::now();
            self.draw(report)?;
        }
        Ok(Flow::Continue)
    }

    fn on_epoch_end(&mut self, report: &EpochReport, _trainer: &Trainer<'_>) -> Result<Flow> {
        if self.view == View::Json {
            print(json!({ "event": "epoch", "epoch": report.epoch + 1, "step": report.step }))?;
        }
        Ok(Flow::Continue)
    }

    fn on_end(&mut self, _report: &FitReport) -> Result<()> {
        self.clear();
        Ok(())
    }
}

/// A bar for steps. What is said beside it is cut off where the terminal ends, so that the line does not wrap.
pub fn bar_style() -> ProgressStyle {
    let style = ProgressStyle::with_template("{pos}/{len} [{bar:20}] ETA {eta} {wide_msg}");
    style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("━━ ")
}

/// A count in a few characters: `512`, `48.1k`, `1.2M`.
fn thousands(n: f64) -> String {
    match n {
        n if n >= 1e6 => format!("{:.1}M", n / 1e6),
        n if n >= 1e4 => format!("{:.1}k", n / 1e3),
        n => format!("{n:.0}"),
    }
}
