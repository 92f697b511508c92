//! `Identity`: the same value under another name; reads a reference. `StopGradient`: the same, but no gradient passes.

use kolo_core::Result;
use kolo_graph::{Gradient, OpDef, Output, shape_fns};

use crate::op::{KernelDef, Op, cpu_any};
use crate::{Cost, KernelCtx};

/// The same value.
#[track_caller]
pub fn identity(x: Output<'_>) -> Output<'_> {
    x.graph().op("Identity").input(x).out()
}

/// The same value, which gradients take for a constant.
#[track_caller]
pub fn stop_gradient(x: Output<'_>) -> Output<'_> {
    x.graph().op("StopGradient").input(x).out()
}

pub(crate) static IDENTITY: Op = pass_on("Identity", Gradient::Same);
pub(crate) static STOP_GRADIENT: Op = pass_on("StopGradient", Gradient::None("it was asked to stop here"));

const fn pass_on(name: &'static str, gradient: Gradient) -> Op {
    Op {
        def: OpDef {
            name,
            signature: "(input:T) -> (output:T) ; T:type",
            shape: shape_fns::same_as_input_0,
            gradient,
            ..OpDef::BASE
        },
        kernels: KERNELS,
        cost: Cost::Inline,
    }
}

const KERNELS: &[KernelDef] = &[cpu_any(forward)];

fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    ctx.forward(0, 0)
}

#[cfg(test)]
mod tests {
    use crate::testing::{check_op, wavy};

    #[test]
    fn identity() {
        check_op("Identity").input([1.0f32, 2.0]).gives([1.0f32, 2.0]);
        check_op("Identity").input(wavy([3], 1)).gradient();
        check_op("StopGradient").input("text").gives("text");
    }

    #[test]
    fn no_gradient_passes_stop_gradient() {
        let g = crate::graph();
        let x = g.placeholder::<f32>("x", [2usize]);
        let y = super::stop_gradient(x) * 2.0;
        assert!(kolo_graph::gradients(&[y], &[x]).unwrap()[0].is_none());
    }
}
