//! Place: gives every node of a run one device.
//!
//! The simple policy is three rules, in this order: a node that an earlier run of the session placed stays where it is;
//! a pinned node goes where it is pinned; any other node goes to the first accelerator that has a kernel for it, or
//! else to the first CPU. [`Policy::Heuristic`] adds TensorFlow's heuristics, [`Policy::Cost`] uses measured times. Nodes that must share a device (see `colocate.rs`)
//! are placed together. The same input gives the same answer, always.
//!
//! The result keeps wish and fact apart, with the rule that decided, so that a placement can be explained.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::Arc;

use kolo_core::{Code, DType, DeviceName, DeviceSpec, Error, Result};

use crate::plan::colocate::{Sets, Wish, colocate, holds_state, is_variable};
use crate::plan::placed::{Placed, PlacedGraph, Rule};
use crate::{AttrValue, CostModel, Flow, Node, NodeId, Nodes, Work};

/// A device that nodes can be placed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its full name.
    pub name: DeviceName,
    /// A number that changes when the device's process restarts.
    pub incarnation: u64,
}

/// What planning must know of kernels. The op table answers it; a master that lacks the kernels of other tasks may
/// answer yes for their devices.
pub trait KernelSupport {
    /// Whether this node can run on a device like this one.
    fn has_kernel(&self, node: &Node, device: &DeviceName) -> bool;

    /// The kernels that the node's op does have, such as `CPU with T in {float, double}`, for messages.
    fn kernels(&self, node: &Node) -> Vec<String>;

    /// Which inputs its kernel on this device reads from host memory. Missing entries are in the device's own memory.
    fn host_inputs(&self, _node: &Node, _device: &DeviceName) -> Vec<bool> {
        Vec::new()
    }

    /// Which outputs its kernel on this device writes to host memory. Missing entries are in the device's own memory.
    fn host_outputs(&self, _node: &Node, _device: &DeviceName) -> Vec<bool> {
        Vec::new()
    }
}

/// What to do with a pin that cannot be kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// Refuse.
    #[default]
    Strict,
    /// Use another device of the same task, and count it.
    Soft,
}

/// How nodes without a pin are placed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// The three rules and nothing else.
    #[default]
    Simple,
    /// Also TensorFlow's heuristics: shapes are computed where their input is, sources where their consumers are,
    /// `Switch` and `Exit` where their data is.
    Heuristic,
    /// Nodes that share a device with nobody go where they end first by [`PlaceOptions::costs`]: measured times, and what
    /// it takes to bring their inputs. Sources go where their consumers are. The simple rules place what was not measured.
    Cost,
}

impl std::str::FromStr for Policy {
    type Err = Error;

    fn from_str(text: &str) -> Result<Policy> {
        match text {
            "simple" => Ok(Policy::Simple),
            "heuristic" => Ok(Policy::Heuristic),
            "cost" => Ok(Policy::Cost),
            _ => Err(Error::invalid_argument(format!(
                "'{text}' is not a placement policy; there are simple, heuristic and cost"
            ))),
        }
    }
}

/// Which of several equal devices comes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// Those of the client's task, then by name, numbers counting as numbers: TensorFlow 2's, less the surprise that
    /// `task:10` sorts before `task:2`.
    #[default]
    OwnTaskFirst,
    /// By name as text: TensorFlow 1's.
    Text,
}

/// How to place.
#[derive(Clone, Debug, Default)]
pub struct PlaceOptions {
    /// What to do with a pin that cannot be kept.
    pub placement: Placement,
    /// How nodes without a pin are placed.
    pub policy: Policy,
    /// Which of several equal devices comes first.
    pub order: Order,
    /// The index of a device in the client's own task.
    pub client_device: usize,
    /// The most nodes that may fall back under [`Placement::Soft`]; more fail the run.
    pub max_fallbacks: Option<usize>,
    /// What [`Policy::Cost`] knows.
    pub costs: Arc<CostModel>,
}

/// Gives each node of `needed` (sorted) one of `devices`. `earlier` says where earlier runs of the session put nodes.
/// `Unimplemented` if an op has no kernels at all; `InvalidArgument` if a pin cannot be kept, if nodes that must share a device cannot, or if no device has a kernel;
/// the message names the node, what was asked for and where, and what is possible.
pub fn place<'a>(
    nodes: &'a Nodes,
    needed: &[NodeId],
    devices: &[DeviceInfo],
    support: &dyn KernelSupport,
    earlier: &HashMap<NodeId, usize>,
    options: &PlaceOptions,
) -> Result<PlacedGraph<'a>> {
    if let Some((id, device)) = earlier.iter().find(|(_, device)| **device >= devices.len()) {
        return Err(Error::internal(format!("node {id:?} is on device {device} of {}", devices.len())));
    }
    let sets = colocate(nodes, needed, options.placement)?;
    let placer = Placer {
        nodes,
        devices,
        support,
        earlier,
        options,
        order: device_order(devices, options),
        members: members(nodes, needed, &sets),
        sets,
        placement: vec![None; nodes.len()],
        chosen: HashMap::new(),
        n_fallbacks: 0,
        finish: vec![0.0; nodes.len()],
        free: vec![0.0; devices.len()],
    };
    placer.run(needed)
}

