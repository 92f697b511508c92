//! The linear maps of Winograd's algorithm, in one dimension and on tiles.
//!
//! A short correlation is a product of polynomials: evaluate both factors at `N` points, multiply, interpolate. The
//! points are 0, infinity and pairs of opposite numbers: six with 5/8 and 3/2 for four results of three taps, three of
//! four or two of five, eight with 1/2, 1 and 2 for four results of five. Of all multiples of an eighth (a sixteenth
//! for eight points) these lose the fewest bits; the customary 0, ±1, ±2 lose twice as many. All constants of the maps
//! in `f32` are exact.

use std::ops::Range;

use crate::cpu::gemm::Simd;

/// The positive points where there are six, and where there are eight.
pub(super) const SIX: [f32; 2] = [0.625, 1.5];
pub(super) const EIGHT: [f32; 3] = [0.5, 1.0, 2.0];

/// `x` in every lane.
///
/// # Safety
/// Needs the instruction set of `V`, as all functions here.
#[inline(always)]
unsafe fn all<V: Simd<Elem = f32>>(x: f32) -> V {
    // SAFETY: one readable element.
    unsafe { V::splat(&raw const x) }
}

/// The values at `x` and at `-x` from an even part and an odd one, divided by `x`.
#[inline(always)]
unsafe fn opposite<V: Simd<Elem = f32>>(x: f32, even: V, odd: V) -> [V; 2] {
    // SAFETY: the caller has the instruction set.
    unsafe { [V::mul_add(all(x), odd, even), V::mul_add(all(-x), odd, even)] }
}

/// `a + x * (b + y * c)`, as `a + x * b + x * y * c` with exact factors.
#[inline(always)]
unsafe fn sum<V: Simd<Elem = f32>>(a: V, x: f32, b: V, y: f32, c: V) -> V {
    // SAFETY: the caller has the instruction set.
    unsafe { V::mul_add(all(x), b, V::mul_add(all(y), c, a)) }
}

/// What `N` neighbouring values of the data contribute at the points: the coefficients are those of the polynomial that
/// is zero at all other points.
#[inline(always)]
unsafe fn data<V: Simd<Elem = f32>, const N: usize>(d: [V; N]) -> [V; N] {
    let mut v = d;
    // SAFETY: the caller has the instruction set.
    unsafe {
        if N == 6 {
            let [a, b] = SIX;
            let (a2, b2) = (a * a, b * b);
            v[0] = sum(d[4], -(a2 + b2), d[2], a2 * b2, d[0]);
            [v[1], v[2]] = opposite(a, V::mul_add(all(-b2), d[2], d[4]), V::mul_add(all(-b2), d[1], d[3]));
            [v[3], v[4]] = opposite(b, V::mul_add(all(-a2), d[2], d[4]), V::mul_add(all(-a2), d[1], d[3]));
            v[5] = sum(d[5], -(a2 + b2), d[3], a2 * b2, d[1]);
        } else {
            let [a, b, c] = EIGHT;
            let (a2, b2, c2) = (a * a, b * b, c * c);
            let (once, twice, thrice) = (-(a2 + b2 + c2), a2 * b2 + a2 * c2 + b2 * c2, -a2 * b2 * c2);
            v[0] = V::mul_add(all(thrice), d[0], sum(d[6], once, d[4], twice, d[2]));
            for (i, [x, y, z]) in [[a, b2, c2], [b, a2, c2], [c, a2, b2]].into_iter().enumerate() {
                let even = sum(d[6], -(y + z), d[4], y * z, d[2]);
                let odd = sum(d[5], -(y + z), d[3], y * z, d[1]);
                [v[2 * i + 1], v[2 * i + 2]] = opposite(x, even, odd);
            }
            v[7] = V::mul_add(all(thrice), d[1], sum(d[7], once, d[5], twice, d[3]));
        }
    }
    v
}

/// The values of a polynomial with `M` coefficients, 2 to 4, at the points.
#[inline(always)]
unsafe fn values<V: Simd<Elem = f32>, const N: usize, const M: usize>(g: [V; M]) -> [V; N] {
    let mut v = [g[0]; N];
    v[N - 1] = g[M - 1];
    let points: &[f32] = if N == 6 { &SIX } else { &EIGHT };
    for (i, &x) in points.iter().enumerate() {
        // SAFETY: the caller has the instruction set.
        unsafe {
            let (mut even, mut odd) = (g[0], g[1]);
            if M > 2 {
                even = V::mul_add(all(x * x), g[2], even);
            }
            if M > 3 {
                odd = V::mul_add(all(x * x), g[3], odd);
            }
            [v[2 * i + 1], v[2 * i + 2]] = opposite(x, even, odd);
        }
    }
    v
}

