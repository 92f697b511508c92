//! RMSProp (Tieleman and Hinton, 2012): the gradient over the root of the mean of its squares, with momentum.

use kolo_core::Result;
use kolo_graph::{IndexedSlices, Initializer, Operation, Output, Variable};

use super::update::{Update, apply, deduplicate};
use super::{Core, LearningRate, Optimizer};

/// RMSProp, plain or centered.
#[derive(Debug)]
pub struct RmsProp {
    core: Core,
    decay: f64,
    momentum: f64,
    epsilon: f64,
    centered: bool,
}

impl RmsProp {
    /// RMSProp with decay 0.9, no momentum and ε = 1e-10.
    pub fn new(rate: impl Into<LearningRate>) -> RmsProp {
        RmsProp { core: Core::new("RMSProp", rate), decay: 0.9, momentum: 0.0, epsilon: 1e-10, centered: false }
    }

    /// How slowly the mean of squares fades.
    #[must_use]
    pub fn decay(mut self, decay: f64) -> RmsProp {
        self.decay = decay;
        self
    }

    /// How slowly past steps fade.
    #[must_use]
    pub fn momentum(mut self, momentum: f64) -> RmsProp {
        self.momentum = momentum;
        self
    }

    /// What keeps the step finite where gradients are small.
    #[must_use]
    pub fn epsilon(mut self, epsilon: f64) -> RmsProp {
        self.epsilon = epsilon;
        self
    }

    /// Divides by the variance of the gradient instead of the mean of its squares.
    #[must_use]
    pub fn centered(mut self) -> RmsProp {
        self.centered = true;
        self
    }

    fn apply<'g>(
        &self,
        update: &Update<'_, 'g>,
        variable: Variable<'g>,
        form: &str,
        grad: &[Output<'g>],
    ) -> Result<Operation<'g>> {
        let (ms, momentum) = (update.slot(variable, "rms")?, update.slot(variable, "momentum")?);
        let mut inputs = vec![
            update.rate(variable),
            update.number("decay", self.decay, variable),
            update.number("momentum", self.momentum, variable),
            update.number("epsilon", self.epsilon, variable),
        ];
        inputs.extend(grad);
        Ok(match self.centered {
            true => {
                let slots = [variable, update.slot(variable, "mg")?, ms, momentum];
                apply(&format!("{form}CenteredRMSProp"), &slots, &inputs, &[])
            }
            false => apply(&format!("{form}RMSProp"), &[variable, ms, momentum], &inputs, &[]),
        })
    }
}

impl Optimizer for RmsProp {
    fn core(&self) -> &Core {
        &self.core
    }

    fn slot_names(&self) -> Vec<&'static str> {
        if self.centered { vec!["rms", "mg", "momentum"] } else { vec!["rms", "momentum"] }
    }

    fn create_slots<'g>(&self, variables: &[Variable<'g>]) -> Result<()> {
        for &variable in variables {
            self.core.slot(variable, "rms", Initializer::Ones)?;
            if self.centered {
                self.core.slot(variable, "mg", Initializer::Zeros)?;
            }
            self.core.slot(variable, "momentum", Initializer::Zeros)?;
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
        // tf.compat.v1.train.RMSPropOptimizer(0.1, momentum=0.5), TensorFlow 2.21.
        check(
            || RmsProp::new(0.1).momentum(0.5),
            [
                [0.9685342, -2.133728, 0.45309064],
                [0.92084146, -2.3364036, 0.3852713],
                [0.8651285, -2.5781887, 0.3119077],
            ],
            [1.0472645, -2.0942106, 0.5, 3.0, 3.1280346, -4.582036, -1.0, 0.25],
            &[
                ("w/RMSProp", &[0.7515198, 1.3560187, 0.7723914]),
                ("w/RMSProp_1", &[0.055712964, 0.24178499, 0.0733636]),
                ("e/RMSProp", &[0.7317838, 0.7401346, 1.0, 1.0, 3.7686262, 0.9867546, 1.0, 1.0]),
                ("e/RMSProp_1", &[-0.020246878, 0.040307827, 0.0, 0.0, 0.31612694, -0.16976914, 0.0, 0.0]),
            ],
        );
    }

    #[test]
    fn centered() {
        // tf.compat.v1.train.RMSPropOptimizer(0.1, momentum=0.5, epsilon=1e-3, centered=True), TensorFlow 2.21.
        check(
            || RmsProp::new(0.1).momentum(0.5).epsilon(1e-3).centered(),
            [
                [0.9685359, -2.1348774, 0.4530645],
                [0.92080253, -2.3425975, 0.38508672],
                [0.864962, -2.596842, 0.31138843],
            ],
            [1.0472463, -2.0942407, 0.5, 3.0, 3.0730102, -4.575174, -1.0, 0.25],
            &[
                ("w/RMSProp", &[0.75151914, 1.357655, 0.7723781]),
                ("w/RMSProp_1", &[0.07807457, 0.41187918, 0.10780605]),
                ("w/RMSProp_2", &[0.05584055, 0.25424448, 0.073698275]),
                ("e/RMSProp", &[0.73178375, 0.74013454, 1.0, 1.0, 3.7501497, 0.98664707, 1.0, 1.0]),
                ("e/RMSProp_1", &[-0.02746483, 0.05492823, 0.0, 0.0, 0.9029621, -0.26417983, 0.0, 0.0]),
                ("e/RMSProp_2", &[-0.020241188, 0.040341735, 0.0, 0.0, 0.34523755, -0.17422268, 0.0, 0.0]),
            ],
        );
    }
}
