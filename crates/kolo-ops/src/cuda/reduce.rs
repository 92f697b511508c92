//! Reductions over any axes. A reduction states its [`Reducer`] in its own file.
//!
//! What one element of the output needs is reduced by a warp or a block if its values lie side by side, and by one thread
//! if its neighbours' do. Few outputs of many values are cut into parts that are joined by a second kernel, in a fixed
//! order: the result does not depend on which block ends first.

use kolo_core::{DType, Error, Result, Shape, Tensor};
use kolo_device::cuda::{Args, Grid, ProgramKey};
use smallvec::SmallVec;

use super::columns::reduce_columns;
use super::{c_type, gpu};
use crate::KernelCtx;
use crate::math::reduce::Wanted;

/// How values are reduced, as CUDA C++: `x` is an element, `a` and `b` are accumulators of type `A`, `n` is the number of elements.
pub(crate) struct Reducer {
    pub name: &'static str,
    pub start: &'static str,
    pub step: &'static str,
    pub join: &'static str,
    pub finish: &'static str,
    /// One value alone stays as it is.
    pub keeps_one: bool,
}

pub(crate) const SUM: Reducer =
    Reducer { name: "sum", start: "(A)0", step: "(a) + (A)(x)", join: "(a) + (b)", finish: "(a)", keeps_one: true };

pub(crate) fn reduce(ctx: &mut KernelCtx<'_>, reducer: &Reducer) -> Result<()> {
    let Some(Wanted { shape, is_reduced, kept }) = Wanted::of(ctx, reducer.keeps_one)? else { return Ok(()) };
    let out = reduced(ctx, reducer, &shape, &is_reduced, kept)?;
    ctx.set_output(0, out);
    Ok(())
}

/// Sizes and steps of one side, innermost last.
#[derive(Default)]
struct Side {
    sizes: SmallVec<[i64; 8]>,
    steps: SmallVec<[i64; 8]>,
}

const RANK: usize = 8;

/// The dimensions that are kept and those that are reduced, neighbours of one kind merged.
fn sides(shape: &Shape, is_reduced: &[bool]) -> Result<(Side, Side)> {
    let (mut kept, mut reduced) = (Side::default(), Side::default());
    let mut step = 1i64;
    let mut last = None;
    for i in (0..shape.rank()).rev().filter(|&i| shape[i] != 1) {
        let side = if is_reduced[i] { &mut reduced } else { &mut kept };
        match side.sizes.last_mut() {
            Some(size) if last == Some(is_reduced[i]) => *size *= shape[i] as i64,
            _ => {
                side.sizes.push(shape[i] as i64);
                side.steps.push(step);
            }
        }
        last = Some(is_reduced[i]);
        step *= shape[i] as i64;
    }
    for side in [&mut kept, &mut reduced] {
        if side.sizes.len() > RANK {
            return Err(Error::unimplemented(format!(
                "a GPU reduces over at most {RANK} separate axes; {shape} has more"
            )));
        }
        side.sizes.reverse();
        side.steps.reverse();
    }
    Ok((kept, reduced))
}

