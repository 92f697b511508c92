//! Non-temporal stores, which bypass the caches.
//!
//! An ordinary store reads the cache line first, even if all of it is written. For a result that is too large to stay
//! in a cache until its next use, that is a third of the memory traffic. Such a result is computed block by block in a
//! small buffer, which is then written with non-temporal stores.

use std::sync::OnceLock;

use super::isa::Isa;

/// Whether a result of `n_bytes` should bypass the caches, being too large to stay in them.
pub fn is_streamed(n_bytes: usize) -> bool {
    static LEAST: OnceLock<usize> = OnceLock::new();
    n_bytes >= *LEAST.get_or_init(|| last_cache().map_or(16 << 20, |size| (size / 2).clamp(4 << 20, 256 << 20)))
}

/// The size of the first core's last-level cache, if the system reports it.
fn last_cache() -> Option<usize> {
    let read = |index: usize, what: &str| {
        let path = format!("/sys/devices/system/cpu/cpu0/cache/index{index}/{what}");
        std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
    };
    let sizes = (0..8).filter_map(|index| {
        let level: u32 = read(index, "level")?.parse().ok()?;
        Some((level, parse_size(&read(index, "size")?)?))
    });
    sizes.max().map(|(_, size)| size)
}

/// `32768K` in bytes.
fn parse_size(text: &str) -> Option<usize> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "" => 0,
        "K" => 10,
        "M" => 20,
        _ => return None,
    };
    digits.parse::<usize>().ok()?.checked_mul(1 << unit)
}

/// Bytes of a cache line, and of the widest store.
const LINE: usize = 64;

/// Copies `from` to `to`, bypassing the caches. Other threads see it after [`fence`].
///
/// # Panics
/// If the slices differ in length.
pub fn stream<T: bytemuck::NoUninit>(to: &mut [T], from: &[T]) {
    assert_eq!(to.len(), from.len(), "one value for each place");
    #[cfg(target_arch = "x86_64")]
    {
        let size = size_of::<T>().max(1);
        // Only whole lines are streamed: the bytes before the first and after the last are copied.
        let before = to.as_ptr().cast::<u8>().align_offset(LINE);
        if before.is_multiple_of(size) && LINE.is_multiple_of(size) && before < size_of_val(to) {
            let n_before = before / size;
            let n_lines = (size_of_val(to) - before) / LINE;
            let n_after = n_before + n_lines * LINE / size;
            to[..n_before].copy_from_slice(&from[..n_before]);
            to[n_after..].copy_from_slice(&from[n_after..]);
            let (target, source) = (to[n_before..n_after].as_mut_ptr(), from[n_before..n_after].as_ptr());
            // SAFETY: both ranges are `n_lines` lines long and of bytes that are all initialised; the target is aligned
            // to a line. The instruction set is the machine's.
            unsafe { stream_lines(Isa::best(), target.cast(), source.cast(), n_lines) };
            return;
        }
    }
    to.copy_from_slice(from);
}

/// Streams cache lines with the widest stores available. A line in one store needs no write combining: with concurrent
/// loads, four narrow stores per line take a third longer.
///
/// # Safety
/// Both are `n` lines long, `to` is aligned to a line, and the machine has `isa`.
#[cfg(target_arch = "x86_64")]
unsafe fn stream_lines(isa: Isa, to: *mut u8, from: *const u8, n: usize) {
    use std::arch::x86_64::*;
    #[target_feature(enable = "avx512f")]
    unsafe fn by_lines(to: *mut u8, from: *const u8, n: usize) {
        for at in (0..n * LINE).step_by(LINE) {
            // SAFETY: both are longer than `at`, by a line; the load needs no alignment.
            unsafe { _mm512_stream_si512(to.add(at).cast(), _mm512_loadu_si512(from.add(at).cast())) };
        }
    }
    #[target_feature(enable = "avx")]
    unsafe fn by_halves(to: *mut u8, from: *const u8, n: usize) {
        for at in (0..n * LINE).step_by(LINE / 2) {
            // SAFETY: both are longer than `at`, by half a line; the load needs no alignment.
            unsafe { _mm256_stream_si256(to.add(at).cast(), _mm256_loadu_si256(from.add(at).cast())) };
        }
    }
    match isa {
        // SAFETY: guaranteed by the caller.
        Isa::Avx512 => unsafe { by_lines(to, from, n) },
        // SAFETY: guaranteed by the caller.
        Isa::Avx2 => unsafe { by_halves(to, from, n) },
        Isa::Portable => {
            for at in (0..n * LINE).step_by(LINE / 4) {
                // SAFETY: both are longer than `at`, by a quarter of a line; the load needs no alignment. Every x86-64
                // processor has these instructions.
                unsafe { _mm_stream_si128(to.add(at).cast(), _mm_loadu_si128(from.add(at).cast())) };
            }
        }
    }
}

/// Whether [`stream_by`] can be used: where stores are as wide as a line.
pub fn can_stream_by() -> bool {
    Isa::best() == Isa::Avx512
}

