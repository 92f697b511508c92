//! Collectives: what the ranks of a group compute together, such as the sum of their gradients.
//!
//! [`Communicator`] has them as plain calls on tensors, which return when they are done. [`Group`] runs the same calls on a thread
//! of its own, one after the other, while the caller goes on; the nodes of a graph reach it by its name
//! ([`crate::SessionConfig::groups`]), so a group outlives steps and sessions.
//!
//! Before any data of a call is used, every rank compares what all others call: the how manieth call it is, what is done, dtype,
//! shapes and name. A difference ends the group with an error on every rank that shows both.

mod communicator;
mod group;
mod signature;
mod vector;

pub use communicator::{Communicator, CommunicatorOptions};
pub use group::Group;
pub use kolo_device::cpu::reduce::ReduceOp;
pub use kolo_ops::collective::{CollectiveCall, CollectiveDone, CollectiveGroup, CollectiveKind, Groups, Root};
