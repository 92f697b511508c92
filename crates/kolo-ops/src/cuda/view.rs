//! Copies of strided views: transpositions, slices, splits, tiles, reversals, their gradients, concatenation, padding.
//!
//! The CPU kernels of these ops work out which view it is, and end in the functions here if their tensor is on a GPU.

use kolo_core::{DType, Error, Result, Shape, Tensor, TensorData};
use kolo_device::Device;
use kolo_device::cuda::{Args, CudaDevice, Grid, ProgramKey};
use smallvec::SmallVec;

use super::map::{COPY, run};
use super::{gpu, zeros};
use crate::KernelCtx;
use crate::array::view::{View, strides};

const RANK: usize = 8;

/// One side of a copy: where it begins, and its step along each size.
struct Side {
    start: i64,
    steps: SmallVec<[i64; RANK]>,
}

/// What `view` shows of `input`, as a new tensor of `shape`.
pub(crate) fn read_view(ctx: &KernelCtx<'_>, input: &Tensor, view: &View, shape: Shape) -> Result<Tensor> {
    let mut out = ctx.allocate(input.dtype(), shape)?;
    let device = gpu(ctx)?;
    if out.n_elements() == 0 {
        return Ok(out);
    }
    if let Some((batch, rows, columns, in_batch, in_row)) = transposition(view) {
        return transpose(device, input, out, view.start(), batch, rows, columns, in_batch, in_row);
    }
    let (sizes, steps): (Vec<usize>, Vec<isize>) = view.dims().iter().copied().unzip();
    let dense = strides(&sizes).iter().map(|&step| step as i64).collect();
    let from = Side { start: view.start() as i64, steps: steps.iter().map(|&step| step as i64).collect() };
    copy(device, input, from, &mut out, Side { start: 0, steps: dense }, &sizes)?;
    Ok(out)
}

/// Zeros of `shape`, with `input` written where `view` says.
pub(crate) fn write_view(ctx: &KernelCtx<'_>, shape: Shape, input: &Tensor, view: &View) -> Result<Tensor> {
    let mut out = zeros(ctx, input.dtype(), shape)?;
    if input.n_elements() > 0 {
        let (sizes, steps): (Vec<usize>, Vec<isize>) = view.dims().iter().copied().unzip();
        let dense = strides(&sizes).iter().map(|&step| step as i64).collect();
        let to = Side { start: view.start() as i64, steps: steps.iter().map(|&step| step as i64).collect() };
        copy(gpu(ctx)?, input, Side { start: 0, steps: dense }, &mut out, to, &sizes)?;
    }
    Ok(out)
}

/// The values joined: `n_rows` rows, each of one piece of every value.
pub(crate) fn join(ctx: &KernelCtx<'_>, values: &[&Tensor], shape: Shape, n_rows: usize) -> Result<Tensor> {
    let mut out = ctx.allocate(values[0].dtype(), shape)?;
    let device = gpu(ctx)?;
    if out.n_elements() == 0 || n_rows == 0 {
        return Ok(out);
    }
    let row = out.n_elements() / n_rows;
    let mut at = 0;
    for value in values {
        let n = value.n_elements() / n_rows;
        if n == 0 {
            continue;
        }
        if n_rows == 1 {
            let size = value.dtype().size().unwrap_or(1);
            device.copy_within(value, 0, &mut out, at * size, n * size)?;
        } else {
            let from = Side { start: 0, steps: SmallVec::from_slice(&[n as i64, 1]) };
            let to = Side { start: at as i64, steps: SmallVec::from_slice(&[row as i64, 1]) };
            copy(device, value, from, &mut out, to, &[n_rows, n])?;
        }
        at += n;
    }
    Ok(out)
}

/// `input` with margins of `value`, zero if there is none.
pub(crate) fn padded(
    ctx: &KernelCtx<'_>,
    input: &Tensor,
    around: &[(usize, usize)],
    value: Option<&Tensor>,
    shape: Shape,
) -> Result<Tensor> {
    let device = gpu(ctx)?;
    let mut out = match value {
        None => zeros(ctx, input.dtype(), shape)?,
        Some(value) => {
            let mut out = ctx.allocate(input.dtype(), shape)?;
            run(device, COPY, &[Some(value)], &mut out, &[])?;
            out
        }
    };
    if input.n_elements() > 0 {
        let steps = strides(out.shape());
        let start: i64 = around.iter().zip(&steps).map(|(&(before, _), &step)| before as i64 * step as i64).sum();
        let from = Side { start: 0, steps: strides(input.shape()).iter().map(|&step| step as i64).collect() };
        let to = Side { start, steps: steps.iter().map(|&step| step as i64).collect() };
        let sizes = input.shape().to_vec();
        copy(device, input, from, &mut out, to, &sizes)?;
    }
    Ok(out)
}

