//! `Sum` and `Mean` over axes. Halves are summed in `float`; sums of many values grow as trees.

use half::{bf16, f16};
use kolo_core::Result;
use kolo_graph::{Combine, Grad, Gradient, HalfSafety, HostRule, OpDef, Operation, Output, SplitRule, shape_fns};

use crate::cuda::reduce as on_gpu;
use crate::cuda::{self, FLOATS};
use crate::math::binary::first;
use crate::math::number::Number;
use crate::math::reduce::walk::Reducer;
use crate::math::reduce::{reduce, spread};
use crate::op::{Gpu, KernelDef, Op, cpu_kernels, gpu_kernel};
use crate::{Cost, KernelCtx};

/// The sum over `axes`, which are removed; negative axes count from the end.
#[track_caller]
pub fn sum<'g>(x: Output<'g>, axes: &[i32]) -> Output<'g> {
    x.graph().op("Sum").input(x).input(x.graph().constant(axes)).out()
}

/// The sum of all elements.
#[track_caller]
pub fn sum_all(x: Output<'_>) -> Output<'_> {
    over_all(x, "Sum")
}

/// The mean over `axes`, which are removed; negative axes count from the end.
#[track_caller]
pub fn mean<'g>(x: Output<'g>, axes: &[i32]) -> Output<'g> {
    x.graph().op("Mean").input(x).input(x.graph().constant(axes)).out()
}

/// The mean of all elements.
#[track_caller]
pub fn mean_all(x: Output<'_>) -> Output<'_> {
    over_all(x, "Mean")
}

/// The reduction `op` over all axes of `x`, whatever its rank turns out to be.
#[track_caller]
pub(crate) fn over_all<'g>(x: Output<'g>, op: &str) -> Output<'g> {
    let graph = x.graph();
    let axes = match x.shape().rank() {
        Some(rank) => graph.constant((0..rank as i32).collect::<Vec<_>>()),
        None => {
            let rank = graph.op("Rank").input(x).out();
            graph.op("Range").inputs([graph.constant(0i32), rank, graph.constant(1i32)]).out()
        }
    };
    graph.op(op).input(x).input(axes).out()
}

pub(crate) static SUM: Op = reduction("Sum", NUMBERS, SUM_KERNELS, Gradient::Rule(sum_gradient))
    .host(HostRule::SmallIntegers)
    .half(HalfSafety::Wide)
    .split(SplitRule::Reduction(Combine::Sum))
    .host_args(&["reduction_indices"])
    .gpu(&[gpu_kernel("T", cuda::NUMBERS, |ctx| on_gpu::reduce(ctx, &on_gpu::SUM))]);
pub(crate) static MEAN: Op = reduction("Mean", NUMBERS, MEAN_KERNELS, Gradient::Rule(mean_gradient))
    .half(HalfSafety::Wide)
    .split(SplitRule::Reduction(Combine::Mean))
    .host_args(&["reduction_indices"])
    .gpu(&[gpu_kernel("T", FLOATS, |ctx| on_gpu::reduce(ctx, &GPU_MEAN))]);

pub(crate) const NUMBERS: &str = "(input:T, reduction_indices:Tidx) -> (output:T) ; \
    keep_dims:bool=false, T:type{num}, Tidx:type{int32,int64}=int32";

pub(crate) const fn reduction(
    name: &'static str,
    signature: &'static str,
    kernels: &'static [KernelDef],
    gradient: Gradient,
) -> Op {
    Op {
        def: OpDef { name, signature, shape: shape_fns::reduction, gradient, ..OpDef::BASE },
        kernels,
        gpu: Gpu::Unstated,
        cost: Cost::Elements,
    }
}

