//! What arithmetic kernels ask of a number: wrapping integer arithmetic as TensorFlow's, NaN kept by `max` and `min`,
//! and a wider type to sum halves in.

use crate::math::elementwise::Computed;
use half::{bf16, f16};

/// A float or an integer.
pub trait Number: Computed + PartialOrd {
    /// What sums and products of many values are kept in: `f32` for halves, 64 bits for integers of 8 and 16, the type
    /// itself otherwise.
    type Wide: Number;
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
    /// As the wide type.
    fn widen(self) -> Self::Wide;
    /// Back from the wide type, rounded.
    fn narrow(wide: Self::Wide) -> Self;
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
    ($($ty:ty => $wide:ty),*) => {
        $(impl Number for $ty {
            type Wide = $wide;
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
            fn widen(self) -> $wide { self.into() }
            #[inline(always)]
            fn narrow(wide: $wide) -> $ty { wide as $ty }
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
    ($($ty:ty, $wide:ty, $one:expr, $widen:expr, $narrow:expr, $to_f64:expr, $from_f64:expr;)*) => {
        $(impl Number for $ty {
            type Wide = $wide;
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
            fn widen(self) -> $wide { $widen(self) }
            #[inline(always)]
            fn narrow(wide: $wide) -> $ty { $narrow(wide) }
            #[inline(always)]
            fn from_count(n: usize) -> $ty { $from_f64(n as f64) }
            #[inline(always)]
            fn to_f64(self) -> f64 { $to_f64(self) }
            #[inline(always)]
            fn from_f64(x: f64) -> $ty { $from_f64(x) }
            #[inline(always)]
            fn descending_key(self) -> u64 {
                // −0 is equal to 0; the sum has no sign.
                let wide = $widen(self) + 0.0;
                let bits = wide.to_bits();
                let key = if wide.is_nan() {
                    !0
                } else if wide.is_sign_negative() {
                    bits
                } else {
                    !(bits | <$wide>::to_bits(-0.0))
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

integers!(i8 => i64, i16 => i64, i32 => i32, i64 => i64, u8 => u64, u16 => u64, u32 => u32, u64 => u64);
floats! {
    f32, f32, 1.0, same, same, f64::from, to_f32;
    f64, f64, 1.0, same, same, same, same;
    f16, f32, f16::ONE, f16::to_f32, f16::from_f32, f16::to_f64, f16::from_f64;
    bf16, f32, bf16::ONE, bf16::to_f32, bf16::from_f32, bf16::to_f64, bf16::from_f64;
}

/// A float: one whose wide type has the functions of analysis.
pub trait Floating: Number<Wide: Real> {}

impl<T: Number<Wide: Real>> Floating for T {}

/// `f32` or `f64`, in which kernels of all floats compute.
pub trait Real: Number<Wide = Self> + num_traits::Float + num_traits::FloatConst {
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
