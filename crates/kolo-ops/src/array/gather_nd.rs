//! `GatherNd`: slices picked by coordinates. `ScatterNd`: slices put, and where they meet summed, at coordinates.

use half::{bf16, f16};
use kolo_core::{DType, Dim, Error, PartialShape, Result, Shape, Tensor};
use kolo_device::cpu::{looking, looking_by};
use kolo_device::cuda::{Args, Grid, ProgramKey};
use kolo_graph::{Gradient, HalfSafety, HostRule, InferCtx, OpDef, Output};

use super::cast::cast;
use super::elements::{IntoInts, Plus, index_below, integers, product};
use super::gather::{pick_rows, place};
use crate::cuda::scatter::{Join, Places, RANK, combine, coordinates};
use crate::cuda::view::bytes_type;
use crate::cuda::{NUMBERS, PLAIN, c_type, gpu, zeros};
use crate::math::binary::first;
use crate::memory::Scratch;
use crate::op::{Gpu, Op, cpu_any, cpu_kernels, gpu_kernel};
use crate::{Cost, KernelCtx};

/// The elements or slices of `params` at the coordinates in the last dimension of `indices`.
#[track_caller]
pub fn gather_nd<'g>(params: Output<'g>, indices: Output<'g>) -> Output<'g> {
    params.graph().op("GatherNd").inputs([params, indices]).out()
}

/// Zeros of `shape` with `updates` added at the coordinates in the last dimension of `indices`.
#[track_caller]
pub fn scatter_nd<'g>(indices: Output<'g>, updates: Output<'g>, shape: impl IntoInts<'g>) -> Output<'g> {
    let graph = updates.graph();
    graph.op("ScatterNd").inputs([indices, updates, cast(shape.into_ints(graph), indices.dtype())]).out()
}

pub(crate) static GATHER_ND: Op = Op {
    def: OpDef {
        name: "GatherNd",
        signature: "(params:Tparams, indices:Tindices) -> (output:Tparams) ; Tparams:type, \
                    Tindices:type{int16,int32,int64}",
        shape: |ctx| {
            let indices = ctx.input_of_rank_at_least(1, 1)?;
            Ok(vec![slices_shape(ctx.input(0), indices)?])
        },
        gradient: Gradient::Rule(|op, dy| {
            let graph = op.graph();
            let indices = op.input(1);
            // Shapes have no int16 form.
            let indices = if indices.dtype() == DType::I16 { cast(indices, DType::I32) } else { indices };
            let shape = graph.op("Shape").input(op.input(0)).attr("out_type", indices.dtype()).out();
            Ok(vec![Some(graph.op("ScatterNd").inputs([indices, first(dy)?, shape]).out().into()), None])
        }),
        half: HalfSafety::Neutral,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward_gather)],
    gpu: Gpu::Kernels(&[gpu_kernel("Tparams", PLAIN, gather_on_gpu)]),
    cost: Cost::Elements,
};

