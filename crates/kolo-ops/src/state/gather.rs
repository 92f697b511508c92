//! `ResourceGather`: rows of a variable, without reading the whole of it. `ResourceGatherNd`: slices by coordinates.

use kolo_core::{DType, Error, PartialShape, Result, Shape, Tensor};
use kolo_device::cpu::pool;
use kolo_graph::{Effects, Grad, Gradient, IndexedSlices, InferCtx, OpDef, Operation, Output};

use super::handle::{read_resource, uninitialized};
use super::read::{value_shape, wrong_dtype};
use super::scatter::checked_indices;
use crate::array::gather::gpu;
use crate::array::gather_nd::{slices_shape, take_slices};
use crate::cuda::PLAIN;
use crate::op::{Gpu, Op, cpu_any, gpu_kernel};
use crate::{Cost, KernelCtx, Value};

/// Rows `indices` of the variable behind a handle. Its gradient is those rows alone.
#[track_caller]
pub fn resource_gather<'g>(handle: Output<'g>, indices: Output<'g>) -> Output<'g> {
    let dtype = handle.handle().map_or(DType::F32, |(dtype, _)| dtype);
    handle.graph().op("ResourceGather").input(handle).input(indices).attr("dtype", dtype).out()
}

pub(crate) static RESOURCE_GATHER: Op = Op {
    def: OpDef {
        name: "ResourceGather",
        signature: "(resource:resource, indices:Tindices) -> (output:dtype) ; batch_dims:int=0, validate_indices:bool=true, \
                    dtype:type, Tindices:type{int32,int64}",
        shape: output_shape,
        gradient: Gradient::Rule(gradient),
        stateful: true,
        effects: Effects::Reads,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(gather)],
    gpu: Gpu::Kernels(&[gpu_kernel("dtype", PLAIN, gather_on_gpu)]),
    cost: Cost::Elements,
};

