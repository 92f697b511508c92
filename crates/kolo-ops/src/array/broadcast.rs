//! `Tile`: a tensor repeated along its dimensions. `BroadcastTo`: sizes of 1 repeated to fit a shape. `BroadcastArgs`: the
//! shape that two shapes broadcast to.

use kolo_core::{Dim, Error, PartialShape, Result, Shape};
use kolo_graph::{Gradient, HalfSafety, HostRule, InferCtx, OpDef, Output};

use super::elements::{IntoInts, integer_tensor, integers};
use super::reshape::{reshape, shaped_as_input};
use super::strided_slice::read_view;
use super::view::{View, strides};
use crate::cuda::map::{COPY, run};
use crate::cuda::{PLAIN, gpu};
use crate::math::binary::first;
use crate::math::elementwise::broadcast_shape;
use crate::op::{Gpu, Op, cpu_any, gpu_kernel};
use crate::{Cost, KernelCtx};

/// `x` repeated `multiples[i]` times along each dimension `i`.
#[track_caller]
pub fn tile<'g>(x: Output<'g>, multiples: impl IntoInts<'g>) -> Output<'g> {
    let graph = x.graph();
    graph.op("Tile").input(x).input(multiples.into_ints(graph)).out()
}

/// `x` repeated along new dimensions and those of size 1 until it has the shape `dims`.
#[track_caller]
pub fn broadcast_to<'g>(x: Output<'g>, dims: impl IntoInts<'g>) -> Output<'g> {
    let graph = x.graph();
    graph.op("BroadcastTo").input(x).input(dims.into_ints(graph)).out()
}

/// The shape that tensors of shapes `a` and `b`, given as vectors, broadcast to.
#[track_caller]
pub fn broadcast_dynamic_shape<'g>(a: Output<'g>, b: Output<'g>) -> Output<'g> {
    a.graph().op("BroadcastArgs").inputs([a, b]).out()
}

pub(crate) static TILE: Op = Op {
    def: OpDef {
        name: "Tile",
        signature: "(input:T, multiples:Tmultiples) -> (output:T) ; T:type, Tmultiples:type{int32,int64}=int32",
        shape: infer_tile,
        // The copies are summed: with every dimension split into copies and elements, the sum runs over the copies.
        gradient: Gradient::Rule(|op, dy| {
            let graph = op.graph();
            let multiples = op.input(1);
            let shape = graph.op("Shape").input(op.input(0)).attr("out_type", multiples.dtype()).out();
            let split = reshape(graph.op("Pack").inputs([multiples, shape]).attr("axis", 1i64).out(), &[-1]);
            let n = graph.op("Size").input(split).out();
            let copies = graph.op("Range").inputs([graph.constant(0i32), n, graph.constant(2i32)]).out();
            let sum = graph.op("Sum").input(reshape(first(dy)?, split)).input(copies).out();
            Ok(vec![Some(reshape(sum, shape).into()), None])
        }),
        host: HostRule::SmallIntegers,
        half: HalfSafety::Neutral,
        host_args: &["multiples"],
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward_tile)],
    gpu: Gpu::Kernels(&[gpu_kernel("T", PLAIN, forward_tile)]),
    cost: Cost::Elements,
};

pub(crate) static BROADCAST_TO: Op = Op {
    def: OpDef {
        name: "BroadcastTo",
        signature: "(input:T, shape:Tidx) -> (output:T) ; T:type, Tidx:type{int32,int64}=int32",
        shape: |ctx| {
            ctx.input_of_rank(1, 1)?;
            let shape = ctx.constant_as_shape(1);
            if let (Some(input), Some(known)) = (ctx.input(0).known(), shape.known()) {
                check_broadcast(&input, &known)?;
            }
            Ok(vec![shape])
        },
        gradient: Gradient::Rule(|op, dy| Ok(vec![Some(summed_to_input(op, 0, first(dy)?).into()), None])),
        host: HostRule::SmallIntegers,
        half: HalfSafety::Neutral,
        host_args: &["shape"],
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward_broadcast)],
    gpu: Gpu::Kernels(&[gpu_kernel("T", PLAIN, broadcast_on_gpu)]),
    cost: Cost::Elements,
};

