//! Products of types without micro-kernels, by plain loops.

use num_traits::{One, Zero};

use super::{Gemm, Op};
use crate::cpu::{IntraPool, stop_if_asked, vectorize};

/// After how many steps of k a row looks at whether its step was stopped.
const BETWEEN_LOOKS: usize = 64;

/// A product over any type, given how to add a product to a sum: `mul_add(sum, a, b)`.
///
/// Integers pass wrapping arithmetic, complex numbers their own. Sums run in the order of k.
///
/// # Errors
/// If a slice is too short, or an epilogue is asked for.
pub fn gemm_with<T, F>(pool: &IntraPool, call: Gemm<'_, T>, mul_add: F) -> Result<(), String>
where
    T: Copy + Zero + One + PartialEq + Send + Sync,
    F: Fn(T, T, T) -> T + Sync,
{
    call.check()?;
    if !call.epilogue.is_empty() {
        return Err("only floating-point products have an epilogue".into());
    }
    let (m, n, k) = (call.m, call.n, call.k);
    if m == 0 || n == 0 {
        return Ok(());
    }
    // B transposed is turned once, so that the inner loop runs along rows.
    let turned: Option<Vec<T>> =
        (call.op_b == Op::Transpose).then(|| (0..k * n).map(|i| call.b[(i % n) * call.ldb + i / n]).collect());
    let (b, ldb) = turned.as_deref().map_or((call.b, call.ldb), |b| (b, n));
    let (alpha, beta) = (call.alpha, call.beta);
    let c_len = (m - 1) * call.ldc + n;
    let rows_per_task = (500_000 / (n * k).max(1)).clamp(1, m);
    pool.for_each_chunk(&mut call.c[..c_len], rows_per_task * call.ldc, |task, c| {
        let mut sums = vec![T::zero(); n];
        for (i, c) in c.chunks_mut(call.ldc).enumerate() {
            let i = task * rows_per_task + i;
            sums.fill(T::zero());
            vectorize(
                #[inline(always)]
                || {
                    for p in 0..k {
                        if p % BETWEEN_LOOKS == 0 {
                            stop_if_asked();
                        }
                        let a = match call.op_a {
                            Op::None => call.a[i * call.lda + p],
                            Op::Transpose => call.a[p * call.lda + i],
                        };
                        for (sum, &b) in sums.iter_mut().zip(&b[p * ldb..][..n]) {
                            *sum = mul_add(*sum, a, b);
                        }
                    }
                },
            );
            for (c, &sum) in c[..n].iter_mut().zip(&sums) {
                let old = if beta.is_zero() { T::zero() } else { mul_add(T::zero(), beta, *c) };
                *c = mul_add(old, alpha, sum);
            }
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_match_the_triple_loop() {
        let value = |i: usize| (i * 7919 % 2001) as i32 - 1000;
        for (m, n, k) in [(1, 1, 1), (5, 7, 0), (0, 3, 2), (65, 33, 129)] {
            for ops in [(Op::None, Op::None), (Op::Transpose, Op::Transpose)] {
                let a: Vec<i32> = (0..m * k).map(value).collect();
                let b: Vec<i32> = (0..n * k).map(|i| value(i + 5)).collect();
                let mut expect = vec![3i32; m * n];
                for (at, c) in expect.iter_mut().enumerate() {
                    let (i, j) = (at / n, at % n);
                    for p in 0..k {
                        let a = if ops.0 == Op::None { a[i * k + p] } else { a[p * m + i] };
                        let b = if ops.1 == Op::None { b[p * n + j] } else { b[j * k + p] };
                        *c = c.wrapping_add(a.wrapping_mul(b));
                    }
                }
                for n_threads in [1, 3] {
                    let mut c = vec![3i32; m * n];
                    let mut call = Gemm::with_ops(m, n, k, (&a, ops.0), (&b, ops.1), &mut c);
                    call.beta = 1;
                    let pool = IntraPool::new(n_threads);
                    gemm_with(&pool, call, |c, a, b| c.wrapping_add(a.wrapping_mul(b))).unwrap();
                    assert_eq!(c, expect);
                }
            }
        }
    }
}
