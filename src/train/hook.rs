//! Hooks: what happens around the steps of a monitored session.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_core::{Result, Tensor};
use kolo_graph::{Graph, Output};
use kolo_runtime::{RunMetadata, Session};

use super::{Coordinator, FinalScaffold, Start, read_global_step};

/// Takes part in a monitored session: before and after each run, and when the session begins and ends.
///
/// A hook's time counts against its [`budget`](SessionHook::budget); one that takes longer is named in the log.
pub trait SessionHook<'g> {
    /// What logs call it.
    fn name(&self) -> &'static str;

    /// The graph is complete but for what hooks add to it now.
    fn begin(&mut self, _graph: &'g Graph) -> Result<()> {
        Ok(())
    }

    /// A session was made: the first one, or another after a recovery.
    fn after_create_session(&mut self, _created: &CreatedContext<'_, 'g>) -> Result<()> {
        Ok(())
    }

    /// What to fetch and feed in the coming run besides what the caller asks for.
    fn before_run(&mut self, _context: &RunContext<'_, 'g>) -> Result<RunArgs<'g>> {
        Ok(RunArgs::default())
    }

    /// The run is done; `values` are what this hook asked for.
    fn after_run(&mut self, _context: &RunContext<'_, 'g>, _values: &RunValues<'_>) -> Result<()> {
        Ok(())
    }

    /// Training ended without an error; the session is still open.
    fn end(&mut self, _session: &Arc<Session>) -> Result<()> {
        Ok(())
    }

    /// How long one call of this hook should take at most.
    fn budget(&self) -> Duration {
        Duration::from_millis(10)
    }
}

/// What [`SessionHook::after_create_session`] sees.
pub struct CreatedContext<'a, 'g> {
    /// The session.
    pub session: &'a Arc<Session>,
    /// Stops threads that the hook starts.
    pub coordinator: &'a Coordinator,
    /// The pieces of the training program.
    pub scaffold: &'a Rc<FinalScaffold<'g>>,
    /// How the variables got their values.
    pub start: &'a Start,
    /// The global step it begins from.
    pub step: Option<i64>,
}

/// What a hook adds to a run.
#[derive(Default)]
pub struct RunArgs<'g> {
    /// Values it wants to see.
    pub fetches: Vec<Output<'g>>,
    /// Values it feeds.
    pub feeds: Vec<(Output<'g>, Tensor)>,
    /// Whether the run should be traced.
    pub trace: bool,
}

impl<'g> RunArgs<'g> {
    /// Only fetches.
    pub fn fetch(fetches: impl Into<Vec<Output<'g>>>) -> RunArgs<'g> {
        RunArgs { fetches: fetches.into(), ..RunArgs::default() }
    }
}

/// What came back for a hook.
pub struct RunValues<'a> {
    /// The values it asked for, in its order.
    pub values: &'a [Tensor],
    /// The trace, if one was asked for, and the step's number in the session.
    pub metadata: &'a RunMetadata,
}

/// The run that a hook takes part in.
pub struct RunContext<'a, 'g> {
    /// The session.
    pub session: &'a Arc<Session>,
    /// The graph.
    pub graph: &'g Graph,
    pub(crate) coordinator: &'a Coordinator,
    pub(crate) seen: Option<i64>,
    pub(crate) now: Cell<Option<i64>>,
}

impl RunContext<'_, '_> {
    /// Asks the training loop to stop after this run.
    pub fn request_stop(&self) {
        self.coordinator.request_stop();
    }

    /// The global step as this run read it: not more than one below what this run made it. Free of cost; known after the
    /// run.
    pub fn step_seen(&self) -> Option<i64> {
        self.seen
    }

    /// The global step now, read at most once per run.
    pub fn step_now(&self) -> Result<Option<i64>> {
        if self.now.get().is_none() {
            self.now.set(read_global_step(self.session, self.graph)?);
        }
        Ok(self.now.get())
    }
}

/// When a hook acts: every N steps, or every N seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Every {
    /// Every this many global steps.
    Steps(u64),
    /// Every this many seconds.
    Secs(f64),
}

/// Remembers when a hook acted last.
#[derive(Clone, Debug)]
pub struct Timer {
    every: Every,
    last: Option<(i64, Instant)>,
}

impl Timer {
    /// A timer that has not been triggered yet, so it triggers at the first step it is asked about.
    pub fn new(every: Every) -> Timer {
        Timer { every, last: None }
    }

    /// True if it is time to act at this step. A step that was acted on is not due again.
    pub fn is_due(&self, step: i64) -> bool {
        match (self.every, self.last) {
            (_, None) => true,
            (_, Some((last, _))) if step <= last => false,
            (Every::Steps(n), Some((last, _))) => (step - last).unsigned_abs() >= n,
            (Every::Secs(secs), Some((_, at))) => at.elapsed().as_secs_f64() >= secs,
        }
    }

    /// Notes that the hook acted at this step. Returns the steps and the time since it did before.
    pub fn acted(&mut self, step: i64) -> Option<(i64, Duration)> {
        let before = self.last.replace((step, Instant::now()));
        before.map(|(last, at)| (step - last, at.elapsed()))
    }

    /// Asks for the exact step only if the one that the run saw may be due, and answers it then.
    pub fn due_now(&self, context: &RunContext<'_, '_>) -> Result<Option<i64>> {
        match context.step_seen() {
            Some(seen) if self.is_due(seen + 1) => Ok(context.step_now()?.filter(|step| self.is_due(*step))),
            _ => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timer_by_steps() {
        let mut timer = Timer::new(Every::Steps(10));
        assert!(timer.is_due(0));
        assert_eq!(timer.acted(0), None);
        assert!(!timer.is_due(0) && !timer.is_due(9) && timer.is_due(10) && timer.is_due(25));
        assert_eq!(timer.acted(25).map(|(steps, _)| steps), Some(25));
        assert!(!timer.is_due(34) && timer.is_due(35));
    }

    #[test]
    fn a_timer_by_seconds_acts_once_per_step() {
        let mut timer = Timer::new(Every::Secs(0.0));
        timer.acted(5);
        assert!(!timer.is_due(5) && timer.is_due(6));
        let mut slow = Timer::new(Every::Secs(3600.0));
        slow.acted(5);
        assert!(!slow.is_due(1_000_000));
    }
}
