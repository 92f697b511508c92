//! `SparseReduceSum`, `SparseReduceMax`: a sparse tensor's elements brought together along some dimensions, as a dense tensor.
//! Where there are none it is 0.

use half::{bf16, f16};
use kolo_core::{Error, PartialShape, Result, Shape};
use kolo_device::cpu::looking;
use kolo_graph::shape_fns::resolve_axis;
use kolo_graph::{Gradient, OpDef, Output};

use super::reorder::sizes;
use super::to_dense::positions;
use crate::array::gather_nd::gather_nd;
use crate::math::binary::first;
use crate::math::number::Number;
use crate::op::{Gpu, KernelDef, Op, cpu_kernels};
use crate::{Cost, KernelCtx};

/// The sums of a sparse tensor's elements along `axes`, which stay as dimensions of size 1 if `keep`.
#[track_caller]
pub fn sparse_reduce_sum<'g>([indices, values, shape]: [Output<'g>; 3], axes: Output<'g>, keep: bool) -> Output<'g> {
    let op = indices.graph().op("SparseReduceSum").inputs([indices, values, shape, axes]);
    op.attr("keep_dims", keep).out()
}

pub(crate) static SPARSE_REDUCE_SUM: Op = reduction(
    "SparseReduceSum",
    "(input_indices:int64, input_values:T, input_shape:int64, reduction_axes:int32) -> (output:T) ; \
     keep_dims:bool=false, T:type{num}",
    SUM,
    Gradient::Rule(|op, dy| {
        let (graph, indices, shape, axes) = (op.graph(), op.input(0), op.input(2), op.input(3));
        // The sizes of what came out, with 1 for what was summed over.
        let rank = graph.op("Size").input(shape).out();
        let all = graph.op("Range").inputs([graph.constant(0i32), rank, graph.constant(1i32)]).out();
        let n_axes = graph.op("Reshape").inputs([graph.op("Size").input(axes).out(), graph.constant([1i32])]).out();
        let places = graph.op("FloorMod").inputs([axes, rank]).out();
        let places = graph.op("Reshape").inputs([places, n_axes]).out();
        let ones = graph.op("Fill").inputs([n_axes, graph.constant(1i64)]).out();
        let kept = graph.op("DynamicStitch").inputs([all, places, shape, ones]).attr("N", 2i64).out();
        let dy = graph.op("Reshape").inputs([first(dy)?, kept]).out();
        let coordinates = graph.op("Minimum").inputs([indices, kept - 1]).out();
        Ok(vec![None, Some(gather_nd(dy, coordinates).into()), None, None])
    }),
);
pub(crate) static SPARSE_REDUCE_MAX: Op = reduction(
    "SparseReduceMax",
    "(input_indices:int64, input_values:T, input_shape:int64, reduction_axes:int32) -> (output:T) ; \
     keep_dims:bool=false, T:type{real}",
    MAX,
    Gradient::Refused("TensorFlow has none for it"),
);

const fn reduction(
    name: &'static str,
    signature: &'static str,
    kernels: &'static [KernelDef],
    gradient: Gradient,
) -> Op {
    Op {
        def: OpDef {
            name,
            signature,
            shape: |ctx| {
                let shape = ctx.constant_as_shape(2);
                let Some(dims) = shape.dims() else { return Ok(vec![PartialShape::unknown()]) };
                let keep = ctx.attrs().bool("keep_dims")?;
                let Some(axes) = ctx.constant_integers(3) else {
                    return Ok(vec![if keep { PartialShape::of_rank(dims.len()) } else { PartialShape::unknown() }]);
                };
                let reduced = reduced(&axes, dims.len())?;
                let kept = dims.iter().zip(&reduced).filter_map(|(&dim, &reduced)| match (reduced, keep) {
                    (false, _) => Some(dim),
                    (true, true) => Some(Some(1)),
                    (true, false) => None,
                });
                Ok(vec![PartialShape::new(&kept.collect::<Vec<_>>())])
            },
            gradient,
            ..OpDef::BASE
        },
        kernels,
        gpu: Gpu::Missing,
        cost: Cost::Elements,
    }
}

