//! Which threads may wait for a part.

/// Proof that a thread may wait for a part of a step: it belongs to a device's pool, or to whoever called `Session::run`.
/// Network threads have none, so they can only try to take a part, or leave something to whoever holds it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MayWait(());

impl MayWait {
    /// For a job on a thread of a pool.
    pub(super) const fn of_a_pool() -> MayWait {
        MayWait(())
    }

    /// For the thread that wants a step's results, which waits for the step anyway.
    pub(super) const fn of_a_caller() -> MayWait {
        MayWait(())
    }
}
