//! Products with more columns than fit the registers: panels of them, one after the other.
//!
//! ```text
//! for each run of k, and for as many columns as a buffer has room for
//!   many rows:  copy the panels of B              parallel over steps of k, shared by all
//!               for each block of rows            parallel: one task per block
//!                 prepare its rows of A
//!                 for each panel, for each 64 steps of k, for each row: add_row
//!   few rows:   prepare the rows of A             parallel over steps of k, shared by all
//!               for each panel                    parallel: one task per panel
//!                 for each 64 steps of k: copy 64 rows of the panel; for each row: add_row
//! ```
//!
//! Preparing rows means computing their masks, after transposing them if they are stored as columns. Copies of B are
//! contiguous in L1, where parts of long rows often map to the same few sets, and none of their vectors crosses a line.
//!
//! The transposed product, the transpose of B times that of A, may be computed instead, for a B that is mostly zeros.
//! The sums of a panel are then collected in a buffer, and transposed into C.

use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::row::{LANES, LINE, STEPS, WIDE, adder, masks};
use super::{Operand, has_odd};
use crate::cpu::gemm::drive::{B_CHUNK_BYTES, K_CHUNK, Problem, Shared, add, blocks, cuts, nth_block, nth_cut};
use crate::cpu::gemm::epilogue;
use crate::cpu::gemm::kernel::Layout;
use crate::cpu::gemm::pack::{pack_b, transpose};
use crate::cpu::scratch::Scratch;
use crate::cpu::{IntraPool, vectorize};

/// Rows of C in a task: enough to read a panel from the second cache or beyond once for many, few enough for two tasks
/// a thread.
const MOST_ROWS: usize = 128;
const LEAST_ROWS: usize = 32;
/// Rows of C up to which copying panels for all threads takes longer than it saves. Such products are never transposed.
const FEW_ROWS: usize = WIDE;
/// Columns of a panel, at least, where panels are tasks: enough vectors to keep the multipliers busy.
const LEAST_WIDE: usize = 8 * LANES;
/// Panels for which it pays that a task prepares its rows.
const LEAST_PANELS: usize = 4;

/// The product of `a`, which is mostly zeros, and `b`, stored as in `p`.
pub(super) struct Product<'a, 'p> {
    pub p: &'a Problem<'p, f32>,
    pub a: Operand,
    pub b: Operand,
    /// `a` and `b` are the transposes of the problem's B and A, and the product must be transposed.
    pub is_turned: bool,
}

impl Product<'_, '_> {
    /// Computes it, or returns `false` as [`super::try_run`] does.
    ///
    /// # Safety
    /// As for [`super::try_run`].
    pub(super) unsafe fn try_run(&self, pool: &IntraPool) -> bool {
        // Otherwise odd values are found while computing.
        // SAFETY: passed on.
        if self.p.accumulate && unsafe { self.has_odd(pool) } {
            return false;
        }
        let (k, n) = (self.b.rows, self.b.cols);
        let n_runs = k.div_ceil(K_CHUNK);
        let most_columns = (B_CHUNK_BYTES / (k.div_ceil(n_runs) * WIDE * size_of::<f32>())).max(1) * WIDE;
        blocks(k, K_CHUNK).all(|k| {
            cuts(n, most_columns).all(|n| {
                let chunk = Chunk { product: self, k: k.clone(), n, is_odd: AtomicBool::new(false) };
                // SAFETY: passed on.
                unsafe {
                    match self.a.rows <= FEW_ROWS {
                        true => chunk.by_panels(pool),
                        false => chunk.by_rows(pool),
                    }
                }
                !chunk.is_odd.load(Relaxed)
            })
        })
    }

    /// Whether there is an infinity or a NaN in B.
    ///
    /// # Safety
    /// B is valid, and the machine has AVX-512.
    unsafe fn has_odd(&self, pool: &IntraPool) -> bool {
        let is_odd = AtomicBool::new(false);
        let stored = self.b.as_stored();
        let n_tasks = stored.rows.div_ceil(STEPS);
        pool.parallel_for_near(n_tasks, &|t| {
            let rows = nth_block(stored.rows, n_tasks, t);
            // SAFETY: these rows are valid.
            if unsafe { has_odd(stored.at(rows.start, 0), stored.ld, rows.len(), stored.cols) } {
                is_odd.store(true, Relaxed);
            }
        });
        is_odd.load(Relaxed)
    }
}

