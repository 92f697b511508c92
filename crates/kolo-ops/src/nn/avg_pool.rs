//! `AvgPool`: the mean of what lies under a window and in the image, for each channel. `AvgPoolGrad`: its gradient.

use half::{bf16, f16};
use kolo_core::{Error, PartialShape, Result, Shape};
use kolo_device::cpu::stop_if_asked;
use kolo_graph::{Gradient, HalfSafety, OpDef, Output, SplitRule};

use crate::cuda::FLOATS;
use crate::math::binary::first;
use crate::math::elementwise::lanes;
use crate::nn::conv2d::{like, shape};
use crate::nn::float::Float;
use crate::nn::pool::gpu as pool_on_gpu;
use crate::nn::pool::{Folding, Pool, infer, is_across_channels};
use crate::op::{Gpu, Op, cpu_kernels, gpu_kernel};
use crate::{Cost, KernelCtx};

/// The means under windows of `size` over NHWC images. Padding is `SAME` or `VALID`.
#[track_caller]
pub fn avg_pool<'g>(images: Output<'g>, size: [i64; 2], strides: [i64; 2], padding: &str) -> Output<'g> {
    let list = |[h, w]: [i64; 2]| vec![1, h, w, 1];
    let builder = images.graph().op("AvgPool").input(images);
    builder.attr("ksize", list(size)).attr("strides", list(strides)).attr("padding", padding).out()
}

