//! `Softmax`: exp(x) over its sum, along the last dimension. `LogSoftmax`: the logarithm of that.

use half::{bf16, f16};
use kolo_core::{DType, Error, PartialShape, Result};
use kolo_device::cpu::stream::is_streamed;
use kolo_device::cpu::{vectorize, vmath};
use kolo_device::cuda::{Args, ProgramKey};
use kolo_graph::{Gradient, GradientFn, HalfSafety, InferCtx, OpDef, Output, SplitRule};

use crate::cuda::rows::{rows_grid, rows_source};
use crate::cuda::{FLOATS, gpu};
use crate::math::binary::first;
use crate::nn::float::{Float, largest, sum_by};
use crate::nn::rows::{rows_per_fill, rows_per_task};
use crate::op::{Gpu, KernelDef, Op, cpu, gpu_kernel};
use crate::widened::compute_in;
use crate::{Cost, KernelCtx};

/// `exp(x)` over its sum along the last dimension.
#[track_caller]
pub fn softmax(logits: Output<'_>) -> Output<'_> {
    logits.graph().op("Softmax").input(logits).out()
}

/// The logarithm of [`softmax`], exact where that would be 0.
#[track_caller]
pub fn log_softmax(logits: Output<'_>) -> Output<'_> {
    logits.graph().op("LogSoftmax").input(logits).out()
}

pub(crate) static SOFTMAX: Op = op(
    "Softmax",
    "(logits:T) -> (softmax:T) ; T:type{half,bfloat16,float,double}",
    |op, dy| {
        let (dy, y) = (first(dy)?, op.output(0));
        Ok(vec![Some(((dy - sum_of_rows(dy * y)) * y).into())])
    },
    SOFTMAX_KERNELS,
)
.half(HalfSafety::Safe)
.split(SplitRule::Rows)
.gpu(&[gpu_kernel("T", FLOATS, |ctx| on_gpu(ctx, 0))]);
pub(crate) static LOG_SOFTMAX: Op = op(
    "LogSoftmax",
    "(logits:T) -> (logsoftmax:T) ; T:type{half,bfloat16,float,double}",
    |op, dy| {
        let (dy, y) = (first(dy)?, op.output(0));
        let softmax = op.graph().op("Exp").input(y).out();
        Ok(vec![Some((dy - sum_of_rows(dy) * softmax).into())])
    },
    LOG_SOFTMAX_KERNELS,
)
.half(HalfSafety::Safe)
.split(SplitRule::Rows)
.gpu(&[gpu_kernel("T", FLOATS, |ctx| on_gpu(ctx, 1))]);

const fn op(name: &'static str, signature: &'static str, gradient: GradientFn, kernels: &'static [KernelDef]) -> Op {
    Op {
        def: OpDef {
            name,
            signature,
            shape: |ctx: &InferCtx<'_>| -> Result<Vec<PartialShape>> {
                Ok(vec![ctx.input_of_rank_at_least(0, 1)?.clone()])
            },
            gradient: Gradient::Rule(gradient),
            ..OpDef::BASE
        },
        kernels,
        gpu: Gpu::Unstated,
        cost: Cost::Elements,
    }
}

/// The sum along the last dimension, which stays as size 1.
pub(crate) fn sum_of_rows(x: Output<'_>) -> Output<'_> {
    let last = x.graph().constant(vec![-1i32]);
    x.graph().op("Sum").input(x).input(last).attr("keep_dims", true).out()
}

const SOFTMAX_KERNELS: &[KernelDef] = &[
    cpu(DType::F32, softmax_f32),
    cpu(DType::F64, softmax_kernel::<f64>),
    cpu(DType::F16, |ctx| compute_in::<f16, f32>(ctx, softmax_f32)),
    cpu(DType::BF16, |ctx| compute_in::<bf16, f32>(ctx, softmax_f32)),
];

const LOG_SOFTMAX_KERNELS: &[KernelDef] = &[
    cpu(DType::F32, log_softmax_f32),
    cpu(DType::F64, log_softmax_kernel::<f64>),
    cpu(DType::F16, |ctx| compute_in::<f16, f32>(ctx, log_softmax_f32)),
    cpu(DType::BF16, |ctx| compute_in::<bf16, f32>(ctx, log_softmax_f32)),
];

fn softmax_f32(ctx: &mut KernelCtx<'_>) -> Result<()> {
    each_row_f32(ctx, vmath::softmax_f32, Some(vmath::softmax_f32_streamed))
}

fn log_softmax_f32(ctx: &mut KernelCtx<'_>) -> Result<()> {
    each_row_f32(ctx, vmath::log_softmax_f32, None)
}

/// A loop over rows: input, output, length of a row.
type Rows = fn(&[f32], &mut [f32], usize);

/// Runs `f` on the rows of the last dimension, some at a time; `streamed` if the result is large and its rows are not short.
fn each_row_f32(ctx: &mut KernelCtx<'_>, f: Rows, streamed: Option<Rows>) -> Result<()> {
    let shape = ctx.input(0)?.shape().clone();
    let Some(&n) = shape.last() else { return Err(no_dimension()) };
    let (mut out, in_place) = ctx.reuse_or_allocate(0, DType::F32, shape)?;
    let input = if in_place { None } else { Some(ctx.data::<f32>(0)?) };
    if n > 0 {
        let n_bytes = out.n_elements() * size_of::<f32>();
        match (input, streamed.filter(|_| is_streamed(n_bytes) && n >= 64)) {
            (Some(input), Some(f)) => {
                let chunk = (ctx.pool().stretch(n_bytes) / (size_of::<f32>() * n)).max(1) * n;
                ctx.pool().for_each_chunk(out.data_mut::<f32>()?, chunk, |i, out| {
                    f(&input[i * chunk..i * chunk + out.len()], out, n);
                });
            }
            (Some(input), None) => {
                let chunk = rows_per_fill::<f32>(input.len(), 1.0, n) * n;
                ctx.pool().fill_chunks(out.data_mut::<f32>()?, chunk, &|i, out| {
                    f(&input[i * chunk..i * chunk + out.len()], out, n);
                });
            }
            (None, _) => ctx.pool().for_each_chunk(out.data_mut::<f32>()?, rows_per_task(1.0, n) * n, |_, out| {
                let before = out.to_vec();
                f(&before, out, n);
            }),
        }
    }
    ctx.set_output(0, out);
    Ok(())
}

fn no_dimension() -> Error {
    Error::invalid_argument("logits must have >= 1 dimension, got 0")
}

fn softmax_kernel<T: Float>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    each_chunk_of_rows::<T>(
        ctx,
        #[inline(always)]
        |rows, n| {
            for row in rows.chunks_exact_mut(n) {
                let largest = largest(row);
                row.iter_mut().for_each(|x| *x = *x - largest);
            }
            // All rows in one loop: with few classes, a loop per row would be too short for vectors.
            rows.iter_mut().for_each(|x| *x = T::exponential(*x));
            for row in rows.chunks_exact_mut(n) {
                let scale = T::of(1.0) / sum_by(row, |x| x);
                row.iter_mut().for_each(|x| *x = *x * scale);
            }
        },
    )
}

fn log_softmax_kernel<T: Float>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    each_chunk_of_rows::<T>(
        ctx,
        #[inline(always)]
        |rows, n| {
            for row in rows.chunks_exact_mut(n) {
                let largest = largest(row);
                let shift = num_traits::Float::ln(sum_by(row, |x| T::exponential(x - largest)));
                row.iter_mut().for_each(|x| *x = *x - largest - shift);
            }
        },
    )
}

