//! What a task of a cluster runs: graphs that a master has placed and partitioned, step by step, with transfers to
//! and from other processes. No thread blocks on a step.

use std::collections::HashMap;
use std::sync::Arc;

use kolo_core::{Error, Result};
use kolo_graph::{
    Ends, Granularity, ImplicitCopies, LoopControl, NodeId, Nodes, Pass, PlaceOptions, PlanRequest, Request, pipeline,
    plan,
};
use kolo_ops::registry;
use parking_lot::Mutex;

use crate::capture::split::CaptureReport;
use crate::compile::part::KernelCache;
use crate::compile::{Captures, CompiledPlan, RunParts};
use crate::devices::Devices;
use crate::devices::host::Host;
use crate::executor::frame_id::FrameIds;
use crate::executor::rendezvous::StepRendezvous;
use crate::executor::step::{PartView, Step};
use crate::fusion;
use crate::planner::Support;
use crate::trace::NodeTrace;

/// The graphs of one session of a master, which share kernels that keep state.
pub struct TaskSession {
    devices: Arc<Devices>,
    kernels: Arc<KernelCache>,
    captures: Captures,
    /// The passes over a part of a graph, in order.
    passes: Vec<Pass>,
    fresh: Mutex<u64>,
}

/// A graph that is ready to run.
pub struct TaskGraph {
    compiled: CompiledPlan,
    kernels: Arc<KernelCache>,
}

/// How a step's feeds and fetches are passed, and whether it is traced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepKind {
    /// All feeds are present when it begins.
    Whole,
    /// Feeds and fetches come in several calls, each of which may depend on earlier ones.
    Partial,
    /// Every node is recorded.
    Traced,
}

/// A step in flight. Dropping the handle does not stop the step. Network threads have one: nothing here waits for the
/// threads that run the step.
#[derive(Clone)]
pub struct TaskStep {
    pub(crate) step: Arc<Step>,
}

impl TaskSession {
    /// A session on the host's devices. It shares their variables with all other sessions.
    pub fn new(host: &Host) -> TaskSession {
        TaskSession::over(host.devices.clone(), host)
    }

    /// A session on the host's devices with its own variables and queues, which are dropped with it.
    pub fn isolated(host: &Host) -> TaskSession {
        TaskSession::over(Arc::new(host.devices.with_own_state()), host)
    }

    fn over(devices: Arc<Devices>, host: &Host) -> TaskSession {
        let passes = if host.config.gpu.no_fusion { Vec::new() } else { fusion::passes() };
        TaskSession {
            devices,
            kernels: Arc::default(),
            captures: if host.config.gpu.no_capture { Captures::Off } else { Captures::Segments },
            passes: pipeline(&passes),
            fresh: Mutex::new(0),
        }
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
        let request = PlanRequest {
            nodes,
            request: &Request { targets, ..Request::default() },
            connections: &[],
            registry: registry(),
            devices: &infos,
            support: &Support { devices: &self.devices },
            earlier: &HashMap::new(),
            place: &PlaceOptions::default(),
            copies: ImplicitCopies::Allowed,
            granularity: Granularity::Device,
            loops: LoopControl::Present,
            ends: Ends::Caller,
            passes: &self.passes,
            show_after: None,
        };
        let plan = plan(&request, &mut || {
            let mut fresh = self.fresh.lock();
            *fresh += 1;
            *fresh
        })?;
        fusion::log_undone(&plan.log);
        let compiled = CompiledPlan::new(plan.parts, &self.devices, &self.kernels, frame_ids, self.captures)?;
        Ok(TaskGraph { compiled, kernels: self.kernels.clone() })
    }
}

impl TaskGraph {
    /// Begins a step and returns. `on_end` is called once, on any thread, with the first error, if any. `step_id`
    /// must be the master's: it identifies the transfers of the step.
    pub fn start(
        &self,
        step_id: u64,
        transfers: Arc<dyn StepRendezvous>,
        kind: StepKind,
        on_end: Box<dyn FnOnce(Option<Error>) + Send>,
    ) -> TaskStep {
        // A segment waits for all of its inputs, so in a partial run it could block nodes that a later feed depends
        // on.
        let parts = match kind {
            StepKind::Whole => self.compiled.parts_to_run(),
            StepKind::Partial | StepKind::Traced => RunParts::Whole(&self.compiled.parts),
        };
        let step = Step::detached(step_id, &parts, transfers, kind == StepKind::Traced, on_end);
        step.start();
        TaskStep { step }
    }

    /// Counts a run; returns whether [`TaskGraph::split`] has work to do.
    pub fn count_run(&self) -> bool {
        self.compiled.count_run()
    }

    /// Splits the graph into segments that are captured, if that is due. This takes as long as compiling, so it must
    /// not run on a network thread. Steps that begin in the meantime run as before.
    pub fn split(&self) {
        self.compiled.split(&self.kernels);
    }

    /// What was captured of it so far.
    pub fn captures(&self) -> CaptureReport {
        self.compiled.report()
    }
}

impl TaskStep {
    /// Stops the step: waiting kernels are cancelled, no new node starts.
    pub fn fail(&self, reason: Error) {
        self.step.fail(reason);
    }

    /// The first error, if the step has failed.
    pub fn error(&self) -> Option<Error> {
        self.step.error()
    }

    /// Asks what the step does, and returns the number of devices asked. For each, `answer` is called once: on this thread,
    /// or soon on the one that runs nodes at this moment; or never, if the step ends first. It must only pass the view on.
    pub fn look(&self, answer: impl Fn(PartView) + Send + Sync + 'static) -> usize {
        self.step.look(answer)
    }

    /// The trace of each node, if requested.
    pub fn take_trace(&self) -> Vec<NodeTrace> {
        self.step.take_trace()
    }
}
