//! `Conv2D`: a filter slid over images, and its gradients `Conv2DBackpropInput` and `Conv2DBackpropFilter`.
//!
//! A filter with fewer channels than the images is a grouped convolution: the channels are cut into groups, each of which
//! makes its part of the output.

mod integer;

mod gpu;

use std::borrow::Cow;

use half::{bf16, f16};
use kolo_core::{DType, Element, Error, PartialShape, Result, Shape, Tensor};
use kolo_device::cpu::conv::{self, ConvElement, ConvShape};
use kolo_device::cpu::gemm::Epilogue;
use kolo_graph::{Gradient, HalfSafety, InferCtx, OpBuilder, OpDef, Operation, Output, SplitRule};

use crate::cuda::FLOATS;
use crate::math::binary::first;
use crate::nn::float::Float;
use crate::nn::layout::{to_nchw, to_nhwc};
use crate::nn::window::{Images, Window};
use crate::op::{Gpu, Op, cpu, cpu_kernels, gpu_kernel};
use crate::{Cost, KernelCtx};

/// `filter` (`[height, width, channels before, channels after]`) slid over NHWC images. Padding is `SAME` or `VALID`.
#[track_caller]
pub fn conv2d<'g>(images: Output<'g>, filter: Output<'g>, strides: [i64; 2], padding: &str) -> Output<'g> {
    let strides = vec![1, strides[0], strides[1], 1];
    images.graph().op("Conv2D").input(images).input(filter).attr("strides", strides).attr("padding", padding).out()
}

/// As [`conv2d`], with zeros above, below, left and right of the images.
#[track_caller]
pub fn conv2d_explicit<'g>(images: Output<'g>, filter: Output<'g>, strides: [i64; 2], around: [i64; 4]) -> Output<'g> {
    let [top, bottom, left, right] = around;
    let builder = images.graph().op("Conv2D").input(images).input(filter).attr("padding", "EXPLICIT");
    let builder = builder.attr("strides", vec![1, strides[0], strides[1], 1]);
    builder.attr("explicit_paddings", vec![0, 0, top, bottom, left, right, 0, 0]).out()
}

macro_rules! attrs {
    ($types:literal) => {
        concat!(
            "T:type{",
            $types,
            "}, strides:list(int), use_cudnn_on_gpu:bool=true, padding:string{SAME|VALID|EXPLICIT}, ",
            "explicit_paddings:list(int)=[], data_format:string{NHWC|NCHW}=\"NHWC\", dilations:list(int)=[1,1,1,1]"
        )
    };
}

