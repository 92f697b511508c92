//! Memory mapped from the system, in huge pages where available.
//!
//! A large tensor in pages of 4 KiB costs a page fault for each, and exceeds the TLB: an op that strides through it,
//! such as a transpose, then waits for page tables more than for data.

use std::io;
use std::ptr::NonNull;

use crate::mapping::Mapping;

/// The size of a huge page where they are most common. A wrong guess costs some address space and nothing else.
const HUGE: usize = 2 << 20;

/// A block of zeroed memory that begins at a huge page.
pub(crate) struct Pages(Mapping);

impl Pages {
    /// Smaller blocks are not worth a separate mapping.
    pub const LEAST: usize = 2 * HUGE;

    /// Maps memory from the system.
    pub fn new(n_bytes: usize) -> io::Result<Pages> {
        let reserved = n_bytes.checked_add(HUGE).filter(|_| n_bytes > 0).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: a new mapping at an address that the system chooses replaces nothing; `reserved` is not 0.
        let mapped = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                reserved,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if mapped == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let mapped = mapped.cast::<u8>();
        let before = mapped.align_offset(HUGE);
        let after = (reserved - before - n_bytes) / page_size() * page_size();
        // SAFETY: `before` is below `HUGE`, so the start, and `n_bytes` after it, lie in the mapping.
        let start = unsafe { mapped.add(before) };
        // SAFETY: both ranges are whole pages of the mapping that was just made, outside `start..start + n_bytes`, and
        // have no other owner. The advice changes how the range is backed and not its contents; a refusal changes
        // nothing.
        unsafe {
            if before > 0 {
                libc::munmap(mapped.cast(), before);
            }
            if after > 0 {
                libc::munmap(mapped.add(reserved - after).cast(), after);
            }
            #[cfg(target_os = "linux")]
            libc::madvise(start.cast(), n_bytes, libc::MADV_HUGEPAGE);
        }
        let start = NonNull::new(start).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: the rest of the mapping begins at `start`, zeroed by the system, and has no other owner.
        Ok(Pages(unsafe { Mapping::new(start, n_bytes) }))
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        self.0.bytes()
    }

    /// The bytes, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.0.bytes_mut()
    }
}

/// Advises the system to back a vector's spare capacity by huge pages, as far as it has whole ones. For tables with
/// random access: in small pages nearly every row would miss the TLB. Does nothing where there are no huge pages.
pub fn prefer_huge_pages(bytes: &mut Vec<u8>) {
    let room = bytes.spare_capacity_mut();
    let before = room.as_ptr().align_offset(HUGE);
    let n_bytes = room.len().saturating_sub(before) / HUGE * HUGE;
    if n_bytes > 0 {
        // SAFETY: the range is whole pages inside the vector's room, which is borrowed. The advice changes how it is
        // backed and not what it holds; a refusal changes nothing.
        #[cfg(target_os = "linux")]
        unsafe {
            libc::madvise(room.as_mut_ptr().add(before).cast(), n_bytes, libc::MADV_HUGEPAGE);
        }
    }
}

/// The system's own pages, which divide huge ones.
fn page_size() -> usize {
    // SAFETY: asks for a constant of the system.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).ok().filter(|size| HUGE.is_multiple_of(*size)).unwrap_or(HUGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_aligned_zeroed_and_writable_to_their_ends() {
        for n_bytes in [Pages::LEAST, Pages::LEAST + 64, 5 << 20, (7 << 20) + 4096 + 64] {
            let mut pages = Pages::new(n_bytes).unwrap();
            assert_eq!(pages.bytes().as_ptr() as usize % HUGE, 0);
            assert!(pages.bytes().len() == n_bytes && pages.bytes().iter().all(|&byte| byte == 0));
            pages.bytes_mut()[n_bytes - 1] = 7;
            pages.bytes_mut()[0] = 8;
            assert_eq!((pages.bytes()[0], pages.bytes()[n_bytes - 1]), (8, 7));
        }
    }

    #[test]
    fn a_vector_with_huge_pages_holds_what_is_put_into_it() {
        for n_bytes in [0, 100, HUGE, 3 * HUGE + 5] {
            let mut bytes = vec![3];
            bytes.reserve_exact(n_bytes);
            prefer_huge_pages(&mut bytes);
            bytes.resize(n_bytes + 1, 4);
            assert!(bytes[0] == 3 && bytes[1..].iter().all(|&byte| byte == 4));
        }
    }

    #[test]
    fn absurd_sizes_are_an_error() {
        assert!(Pages::new(0).is_err() && Pages::new(usize::MAX).is_err() && Pages::new(usize::MAX / 2).is_err());
    }
}
