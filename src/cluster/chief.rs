//! What a chief does beside its own steps: an operation that is run over and over until training stops.

use std::sync::Arc;
use std::time::Duration;

use kolo_core::{Code, Error, Result};
use kolo_ops::CancelToken;
use kolo_runtime::{RunOptions, Session};

use crate::train::Coordinator;

/// How long to wait before another try when a server cannot be reached: at first, and at most.
const PAUSE: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(1)];

/// Runs `operation` in a thread of the coordinator until that stops, which also ends a run that waits.
///
/// A server that is lost does not stop training from here: the session's own steps feel it too, and its owner decides. Until
/// then the operation is tried again.
pub(super) fn spawn_loop(name: &str, session: &Arc<Session>, coordinator: &Coordinator, operation: &str) -> Result<()> {
    let cancel = CancelToken::new();
    let options = RunOptions { cancel: Some(cancel.clone()), ..RunOptions::default() };
    let (session, operation) = (session.clone(), operation.to_owned());
    coordinator.spawn(name, move |coordinator| {
        let mut pause = PAUSE[0];
        while !coordinator.should_stop() {
            match session.run_named_with(&options, &[], &[], &[&operation]) {
                Ok(_) => pause = PAUSE[0],
                Err(error) if matches!(error.code(), Code::OutOfRange | Code::Cancelled) => break,
                Err(error) if matches!(error.code(), Code::Aborted | Code::Unavailable) => {
                    tracing::warn!(target: "kolo::train", "'{operation}' is tried again in {pause:.1?}: {error}");
                    coordinator.wait_for_stop(pause);
                    pause = (pause * 2).min(PAUSE[1]);
                }
                // Whoever closes a session ends what uses it.
                Err(error) if coordinator.should_stop() => {
                    tracing::debug!(target: "kolo::train", "'{operation}' ended with its session: {error}");
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    })?;
    coordinator.spawn(&format!("{name}-stop"), move |coordinator| {
        while !coordinator.wait_for_stop(Duration::from_secs(60)) {}
        cancel.cancel(Error::cancelled("training stops"));
        Ok(())
    })
}
