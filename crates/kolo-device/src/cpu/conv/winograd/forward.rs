//! Forward, in blocks of tiles: transform the data, and for each panel of output channels multiply and transform back.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::filter::filter_vector;
use super::transform::{Results, data_tile, results_tile, with_vectors};
use super::{Shared, Winograd, plane};
use crate::cpu::gemm::{Epilogue, Kernels, Layout, Real, Simd, Tile, apply, nth_block};
use crate::cpu::scratch::Scratch;
use crate::cpu::{IntraPool, Isa};

/// A transformed filter this small stays in L3, and blocks of tiles should stay in L2. A larger one comes from memory,
/// so that blocks should use it more often.
const FILTER_BYTES: usize = 16 << 20;

/// Work below which waking another thread takes longer than it saves.
const SERIAL_FLOP: usize = 2_000_000;

impl Winograd {
    /// `out = conv(source, filter)`, then the epilogue. Returns `false` if some result is not finite; then `out` has
    /// arbitrary contents.
    ///
    /// # Safety
    /// `source` must have the images, `filter` a row of output channels per tap and channel, `out` room for the
    /// results.
    pub(in super::super) unsafe fn forward(
        &self,
        pool: &IntraPool,
        source: *const f32,
        filter: *const f32,
        out: *mut f32,
        epilogue: &Epilogue<'_, f32>,
    ) -> bool {
        let kernels = f32::kernels(Isa::best());
        let (c, n) = (self.source[2], self.grid[2]);
        let panels = kernels.panels(n);
        let packed_len = panels.iter().map(|(_, width)| self.planes() * plane(c * width)).sum();
        let packed = Scratch::take::<f32>(packed_len);
        let (b, filter) = (Shared(packed.as_ptr::<f32>()), Shared(filter.cast_mut()));
        let pieces = (c * n).div_ceil(2048).min(c);
        pool.parallel_for(pieces, &|piece| {
            for row in nth_block(c, pieces, piece) {
                // SAFETY: this row of every tap of the filter, and its place in the panels.
                unsafe {
                    match self.side {
                        3 => filter_row::<6, 3>(filter.get().add(row * n), [c, n], &panels, b.get(), row),
                        4 => filter_row::<6, 4>(filter.get().add(row * n), [c, n], &panels, b.get(), row),
                        _ => filter_row::<8, 5>(filter.get().add(row * n), [c, n], &panels, b.get(), row),
                    }
                }
            }
        });
        let tiles = self.n_tiles();
        let most = if packed_len * size_of::<f32>() <= FILTER_BYTES { kernels.mr } else { 4 * kernels.mr };
        let blocks = tiles.div_ceil(most);
        let finite = AtomicBool::new(true);
        let (source, out) = (Shared(source.cast_mut()), Shared(out));
        let task = |block: usize| {
            if !finite.load(Relaxed) {
                return;
            }
            let block = Block {
                conv: self,
                kernels,
                panels: &panels,
                first: nth_block(tiles, blocks, block).start,
                len: nth_block(tiles, blocks, block).len(),
            };
            // SAFETY: the results of these tiles are this task's alone.
            let is_finite = unsafe {
                match self.side {
                    3 => block.run::<6, 4>(source.get(), b.get(), out.get(), epilogue),
                    4 => block.run::<6, 3>(source.get(), b.get(), out.get(), epilogue),
                    _ => block.run::<8, 4>(source.get(), b.get(), out.get(), epilogue),
                }
            };
            if !is_finite {
                finite.store(false, Relaxed);
            }
        };
        if 2 * self.planes() * tiles * c * n < SERIAL_FLOP {
            (0..blocks).for_each(task);
        } else {
            pool.parallel_for(blocks, &task);
        }
        packed.put_back();
        finite.into_inner()
    }
}

/// Transforms one input channel of a filter to where the products read it: by panel, plane and channel.
///
/// # Safety
/// `taps` must have `n` values in each tap, `c * n` from one to the next; `to` must have room for all panels.
unsafe fn filter_row<const N: usize, const R: usize>(
    taps: *const f32,
    [c, n]: [usize; 2],
    panels: &[(usize, usize)],
    to: *mut f32,
    row: usize,
) {
    with_vectors!((V, W) => {
        let mut to = to;
        for &(col, width) in panels {
            let plane = plane(c * width);
            for first in (0..width).step_by(W::LANES) {
                let filled = W::LANES.min(n.saturating_sub(col + first));
                // SAFETY: this many values are left in each tap; widths of panels are multiples of a vector.
                unsafe {
                    let taps = taps.wrapping_add(col + first);
                    filter_vector::<W, N, R>(taps, c * n, filled, to.add(row * width + first), plane);
                }
            }
            to = to.wrapping_add(N * N * plane);
        }
    });
}

