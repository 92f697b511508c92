//! Control flow, and ops that are there for their effects on it.

use crate::Op;

pub mod no_op;

/// The ops of this area.
pub static OPS: &[&Op] = &[&no_op::NO_OP];
