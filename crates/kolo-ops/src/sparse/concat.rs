//! `SparseConcat`: sparse tensors side by side. `SparseSplit`: one taken apart into almost equal parts. `SparseSlice`: a part of one, and
//! its gradient `SparseSliceGrad`.

use half::{bf16, f16};
use kolo_core::{Error, PartialShape, Result, Shape, Tensor};
use kolo_device::cpu::looking;
use kolo_graph::shape_fns::resolve_axis;
use kolo_graph::{Gradient, OpDef, Output};

use super::reorder::sizes;
use crate::array::concat::join_vectors;
use crate::array::gather::pick_rows;
use crate::math::number::Number;
use crate::op::{Gpu, Op, cpu_any, cpu_kernels};
use crate::{Cost, KernelCtx};

/// The part of a sparse tensor from coordinates `start` on, of at most `size` places along each dimension: coordinates, values and shape.
#[track_caller]
pub fn sparse_slice<'g>(
    [indices, values, shape]: [Output<'g>; 3],
    start: Output<'g>,
    size: Output<'g>,
) -> [Output<'g>; 3] {
    let op = indices.graph().op("SparseSlice").inputs([indices, values, shape, start, size]).build();
    [0, 1, 2].map(|i| op.output(i))
}

pub(crate) static SPARSE_CONCAT: Op = Op {
    def: OpDef {
        name: "SparseConcat",
        signature: "(indices:N*int64, values:N*T, shapes:N*int64) -> (output_indices:int64, output_values:T, \
                    output_shape:int64) ; concat_dim:int, N:int>=2, T:type",
        shape: |ctx| {
            let n = ctx.n_inputs() / 3;
            let mut depth = PartialShape::new(&[None]);
            for i in 0..n {
                depth = depth.merge(&PartialShape::new(&[ctx.input_of_rank(i, 2)?.dim(1)]))?;
                depth = depth.merge(&ctx.input_of_rank(2 * n + i, 1)?)?;
            }
            Ok(vec![PartialShape::new(&[None, depth.dim(0)]), PartialShape::new(&[None]), depth])
        },
        gradient: Gradient::None("TensorFlow lets none pass"),
        ..OpDef::BASE
    },
    kernels: &[cpu_any(concat)],
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

pub(crate) static SPARSE_SPLIT: Op = Op {
    def: OpDef {
        name: "SparseSplit",
        signature: "(split_dim:int64, indices:int64, values:T, shape:int64) -> (output_indices:num_split*int64, \
                    output_values:num_split*T, output_shape:num_split*int64) ; num_split:int>=1, T:type",
        shape: |ctx| {
            let (n, depth) = (ctx.n_outputs() / 3, ctx.input_of_rank(3, 1)?);
            let rows = PartialShape::new(&[None, depth.dim(0)]);
            Ok([vec![rows; n], vec![PartialShape::new(&[None]); n], vec![depth; n]].concat())
        },
        gradient: Gradient::Refused("TensorFlow has none for it"),
        ..OpDef::BASE
    },
    kernels: &[cpu_any(split)],
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

pub(crate) static SPARSE_SLICE: Op = Op {
    def: OpDef {
        name: "SparseSlice",
        signature: "(indices:int64, values:T, shape:int64, start:int64, size:int64) -> (output_indices:int64, \
                    output_values:T, output_shape:int64) ; T:type",
        shape: |ctx| {
            let depth = ctx.input_of_rank(2, 1)?.merge(&ctx.input_of_rank(3, 1)?)?.merge(&ctx.input_of_rank(4, 1)?)?;
            Ok(vec![PartialShape::new(&[None, depth.dim(0)]), PartialShape::new(&[None]), depth])
        },
        gradient: Gradient::Rule(|op, dy| {
            let Some(dy) = dy[1] else { return Ok(vec![None; 5]) };
            let inputs = [dy, op.input(0), op.input(3), op.output(0)];
            let dx = op.graph().op("SparseSliceGrad").inputs(inputs).out();
            Ok(vec![None, Some(dx.into()), None, None, None])
        }),
        ..OpDef::BASE
    },
    kernels: &[cpu_any(slice)],
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

pub(crate) static SPARSE_SLICE_GRAD: Op = Op {
    def: OpDef {
        name: "SparseSliceGrad",
        signature: "(backprop_val_grad:T, input_indices:int64, input_start:int64, output_indices:int64) -> (val_grad:T) \
                    ; T:type{num}",
        shape: |ctx| {
            ctx.input_of_rank(0, 1)?;
            Ok(vec![PartialShape::new(&[ctx.input_of_rank(1, 2)?.dim(0)])])
        },
        gradient: Gradient::Refused("the gradient of a gradient is not implemented here"),
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(slice_grad: f32, f64, f16, bf16, i8, i16, i32, i64, u8, u16, u32, u64),
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

fn concat(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let n = ctx.n_inputs() / 3;
    let mut dims: Vec<i64> = ctx.input(2 * n)?.data::<i64>()?.to_vec();
    let depth = dims.len();
    let axis = resolve_axis(ctx.attrs().int("concat_dim")?, depth)?;
    let mut rows: Vec<i64> = Vec::new();
    let mut values = Vec::with_capacity(n);
    let mut offset = 0i64;
    for i in 0..n {
        let (indices, value, shape) = (ctx.input(i)?, ctx.input(n + i)?, ctx.input(2 * n + i)?);
        let (_, found) = sizes(indices, value, shape)?;
        let shape = shape.data::<i64>()?;
        if found != depth {
            return Err(Error::invalid_argument(format!(
                "Ranks of all input tensors must match: expected {depth} but got {found} at position {i}"
            )));
        }
        if let Some(at) = (0..depth).find(|&at| at != axis && shape[at] != dims[at]) {
            return Err(Error::invalid_argument(format!(
                "Input shapes must match: expected {} for dimension {at} but got {} at position {i}",
                dims[at], shape[at]
            )));
        }
        let begin = rows.len();
        rows.extend_from_slice(indices.data::<i64>()?);
        for row in looking(rows[begin..].chunks_exact_mut(depth.max(1))) {
            row[axis] = row[axis].wrapping_add(offset);
        }
        values.push(value);
        offset = offset
            .checked_add(shape[axis])
            .filter(|_| shape[axis] >= 0)
            .ok_or_else(|| Error::invalid_argument(format!("dimension {axis} of the output is too large")))?;
    }
    dims[axis] = offset;
    let values = join_vectors(ctx, values[0].dtype(), &values)?;
    let row = |i: usize| &rows[i * depth..(i + 1) * depth];
    let mut order: Vec<usize> = (0..values.n_elements()).collect();
    order.sort_by(|&a, &b| row(a).cmp(row(b)));
    let sorted: Vec<i64> = order.iter().flat_map(|&i| row(i).iter().copied()).collect();
    let (n, indices) = (order.len(), Tensor::from_vec([order.len(), depth], sorted)?);
    let values = pick_rows(ctx, &values, &order, Shape::new(&[n])?)?;
    ctx.set_output(0, indices);
    ctx.set_output(1, values);
    ctx.set_output(2, Tensor::from(dims));
    Ok(())
}

/// The elements of the sparse tensor in inputs `at` and after whose coordinates are in these ranges, counted from their beginnings.
fn part(ctx: &KernelCtx<'_>, at: usize, ranges: &[std::ops::Range<i64>]) -> Result<[Tensor; 2]> {
    let (indices, values) = (ctx.input(at)?, ctx.input(at + 1)?);
    let depth = ranges.len();
    let (mut rows, mut picks) = (Vec::new(), Vec::new());
    for (i, row) in looking(indices.data::<i64>()?.chunks_exact(depth.max(1)).enumerate()) {
        if row.iter().zip(ranges).all(|(at, range)| range.contains(at)) {
            rows.extend(row.iter().zip(ranges).map(|(at, range)| at - range.start));
            picks.push(i);
        }
    }
    let n = picks.len();
    let values = pick_rows(ctx, values, &picks, Shape::new(&[n])?)?;
    Ok([Tensor::from_vec([n, depth], rows)?, values])
}

fn split(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let axis = ctx.input(0)?;
    if axis.n_elements() != 1 {
        return Err(Error::invalid_argument(format!(
            "Input split_dim should be a scalar but received shape {}",
            axis.shape()
        )));
    }
    let axis = axis.data::<i64>()?[0];
    sizes(ctx.input(1)?, ctx.input(2)?, ctx.input(3)?)?;
    let dims = ctx.input(3)?.data::<i64>()?.to_vec();
    let n = ctx.node.outputs.len() / 3;
    let Some(at) = usize::try_from(axis).ok().filter(|&at| at < dims.len()) else {
        return Err(Error::invalid_argument(format!(
            "Input split_dim should be between 0 and rank ({}), got {axis}",
            dims.len()
        )));
    };
    let (size, n_parts) = (dims[at], n as i64);
    if n_parts > size {
        return Err(Error::invalid_argument(format!(
            "Input num_split should be between 1 and the splitting dimension size ({size}), got {n}"
        )));
    }
    let mut begin = 0;
    for i in 0..n {
        // The first parts are one larger where it does not divide evenly.
        let len = size / n_parts + i64::from((i as i64) < size % n_parts);
        let mut ranges: Vec<_> = dims.iter().map(|&dim| 0..dim).collect();
        ranges[at] = begin..begin + len;
        let [indices, values] = part(ctx, 1, &ranges)?;
        let mut shape = dims.clone();
        shape[at] = len;
        begin += len;
        ctx.set_output(i, indices);
        ctx.set_output(n + i, values);
        ctx.set_output(2 * n + i, Tensor::from(shape));
    }
    Ok(())
}

fn slice(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (_, depth) = sizes(ctx.input(0)?, ctx.input(1)?, ctx.input(2)?)?;
    let dims = ctx.input(2)?.data::<i64>()?;
    for (name, i) in [("start", 3), ("size", 4)] {
        let found = ctx.input(i)?.shape();
        if found.dims() != [depth] {
            return Err(Error::invalid_argument(format!(
                "Expected {name} to be a vector of length {depth} but got shape {found}"
            )));
        }
    }
    let (start, size) = (ctx.input(3)?.data::<i64>()?, ctx.input(4)?.data::<i64>()?);
    let mut ranges = Vec::with_capacity(depth);
    for d in 0..depth {
        if start[d] < 0 || size[d] < 0 {
            return Err(Error::invalid_argument(format!(
                "start and size must be non-negative, found {} and {} for dimension {d}",
                start[d], size[d]
            )));
        }
        let room = dims[d].saturating_sub(start[d]).clamp(0, size[d]);
        ranges.push(start[d]..start[d].saturating_add(room));
    }
    let shape: Vec<i64> = ranges.iter().map(|range| range.end - range.start).collect();
    let [indices, values] = part(ctx, 0, &ranges)?;
    ctx.set_output(0, indices);
    ctx.set_output(1, values);
    ctx.set_output(2, Tensor::from(shape));
    Ok(())
}

fn slice_grad<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (dy, indices, start, kept) = (ctx.input(0)?, ctx.input(1)?, ctx.input(2)?, ctx.input(3)?);
    let (&[n, depth], &[n_kept, other]) = (indices.shape().dims(), kept.shape().dims()) else {
        return Err(Error::invalid_argument("Input and output indices should be matrices"));
    };
    if depth != other || start.shape().dims() != [depth] {
        return Err(Error::invalid_argument(format!(
            "The input and output should have the same ndims: got: {depth} and {other}, and start of shape {}",
            start.shape()
        )));
    }
    if dy.shape().dims() != [n_kept] {
        return Err(Error::invalid_argument(format!(
            "# elements in backprop_val_grad and # rows in output_indices should match (#nnz of sum): got {} and {n_kept}",
            dy.n_elements()
        )));
    }
    let mut out = ctx.allocate_zeroed(T::DTYPE, Shape::new(&[n])?)?;
    let (from, start, kept) = (indices.data::<i64>()?, start.data::<i64>()?, kept.data::<i64>()?);
    let mut next = 0;
    for (i, y) in looking(out.data_mut::<T>()?.iter_mut().enumerate()) {
        if next == n_kept {
            break;
        }
        let (row, other) = (&from[i * depth..(i + 1) * depth], &kept[next * depth..(next + 1) * depth]);
        if row.iter().zip(start).zip(other).all(|((&at, &start), &kept)| at.wrapping_sub(start) == kept) {
            *y = dy.data::<T>()?[next];
            next += 1;
        }
    }
    if next < n_kept {
        return Err(Error::invalid_argument("Elements of backprop_val_grad aren't all propagated."));
    }
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn parts_become_a_whole() {
        let case = |axis: i64| {
            let test = check_op("SparseConcat").attr("concat_dim", axis).attr("N", 2i64);
            let test = test.input([[0i64, 1], [1, 0]]).input([[0i64, 0], [1, 2]]);
            test.input([1i32, 2]).input([3i32, 4]).input([2i64, 3])
        };
        case(1).input([2i64, 3]).gives_all([
            Tensor::from([[0i64, 1], [0, 3], [1, 0], [1, 5]]),
            Tensor::from([1i32, 3, 2, 4]),
            Tensor::from([2i64, 6]),
        ]);
        case(-2).input([4i64, 3]).gives_all([
            Tensor::from([[0i64, 1], [1, 0], [2, 0], [3, 2]]),
            Tensor::from([1i32, 2, 3, 4]),
            Tensor::from([6i64, 3]),
        ]);
        case(1).input([4i64, 3]).fails("Input shapes must match: expected 2 for dimension 0 but got 4 at position 1");
        case(2).input([2i64, 3]).fails("axis 2");
    }

    #[test]
    fn a_whole_becomes_parts() {
        let case = |axis: i64, n: i64| {
            let test = check_op("SparseSplit").attr("num_split", n).input(axis);
            test.input([[0i64, 0], [0, 3], [1, 4]]).input([1i32, 2, 3]).input([2i64, 5])
        };
        case(1, 2).gives_all([
            tensor([1, 2], [0i64, 0]),
            Tensor::from([[0i64, 0], [1, 1]]),
            Tensor::from([1i32]),
            Tensor::from([2i32, 3]),
            Tensor::from([2i64, 3]),
            Tensor::from([2i64, 2]),
        ]);
        case(1, 6).fails("dimension size (5), got 6");
        case(2, 1).fails("between 0 and rank (2), got 2");
        let slice = |start: [i64; 2], size: [i64; 2]| {
            let test = check_op("SparseSlice").input([[0i64, 0], [0, 3], [1, 4]]).input([1i32, 2, 3]).input([2i64, 5]);
            test.input(start).input(size)
        };
        slice([0, 1], [1, 9]).gives_all([tensor([1, 2], [0i64, 2]), Tensor::from([2i32]), Tensor::from([1i64, 4])]);
        slice([7, 0], [1, 1]).gives_all([
            tensor::<i64, 2>([0, 2], []),
            tensor::<i32, 1>([0], []),
            Tensor::from([0i64, 1]),
        ]);
        slice([-1, 0], [1, 1]).fails("non-negative");
    }

    #[test]
    fn gradients() {
        let slice = check_op("SparseSlice").input([[0i64, 0], [0, 3], [1, 4]]).input(wavy([3], 0)).input([2i64, 5]);
        slice.input([0i64, 1]).input([2i64, 3]).gradient();
    }
}
