//! Follow the regularised leader (McMahan et al., 2013), for large sparse linear models.

use kolo_core::Result;
use kolo_graph::{IndexedSlices, Initializer, Operation, Output, Variable};

use super::update::{Update, apply, deduplicate};
use super::{Core, LearningRate, Optimizer};

/// FTRL-proximal.
#[derive(Debug)]
pub struct Ftrl {
    core: Core,
    rate_power: f64,
    initial: f64,
    l1: f64,
    l2: f64,
    shrinkage: f64,
}

impl Ftrl {
    /// FTRL whose rate falls with the root of the sums of squares, which begin at 0.1; no regularisation.
    pub fn new(rate: impl Into<LearningRate>) -> Ftrl {
        Ftrl { core: Core::new("Ftrl", rate), rate_power: -0.5, initial: 0.1, l1: 0.0, l2: 0.0, shrinkage: 0.0 }
    }

    /// The power of the sums of squares that the rate is multiplied with; not more than zero.
    #[must_use]
    pub fn rate_power(mut self, power: f64) -> Ftrl {
        self.rate_power = power;
        self
    }

    /// What the sums of squares begin with.
    #[must_use]
    pub fn initial_accumulator(mut self, initial: f64) -> Ftrl {
        self.initial = initial;
        self
    }

    /// The strengths of the two penalties.
    #[must_use]
    pub fn regularization(mut self, l1: f64, l2: f64) -> Ftrl {
        (self.l1, self.l2) = (l1, l2);
        self
    }

    /// A penalty on the magnitude of the weights that, unlike `l2`, is added to the gradient.
    #[must_use]
    pub fn l2_shrinkage(mut self, strength: f64) -> Ftrl {
        self.shrinkage = strength;
        self
    }

    fn apply<'g>(
        &self,
        update: &Update<'_, 'g>,
        variable: Variable<'g>,
        form: &str,
        grad: &[Output<'g>],
    ) -> Result<Operation<'g>> {
        let variables = [variable, update.slot(variable, "accum")?, update.slot(variable, "linear")?];
        let mut inputs = grad.to_vec();
        inputs.push(update.rate(variable));
        inputs.push(update.number("l1_regularization_strength", self.l1, variable));
        inputs.push(update.number("l2_regularization_strength", self.l2, variable));
        let shrinks = self.shrinkage > 0.0;
        if shrinks {
            inputs.push(update.number("l2_shrinkage_regularization_strength", self.shrinkage, variable));
        }
        inputs.push(update.number("learning_rate_power", self.rate_power, variable));
        let version = if shrinks { "V2" } else { "" };
        Ok(apply(&format!("{form}Ftrl{version}"), &variables, &inputs, &[]))
    }
}

impl Optimizer for Ftrl {
    fn core(&self) -> &Core {
        &self.core
    }

    fn slot_names(&self) -> Vec<&'static str> {
        vec!["accum", "linear"]
    }

    fn create_slots<'g>(&self, variables: &[Variable<'g>]) -> Result<()> {
        for &variable in variables {
            self.core.slot(variable, "accum", Initializer::Constant(self.initial))?;
            self.core.slot(variable, "linear", Initializer::Zeros)?;
        }
        Ok(())
    }

    fn apply_dense<'g>(
        &self,
        update: &Update<'_, 'g>,
        variable: Variable<'g>,
        grad: Output<'g>,
    ) -> Result<Operation<'g>> {
        self.apply(update, variable, "Apply", &[grad])
    }

    fn apply_sparse<'g>(
        &self,
        update: &Update<'_, 'g>,
        variable: Variable<'g>,
        slices: IndexedSlices<'g>,
    ) -> Result<Operation<'g>> {
        let slices = deduplicate(slices);
        self.apply(update, variable, "SparseApply", &[slices.values, slices.indices])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::testing::check;

    #[test]
    fn three_steps() {
        // tf.compat.v1.train.FtrlOptimizer(0.1, l1=0.01, l2=0.02), TensorFlow 2.21.
        check(
            || Ftrl::new(0.1).regularization(0.01, 0.02),
            [
                [0.20155527, -1.6515902, 0.12795325],
                [0.18793863, -1.7141848, 0.10760468],
                [0.17534395, -1.768648, 0.09073906],
            ],
            [0.07719589, -0.37563878, 0.5, 3.0, 3.4255867, -3.282266, -1.0, 0.25],
            &[
                ("w/Ftrl", &[0.19683509, 4.8364277, 0.32514012]),
                ("w/Ftrl_1", &[-0.7949464, 38.976643, -0.5310332]),
                ("e/Ftrl", &[0.11010918, 0.14261194, 0.1, 0.1, 33.055546, 2.001196, 0.1, 0.1]),
                ("e/Ftrl_1", &[-0.26924467, 1.4435875, 0.0, 0.0, -197.09755, 46.573414, 0.0, 0.0]),
            ],
        );
    }

    #[test]
    fn shrinkage() {
        // tf.compat.v1.train.FtrlOptimizer(0.1, l1=0.01, l2=0.02, l2_shrinkage=0.05), TensorFlow 2.21.
        check(
            || Ftrl::new(0.1).regularization(0.01, 0.02).l2_shrinkage(0.05),
            [
                [0.17882232, -1.6376944, 0.11892798],
                [0.16268235, -1.6910713, 0.09785334],
                [0.14808814, -1.7374171, 0.080722064],
            ],
            [0.04300365, -0.3037713, 0.5, 3.0, 3.401428, -3.1860962, -1.0, 0.25],
            &[
                ("w/Ftrl", &[0.19525987, 4.7754645, 0.32171246]),
                ("w/Ftrl_1", &[-0.67029864, 38.04699, -0.47108203]),
                ("e/Ftrl", &[0.110036984, 0.14184551, 0.1, 0.1, 32.889362, 1.9690198, 0.1, 0.1]),
                ("e/Ftrl_1", &[-0.1543711, 1.1662259, 0.0, 0.0, -195.2154, 44.845306, 0.0, 0.0]),
            ],
        );
    }
}
