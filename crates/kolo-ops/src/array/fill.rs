//! `Fill`: one value, many times. `ZerosLike` and `OnesLike`: a constant in the shape of something else.

use kolo_core::{DType, Error, Result, Shape};
use kolo_device::cpu::{IntraPool, pool};
use kolo_graph::{Gradient, Graph, HalfSafety, HostRule, IntoOutput, OpDef, Output, Work, shape_fns};

use super::cast::Target;
use super::elements::{IntoInts, Item, Job, build, integers};
use crate::cuda::map::{COPY, Expression, run};
use crate::cuda::{PLAIN, gpu};
use crate::math::binary::first;
use crate::op::{Gpu, KernelMaker, Op, cpu_any, gpu_kernel, gpu_made};
use crate::{Cost, Kernel, KernelCtx};

/// A tensor of shape `dims` in which every element is `value`, a scalar.
#[track_caller]
pub fn fill<'g>(dims: impl IntoInts<'g>, value: Output<'g>) -> Output<'g> {
    let graph = value.graph();
    graph.op("Fill").input(dims.into_ints(graph)).input(value).out()
}

/// Zeros of this shape and dtype.
#[track_caller]
pub fn zeros<'g>(graph: &'g Graph, dims: impl IntoInts<'g>, dtype: DType) -> Output<'g> {
    fill(dims, 0.0f32.into_output(graph, dtype))
}

/// Ones of this shape and dtype.
#[track_caller]
pub fn ones<'g>(graph: &'g Graph, dims: impl IntoInts<'g>, dtype: DType) -> Output<'g> {
    fill(dims, 1.0f32.into_output(graph, dtype))
}

/// Zeros in the shape and dtype of `x`.
#[track_caller]
pub fn zeros_like(x: Output<'_>) -> Output<'_> {
    x.graph().op("ZerosLike").input(x).out()
}

/// Ones in the shape and dtype of `x`.
#[track_caller]
pub fn ones_like(x: Output<'_>) -> Output<'_> {
    x.graph().op("OnesLike").input(x).out()
}

pub(crate) static FILL: Op = Op {
    def: OpDef {
        name: "Fill",
        signature: "(dims:index_type, value:T) -> (output:T) ; T:type, index_type:type{int32,int64}=int32",
        shape: |ctx| {
            ctx.input_of_rank(0, 1)?;
            ctx.input_of_rank(1, 0)?;
            if let Some(dims) = ctx.constant_integers(0) {
                Shape::from_signed(&dims)?;
            }
            shape_fns::from_shape_input(ctx)
        },
        gradient: Gradient::Rule(|op, dy| {
            let (graph, dy) = (op.graph(), first(dy)?);
            let rank = graph.op("Rank").input(dy).out();
            let axes = graph.op("Range").inputs([graph.constant(0i32), rank, graph.constant(1i32)]).out();
            Ok(vec![None, Some(graph.op("Sum").input(dy).input(axes).out().into())])
        }),
        host: HostRule::SmallIntegers,
        half: HalfSafety::Neutral,
        host_args: &["dims"],
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward_fill)],
    gpu: Gpu::Kernels(&[gpu_kernel("T", PLAIN, fill_on_gpu)]),
    cost: Cost::Elements,
};

pub(crate) static ZEROS_LIKE: Op = Op {
    def: OpDef {
        name: "ZerosLike",
        signature: "(x:T) -> (y:T) ; T:type",
        shape: shape_fns::same_as_input_0,
        gradient: Gradient::None("the result does not depend on the values"),
        host: HostRule::SmallIntegers,
        work: Work::FillsLike,
        half: HalfSafety::Neutral,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward_zeros)],
    gpu: Gpu::Kernels(&[gpu_made("T", PLAIN, KernelMaker::Object(|_| Ok(Box::new(LikeOnGpu(0.0)))))]),
    cost: Cost::Elements,
};

pub(crate) static ONES_LIKE: Op = Op {
    def: OpDef {
        name: "OnesLike",
        signature: "(x:T) -> (y:T) ; T:type{bfloat16,half,float,double,int8,uint8,int16,uint16,int32,uint32,int64,\
                    uint64,complex64,complex128,bool}",
        shape: shape_fns::same_as_input_0,
        gradient: Gradient::None("the result does not depend on the values"),
        host: HostRule::SmallIntegers,
        work: Work::FillsLike,
        half: HalfSafety::Neutral,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward_ones)],
    gpu: Gpu::Kernels(&[gpu_made("T", PLAIN, KernelMaker::Object(|_| Ok(Box::new(LikeOnGpu(1.0)))))]),
    cost: Cost::Elements,
};

fn forward_fill(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (dims, value) = (ctx.input(0)?, ctx.input(1)?);
    if dims.shape().rank() > 1 {
        return Err(Error::invalid_argument(format!("dims must be a vector, got shape {}", dims.shape())));
    }
    if value.shape().rank() > 0 {
        return Err(Error::invalid_argument(format!("value must be a scalar, got shape {}", value.shape())));
    }
    let shape = Shape::from_signed(&integers(dims)?)?;
    let out = build(ctx, value.dtype(), shape, &[value], Fill(ctx.pool()))?;
    ctx.set_output(0, out);
    Ok(())
}

struct Fill<'a>(&'a IntraPool);

