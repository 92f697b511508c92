//! `MatMul` and `BatchMatMul` by cuBLASLt.

use kolo_core::{DType, Error, Result, Shape, Tensor};
use kolo_device::cuda::{CudaDevice, Epilogue, MatMul, MatMulKind, Terms};

use super::narrow::narrow;
use crate::KernelCtx;
use crate::cuda::map::{Expression, run};
use crate::cuda::view::turned;
use crate::cuda::{gpu, zeros};
use crate::math::elementwise::broadcast_shape;
use crate::math::matmul::{Sizes, misfit, sizes_of};

pub(crate) fn matmul(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let sizes = sizes_of(ctx, 0)?;
    product(ctx, sizes.transpose_a, sizes.transpose_b)
}

/// One product of matrices of this type, with nothing added.
pub(crate) fn call_of(device: &CudaDevice, sizes: Sizes, dtype: DType) -> MatMul {
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

/// Whether a gradient of weights, `aᵀ · b`, is faster of matrices that are turned first: the matrix units read TF32 along the
/// inner size only. On an H200 a product of 4096x1024 by 1024x4096 takes 150 microseconds as it is and 95 turned, and turning
/// both takes 20; what turning takes grows with the sides, what it saves with the area.
pub(crate) fn pays_to_turn(call: &MatMul) -> bool {
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
