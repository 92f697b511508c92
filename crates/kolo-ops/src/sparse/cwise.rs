//! `SparseDenseCwiseAdd`, `Mul`, `Div`: each element of a sparse tensor with the one at its place in a dense tensor, which is broadcast
//! to it. `SparseSoftmax`: the exponentials of a row's elements over their sum.

use half::{bf16, f16};
use kolo_core::{Error, Result, Shape};
use kolo_device::cpu::looking;
use kolo_graph::{Grad, Gradient, HalfSafety, OpDef, Operation, Output};

use super::reduce::sparse_reduce_sum;
use super::reorder::sizes;
use super::to_dense::positions;
use crate::array::cast::cast;
use crate::array::fill::ones_like;
use crate::array::gather::gather;
use crate::array::shape::shape as shape_of;
use crate::math::binary::first;
use crate::math::number::{Number, Real};
use crate::op::{Gpu, KernelDef, Op, cpu_kernels};
use crate::{Cost, KernelCtx};

/// The values of a sparse tensor, each multiplied by the element at its place in `dense`.
#[track_caller]
pub fn sparse_dense_mul<'g>(sparse: [Output<'g>; 3], dense: Output<'g>) -> Output<'g> {
    cwise("SparseDenseCwiseMul", sparse, dense)
}

