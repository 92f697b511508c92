//! `VariableV2` and `Variable`: a variable that hands out a reference. `IsVariableInitialized`: whether it has a value.
//!
//! What consumers do with a reference is the executor's part: an op that takes a value gets the value as it is when the
//! op starts.

use kolo_core::{PartialShape, Result, Tensor};
use kolo_graph::{Effects, Gradient, OpDef, Output, OwnedState, shape_fns};

use super::source::Source;
use crate::cuda::PLAIN;
use crate::kernel::KernelInit;
use crate::op::{Gpu, Op, cpu_any, cpu_made, gpu_kernel, gpu_made};
use crate::{Cost, Kernel, KernelCtx, KernelMaker};

/// True if the variable that a reference refers to has a value.
#[track_caller]
pub fn is_variable_initialized(reference: Output<'_>) -> Output<'_> {
    reference.graph().op("IsVariableInitialized").input(reference).out()
}

const SIGNATURE: &str =
    "() -> (ref:Ref(dtype)) ; shape:shape, dtype:type, container:string=\"\", shared_name:string=\"\"";

pub(crate) static VARIABLE_V2: Op = Op {
    def: OpDef {
        name: "VariableV2",
        signature: SIGNATURE,
        shape: shape_fns::from_shape_attr,
        gradient: Gradient::None("a variable has no inputs"),
        stateful: true,
        effects: Effects::Owns(OwnedState::Variable),
        ..OpDef::BASE
    },
    kernels: &[cpu_made(KernelMaker::Object(|init| Reference::make(init, init.attrs().shape("shape")?.clone())))],
    gpu: Gpu::Kernels(&[gpu_made(
        "dtype",
        PLAIN,
        KernelMaker::Object(|init| Reference::make(init, init.attrs().shape("shape")?.clone())),
    )]),
    cost: Cost::Inline,
};

pub(crate) static VARIABLE: Op = Op {
    def: OpDef {
        name: "Variable",
        signature: SIGNATURE,
        shape: |ctx| Ok(vec![legacy_shape(ctx.attrs().shape("shape")?)]),
        gradient: Gradient::None("a variable has no inputs"),
        stateful: true,
        effects: Effects::Owns(OwnedState::Variable),
        ..OpDef::BASE
    },
    kernels: &[cpu_made(KernelMaker::Object(|init| Reference::make(init, legacy_shape(init.attrs().shape("shape")?))))],
    gpu: Gpu::Kernels(&[gpu_made(
        "dtype",
        PLAIN,
        KernelMaker::Object(|init| Reference::make(init, legacy_shape(init.attrs().shape("shape")?))),
    )]),
    cost: Cost::Inline,
};

pub(crate) static IS_VARIABLE_INITIALIZED: Op = Op {
    def: OpDef {
        name: "IsVariableInitialized",
        signature: "(ref:Ref(dtype)) -> (is_initialized:bool) ; dtype:type",
        shape: shape_fns::scalars,
        gradient: Gradient::None("a truth value"),
        effects: Effects::Inspects,
        allows_uninitialized_input: true,
        host_args: &["is_initialized"],
        ..OpDef::BASE
    },
    kernels: &[cpu_any(|ctx| {
        let is_initialized = ctx.variable(0)?.is_initialized();
        ctx.set_output(0, Tensor::scalar(is_initialized));
        Ok(())
    })],
    gpu: Gpu::Kernels(&[gpu_kernel("", &[], |ctx| {
        let is_initialized = ctx.variable(0)?.is_initialized();
        ctx.set_output(0, Tensor::scalar(is_initialized));
        Ok(())
    })]),
    cost: Cost::Inline,
};

/// The oldest op could not tell "scalar" from "unknown", so a scalar is taken for unknown.
fn legacy_shape(shape: &PartialShape) -> PartialShape {
    if shape.rank() == Some(0) { PartialShape::unknown() } else { shape.clone() }
}

/// Gives out one reference again and again.
struct Reference(Source);

impl Reference {
    fn make(init: &KernelInit<'_>, shape: PartialShape) -> Result<Box<dyn Kernel>> {
        Ok(Box::new(Reference(Source::new(init, shape)?)))
    }
}

impl Kernel for Reference {
    fn compute(&self, ctx: &mut KernelCtx<'_>) -> Result<()> {
        let found = self.0.find(ctx)?;
        ctx.set_reference(0, found.cell);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use kolo_core::{Code, DType};
    use kolo_graph::VariableKind;

    use super::*;
    use crate::testing::Evaluation;

    #[test]
    fn a_reference_variable_has_no_value_until_it_is_assigned() {
        let g = crate::graph();
        let v = g.new_variable("v", [1.0f32, 2.0]).kind(VariableKind::Reference).build();
        let is_initialized = is_variable_initialized(v.handle());
        let run = Evaluation::new(g.snapshot());
        assert_eq!(run.run(&[is_initialized], &[]).unwrap(), [Tensor::scalar(false)]);
        let error = run.run(&[v.read()], &[]).unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition);
        assert!(error.to_string().contains("Attempting to use uninitialized value v"), "{error}");
        run.run_targets(&[v.initializer()], &[]).unwrap();
        assert_eq!(run.run(&[is_initialized], &[]).unwrap(), [Tensor::scalar(true)]);
        assert_eq!(run.run(&[v.read()], &[]).unwrap(), [Tensor::from([1.0f32, 2.0])]);
    }

    #[test]
    fn the_oldest_op_takes_any_shape_for_a_scalar() {
        let g = crate::graph();
        let old = g.op("Variable").attr("dtype", DType::F32).attr("shape", PartialShape::scalar()).out();
        assert_eq!(old.shape(), PartialShape::unknown());
        let assign = g.op("Assign").input(old).input(g.constant([1.0f32, 2.0])).out();
        g.check().unwrap();
        assert_eq!(Evaluation::new(g.snapshot()).run(&[assign], &[]).unwrap(), [Tensor::from([1.0f32, 2.0])]);
    }
}
