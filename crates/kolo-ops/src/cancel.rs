//! Cancellation: one token per step. Whatever can wait registers how to be woken.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kolo_core::Error;
use parking_lot::Mutex;

type Callback = Box<dyn FnOnce(Error) + Send>;

/// Says whether a step was cancelled, and why, and calls those who want to know.
#[derive(Default)]
pub struct CancelToken {
    /// Read without the lock by loops that only want to know whether to go on.
    cancelled: AtomicBool,
    next: AtomicU64,
    state: Mutex<TokenState>,
}

#[derive(Default)]
struct TokenState {
    reason: Option<Error>,
    callbacks: HashMap<u64, Callback>,
}

/// A callback that waits for a cancellation; see [`CancelToken::register`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registration(u64);

impl CancelToken {
    /// A token that is not cancelled.
    pub fn new() -> Arc<CancelToken> {
        Arc::new(CancelToken::default())
    }

    /// Cancels, once; the first reason stays. Callbacks run on this thread, without any lock held.
    pub fn cancel(&self, reason: Error) {
        let callbacks = {
            let mut state = self.state.lock();
            if state.reason.is_some() {
                return;
            }
            state.reason = Some(reason.clone());
            self.cancelled.store(true, Ordering::Release);
            std::mem::take(&mut state.callbacks)
        };
        for callback in callbacks.into_values() {
            callback(reason.clone());
        }
    }

    /// True once cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    /// True once cancelled, for loops that outlive no borrow of the token.
    pub fn flag(&self) -> &AtomicBool {
        &self.cancelled
    }

    /// Why it was cancelled.
    pub fn reason(&self) -> Option<Error> {
        self.state.lock().reason.clone()
    }

    /// Calls `callback` when the token is cancelled. If it is already, gives the callback back with the reason.
    pub fn register(&self, callback: Callback) -> Result<Registration, (Callback, Error)> {
        let mut state = self.state.lock();
        if let Some(reason) = &state.reason {
            return Err((callback, reason.clone()));
        }
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        state.callbacks.insert(id, callback);
        Ok(Registration(id))
    }

    /// Forgets a callback. False if it has run, or is about to.
    pub fn deregister(&self, registration: Registration) -> bool {
        self.state.lock().callbacks.remove(&registration.0).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callbacks_run_once_with_the_first_reason() {
        let token = CancelToken::new();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let push = |seen: &Arc<Mutex<Vec<String>>>| -> Callback {
            let seen = seen.clone();
            Box::new(move |reason| seen.lock().push(reason.message().to_owned()))
        };
        let kept = token.register(push(&seen)).ok();
        let dropped = token.register(push(&seen)).ok().unwrap();
        assert!(kept.is_some() && token.deregister(dropped));
        token.cancel(Error::cancelled("first"));
        token.cancel(Error::cancelled("second"));
        assert_eq!(*seen.lock(), ["first"]);
        assert!(token.is_cancelled());
        assert!(token.register(push(&seen)).is_err());
    }
}
