//! Data parallelism inside one kernel: a few threads that share the tasks of one call.
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

use std::any::Any;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering::SeqCst};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::gemm::nth_block;
use super::scratch::Scratch;
use super::stream::{fence, is_streamed, stream};
use super::topology::bind_to_cores;

/// A set of threads that work on one kernel's tasks together; [`IntraPool::set_threads`] changes how many.
///
/// ```
/// use kolo_device::cpu::IntraPool;
///
/// let pool = IntraPool::new(2);
/// let mut squares = vec![0usize; 1000];
/// pool.for_each_chunk(&mut squares, 100, |chunk, part| {
///     for (i, x) in part.iter_mut().enumerate() {
///         *x = (chunk * 100 + i).pow(2);
///     }
/// });
/// assert_eq!(squares[31], 961);
/// ```
pub struct IntraPool {
    shared: Arc<PoolState>,
    crew: Mutex<Vec<Worker>>,
    /// The length of `crew`, readable without the lock.
    n_workers: AtomicUsize,
    /// The cores that workers are bound to in turn; empty if they are not.
    cores: Vec<usize>,
}

struct PoolState {
    epoch: AtomicUsize,
    inside: AtomicUsize,
    job: AtomicPtr<Job<'static>>,
}

/// A thread of the pool.
struct Worker {
    handle: JoinHandle<()>,
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
const MAX_LANES: usize = 16;

/// How long an idle worker spins for the next job before it parks. Waking a parked thread costs
/// 5 to 50 µs on a virtual machine; kernels of one step follow each other faster than this.
const SPIN: Duration = Duration::from_micros(40);

/// A task shorter than this is not worth handing to another thread.
const MIN_TASK_NS: f64 = 12_000.0;

impl IntraPool {
    /// A pool of `n_threads` counting the caller; 0 means 1.
    #[must_use]
    pub fn new(n_threads: usize) -> Arc<IntraPool> {
        Self::with_cores(n_threads, None)
    }

    /// Like [`IntraPool::new`]; worker `i` (from 1) runs only on core `cores[i % cores.len()]`,
    /// so `cores[0]` is left for the caller, whose own binding is not changed. Binding is best effort:
    /// a core the process may not use leaves that worker unbound.
    #[must_use]
    pub fn with_cores(n_threads: usize, cores: Option<&[usize]>) -> Arc<IntraPool> {
        let pool = IntraPool {
            shared: Arc::new(PoolState {
                epoch: AtomicUsize::new(0),
                inside: AtomicUsize::new(0),
                job: AtomicPtr::new(null_mut()),
            }),
            crew: Mutex::new(Vec::new()),
            n_workers: AtomicUsize::new(0),
            cores: cores.unwrap_or_default().to_vec(),
        };
        pool.set_threads(n_threads);
        Arc::new(pool)
    }

    /// Sets the number of threads that work on a call, the caller included; 0 means 1. Waits for the running call, if
    /// any; surplus threads have ended when it returns. Must not be called from inside a task. Returns the new number,
    /// which is smaller than requested if the system cannot start more threads.
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
        let spawned = std::thread::Builder::new().name(format!("kolo-intra-{}", worker + 1)).spawn(move || {
            if let Some(core) = core {
                bind_to_cores(&[core]);
            }
            shared.work(&mine, worker + 1);
        });
        spawned.ok().map(|handle| Worker { handle, flags })
    }

    /// Threads that work on a call, the caller included.
    #[must_use]
    pub fn n_threads(&self) -> usize {
        self.n_workers.load(SeqCst) + 1
    }

    /// Runs `task(0)` to `task(n_tasks - 1)`, each once, in any order, and returns when all are
    /// done. Small indices start first. If the pool is serving another call (or this call comes
    /// from inside a task) the caller runs everything itself.
    ///
    /// # Panics
    /// When a task panics, tasks not yet started are skipped and the first panic is resumed in the caller.
    pub fn parallel_for(&self, n_tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        self.run(n_tasks, 1, task);
    }

    /// [`IntraPool::parallel_for`], but each thread begins with a contiguous range of tasks, the same for every call
    /// with as many tasks: kernels that split their data alike find it in the cache of the core that used it last. Not
    /// for data larger than the caches: distant streams may be slower than adjacent ones.
    ///
    /// # Panics
    /// As [`IntraPool::parallel_for`].
    pub fn parallel_for_near(&self, n_tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        self.run(n_tasks, MAX_LANES, task);
    }

