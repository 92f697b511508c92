//! Reductions over axes: Sum, Mean, Prod, Max, Min, EuclideanNorm, All, Any.

use kolo_core::{DType, Element, Error, Result, Shape};
use kolo_graph::shape_fns::resolve_axis;
use kolo_graph::{Operation, Output, Work};
use smallvec::SmallVec;

use crate::KernelCtx;
use walk::{Reducer, Reduction};

pub mod extreme;
pub mod logical;
pub mod norm;
pub mod prod;
pub mod sum;
pub(crate) mod walk;

/// Output 0 is input 0 reduced over the axes in input 1.
pub(crate) fn reduce<T: Element, R: Reducer<T>>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let Some(wanted) = Wanted::of(ctx, R::KEEPS_ONE)? else { return Ok(()) };
    let mut out = ctx.allocate(T::DTYPE, wanted.kept)?;
    if wanted.shape.n_elements() == 0 {
        out.data_mut::<T>()?.fill(R::finish(R::START, 0));
    } else {
        let reduction = Reduction::new(&wanted.shape, &wanted.is_reduced);
        reduction.run::<T, R>(ctx.pool(), ctx.data(0)?, out.data_mut()?);
    }
    ctx.set_output(0, out);
    Ok(())
}

/// What a reduction is asked to do, whatever its elements are, wherever they lie, and however they are brought together.
pub(crate) struct Wanted {
    /// The shape of the input.
    pub(crate) shape: Shape,
    /// Which of its dimensions go.
    pub(crate) is_reduced: SmallVec<[bool; 4]>,
    /// The shape of the output.
    pub(crate) kept: Shape,
}

impl Wanted {
    /// Nothing if the input went through as it is, since only sizes of 1 are reduced and `keeps_one` allows it.
    pub(crate) fn of(ctx: &mut KernelCtx<'_>, keeps_one: bool) -> Result<Option<Wanted>> {
        let shape = ctx.input(0)?.shape().clone();
        if ctx.input(1)?.shape().rank() > 1 {
            let found = ctx.input(1)?.shape();
            return Err(Error::invalid_argument(format!("reduction axes must be a scalar or a vector, found {found}")));
        }
        let axes = ctx.integers(1)?;
        let mut is_reduced: SmallVec<[bool; 4]> = SmallVec::from_elem(false, shape.rank());
        for axis in axes {
            // An axis that is named twice is taken once, as by TensorFlow 1; TensorFlow 2 refuses it.
            is_reduced[resolve_axis(axis, shape.rank())?] = true;
        }
        let keep = ctx.attrs().bool("keep_dims")?;
        let kept: SmallVec<[usize; 4]> = shape
            .iter()
            .zip(&is_reduced)
            .filter_map(|(&n, &reduced)| if !reduced { Some(n) } else { keep.then_some(1) })
            .collect();
        let kept = Shape::new(&kept)?;
        let reduces = shape.iter().zip(&is_reduced).any(|(&n, &reduced)| reduced && n != 1);
        if keeps_one && !reduces {
            // Gradients of broadcasts often turn out to sum over nothing: the value goes through as it is.
            let out = ctx.take_input(0)?.reshaped(kept)?;
            ctx.set_output(0, out);
            return Ok(None);
        }
        Ok(Some(Wanted { shape, is_reduced, kept }))
    }
}

/// `value`, which has the shape of a reduction's output, repeated to the shape of its input.
pub(crate) fn spread<'g>(op: Operation<'g>, value: Output<'g>) -> Output<'g> {
    let (graph, input) = (op.graph(), op.input(0));
    let shape = shape_of(input);
    graph.op("BroadcastTo").input(with_kept_dims(op, value, shape)).input(shape).out()
}

/// The shape of `x` as an int32 vector: a constant if it is known.
fn shape_of(x: Output<'_>) -> Output<'_> {
    let known = x.shape().known().map(|shape| shape.iter().map(|&dim| i32::try_from(dim)).collect());
    match known {
        Some(Ok(dims)) => {
            let dims: Vec<i32> = dims;
            x.graph().constant(dims)
        }
        _ => x.graph().op("Shape").input(x).out(),
    }
}

/// `value`, which has the shape of a reduction's output, with the reduced dimensions back as sizes of 1.
fn with_kept_dims<'g>(op: Operation<'g>, value: Output<'g>, shape: Output<'g>) -> Output<'g> {
    let graph = op.graph();
    let keeps = op.attrs(|attrs| attrs.bool("keep_dims").unwrap_or(false));
    // A single value spreads over anything as it is.
    if keeps || value.shape().rank() == Some(0) {
        return value;
    }
    let kept = match (op.input(0).shape().rank(), constant_axes(op)) {
        (Some(rank), Some(axes)) => {
            let mut mask = vec![1i32; rank];
            for axis in axes {
                if let Ok(axis) = resolve_axis(axis, rank) {
                    mask[axis] = 0;
                }
            }
            if let Some(known) = op.input(0).shape().known() {
                let kept =
                    known.iter().zip(&mask).map(|(&dim, &kept)| if kept == 1 { i32::try_from(dim) } else { Ok(1) });
                if let Ok(kept) = kept.collect::<Result<Vec<i32>, _>>() {
                    return graph.op("Reshape").input(value).input(graph.constant(kept)).out();
                }
            }
            let ones: Vec<i32> = mask.iter().map(|kept| 1 - kept).collect();
            shape * graph.constant(mask) + graph.constant(ones)
        }
        _ => {
            let axes = graph.op("Cast").input(op.input(1)).attr("DstT", DType::I32).out();
            let rank = graph.op("Size").input(shape).out();
            let axes = graph.op("FloorMod").input(axes + rank).input(rank).out();
            let [zero, one] = [0i32, 1].map(|i| graph.constant(i));
            let all = graph.op("Range").inputs([zero, rank, one]).out();
            let ones = graph.op("Fill").input(graph.op("Shape").input(axes).out()).input(one).out();
            graph.op("DynamicStitch").inputs([all, axes, shape, ones]).attr("N", 2i64).out()
        }
    };
    graph.op("Reshape").input(value).input(kept).out()
}

/// The axes of a reduction, if they are a constant.
pub(crate) fn constant_axes(op: Operation<'_>) -> Option<Vec<i64>> {
    let node = op.input(1).operation().node()?;
    if node.def.work != Work::Constant {
        return None;
    }
    node.attrs.tensor("value").ok()?.integers().ok()
}