/// All rows of A, a run of k, and some columns.
struct Chunk<'a, 'p> {
    product: &'a Product<'a, 'p>,
    k: Range<usize>,
    n: Range<usize>,
    /// There is an infinity or a NaN in B.
    is_odd: AtomicBool,
}

/// Rows of A as [`Chunk::add`] takes them, and their masks: those of all rows for the first 64 steps, and so on.
#[derive(Clone, Copy)]
struct Rows {
    m: usize,
    a: *const f32,
    lda: usize,
    masks: *const u64,
}

/// Buffers for rows, if they have to be transposed, and for their masks.
struct Prepared {
    turned: Option<Scratch>,
    masks: Scratch,
    /// The stride of transposed rows.
    stride: usize,
}

// SAFETY: tasks write rows and steps of their own, and read them when all are done.
unsafe impl Sync for Prepared {}

/// 64 steps of a panel.
struct Steps {
    b: *const f32,
    width: usize,
    n_columns: usize,
    /// Whether the next steps follow these in memory.
    has_next: bool,
}

impl Chunk<'_, '_> {
    /// Every task computes rows of C.
    ///
    /// # Safety
    /// As for [`super::try_run`].
    unsafe fn by_rows(&self, pool: &IntraPool) {
        let (m, k) = (self.product.a.rows, self.k.len());
        let n_panels = self.n.len().div_ceil(WIDE);
        let copies = Scratch::take::<f32>(k * self.n.len().next_multiple_of(LANES));
        let to = Shared(copies.as_ptr::<f32>());
        // Panels are contiguous, each with rows of whole vectors.
        let copy_of = |columns: &Range<usize>| {
            // SAFETY: the panels before it have as many elements, and there is room for all.
            (unsafe { to.get().add(k * columns.start) }, columns.len().next_multiple_of(LANES))
        };
        // Rows of B are read from end to end.
        pool.parallel_for_near(k.div_ceil(STEPS), &|step| {
            let steps = step * STEPS..k.min((step + 1) * STEPS);
            for columns in (0..n_panels).map(|i| self.columns(n_panels, i)) {
                let (to, width) = copy_of(&columns);
                // SAFETY: passed on; these rows of the panel are this task's.
                unsafe { self.copy(steps.clone(), &columns, to.add(steps.start * width), width) };
            }
        });
        if self.is_odd.load(Relaxed) {
            return copies.put_back();
        }
        let wanted = 2 * pool.n_threads();
        let n_rows = m.div_ceil(MOST_ROWS).next_multiple_of(wanted).min(m.div_ceil(LEAST_ROWS));
        let n_groups = wanted.div_ceil(n_rows).min(n_panels / LEAST_PANELS).max(1);
        pool.parallel_for_near(n_rows * n_groups, &|t| {
            let rows = nth_block(m, n_rows, t / n_groups);
            let prepared = Prepared::new(self.product.a.layout, rows.len(), k);
            // SAFETY: passed on; the panels are valid, and these rows and columns of C are this task's.
            unsafe {
                self.prepare(&rows, 0..k, &prepared);
                let a = prepared.rows(self, &rows);
                for i in nth_block(n_panels, n_groups, t % n_groups) {
                    let columns = self.columns(n_panels, i);
                    let (b, width) = copy_of(&columns);
                    self.panel(&rows, &columns, |c, ldc, adds| {
                        for k0 in (0..k).step_by(STEPS) {
                            let b = b.add(k0 * width);
                            let steps = Steps { b, width, n_columns: columns.len(), has_next: true };
                            self.add(a, k0, &steps, (c, ldc), adds || k0 > 0);
                        }
                    });
                }
            }
            prepared.put_back();
        });
        copies.put_back();
    }

