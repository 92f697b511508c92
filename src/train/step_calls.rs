//! What a trainer calls for a step: the same for all, or another for some of them ([`Steps`]).

use std::sync::Arc;

use kolo_core::Result;
use kolo_graph::Output;
use kolo_runtime::{Callable, Session};

use crate::parallel::Steps;

/// The calls of a training.
pub(super) struct StepCalls<'g> {
    steps: Steps<'g>,
    usual: Callable,
    other: Option<Callable>,
}

/// The call of one step.
pub(super) struct StepCall<'a> {
    pub callable: &'a Callable,
    /// Ranks exchange nothing in it, not even losses.
    pub are_apart: bool,
}

impl<'g> StepCalls<'g> {
    /// Calls that are fed `fed`, and what a rank says after that. They give `of_all`, or in steps in which ranks are apart `own`.
    pub fn new(
        session: &Arc<Session>,
        steps: Steps<'g>,
        fed: &[Output<'g>],
        (of_all, says): (&[Output<'g>], Option<Output<'g>>),
        own: &[Output<'g>],
    ) -> Result<StepCalls<'g>> {
        let together: Vec<Output<'g>> = fed.iter().copied().chain(says).collect();
        let (usual, other) = steps.operations();
        let usual = match steps.meet_now_and_then() {
            true => session.make_callable(fed, own, &[usual])?,
            false => session.make_callable(&together, of_all, &[usual])?,
        };
        let other = other.map(|other| session.make_callable(&together, of_all, &[other])).transpose()?;
        Ok(StepCalls { steps, usual, other })
    }

    /// The call of the step of this number.
    pub fn of(&self, step: i64) -> StepCall<'_> {
        match self.other.as_ref().filter(|_| self.steps.is_other(step)) {
            Some(callable) => StepCall { callable, are_apart: false },
            None => StepCall { callable: &self.usual, are_apart: self.steps.meet_now_and_then() },
        }
    }
}
