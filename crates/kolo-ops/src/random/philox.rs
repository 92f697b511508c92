//! Philox4x32-10: random numbers from a counter and a key (Salmon et al., SC 2011).
//!
//! A generator is a position in a stream of groups of four 32-bit words. Any position can be reached at once, so threads
//! fill parts of a tensor independently, and the values do not depend on how many threads there are. Positions and keys
//! are TensorFlow's, so the same seeds give the same words.

/// A position in a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Philox {
    counter: u128,
    key: [u32; 2],
}

/// How many consecutive groups [`Philox::lanes`] computes side by side.
pub const LANES: usize = 8;

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

impl Philox {
    /// The stream that TensorFlow's stateful ops draw from: `seed` is the key, `seed2` the upper half of the counter.
    pub fn from_seeds(seed: u64, seed2: u64) -> Philox {
        Philox { counter: u128::from(seed2) << 64, key: [seed as u32, (seed >> 32) as u32] }
    }

    /// The stream that TensorFlow's stateless ops draw from: both seeds are scrambled into key and counter.
    pub fn from_stateless_seeds(seeds: [u64; 2]) -> Philox {
        let counter = u128::from(seeds[0]) | u128::from(seeds[1]) << 64;
        let [a, b, c, d] = Philox { counter, key: [0x3ec8_f720, 0x0246_1e29] }.words();
        Philox { counter: (u128::from(c) | u128::from(d) << 32) << 64, key: [a, b] }
    }

    /// The counter and the key, for generators elsewhere.
    pub fn parts(self) -> (u128, [u32; 2]) {
        (self.counter, self.key)
    }

    /// The position `n_groups` further on.
    #[must_use]
    pub fn skip(self, n_groups: u64) -> Philox {
        Philox { counter: self.counter.wrapping_add(u128::from(n_groups)), key: self.key }
    }

    /// The four words at this position.
    pub fn words(self) -> [u32; 4] {
        self.side_by_side::<1>().map(|[word]| word)
    }

    /// The words at this position and the `LANES - 1` after it: `lanes()[w][i]` is word `w` of group `i`.
    #[inline(always)]
    pub fn lanes(self) -> [[u32; LANES]; 4] {
        self.side_by_side::<LANES>()
    }

    /// Runs the rounds on `N` counters at once, in loops that become vector instructions.
    #[inline(always)]
    fn side_by_side<const N: usize>(self) -> [[u32; N]; 4] {
        let mut words = [[0u32; N]; 4];
        for i in 0..N {
            let counter = self.counter.wrapping_add(i as u128);
            for (w, lane) in words.iter_mut().enumerate() {
                lane[i] = (counter >> (32 * w)) as u32;
            }
        }
        let mut key = self.key;
        for _ in 0..ROUNDS {
            let [mut a, mut b, mut c, mut d] = words;
            for i in 0..N {
                let first = u64::from(MULTIPLIERS[0]) * u64::from(a[i]);
                let second = u64::from(MULTIPLIERS[1]) * u64::from(c[i]);
                a[i] = (second >> 32) as u32 ^ b[i] ^ key[0];
                c[i] = (first >> 32) as u32 ^ d[i] ^ key[1];
                b[i] = second as u32;
                d[i] = first as u32;
            }
            words = [a, b, c, d];
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        words
    }
}

/// The words of a stream one by one, for draws that need a number of them that is not known before.
pub struct Words {
    at: Philox,
    group: [u32; 4],
    used: usize,
}

impl Words {
    /// From position `at` on.
    pub fn new(at: Philox) -> Words {
        Words { at: at.skip(1), group: at.words(), used: 0 }
    }

    /// The next word.
    pub fn draw(&mut self) -> u32 {
        if self.used == self.group.len() {
            self.group = self.at.words();
            self.at = self.at.skip(1);
            self.used = 0;
        }
        self.used += 1;
        self.group[self.used - 1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_vectors() {
        // From the known-answer file of the authors' Random123 library.
        let check = |counter: [u32; 4], key: [u32; 2], expected: [u32; 4]| {
            let counter = counter.iter().rev().fold(0u128, |all, &word| all << 32 | u128::from(word));
            assert_eq!(Philox { counter, key }.words(), expected);
        };
        check([0; 4], [0; 2], [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        check([u32::MAX; 4], [u32::MAX; 2], [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]);
        check(
            [0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344],
            [0xa4093822, 0x299f31d0],
            [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1],
        );
    }

    #[test]
    fn lanes_are_consecutive_groups_even_across_a_carry() {
        let start = Philox { counter: u128::from(u64::MAX) - 3, key: [1, 2] };
        let lanes = start.lanes();
        for i in 0..LANES {
            assert_eq!(lanes.map(|lane| lane[i]), start.skip(i as u64).words());
        }
    }

    #[test]
    fn words_come_in_order() {
        let start = Philox::from_seeds(7, 9);
        let mut words = Words::new(start);
        let drawn: Vec<u32> = (0..8).map(|_| words.draw()).collect();
        assert_eq!(drawn, [start.words(), start.skip(1).words()].concat());
    }
}
