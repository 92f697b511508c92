//! Where objects that belong to a variable go.

use kolo_core::DeviceSpec;
use kolo_graph::Operation;

/// The device for queues and accumulators that belong to the state of `operation`: its own, or that of what it is colocated
/// with. They live in the host's memory, so of a device that is no CPU only the task counts.
pub(super) fn home(operation: Operation<'_>) -> String {
    let Some(node) = operation.node() else { return String::new() };
    let graph = operation.graph();
    let mut device = node.device.clone();
    if device.is_empty()
        && let Some(leader) = node.colocation_groups().next()
        && let Some(leader) = graph.operation(leader).ok().and_then(|leader| leader.node())
    {
        device = leader.device.clone();
    }
    if device.kind.as_deref() != Some("CPU") {
        device = DeviceSpec { kind: Some("CPU".into()), id: None, ..device };
    }
    device.to_string()
}
