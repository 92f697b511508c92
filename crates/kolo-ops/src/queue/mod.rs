//! Queues and accumulators: where steps of one or many sessions meet.
//!
//! Whoever has to wait leaves a [`crate::Done`] and holds no thread. Locks are never held while one is called.
//!
//! ```text
//! wait.rs      one who waits, and how a cancelled step is told
//! core.rs      the queue itself: elements, and two lists of those who wait
//! elements.rs  what a queue holds and in which order it comes out; batches of it
//! source.rs    kernels that give out handles to shared or private objects
//! make.rs      FIFOQueue, RandomShuffleQueue, PaddingFIFOQueue, PriorityQueue
//! access.rs    QueueEnqueue, QueueDequeue, … in both handle kinds
//! builder.rs   what users call
//! accumulator.rs  dense.rs  sparse.rs   gradients that are summed up until there are enough
//! ```

use crate::Op;

pub mod access;
mod builder;
mod core;
mod elements;
pub mod make;
mod source;
mod wait;

pub use builder::{FifoQueue, QueueHandle, QueueKind};
pub use core::{Amount, Queue, QueueSpec};
pub use elements::Order;

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
    &make::FIFO_QUEUE,
    &make::FIFO_QUEUE_V2,
    &make::PADDING_FIFO_QUEUE,
    &make::PADDING_FIFO_QUEUE_V2,
    &make::PRIORITY_QUEUE,
    &make::PRIORITY_QUEUE_V2,
    &make::RANDOM_SHUFFLE_QUEUE,
    &make::RANDOM_SHUFFLE_QUEUE_V2,
];
