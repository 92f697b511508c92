//! Products that skip the zeros of an operand that is mostly zeros, such as pixels, bags of words, one-hot rows or the
//! output of a ReLU.
//!
//! A sample of the operand decides. For 64 steps of k at a time, every row of C has a mask of A's nonzero elements, and
//! adds the corresponding rows of B, in registers. The 64 rows of B stay in L1 for many rows of C. If B is the operand
//! with the zeros, the transposed product is computed.
//!
//! ```text
//! few_columns    up to 104 columns, B as stored: A and B are read in place
//! many_columns   all others: panels of B are copied, the product may be transposed
//! row            the masks, and one row of C over one mask
//! ```
//!
//! Zero times infinity is NaN, and so is zero times NaN. So the other operand is checked for infinities and NaN, and if
//! it has any, the product is computed densely.

mod few_columns;
mod many_columns;
mod row;

use std::arch::x86_64::*;

use self::row::{LINE, WIDE};
use super::drive::{Left, Problem, SERIAL_FLOP};
use super::kernel::Layout;
use crate::cpu::{IntraPool, Isa};

/// Work below which zeros are not looked for, and from which a product is large, if it also has more rows and columns
/// than a panel.
const LEAST_FLOP: usize = 2 * SERIAL_FLOP;
const LARGE_FLOP: usize = 32 * SERIAL_FLOP;
/// Columns of C below which finding the elements takes longer than multiplying by zeros.
const LEAST_COLUMNS: usize = 32;
/// The number of sampled lines of an operand, and the maximum number of nonzeros in them: half of the elements, five
/// eighths if the product is large. At two thirds, and at three quarters, the dense product is as fast.
const SAMPLES: usize = 32;
const MOST_SAMPLED: u32 = (SAMPLES * LINE / 2) as u32;
const MOST_IF_LARGE: u32 = (SAMPLES * LINE * 5 / 8) as u32;
/// The number of values of B up to which one thread checks them for infinities and NaN.
const MOST_CHECKED: usize = 16 << 10;

/// Computes `p` if A or B is mostly zeros. Otherwise, or if the other has an infinity or a NaN, returns `false`: then
/// all of C must be computed densely, and a C that is added to is unchanged.
///
/// # Safety
/// As for [`super::drive::run`]; the machine has `isa`.
pub(super) unsafe fn try_run(isa: Isa, pool: &IntraPool, p: &Problem<'_, f32>) -> bool {
    let flop = 2usize.saturating_mul(p.m).saturating_mul(p.n).saturating_mul(p.k);
    let Left::Matrix(a, layout, lda) = p.a else { return false };
    if isa != Isa::Avx512 || flop < LEAST_FLOP {
        return false;
    }
    let a = Operand { data: a, layout, ld: lda, rows: p.m, cols: p.k };
    let b = Operand { data: p.b, layout: p.b_layout, ld: p.ldb, rows: p.k, cols: p.n };
    // Before anything is added to C, all of B is checked. With few columns one thread does that.
    let is_long = p.accumulate && p.k * p.n > MOST_CHECKED;
    let is_few = p.n <= WIDE && p.b_layout == Layout::Rows && !is_long;
    let is_large = flop >= LARGE_FLOP && p.m.min(p.n) > WIDE;
    let most = if is_large { MOST_IF_LARGE } else { MOST_SAMPLED };
    // SAFETY: A and B are valid, the machine has AVX-512; passed on.
    unsafe {
        if p.n >= LEAST_COLUMNS && a.n_others().is_some_and(|n| n <= most) {
            return match is_few {
                true => few_columns::try_run(pool, p, a),
                false => many_columns::Product { p, a, b, is_turned: false }.try_run(pool),
            };
        }
        if is_large && b.n_others().is_some_and(|n| n <= most) {
            return many_columns::Product { p, a: b.turned(), b: a.turned(), is_turned: true }.try_run(pool);
        }
    }
    false
}

