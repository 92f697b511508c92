//! Threads that stop together.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kolo_core::{Code, Error, Result};
use parking_lot::{Condvar, Mutex};

/// Starts threads, tells them when to stop, and collects the first error.
///
/// ```
/// use std::time::Duration;
/// use kolo::train::Coordinator;
///
/// let coordinator = Coordinator::new();
/// coordinator.spawn("reader", |c| {
///     while !c.should_stop() {
///         c.wait_for_stop(Duration::from_millis(1));
///     }
///     Ok(())
/// })?;
/// coordinator.request_stop();
/// coordinator.join(Duration::from_secs(10))?;
/// # Ok::<(), kolo::Error>(())
/// ```
#[derive(Clone, Default)]
pub struct Coordinator {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<CoordinatorState>,
    changed: Condvar,
}

#[derive(Default)]
struct CoordinatorState {
    stopping: bool,
    error: Option<Error>,
    threads: Vec<Running>,
}

struct Running {
    name: String,
    handle: JoinHandle<()>,
}

impl Coordinator {
    /// A coordinator with no threads.
    pub fn new() -> Coordinator {
        Coordinator::default()
    }

    /// Asks all threads to stop.
    pub fn request_stop(&self) {
        self.shared.state.lock().stopping = true;
        self.shared.changed.notify_all();
    }

    /// Asks all threads to stop because of an error, which [`Coordinator::join`] returns; the first one is kept. The end
    /// of the input (`OutOfRange`) is no error, nor is a cancellation that comes after stopping was asked for.
    pub fn request_stop_with(&self, error: Error) {
        let mut state = self.shared.state.lock();
        let is_clean = error.code() == Code::OutOfRange || (state.stopping && error.code() == Code::Cancelled);
        if !is_clean {
            state.error.get_or_insert(error);
        }
        state.stopping = true;
        drop(state);
        self.shared.changed.notify_all();
    }

    /// True once stopping was asked for.
    pub fn should_stop(&self) -> bool {
        self.shared.state.lock().stopping
    }

    /// The error that made everything stop, if one did.
    pub fn error(&self) -> Option<Error> {
        self.shared.state.lock().error.clone()
    }

    /// Waits until stopping is asked for, at most this long; true if it was.
    pub fn wait_for_stop(&self, at_most: Duration) -> bool {
        let deadline = Instant::now() + at_most;
        let mut state = self.shared.state.lock();
        while !state.stopping {
            if self.shared.changed.wait_until(&mut state, deadline).timed_out() {
                break;
            }
        }
        state.stopping
    }

    /// Starts a thread. An error it returns, or a panic, stops all threads.
    pub fn spawn(&self, name: &str, body: impl FnOnce(&Coordinator) -> Result<()> + Send + 'static) -> Result<()> {
        let own = self.clone();
        let label = name.to_owned();
        let run = move || {
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| body(&own)));
            match outcome {
                Ok(Ok(())) => {}
                Ok(Err(error)) => own.request_stop_with(error.context(format!("thread '{label}'"))),
                Err(_) => own.request_stop_with(Error::internal(format!("thread '{label}' panicked"))),
            }
            // Taking the lock orders this after a joiner's look at the thread, so that it cannot miss the end.
            drop(own.shared.state.lock());
            own.shared.changed.notify_all();
        };
        let handle = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(run)
            .map_err(|e| Error::resource_exhausted(format!("cannot start thread '{name}': {e}")))?;
        self.shared.state.lock().threads.push(Running { name: name.to_owned(), handle });
        Ok(())
    }

    /// Waits for all threads: without limit until stopping is asked for, then at most `grace` more. Returns the error
    /// that stopped them, or names the threads that did not end in time.
    pub fn join(&self, grace: Duration) -> Result<()> {
        /// A thread has still a few instructions to go after it said that it ends.
        const LAST_LOOK: Duration = Duration::from_millis(20);
        let mut deadline: Option<Instant> = None;
        let mut state = self.shared.state.lock();
        loop {
            let threads = std::mem::take(&mut state.threads);
            let (ended, running): (Vec<Running>, Vec<Running>) =
                threads.into_iter().partition(|thread| thread.handle.is_finished());
            state.threads = running;
            ended.into_iter().for_each(|thread| drop(thread.handle.join()));
            if state.threads.is_empty() {
                return state.error.clone().map_or(Ok(()), Err);
            }
            if state.stopping && deadline.is_none() {
                deadline = Some(Instant::now() + grace);
            }
            if let Some(deadline) = deadline
                && Instant::now() >= deadline
            {
                let names: Vec<&str> = state.threads.iter().map(|thread| thread.name.as_str()).collect();
                let late = format!("threads that did not stop within {grace:?}: {}", names.join(", "));
                return Err(match state.error.clone() {
                    Some(error) => error.and(format!(" ({late})")),
                    None => Error::deadline_exceeded(late),
                });
            }
            self.shared.changed.wait_for(&mut state, LAST_LOOK);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(20);

    #[test]
    fn the_first_error_stops_all_and_is_returned() {
        let c = Coordinator::new();
        c.spawn("waits", |c| {
            assert!(c.wait_for_stop(GRACE));
            Err(Error::cancelled("told to stop"))
        })
        .unwrap();
        c.spawn("fails", |_| Err(Error::data_loss("bad record 7"))).unwrap();
        let error = c.join(GRACE).unwrap_err();
        assert_eq!(error.code(), Code::DataLoss);
        assert!(error.message().contains("'fails': bad record 7"), "{error}");
    }

    #[test]
    fn the_end_of_input_is_no_error() {
        let c = Coordinator::new();
        c.spawn("reads", |_| Err(Error::out_of_range("end of input"))).unwrap();
        c.join(GRACE).unwrap();
        assert!(c.should_stop());
    }

    #[test]
    fn a_panic_is_an_error_and_a_thread_that_stays_is_named() {
        let c = Coordinator::new();
        c.spawn("panics", |_| panic!("on purpose")).unwrap();
        assert!(c.join(GRACE).unwrap_err().message().contains("'panics' panicked"));

        let c = Coordinator::new();
        let (release, held) = std::sync::mpsc::channel::<()>();
        c.spawn("stays", move |_| {
            held.recv().ok();
            Ok(())
        })
        .unwrap();
        c.request_stop();
        let error = c.join(Duration::from_millis(1)).unwrap_err();
        assert_eq!(error.code(), Code::DeadlineExceeded);
        assert!(error.message().contains("stays"), "{error}");
        drop(release);
        c.join(GRACE).unwrap();
    }
}
