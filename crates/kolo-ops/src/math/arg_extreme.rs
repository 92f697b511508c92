//! `ArgMax`, `ArgMin`: where along an axis the largest or smallest element is; the first of equals.

use half::{bf16, f16};
use kolo_core::{DType, Dim, Element, Error, PartialShape, Result, Shape, Tensor};
use kolo_device::cpu::pool;
use kolo_device::cuda::{Args, CudaDevice, Grid, ProgramKey};
use kolo_graph::shape_fns::resolve_axis;
use kolo_graph::{Gradient, HalfSafety, InferCtx, OpDef, Output};
use smallvec::SmallVec;

use crate::cuda::{PLAIN, c_type, gpu};
use crate::math::elementwise::{collect, lanes};
use crate::math::number::Number;
use crate::math::segment::unsorted::segment_ids;
use crate::op::{Gpu, KernelDef, Op, cpu, cpu_kernels, gpu_kernel};
use crate::widened::finite_range;
use crate::{Cost, KernelCtx};

/// The position of the largest element along `axis`, as int64.
#[track_caller]
pub fn argmax(x: Output<'_>, axis: i32) -> Output<'_> {
    x.graph().op("ArgMax").input(x).input(x.graph().constant(axis)).out()
}

/// The position of the smallest element along `axis`, as int64.
#[track_caller]
pub fn argmin(x: Output<'_>, axis: i32) -> Output<'_> {
    x.graph().op("ArgMin").input(x).input(x.graph().constant(axis)).out()
}

pub(crate) static ARG_MAX: Op = arg_extreme(
    "ArgMax",
    "(input:T, dimension:Tidx) -> (output:output_type) ; \
     T:type{real,quantized,bool}, Tidx:type{int16,int32,int64}=int32, output_type:type{int16,uint16,int32,int64}=int64",
    MAX_KERNELS,
)
.half(HalfSafety::Neutral)
.host_args(&["dimension"])
.gpu(&[gpu_kernel("T", PLAIN, |ctx| on_gpu(ctx, true))]);
pub(crate) static ARG_MIN: Op = arg_extreme(
    "ArgMin",
    "(input:T, dimension:Tidx) -> (output:output_type) ; \
     T:type{real,quantized,bool}, Tidx:type{int32,int64}=int32, output_type:type{int32,int64}=int64",
    MIN_KERNELS,
)
.half(HalfSafety::Neutral)
.host_args(&["dimension"])
.gpu(&[gpu_kernel("T", PLAIN, |ctx| on_gpu(ctx, false))]);

const fn arg_extreme(name: &'static str, signature: &'static str, kernels: &'static [KernelDef]) -> Op {
    Op {
        def: OpDef {
            name,
            signature,
            shape,
            gradient: Gradient::None("a position is piecewise constant"),
            ..OpDef::BASE
        },
        kernels,
        gpu: Gpu::Unstated,
        cost: Cost::Elements,
    }
}

fn shape(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let Some(dims) = ctx.input(0).dims() else { return Ok(vec![PartialShape::unknown()]) };
    if dims.is_empty() {
        return Ok(vec![PartialShape::scalar()]);
    }
    let left: Vec<Dim> = match ctx.constant_integers(1).as_deref() {
        Some([axis]) => {
            let axis = resolve_axis(*axis, dims.len())?;
            dims.iter().enumerate().filter(|(i, _)| *i != axis).map(|(_, dim)| *dim).collect()
        }
        _ => vec![None; dims.len() - 1],
    };
    Ok(vec![PartialShape::new(&left)])
}

/// `better(new, best)` says whether a later element replaces the best so far, which is `worst` at first: NaN is never
/// better, so it is found only if nothing else is.
fn find<T: Element>(ctx: &mut KernelCtx<'_>, worst: T, better: impl Fn(T, T) -> bool + Sync) -> Result<()> {
    let shape = ctx.input(0)?.shape().clone();
    let axis = match segment_ids(ctx, 1)?.as_slice() {
        [axis] => *axis,
        _ => return Err(Error::invalid_argument("dim must be a scalar, but received tensor of another shape")),
    };
    // A scalar counts as a vector of one element.
    let dims = if shape.rank() == 0 { &[1][..] } else { &shape[..] };
    let axis = resolve_axis(axis, dims.len())?;
    let (n, inner) = (dims[axis], dims[axis + 1..].iter().product::<usize>());
    if n == 0 {
        return Err(Error::invalid_argument(format!("Reduction axis {axis} is empty in shape {shape}")));
    }
    let left: Vec<usize> = dims.iter().enumerate().filter(|(i, _)| *i != axis).map(|(_, &dim)| dim).collect();
    let left = Shape::new(&left)?;
    let values = ctx.data::<T>(0)?;
    let mut positions = vec![0usize; left.n_elements()];
    let per_task = (pool::grain(0.7) / n).max(1);
    ctx.pool().for_each_chunk(&mut positions, per_task, |task, positions| {
        for (i, position) in positions.iter_mut().enumerate() {
            let at = task * per_task + i;
            let first = at / inner * n * inner + at % inner;
            if inner == 1 {
                *position = along(&values[first..first + n], worst, &better);
                continue;
            }
            let (mut best, mut found) = (worst, 0);
            for (j, &x) in values[first..].iter().step_by(inner).take(n).enumerate() {
                if better(x, best) {
                    (best, found) = (x, j);
                }
            }
            *position = found;
        }
    });
    let out = match ctx.attrs().dtype("output_type")? {
        DType::I64 => collect(ctx, left, |i| positions[i] as i64)?,
        DType::I16 => collect(ctx, left, |i| positions[i] as i16)?,
        DType::U16 => collect(ctx, left, |i| positions[i] as u16)?,
        _ => collect(ctx, left, |i| positions[i] as i32)?,
    };
    ctx.set_output(0, out);
    Ok(())
}

/// The position of the best value of a row: first which value it is, side by side, then where it is first found.
fn along<T: Element>(row: &[T], worst: T, better: &impl Fn(T, T) -> bool) -> usize {
    let best = lanes::<T, _>(
        #[inline(always)]
        || {
            let pick = |best: T, x: T| if better(x, best) { x } else { best };
            let mut side_by_side = [worst; 32];
            let (blocks, rest) = row.as_chunks::<32>();
            for block in blocks {
                side_by_side.iter_mut().zip(block).for_each(|(best, &x)| *best = pick(*best, x));
            }
            side_by_side.iter().chain(rest).fold(worst, |best, &x| pick(best, x))
        },
    );
    // If nothing is better than the worst there is, it is the first.
    if !better(best, worst) {
        return 0;
    }
    let (mut at, blocks) = (0, row.chunks(64));
    for block in blocks {
        let found = lanes::<T, _>(
            #[inline(always)]
            || block.iter().fold(false, |found, x| found | (*x == best)),
        );
        if found {
            return at + block.iter().position(|x| *x == best).unwrap_or(0);
        }
        at += block.len();
    }
    0
}

fn max_kernel<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    find::<T>(
        ctx,
        finite_range(ctx.attrs().dtype("T")?).0,
        #[inline(always)]
        |new, best| new > best,
    )
}

fn min_kernel<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    find::<T>(
        ctx,
        finite_range(ctx.attrs().dtype("T")?).1,
        #[inline(always)]
        |new, best| new < best,
    )
}

