//! `ParallelConcat`: tensors of one row each, one below the other. TensorFlow fills each row as soon as it is there.

use kolo_core::{Error, PartialShape, Result};
use kolo_graph::{Gradient, HalfSafety, OpDef, Output};

use super::elements::{Item, Job, build};
use crate::math::binary::first;
use crate::op::{Gpu, Op, cpu_any};
use crate::{Cost, KernelCtx};

pub(crate) static PARALLEL_CONCAT: Op = Op {
    def: OpDef {
        name: "ParallelConcat",
        signature: "(values:N*T) -> (output:T) ; N:int>=1, T:type, shape:shape",
        shape: |ctx| {
            let shape = ctx.attrs().shape("shape")?;
            let Some(whole) = shape.known() else {
                return Err(Error::invalid_argument("shape attr must be fully defined."));
            };
            let Some((&n, row)) = whole.split_first() else {
                return Err(Error::invalid_argument("shape attr must have a first dimension."));
            };
            if n != ctx.n_inputs() {
                return Err(Error::invalid_argument(format!(
                    "shape attr has {n} rows, and there are {} inputs",
                    ctx.n_inputs()
                )));
            }
            let one = PartialShape::from(&kolo_core::Shape::new(&[&[1], row].concat())?);
            for i in 0..ctx.n_inputs() {
                ctx.input(i).merge(&one).map_err(|_| {
                    Error::invalid_argument(format!("All input shapes must match {one}, input {i} is {}", ctx.input(i)))
                })?;
            }
            Ok(vec![shape.clone()])
        },
        gradient: Gradient::Rule(|op, dy| {
            let (graph, n) = (op.graph(), op.n_inputs());
            let parts =
                graph.op("Split").inputs([graph.constant(0i32), first(dy)?]).attr("num_split", n as i64).build();
            Ok(parts.outputs().into_iter().map(|part: Output<'_>| Some(part.into())).collect())
        }),
        half: HalfSafety::Neutral,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward)],
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let Some(shape) = ctx.attrs().shape("shape")?.known() else {
        return Err(Error::invalid_argument("shape attr must be fully defined."));
    };
    let inputs = (0..ctx.n_inputs()).map(|i| ctx.input(i)).collect::<Result<Vec<_>>>()?;
    for (i, input) in inputs.iter().enumerate() {
        if input.shape().first() != Some(&1) || input.shape()[1..] != shape[1..] {
            return Err(Error::invalid_argument(format!(
                "input {i} should be one row of {shape}, found {}",
                input.shape()
            )));
        }
    }
    let out = build(ctx, inputs[0].dtype(), shape, &inputs, Rows)?;
    ctx.set_output(0, out);
    Ok(())
}

struct Rows;

impl Job for Rows {
    fn run<E: Item>(self, out: &mut [E], inputs: &[&[E]]) -> Result<()> {
        let mut rest = out;
        for input in inputs {
            let (row, below) = rest.split_at_mut(input.len());
            row.clone_from_slice(input);
            rest = below;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use kolo_core::PartialShape;

    use crate::testing::{check_op, wavy};

    fn case(rows: usize) -> crate::testing::OpTest {
        check_op("ParallelConcat").attr("N", 2i64).attr("shape", PartialShape::from([rows, 2]))
    }

    #[test]
    fn rows_are_stacked() {
        case(2).input([[1i32, 2]]).input([[3i32, 4]]).gives([[1i32, 2], [3, 4]]);
        case(3).input([[1i32, 2]]).input([[3i32, 4]]).fails("3 rows");
        case(2).input([[1i32, 2]]).input([[3i32, 4], [5, 6]]).fails("must match");
        case(2).input(wavy([1, 2], 0)).input(wavy([1, 2], 1)).gradient();
    }
}
