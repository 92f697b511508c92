//! `Conv2D` and its gradients by cuDNN.
//!
//! Filters of a graph are `[height, width, channels before, channels after]`; the library wants the channels after first, so a
//! filter is turned before the call, and its gradient after it. Padding that differs before and after is written out. Where
//! the library has no algorithm for channels last (doubles, for one), the images are turned too.

use kolo_core::{DType, Error, Result, Shape, Tensor};
use kolo_device::cuda::{Conv, ConvPass};

use crate::KernelCtx;
use crate::cuda::view::{crop, padded, permute};
use crate::cuda::{gpu, zeros};
use crate::nn::conv2d::{check_grad, plan};

/// Where channels, height and width are.
const FIRST: [usize; 3] = [1, 2, 3];
const LAST: [usize; 3] = [3, 1, 2];
const TO_FIRST: [usize; 4] = [0, 3, 1, 2];
const TO_LAST: [usize; 4] = [0, 2, 3, 1];

/// A convolution as the library sees it.
struct Call {
    conv: Conv,
    /// Zeros to be written before and after each dimension of the input, if the library cannot do it.
    around: Option<Vec<(usize, usize)>>,
    /// The shape of the convolution's output.
    output: Shape,
}

impl Call {
    fn new(ctx: &KernelCtx<'_>, dtype: DType, input: &Shape, filter: &Shape) -> Result<Call> {
        let (window, shape, groups, output) = plan(ctx, input, filter)?;
        let axes = if window.is_nchw() { FIRST } else { LAST };
        let (mut sizes, mut pad, mut around) =
            ([shape.input[0], shape.input[1]], [shape.pad_top, shape.pad_left], None);
        let places = |d: usize, size: usize| {
            let reach = (shape.filter[d] - 1) * shape.dilation[d] + 1;
            size.checked_sub(reach).map_or(0, |rest| rest / shape.stride[d] + 1)
        };
        let is_even = |d: usize| places(d, sizes[d] + 2 * pad[d]) == shape.output[d];
        if shape.filter.contains(&0) || shape.output[..2].contains(&0) {
            // Nothing to do; the caller sees an empty output or filter.
        } else if !is_even(0) || !is_even(1) {
            let mut margins = vec![(0, 0); 4];
            for d in 0..2 {
                let reach = (shape.filter[d] - 1) * shape.dilation[d] + 1;
                let end = (shape.output[d] - 1) * shape.stride[d] + reach;
                margins[axes[d + 1]] = (pad[d], end.saturating_sub(sizes[d] + pad[d]));
            }
            for d in 0..2 {
                let (before, after) = margins[axes[d + 1]];
                sizes[d] += before + after;
            }
            (pad, around) = ([0, 0], Some(margins));
        }
        let conv = Conv {
            dtype,
            channels_first: window.is_nchw(),
            batch: shape.batch,
            input: [sizes[0], sizes[1], shape.input[2] * groups],
            filter: shape.filter,
            output: [shape.output[0], shape.output[1], shape.output[2] * groups],
            stride: shape.stride,
            dilation: shape.dilation,
            pad,
            groups,
            allow_tf32: gpu(ctx)?.allow_tf32(),
        };
        Ok(Call { conv, around, output })
    }

    fn padded_shape(&self, input: &Shape) -> Result<Shape> {
        let Some(around) = &self.around else { return Ok(input.clone()) };
        let dims: Vec<usize> = input.iter().zip(around).map(|(&size, (before, after))| size + before + after).collect();
        Shape::new(&dims)
    }

    fn pad(&self, ctx: &KernelCtx<'_>, input: &Tensor) -> Result<Tensor> {
        match &self.around {
            Some(around) => padded(ctx, input, around, None, self.padded_shape(input.shape())?),
            None => Ok(input.clone()),
        }
    }
}

/// The filter as the library wants it.
fn turned(ctx: &KernelCtx<'_>, filter: &Tensor, channels_first: bool) -> Result<Tensor> {
    permute(ctx, filter, if channels_first { &[3, 2, 0, 1] } else { &[3, 0, 1, 2] })
}

