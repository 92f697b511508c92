//! `FusedBatchNorm` (V2, V3) and its gradients, in kernels of ours: both orders of dimensions, mean and variance in two passes
//! as on a CPU.

use kolo_core::{DType, Error, Result, Shape, Tensor};
use kolo_device::cuda::{Args, CudaDevice, Function, Grid, ProgramKey};

use super::first::Planes;
use super::held::Held;
use crate::KernelCtx;
use crate::cuda::{c_type, gpu, zeros};
use crate::nn::channels::{Channels, is_nchw};

pub(crate) const TYPES: &[DType] = &[DType::F32, DType::F16, DType::BF16];

const NAMES: [&str; 8] = ["sum", "squares", "grad_sums", "mean", "average", "apply", "grad_join", "grad_apply"];

fn kernel(device: &CudaDevice, kind: usize, dtype: DType) -> Result<Function> {
    let key = ProgramKey { family: "batch_norm", op: NAMES[kind], dtypes: [Some(dtype), None, None], variant: 0 };
    device.function(&key, || source(kind, dtype))
}

fn source(kind: usize, dtype: DType) -> String {
    format!("typedef {} T;\n#define KIND {kind}\n{}", c_type(dtype), include_str!("../batch_norm.cu"))
}

/// The vector at an input, which must have one float for each channel.
fn vector<'a>(ctx: &'a KernelCtx<'_>, view: Channels, i: usize) -> Result<&'a Tensor> {
    let tensor = ctx.input(i)?;
    if tensor.dtype() != DType::F32 || tensor.shape().dims() != [view.channels] {
        return Err(Error::invalid_argument(format!(
            "input {i} must have the same number of elements as the channels of x, as float: {}{} vs {}",
            tensor.dtype(),
            tensor.shape(),
            view.channels
        )));
    }
    Ok(tensor)
}

/// The tensor as channels, which must not be fewer than four dimensions.
fn view(ctx: &KernelCtx<'_>, shape: &Shape) -> Result<Channels> {
    if shape.rank() < 4 {
        return Err(Error::invalid_argument(format!("input must be 4 or 5-dimensional {shape}")));
    }
    Channels::of(shape, is_nchw(ctx.attrs())?)
}

/// Parts of each channel's sums, of kernel `kind`: how many, the first sums and the second.
fn sums(
    ctx: &KernelCtx<'_>,
    kind: usize,
    view: Channels,
    x: &Tensor,
    dy: Option<&Tensor>,
    mean: Option<&Tensor>,
) -> Result<(usize, Tensor, Tensor)> {
    let device = gpu(ctx)?;
    let (wide, tall) = if view.inner == 1 { (view.channels.div_ceil(32), 8) } else { (view.channels, 256) };
    // Enough blocks to keep the GPU busy, each with a few rounds of its own.
    let most = view.per_channel().div_ceil(tall * 4).max(1);
    let n_parts = (device.multiprocessors() * 8 / wide.max(1)).clamp(1, most.min(1024));
    let shape = Shape::new(&[n_parts, view.channels])?;
    let (mut first, mut second) = (ctx.allocate(DType::F32, shape.clone())?, ctx.allocate(DType::F32, shape)?);
    let none = ctx.allocate(DType::F32, Shape::new(&[1])?)?;
    if view.channels > 0 {
        let args = Args::new()
            .input(x)
            .input(dy.unwrap_or(x))
            .input(mean.unwrap_or(&none))
            .output(&mut first)
            .output(&mut second)
            .size(view.outer)
            .size(view.channels)
            .size(view.inner);
        let blocks = u32::try_from(wide).map_err(|_| Error::invalid_argument("too many channels for a GPU"))?;
        let grid = Grid { blocks: [blocks, n_parts as u32, 1], threads: [256, 1, 1], shared: 0 };
        device.launch(kernel(device, kind, x.dtype())?, grid, &args)?;
    }
    Ok((n_parts, first, second))
}

/// A channel's mean of what kernel `kind` sums.
fn mean_of(ctx: &KernelCtx<'_>, kind: usize, view: Channels, x: &Tensor, mean: Option<&Tensor>) -> Result<Tensor> {
    let (n_parts, parts, _) = sums(ctx, kind, view, x, None, mean)?;
    let mut out = ctx.allocate(DType::F32, Shape::new(&[view.channels])?)?;
    if view.channels > 0 {
        let device = gpu(ctx)?;
        let args =
            Args::new().input(&parts).output(&mut out).size(n_parts).size(view.channels).f32(view.per_channel() as f32);
        device.launch(kernel(device, 3, DType::F32)?, Grid::over(view.channels), &args)?;
    }
    Ok(out)
}

