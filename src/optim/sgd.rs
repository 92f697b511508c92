//! Gradient descent: `var -= rate · grad`.

use kolo_core::Result;
use kolo_graph::{IndexedSlices, Operation, Output, Variable};

use super::update::{Update, apply};
use super::{Core, LearningRate, Optimizer};
use crate::ops;

/// Stochastic gradient descent.
#[derive(Debug)]
pub struct Sgd {
    core: Core,
}

impl Sgd {
    /// Steps of `rate` times the gradient.
    pub fn new(rate: impl Into<LearningRate>) -> Sgd {
        Sgd { core: Core::new("GradientDescent", rate) }
    }
}

impl Optimizer for Sgd {
    fn core(&self) -> &Core {
        &self.core
    }

    fn apply_dense<'g>(
        &self,
        update: &Update<'_, 'g>,
        variable: Variable<'g>,
        grad: Output<'g>,
    ) -> Result<Operation<'g>> {
        Ok(apply("ApplyGradientDescent", &[variable], &[update.rate(variable), grad], &[]))
    }

    fn apply_sparse<'g>(
        &self,
        update: &Update<'_, 'g>,
        variable: Variable<'g>,
        slices: IndexedSlices<'g>,
    ) -> Result<Operation<'g>> {
        // A row that occurs twice is moved twice, which is the same as once by the sum.
        Ok(ops::scatter_sub(variable.handle(), slices.indices, slices.values * update.rate(variable)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::testing::check;

    #[test]
    fn three_steps() {
        // tf.compat.v1.train.GradientDescentOptimizer(0.1), TensorFlow 2.21.
        check(
            || Sgd::new(0.1),
            [[0.97, -2.14, 0.455], [0.9409, -2.2898002, 0.41405], [0.912673, -2.450086, 0.37678552]],
            [1.030301, -2.060602, 0.5, 3.0, 3.0142841, -4.7059603, -1.0, 0.25],
            &[],
        );
    }
}
