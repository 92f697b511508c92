//! Writes summaries as training goes on.

use std::sync::Arc;

use kolo_core::Result;
use kolo_graph::{Graph, Output};
use kolo_runtime::Session;

use crate::train::summary::FileWriter;
use crate::train::{CreatedContext, Every, RunArgs, RunContext, RunValues, SessionHook, Timer};

/// Fetches a summary with a step every so often and writes it to an event file.
pub struct SummarySaver<'g> {
    writer: FileWriter,
    timer: Timer,
    summary: Option<Output<'g>>,
    seen: Option<i64>,
    wanted: bool,
}

impl<'g> SummarySaver<'g> {
    /// Writes the scaffold's summary with `writer`.
    pub fn new(writer: FileWriter, every: Every) -> SummarySaver<'g> {
        SummarySaver { writer, timer: Timer::new(every), summary: None, seen: None, wanted: false }
    }

    /// Another summary than the scaffold's.
    pub fn summary(mut self, summary: Output<'g>) -> Self {
        self.summary = Some(summary);
        self
    }
}

impl<'g> SessionHook<'g> for SummarySaver<'g> {
    fn name(&self) -> &'static str {
        "SummarySaver"
    }

    fn begin(&mut self, graph: &'g Graph) -> Result<()> {
        self.writer.add_graph(graph)
    }

    fn after_create_session(&mut self, created: &CreatedContext<'_, 'g>) -> Result<()> {
        self.summary = self.summary.or(created.scaffold.summary_op);
        Ok(())
    }

    fn before_run(&mut self, _context: &RunContext<'_, 'g>) -> Result<RunArgs<'g>> {
        self.wanted = self.seen.is_none_or(|seen| self.timer.is_due(seen + 1));
        Ok(match (self.summary, self.wanted) {
            (Some(summary), true) => RunArgs::fetch([summary]),
            _ => RunArgs::default(),
        })
    }

    fn after_run(&mut self, context: &RunContext<'_, 'g>, values: &RunValues<'_>) -> Result<()> {
        self.seen = context.step_seen();
        if !std::mem::take(&mut self.wanted) {
            return Ok(());
        }
        let step = context.step_now()?.unwrap_or(0);
        self.timer.acted(step);
        match values.values.first() {
            Some(summary) => self.writer.add_summary(summary, step),
            None => Ok(()),
        }
    }

    fn end(&mut self, _session: &Arc<Session>) -> Result<()> {
        self.writer.flush()
    }
}
