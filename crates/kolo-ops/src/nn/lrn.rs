//! `LRN`: local response normalisation (Krizhevsky et al., 2012): each value over a power of the sum of squares of its
//! neighbours along the channels. `LRNGrad`: its gradient.

use half::{bf16, f16};
use kolo_core::{Error, Result};
use kolo_graph::{Attrs, Gradient, HalfSafety, OpDef, Output, SplitRule, shape_fns};

use crate::math::binary::first;
use crate::nn::float::Float;
use crate::nn::rows::rows_per_task;
use crate::op::{Gpu, Op, cpu_kernels};
use crate::{Cost, KernelCtx};

/// `x / (bias + alpha · Σ x²)^beta`, the sum over `2 · depth_radius + 1` neighbours along the last dimension.
#[track_caller]
pub fn lrn(x: Output<'_>, depth_radius: i64, bias: f32, alpha: f32, beta: f32) -> Output<'_> {
    let builder = x.graph().op("LRN").input(x).attr("depth_radius", depth_radius);
    builder.attr("bias", bias).attr("alpha", alpha).attr("beta", beta).out()
}

pub(crate) static LRN: Op = Op {
    def: OpDef {
        name: "LRN",
        signature: "(input:T) -> (output:T) ; depth_radius:int=5, bias:float=1.0, alpha:float=1.0, beta:float=0.5, \
                    T:type{half,bfloat16,float}=float",
        shape: |ctx| Ok(vec![ctx.input_of_rank(0, 4)?]),
        gradient: Gradient::Rule(|op, dy| {
            let mut builder = op.graph().op("LRNGrad").inputs([first(dy)?, op.input(0), op.output(0)]);
            for name in ["depth_radius", "bias", "alpha", "beta"] {
                if let Some(value) = op.attrs(|attrs| attrs.find(name).cloned()) {
                    builder = builder.attr(name, value);
                }
            }
            Ok(vec![Some(builder.out().into())])
        }),
        half: HalfSafety::Wide,
        split: SplitRule::Examples,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(forward: f32; f16, bf16),
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

pub(crate) static LRN_GRAD: Op = Op {
    def: OpDef {
        name: "LRNGrad",
        signature: "(input_grads:T, input_image:T, output_image:T) -> (output:T) ; depth_radius:int=5, bias:float=1.0, \
                    alpha:float=1.0, beta:float=0.5, T:type{half,bfloat16,float}=float",
        shape: shape_fns::all_same,
        gradient: Gradient::Refused("no second derivative is defined for LRN"),
        half: HalfSafety::Wide,
        split: SplitRule::Examples,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(backward: f32; f16, bf16),
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

/// The attributes.
struct Normalisation {
    radius: usize,
    bias: f64,
    alpha: f64,
    beta: f64,
}

impl Normalisation {
    fn from_attrs(attrs: &Attrs) -> Result<Normalisation> {
        let radius = attrs.int("depth_radius")?;
        let radius = usize::try_from(radius)
            .map_err(|_| Error::invalid_argument(format!("depth_radius = {radius} is negative")))?;
        let float = |name| attrs.float(name).map(f64::from);
        Ok(Normalisation { radius, bias: float("bias")?, alpha: float("alpha")?, beta: float("beta")? })
    }

    /// The neighbours of channel `c` of `n`.
    fn around(&self, c: usize, n: usize) -> std::ops::Range<usize> {
        c.saturating_sub(self.radius)..c.saturating_add(self.radius).saturating_add(1).min(n)
    }

    /// `bias + alpha · Σ x²` over the neighbours of channel `c`.
    fn norm<T: Float>(&self, row: &[T], c: usize) -> T {
        let squares: T = row[self.around(c, row.len())].iter().map(|x| *x * *x).sum();
        T::of(self.bias) + T::of(self.alpha) * squares
    }
}

fn forward<T: Float>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let normalisation = Normalisation::from_attrs(ctx.attrs())?;
    let input = ctx.input(0)?;
    let &[_, _, _, n] = input.shape().dims() else {
        return Err(Error::invalid_argument(format!("in must be 4-dimensional, found {}", input.shape())));
    };
    let mut out = ctx.allocate(T::DTYPE, input.shape().clone())?;
    let x = input.data::<T>()?;
    if !x.is_empty() {
        let chunk = rows_per_task(20.0, n) * n;
        ctx.pool().for_each_chunk(out.data_mut::<T>()?, chunk, |i, out| {
            for (out, row) in out.chunks_exact_mut(n).zip(x[i * chunk..].chunks_exact(n)) {
                for (c, y) in out.iter_mut().enumerate() {
                    let scale = num_traits::Float::powf(normalisation.norm(row, c), T::of(-normalisation.beta));
                    *y = row[c] * scale;
                }
            }
        });
    }
    ctx.set_output(0, out);
    Ok(())
}

fn backward<T: Float>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let normalisation = Normalisation::from_attrs(ctx.attrs())?;
    let input = ctx.input(1)?;
    let shape = input.shape().clone();
    if *ctx.input(0)?.shape() != shape || *ctx.input(2)?.shape() != shape || shape.rank() == 0 {
        return Err(Error::invalid_argument("input_grads, input_image, and out_image should have the same shape"));
    }
    let n = shape[shape.rank() - 1];
    let mut out = ctx.allocate(T::DTYPE, shape)?;
    let (dy, x, y) = (ctx.data::<T>(0)?, ctx.data::<T>(1)?, ctx.data::<T>(2)?);
    if !x.is_empty() {
        let chunk = rows_per_task(40.0, n) * n;
        ctx.pool().for_each_chunk(out.data_mut::<T>()?, chunk, |i, out| {
            let mut dx = vec![T::of(0.0); n];
            for (r, out) in out.chunks_exact_mut(n).enumerate() {
                let span = i * chunk + r * n..i * chunk + (r + 1) * n;
                let (dy, x, y) = (&dy[span.clone()], &x[span.clone()], &y[span]);
                dx.fill(T::of(0.0));
                for c in 0..n {
                    let norm = normalisation.norm(x, c);
                    let dy = dy[c];
                    dx[c] += dy * num_traits::Float::powf(norm, T::of(-normalisation.beta));
                    let shared = T::of(-2.0 * normalisation.alpha * normalisation.beta) * y[c] / norm * dy;
                    for k in normalisation.around(c, n) {
                        dx[k] += shared * x[k];
                    }
                }
                out.iter_mut().zip(&dx).for_each(|(out, &dx)| *out = dx);
            }
        });
    }
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::testing::{OpTest, check_op, tensor, wavy};

    fn with_attrs(op: &str) -> OpTest {
        check_op(op).attr("depth_radius", 2i64).attr("bias", 1.5f32).attr("alpha", 0.5f32).attr("beta", 0.75f32)
    }

    #[test]
    fn values_are_tensorflows() {
        with_attrs("LRN").input(wavy([1, 1, 2, 7], 1)).gives(tensor(
            [1, 1, 2, 7],
            [
                -0.0784368f32,
                0.5688265,
                -0.033711653,
                -0.42982244,
                0.20600684,
                0.4854092,
                -0.34450075,
                -0.4244,
                0.42169982,
                0.2955954,
                -0.40611738,
                -0.13750803,
                0.5711364,
                0.05709033,
            ],
        ));
        with_attrs("LRNGrad")
            .input(wavy([1, 1, 2, 7], 2))
            .input(wavy([1, 1, 2, 7], 1))
            .input(tensor(
                [1, 1, 2, 7],
                [
                    -0.0784368f32,
                    0.5688265,
                    -0.033711653,
                    -0.42982244,
                    0.20600684,
                    0.4854092,
                    -0.34450075,
                    -0.4244,
                    0.42169982,
                    0.2955954,
                    -0.40611738,
                    -0.13750803,
                    0.5711364,
                    0.05709033,
                ],
            ))
            .gives(tensor(
                [1, 1, 2, 7],
                [
                    -0.15160382f32,
                    0.17235741,
                    0.07418837,
                    0.08526759,
                    -0.028881636,
                    0.15023208,
                    -0.1135758,
                    -0.24576026,
                    0.0040404648,
                    0.09181167,
                    0.1012968,
                    -0.097855486,
                    0.1776049,
                    0.13775042,
                ],
            ));
    }

    #[test]
    fn the_gradient_is_the_grad_op() {
        let g = crate::graph();
        let x = g.constant(wavy([1, 1, 2, 7], 1));
        let y = super::lrn(x, 2, 1.5, 0.5, 0.75);
        let options = kolo_graph::GradientOptions {
            grad_ys: vec![Some(g.constant(wavy([1, 1, 2, 7], 2)))],
            ..Default::default()
        };
        let grad = kolo_graph::gradients_with(&[y], &[x], &options).unwrap()[0].unwrap().dense().unwrap();
        let found = crate::testing::evaluate(&g, &[grad], &[]).unwrap();
        crate::testing::assert_close(
            &found[0],
            &tensor(
                [1, 1, 2, 7],
                [
                    -0.15160382f32,
                    0.17235741,
                    0.07418837,
                    0.08526759,
                    -0.028881636,
                    0.15023208,
                    -0.1135758,
                    -0.24576026,
                    0.0040404648,
                    0.09181167,
                    0.1012968,
                    -0.097855486,
                    0.1776049,
                    0.13775042,
                ],
            ),
            1e-5,
            "gradient of LRN",
        );
    }

    #[test]
    fn sizes_zero_and_wrong() {
        let none = || tensor::<f32, 4>([1, 0, 2, 7], []);
        with_attrs("LRN").input(none()).gives(none());
        with_attrs("LRN").input([1.0f32]).fails("should have rank 4");
        check_op("LRN").attr("depth_radius", -1i64).input(wavy([1, 1, 1, 2], 1)).fails("depth_radius = -1 is negative");
        check_op("LRN")
            .attr("depth_radius", i64::MAX)
            .attr("alpha", 0.0f32)
            .input(wavy([1, 1, 1, 2], 1))
            .gives(wavy([1, 1, 1, 2], 1));
    }
}
