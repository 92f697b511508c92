//! `FusedBatchNorm` (V2, V3): values less the mean of their channel, over its standard deviation, scaled and shifted
//! (Ioffe and Szegedy, 2015), and the gradients of that. In training mean and variance are the batch's; otherwise given.

mod first;
mod gpu;
mod held;

use half::{bf16, f16};
use kolo_core::{DType, Error, PartialShape, Result, Shape, Tensor};
use kolo_device::cpu::{IntraPool, vectorize};
use kolo_graph::{BatchNormHalf, Grad, Gradient, HalfSafety, InferCtx, OpDef, Operation, Output};

use crate::math::binary::first;
use crate::nn::channels::{Channels, channel_axis, is_nchw};
use crate::nn::rows::{rows_per_fill, rows_per_task};
use crate::op::{Gpu, KernelDef, Op, cpu, cpu_kernels, gpu_kernel};
use crate::{Cost, KernelCtx};

/// What a batch normalisation in training gives: the normalised values, and the batch's mean and variance.
#[derive(Clone, Copy, Debug)]
pub struct BatchNorm<'g> {
    /// The normalised values.
    pub y: Output<'g>,
    /// The mean of each channel.
    pub mean: Output<'g>,
    /// The variance of each channel, estimated without bias.
    pub variance: Output<'g>,
}

/// Normalises NHWC images by the mean and variance of the batch.
#[track_caller]
pub fn batch_norm_training<'g>(x: Output<'g>, scale: Output<'g>, offset: Output<'g>, epsilon: f32) -> BatchNorm<'g> {
    let none = x.graph().constant(Tensor::vector::<f32>(Vec::new()));
    let op = x.graph().op("FusedBatchNormV3").inputs([x, scale, offset, none, none]).attr("epsilon", epsilon).build();
    BatchNorm { y: op.output(0), mean: op.output(1), variance: op.output(2) }
}

/// Normalises NHWC images by a given mean and variance.
#[track_caller]
pub fn batch_norm_inference<'g>(
    x: Output<'g>,
    [scale, offset]: [Output<'g>; 2],
    [mean, variance]: [Output<'g>; 2],
    epsilon: f32,
) -> Output<'g> {
    let builder = x.graph().op("FusedBatchNormV3").inputs([x, scale, offset, mean, variance]);
    builder.attr("epsilon", epsilon).attr("is_training", false).out()
}

macro_rules! forward_op {
    ($name:literal, $x:literal, $u:literal, $reserve:literal, $types:literal, $formats:literal, $grad:literal, $kernels:expr) => {
        Op {
            def: OpDef {
                name: $name,
                signature: concat!(
                    "(x:T, scale:",
                    $u,
                    ", offset:",
                    $u,
                    ", mean:",
                    $u,
                    ", variance:",
                    $u,
                    ") -> (y:T, batch_mean:",
                    $u,
                    ", batch_variance:",
                    $u,
                    ", reserve_space_1:",
                    $u,
                    ", reserve_space_2:",
                    $u,
                    $reserve,
                    ") ; ",
                    $types,
                    ", epsilon:float=9.999999747378752e-05, exponential_avg_factor:float=1.0, data_format:string{",
                    $formats,
                    "}=\"NHWC\", is_training:bool=true"
                ),
                shape: infer_forward,
                gradient: Gradient::Rule(|op, dy| gradient(op, $grad, dy)),
                half: HalfSafety::Safe,
                batch_norm: Some(BatchNormHalf::Forward),
                ..OpDef::BASE
            },
            kernels: $kernels,
            gpu: Gpu::Kernels(&[gpu_kernel("T", gpu::TYPES, gpu::forward)]),
            cost: Cost::Elements,
        }
    };
}

pub(crate) static FUSED_BATCH_NORM: Op = forward_op!(
    "FusedBatchNorm",
    "T",
    "T",
    "",
    "T:type{float}",
    "NHWC|NCHW",
    "FusedBatchNormGrad",
    &[cpu(DType::F32, forward)]
);
pub(crate) static FUSED_BATCH_NORM_V2: Op = forward_op!(
    "FusedBatchNormV2",
    "T",
    "U",
    "",
    "T:type{half,bfloat16,float}, U:type{float}",
    "NHWC|NCHW",
    "FusedBatchNormGradV2",
    FORWARD_KERNELS
);
pub(crate) static FUSED_BATCH_NORM_V3: Op = forward_op!(
    "FusedBatchNormV3",
    "T",
    "U",
    ", reserve_space_3:U",
    "T:type{half,bfloat16,float}, U:type{bfloat16,float}",
    "NHWC|NCHW|NDHWC|NCDHW",
    "FusedBatchNormGradV3",
    FORWARD_KERNELS
);
const FORWARD_KERNELS: &[KernelDef] = cpu_kernels!(forward; f16, bf16);

