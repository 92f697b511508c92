//! Picking rows by index and combining rows into places named by index: Gather, GatherNd, ScatterNd, the unsorted segment
//! ops, scatters into variables, OneHot.

use kolo_core::{DType, Error, Result, Shape, Tensor};
use kolo_device::cuda::{Args, CudaDevice, Grid, ProgramKey};
use kolo_graph::shape_fns::resolve_axis;
use smallvec::SmallVec;

use super::{c_type, gpu, zeros};
use crate::KernelCtx;
use crate::array::elements::{integer, integers, product};
use crate::state::handle::uninitialized;

const RANK: usize = 8;

/// How an update and what is there become one.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Join {
    Set,
    Add,
    Sub,
    Mul,
    Min,
    Max,
}

impl Join {
    fn name(self) -> &'static str {
        match self {
            Join::Set => "set",
            Join::Add => "add",
            Join::Sub => "sub",
            Join::Mul => "mul",
            Join::Min => "min",
            Join::Max => "max",
        }
    }
    fn text(self) -> &'static str {
        match self {
            Join::Set => "(b)",
            Join::Add => "((a) + (b))",
            Join::Sub => "((a) - (b))",
            Join::Mul => "((a) * (b))",
            Join::Min => "smaller(a, b)",
            Join::Max => "larger(a, b)",
        }
    }
}

/// A type of this many bytes that is moved as a whole.
fn element(dtype: DType) -> &'static str {
    match dtype.size() {
        Some(1) => "u8",
        Some(2) => "u16",
        Some(4) => "u32",
        _ => "u64",
    }
}

pub(crate) fn gather_v2(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (axis, batch_dims) = (integer(ctx.input(2)?)?, ctx.attrs().int("batch_dims")?);
    gather(ctx, axis, batch_dims)
}

pub(crate) fn resource_gather(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let cell = ctx.variable(0)?;
    let value = cell.read().ok_or_else(|| uninitialized(ctx, 0, &cell))?;
    ctx.inputs[0] = crate::Value::Tensor(value);
    let batch_dims = ctx.attrs().int("batch_dims")?;
    gather(ctx, batch_dims, batch_dims)
}

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
        let kernel = device.function(&key, || gather_source(bytes, index, batch > 0))?;
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
    matches!(tensor.storage(), kolo_core::TensorData::Buffer { offset, .. } if offset % bytes == 0)
}

/// A number for each dimension.
type Steps = SmallVec<[i64; RANK]>;

/// Sizes of the first `depth` dimensions, and how many rows lie between neighbours of each.
fn coordinates(shape: &Shape, depth: usize) -> Result<(Steps, Steps)> {
    if depth > shape.rank() {
        return Err(Error::invalid_argument(format!(
            "index innermost dimension length must be <= params rank; saw: {depth} vs. {}",
            shape.rank()
        )));
    }
    if depth > RANK {
        return Err(Error::unimplemented(format!("a GPU takes at most {RANK} coordinates, found {depth}")));
    }
    let dims: SmallVec<[i64; RANK]> = shape[..depth].iter().map(|&dim| dim as i64).collect();
    let mut steps = SmallVec::from_elem(1i64, depth);
    for d in (1..depth).rev() {
        steps[d - 1] = steps[d] * dims[d];
    }
    Ok((dims, steps))
}

pub(crate) fn gather_nd(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (params, indices) = (ctx.input(0)?, ctx.input(1)?);
    let Some((&depth, picked)) = indices.shape().split_last() else {
        return Err(Error::invalid_argument("indices must be at least a vector"));
    };
    let (dims, steps) = coordinates(params.shape(), depth)?;
    let inner = product(&params.shape()[depth..]);
    let shape = Shape::new(&[picked, &params.shape()[depth..]].concat())?;
    let (dtype, index, device) = (params.dtype(), indices.dtype(), gpu(ctx)?);
    let mut out = ctx.allocate(dtype, shape)?;
    let n = out.n_elements();
    if n > 0 {
        let key = ProgramKey { family: "gather", op: "nd", dtypes: [Some(index), Some(dtype), None], variant: 0 };
        let kernel = device.function(&key, || gather_nd_source(dtype, index))?;
        let args = Args::new()
            .input(ctx.input(0)?)
            .input(ctx.input(1)?)
            .output(&mut out)
            .size(n)
            .size(inner)
            .size(depth)
            .sizes(&dims, RANK)
            .sizes(&steps, RANK);
        device.launch(kernel, Grid::over(n), &args)?;
    }
    ctx.set_output(0, out);
    Ok(())
}

/// Where updates go: how many there are, of how many elements, and what their coordinates mean.
struct Places<'a> {
    indices: &'a Tensor,
    n: usize,
    inner: usize,
    depth: usize,
    dims: SmallVec<[i64; RANK]>,
    steps: SmallVec<[i64; RANK]>,
    /// One number for all.
    single: bool,
}

