//! `StackV2` and its ops: tensors that go in last come out first. The gradient of a loop keeps in them what its backward
//! iterations need of the forward ones. A stack lives as long as its step; one that is made inside a loop is another in
//! every iteration.

use std::any::Any;
use std::sync::Arc;

use kolo_core::{DType, Error, Result, Tensor};
use kolo_device::Charge;
use kolo_graph::{Effects, Gradient, HostRule, OpDef, shape_fns};
use parking_lot::Mutex;

use crate::holdings::{Holdings, Measured, OBJECT};
use crate::op::{Gpu, Op, cpu_any};
use crate::resource::Resource;
use crate::{Cost, KernelCtx};

const WHY: &str = "a stack keeps what a loop's gradient needs; second-order gradients through loops are not supported";

pub(crate) static STACK_V2: Op = Op {
    def: OpDef {
        name: "StackV2",
        signature: "(max_size:int32) -> (handle:resource) ; elem_type:type, stack_name:string=\"\"",
        shape: shape_fns::scalars,
        gradient: Gradient::None(WHY),
        stateful: true,
        effects: Effects::Uses,
        host: HostRule::SmallIntegers,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(create)],
    gpu: Gpu::Missing,
    cost: Cost::Inline,
};

pub(crate) static STACK_PUSH_V2: Op = Op {
    def: OpDef {
        name: "StackPushV2",
        signature: "(handle:resource, elem:T) -> (output:T) ; T:type, swap_memory:bool=false",
        shape: shape_fns::same_as_input_1,
        gradient: Gradient::Refused(WHY),
        stateful: true,
        effects: Effects::Uses,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(push)],
    gpu: Gpu::Missing,
    cost: Cost::Inline,
};

pub(crate) static STACK_POP_V2: Op = Op {
    def: OpDef {
        name: "StackPopV2",
        signature: "(handle:resource) -> (elem:elem_type) ; elem_type:type",
        gradient: Gradient::Refused(WHY),
        stateful: true,
        effects: Effects::Uses,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(pop)],
    gpu: Gpu::Missing,
    cost: Cost::Inline,
};

pub(crate) static STACK_CLOSE_V2: Op = Op {
    def: OpDef {
        name: "StackCloseV2",
        signature: "(handle:resource) -> ()",
        gradient: Gradient::None(WHY),
        stateful: true,
        effects: Effects::Uses,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(close)],
    gpu: Gpu::Missing,
    cost: Cost::Inline,
};

struct Stack {
    name: String,
    dtype: DType,
    /// The most it may hold; no limit if negative.
    max_size: i32,
    contents: Mutex<StackContents>,
    /// A loop makes one in every iteration.
    _object: Charge,
}

struct StackContents {
    /// `None` once it is closed.
    tensors: Option<Vec<Tensor>>,
    holdings: Holdings,
}

/// What the place of a tensor takes in the list, which has room for up to twice as many.
const PLACE: usize = 2 * size_of::<Tensor>();

impl Resource for Stack {
    fn kind(&self) -> &'static str {
        "stack"
    }
    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

impl Stack {
    fn closed(&self) -> Error {
        Error::invalid_argument(format!("Stack[{}] has already been closed.", self.name))
    }
}

fn create(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (dtype, max_size) = (ctx.attrs().dtype("elem_type")?, ctx.scalar::<i32>(0)?);
    let name = step_name(ctx);
    let store = ctx.step.step_resources().clone();
    let stack = store.lookup_or_create("", &name, || {
        let tag: Arc<str> = format!("{} {}", ctx.node.op(), ctx.node.name).into();
        let object = ctx.device.charge(OBJECT, &tag)?;
        let contents = StackContents { tensors: Some(Vec::new()), holdings: Holdings::new(object.another(0)?) };
        Ok(Arc::new(Stack { name: name.clone(), dtype, max_size, contents: Mutex::new(contents), _object: object }))
    })?;
    ctx.set_output(0, Tensor::handle(store.handle("", &name, stack)));
    Ok(())
}

/// A name for an object that this call makes, different in every iteration of every loop.
pub(super) fn step_name(ctx: &KernelCtx<'_>) -> String {
    format!("{}_{}", ctx.node.name, ctx.frame_iteration)
}

fn stack(ctx: &KernelCtx<'_>) -> Result<Arc<Stack>> {
    ctx.step.step_resources().resolve(ctx.input(0)?.resource()?)
}