pub(crate) fn reduced(
    ctx: &KernelCtx<'_>,
    reducer: &Reducer,
    shape: &Shape,
    is_reduced: &[bool],
    out_shape: Shape,
) -> Result<Tensor> {
    let input = ctx.input(0)?;
    let dtype = input.dtype();
    let device = gpu(ctx)?;
    let mut out = ctx.allocate(dtype, out_shape)?;
    let n_out = out.n_elements();
    if n_out == 0 {
        return Ok(out);
    }
    let n_in = shape.n_elements() / n_out;
    let (kept, reduced) = sides(shape, is_reduced)?;
    if kept.steps.as_slice() == [1] && reduced.sizes.len() == 1 && n_in > 0 {
        reduce_columns(ctx, reducer, &[input], None, (n_in, n_out), &mut out)?;
        return Ok(out);
    }
    // Which side lies innermost decides who reads neighbours.
    let by_row = reduced.steps.last() == Some(&1) || n_in == 0;
    let busy = device.multiprocessors() * 8;
    let n_parts = match by_row {
        // A block reads some thousands of values well; more blocks only where there are too few.
        true => (busy / n_out).clamp(1, (n_in / 4096).max(1)),
        false => (busy * 256 / n_out).clamp(1, (n_in / 64).max(1)),
    };
    let few = by_row && n_parts == 1 && n_in <= 1024;
    let accumulator = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let partial = match n_parts {
        1 => None,
        n => Some(ctx.allocate(if dtype.is_float() { accumulator } else { DType::I64 }, Shape::new(&[n * n_out])?)?),
    };
    let variant =
        u32::from(by_row) | u32::from(few) << 1 | (kept.sizes.len() as u32) << 4 | (reduced.sizes.len() as u32) << 8;
    let key = ProgramKey { family: "reduce", op: reducer.name, dtypes: [Some(dtype), None, None], variant };
    let (kept_rank, reduced_rank) = (kept.sizes.len(), reduced.sizes.len());
    let kernel = device.function(&key, || source(reducer, dtype, by_row, few, kept_rank, reduced_rank))?;
    let grid = match (by_row, few) {
        (true, true) => Grid::blocks(n_out.div_ceil(8), 256)?,
        (true, false) => Grid::blocks(n_out * n_parts, 256)?,
        (false, _) => Grid::over(n_out * n_parts),
    };
    let mut args = Args::new().input(input);
    let mut partial = partial;
    args = match &mut partial {
        Some(partial) => args.output(partial),
        None => args.i64(0),
    };
    args = args
        .output(&mut out)
        .size(n_out)
        .size(n_in)
        .size(n_parts)
        .sizes(&kept.sizes, RANK)
        .sizes(&kept.steps, RANK)
        .sizes(&reduced.sizes, RANK)
        .sizes(&reduced.steps, RANK);
    device.launch(kernel, grid, &args)?;
    drop(args);
    if let Some(partial) = &partial {
        // Few outputs of many parts are a warp's work each.
        let by_warp = n_parts > 32;
        let variant = u32::from(by_warp);
        let key = ProgramKey { family: "reduce_parts", op: reducer.name, dtypes: [Some(dtype), None, None], variant };
        let kernel = device.function(&key, || parts_source(reducer, dtype, by_warp))?;
        let args = Args::new().input(partial).output(&mut out).size(n_out).size(n_parts).size(n_in);
        let grid = if by_warp { Grid::blocks(n_out.div_ceil(8), 256)? } else { Grid::over(n_out) };
        device.launch(kernel, grid, &args)?;
    }
    Ok(out)
}

/// The kernel that reduces.
fn source(reducer: &Reducer, dtype: DType, by_row: bool, few: bool, kept_rank: usize, reduced_rank: usize) -> String {
    format!(
        "{}#define BY_ROW {}\n#define FEW {}\n#define KEPT_RANK {kept_rank}\n#define REDUCED_RANK {reduced_rank}\n{}",
        definitions(reducer, dtype),
        u32::from(by_row),
        u32::from(few),
        include_str!("reduce.cu")
    )
}

/// The kernel that joins the parts.
fn parts_source(reducer: &Reducer, dtype: DType, by_warp: bool) -> String {
    let by_warp = u32::from(by_warp);
    format!("{}#define BY_WARP {by_warp}\n{}", definitions(reducer, dtype), include_str!("reduce_parts.cu"))
}

/// Types and steps of a reducer. Floats are accumulated as `float` or `double`, everything else as 64-bit integers.
pub(crate) fn definitions(reducer: &Reducer, dtype: DType) -> String {
    let accumulator = match dtype {
        DType::F64 => "f64",
        DType::F32 | DType::F16 | DType::BF16 => "f32",
        DType::U64 => "u64",
        _ => "i64",
    };
    let (least, greatest) = match dtype {
        DType::F64 => ("-__longlong_as_double(0x7ff0000000000000ll)", "__longlong_as_double(0x7ff0000000000000ll)"),
        DType::F32 | DType::F16 | DType::BF16 => ("-__int_as_float(0x7f800000)", "__int_as_float(0x7f800000)"),
        DType::U64 => ("0", "(A)0xffffffffffffffffull"),
        // What nothing is reduced to must fit the narrow type.
        DType::U8 => ("0", "255"),
        DType::U16 => ("0", "65535"),
        DType::U32 => ("0", "(A)0xffffffffll"),
        DType::I8 => ("-128", "127"),
        DType::I16 => ("-32768", "32767"),
        _ => ("(A)0x8000000000000000ull", "(A)0x7fffffffffffffffull"),
    };
    format!(
        "typedef {0} T;\ntypedef {0} U;\ntypedef {accumulator} A;\n#define LEAST ({least})\n#define GREATEST ({greatest})\n\
         #define START ({1})\n#define STEP(a, x) ({2})\n#define JOIN(a, b) ({3})\n#define FINISH(a, n) ({4})\n",
        c_type(dtype),
        reducer.start,
        reducer.step,
        reducer.join,
        reducer.finish
    )
}

