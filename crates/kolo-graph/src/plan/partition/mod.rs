//! Partition: cuts a placed graph where its edges cross from one device (or task) to another.
//!
//! A cut data edge becomes a `_Send` where the value is made and a `_Recv` where it is used; consumers in one place share
//! the pair. A cut control edge sends an empty tensor. Feeds and fetches need no transfer: whoever runs a partition hands
//! fed values to it and takes fetched ones from it. For `y = (x + b) * c` with `x` fed, `y` fetched and the product on
//! another device:
//!
//! ```text
//! on cpu:0   b    = Const()                         feeds   = [(0, [(sum, 0)])]: feed 0 is input 0 of sum
//!            sum  = Add(<feed 0>, b:0)              fetches = []
//!            sum_G0 = _Send(sum:0)
//! on cpu:1   sum_G1 = _Recv()                       feeds   = []
//!            c    = Const()                         fetches = [(0, y:0)]: fetch 0 is y:0 of this partition
//!            y    = Mul(sum_G1:0, c:0)
//! ```
//!
//! An input that is fed is [`Endpoint::from_feed`] in its node. A fetch of a fed output is in no partition: the caller
//! has the value already (see [`Pruned::feed_of`]).
//!
//! A loop that spans devices needs more: each of its devices must know in which iteration to receive. `control_loops.rs`
//! adds that.
//!
//! Cutting is the one step that is not on the [`Rewriter`](crate::Rewriter). That changes one graph in place: nodes keep their
//! numbers and devices, and edges lead to nodes of the same graph. Here one graph becomes several, every node moves to another
//! one, and while that happens edges lead from graph to graph, which is what a [`Draft`] can say. So the graph is drafted,
//! control loops are added to the drafts, and the parts that come out are again what passes rewrite.

mod control_loops;
mod draft;
mod rounds;

use std::collections::{BTreeMap, HashMap, HashSet};

use kolo_core::{DType, DeviceName, Error, Result};

use self::control_loops::{ControlLoops, add_control_loops, is_control_loop};
use self::draft::{Draft, NodeBuilder, Source, drafts, signal};
pub use self::rounds::TransferRound;
use self::rounds::rounds;
use crate::plan::cost::output_bytes;
use crate::plan::place::{DeviceInfo, KernelSupport};
use crate::plan::placed::PlacedGraph;
use crate::plan::prune::{Feeds, Pruned};
use crate::rewrite::frames::frames;
use crate::rewrite::order::topological_order;
use crate::{AttrValue, Endpoint, Flow, Node, NodeId, Nodes, OpRegistry, OutputInfo};

/// Where graphs are cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Granularity {
    /// Between devices.
    #[default]
    Device,
    /// Between tasks; each task cuts its part by device later.
    Task,
}

/// Who sees to loops that span devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoopControl {
    /// This call: control loops are added for every device of a loop, also within a task.
    #[default]
    Add,
    /// The graph comes from a master, which has added them.
    Present,
}

/// How to partition.
#[derive(Clone, Copy, Default)]
pub struct PartitionOptions<'a> {
    /// Where to cut.
    pub granularity: Granularity,
    /// Who sees to loops.
    pub loops: LoopControl,
    /// Says which arguments of kernels are in host memory, so that values change memory by a transfer even on one
    /// device. Without it, all memory of a device counts as one. Only for [`Granularity::Device`].
    pub support: Option<&'a dyn KernelSupport>,
}

/// One device's (or task's) part of a step.
#[derive(Clone)]
pub struct Partition {
    /// The device's index; for a task, that of its first device.
    pub device: usize,
    /// Its nodes, transfers among them, each with its full device and after its inputs (edges that close loops apart).
    pub nodes: Nodes,
    /// For each node the one it stands for in the whole graph; `None` for what partitioning added.
    pub origin: Vec<Option<NodeId>>,
    /// For each feed used here, by number: the nodes and inputs it goes to.
    pub feeds: Vec<(usize, Vec<(NodeId, usize)>)>,
    /// For each fetch made here, by number: the output.
    pub fetches: Vec<(usize, Endpoint)>,
    /// What leaves.
    pub transfers: Vec<Transfer>,
}

