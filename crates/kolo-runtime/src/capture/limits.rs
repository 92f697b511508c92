//! The deadline and the cancellation of a run, for waits outside of kernels and executor threads: a wait for a GPU
//! that replays a captured step, and a wait for another replay of the same step.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_core::{Error, Result};
use kolo_device::Event;
use kolo_ops::CancelToken;
use parking_lot::{Mutex, MutexGuard};

use crate::executor::step::Step;

/// How long a wait spins before it sleeps between polls: about the length of a small step.
const SPIN: Duration = Duration::from_millis(1);
/// The sleep between two polls.
const NAP: Duration = Duration::from_micros(20);
/// How often a wait for a lock checks whether the run was stopped.
const LOOK: Duration = Duration::from_millis(10);

/// The deadline of a run, and its cancellation.
pub(crate) struct Limits {
    start: Instant,
    deadline: Option<Instant>,
    cancel: Arc<CancelToken>,
}

impl Limits {
    pub fn new(deadline: Option<Instant>, cancel: Arc<CancelToken>) -> Limits {
        Limits { start: Instant::now(), deadline, cancel }
    }

    /// Runs a step within these limits.
    pub fn run(&self, step: &Arc<Step>) {
        let weak = Arc::downgrade(step);
        let stop = Box::new(move |reason: Error| {
            if let Some(step) = weak.upgrade() {
                step.fail(reason);
            }
        });
        let registration = match self.cancel.register(stop) {
            Ok(registration) => Some(registration),
            Err((_, reason)) => {
                step.fail(reason);
                None
            }
        };
        step.run(self.deadline, &|_| false);
        if let Some(registration) = registration {
            self.cancel.deregister(registration);
        }
    }

    /// Waits for a device. `what` names the wait in the error if the run is stopped first. A call of the driver may block
    /// this thread until the device is done, for instance while another thread frees memory. So a run that was cancelled
    /// meanwhile ends with that, as a step does that runs node by node, though nothing is left to wait for.
    pub fn wait(&self, event: &dyn Event, what: &str) -> Result<()> {
        let start = Instant::now();
        while !event.is_done() {
            self.check(what)?;
            match start.elapsed() < SPIN {
                true => std::hint::spin_loop(),
                false => std::thread::sleep(NAP),
            }
        }
        event.wait()?;
        self.check_cancelled()
    }

    /// Waits for a lock.
    pub fn lock<'a, T>(&self, mutex: &'a Mutex<T>, what: &str) -> Result<MutexGuard<'a, T>> {
        loop {
            let until = Instant::now() + LOOK;
            if let Some(guard) = mutex.try_lock_until(self.deadline.map_or(until, |deadline| deadline.min(until))) {
                return Ok(guard);
            }
            self.check(what)?;
        }
    }

    /// The error of a run that was cancelled or has passed its deadline.
    fn check(&self, what: &str) -> Result<()> {
        self.check_cancelled()?;
        match self.deadline {
            Some(deadline) if Instant::now() >= deadline => Err(Error::deadline_exceeded(format!(
                "the step timed out after {:.1?}; it waits for {what}",
                self.start.elapsed()
            ))),
            _ => Ok(()),
        }
    }

    fn check_cancelled(&self) -> Result<()> {
        match self.cancel.is_cancelled() {
            true => Err(self.cancel.reason().unwrap_or_else(|| Error::cancelled("the step was stopped"))),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use kolo_core::Code;

    use super::*;

    #[derive(Default)]
    struct Flag(AtomicBool);

    impl Event for Flag {
        fn is_done(&self) -> bool {
            self.0.load(Ordering::Acquire)
        }

        fn wait(&self) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_wait_ends_with_the_event_the_deadline_or_the_cancellation() {
        let flag = Flag::default();
        let late = Limits::new(Some(Instant::now() + Duration::from_millis(5)), CancelToken::new());
        let error = late.wait(&flag, "the GPU").unwrap_err();
        assert_eq!(error.code(), Code::DeadlineExceeded);
        assert!(error.message().ends_with("it waits for the GPU"), "{error}");

        let limits = Limits::new(None, CancelToken::new());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| limits.wait(&flag, "the GPU"));
            limits.cancel.cancel(Error::cancelled("enough"));
            assert_eq!(waiting.join().unwrap().unwrap_err().message(), "enough");
        });
        flag.0.store(true, Ordering::Release);
        assert!(late.wait(&flag, "the GPU").is_ok());
        // Cancelled before anybody looked at the event, which is done.
        assert_eq!(limits.wait(&flag, "the GPU").unwrap_err().message(), "enough");
    }

    #[test]
    fn a_lock_that_is_held_is_not_waited_for_longer_than_allowed() {
        let mutex = Mutex::new(());
        let held = mutex.lock();
        let late = Limits::new(Some(Instant::now() + Duration::from_millis(5)), CancelToken::new());
        assert_eq!(late.lock(&mutex, "another run").err().unwrap().code(), Code::DeadlineExceeded);
        drop(held);
        assert!(late.lock(&mutex, "another run").is_ok());
    }
}
