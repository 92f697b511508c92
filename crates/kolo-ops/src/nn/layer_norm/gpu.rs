//! `KoloLayerNorm` and its gradient. Rows that a warp can hold are read once; longer ones, and doubles, go to `long.rs`.

use kolo_core::{DType, Error, Result, Shape, Tensor};
use kolo_device::cuda::{Args, CudaDevice, Function, Grid, ProgramKey};

use super::long::{self, layer};
use crate::cuda::map::{Expression, run};
use crate::cuda::rows::row_width;
use crate::cuda::{c_type, gpu};
use crate::{KernelCtx, Value};

const NAMES: [&str; 3] = ["forward", "backward", "join"];
/// Most packs in a lane.
const MOST_PACKS: usize = 4;

fn source(kind: usize, dtype: DType, width: usize, packs: usize) -> String {
    format!(
        "typedef {} T;\n#define WIDTH {width}\n#define PACKS {packs}\n#define KIND {kind}\n{}",
        c_type(dtype),
        include_str!("../layer_norm.cu")
    )
}

fn kernel(device: &CudaDevice, kind: usize, dtype: DType, (width, packs): (usize, usize)) -> Result<Function> {
    let variant = (width * 16 + packs) as u32;
    let key = ProgramKey { family: "layer_norm", op: NAMES[kind], dtypes: [Some(dtype), None, None], variant };
    device.function(&key, || source(kind, dtype, width, packs))
}

/// How a warp holds a row, if it can.
fn packs(tensors: &[&Tensor], n_rows: usize, n: usize) -> Option<(usize, usize)> {
    let width = row_width(tensors, n);
    let packs = n.div_ceil(32 * width);
    let is_double = tensors.iter().any(|tensor| tensor.dtype() == DType::F64);
    (width > 1 && (1..=MOST_PACKS).contains(&packs) && n_rows > 0 && !is_double).then_some((width, packs))
}

pub(crate) fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (n_rows, n) = layer(ctx, 0, &[1, 2])?;
    let (x, scale, offset) = (ctx.input(0)?, ctx.input(1)?, ctx.input(2)?);
    let Some(held) = packs(&[x, scale, offset], n_rows, n) else { return long::forward(ctx) };
    let device = gpu(ctx)?;
    let mut out = ctx.allocate(x.dtype(), x.shape().clone())?;
    let args = Args::new().input(x).input(scale).input(offset).output(&mut out);
    let args = args.size(n_rows).size(n).f32(ctx.attrs().float("epsilon")?);
    // Several rows to a warp: scale and offset are read once for all of them.
    let blocks = n_rows.div_ceil(8).min(device.multiprocessors() * 8);
    device.launch(kernel(device, 0, x.dtype(), held)?, Grid::blocks(blocks, 256)?, &args)?;
    ctx.set_output(0, out);
    Ok(())
}

/// The gradient; the fused form has a fourth input, which is added to the first output.
pub(crate) fn backward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (n_rows, n) = layer(ctx, 1, &[2])?;
    let (dy, x, scale) = (ctx.input(0)?, ctx.input(1)?, ctx.input(2)?);
    let plus = if ctx.n_inputs() > 3 { Some(ctx.input(3)?) } else { None };
    if let Some(plus) = plus.filter(|plus| plus.shape() != x.shape()) {
        return Err(Error::invalid_argument(format!(
            "Inputs to operation AddN must have the same size and shape: {} != {}",
            x.shape(),
            plus.shape()
        )));
    }
    let mut tensors = vec![dy, x, scale];
    tensors.extend(plus);
    let held = packs(&tensors, n_rows, n).filter(|_| dy.shape() == x.shape());
    let Some(held) = held else {
        let plus = plus.cloned();
        long::backward(ctx)?;
        return plus.map_or(Ok(()), |plus| add_to_first(ctx, &plus));
    };
    let (device, dtype) = (gpu(ctx)?, x.dtype());
    let mut dx = ctx.allocate(dtype, x.shape().clone())?;
    let blocks = n_rows.div_ceil(16).clamp(1, device.multiprocessors() * 2);
    let parts = Shape::new(&[blocks, n])?;
    let (mut first, mut second) = (ctx.allocate(DType::F32, parts.clone())?, ctx.allocate(DType::F32, parts)?);
    let args = Args::new().input(dy).input(x).input(scale);
    let args = match plus {
        Some(plus) => args.input(plus),
        None => args.i64(0),
    };
    let args = args.output(&mut dx).output(&mut first).output(&mut second);
    let args = args.size(n_rows).size(n).f32(ctx.attrs().float("epsilon")?);
    device.launch(kernel(device, 1, dtype, held)?, Grid::blocks(blocks, 256)?, &args)?;
    drop(args);
    let vector = Shape::new(&[n])?;
    let (mut dscale, mut doffset) = (ctx.allocate(dtype, vector.clone())?, ctx.allocate(dtype, vector)?);
    let args = Args::new().input(&first).input(&second).output(&mut dscale).output(&mut doffset).size(blocks).size(n);
    let grid = Grid { blocks: [n.div_ceil(32) as u32, 2, 1], threads: [32, 32, 1], shared: 0 };
    device.launch(kernel(device, 2, dtype, held)?, grid, &args)?;
    drop(args);
    for (i, tensor) in [dx, dscale, doffset].into_iter().enumerate() {
        ctx.set_output(i, tensor);
    }
    Ok(())
}

/// Adds a tensor to the first output.
fn add_to_first(ctx: &mut KernelCtx<'_>, plus: &Tensor) -> Result<()> {
    let Value::Tensor(mut dx) = ctx.outputs[0].take() else {
        return Err(Error::internal("a gradient without a value"));
    };
    run(gpu(ctx)?, Expression { name: "AddV2", text: "x0 + x1" }, &[None, Some(plus)], &mut dx, &[])?;
    ctx.set_output(0, dx);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_compile() {
        let mut all = Vec::new();
        for (dtype, width) in [(DType::BF16, 8), (DType::F16, 8), (DType::F32, 4)] {
            for (kind, op) in NAMES.into_iter().enumerate() {
                for packs in 1..=MOST_PACKS {
                    let variant = (width * 16 + packs) as u32;
                    let key = ProgramKey { family: "layer_norm", op, dtypes: [Some(dtype), None, None], variant };
                    all.push((key, source(kind, dtype, width, packs)));
                }
            }
        }
        crate::cuda::tests::compiles(all);
    }
}
