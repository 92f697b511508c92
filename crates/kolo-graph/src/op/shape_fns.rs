//! Shape functions that many ops share. One that only one op needs lives in that op's file.

use kolo_core::{Dim, Error, PartialShape, Result};

use crate::InferCtx;

/// Nothing is known of the outputs.
pub fn unknown(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    Ok(vec![PartialShape::unknown(); ctx.n_outputs()])
}

/// Every output is a single value.
pub fn scalars(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    Ok(vec![PartialShape::scalar(); ctx.n_outputs()])
}

/// Every output has the shape of input 0.
pub fn same_as_input_0(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    Ok(vec![ctx.input(0).clone(); ctx.n_outputs()])
}

/// Every output has the shape of input 1.
pub fn same_as_input_1(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    Ok(vec![ctx.input(1).clone(); ctx.n_outputs()])
}

/// All inputs have one shape, and the outputs have it too.
pub fn all_same(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let mut shape = PartialShape::unknown();
    for i in 0..ctx.n_inputs() {
        shape = shape.merge(ctx.input(i))?;
    }
    Ok(vec![shape; ctx.n_outputs()])
}

/// Output `i` has the shape of input `i`.
pub fn each_as_its_input(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    Ok((0..ctx.n_outputs()).map(|i| ctx.input(i).clone()).collect())
}

/// Two inputs broadcast to the output.
pub fn broadcast(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    Ok(vec![ctx.input(0).broadcast(ctx.input(1))?])
}

/// The output has the shape in attribute `shape`.
pub fn from_shape_attr(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    Ok(vec![ctx.attrs().shape("shape")?.clone(); ctx.n_outputs()])
}

/// The output has the shape that integer vector input 0 holds.
pub fn from_shape_input(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    Ok(vec![ctx.constant_as_shape(0); ctx.n_outputs()])
}

/// The output is what resource input 0 refers to.
pub fn from_handle(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let shape = ctx.handle(0).map_or_else(PartialShape::unknown, |(_, shape)| shape.clone());
    Ok(vec![shape; ctx.n_outputs()])
}

/// Input 0 reduced over the axes in integer input 1, which stay as size 1 if attribute `keep_dims` is set.
pub fn reduction(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let keep = ctx.attrs().bool("keep_dims")?;
    if ctx.input(1).rank().is_some_and(|rank| rank > 1) {
        let found = ctx.input(1);
        return Err(Error::invalid_argument(format!("reduction axes must be a scalar or a vector, found {found}")));
    }
    let Some(dims) = ctx.input(0).dims() else { return unknown(ctx) };
    let Some(axes) = ctx.constant_integers(1) else {
        return Ok(vec![if keep { PartialShape::of_rank(dims.len()) } else { PartialShape::unknown() }]);
    };
    let mut reduced = vec![false; dims.len()];
    for axis in axes {
        reduced[resolve_axis(axis, dims.len())?] = true;
    }
    let dims: Vec<Dim> = dims
        .iter()
        .zip(&reduced)
        .filter_map(|(dim, &reduced)| if !reduced { Some(*dim) } else { keep.then_some(Some(1)) })
        .collect();
    Ok(vec![PartialShape::new(&dims)])
}

/// An axis counted from either end, as an index; an error if it is out of range.
pub fn resolve_axis(axis: i64, rank: usize) -> Result<usize> {
    let from_start = if axis < 0 { axis.saturating_add(rank as i64) } else { axis };
    match usize::try_from(from_start) {
        Ok(index) if index < rank => Ok(index),
        _ => Err(Error::invalid_argument(format!("axis {axis} is out of range for rank {rank}"))),
    }
}
