//! Softmax and its logarithm, row by row.

use super::super::isa::Isa;
use super::super::scratch::Scratch;
use super::super::stream::{fence, prefetch, stream};
use super::{BLOCK, LANES, exp_below_zero, fold, lanes_max, lanes_sum, log, on_best};

/// The longest row that bypasses the caches: its values stay in L2 until their sum is known.
const MOST_STREAMED: usize = 1 << 16;

/// Softmax of every row of `cols` elements: `out = exp(x - max) / sum`.
///
/// # Panics
/// If the slices differ in length or are not whole rows.
pub fn softmax_f32(x: &[f32], out: &mut [f32], cols: usize) {
    rows(x, out, cols, |x, out| {
        #[inline(always)]
        fn all<const FMA: bool>(x: &[f32], out: &mut [f32], cols: usize) {
            if cols >= LANES {
                for (x, out) in x.chunks_exact(cols).zip(out.chunks_exact_mut(cols)) {
                    wide_row::<FMA>(x, &[], out);
                }
                return;
            }
            shifted(x, out, cols);
            for x in out.iter_mut() {
                *x = exp_below_zero::<FMA>(*x);
            }
            for row in out.chunks_exact_mut(cols) {
                let scale = 1.0 / lanes_sum(row);
                row.iter_mut().for_each(|x| *x *= scale);
            }
        }
        on_best!(all(x, out, cols));
    });
}

/// [`softmax_f32`] whose results bypass the caches, where the rows are neither short nor very long.
///
/// # Panics
/// As [`softmax_f32`].
pub fn softmax_f32_streamed(x: &[f32], out: &mut [f32], cols: usize) {
    if !(LANES..=MOST_STREAMED).contains(&cols) {
        return softmax_f32(x, out, cols);
    }
    assert_eq!(x.len(), out.len(), "one result per element");
    assert!(x.len().is_multiple_of(cols), "whole rows");
    let scratch = Scratch::take::<f32>(cols);
    // SAFETY: the scratch has room for a row, is aligned, and is used by this call only; values are written before they
    // are read.
    let row = unsafe {
        scratch.as_ptr::<f32>().write_bytes(0, cols);
        std::slice::from_raw_parts_mut(scratch.as_ptr::<f32>(), cols)
    };
    #[inline(always)]
    fn one<const FMA: bool>(x: &[f32], next: &[f32], row: &mut [f32]) {
        wide_row::<FMA>(x, next, row);
    }
    for (i, out) in out.chunks_exact_mut(cols).enumerate() {
        let (x, next) = x[i * cols..].split_at(cols);
        let next = &next[..cols.min(next.len())];
        on_best!(one(x, next, row));
        stream(out, row);
    }
    fence();
    scratch.put_back();
}

/// Log-softmax of every row of `cols` elements: `out = x - max - ln(sum(exp(x - max)))`.
///
/// # Panics
/// If the slices differ in length or are not whole rows.
pub fn log_softmax_f32(x: &[f32], out: &mut [f32], cols: usize) {
    // Wide rows do without.
    let mut exps = vec![0.0; if cols < LANES { BLOCK.min(x.len()) } else { 0 }];
    rows(x, out, cols, |x, out| {
        #[inline(always)]
        fn all<const FMA: bool>(x: &[f32], out: &mut [f32], exps: &mut [f32], cols: usize) {
            if cols >= LANES {
                for (x, out) in x.chunks_exact(cols).zip(out.chunks_exact_mut(cols)) {
                    let max = largest(x);
                    let log_sum = log::<FMA>(exp_sum::<FMA>(x, &[], max, |_, _| ()));
                    out.iter_mut().zip(x).for_each(|(y, x)| *y = x - max - log_sum);
                }
                return;
            }
            shifted(x, out, cols);
            for (e, &x) in exps.iter_mut().zip(out.iter()) {
                *e = exp_below_zero::<FMA>(x);
            }
            for (row, exps) in out.chunks_exact_mut(cols).zip(exps.chunks_exact(cols)) {
                let log_sum = log::<FMA>(lanes_sum(exps));
                row.iter_mut().for_each(|x| *x -= log_sum);
            }
        }
        let n = exps.len().min(x.len());
        on_best!(all(x, out, &mut exps[..n], cols));
    });
}

/// Calls `f` on groups of whole rows that fit in L1 (or one row).
fn rows(x: &[f32], out: &mut [f32], cols: usize, mut f: impl FnMut(&[f32], &mut [f32])) {
    assert_eq!(x.len(), out.len(), "one result per element");
    if x.is_empty() {
        return;
    }
    assert!(cols > 0 && x.len().is_multiple_of(cols), "whole rows");
    let group = (BLOCK / cols).max(1) * cols;
    for (x, out) in x.chunks(group).zip(out.chunks_mut(group)) {
        f(x, out);
    }
}

