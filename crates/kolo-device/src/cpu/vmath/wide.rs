//! Functions that gain by instructions of AVX-512 which no plain loop becomes: a division takes as long as ten
//! products, and a reciprocal of 14 bits with one of Newton's steps takes three.

use std::arch::x86_64::*;

use super::{ERF, Rational, TANH};

/// Elements of a vector.
const WIDTH: usize = 16;

macro_rules! loops {
    ($($name:ident |$x:ident| $value:expr;)*) => {$(
        /// The function of every element.
        ///
        /// # Safety
        /// The machine has AVX-512 F and DQ; `x` can be read and `out` be written for `n` elements. They may be the
        /// same, but must not overlap otherwise.
        #[target_feature(enable = "avx512f,avx512dq")]
        pub(super) unsafe fn $name(x: *const f32, out: *mut f32, n: usize) {
            let whole = n / WIDTH * WIDTH;
            for i in (0..whole).step_by(WIDTH) {
                // SAFETY: a whole vector is left from `i` on.
                unsafe {
                    let $x = _mm512_loadu_ps(x.add(i));
                    _mm512_storeu_ps(out.add(i), $value);
                }
            }
            if whole < n {
                let rest: __mmask16 = (1 << (n - whole)) - 1;
                // SAFETY: only the elements that are left are read and written.
                unsafe {
                    let $x = _mm512_maskz_loadu_ps(rest, x.add(whole));
                    _mm512_mask_storeu_ps(out.add(whole), rest, $value);
                }
            }
        }
    )*};
}

loops! {
    all_tanh |x| rational(&TANH, x);
    all_erf |x| rational(&ERF, x);
    all_rsqrt |x| rsqrt(x);
}

/// [`Rational::of`].
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn rational<const P: usize, const Q: usize>(f: &Rational<P, Q>, x: __m512) -> __m512 {
    let one = _mm512_set1_ps(1.0);
    let end = _mm512_set1_ps(f.end);
    let a = _mm512_abs_ps(x);
    // The second argument is the result if one is NaN.
    let c = _mm512_min_ps(end, a);
    let z = _mm512_mul_ps(c, c);
    let (mut p, mut q) = (_mm512_set1_ps(f.p[0]), _mm512_set1_ps(f.q[0]));
    for i in 1..P {
        p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(f.p[i]));
    }
    for i in 1..Q {
        q = _mm512_fmadd_ps(q, z, _mm512_set1_ps(f.q[i]));
    }
    let inverse = _mm512_rcp14_ps(q);
    let inverse = _mm512_fmadd_ps(inverse, _mm512_fnmadd_ps(q, inverse, one), inverse);
    let r = _mm512_mul_ps(_mm512_mul_ps(c, p), inverse);
    let r = _mm512_mask_mov_ps(_mm512_min_ps(one, r), _mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, end), one);
    _mm512_or_ps(r, _mm512_and_ps(x, _mm512_set1_ps(-0.0)))
}

/// One of Newton's steps from 14 bits. Where the first guess is the result, at 0 and infinity, it stays.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn rsqrt(x: __m512) -> __m512 {
    /// Both zeros and both infinities.
    const EXACT: i32 = 0x1e;
    let y = _mm512_rsqrt14_ps(x);
    let error = _mm512_fnmadd_ps(_mm512_mul_ps(x, y), y, _mm512_set1_ps(1.0));
    let half = _mm512_mul_ps(y, _mm512_set1_ps(0.5));
    let better = _mm512_fmadd_ps(half, error, y);
    _mm512_mask_mov_ps(better, _mm512_fpclass_ps_mask::<EXACT>(x), y)
}
