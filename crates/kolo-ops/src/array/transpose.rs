//! `Transpose`: dimensions in another order. `InvertPermutation`: the order that undoes one.

use kolo_core::{Dim, Error, PartialShape, Result, Shape};
use kolo_graph::shape_fns::{self, resolve_axis};
use kolo_graph::{Gradient, HalfSafety, HostRule, InferCtx, OpDef, Output};

use super::elements::{IntoInts, index_below, integer_tensor, integers};
use super::strided_slice::read_view;
use super::view::{View, strides};
use crate::cuda::PLAIN;
use crate::math::binary::first;
use crate::op::{Gpu, Op, cpu_any, gpu_kernel};
use crate::{Cost, KernelCtx};

/// `x` with its dimensions in the order `perm`: dimension `i` of the result is dimension `perm[i]` of `x`.
#[track_caller]
pub fn transpose<'g>(x: Output<'g>, perm: impl IntoInts<'g>) -> Output<'g> {
    let graph = x.graph();
    graph.op("Transpose").input(x).input(perm.into_ints(graph)).out()
}

/// The permutation that undoes `perm`.
#[track_caller]
pub fn invert_permutation(perm: Output<'_>) -> Output<'_> {
    perm.graph().op("InvertPermutation").input(perm).out()
}

pub(crate) static TRANSPOSE: Op = Op {
    def: OpDef {
        name: "Transpose",
        signature: "(x:T, perm:Tperm) -> (y:T) ; T:type, Tperm:type{int32,int64}=int32",
        shape: infer,
        gradient: Gradient::Rule(|op, dy| {
            Ok(vec![Some(transpose(first(dy)?, invert_permutation(op.input(1))).into()), None])
        }),
        host: HostRule::SmallIntegers,
        half: HalfSafety::Neutral,
        host_args: &["perm"],
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward)],
    gpu: Gpu::Kernels(&[gpu_kernel("T", PLAIN, forward)]),
    cost: Cost::Elements,
};

pub(crate) static INVERT_PERMUTATION: Op = Op {
    def: OpDef {
        name: "InvertPermutation",
        signature: "(x:T) -> (y:T) ; T:type{int32,int64}=int32",
        shape: |ctx| {
            ctx.input_of_rank(0, 1)?;
            shape_fns::same_as_input_0(ctx)
        },
        gradient: Gradient::None("permutations are integers"),
        host: HostRule::Always,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward_invert)],
    gpu: Gpu::Host,
    cost: Cost::Inline,
};

fn infer(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let n = ctx.input_of_rank(1, 1)?.dim(0);
    let rank = match (ctx.input(0).rank(), n) {
        (Some(rank), Some(n)) if rank != n => return Err(wrong_length(rank, n)),
        (rank, n) => rank.or(n),
    };
    let Some(rank) = rank.filter(|&rank| rank <= 254) else { return Ok(vec![PartialShape::unknown()]) };
    let perm = match ctx.constant_integers(1) {
        Some(perm) => check(&perm, rank)?,
        None => return Ok(vec![PartialShape::of_rank(rank)]),
    };
    let dims: Vec<Dim> = perm.into_iter().map(|dim| ctx.input(0).dim(dim as isize)).collect();
    Ok(vec![PartialShape::new(&dims)])
}

fn wrong_length(rank: usize, n: usize) -> Error {
    Error::invalid_argument(format!("transpose expects a vector of size {rank}. But input(1) is a vector of size {n}"))
}

/// The permutation, if it is one.
fn check(perm: &[i64], rank: usize) -> Result<Vec<usize>> {
    if perm.len() != rank {
        return Err(wrong_length(rank, perm.len()));
    }
    let mut seen = vec![false; rank];
    let mut checked = Vec::with_capacity(rank);
    for &dim in perm {
        let at = resolve_axis(dim, rank)
            .map_err(|_| Error::invalid_argument(format!("{dim} is out of range [0 .. {rank})")))?;
        seen[at] = true;
        checked.push(at);
    }
    match seen.iter().position(|seen| !seen) {
        Some(missing) => Err(Error::invalid_argument(format!("{missing} is missing from {perm:?}."))),
        None => Ok(checked),
    }
}

fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let input = ctx.input(0)?;
    let shape = input.shape();
    let perm = check(&integers(ctx.input(1)?)?, shape.rank())?;
    if perm.iter().enumerate().all(|(i, &dim)| i == dim) {
        return ctx.forward(0, 0);
    }
    let steps = strides(shape);
    let dims: Vec<usize> = perm.iter().map(|&dim| shape[dim]).collect();
    let view = View::new(0, perm.iter().map(|&dim| (shape[dim], steps[dim])));
    let out = read_view(ctx, input, &view, Shape::new(&dims)?)?;
    ctx.set_output(0, out);
    Ok(())
}

fn forward_invert(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let input = ctx.input(0)?;
    if input.shape().rank() != 1 {
        return Err(Error::invalid_argument(format!(
            "invert_permutation expects a 1D vector, found {}",
            input.shape()
        )));
    }
    let perm = integers(input)?;
    let mut inverse = vec![-1i64; perm.len()];
    for (i, &dim) in perm.iter().enumerate() {
        let at = index_below(dim, perm.len())
            .ok_or_else(|| Error::invalid_argument(format!("{dim} is not between 0 and {}", perm.len())))?;
        if inverse[at] != -1 {
            return Err(Error::invalid_argument(format!("{dim} is duplicated in the input.")));
        }
        inverse[at] = i as i64;
    }
    let out = integer_tensor(input.dtype(), input.shape().clone(), inverse)?;
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn transpose() {
        check_op("Transpose").input([[1i32, 2, 3], [4, 5, 6]]).input([1i32, 0]).gives([[1i32, 4], [2, 5], [3, 6]]);
        let cube = || tensor([2, 2, 3], (0..12).collect::<Vec<i16>>());
        let case = |perm: [i64; 3]| check_op("Transpose").input(cube()).input(perm);
        case([0, 1, 2]).gives(cube());
        case([2, 0, 1]).gives(tensor([3, 2, 2], [0i16, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]));
        case([1, 0, 2]).gives(tensor([2, 2, 3], [0i16, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11]));
        case([0, 2, 1]).gives(tensor([2, 3, 2], [0i16, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]));
        check_op("Transpose").input(3.0f32).input(tensor::<i32, 1>([0], [])).gives(3.0f32);
        check_op("Transpose").input(tensor::<f32, 2>([0, 3], [])).input([1i32, 0]).gives(tensor::<f32, 2>([3, 0], []));
        check_op("Transpose").input([[1u8, 2]]).input([-1i32, 0]).gives([[1u8], [2]]);
        check_op("Transpose").input([[1u8, 2]]).input([1i32, 0]).gives([[1u8], [2]]);
        let words = |shape: [usize; 2], list: [&'static str; 4]| {
            Tensor::from_strings(shape, list.map(Into::into).to_vec()).unwrap()
        };
        check_op("Transpose")
            .input(words([2, 2], ["a", "b", "c", "d"]))
            .input([1i32, 0])
            .gives(words([2, 2], ["a", "c", "b", "d"]));
    }

    #[test]
    fn large_matrices_of_odd_sizes() {
        let (rows, columns) = (301, 517);
        let input: Vec<f32> = (0..rows * columns).map(|i| i as f32).collect();
        let expected: Vec<f32> = (0..columns * rows).map(|i| ((i % rows) * columns + i / rows) as f32).collect();
        check_op("Transpose")
            .input(tensor([rows, columns], input))
            .input([1i32, 0])
            .gives(tensor([columns, rows], expected));
    }

    #[test]
    fn bad_permutations_are_named() {
        let case = |perm: &[i32]| check_op("Transpose").input([[1.0f32, 2.0]]).input(perm);
        case(&[0]).fails("transpose expects a vector of size 2. But input(1) is a vector of size 1");
        case(&[0, 0]).fails("1 is missing from [0, 0]");
        case(&[0, -3]).fails("-3 is out of range [0 .. 2)");
        case(&[0, 2]).fails("2 is out of range [0 .. 2)");
    }

    #[test]
    fn inverse() {
        check_op("InvertPermutation").input([3i32, 0, 2, 1]).gives([1i32, 3, 2, 0]);
        check_op("InvertPermutation").input([1i64, 0]).gives([1i64, 0]);
        check_op("InvertPermutation").input([0i32, 0]).fails("0 is duplicated in the input.");
        check_op("InvertPermutation").input([0i32, 2]).fails("2 is not between 0 and 2");
        check_op("InvertPermutation").input(0i32).fails("rank 1");
    }

    #[test]
    fn the_gradient_goes_back() {
        check_op("Transpose").input(wavy([2, 3, 2], 0)).input([2i32, 0, 1]).gradient();
        check_op("Transpose").input(wavy([2, 3], 0)).input([1i64, 0]).gradient();
    }
}
