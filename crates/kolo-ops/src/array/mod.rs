//! Making, reshaping and taking apart tensors.

use crate::Op;

pub mod constant;
pub mod identity;
pub mod placeholder;
pub mod shape;

/// The ops of this area.
pub static OPS: &[&Op] = &[
    &constant::CONST,
    &identity::IDENTITY,
    &identity::STOP_GRADIENT,
    &placeholder::PLACEHOLDER,
    &placeholder::PLACEHOLDER_WITH_DEFAULT,
    &shape::SHAPE,
];
