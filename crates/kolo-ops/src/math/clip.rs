//! `ClipByValue`: every element brought between a lower and an upper bound.

use half::{bf16, f16};
use kolo_core::{Error, PartialShape, Result};
use kolo_device::cpu::pool;
use kolo_graph::{Elements, Elementwise, Grad, Gradient, HalfSafety, IntoOutput, OpDef, Operation, Output, ShapesFit};

use crate::cuda::NUMBERS;
use crate::cuda::elementwise::Map;
use crate::kernel::KernelInit;
use crate::math::binary::first;
use crate::math::elementwise::map;
use crate::math::number::Number;
use crate::op::{Gpu, KernelMaker, Op, cpu_kernels, gpu_made};
use crate::{Cost, Kernel, KernelCtx};

/// `x` with what is below `min` raised to it and what is above `max` lowered to it. Each bound is a single value or has
/// the shape of `x`.
#[track_caller]
pub fn clip_by_value<'g>(x: Output<'g>, min: impl IntoOutput<'g>, max: impl IntoOutput<'g>) -> Output<'g> {
    let (graph, dtype) = (x.graph(), x.dtype());
    graph.op("ClipByValue").inputs([x, min.into_output(graph, dtype), max.into_output(graph, dtype)]).out()
}

pub(crate) static CLIP_BY_VALUE: Op = Op {
    def: OpDef {
        name: "ClipByValue",
        signature: "(t:T, clip_value_min:T, clip_value_max:T) -> (output:T) ; T:type{num}",
        shape: |ctx| {
            let mut shape = ctx.input(0).clone();
            for bound in [ctx.input(1), ctx.input(2)] {
                if bound.rank().is_some_and(|rank| rank > 0) {
                    shape = shape.merge(bound).map_err(|_| bad_bound(ctx.input(0), bound))?;
                }
            }
            Ok(vec![shape])
        },
        gradient: Gradient::Rule(gradient),
        elementwise: Some(Elementwise::new("smaller(larger(x0, x1), x2)", Elements::Numbers).shapes(ShapesFit::Own)),
        half: HalfSafety::Neutral,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(forward: f32, f64, i32, i64, u64; f16, bf16, i8, i16, u8, u16, u32),
    gpu: Gpu::Kernels(&[gpu_made("T", NUMBERS, KernelMaker::Object(ClipOnGpu::make))]),
    cost: Cost::Elements,
};

fn bad_bound(x: &PartialShape, bound: &PartialShape) -> Error {
    Error::invalid_argument(format!(
        "clip_value_min and clip_value_max must be either of the same shape as input, or a scalar. \
         input shape: {x}, bound shape: {bound}"
    ))
}

/// Each element's gradient goes to where its value came from.
fn gradient<'g>(op: Operation<'g>, dy: &[Option<Output<'g>>]) -> Result<Vec<Option<Grad<'g>>>> {
    let (graph, dy) = (op.graph(), first(dy)?);
    let (x, min, max) = (op.input(0), op.input(1), op.input(2));
    let zero = 0.0.into_output(graph, dy.dtype());
    let below = graph.op("Less").input(x).input(min).out();
    let above = graph.op("Greater").input(x).input(max).out();
    let outside = graph.op("LogicalOr").input(below).input(above).out();
    let of_bound = |mask: Output<'g>, bound: Output<'g>| {
        let grad = graph.op("SelectV2").inputs([mask, dy, zero]).out();
        let shapes = [bound, x].map(|of| graph.op("Shape").input(of).out());
        let axes = graph.op("BroadcastGradientArgs").inputs(shapes).build();
        let sum = graph.op("Sum").input(grad).input(axes.output(0)).out();
        graph.op("Reshape").input(sum).input(shapes[0]).out()
    };
    let dx = graph.op("SelectV2").inputs([outside, zero, dy]).out();
    Ok(vec![Some(dx.into()), Some(of_bound(below, min).into()), Some(of_bound(above, max).into())])
}

/// Each bound has one element, or one for each of the input's.
fn check_bounds(ctx: &KernelCtx<'_>) -> Result<()> {
    let shape = ctx.input(0)?.shape();
    for i in [1, 2] {
        let bound = ctx.input(i)?.shape();
        if bound != shape && bound.n_elements() != 1 {
            return Err(bad_bound(&shape.into(), &bound.into()));
        }
    }
    Ok(())
}

fn forward<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    check_bounds(ctx)?;
    let shape = ctx.input(0)?.shape().clone();
    let (min, max) = (ctx.input(1)?.clone(), ctx.input(2)?.clone());
    let (min, max) = (min.data::<T>()?, max.data::<T>()?);
    if let ([min], [max]) = (min, max) {
        let (min, max) = (*min, *max);
        return map::<T, T>(
            ctx,
            0.3,
            #[inline(always)]
            move |x| clip(x, min, max),
        );
    }
    let (mut out, in_place) = ctx.reuse_or_allocate(0, T::DTYPE, shape)?;
    if !in_place {
        out.data_mut::<T>()?.copy_from_slice(ctx.data(0)?);
    }
    let chunk = pool::grain(0.5);
    ctx.pool().for_each_chunk(out.data_mut::<T>()?, chunk, |task, out| {
        let at = |bound: &[T], i: usize| if bound.len() == 1 { bound[0] } else { bound[task * chunk + i] };
        for (i, x) in out.iter_mut().enumerate() {
            *x = clip(*x, at(min, i), at(max, i));
        }
    });
    ctx.set_output(0, out);
    Ok(())
}

/// The upper bound wins if the bounds contradict each other, as in TensorFlow.
#[inline(always)]
fn clip<T: Number>(x: T, min: T, max: T) -> T {
    x.max(min).min(max)
}

/// `ClipByValue`, whose bounds have shapes of their own.
struct ClipOnGpu(Map);

impl ClipOnGpu {
    fn make(init: &KernelInit<'_>) -> Result<Box<dyn Kernel>> {
        Ok(Box::new(ClipOnGpu(Map::new(init)?)))
    }
}

impl Kernel for ClipOnGpu {
    fn compute(&self, ctx: &mut KernelCtx<'_>) -> Result<()> {
        check_bounds(ctx)?;
        self.0.compute(ctx)
    }
}

#[cfg(test)]
mod tests {
    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn clipping() {
        let x = [-2.0f32, 0.5, 3.0, f32::NAN];
        check_op("ClipByValue").input(x).input(-1.0f32).input(1.0f32).gives([-1.0f32, 0.5, 1.0, f32::NAN]);
        check_op("ClipByValue").input([1i32, 2, 3]).input([2i32, 2, 2]).input(2i32).gives([2i32, 2, 2]);
        check_op("ClipByValue").input([1i32, 5, 3]).input(0i32).input([0i32, 9, 2]).gives([0i32, 5, 2]);
        check_op("ClipByValue").input([1.0f32]).input(3.0f32).input(2.0f32).gives([2.0f32]);
        check_op("ClipByValue")
            .input(tensor::<f32, 1>([0], []))
            .input(0.0f32)
            .input(1.0f32)
            .gives(tensor::<f32, 1>([0], []));
        check_op("ClipByValue").input(x).input([0.0f32, 1.0]).input(1.0f32).fails("must be either of the same shape");
    }

    #[test]
    fn gradients() {
        check_op("ClipByValue").input(wavy([5], 1)).input(-0.5f32).input(0.6f32).gradient();
        check_op("ClipByValue").input(wavy([4], 1)).input(tensor([4], [-0.5f32; 4])).input(0.6f32).gradient();
    }
}
