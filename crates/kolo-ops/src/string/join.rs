//! `StringJoin`: strings put together, element by element.

use bytes::Bytes;
use kolo_core::{Error, PartialShape, Result, Shape};
use kolo_graph::{InferCtx, OpDef, Output};

use super::NO_GRADIENT;
use crate::memory::joined;
use crate::op::{Gpu, Op, cpu_any};
use crate::{Cost, KernelCtx};

/// The strings of all `parts`, one after the other with `separator` between them. Scalars go with every element.
///
/// # Panics
/// If there are no parts.
#[track_caller]
pub fn string_join<'g>(parts: &[Output<'g>], separator: &str) -> Output<'g> {
    let first = parts.first().expect("string_join needs at least one part");
    first.graph().op("StringJoin").inputs(parts.iter().copied()).attr("separator", separator).out()
}

pub(crate) static STRING_JOIN: Op = Op {
    def: OpDef {
        name: "StringJoin",
        signature: "(inputs:N*string) -> (output:string) ; N:int>=0, separator:string=\"\"",
        shape: infer,
        gradient: NO_GRADIENT,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward)],
    gpu: Gpu::STRINGS,
    cost: Cost::Elements,
};

/// All that are not scalars have one shape. If one may yet turn out to be a scalar, nothing is known.
fn infer(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let mut shape = PartialShape::scalar();
    for i in 0..ctx.n_inputs() {
        match ctx.input(i).rank() {
            None => return Ok(vec![PartialShape::unknown()]),
            Some(0) => {}
            Some(_) if shape.rank() == Some(0) => shape = ctx.input(i).clone(),
            Some(_) => shape = shape.merge(ctx.input(i))?,
        }
    }
    Ok(vec![shape])
}

fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let mut shape = Shape::scalar();
    let mut parts: Vec<&[Bytes]> = Vec::new();
    for i in 0..ctx.n_inputs() {
        let input = ctx.input(i)?;
        if input.shape().rank() > 0 {
            if shape.rank() > 0 && shape != *input.shape() {
                return Err(Error::invalid_argument(format!(
                    "Input shapes do not match: {shape} vs. {}",
                    input.shape()
                )));
            }
            shape = input.shape().clone();
        }
        parts.push(input.strings()?);
    }
    let separator = ctx.attrs().str("separator")?.as_bytes();
    let out = ctx.text_tensor(shape, |at| {
        // A scalar is the only one with one string where others have more, or none.
        let texts = parts.iter().map(move |part| if part.len() == 1 { &part[0][..] } else { &part[at][..] });
        joined(texts, separator)
    })?;
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::string::words;
    use crate::testing::check_op;

    #[test]
    fn parts_are_joined() {
        check_op("StringJoin")
            .attr("separator", "/")
            .input(words(["a", "b"]))
            .input("-")
            .input(words(["c", "d"]))
            .gives(words(["a/-/c", "b/-/d"]));
        check_op("StringJoin").input("a").input("b").gives("ab");
        check_op("StringJoin").input("a").input(words([])).gives(words([]));
        check_op("StringJoin").input(words(["a", "b"])).input(words(["c"])).fails("[2]");
        let g = crate::graph();
        let none = g.op("StringJoin").attr("N", 0i64).out();
        assert_eq!(crate::testing::evaluate(&g, &[none], &[]).unwrap(), [Tensor::string("")]);
    }
}
