//! `Assert`: fails the step unless a condition holds, and shows some values.

use kolo_core::{Error, Result};
use kolo_graph::{Effects, Gradient, OpDef, Operation, Output};

use super::print::summary;
use crate::op::{Gpu, Op, cpu_any};
use crate::{Cost, KernelCtx};

/// Fails the step with some elements of each of `data` unless `condition`, a bool scalar, is true.
#[track_caller]
pub fn assert<'g>(condition: Output<'g>, data: &[Output<'g>]) -> Operation<'g> {
    condition.graph().op("Assert").input(condition).inputs(data.iter().copied()).build()
}

pub(crate) static ASSERT: Op = Op {
    def: OpDef {
        name: "Assert",
        signature: "(condition:bool, data:list(T)) -> () ; T:list(type)>=1, summarize:int=3",
        shape: |ctx| ctx.input_of_rank(0, 0).map(|_| Vec::new()),
        gradient: Gradient::None("nothing comes out"),
        stateful: true,
        effects: Effects::Outside,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(check)],
    gpu: Gpu::Never("it prints on the host"),
    cost: Cost::Inline,
};

fn check(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let condition = ctx.input(0)?;
    if condition.shape().rank() != 0 {
        return Err(Error::invalid_argument(format!("In[0] should be a scalar: {}", condition.shape())));
    }
    if ctx.scalar::<bool>(0)? {
        return Ok(());
    }
    let limit = ctx.attrs().int("summarize")?;
    let data: Vec<String> =
        (1..ctx.n_inputs()).map(|i| Ok(format!("[{}]", summary(ctx.input(i)?, limit)))).collect::<Result<_>>()?;
    Err(Error::invalid_argument(format!("assertion failed: {}", data.join(" "))))
}

#[cfg(test)]
mod tests {
    use kolo_core::Code;

    use super::*;
    use crate::testing::Evaluation;

    /// Runs an assertion over a text and four numbers.
    fn run(condition: bool, summarize: i64) -> Result<()> {
        let g = crate::graph();
        let data = [g.constant("x:"), g.constant([1i32, 2, 3, 4])];
        let builder = g.op("Assert").input(g.constant(condition)).inputs(data);
        let check = builder.attr("summarize", summarize).build();
        g.check()?;
        Evaluation::new(g.snapshot()).run_targets(&[check], &[])
    }

    #[test]
    fn a_false_condition_shows_the_data() {
        assert_eq!(run(true, 3), Ok(()));
        let error = run(false, 3).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        assert_eq!(error.message(), "assertion failed: [x:] [1 2 3...]");
        assert_eq!(run(false, -1).unwrap_err().message(), "assertion failed: [x:] [1 2 3 4]");
    }

    #[test]
    fn a_condition_is_a_scalar() {
        let g = crate::graph();
        assert(g.constant([true, true]), &[g.constant(1i32)]);
        assert!(g.check().unwrap_err().to_string().contains("should have rank 0"));
        let g = crate::graph();
        let fed = g.op("Placeholder").attr("dtype", kolo_core::DType::Bool).out();
        let check = assert(fed, &[g.constant(1i32)]);
        let feeds = [(fed, kolo_core::Tensor::from([true]))];
        let error = Evaluation::new(g.snapshot()).run_targets(&[check], &feeds).unwrap_err();
        assert!(error.message().contains("In[0] should be a scalar: [1]"), "{error}");
    }
}
