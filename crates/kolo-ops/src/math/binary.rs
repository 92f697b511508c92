//! Elementwise ops of two numbers, with NumPy's broadcasting: Add, AddV2, Sub, Mul, RealDiv, Div, Maximum, Minimum,
//! SquaredDifference.

use half::{bf16, f16};
use kolo_core::{DType, Error, Result};
use kolo_graph::{
    Elements, Elementwise, Grad, Gradient, GradientFn, HalfSafety, HostRule, OpDef, Operation, Output, shape_fns,
};

use crate::math::elementwise::{Computed, Walk, broadcast_shape, expression_kernels, zip};
use crate::math::number::Number;
use crate::op::{Gpu, KernelDef, Op, cpu, cpu_kernels};
use crate::{Cost, KernelCtx};

/// `a + b`, elementwise; the operator `+` does the same.
#[track_caller]
pub fn add<'g>(a: Output<'g>, b: Output<'g>) -> Output<'g> {
    a + b
}

/// The larger of each pair.
#[track_caller]
pub fn maximum<'g>(a: Output<'g>, b: Output<'g>) -> Output<'g> {
    a.graph().op("Maximum").input(a).input(b).out()
}

/// The smaller of each pair.
#[track_caller]
pub fn minimum<'g>(a: Output<'g>, b: Output<'g>) -> Output<'g> {
    a.graph().op("Minimum").input(a).input(b).out()
}

/// `(a - b)²`, elementwise.
#[track_caller]
pub fn squared_difference<'g>(a: Output<'g>, b: Output<'g>) -> Output<'g> {
    a.graph().op("SquaredDifference").input(a).input(b).out()
}

pub(crate) static ADD: Op = binary("Add", TERMS, ADD_KERNELS, |op, dy| reduced(op, first(dy)?, first(dy)?))
    .host(HostRule::SmallIntegers)
    .elementwise(Elementwise::new("x0 + x1", Elements::Numbers))
    .half(HalfSafety::Safe);
pub(crate) static ADD_V2: Op = binary("AddV2", NUMBERS, ADD_V2_KERNELS, |op, dy| reduced(op, first(dy)?, first(dy)?))
    .host(HostRule::SmallIntegers)
    .elementwise(Elementwise::new("x0 + x1", Elements::Numbers))
    .half(HalfSafety::Safe);
pub(crate) static SUB: Op = binary("Sub", NUMBERS, SUB_KERNELS, |op, dy| reduced(op, first(dy)?, -first(dy)?))
    .host(HostRule::SmallIntegers)
    .elementwise(Elementwise::new("x0 - x1", Elements::Numbers))
    .half(HalfSafety::Safe);
pub(crate) static MUL: Op =
    binary("Mul", NUMBERS, MUL_KERNELS, |op, dy| reduced(op, first(dy)? * op.input(1), first(dy)? * op.input(0)))
        .host(HostRule::SmallIntegers)
        .elementwise(Elementwise::new("x0 * x1", Elements::Numbers))
        .half(HalfSafety::Safe);
pub(crate) static REAL_DIV: Op = binary("RealDiv", NUMBERS, DIV_KERNELS, div_gradient)
    .host(HostRule::SmallIntegers)
    .elementwise(Elementwise::new("x0 / x1", Elements::Floats))
    .half(HalfSafety::Safe);
pub(crate) static DIV: Op = binary("Div", NUMBERS, DIV_KERNELS, div_gradient)
    .host(HostRule::SmallIntegers)
    .elementwise(Elementwise::new("x0 / x1", Elements::Floats))
    .half(HalfSafety::Safe);
pub(crate) static MAXIMUM: Op =
    binary("Maximum", ORDERED, MAXIMUM_KERNELS, |op, dy| selected(op, first(dy)?, "GreaterEqual"))
        .host(HostRule::SmallIntegers)
        .elementwise(Elementwise::new("is_nan(x0) ? x0 : (is_nan(x1) ? x1 : (x0 > x1 ? x0 : x1))", Elements::Numbers))
        .half(HalfSafety::Neutral);
pub(crate) static MINIMUM: Op =
    binary("Minimum", ORDERED, MINIMUM_KERNELS, |op, dy| selected(op, first(dy)?, "LessEqual"))
        .host(HostRule::SmallIntegers)
        .elementwise(Elementwise::new("is_nan(x0) ? x0 : (is_nan(x1) ? x1 : (x0 < x1 ? x0 : x1))", Elements::Numbers))
        .half(HalfSafety::Neutral);
