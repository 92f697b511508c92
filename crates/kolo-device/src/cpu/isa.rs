//! Which instruction set the loops of this crate run on.

use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

/// An instruction set this crate has loops for, from the least to the best.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Whatever the build targets.
    Portable,
    /// AVX2, FMA, BMI and F16C.
    Avx2,
    /// The same and AVX-512 F, BW, DQ and VL.
    Avx512,
}

impl Isa {
    /// The best one this machine has.
    #[must_use]
    #[inline]
    pub fn best() -> Isa {
        // Kernels call this every time; the result never changes, so a race only detects it twice.
        static FOUND: AtomicU8 = AtomicU8::new(0);
        match FOUND.load(Relaxed) {
            1 => Isa::Portable,
            2 => Isa::Avx2,
            3 => Isa::Avx512,
            _ => {
                let isa = Isa::detect();
                FOUND.store(isa as u8 + 1, Relaxed);
                isa
            }
        }
    }

    #[cold]
    fn detect() -> Isa {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            let avx2 = has!("avx2") && has!("fma") && has!("bmi1") && has!("bmi2") && has!("f16c");
            if has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl") && avx2 {
                return Isa::Avx512;
            }
            if avx2 {
                return Isa::Avx2;
            }
        }
        Isa::Portable
    }

    /// All that this machine has, for tests and benchmarks.
    #[must_use]
    pub fn present() -> Vec<Isa> {
        let all = [Isa::Portable, Isa::Avx2, Isa::Avx512];
        all.into_iter().filter(|&isa| isa <= Isa::best()).collect()
    }
}

/// Runs `f` compiled for the best instruction set of this machine, so that plain loops in it use
/// wide vectors although the build targets an older chip.
///
/// What `f` does must be inlined into it: mark the closure and the functions it calls
/// `#[inline(always)]`, and prefer `for` to iterator adapters with closures, which are compiled
/// separately (a `mul_add` in such a closure becomes a function call). Loops vectorise when they run
/// over slices of equal length known before the loop (re-slice to one `n` first), and have no calls,
/// no early exit and no bounds checks left.
/// `a * b + c` stays two roundings; write `a.mul_add(b, c)` for one (slow on [`Isa::Portable`]).
///
/// ```
/// use kolo_device::cpu::vectorize;
///
/// fn axpy(a: f32, x: &[f32], y: &mut [f32]) {
///     vectorize(#[inline(always)] || {
///         for (y, &x) in y.iter_mut().zip(x) {
///             *y += a * x;
///         }
///     });
/// }
/// let mut y = vec![1.0; 100];
/// axpy(2.0, &vec![3.0; 100], &mut y);
/// assert_eq!(y, vec![7.0; 100]);
/// ```
#[inline]
pub fn vectorize<R>(f: impl FnOnce() -> R) -> R {
    vectorize_on(Isa::best(), f)
}

/// [`vectorize`] with vectors of at most 256 bits, for loops whose compile time and size should stay small.
#[inline]
pub fn vectorize_256<R>(f: impl FnOnce() -> R) -> R {
    match Isa::best() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `best` found the features; those of AVX-512 include them.
        Isa::Avx2 | Isa::Avx512 => unsafe { with_avx2(f) },
        _ => f(),
    }
}

/// [`vectorize`] for a given instruction set, or the best one present if that one is not.
#[inline]
pub fn vectorize_on<R>(isa: Isa, f: impl FnOnce() -> R) -> R {
    match isa.min(Isa::best()) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `best` found the features.
        Isa::Avx512 => unsafe { with_avx512(f) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `best` found the features.
        Isa::Avx2 => unsafe { with_avx2(f) },
        _ => f(),
    }
}

/// Runs `f` with AVX2 where the caller has found it: nothing else is compiled.
///
/// # Panics
/// If this machine has no AVX2.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(crate) fn on_avx2<R>(f: impl FnOnce() -> R) -> R {
    assert!(Isa::best() >= Isa::Avx2);
    // SAFETY: `best` found the features.
    unsafe { with_avx2(f) }
}

/// The same for AVX-512.
///
/// # Panics
/// If this machine has no AVX-512.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(crate) fn on_avx512<R>(f: impl FnOnce() -> R) -> R {
    assert!(Isa::best() == Isa::Avx512);
    // SAFETY: `best` found the features.
    unsafe { with_avx512(f) }
}

/// # Safety
/// Needs AVX2 and FMA.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,bmi1,bmi2,f16c")]
unsafe fn with_avx2<R>(f: impl FnOnce() -> R) -> R {
    f()
}

/// # Safety
/// Needs AVX-512 F, BW, DQ and VL.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi1,bmi2,f16c")]
unsafe fn with_avx512<R>(f: impl FnOnce() -> R) -> R {
    f()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_is_present() {
        assert_eq!(Isa::present().last(), Some(&Isa::best()));
        assert_eq!(Isa::present().first(), Some(&Isa::Portable));
    }
}
