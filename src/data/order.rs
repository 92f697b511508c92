//! In which order samples come: permutations by seed and epoch, and the share of each worker.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use kolo_core::{Error, Result};

/// Where a reader of batches is: everything before it was handed out, nothing after it was. Saved with a checkpoint and
/// given to [`Batches::restore`](super::Batches::restore), it makes a resumed job see the batches that it would have seen.
///
/// As text it is `epoch 2, sample 300, seed 7`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Position {
    /// The epoch, from 0.
    pub epoch: u64,
    /// How many samples of this epoch and this worker's share were handed out.
    pub sample: u64,
    /// The seed that orders the epochs; 0 if they are not shuffled.
    pub seed: u64,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "epoch {}, sample {}, seed {}", self.epoch, self.sample, self.seed)
    }
}

impl FromStr for Position {
    type Err = Error;

    fn from_str(text: &str) -> Result<Position> {
        let wrong =
            || Error::invalid_argument(format!("'{text}' is not a position such as 'epoch 2, sample 300, seed 7'"));
        let mut numbers = [0; 3];
        let mut parts = text.split(", ");
        for (number, word) in numbers.iter_mut().zip(["epoch ", "sample ", "seed "]) {
            let part = parts.next().and_then(|part| part.strip_prefix(word)).ok_or_else(wrong)?;
            *number = part.parse().map_err(|_| wrong())?;
        }
        match parts.next() {
            None => Ok(Position { epoch: numbers[0], sample: numbers[1], seed: numbers[2] }),
            Some(_) => Err(wrong()),
        }
    }
}

/// One worker's share of every epoch: in the order of the epoch, samples `worker`, `worker + n_workers`, and so on. The
/// shares of all workers together are the epoch, each sample once, whatever the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Shard {
    /// Which worker, from 0.
    pub worker: u32,
    /// Of how many.
    pub n_workers: u32,
}

impl Shard {
    /// Everything.
    pub const WHOLE: Shard = Shard { worker: 0, n_workers: 1 };

    /// The share of worker `worker` of `n_workers`.
    pub fn new(worker: usize, n_workers: usize) -> Result<Shard> {
        match (u32::try_from(worker), u32::try_from(n_workers)) {
            (Ok(worker), Ok(n_workers)) if worker < n_workers => Ok(Shard { worker, n_workers }),
            _ => Err(Error::invalid_argument(format!(
                "there is no worker {worker} among {n_workers}; workers are counted from 0"
            ))),
        }
    }

    /// How many of `n` samples are its own.
    pub fn len(self, n: usize) -> usize {
        n.saturating_sub(self.worker as usize).div_ceil(self.n_workers as usize)
    }

    /// True if none of `n` samples are its own.
    pub fn is_empty(self, n: usize) -> bool {
        self.len(n) == 0
    }

    /// The place in the epoch's order of its sample number `i`.
    pub fn place(self, i: usize) -> usize {
        self.worker as usize + i * self.n_workers as usize
    }

    /// True if place `place` of the epoch's order is its own.
    pub fn owns(self, place: u64) -> bool {
        place % u64::from(self.n_workers) == u64::from(self.worker)
    }
}

/// One rank's rows of every batch, which are next to each other. The rows of all ranks are the batch, each once, and those of
/// rank `r` of `n` are those of ranks `2r` and `2r + 1` of `2n`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slice {
    rank: usize,
    n_ranks: usize,
}

impl Slice {
    /// All rows.
    pub const WHOLE: Slice = Slice { rank: 0, n_ranks: 1 };

    pub fn new(rank: usize, n_ranks: usize) -> Result<Slice> {
        match rank < n_ranks {
            true => Ok(Slice { rank, n_ranks }),
            false => Err(Error::invalid_argument(format!("there is no rank {rank} among {n_ranks}"))),
        }
    }

    /// Its rows of a batch of `n`.
    pub fn of(self, n: usize) -> Range<usize> {
        let start = |rank: usize| (n as u128 * rank as u128 / self.n_ranks as u128) as usize;
        start(self.rank)..start(self.rank + 1)
    }
}

