//! `Gather` and `GatherV2`: slices of a tensor picked by number, along any dimension.

pub(crate) mod gpu;

use std::borrow::Cow;

use kolo_core::{DType, Dim, Error, PartialShape, Result, Shape, Tensor};
use kolo_device::cpu::IntraPool;
use kolo_graph::shape_fns::resolve_axis;
use kolo_graph::{Grad, Gradient, HalfSafety, HostRule, IndexedSlices, InferCtx, OpDef, Operation, Output, Work};

use super::cast::cast;
use super::elements::{Item, Job, build, copy_units, index_below, integer, integers, product};
use super::reshape::reshape;
use super::strided_slice::{At, slice_at};
use super::transpose::transpose;
use crate::cuda::PLAIN;
use crate::math::binary::first;
use crate::op::{Gpu, Op, cpu_any, gpu_kernel};
use crate::{Cost, KernelCtx};

/// The slices of `params` along dimension `axis` that `indices` names, in its shape.
#[track_caller]
pub fn gather<'g>(params: Output<'g>, indices: Output<'g>, axis: i32) -> Output<'g> {
    let graph = params.graph();
    graph.op("GatherV2").inputs([params, indices, graph.constant(axis)]).out()
}

/// As [`gather`], where the first `batch_dims` dimensions of both are the same and go together.
#[track_caller]
pub fn batch_gather<'g>(params: Output<'g>, indices: Output<'g>, axis: i32, batch_dims: i64) -> Output<'g> {
    let graph = params.graph();
    graph.op("GatherV2").inputs([params, indices, graph.constant(axis)]).attr("batch_dims", batch_dims).out()
}

pub(crate) static GATHER: Op = Op {
    def: OpDef {
        name: "Gather",
        signature: "(params:Tparams, indices:Tindices) -> (output:Tparams) ; validate_indices:bool=true, Tparams:type, \
                    Tindices:type{int32,int64}",
        shape: |ctx| infer(ctx, Some(0), 0),
        gradient: Gradient::Rule(|op, dy| Ok(vec![Some(slices(op, first(dy)?)), None])),
        host: HostRule::SmallIntegers,
        half: HalfSafety::Neutral,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(|ctx| forward(ctx, 0, 0))],
    gpu: Gpu::Kernels(&[gpu_kernel("Tparams", PLAIN, |ctx| gpu::gather(ctx, 0, 0))]),
    cost: Cost::Elements,
};

pub(crate) static GATHER_V2: Op = Op {
    def: OpDef {
        name: "GatherV2",
        signature: "(params:Tparams, indices:Tindices, axis:Taxis) -> (output:Tparams) ; batch_dims:int=0, \
                    Tparams:type, Tindices:type{int16,int32,int64}, Taxis:type{int32,int64}",
        shape: |ctx| {
            ctx.input_of_rank(2, 0)?;
            let axis = ctx.constant_integers(2).and_then(|axis| axis.first().copied());
            infer(ctx, axis, ctx.attrs().int("batch_dims")?)
        },
        gradient: Gradient::Rule(|op, dy| {
            let (dy, axis) = (first(dy)?, constant_axis(op)?);
            let batch_dims = op.attrs(|attrs| attrs.int("batch_dims"))?;
            let grad =
                if axis == Some(0) && batch_dims == 0 { slices(op, dy) } else { dense(op, dy, axis, batch_dims)? };
            Ok(vec![Some(grad), None, None])
        }),
        host: HostRule::SmallIntegers,
        half: HalfSafety::Neutral,
        host_args: &["axis"],
        ..OpDef::BASE
    },
    kernels: &[cpu_any(|ctx| {
        let axis = integer(ctx.input(2)?)?;
        forward(ctx, axis, ctx.attrs().int("batch_dims")?)
    })],
    gpu: Gpu::Kernels(&[gpu_kernel("Tparams", PLAIN, |ctx| {
        let (axis, batch_dims) = (integer(ctx.input(2)?)?, ctx.attrs().int("batch_dims")?);
        gpu::gather(ctx, axis, batch_dims)
    })]),
    cost: Cost::Elements,
};

