//! The patch matrix of a convolution, written piece by piece while a product packs it.
//!
//! Row `r` belongs to one pixel of a grid `[batch, grid_h, grid_w]`; its columns are the source
//! pixels under the taps of the filter, channels innermost. Taps side by side in a source row form
//! a run, contiguous in memory, so a row of the matrix is a few copies.

use std::ops::Range;

use crate::cpu::gemm::Gather;
use crate::cpu::gemm::Real;

/// A source image batch `[batch, height, width, channels]` seen through a filter's taps.
pub(super) struct Patches<'a, T> {
    pub source: &'a [T],
    pub height: usize,
    pub width: usize,
    pub channels: usize,
    pub grid: (usize, usize),
    /// Source pixels per grid pixel.
    pub step: (usize, usize),
    pub runs: Vec<Run>,
}

/// Taps at `(dy, dx)`, `(dy, dx + 1)`, … from a grid pixel's place in the source.
pub(super) struct Run {
    pub dy: isize,
    pub dx: isize,
    pub n_taps: usize,
    /// Its first column in the matrix.
    pub first: usize,
}

/// Runs for taps in the given order, which is the order of the matrix's columns.
pub(super) fn runs(taps: &[(isize, isize)], channels: usize) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (t, &(dy, dx)) in taps.iter().enumerate() {
        match runs.last_mut() {
            Some(run) if run.dy == dy && run.dx + run.n_taps as isize == dx => run.n_taps += 1,
            _ => runs.push(Run { dy, dx, n_taps: 1, first: t * channels }),
        }
    }
    runs
}

impl<T: Real> Gather<T> for Patches<'_, T> {
    unsafe fn gather(&self, rows: Range<usize>, cols: Range<usize>, dst: *mut T, stride: usize) {
        let (grid_h, grid_w) = self.grid;
        let mut row = rows.start;
        while row < rows.end {
            let (line, x) = (row / grid_w, row % grid_w);
            let n = (grid_w - x).min(rows.end - row);
            // SAFETY: these rows of the part the caller guarantees.
            unsafe {
                let dst = dst.add((row - rows.start) * stride);
                self.segment(line / grid_h, line % grid_h, x..x + n, &cols, dst, stride);
            }
            row += n;
        }
    }
}

impl<T: Real> Patches<'_, T> {
    /// Neighbouring pixels of one grid row, run by run: a copy may write past its end, since the
    /// next run comes after it and the last one ends in the row's padding.
    ///
    /// # Safety
    /// As for `gather`.
    unsafe fn segment(
        &self,
        image: usize,
        grid_y: usize,
        xs: Range<usize>,
        cols: &Range<usize>,
        dst: *mut T,
        stride: usize,
    ) {
        for run in &self.runs {
            let first = run.first.max(cols.start);
            let last = (run.first + run.n_taps * self.channels).min(cols.end);
            if first >= last {
                continue;
            }
            // The part of the run to write, in elements from its start.
            let part = first - run.first..last - run.first;
            let y = (grid_y * self.step.0) as isize + run.dy;
            // SAFETY: columns `first..last` of the part the caller guarantees.
            let dst = unsafe { dst.add(first - cols.start) };
            if y < 0 || y >= self.height as isize {
                for i in 0..xs.len() {
                    // SAFETY: as above.
                    unsafe { std::ptr::write_bytes(dst.add(i * stride), 0, part.len()) };
                }
                continue;
            }
            let line = (image * self.height + y as usize) * self.width;
            // SAFETY: passed on.
            unsafe { self.run(run, line, &xs, part, dst, stride) };
        }
    }

    /// One run for neighbouring grid pixels; `line` is the source pixel that begins its row.
    ///
    /// # Safety
    /// As for `gather`, with `dst` at the run's first column.
    unsafe fn run(&self, run: &Run, line: usize, xs: &Range<usize>, part: Range<usize>, dst: *mut T, stride: usize) {
        let (step, c) = (self.step.1, self.channels);
        // Grid pixels whose whole run is inside the source row.
        let inside_from = run.dx.min(0).unsigned_abs().div_ceil(step).clamp(xs.start, xs.end);
        let room = self.width as isize - run.dx - run.n_taps as isize;
        let inside_to = if room < 0 { inside_from } else { room as usize / step + 1 };
        let inside_to = inside_to.clamp(inside_from, xs.end);
        let edge = |x: usize| {
            let left = (x * step) as isize + run.dx;
            let low = ((-left).max(0) as usize * c).clamp(part.start, part.end);
            let high = ((self.width as isize - left).max(0) as usize * c).clamp(low, part.end);
            // SAFETY: `part` of the row of `x`, as the caller guarantees.
            unsafe {
                let dst = dst.add((x - xs.start) * stride);
                std::ptr::write_bytes(dst, 0, low - part.start);
                if low < high {
                    let at = ((line as isize + left) * c as isize) as usize;
                    let source = &self.source[at.wrapping_add(low)..at.wrapping_add(high)];
                    let to = dst.add(low - part.start);
                    std::ptr::copy_nonoverlapping(source.as_ptr(), to, source.len());
                }
                std::ptr::write_bytes(dst.add(high - part.start), 0, part.end - high);
            }
        };
        (xs.start..inside_from).for_each(edge);
        if inside_from < inside_to {
            let at = |x: usize| (line + (x * step).wrapping_add_signed(run.dx)) * c + part.start;
            let (n, len) = (inside_to - inside_from, part.len());
            let rounded = len.next_multiple_of(CHUNK);
            let fits = (at(inside_to - 1) + rounded).min(self.source.len());
            assert!(at(inside_to - 1) + len <= self.source.len());
            // The last few pixels of the source have nothing behind them to read.
            let n_fast = if fits == at(inside_to - 1) + rounded { n } else { n.saturating_sub(CHUNK) };
            // SAFETY: reads end inside the source: checked for the last pixel, and earlier ones
            // read less far. Writes stay in the rows and their padding.
            unsafe {
                let source = self.source.as_ptr().add(at(inside_from));
                let dst = dst.add((inside_from - xs.start) * stride);
                let fast = if len <= CHUNK { copy_runs::<T, true> } else { copy_runs::<T, false> };
                fast(source, step * c, len, n_fast, dst, stride);
                for i in n_fast..n {
                    let (from, to) = (source.add(i * step * c), dst.add(i * stride));
                    std::ptr::copy_nonoverlapping(from, to, len);
                }
            }
        }
        (inside_to..xs.end).for_each(edge);
    }
}

/// Elements moved at a time; at most the padding of a packed row.
const CHUNK: usize = 8;

/// Copies `n` runs of `len`, rounded up to whole chunks; one chunk each with `ONE`.
///
/// # Safety
/// Source and destination must be valid for the rounded lengths.
unsafe fn copy_runs<T: Real, const ONE: bool>(
    source: *const T,
    source_step: usize,
    len: usize,
    n: usize,
    dst: *mut T,
    stride: usize,
) {
    for i in 0..n {
        let mut done = 0;
        while done < len {
            // SAFETY: promised by the caller.
            unsafe {
                let from = source.add(i * source_step + done).cast::<[T; CHUNK]>();
                dst.add(i * stride + done).cast::<[T; CHUNK]>().write_unaligned(from.read_unaligned());
            }
            done += CHUNK;
            if ONE {
                break;
            }
        }
    }
}
