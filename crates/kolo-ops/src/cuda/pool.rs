//! `MaxPool`, `AvgPool` and their gradients, in kernels of ours: any padding, both orders of dimensions, and gradients that
//! are gathered rather than scattered, so that a step gives the same numbers each time.

use kolo_core::{DType, Error, Result, Shape, Tensor};
use kolo_device::cuda::{Args, CudaDevice, Function, Grid, ProgramKey};

use super::{FLOATS, Table, c_type, function, gpu, zeros};
use crate::KernelCtx;
use crate::nn::pool::{Pool, depth_group};
use crate::nn::window::Axis;

pub(super) fn add(table: &mut Table) {
    function(table, "MaxPool", "T", FLOATS, &[], |ctx| forward(ctx, 0));
    function(table, "MaxPoolGrad", "T", FLOATS, &[], max_backward);
    function(table, "AvgPool", "T", FLOATS, &[], |ctx| forward(ctx, 2));
    function(table, "AvgPoolGrad", "T", FLOATS, &["orig_input_shape"], avg_backward);
}

const NAMES: [&str; 4] = ["max", "max_grad", "avg", "avg_grad"];

fn kernel(device: &CudaDevice, kind: usize, dtype: DType) -> Result<Function> {
    let key = ProgramKey { family: "pool", op: NAMES[kind], dtypes: [Some(dtype), None, None], variant: 0 };
    device.function(&key, || source(kind, dtype))
}

fn source(kind: usize, dtype: DType) -> String {
    format!(
        "typedef {} T;\ntypedef Wide<T>::type W;\n#define INFINITE ((W)__int_as_float(0x7f800000))\n#define KIND {kind}\n{}",
        c_type(dtype),
        include_str!("pool.cu")
    )
}

fn words(axis: &Axis) -> [u64; 6] {
    let Axis { input, output, kernel, stride, dilation, before } = *axis;
    [input, output, kernel, stride, dilation, before].map(|word| word as u64)
}

/// Enqueues a kernel over all elements of `out`.
fn launch(ctx: &KernelCtx<'_>, kind: usize, inputs: &[&Tensor], out: &mut Tensor, pool: &Pool) -> Result<()> {
    let (device, n) = (gpu(ctx)?, out.n_elements());
    let kernel = kernel(device, kind, out.dtype())?;
    let args = inputs.iter().fold(Args::new(), |args, &tensor| args.input(tensor));
    let args = args.output(out).size(n).size(pool.channels).words(&words(&pool.h)).words(&words(&pool.w));
    device.launch(kernel, Grid::over(n), &args)
}

fn no_depth(ctx: &KernelCtx<'_>, shape: &Shape) -> Result<()> {
    match depth_group(ctx.attrs(), shape)? {
        Some(_) => Err(Error::unimplemented("a GPU does not pool across channels; place the op on a CPU")),
        None => Ok(()),
    }
}

fn forward(ctx: &mut KernelCtx<'_>, kind: usize) -> Result<()> {
    let input = ctx.input(0)?;
    no_depth(ctx, input.shape())?;
    let pool = Pool::new(ctx.attrs(), input.shape())?;
    let mut out = ctx.allocate(input.dtype(), pool.shape.clone())?;
    if out.n_elements() > 0 {
        launch(ctx, kind, &[input], &mut out, &pool)?;
    }
    ctx.set_output(0, out);
    Ok(())
}

fn check(name: &str, found: &Shape, pool: &Pool) -> Result<()> {
    match *found == pool.shape {
        true => Ok(()),
        false => Err(Error::invalid_argument(format!("Expected {name} shape to be {}, but got {found}", pool.shape))),
    }
}

fn max_backward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let input = ctx.input(0)?;
    no_depth(ctx, input.shape())?;
    let pool = Pool::new(ctx.attrs(), input.shape())?;
    check("orig_output", ctx.input(1)?.shape(), &pool)?;
    check("grad", ctx.input(2)?.shape(), &pool)?;
    backward(ctx, 1, &[input, ctx.input(1)?, ctx.input(2)?], input.shape().clone(), &pool)
        .map(|out| ctx.set_output(0, out))
}

fn avg_backward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let shape = Shape::from_signed(&ctx.integers(0)?)?;
    let pool = Pool::new(ctx.attrs(), &shape)?;
    let grad = ctx.input(1)?;
    check("grad", grad.shape(), &pool)?;
    backward(ctx, 3, &[grad], shape, &pool).map(|out| ctx.set_output(0, out))
}

fn backward(ctx: &KernelCtx<'_>, kind: usize, inputs: &[&Tensor], shape: Shape, pool: &Pool) -> Result<Tensor> {
    if pool.shape.n_elements() == 0 || shape.n_elements() == 0 {
        return zeros(ctx, inputs[0].dtype(), shape);
    }
    let mut out = ctx.allocate(inputs[0].dtype(), shape)?;
    launch(ctx, kind, inputs, &mut out, pool)?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_compile() {
        let all = FLOATS.iter().flat_map(|&dtype| {
            NAMES.iter().enumerate().map(move |(kind, op)| {
                let key = ProgramKey { family: "pool", op, dtypes: [Some(dtype), None, None], variant: 0 };
                (key, source(kind, dtype))
            })
        });
        super::super::tests::compiles(all);
    }
}