impl Job for Fill<'_> {
    fn run<E: Item>(self, out: &mut [E], inputs: &[&[E]]) -> Result<()> {
        let [[value]] = inputs else { return Err(Error::internal("Fill takes one value")) };
        E::fill_chunks(self.0, out, E::fill_grain(out.len(), 0.1), &|_, out| out.fill(value.clone()));
        Ok(())
    }
}

fn forward_zeros(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (dtype, shape) = (ctx.input(0)?.dtype(), ctx.input(0)?.shape().clone());
    let out = match dtype.size() {
        Some(_) => {
            let (mut out, _) = ctx.reuse_or_allocate(0, dtype, shape)?;
            ctx.pool().for_each_chunk(out.host_bytes_mut()?, pool::grain(0.05), |_, out| out.fill(0));
            out
        }
        None => ctx.allocate(dtype, shape)?,
    };
    ctx.set_output(0, out);
    Ok(())
}

fn forward_ones(ctx: &mut KernelCtx<'_>) -> Result<()> {
    fn ones<T: Target>(ctx: &mut KernelCtx<'_>) -> Result<()> {
        let shape = ctx.input(0)?.shape().clone();
        let (mut out, _) = ctx.reuse_or_allocate(0, T::DTYPE, shape)?;
        ctx.pool().for_each_chunk(out.data_mut::<T>()?, pool::grain(0.1), |_, out| out.fill(T::of(1u8)));
        ctx.set_output(0, out);
        Ok(())
    }
    match ctx.input(0)?.dtype() {
        DType::F32 => ones::<f32>(ctx),
        DType::F64 => ones::<f64>(ctx),
        DType::F16 => ones::<half::f16>(ctx),
        DType::BF16 => ones::<half::bf16>(ctx),
        DType::I8 => ones::<i8>(ctx),
        DType::I16 => ones::<i16>(ctx),
        DType::I32 => ones::<i32>(ctx),
        DType::I64 => ones::<i64>(ctx),
        DType::U8 => ones::<u8>(ctx),
        DType::U16 => ones::<u16>(ctx),
        DType::U32 => ones::<u32>(ctx),
        DType::U64 => ones::<u64>(ctx),
        DType::Bool => ones::<bool>(ctx),
        other => Err(Error::unimplemented(format!("OnesLike does not work on {other}"))),
    }
}

/// `ZerosLike` and `OnesLike`: the value.
struct LikeOnGpu(f32);

impl Kernel for LikeOnGpu {
    fn compute(&self, ctx: &mut KernelCtx<'_>) -> Result<()> {
        let (dtype, shape) = (ctx.input(0)?.dtype(), ctx.input(0)?.shape().clone());
        let mut out = ctx.allocate(dtype, shape)?;
        let constant = Expression { name: "constant", text: "(Wide<U>::type)p0" };
        match self.0 == 0.0 {
            true => ctx.device.fill(&mut out, 0)?,
            false => run(gpu(ctx)?, constant, &[], &mut out, &[self.0])?,
        }
        ctx.set_output(0, out);
        Ok(())
    }
}

fn fill_on_gpu(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let shape = Shape::from_signed(&ctx.integers(0)?)?;
    let value = ctx.input(1)?;
    if value.n_elements() != 1 {
        return Err(Error::invalid_argument(format!("value must be a scalar, found shape {}", value.shape())));
    }
    let mut out = ctx.allocate(value.dtype(), shape)?;
    run(gpu(ctx)?, COPY, &[Some(ctx.input(1)?)], &mut out, &[])?;
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use super::*;
    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn fill() {
        check_op("Fill").input([2i32, 2]).input(3.0f32).gives([[3.0f32, 3.0], [3.0, 3.0]]);
        check_op("Fill").input([3i64]).input(true).gives([true; 3]);
        check_op("Fill").input([2i32]).input("ab").gives(Tensor::from_strings([2], vec!["ab".into(); 2]).unwrap());
        check_op("Fill").input([2i32, 0]).input(1i64).gives(tensor::<i64, 2>([2, 0], []));
        check_op("Fill").input(tensor::<i32, 1>([0], [])).input(7u8).gives(7u8);
        check_op("Fill").input([100_000i32]).input(1.5f64).gives(vec![1.5f64; 100_000]);
    }

    #[test]
    fn bad_fills_are_named() {
        check_op("Fill").input([-1i32]).input(3.0f32).fails("negative size");
        check_op("Fill").input([i64::MAX, i64::MAX]).input(3.0f32).fails("too many elements");
        check_op("Fill").input([1i32]).input([3.0f32]).fails("rank 0");
        check_op("Fill").input(1i32).input(3.0f32).fails("rank 1");
    }

    #[test]
    fn the_gradient_of_a_fill_is_the_sum() {
        check_op("Fill").input([2i32, 3]).input(0.5f32).gradient();
        check_op("Fill").input(tensor::<i32, 1>([0], [])).input(0.5f32).gradient();
    }

    #[test]
    fn likes() {
        check_op("ZerosLike").input(wavy([2, 3], 1)).gives(Tensor::zeros(DType::F32, [2, 3]).unwrap());
        check_op("ZerosLike").input("text").gives("");
        check_op("OnesLike").input([5i16, 7]).gives([1i16, 1]);
        check_op("OnesLike").input([half::bf16::ZERO; 9]).gives([half::bf16::ONE; 9]);
        check_op("OnesLike").input([true, false]).gives([true, true]);
        check_op("OnesLike").input(tensor::<f32, 1>([0], [])).gives(tensor::<f32, 1>([0], []));
        check_op("OnesLike").input("text").fails("string is not allowed");
    }
}
