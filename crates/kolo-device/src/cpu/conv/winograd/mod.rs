//! Convolutions with fewer multiplications: Winograd's algorithm.
//!
//! A tile of 4×4 results takes 36 products per pair of channels for a 3×3 filter and 64 for a 5×5 filter, which are 144
//! and 400 otherwise; 3×3 results of a 4×4 filter take 36, 144 otherwise; the gradient of a 5×5 filter takes 36 for 2×2
//! results, 100 otherwise. With `data`, `values` and
//! `results` as in `transform`, in both dimensions:
//!
//! ```text
//! forward          results(Σ over channels  data(tile of the input) · weighted values(filter))
//! backprop filter  weighted resultsᵀ(Σ over tiles  data(tile of the input) · values(tile of the gradient))
//! backprop input   as forward, with the filter rotated
//! ```
//!
//! Convolutions with a stride become ones without: see `fold`.
//!
//! The sums are 36 or 64 matrix products. Tiles are worked on in blocks that stay in a core's L2.
//!
//! Rounding errors are two to five times those of plain sums (measured in `bench/gemm.md`). They are relative to the
//! largest value of a tile, and a value that is not finite would spoil its whole tile, as would one so large that a
//! transform overflows. Results are therefore checked, and where one is not finite the caller convolves plainly
//! instead.
//!
//! Whether a convolution is done like this depends on its shape alone.

use std::any::TypeId;

use super::ConvShape;
use crate::cpu::IntraPool;
use crate::cpu::gemm::{Epilogue, Real, Shared, transpose};
use crate::cpu::scratch::Scratch;

mod filter;
mod filter_grad;
mod fold;
mod forward;
#[cfg(test)]
mod tests;
mod transform;

pub(super) use fold::Folded;

/// Channels on either side from which on the transforms are a small part of the work.
const MIN_CHANNELS: usize = 16;
/// The limit on a transformed filter, in bytes: it is up to four times the filter.
const MAX_FILTER_BYTES: f64 = (128 << 20) as f64;
/// The number of tasks to aim at, so that a few threads finish at about the same time.
const N_TASKS: usize = 16;

/// A convolution with stride and dilation 1 that this algorithm can compute.
pub(super) struct Winograd {
    batch: usize,
    /// Height, width and channels of what is convolved.
    source: [usize; 3],
    /// Height, width and channels of the results.
    grid: [usize; 3],
    /// Side of the filter: 3 to 5.
    side: usize,
    /// Results of a tile, in each dimension.
    step: usize,
    /// From a result's place to its first tap in the source.
    offset: [isize; 2],
}

impl Winograd {
    /// The convolution itself, if it is of this kind.
    pub(super) fn forward_of(shape: &ConvShape) -> Option<Winograd> {
        Winograd::forward_fitting(shape).filter(|this| this.pays(1.0))
    }

    /// The same, whether it pays or not.
    fn forward_fitting(shape: &ConvShape) -> Option<Winograd> {
        let offset = [-(shape.pad_top as isize), -(shape.pad_left as isize)];
        Winograd::new(shape, shape.input, shape.output, offset)
    }

    /// The convolution of the output's gradient with the rotated filter, if it is of this kind.
    pub(super) fn input_gradient_of(shape: &ConvShape) -> Option<Winograd> {
        Winograd::input_gradient_fitting(shape).filter(|this| this.pays(1.0))
    }

    /// The same, whether it pays or not.
    fn input_gradient_fitting(shape: &ConvShape) -> Option<Winograd> {
        let offset = |pad: usize, side: usize| pad as isize - side as isize + 1;
        let offset = [offset(shape.pad_top, shape.filter[0]), offset(shape.pad_left, shape.filter[1])];
        Winograd::new(shape, shape.output, shape.input, offset)
    }

    /// The gradient of the filter, if it is of this kind.
    pub(super) fn filter_gradient_of(shape: &ConvShape) -> Option<Winograd> {
        Winograd::filter_gradient_fitting(shape).filter(|this| this.pays(1.0) && this.is_cut())
    }

