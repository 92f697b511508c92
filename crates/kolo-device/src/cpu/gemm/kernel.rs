//! Micro-kernels: one small tile of C kept in registers over a run of k.
//!
//! A tile has up to `mr` rows and a few vectors of columns. Each step of k loads a row of B as
//! vectors and adds `a[i] * b` to row `i` for every `i`. Every element of C is one chain of
//! additions in the order of k, so its bits do not depend on the tile's shape or place.
//!
//! A is read in place: either its rows are contiguous (`A` as stored) or its columns are (`A`
//! transposed); packing changes only the stride. B's rows are contiguous; packed or in place.

use std::mem::MaybeUninit;

use super::drive::Problem;
use super::simd::{Portable, Simd};
use crate::cpu::{IntraPool, Isa, vmath};

/// One tile's work: `C = alpha * A * B`, or `C += alpha * A * B` with `accumulate`.
pub(crate) struct Tile<T> {
    /// Steps of a segment.
    pub k: usize,
    /// Segments, one after the other: 1 for a plain product, the rows of a filter or image for a convolution.
    pub segments: usize,
    /// Elements of A from the end of a segment to the start of the next.
    pub a_skip: isize,
    /// The same for B.
    pub b_skip: isize,
    /// The tile's first element of A.
    pub a: *const T,
    /// Distance between A's rows (`Layout::Rows`) or its columns (`Layout::Cols`).
    pub a_stride: usize,
    /// The tile's first element of B; every row has the kernel's full width to read.
    pub b: *const T,
    /// Distance between B's rows.
    pub b_stride: usize,
    /// The tile's first element of C.
    pub c: *mut T,
    /// Distance between C's rows.
    pub ldc: usize,
    /// Columns to write, at most the kernel's width.
    pub cols: usize,
    /// Factor of the product.
    pub alpha: T,
    /// Add to C rather than overwrite it.
    pub accumulate: bool,
}

/// A compiled micro-kernel.
///
/// # Safety
/// The instruction set must be present; A, B and C must be valid for the tile's rows, `k` and
/// columns as the fields say, and no other thread may touch the tile of C during the call.
pub(crate) type Micro<T> = unsafe fn(&Tile<T>);

/// `y[i] = rows[i] · x` for `n_rows` rows of `k` elements, `ld` apart: `(rows, ld, n_rows, x, k, y)`.
///
/// # Safety
/// The instruction set must be present, and the pointers valid for these elements.
pub(crate) type Dots<T> = unsafe fn(*const T, usize, usize, *const T, usize, *mut T);

/// Which way A is contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// Element `(i, p)` is at `i * stride + p`.
    Rows,
    /// Element `(i, p)` is at `p * stride + i`.
    Cols,
}

/// The micro-kernels of one instruction set for one element type.
pub(crate) struct Kernels<T: 'static> {
    /// Most rows of a tile.
    pub mr: usize,
    /// Dot products with rows of a matrix.
    pub dots: Dots<T>,
    /// By width, widest first; the first is the one that gives full speed.
    pub widths: &'static [Width<T>],
}

/// Micro-kernels of one width.
pub(crate) struct Width<T: 'static> {
    /// Columns of a tile.
    pub cols: usize,
    by_rows: &'static [[Micro<T>; 2]],
}

impl<T> Kernels<T> {
    /// Columns of the widest tile.
    pub(crate) fn nr(&self) -> usize {
        self.widths[0].cols
    }

    /// The width to use where `left` columns remain: the widest while it is filled, then the one
    /// that wastes least.
    pub(crate) fn width_for(&self, left: usize) -> &'static Width<T> {
        let narrowest = self.widths[self.widths.len() - 1].cols;
        let padded = left.next_multiple_of(narrowest);
        let fits = self.widths.iter().find(|w| w.cols <= padded);
        fits.unwrap_or(&self.widths[self.widths.len() - 1])
    }

    /// First column and width of each panel of `n` columns.
    pub(crate) fn panels(&self, n: usize) -> Vec<(usize, usize)> {
        let mut col = 0;
        std::iter::from_fn(|| {
            let width = (col < n).then(|| self.width_for(n - col).cols)?;
            col += width;
            Some((col - width, width))
        })
        .collect()
    }
}

