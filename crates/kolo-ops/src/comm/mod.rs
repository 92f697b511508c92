//! Moving tensors between devices and tasks.

use crate::Op;

pub mod transfer;

/// The ops of this area.
pub static OPS: &[&Op] = &[&transfer::HOST_RECV, &transfer::HOST_SEND, &transfer::RECV, &transfer::SEND];
