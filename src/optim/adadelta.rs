//! Adadelta (Zeiler, 2012): steps as large as the steps before, over gradients as large as the gradients before.

use kolo_core::Result;
use kolo_graph::{IndexedSlices, Initializer, Operation, Output, Variable};

use super::update::{Update, apply, deduplicate};
use super::{Core, LearningRate, Optimizer};

/// Adadelta, which needs no learning rate: 1 leaves its steps as they are.
#[derive(Debug)]
pub struct Adadelta {
    core: Core,
    rho: f64,
    epsilon: f64,
}

impl Adadelta {
    /// Adadelta with ρ = 0.95 and ε = 1e-8.
    pub fn new(rate: impl Into<LearningRate>) -> Adadelta {
        Adadelta { core: Core::new("Adadelta", rate), rho: 0.95, epsilon: 1e-8 }
    }

    /// How slowly the means fade.
    #[must_use]
    pub fn rho(mut self, rho: f64) -> Adadelta {
        self.rho = rho;
        self
    }

    /// What makes the first steps possible, and keeps all finite.
    #[must_use]
    pub fn epsilon(mut self, epsilon: f64) -> Adadelta {
        self.epsilon = epsilon;
        self
    }

    fn inputs<'g>(&self, update: &Update<'_, 'g>, variable: Variable<'g>) -> [Output<'g>; 3] {
        let rho = update.number("rho", self.rho, variable);
        [update.rate(variable), rho, update.number("epsilon", self.epsilon, variable)]
    }

    fn variables<'g>(&self, update: &Update<'_, 'g>, variable: Variable<'g>) -> Result<[Variable<'g>; 3]> {
        Ok([variable, update.slot(variable, "accum")?, update.slot(variable, "accum_update")?])
    }
}

impl Optimizer for Adadelta {
    fn core(&self) -> &Core {
        &self.core
    }

    fn slot_names(&self) -> Vec<&'static str> {
        vec!["accum", "accum_update"]
    }

    fn create_slots<'g>(&self, variables: &[Variable<'g>]) -> Result<()> {
        for &variable in variables {
            self.core.slot(variable, "accum", Initializer::Zeros)?;
            self.core.slot(variable, "accum_update", Initializer::Zeros)?;
        }
        Ok(())
    }

    fn apply_dense<'g>(
        &self,
        update: &Update<'_, 'g>,
        variable: Variable<'g>,
        grad: Output<'g>,
    ) -> Result<Operation<'g>> {
        let [rate, rho, epsilon] = self.inputs(update, variable);
        Ok(apply("ApplyAdadelta", &self.variables(update, variable)?, &[rate, rho, epsilon, grad], &[]))
    }

    fn apply_sparse<'g>(
        &self,
        update: &Update<'_, 'g>,
        variable: Variable<'g>,
        slices: IndexedSlices<'g>,
    ) -> Result<Operation<'g>> {
        let [rate, rho, epsilon] = self.inputs(update, variable);
        let slices = deduplicate(slices);
        let inputs = [rate, rho, epsilon, slices.values, slices.indices];
        Ok(apply("SparseApplyAdadelta", &self.variables(update, variable)?, &inputs, &[]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::testing::check;

    #[test]
    fn three_steps() {
        // tf.compat.v1.train.AdadeltaOptimizer(1.0, rho=0.95, epsilon=1e-6), TensorFlow 2.21.
        check(
            || Adadelta::new(1.0).epsilon(1e-6),
            [
                [0.99552834, -2.004472, 0.49552807],
                [0.99100965, -2.009006, 0.49101907],
                [0.98646593, -2.0135853, 0.48649865],
            ],
            [1.0135883, -2.013582, 0.5, 3.0, 3.9864395, -4.986438, -1.0, 0.25],
            &[
                ("w/Adadelta", &[0.012717558, 0.28084645, 0.028349819]),
                ("w/Adadelta_1", &[2.9044527e-06, 2.9274427e-06, 2.8898464e-06]),
                ("e/Adadelta", &[0.0014395465, 0.005731549, 0.0, 0.0, 1.8441324, 0.14236027, 0.0, 0.0]),
                ("e/Adadelta_1", &[2.9289804e-06, 2.9259934e-06, 0.0, 0.0, 2.916297e-06, 2.9169883e-06, 0.0, 0.0]),
            ],
        );
    }
}
