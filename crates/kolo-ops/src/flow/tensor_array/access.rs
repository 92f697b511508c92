//! `TensorArrayReadV3` and `TensorArrayWriteV3`: one element.

use kolo_core::{PartialShape, Result};
use kolo_graph::{Effects, Gradient, InferCtx, OpDef, shape_fns};

use super::{TensorArray, array};
use crate::math::binary::first;
use crate::op::{Gpu, Op, cpu_any};
use crate::{Cost, KernelCtx};

pub(crate) static TENSOR_ARRAY_READ_V3: Op = Op {
    def: OpDef {
        name: "TensorArrayReadV3",
        signature: "(handle:resource, index:int32, flow_in:float) -> (value:dtype) ; dtype:type",
        shape: element,
        // The gradient of a read is a write to the gradient array; its flow says that it is done.
        gradient: Gradient::Rule(|op, dy| {
            let dy = first(dy)?;
            let array = TensorArray::gradient_of(op.input(0), dy.dtype(), op.input(2));
            Ok(vec![None, None, Some(array.write(op.input(1), dy).flow().into())])
        }),
        stateful: true,
        effects: Effects::Uses,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(read)],
    gpu: Gpu::Missing,
    cost: Cost::Inline,
};

pub(crate) static TENSOR_ARRAY_WRITE_V3: Op = Op {
    def: OpDef {
        name: "TensorArrayWriteV3",
        signature: "(handle:resource, index:int32, value:T, flow_in:float) -> (flow_out:float) ; T:type",
        shape: shape_fns::scalars,
        gradient: Gradient::Rule(|op, dy| {
            let (array, flow) = TensorArray::gradient_after(op, op.input(2).dtype(), first(dy)?);
            Ok(vec![None, None, Some(array.read(op.input(1)).into()), Some(flow.into())])
        }),
        stateful: true,
        effects: Effects::Uses,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(write)],
    gpu: Gpu::Missing,
    cost: Cost::Inline,
};

/// What the handle knows of its elements.
fn element(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    shape_fns::from_handle(ctx)
}

fn read(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (array, index) = (array(ctx)?, ctx.scalar::<i32>(1)?);
    let expected = ctx.attrs().dtype("dtype")?;
    if array.dtype() != expected {
        return Err(array.error(format!("TensorArray dtype is {} but Op requested dtype {expected}.", array.dtype())));
    }
    ctx.set_output(0, array.read(ctx, index.into())?);
    Ok(())
}

fn write(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (array, index) = (array(ctx)?, ctx.scalar::<i32>(1)?);
    let value = ctx.take_input(2)?;
    array.write(ctx, index.into(), value)?;
    ctx.forward(3, 0)
}
