//! What all optimizers can do, and the order in which it happens: gradients, slots, one update per variable, what follows
//! the updates, and the global step last.

use kolo_core::{Error, Result};
use kolo_graph::{
    Grad, GradientOptions, Graph, IndexedSlices, Operation, Output, Variable, VariableKind, VariableUpdate,
    gradients_with,
};

use super::update::{Update, group_by_device};
use super::{Clip, Core};

/// A variable and the gradient of the loss with respect to it, if there is one.
#[derive(Clone, Copy)]
pub struct GradAndVar<'g> {
    /// The gradient; `None` if the loss does not depend on the variable.
    pub grad: Option<Grad<'g>>,
    /// The variable.
    pub variable: Variable<'g>,
}

/// What [`Optimizer::minimize_with`] may do differently.
#[derive(Clone, Default)]
pub struct MinimizeOptions<'g> {
    /// Counts the updates.
    pub global_step: Option<Variable<'g>>,
    /// The variables to train; all trainable ones if absent.
    pub variables: Option<Vec<Variable<'g>>>,
    /// Limits the gradients before they are applied.
    pub clip: Option<Clip>,
    /// Puts each gradient op on the device of the op it belongs to.
    pub colocate_gradients_with_ops: bool,
}

/// Turns gradients into updates of variables. Training programs call [`minimize`](Optimizer::minimize), or the two halves of
/// it to change the gradients in between; those who write an optimizer implement the methods that come first.
pub trait Optimizer {
    /// Its name, learning rate and slots.
    fn core(&self) -> &Core;