pub(crate) static SCATTER_ND: Op = Op {
    def: OpDef {
        name: "ScatterNd",
        signature: "(indices:Tindices, updates:T, shape:Tindices) -> (output:T) ; T:type, \
                    Tindices:type{int16,int32,int64}",
        shape: infer_scatter,
        gradient: Gradient::Rule(|op, dy| Ok(vec![None, Some(gather_nd(first(dy)?, op.input(0)).into()), None])),
        host: HostRule::SmallIntegers,
        host_args: &["shape"],
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(forward_scatter: f32, f64, i32, i64, u64, bool; f16, bf16, i8, i16, u8, u16, u32),
    gpu: Gpu::Kernels(&[gpu_kernel("T", NUMBERS, scatter_on_gpu)]),
    cost: Cost::Elements,
};

fn check_depth(depth: usize, rank: usize) -> Result<()> {
    if depth <= rank {
        return Ok(());
    }
    Err(Error::invalid_argument(format!(
        "index innermost dimension length must be <= params rank; saw: {depth} vs. {rank}"
    )))
}

/// The shape of slices of `params`, or of updates to it, at the coordinates in `indices`, which are at least a vector.
pub(crate) fn slices_shape(params: &PartialShape, indices: &PartialShape) -> Result<PartialShape> {
    let (Some(dims), Some([picked @ .., Some(depth)])) = (params.dims(), indices.dims()) else {
        return Ok(PartialShape::unknown());
    };
    check_depth(*depth, dims.len())?;
    let out: Vec<Dim> = picked.iter().chain(&dims[*depth..]).copied().collect();
    Ok(PartialShape::new(&out))
}

fn infer_scatter(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    ctx.input_of_rank(2, 1)?;
    let indices = ctx.input_of_rank_at_least(0, 1)?;
    let shape = match ctx.constant(2) {
        Some(shape) => Shape::from_signed(&integers(shape)?)?.into(),
        None => ctx.constant_as_shape(2),
    };
    ctx.input(1).merge(&slices_shape(&shape, indices)?)?;
    Ok(vec![shape])
}

/// The rows of a tensor of `shape` that coordinates name, as numbers counted over the first `depth` dimensions.
pub(crate) fn rows(
    ctx: &KernelCtx<'_>,
    indices: &Tensor,
    shape: &Shape,
    what: &str,
) -> Result<(usize, Scratch<usize>)> {
    let Some((&depth, outer)) = indices.shape().split_last() else {
        return Err(Error::invalid_argument("indices must be at least a vector"));
    };
    check_depth(depth, shape.rank())?;
    let outer = Shape::new(outer)?;
    let values = integers(indices)?;
    let n = outer.n_elements();
    // Coordinates in no dimensions take no memory, however many there are.
    let mut rows = ctx.scratch(n, 0usize, "rows")?;
    for (i, to) in looking(rows.iter_mut().enumerate()) {
        let coordinates = &values[i * depth..(i + 1) * depth];
        let row = coordinates.iter().zip(shape.iter()).try_fold(0usize, |row, (&coordinate, &dim)| {
            index_below(coordinate, dim).map(|coordinate| row * dim + coordinate)
        });
        *to = row.ok_or_else(|| {
            let coordinates: Vec<String> = coordinates.iter().map(i64::to_string).collect();
            Error::invalid_argument(format!(
                "indices{} = [{}] does not index into {what} {shape}",
                place(&outer, i),
                coordinates.join(", ")
            ))
        })?;
    }
    Ok((depth, rows))
}

fn forward_gather(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let out = take_slices(ctx, ctx.input(0)?, ctx.input(1)?)?;
    ctx.set_output(0, out);
    Ok(())
}

/// The slices of `params` at coordinates.
pub(crate) fn take_slices(ctx: &KernelCtx<'_>, params: &Tensor, indices: &Tensor) -> Result<Tensor> {
    let shape = params.shape();
    let (depth, rows) = rows(ctx, indices, shape, "param shape")?;
    let picked = &indices.shape()[..indices.shape().rank() - 1];
    let dims = [picked, &shape[depth..]].concat();
    // The first `depth` dimensions count as one.
    let flat = [&[product(&shape[..depth])], &shape[depth..]].concat();
    let flat = params.clone().reshaped(Shape::new(&flat)?)?;
    pick_rows(ctx, &flat, &rows, Shape::new(&dims)?)
}

fn forward_scatter<T: Plus>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (indices, updates) = (ctx.input(0)?, ctx.input(1)?);
    let shape = Shape::from_signed(&integers(ctx.input(2)?)?)?;
    let (depth, rows) = rows(ctx, indices, &shape, "shape")?;
    let expected = [&indices.shape()[..indices.shape().rank() - 1], &shape[depth..]].concat();
    if updates.shape().dims() != expected {
        return Err(Error::invalid_argument(format!(
            "Must have updates.shape = indices.shape[:-1] + shape[{depth}:], got updates.shape: {}, indices.shape: {}, \
             shape: {shape}",
            updates.shape(),
            indices.shape()
        )));
    }
    let row_len = product(&shape[depth..]);
    let mut out = ctx.allocate_zeroed(T::DTYPE, shape)?;
    let (sums, updates) = (out.data_mut::<T>()?, updates.data::<T>()?);
    if row_len > 0 {
        let updates = rows.iter().zip(updates.chunks_exact(row_len));
        for (&row, update) in looking_by(row_len * size_of::<T>(), updates) {
            for (sum, &x) in sums[row * row_len..(row + 1) * row_len].iter_mut().zip(update) {
                *sum = sum.plus(x);
            }
        }
    }
    ctx.set_output(0, out);
    Ok(())
}

fn gather_on_gpu(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (params, indices) = (ctx.input(0)?, ctx.input(1)?);
    let Some((&depth, picked)) = indices.shape().split_last() else {
        return Err(Error::invalid_argument("indices must be at least a vector"));
    };
    let (dims, steps) = coordinates(params.shape(), depth)?;
    let inner = product(&params.shape()[depth..]);
    let shape = Shape::new(&[picked, &params.shape()[depth..]].concat())?;
    let (dtype, index, device) = (params.dtype(), indices.dtype(), gpu(ctx)?);
    let mut out = ctx.allocate(dtype, shape)?;
    let n = out.n_elements();
    if n > 0 {
        let key = ProgramKey { family: "gather", op: "nd", dtypes: [Some(index), Some(dtype), None], variant: 0 };
        let kernel = device.function(&key, || source(dtype, index))?;
        let args = Args::new()
            .input(ctx.input(0)?)
            .input(ctx.input(1)?)
            .output(&mut out)
            .size(n)
            .size(inner)
            .size(depth)
            .sizes(&dims, RANK)
            .sizes(&steps, RANK);
        device.launch(kernel, Grid::over(n), &args)?;
    }
    ctx.set_output(0, out);
    Ok(())
}