macro_rules! backward_op {
    ($name:literal, $signature:literal, $formats:literal, $kernels:expr) => {
        Op {
            def: OpDef {
                name: $name,
                signature: concat!(
                    $signature,
                    ", epsilon:float=9.999999747378752e-05, data_format:string{",
                    $formats,
                    "}=\"NHWC\", is_training:bool=true"
                ),
                shape: infer_backward,
                gradient: Gradient::Refused("second derivatives of batch normalisation are not implemented"),
                half: HalfSafety::Safe,
                batch_norm: Some(BatchNormHalf::Backward),
                ..OpDef::BASE
            },
            kernels: $kernels,
            gpu: Gpu::Kernels(&[gpu_kernel("T", gpu::TYPES, gpu::backward)]),
            cost: Cost::Elements,
        }
    };
}

pub(crate) static FUSED_BATCH_NORM_GRAD: Op = backward_op!(
    "FusedBatchNormGrad",
    "(y_backprop:T, x:T, scale:T, reserve_space_1:T, reserve_space_2:T) -> (x_backprop:T, scale_backprop:T, \
     offset_backprop:T, reserve_space_3:T, reserve_space_4:T) ; T:type{float}",
    "NHWC|NCHW",
    &[cpu(DType::F32, backward)]
);
pub(crate) static FUSED_BATCH_NORM_GRAD_V2: Op = backward_op!(
    "FusedBatchNormGradV2",
    "(y_backprop:T, x:T, scale:float, reserve_space_1:U, reserve_space_2:U) -> (x_backprop:T, scale_backprop:U, \
     offset_backprop:U, reserve_space_3:U, reserve_space_4:U) ; T:type{half,bfloat16,float}, U:type{float}",
    "NHWC|NCHW",
    BACKWARD_KERNELS
);
pub(crate) static FUSED_BATCH_NORM_GRAD_V3: Op = backward_op!(
    "FusedBatchNormGradV3",
    "(y_backprop:T, x:T, scale:float, reserve_space_1:U, reserve_space_2:U, reserve_space_3:U) -> (x_backprop:T, \
     scale_backprop:U, offset_backprop:U, reserve_space_4:U, reserve_space_5:U) ; T:type{half,bfloat16,float}, \
     U:type{float}",
    "NHWC|NCHW|NDHWC|NCDHW",
    BACKWARD_KERNELS
);
const BACKWARD_KERNELS: &[KernelDef] = cpu_kernels!(backward; f16, bf16);

/// The shape of `x` with what the vectors say of its channels, and the shape of those vectors.
fn infer(ctx: &InferCtx<'_>, x: usize, vectors: std::ops::Range<usize>) -> Result<[PartialShape; 2]> {
    let x = ctx.input_of_rank_at_least(x, 4)?;
    let Some(rank) = x.rank() else { return Ok([PartialShape::unknown(), PartialShape::of_rank(1)]) };
    let axis = channel_axis(rank, is_nchw(ctx.attrs())?);
    let mut vector = PartialShape::new(&[x.dim(axis as isize)]);
    for i in vectors {
        vector = vector.merge(ctx.input(i))?;
    }
    let mut known = vec![None; rank];
    known[axis] = vector.dim(0);
    Ok([x.merge(&PartialShape::new(&known))?, vector])
}

fn infer_forward(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let [x, vector] = infer(ctx, 0, 1..3)?;
    let mut shapes = vec![vector; ctx.n_outputs()];
    shapes[0] = x;
    if let Some(reserve) = shapes.get_mut(5) {
        *reserve = PartialShape::scalar();
    }
    Ok(shapes)
}

fn infer_backward(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let [x, vector] = infer(ctx, 1, 2..3)?;
    let none = PartialShape::from([0usize]);
    Ok(vec![x.merge(ctx.input(0))?, vector.clone(), vector, none.clone(), none])
}