fn infer(ctx: &InferCtx<'_>, axis: Option<i64>, batch_dims: i64) -> Result<Vec<PartialShape>> {
    let unknown = Ok(vec![PartialShape::unknown()]);
    let (params, indices) = (ctx.input_of_rank_at_least(0, 1)?, ctx.input(1));
    let Some(indices) = indices.dims() else { return unknown };
    let batch_dims = resolve_batch(batch_dims, indices.len())?;
    let Some(dims) = params.dims() else { return unknown };
    let Some(axis) = axis else {
        return Ok(vec![PartialShape::of_rank(dims.len() - 1 + indices.len() - batch_dims)]);
    };
    let axis = resolve_axis(axis, dims.len())?;
    check_batch(batch_dims, axis)?;
    let mut out: Vec<Dim> = Vec::new();
    for i in 0..batch_dims {
        out.extend(PartialShape::new(&[dims[i]]).merge(&PartialShape::new(&[indices[i]]))?.dims().unwrap_or(&[]));
    }
    out.extend(&dims[batch_dims..axis]);
    out.extend(&indices[batch_dims..]);
    out.extend(&dims[axis + 1..]);
    Ok(vec![PartialShape::new(&out)])
}

fn resolve_batch(batch_dims: i64, rank: usize) -> Result<usize> {
    let from_start = if batch_dims < 0 { batch_dims.saturating_add(rank as i64) } else { batch_dims };
    usize::try_from(from_start).ok().filter(|&n| n <= rank).ok_or_else(|| {
        Error::invalid_argument(format!("Expected batch_dims in the range [-{rank}, {rank}], but got {batch_dims}"))
    })
}

fn check_batch(batch_dims: usize, axis: usize) -> Result<()> {
    if batch_dims <= axis {
        return Ok(());
    }
    Err(Error::invalid_argument(format!("batch_dims ({batch_dims}) must be less than or equal to axis ({axis})")))
}

/// Only the rows that were picked have a gradient; a row picked twice occurs twice.
fn slices<'g>(op: Operation<'g>, dy: Output<'g>) -> Grad<'g> {
    let graph = op.graph();
    let (params, indices) = (op.input(0), op.input(1));
    let dense_shape = graph.op("Shape").input(params).out();
    let n = reshape(graph.op("Size").input(indices).out(), &[1]);
    let row = slice_at(dense_shape, &[At::Range(Some(1), None)]);
    let values_shape = graph.op("ConcatV2").inputs([n, row, graph.constant(0i32)]).out();
    let indices = if indices.dtype() == DType::I16 { cast(indices, DType::I32) } else { indices };
    Grad::Slices(IndexedSlices { values: reshape(dy, values_shape), indices: reshape(indices, &[-1]), dense_shape })
}

