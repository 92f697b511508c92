//! Kernels over rows of the last dimension, a block of threads for each row: what softmax, the cross entropies and the norms of
//! rows share.

use kolo_core::{DType, Result, Tensor, TensorData};
use kolo_device::cuda::Grid;

use super::c_type;

/// A source whose kernels may use the functions of `rows.cu`. Elements are `T`, labels `L`, and what is computed is of type `W`.
pub(crate) fn rows_source(kind: usize, dtype: DType, label: Option<DType>, text: &str) -> String {
    format!(
        "typedef {} T;\ntypedef {} L;\ntypedef Wide<T>::type W;\n#define KIND {kind}\n{}\n{text}",
        c_type(dtype),
        c_type(label.unwrap_or(DType::I64)),
        include_str!("rows.cu")
    )
}

/// A block for each row, of as many threads as a row keeps busy.
pub(crate) fn rows_grid(n_rows: usize, n: usize) -> Result<Grid> {
    let threads = match n {
        0..=128 => 32,
        129..=512 => 128,
        513..=4096 => 256,
        _ => 1024,
    };
    Grid::blocks(n_rows, threads)
}

/// How many numbers of a row can be read at once: 16 bytes of them, if all rows begin at such places.
pub(crate) fn row_width(tensors: &[&Tensor], n: usize) -> usize {
    let width = tensors.iter().map(|tensor| 16 / tensor.dtype().size().unwrap_or(16).max(1)).min().unwrap_or(1);
    let is_aligned = |tensor: &&Tensor| match tensor.storage() {
        TensorData::Buffer { offset, .. } => offset % 16 == 0,
        _ => false,
    };
    if n.is_multiple_of(width) && tensors.iter().all(is_aligned) { width } else { 1 }
}