impl<T> Width<T> {
    /// The kernel for a tile of `rows` rows.
    pub(crate) fn micro(&self, rows: usize, layout: Layout) -> Micro<T> {
        self.by_rows[rows - 1][match layout {
            Layout::Rows => 0,
            Layout::Cols => 1,
        }]
    }
}

/// Element types with micro-kernels.
pub(crate) trait Real: bytemuck::Pod + Send + Sync + PartialEq + 'static {
    /// Additive identity.
    const ZERO: Self;
    /// Multiplicative identity.
    const ONE: Self;
    /// The kernels of `isa`, or of the best instruction set present if that one is not.
    fn kernels(isa: Isa) -> &'static Kernels<Self>;
    /// `self + other`.
    fn plus(self, other: Self) -> Self;
    /// `self * other`.
    fn times(self, other: Self) -> Self;
    /// The larger of 0 and `self`; a NaN stays.
    fn relu(self) -> Self;
    /// `1 / (1 + exp(-x))` of every element.
    fn sigmoid(x: &mut [Self]);
    /// Computes a product by a special algorithm, if there is one for it; `false` if not.
    ///
    /// # Safety
    /// As for [`super::drive::run`]; the machine has `isa`.
    unsafe fn try_shortcut(_isa: Isa, _pool: &IntraPool, _problem: &Problem<'_, Self>) -> bool {
        false
    }
    /// Transposes `n_blocks` blocks of 8 by 8 that are adjacent in eight rows at `src` to
    /// blocks below each other at `dst`, if there are instructions for it.
    ///
    /// # Safety
    /// The pointers must be valid for these elements.
    #[inline(always)]
    unsafe fn turn(_src: *const Self, _ld_src: usize, _n_blocks: usize, _dst: *mut Self, _ld_dst: usize) -> bool {
        false
    }
}

impl Real for f32 {
    const ZERO: f32 = 0.0;
    const ONE: f32 = 1.0;

    fn kernels(isa: Isa) -> &'static Kernels<f32> {
        match isa.min(Isa::best()) {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => &x86::F32_AVX512,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &x86::F32_AVX2,
            _ => &F32_PORTABLE,
        }
    }

    #[cfg(target_arch = "x86_64")]
    unsafe fn try_shortcut(isa: Isa, pool: &IntraPool, problem: &Problem<'_, f32>) -> bool {
        // SAFETY: passed on.
        unsafe { super::zeros::try_run(isa.min(Isa::best()), pool, problem) }
    }

    #[inline(always)]
    fn plus(self, other: f32) -> f32 {
        self + other
    }

    #[inline(always)]
    fn times(self, other: f32) -> f32 {
        self * other
    }

    #[inline(always)]
    fn relu(self) -> f32 {
        if self < 0.0 { 0.0 } else { self }
    }

    fn sigmoid(x: &mut [f32]) {
        vmath::sigmoid_f32(x);
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn turn(src: *const f32, ld_src: usize, n: usize, dst: *mut f32, ld_dst: usize) -> bool {
        let present = Isa::best() >= Isa::Avx2;
        if present {
            // SAFETY: AVX2 is present; the rest is passed on.
            unsafe { super::simd::turn_f32(src, ld_src, n, dst, ld_dst) };
        }
        present
    }
}

impl Real for f64 {
    const ZERO: f64 = 0.0;
    const ONE: f64 = 1.0;

    fn kernels(isa: Isa) -> &'static Kernels<f64> {
        match isa.min(Isa::best()) {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => &x86::F64_AVX512,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &x86::F64_AVX2,
            _ => &F64_PORTABLE,
        }
    }

    #[inline(always)]
    fn plus(self, other: f64) -> f64 {
        self + other
    }

    #[inline(always)]
    fn times(self, other: f64) -> f64 {
        self * other
    }

    #[inline(always)]
    fn relu(self) -> f64 {
        if self < 0.0 { 0.0 } else { self }
    }

    fn sigmoid(x: &mut [f64]) {
        vmath::sigmoid_f64(x);
    }
}