/// One edge that was cut.
#[derive(Clone, Debug, PartialEq)]
pub struct Transfer {
    /// The `_Send`, in the partition that has this.
    pub send: NodeId,
    /// The output that is sent, in the whole graph; `None` for an empty tensor that stands for a control edge, and for
    /// values that partitioning made.
    pub source: Option<Endpoint>,
    /// The index of the device that receives.
    pub to: usize,
    /// Its size in bytes, if the shape is known.
    pub n_bytes: Option<usize>,
    /// How many edges it stands for.
    pub n_consumers: usize,
}

/// Cuts what `pruned` needs of a placed graph. `fresh` gives numbers that no other call of the session was given; they
/// make the names of added nodes unique. Partitions come in the order of their devices; a device without nodes has none.
pub fn partition(
    placed: &PlacedGraph<'_>,
    pruned: &Pruned,
    registry: &OpRegistry,
    options: &PartitionOptions<'_>,
    fresh: &mut dyn FnMut() -> u64,
) -> Result<Vec<Partition>> {
    let feeds = Feeds::new(placed.nodes, &pruned.feeds)?;
    let mut drafts = drafts(placed, pruned, &feeds)?;
    let mut builder = NodeBuilder {
        nodes: placed.nodes,
        devices: &placed.devices,
        registry,
        fresh,
        granularity: options.granularity,
    };
    let loops = match options.loops {
        LoopControl::Add => {
            let frames = frames(placed.nodes, &pruned.nodes, &pruned.feeds)?;
            for (draft, &id) in drafts.iter_mut().zip(&pruned.nodes) {
                draft.input_frame = frames.input_frame(placed.nodes, id);
                draft.output_frame = frames.output_frame(placed.nodes, id);
            }
            add_control_loops(&mut drafts, &frames, &pruned.nodes, &mut builder)?
        }
        LoopControl::Present => ControlLoops::default(),
    };
    let places = places(&placed.devices, options.granularity);
    let rounds = match options.granularity {
        Granularity::Task => rounds(&drafts, &|draft| places[drafts[draft].device]),
        Granularity::Device => Vec::new(),
    };
    let values = match options.granularity {
        Granularity::Task => crossing_values(&drafts, &places),
        Granularity::Device => HashMap::new(),
    };
    let mut cutter = Cutter {
        places,
        rounds,
        values,
        waited: HashMap::new(),
        local: vec![usize::MAX; drafts.len()],
        drafts: &drafts,
        loops,
        options,
        builder,
        parts: BTreeMap::new(),
        shared: HashMap::new(),
        n_edges: 0,
    };
    for draft in 0..drafts.len() {
        cutter.emit(draft)?;
    }
    cutter.finish(pruned)
}

/// For each node of `pruned` that sends to other devices, the bytes it makes move in a step; `None` where a shape is not
/// known. A value that several nodes of one device use moves there once.
pub fn moved_bytes(placed: &PlacedGraph<'_>, pruned: &Pruned) -> BTreeMap<NodeId, Option<usize>> {
    let mut moves: Vec<(Endpoint, usize)> = Vec::new();
    for &id in &pruned.nodes {
        let Some(to) = placed.placed(id).map(|placed| placed.device) else { continue };
        for &at in placed.nodes.node(id).inputs.iter().filter(|&&at| pruned.feed_of(at).is_none()) {
            if placed.placed(at.node).is_some_and(|from| from.device != to) {
                moves.push((at, to));
            }
        }
    }
    moves.sort_unstable();
    moves.dedup();
    let mut bytes = BTreeMap::new();
    for (at, _) in moves {
        let total = bytes.entry(at.node).or_insert(Some(0usize));
        *total = total.and_then(|total| total.checked_add(output_bytes(placed.nodes.output(at))?));
    }
    bytes
}