    /// The same, whether it pays or not.
    fn filter_gradient_fitting(shape: &ConvShape) -> Option<Winograd> {
        Winograd::forward_fitting(shape).map(Winograd::for_filter_gradient)
    }

    /// With the tiles that the gradient of the filter takes.
    fn for_filter_gradient(self) -> Winograd {
        Winograd { step: 7 - self.side, ..self }
    }

    /// `out = conv(source, filter)`, then the epilogue, unless a result is not finite or `T` is no `f32`. Then `out` is
    /// to be computed in another way.
    pub(super) fn convolve<T: Real>(
        &self,
        pool: &IntraPool,
        source: &[T],
        filter: &[T],
        out: &mut [T],
        epilogue: &Epilogue<'_, T>,
    ) -> bool {
        let Some((source, filter)) = as_f32(source).zip(as_f32(filter)) else {
            return false;
        };
        let epilogue = by_channel(epilogue);
        assert!(self.fits(source, filter, out.len()));
        // SAFETY: the slices are as long as the sizes say.
        unsafe { self.forward(pool, source.as_ptr(), filter.as_ptr(), out.as_mut_ptr().cast(), &epilogue) }
    }

    /// As [`Winograd::convolve`], with the filter of the convolution whose input's gradient this is.
    pub(super) fn convolve_turned<T: Real>(&self, pool: &IntraPool, source: &[T], filter: &[T], out: &mut [T]) -> bool {
        let Some((source, filter)) = as_f32(source).zip(as_f32(filter)) else {
            return false;
        };
        assert!(self.fits(source, filter, out.len()));
        let (o, c, n_taps) = (self.source[2], self.grid[2], self.side * self.side);
        let turned = Scratch::take::<f32>(filter.len());
        let to = turned.as_ptr::<f32>();
        for (tap, matrix) in filter.chunks_exact(c * o).enumerate() {
            // SAFETY: a matrix of the filter and its place in the scratch, which is as long.
            unsafe { transpose(matrix.as_ptr(), o, c, o, to.add((n_taps - 1 - tap) * c * o), c) };
        }
        // SAFETY: the slices are as long as the sizes say, and the scratch is as the filter.
        let done = unsafe { self.forward(pool, source.as_ptr(), to, out.as_mut_ptr().cast(), &Epilogue::default()) };
        turned.put_back();
        done
    }

    /// The gradient of the filter from that of the results, unless one is not finite or `T` is no `f32`. Then it is to
    /// be computed in another way.
    pub(super) fn filter_gradient<T: Real>(
        &self,
        pool: &IntraPool,
        source: &[T],
        grad_out: &[T],
        grad_filter: &mut [T],
    ) -> bool {
        let Some((source, grad_out)) = as_f32(source).zip(as_f32(grad_out)) else {
            return false;
        };
        assert!(self.fits(source, grad_filter, grad_out.len()));
        // SAFETY: the slices are as long as the sizes say.
        unsafe { self.gradient(pool, source.as_ptr(), grad_out.as_ptr(), grad_filter.as_mut_ptr().cast()) }
    }

    fn fits<T>(&self, source: &[f32], filter: &[T], results: usize) -> bool {
        let len = |sizes: [usize; 3]| self.batch * sizes.iter().product::<usize>();
        let taps = self.side * self.side * self.source[2] * self.grid[2];
        (source.len(), filter.len(), results) == (len(self.source), taps, len(self.grid))
    }

    fn new(shape: &ConvShape, source: [usize; 3], grid: [usize; 3], offset: [isize; 2]) -> Option<Winograd> {
        let [side, width] = shape.filter;
        let is_plain = shape.stride == [1, 1] && shape.dilation == [1, 1];
        let is_wide = source[2] >= MIN_CHANNELS && grid[2] >= MIN_CHANNELS;
        let suits = is_plain && is_wide && side == width && matches!(side, 3..=5);
        suits.then_some(Winograd { batch: shape.batch, source, grid, side, step: forward_step(side), offset })
    }

