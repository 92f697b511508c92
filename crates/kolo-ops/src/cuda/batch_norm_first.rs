//! Batch norm in training where channels come first: each channel is a plane of every image. The values are read twice, for mean
//! and variance together and then to be normalised.

use kolo_core::{DType, Result, Shape, Tensor};
use kolo_device::cuda::{Args, CudaDevice, Function, Grid, ProgramKey};

use super::map::is_aligned;
use super::{c_type, gpu};
use crate::KernelCtx;
use crate::nn::channels::Channels;

const NAMES: [&str; 6] = ["sums", "grad_sums", "moments", "grad_join", "apply", "grad_apply"];

/// How the kernels walk over a tensor.
#[derive(Clone, Copy)]
pub(super) struct Planes {
    view: Channels,
    /// Pixels of a load.
    width: usize,
    /// Parts of a channel's sums.
    parts: usize,
}

impl Planes {
    /// Over tensors of this form, if it is one for these kernels.
    pub fn over(device: &CudaDevice, view: Channels, tensors: &[&Tensor]) -> Option<Planes> {
        let n = view.outer.checked_mul(view.channels)?.checked_mul(view.inner)?;
        if view.inner <= 1 || n == 0 {
            return None;
        }
        let size = tensors.first()?.dtype().size()?;
        let mut width = 16 / size.max(1);
        while width > 1 && !(view.inner.is_multiple_of(width) && tensors.iter().all(|x| is_aligned(x, width))) {
            width /= 2;
        }
        // Loads are numbered in 32 bits, with room for a step beyond the last.
        if n / width >= 1 << 30 || view.channels > 1 << 24 {
            return None;
        }
        let most = (view.outer * view.inner / width).div_ceil(256 * 4).clamp(1, 1024);
        let parts = (device.multiprocessors() * 8).div_ceil(view.channels).clamp(1, most);
        Some(Planes { view, width, parts })
    }

    fn kernel(&self, device: &CudaDevice, kind: usize, dtype: DType) -> Result<Function> {
        let (op, variant) = (NAMES[kind], self.width as u32);
        let key = ProgramKey { family: "batch_norm_first", op, dtypes: [Some(dtype), None, None], variant };
        device.function(&key, || source(kind, dtype, self.width))
    }

    /// Parts of two sums for each channel.
    fn sums(&self, ctx: &KernelCtx<'_>, kind: usize, x: &Tensor, dy: &Tensor, mean: &Tensor) -> Result<[Tensor; 2]> {
        let Channels { outer, channels, inner, .. } = self.view;
        let (device, parts) = (gpu(ctx)?, Shape::new(&[self.parts, channels])?);
        let mut sums = [ctx.allocate(DType::F32, parts.clone())?, ctx.allocate(DType::F32, parts)?];
        let [first, second] = &mut sums;
        let args = Args::new().input(x).input(dy).input(mean).output(first).output(second);
        let args = args.size(outer).size(channels).size(inner);
        let grid = Grid { blocks: [channels as u32, self.parts as u32, 1], threads: [256, 1, 1], shared: 0 };
        device.launch(self.kernel(device, kind, x.dtype())?, grid, &args)?;
        drop(args);
        Ok(sums)
    }