/// The exponentials of the elements of each row of a sparse tensor, over their sum.
#[track_caller]
pub fn sparse_softmax(sparse: [Output<'_>; 3]) -> Output<'_> {
    sparse[0].graph().op("SparseSoftmax").inputs(sparse).out()
}

#[track_caller]
fn cwise<'g>(name: &str, [indices, values, shape]: [Output<'g>; 3], dense: Output<'g>) -> Output<'g> {
    indices.graph().op(name).inputs([indices, values, shape, dense]).out()
}

pub(crate) static SPARSE_DENSE_CWISE_ADD: Op = op(
    "SparseDenseCwiseAdd",
    ADD,
    Gradient::Refused("the sum is taken at some places alone, and TensorFlow has no gradient for it"),
);
pub(crate) static SPARSE_DENSE_CWISE_MUL: Op = op(
    "SparseDenseCwiseMul",
    MUL,
    Gradient::Rule(|op, dy| {
        let dy = first(dy)?;
        both(op, dy * at_places(op), dy * op.input(1))
    }),
);
pub(crate) static SPARSE_DENSE_CWISE_DIV: Op = op(
    "SparseDenseCwiseDiv",
    DIV,
    Gradient::Rule(|op, dy| {
        let (dy, dense) = (first(dy)?, at_places(op));
        both(op, dy / dense, dy * (-op.input(1) / (dense * dense)))
    }),
);

pub(crate) static SPARSE_SOFTMAX: Op = Op {
    def: OpDef {
        name: "SparseSoftmax",
        signature: "(sp_indices:int64, sp_values:T, sp_shape:int64) -> (output:T) ; T:type{half,float,double}",
        shape: |ctx| {
            ctx.input_of_rank(0, 2)?;
            ctx.input_of_rank(2, 1)?;
            Ok(vec![ctx.input_of_rank(1, 1)?])
        },
        gradient: Gradient::Rule(|op, dy| {
            let (y, dy, [indices, shape]) = (op.output(0), first(dy)?, [op.input(0), op.input(2)]);
            let sum = sparse_reduce_sum([indices, y * dy, shape], op.graph().constant([-1i32]), true);
            let dx = cwise("SparseDenseCwiseAdd", [indices, dy, shape], -sum) * y;
            Ok(vec![None, Some(dx.into()), None])
        }),
        half: HalfSafety::Wide,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(softmax: f32, f64; f16),
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

const fn op(name: &'static str, kernels: &'static [KernelDef], gradient: Gradient) -> Op {
    Op {
        def: OpDef {
            name,
            signature: "(sp_indices:int64, sp_values:T, sp_shape:int64, dense:T) -> (output:T) ; T:type{num}",
            shape: |ctx| {
                let n = ctx.input_of_rank(0, 2)?.dim(0);
                ctx.input_of_rank(2, 1)?;
                let values = ctx.input_of_rank(1, 1)?;
                Ok(vec![values.merge(&kolo_core::PartialShape::new(&[n]))?])
            },
            gradient,
            half: HalfSafety::Safe,
            ..OpDef::BASE
        },
        kernels,
        gpu: Gpu::Missing,
        cost: Cost::Elements,
    }
}

/// The dense side's element for each of the sparse side's.
fn at_places(op: Operation<'_>) -> Output<'_> {
    let ones = ones_like(op.input(1));
    sparse_dense_mul([op.input(0), ones, op.input(2)], op.input(3))
}

/// The gradient of the dense side is the sum, for each of its elements, of those that it was used for.
fn both<'g>(op: Operation<'g>, dx: Output<'g>, dense: Output<'g>) -> Result<Vec<Option<Grad<'g>>>> {
    let (graph, indices, dense_side) = (op.graph(), op.input(0), op.input(3));
    let shape = cast(shape_of(dense_side), kolo_core::DType::I64);
    // Of the coordinates the last, which are 0 along dimensions of size 1.
    let depth = graph.op("Size").input(op.input(2)).out();
    let rank = graph.op("Size").input(shape).out();
    let last = graph.op("Range").inputs([depth - rank, depth, graph.constant(1i32)]).out();
    let coordinates = gather(indices, last, 1);
    let coordinates = graph.op("Minimum").inputs([coordinates, shape - 1]).out();
    let dense = graph.op("ScatterNd").inputs([coordinates, dense, shape]).out();
    Ok(vec![None, Some(dx.into()), None, Some(dense.into())])
}

fn combine<T: Number>(ctx: &mut KernelCtx<'_>, f: impl Fn(T, T) -> T) -> Result<()> {
    let (indices, values, shape, dense) = (ctx.input(0)?, ctx.input(1)?, ctx.input(2)?, ctx.input(3)?);
    let (n, depth) = sizes(indices, values, shape)?;
    let whole = Shape::from_signed(shape.data::<i64>()?)?;
    let (small, rank) = (dense.shape(), dense.shape().rank());
    let fits = rank <= depth
        && small.iter().rev().zip(whole.iter().rev()).all(|(&small, &whole)| small == whole || small == 1);
    if !fits {
        return Err(Error::invalid_argument(format!(
            "SparseDenseBinaryOpShared broadcasts dense to sparse only; got incompatible shapes: {whole} vs. {small}"
        )));
    }
    // In range, each of them, which is all that is asked of these.
    let coordinates = indices.data::<i64>()?;
    positions(ctx, coordinates, n, &whole, false)?;
    let steps = crate::array::view::strides(small);
    let (values, dense) = (values.data::<T>()?, dense.data::<T>()?);
    let mut out = ctx.allocate(T::DTYPE, Shape::new(&[n])?)?;
    for (i, y) in looking(out.data_mut::<T>()?.iter_mut().enumerate()) {
        let row = &coordinates[i * depth + (depth - rank)..(i + 1) * depth];
        let places = row.iter().zip(small.iter()).zip(&steps);
        let at: usize =
            places.map(|((&at, &size), &step)| if size == 1 { 0 } else { at as usize * step as usize }).sum();
        *y = f(values[i], dense[at]);
    }
    ctx.set_output(0, out);
    Ok(())
}

macro_rules! kernels {
    ($($table:ident, $function:ident, $f:ident;)*) => {
        $(fn $function<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
            combine::<T>(ctx, T::$f)
        }
        const $table: &[KernelDef] =
            cpu_kernels!($function: f32, f64, f16, bf16, i8, i16, i32, i64, u8, u16, u32, u64);)*
    };
}

kernels! {
    ADD, add, add;
    MUL, mul, mul;
    DIV, div, div;
}

fn softmax<T: Real>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (indices, values, shape) = (ctx.input(0)?, ctx.input(1)?, ctx.input(2)?);
    let (n, depth) = sizes(indices, values, shape)?;
    if depth < 2 {
        return Err(Error::invalid_argument(format!("Input should have rank >= 2, found {depth}")));
    }
    let whole = Shape::from_signed(shape.data::<i64>()?)?;
    let row_len = whole[depth - 1];
    let positions = positions(ctx, indices.data::<i64>()?, n, &whole, false)?;
    let mut out = ctx.allocate(T::DTYPE, Shape::new(&[n])?)?;
    let (x, y) = (values.data::<T>()?, out.data_mut::<T>()?);
    let mut begin = 0;
    // Elements of a row follow each other.
    for row in positions.chunk_by(|a, b| a / row_len == b / row_len) {
        let range = begin..begin + row.len();
        begin = range.end;
        let (x, y) = (&x[range.clone()], &mut y[range]);
        let most = x.iter().fold(T::LOWEST, |most, &x| Number::max(most, x));
        let mut sum = T::ZERO;
        for (y, &x) in looking(y.iter_mut().zip(x)) {
            *y = (x - most).exp();
            sum = sum + *y;
        }
        y.iter_mut().for_each(|y| *y = *y / sum);
    }
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::testing::{OpTest, check_op, tensor, wavy};

    fn case(op: &str) -> OpTest {
        check_op(op).input([[0i64, 1], [1, 0], [1, 2]])
    }

    #[test]
    fn the_dense_side_is_broadcast() {
        let test = |op: &str| case(op).input([1.0f32, 2.0, 3.0]).input([2i64, 3]);
        test("SparseDenseCwiseMul").input([[1.0f32, 2.0, 3.0], [4.0, 5.0, 6.0]]).gives([2.0f32, 8.0, 18.0]);
        test("SparseDenseCwiseAdd").input([10.0f32, 20.0, 30.0]).gives([21.0f32, 12.0, 33.0]);
        test("SparseDenseCwiseDiv").input([[2.0f32], [4.0]]).gives([0.5f32, 0.5, 0.75]);
        test("SparseDenseCwiseMul").input(10.0f32).gives([10.0f32, 20.0, 30.0]);
        test("SparseDenseCwiseMul").input([1.0f32, 2.0]).fails("broadcasts dense to sparse only");
        test("SparseDenseCwiseMul").input(wavy([1, 2, 3], 0)).fails("broadcasts dense to sparse only");
    }

    #[test]
    fn rows_add_up_to_one() {
        let third = (1.0f32 + 1.0f32.exp()).recip();
        case("SparseSoftmax").input([5.0f32, 1.0, 2.0]).input([2i64, 3]).gives([1.0f32, third, 1.0 - third]);
        let none = check_op("SparseSoftmax").input(tensor::<i64, 2>([0, 2], [])).input(tensor::<f32, 1>([0], []));
        none.input([2i64, 3]).gives(tensor::<f32, 1>([0], []));
        check_op("SparseSoftmax").input([[0i64]]).input([1.0f32]).input([2i64]).fails("rank >= 2");
    }

    #[test]
    fn gradients() {
        for op in ["SparseDenseCwiseMul", "SparseDenseCwiseDiv"] {
            for dense in [wavy([2, 3], 1), wavy([3], 1), wavy([2, 1], 1)] {
                case(op).input(wavy([3], 0)).input([2i64, 3]).input(dense).gradient();
            }
        }
        case("SparseSoftmax").input(wavy([3], 0)).input(Tensor::from([2i64, 3])).gradient();
    }
}