/// Sets every element of `to`, bypassing the caches: `line` computes a cache line of elements from the given index on,
/// and `one` a single element, before the first whole line and after the last. Other threads see them after [`fence`].
///
/// Unlike [`stream`] this needs no buffer, which pays off with several large inputs: while a buffer is written, nothing
/// is loaded. A sum of two tensors of 64 MB takes a third less time, a sum of three two fifths.
///
/// # Panics
/// Where [`can_stream_by`] does not hold, or if `N` elements are not a line.
#[inline]
pub fn stream_by<T: bytemuck::NoUninit, const N: usize>(
    to: &mut [T],
    line: impl Fn(usize) -> [T; N],
    one: impl Fn(usize) -> T,
) {
    assert_eq!(N * size_of::<T>(), LINE, "whole lines");
    let before = to.as_ptr().cast::<u8>().align_offset(LINE);
    let n_before = if before.is_multiple_of(size_of::<T>()) { before / size_of::<T>() } else { to.len() };
    let (head, rest) = to.split_at_mut(n_before.min(to.len()));
    head.iter_mut().enumerate().for_each(|(i, y)| *y = one(i));
    let (lines, tail) = rest.as_chunks_mut::<N>();
    let n_lines = lines.len();
    #[cfg(target_arch = "x86_64")]
    super::isa::on_avx512(
        #[inline(always)]
        || {
            use std::arch::x86_64::{_mm512_loadu_si512, _mm512_stream_si512};
            for (i, place) in lines.iter_mut().enumerate() {
                let values = line(head.len() + i * N);
                // SAFETY: `place` is a line, aligned to one since `head` ends there; `values` are as many bytes, all of
                // them initialised. The machine has AVX-512.
                unsafe {
                    _mm512_stream_si512(place.as_mut_ptr().cast(), _mm512_loadu_si512(values.as_ptr().cast()));
                }
            }
        },
    );
    #[cfg(not(target_arch = "x86_64"))]
    lines.iter_mut().enumerate().for_each(|(i, place)| *place = line(head.len() + i * N));
    let first = head.len() + n_lines * N;
    tail.iter_mut().enumerate().for_each(|(i, y)| *y = one(first + i));
}

/// Prefetches lines that will be read soon, where the hardware cannot predict them. A wrong prediction is harmless.
#[inline(always)]
pub fn prefetch<T>(soon: &[T]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        let first = soon.as_ptr().cast::<i8>();
        for at in (0..size_of_val(soon)).step_by(LINE) {
            // SAFETY: the address lies in the slice, and nothing is read or written.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(first.add(at)) };
        }
    }
}

/// Makes what was streamed by this thread visible before anything that it does later.
pub fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has this instruction, and it touches no memory of its own.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_and_what_is_around_them_are_made_once_each() {
        if !can_stream_by() {
            println!("skipped: no stores as wide as a line");
            return;
        }
        for start in 0..20 {
            for len in [0, 1, 15, 16, 17, 40, 64, 100] {
                let mut to = vec![-1.0f32; 160];
                let line = |at: usize| std::array::from_fn::<f32, 16, _>(|i| (at + i) as f32);
                stream_by(&mut to[start..start + len], line, |i| i as f32);
                fence();
                let expected: Vec<f32> = (0..len).map(|i| i as f32).collect();
                assert_eq!(to[start..start + len], expected, "{start} {len}");
                assert!(to[..start].iter().chain(&to[start + len..]).all(|&x| x == -1.0), "{start} {len}");
            }
        }
    }

    #[test]
    fn every_value_arrives_wherever_the_slices_begin() {
        let from: Vec<u8> = (0..200).collect();
        for start in 0..40 {
            for len in [0, 1, 7, 15, 16, 17, 31, 64, 100, 160] {
                let mut to = [0xee; 200];
                stream(&mut to[start..start + len], &from[3..3 + len]);
                fence();
                assert_eq!(to[start..start + len], from[3..3 + len], "{start} {len}");
                assert!(to[..start].iter().chain(&to[start + len..]).all(|&x| x == 0xee), "{start} {len}");
            }
        }
        let wide: Vec<f64> = (0..33).map(f64::from).collect();
        let mut to = vec![0.0; 33];
        stream(&mut to, &wide);
        assert_eq!(to, wide);
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn every_width_of_store_copies_all_lines() {
        #[repr(align(64))]
        struct Lines([u8; 5 * LINE]);
        let from: Vec<u8> = (0..=255).cycle().take(4 * LINE + 1).collect();
        for isa in Isa::present() {
            let mut to = Lines([0xee; 5 * LINE]);
            // SAFETY: both have four lines, the target is aligned, and the instruction set is present.
            unsafe { stream_lines(isa, to.0.as_mut_ptr(), from[1..].as_ptr(), 4) };
            fence();
            assert_eq!(to.0[..4 * LINE], from[1..], "{isa:?}");
            assert!(to.0[4 * LINE..].iter().all(|&x| x == 0xee), "{isa:?}");
        }
        prefetch::<u64>(&[]);
        prefetch(&from[..100]);
    }

    #[test]
    fn sizes_as_the_system_writes_them() {
        assert_eq!(parse_size("32768K"), Some(32 << 20));
        assert_eq!(parse_size("1M"), Some(1 << 20));
        assert_eq!(parse_size("512"), Some(512));
        assert_eq!((parse_size("K"), parse_size("1G2"), parse_size("")), (None, None, None));
        assert!(is_streamed(1 << 30) && !is_streamed(1 << 20));
    }
}