pub(crate) static BROADCAST_ARGS: Op = Op {
    def: OpDef {
        name: "BroadcastArgs",
        signature: "(s0:T, s1:T) -> (r0:T) ; T:type{int32,int64}=int32",
        shape: |ctx| {
            let (a, b) = (ctx.input_of_rank(0, 1)?.dim(0), ctx.input_of_rank(1, 1)?.dim(0));
            Ok(vec![PartialShape::new(&[a.zip(b).map(|(a, b)| a.max(b))])])
        },
        gradient: Gradient::None("shapes are integers"),
        host: HostRule::SmallIntegers,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(|ctx| {
        let [a, b] = [Shape::from_signed(&ctx.integers(0)?)?, Shape::from_signed(&ctx.integers(1)?)?];
        let shape = broadcast_shape(&a, &b)?;
        let dims: Vec<i64> = shape.iter().map(|&dim| dim as i64).collect();
        let out = integer_tensor(ctx.attrs().dtype("T")?, Shape::new(&[dims.len()])?, dims)?;
        ctx.set_output(0, out);
        Ok(())
    })],
    gpu: Gpu::Missing,
    cost: Cost::Inline,
};

/// `dy` summed over the dimensions along which input `i` of `op` was repeated.
pub(crate) fn summed_to_input<'g>(op: kolo_graph::Operation<'g>, i: usize, dy: Output<'g>) -> Output<'g> {
    let graph = op.graph();
    let input = op.input(i);
    if input.shape().known().is_some_and(|shape| dy.shape().known() == Some(shape)) {
        return dy;
    }
    let shapes = [input, dy].map(|x| graph.op("Shape").input(x).out());
    let axes = graph.op("BroadcastGradientArgs").inputs(shapes).build().output(0);
    let sum = graph.op("Sum").inputs([dy, axes]).out();
    match i {
        0 => shaped_as_input(op, sum),
        _ => reshape(sum, shapes[0]),
    }
}

fn infer_tile(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let n = ctx.input_of_rank(1, 1)?.dim(0);
    let rank = match (ctx.input(0).rank(), n) {
        (Some(rank), Some(n)) if rank != n => return Err(wrong_length(rank, n)),
        (rank, n) => rank.or(n),
    };
    let Some(rank) = rank.filter(|&rank| rank <= 254) else { return Ok(vec![PartialShape::unknown()]) };
    if let Some(multiples) = ctx.constant_integers(1) {
        check_multiples(&multiples)?;
    }
    let multiples = ctx.constant_as_shape(1);
    let dim = |i: isize| -> Dim { ctx.input(0).dim(i).zip(multiples.dim(i)).and_then(|(a, b)| a.checked_mul(b)) };
    let dims: Vec<Dim> = (0..rank as isize).map(dim).collect();
    Ok(vec![PartialShape::new(&dims)])
}

fn wrong_length(rank: usize, n: usize) -> Error {
    Error::invalid_argument(format!("Expected multiples argument to be a vector of length {rank} but got length {n}"))
}

fn check_multiples(multiples: &[i64]) -> Result<()> {
    match multiples.iter().enumerate().find(|(_, n)| **n < 0) {
        Some((i, n)) => Err(Error::invalid_argument(format!("Expected multiples[{i}] >= 0, but got {n}"))),
        None => Ok(()),
    }
}

fn forward_tile(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let input = ctx.input(0)?;
    let shape = input.shape();
    let multiples = integers(ctx.input(1)?)?;
    if multiples.len() != shape.rank() {
        return Err(wrong_length(shape.rank(), multiples.len()));
    }
    check_multiples(&multiples)?;
    if multiples.iter().all(|&n| n == 1) {
        return ctx.forward(0, 0);
    }
    let dims: Vec<usize> = shape.iter().zip(&multiples).map(|(&dim, &n)| dim.saturating_mul(n as usize)).collect();
    let steps = strides(shape);
    let walk = multiples.iter().enumerate().flat_map(|(i, &n)| [(n as usize, 0), (shape[i], steps[i])]);
    // The shape first: only sizes that fit are safe to multiply.
    let out = Shape::new(&dims)?;
    let out = read_view(ctx, input, &View::new(0, walk), out)?;
    ctx.set_output(0, out);
    Ok(())
}

fn check_broadcast(input: &Shape, output: &Shape) -> Result<()> {
    if input.rank() > output.rank() {
        return Err(Error::invalid_argument(format!(
            "Rank of input ({}) must be no greater than rank of output shape ({}).",
            input.rank(),
            output.rank()
        )));
    }
    let inner = &output[output.rank() - input.rank()..];
    if input.iter().zip(inner).all(|(&from, &to)| from == to || from == 1) {
        return Ok(());
    }
    Err(Error::invalid_argument(format!("Incompatible shapes: {input} vs. {output}")))
}