fn combine(device: &CudaDevice, out: &mut Tensor, places: &Places<'_>, updates: &Tensor, join: Join) -> Result<()> {
    if places.n == 0 || places.inner == 0 {
        return Ok(());
    }
    let (dtype, index) = (out.dtype(), places.indices.dtype());
    let ordered = join == Join::Set;
    let key = ProgramKey { family: "scatter", op: join.name(), dtypes: [Some(dtype), Some(index), None], variant: 0 };
    let kernel = device.function(&key, || scatter_source(dtype, index, join))?;
    let args = Args::new()
        .output(out)
        .input(places.indices)
        .input(updates)
        .size(places.n)
        .size(places.inner)
        .size(places.depth)
        .i64(i64::from(places.single))
        .sizes(&places.dims, RANK)
        .sizes(&places.steps, RANK);
    let work = if ordered { places.inner } else { places.n * places.inner };
    device.launch(kernel, Grid::over(work), &args)
}

pub(crate) fn scatter_nd(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (indices, updates) = (ctx.input(0)?, ctx.input(1)?);
    let shape = Shape::from_signed(&integers(ctx.input(2)?)?)?;
    let Some((&depth, picked)) = indices.shape().split_last() else {
        return Err(Error::invalid_argument("indices must be at least a vector"));
    };
    let (dims, steps) = coordinates(&shape, depth)?;
    let expected = [picked, &shape[depth..]].concat();
    if updates.shape().dims() != expected {
        return Err(Error::invalid_argument(format!(
            "Must have updates.shape = indices.shape[:-1] + shape[{depth}:], got updates.shape: {}, indices.shape: {}, \
             shape: {shape}",
            updates.shape(),
            indices.shape()
        )));
    }
    let inner = product(&shape[depth..]);
    let mut out = zeros(ctx, updates.dtype(), shape)?;
    let places = Places { indices, n: product(picked), inner, depth, dims, steps, single: false };
    combine(gpu(ctx)?, &mut out, &places, updates, Join::Add)?;
    ctx.set_output(0, out);
    Ok(())
}

pub(crate) fn segments(ctx: &mut KernelCtx<'_>, join: Join) -> Result<()> {
    let (data, ids) = (ctx.input(0)?, ctx.input(1)?);
    let n_segments = match ctx.integers(2)?.as_slice() {
        &[n] if n >= 0 => n as usize,
        [n] => return Err(Error::invalid_argument(format!("num_segments is {n}, below 0"))),
        _ => return Err(Error::invalid_argument("num_segments should be a scalar")),
    };
    let Some(row) = data.shape().strip_prefix(ids.shape().dims()) else {
        return Err(Error::invalid_argument(format!(
            "data.shape = {} does not start with segment_ids.shape = {}",
            data.shape(),
            ids.shape()
        )));
    };
    let shape = Shape::new(&[&[n_segments], row].concat())?;
    let inner = product(row);
    let (dtype, device) = (data.dtype(), gpu(ctx)?);
    let mut out = match join {
        Join::Add => zeros(ctx, dtype, shape)?,
        _ => {
            let text = match join {
                Join::Max => "-LARGEST",
                Join::Min => "LARGEST",
                _ => "(Wide<U>::type)1",
            };
            let mut out = ctx.allocate(dtype, shape)?;
            // The largest finite number of each type, so that a segment without rows is what it is on a CPU.
            let largest = match dtype {
                DType::F64 => format!("{:e}", f64::MAX),
                DType::F16 => "65504.0f".to_owned(),
                DType::BF16 => "3.3895313892515355e38f".to_owned(),
                _ => format!("{:e}f", f32::MAX),
            };
            fill_text(device, &mut out, join.name(), &text.replace("LARGEST", &largest))?;
            out
        }
    };
    let places = Places {
        indices: ids,
        n: ids.n_elements(),
        inner,
        depth: 1,
        dims: SmallVec::from_slice(&[n_segments as i64]),
        steps: SmallVec::from_slice(&[1]),
        single: false,
    };
    combine(device, &mut out, &places, data, join)?;
    ctx.set_output(0, out);
    Ok(())
}

/// Every element becomes the value of a C++ expression.
fn fill_text(device: &CudaDevice, out: &mut Tensor, name: &'static str, text: &str) -> Result<()> {
    let n = out.n_elements();
    if n == 0 {
        return Ok(());
    }
    let dtype = out.dtype();
    let key = ProgramKey { family: "fill", op: name, dtypes: [Some(dtype), None, None], variant: 0 };
    let kernel = device.function(&key, || {
        format!(
            "typedef {} U;\nextern \"C\" __global__ void KOLO_ENTRY(U* out, i64 n) {{\n    \
             for (i64 i = thread_number(); i < n; i += n_threads()) out[i] = Narrow<U>::from({text});\n}}\n",
            c_type(dtype)
        )
    })?;
    device.launch(kernel, Grid::over(n), &Args::new().output(out).size(n))
}

