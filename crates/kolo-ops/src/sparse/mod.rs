//! Sparse tensors: the coordinates of the elements that are there, their values, and the shape of the whole.

use crate::Op;

pub mod concat;
pub mod cwise;
pub mod dense_add;
mod elements;
pub mod fill_empty_rows;
pub mod matmul;
pub mod reduce;
pub mod reorder;
pub mod reshape;
pub mod serialize;
pub mod sets;
pub mod tensors_map;
pub mod to_dense;

/// The ops of this area.
pub static OPS: &[&Op] = &[
    &concat::SPARSE_CONCAT,
    &concat::SPARSE_SLICE,
    &concat::SPARSE_SLICE_GRAD,
    &concat::SPARSE_SPLIT,
    &cwise::SPARSE_DENSE_CWISE_ADD,
    &cwise::SPARSE_DENSE_CWISE_DIV,
    &cwise::SPARSE_DENSE_CWISE_MUL,
    &cwise::SPARSE_SOFTMAX,
    &dense_add::SPARSE_TENSOR_DENSE_ADD,
    &fill_empty_rows::SPARSE_FILL_EMPTY_ROWS,
    &fill_empty_rows::SPARSE_FILL_EMPTY_ROWS_GRAD,
    &matmul::SPARSE_TENSOR_DENSE_MATMUL,
    &reduce::SPARSE_REDUCE_MAX,
    &reduce::SPARSE_REDUCE_SUM,
    &reorder::SPARSE_REORDER,
    &reshape::SPARSE_RESHAPE,
    &serialize::DESERIALIZE_MANY_SPARSE,
    &serialize::DESERIALIZE_SPARSE,
    &serialize::SERIALIZE_MANY_SPARSE,
    &serialize::SERIALIZE_SPARSE,
    &sets::DENSE_TO_DENSE_SET_OPERATION,
    &sets::DENSE_TO_SPARSE_SET_OPERATION,
    &sets::SET_SIZE,
    &sets::SPARSE_TO_SPARSE_SET_OPERATION,
    &tensors_map::ADD_MANY_SPARSE_TO_TENSORS_MAP,
    &tensors_map::ADD_SPARSE_TO_TENSORS_MAP,
    &tensors_map::TAKE_MANY_SPARSE_FROM_TENSORS_MAP,
    &to_dense::SPARSE_TO_DENSE,
];
