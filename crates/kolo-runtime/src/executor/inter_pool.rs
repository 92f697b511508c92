//! The thread pool that runs nodes of one device in addition to the caller of `Session::run`.
//!
//! Threads are started on demand, up to a maximum that may change while they work. An idle thread spins for a moment
//! before it parks: waking a parked thread costs more than a small kernel.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_device::cpu::topology::bind_to_cores;

use super::may_wait::MayWait;
use super::sync::atomic::{AtomicUsize, Ordering};
use super::sync::{Condvar, Mutex, MutexGuard, patience, thread};

/// What a pool's thread runs. Without a thread of the pool, for want of one, it gets no [`MayWait`].
pub(crate) type Job = Box<dyn FnOnce(Option<MayWait>) + Send>;

/// How long an idle thread spins before it parks.
const SPIN: Duration = patience(30);

/// The pool. When it is dropped, the threads end after the queued jobs have run.
pub struct InterPool {
    shared: Arc<PoolState>,
    name: String,
    /// The cores its threads are bound to; empty means all.
    cores: Vec<usize>,
}

struct PoolState {
    state: Mutex<JobQueue>,
    work: Condvar,
    /// The queue's length, readable without the lock while spinning.
    n_queued: AtomicUsize,
    /// Written under the lock.
    max_threads: AtomicUsize,
}

#[derive(Default)]
struct JobQueue {
    jobs: VecDeque<Job>,
    n_threads: usize,
    n_idle: usize,
    /// The number of threads started so far, for their names.
    n_started: usize,
    closed: bool,
}

impl InterPool {
    /// A pool of at most `max_threads` threads called `name-N`.
    pub fn new(name: impl Into<String>, max_threads: usize) -> InterPool {
        InterPool::with_cores(name, max_threads, &[])
    }

    /// As [`InterPool::new`], with threads bound to these cores; none means all.
    pub fn with_cores(name: impl Into<String>, max_threads: usize, cores: &[usize]) -> InterPool {
        let shared = PoolState {
            state: Mutex::default(),
            work: Condvar::new(),
            n_queued: AtomicUsize::new(0),
            max_threads: AtomicUsize::new(max_threads),
        };
        InterPool { shared: Arc::new(shared), name: name.into(), cores: cores.to_vec() }
    }

    /// The maximum number of threads.
    pub fn max_threads(&self) -> usize {
        self.shared.max_threads.load(Ordering::Relaxed)
    }

    /// Sets the maximum number of threads. Surplus idle threads end at once, busy ones after their current job.
    pub fn set_max_threads(&self, max_threads: usize) {
        let state = self.shared.state.lock();
        self.shared.max_threads.store(max_threads, Ordering::Relaxed);
        drop(state);
        self.shared.work.notify_all();
    }

    /// Whether jobs wait for a thread. A long job should give way to them.
    pub fn has_queued(&self) -> bool {
        self.shared.n_queued.load(Ordering::Relaxed) > 0
    }

    /// The current number of threads.
    pub fn n_threads(&self) -> usize {
        self.shared.state.lock().n_threads
    }

    /// Queues `job` for one of the threads. False if the pool may not have threads: then the caller must run it.
    pub fn spawn(&self, job: impl FnOnce() + Send + 'static) -> bool {
        self.spawn_beside(0, Box::new(|_| job())).is_ok()
    }

    /// The same for a caller that already has `n` threads running, which count towards the maximum. Gives the job back if
    /// the pool may not have threads.
    pub(crate) fn spawn_beside(&self, n: usize, job: Job) -> Result<(), Job> {
        let mut state = self.shared.state.lock();
        let max_threads = match self.max_threads() {
            0 => 0,
            threads => threads.saturating_sub(n).max(1),
        };
        if max_threads == 0 {
            return Err(job);
        }
        state.jobs.push_back(job);
        self.shared.n_queued.store(state.jobs.len(), Ordering::Release);
        if state.n_idle < state.jobs.len() && state.n_threads < max_threads {
            let (shared, cores) = (self.shared.clone(), self.cores.clone());
            let name = format!("{}-{}", self.name, state.n_started);
            let work = move || {
                bind_to_cores(&cores);
                shared.work();
            };
            if thread::Builder::new().name(name).spawn(work).is_ok() {
                state.n_threads += 1;
                state.n_started += 1;
            } else if state.n_threads == 0 {
                // No thread can be started: remove the job from the queue.
                let job = state.jobs.pop_back();
                self.shared.n_queued.store(state.jobs.len(), Ordering::Release);
                return job.map_or(Ok(()), Err);
            }
        }
        drop(state);
        self.shared.work.notify_one();
        Ok(())
    }
}

impl Drop for InterPool {
    fn drop(&mut self) {
        self.shared.state.lock().closed = true;
        self.shared.work.notify_all();
    }
}

impl PoolState {
    fn work(&self) {
        let mut state = self.state.lock();
        loop {
            // Queued jobs must run, so the last thread stays for them.
            let least = usize::from(!state.jobs.is_empty());
            if state.n_threads > self.max_threads.load(Ordering::Relaxed).max(least) {
                state.n_threads -= 1;
                // The notification that woke this thread may have been for a job.
                self.work.notify_one();
                return;
            }
            if let Some(job) = state.jobs.pop_front() {
                self.n_queued.store(state.jobs.len(), Ordering::Release);
                drop(state);
                job(Some(MayWait::of_a_pool()));
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

    /// Spins until there is work or [`SPIN`] has passed, then takes the lock.
    fn spin(&self) -> MutexGuard<'_, JobQueue> {
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
    fn a_pool_shrinks_and_grows_and_runs_everything() {
        let pool = InterPool::new("resized", 4);
        let (sender, receiver) = mpsc::channel();
        let mut n_jobs = 0;
        for n in [4, 1, 3, 2, 0, 5] {
            pool.set_max_threads(n);
            assert_eq!(pool.max_threads(), n);
            for _ in 0..20 {
                let sender = sender.clone();
                n_jobs += usize::from(pool.spawn(move || sender.send(()).expect("the test listens")));
            }
            pool.set_max_threads(n.min(2));
        }
        for _ in 0..n_jobs {
            receiver.recv_timeout(Duration::from_secs(10)).unwrap();
        }
        assert_eq!(n_jobs, 100, "a pool of none takes nothing");
        pool.set_max_threads(1);
        let deadline = Instant::now() + Duration::from_secs(10);
        while pool.n_threads() > 1 {
            assert!(Instant::now() < deadline, "{} threads live", pool.n_threads());
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_pool_without_threads_gives_the_work_back() {
        assert!(!InterPool::new("test", 0).spawn(|| ()));
    }
}
