//! `SpaceToDepth`: square blocks of an image become channels of one pixel. `DepthToSpace`: channels become blocks again.

use kolo_core::{Dim, Error, PartialShape, Result, Shape};
use kolo_graph::{Attrs, Gradient, HalfSafety, InferCtx, OpDef, Operation, Output};

use super::strided_slice::read_view;
use super::view::{View, strides};
use crate::cuda::PLAIN;
use crate::math::binary::first;
use crate::op::{Gpu, Op, cpu_any, gpu_kernel};
use crate::{Cost, KernelCtx};

/// Images of `[batch, height, width, channels]` with every block of `size` by `size` pixels as the channels of one.
#[track_caller]
pub fn space_to_depth(x: Output<'_>, size: i64) -> Output<'_> {
    x.graph().op("SpaceToDepth").input(x).attr("block_size", size).out()
}

/// The inverse of [`space_to_depth`].
#[track_caller]
pub fn depth_to_space(x: Output<'_>, size: i64) -> Output<'_> {
    x.graph().op("DepthToSpace").input(x).attr("block_size", size).out()
}

const SIGNATURE: &str = "(input:T) -> (output:T) ; T:type, block_size:int>=2, \
                         data_format:string{\"NHWC\",\"NCHW\",\"NCHW_VECT_C\"}=\"NHWC\"";

pub(crate) static SPACE_TO_DEPTH: Op = Op {
    def: OpDef {
        name: "SpaceToDepth",
        signature: SIGNATURE,
        shape: |ctx| infer(ctx, Blocks::to_depth),
        gradient: Gradient::Rule(|op, dy| Ok(vec![Some(inverse(op, "DepthToSpace", first(dy)?)?.into())])),
        half: HalfSafety::Neutral,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward_to_depth)],
    gpu: Gpu::Kernels(&[gpu_kernel("T", PLAIN, forward_to_depth)]),
    cost: Cost::Elements,
};

pub(crate) static DEPTH_TO_SPACE: Op = Op {
    def: OpDef {
        name: "DepthToSpace",
        signature: SIGNATURE,
        shape: |ctx| infer(ctx, Blocks::to_space),
        gradient: Gradient::Rule(|op, dy| Ok(vec![Some(inverse(op, "SpaceToDepth", first(dy)?)?.into())])),
        half: HalfSafety::Neutral,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward_to_space)],
    gpu: Gpu::Kernels(&[gpu_kernel("T", PLAIN, forward_to_space)]),
    cost: Cost::Elements,
};

fn inverse<'g>(op: Operation<'g>, name: &str, dy: Output<'g>) -> Result<Output<'g>> {
    let size = op.attrs(|attrs| attrs.int("block_size"))?;
    let format = op.attrs(|attrs| attrs.str("data_format").map(str::to_owned))?;
    Ok(op.graph().op(name).input(dy).attr("block_size", size).attr("data_format", &format[..]).out())
}

/// How large a block is, and where its dimensions are.
struct Blocks {
    size: usize,
    height: usize,
    width: usize,
    depth: usize,
}

impl Blocks {
    fn of(attrs: &Attrs) -> Result<Blocks> {
        let size = attrs.int("block_size")?;
        let size = usize::try_from(size).ok().filter(|size| (2..=1 << 20).contains(size)).ok_or_else(|| {
            Error::invalid_argument(format!("Block size should be > 1, and no more than 1048576, but was: {size}"))
        })?;
        match attrs.str("data_format")? {
            "NHWC" => Ok(Blocks { size, height: 1, width: 2, depth: 3 }),
            "NCHW" => Ok(Blocks { size, height: 2, width: 3, depth: 1 }),
            other => Err(Error::unimplemented(format!(
                "data_format {other} is for quantized types, which have no kernel; use NHWC or NCHW"
            ))),
        }
    }

    fn check_rank(&self, dims: &[Dim]) -> Result<()> {
        match dims.len() {
            4 => Ok(()),
            rank => Err(Error::invalid_argument(format!("Input rank should be 4 instead of {rank}"))),
        }
    }

    fn to_depth(&self, dims: &[Dim]) -> Result<Vec<Dim>> {
        self.check_rank(dims)?;
        let mut out = dims.to_vec();
        for at in [self.height, self.width] {
            if let Some(size) = dims[at]
                && !size.is_multiple_of(self.size)
            {
                let [height, width] =
                    [self.height, self.width].map(|at| dims[at].map_or("?".into(), |n| n.to_string()));
                return Err(Error::invalid_argument(format!(
                    "Image width {width} and height {height} should be divisible by block_size: {}",
                    self.size
                )));
            }
            out[at] = dims[at].map(|size| size / self.size);
        }
        out[self.depth] = dims[self.depth].and_then(|depth| depth.checked_mul(self.size * self.size));
        Ok(out)
    }

    fn to_space(&self, dims: &[Dim]) -> Result<Vec<Dim>> {
        self.check_rank(dims)?;
        let mut out = dims.to_vec();
        let square = self.size * self.size;
        if let Some(depth) = dims[self.depth]
            && !depth.is_multiple_of(square)
        {
            return Err(Error::invalid_argument(format!(
                "Input depth dimension {depth} should be divisible by: {square}"
            )));
        }
        out[self.depth] = dims[self.depth].map(|depth| depth / square);
        for at in [self.height, self.width] {
            out[at] = dims[at].and_then(|size| size.checked_mul(self.size));
        }
        Ok(out)
    }
}