/// Sums `dy` into zeros of the shape of params. Seen as [batch, outer, gathered, inner], the gathered dimension is moved
/// to the front, next to the batch, so that segments can be summed; then everything is moved back.
fn dense<'g>(op: Operation<'g>, dy: Output<'g>, axis: Option<i64>, batch_dims: i64) -> Result<Grad<'g>> {
    let graph = op.graph();
    let (params, indices) = (op.input(0), op.input(1));
    let shape = graph.op("Shape").input(params).out();
    let batch_dims = match (batch_dims, indices.shape().rank()) {
        (batch_dims, Some(rank)) => resolve_batch(batch_dims, rank)? as i32,
        (batch_dims @ 0.., None) => i32::try_from(batch_dims).unwrap_or(i32::MAX),
        _ => return Err(Error::unimplemented("the gradient of GatherV2 with negative batch_dims needs a known rank")),
    };
    // Positions in `shape`, each a vector of one; those that are not known now are worked out in the run.
    let axis = match (axis, params.shape().rank()) {
        (Some(axis), Some(rank)) => graph.constant([resolve_axis(axis, rank)? as i32]),
        _ => {
            let rank = graph.op("Rank").input(params).out();
            let axis = reshape(cast(op.input(2), DType::I32), &[1]);
            graph.op("FloorMod").input(axis).input(rank).out()
        }
    };
    let [start, batch_end, end, one] = [0, batch_dims, i32::MAX, 1].map(|i| graph.constant([i]));
    let cut = |from: Output<'g>, to: Output<'g>, of: Output<'g>| {
        let dims = graph.op("StridedSlice").inputs([of, from, to, one]).out();
        graph.op("Prod").inputs([dims, graph.constant([0i32])]).out()
    };
    let batch = cut(start, batch_end, shape);
    let outer = cut(batch_end, axis, shape);
    let gathered = cut(axis, axis + 1, shape);
    let inner = cut(axis + 1, end, shape);
    let n = cut(batch_end, end, graph.op("Shape").input(indices).out());
    let pack = |dims: &[Output<'g>]| graph.op("Pack").inputs(dims.iter().copied()).out();

    let dy = transpose(reshape(dy, pack(&[batch, outer, n, inner])), &[0, 2, 1, 3]);
    let dy = reshape(dy, pack(&[batch * n, outer, inner]));
    let first_row = graph.op("Range").inputs([graph.constant(0i32), batch, graph.constant(1i32)]).out() * gathered;
    let indices = reshape(cast(indices, DType::I64), pack(&[batch, n]));
    let rows = reshape(indices + reshape(cast(first_row, DType::I64), &[-1, 1]), &[-1]);
    let sum = graph.op("UnsortedSegmentSum").inputs([dy, rows, batch * gathered]).out();
    let sum = transpose(reshape(sum, pack(&[batch, gathered, outer, inner])), &[0, 2, 1, 3]);
    Ok(reshape(sum, shape).into())
}

/// The axis, if it is a constant.
fn constant_axis(op: Operation<'_>) -> Result<Option<i64>> {
    let node = op.input(2).operation().node();
    let node = node.as_ref().filter(|node| node.def.work == Work::Constant);
    node.map(|node| integer(node.attrs.tensor("value")?)).transpose()
}

fn forward(ctx: &mut KernelCtx<'_>, axis: i64, batch_dims: i64) -> Result<()> {
    let (params, indices) = (ctx.input(0)?, ctx.input(1)?);
    let shape = params.shape();
    if shape.rank() == 0 {
        return Err(Error::invalid_argument("params must be at least 1 dimensional"));
    }
    let axis = resolve_axis(axis, shape.rank())?;
    let batch_dims = resolve_batch(batch_dims, indices.shape().rank())?;
    check_batch(batch_dims, axis)?;
    if shape[..batch_dims] != indices.shape()[..batch_dims] {
        return Err(Error::invalid_argument(format!(
            "the first {batch_dims} dimensions of params {shape} and indices {} differ",
            indices.shape()
        )));
    }
    let dims = [&shape[..axis], &indices.shape()[batch_dims..], &shape[axis + 1..]].concat();
    let job = Pick {
        pool: ctx.pool(),
        rows: checked_indices(indices, shape[axis])?,
        n_outer: product(&shape[batch_dims..axis]),
        n_rows: shape[axis],
        n_picked: product(&indices.shape()[batch_dims..]),
        row_len: product(&shape[axis + 1..]),
    };
    let out = build(ctx, params.dtype(), Shape::new(&dims)?, &[params], job)?;
    ctx.set_output(0, out);
    Ok(())
}

/// Numbers of rows that all lie in the tensor they are of, as they came.
enum Rows<'a> {
    Narrow(&'a [i32]),
    Wide(Cow<'a, [i64]>),
    Usual(&'a [usize]),
}

impl Rows<'_> {
    /// Number `i`. All of them were found to be positions, so nothing is lost.
    #[inline(always)]
    fn get(&self, i: usize) -> usize {
        match self {
            Rows::Narrow(rows) => rows[i] as usize,
            Rows::Wide(rows) => rows[i] as usize,
            Rows::Usual(rows) => rows[i],
        }
    }
}

/// Indices that all lie below `n`; the error names the first that does not.
fn checked_indices(indices: &Tensor, n: usize) -> Result<Rows<'_>> {
    let rows = match indices.dtype() {
        DType::I32 => Rows::Narrow(indices.data::<i32>()?),
        DType::I64 => Rows::Wide(indices.data::<i64>()?.into()),
        _ => Rows::Wide(integers(indices)?.into()),
    };
    // Negative ones are the largest of all without a sign. No early end, so that many are compared at a time.
    let bad = match &rows {
        Rows::Narrow(rows) => {
            let n = u32::try_from(n).unwrap_or(u32::MAX).min(1 << 31);
            rows.iter().fold(false, |bad, &row| bad | (row as u32 >= n))
        }
        Rows::Wide(rows) => rows.iter().fold(false, |bad, &row| bad | (row as u64 >= n as u64)),
        Rows::Usual(rows) => rows.iter().any(|&row| row >= n),
    };
    if bad {
        let values = integers(indices)?;
        let first = values.iter().enumerate().find(|(_, value)| index_below(**value, n).is_none());
        if let Some((i, value)) = first {
            let place = place(indices.shape(), i);
            return Err(Error::invalid_argument(format!("indices{place} = {value} is not in [0, {n})")));
        }
    }
    Ok(rows)
}

