//! The threads of a pool, and how a call and they meet.
//!
//! The caller always works too, so a pool of one spawns nothing. A call publishes its job, wakes
//! parked workers, claims tasks until none is left, withdraws the job and waits only for workers
//! that are inside it. A worker that wakes too late finds nothing and costs nothing.
//!
//! | field | written by | read by |
//! | --- | --- | --- |
//! | `crew` (a lock) | the resizing thread | the caller that owns the pool for one call; others then work alone |
//! | `job` | the owning caller: set, later null | workers, only after raising `inside` |
//! | `inside` | workers: up before reading `job`, down after its last use | the owning caller, after `job` is null |
//! | `epoch` | the owning caller, after `job` is set | waiting workers |
//! | `parked` of a worker | the worker sets it, the thread that wakes it clears it | the owning caller |
//!
//! The job lives on the caller's stack. It stays valid because `job` is null before the caller waits for `inside` to
//! reach zero (both sequentially consistent): a worker that raised `inside` later than that wait sees null. Since a
//! call holds `crew` until then, a resize finds all workers idle; those that must go have their `stop` set, are woken
//! and joined, as all are when the pool is dropped.
//!
//! `tests/interleavings.rs` runs this file under loom, so it takes its primitives from `super::sync`.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::null_mut;
use std::time::Duration;

use super::sync::{Arc, AtomicBool, AtomicPtr, AtomicUsize, Instant, Mutex, SeqCst, TURNS, spin_loop, thread};
use super::{bind_to_cores, nth_block};

/// The workers of a pool; the caller of [`Workers::run`] is not one of them.
pub(super) struct Workers {
    pub(super) shared: Arc<PoolState>,
    pub(super) crew: Mutex<Vec<Worker>>,
    /// The length of `crew`, readable without the lock.
    n_workers: AtomicUsize,
    /// The cores that workers are bound to in turn; empty if they are not.
    cores: Vec<usize>,
}

pub(super) struct PoolState {
    epoch: AtomicUsize,
    inside: AtomicUsize,
    job: AtomicPtr<Job<'static>>,
}

/// A thread of the pool.
pub(super) struct Worker {
    pub(super) handle: thread::JoinHandle<()>,
    flags: Arc<Flags>,
}

#[derive(Default)]
struct Flags {
    parked: AtomicBool,
    stop: AtomicBool,
}

/// One call of `parallel_for`, on its caller's stack.
struct Job<'f> {
    task: &'f (dyn Fn(usize) + Sync),
    n_tasks: usize,
    /// The tasks are distributed to this many lanes in contiguous ranges.
    n_lanes: usize,
    /// The number of claimed tasks of each lane.
    claimed: [Lane; MAX_LANES],
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// A counter on a separate cache line.
#[derive(Default)]
#[repr(align(64))]
struct Lane(AtomicUsize);

/// More threads than this share lanes.
pub(super) const MAX_LANES: usize = 16;

/// How long an idle worker spins for the next job before it parks. Waking a parked thread costs
/// 5 to 50 µs on a virtual machine; kernels of one step follow each other faster than this.
const SPIN: Duration = Duration::from_micros(40);

impl Workers {
    /// See [`super::IntraPool::with_cores`].
    pub fn new(n_threads: usize, cores: &[usize]) -> Workers {
        let workers = Workers {
            shared: Arc::new(PoolState {
                epoch: AtomicUsize::new(0),
                inside: AtomicUsize::new(0),
                job: AtomicPtr::new(null_mut()),
            }),
            crew: Mutex::new(Vec::new()),
            n_workers: AtomicUsize::new(0),
            cores: cores.to_vec(),
        };
        workers.set_threads(n_threads);
        workers
    }

    /// See [`super::IntraPool::set_threads`].
    pub fn set_threads(&self, n_threads: usize) -> usize {
        let n_workers = n_threads.max(1) - 1;
        let mut crew = self.crew.lock();
        let n_staying = n_workers.min(crew.len());
        dismiss(crew.split_off(n_staying));
        while crew.len() < n_workers {
            // With fewer threads than requested the pool is slower, not wrong.
            let Some(worker) = self.hire(crew.len()) else { break };
            crew.push(worker);
        }
        self.n_workers.store(crew.len(), SeqCst);
        crew.len() + 1
    }

    /// Starts worker number `worker`.
    fn hire(&self, worker: usize) -> Option<Worker> {
        let flags = Arc::new(Flags::default());
        let (shared, mine) = (self.shared.clone(), flags.clone());
        let core = self.cores.get((worker + 1) % self.cores.len().max(1)).copied();
        let spawned = thread::Builder::new().name(format!("kolo-intra-{}", worker + 1)).spawn(move || {
            if let Some(core) = core {
                bind_to_cores(&[core]);
            }
            shared.work(&mine, worker + 1);
        });
        spawned.ok().map(|handle| Worker { handle, flags })
    }

