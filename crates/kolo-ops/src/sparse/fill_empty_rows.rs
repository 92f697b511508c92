//! `SparseFillEmptyRows`: a sparse matrix in which every row without elements gets one, and its gradient
//! `SparseFillEmptyRowsGrad`.

use half::{bf16, f16};
use kolo_core::{DType, Error, PartialShape, Result, Shape, Tensor};
use kolo_device::cpu::looking;
use kolo_graph::{Gradient, OpDef, Output};

use super::reorder::sizes;
use crate::array::elements::{Item, Job, Plus, build};
use crate::op::{Gpu, Op, cpu_any, cpu_kernels};
use crate::{Cost, KernelCtx};

/// A sparse tensor in which every row that has no element gets `default` in its first column. Outputs: coordinates, values,
/// which rows were empty, and where each element went.
#[track_caller]
pub fn sparse_fill_empty_rows<'g>(
    indices: Output<'g>,
    values: Output<'g>,
    shape: Output<'g>,
    default: Output<'g>,
) -> [Output<'g>; 4] {
    let op = indices.graph().op("SparseFillEmptyRows").inputs([indices, values, shape, default]).build();
    [0, 1, 2, 3].map(|i| op.output(i))
}

pub(crate) static SPARSE_FILL_EMPTY_ROWS: Op = Op {
    def: OpDef {
        name: "SparseFillEmptyRows",
        signature: "(indices:int64, values:T, dense_shape:int64, default_value:T) -> (output_indices:int64, \
                    output_values:T, empty_row_indicator:bool, reverse_index_map:int64) ; T:type",
        shape: |ctx| {
            let (indices, values) = (ctx.input_of_rank(0, 2)?, ctx.input_of_rank(1, 1)?);
            ctx.input_of_rank(2, 1)?;
            ctx.input_of_rank(3, 0)?;
            let n = PartialShape::new(&[indices.dim(0)]).merge(&values)?;
            let rows = ctx.constant_as_shape(2).dim(0);
            Ok(vec![
                PartialShape::new(&[None, indices.dim(1)]),
                PartialShape::of_rank(1),
                PartialShape::new(&[rows]),
                n,
            ])
        },
        gradient: Gradient::Rule(|op, dy| {
            let Some(dy) = dy[1] else { return Ok(vec![None; 4]) };
            let grads = op.graph().op("SparseFillEmptyRowsGrad").inputs([op.output(3), dy]).build();
            Ok(vec![None, Some(grads.output(0).into()), None, Some(grads.output(1).into())])
        }),
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward)],
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

pub(crate) static SPARSE_FILL_EMPTY_ROWS_GRAD: Op = Op {
    def: OpDef {
        name: "SparseFillEmptyRowsGrad",
        signature: "(reverse_index_map:int64, grad_values:T) -> (d_values:T, d_default_value:T) ; T:type",
        shape: |ctx| {
            ctx.input_of_rank(1, 1)?;
            Ok(vec![ctx.input_of_rank(0, 1)?, PartialShape::scalar()])
        },
        gradient: Gradient::Refused("the gradient of a gradient is not implemented here"),
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(backward: f32, f64, i32, i64, u64, bool; f16, bf16, i8, i16, u8, u16, u32),
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (indices, values, shape) = (ctx.input(0)?, ctx.input(1)?, ctx.input(2)?);
    let (n, depth) = sizes(indices, values, shape)?;
    let Some(&n_rows) = shape.data::<i64>()?.first() else {
        return Err(Error::invalid_argument("Dense shape cannot be empty."));
    };
    let n_rows = usize::try_from(n_rows)
        .map_err(|_| Error::invalid_argument(format!("dense_shape[0] is {n_rows}, which is negative")))?;
    let coordinates = indices.data::<i64>()?;
    if n_rows == 0 && n > 0 {
        return Err(Error::invalid_argument(format!(
            "Received SparseTensor with dense_shape[0] = 0 but indices.shape[0] = {n}"
        )));
    }
    // The number of rows is a value, and one element is made for each.
    let mut counts = ctx.scratch(n_rows, 0usize, "counts of rows")?;
    let rows = coordinates.chunks_exact(depth.max(1)).map(|row| row[0]).enumerate();
    for (i, row) in looking(rows.take(n)) {
        match usize::try_from(row).ok().and_then(|row| counts.get_mut(row)) {
            Some(count) => *count += 1,
            None if row < 0 => return Err(Error::invalid_argument(format!("indices({i}, 0) is invalid: {row} < 0"))),
            None => {
                return Err(Error::invalid_argument(format!("indices({i}, 0) is invalid: {row} >= {n_rows}")));
            }
        }
    }
    let mut is_empty = ctx.allocate(DType::Bool, Shape::new(&[n_rows])?)?;
    is_empty.data_mut::<bool>()?.iter_mut().zip(&counts[..]).for_each(|(empty, &count)| *empty = count == 0);
    // Where the next element of each row goes.
    let (mut next, mut total) = (counts, 0usize);
    for next in looking(next.iter_mut()) {
        let count = std::mem::replace(next, total);
        total += count.max(1);
    }
    let mut all_indices = ctx.allocate_zeroed(DType::I64, Shape::new(&[total, depth])?)?;
    let out = all_indices.data_mut::<i64>()?;
    for (row, (&at, _)) in next.iter().zip(is_empty.data::<bool>()?).enumerate().filter(|(_, (_, empty))| **empty) {
        out[at * depth] = row as i64;
    }
    let mut places = Vec::with_capacity(n);
    for row in looking(coordinates.chunks_exact(depth.max(1)).take(n)) {
        // In range, as found above.
        let place = &mut next[row[0] as usize];
        out[*place * depth..(*place + 1) * depth].copy_from_slice(row);
        places.push(*place as i64);
        *place += 1;
    }
    let default = ctx.input(3)?;
    if default.shape().rank() != 0 {
        return Err(Error::invalid_argument(format!("default_value must be a scalar, saw: {}", default.shape())));
    }
    let filled = build(ctx, values.dtype(), Shape::new(&[total])?, &[values, default], Place(&places))?;
    ctx.set_output(0, all_indices);
    ctx.set_output(1, filled);
    ctx.set_output(2, is_empty);
    ctx.set_output(3, Tensor::from_vec([n], places)?);
    Ok(())
}

/// A default everywhere, and values at their places.
struct Place<'a>(&'a [i64]);