    /// Joins sums: four vectors, and what the values are multiplied by and have added. `vectors` are scale, offset, and two more
    /// that the kernel names; `numbers` are factor, epsilon and share.
    fn join(
        &self,
        ctx: &KernelCtx<'_>,
        kind: usize,
        sums: &[Tensor; 2],
        x: &Tensor,
        vectors: [&Tensor; 4],
        numbers: [f32; 3],
    ) -> Result<([Tensor; 4], Tensor)> {
        let channels = self.view.channels;
        let (device, shape) = (gpu(ctx)?, Shape::new(&[channels])?);
        let vector = || ctx.allocate(DType::F32, shape.clone());
        let mut out = [vector()?, vector()?, vector()?, vector()?];
        let mut table = ctx.allocate(DType::F32, Shape::new(&[3, channels])?)?;
        let [a, b, c, d] = &mut out;
        let args = Args::new().input(&sums[0]).input(&sums[1]).input(x);
        let args = vectors.into_iter().fold(args, |args, vector| args.input(vector));
        let args = args.output(a).output(b).output(c).output(d).output(&mut table);
        let args = args.size(self.parts).size(channels).size(self.view.inner).f32(self.view.per_channel() as f32);
        let args = numbers.into_iter().fold(args, |args, number| args.f32(number));
        device.launch(self.kernel(device, kind, x.dtype())?, Grid::blocks(channels.div_ceil(8), 256)?, &args)?;
        drop(args);
        Ok((out, table))
    }

    fn apply(&self, ctx: &KernelCtx<'_>, kind: usize, [dy, x]: [&Tensor; 2], table: &Tensor) -> Result<Tensor> {
        let device = gpu(ctx)?;
        let mut out = ctx.allocate(x.dtype(), x.shape().clone())?;
        let n = out.n_elements();
        let args = Args::new().input(dy).input(x).input(table).output(&mut out).size(n);
        let args = args.size(self.view.channels).size(self.view.inner);
        // A thread each for a few loads: their channels differ, and finding them costs more than starting a thread.
        let blocks = (n / self.width).div_ceil(256 * 2).max(1);
        device.launch(self.kernel(device, kind, x.dtype())?, Grid::blocks(blocks, 256)?, &args)?;
        drop(args);
        Ok(out)
    }

    /// The normalised values, the new averages of mean and variance, and those of the batch; the old ones count if `factor` is
    /// below 1.
    pub fn forward(
        &self,
        ctx: &KernelCtx<'_>,
        x: &Tensor,
        [scale, offset]: [&Tensor; 2],
        old: [&Tensor; 2],
        (factor, epsilon): (f32, f32),
    ) -> Result<[Tensor; 5]> {
        let sums = self.sums(ctx, 0, x, x, old[0])?;
        let vectors = [scale, offset, old[0], old[1]];
        let ([mean, variance, new_mean, new_variance], table) =
            self.join(ctx, 2, &sums, x, vectors, [factor, epsilon, 0.0])?;
        let y = self.apply(ctx, 4, [x, x], &table)?;
        Ok([y, new_mean, new_variance, mean, variance])
    }

    /// The gradients by values, scale and offset; `vectors` are scale, mean and variance.
    pub fn backward(
        &self,
        ctx: &KernelCtx<'_>,
        [dy, x]: [&Tensor; 2],
        [scale, mean, variance]: [&Tensor; 3],
        epsilon: f32,
        training: bool,
    ) -> Result<[Tensor; 3]> {
        let sums = self.sums(ctx, 1, x, dy, mean)?;
        let share = if training { 1.0 / self.view.per_channel() as f32 } else { 0.0 };
        let vectors = [scale, scale, mean, variance];
        let ([scale_grad, offset_grad, ..], table) = self.join(ctx, 3, &sums, x, vectors, [1.0, epsilon, share])?;
        let dx = self.apply(ctx, 5, [dy, x], &table)?;
        Ok([dx, scale_grad, offset_grad])
    }
}

fn source(kind: usize, dtype: DType, width: usize) -> String {
    format!(
        "typedef {} T;\n#define WIDTH {width}\n#define KIND {kind}\n{}",
        c_type(dtype),
        include_str!("batch_norm_first.cu")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_compile() {
        let mut all = Vec::new();
        for (dtype, width) in [(DType::BF16, 8), (DType::F16, 1), (DType::F32, 4)] {
            for (kind, op) in NAMES.into_iter().enumerate() {
                let key = ProgramKey { family: "batch_norm_first", op, dtypes: [Some(dtype), None, None], variant: 0 };
                all.push((key, source(kind, dtype, width)));
            }
        }
        super::super::tests::compiles(all);
    }
}
