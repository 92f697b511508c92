//! `SparseTensorDenseMatMul`: a sparse matrix times a dense one.

use half::{bf16, f16};
use kolo_core::{Error, PartialShape, Result, Shape};
use kolo_graph::{Gradient, OpDef, Output};

use super::reorder::sizes;
use crate::array::gather::gather;
use crate::array::strided_slice::{At, slice_at};
use crate::array::transpose::transpose;
use crate::math::binary::first;
use crate::math::matmul::rows_and_columns;
use crate::math::number::Number;
use crate::math::reduce::sum::sum;
use crate::op::{Gpu, Op, cpu_kernels};
use crate::{Cost, KernelCtx};

/// A sparse matrix, given by coordinates, values and shape, times the matrix `b`.
#[track_caller]
pub fn sparse_dense_matmul<'g>(
    indices: Output<'g>,
    values: Output<'g>,
    shape: Output<'g>,
    b: Output<'g>,
) -> Output<'g> {
    product(indices, values, shape, b, false)
}

#[track_caller]
fn product<'g>(
    indices: Output<'g>,
    values: Output<'g>,
    shape: Output<'g>,
    b: Output<'g>,
    adjoint_a: bool,
) -> Output<'g> {
    let builder = indices.graph().op("SparseTensorDenseMatMul").inputs([indices, values, shape, b]);
    builder.attr("adjoint_a", adjoint_a).out()
}

