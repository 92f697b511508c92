//! AdamW (Loshchilov and Hutter, 2017): Adam, and apart from it a decay of the weights.
//!
//! `var ← var · (1 − rate · decay) − rate · m̂ / (√v̂ + ε)`, where m̂ and v̂ are the corrected moments.

use kolo_core::Result;
use kolo_graph::{Operation, Output, Variable};

use super::adam::Moments;
use super::update::{Update, apply};
use super::{Core, LearningRate, Optimizer};

/// Adam with decoupled weight decay. A gradient of a few rows is applied to all: the others decay.
#[derive(Debug)]
pub struct AdamW {
    core: Core,
    moments: Moments,
    epsilon: f64,
    decay: f64,
    excluded: Vec<String>,
}

impl AdamW {
    /// AdamW with β₁ = 0.9, β₂ = 0.999, ε = 1e-8; per step, `rate · decay` of each weight goes.
    pub fn new(rate: impl Into<LearningRate>, decay: f64) -> AdamW {
        let (core, moments) = (Core::new("AdamW", rate), Moments::default());
        AdamW { core, moments, epsilon: 1e-8, decay, excluded: Vec::new() }
    }

    /// How slowly the means of gradients and of squares fade.
    #[must_use]
    pub fn betas(mut self, beta1: f64, beta2: f64) -> AdamW {
        self.moments = Moments { beta1, beta2 };
        self
    }

    /// What keeps the step finite where gradients are small.
    #[must_use]
    pub fn epsilon(mut self, epsilon: f64) -> AdamW {
        self.epsilon = epsilon;
        self
    }

    /// Variables whose names contain one of these do not decay: `.exclude_from_decay(&["bias", "gamma", "beta"])`.
    #[must_use]
    pub fn exclude_from_decay(mut self, parts: &[&str]) -> AdamW {
        self.excluded = parts.iter().map(|part| (*part).to_owned()).collect();
        self
    }
}

impl Optimizer for AdamW {
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
        let [power1, power2] = self.moments.powers(update, variable)?;
        let [beta1, beta2] = self.moments.betas(update, variable);
        let epsilon = update.number("epsilon", self.epsilon, variable);
        let decay = match is_named(variable, &self.excluded) {
            true => update.number("no_decay", 0.0, variable),
            false => update.number("decay", self.decay, variable),
        };
        let slots = [variable, update.slot(variable, "m")?, update.slot(variable, "v")?];
        let inputs = [power1, power2, update.rate(variable), beta1, beta2, epsilon, decay, grad];
        Ok(apply("ApplyKoloAdamW", &slots, &inputs, &[]))
    }

    fn finish<'g>(&self, update: &Update<'_, 'g>) -> Result<Vec<Operation<'g>>> {
        self.moments.finish(update)
    }
}

/// True if the variable's name contains one of the parts.
pub(super) fn is_named(variable: Variable<'_>, parts: &[String]) -> bool {
    let name = variable.name();
    parts.iter().any(|part| name.contains(part.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::testing::check;

    #[test]
    fn three_steps() {
        // The formula above in NumPy, in float32.
        check(
            || AdamW::new(0.1, 0.05),
            [[0.895, -2.09, 0.3975], [0.7909669, -2.1796403, 0.2967503], [0.68827105, -2.268978, 0.19910751]],
            [1.28406, -2.268978, 0.49253744, 2.9552245, 3.6421344, -4.627146, -0.9850749, 0.24626872],
            &[
                ("w/AdamW", &[0.07219402, 0.3976449, 0.09535505]),
                ("w/AdamW_1", &[0.00021814404, 0.006422135, 0.0004012763]),
                ("e/AdamW", &[-0.029851586, 0.0568064, 0.0, 0.0, 0.9443424, -0.26376405, 0.0, 0.0]),
                ("e/AdamW_1", &[3.6110665e-05, 0.00013106392, 0.0, 0.0, 0.03657116, 0.0028504047, 0.0, 0.0]),
            ],
        );
    }
}
