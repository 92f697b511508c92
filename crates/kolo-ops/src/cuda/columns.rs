//! Reductions down the columns of a matrix, such as gradients of biases, in one launch; what is reduced may be computed on the
//! way, from tensors of the same shape, and stored as well.

use kolo_core::{DType, Error, Result, Shape, Tensor};
use kolo_device::cuda::{Args, Grid, ProgramKey};

use super::map::is_aligned;
use super::reduce::{Reducer, definitions};
use super::{c_type, gpu};
use crate::KernelCtx;

/// Strips of columns that a kernel can count the parts of.
const MOST_STRIPS: usize = 2048;
const THREADS: usize = 256;

/// What is reduced, if it is not the input itself.
pub(crate) struct Mapped<'a> {
    /// Its name; with the element types it names the kernel.
    pub name: &'static str,
    /// CUDA C++ that defines `element`, a function of the widened inputs that gives a widened `T`.
    pub code: &'a str,
    /// Where it goes.
    pub out: &'a mut Tensor,
}

/// The shape of the launch.
#[derive(Clone, Copy)]
struct Layout {
    /// Neighbouring columns of a thread.
    per: usize,
    /// Threads side by side.
    across: usize,
}

/// `out[c]` becomes the reduction of `rows` values, `columns` apart. All inputs have `rows * columns` elements, or, if
/// something is computed from them, one.
pub(crate) fn reduce_columns(
    ctx: &KernelCtx<'_>,
    reducer: &Reducer,
    inputs: &[&Tensor],
    mapped: Option<Mapped<'_>>,
    (rows, columns): (usize, usize),
    out: &mut Tensor,
) -> Result<()> {
    let device = gpu(ctx)?;
    let dtype = out.dtype();
    let n = rows * columns;
    let fits = |tensor: &Tensor| tensor.n_elements() == n || (mapped.is_some() && tensor.n_elements() == 1);
    if !inputs.iter().all(|tensor| fits(tensor)) || out.n_elements() != columns || n == 0 {
        return Err(Error::internal(format!("{rows}x{columns} does not fit what is reduced")));
    }
    let widest = inputs.iter().map(|tensor| tensor.dtype()).chain([dtype]).filter_map(DType::size).max().unwrap_or(1);
    let mut per = (16 / widest).max(1);
    let may = |per: usize| {
        columns % per == 0
            && inputs.iter().all(|tensor| tensor.n_elements() == 1 || is_aligned(tensor, per))
            && mapped.as_ref().is_none_or(|mapped| is_aligned(mapped.out, per))
    };
    while per > 1 && !may(per) {
        per /= 2;
    }
    let across = (columns / per).clamp(1, 32).next_power_of_two();
    let layout = Layout { per, across };
    let strips = columns.div_ceil(per * across);
    let n_parts = match strips > MOST_STRIPS {
        true => 1,
        false => (device.multiprocessors() * 4 / strips).clamp(1, (rows / (THREADS / across * 8)).max(1)),
    };
    let accumulator = match dtype {
        DType::F64 => DType::F64,
        float if float.is_float() => DType::F32,
        _ => DType::I64,
    };
    let mut partial = match n_parts {
        1 => None,
        n => Some(ctx.allocate(accumulator, Shape::new(&[n * columns])?)?),
    };
    let types: Vec<DType> = inputs.iter().map(|tensor| tensor.dtype()).collect();
    let singles: u32 =
        inputs.iter().enumerate().map(|(i, tensor)| u32::from(tensor.n_elements() == 1 && n > 1) << i).sum();
    let key = ProgramKey {
        family: "columns",
        op: mapped.as_ref().map_or(reducer.name, |mapped| mapped.name),
        dtypes: [Some(dtype), None, None],
        variant: per as u32 | (across as u32) << 8 | singles << 16,
    };
    let code = mapped.as_ref().map(|mapped| mapped.code);
    let kernel = device.function(&key, || source(reducer, dtype, layout, code, &types, singles))?;
    let mut args = inputs.iter().fold(Args::new(), |args, &tensor| args.input(tensor));
    if let Some(mapped) = mapped {
        args = args.output(mapped.out);
    }
    args = match &mut partial {
        Some(partial) => args.output(partial),
        None => args.i64(0),
    };
    let args = args.output(out).size(rows).size(columns).size(n_parts);
    let blocks =
        u32::try_from(strips).map_err(|_| Error::invalid_argument(format!("{columns} columns are too many")))?;
    let grid = Grid { blocks: [blocks, n_parts as u32, 1], threads: [THREADS as u32, 1, 1], shared: 0 };
    device.launch(kernel, grid, &args)
}

fn source(
    reducer: &Reducer,
    dtype: DType,
    Layout { per, across }: Layout,
    code: Option<&str>,
    types: &[DType],
    singles: u32,
) -> String {
    let mut text = definitions(reducer, dtype);
    text += &format!("#define PER {per}\n#define ACROSS {across}\n#define MOST_STRIPS {MOST_STRIPS}\n");
    match code {
        None => text += "#define MAPS 0\n#define ARGUMENTS const T* in,\n",
        Some(code) => {
            let pointers: String =
                types.iter().enumerate().map(|(i, dtype)| format!("const {}* in{i}, ", c_type(*dtype))).collect();
            let is_single = |i: usize| singles >> i & 1 == 1;
            let loads: String = types
                .iter()
                .enumerate()
                .filter(|(i, _)| !is_single(*i))
                .map(|(i, dtype)| {
                    let pack = format!("Pack<{}, PER>", c_type(*dtype));
                    format!("const {pack} a{i} = ((const {pack}*)in{i})[i]; ")
                })
                .collect();
            let values: Vec<String> = (0..types.len())
                .map(|i| if is_single(i) { format!("widen(in{i}[0])") } else { format!("widen(a{i}.at[j])") })
                .collect();
            text += &format!(
                "{code}\n#define MAPS 1\n#define ARGUMENTS {pointers}T* mapped,\n#define MAP_ROW {loads}Pack<T, PER> value; \
                 for (int j = 0; j < PER; j++) value.at[j] = Narrow<T>::from(element({})); ((Pack<T, PER>*)mapped)[i] = value;\n",
                values.join(", ")
            );
        }
    }
    text + include_str!("columns.cu")
}

#[cfg(test)]
mod tests {
    use super::super::reduce::SUM;
    use super::super::tests::compiles;
    use super::*;
    use crate::math::reduce::extreme::GPU_MAX;

    #[test]
    fn sources_compile() {
        let key =
            |dtype, variant| ProgramKey { family: "columns", op: "t", dtypes: [Some(dtype), None, None], variant };
        let mut all = Vec::new();
        for dtype in [DType::F32, DType::BF16, DType::F64, DType::I64, DType::U8] {
            let layout = Layout { per: 16 / dtype.size().unwrap_or(16), across: 8 };
            all.push((key(dtype, 0), source(&SUM, dtype, layout, None, &[dtype], 0)));
            all.push((key(dtype, 1), source(&GPU_MAX, dtype, Layout { per: 1, across: 1 }, None, &[dtype], 0)));
        }
        let code =
            "static __device__ __forceinline__ float element(float x0, float x1, float x2) { return x0 * x1 + x2; }";
        let types = [DType::F32, DType::BF16, DType::F32];
        all.push((key(DType::F32, 2), source(&SUM, DType::F32, Layout { per: 4, across: 32 }, Some(code), &types, 4)));
        compiles(all);
    }
}
