//! The loops around the micro-kernels: blocking, packing and the split over threads.
//!
//! ```text
//! for each chunk of B that fits the packing buffer      (columns, then runs of k)
//!   pack the chunk of B                                 parallel over panels, shared by all
//!   for each block of C                                 parallel: one task per block
//!     for each run of kc steps
//!       pack the block's rows of A                      per thread, stays in L2
//!       for each panel of B (streams from L2), for each tile of rows: micro-kernel
//!       after the last step: epilogue on the tile       still in L1
//! ```
//!
//! Products with few blocks and a long k are cut along k as well, small ones with more to read than to write in two;
//! the pieces are added in order. All cuts depend on the shape and the instruction set alone.

mod along_k;

pub(super) use along_k::{add, add_second_half, pays_to_halve};

use std::ops::Range;

use super::epilogue::{self, Epilogue};
use super::kernel::{Kernels, Layout, Real, Tile};
use super::pack::{pack_a, pack_b};
use crate::cpu::scratch::Scratch;
use crate::cpu::{IntraPool, vectorize};

/// Where the left operand comes from.
#[derive(Clone, Copy)]
pub(crate) enum Left<'a, T> {
    /// In memory, with its layout and leading dimension.
    Matrix(*const T, Layout, usize),
    /// Made while packing: a matrix that is never stored, or its transpose.
    Gather(&'a dyn Gather<T>, Layout),
}

/// A matrix that can write parts of itself.
pub(crate) trait Gather<T>: Sync {
    /// Writes rows `rows` and columns `cols` of the matrix to `dst`, with row stride `stride`. The gaps
    /// between the rows may be overwritten too.
    ///
    /// # Safety
    /// `dst` must be valid for writes of `rows.len() * stride` elements, and `stride` be at least
    /// `cols.len()` and eight more.
    unsafe fn gather(&self, rows: Range<usize>, cols: Range<usize>, dst: *mut T, stride: usize);
}

/// `C = alpha * A * B (+ C)`, then the epilogue. All sizes are at least 1.
pub(crate) struct Problem<'a, T> {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub alpha: T,
    pub a: Left<'a, T>,
    pub b: *const T,
    /// `Rows` as stored, `Cols` transposed.
    pub b_layout: Layout,
    pub ldb: usize,
    pub accumulate: bool,
    pub c: *mut T,
    pub ldc: usize,
    pub epilogue: Epilogue<'a, T>,
}

// SAFETY: the pointers are borrowed by the caller of `run` for its whole length; tasks only read
// through A and B and write disjoint blocks of C.
unsafe impl<T: Sync> Sync for Problem<'_, T> {}

/// A panel of B for one run of k, in bytes: a part of L2, from where it streams as fast as it is used. Panels that fit
/// L1 cost more, in visits to C.
const B_PANEL_BYTES: usize = 256 << 10;
/// A whole B this small is read in place: always, and if its rows do not fall on the same few cache sets.
const B_IN_PLACE_BYTES: usize = 20 << 10;
const B_IN_PLACE_SPREAD_BYTES: usize = 48 << 10;
/// Most steps of k between two visits to a tile of C.
const KC: usize = 2048;
/// A thread's packed block of A, in bytes: a part of L2.
const A_BLOCK_BYTES: usize = 256 << 10;
const A_USED_ONCE_BYTES: usize = 24 << 10;
/// Most columns of one task.
const NC_TASK: usize = 512;
/// The packed chunk of B, in bytes: a part of L3.
pub(super) const B_CHUNK_BYTES: usize = 16 << 20;
/// Most steps of k in one chunk of B.
pub(super) const K_CHUNK: usize = 4096;
/// Work below which a product stays on its caller, and the least work of a task.
pub(super) const SERIAL_FLOP: usize = 2_000_000;
const TASK_FLOP: usize = 1_000_000;
/// Tiles below each other up to which a product is flat.
const FLAT_TILES: usize = 8;
/// The number of tasks to aim at, so that a few threads finish at about the same time.
pub(super) const N_TASKS: usize = 16;

