//! Arithmetic on variables: the loop that changes a value in place, and the way from a dtype to its number type.

use half::{bf16, f16};
use kolo_core::Result;
use kolo_device::cpu::{IntraPool, pool};

use crate::math::elementwise::lanes;
use crate::math::number::Number;

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