    /// Every task computes columns of C.
    ///
    /// # Safety
    /// As for [`super::try_run`].
    unsafe fn by_panels(&self, pool: &IntraPool) {
        let (m, k) = (self.product.a.rows, self.k.len());
        let prepared = Prepared::new(self.product.a.layout, m, k);
        pool.parallel_for_near(k.div_ceil(4 * STEPS), &|t| {
            let steps = t * 4 * STEPS..k.min((t + 1) * 4 * STEPS);
            // SAFETY: passed on; these steps are this task's.
            unsafe { self.prepare(&(0..m), steps, &prepared) };
        });
        let fewest = self.n.len().div_ceil(WIDE);
        let n_panels = fewest.next_multiple_of(pool.n_threads()).min(self.n.len() / LEAST_WIDE).max(fewest);
        pool.parallel_for_near(n_panels, &|i| {
            let columns = self.columns(n_panels, i);
            let width = columns.len().next_multiple_of(LANES);
            let copy = Scratch::take::<f32>(STEPS * WIDE);
            // SAFETY: passed on; there is room for 64 rows, and these columns of C are this task's.
            unsafe {
                let a = prepared.rows(self, &(0..m));
                self.panel(&(0..m), &columns, |c, ldc, adds| {
                    for k0 in (0..k).step_by(STEPS) {
                        let b = copy.as_ptr::<f32>();
                        self.copy(k0..k.min(k0 + STEPS), &columns, b, width);
                        let steps = Steps { b, width, n_columns: columns.len(), has_next: false };
                        self.add(a, k0, &steps, (c, ldc), adds || k0 > 0);
                    }
                });
            }
            copy.put_back();
        });
        prepared.put_back();
    }

    /// The columns of the `i`th of `n` panels, counted within the chunk.
    fn columns(&self, n: usize, i: usize) -> Range<usize> {
        nth_cut(self.n.len(), n, LANES, i)
    }

    /// Copies steps of a panel, and checks for infinities and NaN unless that was done before.
    ///
    /// # Safety
    /// B is valid, `to` has room for rows of `width`, and the machine has AVX-512.
    unsafe fn copy(&self, steps: Range<usize>, columns: &Range<usize>, to: *mut f32, width: usize) {
        let b = &self.product.b;
        // SAFETY: guaranteed by the caller.
        unsafe {
            let from = b.at(self.k.start + steps.start, self.n.start + columns.start);
            pack_b(from, b.layout, b.ld, steps.len(), columns.len(), width, to);
            if !self.product.p.accumulate && has_odd(to, width, steps.len(), width) {
                self.is_odd.store(true, Relaxed);
            }
        }
    }

    /// Transposes and masks `rows` of A over `steps`, which begin at a multiple of 64.
    ///
    /// # Safety
    /// A is valid, there is room for these rows, and the machine has AVX-512.
    unsafe fn prepare(&self, rows: &Range<usize>, steps: Range<usize>, to: &Prepared) {
        let (a, m) = (&self.product.a, rows.len());
        // SAFETY: guaranteed by the caller.
        unsafe {
            let all = to.rows(self, rows);
            if let Some(turned) = &to.turned {
                let from = a.at(rows.start, self.k.start + steps.start);
                let to = turned.as_ptr::<f32>().add(steps.start);
                vectorize(
                    #[inline(always)]
                    || transpose(from, a.ld, steps.len(), m, to, all.lda),
                );
            }
            for k0 in steps.clone().step_by(STEPS) {
                let found = std::slice::from_raw_parts_mut(to.masks.as_ptr::<u64>().add(k0 / STEPS * m), m);
                masks(all.a.add(k0), all.lda, STEPS.min(steps.end - k0), found);
            }
        }
    }

    /// Calls `compute` to set or add to `rows` and `columns` of C, or, if transposed, to a buffer that is transposed
    /// into C; then finishes them.
    ///
    /// # Safety
    /// As for [`super::try_run`]; no other thread writes to this part of C.
    unsafe fn panel(&self, rows: &Range<usize>, columns: &Range<usize>, compute: impl FnOnce(*mut f32, usize, bool)) {
        let p = self.product.p;
        let columns = self.n.start + columns.start..self.n.start + columns.end;
        // SAFETY: this part of C is valid, and the buffer has room for two panels.
        unsafe {
            if !self.product.is_turned {
                let c = p.c.add(rows.start * p.ldc + columns.start);
                compute(c, p.ldc, self.adds());
                return self.finish(c, rows.clone(), columns);
            }
            let c = p.c.add(columns.start * p.ldc + rows.start);
            let sums = Scratch::take::<f32>(2 * rows.len() * WIDE);
            compute(sums.as_ptr(), WIDE, false);
            self.turn((sums.as_ptr(), rows.len()), columns.len(), c);
            sums.put_back();
            self.finish(c, columns, rows.clone());
        }
    }

