//! Plans that cannot be captured as a whole: their segments become nodes, which are captured and replayed one by one.
//!
//! A segment is a plan of its own. Its feeds are its inputs and its fetches are its outputs. In the split part it is
//! one node among the nodes that cannot be captured, which run as usual. The original plan is kept: traced runs and
//! partial runs use it, and so does every run if no segment is worth capturing.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use kolo_core::{DeviceName, DeviceSpec, Error, Result, Tensor};
use kolo_graph::{Attrs, Effects, Endpoint, Flow, Node, NodeId, Nodes, OutputInfo, Partition, Work, topological_order};
use kolo_ops::{CancelToken, Value, fused};
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
    /// It writes to variables, so it is deferred until no other node is ready, as updates are.
    pub is_late: bool,
    /// For each input, whether all of its readers need it on the GPU.
    pub on_card: Vec<bool>,
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
                        op: node.op(),
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
            made.split_by.push(SplitNode { node: node.name.to_string(), op: node.op(), why: why.clone() });
        }
    }
    if found.list.is_empty() {
        return Ok(plan.clone());
    }
    let constants: HashMap<Arc<str>, Tensor> =
        plan.constant_names.iter().cloned().zip(plan.constants.iter().cloned()).collect();
    let mut cutter = Cutter {
        partition,
        found,
        segment_of: vec![None; nodes.len()],
        outputs: found.list.iter().map(|_| Vec::new()).collect(),
    };
    for (segment, members) in found.list.iter().enumerate() {
        members.iter().for_each(|&i| cutter.segment_of[i] = Some(segment));
    }
    cutter.find_outputs();
    let (mut segments, mut places) = (Vec::new(), Vec::new());
    for (number, members) in found.list.iter().enumerate() {
        let inner = cutter.inner(number, members);
        let part = Part {
            nodes: &inner.nodes,
            fed: inner.fed,
            fetches: inner.fetches,
            frame_ids: FrameIds::default(),
            extras: Extras { constants: constants.clone(), ..Extras::default() },
        };
        let part = Arc::new(compile(&part, &plan.unit, kernels)?);
        let reads = |feed: usize| part.feeds.iter().filter(move |plan| plan.feed as usize == feed);
        let segment = Arc::new(Segment {
            slot: CaptureSlot::for_segment(number as u32),
            is_late: part.nodes.iter().any(|node| node.node.def.effects == Effects::Writes),
            on_card: (0..inner.inputs.len()).map(|feed| reads(feed).all(|plan| plan.on_device)).collect(),
            part,
        });
        places.push((inner.inputs, inner.waits));
        segments.push(segment);
    }
    let outer = cutter.outer(&places)?;
    let at = outer.segments.iter().copied().zip(segments.iter().cloned()).collect();
    let part = Part {
        nodes: &outer.nodes,
        fed: outer.fed,
        fetches: outer.fetches,
        frame_ids,
        extras: Extras { constants, segments: at },
    };
    made.segments.extend(segments);
    Ok(Arc::new(compile(&part, &plan.unit, kernels)?))
}

/// Divides a part into the nodes inside of segments and those outside.
struct Cutter<'a> {
    partition: &'a Partition,
    found: &'a Segments,
    segment_of: Vec<Option<usize>>,
    /// For each segment, the outputs that are used outside of it.
    outputs: Vec<Vec<Endpoint>>,
}

/// The nodes of one segment.
struct Inner {
    nodes: Nodes,
    fed: HashMap<(NodeId, usize), usize>,
    fetches: Vec<(usize, Endpoint)>,
    /// Its inputs from outside, by number of the feed.
    inputs: Vec<Endpoint>,
    /// Its control inputs from outside.
    waits: HashSet<NodeId>,
}

/// The nodes outside of segments.
struct Outer {
    nodes: Nodes,
    fed: HashMap<(NodeId, usize), usize>,
    fetches: Vec<(usize, Endpoint)>,
    /// The nodes that represent segments.
    segments: Vec<NodeId>,
}

