//! `ResizeBilinear` and `ResizeNearestNeighbor`: images of another height and width, and their gradients.

use half::{bf16, f16};
use kolo_core::{DType, Dim, Error, PartialShape, Result, Shape};
use kolo_graph::{Attrs, Gradient, HalfSafety, InferCtx, OpDef, Output, SplitRule, shape_fns};

use crate::array::elements::{Item, Job, build};
use crate::math::binary::first;
use crate::math::number::Number;
use crate::op::{Gpu, Op, cpu_any, cpu_kernels};
use crate::{Cost, KernelCtx};

/// NHWC images resized to `[height, width]`, neighbouring pixels mixed; pixels are squares with a centre.
#[track_caller]
pub fn resize_bilinear<'g>(images: Output<'g>, size: [i32; 2]) -> Output<'g> {
    let graph = images.graph();
    graph.op("ResizeBilinear").input(images).input(graph.constant(size)).attr("half_pixel_centers", true).out()
}

/// NHWC images resized to `[height, width]`, each pixel the nearest one; pixels are squares with a centre.
#[track_caller]
pub fn resize_nearest<'g>(images: Output<'g>, size: [i32; 2]) -> Output<'g> {
    let graph = images.graph();
    graph.op("ResizeNearestNeighbor").input(images).input(graph.constant(size)).attr("half_pixel_centers", true).out()
}

