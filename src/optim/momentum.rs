//! Momentum: `accum = momentum · accum + grad; var -= rate · accum`, and Nesterov's variant of it.

use kolo_core::Result;
use kolo_graph::{IndexedSlices, Initializer, Operation, Output, Variable};

use super::update::{Update, apply, deduplicate};
use super::{Core, LearningRate, Optimizer};

/// Gradient descent with momentum.
#[derive(Debug)]
pub struct Momentum {
    core: Core,
    momentum: f64,
    nesterov: bool,
}

impl Momentum {
    /// Steps of `rate` along a sum of gradients that fades by `momentum`.
    pub fn new(rate: impl Into<LearningRate>, momentum: f64) -> Momentum {
        Momentum { core: Core::new("Momentum", rate), momentum, nesterov: false }
    }

    /// Takes the gradient where the momentum will have led (Nesterov, 1983).
    #[must_use]
    pub fn nesterov(mut self) -> Momentum {
        self.nesterov = true;
        self
    }
}

impl Optimizer for Momentum {
    fn core(&self) -> &Core {
        &self.core
    }

    fn slot_names(&self) -> Vec<&'static str> {
        vec!["momentum"]
    }

    fn create_slots<'g>(&self, variables: &[Variable<'g>]) -> Result<()> {
        variables.iter().try_for_each(|&v| self.core.slot(v, "momentum", Initializer::Zeros).map(drop))
    }

    fn apply_dense<'g>(
        &self,
        update: &Update<'_, 'g>,
        variable: Variable<'g>,
        grad: Output<'g>,
    ) -> Result<Operation<'g>> {
        let accum = update.slot(variable, "momentum")?;
        let momentum = update.number("momentum", self.momentum, variable);
        let inputs = [update.rate(variable), grad, momentum];
        Ok(apply("ApplyMomentum", &[variable, accum], &inputs, &[("use_nesterov", self.nesterov)]))
    }

    fn apply_sparse<'g>(
        &self,
        update: &Update<'_, 'g>,
        variable: Variable<'g>,
        slices: IndexedSlices<'g>,
    ) -> Result<Operation<'g>> {
        let accum = update.slot(variable, "momentum")?;
        let momentum = update.number("momentum", self.momentum, variable);
        let slices = deduplicate(slices);
        let inputs = [update.rate(variable), slices.values, slices.indices, momentum];
        Ok(apply("SparseApplyMomentum", &[variable, accum], &inputs, &[("use_nesterov", self.nesterov)]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::testing::check;

    #[test]
    fn three_steps() {
        // tf.compat.v1.train.MomentumOptimizer(0.1, 0.9), TensorFlow 2.21.
        check(
            || Momentum::new(0.1, 0.9),
            [[0.97, -2.14, 0.455], [0.9139, -2.4158, 0.37355], [0.835993, -2.833126, 0.26662552]],
            [1.0565809, -2.1131618, 0.5, 3.0, 2.1330042, -4.4485598, -1.0, 0.25],
            &[
                ("w/Momentum", &[0.77907, 4.1732597, 1.0692449]),
                ("e/Momentum", &[-0.27480996, 0.5496197, 0.0, 0.0, 8.553959, -2.6344, 0.0, 0.0]),
            ],
        );
    }

    #[test]
    fn nesterov() {
        // tf.compat.v1.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True), TensorFlow 2.21.
        check(
            || Momentum::new(0.1, 0.9).nesterov(),
            [[0.943, -2.266, 0.4145], [0.864949, -2.680778, 0.3071705], [0.770862, -3.2678638, 0.1916223]],
            [1.0818877, -2.1637754, 0.5, 3.0, 1.5329785, -4.2226415, -1.0, 0.25],
            &[
                ("w/Momentum", &[0.75709474, 4.4381247, 0.9766984]),
                ("e/Momentum", &[-0.27735606, 0.55471206, 0.0, 0.0, 7.813587, -2.585044, 0.0, 0.0]),
            ],
        );
    }
}
