//! `RefSelect`: one of several references, by number.

use kolo_core::{Error, PartialShape, Result};
use kolo_graph::{Effects, Gradient, OpDef};

use crate::op::{Gpu, Op, cpu_any};
use crate::{Cost, KernelCtx};

pub(crate) static REF_SELECT: Op = Op {
    def: OpDef {
        name: "RefSelect",
        signature: "(index:int32, inputs:Ref(N*T)) -> (output:Ref(T)) ; T:type, N:int>=1",
        shape: |ctx| {
            ctx.input_of_rank(0, 0)?;
            let mut shape = ctx.input(1).clone();
            for i in 2..ctx.n_inputs() {
                shape = shape.relax(ctx.input(i));
            }
            Ok(vec![if shape.known().is_some() { shape } else { PartialShape::unknown() }])
        },
        gradient: Gradient::Refused("RefSelect has no gradient"),
        effects: Effects::Forwards,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(select)],
    gpu: Gpu::Missing,
    cost: Cost::Inline,
};

fn select(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let shape = ctx.input(0)?.shape();
    if shape.rank() != 0 {
        return Err(Error::invalid_argument(format!("Index must be a scalar, but it has shape {shape}")));
    }
    let (index, n) = (ctx.scalar::<i32>(0)?, ctx.n_inputs() - 1);
    match usize::try_from(index) {
        Ok(index) if index < n => ctx.forward(index + 1, 0),
        _ => Err(Error::invalid_argument(format!("Index must be in [0, {n}), found {index}"))),
    }
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;
    use kolo_graph::VariableKind;

    use crate::testing::Evaluation;

    #[test]
    fn one_reference_is_passed_on() {
        let g = crate::graph();
        let make = |name: &str, value: f32| g.new_variable(name, [value]).kind(VariableKind::Reference).build();
        let (a, b) = (make("a", 1.0), make("b", 2.0));
        let index = g.placeholder::<i32>("i", kolo_core::PartialShape::scalar());
        let chosen = g.op("RefSelect").input(index).inputs([a.handle(), b.handle()]).out();
        assert!(chosen.is_ref());
        let assign = g.op("Assign").input(chosen).input(g.constant([9.0f32])).out();
        let run = Evaluation::new(g.snapshot());
        run.run_targets(&[a.initializer(), b.initializer()], &[]).unwrap();
        run.run(&[assign], &[(index, Tensor::scalar(1i32))]).unwrap();
        assert_eq!(run.run(&[a.read(), b.read()], &[]).unwrap(), [Tensor::from([1.0f32]), Tensor::from([9.0f32])]);
        let error = run.run(&[assign], &[(index, Tensor::scalar(2i32))]).unwrap_err();
        assert!(error.message().contains("Index must be in [0, 2)"), "{error}");
    }
}