/// Repeats a block for `0..n`, `n` at most 14, without a loop: the optimiser must see every
/// accumulator under a constant index or it keeps them in memory, sixty times slower.
macro_rules! unroll {
    ($n:expr, $i:ident => $body:block) => {
        unroll!(@ $n, $i, $body, 0 1 2 3 4 5 6 7 8 9 10 11 12 13)
    };
    (@ $n:expr, $i:ident, $body:block, $($index:literal)*) => {
        $(if $index < $n {
            let $i: usize = $index;
            $body
        })*
    };
}

#[cfg(target_arch = "x86_64")]
mod ahead;
#[cfg(target_arch = "x86_64")]
pub(crate) use ahead::{Ahead, LEAST_ROWS, MicrosAhead, micros_ahead};

/// The body of every micro-kernel. `ROWS` is `Layout::Rows`.
///
/// # Safety
/// As for [`Micro`], with the instruction set of `V`.
#[inline(always)]
unsafe fn tile<V: Simd, const MR: usize, const NV: usize, const ROWS: bool>(t: &Tile<V::Elem>) {
    // SAFETY: every access is inside the rows, columns and steps the caller guarantees.
    unsafe {
        for i in 0..MR {
            prefetch(t.c.add(i * t.ldc));
            prefetch(t.c.add(i * t.ldc).add(t.cols - 1));
        }
        let mut acc = [[V::zero(); NV]; MR];
        let mut a = Rows::new::<ROWS, MR>(t.a, t.a_stride);
        let mut b = t.b;
        for _ in 0..t.segments {
            for _ in 0..t.k / 4 {
                a.hide::<MR>();
                unroll!(4, u => {
                    step::<V, MR, NV, ROWS>(&mut acc, &a, u, b);
                    b = b.add(t.b_stride);
                    if !ROWS {
                        a.advance::<MR>(t.a_stride);
                    }
                });
                if ROWS {
                    a.advance::<MR>(4);
                }
            }
            for _ in 0..t.k % 4 {
                step::<V, MR, NV, ROWS>(&mut acc, &a, 0, b);
                b = b.add(t.b_stride);
                a.advance::<MR>(if ROWS { 1 } else { t.a_stride });
            }
            a.advance::<MR>(t.a_skip as usize);
            b = b.wrapping_offset(t.b_skip);
        }
        let alpha = V::splat(&raw const t.alpha);
        if t.cols != NV * V::LANES {
            return write_part(t, alpha, &acc);
        }
        if t.accumulate {
            unroll!(MR, i => {
                unroll!(NV, j => {
                    let c = t.c.add(i * t.ldc + j * V::LANES);
                    V::mul_add(alpha, acc[i][j], V::load(c)).store(c);
                });
            });
        } else {
            unroll!(MR, i => {
                unroll!(NV, j => {
                    alpha.mul(acc[i][j]).store(t.c.add(i * t.ldc + j * V::LANES));
                });
            });
        }
    }
}

/// Writes a tile that is not as wide as its kernel. By loops, from memory: this is rare, and saves code in each kernel.
///
/// # Safety
/// As for [`tile`].
#[inline(always)]
unsafe fn write_part<V: Simd, const MR: usize, const NV: usize>(t: &Tile<V::Elem>, alpha: V, acc: &[[V; NV]; MR]) {
    // SAFETY: of each of `MR` rows of C, `cols` elements are touched; `sums` has `NV` vectors in each row.
    unsafe {
        let mut sums = MaybeUninit::<[[V; NV]; MR]>::uninit();
        let sums = sums.as_mut_ptr().cast::<V>();
        unroll!(MR, i => {
            unroll!(NV, j => {
                sums.add(i * NV + j).write(acc[i][j]);
            });
        });
        for i in 0..opaque(MR) {
            for j in 0..opaque(t.cols.div_ceil(V::LANES)) {
                let (c, sum) = (t.c.add(i * t.ldc + j * V::LANES), sums.add(i * NV + j).read());
                let n = (t.cols - j * V::LANES).min(V::LANES);
                match (t.accumulate, n == V::LANES) {
                    (false, false) => alpha.mul(sum).store_first(c, n),
                    (false, true) => alpha.mul(sum).store(c),
                    (true, false) => V::mul_add(alpha, sum, V::load_first(c, n)).store_first(c, n),
                    (true, true) => V::mul_add(alpha, sum, V::load(c)).store(c),
                }
            }
        }
    }
}

