//! Plans that cannot be captured as a whole: their segments become nodes, which are captured and replayed one by one.
//!
//! A segment is a plan of its own. Its feeds are its inputs and its fetches are its outputs. In the split part it is
//! one node among the nodes that cannot be captured, which run as usual. The original plan is kept: traced runs and
//! partial runs use it, and so does every run if no segment is worth capturing.
//!
//! The split is a rewrite of the part ([`Rewriter::outline`](kolo_graph::Rewriter::outline)), checked as after a pass, but no pass
//! of the plan: which nodes can be captured is known only after the first runs, which may show that a node that looked
//! capturable is not. The list of passes has a line for it in the stage `compiled`.

use std::collections::HashMap;
use std::sync::Arc;

use kolo_core::{DeviceName, Error, Result, Tensor};
use kolo_graph::{Effects, Flow, Node, NodeId, Outlined, Partition, Work, rewrite_part};
use kolo_ops::{CancelToken, Value, fused, registry};
use parking_lot::Mutex;

use super::slot::{CaptureSlot, WARM_UP};
use crate::capture::limits::Limits;
use crate::capture::segments::{PartOf, Segments, segments};
use crate::compile::part::{Extras, KernelCache, Part, PartPlan, compile};
use crate::executor::frame_id::FrameIds;
use crate::executor::step::Step;

/// The maximum number of times that a plan is split again because a node could not be captured.
const MOST_SPLITS: u32 = 8;

/// What was captured of one plan.
#[derive(Clone, Debug, Default)]
pub struct CaptureReport {
    /// For each segment, in order: the number of launches that its replay replaces, or why it is not replayed. A plan
    /// that is captured as a whole has one entry; one that is not captured at all has none.
    pub segments: Vec<std::result::Result<usize, String>>,
    /// The nodes that prevent a capture of the whole plan.
    pub split_by: Vec<SplitNode>,
    /// Why nothing is captured, if nothing is.
    pub why_not: Option<String>,
}

/// A node that cannot be captured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SplitNode {
    /// Its name.
    pub node: String,
    /// Its op.
    pub op: &'static str,
    /// Why it cannot be captured.
    pub why: String,
}

/// A plan's split, made once it turns out to be needed.
pub(crate) struct Split {
    /// The parts of the plan, before they were compiled.
    partitions: Vec<Partition>,
    /// How instances of loops are numbered.
    frame_ids: FrameIds,
    progress: Mutex<SplitProgress>,
}

#[derive(Default)]
struct SplitProgress {
    n_runs: u32,
    n_splits: u32,
    /// A thread is splitting now, without holding the lock.
    is_splitting: bool,
    /// Nodes that were expected to be capturable but could not be captured, and why.
    refused: HashMap<String, String>,
    made: Option<std::result::Result<Made, String>>,
}

/// A plan that was split.
struct Made {
    parts: Arc<[Arc<PartPlan>]>,
    segments: Vec<Arc<Segment>>,
    split_by: Vec<SplitNode>,
}

/// A part of a plan that is captured on its own.
pub(crate) struct Segment {
    part: Arc<PartPlan>,
    slot: CaptureSlot,
    /// It is deferred until no other node is ready: it writes to variables, as updates do, or what other nodes compute is
    /// sent.
    pub is_late: bool,
    /// For each input, whether all of its readers need it on the GPU.
    pub on_gpu: Vec<bool>,
}

impl Split {
    /// For a plan that was compiled from these partitions; empty if nothing is to be captured.
    pub fn new(partitions: Vec<Partition>, frame_ids: FrameIds) -> Split {
        Split { partitions, frame_ids, progress: Mutex::default() }
    }

    /// The parts to run, if the plan was split. Never waits for a device or for a split in progress.
    pub fn parts(&self) -> Option<Arc<[Arc<PartPlan>]>> {
        match &self.progress.lock().made {
            Some(Ok(made)) => Some(made.parts.clone()),
            Some(Err(_)) | None => None,
        }
    }

