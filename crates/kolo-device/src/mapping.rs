//! A mapped range of addresses.

use std::ptr::NonNull;

/// Mapped memory for reading and writing. Unmapped when dropped.
pub(crate) struct Mapping {
    start: NonNull<u8>,
    n_bytes: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread, and `&mut self` is needed to write to it.
unsafe impl Send for Mapping {}
// SAFETY: as above; through `&self` it is only read.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Takes ownership of `n_bytes` from `start` on.
    ///
    /// # Safety
    /// They must be mapped for reading and writing, initialised, page-aligned, and have no other owner in this process,
    /// up to the end of their last page.
    pub unsafe fn new(start: NonNull<u8>, n_bytes: usize) -> Mapping {
        Mapping { start, n_bytes }
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the caller of `new` guarantees `n_bytes` that live as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.n_bytes) }
    }

    /// Where it begins. What is written there must not be borrowed by others meanwhile.
    pub fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// The bytes, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; `&mut self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.n_bytes) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is ours up to the end of its last page, and no slice of it outlives `self`.
        let result = unsafe { libc::munmap(self.start.as_ptr().cast(), self.n_bytes) };
        debug_assert_eq!(result, 0, "a mapping of our own can be removed");
    }
}