/// A matrix, as stored or transposed.
#[derive(Clone, Copy)]
struct Operand {
    data: *const f32,
    layout: Layout,
    ld: usize,
    rows: usize,
    cols: usize,
}

// SAFETY: as for `Problem`: what the pointer names is borrowed for the whole call, and only read.
unsafe impl Sync for Operand {}

impl Operand {
    /// Its transpose.
    fn turned(self) -> Operand {
        let layout = if self.layout == Layout::Rows { Layout::Cols } else { Layout::Rows };
        Operand { layout, rows: self.cols, cols: self.rows, ..self }
    }

    /// Itself or its transpose, whichever is row-major in memory.
    fn as_stored(&self) -> Operand {
        if self.layout == Layout::Rows { *self } else { self.turned() }
    }

    /// An element's address.
    ///
    /// # Safety
    /// The element is valid.
    unsafe fn at(&self, row: usize, col: usize) -> *const f32 {
        let (row, col) = if self.layout == Layout::Rows { (row, col) } else { (col, row) };
        // SAFETY: guaranteed by the caller.
        unsafe { self.data.add(row * self.ld + col) }
    }

    /// The number of nonzeros in a sample; `None` if the rows in memory are too short.
    ///
    /// # Safety
    /// The matrix is valid, and the machine has AVX-512.
    unsafe fn n_others(&self) -> Option<u32> {
        let stored = self.as_stored();
        // SAFETY: the matrix as stored.
        (stored.cols >= LINE).then(|| unsafe { n_others(stored.data, stored.rows, stored.cols, stored.ld) })
    }
}

