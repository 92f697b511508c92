//! What a step waits for, for reports.

use std::sync::Arc;
use std::time::Duration;

use kolo_graph::Node;

use super::{Step, StepPart};

/// A node that waits.
#[derive(Clone)]
pub struct NodeWait {
    /// The node.
    pub node: Arc<Node>,
    /// Its device.
    pub device: Arc<str>,
    /// For how long it has waited.
    pub lasts: Duration,
}

impl std::fmt::Display for NodeWait {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} '{}' on {} for {:.1?}", self.node.op(), self.node.name, self.device, self.lasts)
    }
}

impl Step {
    /// What the step waits for now, for people.
    pub fn describe_waits(&self) -> String {
        let mut waits: Vec<String> = self.waits().iter().map(NodeWait::to_string).collect();
        for part in &self.parts {
            let n_runners = part.state.lock().n_runners;
            if n_runners > 0 {
                waits.push(format!("{n_runners} kernel(s) running on {}", part.plan.unit.name));
            }
        }
        waits.sort();
        if waits.is_empty() { "nothing that has a name".to_owned() } else { waits.join(", ") }
    }

    /// The nodes that have given up their threads and wait.
    pub fn waits(&self) -> Vec<NodeWait> {
        let mut waits = Vec::new();
        for part in &self.parts {
            let state = part.state.lock();
            waits.extend(state.waiting.values().map(|(node, since)| NodeWait {
                node: part.plan.nodes[*node as usize].node.clone(),
                device: part.plan.unit.name.clone(),
                lasts: since.elapsed(),
            }));
        }
        waits
    }

    /// How many threads run its kernels now.
    pub fn n_runners(&self) -> usize {
        self.parts.iter().map(|part| part.state.lock().n_runners).sum()
    }

    /// How many nodes are ready in parts that no thread works on. More than a moment of this is a fault of the executor.
    pub fn n_unattended(&self) -> usize {
        let unattended = |part: &StepPart| {
            let state = part.state.lock();
            if state.n_runners == 0 && !part.for_caller { state.n_ready() } else { 0 }
        };
        self.parts.iter().map(unattended).sum()
    }
}
