//! The pending nodes of a step, for reports.

use std::sync::Arc;
use std::time::Duration;

use kolo_graph::Node;

use super::{Step, StepPart};
use crate::executor::part_state::PartState;
use crate::executor::sync::{MutexGuard, lock_within, patience};

/// A pending node.
#[derive(Clone)]
pub struct NodeWait {
    /// The node.
    pub node: Arc<Node>,
    /// Its device.
    pub device: Arc<str>,
    /// How long it has been pending.
    pub lasts: Duration,
}

impl std::fmt::Display for NodeWait {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} '{}' on {} for {:.1?}", self.node.op(), self.node.name, self.device, self.lasts)
    }
}

/// How long a report waits for the lock of a part, which a runner may hold while it runs small nodes.
const GLANCE: Duration = patience(200);

impl Step {
    /// Describes what the step waits for now, for logs and errors.
    pub fn describe_waits(&self) -> String {
        let mut waits: Vec<String> = self.waits().iter().map(NodeWait::to_string).collect();
        for part in &self.parts {
            let n_runners = part.glance().map_or(1, |state| state.n_runners);
            if n_runners > 0 {
                waits.push(format!("{n_runners} kernel(s) running on {}", part.plan.unit.name));
            }
        }
        waits.sort();
        if waits.is_empty() { "nothing that has a name".to_owned() } else { waits.join(", ") }
    }

    /// The pending nodes, which have released their threads; not those of parts that are too busy to be looked at.
    pub fn waits(&self) -> Vec<NodeWait> {
        let mut waits = Vec::new();
        for part in &self.parts {
            let Some(state) = part.glance() else { continue };
            waits.extend(state.waiting.values().map(|(node, since)| NodeWait {
                node: part.plan.nodes[*node as usize].node.clone(),
                device: part.plan.unit.name.clone(),
                lasts: since.elapsed(),
            }));
        }
        waits
    }

    /// The number of threads that run its kernels now. One that cannot be looked at has at least one.
    pub fn n_runners(&self) -> usize {
        self.parts.iter().map(|part| part.glance().map_or(1, |state| state.n_runners)).sum()
    }

    /// The number of ready nodes in parts without a runner. If it stays above 0, the executor has a bug.
    pub fn n_unattended(&self) -> usize {
        let unattended = |part: &StepPart| match part.glance() {
            Some(state) if state.n_runners == 0 && !part.for_caller => state.n_ready(),
            _ => 0,
        };
        self.parts.iter().map(unattended).sum()
    }
}

impl StepPart {
    /// The state for a report. `None` if a runner holds it for long: network threads report, and must not wait.
    fn glance(&self) -> Option<MutexGuard<'_, PartState>> {
        lock_within(&self.state, GLANCE)
    }
}
