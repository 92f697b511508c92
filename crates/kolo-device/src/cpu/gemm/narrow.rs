//! Products with nine or ten columns, as of ten classes: vectors of 16 columns would be used by two thirds.
//!
//! Eight columns are kept in half vectors, of which a core adds twice as many. The one or two that are left are sums of
//! neighbouring products along k, in whole vectors whose elements are added in the end.

use std::arch::x86_64::*;

use super::drive::{KC, Left, Problem, TASK_FLOP, nth_block};
use super::epilogue;
use super::kernel::Layout;
use crate::cpu::scratch::Scratch;
use crate::cpu::{IntraPool, Isa};

/// Columns of a half vector, and elements of a whole one.
const HALF: usize = 8;
const WHOLE: usize = 16;
/// Rows that are computed together: as many sums as the processor has to have under way.
const ROWS: usize = 12;
const FEW: usize = 4;

/// Computes `p` if it has nine or ten columns and both operands lie as rows; otherwise says `false` and has done nothing.
///
/// # Safety
/// As for [`super::drive::run`]; the machine has `isa`.
pub(super) unsafe fn try_run(isa: Isa, pool: &IntraPool, p: &Problem<'_, f32>) -> bool {
    let Left::Matrix(a, Layout::Rows, lda) = p.a else { return false };
    let is_narrow = (HALF + 1..=HALF + 2).contains(&p.n);
    // A long k is for those who cut it: sums stay short there, and there are more tasks.
    if isa != Isa::Avx512 || !is_narrow || p.b_layout != Layout::Rows || !(WHOLE..=KC).contains(&p.k) || p.m < ROWS {
        return false;
    }
    let k_whole = p.k.next_multiple_of(WHOLE);
    let copy = Scratch::take::<f32>(p.k * HALF + 2 * k_whole);
    // SAFETY: the copy has room for eight columns of all rows of B, and two columns of their own that are longer.
    let product = unsafe {
        let (left, right) = (copy.as_ptr::<f32>(), copy.as_ptr::<f32>().add(p.k * HALF));
        std::slice::from_raw_parts_mut(right, 2 * k_whole).fill(0.0);
        for i in 0..p.k {
            let row = p.b.add(i * p.ldb);
            left.add(i * HALF).copy_from_nonoverlapping(row, HALF);
            (HALF..p.n).for_each(|j| *right.add((j - HALF) * k_whole + i) = *row.add(j));
        }
        Product { p, a, lda, left, right, k_whole }
    };
    let n_tasks = (2 * p.m * p.n * p.k / TASK_FLOP).clamp(1, p.m / ROWS);
    pool.parallel_for_near(n_tasks, &|t| {
        let rows = nth_block(p.m, n_tasks, t);
        // SAFETY: these rows are this task's; the machine has AVX-512.
        unsafe {
            let mut row = rows.start;
            while row < rows.end {
                row += match rows.end - row {
                    ROWS.. => product.rows::<ROWS>(row),
                    FEW.. => product.rows::<FEW>(row),
                    _ => product.rows::<1>(row),
                };
            }
            epilogue::apply(&p.epilogue, p.c.add(rows.start * p.ldc), p.ldc, rows, 0..p.n);
        }
    });
    copy.put_back();
    true
}

struct Product<'a, 'p> {
    p: &'a Problem<'p, f32>,
    a: *const f32,
    lda: usize,
    /// The first eight columns of B, row after row.
    left: *const f32,
    /// The others, one after the other, each with zeros behind it.
    right: *const f32,
    k_whole: usize,
}

// SAFETY: as for `Problem`: tasks only read through A and B, and write rows of C of their own.
unsafe impl Sync for Product<'_, '_> {}

