//! Elementwise functions of one float: roots, exponentials, logarithms, circular and hyperbolic functions, the logistic
//! function. Halves are computed in `float` and rounded once.

use half::{bf16, f16};
use kolo_core::{DType, Result};
use kolo_device::cpu::vmath;
use kolo_graph::{Elements, Elementwise, HalfSafety, Output};
use num_traits::Float;

use crate::KernelCtx;
use crate::math::binary::first;
use crate::math::elementwise::{expression_kernels, map, map_slices};
use crate::math::number::Real;
use crate::math::unary::{only, unary, unary_builders};
use crate::op::{KernelDef, Op, cpu};

unary_builders! {
    sqrt, "Sqrt", "`√x`, elementwise.";
    rsqrt, "Rsqrt", "`1 / √x`, elementwise.";
    exp, "Exp", "`eˣ`, elementwise.";
    expm1, "Expm1", "`eˣ − 1`, elementwise, exact near 0.";
    log, "Log", "The natural logarithm, elementwise.";
    log1p, "Log1p", "`log(1 + x)`, elementwise, exact near 0.";
    sin, "Sin", "The sine, elementwise.";
    cos, "Cos", "The cosine, elementwise.";
    tan, "Tan", "The tangent, elementwise.";
    asin, "Asin", "The inverse sine, elementwise.";
    acos, "Acos", "The inverse cosine, elementwise.";
    atan, "Atan", "The inverse tangent, elementwise.";
    asinh, "Asinh", "The inverse hyperbolic sine, elementwise.";
    acosh, "Acosh", "The inverse hyperbolic cosine, elementwise.";
    atanh, "Atanh", "The inverse hyperbolic tangent, elementwise.";
    sinh, "Sinh", "The hyperbolic sine, elementwise.";
    cosh, "Cosh", "The hyperbolic cosine, elementwise.";
    tanh, "Tanh", "The hyperbolic tangent, elementwise.";
    sigmoid, "Sigmoid", "`1 / (1 + e⁻ˣ)`, elementwise.";
}

/// The ops of this file.
macro_rules! ops {
    ($($op:ident, $name:literal, $text:literal, $half:ident, $kernels:ident, $gradient:expr;)*) => {
        $(pub(crate) static $op: Op = unary($name, SIGNATURE, $kernels, $gradient)
            .elementwise(Elementwise::new($text, Elements::Floats))
            .half(HalfSafety::$half);)*
    };
}

const SIGNATURE: &str = "(x:T) -> (y:T) ; T:type{bfloat16,half,float,double,complex64,complex128}";

ops! {
    SQRT, "Sqrt", "sqrt(x0)", Safe, SQRT_KERNELS, |op, dy| {
        only(op.graph().op("SqrtGrad").input(op.output(0)).input(first(dy)?).out())
    };
    RSQRT, "Rsqrt", "(W)1 / sqrt(x0)", Wide, RSQRT_KERNELS, |op, dy| {
        only(op.graph().op("RsqrtGrad").input(op.output(0)).input(first(dy)?).out())
    };
    EXP, "Exp", "exp(x0)", Wide, EXP_KERNELS, |op, dy| only(first(dy)? * op.output(0));
    EXPM1, "Expm1", "expm1(x0)", Wide, EXPM1_KERNELS, |op, dy| only(first(dy)? * exp(op.input(0)));
    LOG, "Log", "log(x0)", Safe, LOG_KERNELS, |op, dy| only(first(dy)? / op.input(0));
    LOG1P, "Log1p", "log1p(x0)", Safe, LOG1P_KERNELS, |op, dy| only(first(dy)? / (op.input(0) + 1.0));
    SIN, "Sin", "sin(x0)", Safe, SIN_KERNELS, |op, dy| only(first(dy)? * cos(op.input(0)));
    COS, "Cos", "cos(x0)", Safe, COS_KERNELS, |op, dy| only(-(first(dy)? * sin(op.input(0))));
    TAN, "Tan", "tan(x0)", Wide, TAN_KERNELS, |op, dy| only(first(dy)? * (1.0 + op.output(0) * op.output(0)));
    ASIN, "Asin", "asin(x0)", Wide, ASIN_KERNELS, |op, dy| only(first(dy)? * rsqrt(1.0 - op.input(0) * op.input(0)));
    ACOS, "Acos", "acos(x0)", Wide, ACOS_KERNELS, |op, dy| only(-(first(dy)? * rsqrt(1.0 - op.input(0) * op.input(0))));
    ATAN, "Atan", "atan(x0)", Safe, ATAN_KERNELS, |op, dy| only(first(dy)? / (1.0 + op.input(0) * op.input(0)));
    ASINH, "Asinh", "asinh(x0)", Wide, ASINH_KERNELS, |op, dy| only(first(dy)? / cosh(op.output(0)));
    ACOSH, "Acosh", "acosh(x0)", Wide, ACOSH_KERNELS, |op, dy| only(first(dy)? / sinh(op.output(0)));
    ATANH, "Atanh", "atanh(x0)", Wide, ATANH_KERNELS, |op, dy| only(first(dy)? / (1.0 - op.input(0) * op.input(0)));
    SINH, "Sinh", "sinh(x0)", Wide, SINH_KERNELS, |op, dy| only(first(dy)? * cosh(op.input(0)));
    COSH, "Cosh", "cosh(x0)", Wide, COSH_KERNELS, |op, dy| only(first(dy)? * sinh(op.input(0)));
    TANH, "Tanh", "tanh(x0)", Safe, TANH_KERNELS, |op, dy| {
        only(op.graph().op("TanhGrad").input(op.output(0)).input(first(dy)?).out())
    };
    SIGMOID, "Sigmoid", "(W)1 / ((W)1 + exp(-x0))", Safe, SIGMOID_KERNELS, |op, dy| {
        only(op.graph().op("SigmoidGrad").input(op.output(0)).input(first(dy)?).out())
    };
}

