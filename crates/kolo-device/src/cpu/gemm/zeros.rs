//! Products whose left operand is mostly zeros, as pixels, words and rows with a one are: the zeros are skipped.
//!
//! A sample of A decides. For 64 steps of k at a time, every row of C has a mask of the elements of A that are not zero, and
//! adds the rows of B that these belong to, in registers. The 64 rows of B stay in the first cache for all rows of C.
//!
//! ```text
//! masks     of A as stored: comparisons of 64 neighbours; of A transposed: the same, and 64 by 64 bits turned
//! add_row   one row of C, up to 104 columns, over one mask
//! ```
//!
//! Zero times infinity is NaN, and so is zero times NaN. So B is looked through as well, and if it has such values, the
//! product is computed in the ordinary way.

use std::arch::x86_64::*;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::drive::{Left, N_TASKS, Problem, SERIAL_FLOP, Shared, add_second_half, nth_block, pays_to_halve};
use super::epilogue;
use super::kernel::Layout;
use crate::cpu::scratch::Scratch;
use crate::cpu::{IntraPool, Isa};

/// Work below which nobody looks for zeros.
const LEAST_FLOP: usize = 2 * SERIAL_FLOP;
/// Columns of C below which finding the elements takes longer than multiplying by zeros.
const LEAST_COLUMNS: usize = 32;
/// Lines of A that are looked at, and how many of their elements may be other than zero: half of them. At two thirds the ordinary
/// product is as fast.
const SAMPLES: usize = 32;
const MOST_SAMPLED: u32 = (SAMPLES * LINE / 2) as u32;
/// Elements of a line.
const LINE: usize = 16;
/// Steps of k in a mask.
const STEPS: usize = 64;
/// Elements of the vectors that hold C, and how many vectors do. Rows of B seldom begin at a multiple of 64 bytes, and loads of
/// 32 cross lines less often.
const LANES: usize = 8;
const MOST_VECTORS: usize = 13;
/// Columns of C that they hold.
const WIDE: usize = MOST_VECTORS * LANES;
/// Rows of C in a task, at least about, and at most 64: enough to read rows of B from the second cache once for many.
const ROWS: usize = 32;
/// Values of B that are looked through before anything is computed, at most.
const MOST_CHECKED: usize = 16 << 10;