    pub fn n_threads(&self) -> usize {
        self.n_workers.load(SeqCst) + 1
    }

    /// Runs the tasks of one call, handed out in at most `most_lanes` lanes.
    pub fn run(&self, n_tasks: usize, most_lanes: usize, task: &(dyn Fn(usize) + Sync)) {
        if n_tasks <= 1 || self.n_workers.load(SeqCst) == 0 {
            return (0..n_tasks).for_each(task);
        }
        let Some(crew) = self.crew.try_lock() else {
            return (0..n_tasks).for_each(task);
        };
        let n_lanes = n_tasks.min(crew.len() + 1).min(most_lanes);
        let job = Job { task, n_tasks, n_lanes, claimed: Default::default(), panic: Mutex::new(None) };
        self.shared.job.store((&raw const job).cast_mut().cast(), SeqCst);
        self.shared.epoch.fetch_add(1, SeqCst);
        for worker in crew.iter().take(n_tasks - 1) {
            if worker.flags.parked.swap(false, SeqCst) {
                worker.handle.thread().unpark();
            }
        }
        job.run(0);
        self.shared.job.store(null_mut(), SeqCst);
        let mut turns = 0u32;
        while self.shared.inside.load(SeqCst) != 0 {
            turns += 1;
            // The last worker may have been preempted: yield our core then.
            if turns < 20_000 { spin_loop() } else { thread::yield_now() }
        }
        drop(crew);
        if let Some(payload) = job.panic.into_inner() {
            resume_unwind(payload);
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        dismiss(std::mem::take(self.crew.get_mut()));
    }
}

/// Stops and joins idle workers.
fn dismiss(workers: Vec<Worker>) {
    for worker in &workers {
        worker.flags.stop.store(true, SeqCst);
        worker.handle.thread().unpark();
    }
    for worker in workers {
        // The last owner may be a task on the worker itself; that one ends on its own.
        if worker.handle.thread().id() != thread::current().id() {
            let _ = worker.handle.join();
        }
    }
}

impl PoolState {
    fn work(&self, flags: &Flags, worker: usize) {
        let mut seen = 0;
        while self.wait_for_job(flags, &mut seen) {
            self.inside.fetch_add(1, SeqCst);
            let job = self.job.load(SeqCst);
            if !job.is_null() {
                // SAFETY: `inside` was raised before a job that is not null was read, so its
                // caller keeps it alive until `inside` falls again (see the module's table).
                unsafe { &*job }.run(worker);
            }
            self.inside.fetch_sub(1, SeqCst);
        }
    }

    /// Waits until the epoch moves past `seen`; false when the worker is to end.
    fn wait_for_job(&self, flags: &Flags, seen: &mut usize) -> bool {
        let start = Instant::now();
        let mut news = || {
            let epoch = self.epoch.load(SeqCst);
            std::mem::replace(seen, epoch) != epoch
        };
        loop {
            for _ in 0..TURNS {
                if news() {
                    return !flags.stop.load(SeqCst);
                }
                spin_loop();
            }
            if flags.stop.load(SeqCst) {
                return false;
            }
            if start.elapsed() < SPIN {
                continue;
            }
            flags.parked.store(true, SeqCst);
            // A job published before the flag was set saw no worker to wake.
            while !news() {
                if flags.stop.load(SeqCst) {
                    return false;
                }
                thread::park();
            }
            flags.parked.store(false, SeqCst);
            return !flags.stop.load(SeqCst);
        }
    }
}

impl Job<'_> {
    /// Claims and runs tasks until none is left, first those of the thread's own lane, then steals from others; keeps
    /// the first panic for the caller.
    fn run(&self, thread: usize) {
        let result = catch_unwind(AssertUnwindSafe(|| {
            for lane in (0..self.n_lanes).map(|i| (thread + i) % self.n_lanes) {
                let tasks = nth_block(self.n_tasks, self.n_lanes, lane);
                loop {
                    let index = tasks.start + self.claimed[lane].0.fetch_add(1, SeqCst);
                    if index >= tasks.end {
                        break;
                    }
                    (self.task)(index);
                }
            }
        }));
        if let Err(payload) = result {
            self.claimed.iter().for_each(|lane| lane.0.store(self.n_tasks, SeqCst));
            self.panic.lock().get_or_insert(payload);
        }
    }
}
