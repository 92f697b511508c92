//! Elementary functions and reductions over slices, vectorised for the instruction set present.
//!
//! The `f32` functions are polynomials without branches, so the compiler turns their loops into
//! vectors. Their error is below 3e-7 of the result (4e-7 for `erf`) over the whole range, denormal results and
//! infinities included; NaN stays NaN. The `f64` functions call the standard library.
//!
//! Reductions cut their input in blocks of fixed length, so their bits depend on the data alone.

mod softmax;
#[cfg(target_arch = "x86_64")]
mod wide;

pub use softmax::{log_softmax_f32, softmax_f32, softmax_f32_streamed};

use super::gemm::Real;
use super::isa::{Isa, vectorize};

/// Compiles `f::<FMA>` for the best instruction set and calls it.
macro_rules! on_best {
    ($f:ident($($arg:expr),*)) => {
        match Isa::best() {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => $crate::cpu::isa::on_avx512(#[inline(always)] || $f::<true>($($arg),*)),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => $crate::cpu::isa::on_avx2(#[inline(always)] || $f::<true>($($arg),*)),
            _ => $f::<false>($($arg),*),
        }
    };
}
use on_best;

/// Runs a loop of [`wide`] over `$x` and returns, where the machine has AVX-512.
macro_rules! if_wide {
    ($f:ident, $x:expr, $out:expr, $n:expr) => {
        #[cfg(target_arch = "x86_64")]
        if Isa::best() == Isa::Avx512 {
            // SAFETY: the instruction set is present, and both are `n` elements long (they may be the same ones).
            return unsafe { wide::$f($x, $out, $n) };
        }
    };
}

macro_rules! elementwise {
    ($($doc:literal $one:ident $name32:ident $to32:ident $name64:ident |$x:ident| $f64:expr;)*) => {$(
        #[doc = concat!("`x = ", $doc, "` for every element.")]
        pub fn $name32(x: &mut [f32]) {
            #[inline(always)]
            fn all<const FMA: bool>(x: &mut [f32]) {
                for x in x {
                    *x = $one::<FMA>(*x);
                }
            }
            on_best!(all(x));
        }

        #[doc = concat!("`out = ", $doc, "` for every element.")]
        ///
        /// # Panics
        /// If the slices differ in length.
        pub fn $to32(x: &[f32], out: &mut [f32]) {
            #[inline(always)]
            fn all<const FMA: bool>(x: &[f32], out: &mut [f32]) {
                for (out, &x) in out.iter_mut().zip(x) {
                    *out = $one::<FMA>(x);
                }
            }
            assert_eq!(x.len(), out.len(), "one result per element");
            on_best!(all(x, out));
        }

        #[doc = concat!("`x = ", $doc, "` for every element.")]
        pub fn $name64(x: &mut [f64]) {
            for x in x {
                let $x = *x;
                *x = $f64;
            }
        }
    )*};
}

elementwise! {
    "exp(x)" exp exp_f32 exp_f32_to exp_f64 |x| x.exp();
    "ln(x)" log log_f32 log_f32_to log_f64 |x| x.ln();
    "1 / (1 + exp(-x))" sigmoid sigmoid_f32 sigmoid_f32_to sigmoid_f64 |x| {
        let e = (-x.abs()).exp();
        if x < 0.0 { e / (1.0 + e) } else { 1.0 / (1.0 + e) }
    };
}

macro_rules! elementwise_wide {
    ($($doc:literal $all:ident $name32:ident $to32:ident;)*) => {$(
        #[doc = concat!("`x = ", $doc, "` for every element.")]
        pub fn $name32(x: &mut [f32]) {
            if_wide!($all, x.as_ptr(), x.as_mut_ptr(), x.len());
            let mut before = [0.0; 8 * LANES];
            for x in x.chunks_mut(before.len()) {
                let before = &mut before[..x.len()];
                before.copy_from_slice(x);
                let before = &*before;
                on_best!($all(before, x));
            }
        }

        #[doc = concat!("`out = ", $doc, "` for every element.")]
        ///
        /// # Panics
        /// If the slices differ in length.
        pub fn $to32(x: &[f32], out: &mut [f32]) {
            assert_eq!(x.len(), out.len(), "one result per element");
            if_wide!($all, x.as_ptr(), out.as_mut_ptr(), x.len());
            on_best!($all(x, out));
        }
    )*};
}

elementwise_wide! {
    "tanh(x)" all_tanh tanh_f32 tanh_f32_to;
    "erf(x)" all_erf erf_f32 erf_f32_to;
    "1 / √x" all_rsqrt rsqrt_f32 rsqrt_f32_to;
}

/// `x = tanh(x)` for every element.
pub fn tanh_f64(x: &mut [f64]) {
    for x in x {
        *x = x.tanh();
    }
}

#[inline(always)]
fn all_tanh<const FMA: bool>(x: &[f32], out: &mut [f32]) {
    for (out, &x) in out.iter_mut().zip(x) {
        *out = tanh::<FMA>(x);
    }
}

#[inline(always)]
fn all_erf<const FMA: bool>(x: &[f32], out: &mut [f32]) {
    for (out, &x) in out.iter_mut().zip(x) {
        *out = erf::<FMA>(x);
    }
}

#[inline(always)]
fn all_rsqrt<const FMA: bool>(x: &[f32], out: &mut [f32]) {
    for (x, out) in x.chunks(LANES).zip(out.chunks_mut(LANES)) {
        if are_plain(x) {
            for (out, &x) in out.iter_mut().zip(x) {
                *out = rsqrt::<FMA>(x);
            }
        } else {
            for (out, &x) in out.iter_mut().zip(x) {
                *out = 1.0 / x.sqrt();
            }
        }
    }
}

/// Whether [`rsqrt`] may be used for all of these.
#[inline(always)]
fn are_plain(x: &[f32]) -> bool {
    let mut plain = true;
    for &x in x {
        plain &= (f32::MIN_POSITIVE..f32::INFINITY).contains(&x);
    }
    plain
}

/// `out = x * factor + offset`: pixels become numbers around 0.
///
/// # Panics
/// If the lengths differ.
pub fn scale_u8(x: &[u8], factor: f32, offset: f32, out: &mut [f32]) {
    assert_eq!(x.len(), out.len());
    vectorize(
        #[inline(always)]
        || out.iter_mut().zip(x).for_each(|(out, &x)| *out = f32::from(x) * factor + offset),
    );
}

/// `out = x as i32` for every element: the fraction is cut off; values out of range and NaN become the least `i32`, as x86's
/// instruction has it.
///
/// # Panics
/// If the slices differ in length.
pub fn f32_to_i32(x: &[f32], out: &mut [i32]) {
    /// The largest `f32` below 2³¹.
    const LAST: f32 = 2_147_483_520.0;
    #[inline(always)]
    fn all<const FMA: bool>(x: &[f32], out: &mut [i32]) {
        for (out, &x) in out.iter_mut().zip(x) {
            // NaN fails this comparison, too; what is below stays at the end that it becomes anyway.
            let inside = if x <= LAST { x } else { -2_147_483_648.0 };
            let inside = if inside < -2_147_483_648.0 { -2_147_483_648.0 } else { inside };
            // SAFETY: finite, not below -2³¹ and below 2³¹.
            *out = unsafe { inside.to_int_unchecked::<i32>() };
        }
    }
    assert_eq!(x.len(), out.len(), "one result per element");
    on_best!(all(x, out));
}

/// Sum of all elements; partial sums of blocks are added in `f64`.
#[must_use]
pub fn sum_f32(x: &[f32]) -> f32 {
    #[inline(always)]
    fn all<const FMA: bool>(x: &[f32]) -> f32 {
        x.chunks(BLOCK).map(|block| f64::from(lanes_sum(block))).sum::<f64>() as f32
    }
    on_best!(all(x))
}

/// Sum of products. The shorter slice decides the length.
#[must_use]
pub fn dot_f32(x: &[f32], y: &[f32]) -> f32 {
    let dots = f32::kernels(Isa::best()).dots;
    let mut sum = 0.0;
    for (x, y) in x.chunks(BLOCK).zip(y.chunks(BLOCK)) {
        let mut part = 0.0;
        let n = x.len().min(y.len());
        // SAFETY: `kernels` found the instruction set; both slices have `n` elements.
        unsafe { dots(x.as_ptr(), n, 1, y.as_ptr(), n, &raw mut part) };
        sum += f64::from(part);
    }
    sum as f32
}

/// Largest element: `-inf` if there is none, NaN if one is NaN.
#[must_use]
pub fn max_f32(x: &[f32]) -> f32 {
    #[inline(always)]
    fn all<const FMA: bool>(x: &[f32]) -> f32 {
        lanes_max(x)
    }
    on_best!(all(x))
}

const LANES: usize = 64;
const BLOCK: usize = 4096;

#[inline(always)]
fn fold(mut lanes: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        let (low, high) = lanes.split_at_mut(width);
        low.iter_mut().zip(high).for_each(|(a, &mut b)| *a = f(*a, b));
        width /= 2;
    }
    lanes[0]
}

