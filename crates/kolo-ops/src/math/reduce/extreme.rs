//! `Max` and `Min` over axes. NaN wins over everything.

use half::{bf16, f16};
use kolo_core::Result;
use kolo_graph::{Combine, Grad, Gradient, HalfSafety, HostRule, Operation, Output, SplitRule};

use crate::KernelCtx;
use crate::cuda;
use crate::cuda::reduce as on_gpu;
use crate::math::binary::first;
use crate::math::number::Number;
use crate::math::reduce::sum::{over_all, reduction};
use crate::math::reduce::walk::Reducer;
use crate::math::reduce::{reduce, spread};
use crate::op::{KernelDef, Op, cpu_kernels, gpu_kernel};
use crate::widened::keep_in_range;

/// The largest element over `axes`, which are removed; negative axes count from the end.
#[track_caller]
pub fn max<'g>(x: Output<'g>, axes: &[i32]) -> Output<'g> {
    x.graph().op("Max").input(x).input(x.graph().constant(axes)).out()
}

/// The largest of all elements.
#[track_caller]
pub fn max_all(x: Output<'_>) -> Output<'_> {
    over_all(x, "Max")
}

/// The smallest element over `axes`, which are removed; negative axes count from the end.
#[track_caller]
pub fn min<'g>(x: Output<'g>, axes: &[i32]) -> Output<'g> {
    x.graph().op("Min").input(x).input(x.graph().constant(axes)).out()
}

