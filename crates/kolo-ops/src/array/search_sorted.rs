//! `LowerBound`, `UpperBound`: where in a sorted row a value would go, before or after those that are equal.

use half::{bf16, f16};
use kolo_core::{DType, Error, PartialShape, Result};
use kolo_device::cpu::looking;
use kolo_graph::{Gradient, HalfSafety, OpDef, Output};

use super::elements::integer_tensor;
use crate::math::number::Number;
use crate::op::{Gpu, KernelDef, Op, cpu_kernels};
use crate::{Cost, KernelCtx};

/// For each of `values` the number of elements in the same row of `sorted` that are smaller.
#[track_caller]
pub fn lower_bound<'g>(sorted: Output<'g>, values: Output<'g>) -> Output<'g> {
    sorted.graph().op("LowerBound").inputs([sorted, values]).out()
}

/// For each of `values` the number of elements in the same row of `sorted` that are not larger.
#[track_caller]
pub fn upper_bound<'g>(sorted: Output<'g>, values: Output<'g>) -> Output<'g> {
    sorted.graph().op("UpperBound").inputs([sorted, values]).out()
}

pub(crate) static LOWER_BOUND: Op = bound("LowerBound", LOWER);
pub(crate) static UPPER_BOUND: Op = bound("UpperBound", UPPER);

const fn bound(name: &'static str, kernels: &'static [KernelDef]) -> Op {
    Op {
        def: OpDef {
            name,
            signature: "(sorted_inputs:T, values:T) -> (output:out_type) ; T:type, out_type:type{int32,int64}=int32",
            shape: |ctx| {
                let (sorted, values) = (ctx.input_of_rank(0, 2)?, ctx.input_of_rank(1, 2)?);
                PartialShape::new(&[sorted.dim(0)]).merge(&PartialShape::new(&[values.dim(0)]))?;
                Ok(vec![values])
            },
            gradient: Gradient::None("places are whole numbers"),
            half: HalfSafety::Neutral,
            ..OpDef::BASE
        },
        kernels,
        gpu: Gpu::Missing,
        cost: Cost::Elements,
    }
}

fn search<T: Number>(ctx: &mut KernelCtx<'_>, is_before: impl Fn(T, T) -> bool) -> Result<()> {
    let (sorted, values) = (ctx.input(0)?, ctx.input(1)?);
    let (&[batch, n], &[other, m]) = (sorted.shape().dims(), values.shape().dims()) else {
        return Err(Error::invalid_argument(format!(
            "sorted_inputs and values must be matrices, found {} and {}",
            sorted.shape(),
            values.shape()
        )));
    };
    if batch != other {
        return Err(Error::invalid_argument(format!(
            "Leading dim_size of both tensors must match: {batch} and {other}"
        )));
    }
    let dtype: DType = ctx.attrs().dtype("out_type")?;
    let (rows, wanted) = (sorted.data::<T>()?, values.data::<T>()?);
    let mut places = ctx.list(wanted.len(), "places")?;
    for (i, &value) in looking(wanted.iter().enumerate()) {
        let row = &rows[i / m * n..][..n];
        places.push(row.partition_point(|&x| is_before(x, value)) as i64);
    }
    let out = integer_tensor(dtype, values.shape().clone(), places)?;
    ctx.set_output(0, out);
    Ok(())
}

fn lower<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    search::<T>(ctx, |x, value| x < value)
}

fn upper<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    search::<T>(ctx, |x, value| x <= value)
}

const LOWER: &[KernelDef] = cpu_kernels!(lower: f32, f64, f16, bf16, i8, i16, i32, i64, u8, u16, u32, u64);
const UPPER: &[KernelDef] = cpu_kernels!(upper: f32, f64, f16, bf16, i8, i16, i32, i64, u8, u16, u32, u64);

#[cfg(test)]
mod tests {
    use crate::testing::{check_op, tensor};

    #[test]
    fn places() {
        let case =
            |op: &str| check_op(op).input([[0i32, 3, 9, 9, 10], [1, 2, 3, 4, 5]]).input([[2i32, 4, 9], [0, 2, 6]]);
        case("LowerBound").gives([[1i32, 2, 2], [0, 1, 5]]);
        case("UpperBound").gives([[1i32, 2, 4], [0, 2, 5]]);
        check_op("UpperBound")
            .attr("out_type", kolo_core::DType::I64)
            .input([[1.0f32]])
            .input([[1.0f32]])
            .gives([[1i64]]);
        let none = check_op("LowerBound").input(tensor::<f32, 2>([1, 0], [])).input([[1.0f32, 2.0]]);
        none.gives([[0i32, 0]]);
        check_op("LowerBound").input([[1i32], [2]]).input([[1i32]]).fails("");
        check_op("LowerBound").input([1i32]).input([[1i32]]).fails("rank 2");
    }
}
