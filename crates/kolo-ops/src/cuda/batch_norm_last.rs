//! Batch norm where channels come last and are neighbours by the packs of a load: the usual case in training. The values are read
//! twice, for mean and variance together and then to be normalised.

use kolo_core::{DType, Result, Shape, Tensor};
use kolo_device::cuda::{Args, CudaDevice, Function, Grid, ProgramKey};

use super::class_loss::row_width;
use super::{c_type, gpu};
use crate::KernelCtx;
use crate::nn::channels::Channels;

const NAMES: [&str; 6] = ["sums", "grad_sums", "moments", "grad_join", "apply", "grad_apply"];

/// How the kernels walk over a tensor.
#[derive(Clone, Copy)]
pub(super) struct Walk {
    rows: usize,
    channels: usize,
    /// Channels of a load.
    width: usize,
    /// Loads side by side in a block.
    wide: usize,
    /// Blocks side by side, and one below the other.
    blocks: [usize; 2],
}

impl Walk {
    /// Over tensors of this form, if it is one for these kernels.
    pub fn over(device: &CudaDevice, view: Channels, tensors: &[&Tensor]) -> Option<Walk> {
        let (channels, rows) = (view.channels, view.per_channel());
        let width = row_width(tensors, channels);
        if view.inner != 1 || width == 1 || rows == 0 || channels == 0 {
            return None;
        }
        let packs = channels / width;
        // A power of two, so that what is below each other in a block can be halved.
        let wide = 1usize << packs.min(64).ilog2();
        let across = packs.div_ceil(wide);
        let most = rows.div_ceil(256 / wide * 4);
        let down = (device.multiprocessors() * 6 / across).clamp(1, most.clamp(1, 1024));
        Some(Walk { rows, channels, width, wide, blocks: [across, down] })
    }

    fn grid(&self) -> Grid {
        Grid { blocks: [self.blocks[0] as u32, self.blocks[1] as u32, 1], threads: [256, 1, 1], shared: 0 }
    }

    fn join_grid(&self) -> Grid {
        Grid { blocks: [self.channels.div_ceil(32) as u32, 1, 1], threads: [32, 32, 1], shared: 0 }
    }

    fn kernel(&self, device: &CudaDevice, kind: usize, dtype: DType) -> Result<Function> {
        let (op, variant) = (NAMES[kind], self.width as u32);
        let key = ProgramKey { family: "batch_norm_last", op, dtypes: [Some(dtype), None, None], variant };
        device.function(&key, || source(kind, dtype, self.width))
    }

    /// Parts of two sums for each channel.
    fn sums(&self, ctx: &KernelCtx<'_>, kind: usize, x: &Tensor, dy: &Tensor, mean: &Tensor) -> Result<[Tensor; 2]> {
        let (device, parts) = (gpu(ctx)?, Shape::new(&[self.blocks[1], self.channels])?);
        let mut sums = [ctx.allocate(DType::F32, parts.clone())?, ctx.allocate(DType::F32, parts)?];
        let [first, second] = &mut sums;
        let args = Args::new().input(x).input(dy).input(mean).output(first).output(second);
        let args = args.size(self.rows).size(self.channels).size(self.wide);
        device.launch(self.kernel(device, kind, x.dtype())?, self.grid(), &args)?;
        drop(args);
        Ok(sums)
    }

    fn join(
        &self,
        ctx: &KernelCtx<'_>,
        kind: usize,
        sums: &[Tensor; 2],
        x: &Tensor,
        old: [&Tensor; 2],
        factor: f32,
    ) -> Result<[Tensor; 4]> {
        let (device, shape) = (gpu(ctx)?, Shape::new(&[self.channels])?);
        let vector = || ctx.allocate(DType::F32, shape.clone());
        let mut out = [vector()?, vector()?, vector()?, vector()?];
        let [a, b, c, d] = &mut out;
        let args = Args::new().input(&sums[0]).input(&sums[1]).input(x).input(old[0]).input(old[1]);
        let args = args.output(a).output(b).output(c).output(d).size(self.blocks[1]).size(self.channels);
        let args = args.f32(self.rows as f32).f32(factor);
        device.launch(self.kernel(device, kind, x.dtype())?, self.join_grid(), &args)?;
        drop(args);
        Ok(out)
    }

    /// Mean and variance, and the new averages of both; the old ones count if `factor` is below 1.
    pub fn moments(&self, ctx: &KernelCtx<'_>, x: &Tensor, old: [&Tensor; 2], factor: f32) -> Result<[Tensor; 4]> {
        let sums = self.sums(ctx, 0, x, x, old[0])?;
        self.join(ctx, 2, &sums, x, old, factor)
    }

    /// The normalised values; `vectors` are scale, offset, mean and variance.
    pub fn apply(&self, ctx: &KernelCtx<'_>, x: &Tensor, vectors: [&Tensor; 4], epsilon: f32) -> Result<Tensor> {
        let device = gpu(ctx)?;
        let mut y = ctx.allocate(x.dtype(), x.shape().clone())?;
        let args = vectors.into_iter().fold(Args::new().input(x), |args, vector| args.input(vector));
        let args = args.output(&mut y).size(self.rows).size(self.channels).size(self.wide).f32(epsilon);
        device.launch(self.kernel(device, 4, x.dtype())?, self.grid(), &args)?;
        drop(args);
        Ok(y)
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
        let device = gpu(ctx)?;
        let sums = self.sums(ctx, 1, x, dy, mean)?;
        let [scale_grad, offset_grad, ..] = self.join(ctx, 3, &sums, x, [variance, variance], epsilon)?;
        let mut dx = ctx.allocate(x.dtype(), x.shape().clone())?;
        let vectors = [scale, mean, variance, &scale_grad, &offset_grad];
        let args = vectors.into_iter().fold(Args::new().input(dy).input(x), |args, vector| args.input(vector));
        let args = args.output(&mut dx).size(self.rows).size(self.channels).size(self.wide);
        let share = if training { 1.0 / self.rows as f32 } else { 0.0 };
        device.launch(self.kernel(device, 5, x.dtype())?, self.grid(), &args.f32(epsilon).f32(share))?;
        Ok([dx, scale_grad, offset_grad])
    }
}

fn source(kind: usize, dtype: DType, width: usize) -> String {
    format!(
        "typedef {} T;\n#define WIDTH {width}\n#define KIND {kind}\n{}",
        c_type(dtype),
        include_str!("batch_norm_last.cu")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_compile() {
        let mut all = Vec::new();
        for (dtype, width) in [(DType::BF16, 8), (DType::F16, 8), (DType::F32, 4)] {
            for (kind, op) in NAMES.into_iter().enumerate() {
                let key = ProgramKey { family: "batch_norm_last", op, dtypes: [Some(dtype), None, None], variant: 0 };
                all.push((key, source(kind, dtype, width)));
            }
        }
        super::super::tests::compiles(all);
    }
}