/// The smallest of all elements.
#[track_caller]
pub fn min_all(x: Output<'_>) -> Output<'_> {
    over_all(x, "Min")
}

const ORDERED: &str = "(input:T, reduction_indices:Tidx) -> (output:T) ; \
    keep_dims:bool=false, T:type{real,quantized}, Tidx:type{int32,int64}=int32";

pub(crate) static MAX: Op = reduction("Max", ORDERED, MAX_KERNELS, Gradient::Rule(gradient))
    .host(HostRule::SmallIntegers)
    .half(HalfSafety::Neutral)
    .split(SplitRule::Reduction(Combine::Max))
    .host_args(&["reduction_indices"])
    .gpu(&[gpu_kernel("T", cuda::NUMBERS, |ctx| on_gpu::reduce(ctx, &GPU_MAX))]);
pub(crate) static MIN: Op = reduction("Min", ORDERED, MIN_KERNELS, Gradient::Rule(gradient))
    .host(HostRule::SmallIntegers)
    .half(HalfSafety::Neutral)
    .split(SplitRule::Reduction(Combine::Min))
    .host_args(&["reduction_indices"])
    .gpu(&[gpu_kernel("T", cuda::NUMBERS, |ctx| on_gpu::reduce(ctx, &GPU_MIN))]);

/// Elements that are equally extreme share the gradient.
fn gradient<'g>(op: Operation<'g>, dy: &[Option<Output<'g>>]) -> Result<Vec<Option<Grad<'g>>>> {
    let (graph, x, dy) = (op.graph(), op.input(0), first(dy)?);
    let is_chosen = graph.op("Equal").input(x).input(spread(op, op.output(0))).out();
    let is_chosen = graph.op("Cast").input(is_chosen).attr("DstT", dy.dtype()).out();
    let keep = op.attrs(|attrs| attrs.bool("keep_dims"))?;
    let n_chosen = graph.op("Sum").input(is_chosen).input(op.input(1)).attr("keep_dims", keep).out();
    Ok(vec![Some((is_chosen * spread(op, dy / n_chosen)).into()), None])
}

#[derive(Clone, Copy)]
pub(crate) struct Max;

impl<T: Number> Reducer<T> for Max {
    type Acc = T;
    const START: T = T::LOWEST;
    #[inline(always)]
    fn step(acc: T, x: T) -> T {
        acc.max(x)
    }
    #[inline(always)]
    fn join(a: T, b: T) -> T {
        a.max(b)
    }
    #[inline(always)]
    fn finish(acc: T, _: usize) -> T {
        acc
    }
    #[inline(always)]
    fn decides(x: T) -> bool {
        is_nan(x)
    }
    #[inline(always)]
    fn lane_step(acc: T, x: T) -> T {
        if x > acc { x } else { acc }
    }
    #[inline(always)]
    fn lane_join(a: T, b: T) -> T {
        if b > a { b } else { a }
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Min;

impl<T: Number> Reducer<T> for Min {
    type Acc = T;
    const START: T = T::HIGHEST;
    #[inline(always)]
    fn step(acc: T, x: T) -> T {
        acc.min(x)
    }
    #[inline(always)]
    fn join(a: T, b: T) -> T {
        a.min(b)
    }
    #[inline(always)]
    fn finish(acc: T, _: usize) -> T {
        acc
    }
    #[inline(always)]
    fn decides(x: T) -> bool {
        is_nan(x)
    }
    #[inline(always)]
    fn lane_step(acc: T, x: T) -> T {
        if x < acc { x } else { acc }
    }
    #[inline(always)]
    fn lane_join(a: T, b: T) -> T {
        if b < a { b } else { a }
    }
}

#[inline(always)]
fn is_nan<T: Number>(x: T) -> bool {
    x.partial_cmp(&x).is_none()
}

fn max_kernel<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    reduce::<T, Max>(ctx)?;
    keep_in_range::<T>(ctx)
}

fn min_kernel<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    reduce::<T, Min>(ctx)?;
    keep_in_range::<T>(ctx)
}

const MAX_KERNELS: &[KernelDef] = cpu_kernels!(max_kernel: f32, f64, i32, i64, u64; f16, bf16, i8, i16, u8, u16, u32);
const MIN_KERNELS: &[KernelDef] = cpu_kernels!(min_kernel: f32, f64, i32, i64, u64; f16, bf16, i8, i16, u8, u16, u32);

pub(crate) const GPU_MAX: on_gpu::Reducer = on_gpu::Reducer {
    name: "max",
    start: "LEAST",
    step: "((x) > (a) || is_nan((A)(x))) ? (A)(x) : (a)",
    join: "((b) > (a) || is_nan(b)) ? (b) : (a)",
    ..on_gpu::SUM
};

pub(crate) const GPU_MIN: on_gpu::Reducer = on_gpu::Reducer {
    name: "min",
    start: "GREATEST",
    step: "((x) < (a) || is_nan((A)(x))) ? (A)(x) : (a)",
    join: "((b) < (a) || is_nan(b)) ? (b) : (a)",
    ..on_gpu::SUM
};

#[cfg(test)]
mod tests {
    use half::f16;
    use kolo_core::Tensor;

    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn extremes() {
        let x = [[1.0f32, 5.0, 3.0], [4.0, 2.0, 6.0]];
        check_op("Max").input(x).input([0i32]).gives([4.0f32, 5.0, 6.0]);
        check_op("Max").input(x).input([1i32]).attr("keep_dims", true).gives([[5.0f32], [6.0]]);
        check_op("Min").input(x).input([0i64, 1]).gives(1.0f32);
        check_op("Min").input([3u8, 200]).input([0i32]).gives(3u8);
        check_op("Max").input([-3i32, -200]).input([0i32]).gives(-3i32);
        check_op("Max").input([f16::from_f32(-2.0)]).input([0i32]).gives(f16::from_f32(-2.0));
    }

    #[test]
    fn nan_wins_wherever_it_is() {
        for at in [0, 5, 63, 99] {
            let mut x = vec![1.0f32; 100];
            x[at] = f32::NAN;
            check_op("Max").input(x.clone()).input([0i32]).gives(f32::NAN);
            check_op("Min").input(x.clone()).input([0i32]).gives(f32::NAN);
            // The same in the second of three rows.
            let rows = [vec![2.0; 100], x, vec![3.0; 100]].concat();
            let rows = Tensor::from_vec([3, 100], rows).unwrap();
            check_op("Max").input(rows.clone()).input([1i32]).gives([2.0, f32::NAN, 3.0]);
            check_op("Min").input(rows).input([1i32]).gives([2.0, f32::NAN, 3.0]);
        }
    }

    #[test]
    fn the_extreme_of_nothing() {
        check_op("Max").input(tensor::<f32, 1>([0], [])).input([0i32]).gives(f32::NEG_INFINITY);
        check_op("Min").input(tensor::<i32, 1>([0], [])).input([0i32]).gives(i32::MAX);
    }

    #[test]
    fn gradients() {
        for op in ["Max", "Min"] {
            for keep in [false, true] {
                for axes in [&[0i32][..], &[1], &[0, 1]] {
                    check_op(op).attr("keep_dims", keep).input(wavy([3, 4], 1)).input(axes).gradient();
                }
            }
        }
    }

    #[test]
    fn equals_share_the_gradient() {
        let g = crate::graph();
        let x = g.constant([2.0f32, 7.0, 7.0]);
        let dx = kolo_graph::gradients(&[super::max_all(x)], &[x]).unwrap()[0].unwrap().dense().unwrap();
        let found = crate::testing::evaluate(&g, &[dx], &[]).unwrap();
        assert_eq!(found[0], [0.0f32, 0.5, 0.5].into());
    }
}
