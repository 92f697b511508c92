//! `Prod` over axes.

use std::collections::BTreeSet;

use half::{bf16, f16};
use kolo_core::{DType, Result};
use kolo_graph::shape_fns::resolve_axis;
use kolo_graph::{Combine, Grad, Gradient, HalfSafety, HostRule, Operation, Output, SplitRule};

use crate::KernelCtx;
use crate::cuda;
use crate::cuda::reduce as on_gpu;
use crate::math::binary::first;
use crate::math::number::Number;
use crate::math::reduce::sum::{NUMBERS, reduction};
use crate::math::reduce::walk::Reducer;
use crate::math::reduce::{constant_axes, reduce, spread};
use crate::op::{KernelDef, Op, cpu_kernels, gpu_kernel};

/// The product over `axes`, which are removed; negative axes count from the end.
#[track_caller]
pub fn prod<'g>(x: Output<'g>, axes: &[i32]) -> Output<'g> {
    x.graph().op("Prod").input(x).input(x.graph().constant(axes)).out()
}

pub(crate) static PROD: Op = reduction("Prod", NUMBERS, KERNELS, Gradient::Rule(gradient))
    .host(HostRule::SmallIntegers)
    .half(HalfSafety::Wide)
    .split(SplitRule::Reduction(Combine::Product))
    .host_args(&["reduction_indices"])
    .gpu(&[gpu_kernel("T", cuda::NUMBERS, |ctx| on_gpu::reduce(ctx, &GPU_PROD))]);

/// Each element's gradient is the product of all others. Not `y / x`: that has no value where an element is 0. Instead
/// the product of those before it times the product of those after it.
fn gradient<'g>(op: Operation<'g>, dy: &[Option<Output<'g>>]) -> Result<Vec<Option<Grad<'g>>>> {
    let (graph, x, dy) = (op.graph(), op.input(0), first(dy)?);
    let Some(order) = Order::of(op)? else { return Ok(vec![Some(dy.into()), None]) };
    let moved = graph.op("Transpose").input(x).input(order.forth).out();
    let shape = graph.op("Shape").input(x).out();
    let size = |axes: Output<'g>| {
        let sizes = graph.op("GatherV2").inputs([shape, axes, graph.constant(0i32)]).out();
        graph.op("Prod").input(sizes).input(graph.constant([0i32])).out()
    };
    let sizes = graph.op("Pack").inputs([size(order.reduced), size(order.kept)]).out();
    let flat = graph.op("Reshape").input(moved).input(sizes).out();
    let others = [false, true].map(|reverse| {
        let builder = graph.op("Cumprod").input(flat).input(graph.constant(0i32));
        builder.attr("exclusive", true).attr("reverse", reverse).out()
    });
    let moved_shape = graph.op("Shape").input(moved).out();
    let others = graph.op("Reshape").input(others[0] * others[1]).input(moved_shape).out();
    let others = graph.op("Transpose").input(others).input(order.back).out();
    Ok(vec![Some((others * spread(op, dy)).into()), None])
}

/// How dimensions are moved so that the reduced ones come first and can be seen as one.
struct Order<'g> {
    reduced: Output<'g>,
    kept: Output<'g>,
    /// The permutation that does it, and the one that undoes it.
    forth: Output<'g>,
    back: Output<'g>,
}

