//! Which buffer of a rank a round uses, and when it may be written to again.
//!
//! A rank has four buffers, which rounds use in turn. In a round it reads what others have published in it and in the round before.
//! So a rank that has published round `r` is done with all rounds before `r - 1`, and once all ranks have published round `r - 2`,
//! nobody reads what was published in round `r - 4`: its buffer may be written to in round `r`. Ranks may thus be two rounds apart
//! before one of them has to wait.
//!
//! `tests/shared_group_interleavings.rs` runs this file under loom.

/// Buffers of a rank.
pub(super) const N_BUFFERS: u64 = 4;

/// The buffer that a round uses.
#[inline]
pub(super) fn buffer_of(round: u64) -> usize {
    (round % N_BUFFERS) as usize
}

/// What a rank's flag stands at once it has published a round. It wraps around.
#[inline]
pub(super) fn published(round: u64) -> u32 {
    (round + 1) as u32
}

/// What the flags of all ranks must have come to before a round's buffer is written to.
#[inline]
pub(super) fn before_writing(round: u64) -> Option<u32> {
    round.checked_sub(2).map(published)
}
