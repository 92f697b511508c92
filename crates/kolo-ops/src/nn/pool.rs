//! What the pools share: sizes, shapes, and how images are dealt out to tasks.

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

/// The shape function of a pool.
pub fn infer(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let input = ctx.input_of_rank(0, 4)?;
    if ctx.attrs().str("data_format")? == "NCHW_VECT_C" {
        return Err(Error::unimplemented("data format NCHW_VECT_C is not supported"));
    }
    let window = Window::from_attrs(ctx.attrs())?;
    let images = window.partial_images(&input);
    let spatial = window.output_dims(images.spatial, window.pool_size(ctx.attrs())?.map(Some))?;
    Ok(vec![PartialShape::new(&window.dims(Images { spatial, ..images }))])
}
