//! What an optimizer remembers of a graph: which variable holds which slot, by name.

use std::cell::RefCell;

use kolo_core::{DType, Error, Result, Shape, Tensor};
use kolo_graph::{Graph, Initializer, Variable};

use super::LearningRate;

/// What every optimizer has: a name, a learning rate, and slots.
#[derive(Debug)]
pub struct Core {
    name: String,
    rate: LearningRate,
    slots: RefCell<Vec<Slot>>,
}

#[derive(Debug)]
struct Slot {
    /// Which graph, by its address; the name must be found there as well.
    graph: usize,
    /// Whose slot it is; empty for what is kept once for all variables.
    variable: String,
    slot: String,
    /// The variable that holds it.
    name: String,
}

impl Core {
    /// An optimizer called `name`: its scope in the graph, and the name of its slots.
    pub fn new(name: &str, rate: impl Into<LearningRate>) -> Core {
        Core { name: name.to_owned(), rate: rate.into(), slots: RefCell::default() }
    }

    /// The same under another name.
    pub fn renamed(self, name: &str) -> Core {
        Core { name: name.to_owned(), ..self }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its learning rate.
    pub fn rate(&self) -> &LearningRate {
        &self.rate
    }

    /// The slot of a variable, made on first use with the variable's shape: `w/Adam`, then `w/Adam_1`.
    pub fn slot<'g>(&self, variable: Variable<'g>, slot: &str, initial: Initializer) -> Result<Variable<'g>> {
        let shape = variable.shape().known().ok_or_else(|| {
            Error::invalid_argument(format!(
                "{} needs a slot for variable '{}', whose shape {} is not known: give it a shape",
                self.name,
                variable.name(),
                variable.shape()
            ))
        })?;
        self.slot_of_shape(variable, slot, initial, shape)
    }

    /// As [`Core::slot`], of a shape of its own.
    pub fn slot_of_shape<'g>(
        &self,
        variable: Variable<'g>,
        slot: &str,
        initial: Initializer,
        shape: Shape,
    ) -> Result<Variable<'g>> {
        if let Some(made) = self.find(variable, slot) {
            return Ok(made);
        }
        let graph = variable.handle().graph();
        let made = graph.absolute_scope(&variable.name(), || {
            graph.colocate_with(variable.handle().operation(), || {
                let builder = graph.new_variable(&self.name, initial).shape(shape).dtype(variable.dtype());
                builder.kind(variable.kind()).not_trainable().build()
            })
        });
        graph.check()?;
        self.remember(graph, variable.name(), slot, made);
        Ok(made)
    }

    /// A scalar that is kept once for all variables, such as `beta1_power`, made on first use beside the first of them by
    /// name.
    pub fn scalar<'g>(&self, variables: &[Variable<'g>], name: &str, initial: f64) -> Result<Variable<'g>> {
        let first = variables.iter().min_by_key(|variable| variable.name());
        let first = first.ok_or_else(|| Error::invalid_argument("there are no variables to update"))?;
        let graph = first.handle().graph();
        if let Some(made) = self.find_scalar(graph, name) {
            return Ok(made);
        }
        let initial = match first.dtype() {
            DType::F64 => Tensor::scalar(initial),
            _ => Tensor::scalar(initial as f32),
        };
        let made = graph.colocate_with(first.handle().operation(), || {
            graph.new_variable(name, initial).kind(first.kind()).not_trainable().build()
        });
        graph.check()?;
        self.remember(graph, String::new(), name, made);
        Ok(made)
    }

    /// A slot that was made.
    pub fn find<'g>(&self, variable: Variable<'g>, slot: &str) -> Option<Variable<'g>> {
        self.lookup(variable.handle().graph(), &variable.name(), slot)
    }

    /// A scalar that was made.
    pub fn find_scalar<'g>(&self, graph: &'g Graph, name: &str) -> Option<Variable<'g>> {
        self.lookup(graph, "", name)
    }

    /// Everything that was made in this graph, in order.
    pub fn all<'g>(&self, graph: &'g Graph) -> Vec<Variable<'g>> {
        let slots = self.slots.borrow();
        let here = slots.iter().filter(|slot| slot.graph == address(graph));
        here.filter_map(|slot| graph.find_variable(&slot.name).ok()).collect()
    }

    /// What was made for one variable, with the name of each slot.
    pub fn slots_of<'g>(&self, variable: Variable<'g>) -> Vec<(String, Variable<'g>)> {
        self.listed(variable.handle().graph(), &variable.name())
    }

    /// What was made once for all variables, with its name.
    pub fn scalars<'g>(&self, graph: &'g Graph) -> Vec<(String, Variable<'g>)> {
        self.listed(graph, "")
    }

    fn listed<'g>(&self, graph: &'g Graph, variable: &str) -> Vec<(String, Variable<'g>)> {
        let slots = self.slots.borrow();
        let its = slots.iter().filter(|slot| slot.graph == address(graph) && slot.variable == variable);
        its.filter_map(|slot| Some((slot.slot.clone(), graph.find_variable(&slot.name).ok()?))).collect()
    }

    fn lookup<'g>(&self, graph: &'g Graph, variable: &str, slot: &str) -> Option<Variable<'g>> {
        let slots = self.slots.borrow();
        let is_it = |have: &&Slot| have.graph == address(graph) && have.slot == slot && have.variable == variable;
        graph.find_variable(&slots.iter().find(is_it)?.name).ok()
    }

    fn remember(&self, graph: &Graph, variable: String, slot: &str, made: Variable<'_>) {
        let (graph, slot, name) = (address(graph), slot.to_owned(), made.name());
        self.slots.borrow_mut().push(Slot { graph, variable, slot, name });
    }
}

fn address(graph: &Graph) -> usize {
    std::ptr::from_ref(graph) as usize
}