/// Where the rows of A are: every fourth row has a pointer, the others are one, two or three
/// strides from it, which are addressing modes. Left alone, the optimiser keeps a pointer per row,
/// runs out of registers and loses a third of the speed.
struct Rows<T> {
    fourth: [*const T; 4],
    stride: usize,
    stride3: usize,
}

impl<T> Rows<T> {
    /// # Safety
    /// `a` must point to `MR` rows (or columns without `ROWS`) of a matrix with this stride.
    #[inline(always)]
    unsafe fn new<const ROWS: bool, const MR: usize>(a: *const T, stride: usize) -> Rows<T> {
        if !ROWS {
            return Rows { fourth: [a; 4], stride: 0, stride3: 0 };
        }
        let fourth = |g: usize| a.wrapping_add(if 4 * g < MR { 4 * g * stride } else { 0 });
        let n_bytes = stride * size_of::<T>();
        Rows {
            fourth: [fourth(0), fourth(1), fourth(2), fourth(3)],
            stride: opaque(n_bytes),
            stride3: opaque(3 * n_bytes),
        }
    }

    /// The address of row `i`, `u` elements further.
    #[inline(always)]
    fn at<const ROWS: bool>(&self, i: usize, u: usize) -> *const T {
        if !ROWS {
            return self.fourth[0].wrapping_add(i);
        }
        let group = self.fourth[i / 4].wrapping_add(u);
        match i % 4 {
            0 => group,
            1 => group.wrapping_byte_add(self.stride),
            2 => group.wrapping_byte_add(2 * self.stride),
            _ => group.wrapping_byte_add(self.stride3),
        }
    }

    #[inline(always)]
    fn advance<const MR: usize>(&mut self, by: usize) {
        unroll!(4, g => {
            if 4 * g < MR {
                self.fourth[g] = self.fourth[g].wrapping_add(by);
            }
        });
    }

    /// Keeps the optimiser from seeing where the pointers came from.
    #[inline(always)]
    fn hide<const MR: usize>(&mut self) {
        unroll!(4, g => {
            if 4 * g < MR {
                self.fourth[g] = opaque(self.fourth[g]);
            }
        });
    }
}

/// Returns its argument, about which the optimiser then knows nothing.
#[inline(always)]
fn opaque<T: OpaqueOperand>(x: T) -> T {
    x.opaque()
}

trait OpaqueOperand: Sized {
    fn opaque(self) -> Self;
}

macro_rules! opaque_operand {
    ($t:ty $(, $g:ident)?) => {
        impl$(<$g>)? OpaqueOperand for $t {
            #[inline(always)]
            fn opaque(self) -> Self {
                #[cfg(all(target_arch = "x86_64", not(miri)))]
                {
                    let mut x = self;
                    #[allow(
                        clippy::pointers_in_nomem_asm_block,
                        reason = "the pointer is passed through, not followed"
                    )]
                    // SAFETY: no instruction is emitted; the register keeps its value.
                    unsafe {
                        std::arch::asm!(
                            "/* {0} */",
                            inout(reg) x,
                            options(pure, nomem, nostack, preserves_flags)
                        );
                    }
                    x
                }
                #[cfg(not(all(target_arch = "x86_64", not(miri))))]
                self
            }
        }
    };
}
opaque_operand!(usize);
opaque_operand!(*const T, T);

/// One step of k: `acc[i] += a[i] * b`, with A's rows read `u` elements on.
///
/// # Safety
/// As for [`tile`], with `a` and `b` at the step.
#[inline(always)]
unsafe fn step<V: Simd, const MR: usize, const NV: usize, const ROWS: bool>(
    acc: &mut [[V; NV]; MR],
    a: &Rows<V::Elem>,
    u: usize,
    b: *const V::Elem,
) {
    // SAFETY: passed on.
    unsafe {
        let mut row = [V::zero(); NV];
        unroll!(NV, j => {
            row[j] = V::load(b.add(j * V::LANES));
        });
        unroll!(MR, i => {
            let a = V::splat(a.at::<ROWS>(i, u));
            unroll!(NV, j => {
                acc[i][j] = V::mul_add(a, row[j], acc[i][j]);
            });
        });
    }
}