/// An error if placement alone makes a value move between memories. An `Identity` that is pinned asks for the copy; control
/// edges move nothing; arguments in host memory stay there, whichever device of the task reads them.
pub(crate) fn deny_implicit_copies(
    placed: &PlacedGraph<'_>,
    pruned: &Pruned,
    support: &dyn KernelSupport,
) -> Result<()> {
    let Some((value, reader)) = implicit_copy(placed, pruned, support) else { return Ok(()) };
    let at = |id: NodeId| placed.placed(id).map_or_else(String::new, |row| placed.devices[row.device].name.to_string());
    let (from, to) = (placed.nodes.node(value.node), placed.nodes.node(reader));
    Err(Error::invalid_argument(format!(
        "output {} of '{}' ({}) on {} would be copied for '{}' ({}) on {}, and implicit copies are denied; place both on one \
         device, or ask for the copy with an Identity that is pinned there",
        value.index,
        from.name,
        from.op(),
        at(value.node),
        to.name,
        to.op(),
        at(reader),
    )))
}

/// The first value that placement alone makes move, and the node that reads it elsewhere.
fn implicit_copy(placed: &PlacedGraph<'_>, pruned: &Pruned, support: &dyn KernelSupport) -> Option<(Endpoint, NodeId)> {
    let nodes = placed.nodes;
    let name = |id: NodeId| placed.placed(id).map(|placed_at| &placed.devices[placed_at.device].name);
    let on_host = |marks: Vec<bool>, i: usize, device: &DeviceName| {
        device.kind.eq_ignore_ascii_case("CPU") || marks.get(i).copied().unwrap_or(false)
    };
    for &id in &pruned.nodes {
        let (node, Some(to)) = (nodes.node(id), name(id)) else { continue };
        if node.passed_on().is_some() && !node.device.is_empty() {
            continue;
        }
        for (i, &at) in node.inputs.iter().enumerate().filter(|(_, at)| pruned.feed_of(**at).is_none()) {
            let Some(from) = name(at.node).filter(|from| *from != to) else { continue };
            let leaves_host = on_host(support.host_outputs(nodes.node(at.node), from), at.index as usize, from);
            let stays = leaves_host && on_host(support.host_inputs(node, to), i, to);
            if !(stays && from.same_task(to) && from.kind != to.kind) {
                return Some((at, id));
            }
        }
    }
    None
}

/// For each device the place it belongs to: itself, or the first device of its task.
fn places(devices: &[DeviceInfo], granularity: Granularity) -> Vec<usize> {
    let task = |name| devices.iter().position(|first| first.name.same_task(name));
    match granularity {
        Granularity::Device => (0..devices.len()).collect(),
        Granularity::Task => devices.iter().enumerate().map(|(i, device)| task(&device.name).unwrap_or(i)).collect(),
    }
}

/// For each draft and each place that reads a value of it, one such value: whoever has received it knows that the draft has
/// run, so control edges between the two need no transfers of their own. What a branch may skip while its node runs cannot
/// say so, and a reference is read anew for each reader.
fn crossing_values(drafts: &[Draft], places: &[usize]) -> HashMap<(usize, usize), u32> {
    let mut values = HashMap::new();
    for draft in drafts {
        let place = places[draft.device];
        for source in &draft.inputs {
            let &Source::Draft { draft: from, index } = source else { continue };
            let node = &drafts[from].node;
            let is_ref = node.outputs.get(index as usize).is_none_or(|output| output.is_ref);
            if places[drafts[from].device] != place && node.def.flow == Flow::Plain && !is_ref {
                values.entry((from, place)).or_insert(index);
            }
        }
    }
    values
}

