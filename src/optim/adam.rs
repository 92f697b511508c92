//! Adam (Kingma and Ba, 2014).

use kolo_core::Result;
use kolo_graph::{IndexedSlices, Initializer, Operation, Output, Variable};

use super::update::{Update, apply, deduplicate, read_after};
use super::{Core, LearningRate, Optimizer};
use crate::ops;

/// Steps along the mean of the gradients over the root of the mean of their squares, both fading.
#[derive(Debug)]
pub struct Adam {
    core: Core,
    moments: Moments,
    epsilon: f64,
    nesterov: bool,
}

impl Adam {
    /// Adam with β₁ = 0.9, β₂ = 0.999 and ε = 1e-8.
    pub fn new(rate: impl Into<LearningRate>) -> Adam {
        Adam { core: Core::new("Adam", rate), moments: Moments::default(), epsilon: 1e-8, nesterov: false }
    }

    /// How slowly the means of gradients and of squares fade.
    #[must_use]
    pub fn betas(mut self, beta1: f64, beta2: f64) -> Adam {
        self.moments = Moments { beta1, beta2 };
        self
    }

    /// What keeps the step finite where gradients are small.
    #[must_use]
    pub fn epsilon(mut self, epsilon: f64) -> Adam {
        self.epsilon = epsilon;
        self
    }

    /// Looks ahead along the momentum (NAdam without its schedule).
    #[must_use]
    pub fn nesterov(mut self) -> Adam {
        self.nesterov = true;
        self
    }
}

impl Optimizer for Adam {
    fn core(&self) -> &Core {
        &self.core
    }

    fn slot_names(&self) -> Vec<&'static str> {
        vec!["m", "v"]
    }

    fn create_slots<'g>(&self, variables: &[Variable<'g>]) -> Result<()> {
        self.moments.create(&self.core, variables)
    }

    fn apply_dense<'g>(
        &self,
        update: &Update<'_, 'g>,
        variable: Variable<'g>,
        grad: Output<'g>,
    ) -> Result<Operation<'g>> {
        let epsilon = update.number("epsilon", self.epsilon, variable);
        self.moments.apply_adam(update, variable, epsilon, grad, self.nesterov)
    }

    fn apply_sparse<'g>(
        &self,
        update: &Update<'_, 'g>,
        variable: Variable<'g>,
        slices: IndexedSlices<'g>,
    ) -> Result<Operation<'g>> {
        let graph = update.graph();
        let slices = deduplicate(slices);
        let [power1, power2] = self.moments.powers(update, variable)?;
        let [beta1, beta2] = self.moments.betas(update, variable);
        let epsilon = update.number("epsilon", self.epsilon, variable);
        let rate = update.rate(variable);
        let rate = update.shared("corrected_rate", variable, || rate * ops::sqrt(1.0 - power2) / (1.0 - power1));
        // The moments of all rows fade, as if the gradient of those without one were zero.
        let fade_and_add = |slot: Variable<'g>, beta: Output<'g>, new: Output<'g>| {
            let faded = slot.assign(slot.read() * beta);
            let added = graph
                .control_dependencies(&[faded], || ops::scatter_add(slot.handle(), slices.indices, new * (1.0 - beta)));
            read_after(slot, &[added])
        };
        let m = fade_and_add(update.slot(variable, "m")?, beta1, slices.values);
        let v = fade_and_add(update.slot(variable, "v")?, beta2, slices.values * slices.values);
        Ok(variable.assign_sub(rate * m / (ops::sqrt(v) + epsilon)))
    }

    fn finish<'g>(&self, update: &Update<'_, 'g>) -> Result<Vec<Operation<'g>>> {
        self.moments.finish(update)
    }
}

/// The two moments that Adam and its kin keep, and the powers of β that correct them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Moments {
    pub beta1: f64,
    pub beta2: f64,
}

impl Default for Moments {
    fn default() -> Moments {
        Moments { beta1: 0.9, beta2: 0.999 }
    }
}

impl Moments {
    pub fn create(&self, core: &Core, variables: &[Variable<'_>]) -> Result<()> {
        core.scalar(variables, "beta1_power", self.beta1)?;
        core.scalar(variables, "beta2_power", self.beta2)?;
        for &variable in variables {
            core.slot(variable, "m", Initializer::Zeros)?;
            core.slot(variable, "v", Initializer::Zeros)?;
        }
        Ok(())
    }

    /// β₁ᵗ and β₂ᵗ.
    pub fn powers<'g>(&self, update: &Update<'_, 'g>, variable: Variable<'g>) -> Result<[Output<'g>; 2]> {
        Ok([update.scalar_value("beta1_power", variable)?, update.scalar_value("beta2_power", variable)?])
    }

    /// β₁ and β₂.
    pub fn betas<'g>(&self, update: &Update<'_, 'g>, variable: Variable<'g>) -> [Output<'g>; 2] {
        [update.number("beta1", self.beta1, variable), update.number("beta2", self.beta2, variable)]
    }

    /// Adam's own update.
    pub fn apply_adam<'g>(
        &self,
        update: &Update<'_, 'g>,
        variable: Variable<'g>,
        epsilon: Output<'g>,
        grad: Output<'g>,
        nesterov: bool,
    ) -> Result<Operation<'g>> {
        let [power1, power2] = self.powers(update, variable)?;
        let [beta1, beta2] = self.betas(update, variable);
        let slots = [variable, update.slot(variable, "m")?, update.slot(variable, "v")?];
        let inputs = [power1, power2, update.rate(variable), beta1, beta2, epsilon, grad];
        Ok(apply("ApplyAdam", &slots, &inputs, &[("use_nesterov", nesterov)]))
    }

    /// Raises the powers of β by one, after all updates.
    pub fn finish<'g>(&self, update: &Update<'_, 'g>) -> Result<Vec<Operation<'g>>> {
        [("beta1_power", self.beta1), ("beta2_power", self.beta2)]
            .into_iter()
            .map(|(name, beta)| {
                let power = update.scalar_variable(name)?;
                Ok(update.graph().colocate_with(power.handle().operation(), || power.assign(power.read() * beta)))
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::testing::check;

    #[test]
    fn three_steps() {
        // tf.compat.v1.train.AdamOptimizer(0.1), TensorFlow 2.21.
        check(
            || Adam::new(0.1),
            [[0.9000001, -2.1, 0.40000007], [0.8004127, -2.2000968, 0.30118787], [0.7015875, -2.3003511, 0.2048724]],
            [1.3004884, -2.3003511, 0.5, 3.0, 3.700275, -4.7002144, -1.0, 0.25],
            &[
                ("beta1_power", &[0.6560999]),
                ("beta2_power", &[0.9960061]),
                ("w/Adam", &[0.072612405, 0.39970684, 0.09595693]),
                ("w/Adam_1", &[0.00022030383, 0.0064865462, 0.00040503888]),
                ("e/Adam", &[-0.03000134, 0.057100967, 0.0, 0.0, 0.9495069, -0.26520124, 0.0, 0.0]),
                ("e/Adam_1", &[3.6470643e-05, 0.00013237842, 0.0, 0.0, 0.036938254, 0.002879026, 0.0, 0.0]),
            ],
        );
    }
}