pub(crate) static SQUARED_DIFFERENCE: Op =
    binary("SquaredDifference", SQUARED, SQUARED_DIFFERENCE_KERNELS, |op, dy| {
        let dx = first(dy)? * (op.input(0) - op.input(1)) * 2.0;
        reduced(op, dx, -dx)
    })
    .host(HostRule::SmallIntegers)
    .elementwise(Elementwise::new("(x0 - x1) * (x0 - x1)", Elements::Numbers))
    .half(HalfSafety::Wide);

pub(crate) const NUMBERS: &str = "(x:T, y:T) -> (z:T) ; T:type{bfloat16,half,float,double,uint8,int8,uint16,int16,\
                                  int32,uint32,uint64,int64,complex64,complex128}";
pub(crate) const ORDERED: &str = "(x:T, y:T) -> (z:T) ; T:type{real}";
/// `Add` is older than some integers, and joins strings.
const TERMS: &str =
    "(x:T, y:T) -> (z:T) ; T:type{bfloat16,half,float,double,uint8,int8,int16,int32,int64,complex64,complex128,string}";
const SQUARED: &str = "(x:T, y:T) -> (z:T) ; T:type{bfloat16,half,float,double,int32,int64,complex64,complex128}";

const fn binary(
    name: &'static str,
    signature: &'static str,
    kernels: &'static [KernelDef],
    gradient: GradientFn,
) -> Op {
    Op {
        def: OpDef { name, signature, shape: shape_fns::broadcast, gradient: Gradient::Rule(gradient), ..OpDef::BASE },
        kernels,
        gpu: Gpu::Unstated,
        cost: Cost::Elements,
    }
}

/// `(a / b)' = a' / b − b' · a / b²`.
fn div_gradient<'g>(op: Operation<'g>, dy: &[Option<Output<'g>>]) -> Result<Vec<Option<Grad<'g>>>> {
    let (dy, x, y) = (first(dy)?, op.input(0), op.input(1));
    reduced(op, dy / y, dy * ((-x / y) / y))
}

/// The gradient goes to the input that was chosen; to the first when both are equal.
fn selected<'g>(op: Operation<'g>, dy: Output<'g>, first_wins: &str) -> Result<Vec<Option<Grad<'g>>>> {
    let graph = op.graph();
    let mask = graph.op(first_wins).input(op.input(0)).input(op.input(1)).out();
    let mask = graph.op("Cast").input(mask).attr("DstT", dy.dtype()).out();
    let to_first = dy * mask;
    reduced(op, to_first, dy - to_first)
}

/// The gradient of an op's only output.
pub(crate) fn first<'g>(dy: &[Option<Output<'g>>]) -> Result<Output<'g>> {
    dy.first().copied().flatten().ok_or_else(|| Error::internal("a rule is only called when a gradient arrived"))
}

/// Gradients of two broadcast inputs, each summed over the dimensions along which its input was repeated.
pub(crate) fn reduced<'g>(op: Operation<'g>, dx: Output<'g>, dy: Output<'g>) -> Result<Vec<Option<Grad<'g>>>> {
    let (x, y) = (op.input(0), op.input(1));
    let same = x.shape().known().is_some_and(|shape| Some(shape) == y.shape().known());
    if same {
        return Ok(vec![Some(dx.into()), Some(dy.into())]);
    }
    let graph = op.graph();
    if is_scalar(y) && !is_scalar(x) {
        // What a number is joined with keeps its shape; only the number's own gradient is a sum.
        return Ok(vec![Some(dx.into()), Some(sum_of_all(dy).into())]);
    }
    if is_scalar(x) && !is_scalar(y) {
        return Ok(vec![Some(sum_of_all(dx).into()), Some(dy.into())]);
    }
    let shapes = [x, y].map(|input| graph.op("Shape").input(input).out());
    let axes = graph.op("BroadcastGradientArgs").inputs(shapes).build();
    let sum = |grad: Output<'g>, i: usize| {
        let sum = graph.op("Sum").input(grad).input(axes.output(i)).out();
        graph.op("Reshape").input(sum).input(shapes[i]).out()
    };
    Ok(vec![Some(sum(dx, 0).into()), Some(sum(dy, 1).into())])
}

fn is_scalar(x: Output<'_>) -> bool {
    x.shape().rank() == Some(0)
}

