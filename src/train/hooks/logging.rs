//! Logs values as training goes on.

use std::sync::Arc;

use kolo_core::{Result, Tensor};
use kolo_graph::Output;
use kolo_runtime::Session;

use crate::train::{Every, RunArgs, RunContext, RunValues, SessionHook, Timer};

/// Turns names and values into a line.
type Format = dyn Fn(&[(String, Tensor)]) -> String;

/// Logs values every N runs or seconds, at target `kolo::train`.
pub struct Logging<'g> {
    values: Vec<(String, Output<'g>)>,
    timer: Timer,
    n_runs: i64,
    at_end: bool,
    format: Option<Box<Format>>,
}

impl<'g> Logging<'g> {
    /// Logs these values under these names.
    pub fn new(every: Every, values: &[(&str, Output<'g>)]) -> Logging<'g> {
        let values = values.iter().map(|(name, output)| ((*name).to_owned(), *output)).collect();
        Logging { values, timer: Timer::new(every), n_runs: -1, at_end: false, format: None }
    }

    /// Logs once more when training ends, in a run of its own that feeds nothing.
    pub fn at_end(mut self) -> Self {
        self.at_end = true;
        self
    }

    /// Writes the line.
    pub fn format(mut self, format: impl Fn(&[(String, Tensor)]) -> String + 'static) -> Self {
        self.format = Some(Box::new(format));
        self
    }

    fn log(&self, step: Option<i64>, values: &[Tensor]) {
        let named: Vec<(String, Tensor)> =
            self.values.iter().map(|(name, _)| name.clone()).zip(values.iter().cloned()).collect();
        let line = match &self.format {
            Some(format) => format(&named),
            None => {
                named.iter().map(|(name, value)| format!("{name} = {}", show(value))).collect::<Vec<_>>().join(", ")
            }
        };
        match step {
            Some(step) => tracing::info!(target: "kolo::train", "step {step}: {line}"),
            None => tracing::info!(target: "kolo::train", "{line}"),
        }
    }
}

/// A scalar as a plain number, anything else as it prints.
fn show(value: &Tensor) -> String {
    match (value.scalar_value::<f32>(), value.scalar_value::<f64>(), value.scalar_value::<i64>()) {
        (Ok(x), _, _) => x.to_string(),
        (_, Ok(x), _) => x.to_string(),
        (_, _, Ok(x)) => x.to_string(),
        _ => format!("{value:?}"),
    }
}

impl<'g> SessionHook<'g> for Logging<'g> {
    fn name(&self) -> &'static str {
        "Logging"
    }

    fn before_run(&mut self, _context: &RunContext<'_, 'g>) -> Result<RunArgs<'g>> {
        self.n_runs += 1;
        Ok(match self.timer.is_due(self.n_runs) {
            true => RunArgs::fetch(self.values.iter().map(|(_, output)| *output).collect::<Vec<_>>()),
            false => RunArgs::default(),
        })
    }

    fn after_run(&mut self, context: &RunContext<'_, 'g>, values: &RunValues<'_>) -> Result<()> {
        if self.timer.is_due(self.n_runs) && !values.values.is_empty() {
            self.timer.acted(self.n_runs);
            self.log(context.step_now()?, values.values);
        }
        Ok(())
    }

    fn end(&mut self, session: &Arc<Session>) -> Result<()> {
        if self.at_end {
            let outputs: Vec<Output<'g>> = self.values.iter().map(|(_, output)| *output).collect();
            self.log(None, &session.run(&outputs, &[], &[])?);
        }
        Ok(())
    }
}