pub(crate) static CONV2D: Op = Op {
    def: OpDef {
        name: "Conv2D",
        signature: concat!("(input:T, filter:T) -> (output:T) ; ", attrs!("half,bfloat16,float,double,int32")),
        shape: infer,
        gradient: Gradient::Rule(|op, dy| {
            let (input, filter, dy) = (op.input(0), op.input(1), first(dy)?);
            let dx = like(op, "Conv2DBackpropInput").inputs([shape(input), filter, dy]).out();
            let df = like(op, "Conv2DBackpropFilter").inputs([input, shape(filter), dy]).out();
            Ok(vec![Some(dx.into()), Some(df.into())])
        }),
        half: HalfSafety::Faster,
        split: SplitRule::Convolution,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(forward: f32, f64; f16, bf16 | own cpu(DType::I32, integer::forward)),
    gpu: Gpu::Kernels(&[gpu_kernel("T", FLOATS, gpu::forward)]),
    cost: Cost::Heavy,
};

pub(crate) static CONV2D_BACKPROP_INPUT: Op = Op {
    def: OpDef {
        name: "Conv2DBackpropInput",
        signature: concat!(
            "(input_sizes:int32, filter:T, out_backprop:T) -> (output:T) ; ",
            attrs!("half,bfloat16,float,double,int32")
        ),
        shape: |ctx| {
            ctx.input_of_rank(1, 4)?;
            ctx.input_of_rank(2, 4)?;
            Ok(vec![ctx.constant_as_shape(0).merge(&PartialShape::of_rank(4))?])
        },
        gradient: Gradient::Rule(|op, dy| {
            let (filter, grad, dy) = (op.input(1), op.input(2), first(dy)?);
            let df = like(op, "Conv2DBackpropFilter").inputs([dy, shape(filter), grad]).out();
            let dg = like(op, "Conv2D").inputs([dy, filter]).out();
            Ok(vec![None, Some(df.into()), Some(dg.into())])
        }),
        half: HalfSafety::Faster,
        split: SplitRule::Examples,
        host_args: &["input_sizes"],
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(backprop_input: f32, f64; f16, bf16 | own cpu(DType::I32, integer::backprop_input)),
    gpu: Gpu::Kernels(&[gpu_kernel("T", FLOATS, gpu::backprop_input)]),
    cost: Cost::Heavy,
};

pub(crate) static CONV2D_BACKPROP_FILTER: Op = Op {
    def: OpDef {
        name: "Conv2DBackpropFilter",
        signature: concat!(
            "(input:T, filter_sizes:int32, out_backprop:T) -> (output:T) ; ",
            attrs!("half,bfloat16,float,double")
        ),
        shape: |ctx| {
            ctx.input_of_rank(0, 4)?;
            ctx.input_of_rank(2, 4)?;
            Ok(vec![ctx.constant_as_shape(1).merge(&PartialShape::of_rank(4))?])
        },
        gradient: Gradient::Rule(|op, dy| {
            let (input, grad, dy) = (op.input(0), op.input(2), first(dy)?);
            let dx = like(op, "Conv2DBackpropInput").inputs([shape(input), dy, grad]).out();
            let dg = like(op, "Conv2D").inputs([input, dy]).out();
            Ok(vec![Some(dx.into()), None, Some(dg.into())])
        }),
        half: HalfSafety::Faster,
        split: SplitRule::SumOfExamples,
        host_args: &["filter_sizes"],
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(backprop_filter: f32, f64; f16, bf16),
    gpu: Gpu::Kernels(&[gpu_kernel("T", FLOATS, gpu::backprop_filter)]),
    cost: Cost::Heavy,
};

fn infer(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let window = Window::from_attrs(ctx.attrs())?;
    let (input, filter) = (ctx.input_of_rank(0, 4)?, ctx.input_of_rank(1, 4)?);
    let images = window.partial_images(&input);
    if let (Some(depth), Some(inputs)) = (images.channels, filter.dim(2)) {
        groups(depth, inputs, filter.dim(3))?;
    }
    let spatial = window.output_dims(images.spatial, [filter.dim(0), filter.dim(1)])?;
    let output = Images { batch: images.batch, spatial, channels: filter.dim(3) };
    Ok(vec![PartialShape::new(&window.dims(output))])
}

/// How many groups of channels there are; an error unless input and output can be cut into as many.
fn groups(input: usize, filter: usize, output: Option<usize>) -> Result<usize> {
    if input == filter {
        return Ok(1);
    }
    if filter == 0 || !input.is_multiple_of(filter) {
        return Err(Error::invalid_argument(format!(
            "input depth must be evenly divisible by filter depth: {input} vs {filter}"
        )));
    }
    let groups = input / filter;
    match output {
        Some(output) if groups == 0 || !output.is_multiple_of(groups) => Err(Error::invalid_argument(format!(
            "output depth must be evenly divisible by number of groups: {output} vs {groups}"
        ))),
        _ => Ok(groups),
    }
}

/// Begins an op with the same window as `op`.
pub(super) fn like<'g>(op: Operation<'g>, name: &str) -> OpBuilder<'g> {
    let names = ["strides", "padding", "explicit_paddings", "data_format", "dilations", "ksize"];
    let attrs: Vec<_> =
        op.attrs(|attrs| names.iter().filter_map(|&name| Some((name, attrs.find(name)?.clone()))).collect());
    attrs.into_iter().fold(op.graph().op(name), |builder, (name, value)| builder.attr(name, value))
}

pub(super) fn shape(x: Output<'_>) -> Output<'_> {
    x.graph().op("Shape").input(x).out()
}

/// The window, the convolution of one group, the number of groups and the shape of the output, for an input and a filter of
/// these shapes.
pub(crate) fn plan(ctx: &KernelCtx<'_>, input: &Shape, filter: &Shape) -> Result<(Window, ConvShape, usize, Shape)> {
    let window = Window::from_attrs(ctx.attrs())?;
    let images = window.images(input)?;
    let &[height, width, inputs, outputs] = filter.dims() else {
        return Err(Error::invalid_argument(format!("filter must be 4-dimensional: {filter}")));
    };
    let groups = groups(images.channels, inputs, Some(outputs))?;
    let axes = window.axes(images.spatial, [height, width])?;
    let output = Images { batch: images.batch, spatial: axes.map(|axis| axis.output), channels: outputs };
    let shape = Shape::new(&window.dims(output))?;
    let [h, w] = axes;
    let convolution = ConvShape {
        batch: images.batch,
        input: [h.input, w.input, inputs],
        filter: [h.kernel, w.kernel],
        output: [h.output, w.output, outputs / groups.max(1)],
        stride: [h.stride, w.stride],
        dilation: [h.dilation, w.dilation],
        pad_top: h.before,
        pad_left: w.before,
    };
    Ok((window, convolution, groups, shape))
}

/// An error unless the output's gradient has the output's shape.
pub(crate) fn check_grad(found: &Shape, expected: &Shape) -> Result<()> {
    match found == expected {
        true => Ok(()),
        false => Err(Error::invalid_argument(format!(
            "out_backprop has shape {found}, but the convolution's output has shape {expected}"
        ))),
    }
}

fn forward<T: Float + ConvElement>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (input, filter) = (ctx.input(0)?, ctx.input(1)?);
    let (window, convolution, groups, shape) = plan(ctx, input.shape(), filter.shape())?;
    let out = images_out::<T>(ctx, &window, shape, |out| {
        if filter.n_elements() == 0 {
            out.fill(T::of(0.0));
            return Ok(());
        }
        let input = images_in::<T>(&window, input)?;
        let filter = filter.data::<T>()?;
        let run = |input: &[T], filter: &[T], out: &mut [T]| {
            conv::conv2d(ctx.pool(), &convolution, input, filter, out, Epilogue::default()).map_err(Error::internal)
        };
        if groups == 1 {
            return run(&input, filter, out);
        }
        for group in 0..groups {
            let mut part = vec![T::of(0.0); out.len() / groups];
            run(
                &cut(&input, groups, &convolution.input, group),
                &cut(filter, groups, &convolution.output, group),
                &mut part,
            )?;
            put(&part, groups, convolution.output[2], group, out);
        }
        Ok(())
    })?;
    ctx.set_output(0, out);
    Ok(())
}

fn backprop_input<T: Float + ConvElement>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let sizes = Shape::from_signed(&ctx.integers(0)?)?;
    let (filter, grad) = (ctx.input(1)?, ctx.input(2)?);
    let (window, convolution, groups, output) = plan(ctx, &sizes, filter.shape())?;
    check_grad(grad.shape(), &output)?;
    let out = images_out::<T>(ctx, &window, sizes, |out| {
        if filter.n_elements() == 0 || grad.n_elements() == 0 {
            out.fill(T::of(0.0));
            return Ok(());
        }
        let grad = images_in::<T>(&window, grad)?;
        let filter = filter.data::<T>()?;
        let run = |filter: &[T], grad: &[T], out: &mut [T]| {
            conv::conv2d_backprop_input(ctx.pool(), &convolution, filter, grad, out).map_err(Error::internal)
        };
        if groups == 1 {
            return run(filter, &grad, out);
        }
        for group in 0..groups {
            let mut part = vec![T::of(0.0); out.len() / groups];
            run(
                &cut(filter, groups, &convolution.output, group),
                &cut(&grad, groups, &convolution.output, group),
                &mut part,
            )?;
            put(&part, groups, convolution.input[2], group, out);
        }
        Ok(())
    })?;
    ctx.set_output(0, out);
    Ok(())
}