/// A pass over images, as `[a, b]` and the output's shape with the images' own order of dimensions; `images` says which of
/// the three are images rather than filters.
fn run(
    ctx: &KernelCtx<'_>,
    conv: &Conv,
    pass: ConvPass,
    tensors: [&Tensor; 2],
    shape: Shape,
    images: [bool; 3],
) -> Result<Tensor> {
    let device = gpu(ctx)?;
    let attempt = |conv: &Conv, tensors: [&Tensor; 2], shape: Shape| -> Result<Tensor> {
        let side = |i: usize| match images[i] {
            true => Ok(tensors[i].clone()),
            false => turned(ctx, tensors[i], conv.channels_first),
        };
        let (a, b) = (side(0)?, side(1)?);
        if images[2] {
            let mut out = ctx.allocate(conv.dtype, shape)?;
            device.convolve(conv, pass, &a, &b, &mut out)?;
            return Ok(out);
        }
        let &[h, w, i, o] = shape.dims() else {
            return Err(Error::internal(format!("{shape} is not a filter")));
        };
        let (dims, back) = match conv.channels_first {
            true => ([o, i, h, w], [2, 3, 1, 0]),
            false => ([o, h, w, i], [1, 2, 3, 0]),
        };
        let mut out = ctx.allocate(conv.dtype, Shape::new(&dims)?)?;
        device.convolve(conv, pass, &a, &b, &mut out)?;
        permute(ctx, &out, &back)
    };
    if conv.channels_first || conv.dtype != DType::F64 {
        match attempt(conv, tensors, shape.clone()) {
            Err(error) if !conv.channels_first && error.code() == kolo_core::Code::Unimplemented => {}
            other => return other,
        }
    }
    let first = Conv { channels_first: true, ..*conv };
    let side = |i: usize| match images[i] {
        true => permute(ctx, tensors[i], &TO_FIRST),
        false => Ok(tensors[i].clone()),
    };
    let (a, b) = (side(0)?, side(1)?);
    if !images[2] {
        return attempt(&first, [&a, &b], shape);
    }
    let dims: Vec<usize> = TO_FIRST.iter().map(|&d| shape[d]).collect();
    let out = attempt(&first, [&a, &b], Shape::new(&dims)?)?;
    permute(ctx, &out, &TO_LAST)
}

pub(crate) fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (input, filter) = (ctx.input(0)?, ctx.input(1)?);
    let call = Call::new(ctx, input.dtype(), input.shape(), filter.shape())?;
    let out = if call.output.n_elements() == 0 || filter.n_elements() == 0 || input.n_elements() == 0 {
        zeros(ctx, input.dtype(), call.output)?
    } else {
        let input = call.pad(ctx, input)?;
        run(ctx, &call.conv, ConvPass::Forward, [&input, filter], call.output, [true, false, true])?
    };
    ctx.set_output(0, out);
    Ok(())
}

pub(crate) fn backprop_input(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let sizes = Shape::from_signed(&ctx.integers(0)?)?;
    let (filter, grad) = (ctx.input(1)?, ctx.input(2)?);
    let call = Call::new(ctx, filter.dtype(), &sizes, filter.shape())?;
    check_grad(grad.shape(), &call.output)?;
    let out = if sizes.n_elements() == 0 || filter.n_elements() == 0 || grad.n_elements() == 0 {
        zeros(ctx, filter.dtype(), sizes)?
    } else {
        let whole = call.padded_shape(&sizes)?;
        let out = run(ctx, &call.conv, ConvPass::BackpropInput, [filter, grad], whole, [false, true, true])?;
        match &call.around {
            Some(around) => {
                let start: Vec<usize> = around.iter().map(|(before, _)| *before).collect();
                crop(ctx, &out, &start, sizes)?
            }
            None => out,
        }
    };
    ctx.set_output(0, out);
    Ok(())
}

pub(crate) fn backprop_filter(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let sizes = Shape::from_signed(&ctx.integers(1)?)?;
    let (input, grad) = (ctx.input(0)?, ctx.input(2)?);
    let call = Call::new(ctx, input.dtype(), input.shape(), &sizes)?;
    check_grad(grad.shape(), &call.output)?;
    let out = if sizes.n_elements() == 0 || input.n_elements() == 0 || grad.n_elements() == 0 {
        zeros(ctx, input.dtype(), sizes)?
    } else {
        let input = call.pad(ctx, input)?;
        run(ctx, &call.conv, ConvPass::BackpropFilter, [&input, grad], sizes, [true, true, false])?
    };
    ctx.set_output(0, out);
    Ok(())
}