/// Computes `p` if A is mostly zeros. Otherwise, or if it finds an infinity or a NaN in B, it says `false`; all of C is to be computed
/// then, and a C that is added to is as it was.
///
/// # Safety
/// As for [`super::drive::run`]; the machine has `isa`.
pub(super) unsafe fn try_run(isa: Isa, pool: &IntraPool, p: &Problem<'_, f32>) -> bool {
    let flop = 2usize.saturating_mul(p.m).saturating_mul(p.n).saturating_mul(p.k);
    let Left::Matrix(a, layout, lda) = p.a else { return false };
    if isa != Isa::Avx512 || flop < LEAST_FLOP || p.b_layout != Layout::Rows || p.n < LEAST_COLUMNS {
        return false;
    }
    let (rows, cols) = if layout == Layout::Rows { (p.m, p.k) } else { (p.k, p.m) };
    // SAFETY: A is `rows` by `cols` as stored, the machine has AVX-512.
    if cols < LINE || unsafe { n_others(a, rows, cols, lda) } > MOST_SAMPLED {
        return false;
    }
    let product = Product { p, a, layout, lda, is_odd: AtomicBool::new(false) };
    if p.accumulate {
        // The old C would be lost if odd values were found later.
        // SAFETY: the rows of B, and the machine has AVX-512.
        if p.k * p.n > MOST_CHECKED || unsafe { has_odd(p.b, p.ldb, p.k, p.n) } {
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
    a: *const f32,
    layout: Layout,
    lda: usize,
    /// There is an infinity or a NaN in B.
    is_odd: AtomicBool,
}

// SAFETY: as for `Problem`: tasks only read through A and B, and write rows of C of their own.
unsafe impl Sync for Product<'_, '_> {}

/// Where a task puts its rows, all of their columns.
struct Target {
    c: *mut f32,
    ldc: usize,
    accumulate: bool,
}

impl Product<'_, '_> {
    /// Each task computes rows of C.
    ///
    /// # Safety
    /// As for [`try_run`].
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
    /// As for [`try_run`].
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

    /// Looks through the rows of B that fall to task `t` of `n`, unless that was done before.
    ///
    /// # Safety
    /// The machine has AVX-512.
    unsafe fn check(&self, t: usize, n: usize, k: Range<usize>) {
        if self.p.accumulate {
            return;
        }
        let mine = nth_block(k.len(), n, t);
        // SAFETY: these rows of B are there.
        let is_odd =
            unsafe { has_odd(self.p.b.add((k.start + mine.start) * self.p.ldb), self.p.ldb, mine.len(), self.p.n) };
        if is_odd {
            self.is_odd.store(true, Relaxed);
        }
    }

    /// Rows of C, at most 64, over a range of k.
    ///
    /// # Safety
    /// As for [`try_run`]; `target` has room for all rows.
    unsafe fn rows(&self, rows: Range<usize>, k: Range<usize>, target: &Target) {
        let p = self.p;
        let n_panels = p.n.div_ceil(WIDE);
        // Pieces of long rows of B often fall on the same few sets of the first cache; copies lie side by side, and no vector of
        // theirs crosses a line.
        let copies = (n_panels > 1).then(|| Scratch::take::<f32>(STEPS * WIDE));
        for k0 in k.clone().step_by(STEPS) {
            let n_steps = STEPS.min(k.end - k0);
            // SAFETY: these elements of A are there; the machine has AVX-512.
            let (masks, a, next, step) = unsafe {
                match self.layout {
                    Layout::Rows => {
                        let a = self.a.add(rows.start * self.lda + k0);
                        (masks(a, self.lda, rows.len(), n_steps), a, self.lda, 1)
                    }
                    Layout::Cols => {
                        let a = self.a.add(k0 * self.lda + rows.start);
                        (turn(masks(a, self.lda, n_steps, rows.len())), a, 1, self.lda)
                    }
                }
            };
            for panel in 0..n_panels {
                let cols = nth_block(p.n, n_panels, panel);
                let n_vectors = cols.len().div_ceil(LANES);
                let add_row = ADD_ROW[n_vectors - 1];
                let last = (1u16 << (cols.len() - (n_vectors - 1) * LANES)) - 1;
                // SAFETY: rows of B and of the target that are there, and a copy with room for 64 rows.
                unsafe {
                    let mut b = (p.b.add(k0 * p.ldb + cols.start), p.ldb);
                    if let Some(copies) = &copies {
                        let copy = copies.as_ptr::<f32>();
                        (0..n_steps).for_each(|i| copy.add(i * WIDE).copy_from(b.0.add(i * p.ldb), cols.len()));
                        b = (copy, WIDE);
                    }
                    for (i, &mask) in masks[..rows.len()].iter().enumerate() {
                        let c = target.c.add((rows.start + i) * target.ldc + cols.start);
                        let keeps = target.accumulate || k0 > k.start;
                        add_row(mask, (a.add(i * next), step), b, last as u8, p.alpha, (c, keeps));
                    }
                }
            }
        }
        copies.into_iter().for_each(Scratch::put_back);
    }
}

/// How many elements of a sample are not zero.
///
/// # Safety
/// The matrix is there and has at least [`LINE`] columns, and the machine has AVX-512.
#[target_feature(enable = "avx512f")]
unsafe fn n_others(a: *const f32, rows: usize, cols: usize, ld: usize) -> u32 {
    let mut n_others = 0;
    for i in 0..SAMPLES {
        // Rows from first to last, columns by steps that meet all parts of a row.
        let row = i * rows / SAMPLES;
        let col = (i * 11 % SAMPLES) * (cols - LINE) / (SAMPLES - 1);
        // SAFETY: a line of columns from `col` on is within the row.
        let values = unsafe { _mm512_loadu_ps(a.add(row * ld + col)) };
        n_others += _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(values, _mm512_setzero_ps()).count_ones();
    }
    n_others
}

/// Whether there is an infinity or a NaN.
///
/// # Safety
/// The matrix is there, and the machine has AVX-512.
#[target_feature(enable = "avx512f")]
unsafe fn has_odd(b: *const f32, ld: usize, rows: usize, cols: usize) -> bool {
    // x - x is 0 for all others.
    let mut odd = _mm512_setzero_ps();
    for row in 0..rows {
        for col in (0..cols).step_by(LINE) {
            let mask = (1u32 << LINE.min(cols - col)) - 1;
            // SAFETY: only elements of the row are read.
            let x = unsafe { _mm512_maskz_loadu_ps(mask as u16, b.add(row * ld + col)) };
            odd = _mm512_add_ps(odd, _mm512_sub_ps(x, x));
        }
    }
    _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(odd, _mm512_setzero_ps()) != 0
}

/// For each of at most 64 rows, which of its first `cols` elements, at most 64, are not zero. The elements behind them are asked
/// for: rows are too short for the processor to do that by itself.
///
/// # Safety
/// The elements are there, and the machine has AVX-512.
#[target_feature(enable = "avx512f")]
unsafe fn masks(a: *const f32, ld: usize, rows: usize, cols: usize) -> [u64; STEPS] {
    let others = |values| u64::from(_mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(values, _mm512_setzero_ps()));
    let mut masks = [0; STEPS];
    for (row, mask) in masks[..rows].iter_mut().enumerate() {
        // SAFETY: only elements of the row are read; what is asked for may be anywhere.
        unsafe {
            let a = a.add(row * ld);
            for part in 0..STEPS / LINE {
                let soon = a.wrapping_add(STEPS + part * LINE);
                _mm_prefetch::<_MM_HINT_T0>(soon.cast());
            }
            if cols == STEPS {
                for part in 0..STEPS / LINE {
                    *mask |= others(_mm512_loadu_ps(a.add(part * LINE))) << (part * LINE);
                }
            } else {
                for (part, col) in (0..cols).step_by(LINE).enumerate() {
                    let within = (1u32 << LINE.min(cols - col)) - 1;
                    *mask |= others(_mm512_maskz_loadu_ps(within as u16, a.add(col))) << (part * LINE);
                }
            }
        }
    }
    masks
}

/// Rows and columns of bits exchanged: blocks of 32 by 32 first, then within each, down to single bits.
fn turn(mut bits: [u64; STEPS]) -> [u64; STEPS] {
    let (mut distance, mut mask) = (32, u64::from(u32::MAX));
    while distance > 0 {
        let mut row = 0;
        while row < STEPS {
            let swapped = ((bits[row] >> distance) ^ bits[row + distance]) & mask;
            bits[row] ^= swapped << distance;
            bits[row + distance] ^= swapped;
            row = (row + distance + 1) & !distance;
        }
        distance /= 2;
        mask ^= mask << distance;
    }
    bits
}

/// Adds `alpha` times the sum of some rows of B, each times an element of A, to a row of C, or sets it to that.
type AddRow = unsafe fn(u64, (*const f32, usize), (*const f32, usize), u8, f32, (*mut f32, bool));

/// By number of vectors.
const ADD_ROW: [AddRow; MOST_VECTORS] = [
    add_row::<1>,
    add_row::<2>,
    add_row::<3>,
    add_row::<4>,
    add_row::<5>,
    add_row::<6>,
    add_row::<7>,
    add_row::<8>,
    add_row::<9>,
    add_row::<10>,
    add_row::<11>,
    add_row::<12>,
    add_row::<13>,
];

/// Of `N` vectors, the last with the lanes in `last` alone. `mask` says which of the elements of A and rows of B; both come with
/// the distance from one to the next.
///
/// # Safety
/// What `mask` names is there, C is valid for writes by this call alone, and the machine has AVX-512.
#[target_feature(enable = "avx512f,avx512vl,avx2,fma,bmi1,bmi2")]
unsafe fn add_row<const N: usize>(
    mut mask: u64,
    (a, step): (*const f32, usize),
    (b, ldb): (*const f32, usize),
    last: u8,
    alpha: f32,
    (c, keeps): (*mut f32, bool),
) {
    // SAFETY: the caller's promise; the last vector is read and written in part.
    unsafe {
        let mut sums = [_mm256_setzero_ps(); N];
        while mask != 0 {
            let at = mask.trailing_zeros() as usize;
            mask &= mask - 1;
            let x = _mm256_set1_ps(*a.add(at * step));
            let row = b.add(at * ldb);
            for (i, sum) in sums[..N - 1].iter_mut().enumerate() {
                *sum = _mm256_fmadd_ps(x, _mm256_loadu_ps(row.add(i * LANES)), *sum);
            }
            let end = _mm256_maskz_loadu_ps(last, row.add((N - 1) * LANES));
            sums[N - 1] = _mm256_fmadd_ps(x, end, sums[N - 1]);
        }
        let alpha = _mm256_set1_ps(alpha);
        for (i, sum) in sums.iter().enumerate() {
            let lanes = if i + 1 < N { u8::MAX } else { last };
            let old = if keeps { _mm256_maskz_loadu_ps(lanes, c.add(i * LANES)) } else { _mm256_setzero_ps() };
            _mm256_mask_storeu_ps(c.add(i * LANES), lanes, _mm256_fmadd_ps(alpha, *sum, old));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::gemm::{Activation, Epilogue, Gemm, Op, gemm_f32, gemm_f64};

    #[test]
    fn bits_are_turned() {
        let bits: [u64; STEPS] = std::array::from_fn(|row| (row as u64 + 3).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let turned = turn(bits);
        for (row, bits) in bits.iter().enumerate() {
            for (col, turned) in turned.iter().enumerate() {
                assert_eq!(bits >> col & 1, turned >> row & 1, "{row} {col}");
            }
        }
    }

    /// One element in six is not zero.
    fn sparse(len: usize) -> Vec<f32> {
        (0..len).map(|i| if i * 7 % 6 == i / 50 % 6 { (i as f32 * 0.37).sin() } else { 0.0 }).collect()
    }

    fn full(len: usize) -> Vec<f32> {
        (0..len).map(|i| (i as f32 * 0.73).cos()).collect()
    }

    fn skips(call: &mut Gemm<'_, f32>) -> bool {
        let layout = if call.op_a == Op::None { Layout::Rows } else { Layout::Cols };
        let p = Problem {
            m: call.m,
            n: call.n,
            k: call.k,
            alpha: call.alpha,
            a: Left::Matrix(call.a.as_ptr(), layout, call.lda),
            b: call.b.as_ptr(),
            b_layout: if call.op_b == Op::None { Layout::Rows } else { Layout::Cols },
            ldb: call.ldb,
            accumulate: call.beta != 0.0,
            c: call.c.as_mut_ptr(),
            ldc: call.ldc,
            epilogue: Epilogue::default(),
        };
        call.check().unwrap();
        // SAFETY: the slices were checked, and C is borrowed.
        unsafe { try_run(Isa::best(), &IntraPool::new(1), &p) }
    }

    /// What is computed with and without several threads, and in twice the precision.
    fn check((m, n, k): (usize, usize, usize), op: Op, beta: f32) {
        if Isa::best() != Isa::Avx512 {
            println!("skipped: no AVX-512");
            return;
        }
        let (a, b, bias) = (sparse(m * k), full(k * n), full(n));
        let run = |n_threads: usize| {
            let mut c = full(m * n);
            let mut call = Gemm::with_ops(m, n, k, (&a, op), (&b, Op::None), &mut c);
            (call.alpha, call.beta) = (0.5, beta);
            call.epilogue.column_bias = Some(&bias);
            call.epilogue.activation = Activation::Relu;
            gemm_f32(&IntraPool::new(n_threads), call).unwrap();
            c
        };
        let mut c = full(m * n);
        let mut call = Gemm::with_ops(m, n, k, (&a, op), (&b, Op::None), &mut c);
        call.beta = beta;
        assert!(skips(&mut call), "{m} {n} {k} {op:?}");
        let wide = |values: &[f32]| values.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
        let (wide_a, wide_b, wide_bias) = (wide(&a), wide(&b), wide(&bias));
        let mut expected = wide(&full(m * n));
        let mut call = Gemm::with_ops(m, n, k, (&wide_a, op), (&wide_b, Op::None), &mut expected);
        (call.alpha, call.beta) = (0.5, f64::from(beta));
        call.epilogue.column_bias = Some(&wide_bias);
        call.epilogue.activation = Activation::Relu;
        gemm_f64(&IntraPool::new(1), call).unwrap();
        let (one, three) = (run(1), run(3));
        assert_eq!(one, three, "{m} {n} {k} {op:?}");
        for (i, (found, expected)) in one.iter().zip(&expected).enumerate() {
            assert!((f64::from(*found) - expected).abs() < 1e-4, "{m} {n} {k} {op:?} {i}: {found} {expected}");
        }
    }

    #[test]
    fn products_are_what_they_would_be_with_zeros() {
        for op in [Op::None, Op::Transpose] {
            check((100, 100, 784), op, 0.0);
            check((784, 100, 100), op, 1.0);
            check((67, 331, 129), op, 0.0);
            check((300, 32, 1000), op, 0.0);
            check((33, 105, 640), op, 0.0);
            check((40, 512, 200), op, 0.0);
            check((1100, 60, 70), op, 1.0);
        }
    }

    #[test]
    fn few_zeros_are_not_skipped() {
        let (a, b, mut c) = (full(200 * 200), full(200 * 200), vec![0.0; 200 * 200]);
        assert!(!skips(&mut Gemm::new(200, 200, 200, &a, &b, &mut c)));
        assert!(c.iter().all(|&x| x == 0.0));
    }

    #[test]
    fn zero_times_infinity_is_nan() {
        let (a, mut b) = (sparse(200 * 200), full(200 * 200));
        b[7 * 200 + 3] = f32::INFINITY;
        for (op, beta) in [(Op::None, 0.0), (Op::Transpose, 0.0), (Op::None, 1.0)] {
            let mut c = vec![1.0; 200 * 200];
            let mut call = Gemm::with_ops(200, 200, 200, (&a, op), (&b, Op::None), &mut c);
            call.beta = beta;
            gemm_f32(&IntraPool::new(2), call).unwrap();
            assert!(c.iter().enumerate().all(|(i, x)| x.is_finite() == (i % 200 != 3)), "{op:?} {beta}");
            assert!(c.iter().any(|x| x.is_nan()));
        }
    }
}