fn backprop_filter<T: Float + ConvElement>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let sizes = Shape::from_signed(&ctx.integers(1)?)?;
    let (input, grad) = (ctx.input(0)?, ctx.input(2)?);
    let (window, convolution, groups, output) = plan(ctx, input.shape(), &sizes)?;
    check_grad(grad.shape(), &output)?;
    let (input, grad) = (images_in::<T>(&window, input)?, images_in::<T>(&window, grad)?);
    let mut out = ctx.allocate(T::DTYPE, sizes)?;
    let values = out.data_mut::<T>()?;
    let run = |input: &[T], grad: &[T], out: &mut [T]| {
        conv::conv2d_backprop_filter(ctx.pool(), &convolution, input, grad, out).map_err(Error::internal)
    };
    match groups {
        _ if values.is_empty() => {}
        1 => run(&input, &grad, values)?,
        _ => {
            for group in 0..groups {
                let mut part = vec![T::of(0.0); values.len() / groups];
                run(
                    &cut(&input, groups, &convolution.input, group),
                    &cut(&grad, groups, &convolution.output, group),
                    &mut part,
                )?;
                put(&part, groups, convolution.output[2], group, values);
            }
        }
    }
    ctx.set_output(0, out);
    Ok(())
}

/// The channels of one group, out of rows of all groups' channels. `sizes` ends with the channels of one group.
fn cut<E: Element>(values: &[E], groups: usize, sizes: &[usize; 3], group: usize) -> Vec<E> {
    let n = sizes[2];
    let rows = values.chunks_exact((n * groups).max(1));
    rows.flat_map(|row| &row[group * n..(group + 1) * n]).copied().collect()
}

/// Puts the channels of one group, `n` in a row, where they belong.
fn put<E: Element>(part: &[E], groups: usize, n: usize, group: usize, out: &mut [E]) {
    for (part, row) in part.chunks_exact(n.max(1)).zip(out.chunks_exact_mut((n * groups).max(1))) {
        row[group * n..(group + 1) * n].copy_from_slice(part);
    }
}

/// The elements of images, with the channels last.
pub(super) fn images_in<'a, T: Float>(window: &Window, images: &'a Tensor) -> Result<Cow<'a, [T]>> {
    let values = images.data::<T>()?;
    Ok(if window.is_nchw() { Cow::Owned(to_nhwc(values, images.shape())) } else { Cow::Borrowed(values) })
}

/// A tensor of images that `f` fills with the channels last.
pub(super) fn images_out<T: Float>(
    ctx: &KernelCtx<'_>,
    window: &Window,
    shape: Shape,
    f: impl FnOnce(&mut [T]) -> Result<()>,
) -> Result<Tensor> {
    let mut out = ctx.allocate(T::DTYPE, shape.clone())?;
    let values = out.data_mut::<T>()?;
    if window.is_nchw() {
        let mut images = vec![T::of(0.0); values.len()];
        f(&mut images)?;
        to_nchw(&images, &shape, values);
    } else {
        f(values)?;
    }
    Ok(out)
}

#[cfg(test)]
mod tests;
