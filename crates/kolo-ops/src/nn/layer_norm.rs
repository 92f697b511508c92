//! Layer normalisation (Ba et al., 2016). `KoloLayerNorm` is an op of our own: a row of floats is read once from memory, where the
//! composition of TensorFlow's ops, which is here as well, passes over all rows nine times, and over twenty times for the
//! gradient.

pub(crate) mod gpu;
mod long;

use half::{bf16, f16};
use kolo_core::{Error, PartialShape, Result, Tensor};
use kolo_device::cpu::vectorize;
use kolo_graph::{Gradient, HalfSafety, InferCtx, OpDef, Output, SplitRule};

use crate::cuda::FLOATS;
use crate::math::binary::first;
use crate::nn::float::{Float, sum_by};
use crate::nn::rows::{for_row_pairs, rows_per_task};
use crate::op::{Gpu, Op, cpu_kernels, gpu_kernel};
use crate::{Cost, KernelCtx};

/// `x` less its mean along the last dimension, over its standard deviation there, times `scale`, plus `offset`.
#[track_caller]
pub fn layer_norm<'g>(x: Output<'g>, scale: Output<'g>, offset: Output<'g>, epsilon: f64) -> Output<'g> {
    x.graph().op("KoloLayerNorm").inputs([x, scale, offset]).attr("epsilon", epsilon as f32).out()
}

/// [`layer_norm`] composed of TensorFlow's ops.
#[track_caller]
pub fn composed_layer_norm<'g>(x: Output<'g>, scale: Output<'g>, offset: Output<'g>, epsilon: f64) -> Output<'g> {
    let graph = x.graph();
    graph.name_scope("layer_norm", || {
        let mean_of_rows =
            |x: Output<'g>| graph.op("Mean").input(x).input(graph.constant(vec![-1i32])).attr("keep_dims", true).out();
        let mean = mean_of_rows(x);
        let variance = mean_of_rows(graph.op("SquaredDifference").input(x).input(mean).out());
        let inverse = graph.op("Rsqrt").input(variance + epsilon).out();
        (x - mean) * inverse * scale + offset
    })
}

