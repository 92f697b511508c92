//! Matrix products on the CPU: `C = alpha * op(A) * op(B) + beta * C`, then an epilogue.
//!
//! ```text
//! simd      vectors of each instruction set
//! kernel    one tile of C in registers
//! pack      blocks of A and B as the kernels read them
//! drive     blocking, threads, cuts along k
//! gemv      one row or one column of C
//! zeros     an A or a B that is mostly zeros
//! batch     many products of one shape
//! generic   other types, by plain loops
//! epilogue  bias and activation on a finished tile
//! ```
//!
//! ```
//! use kolo_device::cpu::{IntraPool, gemm::{Gemm, gemm_f32}};
//!
//! let pool = IntraPool::new(1);
//! let mut c = [f32::NAN; 4];
//! gemm_f32(&pool, Gemm::new(2, 2, 2, &[1., 2., 3., 4.], &[1., 0., 0., 1.], &mut c))?;
//! assert_eq!(c, [1., 2., 3., 4.]);
//! # Ok::<(), String>(())
//! ```
//!
//! Bits of a result depend on the values, the shape and the chip, never on the number of threads.

use super::{IntraPool, Isa};

mod batch;
mod drive;
mod epilogue;
mod gemv;
mod generic;
mod kernel;
mod pack;
mod simd;
#[cfg(target_arch = "x86_64")]
mod zeros;

pub use batch::{Strides, gemm_batch_f32, gemm_batch_f64};
pub(crate) use drive::{Gather, Left, Problem, Shared, nth_block};
pub(crate) use epilogue::apply;
pub use epilogue::{Activation, Epilogue};
pub use generic::gemm_with;
#[cfg(target_arch = "x86_64")]
pub(crate) use kernel::{Ahead, LEAST_ROWS, MicrosAhead, micros_ahead};
pub(crate) use kernel::{Kernels, Layout, Real, Tile};
pub(crate) use pack::{pack_b, transpose};
#[cfg(target_arch = "x86_64")]
pub(crate) use simd::{F32x8, F32x16, F64x4, F64x8};
pub(crate) use simd::{Portable, Simd};

/// Whether an operand is used as stored or transposed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Op {
    /// As stored.
    #[default]
    None,
    /// Rows and columns exchanged.
    Transpose,
}

/// One product. All matrices are row-major; a leading dimension is the distance between rows of
/// the matrix as stored (`A` is m×k, or k×m with `Op::Transpose`; `B` is k×n, or n×k).
#[derive(Debug)]
pub struct Gemm<'a, T> {
    /// Rows of C.
    pub m: usize,
    /// Columns of C.
    pub n: usize,
    /// Columns of op(A), rows of op(B).
    pub k: usize,
    /// Factor of the product.
    pub alpha: T,
    /// Left operand.
    pub a: &'a [T],
    /// Its leading dimension.
    pub lda: usize,
    /// Its use.
    pub op_a: Op,
    /// Right operand.
    pub b: &'a [T],
    /// Its leading dimension.
    pub ldb: usize,
    /// Its use.
    pub op_b: Op,
    /// Factor of the old C; with 0 the old C is never read and may be anything.
    pub beta: T,
    /// Result.
    pub c: &'a mut [T],
    /// Its leading dimension.
    pub ldc: usize,
    /// Bias and activation, applied last.
    pub epilogue: Epilogue<'a, T>,
}

impl<'a, T: num_traits::Zero + num_traits::One> Gemm<'a, T> {
    /// `C = A * B`, all matrices dense, nothing transposed.
    pub fn new(m: usize, n: usize, k: usize, a: &'a [T], b: &'a [T], c: &'a mut [T]) -> Self {
        Self::with_ops(m, n, k, (a, Op::None), (b, Op::None), c)
    }

