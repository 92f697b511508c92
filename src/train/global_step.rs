//! The global step: how many updates the variables have seen, whoever made them.

use kolo_core::{Error, Result};
use kolo_graph::{Graph, Initializer, Variable};
use kolo_runtime::Session;

/// The collection that holds the global step's name, as in TensorFlow.
const COLLECTION: &str = "global_step";

/// Makes the graph's global step, an `int64` variable called `global_step` that is saved but not trained.
#[track_caller]
pub fn create_global_step(graph: &Graph) -> Result<Variable<'_>> {
    if let Some(name) = graph.collection(COLLECTION).first() {
        return Err(Error::already_exists(format!("the graph has a global step already: '{name}'")));
    }
    let zero = Initializer::from(0i64);
    let step = graph.absolute_scope("", || graph.new_variable("global_step", zero).not_trainable().build());
    graph.add_to_collection(COLLECTION, &step.name());
    Ok(step)
}

/// The graph's global step, if it has one.
pub fn global_step(graph: &Graph) -> Option<Variable<'_>> {
    let name = graph.collection(COLLECTION).into_iter().next()?;
    graph.find_variable(&name).ok()
}

/// The graph's global step, made now if it has none.
#[track_caller]
pub fn global_step_or_create(graph: &Graph) -> Result<Variable<'_>> {
    match global_step(graph) {
        Some(step) => Ok(step),
        None => create_global_step(graph),
    }
}

/// The value of the graph's global step in this session; `None` if the graph has none.
pub fn read_global_step(session: &Session, graph: &Graph) -> Result<Option<i64>> {
    match global_step(graph) {
        Some(step) => session.fetch(step.read())?.integers().map(|values| values.first().copied()),
        None => Ok(None),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn there_is_one_global_step() {
        let g = kolo_ops::graph();
        assert!(global_step(&g).is_none());
        let made = g.name_scope("tower", || global_step_or_create(&g)).unwrap();
        assert_eq!(made.name(), "global_step");
        assert_eq!(global_step_or_create(&g).unwrap().name(), "global_step");
        assert!(create_global_step(&g).is_err());
        assert!(g.trainable_variables().is_empty());
        assert_eq!(g.global_variables().len(), 1);
    }
}