/// The devices, best first: accelerators before CPUs, GPUs before other accelerators.
fn device_order(devices: &[DeviceInfo], options: &PlaceOptions) -> Vec<usize> {
    let kind_rank = |name: &DeviceName| match &*name.kind {
        "GPU" => 0,
        "CPU" => 2,
        _ => 1,
    };
    let client = devices.get(options.client_device).map(|device| &device.name);
    let mut order: Vec<usize> = (0..devices.len()).collect();
    order.sort_by_cached_key(|&i| {
        let name = &devices[i].name;
        let (own, text) = match options.order {
            Order::OwnTaskFirst => (client.is_some_and(|client| client.same_task(name)), String::new()),
            Order::Text => (false, name.to_string()),
        };
        let kind = if kind_rank(name) == 1 { name.kind.clone() } else { "".into() };
        (kind_rank(name), kind, Reverse(own), text, name.clone(), i)
    });
    order
}

/// The members of every set that a needed node is in: needed ones first.
fn members(nodes: &Nodes, needed: &[NodeId], sets: &Sets) -> HashMap<NodeId, Members> {
    let mut members: HashMap<NodeId, Members> = HashMap::new();
    for &id in needed {
        members.entry(sets.root(id)).or_default().needed.push(id);
    }
    for (id, _) in nodes.iter() {
        let root = sets.root(id);
        if let Some(members) = members.get_mut(&root)
            && needed.binary_search(&id).is_err()
        {
            members.others.push(id);
        }
    }
    members
}

#[derive(Default)]
struct Members {
    needed: Vec<NodeId>,
    others: Vec<NodeId>,
}

struct Placer<'a, 'p> {
    nodes: &'a Nodes,
    devices: &'p [DeviceInfo],
    support: &'p dyn KernelSupport,
    earlier: &'p HashMap<NodeId, usize>,
    options: &'p PlaceOptions,
    order: Vec<usize>,
    members: HashMap<NodeId, Members>,
    sets: Sets,
    placement: Vec<Option<Placed>>,
    /// The device of each set that has one, by its root, and why a set was moved off its pin.
    chosen: HashMap<NodeId, (usize, Option<Rule>)>,
    n_fallbacks: usize,
    /// For [`Policy::Cost`], the seconds after which each node ends and each device is free.
    finish: Vec<f64>,
    free: Vec<f64>,
}

