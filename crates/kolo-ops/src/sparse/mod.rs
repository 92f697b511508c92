//! Sparse tensors: the coordinates of the elements that are there, their values, and the shape of the whole.

use crate::Op;

pub mod fill_empty_rows;
pub mod matmul;
pub mod reorder;
pub mod to_dense;

/// The ops of this area.
pub static OPS: &[&Op] = &[
    &fill_empty_rows::SPARSE_FILL_EMPTY_ROWS,
    &fill_empty_rows::SPARSE_FILL_EMPTY_ROWS_GRAD,
    &matmul::SPARSE_TENSOR_DENSE_MATMUL,
    &reorder::SPARSE_REORDER,
    &to_dense::SPARSE_TO_DENSE,
];