fn gradient<'g>(op: Operation<'g>, name: &str, dy: &[Option<Output<'g>>]) -> Result<Vec<Option<Grad<'g>>>> {
    let training = op.attrs(|attrs| attrs.bool("is_training"))?;
    let (mean, variance) = match training {
        true => (op.output(3), op.output(4)),
        false => (op.input(3), op.input(4)),
    };
    let mut builder = op.graph().op(name).inputs([first(dy)?, op.input(0), op.input(1), mean, variance]);
    if op.n_outputs() > 5 {
        builder = builder.input(op.output(5));
    }
    for attr in ["epsilon", "data_format", "is_training"] {
        if let Some(value) = op.attrs(|attrs| attrs.find(attr).cloned()) {
            builder = builder.attr(attr, value);
        }
    }
    let grad = builder.build();
    let mut grads: Vec<Option<Grad<'g>>> = (0..3).map(|i| Some(grad.output(i).into())).collect();
    grads.extend([None, None]);
    Ok(grads)
}

/// The vectors at these inputs, which must have one element for each channel.
fn vectors<const N: usize>(ctx: &KernelCtx<'_>, view: Channels, inputs: [usize; N]) -> Result<[Vec<f32>; N]> {
    let mut vectors = [const { Vec::new() }; N];
    for (vector, i) in vectors.iter_mut().zip(inputs) {
        let tensor = ctx.input(i)?;
        if tensor.shape().dims() != [view.channels] {
            return Err(Error::invalid_argument(format!(
                "input {i} must have the same number of elements as the channels of x: {} vs {}",
                tensor.shape(),
                view.channels
            )));
        }
        *vector = tensor.data::<f32>()?.to_vec();
    }
    Ok(vectors)
}

fn vector(ctx: &KernelCtx<'_>, values: &[f32]) -> Result<Tensor> {
    let mut out = ctx.allocate(DType::F32, Shape::new(&[values.len()])?)?;
    out.data_mut::<f32>()?.copy_from_slice(values);
    Ok(out)
}

fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let shape = ctx.input(0)?.shape().clone();
    if shape.rank() < 4 {
        return Err(Error::invalid_argument(format!("input must be 4 or 5-dimensional {shape}")));
    }
    let view = Channels::of(&shape, is_nchw(ctx.attrs())?)?;
    let (epsilon, training) = (ctx.attrs().float("epsilon")?, ctx.attrs().bool("is_training")?);
    let factor = ctx.attrs().float("exponential_avg_factor")?;
    let [scale, offset] = vectors(ctx, view, [1, 2])?;
    let x = ctx.data::<f32>(0)?;
    let (mean, variance, estimates) = if training {
        let (mean, variance) = moments(ctx.pool(), view, x);
        // The estimate without bias is what a running average should see.
        let n = view.per_channel() as f32;
        let unbiased: Vec<f32> = variance.iter().map(|v| v * (n / (n - 1.0).max(1.0))).collect();
        let estimates = if factor == 1.0 {
            [mean.clone(), unbiased]
        } else {
            let [old_mean, old_variance] = vectors(ctx, view, [3, 4])?;
            let mix = |old: Vec<f32>, new: &[f32]| -> Vec<f32> {
                old.iter().zip(new).map(|(old, new)| old * (1.0 - factor) + new * factor).collect()
            };
            [mix(old_mean, &mean), mix(old_variance, &unbiased)]
        };
        (mean, variance, estimates)
    } else {
        let [mean, variance] = vectors(ctx, view, [3, 4])?;
        (mean.clone(), variance.clone(), [mean, variance])
    };
    // The mean is taken off first: multiplied out, a small variance would blow up the rounding of a large mean.
    let a: Vec<f32> = scale.iter().zip(&variance).map(|(s, v)| s / (v + epsilon).sqrt()).collect();
    let mut out = ctx.allocate(DType::F32, shape)?;
    each_run(
        ctx.pool(),
        view,
        out.data_mut::<f32>()?,
        #[inline(always)]
        |at, first_channel, out| {
            let x = &x[at..at + out.len()];
            match view.inner {
                1 => {
                    for ((((y, x), a), m), o) in out.iter_mut().zip(x).zip(&a).zip(&mean).zip(&offset) {
                        *y = (*x - m) * a + o;
                    }
                }
                _ => {
                    let (a, m, o) = (a[first_channel], mean[first_channel], offset[first_channel]);
                    out.iter_mut().zip(x).for_each(|(y, x)| *y = (*x - m) * a + o);
                }
            }
        },
    );
    let rest = [&estimates[0], &estimates[1], &mean, &variance].map(|values| vector(ctx, values));
    ctx.set_output(0, out);
    for (i, tensor) in rest.into_iter().enumerate() {
        ctx.set_output(i + 1, tensor?);
    }
    if ctx.outputs.len() > 5 {
        ctx.set_output(5, Tensor::scalar(0.0f32));
    }
    Ok(())
}

