//! `MatMul` and `BatchMatMul` by cuBLASLt.

use kolo_core::{DType, Error, Result, Shape, Tensor};
use kolo_device::Device;
use kolo_device::cuda::{CudaDevice, Epilogue, MatMul, MatMulKind, Terms};

use super::array::turned;
use super::map::{Expression, run};
use super::narrow::narrow;
use super::{gpu, zeros};
use crate::math::elementwise::broadcast_shape;
use crate::math::matmul::{Sizes, misfit, sizes_of};
use crate::state::handle::uninitialized;
use crate::{KernelCtx, Value};

pub(crate) fn matmul(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let sizes = sizes_of(ctx, 0)?;
    product(ctx, sizes.transpose_a, sizes.transpose_b)
}

/// One product of matrices of this type, with nothing added.
fn call_of(device: &CudaDevice, sizes: Sizes, dtype: DType) -> MatMul {
    let Sizes { m, n, k, transpose_a, transpose_b } = sizes;
    MatMul {
        m,
        n,
        k,
        transpose_a,
        transpose_b,
        batch: 1,
        shared_a: false,
        shared_b: false,
        dtype,
        kind: if device.allow_tf32() { MatMulKind::Tf32 } else { MatMulKind::Full },
        adds: false,
        epilogue: Epilogue::None,
    }
}

/// A product of matrices with a bias and perhaps a `Relu`, by the library if it has them for this shape.
pub(crate) fn fused_matmul(ctx: &mut KernelCtx<'_>) -> Result<()> {
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
pub(crate) fn matmul_and_sum(ctx: &mut KernelCtx<'_>) -> Result<()> {
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
pub(crate) fn descend(ctx: &mut KernelCtx<'_>) -> Result<()> {
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

/// Whether a gradient of weights, `aᵀ · b`, is faster of matrices that are turned first: the matrix units read TF32 along the
/// inner size only. On an H200 a product of 4096x1024 by 1024x4096 takes 150 microseconds as it is and 95 turned, and turning
/// both takes 20; what turning takes grows with the sides, what it saves with the area.
fn pays_to_turn(call: &MatMul) -> bool {
    let is_skewed = call.transpose_a && !call.transpose_b && call.batch == 1;
    let (m, n) = (call.m as u128, call.n as u128);
    is_skewed && call.dtype == DType::F32 && call.kind == MatMulKind::Tf32 && call.k >= 256 && m * n > 1500 * (m + n)
}

/// `BatchMatMul`, whose batches must be the same.
pub(crate) fn same_batch_matmul(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (a, b) = (ctx.input(0)?.shape(), ctx.input(1)?.shape());
    let batch = |shape: &Shape| shape.dims().split_last_chunk::<2>().map(|(batch, _)| batch.to_vec());
    if batch(a) != batch(b) {
        return Err(Error::invalid_argument(format!("In[0] and In[1] must have the same batch: {a} vs. {b}")));
    }
    batch_matmul(ctx)
}

pub(crate) fn batch_matmul(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (a, b) = (ctx.input(0)?.shape(), ctx.input(1)?.shape());
    if a.rank() < 2 || b.rank() < 2 {
        return Err(Error::invalid_argument(format!("In[0] and In[1] must be matrices, found {a} and {b}")));
    }
    product(ctx, ctx.attrs().bool("adj_x")?, ctx.attrs().bool("adj_y")?)
}

fn product(ctx: &mut KernelCtx<'_>, transpose_a: bool, transpose_b: bool) -> Result<()> {
    let (a, b) = (ctx.input(0)?, ctx.input(1)?);
    let (batch_a, last_a) = a.shape().split_at(a.shape().rank() - 2);
    let (batch_b, last_b) = b.shape().split_at(b.shape().rank() - 2);
    let (m, left) = if transpose_a { (last_a[1], last_a[0]) } else { (last_a[0], last_a[1]) };
    let (right, n) = if transpose_b { (last_b[1], last_b[0]) } else { (last_b[0], last_b[1]) };
    if left != right {
        return Err(misfit(&a.shape().into(), &b.shape().into(), left, right));
    }
    let (batch_a, batch_b) = (Shape::new(batch_a)?, Shape::new(batch_b)?);
    let batch = broadcast_shape(&batch_a, &batch_b)?;
    let mut dims = batch.dims().to_vec();
    dims.extend([m, n]);
    let shape = Shape::new(&dims)?;
    let dtype = a.dtype();
    let device = gpu(ctx)?;
    if shape.n_elements() == 0 || left == 0 {
        let out = zeros(ctx, dtype, shape)?;
        ctx.set_output(0, out);
        return Ok(());
    }
    let mut out = ctx.allocate(dtype, shape)?;
    let n_batch = batch.n_elements();
    let mut call = MatMul {
        batch: n_batch,
        shared_a: n_batch > 1 && batch_a.n_elements() == 1,
        shared_b: n_batch > 1 && batch_b.n_elements() == 1,
        ..call_of(device, Sizes { m, n, k: left, transpose_a, transpose_b }, dtype)
    };
    // Batches that are repeated along some of their dimensions only are written out.
    let whole = |i: usize, of: &Shape| -> Result<Tensor> {
        let tensor = ctx.input(i)?;
        if of.n_elements() == n_batch || of.n_elements() == 1 {
            return Ok(tensor.clone());
        }
        let dims: Vec<usize> = batch.iter().chain(&tensor.shape()[of.rank()..]).copied().collect();
        let mut wide = ctx.allocate(dtype, Shape::new(&dims)?)?;
        run(device, Expression { name: "copy", text: "x0" }, &[Some(tensor)], &mut wide, &[])?;
        Ok(wide)
    };
    let (a, b) = (whole(0, &batch_a)?, whole(1, &batch_b)?);
    // One right matrix for all: the batch is just more rows.
    if call.shared_b && !transpose_a {
        call = MatMul { m: m * n_batch, batch: 1, shared_a: false, shared_b: false, ..call };
    }
    if narrow(device, &call, (&a, &b), None, &mut out)? {
        // Done.
    } else if pays_to_turn(&call) {
        let (a, b) = (turned(ctx, &a)?, turned(ctx, &b)?);
        let call = MatMul { transpose_a: false, transpose_b: true, ..call };
        device.matmul(&call, &a, &b, Terms::default(), &mut out)?;
    } else {
        device.matmul(&call, &a, &b, Terms::default(), &mut out)?;
    }
    drop((a, b));
    ctx.set_output(0, out);
    Ok(())
}
