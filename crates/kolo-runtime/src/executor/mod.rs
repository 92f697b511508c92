//! The executor: dependency counting over a compiled plan.
//!
//! A [`PartPlan`](crate::compile::part::PartPlan) is one device's share of a signature: immutable, shared by all steps. A step holds one
//! [`part_state::PartState`] per part: pending counts, arrived inputs, loop frames. A runner is a thread that repeats: lock the
//! state, take a ready node with its inputs, unlock, run the kernel, lock, pass the outputs on. No lock is held while a
//! kernel runs, a waiter is called, or a tensor is sent.
//!
//! The caller of `Session::run` is the first runner. Others join only when there is a second node worth a thread
//! ([`kolo_ops::Cost`]), so a chain of small nodes never leaves the caller's thread. Kernels that wait give up the thread
//! and come back through a callback.
//!
//! | field | who may touch it, when |
//! | --- | --- |
//! | `PartPlan` | everyone; it does not change |
//! | `PartState` | the holder of the part's lock |
//! | a ready node's inputs | the runner that took the node |
//! | `Step::error` | whoever fails first; read when the step is over |
//!
//! Lock order: a part's state before nothing; a runner holds one lock at a time. Shutdown: the first error sets the
//! cancel token and aborts the rendezvous; runners drop what is ready; waiting kernels call back with the reason; the step
//! ends when nothing runs and nothing waits.

pub(crate) mod frame_id;
pub(crate) mod inter_pool;
pub(crate) mod part_state;
pub(crate) mod rendezvous;
pub(crate) mod step;
mod sync;
