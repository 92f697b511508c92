//! What is done with a queue: `QueueEnqueue`, `QueueEnqueueMany`, `QueueDequeue`, `QueueDequeueMany`, `QueueDequeueUpTo`,
//! `QueueClose`, `QueueSize`, `QueueIsClosed`; with `V2` for resource handles.

use std::sync::Arc;

use kolo_core::{DType, Error, PartialShape, Result, Tensor};
use kolo_graph::{Effects, Gradient, InferCtx, OpDef, ShapeFn, shape_fns};

use super::core::Queue;
use super::source::object;
use super::spec::Amount;
use crate::kernel::KernelInit;
use crate::op::{Gpu, KernelDef, Op, cpu_any, cpu_made};
use crate::{AsyncKernel, Cost, Done, KernelCtx, KernelMaker};

macro_rules! access_ops {
    ($($old:ident, $new:ident, $name:literal, $inputs:literal, $rest:literal, $shape:expr, $kernels:ident;)*) => {
        $(pub(crate) static $old: Op =
            access($name, concat!("(handle:Ref(string)", $inputs, ") -> ", $rest), $shape, $kernels, false);
        pub(crate) static $new: Op =
            access(concat!($name, "V2"), concat!("(handle:resource", $inputs, ") -> ", $rest), $shape, $kernels, true);)*
    };
}

access_ops! {
    QUEUE_ENQUEUE, QUEUE_ENQUEUE_V2, "QueueEnqueue", ", components:list(Tcomponents)",
        "() ; Tcomponents:list(type)>=1, timeout_ms:int=-1", shape_fns::unknown, ENQUEUE;
    QUEUE_ENQUEUE_MANY, QUEUE_ENQUEUE_MANY_V2, "QueueEnqueueMany", ", components:list(Tcomponents)",
        "() ; Tcomponents:list(type)>=1, timeout_ms:int=-1", shape_fns::unknown, ENQUEUE_MANY;
    QUEUE_DEQUEUE, QUEUE_DEQUEUE_V2, "QueueDequeue", "",
        "(components:list(component_types)) ; component_types:list(type)>=1, timeout_ms:int=-1", one_shape, DEQUEUE;
    QUEUE_DEQUEUE_MANY, QUEUE_DEQUEUE_MANY_V2, "QueueDequeueMany", ", n:int32",
        "(components:list(component_types)) ; component_types:list(type)>=1, timeout_ms:int=-1", many_shape, DEQUEUE_MANY;
    QUEUE_DEQUEUE_UP_TO, QUEUE_DEQUEUE_UP_TO_V2, "QueueDequeueUpTo", ", n:int32",
        "(components:list(component_types)) ; component_types:list(type)>=1, timeout_ms:int=-1", up_to_shape, DEQUEUE_UP_TO;
    QUEUE_CLOSE, QUEUE_CLOSE_V2, "QueueClose", "", "() ; cancel_pending_enqueues:bool=false", shape_fns::unknown, CLOSE;
    QUEUE_SIZE, QUEUE_SIZE_V2, "QueueSize", "", "(size:int32)", shape_fns::scalars, SIZE;
    QUEUE_IS_CLOSED, QUEUE_IS_CLOSED_V2, "QueueIsClosed", "", "(is_closed:bool)", shape_fns::scalars, IS_CLOSED;
}

const fn access(
    name: &'static str,
    signature: &'static str,
    shape: ShapeFn,
    kernels: &'static [KernelDef],
    stateful: bool,
) -> Op {
    Op {
        def: OpDef {
            name,
            signature,
            shape,
            gradient: Gradient::None("what comes out of a queue does not depend on a graph"),
            stateful,
            effects: Effects::Uses,
            ..OpDef::BASE
        },
        kernels,
        gpu: Gpu::OBJECTS,
        cost: Cost::Inline,
    }
}

fn one_shape(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    declared(ctx, &PartialShape::scalar())
}

fn many_shape(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let n = ctx.constant_integers(1).and_then(|n| n.first().and_then(|&n| usize::try_from(n).ok()));
    declared(ctx, &PartialShape::new(&[n]))
}

fn up_to_shape(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    declared(ctx, &PartialShape::of_rank(1))
}

