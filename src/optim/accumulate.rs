//! Gradient accumulation: several small batches, then one update with their mean, as if they had been one large batch.

use kolo_core::{Error, Result};
use kolo_graph::{Grad, Graph, Initializer, Operation, Variable};

use super::update::number_like;
use super::{Core, GradAndVar, Optimizer, leave_updates_to};
use crate::ops;

/// Applies another optimizer once every N steps, to the mean of their gradients. The global step counts what is
/// applied.
///
/// ```
/// use kolo::optim::{Accumulate, Adam, Optimizer};
///
/// let optimizer = Accumulate::new(Adam::new(0.001), 4);
/// assert_eq!(optimizer.slot_names(), ["m", "v"]);
/// ```
pub struct Accumulate {
    core: Core,
    inner: Box<dyn Optimizer>,
    every: u32,
}

impl Accumulate {
    /// Applies `inner` in every `every`th step.
    pub fn new(inner: impl Optimizer + 'static, every: u32) -> Accumulate {
        Accumulate { core: Core::new("Accumulate", 0.0), inner: Box::new(inner), every }
    }

    /// The gradients' sums, given back to zero after the update that uses them.
    fn release<'g>(
        &self,
        graph: &'g Graph,
        sums: &[GradAndVar<'g>],
        count: Variable<'g>,
        global_step: Option<Variable<'g>>,
    ) -> Result<Released<'g>> {
        let mut means = Vec::with_capacity(sums.len());
        for pair in sums {
            let Some(slot) = self.core.find(pair.variable, "sum") else { continue };
            let mean = graph.colocate_with(slot.handle().operation(), || slot.read_now() / f64::from(self.every));
            means.push(GradAndVar { grad: Some(mean.into()), variable: pair.variable });
        }
        let applied = self.inner.apply_gradients(&means, global_step)?;
        let cleared: Vec<Operation<'g>> = graph.control_dependencies(&[applied], || {
            let slots = means.iter().filter_map(|pair| self.core.find(pair.variable, "sum"));
            let clear = |variable: Variable<'g>| {
                graph.colocate_with(variable.handle().operation(), || variable.assign(ops::zeros_like(variable.read())))
            };
            slots.chain([count]).map(clear).collect()
        });
        Ok(Released { applied, all: graph.group("release", &cleared) })
    }
}

struct Released<'g> {
    /// The update, as the other optimizer has added it.
    applied: Operation<'g>,
    /// After it, the sums are zero again.
    all: Operation<'g>,
}

impl Optimizer for Accumulate {
    leave_updates_to!(self, self.inner);

    fn apply_gradients<'g>(
        &self,
        grads_and_vars: &[GradAndVar<'g>],
        global_step: Option<Variable<'g>>,
    ) -> Result<Operation<'g>> {
        if self.every == 0 {
            return Err(Error::invalid_argument("gradients accumulate over at least one step, not 0"));
        }
        let pairs: Vec<GradAndVar<'g>> = grads_and_vars.iter().copied().filter(|pair| pair.grad.is_some()).collect();
        let variables: Vec<Variable<'g>> = pairs.iter().map(|pair| pair.variable).collect();
        let (Some(first), true) = (variables.first(), self.every > 1) else {
            return self.inner.apply_gradients(grads_and_vars, global_step);
        };
        let graph = first.handle().graph();
        graph.check()?;
        let count = self.core.scalar(&variables, "accumulated_batches", 0.0)?;
        for &variable in &variables {
            self.core.slot(variable, "sum", Initializer::Zeros)?;
        }
        graph.name_scope(self.core.name(), || {
            let mut added = Vec::with_capacity(pairs.len());
            for pair in &pairs {
                let (Some(slot), Some(grad)) = (self.core.find(pair.variable, "sum"), pair.grad) else { continue };
                added.push(graph.colocate_with(slot.handle().operation(), || match grad {
                    Grad::Dense(grad) => slot.assign_add(grad),
                    Grad::Slices(slices) => ops::scatter_add(slot.handle(), slices.indices, slices.values),
                }));
            }
            let counted = graph.control_dependencies(&added, || count.assign_add(number_like(count.read(), 1.0)));
            let is_full = graph.control_dependencies(&[counted], || {
                let now = count.read_now();
                ops::greater_equal(now, number_like(now, f64::from(self.every) - 0.5))
            });
            let mut outcome = None;
            let done = graph.cond(
                is_full,
                || {
                    let released = self.release(graph, &pairs, count, global_step);
                    let after: Vec<Operation<'g>> = released.iter().map(|released| released.all).collect();
                    outcome = Some(released);
                    vec![graph.control_dependencies(&after, || graph.constant(true))]
                },
                || vec![graph.constant(false)],
            );
            let released = outcome.transpose()?;
            let done: Vec<Operation<'g>> = done?.iter().map(|output| output.operation()).collect();
            let all = graph.group(&graph.scoped_name(""), &done);
            graph.check()?;
            if let Some(released) = released {
                let grads: Vec<(Variable<'g>, Grad<'g>)> =
                    pairs.iter().filter_map(|pair| Some((pair.variable, pair.grad?))).collect();
                let sums = variables.iter().flat_map(|&of| self.core.slots_of(of).into_iter().map(move |s| (of, s)));
                let sums: Vec<_> = sums.map(|(of, (slot, sum))| (of, slot, sum)).collect();
                graph.wrap_training(released.applied, all, &grads, &sums)?;
            }
            Ok(all)
        })
    }

    fn slots<'g>(&self, graph: &'g Graph) -> Vec<Variable<'g>> {
        let mut all = self.inner.slots(graph);
        all.extend(self.core.all(graph));
        all
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use kolo_core::Tensor;
    use kolo_graph::VariableKind;
    use kolo_runtime::Session;

    use super::*;
    use crate::optim::testing::close;
    use crate::optim::{Momentum, Sgd};
    use crate::train;

    #[test]
    fn the_mean_of_the_gradients_is_applied_once() {
        for kind in [VariableKind::Resource, VariableKind::Reference] {
            let g = kolo_ops::graph();
            let w = g.new_variable("w", [1.0f32, 2.0]).kind(kind).build();
            let x = g.placeholder::<f32>("x", [Some(2)]);
            let loss = ops::sum_all(w.read() * x);
            let step = train::global_step_or_create(&g).unwrap();
            let optimizer = Accumulate::new(Momentum::new(0.5, 0.9), 2);
            let train = optimizer.minimize(loss, Some(step)).unwrap();
            let init = g.global_variables_initializer();
            let session = Session::new(&g).unwrap();
            session.run_op(init).unwrap();
            let expected = [[1.0, 2.0], [0.0, 0.5], [0.0, 0.5], [-1.9, -2.85]];
            for (i, (grad, expected)) in
                [[1.0f32, 2.0], [3.0, 4.0], [1.0, 2.0], [3.0, 6.0]].into_iter().zip(expected).enumerate()
            {
                session.run(&[], &[(x, Tensor::from(grad))], &[train]).unwrap();
                close(&session.fetch(w.read()).unwrap(), &expected, "w");
                let counted = session.fetch(step.read()).unwrap().scalar_value::<i64>().unwrap();
                assert_eq!(counted, (i as i64 + 1) / 2);
            }
            assert_eq!(optimizer.slots(&g).len(), 3);
        }
        let g = kolo_ops::graph();
        let w = g.variable("w", 1.0f32);
        assert!(Accumulate::new(Sgd::new(0.1), 0).minimize(w.read(), None).is_err());
    }
}