/// The softmax of a row; prefetches `next`.
#[inline(always)]
fn wide_row<const FMA: bool>(x: &[f32], next: &[f32], out: &mut [f32]) {
    let sum = exp_sum::<FMA>(x, next, largest(x), |i, values| out[i..][..values.len()].copy_from_slice(values));
    let scale = 1.0 / sum;
    for x in out {
        *x *= scale;
    }
}

/// The largest element of a row. One that is NaN may be left out: it makes the sum of the row NaN in any case.
#[inline(always)]
fn largest(x: &[f32]) -> f32 {
    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in chunks {
        for l in 0..LANES {
            lanes[l] = if chunk[l] > lanes[l] { chunk[l] } else { lanes[l] };
        }
    }
    let mut max = fold(lanes, |a, b| if b > a { b } else { a });
    for &x in rest {
        max = if x > max { x } else { max };
    }
    max
}

/// The sum of `exp(x - max)` of a wide row. `each` is called with chunks of the values and the index of the first.
/// Prefetches `next`, which the hardware cannot predict.
#[inline(always)]
fn exp_sum<const FMA: bool>(x: &[f32], next: &[f32], max: f32, mut each: impl FnMut(usize, &[f32])) -> f32 {
    let (chunks, rest) = x.as_chunks::<LANES>();
    let (mut lanes, mut values) = ([0.0; LANES], [0.0; LANES]);
    for (i, chunk) in chunks.iter().enumerate() {
        if let Some(next) = next.get(i * LANES..(i + 1) * LANES) {
            prefetch(next);
        }
        for l in 0..LANES {
            values[l] = exp_below_zero::<FMA>(chunk[l] - max);
        }
        for l in 0..LANES {
            lanes[l] += values[l];
        }
        each(i * LANES, &values);
    }
    let mut tail = 0.0;
    for (value, x) in values.iter_mut().zip(rest) {
        *value = exp_below_zero::<FMA>(x - max);
        tail += *value;
    }
    each(chunks.len() * LANES, &values[..rest.len()]);
    fold(lanes, |a, b| a + b) + tail
}

/// `out = x - max(row of x)`.
#[inline(always)]
fn shifted(x: &[f32], out: &mut [f32], cols: usize) {
    for (x, out) in x.chunks_exact(cols).zip(out.chunks_exact_mut(cols)) {
        let max = lanes_max(x);
        for (out, &x) in out.iter_mut().zip(x) {
            *out = x - max;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn softmax_rows_sum_to_one() {
        for (n_rows, cols) in [(0, 3), (1, 1), (100, 10), (3, 5000), (7, 65), (4, 192)] {
            let x: Vec<f32> = (0..n_rows * cols).map(|i| (i * 37 % 101) as f32).collect();
            let (mut p, mut log_p) = (vec![0.0; x.len()], vec![0.0; x.len()]);
            softmax_f32_streamed(&x, &mut p, cols);
            let mut again = vec![0.0; x.len()];
            softmax_f32(&x, &mut again, cols);
            assert_eq!(p, again);
            log_softmax_f32(&x, &mut log_p, cols);
            for ((row, p), log_p) in x.chunks(cols).zip(p.chunks(cols)).zip(log_p.chunks(cols)) {
                let max = row.iter().copied().fold(0.0, f32::max);
                let sum: f64 = row.iter().map(|&x| f64::from(x - max).exp()).sum();
                for ((&x, &p), &log_p) in row.iter().zip(p).zip(log_p) {
                    let exact = f64::from(x - max).exp() / sum;
                    assert!((f64::from(p) - exact).abs() <= (1e-6 * exact).max(3e-45));
                    assert!((f64::from(log_p) - exact.ln()).abs() <= 1e-4);
                }
            }
        }
    }

    #[test]
    fn a_row_with_a_nan_is_nan_and_masked_elements_are_zero() {
        for (cols, at) in [(70, 0), (70, 69), (130, 64), (5, 2)] {
            let mut x = vec![1.0; 2 * cols];
            x[at] = f32::NAN;
            x[cols + at] = f32::NEG_INFINITY;
            let (mut p, mut log_p) = (vec![0.0; x.len()], vec![0.0; x.len()]);
            softmax_f32(&x, &mut p, cols);
            log_softmax_f32(&x, &mut log_p, cols);
            assert!(p[..cols].iter().chain(&log_p[..cols]).all(|p| p.is_nan()), "{cols} {at}");
            assert_eq!((p[cols + at], log_p[cols + at]), (0.0, f32::NEG_INFINITY));
            assert!(p[cols..].iter().all(|p| *p == 0.0 || (p * (cols - 1) as f32 - 1.0).abs() < 1e-5));
        }
    }
}
