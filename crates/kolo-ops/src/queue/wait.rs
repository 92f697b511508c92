//! One who waits for something, without a thread, and how a cancelled step ends the wait.
//!
//! A waiter is first put on its object's list, under the object's lock, and only then told of to the step's token, so that
//! a cancellation always finds it there or finds it served. Whoever takes it off the list finishes it: exactly once.

use std::sync::Arc;

use crate::{CancelToken, Done, Outcome, Registration};
use kolo_core::Result;

/// A kernel that waits.
pub(crate) struct Waiter {
    /// Unique in its object.
    pub id: u64,
    done: Done,
    registration: Option<(Arc<CancelToken>, Registration)>,
}

impl Waiter {
    /// A waiter that no cancellation can reach yet; see [`watch`].
    pub fn new(id: u64, done: Done) -> Waiter {
        Waiter { id, done, registration: None }
    }

    /// Remembers what to take back once it is served.
    pub fn attach(&mut self, token: &Arc<CancelToken>, registration: Registration) {
        self.registration = Some((token.clone(), registration));
    }

    /// Ends the wait. No lock of the object may be held.
    pub fn finish(self, outcome: Result<Outcome>) {
        if let Some((token, registration)) = self.registration {
            token.deregister(registration);
        }
        self.done.finish(outcome);
    }
}

/// An object that is waited for.
pub(crate) trait Waits: Send + Sync + 'static {
    /// Attaches a registration to a waiter; false if it was served meanwhile.
    fn attach(&self, id: u64, token: &Arc<CancelToken>, registration: Registration) -> bool;
    /// Ends the wait of a waiter that is still there, because its step was cancelled.
    fn cancel(&self, id: u64);
}

/// Makes a cancellation of the step end the wait of `id`, which is on the object's list.
pub(crate) fn watch<W: Waits>(object: &Arc<W>, id: u64, token: &Arc<CancelToken>) {
    // A weak pointer: a step must not keep alive an object that was removed.
    let weak = Arc::downgrade(object);
    let callback = Box::new(move |_| {
        if let Some(object) = weak.upgrade() {
            object.cancel(id);
        }
    });
    match token.register(callback) {
        Ok(registration) => {
            if !object.attach(id, token, registration) {
                token.deregister(registration);
            }
        }
        Err(_) => object.cancel(id),
    }
}
