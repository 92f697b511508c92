//! Ops over rows of the last dimension: softmax and its logarithm, the cross entropies, layer norm.

use kolo_core::{DType, Error, Result, Shape, Tensor};
use kolo_device::cuda::{Args, CudaDevice, Function, Grid, ProgramKey};

use super::map::{Expression, run};
use super::{c_type, gpu, zeros};
use crate::KernelCtx;
use crate::math::elementwise::broadcast_shape;

const NAMES: [&str; 7] = [
    "softmax",
    "log_softmax",
    "cross_entropy",
    "sparse_cross_entropy",
    "layer_norm",
    "layer_norm_grad",
    "layer_norm_sums",
];

fn kernel(device: &CudaDevice, kind: usize, dtype: DType, label: Option<DType>) -> Result<Function> {
    let key = ProgramKey { family: "rows", op: NAMES[kind], dtypes: [Some(dtype), label, None], variant: 0 };
    device.function(&key, || source(kind, dtype, label))
}

fn source(kind: usize, dtype: DType, label: Option<DType>) -> String {
    format!(
        "typedef {} T;\ntypedef {} L;\ntypedef Wide<T>::type W;\n#define KIND {kind}\n{}",
        c_type(dtype),
        c_type(label.unwrap_or(DType::I64)),
        include_str!("rows.cu")
    )
}

/// A block for each row, of as many threads as a row keeps busy.
fn rows_grid(n_rows: usize, n: usize) -> Result<Grid> {
    let threads = match n {
        0..=128 => 32,
        129..=512 => 128,
        513..=4096 => 256,
        _ => 1024,
    };
    Grid::blocks(n_rows, threads)
}

pub(crate) fn softmax(ctx: &mut KernelCtx<'_>, kind: usize) -> Result<()> {
    let (dtype, shape) = (ctx.input(0)?.dtype(), ctx.input(0)?.shape().clone());
    let Some(&n) = shape.last() else {
        return Err(Error::invalid_argument("logits must have >= 1 dimension, got 0"));
    };
    let device = gpu(ctx)?;
    let mut out = ctx.allocate(dtype, shape.clone())?;
    if shape.n_elements() > 0 {
        let args = Args::new().input(ctx.input(0)?).output(&mut out).size(n);
        device.launch(kernel(device, kind, dtype, None)?, rows_grid(shape.n_elements() / n, n)?, &args)?;
    }
    ctx.set_output(0, out);
    Ok(())
}

pub(crate) fn cross_entropy(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (a, b) = (ctx.input(0)?.shape().clone(), ctx.input(1)?.shape().clone());
    let shape = broadcast_shape(&a, &b).map_err(|_| {
        Error::invalid_argument(format!("logits and labels must be broadcastable: logits_size={a} labels_size={b}"))
    })?;
    let &[n_rows, n] = shape.dims() else {
        return Err(Error::invalid_argument(format!(
            "logits and labels must be either 2-dimensional, or broadcasted to be 2-dimensional, found {shape}"
        )));
    };
    let (dtype, device) = (ctx.input(0)?.dtype(), gpu(ctx)?);
    let whole = |ctx: &KernelCtx<'_>, i: usize| -> Result<Tensor> {
        let tensor = ctx.input(i)?;
        if *tensor.shape() == shape {
            return Ok(tensor.clone());
        }
        let mut wide = ctx.allocate(dtype, shape.clone())?;
        run(device, Expression { name: "copy", text: "x0" }, &[Some(tensor)], &mut wide, &[])?;
        Ok(wide)
    };
    let mut loss = match shape.n_elements() {
        0 => zeros(ctx, dtype, Shape::new(&[n_rows])?)?,
        _ => ctx.allocate(dtype, Shape::new(&[n_rows])?)?,
    };
    let (weights, rest) = weights(ctx, n_rows)?;
    let mut backprop = ctx.allocate(dtype, shape.clone())?;
    if shape.n_elements() > 0 {
        let (features, labels) = (whole(ctx, 0)?, whole(ctx, 1)?);
        let args = Args::new().input(&features).input(&labels).output(&mut loss).output(&mut backprop).size(n);
        let args = weighted(args, weights.as_ref());
        device.launch(kernel(device, 2, dtype, None)?, rows_grid(n_rows, n)?, &args)?;
    }
    let backprop = times(ctx, backprop, rest)?;
    ctx.set_output(0, loss);
    ctx.set_output(1, backprop);
    Ok(())
}

