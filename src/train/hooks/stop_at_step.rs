//! Stops after a number of steps.

use kolo_core::{Error, Result};
use kolo_graph::Graph;

use crate::train::{CreatedContext, RunContext, RunValues, SessionHook, global_step};

/// Asks to stop when the global step has come so far. Other workers' steps count too.
pub struct StopAtStep {
    until: Until,
    last: i64,
}

enum Until {
    Last(i64),
    More(i64),
}

impl StopAtStep {
    /// Stops when the global step is `step`.
    pub fn last(step: i64) -> StopAtStep {
        StopAtStep { until: Until::Last(step), last: i64::MAX }
    }

    /// Stops after this many steps from where the session begins.
    pub fn after(steps: i64) -> StopAtStep {
        StopAtStep { until: Until::More(steps), last: i64::MAX }
    }
}

impl<'g> SessionHook<'g> for StopAtStep {
    fn name(&self) -> &'static str {
        "StopAtStep"
    }

    fn begin(&mut self, graph: &'g Graph) -> Result<()> {
        match global_step(graph) {
            Some(_) => Ok(()),
            None => Err(Error::failed_precondition(
                "the graph has no global step; make one with train::global_step_or_create and give it to minimize",
            )),
        }
    }

    fn after_create_session(&mut self, created: &CreatedContext<'_, 'g>) -> Result<()> {
        let step = created.step.unwrap_or(0);
        match self.until {
            Until::Last(last) => self.last = last,
            // A session that comes back after a recovery goes on to the same end.
            Until::More(more) => {
                self.last = step.saturating_add(more);
                self.until = Until::Last(self.last);
            }
        }
        if step >= self.last {
            created.coordinator.request_stop();
        }
        Ok(())
    }

    fn after_run(&mut self, context: &RunContext<'_, 'g>, _values: &RunValues<'_>) -> Result<()> {
        if context.step_seen().is_some_and(|seen| seen + 1 >= self.last)
            && context.step_now()?.is_some_and(|now| now >= self.last)
        {
            context.request_stop();
        }
        Ok(())
    }
}
