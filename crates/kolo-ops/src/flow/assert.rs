//! `Assert`: fails the step unless a condition holds, and shows some values.

use kolo_core::{Error, Result};
use kolo_graph::{Gradient, OpDef, Operation, Output};

use super::print::summary;
use crate::op::{Op, cpu_any};
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
        ..OpDef::BASE
    },
    kernels: &[cpu_any(check)],
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

    use crate::testing::check_op;

    #[test]
    fn a_false_condition_shows_the_data() {
        let check = |condition: bool| check_op("Assert").input(condition).input("x:").input([1i32, 2, 3, 4]);
        assert_eq!(check(true).run(false), Ok(Vec::new()));
        let error = check(false).run(false).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        assert_eq!(error.message(), "assertion failed: [x:] [1 2 3...]");
        check(false).attr("summarize", -1i64).fails("assertion failed: [x:] [1 2 3 4]");
        check_op("Assert").input([true, true]).input(1i32).fails("should have rank 0");
    }
}