/// The sum over all dimensions, how many there may be.
fn sum_of_all(x: Output<'_>) -> Output<'_> {
    let graph = x.graph();
    let axes = match x.shape().rank() {
        Some(rank) => graph.constant((0..rank as i32).collect::<Vec<i32>>()),
        None => {
            let (zero, one) = (graph.constant(0i32), graph.constant(1i32));
            let rank = graph.op("Rank").input(x).out();
            graph.op("Range").inputs([zero, rank, one]).out()
        }
    };
    graph.op("Sum").input(x).input(axes).out()
}

/// About what one element costs; memory-bound loops.
const NS: f64 = 0.3;

expression_kernels! {
    ADD_V2_KERNELS, add_kernel: Number, zip(NS), |a, b| a.add(b), (f32, f64, i8, i16, i32, i64, u8, u16, u32, u64; f16, bf16);
    SUB_KERNELS, sub_kernel: Number, zip(NS), |a, b| a.sub(b), (f32, f64, i8, i16, i32, i64, u8, u16, u32, u64; f16, bf16);
    MUL_KERNELS, mul_kernel: Number, zip(NS), |a, b| a.mul(b), (f32, f64, i8, i16, i32, i64, u8, u16, u32, u64; f16, bf16);
    MAXIMUM_KERNELS, maximum_kernel: Number, zip(NS), |a, b| a.max(b), (f32, f64, i8, i16, i32, i64, u8, u16, u32, u64; f16, bf16);
    MINIMUM_KERNELS, minimum_kernel: Number, zip(NS), |a, b| a.min(b), (f32, f64, i8, i16, i32, i64, u8, u16, u32, u64; f16, bf16);
    SQUARED_DIFFERENCE_KERNELS, squared_difference_kernel: Number, zip(NS), |a, b| a.sub(b).mul(a.sub(b)), (f32, f64, i32, i64; f16, bf16);
}

const ADD_KERNELS: &[KernelDef] = cpu_kernels!(elementwise add_kernel: f32, f64, i8, i16, i32, i64, u8; f16, bf16 | own cpu(DType::Str, join_strings));

/// Each pair of strings, one after the other.
fn join_strings(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (a, b) = (ctx.input(0)?, ctx.input(1)?);
    let shape = broadcast_shape(a.shape(), b.shape())?;
    let walk = Walk::new(&shape, a.shape(), b.shape());
    let (left, right) = (a.strings()?, b.strings()?);
    let out = ctx.text_tensor(shape.clone(), |i| {
        let (at_a, at_b) = walk.offsets(i / walk.run);
        let within = |moves: bool| if moves { i % walk.run } else { 0 };
        [&left[at_a + within(walk.inner.0)][..], &right[at_b + within(walk.inner.1)][..]].into_iter()
    })?;
    ctx.set_output(0, out);
    Ok(())
}

fn float_div<T: Computed + num_traits::Float>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    zip::<T, T>(
        ctx,
        NS,
        #[inline(always)]
        |a, b| a / b,
    )
}

/// An error if an integer divides by 0. Where there is nothing to divide, any divisor will do.
pub(crate) fn refuse_division_by_zero<T: Computed + num_traits::PrimInt>(ctx: &KernelCtx<'_>) -> Result<()> {
    let divides = ctx.input(0)?.n_elements() > 0;
    match divides && ctx.data::<T>(1)?.iter().any(|divisor| divisor.is_zero()) {
        true => Err(Error::invalid_argument("Integer division by zero")),
        false => Ok(()),
    }
}

fn integer_div<T: Computed + num_traits::PrimInt>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    refuse_division_by_zero::<T>(ctx)?;
    // The only overflow, MIN / −1, wraps.
    zip::<T, T>(
        ctx,
        3.0,
        #[inline(always)]
        |a, b| a.checked_div(&b).unwrap_or(a),
    )
}

