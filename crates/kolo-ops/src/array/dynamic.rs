//! `DynamicPartition`: rows dealt out to several outputs. `DynamicStitch`: rows of several inputs put together again.

use kolo_core::{Dim, Error, PartialShape, Result, Shape, Tensor};
use kolo_device::cpu::looking;
use kolo_graph::{Grad, Gradient, InferCtx, OpDef, Operation, Output};

use super::elements::{Item, Job, build, index_below, integers, product};
use super::fill::zeros_like;
use super::gather::{pick_rows, place};
use super::reshape::{reshape, shaped_as_input};
use crate::math::binary::first;
use crate::op::{Gpu, KernelDef, Op, cpu_any};
use crate::{Cost, KernelCtx};

/// The slices of `data` dealt out to `n` outputs: slice `i` goes to output `partitions[i]`, in order.
#[track_caller]
pub fn dynamic_partition<'g>(data: Output<'g>, partitions: Output<'g>, n: usize) -> Vec<Output<'g>> {
    data.graph().op("DynamicPartition").inputs([data, partitions]).attr("num_partitions", n).build().outputs()
}

/// One tensor whose slice `indices[k][i]` is slice `i` of `data[k]`; where several claim a place the last one wins.
///
/// # Panics
/// If there is no data.
#[track_caller]
pub fn dynamic_stitch<'g>(indices: &[Output<'g>], data: &[Output<'g>]) -> Output<'g> {
    let graph = data.first().expect("dynamic_stitch needs at least one tensor").graph();
    let inputs = indices.iter().chain(data).copied();
    graph.op("DynamicStitch").attr("N", data.len()).inputs(inputs).out()
}

pub(crate) static DYNAMIC_PARTITION: Op = Op {
    def: OpDef {
        name: "DynamicPartition",
        signature: "(data:T, partitions:int32) -> (outputs:num_partitions*T) ; num_partitions:int>=1, T:type",
        shape: |ctx| {
            let (Some(dims), Some(partitions)) = (ctx.input(0).dims(), ctx.input(1).dims()) else {
                return kolo_graph::shape_fns::unknown(ctx);
            };
            let head = dims.get(..partitions.len()).map(PartialShape::new);
            if head.is_none_or(|head| head.merge(ctx.input(1)).is_err()) {
                return Err(not_a_prefix(ctx.input(0), ctx.input(1)));
            }
            let out: Vec<Dim> = std::iter::once(None).chain(dims[partitions.len()..].iter().copied()).collect();
            Ok(vec![PartialShape::new(&out); ctx.n_outputs()])
        },
        gradient: Gradient::Rule(partition_gradient),
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward_partition)],
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

pub(crate) static DYNAMIC_STITCH: Op = stitch("DynamicStitch");
pub(crate) static PARALLEL_DYNAMIC_STITCH: Op = stitch("ParallelDynamicStitch");

const STITCH_KERNELS: &[KernelDef] = &[cpu_any(forward_stitch)];

const fn stitch(name: &'static str) -> Op {
    Op {
        def: OpDef {
            name,
            signature: "(indices:N*int32, data:N*T) -> (merged:T) ; N:int>=1, T:type",
            shape: infer_stitch,
            gradient: Gradient::Rule(|op, dy| {
                let dy = first(dy)?;
                let n = op.n_inputs() / 2;
                let mut grads: Vec<Option<Grad<'_>>> = vec![None; n];
                grads.extend((0..n).map(|i| Some(op.graph().op("Gather").inputs([dy, op.input(i)]).out().into())));
                Ok(grads)
            }),
            ..OpDef::BASE
        },
        kernels: STITCH_KERNELS,
        gpu: Gpu::Missing,
        cost: Cost::Elements,
    }
}

fn not_a_prefix(data: &PartialShape, partitions: &PartialShape) -> Error {
    Error::invalid_argument(format!(
        "data.shape must start with partitions.shape, got data.shape = {data}, partitions.shape = {partitions}"
    ))
}

/// The numbers of the slices are dealt out as the slices were, and say where each gradient belongs.
fn partition_gradient<'g>(op: Operation<'g>, dy: &[Option<Output<'g>>]) -> Result<Vec<Option<Grad<'g>>>> {
    let graph = op.graph();
    let partitions = op.input(1);
    let n = graph.op("Size").input(partitions).out();
    let numbers = graph.op("Range").inputs([graph.constant(0i32), n, graph.constant(1i32)]).out();
    let numbers = reshape(numbers, graph.op("Shape").input(partitions).out());
    let places = dynamic_partition(numbers, partitions, dy.len());
    let arrived = dy.iter().enumerate().map(|(i, grad)| grad.unwrap_or_else(|| zeros_like(op.output(i))));
    let whole = graph.op("ParallelDynamicStitch").attr("N", dy.len()).inputs(places).inputs(arrived).out();
    Ok(vec![Some(shaped_as_input(op, whole).into()), None])
}

fn forward_partition(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (data, partitions) = (ctx.input(0)?, ctx.input(1)?);
    let (shape, head) = (data.shape(), partitions.shape());
    if shape.rank() < head.rank() || shape[..head.rank()] != head[..] {
        return Err(not_a_prefix(&shape.into(), &head.into()));
    }
    let n = ctx.outputs.len();
    let mut rows: Vec<Vec<usize>> = vec![Vec::new(); n];
    for (i, partition) in looking(integers(partitions)?).enumerate() {
        match index_below(partition, n) {
            Some(partition) => rows[partition].push(i),
            None => {
                return Err(Error::invalid_argument(format!(
                    "partitions{} = {partition} is not in [0, {n})",
                    place(head, i)
                )));
            }
        }
    }
    let tail = &shape[head.rank()..];
    let flat = data.clone().reshaped(Shape::new(&[&[head.n_elements()], tail].concat())?)?;
    let take = |rows: Vec<usize>| {
        let shape = Shape::new(&[&[rows.len()], tail].concat())?;
        pick_rows(ctx, &flat, &rows, shape)
    };
    let outputs = rows.into_iter().map(take).collect::<Result<Vec<Tensor>>>()?;
    for (i, output) in outputs.into_iter().enumerate() {
        ctx.set_output(i, output);
    }
    Ok(())
}

fn infer_stitch(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let n = ctx.n_inputs() / 2;
    let mut tail = PartialShape::unknown();
    let mut rows = Some(0);
    for i in 0..n {
        rows = match (rows, ctx.constant_integers(i)) {
            (Some(rows), Some(indices)) => {
                let most = indices.into_iter().max().unwrap_or(-1);
                usize::try_from(most.saturating_add(1)).ok().map(|n| n.max(rows))
            }
            _ => None,
        };
        if let (Some(indices), Some(dims)) = (ctx.input(i).rank(), ctx.input(n + i).dims()) {
            let rest = dims.get(indices..).ok_or_else(|| no_start(i, ctx.input(i), ctx.input(n + i)))?;
            PartialShape::new(&dims[..indices])
                .merge(ctx.input(i))
                .map_err(|_| no_start(i, ctx.input(i), ctx.input(n + i)))?;
            tail = tail.merge(&PartialShape::new(rest))?;
        }
    }
    Ok(vec![PartialShape::new(&[rows]).concat(&tail)])
}

fn no_start(i: usize, indices: &PartialShape, data: &PartialShape) -> Error {
    Error::invalid_argument(format!("data[{i}].shape = {data} does not start with indices[{i}].shape = {indices}"))
}

fn forward_stitch(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let n = ctx.n_inputs() / 2;
    let mut places = Vec::with_capacity(n);
    let mut tail: Option<&[usize]> = None;
    let mut n_rows = 0;
    for i in 0..n {
        let (indices, data) = (ctx.input(i)?, ctx.input(n + i)?);
        let (head, shape) = (indices.shape(), data.shape());
        if shape.rank() < head.rank() || shape[..head.rank()] != head[..] {
            return Err(no_start(i, &head.into(), &shape.into()));
        }
        let rest = &shape[head.rank()..];
        if tail.is_some_and(|tail| tail != rest) {
            return Err(Error::invalid_argument(format!(
                "Need data[0].shape[{}:] = data[{i}].shape[{}:], got data[0].shape = {}, data[{i}].shape = {shape}",
                ctx.input(0)?.shape().rank(),
                head.rank(),
                ctx.input(n)?.shape()
            )));
        }
        tail = Some(rest);
        let mut rows = Vec::with_capacity(head.n_elements());
        for (k, index) in integers(indices)?.into_iter().enumerate() {
            let row = index_below(index, i32::MAX as usize + 1)
                .ok_or_else(|| Error::invalid_argument(format!("indices[{k}] is out of range")))?;
            n_rows = n_rows.max(row + 1);
            rows.push(row);
        }
        places.push(rows);
    }
    let tail = tail.unwrap_or(&[]);
    let data = (n..2 * n).map(|i| ctx.input(i)).collect::<Result<Vec<&Tensor>>>()?;
    let shape = Shape::new(&[&[n_rows], tail].concat())?;
    let out = build(ctx, data[0].dtype(), shape, &data, Stitch { places, row_len: product(tail) })?;
    ctx.set_output(0, out);
    Ok(())
}

struct Stitch {
    places: Vec<Vec<usize>>,
    row_len: usize,
}

impl Job for Stitch {
    fn run<E: Item>(self, out: &mut [E], inputs: &[&[E]]) -> Result<()> {
        // Rows that nobody claims are zero, rather than whatever was in memory.
        out.fill(E::default());
        if self.row_len == 0 {
            return Ok(());
        }
        for (places, input) in self.places.iter().zip(inputs) {
            for (&row, input) in places.iter().zip(input.chunks_exact(self.row_len)) {
                out[row * self.row_len..(row + 1) * self.row_len].clone_from_slice(input);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn partition() {
        let case = |partitions: [i32; 4]| {
            check_op("DynamicPartition").input([10i32, 20, 30, 40]).input(partitions).attr("num_partitions", 2usize)
        };
        case([0, 0, 1, 0]).gives_all([Tensor::from([10i32, 20, 40]), Tensor::from([30i32])]);
        case([1; 4]).gives_all([tensor::<i32, 1>([0], []), Tensor::from([10i32, 20, 30, 40])]);
        case([0, 2, 0, 0]).fails("partitions[1] = 2 is not in [0, 2)");
        case([0, -1, 0, 0]).fails("partitions[1] = -1 is not in [0, 2)");
        let two = || check_op("DynamicPartition").input([[1.0f32, 2.0], [3.0, 4.0]]).attr("num_partitions", 2usize);
        two().input([1i32, 0]).gives_all([Tensor::from([[3.0f32, 4.0]]), Tensor::from([[1.0f32, 2.0]])]);
        two().input([[1i32, 0], [0, 0]]).gives_all([Tensor::from([2.0f32, 3.0, 4.0]), Tensor::from([1.0f32])]);
        two().input([1i32]).fails("data.shape must start with partitions.shape");
        let words = Tensor::from_strings([2], vec!["a".into(), "b".into()]).unwrap();
        let out = |word: &'static str| Tensor::from_strings([1], vec![word.into()]).unwrap();
        check_op("DynamicPartition")
            .input(words)
            .input([1i32, 0])
            .attr("num_partitions", 2usize)
            .gives_all([out("b"), out("a")]);
        check_op("DynamicPartition")
            .input(7i32)
            .input(1i32)
            .attr("num_partitions", 2usize)
            .gives_all([tensor::<i32, 1>([0], []), Tensor::from([7i32])]);
    }

    #[test]
    fn stitch() {
        for op in ["DynamicStitch", "ParallelDynamicStitch"] {
            let case = || check_op(op).attr("N", 2usize);
            case().input([0i32, 3]).input([1i32]).input([10i32, 30]).input([11i32]).gives([10i32, 11, 0, 30]);
            case()
                .input([0i32])
                .input(1i32)
                .input([[1.0f32, 2.0]])
                .input([3.0f32, 4.0])
                .gives([[1.0f32, 2.0], [3.0, 4.0]]);
            case().input([0i32]).input([0i32]).input([1i8]).input([2i8]).gives([2i8]);
            case().input([0i32]).input([-1i32]).input([1i8]).input([2i8]).fails("indices[0] is out of range");
            case().input([0i32]).input([1i32]).input([[1i8]]).input([2i8]).fails("[");
            check_op(op).attr("N", 1usize).input([0i32, 1]).input([1i8]).fails("does not start with indices[0].shape");
        }
    }

    #[test]
    fn gradients() {
        check_op("DynamicPartition")
            .input(wavy([4, 2], 0))
            .input([1i32, 0, 1, 1])
            .attr("num_partitions", 3usize)
            .gradient();
        check_op("DynamicPartition")
            .input(wavy([2, 2], 0))
            .input([[1i32, 0], [1, 1]])
            .attr("num_partitions", 2usize)
            .gradient();
        check_op("DynamicStitch")
            .attr("N", 2usize)
            .input([2i32, 0])
            .input([1i32])
            .input(wavy([2, 2], 0))
            .input(wavy([1, 2], 1))
            .gradient();
    }
}