/// What a norm in training, or its gradient, is asked for.
pub(crate) struct Call<'a> {
    /// Forward (0) or backward (1).
    pub kind: usize,
    pub x: &'a Tensor,
    /// The gradient by the output; `x` again if there is none.
    pub dy: &'a Tensor,
    /// Scale and offset, and the old averages forward, mean and variance backward.
    pub vectors: [&'a Tensor; 4],
    pub factor: f32,
    pub epsilon: f32,
    /// Whether mean and variance depend on the values.
    pub depends: bool,
}

impl Call<'_> {
    /// What kernels are told after their sizes: elements of a channel, factor, epsilon and share.
    pub fn numbers(&self, view: Channels) -> [f32; 4] {
        let n = view.per_channel() as f32;
        [n, self.factor, self.epsilon, if self.depends { 1.0 / n } else { 0.0 }]
    }

    /// By the kernels that are for tensors of this form, if there are some.
    fn run(&self, ctx: &KernelCtx<'_>, view: Channels) -> Result<Option<Made>> {
        let (device, tensors) = (gpu(ctx)?, [self.x, self.dy]);
        let tensors = &tensors[..self.kind + 1];
        if let Some(held) = Held::over(device, view, tensors) {
            return held.run(ctx, self).map(Some);
        }
        Planes::over(device, view, tensors).map(|planes| planes.run(ctx, self)).transpose()
    }
}

/// What comes of it.
pub(crate) struct Made {
    /// The normalised values, or the gradient by them.
    pub out: Tensor,
    /// Mean and variance of the batch and the new averages of both, or the gradients by scale and offset first.
    pub vectors: [Tensor; 4],
    /// A scalar, 0 after a forward pass.
    pub zero: Tensor,
}

impl Made {
    /// Room for it.
    pub fn new(ctx: &KernelCtx<'_>, x: &Tensor, channels: usize) -> Result<Made> {
        let shape = Shape::new(&[channels])?;
        let vector = || ctx.allocate(DType::F32, shape.clone());
        Ok(Made {
            out: ctx.allocate(x.dtype(), x.shape().clone())?,
            vectors: [vector()?, vector()?, vector()?, vector()?],
            zero: ctx.allocate(DType::F32, Shape::scalar())?,
        })
    }
}

pub(crate) fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let x = ctx.input(0)?;
    let view = view(ctx, x.shape())?;
    let (epsilon, training) = (ctx.attrs().float("epsilon")?, ctx.attrs().bool("is_training")?);
    let factor = ctx.attrs().float("exponential_avg_factor")?;
    let (scale, offset, device) = (vector(ctx, view, 1)?, vector(ctx, view, 2)?, gpu(ctx)?);
    // With a factor of 1 the old averages do not count, and may be empty.
    let old = || match factor == 1.0 {
        true => Ok([scale, offset]),
        false => Ok([vector(ctx, view, 3)?, vector(ctx, view, 4)?]),
    };
    if training {
        let [a, b] = old()?;
        let call = Call { kind: 0, x, dy: x, vectors: [scale, offset, a, b], factor, epsilon, depends: true };
        if let Some(made) = call.run(ctx, view)? {
            let [mean, variance, new_mean, new_variance] = made.vectors;
            let outputs = [made.out, new_mean, new_variance, mean, variance, made.zero];
            for (i, tensor) in outputs.into_iter().enumerate().take(ctx.outputs.len()) {
                ctx.set_output(i, tensor);
            }
            return Ok(());
        }
    }
    let (mean, variance, averages) = if training {
        let mean = mean_of(ctx, 0, view, x, None)?;
        let variance = mean_of(ctx, 1, view, x, Some(&mean))?;
        let shape = Shape::new(&[view.channels])?;
        let mut averages = [ctx.allocate(DType::F32, shape.clone())?, ctx.allocate(DType::F32, shape)?];
        let old = old()?;
        if view.channels > 0 {
            let [a, b] = &mut averages;
            let args = Args::new().input(&mean).input(&variance).input(old[0]).input(old[1]).output(a).output(b);
            let args = args.size(view.channels).f32(view.per_channel() as f32).f32(factor);
            device.launch(kernel(device, 4, DType::F32)?, Grid::over(view.channels), &args)?;
        }
        (mean, variance, averages)
    } else {
        let (mean, variance) = (vector(ctx, view, 3)?.clone(), vector(ctx, view, 4)?.clone());
        (mean.clone(), variance.clone(), [mean, variance])
    };
    let mut y = ctx.allocate(x.dtype(), x.shape().clone())?;
    let n = y.n_elements();
    if n > 0 {
        let args = Args::new().input(x).input(scale).input(offset).input(&mean).input(&variance).output(&mut y);
        let args = args.size(n).size(view.channels).size(view.inner).f32(epsilon);
        device.launch(kernel(device, 5, x.dtype())?, Grid::over(n), &args)?;
    }
    let reserve = (ctx.outputs.len() > 5).then(|| zeros(ctx, DType::F32, Shape::scalar())).transpose()?;
    let [a, b] = averages;
    for (i, tensor) in [y, a, b, mean, variance].into_iter().chain(reserve).enumerate() {
        ctx.set_output(i, tensor);
    }
    Ok(())
}

