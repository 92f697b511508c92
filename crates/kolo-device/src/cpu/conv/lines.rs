//! Tiles of adjacent pixels, for images that come from memory.
//!
//! All pixels of a line except at its ends have all taps of a row inside the image, so adjacent pixels can be the rows
//! of a tile. A tile then reads a few contiguous ranges of its image, which are prefetched while the previous tile is
//! computed.

use std::ops::Range;

use super::direct::{Direct, Inside, Target};
use crate::cpu::gemm::{Ahead, Epilogue, Kernels, LEAST_ROWS, Layout, MicrosAhead, Real, Shared, Tile};
use crate::cpu::gemm::{apply, micros_ahead, nth_block};
use crate::cpu::stream::{fence, is_streamed};
use crate::cpu::{IntraPool, Isa};

/// The number of parts to split the lines into.
const N_TASKS: usize = 64;
/// A packed filter this small stays in L2 beside a few tiles' pixels.
const FILTER_BYTES: usize = 512 << 10;
/// The pixels that share the visit of a panel of a larger filter.
const BLOCK_BYTES: usize = 256 << 10;
/// Bytes of a cache line.
const LINE: usize = 64;

/// The state shared by all tiles.
struct Tiles<'a, T: 'static> {
    conv: &'a Direct<'a, T>,
    kernels: &'a Kernels<T>,
    micros: MicrosAhead<T>,
    /// Columns of a tile.
    width: usize,
    /// The pixels of a line with all taps of a row inside the image, the first of them in the source, and the number of
    /// tiles they are split into.
    xs: Range<usize>,
    source_x: usize,
    pieces: usize,
    /// Bytes of the source that a tile reads, in all rows of taps.
    seen: usize,
    panels: Vec<Panel>,
    /// The packed filter.
    filter: Shared<T>,
    out: Shared<T>,
    /// Values of the output from one image, line and pixel to the next.
    strides: [usize; 3],
    epilogue: &'a Epilogue<'a, T>,
}

/// Some columns of the output.
struct Panel {
    first: usize,
    width: usize,
    /// The first byte of the next tile's pixels, in each row of taps, to prefetch meanwhile.
    soon: usize,
}

/// The position of a tile.
struct TilePosition {
    /// The first value it reads, in the source.
    source: usize,
    /// Its first result, in the output.
    target: usize,
    /// The rows of taps inside the image.
    rows: Inside,
    /// Its pixels.
    len: usize,
}

impl<T: Real> Direct<'_, T> {
    /// As [`Direct::forward`], of those columns of the grid that see all taps of a row, if there are enough for tiles.
    /// Returns which these are.
    ///
    /// # Safety
    /// As there, with the packed filter.
    pub(super) unsafe fn lines(
        &self,
        pool: &IntraPool,
        columns: &[(usize, Inside)],
        panels: &[(usize, usize)],
        filter: *mut T,
        out: Target<T>,
        epilogue: &Epilogue<'_, T>,
    ) -> Option<Range<usize>> {
        let (width, micros) = micros_ahead::<T>()?;
        let kernels = T::kernels(Isa::best());
        let is_whole = |(_, columns): &&(usize, Inside)| columns.len == self.taps[1];
        let (first, inside) = *columns.iter().find(is_whole)?;
        let len = columns[first..].iter().take_while(is_whole).count();
        let pieces = len.div_ceil(kernels.mr);
        if len / pieces < LEAST_ROWS || self.n < width {
            return None;
        }
        let strides = [out.image, out.line, out.pixel];
        // Rows of a tile must be aligned to cache lines to be streamed in whole lines, and an epilogue would read them
        // again.
        let in_lines = |n: usize| (n * size_of::<T>()).is_multiple_of(LINE);
        let is_streamed = is_streamed(self.batch * out.image * size_of::<T>())
            && epilogue.is_empty()
            && (out.start as usize).is_multiple_of(LINE)
            && strides.into_iter().all(in_lines)
            && self.n.is_multiple_of(width);
        let seen = ((kernels.mr - 1) * self.patches.step.1 + self.taps[1]) * self.patches.channels;
        let n_bytes = seen * size_of::<T>();
        let panel = |(p, &(first, width)): (usize, &(usize, usize))| Panel {
            first,
            width,
            soon: nth_block(n_bytes, panels.len(), p).start,
        };
        let tiles = Tiles {
            conv: self,
            kernels,
            micros: micros[usize::from(is_streamed)],
            width,
            xs: first..first + len,
            source_x: inside.at,
            pieces,
            seen: self.taps[0] * n_bytes,
            panels: panels.iter().enumerate().map(panel).collect(),
            filter: Shared(filter),
            out: Shared(out.start),
            strides,
            epilogue,
        };
        let height = self.batch * self.patches.grid.0;
        let tasks = N_TASKS.min(height);
        pool.parallel_for(tasks, &|task| {
            let lines = nth_block(height, tasks, task);
            // SAFETY: passed on; these lines of the output are this task's alone.
            unsafe { tiles.run(lines.start * pieces..lines.end * pieces) };
            if is_streamed {
                fence();
            }
        });
        Some(first..first + len)
    }
}