/// `M` results, 3 or 4, from the products at the points; the transpose of [`values`].
#[inline(always)]
unsafe fn results<V: Simd<Elem = f32>, const N: usize, const M: usize>(p: [V; N]) -> [V; M] {
    // SAFETY: the caller has the instruction set.
    unsafe {
        let mut y = [V::zero(); M];
        (y[0], y[M - 1]) = (p[0], p[N - 1]);
        let points: &[f32] = if N == 6 { &SIX } else { &EIGHT };
        for (i, &x) in points.iter().enumerate() {
            let [even, odd] = opposite(1.0, p[2 * i + 1], p[2 * i + 2]);
            y[0] = V::mul_add(all(1.0), even, y[0]);
            y[1] = V::mul_add(all(x), odd, y[1]);
            y[2] = V::mul_add(all(x * x), even, y[2]);
            if M > 3 {
                y[3] = V::mul_add(all(x * x * x), odd, y[3]);
            }
        }
        y
    }
}

/// Reads a vector, or its first `n` values where it is not `FULL`.
///
/// # Safety
/// They must be readable.
#[inline(always)]
unsafe fn load<V: Simd<Elem = f32>, const FULL: bool>(from: *const f32, n: usize) -> V {
    // SAFETY: passed on.
    unsafe { if FULL { V::load(from) } else { V::load_first(from, n) } }
}

/// Transforms channels `channels` of a tile of the data, whose pixels are at `pixels`, to `to`, a plane per product.
///
/// # Safety
/// The pixels must have these channels; `to` must have room for them, rounded up to whole vectors, in each plane.
#[inline(always)]
pub(super) unsafe fn data_tile<V: Simd<Elem = f32>, const N: usize>(
    pixels: &[[*const f32; N]; N],
    channels: Range<usize>,
    to: *mut f32,
    plane: usize,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        tile(
            pixels,
            channels,
            to,
            plane,
            #[inline(always)]
            |x| data::<V, N>(x),
        )
    };
}

/// As [`data_tile`], of the gradients of `M`×`M` results.
///
/// # Safety
/// As there.
#[inline(always)]
pub(super) unsafe fn values_tile<V: Simd<Elem = f32>, const N: usize, const M: usize>(
    pixels: &[[*const f32; M]; M],
    channels: Range<usize>,
    to: *mut f32,
    plane: usize,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        tile(
            pixels,
            channels,
            to,
            plane,
            #[inline(always)]
            |x| values::<V, N, M>(x),
        )
    };
}

/// Applies `line`, a transform of one dimension, to both dimensions of a tile.
///
/// # Safety
/// As for [`data_tile`].
#[inline(always)]
unsafe fn tile<V: Simd<Elem = f32>, const N: usize, const M: usize>(
    pixels: &[[*const f32; M]; M],
    channels: Range<usize>,
    to: *mut f32,
    plane: usize,
    line: impl Fn([V; M]) -> [V; N] + Copy,
) {
    let mut c = channels.start;
    // SAFETY: guaranteed by the caller.
    unsafe {
        while c + V::LANES <= channels.end {
            vector::<V, N, M, true>(pixels, c, V::LANES, to.add(c - channels.start), plane, line);
            c += V::LANES;
        }
        if c < channels.end {
            vector::<V, N, M, false>(pixels, c, channels.end - c, to.add(c - channels.start), plane, line);
        }
    }
}

/// `n` channels from `c` on.
///
/// # Safety
/// As for [`data_tile`].
#[inline(always)]
unsafe fn vector<V: Simd<Elem = f32>, const N: usize, const M: usize, const FULL: bool>(
    pixels: &[[*const f32; M]; M],
    c: usize,
    n: usize,
    to: *mut f32,
    plane: usize,
    line: impl Fn([V; M]) -> [V; N] + Copy,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut rows = [[V::zero(); N]; M];
        for (row, pixels) in rows.iter_mut().zip(pixels) {
            let mut x = [V::zero(); M];
            for (x, pixel) in x.iter_mut().zip(pixels) {
                *x = load::<V, FULL>(pixel.add(c), n);
            }
            *row = line(x);
        }
        for j in 0..N {
            let mut x = [V::zero(); M];
            for (x, row) in x.iter_mut().zip(&rows) {
                *x = row[j];
            }
            for (i, x) in line(x).into_iter().enumerate() {
                x.store(to.add((i * N + j) * plane));
            }
        }
    }
}

