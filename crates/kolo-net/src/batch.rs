//! Marks a stretch of work on one thread whose messages go out together at its end, by whoever opened it.

use std::cell::Cell;
use std::marker::PhantomData;

thread_local! {
    static N_OPEN: Cell<usize> = const { Cell::new(0) };
}

/// A stretch of work; it ends when this is dropped, on the thread that opened it.
pub(crate) struct Batch(PhantomData<*const ()>);

impl Batch {
    pub fn open() -> Batch {
        N_OPEN.set(N_OPEN.get() + 1);
        Batch(PhantomData)
    }

    /// Whether somebody will send what is left lying on this thread.
    pub fn is_open() -> bool {
        N_OPEN.get() > 0
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        N_OPEN.set(N_OPEN.get() - 1);
    }
}
