//! Drawing a class by its weight: [`Alias`], for weights that stay (Walker, 1977), and [`Picker`], for counts that grow.

use kolo_core::{Error, Result};

use super::candidates::uniform_word;
use crate::memory::{filled, room};
use crate::random::philox::Words;

/// Weights that stay: each class has a part of its own place, and leaves the rest to another.
pub(super) struct Alias {
    weights: Vec<f32>,
    total: f32,
    /// For each place, the part that is its own, and whose the rest is.
    places: Vec<(f32, i64)>,
}

impl Alias {
    pub fn new(weights: Vec<f32>) -> Result<Alias> {
        let n = weights.len();
        u32::try_from(n).map_err(|_| Error::invalid_argument(format!("{n} weights are too many")))?;
        let sum: f64 = weights.iter().map(|&weight| f64::from(weight)).sum();
        if weights.iter().any(|&weight| weight.is_nan() || weight < 0.0)
            || sum.is_nan()
            || sum <= 0.0
            || sum.is_infinite()
        {
            return Err(Error::invalid_argument("weights must be non-negative numbers, and not all of them 0"));
        }
        // In TensorFlow's order and precision, since they decide which class a number stands for.
        let mut parts: Vec<f64> = room(n, "weights")?;
        parts.extend(weights.iter().map(|&weight| f64::from(weight * n as f32) / sum));
        let mut others = filled(n, -1i64, "weights")?;
        let (mut low, mut high): (Vec<usize>, Vec<usize>) = (0..n).partition(|&i| parts[i] < 1.0);
        while !high.is_empty() && !low.is_empty() {
            let (Some(l), Some(h)) = (low.pop(), high.pop()) else { break };
            others[l] = h as i64;
            parts[h] -= 1.0 - parts[l];
            if parts[h] < 1.0 { low.push(h) } else { high.push(h) }
        }
        // What is left is 1 but for rounding.
        for i in low.into_iter().chain(high) {
            (parts[i], others[i]) = (1.0, i as i64);
        }
        let places = parts.into_iter().map(|part| part as f32).zip(others).collect();
        let total = weights.iter().sum();
        Ok(Alias { weights, total, places })
    }

    pub fn draw(&self, words: &mut Words) -> i64 {
        // The part before the place, as TensorFlow draws them.
        let within = f32::from_bits(127 << 23 | words.draw() & 0x7f_ffff) - 1.0;
        let place = uniform_word(words, self.places.len() as u32) as usize;
        let (own, other) = self.places[place];
        if within < own { place as i64 } else { other }
    }

    pub fn probability(&self, class: i64) -> f32 {
        usize::try_from(class).ok().and_then(|at| self.weights.get(at)).map_or(0.0, |weight| weight / self.total)
    }
}

/// Counts that grow, each of which begins with 1: sums over ever larger stretches, so that one is found in few steps.
pub(super) struct Picker {
    range: usize,
    /// A Fenwick tree: place `i`, counted from 1, has the sum of as many classes up to it as its lowest bit says.
    sums: Vec<u32>,
    weights: Vec<u32>,
    total: u32,
}

impl Picker {
    pub fn new(range: usize) -> Result<Picker> {
        let total = i32::try_from(range)
            .map_err(|_| Error::invalid_argument(format!("range_max must be below 2147483648, found {range}")))?;
        let mut sums = filled(range + 1, 0u32, "counts of classes")?;
        for (i, sum) in sums.iter_mut().enumerate().skip(1) {
            *sum = 1 << i.trailing_zeros();
        }
        Ok(Picker { range, sums, weights: filled(range, 1, "counts of classes")?, total: total as u32 })
    }

    pub fn total(&self) -> u32 {
        self.total
    }

    pub fn weight(&self, class: i64) -> u32 {
        usize::try_from(class).ok().and_then(|at| self.weights.get(at)).copied().unwrap_or(0)
    }

    /// The class in whose stretch `place` is, if the classes lie side by side, as long as their weights.
    pub fn at(&self, place: u32) -> i64 {
        let (mut before, mut left) = (0usize, place);
        let mut step = self.range.checked_ilog2().map_or(0, |bits| 1usize << bits);
        while step > 0 {
            let next = before + step;
            if next <= self.range && self.sums[next] <= left {
                left -= self.sums[next];
                before = next;
            }
            step /= 2;
        }
        before as i64
    }

    /// Counts a class once more, until the total is the largest that TensorFlow counts to.
    pub fn add(&mut self, class: i64) {
        let Some(at) = usize::try_from(class).ok().filter(|&at| at < self.range) else { return };
        if self.total >= i32::MAX as u32 {
            return;
        }
        self.weights[at] += 1;
        self.total += 1;
        let mut i = at + 1;
        while i <= self.range {
            self.sums[i] += 1;
            i += i & i.wrapping_neg();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_belong_to_classes_by_their_counts() {
        let mut picker = Picker::new(5).unwrap();
        for class in [2, 2, 4, 0] {
            picker.add(class);
        }
        let found: Vec<i64> = (0..picker.total()).map(|place| picker.at(place)).collect();
        assert_eq!(found, [0, 0, 1, 2, 2, 2, 3, 4, 4]);
        assert_eq!([0, 1, 2, 3, 4].map(|class| picker.weight(class)), [2, 1, 3, 1, 2]);
    }

    #[test]
    fn parts_of_places_add_up_to_the_weights() {
        let weights = vec![1.0f32, 5.0, 0.0, 2.0];
        let alias = Alias::new(weights.clone()).unwrap();
        let mut found = [0.0f32; 4];
        for (i, &(own, other)) in alias.places.iter().enumerate() {
            found[i] += own * 2.0;
            found[other as usize] += (1.0 - own) * 2.0;
        }
        assert_eq!(found.to_vec(), weights);
        assert!(Alias::new(vec![0.0, 0.0]).is_err());
        assert!(Alias::new(vec![1.0, -1.0]).is_err());
    }
}
