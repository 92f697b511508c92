//! The variables of a task as entries of records: which ones a graph writes, their values, and back again.

use std::collections::BTreeSet;
use std::sync::Arc;

use kolo_core::{DType, Dim, PartialShape, Result};
use kolo_graph::{NodeId, Nodes, is_variable};
use kolo_ops::{ResourceStore, VariableCell};

use crate::wire::proto::VariableEntry;
use crate::wire::tensor_wire::WireTensor;

/// A variable: container and name.
pub(crate) type Key = (String, String);

/// The variables that nodes may write: all variables that are passed to an op, unless the op is known not to write any.
pub(crate) fn written(nodes: &Nodes) -> BTreeSet<Key> {
    let variable = |id: NodeId| -> Option<Key> {
        let node = nodes.node(id);
        if !is_variable(node) {
            return None;
        }
        let name = node.attrs.str("shared_name").ok().filter(|name| !name.is_empty()).unwrap_or(&node.name);
        Some((node.attrs.str("container").unwrap_or_default().to_owned(), name.to_owned()))
    };
    let mut keys = BTreeSet::new();
    for (_, node) in nodes.iter().filter(|(_, node)| !node.def.effects.leaves_variables()) {
        for (i, input) in node.inputs.iter().enumerate() {
            if input.feed().is_some() {
                continue;
            }
            // The output of a reference variable is copied, unless the input takes it by reference.
            let by_handle = nodes.output(*input).dtype == DType::Resource || node.ref_inputs.get(i) == Some(&true);
            if by_handle {
                keys.extend(variable(input.node));
            }
        }
    }
    keys
}

/// The current values of these variables on each device, for a record; updates `known`, the set of variables with a
/// value. The caller keeps `known` locked until the record is written, so that records are in the order of their
/// values.
pub(crate) fn changes(
    stores: &[Arc<ResourceStore>],
    keys: &BTreeSet<Key>,
    known: &mut BTreeSet<(usize, Key)>,
) -> Result<Vec<VariableEntry>> {
    let mut entries = Vec::new();
    for (device, store) in stores.iter().enumerate() {
        for key in keys {
            // One variable has one key, however a graph spells its container.
            let place = (device, (store.container(&key.0).to_owned(), key.1.clone()));
            match entry(store, &place)? {
                Some(entry) => {
                    known.insert(place);
                    entries.push(entry);
                }
                None if known.remove(&place) => entries.push(gone(&place)),
                None => {}
            }
        }
    }
    Ok(entries)
}

/// A variable's current value; `None` if it has none.
pub(crate) fn entry(store: &ResourceStore, place: &(usize, Key)) -> Result<Option<VariableEntry>> {
    let (device, (container, name)) = place;
    // A resource of another type with that name is not logged.
    let Ok(Some(cell)) = store.lookup::<VariableCell>(container, name) else { return Ok(None) };
    let Some(value) = cell.read() else { return Ok(None) };
    let dims = cell.shape().dims().map(|dims| {
        dims.iter().map(|dim| dim.and_then(|dim| i64::try_from(dim).ok()).unwrap_or(-1)).collect::<Vec<_>>()
    });
    let has_rank = dims.is_some();
    let value = Some(WireTensor::new(value)?);
    let dims = dims.unwrap_or_default();
    Ok(Some(VariableEntry {
        value,
        dims,
        has_rank,
        device: *device as u32,
        container: container.clone(),
        name: name.clone(),
    }))
}

/// The removal of a variable.
fn gone((device, (container, name)): &(usize, Key)) -> VariableEntry {
    VariableEntry {
        device: *device as u32,
        container: container.clone(),
        name: name.clone(),
        ..VariableEntry::default()
    }
}

/// Restores a variable.
pub(crate) fn restore(store: &ResourceStore, (container, name): &Key, entry: VariableEntry) -> Result<()> {
    let Some(value) = entry.value else { return Ok(()) };
    let value = value.into_tensor().map_err(|error| error.context(format_args!("the stored value of {name}")))?;
    let shape = match entry.has_rank {
        true => {
            let dims: Vec<Dim> = entry.dims.iter().map(|&dim| usize::try_from(dim).ok()).collect();
            PartialShape::new(&dims)
        }
        false => PartialShape::unknown(),
    };
    let dtype = value.dtype();
    let cell =
        store.lookup_or_create(container, name, || Ok(VariableCell::new(name.as_str(), dtype, shape.clone())))?;
    cell.assign(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_graphs_write_is_found_and_what_they_read_is_not() {
        let g = kolo_ops::graph();
        let handle = |name: &str| {
            let shape = PartialShape::new(&[Some(2)]);
            g.op("VarHandleOp").name(name).attr("dtype", DType::F32).attr("shape", shape).out()
        };
        let (read, written_to) = (handle("read"), handle("written"));
        let value = g.op("ReadVariableOp").input(read).attr("dtype", DType::F32).out();
        let _ = g.op("VarIsInitializedOp").input(read).out();
        let _ = g.op("AssignAddVariableOp").input(written_to).input(value).build();
        let _ = g.new_variable("old", 1.0f32).kind(kolo_graph::VariableKind::Reference).build();
        let names: Vec<String> = written(&g.snapshot()).into_iter().map(|(_, name)| name).collect();
        // The last has an initializer.
        assert_eq!(names, ["old", "written"]);
    }
}
