//! Copies of operand blocks in the order the micro-kernels read them.

use super::kernel::{Layout, Real};

/// Copies `rows` runs of `cols` contiguous elements, `lda` apart, to runs `stride` apart. The
/// layout is kept: what changes is that the block becomes dense, so that it stays in L2 and its
/// rows do not fall into the same cache sets.
///
/// # Safety
/// `src` must be valid for the reads and `dst` for the writes named.
pub(crate) unsafe fn pack_a<T: Real>(src: *const T, lda: usize, rows: usize, cols: usize, dst: *mut T, stride: usize) {
    for i in 0..rows {
        // SAFETY: promised by the caller; packing buffers never overlap operands.
        unsafe { std::ptr::copy_nonoverlapping(src.add(i * lda), dst.add(i * stride), cols) };
    }
}

/// Copies one panel of B, `k` by `cols`, to `k` rows of `width`, with zeros after `cols`.
/// With `Layout::Cols` the source holds B transposed.
///
/// # Safety
/// `src` must be valid for reads of the panel and `dst` for writes of `k * width`.
#[inline(always)]
pub(crate) unsafe fn pack_b<T: Real>(
    src: *const T,
    layout: Layout,
    ldb: usize,
    k: usize,
    cols: usize,
    width: usize,
    dst: *mut T,
) {
    // SAFETY: promised by the caller; packing buffers never overlap operands.
    unsafe {
        match layout {
            Layout::Rows if cols == width => match width * size_of::<T>() {
                // A length known to the compiler becomes a few vector moves instead of a call.
                128 => copy_rows::<T, 128>(src, ldb, k, dst, width),
                64 => copy_rows::<T, 64>(src, ldb, k, dst, width),
                32 => copy_rows::<T, 32>(src, ldb, k, dst, width),
                _ => pack_a(src, ldb, k, cols, dst, width),
            },
            Layout::Rows => {
                // Rows with enough behind them inside B are read whole and masked.
                let whole = (0..k).take_while(|p| (k - 1 - p) * ldb + cols >= width).count();
                let mut done = whole;
                match width * size_of::<T>() {
                    128 => copy_masked::<T, 128>(src, ldb, whole, cols, dst, width),
                    64 => copy_masked::<T, 64>(src, ldb, whole, cols, dst, width),
                    32 => copy_masked::<T, 32>(src, ldb, whole, cols, dst, width),
                    _ => done = 0,
                }
                for p in done..k {
                    let row = dst.add(p * width);
                    std::ptr::copy_nonoverlapping(src.add(p * ldb), row, cols);
                    std::ptr::write_bytes(row.add(cols), 0, width - cols);
                }
            }
            Layout::Cols => {
                if cols < width {
                    std::ptr::write_bytes(dst, 0, k * width);
                }
                transpose(src, ldb, cols, k, dst, width);
            }
        }
    }
}

/// # Safety
/// As for [`pack_a`], with rows of `BYTES` bytes.
#[inline(always)]
unsafe fn copy_rows<T, const BYTES: usize>(src: *const T, ldb: usize, k: usize, dst: *mut T, width: usize) {
    for p in 0..k {
        // SAFETY: promised by the caller.
        unsafe {
            let row = src.add(p * ldb).cast::<[u8; BYTES]>().read_unaligned();
            dst.add(p * width).cast::<[u8; BYTES]>().write_unaligned(row);
        }
    }
}

/// Like [`copy_rows`], with zeros after `cols` elements.
///
/// # Safety
/// As for [`copy_rows`].
#[inline(always)]
unsafe fn copy_masked<T, const BYTES: usize>(
    src: *const T,
    ldb: usize,
    k: usize,
    cols: usize,
    dst: *mut T,
    width: usize,
) {
    let mut mask = [0u8; BYTES];
    mask.iter_mut().take(cols * size_of::<T>()).for_each(|b| *b = 0xff);
    for p in 0..k {
        // SAFETY: promised by the caller.
        unsafe {
            let mut row = src.add(p * ldb).cast::<[u8; BYTES]>().read_unaligned();
            for b in 0..BYTES {
                row[b] &= mask[b];
            }
            dst.add(p * width).cast::<[u8; BYTES]>().write_unaligned(row);
        }
    }
}

/// `dst[j * ld_dst + i] = src[i * ld_src + j]` for `i` below `rows`, `j` below `cols`.
///
/// # Safety
/// `src` must be valid for the reads and `dst` for the writes named.
#[inline(always)]
pub(crate) unsafe fn transpose<T: Real>(
    src: *const T,
    ld_src: usize,
    rows: usize,
    cols: usize,
    dst: *mut T,
    ld_dst: usize,
) {
    // SAFETY: all indices are below `rows` and `cols`.
    unsafe {
        let mut i = 0;
        while i < rows {
            let mut j = 0;
            // Blocks of 8 by 8 keep eight lines of each side busy; the compiler turns the inner
            // loops of constant length into shuffles.
            let (strip, below) = (src.add(i * ld_src), dst.add(i));
            if rows - i >= 8 && T::turn(strip, ld_src, cols / 8, below, ld_dst) {
                j = cols / 8 * 8;
            } else if rows - i >= 8 {
                while cols - j >= 8 {
                    let mut block = [[T::ZERO; 8]; 8];
                    for (r, row) in block.iter_mut().enumerate() {
                        *row = src.add((i + r) * ld_src + j).cast::<[T; 8]>().read_unaligned();
                    }
                    let columns: [[T; 8]; 8] = std::array::from_fn(|c| std::array::from_fn(|r| block[r][c]));
                    for (c, column) in columns.into_iter().enumerate() {
                        dst.add((j + c) * ld_dst + i).cast::<[T; 8]>().write_unaligned(column);
                    }
                    j += 8;
                }
            }
            let height = (rows - i).min(8);
            for j in j..cols {
                for r in 0..height {
                    *dst.add(j * ld_dst + i + r) = *src.add((i + r) * ld_src + j);
                }
            }
            i += height;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panel_of_transposed_b_is_turned_and_padded() {
        for (k, cols) in [(1, 1), (7, 3), (8, 8), (9, 17), (40, 32)] {
            let ldb = k + 3;
            let src: Vec<f32> = (0..cols * ldb).map(|i| i as f32).collect();
            let mut dst = vec![f32::NAN; k * 32];
            // SAFETY: the vectors have the sizes named.
            unsafe { pack_b(src.as_ptr(), Layout::Cols, ldb, k, cols, 32, dst.as_mut_ptr()) };
            for p in 0..k {
                for j in 0..32 {
                    let expect = if j < cols { src[j * ldb + p] } else { 0.0 };
                    assert_eq!(dst[p * 32 + j], expect);
                }
            }
        }
    }

    #[test]
    fn a_panel_of_b_is_copied_and_padded() {
        for (k, cols, width) in [(1, 1, 8), (3, 32, 32), (5, 9, 16), (4, 16, 16), (2, 4, 4), (9, 75, 80)] {
            let ldb = cols + 5;
            let src: Vec<f64> = (0..k * ldb).map(|i| i as f64).collect();
            let mut dst = vec![f64::NAN; k * width];
            // SAFETY: the vectors have the sizes named.
            unsafe { pack_b(src.as_ptr(), Layout::Rows, ldb, k, cols, width, dst.as_mut_ptr()) };
            for p in 0..k {
                for j in 0..width {
                    let expect = if j < cols { src[p * ldb + j] } else { 0.0 };
                    assert_eq!(dst[p * width + j], expect);
                }
            }
        }
    }
}