/// Runs `f(rows, length of a row)` in place on a copy of the rows of the last dimension, some at a time, or on the input
/// itself if it dies here.
fn each_chunk_of_rows<T: Float>(ctx: &mut KernelCtx<'_>, f: impl Fn(&mut [T], usize) + Sync) -> Result<()> {
    let shape = ctx.input(0)?.shape().clone();
    let Some(&n) = shape.last() else { return Err(no_dimension()) };
    let (mut out, in_place) = ctx.reuse_or_allocate(0, T::DTYPE, shape)?;
    let input = if in_place { None } else { Some(ctx.data::<T>(0)?) };
    if n > 0 {
        let chunk = rows_per_task(3.0, n) * n;
        ctx.pool().for_each_chunk(out.data_mut::<T>()?, chunk, |i, out| {
            if let Some(input) = input {
                out.copy_from_slice(&input[i * chunk..i * chunk + out.len()]);
            }
            vectorize(
                #[inline(always)]
                || f(out, n),
            );
        });
    }
    ctx.set_output(0, out);
    Ok(())
}

const NAMES: [&str; 2] = ["softmax", "log_softmax"];
const TEXT: &str = include_str!("softmax.cu");

/// The GPU kernel of this kind; see `softmax.cu`.
fn on_gpu(ctx: &mut KernelCtx<'_>, kind: usize) -> Result<()> {
    let (dtype, shape) = (ctx.input(0)?.dtype(), ctx.input(0)?.shape().clone());
    let Some(&n) = shape.last() else {
        return Err(Error::invalid_argument("logits must have >= 1 dimension, got 0"));
    };
    let device = gpu(ctx)?;
    let mut out = ctx.allocate(dtype, shape.clone())?;
    if shape.n_elements() > 0 {
        let args = Args::new().input(ctx.input(0)?).output(&mut out).size(n);
        let key = ProgramKey { family: "softmax", op: NAMES[kind], dtypes: [Some(dtype), None, None], variant: 0 };
        let kernel = device.function(&key, || rows_source(kind, dtype, None, TEXT))?;
        device.launch(kernel, rows_grid(shape.n_elements() / n, n)?, &args)?;
    }
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check_op, tensor, wavy};

    /// Large enough to go past the caches of most machines; the first rows alone are not.
    #[test]
    fn large_results_are_those_of_small_ones() {
        let values: Vec<f32> = (0..1030 * 4100).map(|i| (i * 37 % 1009) as f32 * 0.01).collect();
        let few = check_op("Softmax").input(tensor([3, 4100], &values[..3 * 4100])).run(false).unwrap();
        let last = check_op("Softmax").input(tensor([1, 4100], &values[1029 * 4100..])).run(false).unwrap();
        let all = check_op("Softmax").input(tensor([1030, 4100], values)).run(false).unwrap();
        let (all, few, last) = (all[0].data::<f32>().unwrap(), few[0].data().unwrap(), last[0].data().unwrap());
        assert!(all[..3 * 4100] == *few && all[1029 * 4100..] == *last);
    }

    #[test]
    fn values_are_tensorflows() {
        check_op("Softmax").input(wavy([2, 5], 1)).gives(tensor(
            [2, 5],
            [
                0.11305618f32,
                0.50768363,
                0.12125794,
                0.03905381,
                0.21894841,
                0.36088005,
                0.053902034,
                0.04418489,
                0.311371,
                0.22966202,
            ],
        ));
        check_op("LogSoftmax").input(wavy([2, 5], 1)).gives(tensor(
            [2, 5],
            [
                -2.1798704f32,
                -0.6778968,
                -2.1098354,
                -3.2428148,
                -1.5189192,
                -1.0192097,
                -2.920587,
                -3.1193724,
                -1.1667702,
                -1.4711466,
            ],
        ));
        check_op("Softmax").input([1000.0f32, 0.0, -1000.0]).gives([1.0f32, 0.0, 0.0]);
        check_op("LogSoftmax").input([1000.0f64, 0.0, -1000.0]).gives([0.0f64, -1000.0, -2000.0]);
        check_op("Softmax").input(tensor::<f32, 2>([0, 3], [])).gives(tensor::<f32, 2>([0, 3], []));
        check_op("Softmax").input(tensor::<f32, 2>([3, 0], [])).gives(tensor::<f32, 2>([3, 0], []));
        check_op("Softmax").input(1.0f32).fails("at least rank 1");
    }

    #[test]
    fn gradients() {
        check_op("Softmax").input(wavy([2, 2, 3], 1)).gradient();
        check_op("LogSoftmax").input(wavy([2, 3], 2)).gradient();
    }

    #[test]
    fn sources_compile() {
        let all = FLOATS.iter().flat_map(|&dtype| {
            NAMES.iter().enumerate().map(move |(kind, op)| {
                let key = ProgramKey { family: "softmax", op, dtypes: [Some(dtype), None, None], variant: 0 };
                (key, rows_source(kind, dtype, None, TEXT))
            })
        });
        crate::cuda::tests::compiles(all);
    }
}
