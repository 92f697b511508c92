//! The intra-op pool under [loom](https://docs.rs/loom), which runs every interleaving of a few threads that the memory model
//! allows, up to a number of preemptions. It compiles `workers.rs` a second time, with loom's primitives in `sync`.

#[path = "../src/cpu/pool/workers.rs"]
#[allow(dead_code, reason = "the models do not call all of it")]
mod workers;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use workers::{MAX_LANES, Workers};

/// Loom's primitives, as the file above expects them.
mod sync {
    use std::sync::atomic::Ordering;
    use std::time::Duration;

    pub use loom::hint::spin_loop;
    pub use loom::sync::Arc;
    use loom::sync::atomic;
    pub use loom::thread;
    pub use std::sync::atomic::Ordering::SeqCst;

    pub const TURNS: u32 = 1;

    /// No time is left for spinning: a worker that finds no job parks.
    pub struct Instant;

    impl Instant {
        pub fn now() -> Instant {
            Instant
        }

        pub fn elapsed(&self) -> Duration {
            Duration::MAX
        }
    }

    /// Loom takes `SeqCst` operations for `AcqRel` ones, but knows `SeqCst` fences: one before each operation restores the
    /// order.
    fn fenced<R>(order: Ordering, operation: impl FnOnce() -> R) -> R {
        if order == SeqCst {
            atomic::fence(SeqCst);
        }
        operation()
    }

    macro_rules! atomic {
        ($name:ident $(<$T:ident>)?, $of:ty) => {
            pub struct $name $(<$T>)? (atomic::$name $(<$T>)?);

            #[allow(dead_code, reason = "not every type needs every operation")]
            impl $(<$T>)? $name $(<$T>)? {
                pub fn new(value: $of) -> Self {
                    Self(atomic::$name::new(value))
                }

                #[track_caller]
                pub fn load(&self, order: Ordering) -> $of {
                    fenced(order, || self.0.load(order))
                }

                #[track_caller]
                pub fn store(&self, value: $of, order: Ordering) {
                    fenced(order, || self.0.store(value, order));
                }

                #[track_caller]
                pub fn swap(&self, value: $of, order: Ordering) -> $of {
                    fenced(order, || self.0.swap(value, order))
                }
            }

            /// Whoever drops it must know that no thread will touch it again: loom fails the model otherwise.
            impl $(<$T>)? Drop for $name $(<$T>)? {
                fn drop(&mut self) {
                    if !std::thread::panicking() {
                        self.0.with_mut(|_| ());
                    }
                }
            }
        };
    }

    atomic!(AtomicUsize, usize);
    atomic!(AtomicPtr<T>, *mut T);

    /// Loom's has no `with_mut`, so it is a number.
    pub struct AtomicBool(AtomicUsize);

    impl AtomicBool {
        #[track_caller]
        pub fn load(&self, order: Ordering) -> bool {
            self.0.load(order) != 0
        }

        #[track_caller]
        pub fn store(&self, value: bool, order: Ordering) {
            self.0.store(value.into(), order);
        }

        #[track_caller]
        pub fn swap(&self, value: bool, order: Ordering) -> bool {
            self.0.swap(value.into(), order) != 0
        }
    }

    impl AtomicUsize {
        #[track_caller]
        pub fn fetch_add(&self, value: usize, order: Ordering) -> usize {
            fenced(order, || self.0.fetch_add(value, order))
        }

        #[track_caller]
        pub fn fetch_sub(&self, value: usize, order: Ordering) -> usize {
            fenced(order, || self.0.fetch_sub(value, order))
        }
    }

    impl Default for AtomicUsize {
        fn default() -> AtomicUsize {
            AtomicUsize::new(0)
        }
    }

    impl Default for AtomicBool {
        fn default() -> AtomicBool {
            AtomicBool(AtomicUsize::new(0))
        }
    }

    /// With parking_lot's signatures.
    pub struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub fn new(value: T) -> Mutex<T> {
            Mutex(loom::sync::Mutex::new(value))
        }

