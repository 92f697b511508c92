//! Writes a timeline of a step now and then.

use std::path::PathBuf;
use std::time::Duration;

use kolo_core::{Error, Result};

use crate::train::{Every, RunArgs, RunContext, RunValues, SessionHook, Timer};

/// Traces a step every so often and writes it as `timeline-STEP.json` for Perfetto.
pub struct Profiler {
    timer: Timer,
    dir: PathBuf,
    tracing: bool,
    seen: Option<i64>,
}

impl Profiler {
    /// Writes timelines into `dir`, which is made if it is not there.
    pub fn new(every: Every, dir: impl Into<PathBuf>) -> Profiler {
        Profiler { timer: Timer::new(every), dir: dir.into(), tracing: false, seen: None }
    }
}

impl<'g> SessionHook<'g> for Profiler {
    fn name(&self) -> &'static str {
        "Profiler"
    }

    fn before_run(&mut self, _context: &RunContext<'_, 'g>) -> Result<RunArgs<'g>> {
        self.tracing = self.seen.is_none_or(|seen| self.timer.is_due(seen + 1));
        Ok(RunArgs { trace: self.tracing, ..RunArgs::default() })
    }

    fn after_run(&mut self, context: &RunContext<'_, 'g>, values: &RunValues<'_>) -> Result<()> {
        self.seen = context.step_seen();
        if !std::mem::take(&mut self.tracing) {
            return Ok(());
        }
        let step = context.step_now()?.unwrap_or(0);
        self.timer.acted(step);
        let path = self.dir.join(format!("timeline-{step}.json"));
        std::fs::create_dir_all(&self.dir)
            .and_then(|()| std::fs::write(&path, values.metadata.trace.to_chrome_json()))
            .map_err(|e| Error::unavailable(format!("cannot write {}: {e}", path.display())))
            .or_else(|error| {
                // A timeline is worth less than the training it describes.
                tracing::warn!(target: "kolo::train", "{error}");
                Ok(())
            })
    }

    fn budget(&self) -> Duration {
        Duration::from_millis(100)
    }
}
