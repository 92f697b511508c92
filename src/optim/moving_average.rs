//! Moving averages of variables, which often predict better than the variables themselves.

use kolo_core::{DType, Result};
use kolo_graph::{Graph, Initializer, IntoOutput, Operation, Output, Variable};

use super::Core;
use crate::ops;

/// Keeps a shadow of variables, `w/ExponentialMovingAverage`, that follows them slowly.
///
/// ```
/// use kolo::optim::{ExponentialMovingAverage, Optimizer, Sgd};
/// use kolo::{Session, ops};
///
/// let g = kolo::graph();
/// let w = g.variable("w", 8.0f32);
/// let step = Sgd::new(0.5).minimize(w.read(), None)?;
/// let ema = ExponentialMovingAverage::new(0.9);
/// let train = g.control_dependencies(&[step], || ema.apply(&[w]))?;
/// let init = g.global_variables_initializer();
///
/// let session = Session::new(&g)?;
/// session.run_op(init)?;
/// session.run_op(train)?;
/// let average = ema.average(w).expect("it was applied to w");
/// assert_eq!(session.fetch(average.read())?.scalar_value::<f32>()?, 0.9 * 8.0 + 0.1 * 7.5);
/// # Ok::<(), kolo::Error>(())
/// ```
#[derive(Debug)]
pub struct ExponentialMovingAverage {
    core: Core,
    decay: f64,
    /// The name of an output that counts the updates.
    num_updates: Option<String>,
}

impl ExponentialMovingAverage {
    /// A shadow that keeps `decay` of itself at each update and takes the rest from its variable.
    pub fn new(decay: f64) -> ExponentialMovingAverage {
        ExponentialMovingAverage { core: Core::new("ExponentialMovingAverage", 0.0), decay, num_updates: None }
    }

    /// Follows faster at first: the decay at update n is at most `(1 + n) / (10 + n)`.
    #[must_use]
    pub fn num_updates(mut self, n: Output<'_>) -> ExponentialMovingAverage {
        self.num_updates = Some(n.name());
        self
    }

    /// Another name for the shadows.
    #[must_use]
    pub fn name(mut self, name: &str) -> ExponentialMovingAverage {
        self.core = self.core.renamed(name);
        self
    }

    /// Makes shadows of these variables, which begin as the variables do, and an operation that updates them. Call it where
    /// the training step is a control dependency, so that the new values are averaged.
    #[track_caller]
    pub fn apply<'g>(&self, variables: &[Variable<'g>]) -> Result<Operation<'g>> {
        let Some(first) = variables.first() else {
            return Err(kolo_core::Error::invalid_argument("a moving average needs at least one variable"));
        };
        let graph = first.handle().graph();
        graph.check()?;
        for &variable in variables {
            let initial = variable.initializer().input(1);
            self.core.slot(variable, "average", Initializer::Output(initial.endpoint()))?;
        }
        graph.name_scope(self.core.name(), || {
            let keep = self.keep(graph)?;
            let mut updates = Vec::with_capacity(variables.len());
            for &variable in variables {
                let Some(shadow) = self.average(variable) else { continue };
                updates.push(graph.colocate_with(shadow.handle().operation(), || {
                    let keep = ops::cast(keep, variable.dtype());
                    assign_moving_average(shadow, variable.read_now(), keep)
                }));
            }
            let all = graph.group(&graph.scoped_name(""), &updates);
            graph.check()?;
            Ok(all)
        })
    }

    /// The part that the shadow gives up at each update, `1 − decay`.
    fn keep<'g>(&self, graph: &'g Graph) -> Result<Output<'g>> {
        let Some(n) = &self.num_updates else { return Ok(graph.named_constant("rate", (1.0 - self.decay) as f32)) };
        let n = ops::cast(graph.output(n)?, DType::F32);
        let decay = self.decay.into_output(graph, DType::F32);
        Ok(1.0 - ops::minimum(decay, (n + 1.0) / (n + 10.0)))
    }

    /// The shadow of a variable, if it has one.
    pub fn average<'g>(&self, variable: Variable<'g>) -> Option<Variable<'g>> {
        self.core.find(variable, "average")
    }

    /// The name under which the shadow of a variable is saved.
    pub fn average_name(&self, variable: Variable<'_>) -> String {
        match self.average(variable) {
            Some(average) => average.name(),
            None => format!("{}/{}", variable.name(), self.core.name()),
        }
    }

    /// What a saver needs to restore the averages into the variables, for evaluation: names in the checkpoint, and the
    /// variables they go to. Trained variables take their averages; other global variables are restored as themselves.
    pub fn variables_to_restore<'g>(&self, graph: &'g Graph) -> Vec<(String, Variable<'g>)> {
        let shadows: Vec<String> = self.core.all(graph).iter().map(|shadow| shadow.name()).collect();
        let trained: Vec<String> = graph.trainable_variables().iter().map(|variable| variable.name()).collect();
        let others = graph.global_variables().into_iter().filter(|variable| !shadows.contains(&variable.name()));
        others
            .map(|variable| match self.average(variable).is_some() || trained.contains(&variable.name()) {
                true => (self.average_name(variable), variable),
                false => (variable.name(), variable),
            })
            .collect()
    }
}

/// `average -= (average − value) · rate`.
#[track_caller]
pub(crate) fn assign_moving_average<'g>(
    average: Variable<'g>,
    value: Output<'g>,
    rate: impl IntoOutput<'g>,
) -> Operation<'g> {
    average.assign_sub((average.read() - value) * rate)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use kolo_core::{PartialShape, Tensor};
    use kolo_graph::VariableKind;
    use kolo_runtime::Session;

    use super::*;
    use crate::optim::testing::close;

    #[test]
    fn the_shadow_follows_slowly() {
        for kind in [VariableKind::Resource, VariableKind::Reference] {
            let g = kolo_ops::graph();
            let w = g.new_variable("w", [1.0f32, -2.0, 0.5]).kind(kind).build();
            let n = g.placeholder::<i64>("n", PartialShape::scalar());
            let doubled = w.assign(w.read() * 2.0);
            let plain = ExponentialMovingAverage::new(0.9);
            let eager = ExponentialMovingAverage::new(0.9).num_updates(n).name("other");
            let updates = g.control_dependencies(&[doubled], || [plain.apply(&[w]), eager.apply(&[w])]);
            let updates = updates.map(|update| update.unwrap());
            let init = g.global_variables_initializer();
            let session = Session::new(&g).unwrap();
            session.run_op(init).unwrap();
            // tf.compat.v1.train.ExponentialMovingAverage on the same, TensorFlow 2.21.
            let expected = [
                ([1.1, -2.2, 0.55], [1.9, -3.8, 0.95]),
                ([1.3900001, -2.7800002, 0.69500005], [3.6181817, -7.2363634, 1.8090909]),
            ];
            for (step, (slow, fast)) in expected.into_iter().enumerate() {
                session.run(&[], &[(n, Tensor::scalar(step as i64))], &updates).unwrap();
                close(&session.fetch(plain.average(w).unwrap().read()).unwrap(), &slow, "slow");
                close(&session.fetch(eager.average(w).unwrap().read()).unwrap(), &fast, "fast");
            }
            assert_eq!(plain.average_name(w), "w/ExponentialMovingAverage");
            let restored = plain.variables_to_restore(&g);
            let restored: Vec<&str> = restored.iter().map(|(name, _)| name.as_str()).collect();
            assert_eq!(restored, ["w/ExponentialMovingAverage", "w/other"]);
        }
    }
}