expression_kernels! {
    SQRT_KERNELS, sqrt_kernel: Real, map(0.5), |x| Float::sqrt(x), (f32, f64; f16, bf16);
    EXPM1_KERNELS, expm1_kernel: Real, map(8.0), |x| Float::exp_m1(x), (f32, f64; f16, bf16);
    LOG1P_KERNELS, log1p_kernel: Real, map(8.0), |x| Float::ln_1p(x), (f32, f64; f16, bf16);
    SIN_KERNELS, sin_kernel: Real, map(8.0), |x| Float::sin(x), (f32, f64; f16, bf16);
    COS_KERNELS, cos_kernel: Real, map(8.0), |x| Float::cos(x), (f32, f64; f16, bf16);
    TAN_KERNELS, tan_kernel: Real, map(12.0), |x| Float::tan(x), (f32, f64; f16, bf16);
    ASIN_KERNELS, asin_kernel: Real, map(10.0), |x| Float::asin(x), (f32, f64; f16, bf16);
    ACOS_KERNELS, acos_kernel: Real, map(10.0), |x| Float::acos(x), (f32, f64; f16, bf16);
    ATAN_KERNELS, atan_kernel: Real, map(10.0), |x| Float::atan(x), (f32, f64; f16, bf16);
    ASINH_KERNELS, asinh_kernel: Real, map(12.0), |x| Float::asinh(x), (f32, f64; f16, bf16);
    ACOSH_KERNELS, acosh_kernel: Real, map(12.0), |x| Float::acosh(x), (f32, f64; f16, bf16);
    ATANH_KERNELS, atanh_kernel: Real, map(12.0), |x| Float::atanh(x), (f32, f64; f16, bf16);
    SINH_KERNELS, sinh_kernel: Real, map(12.0), |x| Float::sinh(x), (f32, f64; f16, bf16);
    COSH_KERNELS, cosh_kernel: Real, map(12.0), |x| Float::cosh(x), (f32, f64; f16, bf16);
}

