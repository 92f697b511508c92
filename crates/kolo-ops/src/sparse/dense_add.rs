//! `SparseTensorDenseAdd`: a sparse tensor added to a dense one.

use half::{bf16, f16};
use kolo_core::{Error, Result, Shape};
use kolo_device::cpu::looking;
use kolo_graph::{Gradient, OpDef, Output};

use super::reorder::sizes;
use super::to_dense::positions;
use crate::array::gather_nd::gather_nd;
use crate::math::binary::first;
use crate::math::number::Number;
use crate::op::{Gpu, Op, cpu_kernels};
use crate::{Cost, KernelCtx};

/// The sum of a sparse tensor, given by coordinates, values and shape, and of `b`, which has the same shape.
#[track_caller]
pub fn sparse_dense_add<'g>(indices: Output<'g>, values: Output<'g>, shape: Output<'g>, b: Output<'g>) -> Output<'g> {
    indices.graph().op("SparseTensorDenseAdd").inputs([indices, values, shape, b]).out()
}

pub(crate) static SPARSE_TENSOR_DENSE_ADD: Op = Op {
    def: OpDef {
        name: "SparseTensorDenseAdd",
        signature: "(a_indices:Tindices, a_values:T, a_shape:Tindices, b:T) -> (output:T) ; T:type{num}, \
                    Tindices:type{int32,int64}",
        shape: |ctx| {
            ctx.input_of_rank(0, 2)?;
            ctx.input_of_rank(1, 1)?;
            ctx.input_of_rank(2, 1)?;
            Ok(vec![ctx.input(3).clone()])
        },
        gradient: Gradient::Rule(|op, dy| {
            let dy = first(dy)?;
            Ok(vec![None, Some(gather_nd(dy, op.input(0)).into()), None, Some(dy.into())])
        }),
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(forward: f32, f64, f16, bf16, i8, i16, i32, i64, u8, u16, u32, u64),
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

fn forward<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (n, _) = sizes(ctx.input(0)?, ctx.input(1)?, ctx.input(2)?)?;
    let shape = Shape::from_signed(&ctx.integers(2)?)?;
    let dense = ctx.input(3)?.shape().clone();
    if shape.rank() != dense.rank() {
        return Err(Error::invalid_argument(format!(
            "Two operands have different ranks: {} and {}",
            shape.rank(),
            dense.rank()
        )));
    }
    if let Some(i) = (0..shape.rank()).find(|&i| shape[i] != dense[i]) {
        return Err(Error::invalid_argument(format!(
            "Dimension {i} does not equal (no broadcasting is supported): sparse side {} vs dense side {}",
            shape[i], dense[i]
        )));
    }
    let positions = positions(ctx, &ctx.integers(0)?, n, &shape, false)?;
    let (mut out, is_input) = ctx.reuse_or_allocate(3, T::DTYPE, dense)?;
    if !is_input {
        out.data_mut::<T>()?.copy_from_slice(ctx.data::<T>(3)?);
    }
    let sums = out.data_mut::<T>()?;
    for (&at, &value) in looking(positions.iter().zip(ctx.data::<T>(1)?)) {
        sums[at] = sums[at].add(value);
    }
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn sums() {
        let case = |index: [i64; 2]| {
            check_op("SparseTensorDenseAdd").input([[0i64, 1], index, [0, 1]]).input([1i32, 2, 3]).input([2i64, 2])
        };
        case([1, 0]).input([[10i32, 20], [30, 40]]).gives([[10i32, 24], [32, 40]]);
        case([2, 0]).input([[10i32, 20], [30, 40]]).fails("out of bounds");
        case([1, 0]).input([[10i32, 20]]).fails("sparse side 2 vs dense side 1");
        check_op("SparseTensorDenseAdd")
            .input(tensor::<i32, 2>([0, 1], []))
            .input(tensor::<f32, 1>([0], []))
            .input([2i32])
            .input([1.0f32, 2.0])
            .gives([1.0f32, 2.0]);
    }

    #[test]
    fn gradients() {
        check_op("SparseTensorDenseAdd")
            .input([[0i64, 1], [1, 0]])
            .input(wavy([2], 0))
            .input([2i64, 2])
            .input(wavy([2, 2], 1))
            .gradient();
    }
}
