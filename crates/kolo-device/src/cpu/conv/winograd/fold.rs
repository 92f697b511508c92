//! Convolutions with a stride as convolutions without.
//!
//! With a stride of two, four neighbouring pixels become one with four times the channels, and a filter of 7×7 becomes
//! one of 4×4, with zeros where it ends before a square does. So the first layer of many nets, 7×7 over images of three
//! channels, is one of 4×4 over half as many lines and columns of twelve channels, which `Winograd` takes a third of
//! the products for.
//!
//! The image is folded from the first tap of the first result on, so the folded image contains the padding, as zeros.

use super::{Epilogue, Winograd, as_f32, by_channel, forward_step};
use crate::cpu::IntraPool;
use crate::cpu::conv::ConvShape;
use crate::cpu::gemm::{Real, Shared, nth_block};
use crate::cpu::scratch::Scratch;

/// Channels after folding from which on it can pay.
const MIN_CHANNELS: usize = 8;
/// Output channels from which on it can pay.
const MIN_OUTPUTS: usize = 16;
/// Pieces to cut the copy of the images into.
const N_PIECES: usize = 32;

/// A convolution with a stride that can be folded.
pub(in super::super) struct Folded {
    shape: ConvShape,
    /// The convolution of the folded images with the folded filter.
    inner: Winograd,
}

impl Folded {
    /// The convolution itself, if it is of this kind.
    pub(in super::super) fn forward_of(shape: &ConvShape) -> Option<Folded> {
        Folded::fitting(shape).filter(Folded::pays)
    }

    /// The gradient of the filter, if it is of this kind.
    pub(in super::super) fn filter_gradient_of(shape: &ConvShape) -> Option<Folded> {
        Folded::gradient_fitting(shape).filter(|this| this.pays() && this.inner.is_cut())
    }

    /// The convolution, whether folding it pays or not.
    pub(super) fn fitting(shape: &ConvShape) -> Option<Folded> {
        let [height, width] = [0, 1].map(|d| shape.filter[d].div_ceil(shape.stride[d]));
        let channels = shape.stride[0].checked_mul(shape.stride[1])?.checked_mul(shape.input[2])?;
        let is_wide = channels >= MIN_CHANNELS && shape.output[2] >= MIN_OUTPUTS;
        let has_stride = shape.stride != [1, 1] && shape.dilation == [1, 1];
        let suits = has_stride && is_wide && height == width && matches!(height, 3..=5);
        suits.then(|| Folded {
            shape: *shape,
            inner: Winograd {
                batch: shape.batch,
                source: [shape.output[0] + height - 1, shape.output[1] + height - 1, channels],
                grid: shape.output,
                side: height,
                step: forward_step(height),
                offset: [0, 0],
            },
        })
    }

    /// The gradient of the filter, whether folding pays or not.
    pub(super) fn gradient_fitting(shape: &ConvShape) -> Option<Folded> {
        Folded::fitting(shape).map(|this| Folded { inner: this.inner.for_filter_gradient(), ..this })
    }

    /// Direct sums skip the padding. Padding can be arbitrarily large, so the folded size is bounded, too.
    fn pays(&self) -> bool {
        let (shape, inner) = (&self.shape, &self.inner);
        let folded = inner.source.iter().try_fold(shape.batch, |n, &size| n.checked_mul(size));
        if folded.is_none_or(|n| n > 2 * shape.input_len() + shape.output_len()) {
            return false;
        }
        // The taps inside the image, of all results of a line or column, out of those of the folded filter.
        let share = |d: usize, pad: usize| -> f64 {
            let inside = |at: usize| {
                let (start, end) = (pad.saturating_sub(at * shape.stride[d]), shape.input[d] + pad);
                end.saturating_sub(at * shape.stride[d]).min(shape.filter[d]).saturating_sub(start)
            };
            let taps: usize = (0..shape.output[d]).map(inside).sum();
            taps as f64 / (shape.output[d] * inner.side * shape.stride[d]) as f64
        };
        inner.pays(share(0, shape.pad_top) * share(1, shape.pad_left))
    }

    /// As [`Winograd::convolve`].
    pub(in super::super) fn convolve<T: Real>(
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
        assert!(self.fits(source.len(), filter.len(), out.len()));
        let epilogue = by_channel(epilogue);
        let images = self.fold_images(pool, source);
        let folded = Scratch::take::<f32>(self.folded_filter_len());
        // SAFETY: the scratch has room for the folded filter, and what is not written as a tap is zero. The folded
        // operands are as long as the inner convolution's sizes say, and so is `out`.
        let done = unsafe {
            let to = folded.as_ptr::<f32>();
            std::slice::from_raw_parts_mut(to, self.folded_filter_len()).fill(0.0);
            for (from, at, len) in self.taps() {
                to.add(at).copy_from_nonoverlapping(filter[from..from + len].as_ptr(), len);
            }
            self.inner.forward(pool, images.as_ptr(), to, out.as_mut_ptr().cast(), &epilogue)
        };
        folded.put_back();
        images.put_back();
        done
    }

