//! Transposition, for elements of four bytes.

use super::isa::Isa;
use super::stream::{fence, prefetch, stream};

/// A square of this side is transposed through a buffer: each line of the input is read once, and each line of the
/// output written once, even where many of them map to one cache set.
const SIDE: usize = 64;

/// The side of a block that is transposed in registers.
const BLOCK: usize = 8;

type Buffer = [[u32; SIDE]; SIDE];

/// Fills rows of `run` elements from columns: `out[i * run + j] = input[j * step + i]`; bypassing the caches if
/// `past_caches`.
///
/// # Panics
/// If `out` is not whole rows, or a column is not in the input.
pub fn transpose_words(input: &[u32], step: usize, out: &mut [u32], run: usize, past_caches: bool) {
    if out.is_empty() {
        return;
    }
    assert!(run > 0 && out.len().is_multiple_of(run), "whole rows");
    let n_rows = out.len() / run;
    let mut buffer = [[0; SIDE]; SIDE];
    for row in (0..n_rows).step_by(SIDE) {
        let rows = SIDE.min(n_rows - row);
        for column in (0..run).step_by(SIDE) {
            let columns = SIDE.min(run - column);
            // Prefetch: the hardware does not track this many columns.
            let (next_row, next_column) = if column + SIDE < run { (row, column + SIDE) } else { (row + SIDE, 0) };
            if past_caches && next_row < n_rows {
                let lines =
                    input[next_column * step + next_row..].chunks(step.max(1)).take(SIDE.min(run - next_column));
                lines.for_each(|line| prefetch(&line[..SIDE.min(n_rows - next_row).min(line.len())]));
            }
            let input = &input[column * step + row..][..(columns - 1) * step + rows];
            turn(Isa::best(), input, step, (rows, columns), &mut buffer);
            for (i, line) in buffer[..rows].iter().enumerate() {
                let place = &mut out[(row + i) * run + column..][..columns];
                // Only whole lines: two kinds of stores to one line are slower than one.
                match past_caches && run.is_multiple_of(SIDE) {
                    true => stream(place, &line[..columns]),
                    false => place.copy_from_slice(&line[..columns]),
                }
            }
        }
    }
    fence();
}

/// `buffer[i][j] = input[j * step + i]` for `rows` values of `i` and `columns` of `j`.
fn turn(isa: Isa, input: &[u32], step: usize, (rows, columns): (usize, usize), buffer: &mut Buffer) {
    let whole = match isa {
        Isa::Portable => (0, 0),
        Isa::Avx2 | Isa::Avx512 => (rows / BLOCK * BLOCK, columns / BLOCK * BLOCK),
    };
    for j in (0..whole.1).step_by(BLOCK) {
        for i in (0..whole.0).step_by(BLOCK) {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `isa` is the machine's, which has AVX2.
            unsafe {
                turn_block(&input[j * step + i..], step, buffer, i, j);
            }
        }
    }
    for j in 0..columns {
        let first = if j < whole.1 { whole.0 } else { 0 };
        for (line, &x) in buffer[first..rows].iter_mut().zip(&input[j * step + first..]) {
            line[j] = x;
        }
    }
}

/// Transposes eight elements of each of eight columns: interleaves pairs, then pairs of pairs, then exchanges halves.
///
/// # Safety
/// Needs AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn turn_block(input: &[u32], step: usize, buffer: &mut Buffer, i: usize, j: usize) {
    use std::arch::x86_64::*;
    let column = |k: usize| -> __m256i {
        let column: &[u32] = &input[k * step..][..BLOCK];
        // SAFETY: the slice is eight elements long, and the load needs no alignment.
        unsafe { _mm256_loadu_si256(column.as_ptr().cast()) }
    };
    let columns: [__m256i; BLOCK] = std::array::from_fn(column);
    let pairs: [__m256i; BLOCK] = std::array::from_fn(|k| {
        let (a, b) = (columns[k / 2 * 2], columns[k / 2 * 2 + 1]);
        if k % 2 == 0 { _mm256_unpacklo_epi32(a, b) } else { _mm256_unpackhi_epi32(a, b) }
    });
    // Elements 0 and 4 of four columns, 1 and 5, 2 and 6, 3 and 7; the same of the other four.
    let quads: [__m256i; BLOCK] = std::array::from_fn(|k| {
        let at = k / 4 * 4 + k % 4 / 2;
        let (a, b) = (pairs[at], pairs[at + 2]);
        if k % 2 == 0 { _mm256_unpacklo_epi64(a, b) } else { _mm256_unpackhi_epi64(a, b) }
    });
    for k in 0..BLOCK {
        let (a, b) = (quads[k % 4], quads[k % 4 + 4]);
        let row = if k < 4 { _mm256_permute2x128_si256::<0x20>(a, b) } else { _mm256_permute2x128_si256::<0x31>(a, b) };
        let place: &mut [u32] = &mut buffer[i + k][j..j + BLOCK];
        // SAFETY: the slice is eight elements long, and the store needs no alignment.
        unsafe { _mm256_storeu_si256(place.as_mut_ptr().cast(), row) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_lands_where_it_belongs() {
        for (rows, run, step) in
            [(1, 1, 1), (8, 8, 8), (64, 64, 64), (65, 63, 70), (3, 200, 3), (200, 3, 211), (137, 150, 139), (7, 9, 12)]
        {
            let input: Vec<u32> = (0..((run - 1) * step + rows) as u32).collect();
            let expected: Vec<u32> = (0..rows).flat_map(|i| (0..run).map(move |j| (j * step + i) as u32)).collect();
            for past_caches in [false, true] {
                let mut out = vec![u32::MAX; rows * run];
                transpose_words(&input, step, &mut out, run, past_caches);
                assert!(out == expected, "{rows} rows of {run}, {step} apart");
            }
        }
        transpose_words(&[], 1, &mut [], 1, false);
    }

    #[test]
    fn all_instruction_sets_agree() {
        let input: Vec<u32> = (0..64 * 70).collect();
        for isa in Isa::present() {
            let mut buffer = [[u32::MAX; SIDE]; SIDE];
            turn(isa, &input, 70, (50, 61), &mut buffer);
            for (i, line) in buffer.iter().enumerate() {
                for (j, &x) in line.iter().enumerate() {
                    let expected = if i < 50 && j < 61 { (j * 70 + i) as u32 } else { u32::MAX };
                    assert_eq!(x, expected, "{isa:?} {i} {j}");
                }
            }
        }
    }
}
