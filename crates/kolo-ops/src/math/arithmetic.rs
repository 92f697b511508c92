//! More elementwise ops of two numbers, with NumPy's broadcasting: Pow, DivNoNan, FloorDiv, TruncateDiv, FloorMod, Mod,
//! TruncateMod, Atan2.

use half::{bf16, f16};
use kolo_core::{Error, Result};
use kolo_graph::{
    Elements, Elementwise, Grad, Gradient, HalfSafety, HostRule, IntoOutput, OpDef, Operation, Output, shape_fns,
};
use num_traits::{Float, PrimInt};

use crate::math::binary::{NUMBERS, ORDERED, first, reduced, refuse_division_by_zero};
use crate::math::elementwise::{Computed, expression_kernels, zip};
use crate::math::number::Real;
use crate::op::{Gpu, KernelDef, Op};
use crate::{Cost, KernelCtx};

macro_rules! builders {
    ($($function:ident, $op:literal, $doc:literal;)*) => {
        $(#[doc = $doc]
        #[track_caller]
        pub fn $function<'g>(a: Output<'g>, b: Output<'g>) -> Output<'g> {
            a.graph().op($op).input(a).input(b).out()
        })*
    };
}

builders! {
    pow, "Pow", "`aᵇ`, elementwise.";
    div_no_nan, "DivNoNan", "`a / b`, elementwise, and 0 where `b` is 0.";
    floor_div, "FloorDiv", "`a / b` rounded down, elementwise.";
    floor_mod, "FloorMod", "What is left of `a` after division by `b`, with the sign of `b`, elementwise.";
    atan2, "Atan2", "The angle of the point `(b, a)`, elementwise.";
}

pub(crate) static POW: Op = binary(
    "Pow",
    "(x:T, y:T) -> (z:T) ; T:type{bfloat16,float,half,double,int8,int16,int32,int64,complex64,complex128}",
    POW_KERNELS,
    Gradient::Rule(|op, dz| {
        let (graph, x, y, dz) = (op.graph(), op.input(0), op.input(1), first(dz)?);
        let one = 1.0.into_output(graph, x.dtype());
        let zero = 0.0.into_output(graph, x.dtype());
        let is_positive = graph.op("Greater").input(x).input(zero).out();
        // Where x is not positive, aᵇ is not differentiable in b; TensorFlow takes 0, the logarithm of 1.
        let base = graph.op("SelectV2").inputs([is_positive, x, one]).out();
        let log = graph.op("Log").input(base).out();
        reduced(op, dz * y * pow(x, y - one), dz * op.output(0) * log)
    }),
)
.elementwise(Elementwise::new("pow(x0, x1)", Elements::Floats))
.half(HalfSafety::Wide);
pub(crate) static DIV_NO_NAN: Op = binary(
    "DivNoNan",
    "(x:T, y:T) -> (z:T) ; T:type{half,float,bfloat16,double,complex64,complex128}",
    DIV_NO_NAN_KERNELS,
    Gradient::Rule(|op, dz| {
        let (y, dz) = (op.input(1), first(dz)?);
        reduced(op, div_no_nan(dz, y), -(dz * div_no_nan(op.output(0), y)))
    }),
)
.elementwise(Elementwise::new("x1 == (W)0 ? (W)0 : x0 / x1", Elements::Floats))
.half(HalfSafety::Safe);
pub(crate) static FLOOR_DIV: Op =
    binary("FloorDiv", NUMBERS, FLOOR_DIV_KERNELS, Gradient::None("a quotient rounded down is piecewise constant"))
        .host(HostRule::SmallIntegers)
        .elementwise(Elementwise::new("floor(x0 / x1)", Elements::Floats))
        .half(HalfSafety::Safe);