pub(crate) static LAYER_NORM: Op = Op {
    def: OpDef {
        name: "KoloLayerNorm",
        signature: "(x:T, scale:T, offset:T) -> (y:T) ; T:type{half,bfloat16,float,double}, epsilon:float=9.99999974737875e-06",
        shape: |ctx| Ok(vec![infer(ctx, 0, &[1, 2])?.0]),
        gradient: Gradient::Rule(|op, dy| {
            let epsilon = op.attrs(|attrs| attrs.float("epsilon"))?;
            let builder = op.graph().op("KoloLayerNormGrad").inputs([first(dy)?, op.input(0), op.input(1)]);
            let grads = builder.attr("epsilon", epsilon).try_build()?;
            Ok(grads.outputs().into_iter().map(|grad| Some(grad.into())).collect())
        }),
        half: HalfSafety::Wide,
        split: SplitRule::Rows,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(forward: f32, f64; f16, bf16),
    gpu: Gpu::Kernels(&[gpu_kernel("T", FLOATS, gpu::forward)]),
    cost: Cost::Elements,
};

pub(crate) static LAYER_NORM_GRAD: Op = Op {
    def: OpDef {
        name: "KoloLayerNormGrad",
        signature: "(dy:T, x:T, scale:T) -> (dx:T, dscale:T, doffset:T) ; T:type{half,bfloat16,float,double}, \
                    epsilon:float=9.99999974737875e-06",
        shape: |ctx| {
            let (x, row) = infer(ctx, 1, &[2])?;
            Ok(vec![x.merge(ctx.input(0))?, row.clone(), row])
        },
        gradient: Gradient::Refused("no second derivative is defined for KoloLayerNorm"),
        half: HalfSafety::Wide,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(backward: f32, f64; f16, bf16),
    gpu: Gpu::Kernels(&[gpu_kernel("T", FLOATS, gpu::backward)]),
    cost: Cost::Elements,
};

/// The shape of `x` and that of a row, which the vectors agree with.
fn infer(ctx: &InferCtx<'_>, x: usize, vectors: &[usize]) -> Result<(PartialShape, PartialShape)> {
    let shape = ctx.input(x).clone();
    if shape.rank() == Some(0) {
        return Err(Error::invalid_argument("x must have at least one dimension"));
    }
    let last = shape.rank().and_then(|_| shape.dim(-1));
    let row = vectors.iter().try_fold(PartialShape::new(&[last]), |row, &i| row.merge(ctx.input(i)))?;
    Ok((shape, row))
}

/// The length of a row, which the vectors have as well.
fn row_length(ctx: &KernelCtx<'_>, x: usize, vectors: &[usize]) -> Result<usize> {
    let shape = ctx.input(x)?.shape();
    let Some(&n) = shape.last() else {
        return Err(Error::invalid_argument("x must have at least one dimension"));
    };
    match vectors.iter().map(|&i| ctx.input(i)).find(|v| v.as_ref().is_ok_and(|v| v.shape().dims() != [n])) {
        Some(Ok(odd)) => Err(Error::invalid_argument(format!("a vector of {n} is needed, not {}", odd.shape()))),
        _ => Ok(n),
    }
}

/// The mean of a row, and one over its standard deviation.
#[inline(always)]
fn moments<T: Float>(row: &[T], epsilon: T) -> (T, T) {
    let n = T::of(row.len() as f64);
    let mean = sum_by(row, |x: T| x) / n;
    let variance = sum_by(row, |x: T| {
        let centred = x - mean;
        centred * centred
    }) / n;
    (mean, T::of(1.0) / num_traits::Float::sqrt(variance + epsilon))
}

fn forward<T: Float>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let n = row_length(ctx, 0, &[1, 2])?;
    let epsilon = T::of(f64::from(ctx.attrs().float("epsilon")?));
    let mut out = ctx.allocate(T::DTYPE, ctx.input(0)?.shape().clone())?;
    let (x, scale, offset) = (ctx.data::<T>(0)?, ctx.data::<T>(1)?, ctx.data::<T>(2)?);
    if n > 0 {
        let chunk = rows_per_task(1.0, n) * n;
        ctx.pool().for_each_chunk(out.data_mut::<T>()?, chunk, |i, out| {
            let x = &x[i * chunk..i * chunk + out.len()];
            vectorize(
                #[inline(always)]
                || {
                    for (out, row) in out.chunks_exact_mut(n).zip(x.chunks_exact(n)) {
                        let (mean, inverse) = moments(row, epsilon);
                        for (((y, x), s), o) in out.iter_mut().zip(row).zip(scale).zip(offset) {
                            *y = (*x - mean) * inverse * *s + *o;
                        }
                    }
                },
            );
        });
    }
    ctx.set_output(0, out);
    Ok(())
}

/// With x̂ the normalised row and g = dy · scale: `dx = (g − mean(g) − x̂ · mean(g · x̂)) / σ`; the vectors' gradients are the
/// sums over all rows of dy · x̂ and dy. Mean and deviation are computed again, which costs less than keeping them.
fn backward<T: Float>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let n = row_length(ctx, 1, &[2])?;
    if ctx.input(0)?.shape() != ctx.input(1)?.shape() {
        return Err(Error::invalid_argument("dy and x must have the same shape"));
    }
    let epsilon = T::of(f64::from(ctx.attrs().float("epsilon")?));
    let mut dx = ctx.allocate(T::DTYPE, ctx.input(1)?.shape().clone())?;
    let (dy, x, scale) = (ctx.data::<T>(0)?, ctx.data::<T>(1)?, ctx.data::<T>(2)?);
    let count = T::of(n as f64);
    let per_block = rows_per_task(2.0, n) * n.max(1);
    // Each block of rows adds up sums of its own, so that the result does not depend on the threads.
    let mut sums = vec![T::of(0.0); x.len().div_ceil(per_block) * 2 * n];
    if n > 0 {
        for_row_pairs(ctx.pool(), 1, (per_block, 2 * n), dx.data_mut::<T>()?, &mut sums, |block, dx, sums| {
            vectorize(
                #[inline(always)]
                || {
                    let blocks = dx.chunks_mut(per_block).zip(sums.chunks_exact_mut(2 * n));
                    for (i, (dx, sums)) in blocks.enumerate() {
                        let at = (block + i) * per_block;
                        let (scale_sums, offset_sums) = sums.split_at_mut(n);
                        let rows = dy[at..].chunks_exact(n).zip(x[at..].chunks_exact(n));
                        for (dx, (dy, x)) in dx.chunks_exact_mut(n).zip(rows) {
                            let (mean, inverse) = moments(x, epsilon);
                            let zero = T::of(0.0);
                            let (mut mean_g, mut mean_gx) = ([zero; 16], [zero; 16]);
                            let (dy_blocks, x_blocks, s_blocks) = (dy.chunks(16), x.chunks(16), scale.chunks(16));
                            for ((dy, x), s) in dy_blocks.zip(x_blocks).zip(s_blocks) {
                                let sums = mean_g.iter_mut().zip(mean_gx.iter_mut());
                                for (((dy, x), s), (sum_g, sum_gx)) in dy.iter().zip(x).zip(s).zip(sums) {
                                    let (normal, g) = ((*x - mean) * inverse, *dy * *s);
                                    *sum_g += g;
                                    *sum_gx += g * normal;
                                }
                            }
                            let mean_g = mean_g.into_iter().sum::<T>() / count;
                            let mean_gx = mean_gx.into_iter().sum::<T>() / count;
                            // A loop for each thing that is written: with more, the compiler would have to ask
                            // too often whether they overlap, and uses no vectors.
                            for (((dx, dy), x), s) in dx.iter_mut().zip(dy).zip(x).zip(scale) {
                                let normal = (*x - mean) * inverse;
                                *dx = (*dy * *s - mean_g - normal * mean_gx) * inverse;
                            }
                            for ((sum, dy), x) in scale_sums.iter_mut().zip(dy).zip(x) {
                                *sum += *dy * ((*x - mean) * inverse);
                            }
                            for (sum, dy) in offset_sums.iter_mut().zip(dy) {
                                *sum += *dy;
                            }
                        }
                    }
                },
            );
        });
    }
    let mut totals = vec![T::of(0.0); 2 * n];
    for block in sums.chunks_exact((2 * n).max(1)) {
        totals.iter_mut().zip(block).for_each(|(total, sum)| *total += *sum);
    }
    let vector = |sums: &[T]| Tensor::vector(sums.to_vec());
    let (dscale, doffset) = (vector(&totals[..n]), vector(&totals[n..]));
    ctx.set_output(0, dx);
    ctx.set_output(1, dscale);
    ctx.set_output(2, doffset);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, check_op, evaluate, tensor, wavy};

    #[test]
    fn rows_have_mean_zero_and_variance_one() {
        let g = crate::graph();
        let x = g.constant([[1.0f32, 3.0], [10.0, 20.0]]);
        let (scale, offset) = (g.constant([1.0f32, 2.0]), g.constant([0.0f32, 0.5]));
        for y in [layer_norm(x, scale, offset, 0.0), composed_layer_norm(x, scale, offset, 0.0)] {
            let found = evaluate(&g, &[y], &[]).unwrap();
            assert_close(&found[0], &tensor([2, 2], [-1.0f32, 2.5, -1.0, 2.5]), 1e-5, "layer_norm");
        }
    }

    #[test]
    fn one_op_gives_what_many_give() {
        let g = crate::graph();
        // Long enough for several blocks of rows.
        let x = g.constant(wavy([300, 37], 1));
        let (scale, offset, weights) =
            (g.constant(wavy([37], 2)), g.constant(wavy([37], 3)), g.constant(wavy([300, 37], 4)));
        let grads = |y: Output<'_>| {
            let loss = g.op("Sum").input(y * weights).input(g.constant([0i32, 1])).out();
            let grads = kolo_graph::gradients(&[loss], &[x, scale, offset]).unwrap();
            let mut all = vec![y.endpoint()];
            all.extend(grads.into_iter().map(|grad| grad.unwrap().dense().unwrap().endpoint()));
            all
        };
        let one = grads(layer_norm(x, scale, offset, 1e-3));
        let many = grads(composed_layer_norm(x, scale, offset, 1e-3));
        let outputs: Vec<Output<'_>> = one.into_iter().chain(many).map(|at| Output::new(&g, at)).collect();
        let found = evaluate(&g, &outputs, &[]).unwrap();
        for (one, many) in found[..4].iter().zip(&found[4..]) {
            assert_close(one, many, 1e-4, "KoloLayerNorm");
        }
    }

    #[test]
    fn gradients_and_bad_input() {
        check_op("KoloLayerNorm").input(wavy([2, 3, 5], 1)).input(wavy([5], 2)).input(wavy([5], 3)).gradient();
        check_op("KoloLayerNorm").input(wavy([2, 3], 1)).input(wavy([5], 2)).input(wavy([5], 3)).fails("3");
        let empty = || tensor::<f32, 2>([3, 0], []);
        let none = || tensor::<f32, 1>([0], []);
        check_op("KoloLayerNorm").input(empty()).input(none()).input(none()).gives(empty());
        check_op("KoloLayerNormGrad").input(empty()).input(empty()).input(none()).gives_all([empty(), none(), none()]);
        let no_rows = || tensor::<f32, 2>([0, 2], []);
        let two = || tensor([2], [1.0f32, 1.0]);
        let zeros = || tensor([2], [0.0f32, 0.0]);
        check_op("KoloLayerNormGrad").input(no_rows()).input(no_rows()).input(two()).gives_all([
            no_rows(),
            zeros(),
            zeros(),
        ]);
    }
}