/// Where the results of a tile go, and how many of them there are.
pub(super) struct Results {
    pub start: *mut f32,
    /// Values between lines of pixels, and between pixels.
    pub line: usize,
    pub pixel: usize,
    /// Lines and pixels that are in the image.
    pub size: [usize; 2],
    pub channels: usize,
}

/// The `M`×`M` results of a tile's products at `from`. Returns whether all of them are finite.
///
/// # Safety
/// The planes must have the channels; the results must be writable.
#[inline(always)]
pub(super) unsafe fn results_tile<V: Simd<Elem = f32>, const N: usize, const M: usize>(
    from: *const f32,
    plane: usize,
    to: &Results,
) -> bool {
    // SAFETY: guaranteed by the caller; a vector has at most sixteen lanes.
    unsafe {
        let mut check = V::zero();
        let mut c = 0;
        if to.size == [M, M] {
            while c + V::LANES <= to.channels {
                results_vector::<V, N, M, true>(from, plane, to, c, &mut check);
                c += V::LANES;
            }
        }
        while c < to.channels {
            results_vector::<V, N, M, false>(from, plane, to, c, &mut check);
            c += V::LANES;
        }
        let mut lanes = [0.0; 16];
        check.store(lanes.as_mut_ptr());
        lanes.iter().all(|x| !x.is_nan())
    }
}

/// Channels from `c` on: a vector in a tile that is all inside the image if this is `FULL`. Where a result is not
/// finite, `check` becomes NaN.
///
/// # Safety
/// As for [`results_tile`].
#[inline(always)]
unsafe fn results_vector<V: Simd<Elem = f32>, const N: usize, const M: usize, const FULL: bool>(
    from: *const f32,
    plane: usize,
    to: &Results,
    c: usize,
    check: &mut V,
) {
    let n = V::LANES.min(to.channels - c);
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut columns = [[V::zero(); M]; N];
        for (j, column) in columns.iter_mut().enumerate() {
            let p = from.add(c + j * plane);
            let mut products = [V::zero(); N];
            for (i, x) in products.iter_mut().enumerate() {
                let p = p.add(i * N * plane);
                *x = if FULL || n == V::LANES { V::load(p) } else { V::load_first(p, n) };
            }
            *column = results(products);
        }
        for i in 0..M {
            let mut products = [V::zero(); N];
            for (x, column) in products.iter_mut().zip(&columns) {
                *x = column[i];
            }
            let row: [V; M] = results(products);
            for (j, y) in row.into_iter().enumerate() {
                *check = V::mul_add(y, V::zero(), *check);
                let at = to.start.wrapping_add(i * to.line + j * to.pixel + c);
                if FULL {
                    y.store(at);
                } else if i < to.size[0] && j < to.size[1] {
                    if n == V::LANES { y.store(at) } else { y.store_first(at, n) }
                }
            }
        }
    }
}

/// Runs `$body` with `$v` and `$w` as the widest vectors of this machine, and the instructions for them. It is compiled
/// once for each kind of vectors, not for each kind of vectors and instructions.
macro_rules! with_vectors {
    (($v:ident, $w:ident) => $body:expr) => {
        match $crate::cpu::Isa::best() {
            #[cfg(target_arch = "x86_64")]
            $crate::cpu::Isa::Avx512 => $crate::cpu::isa::on_avx512(
                #[inline(always)]
                || with_vectors!(@ $v, $w, $crate::cpu::gemm::F32x16, $crate::cpu::gemm::F64x8, $body),
            ),
            #[cfg(target_arch = "x86_64")]
            $crate::cpu::Isa::Avx2 => $crate::cpu::isa::on_avx2(
                #[inline(always)]
                || with_vectors!(@ $v, $w, $crate::cpu::gemm::F32x8, $crate::cpu::gemm::F64x4, $body),
            ),
            _ => {
                use $crate::cpu::gemm::Portable;
                with_vectors!(@ $v, $w, Portable<f32, 4>, Portable<f64, 2>, $body)
            }
        }
    };
    (@ $v:ident, $w:ident, $floats:ty, $doubles:ty, $body:expr) => {{
        #[allow(dead_code, reason = "most loops need one of the two")]
        type $v = $floats;
        #[allow(dead_code, reason = "most loops need one of the two")]
        type $w = $doubles;
        $body
    }};
}
pub(super) use with_vectors;
