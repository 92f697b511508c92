//! Giving variables new values: `AssignVariableOp`, `AssignAddVariableOp`, `AssignSubVariableOp`, and the same three for
//! references: `Assign`, `AssignAdd`, `AssignSub`. `kolo_graph::Variable` has methods that add them.
//!
//! An assigned value is not copied. A buffer that somebody else holds too cannot be written by anyone, and the variable
//! copies it before its own first write. `use_locking` makes no difference: an update always holds the variable's lock.

use half::{bf16, f16};
use kolo_core::{Error, PartialShape, Result};
use kolo_graph::{Effects, Gradient, InferCtx, OpDef, shape_fns};

use super::handle::uninitialized;
use super::number::combine;
use super::read::{value_shape, wrong_dtype};
use crate::cuda::map::{Expression, run};
use crate::cuda::{NUMBERS, PLAIN, gpu};
use crate::math::number::Number;
use crate::op::{Gpu, KernelDef, Op, cpu_any, cpu_kernels, gpu_kernel};
use crate::{Cost, KernelCtx};

const NOTHING_OUT: Gradient = Gradient::None("nothing comes out");
const STATE: Gradient = Gradient::None("a variable's new value does not depend on a graph");

pub(crate) static ASSIGN_VARIABLE: Op = Op {
    def: OpDef {
        name: "AssignVariableOp",
        signature: "(resource:resource, value:dtype) -> () ; dtype:type, validate_shape:bool=false",
        shape: resource_shapes,
        gradient: NOTHING_OUT,
        stateful: true,
        effects: Effects::Writes,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(assign_variable)],
    gpu: Gpu::Kernels(&[gpu_kernel("dtype", PLAIN, assign_variable)]),
    cost: Cost::Inline,
};

pub(crate) static ASSIGN_ADD_VARIABLE: Op =
    resource_update("AssignAddVariableOp", RESOURCE_ADD)
        .gpu(&[gpu_kernel("dtype", NUMBERS, |ctx| update_on_gpu(ctx, PLUS))]);
pub(crate) static ASSIGN_SUB_VARIABLE: Op =
    resource_update("AssignSubVariableOp", RESOURCE_SUB)
        .gpu(&[gpu_kernel("dtype", NUMBERS, |ctx| update_on_gpu(ctx, MINUS))]);

const fn resource_update(name: &'static str, kernels: &'static [KernelDef]) -> Op {
    Op {
        def: OpDef {
            name,
            signature: "(resource:resource, value:dtype) -> () ; dtype:type",
            shape: resource_shapes,
            gradient: NOTHING_OUT,
            stateful: true,
            effects: Effects::Writes,
            ..OpDef::BASE
        },
        kernels,
        gpu: Gpu::Unstated,
        cost: Cost::Elements,
    }
}

pub(crate) static ASSIGN: Op = Op {
    def: OpDef {
        name: "Assign",
        signature: "(ref:Ref(T), value:T) -> (output_ref:Ref(T)) ; T:type, validate_shape:bool=true, use_locking:bool=true",
        shape: |ctx| {
            if ctx.attrs().bool("validate_shape")? { shape_fns::all_same(ctx) } else { shape_fns::same_as_input_1(ctx) }
        },
        gradient: STATE,
        effects: Effects::Writes,
        allows_uninitialized_input: true,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(assign)],
    gpu: Gpu::Kernels(&[gpu_kernel("T", PLAIN, assign)]),
    cost: Cost::Inline,
};

pub(crate) static ASSIGN_ADD: Op =
    reference_update("AssignAdd", REFERENCE_ADD)
        .gpu(&[gpu_kernel("T", NUMBERS, |ctx| update_on_gpu(ctx, PLUS).and_then(|()| ctx.forward(0, 0)))]);
pub(crate) static ASSIGN_SUB: Op =
    reference_update("AssignSub", REFERENCE_SUB)
        .gpu(&[gpu_kernel("T", NUMBERS, |ctx| update_on_gpu(ctx, MINUS).and_then(|()| ctx.forward(0, 0)))]);

const fn reference_update(name: &'static str, kernels: &'static [KernelDef]) -> Op {
    Op {
        def: OpDef {
            name,
            signature: "(ref:Ref(T), value:T) -> (output_ref:Ref(T)) ; T:type{num}, use_locking:bool=false",
            shape: shape_fns::all_same,
            gradient: STATE,
            effects: Effects::Writes,
            ..OpDef::BASE
        },
        kernels,
        gpu: Gpu::Unstated,
        cost: Cost::Elements,
    }
}

/// No outputs; the value must fit what is known of the variable.
fn resource_shapes(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    value_shape(ctx, 0, ctx.attrs().dtype("dtype")?)?.merge(ctx.input(1))?;
    Ok(Vec::new())
}

