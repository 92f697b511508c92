//! Marks work on one thread whose messages are flushed together at its end, by the code that opened the batch.

use std::cell::Cell;
use std::marker::PhantomData;

thread_local! {
    static N_OPEN: Cell<usize> = const { Cell::new(0) };
}

/// An open batch; it ends when this is dropped, on the thread that opened it.
pub(crate) struct Batch(PhantomData<*const ()>);

impl Batch {
    pub fn open() -> Batch {
        N_OPEN.set(N_OPEN.get() + 1);
        Batch(PhantomData)
    }

    /// Whether messages that are deferred on this thread will be flushed at the end of a batch.
    pub fn is_open() -> bool {
        N_OPEN.get() > 0
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        N_OPEN.set(N_OPEN.get() - 1);
    }
}