/// The sums down the columns of `rows` rows of `n` numbers, as elements of `dtype`.
pub(crate) fn sum_rows(ctx: &KernelCtx<'_>, input: &Tensor, rows: usize, n: usize, dtype: DType) -> Result<Tensor> {
    let device = gpu(ctx)?;
    let wide = input.dtype();
    let mut out = ctx.allocate(dtype, Shape::new(&[n])?)?;
    let key = ProgramKey { family: "sum_rows", op: "plain", dtypes: [Some(wide), Some(dtype), None], variant: 0 };
    let kernel = device.function(&key, || sum_rows_source(wide, dtype))?;
    let args = Args::new().input(input).output(&mut out).size(n).size(rows).size(rows);
    device.launch(kernel, Grid::blocks(n.div_ceil(8), 256)?, &args)?;
    Ok(out)
}

fn sum_rows_source(wide: DType, dtype: DType) -> String {
    format!(
        "typedef {} A;\ntypedef {} U;\n#define START ((A)0)\n#define JOIN(a, b) ((a) + (b))\n#define FINISH(a, n) (a)\n#define BY_WARP 1\n{}",
        c_type(wide),
        c_type(dtype),
        include_str!("reduce_parts.cu")
    )
}

#[cfg(test)]
mod tests {
    use super::super::tests::compiles;
    use super::*;
    use crate::math::reduce::extreme::{GPU_MAX, GPU_MIN};
    use crate::math::reduce::logical::{GPU_ALL, GPU_ANY};
    use crate::math::reduce::norm::{GPU_HALF_SQUARES, GPU_NORM};
    use crate::math::reduce::prod::GPU_PROD;
    use crate::math::reduce::sum::GPU_MEAN;

    #[test]
    fn sources_compile() {
        let key = |op, dtype, variant| ProgramKey { family: "reduce", op, dtypes: [Some(dtype), None, None], variant };
        let mut all = Vec::new();
        for reducer in [&SUM, &GPU_MEAN, &GPU_PROD, &GPU_MAX, &GPU_MIN, &GPU_NORM, &GPU_HALF_SQUARES] {
            for dtype in [DType::F32, DType::BF16, DType::F64] {
                for (v, (by_row, few)) in [(false, false), (true, false), (true, true)].into_iter().enumerate() {
                    all.push((key(reducer.name, dtype, v as u32), source(reducer, dtype, by_row, few, 2, 1)));
                }
                all.push((key(reducer.name, dtype, 9), parts_source(reducer, dtype, false)));
                all.push((key(reducer.name, dtype, 10), parts_source(reducer, dtype, true)));
            }
        }
        for reducer in [&SUM, &GPU_MAX] {
            for dtype in [DType::I64, DType::U8, DType::U64, DType::I16] {
                all.push((key(reducer.name, dtype, 0), source(reducer, dtype, true, true, 1, 3)));
            }
        }
        for reducer in [&GPU_ALL, &GPU_ANY] {
            all.push((key(reducer.name, DType::Bool, 0), source(reducer, DType::Bool, true, false, 0, 1)));
        }
        all.push((key("rows", DType::BF16, 0), sum_rows_source(DType::F32, DType::BF16)));
        compiles(all);
    }

    #[test]
    fn neighbours_of_one_kind_merge() {
        let shape = Shape::new(&[2, 3, 4, 5]).unwrap();
        let (kept, reduced) = sides(&shape, &[true, false, false, true]).unwrap();
        assert_eq!((kept.sizes.as_slice(), kept.steps.as_slice()), (&[12][..], &[5][..]));
        assert_eq!((reduced.sizes.as_slice(), reduced.steps.as_slice()), (&[2, 5][..], &[60, 1][..]));
        let (kept, reduced) = sides(&Shape::new(&[7, 1, 3]).unwrap(), &[true, false, true]).unwrap();
        assert!(kept.sizes.is_empty());
        assert_eq!(reduced.sizes.as_slice(), [21]);
    }
}
