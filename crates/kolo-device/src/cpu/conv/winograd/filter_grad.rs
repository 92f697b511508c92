//! The filter's gradient: transform tiles of the data and of the results' gradient, sum their products over the tiles,
//! and transform back once at the end.
//!
//! Plain sums of a filter's gradient are short, one for a few images, and so lose little. Errors with eight points
//! would be nearly nine times as large. The gradient of a 5×5 filter has six points therefore, and tiles of 2×2.
//!
//! A task has a part of the tiles and a square of channels; the sums of parts are added in order.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::filter::filter_back;
use super::transform::{data_tile, values_tile, with_vectors};
use super::{N_TASKS, Shared, Winograd, pixels, plane};
use crate::cpu::gemm::{Layout, Real, Simd, Tile, nth_block};
use crate::cpu::scratch::Scratch;
use crate::cpu::{IntraPool, Isa};

/// Most channels of a task, of the data and of the gradient: their sums, for all planes, are a part of L2.
const CHANNELS: [usize; 2] = [64, 64];
/// Tiles that are transformed at once, in bytes.
const BLOCK_BYTES: usize = 512 << 10;
/// Most tiles of a block.
const BLOCK_TILES: usize = 56;
/// Fewest tiles of a part.
const PART_TILES: usize = 56;

/// How the work is split.
struct Cuts {
    /// Parts of the tiles.
    parts: usize,
    /// Pieces of the channels of the data and of the gradient.
    pieces: [usize; 2],
    /// Values of the sums from a channel of the data to the next, from a plane to the next and of one task.
    stride: usize,
    plane: usize,
    len: usize,
}

impl Winograd {
    fn cuts(&self) -> Cuts {
        let (c, n) = (self.source[2], self.grid[2]);
        let pieces = [c.div_ceil(CHANNELS[0]), n.div_ceil(CHANNELS[1])];
        let parts = N_TASKS.div_ceil(2 * pieces[0] * pieces[1]).min(self.n_tiles() / PART_TILES).max(1);
        let stride = n.div_ceil(pieces[1]).next_multiple_of(16);
        let plane = plane(c.div_ceil(pieces[0]) * stride);
        Cuts { parts, pieces, stride, plane, len: self.planes() * plane }
    }

    /// Whether there is enough work for a few threads.
    pub(super) fn is_cut(&self) -> bool {
        let Cuts { parts, pieces: [c_pieces, n_pieces], .. } = self.cuts();
        parts * c_pieces * n_pieces >= 4
    }

    /// The gradient of the filter; `false` if some of it is not finite.
    ///
    /// # Safety
    /// `source` must have the images, `grad_out` the gradients of the results, `grad_filter` room for the filter.
    pub(super) unsafe fn gradient(
        &self,
        pool: &IntraPool,
        source: *const f32,
        grad_out: *const f32,
        grad_filter: *mut f32,
    ) -> bool {
        let (c, n) = (self.source[2], self.grid[2]);
        let cuts = self.cuts();
        let [c_pieces, n_pieces] = cuts.pieces;
        let sums = Scratch::take::<f32>(cuts.parts * c_pieces * n_pieces * cuts.len);
        let sum = Shared(sums.as_ptr::<f32>());
        let (source, grad_out, grad_filter) =
            (Shared(source.cast_mut()), Shared(grad_out.cast_mut()), Shared(grad_filter));
        pool.parallel_for(cuts.parts * c_pieces * n_pieces, &|task| {
            let piece = task % (c_pieces * n_pieces);
            let part = Part {
                conv: self,
                cuts: &cuts,
                tiles: nth_block(self.n_tiles(), cuts.parts, task / (c_pieces * n_pieces)),
                data: nth_block(c, c_pieces, piece / n_pieces),
                grad: nth_block(n, n_pieces, piece % n_pieces),
            };
            // SAFETY: this part of the sums is this task's alone.
            unsafe {
                let sum = sum.get().add(task * cuts.len);
                match self.side {
                    3 => part.run::<6, 4>(source.get(), grad_out.get(), sum),
                    4 => part.run::<6, 3>(source.get(), grad_out.get(), sum),
                    _ => part.run::<6, 2>(source.get(), grad_out.get(), sum),
                }
            }
        });
        let finite = AtomicBool::new(true);
        let jobs = (c * n).div_ceil(2048).min(c);
        pool.parallel_for(jobs, &|job| {
            for row in nth_block(c, jobs, job) {
                // SAFETY: this row of the gradient is this task's alone, and the sums are complete.
                let is_finite = unsafe {
                    match self.side {
                        3 => self.back::<6, 3>(&cuts, row, sum.get(), grad_filter.get()),
                        4 => self.back::<6, 4>(&cuts, row, sum.get(), grad_filter.get()),
                        _ => self.back::<6, 5>(&cuts, row, sum.get(), grad_filter.get()),
                    }
                };
                if !is_finite {
                    finite.store(false, Relaxed);
                }
            }
        });
        sums.put_back();
        finite.into_inner()
    }

