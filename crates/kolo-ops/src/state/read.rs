//! `ReadVariableOp`: the value of a variable, as it is now. Later writes do not change what was read.

use kolo_core::{DType, Error, PartialShape, Result, Tensor};
use kolo_graph::{Effects, Gradient, InferCtx, OpDef, Output, Work};

use super::handle::read_resource;
use crate::cuda::PLAIN;
use crate::op::{Gpu, Op, cpu_any, gpu_kernel};
use crate::{Cost, KernelCtx};

/// The value of the variable behind a handle whose dtype is known, as it is when the control dependencies that are open
/// now have run.
#[track_caller]
pub fn read_variable(handle: Output<'_>) -> Output<'_> {
    let dtype = handle.handle().map_or(DType::F32, |(dtype, _)| dtype);
    handle.graph().op("ReadVariableOp").input(handle).attr("dtype", dtype).out()
}

pub(crate) static READ_VARIABLE: Op = Op {
    def: OpDef {
        name: "ReadVariableOp",
        signature: "(resource:resource) -> (value:dtype) ; dtype:type",
        shape: |ctx| Ok(vec![value_shape(ctx, 0, ctx.attrs().dtype("dtype")?)?]),
        gradient: Gradient::Same,
        stateful: true,
        effects: Effects::Reads,
        work: Work::PassesOn,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(|ctx| read(ctx, 0))],
    gpu: Gpu::Kernels(&[gpu_kernel("dtype", PLAIN, |ctx| read(ctx, 0))]),
    cost: Cost::Inline,
};

pub(crate) static READ_VARIABLES: Op = Op {
    def: OpDef {
        name: "_ReadVariablesOp",
        signature: "(resources:N*resource) -> (values:list(dtypes)) ; N:int>=0, dtypes:list(type)>=1",
        shape: |ctx| {
            let dtypes = ctx.attrs().dtypes("dtypes")?;
            if dtypes.len() != ctx.n_inputs() {
                return Err(Error::invalid_argument(format!("{} dtypes for {} handles", dtypes.len(), ctx.n_inputs())));
            }
            dtypes.into_iter().enumerate().map(|(i, dtype)| value_shape(ctx, i, dtype)).collect()
        },
        gradient: Gradient::Refused("reads that were put together are not differentiated; differentiate before"),
        stateful: true,
        effects: Effects::Reads,
        work: Work::PassesOn,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(|ctx| (0..ctx.n_inputs()).try_for_each(|i| read(ctx, i)))],
    gpu: Gpu::Kernels(&[gpu_kernel("", &[], |ctx| (0..ctx.n_inputs()).try_for_each(|i| read(ctx, i)))]),
    cost: Cost::Inline,
};

/// The shape of the variable behind input `i`; an error if it is known to be of another dtype.
pub(super) fn value_shape(ctx: &InferCtx<'_>, i: usize, dtype: DType) -> Result<PartialShape> {
    match ctx.handle(i) {
        Some((found, _)) if *found != dtype => Err(wrong_dtype("read", dtype, *found)),
        Some((_, shape)) => Ok(shape.clone()),
        None => Ok(PartialShape::unknown()),
    }
}

/// TensorFlow's words.
pub(super) fn wrong_dtype(verb: &str, expected: DType, found: DType) -> Error {
    Error::invalid_argument(format!("Trying to {verb} variable with wrong dtype. Expected {expected} got {found}"))
}

fn read(ctx: &mut KernelCtx<'_>, i: usize) -> Result<()> {
    let value: Tensor = read_resource(ctx, i)?;
    let declared = ctx.node.outputs.get(i).map_or(value.dtype(), |output| output.dtype);
    if value.dtype() != declared {
        return Err(wrong_dtype("read", declared, value.dtype()));
    }
    ctx.set_output(i, value);
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::Code;

    use super::*;
    use crate::testing::Evaluation;

    #[test]
    fn a_read_is_a_snapshot() {
        let g = crate::graph();
        let v = g.variable("v", vec![1.0f32; 5]);
        let before = v.read();
        let add = g.control_dependencies(&[before.operation()], || v.assign_add(g.constant(vec![1.0f32; 5])));
        let after = g.control_dependencies(&[add], || read_variable(v.handle()));
        let both =
            g.op("_ReadVariablesOp").inputs([v.handle(), v.handle()]).attr("dtypes", vec![DType::F32; 2]).build();
        g.check().unwrap();
        let run = Evaluation::new(g.snapshot());
        let error = run.run(&[before], &[]).unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition);
        assert!(error.to_string().contains("Error while reading resource variable v from Container: localhost"));
        run.run_targets(&[v.initializer()], &[]).unwrap();
        let found = run.run(&[before, after], &[]).unwrap();
        assert_eq!(found, [Tensor::from(vec![1.0f32; 5]), Tensor::from(vec![2.0f32; 5])]);
        let found = run.run(&both.outputs(), &[]).unwrap();
        assert_eq!(found, [Tensor::from(vec![2.0f32; 5]), Tensor::from(vec![2.0f32; 5])]);
    }

    #[test]
    fn the_gradient_passes_to_the_handle() {
        let g = crate::graph();
        let v = g.variable("v", [1.0f32, 2.0]);
        let y = v.read() * g.constant([3.0f32, 3.0]);
        let grad_ys = vec![Some(g.constant([1.0f32, 1.0]))];
        let options = kolo_graph::GradientOptions { grad_ys, ..Default::default() };
        let grads = kolo_graph::gradients_with(&[y], &[v.handle()], &options).unwrap();
        assert!(grads[0].is_some());
    }

    #[test]
    fn another_dtype_is_refused_when_the_graph_is_built() {
        let g = crate::graph();
        let v = g.variable("v", [1.0f32, 2.0]);
        let error = g.op("ReadVariableOp").input(v.handle()).attr("dtype", DType::I32).try_build().unwrap_err();
        assert!(error.to_string().contains("wrong dtype. Expected int32 got float"), "{error}");
    }
}
