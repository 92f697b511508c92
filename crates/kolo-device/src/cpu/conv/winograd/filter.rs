//! The maps of Winograd's algorithm for filters and their gradients.
//!
//! They are used once per call and not once per tile, so they contain the expensive and inexact parts: the points'
//! weights in the interpolation, and sums of doubles.

use super::transform::{EIGHT, SIX};
use crate::cpu::gemm::Simd;

/// The values of a polynomial with `R` coefficients at the points, over the points' weights in the interpolation.
const fn weighted<const N: usize, const R: usize>() -> [[f64; R]; N] {
    let mut values = [[0.0; R]; N];
    let mut i = 0;
    while i < N - 1 {
        let point = finite_point::<N>(i);
        let (mut weight, mut other) = (1.0, 0);
        while other < N - 1 {
            if other != i {
                weight *= point - finite_point::<N>(other);
            }
            other += 1;
        }
        let (mut k, mut power) = (0, 1.0);
        while k < R {
            values[i][k] = power / weight;
            power *= point;
            k += 1;
        }
        i += 1;
    }
    values[N - 1][R - 1] = 1.0;
    values
}

/// Point `i` of `N`: 0, then each number and its opposite; not for the last, which is infinity.
const fn finite_point<const N: usize>(i: usize) -> f64 {
    if i == 0 {
        return 0.0;
    }
    let size = if N == 6 { SIX[(i - 1) / 2] } else { EIGHT[(i - 1) / 2] };
    if i % 2 == 1 { size as f64 } else { -(size as f64) }
}

/// The values of a polynomial with `R` coefficients at the points, over the points' weights.
///
/// # Safety
/// Needs the instruction set of `W`, as all functions here.
#[inline(always)]
unsafe fn weigh<W: Simd<Elem = f64>, const N: usize, const R: usize>(g: [W; R]) -> [W; N] {
    let weights = const { weighted::<N, R>() };
    // SAFETY: the caller has the instruction set.
    unsafe {
        let mut v = [W::splat(&weights[0][0]).mul(g[0]); N];
        v[N - 1] = g[R - 1];
        let mut i = 1;
        while i < N - 1 {
            let mut parts = [W::zero(); 2];
            for k in 0..R {
                parts[k % 2] = W::mul_add(W::splat(&weights[i][k]), g[k], parts[k % 2]);
            }
            [v[i], v[i + 1]] =
                [W::mul_add(W::splat(&1.0), parts[1], parts[0]), W::mul_add(W::splat(&-1.0), parts[1], parts[0])];
            i += 2;
        }
        v
    }
}

/// The transpose of [`weigh`].
#[inline(always)]
unsafe fn unweigh<W: Simd<Elem = f64>, const N: usize, const R: usize>(v: [W; N]) -> [W; R] {
    let weights = const { weighted::<N, R>() };
    // SAFETY: the caller has the instruction set.
    unsafe {
        let mut y = [W::zero(); R];
        y[0] = W::splat(&weights[0][0]).mul(v[0]);
        y[R - 1] = v[N - 1];
        let mut i = 1;
        while i < N - 1 {
            let parts = [W::mul_add(W::splat(&1.0), v[i + 1], v[i]), W::mul_add(W::splat(&-1.0), v[i + 1], v[i])];
            for k in 0..R {
                y[k] = W::mul_add(W::splat(&weights[i][k]), parts[k % 2], y[k]);
            }
            i += 2;
        }
        y
    }
}

/// Reads `n` values, at most a vector, as doubles.
///
/// # Safety
/// They must be readable.
#[inline(always)]
unsafe fn widen<W: Simd<Elem = f64>>(from: *const f32, n: usize) -> W {
    let mut lanes = [0.0; 8];
    // SAFETY: guaranteed by the caller; a vector of doubles has at most eight lanes.
    unsafe {
        if n == W::LANES {
            for (l, lane) in lanes.iter_mut().enumerate().take(W::LANES) {
                *lane = f64::from(*from.add(l));
            }
        } else {
            for (l, lane) in lanes.iter_mut().enumerate().take(n) {
                *lane = f64::from(*from.add(l));
            }
        }
        W::load(lanes.as_ptr())
    }
}

/// Writes a vector of doubles, rounded.
///
/// # Safety
/// There must be room for a vector.
#[inline(always)]
unsafe fn narrow<W: Simd<Elem = f64>>(x: W, to: *mut f32) {
    let mut lanes = [0.0; 8];
    // SAFETY: guaranteed by the caller; a vector of doubles has at most eight lanes.
    unsafe {
        x.store(lanes.as_mut_ptr());
        for (l, &lane) in lanes.iter().enumerate().take(W::LANES) {
            *to.add(l) = lane as f32;
        }
    }
}

/// Transforms `n` values, at most a vector, of each tap of a filter. This is done once per call, so the sums are of
/// doubles.
///
/// # Safety
/// `taps` must have these values in each tap, `tap` from one to the next; each plane at `to` room for a vector.
#[inline(always)]
pub(super) unsafe fn filter_vector<W: Simd<Elem = f64>, const N: usize, const R: usize>(
    taps: *const f32,
    tap: usize,
    n: usize,
    to: *mut f32,
    plane: usize,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut columns = [[W::zero(); N]; R];
        for (j, column) in columns.iter_mut().enumerate() {
            let mut x = [W::zero(); R];
            for (i, x) in x.iter_mut().enumerate() {
                *x = widen(taps.add((i * R + j) * tap), n);
            }
            *column = weigh(x);
        }
        for i in 0..N {
            let mut x = [W::zero(); R];
            for (x, column) in x.iter_mut().zip(&columns) {
                *x = column[i];
            }
            for (j, x) in weigh::<W, N, R>(x).into_iter().enumerate() {
                narrow(x, to.add((i * N + j) * plane));
            }
        }
    }
}

/// Adds up parts of the transformed gradient of a filter and transforms them back: `n` values, at most a vector, of
/// each tap. Returns whether all are finite.
///
/// # Safety
/// `sums` must have these values in each plane and each of `n_parts` parts, `tap`s of `to` room for them.
#[inline(always)]
pub(super) unsafe fn filter_back<W: Simd<Elem = f64>, const N: usize, const R: usize>(
    sums: *const f32,
    plane: usize,
    (n_parts, part): (usize, usize),
    n: usize,
    to: *mut f32,
    tap: usize,
) -> bool {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut columns = [[W::zero(); R]; N];
        for (j, column) in columns.iter_mut().enumerate() {
            let mut x = [W::zero(); N];
            for p in 0..n_parts {
                for (i, x) in x.iter_mut().enumerate() {
                    let more = widen(sums.add(p * part + (i * N + j) * plane), n);
                    *x = W::mul_add(W::splat(&1.0), more, *x);
                }
            }
            *column = unweigh(x);
        }
        // Zero times what is not finite is NaN, and stays.
        let mut check = W::zero();
        for i in 0..R {
            let mut x = [W::zero(); N];
            for (x, column) in x.iter_mut().zip(&columns) {
                *x = column[i];
            }
            for (j, y) in unweigh::<W, N, R>(x).into_iter().enumerate() {
                check = W::mul_add(y, W::zero(), check);
                let mut lanes = [0f32; 8];
                narrow(y, lanes.as_mut_ptr());
                std::ptr::copy_nonoverlapping(lanes.as_ptr(), to.add((i * R + j) * tap), n);
            }
        }
        let mut lanes = [0.0; 8];
        check.store(lanes.as_mut_ptr());
        lanes.iter().all(|x| !x.is_nan())
    }
}
