//! `MirrorPad`: a tensor with its own reflection as a margin. `MirrorPadGrad`: margins folded back and summed.

use half::{bf16, f16};
use kolo_core::{Dim, Error, PartialShape, Result, Shape};
use kolo_device::cpu::{IntraPool, pool};
use kolo_graph::{Gradient, HalfSafety, InferCtx, OpDef, Output};

use super::elements::{Item, Job, Plus, build};
use super::pad::{constant, read_margins, without_margins};
use super::view::strides;
use crate::math::binary::first;
use crate::op::{Gpu, Op, cpu_any, cpu_kernels};
use crate::{Cost, KernelCtx};

/// How a margin reflects: `Reflect` leaves the edge out (`3 2 | 1 2 3`), `Symmetric` repeats it (`2 1 | 1 2 3`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mirror {
    /// The edge itself is not repeated.
    Reflect,
    /// The edge is repeated.
    Symmetric,
}

/// `x` with its own reflection around it: `paddings[i]` before and after dimension `i`.
#[track_caller]
pub fn mirror_pad<'g>(x: Output<'g>, paddings: &[[usize; 2]], mode: Mirror) -> Output<'g> {
    let mode = match mode {
        Mirror::Reflect => "REFLECT",
        Mirror::Symmetric => "SYMMETRIC",
    };
    x.graph().op("MirrorPad").inputs([x, constant(x, paddings)]).attr("mode", mode).out()
}

const SIGNATURE: &str = "(input:T, paddings:Tpaddings) -> (output:T) ; T:type, Tpaddings:type{int32,int64}=int32, \
                         mode:string{REFLECT,SYMMETRIC}";

pub(crate) static MIRROR_PAD: Op = Op {
    def: OpDef {
        name: "MirrorPad",
        signature: SIGNATURE,
        shape: |ctx| infer(ctx, 1),
        gradient: Gradient::Rule(|op, dy| Ok(vec![Some(other(op, "MirrorPadGrad", first(dy)?)?.into()), None])),
        half: HalfSafety::Neutral,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward)],
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

pub(crate) static MIRROR_PAD_GRAD: Op = Op {
    def: OpDef {
        name: "MirrorPadGrad",
        signature: SIGNATURE,
        shape: |ctx| infer(ctx, -1),
        gradient: Gradient::Rule(|op, dy| Ok(vec![Some(other(op, "MirrorPad", first(dy)?)?.into()), None])),
        half: HalfSafety::Neutral,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(backward: f32, f64, i32, i64, u64; f16, bf16, i8, i16, u8, u16, u32),
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

fn other<'g>(op: kolo_graph::Operation<'g>, name: &str, dy: Output<'g>) -> Result<Output<'g>> {
    let mode = op.attrs(|attrs| attrs.str("mode").map(str::to_owned))?;
    Ok(op.graph().op(name).inputs([dy, op.input(1)]).attr("mode", mode).out())
}

/// The input's sizes with the margins added (`sign` 1) or taken away (−1).
fn infer(ctx: &InferCtx<'_>, sign: i64) -> Result<Vec<PartialShape>> {
    let pairs = ctx.input_of_rank(1, 2)?.merge(&PartialShape::new(&[ctx.input(0).rank(), Some(2)]))?;
    let Some(rank) = ctx.input(0).rank().or(pairs.dim(0)).filter(|&rank| rank <= 254) else {
        return Ok(vec![PartialShape::unknown()]);
    };
    let Some(paddings) = ctx.constant_integers(1) else { return Ok(vec![PartialShape::of_rank(rank)]) };
    let dim = |i: usize| -> Dim {
        let around = paddings[2 * i].checked_add(paddings[2 * i + 1])?.checked_mul(sign)?;
        usize::try_from((ctx.input(0).dim(i as isize)? as i64).checked_add(around)?).ok()
    };
    Ok(vec![PartialShape::new(&(0..rank).map(dim).collect::<Vec<_>>())])
}

/// For every position along each padded dimension, which element of the inner tensor it shows, as a distance.
fn tables(ctx: &KernelCtx<'_>, inner: &Shape, around: &[(usize, usize)]) -> Result<Vec<Vec<usize>>> {
    let edge = match ctx.attrs().str("mode")? {
        "REFLECT" => 1,
        _ => 0,
    };
    let steps = strides(inner);
    let table = |(i, &(before, after)): (usize, &(usize, usize))| {
        let n = inner[i];
        if before.max(after) + edge > n && before.max(after) > 0 {
            let text = match edge {
                1 => format!("paddings must be less than the dimension size: {before}, {after} not less than {n}"),
                _ => format!("paddings must be no greater than the dimension size: {before}, {after} greater than {n}"),
            };
            return Err(Error::invalid_argument(text));
        }
        let left = (0..before).rev().map(|k| k + edge);
        let right = (0..after).map(|k| n - 1 - edge - k);
        Ok(left.chain(0..n).chain(right).map(|at| at * steps[i] as usize).collect())
    };
    around.iter().enumerate().map(table).collect()
}

fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let input = ctx.input(0)?;
    let around = read_margins(ctx, input.shape().rank())?;
    let tables = tables(ctx, input.shape(), &around)?;
    let dims: Vec<usize> = tables.iter().map(Vec::len).collect();
    let out = build(ctx, input.dtype(), Shape::new(&dims)?, &[input], Reflect { pool: ctx.pool(), tables: &tables })?;
    ctx.set_output(0, out);
    Ok(())
}

struct Reflect<'a> {
    pool: &'a IntraPool,
    tables: &'a [Vec<usize>],
}