pub(crate) static SPARSE_TENSOR_DENSE_MATMUL: Op = Op {
    def: OpDef {
        name: "SparseTensorDenseMatMul",
        signature: "(a_indices:Tindices, a_values:T, a_shape:int64, b:T) -> (product:T) ; T:type, \
                    Tindices:type{int32,int64}=int64, adjoint_a:bool=false, adjoint_b:bool=false",
        shape: |ctx| {
            ctx.input_of_rank(0, 2)?;
            ctx.input_of_rank(1, 1)?;
            let a = ctx.constant_as_shape(2).merge(&PartialShape::of_rank(2))?;
            let b = ctx.input_of_rank(3, 2)?;
            let (m, left) = rows_and_columns(&a, ctx.attrs().bool("adjoint_a")?);
            let (right, n) = rows_and_columns(&b, ctx.attrs().bool("adjoint_b")?);
            PartialShape::new(&[left]).merge(&PartialShape::new(&[right]))?;
            Ok(vec![PartialShape::new(&[m, n])])
        },
        gradient: Gradient::Rule(|op, dy| {
            let [indices, values, shape, b] = [0, 1, 2, 3].map(|i| op.input(i));
            let (adjoint_a, adjoint_b) =
                op.attrs(|attrs| Ok::<_, Error>((attrs.bool("adjoint_a")?, attrs.bool("adjoint_b")?)))?;
            let dy = first(dy)?;
            let db = product(indices, values, shape, dy, !adjoint_a);
            let db = if adjoint_b { transpose(db, &[1, 0]) } else { db };
            let column = |i: i64| slice_at(indices, &[At::All, At::Index(i)]);
            let (rows, columns) = if adjoint_a { (column(1), column(0)) } else { (column(0), column(1)) };
            let b = if adjoint_b { transpose(b, &[1, 0]) } else { b };
            let parts = gather(dy, rows, 0) * gather(b, columns, 0);
            Ok(vec![None, Some(sum(parts, &[1]).into()), None, Some(db.into())])
        }),
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(forward: f32, f64, i32; f16, bf16),
    gpu: Gpu::Missing,
    cost: Cost::Heavy,
};

fn forward<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (indices, values, shape, b) = (ctx.input(0)?, ctx.input(1)?, ctx.input(2)?, ctx.input(3)?);
    let (_, depth) = sizes(indices, values, shape)?;
    let &[b0, b1] = b.shape().dims() else {
        return Err(Error::invalid_argument("Tensor 'b' is not a matrix"));
    };
    if depth != 2 {
        return Err(Error::invalid_argument("Tensor 'a_shape' must have 2 elements"));
    }
    let (adjoint_a, adjoint_b) = (ctx.attrs().bool("adjoint_a")?, ctx.attrs().bool("adjoint_b")?);
    let a = Shape::from_signed(&ctx.integers(2)?)?;
    let (m, left) = if adjoint_a { (a[1], a[0]) } else { (a[0], a[1]) };
    let (right, n) = if adjoint_b { (b1, b0) } else { (b0, b1) };
    if left != right {
        return Err(Error::invalid_argument(format!(
            "Cannot multiply A and B because inner dimension does not match: {left} vs. {right}.  Did you forget a \
             transpose?  Dimensions of A: [{}, {}).  Dimensions of B: {}",
            a[0],
            a[1],
            b.shape()
        )));
    }
    let coordinates = ctx.integers(0)?;
    for (i, pair) in coordinates.chunks_exact(2).enumerate() {
        for (column, (&at, &dim)) in pair.iter().zip(a.iter()).enumerate() {
            if !usize::try_from(at).is_ok_and(|at| at < dim) {
                let name = if (column == 0) == adjoint_a { "k" } else { "m" };
                return Err(Error::invalid_argument(format!(
                    "{name} ({at}) from index[{i},{column}] out of bounds (>={dim})"
                )));
            }
        }
    }
    let mut out = ctx.allocate_zeroed(T::DTYPE, Shape::new(&[m, n])?)?;
    let sums = out.data_mut::<T>()?;
    let b = b.data::<T>()?;
    if n > 0 {
        for (pair, &value) in coordinates.chunks_exact(2).zip(values.data::<T>()?) {
            let (row, k) = if adjoint_a { (pair[1], pair[0]) } else { (pair[0], pair[1]) };
            let (row, k) = (row as usize, k as usize);
            let to = sums[row * n..(row + 1) * n].iter_mut();
            if adjoint_b {
                to.zip(b[k..].iter().step_by(b1)).for_each(|(sum, &x)| *sum = sum.add(value.mul(x)));
            } else {
                to.zip(&b[k * n..(k + 1) * n]).for_each(|(sum, &x)| *sum = sum.add(value.mul(x)));
            }
        }
    }
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::testing::{OpTest, check_op, tensor, wavy};

    /// [[0, 2, 0], [3, 0, 4]] times `b`.
    fn product(b: impl Into<Tensor>, adjoint_a: bool, adjoint_b: bool) -> OpTest {
        check_op("SparseTensorDenseMatMul")
            .attr("adjoint_a", adjoint_a)
            .attr("adjoint_b", adjoint_b)
            .input([[0i64, 1], [1, 0], [1, 2]])
            .input([2.0f32, 3.0, 4.0])
            .input([2i64, 3])
            .input(b)
    }

    #[test]
    fn products() {
        let b = [[1.0f32, 2.0], [3.0, 4.0], [5.0, 6.0]];
        product(b, false, false).gives([[6.0f32, 8.0], [23.0, 30.0]]);
        product([[1.0f32, 3.0, 5.0], [2.0, 4.0, 6.0]], false, true).gives([[6.0f32, 8.0], [23.0, 30.0]]);
        product([[1.0f32], [2.0]], true, false).gives([[6.0f32], [2.0], [8.0]]);
        product([[1.0f32, 2.0]], true, true).gives([[6.0f32], [2.0], [8.0]]);
        product(tensor::<f32, 2>([3, 0], []), false, false).gives(tensor::<f32, 2>([2, 0], []));
        product([[1.0f32], [2.0]], false, false).fails("3");
        check_op("SparseTensorDenseMatMul")
            .input([[0i32, 5]])
            .input([1.0f32])
            .input([1i64, 2])
            .input([[1.0f32], [2.0]])
            .fails("k (5) from index[0,1] out of bounds (>=2)");
    }

    #[test]
    fn gradients() {
        product(wavy([3, 2], 0), false, false).gradient();
        product(wavy([2, 3], 0), false, true).gradient();
        product(wavy([2, 2], 0), true, false).gradient();
        product(wavy([3, 2], 0), true, true).gradient();
    }
}