fn assign_variable(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let cell = ctx.variable(0)?;
    let value = ctx.take_input(1)?;
    if value.dtype() != cell.dtype() {
        return Err(wrong_dtype("assign", cell.dtype(), value.dtype()));
    }
    if ctx.attrs().bool("validate_shape")? {
        let shape = cell.read().map_or_else(|| cell.shape().clone(), |old| old.shape().into());
        if !shape.admits(value.shape()) {
            return Err(Error::invalid_argument(format!(
                "Trying to assign to variable with tensor with wrong shape. Expected {shape} got {} (variable '{}')",
                value.shape(),
                cell.name()
            )));
        }
    }
    cell.assign_on(ctx.device, value)
}

fn assign(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let cell = ctx.variable(0)?;
    let value = ctx.take_input(1)?;
    if ctx.attrs().bool("validate_shape")? {
        let shape = cell.read().map_or_else(|| cell.shape().clone(), |old| old.shape().into());
        if !shape.admits(value.shape()) {
            return Err(Error::invalid_argument(format!(
                "Assign requires shapes of both tensors to match. lhs shape= {shape} rhs shape= {}",
                value.shape()
            )));
        }
    }
    cell.assign_on(ctx.device, value)?;
    ctx.forward(0, 0)
}

macro_rules! kernels {
    ($($resource:ident, $reference:ident, $on_resource:ident, $on_reference:ident, $f:ident;)*) => {
        $(fn $on_resource<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
            update::<T>(ctx, T::$f)
        }
        fn $on_reference<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
            update::<T>(ctx, T::$f)?;
            ctx.forward(0, 0)
        }
        const $resource: &[KernelDef] =
            cpu_kernels!("dtype", $on_resource: f32, f64, f16, bf16, i8, i16, i32, i64, u8, u16, u32, u64);
        const $reference: &[KernelDef] =
            cpu_kernels!($on_reference: f32, f64, f16, bf16, i8, i16, i32, i64, u8, u16, u32, u64);)*
    };
}

kernels! {
    RESOURCE_ADD, REFERENCE_ADD, add_to_resource, add_to_reference, add;
    RESOURCE_SUB, REFERENCE_SUB, sub_from_resource, sub_from_reference, sub;
}

/// Sets the variable to `f` of itself and input 1, in place.
fn update<T: Number>(ctx: &mut KernelCtx<'_>, f: impl Fn(T, T) -> T + Sync + Copy) -> Result<()> {
    let cell = ctx.variable(0)?;
    if !cell.is_initialized() {
        return Err(uninitialized(ctx, 0, &cell));
    }
    let value = ctx.input(1)?;
    cell.update(|variable| {
        if variable.shape() != value.shape() {
            return Err(Error::invalid_argument(format!(
                "Cannot update variable with shape {} using a Tensor with shape {}, shapes must be equal.",
                variable.shape(),
                value.shape()
            )));
        }
        combine(ctx.pool(), variable.data_mut::<T>()?, value.data::<T>()?, f);
        Ok(())
    })
}

const PLUS: Expression = Expression { name: "AddV2", text: "x0 + x1" };
const MINUS: Expression = Expression { name: "Sub", text: "x0 - x1" };

/// Sets the variable to an expression of itself and input 1, in place.
fn update_on_gpu(ctx: &mut KernelCtx<'_>, expression: Expression) -> Result<()> {
    let cell = ctx.variable(0)?;
    if !cell.is_initialized() {
        return Err(uninitialized(ctx, 0, &cell));
    }
    let (value, device) = (ctx.input(1)?, gpu(ctx)?);
    cell.update_on(device, |variable| {
        if variable.shape() != value.shape() {
            return Err(Error::invalid_argument(format!(
                "Cannot update variable with shape {} using a Tensor with shape {}, shapes must be equal.",
                variable.shape(),
                value.shape()
            )));
        }
        run(device, expression, &[None, Some(value)], variable, &[])
    })
}

#[cfg(test)]
mod tests {
    use kolo_core::{Code, DType, Tensor};
    use kolo_graph::{Graph, Variable, VariableKind};

    use crate::testing::{Evaluation, tensor};

