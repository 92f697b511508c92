//! Moving tensors between devices and tasks, and where the workers of a cluster meet.

use crate::Op;

mod alarm;
pub mod barrier;
pub mod gradient_store;
pub mod staleness;
pub mod transfer;

/// The ops of this area.
pub static OPS: &[&Op] = &[
    &barrier::KOLO_BARRIER,
    &barrier::KOLO_BARRIER_ARRIVE,
    &barrier::KOLO_BARRIER_CLOSE,
    &barrier::KOLO_BARRIER_LEAVE,
    &barrier::KOLO_BARRIER_RELEASE,
    &barrier::KOLO_BARRIER_STATE,
    &barrier::KOLO_BARRIER_WAIT,
    &gradient_store::KOLO_GRADIENT_PUSH,
    &gradient_store::KOLO_GRADIENT_PUSH_ROWS,
    &gradient_store::KOLO_GRADIENT_STORE,
    &gradient_store::KOLO_GRADIENT_TAKE,
    &gradient_store::KOLO_GRADIENT_TAKE_ROWS,
    &staleness::KOLO_STALENESS,
    &staleness::KOLO_STALENESS_LEAVE,
    &staleness::KOLO_STALENESS_RECORD,
    &staleness::KOLO_STALENESS_STATE,
    &staleness::KOLO_STALENESS_WAIT,
    &transfer::HOST_RECV,
    &transfer::HOST_SEND,
    &transfer::RECV,
    &transfer::SEND,
];
