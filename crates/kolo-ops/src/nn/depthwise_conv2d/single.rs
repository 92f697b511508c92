//! Depthwise convolutions with one filter for each channel, which is almost all of them: rows of channels are multiplied and
//! added up in registers, one place of the result after the other.

use kolo_device::cpu::{IntraPool, vectorize};

use super::Depthwise;
use crate::nn::float::Float;
use crate::nn::rows::rows_per_task;
use crate::nn::window::Axis;

/// Sums over images are kept in this many parts, whatever the number of threads.
const PARTS: usize = 8;

/// `y = x * f` (images of `c` channels).
pub(super) fn forward<R: Float>(pool: &IntraPool, plan: &Depthwise, x: &[R], f: &[R], y: &mut [R]) {
    let Depthwise { h, w, channels: c, .. } = *plan;
    if y.is_empty() {
        return;
    }
    each_row(
        pool,
        h.kernel * w.kernel,
        w.output * c,
        y,
        #[inline(always)]
        |row, y| {
            let (n, oh) = (row / h.output, row % h.output);
            let mut pairs = Vec::with_capacity(h.kernel * w.kernel);
            // Where the window is all inside the image, the next place has the same pairs, a little further on.
            let mut whole = None;
            for (ow, y) in y.chunks_exact_mut(c).enumerate() {
                let across = w.taps(ow);
                let shift = match whole {
                    Some(first) if across.len() == w.kernel => (ow - first) * w.stride,
                    _ => {
                        pairs.clear();
                        for kh in h.taps(oh) {
                            let line = (n * h.input + h.at(oh, kh)) * w.input;
                            pairs.extend(across.clone().map(|kw| (line + w.at(ow, kw), kh * w.kernel + kw)));
                        }
                        whole = (across.len() == w.kernel).then_some(ow);
                        0
                    }
                };
                gather(y, x, f, &pairs, shift);
            }
        },
    );
}

/// The gradient of the images.
pub(super) fn backprop_input<R: Float>(pool: &IntraPool, plan: &Depthwise, f: &[R], dy: &[R], dx: &mut [R]) {
    let Depthwise { h, w, channels: c, .. } = *plan;
    if dx.is_empty() {
        return;
    }
    each_row(
        pool,
        h.kernel * w.kernel,
        w.input * c,
        dx,
        #[inline(always)]
        |row, dx| {
            let (n, ih) = (row / h.input, row % h.input);
            let mut pairs = Vec::with_capacity(h.kernel * w.kernel);
            let mut whole = None;
            for (iw, dx) in dx.chunks_exact_mut(c).enumerate() {
                let is_whole = w.stride == 1 && [0, w.kernel.max(1) - 1].iter().all(|&kw| place(&w, iw, kw).is_some());
                let shift = match whole {
                    Some(first) if is_whole => iw - first,
                    _ => {
                        pairs.clear();
                        for (kh, oh) in (0..h.kernel).filter_map(|kh| Some((kh, place(&h, ih, kh)?))) {
                            let line = (n * h.output + oh) * w.output;
                            let places =
                                (0..w.kernel).filter_map(|kw| Some((line + place(&w, iw, kw)?, kh * w.kernel + kw)));
                            pairs.extend(places);
                        }
                        whole = is_whole.then_some(iw);
                        0
                    }
                };
                gather(dx, dy, f, &pairs, shift);
            }
        },
    );
}

/// The gradient of the filter.
pub(super) fn backprop_filter<R: Float>(pool: &IntraPool, plan: &Depthwise, x: &[R], dy: &[R], df: &mut [R]) {
    let Depthwise { h, w, channels: c, batch, .. } = *plan;
    df.fill(R::zero());
    let rows = batch * h.output;
    if df.is_empty() || rows == 0 || x.is_empty() || dy.is_empty() {
        return;
    }
    let per_part = rows.div_ceil(PARTS);
    let mut parts = vec![R::zero(); rows.div_ceil(per_part) * df.len()];
    pool.for_each_chunk(&mut parts, df.len(), |part, df| {
        for row in part * per_part..((part + 1) * per_part).min(rows) {
            let (n, oh) = (row / h.output, row % h.output);
            for kh in h.taps(oh) {
                let line = (n * h.input + h.at(oh, kh)) * w.input;
                for kw in 0..w.kernel {
                    // The places at which this tap is in the image.
                    let first = w.before.saturating_sub(kw * w.dilation).div_ceil(w.stride);
                    let last = (w.before + w.input).saturating_sub(kw * w.dilation).div_ceil(w.stride).min(w.output);
                    if first >= last {
                        continue;
                    }
                    let x = &x[(line + w.at(first, kw)) * c..];
                    let dy = &dy[(row * w.output + first) * c..];
                    let df = &mut df[(kh * w.kernel + kw) * c..][..c];
                    vectorize(
                        #[inline(always)]
                        || correlate(df, (x, w.stride * c), (dy, c), last - first),
                    );
                }
            }
        }
    });
    for part in parts.chunks_exact(df.len()) {
        df.iter_mut().zip(part).for_each(|(sum, &x)| *sum += x);
    }
}

