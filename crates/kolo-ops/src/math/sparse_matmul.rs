//! `SparseMatMul`: a product of matrices of which one may hold many zeros. It is a hint only: the product is the same, and
//! is computed as for dense matrices.

use half::bf16;
use kolo_core::{DType, Error, PartialShape, Result, Shape};
use kolo_graph::{Gradient, HalfSafety, OpDef, Output, SplitRule};

use crate::array::cast::cast;
use crate::math::binary::first;
use crate::math::matmul::{MatrixElement, Sizes, misfit, product_gradients, rows_and_columns};
use crate::op::{Gpu, Op, cpu_any};
use crate::{Cost, KernelCtx};

pub(crate) static SPARSE_MATMUL: Op = Op {
    def: OpDef {
        name: "SparseMatMul",
        signature: "(a:Ta, b:Tb) -> (product:float) ; transpose_a:bool=false, transpose_b:bool=false, \
                    a_is_sparse:bool=false, b_is_sparse:bool=false, Ta:type{float,bfloat16}=float, \
                    Tb:type{float,bfloat16}=float",
        shape: |ctx| {
            let (a, b) = (ctx.input_of_rank(0, 2)?, ctx.input_of_rank(1, 2)?);
            let (m, left) = rows_and_columns(&a, ctx.attrs().bool("transpose_a")?);
            let (right, n) = rows_and_columns(&b, ctx.attrs().bool("transpose_b")?);
            if let (Some(left), Some(right)) = (left, right)
                && left != right
            {
                return Err(misfit(&a, &b, left, right));
            }
            Ok(vec![PartialShape::new(&[m, n])])
        },
        gradient: Gradient::Rule(|op, dy| {
            let (a, b, dy) = (op.input(0), op.input(1), first(dy)?);
            let (ta, tb) =
                op.attrs(|attrs| Ok::<_, Error>((attrs.bool("transpose_a")?, attrs.bool("transpose_b")?)))?;
            let (da, db) = product_gradients(a, b, dy, ta, tb, product);
            Ok(vec![Some(cast(da, a.dtype()).into()), Some(cast(db, b.dtype()).into())])
        }),
        half: HalfSafety::Safe,
        split: SplitRule::Product,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward)],
    gpu: Gpu::Missing,
    cost: Cost::Heavy,
};

fn product<'g>(a: Output<'g>, b: Output<'g>, transpose_a: bool, transpose_b: bool) -> Output<'g> {
    let builder = a.graph().op("SparseMatMul").input(a).input(b);
    builder.attr("transpose_a", transpose_a).attr("transpose_b", transpose_b).out()
}

fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (a, b) = (ctx.input(0)?.shape().clone(), ctx.input(1)?.shape().clone());
    let (&[a0, a1], &[b0, b1]) = (a.dims(), b.dims()) else {
        return Err(Error::invalid_argument(format!("a and b must be matrices, found {a} and {b}")));
    };
    let (transpose_a, transpose_b) = (ctx.attrs().bool("transpose_a")?, ctx.attrs().bool("transpose_b")?);
    let (m, left) = if transpose_a { (a1, a0) } else { (a0, a1) };
    let (right, n) = if transpose_b { (b1, b0) } else { (b0, b1) };
    if left != right {
        return Err(misfit(&(&a).into(), &(&b).into(), left, right));
    }
    let wide = |i: usize| -> Result<Vec<f32>> {
        let tensor = ctx.input(i)?;
        match tensor.dtype() {
            DType::BF16 => Ok(tensor.data::<bf16>()?.iter().map(|x| x.to_f32()).collect()),
            _ => Ok(tensor.data::<f32>()?.to_vec()),
        }
    };
    let mut out = ctx.allocate_zeroed(DType::F32, Shape::new(&[m, n])?)?;
    if m * n > 0 && left > 0 {
        let sizes = Sizes { m, n, k: left, transpose_a, transpose_b };
        f32::multiply(ctx.pool(), sizes, &wide(0)?, &wide(1)?, out.data_mut::<f32>()?)?;
    }
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check_op, tensor};

    #[test]
    fn products() {
        let (a, b) = ([[1.0f32, 2.0, 0.0], [0.0, 0.0, 3.0]], [[1.0f32, 2.0], [3.0, 4.0], [5.0, 6.0]]);
        check_op("SparseMatMul").attr("a_is_sparse", true).input(a).input(b).gives([[7.0f32, 10.0], [15.0, 18.0]]);
        check_op("SparseMatMul")
            .attr("transpose_a", true)
            .attr("transpose_b", true)
            .input([[1.0f32], [2.0]])
            .input([[3.0f32, 4.0]])
            .gives([[11.0f32]]);
        check_op("SparseMatMul").input([[bf16::from_f32(2.0)]]).input([[1.5f32]]).gives([[3.0f32]]);
        check_op("SparseMatMul")
            .input(tensor::<f32, 2>([2, 0], []))
            .input(tensor::<f32, 2>([0, 1], []))
            .gives([[0.0f32], [0.0]]);
        check_op("SparseMatMul").input(a).input(a).fails("3");
    }

    #[test]
    fn the_gradient_is_that_of_a_product() {
        let g = crate::graph();
        let a = g.constant([[1.0f32, 2.0]]);
        let b = g.constant([[bf16::from_f32(3.0)], [bf16::from_f32(4.0)]]);
        let y = g.op("SparseMatMul").input(a).input(b).out();
        let grads = kolo_graph::gradients(&[y], &[a, b]).unwrap();
        let grads: Vec<_> = grads.into_iter().map(|grad| grad.unwrap().dense().unwrap()).collect();
        let found = crate::testing::evaluate(&g, &grads, &[]).unwrap();
        assert_eq!(found[0], kolo_core::Tensor::from([[3.0f32, 4.0]]));
        assert_eq!(found[1], kolo_core::Tensor::from([[bf16::from_f32(1.0)], [bf16::from_f32(2.0)]]));
    }
}
