//! `DepthwiseConv2dNative`: a filter of its own for each channel, and its gradients.

mod single;

use half::{bf16, f16};
use kolo_core::{Error, PartialShape, Result, Shape};
use kolo_device::cpu::vectorize;
use kolo_graph::{Gradient, HalfSafety, InferCtx, OpDef, Output, SplitRule};

use crate::math::binary::first;
use crate::nn::conv2d::{images_in, images_out, like, shape};
use crate::nn::float::Float;
use crate::nn::window::{Axis, Images, Window, for_taps};
use crate::op::{Gpu, Op, cpu_kernels};
use crate::{Cost, KernelCtx};

/// `filter` (`[height, width, channels, multiplier]`) slid over NHWC images, each channel giving `multiplier` of its own.
#[track_caller]
pub fn depthwise_conv2d<'g>(images: Output<'g>, filter: Output<'g>, strides: [i64; 2], padding: &str) -> Output<'g> {
    let builder = images.graph().op("DepthwiseConv2dNative").input(images).input(filter);
    builder.attr("strides", vec![1, strides[0], strides[1], 1]).attr("padding", padding).out()
}

macro_rules! attrs {
    () => {
        "T:type{half,bfloat16,float,double}, strides:list(int), padding:string{SAME|VALID|EXPLICIT}, \
         explicit_paddings:list(int)=[], data_format:string{NHWC|NCHW}=\"NHWC\", dilations:list(int)=[1,1,1,1]"
    };
}

