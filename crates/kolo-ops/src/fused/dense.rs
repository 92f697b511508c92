//! `_KoloFusedDense`: on a CPU, `MatMul`, the bias that is added to its rows, and the activation if there is one. Bias and
//! activation are applied to tiles of the product while these are in the cache.

use kolo_core::{DType, Element, Error, Result, Shape};
use kolo_device::cpu::IntraPool;
use kolo_device::cpu::gemm::{Activation, Gemm, gemm_f32, gemm_f64};
use kolo_graph::OpDef;
use num_traits::{One, Zero};

use crate::math::matmul::sizes_of;
use crate::op::cpu;
use crate::{Cost, Gpu, KernelCtx, Op};

/// The op. `product` is the name of the `MatMul`, for errors.
pub static DENSE: Op = Op {
    def: OpDef {
        name: "_KoloFusedDense",
        signature: "(a:T, b:T, bias:T) -> (product:T) ; transpose_a:bool=false, transpose_b:bool=false, \
                    activation:string{none|relu|sigmoid}=\"none\", product:string, T:type{float,double}",
        gradient: super::MADE_LATE,
        ..OpDef::BASE
    },
    kernels: &[cpu(DType::F32, |ctx| forward(ctx, gemm_f32)), cpu(DType::F64, |ctx| forward(ctx, gemm_f64))],
    gpu: Gpu::Never("it is made for CPUs alone"),
    cost: Cost::Heavy,
};

fn forward<T: Element + Zero + One>(
    ctx: &mut KernelCtx<'_>,
    gemm: fn(&IntraPool, Gemm<'_, T>) -> Result<(), String>,
) -> Result<()> {
    let product = ctx.attrs().str("product")?;
    let sizes = sizes_of(ctx, 0).map_err(|error| error.context(format_args!("MatMul {product}")))?;
    let bias = ctx.input(2)?;
    if bias.shape().rank() != 1 || bias.n_elements() != sizes.n {
        return Err(Error::invalid_argument(format!(
            "Must provide as many biases as the last dimension of the input tensor: {} vs. [{},{}]",
            bias.shape(),
            sizes.m,
            sizes.n
        )));
    }
    let activation = match ctx.attrs().str("activation")? {
        "relu" => Activation::Relu,
        "sigmoid" => Activation::Sigmoid,
        _ => Activation::None,
    };
    let mut out = ctx.allocate(T::DTYPE, Shape::new(&[sizes.m, sizes.n])?)?;
    let mut call = sizes.call(ctx.data(0)?, ctx.data(1)?, out.data_mut()?);
    call.epilogue.column_bias = Some(ctx.data(2)?);
    call.epilogue.activation = activation;
    gemm(ctx.pool(), call).map_err(Error::internal)?;
    ctx.set_output(0, out);
    Ok(())
}