/// Computes `problem`.
///
/// # Safety
/// A, B and C must be valid for the problem's sizes and strides; C for writes by this call alone.
pub(crate) unsafe fn run<T: Real>(pool: &IntraPool, kernels: &Kernels<T>, problem: &Problem<'_, T>) {
    let p = problem;
    let splits = along_k::n_pieces(kernels, p);
    if splits > 1 {
        // SAFETY: passed on.
        return unsafe { along_k::run_pieces(pool, kernels, p, splits) };
    }
    if along_k::pays_to_halve(p) {
        // SAFETY: passed on.
        return unsafe { along_k::run_halves(pool, kernels, p) };
    }
    for k in blocks(p.k, K_CHUNK) {
        let nc = (B_CHUNK_BYTES / (k.len() * size_of::<T>())).max(1).next_multiple_of(kernels.nr());
        for n in cuts(p.n, nc) {
            let chunk = Chunk::new(kernels, p, n, k.clone());
            // SAFETY: passed on.
            unsafe { chunk.run(pool) }
        }
    }
}

/// The product of all of A's rows with one chunk of B.
struct Chunk<'a, 'p, T: 'static> {
    kernels: &'a Kernels<T>,
    p: &'a Problem<'p, T>,
    n: Range<usize>,
    k: Range<usize>,
    n_runs: usize,
    first: bool,
    last: bool,
    pack_a: bool,
    pack_b: bool,
}

/// A task's block of C, relative to the chunk for columns.
struct Block {
    rows: Range<usize>,
    cols: Range<usize>,
}

impl<'a, 'p, T: Real> Chunk<'a, 'p, T> {
    fn new(kernels: &'a Kernels<T>, p: &'a Problem<'p, T>, n: Range<usize>, k: Range<usize>) -> Self {
        let kc = KC.min(B_PANEL_BYTES / (kernels.nr() * size_of::<T>()));
        let bytes = size_of::<T>();
        let big = p.m * p.k * bytes > (512 << 10) || p.lda_bytes(bytes).is_multiple_of(2048);
        let pack_a = match p.a {
            Left::Gather(..) => true,
            Left::Matrix(_, Layout::Rows, _) => big && p.n >= 2 * kernels.nr(),
            Left::Matrix(_, Layout::Cols, _) => big && p.n >= 4 * kernels.nr(),
        };
        let in_place = if (p.ldb * bytes).is_multiple_of(512) { B_IN_PLACE_BYTES } else { B_IN_PLACE_SPREAD_BYTES };
        let in_l1 = p.k * p.n * bytes <= in_place;
        Chunk {
            n_runs: k.len().div_ceil(kc),
            first: k.start == 0,
            last: k.end == p.k,
            pack_a,
            pack_b: p.b_layout == Layout::Cols || (p.m > 3 * kernels.mr && !in_l1),
            kernels,
            p,
            n,
            k,
        }
    }

    /// # Safety
    /// As for [`run`].
    unsafe fn run(&self, pool: &IntraPool) {
        if self.is_flat() {
            // SAFETY: passed on.
            return unsafe { self.run_columns(pool) };
        }
        let packed = Scratch::take::<T>(self.packed_b_len());
        let b = Shared(packed.as_ptr::<T>());
        let (row_cuts, col_cuts) = self.task_grid();
        let serial = row_cuts * col_cuts == 1;
        // Panels are packed four at a time where there are many.
        let n_panels = self.n.len().div_ceil(self.kernels.nr());
        let n_panel_groups = match (serial, self.n_runs * n_panels > N_TASKS) {
            (true, _) => 1,
            (false, true) => n_panels.div_ceil(4),
            (false, false) => n_panels,
        };
        let jobs = self.n_runs * n_panel_groups;
        let group = self.n.len().div_ceil(n_panel_groups).next_multiple_of(self.kernels.nr());
        let pack = |job: usize| {
            let run = nth_block(self.k.len(), self.n_runs, job / n_panel_groups);
            let first = (job % n_panel_groups * group).min(self.n.len());
            let cols = first..(first + group).min(self.n.len());
            // SAFETY: the buffer has room for every panel; each job writes its own panels.
            unsafe { self.pack_b_panels(b.get(), run, cols) };
        };
        if serial {
            (0..jobs).for_each(pack)
        } else {
            pool.parallel_for_near(jobs, &pack)
        }
        let task = |t: usize| {
            let block = Block {
                rows: nth_block(self.p.m, row_cuts, t / col_cuts),
                cols: nth_cut(self.n.len(), col_cuts, self.kernels.nr(), t % col_cuts),
            };
            // SAFETY: blocks do not overlap, and B is packed.
            unsafe { self.block(&block, b.get()) };
        };
        if serial {
            task(0)
        } else {
            pool.parallel_for_near(row_cuts * col_cuts, &task)
        }
        packed.put_back();
    }

