//! Micro-kernels that prefetch the next tile's data while they compute this one.
//!
//! A tile whose rows come from memory for the first time stalls, since each row is too short for the hardware
//! prefetcher. Prefetching all of the next tile's lines at once delays the loads of B instead. So a few are prefetched
//! every few steps, without branches: prefetching too many, or twice, costs less than counting.

use std::any::Any;

use super::super::simd::F32x16;
use super::{Real, Rows, Simd, Tile, step};
use crate::cpu::Isa;

/// The addresses to prefetch. They need not be readable.
pub(crate) struct Ahead<T> {
    /// Consecutive lines of A from here on, two in every four steps.
    pub a: *const T,
    /// The offset in elements from one segment's lines to the next segment's.
    pub a_segment: usize,
    /// Rows of C, one in every four steps.
    pub c: *const T,
    /// The stride of the rows of C.
    pub ldc: usize,
}

/// A compiled micro-kernel: `C = A * B` for a tile of the kernel's full width with A's rows contiguous; `alpha` is
/// taken as one, `accumulate` as false.
///
/// # Safety
/// As for [`super::Micro`]; the rows of C must begin at a line of the caches where they are stored past them.
pub(crate) type MicroAhead<T> = unsafe fn(&Tile<T>, &Ahead<T>);

/// Kernels for [`LEAST_ROWS`] rows and more.
pub(crate) type MicrosAhead<T> = [MicroAhead<T>; 3];

/// Bytes of a cache line. A row of C has two.
const LINE: usize = 64;

/// The minimum number of rows of these tiles: with fewer, the optimiser allocates registers badly and spills.
pub(crate) const LEAST_ROWS: usize = 12;

/// Columns of these tiles, and the kernels for them, if this machine has any for `T`: those that store C as usual, and
/// those that store it bypassing the caches.
pub(crate) fn micros_ahead<T: Real>() -> Option<(usize, [MicrosAhead<T>; 2])> {
    macro_rules! micros {
        ($past:literal) => {
            [avx512::<12, $past>, avx512::<13, $past>, avx512::<14, $past>]
        };
    }
    let micros: [MicrosAhead<f32>; 2] = [micros!(false), micros!(true)];
    let micros = (&micros as &dyn Any).downcast_ref::<[MicrosAhead<T>; 2]>()?;
    (Isa::best() == Isa::Avx512).then_some((2 * F32x16::LANES, *micros))
}

/// # Safety
/// As for [`MicroAhead`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn avx512<const MR: usize, const PAST: bool>(t: &Tile<f32>, soon: &Ahead<f32>) {
    // SAFETY: passed on.
    unsafe { tile::<MR, PAST>(t, soon) }
}

/// The body of every such kernel.
///
/// # Safety
/// As for [`MicroAhead`].
#[inline(always)]
unsafe fn tile<const MR: usize, const PAST: bool>(t: &Tile<f32>, soon: &Ahead<f32>) {
    type V = F32x16;
    const NV: usize = 2;
    let (mut soon_a, mut soon_c) = (soon.a, soon.c);
    // SAFETY: every access is inside the rows, columns and steps the caller guarantees.
    unsafe {
        let mut acc = [[V::zero(); NV]; MR];
        let mut a = Rows::new::<true, MR>(t.a, t.a_stride);
        let mut b = t.b;
        for segment in 0..t.segments {
            for _ in 0..t.k / 4 {
                prefetch(soon_a);
                prefetch(soon_a.wrapping_byte_add(LINE));
                soon_a = soon_a.wrapping_byte_add(2 * LINE);
                if !PAST {
                    prefetch(soon_c);
                    prefetch(soon_c.wrapping_byte_add(LINE));
                    soon_c = soon_c.wrapping_add(soon.ldc);
                }
                a.hide::<MR>();
                unroll!(4, u => {
                    step::<V, MR, NV, true>(&mut acc, &a, u, b);
                    b = b.add(t.b_stride);
                });
                a.advance::<MR>(4);
            }
            for _ in 0..t.k % 4 {
                step::<V, MR, NV, true>(&mut acc, &a, 0, b);
                b = b.add(t.b_stride);
                a.advance::<MR>(1);
            }
            a.advance::<MR>(t.a_skip as usize);
            b = b.wrapping_offset(t.b_skip);
            soon_a = soon.a.wrapping_add((segment + 1) * soon.a_segment);
        }
        unroll!(MR, i => {
            let c = t.c.add(i * t.ldc);
            unroll!(NV, j => {
                let c = c.add(j * V::LANES);
                if PAST { acc[i][j].stream(c) } else { acc[i][j].store(c) }
            });
        });
    }
}

/// Prefetches a line into L2, so that it does not evict this tile's lines from L1.
#[inline(always)]
fn prefetch<T>(at: *const T) {
    use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
    // SAFETY: a prefetch has no effect but on the caches, at any address; SSE is in every x86-64.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) };
}