/// `[1,2]`: where element `i` of a tensor of `shape` lies; nothing for a scalar.
pub(crate) fn place(shape: &Shape, mut i: usize) -> String {
    if shape.rank() == 0 {
        return String::new();
    }
    let mut at = vec![0; shape.rank()];
    for (at, &dim) in at.iter_mut().zip(shape.iter()).rev() {
        *at = i % dim.max(1);
        i /= dim.max(1);
    }
    let at: Vec<String> = at.iter().map(usize::to_string).collect();
    format!("[{}]", at.join(","))
}

/// Picks rows: of params as [batch, outer, rows, row_len] into [batch, outer, picked, row_len].
struct Pick<'a> {
    pool: &'a IntraPool,
    /// Which rows, `n_picked` for every batch.
    rows: Rows<'a>,
    n_outer: usize,
    n_rows: usize,
    n_picked: usize,
    row_len: usize,
}

impl Job for Pick<'_> {
    fn run<E: Item>(self, out: &mut [E], inputs: &[&[E]]) -> Result<()> {
        let place = |k: usize| {
            let (block, picked) = (k / self.n_picked, k % self.n_picked);
            let row = self.rows.get(block / self.n_outer * self.n_picked + picked);
            (block * self.n_rows + row) * self.row_len
        };
        copy_units(self.pool, out, inputs[0], self.row_len, |first| (first..).map(place));
        Ok(())
    }
}