/// A new tensor whose dimension `i` is dimension `order[i]` of the input.
pub(crate) fn permute(ctx: &KernelCtx<'_>, input: &Tensor, order: &[usize]) -> Result<Tensor> {
    let all = strides(input.shape());
    if order.len() != all.len() || order.iter().any(|&d| d >= all.len()) {
        return Err(Error::internal(format!("{} has no order {order:?}", input.shape())));
    }
    let sizes: Vec<usize> = order.iter().map(|&d| input.shape()[d]).collect();
    let mut out = ctx.allocate(input.dtype(), Shape::new(&sizes)?)?;
    if out.n_elements() > 0 {
        let from = Side { start: 0, steps: order.iter().map(|&d| all[d] as i64).collect() };
        let to = Side { start: 0, steps: strides(&sizes).iter().map(|&step| step as i64).collect() };
        copy(gpu(ctx)?, input, from, &mut out, to, &sizes)?;
    }
    Ok(out)
}

/// The part of `input` of this shape that begins at `start`.
pub(crate) fn crop(ctx: &KernelCtx<'_>, input: &Tensor, start: &[usize], shape: Shape) -> Result<Tensor> {
    let fits = start.len() == shape.rank()
        && input.shape().rank() == shape.rank()
        && start.iter().zip(shape.dims()).zip(input.shape().dims()).all(|((at, n), all)| at + n <= *all);
    if !fits {
        return Err(Error::internal(format!("{shape} at {start:?} is not a part of {}", input.shape())));
    }
    let mut out = ctx.allocate(input.dtype(), shape)?;
    if out.n_elements() > 0 {
        let steps = strides(input.shape());
        let first = start.iter().zip(&steps).map(|(&at, &step)| at as i64 * step as i64).sum();
        let from = Side { start: first, steps: steps.iter().map(|&step| step as i64).collect() };
        let to = Side { start: 0, steps: strides(out.shape()).iter().map(|&step| step as i64).collect() };
        let sizes = out.shape().to_vec();
        copy(gpu(ctx)?, input, from, &mut out, to, &sizes)?;
    }
    Ok(out)
}

/// The bytes of `input` as elements of another size.
pub(crate) fn recast(ctx: &KernelCtx<'_>, input: &Tensor, dtype: DType, shape: Shape) -> Result<Tensor> {
    let mut out = ctx.allocate(dtype, shape)?;
    ctx.device.copy_within(input, 0, &mut out, 0, input.n_bytes())?;
    Ok(out)
}

/// Copies a box of `sizes` elements between two tensors of one dtype.
fn copy(
    device: &CudaDevice,
    input: &Tensor,
    mut from: Side,
    out: &mut Tensor,
    mut to: Side,
    sizes: &[usize],
) -> Result<()> {
    // Neighbours that both sides walk alike are one dimension.
    let mut merged: SmallVec<[(i64, i64, i64); RANK]> = SmallVec::new();
    for i in (0..sizes.len()).rev().filter(|&i| sizes[i] != 1) {
        let (n, a, b) = (sizes[i] as i64, from.steps[i], to.steps[i]);
        match merged.last_mut() {
            Some((m, x, y)) if a == *x * *m && b == *y * *m => *m *= n,
            _ => merged.push((n, a, b)),
        }
    }
    if merged.is_empty() {
        merged.push((1, 1, 1));
    }
    merged.reverse();
    if merged.len() > RANK {
        return Err(Error::unimplemented(format!("a GPU copies views of at most {RANK} separate dimensions")));
    }
    let size = input.dtype().size().unwrap_or(1);
    // As many bytes at once as both sides allow.
    let mut width = 1i64;
    if merged.last().is_some_and(|&(_, a, b)| a == 1 && b == 1) {
        let offset = |tensor: &Tensor| match tensor.storage() {
            TensorData::Buffer { offset, .. } => *offset as i64,
            _ => 1,
        };
        let inner = merged.last().map_or(1, |last| last.0);
        let fits = |k: i64| {
            let bytes = k * size as i64;
            let outer = &merged[..merged.len() - 1];
            bytes <= 16
                && inner % k == 0
                && from.start % k == 0
                && to.start % k == 0
                && outer.iter().all(|&(_, a, b)| a % k == 0 && b % k == 0)
                && offset(input) % bytes == 0
                && offset(out) % bytes == 0
        };
        while fits(width * 2) {
            width *= 2;
        }
    }
    if width > 1 {
        let last = merged.len() - 1;
        for (i, (n, a, b)) in merged.iter_mut().enumerate() {
            match i == last {
                true => *n /= width,
                false => (*a, *b) = (*a / width, *b / width),
            }
        }
        from.start /= width;
        to.start /= width;
    }
    let bytes = size * width as usize;
    let rank = merged.len();
    let key = ProgramKey { family: "view", op: "copy", dtypes: [None; 3], variant: (rank as u32) << 8 | bytes as u32 };
    let kernel = device.function(&key, || view_source(bytes, rank))?;
    let list = |f: &dyn Fn(&(i64, i64, i64)) -> i64| merged.iter().map(f).collect::<SmallVec<[i64; RANK]>>();
    let (sizes, a, b) = (list(&|d| d.0), list(&|d| d.1), list(&|d| d.2));
    let n: i64 = sizes.iter().product();
    let args = Args::new()
        .input(input)
        .output(out)
        .i64(n)
        .i64(from.start)
        .i64(to.start)
        .sizes(&sizes, RANK)
        .sizes(&a, RANK)
        .sizes(&b, RANK);
    device.launch(kernel, Grid::over(n as usize), &args)
}