/// Kernels for which `float` has a loop over whole slices, in place or from one slice to another.
macro_rules! fast_kernels {
    ($($table:ident, $double:ident, $fast:ident, $in_place:path, $between:path, |$x:ident| $body:expr;)*) => {
        $(fn $double(ctx: &mut KernelCtx<'_>) -> Result<()> {
            map::<f64, f64>(ctx, 6.0, #[inline(always)] |$x| $body)
        }
        fn $fast(ctx: &mut KernelCtx<'_>) -> Result<()> {
            map_slices::<f32>(ctx, 0.6, $in_place, $between)
        }
        const $table: &[KernelDef] = &[
            cpu(DType::F32, $fast),
            cpu(DType::F64, $double),
            cpu(DType::F16, $fast),
            cpu(DType::BF16, $fast),
        ];)*
    };
}

fast_kernels! {
    EXP_KERNELS, exp_f64, exp_f32, vmath::exp_f32, vmath::exp_f32_to, |x| x.exp();
    LOG_KERNELS, log_f64, log_f32, vmath::log_f32, vmath::log_f32_to, |x| x.ln();
    RSQRT_KERNELS, rsqrt_f64, rsqrt_f32, vmath::rsqrt_f32, vmath::rsqrt_f32_to, |x| 1.0 / x.sqrt();
    TANH_KERNELS, tanh_f64, tanh_f32, vmath::tanh_f32, vmath::tanh_f32_to, |x| x.tanh();
    // Far below zero the exponential is infinite and the result 0, as it should be.
    SIGMOID_KERNELS, sigmoid_f64, sigmoid_f32, vmath::sigmoid_f32, vmath::sigmoid_f32_to, |x| 1.0 / (1.0 + (-x).exp());
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};
    use kolo_core::Tensor;

    use crate::testing::{check_op, tensor};

    /// The op gives what the standard library does, in every precision.
    fn check(op: &str, function: fn(f64) -> f64, inputs: &[f64]) {
        let expected: Vec<f64> = inputs.iter().map(|&x| function(x)).collect();
        check_op(op).tolerance(1e-14).input(inputs).gives(Tensor::from(expected.clone()));
        let to_f32 = |values: &[f64]| values.iter().map(|&x| x as f32).collect::<Vec<_>>();
        check_op(op).tolerance(3e-7).input(to_f32(inputs)).gives(Tensor::from(to_f32(&expected)));
        // Inputs that a half holds exactly, so that only the result is rounded.
        let halves: Vec<f64> = inputs.iter().map(|&x| bf16::from_f64(x).to_f64()).collect();
        let expected: Vec<f64> = halves.iter().map(|&x| function(x)).collect();
        let to_bf16 = |values: &[f64]| values.iter().map(|&x| bf16::from_f64(x)).collect::<Vec<_>>();
        check_op(op).tolerance(4e-3).input(to_bf16(&halves)).gives(Tensor::from(to_bf16(&expected)));
        let to_f16 = |values: &[f64]| values.iter().map(|&x| f16::from_f64(x)).collect::<Vec<_>>();
        check_op(op).tolerance(5e-4).input(to_f16(&halves)).gives(Tensor::from(to_f16(&expected)));
        check_op(op).input(tensor::<f32, 1>([0], [])).gives(tensor::<f32, 1>([0], []));
        check_op(op).input(to_f32(inputs)).gradient();
    }

    #[test]
    fn every_function() {
        let any = [-2.3, -0.7, -0.01, 0.02, 0.6, 1.1, 3.7];
        let positive = [0.01, 0.3, 1.0, 2.5, 7.0];
        let within_one = [-0.9, -0.3, 0.01, 0.5, 0.8];
        check("Sqrt", f64::sqrt, &positive);
        check("Rsqrt", |x| 1.0 / x.sqrt(), &positive);
        check("Exp", f64::exp, &any);
        check("Expm1", f64::exp_m1, &any);
        check("Log", f64::ln, &positive);
        check("Log1p", f64::ln_1p, &positive);
        check("Sin", f64::sin, &any);
        check("Cos", f64::cos, &any);
        check("Tan", f64::tan, &any);
        check("Asin", f64::asin, &within_one);
        check("Acos", f64::acos, &within_one);
        check("Atan", f64::atan, &any);
        check("Asinh", f64::asinh, &any);
        check("Acosh", f64::acosh, &[1.25, 1.5, 2.5, 7.0]);
        check("Atanh", f64::atanh, &within_one);
        check("Sinh", f64::sinh, &any);
        check("Cosh", f64::cosh, &any);
        check("Tanh", f64::tanh, &any);
        check("Sigmoid", |x| 1.0 / (1.0 + (-x).exp()), &any);
    }

    #[test]
    fn edges() {
        check_op("Sqrt").input([-1.0f32, 0.0, f32::INFINITY]).gives([f32::NAN, 0.0, f32::INFINITY]);
        check_op("Rsqrt").input([0.0f32, f32::INFINITY]).gives([f32::INFINITY, 0.0]);
        check_op("Log").input([0.0f32, -1.0, f32::INFINITY]).gives([f32::NEG_INFINITY, f32::NAN, f32::INFINITY]);
        check_op("Exp").input([1000.0f32, -1000.0, f32::NAN]).gives([f32::INFINITY, 0.0, f32::NAN]);
        check_op("Sigmoid").input([1000.0f32, -1000.0, 0.0, f32::NAN]).gives([1.0f32, 0.0, 0.5, f32::NAN]);
        check_op("Tanh").input([50.0f32, -50.0, 0.0, f32::NAN]).gives([1.0f32, -1.0, 0.0, f32::NAN]);
        check_op("Acosh").input([0.5f32, 1.0]).gives([f32::NAN, 0.0]);
        check_op("Atanh").input([1.0f32, -1.0, 1.5]).gives([f32::INFINITY, f32::NEG_INFINITY, f32::NAN]);
        check_op("Exp").input([1i32]).fails("int32");
    }

    #[test]
    fn large_tensors_have_no_gaps() {
        let x: Vec<f32> = (0..50_003).map(|i| (i % 2000) as f32 * 0.01 - 10.0).collect();
        for (op, function) in
            [("Exp", f64::exp as fn(f64) -> f64), ("Tanh", f64::tanh), ("Sigmoid", |x| 1.0 / (1.0 + (-x).exp()))]
        {
            let expected: Vec<f32> = x.iter().map(|&x| function(f64::from(x)) as f32).collect();
            check_op(op).tolerance(5e-7).input(x.clone()).gives(Tensor::from(expected));
        }
        let x: Vec<f32> = (0..50_003).map(|i| (i + 1) as f32 * 0.01).collect();
        let expected: Vec<f32> = x.iter().map(|x| x.ln()).collect();
        check_op("Log").tolerance(5e-7).input(x).gives(Tensor::from(expected));
    }
}
