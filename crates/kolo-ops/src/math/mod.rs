//! Arithmetic: elementwise ops, matrix products, reductions.

use crate::Op;

pub mod add_n;
pub mod binary;
pub mod broadcast_gradient_args;
pub mod compare;
pub mod elementwise;
pub mod number;
pub mod reduce;
pub mod segment;
pub mod unary;

/// The ops of this area.
pub static OPS: &[&Op] = &[
    &add_n::ADD_N,
    &add_n::ACCUMULATE_N_V2,
    &binary::ADD,
    &binary::ADD_V2,
    &binary::SUB,
    &binary::MUL,
    &binary::REAL_DIV,
    &binary::DIV,
    &binary::MAXIMUM,
    &binary::MINIMUM,
    &binary::SQUARED_DIFFERENCE,
    &broadcast_gradient_args::BROADCAST_GRADIENT_ARGS,
    &compare::LESS,
    &compare::LESS_EQUAL,
    &compare::GREATER,
    &compare::GREATER_EQUAL,
    &compare::EQUAL,
    &compare::NOT_EQUAL,
    &reduce::sum::SUM,
    &reduce::sum::MEAN,
    &segment::unsorted::UNSORTED_SEGMENT_SUM,
    &unary::NEG,
];
