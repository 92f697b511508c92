//! Products of matrices with what follows them, on GPUs: a bias, a `Relu`, a sum, or a descent along the product. cuBLASLt does
//! most of it in the call that multiplies.

use kolo_core::{DType, Error, Result, Shape, Tensor};
use kolo_device::Device;
use kolo_device::cuda::{Epilogue, MatMul, Terms};
use kolo_graph::Effects;

use super::fused;
use crate::cuda::map::{Expression, run};
use crate::cuda::view::turned;
use crate::cuda::{FLOATS, gpu};
use crate::math::elementwise::broadcast_shape;
use crate::math::matmul::gpu::{call_of, matmul, pays_to_turn};
use crate::math::matmul::narrow::narrow;
use crate::math::matmul::{Sizes, sizes_of};
use crate::op::{Op, gpu_kernel};
use crate::state::handle::uninitialized;
use crate::{Cost, KernelCtx, Value};

/// `MatMul`, `BiasAdd`, and `Relu` if there is one.
pub static MAT_MUL: Op = fused(
    "_KoloFusedMatMul",
    "(a:T, b:T, bias:T) -> (product:T) ; transpose_a:bool=false, transpose_b:bool=false, relu:bool=false, T:type",
    Cost::Heavy,
)
.gpu(&[gpu_kernel("T", FLOATS, fused_matmul)]);

/// `MatMul`, `BiasAdd` if there is one, and the sum with something of the product's size: a residual connection. `Relu` if there
/// is one. The sum has the shape of `plus`, which may have the product's elements in other dimensions.
pub static MAT_MUL_ADD: Op = fused(
    "_KoloFusedMatMulAdd",
    "(a:T, b:T, plus:T, bias:N*T) -> (sum:T) ; transpose_a:bool=false, transpose_b:bool=false, relu:bool=false, \
     N:int>=0, T:type",
    Cost::Heavy,
)
.gpu(&[gpu_kernel("T", FLOATS, matmul_and_sum)]);

/// `ResourceApplyGradientDescent` with a constant rate along a `MatMul`.
pub static APPLY_PRODUCT: Op = fused(
    "_KoloApplyProduct",
    "(var:resource, a:T, b:T) -> () ; transpose_a:bool=false, transpose_b:bool=false, rate:float, T:type",
    Cost::Heavy,
)
.effects(Effects::Writes)
.gpu(&[gpu_kernel("T", &[DType::F32], descend)]);

/// A product of matrices with a bias and perhaps a `Relu`, by the library if it has them for this shape.
fn fused_matmul(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (a, b, bias) = (ctx.input(0)?, ctx.input(1)?, ctx.input(2)?);
    let (relu, sizes) = (ctx.attrs().bool("relu")?, sizes_of(ctx, 0)?);
    let Sizes { m, n, k, .. } = sizes;
    if *bias.shape().dims() == [n] && m * n * k > 0 && a.dtype() != DType::F64 {
        let device = gpu(ctx)?;
        let mut out = ctx.allocate(a.dtype(), Shape::new(&[m, n])?)?;
        let epilogue = if relu { Epilogue::BiasRelu } else { Epilogue::Bias };
        let call = MatMul { epilogue, ..call_of(device, sizes, a.dtype()) };
        if narrow(device, &call, (a, b), Some(bias), &mut out)?
            || device.matmul(&call, a, b, Terms { bias: Some(bias), ..Terms::default() }, &mut out).is_ok()
        {
            ctx.set_output(0, out);
            return Ok(());
        }
    }
    let bias = ctx.take_input(2)?;
    matmul(ctx)?;
    let Value::Tensor(mut out) = ctx.outputs[0].take() else {
        return Err(Error::internal("a product without a value"));
    };
    if bias.shape().rank() != 1 || out.shape().last() != bias.shape().last() {
        return Err(Error::invalid_argument(format!(
            "Must provide as many biases as the last dimension of the input tensor: {} vs. {}",
            bias.shape(),
            out.shape()
        )));
    }
    let expression = match relu {
        true => Expression { name: "bias_relu", text: "x0 + x1 < (W)0 ? (W)0 : x0 + x1" },
        false => Expression { name: "AddV2", text: "x0 + x1" },
    };
    run(gpu(ctx)?, expression, &[None, Some(&bias)], &mut out, &[])?;
    ctx.set_output(0, out);
    Ok(())
}