/// Calls `f(row, its elements)` for every row of `out`, several at a time.
fn each_row<R: Float>(pool: &IntraPool, taps: usize, row: usize, out: &mut [R], f: impl Fn(usize, &mut [R]) + Sync) {
    let rows = rows_per_task(0.05 * taps as f64, row);
    pool.for_each_chunk(out, rows * row, |i, out| {
        vectorize(
            #[inline(always)]
            || {
                for (k, out) in out.chunks_exact_mut(row).enumerate() {
                    f(i * rows + k, out);
                }
            },
        );
    });
}

/// The place whose tap `k` lies at `at` of the image, if there is one.
#[inline(always)]
fn place(axis: &Axis, at: usize, k: usize) -> Option<usize> {
    let distance = (at + axis.before).checked_sub(k * axis.dilation)?;
    let place = distance / axis.stride;
    (distance.is_multiple_of(axis.stride) && place < axis.output).then_some(place)
}

/// `to[c] = Σ from[place + shift][c] · f[tap][c]` over pairs of places and taps.
#[inline(always)]
fn gather<R: Float>(to: &mut [R], from: &[R], f: &[R], pairs: &[(usize, usize)], shift: usize) {
    let from = &from[shift * to.len()..];
    let (c, mut at) = (to.len(), 0);
    while at < c {
        at += match c - at {
            64.. => gather_block::<R, 64>(to, from, f, pairs, at),
            16.. => gather_block::<R, 16>(to, from, f, pairs, at),
            _ => {
                let product = |&(place, tap): &(usize, usize)| from[place * c + at] * f[tap * c + at];
                to[at] = pairs.iter().map(product).sum();
                1
            }
        };
    }
}

#[inline(always)]
fn gather_block<R: Float, const N: usize>(
    to: &mut [R],
    from: &[R],
    f: &[R],
    pairs: &[(usize, usize)],
    at: usize,
) -> usize {
    let c = to.len();
    let mut sums = [R::zero(); N];
    for &(place, tap) in pairs {
        if let (Some(x), Some(f)) = (from[place * c + at..].first_chunk::<N>(), f[tap * c + at..].first_chunk::<N>()) {
            for i in 0..N {
                sums[i] += x[i] * f[i];
            }
        }
    }
    to[at..at + N].copy_from_slice(&sums);
    N
}

/// `to[c] += Σ a[i][c] · b[i][c]` over `n` places, each side with the step between its places.
#[inline(always)]
fn correlate<R: Float>(to: &mut [R], a: (&[R], usize), b: (&[R], usize), n: usize) {
    let (c, mut at) = (to.len(), 0);
    while at < c {
        at += match c - at {
            64.. => correlate_block::<R, 64>(to, a, b, n, at),
            16.. => correlate_block::<R, 16>(to, a, b, n, at),
            _ => {
                to[at] += (0..n).map(|i| a.0[i * a.1 + at] * b.0[i * b.1 + at]).sum::<R>();
                1
            }
        };
    }
}

#[inline(always)]
fn correlate_block<R: Float, const N: usize>(
    to: &mut [R],
    a: (&[R], usize),
    b: (&[R], usize),
    n: usize,
    at: usize,
) -> usize {
    let mut sums = [R::zero(); N];
    for i in 0..n {
        if let (Some(a), Some(b)) = (a.0[i * a.1 + at..].first_chunk::<N>(), b.0[i * b.1 + at..].first_chunk::<N>()) {
            for i in 0..N {
                sums[i] += a[i] * b[i];
            }
        }
    }
    to[at..at + N].iter_mut().zip(&sums).for_each(|(to, &sum)| *to += sum);
    N
}
