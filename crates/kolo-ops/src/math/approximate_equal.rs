//! `ApproximateEqual`: whether two numbers differ by less than a tolerance.

use half::{bf16, f16};
use kolo_core::{DType, Error, Result};
use kolo_graph::{Gradient, HalfSafety, OpDef, Output, shape_fns};

use crate::math::elementwise::zip;
use crate::math::number::Number;
use crate::op::{Gpu, KernelDef, Op, cpu_kernels};
use crate::{Cost, KernelCtx, Value};

/// Whether elements of `x` and `y`, which have the same shape, differ by less than `tolerance`.
#[track_caller]
pub fn approximate_equal<'g>(x: Output<'g>, y: Output<'g>, tolerance: f32) -> Output<'g> {
    x.graph().op("ApproximateEqual").inputs([x, y]).attr("tolerance", tolerance).out()
}

pub(crate) static APPROXIMATE_EQUAL: Op = Op {
    def: OpDef {
        name: "ApproximateEqual",
        signature: "(x:T, y:T) -> (z:bool) ; T:type{num}, tolerance:float=0.00001",
        shape: shape_fns::all_same,
        gradient: Gradient::None("a comparison is piecewise constant"),
        half: HalfSafety::Wide,
        ..OpDef::BASE
    },
    kernels: KERNELS,
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

fn forward<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (a, b) = (ctx.input(0)?.shape(), ctx.input(1)?.shape());
    if a != b {
        return Err(Error::invalid_argument(format!("x and y must be of the same shape. x shape: {a}. y shape: {b}")));
    }
    // In the type of the elements, so 0 for whole numbers unless it is at least 1.
    let tolerance = T::from_f64(f64::from(ctx.attrs().float("tolerance")?));
    zip::<T, u8>(ctx, 0.5, |x, y| {
        let difference = x.sub(y);
        let distance = if difference < T::ZERO { T::ZERO.sub(difference) } else { difference };
        u8::from(distance < tolerance)
    })?;
    if let Value::Tensor(bytes) = ctx.outputs[0].take() {
        ctx.set_output(0, bytes.bitcast(DType::Bool)?);
    }
    Ok(())
}

const KERNELS: &[KernelDef] = cpu_kernels!(forward: f32, f64, f16, bf16, i8, i16, i32, i64, u8, u16, u32, u64);

#[cfg(test)]
mod tests {
    use crate::testing::check_op;

    #[test]
    fn distances() {
        let case = |tolerance: f32| check_op("ApproximateEqual").attr("tolerance", tolerance);
        case(0.5)
            .input([1.0f32, 1.0, 1.0, f32::NAN])
            .input([1.25f32, 1.5, 0.75, 1.0])
            .gives([true, false, true, false]);
        case(2.0).input([1i32, 5]).input([2i32, 3]).gives([true, false]);
        case(0.5).input([1.0f32]).input([1.0f32, 2.0]).fails("");
    }
}