impl<'a> Placer<'a, '_> {
    fn run(mut self, needed: &[NodeId]) -> Result<PlacedGraph<'a>> {
        let later = |id: NodeId| match self.options.policy {
            Policy::Simple => false,
            Policy::Heuristic => is_generator(self.nodes.node(id)),
            // One that has a place already matters to where its consumers end first.
            Policy::Cost => is_generator(self.nodes.node(id)) && !self.has_a_place(id),
        };
        let (generators, rest): (Vec<NodeId>, Vec<NodeId>) = needed.iter().partition(|&&id| later(id));
        for &id in &rest {
            self.place_node(id, |placer, id| match placer.options.policy {
                Policy::Simple => None,
                Policy::Heuristic => placer.input_device(id).map(|device| (device, Rule::FollowsInput)),
                Policy::Cost => placer.first_to_finish(id).map(|device| (device, Rule::Cost)),
            })?;
            self.note_time(id);
        }
        if !generators.is_empty() {
            let consumers = self.consumers(needed);
            for &id in &generators {
                self.place_node(id, |placer, id| {
                    placer.consumer_device(&consumers, id).map(|device| (device, Rule::FollowsConsumers))
                })?;
            }
        }
        if self.options.policy == Policy::Heuristic {
            self.move_loop_plumbing(needed);
        }
        if let Some(most) = self.options.max_fallbacks
            && self.n_fallbacks > most
        {
            return Err(self.too_many_fallbacks(needed, most));
        }
        Ok(PlacedGraph {
            nodes: self.nodes,
            devices: self.devices.to_vec(),
            placement: self.placement,
            n_fallbacks: self.n_fallbacks,
        })
    }

    /// Places one node, and with it the set that it is in. `hint` names a device to prefer, if it is possible.
    fn place_node(&mut self, id: NodeId, hint: impl Fn(&Self, NodeId) -> Option<(usize, Rule)>) -> Result<()> {
        let node = self.nodes.node(id);
        let root = self.sets.root(id);
        let mut first_rule = None;
        let (device, fallback) = match self.chosen.get(&root) {
            Some(&chosen) => chosen,
            None => {
                let (device, rule) = match self.earlier_device(root)? {
                    Some(device) => (device, Rule::Earlier),
                    None => self.choose(root, hint(self, id))?,
                };
                first_rule = Some(rule);
                let fallback = rule.is_fallback().then_some(rule);
                self.chosen.insert(root, (device, fallback));
                (device, fallback)
            }
        };
        let pinned = |device: usize| !node.device.is_empty() && node.device.matches(&self.devices[device].name);
        let (device, rule) = match (self.earlier.get(&id).copied(), fallback, first_rule) {
            (Some(own), ..) if own == device || self.options.placement == Placement::Soft => (own, Rule::Earlier),
            _ if pinned(device) => (device, Rule::Pinned),
            (_, Some(rule), _) if !node.device.is_empty() => (device, rule),
            (_, _, Some(rule)) if rule.needs_no_wish() => (device, rule),
            _ => (device, Rule::Colocated),
        };
        let still = || rule == Rule::Earlier && !self.sets.wish(root).spec.matches(&self.devices[device].name);
        let fell_back = rule.is_fallback() || still();
        self.n_fallbacks += usize::from(fell_back);
        let missed = fallback.map(|_| self.sets.wish(root).spec);
        self.placement[id.index()] = Some(Placed { device, wish: node.device.clone(), rule, missed });
        Ok(())
    }

    /// Where earlier runs put a member of the set. State decides before the rest, since it cannot move.
    fn earlier_device(&self, root: NodeId) -> Result<Option<usize>> {
        let members = &self.members[&root];
        let all = || members.needed.iter().chain(&members.others);
        let placed = || all().filter_map(|id| Some((*id, *self.earlier.get(id)?)));
        let is_state = |id: NodeId| holds_state(self.nodes.node(id)) || self.nodes.node(id).def.stateful;
        let Some((id, device)) = placed().find(|(id, _)| is_state(*id)).or_else(|| placed().next()) else {
            return Ok(None);
        };
        if self.options.placement == Placement::Soft {
            return Ok(Some(device));
        }
        let name = &self.devices[device].name;
        let wish = self.sets.wish(root);
        if !wish.spec.matches(name) {
            if !is_state(id) {
                return Ok(None);
            }
            return Err(state_stays(self.nodes.node(id), &wish.spec, &self.pin_line(&wish), name));
        }
        match placed().find(|(other, at)| *at != device && is_state(*other)) {
            Some((other, at)) => Err(Error::invalid_argument(format!(
                "Cannot colocate nodes '{}' and '{}' because earlier runs placed them on {name} and {}",
                self.nodes.node(id).name,
                self.nodes.node(other).name,
                self.devices[at].name
            ))),
            None => Ok(Some(device)),
        }
    }

    /// The device of a set that has none yet.
    fn choose(&self, root: NodeId, hint: Option<(usize, Rule)>) -> Result<(usize, Rule)> {
        let wish = self.sets.wish(root);
        let candidates = self.candidates(root, &wish.spec);
        if let Some(hint) = hint.filter(|(device, _)| candidates.contains(device)) {
            return Ok(hint);
        }
        if let Some(&device) = candidates.first() {
            let rule = match (&*self.devices[device].name.kind, wish.spec.is_empty()) {
                (_, false) => Rule::Pinned,
                ("CPU", true) => Rule::Cpu,
                (_, true) => Rule::Accelerator,
            };
            return Ok((device, rule));
        }
        let exists = self.devices.iter().any(|device| wish.spec.matches(&device.name));
        if self.options.placement == Placement::Soft && !wish.spec.is_empty() {
            let open = DeviceSpec { kind: None, id: None, ..wish.spec.clone() };
            if let Some(&device) = self.candidates(root, &open).first() {
                return Ok((device, if exists { Rule::SoftMissingKernel } else { Rule::SoftMissingDevice }));
            }
        }
        Err(self.refuse(root, &wish, exists))
    }

    /// The devices that match `spec` and have kernels for all needed members of the set, best first. Members that are not
    /// needed now are heeded if that leaves a choice.
    fn candidates(&self, root: NodeId, spec: &DeviceSpec) -> Vec<usize> {
        let Members { needed, others } = &self.members[&root];
        let runs = |ids: &[NodeId], device: usize| ids.iter().all(|&id| self.runs_on(id, device));
        let matching = self.order.iter().copied().filter(|&device| spec.matches(&self.devices[device].name));
        let able: Vec<usize> = matching.filter(|&device| runs(needed, device)).collect();
        let best: Vec<usize> = able.iter().copied().filter(|&device| runs(others, device)).collect();
        if best.is_empty() { able } else { best }
    }

    fn runs_on(&self, id: NodeId, device: usize) -> bool {
        self.support.has_kernel(self.nodes.node(id), &self.devices[device].name)
    }

    fn device(&self, id: NodeId) -> Option<usize> {
        self.placement[id.index()].as_ref().map(|placed| placed.device)
    }

    /// For ops that only look at the shape of their input: where that is.
    fn input_device(&self, id: NodeId) -> Option<usize> {
        match (self.nodes.node(id).def.work, &self.nodes.node(id).inputs[..]) {
            (Work::Measures, [at]) => self.device(at.node),
            _ => None,
        }
    }

    fn consumers(&self, needed: &[NodeId]) -> HashMap<NodeId, Vec<NodeId>> {
        let mut consumers: HashMap<NodeId, Vec<NodeId>> = HashMap::new();
        for &id in needed {
            let node = self.nodes.node(id);
            for input in node.inputs.iter().map(|at| at.node).chain(node.control_inputs.iter().copied()) {
                consumers.entry(input).or_default().push(id);
            }
        }
        consumers
    }

    /// The device that all consumers of a node are on, if it is one.
    fn consumer_device(&self, consumers: &HashMap<NodeId, Vec<NodeId>>, id: NodeId) -> Option<usize> {
        let mut devices = consumers.get(&id)?.iter().map(|&consumer| self.device(consumer));
        let first = devices.next()??;
        devices.all(|device| device == Some(first)).then_some(first)
    }

    /// Moves `Switch` and `Exit` to their data, as TensorFlow does before it partitions.
    fn move_loop_plumbing(&mut self, needed: &[NodeId]) {
        for &id in needed {
            let node = self.nodes.node(id);
            let alone = self.members[&self.sets.root(id)].needed.len() == 1;
            let moves = matches!(node.def.flow, Flow::Switch | Flow::Exit) && alone && !self.earlier.contains_key(&id);
            let Some(device) = node.inputs.first().filter(|_| moves).and_then(|at| self.device(at.node)) else {
                continue;
            };
            if self.device(id) != Some(device) && self.runs_on(id, device) {
                self.placement[id.index()] =
                    Some(Placed { device, wish: node.device.clone(), rule: Rule::FollowsInput, missed: None });
            }
        }
    }

    /// Why a set cannot be placed.
    fn refuse(&self, root: NodeId, wish: &Wish, exists: bool) -> Error {
        let needed = &self.members[&root].needed;
        let first = needed.first().copied().unwrap_or(root);
        if !exists {
            let id = wish.by.unwrap_or(first);
            let mut names: Vec<String> = self.devices.iter().map(|device| device.name.to_string()).collect();
            names.sort();
            let node = self.nodes.node(id);
            return self.cannot_assign(
                id,
                &format!(
                    "Could not satisfy explicit device specification '{spec}': {op} {{{{node {name}}}}} was explicitly \
                     assigned to {spec} but available devices are [ {devices} ]. Make sure the device specification \
                     refers to a valid device.{line}",
                    spec = wish.spec,
                    op = node.op(),
                    name = node.name,
                    devices = names.join(", "),
                    line = self.pin_line(wish)
                ),
            );
        }
        let matching: Vec<usize> =
            (0..self.devices.len()).filter(|&device| wish.spec.matches(&self.devices[device].name)).collect();
        let unable = |id: &&NodeId| !matching.iter().any(|&device| self.runs_on(**id, device));
        let Some(&id) = needed.iter().find(unable) else {
            let names: Vec<String> = needed.iter().map(|&id| self.nodes.node(id).describe()).collect();
            return Error::invalid_argument(format!(
                "Cannot colocate nodes {}: they must share a device, and no device{} has kernels for all of them",
                names.join(", "),
                match wish.spec.is_empty() {
                    true => String::new(),
                    false => format!(" that matches '{}'{}", wish.spec, self.pin_line(wish)),
                }
            ));
        };
        let node = self.nodes.node(id);
        let kernels = match self.support.kernels(node) {
            kernels if kernels.is_empty() => "none".to_owned(),
            kernels => kernels.join("; "),
        };
        let what = format!("{}{}", node.op(), node_dtype(node).map_or(String::new(), |dtype| format!(" of {dtype}")));
        if wish.spec.is_empty() {
            return self.cannot_assign(
                id,
                &format!(
                    "No OpKernel was registered to support Op '{}': no device here has a kernel for {what}; kernels \
                     exist for: {kernels}",
                    node.op()
                ),
            );
        }
        let able: Vec<String> = (0..self.devices.len())
            .filter(|&device| self.runs_on(id, device))
            .map(|device| self.devices[device].name.to_string())
            .collect();
        let able = if able.is_empty() { "none".to_owned() } else { able.join(", ") };
        let mut kinds: Vec<&str> = matching.iter().map(|&device| &*self.devices[device].name.kind).collect();
        kinds.sort_unstable();
        kinds.dedup();
        let shared = match wish.by {
            Some(by) if by != id => format!(", where it must be with '{}'", self.nodes.node(by).name),
            _ => String::new(),
        };
        self.cannot_assign(
            id,
            &format!(
                "Could not satisfy explicit device specification '{}'{shared} because no supported kernel for {} devices \
                 is available: {what} has kernels for: {kernels}; devices that can run it: {able}{}{}",
                wish.spec,
                kinds.join(" or "),
                self.float_hint(node, &matching),
                self.pin_line(wish)
            ),
        )
    }

    fn cannot_assign(&self, id: NodeId, why: &str) -> Error {
        let node = self.nodes.node(id);
        // What no device anywhere can run is ours to add; anything else is the graph's to change.
        let code = if self.support.kernels(node).is_empty() { Code::Unimplemented } else { Code::InvalidArgument };
        Error::new(code, format!("Cannot assign a device to node '{}': {why}", node.name)).with_node(
            &node.name,
            node.op(),
            &node.device.to_string(),
        )
    }

    /// ` (pinned at file:line)`, where that is known.
    fn pin_line(&self, wish: &Wish) -> String {
        wish.by.map_or(String::new(), |by| self.nodes.node(by).pinned_at())
    }

    /// An integer literal where a float was meant is the usual reason for a missing kernel.
    fn float_hint(&self, node: &Node, matching: &[usize]) -> &'static str {
        if node_dtype(node) != Some(DType::I32) {
            return "";
        }
        let mut float = node.clone();
        for attr in ["T", "dtype"] {
            if matches!(node.attrs.find(attr), Some(AttrValue::Type(DType::I32))) {
                float.attrs.set(attr, DType::F32);
            }
        }
        let helps = matching.iter().any(|&device| self.support.has_kernel(&float, &self.devices[device].name));
        if helps { "; a literal such as 3 is int32, write 3.0 for float, which has a kernel there" } else { "" }
    }

    fn too_many_fallbacks(&self, needed: &[NodeId], most: usize) -> Error {
        let names: Vec<String> = needed
            .iter()
            .filter_map(|&id| {
                let placed = self.placement[id.index()].as_ref()?;
                let fell_back = !placed.wish.matches(&self.devices[placed.device].name);
                let node = self.nodes.node(id);
                fell_back.then(|| format!("'{}' from '{}'{}", node.name, placed.wish, node.pinned_at()))
            })
            .take(10)
            .collect();
        Error::failed_precondition(format!(
            "{} nodes fell back to another device, at most {most} may: {}",
            self.n_fallbacks,
            names.join(", ")
        ))
    }
}