pub(crate) fn scatter(ctx: &mut KernelCtx<'_>, join: Join) -> Result<()> {
    let cell = ctx.variable(0)?;
    if !cell.is_initialized() {
        return Err(uninitialized(ctx, 0, &cell));
    }
    let (indices, updates, device) = (ctx.input(1)?, ctx.input(2)?, gpu(ctx)?);
    cell.update_on(device, |variable| {
        let shape = variable.shape().clone();
        let Some((&n_rows, row)) = shape.split_first() else {
            return Err(Error::invalid_argument("a scalar variable has no rows"));
        };
        let single = updates.shape().rank() == 0;
        if !single && !updates.shape().iter().eq(indices.shape().iter().chain(row)) {
            return Err(Error::invalid_argument(format!(
                "Must have updates.shape = indices.shape + params.shape[1:] or updates.shape = [], got updates.shape {}, \
                 indices.shape {}, params.shape {shape}",
                updates.shape(),
                indices.shape()
            )));
        }
        let places = Places {
            indices,
            n: indices.n_elements(),
            inner: product(row),
            depth: 1,
            dims: SmallVec::from_slice(&[n_rows as i64]),
            steps: SmallVec::from_slice(&[1]),
            single,
        };
        combine(device, variable, &places, updates, join)
    })
}

pub(crate) fn one_hot(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (indices, on, off) = (ctx.input(0)?, ctx.input(2)?, ctx.input(3)?);
    for (name, value) in [("on_value", on), ("off_value", off)] {
        if value.n_elements() != 1 {
            return Err(Error::invalid_argument(format!("{name} must be a scalar, but got: {}", value.shape())));
        }
    }
    let depth = integer(ctx.input(1)?)?;
    let depth = usize::try_from(depth)
        .map_err(|_| Error::invalid_argument(format!("depth must be non-negative, got: {depth}")))?;
    let mut dims = indices.shape().to_vec();
    let axis = resolve_axis(ctx.attrs().int("axis")?, dims.len() + 1)?;
    let inner = product(&dims[axis..]);
    dims.insert(axis, depth);
    let (dtype, index, device) = (on.dtype(), indices.dtype(), gpu(ctx)?);
    let mut out = ctx.allocate(dtype, Shape::new(&dims)?)?;
    let n = out.n_elements();
    if n > 0 {
        let key = ProgramKey { family: "one_hot", op: "mark", dtypes: [Some(dtype), Some(index), None], variant: 0 };
        let kernel = device.function(&key, || one_hot_source(dtype, index))?;
        let args = Args::new()
            .input(ctx.input(0)?)
            .input(ctx.input(2)?)
            .input(ctx.input(3)?)
            .output(&mut out)
            .size(n)
            .size(depth)
            .size(inner);
        device.launch(kernel, Grid::over(n), &args)?;
    }
    ctx.set_output(0, out);
    Ok(())
}

fn gather_source(bytes: usize, index: DType, batched: bool) -> String {
    let element = ["u8", "u16", "u32", "u64", "uint4"][bytes.trailing_zeros() as usize];
    format!(
        "typedef {element} E;\ntypedef {} I;\n#define KIND 0\n#define BATCHED {}\n{}",
        c_type(index),
        u32::from(batched),
        include_str!("gather.cu")
    )
}

fn gather_nd_source(dtype: DType, index: DType) -> String {
    let (element, index) = (element(dtype), c_type(index));
    format!("typedef {element} E;\ntypedef {index} I;\n#define KIND 1\n{}", include_str!("gather.cu"))
}

fn scatter_source(dtype: DType, index: DType, join: Join) -> String {
    // The card adds floats and doubles in memory by itself.
    let adds = join == Join::Add && matches!(dtype, DType::F32 | DType::F64);
    format!(
        "typedef {} T;\ntypedef {} I;\n#define ORDERED {}\n#define ADDS_FLOAT {}\n#define JOIN(a, b) {}\n{}",
        c_type(dtype),
        c_type(index),
        u32::from(join == Join::Set),
        u32::from(adds),
        join.text(),
        include_str!("scatter.cu")
    )
}

fn one_hot_source(dtype: DType, index: DType) -> String {
    format!("typedef {} E;\ntypedef {} I;\n{}", element(dtype), c_type(index), include_str!("one_hot.cu"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_compile() {
        let key = |op, dtype, variant| ProgramKey { family: "gather", op, dtypes: [Some(dtype), None, None], variant };
        let mut all = Vec::new();
        for bytes in [1, 2, 4, 8, 16] {
            all.push((key("rows", DType::I64, bytes as u32), gather_source(bytes, DType::I32, bytes == 4)));
        }
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16, DType::I64, DType::U8, DType::I16] {
            all.push((key("nd", dtype, 0), gather_nd_source(dtype, DType::I64)));
            all.push((key("one_hot", dtype, 0), one_hot_source(dtype, DType::I64)));
            for join in [Join::Set, Join::Add, Join::Sub, Join::Mul, Join::Min, Join::Max] {
                all.push((key(join.name(), dtype, 1), scatter_source(dtype, DType::I32, join)));
            }
        }
        super::super::tests::compiles(all);
    }
}
