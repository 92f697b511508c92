//! `Bincount`: how often each small number occurs, or the sum of the weights with which it does.

use kolo_core::{Error, PartialShape, Result, Shape};
use kolo_device::cpu::looking;
use kolo_graph::{Gradient, HalfSafety, OpDef, Output};

use crate::math::number::Number;
use crate::op::{Gpu, Op, cpu_kernels};
use crate::{Cost, KernelCtx};

/// For each number below `size`, the sum of the `weights` of its occurrences in `values`; the number of them if `weights`
/// is empty.
#[track_caller]
pub fn bincount<'g>(values: Output<'g>, size: Output<'g>, weights: Output<'g>) -> Output<'g> {
    values.graph().op("Bincount").inputs([values, size, weights]).out()
}

pub(crate) static BINCOUNT: Op = Op {
    def: OpDef {
        name: "Bincount",
        signature: "(arr:int32, size:int32, weights:T) -> (bins:T) ; T:type{int32,int64,float,double}",
        shape: |ctx| {
            let size = match ctx.constant_integers(1).as_deref() {
                Some([size]) => Some(to_size(*size)?),
                _ => None,
            };
            Ok(vec![PartialShape::new(&[size])])
        },
        gradient: Gradient::None("counting is piecewise constant"),
        half: HalfSafety::Wide,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(forward: i32, i64, f32, f64),
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

fn to_size(size: i64) -> Result<usize> {
    usize::try_from(size).map_err(|_| Error::invalid_argument(format!("size ({size}) must be non-negative")))
}

fn forward<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let size = to_size(i64::from(ctx.scalar::<i32>(1)?))?;
    let mut out = ctx.allocate_zeroed(T::DTYPE, Shape::new(&[size])?)?;
    let (values, weights) = (ctx.data::<i32>(0)?, ctx.data::<T>(2)?);
    if !weights.is_empty() && ctx.input(0)?.shape() != ctx.input(2)?.shape() {
        return Err(Error::invalid_argument(format!(
            "weights must be the same shape as arr or a length-0 `Tensor`, in which case it acts as all weights equal \
             to 1. Received {} and {}",
            ctx.input(2)?.shape(),
            ctx.input(0)?.shape()
        )));
    }
    let bins = out.data_mut::<T>()?;
    for (i, &value) in looking(values).enumerate() {
        let Ok(value) = usize::try_from(value) else {
            return Err(Error::invalid_argument("Input arr must be non-negative!"));
        };
        // What is not below the size is not counted.
        if let Some(bin) = bins.get_mut(value) {
            *bin = bin.add(weights.get(i).copied().unwrap_or(T::ONE));
        }
    }
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::testing::{check_op, tensor};

    #[test]
    fn counts() {
        let none = || tensor::<i32, 1>([0], []);
        check_op("Bincount").input([1i32, 2, 1, 7]).input(4i32).input(none()).gives([0i32, 2, 1, 0]);
        check_op("Bincount").input([1i32, 2, 1]).input(3i32).input([0.5f32, 1.0, 2.0]).gives([0.0f32, 2.5, 1.0]);
        check_op("Bincount").input(none()).input(2i32).input(none()).gives([0i32, 0]);
        check_op("Bincount").input([1i32]).input(0i32).input(none()).gives(none());
        check_op("Bincount").input([-1i32]).input(2i32).input(none()).fails("Input arr must be non-negative!");
        check_op("Bincount").input([1i32]).input(-2i32).input(none()).fails("must be non-negative");
        check_op("Bincount").input([1i32]).input(2i32).input([1i32, 2]).fails("must be the same shape");
    }
}