fn source(dtype: DType, index: DType) -> String {
    let (element, index) = (bytes_type(dtype.size().unwrap_or(8)), c_type(index));
    format!("typedef {element} E;\ntypedef {index} I;\n{}", include_str!("gather_nd.cu"))
}

fn scatter_on_gpu(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (indices, updates) = (ctx.input(0)?, ctx.input(1)?);
    let shape = Shape::from_signed(&integers(ctx.input(2)?)?)?;
    let Some((&depth, picked)) = indices.shape().split_last() else {
        return Err(Error::invalid_argument("indices must be at least a vector"));
    };
    let (dims, steps) = coordinates(&shape, depth)?;
    let expected = [picked, &shape[depth..]].concat();
    if updates.shape().dims() != expected {
        return Err(Error::invalid_argument(format!(
            "Must have updates.shape = indices.shape[:-1] + shape[{depth}:], got updates.shape: {}, indices.shape: {}, \
             shape: {shape}",
            updates.shape(),
            indices.shape()
        )));
    }
    let inner = product(&shape[depth..]);
    let mut out = zeros(ctx, updates.dtype(), shape)?;
    let places = Places { indices, n: product(picked), inner, depth, dims, steps, single: false };
    combine(gpu(ctx)?, &mut out, &places, updates, Join::Add)?;
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn gather_nd() {
        let grid = || Tensor::from([[1.0f32, 2.0], [3.0, 4.0]]);
        check_op("GatherNd").input(grid()).input([[0i32, 1], [1, 0]]).gives([2.0f32, 3.0]);
        check_op("GatherNd").input(grid()).input([[1i64], [1]]).gives([[3.0f32, 4.0], [3.0, 4.0]]);
        check_op("GatherNd").input(grid()).input([1i16, 1]).gives(4.0f32);
        check_op("GatherNd")
            .input(grid())
            .input(tensor::<i32, 2>([2, 0], []))
            .gives(tensor([2, 2, 2], [1.0f32, 2.0, 3.0, 4.0, 1.0, 2.0, 3.0, 4.0]));
        let words = Tensor::from_strings([2], vec!["a".into(), "b".into()]).unwrap();
        check_op("GatherNd").input(words).input([1i32]).gives("b");
        check_op("GatherNd")
            .input(grid())
            .input([[0i32, 0], [0, 2]])
            .fails("indices[1] = [0, 2] does not index into param shape [2,2]");
        check_op("GatherNd").input(grid()).input([-1i32]).fails("indices = [-1] does not index into param shape [2,2]");
        check_op("GatherNd")
            .input(grid())
            .input([0i32, 0, 0])
            .fails("index innermost dimension length must be <= params rank");
    }

    #[test]
    fn scatter_nd() {
        check_op("ScatterNd")
            .input([[4i32], [3], [1], [4]])
            .input([9i32, 10, 11, 12])
            .input([6i32])
            .gives([0i32, 11, 0, 10, 21, 0]);
        check_op("ScatterNd")
            .input([[1i64], [1]])
            .input([[1.0f32, 2.0], [3.0, 4.0]])
            .input([2i64, 2])
            .gives([[0.0f32, 0.0], [4.0, 6.0]]);
        check_op("ScatterNd").input([[1i16]]).input([true]).input([2i16]).gives([false, true]);
        check_op("ScatterNd")
            .input(tensor::<i32, 2>([0, 1], []))
            .input(tensor::<f32, 1>([0], []))
            .input([2i32])
            .gives([0.0f32, 0.0]);
        check_op("ScatterNd")
            .input([[5i32]])
            .input([1.0f32])
            .input([3i32])
            .fails("indices[0] = [5] does not index into shape [3]");
        check_op("ScatterNd").input([[0i32]]).input([1.0f32]).input([-3i32]).fails("negative size");
        check_op("ScatterNd").input([[0i32]]).input([1.0f32, 2.0]).input([3i32]).fails("[2]");
    }

    #[test]
    fn gradients() {
        check_op("GatherNd").input(wavy([2, 3], 0)).input([[0i32, 1], [0, 1], [1, 2]]).gradient();
        check_op("GatherNd").input(wavy([2, 3], 0)).input([[1i16], [1]]).gradient();
        check_op("ScatterNd").input([[2i32], [0], [2]]).input(wavy([3, 2], 0)).input([3i32, 2]).gradient();
    }

    #[test]
    fn sources_compile() {
        let all = [DType::F32, DType::F64, DType::F16, DType::U8].map(|dtype| {
            let key = ProgramKey { family: "gather", op: "nd", dtypes: [Some(dtype), None, None], variant: 0 };
            (key, source(dtype, DType::I64))
        });
        crate::cuda::tests::compiles(all);
    }
}
