//! The compiled parts of one plan, and their captures. Local sessions and tasks of clusters use the same code.

pub(crate) mod part;

use std::sync::Arc;

use kolo_core::Result;
use kolo_graph::{Partition, Pass, Stage};

use crate::capture::slot::CaptureSlot;
use crate::capture::split::{CaptureReport, Split};
use crate::compile::part::{Extras, KernelCache, Part, PartPlan, compile};
use crate::devices::Devices;
use crate::executor::frame_id::FrameIds;

/// A plan that is ready to run.
pub(crate) struct CompiledPlan {
    pub parts: Vec<Arc<PartPlan>>,
    /// The capture of the whole plan, if it is one part on one device.
    pub capture: CaptureSlot,
    /// The captures of its segments, otherwise.
    pub split: Split,
    /// Whether any of it may be captured: it has a part on a device that can record.
    pub may_capture: bool,
}

/// Which steps of a plan may be captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Captures {
    /// None.
    Off,
    /// The whole plan, or its segments: it depends on no other task.
    Whole,
    /// Segments between sends to other tasks and receives from them.
    Segments,
}

/// The passes that run on compiled parts, for listings.
pub(crate) fn passes() -> [Pass; 2] {
    [
        Pass::noted(
            "low-priority-updates",
            Stage::Compiled,
            "updates of variables wait for their readers, which then need no copy",
        ),
        Pass::noted(
            "capture-segments",
            Stage::Compiled,
            "what runs the same kernels on the same memory each time is replayed as one launch",
        ),
    ]
}

impl CompiledPlan {
    pub fn new(
        partitions: Vec<Partition>,
        devices: &Devices,
        kernels: &KernelCache,
        frame_ids: FrameIds,
        captures: Captures,
    ) -> Result<CompiledPlan> {
        let mut parts = Vec::with_capacity(partitions.len());
        for partition in &partitions {
            let fed = partition.feeds.iter().flat_map(|(feed, inputs)| inputs.iter().map(move |input| (*input, *feed)));
            let part = Part {
                nodes: &partition.nodes,
                fed: fed.collect(),
                fetches: partition.fetches.clone(),
                frame_ids,
                extras: Extras::default(),
            };
            parts.push(Arc::new(compile(&part, &devices.units[partition.device], kernels)?));
        }
        let records = |part: &Arc<PartPlan>| part.unit.device.recorder().is_some();
        let may_capture = captures != Captures::Off && parts.iter().any(records);
        let capture = match captures {
            Captures::Whole => CaptureSlot::new(&parts),
            Captures::Segments => CaptureSlot::off("it sends to other tasks or to its client"),
            Captures::Off => CaptureSlot::off("it is switched off"),
        };
        let split = Split::new(if may_capture { partitions } else { Vec::new() }, frame_ids);
        Ok(CompiledPlan { parts, capture, split, may_capture })
    }

    /// Counts a run; returns whether [`CompiledPlan::split`] has work to do.
    pub fn count_run(&self) -> bool {
        self.may_capture && self.split.count_run(&self.capture)
    }

    /// Splits the plan into segments, if that is due. This takes a while, and must not run on a network thread.
    pub fn split(&self, kernels: &KernelCache) {
        self.split.split(&self.parts, &self.capture, kernels);
    }

    /// The parts to run now: split ones if segments of them are captured.
    pub fn parts_to_run(&self) -> RunParts<'_> {
        match self.split.parts() {
            Some(split) => RunParts::Split(split),
            None => RunParts::Whole(&self.parts),
        }
    }

    /// What was captured.
    pub fn report(&self) -> CaptureReport {
        self.split.report(&self.capture)
    }
}

/// The parts that a step runs.
pub(crate) enum RunParts<'a> {
    /// As they were compiled.
    Whole(&'a [Arc<PartPlan>]),
    /// With segments.
    Split(Arc<[Arc<PartPlan>]>),
}

impl std::ops::Deref for RunParts<'_> {
    type Target = [Arc<PartPlan>];

    fn deref(&self) -> &[Arc<PartPlan>] {
        match self {
            RunParts::Whole(parts) => parts,
            RunParts::Split(parts) => parts,
        }
    }
}