        #[track_caller]
        pub fn lock(&self) -> loom::sync::MutexGuard<'_, T> {
            self.0.lock().expect("not poisoned")
        }

        #[track_caller]
        pub fn try_lock(&self) -> Option<loom::sync::MutexGuard<'_, T>> {
            self.0.try_lock().ok()
        }

        pub fn get_mut(&mut self) -> &mut T {
            self.0.get_mut().expect("not poisoned")
        }

        pub fn into_inner(self) -> T {
            self.0.into_inner().expect("not poisoned")
        }
    }
}

fn bind_to_cores(_: &[usize]) {}

fn nth_block(len: usize, n: usize, i: usize) -> std::ops::Range<usize> {
    i * len / n..(i + 1) * len / n
}

/// Runs `model` in every interleaving with at most so many preemptions.
fn check(n_preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(n_preemptions);
    builder.check(model);
}

/// What tasks write. Loom fails the model if two threads touch one of them and nothing orders their accesses.
struct Results(Vec<Slot>);

#[derive(Default)]
struct Slot {
    value: UnsafeCell<u32>,
    begun: AtomicUsize,
}

// SAFETY: loom checks each access.
unsafe impl Sync for Results {}
// SAFETY: as above.
unsafe impl Send for Results {}

impl Results {
    fn new(n: usize) -> Results {
        Results((0..n).map(|_| Slot::default()).collect())
    }

    fn count(&self, task: usize) {
        // A task takes time: loom may switch to another thread here, and what follows is later than the claim of the task.
        self.0[task].begun.fetch_add(1, Relaxed);
        // SAFETY: loom checks each access.
        self.0[task].value.with_mut(|value| unsafe { *value += 1 });
    }

    fn expect(&self, count: u32) {
        for slot in &self.0 {
            // SAFETY: loom checks each access.
            assert_eq!(slot.value.with(|value| unsafe { *value }), count);
        }
    }
}

/// Each task runs once, its caller sees what it wrote, the job is not touched after the call, and workers end with the pool,
/// wherever they are.
#[test]
fn a_call_ends_with_all_results_and_no_worker_inside() {
    for most_lanes in [1, MAX_LANES] {
        check(3, move || {
            let pool = Workers::new(2, &[]);
            let results = Results::new(2);
            pool.run(2, most_lanes, &|task| results.count(task));
            results.expect(1);
        });
    }
}

/// A worker may be late for one job and meet the next one.
#[test]
fn a_late_worker_joins_the_next_call_or_none() {
    check(3, || {
        let pool = Workers::new(2, &[]);
        let results = Results::new(2);
        for count in 1..=2 {
            pool.run(2, 1, &|task| results.count(task));
            results.expect(count);
        }
    });
}

/// The pool serves one of two callers; the other one works alone.
#[test]
fn two_callers_do_not_wait_for_each_other() {
    check(3, || {
        let pool = Arc::new(Workers::new(2, &[]));
        let other = {
            let pool = pool.clone();
            loom::thread::spawn(move || {
                let results = Results::new(2);
                pool.run(2, 1, &|task| results.count(task));
                results.expect(1);
            })
        };
        let results = Results::new(2);
        pool.run(2, 1, &|task| results.count(task));
        results.expect(1);
        other.join().expect("it ends");
    });
}

/// A resize waits for the running call, and ends its surplus workers whether they spin, park or are about to.
#[test]
fn a_pool_shrinks_while_a_call_runs() {
    check(3, || {
        let pool = Arc::new(Workers::new(2, &[]));
        let other = {
            let pool = pool.clone();
            loom::thread::spawn(move || pool.set_threads(1))
        };
        let results = Results::new(2);
        pool.run(2, 1, &|task| results.count(task));
        results.expect(1);
        assert_eq!(other.join().expect("it ends"), 1);
        assert_eq!(pool.n_threads(), 1);
    });
}