impl<T: Real> Tiles<'_, T> {
    /// Computes some of the tiles, which are counted line by line through all images.
    ///
    /// # Safety
    /// As for [`Direct::lines`]; no other thread may touch the pixels of these tiles.
    unsafe fn run(&self, tiles: Range<usize>) {
        let conv = self.conv;
        let n_tiles = conv.batch * conv.patches.grid.0 * self.pieces;
        let k = conv.taps[0] * conv.taps[1] * conv.patches.channels;
        let is_small = k * conv.n * size_of::<T>() <= FILTER_BYTES;
        let per_block = if is_small { 1 } else { (BLOCK_BYTES / self.seen.max(1)).max(1) };
        // The tiles of a block, and of the next one, which is prefetched.
        let positions = |first: usize| (first..(first + per_block).min(n_tiles)).map(|tile| self.position(tile));
        let (mut now, mut next): (Vec<_>, Vec<_>) = Default::default();
        next.extend(positions(tiles.start));
        for first in tiles.clone().step_by(per_block) {
            std::mem::swap(&mut now, &mut next);
            next.clear();
            next.extend(positions(first + per_block));
            for panel in &self.panels {
                for (i, position) in now.iter().take(tiles.end - first).enumerate() {
                    // SAFETY: passed on.
                    unsafe { self.tile(position, next.get(i).unwrap_or(position), panel) };
                }
            }
        }
    }

    fn position(&self, tile: usize) -> TilePosition {
        let patches = self.conv.patches;
        let (line, piece) = (tile / self.pieces, tile % self.pieces);
        let (image, y) = (line / patches.grid.0, line % patches.grid.0);
        let xs = nth_block(self.xs.len(), self.pieces, piece);
        let rows = self.conv.rows(y);
        let x = self.source_x + xs.start * patches.step.1;
        let source = image * self.conv.image_len() + (rows.at * patches.width + x) * patches.channels;
        let [of_image, of_line, of_pixel] = self.strides;
        let target = image * of_image + y * of_line + (self.xs.start + xs.start) * of_pixel;
        TilePosition { source, target, rows, len: xs.len() }
    }

    /// Computes one panel of a tile, and prefetches a part of the next tile's pixels and of its results' lines.
    ///
    /// # Safety
    /// As for [`Tiles::run`].
    unsafe fn tile(&self, position: &TilePosition, next: &TilePosition, panel: &Panel) {
        let conv = self.conv;
        let c = conv.patches.channels;
        let run = conv.taps[1] * c;
        let (col, width) = (panel.first, panel.width);
        let cols = width.min(conv.n - col);
        let ldc = self.strides[2];
        // SAFETY: the taps inside the image are in the source and the packed filter; the output is as promised.
        unsafe {
            let out = self.out.get().add(position.target + col);
            let tile = Tile {
                k: run,
                segments: position.rows.len,
                a_skip: ((conv.dilation * conv.patches.width * c) as isize) - run as isize,
                b_skip: 0,
                a: conv.patches.source.as_ptr().add(position.source),
                a_stride: conv.patches.step.1 * c,
                b: self.filter.get().add(conv.taps[0] * run * col + position.rows.first * run * width),
                b_stride: width,
                c: out,
                ldc,
                cols,
                alpha: T::ONE,
                accumulate: false,
            };
            if cols == self.width {
                let soon = Ahead {
                    a: conv.patches.source.as_ptr().wrapping_add(next.source).wrapping_byte_add(panel.soon),
                    a_segment: conv.dilation * conv.patches.width * c,
                    c: self.out.get().wrapping_add(next.target + col),
                    ldc,
                };
                self.micros[position.len - LEAST_ROWS](&tile, &soon);
            } else {
                self.kernels.width_for(conv.n - col).micro(position.len, Layout::Rows)(&tile);
            }
            apply(self.epilogue, out, ldc, 0..position.len, col..col + cols);
        }
    }
}
