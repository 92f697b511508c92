//! Convolutions of batches without a patch matrix.
//!
//! The rows of a tile are one pixel in several images, or adjacent pixels where lines are long (see `lines`). They have
//! the same taps, so taps outside the image are skipped, and the rest are a few contiguous segments of each image, read
//! in place. Padding by half a 5×5 filter on 14×14 images is a sixth of all products.

use super::patches::Patches;
use crate::cpu::IntraPool;
use crate::cpu::gemm::{Epilogue, Layout, Real, Shared, Tile, apply, nth_block, pack_b};
use crate::cpu::scratch::Scratch;
use crate::cpu::{Isa, vectorize};

/// A convolution with taps in a grid whose rows are contiguous.
pub(super) struct Direct<'a, T> {
    pub(super) patches: &'a Patches<'a, T>,
    pub(super) batch: usize,
    /// Output channels.
    pub(super) n: usize,
    /// Rows of taps, and taps of a row.
    pub(super) taps: [usize; 2],
    /// Source rows between rows of taps.
    pub(super) dilation: usize,
}

/// The taps of a window that are inside the image, in one dimension, and where the first of them is.
#[derive(Clone, Copy)]
pub(super) struct Inside {
    pub(super) first: usize,
    pub(super) len: usize,
    pub(super) at: usize,
}

/// The destination of a grid's pixels: a start, and the strides of images, lines and pixels.
#[derive(Clone, Copy)]
pub(super) struct Target<T> {
    pub start: *mut T,
    pub image: usize,
    pub line: usize,
    pub pixel: usize,
}

impl<T> Target<T> {
    /// A grid of `lines` by `columns` pixels of `n` values, one after the other.
    pub(super) fn dense(start: *mut T, (lines, columns): (usize, usize), n: usize) -> Target<T> {
        Target { start, image: lines * columns * n, line: columns * n, pixel: n }
    }
}

/// The minimum number of images for the rows of a tile.
const MIN_BATCH: usize = 8;
/// Values in a row of taps below which copying them to a patch matrix is as fast.
const MIN_RUN: usize = 3;
/// The number of tasks to aim at, so that a few threads finish at about the same time.
const N_TASKS: usize = 16;

impl<'a, T: Real> Direct<'a, T> {
    /// The convolution with these patches, if this algorithm suits it.
    pub(super) fn new(patches: &'a Patches<'a, T>, batch: usize, n: usize) -> Option<Self> {
        let first = patches.runs.first()?;
        let dilation = patches.runs.get(1).map_or(1, |run| run.dy - first.dy);
        let is_grid = patches.runs.iter().enumerate().all(|(i, run)| {
            (run.dx, run.n_taps) == (first.dx, first.n_taps) && run.dy == first.dy + i as isize * dilation
        });
        let suits = is_grid && dilation > 0 && batch >= MIN_BATCH && first.n_taps * patches.channels >= MIN_RUN;
        suits.then_some(Direct {
            patches,
            batch,
            n,
            taps: [patches.runs.len(), first.n_taps],
            dilation: dilation as usize,
        })
    }

    /// Rows of taps inside the image at line `y` of the grid.
    pub(super) fn rows(&self, y: usize) -> Inside {
        let start = (y * self.patches.step.0) as isize + self.patches.runs[0].dy;
        inside(start, self.taps[0], self.dilation, self.patches.height)
    }

    /// Taps of a row inside the image at column `x` of the grid.
    fn columns(&self, x: usize) -> Inside {
        let start = (x * self.patches.step.1) as isize + self.patches.runs[0].dx;
        inside(start, self.taps[1], 1, self.patches.width)
    }

    pub(super) fn image_len(&self) -> usize {
        self.patches.height * self.patches.width * self.patches.channels
    }