    /// As [`Winograd::filter_gradient`].
    pub(in super::super) fn filter_gradient<T: Real>(
        &self,
        pool: &IntraPool,
        source: &[T],
        grad_out: &[T],
        grad_filter: &mut [T],
    ) -> bool {
        let Some((source, grad_out)) = as_f32(source).zip(as_f32(grad_out)) else {
            return false;
        };
        assert!(self.fits(source.len(), grad_filter.len(), grad_out.len()));
        let images = self.fold_images(pool, source);
        let folded = Scratch::take::<f32>(self.folded_filter_len());
        // SAFETY: the folded operands are as long as the inner convolution's sizes say, and so is `grad_out`. All of
        // the scratch is written before it is read.
        let done = unsafe {
            let gradient = folded.as_ptr::<f32>();
            let done = self.inner.gradient(pool, images.as_ptr(), grad_out.as_ptr(), gradient);
            let to = grad_filter.as_mut_ptr().cast::<f32>();
            for (place, from, len) in self.taps() {
                assert!(place + len <= grad_filter.len());
                to.add(place).copy_from_nonoverlapping(gradient.add(from), len);
            }
            done
        };
        folded.put_back();
        images.put_back();
        done
    }

    fn fits(&self, input: usize, filter: usize, output: usize) -> bool {
        let shape = &self.shape;
        (input, filter, output) == (shape.input_len(), shape.filter_len(), shape.output_len())
    }

    fn folded_filter_len(&self) -> usize {
        self.inner.side.pow(2) * self.inner.source[2] * self.inner.grid[2]
    }

    /// For each tap its place in the filter and in the folded filter, and its length in both.
    fn taps(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        let ([height, width], [down, across]) = (self.shape.filter, self.shape.stride);
        let (len, side) = (self.shape.input[2] * self.shape.output[2], self.inner.side);
        (0..height * width).map(move |tap| {
            let (i, j) = (tap / width, tap % width);
            let pixel = i / down * side + j / across;
            let folded = (pixel * down + i % down) * across + j % across;
            (tap * len, folded * len, len)
        })
    }

    /// The images, with a pixel for each square of as many pixels as the stride has.
    fn fold_images(&self, pool: &IntraPool, source: &[f32]) -> Scratch {
        let [lines, columns, channels] = self.inner.source;
        let folded = Scratch::take::<f32>(self.shape.batch * lines * columns * channels);
        let to = Shared(folded.as_ptr::<f32>());
        let n_lines = self.shape.batch * lines;
        pool.parallel_for(N_PIECES, &|piece| {
            for line in nth_block(n_lines, N_PIECES, piece) {
                let len = columns * channels;
                // SAFETY: this line of the scratch, which has room for all of them, is this task's alone. Any bits are
                // floats, and all of the line is overwritten.
                let to = unsafe { std::slice::from_raw_parts_mut(to.get().add(line * len), len) };
                self.fold_line(source, line / lines, line % lines, to);
            }
        });
        folded
    }

    /// Line `y` of a folded image.
    fn fold_line(&self, source: &[f32], image: usize, y: usize, to: &mut [f32]) {
        let [height, width, c] = self.shape.input;
        let [down, across] = self.shape.stride;
        let columns = self.inner.source[1];
        // Values of a line that go to one folded pixel, and those of such a pixel.
        let (part, pixel) = (across * c, down * across * c);
        // Values of zero before the line, and those of the line that are seen.
        let before = self.shape.pad_left * c;
        let seen = (columns * part).saturating_sub(before).min(width * c);
        for i in 0..down {
            let to = &mut to[i * part..];
            let line = (y * down + i).wrapping_sub(self.shape.pad_top);
            let line = match line < height {
                true => &source[(image * height + line) * width * c..][..seen],
                false => &[],
            };
            // Whole parts from the line; the others are at its ends or outside.
            let first = before.div_ceil(part).min(columns);
            let whole = (before + line.len()).saturating_sub(first * part) / part;
            let last = first + if line.is_empty() { 0 } else { whole };
            if first < last {
                let line = &line[first * part - before..];
                let to = &mut to[first * pixel..];
                match part {
                    2 => spread::<2>(line, to, pixel, last - first),
                    4 => spread::<4>(line, to, pixel, last - first),
                    6 => spread::<6>(line, to, pixel, last - first),
                    _ => (0..last - first)
                        .for_each(|x| to[x * pixel..][..part].copy_from_slice(&line[x * part..][..part])),
                }
            }
            for x in (0..first).chain(last..columns) {
                let to = &mut to[x * pixel..][..part];
                for (at, to) in (x * part..).zip(to) {
                    *to = at.checked_sub(before).and_then(|at| line.get(at)).copied().unwrap_or(0.0);
                }
            }
        }
    }
}

/// Copies `n` pieces of `LEN` values, one after the other, to places `stride` apart. A length that the compiler knows
/// becomes a few moves instead of a call.
fn spread<const LEN: usize>(from: &[f32], to: &mut [f32], stride: usize, n: usize) {
    for (from, to) in from.chunks_exact(LEN).zip(to.chunks_mut(stride)).take(n) {
        to[..LEN].copy_from_slice(from);
    }
}