    /// The names under which it keeps slots, for [`Optimizer::get_slot`].
    fn slot_names(&self) -> Vec<&'static str> {
        Vec::new()
    }

    /// Makes the slots of these variables, and what else must exist before the first update. Called before every update:
    /// what exists stays.
    fn create_slots<'g>(&self, _variables: &[Variable<'g>]) -> Result<()> {
        Ok(())
    }

    /// Adds the update of one variable. Called where the new nodes go to the variable's device.
    fn apply_dense<'g>(
        &self,
        update: &Update<'_, 'g>,
        variable: Variable<'g>,
        grad: Output<'g>,
    ) -> Result<Operation<'g>>;

    /// Adds the update of some rows of a variable, which may occur more than once (see [`super::deduplicate`]).
    fn apply_sparse<'g>(
        &self,
        update: &Update<'_, 'g>,
        variable: Variable<'g>,
        slices: IndexedSlices<'g>,
    ) -> Result<Operation<'g>> {
        let grad = Grad::Slices(slices).dense()?;
        self.apply_dense(update, variable, grad)
    }

    /// Adds what is to be done once per step, after all variables are updated.
    fn finish<'g>(&self, _update: &Update<'_, 'g>) -> Result<Vec<Operation<'g>>> {
        Ok(Vec::new())
    }

    /// The gradients of `loss` with respect to these variables; all trainable ones if none are named.
    fn compute_gradients<'g>(
        &self,
        loss: Output<'g>,
        variables: Option<&[Variable<'g>]>,
    ) -> Result<Vec<GradAndVar<'g>>> {
        self.compute_gradients_with(loss, variables, &GradientOptions::default())
    }

    /// [`Optimizer::compute_gradients`], with options.
    fn compute_gradients_with<'g>(
        &self,
        loss: Output<'g>,
        variables: Option<&[Variable<'g>]>,
        options: &GradientOptions<'g>,
    ) -> Result<Vec<GradAndVar<'g>>> {
        let graph = loss.graph();
        graph.check()?;
        let variables = variables.map_or_else(|| graph.trainable_variables(), <[Variable<'g>]>::to_vec);
        if variables.is_empty() {
            return Err(Error::invalid_argument("No variables to optimize: the graph has no trainable variables"));
        }
        let handles: Vec<Output<'g>> = variables.iter().map(|variable| variable.handle()).collect();
        let grads = gradients_with(&[loss], &handles, options)?;
        Ok(variables.into_iter().zip(grads).map(|(variable, grad)| GradAndVar { grad, variable }).collect())
    }

    /// Applies gradients to their variables and then adds one to the global step. Variables without a gradient stay as they
    /// are; it is an error if none has one. What is known of the step is kept for rewrites ([`Graph::training`]); an
    /// optimizer around another one, which has a method of its own here, must say so by [`wrap_training`].
    fn apply_gradients<'g>(
        &self,
        grads_and_vars: &[GradAndVar<'g>],
        global_step: Option<Variable<'g>>,
    ) -> Result<Operation<'g>> {
        let with_grads: Vec<(Grad<'g>, Variable<'g>)> =
            grads_and_vars.iter().filter_map(|pair| Some((pair.grad?, pair.variable))).collect();
        let variables: Vec<Variable<'g>> = with_grads.iter().map(|(_, variable)| *variable).collect();
        let Some(first) = variables.first() else {
            let names: Vec<String> = grads_and_vars.iter().map(|pair| pair.variable.name()).collect();
            return Err(Error::invalid_argument(format!(
                "No gradients provided for any variable: [{}]. The loss does not depend on them, or only through ops that \
                 have no gradient",
                names.join(", ")
            )));
        };
        let graph = first.handle().graph();
        graph.check()?;
        self.create_slots(&variables)?;
        graph.name_scope(self.core().name(), || {
            let scope = graph.scoped_name("");
            let update = Update::new(self.core(), &variables, global_step)?;
            let mut updates = Vec::with_capacity(variables.len());
            let mut parts = Vec::with_capacity(variables.len());
            for &(grad, variable) in &with_grads {
                let name = format!("update_{}", variable.name());
                let at = variable.handle().operation();
                let first_node = graph.nodes().len();
                let updated = graph.name_scope(&name, || {
                    graph.colocate_with(at, || match grad {
                        Grad::Dense(grad) => self.apply_dense(&update, variable, grad),
                        Grad::Slices(slices) => self.apply_sparse(&update, variable, slices),
                    })
                })?;
                let (nodes, slots) = (first_node..graph.nodes().len(), self.core().slots_of(variable));
                parts.push(VariableUpdate { variable, grad, nodes, update: updated, slots });
                updates.push(updated);
            }
            let after = graph.control_dependencies(&updates, || self.finish(&update))?;
            let done: Vec<(Operation<'g>, Variable<'g>)> = updates.into_iter().zip(variables.iter().copied()).collect();
            let all = group_by_device(graph, &done, &after);
            let train = match global_step {
                None => graph.group(&scope, &all),
                Some(step) => count(graph, &scope, step, &all),
            };
            graph.check()?;
            graph.add_to_collection("train_op", &train.name());
            graph.add_training(train, &parts, &self.core().scalars(graph))?;
            Ok(train)
        })
    }

    /// One operation that computes the gradients of `loss`, updates all trainable variables and then adds one to the global
    /// step.
    fn minimize<'g>(&self, loss: Output<'g>, global_step: Option<Variable<'g>>) -> Result<Operation<'g>> {
        self.minimize_with(loss, &MinimizeOptions { global_step, ..MinimizeOptions::default() })
    }

    /// [`Optimizer::minimize`], with options.
    fn minimize_with<'g>(&self, loss: Output<'g>, options: &MinimizeOptions<'g>) -> Result<Operation<'g>> {
        let gradient_options =
            GradientOptions { colocate_with_ops: options.colocate_gradients_with_ops, ..GradientOptions::default() };
        let mut pairs = self.compute_gradients_with(loss, options.variables.as_deref(), &gradient_options)?;
        if let Some(clip) = options.clip {
            pairs = clip.apply(&pairs)?;
        }
        self.apply_gradients(&pairs, options.global_step)
    }

    /// The variable in which this optimizer keeps `slot` for `variable`, if it was made.
    fn get_slot<'g>(&self, variable: Variable<'g>, slot: &str) -> Option<Variable<'g>> {
        self.core().find(variable, slot)
    }

    /// All variables that this optimizer has made in a graph: slots, and what it keeps once for all variables.
    fn slots<'g>(&self, graph: &'g Graph) -> Vec<Variable<'g>> {
        self.core().all(graph)
    }
}

/// For an optimizer around another one, when everything was added: the step that the other one knows as `inner` is run by
/// `op`, and its gradients are `grads_and_vars`, before anything was accumulated or exchanged.
pub fn wrap_training<'g>(inner: Operation<'g>, op: Operation<'g>, grads_and_vars: &[GradAndVar<'g>]) -> Result<()> {
    let grads: Vec<(Variable<'g>, Grad<'g>)> =
        grads_and_vars.iter().filter_map(|pair| Some((pair.variable, pair.grad?))).collect();
    op.graph().wrap_training(inner, op, &grads, &[])
}