    /// Whether the sums of this chunk are added to those of C.
    fn adds(&self) -> bool {
        self.product.p.accumulate || self.k.start > 0
    }

    /// Rows of A times 64 steps of a panel, or those that are left.
    ///
    /// # Safety
    /// The rows are prepared, the steps are valid, there is room for as many rows at `c`, and the machine has AVX-512.
    unsafe fn add(&self, rows: Rows, k0: usize, steps: &Steps, (c, ldc): (*mut f32, usize), adds: bool) {
        let (b, width) = (steps.b, steps.width);
        let (add_row, last) = adder(steps.n_columns);
        // Meanwhile the next steps are prefetched, a few lines with every row of C.
        let n_lines = if steps.has_next { (STEPS * width / LINE).div_ceil(rows.m) } else { 0 };
        let soon = b.wrapping_add(STEPS * width);
        for i in 0..rows.m {
            // SAFETY: passed on; a prefetched address may be invalid.
            unsafe {
                for line in i * n_lines..(i + 1) * n_lines {
                    _mm_prefetch::<_MM_HINT_T1>(soon.wrapping_add(line * LINE).cast());
                }
                let mask = *rows.masks.add(k0 / STEPS * rows.m + i);
                let a = (rows.a.add(i * rows.lda + k0), 1);
                add_row(mask, a, (b, width), last, self.product.p.alpha, (c.add(i * ldc), adds));
            }
        }
    }

    /// Transposes `m` rows of `n` sums, with as much scratch space after them, to columns of C.
    ///
    /// # Safety
    /// As for [`Chunk::panel`].
    unsafe fn turn(&self, (sums, m): (*mut f32, usize), n: usize, c: *mut f32) {
        let ldc = self.product.p.ldc;
        // SAFETY: passed on; the transposed sums come after the others.
        unsafe {
            if !self.adds() {
                return vectorize(
                    #[inline(always)]
                    || transpose(sums, WIDE, m, n, c, ldc),
                );
            }
            let turned = sums.add(m * WIDE);
            vectorize(
                #[inline(always)]
                || transpose(sums, WIDE, m, n, turned, m),
            );
            for j in 0..n {
                let c = std::slice::from_raw_parts_mut(c.add(j * ldc), m);
                add(c, std::slice::from_raw_parts(turned.add(j * m), m));
            }
        }
    }

    /// Applies the epilogue to a tile of C, if this was the last run of k.
    ///
    /// # Safety
    /// As for [`epilogue::apply`].
    unsafe fn finish(&self, c: *mut f32, rows: Range<usize>, columns: Range<usize>) {
        let p = self.product.p;
        if self.k.end == p.k {
            // SAFETY: passed on.
            unsafe { epilogue::apply(&p.epilogue, c, p.ldc, rows, columns) }
        }
    }
}

impl Prepared {
    /// For `m` rows over `k` steps.
    fn new(layout: Layout, m: usize, k: usize) -> Prepared {
        // An odd number of lines keeps the rows in different cache sets.
        let stride = (k.div_ceil(LINE) | 1) * LINE;
        let turned = (layout == Layout::Cols).then(|| Scratch::take::<f32>(m * stride));
        let n_masks = k.div_ceil(STEPS) * m;
        let masks = Scratch::take::<u64>(n_masks);
        // SAFETY: there is room for this many.
        unsafe { masks.as_ptr::<u64>().write_bytes(0, n_masks) };
        Prepared { turned, masks, stride }
    }

    /// Where they are, or will be.
    ///
    /// # Safety
    /// These rows of A are valid.
    unsafe fn rows(&self, chunk: &Chunk<'_, '_>, rows: &Range<usize>) -> Rows {
        let a = &chunk.product.a;
        let (a, lda) = match &self.turned {
            Some(turned) => (turned.as_ptr::<f32>().cast_const(), self.stride),
            // SAFETY: guaranteed by the caller.
            None => (unsafe { a.at(rows.start, chunk.k.start) }, a.ld),
        };
        Rows { m: rows.len(), a, lda, masks: self.masks.as_ptr() }
    }

    fn put_back(self) {
        self.turned.into_iter().for_each(Scratch::put_back);
        self.masks.put_back();
    }
}
