//! Products of types without micro-kernels: halves through `f32`, anything else by plain loops.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use num_traits::{One, Zero};

use super::drive::Shared;
use super::{Epilogue, Gemm, Op, gemm_f32};
use crate::cpu::scratch::Scratch;
use crate::cpu::{IntraPool, vectorize};

/// Elements converted by one task.
const CONVERT: usize = 32 << 10;

/// `f16` product, accumulated in `f32` and rounded once at the end.
///
/// # Errors
/// If a slice is too short, or a bias has the wrong length.
pub fn gemm_f16(pool: &IntraPool, call: Gemm<'_, f16>) -> Result<(), String> {
    gemm_half(pool, call)
}

/// `bf16` product, accumulated in `f32` and rounded once at the end.
///
/// # Errors
/// If a slice is too short, or a bias has the wrong length.
pub fn gemm_bf16(pool: &IntraPool, call: Gemm<'_, bf16>) -> Result<(), String> {
    gemm_half(pool, call)
}

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

fn gemm_half<H>(pool: &IntraPool, call: Gemm<'_, H>) -> Result<(), String>
where
    H: Copy + Zero + PartialEq + Send + Sync + Into<f32>,
    [H]: HalfFloatSliceExt,
{
    call.check()?;
    let (m, n) = (call.m, call.n);
    if m == 0 || n == 0 {
        return Ok(());
    }
    let widen_bias =
        |bias: Option<&[H]>| -> Option<Vec<f32>> { bias.map(|bias| bias.iter().map(|&x| x.into()).collect()) };
    let column_bias = widen_bias(call.epilogue.column_bias);
    let row_bias = widen_bias(call.epilogue.row_bias);
    let scratch = Scratch::take::<f32>(call.a.len() + call.b.len() + m * n);
    // SAFETY: three disjoint parts of one buffer with room for them, filled below before use.
    let (a, b, c) = unsafe {
        let start = scratch.as_ptr::<f32>();
        let b = start.add(call.a.len());
        let c = b.add(call.b.len());
        std::ptr::write_bytes(c, 0, m * n);
        (widen(pool, call.a, start), widen(pool, call.b, b), std::slice::from_raw_parts_mut(c, m * n))
    };
    if !call.beta.is_zero() {
        for (wide, half) in c.chunks_mut(n).zip(call.c.chunks(call.ldc)) {
            half[..n].convert_to_f32_slice(wide);
        }
    }
    let result = gemm_f32(
        pool,
        Gemm {
            m,
            n,
            k: call.k,
            alpha: call.alpha.into(),
            a,
            lda: call.lda,
            op_a: call.op_a,
            b,
            ldb: call.ldb,
            op_b: call.op_b,
            beta: call.beta.into(),
            c,
            ldc: n,
            epilogue: Epilogue {
                column_bias: column_bias.as_deref(),
                row_bias: row_bias.as_deref(),
                activation: call.epilogue.activation,
            },
        },
    );
    let c_len = (m - 1) * call.ldc + n;
    let rows = (CONVERT / n).max(1);
    pool.for_each_chunk(&mut call.c[..c_len], rows * call.ldc, |i, half| {
        for (r, half) in half.chunks_mut(call.ldc).enumerate() {
            half[..n].convert_from_f32_slice(&c[(i * rows + r) * n..][..n]);
        }
    });
    scratch.put_back();
    result
}

/// Converts `half` to `f32` at `dst`.
///
/// # Safety
/// `dst` must be valid for writes of as many values, for the lifetime chosen.
unsafe fn widen<'a, H: Sync>(pool: &IntraPool, half: &[H], dst: *mut f32) -> &'a [f32]
where
    [H]: HalfFloatSliceExt,
{
    let shared = Shared(dst);
    pool.parallel_for(half.len().div_ceil(CONVERT), &|i| {
        let part = &half[i * CONVERT..((i + 1) * CONVERT).min(half.len())];
        // SAFETY: parts are disjoint and inside what the caller promised.
        let wide = unsafe {
            let start = shared.get().add(i * CONVERT);
            std::ptr::write_bytes(start, 0, part.len());
            std::slice::from_raw_parts_mut(start, part.len())
        };
        part.convert_to_f32_slice(wide);
    });
    // SAFETY: all values were written above.
    unsafe { std::slice::from_raw_parts(dst, half.len()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_match_f32_within_their_precision() {
        let (m, n, k) = (17, 23, 40);
        let value = |i: usize| ((i * 37 % 101) as f32 - 50.0) / 64.0;
        let a: Vec<f32> = (0..m * k).map(value).collect();
        let b: Vec<f32> = (0..n * k).map(value).collect();
        let bias: Vec<f32> = (0..n).map(value).collect();
        for n_threads in [1, 2] {
            let pool = IntraPool::new(n_threads);
            let mut expect = vec![1f32; m * n];
            let ops = (Op::None, Op::Transpose);
            let mut call = Gemm::with_ops(m, n, k, (&a, ops.0), (&b, ops.1), &mut expect);
            (call.beta, call.epilogue.column_bias) = (1.0, Some(bias.as_slice()));
            gemm_f32(&pool, call).unwrap();
            let to16 = |x: &[f32]| x.iter().map(|&x| f16::from_f32(x)).collect::<Vec<_>>();
            let (a, b, bias) = (to16(&a), to16(&b), to16(&bias));
            let mut c = vec![f16::ONE; m * n];
            let mut call = Gemm::with_ops(m, n, k, (&a, ops.0), (&b, ops.1), &mut c);
            (call.beta, call.epilogue.column_bias) = (f16::ONE, Some(bias.as_slice()));
            gemm_f16(&pool, call).unwrap();
            for (x, y) in c.iter().zip(&expect) {
                assert!((x.to_f32() - y).abs() <= 2e-3 * y.abs().max(1.0), "{x} for {y}");
            }
        }
        let pool = IntraPool::new(1);
        let (a, b, mut c) = ([bf16::from_f32(3.0)], [bf16::from_f32(0.5)], [bf16::NAN]);
        gemm_bf16(&pool, Gemm::new(1, 1, 1, &a, &b, &mut c)).unwrap();
        assert_eq!(c[0].to_f32(), 1.5);
    }

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
