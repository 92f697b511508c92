//! What a person sees of a cluster that trains: one bar for all workers, or labelled lines.

use std::io::IsTerminal;
use std::time::Instant;

use crate::Result;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Value, json};

use crate::cli::print;
use crate::cli::train::child::Said;
use crate::cli::train::curve::Curve;
use crate::cli::train::ending::stopped;
use crate::cli::train::progress::bar_style;

pub struct ClusterView {
    json: bool,
    labels: Vec<String>,
    n_ps: usize,
    bar: Option<ProgressBar>,
    /// Steps per second of each worker, as it last said.
    rates: Vec<f64>,
    began: Instant,
    /// What the chief said at its end.
    chief: Option<Value>,
    n_steps: u64,
    /// The chief's losses.
    curve: Curve,
    /// Whether there are checkpoints.
    saves: bool,
}

impl ClusterView {
    pub fn new(json: bool, labels: Vec<String>, n_workers: usize, saves: bool) -> ClusterView {
        let n_ps = labels.len() - n_workers;
        let is_terminal = std::io::stdout().is_terminal() && std::io::stderr().is_terminal();
        let bar = (!json && is_terminal).then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(10));
            if let Ok(style) = ProgressStyle::with_template("{wide_msg}") {
                bar.set_style(style);
            }
            bar.set_message(format!("starting {} processes", n_ps + n_workers));
            bar
        });
        let rates = vec![0.0; n_workers];
        let curve = Curve { label: "loss", points: Vec::new() };
        ClusterView { json, labels, n_ps, bar, rates, began: Instant::now(), chief: None, n_steps: 0, curve, saves }
    }

    pub fn show(&mut self, said: Said) -> Result<()> {
        match said {
            Said::Out(process, line) => match serde_json::from_str::<Value>(&line) {
                Ok(event) if event.is_object() => self.event(process, event),
                _ => self.line(process, &line),
            },
            Said::Err(process, line) => self.line(process, &line),
        }
    }

    /// Something to know about a process.
    pub fn note(&self, process: usize, text: &str) -> Result<()> {
        self.line(process, text)
    }

    /// A line that a process wrote, with its name before it.
    fn line(&self, process: usize, line: &str) -> Result<()> {
        let text = format!("[{}] {line}", self.labels[process]);
        match &self.bar {
            Some(bar) => bar.println(text),
            None => eprintln!("{text}"),
        }
        Ok(())
    }

    fn event(&mut self, process: usize, event: Value) -> Result<()> {
        if self.json {
            print(&event)?;
        }
        let number = |name: &str| event.get(name).and_then(Value::as_f64).unwrap_or(0.0);
        match event.get("event").and_then(Value::as_str) {
            Some("step") => {
                let worker = process - self.n_ps.min(process);
                if let Some(rate) = self.rates.get_mut(worker) {
                    *rate = number("per_second");
                }
                self.n_steps = self.n_steps.max(number("step") as u64);
                if worker == 0 {
                    self.curve.points.push((number("step"), number("loss")));
                }
                let total: f64 = self.rates.iter().sum();
                match &self.bar {
                    Some(bar) => {
                        bar.set_position(self.n_steps);
                        bar.set_message(format!(
                            "loss {:.4}, {total:.0} steps/s of {} workers",
                            number("loss"),
                            self.rates.len()
                        ));
                    }
                    None if !self.json => print(format_args!(
                        "[{}] Step: {}, Own steps: {}, Cost: {:.4}, AvgTime: {:.2}ms",
                        self.labels[process],
                        number("step"),
                        number("own_steps"),
                        number("loss"),
                        1e3 / number("per_second").max(1e-9)
                    ))?,
                    None => {}
                }
            }
            Some("strategy") if !self.json => {
                let text = event.get("text").and_then(Value::as_str).unwrap_or_default();
                match &self.bar {
                    Some(bar) => bar.println(text),
                    None => print(text)?,
                }
            }
            Some("begin") => {
                // The number of steps is known now, so there can be a bar.
                if let Some(bar) = self.bar.as_ref().filter(|bar| bar.length().is_none()) {
                    bar.set_style(bar_style());
                    bar.set_length(number("of") as u64);
                    bar.set_position(number("step") as u64);
                    bar.set_message(format!("{} workers", self.rates.len()));
                    bar.reset_eta();
                }
            }
            Some("end") if event.get("task").and_then(Value::as_u64) == Some(0) => self.chief = Some(event),
            _ => {}
        }
        Ok(())
    }

    /// What came out.
    pub fn end(&mut self) -> Result<()> {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
            if !self.curve.points.is_empty() {
                print(self.curve.to_text(60, 8))?;
            }
        }
        let Some(end) = &self.chief else { return Ok(()) };
        let number = |name: &str| end.get(name).and_then(Value::as_f64);
        let took = self.began.elapsed().as_secs_f64();
        if self.json {
            return print(
                json!({ "event": "cluster-end", "total_time_s": took, "test_accuracy": number("test_accuracy") }),
            );
        }
        if let Some(accuracy) = number("test_accuracy") {
            print(format_args!("Test-Accuracy: {:.2}%", accuracy * 100.0))?;
        } else if let Some(loss) = number("test_loss") {
            print(format_args!("Test-Cost: {loss:.4}"))?;
        }
        print(format_args!("Total Time: {took:.2}s"))?;
        if let Some(cost) = number("final_cost") {
            print(format_args!("Final Cost: {cost:.4}"))?;
        }
        if let (Some(step), Some(time)) = (number("step"), number("train_time_s")) {
            print(format_args!("Steps: {step} in {time:.2}s, {:.0} steps/s", step / time.max(1e-9)))?;
        }
        if end.get("stopped").and_then(Value::as_bool) == Some(true) {
            print(stopped(number("step").unwrap_or(0.0) as i64, self.saves))?;
        }
        if let Some(text) = end.get("text").and_then(Value::as_str) {
            print(text)?;
        }
        Ok(())
    }
}
