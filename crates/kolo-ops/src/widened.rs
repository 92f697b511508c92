//! Kernels of rare types by way of a common one: inputs are widened, the kernel of the wide type runs, its outputs are narrowed.
//!
//! Halves are computed in `float` anyway, and integers that wrap have the same low bits however wide they are. So nothing is
//! lost, loops gain the vectors of the wide type, and there are fewer kernels to compile. Elementwise kernels do it block by
//! block (`math::elementwise::narrow`), the others with whole tensors, which takes memory while they run.

use half::{bf16, f16};
use kolo_core::{DType, Result};
use kolo_device::cpu::halves::{f16_to_f32, f32_to_f16};

use crate::array::cast::{Source, Target, convert, vectorized};
use crate::math::number::Number;
use crate::{KernelCtx, Value};

/// A type whose kernels may be those of a wider one, which holds all its values.
pub trait Narrow: Source + Target {
    /// The type to compute in.
    type Wide: Source + Target;

    /// Elements as wide ones.
    fn widen_all(from: &[Self], to: &mut [Self::Wide]) {
        vectorized(from, to);
    }

    /// Wide elements as the nearest narrow ones; integers wrap.
    fn narrow_all(from: &[Self::Wide], to: &mut [Self]) {
        vectorized(from, to);
    }
}

impl Narrow for f16 {
    type Wide = f32;

    fn widen_all(from: &[f16], to: &mut [f32]) {
        f16_to_f32(from, to);
    }

    fn narrow_all(from: &[f32], to: &mut [f16]) {
        f32_to_f16(from, to);
    }
}

macro_rules! narrow {
    ($($narrow:ty => $wide:ty),*) => {
        $(impl Narrow for $narrow {
            type Wide = $wide;
        })*
    };
}

narrow!(bf16 => f32, i8 => i32, i16 => i32, u8 => i32, u16 => i32, u32 => i64);

/// A kernel for a narrow type: `widened!(f16, forward)` by `forward::<f32>`, `widened!(u8 as i64, forward)` by `forward::<i64>`.
macro_rules! widened {
    ($narrow:ty, $function:ident) => {
        $crate::widened::widened!($narrow as <$narrow as $crate::widened::Narrow>::Wide, $function)
    };
    ($narrow:ty as $wide:ty, $function:ident) => {
        |ctx| $crate::widened::compute_in::<$narrow, $wide>(ctx, $function::<$wide>)
    };
}
pub(crate) use widened;