/// Why a node that holds state on `at` does not follow a pin (`line` says where that stands) to `wish`, and how to move it.
pub fn state_stays(node: &Node, wish: &DeviceSpec, line: &str, at: &DeviceName) -> Error {
    let how = match is_variable(node) {
        true => format!("to move it, call session.local()?.move_node(\"{}\", \"{wish}\") between runs", node.name),
        false => format!("what a {} holds does not move: make a new session to place it anew", node.op()),
    };
    Error::failed_precondition(format!(
        "'{}' is pinned to '{wish}'{line}, but it holds state on {at} since an earlier run; {how}",
        node.name
    ))
}

/// A value out of nothing, which can as well be made where it is used.
fn is_generator(node: &Node) -> bool {
    node.inputs.is_empty() && node.outputs.len() == 1 && !node.outputs[0].is_ref
}

/// The element type that a node's kernel is chosen by.
pub(crate) fn node_dtype(node: &Node) -> Option<DType> {
    let of = |attr| match node.attrs.find(attr) {
        Some(AttrValue::Type(dtype)) => Some(*dtype),
        _ => None,
    };
    of("T").or_else(|| of("dtype")).or_else(|| node.outputs.first().map(|output| output.dtype))
}

mod by_cost;

#[cfg(test)]
mod tests;
