//! What the checkpoint ops have in common: prefixes, names and slices as tensors.

use kolo_core::{Error, PartialShape, Result, Tensor};
use kolo_graph::InferCtx;

use super::bundle::{Item, parse_shape_and_slice};
use crate::KernelCtx;

/// A scalar string that is a path, or a part of one.
pub(super) fn text(ctx: &KernelCtx<'_>, i: usize, what: &str) -> Result<String> {
    let input = ctx.input(i)?;
    match input.strings()? {
        [text] if input.shape().rank() == 0 => utf8(text, what),
        _ => Err(Error::invalid_argument(format!("{what} should be one string, found shape {}", input.shape()))),
    }
}

/// The strings of a vector.
pub(super) fn texts(ctx: &KernelCtx<'_>, i: usize, what: &str) -> Result<Vec<String>> {
    let input = ctx.input(i)?;
    if input.shape().rank() != 1 {
        return Err(Error::invalid_argument(format!("{what} should be a vector, found shape {}", input.shape())));
    }
    input.strings()?.iter().map(|text| utf8(text, what)).collect()
}

fn utf8(text: &[u8], what: &str) -> Result<String> {
    String::from_utf8(text.to_vec())
        .map_err(|_| Error::invalid_argument(format!("{what} {:?} is not valid UTF-8", String::from_utf8_lossy(text))))
}

/// The prefix and the tensors of a save. The tensors are taken by reference: nothing is copied, and whoever updates a
/// variable meanwhile copies it first.
pub(super) fn save_arguments(ctx: &mut KernelCtx<'_>) -> Result<(String, Vec<Item>)> {
    let prefix = text(ctx, 0, "prefix")?;
    let (names, specs) = (texts(ctx, 1, "tensor_names")?, texts(ctx, 2, "shape_and_slices")?);
    let n_tensors = ctx.n_inputs() - 3;
    for (what, list) in [("tensor_names", &names), ("shape_and_slices", &specs)] {
        if list.len() != n_tensors {
            return Err(Error::invalid_argument(format!("{what} has {} entries for {n_tensors} tensors", list.len())));
        }
    }
    let mut items = Vec::with_capacity(n_tensors);
    for (i, (name, spec)) in names.into_iter().zip(specs).enumerate() {
        let slice = match spec.as_str() {
            "" => None,
            spec => Some(parse_shape_and_slice(spec).map_err(|error| error.context(format_args!("'{name}'")))?),
        };
        let tensor: Tensor = ctx.take_input(3 + i)?;
        items.push(Item { name, slice, tensor });
    }
    Ok((prefix, items))
}

/// The shape function of a save: a prefix, and two vectors as long as the list of tensors.
pub(super) fn save_shapes(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    ctx.input_of_rank(0, 0)?;
    let n_tensors = PartialShape::from([ctx.n_inputs() - 3]);
    for i in [1, 2] {
        ctx.input(i).merge(&n_tensors).map_err(|_| {
            Error::invalid_argument(format!("input {i} should have shape {n_tensors}, found {}", ctx.input(i)))
        })?;
    }
    Ok(Vec::new())
}
