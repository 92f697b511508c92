//! Random words into numbers: evenly from [0, 1), normal, and normal cut off at two standard deviations.
//!
//! The formulas are TensorFlow's to the last bit, and so is the place in the stream where each group of outputs begins.

use std::f64::consts::PI;

use half::{bf16, f16};
use kolo_core::Element;
use kolo_device::cpu::{IntraPool, pool, vectorize};

use crate::random::philox::{LANES, Philox, Words};
use crate::random::stream::RESERVED_PER_OUTPUT;

/// A way to turn random words into outputs, a group at a time.
pub trait Distribution: Sync {
    /// What comes out.
    type Output: Element;
    /// How many outputs are made from one group of words.
    const GROUP: usize;
    /// About what one output costs.
    const NS: f64;
    /// Groups of words from the start of one group of outputs to that of the next.
    const STRIDE: u64 = 1;

    /// The outputs for the words at `at`; the first [`Distribution::GROUP`] of the four are meant.
    fn group(&self, words: [u32; 4], at: Philox) -> [Self::Output; 4];
}

/// Fills `out` from position `start` of a stream.
pub fn fill<D: Distribution>(pool: &IntraPool, distribution: &D, start: Philox, out: &mut [D::Output]) {
    let chunk = pool::grain(D::NS);
    pool.for_each_chunk(out, chunk, |i, out| {
        let start = start.skip((i * (chunk / D::GROUP)) as u64 * D::STRIDE);
        vectorize(
            #[inline(always)]
            || fill_chunk(distribution, start, out),
        );
    });
}

#[inline(always)]
fn fill_chunk<D: Distribution>(distribution: &D, mut at: Philox, out: &mut [D::Output]) {
    if D::STRIDE != 1 {
        for out in out.chunks_mut(D::GROUP) {
            let values = distribution.group(at.words(), at);
            out.copy_from_slice(&values[..out.len()]);
            at = at.skip(D::STRIDE);
        }
        return;
    }
    for out in out.chunks_mut(D::GROUP * LANES) {
        let lanes = at.lanes();
        for (i, out) in out.chunks_mut(D::GROUP).enumerate() {
            let values = distribution.group(lanes.map(|lane| lane[i]), at);
            out.copy_from_slice(&values[..out.len()]);
        }
        at = at.skip(LANES as u64);
    }
}

/// Evenly from [0, 1).
pub struct Uniform<T>(pub std::marker::PhantomData<T>);

/// Normal with mean 0 and standard deviation 1, two at a time (Box and Muller, 1958).
pub struct Normal<T>(pub std::marker::PhantomData<T>);

/// The same, redrawn beyond two standard deviations.
pub struct Truncated<T>(pub std::marker::PhantomData<T>);

/// Numbers that a standard distribution can make.
pub trait Standard: Element {
    /// How many are made from four words.
    const GROUP: usize;
    /// Evenly from [0, 1): random digits below the point of a number in [1, 2), less 1.
    fn uniform(words: [u32; 4]) -> [Self; 4];
    /// Normal numbers; the first [`Standard::GROUP`] are meant.
    fn normal(words: [u32; 4]) -> [Self; 4];
    /// Normal numbers within two standard deviations.
    fn truncated(words: &mut Words) -> [Self; 4];
}

impl<T: Standard> Distribution for Uniform<T> {
    type Output = T;
    const GROUP: usize = T::GROUP;
    const NS: f64 = 1.0;
    #[inline(always)]
    fn group(&self, words: [u32; 4], _: Philox) -> [T; 4] {
        T::uniform(words)
    }
}

impl<T: Standard> Distribution for Normal<T> {
    type Output = T;
    const GROUP: usize = T::GROUP;
    const NS: f64 = 10.0;
    fn group(&self, words: [u32; 4], _: Philox) -> [T; 4] {
        T::normal(words)
    }
}

