//! The vectors a micro-kernel is written over: one trait, one type per instruction set and width.
//!
//! Every method is `#[inline(always)]`, so it takes on the target features of the micro-kernel
//! entry that calls it (see `kernel.rs`), and none may be called outside such an entry.

/// A vector register of `LANES` elements.
///
/// # Safety
/// Every method needs the type's instruction set; pointers must be valid for the elements named.
pub(crate) trait Simd: Copy {
    /// What one lane holds.
    type Elem: Copy;
    /// Elements per register.
    const LANES: usize;

    /// All lanes zero.
    unsafe fn zero() -> Self;
    /// All lanes equal to `*ptr`.
    unsafe fn splat(ptr: *const Self::Elem) -> Self;
    /// `LANES` elements from `ptr`, at any alignment.
    unsafe fn load(ptr: *const Self::Elem) -> Self;
    /// The first `n < LANES` elements from `ptr`; other lanes are zero and are not read.
    unsafe fn load_first(ptr: *const Self::Elem, n: usize) -> Self;
    /// Writes `LANES` elements to `ptr`, at any alignment.
    unsafe fn store(self, ptr: *mut Self::Elem);
    /// Writes the first `n < LANES` elements to `ptr` and nothing else.
    unsafe fn store_first(self, ptr: *mut Self::Elem, n: usize);
    /// `a * b + c`, rounded once where the instruction set can.
    unsafe fn mul_add(a: Self, b: Self, c: Self) -> Self;
    /// Lane by lane.
    unsafe fn mul(self, other: Self) -> Self;
}

/// Plain Rust that the compiler vectorises for whatever the build targets.
#[derive(Clone, Copy)]
pub(crate) struct Portable<T, const N: usize>([T; N]);

