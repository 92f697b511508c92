//! Layer norm of rows that a warp cannot hold, and of doubles, on a GPU: a block of threads for each row.

use kolo_core::{DType, Error, Result, Shape};
use kolo_device::cuda::{Args, CudaDevice, Function, Grid, ProgramKey};

use crate::KernelCtx;
use crate::cuda::reduce::sum_rows;
use crate::cuda::rows::{rows_grid, rows_source};
use crate::cuda::{gpu, zeros};

const NAMES: [&str; 3] = ["forward", "backward", "sums"];
const TEXT: &str = include_str!("long.cu");

fn kernel(device: &CudaDevice, kind: usize, dtype: DType) -> Result<Function> {
    let key = ProgramKey { family: "long_layer_norm", op: NAMES[kind], dtypes: [Some(dtype), None, None], variant: 0 };
    device.function(&key, || rows_source(kind, dtype, None, TEXT))
}

/// Rows and their length; scale and offset must fit.
pub(super) fn layer(ctx: &KernelCtx<'_>, x: usize, vectors: &[usize]) -> Result<(usize, usize)> {
    let shape = ctx.input(x)?.shape();
    let Some(&n) = shape.last() else { return Err(Error::invalid_argument("a scalar has no rows to normalise")) };
    for &i in vectors {
        if ctx.input(i)?.shape().dims() != [n] {
            return Err(Error::invalid_argument(format!(
                "rows of {n} need scale and offset of that length, found {}",
                ctx.input(i)?.shape()
            )));
        }
    }
    Ok((shape.n_elements().checked_div(n).unwrap_or(0), n))
}

/// Layer norm of rows of any length.
pub(super) fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (n_rows, n) = layer(ctx, 0, &[1, 2])?;
    let (dtype, device) = (ctx.input(0)?.dtype(), gpu(ctx)?);
    let mut out = ctx.allocate(dtype, ctx.input(0)?.shape().clone())?;
    if n_rows > 0 {
        let args = Args::new()
            .input(ctx.input(0)?)
            .input(ctx.input(1)?)
            .input(ctx.input(2)?)
            .output(&mut out)
            .size(n)
            .f32(ctx.attrs().float("epsilon")?);
        device.launch(kernel(device, 0, dtype)?, rows_grid(n_rows, n)?, &args)?;
    }
    ctx.set_output(0, out);
    Ok(())
}

/// The gradient of layer norm for rows of any length.
pub(super) fn backward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (n_rows, n) = layer(ctx, 1, &[2])?;
    if ctx.input(0)?.shape() != ctx.input(1)?.shape() {
        return Err(Error::invalid_argument(format!(
            "dy has shape {}, x has shape {}",
            ctx.input(0)?.shape(),
            ctx.input(1)?.shape()
        )));
    }
    let (dtype, device) = (ctx.input(0)?.dtype(), gpu(ctx)?);
    let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let mut dx = ctx.allocate(dtype, ctx.input(1)?.shape().clone())?;
    let vector = Shape::new(&[n])?;
    if n_rows == 0 {
        let (a, b) = (zeros(ctx, dtype, vector.clone())?, zeros(ctx, dtype, vector)?);
        ctx.set_output(0, dx);
        ctx.set_output(1, a);
        ctx.set_output(2, b);
        return Ok(());
    }
    let mut stats = ctx.allocate(wide, Shape::new(&[n_rows, 2])?)?;
    let args = Args::new()
        .input(ctx.input(0)?)
        .input(ctx.input(1)?)
        .input(ctx.input(2)?)
        .output(&mut dx)
        .output(&mut stats)
        .size(n)
        .f32(ctx.attrs().float("epsilon")?);
    device.launch(kernel(device, 1, dtype)?, rows_grid(n_rows, n)?, &args)?;
    drop(args);
    // Enough parts of the rows to keep the GPU busy; they are joined in order.
    const THREADS: usize = 64;
    let columns = n.div_ceil(THREADS);
    let parts = (device.multiprocessors() * 4 / columns).clamp(1, n_rows.div_ceil(16)).min(512);
    let mut sums = [ctx.allocate(wide, Shape::new(&[parts, n])?)?, ctx.allocate(wide, Shape::new(&[parts, n])?)?];
    {
        let [a, b] = &mut sums;
        let args = Args::new()
            .input(ctx.input(0)?)
            .input(ctx.input(1)?)
            .input(&stats)
            .output(a)
            .output(b)
            .size(n)
            .size(n_rows);
        let grid = Grid { blocks: [columns as u32, parts as u32, 1], threads: [THREADS as u32, 1, 1], shared: 0 };
        device.launch(kernel(device, 2, dtype)?, grid, &args)?;
    }
    ctx.set_output(0, dx);
    for (i, sums) in sums.iter().enumerate() {
        let total = sum_rows(ctx, sums, parts, n, dtype)?;
        ctx.set_output(i + 1, total);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::FLOATS;

    #[test]
    fn sources_compile() {
        let all = FLOATS.iter().flat_map(|&dtype| {
            NAMES.iter().enumerate().map(move |(kind, op)| {
                let key = ProgramKey { family: "long_layer_norm", op, dtypes: [Some(dtype), None, None], variant: 0 };
                (key, rows_source(kind, dtype, Some(DType::I32), TEXT))
            })
        });
        crate::cuda::tests::compiles(all);
    }
}
