//! `Slice`: a box cut out of a tensor.

use kolo_core::{Dim, Error, PartialShape, Result, Shape};
use kolo_graph::{Gradient, HalfSafety, HostRule, InferCtx, OpDef, Output};

use super::elements::{IntoInts, integers};
use super::strided_slice::read_view;
use super::view::{View, strides};
use crate::cuda::PLAIN;
use crate::math::binary::first;
use crate::op::{Gpu, Op, cpu_any, gpu_kernel};
use crate::{Cost, KernelCtx};

/// The box of `x` that begins at `begin` and has sizes `size`, where −1 goes to the end.
#[track_caller]
pub fn slice<'g>(x: Output<'g>, begin: impl IntoInts<'g>, size: impl IntoInts<'g>) -> Output<'g> {
    let graph = x.graph();
    graph.op("Slice").input(x).input(begin.into_ints(graph)).input(size.into_ints(graph)).out()
}

pub(crate) static SLICE: Op = Op {
    def: OpDef {
        name: "Slice",
        signature: "(input:T, begin:Index, size:Index) -> (output:T) ; T:type, Index:type{int32,int64}",
        shape: infer,
        // Zeros around dy: what lies before the slice, and after it.
        gradient: Gradient::Rule(|op, dy| {
            let (graph, dy) = (op.graph(), first(dy)?);
            let begin = op.input(1);
            let index = begin.dtype();
            let shape = |of| graph.op("Shape").input(of).attr("out_type", index).out();
            let after = shape(op.input(0)) - shape(dy) - begin;
            let paddings = graph.op("Pack").inputs([begin, after]).attr("axis", 1i64).out();
            Ok(vec![Some(graph.op("Pad").inputs([dy, paddings]).out().into()), None, None])
        }),
        host: HostRule::SmallIntegers,
        half: HalfSafety::Neutral,
        host_args: &["begin", "size"],
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward)],
    gpu: Gpu::Kernels(&[gpu_kernel("T", PLAIN, forward)]),
    cost: Cost::Elements,
};

fn infer(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let spec = ctx.input_of_rank(1, 1)?.merge(&ctx.input_of_rank(2, 1)?)?;
    let rank = match (ctx.input(0).rank(), spec.dim(0)) {
        (Some(rank), Some(n)) if rank != n => return Err(wrong_length(rank, n)),
        (rank, n) => rank.or(n),
    };
    let Some(rank) = rank.filter(|&rank| rank <= 254) else { return Ok(vec![PartialShape::unknown()]) };
    let input = ctx.input_of_rank(0, rank)?;
    let (begin, size) = (ctx.constant_integers(1), ctx.constant_integers(2));
    // Sizes may be partly known, such as those of another tensor; there −1 cannot be told from unknown.
    let partial = ctx.constant_as_shape(2);
    let dims = (0..rank).map(|i| -> Result<Dim> {
        match (&begin, &size, input.dim(i as isize)) {
            (Some(begin), Some(size), Some(dim)) => Ok(Some(extent(i, dim, begin[i], size[i])?)),
            _ => Ok(partial.dim(i as isize)),
        }
    });
    Ok(vec![PartialShape::new(&dims.collect::<Result<Vec<_>>>()?)])
}

fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (input, begin, size) = (ctx.input(0)?, ctx.input(1)?, ctx.input(2)?);
    let shape = input.shape();
    for spec in [begin, size] {
        if spec.shape().rank() != 1 || spec.n_elements() != shape.rank() {
            return Err(wrong_length(shape.rank(), spec.n_elements()));
        }
    }
    let (begin, size) = (integers(begin)?, integers(size)?);
    let steps = strides(shape);
    let (mut start, mut dims) = (0, Vec::with_capacity(shape.rank()));
    for i in 0..shape.rank() {
        dims.push(extent(i, shape[i], begin[i], size[i])?);
        start += begin[i] as usize * steps[i] as usize;
    }
    if dims == shape.dims() {
        return ctx.forward(0, 0);
    }
    let view = View::new(start, dims.iter().copied().zip(steps));
    let out = read_view(ctx, input, &view, Shape::new(&dims)?)?;
    ctx.set_output(0, out);
    Ok(())
}

/// How much of dimension `i`, which has `dim` elements, a slice takes.
fn extent(i: usize, dim: usize, begin: i64, size: i64) -> Result<usize> {
    let dim = dim as i64;
    if !(0..=dim).contains(&begin) {
        return Err(Error::invalid_argument(format!("Expected begin[{i}] in [0, {dim}], but got {begin}")));
    }
    let left = dim - begin;
    match size {
        -1 => Ok(left as usize),
        size if (0..=left).contains(&size) => Ok(size as usize),
        _ => Err(Error::invalid_argument(format!("Expected size[{i}] in [0, {left}], but got {size}"))),
    }
}

fn wrong_length(rank: usize, n: usize) -> Error {
    Error::invalid_argument(format!(
        "Expected begin and size arguments to be 1-D tensors of size {rank}, but got {n} instead"
    ))
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::testing::{check_op, tensor, wavy};

    fn counting() -> Tensor {
        tensor([2, 3, 2], (0..12).collect::<Vec<i64>>())
    }

    #[test]
    fn slice() {
        check_op("Slice")
            .input(counting())
            .input([1i32, 0, 0])
            .input([1i32, 2, 2])
            .gives(tensor([1, 2, 2], [6i64, 7, 8, 9]));
        check_op("Slice")
            .input(counting())
            .input([0i64, 1, 1])
            .input([-1i64, 1, -1])
            .gives(tensor([2, 1, 1], [3i64, 9]));
        check_op("Slice").input(counting()).input([0i32; 3]).input([-1i32; 3]).gives(counting());
        check_op("Slice")
            .input(counting())
            .input([2i32, 0, 0])
            .input([0i32, 3, 2])
            .gives(tensor::<i64, 3>([0, 3, 2], []));
        let words = |list: &[&'static str]| {
            Tensor::from_strings([list.len()], list.iter().map(|&word| word.into()).collect()).unwrap()
        };
        check_op("Slice").input(words(&["a", "b", "c"])).input([1i32]).input([2i32]).gives(words(&["b", "c"]));
        let none = || tensor::<i32, 1>([0], []);
        check_op("Slice").input(3.0f32).input(none()).input(none()).gives(3.0f32);
    }

    #[test]
    fn bad_slices_are_named() {
        let case = |begin: i64, size: i64| check_op("Slice").input([1.0f32, 2.0, 3.0]).input([begin]).input([size]);
        case(-1, 1).fails("Expected begin[0] in [0, 3], but got -1");
        case(4, 0).fails("Expected begin[0] in [0, 3], but got 4");
        case(1, 3).fails("Expected size[0] in [0, 2], but got 3");
        case(1, -2).fails("Expected size[0] in [0, 2], but got -2");
        case(i64::MAX, i64::MAX).fails("Expected begin[0]");
        check_op("Slice").input(wavy([2, 2], 0)).input([0i32]).input([1i32]).fails("1-D tensors of size 2");
    }

    #[test]
    fn the_gradient_is_padded() {
        check_op("Slice").input(wavy([3, 4], 0)).input([1i32, 0]).input([2i32, 3]).gradient();
        check_op("Slice").input(wavy([3], 0)).input([1i64]).input([-1i64]).gradient();
    }
}
