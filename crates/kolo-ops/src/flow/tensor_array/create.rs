//! `TensorArrayV3` makes an array; `TensorArrayGradV3` finds or makes the array of its elements' gradients;
//! `TensorArraySizeV3` and `TensorArrayCloseV3`.

use std::sync::Arc;

use kolo_core::{Error, Result, Tensor};
use kolo_graph::{Effects, Gradient, HandleRule, OpDef, shape_fns};

use super::array;
use super::object::{ArrayObject, ArrayOptions};
use crate::flow::stack::step_name;
use crate::op::{Gpu, Op, cpu_any};
use crate::{Cost, KernelCtx};

pub(crate) static TENSOR_ARRAY_V3: Op = Op {
    def: OpDef {
        name: "TensorArrayV3",
        signature: "(size:int32) -> (handle:resource, flow:float) ; dtype:type, element_shape:shape=<unknown>, \
                    dynamic_size:bool=false, clear_after_read:bool=true, identical_element_shapes:bool=false, \
                    tensor_array_name:string=\"\"",
        shape: shape_fns::scalars,
        gradient: Gradient::None("an array begins empty"),
        stateful: true,
        effects: Effects::Uses,
        handle: HandleRule::FromElementAttrs,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(create)],
    gpu: Gpu::Missing,
    cost: Cost::Inline,
};

pub(crate) static TENSOR_ARRAY_GRAD_V3: Op = Op {
    def: OpDef {
        name: "TensorArrayGradV3",
        signature: "(handle:resource, flow_in:float) -> (grad_handle:resource, flow_out:float) ; source:string",
        shape: shape_fns::scalars,
        gradient: Gradient::None("only its flow is differentiated, and that has no value"),
        stateful: true,
        effects: Effects::Uses,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(create_gradient)],
    gpu: Gpu::Missing,
    cost: Cost::Inline,
};

pub(crate) static TENSOR_ARRAY_SIZE_V3: Op = Op {
    def: OpDef {
        name: "TensorArraySizeV3",
        signature: "(handle:resource, flow_in:float) -> (size:int32)",
        shape: shape_fns::scalars,
        gradient: Gradient::None("a size is no float"),
        stateful: true,
        effects: Effects::Uses,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(size)],
    gpu: Gpu::Missing,
    cost: Cost::Inline,
};

pub(crate) static TENSOR_ARRAY_CLOSE_V3: Op = Op {
    def: OpDef {
        name: "TensorArrayCloseV3",
        signature: "(handle:resource) -> ()",
        gradient: Gradient::None("nothing comes out"),
        stateful: true,
        effects: Effects::Uses,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(close)],
    gpu: Gpu::Missing,
    cost: Cost::Inline,
};

fn create(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let size = ctx.scalar::<i32>(0)?;
    let size =
        usize::try_from(size).map_err(|_| Error::invalid_argument(format!("Size should be >= 0 but it is {size}")))?;
    let attrs = ctx.attrs();
    let name = step_name(ctx);
    let options = ArrayOptions {
        name: name.clone(),
        dtype: attrs.dtype("dtype")?,
        element_shape: attrs.shape("element_shape")?.clone(),
        dynamic_size: attrs.bool("dynamic_size")?,
        clear_after_read: attrs.bool("clear_after_read")?,
        identical_element_shapes: attrs.bool("identical_element_shapes")?,
        is_gradient: false,
    };
    let store = ctx.step.step_resources().clone();
    let object = store.lookup_or_create("", &name, || ArrayObject::new(ctx, options, size).map(Arc::new))?;
    ctx.set_output(0, Tensor::handle(store.handle("", &name, object)));
    ctx.set_output(1, Tensor::scalar(0f32));
    Ok(())
}

fn create_gradient(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (array, source) = (array(ctx)?, ctx.attrs().str("source")?);
    let name = array.gradient_name(source);
    let store = ctx.step.step_resources().clone();
    let object = store.lookup_or_create("", &name, || array.gradient(ctx, source).map(Arc::new))?;
    ctx.set_output(0, Tensor::handle(store.handle("", &name, object)));
    ctx.forward(1, 1)
}

fn size(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let size = array(ctx)?.size()?;
    let size = i32::try_from(size).map_err(|_| Error::out_of_range(format!("{size} elements do not fit int32")))?;
    ctx.set_output(0, Tensor::scalar(size));
    Ok(())
}

fn close(ctx: &mut KernelCtx<'_>) -> Result<()> {
    array(ctx)?.close();
    Ok(())
}