impl Cutter<'_> {
    fn find_outputs(&mut self) {
        let nodes = &self.partition.nodes;
        let mut wanted: HashSet<Endpoint> = self.partition.fetches.iter().map(|(_, at)| *at).collect();
        for (id, node) in nodes.iter() {
            for at in node.inputs.iter().filter(|at| at.feed().is_none()) {
                if self.segment_of[at.node.index()] != self.segment_of[id.index()] {
                    wanted.insert(*at);
                }
            }
        }
        for at in wanted {
            if let Some(segment) = self.segment_of[at.node.index()] {
                self.outputs[segment].push(at);
            }
        }
        self.outputs.iter_mut().for_each(|list| list.sort_unstable());
    }

    /// Adds a free node, and the nodes it depends on, to a segment.
    fn add_free(&self, id: NodeId, nodes: &mut Nodes, renamed: &mut HashMap<NodeId, NodeId>) -> NodeId {
        if let Some(&known) = renamed.get(&id) {
            return known;
        }
        let mut node = Node::clone(self.partition.nodes.node(id));
        node.inputs.iter_mut().for_each(|at| at.node = self.add_free(at.node, nodes, renamed));
        let new = nodes.push(node);
        renamed.insert(id, new);
        new
    }

    fn inner(&self, number: usize, members: &[usize]) -> Inner {
        let mut inner = Inner {
            nodes: Nodes::default(),
            fed: HashMap::new(),
            fetches: Vec::new(),
            inputs: Vec::new(),
            waits: HashSet::new(),
        };
        let mut renamed: HashMap<NodeId, NodeId> = HashMap::new();
        for &i in members {
            let mut node = Node::clone(self.partition.nodes.node(NodeId(i as u32)));
            let mut fed = Vec::new();
            for (input, at) in node.inputs.iter_mut().enumerate() {
                let is_inside = at.feed().is_none() && self.segment_of[at.node.index()] == Some(number);
                if is_inside {
                    at.node = renamed.get(&at.node).copied().unwrap_or(at.node);
                } else if at.feed().is_none() && self.found.free[at.node.index()] {
                    at.node = self.add_free(at.node, &mut inner.nodes, &mut renamed);
                } else {
                    let feed = inner.inputs.iter().position(|known| known == at).unwrap_or_else(|| {
                        inner.inputs.push(*at);
                        inner.inputs.len() - 1
                    });
                    fed.push((input, feed));
                    *at = Endpoint::from_feed(feed as u32);
                }
            }
            let mut waits = Vec::new();
            for before in &node.control_inputs {
                match renamed.get(before) {
                    Some(inside) if self.segment_of[before.index()] == Some(number) => waits.push(*inside),
                    _ if self.found.free[before.index()] => {}
                    _ => {
                        inner.waits.insert(*before);
                    }
                }
            }
            node.control_inputs = waits;
            let new = inner.nodes.push(node);
            renamed.insert(NodeId(i as u32), new);
            inner.fed.extend(fed.into_iter().map(|(input, feed)| ((new, input), feed)));
        }
        let place = |at: &Endpoint| Endpoint { node: renamed.get(&at.node).copied().unwrap_or(at.node), ..*at };
        inner.fetches = self.outputs[number].iter().map(place).enumerate().collect();
        inner
    }

    /// The nodes outside, with one node for each segment, whose inputs are in `places`.
    fn outer(&self, places: &[(Vec<Endpoint>, HashSet<NodeId>)]) -> Result<Outer> {
        let (nodes, found) = (&self.partition.nodes, self.found);
        let n = nodes.len();
        // Numbers for the sort below: nodes by their number, then segments.
        let item = |id: NodeId| self.segment_of[id.index()].map_or(id.index(), |segment| n + segment);
        let is_forward = |at: &&Endpoint| at.feed().is_none() && nodes.node(at.node).def.flow != Flow::NextIteration;
        let mut before: Vec<Vec<usize>> = vec![Vec::new(); n + places.len()];
        let mut is_used = vec![false; n];
        self.partition.fetches.iter().for_each(|(_, at)| is_used[at.node.index()] = true);
        for &i in found.order.iter().rev().filter(|&&i| self.segment_of[i].is_none()) {
            let node = nodes.node(NodeId(i as u32));
            is_used[i] |= !found.free[i];
            if is_used[i] {
                before[i].extend(node.inputs.iter().filter(is_forward).map(|at| item(at.node)));
                before[i].extend(node.control_inputs.iter().map(|id| item(*id)));
                let data = node.inputs.iter().filter(|at| at.feed().is_none()).map(|at| at.node);
                data.chain(node.control_inputs.iter().copied()).for_each(|id| is_used[id.index()] = true);
            }
        }
        for (segment, (inputs, waits)) in places.iter().enumerate() {
            before[n + segment].extend(inputs.iter().filter(is_forward).map(|at| item(at.node)));
            before[n + segment].extend(waits.iter().map(|id| item(*id)));
        }
        let order = topological_order(&before).map_err(|_| Error::internal("segments wait for each other"))?;
        let is_kept = |&i: &usize| i >= n || (self.segment_of[i].is_none() && is_used[i]);
        let mut renamed: Vec<Option<NodeId>> = vec![None; n + places.len()];
        for (new, i) in order.iter().copied().filter(is_kept).enumerate() {
            renamed[i] = Some(NodeId(new as u32));
        }
        let missing = || Error::internal("a node that is needed is in no segment and not outside");
        let name = |id: NodeId| renamed[item(id)].ok_or_else(missing);
        let place = |at: Endpoint| -> Result<Endpoint> {
            let Some(segment) = self.segment_of[at.node.index()] else {
                return Ok(Endpoint { node: name(at.node)?, ..at });
            };
            let index = self.outputs[segment].iter().position(|output| *output == at).ok_or_else(missing)?;
            Ok(Endpoint { node: name(at.node)?, index: index as u32 })
        };
        let mut outer = Outer {
            nodes: Nodes::default(),
            fed: HashMap::new(),
            fetches: Vec::new(),
            segments: (0..places.len()).filter_map(|segment| renamed[n + segment]).collect(),
        };
        for i in order.iter().copied().filter(is_kept) {
            let mut node = match i.checked_sub(n) {
                None => Node::clone(nodes.node(NodeId(i as u32))),
                Some(segment) => self.stand_in(segment, &places[segment]),
            };
            let id = NodeId(outer.nodes.len() as u32);
            for (input, at) in node.inputs.iter_mut().enumerate() {
                match at.feed() {
                    Some(feed) => {
                        outer.fed.insert((id, input), feed);
                    }
                    None => *at = place(*at)?,
                }
            }
            let mut waits = node.control_inputs.iter().map(|id| name(*id)).collect::<Result<Vec<NodeId>>>()?;
            waits.sort_unstable();
            waits.dedup();
            waits.retain(|before| *before != id);
            node.control_inputs = waits;
            outer.nodes.push(node);
        }
        for (fetch, at) in &self.partition.fetches {
            outer.fetches.push((*fetch, place(*at)?));
        }
        Ok(outer)
    }

    /// The node that represents a segment; its inputs have their old names.
    fn stand_in(&self, segment: usize, (inputs, waits): &(Vec<Endpoint>, HashSet<NodeId>)) -> Node {
        let nodes = &self.partition.nodes;
        let outputs: Vec<OutputInfo> = self.outputs[segment].iter().map(|at| nodes.output(*at).clone()).collect();
        let mut control_inputs: Vec<NodeId> = waits.iter().copied().collect();
        control_inputs.sort_unstable();
        let first = self.found.list[segment].first().map(|&i| nodes.node(NodeId(i as u32)));
        Node {
            name: format!("segment {segment}, from {}", first.map_or("nothing", |node| &*node.name)).into(),
            def: fused::SEGMENT.def,
            ref_inputs: vec![false; inputs.len()],
            inputs: inputs.clone(),
            control_inputs,
            attrs: Attrs::default(),
            device: first.map_or_else(DeviceSpec::default, |node| node.device.clone()),
            outputs,
            source: None,
            device_source: None,
        }
    }
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
