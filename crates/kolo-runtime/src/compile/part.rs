//! One device's share of a signature, compiled: kernels chosen, edges in flat arrays, constants stored at their
//! consumers.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kolo_core::{DType, Error, Result, Tensor};
use kolo_device::Device;
use kolo_graph::{Effects, Endpoint, Flow, FrameId, Frames, Node, NodeId, Nodes, OutputInfo, Work, frames};
use kolo_ops::{
    AsyncKernel, Cost, Kernel, KernelCtx, KernelInit, KernelMaker, ResourceStore, find_kernel, find_op, fused,
    host_arguments,
};
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::capture::split::Segment;
use crate::executor::frame_id::FrameIds;
use crate::executor::inter_pool::InterPool;
use crate::executor::step::Desk;

/// A device as the session sees it: where to run, on which threads, with which state.
pub(crate) struct DeviceUnit {
    pub device: Arc<dyn Device>,
    pub name: Arc<str>,
    pub pool: Arc<InterPool>,
    pub resources: Arc<ResourceStore>,
}

/// A part before compilation.
pub(crate) struct Part<'a> {
    /// Its nodes, numbered from 0.
    pub nodes: &'a Nodes,
    /// Inputs that are fed: `(node, input)` to the number of the feed.
    pub fed: HashMap<(NodeId, usize), usize>,
    /// Outputs that are fetched, by number of the fetch.
    pub fetches: Vec<(usize, Endpoint)>,
    /// How instances of loops are numbered.
    pub frame_ids: FrameIds,
    /// What an earlier plan of the same nodes has produced.
    pub extras: Extras,
}

/// What the parts of a split plan take from the plan that was split.
#[derive(Default)]
pub(crate) struct Extras {
    /// Nodes that stand for segments.
    pub segments: HashMap<NodeId, Arc<Segment>>,
    /// Constants in their final memory, by node.
    pub constants: HashMap<Arc<str>, Tensor>,
}

/// A part after compilation. Immutable, shared by all steps.
pub(crate) struct PartPlan {
    pub unit: Arc<DeviceUnit>,
    pub nodes: Vec<NodePlan>,
    pub edges: Vec<Edge>,
    pub frames: Vec<FramePlan>,
    /// Nodes that are ready when the step begins.
    pub roots: Vec<u32>,
    /// Constants, without duplicates.
    pub constants: Vec<Tensor>,
    /// The nodes of the constants.
    pub constant_names: Vec<Arc<str>>,
    /// The fetches of the outputs; see [`OutputPlan::fetches`].
    pub fetches: Vec<u32>,
    /// Constants that are fetched.
    pub fetched_constants: Vec<(u32, Tensor)>,
    /// For each feed, by number, the edges that it is sent along.
    pub feeds: Vec<FeedPlan>,
    /// How instances of loops are numbered.
    pub frame_ids: FrameIds,
    /// States of finished steps, for reuse.
    pub spare: Mutex<Vec<Desk>>,
}

/// Where a feed goes in one part.
pub(crate) struct FeedPlan {
    /// Its number.
    pub feed: u32,
    /// The edges that it is sent along.
    pub edges: Range<u32>,
    /// The inputs at the ends of these edges are in the device's own memory, not in host memory.
    pub on_device: bool,
}

/// One frame's layout.
#[derive(Default)]
pub(crate) struct FramePlan {
    pub parallel_iterations: usize,
    pub n_enters: u32,
    /// The initial pending count of each of its nodes; see [`part_state`](crate::executor::part_state) for the encoding.
    pub pending: Vec<u32>,
    pub n_slots: u32,
    pub name: String,
}

/// Whether a node's kernel was short when it last ran. Its inputs do not tell: a few numbers say how much a `Fill` writes.
/// A thread that others wait for, such as a network thread, runs only kernels that were short.
#[derive(Debug, Default)]
pub(crate) struct Pace(AtomicBool);

