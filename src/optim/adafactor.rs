//! Adafactor (Shazeer and Stern, 2018): second moments of a matrix kept as one row and one column, so that a large model
//! needs hardly more memory than its weights.

use kolo_core::{Error, Result, Shape};
use kolo_graph::{Initializer, Operation, Output, Variable};

use super::update::{Update, number_like};
use super::{Core, LearningRate, Optimizer};
use crate::ops;

/// Adafactor without momentum. At step t, with β₂ = 1 − t^decay and rate ρ = min(rate, 1/√t), a variable moves by
/// `ρ · max(ε₂, rms(var)) · u / max(1, rms(u) / clip)`, where u is the gradient over the root of its second moment.
#[derive(Debug)]
pub struct Adafactor {
    core: Core,
    decay: f64,
    epsilon: [f64; 2],
    clip: f64,
    relative_step: bool,
}

impl Adafactor {
    /// Adafactor with decay −0.8, ε₁ = 1e-30, ε₂ = 1e-3, updates clipped at 1.
    pub fn new(rate: impl Into<LearningRate>) -> Adafactor {
        let core = Core::new("Adafactor", rate);
        Adafactor { core, decay: -0.8, epsilon: [1e-30, 1e-3], clip: 1.0, relative_step: true }
    }

    /// The power of the step number that says how fast the past fades; less than zero.
    #[must_use]
    pub fn decay(mut self, power: f64) -> Adafactor {
        self.decay = power;
        self
    }

    /// What is added to squared gradients, and the least scale of a variable.
    #[must_use]
    pub fn epsilon(mut self, squares: f64, scale: f64) -> Adafactor {
        self.epsilon = [squares, scale];
        self
    }

    /// The largest root mean square that an update may have.
    #[must_use]
    pub fn clip_threshold(mut self, clip: f64) -> Adafactor {
        self.clip = clip;
        self
    }

    /// Uses the rate as it is, instead of no more than 1/√t.
    #[must_use]
    pub fn absolute_step(mut self) -> Adafactor {
        self.relative_step = false;
        self
    }

    /// The second moment after this gradient, and what remembers it.
    fn moment<'g>(
        &self,
        update: &Update<'_, 'g>,
        variable: Variable<'g>,
        grad: Output<'g>,
    ) -> Result<(Output<'g>, Vec<Operation<'g>>)> {
        let step = update.scalar_value("adafactor_step", variable)?;
        let new = update.shared("new_part", variable, || ops::pow(step, number_like(step, self.decay)));
        let old = update.shared("old_part", variable, || 1.0 - new);
        let squares = grad * grad + self.epsilon[0];
        let fade = |slot: Variable<'g>, value: Output<'g>| slot.read() * old + value * new;
        if variable.shape().rank().unwrap_or(0) < 2 {
            let slot = update.slot(variable, "v")?;
            let v = fade(slot, squares);
            return Ok((v, vec![slot.assign(v)]));
        }
        let (rows, columns) = (update.slot(variable, "r")?, update.slot(variable, "c")?);
        let (r, c) = (fade(rows, ops::mean(squares, &[-1])), fade(columns, ops::mean(squares, &[-2])));
        let mean = ops::expand_dims(ops::mean(r, &[-1]), -1);
        let v = ops::expand_dims(r / mean, -1) * ops::expand_dims(c, -2);
        Ok((v, vec![rows.assign(r), columns.assign(c)]))
    }
}

impl Optimizer for Adafactor {
    fn core(&self) -> &Core {
        &self.core
    }

    fn slot_names(&self) -> Vec<&'static str> {
        vec!["r", "c", "v"]
    }

    fn create_slots<'g>(&self, variables: &[Variable<'g>]) -> Result<()> {
        self.core.scalar(variables, "adafactor_step", 1.0)?;
        for &variable in variables {
            let shape = variable.shape().known().ok_or_else(|| {
                Error::invalid_argument(format!("Adafactor needs the shape of variable '{}'", variable.name()))
            })?;
            match shape.dims() {
                [front @ .., rows, columns] => {
                    let with = |last: usize| Shape::new(&[front, &[last]].concat());
                    self.core.slot_of_shape(variable, "r", Initializer::Zeros, with(*rows)?)?;
                    self.core.slot_of_shape(variable, "c", Initializer::Zeros, with(*columns)?)?;
                }
                _ => drop(self.core.slot(variable, "v", Initializer::Zeros)?),
            }
        }
        Ok(())
    }

    fn apply_dense<'g>(
        &self,
        update: &Update<'_, 'g>,
        variable: Variable<'g>,
        grad: Output<'g>,
    ) -> Result<Operation<'g>> {
        let graph = update.graph();
        let step = update.scalar_value("adafactor_step", variable)?;
        let mut rate = update.rate(variable);
        if self.relative_step {
            rate = update.shared("relative_rate", variable, || ops::minimum(rate, ops::rsqrt(step)));
        }
        let (moment, mut updates) = self.moment(update, variable, grad)?;
        let direction = grad * ops::rsqrt(moment);
        let root_mean_square = |x: Output<'g>| ops::sqrt(ops::mean_all(ops::square(x)));
        let scale = ops::maximum(root_mean_square(variable.read()), number_like(grad, self.epsilon[1]));
        let too_long = ops::maximum(root_mean_square(direction) / self.clip, number_like(grad, 1.0));
        updates.push(variable.assign_sub(direction * (rate * scale / too_long)));
        Ok(graph.group("group", &updates))
    }

    fn finish<'g>(&self, update: &Update<'_, 'g>) -> Result<Vec<Operation<'g>>> {
        let step = update.scalar_variable("adafactor_step")?;
        let counted = || step.assign_add(number_like(step.read(), 1.0));
        Ok(vec![update.graph().colocate_with(step.handle().operation(), counted)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::testing::check;

    #[test]
    fn three_steps() {
        // The formula above in NumPy, in float64.
        check(
            || Adafactor::new(0.1),
            [
                [0.86771244, -2.1322875, 0.36771244],
                [0.7416344, -2.2704654, 0.25235507],
                [0.62128127, -2.4162633, 0.15678826],
            ],
            [1.2520291, -4.0959067, 0.5, 3.0, 3.4306774, -4.444543, -1.0, 0.25],
            &[
                ("w/Adafactor", &[0.065715134, 2.284971, 0.10860576]),
                ("e/Adafactor", &[0.046976242, 1e-30, 6.210018, 1e-30]),
                ("e/Adafactor_1", &[2.8802319, 0.2482654]),
            ],
        );
    }
}