pub(crate) fn backward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (dy, x) = (ctx.input(0)?, ctx.input(1)?);
    if dy.shape() != x.shape() {
        return Err(Error::invalid_argument(format!(
            "x and y_backprop must have same shape, but x has {} and y_backprop {}",
            x.shape(),
            dy.shape()
        )));
    }
    let view = view(ctx, x.shape())?;
    if view.per_channel() == 0 {
        // An empty batch has no variance, and nothing that a gradient could come from.
        let none = ctx.allocate(x.dtype(), x.shape().clone())?;
        let vector = Shape::new(&[view.channels])?;
        let grads = [none, zeros(ctx, DType::F32, vector.clone())?, zeros(ctx, DType::F32, vector)?];
        return finish_backward(ctx, grads);
    }
    let (epsilon, training) = (ctx.attrs().float("epsilon")?, ctx.attrs().bool("is_training")?);
    let (scale, mean, variance) = (vector(ctx, view, 2)?, vector(ctx, view, 3)?, vector(ctx, view, 4)?);
    let device = gpu(ctx)?;
    let vectors = [scale, scale, mean, variance];
    let call = Call { kind: 1, x, dy, vectors, factor: 1.0, epsilon, depends: training };
    if let Some(made) = call.run(ctx, view)? {
        let [scale_grad, offset_grad, ..] = made.vectors;
        return finish_backward(ctx, [made.out, scale_grad, offset_grad]);
    }
    let (n_parts, first, second) = sums(ctx, 2, view, x, Some(dy), Some(mean))?;
    let shape = Shape::new(&[view.channels])?;
    let mut scale_grad = ctx.allocate(DType::F32, shape.clone())?;
    let mut offset_grad = ctx.allocate(DType::F32, shape)?;
    if view.channels > 0 {
        let args = Args::new().input(&first).input(&second).input(variance);
        let args = args.output(&mut scale_grad).output(&mut offset_grad);
        let args = args.size(n_parts).size(view.channels).f32(epsilon);
        device.launch(kernel(device, 6, DType::F32)?, Grid::over(view.channels), &args)?;
    }
    let mut dx = ctx.allocate(x.dtype(), x.shape().clone())?;
    let n = dx.n_elements();
    if n > 0 {
        let share = if training { 1.0 / view.per_channel() as f32 } else { 0.0 };
        let args = Args::new().input(dy).input(x).input(scale).input(mean).input(variance).input(&scale_grad);
        let args = args.input(&offset_grad).output(&mut dx).size(n).size(view.channels).size(view.inner);
        device.launch(kernel(device, 7, x.dtype())?, Grid::over(n), &args.f32(epsilon).f32(share))?;
    }
    finish_backward(ctx, [dx, scale_grad, offset_grad])
}

/// Sets the gradients of values, scale and offset, and two outputs that are empty.
fn finish_backward(ctx: &mut KernelCtx<'_>, grads: [Tensor; 3]) -> Result<()> {
    let none = Shape::new(&[0])?;
    let rest = [ctx.allocate(DType::F32, none.clone())?, ctx.allocate(DType::F32, none)?];
    for (i, tensor) in grads.into_iter().chain(rest).enumerate() {
        ctx.set_output(i, tensor);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_compile() {
        let all = TYPES.iter().flat_map(|&dtype| {
            NAMES.iter().enumerate().map(move |(kind, op)| {
                let key = ProgramKey { family: "batch_norm", op, dtypes: [Some(dtype), None, None], variant: 0 };
                (key, source(kind, dtype))
            })
        });
        crate::cuda::tests::compiles(all);
    }
}
