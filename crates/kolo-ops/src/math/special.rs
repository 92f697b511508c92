//! `Erf`, `Erfc`, `Lgamma`, `Digamma`, elementwise.
//!
//! All but `Erf` of `float` are computed in double precision. For the error functions, `erfc(x) = t · exp(−x² + g(t))` with `t = 2 / (2 + x)`
//! for `x ≥ 0`; `g` is smooth on all of `0 < t ≤ 1`, and its Chebyshev coefficients below were computed with 60 digits
//! from series and continued fractions. The gamma functions use Stirling's series above 10 and recurrences below.

use half::{bf16, f16};
use kolo_core::{DType, Result};
use kolo_device::cpu::vmath;
use kolo_graph::{Elements, Elementwise, Gradient, HalfSafety, OpDef, Output, shape_fns};

use crate::math::binary::first;
use crate::math::elementwise::{map, map_slices};
use crate::math::number::Number;
use crate::math::transcendental::exp;
use crate::math::unary::{only, unary, unary_builders};
use crate::op::{Gpu, KernelDef, Op, cpu, cpu_kernels};
use crate::{Cost, KernelCtx};

unary_builders! {
    erf, "Erf", "The error function, elementwise.";
    erfc, "Erfc", "`1 − erf(x)`, elementwise, exact for large `x`.";
    lgamma, "Lgamma", "The logarithm of `|Γ(x)|`, elementwise.";
    digamma, "Digamma", "The derivative of the logarithm of `Γ(x)`, elementwise.";
}

const SIGNATURE: &str = "(x:T) -> (y:T) ; T:type{bfloat16,half,float,double}";

pub(crate) static ERF: Op = unary("Erf", SIGNATURE, ERF_KERNELS, |op, dy| {
    let x = op.input(0);
    only(first(dy)? * (exp(-(x * x)) * std::f64::consts::FRAC_2_SQRT_PI))
})
.elementwise(Elementwise::new("erf(x0)", Elements::Floats))
.half(HalfSafety::Safe);
pub(crate) static ERFC: Op = unary("Erfc", SIGNATURE, ERFC_KERNELS, |op, dy| {
    let x = op.input(0);
    only(first(dy)? * (exp(-(x * x)) * -std::f64::consts::FRAC_2_SQRT_PI))
})
.elementwise(Elementwise::new("erfc(x0)", Elements::Floats))
.half(HalfSafety::Safe);
pub(crate) static LGAMMA: Op =
    unary("Lgamma", SIGNATURE, LGAMMA_KERNELS, |op, dy| only(first(dy)? * digamma(op.input(0))))
        .elementwise(Elementwise::new("lgamma(x0)", Elements::Floats))
        .half(HalfSafety::Wide);
