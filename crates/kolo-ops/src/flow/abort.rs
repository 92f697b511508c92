//! `Abort`: ends the step with an error. TensorFlow's ends the process; a graph has no business with ours.

use kolo_core::{Error, Result};
use kolo_graph::{Effects, Gradient, OpDef};

use crate::op::{Gpu, Op, cpu_any};
use crate::{Cost, KernelCtx};

pub(crate) static ABORT: Op = Op {
    def: OpDef {
        name: "Abort",
        signature: "() -> () ; error_msg:string=\"\", exit_without_error:bool=false",
        gradient: Gradient::None("nothing comes out"),
        effects: Effects::Outside,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(abort)],
    gpu: Gpu::Never("it ends the process"),
    cost: Cost::Inline,
};

fn abort(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let message = ctx.attrs().str("error_msg")?;
    // Not `Aborted`, which a training loop takes for a reason to try again.
    Err(Error::failed_precondition(format!("Abort_op intentional failure; {message}")))
}

#[cfg(test)]
mod tests {
    use crate::testing::Evaluation;

    #[test]
    fn the_step_ends_and_the_process_does_not() {
        let g = crate::graph();
        let abort = g.op("Abort").attr("error_msg", "enough").attr("exit_without_error", true).build();
        let error = Evaluation::new(g.snapshot()).run_targets(&[abort], &[]).unwrap_err();
        assert!(error.message().contains("Abort_op intentional failure; enough"), "{error}");
    }
}