    /// `C = op(A) * op(B)`, all matrices dense.
    pub fn with_ops(
        m: usize,
        n: usize,
        k: usize,
        (a, op_a): (&'a [T], Op),
        (b, op_b): (&'a [T], Op),
        c: &'a mut [T],
    ) -> Self {
        let lda = if op_a == Op::None { k } else { m };
        let ldb = if op_b == Op::None { n } else { k };
        let epilogue = Epilogue::default();
        let (alpha, beta) = (T::one(), T::zero());
        Gemm { m, n, k, alpha, a, lda, op_a, b, ldb, op_b, beta, c, ldc: n, epilogue }
    }
}

impl<T> Gemm<'_, T> {
    /// Whether every slice is long enough for its sizes.
    ///
    /// # Errors
    /// Names the operand, what it needs and what it has.
    pub fn check(&self) -> Result<(), String> {
        let (m, n, k) = (self.m, self.n, self.k);
        let (a_rows, a_cols) = if self.op_a == Op::None { (m, k) } else { (k, m) };
        let (b_rows, b_cols) = if self.op_b == Op::None { (k, n) } else { (n, k) };
        check_matrix("left operand", self.a.len(), a_rows, a_cols, self.lda)?;
        check_matrix("right operand", self.b.len(), b_rows, b_cols, self.ldb)?;
        check_matrix("product", self.c.len(), m, n, self.ldc)?;
        self.epilogue.check(m, n)
    }
}

/// `f32` product.
///
/// # Errors
/// If a slice is too short, or a bias has the wrong length.
pub fn gemm_f32(pool: &IntraPool, call: Gemm<'_, f32>) -> Result<(), String> {
    gemm_real(Isa::best(), pool, call)
}

/// `f64` product.
///
/// # Errors
/// If a slice is too short, or a bias has the wrong length.
pub fn gemm_f64(pool: &IntraPool, call: Gemm<'_, f64>) -> Result<(), String> {
    gemm_real(Isa::best(), pool, call)
}

/// [`gemm_f32`] on a given instruction set, for tests and benchmarks.
///
/// # Errors
/// If a slice is too short, or a bias has the wrong length.
pub fn gemm_f32_on(isa: Isa, pool: &IntraPool, call: Gemm<'_, f32>) -> Result<(), String> {
    gemm_real(isa, pool, call)
}

fn gemm_real<T: Real>(isa: Isa, pool: &IntraPool, mut call: Gemm<'_, T>) -> Result<(), String> {
    call.check()?;
    let (m, n, k) = (call.m, call.n, call.k);
    if m == 0 || n == 0 {
        return Ok(());
    }
    if call.beta != T::ZERO && call.beta != T::ONE {
        scale_c(&mut call);
    }
    let problem = Problem {
        m,
        n,
        k,
        alpha: call.alpha,
        a: Left::Matrix(call.a.as_ptr(), layout(call.op_a), call.lda),
        b: call.b.as_ptr(),
        b_layout: layout(call.op_b),
        ldb: call.ldb,
        accumulate: call.beta != T::ZERO,
        c: call.c.as_mut_ptr(),
        ldc: call.ldc,
        epilogue: call.epilogue,
    };
    // SAFETY: `check` found all three slices long enough, and C is borrowed mutably.
    unsafe { product_on(isa, pool, &problem) };
    Ok(())
}

/// Computes `problem`, of any sizes, on the best instruction set.
///
/// # Safety
/// As for [`drive::run`].
pub(crate) unsafe fn product<T: Real>(pool: &IntraPool, problem: &Problem<'_, T>) {
    // SAFETY: passed on.
    unsafe { product_on(Isa::best(), pool, problem) }
}

/// # Safety
/// As for [`drive::run`].
unsafe fn product_on<T: Real>(isa: Isa, pool: &IntraPool, p: &Problem<'_, T>) {
    if p.m == 0 || p.n == 0 {
        return;
    }
    // SAFETY: passed on; the rows cleared and finished are those of C.
    unsafe {
        if p.k == 0 {
            for i in 0..p.m {
                if !p.accumulate {
                    std::slice::from_raw_parts_mut(p.c.add(i * p.ldc), p.n).fill(T::ZERO);
                }
            }
            epilogue::apply(&p.epilogue, p.c, p.ldc, 0..p.m, 0..p.n);
        } else if !gemv::try_run(pool, T::kernels(isa), p) && !T::try_shortcut(isa, pool, p) {
            drive::run(pool, T::kernels(isa), p);
        }
    }
}

fn layout(op: Op) -> Layout {
    match op {
        Op::None => Layout::Rows,
        Op::Transpose => Layout::Cols,
    }
}

/// `C = beta * C`.
fn scale_c<T: Real>(call: &mut Gemm<'_, T>) {
    for row in call.c.chunks_mut(call.ldc).take(call.m) {
        for x in &mut row[..call.n] {
            *x = if call.beta == T::ZERO { T::ZERO } else { x.times(call.beta) };
        }
    }
}

fn check_matrix(name: &str, len: usize, rows: usize, cols: usize, ld: usize) -> Result<(), String> {
    if rows == 0 || cols == 0 {
        return Ok(());
    }
    if ld < cols {
        return Err(format!("{name}: leading dimension {ld} is less than its {cols} columns"));
    }
    let needed = (rows - 1).checked_mul(ld).and_then(|x| x.checked_add(cols));
    match needed {
        Some(needed) if needed <= len => Ok(()),
        _ => Err(format!("{name}: {rows}x{cols} with leading dimension {ld} does not fit in {len} values")),
    }
}

#[cfg(test)]
mod tests;
