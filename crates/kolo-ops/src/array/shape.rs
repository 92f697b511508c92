//! `Shape` and `ShapeN`: the sizes of a tensor's dimensions, as an integer vector. `Size`: their product. `Rank`: their
//! number.

use kolo_core::{DType, PartialShape, Result, Shape, Tensor};
use kolo_graph::{Gradient, OpDef, Output, Work, shape_fns};

use super::elements::integer_tensor;
use crate::op::{Gpu, Op, cpu_any, gpu_kernel};
use crate::{Cost, KernelCtx};

/// The shape of `x`, as int32.
#[track_caller]
pub fn shape(x: Output<'_>) -> Output<'_> {
    x.graph().op("Shape").input(x).out()
}

/// The number of elements of `x`, as int32.
#[track_caller]
pub fn size(x: Output<'_>) -> Output<'_> {
    x.graph().op("Size").input(x).out()
}

/// The number of dimensions of `x`, as int32.
#[track_caller]
pub fn rank(x: Output<'_>) -> Output<'_> {
    x.graph().op("Rank").input(x).out()
}

pub(crate) static SHAPE: Op = Op {
    def: OpDef {
        name: "Shape",
        signature: "(input:T) -> (output:out_type) ; T:type, out_type:type{int32,int64}=int32",
        shape: |ctx| Ok(vec![PartialShape::new(&[ctx.input(0).rank()])]),
        gradient: Gradient::None("shapes are integers"),
        work: Work::Measures,
        host_args: &["output"],
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward)],
    gpu: Gpu::Kernels(&[gpu_kernel("T", crate::cuda::flow::ANY, crate::cuda::flow::shape)]),
    cost: Cost::Inline,
};

pub(crate) static SHAPE_N: Op = Op {
    def: OpDef {
        name: "ShapeN",
        signature: "(input:N*T) -> (output:N*out_type) ; N:int>=1, T:type, out_type:type{int32,int64}=int32",
        shape: |ctx| Ok((0..ctx.n_inputs()).map(|i| PartialShape::new(&[ctx.input(i).rank()])).collect()),
        gradient: Gradient::None("shapes are integers"),
        work: Work::Measures,
        host_args: &["output"],
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward)],
    gpu: Gpu::Kernels(&[gpu_kernel("T", crate::cuda::flow::ANY, crate::cuda::flow::shape)]),
    cost: Cost::Inline,
};

pub(crate) static SIZE: Op = Op {
    def: OpDef {
        name: "Size",
        signature: "(input:T) -> (output:out_type) ; T:type, out_type:type{int32,int64}=int32",
        shape: shape_fns::scalars,
        gradient: Gradient::None("sizes are integers"),
        work: Work::Measures,
        host_args: &["output"],
        ..OpDef::BASE
    },
    kernels: &[cpu_any(|ctx| {
        let n = ctx.input(0)?.n_elements() as i64;
        let output = integer_tensor(ctx.attrs().dtype("out_type")?, Shape::scalar(), vec![n])?;
        ctx.set_output(0, output);
        Ok(())
    })],
    gpu: Gpu::Kernels(&[gpu_kernel("T", crate::cuda::flow::ANY, crate::cuda::flow::size)]),
    cost: Cost::Inline,
};

pub(crate) static RANK: Op = Op {
    def: OpDef {
        name: "Rank",
        signature: "(input:T) -> (output:int32) ; T:type",
        shape: shape_fns::scalars,
        gradient: Gradient::None("ranks are integers"),
        work: Work::Measures,
        host_args: &["output"],
        ..OpDef::BASE
    },
    kernels: &[cpu_any(|ctx| {
        let rank = ctx.input(0)?.shape().rank();
        ctx.set_output(0, Tensor::scalar(rank as i32));
        Ok(())
    })],
    gpu: Gpu::Kernels(&[gpu_kernel("T", crate::cuda::flow::ANY, crate::cuda::flow::rank)]),
    cost: Cost::Inline,
};

fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let dtype = ctx.attrs().dtype("out_type")?;
    for i in 0..ctx.n_inputs() {
        let output = shape_tensor(ctx.input(i)?, dtype)?;
        ctx.set_output(i, output);
    }
    Ok(())
}

/// The shape of a tensor as a tensor of int32 or int64.
pub(crate) fn shape_tensor(tensor: &Tensor, dtype: DType) -> Result<Tensor> {
    let dims: Vec<i64> = tensor.shape().iter().map(|&dim| dim as i64).collect();
    integer_tensor(dtype, Shape::new(&[dims.len()])?, dims)
}

#[cfg(test)]
mod tests {
    use kolo_core::{DType, Tensor};

    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn shape() {
        check_op("Shape").input(wavy([2, 3], 0)).gives([2i32, 3]);
        check_op("Shape").attr("out_type", DType::I64).input(wavy([4], 0)).gives([4i64]);
        check_op("Shape").input(1.0f32).gives(tensor::<i32, 1>([0], []));
    }

    #[test]
    fn counts() {
        check_op("ShapeN")
            .input(wavy([2, 3], 0))
            .input(wavy([4], 0))
            .gives_all([Tensor::from([2i32, 3]), Tensor::from([4i32])]);
        check_op("Size").input(wavy([2, 3], 0)).gives(6i32);
        check_op("Size").attr("out_type", DType::I64).input(1.0f32).gives(1i64);
        check_op("Size").input("text").gives(1i32);
        check_op("Rank").input(wavy([2, 0, 3], 0)).gives(3i32);
        check_op("Rank").input(true).gives(0i32);
    }
}