    /// `out = conv(source, filter)`, then the epilogue.
    ///
    /// # Safety
    /// `filter` must have a row of `n` per tap and channel, `out` room for one per pixel of the grid in each image.
    pub(super) unsafe fn forward(
        &self,
        pool: &IntraPool,
        filter: *const T,
        out: Target<T>,
        epilogue: &Epilogue<'_, T>,
    ) {
        let kernels = T::kernels(Isa::best());
        let (c, n) = (self.patches.channels, self.n);
        let run = self.taps[1] * c;
        let k = self.taps[0] * run;
        let panels = kernels.panels(n);
        let packed = Scratch::take::<T>(k * panels.last().map_or(0, |(col, width)| col + width));
        for &(col, width) in &panels {
            // SAFETY: the panel lies inside the filter and the buffer.
            unsafe {
                let panel = packed.as_ptr::<T>().add(k * col);
                pack_b(filter.add(col), Layout::Rows, n, k, width.min(n - col), width, panel);
            }
        }
        let (grid_h, grid_w) = self.patches.grid;
        let columns: Vec<(usize, Inside)> = (0..grid_w).map(|x| (x, self.columns(x))).collect();
        #[cfg(target_arch = "x86_64")]
        let columns = {
            // SAFETY: passed on, with the packed filter.
            let done = unsafe { self.lines(pool, &columns, &panels, packed.as_ptr(), out, epilogue) };
            let done = done.unwrap_or_default();
            columns.into_iter().filter(|(x, _)| !done.contains(x)).collect::<Vec<_>>()
        };
        if columns.is_empty() {
            packed.put_back();
            return;
        }
        let groups = self.batch.div_ceil(kernels.mr);
        let bands = N_TASKS.div_ceil(groups).min(grid_h);
        let (b, start) = (Shared(packed.as_ptr::<T>()), Shared(out.start));
        let Target { image: ldc, line, pixel, .. } = out;
        let source = Shared(self.patches.source.as_ptr().cast_mut());
        pool.parallel_for(groups * bands, &|task| {
            let images = nth_block(self.batch, groups, task % groups);
            for y in nth_block(grid_h, bands, task / groups) {
                let rows = self.rows(y);
                for &(col, width) in &panels {
                    let cols = width.min(n - col);
                    let micro = kernels.width_for(n - col).micro(images.len(), Layout::Rows);
                    for &(x, columns) in &columns {
                        let is_empty = rows.len == 0 || columns.len == 0;
                        let at = (rows.at * self.patches.width + columns.at) * c;
                        let tap = rows.first * run + columns.first * c;
                        // SAFETY: the taps inside the image are in the source and the packed filter; the tile of
                        // the output is this task's alone.
                        unsafe {
                            let out = start.get().add(images.start * ldc + y * line + x * pixel + col);
                            micro(&Tile {
                                k: columns.len * c,
                                segments: if is_empty { 0 } else { rows.len },
                                a_skip: ((self.dilation * self.patches.width - columns.len) * c) as isize,
                                b_skip: ((self.taps[1] - columns.len) * c * width) as isize,
                                a: source.get().add(images.start * self.image_len() + at),
                                a_stride: self.image_len(),
                                b: b.get().add(k * col + tap * width),
                                b_stride: width,
                                c: out,
                                ldc,
                                cols,
                                alpha: T::ONE,
                                accumulate: false,
                            });
                            apply(epilogue, out, ldc, 0..images.len(), col..col + cols);
                        }
                    }
                }
            }
        });
        packed.put_back();
    }

    /// Whether [`Direct::filter_gradient`] can be used: every tile is as wide as a kernel, and a tap has enough rows.
    pub(super) fn has_filter_gradient(&self) -> bool {
        let kernels = T::kernels(Isa::best());
        let narrowest = kernels.widths[kernels.widths.len() - 1].cols;
        self.n.is_multiple_of(narrowest) && self.patches.channels >= 8
    }