pub(crate) fn sparse_cross_entropy(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let shape = ctx.input(0)?.shape().clone();
    let &[n_rows, n] = shape.dims() else {
        return Err(Error::invalid_argument(format!("logits must be 2-D, but got shape {shape}")));
    };
    if ctx.input(1)?.shape().dims() != [n_rows] {
        return Err(Error::invalid_argument(format!(
            "logits and labels must have the same first dimension, got logits shape {shape} and labels shape {}",
            ctx.input(1)?.shape()
        )));
    }
    let (dtype, labels, device) = (ctx.input(0)?.dtype(), ctx.input(1)?.dtype(), gpu(ctx)?);
    let mut loss = ctx.allocate(dtype, Shape::new(&[n_rows])?)?;
    let (weights, rest) = weights(ctx, n_rows)?;
    let mut backprop = ctx.allocate(dtype, shape.clone())?;
    if shape.n_elements() > 0 {
        let args =
            Args::new().input(ctx.input(0)?).input(ctx.input(1)?).output(&mut loss).output(&mut backprop).size(n);
        let args = weighted(args, weights.as_ref());
        device.launch(kernel(device, 3, dtype, Some(labels))?, rows_grid(n_rows, n)?, &args)?;
    }
    let backprop = times(ctx, backprop, rest)?;
    ctx.set_output(0, loss);
    ctx.set_output(1, backprop);
    Ok(())
}

/// What the backprop is multiplied by, if the op has such an input: in the kernel if it is one number for each row or for all,
/// or afterwards.
fn weights(ctx: &KernelCtx<'_>, n_rows: usize) -> Result<(Option<Tensor>, Option<Tensor>)> {
    if ctx.n_inputs() < 3 {
        return Ok((None, None));
    }
    let weights = ctx.input(2)?.clone();
    match weights.shape().dims() {
        [] | [1] | [1, 1] => Ok((Some(weights), None)),
        [rows, 1] if *rows == n_rows => Ok((Some(weights), None)),
        _ => Ok((None, Some(weights))),
    }
}

fn weighted<'a>(args: Args<'a>, weights: Option<&'a Tensor>) -> Args<'a> {
    match weights {
        Some(weights) => args.input(weights).i64(i64::from(weights.n_elements() > 1)),
        None => args.i64(0).i64(0),
    }
}

fn times(ctx: &KernelCtx<'_>, backprop: Tensor, rest: Option<Tensor>) -> Result<Tensor> {
    let Some(rest) = rest else { return Ok(backprop) };
    let shape = broadcast_shape(backprop.shape(), rest.shape())?;
    let mut out = ctx.allocate(backprop.dtype(), shape)?;
    run(gpu(ctx)?, Expression { name: "Mul", text: "x0 * x1" }, &[Some(&rest), Some(&backprop)], &mut out, &[])?;
    Ok(out)
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
pub(super) fn long_layer_norm(ctx: &mut KernelCtx<'_>) -> Result<()> {
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
        device.launch(kernel(device, 4, dtype, None)?, rows_grid(n_rows, n)?, &args)?;
    }
    ctx.set_output(0, out);
    Ok(())
}

/// The gradient of layer norm for rows of any length.
pub(super) fn long_layer_norm_grad(ctx: &mut KernelCtx<'_>) -> Result<()> {
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
    device.launch(kernel(device, 5, dtype, None)?, rows_grid(n_rows, n)?, &args)?;
    drop(args);
    // Enough parts of the rows that the card is busy; they are joined in order.
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
        device.launch(kernel(device, 6, dtype, None)?, grid, &args)?;
    }
    ctx.set_output(0, dx);
    for (i, sums) in sums.iter().enumerate() {
        let total = super::reduce::sum_rows(ctx, sums, parts, n, dtype)?;
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
                let key = ProgramKey { family: "rows", op, dtypes: [Some(dtype), None, None], variant: 0 };
                (key, source(kind, dtype, Some(DType::I32)))
            })
        });
        super::super::tests::compiles(all);
    }
}