impl Job for Reflect<'_> {
    fn run<E: Item>(self, out: &mut [E], inputs: &[&[E]]) -> Result<()> {
        let (Some((inner, outer)), false) = (self.tables.split_last(), out.is_empty()) else {
            out.clone_from_slice(inputs[0]);
            return Ok(());
        };
        let rows = pool::grain(1.0).div_ceil(inner.len()).max(1);
        self.pool.for_each_chunk(out, rows * inner.len(), |i, out| {
            for (k, out) in out.chunks_mut(inner.len()).enumerate() {
                let base = base(outer, i * rows + k);
                for (y, &at) in out.iter_mut().zip(inner) {
                    *y = inputs[0][base + at].clone();
                }
            }
        });
        Ok(())
    }
}

/// Where row `row` of the padded tensor comes from.
fn base(outer: &[Vec<usize>], mut row: usize) -> usize {
    let mut base = 0;
    for table in outer.iter().rev() {
        base += table[row % table.len()];
        row /= table.len();
    }
    base
}

fn backward<T: Plus>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let input = ctx.input(0)?;
    let around = read_margins(ctx, input.shape().rank())?;
    let shape = without_margins(input.shape(), &around)?;
    let tables = tables(ctx, &shape, &around)?;
    let mut out = ctx.allocate_zeroed(T::DTYPE, shape)?;
    let (sums, values) = (out.data_mut::<T>()?, ctx.data::<T>(0)?);
    match tables.split_last() {
        Some((inner, outer)) if !values.is_empty() => {
            for (row, values) in values.chunks(inner.len()).enumerate() {
                let base = base(outer, row);
                for (&x, &at) in values.iter().zip(inner) {
                    sums[base + at] = sums[base + at].plus(x);
                }
            }
        }
        _ => sums.copy_from_slice(values),
    }
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn mirror_pad() {
        let case =
            |mode: &str, pads: [i32; 2]| check_op("MirrorPad").input([1i32, 2, 3]).input([pads]).attr("mode", mode);
        case("REFLECT", [2, 1]).gives([3i32, 2, 1, 2, 3, 2]);
        case("SYMMETRIC", [2, 3]).gives([2i32, 1, 1, 2, 3, 3, 2, 1]);
        case("REFLECT", [3, 0]).fails("paddings must be less than the dimension size: 3, 0 not less than 3");
        case("SYMMETRIC", [4, 0]).fails("paddings must be no greater than the dimension size: 4, 0 greater than 3");
        case("REFLECT", [0, 0]).gives([1i32, 2, 3]);
        case("REFLECT", [-1, 0]).fails("-1");
        check_op("MirrorPad")
            .input([[1.0f32, 2.0, 3.0], [4.0, 5.0, 6.0]])
            .input([[1i64, 0], [0, 2]])
            .attr("mode", "SYMMETRIC")
            .gives([[1.0f32, 2.0, 3.0, 3.0, 2.0], [1.0, 2.0, 3.0, 3.0, 2.0], [4.0, 5.0, 6.0, 6.0, 5.0]]);
        let nothing = || tensor::<i32, 2>([0, 2], []);
        check_op("MirrorPad").input(7i32).input(nothing()).attr("mode", "REFLECT").gives(7i32);
        check_op("MirrorPad").input([1i32]).input([[0i32, 0]]).attr("mode", "WRAP").fails("WRAP");
    }

    #[test]
    fn margins_are_folded_back() {
        // Of x = 0 1 2, padded to 2 1 0 1 2 1.
        check_op("MirrorPadGrad")
            .input([1.0f32, 2.0, 4.0, 8.0, 16.0, 32.0])
            .input([[2i32, 1]])
            .attr("mode", "REFLECT")
            .gives([4.0f32, 42.0, 17.0]);
        check_op("MirrorPadGrad")
            .input([1.0f32])
            .input([[2i32, 1]])
            .attr("mode", "REFLECT")
            .fails("more than dimension 0");
    }

    #[test]
    fn gradients() {
        for mode in ["REFLECT", "SYMMETRIC"] {
            let pads = || Tensor::from([[1i32, 0], [1, 2]]);
            check_op("MirrorPad").input(wavy([2, 3], 0)).input(pads()).attr("mode", mode).gradient();
            check_op("MirrorPadGrad").input(wavy([3, 6], 0)).input(pads()).attr("mode", mode).gradient();
        }
    }
}
