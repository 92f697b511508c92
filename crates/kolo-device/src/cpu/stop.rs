//! Stopping a kernel in the middle of its loops: whoever runs it lends a flag, which the loops of an
//! [`IntraPool`](super::IntraPool) look at before each task, and loops that take long on one thread look at by
//! [`stop_if_asked`] or [`looking`]. They unwind with [`Stopped`] once it is set.

use std::cell::Cell;
use std::panic::resume_unwind;
use std::ptr::null;
use std::sync::atomic::{AtomicBool, Ordering};

thread_local! {
    /// The flag that the thread's kernel was lent; null if there is none.
    static FLAG: Cell<*const AtomicBool> = const { Cell::new(null()) };
}

/// With what a stopped kernel unwinds. It is no error, so nothing is printed.
pub struct Stopped;

/// Runs `kernel`, whose parallel loops unwind with [`Stopped`] once `stop` is true. What it has written is then half done,
/// so it must write to nothing that anybody reads afterwards.
pub fn stoppable<R>(stop: &AtomicBool, kernel: impl FnOnce() -> R) -> R {
    /// Nests, and also resets while it unwinds.
    struct Reset(*const AtomicBool);
    impl Drop for Reset {
        fn drop(&mut self) {
            FLAG.set(self.0);
        }
    }
    let _reset = Reset(FLAG.replace(stop));
    kernel()
}

/// Unwinds with [`Stopped`] if the kernel that runs on this thread has been stopped. For loops outside of a pool's, and
/// within long tasks.
#[inline]
pub fn stop_if_asked() {
    // SAFETY: a flag that is not null was set on this thread by a call of `stoppable` that has not returned, since it is
    // reset before that returns or unwinds; until then the flag is borrowed there.
    if let Some(stop) = unsafe { FLAG.get().as_ref() }
        && stop.load(Ordering::Relaxed)
    {
        resume_unwind(Box::new(Stopped));
    }
}

/// The items, with a [`stop_if_asked`] every few thousand. For loops that do more for an item than move it.
pub fn looking<I: IntoIterator>(items: I) -> Looking<I::IntoIter> {
    looking_by(0, items)
}

/// As [`looking`], for items of so many bytes, which are copied or added up.
pub fn looking_by<I: IntoIterator>(n_bytes: usize, items: I) -> Looking<I::IntoIter> {
    let n_between = (BYTES_BETWEEN / n_bytes.max(1)).clamp(1, N_BETWEEN as usize) as u32;
    Looking { items: items.into_iter(), n_between, n_left: n_between }
}

/// How many items [`looking`] passes on between two looks: some 100 µs, if one takes 20 ns.
const N_BETWEEN: u32 = 4096;

/// How many bytes of items [`looking_by`] passes on between two looks.
const BYTES_BETWEEN: usize = 1 << 18;

/// See [`looking`].
pub struct Looking<I> {
    items: I,
    n_between: u32,
    n_left: u32,
}

impl<I: Iterator> Iterator for Looking<I> {
    type Item = I::Item;

    #[inline]
    fn next(&mut self) -> Option<I::Item> {
        self.n_left -= 1;
        if self.n_left == 0 {
            self.n_left = self.n_between;
            stop_if_asked();
        }
        self.items.next()
    }

    #[inline]
    fn size_hint(&self) -> (usize, Option<usize>) {
        self.items.size_hint()
    }
}

/// Calls `run` with `task`, or with one that looks at the thread's flag first, and lends it to the threads of a pool.
pub(super) fn with_flag(task: &(dyn Fn(usize) + Sync), run: impl FnOnce(&(dyn Fn(usize) + Sync))) {
    // SAFETY: as in `stop_if_asked`; `run` returns before this does.
    match unsafe { FLAG.get().as_ref() } {
        None => run(task),
        Some(stop) => run(&|i| {
            stoppable(stop, || {
                stop_if_asked();
                task(i);
            });
        }),
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::AtomicUsize;

    use super::*;
    use crate::cpu::IntraPool;

    #[test]
    fn a_long_task_and_a_loop_on_one_thread_end_soon_after_they_are_stopped() {
        for n_threads in [1, 2] {
            let (pool, stop) = (IntraPool::new(n_threads), AtomicBool::new(false));
            let items = || {
                for i in looking(0..1_000_000_000u64) {
                    stop.fetch_or(i >= 10, Ordering::Relaxed);
                    assert!(i < 1_000_000, "nobody looks");
                }
            };
            let tasks = || pool.parallel_for(2, &|_| items());
            for kernel in [&items as &dyn Fn(), &tasks] {
                stop.store(false, Ordering::Relaxed);
                let unwound = catch_unwind(AssertUnwindSafe(|| stoppable(&stop, kernel))).unwrap_err();
                assert!(unwound.is::<Stopped>());
            }
        }
        assert_eq!(looking(0..10_000).sum::<u32>(), (0..10_000).sum());
        stop_if_asked();
    }

    #[test]
    fn large_items_are_looked_at_more_often() {
        for (n_bytes, most) in [(1, 4096), (1 << 10, 257), (1 << 18, 2), (usize::MAX, 2)] {
            let (stop, mut n) = (AtomicBool::new(true), 0);
            let kernel = || looking_by(n_bytes, 0..10_000).for_each(|_| n += 1);
            assert!(catch_unwind(AssertUnwindSafe(|| stoppable(&stop, kernel))).is_err());
            assert!(n < most, "{n} items of {n_bytes} bytes");
        }
        assert_eq!(looking_by(1 << 20, 0..10).sum::<u32>(), 45);
    }

    #[test]
    fn a_loop_ends_soon_after_it_is_stopped() {
        for n_threads in [1, 2] {
            let (pool, stop, n_run) = (IntraPool::new(n_threads), AtomicBool::new(false), AtomicUsize::new(0));
            let kernel = || {
                pool.parallel_for(1_000_000, &|i| {
                    n_run.fetch_add(1, Ordering::Relaxed);
                    stop.fetch_or(i >= 10, Ordering::Relaxed);
                });
            };
            let unwound = catch_unwind(AssertUnwindSafe(|| stoppable(&stop, kernel))).unwrap_err();
            assert!(unwound.is::<Stopped>());
            assert!(n_run.load(Ordering::Relaxed) < 1_000_000);
            // The flag is not looked at any more.
            pool.parallel_for(4, &|_| _ = n_run.fetch_add(1, Ordering::Relaxed));
        }
    }
}