    /// Counts a run; returns whether [`Split::split`] has work to do. `whole` is the capture of the original plan:
    /// nothing is split while that may still succeed.
    pub fn count_run(&self, whole: &CaptureSlot) -> bool {
        if self.partitions.is_empty() {
            return false;
        }
        let mut progress = self.progress.lock();
        if progress.made.is_none() && whole.why_off().is_some() {
            progress.n_runs = progress.n_runs.saturating_add(1);
        }
        progress.due(whole).is_some()
    }

    /// Splits the plan, or splits it again without a node that could not be captured, if that is due. This plans and
    /// compiles, so it takes a while. Runs continue with the current parts in the meantime.
    pub fn split(&self, parts: &[Arc<PartPlan>], whole: &CaptureSlot, kernels: &KernelCache) {
        let refused = {
            let mut progress = self.progress.lock();
            let Some(culprit) = progress.due(whole) else { return };
            progress.refused.extend(culprit);
            progress.n_splits += 1;
            progress.is_splitting = true;
            progress.refused.clone()
        };
        let made = make(&self.partitions, parts, self.frame_ids, &refused, kernels);
        let made = made.and_then(|made| match made.segments.is_empty() {
            true => Err(Error::unimplemented("no segment is worth it")),
            false => Ok(made),
        });
        match &made {
            Ok(made) => tracing::debug!(
                target: "kolo::capture",
                "split into {} segments by {}", made.segments.len(), names(&made.split_by)
            ),
            Err(why) => tracing::debug!(target: "kolo::capture", "not split: {why}"),
        }
        let mut progress = self.progress.lock();
        (progress.made, progress.is_splitting) = (Some(made.map_err(|error| error.to_string())), false);
    }

    /// What was captured, given the state of the whole plan's capture.
    pub fn report(&self, whole: &CaptureSlot) -> CaptureReport {
        let why_whole = match whole.describe() {
            Ok(n) => return CaptureReport { segments: vec![Ok(n)], ..CaptureReport::default() },
            Err(why) => why,
        };
        match &self.progress.lock().made {
            Some(Ok(made)) => CaptureReport {
                segments: made.segments.iter().map(|segment| segment.slot.describe()).collect(),
                split_by: made.split_by.clone(),
                why_not: None,
            },
            Some(Err(why)) => {
                CaptureReport { why_not: Some(format!("{why_whole}; {why}")), ..CaptureReport::default() }
            }
            None => CaptureReport { why_not: Some(why_whole), ..CaptureReport::default() },
        }
    }
}

impl SplitProgress {
    /// If a split is due: the node to leave out, if there is one, and why.
    fn due(&self, whole: &CaptureSlot) -> Option<Option<(String, String)>> {
        if self.is_splitting {
            return None;
        }
        match &self.made {
            Some(Err(_)) => None,
            Some(Ok(made)) => {
                let culprit = made.segments.iter().find_map(|segment| culprit(segment.slot.why_off()?))?;
                (self.n_splits < MOST_SPLITS && !self.refused.contains_key(&culprit.0)).then_some(Some(culprit))
            }
            None => whole.why_off().filter(|_| self.n_runs > WARM_UP).map(culprit),
        }
    }
}

/// The node that an error names, and the error.
fn culprit(error: &Error) -> Option<(String, String)> {
    error.node().map(|context| (context.node.clone(), error.message().to_owned()))
}

fn names(split_by: &[SplitNode]) -> String {
    const SHOWN: usize = 8;
    let mut list: Vec<String> =
        split_by.iter().take(SHOWN).map(|node| format!("{} '{}' ({})", node.op, node.node, node.why)).collect();
    if split_by.len() > SHOWN {
        list.push(format!("{} more", split_by.len() - SHOWN));
    }
    list.join(", ")
}

