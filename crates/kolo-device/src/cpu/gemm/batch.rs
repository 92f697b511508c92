//! Many products of one shape, as `BatchMatMul` needs them.

use super::drive::Shared;
use super::kernel::Real;
use super::{Gemm, Isa, gemm_real};
use crate::cpu::IntraPool;

/// Work of one product from which it is worth splitting itself rather than the batch.
const LARGE_FLOP: usize = 16_000_000;
/// Least work of one task.
const TASK_FLOP: usize = 1_000_000;

/// The strides of a batch: product `i` uses A at `i * a`, B at `i * b`, C at `i * c`.
#[derive(Clone, Copy, Debug)]
pub struct Strides {
    /// Between left operands; 0 shares one.
    pub a: usize,
    /// Between right operands; 0 shares one.
    pub b: usize,
    /// Between products; at least the extent of one.
    pub c: usize,
}

/// `n_products` products shaped like `call`, whose slices hold all of them.
///
/// # Errors
/// If a slice is too short, products overlap, or a bias has the wrong length.
pub fn gemm_batch_f32(
    pool: &IntraPool,
    n_products: usize,
    strides: Strides,
    call: Gemm<'_, f32>,
) -> Result<(), String> {
    gemm_batch(pool, n_products, strides, call)
}

/// [`gemm_batch_f32`] for `f64`.
///
/// # Errors
/// As there.
pub fn gemm_batch_f64(
    pool: &IntraPool,
    n_products: usize,
    strides: Strides,
    call: Gemm<'_, f64>,
) -> Result<(), String> {
    gemm_batch(pool, n_products, strides, call)
}

fn gemm_batch<T: Real>(pool: &IntraPool, n_products: usize, strides: Strides, call: Gemm<'_, T>) -> Result<(), String> {
    if n_products == 0 || call.m == 0 || call.n == 0 {
        return Ok(());
    }
    call.check()?;
    let (m, n, k) = (call.m, call.n, call.k);
    let c_extent = (m - 1) * call.ldc + n;
    if n_products > 1 && strides.c < c_extent {
        return Err(format!("products of {c_extent} values are only {} apart", strides.c));
    }
    let last = n_products - 1;
    let tail = |len: usize, stride: usize| last.checked_mul(stride).and_then(|at| len.checked_sub(at));
    let (Some(a_len), Some(b_len), Some(c_len)) =
        (tail(call.a.len(), strides.a), tail(call.b.len(), strides.b), tail(call.c.len(), strides.c))
    else {
        return Err(format!("the slices are too short for {n_products} products"));
    };
    let last_call = Gemm { a: &call.a[..a_len], b: &call.b[..b_len], c: &mut call.c[..c_len], ..call };
    last_call.check()?;
    let c = Shared(last_call.c.as_mut_ptr());
    let one = |i: usize| {
        // SAFETY: the last product was checked to fit, so all do; extents of C do not overlap.
        let c = unsafe { std::slice::from_raw_parts_mut(c.get().add(i * strides.c), c_extent) };
        let (a, b) = (&call.a[i * strides.a..], &call.b[i * strides.b..]);
        let product = Gemm { a, b, c, epilogue: call.epilogue, ..last_call };
        gemm_real(Isa::best(), pool, product).expect("every product was checked to fit");
    };
    let flop = 2 * m * n * k;
    if flop >= LARGE_FLOP {
        (0..n_products).for_each(one);
    } else {
        // A product inside a task finds the pool busy and stays on its thread.
        let group = (TASK_FLOP / flop.max(1)).clamp(1, n_products);
        pool.parallel_for(n_products.div_ceil(group), &|g| {
            (g * group..((g + 1) * group).min(n_products)).for_each(one);
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::gemm::{Op, gemm_f32};

    #[test]
    fn a_batch_is_its_products() {
        let (m, n, k) = (9, 20, 31);
        let value = |i: usize| ((i * 37 % 101) as f32 - 50.0) / 64.0;
        for n_products in [0, 1, 2, 500] {
            let a: Vec<f32> = (0..n_products * m * k).map(value).collect();
            let b: Vec<f32> = (0..n * k).map(value).collect();
            let strides = Strides { a: m * k, b: 0, c: m * n };
            let mut expect = vec![0f32; n_products * m * n];
            let pool = IntraPool::new(1);
            for (i, c) in expect.chunks_mut(m * n).enumerate() {
                let a = &a[i * m * k..][..m * k];
                let call = Gemm::with_ops(m, n, k, (a, Op::None), (&b, Op::Transpose), c);
                gemm_f32(&pool, call).unwrap();
            }
            for n_threads in [1, 2, 3] {
                let pool = IntraPool::new(n_threads);
                let mut c = vec![f32::NAN; n_products * m * n];
                let call = Gemm::with_ops(m, n, k, (&a, Op::None), (&b, Op::Transpose), &mut c);
                gemm_batch_f32(&pool, n_products, strides, call).unwrap();
                assert_eq!(c, expect);
            }
        }
    }

    #[test]
    fn a_batch_too_long_for_its_slices_is_an_error() {
        let pool = IntraPool::new(1);
        let (a, b, mut c) = ([1f32; 8], [1f32; 8], [0f32; 8]);
        let strides = Strides { a: 4, b: 4, c: 4 };
        for (n_products, strides, fine) in [
            (2, strides, true),
            (3, strides, false),
            (2, Strides { c: 3, ..strides }, false),
            (2, Strides { b: 5, ..strides }, false),
            (usize::MAX, strides, false),
        ] {
            let call = Gemm::new(2, 2, 2, &a, &b, &mut c);
            assert_eq!(gemm_batch_f32(&pool, n_products, strides, call).is_ok(), fine);
        }
    }
}
