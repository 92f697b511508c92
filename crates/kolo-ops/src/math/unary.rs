//! Elementwise functions of one number that need no series: Neg, Abs, Sign, Square, Reciprocal, Inv, Floor, Ceil, Round,
//! Rint, and the tests IsNan, IsInf, IsFinite.

use half::{bf16, f16};
use kolo_core::Result;
use kolo_graph::{Elements, Elementwise, Grad, Gradient, GradientFn, HalfSafety, HostRule, OpDef, Output, shape_fns};
use num_traits::Float;

use crate::math::binary::first;
use crate::math::elementwise::{expression_kernels, map};
use crate::math::number::{Number, Real};
use crate::op::{Gpu, KernelDef, Op, cpu_kernels};
use crate::{Cost, KernelCtx};

/// `-x`; the operator `-` does the same.
#[track_caller]
pub fn neg(x: Output<'_>) -> Output<'_> {
    -x
}

/// User functions for ops of one input.
macro_rules! unary_builders {
    ($($function:ident, $op:literal, $doc:literal;)*) => {
        $(#[doc = $doc]
        #[track_caller]
        pub fn $function(x: Output<'_>) -> Output<'_> {
            x.graph().op($op).input(x).out()
        })*
    };
}
pub(crate) use unary_builders;

unary_builders! {
    abs, "Abs", "`|x|`, elementwise.";
    sign, "Sign", "-1, 0 or 1 by the sign of each element; NaN stays NaN.";
    square, "Square", "`x²`, elementwise.";
    reciprocal, "Reciprocal", "`1 / x`, elementwise.";
    floor, "Floor", "The largest whole number that is not larger, elementwise.";
    ceil, "Ceil", "The smallest whole number that is not smaller, elementwise.";
    round, "Round", "The nearest whole number, elementwise; the even one of two.";
    is_nan, "IsNan", "Whether each element is NaN.";
    is_inf, "IsInf", "Whether each element is infinite.";
    is_finite, "IsFinite", "Whether each element is neither infinite nor NaN.";
}

const SIGNED: &str = "(x:T) -> (y:T) ; T:type{bfloat16,half,float,double,int8,int16,int32,int64,complex64,complex128}";
const REAL: &str = "(x:T) -> (y:T) ; T:type{bfloat16,half,float,double}";

pub(crate) static NEG: Op = unary("Neg", SIGNED, NEG_KERNELS, |_, dy| only(-first(dy)?))
    .host(HostRule::SmallIntegers)
    .elementwise(Elementwise::new("-x0", Elements::Numbers))
    .half(HalfSafety::Neutral);
pub(crate) static ABS: Op = unary(
    "Abs",
    "(x:T) -> (y:T) ; T:type{bfloat16,half,float,double,int8,int16,int32,int64}",
    ABS_KERNELS,
    |op, dy| only(first(dy)? * sign(op.input(0))),
)
.host(HostRule::SmallIntegers)
.elementwise(Elementwise::new("(x0 < (W)0 || x0 == (W)0) ? (W)0 - x0 : x0", Elements::Numbers))
.half(HalfSafety::Neutral);
pub(crate) static SQUARE: Op =
    unary("Square", "(x:T) -> (y:T) ; T:type{real,complex64,complex128}", SQUARE_KERNELS, |op, dy| {
        only(first(dy)? * (op.input(0) * 2.0))
    })
    .host(HostRule::SmallIntegers)
    .elementwise(Elementwise::new("x0 * x0", Elements::Numbers))
    .half(HalfSafety::Wide);
pub(crate) static RECIPROCAL: Op = unary("Reciprocal", SIGNED, RECIPROCAL_KERNELS, |op, dy| {
    only(op.graph().op("ReciprocalGrad").input(op.output(0)).input(first(dy)?).out())
})
.elementwise(Elementwise::new("(W)1 / x0", Elements::Floats))
.half(HalfSafety::Safe);
pub(crate) static INV: Op = unary("Inv", SIGNED, RECIPROCAL_KERNELS, |op, dy| {
    only(op.graph().op("InvGrad").input(op.output(0)).input(first(dy)?).out())
})
.elementwise(Elementwise::new("(W)1 / x0", Elements::Floats))
.half(HalfSafety::Safe);
pub(crate) static SIGN: Op = step("Sign", SIGNED, SIGN_KERNELS)
    .host(HostRule::SmallIntegers)
    .elementwise(Elementwise::new("x0 > (W)0 ? (W)1 : (x0 < (W)0 ? (W)-1 : x0)", Elements::Numbers))
    .half(HalfSafety::Neutral);
pub(crate) static FLOOR: Op = step("Floor", REAL, FLOOR_KERNELS)
    .elementwise(Elementwise::new("floor(x0)", Elements::Floats))
    .half(HalfSafety::Neutral);
pub(crate) static CEIL: Op = step("Ceil", REAL, CEIL_KERNELS)
    .elementwise(Elementwise::new("ceil(x0)", Elements::Floats))
    .half(HalfSafety::Neutral);
pub(crate) static ROUND: Op = step("Round", SIGNED, ROUND_KERNELS)
    .elementwise(Elementwise::new("rint(x0)", Elements::Floats))
    .half(HalfSafety::Neutral);
pub(crate) static RINT: Op = step("Rint", REAL, RINT_KERNELS)
    .elementwise(Elementwise::new("rint(x0)", Elements::Floats))
    .half(HalfSafety::Neutral);
pub(crate) static IS_NAN: Op = step("IsNan", TEST, IS_NAN_KERNELS)
    .elementwise(Elementwise::new("x0 != x0", Elements::Floats))
    .half(HalfSafety::Neutral);
pub(crate) static IS_INF: Op = step("IsInf", TEST, IS_INF_KERNELS)
    .elementwise(Elementwise::new("isinf(x0)", Elements::Floats))
    .half(HalfSafety::Neutral);
pub(crate) static IS_FINITE: Op = step("IsFinite", TEST, IS_FINITE_KERNELS)
    .elementwise(Elementwise::new("isfinite(x0)", Elements::Floats))
    .half(HalfSafety::Neutral);

const TEST: &str = "(x:T) -> (y:bool) ; T:type{bfloat16,half,float,double}";

/// An op that maps every element by itself and has a gradient.
pub(crate) const fn unary(
    name: &'static str,
    signature: &'static str,
    kernels: &'static [KernelDef],
    gradient: GradientFn,
) -> Op {
    Op {
        def: OpDef {
            name,
            signature,
            shape: shape_fns::same_as_input_0,
            gradient: Gradient::Rule(gradient),
            ..OpDef::BASE
        },
        kernels,
        gpu: Gpu::Unstated,
        cost: Cost::Elements,
    }
}

/// An op that maps every element by itself, in steps.
const fn step(name: &'static str, signature: &'static str, kernels: &'static [KernelDef]) -> Op {
    Op {
        def: OpDef {
            name,
            signature,
            shape: shape_fns::same_as_input_0,
            gradient: Gradient::None("it is piecewise constant"),
            ..OpDef::BASE
        },
        kernels,
        gpu: Gpu::Unstated,
        cost: Cost::Elements,
    }
}

/// The gradient of an op's only input.
pub(crate) fn only(dx: Output<'_>) -> Result<Vec<Option<Grad<'_>>>> {
    Ok(vec![Some(dx.into())])
}

/// About what one element costs; memory-bound loops.
const NS: f64 = 0.3;

expression_kernels! {
    RECIPROCAL_KERNELS, reciprocal_kernel: Real, map(NS), |x| T::ONE / x, (f32, f64; f16, bf16);
    FLOOR_KERNELS, floor_kernel: Real, map(NS), |x| Float::floor(x), (f32, f64; f16, bf16);
    CEIL_KERNELS, ceil_kernel: Real, map(NS), |x| Float::ceil(x), (f32, f64; f16, bf16);
    RINT_KERNELS, rint_kernel: Real, map(NS), |x| x.round_even(), (f32, f64; f16, bf16);
    IS_NAN_KERNELS, is_nan_kernel: Real, map(NS), |x| Float::is_nan(x), (f32, f64; f16, bf16);
    IS_INF_KERNELS, is_inf_kernel: Real, map(NS), |x| Float::is_infinite(x), (f32, f64; f16, bf16);
    IS_FINITE_KERNELS, is_finite_kernel: Real, map(NS), |x| Float::is_finite(x), (f32, f64; f16, bf16);
    SQUARE_KERNELS, square_kernel: Number, map(NS), |x| x.mul(x),
        (f32, f64, i32, i64, u64; f16, bf16, i8, i16, u8, u16, u32);
    // Only the sign changes, so that zero becomes −0.
    NEG_KERNELS, neg_float: Real, map(NS), |x| -x, (f32, f64; f16, bf16 | elementwise neg_integer: i32, i64; i8, i16);
    // As `abs_integer`, but −0 loses its sign.
    ABS_KERNELS, abs_float: Real, map(NS), |x| Float::abs(x),
        (f32, f64; f16, bf16 | elementwise abs_integer: i32, i64; i8, i16);
    // NaN is neither larger nor smaller and falls through as it is, as does zero.
    SIGN_KERNELS, sign_kernel: Number, map(NS),
        |x| if x > T::ZERO { T::ONE } else if x < T::ZERO { T::ZERO.sub(T::ONE) } else { x },
        (f32, f64, i32, i64; f16, bf16, i8, i16);
}

const ROUND_KERNELS: &[KernelDef] =
    cpu_kernels!(elementwise rint_kernel: f32, f64; f16, bf16 | elementwise round_integer: i32, i64; i8, i16);

fn neg_integer<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    map::<T, T>(
        ctx,
        NS,
        #[inline(always)]
        |x| T::ZERO.sub(x),
    )
}

/// Integers wrap: the least one has no positive twin.
fn abs_integer<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    map::<T, T>(
        ctx,
        NS,
        #[inline(always)]
        |x| if x < T::ZERO { T::ZERO.sub(x) } else { x },
    )
}

fn round_integer<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    map::<T, T>(ctx, NS, |x| x)
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};
    use kolo_core::Tensor;

    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn values() {
        check_op("Neg").input([1.0f32, -2.0]).gives([-1.0f32, 2.0]);
        check_op("Neg").input([1i32, i32::MIN]).gives([-1i32, i32::MIN]);
        check_op("Abs").input([1.5f32, -2.5, f32::NEG_INFINITY]).gives([1.5f32, 2.5, f32::INFINITY]);
        check_op("Abs").input([-3i64, 4]).gives([3i64, 4]);
        check_op("Abs").input([i8::MIN]).gives([i8::MIN]);
        check_op("Sign").input([-2.0f32, 0.0, 0.1, f32::NAN]).gives([-1.0f32, 0.0, 1.0, f32::NAN]);
        check_op("Sign").input([-7i32, 0, 9]).gives([-1i32, 0, 1]);
        check_op("Square").input([-3.0f64, 0.5]).gives([9.0f64, 0.25]);
        check_op("Square").input([-3i32, 1 << 16]).gives([9i32, 0]);
        check_op("Square").input(f16::from_f32(1.5)).gives(f16::from_f32(2.25));
        check_op("Reciprocal").input([4.0f32, 0.0]).gives([0.25f32, f32::INFINITY]);
        check_op("Inv").input([bf16::from_f32(-2.0)]).gives([bf16::from_f32(-0.5)]);
    }

    #[test]
    fn the_sign_of_zero() {
        let bits = |op: &str, x: f32| check_op(op).input(x).run(false).unwrap()[0].scalar_value::<f32>().unwrap();
        assert!(bits("Neg", 0.0).is_sign_negative());
        assert!(bits("Abs", -0.0).is_sign_positive());
    }

    #[test]
    fn rounding() {
        let x = [-2.5f32, -1.5, -0.4, 0.5, 1.5, 2.5, 2.6];
        check_op("Floor").input(x).gives([-3.0f32, -2.0, -1.0, 0.0, 1.0, 2.0, 2.0]);
        check_op("Ceil").input(x).gives([-2.0f32, -1.0, 0.0, 1.0, 2.0, 3.0, 3.0]);
        check_op("Round").input(x).gives([-2.0f32, -2.0, 0.0, 0.0, 2.0, 2.0, 3.0]);
        check_op("Rint").input(x.map(f64::from)).gives([-2.0f64, -2.0, 0.0, 0.0, 2.0, 2.0, 3.0]);
        check_op("Round").input([5i32, -7]).gives([5i32, -7]);
        check_op("Floor").input(tensor::<f32, 2>([0, 3], [])).gives(tensor::<f32, 2>([0, 3], []));
    }

    #[test]
    fn tests_of_numbers() {
        let x = [1.0f32, f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
        check_op("IsNan").input(x).gives([false, true, false, false]);
        check_op("IsInf").input(x).gives([false, false, true, true]);
        check_op("IsFinite").input(x).gives([true, false, false, false]);
        check_op("IsFinite").input(f16::INFINITY).gives(false);
    }

    #[test]
    fn large_tensors_have_no_gaps() {
        let x: Vec<f32> = (0..100_003).map(|i| i as f32 - 50_000.0).collect();
        let expected: Vec<f32> = x.iter().map(|x| x.abs()).collect();
        check_op("Abs").input(x).gives(Tensor::from(expected));
    }

    #[test]
    fn gradients() {
        for op in ["Neg", "Abs", "Square", "Reciprocal", "Inv"] {
            check_op(op).input(wavy([5], 1)).gradient();
        }
    }
}
