//! Convolutions of `int32` images: products and sums that wrap, without the float kernels' matrices.

use kolo_core::{DType, Result, Shape};
use kolo_device::cpu::stop_if_asked;

use super::{check_grad, plan};
use crate::KernelCtx;
use crate::nn::layout::{to_nchw, to_nhwc};
use crate::nn::window::{Axis, Window, for_taps};

/// Images with the channels last, whatever the format.
fn channels_last(window: &Window, images: &[i32], shape: &Shape) -> Vec<i32> {
    if window.is_nchw() { to_nhwc(images, shape) } else { images.to_vec() }
}

fn axes(convolution: &kolo_device::cpu::conv::ConvShape) -> [Axis; 2] {
    let axis = |d: usize, before: usize| Axis {
        input: convolution.input[d],
        output: convolution.output[d],
        kernel: convolution.filter[d],
        stride: convolution.stride[d],
        dilation: convolution.dilation[d],
        before,
    };
    [axis(0, convolution.pad_top), axis(1, convolution.pad_left)]
}

/// Calls `f` with an output, an input and a filter position for every product there is.
fn for_products(
    convolution: &kolo_device::cpu::conv::ConvShape,
    groups: usize,
    mut f: impl FnMut(usize, usize, usize),
) {
    let ([h, w], [_, _, inputs], [_, _, outputs]) = (axes(convolution), convolution.input, convolution.output);
    let (all_inputs, all_outputs) = (inputs * groups, outputs * groups);
    for image in 0..convolution.batch {
        let (from, to) = (image * h.input * w.input, image * h.output * w.output);
        for_taps(&h, &w, |o, k, i| {
            stop_if_asked();
            for input in 0..all_inputs {
                let (group, channel) = (input / inputs, input % inputs);
                for output in group * outputs..(group + 1) * outputs {
                    f(
                        (to + o) * all_outputs + output,
                        (from + i) * all_inputs + input,
                        (k * inputs + channel) * all_outputs + output,
                    );
                }
            }
        });
    }
}

pub(super) fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (input, filter) = (ctx.input(0)?, ctx.input(1)?);
    let (window, convolution, groups, shape) = plan(ctx, input.shape(), filter.shape())?;
    let images = channels_last(&window, input.data::<i32>()?, input.shape());
    let filter = filter.data::<i32>()?;
    let mut sums = vec![0i32; shape.n_elements()];
    for_products(&convolution, groups, |o, i, f| sums[o] = sums[o].wrapping_add(images[i].wrapping_mul(filter[f])));
    let mut out = ctx.allocate(DType::I32, shape.clone())?;
    finish(&window, sums, &shape, out.data_mut::<i32>()?);
    ctx.set_output(0, out);
    Ok(())
}

pub(super) fn backprop_input(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let shape = Shape::from_signed(&ctx.integers(0)?)?;
    let (filter, grad) = (ctx.input(1)?, ctx.input(2)?);
    let (window, convolution, groups, output) = plan(ctx, &shape, filter.shape())?;
    check_grad(grad.shape(), &output)?;
    let grads = channels_last(&window, grad.data::<i32>()?, grad.shape());
    let filter = filter.data::<i32>()?;
    let mut sums = vec![0i32; shape.n_elements()];
    for_products(&convolution, groups, |o, i, f| sums[i] = sums[i].wrapping_add(grads[o].wrapping_mul(filter[f])));
    let mut out = ctx.allocate(DType::I32, shape.clone())?;
    finish(&window, sums, &shape, out.data_mut::<i32>()?);
    ctx.set_output(0, out);
    Ok(())
}

fn finish(window: &Window, images: Vec<i32>, shape: &Shape, out: &mut [i32]) {
    match window.is_nchw() {
        true => to_nchw(&images, shape, out),
        false => out.copy_from_slice(&images),
    }
}
