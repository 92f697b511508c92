//! `VarHandleOp` and what can be asked of a handle: `VarIsInitializedOp`, `VariableShape`, `DestroyResourceOp`,
//! `DisableCopyOnRead`.

use std::sync::Arc;

use kolo_core::{Error, PartialShape, Result, Tensor};
use kolo_graph::{Effects, Gradient, HandleRule, HostRule, OpDef, Operation, Output, OwnedState, Work, shape_fns};

use super::source::Source;
use crate::array::shape::shape_tensor;
use crate::cuda::PLAIN;
use crate::kernel::KernelInit;
use crate::op::{Gpu, Op, cpu_any, cpu_made, gpu_kernel, gpu_made};
use crate::{Cost, Kernel, KernelCtx, KernelMaker, VariableCell};

/// True if the variable behind a handle has a value.
#[track_caller]
pub fn var_is_initialized(handle: Output<'_>) -> Output<'_> {
    handle.graph().op("VarIsInitializedOp").input(handle).out()
}

/// The shape of the value of the variable behind a handle, as int32.
#[track_caller]
pub fn variable_shape(handle: Output<'_>) -> Output<'_> {
    handle.graph().op("VariableShape").input(handle).out()
}

/// Forgets the object behind a handle.
#[track_caller]
pub fn destroy_resource(handle: Output<'_>) -> Operation<'_> {
    handle.graph().op("DestroyResourceOp").input(handle).build()
}

pub(crate) static VAR_HANDLE: Op = Op {
    def: OpDef {
        name: "VarHandleOp",
        signature: "() -> (resource:resource) ; container:string=\"\", shared_name:string=\"\", debug_name:string=\"\", \
                    dtype:type, shape:shape, allowed_devices:list(string)=[]",
        shape: shape_fns::scalars,
        gradient: Gradient::None("a handle has no inputs"),
        stateful: true,
        effects: Effects::Owns(OwnedState::Variable),
        handle: HandleRule::FromAttrs,
        ..OpDef::BASE
    },
    kernels: &[cpu_made(KernelMaker::Object(VarHandle::make))],
    gpu: Gpu::Kernels(&[gpu_made("dtype", PLAIN, KernelMaker::Object(VarHandle::make))]),
    cost: Cost::Inline,
};

pub(crate) static VAR_IS_INITIALIZED: Op = Op {
    def: OpDef {
        name: "VarIsInitializedOp",
        signature: "(resource:resource) -> (is_initialized:bool)",
        shape: shape_fns::scalars,
        gradient: Gradient::None("a truth value"),
        stateful: true,
        effects: Effects::Inspects,
        host: HostRule::Always,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(|ctx| {
        let is_initialized = ctx.variable(0)?.is_initialized();
        ctx.set_output(0, Tensor::scalar(is_initialized));
        Ok(())
    })],
    gpu: Gpu::Host,
    cost: Cost::Inline,
};

pub(crate) static VARIABLE_SHAPE: Op = Op {
    def: OpDef {
        name: "VariableShape",
        signature: "(input:resource) -> (output:out_type) ; out_type:type{int32,int64}=int32",
        shape: |ctx| Ok(vec![PartialShape::new(&[ctx.handle(0).and_then(|(_, shape)| shape.rank())])]),
        gradient: Gradient::None("shapes are integers"),
        stateful: true,
        effects: Effects::Inspects,
        work: Work::Measures,
        host_args: &["output"],
        ..OpDef::BASE
    },
    kernels: &[cpu_any(|ctx| {
        let value = read_resource(ctx, 0)?;
        let shape = shape_tensor(&value, ctx.attrs().dtype("out_type")?)?;
        ctx.set_output(0, shape);
        Ok(())
    })],
    gpu: Gpu::Kernels(&[gpu_kernel("", &[], |ctx| {
        let value = read_resource(ctx, 0)?;
        let shape = shape_tensor(&value, ctx.attrs().dtype("out_type")?)?;
        ctx.set_output(0, shape);
        Ok(())
    })]),
    cost: Cost::Inline,
};

pub(crate) static DESTROY_RESOURCE: Op = Op {
    def: OpDef {
        name: "DestroyResourceOp",
        signature: "(resource:resource) -> () ; ignore_lookup_error:bool=true",
        gradient: Gradient::None("nothing comes out"),
        stateful: true,
        effects: Effects::Uses,
        host: HostRule::Always,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(destroy)],
    gpu: Gpu::Host,
    cost: Cost::Inline,
};

pub(crate) static DISABLE_COPY_ON_READ: Op = Op {
    def: OpDef {
        name: "DisableCopyOnRead",
        signature: "(resource:resource) -> ()",
        gradient: Gradient::None("nothing comes out"),
        stateful: true,
        effects: Effects::Inspects,
        host: HostRule::Always,
        ..OpDef::BASE
    },
    // Reads never copy here; writers do, if a reader still holds the value.
    kernels: &[cpu_any(|ctx| ctx.variable(0).map(drop))],
    gpu: Gpu::Host,
    cost: Cost::Inline,
};

/// Gives out one handle again and again.
struct VarHandle(Source);

impl VarHandle {
    fn make(init: &KernelInit<'_>) -> Result<Box<dyn Kernel>> {
        let shape = init.attrs().shape("shape")?.clone();
        Ok(Box::new(VarHandle(Source::new(init, shape)?)))
    }
}

impl Kernel for VarHandle {
    fn compute(&self, ctx: &mut KernelCtx<'_>) -> Result<()> {
        let found = self.0.find(ctx)?;
        ctx.set_output(0, found.handle);
        Ok(())
    }
}

/// The value of the variable behind resource input `i`, in TensorFlow's words if there is none.
pub(super) fn read_resource(ctx: &KernelCtx<'_>, i: usize) -> Result<Tensor> {
    let cell = ctx.variable(i)?;
    cell.read().ok_or_else(|| uninitialized(ctx, i, &cell))
}

/// Why the variable behind input `i` cannot be read.
pub(crate) fn uninitialized(ctx: &KernelCtx<'_>, i: usize, cell: &Arc<VariableCell>) -> Error {
    match ctx.input(i).and_then(Tensor::resource) {
        Ok(handle) => Error::failed_precondition(format!(
            "Error while reading resource variable {} from Container: {}. This could mean that the variable was \
             uninitialized. Could not find variable {}",
            cell.name(),
            handle.container,
            cell.name()
        )),
        Err(_) => Error::failed_precondition(format!("Attempting to use uninitialized value {}", cell.name())),
    }
}

fn destroy(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let handle = ctx.input(0)?.resource()?.clone();
    let removed = ctx.step.resources().remove(&handle.container, &handle.name);
    // Handles that are still about must not read it either. A variable without a value does not exist for TensorFlow.
    let existed = match ctx.step.resources().variable(&handle) {
        Ok(cell) => cell.clear().is_some(),
        Err(_) => removed,
    };
    if existed || ctx.attrs().bool("ignore_lookup_error")? {
        return Ok(());
    }
    Err(Error::not_found(format!("Resource {}/{} does not exist.", handle.container, handle.name)))
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use super::*;
    use crate::testing::Evaluation;

    #[test]
    fn a_handle_outlives_what_it_named() {
        let g = crate::graph();
        let v = g.variable("v", [1.0f32, 2.0]);
        let is_initialized = var_is_initialized(v.handle());
        let shape = variable_shape(v.handle());
        let destroy = destroy_resource(v.handle());
        let strict =
            g.op("DestroyResourceOp").name("strict").input(v.handle()).attr("ignore_lookup_error", false).build();
        let touch = g.op("DisableCopyOnRead").input(v.handle()).build();
        g.check().unwrap();
        let run = Evaluation::new(g.snapshot());
        let ask = || run.run(&[is_initialized], &[]).unwrap();
        assert_eq!(ask(), [Tensor::scalar(false)]);
        let error = run.run(&[shape], &[]).unwrap_err();
        assert_eq!(error.code(), kolo_core::Code::FailedPrecondition);
        assert!(error.to_string().contains("resource variable v from Container: localhost"), "{error}");
        run.run_targets(&[v.initializer(), touch], &[]).unwrap();
        assert_eq!(ask(), [Tensor::scalar(true)]);
        assert_eq!(run.run(&[shape], &[]).unwrap(), [Tensor::from([2i32])]);
        run.run_targets(&[strict], &[]).unwrap();
        assert_eq!(ask(), [Tensor::scalar(false)]);
        run.run_targets(&[destroy], &[]).unwrap();
        let error = run.run_targets(&[strict], &[]).unwrap_err();
        assert_eq!(error.code(), kolo_core::Code::NotFound);
    }

    #[test]
    fn nodes_with_one_shared_name_are_one_variable() {
        let g = crate::graph();
        let handle = |name: &str, dtype: kolo_core::DType| {
            g.op("VarHandleOp")
                .name(name)
                .attr("shared_name", "shared")
                .attr("dtype", dtype)
                .attr("shape", PartialShape::unknown())
                .out()
        };
        let (a, b, other) = (
            handle("a", kolo_core::DType::F32),
            handle("b", kolo_core::DType::F32),
            handle("c", kolo_core::DType::I32),
        );
        let assign = g.op("AssignVariableOp").input(a).input(g.constant(3.0f32)).build();
        let read = g.op("ReadVariableOp").input(b).attr("dtype", kolo_core::DType::F32).out();
        let wrong = var_is_initialized(other);
        g.check().unwrap();
        let run = Evaluation::new(g.snapshot());
        assert_eq!(run.run(&[wrong], &[]).unwrap(), [Tensor::scalar(false)]);
        run.run_targets(&[assign], &[]).unwrap();
        assert_eq!(run.run(&[read], &[]).unwrap(), [Tensor::scalar(3.0f32)]);
        let error = run.run(&[wrong], &[]).unwrap_err();
        assert!(error.to_string().contains("exists as float, but is declared as int32"), "{error}");
    }

    #[test]
    fn variables_called_alike_are_kept_apart() {
        let g = crate::graph();
        let (a, b) = (g.variable("w", 1.0f32), g.variable("w", 2.0f32));
        let init = g.global_variables_initializer();
        g.check().unwrap();
        let run = Evaluation::new(g.snapshot());
        run.run_targets(&[init], &[]).unwrap();
        assert_eq!((a.name().as_str(), b.name().as_str()), ("w", "w_1"));
        assert_eq!(run.run(&[a.read(), b.read()], &[]).unwrap(), [Tensor::scalar(1.0f32), Tensor::scalar(2.0f32)]);
    }
}