fn backward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let shape = ctx.input(1)?.shape().clone();
    if shape.rank() < 4 || *ctx.input(0)?.shape() != shape {
        let found = ctx.input(0)?.shape();
        return Err(Error::invalid_argument(format!(
            "x and y_backprop must have same shape, but x has {shape} and y_backprop {found}"
        )));
    }
    let view = Channels::of(&shape, is_nchw(ctx.attrs())?)?;
    let (epsilon, training) = (ctx.attrs().float("epsilon")?, ctx.attrs().bool("is_training")?);
    let [scale, mean, variance] = vectors(ctx, view, [2, 3, 4])?;
    let (dy, x) = (ctx.data::<f32>(0)?, ctx.data::<f32>(1)?);
    let inverse: Vec<f32> = variance.iter().map(|v| 1.0 / (v + epsilon).sqrt()).collect();
    let (offset_grad, products) = gradient_sums(ctx.pool(), view, [dy, x], &mean);
    // An empty batch has no variance, and nothing that a gradient could come from.
    let is_empty = view.per_channel() == 0;
    let scale_grad = products.iter().zip(&inverse).map(|(sum, inverse)| if is_empty { 0.0 } else { sum * inverse });
    let scale_grad: Vec<f32> = scale_grad.collect();
    // dx = a · (dy − b − (x − mean) · d): the batch's mean and variance depend on x too, given ones do not.
    let n = view.per_channel().max(1) as f32;
    let a: Vec<f32> = scale.iter().zip(&inverse).map(|(s, i)| s * i).collect();
    let share = if training { 1.0 / n } else { 0.0 };
    let b: Vec<f32> = offset_grad.iter().map(|sum| sum * share).collect();
    let d: Vec<f32> = scale_grad.iter().zip(&inverse).map(|(sum, inverse)| sum * inverse * share).collect();
    let mut out = ctx.allocate(DType::F32, shape)?;
    each_run(
        ctx.pool(),
        view,
        out.data_mut::<f32>()?,
        #[inline(always)]
        |at, first_channel, out| {
            let (x, dy) = (&x[at..at + out.len()], &dy[at..at + out.len()]);
            let values = out.iter_mut().zip(x).zip(dy);
            match view.inner {
                1 => {
                    for (((((dx, x), dy), a), (b, d)), mean) in values.zip(&a).zip(b.iter().zip(&d)).zip(&mean) {
                        *dx = a * (*dy - b - (*x - mean) * d);
                    }
                }
                _ => {
                    let c = first_channel;
                    let (a, b, d, mean) = (a[c], b[c], d[c], mean[c]);
                    values.for_each(|((dx, x), dy)| *dx = a * (*dy - b - (*x - mean) * d));
                }
            }
        },
    );
    let (scale_grad, offset_grad) = (vector(ctx, &scale_grad)?, vector(ctx, &offset_grad)?);
    ctx.set_output(0, out);
    ctx.set_output(1, scale_grad);
    ctx.set_output(2, offset_grad);
    ctx.set_output(3, Tensor::vector::<f32>(Vec::new()));
    ctx.set_output(4, Tensor::vector::<f32>(Vec::new()));
    Ok(())
}

/// Mean and variance of each channel. Blocks have a mean of their own, around which their squares are taken while they are
/// still in the cache; so a large mean does not drown a small variance, and memory is read once.
fn moments(pool: &IntraPool, view: Channels, x: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let blocks = each_block(
        pool,
        view,
        #[inline(always)]
        |rows, sums, squares| {
            let per_block = (rows.len() * view.inner) as f32;
            for o in rows.clone() {
                add_rows(
                    view,
                    o,
                    sums,
                    #[inline(always)]
                    |at, _, sums| {
                        sums.iter_mut().zip(&x[at..]).for_each(|(sum, x)| *sum += *x);
                    },
                );
            }
            sums.iter_mut().for_each(|sum| *sum /= per_block);
            for o in rows {
                add_rows(
                    view,
                    o,
                    squares,
                    #[inline(always)]
                    |at, c, squares| {
                        if view.inner == 1 {
                            for ((square, x), mean) in squares.iter_mut().zip(&x[at..]).zip(&*sums) {
                                let centred = *x - mean;
                                *square += centred * centred;
                            }
                        } else {
                            let mean = sums[c];
                            for (square, x) in squares.iter_mut().zip(&x[at..]) {
                                let centred = *x - mean;
                                *square += centred * centred;
                            }
                        }
                    },
                );
            }
        },
    );
    if blocks.is_empty() {
        return (vec![f32::NAN; view.channels], vec![f32::NAN; view.channels]);
    }
    let n = view.per_channel() as f32;
    let (mut mean, mut variance) = (vec![0.0; view.channels], vec![0.0; view.channels]);
    for (weight, means, _) in &blocks {
        mean.iter_mut().zip(means).for_each(|(mean, block)| *mean += block * (weight / n));
    }
    for (weight, means, squares) in &blocks {
        for (((variance, mean), block), square) in variance.iter_mut().zip(&mean).zip(means).zip(squares) {
            let apart = block - mean;
            *variance += (square + apart * apart * weight) / n;
        }
    }
    (mean, variance)
}

