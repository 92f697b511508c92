//! Finds the nodes of a plan that can be captured together when the whole plan cannot be captured.
//!
//! There are three kinds of nodes. A *free* node (a constant, the handle of a variable) is added to every segment
//! that uses it. A node that is *apart* cannot be captured and runs as usual: it waits, has state, is control flow,
//! may be skipped, or reads a host value that may differ in the next run. All other nodes can be captured. Each of
//! those gets a segment number: the smallest that is not less than the numbers of the segments it depends on, and
//! greater than those before every apart node it depends on. So segment 0 runs before the apart nodes that depend on
//! it, these run before segment 1, and so on; there are no cycles.
//!
//! Updates of variables go to the last segment whose nodes still read the old value, so that they need not copy it.
//!
//! A segment whose values other devices wait for is cut in two: what is sent is computed first, so that the other device
//! begins while the rest runs. Otherwise it would be sent when all of the segment is enqueued, and copied when all of it
//! is done: two towers that share variables would run one after the other.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use kolo_core::{DType, DeviceName, Result};
use kolo_graph::{
    BranchNode, Endpoint, Flow, Frames, Node, NodeId, Nodes, Partition, TransferEnd, TransferRound, Work, is_variable,
    skipped_nodes, topological_order,
};
use kolo_ops::comm::transfer::edge_key;
use kolo_ops::{find_kernel, host_arguments};

use crate::compile::part::{PartPlan, PlanKernel, loops_of};

/// A segment of fewer launches than this is not worth a capture.
const FEWEST_LAUNCHES: usize = 4;

/// The maximum number of rounds in which updates are moved to later segments.
const MOST_ROUNDS: usize = 8;

/// Why a node cannot be captured, by its number; `None` for the others.
pub(super) type Apart = Vec<Option<String>>;

/// The nodes of each segment in topological order, and why other nodes are in none.
pub(super) struct Segments {
    pub list: Vec<Vec<usize>>,
    /// For each segment, nodes that run before it though it does not depend on them: their values are sent.
    pub gives_way_to: Vec<Vec<usize>>,
    pub apart: Apart,
    /// Nodes that are added to every segment that uses them.
    pub free: Vec<bool>,
}

/// A part of a plan, and its GPU, if it has one.
pub(super) struct PartOf<'a> {
    pub part: &'a Partition,
    pub plan: &'a PartPlan,
    pub gpu: Option<&'a DeviceName>,
}