macro_rules! portable {
    ($t:ty) => {
        impl<const N: usize> Simd for Portable<$t, N> {
            type Elem = $t;
            const LANES: usize = N;

            #[inline(always)]
            unsafe fn zero() -> Self {
                Self([0.0; N])
            }
            #[inline(always)]
            unsafe fn splat(ptr: *const $t) -> Self {
                // SAFETY: the caller promises one readable element.
                Self([unsafe { *ptr }; N])
            }
            #[inline(always)]
            unsafe fn load(ptr: *const $t) -> Self {
                // SAFETY: the caller promises `N` readable elements.
                Self(unsafe { ptr.cast::<[$t; N]>().read() })
            }
            #[inline(always)]
            unsafe fn load_first(ptr: *const $t, n: usize) -> Self {
                let mut lanes = [0.0; N];
                for (i, lane) in lanes.iter_mut().enumerate().take(n) {
                    // SAFETY: the caller promises `n` readable elements.
                    *lane = unsafe { *ptr.add(i) };
                }
                Self(lanes)
            }
            #[inline(always)]
            unsafe fn store(self, ptr: *mut $t) {
                // SAFETY: the caller promises `N` writable elements.
                unsafe { ptr.cast::<[$t; N]>().write(self.0) }
            }
            #[inline(always)]
            unsafe fn store_first(self, ptr: *mut $t, n: usize) {
                for (i, &lane) in self.0.iter().enumerate().take(n) {
                    // SAFETY: the caller promises `n` writable elements.
                    unsafe { *ptr.add(i) = lane }
                }
            }
            #[inline(always)]
            unsafe fn mul_add(a: Self, b: Self, c: Self) -> Self {
                Self(std::array::from_fn(|i| a.0[i] * b.0[i] + c.0[i]))
            }
            #[inline(always)]
            unsafe fn mul(self, other: Self) -> Self {
                Self(std::array::from_fn(|i| self.0[i] * other.0[i]))
            }
        }
    };
}
portable!(f32);
portable!(f64);

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::*;

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::Simd;

    /// Eight `f32` in a 256-bit register; needs AVX2 and FMA.
    #[derive(Clone, Copy)]
    pub(crate) struct F32x8(__m256);
    /// Four `f64` in a 256-bit register; needs AVX2 and FMA.
    #[derive(Clone, Copy)]
    pub(crate) struct F64x4(__m256d);
    /// Sixteen `f32` in a 512-bit register; needs AVX-512 F.
    #[derive(Clone, Copy)]
    pub(crate) struct F32x16(__m512);
    /// Eight `f64` in a 512-bit register; needs AVX-512 F.
    #[derive(Clone, Copy)]
    pub(crate) struct F64x8(__m512d);

    impl F32x16 {
        /// Writes sixteen elements to `ptr`, bypassing the caches.
        ///
        /// # Safety
        /// Needs AVX-512 F; `ptr` must be valid for the elements and aligned to 64 bytes.
        #[inline(always)]
        pub(crate) unsafe fn stream(self, ptr: *mut f32) {
            // SAFETY: guaranteed by the caller.
            unsafe { _mm512_stream_ps(ptr, self.0) }
        }
    }

    // Masked stores are slow on some AVX2 chips, so parts of a 256-bit register go through memory.
    macro_rules! avx2 {
        ($v:ident, $t:ty, $lanes:literal, $zero:ident, $set1:ident, $load:ident, $store:ident,
         $fma:ident, $mul:ident) => {
            impl Simd for $v {
                type Elem = $t;
                const LANES: usize = $lanes;

                #[inline(always)]
                unsafe fn zero() -> Self {
                    // SAFETY: the caller has AVX2.
                    Self(unsafe { $zero() })
                }
                #[inline(always)]
                unsafe fn splat(ptr: *const $t) -> Self {
                    // SAFETY: the caller has AVX2 and one readable element.
                    Self(unsafe { $set1(*ptr) })
                }
                #[inline(always)]
                unsafe fn load(ptr: *const $t) -> Self {
                    // SAFETY: the caller has AVX2 and `LANES` readable elements.
                    Self(unsafe { $load(ptr) })
                }
                #[inline(always)]
                unsafe fn load_first(ptr: *const $t, n: usize) -> Self {
                    let mut lanes = [0.0; $lanes];
                    for (i, lane) in lanes.iter_mut().enumerate().take(n) {
                        // SAFETY: the caller promises `n` readable elements.
                        *lane = unsafe { *ptr.add(i) };
                    }
                    // SAFETY: the array has `LANES` elements.
                    unsafe { Self::load(lanes.as_ptr()) }
                }
                #[inline(always)]
                unsafe fn store(self, ptr: *mut $t) {
                    // SAFETY: the caller has AVX2 and `LANES` writable elements.
                    unsafe { $store(ptr, self.0) }
                }
                #[inline(always)]
                unsafe fn store_first(self, ptr: *mut $t, n: usize) {
                    let mut lanes = [0.0; $lanes];
                    // SAFETY: the array has `LANES` elements.
                    unsafe { self.store(lanes.as_mut_ptr()) };
                    for (i, &lane) in lanes.iter().enumerate().take(n) {
                        // SAFETY: the caller promises `n` writable elements.
                        unsafe { *ptr.add(i) = lane }
                    }
                }
                #[inline(always)]
                unsafe fn mul_add(a: Self, b: Self, c: Self) -> Self {
                    // SAFETY: the caller has FMA.
                    Self(unsafe { $fma(a.0, b.0, c.0) })
                }
                #[inline(always)]
                unsafe fn mul(self, other: Self) -> Self {
                    // SAFETY: the caller has AVX2.
                    Self(unsafe { $mul(self.0, other.0) })
                }
            }
        };
    }
    avx2!(
        F32x8,
        f32,
        8,
        _mm256_setzero_ps,
        _mm256_set1_ps,
        _mm256_loadu_ps,
        _mm256_storeu_ps,
        _mm256_fmadd_ps,
        _mm256_mul_ps
    );
    avx2!(
        F64x4,
        f64,
        4,
        _mm256_setzero_pd,
        _mm256_set1_pd,
        _mm256_loadu_pd,
        _mm256_storeu_pd,
        _mm256_fmadd_pd,
        _mm256_mul_pd
    );

    macro_rules! avx512 {
        ($v:ident, $t:ty, $lanes:literal, $mask:ty, $zero:ident, $set1:ident, $load:ident,
         $mload:ident, $store:ident, $mstore:ident, $fma:ident, $mul:ident) => {
            impl Simd for $v {
                type Elem = $t;
                const LANES: usize = $lanes;

                #[inline(always)]
                unsafe fn zero() -> Self {
                    // SAFETY: the caller has AVX-512 F.
                    Self(unsafe { $zero() })
                }
                #[inline(always)]
                unsafe fn splat(ptr: *const $t) -> Self {
                    // SAFETY: the caller has AVX-512 F and one readable element.
                    Self(unsafe { $set1(*ptr) })
                }
                #[inline(always)]
                unsafe fn load(ptr: *const $t) -> Self {
                    // SAFETY: the caller has AVX-512 F and `LANES` readable elements.
                    Self(unsafe { $load(ptr) })
                }
                #[inline(always)]
                unsafe fn load_first(ptr: *const $t, n: usize) -> Self {
                    let mask = ((1u32 << n) - 1) as $mask;
                    // SAFETY: the caller has AVX-512 F; lanes outside the mask are not read.
                    Self(unsafe { $mload(mask, ptr) })
                }
                #[inline(always)]
                unsafe fn store(self, ptr: *mut $t) {
                    // SAFETY: the caller has AVX-512 F and `LANES` writable elements.
                    unsafe { $store(ptr, self.0) }
                }
                #[inline(always)]
                unsafe fn store_first(self, ptr: *mut $t, n: usize) {
                    let mask = ((1u32 << n) - 1) as $mask;
                    // SAFETY: the caller has AVX-512 F; lanes outside the mask are not written.
                    unsafe { $mstore(ptr, mask, self.0) }
                }
                #[inline(always)]
                unsafe fn mul_add(a: Self, b: Self, c: Self) -> Self {
                    // SAFETY: the caller has AVX-512 F.
                    Self(unsafe { $fma(a.0, b.0, c.0) })
                }
                #[inline(always)]
                unsafe fn mul(self, other: Self) -> Self {
                    // SAFETY: the caller has AVX-512 F.
                    Self(unsafe { $mul(self.0, other.0) })
                }
            }
        };
    }
    avx512!(
        F32x16,
        f32,
        16,
        __mmask16,
        _mm512_setzero_ps,
        _mm512_set1_ps,
        _mm512_loadu_ps,
        _mm512_maskz_loadu_ps,
        _mm512_storeu_ps,
        _mm512_mask_storeu_ps,
        _mm512_fmadd_ps,
        _mm512_mul_ps
    );
    avx512!(
        F64x8,
        f64,
        8,
        __mmask8,
        _mm512_setzero_pd,
        _mm512_set1_pd,
        _mm512_loadu_pd,
        _mm512_maskz_loadu_pd,
        _mm512_storeu_pd,
        _mm512_mask_storeu_pd,
        _mm512_fmadd_pd,
        _mm512_mul_pd
    );

    /// Transposes blocks of 8 by 8, side by side at `src`, below each other at `dst`.
    ///
    /// # Safety
    /// Needs AVX2; `src` must be valid for eight rows of `8 * n_blocks`, `dst` for as many rows
    /// of eight.
    #[target_feature(enable = "avx2")]
    pub(crate) unsafe fn turn_f32(src: *const f32, ld_src: usize, n_blocks: usize, dst: *mut f32, ld_dst: usize) {
        for block in 0..n_blocks {
            // SAFETY: inside the rows the caller guarantees.
            let row = |i: usize| unsafe { src.add(i * ld_src + 8 * block) };
            // Rows i and i + 4 share a register, so that no step crosses its halves.
            let pair = |i: usize, j: usize| {
                // SAFETY: four elements from a row of eight.
                unsafe {
                    let low = _mm256_castps128_ps256(_mm_loadu_ps(row(i).add(j)));
                    _mm256_insertf128_ps::<1>(low, _mm_loadu_ps(row(i + 4).add(j)))
                }
            };
            for j in [0, 4] {
                let (a, b, c, d) = (pair(0, j), pair(1, j), pair(2, j), pair(3, j));
                let (ab_low, ab_high) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
                let (cd_low, cd_high) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
                let columns = [
                    _mm256_shuffle_ps::<0x44>(ab_low, cd_low),
                    _mm256_shuffle_ps::<0xee>(ab_low, cd_low),
                    _mm256_shuffle_ps::<0x44>(ab_high, cd_high),
                    _mm256_shuffle_ps::<0xee>(ab_high, cd_high),
                ];
                for (c, column) in columns.into_iter().enumerate() {
                    // SAFETY: eight elements of a row the caller guarantees.
                    unsafe { _mm256_storeu_ps(dst.add((8 * block + j + c) * ld_dst), column) };
                }
            }
        }
    }
}