/// The body of [`Dots`]: two rows at a time share the loads of `x`. A row's additions are the same
/// alone and in a pair.
///
/// # Safety
/// As for [`Dots`], with the instruction set of `V`.
#[inline(always)]
unsafe fn dots<V: Simd>(rows: *const V::Elem, ld: usize, n_rows: usize, x: *const V::Elem, k: usize, y: *mut V::Elem)
where
    V::Elem: Real,
{
    // SAFETY: passed on; pairs cover the even rows and the last odd one stands alone.
    unsafe {
        for pair in 0..n_rows / 2 {
            dot_rows::<V, 2>(rows.add(2 * pair * ld), ld, x, k, y.add(2 * pair));
        }
        if n_rows % 2 == 1 {
            dot_rows::<V, 1>(rows.add((n_rows - 1) * ld), ld, x, k, y.add(n_rows - 1));
        }
    }
}

/// # Safety
/// As for [`dots`], with `R` rows.
#[inline(always)]
unsafe fn dot_rows<V: Simd, const R: usize>(
    rows: *const V::Elem,
    ld: usize,
    x: *const V::Elem,
    k: usize,
    y: *mut V::Elem,
) where
    V::Elem: Real,
{
    const SUMS: usize = 4;
    // SAFETY: all reads are below `k` in one of `R` rows.
    unsafe {
        let mut acc = [[V::zero(); SUMS]; R];
        let mut p = 0;
        while p + SUMS * V::LANES <= k {
            unroll!(SUMS, j => {
                let x = V::load(x.add(p + j * V::LANES));
                unroll!(R, i => {
                    acc[i][j] = V::mul_add(V::load(rows.add(i * ld + p + j * V::LANES)), x, acc[i][j]);
                });
            });
            p += SUMS * V::LANES;
        }
        while p < k {
            let n = (k - p).min(V::LANES);
            unroll!(R, i => {
                let at = rows.add(i * ld + p);
                let (row, x) = if n == V::LANES {
                    (V::load(at), V::load(x.add(p)))
                } else {
                    (V::load_first(at, n), V::load_first(x.add(p), n))
                };
                acc[i][0] = V::mul_add(row, x, acc[i][0]);
            });
            p += n;
        }
        let one = V::Elem::ONE;
        let one = V::splat(&raw const one);
        for (i, acc) in acc.iter().enumerate() {
            let low = V::mul_add(acc[0], one, acc[1]);
            let all = V::mul_add(V::mul_add(acc[2], one, acc[3]), one, low);
            // Wide enough for every vector.
            let mut lanes = [V::Elem::ZERO; 16];
            all.store(lanes.as_mut_ptr());
            let mut width = V::LANES / 2;
            while width > 0 {
                for l in 0..width {
                    lanes[l] = lanes[l].plus(lanes[l + width]);
                }
                width /= 2;
            }
            *y.add(i) = lanes[0];
        }
    }
}