const DIV_KERNELS: &[KernelDef] =
    cpu_kernels!(elementwise float_div: f32, f64; f16, bf16 | integer_div: i32, i64, u64; i8, i16, u8, u16, u32);

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn add_broadcasts() {
        check_op("AddV2")
            .input([[1.0f32, 2.0], [3.0, 4.0]])
            .input([10.0f32, 20.0])
            .gives([[11.0f32, 22.0], [13.0, 24.0]]);
        check_op("AddV2").input([1.0f32, 2.0]).input(10.0f32).gives([11.0f32, 12.0]);
        check_op("AddV2").input(10i32).input([1i32, i32::MAX]).gives([11i32, i32::MIN + 9]);
        check_op("AddV2")
            .input(tensor([2, 1, 2], [1.0f64, 2.0, 3.0, 4.0]))
            .input(tensor([3, 1], [10.0f64, 20.0, 30.0]))
            .gives(tensor([2, 3, 2], [11.0f64, 12.0, 21.0, 22.0, 31.0, 32.0, 13.0, 14.0, 23.0, 24.0, 33.0, 34.0]));
        check_op("AddV2")
            .input(tensor::<f32, 2>([0, 3], []))
            .input([1.0f32, 2.0, 3.0])
            .gives(tensor::<f32, 2>([0, 3], []));
        check_op("AddV2").input([1.0f32, 2.0]).input([1.0f32, 2.0, 3.0]).fails("do not broadcast");
        check_op("AddV2").input(1.0f32).input(1i32).fails("should be float, found int32");
    }

    #[test]
    fn large_tensors_are_split_over_threads_without_gaps() {
        let n = 100_003;
        let a: Vec<f32> = (0..n).map(|i| i as f32).collect();
        let expected: Vec<f32> = a.iter().map(|x| x * 2.0).collect();
        check_op("AddV2").input(a.clone()).input(a).gives(Tensor::from(expected));
    }

    #[test]
    fn small_integers_are_broadcast() {
        let (rows, columns) = (3usize, 150usize);
        let whole: Vec<i16> = (0..rows * columns).map(|i| (i * 311 % 60_000) as i16).collect();
        let row: Vec<i16> = (0..columns).map(|i| (i * 97) as i16).collect();
        let expected = |other: &dyn Fn(usize) -> i16| {
            let sums = whole.iter().enumerate().map(|(i, x)| x.wrapping_sub(other(i))).collect::<Vec<_>>();
            Tensor::from(sums).reshaped([rows, columns].into()).unwrap()
        };
        let whole_tensor = Tensor::from(whole.clone()).reshaped([rows, columns].into()).unwrap();
        let sub = |other: Tensor| check_op("Sub").input(whole_tensor.clone()).input(other);
        sub(Tensor::from(row.clone())).gives(expected(&|i| row[i % columns]));
        sub(tensor([rows, 1], [7i16, -9, 30_000])).gives(expected(&|i| [7, -9, 30_000][i / columns]));
        sub(Tensor::scalar(-5i16)).gives(expected(&|_| -5));
        sub(whole_tensor.clone()).gives(expected(&|i| whole[i]));
        check_op("Sub")
            .input(tensor([2, 1], [5i16, 6]))
            .input(tensor([1, 70], [1i16; 70]))
            .gives(Tensor::from([[4i16; 70], [5; 70]]));
        check_op("Sub")
            .input(0i16)
            .input(Tensor::from(row.clone()))
            .gives(Tensor::from(row.iter().map(|x| -x).collect::<Vec<_>>()));
    }

    #[test]
    fn strings_are_joined() {
        let words = |list: &[&'static str]| {
            let list: Vec<_> = list.iter().map(|word| bytes::Bytes::from_static(word.as_bytes())).collect();
            Tensor::from_strings([list.len()], list).unwrap()
        };
        check_op("Add").input(words(&["a", "bc"])).input(Tensor::from("!")).gives(words(&["a!", "bc!"]));
        check_op("Add").input(words(&["a", ""])).input(words(&["x", "y"])).gives(words(&["ax", "y"]));
    }

    #[test]
    fn the_others() {
        check_op("Sub").input([5.0f32, 1.0]).input([2.0f32, 3.0]).gives([3.0f32, -2.0]);
        check_op("Mul").input([5i64, -1]).input([2i64, 3]).gives([10i64, -3]);
        check_op("RealDiv").input([1.0f32, -1.0]).input([4.0f32, 0.0]).gives([0.25f32, f32::NEG_INFINITY]);
        check_op("Div").input([7i32, -7, i32::MIN]).input([2i32, 2, -1]).gives([3i32, -3, i32::MIN]);
        check_op("Div").input([7i32]).input([0i32]).fails("Integer division by zero");
        check_op("Maximum").input([1.0f32, f32::NAN]).input([2.0f32, 0.0]).gives([2.0f32, f32::NAN]);
        check_op("Minimum").input([1i32, 5]).input([2i32, 3]).gives([1i32, 3]);
        check_op("SquaredDifference").input([5.0f32]).input([2.0f32]).gives([9.0f32]);
    }

    #[test]
    fn gradients_sum_over_what_was_broadcast() {
        for op in ["Add", "AddV2", "Sub", "Mul", "RealDiv", "Maximum", "Minimum", "SquaredDifference"] {
            check_op(op).input(wavy([2, 3], 1)).input(wavy([2, 3], 2)).gradient();
            check_op(op).input(wavy([2, 3], 3)).input(wavy([3], 4)).gradient();
            check_op(op).input(wavy([2, 1, 2], 5)).input(wavy([3, 1], 6)).gradient();
        }
    }
}