#[inline(always)]
fn lanes_sum(x: &[f32]) -> f32 {
    let (chunks, rest) = x.as_chunks::<LANES>();
    let tail = rest.iter().sum::<f32>();
    if chunks.is_empty() {
        return tail;
    }
    let mut lanes = [0.0; LANES];
    for chunk in chunks {
        for l in 0..LANES {
            lanes[l] += chunk[l];
        }
    }
    fold(lanes, |a, b| a + b) + tail
}

#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if b > a || b.is_nan() { b } else { a }
}

#[inline(always)]
fn lanes_max(x: &[f32]) -> f32 {
    let (chunks, rest) = x.as_chunks::<LANES>();
    let tail = rest.iter().fold(f32::NEG_INFINITY, |a, &b| larger(a, b));
    if chunks.is_empty() {
        return tail;
    }
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in chunks {
        for l in 0..LANES {
            lanes[l] = larger(lanes[l], chunk[l]);
        }
    }
    larger(fold(lanes, larger), tail)
}

/// `a * b + c`; without `FMA` in two roundings, since the fused one would be a function call.
#[inline(always)]
fn madd<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// ln 2 in two parts; the first has few bits, so that its multiples are exact.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// Adding 1.5 * 2^23 rounds to an integer, found in the low bits of the sum.
const ROUND: f32 = 12_582_912.0;

