//! Threads that run nodes of one device beside the caller of `Session::run`.
//!
//! Never more than the given number, started when first needed. An idle thread watches for work for a moment before it
//! parks: waking a parked thread costs more than a small kernel.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

type Job = Box<dyn FnOnce() + Send>;

/// How long an idle thread watches for work before it parks.
const SPIN: Duration = Duration::from_micros(30);

/// The pool. Dropping it lets the threads end; work that was handed over still runs.
pub struct InterPool {
    shared: Arc<Shared>,
    max_threads: usize,
    name: String,
}

struct Shared {
    state: Mutex<State>,
    work: Condvar,
    /// The queue's length, readable without the lock while spinning.
    n_queued: AtomicUsize,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    n_threads: usize,
    n_idle: usize,
    closed: bool,
}

impl InterPool {
    /// A pool of at most `max_threads` threads called `name-N`.
    pub fn new(name: impl Into<String>, max_threads: usize) -> InterPool {
        let shared = Shared { state: Mutex::default(), work: Condvar::new(), n_queued: AtomicUsize::new(0) };
        InterPool { shared: Arc::new(shared), max_threads, name: name.into() }
    }

    /// The most threads it will have.
    pub fn max_threads(&self) -> usize {
        self.max_threads
    }

    /// The threads it has now.
    pub fn n_threads(&self) -> usize {
        self.shared.state.lock().n_threads
    }

    /// Runs `job` on one of the threads. False if there can be none: the caller must run it then.
    pub fn spawn(&self, job: impl FnOnce() + Send + 'static) -> bool {
        if self.max_threads == 0 {
            return false;
        }
        let mut state = self.shared.state.lock();
        state.jobs.push_back(Box::new(job));
        self.shared.n_queued.store(state.jobs.len(), Ordering::Release);
        if state.n_idle < state.jobs.len() && state.n_threads < self.max_threads {
            let shared = self.shared.clone();
            let name = format!("{}-{}", self.name, state.n_threads);
            if std::thread::Builder::new().name(name).spawn(move || shared.work()).is_ok() {
                state.n_threads += 1;
            } else if state.n_threads == 0 {
                // The system gives no thread at all: take the job back.
                state.jobs.pop_back();
                self.shared.n_queued.store(state.jobs.len(), Ordering::Release);
                return false;
            }
        }
        drop(state);
        self.shared.work.notify_one();
        true
    }
}

impl Drop for InterPool {
    fn drop(&mut self) {
        self.shared.state.lock().closed = true;
        self.shared.work.notify_all();
    }
}

impl Shared {
    fn work(&self) {
        let mut state = self.state.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                self.n_queued.store(state.jobs.len(), Ordering::Release);
                drop(state);
                job();
                state = self.spin();
                continue;
            }
            if state.closed {
                state.n_threads -= 1;
                return;
            }
            state.n_idle += 1;
            self.work.wait(&mut state);
            state.n_idle -= 1;
        }
    }

    /// Watches for work for a moment, then takes the lock.
    fn spin(&self) -> parking_lot::MutexGuard<'_, State> {
        let start = Instant::now();
        while self.n_queued.load(Ordering::Acquire) == 0 && start.elapsed() < SPIN {
            for _ in 0..32 {
                std::hint::spin_loop();
            }
        }
        self.state.lock()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn there_are_never_more_threads_than_allowed() {
        let pool = InterPool::new("test", 2);
        let (sender, receiver) = mpsc::channel();
        for i in 0..50 {
            let sender = sender.clone();
            assert!(pool.spawn(move || sender.send((i, std::thread::current().id())).expect("the test listens")));
        }
        let mut seen: Vec<_> = (0..50).map(|_| receiver.recv_timeout(Duration::from_secs(10)).unwrap()).collect();
        assert!(pool.n_threads() <= 2);
        let threads: std::collections::HashSet<_> = seen.iter().map(|(_, thread)| *thread).collect();
        assert!(threads.len() <= 2);
        seen.sort_by_key(|(i, _)| *i);
        assert!(seen.iter().enumerate().all(|(k, (i, _))| k == *i));
    }

    #[test]
    fn a_pool_without_threads_gives_the_work_back() {
        assert!(!InterPool::new("test", 0).spawn(|| ()));
    }
}