pub(crate) static TRUNCATE_DIV: Op = binary(
    "TruncateDiv",
    NUMBERS,
    TRUNCATE_DIV_KERNELS,
    Gradient::None("a quotient cut to an integer is piecewise constant"),
)
.host(HostRule::SmallIntegers)
.elementwise(Elementwise::new("trunc(x0 / x1)", Elements::Floats))
.half(HalfSafety::Safe);
pub(crate) static FLOOR_MOD: Op = binary(
    "FloorMod",
    ORDERED,
    FLOOR_MOD_KERNELS,
    Gradient::Rule(|op, dz| {
        let dz = first(dz)?;
        reduced(op, dz, -(dz * floor_div(op.input(0), op.input(1))))
    }),
)
.host(HostRule::SmallIntegers)
.elementwise(Elementwise::new(
    "(fmod(x0, x1) != (W)0 && ((fmod(x0, x1) < (W)0) != (x1 < (W)0))) ? fmod(x0, x1) + x1 : fmod(x0, x1)",
    Elements::Floats,
))
.half(HalfSafety::Safe);
const REST: &str = "(x:T, y:T) -> (z:T) ; T:type{int32,int64,half,bfloat16,float,double}";
pub(crate) static MOD: Op = binary("Mod", REST, MOD_KERNELS, Gradient::Rule(rest_gradient))
    .host(HostRule::SmallIntegers)
    .elementwise(Elementwise::new("fmod(x0, x1)", Elements::Floats))
    .half(HalfSafety::Safe);
/// The newer name of `Mod`.
pub(crate) static TRUNCATE_MOD: Op = binary("TruncateMod", REST, MOD_KERNELS, Gradient::Rule(rest_gradient))
    .host(HostRule::SmallIntegers)
    .elementwise(Elementwise::new("fmod(x0, x1)", Elements::Floats))
    .half(HalfSafety::Safe);
pub(crate) static ATAN2: Op = Op {
    def: OpDef {
        name: "Atan2",
        signature: "(y:T, x:T) -> (z:T) ; T:type{bfloat16,half,float,double}",
        shape: shape_fns::broadcast,
        gradient: Gradient::Rule(|op, dz| {
            let (y, x) = (op.input(0), op.input(1));
            let each = first(dz)? / (x * x + y * y);
            reduced(op, each * x, -(each * y))
        }),
        elementwise: Some(Elementwise::new("atan2(x0, x1)", Elements::Floats)),
        half: HalfSafety::Safe,
        ..OpDef::BASE
    },
    kernels: ATAN2_KERNELS,
    gpu: Gpu::Kernels(crate::cuda::elementwise::kernels(Elements::Floats)),
    cost: Cost::Elements,
};