fn make(
    partitions: &[Partition],
    parts: &[Arc<PartPlan>],
    frame_ids: FrameIds,
    refused: &HashMap<String, String>,
    kernels: &KernelCache,
) -> Result<Made> {
    let gpu = |plan: &Arc<PartPlan>| plan.unit.device.recorder().is_some();
    let gpus: Vec<Option<DeviceName>> =
        parts.iter().map(|plan| gpu(plan).then(|| plan.unit.device.attributes().name.clone())).collect();
    make_for(partitions, parts, &gpus, frame_ids, refused, kernels)
}

/// Splits the parts that are on GPUs.
fn make_for(
    partitions: &[Partition],
    parts: &[Arc<PartPlan>],
    gpus: &[Option<DeviceName>],
    frame_ids: FrameIds,
    refused: &HashMap<String, String>,
    kernels: &KernelCache,
) -> Result<Made> {
    let mut made = Made { parts: Arc::new([]), segments: Vec::new(), split_by: Vec::new() };
    let all: Vec<PartOf<'_>> = partitions
        .iter()
        .zip(parts)
        .zip(gpus)
        .map(|((part, plan), gpu)| PartOf { part, plan, gpu: gpu.as_ref() })
        .collect();
    let found = segments(&all, refused)?.ok_or_else(|| Error::internal("its parts wait for each other"))?;
    let mut split_parts = Vec::with_capacity(parts.len());
    for ((of, plan), found) in all.iter().zip(parts).zip(&found) {
        match of.gpu {
            Some(_) => split_parts.push(split_part(of.part, plan, found, (frame_ids, kernels), &mut made)?),
            None => {
                let is_work = |node: &&Arc<Node>| node.def.flow != Flow::Transfer && node.def.work != Work::Constant;
                made.split_by.extend(of.part.nodes.iter().map(|(_, node)| node).filter(is_work).map(|node| {
                    SplitNode {
                        node: node.name.to_string(),
                        op: node.def.name,
                        why: format!("it is on {}", plan.unit.name),
                    }
                }));
                split_parts.push(plan.clone());
            }
        }
    }
    made.parts = split_parts.into();
    Ok(made)
}

/// A part in which each segment is one node.
fn split_part(
    partition: &Partition,
    plan: &Arc<PartPlan>,
    found: &Segments,
    (frame_ids, kernels): (FrameIds, &KernelCache),
    made: &mut Made,
) -> Result<Arc<PartPlan>> {
    let nodes = &partition.nodes;
    for (i, why) in found.apart.iter().enumerate() {
        if let Some(why) = why {
            let node = nodes.node(NodeId(i as u32));
            made.split_by.push(SplitNode { node: node.name.to_string(), op: node.def.name, why: why.clone() });
        }
    }
    if found.list.is_empty() {
        return Ok(plan.clone());
    }
    let constants: HashMap<Arc<str>, Tensor> =
        plan.constant_names.iter().cloned().zip(plan.constants.iter().cloned()).collect();
    let (outer, bodies) = outline(partition, found)?;
    let mut at = HashMap::new();
    for (number, (name, body)) in bodies.into_iter().enumerate() {
        let part = Part {
            nodes: &body.nodes,
            fed: fed(&body.feeds),
            fetches: body.fetches,
            frame_ids: FrameIds::default(),
            extras: Extras { constants: constants.clone(), ..Extras::default() },
        };
        let part = Arc::new(compile(&part, &plan.unit, kernels)?);
        let reads = |feed: usize| part.feeds.iter().filter(move |plan| plan.feed as usize == feed);
        let segment = Arc::new(Segment {
            slot: CaptureSlot::for_segment(number as u32),
            is_late: !found.gives_way_to[number].is_empty()
                || part.nodes.iter().any(|node| node.node.def.effects == Effects::Writes),
            on_gpu: (0..body.feeds.len()).map(|feed| reads(feed).all(|plan| plan.on_device)).collect(),
            part,
        });
        let id = outer.nodes.find(&name).ok_or_else(|| Error::internal(format!("'{name}' is missing")))?;
        at.insert(id, segment.clone());
        made.segments.push(segment);
    }
    let part = Part {
        nodes: &outer.nodes,
        fed: fed(&outer.feeds),
        fetches: outer.fetches,
        frame_ids,
        extras: Extras { constants, segments: at },
    };
    Ok(Arc::new(compile(&part, &plan.unit, kernels)?))
}

