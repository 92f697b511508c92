//! Counts steps per second.

use kolo_core::Result;

use crate::train::summary::FileWriter;
use crate::train::{CreatedContext, Every, RunContext, RunValues, SessionHook, Timer};

/// Logs how many global steps are made per second, and writes it as `global_step/sec` if it has a writer.
pub struct StepCounter {
    timer: Timer,
    writer: Option<FileWriter>,
}

impl StepCounter {
    /// Counts every so often.
    pub fn new(every: Every) -> StepCounter {
        StepCounter { timer: Timer::new(every), writer: None }
    }

    /// Writes to event files too.
    pub fn writer(mut self, writer: FileWriter) -> Self {
        self.writer = Some(writer);
        self
    }
}

impl<'g> SessionHook<'g> for StepCounter {
    fn name(&self) -> &'static str {
        "StepCounter"
    }

    fn after_create_session(&mut self, created: &CreatedContext<'_, 'g>) -> Result<()> {
        self.timer.acted(created.step.unwrap_or(0));
        Ok(())
    }

    fn after_run(&mut self, context: &RunContext<'_, 'g>, _values: &RunValues<'_>) -> Result<()> {
        let Some(step) = self.timer.due_now(context)? else { return Ok(()) };
        if let Some((steps, took)) = self.timer.acted(step) {
            let rate = steps as f64 / took.as_secs_f64().max(1e-9);
            tracing::info!(target: "kolo::train", "global_step/sec: {rate:.1}");
            if let Some(writer) = &self.writer {
                writer.add_scalar("global_step/sec", rate, step);
            }
        }
        Ok(())
    }
}
