//! `KoloAttention` and its gradient. There are kernels of ours, for halves with heads of 32, 64 or 128 numbers on the matrix
//! units, for everything else with a warp to each row; and cuDNN's, where there is enough to do. Which is faster for a shape is
//! found out when it comes again. `KOLO_ATTENTION` decides instead if it is set: with `ours` sums have a fixed order, so the
//! results are the same each time; with `cudnn` everything is cuDNN's that it takes.

use std::sync::OnceLock;

use kolo_core::{Code, DType, Error, Result, Tensor, TensorData};
use kolo_device::cuda::{Args, Attention, AttentionPass, CudaDevice, Function, Grid, ProgramKey};

use crate::KernelCtx;
use crate::cuda::{c_type, gpu};
use crate::nn::attention::Sizes;

const NAMES: [&str; 4] = ["forward", "delta", "queries", "keys_values"];
const PLAIN_NAMES: [&str; 3] = ["forward", "queries", "keys_values"];

/// How a kernel on the matrix units is cut: warps of a block, sixteens of rows of each warp, rows of a tile, blocks
/// that should share a multiprocessor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    warps: usize,
    sixteens: usize,
    tile: usize,
    blocks: usize,
}

impl Cut {
    /// For kernel `kind` and heads of this size.
    fn of(kind: usize, size: usize) -> Cut {
        match (kind, size) {
            (_, 128) => Cut { warps: 4, sixteens: 1, tile: 32, blocks: 1 },
            (0 | 2, _) => Cut { warps: 4, sixteens: 2, tile: 64, blocks: 2 },
            _ => Cut { warps: 4, sixteens: 1, tile: 64, blocks: 3 },
        }
    }

    fn rows(self) -> usize {
        self.warps * self.sixteens * 16
    }
}

/// Whether the kernels on the matrix units can take it.
fn is_fast(device: &CudaDevice, sizes: &Sizes, tensors: &[&Tensor]) -> bool {
    let is_aligned = |tensor: &&Tensor| match tensor.storage() {
        TensorData::Buffer { offset, .. } => offset % 16 == 0,
        _ => false,
    };
    device.capability() >= (8, 0)
        && matches!(sizes.size, 32 | 64 | 128)
        && sizes.length < 1 << 30
        && tensors.iter().all(|tensor| matches!(tensor.dtype(), DType::F16 | DType::BF16) && is_aligned(tensor))
}

/// Whose kernels are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Whose {
    Ours,
    Cudnn,
    Faster,
}

impl Whose {
    /// As `KOLO_ATTENTION` says.
    fn asked() -> Result<Whose> {
        static ASKED: OnceLock<Option<Whose>> = OnceLock::new();
        let asked = *ASKED.get_or_init(|| Whose::parse(std::env::var("KOLO_ATTENTION").ok().as_deref()));
        asked.ok_or_else(|| {
            Error::invalid_argument("the environment's KOLO_ATTENTION must be ours, cudnn or faster, or not set")
        })
    }

    fn parse(text: Option<&str>) -> Option<Whose> {
        match text {
            Some("ours") => Some(Whose::Ours),
            Some("cudnn") => Some(Whose::Cudnn),
            None | Some("faster" | "") => Some(Whose::Faster),
            Some(_) => None,
        }
    }
}

/// Scores from which on cuDNN is tried, which takes a second or two: against our kernels on the matrix units, which take some
/// 25 us for so many, and against the others.
const MANY_SCORES: [usize; 2] = [1 << 25, 1 << 20];

/// A pass by our kernels or by cuDNN's.
fn compute(
    device: &CudaDevice,
    sizes: &Sizes,
    pass: AttentionPass,
    inputs: &[&Tensor],
    outputs: &mut [Tensor],
    ours: &mut dyn FnMut(&mut [Tensor]) -> Result<()>,
) -> Result<()> {
    let &Sizes { batch, length, heads, size, causal } = sizes;
    let dtype = inputs.first().map_or(DType::F32, |tensor| tensor.dtype());
    let call = Attention { dtype, batch, length, heads, size, causal };
    let n_scores = [batch, heads, length].iter().fold(length, |n, &size| n.saturating_mul(size));
    let [least_fast, least_plain] = MANY_SCORES;
    let least = if matches!(size, 32 | 64 | 128) { least_fast } else { least_plain };
    match Whose::asked()? {
        Whose::Faster if n_scores >= least => device.attend_or(&call, pass, inputs, outputs, ours),
        Whose::Cudnn => match device.attend(&call, pass, inputs, outputs) {
            Err(error) if error.code() == Code::Unimplemented => ours(outputs),
            done => done,
        },
        Whose::Ours | Whose::Faster => ours(outputs),
    }
}