impl Pace {
    /// What a network thread may spend on one node.
    const SHORT: Duration = Duration::from_millis(1);

    /// False if it has not run yet.
    pub fn is_short(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    pub fn record(&self, took: Duration) {
        self.0.store(took < Pace::SHORT, Ordering::Relaxed);
    }
}

/// One node, laid out.
pub(crate) struct NodePlan {
    pub node: Arc<Node>,
    pub kernel: PlanKernel,
    pub cost: Cost,
    pub pace: Pace,
    /// It writes to nothing but its outputs, so it may be stopped in the middle.
    pub is_stoppable: bool,
    pub flow: Flow,
    /// For `Enter`: the frame it leads into.
    pub enters: u32,
    /// Its index among its frame's nodes.
    pub local: u32,
    /// The index of its first input among its frame's slots.
    pub first_slot: u32,
    pub n_inputs: u32,
    /// For each output, its edges and the fetches that return it.
    pub outputs: SmallVec<[OutputPlan; 2]>,
    /// The edges of its control output.
    pub control: Range<u32>,
    /// For `Merge`: how many dead inputs make it dead, in iteration 0 and in later ones.
    pub dead_needed: (u32, u32),
    /// For `Enter`: a loop invariant.
    pub is_constant: bool,
    /// Passes a reference on as if it were a value; see [`lenders`].
    pub lends: bool,
    /// Passes on a reference that may never be read; see [`deferrers`].
    pub defers: bool,
    /// References may arrive at its inputs.
    pub has_references: bool,
    /// So cheap, if its inputs are as small as its outputs, that it runs while the part's lock is held: a pure
    /// function of its inputs, whose outputs are known to be tiny.
    pub is_tiny: bool,
    /// All inputs are known to be tiny values.
    pub has_tiny_inputs: bool,
    /// For a tiny node, a bit mask of the inputs that are constants.
    pub constant_inputs: u32,
    /// It runs on the host though it is placed on a device with memory of its own: its tensors are all in host memory.
    pub on_host: bool,
    /// It writes to a variable, and either one thread runs all nodes of its device, or it was fused with a product
    /// that becomes ready at the same time as readers of the variable. It is deferred until no other node is ready:
    /// then the readers of the old value are done, and the update need not copy it first.
    pub is_late: bool,
    /// On a GPU: it depends on nothing but its inputs, and its outputs are not known to be large. In a capture such a
    /// node is computed once if its inputs are the same in all replays.
    pub may_fold: bool,
    /// The slot of its one output, if that has no other consumer and is not fetched; otherwise [`NO_SLOT`]. A tiny
    /// node writes its output directly to this slot.
    pub only_slot: u32,
    /// Inputs that are constants, as indices into [`PartPlan::constants`]. They are filled in when the node runs.
    pub constants: SmallVec<[(u32, u32); 2]>,
}

#[derive(Clone, Debug)]
pub(crate) struct OutputPlan {
    pub edges: Range<u32>,
    pub fetches: Range<u32>,
    /// The node's declared dtype; a copy, so that a run need not access the node.
    pub dtype: DType,
}

/// The maximum number of iterations of a loop in flight, whatever the graph allows: each takes memory, which a loop that
/// runs ahead of a slow value would take without end.
const MOST_ITERATIONS: usize = 1024;

/// The maximum number of elements of a tiny node's output.
const TINY: usize = 16;
/// The maximum number of elements of an output that is computed once per capture and then kept.
const MOST_FOLDED: usize = 1 << 20;
/// The maximum number of inputs of a tiny node: the bits of [`NodePlan::constant_inputs`].
const TINY_INPUTS: usize = 32;

/// The destination of a value: a slot of a node, or, if the slot is [`CONTROL`], only its pending count.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Edge {
    pub node: u32,
    pub slot: u32,
    /// The node's index among its frame's nodes; a copy, so that an arrival need not access the node.
    pub local: u32,
    pub end: End,
}