/// The nodes of a segment, with the name of the node in their place.
type SegmentBody = (Arc<str>, Outlined);

/// The part with one node for each segment, and the segments.
fn outline(partition: &Partition, found: &Segments) -> Result<(Partition, Vec<SegmentBody>)> {
    let is_free = |id: NodeId| found.free.get(id.index()).copied().unwrap_or(false);
    let mut fresh = 0;
    let mut fresh = || {
        fresh += 1;
        fresh
    };
    rewrite_part(partition, registry(), &mut fresh, |graph| {
        let mut bodies = Vec::with_capacity(found.list.len());
        let mut segment_of: HashMap<NodeId, NodeId> = HashMap::new();
        for (number, members) in found.list.iter().enumerate() {
            let region: Vec<NodeId> = members.iter().map(|&i| NodeId(i as u32)).collect();
            let first = region.first().map_or("nothing", |id| &*partition.nodes.node(*id).name);
            let name = format!("segment {number}, from {first}");
            let body = graph.outline(&region, &is_free, &fused::SEGMENT.def, &name)?;
            segment_of.extend(region.iter().map(|id| (*id, body.node)));
            let place = |&i: &usize| segment_of.get(&NodeId(i as u32)).copied().unwrap_or(NodeId(i as u32));
            let mut earlier: Vec<NodeId> = found.gives_way_to[number].iter().map(place).collect();
            earlier.dedup();
            earlier.into_iter().for_each(|before| graph.order_after(body.node, before));
            let name = graph.node(body.node).map_or_else(|| name.into(), |node| node.name.clone());
            bodies.push((name, body));
        }
        // Free nodes that only segments used are in these now.
        graph.remove_dead();
        Ok(bodies)
    })
}

/// Inputs that are fed, with the number of the feed.
fn fed(feeds: &[(usize, Vec<(NodeId, usize)>)]) -> HashMap<(NodeId, usize), usize> {
    feeds.iter().flat_map(|(feed, inputs)| inputs.iter().map(move |input| (*input, *feed))).collect()
}

impl Segment {
    /// Runs the segment as a node: as a replay, or node by node.
    pub fn run(&self, step_id: u64, limits: &Limits, inputs: &mut [Value], outputs: &mut [Value]) -> Result<()> {
        let mut feeds: Vec<Option<Tensor>> = Vec::with_capacity(inputs.len());
        for input in inputs {
            match input.take() {
                Value::Tensor(tensor) => feeds.push(Some(tensor)),
                Value::Empty | Value::Reference(_) => return Err(Error::internal("a segment takes values")),
            }
        }
        let new_step = || Step::new(step_id, std::slice::from_ref(&self.part), CancelToken::new(), false, false);
        let fetched = match self.slot.run(&self.part, &mut feeds, &new_step, limits)? {
            Some(fetched) => fetched,
            None => {
                let step = new_step();
                let values: Vec<(usize, &Tensor)> =
                    feeds.iter().enumerate().filter_map(|(i, value)| Some((i, value.as_ref()?))).collect();
                step.feed(&values, false);
                // Updates write in place if nobody else holds the old value.
                drop(feeds);
                limits.run(&step);
                step.take_fetched()?
            }
        };
        for (number, value) in fetched {
            let output = outputs.get_mut(number).ok_or_else(|| Error::internal("a segment gave too much"))?;
            *output = Value::Tensor(value);
        }
        match outputs.iter().position(Value::is_empty) {
            Some(i) => Err(Error::internal(format!("output {i} of a segment was not set"))),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
