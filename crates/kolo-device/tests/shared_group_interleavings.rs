//! The flags of groups in shared memory under [loom](https://docs.rs/loom): no interleaving loses a wake-up, and no buffer is written
//! while it is read. It compiles `flag.rs` and `ring.rs` a second time, with loom's primitives in `sync`.

#[path = "../src/shared_group/flag.rs"]
#[allow(dead_code, reason = "the models do not call all of it")]
mod flag;

#[path = "../src/shared_group/ring.rs"]
mod ring;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use std::time::Duration;

use flag::{Flag, reached};
use ring::{N_BUFFERS, before_writing, buffer_of, published};

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

/// A rank's flag and what it publishes. Loom reports a buffer that is written while it is read.
struct Rank {
    flag: Flag,
    buffers: [UnsafeCell<u64>; N_BUFFERS as usize],
}

impl Rank {
    fn new() -> Rank {
        Rank { flag: Flag::new(), buffers: std::array::from_fn(|_| UnsafeCell::new(u64::MAX)) }
    }

    fn write(&self, round: u64) {
        self.buffers[buffer_of(round)].with_mut(|buffer| {
            // SAFETY: loom looks after that.
            unsafe { *buffer = round }
        });
    }

    fn read(&self, round: u64) {
        self.buffers[buffer_of(round)].with(|buffer| {
            // SAFETY: loom looks after that.
            assert_eq!(unsafe { *buffer }, round);
        });
    }
}

#[test]
fn a_buffer_is_read_in_its_round_and_the_next_and_not_overwritten_before() {
    check(|| {
        let ranks = Arc::new([Rank::new(), Rank::new()]);
        // As an all-reduce in pieces: the round before is waited for where this one is filled, and read again when it is published.
        let meet = |ranks: &[Rank; 2], me: usize| {
            let (own, other) = (&ranks[me], &ranks[1 - me]);
            for round in 0..N_BUFFERS + 2 {
                before_writing(round).into_iter().for_each(|sequence| wait(&other.flag, sequence));
                if let Some(before) = round.checked_sub(1) {
                    wait(&other.flag, published(before));
                    other.read(before);
                }
                own.write(round);
                own.flag.raise(published(round));
                round.checked_sub(1).into_iter().for_each(|before| other.read(before));
            }
        };
        let others = ranks.clone();
        let thread = thread::spawn(move || meet(&others, 1));
        meet(&ranks, 0);
        thread.join().unwrap();
    });
}

#[test]
fn a_rank_that_only_reads_now_and_then_holds_up_who_writes() {
    check(|| {
        let rank = Arc::new((Rank::new(), Flag::new()));
        let writer = rank.clone();
        // The reader publishes nothing but that it goes on, as in a broadcast.
        let thread = thread::spawn(move || {
            for round in 0..N_BUFFERS + 2 {
                before_writing(round).into_iter().for_each(|sequence| wait(&writer.1, sequence));
                writer.0.write(round);
                writer.0.flag.raise(published(round));
            }
        });
        for round in 0..N_BUFFERS + 2 {
            rank.1.raise(published(round));
            wait(&rank.0.flag, published(round));
            rank.0.read(round);
            round.checked_sub(1).into_iter().for_each(|before| rank.0.read(before));
        }
        thread.join().unwrap();
    });
}