    fn run(&self, n_tasks: usize, most_lanes: usize, task: &(dyn Fn(usize) + Sync)) {
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
            if turns < 20_000 { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        drop(crew);
        if let Some(payload) = job.panic.into_inner() {
            resume_unwind(payload);
        }
    }

    /// Splits `data` into chunks of `chunk_len` (the last may be shorter) and runs `f` on each.
    ///
    /// # Panics
    /// If `chunk_len` is 0 and `data` is not empty.
    #[inline]
    pub fn for_each_chunk<T: Send>(&self, data: &mut [T], chunk_len: usize, f: impl Fn(usize, &mut [T]) + Sync) {
        self.chunks_by(data, chunk_len, &f);
    }

    /// [`IntraPool::for_each_chunk`], compiled once for each element type and not for each `f`.
    fn chunks_by<T: Send>(&self, data: &mut [T], chunk_len: usize, f: &(dyn Fn(usize, &mut [T]) + Sync)) {
        let parts = Parts::of(data, chunk_len);
        // SAFETY: `parallel_for` calls each index once, so no chunk is borrowed twice.
        self.parallel_for(parts.n_chunks(), &|i| f(i, unsafe { parts.chunk(i) }));
    }

    /// Splits `data` into `n_blocks` of equal length and each block into chunks of `chunk_len` (the last may be
    /// shorter), and runs `f` on the chunks with the same index in their blocks.
    ///
    /// # Panics
    /// If there are no blocks, if they would differ in length, or if `chunk_len` is 0 and they are not empty.
    pub fn for_each_chunk_across<T: Send>(
        &self,
        data: &mut [T],
        n_blocks: usize,
        chunk_len: usize,
        f: impl Fn(usize, &mut [&mut [T]]) + Sync,
    ) {
        assert!(n_blocks > 0 && data.len().is_multiple_of(n_blocks), "blocks have equal lengths");
        if data.is_empty() {
            return;
        }
        let block_len = data.len() / n_blocks;
        let blocks: Vec<Parts<T>> = data.chunks_mut(block_len).map(|block| Parts::of(block, chunk_len)).collect();
        self.parallel_for(blocks[0].n_chunks(), &|i| {
            // SAFETY: as in `for_each_chunk`, for each of the blocks, which do not overlap.
            let mut pieces: Vec<&mut [T]> = blocks.iter().map(|block| unsafe { block.chunk(i) }).collect();
            f(i, &mut pieces);
        });
    }

    /// [`IntraPool::for_each_chunk`] for an `f` that writes every element of its chunk and reads none. Large results
    /// are computed in a buffer and stored bypassing the caches; chunks of [`fill_grain`] elements are best.
    ///
    /// # Panics
    /// As [`IntraPool::for_each_chunk`].
    pub fn fill_chunks<T: Copy + Default + Send + bytemuck::NoUninit>(
        &self,
        data: &mut [T],
        chunk_len: usize,
        f: &(dyn Fn(usize, &mut [T]) + Sync),
    ) {
        match is_streamed(size_of_val(data)) {
            true => self.stream_chunks(data, chunk_len, f),
            false => self.chunks_by(data, chunk_len, f),
        }
    }

    fn stream_chunks<T: Copy + Default + Send + bytemuck::NoUninit>(
        &self,
        data: &mut [T],
        chunk_len: usize,
        f: &(dyn Fn(usize, &mut [T]) + Sync),
    ) {
        let task_bytes = self.stretch(size_of_val(data));
        let parts = Parts::of(data, chunk_len);
        let chunk_bytes = chunk_len.saturating_mul(size_of::<T>());
        let (n_chunks, per_task) = (parts.n_chunks(), (task_bytes / chunk_bytes.max(1)).max(1));
        self.parallel_for(n_chunks.div_ceil(per_task), &|task| {
            let mine = task * per_task..((task + 1) * per_task).min(n_chunks);
            if chunk_bytes > MOST_STREAMED {
                // SAFETY: `parallel_for` calls each index once, and every piece belongs to one task.
                return mine.for_each(|i| f(i, unsafe { parts.chunk(i) }));
            }
            let scratch = Scratch::take::<T>(chunk_len);
            let room = scratch.as_ptr::<MaybeUninit<T>>();
            // SAFETY: the scratch has room for `chunk_len` values, is page-aligned, and is used by this task only until
            // it is returned. Values of `T` are written here, so from then on they may be read as such.
            let buffer = unsafe {
                std::slice::from_raw_parts_mut(room, chunk_len).fill(MaybeUninit::new(T::default()));
                std::slice::from_raw_parts_mut(room.cast::<T>(), chunk_len)
            };
            for i in mine {
                // SAFETY: `parallel_for` calls each index once, and every piece belongs to one task.
                let piece = unsafe { parts.chunk(i) };
                let buffer = &mut buffer[..piece.len()];
                f(i, buffer);
                stream(piece, buffer);
            }
            fence();
            scratch.put_back();
        });
    }

    /// Copies bytes. Those that fit the caches are copied by the threads that likely wrote them.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn copy(&self, to: &mut [u8], from: &[u8]) {
        assert_eq!(to.len(), from.len(), "as many bytes as there is room for");
        if from.len() < LEAST_SPLIT_COPY {
            return to.copy_from_slice(from);
        }
        let is_cached = from.len() <= self.n_threads() * CACHED_BYTES;
        let chunk_len = if is_cached { CACHED_COPY } else { self.stretch(from.len()) };
        let parts = Parts::of(to, chunk_len);
        self.run(parts.n_chunks(), if is_cached { MAX_LANES } else { 1 }, &|i| {
            // SAFETY: `run` calls each index once, so no chunk is borrowed twice.
            let part = unsafe { parts.chunk(i) };
            part.copy_from_slice(&from[i * chunk_len..][..part.len()]);
        });
    }

