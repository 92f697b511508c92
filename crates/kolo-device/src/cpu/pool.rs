//! Data parallelism inside one kernel: a few threads that share the tasks of one call. `workers.rs` is how they meet; here
//! are the loops that kernels call.

mod workers;

use std::mem::MaybeUninit;
use std::sync::Arc;

use super::gemm::nth_block;
use super::scratch::Scratch;
use super::stop::with_flag;
use super::stream::{fence, is_streamed, stream};
use super::topology::bind_to_cores;
use workers::{MAX_LANES, Workers};

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
    workers: Workers,
}

/// What `workers.rs` is made of. `tests/interleavings.rs` compiles that file with loom's in place of these.
mod sync {
    pub(super) use std::hint::spin_loop;
    pub(super) use std::sync::Arc;
    pub(super) use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering::SeqCst};
    pub(super) use std::thread;
    pub(super) use std::time::Instant;

    pub(super) use parking_lot::Mutex;

    /// How often an idle worker looks for a job before it looks at the clock.
    pub(super) const TURNS: u32 = 64;
}

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
        Arc::new(IntraPool { workers: Workers::new(n_threads, cores.unwrap_or_default()) })
    }

    /// Sets the number of threads that work on a call, the caller included; 0 means 1. Waits for the running call, if
    /// any; surplus threads have ended when it returns. Must not be called from inside a task. Returns the new number,
    /// which is smaller than requested if the system cannot start more threads.
    pub fn set_threads(&self, n_threads: usize) -> usize {
        self.workers.set_threads(n_threads)
    }

    /// Threads that work on a call, the caller included.
    #[must_use]
    pub fn n_threads(&self) -> usize {
        self.workers.n_threads()
    }

    /// Runs `task(0)` to `task(n_tasks - 1)`, each once, in any order, and returns when all are
    /// done. Small indices start first. If the pool is serving another call (or this call comes
    /// from inside a task) the caller runs everything itself.
    ///
    /// # Panics
    /// When a task panics, tasks not yet started are skipped and the first panic is resumed in the caller.
    pub fn parallel_for(&self, n_tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        with_flag(task, |task| self.workers.run(n_tasks, 1, task));
    }

    /// [`IntraPool::parallel_for`], but each thread begins with a contiguous range of tasks, the same for every call
    /// with as many tasks: kernels that split their data alike find it in the cache of the core that used it last. Not
    /// for data larger than the caches: distant streams may be slower than adjacent ones.
    ///
    /// # Panics
    /// As [`IntraPool::parallel_for`].
    pub fn parallel_for_near(&self, n_tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        with_flag(task, |task| self.workers.run(n_tasks, MAX_LANES, task));
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
        let copy = |i: usize| {
            // SAFETY: `run` calls each index once, so no chunk is borrowed twice.
            let part = unsafe { parts.chunk(i) };
            part.copy_from_slice(&from[i * chunk_len..][..part.len()]);
        };
        with_flag(&copy, |copy| self.workers.run(parts.n_chunks(), if is_cached { MAX_LANES } else { 1 }, copy));
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
