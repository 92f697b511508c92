//! `SparseToDense`: a tensor full of one value, with others put at coordinates.

use kolo_core::{Error, Result, Shape};
use kolo_device::cpu::{looking, stop_if_asked};
use kolo_graph::{Gradient, OpDef, Output};

use crate::array::elements::{BETWEEN_LOOKS, Item, Job, build, integers};
use crate::array::gather_nd::gather_nd;
use crate::array::view::strides;
use crate::math::binary::first;
use crate::math::reduce::sum::sum_all;
use crate::memory::Scratch;
use crate::op::{Gpu, Op, cpu_any};
use crate::{Cost, KernelCtx};

/// A tensor of the shape in `shape` that is `default` but for `values` at the coordinates in the rows of `indices`, which
/// are in order and different.
#[track_caller]
pub fn sparse_to_dense<'g>(
    indices: Output<'g>,
    shape: Output<'g>,
    values: Output<'g>,
    default: Output<'g>,
) -> Output<'g> {
    indices.graph().op("SparseToDense").inputs([indices, shape, values, default]).out()
}

pub(crate) static SPARSE_TO_DENSE: Op = Op {
    def: OpDef {
        name: "SparseToDense",
        signature: "(sparse_indices:Tindices, output_shape:Tindices, sparse_values:T, default_value:T) -> (dense:T) ; \
                    validate_indices:bool=true, T:type, Tindices:type{int32,int64}",
        shape: |ctx| {
            ctx.input_of_rank(1, 1)?;
            ctx.input_of_rank(3, 0)?;
            let shape = match ctx.constant(1) {
                Some(shape) => Shape::from_signed(&integers(shape)?)?.into(),
                None => ctx.constant_as_shape(1),
            };
            Ok(vec![shape])
        },
        gradient: Gradient::Rule(|op, dy| {
            let (indices, dy) = (op.input(0), first(dy)?);
            let values = gather_nd(dy, as_rows(indices)?);
            // The default is everywhere but where a value is.
            let default = sum_all(dy) - sum_all(values);
            Ok(vec![None, None, Some(values.into()), Some(default.into())])
        }),
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward)],
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

/// Coordinates as `GatherNd` reads them: a vector of positions is a column.
fn as_rows(indices: Output<'_>) -> Result<Output<'_>> {
    let graph = indices.graph();
    match indices.shape().rank() {
        Some(2) => Ok(indices),
        Some(1) => Ok(graph.op("Reshape").input(indices).input(graph.constant([-1i32, 1])).out()),
        Some(0) => Ok(graph.op("Reshape").input(indices).input(graph.constant([1i32])).out()),
        _ => Err(Error::unimplemented("the gradient of SparseToDense needs indices of known rank")),
    }
}

fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (indices, values, default) = (ctx.input(0)?, ctx.input(2)?, ctx.input(3)?);
    if ctx.input(1)?.shape().rank() != 1 {
        return Err(Error::invalid_argument(format!(
            "output_shape must be rank 1, got shape {}",
            ctx.input(1)?.shape()
        )));
    }
    let shape = Shape::from_signed(&integers(ctx.input(1)?)?)?;
    let (n, depth) = match indices.shape().dims() {
        [] => (1, 1),
        &[n] => (n, 1),
        &[n, depth] => (n, depth),
        _ => {
            return Err(Error::invalid_argument(format!(
                "sparse_indices should be a scalar, vector, or matrix, got shape {}",
                indices.shape()
            )));
        }
    };
    if depth != shape.rank() {
        return Err(Error::invalid_argument(format!(
            "output_shape has incorrect number of elements: {} should be: {depth}",
            shape.rank()
        )));
    }
    if values.shape().rank() > 1 || (values.shape().rank() == 1 && values.n_elements() != n) {
        return Err(Error::invalid_argument(format!(
            "sparse_values has incorrect shape {}, should be [] or [{n}]",
            values.shape()
        )));
    }
    if default.shape().rank() != 0 {
        return Err(Error::invalid_argument("default_value should be a scalar."));
    }
    let coordinates = integers(indices)?;
    let positions = positions(ctx, &coordinates, n, &shape, ctx.attrs().bool("validate_indices")?)?;
    let job = Put { positions, scalar: values.shape().rank() == 0 };
    let out = build(ctx, values.dtype(), shape, &[values, default], job)?;
    ctx.set_output(0, out);
    Ok(())
}

