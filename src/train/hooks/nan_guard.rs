//! Stops when the loss is not a number.

use kolo_core::{DType, Error, Result, Tensor};
use kolo_graph::Output;

use crate::train::{RunArgs, RunContext, RunValues, SessionHook};

/// Watches a loss and fails the run, or asks to stop, when it is NaN or infinite.
pub struct NanGuard<'g> {
    loss: Output<'g>,
    fails: bool,
}

impl<'g> NanGuard<'g> {
    /// Fails the run in which `loss` stops being finite.
    pub fn new(loss: Output<'g>) -> NanGuard<'g> {
        NanGuard { loss, fails: true }
    }

    /// Asks to stop instead of failing.
    pub fn stop_only(mut self) -> Self {
        self.fails = false;
        self
    }
}

impl<'g> SessionHook<'g> for NanGuard<'g> {
    fn name(&self) -> &'static str {
        "NanGuard"
    }

    fn before_run(&mut self, _context: &RunContext<'_, 'g>) -> Result<RunArgs<'g>> {
        Ok(RunArgs::fetch([self.loss]))
    }

    fn after_run(&mut self, context: &RunContext<'_, 'g>, values: &RunValues<'_>) -> Result<()> {
        if values.values.iter().all(is_finite) {
            return Ok(());
        }
        let step = context.step_now()?.map_or("unknown".to_owned(), |step| step.to_string());
        let text = format!(
            "the loss '{}' is {} at global step {step}; try a smaller learning rate, or clip the gradients",
            self.loss.name(),
            values.values.first().map_or(String::new(), |value| format!("{value:?}"))
        );
        if self.fails {
            return Err(Error::invalid_argument(text));
        }
        tracing::error!(target: "kolo::train", "{text}");
        context.request_stop();
        Ok(())
    }
}

fn is_finite(value: &Tensor) -> bool {
    match value.dtype() {
        DType::F32 => value.data::<f32>().is_ok_and(|v| v.iter().all(|x| x.is_finite())),
        DType::F64 => value.data::<f64>().is_ok_and(|v| v.iter().all(|x| x.is_finite())),
        DType::F16 => value.data::<half::f16>().is_ok_and(|v| v.iter().all(|x| x.is_finite())),
        DType::BF16 => value.data::<half::bf16>().is_ok_and(|v| v.iter().all(|x| x.is_finite())),
        _ => true,
    }
}