fn max_bool(ctx: &mut KernelCtx<'_>) -> Result<()> {
    find(ctx, false, |new: bool, best| new & !best)
}

fn min_bool(ctx: &mut KernelCtx<'_>) -> Result<()> {
    find(ctx, true, |new: bool, best| !new & best)
}

const MAX_KERNELS: &[KernelDef] = cpu_kernels!(max_kernel: f32, f64, i32, i64, u64; f16, bf16, i8, i16, u8, u16, u32 | own cpu(DType::Bool, max_bool));
const MIN_KERNELS: &[KernelDef] = cpu_kernels!(min_kernel: f32, f64, i32, i64, u64; f16, bf16, i8, i16, u8, u16, u32 | own cpu(DType::Bool, min_bool));

fn on_gpu(ctx: &mut KernelCtx<'_>, max: bool) -> Result<()> {
    let shape = ctx.input(0)?.shape().clone();
    let axis = ctx.input(1)?;
    let axis = match (axis.n_elements(), axis.dtype()) {
        (1, DType::I16) => i64::from(axis.scalar_value::<i16>()?),
        (1, _) => axis.integers()?[0],
        _ => return Err(Error::invalid_argument("dim must be a scalar, but received tensor of another shape")),
    };
    let dims = if shape.rank() == 0 { &[1][..] } else { &shape[..] };
    let axis = resolve_axis(axis, dims.len())?;
    let (n, inner) = (dims[axis], dims[axis + 1..].iter().product::<usize>());
    if n == 0 {
        return Err(Error::invalid_argument(format!("Reduction axis {axis} is empty in shape {shape}")));
    }
    let left: SmallVec<[usize; 8]> = dims.iter().enumerate().filter(|(i, _)| *i != axis).map(|(_, &dim)| dim).collect();
    let to = ctx.attrs().dtype("output_type")?;
    let (dtype, device) = (ctx.input(0)?.dtype(), gpu(ctx)?);
    let mut out = ctx.allocate(to, Shape::new(&left)?)?;
    let n_out = out.n_elements();
    if n_out > 0 {
        find_on_gpu(device, ctx.input(0)?, &mut out, dtype, max, n, inner)?;
    }
    ctx.set_output(0, out);
    Ok(())
}