fn source(kind: usize, dtype: DType, size: usize, causal: bool) -> String {
    let cut = Cut::of(kind, size);
    format!(
        "typedef {} T;\n#define IS_BF16 {}\n#define HD {size}\n#define WARPS {}\n#define MT {}\n#define TILE {}\n\
         #define BLOCKS {}\n#define CAUSAL {}\n#define KIND {kind}\n{}",
        c_type(dtype),
        u32::from(dtype == DType::BF16),
        cut.warps,
        cut.sixteens,
        cut.tile,
        cut.blocks,
        u32::from(causal),
        include_str!("../attention.cu")
    )
}

fn plain_source(kind: usize, dtype: DType, lanes: usize) -> String {
    format!(
        "typedef {} T;\ntypedef Wide<T>::type W;\n#define LANES {lanes}\n#define KIND {kind}\n{}",
        c_type(dtype),
        include_str!("../attention_plain.cu")
    )
}

fn kernel(device: &CudaDevice, kind: usize, dtype: DType, sizes: &Sizes) -> Result<Function> {
    let variant = sizes.size as u32 | u32::from(sizes.causal) << 16;
    let key = ProgramKey { family: "attention", op: NAMES[kind], dtypes: [Some(dtype), None, None], variant };
    device.function(&key, || source(kind, dtype, sizes.size, sizes.causal))
}

fn plain_kernel(device: &CudaDevice, kind: usize, dtype: DType, sizes: &Sizes) -> Result<Function> {
    let lanes = sizes.size.div_ceil(32);
    if lanes > 64 {
        return Err(Error::unimplemented(format!(
            "attention on a GPU takes heads of at most 2048 numbers, not {}: use more heads",
            sizes.size
        )));
    }
    let variant = lanes as u32;
    let key =
        ProgramKey { family: "attention_plain", op: PLAIN_NAMES[kind], dtypes: [Some(dtype), None, None], variant };
    device.function(&key, || plain_source(kind, dtype, lanes))
}

/// A block for each run of rows of each head; and how many runs a head has.
fn grid(kind: usize, sizes: &Sizes) -> Result<(Grid, usize)> {
    let cut = Cut::of(kind, sizes.size);
    let n_blocks = sizes.length.div_ceil(cut.rows());
    let all = n_blocks.checked_mul(sizes.batch).and_then(|n| n.checked_mul(sizes.heads));
    let all = all.ok_or_else(|| Error::invalid_argument("an attention of that size does not fit a GPU"))?;
    Ok((Grid::blocks(all, cut.warps * 32)?, n_blocks))
}

fn scale(sizes: &Sizes) -> f64 {
    (sizes.size as f64).powf(-0.5)
}

/// The sizes as the plain kernels take them, and the scale in the type that they compute in.
fn plain_args<'a>(args: Args<'a>, sizes: &Sizes, dtype: DType) -> Args<'a> {
    let all = [sizes.batch, sizes.length, sizes.heads, sizes.size, usize::from(sizes.causal)].map(|n| n as u64);
    let args = args.words(&all);
    if dtype == DType::F64 { args.f64(scale(sizes)) } else { args.f32(scale(sizes) as f32) }
}

pub(crate) fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let sizes = Sizes::of(ctx, 0)?;
    let (qkv, device) = (ctx.input(0)?, gpu(ctx)?);
    let dtype = qkv.dtype();
    let [shape, lse_shape] = sizes.outputs()?;
    let mut outputs = [ctx.allocate(dtype, shape)?, ctx.allocate(DType::F32, lse_shape)?];
    if !sizes.is_empty() {
        compute(device, &sizes, AttentionPass::Forward, &[qkv], &mut outputs, &mut |outputs| {
            let [y, lse] = outputs else { return Err(Error::internal("an attention has two outputs")) };
            forward_by_ours(device, &sizes, qkv, y, lse)
        })?;
    }
    let [y, lse] = outputs;
    ctx.set_output(0, y);
    ctx.set_output(1, lse);
    Ok(())
}

