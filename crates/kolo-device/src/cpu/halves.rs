//! Halves (`f16`) as floats and back, many at a time.
//!
//! `half`'s own conversions detect the processor's features at every element.

use half::f16;

use super::Isa;

/// A half as a float, without branches, so that loops vectorise.
#[inline(always)]
#[must_use]
pub fn from_half(value: f16) -> f32 {
    const INFINITY: u32 = 0x7c00;
    let bits = u32::from(value.to_bits());
    let (sign, bits) = ((bits & 0x8000) << 16, bits & 0x7fff);
    // The exponent is 112 less than a float's; the product gets it right for small numbers, too.
    let number = f32::from_bits(bits << 13) * f32::from_bits((112 + 127) << 23);
    let special = if bits >= INFINITY { 0x7f80_0000 } else { 0 };
    let quiet = if bits > INFINITY { 0x0040_0000 } else { 0 };
    f32::from_bits(number.to_bits() | special | quiet | sign)
}

/// The nearest half, the even one of two, without branches.
#[inline(always)]
#[must_use]
pub fn to_half(value: f32) -> f16 {
    let bits = value.to_bits();
    let (sign, bits) = ((bits >> 16) & 0x8000, bits & 0x7fff_ffff);
    // Adding a half puts the last bit of a small number where rounding happens.
    let small = (f32::from_bits(bits) + 0.5).to_bits().wrapping_sub(0x3f00_0000);
    let normal = bits.wrapping_add(0xc800_0fff).wrapping_add((bits >> 13) & 1) >> 13;
    let nan = 0x7e00 | ((bits >> 13) & 0x03ff);
    let special = if bits > 0x7f80_0000 { nan } else { 0x7c00 };
    let rounded = if bits < 0x3880_0000 { small } else { normal };
    let rounded = if bits >= 0x4780_0000 { special } else { rounded };
    f16::from_bits((rounded | sign) as u16)
}

/// Halves as floats, as many as both have.
pub fn f16_to_f32(from: &[f16], to: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if Isa::best() >= Isa::Avx2 {
        // SAFETY: F16C is present.
        return unsafe { x86::f16_to_f32(from, to) };
    }
    to.iter_mut().zip(from).for_each(|(y, &x)| *y = from_half(x));
}

/// Floats as the nearest halves, as many as both have.
pub fn f32_to_f16(from: &[f32], to: &mut [f16]) {
    #[cfg(target_arch = "x86_64")]
    if Isa::best() >= Isa::Avx2 {
        // SAFETY: F16C is present.
        return unsafe { x86::f32_to_f16(from, to) };
    }
    to.iter_mut().zip(from).for_each(|(y, &x)| *y = to_half(x));
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use half::f16;

    use super::{from_half, to_half};

    /// # Safety
    /// Needs AVX and F16C.
    #[target_feature(enable = "avx,f16c")]
    pub(super) unsafe fn f16_to_f32(from: &[f16], to: &mut [f32]) {
        let n = from.len().min(to.len());
        let (from, from_rest) = from[..n].as_chunks::<8>();
        let (to, to_rest) = to[..n].as_chunks_mut::<8>();
        for (to, from) in to.iter_mut().zip(from) {
            // SAFETY: both have eight elements, at any alignment.
            unsafe { _mm256_storeu_ps(to.as_mut_ptr(), _mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().cast()))) };
        }
        to_rest.iter_mut().zip(from_rest).for_each(|(y, &x)| *y = from_half(x));
    }

    /// # Safety
    /// Needs AVX and F16C.
    #[target_feature(enable = "avx,f16c")]
    pub(super) unsafe fn f32_to_f16(from: &[f32], to: &mut [f16]) {
        let n = from.len().min(to.len());
        let (from, from_rest) = from[..n].as_chunks::<8>();
        let (to, to_rest) = to[..n].as_chunks_mut::<8>();
        for (to, from) in to.iter_mut().zip(from) {
            // SAFETY: both have eight elements, at any alignment.
            unsafe {
                let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(from.as_ptr()));
                _mm_storeu_si128(to.as_mut_ptr().cast(), halves);
            }
        }
        to_rest.iter_mut().zip(from_rest).for_each(|(y, &x)| *y = to_half(x));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_becomes_the_float_that_the_library_gives() {
        let halves: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
        let mut floats = vec![0.0f32; halves.len()];
        f16_to_f32(&halves, &mut floats);
        for (&half, &float) in halves.iter().zip(&floats) {
            let expected = half.to_f32().to_bits();
            assert_eq!(float.to_bits(), expected, "{:#06x}, by instructions", half.to_bits());
            assert_eq!(from_half(half).to_bits(), expected, "{:#06x}", half.to_bits());
        }
    }

    #[test]
    fn floats_become_the_half_that_the_library_gives() {
        // Steps that are not multiples of the rounding, then what is half way between two halves and a little beside
        // it.
        let mut floats: Vec<f32> = (0..=u32::MAX).step_by(3001).map(f32::from_bits).collect();
        for half in 0..=u16::MAX {
            let next = f16::from_bits(half ^ 1).to_f32();
            let middle = (f16::from_bits(half).to_f32() + next) / 2.0;
            floats.extend([middle, f32::from_bits(middle.to_bits().wrapping_add(1))]);
        }
        let mut halves = vec![f16::ZERO; floats.len()];
        f32_to_f16(&floats, &mut halves);
        for (&float, &half) in floats.iter().zip(&halves) {
            let expected = f16::from_f32(float).to_bits();
            assert_eq!(half.to_bits(), expected, "{float:e}, by instructions");
            assert_eq!(to_half(float).to_bits(), expected, "{float:e}");
        }
    }

    #[test]
    fn what_is_left_of_eight_is_converted_too() {
        for n in 0..20 {
            let halves: Vec<f16> = (0..n).map(|i| f16::from_f32(i as f32 + 0.5)).collect();
            let mut floats = vec![-1.0f32; n];
            f16_to_f32(&halves, &mut floats);
            assert!(floats.iter().enumerate().all(|(i, &x)| x == i as f32 + 0.5), "{n}: {floats:?}");
            let mut back = vec![f16::ZERO; n];
            f32_to_f16(&floats, &mut back);
            assert_eq!(back, halves);
        }
    }
}
