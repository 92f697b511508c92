//! `_KoloApplyDescent`: on a CPU, `ResourceApplyGradientDescent` with a gradient that a `MatMul` makes. The product is
//! subtracted from the variable where it is made, so the gradient is never stored.

use kolo_core::{DType, Element, Error, Result};
use kolo_device::cpu::IntraPool;
use kolo_device::cpu::gemm::{Gemm, gemm_f32, gemm_f64};
use kolo_graph::{Effects, OpDef};
use num_traits::{One, Zero};

use crate::math::matmul::sizes_of;
use crate::op::cpu;
use crate::{Cost, Gpu, KernelCtx, Op};

/// The op. `product` is the name of the `MatMul`, for errors.
pub static DESCENT: Op = Op {
    def: OpDef {
        name: "_KoloApplyDescent",
        signature: "(var:resource, alpha:T, a:T, b:T) -> () ; transpose_a:bool=false, transpose_b:bool=false, \
                    product:string, T:type{float,double}",
        gradient: super::MADE_LATE,
        stateful: true,
        effects: Effects::Writes,
        ..OpDef::BASE
    },
    kernels: &[cpu(DType::F32, |ctx| descend(ctx, gemm_f32)), cpu(DType::F64, |ctx| descend(ctx, gemm_f64))],
    gpu: Gpu::Never("it is made for CPUs alone"),
    cost: Cost::Heavy,
};

fn descend<T: Element + Zero + One + std::ops::Neg<Output = T>>(
    ctx: &mut KernelCtx<'_>,
    gemm: fn(&IntraPool, Gemm<'_, T>) -> Result<(), String>,
) -> Result<()> {
    let product = ctx.attrs().str("product")?;
    let sizes = sizes_of(ctx, 2).map_err(|error| error.context(format_args!("MatMul {product}")))?;
    let alpha = ctx.input(1)?;
    if alpha.n_elements() != 1 {
        return Err(Error::invalid_argument(format!("alpha is not a scalar: {}", alpha.shape())));
    }
    let alpha = alpha.scalar_value::<T>()?;
    let (a, b) = (ctx.data::<T>(2)?, ctx.data::<T>(3)?);
    ctx.variable(0)?.update(|var| {
        let shape = var.shape();
        if shape.dims() != [sizes.m, sizes.n] {
            let (m, n) = (sizes.m, sizes.n);
            return Err(Error::invalid_argument(format!("var and delta do not have the same shape{shape} [{m},{n}]")));
        }
        let mut call = sizes.call(a, b, var.data_mut()?);
        call.alpha = -alpha;
        call.beta = T::one();
        gemm(ctx.pool(), call).map_err(Error::internal)
    })
}