/// Tiles that a task does at once.
struct Block<'a> {
    conv: &'a Winograd,
    kernels: &'a Kernels<f32>,
    panels: &'a [(usize, usize)],
    first: usize,
    len: usize,
}

impl Block<'_> {
    /// All results of these tiles; `false` if one is not finite.
    ///
    /// # Safety
    /// As for [`Winograd::forward`], with the transformed filter; no other thread may touch the results of the tiles.
    unsafe fn run<const N: usize, const M: usize>(
        &self,
        source: *const f32,
        filter: *const f32,
        out: *mut f32,
        epilogue: &Epilogue<'_, f32>,
    ) -> bool {
        let c = self.conv.source[2];
        let padded = c.next_multiple_of(16);
        // Rows a multiple of a page apart would map to one set of L1.
        let a_stride = padded + if padded.is_multiple_of(512) { 16 } else { 0 };
        // Eight points lose more bits, most of them to long sums.
        let runs = if N == 6 { 1 } else { c.div_ceil(32).max(2) };
        let (a_plane, c_plane) = (plane(self.len * a_stride), plane(self.len * self.kernels.nr()));
        let scratch = Scratch::take::<f32>(N * N * (a_plane + c_plane) + padded);
        // SAFETY: three parts of the scratch, which has room for them; the zeros are written before they are read.
        unsafe {
            let data = scratch.as_ptr::<f32>();
            let products = data.add(N * N * a_plane);
            let zeros = products.add(N * N * c_plane);
            std::slice::from_raw_parts_mut(zeros, padded).fill(0.0);
            with_vectors!((V, W) => {
                for t in 0..self.len {
                    let pixels = self.conv.source_pixels(self.first + t, source, zeros);
                    data_tile::<V, N>(&pixels, 0..c, data.add(t * a_stride), a_plane);
                }
            });
            let mut finite = true;
            let mut filter = filter;
            for &(col, width) in self.panels {
                let b_plane = plane(c * width);
                let panel = self.kernels.width_for(self.conv.grid[2] - col);
                let n_parts = self.len.div_ceil(self.kernels.mr);
                for i in 0..N * N {
                    for part in 0..n_parts {
                        let rows = nth_block(self.len, n_parts, part);
                        let micro = panel.micro(rows.len(), Layout::Rows);
                        for run in 0..runs {
                            let k = nth_block(c, runs, run);
                            micro(&Tile {
                                k: k.len(),
                                segments: 1,
                                a_skip: 0,
                                b_skip: 0,
                                a: data.add(i * a_plane + rows.start * a_stride + k.start),
                                a_stride,
                                b: filter.add(i * b_plane + k.start * width),
                                b_stride: width,
                                c: products.add(i * c_plane + rows.start * width),
                                ldc: width,
                                cols: width,
                                alpha: 1.0,
                                accumulate: run > 0,
                            });
                        }
                    }
                }
                filter = filter.wrapping_add(N * N * b_plane);
                with_vectors!((V, W) => {
                    for t in 0..self.len {
                        let to = self.results::<M>(t, (col, width), out);
                        finite &= results_tile::<V, N, M>(products.add(t * width), c_plane, &to);
                    }
                });
                if !finite {
                    break;
                }
                if !epilogue.is_empty() {
                    for t in 0..self.len {
                        let to = self.results::<M>(t, (col, width), out);
                        for line in 0..to.size[0] {
                            apply(
                                epilogue,
                                to.start.add(line * to.line),
                                to.pixel,
                                0..to.size[1],
                                col..col + to.channels,
                            );
                        }
                    }
                }
            }
            scratch.put_back();
            finite
        }
    }

    /// The destination of the results of tile `t` in a panel.
    #[inline(always)]
    fn results<const M: usize>(&self, t: usize, (col, width): (usize, usize), out: *mut f32) -> Results {
        let [height, columns, n] = self.conv.grid;
        let [image, y, x] = self.conv.place(self.first + t);
        Results {
            start: out.wrapping_add(((image * height + y) * columns + x) * n + col),
            line: columns * n,
            pixel: n,
            size: [M.min(height - y), M.min(columns - x)],
            channels: width.min(n - col),
        }
    }
}
