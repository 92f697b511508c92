//! A number in shared memory that one rank raises and others wait for: how ranks of one host tell each other how far they are.
//!
//! | field | written by | read by |
//! | --- | --- | --- |
//! | `sequence` | its owner, upwards only | every rank; a futex |
//! | `sleepers` | ranks that sleep, or are about to | the owner, after it has raised `sequence` |
//!
//! A rank that is about to sleep counts itself in `sleepers` and then looks at `sequence` again; the owner raises `sequence` and
//! then looks at `sleepers`. Both are sequentially consistent, so at least one of them sees the other: either the rank does not
//! sleep, or the owner wakes it. A rank that is killed while it sleeps leaves its count behind, which costs system calls, not
//! correctness. Numbers wrap around and are compared by their difference.
//!
//! `tests/shared_group_interleavings.rs` runs this file under loom, so it takes its primitives from `super::sync`.

use std::time::Duration;

use super::sync::{AtomicU32, SeqCst, futex_wait, futex_wake};

/// On two cache lines of its own, so that raising it disturbs nobody else: processors fetch lines in pairs.
#[repr(C, align(128))]
pub(super) struct Flag {
    sequence: AtomicU32,
    sleepers: AtomicU32,
}

impl Flag {
    /// At zero. Those of groups are mapped zeros.
    #[cfg(test)]
    pub fn new() -> Flag {
        Flag { sequence: AtomicU32::new(0), sleepers: AtomicU32::new(0) }
    }

    /// What it stands at.
    #[inline]
    pub fn sequence(&self) -> u32 {
        self.sequence.load(SeqCst)
    }

    /// Raises it, and wakes who sleeps. For its owner alone.
    #[inline]
    pub fn raise(&self, sequence: u32) {
        self.sequence.store(sequence, SeqCst);
        if self.sleepers.load(SeqCst) != 0 {
            futex_wake(&self.sequence);
        }
    }

    /// Sleeps until the flag has changed from what it was below `sequence`, or for `at_most`; returns at once if it has come so
    /// far. May also return for no reason.
    pub fn sleep_below(&self, sequence: u32, at_most: Duration) {
        self.sleepers.fetch_add(1, SeqCst);
        let found = self.sequence.load(SeqCst);
        if !reached(found, sequence) {
            futex_wait(&self.sequence, found, at_most);
        }
        self.sleepers.fetch_sub(1, SeqCst);
    }

    /// Wakes who sleeps, without raising it.
    pub fn wake(&self) {
        futex_wake(&self.sequence);
    }
}

/// Whether `found` is at `wanted` or past it, on numbers that wrap around.
#[inline]
pub(super) fn reached(found: u32, wanted: u32) -> bool {
    found.wrapping_sub(wanted) < 1 << 31
}
