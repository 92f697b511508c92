//! The stream of random words behind a stateful random op: one per kernel, going on from run to run.

use std::hash::{BuildHasher, RandomState};

use kolo_core::Result;
use parking_lot::Mutex;

use crate::KernelInit;
use crate::random::philox::Philox;

/// A stream from which each call reserves its own part.
pub struct Stream(Mutex<Philox>);

/// How many groups a call reserves for each output, so that redraws never reach the next call's part.
pub const RESERVED_PER_OUTPUT: u64 = 256;

impl Stream {
    /// The stream for a node with attributes `seed` and `seed2`; a different one each time if both are 0.
    pub fn new(init: &KernelInit<'_>) -> Result<Stream> {
        let (seed, seed2) = (init.attrs().int("seed")?, init.attrs().int("seed2")?);
        let philox = match (seed, seed2) {
            (0, 0) => {
                // The hasher's keys come from the operating system.
                let entropy = |salt: u8| RandomState::new().hash_one(salt);
                Philox::from_seeds(entropy(0), entropy(1))
            }
            _ => Philox::from_seeds(seed as u64, seed2 as u64),
        };
        Ok(Stream(Mutex::new(philox)))
    }

    /// Takes the next `n_groups` groups out of the stream and says where they begin.
    pub fn reserve(&self, n_groups: u64) -> Philox {
        let mut next = self.0.lock();
        let start = *next;
        *next = start.skip(n_groups);
        start
    }

    /// Takes what `n_outputs` outputs may need.
    pub fn reserve_outputs(&self, n_outputs: usize) -> Philox {
        self.reserve((n_outputs as u64).wrapping_mul(RESERVED_PER_OUTPUT))
    }
}