/// A thread for each place along what is left, or, where the axis is innermost and long, a warp.
fn find_on_gpu(
    device: &CudaDevice,
    input: &Tensor,
    out: &mut Tensor,
    dtype: DType,
    max: bool,
    n: usize,
    inner: usize,
) -> Result<()> {
    let (name, to) = (if max { "argmax" } else { "argmin" }, out.dtype());
    let key = ProgramKey { family: "arg", op: name, dtypes: [Some(dtype), Some(to), None], variant: 0 };
    let kernel = device.function(&key, || source(dtype, to, max))?;
    let n_out = out.n_elements();
    let args = Args::new().input(input).output(out).size(n_out).size(n).size(inner);
    device.launch(kernel, Grid::blocks(n_out.div_ceil(8), 256)?, &args)
}

fn source(dtype: DType, to: DType, max: bool) -> String {
    // The ends of what the type can say, infinities apart, as on the CPU.
    let (least, greatest) = match dtype {
        DType::F16 => ("-65504.0f", "65504.0f"),
        DType::BF16 => ("-3.3895313892515355e38f", "3.3895313892515355e38f"),
        DType::F32 => ("-3.4028234663852886e38f", "3.4028234663852886e38f"),
        DType::F64 => ("-1.7976931348623157e308", "1.7976931348623157e308"),
        DType::Bool => ("false", "true"),
        DType::I8 => ("-128", "127"),
        DType::I16 => ("-32768", "32767"),
        DType::I32 => ("(i32)0x80000000u", "0x7fffffff"),
        DType::U8 => ("0", "255"),
        DType::U16 => ("0", "65535"),
        DType::U32 => ("0", "0xffffffffu"),
        DType::U64 => ("0", "0xffffffffffffffffull"),
        _ => ("(i64)0x8000000000000000ull", "0x7fffffffffffffffll"),
    };
    format!(
        "typedef {} T;\ntypedef {} U;\ntypedef Wide<T>::type W;\n#define BETTER {}\n#define WORST ((W){})\n{}",
        c_type(dtype),
        c_type(to),
        if max { ">" } else { "<" },
        if max { least } else { greatest },
        include_str!("arg_extreme.cu")
    )
}

#[cfg(test)]
mod tests {
    use kolo_device::cuda::ProgramKey;

    use super::source;
    use kolo_core::DType;

    use crate::testing::{check_op, tensor};

    #[test]
    fn positions() {
        let x = [[1.0f32, 5.0, 5.0], [7.0, 2.0, 6.0]];
        check_op("ArgMax").input(x).input(0i32).gives([1i64, 0, 1]);
        check_op("ArgMax").input(x).input(1i64).gives([1i64, 0]);
        check_op("ArgMin").input(x).input(-1i32).gives([0i64, 1]);
        check_op("ArgMin").attr("output_type", DType::I32).input([3i32, 1, 1]).input(0i32).gives(1i32);
        check_op("ArgMax").attr("output_type", DType::U16).input([3u8, 1, 9]).input(0i16).gives(2u16);
        check_op("ArgMax").input(4.0f32).input(0i32).gives(0i64);
        let deep = tensor([2, 2, 2], [1i32, 8, 3, 4, 9, 2, 0, 5]);
        check_op("ArgMax").input(deep).input(1i32).gives([[1i64, 0], [0, 1]]);
        check_op("ArgMax").input(tensor::<f32, 2>([0, 3], [])).input(1i32).gives(tensor::<i64, 1>([0], []));
        check_op("ArgMax").input(tensor::<f32, 2>([3, 0], [])).input(1i32).fails("Reduction axis 1 is empty");
        check_op("ArgMax").input(x).input(2i32).fails("axis 2 is out of range for rank 2");
    }

    #[test]
    fn many_rows_are_split_without_gaps() {
        let (rows, n) = (5003, 17);
        let values: Vec<f32> = (0..rows * n).map(|i| ((i % n + i / n) % n) as f32).collect();
        let expected: Vec<i64> = (0..rows).map(|row| ((n - 1 + n - row % n) % n) as i64).collect();
        check_op("ArgMax").input(tensor([rows, n], values)).input(1i32).gives(expected);
    }

    #[test]
    fn sources_compile() {
        let all = [DType::F32, DType::F64, DType::F16, DType::I64, DType::Bool, DType::U8].map(|dtype| {
            let key = ProgramKey { family: "arg", op: "argmax", dtypes: [Some(dtype), None, None], variant: 0 };
            (key, source(dtype, DType::I64, true))
        });
        crate::cuda::tests::compiles(all);
    }
}