    /// Adds up the parts of one input channel and transforms them back. Returns whether all are finite.
    ///
    /// # Safety
    /// As for [`Winograd::gradient`], with all sums.
    unsafe fn back<const N: usize, const R: usize>(
        &self,
        cuts: &Cuts,
        row: usize,
        sums: *const f32,
        to: *mut f32,
    ) -> bool {
        let (c, n) = (self.source[2], self.grid[2]);
        let [c_pieces, n_pieces] = cuts.pieces;
        let c_piece = (0..c_pieces).find(|&i| nth_block(c, c_pieces, i).contains(&row)).unwrap_or(0);
        let in_piece = row - nth_block(c, c_pieces, c_piece).start;
        let parts = (cuts.parts, c_pieces * n_pieces * cuts.len);
        with_vectors!((V, W) => {
            let mut finite = true;
            for n_piece in 0..n_pieces {
                let cols = nth_block(n, n_pieces, n_piece);
                for first in (0..cols.len()).step_by(W::LANES) {
                    let at = (c_piece * n_pieces + n_piece) * cuts.len + in_piece * cuts.stride + first;
                    let filled = W::LANES.min(cols.len() - first);
                    // SAFETY: this many values are left in the rows of the sums and of the taps.
                    finite &= unsafe {
                        let to = to.add(row * n + cols.start + first);
                        filter_back::<W, N, R>(sums.add(at), cuts.plane, parts, filled, to, c * n)
                    };
                }
            }
            finite
        })
    }
}

/// The part of a task: some tiles, some channels of the data and of the gradient.
struct Part<'a> {
    conv: &'a Winograd,
    cuts: &'a Cuts,
    tiles: Range<usize>,
    data: Range<usize>,
    grad: Range<usize>,
}

impl Part<'_> {
    /// The sums of the products of these tiles.
    ///
    /// # Safety
    /// As for [`Winograd::gradient`]; `sums` must have room for a task.
    unsafe fn run<const N: usize, const M: usize>(&self, source: *const f32, grad_out: *const f32, sums: *mut f32) {
        let kernels = f32::kernels(Isa::best());
        let a_stride = self.data.len().next_multiple_of(16);
        let b_stride = self.cuts.stride;
        let fit = BLOCK_BYTES / (N * N * (a_stride + b_stride) * size_of::<f32>());
        let blocks = self.tiles.len().div_ceil(fit.clamp(1, BLOCK_TILES)).max(1);
        let most = self.tiles.len().div_ceil(blocks);
        let (a_plane, b_plane) = (plane(most * a_stride), plane(most * b_stride));
        let n_zeros = self.data.end.max(self.grad.end).next_multiple_of(16);
        let scratch = Scratch::take::<f32>(N * N * (a_plane + b_plane) + n_zeros);
        let n_rows = self.data.len().div_ceil(kernels.mr);
        // SAFETY: three parts of the scratch, which has room for them; the zeros are written before they are read.
        unsafe {
            let data = scratch.as_ptr::<f32>();
            let grad = data.add(N * N * a_plane);
            let zeros = grad.add(N * N * b_plane);
            std::slice::from_raw_parts_mut(zeros, n_zeros).fill(0.0);
            for block in 0..blocks {
                let tiles = nth_block(self.tiles.len(), blocks, block);
                with_vectors!((V, W) => {
                    for (i, t) in tiles.clone().enumerate() {
                        let t = self.tiles.start + t;
                        let pixels = self.conv.source_pixels(t, source, zeros);
                        data_tile::<V, N>(&pixels, self.data.clone(), data.add(i * a_stride), a_plane);
                    }
                });
                with_vectors!((V, W) => {
                    for (i, t) in tiles.clone().enumerate() {
                        let [image, y, x] = self.conv.place(self.tiles.start + t);
                        let pixels = pixels::<M>(grad_out, self.conv.grid, image, [y as isize, x as isize], zeros);
                        values_tile::<V, N, M>(&pixels, self.grad.clone(), grad.add(i * b_stride), b_plane);
                    }
                });
                for i in 0..N * N {
                    let mut col = 0;
                    while col < b_stride {
                        let width = kernels.width_for(b_stride - col);
                        for r in 0..n_rows {
                            let rows = nth_block(self.data.len(), n_rows, r);
                            width.micro(rows.len(), Layout::Cols)(&Tile {
                                k: tiles.len(),
                                segments: 1,
                                a_skip: 0,
                                b_skip: 0,
                                a: data.add(i * a_plane + rows.start),
                                a_stride,
                                b: grad.add(i * b_plane + col),
                                b_stride,
                                c: sums.add(i * self.cuts.plane + rows.start * b_stride + col),
                                ldc: b_stride,
                                cols: width.cols,
                                alpha: 1.0,
                                accumulate: block > 0,
                            });
                        }
                        col += width.cols;
                    }
                }
            }
        }
        scratch.put_back();
    }
}