struct Cutter<'a> {
    drafts: &'a [Draft],
    /// For each device, its place.
    places: Vec<usize>,
    /// See [`crossing_values`].
    values: HashMap<(usize, usize), u32>,
    /// For each of them, what control edges wait for, if there are any.
    waited: HashMap<(usize, usize), usize>,
    /// For each draft, what is said of its transfers to other tasks.
    rounds: Vec<TransferRound>,
    /// For each draft that was emitted, its number in its part.
    local: Vec<usize>,
    loops: ControlLoops,
    options: &'a PartitionOptions<'a>,
    builder: NodeBuilder<'a>,
    parts: BTreeMap<usize, Part>,
    /// The receiving end of each transfer that others may use.
    shared: HashMap<SharedKey, Shared>,
    n_edges: usize,
}

/// What is sent (`None` for a control edge), the place it goes to, and whether to host memory there.
type SharedKey = (usize, Option<u32>, usize, bool);

#[derive(Clone, Copy)]
struct Shared {
    /// The node to read or wait for.
    value: usize,
    /// Where the transfer is counted: the sender's part, and its place there.
    from: usize,
    transfer: usize,
}

#[derive(Default)]
struct Part {
    nodes: Vec<Pending>,
    transfers: Vec<(usize, Transfer)>,
}

struct Pending {
    node: Node,
    inputs: Vec<Link>,
    control: Vec<Link>,
    origin: Option<NodeId>,
}

/// An edge inside of one part. Drafts may be emitted after their consumers, so they are looked up in the end.
#[derive(Clone, Copy, PartialEq)]
enum Link {
    Draft(usize, u32),
    Added(usize),
    Feed(usize),
}