    fn variable<'g>(g: &'g Graph, kind: VariableKind, initial: Tensor) -> Variable<'g> {
        g.new_variable("v", initial).kind(kind).build()
    }

    #[test]
    fn both_families_add_and_subtract_in_place() {
        for kind in [VariableKind::Resource, VariableKind::Reference] {
            let g = crate::graph();
            let v = variable(&g, kind, Tensor::from(vec![10.0f32; 40_000]));
            let add = v.assign_add(g.constant((0..40_000).map(|i| i as f32).collect::<Vec<_>>()));
            let sub = v.assign_sub(g.constant(vec![1.0f32; 40_000]));
            let read = v.read_now();
            g.check().unwrap();
            let run = Evaluation::new(g.snapshot());
            let error = run.run_targets(&[add], &[]).unwrap_err();
            assert_eq!(error.code(), Code::FailedPrecondition);
            let text = match kind {
                VariableKind::Resource => "Error while reading resource variable v",
                VariableKind::Reference => "Attempting to use uninitialized value v",
            };
            assert!(error.to_string().contains(text), "{error}");
            run.run_targets(&[v.initializer()], &[]).unwrap();
            run.run_targets(&[add], &[]).unwrap();
            run.run_targets(&[sub], &[]).unwrap();
            let expected: Vec<f32> = (0..40_000).map(|i| i as f32 + 9.0).collect();
            assert_eq!(run.run(&[read], &[]).unwrap(), [Tensor::from(expected)]);
        }
    }

    #[test]
    fn integers_wrap_and_sizes_0_and_1_work() {
        let g = crate::graph();
        let v = variable(&g, VariableKind::Resource, Tensor::from([i32::MAX]));
        let add = v.assign_add(g.constant([1i32]));
        let empty = g.variable("empty", tensor::<f64, 2>([0, 3], []));
        let add_none = empty.assign_sub(g.constant(tensor::<f64, 2>([0, 3], [])));
        g.check().unwrap();
        let run = Evaluation::new(g.snapshot());
        run.run_targets(&[v.initializer(), empty.initializer()], &[]).unwrap();
        run.run_targets(&[add, add_none], &[]).unwrap();
        let found = run.run(&[v.read(), empty.read()], &[]).unwrap();
        assert_eq!(found, [Tensor::from([i32::MIN]), tensor::<f64, 2>([0, 3], [])]);
    }

    #[test]
    fn a_reference_keeps_its_shape_unless_told_otherwise() {
        let g = crate::graph();
        let v = variable(&g, VariableKind::Reference, Tensor::from([1.0f32, 2.0]));
        let error = g.op("Assign").input(v.handle()).input(g.constant([1.0f32, 2.0, 3.0])).try_build().unwrap_err();
        assert!(error.to_string().contains("not compatible"), "{error}");
        let fed = g.op("Placeholder").name("fed").attr("dtype", DType::F32).out();
        let assign = g.op("Assign").input(v.handle()).input(fed).out();
        let reshape = g.op("Assign").input(v.handle()).input(fed).attr("validate_shape", false).out();
        g.check().unwrap();
        let run = Evaluation::new(g.snapshot());
        let three = [(fed, Tensor::from([1.0f32, 2.0, 3.0]))];
        // Even without a value: the declared shape counts.
        let error = run.run(&[assign], &three).unwrap_err();
        let text = "Assign requires shapes of both tensors to match. lhs shape= [2] rhs shape= [3]";
        assert!(error.to_string().contains(text), "{error}");
        assert_eq!(run.run(&[reshape], &three).unwrap(), [three[0].1.clone()]);
        assert_eq!(run.run(&[assign], &three).unwrap(), [three[0].1.clone()]);
    }

    #[test]
    fn a_resource_takes_any_shape_unless_told_otherwise() {
        let g = crate::graph();
        let v = variable(&g, VariableKind::Resource, Tensor::from([1.0f32, 2.0]));
        let fed = g.op("Placeholder").name("fed").attr("dtype", DType::F32).out();
        let assign = v.assign(fed);
        let strict = g.op("AssignVariableOp").input(v.handle()).input(fed).attr("validate_shape", true).build();
        let add = v.assign_add(fed);
        let wrong = g.op("AssignVariableOp").input(v.handle()).input(g.constant([1i32, 2])).try_build();
        assert!(wrong.unwrap_err().to_string().contains("wrong dtype"));
        g.check().unwrap();
        let run = Evaluation::new(g.snapshot());
        let two = [(fed, Tensor::from([1.0f32, 2.0]))];
        run.run_targets(&[strict], &two).unwrap();
        let three = [(fed, Tensor::from([1.0f32, 2.0, 3.0]))];
        let error = run.run_targets(&[strict], &three).unwrap_err();
        assert!(error.to_string().contains("wrong shape. Expected [2] got [3]"), "{error}");
        let error = run.run_targets(&[add], &three).unwrap_err();
        assert!(error.to_string().contains("Cannot update variable with shape [2] using a Tensor with shape [3]"));
        run.run_targets(&[assign], &three).unwrap();
        assert_eq!(run.run(&[v.read()], &[]).unwrap(), [three[0].1.clone()]);
    }

    #[test]
    fn strings_can_be_assigned() {
        let g = crate::graph();
        let v = g.variable("v", Tensor::from("text"));
        let run = Evaluation::new(g.snapshot());
        run.run_targets(&[v.initializer()], &[]).unwrap();
        assert_eq!(run.run(&[v.read()], &[]).unwrap(), [Tensor::from("text")]);
    }
}