fn forward_by_ours(device: &CudaDevice, sizes: &Sizes, qkv: &Tensor, y: &mut Tensor, lse: &mut Tensor) -> Result<()> {
    let dtype = qkv.dtype();
    let args = Args::new().input(qkv).output(y).output(lse);
    if is_fast(device, sizes, &[qkv]) {
        let (grid, n_blocks) = grid(0, sizes)?;
        let args = args.size(sizes.length).size(sizes.heads).size(n_blocks).f32(scale(sizes) as f32);
        device.launch(kernel(device, 0, dtype, sizes)?, grid, &args)
    } else {
        let n_rows = sizes.batch * sizes.heads * sizes.length;
        let args = plain_args(args, sizes, dtype);
        device.launch(plain_kernel(device, 0, dtype, sizes)?, Grid::over(n_rows * 32), &args)
    }
}

pub(crate) fn backward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let sizes = Sizes::of(ctx, 1)?;
    sizes.check_grad(ctx)?;
    let (dy, qkv, y, lse, device) = (ctx.input(0)?, ctx.input(1)?, ctx.input(2)?, ctx.input(3)?, gpu(ctx)?);
    let mut outputs = [ctx.allocate(qkv.dtype(), qkv.shape().clone())?];
    if !sizes.is_empty() {
        compute(device, &sizes, AttentionPass::Backward, &[dy, qkv, y, lse], &mut outputs, &mut |outputs| {
            let [out] = outputs else { return Err(Error::internal("the gradient of an attention has one output")) };
            let wide = if qkv.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
            let mut delta = ctx.allocate(wide, lse.shape().clone())?;
            backward_by_ours(device, &sizes, [dy, qkv, y, lse], &mut delta, out)
        })?;
    }
    let [out] = outputs;
    ctx.set_output(0, out);
    Ok(())
}

fn backward_by_ours(
    device: &CudaDevice,
    sizes: &Sizes,
    [dy, qkv, y, lse]: [&Tensor; 4],
    delta: &mut Tensor,
    out: &mut Tensor,
) -> Result<()> {
    let dtype = qkv.dtype();
    if is_fast(device, sizes, &[dy, qkv, y]) {
        let n = y.n_elements() / 8;
        let args = Args::new().input(y).input(dy).output(delta).size(n).size(sizes.length).size(sizes.heads);
        device.launch(kernel(device, 1, dtype, sizes)?, Grid::over(n), &args)?;
        for kind in [2, 3] {
            let (grid, n_blocks) = grid(kind, sizes)?;
            let args = Args::new().input(qkv).input(dy).input(lse).input(delta).output(out);
            let args = args.size(sizes.length).size(sizes.heads).size(n_blocks).f32(scale(sizes) as f32);
            device.launch(kernel(device, kind, dtype, sizes)?, grid, &args)?;
        }
        return Ok(());
    }
    let grid = Grid::over(sizes.batch * sizes.heads * sizes.length * 32);
    let args = Args::new().input(qkv).input(y).input(dy).input(lse).output(delta).output(out);
    device.launch(plain_kernel(device, 1, dtype, sizes)?, grid, &plain_args(args, sizes, dtype))?;
    let args = Args::new().input(qkv).input(dy).input(lse).input(delta).output(out);
    device.launch(plain_kernel(device, 2, dtype, sizes)?, grid, &plain_args(args, sizes, dtype))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whose_kernels_are_used_is_asked_by_name() {
        assert_eq!(Whose::parse(None), Some(Whose::Faster));
        assert_eq!(Whose::parse(Some("ours")), Some(Whose::Ours));
        assert_eq!(Whose::parse(Some("cudnn")), Some(Whose::Cudnn));
        assert_eq!(Whose::parse(Some("flash")), None);
    }

    #[test]
    fn sources_compile() {
        let mut all = Vec::new();
        for (kind, op) in NAMES.into_iter().enumerate() {
            for (dtype, size, causal) in [(DType::BF16, 64, true), (DType::F16, 32, false), (DType::BF16, 128, true)] {
                let key =
                    ProgramKey { family: "attention", op, dtypes: [Some(dtype), None, None], variant: size as u32 };
                all.push((key, source(kind, dtype, size, causal)));
            }
        }
        for (kind, op) in PLAIN_NAMES.into_iter().enumerate() {
            for (dtype, lanes) in [(DType::F32, 1), (DType::F64, 2), (DType::BF16, 5)] {
                let family = "attention_plain";
                let key = ProgramKey { family, op, dtypes: [Some(dtype), None, None], variant: lanes as u32 };
                all.push((key, plain_source(kind, dtype, lanes)));
            }
        }
        crate::cuda::tests::compiles(all);
    }
}
