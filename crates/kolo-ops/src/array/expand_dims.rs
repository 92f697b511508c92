//! `ExpandDims` and `Squeeze`: dimensions of size 1 put in and taken out. No element moves.

use kolo_core::{Dim, Error, PartialShape, Result, Shape};
use kolo_graph::shape_fns::resolve_axis;
use kolo_graph::{Gradient, HalfSafety, HostRule, InferCtx, OpDef, Output, Work};

use super::elements::integer;
use super::reshape::shaped_as_input;
use crate::cuda::PLAIN;
use crate::math::binary::first;
use crate::op::{Gpu, Op, cpu_any, gpu_kernel};
use crate::{Cost, KernelCtx};

/// `x` with a new dimension of size 1 at `axis`; −1 puts it last.
#[track_caller]
pub fn expand_dims(x: Output<'_>, axis: i32) -> Output<'_> {
    let graph = x.graph();
    graph.op("ExpandDims").input(x).input(graph.constant(axis)).out()
}

/// `x` without the dimensions `axes`, which must have size 1; without all of size 1 if `axes` is empty.
#[track_caller]
pub fn squeeze<'g>(x: Output<'g>, axes: &[i64]) -> Output<'g> {
    x.graph().op("Squeeze").input(x).attr("squeeze_dims", axes).out()
}

pub(crate) static EXPAND_DIMS: Op = Op {
    def: OpDef {
        name: "ExpandDims",
        signature: "(input:T, dim:Tdim) -> (output:T) ; T:type, Tdim:type{int32,int64}=int32",
        shape: |ctx| {
            let Some(dims) = ctx.input(0).dims() else { return Ok(vec![PartialShape::unknown()]) };
            let mut dims = dims.to_vec();
            match ctx.constant_integers(1).as_deref() {
                Some([axis]) => dims.insert(new_axis(*axis, dims.len())?, Some(1)),
                Some(_) => return Err(Error::invalid_argument("'dim' must be a single value")),
                None => return Ok(vec![PartialShape::of_rank(dims.len() + 1)]),
            }
            Ok(vec![PartialShape::new(&dims)])
        },
        gradient: Gradient::Rule(|op, dy| Ok(vec![Some(shaped_as_input(op, first(dy)?).into()), None])),
        host: HostRule::SmallIntegers,
        work: Work::Reshapes,
        half: HalfSafety::Neutral,
        host_args: &["dim"],
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward_expand)],
    gpu: Gpu::Kernels(&[gpu_kernel("T", PLAIN, forward_expand)]),
    cost: Cost::Inline,
};

pub(crate) static SQUEEZE: Op = Op {
    def: OpDef {
        name: "Squeeze",
        signature: "(input:T) -> (output:T) ; T:type, squeeze_dims:list(int)>=0=[]",
        shape: infer_squeeze,
        gradient: Gradient::Rule(|op, dy| Ok(vec![Some(shaped_as_input(op, first(dy)?).into())])),
        host: HostRule::SmallIntegers,
        work: Work::Reshapes,
        half: HalfSafety::Neutral,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward_squeeze)],
    gpu: Gpu::Kernels(&[gpu_kernel("T", PLAIN, forward_squeeze)]),
    cost: Cost::Inline,
};

fn new_axis(axis: i64, rank: usize) -> Result<usize> {
    resolve_axis(axis, rank + 1).map_err(|_| {
        Error::invalid_argument(format!("Tried to expand dim index {axis} for tensor with {rank} dimensions."))
    })
}

fn infer_squeeze(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let axes = ctx.attrs().ints("squeeze_dims")?;
    let Some(dims) = ctx.input(0).dims() else { return Ok(vec![PartialShape::unknown()]) };
    if axes.is_empty() && dims.contains(&None) {
        return Ok(vec![PartialShape::unknown()]);
    }
    // An unknown size that is named must turn out to be 1.
    let sizes: Vec<usize> = dims.iter().map(|dim| dim.unwrap_or(1)).collect();
    let goes = squeezed(&axes, &sizes)?;
    let left: Vec<Dim> = dims.iter().zip(goes).filter(|(_, goes)| !goes).map(|(dim, _)| *dim).collect();
    Ok(vec![PartialShape::new(&left)])
}