/// Prefetches the cache line of `ptr`, which need not be readable.
#[inline(always)]
fn prefetch<T>(ptr: *mut T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch has no effect but on the caches, at any address; SSE is in every x86-64.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(ptr.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = ptr;
}

/// # Safety
/// As for [`Micro`].
unsafe fn portable<V: Simd, const MR: usize, const NV: usize, const ROWS: bool>(t: &Tile<V::Elem>) {
    // SAFETY: passed on.
    unsafe { tile::<V, MR, NV, ROWS>(t) }
}

/// # Safety
/// As for [`Dots`].
unsafe fn portable_dots<V: Simd>(
    rows: *const V::Elem,
    ld: usize,
    n_rows: usize,
    x: *const V::Elem,
    k: usize,
    y: *mut V::Elem,
) where
    V::Elem: Real,
{
    // SAFETY: passed on.
    unsafe { dots::<V>(rows, ld, n_rows, x, k, y) }
}

macro_rules! width {
    ($entry:path, $v:ty, $nv:literal, [$($rows:literal)*]) => {{
        use $entry as entry;
        Width {
            cols: $nv * <$v as Simd>::LANES,
            by_rows: &[$([entry::<$v, $rows, $nv, true>, entry::<$v, $rows, $nv, false>]),*],
        }
    }};
}

static F32_PORTABLE: Kernels<f32> = Kernels {
    mr: 4,
    dots: portable_dots::<Portable<f32, 4>>,
    widths: &[
        width!(self::portable, Portable<f32, 4>, 2, [1 2 3 4]),
        width!(self::portable, Portable<f32, 4>, 1, [1 2 3 4]),
    ],
};
static F64_PORTABLE: Kernels<f64> = Kernels {
    mr: 4,
    dots: portable_dots::<Portable<f64, 2>>,
    widths: &[
        width!(self::portable, Portable<f64, 2>, 2, [1 2 3 4]),
        width!(self::portable, Portable<f64, 2>, 1, [1 2 3 4]),
    ],
};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::super::simd::{F32x8, F32x16, F64x4, F64x8, Simd};
    use super::{Kernels, Tile, Width, dots, tile};

    /// # Safety
    /// As for [`super::Micro`].
    #[target_feature(enable = "avx2,fma")]
    unsafe fn avx2<V: Simd, const MR: usize, const NV: usize, const ROWS: bool>(t: &Tile<V::Elem>) {
        // SAFETY: passed on.
        unsafe { tile::<V, MR, NV, ROWS>(t) }
    }

    /// # Safety
    /// As for [`super::Micro`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    unsafe fn avx512<V: Simd, const MR: usize, const NV: usize, const ROWS: bool>(t: &Tile<V::Elem>) {
        // SAFETY: passed on.
        unsafe { tile::<V, MR, NV, ROWS>(t) }
    }

    /// # Safety
    /// As for [`super::Dots`].
    #[target_feature(enable = "avx2,fma")]
    unsafe fn avx2_dots<V: Simd>(
        rows: *const V::Elem,
        ld: usize,
        n_rows: usize,
        x: *const V::Elem,
        k: usize,
        y: *mut V::Elem,
    ) where
        V::Elem: super::Real,
    {
        // SAFETY: passed on.
        unsafe { dots::<V>(rows, ld, n_rows, x, k, y) }
    }

    /// # Safety
    /// As for [`super::Dots`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    unsafe fn avx512_dots<V: Simd>(
        rows: *const V::Elem,
        ld: usize,
        n_rows: usize,
        x: *const V::Elem,
        k: usize,
        y: *mut V::Elem,
    ) where
        V::Elem: super::Real,
    {
        // SAFETY: passed on.
        unsafe { dots::<V>(rows, ld, n_rows, x, k, y) }
    }

    pub(super) static F32_AVX2: Kernels<f32> = Kernels {
        mr: 6,
        dots: avx2_dots::<F32x8>,
        widths: &[width!(self::avx2, F32x8, 2, [1 2 3 4 5 6]), width!(self::avx2, F32x8, 1, [1 2 3 4 5 6])],
    };
    pub(super) static F64_AVX2: Kernels<f64> = Kernels {
        mr: 6,
        dots: avx2_dots::<F64x4>,
        widths: &[width!(self::avx2, F64x4, 2, [1 2 3 4 5 6]), width!(self::avx2, F64x4, 1, [1 2 3 4 5 6])],
    };
    // 14 rows by 2 vectors fill 28 of the 32 registers; half vectors serve the last few columns of floats.
    pub(super) static F32_AVX512: Kernels<f32> = Kernels {
        mr: 14,
        dots: avx512_dots::<F32x16>,
        widths: &[
            width!(self::avx512, F32x16, 2, [1 2 3 4 5 6 7 8 9 10 11 12 13 14]),
            width!(self::avx512, F32x16, 1, [1 2 3 4 5 6 7 8 9 10 11 12 13 14]),
            width!(self::avx512, F32x8, 1, [1 2 3 4 5 6 7 8 9 10 11 12 13 14]),
        ],
    };
    pub(super) static F64_AVX512: Kernels<f64> = Kernels {
        mr: 14,
        dots: avx512_dots::<F64x8>,
        widths: &[
            width!(self::avx512, F64x8, 2, [1 2 3 4 5 6 7 8 9 10 11 12 13 14]),
            width!(self::avx512, F64x8, 1, [1 2 3 4 5 6 7 8 9 10 11 12 13 14]),
        ],
    };
}
