//! The executor: dependency counting over a compiled plan.
//!
//! A [`PartPlan`](crate::compile::part::PartPlan) is one device's share of a signature: immutable, shared by all
//! steps. A step has one [`part_state::PartState`] per part: pending counts, buffered inputs, loop frames. A runner
//! is a thread in this loop: lock the state, take a ready node with its inputs, unlock, run the kernel, lock,
//! propagate the outputs. No lock is held while a kernel runs, a waiter is called, or a tensor is sent.
//!
//! The caller of `Session::run` is the first runner. Others join only when there is a second node worth a thread
//! ([`kolo_ops::Cost`]), so a chain of small nodes never leaves the caller's thread. Kernels that wait release their
//! thread and complete through a callback.
//!
//! Tiny nodes and control flow are run with the lock held. A runner therefore lets others take it after some tens of
//! them, and gives way to other steps that wait for a thread of the pool after a millisecond. Network threads start
//! steps, run small nodes, deliver values, stop steps and report on them. They never wait for a part: only a
//! [`MayWait`](may_wait::MayWait) lets a thread do that, and what they cannot do at once they leave as mail to whoever
//! holds the part (`step/part.rs`).
//!
//! | field | who may access it |
//! | --- | --- |
//! | `PartPlan` | everyone; it is immutable |
//! | `PartState`, the receiving end of its mail | the holder of the part's lock |
//! | a ready node's inputs | the runner that took the node |
//! | `Step::stopped` | set by the first failure; runners read it before each node |
//! | `Step::error` | set by the first failure; read when the step is over |
//!
//! Lock order: a runner holds at most one lock, a part's state, and takes no other while it does. Shutdown: the first
//! error sets the flag and the cancel token and aborts the rendezvous; runners drop the ready nodes; waiting kernels call back
//! with the reason; the step ends when nothing runs and nothing waits.

pub(crate) mod frame_id;
pub(crate) mod inter_pool;
pub(crate) mod may_wait;
pub(crate) mod part_state;
pub(crate) mod rendezvous;
pub(crate) mod step;
mod sync;