    /// About how many of `n_bytes` that do not fit the caches each task should take: long ranges, since the hardware
    /// prefetches only within one, and still several for each thread.
    #[must_use]
    pub fn stretch(&self, n_bytes: usize) -> usize {
        (n_bytes / (8 * self.n_threads())).clamp(LEAST_STRETCH, MOST_STRETCH)
    }

    /// [`IntraPool::for_each_chunk`] over two slices split at the same indices.
    ///
    /// # Panics
    /// If the slices differ in length, or `chunk_len` is 0 and they are not empty.
    pub fn for_each_chunk2<T: Send, U: Send>(
        &self,
        first: &mut [T],
        second: &mut [U],
        chunk_len: usize,
        f: impl Fn(usize, &mut [T], &mut [U]) + Sync,
    ) {
        assert_eq!(first.len(), second.len(), "slices cut together have equal lengths");
        let (a, b) = (Parts::of(first, chunk_len), Parts::of(second, chunk_len));
        self.parallel_for(a.n_chunks(), &|i| {
            // SAFETY: as in `for_each_chunk`, for each of the two slices.
            let (a, b) = unsafe { (a.chunk(i), b.chunk(i)) };
            f(i, a, b);
        });
    }
}

/// The number of elements for one task when an element costs about `ns_per_element`.
///
/// Depends on the cost alone, never on the number of threads, so that sums over chunks come out
/// the same everywhere. A multiple of 64 elements, so that tasks do not share cache lines.
#[must_use]
pub fn grain(ns_per_element: f64) -> usize {
    let len = MIN_TASK_NS / ns_per_element.max(1e-3);
    (len as usize).next_multiple_of(64).max(64)
}

/// [`IntraPool::copy`] copies less than this on the caller's thread: waking others takes longer.
const LEAST_SPLIT_COPY: usize = 512 << 10;

/// What one task copies of bytes that other cores have in their caches: about 15 µs. Every thread more costs the caller
/// 2 µs to wake.
const CACHED_COPY: usize = 128 << 10;

/// What a core's cache keeps from one kernel to the next, about.
pub const CACHED_BYTES: usize = 1 << 20;

/// The size of the buffer for results that bypass the caches: it fits L1.
const STREAM_BLOCK: usize = 4 << 10;

/// Larger chunks are written directly: buffer and inputs would evict each other from L1 (16 KiB gain nothing, 4 KiB a
/// third of the time).
const MOST_STREAMED: usize = 8 << 10;

/// Bounds of a task bound by memory: with 256 KiB instead of 1 MiB, reading alone takes a tenth longer.
const LEAST_STRETCH: usize = 128 << 10;
const MOST_STRETCH: usize = 1 << 20;

/// The chunk length for [`IntraPool::fill_chunks`] in a result of `n` elements that cost about `ns_per_element` each.
#[must_use]
pub fn fill_grain<T>(n: usize, ns_per_element: f64) -> usize {
    match is_streamed(n.saturating_mul(size_of::<T>())) {
        true => (STREAM_BLOCK / size_of::<T>().max(1)).max(1),
        false => grain(ns_per_element),
    }
}

impl Drop for IntraPool {
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
        if worker.handle.thread().id() != std::thread::current().id() {
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
            for _ in 0..64 {
                if news() {
                    return !flags.stop.load(SeqCst);
                }
                std::hint::spin_loop();
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
                std::thread::park();
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

/// A mutable slice as disjoint chunks that different threads may borrow at the same time.
struct Parts<T> {
    start: *mut T,
    len: usize,
    chunk_len: usize,
}

// SAFETY: a piece is a `&mut [T]` on another thread, which `T: Send` allows; pieces do not overlap.
unsafe impl<T: Send> Sync for Parts<T> {}

impl<T> Parts<T> {
    fn of(data: &mut [T], chunk_len: usize) -> Parts<T> {
        assert!(chunk_len > 0 || data.is_empty(), "chunks have at least one element");
        Parts { start: data.as_mut_ptr(), len: data.len(), chunk_len: chunk_len.max(1) }
    }

    fn n_chunks(&self) -> usize {
        self.len.div_ceil(self.chunk_len)
    }

    /// # Safety
    /// No chunk may be borrowed twice at a time, nor after the slice's borrow.
    #[expect(clippy::mut_from_ref, reason = "the pieces are disjoint")]
    unsafe fn chunk(&self, index: usize) -> &mut [T] {
        let first = index * self.chunk_len;
        assert!(first < self.len);
        // SAFETY: the range is inside the slice; the caller guarantees that it is borrowed once.
        unsafe {
            let start = self.start.add(first);
            std::slice::from_raw_parts_mut(start, self.chunk_len.min(self.len - first))
        }
    }
}

#[cfg(test)]
mod tests;