    /// Few rows and many columns: packed panels of B are reused so little that they should stay in one core's cache.
    fn is_flat(&self) -> bool {
        let (m, n, k) = (self.p.m, self.n.len(), self.k.len());
        let (mr, nr) = (self.kernels.mr, self.kernels.nr());
        self.pack_b && m <= FLAT_TILES * mr && n >= N_TASKS * nr && 2 * m * n * k >= SERIAL_FLOP
    }

    /// Every task packs columns of B for itself and multiplies them with all rows of A.
    ///
    /// # Safety
    /// As for [`run`].
    unsafe fn run_columns(&self, pool: &IntraPool) {
        let is_gathered = matches!(self.p.a, Left::Gather(..));
        let pack_a = is_gathered || (self.pack_a && self.p.lda_bytes(size_of::<T>()).is_multiple_of(2048));
        pool.parallel_for_near(N_TASKS, &|t| {
            let cols = nth_cut(self.n.len(), N_TASKS, self.kernels.nr(), t);
            let n = self.n.start + cols.start..self.n.start + cols.end;
            let chunk = Chunk { n, k: self.k.clone(), pack_a, ..*self };
            // SAFETY: passed on; the columns of C are this task's alone.
            unsafe { chunk.run_alone() }
        });
    }

    /// # Safety
    /// As for [`run`].
    unsafe fn run_alone(&self) {
        let packed = Scratch::take::<T>(self.packed_b_len());
        for r in 0..self.n_runs {
            let run = nth_block(self.k.len(), self.n_runs, r);
            // SAFETY: the buffer has room for every panel.
            unsafe { self.pack_b_panels(packed.as_ptr(), run, 0..self.n.len()) };
        }
        let block = Block { rows: 0..self.p.m, cols: 0..self.n.len() };
        // SAFETY: passed on.
        unsafe { self.block(&block, packed.as_ptr()) };
        packed.put_back();
    }

    fn padded_n(&self) -> usize {
        self.n.len().next_multiple_of(self.kernels.nr())
    }

    /// Elements of the packed chunk.
    fn packed_b_len(&self) -> usize {
        self.k.len() * self.padded_n()
    }

    /// Rows and columns of blocks: enough for a few threads, not so many that packing A repeats.
    fn task_grid(&self) -> (usize, usize) {
        let (m, n, k) = (self.p.m, self.n.len(), self.k.len());
        let (mr, nr) = (self.kernels.mr, self.kernels.nr());
        let kc = k.div_ceil(self.n_runs);
        // A block that meets one or two panels of B is used once: keep it in L1 then.
        let gathered = matches!(self.p.a, Left::Gather(..));
        let bytes = if gathered && n <= 2 * nr { A_USED_ONCE_BYTES } else { A_BLOCK_BYTES };
        let mc = (bytes / (kc * size_of::<T>())).max(mr);
        let mut rows = if self.pack_a { m.div_ceil(mc) } else { 1 };
        let mut cols = if rows > 1 { n.div_ceil(NC_TASK) } else { 1 };
        let flop = 2 * m * n * k;
        if flop < SERIAL_FLOP {
            return (rows, cols.min(if rows > 1 { cols } else { 1 }));
        }
        let wanted = N_TASKS.min(flop / TASK_FLOP).max(2);
        while rows * cols < wanted {
            // Tiles of somewhat fewer rows than there could be are as fast.
            let can_rows = m / (rows * 2) >= mr * 3 / 4;
            let can_cols = n / (cols * 2) >= nr;
            match (can_rows, can_cols) {
                (true, _) if m / rows >= n / cols / 4 || !can_cols => rows *= 2,
                (_, true) => cols *= 2,
                _ => break,
            }
        }
        (rows, cols)
    }