pub(crate) static AVG_POOL: Op = Op {
    def: OpDef {
        name: "AvgPool",
        signature: "(value:T) -> (output:T) ; ksize:list(int)>=4, strides:list(int)>=4, padding:string{SAME|VALID}, \
                    data_format:string{NHWC|NCHW}=\"NHWC\", T:type{half,bfloat16,float,double}",
        shape: infer,
        gradient: Gradient::Rule(|op, dy| {
            let dx = like(op, "AvgPoolGrad").inputs([shape(op.input(0)), first(dy)?]).out();
            Ok(vec![Some(dx.into())])
        }),
        half: HalfSafety::Safe,
        split: SplitRule::Examples,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(forward: f32, f64; f16, bf16),
    gpu: Gpu::Kernels(&[gpu_kernel("T", FLOATS, |ctx| pool_on_gpu::forward(ctx, pool_on_gpu::AVG))
        .except("pools across channels", is_across_channels)]),
    cost: Cost::Elements,
};

pub(crate) static AVG_POOL_GRAD: Op = Op {
    def: OpDef {
        name: "AvgPoolGrad",
        signature: "(orig_input_shape:int32, grad:T) -> (output:T) ; ksize:list(int)>=4, strides:list(int)>=4, \
                    padding:string{SAME|VALID}, data_format:string{NHWC|NCHW}=\"NHWC\", \
                    T:type{half,bfloat16,float,double}",
        shape: |ctx| {
            ctx.input_of_rank(1, 4)?;
            Ok(vec![ctx.constant_as_shape(0).merge(&PartialShape::of_rank(4))?])
        },
        gradient: Gradient::Rule(|op, dy| Ok(vec![None, Some(like(op, "AvgPool").input(first(dy)?).out().into())])),
        half: HalfSafety::Safe,
        host_args: &["orig_input_shape"],
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(backward: f32, f64; f16, bf16),
    gpu: Gpu::Kernels(&[
        gpu_kernel("T", FLOATS, pool_on_gpu::avg_backward).except("pools across channels", is_across_channels)
    ]),
    cost: Cost::Elements,
};

/// One over the number of values that each place of the window covers.
fn weights<T: Float>(pool: &Pool) -> Vec<T> {
    let places = (0..pool.h.output).flat_map(|oh| (0..pool.w.output).map(move |ow| (oh, ow)));
    places.map(|(oh, ow)| T::of(1.0) / T::of((pool.h.taps(oh).len() * pool.w.taps(ow).len()) as f64)).collect()
}

fn forward<T: Float>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let input = ctx.input(0)?;
    let pool = Pool::new(ctx.attrs(), input.shape())?;
    let mut out = ctx.allocate(T::DTYPE, pool.shape.clone())?;
    let (values, c, weights) = (input.data::<T>()?, pool.channels, weights::<T>(&pool));
    if out.n_elements() > 0 {
        let step = pool.images_per_task();
        ctx.pool().for_each_chunk(out.data_mut::<T>()?, step * pool.output(), |task, out| {
            let images = &values[task * step * pool.input()..];
            lanes::<T, _>(
                #[inline(always)]
                || {
                    for (image, out) in
                        images.chunks_exact(pool.input().max(1)).zip(out.chunks_exact_mut(pool.output()))
                    {
                        for (o, out) in out.chunks_exact_mut(c).enumerate() {
                            if o % pool.w.output == 0 {
                                stop_if_asked();
                            }
                            mean_of_window(&pool, image, o, weights[o], out);
                        }
                    }
                },
            );
        });
    }
    ctx.set_output(0, out);
    Ok(())
}

/// The mean of each channel in the window at place `o` of the output; `weight` is one over the number of values.
#[inline(always)]
fn mean_of_window<T: Float>(pool: &Pool, image: &[T], o: usize, weight: T, out: &mut [T]) {
    let (oh, ow) = (o / pool.w.output, o % pool.w.output);
    let place = |kh, kw| (pool.h.at(oh, kh) * pool.w.input + pool.w.at(ow, kw), ());
    let window = [pool.h.taps(oh), pool.w.taps(ow)];
    Folding { image, channels: pool.channels, window, place }.run(
        T::of(0.0),
        #[inline(always)]
        |sum, x, ()| sum + x,
        #[inline(always)]
        |first, sums| {
            for (y, &sum) in out[first..].iter_mut().zip(sums) {
                *y = sum * weight;
            }
        },
    );
}

/// What pixel `i` of the input gets of the gradients of all windows that cover it.
#[inline(always)]
fn gradient_of_pixel<T: Float>(pool: &Pool, grad: &[T], i: usize, weights: &[T], dx: &mut [T]) {
    let place = |oh, ow| {
        let o = oh * pool.w.output + ow;
        (o, weights[o])
    };
    let window = [pool.h.places(i / pool.w.input), pool.w.places(i % pool.w.input)];
    Folding { image: grad, channels: pool.channels, window, place }.run(
        T::of(0.0),
        #[inline(always)]
        |sum, dy, weight| sum + dy * weight,
        #[inline(always)]
        |first, sums| {
            for (dx, &sum) in dx[first..].iter_mut().zip(sums) {
                *dx = sum;
            }
        },
    );
}

fn backward<T: Float>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let shape = Shape::from_signed(&ctx.integers(0)?)?;
    let pool = Pool::new(ctx.attrs(), &shape)?;
    let grad = ctx.input(1)?;
    if *grad.shape() != pool.shape {
        let found = grad.shape();
        return Err(Error::invalid_argument(format!("Expected grad shape to be {}, but got {found}", pool.shape)));
    }
    let mut out = ctx.allocate(T::DTYPE, shape)?;
    let (grad, c, weights) = (grad.data::<T>()?, pool.channels, weights::<T>(&pool));
    if out.n_elements() > 0 {
        let step = pool.images_per_task();
        ctx.pool().for_each_chunk(out.data_mut::<T>()?, step * pool.input(), |task, dx| {
            let first = task * step * pool.output();
            lanes::<T, _>(
                #[inline(always)]
                || {
                    for (image, dx) in dx.chunks_exact_mut(pool.input()).enumerate() {
                        let grad = &grad[first + image * pool.output()..][..pool.output()];
                        for (i, dx) in dx.chunks_exact_mut(c).enumerate() {
                            if i % pool.w.input == 0 {
                                stop_if_asked();
                            }
                            gradient_of_pixel(&pool, grad, i, &weights, dx);
                        }
                    }
                },
            );
        });
    }
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::testing::{OpTest, check_op, tensor, wavy};

    fn pool(op: &str, nchw: bool, size: [i64; 2], strides: [i64; 2], padding: &str) -> OpTest {
        let order = |[h, w]: [i64; 2]| if nchw { vec![1, 1, h, w] } else { vec![1, h, w, 1] };
        check_op(op)
            .attr("ksize", order(size))
            .attr("strides", order(strides))
            .attr("padding", padding)
            .attr("data_format", if nchw { "NCHW" } else { "NHWC" })
    }

    #[test]
    fn values_are_tensorflows() {
        let x = wavy([2, 5, 4, 2], 1);
        pool("AvgPool", false, [2, 2], [2, 2], "VALID").input(x.clone()).gives(tensor(
            [2, 2, 2, 2],
            [
                -0.07851121f32,
                0.13447529,
                -0.027886331,
                0.18205293,
                0.1714323,
                0.114057824,
                0.19528666,
                0.04107371,
                -0.068060726,
                -0.01932758,
                -0.09476318,
                0.053005025,
                0.031276464,
                0.19562086,
                0.105078846,
                0.17658493,
            ],
        ));
        pool("AvgPool", false, [3, 2], [2, 1], "SAME").input(x).gives(tensor(
            [2, 3, 4, 2],
            [
                -0.07851121f32,
                0.13447529,
                0.15674324,
                -0.061982095,
                -0.027886331,
                0.18205293,
                -0.9748981,
                -0.29039454,
                0.101092674,
                0.14333497,
                -0.025144547,
                -0.023972064,
                0.14420567,
                0.09969592,
                -0.33570457,
                0.88055056,
                0.18119282,
                -0.029579267,
                -0.060686067,
                0.15809886,
                0.13282819,
                -0.07944587,
                1.0546615,
                0.43397018,
                -0.068060726,
                -0.01932758,
                0.18592644,
                0.0843005,
                -0.09476318,
                0.053005025,
                0.02668801,
                -1.0675521,
                -0.017986527,
                0.14823218,
                0.09267142,
                -0.05922981,
                0.03547613,
                0.16297324,
                -0.8268083,
                0.16321959,
                0.16449298,
                0.12447834,
                -0.08369075,
                0.009970039,
                0.19399925,
                0.05292432,
                0.02731809,
                1.1734952,
            ],
        ));
        pool("AvgPoolGrad", false, [3, 2], [2, 1], "SAME").input([2i32, 5, 4, 2]).input(wavy([2, 3, 4, 2], 3)).gives(
            tensor(
                [2, 5, 4, 2],
                [
                    -0.13442966f32,
                    0.31890562,
                    -0.053957827,
                    0.007484257,
                    0.108470224,
                    0.021006078,
                    -0.14288291,
                    -0.23195076,
                    -0.010176845,
                    0.49382752,
                    -0.08021876,
                    0.06508431,
                    0.15751705,
                    -0.011604711,
                    -0.34847343,
                    -0.17463163,
                    0.12425282,
                    0.17492191,
                    -0.026260935,
                    0.05760005,
                    0.049046814,
                    -0.03261079,
                    -0.2055905,
                    0.057319134,
                    0.46163118,
                    0.13674779,
                    0.011796892,
                    0.16295315,
                    0.040282607,
                    -0.07926309,
                    -0.34169018,
                    0.41388264,
                    0.33737835,
                    -0.03817412,
                    0.038057834,
                    0.1053531,
                    -0.008764207,
                    -0.046652302,
                    -0.13609967,
                    0.3565635,
                    0.17110369,
                    -0.2892425,
                    0.10275629,
                    0.045833886,
                    -0.058122434,
                    0.025586545,
                    0.20572256,
                    0.31555355,
                    0.07106257,
                    -0.4529974,
                    0.16376835,
                    0.023146272,
                    -0.07565986,
                    0.09042164,
                    0.46122867,
                    0.3175512,
                    -0.100041114,
                    -0.1637549,
                    0.061012052,
                    -0.022687614,
                    -0.01753743,
                    0.064835094,
                    0.2555061,
                    0.0019976422,
                    -0.41251215,
                    -0.113685325,
                    0.07633105,
                    -0.07893479,
                    0.038080215,
                    0.1631903,
                    0.47863618,
                    -0.27386725,
                    -0.31247103,
                    0.050069574,
                    0.01531899,
                    -0.05624717,
                    0.05561763,
                    0.09835522,
                    0.22313008,
                    -0.2758649,
                ],
            ),
        );
    }

    #[test]
    fn channels_first_and_sizes_zero() {
        let x = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0];
        pool("AvgPool", true, [2, 2], [2, 2], "SAME")
            .input(tensor([1, 1, 3, 3], x))
            .gives(tensor([1, 1, 2, 2], [3.0f32, 4.5, 7.5, 9.0]));
        let none = |shape: [usize; 4]| tensor::<f32, 4>(shape, []);
        pool("AvgPool", false, [2, 2], [2, 2], "VALID").input(none([0, 4, 4, 3])).gives(none([0, 2, 2, 3]));
        pool("AvgPool", false, [2, 2], [2, 2], "VALID").input(none([2, 4, 4, 0])).gives(none([2, 2, 2, 0]));
        pool("AvgPoolGrad", false, [2, 2], [2, 2], "VALID")
            .input([1i32, 4, 4, 1])
            .input(wavy([1, 2, 1, 1], 1))
            .fails("Expected grad shape to be [1,2,2,1], but got [1,2,1,1]");
    }

    #[test]
    fn gradients() {
        for nchw in [false, true] {
            pool("AvgPool", nchw, [2, 2], [2, 2], "VALID").input(wavy([1, 4, 5, 3], 1)).gradient();
            pool("AvgPool", nchw, [3, 2], [2, 1], "SAME").input(wavy([1, 4, 5, 3], 1)).gradient();
        }
        pool("AvgPoolGrad", false, [3, 2], [2, 1], "SAME")
            .input([1i32, 5, 4, 2])
            .input(wavy([1, 3, 4, 2], 3))
            .gradient();
    }
}
