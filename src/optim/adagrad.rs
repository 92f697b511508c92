//! Adagrad (Duchi et al., 2011): `accum += grad²; var -= rate · grad / √accum`.

use kolo_core::Result;
use kolo_graph::{IndexedSlices, Initializer, Operation, Output, Variable};

use super::update::{Update, apply, deduplicate};
use super::{Core, LearningRate, Optimizer};

/// Smaller steps where gradients have been large.
#[derive(Debug)]
pub struct Adagrad {
    core: Core,
    initial: f64,
}

impl Adagrad {
    /// Adagrad whose sums of squares begin at 0.1.
    pub fn new(rate: impl Into<LearningRate>) -> Adagrad {
        Adagrad { core: Core::new("Adagrad", rate), initial: 0.1 }
    }

    /// What the sums of squares begin with; more than zero.
    #[must_use]
    pub fn initial_accumulator(mut self, initial: f64) -> Adagrad {
        self.initial = initial;
        self
    }
}

impl Optimizer for Adagrad {
    fn core(&self) -> &Core {
        &self.core
    }

    fn slot_names(&self) -> Vec<&'static str> {
        vec!["accumulator"]
    }

    fn create_slots<'g>(&self, variables: &[Variable<'g>]) -> Result<()> {
        let initial = Initializer::Constant(self.initial);
        variables.iter().try_for_each(|&v| self.core.slot(v, "accumulator", initial.clone()).map(drop))
    }

    fn apply_dense<'g>(
        &self,
        update: &Update<'_, 'g>,
        variable: Variable<'g>,
        grad: Output<'g>,
    ) -> Result<Operation<'g>> {
        let slots = [variable, update.slot(variable, "accumulator")?];
        Ok(apply("ApplyAdagrad", &slots, &[update.rate(variable), grad], &[]))
    }

    fn apply_sparse<'g>(
        &self,
        update: &Update<'_, 'g>,
        variable: Variable<'g>,
        slices: IndexedSlices<'g>,
    ) -> Result<Operation<'g>> {
        let slots = [variable, update.slot(variable, "accumulator")?];
        let slices = deduplicate(slices);
        Ok(apply("SparseApplyAdagrad", &slots, &[update.rate(variable), slices.values, slices.indices], &[]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::testing::check;

    #[test]
    fn three_steps() {
        // tf.compat.v1.train.AdagradOptimizer(0.1), TensorFlow 2.21.
        check(
            || Adagrad::new(0.1),
            [[0.9311753, -2.0975425, 0.4181818], [0.8772174, -2.1690526, 0.36170852], [0.83190423, -2.22851, 0.317818]],
            [1.0890012, -2.1457381, 0.5, 3.0, 3.7742333, -4.7804804, -1.0, 0.25],
            &[
                ("w/Adagrad", &[0.33729383, 6.5211916, 0.5501243]),
                ("e/Adagrad", &[0.13184416, 0.22633228, 0.1, 0.1, 37.268723, 2.9978347, 0.1, 0.1]),
            ],
        );
    }
}
