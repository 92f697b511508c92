//! `TemporaryVariable`: a variable that lives as long as the step. `DestroyTemporaryVariable`: its value, and its end.

use kolo_core::{Error, Result};
use kolo_graph::{Effects, Gradient, OpDef, OwnedState, shape_fns};

use crate::cuda::PLAIN;
use crate::op::{Gpu, Op, cpu_any, gpu_kernel};
use crate::{Cost, KernelCtx, VariableCell};

/// Where they are kept in the step's store.
const CONTAINER: &str = "tmp_var";

pub(crate) static TEMPORARY_VARIABLE: Op = Op {
    def: OpDef {
        name: "TemporaryVariable",
        signature: "() -> (ref:Ref(dtype)) ; shape:shape, dtype:type, var_name:string=\"\"",
        shape: shape_fns::from_shape_attr,
        gradient: Gradient::None("a variable has no inputs"),
        stateful: true,
        effects: Effects::Owns(OwnedState::Other),
        ..OpDef::BASE
    },
    kernels: &[cpu_any(make)],
    gpu: Gpu::Kernels(&[gpu_kernel("dtype", PLAIN, make)]),
    cost: Cost::Inline,
};

pub(crate) static DESTROY_TEMPORARY_VARIABLE: Op = Op {
    def: OpDef {
        name: "DestroyTemporaryVariable",
        signature: "(ref:Ref(T)) -> (value:T) ; T:type, var_name:string",
        shape: shape_fns::same_as_input_0,
        gradient: Gradient::None("a variable's value does not depend on a graph"),
        effects: Effects::Uses,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(destroy)],
    gpu: Gpu::Kernels(&[gpu_kernel("T", PLAIN, destroy)]),
    cost: Cost::Inline,
};

/// Each iteration of a loop has its own.
fn name_in_step(name: &str, ctx: &KernelCtx<'_>) -> String {
    format!("{name}/{}", ctx.frame_iteration)
}

fn make(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let attrs = ctx.attrs();
    let (dtype, shape) = (attrs.dtype("dtype")?, attrs.shape("shape")?);
    let name = match attrs.str("var_name")? {
        "" => &ctx.node.name,
        name => name,
    };
    let known = shape
        .known()
        .ok_or_else(|| Error::invalid_argument(format!("temporary variable {name} has no full shape: {shape}")))?;
    let cell = VariableCell::new(name, dtype, shape.clone());
    cell.assign(ctx.allocate_zeroed(dtype, known)?)?;
    let mut is_new = false;
    let found = ctx.step.step_resources().lookup_or_create(CONTAINER, &name_in_step(name, ctx), || {
        is_new = true;
        Ok(cell)
    })?;
    if !is_new {
        return Err(Error::already_exists(format!("temporary variable {name} exists already in this step")));
    }
    ctx.set_reference(0, found);
    Ok(())
}

fn destroy(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let cell = ctx.variable(0)?;
    let name = ctx.attrs().str("var_name")?;
    if !ctx.step.step_resources().remove(CONTAINER, &name_in_step(name, ctx)) {
        return Err(Error::not_found(format!("there is no temporary variable {name} in this step")));
    }
    let value = cell
        .clear()
        .ok_or_else(|| Error::failed_precondition(format!("Attempting to use uninitialized value {name}")))?;
    ctx.set_output(0, value);
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::{DType, PartialShape};

    use crate::testing::Evaluation;

    #[test]
    fn a_temporary_variable_ends_with_its_value() {
        let g = crate::graph();
        let shape = PartialShape::from([2usize]);
        let tmp = g.op("TemporaryVariable").name("tmp").attr("dtype", DType::F32).attr("shape", shape.clone()).out();
        let assign = g.op("AssignAdd").input(tmp).input(g.constant([1.0f32, 2.0])).out();
        let value = g.op("DestroyTemporaryVariable").input(assign).attr("var_name", "tmp").out();
        let wrong = g.op("DestroyTemporaryVariable").input(assign).attr("var_name", "other").out();
        let open = g.op("TemporaryVariable").attr("dtype", DType::F32).attr("shape", PartialShape::unknown()).out();
        g.check().unwrap();
        let run = Evaluation::new(g.snapshot());
        // Twice: the second one begins with zeros again.
        for _ in 0..2 {
            assert_eq!(run.run(&[value], &[]).unwrap(), [kolo_core::Tensor::from([1.0f32, 2.0])]);
        }
        assert!(run.run(&[open], &[]).unwrap_err().to_string().contains("no full shape"));
        assert!(run.run(&[wrong], &[]).unwrap_err().to_string().contains("no temporary variable other"));
        assert!(run.run(&[tmp], &[]).unwrap_err().to_string().contains("exists already"));
    }
}