impl<'g> Order<'g> {
    /// Worked out now if rank and axes are known, else in the run. `None` if nothing is reduced.
    fn of(op: Operation<'g>) -> Result<Option<Order<'g>>> {
        let (graph, x) = (op.graph(), op.input(0));
        let (Some(rank), Some(axes)) = (x.shape().rank(), constant_axes(op)) else {
            let rank = graph.op("Rank").input(x).out();
            let axes = graph.op("Cast").input(op.input(1)).attr("DstT", DType::I32).out();
            let axes = graph.op("Reshape").input(axes).input(graph.constant([-1i32])).out();
            let reduced = graph.op("FloorMod").input(axes + rank).input(rank).out();
            let reduced = graph.op("Unique").input(reduced).build().output(0);
            let all = graph.op("Range").inputs([graph.constant(0i32), rank, graph.constant(1i32)]).out();
            let kept = graph.op("ListDiff").input(all).input(reduced).out();
            let forth = graph.op("ConcatV2").inputs([reduced, kept, graph.constant(0i32)]).attr("N", 2i64).out();
            let back = graph.op("InvertPermutation").input(forth).out();
            return Ok(Some(Order { reduced, kept, forth, back }));
        };
        let reduced = axes.into_iter().map(|axis| resolve_axis(axis, rank)).collect::<Result<BTreeSet<usize>>>()?;
        let reduced: Vec<usize> = reduced.into_iter().collect();
        if reduced.is_empty() {
            return Ok(None);
        }
        let kept: Vec<usize> = (0..rank).filter(|axis| !reduced.contains(axis)).collect();
        let forth = [&reduced[..], &kept].concat();
        let mut back = vec![0; rank];
        forth.iter().enumerate().for_each(|(to, &from)| back[from] = to);
        let integers = |values: &[usize]| graph.constant(values.iter().map(|&x| x as i32).collect::<Vec<_>>());
        let [reduced, kept, forth, back] = [&reduced, &kept, &forth, &back].map(|list| integers(list));
        Ok(Some(Order { reduced, kept, forth, back }))
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Prod;

impl<T: Number> Reducer<T> for Prod {
    type Acc = T;
    const START: T = T::ONE;
    #[inline(always)]
    fn step(acc: T, x: T) -> T {
        acc.mul(x)
    }
    #[inline(always)]
    fn join(a: T, b: T) -> T {
        a.mul(b)
    }
    #[inline(always)]
    fn finish(acc: T, _: usize) -> T {
        acc
    }
}

fn forward<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    reduce::<T, Prod>(ctx)
}

const KERNELS: &[KernelDef] = cpu_kernels!(forward: f32, f64, i32, i64, u64; f16, bf16, i8, i16, u8, u16, u32);

pub(crate) const GPU_PROD: on_gpu::Reducer =
    on_gpu::Reducer { name: "prod", start: "(A)1", step: "(a) * (A)(x)", join: "(a) * (b)", ..on_gpu::SUM };

#[cfg(test)]
mod tests {
    use kolo_core::{DType, Tensor};

    use crate::testing::{check_op, evaluate, tensor, wavy};

    #[test]
    fn products() {
        let x = [[1.0f32, 2.0, 3.0], [4.0, 5.0, 6.0]];
        check_op("Prod").input(x).input([0i32]).gives([4.0f32, 10.0, 18.0]);
        check_op("Prod").input(x).input([-1i32]).gives([6.0f32, 120.0]);
        check_op("Prod").input([2i32, 3, 4]).input([0i32]).gives(24i32);
        check_op("Prod").input(tensor::<i64, 1>([0], [])).input([0i32]).gives(1i64);
    }

    #[test]
    fn gradients() {
        for keep in [false, true] {
            for axes in [&[0i32][..], &[1], &[2, 0], &[0, 1, 2], &[1, -2], &[]] {
                check_op("Prod").attr("keep_dims", keep).input(wavy([2, 3, 2], 1)).input(axes).gradient();
            }
        }
    }

    #[test]
    fn the_gradient_does_without_known_shapes_and_axes() {
        let g = crate::graph();
        let x = g.placeholder_of("x", DType::F32, &[None, None]);
        let axes = g.placeholder::<i32>("axes", [None]);
        let y = g.op("Prod").input(x).input(axes).out();
        let dx = kolo_graph::gradients(&[y], &[x]).unwrap()[0].unwrap().dense().unwrap();
        // An axis may be named twice.
        for named in [&[-1i32][..], &[-1, 1]] {
            let feeds = [(x, Tensor::from([[1.0f32, 2.0], [3.0, 4.0]])), (axes, Tensor::vector(named.to_vec()))];
            assert_eq!(evaluate(&g, &[dx], &feeds).unwrap()[0], Tensor::from([[2.0f32, 1.0], [4.0, 3.0]]));
        }
    }

    #[test]
    fn the_gradient_survives_zeros() {
        check_op("Prod").input([[2.0f32, 0.0, 3.0], [0.0, 0.0, 4.0]]).input([1i32]).gradient();
    }
}
