//! What arithmetic kernels ask of a number: wrapping integer arithmetic as TensorFlow's, and NaN kept by `max` and `min`.

use crate::math::elementwise::Computed;
use half::{bf16, f16};

/// A float or an integer.
pub trait Number: Computed + PartialOrd {
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
    /// The least value: −∞ for floats.
    const LOWEST: Self;
    /// The greatest value: ∞ for floats.
    const HIGHEST: Self;
    /// The least value that is not infinite.
    const LEAST_FINITE: Self;
    /// The greatest value that is not infinite.
    const GREATEST_FINITE: Self;
    /// `self + other`; integers wrap.
    fn add(self, other: Self) -> Self;
    /// `self − other`; integers wrap.
    fn sub(self, other: Self) -> Self;
    /// `self · other`; integers wrap.
    fn mul(self, other: Self) -> Self;
    /// `self / other`, towards zero for integers; an integer divided by 0 is 0.
    fn div(self, other: Self) -> Self;
    /// The larger one; NaN if one is NaN.
    fn max(self, other: Self) -> Self;
    /// The smaller one; NaN if one is NaN.
    fn min(self, other: Self) -> Self;
    /// A count as a number; wraps for small integers.
    fn from_count(n: usize) -> Self;
    /// As `f64`, rounded.
    fn to_f64(self) -> f64;
    /// From `f64`; integers are cut towards zero.
    fn from_f64(x: f64) -> Self;
    /// A key that is the smaller the larger the number is, the same for equal numbers, and largest for NaN. It is below 2³² if the
    /// type has at most four bytes.
    fn descending_key(self) -> u64;
}

macro_rules! integers {
    ($($ty:ty),*) => {
        $(impl Number for $ty {
            const ZERO: $ty = 0;
            const ONE: $ty = 1;
            const LOWEST: $ty = <$ty>::MIN;
            const HIGHEST: $ty = <$ty>::MAX;
            const LEAST_FINITE: $ty = <$ty>::MIN;
            const GREATEST_FINITE: $ty = <$ty>::MAX;
            #[inline(always)]
            fn add(self, other: $ty) -> $ty { self.wrapping_add(other) }
            #[inline(always)]
            fn sub(self, other: $ty) -> $ty { self.wrapping_sub(other) }
            #[inline(always)]
            fn mul(self, other: $ty) -> $ty { self.wrapping_mul(other) }
            #[inline(always)]
            fn div(self, other: $ty) -> $ty { if other == 0 { 0 } else { self.wrapping_div(other) } }
            #[inline(always)]
            fn max(self, other: $ty) -> $ty { Ord::max(self, other) }
            #[inline(always)]
            fn min(self, other: $ty) -> $ty { Ord::min(self, other) }
            #[inline(always)]
            fn from_count(n: usize) -> $ty { n as $ty }
            #[inline(always)]
            fn to_f64(self) -> f64 { self as f64 }
            #[inline(always)]
            fn from_f64(x: f64) -> $ty { x as $ty }
            #[inline(always)]
            fn descending_key(self) -> u64 { (<$ty>::MAX as u64).wrapping_sub(self as u64) }
        })*
    };
}

macro_rules! floats {
    ($($ty:ty, $one:expr, $to_f64:expr, $from_f64:expr;)*) => {
        $(impl Number for $ty {
            const ZERO: $ty = <$ty>::from_bits(0);
            const ONE: $ty = $one;
            const LOWEST: $ty = <$ty>::NEG_INFINITY;
            const HIGHEST: $ty = <$ty>::INFINITY;
            const LEAST_FINITE: $ty = <$ty>::MIN;
            const GREATEST_FINITE: $ty = <$ty>::MAX;
            #[inline(always)]
            fn add(self, other: $ty) -> $ty { self + other }
            #[inline(always)]
            fn sub(self, other: $ty) -> $ty { self - other }
            #[inline(always)]
            fn mul(self, other: $ty) -> $ty { self * other }
            #[inline(always)]
            fn div(self, other: $ty) -> $ty { self / other }
            #[inline(always)]
            fn max(self, other: $ty) -> $ty { if self.is_nan() || self > other { self } else { other } }
            #[inline(always)]
            fn min(self, other: $ty) -> $ty { if self.is_nan() || self < other { self } else { other } }
            #[inline(always)]
            fn from_count(n: usize) -> $ty { $from_f64(n as f64) }
            #[inline(always)]
            fn to_f64(self) -> f64 { $to_f64(self) }
            #[inline(always)]
            fn from_f64(x: f64) -> $ty { $from_f64(x) }
            #[inline(always)]
            fn descending_key(self) -> u64 {
                // −0 is equal to 0; the sum has no sign.
                let number = self + Self::ZERO;
                let bits = number.to_bits();
                let key = if number.is_nan() {
                    !0
                } else if number.is_sign_negative() {
                    bits
                } else {
                    let sign = !(!0 >> 1);
                    !(bits | sign)
                };
                key.into()
            }
        })*
    };
}

/// Leaves a value as it is.
#[inline(always)]
fn same<T>(x: T) -> T {
    x
}

#[inline(always)]
fn to_f32(x: f64) -> f32 {
    x as f32
}

integers!(i8, i16, i32, i64, u8, u16, u32, u64);
floats! {
    f32, 1.0, f64::from, to_f32;
    f64, 1.0, same, same;
    f16, f16::ONE, f16::to_f64, f16::from_f64;
    bf16, bf16::ONE, bf16::to_f64, bf16::from_f64;
}

/// `f32` or `f64`, in which kernels of all floats compute.
pub trait Real: Number + num_traits::Float + num_traits::FloatConst {
    /// The nearest whole number, the even one of two.
    fn round_even(self) -> Self;
}

impl Real for f32 {
    #[inline(always)]
    fn round_even(self) -> f32 {
        self.round_ties_even()
    }
}

impl Real for f64 {
    #[inline(always)]
    fn round_even(self) -> f64 {
        self.round_ties_even()
    }
}
