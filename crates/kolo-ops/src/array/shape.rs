//! `Shape` and `ShapeN`: the sizes of a tensor's dimensions, as an integer vector. `Size`: their product. `Rank`: their
//! number.

use kolo_core::{DType, Error, PartialShape, Result, Shape, Tensor};
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
    gpu: Gpu::Kernels(&[gpu_kernel("T", ANY, shape_on_gpu)]),
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
    gpu: Gpu::Kernels(&[gpu_kernel("T", ANY, shape_on_gpu)]),
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
    gpu: Gpu::Kernels(&[gpu_kernel("T", ANY, size_on_gpu)]),
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
    gpu: Gpu::Kernels(&[gpu_kernel("T", ANY, rank_on_gpu)]),
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

/// What may be asked for its shape.
const ANY: &[DType] = &[
    DType::F32,
    DType::F64,
    DType::F16,
    DType::BF16,
    DType::I64,
    DType::I32,
    DType::I8,
    DType::I16,
    DType::U8,
    DType::U16,
    DType::U32,
    DType::U64,
    DType::Bool,
];

fn shape_on_gpu(ctx: &mut KernelCtx<'_>) -> Result<()> {
    for i in 0..ctx.n_inputs() {
        let dims: Vec<i64> = ctx.input(i)?.shape().iter().map(|&dim| dim as i64).collect();
        let shape = Shape::new(&[dims.len()])?;
        let out = host_integers(shape, &dims, ctx.attrs().dtype("out_type")?)?;
        ctx.set_output(i, out);
    }
    Ok(())
}

fn size_on_gpu(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let n = ctx.input(0)?.n_elements() as i64;
    let out = host_integers(Shape::scalar(), &[n], ctx.attrs().dtype("out_type")?)?;
    ctx.set_output(0, out);
    Ok(())
}

fn rank_on_gpu(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let rank = ctx.input(0)?.shape().rank() as i64;
    ctx.set_output(0, host_integers(Shape::scalar(), &[rank], DType::I32)?);
    Ok(())
}

/// Whole numbers in host memory.
fn host_integers(shape: Shape, values: &[i64], dtype: DType) -> Result<Tensor> {
    match dtype {
        DType::I64 => Tensor::from_vec(shape, values.to_vec()),
        _ => {
            let narrow: std::result::Result<Vec<i32>, _> = values.iter().map(|&value| i32::try_from(value)).collect();
            let narrow = narrow.map_err(|_| Error::invalid_argument(format!("{values:?} do not fit int32")))?;
            Tensor::from_vec(shape, narrow)
        }
    }
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
