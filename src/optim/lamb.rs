//! LAMB (You et al., 2019): Adam's step with weight decay, made as long as the weights of its layer call for.

use kolo_core::Result;
use kolo_graph::{Operation, Output, Variable};

use super::adam::Moments;
use super::adam_w::is_named;
use super::update::{Update, number_like};
use super::{Core, LearningRate, Optimizer};
use crate::ops;

/// LAMB, for very large batches. With `r = m̂ / (√v̂ + ε) + decay · var`, a step is `rate · ‖var‖ / ‖r‖ · r`. A gradient of a
/// few rows is applied to all: the others decay.
#[derive(Debug)]
pub struct Lamb {
    core: Core,
    moments: Moments,
    epsilon: f64,
    decay: f64,
    not_decayed: Vec<String>,
    not_adapted: Vec<String>,
}

impl Lamb {
    /// LAMB with β₁ = 0.9, β₂ = 0.999, ε = 1e-6.
    pub fn new(rate: impl Into<LearningRate>, decay: f64) -> Lamb {
        let (core, moments) = (Core::new("Lamb", rate), Moments::default());
        Lamb { core, moments, epsilon: 1e-6, decay, not_decayed: Vec::new(), not_adapted: Vec::new() }
    }

    /// How slowly the means of gradients and of squares fade.
    #[must_use]
    pub fn betas(mut self, beta1: f64, beta2: f64) -> Lamb {
        self.moments = Moments { beta1, beta2 };
        self
    }

    /// What keeps the step finite where gradients are small.
    #[must_use]
    pub fn epsilon(mut self, epsilon: f64) -> Lamb {
        self.epsilon = epsilon;
        self
    }

    /// Variables whose names contain one of these do not decay.
    #[must_use]
    pub fn exclude_from_decay(mut self, parts: &[&str]) -> Lamb {
        self.not_decayed = parts.iter().map(|part| (*part).to_owned()).collect();
        self
    }

    /// Variables whose names contain one of these move by `rate · r`, whatever their norm.
    #[must_use]
    pub fn exclude_from_adaptation(mut self, parts: &[&str]) -> Lamb {
        self.not_adapted = parts.iter().map(|part| (*part).to_owned()).collect();
        self
    }
}

impl Optimizer for Lamb {
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
        let graph = update.graph();
        let [power1, power2] = self.moments.powers(update, variable)?;
        let [beta1, beta2] = self.moments.betas(update, variable);
        let correct1 = update.shared("correct1", variable, || 1.0 / (1.0 - power1));
        let correct2 = update.shared("correct2", variable, || 1.0 / (1.0 - power2));
        let (m, v) = (update.slot(variable, "m")?, update.slot(variable, "v")?);
        let new_m = m.read() * beta1 + grad * (1.0 - beta1);
        let new_v = v.read() * beta2 + grad * grad * (1.0 - beta2);
        let mut step = new_m * correct1 / (ops::sqrt(new_v * correct2) + self.epsilon);
        if self.decay != 0.0 && !is_named(variable, &self.not_decayed) {
            step = step + variable.read() * self.decay;
        }
        let mut rate = update.rate(variable);
        if !is_named(variable, &self.not_adapted) {
            rate = rate * trust_ratio(variable.read(), step);
        }
        let moved = variable.assign_sub(step * rate);
        Ok(graph.group("group", &[m.assign(new_m), v.assign(new_v), moved]))
    }

    fn finish<'g>(&self, update: &Update<'_, 'g>) -> Result<Vec<Operation<'g>>> {
        self.moments.finish(update)
    }
}

/// `‖var‖ / ‖step‖`, or 1 where either is zero.
fn trust_ratio<'g>(var: Output<'g>, step: Output<'g>) -> Output<'g> {
    let norm = |x: Output<'g>| ops::sqrt(ops::l2_loss(x) * 2.0);
    let (var, step) = (norm(var), norm(step));
    let ratio = ops::div_no_nan(var, step);
    ops::select(ops::greater(ratio, number_like(ratio, 0.0)), ratio, number_like(ratio, 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::testing::check;

    #[test]
    fn three_steps() {
        // The formula above in NumPy, in float32.
        check(
            || Lamb::new(0.1, 0.05),
            [
                [0.8602365, -2.1197975, 0.36356413],
                [0.7185582, -2.2421727, 0.22715013],
                [0.57269466, -2.3700774, 0.09181045],
            ],
            [1.9370017, -2.8906956, 0.4752993, 2.851796, 2.819677, -3.7690558, -0.9505986, 0.23764965],
            &[
                ("w/Lamb", &[0.06908315, 0.4038994, 0.08634222]),
                ("w/Lamb_1", &[0.00020282084, 0.006619026, 0.00035084225]),
                ("e/Lamb", &[-0.036429465, 0.06305021, 0.0, 0.0, 0.86957335, -0.24644917, 0.0, 0.0]),
                ("e/Lamb_1", &[5.4421358e-05, 0.00016113886, 0.0, 0.0, 0.031605896, 0.0025245186, 0.0, 0.0]),
            ],
        );
    }
}
