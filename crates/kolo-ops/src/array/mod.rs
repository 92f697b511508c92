//! Making, reshaping and taking apart tensors.

use crate::Op;

pub mod cast;
pub mod concat;
pub mod constant;
mod elements;
pub mod fill;
pub mod identity;
pub mod placeholder;
pub mod reshape;
pub mod shape;
pub mod slice;
pub mod split;
pub mod strided_slice;
mod view;

pub use elements::IntoInts;

/// The ops of this area.
pub static OPS: &[&Op] = &[
    &cast::CAST,
    &concat::CONCAT,
    &concat::CONCAT_OFFSET,
    &concat::CONCAT_V2,
    &concat::PACK,
    &constant::CONST,
    &fill::FILL,
    &fill::ONES_LIKE,
    &fill::ZEROS_LIKE,
    &identity::IDENTITY,
    &identity::STOP_GRADIENT,
    &placeholder::PLACEHOLDER,
    &placeholder::PLACEHOLDER_WITH_DEFAULT,
    &reshape::RESHAPE,
    &shape::RANK,
    &shape::SHAPE,
    &shape::SHAPE_N,
    &shape::SIZE,
    &slice::SLICE,
    &split::SPLIT,
    &split::SPLIT_V,
    &split::UNPACK,
    &strided_slice::STRIDED_SLICE,
    &strided_slice::STRIDED_SLICE_GRAD,
];
