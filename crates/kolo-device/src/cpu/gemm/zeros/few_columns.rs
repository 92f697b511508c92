//! Products whose columns fit the registers, with B as stored. A and B are read in place.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::row::{STEPS, adder, masks, turn};
use super::{Operand, has_odd};
use crate::cpu::IntraPool;
use crate::cpu::gemm::drive::{N_TASKS, Problem, Shared, add_second_half, nth_block, pays_to_halve};
use crate::cpu::gemm::epilogue;
use crate::cpu::gemm::kernel::Layout;
use crate::cpu::scratch::Scratch;

/// Rows of C in a task, at least about, and at most 64: enough to read rows of B from the second cache once for many.
const ROWS: usize = 32;

/// Computes `p`, whose left operand is `a`, or returns `false` as [`super::try_run`] does.
///
/// # Safety
/// As for [`super::try_run`].
pub(super) unsafe fn try_run(pool: &IntraPool, p: &Problem<'_, f32>, a: Operand) -> bool {
    let product = Product { p, a, is_odd: AtomicBool::new(false) };
    if p.accumulate {
        // The old C would be lost if odd values were found later.
        // SAFETY: the rows of B, and the machine has AVX-512.
        if unsafe { has_odd(p.b, p.ldb, p.k, p.n) } {
            return false;
        }
    }
    // SAFETY: passed on.
    unsafe {
        match pays_to_halve(p) {
            true => product.by_halves(pool),
            false => product.by_rows(pool),
        }
    }
    !product.is_odd.load(Relaxed)
}

struct Product<'a, 'p> {
    p: &'a Problem<'p, f32>,
    a: Operand,
    /// There is an infinity or a NaN in B.
    is_odd: AtomicBool,
}

/// The destination of a task's rows, with all columns.
struct Target {
    c: *mut f32,
    ldc: usize,
    accumulate: bool,
}

impl Product<'_, '_> {
    /// Each task computes rows of C.
    ///
    /// # Safety
    /// As for [`super::try_run`].
    unsafe fn by_rows(&self, pool: &IntraPool) {
        let p = self.p;
        let n_tasks = p.m.div_ceil(ROWS).min(N_TASKS).max(p.m.div_ceil(STEPS));
        pool.parallel_for_near(n_tasks, &|t| {
            let rows = nth_block(p.m, n_tasks, t);
            let target = Target { c: p.c, ldc: p.ldc, accumulate: p.accumulate };
            // SAFETY: passed on; these rows are this task's.
            unsafe {
                self.rows(rows.clone(), 0..p.k, &target);
                self.check(t, n_tasks, 0..p.k);
                epilogue::apply(&p.epilogue, p.c.add(rows.start * p.ldc), p.ldc, rows, 0..p.n);
            }
        });
    }

    /// The same for each half of k, as an ordinary product of this shape does it, and for the same reason.
    ///
    /// # Safety
    /// As for [`super::try_run`].
    unsafe fn by_halves(&self, pool: &IntraPool) {
        let p = self.p;
        let second = Scratch::take::<f32>(p.m * p.n);
        let added = Shared(second.as_ptr::<f32>());
        let n_rows = p.m.div_ceil(ROWS).min(N_TASKS / 2).max(p.m.div_ceil(STEPS));
        pool.parallel_for_near(2 * n_rows, &|t| {
            let (half, t) = (t / n_rows, t % n_rows);
            let k = nth_block(p.k, 2, half);
            let target = match half {
                0 => Target { c: p.c, ldc: p.ldc, accumulate: p.accumulate },
                _ => Target { c: added.get(), ldc: p.n, accumulate: false },
            };
            // SAFETY: passed on; these rows of this half are this task's.
            unsafe {
                self.rows(nth_block(p.m, n_rows, t), k.clone(), &target);
                self.check(t, n_rows, k);
            }
        });
        // SAFETY: the second half is all there.
        unsafe { add_second_half(pool, p, second.as_ptr()) };
        second.put_back();
    }

    /// Checks the rows of B that belong to task `t` of `n`, unless that was done before.
    ///
    /// # Safety
    /// B is valid, and the machine has AVX-512.
    unsafe fn check(&self, t: usize, n: usize, k: Range<usize>) {
        if self.p.accumulate {
            return;
        }
        let mine = nth_block(k.len(), n, t);
        if mine.is_empty() {
            return;
        }
        // SAFETY: these rows of B are valid.
        let is_odd =
            unsafe { has_odd(self.p.b.add((k.start + mine.start) * self.p.ldb), self.p.ldb, mine.len(), self.p.n) };
        if is_odd {
            self.is_odd.store(true, Relaxed);
        }
    }

    /// Rows of C, at most 64, over a range of k.
    ///
    /// # Safety
    /// As for [`super::try_run`]; `target` has room for all rows.
    unsafe fn rows(&self, rows: Range<usize>, k: Range<usize>, target: &Target) {
        let (p, lda) = (self.p, self.a.ld);
        let (add_row, last) = adder(p.n);
        for k0 in k.clone().step_by(STEPS) {
            let n_steps = STEPS.min(k.end - k0);
            let mut found = [0; STEPS];
            // SAFETY: these elements of A, rows of B and rows of the target are valid; the machine has AVX-512.
            unsafe {
                let a = self.a.at(rows.start, k0);
                let (next, step) = match self.a.layout {
                    Layout::Rows => {
                        masks(a, lda, n_steps, &mut found[..rows.len()]);
                        (lda, 1)
                    }
                    Layout::Cols => {
                        masks(a, lda, rows.len(), &mut found[..n_steps]);
                        found = turn(found);
                        (1, lda)
                    }
                };
                let b = (p.b.add(k0 * p.ldb), p.ldb);
                for (i, &mask) in found[..rows.len()].iter().enumerate() {
                    let c = target.c.add((rows.start + i) * target.ldc);
                    let keeps = target.accumulate || k0 > k.start;
                    add_row(mask, (a.add(i * next), step), b, last, p.alpha, (c, keeps));
                }
            }
        }
    }
}