/// A product of matrices with a bias if there is one, and something of its size that is added, in one call of the library. The
/// sum is put where that was, if nobody needs it any more.
fn matmul_and_sum(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (relu, sizes) = (ctx.attrs().bool("relu")?, sizes_of(ctx, 0)?);
    let Sizes { m, n, k, .. } = sizes;
    let (a, b) = (ctx.take_input(0)?, ctx.take_input(1)?);
    let bias = if ctx.inputs.len() > 3 { Some(ctx.take_input(3)?) } else { None };
    if let Some(bias) = bias.as_ref().filter(|bias| *bias.shape().dims() != [n]) {
        return Err(Error::invalid_argument(format!(
            "Must provide as many biases as the last dimension of the input tensor: {} vs. [{m},{n}]",
            bias.shape()
        )));
    }
    let (dtype, device) = (a.dtype(), gpu(ctx)?);
    let epilogue = match (&bias, relu) {
        (Some(_), true) => Epilogue::BiasRelu,
        (Some(_), false) => Epilogue::Bias,
        (None, _) => Epilogue::None,
    };
    let plain = call_of(device, sizes, dtype);
    let call = MatMul { adds: true, epilogue, ..plain };
    let plus = ctx.input(2)?.shape().clone();
    let is_same = plus.n_elements() == m * n && plus.last() == Some(&n);
    // The library has a Relu only together with a bias.
    if is_same && m * n * k > 0 && dtype != DType::F64 && (bias.is_some() || !relu) {
        let (mut out, is_in_place) = ctx.reuse_or_allocate(2, dtype, plus.clone())?;
        let other = if is_in_place { None } else { Some(ctx.input(2)?) };
        let done =
            device.matmul(&call, &a, &b, Terms { bias: bias.as_ref(), plus: other, ..Terms::default() }, &mut out);
        if done.is_ok() {
            ctx.set_output(0, out);
            return Ok(());
        }
        if is_in_place {
            ctx.inputs[2] = Value::Tensor(out);
        }
    }
    // One after the other. Rows may be repeated then.
    let mut product = ctx.allocate(dtype, Shape::new(&[m, n])?)?;
    match m * n * k {
        0 => device.fill(&mut product, 0)?,
        _ => device.matmul(&plain, &a, &b, Terms::default(), &mut product)?,
    }
    let product = if is_same { product.reshaped(plus.clone())? } else { product };
    let mut out = ctx.allocate(dtype, broadcast_shape(product.shape(), &plus)?)?;
    let plus = ctx.input(2)?;
    let (name, text) = match (&bias, relu) {
        (Some(_), true) => ("sum_bias_relu", "x0 + x1 + x2 < (W)0 ? (W)0 : x0 + x1 + x2"),
        (Some(_), false) => ("sum_bias", "x0 + x1 + x2"),
        (None, true) => ("bias_relu", "x0 + x1 < (W)0 ? (W)0 : x0 + x1"),
        (None, false) => ("AddV2", "x0 + x1"),
    };
    let inputs: Vec<Option<&Tensor>> =
        [Some(plus), Some(&product)].into_iter().chain(bias.as_ref().map(Some)).collect();
    if out.n_elements() > 0 {
        run(device, Expression { name, text }, &inputs, &mut out, &[])?;
    }
    ctx.set_output(0, out);
    Ok(())
}

/// Gradient descent along a product, which is added to the variable as it is computed.
fn descend(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let cell = ctx.variable(0)?;
    if !cell.is_initialized() {
        return Err(uninitialized(ctx, 0, &cell));
    }
    let (a, b, device) = (ctx.input(1)?, ctx.input(2)?, gpu(ctx)?);
    let sizes = sizes_of(ctx, 1)?;
    let Sizes { m, n, k, .. } = sizes;
    let mut call = MatMul { adds: true, ..call_of(device, sizes, a.dtype()) };
    let terms = Terms { scale: -ctx.attrs().float("rate")?, ..Terms::default() };
    let (a, b) = match pays_to_turn(&call) {
        true => {
            (call.transpose_a, call.transpose_b) = (false, true);
            (turned(ctx, a)?, turned(ctx, b)?)
        }
        false => (a.clone(), b.clone()),
    };
    cell.update_on(device, |variable| {
        if *variable.shape().dims() != [m, n] {
            return Err(Error::invalid_argument(format!(
                "var and delta do not have the same shape: {} vs. [{m},{n}]",
                variable.shape()
            )));
        }
        match m * n * k {
            0 => Ok(()),
            _ => device.matmul(&call, &a, &b, terms, variable),
        }
    })
}