/// Adds one to the step after `updates`, under the name of the scope itself. The updates meet where the step is: a worker
/// in between would make every step of a parameter server wait for a round trip.
fn count<'g>(graph: &'g Graph, scope: &str, step: Variable<'g>, updates: &[Operation<'g>]) -> Operation<'g> {
    graph.colocate_with(step.handle().operation(), || {
        let all = graph.group("update", updates);
        graph.control_dependencies(&[all], || {
            let one = kolo_graph::IntoOutput::into_output(1i32, graph, step.dtype());
            let op = match step.kind() {
                VariableKind::Resource => "AssignAddVariableOp",
                VariableKind::Reference => "AssignAdd",
            };
            graph.op(op).name(scope).input(step.handle()).input(one).build()
        })
    })
}

/// For an optimizer that wraps another: leaves how a single variable is updated, and the slots for it, to that one. Goes into
/// `impl Optimizer`, as in `leave_updates_to!(self, self.inner)`.
macro_rules! leave_updates_to {
    ($self:ident, $inner:expr) => {
        fn core(&$self) -> &$crate::optim::Core {
            $inner.core()
        }

        fn slot_names(&$self) -> Vec<&'static str> {
            $inner.slot_names()
        }

        fn apply_dense<'g>(
            &$self,
            update: &$crate::optim::Update<'_, 'g>,
            variable: kolo_graph::Variable<'g>,
            grad: kolo_graph::Output<'g>,
        ) -> kolo_core::Result<kolo_graph::Operation<'g>> {
            $inner.apply_dense(update, variable, grad)
        }

        fn apply_sparse<'g>(
            &$self,
            update: &$crate::optim::Update<'_, 'g>,
            variable: kolo_graph::Variable<'g>,
            slices: kolo_graph::IndexedSlices<'g>,
        ) -> kolo_core::Result<kolo_graph::Operation<'g>> {
            $inner.apply_sparse(update, variable, slices)
        }
    };
}