fn forward_broadcast(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let input = ctx.input(0)?;
    let shape = Shape::from_signed(&integers(ctx.input(1)?)?)?;
    check_broadcast(input.shape(), &shape)?;
    if input.n_elements() == shape.n_elements() {
        let out = ctx.take_input(0)?.reshaped(shape)?;
        ctx.set_output(0, out);
        return Ok(());
    }
    let out = read_view(ctx, input, &broadcast_view(input.shape(), &shape), shape)?;
    ctx.set_output(0, out);
    Ok(())
}

/// A tensor of shape `from` seen as one of shape `to`, which it broadcasts to.
pub(crate) fn broadcast_view(from: &Shape, to: &Shape) -> View {
    let steps = strides(from);
    let new = to.rank() - from.rank();
    View::new(
        0,
        to.iter().enumerate().map(|(i, &dim)| match i.checked_sub(new) {
            Some(at) if from[at] != 1 => (dim, steps[at]),
            _ => (dim, 0),
        }),
    )
}

fn broadcast_on_gpu(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let shape = Shape::from_signed(&ctx.integers(1)?)?;
    let input = ctx.input(0)?;
    if broadcast_shape(input.shape(), &shape)? != shape {
        return Err(Error::invalid_argument(format!("Incompatible shapes: {} vs. {shape}", input.shape())));
    }
    if *input.shape() == shape {
        return ctx.forward(0, 0);
    }
    let mut out = ctx.allocate(input.dtype(), shape)?;
    run(gpu(ctx)?, COPY, &[Some(ctx.input(0)?)], &mut out, &[])?;
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn tile() {
        check_op("Tile").input([1i32, 2]).input([2i32]).gives([1i32, 2, 1, 2]);
        check_op("Tile").input([[1i32, 2], [3, 4]]).input([2i64, 2]).gives([
            [1i32, 2, 1, 2],
            [3, 4, 3, 4],
            [1, 2, 1, 2],
            [3, 4, 3, 4],
        ]);
        check_op("Tile").input([[1.0f32], [2.0]]).input([1i32, 3]).gives([[1.0f32, 1.0, 1.0], [2.0, 2.0, 2.0]]);
        check_op("Tile").input([1u8, 2]).input([0i32]).gives(tensor::<u8, 1>([0], []));
        check_op("Tile").input(5.0f32).input(tensor::<i32, 1>([0], [])).gives(5.0f32);
        check_op("Tile").input([1i32]).input([1i32]).gives([1i32]);
        let words = |n| Tensor::from_strings([n], vec!["a".into(); n]).unwrap();
        check_op("Tile").input(words(1)).input([3i32]).gives(words(3));
        check_op("Tile").input([1.0f32]).input([-1i32]).fails("Expected multiples[0] >= 0, but got -1");
        check_op("Tile").input([1.0f32]).input([1i32, 1]).fails("to be a vector of length 1 but got length 2");
        check_op("Tile").input([[1.0f32; 4]]).input([i64::MAX, i64::MAX]).fails("too");
        check_op("Tile").input(wavy([2, 3], 0)).input([2i32, 2]).gradient();
        check_op("Tile").input(wavy([2], 0)).input([3i64]).gradient();
    }

    #[test]
    fn broadcast_to() {
        check_op("BroadcastTo").input([1i32, 2]).input([2i32, 2]).gives([[1i32, 2], [1, 2]]);
        check_op("BroadcastTo").input([[1i32], [2]]).input([2i64, 3]).gives([[1i32, 1, 1], [2, 2, 2]]);
        check_op("BroadcastTo").input(7.0f32).input([2i32, 1, 2]).gives(tensor([2, 1, 2], [7.0f32; 4]));
        check_op("BroadcastTo").input([3i8]).input([0i32]).gives(tensor::<i8, 1>([0], []));
        check_op("BroadcastTo").input(3i8).input(tensor::<i32, 1>([0], [])).gives(3i8);
        check_op("BroadcastTo").input([1.0f32, 2.0]).input([3i32]).fails("Incompatible shapes: [2] vs. [3]");
        check_op("BroadcastTo")
            .input([[1.0f32]])
            .input([3i32])
            .fails("Rank of input (2) must be no greater than rank of output shape (1).");
        check_op("BroadcastTo").input(wavy([2, 1], 0)).input([3i32, 2, 2]).gradient();
        check_op("BroadcastTo").input(0.5f32).input([2i32]).gradient();
    }

    #[test]
    fn broadcast_args() {
        check_op("BroadcastArgs").input([2i32, 1, 3]).input([4i32, 1]).gives([2i32, 4, 3]);
        check_op("BroadcastArgs").input(tensor::<i64, 1>([0], [])).input([4i64]).gives([4i64]);
        check_op("BroadcastArgs").input([2i32]).input([3i32]).fails("Incompatible shapes");
    }
}