    /// Packs the panels of `cols` for the steps `run`, both relative to the chunk. Panels that B
    /// can be read from in place are left out.
    ///
    /// # Safety
    /// `dst` must have room for the packed chunk.
    unsafe fn pack_b_panels(&self, dst: *mut T, run: Range<usize>, cols: Range<usize>) {
        let p = self.p;
        let mut col = cols.start;
        while col < cols.end {
            let width = self.kernels.width_for(self.n.len() - col).cols;
            let filled = width.min(self.n.len() - col);
            if self.pack_b || filled < width {
                let (k0, j0) = (self.k.start + run.start, self.n.start + col);
                let src = match p.b_layout {
                    Layout::Rows => k0 * p.ldb + j0,
                    Layout::Cols => j0 * p.ldb + k0,
                };
                // SAFETY: the panel lies inside B and inside the buffer.
                unsafe {
                    let dst = dst.add(run.start * self.padded_n() + run.len() * col);
                    pack_b(p.b.add(src), p.b_layout, p.ldb, run.len(), filled, width, dst);
                }
            }
            col += width;
        }
    }

    /// # Safety
    /// No other thread may touch the block of C; `packed_b` must hold the chunk's panels.
    unsafe fn block(&self, block: &Block, packed_b: *const T) {
        let kc = self.k.len().div_ceil(self.n_runs);
        let m = block.rows.len();
        // A stride that is no multiple of a page keeps the rows of a tile in different cache sets.
        let pad = 64 / size_of::<T>();
        let (a_len, a_stride) = match (self.pack_a, self.layout()) {
            (false, _) => (0, 0),
            (true, Layout::Rows) => {
                let stride = kc.next_multiple_of(pad) + pad;
                (m * stride, stride)
            }
            (true, Layout::Cols) => {
                let stride = m.next_multiple_of(pad) + pad;
                (kc * stride, stride)
            }
        };
        let scratch = self.pack_a.then(|| Scratch::take::<T>(a_len));
        for r in 0..self.n_runs {
            let run = nth_block(self.k.len(), self.n_runs, r);
            let k = self.k.start + run.start..self.k.start + run.end;
            // SAFETY: the block's part of A is valid, and the scratch has room for it packed.
            let (a, a_stride) = unsafe {
                match (self.p.a, &scratch) {
                    (Left::Gather(g, Layout::Rows), Some(s)) => {
                        g.gather(block.rows.clone(), k.clone(), s.as_ptr(), a_stride);
                        (s.as_ptr::<T>().cast_const(), a_stride)
                    }
                    (Left::Gather(g, Layout::Cols), Some(s)) => {
                        g.gather(k.clone(), block.rows.clone(), s.as_ptr(), a_stride);
                        (s.as_ptr::<T>().cast_const(), a_stride)
                    }
                    (Left::Matrix(a, layout, lda), scratch) => {
                        let (rows, cols, at) = match layout {
                            Layout::Rows => (m, k.len(), block.rows.start * lda + k.start),
                            Layout::Cols => (k.len(), m, k.start * lda + block.rows.start),
                        };
                        match scratch {
                            Some(s) => {
                                pack_a(a.add(at), lda, rows, cols, s.as_ptr(), a_stride);
                                (s.as_ptr::<T>().cast_const(), a_stride)
                            }
                            None => (a.add(at), lda),
                        }
                    }
                    (Left::Gather(..), None) => unreachable!("a gathered operand is always packed"),
                }
            };
            // SAFETY: passed on.
            unsafe { self.tiles(block, &run, r, a, a_stride, packed_b) };
        }
        if let Some(scratch) = scratch {
            scratch.put_back();
        }
    }