/// Where in a tensor of `shape` each row of coordinates lies. If `ordered`, rows must ascend and differ.
pub(super) fn positions(
    ctx: &KernelCtx<'_>,
    coordinates: &[i64],
    n: usize,
    shape: &Shape,
    ordered: bool,
) -> Result<Scratch<usize>> {
    let (depth, steps) = (shape.rank(), strides(shape));
    let row = |i: usize| &coordinates[i * depth..(i + 1) * depth];
    let text = |i: usize| row(i).iter().map(i64::to_string).collect::<Vec<_>>().join(",");
    // Coordinates in no dimensions take no memory, however many there are.
    let mut positions = ctx.scratch(n, 0usize, "positions")?;
    let mut last = None;
    for (i, to) in looking(positions.iter_mut().enumerate()) {
        if row(i).iter().zip(shape.iter()).any(|(&at, &dim)| !usize::try_from(at).is_ok_and(|at| at < dim)) {
            return Err(Error::invalid_argument(format!(
                "indices[{i}] = [{}] is out of bounds: need 0 <= index < {shape}",
                text(i)
            )));
        }
        let at = row(i).iter().zip(&steps).map(|(&at, &step)| at as usize * step as usize).sum();
        if ordered && let Some(before) = last {
            if at == before {
                return Err(Error::invalid_argument(format!("indices[{i}] = [{}] is repeated", text(i))));
            }
            if at < before {
                return Err(Error::invalid_argument(format!("indices[{i}] = [{}] is out of order", text(i))));
            }
        }
        *to = at;
        last = Some(at);
    }
    Ok(positions)
}

/// A default everywhere, and values at positions.
struct Put {
    positions: Scratch<usize>,
    scalar: bool,
}

impl Job for Put {
    fn run<E: Item>(self, out: &mut [E], inputs: &[&[E]]) -> Result<()> {
        let (values, default) = (inputs[0], inputs[1]);
        for out in out.chunks_mut(BETWEEN_LOOKS) {
            stop_if_asked();
            out.fill(default[0].clone());
        }
        for (i, &at) in looking(self.positions.iter()).enumerate() {
            out[at] = values[if self.scalar { 0 } else { i }].clone();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::testing::{OpTest, check_op, tensor, wavy};

    fn dense(indices: impl Into<Tensor>, shape: impl Into<Tensor>, values: impl Into<Tensor>) -> OpTest {
        check_op("SparseToDense").input(indices).input(shape).input(values)
    }

    #[test]
    fn values_lie_at_their_coordinates() {
        dense([[0i32, 1], [1, 0]], [2i32, 3], [5.0f32, 6.0])
            .input(-1.0f32)
            .gives([[-1.0f32, 5.0, -1.0], [6.0, -1.0, -1.0]]);
        dense([1i64, 3], [4i64], 7i32).input(0i32).gives([0i32, 7, 0, 7]);
        dense(2i32, [3i32], true).input(false).gives([false, false, true]);
        let words = Tensor::from_strings([1], vec!["a".into()]).unwrap();
        dense([[1i64]], [2i64], words)
            .input("-")
            .gives(Tensor::from_strings([2], vec!["-".into(), "a".into()]).unwrap());
        dense(tensor::<i64, 2>([0, 1], []), [2i64], tensor::<f32, 1>([0], [])).input(3.0f32).gives([3.0f32, 3.0]);
    }

    #[test]
    fn bad_coordinates() {
        let two = [1.0f32, 2.0];
        dense([1i32, 1], [3i32], two).input(0.0f32).fails("indices[1] = [1] is repeated");
        dense([2i32, 1], [3i32], two).input(0.0f32).fails("indices[1] = [1] is out of order");
        dense([0i32, 3], [3i32], two).input(0.0f32).fails("indices[1] = [3] is out of bounds: need 0 <= index < [3]");
        dense([-1i32, 0], [3i32], two).input(0.0f32).fails("out of bounds");
        dense([[0i32, 0]], [3i32], [1.0f32]).input(0.0f32).fails("incorrect number of elements: 1 should be: 2");
        dense([0i32], [3i32], two).input(0.0f32).fails("sparse_values has incorrect shape");
        dense([1i32, 1], [3i32], two).input(0.0f32).attr("validate_indices", false).gives([0.0f32, 2.0, 0.0]);
    }

    #[test]
    fn gradients() {
        dense([[0i32, 1], [1, 0]], [2i32, 3], wavy([2], 0)).input(wavy([], 1)).gradient();
        dense([1i32, 2], [3i32], wavy([2], 0)).input(wavy([], 1)).gradient();
    }
}