impl Product<'_, '_> {
    /// `N` rows of C; returns how many.
    ///
    /// # Safety
    /// The rows are there and the caller's alone, and the machine has AVX-512.
    #[target_feature(enable = "avx512f,avx512vl,avx2,fma")]
    unsafe fn rows<const N: usize>(&self, first: usize) -> usize {
        let p = self.p;
        // SAFETY: the caller's promise; vectors of A beyond k are read in part.
        unsafe {
            let a: [*const f32; N] = std::array::from_fn(|i| self.a.add((first + i) * self.lda));
            let mut eight = [_mm256_setzero_ps(); N];
            for k in 0..p.k {
                let b = _mm256_loadu_ps(self.left.add(k * HALF));
                for (sum, a) in eight.iter_mut().zip(&a) {
                    *sum = _mm256_fmadd_ps(_mm256_set1_ps(*a.add(k)), b, *sum);
                }
            }
            let mut two = [[_mm512_setzero_ps(); 2]; N];
            for k in (0..p.k).step_by(WHOLE) {
                let within = (1u32 << WHOLE.min(p.k - k)) - 1;
                let b = [0, 1].map(|j| _mm512_loadu_ps(self.right.add(j * self.k_whole + k)));
                for (sums, a) in two.iter_mut().zip(&a) {
                    let x = _mm512_maskz_loadu_ps(within as u16, a.add(k));
                    *sums = [_mm512_fmadd_ps(x, b[0], sums[0]), _mm512_fmadd_ps(x, b[1], sums[1])];
                }
            }
            for (i, (eight, two)) in eight.iter().zip(&two).enumerate() {
                let c = p.c.add((first + i) * p.ldc);
                let old = if p.accumulate { _mm256_loadu_ps(c) } else { _mm256_setzero_ps() };
                _mm256_storeu_ps(c, _mm256_fmadd_ps(_mm256_set1_ps(p.alpha), *eight, old));
                for (j, sum) in (HALF..p.n).zip(two) {
                    let old = if p.accumulate { *c.add(j) } else { 0.0 };
                    *c.add(j) = p.alpha * _mm512_reduce_add_ps(*sum) + old;
                }
            }
        }
        N
    }
}

#[cfg(test)]
mod tests {
    use crate::cpu::gemm::{Activation, Gemm, gemm_f32, gemm_f64};
    use crate::cpu::{IntraPool, Isa};

    fn values(len: usize, step: f32) -> Vec<f32> {
        (0..len).map(|i| (i as f32 * step).sin()).collect()
    }

    #[test]
    fn ten_columns_are_what_twice_the_precision_gives() {
        if Isa::best() != Isa::Avx512 {
            println!("skipped: no AVX-512");
            return;
        }
        for (m, n, k) in [(100, 10, 100), (8, 9, 16), (13, 10, 33), (1001, 10, 777), (57, 9, 64)] {
            for beta in [0.0, 1.0] {
                let (a, b, bias) = (values(m * k, 0.7), values(k * n, 0.3), values(n, 1.1));
                let run = |n_threads| {
                    let mut c = values(m * n, 0.2);
                    let mut call = Gemm::new(m, n, k, &a, &b, &mut c);
                    (call.alpha, call.beta) = (0.5, beta);
                    call.epilogue.column_bias = Some(&bias);
                    call.epilogue.activation = Activation::Relu;
                    gemm_f32(&IntraPool::new(n_threads), call).unwrap();
                    c
                };
                let wide = |values: &[f32]| values.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
                let (wide_a, wide_b, wide_bias) = (wide(&a), wide(&b), wide(&bias));
                let mut expected = wide(&values(m * n, 0.2));
                let mut call = Gemm::new(m, n, k, &wide_a, &wide_b, &mut expected);
                (call.alpha, call.beta) = (0.5, f64::from(beta));
                call.epilogue.column_bias = Some(&wide_bias);
                call.epilogue.activation = Activation::Relu;
                gemm_f64(&IntraPool::new(1), call).unwrap();
                let one = run(1);
                assert_eq!(one, run(3), "{m} {n} {k}");
                for (i, (found, expected)) in one.iter().zip(&expected).enumerate() {
                    assert!((f64::from(*found) - expected).abs() < 1e-4, "{m} {n} {k} {i}: {found} {expected}");
                }
            }
        }
    }
}
