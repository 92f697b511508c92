//! Which variables have no value yet: how a worker knows whether it may begin.

use bytes::Bytes;
use kolo_core::{Result, Tensor};
use kolo_graph::{Graph, Output, Variable, VariableKind};
use kolo_ops::array::{concat::stack, gather::gather, select::where_true};
use kolo_ops::math::logical::logical_not;
use kolo_ops::state::{handle::var_is_initialized, reference::is_variable_initialized};
use kolo_runtime::Session;

/// Adds an output to the graph that lists the names of those variables that have no value: a vector of strings, empty
/// when all is ready. It runs on `/cpu:0`, as in TensorFlow.
#[track_caller]
pub fn report_uninitialized_variables<'g>(graph: &'g Graph, variables: &[Variable<'g>]) -> Result<Output<'g>> {
    let report = graph.name_scope("report_uninitialized_variables", || -> Result<Output<'g>> {
        let names: Vec<Bytes> = variables.iter().map(|variable| Bytes::from(variable.name())).collect();
        graph.device("/cpu:0", || {
            let names = graph.constant(Tensor::from_strings([names.len()], names)?);
            if variables.is_empty() {
                return Ok(names);
            }
            let have: Vec<Output<'g>> = variables.iter().map(|variable| is_initialized(*variable)).collect();
            let missing = where_true(logical_not(stack(&have, 0)));
            let missing = kolo_ops::array::expand_dims::squeeze(missing, &[1]);
            Ok(gather(names, missing, 0))
        })
    })?;
    graph.check()?;
    Ok(report)
}

fn is_initialized(variable: Variable<'_>) -> Output<'_> {
    let graph = variable.handle().graph();
    // The question goes where the variable is; only the answers travel.
    graph.no_device(|| {
        graph.colocate_with(variable.handle().operation(), || match variable.kind() {
            VariableKind::Resource => var_is_initialized(variable.handle()),
            VariableKind::Reference => is_variable_initialized(variable.handle()),
        })
    })
}

/// Runs a report of [`report_uninitialized_variables`].
pub(crate) fn missing_variables(session: &Session, report: Output<'_>) -> Result<Vec<String>> {
    let names = session.fetch(report)?;
    Ok(names.strings()?.iter().map(|name| String::from_utf8_lossy(name).into_owned()).collect())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn names_what_has_no_value_in_both_families() {
        let g = kolo_ops::graph();
        let a = g.variable("a", 1.0f32);
        let b = g.new_variable("b", [1.0f32, 2.0]).kind(VariableKind::Reference).build();
        let report = report_uninitialized_variables(&g, &g.global_variables()).unwrap();
        let none = report_uninitialized_variables(&g, &[]).unwrap();
        let session = Session::new(&g).unwrap();
        assert_eq!(missing_variables(&session, report).unwrap(), ["a", "b"]);
        session.run_op(a.initializer()).unwrap();
        assert_eq!(missing_variables(&session, report).unwrap(), ["b"]);
        session.run_op(b.initializer()).unwrap();
        assert!(missing_variables(&session, report).unwrap().is_empty());
        assert!(missing_variables(&session, none).unwrap().is_empty());
    }
}