fn infer(ctx: &InferCtx<'_>, sizes: fn(&Blocks, &[Dim]) -> Result<Vec<Dim>>) -> Result<Vec<PartialShape>> {
    let blocks = Blocks::of(ctx.attrs())?;
    match ctx.input(0).dims() {
        Some(dims) => Ok(vec![PartialShape::new(&sizes(&blocks, dims)?)]),
        None => Ok(vec![PartialShape::of_rank(4)]),
    }
}

fn known(dims: Vec<Dim>) -> Result<Shape> {
    PartialShape::new(&dims).known().ok_or_else(|| Error::invalid_argument(format!("{dims:?} has too many elements")))
}

fn dims_of(shape: &Shape) -> Vec<Dim> {
    shape.iter().map(|&dim| Some(dim)).collect()
}

fn forward_to_depth(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (blocks, input) = (Blocks::of(ctx.attrs())?, ctx.input(0)?);
    let shape = known(blocks.to_depth(&dims_of(input.shape()))?)?;
    let (dims, steps, size) = (input.shape(), strides(input.shape()), blocks.size);
    let whole = |at: usize| (dims[at], steps[at]);
    let grid = |at: usize| (dims[at] / size, steps[at] * size as isize);
    let within = |at: usize| (size, steps[at]);
    let (h, w, d) = (blocks.height, blocks.width, blocks.depth);
    let walk = match d {
        1 => [whole(0), within(h), within(w), whole(d), grid(h), grid(w)],
        _ => [whole(0), grid(h), grid(w), within(h), within(w), whole(d)],
    };
    let out = read_view(ctx, input, &View::new(0, walk), shape)?;
    ctx.set_output(0, out);
    Ok(())
}

fn forward_to_space(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (blocks, input) = (Blocks::of(ctx.attrs())?, ctx.input(0)?);
    let shape = known(blocks.to_space(&dims_of(input.shape()))?)?;
    let (dims, steps, size) = (input.shape(), strides(input.shape()), blocks.size);
    let (h, w, d) = (blocks.height, blocks.width, blocks.depth);
    let whole = |at: usize| (dims[at], steps[at]);
    let depth = dims[d] / (size * size);
    let channels = (depth, steps[d]);
    let row = (size, steps[d] * (size * depth) as isize);
    let column = (size, steps[d] * depth as isize);
    let walk = match d {
        1 => [whole(0), channels, whole(h), row, whole(w), column],
        _ => [whole(0), whole(h), row, whole(w), column, channels],
    };
    let out = read_view(ctx, input, &View::new(0, walk), shape)?;
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn blocks_become_channels_and_back() {
        // Two channels: the first counts, the second is the first and 100.
        let image: Vec<i32> = (0..8).flat_map(|i| [i, i + 100]).collect();
        let deep = [0, 100, 1, 101, 4, 104, 5, 105, 2, 102, 3, 103, 6, 106, 7, 107];
        let (image, deep) = (tensor([1, 2, 4, 2], image), tensor([1, 1, 2, 8], deep));
        check_op("SpaceToDepth").attr("block_size", 2i64).input(image.clone()).gives(deep.clone());
        check_op("DepthToSpace").attr("block_size", 2i64).input(deep).gives(image);
        let image = tensor([1, 1, 2, 4], (0..8).collect::<Vec<i32>>());
        let deep = tensor([1, 4, 1, 2], [0i32, 2, 1, 3, 4, 6, 5, 7]);
        let nchw = |op: &str| check_op(op).attr("block_size", 2i64).attr("data_format", "NCHW");
        nchw("SpaceToDepth").input(image.clone()).gives(deep.clone());
        nchw("DepthToSpace").input(deep).gives(image);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let case = |op: &str, shape: [usize; 4]| check_op(op).attr("block_size", 2i64).input(wavy(shape, 0));
        case("SpaceToDepth", [1, 3, 2, 1]).fails("Image width 2 and height 3 should be divisible by block_size: 2");
        case("DepthToSpace", [1, 3, 2, 6]).fails("Input depth dimension 6 should be divisible by: 4");
        case("SpaceToDepth", [0, 2, 2, 1]).gives(tensor::<f32, 4>([0, 1, 1, 4], []));
        check_op("SpaceToDepth").attr("block_size", 2i64).input([1.0f32]).fails("rank");
        let vectors = check_op("DepthToSpace").attr("block_size", 2i64).attr("data_format", "NCHW_VECT_C");
        vectors.input(wavy([1, 4, 1, 1], 0)).fails("NCHW_VECT_C");
    }

    #[test]
    fn gradients() {
        check_op("SpaceToDepth").attr("block_size", 2i64).input(wavy([1, 2, 4, 1], 0)).gradient();
        check_op("DepthToSpace").attr("block_size", 2i64).input(wavy([1, 1, 2, 4], 0)).gradient();
    }
}
