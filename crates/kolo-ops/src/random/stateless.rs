//! `StatelessRandomUniform`, `StatelessRandomNormal`, `StatelessTruncatedNormal`: the same seeds always give the same
//! numbers.

use std::marker::PhantomData;

use half::{bf16, f16};
use kolo_core::{DType, Element, Error, Result};
use kolo_graph::{Gradient, OpDef, Output, shape_fns};

use crate::cuda::FLOATS;
use crate::op::{Gpu, KernelDef, Op, cpu_kernels, gpu_kernel};
use crate::random::distribution::{Distribution, Normal, Standard, Truncated, Uniform, fill};
use crate::random::philox::Philox;
use crate::random::shape_in;
use crate::{Cost, KernelCtx};

/// Numbers drawn evenly from [0, 1); `seed` is a vector of two integers.
#[track_caller]
pub fn stateless_random_uniform<'g>(shape: Output<'g>, seed: Output<'g>, dtype: DType) -> Output<'g> {
    shape.graph().op("StatelessRandomUniform").input(shape).input(seed).attr("dtype", dtype).out()
}

/// Numbers from a normal distribution; `seed` is a vector of two integers.
#[track_caller]
pub fn stateless_random_normal<'g>(shape: Output<'g>, seed: Output<'g>, dtype: DType) -> Output<'g> {
    shape.graph().op("StatelessRandomNormal").input(shape).input(seed).attr("dtype", dtype).out()
}

/// Numbers from a normal distribution, redrawn beyond two standard deviations; `seed` is a vector of two integers.
#[track_caller]
pub fn stateless_truncated_normal<'g>(shape: Output<'g>, seed: Output<'g>, dtype: DType) -> Output<'g> {
    shape.graph().op("StatelessTruncatedNormal").input(shape).input(seed).attr("dtype", dtype).out()
}

pub(crate) static STATELESS_RANDOM_UNIFORM: Op =
    stateless("StatelessRandomUniform", cpu_kernels!("dtype", uniform: f32, f64, f16, bf16))
        .host_args(&["shape", "seed"])
        .gpu(&[gpu_kernel("dtype", FLOATS, |ctx| super::gpu::stateless(ctx, 0))]);
pub(crate) static STATELESS_RANDOM_NORMAL: Op =
    stateless("StatelessRandomNormal", cpu_kernels!("dtype", normal: f32, f64, f16, bf16))
        .host_args(&["shape", "seed"])
        .gpu(&[gpu_kernel("dtype", FLOATS, |ctx| super::gpu::stateless(ctx, 1))]);
pub(crate) static STATELESS_TRUNCATED_NORMAL: Op =
    stateless("StatelessTruncatedNormal", cpu_kernels!("dtype", truncated: f32, f64, f16, bf16))
        .host_args(&["shape", "seed"])
        .gpu(&[gpu_kernel("dtype", FLOATS, |ctx| super::gpu::stateless(ctx, 2))]);

const fn stateless(name: &'static str, kernels: &'static [KernelDef]) -> Op {
    Op {
        def: OpDef {
            name,
            signature: "(shape:T, seed:Tseed) -> (output:dtype) ; dtype:type{half,bfloat16,float,double}=float, \
                        T:type{int32,int64}=int32, Tseed:type{int32,int64}=int64",
            shape: |ctx| {
                if let Some(n) = ctx.input_of_rank(1, 1)?.dim(0)
                    && n != 2
                {
                    return Err(Error::invalid_argument(format!("seed must have shape [2], not [{n}]")));
                }
                shape_fns::from_shape_input(ctx)
            },
            gradient: Gradient::None("random numbers do not depend on their shape and seed smoothly"),
            ..OpDef::BASE
        },
        kernels,
        gpu: Gpu::Unstated,
        cost: Cost::Elements,
    }
}

fn uniform<T: Standard>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    draw(ctx, Uniform::<T>(PhantomData))
}

fn normal<T: Standard>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    draw(ctx, Normal::<T>(PhantomData))
}

fn truncated<T: Standard>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    draw(ctx, Truncated::<T>(PhantomData))
}

fn draw<D: Distribution>(ctx: &mut KernelCtx<'_>, distribution: D) -> Result<()> {
    let shape = shape_in(ctx)?;
    let seeds = ctx.integers(1)?;
    let &[first, second] = seeds.as_slice() else {
        let found = ctx.input(1)?.shape();
        return Err(Error::invalid_argument(format!("seed must have shape [2], not {found}")));
    };
    let mut out = ctx.allocate(D::Output::DTYPE, shape)?;
    let start = Philox::from_stateless_seeds([first as u64, second as u64]);
    fill(ctx.pool(), &distribution, start, out.data_mut()?);
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::{DType, Tensor};

    use crate::testing::check_op;

    #[test]
    fn values_are_tensorflows() {
        let check = |op: &str, seed: Tensor, expected: [u32; 7]| {
            let found = check_op(op).input([7i32]).input(seed).run(false).unwrap().remove(0);
            let bits: Vec<u32> = found.data::<f32>().unwrap().iter().map(|x| x.to_bits()).collect();
            assert_eq!(bits, expected, "{op}");
        };
        let (narrow, wide) = (Tensor::from([3i32, -4]), Tensor::from([1i64 << 40, 7]));
        check(
            "StatelessRandomUniform",
            narrow.clone(),
            [0x3e482e40, 0x3f39034e, 0x3f62a064, 0x3f1bba3c, 0x3f594044, 0x3ec9e180, 0x3f787a2e],
        );
        check(
            "StatelessRandomUniform",
            wide.clone(),
            [0x3edc974c, 0x3f34ac10, 0x3cdb8180, 0x3e95982c, 0x3f2ae5d4, 0x3e1c3d20, 0x3e8bedd4],
        );
        check(
            "StatelessRandomNormal",
            narrow,
            [0xbfe3e093, 0xbe9ddd52, 0xbe9f0cf3, 0xbec47806, 0x3eb4cf4e, 0xbee6fd3c, 0xbe626ced],
        );
        check(
            "StatelessTruncatedNormal",
            wide,
            [0xbf9fba20, 0xbeb65b84, 0xbf346683, 0x3f3c5bdd, 0x3d36cdfd, 0xbe1d6941, 0x3fc923f6],
        );
    }

    #[test]
    fn dtypes_and_bad_seeds() {
        check_op("StatelessRandomUniform")
            .attr("dtype", DType::F64)
            .input([2i64])
            .input([3i32, -4])
            .tolerance(0.0)
            .gives([0.5639122309586158f64, 0.08207911738811147]);
        check_op("StatelessRandomUniform").input([2i64]).input([3i32]).fails("seed must have shape [2], not [1]");
        check_op("StatelessRandomNormal").input([0i32]).input([3i32, 4]).gives(Tensor::vector::<f32>(vec![]));
    }
}