    /// One run of k over all tiles of a block.
    ///
    /// # Safety
    /// As for [`Chunk::block`]; `a` is the block's first element for this run.
    unsafe fn tiles(
        &self,
        block: &Block,
        run: &Range<usize>,
        run_index: usize,
        a: *const T,
        a_stride: usize,
        packed_b: *const T,
    ) {
        let p = self.p;
        let layout = self.layout();
        let n_tiles = block.rows.len().div_ceil(self.kernels.mr);
        let finish = self.last && run_index + 1 == self.n_runs && !p.epilogue.is_empty();
        let mut col = block.cols.start;
        while col < block.cols.end {
            let width = self.kernels.width_for(self.n.len() - col);
            let cols = width.cols.min(self.n.len() - col);
            // SAFETY: panel and tile lie inside B, its packed copy and C.
            unsafe {
                let (b, b_stride) = if self.pack_b || cols < width.cols {
                    (packed_b.add(run.start * self.padded_n() + run.len() * col), width.cols)
                } else {
                    (p.b.add((self.k.start + run.start) * p.ldb + self.n.start + col), p.ldb)
                };
                for t in 0..n_tiles {
                    let rows = nth_block(block.rows.len(), n_tiles, t);
                    let row = block.rows.start + rows.start;
                    let a = match layout {
                        Layout::Rows => a.add(rows.start * a_stride),
                        Layout::Cols => a.add(rows.start),
                    };
                    let c = p.c.add(row * p.ldc + self.n.start + col);
                    width.micro(rows.len(), layout)(&Tile {
                        k: run.len(),
                        segments: 1,
                        a_skip: 0,
                        b_skip: 0,
                        a,
                        a_stride,
                        b,
                        b_stride,
                        c,
                        ldc: p.ldc,
                        cols,
                        alpha: p.alpha,
                        accumulate: p.accumulate || !self.first || run_index > 0,
                    });
                    if finish {
                        let j = self.n.start + col;
                        epilogue::apply(&p.epilogue, c, p.ldc, row..row + rows.len(), j..j + cols);
                    }
                }
            }
            col += width.cols;
        }
    }

    fn layout(&self) -> Layout {
        match self.p.a {
            Left::Matrix(_, layout, _) | Left::Gather(_, layout) => layout,
        }
    }
}

impl<T> Problem<'_, T> {
    fn lda_bytes(&self, bytes: usize) -> usize {
        match self.a {
            Left::Matrix(_, _, lda) => lda * bytes,
            Left::Gather(..) => 0,
        }
    }
}

/// A pointer that tasks on several threads may use; each use states why it is sound.
#[derive(Clone, Copy)]
pub(crate) struct Shared<T>(pub(crate) *mut T);

// SAFETY: the pointer alone does nothing; every dereference is an unsafe block of its own.
unsafe impl<T> Sync for Shared<T> {}
// SAFETY: as above.
unsafe impl<T> Send for Shared<T> {}

impl<T> Shared<T> {
    /// The pointer; a method, so that closures capture the whole wrapper.
    pub(crate) fn get(&self) -> *mut T {
        self.0
    }
}

/// The `i`th of `n` pieces of `0..len`, whose lengths differ by at most one.
pub(crate) fn nth_block(len: usize, n: usize, i: usize) -> Range<usize> {
    let (size, more) = (len / n, len % n);
    let start = i * size + i.min(more);
    start..start + size + usize::from(i < more)
}

/// All of them.
fn nth_blocks(len: usize, n: usize) -> Vec<Range<usize>> {
    (0..n).map(|i| nth_block(len, n, i)).collect()
}

/// The `i`th of `n` pieces of `0..len`, cut at multiples of `unit`.
pub(super) fn nth_cut(len: usize, n: usize, unit: usize, i: usize) -> Range<usize> {
    let units = nth_block(len.div_ceil(unit), n, i);
    (units.start * unit).min(len)..(units.end * unit).min(len)
}

/// `0..len` in equal pieces of at most `most`.
pub(super) fn blocks(len: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let n = len.div_ceil(most);
    (0..n).map(move |i| nth_block(len, n, i))
}

/// `range` in equal pieces of at most `most`.
fn blocks_of(range: Range<usize>, most: usize) -> impl Iterator<Item = Range<usize>> {
    blocks(range.len(), most).map(move |b| range.start + b.start..range.start + b.end)
}

/// `0..len` in pieces of exactly `size`, the last shorter.
pub(super) fn cuts(len: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len.div_ceil(size)).map(move |i| i * size..((i + 1) * size).min(len))
}
