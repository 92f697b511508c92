//! How many bytes of gradients are exchanged at a time. A meeting of the ranks costs the same however much is exchanged in it, so small
//! buckets cost time; but what is in a bucket waits for the last gradient of it, so large ones leave more for the end.

use std::time::Instant;

use kolo_core::{Result, Tensor};

use super::{ReduceOp, World};

/// The most bytes of a bucket, unless it holds a single gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BucketSizes {
    /// Of the first one, which should begin early.
    pub first: usize,
    /// Of the others.
    pub others: usize,
}

/// What is measured.
const SAMPLE_BYTES: usize = 1 << 20;

impl BucketSizes {
    pub fn of(self, is_first: bool) -> usize {
        if is_first { self.first } else { self.others }
    }

    /// Sizes that are not far off on one machine, where they were not given.
    pub fn usual([first, others]: [Option<usize>; 2]) -> BucketSizes {
        BucketSizes { first: first.unwrap_or(256 << 10), others: others.unwrap_or(4 << 20) }
    }

    /// Sizes by what the link between the ranks costs, which is measured now, where they were not given. All ranks call it and get the
    /// same. What is summed does not depend on them.
    pub fn measured(world: &World, by_hand: [Option<usize>; 2]) -> BucketSizes {
        if world.size() == 1 || by_hand.iter().all(Option::is_some) {
            return BucketSizes::usual(by_hand);
        }
        match measure(world) {
            Ok([meeting, bytes_per_second]) => {
                let sizes = BucketSizes::for_link(meeting, bytes_per_second, world.exchanges_beside());
                let sizes = BucketSizes {
                    first: by_hand[0].unwrap_or(sizes.first),
                    others: by_hand[1].unwrap_or(sizes.others),
                };
                tracing::info!(
                    target: "kolo::train",
                    "gradients are exchanged in buckets of {} KiB, the first of {} KiB: a meeting of the ranks takes {:.0} us, and then \
                     {:.2} GB/s are exchanged",
                    sizes.others >> 10,
                    sizes.first >> 10,
                    meeting * 1e6,
                    bytes_per_second / 1e9
                );
                sizes
            }
            Err(error) => {
                // The next call of the world says so as well.
                tracing::warn!(target: "kolo::train", "the link between ranks could not be measured: {error}");
                BucketSizes::usual(by_hand)
            }
        }
    }

    /// Half of the time of the first bucket is the meeting, and a tenth of that of the others. Where nothing runs beside an exchange,
    /// only the meetings count.
    fn for_link(meeting: f64, bytes_per_second: f64, runs_beside: bool) -> BucketSizes {
        const LARGEST: usize = 32 << 20;
        if !runs_beside {
            return BucketSizes { first: LARGEST, others: LARGEST };
        }
        let balance = meeting * bytes_per_second;
        let within =
            |bytes: f64, least: usize, most: usize| (bytes as usize).clamp(least, most).next_multiple_of(16 << 10);
        BucketSizes { first: within(balance, 64 << 10, 1 << 20), others: within(9.0 * balance, 256 << 10, LARGEST) }
    }
}

/// The seconds that a meeting takes, and the bytes that are exchanged in each second after that, as rank 0 has found them.
fn measure(world: &World) -> Result<[f64; 2]> {
    let least = |n_bytes: usize, n_times: usize| -> Result<f64> {
        let mut least = f64::INFINITY;
        for _ in 0..n_times {
            let sample = Tensor::vector(vec![0.0f32; n_bytes / 4]);
            let began = Instant::now();
            world.all_reduce(vec![sample], ReduceOp::Sum)?;
            least = least.min(began.elapsed().as_secs_f64());
        }
        Ok(least)
    };
    // The first of each opens connections and touches memory.
    let (meeting, whole) = (least(4, 6)?, least(SAMPLE_BYTES, 4)?);
    let found = [meeting, SAMPLE_BYTES as f64 / (whole - meeting).max(1e-6)];
    let found = world.broadcast(vec![Tensor::from(found)], 0)?;
    let found = found[0].data::<f64>()?;
    Ok([found[0], found[1]])
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn sizes_follow_the_link() {
        let sizes = |meeting, rate| {
            let BucketSizes { first, others } = BucketSizes::for_link(meeting, rate, true);
            [first >> 10, others >> 10]
        };
        // 50 us and 10 Gbit/s; 5 ms and 100 Mbit/s; memory.
        assert_eq!(sizes(50e-6, 1.25e9), [64, 560]);
        assert_eq!(sizes(5e-3, 12.5e6), [64, 560]);
        assert_eq!(sizes(1e-3, 1.25e9), [1024, 10_992]);
        assert_eq!(sizes(1e-6, 3e9), [64, 256]);
        assert_eq!(BucketSizes::for_link(1e-6, 3e9, false).first, 32 << 20);
    }

    #[test]
    fn ranks_agree_on_what_rank_0_has_measured_and_hands_come_first() {
        let worlds = World::threads(3).unwrap();
        let found: Vec<[BucketSizes; 3]> = std::thread::scope(|scope| {
            let rank = |world: World| {
                let by_hand = [[None, None], [Some(7), None], [Some(7), Some(8)]];
                by_hand.map(|by_hand| BucketSizes::measured(&world, by_hand))
            };
            let threads: Vec<_> = worlds.into_iter().map(|world| scope.spawn(move || rank(world))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(found.iter().all(|one| *one == found[0]), "{found:?}");
        assert_eq!([found[0][1].first, found[0][2].first, found[0][2].others], [7, 7, 8]);
    }
}
