//! What variables of this folder are called in checkpoints.

use kolo_graph::{Graph, Variable};

use super::partitioned::save_slice;
use crate::train::SaveSlice;

/// The collection of variables with another name in checkpoints: lines of variable and name.
const COLLECTION: &str = "kolo_saved_names";

/// Makes savers write and read `variable` under another name.
pub(super) fn save_under(graph: &Graph, variable: Variable<'_>, name: &str) {
    graph.add_to_collection(COLLECTION, &format!("{} {name}", variable.name()));
}

/// The name of a variable in checkpoints, and which part of that it is.
pub(crate) fn saved_as(graph: &Graph, variable: Variable<'_>) -> (String, Option<SaveSlice>) {
    if let Some(slice) = save_slice(graph, variable) {
        return (slice.full_name.clone(), Some(slice));
    }
    let own = variable.name();
    let lines = graph.collection(COLLECTION);
    let other = lines.iter().filter_map(|line| line.split_once(' ')).find(|(variable, _)| *variable == own);
    (other.map_or_else(|| own.clone(), |(_, name)| name.to_owned()), None)
}
