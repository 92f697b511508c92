//! Feeds every step from a function.

use kolo_core::{Result, Tensor};
use kolo_graph::Output;

use crate::train::{RunArgs, RunContext, SessionHook};

/// Gives what one run is fed.
type Next<'g> = dyn FnMut() -> Result<Vec<(Output<'g>, Tensor)>> + 'g;

/// Feeds what a function gives. The function's `OutOfRange` ends training as the end of the input.
pub struct FeedFn<'g> {
    next: Box<Next<'g>>,
}

impl<'g> FeedFn<'g> {
    /// Feeds what `next` gives, once per run.
    pub fn new(next: impl FnMut() -> Result<Vec<(Output<'g>, Tensor)>> + 'g) -> FeedFn<'g> {
        FeedFn { next: Box::new(next) }
    }
}

impl<'g> SessionHook<'g> for FeedFn<'g> {
    fn name(&self) -> &'static str {
        "FeedFn"
    }

    fn before_run(&mut self, _context: &RunContext<'_, 'g>) -> Result<RunArgs<'g>> {
        Ok(RunArgs { feeds: (self.next)()?, ..RunArgs::default() })
    }
}