/// Computes a node whose elements are `T` with the kernel `compute` for elements of type `W`.
pub(crate) fn compute_in<T: Source + Target, W: Source + Target>(
    ctx: &mut KernelCtx<'_>,
    compute: fn(&mut KernelCtx<'_>) -> Result<()>,
) -> Result<()> {
    for i in 0..ctx.inputs.len() {
        if let Value::Tensor(tensor) = &ctx.inputs[i]
            && tensor.dtype() == T::DTYPE
        {
            ctx.inputs[i] = Value::Tensor(convert::<T, W>(ctx, tensor)?);
        }
    }
    compute(ctx)?;
    for (i, info) in ctx.node.outputs.iter().enumerate() {
        if info.dtype == T::DTYPE
            && let Value::Tensor(tensor) = &ctx.outputs[i]
            && tensor.dtype() == W::DTYPE
        {
            ctx.outputs[i] = Value::Tensor(convert::<W, T>(ctx, tensor)?);
        }
    }
    Ok(())
}

/// The least and the greatest finite value of elements that the node declares as `dtype`: `T`'s own, or those of a narrower type
/// that is computed in `T`.
pub(crate) fn finite_range<T: Number>(dtype: DType) -> (T, T) {
    fn range<N: Number, T: Number>() -> (T, T) {
        (T::from_f64(N::LEAST_FINITE.to_f64()), T::from_f64(N::GREATEST_FINITE.to_f64()))
    }
    match dtype {
        DType::F16 => range::<f16, T>(),
        DType::BF16 => range::<bf16, T>(),
        DType::I8 => range::<i8, T>(),
        DType::I16 => range::<i16, T>(),
        DType::U8 => range::<u8, T>(),
        DType::U16 => range::<u16, T>(),
        DType::U32 => range::<u32, T>(),
        _ => (T::LEAST_FINITE, T::GREATEST_FINITE),
    }
}

/// Brings the integers of output 0 into the range of the type that the node declares. For kernels that begin with an end of
/// their own range: where there was nothing to go on with, it would lose its meaning when it is narrowed.
pub(crate) fn keep_in_range<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let declared = ctx.node.outputs[0].dtype;
    if declared == T::DTYPE || !declared.is_integer() {
        return Ok(());
    }
    let (least, greatest) = finite_range::<T>(declared);
    if let Value::Tensor(tensor) = &mut ctx.outputs[0] {
        tensor.data_mut::<T>()?.iter_mut().for_each(|x| *x = x.max(least).min(greatest));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};
    use kolo_core::{DType, Tensor};

    use crate::math::number::Number;
    use crate::testing::{check_op, tensor};

    #[test]
    fn sums_wrap_and_means_do_not() {
        check_op("Sum").input([[200u8, 100], [3, 4]]).input([1i32]).gives([44u8, 7]);
        check_op("Prod").input([300i16, 300]).input([0i32]).gives(90_000i32 as i16);
        let many = Tensor::from(vec![u16::MAX; 70_000]);
        check_op("Mean").input(many).input([0i32]).gives(u16::MAX);
    }

    #[test]
    fn outputs_of_other_types_stay_as_they_are() {
        check_op("ArgMax").attr("output_type", DType::I32).input([3i16, 9, 1]).input(0i32).gives(1i32);
        check_op("ArgMax").attr("output_type", DType::I64).input([3u32, 9, 1]).input(0i32).gives(1i64);
        check_op("TopKV2")
            .input([3i16, 9, 1])
            .input(2i32)
            .gives_all([Tensor::from([9i16, 3]), Tensor::from([1i32, 0])]);
    }

    /// The largest and smallest of nothing are the ends of the type's own range.
    fn check_ends<T: Number>() {
        let nothing = || tensor::<T, 2>([2, 0], []);
        check_op("Max").input(nothing()).input([1i32]).gives([T::LOWEST, T::LOWEST]);
        check_op("Min").input(nothing()).input([1i32]).gives([T::HIGHEST, T::HIGHEST]);
        let (one, gap) = (|| tensor::<T, 1>([1], [T::ONE]), || tensor::<i32, 1>([1], [1]));
        check_op("UnsortedSegmentMax").input(one()).input(gap()).input(2i32).gives([T::LEAST_FINITE, T::ONE]);
        check_op("UnsortedSegmentMin").input(one()).input(gap()).input(2i32).gives([T::GREATEST_FINITE, T::ONE]);
    }

    /// Nothing is larger than what the search begins with, so that the first is found, as for floats.
    #[test]
    fn searches_begin_at_the_ends_of_the_narrow_type() {
        check_op("ArgMax").input([f16::NEG_INFINITY, f16::MIN]).input(0i32).gives(0i64);
        check_op("ArgMax").input([f16::NEG_INFINITY, f16::MIN, f16::ONE]).input(0i32).gives(2i64);
        check_op("ArgMin").input([bf16::INFINITY, bf16::MAX]).input(0i32).gives(0i64);
        check_op("ArgMax").input([f32::NEG_INFINITY, f32::MIN]).input(0i32).gives(0i64);
    }

    #[test]
    fn ends_of_the_range_are_those_of_the_narrow_type() {
        check_ends::<i8>();
        check_ends::<i16>();
        check_ends::<u8>();
        check_ends::<u16>();
        check_ends::<u32>();
        check_ends::<f16>();
        check_ends::<bf16>();
        check_ends::<i32>();
        check_ends::<f64>();
    }
}