/// `exp(x) = 2^n exp(r)` with `|r| <= ln 2 / 2` and a polynomial for `exp(r)`.
#[inline(always)]
fn exp<const FMA: bool>(x: f32) -> f32 {
    // Beyond these the result is infinite or zero. A NaN passes both comparisons.
    let x = if x > 89.0 { 89.0 } else { x };
    let x = if x < -104.0 { -104.0 } else { x };
    let (p, n) = exp_parts::<FMA>(x);
    // Two factors reach denormals and infinity, where one power of two would leave its range.
    let half = n >> 1;
    p * power_of_two(half) * power_of_two(n.wrapping_sub(half))
}

/// [`exp`] of what is not above 0, for less.
#[inline(always)]
fn exp_below_zero<const FMA: bool>(x: f32) -> f32 {
    let x = if x < -104.0 { -104.0 } else { x };
    let (p, n) = exp_parts::<FMA>(x);
    // 2^64 too much, so that only the last product leaves the range of normal numbers.
    p * power_of_two(n.wrapping_add(64)) * power_of_two(-64)
}

/// `exp(r)` and `n`. The polynomial is fitted to the relative error, 3e-9 at most, with the first two terms of the
/// series.
#[inline(always)]
fn exp_parts<const FMA: bool>(x: f32) -> (f32, i32) {
    let shifted = madd::<FMA>(x, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = madd::<FMA>(n, -LN2_LOW, madd::<FMA>(n, -LN2_HIGH, x));
    let mut p = 1.381_459_9e-3;
    p = madd::<FMA>(p, r, 8.368_717e-3);
    p = madd::<FMA>(p, r, 4.166_839e-2);
    p = madd::<FMA>(p, r, 1.666_652_1e-1);
    p = madd::<FMA>(p, r, 0.499_999_94);
    p = madd::<FMA>(p, r, 1.0);
    p = madd::<FMA>(p, r, 1.0);
    (p, shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32)
}

#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// `ln(x) = e ln 2 + ln(m)` with `m` between √½ and √2 and a polynomial in `m - 1`.
#[inline(always)]
fn log<const FMA: bool>(x: f32) -> f32 {
    let tiny = x < f32::MIN_POSITIVE;
    let scaled = if tiny { x * 8_388_608.0 } else { x };
    let bits = scaled.to_bits().wrapping_sub(0x3f35_04f3);
    let e = ((bits as i32) >> 23) as f32 - if tiny { 23.0 } else { 0.0 };
    let m = f32::from_bits((bits & 0x007f_ffff).wrapping_add(0x3f35_04f3));
    let y = m - 1.0;
    let z = y * y;
    let mut p = 7.037_683_6e-2;
    p = madd::<FMA>(p, y, -1.151_461e-1);
    p = madd::<FMA>(p, y, 1.167_699_9e-1);
    p = madd::<FMA>(p, y, -1.242_014_1e-1);
    p = madd::<FMA>(p, y, 1.424_932_3e-1);
    p = madd::<FMA>(p, y, -1.666_805_8e-1);
    p = madd::<FMA>(p, y, 2.000_071_5e-1);
    p = madd::<FMA>(p, y, -2.499_999_4e-1);
    p = madd::<FMA>(p, y, 3.333_333e-1);
    let mut r = p * y * z;
    r = madd::<FMA>(e, LN2_LOW, r);
    r = madd::<FMA>(-0.5, z, r);
    let r = madd::<FMA>(e, LN2_HIGH, y + r);
    let r = if x == f32::INFINITY { x } else { r };
    let r = if x == 0.0 { f32::NEG_INFINITY } else { r };
    if x < 0.0 || x.is_nan() { f32::NAN } else { r }
}

/// An odd rational function of `x`: `x · p(x²) / q(x²)`, fitted to the relative error up to where the result rounds to
/// 1.
struct Rational<const P: usize, const Q: usize> {
    /// From here on the result is 1.
    end: f32,
    /// Of the numerator, the highest power first.
    p: [f32; P],
    /// Of the denominator, the highest power first.
    q: [f32; Q],
}

const TANH: Rational<7, 4> = Rational {
    end: 8.9,
    p: [-8.436_195e-14, 5.257_840_6e-11, -2.018_410_3e-8, 1.114_429_1e-5, 3.103_004_8e-3, 1.308_316e-1, 1.0],
    q: [2.544_756e-4, 2.449_139_5e-2, 4.641_648_7e-1, 1.0],
};

const ERF: Rational<6, 6> = Rational {
    end: 3.93,
    p: [2.041_980_3e-6, 2.848_071e-4, 3.779_548e-3, 5.279_01e-2, 1.907_824_2e-1, std::f32::consts::FRAC_2_SQRT_PI],
    q: [3.800_409_3e-5, 1.165_197_5e-3, 1.499_731_6e-2, 1.142_569_4e-1, 5.024_092e-1, 1.0],
};

impl<const P: usize, const Q: usize> Rational<P, Q> {
    #[inline(always)]
    fn of<const FMA: bool>(&self, x: f32) -> f32 {
        let a = x.abs();
        let c = if a > self.end { self.end } else { a };
        let z = c * c;
        let (mut p, mut q) = (self.p[0], self.q[0]);
        for i in 1..P {
            p = madd::<FMA>(p, z, self.p[i]);
        }
        for i in 1..Q {
            q = madd::<FMA>(q, z, self.q[i]);
        }
        let r = c * p / q;
        // The comparisons do not hold for NaN, which goes through.
        let r = if a > self.end || r > 1.0 { 1.0 } else { r };
        r.copysign(x)
    }
}

#[inline(always)]
fn tanh<const FMA: bool>(x: f32) -> f32 {
    TANH.of::<FMA>(x)
}

#[inline(always)]
fn erf<const FMA: bool>(x: f32) -> f32 {
    ERF.of::<FMA>(x)
}

/// Newton's steps from what halving the exponent gives, for positive numbers that are neither denormal nor infinite. A
/// root and a quotient would wait for each other in the slowest unit of the processor.
#[inline(always)]
fn rsqrt<const FMA: bool>(x: f32) -> f32 {
    let half = 0.5 * x;
    let mut y = f32::from_bits(0x5f37_59df - (x.to_bits() >> 1));
    for _ in 0..3 {
        let error = madd::<FMA>(-half * y, y, 0.5);
        y = madd::<FMA>(y, error, y);
    }
    y
}

/// `exp` of a negative number only, so that small results keep their precision.
#[inline(always)]
fn sigmoid<const FMA: bool>(x: f32) -> f32 {
    let e = exp_below_zero::<FMA>(-x.abs());
    let r = 1.0 / (1.0 + e);
    if x < 0.0 { e * r } else { r }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::vectorize;

    fn check(f: fn(&mut [f32]), exact: fn(f64) -> f64, from: f32, to: f32) {
        let n = 300_000;
        let step = (to - from) / n as f32;
        let x: Vec<f32> = (0..n).map(|i| from + step * i as f32).collect();
        let mut y = x.clone();
        f(&mut y);
        for (&x, &y) in x.iter().zip(&y) {
            let expect = exact(f64::from(x));
            // A denormal has fewer bits: one unit of its last place is allowed.
            let tolerance = (3e-7 * expect.abs()).max(1.5e-45);
            let error = (f64::from(y) - expect).abs();
            assert!(error <= tolerance, "f({x:e}) = {y:e}, not {expect:e}");
        }
    }

    #[test]
    fn functions_are_accurate() {
        check(exp_f32, f64::exp, -103.9, 88.7);
        check(exp_f32, f64::exp, -1.0, 1.0);
        check(log_f32, f64::ln, 1e-38, 1e-30);
        check(log_f32, f64::ln, 1e-45, 1e-38);
        check(log_f32, f64::ln, 1e-3, 0.99);
        check(log_f32, f64::ln, 1.01, 50.0);
        check(log_f32, f64::ln, 1e30, 3.4e38);
        check(tanh_f32, f64::tanh, -10.0, 10.0);
        check(tanh_f32, f64::tanh, -0.7, 0.7);
        check(tanh_f32, f64::tanh, 1e-40, 1e-30);
        check(sigmoid_f32, |x| 1.0 / (1.0 + (-x).exp()), -103.0, 30.0);
        check(rsqrt_f32, |x| 1.0 / x.sqrt(), 1e-30, 3.0);
        check(rsqrt_f32, |x| 1.0 / x.sqrt(), 1e-40, 1e-37);
        check(rsqrt_f32, |x| 1.0 / x.sqrt(), 1e30, 3e38);
        let mut ends = [0.0, -0.0, f32::INFINITY, -1.0, f32::NAN, 4.0];
        rsqrt_f32(&mut ends);
        assert_eq!((ends[0], ends[1], ends[2]), (f32::INFINITY, f32::NEG_INFINITY, 0.0));
        assert!(ends[3].is_nan() && ends[4].is_nan() && ends[5] == 0.5);
        // From 0 up, the sum of its series; beyond 3.9 it is 1 to the last bit but one.
        let series = |x: f64| {
            let (mut sum, mut term) = (x, x);
            for n in 1..200 {
                term *= -x * x / f64::from(n);
                sum += term / f64::from(2 * n + 1);
            }
            sum * std::f64::consts::FRAC_2_SQRT_PI
        };
        let mut y: Vec<f32> = (0..=4000).map(|i| i as f32 * 0.001 - 2.0).collect();
        let x = y.clone();
        erf_f32(&mut y);
        for (&x, &y) in x.iter().zip(&y) {
            let expect = series(f64::from(x));
            assert!((f64::from(y) - expect).abs() <= 4e-7 * expect.abs(), "erf({x}) = {y}, not {expect}");
        }
        let mut ends = [4.0, -4.0, f32::INFINITY, f32::NEG_INFINITY, 3.5, 0.0];
        erf_f32(&mut ends);
        assert_eq!(ends[..4], [1.0, -1.0, 1.0, -1.0]);
        assert!((ends[4] - 0.999_999_3).abs() < 4e-7 && ends[5] == 0.0);
        let mut nan = [f32::NAN];
        erf_f32(&mut nan);
        assert!(nan[0].is_nan());
    }

    /// The loops that other instruction sets have.
    #[test]
    fn the_plain_forms_agree_with_those_for_this_machine() {
        type Form = fn(&[f32], &mut [f32]);
        let x: Vec<f32> = (-40_000..40_000).map(|i| i as f32 * 2.5e-4).chain([0.0, -0.0, 1e-40, f32::NAN]).collect();
        let x: Vec<f32> = x.into_iter().chain([f32::INFINITY, f32::NEG_INFINITY]).collect();
        let forms: [(Form, [Form; 2]); 3] = [
            (tanh_f32_to, [all_tanh::<false>, all_tanh::<true>]),
            (erf_f32_to, [all_erf::<false>, all_erf::<true>]),
            (rsqrt_f32_to, [all_rsqrt::<false>, all_rsqrt::<true>]),
        ];
        for (i, (best, others)) in forms.iter().enumerate() {
            let mut expected = vec![0.0; x.len()];
            best(&x, &mut expected);
            for other in others {
                let mut found = vec![0.0; x.len()];
                other(&x, &mut found);
                for ((x, a), b) in x.iter().zip(&expected).zip(&found) {
                    let close = (a - b).abs() <= 5e-7 * a.abs();
                    assert!(a == b || close || (a.is_nan() && b.is_nan()), "function {i} of {x:e}: {a:e} and {b:e}");
                    assert!(a.is_nan() || a.is_sign_negative() == b.is_sign_negative(), "function {i} of {x:e}");
                }
            }
        }
    }

    #[test]
    fn casts_are_the_plain_ones_where_there_is_room() {
        let mut x: Vec<f32> = vec![0.0, -0.9, 1.9, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 2_147_483_648.0];
        x.extend([2_147_483_520.0, -2_147_483_648.0, -2_147_483_904.0, 3e9, -3e9, 1e-40]);
        x.extend((0..100).map(|i| (i as f32 - 50.0) * 4.3e7));
        let mut found = vec![0; x.len()];
        f32_to_i32(&x, &mut found);
        let plain = |&x: &f32| if x < 2_147_483_648.0 { x as i32 } else { i32::MIN };
        assert_eq!(found, x.iter().map(plain).collect::<Vec<_>>());
    }

    #[test]
    fn special_values_are_those_of_std() {
        let special =
            [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 0.0, -0.0, 1.0, -1.0, 200.0, -200.0, 3.4e38, -3.4e38];
        let check = |f: fn(&mut [f32]), exact: fn(f32) -> f32| {
            // Once as the tail of a loop, once inside vectors.
            let mut many: Vec<f32> = special.iter().copied().cycle().take(11 * 64).collect();
            f(&mut many);
            for (&x, &y) in special.iter().cycle().zip(&many) {
                let expect = exact(x);
                let same = y == expect || (y.is_nan() && expect.is_nan());
                let close = (y - expect).abs() <= 3e-7 * expect.abs();
                assert!(same || close, "f({x}) = {y}, not {expect}");
                assert!(y.is_nan() || y != 0.0 || y.is_sign_negative() == expect.is_sign_negative());
            }
        };
        check(exp_f32, f32::exp);
        check(log_f32, f32::ln);
        check(tanh_f32, f32::tanh);
        check(sigmoid_f32, |x| 1.0 / (1.0 + (-x).exp()));
    }

    #[test]
    fn reductions_match_plain_loops() {
        for n in [0, 1, 63, 64, 65, 5000, 100_003] {
            let x: Vec<f32> = (0..n).map(|i| ((i * 37 % 101) as f32 - 50.0) / 64.0).collect();
            let exact: f64 = x.iter().map(|&x| f64::from(x)).sum();
            let square: f64 = x.iter().map(|&x| f64::from(x).powi(2)).sum();
            assert!((f64::from(sum_f32(&x)) - exact).abs() <= 1e-4);
            assert!((f64::from(dot_f32(&x, &x)) - square).abs() <= 1e-6 * square);
            assert_eq!(max_f32(&x), x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        }
        for at in [0, 63, 70, 130] {
            let mut x = vec![1.0; 131];
            x[at] = f32::NAN;
            assert!(max_f32(&x).is_nan());
        }
    }

    #[test]
    fn vectorize_returns_what_the_closure_does() {
        assert_eq!(vectorize(|| 7), 7);
    }
}