pub(crate) static DEPTHWISE_CONV2D_NATIVE: Op = Op {
    def: OpDef {
        name: "DepthwiseConv2dNative",
        signature: concat!("(input:T, filter:T) -> (output:T) ; ", attrs!()),
        shape: infer,
        gradient: Gradient::Rule(|op, dy| {
            let (input, filter, dy) = (op.input(0), op.input(1), first(dy)?);
            let dx = like(op, "DepthwiseConv2dNativeBackpropInput").inputs([shape(input), filter, dy]).out();
            let df = like(op, "DepthwiseConv2dNativeBackpropFilter").inputs([input, shape(filter), dy]).out();
            Ok(vec![Some(dx.into()), Some(df.into())])
        }),
        half: HalfSafety::Faster,
        split: SplitRule::Examples,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(forward: f32, f64; f16, bf16),
    gpu: Gpu::Missing,
    cost: Cost::Heavy,
};

pub(crate) static DEPTHWISE_CONV2D_NATIVE_BACKPROP_INPUT: Op = Op {
    def: OpDef {
        name: "DepthwiseConv2dNativeBackpropInput",
        signature: concat!("(input_sizes:int32, filter:T, out_backprop:T) -> (output:T) ; ", attrs!()),
        shape: |ctx| Ok(vec![ctx.constant_as_shape(0).merge(&PartialShape::of_rank(4))?]),
        gradient: Gradient::Rule(|op, dy| {
            let (filter, grad, dy) = (op.input(1), op.input(2), first(dy)?);
            let df = like(op, "DepthwiseConv2dNativeBackpropFilter").inputs([dy, shape(filter), grad]).out();
            let dg = like(op, "DepthwiseConv2dNative").inputs([dy, filter]).out();
            Ok(vec![None, Some(df.into()), Some(dg.into())])
        }),
        half: HalfSafety::Faster,
        split: SplitRule::Examples,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(backprop_input: f32, f64; f16, bf16),
    gpu: Gpu::Missing,
    cost: Cost::Heavy,
};

pub(crate) static DEPTHWISE_CONV2D_NATIVE_BACKPROP_FILTER: Op = Op {
    def: OpDef {
        name: "DepthwiseConv2dNativeBackpropFilter",
        signature: concat!("(input:T, filter_sizes:int32, out_backprop:T) -> (output:T) ; ", attrs!()),
        shape: |ctx| Ok(vec![ctx.constant_as_shape(1).merge(&PartialShape::of_rank(4))?]),
        gradient: Gradient::Rule(|op, dy| {
            let (input, grad, dy) = (op.input(0), op.input(2), first(dy)?);
            let dx = like(op, "DepthwiseConv2dNativeBackpropInput").inputs([shape(input), dy, grad]).out();
            let dg = like(op, "DepthwiseConv2dNative").inputs([input, dy]).out();
            Ok(vec![Some(dx.into()), None, Some(dg.into())])
        }),
        half: HalfSafety::Faster,
        split: SplitRule::SumOfExamples,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(backprop_filter: f32, f64; f16, bf16),
    gpu: Gpu::Missing,
    cost: Cost::Heavy,
};

fn infer(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let window = Window::from_attrs(ctx.attrs())?;
    let (input, filter) = (ctx.input_of_rank(0, 4)?, ctx.input_of_rank(1, 4)?);
    let images = window.partial_images(&input);
    if let (Some(depth), Some(filter)) = (images.channels, filter.dim(2))
        && depth != filter
    {
        return Err(depths_differ(depth, filter));
    }
    let spatial = window.output_dims(images.spatial, [filter.dim(0), filter.dim(1)])?;
    let channels = match (images.channels.or(filter.dim(2)), filter.dim(3)) {
        (Some(channels), Some(multiplier)) => channels.checked_mul(multiplier),
        _ => None,
    };
    Ok(vec![PartialShape::new(&window.dims(Images { batch: images.batch, spatial, channels }))])
}

fn depths_differ(input: usize, filter: usize) -> Error {
    Error::invalid_argument(format!("input and filter must have the same depth: {input} vs {filter}"))
}

/// Sizes of a depthwise convolution.
struct Depthwise {
    window: Window,
    batch: usize,
    h: Axis,
    w: Axis,
    channels: usize,
    multiplier: usize,
    /// The output's shape.
    shape: Shape,
}

impl Depthwise {
    fn new(ctx: &KernelCtx<'_>, input: &Shape, filter: &Shape) -> Result<Depthwise> {
        let window = Window::from_attrs(ctx.attrs())?;
        let images = window.images(input)?;
        let &[height, width, channels, multiplier] = filter.dims() else {
            return Err(Error::invalid_argument(format!("filter must be 4-dimensional: {filter}")));
        };
        if images.channels != channels {
            return Err(depths_differ(images.channels, channels));
        }
        let [h, w] = window.axes(images.spatial, [height, width])?;
        let after = channels.checked_mul(multiplier).ok_or_else(|| Error::invalid_argument("too many channels"))?;
        let output = Images { batch: images.batch, spatial: [h.output, w.output], channels: after };
        let shape = Shape::new(&window.dims(output))?;
        Ok(Depthwise { window, batch: images.batch, h, w, channels, multiplier, shape })
    }

    /// Elements of an image before, and after.
    fn images(&self) -> (usize, usize) {
        let before = self.h.input * self.w.input * self.channels;
        (before, self.h.output * self.w.output * self.channels * self.multiplier)
    }

    fn check_grad(&self, found: &Shape) -> Result<()> {
        match *found == self.shape {
            true => Ok(()),
            false => Err(Error::invalid_argument(format!(
                "out_backprop has shape {found}, but the convolution's output has shape {}",
                self.shape
            ))),
        }
    }
}

fn forward<T: Float>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (input, filter) = (ctx.input(0)?, ctx.input(1)?);
    let plan = Depthwise::new(ctx, input.shape(), filter.shape())?;
    let (x, f) = (images_in::<T>(&plan.window, input)?, filter.data::<T>()?);
    let (c, m) = (plan.channels, plan.multiplier);
    let (before, after) = plan.images();
    let out = images_out::<T>(ctx, &plan.window, plan.shape.clone(), |y| {
        if m == 1 {
            single::forward(ctx.pool(), &plan, &x, f, y);
            return Ok(());
        }
        y.fill(T::of(0.0));
        if before == 0 || after == 0 {
            return Ok(());
        }
        ctx.pool().for_each_chunk(y, after, |n, y| {
            let x = &x[n * before..(n + 1) * before];
            vectorize(
                #[inline(always)]
                || {
                    for_taps(&plan.h, &plan.w, |o, k, i| {
                        let (x, f) = (&x[i * c..(i + 1) * c], &f[k * c * m..(k + 1) * c * m]);
                        let y = &mut y[o * c * m..(o + 1) * c * m];
                        for ((y, f), &x) in y.chunks_exact_mut(m).zip(f.chunks_exact(m)).zip(x) {
                            y.iter_mut().zip(f).for_each(|(y, &f)| *y += x * f);
                        }
                    });
                },
            );
        });
        Ok(())
    })?;
    ctx.set_output(0, out);
    Ok(())
}

fn backprop_input<T: Float>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let sizes = Shape::from_signed(&ctx.integers(0)?)?;
    let (filter, grad) = (ctx.input(1)?, ctx.input(2)?);
    let plan = Depthwise::new(ctx, &sizes, filter.shape())?;
    plan.check_grad(grad.shape())?;
    let (dy, f) = (images_in::<T>(&plan.window, grad)?, filter.data::<T>()?);
    let (c, m) = (plan.channels, plan.multiplier);
    let (before, after) = plan.images();
    let out = images_out::<T>(ctx, &plan.window, sizes, |dx| {
        if m == 1 {
            single::backprop_input(ctx.pool(), &plan, f, &dy, dx);
            return Ok(());
        }
        dx.fill(T::of(0.0));
        if before == 0 || after == 0 {
            return Ok(());
        }
        ctx.pool().for_each_chunk(dx, before, |n, dx| {
            let dy = &dy[n * after..(n + 1) * after];
            vectorize(
                #[inline(always)]
                || {
                    for_taps(&plan.h, &plan.w, |o, k, i| {
                        let (dy, f) = (&dy[o * c * m..(o + 1) * c * m], &f[k * c * m..(k + 1) * c * m]);
                        let dx = &mut dx[i * c..(i + 1) * c];
                        for ((dx, dy), f) in dx.iter_mut().zip(dy.chunks_exact(m)).zip(f.chunks_exact(m)) {
                            dy.iter().zip(f).for_each(|(&dy, &f)| *dx += dy * f);
                        }
                    });
                },
            );
        });
        Ok(())
    })?;
    ctx.set_output(0, out);
    Ok(())
}

/// Sums over images are kept in this many parts, whatever the number of threads.
const PARTS: usize = 8;

fn backprop_filter<T: Float>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let sizes = Shape::from_signed(&ctx.integers(1)?)?;
    let (input, grad) = (ctx.input(0)?, ctx.input(2)?);
    let plan = Depthwise::new(ctx, input.shape(), &sizes)?;
    plan.check_grad(grad.shape())?;
    let (x, dy) = (images_in::<T>(&plan.window, input)?, images_in::<T>(&plan.window, grad)?);
    let mut out = ctx.allocate(T::DTYPE, sizes)?;
    if plan.multiplier == 1 {
        single::backprop_filter(ctx.pool(), &plan, &x, &dy, out.data_mut::<T>()?);
        ctx.set_output(0, out);
        return Ok(());
    }
    let (c, m) = (plan.channels, plan.multiplier);
    let (before, after) = plan.images();
    let n_filter = out.n_elements();
    let sum = out.data_mut::<T>()?;
    sum.fill(T::of(0.0));
    if n_filter > 0 && before > 0 && after > 0 && plan.batch > 0 {
        let per_part = plan.batch.div_ceil(PARTS);
        let mut parts = vec![T::of(0.0); plan.batch.div_ceil(per_part) * n_filter];
        ctx.pool().for_each_chunk(&mut parts, n_filter, |part, df| {
            for n in part * per_part..((part + 1) * per_part).min(plan.batch) {
                let (x, dy) = (&x[n * before..(n + 1) * before], &dy[n * after..(n + 1) * after]);
                vectorize(
                    #[inline(always)]
                    || {
                        for_taps(&plan.h, &plan.w, |o, k, i| {
                            let (x, dy) = (&x[i * c..(i + 1) * c], &dy[o * c * m..(o + 1) * c * m]);
                            let df = &mut df[k * c * m..(k + 1) * c * m];
                            for ((df, dy), &x) in df.chunks_exact_mut(m).zip(dy.chunks_exact(m)).zip(x) {
                                df.iter_mut().zip(dy).for_each(|(df, &dy)| *df += x * dy);
                            }
                        });
                    },
                );
            }
        });
        for part in parts.chunks_exact(n_filter) {
            sum.iter_mut().zip(part).for_each(|(sum, &x)| *sum += x);
        }
    }
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::testing::{OpTest, check_op, tensor, wavy};

    fn with_window(op: &str, nchw: bool, strides: [i64; 2], padding: &str) -> OpTest {
        let order = |[h, w]: [i64; 2]| if nchw { vec![1, 1, h, w] } else { vec![1, h, w, 1] };
        check_op(op)
            .attr("strides", order(strides))
            .attr("padding", padding)
            .attr("data_format", if nchw { "NCHW" } else { "NHWC" })
    }

    #[test]
    fn values_are_tensorflows() {
        let (x, f) = (wavy([2, 5, 4, 2], 1), wavy([2, 2, 2, 2], 4));
        with_window("DepthwiseConv2dNative", false, [2, 2], "SAME").input(x.clone()).input(f).gives(tensor(
            [2, 3, 2, 4],
            [
                -0.51838076f32,
                0.15029335,
                0.7042606,
                -0.723744,
                -0.9004288,
                0.3457126,
                0.29254773,
                -0.55635905,
                -0.50041854,
                0.5848631,
                -0.99987054,
                0.2533048,
                0.031096458,
                0.47880718,
                -1.0711002,
                0.3884634,
                0.54102015,
                0.53540957,
                -0.42689356,
                0.24669808,
                0.7444152,
                0.36571252,
                -0.008846531,
                0.2824816,
                0.6231033,
                -0.14918676,
                0.82983065,
                -0.59265244,
                0.097999394,
                -0.049922705,
                0.9216246,
                -0.73843265,
                -1.0334241,
                0.486791,
                -0.13451248,
                -0.33593324,
                -0.9310973,
                0.58809274,
                -0.6209692,
                -0.03976795,
                -0.29185644,
                0.51831347,
                -0.8314281,
                -0.11118102,
                0.12178804,
                0.59713924,
                -0.75968224,
                0.087430835,
            ],
        ));
        with_window("DepthwiseConv2dNativeBackpropFilter", false, [2, 2], "SAME")
            .input(x)
            .input([2i32, 2, 2, 2])
            .input(wavy([2, 3, 2, 4], 3))
            .gives(tensor(
                [2, 2, 2, 2],
                [
                    -3.550825f32,
                    4.07736,
                    1.233467,
                    1.534735,
                    3.8174345,
                    -3.5674586,
                    -0.4421432,
                    -2.5658364,
                    -2.6091714,
                    1.304426,
                    1.1168735,
                    2.6665785,
                    2.7725492,
                    -0.49618387,
                    -0.29767847,
                    -2.8309417,
                ],
            ));
    }

    #[test]
    fn gradients() {
        let check = |nchw, strides, padding: &str, x: [usize; 4]| {
            with_window("DepthwiseConv2dNative", nchw, strides, padding).input(wavy(x, 1)).input(wavy([2, 2, 2, 2], 4))
        };
        check(false, [1, 1], "VALID", [2, 3, 4, 2]).gradient();
        check(false, [2, 1], "SAME", [2, 3, 4, 2]).gradient();
        check(true, [2, 1], "SAME", [2, 2, 3, 4]).gradient();
        check(false, [1, 1], "SAME", [1, 4, 4, 2]).attr("dilations", vec![1i64, 2, 1, 1]).gradient();
        let single = |nchw, strides, padding: &str, x: [usize; 4]| {
            with_window("DepthwiseConv2dNative", nchw, strides, padding).input(wavy(x, 1)).input(wavy([2, 3, 2, 1], 4))
        };
        single(false, [1, 1], "VALID", [2, 3, 4, 2]).gradient();
        single(false, [2, 1], "SAME", [2, 3, 4, 2]).gradient();
        single(false, [2, 3], "SAME", [1, 4, 5, 2]).gradient();
        single(true, [2, 1], "SAME", [2, 2, 3, 4]).gradient();
        single(false, [1, 1], "SAME", [1, 4, 4, 2]).attr("dilations", vec![1i64, 2, 1, 1]).gradient();
    }

    #[test]
    fn one_filter_for_each_of_many_channels_is_the_same_as_several() {
        // 85 channels: a block of each width, and some left over. The long way has two filters of which one is zero.
        let (x, dy) = (wavy([2, 5, 6, 85], 1), wavy([2, 3, 6, 85], 3));
        let f = wavy([3, 2, 85, 1], 2);
        let doubled = |values: &Tensor, shape: [usize; 4]| {
            let values = values.data::<f32>().unwrap().iter().flat_map(|&x| [x, 0.0]).collect::<Vec<_>>();
            tensor(shape, values)
        };
        let halved = |values: &Tensor, shape: [usize; 4]| {
            let values = values.data::<f32>().unwrap().iter().step_by(2).copied().collect::<Vec<_>>();
            tensor(shape, values)
        };
        let run = |op: &str, inputs: [Tensor; 2], sizes: Option<(usize, [i32; 4])>| {
            let mut test = with_window(op, false, [2, 1], "SAME");
            let mut inputs = inputs.into_iter();
            for i in 0..3 {
                test = match (sizes, inputs.len()) {
                    (Some((at, sizes)), _) if at == i => test.input(sizes),
                    (_, 0) => break,
                    _ => test.input(inputs.next().unwrap()),
                };
            }
            test
        };
        let (f2, dy2) = (doubled(&f, [3, 2, 85, 2]), doubled(&dy, [2, 3, 6, 170]));
        let long = run("DepthwiseConv2dNative", [x.clone(), f2.clone()], None).run(false).unwrap();
        run("DepthwiseConv2dNative", [x.clone(), f.clone()], None).gives(halved(&long[0], [2, 3, 6, 85]));
        let sizes = [2i32, 5, 6, 85];
        let long = run("DepthwiseConv2dNativeBackpropInput", [f2, dy2.clone()], Some((0, sizes))).run(false).unwrap();
        run("DepthwiseConv2dNativeBackpropInput", [f, dy.clone()], Some((0, sizes))).gives(long[0].clone());
        let name = "DepthwiseConv2dNativeBackpropFilter";
        let long = run(name, [x.clone(), dy2], Some((1, [3, 2, 85, 2]))).run(false).unwrap();
        run(name, [x, dy], Some((1, [3, 2, 85, 1]))).tolerance(1e-4).gives(halved(&long[0], [3, 2, 85, 1]));
    }

    #[test]
    fn sizes_zero_and_wrong() {
        let none = |shape: [usize; 4]| tensor::<f32, 4>(shape, []);
        with_window("DepthwiseConv2dNative", false, [1, 1], "VALID")
            .input(none([0, 3, 3, 2]))
            .input(wavy([2, 2, 2, 1], 1))
            .gives(none([0, 2, 2, 2]));
        with_window("DepthwiseConv2dNative", false, [1, 1], "VALID")
            .input(wavy([1, 3, 3, 2], 1))
            .input(none([2, 2, 2, 0]))
            .gives(none([1, 2, 2, 0]));
        with_window("DepthwiseConv2dNative", false, [1, 1], "VALID")
            .input(wavy([1, 3, 3, 2], 1))
            .input(wavy([2, 2, 3, 1], 1))
            .fails("input and filter must have the same depth: 2 vs 3");
    }
}
