//! What a step does and waits for, for reports.

use std::sync::Arc;
use std::time::Duration;

use kolo_graph::Node;

use super::Step;
use super::part::{Mail, StepPart};
use crate::executor::may_wait::MayWait;
use crate::executor::part_state::PartState;

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

/// What one device does for a step at one moment.
pub struct PartView {
    /// The pending nodes, which have released their threads.
    pub waits: Vec<NodeWait>,
    /// The number of threads that run its kernels.
    pub n_runners: usize,
    /// The number of ready nodes without a runner. If it stays above 0, the executor has a bug.
    pub n_unattended: usize,
}

impl PartView {
    pub(super) fn new(part: &StepPart, state: &PartState) -> PartView {
        let wait = |(node, since): &(u32, std::time::Instant)| NodeWait {
            node: part.plan.nodes[*node as usize].node.clone(),
            device: part.plan.unit.name.clone(),
            lasts: since.elapsed(),
        };
        PartView {
            waits: state.waiting.values().map(wait).collect(),
            n_runners: state.n_runners,
            n_unattended: if state.n_runners == 0 && !part.for_caller { state.n_ready() } else { 0 },
        }
    }
}

impl Step {
    /// Describes what the step waits for now, for errors. The caller's thread asks.
    pub(super) fn describe_waits(self: &Arc<Self>) -> String {
        let mut waits: Vec<String> = Vec::new();
        for (index, part) in self.parts.iter().enumerate() {
            let view = PartView::new(part, &self.hold(index, MayWait::of_a_caller()));
            waits.extend(view.waits.iter().map(NodeWait::to_string));
            if view.n_runners > 0 {
                waits.push(format!("{} kernel(s) running on {}", view.n_runners, part.plan.unit.name));
            }
        }
        waits.sort();
        if waits.is_empty() { "nothing that has a name".to_owned() } else { waits.join(", ") }
    }

    /// Asks what the step does, and returns the number of parts asked. Each calls `answer` once, on this thread or, if a
    /// runner holds it, on that one soon; or never, if the step ends first. `answer` must only pass the view on.
    pub fn look(self: &Arc<Self>, answer: impl Fn(PartView) + Send + Sync + 'static) -> usize {
        let answer = Arc::new(answer);
        for index in 0..self.parts.len() {
            self.post(index, Mail::Asked(answer.clone()));
        }
        self.parts.len()
    }
}
