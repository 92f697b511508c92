//! `CountUpTo` and `ResourceCountUpTo`: the value of an integer variable, which then grows by one, up to a limit.

use kolo_core::{Error, PartialShape, Result, Tensor};
use kolo_graph::{Effects, Gradient, InferCtx, OpDef, Output};

use super::handle::uninitialized;
use crate::math::number::Number;
use crate::op::{Gpu, KernelDef, Op, cpu_kernels};
use crate::{Cost, KernelCtx};

/// The value of the int32 or int64 variable behind a handle, which then grows by one; out of range once it is `limit`.
#[track_caller]
pub fn count_up_to(handle: Output<'_>, limit: i64) -> Output<'_> {
    let graph = handle.graph();
    if handle.is_ref() {
        return graph.op("CountUpTo").input(handle).attr("limit", limit).out();
    }
    let dtype = handle.handle().map_or(kolo_core::DType::I64, |(dtype, _)| dtype);
    graph.op("ResourceCountUpTo").input(handle).attr("limit", limit).attr("T", dtype).out()
}

pub(crate) static COUNT_UP_TO: Op = Op {
    def: OpDef {
        name: "CountUpTo",
        signature: "(ref:Ref(T)) -> (output:T) ; limit:int, T:type{int32,int64}",
        shape: |ctx| scalar(ctx.input(0)),
        gradient: Gradient::None("integers"),
        effects: Effects::Writes,
        ..OpDef::BASE
    },
    kernels: KERNELS,
    gpu: Gpu::Missing,
    cost: Cost::Inline,
};

pub(crate) static RESOURCE_COUNT_UP_TO: Op = Op {
    def: OpDef {
        name: "ResourceCountUpTo",
        signature: "(resource:resource) -> (output:T) ; limit:int, T:type{int32,int64}",
        shape: |ctx: &InferCtx<'_>| scalar(ctx.handle(0).map_or(&PartialShape::unknown(), |(_, shape)| shape)),
        gradient: Gradient::None("integers"),
        stateful: true,
        effects: Effects::Writes,
        ..OpDef::BASE
    },
    kernels: KERNELS,
    gpu: Gpu::Missing,
    cost: Cost::Inline,
};

fn scalar(shape: &PartialShape) -> Result<Vec<PartialShape>> {
    Ok(vec![shape.merge(&PartialShape::scalar())?])
}

const KERNELS: &[KernelDef] = cpu_kernels!(count: i32, i64);

fn count<T: Number + Into<i64>>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let cell = ctx.variable(0)?;
    if !cell.is_initialized() {
        return Err(uninitialized(ctx, 0, &cell));
    }
    let limit = ctx.attrs().int("limit")?;
    let before = cell.update(|variable| {
        let [value] = variable.data_mut::<T>()? else {
            return Err(Error::invalid_argument(format!("input is not a scalar: {}", variable.shape())));
        };
        let before = *value;
        if before.into() >= limit {
            return Err(Error::out_of_range(format!("Reached limit of {limit}")));
        }
        *value = before.add(T::ONE);
        Ok(before)
    })?;
    ctx.set_output(0, Tensor::scalar(before));
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::Code;
    use kolo_graph::VariableKind;

    use super::*;
    use crate::testing::Evaluation;

    #[test]
    fn counting_stops_at_the_limit() {
        for kind in [VariableKind::Resource, VariableKind::Reference] {
            let g = crate::graph();
            let v = g.new_variable("v", 0i64).kind(kind).build();
            let next = count_up_to(v.handle(), 2);
            g.check().unwrap();
            let run = Evaluation::new(g.snapshot());
            assert_eq!(run.run(&[next], &[]).unwrap_err().code(), Code::FailedPrecondition);
            run.run_targets(&[v.initializer()], &[]).unwrap();
            assert_eq!(run.run(&[next], &[]).unwrap(), [Tensor::scalar(0i64)]);
            assert_eq!(run.run(&[next], &[]).unwrap(), [Tensor::scalar(1i64)]);
            let error = run.run(&[next], &[]).unwrap_err();
            assert_eq!(error.code(), Code::OutOfRange);
            assert!(error.to_string().contains("Reached limit of 2"), "{error}");
        }
    }

    #[test]
    fn only_a_scalar_counts() {
        let g = crate::graph();
        let v = g.variable("v", [0i32, 0]);
        count_up_to(v.handle(), 2);
        assert!(g.check().unwrap_err().to_string().contains("not compatible"));
    }
}
