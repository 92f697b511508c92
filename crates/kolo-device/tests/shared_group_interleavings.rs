//! The flags of groups in shared memory under [loom](https://docs.rs/loom): no interleaving loses a wake-up. It compiles `flag.rs`
//! a second time, with loom's primitives in `sync`.

#[path = "../src/shared_group/flag.rs"]
#[allow(dead_code, reason = "the models do not call all of it")]
mod flag;

use loom::sync::Arc;
use loom::thread;
use std::time::Duration;

use flag::{Flag, reached};

/// Loom's primitives, as the file above expects them.
mod sync {
    use std::sync::atomic::Ordering;
    use std::time::Duration;

    use loom::sync::atomic::{self, fence};
    use loom::sync::{Condvar, Mutex};
    pub use std::sync::atomic::Ordering::SeqCst;

    /// A number and those who sleep on it, which the kernel keeps elsewhere. Loom takes `SeqCst` operations for `AcqRel` ones, but
    /// knows `SeqCst` fences: one before each operation restores the order.
    pub struct AtomicU32 {
        value: atomic::AtomicU32,
        asleep: Mutex<()>,
        woken: Condvar,
    }

    impl AtomicU32 {
        pub fn new(value: u32) -> AtomicU32 {
            AtomicU32 { value: atomic::AtomicU32::new(value), asleep: Mutex::new(()), woken: Condvar::new() }
        }

        pub fn load(&self, order: Ordering) -> u32 {
            fence(SeqCst);
            self.value.load(order)
        }

        pub fn store(&self, value: u32, order: Ordering) {
            fence(SeqCst);
            self.value.store(value, order);
        }

        pub fn fetch_add(&self, value: u32, order: Ordering) -> u32 {
            fence(SeqCst);
            self.value.fetch_add(value, order)
        }

        pub fn fetch_sub(&self, value: u32, order: Ordering) -> u32 {
            fence(SeqCst);
            self.value.fetch_sub(value, order)
        }
    }

    /// Nobody is woken by time here: a wake-up that is lost is a deadlock, which loom reports.
    pub fn futex_wait(word: &AtomicU32, expected: u32, _: Duration) {
        // The kernel compares and goes to sleep under a lock that waking takes, too.
        let guard = word.asleep.lock().expect("not poisoned");
        if word.load(SeqCst) == expected {
            drop(word.woken.wait(guard).expect("not poisoned"));
        }
    }

    pub fn futex_wake(word: &AtomicU32) {
        drop(word.asleep.lock().expect("not poisoned"));
        word.woken.notify_all();
    }
}

/// What a rank does that waits, without the spinning before it.
fn wait(flag: &Flag, sequence: u32) {
    while !reached(flag.sequence(), sequence) {
        flag.sleep_below(sequence, Duration::MAX);
    }
}

fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

#[test]
fn a_rank_that_goes_to_sleep_while_the_flag_is_raised_wakes_up() {
    check(|| {
        let flag = Arc::new(Flag::new());
        let owner = flag.clone();
        let thread = thread::spawn(move || {
            owner.raise(1);
            owner.raise(2);
        });
        wait(&flag, 2);
        thread.join().unwrap();
    });
}

#[test]
fn two_ranks_that_wait_for_different_rounds_both_wake_up() {
    check(|| {
        let flag = Arc::new(Flag::new());
        let waits = |sequence: u32| {
            let flag = flag.clone();
            thread::spawn(move || wait(&flag, sequence))
        };
        let threads = [waits(1), waits(2)];
        flag.raise(1);
        flag.raise(2);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn two_ranks_that_meet_twice_never_both_sleep() {
    check(|| {
        let flags = Arc::new([Flag::new(), Flag::new()]);
        let meet = |flags: &[Flag; 2], me: usize| {
            for round in 1..=2 {
                flags[me].raise(round);
                wait(&flags[1 - me], round);
            }
        };
        let other = flags.clone();
        let thread = thread::spawn(move || meet(&other, 1));
        meet(&flags, 0);
        thread.join().unwrap();
    });
}