/// What is left after a division towards zero moves with `x`, and against `y` by the whole quotient.
fn rest_gradient<'g>(op: Operation<'g>, dz: &[Option<Output<'g>>]) -> Result<Vec<Option<Grad<'g>>>> {
    let (graph, dz) = (op.graph(), first(dz)?);
    let quotient = op.input(0) / op.input(1);
    let of = |name: &str, x: Output<'g>| graph.op(name).input(x).out();
    // Towards zero: down, of the magnitude.
    let whole = of("Sign", quotient) * of("Floor", of("Abs", quotient));
    reduced(op, dz, -(dz * whole))
}

const fn binary(name: &'static str, signature: &'static str, kernels: &'static [KernelDef], gradient: Gradient) -> Op {
    Op {
        def: OpDef { name, signature, shape: shape_fns::broadcast, gradient, ..OpDef::BASE },
        kernels,
        gpu: Gpu::Unstated,
        cost: Cost::Elements,
    }
}

expression_kernels! {
    POW_KERNELS, pow_float: Real, zip(20.0), |a, b| Float::powf(a, b),
        (f32, f64; f16, bf16 | pow_integer: i32, i64; i8, i16);
    DIV_NO_NAN_KERNELS, div_no_nan_float: Real, zip(0.5), |a, b| if b == T::ZERO { T::ZERO } else { a / b },
        (f32, f64; f16, bf16);
    FLOOR_DIV_KERNELS, floor_div_float: Real, zip(1.0), |a, b| Float::floor(a / b),
        (f32, f64; f16, bf16 | floor_div_integer: i32, i64, u64; i8, i16, u8, u16, u32);
    TRUNCATE_DIV_KERNELS, truncate_div_float: Real, zip(1.0), |a, b| Float::trunc(a / b),
        (f32, f64; f16, bf16 | truncate_div_integer: i32, i64, u64; i8, i16, u8, u16, u32);
    FLOOR_MOD_KERNELS, floor_mod_float: Real, zip(10.0), |a, b| {
        let rest = a % b;
        if rest != T::ZERO && (rest < T::ZERO) != (b < T::ZERO) { rest + b } else { rest }
    },
        (f32, f64; f16, bf16 | floor_mod_integer: i32, i64, u64; i8, i16, u8, u16, u32);
    MOD_KERNELS, mod_float: Real, zip(10.0), |a, b| a % b,
        (f32, f64; f16, bf16 | mod_integer: i32, i64);
    ATAN2_KERNELS, atan2_float: Real, zip(20.0), |a, b| Float::atan2(a, b),
        (f32, f64; f16, bf16);
}

/// An integer kernel that divides, so that no divisor may be 0.
fn divide<T: Computed + PrimInt>(ctx: &mut KernelCtx<'_>, f: impl Fn(T, T) -> T + Sync + Copy) -> Result<()> {
    refuse_division_by_zero::<T>(ctx)?;
    zip::<T, T>(ctx, 3.0, f)
}

/// What is left of `a`, with the sign of `a`. The divisor −1, for which the quotient may overflow, leaves nothing.
fn rest_of<T: PrimInt>(a: T, b: T) -> T {
    if b.is_zero() || (b < T::zero() && (b + T::one()).is_zero()) { T::zero() } else { a % b }
}

/// The quotient towards zero; the only overflow, MIN / −1, wraps.
fn quotient<T: PrimInt>(a: T, b: T) -> T {
    a.checked_div(&b).unwrap_or(a)
}

fn floor_div_integer<T: Computed + PrimInt>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    divide::<T>(ctx, |a, b| {
        let rounds_up = !rest_of(a, b).is_zero() && (a < T::zero()) != (b < T::zero());
        if rounds_up { quotient(a, b) - T::one() } else { quotient(a, b) }
    })
}

fn truncate_div_integer<T: Computed + PrimInt>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    divide::<T>(ctx, quotient)
}

fn floor_mod_integer<T: Computed + PrimInt>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    divide::<T>(ctx, |a, b| {
        let rest = rest_of(a, b);
        if !rest.is_zero() && (rest < T::zero()) != (b < T::zero()) { rest + b } else { rest }
    })
}

fn mod_integer<T: Computed + PrimInt>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    divide::<T>(ctx, rest_of)
}

fn pow_integer<T: Computed + PrimInt + num_traits::WrappingMul>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    if ctx.data::<T>(1)?.iter().any(|&exponent| exponent < T::zero()) {
        return Err(Error::invalid_argument("Integers to negative integer powers are not allowed"));
    }
    zip::<T, T>(ctx, 10.0, |base, exponent| {
        let (mut base, mut power, mut exponent) = (base, T::one(), exponent);
        while exponent > T::zero() {
            if exponent & T::one() == T::one() {
                power = power.wrapping_mul(&base);
            }
            base = base.wrapping_mul(&base);
            exponent = exponent >> 1;
        }
        power
    })
}

#[cfg(test)]
mod tests {
    use half::f16;

    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn powers() {
        check_op("Pow").input([2.0f32, 9.0, -2.0, 0.0]).input([3.0f32, 0.5, 2.0, 0.0]).gives([8.0f32, 3.0, 4.0, 1.0]);
        check_op("Pow").input([2i32, -3, 5, 0]).input([10i32, 3, 0, 0]).gives([1024i32, -27, 1, 1]);
        check_op("Pow").input([[2i64], [3]]).input([1i64, 2]).gives([[2i64, 4], [3, 9]]);
        check_op("Pow").input([2i8]).input([9i8]).gives([0i8]);
        check_op("Pow").input([2i32]).input([-1i32]).fails("negative integer powers are not allowed");
        check_op("Pow").input(f16::from_f32(3.0)).input(f16::from_f32(2.0)).gives(f16::from_f32(9.0));
        check_op("Pow").input(tensor::<i32, 1>([0], [])).input(2i32).gives(tensor::<i32, 1>([0], []));
    }