pub(crate) static DIGAMMA: Op = Op {
    def: OpDef {
        name: "Digamma",
        signature: SIGNATURE,
        shape: shape_fns::same_as_input_0,
        gradient: Gradient::Refused("the trigamma function is not provided"),
        half: HalfSafety::Wide,
        ..OpDef::BASE
    },
    kernels: DIGAMMA_KERNELS,
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

/// Chebyshev coefficients of `g`; 14 of them are enough for `float`.
const ERFC_SERIES: [f64; 28] = [
    -1.3026537197817094,
    0.6419697923564902,
    0.019476473204185836,
    -0.009561514786808632,
    -0.0009465953444820369,
    0.00036683949785276145,
    4.252332480690777e-05,
    -2.0278578112534242e-05,
    -1.6242900046470256e-06,
    1.3036558355805232e-06,
    1.5626441722066142e-08,
    -8.523809591492654e-08,
    6.5290544390988515e-09,
    5.059343495551469e-09,
    -9.91364156493033e-10,
    -2.273651222931836e-10,
    9.646791102015527e-11,
    2.3940380830391146e-12,
    -6.886027526497553e-12,
    8.944879273090725e-13,
    3.130921399342958e-13,
    -1.1270822361367252e-13,
    3.810905255189232e-16,
    7.106097613609237e-15,
    -1.5230282014571041e-15,
    -9.457494571291254e-17,
    1.210237189224273e-16,
    -2.816663087746774e-17,
];

/// `erfc(x)` for `x ≥ 0` by the first `N` coefficients, summed by Clenshaw's recurrence.
#[inline(always)]
fn erfc_of_positive<const N: usize>(x: f64) -> f64 {
    let t = 2.0 / (2.0 + x);
    let y = 2.0 * t - 1.0;
    let (mut d, mut dd) = (0.0, 0.0);
    for &c in ERFC_SERIES[1..N].iter().rev() {
        (d, dd) = (2.0 * y * d - dd + c, d);
    }
    t * (0.5 * ERFC_SERIES[0] + y * d - dd - x * x).exp()
}

#[inline(always)]
fn erfc_f64<const N: usize>(x: f64) -> f64 {
    let tail = erfc_of_positive::<N>(x.abs());
    if x < 0.0 { 2.0 - tail } else { tail }
}

#[inline(always)]
fn erf_f64<const N: usize>(x: f64) -> f64 {
    if x.abs() < 0.5 {
        // Near 0 the difference from 1 would cancel. Σ (−1)ⁿ x²ⁿ⁺¹ / (n! (2n + 1)); the last term is below 1e-17.
        let square = x * x;
        let (mut power, mut sum) = (1.0, 1.0);
        for n in 1..13 {
            power *= -square / f64::from(n);
            sum += power / f64::from(2 * n + 1);
        }
        return std::f64::consts::FRAC_2_SQRT_PI * x * sum;
    }
    let magnitude = 1.0 - erfc_of_positive::<N>(x.abs());
    if x < 0.0 { -magnitude } else { magnitude }
}

/// Where Stirling's series, cut after the terms below, is exact to double precision.
const LARGE: f64 = 10.0;

/// `log |Γ(x)|`; infinite at 0 and the negative integers.
fn lgamma_f64(x: f64) -> f64 {
    if x.is_nan() {
        return x;
    }
    if x.is_infinite() {
        return f64::INFINITY;
    }
    if x < 0.5 {
        // Γ(x) Γ(1 − x) = π / sin πx.
        let sine = sin_pi(x).abs();
        return if sine == 0.0 { f64::INFINITY } else { (std::f64::consts::PI / sine).ln() - lgamma_f64(1.0 - x) };
    }
    // Γ(x) = Γ(x + n) / (x (x + 1) … (x + n − 1)).
    let (mut x, mut product) = (x, 1.0);
    while x < LARGE {
        product *= x;
        x += 1.0;
    }
    const TERMS: [f64; 7] =
        [1.0 / 12.0, -1.0 / 360.0, 1.0 / 1260.0, -1.0 / 1680.0, 1.0 / 1188.0, -691.0 / 360_360.0, 1.0 / 156.0];
    let inverse = 1.0 / x;
    let square = inverse * inverse;
    let series = TERMS.iter().rev().fold(0.0, |sum, term| sum * square + term) * inverse;
    let half_log_two_pi = 0.918_938_533_204_672_7;
    (x - 0.5) * x.ln() - x + half_log_two_pi + series - product.ln()
}

/// `d/dx log Γ(x)`; NaN at 0 and the negative integers.
fn digamma_f64(x: f64) -> f64 {
    if !x.is_finite() {
        return if x == f64::INFINITY { x } else { f64::NAN };
    }
    if x < 0.5 {
        // ψ(1 − x) − ψ(x) = π cot πx.
        let sine = sin_pi(x);
        let cosine = sin_pi(x + 0.5);
        return if sine == 0.0 { f64::NAN } else { digamma_f64(1.0 - x) - std::f64::consts::PI * cosine / sine };
    }
    let (mut x, mut sum) = (x, 0.0);
    while x < LARGE {
        sum += 1.0 / x;
        x += 1.0;
    }
    const TERMS: [f64; 7] =
        [1.0 / 12.0, -1.0 / 120.0, 1.0 / 252.0, -1.0 / 240.0, 1.0 / 132.0, -691.0 / 32_760.0, 1.0 / 12.0];
    let square = 1.0 / (x * x);
    let series = TERMS.iter().rev().fold(0.0, |sum, term| sum * square + term) * square;
    x.ln() - 0.5 / x - series - sum
}

/// `sin πx`, exactly 0 at whole numbers.
fn sin_pi(x: f64) -> f64 {
    // Within half a turn of 0, where the sine is exact; every odd number of half turns changes the sign.
    let nearest = x.round();
    let sine = (std::f64::consts::PI * (x - nearest)).sin();
    if nearest.rem_euclid(2.0) == 1.0 { -sine } else { sine }
}

fn erfc_kernel<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    if T::DTYPE == DType::F64 {
        return map::<T, T>(ctx, 40.0, |x| T::from_f64(erfc_f64::<28>(x.to_f64())));
    }
    map::<T, T>(ctx, 20.0, |x| T::from_f64(erfc_f64::<14>(x.to_f64())))
}

