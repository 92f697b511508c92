//! `Pad` and `PadV2`: a tensor with a margin of one value around it.

use kolo_core::{Dim, Error, PartialShape, Result, Shape, Tensor};
use kolo_device::cpu::IntraPool;
use kolo_graph::{Grad, Gradient, HalfSafety, HostRule, InferCtx, OpDef, Operation, Output};

use super::elements::{Item, Job, build, integers, product};
use super::strided_slice::{At, slice_at};
use crate::cuda::PLAIN;
use crate::cuda::view::is_on_gpu;
use crate::math::binary::first;
use crate::op::{Gpu, Op, cpu_any, gpu_kernel};
use crate::{Cost, KernelCtx};

/// `x` with zeros around it: `paddings[i]` before and after dimension `i`.
#[track_caller]
pub fn pad<'g>(x: Output<'g>, paddings: &[[usize; 2]]) -> Output<'g> {
    let paddings = constant(x, paddings);
    x.graph().op("Pad").inputs([x, paddings]).out()
}

/// As [`pad`], with `value`, a scalar, around it.
#[track_caller]
pub fn pad_with<'g>(x: Output<'g>, paddings: &[[usize; 2]], value: Output<'g>) -> Output<'g> {
    let paddings = constant(x, paddings);
    x.graph().op("PadV2").inputs([x, paddings, value]).out()
}

/// Paddings as an `[n, 2]` constant.
#[track_caller]
pub(crate) fn constant<'g>(x: Output<'g>, paddings: &[[usize; 2]]) -> Output<'g> {
    let values: Vec<i64> = paddings.iter().flatten().map(|&n| n as i64).collect();
    x.graph().constant(Tensor::from_vec([paddings.len(), 2], values).expect("two for each"))
}

pub(crate) static PAD: Op = Op {
    def: OpDef {
        name: "Pad",
        signature: "(input:T, paddings:Tpaddings) -> (output:T) ; T:type, Tpaddings:type{int32,int64}=int32",
        shape: infer,
        gradient: Gradient::Rule(|op, dy| Ok(vec![Some(inside(op, first(dy)?).into()), None])),
        host: HostRule::SmallIntegers,
        half: HalfSafety::Neutral,
        host_args: &["paddings"],
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward)],
    gpu: Gpu::Kernels(&[gpu_kernel("T", PLAIN, forward)]),
    cost: Cost::Elements,
};

pub(crate) static PAD_V2: Op = Op {
    def: OpDef {
        name: "PadV2",
        signature: "(input:T, paddings:Tpaddings, constant_values:T) -> (output:T) ; T:type, \
                    Tpaddings:type{int32,int64}=int32",
        shape: |ctx| {
            ctx.input_of_rank(2, 0)?;
            infer(ctx)
        },
        gradient: Gradient::Rule(gradient_v2),
        half: HalfSafety::Neutral,
        host_args: &["paddings"],
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward)],
    gpu: Gpu::Kernels(&[gpu_kernel("T", PLAIN, forward)]),
    cost: Cost::Elements,
};

/// The part of `dy` that is not padding.
fn inside<'g>(op: Operation<'g>, dy: Output<'g>) -> Output<'g> {
    let graph = op.graph();
    let paddings = op.input(1);
    let begin = slice_at(paddings, &[At::All, At::Index(0)]);
    let size = graph.op("Shape").input(op.input(0)).attr("out_type", paddings.dtype()).out();
    graph.op("Slice").inputs([dy, begin, size]).out()
}

/// The value around gets what the tensor itself does not.
fn gradient_v2<'g>(op: Operation<'g>, dy: &[Option<Output<'g>>]) -> Result<Vec<Option<Grad<'g>>>> {
    let (graph, dy) = (op.graph(), first(dy)?);
    let total = |x: Output<'g>| {
        let rank = graph.op("Rank").input(x).out();
        let axes = graph.op("Range").inputs([graph.constant(0i32), rank, graph.constant(1i32)]).out();
        graph.op("Sum").inputs([x, axes]).out()
    };
    let dx = inside(op, dy);
    Ok(vec![Some(dx.into()), None, Some((total(dy) - total(dx)).into())])
}

