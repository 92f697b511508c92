//! Aligned scratch memory, cached per thread between kernel calls.
//!
//! A kernel takes a buffer from its thread's cache and puts it back, so a training step calls the
//! allocator only for a shape larger than all before it. Buffers are freed when their thread ends.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::cell::RefCell;
use std::mem::size_of;

use super::pages::Pages;

/// Page alignment keeps packed panels from straddling pages and vectors from straddling lines.
const ALIGN: usize = 4096;

/// A block of uninitialised bytes, aligned to a page.
pub(crate) struct Scratch {
    ptr: *mut u8,
    n_bytes: usize,
    /// The mapping of a large block; a small one comes from the allocator.
    pages: Option<Pages>,
}

thread_local! {
    static FREE: RefCell<Vec<Scratch>> = const { RefCell::new(Vec::new()) };
}

impl Scratch {
    /// Room for `len` values of `T`, from this thread's cache if a buffer there is large enough.
    pub(crate) fn take<T>(len: usize) -> Scratch {
        let wanted = len.checked_mul(size_of::<T>()).expect("a scratch size fits in memory").max(ALIGN);
        let kept = FREE.with_borrow_mut(|free| {
            let best = (0..free.len()).filter(|&i| free[i].n_bytes >= wanted).min_by_key(|&i| free[i].n_bytes);
            // Replacing a buffer that is too small keeps the list short.
            match best {
                Some(i) => Some(free.swap_remove(i)),
                None => {
                    if free.len() >= 4 {
                        free.pop();
                    }
                    None
                }
            }
        });
        kept.unwrap_or_else(|| Scratch::allocate(wanted))
    }

    /// Returns the memory to this thread's cache.
    pub(crate) fn put_back(self) {
        // While the thread exits, the list may be dropped already: then the memory is freed.
        let mut this = Some(self);
        let _ = FREE.try_with(|free| free.borrow_mut().extend(this.take()));
    }

    /// The start of the buffer; its contents are arbitrary.
    pub(crate) fn as_ptr<T>(&self) -> *mut T {
        self.ptr.cast()
    }

    fn allocate(n_bytes: usize) -> Scratch {
        let n_bytes = n_bytes.next_multiple_of(ALIGN);
        // If mapping fails, the allocator may still have memory.
        if n_bytes >= Pages::LEAST
            && let Ok(mut pages) = Pages::new(n_bytes)
        {
            return Scratch { ptr: pages.bytes_mut().as_mut_ptr(), n_bytes, pages: Some(pages) };
        }
        let layout = Layout::from_size_align(n_bytes, ALIGN).expect("a scratch size fits in memory");
        // SAFETY: the size is at least one page, so not zero.
        let ptr = unsafe { alloc(layout) };
        if ptr.is_null() {
            handle_alloc_error(layout);
        }
        Scratch { ptr, n_bytes, pages: None }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if self.pages.is_some() {
            return;
        }
        // SAFETY: `allocate` obtained this block with the same size and alignment.
        unsafe { dealloc(self.ptr, Layout::from_size_align_unchecked(self.n_bytes, ALIGN)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_put_back_is_taken_again() {
        let first = Scratch::take::<f32>(10_000);
        let ptr = first.as_ptr::<f32>();
        assert_eq!(ptr as usize % ALIGN, 0);
        first.put_back();
        assert_eq!(Scratch::take::<f32>(9_000).as_ptr::<f32>(), ptr);
        let large = Scratch::take::<u8>(2 * Pages::LEAST);
        let ptr = large.as_ptr::<u8>();
        // SAFETY: the block has the requested length and no other owner.
        unsafe { ptr.add(2 * Pages::LEAST - 1).write(7) };
        large.put_back();
        assert_eq!(Scratch::take::<u8>(2 * Pages::LEAST).as_ptr::<u8>(), ptr);
    }
}