fn push(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (stack, tensor) = (stack(ctx)?, ctx.take_input(1)?);
    if tensor.dtype() != stack.dtype {
        return Err(Error::invalid_argument(format!("Must have type {} but got {}", stack.dtype, tensor.dtype())));
    }
    {
        let part = Measured::new(PLACE, std::slice::from_ref(&tensor));
        let mut contents = stack.contents.lock();
        let StackContents { tensors, holdings } = &mut *contents;
        let tensors = tensors.as_mut().ok_or_else(|| stack.closed())?;
        if usize::try_from(stack.max_size).is_ok_and(|most| tensors.len() >= most) {
            return Err(Error::invalid_argument(format!(
                "Stack[{}] overflowed its max_size ({})",
                stack.name, stack.max_size
            )));
        }
        holdings.add(&part)?;
        if tensors.try_reserve(1).is_err() {
            holdings.remove(&part);
            return Err(holdings.no_room());
        }
        tensors.push(tensor.clone());
    }
    ctx.set_output(0, tensor);
    Ok(())
}

fn pop(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let stack = stack(ctx)?;
    let tensor = {
        let mut contents = stack.contents.lock();
        let StackContents { tensors, holdings } = &mut *contents;
        let tensors = tensors.as_mut().ok_or_else(|| stack.closed())?;
        let tensor = tensors
            .pop()
            .ok_or_else(|| Error::invalid_argument(format!("Stack[{}] is empty when calling Pop().", stack.name)))?;
        holdings.remove(&Measured::new(PLACE, std::slice::from_ref(&tensor)));
        tensor
    };
    let expected = ctx.attrs().dtype("elem_type")?;
    if tensor.dtype() != expected {
        return Err(Error::invalid_argument(format!("Must have type {} but got {expected}", tensor.dtype())));
    }
    ctx.set_output(0, tensor);
    Ok(())
}

fn close(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let stack = stack(ctx)?;
    let gone = {
        let mut contents = stack.contents.lock();
        contents.holdings.clear();
        contents.tensors.take()
    };
    // Freed without the lock.
    drop(gone);
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::{DType, Tensor};
    use kolo_graph::{Graph, Output};

    use crate::testing::evaluate;

    fn stack(g: &Graph, max_size: i32) -> Output<'_> {
        g.op("StackV2").input(g.constant(max_size)).attr("elem_type", DType::F32).out()
    }

    fn push<'g>(handle: Output<'g>, value: Output<'g>, after: Output<'g>) -> Output<'g> {
        let g = handle.graph();
        g.control_dependencies(&[after.operation()], || g.op("StackPushV2").input(handle).input(value).out())
    }

    fn pop<'g>(handle: Output<'g>, after: Output<'g>) -> Output<'g> {
        let g = handle.graph();
        g.control_dependencies(&[after.operation()], || {
            g.op("StackPopV2").input(handle).attr("elem_type", DType::F32).out()
        })
    }

    #[test]
    fn what_goes_in_last_comes_out_first() {
        let g = crate::graph();
        let handle = stack(&g, -1);
        let one = push(handle, g.constant(1.0f32), handle);
        let two = push(handle, g.constant([2.0f32, 2.5]), one);
        let first = pop(handle, two);
        let second = pop(handle, first);
        let values = evaluate(&g, &[second, first, two], &[]).unwrap();
        assert_eq!(values, [Tensor::scalar(1.0f32), [2.0f32, 2.5].into(), [2.0f32, 2.5].into()]);
        let third = pop(handle, second);
        let error = evaluate(&g, &[third], &[]).unwrap_err();
        assert!(error.message().contains("is empty when calling Pop()"), "{error}");
    }

    #[test]
    fn a_stack_refuses_too_much_the_wrong_dtype_and_what_comes_after_its_end() {
        let g = crate::graph();
        let handle = stack(&g, 1);
        let one = push(handle, g.constant(1.0f32), handle);
        let two = push(handle, g.constant(1.0f32), one);
        assert!(evaluate(&g, &[two], &[]).unwrap_err().message().contains("overflowed its max_size (1)"));
        let integer = push(handle, g.constant(1i32), handle);
        assert!(evaluate(&g, &[integer], &[]).unwrap_err().message().contains("Must have type float but got int32"));
        let close = g.op("StackCloseV2").input(handle).build();
        let late =
            g.control_dependencies(&[close], || g.op("StackPushV2").input(handle).input(g.constant(1.0f32)).out());
        assert!(evaluate(&g, &[late], &[]).unwrap_err().message().contains("has already been closed"));
    }
}
