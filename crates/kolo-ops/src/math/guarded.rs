//! Products and quotients in which an exact 0 wins over whatever the other side is, NaN and infinities included: MulNoNan, Xdivy,
//! Xlogy, Xlog1py.

use half::{bf16, f16};
use kolo_graph::{Elements, Elementwise, GradientFn, HalfSafety, OpDef, Output, shape_fns};
use num_traits::Float;

use crate::Cost;
use crate::array::cast::cast;
use crate::array::fill::zeros_like;
use crate::math::binary::{first, reduced};
use crate::math::elementwise::{expression_kernels, zip};
use crate::math::number::Real;
use crate::op::{Gpu, KernelDef, Op};

macro_rules! builders {
    ($($function:ident, $op:literal, $doc:literal;)*) => {
        $(#[doc = $doc]
        #[track_caller]
        pub fn $function<'g>(x: Output<'g>, y: Output<'g>) -> Output<'g> {
            x.graph().op($op).input(x).input(y).out()
        })*
    };
}

builders! {
    mul_no_nan, "MulNoNan", "`x · y`, elementwise, and 0 where `y` is 0.";
    xdivy, "Xdivy", "`x / y`, elementwise, and 0 where `x` is 0.";
    xlogy, "Xlogy", "`x · log(y)`, elementwise, and 0 where `x` is 0.";
    xlog1py, "Xlog1py", "`x · log(1 + y)`, elementwise, and 0 where `x` is 0.";
}

const X_FIRST: &str = "(x:T, y:T) -> (z:T) ; T:type{half,bfloat16,float,double,complex64,complex128}";

pub(crate) static MUL_NO_NAN: Op = guarded("MulNoNan", X_FIRST, MUL_NO_NAN_KERNELS, |op, dz| {
    let (x, y, dz) = (op.input(0), op.input(1), first(dz)?);
    reduced(op, mul_no_nan(dz, y), mul_no_nan(x, dz))
})
.elementwise(Elementwise::new("x1 == (W)0 ? (W)0 : x0 * x1", Elements::Floats));
pub(crate) static XDIVY: Op = guarded("Xdivy", X_FIRST, XDIVY_KERNELS, |op, dz| {
    let (x, y, dz) = (op.input(0), op.input(1), first(dz)?);
    reduced(op, xdivy(is_not_zero(x), y) * dz, xdivy(-x, y * y) * dz)
})
.elementwise(Elementwise::new("x0 == (W)0 ? (W)0 : x0 / x1", Elements::Floats));
pub(crate) static XLOGY: Op = guarded("Xlogy", X_FIRST, XLOGY_KERNELS, |op, dz| {
    let (x, y, dz) = (op.input(0), op.input(1), first(dz)?);
    reduced(op, xlogy(is_not_zero(x), y) * dz, xdivy(x, y) * dz)
})
.elementwise(Elementwise::new("x0 == (W)0 ? (W)0 : x0 * log(x1)", Elements::Floats));
pub(crate) static XLOG1PY: Op = guarded("Xlog1py", X_FIRST, XLOG1PY_KERNELS, |op, dz| {
    let (x, y, dz) = (op.input(0), op.input(1), first(dz)?);
    reduced(op, xlog1py(is_not_zero(x), y) * dz, xdivy(x, y + 1.0) * dz)
})
.elementwise(Elementwise::new("x0 == (W)0 ? (W)0 : x0 * log1p(x1)", Elements::Floats));

/// 1 where `x` is not 0, else 0. Where `x` is 0, the result does not depend on it as far as TensorFlow's gradients go.
fn is_not_zero(x: Output<'_>) -> Output<'_> {
    let mask = x.graph().op("NotEqual").inputs([x, zeros_like(x)]).out();
    cast(mask, x.dtype())
}

const fn guarded(
    name: &'static str,
    signature: &'static str,
    kernels: &'static [KernelDef],
    gradient: GradientFn,
) -> Op {
    Op {
        def: OpDef {
            name,
            signature,
            shape: shape_fns::broadcast,
            gradient: kolo_graph::Gradient::Rule(gradient),
            half: HalfSafety::Safe,
            ..OpDef::BASE
        },
        kernels,
        gpu: Gpu::Unstated,
        cost: Cost::Elements,
    }
}

expression_kernels! {
    MUL_NO_NAN_KERNELS, mul_no_nan_kernel: Real, zip(0.5), |x, y| if y == T::ZERO { T::ZERO } else { x * y },
        (f32, f64; f16, bf16);
    XDIVY_KERNELS, xdivy_kernel: Real, zip(0.5), |x, y| if x == T::ZERO { T::ZERO } else { x / y },
        (f32, f64; f16, bf16);
    XLOGY_KERNELS, xlogy_kernel: Real, zip(8.0), |x, y| if x == T::ZERO { T::ZERO } else { x * Float::ln(y) },
        (f32, f64; f16, bf16);
    XLOG1PY_KERNELS, xlog1py_kernel: Real, zip(8.0), |x, y| if x == T::ZERO { T::ZERO } else { x * Float::ln_1p(y) },
        (f32, f64; f16, bf16);
}

#[cfg(test)]
mod tests {
    use crate::testing::{check_op, wavy};

    #[test]
    fn zero_wins() {
        let bad = [f32::NAN, f32::INFINITY, 0.0, 2.0];
        check_op("MulNoNan").input(bad).input(0.0f32).gives([0.0f32; 4]);
        check_op("MulNoNan").input([0.0f32, 3.0]).input([f32::NAN, 2.0]).gives([f32::NAN, 6.0]);
        for op in ["Xdivy", "Xlogy", "Xlog1py"] {
            check_op(op).input(0.0f32).input(bad).gives([0.0f32; 4]);
        }
        let e = std::f64::consts::E;
        check_op("Xlogy").input([2.0f64, 3.0]).input([e, 0.0]).gives([2.0f64, f64::NEG_INFINITY]);
        check_op("Xlog1py").input([2.0f64]).input([e - 1.0]).gives([2.0f64]);
        check_op("Xdivy").input([[1.0f32], [0.0]]).input([2.0f32, 0.0]).gives([[0.5f32, f32::INFINITY], [0.0, 0.0]]);
    }

    #[test]
    fn gradients() {
        for op in ["MulNoNan", "Xdivy", "Xlogy", "Xlog1py"] {
            check_op(op).input(wavy([2, 3], 1)).input([0.5f32, 1.5, 2.5]).gradient();
        }
    }
}