impl<T: Standard> Distribution for Truncated<T> {
    type Output = T;
    const GROUP: usize = T::GROUP;
    const NS: f64 = 15.0;
    const STRIDE: u64 = T::GROUP as u64 * RESERVED_PER_OUTPUT / 4;
    fn group(&self, _: [u32; 4], at: Philox) -> [T; 4] {
        T::truncated(&mut Words::new(at))
    }
}

/// Below this, the logarithm of a uniform number is cut off.
const LEAST: f64 = 1.0e-7;
/// Where the truncated normal distribution ends.
const CUT: f64 = 2.0;

fn uniform_f32(word: u32) -> f32 {
    f32::from_bits(127 << 23 | word & 0x007f_ffff) - 1.0
}

/// A double in [0, 1) from two words.
pub fn uniform_f64(high: u32, low: u32) -> f64 {
    f64::from_bits(1023 << 52 | u64::from(high & 0x000f_ffff) << 32 | u64::from(low)) - 1.0
}

fn normal_pair_f32(a: u32, b: u32) -> [f32; 2] {
    let radius = (-2.0 * uniform_f32(a).max(LEAST as f32).ln()).sqrt();
    // The product is rounded once, from double.
    let angle = (2.0 * PI * f64::from(uniform_f32(b))) as f32;
    [angle.sin() * radius, angle.cos() * radius]
}

fn normal_pair_f64(words: [u32; 4]) -> [f64; 2] {
    let [a, b, c, d] = words;
    let radius = (-2.0 * uniform_f64(a, b).max(LEAST).ln()).sqrt();
    let angle = 2.0 * PI * uniform_f64(c, d);
    [angle.sin() * radius, angle.cos() * radius]
}

impl Standard for f32 {
    const GROUP: usize = 4;
    #[inline(always)]
    fn uniform(words: [u32; 4]) -> [f32; 4] {
        words.map(uniform_f32)
    }
    fn normal(words: [u32; 4]) -> [f32; 4] {
        let ([a, b], [c, d]) = (normal_pair_f32(words[0], words[1]), normal_pair_f32(words[2], words[3]));
        [a, b, c, d]
    }
    fn truncated(words: &mut Words) -> [f32; 4] {
        let (mut values, mut n) = ([0.0; 4], 0);
        loop {
            let (first, second) = (words.draw(), words.draw());
            for value in normal_pair_f32(first, second) {
                if value.abs() < CUT as f32 {
                    values[n] = value;
                    n += 1;
                    if n == values.len() {
                        return values;
                    }
                }
            }
        }
    }
}

impl Standard for f64 {
    const GROUP: usize = 2;
    #[inline(always)]
    fn uniform([a, b, c, d]: [u32; 4]) -> [f64; 4] {
        [uniform_f64(a, b), uniform_f64(c, d), 0.0, 0.0]
    }
    fn normal(words: [u32; 4]) -> [f64; 4] {
        let [a, b] = normal_pair_f64(words);
        [a, b, 0.0, 0.0]
    }
    fn truncated(words: &mut Words) -> [f64; 4] {
        let (mut values, mut n) = ([0.0; 4], 0);
        loop {
            let words = [words.draw(), words.draw(), words.draw(), words.draw()];
            for value in normal_pair_f64(words) {
                if value.abs() < CUT {
                    values[n] = value;
                    n += 1;
                    if n == f64::GROUP {
                        return values;
                    }
                }
            }
        }
    }
}

macro_rules! narrow {
    ($ty:ident, $one:literal, $digits:literal) => {
        impl Standard for $ty {
            const GROUP: usize = 4;
            #[inline(always)]
            fn uniform(words: [u32; 4]) -> [$ty; 4] {
                words.map(|word| $ty::from_bits($one | word as u16 & $digits) - $ty::ONE)
            }
            fn normal(words: [u32; 4]) -> [$ty; 4] {
                f32::normal(words).map($ty::from_f32)
            }
            fn truncated(words: &mut Words) -> [$ty; 4] {
                f32::truncated(words).map($ty::from_f32)
            }
        }
    };
}

narrow!(f16, 0x3c00, 0x03ff);
narrow!(bf16, 0x3f80, 0x007f);