/// Finds the segments of all parts that are on GPUs. Takes into account how they depend on the nodes of other parts.
/// `refused` names nodes that could not be captured after all. `None` if the parts have no topological order.
pub(super) fn segments(parts: &[PartOf<'_>], refused: &HashMap<String, String>) -> Result<Option<Vec<Segments>>> {
    // All nodes of all parts in one list.
    let mut starts = Vec::with_capacity(parts.len());
    let mut waits: Vec<Vec<usize>> = Vec::new();
    for of in parts {
        let start = waits.len();
        starts.push(start);
        let nodes = &of.part.nodes;
        waits.extend(nodes.iter().map(|(id, _)| before(nodes, id).into_iter().map(|i| start + i).collect()));
    }
    let all = || parts.iter().zip(&starts).flat_map(|(of, start)| of.part.nodes.iter().map(move |node| (start, node)));
    // A receive depends on its send, in the same part or in another one.
    let mut senders: HashMap<Arc<str>, Vec<usize>> = HashMap::new();
    let mut sent: Vec<(usize, &Node)> = Vec::new();
    for (start, (id, node)) in all().filter(|(_, (_, node))| node.sends()) {
        senders.entry(edge_key(&node.attrs)?).or_default().push(start + id.index());
        sent.push((start + id.index(), node));
    }
    let is_clients = |node: &Node| node.attrs.bool("client_terminated").unwrap_or(false);
    let (mut received, mut from_others) = (HashSet::new(), Vec::new());
    for (start, (id, node)) in all().filter(|(_, (_, node))| node.receives()) {
        let i = start + id.index();
        match senders.get(&edge_key(&node.attrs)?) {
            Some(senders) => {
                waits[i].extend(senders);
                received.extend(senders.iter().copied());
            }
            None if is_clients(node) => {}
            None => from_others.push((i, TransferRound::of(node))),
        }
    }
    // What other tasks send may depend on what they received in earlier rounds; the master says which. A transfer
    // that the master says nothing about may depend on every other, and every other on it. There is one barrier for
    // each round, and each depends on the one before.
    let to_others = sent.iter().filter(|(sender, node)| !received.contains(sender) && !is_clients(node));
    let mut by_round: BTreeMap<i64, Vec<usize>> = BTreeMap::new();
    for (sender, node) in to_others {
        by_round.entry(TransferRound::of(node).map_or(i64::MIN, |sent| sent.round)).or_default().push(*sender);
    }
    let mut barriers: BTreeMap<i64, usize> = BTreeMap::new();
    for (round, mut senders) in by_round {
        senders.extend(barriers.last_key_value().map(|(_, barrier)| *barrier));
        barriers.insert(round, waits.len());
        waits.push(senders);
    }
    for (i, round) in &from_others {
        let earlier = round.and_then(|round| barriers.range(..round.round).next_back());
        waits[*i].extend(earlier.map(|(_, barrier)| *barrier));
    }
    let is_uncertain = |round: &Option<TransferRound>| round.is_none_or(|round| round.is_conditional);
    let uncertain: HashSet<usize> =
        from_others.iter().filter(|(_, round)| is_uncertain(round)).map(|(i, _)| *i).collect();
    // The output of a loop may come from any iteration, so it depends on the loop's `NextIteration`s in all
    // parts.
    let loops = parts.iter().map(|of| loops_of(&of.part.nodes)).collect::<Result<Vec<Frames>>>()?;
    let in_loops = |flow: Flow| {
        let parts = parts.iter().zip(&loops).zip(&starts);
        parts.flat_map(move |((of, loops), start)| {
            let nodes = of.part.nodes.iter().filter(move |(_, node)| node.def.flow == flow);
            nodes.filter_map(move |(id, _)| Some((&*loops.frame(loops.of(id)?).name, start + id.index())))
        })
    };
    let mut turns: HashMap<&str, usize> = HashMap::new();
    for (name, next) in in_loops(Flow::NextIteration) {
        let barrier = *turns.entry(name).or_insert_with(|| {
            waits.push(Vec::new());
            waits.len() - 1
        });
        waits[barrier].push(next);
    }
    for (left, exit) in in_loops(Flow::Exit) {
        waits[exit].extend(turns.get(left));
    }
    let Ok(order) = topological_order(&waits) else { return Ok(None) };
    let (mut apart, mut free): (Apart, Vec<bool>) = (Vec::new(), Vec::new());
    let mut updates = Vec::new();
    for (i, (of, start)) in parts.iter().zip(&starts).enumerate() {
        let others = parts.iter().enumerate().filter(|(other, _)| *other != i);
        let may_skip = others
            .flat_map(|(_, other)| other.part.nodes.iter())
            .any(|(_, node)| matches!(node.def.flow, Flow::Switch | Flow::Enter));
        let local: Vec<usize> = local(&order, *start, of);
        let is_free = free_nodes(&of.part.nodes, of.plan, &local);
        let may_be_skipped =
            |id: NodeId| of.part.nodes.node(id).receives() && (may_skip || uncertain.contains(&(start + id.index())));
        apart.extend(apart_nodes(of, &loops[i], &local, &is_free, refused, &may_be_skipped));
        let readers = readers_before_updates(of.plan, &of.part.nodes, &is_free);
        let moved = |(update, readers): (usize, Vec<usize>)| {
            (start + update, readers.into_iter().map(|reader| start + reader).collect::<Vec<usize>>())
        };
        updates.extend(readers.into_iter().map(moved));
        free.extend(is_free);
    }
    // Barriers are not nodes; they pass on the level of their dependencies as apart nodes do.
    apart.resize(waits.len(), Some("it is a barrier".to_owned()));
    free.resize(waits.len(), false);
    let levels = levels(&order, &waits, &updates, (&apart, &free));
    let mut found = Vec::with_capacity(parts.len());
    for (of, &start) in parts.iter().zip(&starts) {
        let n = of.part.nodes.len();
        let (apart, free) = (apart[start..start + n].to_vec(), free[start..start + n].to_vec());
        let order = local(&order, start, of);
        let n_levels = levels.iter().map(|level| level + 1).max().unwrap_or(0).max(0) as usize;
        let mut by_level: Vec<Vec<usize>> = vec![Vec::new(); n_levels];
        for &i in order.iter().filter(|&&i| !free[i] && apart[i].is_none()) {
            by_level[levels[start + i].max(0) as usize].push(i);
        }
        let is_sent = sent_nodes(&of.part.nodes, &order, &levels[start..start + n]);
        let pays = |members: &[usize]| members.iter().filter(|&&i| launches(of.plan, i)).count() >= FEWEST_LAUNCHES;
        let (mut list, mut gives_way_to) = (Vec::new(), Vec::new());
        for members in by_level {
            let (first, rest): (Vec<usize>, Vec<usize>) = members.iter().partition(|&&i| is_sent[i]);
            // An update stays with the readers of the old value.
            let may_cut = !first.is_empty() && !first.iter().any(|&i| of.plan.nodes[i].is_late);
            let pieces = match may_cut && pays(&rest) {
                true => vec![(first.clone(), Vec::new()), (rest, first)],
                false => vec![(members, Vec::new())],
            };
            for (members, before) in pieces.into_iter().filter(|(members, _)| pays(members)) {
                list.push(members);
                gives_way_to.push(before);
            }
        }
        found.push(Segments { list, gives_way_to, apart, free });
    }
    Ok(Some(found))
}

/// The nodes that a send of the same level depends on, by way of nodes of that level.
fn sent_nodes(nodes: &Nodes, order: &[usize], levels: &[i32]) -> Vec<bool> {
    let mut is_sent = vec![false; nodes.len()];
    for &i in order.iter().rev() {
        let id = NodeId(i as u32);
        if is_sent[i] || nodes.node(id).def.transfer == Some(TransferEnd::Send) {
            before(nodes, id).into_iter().filter(|&at| levels[at] == levels[i]).for_each(|at| is_sent[at] = true);
        }
    }
    is_sent
}

/// The nodes of one part, by their local numbers, in the global order.
fn local(order: &[usize], start: usize, of: &PartOf<'_>) -> Vec<usize> {
    let nodes = start..start + of.part.nodes.len();
    order.iter().filter(|i| nodes.contains(i)).map(|i| i - start).collect()
}

/// Why nodes of a part cannot be captured; all of them if it is not on a GPU.
fn apart_nodes(
    of: &PartOf<'_>,
    loops: &Frames,
    order: &[usize],
    free: &[bool],
    refused: &HashMap<String, String>,
    may_be_skipped: &dyn Fn(NodeId) -> bool,
) -> Apart {
    let nodes = &of.part.nodes;
    let mut apart: Apart = vec![None; nodes.len()];
    let Some(gpu) = of.gpu else {
        apart.fill(Some("it is on another device".to_owned()));
        return apart;
    };
    let skipped = skipped(nodes, order, may_be_skipped);
    for &i in order.iter().filter(|&&i| !free[i]) {
        let (id, name) = (NodeId(i as u32), &nodes.node(NodeId(i as u32)).name);
        apart[i] = match refused.get(&**name) {
            Some(why) => Some(why.clone()),
            None if loops.input_frame(nodes, id).is_some() => Some("it is in a loop".to_owned()),
            None if skipped[i] => Some("it may be skipped".to_owned()),
            None => refusal(of.part, of.plan, gpu, id, (&apart, free)),
        };
    }
    // A replay does not send: only a value that is received in the same capture may be sent in it.
    for (id, _) in nodes.iter().filter(|(_, node)| node.def.transfer == Some(TransferEnd::HostSend)) {
        let receives = |&(_, other): &(NodeId, &Arc<Node>)| {
            other.control_inputs.contains(&id) && other.def.transfer == Some(TransferEnd::Recv)
        };
        let is_received = nodes.iter().filter(receives).any(|(other, _)| apart[other.index()].is_none());
        if !is_received && apart[id.index()].is_none() {
            apart[id.index()] = Some("it is a transfer".to_owned());
        }
    }
    apart
}

/// The nodes that a node depends on, except along the back edges of loops.
fn before(nodes: &Nodes, id: NodeId) -> Vec<usize> {
    let node = nodes.node(id);
    let is_forward = |at: &&Endpoint| at.feed().is_none() && nodes.node(at.node).def.flow != Flow::NextIteration;
    let data = node.inputs.iter().filter(is_forward).map(|at| at.node.index());
    data.chain(node.control_inputs.iter().map(|id| id.index())).collect()
}

/// Constants, handles and references of variables, and nodes that pass such a reference on. They compute nothing, and
/// their outputs are the same in every segment.
fn free_nodes(nodes: &Nodes, plan: &PartPlan, order: &[usize]) -> Vec<bool> {
    let mut free = vec![false; nodes.len()];
    for &i in order {
        let (node, kernel) = (nodes.node(NodeId(i as u32)), &plan.nodes[i].kernel);
        let is_source = match kernel {
            PlanKernel::Flow => node.def.work == Work::Constant,
            PlanKernel::Lend => node.inputs.iter().all(|at| at.feed().is_none() && free[at.node.index()]),
            _ => is_variable(node),
        };
        free[i] = is_source && node.control_inputs.is_empty();
    }
    free
}

/// Why a node that runs in every step cannot be captured.
fn refusal(
    part: &Partition,
    plan: &PartPlan,
    device: &DeviceName,
    id: NodeId,
    (apart, free): (&Apart, &[bool]),
) -> Option<String> {
    let nodes = &part.nodes;
    let (node, planned) = (nodes.node(id), &plan.nodes[id.index()]);
    let of_host = |node: &str| Some(format!("it reads what '{node}' gives to the host, which may change"));
    let Ok(kernel) = find_kernel(node, device) else {
        return Some("it has no kernel of its own".to_owned());
    };
    match node.def.transfer {
        Some(TransferEnd::HostSend) => {}
        Some(TransferEnd::Recv) => {
            // Its send node, which it depends on if both are in the same part.
            let key = node.attrs.find("tensor_name");
            let is_sender = |id: &NodeId| {
                let sender = nodes.node(*id);
                let is_of_host = sender.def.transfer == Some(TransferEnd::HostSend);
                is_of_host && apart[id.index()].is_none() && sender.attrs.find("tensor_name") == key
            };
            let is_near = node.control_inputs.len() == 1 && node.control_inputs.iter().all(is_sender);
            return (!is_near).then(|| "it waits for a value of the host".to_owned());
        }
        Some(_) => return Some("it is a transfer".to_owned()),
        None => {
            if let Some(why) = super::slot::refusal(planned) {
                return Some(format!("it {why}"));
            }
        }
    }
    let (on_host, _) = host_arguments(node, kernel);
    for (i, at) in node.inputs.iter().enumerate() {
        let is_on_host = on_host.get(i).copied().unwrap_or(true);
        if let Some(feed) = at.feed() {
            if is_on_host {
                return Some(format!("it reads feed {feed} on the host"));
            }
            continue;
        }
        let maker = nodes.node(at.node);
        if free[at.node.index()] {
            continue;
        }
        if nodes.output(*at).is_ref || plan.nodes[at.node.index()].lends {
            return Some(format!("it takes a reference from '{}'", maker.name));
        }
        if is_on_host && apart[at.node.index()].is_some() {
            return of_host(&maker.name);
        }
    }
    let is_seen = |index: usize| {
        let at = Endpoint { node: id, index: index as u32 };
        part.fetches.iter().any(|(_, fetch)| *fetch == at) || nodes.iter().any(|(_, user)| user.inputs.contains(&at))
    };
    let passes_on = node.outputs.iter().enumerate().find(|(index, output)| {
        (output.is_ref || matches!(output.dtype, DType::Resource | DType::Variant)) && is_seen(*index)
    });
    passes_on.map(|_| "it passes a reference or a handle on".to_owned())
}

/// The nodes that do not run in every step, because they depend on a `Switch`, here or in another task.
fn skipped(nodes: &Nodes, order: &[usize], may_be_skipped: &dyn Fn(NodeId) -> bool) -> Vec<bool> {
    let place = |at: Endpoint| at.feed().is_none().then_some((at.node.index(), at.index));
    let mut all: Vec<BranchNode<'_>> = Vec::with_capacity(nodes.len());
    for (id, node) in nodes.iter() {
        // A transfer within the part passes on the value that was sent.
        let sent = || {
            let sender = node.control_inputs.iter().map(|id| nodes.node(*id)).find(|node| node.sends())?;
            sender.inputs.first().copied()
        };
        let passed = if node.receives() { sent() } else { node.passed_on() };
        all.push(BranchNode {
            node,
            inputs: node.inputs.iter().copied().map(place).collect(),
            control: node.control_inputs.iter().map(|id| id.index()).collect(),
            passes_on: passed.and_then(place),
            may_be_skipped: may_be_skipped(id),
        });
    }
    skipped_nodes(&all, order)
}

/// The segment of every node that can be captured; for an apart node, the last segment before it. Nodes of other
/// parts are apart, so that their results are used in a later segment than the one that computed their inputs.
/// `updates` go after their readers.
fn levels(
    order: &[usize],
    before: &[Vec<usize>],
    updates: &[(usize, Vec<usize>)],
    (apart, free): (&Apart, &[bool]),
) -> Vec<i32> {
    let mut floor = vec![0; before.len()];
    let mut levels = vec![-1; before.len()];
    for _ in 0..MOST_ROUNDS {
        for &i in order.iter().filter(|&&i| !free[i]) {
            let of = |&&earlier: &&usize| !free[earlier];
            let step = |&earlier: &usize| levels[earlier] + i32::from(apart[earlier].is_some() && apart[i].is_none());
            let least = if apart[i].is_some() { -1 } else { floor[i] };
            levels[i] = before[i].iter().filter(of).map(step).max().unwrap_or(-1).max(least);
        }
        let mut is_settled = true;
        for (update, readers) in updates {
            let step = |&reader: &usize| levels[reader] + i32::from(apart[reader].is_some());
            let wanted = readers.iter().map(step).max().unwrap_or(0);
            if wanted > levels[*update] && apart[*update].is_none() {
                floor[*update] = wanted;
                is_settled = false;
            }
        }
        if is_settled {
            break;
        }
    }
    levels
}

/// For each update of a variable, the nodes that read its old value and do not depend on the update.
fn readers_before_updates(plan: &PartPlan, nodes: &Nodes, free: &[bool]) -> Vec<(usize, Vec<usize>)> {
    let mut users: Vec<Vec<usize>> = vec![Vec::new(); nodes.len()];
    for (id, node) in nodes.iter() {
        let data = node.inputs.iter().filter(|at| at.feed().is_none()).map(|at| at.node);
        data.chain(node.control_inputs.iter().copied()).for_each(|earlier| users[earlier.index()].push(id.index()));
    }
    let mut all = Vec::new();
    for (update, _) in plan.nodes.iter().enumerate().filter(|(_, node)| node.is_late) {
        let mut depends = vec![false; nodes.len()];
        let mut open = vec![update];
        while let Some(i) = open.pop() {
            if !std::mem::replace(&mut depends[i], true) {
                open.extend(&users[i]);
            }
        }
        let node = nodes.node(NodeId(update as u32));
        let variables = node.inputs.iter().filter(|at| at.feed().is_none() && free[at.node.index()]);
        let mut readers = Vec::new();
        for variable in variables.filter(|at| nodes.node(at.node).def.work != Work::Constant) {
            for &user in users[variable.node.index()].iter().filter(|&&user| !plan.nodes[user].is_late) {
                readers.push(user);
                readers.extend(users[user].iter().filter(|&&i| !plan.nodes[i].is_late));
            }
        }
        readers.retain(|&reader| !depends[reader] && !free[reader]);
        readers.sort_unstable();
        readers.dedup();
        all.push((update, readers));
    }
    all
}

/// Whether a node launches a kernel on the GPU.
fn launches(plan: &PartPlan, i: usize) -> bool {
    let node = &plan.nodes[i];
    let def = &node.node.def;
    let is_view = matches!(def.work, Work::PassesOn | Work::Reshapes | Work::Measures);
    !node.on_host && !is_view && def.transfer != Some(TransferEnd::HostSend)
}