    /// Whether this takes clearly fewer cycles than plain sums do, and not too much memory. Plain sums have `share` of
    /// the products that the sizes make one think. The numbers count vectors of sixteen, and are about as measured: a
    /// tile's products and its transforms by channel, and the transform of the filter.
    fn pays(&self, share: f64) -> bool {
        let [c, o] = [self.source[2] as f64, self.grid[2] as f64];
        let taps = |d: usize| -> f64 {
            let first = |at: usize| at as isize + self.offset[d];
            let inside = |at: isize| at >= 0 && at < self.source[d] as isize;
            (0..self.grid[d]).map(|at| (0..self.side).filter(|&t| inside(first(at) + t as isize)).count() as f64).sum()
        };
        let plain = share * self.batch as f64 * taps(0) * taps(1) * c * o / 16.0;
        let tiles = self.n_tiles() as f64;
        let planes = self.planes() as f64;
        let fast = planes * (tiles * (0.07 * c * o + 0.4 * c.max(16.0) + 0.3 * o) + 0.4 * c * o);
        let n_bytes = planes * c * o * size_of::<f32>() as f64;
        fast < 0.8 * plain && n_bytes <= MAX_FILTER_BYTES
    }

    /// Products of a tile, for each pair of channels.
    fn planes(&self) -> usize {
        (self.step + self.side - 1).pow(2)
    }

    /// Tiles of an image, down and across.
    fn tiles(&self) -> [usize; 2] {
        [self.grid[0].div_ceil(self.step), self.grid[1].div_ceil(self.step)]
    }

    /// Tiles of all images.
    fn n_tiles(&self) -> usize {
        let [down, across] = self.tiles();
        self.batch * down * across
    }

    /// The image of tile `t`, and its first result's line and column.
    fn place(&self, t: usize) -> [usize; 3] {
        let [down, across] = self.tiles();
        [t / (down * across), t / across % down * self.step, t % across * self.step]
    }

    /// The pixels under tile `t` of the source at `images`.
    fn source_pixels<const N: usize>(&self, t: usize, images: *const f32, zeros: *const f32) -> [[*const f32; N]; N] {
        let [image, y, x] = self.place(t);
        let at = [y as isize + self.offset[0], x as isize + self.offset[1]];
        pixels(images, self.source, image, at, zeros)
    }
}

/// Results of a tile in each dimension, for a filter with this side, forward: six points, eight for the largest.
fn forward_step(side: usize) -> usize {
    if side == 5 { 4 } else { 7 - side }
}

/// A square of `N` pixels of an image, from `at` on; those outside are at `zeros`.
fn pixels<const N: usize>(
    images: *const f32,
    [height, width, channels]: [usize; 3],
    image: usize,
    at: [isize; 2],
    zeros: *const f32,
) -> [[*const f32; N]; N] {
    let mut found = [[zeros; N]; N];
    for (i, row) in found.iter_mut().enumerate() {
        let y = at[0] + i as isize;
        if y < 0 || y >= height as isize {
            continue;
        }
        let line = (image * height + y as usize) * width;
        for (j, pixel) in row.iter_mut().enumerate() {
            let x = at[1] + j as isize;
            if x >= 0 && x < width as isize {
                *pixel = images.wrapping_add((line + x as usize) * channels);
            }
        }
    }
    found
}

/// Values from one plane to the next: an odd number of cache lines, so that dozens of planes do not meet in a few sets.
fn plane(len: usize) -> usize {
    (len.div_ceil(16) | 1) * 16
}

/// What is done to a finished channel, for results that are `f32`.
fn by_channel<'a, T: Real>(epilogue: &Epilogue<'a, T>) -> Epilogue<'a, f32> {
    let column_bias = epilogue.column_bias.and_then(as_f32);
    Epilogue { column_bias, row_bias: None, activation: epilogue.activation }
}

/// `x` as `f32`, if that is what it is.
fn as_f32<T: Real>(x: &[T]) -> Option<&[f32]> {
    if TypeId::of::<T>() == TypeId::of::<f32>() { bytemuck::try_cast_slice(x).ok() } else { None }
}
