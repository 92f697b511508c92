//! Batch norm in training where channels come first: each channel is a plane of every image. The values are read twice, for mean
//! and variance together and then to be normalised.

use kolo_core::{DType, Result, Shape, Tensor};
use kolo_device::cuda::{Args, CudaDevice, Function, Grid, ProgramKey};

use super::gpu::{Call, Made};
use crate::KernelCtx;
use crate::cuda::map::is_aligned;
use crate::cuda::{c_type, gpu};
use crate::nn::channels::Channels;

const NAMES: [&str; 6] = ["sums", "grad_sums", "moments", "grad_join", "apply", "grad_apply"];

/// How the kernels walk over a tensor.
#[derive(Clone, Copy)]
pub(crate) struct Planes {
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
    fn sums(&self, ctx: &KernelCtx<'_>, call: &Call<'_>) -> Result<[Tensor; 2]> {
        let Channels { outer, channels, inner, .. } = self.view;
        let (device, parts) = (gpu(ctx)?, Shape::new(&[self.parts, channels])?);
        let mut sums = [ctx.allocate(DType::F32, parts.clone())?, ctx.allocate(DType::F32, parts)?];
        let [first, second] = &mut sums;
        let args = Args::new().input(call.x).input(call.dy).input(call.vectors[2]).output(first).output(second);
        let args = args.size(outer).size(channels).size(inner);
        let grid = Grid { blocks: [channels as u32, self.parts as u32, 1], threads: [256, 1, 1], shared: 0 };
        device.launch(self.kernel(device, call.kind, call.x.dtype())?, grid, &args)?;
        drop(args);
        Ok(sums)
    }

    /// All of it: the sums, what they are together, and the values.
    pub fn run(&self, ctx: &KernelCtx<'_>, call: &Call<'_>) -> Result<Made> {
        let (device, x, channels) = (gpu(ctx)?, call.x, self.view.channels);
        let sums = self.sums(ctx, call)?;
        let mut made = Made::new(ctx, x, channels)?;
        let mut table = ctx.allocate(DType::F32, Shape::new(&[3, channels])?)?;
        let [a, b, c, d] = &mut made.vectors;
        let args = Args::new().input(&sums[0]).input(&sums[1]).input(x);
        let args = call.vectors.into_iter().fold(args, |args, vector| args.input(vector));
        let args = args.output(a).output(b).output(c).output(d).output(&mut made.zero).output(&mut table);
        let args = args.size(self.parts).size(channels).size(self.view.inner);
        let args = call.numbers(self.view).into_iter().fold(args, |args, number| args.f32(number));
        let joined = self.kernel(device, 2 + call.kind, x.dtype())?;
        device.launch(joined, Grid::blocks(channels.div_ceil(8), 256)?, &args)?;
        drop(args);
        let n = x.n_elements();
        let args = Args::new().input(call.dy).input(x).input(&table).output(&mut made.out).size(n);
        let args = args.size(channels).size(self.view.inner);
        // A thread each for a few loads: their channels differ, and finding them costs more than starting a thread.
        let blocks = (n / self.width).div_ceil(256 * 2).max(1);
        device.launch(self.kernel(device, 4 + call.kind, x.dtype())?, Grid::blocks(blocks, 256)?, &args)?;
        drop(args);
        Ok(made)
    }
}

fn source(kind: usize, dtype: DType, width: usize) -> String {
    format!(
        "typedef {} T;\n#define WIDTH {width}\n#define KIND {kind}\n{}\n{}",
        c_type(dtype),
        include_str!("channel.cu"),
        include_str!("first.cu")
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
        crate::cuda::tests::compiles(all);
    }
}
