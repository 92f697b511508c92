//! Floats as the kernels of this area compute with them, with an exponential that loops can vectorise.

use crate::math::elementwise::Computed;

/// `f32` or `f64`.
pub trait Float: Computed + num_traits::Float + std::ops::AddAssign + std::iter::Sum {
    /// A number, rounded.
    fn of(value: f64) -> Self;
    /// `exp(x)`, without a call so that loops vectorise.
    fn exponential(self) -> Self;
}

impl Float for f32 {
    #[inline(always)]
    fn of(value: f64) -> f32 {
        value as f32
    }

    /// `2ⁿ · exp(r)` with |r| ≤ ln 2 / 2 and a polynomial for the latter; within 1.1 units in the last place.
    #[inline(always)]
    #[expect(clippy::excessive_precision, reason = "the coefficients as published in Cephes")]
    fn exponential(self) -> f32 {
        // Beyond these the result is 0 or infinite anyway. NaN fails both comparisons and stays.
        let x = if self > 89.0 { 89.0 } else { self };
        let x = if x < -104.0 { -104.0 } else { x };
        // Adding this number and taking it off again rounds to an integer, which is left in the low bits.
        const ROUND: f32 = 12_582_912.0;
        let shifted = x * std::f32::consts::LOG2_E + ROUND;
        let n = shifted - ROUND;
        let r = x - n * 0.693_359_375;
        let r = r - n * -2.121_944_4e-4;
        let mut p = 1.987_569_150_0e-4f32;
        for coefficient in [1.398_199_950_7e-3, 8.333_451_907_3e-3, 4.166_579_589_4e-2, 1.666_666_545_9e-1, 0.5] {
            p = p * r + coefficient;
        }
        let p = p * r * r + r + 1.0;
        // In two factors, since 2ⁿ alone may not be a normal number.
        let n = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
        let half = n >> 1;
        let power = |n: i32| f32::from_bits((n.wrapping_add(127) as u32) << 23);
        p * power(half) * power(n.wrapping_sub(half))
    }
}

impl Float for f64 {
    #[inline(always)]
    fn of(value: f64) -> f64 {
        value
    }
    #[inline(always)]
    fn exponential(self) -> f64 {
        self.exp()
    }
}

/// The sum of `f` over a run, in lanes that vectorise, so in an order that does not depend on the instruction set.
#[inline(always)]
pub fn sum_by<T: Copy, R: Float>(values: &[T], f: impl Fn(T) -> R) -> R {
    let mut lanes = [R::zero(); 16];
    let whole = values.chunks_exact(16);
    let rest = whole.remainder();
    for chunk in whole {
        lanes.iter_mut().zip(chunk).for_each(|(lane, &x)| *lane += f(x));
    }
    lanes.iter_mut().zip(rest).for_each(|(lane, &x)| *lane += f(x));
    lanes.into_iter().sum()
}

/// The largest value of a run; −∞ if it is empty.
#[inline(always)]
pub fn largest<T: Float>(values: &[T]) -> T {
    let lowest = T::neg_infinity();
    let larger = |a: T, b: T| if b > a { b } else { a };
    let mut lanes = [lowest; 16];
    let whole = values.chunks_exact(16);
    let rest = whole.remainder();
    for chunk in whole {
        lanes.iter_mut().zip(chunk).for_each(|(lane, &x)| *lane = larger(*lane, x));
    }
    lanes.iter_mut().zip(rest).for_each(|(lane, &x)| *lane = larger(*lane, x));
    lanes.into_iter().fold(lowest, larger)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exponential_is_exact_to_the_last_places() {
        for i in -1_000_000..=900_000i32 {
            let x = i as f32 * 1e-4;
            let (found, expected) = (x.exponential(), f64::from(x).exp());
            let unit = f64::from(f32::EPSILON) * expected.max(f64::from(f32::MIN_POSITIVE));
            assert!((f64::from(found) - expected).abs() <= 2.0 * unit || expected > f64::from(f32::MAX), "exp({x})");
        }
        assert_eq!(f32::NEG_INFINITY.exponential(), 0.0);
        assert_eq!(f32::INFINITY.exponential(), f32::INFINITY);
        assert_eq!(89.0f32.exponential(), f32::INFINITY);
        assert_eq!(0.0f32.exponential(), 1.0);
        assert!(f32::NAN.exponential().is_nan());
    }

    #[test]
    fn sums_take_every_value() {
        let values: Vec<f32> = (1..=100).map(|i| i as f32).collect();
        assert_eq!(sum_by(&values, |x| x), 5050.0);
        assert_eq!(largest(&values), 100.0);
        assert_eq!(largest::<f32>(&[]), f32::NEG_INFINITY);
    }
}
