//! Elements combined into places that are named by index: what scatters and unsorted segments share.

use kolo_core::{DType, Error, Result, Shape, Tensor};
use kolo_device::cuda::{Args, CudaDevice, Grid, ProgramKey};
use smallvec::SmallVec;

use super::c_type;

/// Most coordinates of an index.
pub(crate) const RANK: usize = 8;

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
    pub(crate) fn name(self) -> &'static str {
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

/// A number for each dimension.
pub(crate) type Steps = SmallVec<[i64; RANK]>;

/// Sizes of the first `depth` dimensions, and how many rows lie between neighbours of each.
pub(crate) fn coordinates(shape: &Shape, depth: usize) -> Result<(Steps, Steps)> {
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

/// Where updates go: how many there are, of how many elements, and what their coordinates mean.
pub(crate) struct Places<'a> {
    pub indices: &'a Tensor,
    pub n: usize,
    pub inner: usize,
    pub depth: usize,
    pub dims: SmallVec<[i64; RANK]>,
    pub steps: SmallVec<[i64; RANK]>,
    /// One number for all.
    pub single: bool,
}

pub(crate) fn combine(
    device: &CudaDevice,
    out: &mut Tensor,
    places: &Places<'_>,
    updates: &Tensor,
    join: Join,
) -> Result<()> {
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

/// Every element becomes the value of a C++ expression.
pub(crate) fn fill_text(device: &CudaDevice, out: &mut Tensor, name: &'static str, text: &str) -> Result<()> {
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

fn scatter_source(dtype: DType, index: DType, join: Join) -> String {
    // GPUs add floats and doubles in memory by themselves.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_compile() {
        let mut all = Vec::new();
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16, DType::I64, DType::U8, DType::I16] {
            for join in [Join::Set, Join::Add, Join::Sub, Join::Mul, Join::Min, Join::Max] {
                let dtypes = [Some(dtype), Some(DType::I32), None];
                let key = ProgramKey { family: "scatter", op: join.name(), dtypes, variant: 0 };
                all.push((key, scatter_source(dtype, DType::I32, join)));
            }
        }
        super::super::tests::compiles(all);
    }
}
