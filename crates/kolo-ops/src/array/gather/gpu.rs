//! Rows picked by index, on a GPU.

use kolo_core::{DType, Error, Result, Shape, Tensor, TensorData};
use kolo_device::cuda::{Args, Grid, ProgramKey};
use kolo_graph::shape_fns::resolve_axis;

use crate::KernelCtx;
use crate::array::elements::product;
use crate::cuda::view::bytes_type;
use crate::cuda::{c_type, gpu};

/// Rows of input 0 along `axis` that input 1 names.
pub(crate) fn gather(ctx: &mut KernelCtx<'_>, axis: i64, batch_dims: i64) -> Result<()> {
    let (params, indices) = (ctx.input(0)?, ctx.input(1)?);
    let shape = params.shape();
    if shape.rank() == 0 {
        return Err(Error::invalid_argument("params must be at least 1 dimensional"));
    }
    let axis = resolve_axis(axis, shape.rank())?;
    let rank = indices.shape().rank() as i64;
    let batch = if batch_dims < 0 { batch_dims + rank } else { batch_dims };
    if batch < 0
        || batch > rank
        || batch as usize > axis
        || shape[..batch as usize] != indices.shape()[..batch as usize]
    {
        return Err(Error::invalid_argument(format!(
            "batch_dims {batch_dims} does not fit params {shape} and indices {}",
            indices.shape()
        )));
    }
    let batch = batch as usize;
    let dims = [&shape[..axis], &indices.shape()[batch..], &shape[axis + 1..]].concat();
    let (outer, n_axis) = (product(&shape[batch..axis]), shape[axis]);
    let (n_indices, inner) = (product(&indices.shape()[batch..]), product(&shape[axis + 1..]));
    let device = gpu(ctx)?;
    let dtype = params.dtype();
    let mut out = ctx.allocate(dtype, Shape::new(&dims)?)?;
    let n = out.n_elements();
    if n > 0 {
        // Rows are moved in the largest pieces that divide them.
        let size = dtype.size().unwrap_or(1);
        let row = inner * size;
        let whole = [16usize, 8, 4, 2, 1]
            .into_iter()
            .find(|&k| row % k == 0 && starts_at(params, k) && starts_at(&out, k) && k >= size);
        let bytes = whole.unwrap_or(size);
        let (n, inner) = (n * size / bytes, inner * size / bytes);
        let index = indices.dtype();
        let key = ProgramKey {
            family: "gather",
            op: if batch > 0 { "batched" } else { "rows" },
            dtypes: [Some(index), None, None],
            variant: bytes as u32,
        };
        let kernel = device.function(&key, || source(bytes, index, batch > 0))?;
        let args = Args::new()
            .input(ctx.input(0)?)
            .input(ctx.input(1)?)
            .output(&mut out)
            .size(n)
            .size(n_axis)
            .size(n_indices)
            .size(inner)
            .size(outer.max(1));
        device.launch(kernel, Grid::over(n), &args)?;
    }
    ctx.set_output(0, out);
    Ok(())
}

fn starts_at(tensor: &Tensor, bytes: usize) -> bool {
    matches!(tensor.storage(), TensorData::Buffer { offset, .. } if offset % bytes == 0)
}

fn source(bytes: usize, index: DType, batched: bool) -> String {
    let element = bytes_type(bytes);
    format!(
        "typedef {element} E;\ntypedef {} I;\n#define BATCHED {}\n{}",
        c_type(index),
        u32::from(batched),
        include_str!("../gather.cu")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_compile() {
        let all = [1, 2, 4, 8, 16].map(|bytes| {
            let dtypes = [Some(DType::I32), None, None];
            let key = ProgramKey { family: "gather", op: "rows", dtypes, variant: bytes as u32 };
            (key, source(bytes, DType::I32, bytes == 4))
        });
        crate::cuda::tests::compiles(all);
    }
}
