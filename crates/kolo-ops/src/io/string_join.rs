//! `StringJoin`: strings one after the other.

use bytes::Bytes;
use kolo_core::{Error, PartialShape, Result, Tensor};
use kolo_graph::{Gradient, InferCtx, OpDef, Output};

use crate::op::{Op, cpu_any};
use crate::{Cost, KernelCtx};

/// The elements of `inputs`, joined with `separator` between them. Inputs have one shape, or are scalars.
#[track_caller]
pub fn string_join<'g>(inputs: &[Output<'g>], separator: &str) -> Output<'g> {
    let first = inputs.first().expect("string_join needs at least one value");
    first.graph().op("StringJoin").inputs(inputs.iter().copied()).attr("separator", separator).out()
}

pub(crate) static STRING_JOIN: Op = Op {
    def: OpDef {
        name: "StringJoin",
        signature: "(inputs:N*string) -> (output:string) ; N:int>=0, separator:string=\"\"",
        shape,
        gradient: Gradient::None("strings are not numbers"),
        ..OpDef::BASE
    },
    kernels: &[cpu_any(join)],
    cost: Cost::Inline,
};

fn shape(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let mut shape = PartialShape::scalar();
    for i in 0..ctx.n_inputs() {
        match ctx.input(i).rank() {
            // It may turn out to be a scalar, which fits anything, or decide.
            None => return Ok(vec![PartialShape::unknown()]),
            Some(0) => {}
            Some(_) if shape.rank() == Some(0) => shape = ctx.input(i).clone(),
            Some(_) => shape = shape.merge(ctx.input(i))?,
        }
    }
    Ok(vec![shape])
}

fn join(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let separator = ctx.attrs().str("separator")?;
    let inputs: Vec<&Tensor> = (0..ctx.n_inputs()).map(|i| ctx.input(i)).collect::<Result<_>>()?;
    let shape = inputs.iter().map(|tensor| tensor.shape()).find(|shape| shape.rank() > 0).cloned().unwrap_or_default();
    let mut columns = Vec::new();
    for tensor in &inputs {
        if tensor.shape().rank() > 0 && *tensor.shape() != shape {
            return Err(Error::invalid_argument(format!(
                "Input shapes do not match: {} and {shape}; inputs have one shape or are scalars",
                tensor.shape()
            )));
        }
        columns.push(tensor.strings()?);
    }
    let element = |i: usize| {
        let parts: Vec<&[u8]> = columns.iter().map(|column| &*column[i.min(column.len() - 1)]).collect();
        Bytes::from(parts.join(separator.as_bytes()))
    };
    let joined = Tensor::from_strings(shape.clone(), (0..shape.n_elements()).map(element).collect())?;
    ctx.set_output(0, joined);
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::DType;

    use super::*;
    use crate::testing::check_op;

    #[test]
    fn scalars_and_equal_shapes_join() {
        check_op("StringJoin").input("a").input("b").gives("ab");
        check_op("StringJoin")
            .attr("separator", "-")
            .input(["a", ""])
            .input("x")
            .input(["b", "c"])
            .gives(["a-x-b", "-x-c"]);
        check_op("StringJoin").input(["a", "b"]).input(["a", "b", "c"]).fails("[");
        let none = || Tensor::zeros(DType::Str, [0]).unwrap();
        check_op("StringJoin").input(none()).input("x").gives(none());
    }
}