impl Job for Place<'_> {
    fn run<E: Item>(self, out: &mut [E], inputs: &[&[E]]) -> Result<()> {
        out.fill(inputs[1][0].clone());
        self.0.iter().zip(inputs[0]).for_each(|(&at, value)| out[at as usize] = value.clone());
        Ok(())
    }
}

fn backward<T: Plus>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (places, grad) = (ctx.data::<i64>(0)?, ctx.data::<T>(1)?);
    let mut is_value = vec![false; grad.len()];
    let mut values = Vec::with_capacity(places.len());
    for &place in looking(places) {
        let at = usize::try_from(place).ok().filter(|&at| at < grad.len()).ok_or_else(|| {
            Error::invalid_argument(format!("Elements in reverse index must be in [0, {}) but got {place}", grad.len()))
        })?;
        is_value[at] = true;
        values.push(grad[at]);
    }
    let rest = grad.iter().zip(is_value).filter(|(_, is_value)| !is_value).map(|(&x, _)| x);
    let default = rest.fold(T::default(), |sum, x| sum.plus(x));
    let n = values.len();
    ctx.set_output(0, Tensor::from_vec([n], values)?);
    ctx.set_output(1, Tensor::scalar(default));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn every_row_gets_an_element() {
        // TensorFlow's example.
        check_op("SparseFillEmptyRows")
            .input([[0i64, 1], [0, 3], [2, 0], [3, 1]])
            .input([1i32, 2, 3, 4])
            .input([5i64, 6])
            .input(-1i32)
            .gives_all([
                Tensor::from([[0i64, 1], [0, 3], [1, 0], [2, 0], [3, 1], [4, 0]]),
                Tensor::from([1i32, 2, -1, 3, 4, -1]),
                Tensor::from([false, true, false, false, true]),
                Tensor::from([0i64, 1, 3, 4]),
            ]);
        // Rows out of order are put in order; elements of one row stay as they are.
        check_op("SparseFillEmptyRows")
            .input([[1i64, 2], [0, 0], [1, 1]])
            .input([1.0f32, 2.0, 3.0])
            .input([2i64, 3])
            .input(0.0f32)
            .gives_all([
                Tensor::from([[0i64, 0], [1, 2], [1, 1]]),
                Tensor::from([2.0f32, 1.0, 3.0]),
                Tensor::from([false, false]),
                Tensor::from([1i64, 0, 2]),
            ]);
        let none =
            || check_op("SparseFillEmptyRows").input(tensor::<i64, 2>([0, 2], [])).input(tensor::<f32, 1>([0], []));
        none().input([1i64, 3]).input(7.0f32).gives_all([Tensor::from([[0i64, 0]]), Tensor::from([7.0f32])]);
        none().input([0i64, 3]).input(7.0f32).gives_all([tensor::<i64, 2>([0, 2], [])]);
        check_op("SparseFillEmptyRows")
            .input([[2i64, 0]])
            .input([1.0f32])
            .input([2i64, 1])
            .input(0.0f32)
            .fails("indices(0, 0) is invalid: 2 >= 2");
    }

    #[test]
    fn gradients() {
        check_op("SparseFillEmptyRows")
            .input([[3i64, 1], [0, 3], [0, 0]])
            .input(wavy([3], 0))
            .input([5i64, 6])
            .input(wavy([], 2))
            .gradient();
        check_op("SparseFillEmptyRowsGrad").input([5i64]).input([1.0f32]).fails("must be in [0, 1) but got 5");
    }
}
