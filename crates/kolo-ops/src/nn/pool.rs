//! What the pools share: sizes, shapes, and how images are dealt out to tasks.

pub(crate) mod gpu;

use std::ops::Range;

use kolo_core::{Error, PartialShape, Result, Shape};
use kolo_graph::{Attrs, InferCtx};

use crate::nn::rows::rows_per_task;
use crate::nn::window::{Axis, Images, Window};

/// A pool over images. Images whose channels come first are taken for many images of one channel.
#[derive(Clone, Debug)]
pub struct Pool {
    /// The window's height.
    pub h: Axis,
    /// The window's width.
    pub w: Axis,
    /// Channels, which lie side by side.
    pub channels: usize,
    /// The output's shape.
    pub shape: Shape,
}

impl Pool {
    /// For images of this shape.
    pub fn new(attrs: &Attrs, input: &Shape) -> Result<Pool> {
        let window = Window::from_attrs(attrs)?;
        let images = window.images(input)?;
        let [h, w] = window.axes(images.spatial, window.pool_size(attrs)?)?;
        let shape = Shape::new(&window.dims(Images { spatial: [h.output, w.output], ..images }))?;
        let channels = if window.is_nchw() { 1 } else { images.channels };
        Ok(Pool { h, w, channels, shape })
    }

    /// Elements of an image before.
    pub fn input(&self) -> usize {
        self.h.input * self.w.input * self.channels
    }

    /// Elements of an image after.
    pub fn output(&self) -> usize {
        self.h.output * self.w.output * self.channels
    }

    /// Windows of two by two, side by side, that cover the image exactly: the usual case, worth loops of its own.
    pub fn is_halving(&self) -> bool {
        let halves = |axis: &Axis| {
            (axis.kernel, axis.stride, axis.dilation, axis.before) == (2, 2, 1, 0) && axis.input == 2 * axis.output
        };
        halves(&self.h) && halves(&self.w)
    }

    /// How many images are worth a task.
    pub fn images_per_task(&self) -> usize {
        let window = self.h.kernel * self.w.kernel;
        rows_per_task(0.5, self.output() * window)
    }
}

/// Pixels of an image of which each channel is folded into one number.
pub struct Folding<'a, T, P> {
    /// The image, row-major.
    pub image: &'a [T],
    /// The values of a pixel, which lie side by side.
    pub channels: usize,
    /// Which of a window's rows and columns count.
    pub window: [Range<usize>; 2],
    /// Where the pixel of a row and a column of the window is in the image, and what else `fold` should know of it.
    pub place: P,
}

impl<T: Copy, W: Copy, P: Fn(usize, usize) -> (usize, W)> Folding<'_, T, P> {
    /// Folds all channels, some at a time, which stay in registers meanwhile: calls `done` with the number of the first channel
    /// and what the next ones have become.
    #[inline(always)]
    pub fn run<S: Copy>(&self, start: S, fold: impl Fn(S, T, W) -> S, mut done: impl FnMut(usize, &[S])) {
        let mut first = 0;
        while self.channels - first >= 64 {
            done(first, &self.block::<S, 64>(first, start, &fold));
            first += 64;
        }
        while self.channels - first >= 16 {
            done(first, &self.block::<S, 16>(first, start, &fold));
            first += 16;
        }
        for first in first..self.channels {
            done(first, &self.block::<S, 1>(first, start, &fold));
        }
    }

    #[inline(always)]
    fn block<S: Copy, const N: usize>(&self, first: usize, start: S, fold: &impl Fn(S, T, W) -> S) -> [S; N] {
        let mut folded = [start; N];
        let [rows, columns] = &self.window;
        for row in rows.clone() {
            for column in columns.clone() {
                let (pixel, with) = (self.place)(row, column);
                if let Some(values) = self.image[pixel * self.channels + first..].first_chunk::<N>() {
                    for i in 0..N {
                        folded[i] = fold(folded[i], values[i], with);
                    }
                }
            }
        }
        folded
    }
}

/// The shape function of a pool.
pub fn infer(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    infer_with(ctx, ctx.attrs())
}

/// As [`infer`], with attributes that are not all the node's own.
pub fn infer_with(ctx: &InferCtx<'_>, attrs: &Attrs) -> Result<Vec<PartialShape>> {
    let input = ctx.input_of_rank(0, 4)?;
    if attrs.str("data_format")? == "NCHW_VECT_C" {
        return Err(Error::unimplemented("data format NCHW_VECT_C is not supported"));
    }
    if pools_depth(attrs)? {
        let mut dims = [input.dim(0), input.dim(1), input.dim(2), None];
        if let Some(channels) = input.dim(3) {
            let group = group_of(attrs, channels)?;
            dims[3] = Some(channels / group);
        }
        return Ok(vec![PartialShape::new(&dims)]);
    }
    let window = Window::from_attrs(attrs)?;
    let images = window.partial_images(&input);
    let spatial = window.output_dims(images.spatial, window.pool_size(attrs)?.map(Some))?;
    Ok(vec![PartialShape::new(&window.dims(Images { spatial, ..images }))])
}

/// Whether a node pools across channels, which GPUs do not.
pub fn is_across_channels(attrs: &Attrs) -> bool {
    pools_depth(attrs).unwrap_or(false)
}

/// True if the window spans channels.
fn pools_depth(attrs: &Attrs) -> Result<bool> {
    let size = attrs.ints("ksize")?;
    Ok(attrs.str("data_format")? == "NHWC" && size.len() == 4 && size[3] > 1)
}

/// How many of `channels` channels go together; an error if that is not a whole number of groups, or other dimensions are
/// pooled too.
fn group_of(attrs: &Attrs, channels: usize) -> Result<usize> {
    let (size, strides) = (attrs.ints("ksize")?, attrs.ints("strides")?);
    let is_alone = |list: &[i64]| list.len() == 4 && list[..3] == [1, 1, 1];
    if size[1] != 1 || size[2] != 1 || !is_alone(&strides) {
        return Err(Error::unimplemented(
            "MaxPooling supports exactly one of pooling across depth or pooling across width/height.",
        ));
    }
    match usize::try_from(size[3]) {
        Ok(group) if size[3] == strides[3] && channels.is_multiple_of(group) => Ok(group),
        _ if size[3] != strides[3] => {
            Err(Error::unimplemented("Depthwise max pooling requires the depth window to equal the depth stride."))
        }
        _ => Err(Error::unimplemented(
            "Depthwise max pooling requires the depth window to evenly divide the input depth",
        )),
    }
}

/// How many neighbouring channels of images of this shape are pooled together; none if the window is over space.
pub fn depth_group(attrs: &Attrs, input: &Shape) -> Result<Option<usize>> {
    if !pools_depth(attrs)? {
        return Ok(None);
    }
    match input.dims() {
        &[_, _, _, channels] => group_of(attrs, channels).map(Some),
        _ => Err(Error::invalid_argument(format!("input must be 4-dimensional, found {input}"))),
    }
}
