//! Moving tensors between devices and tasks, and where the workers of a cluster meet.

use crate::Op;

mod alarm;
mod await_exchange;
mod barrier;
mod barrier_ops;
mod collective_ops;
mod device_collectives;
mod gradient_store;
pub(crate) mod meeting;
mod packed;
mod sign_exchange;
mod staleness;
mod top_k_exchange;
pub mod transfer;

/// The ops of this area.
pub static OPS: &[&Op] = &[
    &await_exchange::KOLO_AWAIT_EXCHANGE,
    &barrier_ops::KOLO_BARRIER,
    &barrier_ops::KOLO_BARRIER_ARRIVE,
    &barrier_ops::KOLO_BARRIER_CLOSE,
    &barrier_ops::KOLO_BARRIER_LEAVE,
    &barrier_ops::KOLO_BARRIER_RELEASE,
    &barrier_ops::KOLO_BARRIER_STATE,
    &barrier_ops::KOLO_BARRIER_WAIT,
    &collective_ops::KOLO_ALL_GATHER,
    &collective_ops::KOLO_ALL_GATHER_UNEVEN,
    &collective_ops::KOLO_ALL_REDUCE,
    &collective_ops::KOLO_ALL_TO_ALL,
    &collective_ops::KOLO_ALL_TO_ALL_UNEVEN,
    &collective_ops::KOLO_BROADCAST,
    &collective_ops::KOLO_GATHER,
    &collective_ops::KOLO_GATHER_UNEVEN,
    &collective_ops::KOLO_GROUP_BARRIER,
    &collective_ops::KOLO_REDUCE,
    &collective_ops::KOLO_REDUCE_SCATTER,
    &collective_ops::KOLO_SCATTER,
    &collective_ops::KOLO_SCATTER_UNEVEN,
    &collective_ops::KOLO_SEND_RECEIVE,
    &device_collectives::COLLECTIVE_BCAST_RECV,
    &device_collectives::COLLECTIVE_BCAST_RECV_V2,
    &device_collectives::COLLECTIVE_BCAST_SEND,
    &device_collectives::COLLECTIVE_BCAST_SEND_V2,
    &device_collectives::COLLECTIVE_GATHER,
    &device_collectives::COLLECTIVE_GATHER_V2,
    &device_collectives::COLLECTIVE_REDUCE,
    &device_collectives::COLLECTIVE_REDUCE_V2,
    &gradient_store::KOLO_GRADIENT_PUSH,
    &gradient_store::KOLO_GRADIENT_PUSH_ROWS,
    &gradient_store::KOLO_GRADIENT_STORE,
    &gradient_store::KOLO_GRADIENT_TAKE,
    &gradient_store::KOLO_GRADIENT_TAKE_ROWS,
    &sign_exchange::KOLO_PACK_SIGNS,
    &sign_exchange::KOLO_UNPACK_SIGNS,
    &staleness::KOLO_STALENESS,
    &staleness::KOLO_STALENESS_LEAVE,
    &staleness::KOLO_STALENESS_RECORD,
    &staleness::KOLO_STALENESS_STATE,
    &staleness::KOLO_STALENESS_WAIT,
    &top_k_exchange::KOLO_PACK_TOP_K,
    &top_k_exchange::KOLO_UNPACK_TOP_K,
    &transfer::HOST_RECV,
    &transfer::HOST_SEND,
    &transfer::RECV,
    &transfer::SEND,
];
