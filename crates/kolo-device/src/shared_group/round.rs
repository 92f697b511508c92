//! What a rank does in a round: it writes to a buffer of its own, publishes it, and reads those of the others.

use kolo_core::Result;

use super::ring::published;
use super::{SharedGroup, WaitLimits};

/// A round in which this rank has not published anything yet.
#[must_use = "a round that a rank does not publish keeps all others waiting"]
pub struct Round<'g> {
    group: &'g mut SharedGroup,
    round: u64,
}

impl<'g> Round<'g> {
    pub(super) fn new(group: &'g mut SharedGroup, round: u64) -> Round<'g> {
        Round { group, round }
    }

    /// What this rank is going to publish. It has whatever contents it had.
    pub fn buffer(&mut self) -> &mut [u8] {
        self.buffer_and_before().0
    }

    /// The same, and what others have published in the round before, if there was one.
    pub fn buffer_and_before(&mut self) -> (&mut [u8], Option<Published<'_>>) {
        let group = &*self.group;
        let start = group.buffer_start(group.rank, self.round);
        // SAFETY: it lies in the mapping, whose size `join` checked. Nobody else touches it: this rank has not published it in this
        // round, all ranks are done with the round that used it last (see `ring`), and the round before used another one. The group
        // is this round's alone.
        let buffer = unsafe { std::slice::from_raw_parts_mut(group.map.start().add(start), group.buffer_bytes) };
        (buffer, self.round.checked_sub(1).map(|round| Published { group, round }))
    }

    /// Publishes what this rank has written.
    pub fn publish(self) -> Meeting<'g> {
        self.group.flag(self.group.rank).raise(published(self.round));
        Meeting { group: self.group, round: self.round }
    }
}

/// A round in which this rank has published its buffer.
pub struct Meeting<'g> {
    group: &'g mut SharedGroup,
    round: u64,
}

impl Meeting<'_> {
    /// What all ranks publish in this round.
    pub fn published(&self) -> Published<'_> {
        Published { group: self.group, round: self.round }
    }

    /// What they have published in the round before, if there was one.
    pub fn before(&self) -> Option<Published<'_>> {
        self.round.checked_sub(1).map(|round| Published { group: self.group, round })
    }
}

/// The buffers of all ranks in a round.
#[derive(Clone, Copy)]
pub struct Published<'g> {
    group: &'g SharedGroup,
    round: u64,
}

impl<'g> Published<'g> {
    /// Waits for all ranks.
    pub fn wait_all(&self, limits: &WaitLimits<'_>) -> Result<()> {
        (0..self.group.n_ranks).try_for_each(|rank| self.wait(rank, limits))
    }

    /// Waits for a rank.
    pub fn wait(&self, rank: usize, limits: &WaitLimits<'_>) -> Result<()> {
        self.group.wait(rank, published(self.round), limits)
    }

    /// The buffer of a rank that was waited for.
    pub fn of(&self, rank: usize) -> Result<&'g [u8]> {
        self.group.published(rank, self.round)
    }
}
