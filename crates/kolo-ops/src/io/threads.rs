//! Threads that wait for disks, so that no thread of a step does. A device has a few; the first use makes them.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use kolo_core::{Error, Result};
use parking_lot::{Condvar, Mutex};

use crate::ResourceStore;
use crate::resource::Resource;

/// More do not make one disk faster.
const MOST_THREADS: usize = 4;

type Job = Box<dyn FnOnce() + Send>;

/// A device's file threads. They end, and are joined, when the last kernel that uses them and the store are gone.
pub(crate) struct IoThreads {
    shared: Arc<Shared>,
    handles: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<PoolState>,
    changed: Condvar,
}

#[derive(Default)]
struct PoolState {
    jobs: VecDeque<Job>,
    n_idle: usize,
    closed: bool,
}

impl IoThreads {
    /// The threads of the device that owns `resources`.
    pub fn of(resources: &ResourceStore) -> Result<Arc<IoThreads>> {
        resources.lookup_or_create("", "kolo_io_threads", || Ok(Arc::new(IoThreads::new())))
    }

    fn new() -> IoThreads {
        IoThreads { shared: Arc::default(), handles: Mutex::default() }
    }

    /// Runs `job` on one of the threads, soon. An error if there is no thread and none can be made.
    pub fn run(&self, job: impl FnOnce() + Send + 'static) -> Result<()> {
        let mut handles = self.handles.lock();
        let all_are_taken = {
            let state = self.shared.state.lock();
            // A thread that was woken for a job counts as idle until it has it.
            state.jobs.len() >= state.n_idle
        };
        if all_are_taken && handles.len() < MOST_THREADS {
            let shared = self.shared.clone();
            match thread::Builder::new().name("kolo-io".into()).spawn(move || shared.work()) {
                Ok(handle) => handles.push(handle),
                Err(error) if handles.is_empty() => {
                    return Err(Error::resource_exhausted(format!("cannot start a thread for file access: {error}")));
                }
                Err(_) => {}
            }
        }
        self.shared.state.lock().jobs.push_back(Box::new(job));
        self.shared.changed.notify_one();
        Ok(())
    }
}

impl Shared {
    fn work(&self) {
        let mut state = self.state.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                // A job that panics loses its `Done`, which ends its step with an error. The thread goes on.
                let _ = catch_unwind(AssertUnwindSafe(job));
                state = self.state.lock();
                continue;
            }
            if state.closed {
                return;
            }
            state.n_idle += 1;
            self.changed.wait(&mut state);
            state.n_idle -= 1;
        }
    }
}

impl Drop for IoThreads {
    fn drop(&mut self) {
        self.shared.state.lock().closed = true;
        self.shared.changed.notify_all();
        join_all(std::mem::take(&mut *self.handles.lock()));
    }
}

/// Joins threads. The last handle to an object may be dropped by the end of a step, which may run on one of them: that one
/// ends by itself.
pub(crate) fn join_all(handles: Vec<JoinHandle<()>>) {
    for handle in handles {
        if handle.thread().id() != thread::current().id() {
            let _ = handle.join();
        }
    }
}

impl Resource for IoThreads {
    fn kind(&self) -> &'static str {
        "pool of file threads"
    }
    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn jobs_run_even_after_one_panics_and_before_the_threads_end() {
        let threads = IoThreads::new();
        let (sender, receiver) = mpsc::channel();
        for i in 0..100 {
            let sender = sender.clone();
            threads
                .run(move || {
                    assert!(i != 3, "job 3 fails");
                    sender.send(i).unwrap();
                })
                .unwrap();
        }
        assert!(threads.handles.lock().len() <= MOST_THREADS);
        drop((threads, sender));
        let mut seen: Vec<i32> = receiver.iter().collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..100).filter(|i| *i != 3).collect::<Vec<_>>());
    }
}