/// The number of nonzeros in a sample.
///
/// # Safety
/// The matrix is valid and has at least [`LINE`] columns, and the machine has AVX-512.
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
/// The matrix is valid, and the machine has AVX-512.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::gemm::{Activation, Epilogue, Gemm, Op, gemm_f32, gemm_f64};

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

    /// Which operand has the zeros.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Zeros {
        Left,
        Right,
    }

    /// What is computed with and without several threads, and in twice the precision.
    fn check((m, n, k): (usize, usize, usize), zeros: Zeros, ops: (Op, Op), beta: f32) {
        if Isa::best() != Isa::Avx512 {
            println!("skipped: no AVX-512");
            return;
        }
        let (a, b) = match zeros {
            Zeros::Left => (sparse(m * k), full(k * n)),
            Zeros::Right => (full(m * k), sparse(k * n)),
        };
        let bias = full(n);
        let what = format!("{m} {n} {k} {zeros:?} {ops:?}");
        let run = |n_threads: usize| {
            let mut c = full(m * n);
            let mut call = Gemm::with_ops(m, n, k, (&a, ops.0), (&b, ops.1), &mut c);
            (call.alpha, call.beta) = (0.5, beta);
            call.epilogue.column_bias = Some(&bias);
            call.epilogue.activation = Activation::Relu;
            gemm_f32(&IntraPool::new(n_threads), call).unwrap();
            c
        };
        let mut c = full(m * n);
        let mut call = Gemm::with_ops(m, n, k, (&a, ops.0), (&b, ops.1), &mut c);
        call.beta = beta;
        assert!(skips(&mut call), "{what}");
        let wide = |values: &[f32]| values.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
        let (wide_a, wide_b, wide_bias) = (wide(&a), wide(&b), wide(&bias));
        let mut expected = wide(&full(m * n));
        let mut call = Gemm::with_ops(m, n, k, (&wide_a, ops.0), (&wide_b, ops.1), &mut expected);
        (call.alpha, call.beta) = (0.5, f64::from(beta));
        call.epilogue.column_bias = Some(&wide_bias);
        call.epilogue.activation = Activation::Relu;
        gemm_f64(&IntraPool::new(1), call).unwrap();
        let (one, three) = (run(1), run(3));
        assert_eq!(one, three, "{what}");
        for (i, (found, expected)) in one.iter().zip(&expected).enumerate() {
            assert!((f64::from(*found) - expected).abs() < 1e-4, "{what} {i}: {found} {expected}");
        }
    }

    #[test]
    fn products_are_what_they_would_be_with_zeros() {
        for op in [Op::None, Op::Transpose] {
            let ops = (op, Op::None);
            check((100, 100, 784), Zeros::Left, ops, 0.0);
            check((784, 100, 100), Zeros::Left, ops, 1.0);
            check((300, 32, 1000), Zeros::Left, ops, 0.0);
            check((1100, 60, 70), Zeros::Left, ops, 1.0);
            check((300, 100, 200), Zeros::Left, ops, 1.0);
        }
    }

    #[test]
    fn so_are_those_with_many_columns() {
        let (plain, turned) = (Op::None, Op::Transpose);
        for ops in [(plain, plain), (plain, turned), (turned, plain), (turned, turned)] {
            for (zeros, beta) in [(Zeros::Left, 0.0), (Zeros::Left, 1.0), (Zeros::Right, 0.0), (Zeros::Right, 1.0)] {
                check((310, 331, 329), zeros, ops, beta);
                check((130, 900, 290), zeros, ops, beta);
            }
            check((67, 331, 129), Zeros::Left, ops, 0.0);
            check((33, 105, 640), Zeros::Left, ops, 0.0);
            check((40, 512, 200), Zeros::Left, ops, 1.0);
        }
        check((100, 100, 300), Zeros::Left, (plain, turned), 0.0);
    }

    #[test]
    fn so_are_those_in_several_chunks() {
        // Two runs of k, and the columns of each in two pieces, the second of four columns.
        let (plain, turned) = (Op::None, Op::Transpose);
        check((16, 1980, 4100), Zeros::Left, (plain, plain), 0.0);
        check((120, 1980, 4100), Zeros::Left, (plain, turned), 0.0);
        check((1980, 110, 4100), Zeros::Right, (plain, turned), 0.0);
        check((1980, 110, 4100), Zeros::Right, (turned, plain), 1.0);
    }

    #[test]
    fn few_zeros_are_not_skipped() {
        let (a, b, mut c) = (full(200 * 200), full(200 * 200), vec![0.0; 200 * 200]);
        assert!(!skips(&mut Gemm::new(200, 200, 200, &a, &b, &mut c)));
        assert!(c.iter().all(|&x| x == 0.0));
    }

    #[test]
    fn zero_times_infinity_is_nan() {
        // Few columns, many, many in two runs of k, and turned: an infinity in the last row of B, or the last column of
        // A.
        let (few, many, runs) = ((300, 100, 100), (330, 330, 330), (130, 120, 4100));
        for ((m, n, k), zeros) in
            [(few, Zeros::Left), (many, Zeros::Left), (runs, Zeros::Left), (many, Zeros::Right), (runs, Zeros::Right)]
        {
            let (mut a, mut b) = match zeros {
                Zeros::Left => (sparse(m * k), full(k * n)),
                Zeros::Right => (full(m * k), sparse(k * n)),
            };
            match zeros {
                Zeros::Left => b[(k - 1) * n + 3] = f32::INFINITY,
                Zeros::Right => a[3 * k + k - 1] = f32::INFINITY,
            }
            for beta in [0.0, 1.0] {
                let mut c = vec![1.0; m * n];
                let mut call = Gemm::new(m, n, k, &a, &b, &mut c);
                call.beta = beta;
                gemm_f32(&IntraPool::new(2), call).unwrap();
                let is_odd = |i: usize| if zeros == Zeros::Left { i % n == 3 } else { i / n == 3 };
                assert!(c.iter().enumerate().all(|(i, x)| x.is_finite() != is_odd(i)), "{n} {zeros:?} {beta}");
                assert!(c.iter().any(|x| x.is_nan()));
            }
        }
    }
}
