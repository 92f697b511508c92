//! Evaluates something once, at the end.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use kolo_core::{Result, Tensor};
use kolo_graph::Output;
use kolo_runtime::Session;

use crate::train::SessionHook;

/// Where the values of [`FinalOps`] are after the session was closed.
pub type FinalValues = Rc<RefCell<Option<Vec<Tensor>>>>;

/// Fetches outputs when training ends, before the session closes.
pub struct FinalOps<'g> {
    fetches: Vec<Output<'g>>,
    feeds: Vec<(Output<'g>, Tensor)>,
    values: FinalValues,
}

impl<'g> FinalOps<'g> {
    /// Fetches `fetches` at the end, with `feeds`.
    pub fn new(fetches: &[Output<'g>], feeds: &[(Output<'g>, Tensor)]) -> FinalOps<'g> {
        FinalOps { fetches: fetches.to_vec(), feeds: feeds.to_vec(), values: FinalValues::default() }
    }

    /// A place to read the values from later; keep it before the hook is given away.
    pub fn values(&self) -> FinalValues {
        self.values.clone()
    }
}

impl<'g> SessionHook<'g> for FinalOps<'g> {
    fn name(&self) -> &'static str {
        "FinalOps"
    }

    fn end(&mut self, session: &Arc<Session>) -> Result<()> {
        *self.values.borrow_mut() = Some(session.run(&self.fetches, &self.feeds, &[])?);
        Ok(())
    }
}