fn infer(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let pairs = ctx.input_of_rank(1, 2)?.merge(&PartialShape::new(&[ctx.input(0).rank(), Some(2)])).map_err(|_| {
        Error::invalid_argument(format!(
            "The first dimension of paddings must be the rank of inputs {}, found {}",
            ctx.input(0),
            ctx.input(1)
        ))
    })?;
    let Some(rank) = ctx.input(0).rank().or(pairs.dim(0)).filter(|&rank| rank <= 254) else {
        return Ok(vec![PartialShape::unknown()]);
    };
    let Some(paddings) = ctx.constant_integers(1) else { return Ok(vec![PartialShape::of_rank(rank)]) };
    let around = margins(&paddings)?;
    let dims: Vec<Dim> = (0..rank)
        .map(|i| ctx.input(0).dim(i as isize).and_then(|n| n.checked_add(around[i].0)?.checked_add(around[i].1)))
        .collect();
    Ok(vec![PartialShape::new(&dims)])
}

/// Pairs of paddings, none of them negative.
fn margins(paddings: &[i64]) -> Result<Vec<(usize, usize)>> {
    let pair = |pair: &[i64]| match (usize::try_from(pair[0]), usize::try_from(pair[1])) {
        (Ok(before), Ok(after)) => Ok((before, after)),
        _ => Err(Error::invalid_argument(format!("Paddings must be non-negative: {} {}", pair[0], pair[1]))),
    };
    paddings.chunks_exact(2).map(pair).collect()
}

/// Input 1 as margins of a tensor of `rank`.
pub(crate) fn read_margins(ctx: &KernelCtx<'_>, rank: usize) -> Result<Vec<(usize, usize)>> {
    let paddings = ctx.input(1)?;
    let shape = paddings.shape();
    if shape.rank() != 2 || shape[1] != 2 {
        return Err(Error::invalid_argument(format!("paddings must be a matrix with 2 columns: {shape}")));
    }
    if shape[0] != rank {
        return Err(Error::invalid_argument(format!(
            "The first dimension of paddings must be the rank of inputs: {shape}, rank {rank}"
        )));
    }
    margins(&integers(paddings)?)
}

fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let input = ctx.input(0)?;
    let around = read_margins(ctx, input.shape().rank())?;
    if around.iter().all(|&around| around == (0, 0)) {
        return ctx.forward(0, 0);
    }
    let value = match ctx.n_inputs() {
        3 if ctx.input(2)?.n_elements() != 1 => {
            return Err(Error::invalid_argument(format!(
                "constant_values must be a scalar. Found {}",
                ctx.input(2)?.shape()
            )));
        }
        3 => Some(ctx.input(2)?),
        _ => None,
    };
    let out = padded(ctx, input, &around, value)?;
    ctx.set_output(0, out);
    Ok(())
}

/// `input` with margins of `value`, zero if there is none.
pub(crate) fn padded(
    ctx: &KernelCtx<'_>,
    input: &Tensor,
    around: &[(usize, usize)],
    value: Option<&Tensor>,
) -> Result<Tensor> {
    let shape = input.shape();
    let whole = |i: usize| shape[i].saturating_add(around[i].0).saturating_add(around[i].1);
    let dims: Vec<usize> = (0..shape.rank()).map(whole).collect();
    let out = Shape::new(&dims)?;
    if is_on_gpu(input) {
        return crate::cuda::view::padded(ctx, input, around, value, out);
    }
    // A dimension without margins is part of the elements of the one outside it.
    let mut merged: Vec<Padded> = Vec::new();
    for i in (0..shape.rank()).rev() {
        let this = Padded { before: around[i].0, n: shape[i], after: around[i].1 };
        match merged.last_mut() {
            Some(inner) if inner.before == 0 && inner.after == 0 => {
                let by = inner.n;
                *inner = Padded { before: this.before * by, n: this.n * by, after: this.after * by };
            }
            _ => merged.push(this),
        }
    }
    merged.reverse();
    let inputs: Vec<&Tensor> = std::iter::once(input).chain(value).collect();
    build(ctx, input.dtype(), out, &inputs, Pad { pool: ctx.pool(), dims: merged })
}

/// One dimension: how many elements are put before, are there, and are put after.
struct Padded {
    before: usize,
    n: usize,
    after: usize,
}

impl Padded {
    fn whole(&self) -> usize {
        self.before + self.n + self.after
    }
}

struct Pad<'a> {
    pool: &'a IntraPool,
    dims: Vec<Padded>,
}