/// A type of this many bytes that is moved as a whole.
pub(crate) fn bytes_type(n: usize) -> &'static str {
    match n {
        1 => "u8",
        2 => "u16",
        4 => "u32",
        8 => "u64",
        _ => "uint4",
    }
}

fn view_source(bytes: usize, rank: usize) -> String {
    format!("typedef {} E;\n#define RANK {rank}\n{}", bytes_type(bytes), include_str!("view.cu"))
}

fn transpose_source(bytes: usize) -> String {
    format!("typedef {} E;\n{}", bytes_type(bytes), include_str!("transpose.cu"))
}

/// A view that transposes matrices of a batch: `(batch, rows, columns, step of the batch, step of a column)`.
fn transposition(view: &View) -> Option<(usize, usize, usize, i64, i64)> {
    let (batch, in_batch, rest) = match view.dims() {
        [a, b] => (1, 0, [a, b]),
        [(batch, step), a, b] => (*batch, *step as i64, [a, b]),
        _ => return None,
    };
    let [&(rows, row_step), &(columns, column_step)] = rest;
    let is_turned = row_step == 1 && column_step > 1 && rows >= 8 && columns >= 8;
    is_turned.then_some((batch, rows, columns, in_batch, column_step as i64))
}

/// A matrix with rows and columns exchanged.
pub(crate) fn turned(ctx: &KernelCtx<'_>, matrix: &Tensor) -> Result<Tensor> {
    let &[columns, rows] = matrix.shape().dims() else {
        return Err(Error::internal(format!("{} is not a matrix", matrix.shape())));
    };
    let out = ctx.allocate(matrix.dtype(), Shape::new(&[rows, columns])?)?;
    transpose(gpu(ctx)?, matrix, out, 0, 1, rows, columns, 0, rows as i64)
}

#[allow(clippy::too_many_arguments)]
fn transpose(
    device: &CudaDevice,
    input: &Tensor,
    mut out: Tensor,
    start: usize,
    batch: usize,
    rows: usize,
    columns: usize,
    in_batch: i64,
    in_row: i64,
) -> Result<Tensor> {
    let size = input.dtype().size().unwrap_or(1);
    let key = ProgramKey { family: "view", op: "transpose", dtypes: [None; 3], variant: size as u32 };
    let kernel = device.function(&key, || transpose_source(size))?;
    let flat = input.clone().reshaped(Shape::new(&[input.n_elements()])?)?;
    let flat = flat.rows(start, input.n_elements() - start)?;
    let tiles = rows.div_ceil(32) * columns.div_ceil(32) * batch;
    let grid = Grid { blocks: [tiles.clamp(1, 1 << 20) as u32, 1, 1], threads: [32, 8, 1], shared: 0 };
    let args = Args::new().input(&flat).output(&mut out).size(rows).size(columns).i64(in_batch).i64(in_row).size(batch);
    device.launch(kernel, grid, &args)?;
    Ok(out)
}

/// Whether a tensor is in a GPU's memory.
pub(crate) fn is_on_gpu(tensor: &Tensor) -> bool {
    !tensor.memory().is_host()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_compile() {
        let key = |op, variant| ProgramKey { family: "view", op, dtypes: [None; 3], variant };
        let mut all = Vec::new();
        for bytes in [1, 2, 4, 8, 16] {
            all.push((key("copy", bytes as u32), view_source(bytes, 3)));
            all.push((key("transpose", bytes as u32), transpose_source(bytes.min(8))));
        }
        super::super::tests::compiles(all);
    }
}