/// `rows`, followed by the shapes that the queue was declared with, if its op is in sight.
fn declared(ctx: &InferCtx<'_>, rows: &PartialShape) -> Result<Vec<PartialShape>> {
    let queue = ctx.source(0);
    let mut shapes: Vec<PartialShape> = match queue.attrs.find("shapes") {
        Some(_) => queue.attrs.shapes("shapes")?.into_iter().cloned().collect(),
        None => Vec::new(),
    };
    if queue.op().starts_with("PriorityQueue") {
        shapes.insert(0, PartialShape::scalar());
    }
    if shapes.len() != ctx.n_outputs() {
        return shape_fns::unknown(ctx);
    }
    Ok(shapes.iter().map(|shape| rows.concat(shape)).collect())
}

const ENQUEUE: &[KernelDef] = &[cpu_made(KernelMaker::Async(|init| Access::make(init, Action::Enqueue)))];
const ENQUEUE_MANY: &[KernelDef] = &[cpu_made(KernelMaker::Async(|init| Access::make(init, Action::EnqueueMany)))];
const DEQUEUE: &[KernelDef] = &[cpu_made(KernelMaker::Async(|init| Access::make(init, Action::Dequeue)))];
const DEQUEUE_MANY: &[KernelDef] = &[cpu_made(KernelMaker::Async(|init| Access::make(init, Action::DequeueMany)))];
const DEQUEUE_UP_TO: &[KernelDef] = &[cpu_made(KernelMaker::Async(|init| Access::make(init, Action::DequeueUpTo)))];
const CLOSE: &[KernelDef] =
    &[cpu_any(|ctx| object::<Queue>(ctx, 0)?.close(ctx.attrs().bool("cancel_pending_enqueues")?))];
const SIZE: &[KernelDef] = &[cpu_any(|ctx| {
    let n = object::<Queue>(ctx, 0)?.len();
    ctx.set_output(0, Tensor::scalar(i32::try_from(n).unwrap_or(i32::MAX)));
    Ok(())
})];
const IS_CLOSED: &[KernelDef] = &[cpu_any(|ctx| {
    let is_closed = object::<Queue>(ctx, 0)?.is_closed();
    ctx.set_output(0, Tensor::scalar(is_closed));
    Ok(())
})];

#[derive(Clone, Copy)]
enum Action {
    Enqueue,
    EnqueueMany,
    Dequeue,
    DequeueMany,
    DequeueUpTo,
}

/// What may wait.
struct Access {
    action: Action,
    /// What a dequeue gives.
    dtypes: Vec<DType>,
}

impl Access {
    fn make(init: &KernelInit<'_>, action: Action) -> Result<Box<dyn AsyncKernel>> {
        if init.attrs().int("timeout_ms")? != -1 {
            return Err(Error::invalid_argument("Timeout not supported yet."));
        }
        let dtypes = init.node.outputs.iter().map(|output| output.dtype).collect();
        Ok(Box::new(Access { action, dtypes }))
    }

    /// The queue, the components to add, and how much to take.
    fn arguments(&self, ctx: &mut KernelCtx<'_>) -> Result<(Arc<Queue>, Vec<Tensor>, Amount)> {
        let queue = object::<Queue>(ctx, 0)?;
        let count = |op: &str| -> Result<usize> {
            let n = ctx.scalar::<i32>(1)?;
            usize::try_from(n).map_err(|_| Error::invalid_argument(format!("{op} requested {n} < 0 elements")))
        };
        let amount = match self.action {
            Action::Enqueue | Action::EnqueueMany => {
                let components = (1..ctx.n_inputs()).map(|i| ctx.take_input(i)).collect::<Result<_>>()?;
                return Ok((queue, components, Amount::One));
            }
            Action::Dequeue => Amount::One,
            Action::DequeueMany => Amount::Many(count("DequeueManyOp")?),
            Action::DequeueUpTo => Amount::UpTo(count("DequeueUpToOp")?),
        };
        if queue.spec().dtypes != self.dtypes {
            return Err(Error::invalid_argument(format!(
                "Signature mismatch, the queue holds {:?}, expected {:?}",
                queue.spec().dtypes,
                self.dtypes
            )));
        }
        Ok((queue, Vec::new(), amount))
    }
}

impl AsyncKernel for Access {
    fn start(&self, ctx: &mut KernelCtx<'_>, done: Done) {
        let (queue, components, amount) = match self.arguments(ctx) {
            Ok(arguments) => arguments,
            Err(error) => return done.finish(Err(error)),
        };
        let cancel = ctx.step.cancel();
        match self.action {
            Action::Enqueue => queue.enqueue(components, cancel, done),
            Action::EnqueueMany => queue.enqueue_many(&components, cancel, done),
            Action::Dequeue | Action::DequeueMany | Action::DequeueUpTo => queue.dequeue(amount, cancel, done),
        }
    }
}
