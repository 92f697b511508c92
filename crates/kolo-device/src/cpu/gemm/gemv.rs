//! Products with one row or one column: bound by reading the matrix once.
//!
//! Both kinds come down to a row-major matrix and a vector. `y = M x` is a dot product per row;
//! `y = xᵀ M` adds up rows. Neither packs anything.

use super::drive::{Left, Problem, Shared, nth_block};
use super::epilogue;
use super::kernel::{Kernels, Layout, Real};
use crate::cpu::scratch::Scratch;
use crate::cpu::{IntraPool, vectorize};

/// Matrix elements of one task.
const TASK_ELEMENTS: usize = 128 << 10;
/// Columns added up at a time by `y = xᵀ M`: `y` stays in L1 and rows are read in long runs.
const COLUMNS: usize = 2048;

/// Computes `problem` if it has one row or one column and a matrix in memory; false otherwise.
///
/// # Safety
/// As for [`super::drive::run`].
pub(crate) unsafe fn try_run<T: Real>(pool: &IntraPool, kernels: &Kernels<T>, problem: &Problem<'_, T>) -> bool {
    let p = problem;
    let Left::Matrix(a, a_layout, lda) = p.a else {
        return false;
    };
    // (matrix, its layout as len(y) by k, its stride, vector, the vector's stride)
    let (matrix, layout, ld, x, x_step, len, y_step) = if p.n == 1 {
        let step = if p.b_layout == Layout::Rows { p.ldb } else { 1 };
        (a, a_layout, lda, p.b, step, p.m, p.ldc)
    } else if p.m == 1 {
        let step = if a_layout == Layout::Rows { 1 } else { lda };
        let layout = if p.b_layout == Layout::Cols { Layout::Rows } else { Layout::Cols };
        (p.b, layout, p.ldb, a, step, p.n, 1)
    } else {
        return false;
    };
    let scratch = Scratch::take::<T>(p.k + len);
    let dense_x = scratch.as_ptr::<T>();
    let y = Shared(dense_x.wrapping_add(p.k));
    let matrix = Shared(matrix.cast_mut());
    // SAFETY: the caller guarantees every element named; the scratch has `k + len` of them,
    // and tasks write disjoint parts of `y`.
    unsafe {
        for i in 0..p.k {
            *dense_x.add(i) = *x.add(i * x_step);
        }
        let x = std::slice::from_raw_parts(dense_x.cast_const(), p.k);
        let unit = match layout {
            Layout::Rows => 16,
            Layout::Cols => COLUMNS,
        };
        let n_tasks = (len * p.k / TASK_ELEMENTS).clamp(1, len.div_ceil(unit));
        pool.parallel_for(n_tasks, &|t| {
            let part = nth_block(len, n_tasks, t);
            let y = std::slice::from_raw_parts_mut(y.get().add(part.start), part.len());
            match layout {
                Layout::Rows => {
                    let rows = matrix.get().add(part.start * ld);
                    (kernels.dots)(rows, ld, y.len(), x.as_ptr(), x.len(), y.as_mut_ptr());
                }
                Layout::Cols => sums(matrix.get().add(part.start), ld, x, y),
            }
        });
        for i in 0..len {
            let c = p.c.add(i * y_step);
            let product = p.alpha.times(*y.get().add(i));
            *c = if p.accumulate { product.plus(*c) } else { product };
        }
        epilogue::apply(&p.epilogue, p.c, p.ldc, 0..p.m, 0..p.n);
    }
    scratch.put_back();
    true
}

/// `y[j] = Σ x[p] * matrix[p, j]`.
///
/// # Safety
/// `matrix` must be valid for reads of `x.len()` rows of `y.len()`, `ld` apart.
unsafe fn sums<T: Real>(matrix: *const T, ld: usize, x: &[T], y: &mut [T]) {
    for (block, y) in y.chunks_mut(COLUMNS).enumerate() {
        y.fill(T::ZERO);
        let first = block * COLUMNS;
        let n = y.len();
        // SAFETY: row `p` of these columns, guaranteed by the caller.
        let row = |p: usize| unsafe { std::slice::from_raw_parts(matrix.add(p * ld + first), n) };
        vectorize(
            #[inline(always)]
            || {
                let (fours, rest) = x.as_chunks::<4>();
                for (q, x) in fours.iter().enumerate() {
                    let (r0, r1) = (row(4 * q), row(4 * q + 1));
                    let (r2, r3) = (row(4 * q + 2), row(4 * q + 3));
                    for j in 0..n {
                        let low = x[0].times(r0[j]).plus(x[1].times(r1[j]));
                        let high = x[2].times(r2[j]).plus(x[3].times(r3[j]));
                        y[j] = y[j].plus(low.plus(high));
                    }
                }
                for (i, &x) in rest.iter().enumerate() {
                    for (y, &m) in y.iter_mut().zip(row(4 * fours.len() + i)) {
                        *y = y.plus(x.times(m));
                    }
                }
            },
        );
    }
}
