//! What a task of a cluster runs: graphs that a master has placed and cut, step by step, with transfers that may leave the
//! process. No thread waits for a step.

use std::collections::HashMap;
use std::sync::Arc;

use kolo_core::{Error, Result};
use kolo_graph::{LoopControl, NodeId, Nodes, PartitionOptions, PlaceOptions, Request, partition, place, prune};
use kolo_ops::registry;
use parking_lot::Mutex;

use crate::devices::Devices;
use crate::executor::frame_id::FrameIds;
use crate::executor::plan::{Extras, KernelCache, Part, PartPlan, compile};
use crate::executor::step::{NodeWait, Step};
use crate::host::Host;
use crate::planner::Support;
use crate::rendezvous::StepRendezvous;
use crate::trace::NodeTrace;

/// The graphs of one session of a master, which share kernels that keep state.
pub struct TaskSession {
    devices: Arc<Devices>,
    kernels: KernelCache,
    fresh: Mutex<u64>,
}

/// A graph that is ready to run.
pub struct TaskGraph {
    parts: Vec<Arc<PartPlan>>,
}

/// A step in flight. Dropping this leaves the step alone.
#[derive(Clone)]
pub struct TaskStep {
    step: Arc<Step>,
}

impl TaskSession {
    /// A session on the host's devices. It shares their variables with all others.
    pub fn new(host: &Host) -> TaskSession {
        TaskSession { devices: host.devices.clone(), kernels: KernelCache::default(), fresh: Mutex::new(0) }
    }

    /// A session on the host's devices with variables and queues of its own, which end with it.
    pub fn isolated(host: &Host) -> TaskSession {
        let devices = Arc::new(host.devices.with_own_state());
        TaskSession { devices, kernels: KernelCache::default(), fresh: Mutex::new(0) }
    }

    /// Compiles a task's part of a step: every node of it runs, on the device it names.
    pub fn compile(&self, nodes: &Nodes, frame_ids: FrameIds) -> Result<TaskGraph> {
        let infos = self.devices.infos();
        for (_, node) in nodes.iter() {
            if node.device.full().is_none_or(|name| infos.iter().all(|info| info.name != name)) {
                return Err(Error::invalid_argument(format!(
                    "{{{{node {}}}}} is assigned to '{}', an unknown device. This task has {}",
                    node.name,
                    node.device,
                    infos.iter().map(|info| info.name.to_string()).collect::<Vec<_>>().join(", ")
                )));
            }
        }
        let targets: Vec<NodeId> = nodes.iter().map(|(id, _)| id).collect();
        let pruned = prune(nodes, &Request { targets, ..Request::default() })?;
        let support = Support { devices: &self.devices };
        let placed = place(nodes, &pruned.nodes, &infos, &support, &HashMap::new(), &PlaceOptions::default())?;
        let options =
            PartitionOptions { support: Some(&support), loops: LoopControl::Present, ..PartitionOptions::default() };
        let mut fresh = || {
            let mut fresh = self.fresh.lock();
            *fresh += 1;
            *fresh
        };
        let mut parts = Vec::new();
        for partition in partition(&placed, &pruned, registry(), &options, &mut fresh)? {
            let part = Part {
                nodes: &partition.nodes,
                fed: HashMap::new(),
                fetches: Vec::new(),
                frame_ids,
                extras: Extras::default(),
            };
            parts.push(Arc::new(compile(&part, &self.devices.units[partition.device], &self.kernels)?));
        }
        Ok(TaskGraph { parts })
    }
}

impl TaskGraph {
    /// Begins a step and returns. `on_end` is called once, on any thread, with the first error if there was one. `step_id`
    /// must be the master's: transfers of one step meet under it.
    pub fn start(
        &self,
        step_id: u64,
        transfers: Arc<dyn StepRendezvous>,
        traced: bool,
        on_end: Box<dyn FnOnce(Option<Error>) + Send>,
    ) -> TaskStep {
        let step = Step::detached(step_id, &self.parts, transfers, traced, on_end);
        step.start();
        TaskStep { step }
    }
}

impl TaskStep {
    /// Stops the step: kernels that wait come back, nothing new begins.
    pub fn fail(&self, reason: Error) {
        self.step.fail(reason);
    }

    /// The nodes that wait now: for a queue, for a tensor of another device or task.
    pub fn waits(&self) -> Vec<NodeWait> {
        self.step.waits()
    }

    /// How many threads run its kernels now.
    pub fn n_runners(&self) -> usize {
        self.step.n_runners()
    }

    /// How many nodes are ready that no thread runs.
    pub fn n_unattended(&self) -> usize {
        self.step.n_unattended()
    }

    /// What was recorded of each node, if asked for.
    pub fn take_trace(&self) -> Vec<NodeTrace> {
        self.step.take_trace()
    }
}
