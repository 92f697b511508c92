//! Arithmetic: elementwise ops, matrix products, reductions.

use crate::Op;

pub mod binary;
pub mod elementwise;

/// The ops of this area.
pub static OPS: &[&Op] = &[
    &binary::ADD,
    &binary::ADD_V2,
    &binary::SUB,
    &binary::MUL,
    &binary::REAL_DIV,
    &binary::DIV,
    &binary::MAXIMUM,
    &binary::MINIMUM,
    &binary::SQUARED_DIFFERENCE,
];