/// Rows of `input` (along dimension 0) by number, for kernels that have checked the numbers.
pub(crate) fn pick_rows(ctx: &KernelCtx<'_>, input: &Tensor, rows: &[usize], shape: Shape) -> Result<Tensor> {
    let n_rows = input.shape().first().copied().unwrap_or(1);
    let row_len = product(input.shape().get(1..).unwrap_or(&[]));
    let job = Pick { pool: ctx.pool(), n_outer: 1, n_rows, n_picked: rows.len(), row_len, rows: Rows::Usual(rows) };
    build(ctx, input.dtype(), shape, &[input], job)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check_op, tensor, wavy};

    fn grid() -> Tensor {
        Tensor::from([[1.0f32, 2.0, 3.0], [4.0, 5.0, 6.0]])
    }

    #[test]
    fn gather() {
        check_op("Gather").input(grid()).input([1i32, 0, 1]).gives([
            [4.0f32, 5.0, 6.0],
            [1.0, 2.0, 3.0],
            [4.0, 5.0, 6.0],
        ]);
        check_op("Gather").input([7i64, 8, 9]).input([[2i64, 0]]).gives([[9i64, 7]]);
        check_op("Gather").input(grid()).input(1i32).gives([4.0f32, 5.0, 6.0]);
        let words = Tensor::from_strings([2], vec!["a".into(), "b".into()]).unwrap();
        check_op("Gather").input(words).input(1i32).gives("b");
        check_op("Gather").input(grid()).input(tensor::<i32, 1>([0], [])).gives(tensor::<f32, 2>([0, 3], []));
    }

    /// Large enough to go past the caches of most machines, by rows that are whole lines of them and by odd ones.
    #[test]
    fn large_results() {
        for n in [128usize, 127] {
            let params = tensor([500, n], (0..500 * n as i32).collect::<Vec<i32>>());
            let indices: Vec<i32> = (0..40_000).map(|i| i * 77 % 500).collect();
            let wide: Vec<i64> = indices.iter().map(|&i| i.into()).collect();
            let narrow = check_op("Gather").input(params.clone()).input(indices.clone()).run(false).unwrap();
            let rows = narrow[0].data::<i32>().unwrap().chunks(n).zip(&indices);
            for (row, &i) in rows {
                assert!(row[0] == i * n as i32 && row[n - 1] == (i + 1) * n as i32 - 1, "row {i}");
            }
            assert!(check_op("Gather").input(params).input(wide).run(false).unwrap() == narrow);
        }
    }

    #[test]
    fn along_an_axis() {
        let case = |axis: i32| check_op("GatherV2").input(grid()).input([1i32, 1]).input(axis);
        case(1).gives([[2.0f32, 2.0], [5.0, 5.0]]);
        case(-1).gives([[2.0f32, 2.0], [5.0, 5.0]]);
        case(-2).gives([[4.0f32, 5.0, 6.0], [4.0, 5.0, 6.0]]);
        case(2).fails("axis 2 is out of range for rank 2");
        check_op("GatherV2")
            .input(grid())
            .input([[2i16], [0]])
            .input(1i64)
            .gives(tensor([2, 2, 1], [3.0f32, 1.0, 6.0, 4.0]));
    }

    #[test]
    fn batches_go_together() {
        let case = |batch: i64| {
            check_op("GatherV2").input(grid()).input([[2i32, 0], [1, 1]]).input(1i32).attr("batch_dims", batch)
        };
        case(1).gives([[3.0f32, 1.0], [5.0, 5.0]]);
        case(-1).gives([[3.0f32, 1.0], [5.0, 5.0]]);
        case(3).fails("Expected batch_dims in the range [-2, 2], but got 3");
        case(2).fails("batch_dims (2) must be less than or equal to axis (1)");
        // [batch 2, outer 1, gathered 3] picked by [batch 2, 1].
        check_op("GatherV2")
            .input(tensor([2, 1, 3], [1i32, 2, 3, 4, 5, 6]))
            .input([[0i32], [2]])
            .input(2i32)
            .attr("batch_dims", 1i64)
            .gives(tensor([2, 1, 1], [1i32, 6]));
    }

    #[test]
    fn indices_out_of_range_are_named() {
        check_op("Gather").input(grid()).input([[0i32, 1], [2, 0]]).fails("indices[1,0] = 2 is not in [0, 2)");
        check_op("Gather").input(grid()).input(-1i64).fails("indices = -1 is not in [0, 2)");
        check_op("Gather").input(1.0f32).input(0i32).fails("at least");
        check_op("Gather").input(tensor::<f32, 1>([0], [])).input([0i32]).fails("indices[0] = 0 is not in [0, 0)");
    }

    #[test]
    fn gradients() {
        check_op("Gather").input(wavy([3, 2], 0)).input([[2i32, 0], [2, 2]]).gradient();
        check_op("GatherV2").input(wavy([3], 0)).input([2i64, 2]).input(0i32).gradient();
        check_op("GatherV2").input(wavy([3, 2], 0)).input([2i16, 0]).input(0i32).gradient();
        check_op("GatherV2").input(wavy([2, 3, 2], 0)).input([[2i32, 0, 2]]).input(1i32).gradient();
        check_op("GatherV2").input(wavy([2, 3], 0)).input([2i64, 0, 2]).input(-1i32).gradient();
        check_op("GatherV2")
            .input(wavy([2, 2, 3], 0))
            .input([[2i32, 2], [0, 1]])
            .input(2i32)
            .attr("batch_dims", 1i64)
            .gradient();
    }

    #[test]
    fn the_gradient_of_rows_is_sparse() {
        let g = crate::graph();
        let x = g.placeholder::<f32>("x", [5usize, 2]);
        let y = super::gather(x, g.constant([1i32, 1]), 0);
        let grad = kolo_graph::gradients(&[y], &[x]).unwrap()[0].unwrap();
        assert!(matches!(grad, Grad::Slices(_)));
    }
}
