//! Sparse tensors as single values: stacking them into one with a dimension more, and taking such a one apart.

use kolo_core::{DType, Error, Result, Shape, Tensor};
use kolo_device::cpu::looking;

use super::reorder::sizes;
use crate::KernelCtx;
use crate::array::concat::join_vectors;
use crate::array::gather::pick_rows;

/// Coordinates, values and shape.
pub(super) type Triple = [Tensor; 3];

/// The sparse tensor in inputs `i` and after.
pub(super) fn input(ctx: &KernelCtx<'_>, i: usize) -> Result<Triple> {
    let triple = [ctx.input(i)?.clone(), ctx.input(i + 1)?.clone(), ctx.input(i + 2)?.clone()];
    sizes(&triple[0], &triple[1], &triple[2])?;
    Ok(triple)
}

/// One sparse tensor for each index of the first dimension, which must ascend.
pub(super) fn take_apart(ctx: &KernelCtx<'_>, [indices, values, shape]: &Triple) -> Result<Vec<Triple>> {
    let (n, depth) = sizes(indices, values, shape)?;
    let dims = shape.data::<i64>()?;
    if depth < 2 {
        return Err(Error::invalid_argument(format!(
            "Rank of input SparseTensor should be > 1, but saw rank: {depth}"
        )));
    }
    let n_parts = usize::try_from(dims[0])
        .map_err(|_| Error::invalid_argument(format!("the first size of a sparse tensor is negative: {}", dims[0])))?;
    let rows = indices.data::<i64>()?;
    let first = |i: usize| rows[i * depth];
    for i in looking(0..n) {
        if first(i) < 0 || first(i) >= dims[0] {
            return Err(Error::invalid_argument(format!(
                "Received unexpected column 0 value in input SparseTensor: {} not in [0, {})",
                first(i),
                dims[0]
            )));
        }
        if i > 0 && first(i) < first(i - 1) {
            return Err(Error::invalid_argument(format!("indices[{i}] is out of order in the first dimension")));
        }
    }
    let rest = Tensor::from(dims[1..].to_vec());
    // One for each row of the shape, however few elements there are.
    let mut parts = ctx.list(n_parts, "sparse tensors")?;
    let mut at = 0;
    for part in looking(0..n_parts) {
        let begin = at;
        while at < n && first(at) == part as i64 {
            at += 1;
        }
        let mut indices = ctx.allocate(DType::I64, Shape::new(&[at - begin, depth - 1])?)?;
        for (to, i) in indices.data_mut::<i64>()?.chunks_exact_mut(depth - 1).zip(begin..) {
            to.copy_from_slice(&rows[i * depth + 1..(i + 1) * depth]);
        }
        let values = pick_rows(ctx, values, &(begin..at).collect::<Vec<usize>>(), Shape::new(&[at - begin])?)?;
        parts.push([indices, values, rest.clone()]);
    }
    Ok(parts)
}

/// One sparse tensor of all of these, which differ in the new first dimensions `outer`; as large as the largest in each of the others.
pub(super) fn stack(ctx: &KernelCtx<'_>, dtype: DType, outer: &[usize], parts: &[Triple]) -> Result<Triple> {
    let depth = parts.first().map_or(0, |part| part[2].n_elements());
    let mut dims = vec![0i64; depth];
    let mut total = 0usize;
    for (i, [indices, values, shape]) in parts.iter().enumerate() {
        let (n, found) = sizes(indices, values, shape)?;
        if found != depth {
            return Err(Error::invalid_argument(format!(
                "Inconsistent rank across SparseTensors: rank prior to SparseTensor[{i}] was: {depth} but rank of \
                 SparseTensor[{i}] is: {found}"
            )));
        }
        if values.dtype() != dtype {
            return Err(Error::invalid_argument(format!(
                "Requested SparseTensor of type {dtype} but SparseTensor[{i}].values.dtype() == {}",
                values.dtype()
            )));
        }
        dims.iter_mut().zip(shape.data::<i64>()?).for_each(|(dim, &size)| *dim = (*dim).max(size));
        total += n;
    }
    let width = outer.len() + depth;
    let mut indices = ctx.allocate(DType::I64, Shape::new(&[total, width])?)?;
    let mut rows = indices.data_mut::<i64>()?.chunks_exact_mut(width.max(1));
    for (i, [from, values, _]) in parts.iter().enumerate() {
        let from = from.data::<i64>()?;
        for k in looking(0..values.n_elements()) {
            let Some(row) = rows.next() else { break };
            let mut rest = i;
            for (at, &size) in row.iter_mut().zip(outer).rev() {
                (*at, rest) = ((rest % size) as i64, rest / size);
            }
            row[outer.len()..].copy_from_slice(&from[k * depth..(k + 1) * depth]);
        }
    }
    let values: Vec<&Tensor> = parts.iter().map(|part| &part[1]).collect();
    let values = join_vectors(ctx, dtype, &values)?;
    let shape: Vec<i64> = outer.iter().map(|&size| size as i64).chain(dims).collect();
    Ok([indices, values, Tensor::from(shape)])
}

/// Sets outputs 0, 1 and 2.
pub(super) fn set_outputs(ctx: &mut KernelCtx<'_>, triple: Triple) {
    for (i, tensor) in triple.into_iter().enumerate() {
        ctx.set_output(i, tensor);
    }
}
