//! Stores that go past the caches.
//!
//! A line that is written in full need not be read first, but an ordinary store reads it all the same. For a result that is too
//! large to stay in a cache until somebody needs it, that is a third of all that moves. Whoever makes such a result makes it
//! piece by piece in a small buffer, which is then stored past the caches.

use std::sync::OnceLock;

/// Whether a result of `n_bytes` should go past the caches: nothing of it would be left there when it is complete.
pub fn is_streamed(n_bytes: usize) -> bool {
    static LEAST: OnceLock<usize> = OnceLock::new();
    n_bytes >= *LEAST.get_or_init(|| last_cache().map_or(16 << 20, |size| (size / 2).clamp(4 << 20, 256 << 20)))
}

/// The size of the first core's last cache, where the system tells.
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

/// Copies `from` to `to`, past the caches. Others see it after [`fence`].
///
/// # Panics
/// If the slices differ in length.
pub fn stream<T: bytemuck::NoUninit>(to: &mut [T], from: &[T]) {
    assert_eq!(to.len(), from.len(), "one value for each place");
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
        const WIDTH: usize = size_of::<__m128i>();
        let size = size_of::<T>().max(1);
        // Stores of this kind need an alignment; what is before the first such place, and what is left, is copied.
        let before = to.as_ptr().cast::<u8>().align_offset(WIDTH);
        if before.is_multiple_of(size) && WIDTH.is_multiple_of(size) && before < size_of_val(to) {
            let n_before = before / size;
            let n_vectors = (size_of_val(to) - before) / WIDTH;
            let n_after = n_before + n_vectors * WIDTH / size;
            to[..n_before].copy_from_slice(&from[..n_before]);
            to[n_after..].copy_from_slice(&from[n_after..]);
            let (target, source) = (to[n_before..n_after].as_mut_ptr(), from[n_before..n_after].as_ptr());
            let (target, source) = (target.cast::<__m128i>(), source.cast::<__m128i>());
            for i in 0..n_vectors {
                // SAFETY: both ranges are `n_vectors` vectors long and of bytes that are all initialised; the target is aligned
                // to a vector, and the load needs no alignment. Every x86-64 processor has these instructions.
                unsafe { _mm_stream_si128(target.add(i), _mm_loadu_si128(source.add(i))) };
            }
            return;
        }
    }
    to.copy_from_slice(from);
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
    fn every_value_arrives_wherever_the_slices_begin() {
        let from: Vec<u8> = (0..200).collect();
        for start in 0..40 {
            for len in [0, 1, 7, 15, 16, 17, 31, 64, 100] {
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
    fn sizes_as_the_system_writes_them() {
        assert_eq!(parse_size("32768K"), Some(32 << 20));
        assert_eq!(parse_size("1M"), Some(1 << 20));
        assert_eq!(parse_size("512"), Some(512));
        assert_eq!((parse_size("K"), parse_size("1G2"), parse_size("")), (None, None, None));
        assert!(is_streamed(1 << 30) && !is_streamed(1 << 20));
    }
}