impl Job for Pad<'_> {
    fn run<E: Item>(self, out: &mut [E], inputs: &[&[E]]) -> Result<()> {
        let value = inputs.get(1).and_then(|value| value.first()).cloned().unwrap_or_default();
        let (Some((inner, outer)), false) = (self.dims.split_last(), out.is_empty()) else {
            out.clone_from_slice(inputs[0]);
            return Ok(());
        };
        let row_len = inner.whole();
        let rows = E::fill_grain(out.len(), 0.3).div_ceil(row_len).max(1);
        E::fill_chunks(self.pool, out, rows * row_len, &|i, out| {
            for (k, out) in out.chunks_mut(row_len).enumerate() {
                let mut k = i * rows + k;
                // Which row of the input this is, unless it lies in a margin.
                let (mut row, mut step, mut in_margin) = (0, 1, inner.n == 0);
                for dim in outer.iter().rev() {
                    let at = (k % dim.whole()).wrapping_sub(dim.before);
                    k /= dim.whole();
                    in_margin |= at >= dim.n;
                    row += if in_margin { 0 } else { at * step };
                    step *= dim.n;
                }
                if in_margin {
                    out.fill(value.clone());
                    continue;
                }
                let (before, rest) = out.split_at_mut(inner.before);
                let (middle, after) = rest.split_at_mut(inner.n);
                before.fill(value.clone());
                middle.clone_from_slice(&inputs[0][row * inner.n..(row + 1) * inner.n]);
                after.fill(value.clone());
            }
        });
        Ok(())
    }
}

/// Elements of a shape with `around` taken away; an error if more is taken than there is.
pub(crate) fn without_margins(shape: &Shape, around: &[(usize, usize)]) -> Result<Shape> {
    let inner = |(i, &(before, after)): (usize, &(usize, usize))| {
        shape[i].checked_sub(before.saturating_add(after)).ok_or_else(|| {
            Error::invalid_argument(format!("paddings {before} and {after} are more than dimension {i} of {shape} has"))
        })
    };
    let dims = around.iter().enumerate().map(inner).collect::<Result<Vec<usize>>>()?;
    debug_assert!(product(&dims) <= product(shape));
    Shape::new(&dims)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn pad() {
        let pads = || Tensor::from([[1i32, 0], [0, 2]]);
        check_op("Pad").input([[1i32, 2], [3, 4]]).input(pads()).gives([[0i32, 0, 0, 0], [1, 2, 0, 0], [3, 4, 0, 0]]);
        check_op("PadV2").input([[1.0f32, 2.0]]).input(pads()).input(9.0f32).gives([[9.0f32; 4], [1.0, 2.0, 9.0, 9.0]]);
        check_op("Pad").input([1u8]).input([[0i64, 0]]).gives([1u8]);
        check_op("Pad").input(3.0f32).input(tensor::<i32, 2>([0, 2], [])).gives(3.0f32);
        check_op("Pad").input(tensor::<f32, 1>([0], [])).input([[1i32, 1]]).gives([0.0f32, 0.0]);
        check_op("Pad").input(tensor::<f32, 2>([2, 0], [])).input([[1i32, 0], [0, 1]]).gives([[0.0f32], [0.0], [0.0]]);
        let words = |list: &[&'static str]| {
            Tensor::from_strings([list.len()], list.iter().map(|&word| word.into()).collect()).unwrap()
        };
        check_op("PadV2").input(words(&["a"])).input([[1i32, 1]]).input("x").gives(words(&["x", "a", "x"]));
    }

    #[test]
    fn inner_dimensions_without_margins_move_together() {
        let input = tensor([1, 2, 1, 2], [1i32, 2, 3, 4]);
        let pads = tensor([4, 2], [0i32, 0, 1, 1, 1, 0, 0, 0]);
        let expected = tensor([1, 4, 2, 2], [0i32, 0, 0, 0, 0, 0, 1, 2, 0, 0, 3, 4, 0, 0, 0, 0]);
        check_op("Pad").input(input).input(pads).gives(expected);
    }

    #[test]
    fn bad_paddings_are_named() {
        let case = |pads: Tensor| check_op("Pad").input([1.0f32, 2.0]).input(pads);
        case(Tensor::from([[-1i32, 0]])).fails("Paddings must be non-negative: -1 0");
        case(Tensor::from([[1i32, 0], [0, 0]])).fails("The first dimension of paddings must be the rank of inputs");
        case(Tensor::from([1i32, 0])).fails("rank 2");
        case(Tensor::from([[i64::MAX, i64::MAX]])).fails("too");
        check_op("PadV2").input([1.0f32]).input([[1i32, 0]]).input([1.0f32]).fails("rank 0");
    }

    #[test]
    fn gradients() {
        check_op("Pad").input(wavy([2, 3], 0)).input([[1i32, 0], [0, 2]]).gradient();
        check_op("PadV2").input(wavy([2], 0)).input([[1i64, 2]]).input(0.5f32).gradient();
    }
}
