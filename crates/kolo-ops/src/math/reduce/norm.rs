//! `EuclideanNorm` over axes, and `L2Loss`: half the square of the norm of a whole tensor.

use half::{bf16, f16};
use kolo_core::{Result, Shape};
use kolo_graph::{Grad, Gradient, HalfSafety, OpDef, Operation, Output, shape_fns};
use smallvec::SmallVec;

use crate::cuda::FLOATS;
use crate::cuda::reduce as on_gpu;
use crate::math::binary::first;
use crate::math::number::{Number, Real};
use crate::math::reduce::sum::{NUMBERS, reduction};
use crate::math::reduce::walk::{Reducer, Reduction};
use crate::math::reduce::{reduce, spread};
use crate::op::{Gpu, KernelDef, Op, cpu_kernels, gpu_kernel};
use crate::{Cost, KernelCtx};

/// The root of the sum of squares over `axes`, which are removed.
#[track_caller]
pub fn euclidean_norm<'g>(x: Output<'g>, axes: &[i32]) -> Output<'g> {
    x.graph().op("EuclideanNorm").input(x).input(x.graph().constant(axes)).out()
}

/// Half the sum of the squares of all elements.
#[track_caller]
pub fn l2_loss(x: Output<'_>) -> Output<'_> {
    x.graph().op("L2Loss").input(x).out()
}

pub(crate) static EUCLIDEAN_NORM: Op = reduction("EuclideanNorm", NUMBERS, NORM_KERNELS, Gradient::Rule(norm_gradient))
    .half(HalfSafety::Wide)
    .host_args(&["reduction_indices"])
    .gpu(&[gpu_kernel("T", FLOATS, |ctx| on_gpu::reduce(ctx, &GPU_NORM))]);

pub(crate) static L2_LOSS: Op = Op {
    def: OpDef {
        name: "L2Loss",
        signature: "(t:T) -> (output:T) ; T:type{half,bfloat16,float,double}",
        shape: shape_fns::scalars,
        gradient: Gradient::Rule(|op, dy| Ok(vec![Some((op.input(0) * first(dy)?).into())])),
        half: HalfSafety::Wide,
        ..OpDef::BASE
    },
    kernels: LOSS_KERNELS,
    gpu: Gpu::Kernels(&[gpu_kernel("T", FLOATS, loss_on_gpu)]),
    cost: Cost::Elements,
};

/// `d‖x‖ = x / ‖x‖`.
fn norm_gradient<'g>(op: Operation<'g>, dy: &[Option<Output<'g>>]) -> Result<Vec<Option<Grad<'g>>>> {
    let each = first(dy)? / op.output(0);
    Ok(vec![Some((op.input(0) * spread(op, each)).into()), None])
}

#[derive(Clone, Copy)]
struct Norm;

impl<T: Number> Reducer<T> for Norm {
    const KEEPS_ONE: bool = false;
    type Acc = T;
    const START: T = T::ZERO;
    #[inline(always)]
    fn step(acc: T, x: T) -> T {
        acc.add(x.mul(x))
    }
    #[inline(always)]
    fn join(a: T, b: T) -> T {
        a.add(b)
    }
    #[inline(always)]
    fn finish(acc: T, _: usize) -> T {
        T::from_f64(acc.to_f64().sqrt())
    }
}

#[derive(Clone, Copy)]
struct HalfSquares;

impl<T: Real> Reducer<T> for HalfSquares {
    const KEEPS_ONE: bool = false;
    type Acc = T;
    const START: T = T::ZERO;
    #[inline(always)]
    fn step(acc: T, x: T) -> T {
        acc + x * x
    }
    #[inline(always)]
    fn join(a: T, b: T) -> T {
        a + b
    }
    #[inline(always)]
    fn finish(acc: T, _: usize) -> T {
        acc / (T::ONE + T::ONE)
    }
}

fn norm_kernel<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    reduce::<T, Norm>(ctx)
}

fn loss_kernel<T: Real>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let mut out = ctx.allocate(T::DTYPE, Shape::scalar())?;
    let values = ctx.data::<T>(0)?;
    match values.len() {
        0 => out.data_mut::<T>()?.fill(T::ZERO),
        n => Reduction::new(&[n], &[true]).run::<T, HalfSquares>(ctx.pool(), values, out.data_mut()?),
    }
    ctx.set_output(0, out);
    Ok(())
}

const NORM_KERNELS: &[KernelDef] =
    cpu_kernels!(norm_kernel: f32, f64, i32, i64, u64; f16, bf16, i8 as i64, i16 as i64, u8 as i64, u16 as i64, u32);
const LOSS_KERNELS: &[KernelDef] = cpu_kernels!(loss_kernel: f32, f64; f16, bf16);

pub(crate) const GPU_NORM: on_gpu::Reducer =
    on_gpu::Reducer { name: "norm", step: "(a) + (A)(x) * (A)(x)", finish: "sqrt(a)", keeps_one: false, ..on_gpu::SUM };

pub(crate) const GPU_HALF_SQUARES: on_gpu::Reducer =
    on_gpu::Reducer { name: "half_squares", finish: "(a) / (A)2", ..GPU_NORM };

fn loss_on_gpu(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let shape = ctx.input(0)?.shape().clone();
    let all: SmallVec<[bool; 8]> = SmallVec::from_elem(true, shape.rank());
    let out = on_gpu::reduced(ctx, &GPU_HALF_SQUARES, &shape, &all, Shape::scalar())?;
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use half::f16;

    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn norms() {
        check_op("EuclideanNorm").input([[3.0f32, 4.0], [6.0, 8.0]]).input([1i32]).gives([5.0f32, 10.0]);
        check_op("EuclideanNorm").input([2i32, 3]).input([0i32]).gives(3i32);
        check_op("L2Loss").input([[3.0f32, 4.0]]).gives(12.5f32);
        check_op("L2Loss").input(f16::from_f32(2.0)).gives(f16::from_f32(2.0));
        check_op("L2Loss").input(tensor::<f64, 1>([0], [])).gives(0.0f64);
    }

    #[test]
    fn gradients() {
        check_op("EuclideanNorm").input(wavy([2, 3], 1)).input([1i32]).gradient();
        check_op("EuclideanNorm").attr("keep_dims", true).input(wavy([2, 3], 1)).input([0i32, 1]).gradient();
        check_op("L2Loss").input(wavy([2, 3], 1)).gradient();
    }
}