/// The samples `0..n` in the order of this epoch.
pub(crate) fn permutation(seed: u64, epoch: u64, n: u32) -> Vec<u32> {
    let mut random = Random::new(seed, epoch);
    let mut order: Vec<u32> = (0..n).collect();
    for i in (1..n).rev() {
        order.swap(i as usize, random.below(u64::from(i) + 1) as usize);
    }
    order
}

/// SplitMix64: small, fast, and the same numbers everywhere for ever, which resuming needs.
pub(crate) struct Random(u64);

impl Random {
    /// The numbers of one epoch.
    pub(crate) fn new(seed: u64, epoch: u64) -> Random {
        let mut random = Random(seed ^ 0x6b6f_6c6f_6461_7461);
        let stream = random.next();
        Random(stream ^ epoch.wrapping_mul(0xd134_2543_de82_ef95))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number from 0 up to, not including, 1.
    pub(crate) fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// A number below `bound`, all equally likely (Lemire's method: the few that would favour some are drawn again).
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        loop {
            let wide = u128::from(self.next()) * u128::from(bound);
            let low = wide as u64;
            if low >= bound || low >= bound.wrapping_neg() % bound.max(1) {
                return (wide >> 64) as u64;
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_numbers_are_splitmix64() {
        // The first values for seed 1234567, from the reference implementation.
        let mut random = Random(1_234_567);
        let expected = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        assert_eq!([random.next(), random.next(), random.next()], expected);
    }

    #[test]
    fn every_place_is_equally_likely() {
        let mut counts = [[0u32; 5]; 5];
        for epoch in 0..5000 {
            for (place, &sample) in permutation(3, epoch, 5).iter().enumerate() {
                counts[place][sample as usize] += 1;
            }
        }
        // 1000 each, with a standard deviation of 28.
        assert!(counts.as_flattened().iter().all(|count| (850..1150).contains(count)), "{counts:?}");
    }

    #[test]
    fn positions_are_written_and_read() {
        let position = Position { epoch: 2, sample: 300, seed: u64::MAX };
        assert_eq!(position.to_string().parse(), Ok(position));
        for wrong in ["", "epoch 2", "epoch 2, sample x, seed 1", "epoch 2, sample 3, seed 1, x"] {
            assert!(wrong.parse::<Position>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn ranks_have_neighbouring_rows_of_a_batch() {
        let rows = |n: usize, n_ranks: usize| -> Vec<Range<usize>> {
            (0..n_ranks).map(|rank| Slice::new(rank, n_ranks).unwrap().of(n)).collect()
        };
        assert_eq!(rows(8, 4), [0..2, 2..4, 4..6, 6..8]);
        assert_eq!(rows(5, 2), [0..2, 2..5]);
        assert_eq!(rows(1, 3), [0..0, 0..0, 0..1]);
        assert_eq!(Slice::WHOLE.of(3), 0..3);
        assert!(Slice::new(2, 2).is_err());
    }

    #[test]
    fn a_worker_that_is_not_there_has_no_share() {
        assert!(Shard::new(2, 2).is_err());
        assert!(Shard::new(0, 0).is_err());
        assert!(Shard::new(0, usize::MAX).is_err());
        assert_eq!(Shard::new(2, 3).unwrap().len(2), 0);
    }

    proptest! {
        #[test]
        fn an_epoch_is_a_permutation_and_shares_are_a_partition(seed: u64, epoch: u64, n in 0u32..500, n_workers in 1usize..20) {
            let order = permutation(seed, epoch, n);
            prop_assert_eq!(&order, &permutation(seed, epoch, n));
            let mut seen = vec![0; n as usize];
            for worker in 0..n_workers {
                let shard = Shard::new(worker, n_workers).unwrap();
                for i in 0..shard.len(n as usize) {
                    prop_assert!(shard.owns(shard.place(i) as u64));
                    seen[order[shard.place(i)] as usize] += 1;
                }
            }
            prop_assert!(seen.iter().all(|&count| count == 1));
        }
    }
}