    #[test]
    fn division_by_zero() {
        check_op("DivNoNan").input([1.0f32, 0.0, 6.0]).input([0.0f32, 0.0, 3.0]).gives([0.0f32, 0.0, 2.0]);
        for op in ["FloorDiv", "TruncateDiv", "FloorMod", "Mod", "TruncateMod"] {
            check_op(op).input([1i32]).input([0i32]).fails("Integer division by zero");
            check_op(op).input(tensor::<i32, 1>([0], [])).input(0i32).gives(tensor::<i32, 1>([0], []));
        }
    }

    #[test]
    fn quotients_and_rests() {
        let (a, b) = ([7i32, -7, 7, -7, i32::MIN], [3i32, 3, -3, -3, -1]);
        check_op("FloorDiv").input(a).input(b).gives([2i32, -3, -3, 2, i32::MIN]);
        check_op("TruncateDiv").input(a).input(b).gives([2i32, -2, -2, 2, i32::MIN]);
        check_op("FloorMod").input(a).input(b).gives([1i32, 2, -2, -1, 0]);
        check_op("Mod").input(a).input(b).gives([1i32, -1, 1, -1, 0]);
        check_op("FloorMod").input([200u8, 255]).input([7u8, 255]).gives([4u8, 0]);
        let (a, b) = ([7.5f32, -7.5, 7.5, -7.5], [3.0f32, 3.0, -3.0, -3.0]);
        check_op("FloorDiv").input(a).input(b).gives([2.0f32, -3.0, -3.0, 2.0]);
        check_op("FloorMod").input(a).input(b).gives([1.5f32, 1.5, -1.5, -1.5]);
        check_op("Mod").input(a).input(b).gives([1.5f32, -1.5, 1.5, -1.5]);
        check_op("TruncateDiv").input(a).input(b).gives([2.0f32, -2.0, -2.0, 2.0]);
        check_op("FloorMod").input([6.0f32, -6.0]).input(3.0f32).gives([0.0f32, 0.0]);
    }

    #[test]
    fn angles() {
        use std::f64::consts::{FRAC_PI_2, FRAC_PI_4};
        check_op("Atan2").input([1.0f64, 1.0, -1.0]).input([1.0f64, 0.0, -1.0]).gives([
            FRAC_PI_4,
            FRAC_PI_2,
            -3.0 * FRAC_PI_4,
        ]);
    }

    #[test]
    fn gradients() {
        for op in ["DivNoNan", "FloorMod", "Mod", "TruncateMod", "Atan2"] {
            check_op(op).input(wavy([4], 1)).input(wavy([4], 2)).gradient();
            check_op(op).input(wavy([2, 3], 1)).input(wavy([3], 2)).gradient();
        }
        check_op("Pow").input([0.5f32, 1.3, 2.0]).input(wavy([2, 3], 2)).gradient();
    }

    #[test]
    fn a_power_of_zero_has_a_gradient() {
        let g = crate::graph();
        let (x, y) = (g.constant([0.0f32, -2.0]), g.constant([2.0f32, 2.0]));
        let grads = kolo_graph::gradients(&[super::pow(x, y)], &[x, y]).unwrap();
        let grads: Vec<_> = grads.into_iter().map(|grad| grad.unwrap().dense().unwrap()).collect();
        let found = crate::testing::evaluate(&g, &grads, &[]).unwrap();
        assert_eq!(found, [[0.0f32, -4.0].into(), [0.0f32, 0.0].into()]);
    }
}