/// The sums over each channel of `dy`, and of `dy · (x − mean)`.
fn gradient_sums(pool: &IntraPool, view: Channels, [dy, x]: [&[f32]; 2], mean: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let blocks = each_block(
        pool,
        view,
        #[inline(always)]
        |rows, sums, products| {
            for o in rows {
                add_rows(
                    view,
                    o,
                    sums,
                    #[inline(always)]
                    |at, _, sums| {
                        sums.iter_mut().zip(&dy[at..]).for_each(|(sum, dy)| *sum += *dy);
                    },
                );
                add_rows(
                    view,
                    o,
                    products,
                    #[inline(always)]
                    |at, c, products| {
                        let values = products.iter_mut().zip(&dy[at..]).zip(&x[at..]);
                        if view.inner == 1 {
                            values.zip(mean).for_each(|(((sum, dy), x), mean)| *sum += *dy * (*x - mean));
                        } else {
                            let mean = mean[c];
                            values.for_each(|((sum, dy), x)| *sum += *dy * (*x - mean));
                        }
                    },
                );
            }
        },
    );
    let (mut sums, mut products) = (vec![0.0; view.channels], vec![0.0; view.channels]);
    for (_, a, b) in &blocks {
        sums.iter_mut().zip(a).for_each(|(sum, x)| *sum += x);
        products.iter_mut().zip(b).for_each(|(sum, x)| *sum += x);
    }
    (sums, products)
}

/// What a block of rows gives: how many elements of each channel it has, and two numbers for each channel.
type Block = (f32, Vec<f32>, Vec<f32>);

/// Cuts the rows (all channels of one place, or of one image) into blocks whose size depends on the shape alone, and calls `f`
/// with the rows of each and two vectors of zeros, one number for each channel, to fill.
fn each_block(
    pool: &IntraPool,
    view: Channels,
    f: impl Fn(std::ops::Range<usize>, &mut [f32], &mut [f32]) + Sync,
) -> Vec<Block> {
    let Channels { outer, channels, inner } = view;
    if outer * channels * inner == 0 {
        return Vec::new();
    }
    let per_block = rows_per_task(1.0, channels * inner);
    let mut blocks: Vec<Block> = (0..outer.div_ceil(per_block)).map(|_| (0.0, Vec::new(), Vec::new())).collect();
    pool.for_each_chunk(&mut blocks, 1, |i, block| {
        let rows = i * per_block..((i + 1) * per_block).min(outer);
        let [(n, a, b)] = block else { return };
        (*n, *a, *b) = ((rows.len() * inner) as f32, vec![0.0; channels], vec![0.0; channels]);
        vectorize(
            #[inline(always)]
            || f(rows, a, b),
        );
    });
    blocks
}

/// Has `add(position, channel, sums)` add a run of values to as many sums: a row of all channels to theirs; or, where the
/// channels come first, pieces of a plane to sums side by side, which are then added to the channel's.
#[inline(always)]
fn add_rows(view: Channels, o: usize, sums: &mut [f32], add: impl Fn(usize, usize, &mut [f32])) {
    let Channels { channels, inner, .. } = view;
    if inner == 1 {
        return add(o * channels, 0, sums);
    }
    for (c, sum) in sums.iter_mut().enumerate() {
        let (start, mut at) = ((o * channels + c) * inner, 0);
        let mut lanes = [0.0; 32];
        while at < inner {
            let n = lanes.len().min(inner - at);
            add(start + at, c, &mut lanes[..n]);
            at += n;
        }
        *sum += lanes.iter().sum::<f32>();
    }
}

/// Calls `f(position, channel, run)` for every run of `out`: a row of channels, or a plane of one channel.
fn each_run(pool: &IntraPool, view: Channels, out: &mut [f32], f: impl Fn(usize, usize, &mut [f32]) + Sync) {
    if out.is_empty() {
        return;
    }
    let run = view.run();
    let chunk = rows_per_fill::<f32>(out.len(), 1.0, run) * run;
    pool.fill_chunks(out, chunk, &|i, out| {
        vectorize(
            #[inline(always)]
            || {
                for (k, out) in out.chunks_exact_mut(run).enumerate() {
                    let at = i * chunk + k * run;
                    f(at, (at / view.inner) % view.channels, out);
                }
            },
        );
    });
}

#[cfg(test)]
mod tests;
