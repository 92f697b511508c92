//! What the updates of one step share: the scalars they take, made once for each device that holds variables.

use std::cell::RefCell;
use std::collections::HashMap;

use kolo_core::{DType, Error, Result, Tensor};
use kolo_graph::{Graph, IndexedSlices, Operation, Output, Variable};

use super::{Core, LearningRate};
use crate::{ops, train};

/// One call of [`super::Optimizer::apply_gradients`].
pub struct Update<'a, 'g> {
    core: &'a Core,
    graph: &'g Graph,
    /// The optimizer's name scope.
    scope: String,
    variables: &'a [Variable<'g>],
    global_step: Option<Variable<'g>>,
    /// The learning rate, if it is more than a number.
    rate: Option<Output<'g>>,
    shared: RefCell<HashMap<(String, DType, String), Output<'g>>>,
}

impl<'a, 'g> Update<'a, 'g> {
    /// Begins an update of `variables`, of which there is at least one, in the optimizer's scope, which is open.
    pub(super) fn new(
        core: &'a Core,
        variables: &'a [Variable<'g>],
        global_step: Option<Variable<'g>>,
    ) -> Result<Update<'a, 'g>> {
        let first = variables.first().ok_or_else(|| Error::internal("an update without variables"))?;
        let graph = first.handle().graph();
        let rate = match core.rate() {
            LearningRate::Constant(_) => None,
            LearningRate::Tensor(name) => Some(graph.output(name).map_err(|error| {
                error.context(format_args!("the learning rate of {} is a tensor of another graph", core.name()))
            })?),
            LearningRate::Schedule(schedule) => {
                let step = global_step.or_else(|| train::global_step(graph)).ok_or_else(|| {
                    Error::invalid_argument(format!(
                        "the learning rate of {} follows a schedule, which needs the global step: pass it, or make it with \
                         train::global_step_or_create",
                        core.name()
                    ))
                })?;
                Some(graph.no_control_dependencies(|| schedule.build(step.read())))
            }
        };
        let (scope, shared) = (graph.scoped_name(""), RefCell::default());
        Ok(Update { core, graph, scope, variables, global_step, rate, shared })
    }

    /// The graph.
    pub fn graph(&self) -> &'g Graph {
        self.graph
    }

    /// All variables that are updated.
    pub fn variables(&self) -> &'a [Variable<'g>] {
        self.variables
    }

    /// The global step, if the caller gave one.
    pub fn global_step(&self) -> Option<Variable<'g>> {
        self.global_step
    }

    /// A slot of a variable, which must have been made.
    pub fn slot(&self, variable: Variable<'g>, slot: &str) -> Result<Variable<'g>> {
        self.core.find(variable, slot).ok_or_else(|| {
            Error::internal(format!("{} has no slot '{slot}' for '{}'", self.core.name(), variable.name()))
        })
    }

    /// A scalar that is kept once for all variables, which must have been made.
    pub fn scalar_variable(&self, name: &str) -> Result<Variable<'g>> {
        let made = self.core.find_scalar(self.graph, name);
        made.ok_or_else(|| Error::internal(format!("{} has no variable '{name}'", self.core.name())))
    }

    /// The value of [`Update::scalar_variable`], in the dtype of `variable`.
    pub fn scalar_value(&self, name: &str, variable: Variable<'g>) -> Result<Output<'g>> {
        let value = self.scalar_variable(name)?.read();
        Ok(match value.dtype() == variable.dtype() {
            true => value,
            false => self.shared(name, variable, || ops::cast(value, variable.dtype())),
        })
    }

    /// The learning rate, in the dtype of `variable`.
    pub fn rate(&self, variable: Variable<'g>) -> Output<'g> {
        match (self.rate, self.core.rate()) {
            (Some(rate), _) if rate.dtype() == variable.dtype() => rate,
            (Some(rate), _) => self.shared("learning_rate", variable, || ops::cast(rate, variable.dtype())),
            (None, LearningRate::Constant(rate)) => self.number("learning_rate", *rate, variable),
            (None, _) => self.number("learning_rate", 0.0, variable),
        }
    }

    /// A number, as a constant in the dtype of `variable` on its device.
    pub fn number(&self, name: &str, value: f64, variable: Variable<'g>) -> Output<'g> {
        let value = match variable.dtype() {
            DType::F64 => Tensor::scalar(value),
            DType::F16 => Tensor::scalar(half::f16::from_f64(value)),
            DType::BF16 => Tensor::scalar(half::bf16::from_f64(value)),
            // Anything else is refused by the update itself.
            _ => Tensor::scalar(value as f32),
        };
        self.shared(name, variable, || self.graph.named_constant(name, value))
    }

    /// What `make` adds, made once for all variables of this dtype on this variable's device.
    pub fn shared(&self, name: &str, variable: Variable<'g>, make: impl FnOnce() -> Output<'g>) -> Output<'g> {
        let key = (name.to_owned(), variable.dtype(), device_of(variable));
        if let Some(&made) = self.shared.borrow().get(&key) {
            return made;
        }
        let made = self.graph.absolute_scope(&self.scope, || {
            self.graph.no_control_dependencies(|| self.graph.colocate_with(variable.handle().operation(), make))
        });
        self.shared.borrow_mut().insert(key, made);
        made
    }
}

/// The device that a variable asks for.
fn device_of(variable: Variable<'_>) -> String {
    variable.handle().operation().node().map(|node| node.device.to_string()).unwrap_or_default()
}

/// Rows that occur more than once summed, so that each index occurs once.
#[track_caller]
pub fn deduplicate(slices: IndexedSlices<'_>) -> IndexedSlices<'_> {
    let (indices, places) = ops::unique(slices.indices);
    let n = ops::slice_at(ops::shape(indices), &[ops::At::Index(0)]);
    IndexedSlices { values: ops::unsorted_segment_sum(slices.values, places, n), indices, ..slices }
}

/// Operations to wait for: the updates, or where their variables are on several devices one per device, and `after`.
pub(super) fn group_by_device<'g>(
    graph: &'g Graph,
    updates: &[(Operation<'g>, Variable<'g>)],
    after: &[Operation<'g>],
) -> Vec<Operation<'g>> {
    let mut devices: Vec<(String, Variable<'g>, Vec<Operation<'g>>)> = Vec::new();
    for &(update, variable) in updates {
        let device = device_of(variable);
        match devices.iter_mut().find(|(have, ..)| *have == device) {
            Some((.., ops)) => ops.push(update),
            None => devices.push((device, variable, vec![update])),
        }
    }
    let done = match devices.as_slice() {
        [] | [_] => updates.iter().map(|(update, _)| *update).collect::<Vec<_>>(),
        // One message per device instead of one per variable tells the step that it is done.
        devices => devices
            .iter()
            .map(|(_, variable, ops)| {
                graph.colocate_with(variable.handle().operation(), || graph.group("group_deps", ops))
            })
            .collect(),
    };
    done.into_iter().chain(after.iter().copied()).collect()
}

/// The update `name` by reference (`ApplyX`) or by handle (`ResourceApplyX`).
#[track_caller]
pub(super) fn apply<'g>(
    name: &str,
    variables: &[Variable<'g>],
    rest: &[Output<'g>],
    attrs: &[(&str, bool)],
) -> Operation<'g> {
    let handles = variables.iter().map(|variable| variable.handle());
    let inputs: Vec<Output<'g>> = handles.chain(rest.iter().copied()).collect();
    kolo_ops::optim::update::build(name, &inputs, attrs)
}

/// A number as a constant in the dtype of `x`.
#[track_caller]
pub(super) fn number_like(x: Output<'_>, value: f64) -> Output<'_> {
    kolo_graph::IntoOutput::into_output(value, x.graph(), x.dtype())
}

/// The value after `operations`, for a variable that they update.
#[track_caller]
pub(super) fn read_after<'g>(variable: Variable<'g>, operations: &[Operation<'g>]) -> Output<'g> {
    let graph = variable.handle().graph();
    graph.control_dependencies(operations, || variable.read_now())
}
