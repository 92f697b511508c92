//! Batch norm in one launch, which holds on the chip what fits of the values: where channels come last, by blocks that wait for
//! each other's sums; where they come first, if a block can hold all of some channels.

use kolo_core::{DType, Result, Shape, Tensor};
use kolo_device::cuda::{Args, CudaDevice, Grid, ProgramKey};

use super::gpu::{Call, Made};
use crate::KernelCtx;
use crate::cuda::rows::row_width;
use crate::cuda::{c_type, gpu};
use crate::nn::channels::Channels;

const NAMES: [&str; 2] = ["forward", "backward"];

/// Channels of a block where they come last. Fewer would make loads too short, more would have more sums to join.
const CHANNELS: usize = 128;

/// Threads of a block that has a multiprocessor for itself.
const THREADS: usize = 512;

/// How the kernel walks over tensors.
#[derive(Clone, Copy)]
pub(crate) struct Held {
    view: Channels,
    /// Loads side by side in a block.
    wide: usize,
    threads: usize,
    /// Loads of each thread and tensor that stay on the chip.
    held: usize,
    /// Bytes on the chip.
    shared: usize,
    /// Blocks side by side, and one below the other.
    blocks: [usize; 2],
}

impl Held {
    /// Over tensors of this form, if it is one for this kernel.
    pub fn over(device: &CudaDevice, view: Channels, tensors: &[&Tensor]) -> Option<Held> {
        let columns = view.channels.checked_mul(view.inner)?;
        let width = row_width(tensors, columns);
        if width == 1 || columns == 0 || view.outer == 0 || columns.max(view.outer) >= 1 << 31 {
            return None;
        }
        let (many, most) = (device.multiprocessors(), device.shared_memory());
        if view.inner == 1 {
            let wide = (columns / width).min(CHANNELS / width);
            let across = (columns / width).div_ceil(wide);
            let down = (many / across).clamp(1, view.outer.div_ceil(THREADS / wide * 2));
            return Held::fit(view, [width, wide, THREADS], [across, down], tensors.len(), most);
        }
        // As few channels as are a whole number of loads, and enough blocks to keep the GPU busy.
        let group = (0..4).map(|i| 1 << i).find(|group| (group * view.inner).is_multiple_of(width))?;
        let blocks = [view.channels / group, 1];
        if !view.channels.is_multiple_of(group) || blocks[0] < many {
            return None;
        }
        let wide = group * view.inner / width;
        // Two blocks of a multiprocessor, so that one loads while the other stores, or else one.
        let all = |threads, most| {
            let held = Held::fit(view, [width, wide, threads], blocks, tensors.len(), most)?;
            (held.held * (threads / wide) >= view.outer).then_some(held)
        };
        // A block also takes a KiB that is not its own.
        all(THREADS / 2, (most / 2).saturating_sub(512)).or_else(|| all(THREADS, most))
    }

    /// As much as fits into `most` bytes is held.
    fn fit(
        view: Channels,
        [width, wide, threads]: [usize; 3],
        blocks: [usize; 2],
        n_tensors: usize,
        most: usize,
    ) -> Option<Held> {
        let rows = threads.checked_div(wide).filter(|&rows| rows > 0)?;
        // A row of sums for each row of threads, and three numbers for each channel.
        let rest = (rows * wide * width + 3 * (wide * width / view.inner)) * size_of::<f32>();
        let pack = threads * n_tensors * 16;
        let held = (most.checked_sub(rest)? / pack).min(view.outer.div_ceil(rows * blocks[1]));
        Some(Held { view, wide, threads, held, shared: held * pack + rest, blocks })
    }

    /// All of it.
    pub fn run(&self, ctx: &KernelCtx<'_>, call: &Call<'_>) -> Result<Made> {
        let (device, x) = (gpu(ctx)?, call.x);
        let [across, down] = self.blocks;
        let mut made = Made::new(ctx, x, self.view.channels)?;
        let parts = if down > 1 { [2, down, self.view.channels] } else { [1, 1, 1] };
        let mut parts = ctx.allocate(DType::F32, Shape::new(&parts)?)?;
        let [a, b, c, d] = &mut made.vectors;
        let args =
            call.vectors.into_iter().fold(Args::new().input(x).input(call.dy), |args, vector| args.input(vector));
        let args = args.output(&mut made.out).output(a).output(b).output(c).output(d).output(&mut made.zero);
        let args = args.output(&mut parts).size(self.view.outer).size(self.view.channels).size(self.view.inner);
        let args = args.size(self.wide).size(self.held);
        let args = call.numbers(self.view).into_iter().fold(args, |args, number| args.f32(number));
        let blocks = [across as u32, down as u32, 1];
        let grid = Grid { blocks, threads: [self.threads as u32, 1, 1], shared: self.shared as u32 };
        let is_first = self.view.inner > 1;
        let key = ProgramKey {
            family: "batch_norm_held",
            op: NAMES[call.kind],
            dtypes: [Some(x.dtype()), None, None],
            variant: u32::from(is_first),
        };
        let kernel = device.function(&key, || source(call.kind, x.dtype(), is_first))?;
        match down {
            1 => device.launch(kernel, grid, &args)?,
            _ => device.launch_together(kernel, grid, &args)?,
        }
        drop(args);
        Ok(made)
    }
}

fn source(kind: usize, dtype: DType, is_first: bool) -> String {
    let width = 16 / dtype.size().unwrap_or(4);
    format!(
        "typedef {} T;\n#define WIDTH {width}\n#define KIND {kind}\n#define FIRST {}\n{}\n{}",
        c_type(dtype),
        u32::from(is_first),
        include_str!("channel.cu"),
        include_str!("held.cu")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_compile() {
        let mut all = Vec::new();
        for dtype in [DType::BF16, DType::F16, DType::F32] {
            for (kind, op) in NAMES.into_iter().enumerate() {
                for is_first in [false, true] {
                    let key =
                        ProgramKey { family: "batch_norm_held", op, dtypes: [Some(dtype), None, None], variant: 0 };
                    all.push((key, source(kind, dtype, is_first)));
                }
            }
        }
        crate::cuda::tests::compiles(all);
    }

    /// The shapes of ResNet-50 on a GPU of 132 multiprocessors with 227 KiB for a block.
    #[test]
    fn what_fits_is_held() {
        let fit =
            |view, sizes, blocks, n| Held::fit(view, sizes, blocks, n, 227 << 10).map(|held| (held.held, held.shared));
        let last = |rows, channels| Channels { outer: rows, channels, inner: 1 };
        assert_eq!(fit(last(6272, 2048), [8, 16, 512], [16, 8], 1), Some((25, 25 * 8192 + 35 * 512)));
        assert_eq!(fit(last(401408, 64), [4, 16, 512], [1, 132], 2), Some((13, 13 * 16384 + 35 * 256)));
        let first = Channels { outer: 128, channels: 2048, inner: 49 };
        assert_eq!(fit(first, [8, 49, 256], [256, 1], 1), Some((26, 26 * 4096 + 5 * 49 * 32 + 96)));
        assert_eq!(fit(first, [8, 49, 512], [256, 1], 2), Some((13, 13 * 16384 + 10 * 49 * 32 + 96)));
        assert_eq!(fit(first, [8, 513, 512], [256, 1], 1), None);
    }
}