pub(crate) static RESOURCE_GATHER_ND: Op = Op {
    def: OpDef {
        name: "ResourceGatherNd",
        signature: "(resource:resource, indices:Tindices) -> (output:dtype) ; dtype:type, Tindices:type{int32,int64}",
        shape: |ctx| {
            let params = value_shape(ctx, 0, ctx.attrs().dtype("dtype")?)?;
            let indices = ctx.input_of_rank_at_least(1, 1)?;
            Ok(vec![slices_shape(&params, indices)?])
        },
        gradient: Gradient::Rule(|op, dy| {
            let (graph, indices) = (op.graph(), op.input(1));
            let shape = graph.op("VariableShape").input(op.input(0)).attr("out_type", indices.dtype()).out();
            let sum = graph.op("ScatterNd").inputs([indices, crate::math::binary::first(dy)?, shape]).out();
            Ok(vec![Some(sum.into()), None])
        }),
        stateful: true,
        effects: Effects::Reads,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(gather_nd)],
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

fn gather_nd(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let params = read_resource(ctx, 0)?;
    let dtype = ctx.attrs().dtype("dtype")?;
    if params.dtype() != dtype {
        return Err(wrong_dtype("read", dtype, params.dtype()));
    }
    let out = take_slices(ctx, &params, ctx.input(1)?)?;
    ctx.set_output(0, out);
    Ok(())
}

/// `params[:batch] + indices[batch:] + params[batch + 1:]`.
fn output_shape(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let params = value_shape(ctx, 0, ctx.attrs().dtype("dtype")?)?;
    let (Some(params), Some(indices)) = (params.dims(), ctx.input(1).dims()) else {
        return Ok(vec![PartialShape::unknown()]);
    };
    let batch = batch_dims(ctx.attrs().int("batch_dims")?, params.len(), indices.len())?;
    let dims: Vec<_> = [&params[..batch], &indices[batch..], &params[batch + 1..]].concat();
    Ok(vec![PartialShape::new(&dims)])
}

/// The number of leading dimensions that variable and indices share.
fn batch_dims(attr: i64, params: usize, indices: usize) -> Result<usize> {
    let batch = if attr < 0 { attr.saturating_add(indices as i64) } else { attr };
    match usize::try_from(batch) {
        Ok(batch) if batch <= indices && batch < params => Ok(batch),
        Ok(_) if params == 0 => Err(Error::invalid_argument("params must be at least 1 dimensional")),
        _ => Err(Error::invalid_argument(format!(
            "batch_dims {attr} does not fit indices of rank {indices} and a variable of rank {params}"
        ))),
    }
}

/// The rows that were taken, as rows of the variable's gradient.
fn gradient<'g>(op: Operation<'g>, dy: &[Option<Output<'g>>]) -> Result<Vec<Option<Grad<'g>>>> {
    if op.attrs(|attrs| attrs.int("batch_dims"))? != 0 {
        return Err(Error::unimplemented("the gradient of ResourceGather with batch_dims"));
    }
    let graph = op.graph();
    let (handle, indices) = (op.input(0), op.input(1));
    let dy = crate::math::binary::first(dy)?;
    let dense_shape = graph.op("VariableShape").input(handle).out();
    let flat = graph.constant([-1i32]);
    // The number of rows is taken from the indices: it cannot be inferred if a row has no elements.
    let n_rows = graph.op("Reshape").input(graph.op("Size").input(indices).out()).input(flat).out();
    let known = handle.handle().and_then(|(_, shape)| shape.known());
    let row_shape = match known.as_deref().and_then(<[usize]>::split_first) {
        Some((_, row)) => graph.constant(Tensor::vector(row.iter().map(|&dim| dim as i32).collect::<Vec<_>>())),
        None => {
            let [zero, one] = [0i32, 1].map(|i| graph.constant([i]));
            graph.op("StridedSlice").inputs([dense_shape, one, zero, one]).attr("end_mask", 1i64).out()
        }
    };
    let shape = graph.op("ConcatV2").inputs([n_rows, row_shape, graph.constant(0i32)]).out();
    Ok(vec![
        Some(Grad::Slices(IndexedSlices {
            values: graph.op("Reshape").input(dy).input(shape).out(),
            indices: graph.op("Reshape").input(indices).input(flat).out(),
            dense_shape,
        })),
        None,
    ])
}

fn gather(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let params = read_resource(ctx, 0)?;
    let dtype = ctx.attrs().dtype("dtype")?;
    if params.dtype() != dtype {
        return Err(wrong_dtype("read", dtype, params.dtype()));
    }
    let indices = ctx.input(1)?;
    let (p, i) = (params.shape(), indices.shape());
    let batch = batch_dims(ctx.attrs().int("batch_dims")?, p.rank(), i.rank())?;
    if p[..batch] != i[..batch] {
        return Err(Error::invalid_argument(format!("the first {batch} sizes of {p} and {i} differ")));
    }
    let shape = Shape::new(&[&p[..batch], &i[batch..], &p[batch + 1..]].concat())?;
    let (n_rows, row) = (p[batch], p[batch + 1..].iter().product::<usize>());
    let positions = checked_indices(indices, n_rows)?;
    // Indices of one batch count from the first row of that batch.
    let per_batch = i[batch..].iter().product::<usize>().max(1);
    let start = |at: usize| (at / per_batch * n_rows + positions[at]) * row;
    if dtype == DType::Str {
        let strings = params.strings()?;
        let taken = (0..positions.len()).flat_map(|at| strings[start(at)..start(at) + row].iter().cloned()).collect();
        let output = ctx.string_tensor(shape, taken)?;
        ctx.set_output(0, output);
        return Ok(());
    }
    let size = dtype.size().ok_or_else(|| Error::unimplemented(format!("ResourceGather does not work on {dtype}")))?;
    let mut output = ctx.allocate(dtype, shape)?;
    let row_bytes = row * size;
    if row_bytes > 0 && !positions.is_empty() {
        let from = params.host_bytes()?;
        let rows_per_task = (pool::grain(0.1) / row_bytes).max(1);
        ctx.pool().for_each_chunk(output.host_bytes_mut()?, rows_per_task * row_bytes, |task, to| {
            for (k, to) in to.chunks_exact_mut(row_bytes).enumerate() {
                let begin = start(task * rows_per_task + k) * size;
                to.copy_from_slice(&from[begin..begin + row_bytes]);
            }
        });
    }
    ctx.set_output(0, output);
    Ok(())
}

fn gather_on_gpu(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let cell = ctx.variable(0)?;
    let value = cell.read().ok_or_else(|| uninitialized(ctx, 0, &cell))?;
    ctx.inputs[0] = Value::Tensor(value);
    let batch_dims = ctx.attrs().int("batch_dims")?;
    gpu::gather(ctx, batch_dims, batch_dims)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Evaluation, tensor};

    fn take(initial: Tensor, indices: Tensor, batch_dims: i64) -> Result<Tensor> {
        let g = crate::graph();
        let dtype = initial.dtype();
        let v = g.variable("v", initial);
        let fed = g.op("Placeholder").name("i").attr("dtype", indices.dtype()).out();
        let rows = g
            .op("ResourceGather")
            .input(v.handle())
            .input(fed)
            .attr("dtype", dtype)
            .attr("batch_dims", batch_dims)
            .out();
        g.check()?;
        let run = Evaluation::new(g.snapshot());
        run.run_targets(&[v.initializer()], &[])?;
        Ok(run.run(&[rows], &[(fed, indices)])?.remove(0))
    }

    #[test]
    fn rows_are_taken() {
        let v = || tensor([3, 2], [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0]);
        assert_eq!(take(v(), Tensor::from([2i32, 0]), 0), Ok(tensor([2, 2], [5.0f32, 6.0, 1.0, 2.0])));
        assert_eq!(take(v(), Tensor::scalar(1i64), 0), Ok(Tensor::from([3.0f32, 4.0])));
        assert_eq!(take(v(), tensor::<i32, 1>([0], []), 0), Ok(tensor::<f32, 2>([0, 2], [])));
        assert_eq!(take(v(), tensor([3, 1], [1i32, 0, 1]), 1), Ok(tensor([3, 1], [2.0f32, 3.0, 6.0])));
        assert_eq!(take(Tensor::from([true, false]), Tensor::from([1i32]), 0), Ok(Tensor::from([false])));
        let many: Vec<f64> = (0..5000).map(f64::from).collect();
        let back: Vec<i64> = (0..5000).rev().collect();
        let expected: Vec<f64> = many.iter().rev().copied().collect();
        assert_eq!(take(many.into(), back.into(), 0), Ok(expected.into()));
    }

    #[test]
    fn slices_are_taken_by_coordinates() {
        let g = crate::graph();
        let v = g.variable("v", tensor([2, 2], [1.0f32, 2.0, 3.0, 4.0]));
        let indices = g.constant([[1i32, 0], [0, 1], [1, 0]]);
        let y = g.op("ResourceGatherNd").input(v.handle()).input(indices).attr("dtype", DType::F32).out();
        assert_eq!(y.shape().known(), Some(Shape::from([3])));
        let grads = kolo_graph::gradients(&[y * 2.0], &[v.handle()]).unwrap();
        let dv = grads[0].unwrap().dense().unwrap();
        let run = Evaluation::new(g.snapshot());
        run.run_targets(&[v.initializer()], &[]).unwrap();
        let found = run.run(&[y, dv], &[]).unwrap();
        assert_eq!(found, [Tensor::from([3.0f32, 2.0, 3.0]), tensor([2, 2], [0.0f32, 2.0, 4.0, 0.0])]);
    }

    #[test]
    fn bad_indices_are_named() {
        let fails = |v: Tensor, indices: Tensor, batch_dims: i64, text: &str| {
            let error = take(v, indices, batch_dims).unwrap_err();
            assert!(error.to_string().contains(text), "{error}");
        };
        fails(Tensor::from([1.0f32]), Tensor::from([0i32, 1]), 0, "indices[1] = 1 is not in [0, 1)");
        fails(Tensor::scalar(1.0f32), Tensor::from([0i32]), 0, "at least 1 dimensional");
        fails(Tensor::from([1.0f32]), Tensor::from([0i32]), 1, "batch_dims 1 does not fit");
    }

    #[test]
    fn the_gradient_is_the_rows_alone() {
        let g = crate::graph();
        let v = g.variable("v", tensor([3, 2], [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0]));
        let y = resource_gather(v.handle(), g.constant([2i32, 0, 2]));
        let grads = kolo_graph::gradients(&[y * 2.0], &[v.handle()]).unwrap();
        let Some(Grad::Slices(slices)) = grads[0] else { panic!("expected rows") };
        let run = Evaluation::new(g.snapshot());
        run.run_targets(&[v.initializer()], &[]).unwrap();
        let found = run.run(&[slices.indices, slices.values, slices.dense_shape], &[]).unwrap();
        assert_eq!(found, [Tensor::from([2i32, 0, 2]), tensor([3, 2], [2.0f32; 6]), Tensor::from([3i32, 2])]);
    }
}