    /// The gradient of the filter: for each tap, the source under it times `grad_out`, over the pixels that see it.
    /// Groups of images are summed independently, then added in order.
    ///
    /// # Safety
    /// `grad_out` must have a row of `n` per pixel of the grid in each image, `grad_filter` one per tap and channel.
    pub(super) unsafe fn filter_gradient(&self, pool: &IntraPool, grad_out: *const T, grad_filter: *mut T) {
        let size = self.taps[0] * self.taps[1] * self.patches.channels * self.n;
        let groups = self.batch.min(N_TASKS);
        let sums = Scratch::take::<T>(size * groups);
        let (sum, total, grad_out) = (Shared(sums.as_ptr::<T>()), Shared(grad_filter), Shared(grad_out.cast_mut()));
        pool.parallel_for(groups, &|group| {
            // SAFETY: this group's part of the buffer is this task's.
            unsafe {
                let sum = sum.get().add(group * size);
                std::slice::from_raw_parts_mut(sum, size).fill(T::ZERO);
                for image in nth_block(self.batch, groups, group) {
                    self.add_image(image, grad_out.get(), sum);
                }
            }
        });
        let pieces = size.div_ceil(16384);
        pool.parallel_for(pieces, &|piece| {
            let part = nth_block(size, pieces, piece);
            // SAFETY: this part of the result is this task's alone.
            unsafe {
                let total = std::slice::from_raw_parts_mut(total.get().add(part.start), part.len());
                for group in 0..groups {
                    let sum = std::slice::from_raw_parts(sum.get().add(group * size + part.start), part.len());
                    if group == 0 {
                        total.copy_from_slice(sum);
                        continue;
                    }
                    vectorize(
                        #[inline(always)]
                        || total.iter_mut().zip(sum).for_each(|(total, &x)| *total = total.plus(x)),
                    );
                }
            }
        });
        sums.put_back();
    }

    /// Adds one image's part of the filter's gradient to `sum`.
    ///
    /// # Safety
    /// As for [`Direct::filter_gradient`].
    unsafe fn add_image(&self, image: usize, grad_out: *const T, sum: *mut T) {
        let kernels = T::kernels(Isa::best());
        let p = self.patches;
        let (c, n) = (p.channels, self.n);
        let ((grid_h, grid_w), first) = (p.grid, &p.runs[0]);
        let n_tiles = c.div_ceil(kernels.mr);
        for i in 0..self.taps[0] {
            // The grid's lines from which this row of taps is inside the image.
            let ys = reached(first.dy + (i * self.dilation) as isize, p.step.0, p.height, grid_h);
            for j in 0..self.taps[1] {
                let xs = reached(first.dx + j as isize, p.step.1, p.width, grid_w);
                if ys.len == 0 || xs.len == 0 {
                    continue;
                }
                let mut col = 0;
                while col < n {
                    let width = kernels.width_for(n - col);
                    for t in 0..n_tiles {
                        let rows = nth_block(c, n_tiles, t);
                        let stride = p.step.1 * c;
                        // SAFETY: the pixels that see the tap, and the tap's rows of the sum.
                        unsafe {
                            let a = p.source.as_ptr().add(image * self.image_len());
                            let b = grad_out.add((image * grid_h * grid_w + ys.first * grid_w + xs.first) * n + col);
                            let tap = (i * self.taps[1] + j) * c + rows.start;
                            width.micro(rows.len(), Layout::Cols)(&Tile {
                                k: xs.len,
                                segments: ys.len,
                                a_skip: (p.step.0 * p.width * c) as isize - (xs.len * stride) as isize,
                                b_skip: ((grid_w - xs.len) * n) as isize,
                                a: a.add((ys.at * p.width + xs.at) * c + rows.start),
                                a_stride: stride,
                                b,
                                b_stride: n,
                                c: sum.add(tap * n + col),
                                ldc: n,
                                cols: width.cols,
                                alpha: T::ONE,
                                accumulate: true,
                            });
                        }
                    }
                    col += width.cols;
                }
            }
        }
    }
}

/// Which of `n` taps, `dilation` apart, the first at `start`, are in `0..size`.
fn inside(start: isize, n: usize, dilation: usize, size: usize) -> Inside {
    let first = ((-start).max(0) as usize).div_ceil(dilation).min(n);
    let end = ((size as isize - start).max(0) as usize).div_ceil(dilation).min(n);
    let at = if first < end { (start + (first * dilation) as isize) as usize } else { 0 };
    Inside { first, len: end.saturating_sub(first), at }
}

/// At which of `n` positions, `step` apart, a tap that is `offset` from them is in `0..size`.
fn reached(offset: isize, step: usize, size: usize, n: usize) -> Inside {
    inside(offset, n, step, size)
}
