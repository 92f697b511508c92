//! `SparseReorder`: the same sparse tensor with its elements in row-major order.

use kolo_core::{Error, Result, Shape, Tensor};
use kolo_device::cpu::stop_if_asked;
use kolo_graph::{Gradient, OpDef, Output};

use crate::array::gather::{gather, pick_rows};
use crate::op::{Gpu, Op, cpu_any};
use crate::{Cost, KernelCtx};

/// The coordinates and values of a sparse tensor, in row-major order.
#[track_caller]
pub fn sparse_reorder<'g>(indices: Output<'g>, values: Output<'g>, shape: Output<'g>) -> (Output<'g>, Output<'g>) {
    let op = indices.graph().op("SparseReorder").inputs([indices, values, shape]).build();
    (op.output(0), op.output(1))
}

pub(crate) static SPARSE_REORDER: Op = Op {
    def: OpDef {
        name: "SparseReorder",
        signature: "(input_indices:int64, input_values:T, input_shape:int64) -> (output_indices:int64, \
                    output_values:T) ; T:type",
        shape: |ctx| {
            ctx.input_of_rank(2, 1)?;
            Ok(vec![ctx.input_of_rank(0, 2)?, ctx.input_of_rank(1, 1)?])
        },
        gradient: Gradient::Rule(|op, dy| {
            let Some(dy) = dy[1] else { return Ok(vec![None; 3]) };
            let graph = op.graph();
            // Where each element went: the same reordering, of their numbers.
            let zero = graph.constant(0i32);
            let n = graph.op("Size").input(op.input(1)).out();
            let numbers = graph.op("Range").inputs([zero, n, graph.constant(1i32)]).out();
            let (_, order) = sparse_reorder(op.input(0), numbers, op.input(2));
            let back = graph.op("InvertPermutation").input(order).out();
            Ok(vec![None, Some(gather(dy, back, 0).into()), None])
        }),
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward)],
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

/// The number of elements and of dimensions of a sparse tensor in inputs 0, 1 and 2.
pub(super) fn sizes(indices: &Tensor, values: &Tensor, shape: &Tensor) -> Result<(usize, usize)> {
    let &[n, depth] = indices.shape().dims() else {
        return Err(Error::invalid_argument(format!(
            "Input indices should be a matrix but received shape {}",
            indices.shape()
        )));
    };
    if values.shape().dims() != [n] {
        return Err(Error::invalid_argument(format!(
            "Input values should be a vector of {n} elements but received shape {}",
            values.shape()
        )));
    }
    if shape.shape().dims() != [depth] {
        return Err(Error::invalid_argument(format!(
            "Input shape should be a vector of {depth} elements but received shape {}",
            shape.shape()
        )));
    }
    Ok((n, depth))
}

fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (indices, values) = (ctx.input(0)?, ctx.input(1)?);
    let (n, depth) = sizes(indices, values, ctx.input(2)?)?;
    let coordinates = indices.data::<i64>()?;
    let row = |i: usize| &coordinates[i * depth..(i + 1) * depth];
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by(|&a, &b| {
        stop_if_asked();
        row(a).cmp(row(b))
    });
    let sorted = pick_rows(ctx, indices, &order, Shape::new(&[n, depth])?)?;
    let values = pick_rows(ctx, values, &order, Shape::new(&[n])?)?;
    ctx.set_output(0, sorted);
    ctx.set_output(1, values);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn elements_are_put_in_order() {
        check_op("SparseReorder")
            .input([[1i64, 0], [0, 2], [0, 1]])
            .input([1.0f32, 2.0, 3.0])
            .input([2i64, 3])
            .gives_all([Tensor::from([[0i64, 1], [0, 2], [1, 0]]), Tensor::from([3.0f32, 2.0, 1.0])]);
        check_op("SparseReorder")
            .input(tensor::<i64, 2>([0, 2], []))
            .input(tensor::<i32, 1>([0], []))
            .input([2i64, 3])
            .gives_all([tensor::<i64, 2>([0, 2], []), tensor::<i32, 1>([0], [])]);
        check_op("SparseReorder").input([[0i64]]).input([1i32, 2]).input([3i64]).fails("vector of 1 elements");
    }

    #[test]
    fn gradients_go_back_to_their_elements() {
        check_op("SparseReorder").input([[1i64, 0], [0, 2], [0, 1]]).input(wavy([3], 0)).input([2i64, 3]).gradient();
    }
}