pub(crate) static RESIZE_BILINEAR: Op = Op {
    def: OpDef {
        name: "ResizeBilinear",
        signature: "(images:T, size:int32) -> (resized_images:float) ; \
                    T:type{int8,uint8,int16,uint16,int32,int64,bfloat16,half,float,double}, align_corners:bool=false, \
                    half_pixel_centers:bool=false",
        shape: infer,
        gradient: Gradient::Rule(|op, dy| {
            if !op.input(0).dtype().is_float() {
                return Ok(vec![None, None]);
            }
            let builder = with_attrs(op, "ResizeBilinearGrad")?.input(first(dy)?).input(op.input(0));
            Ok(vec![Some(builder.out().into()), None])
        }),
        half: HalfSafety::Wide,
        split: SplitRule::Examples,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(bilinear: f32, f64, i32, i64, u8; f16, bf16, i8, i16, u16),
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

pub(crate) static RESIZE_BILINEAR_GRAD: Op = Op {
    def: OpDef {
        name: "ResizeBilinearGrad",
        signature: "(grads:float, original_image:T) -> (output:T) ; T:type{float,bfloat16,half,double}, \
                    align_corners:bool=false, half_pixel_centers:bool=false",
        shape: shape_fns::same_as_input_1,
        gradient: Gradient::Refused("the gradient of ResizeBilinearGrad is not implemented"),
        half: HalfSafety::Wide,
        split: SplitRule::Examples,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(bilinear_grad: f32, f64; f16, bf16),
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

pub(crate) static RESIZE_NEAREST_NEIGHBOR: Op = Op {
    def: OpDef {
        name: "ResizeNearestNeighbor",
        signature: "(images:T, size:int32) -> (resized_images:T) ; \
                    T:type{int8,uint8,int16,uint16,int32,int64,half,float,double,bfloat16}, align_corners:bool=false, \
                    half_pixel_centers:bool=false",
        shape: infer,
        gradient: Gradient::Rule(|op, dy| {
            let graph = op.graph();
            let shape = graph.op("Shape").input(op.input(0)).out();
            let [one, three, step] = [1i32, 3, 1].map(|i| graph.constant([i]));
            let size = graph.op("StridedSlice").inputs([shape, one, three, step]).out();
            let builder = with_attrs(op, "ResizeNearestNeighborGrad")?.input(first(dy)?).input(size);
            Ok(vec![Some(builder.out().into()), None])
        }),
        half: HalfSafety::Neutral,
        split: SplitRule::Examples,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(nearest)],
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

pub(crate) static RESIZE_NEAREST_NEIGHBOR_GRAD: Op = Op {
    def: OpDef {
        name: "ResizeNearestNeighborGrad",
        signature: "(grads:T, size:int32) -> (output:T) ; T:type{uint8,int8,int32,half,float,double,bfloat16}, \
                    align_corners:bool=false, half_pixel_centers:bool=false",
        shape: infer,
        gradient: Gradient::Refused("the gradient of ResizeNearestNeighborGrad is not implemented"),
        half: HalfSafety::Safe,
        split: SplitRule::Examples,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(nearest_grad: f32, f64, i32; f16, bf16, i8, u8),
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

fn with_attrs<'g>(op: kolo_graph::Operation<'g>, name: &str) -> Result<kolo_graph::OpBuilder<'g>> {
    let corners = op.attrs(|attrs| attrs.bool("align_corners"))?;
    let centers = op.attrs(|attrs| attrs.bool("half_pixel_centers"))?;
    Ok(op.graph().op(name).attr("align_corners", corners).attr("half_pixel_centers", centers))
}

/// Images with the height and width that input 1 holds.
fn infer(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let images = ctx.input_of_rank(0, 4)?;
    ctx.input(1).merge(&PartialShape::from([2usize]))?;
    let size: Vec<Dim> = match ctx.constant_integers(1).as_deref() {
        Some(&[h, w]) => vec![Some(positive(h)?), Some(positive(w)?)],
        _ => vec![None, None],
    };
    Ok(vec![PartialShape::new(&[images.dim(0), size[0], size[1], images.dim(3)])])
}

fn positive(size: i64) -> Result<usize> {
    usize::try_from(size)
        .ok()
        .filter(|&size| size > 0)
        .ok_or_else(|| Error::invalid_argument("output dimensions must be positive"))
}

/// How positions of a resized dimension map to the original.
#[derive(Clone, Copy)]
struct Scaler {
    input: usize,
    scale: f32,
    align_corners: bool,
    half_pixel_centers: bool,
}

impl Scaler {
    fn new(attrs: &Attrs, input: usize, output: usize) -> Result<Scaler> {
        let (align_corners, half_pixel_centers) = (attrs.bool("align_corners")?, attrs.bool("half_pixel_centers")?);
        if align_corners && half_pixel_centers {
            return Err(Error::invalid_argument("If half_pixel_centers is True, align_corners must be False."));
        }
        let scale = match align_corners && output > 1 {
            true => input.saturating_sub(1) as f32 / (output - 1) as f32,
            false => input as f32 / output as f32,
        };
        Ok(Scaler { input, scale, align_corners, half_pixel_centers })
    }

    /// The pixels before and after a position, and how much of the latter.
    fn between(&self, at: usize) -> (usize, usize, f32) {
        let place = match self.half_pixel_centers {
            true => (at as f32 + 0.5) * self.scale - 0.5,
            false => at as f32 * self.scale,
        };
        let last = self.input - 1;
        // A float becomes the nearest integer there is: nothing below 0.
        let (low, high) = (place.floor() as usize, place.ceil() as usize);
        (low.min(last), high.min(last), place - place.floor())
    }

    fn nearest(&self, at: usize) -> usize {
        let place = if self.half_pixel_centers { (at as f32 + 0.5) * self.scale } else { at as f32 * self.scale };
        let place = if self.align_corners { place.round() } else { place.floor() };
        (place as usize).min(self.input - 1)
    }
}

/// Sizes of images before and after, and the scalers of height and width.
struct Plan {
    batch: usize,
    channels: usize,
    from: [usize; 2],
    to: [usize; 2],
    scalers: [Scaler; 2],
}

impl Plan {
    /// From images of shape `small` or large to height and width `to`.
    fn new(attrs: &Attrs, images: &Shape, to: [usize; 2]) -> Result<Plan> {
        let &[batch, height, width, channels] = images.dims() else {
            return Err(Error::invalid_argument(format!("input must be 4-dimensional {images}")));
        };
        if height == 0 || width == 0 {
            return Err(Error::invalid_argument("input image must be of non-zero size"));
        }
        let scalers = [Scaler::new(attrs, height, to[0])?, Scaler::new(attrs, width, to[1])?];
        Ok(Plan { batch, channels, from: [height, width], to, scalers })
    }

    fn shape(&self) -> Result<Shape> {
        Shape::new(&[self.batch, self.to[0], self.to[1], self.channels])
    }

    /// Elements of an image before and after.
    fn elements(&self) -> [usize; 2] {
        [self.from, self.to].map(|[h, w]| h * w * self.channels)
    }
}

/// Height and width in input `i`.
fn size(ctx: &KernelCtx<'_>, i: usize) -> Result<[usize; 2]> {
    match ctx.integers(i)?.as_slice() {
        &[h, w] => Ok([positive(h)?, positive(w)?]),
        other => Err(Error::invalid_argument(format!("shape_t must have two elements, found {}", other.len()))),
    }
}

fn bilinear<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let plan = Plan::new(ctx.attrs(), ctx.input(0)?.shape(), size(ctx, 1)?)?;
    let mut out = ctx.allocate(DType::F32, plan.shape()?)?;
    let images = ctx.data::<T>(0)?;
    let ([n_from, n_to], c, width) = (plan.elements(), plan.channels, plan.from[1]);
    if out.n_elements() > 0 {
        let columns: Vec<_> = (0..plan.to[1]).map(|x| plan.scalers[1].between(x)).collect();
        ctx.pool().for_each_chunk(out.data_mut::<f32>()?, n_to, |i, out| {
            let image = &images[i * n_from..(i + 1) * n_from];
            for (y, row) in out.chunks_exact_mut(plan.to[1] * c).enumerate() {
                let (top, bottom, down) = plan.scalers[0].between(y);
                for (pixel, &(left, right, along)) in row.chunks_exact_mut(c).zip(&columns) {
                    for (channel, out) in pixel.iter_mut().enumerate() {
                        let at = |y: usize, x: usize| image[(y * width + x) * c + channel].to_f64() as f32;
                        let mix = |a: f32, b: f32, t: f32| a + (b - a) * t;
                        let above = mix(at(top, left), at(top, right), along);
                        let below = mix(at(bottom, left), at(bottom, right), along);
                        *out = mix(above, below, down);
                    }
                }
            }
        });
    }
    ctx.set_output(0, out);
    Ok(())
}

fn bilinear_grad<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (grads, image) = (ctx.input(0)?.shape(), ctx.input(1)?.shape());
    let (&[batch, h, w, channels], &[original, _, _, depth]) = (grads.dims(), image.dims()) else {
        return Err(Error::invalid_argument(format!("images must be 4-dimensional, found {grads} and {image}")));
    };
    if batch != original || channels != depth {
        return Err(Error::invalid_argument(format!("grads {grads} do not fit the image {image}")));
    }
    let mut out = ctx.allocate(T::DTYPE, image.clone())?;
    let plan = Plan::new(ctx.attrs(), image, [h, w])?;
    let grads = ctx.data::<f32>(0)?;
    let ([n_from, n_to], c, width) = (plan.elements(), plan.channels, plan.from[1]);
    if out.n_elements() > 0 {
        ctx.pool().for_each_chunk(out.data_mut::<T>()?, n_from, |i, out| {
            let grads = &grads[i * n_to..(i + 1) * n_to];
            let mut sums = vec![0.0f32; n_from];
            for y in 0..h {
                let (top, bottom, down) = plan.scalers[0].between(y);
                for x in 0..w {
                    let (left, right, along) = plan.scalers[1].between(x);
                    for (channel, &grad) in grads[(y * w + x) * c..(y * w + x + 1) * c].iter().enumerate() {
                        let mut give = |y: usize, x: usize, part: f32| {
                            sums[(y * width + x) * c + channel] += grad * part;
                        };
                        give(top, left, (1.0 - down) * (1.0 - along));
                        give(top, right, (1.0 - down) * along);
                        give(bottom, left, down * (1.0 - along));
                        give(bottom, right, down * along);
                    }
                }
            }
            out.iter_mut().zip(sums).for_each(|(y, sum)| *y = T::from_f64(f64::from(sum)));
        });
    }
    ctx.set_output(0, out);
    Ok(())
}

fn nearest(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let images = ctx.input(0)?;
    let plan = Plan::new(ctx.attrs(), images.shape(), size(ctx, 1)?)?;
    let out = build(ctx, images.dtype(), plan.shape()?, &[images], Nearest(&plan))?;
    ctx.set_output(0, out);
    Ok(())
}

/// Copies the nearest pixels.
struct Nearest<'a>(&'a Plan);

impl Job for Nearest<'_> {
    fn run<E: Item>(self, out: &mut [E], inputs: &[&[E]]) -> Result<()> {
        let (plan, c) = (self.0, self.0.channels);
        if out.is_empty() {
            return Ok(());
        }
        let [n_from, n_to] = plan.elements();
        for (image, out) in inputs[0].chunks_exact(n_from).zip(out.chunks_exact_mut(n_to)) {
            for (y, row) in out.chunks_exact_mut(plan.to[1] * c).enumerate() {
                let line = plan.scalers[0].nearest(y) * plan.from[1];
                for (x, pixel) in row.chunks_exact_mut(c).enumerate() {
                    let at = (line + plan.scalers[1].nearest(x)) * c;
                    pixel.clone_from_slice(&image[at..at + c]);
                }
            }
        }
        Ok(())
    }
}

fn nearest_grad<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let grads = ctx.input(0)?.shape();
    let &[batch, h, w, channels] = grads.dims() else {
        return Err(Error::invalid_argument(format!("input must be 4-dimensional {grads}")));
    };
    let [height, width] = size(ctx, 1)?;
    let original = Shape::new(&[batch, height, width, channels])?;
    let plan = Plan::new(ctx.attrs(), &original, [h, w])?;
    let mut out = ctx.allocate(T::DTYPE, original)?;
    let grads = ctx.data::<T>(0)?;
    let ([n_from, n_to], c) = (plan.elements(), plan.channels);
    if out.n_elements() > 0 {
        ctx.pool().for_each_chunk(out.data_mut::<T>()?, n_from, |i, sums| {
            sums.fill(T::ZERO);
            for (at, pixel) in grads[i * n_to..(i + 1) * n_to].chunks_exact(c).enumerate() {
                let (y, x) = (plan.scalers[0].nearest(at / w), plan.scalers[1].nearest(at % w));
                let to = &mut sums[(y * width + x) * c..(y * width + x + 1) * c];
                to.iter_mut().zip(pixel).for_each(|(sum, &grad)| *sum = sum.add(grad));
            }
        });
    }
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests;