/// The kind of node at the end of an edge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// A node with a plain pending count that is never worth a thread of its own.
    Small,
    /// A node with a plain pending count.
    Plain,
    /// A `Merge`, which counts in a different way.
    Merge,
}

impl Edge {
    fn new(id: NodeId, node: &NodePlan, slot: u32) -> Edge {
        let end = match node.flow {
            Flow::Merge => End::Merge,
            Flow::ControlTrigger => End::Plain,
            _ if (node.cost == Cost::Inline || node.has_tiny_inputs) && !node.is_late => End::Small,
            _ => End::Plain,
        };
        Edge { node: id.0, slot, local: node.local, end }
    }
}

pub(crate) const CONTROL: u32 = u32::MAX;
/// See [`NodePlan::only_slot`].
pub(crate) const NO_SLOT: u32 = u32::MAX;

/// How a node is computed.
#[derive(Clone)]
pub(crate) enum PlanKernel {
    Function(fn(&mut KernelCtx<'_>) -> Result<()>),
    Object(Arc<dyn Kernel>),
    Async(Arc<dyn AsyncKernel>),
    /// Control flow: computed while outputs are propagated.
    Flow,
    /// An `Identity` of a reference. In TensorFlow its output shares the variable's memory, so a consumer sees the
    /// value at the time of its own run, and programs (`SyncReplicasOptimizer` among them) rely on that. Here the
    /// reference itself is passed on, and read when its consumer starts.
    Lend,
    /// On a null device: recorded, not computed.
    Null,
    /// Many nodes, captured together if possible.
    Segment(Arc<Segment>),
}

/// Kernels that keep state, one per device and node name, shared by all plans of a session.
#[derive(Default)]
pub(crate) struct KernelCache {
    kernels: Mutex<HashMap<KernelKey, PlanKernel>>,
}

/// Device and node.
type KernelKey = (Arc<str>, Arc<str>);

impl KernelCache {
    fn kernel(&self, node: &Arc<Node>, unit: &DeviceUnit) -> Result<PlanKernel> {
        if unit.device.as_null().is_some() && node.def.flow == Flow::Plain {
            return Ok(PlanKernel::Null);
        }
        let name = &unit.device.attributes().name;
        let init = KernelInit { node, device: name, resources: &unit.resources };
        // Transfers and control flow of a null device run on the host.
        let make = match unit.device.as_null() {
            Some(_) => find_kernel(node, &kolo_core::DeviceName { kind: "CPU".into(), ..name.clone() })?,
            None => find_kernel(node, name)?,
        };
        let build = || -> Result<PlanKernel> {
            Ok(match make.make {
                KernelMaker::Function(compute) => PlanKernel::Function(compute),
                KernelMaker::Object(make) => PlanKernel::Object(make(&init)?.into()),
                KernelMaker::Async(make) => PlanKernel::Async(make(&init)?.into()),
                KernelMaker::Executor => PlanKernel::Flow,
            })
        };
        let place = |error: Error| error.with_node(&node.name, node.op(), &unit.name);
        if !node.def.stateful || node.def.flow == Flow::Transfer {
            return build().map_err(place);
        }
        let key = (unit.name.clone(), node.name.clone());
        if let Some(kernel) = self.kernels.lock().get(&key) {
            return Ok(kernel.clone());
        }
        let kernel = build().map_err(place)?;
        Ok(self.kernels.lock().entry(key).or_insert(kernel).clone())
    }
}

/// Compiles a part.
pub(crate) fn compile(part: &Part<'_>, unit: &Arc<DeviceUnit>, cache: &KernelCache) -> Result<PartPlan> {
    let nodes = part.nodes;
    let loops = loops_of(nodes)?;
    let n = nodes.len();

    // Constants that depend on nothing are not nodes: they are filled in when their consumers run. A `Merge` counts
    // arrivals, so a constant that feeds a `Merge` remains a node.
    let mut in_place: Vec<Option<Tensor>> = vec![None; n];
    let own_memory = !unit.device.memory().is_host();
    let kernel_of = |node: &Arc<Node>| find_kernel(node, &unit.device.attributes().name);
    for (id, node) in nodes.iter() {
        if node.def.work == Work::Constant && node.control_inputs.is_empty() && unit.device.as_null().is_none() {
            let value = node.attrs.tensor("value")?.clone();
            let stays = !own_memory || kernel_of(node)?.device == "CPU";
            in_place[id.index()] = Some(match part.extras.constants.get(&node.name) {
                Some(placed) => placed.clone(),
                None if stays => value,
                None => unit.device.copy(&value, unit.device.memory())?.0,
            });
        }
    }
    for (_, node) in nodes.iter().filter(|(_, node)| node.def.flow == Flow::Merge) {
        node.inputs.iter().filter(|at| at.node.index() < n).for_each(|at| in_place[at.node.index()] = None);
    }

    let mut constant_numbers = vec![0u32; n];
    let (mut constant_values, mut constant_names) = (Vec::new(), Vec::new());
    for (i, value) in in_place.iter().enumerate() {
        if let Some(value) = value {
            constant_numbers[i] = constant_values.len() as u32;
            constant_values.push(value.clone());
            constant_names.push(nodes.node(NodeId(i as u32)).name.clone());
        }
    }

    // Frame 0 is outside of all loops.
    let frame_number = |frame: Option<FrameId>| frame.map_or(0, |frame| frame.0 + 1);
    let outside = FramePlan { parallel_iterations: 1, ..FramePlan::default() };
    let mut frame_plans = vec![outside];
    frame_plans.extend(loops.iter().map(|(_, frame)| FramePlan {
        parallel_iterations: usize::try_from(frame.parallel_iterations).unwrap_or(1).clamp(1, MOST_ITERATIONS),
        n_enters: frame.enters.len() as u32,
        name: frame.name.to_string(),
        ..FramePlan::default()
    }));
    let lends = lenders(part);
    let defers = deferrers(part, &lends);
    let mut plans: Vec<NodePlan> = Vec::with_capacity(n);
    let mut roots = Vec::new();
    for (id, node) in nodes.iter() {
        let frame = frame_number(loops.input_frame(nodes, id));
        let frame_plan = &mut frame_plans[frame as usize];
        let (local, first_slot) = (frame_plan.pending.len() as u32, frame_plan.n_slots);
        frame_plan.n_slots += node.inputs.len() as u32;
        let mut n_data = 0;
        let mut constants: SmallVec<[(u32, u32); 2]> = SmallVec::new();
        for (i, at) in node.inputs.iter().enumerate() {
            let is_constant = !part.fed.contains_key(&(id, i)) && in_place[at.node.index()].is_some();
            match is_constant {
                true => constants.push((i as u32, constant_numbers[at.node.index()])),
                false => n_data += 1,
            }
        }
        let n_control = node.control_inputs.iter().filter(|id| in_place[id.index()].is_none()).count() as u32;
        let flow = node.def.flow;
        let pending = if flow == Flow::Merge { n_control << 1 | 1 } else { n_data + n_control };
        frame_plan.pending.push(pending);
        if pending == 0 && in_place[id.index()].is_none() {
            if frame != 0 {
                return Err(Error::internal(format!("'{}' is in a loop but waits for nothing", node.name)));
            }
            roots.push(id.0);
        }
        let enters = match flow {
            Flow::Enter => frame_number(loops.of(id)),
            _ => 0,
        };
        let is_back = |i: usize, at: &Endpoint| {
            !part.fed.contains_key(&(id, i)) && nodes.node(at.node).def.flow == Flow::NextIteration
        };
        let n_back = node.inputs.iter().enumerate().filter(|(i, at)| is_back(*i, at)).count() as u32;
        let n_inputs = node.inputs.len() as u32;
        let segment = part.extras.segments.get(&id);
        let kernel = match (&in_place[id.index()], segment) {
            (Some(_), _) => PlanKernel::Flow,
            (None, Some(segment)) => PlanKernel::Segment(segment.clone()),
            (None, None) if lends[id.index()] && flow == Flow::Plain => PlanKernel::Lend,
            (None, None) => cache.kernel(node, unit)?,
        };
        let cost = find_op(node.op())?.cost;
        let is_reference = |at: &Endpoint| nodes.output(*at).is_ref || lends[at.node.index()];
        let has_references =
            node.inputs.iter().enumerate().any(|(i, at)| !part.fed.contains_key(&(id, i)) && is_reference(at));
        // Nothing is known about a feed, and the fed endpoint may have no node.
        let is_tiny_input =
            |(i, at): (usize, &Endpoint)| !part.fed.contains_key(&(id, i)) && is_tiny_output(nodes.output(*at));
        let has_tiny_inputs = !has_references && node.inputs.iter().enumerate().all(is_tiny_input);
        let is_tiny = matches!(kernel, PlanKernel::Function(_))
            && flow == Flow::Plain
            && !node.def.stateful
            && !has_references
            && cost != Cost::Heavy
            && node.inputs.len() <= TINY_INPUTS
            && node.outputs.iter().all(is_tiny_output);
        let outputs = node.outputs.iter().map(|output| OutputPlan { edges: 0..0, fetches: 0..0, dtype: output.dtype });
        let on_host = own_memory && kernel_of(node).is_ok_and(|kernel| kernel.device == "CPU");
        let is_pure = flow == Flow::Plain && !node.def.stateful && !has_references && node.def.effects == Effects::None;
        let is_small = |output: &OutputInfo| output.shape.n_elements().is_none_or(|n| n <= MOST_FOLDED);
        plans.push(NodePlan {
            may_fold: own_memory && !on_host && is_pure && node.outputs.iter().all(is_small),
            node: node.clone(),
            kernel,
            cost,
            pace: Pace::default(),
            is_stoppable: flow == Flow::Plain && node.def.effects.only_writes_outputs() && cost != Cost::Inline,
            is_tiny,
            is_late: (node.def.effects == Effects::Writes && (own_memory || node.op() == fused::DESCENT.def.name))
                || segment.is_some_and(|segment| own_memory && segment.is_late),
            on_host,
            constant_inputs: if is_tiny { constants.iter().map(|&(i, _)| 1 << i).sum() } else { 0 },
            lends: lends[id.index()],
            defers: defers[id.index()],
            has_references,
            flow,
            enters,
            local,
            first_slot,
            n_inputs,
            outputs: outputs.collect(),
            control: 0..0,
            dead_needed: if n_back == 0 { (n_inputs, n_inputs) } else { (n_inputs - n_back, n_back) },
            constants,
            only_slot: NO_SLOT,
            has_tiny_inputs,
            is_constant: flow == Flow::Enter && node.attrs.bool("is_constant")?,
        });
    }

    let mut all_edges = lay_edges(part, &mut plans, &in_place);
    let mut fetched_constants = Vec::new();
    let mut fetched: Vec<(Endpoint, u32)> = Vec::new();
    for &(fetch, at) in &part.fetches {
        match &in_place[at.node.index()] {
            Some(value) => fetched_constants.push((fetch as u32, value.clone())),
            None => fetched.push((at, fetch as u32)),
        }
    }
    fetched.sort_unstable();
    for (i, (at, _)) in fetched.iter().enumerate() {
        let range = &mut plans[at.node.index()].outputs[at.index as usize].fetches;
        let start = if range.start == range.end { i as u32 } else { range.start };
        *range = start..i as u32 + 1;
    }
    for plan in plans.iter_mut().filter(|plan| plan.is_tiny) {
        if let [output] = &plan.outputs[..]
            && let [edge] = all_edges[output.edges.start as usize..output.edges.end as usize]
            && output.fetches.is_empty()
            && edge.end != End::Merge
        {
            plan.only_slot = edge.slot;
        }
    }
    let mut feeds: HashMap<(usize, bool), Vec<Edge>> = HashMap::new();
    for (&(id, input), &feed) in &part.fed {
        let (plan, node) = (&plans[id.index()], nodes.node(id));
        let on_device = match part.extras.segments.get(&id) {
            // A segment copies a feed to its own buffers, unless other nodes need it on the GPU too.
            Some(segment) => {
                let others = part.fed.iter().any(|((other, _), number)| *other != id && *number == feed);
                others && segment.on_gpu.get(input).copied().unwrap_or(false)
            }
            None => own_memory && !host_arguments(node, kernel_of(node)?).0.get(input).copied().unwrap_or(false),
        };
        let edge = Edge::new(id, plan, plan.first_slot + input as u32);
        feeds.entry((feed, on_device)).or_default().push(edge);
    }
    let mut feeds: Vec<((usize, bool), Vec<Edge>)> = feeds.into_iter().collect();
    feeds.sort_by_key(|(feed, _)| *feed);
    let feeds = feeds
        .into_iter()
        .map(|((feed, on_device), edges)| {
            let start = all_edges.len() as u32;
            all_edges.extend(edges);
            FeedPlan { feed: feed as u32, edges: start..all_edges.len() as u32, on_device }
        })
        .collect();
    Ok(PartPlan {
        unit: unit.clone(),
        nodes: plans,
        edges: all_edges,
        frames: frame_plans,
        roots,
        constants: constant_values,
        constant_names,
        fetches: fetched.into_iter().map(|(_, fetch)| fetch).collect(),
        fetched_constants,
        feeds,
        frame_ids: part.frame_ids,
        spare: Mutex::default(),
    })
}

fn is_tiny_output(output: &OutputInfo) -> bool {
    output.shape.n_elements().is_some_and(|n| n <= TINY)
}

/// The nodes that pass a reference on as if it were a value: see [`PlanKernel::Lend`]; what takes such a value into a branch;
/// and what takes it into a loop that has a reference to the same variable, too. There an iteration reads what the one before
/// it has assigned.
fn lenders(part: &Part<'_>) -> Vec<bool> {
    let nodes = part.nodes;
    let mut lends = vec![false; nodes.len()];
    // The variable behind a reference, as far as it is known.
    let mut variables: Vec<Option<Endpoint>> = vec![None; nodes.len()];
    let variable_of = |variables: &[Option<Endpoint>], at: Endpoint| match variables.get(at.node.index()) {
        Some(Some(variable)) => *variable,
        _ => at,
    };
    let is_fed = |id: NodeId| part.fed.contains_key(&(id, 0));
    let mut assigned: HashSet<(Endpoint, &str)> = HashSet::new();
    for (id, node) in nodes.iter() {
        if let Some(at) = node.passed_on()
            && !is_fed(id)
        {
            lends[id.index()] = nodes.output(at).is_ref || lends[at.node.index()];
            variables[id.index()] = Some(variable_of(&variables, at));
        }
        if node.def.flow == Flow::Switch
            && let Some(&at) = node.inputs.first()
            && !is_fed(id)
            && node.outputs.iter().all(|output| !output.is_ref)
        {
            lends[id.index()] = nodes.output(at).is_ref || lends[at.node.index()];
            variables[id.index()] = Some(variable_of(&variables, at));
        }
        if node.def.flow == Flow::Enter
            && let [at] = node.inputs[..]
            && at.feed().is_none()
            && !is_fed(id)
        {
            variables[id.index()] = Some(variable_of(&variables, at));
            if node.outputs.iter().any(|output| output.is_ref)
                && let Ok(frame) = node.attrs.str("frame_name")
            {
                assigned.insert((variable_of(&variables, at), frame));
            }
        }
    }
    if assigned.is_empty() {
        return lends;
    }
    for (id, node) in nodes.iter().filter(|(_, node)| node.def.flow == Flow::Enter) {
        let ([at], Some(variable), Ok(frame)) = (&node.inputs[..], variables[id.index()], node.attrs.str("frame_name"))
        else {
            continue;
        };
        let is_reference = nodes.output(*at).is_ref || lends[at.node.index()];
        let is_value = node.outputs.iter().all(|output| !output.is_ref);
        let is_constant = node.attrs.bool("is_constant").unwrap_or(false);
        lends[id.index()] = is_reference && is_value && is_constant && assigned.contains(&(variable, frame));
    }
    lends
}

/// Of the nodes that lend a reference those whose readers are branches alone: a variable that the branch that is taken does
/// not read need not have a value.
fn deferrers(part: &Part<'_>, lends: &[bool]) -> Vec<bool> {
    let nodes = part.nodes;
    let is_branch = |node: &Node| node.def.flow == Flow::Switch;
    let mut has_switch = vec![false; nodes.len()];
    let mut has_others = vec![false; nodes.len()];
    for (id, node) in nodes.iter() {
        for (i, at) in node.inputs.iter().enumerate().filter(|(i, _)| !part.fed.contains_key(&(id, *i))) {
            let branches = is_branch(node) && i == 0 && lends[id.index()];
            has_switch[at.node.index()] |= branches;
            has_others[at.node.index()] |= !branches;
        }
        node.control_inputs.iter().for_each(|before| has_others[before.index()] = true);
    }
    part.fetches.iter().for_each(|(_, at)| {
        if let Some(others) = has_others.get_mut(at.node.index()) {
            *others = true;
        }
    });
    let defers = |(id, node): (NodeId, &Arc<Node>)| {
        let i = id.index();
        lends[i] && (is_branch(node) || node.def.flow == Flow::Plain && has_switch[i] && !has_others[i])
    };
    nodes.iter().map(defers).collect()
}

/// Stores the edges of all outputs in one flat array.
fn lay_edges(part: &Part<'_>, plans: &mut [NodePlan], in_place: &[Option<Tensor>]) -> Vec<Edge> {
    let nodes = part.nodes;
    let mut data: HashMap<Endpoint, Vec<Edge>> = HashMap::new();
    let mut control: Vec<Vec<Edge>> = vec![Vec::new(); nodes.len()];
    for (id, node) in nodes.iter() {
        let plan = &plans[id.index()];
        for (i, at) in node.inputs.iter().enumerate() {
            if !part.fed.contains_key(&(id, i)) && in_place[at.node.index()].is_none() {
                data.entry(*at).or_default().push(Edge::new(id, plan, plan.first_slot + i as u32));
            }
        }
        for before in node.control_inputs.iter().filter(|before| in_place[before.index()].is_none()) {
            control[before.index()].push(Edge::new(id, plan, CONTROL));
        }
    }
    let mut edges = Vec::new();
    for (i, plan) in plans.iter_mut().enumerate() {
        for (index, output) in plan.outputs.iter_mut().enumerate() {
            let start = edges.len() as u32;
            let at = Endpoint { node: NodeId(i as u32), index: index as u32 };
            edges.extend(data.remove(&at).unwrap_or_default());
            output.edges = start..edges.len() as u32;
        }
        let start = edges.len() as u32;
        edges.append(&mut control[i]);
        plan.control = start..edges.len() as u32;
    }
    edges
}

/// The loops of a part, over all of its nodes.
pub(crate) fn loops_of(nodes: &Nodes) -> Result<Frames> {
    let all: Vec<NodeId> = nodes.iter().map(|(id, _)| id).collect();
    frames(nodes, &all, &[])
}