fn lgamma_kernel<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    map::<T, T>(ctx, 50.0, |x| T::from_f64(lgamma_f64(x.to_f64())))
}

fn digamma_kernel<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    map::<T, T>(ctx, 50.0, |x| T::from_f64(digamma_f64(x.to_f64())))
}

fn erf_double(ctx: &mut KernelCtx<'_>) -> Result<()> {
    map::<f64, f64>(ctx, 40.0, erf_f64::<28>)
}

fn erf_f32(ctx: &mut KernelCtx<'_>) -> Result<()> {
    map_slices::<f32>(ctx, 0.6, vmath::erf_f32, vmath::erf_f32_to)
}

const ERF_KERNELS: &[KernelDef] =
    &[cpu(DType::F32, erf_f32), cpu(DType::F64, erf_double), cpu(DType::F16, erf_f32), cpu(DType::BF16, erf_f32)];
const ERFC_KERNELS: &[KernelDef] = cpu_kernels!(elementwise erfc_kernel: f32, f64; f16, bf16);
const LGAMMA_KERNELS: &[KernelDef] = cpu_kernels!(elementwise lgamma_kernel: f32, f64; f16, bf16);
const DIGAMMA_KERNELS: &[KernelDef] = cpu_kernels!(elementwise digamma_kernel: f32, f64; f16, bf16);

#[cfg(test)]
mod tests {
    use crate::testing::{check_op, wavy};

    #[test]
    fn error_functions() {
        // From Python's math.erf and math.erfc.
        let x = [-3.0f64, -0.4, 1e-12, 0.3, 0.5, 1.0, 2.5, 6.0];
        check_op("Erf").tolerance(1e-15).input(x).gives([
            -0.9999779095030014,
            -0.42839235504666845,
            1.1283791670955126e-12,
            0.3286267594591274,
            0.5204998778130465,
            0.8427007929497149,
            0.999593047982555,
            1.0,
        ]);
        // Relative to its size, which the tolerance below 1 is not.
        let found = check_op("Erf").input(1e-12f64).run(false).unwrap()[0].scalar_value::<f64>().unwrap();
        assert!((found / 1.1283791670955126e-12 - 1.0).abs() < 1e-15);
        check_op("Erfc").tolerance(1e-15).input([-1.0f64, 0.0, 1.0]).gives([
            1.842700792949715f64,
            1.0,
            0.15729920705028513,
        ]);
        let found = check_op("Erfc").input(6.0f64).run(false).unwrap()[0].scalar_value::<f64>().unwrap();
        assert!((found / 2.1519736712498916e-17 - 1.0).abs() < 1e-13);
        check_op("Erf").tolerance(2e-7).input([-1.0f32, 0.3, f32::INFINITY, f32::NEG_INFINITY, f32::NAN]).gives([
            -0.8427008f32,
            0.32862675,
            1.0,
            -1.0,
            f32::NAN,
        ]);
    }

    #[test]
    fn gamma_functions() {
        // From Python's math.lgamma; ψ(1) = −γ, ψ(1/2) = −γ − 2 log 2, ψ(−1/2) = ψ(1/2) + 2, ψ(20) by its harmonic sum.
        check_op("Lgamma").tolerance(1e-14).input([1.0f64, 2.0, 0.5, 10.0, 100.5, -0.5, 0.1]).gives([
            0.0f64,
            0.0,
            0.5723649429247001,
            12.801827480081469,
            361.4355404677776,
            1.2655121234846454,
            2.252712651734206,
        ]);
        check_op("Lgamma").input([0.0f32, -3.0, f32::INFINITY, f32::NAN]).gives([
            f32::INFINITY,
            f32::INFINITY,
            f32::INFINITY,
            f32::NAN,
        ]);
        let gamma = 0.577_215_664_901_532_9f64;
        let ln2 = std::f64::consts::LN_2;
        let harmonic: f64 = (1..20).map(|k| 1.0 / f64::from(k)).sum();
        check_op("Digamma").tolerance(1e-14).input([1.0f64, 0.5, -0.5, 20.0]).gives([
            -gamma,
            -gamma - 2.0 * ln2,
            -gamma - 2.0 * ln2 + 2.0,
            harmonic - gamma,
        ]);
        check_op("Digamma").input([0.0f32, -2.0]).gives([f32::NAN, f32::NAN]);
    }

    #[test]
    fn gradients() {
        for op in ["Erf", "Erfc", "Lgamma"] {
            check_op(op).input(wavy([6], 1)).gradient();
        }
    }
}
