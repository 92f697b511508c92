//! Wakes an object at a time: for waits that end by the clock while nobody holds a thread for them.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use kolo_core::{Error, Result};
use parking_lot::{Condvar, Mutex};

/// An object that wants to be told when a time has come.
pub(crate) trait Rings: Send + Sync + 'static {
    /// The time that was set has come. No lock is held.
    fn ring(self: Arc<Self>);
}

/// One time at which its object is told. The thread starts with the first time that is set, and ends with the alarm.
pub(crate) struct Alarm {
    name: &'static str,
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<AlarmState>,
    changed: Condvar,
}

#[derive(Default)]
struct AlarmState {
    at: Option<Instant>,
    has_ended: bool,
}

impl Alarm {
    /// An alarm without a time; `name` is its thread's.
    pub fn new(name: &'static str) -> Alarm {
        Alarm { name, shared: Arc::default(), thread: Mutex::default() }
    }

    /// Sets the time, in place of what was set before; an error if no thread can be had.
    pub fn set<R: Rings>(&self, object: &Arc<R>, at: Option<Instant>) -> Result<()> {
        self.shared.state.lock().at = at;
        self.shared.changed.notify_all();
        let mut thread = self.thread.lock();
        if at.is_none() || thread.is_some() {
            return Ok(());
        }
        let (shared, object) = (self.shared.clone(), Arc::downgrade(object));
        let run = move || {
            while shared.wait() {
                match object.upgrade() {
                    Some(object) => object.ring(),
                    None => return,
                }
            }
        };
        let started = std::thread::Builder::new().name(self.name.to_owned()).spawn(run);
        let failed = |e| Error::resource_exhausted(format!("cannot start thread '{}': {e}", self.name));
        *thread = Some(started.map_err(failed)?);
        Ok(())
    }
}

impl Shared {
    /// Waits for the time; false if the alarm ended first.
    fn wait(&self) -> bool {
        let mut state = self.state.lock();
        loop {
            match state.at {
                _ if state.has_ended => return false,
                None => self.changed.wait(&mut state),
                Some(at) if at <= Instant::now() => {
                    state.at = None;
                    return true;
                }
                Some(at) => drop(self.changed.wait_until(&mut state, at)),
            }
        }
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        self.shared.state.lock().has_ended = true;
        self.shared.changed.notify_all();
        // The thread itself may hold the last handle of the object; then it ends right after this.
        if let Some(thread) =
            self.thread.lock().take().filter(|thread| thread.thread().id() != std::thread::current().id())
        {
            // A thread that panicked has been reported by the panic itself.
            drop(thread.join());
        }
    }
}