/// Which dimensions go.
fn squeezed(axes: &[i64], dims: &[usize]) -> Result<Vec<bool>> {
    if axes.is_empty() {
        return Ok(dims.iter().map(|&dim| dim == 1).collect());
    }
    let mut goes = vec![false; dims.len()];
    for &axis in axes {
        let at = resolve_axis(axis, dims.len()).map_err(|_| {
            Error::invalid_argument(format!(
                "Tried to squeeze dim index {axis} for tensor with {} dimensions.",
                dims.len()
            ))
        })?;
        if dims[at] != 1 {
            return Err(Error::invalid_argument(format!(
                "Can not squeeze dim[{at}], expected a dimension of 1, got {}",
                dims[at]
            )));
        }
        goes[at] = true;
    }
    Ok(goes)
}

fn forward_expand(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let mut dims = ctx.input(0)?.shape().to_vec();
    let axis = integer(ctx.input(1)?).map_err(|error| error.context("'dim' must be a single value"))?;
    dims.insert(new_axis(axis, dims.len())?, 1);
    let out = ctx.take_input(0)?.reshaped(Shape::new(&dims)?)?;
    ctx.set_output(0, out);
    Ok(())
}

fn forward_squeeze(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let input = ctx.take_input(0)?;
    let dims = input.shape().dims();
    let goes = squeezed(&ctx.attrs().ints("squeeze_dims")?, dims)?;
    let left: Vec<usize> = dims.iter().zip(goes).filter(|(_, goes)| !goes).map(|(dim, _)| *dim).collect();
    let out = input.reshaped(Shape::new(&left)?)?;
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn expand_dims() {
        let case = |axis: i32| check_op("ExpandDims").input([1i32, 2]).input(axis);
        case(0).gives([[1i32, 2]]);
        case(1).gives([[1i32], [2]]);
        case(-1).gives([[1i32], [2]]);
        case(-2).gives([[1i32, 2]]);
        case(2).fails("Tried to expand dim index 2 for tensor with 1 dimensions.");
        check_op("ExpandDims").input(3.0f32).input([0i64]).gives([3.0f32]);
        check_op("ExpandDims").input(3.0f32).input([0i32, 0]).fails("'dim' must be a single value");
        check_op("ExpandDims").input(wavy([2, 3], 0)).input(1i32).gradient();
    }

    #[test]
    fn squeeze() {
        let case = |axes: &[i64]| check_op("Squeeze").input(tensor([1, 2, 1], [5i64, 6])).attr("squeeze_dims", axes);
        case(&[]).gives([5i64, 6]);
        case(&[0]).gives([[5i64], [6]]);
        case(&[-1]).gives([[5i64, 6]]);
        case(&[0, 2, -1]).gives([5i64, 6]);
        case(&[1]).fails("Can not squeeze dim[1], expected a dimension of 1, got 2");
        case(&[3]).fails("Tried to squeeze dim index 3 for tensor with 3 dimensions.");
        check_op("Squeeze").input([[1.0f32]]).gives(1.0f32);
        check_op("Squeeze").input(wavy([2, 1, 3], 0)).attr("squeeze_dims", vec![1i64]).gradient();
    }

    #[test]
    fn unknown_sizes_are_kept_where_they_may_stay() {
        let g = crate::graph();
        let x = g.placeholder_of("x", kolo_core::DType::F32, &[None, Some(1), None]);
        assert_eq!(super::squeeze(x, &[1]).shape().to_string(), "[?,?]");
        assert_eq!(super::squeeze(x, &[0]).shape().to_string(), "[1,?]");
        assert_eq!(super::squeeze(x, &[]).shape().to_string(), "<unknown>");
        assert_eq!(super::expand_dims(x, -1).shape().to_string(), "[?,1,?,1]");
    }
}
