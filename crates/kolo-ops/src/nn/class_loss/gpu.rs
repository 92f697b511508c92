//! `KoloClassLoss` and its gradient: each reads the logits once, and the gradient takes their place.

use kolo_core::{DType, Result, Shape};
use kolo_device::cuda::{Args, CudaDevice, Function, Grid, ProgramKey};

use crate::KernelCtx;
use crate::cuda::rows::row_width;
use crate::cuda::{c_type, gpu};
use crate::nn::class_loss::sizes;

pub(crate) const TYPES: &[DType] = &[DType::F32, DType::F16, DType::BF16];

const NAMES: [&str; 2] = ["loss", "grad"];

fn source(kind: usize, dtype: DType, labels: DType, width: usize) -> String {
    format!(
        "typedef {} T;\ntypedef {} L;\n#define WIDTH {width}\n#define KIND {kind}\n{}",
        c_type(dtype),
        c_type(labels),
        include_str!("../class_loss.cu")
    )
}

fn kernel(device: &CudaDevice, kind: usize, dtype: DType, labels: DType, width: usize) -> Result<Function> {
    let dtypes = [Some(dtype), Some(labels), None];
    let key = ProgramKey { family: "class_loss", op: NAMES[kind], dtypes, variant: width as u32 };
    device.function(&key, || source(kind, dtype, labels, width))
}

fn threads(n: usize, width: usize) -> usize {
    (n / width).next_multiple_of(32).clamp(32, 512)
}

pub(crate) fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (n_rows, n) = sizes(ctx, 0, &[1])?;
    let (logits, labels, device) = (ctx.input(0)?, ctx.input(1)?, gpu(ctx)?);
    let rows = Shape::new(&[n_rows])?;
    let (mut loss, mut lse) = (ctx.allocate(DType::F32, rows.clone())?, ctx.allocate(DType::F32, rows)?);
    if n_rows > 0 {
        let width = row_width(&[logits], n);
        let kernel = kernel(device, 0, logits.dtype(), labels.dtype(), width)?;
        let args = Args::new().input(logits).input(labels).output(&mut loss).output(&mut lse).size(n);
        device.launch(kernel, Grid::blocks(n_rows, threads(n, width))?, &args)?;
    }
    ctx.set_output(0, loss);
    ctx.set_output(1, lse);
    Ok(())
}

pub(crate) fn backward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (n_rows, n) = sizes(ctx, 1, &[0, 2, 3])?;
    let (dtype, shape) = (ctx.input(1)?.dtype(), ctx.input(1)?.shape().clone());
    let (mut out, reused) = ctx.reuse_or_allocate(1, dtype, shape)?;
    let device = gpu(ctx)?;
    if out.n_elements() > 0 {
        let width = match reused {
            true => row_width(&[&out], n),
            false => row_width(&[&out, ctx.input(1)?], n),
        };
        let (dloss, labels, lse) = (ctx.input(0)?, ctx.input(2)?, ctx.input(3)?);
        let kernel = kernel(device, 1, dtype, labels.dtype(), width)?;
        let args = Args::new().input(dloss);
        let args = if reused { args.i64(0) } else { args.input(ctx.input(1)?) };
        let args = args.input(labels).input(lse).output(&mut out).size(n);
        device.launch(kernel, Grid::blocks(n_rows, threads(n, width))?, &args)?;
    }
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_compile() {
        let all = TYPES.iter().flat_map(|&dtype| {
            NAMES.iter().enumerate().map(move |(kind, op)| {
                let dtypes = [Some(dtype), Some(DType::I64), None];
                let key = ProgramKey { family: "class_loss", op, dtypes, variant: 4 };
                (key, source(kind, dtype, DType::I64, 4))
            })
        });
        crate::cuda::tests::compiles(all);
    }
}