impl Cutter<'_> {
    fn place(&self, draft: usize) -> usize {
        self.places[self.drafts[draft].device]
    }

    /// Adds a node that stands for none of the graph.
    fn push(&mut self, place: usize, node: Node, inputs: Vec<Link>, control: Vec<Link>) -> usize {
        let nodes = &mut self.parts.entry(place).or_default().nodes;
        nodes.push(Pending { node, inputs, control, origin: None });
        nodes.len() - 1
    }

    /// Puts one draft into its part, with the transfers that its inputs need.
    fn emit(&mut self, to: usize) -> Result<()> {
        let draft = &self.drafts[to];
        let place = self.place(to);
        let mut inputs = Vec::with_capacity(draft.inputs.len());
        // Reading a reference over a transfer must not happen before the consumer's other inputs are there, as it would
        // not on one device.
        let mut references = Vec::new();
        let mut others = Vec::new();
        for (i, &source) in draft.inputs.iter().enumerate() {
            let (from, index) = match source {
                Source::Draft { draft, index } => (draft, index),
                Source::Feed(feed) => {
                    inputs.push(Link::Feed(feed));
                    continue;
                }
            };
            let is_ref = self.drafts[from].node.outputs.get(index as usize).is_some_and(|output| output.is_ref);
            let host = (self.is_host_output(from, index), self.is_host_input(to, i));
            let crosses = self.place(from) != place || host.0 != host.1;
            let link = match crosses {
                false => Link::Draft(from, index),
                true if draft.node.ref_inputs.get(i).copied().unwrap_or(false) => {
                    return Err(Error::invalid_argument(format!(
                        "{} on {}{} takes a reference to {} on {}{}: a reference cannot leave its device",
                        draft.node.describe(),
                        self.builder.devices[draft.device].name,
                        draft.node.pinned_at(),
                        self.drafts[from].node.describe(),
                        self.builder.devices[self.drafts[from].device].name,
                        self.drafts[from].node.pinned_at()
                    )));
                }
                true => Link::Added(self.transfer(from, Some(index), to, host, is_ref)?),
            };
            inputs.push(link);
            match link {
                Link::Added(recv) if is_ref => references.push(recv),
                _ if !is_ref => others.push(link),
                _ => {}
            }
        }
        let mut control = Vec::with_capacity(draft.control.len());
        let needs_trigger = self.stays_across_devices(to);
        for &from in &draft.control {
            // What the master receives in a loop needs its trigger here too; other nodes had theirs for what is cut now.
            let triggers = self.options.loops == LoopControl::Present
                && is_control_loop(&self.drafts[from].node)
                && draft.node.def.flow != Flow::Transfer;
            if triggers && !needs_trigger {
                continue;
            }
            let link = match self.place(from) == place {
                true => Link::Draft(from, 0),
                false => Link::Added(self.wait_for(from, to)?),
            };
            control.push(link);
            others.push(link);
        }
        if needs_trigger && let Some(merge) = self.loops.merge(draft.input_frame, draft.device) {
            control.push(Link::Draft(merge, 0));
        }
        // A merge runs when one input is there and may never see the others.
        if draft.node.def.flow != Flow::Merge
            && let Some(part) = self.parts.get_mut(&place)
        {
            for &recv in &references {
                part.nodes[recv].control.extend(others.iter().filter(|link| !matches!(link, Link::Feed(_))));
            }
        }
        let mut node = Node::clone(&draft.node);
        node.device = self.builder.devices[draft.device].name.spec();
        let nodes = &mut self.parts.entry(place).or_default().nodes;
        self.local[to] = nodes.len();
        nodes.push(Pending { node, inputs, control, origin: draft.origin });
        Ok(())
    }

    /// True if an edge of a loop into this node crosses devices but is not cut here: whoever cuts it needs the trigger.
    fn stays_across_devices(&self, to: usize) -> bool {
        let draft = &self.drafts[to];
        let in_loop = draft.input_frame.is_some() || self.options.loops == LoopControl::Present;
        in_loop
            && draft
                .input_drafts()
                .any(|from| self.drafts[from].device != draft.device && self.place(from) == self.place(to))
    }

    fn is_host_output(&self, draft: usize, index: u32) -> bool {
        self.host_support(draft).is_some_and(|(support, device)| {
            support.host_outputs(&self.drafts[draft].node, &device.name).get(index as usize).copied().unwrap_or(false)
        })
    }

    fn is_host_input(&self, draft: usize, index: usize) -> bool {
        self.host_support(draft).is_some_and(|(support, device)| {
            support.host_inputs(&self.drafts[draft].node, &device.name).get(index).copied().unwrap_or(false)
        })
    }

    /// Who to ask about host memory. On a CPU all memory is the host's, and a master leaves the question to its workers.
    fn host_support(&self, draft: usize) -> Option<(&dyn KernelSupport, &DeviceInfo)> {
        let device = &self.builder.devices[self.drafts[draft].device];
        let asks = self.options.granularity == Granularity::Device && &*device.name.kind != "CPU";
        self.options.support.filter(|_| asks).map(|support| (support, device))
    }

    /// The node at the place of `to` that runs after a draft elsewhere: behind a value of it that is sent there anyway, or
    /// behind a transfer of its own. It is an `Identity` in both cases: a receive of a dead value runs, so in TensorFlow's
    /// executor its control edges are live, and nodes of a branch that is not taken would run.
    fn wait_for(&mut self, from: usize, to: usize) -> Result<usize> {
        let place = self.place(to);
        let Some(&index) = self.values.get(&(from, place)) else {
            return self.transfer(from, None, to, (false, false), false);
        };
        let received = self.transfer(from, Some(index), to, (false, false), false)?;
        if let Some(&waited) = self.waited.get(&(from, place)) {
            return Ok(waited);
        }
        let drafts = self.drafts;
        let (source, device) = (&drafts[from].node, drafts[to].device);
        let value = OutputInfo { is_ref: false, ..source.outputs[index as usize].clone() };
        let attrs = vec![("T", value.dtype.into())];
        let name = self.builder.name(&source.name);
        let identity = self.builder.node("Identity", name, device, attrs, vec![value], 1)?;
        let waited = self.push(place, identity, vec![Link::Added(received)], vec![]);
        self.waited.insert((from, place), waited);
        Ok(waited)
    }

    /// Sends output `slot` of a draft, or only the moment it ends, to the place of another. Returns the node there that
    /// gives the value or can be waited for.
    fn transfer(
        &mut self,
        from: usize,
        slot: Option<u32>,
        to: usize,
        (from_host, to_host): (bool, bool),
        is_ref: bool,
    ) -> Result<usize> {
        let (drafts, devices) = (self.drafts, self.builder.devices);
        let (source, target) = (&drafts[from], &drafts[to]);
        let (from_place, to_place) = (self.place(from), self.place(to));
        let key = (from, slot, to_place, to_host);
        if let Some(&shared) = self.shared.get(&key) {
            if let Some(part) = self.parts.get_mut(&shared.from) {
                part.transfers[shared.transfer].1.n_consumers += 1;
            }
            return Ok(shared.value);
        }
        let base = &source.node.name;
        let (value, input) = match slot {
            Some(index) => {
                let known = &source.node.outputs[index as usize];
                (OutputInfo { is_ref: false, ..known.clone() }, Link::Draft(from, index))
            }
            None => {
                let name = self.builder.name(base);
                let empty = self.builder.empty(name, source.device)?;
                (signal(), Link::Added(self.push(from_place, empty, vec![], vec![Link::Draft(from, 0)])))
            }
        };
        let (send_device, recv_device) = (&devices[source.device], &devices[target.device]);
        let tensor_name = format!("edge_{}_{base}", self.n_edges);
        self.n_edges += 1;
        let round = self.rounds.get(from).map(|round| round.attrs()).into_iter().flatten();
        let attrs = |dtype_attr| -> Vec<(&str, AttrValue)> {
            let mut attrs: Vec<(&str, AttrValue)> = vec![
                (dtype_attr, value.dtype.into()),
                ("tensor_name", tensor_name.clone().into()),
                ("send_device", send_device.name.to_string().into()),
                // The wire has no unsigned attribute: the same bits as a signed number.
                ("send_device_incarnation", (send_device.incarnation as i64).into()),
                ("recv_device", recv_device.name.to_string().into()),
                ("client_terminated", false.into()),
            ];
            attrs.extend(round.clone());
            attrs
        };
        let (send_op, recv_op) =
            (if from_host { "_HostSend" } else { "_Send" }, if to_host { "_HostRecv" } else { "_Recv" });
        let name = self.builder.name(base);
        let send = self.builder.node(send_op, name, source.device, attrs("T"), vec![], 1)?;
        let send = self.push(from_place, send, vec![input], vec![]);
        let name = self.builder.name(base);
        let recv = self.builder.node(recv_op, name, target.device, attrs("tensor_type"), vec![value.clone()], 0)?;
        // A receive has no inputs, so in a loop something must say in which iteration it is.
        let trigger = match from_place == to_place {
            true => Some(Link::Added(send)),
            false => self.trigger(from, to)?.map(|merge| Link::Draft(merge, 0)),
        };
        let recv = self.push(to_place, recv, vec![], trigger.into_iter().collect());
        let result = match slot {
            Some(_) => recv,
            None => {
                let name = self.builder.name(base);
                let attrs = vec![("T", DType::F32.into())];
                let identity = self.builder.node("Identity", name, target.device, attrs, vec![signal()], 1)?;
                self.push(to_place, identity, vec![Link::Added(recv)], vec![])
            }
        };
        let source = slot.and_then(|index| Some(Endpoint { node: source.origin?, index }));
        let transfer =
            Transfer { send: NodeId(0), source, to: target.device, n_bytes: output_bytes(&value), n_consumers: 1 };
        let transfers = &mut self.parts.entry(from_place).or_default().transfers;
        transfers.push((send, transfer));
        if !is_ref {
            let shared = Shared { value: result, from: from_place, transfer: transfers.len() - 1 };
            self.shared.insert(key, shared);
        }
        Ok(result)
    }

    /// The merge of the control loop that counts iterations where `to` is, if the edge is inside of a loop.
    fn trigger(&self, from: usize, to: usize) -> Result<Option<usize>> {
        let (source, target) = (&self.drafts[from], &self.drafts[to]);
        match self.options.loops {
            LoopControl::Add => Ok(self.loops.merge(source.output_frame, target.device)),
            LoopControl::Present => {
                Ok(target.control.iter().copied().find(|&control| is_control_loop(&self.drafts[control].node)))
            }
        }
    }

    fn finish(mut self, pruned: &Pruned) -> Result<Vec<Partition>> {
        let mut partitions = Vec::with_capacity(self.parts.len());
        for (device, part) in std::mem::take(&mut self.parts) {
            partitions.push(self.finish_part(device, part, pruned)?);
        }
        Ok(partitions)
    }

    fn finish_part(&self, device: usize, part: Part, pruned: &Pruned) -> Result<Partition> {
        let at = |link: &Link| match link {
            Link::Draft(draft, _) => Some(self.local[*draft]),
            Link::Added(local) => Some(*local),
            Link::Feed(_) => None,
        };
        let is_back = |to: usize, from: usize| {
            part.nodes[to].node.def.flow == Flow::Merge && part.nodes[from].node.def.flow == Flow::NextIteration
        };
        let forward = |(i, pending): (usize, &Pending)| -> Vec<usize> {
            let data = pending.inputs.iter().filter_map(at).filter(|&from| !is_back(i, from));
            data.chain(pending.control.iter().filter_map(at)).collect()
        };
        let inputs: Vec<Vec<usize>> = part.nodes.iter().enumerate().map(forward).collect();
        let order = topological_order(&inputs).map_err(|_| Error::internal("partitioning made a cycle"))?;
        let mut number = vec![NodeId(0); order.len()];
        order.iter().enumerate().for_each(|(new, &old)| number[old] = NodeId(new as u32));

        let mut pending: Vec<Option<Pending>> = part.nodes.into_iter().map(Some).collect();
        let (mut nodes, mut origin) = (Nodes::default(), Vec::with_capacity(order.len()));
        let mut feeds: BTreeMap<usize, Vec<(NodeId, usize)>> = BTreeMap::new();
        for pending in order.iter().filter_map(|&old| pending[old].take()) {
            let Pending { mut node, inputs, control, origin: of } = pending;
            let id = NodeId(nodes.len() as u32);
            let endpoint = |(i, link): (usize, &Link)| match link {
                Link::Draft(draft, index) => Endpoint { node: number[self.local[*draft]], index: *index },
                Link::Added(local) => Endpoint { node: number[*local], index: 0 },
                Link::Feed(feed) => {
                    feeds.entry(*feed).or_default().push((id, i));
                    Endpoint::from_feed(*feed as u32)
                }
            };
            node.inputs = inputs.iter().enumerate().map(endpoint).collect();
            // Each once. A group may wait for thousands.
            let mut seen = HashSet::new();
            let before = control.iter().filter_map(at).map(|local| number[local]);
            node.control_inputs = before.filter(|&before| seen.insert(before)).collect();
            nodes.push(node);
            origin.push(of);
        }
        let mut fetches = Vec::new();
        for (i, fetch) in pruned.fetches.iter().enumerate().filter(|(_, fetch)| pruned.feed_of(**fetch).is_none()) {
            let missing = |_| Error::internal(format!("fetch {i} was pruned"));
            let draft = pruned.nodes.binary_search(&fetch.node).map_err(missing)?;
            if self.place(draft) == device {
                fetches.push((i, Endpoint { node: number[self.local[draft]], index: fetch.index }));
            }
        }
        let numbered = |(send, transfer): (usize, Transfer)| Transfer { send: number[send], ..transfer };
        Ok(Partition {
            device,
            nodes,
            origin,
            feeds: feeds.into_iter().collect(),
            fetches,
            transfers: part.transfers.into_iter().map(numbered).collect(),
        })
    }
}

#[cfg(test)]
mod tests;

#[cfg(test)]
mod loop_tests;
