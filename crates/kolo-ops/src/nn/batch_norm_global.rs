//! `BatchNormWithGlobalNormalization` and its gradient: batch normalisation by given averages, one for each channel of an image. It is
//! older than `FusedBatchNorm`, and programs from before it still have it.

use half::{bf16, f16};
use kolo_core::{Error, PartialShape, Result, Shape};
use kolo_graph::{Gradient, HalfSafety, InferCtx, OpDef};

use crate::math::binary::first;
use crate::math::number::Real;
use crate::op::{Gpu, Op, cpu_kernels};
use crate::{Cost, KernelCtx};

pub(crate) static BATCH_NORM_WITH_GLOBAL_NORMALIZATION: Op = Op {
    def: OpDef {
        name: "BatchNormWithGlobalNormalization",
        signature: "(t:T, m:T, v:T, beta:T, gamma:T) -> (result:T) ; T:type{num}, variance_epsilon:float, \
                    scale_after_normalization:bool",
        shape: |ctx| {
            let (images, _) = infer(ctx, 1..5)?;
            Ok(vec![images])
        },
        gradient: Gradient::Rule(|op, dy| {
            let (epsilon, scale) = op.attrs(|attrs| {
                Ok::<_, Error>((attrs.float("variance_epsilon")?, attrs.bool("scale_after_normalization")?))
            })?;
            let builder = op.graph().op("BatchNormWithGlobalNormalizationGrad");
            let builder = builder.inputs([op.input(0), op.input(1), op.input(2), op.input(4), first(dy)?]);
            let builder = builder.attr("variance_epsilon", epsilon).attr("scale_after_normalization", scale);
            let grads = builder.build();
            Ok((0..5).map(|i| Some(grads.output(i).into())).collect())
        }),
        half: HalfSafety::Wide,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(forward: f32, f64; f16, bf16),
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

pub(crate) static BATCH_NORM_WITH_GLOBAL_NORMALIZATION_GRAD: Op = Op {
    def: OpDef {
        name: "BatchNormWithGlobalNormalizationGrad",
        signature: "(t:T, m:T, v:T, gamma:T, backprop:T) -> (dx:T, dm:T, dv:T, db:T, dg:T) ; T:type{num}, \
                    variance_epsilon:float, scale_after_normalization:bool",
        shape: |ctx| {
            let (images, channels) = infer(ctx, 1..4)?;
            let images = images.merge(ctx.input(4))?;
            Ok([vec![images], vec![channels; 4]].concat())
        },
        gradient: Gradient::Refused("the gradient of a gradient is not implemented here"),
        half: HalfSafety::Wide,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(backward: f32, f64; f16, bf16),
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

/// The shapes of the images in input 0 and of the vectors in these inputs.
fn infer(ctx: &InferCtx<'_>, vectors: std::ops::Range<usize>) -> Result<(PartialShape, PartialShape)> {
    let images = ctx.input_of_rank(0, 4)?;
    let mut channels = PartialShape::new(&[images.dim(-1)]);
    for i in vectors {
        channels = channels.merge(&ctx.input_of_rank(i, 1)?)?;
    }
    let dims = [images.dim(0), images.dim(1), images.dim(2), channels.dim(0)];
    Ok((PartialShape::new(&dims), channels))
}

/// How many channels there are: images have that many, and so have the vectors in these inputs.
fn channels(ctx: &KernelCtx<'_>, vectors: std::ops::Range<usize>) -> Result<usize> {
    let images = ctx.input(0)?.shape();
    let &[.., n] = images.dims() else {
        return Err(Error::invalid_argument(format!("input must be 4-dimensional: {images}")));
    };
    if images.rank() != 4 {
        return Err(Error::invalid_argument(format!("input must be 4-dimensional: {images}")));
    }
    for i in vectors {
        let vector = ctx.input(i)?.shape();
        if vector.dims() != [n] {
            return Err(Error::invalid_argument(format!(
                "input {i} must be a vector of {n} channels, found shape {vector}"
            )));
        }
    }
    Ok(n)
}

fn forward<T: Real>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let n = channels(ctx, 1..5)?;
    let epsilon = T::from_f64(f64::from(ctx.attrs().float("variance_epsilon")?));
    let scales = ctx.attrs().bool("scale_after_normalization")?;
    let (m, v, beta, gamma) = (ctx.data::<T>(1)?, ctx.data::<T>(2)?, ctx.data::<T>(3)?, ctx.data::<T>(4)?);
    let factors: Vec<T> = (0..n)
        .map(|c| {
            let factor = (v[c] + epsilon).sqrt().recip();
            if scales { factor * gamma[c] } else { factor }
        })
        .collect();
    let mut out = ctx.allocate(T::DTYPE, ctx.input(0)?.shape().clone())?;
    let x = ctx.data::<T>(0)?;
    if n > 0 {
        let chunk = (1usize << 14).next_multiple_of(n);
        ctx.pool().for_each_chunk(out.data_mut::<T>()?, chunk, |i, out| {
            for (k, y) in out.iter_mut().enumerate() {
                let c = k % n;
                *y = (x[i * chunk + k] - m[c]) * factors[c] + beta[c];
            }
        });
    }
    ctx.set_output(0, out);
    Ok(())
}

fn backward<T: Real>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let n = channels(ctx, 1..4)?;
    if ctx.input(4)?.shape() != ctx.input(0)?.shape() {
        return Err(Error::invalid_argument("backprop must have the same shape as the input"));
    }
    let epsilon = T::from_f64(f64::from(ctx.attrs().float("variance_epsilon")?));
    let scales = ctx.attrs().bool("scale_after_normalization")?;
    let (m, v, gamma) = (ctx.data::<T>(1)?, ctx.data::<T>(2)?, ctx.data::<T>(3)?);
    let roots: Vec<T> = v.iter().map(|&v| (v + epsilon).sqrt().recip()).collect();
    let scale = |c: usize| if scales { gamma[c] } else { T::ONE };
    let (x, dy) = (ctx.data::<T>(0)?, ctx.data::<T>(4)?);
    let mut dx = ctx.allocate(T::DTYPE, ctx.input(0)?.shape().clone())?;
    // Of each channel the sums of dy and of dy · (x − m).
    let mut sums = vec![(0.0f64, 0.0f64); n];
    for (k, (dx, (&x, &dy))) in
        kolo_device::cpu::looking(dx.data_mut::<T>()?.iter_mut().zip(x.iter().zip(dy)).enumerate())
    {
        let c = k % n;
        *dx = dy * (roots[c] * scale(c));
        sums[c].0 += dy.to_f64();
        sums[c].1 += (dy * (x - m[c])).to_f64();
    }
    let mut vectors = Vec::new();
    for kind in 0..4 {
        let mut out = ctx.allocate(T::DTYPE, Shape::new(&[n])?)?;
        for (c, y) in out.data_mut::<T>()?.iter_mut().enumerate() {
            let (of_dy, of_product) = (T::from_f64(sums[c].0), T::from_f64(sums[c].1));
            let root = roots[c];
            *y = match kind {
                0 => -(of_dy * scale(c) * root),
                1 => of_product * scale(c) * T::from_f64(-0.5) * (root * root * root),
                2 => of_dy,
                _ if scales => of_product * root,
                _ => T::ZERO,
            };
        }
        vectors.push(out);
    }
    ctx.set_output(0, dx);
    for (i, vector) in vectors.into_iter().enumerate() {
        ctx.set_output(i + 1, vector);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::testing::{check_op, tensor, wavy};

    fn case(scales: bool) -> crate::testing::OpTest {
        check_op("BatchNormWithGlobalNormalization")
            .attr("variance_epsilon", 0.25f32)
            .attr("scale_after_normalization", scales)
    }

    #[test]
    fn values() {
        let x = || tensor([1, 1, 2, 2], [1.0f32, 2.0, 3.0, 4.0]);
        let vectors = |test: crate::testing::OpTest| {
            test.input([1.0f32, 0.0]).input([0.75f32, 3.75]).input([10.0f32, 20.0]).input([2.0f32, 4.0])
        };
        vectors(case(true).input(x())).gives(tensor([1, 1, 2, 2], [10.0f32, 24.0, 14.0, 28.0]));
        vectors(case(false).input(x())).gives(tensor([1, 1, 2, 2], [10.0f32, 21.0, 12.0, 22.0]));
        vectors(case(false).input(tensor::<f32, 4>([0, 1, 1, 2], []))).gives(tensor::<f32, 4>([0, 1, 1, 2], []));
        vectors(case(false).input(wavy([1, 1, 1, 3], 0))).fails("");
    }

    #[test]
    fn gradients() {
        for scales in [true, false] {
            let test = case(scales).input(wavy([2, 1, 2, 2], 0)).input(wavy([2], 1)).input([0.5f32, 1.5]);
            test.input(wavy([2], 2)).input(wavy([2], 3)).gradient();
        }
    }
}
