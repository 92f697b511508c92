//! Stopping a kernel in the middle of its loops: whoever runs it lends a flag, which the loops of an
//! [`IntraPool`](super::IntraPool) look at before each task. They unwind with [`Stopped`] once it is set.

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
    struct Reset(*const AtomicBool);
    impl Drop for Reset {
        fn drop(&mut self) {
            FLAG.set(self.0);
        }
    }
    let _reset = Reset(FLAG.replace(stop));
    kernel()
}

/// Calls `run` with `task`, or with one that looks at the thread's flag first.
pub(super) fn with_flag(task: &(dyn Fn(usize) + Sync), run: impl FnOnce(&(dyn Fn(usize) + Sync))) {
    // SAFETY: a flag that is not null was set on this thread by a call of `stoppable` that has not returned, since it is
    // reset before that returns or unwinds; until then the flag is borrowed there. `run` returns before this does.
    match unsafe { FLAG.get().as_ref() } {
        None => run(task),
        Some(stop) => run(&|i| {
            if stop.load(Ordering::Relaxed) {
                resume_unwind(Box::new(Stopped));
            }
            task(i);
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
