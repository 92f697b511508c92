//! `MatMul` and `BatchMatMul` by cuBLASLt.

use kolo_core::{Error, Result, Shape};
use kolo_device::cuda::{Epilogue, MatMul, MatMulKind};

use super::{FLOATS, Table, function, gpu, zeros};
use crate::KernelCtx;
use crate::math::elementwise::broadcast_shape;
use crate::math::matmul::misfit;

pub(super) fn add(table: &mut Table) {
    function(table, "MatMul", "T", FLOATS, &[], matmul);
    function(table, "BatchMatMul", "T", FLOATS, &[], batch_matmul);
    function(table, "BatchMatMulV2", "T", FLOATS, &[], batch_matmul);
}

fn matmul(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (a, b) = (ctx.input(0)?.shape(), ctx.input(1)?.shape());
    for (i, shape) in [a, b].into_iter().enumerate() {
        if shape.rank() != 2 {
            return Err(Error::invalid_argument(format!("In[{i}] is not a matrix. Instead it has shape {shape}")));
        }
    }
    product(ctx, ctx.attrs().bool("transpose_a")?, ctx.attrs().bool("transpose_b")?)
}

fn batch_matmul(ctx: &mut KernelCtx<'_>) -> Result<()> {
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
    let kind = if device.allow_tf32() { MatMulKind::Tf32 } else { MatMulKind::Full };
    let n_batch = batch.n_elements();
    let mut call = MatMul {
        m,
        n,
        k: left,
        transpose_a,
        transpose_b,
        batch: n_batch,
        shared_a: n_batch > 1 && batch_a.n_elements() == 1,
        shared_b: n_batch > 1 && batch_b.n_elements() == 1,
        dtype,
        kind,
        epilogue: Epilogue::None,
    };
    let whole = |of: &Shape| of.n_elements() == n_batch || of.n_elements() == 1;
    if !whole(&batch_a) || !whole(&batch_b) {
        return Err(Error::unimplemented(format!(
            "a GPU does not broadcast batches {batch_a} and {batch_b} of matrices against each other"
        )));
    }
    // One right matrix for all: the batch is just more rows.
    if call.shared_b && !transpose_a {
        call = MatMul { m: m * n_batch, batch: 1, shared_a: false, shared_b: false, ..call };
    }
    device.matmul(&call, ctx.input(0)?, ctx.input(1)?, None, &mut out)?;
    ctx.set_output(0, out);
    Ok(())
}
