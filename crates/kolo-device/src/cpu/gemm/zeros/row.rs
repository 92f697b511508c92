//! One row of C: the mask of A's nonzeros, and the sum of the corresponding rows of B.

use std::arch::x86_64::*;

/// Elements of a line.
pub(super) const LINE: usize = 16;
/// Steps of k in a mask.
pub(super) const STEPS: usize = 64;
/// Elements of the vectors that hold C, and how many vectors do. Rows of B seldom begin at a multiple of 64 bytes, and
/// loads of 32 cross lines less often.
pub(super) const LANES: usize = 8;
const MOST_VECTORS: usize = 13;
/// Columns of C that they hold.
pub(super) const WIDE: usize = MOST_VECTORS * LANES;

/// For each row, a mask of the nonzeros among its first `cols` elements, at most 64. Prefetches the elements after
/// them: rows are too short for the hardware prefetcher.
///
/// # Safety
/// The elements are valid, and the machine has AVX-512.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn masks(a: *const f32, ld: usize, cols: usize, masks: &mut [u64]) {
    let others = |values| u64::from(_mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(values, _mm512_setzero_ps()));
    for (row, mask) in masks.iter_mut().enumerate() {
        *mask = 0;
        // SAFETY: only elements of the row are read; a prefetched address may be invalid.
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
}

/// Transposes bits: blocks of 32 by 32 first, then within each, down to single bits.
pub(super) fn turn(mut bits: [u64; STEPS]) -> [u64; STEPS] {
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
pub(super) type AddRow = unsafe fn(u64, (*const f32, usize), (*const f32, usize), u8, f32, (*mut f32, bool));

/// The function for this many columns, and the lanes of its last vector.
pub(super) fn adder(n_columns: usize) -> (AddRow, u8) {
    let n_vectors = n_columns.div_ceil(LANES);
    let last = (1u16 << (n_columns - (n_vectors - 1) * LANES)) - 1;
    (ADD_ROW[n_vectors - 1], last as u8)
}

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

/// With `N` vectors, the last with only the lanes in `last`. `mask` selects the elements of A and rows of B; both have
/// a stride.
///
/// # Safety
/// The rows that `mask` names are valid, C is valid for writes by this call alone, and the machine has AVX-512.
#[target_feature(enable = "avx512f,avx512vl,avx2,fma,bmi1,bmi2")]
unsafe fn add_row<const N: usize>(
    mut mask: u64,
    (a, step): (*const f32, usize),
    (b, ldb): (*const f32, usize),
    last: u8,
    alpha: f32,
    (c, keeps): (*mut f32, bool),
) {
    // SAFETY: guaranteed by the caller; the last vector is read and written in part.
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
}
