//! `Identity` and `IdentityN`: the same value under another name; reads a reference. `RefIdentity`: the same reference. `StopGradient`: the same, but no
//! gradient passes. `PreventGradient`: the same, but asking for a gradient is an error.

use kolo_core::{Error, Result};
use kolo_graph::{Effects, Gradient, HalfSafety, HostRule, OpDef, Output, Work, shape_fns};

use crate::cuda::PLAIN;
use crate::op::{Gpu, KernelDef, Op, cpu_any, gpu_kernel};
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

/// The same value, through which no gradient may be asked for; the error then holds `message`.
#[track_caller]
pub fn prevent_gradient<'g>(x: Output<'g>, message: &str) -> Output<'g> {
    x.graph().op("PreventGradient").input(x).attr("message", message).out()
}

/// The same values, all of which must be there before any is passed on.
///
/// # Panics
/// If there are no values.
#[track_caller]
pub fn tuple<'g>(values: &[Output<'g>]) -> Vec<Output<'g>> {
    let first = values.first().expect("tuple needs at least one value");
    first.graph().op("IdentityN").inputs(values.iter().copied()).build().outputs()
}

pub(crate) static IDENTITY: Op =
    pass_on("Identity", Gradient::Same).host(HostRule::SmallIntegers).half(HalfSafety::Neutral);
pub(crate) static STOP_GRADIENT: Op = pass_on("StopGradient", Gradient::None("it was asked to stop here"))
    .host(HostRule::SmallIntegers)
    .half(HalfSafety::Neutral);

/// A promise that the value never changes, of which nothing is made here.
pub(crate) static GUARANTEE_CONST: Op = Op {
    def: OpDef { stateful: true, half: HalfSafety::Neutral, ..pass_on("GuaranteeConst", Gradient::Same).def },
    ..pass_on("GuaranteeConst", Gradient::Same)
};

pub(crate) static IDENTITY_N: Op = Op {
    def: OpDef {
        name: "IdentityN",
        signature: "(input:list(T)) -> (output:list(T)) ; T:list(type)>=1",
        shape: shape_fns::each_as_its_input,
        gradient: Gradient::Rule(|_, dy| Ok(dy.iter().map(|grad| grad.map(Into::into)).collect())),
        host: HostRule::SmallIntegers,
        work: Work::PassesOn,
        handles_from_anywhere: true,
        half: HalfSafety::Neutral,
        ..OpDef::BASE
    },
    kernels: KERNELS,
    gpu: Gpu::Kernels(&[gpu_kernel("", &[], forward)]),
    cost: Cost::Inline,
};

pub(crate) static REF_IDENTITY: Op = Op {
    def: OpDef {
        name: "RefIdentity",
        signature: "(input:Ref(T)) -> (output:Ref(T)) ; T:type",
        shape: shape_fns::same_as_input_0,
        gradient: Gradient::Same,
        effects: Effects::Forwards,
        allows_uninitialized_input: true,
        work: Work::PassesOn,
        ..OpDef::BASE
    },
    kernels: KERNELS,
    gpu: Gpu::Kernels(&[gpu_kernel("T", PLAIN, forward)]),
    cost: Cost::Inline,
};

pub(crate) static PREVENT_GRADIENT: Op = Op {
    def: OpDef {
        name: "PreventGradient",
        signature: "(input:T) -> (output:T) ; T:type, message:string=\"\"",
        shape: shape_fns::same_as_input_0,
        gradient: Gradient::Rule(|op, _| {
            let message = op.attrs(|attrs| attrs.str("message").map(str::to_owned))?;
            Err(Error::invalid_argument(format!("Gradient explicitly disabled. Reason: {message}")))
        }),
        host: HostRule::SmallIntegers,
        work: Work::PassesOn,
        half: HalfSafety::Neutral,
        ..OpDef::BASE
    },
    kernels: KERNELS,
    gpu: Gpu::Kernels(&[gpu_kernel("T", PLAIN, forward)]),
    cost: Cost::Inline,
};

const ON_GPU: &[KernelDef] = &[gpu_kernel("T", PLAIN, forward)];

const fn pass_on(name: &'static str, gradient: Gradient) -> Op {
    Op {
        def: OpDef {
            name,
            signature: "(input:T) -> (output:T) ; T:type",
            shape: shape_fns::same_as_input_0,
            gradient,
            work: Work::PassesOn,
            ..OpDef::BASE
        },
        kernels: KERNELS,
        gpu: Gpu::Kernels(ON_GPU),
        cost: Cost::Inline,
    }
}

const KERNELS: &[KernelDef] = &[cpu_any(forward)];

fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    (0..ctx.n_inputs()).try_for_each(|i| ctx.forward(i, i))
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::testing::{check_op, wavy};

    #[test]
    fn identity() {
        check_op("Identity").input([1.0f32, 2.0]).gives([1.0f32, 2.0]);
        check_op("Identity").input(wavy([3], 1)).gradient();
        check_op("StopGradient").input("text").gives("text");
    }

    #[test]
    fn a_reference_stays_one() {
        let g = crate::graph();
        let v = g.new_variable("v", [1.0f32]).kind(kolo_graph::VariableKind::Reference).build();
        let same = g.op("RefIdentity").input(v.handle()).out();
        assert!(same.is_ref());
        let assign = g.op("Assign").input(same).input(g.constant([5.0f32])).out();
        let run = crate::testing::Evaluation::new(g.snapshot());
        run.run(&[assign], &[]).unwrap();
        assert_eq!(run.run(&[v.read()], &[]).unwrap(), [Tensor::from([5.0f32])]);
    }

    #[test]
    fn no_gradient_passes_stop_gradient() {
        let g = crate::graph();
        let x = g.placeholder::<f32>("x", [2usize]);
        let y = super::stop_gradient(x) * 2.0;
        assert!(kolo_graph::gradients(&[y], &[x]).unwrap()[0].is_none());
    }

    #[test]
    fn several_values_pass_together() {
        let values = || [Tensor::from([1.0f32, 2.0]), Tensor::from("a"), Tensor::from(3i64)];
        values().into_iter().fold(check_op("IdentityN"), |op, value| op.input(value)).gives_all(values());
        check_op("IdentityN").input(wavy([2], 0)).input(wavy([3], 1)).gradient();
    }

    #[test]
    fn a_prevented_gradient_says_why() {
        check_op("PreventGradient").input(7i32).gives(7i32);
        let g = crate::graph();
        let x = g.placeholder::<f32>("x", [2usize]);
        let y = super::prevent_gradient(x, "not twice");
        let error = kolo_graph::gradients(&[y], &[x]).err().unwrap();
        assert!(error.to_string().contains("Gradient explicitly disabled. Reason: not twice"), "{error}");
    }
}