/// Which dimensions are reduced: those that are named, or all if none is.
fn reduced(axes: &[i64], rank: usize) -> Result<Vec<bool>> {
    let mut reduced = vec![axes.is_empty(); rank];
    for &axis in axes {
        let at = resolve_axis(axis, rank).map_err(|_| {
            Error::invalid_argument(format!("Invalid reduction dimension {axis}, for input with {rank} dimensions."))
        })?;
        reduced[at] = true;
    }
    Ok(reduced)
}

fn reduce<T: Number>(ctx: &mut KernelCtx<'_>, f: impl Fn(T, T) -> T) -> Result<()> {
    let (indices, values, shape) = (ctx.input(0)?, ctx.input(1)?, ctx.input(2)?);
    let (n, depth) = sizes(indices, values, shape)?;
    let whole = Shape::from_signed(shape.data::<i64>()?)?;
    let reduced = reduced(&ctx.integers(3)?, depth)?;
    let keep = ctx.attrs().bool("keep_dims")?;
    let coordinates = indices.data::<i64>()?;
    positions(ctx, coordinates, n, &whole, false)?;
    let kept: Vec<usize> = (0..depth).filter(|&i| !reduced[i]).map(|i| whole[i]).collect();
    let dims: Vec<usize> =
        (0..depth).filter(|&i| keep || !reduced[i]).map(|i| if reduced[i] { 1 } else { whole[i] }).collect();
    let steps = crate::array::view::strides(&kept);
    let mut out = ctx.allocate_zeroed(T::DTYPE, Shape::new(&dims)?)?;
    let n_out = out.n_elements();
    let mut has_any = ctx.scratch(n_out, false, "marks of elements")?;
    let to = out.data_mut::<T>()?;
    for (i, &value) in looking(values.data::<T>()?.iter().enumerate()) {
        let row = coordinates[i * depth..(i + 1) * depth].iter().zip(&reduced).filter(|(_, reduced)| !**reduced);
        let at: usize = row.zip(&steps).map(|((&at, _), &step)| at as usize * step as usize).sum();
        to[at] = if has_any[at] { f(to[at], value) } else { value };
        has_any[at] = true;
    }
    ctx.set_output(0, out);
    Ok(())
}

fn sum<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    reduce::<T>(ctx, T::add)
}

fn max<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    reduce::<T>(ctx, |a, b| Number::max(a, b))
}

const SUM: &[KernelDef] = cpu_kernels!(sum: f32, f64, f16, bf16, i8, i16, i32, i64, u8, u16, u32, u64);
const MAX: &[KernelDef] = cpu_kernels!(max: f32, f64, f16, bf16, i8, i16, i32, i64, u8, u16, u32, u64);

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::testing::{OpTest, check_op, tensor, wavy};

    fn case(op: &str, axes: impl Into<Tensor>) -> OpTest {
        // [[., 1, .], [2, ., -3]].
        let test = check_op(op).input([[0i64, 1], [1, 0], [1, 2]]).input([1.0f32, 2.0, -3.0]).input([2i64, 3]);
        test.input(axes)
    }

    #[test]
    fn elements_are_brought_together() {
        case("SparseReduceSum", [1i32]).gives([1.0f32, -1.0]);
        case("SparseReduceSum", -2i32).gives([2.0f32, 1.0, -3.0]);
        case("SparseReduceSum", [0i32, 1]).gives(0.0f32);
        case("SparseReduceSum", tensor::<i32, 1>([0], [])).gives(0.0f32);
        case("SparseReduceSum", [1i32]).attr("keep_dims", true).gives([[1.0f32], [-1.0]]);
        // Nothing but a negative number is its maximum; where there is nothing it is 0.
        case("SparseReduceMax", [0i32]).gives([2.0f32, 1.0, -3.0]);
        case("SparseReduceMax", [1i32]).gives([1.0f32, 2.0]);
        case("SparseReduceSum", [2i32]).fails("Invalid reduction dimension 2, for input with 2 dimensions.");
    }

    #[test]
    fn gradients() {
        for axes in [vec![1i32], vec![-2], vec![0, 1]] {
            for keep in [false, true] {
                let test = check_op("SparseReduceSum").attr("keep_dims", keep).input([[0i64, 1], [1, 0], [1, 2]]);
                test.input(wavy([3], 0)).input([2i64, 3]).input(Tensor::from(axes.clone())).gradient();
            }
        }
    }
}
