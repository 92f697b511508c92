//! Queues and accumulators: where steps of one or many sessions meet.
//!
//! Whoever has to wait leaves a [`crate::Done`] and holds no thread. Locks are never held while one is called.
//!
//! ```text
//! wait.rs      one who waits, and how a cancelled step is told
//! spec.rs      what a queue is, and what fits into it
//! core.rs      the queue itself: elements, and two lists of those who wait
//! elements.rs  what a queue holds and in which order it comes out; batches of it
//! source.rs    kernels that give out handles to shared or private objects
//! make.rs      FIFOQueue, RandomShuffleQueue, PaddingFIFOQueue, PriorityQueue
//! access.rs    QueueEnqueue, QueueDequeue, … in both handle kinds
//! builder.rs   what users call
//! stage.rs     Stage, Unstage: a store between steps
//! accumulator.rs  dense.rs  sparse.rs   gradients that are summed up until there are enough
//! ```

use crate::Op;

pub mod access;
pub mod accumulator;
mod builder;
mod core;
pub mod dense;
mod elements;
pub mod fake;
#[cfg(test)]
mod held_tests;
pub mod make;
pub(crate) mod source;
pub mod sparse;
mod spec;
pub mod stage;
pub(crate) mod wait;

pub use builder::{FifoQueue, QueueHandle, QueueKind};
pub use core::Queue;
pub use dense::ConditionalAccumulator;
pub use elements::Order;
pub use sparse::SparseConditionalAccumulator;
pub use spec::{Amount, QueueSpec};

/// The ops of this area.
pub static OPS: &[&Op] = &[
    &access::QUEUE_CLOSE,
    &access::QUEUE_CLOSE_V2,
    &access::QUEUE_DEQUEUE,
    &access::QUEUE_DEQUEUE_MANY,
    &access::QUEUE_DEQUEUE_MANY_V2,
    &access::QUEUE_DEQUEUE_UP_TO,
    &access::QUEUE_DEQUEUE_UP_TO_V2,
    &access::QUEUE_DEQUEUE_V2,
    &access::QUEUE_ENQUEUE,
    &access::QUEUE_ENQUEUE_MANY,
    &access::QUEUE_ENQUEUE_MANY_V2,
    &access::QUEUE_ENQUEUE_V2,
    &access::QUEUE_IS_CLOSED,
    &access::QUEUE_IS_CLOSED_V2,
    &access::QUEUE_SIZE,
    &access::QUEUE_SIZE_V2,
    &accumulator::ACCUMULATOR_NUM_ACCUMULATED,
    &accumulator::ACCUMULATOR_SET_GLOBAL_STEP,
    &accumulator::RESOURCE_ACCUMULATOR_NUM_ACCUMULATED,
    &accumulator::RESOURCE_ACCUMULATOR_SET_GLOBAL_STEP,
    &dense::ACCUMULATOR_APPLY_GRADIENT,
    &dense::ACCUMULATOR_TAKE_GRADIENT,
    &dense::CONDITIONAL_ACCUMULATOR,
    &dense::RESOURCE_ACCUMULATOR_APPLY_GRADIENT,
    &dense::RESOURCE_ACCUMULATOR_TAKE_GRADIENT,
    &dense::RESOURCE_CONDITIONAL_ACCUMULATOR,
    &fake::FAKE_QUEUE,
    &make::FIFO_QUEUE,
    &make::FIFO_QUEUE_V2,
    &make::PADDING_FIFO_QUEUE,
    &make::PADDING_FIFO_QUEUE_V2,
    &make::PRIORITY_QUEUE,
    &make::PRIORITY_QUEUE_V2,
    &make::RANDOM_SHUFFLE_QUEUE,
    &make::RANDOM_SHUFFLE_QUEUE_V2,
    &sparse::SPARSE_ACCUMULATOR_APPLY_GRADIENT,
    &sparse::SPARSE_ACCUMULATOR_TAKE_GRADIENT,
    &sparse::SPARSE_CONDITIONAL_ACCUMULATOR,
    &stage::STAGE,
    &stage::STAGE_CLEAR,
    &stage::STAGE_SIZE,
    &stage::UNSTAGE,
];
