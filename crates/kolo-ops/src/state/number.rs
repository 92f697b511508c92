//! Arithmetic on variables: one trait for all element types, and the loop that changes a value in place.

use half::{bf16, f16};
use kolo_core::{Element, Result};
use kolo_device::cpu::{IntraPool, pool};

use crate::math::elementwise::lanes;

/// Numbers with wrapping integer arithmetic, as TensorFlow's.
pub(crate) trait Number: Element {
    /// The sum.
    fn plus(self, other: Self) -> Self;
    /// The difference.
    fn minus(self, other: Self) -> Self;
    /// The product.
    fn times(self, other: Self) -> Self;
    /// The quotient, towards zero for integers; callers have refused integer divisors that are zero.
    fn over(self, other: Self) -> Self;
    /// The larger one.
    fn larger(self, other: Self) -> Self;
    /// The smaller one.
    fn smaller(self, other: Self) -> Self;
    /// Dividing by it is an error: an integer zero.
    fn cannot_divide(self) -> bool;
    /// The nearest number to `n`.
    fn of_count(n: u64) -> Self;
}

macro_rules! integers {
    ($($ty:ty),*) => {
        $(impl Number for $ty {
            #[inline(always)]
            fn plus(self, other: Self) -> Self { self.wrapping_add(other) }
            #[inline(always)]
            fn minus(self, other: Self) -> Self { self.wrapping_sub(other) }
            #[inline(always)]
            fn times(self, other: Self) -> Self { self.wrapping_mul(other) }
            // The only overflow, MIN / −1, wraps.
            #[inline(always)]
            fn over(self, other: Self) -> Self { self.checked_div(other).unwrap_or(self) }
            #[inline(always)]
            fn larger(self, other: Self) -> Self { self.max(other) }
            #[inline(always)]
            fn smaller(self, other: Self) -> Self { self.min(other) }
            #[inline(always)]
            fn cannot_divide(self) -> bool { self == 0 }
            fn of_count(n: u64) -> Self { n as $ty }
        })*
    };
}

macro_rules! floats {
    ($($ty:ty => $of:expr),*) => {
        $(impl Number for $ty {
            #[inline(always)]
            fn plus(self, other: Self) -> Self { self + other }
            #[inline(always)]
            fn minus(self, other: Self) -> Self { self - other }
            #[inline(always)]
            fn times(self, other: Self) -> Self { self * other }
            #[inline(always)]
            fn over(self, other: Self) -> Self { self / other }
            // NaN on either side gives NaN, as in NumPy.
            #[inline(always)]
            fn larger(self, other: Self) -> Self { if self.is_nan() || self > other { self } else { other } }
            #[inline(always)]
            fn smaller(self, other: Self) -> Self { if self.is_nan() || self < other { self } else { other } }
            #[inline(always)]
            fn cannot_divide(self) -> bool { false }
            fn of_count(n: u64) -> Self { $of(n) }
        })*
    };
}

integers!(i8, i16, i32, i64, u8, u16, u32, u64);
floats!(
    f32 => |n| n as f32,
    f64 => |n| n as f64,
    f16 => |n| f16::from_f64(n as f64),
    bf16 => |n| bf16::from_f64(n as f64)
);

/// About what one element costs; memory-bound loops.
const NS: f64 = 0.3;

/// Sets every `to[i]` to `f(to[i], from[i])`, over several threads if there is enough to do. The slices are equally long.
pub(crate) fn combine<T: Number>(pool: &IntraPool, to: &mut [T], from: &[T], f: impl Fn(T, T) -> T + Sync + Copy) {
    let chunk = pool::grain(NS);
    pool.for_each_chunk(to, chunk, |i, to| {
        let from = &from[i * chunk..i * chunk + to.len()];
        lanes::<T, _>(
            #[inline(always)]
            || {
                for (x, &y) in to.iter_mut().zip(from) {
                    *x = f(*x, y);
                }
            },
        );
    });
}

/// Code to run once the number type behind a dtype is known; see [`visit_number`].
pub(crate) trait NumberVisitor {
    /// What it returns.
    type Out;
    /// Called with the number type.
    fn visit<T: Number>(self) -> Result<Self::Out>;
}

/// Calls `visitor` with the Rust type of `dtype`; an error that names `what` if it is not a number.
pub(crate) fn visit_number<V: NumberVisitor>(dtype: kolo_core::DType, what: &str, visitor: V) -> Result<V::Out> {
    use kolo_core::DType::*;
    match dtype {
        F32 => visitor.visit::<f32>(),
        F64 => visitor.visit::<f64>(),
        F16 => visitor.visit::<f16>(),
        BF16 => visitor.visit::<bf16>(),
        I8 => visitor.visit::<i8>(),
        I16 => visitor.visit::<i16>(),
        I32 => visitor.visit::<i32>(),
        I64 => visitor.visit::<i64>(),
        U8 => visitor.visit::<u8>(),
        U16 => visitor.visit::<u16>(),
        U32 => visitor.visit::<u32>(),
        U64 => visitor.visit::<u64>(),
        Bool | Str | Resource | Variant | Complex64 | Complex128 | QI8 | QU8 | QI16 | QU16 | QI32 => {
            Err(kolo_core::Error::unimplemented(format!("{what} does not work on {dtype}")))
        }
    }
}
