//! The cross entropies on a GPU, and the fused forms, which multiply the backprop by the gradient of the loss.

use kolo_core::{DType, Error, Result, Shape, Tensor};
use kolo_device::cuda::{Args, CudaDevice, Function, ProgramKey};

use crate::KernelCtx;
use crate::cuda::map::{Expression, run};
use crate::cuda::rows::{rows_grid, rows_source};
use crate::cuda::{gpu, zeros};
use crate::math::elementwise::broadcast_shape;

const NAMES: [&str; 2] = ["dense", "sparse"];
const TEXT: &str = include_str!("../cross_entropy.cu");

fn kernel(device: &CudaDevice, kind: usize, dtype: DType, label: Option<DType>) -> Result<Function> {
    let key = ProgramKey { family: "cross_entropy", op: NAMES[kind], dtypes: [Some(dtype), label, None], variant: 0 };
    device.function(&key, || rows_source(kind, dtype, label, TEXT))
}

/// Labels are probabilities.
pub(crate) fn dense(ctx: &mut KernelCtx<'_>) -> Result<()> {
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
        device.launch(kernel(device, 0, dtype, None)?, rows_grid(n_rows, n)?, &args)?;
    }
    let backprop = times(ctx, backprop, rest)?;
    ctx.set_output(0, loss);
    ctx.set_output(1, backprop);
    Ok(())
}

/// Labels are class numbers.
pub(crate) fn sparse(ctx: &mut KernelCtx<'_>) -> Result<()> {
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
        device.launch(kernel(device, 1, dtype, Some(labels))?, rows_grid(n_rows, n)?, &args)?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::FLOATS;

    #[test]
    fn sources_compile() {
        let all = FLOATS.iter().flat_map(|&dtype| {
            NAMES.iter().enumerate().map(move |(kind, op)| {
                let key = ProgramKey { family: "cross_entropy", op, dtypes: [Some(dtype), None, None], variant: 0 };
                (key, rows_source(kind, dtype, Some(DType::I32), TEXT))
            })
        });
        crate::cuda::tests::compiles(all);
    }
}