fn sum_gradient<'g>(op: Operation<'g>, dy: &[Option<Output<'g>>]) -> Result<Vec<Option<Grad<'g>>>> {
    Ok(vec![Some(spread(op, first(dy)?).into()), None])
}

/// As of a sum, divided by the number of values in each mean.
fn mean_gradient<'g>(op: Operation<'g>, dy: &[Option<Output<'g>>]) -> Result<Vec<Option<Grad<'g>>>> {
    let (graph, dy) = (op.graph(), first(dy)?);
    let sizes = (op.input(0).shape().n_elements(), op.output(0).shape().n_elements());
    let share = match sizes {
        (Some(n_in), Some(n_out)) if n_in > 0 => dy * (n_out as f64 / n_in as f64),
        _ => {
            let size = |of: Output<'g>| {
                let size = graph.op("Size").input(of).out();
                graph.op("Cast").input(size).attr("DstT", dy.dtype()).out()
            };
            dy * (size(op.output(0)) / size(op.input(0)))
        }
    };
    Ok(vec![Some(spread(op, share).into()), None])
}

#[derive(Clone, Copy)]
pub(crate) struct Sum;

impl<T: Number> Reducer<T> for Sum {
    type Acc = T;
    const START: T = T::ZERO;
    #[inline(always)]
    fn step(acc: T, x: T) -> T {
        acc.add(x)
    }
    #[inline(always)]
    fn join(a: T, b: T) -> T {
        a.add(b)
    }
    #[inline(always)]
    fn finish(acc: T, _: usize) -> T {
        acc
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Mean;

impl<T: Number> Reducer<T> for Mean {
    type Acc = T;
    const START: T = T::ZERO;
    #[inline(always)]
    fn step(acc: T, x: T) -> T {
        acc.add(x)
    }
    #[inline(always)]
    fn join(a: T, b: T) -> T {
        a.add(b)
    }
    #[inline(always)]
    fn finish(acc: T, n: usize) -> T {
        // The mean of nothing is NaN, as 0 / 0 is.
        acc.div(T::from_count(n))
    }
}

fn sum_kernel<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    reduce::<T, Sum>(ctx)
}

fn mean_kernel<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    reduce::<T, Mean>(ctx)
}

const SUM_KERNELS: &[KernelDef] = cpu_kernels!(sum_kernel: f32, f64, i32, i64, u64; f16, bf16, i8, i16, u8, u16, u32);
const MEAN_KERNELS: &[KernelDef] =
    cpu_kernels!(mean_kernel: f32, f64, i32, i64, u64; f16, bf16, i8 as i64, i16 as i64, u8 as i64, u16 as i64, u32);

pub(crate) const GPU_MEAN: on_gpu::Reducer = on_gpu::Reducer { name: "mean", finish: "(a) / (A)(n)", ..on_gpu::SUM };

#[cfg(test)]
mod tests {
    use half::bf16;
    use kolo_core::Tensor;

    use crate::testing::{check_op, evaluate, tensor, wavy};

    #[test]
    fn sum() {
        let x = [[1.0f32, 2.0, 3.0], [4.0, 5.0, 6.0]];
        check_op("Sum").input(x).input([0i32]).gives([5.0f32, 7.0, 9.0]);
        check_op("Sum").input(x).input([1i64]).gives([6.0f32, 15.0]);
        check_op("Sum").input(x).input(-1i32).attr("keep_dims", true).gives([[6.0f32], [15.0]]);
        check_op("Sum").input(x).input([0i32, 1]).gives(21.0f32);
        check_op("Sum").input(x).input(tensor::<i32, 1>([0], [])).gives(x);
        check_op("Sum").input(3.0f32).input(tensor::<i32, 1>([0], [])).gives(3.0f32);
        check_op("Sum").input([i32::MAX, 1]).input([0i32]).gives(i32::MIN);
        check_op("Sum").input(vec![bf16::ONE; 1000]).input([0i32]).gives(bf16::from_f32(1000.0));
        check_op("Sum").input(x).input([2i32]).fails("axis 2 is out of range for rank 2");
    }

    #[test]
    fn an_axis_that_is_named_twice_is_taken_once() {
        let x = [[1.0f32, 2.0, 3.0], [4.0, 5.0, 9.0]];
        check_op("Sum").input(x).input([0i32, 0]).gives([5.0f32, 7.0, 12.0]);
        check_op("Sum").input(x).input([1i32, -1]).attr("keep_dims", true).gives([[6.0f32], [18.0]]);
        check_op("Mean").input(x).input([0i32, 0]).gives([2.5f32, 3.5, 6.0]);
        check_op("Max").input(x).input([0i64, -2, 0]).gives([4.0f32, 5.0, 9.0]);
        check_op("Prod").input(x).input([1i32, 1]).gives([6.0f32, 180.0]);
        check_op("All").input([[true, false], [true, true]]).input([0i32, 0]).gives([true, false]);
        for op in ["Sum", "Mean"] {
            check_op(op).input(wavy([2, 3, 2], 1)).input([1i32, -2]).gradient();
        }
    }

    #[test]
    fn nothing_sums_to_zero_and_has_no_mean() {
        check_op("Sum").input(tensor::<f32, 2>([0, 2], [])).input([0i32]).gives([0.0f32, 0.0]);
        check_op("Sum").input(tensor::<f32, 2>([0, 2], [])).input([1i32]).gives(tensor::<f32, 1>([0], []));
        check_op("Mean").input(tensor::<f32, 2>([0, 2], [])).input([0i32]).gives([f32::NAN, f32::NAN]);
        check_op("Mean").input(tensor::<i32, 1>([0], [])).input([0i32]).gives(0i32);
    }

    #[test]
    fn mean() {
        let x = [[1.0f32, 2.0, 3.0], [4.0, 5.0, 9.0]];
        check_op("Mean").input(x).input([0i32]).gives([2.5f32, 3.5, 6.0]);
        check_op("Mean").input(x).input([0i32, 1]).gives(4.0f32);
        check_op("Mean").input([3i32, 4]).input([0i32]).gives(3i32);
        check_op("Mean").input([-3i32, -4]).input([0i32]).gives(-3i32);
    }

    #[test]
    fn gradients() {
        for op in ["Sum", "Mean"] {
            for keep in [false, true] {
                for axes in [&[0i32][..], &[1], &[-1, 0], &[0, 1, 2], &[]] {
                    check_op(op).attr("keep_dims", keep).input(wavy([2, 3, 2], 1)).input(axes).gradient();
                }
            }
        }
    }

    #[test]
    fn the_gradient_does_without_known_shapes_and_axes() {
        for op in ["Sum", "Mean"] {
            let g = crate::graph();
            let x = g.placeholder_of("x", kolo_core::DType::F32, &[None, None]);
            let axes = g.placeholder::<i32>("axes", [1usize]);
            let y = g.op(op).input(x).input(axes).out();
            let dx = kolo_graph::gradients(&[y], &[x]).unwrap()[0].unwrap().dense().unwrap();
            let feeds = [(x, Tensor::from([[1.0f32, 2.0], [3.0, 4.0]])), (axes, Tensor::from([-1i32]))];
            let each = if op == "Sum" { 1.0f32 } else { 0.5 };
            assert_eq!(evaluate(&g, &[dx], &feeds).unwrap()[0], Tensor::from([[each; 2]; 2]));
        }
    }
}