pub(crate) use leave_updates_to;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use kolo_runtime::{Session, SessionConfig};

    use super::*;
    use crate::optim::{Adam, Sgd, testing};
    use crate::{ops, train};

    #[test]
    fn minimize_names_its_nodes_as_tensorflow_does() {
        let g = kolo_ops::graph();
        let w = g.variable("w", [1.0f32, 2.0]);
        let unused = g.variable("unused", [1.0f32]);
        let step = train::global_step_or_create(&g).unwrap();
        let loss = ops::sum_all(ops::square(w.read()));
        let adam: Box<dyn Optimizer> = Box::new(Adam::new(0.1));
        let op = adam.minimize(loss, Some(step)).unwrap();
        assert_eq!((op.name().as_str(), op.op()), ("Adam", "AssignAddVariableOp"));
        assert_eq!(g.collection("train_op"), ["Adam"]);
        assert_eq!(adam.get_slot(w, "m").unwrap().name(), "w/Adam");
        assert_eq!(adam.get_slot(w, "v").unwrap().name(), "w/Adam_1");
        assert!(adam.get_slot(unused, "v").is_none());
        let names: Vec<String> = adam.slots(&g).iter().map(|slot| slot.name()).collect();
        assert_eq!(names, ["beta1_power", "beta2_power", "w/Adam", "w/Adam_1"]);
        for node in ["Adam/update_w/ResourceApplyAdam", "Adam/update", "Adam/learning_rate", "Adam/beta1"] {
            assert!(g.operation(node).is_ok(), "there is no {node}");
        }
        // On a parameter server the updates must not meet on the worker.
        let update = g.operation("Adam/update").unwrap().node().unwrap();
        assert_eq!(update.colocation_groups().collect::<Vec<_>>(), ["global_step"]);
        let slot = adam.get_slot(w, "m").unwrap().handle().operation().node().unwrap();
        assert_eq!(slot.colocation_groups().collect::<Vec<_>>(), ["w"]);
        assert_eq!(g.trainable_variables().len(), 2);
        // A second optimizer keeps slots of its own.
        let other = Adam::new(0.1);
        assert_eq!(other.minimize(loss, None).unwrap().name(), "Adam_1");
        assert_eq!(other.get_slot(w, "m").unwrap().name(), "w/Adam_2");
        assert_eq!(g.find_variable("beta1_power_1").unwrap().name(), "beta1_power_1");
    }

    #[test]
    fn no_gradient_at_all_is_an_error_that_names_the_variables() {
        let g = kolo_ops::graph();
        let w = g.variable("w", [1.0f32]);
        let loss = g.constant(1.0f32) * 2.0;
        let sgd = Sgd::new(0.1);
        let error = sgd.minimize(loss, None).unwrap_err().to_string();
        assert!(error.contains("No gradients provided for any variable: [w]"), "{error}");
        let error = sgd.compute_gradients(loss, Some(&[])).err().unwrap().to_string();
        assert!(error.contains("No variables to optimize"), "{error}");
        let one = GradAndVar { grad: Some(g.constant([1.0f32]).into()), variable: w };
        let none = GradAndVar { grad: None, variable: w };
        assert!(sgd.apply_gradients(&[none, one], None).is_ok());
    }

    #[test]
    fn the_step_is_counted_after_every_update() {
        let g = kolo_ops::graph();
        let w = g.variable("w", [1.0f32]);
        let loss = ops::sum_all(w.read());
        let step = train::global_step_or_create(&g).unwrap();
        let op = Sgd::new(0.5).minimize(loss, Some(step)).unwrap();
        let init = g.global_variables_initializer();
        let session = Session::new(&g).unwrap();
        session.run_op(init).unwrap();
        session.run_op(op).unwrap();
        session.run_op(op).unwrap();
        assert_eq!(session.fetch(step.read()).unwrap().scalar_value::<i64>().unwrap(), 2);
        assert_eq!(session.fetch(w.read()).unwrap().data::<f32>().unwrap(), [0.0]);
    }

    /// The variables after three steps with `w` and `e` on these devices.
    fn trained_on(make: &dyn Fn() -> Box<dyn Optimizer>, devices: [&'static str; 2]) -> Vec<kolo_core::Tensor> {
        let g = kolo_ops::graph();
        let pins = move |node: &kolo_graph::Node| {
            let device = match &*node.name {
                "w" => devices[0],
                "e" => devices[1],
                _ => "",
            };
            kolo_core::DeviceSpec::parse(device).unwrap()
        };
        let (w, e, loss) = g.device_fn(pins, || testing::problem(&g, VariableKind::Resource));
        let optimizer = make();
        let train = optimizer.minimize(loss, None).unwrap();
        let init = g.global_variables_initializer();
        let device_count = std::collections::BTreeMap::from([("CPU".to_owned(), 2)]);
        let session = Session::with_config(&g, SessionConfig { device_count, ..SessionConfig::default() }).unwrap();
        session.run_op(init).unwrap();
        for _ in 0..3 {
            session.run_op(train).unwrap();
        }
        // Slots and updates are where their variable is.
        let slots = optimizer.slots(&g);
        let mut n_updates = 0;
        for row in session.local().unwrap().placement().rows.iter().filter(|row| row.op != "Const") {
            let is_update = row.node.contains("/update_e/");
            n_updates += usize::from(is_update);
            if is_update || (row.node.starts_with("e/") && !row.node.contains("Read")) {
                let device = row.device.to_string();
                assert!(device.ends_with(&devices[1][1..].to_uppercase()), "{} is on {device}", row.node);
            }
        }
        assert!(n_updates > 0);
        [w, e].into_iter().chain(slots).map(|variable| session.fetch(variable.read()).unwrap()).collect()
    }

    #[test]
    fn updates_do_not_depend_on_the_device() {
        let makes: [&dyn Fn() -> Box<dyn Optimizer>; 3] =
            [&|| Box::new(Adam::new(0.1)), &|| Box::new(crate::optim::Lamb::new(0.1, 0.01)), &|| {
                Box::new(crate::optim::Momentum::new(0.1, 0.9).nesterov())
            }];
        for make in makes {
            let expected = trained_on(make, ["/cpu:0", "/cpu:0"]);
            for devices in [["/cpu:1", "/cpu:1"], ["/cpu:0", "/cpu:1"], ["/cpu:1", "/cpu:0"]] {
                assert_eq!(trained_on(make, devices), expected);
            }
        }
    }
}
