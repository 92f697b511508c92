//! Client ends: feeds and fetches as transfers, which is how a master brings values to tasks that are not its own.
//!
//! A feed `x:0` becomes a `_Recv` named `_recv_x_0` on the client's device, and its consumers read that; a fetch `y:0`
//! becomes a `_Send` named `_send_y_0`. They are nodes like others from then on, so partitioning carries their values on
//! to other tasks. A local session needs none of this: it hands values to partitions itself.

use std::collections::{BTreeMap, HashSet};

use kolo_core::{Error, Result};

use crate::plan::place::DeviceInfo;
use crate::plan::prune::{Feeds, Pruned};
use crate::{Attrs, Endpoint, Node, NodeId, Nodes, OpRegistry, OutputInfo};

/// The ends that a graph was given.
#[derive(Clone, Debug, Default)]
pub struct ClientEnds {
    /// For each feed, its `_Recv`; `None` if nothing needs the value.
    pub feeds: Vec<Option<NodeId>>,
    /// For each fetch, its `_Send`; an output that is fetched twice has one.
    pub fetches: Vec<NodeId>,
}

/// Replaces the feeds and fetches of a run by transfers with `client`: `nodes` and `pruned` become those of the same run with
/// nothing left to feed or fetch. Fails, as TensorFlow's masters do, if what is fed is fetched.
pub(crate) fn add_client_ends(
    nodes: &mut Nodes,
    pruned: &mut Pruned,
    registry: &OpRegistry,
    client: &DeviceInfo,
) -> Result<ClientEnds> {
    refuse_fed_fetches(nodes, pruned)?;
    let fed = Feeds::new(nodes, &pruned.feeds)?;
    let needed = || pruned.nodes.iter().map(|id| nodes.node(*id));
    let read: HashSet<Endpoint> = needed().flat_map(|node| node.inputs.iter().copied()).collect();
    let awaited: HashSet<NodeId> =
        needed().flat_map(|node| node.control_inputs.iter()).chain(&pruned.targets).copied().collect();
    let is_wanted = |at: &Endpoint| read.contains(at) || (fed.satisfies(nodes, at.node) && awaited.contains(&at.node));
    let wanted: Vec<bool> = pruned.feeds.iter().map(is_wanted).collect();
    let mut feeds = Vec::with_capacity(pruned.feeds.len());
    for (&at, is_wanted) in pruned.feeds.iter().zip(wanted) {
        if !is_wanted {
            feeds.push(None);
            continue;
        }
        let value = OutputInfo { is_ref: false, ..nodes.output(at).clone() };
        let mut node = end(nodes, registry, ("_Recv", "_recv_"), at, client)?;
        node.attrs.set("tensor_type", value.dtype);
        feeds.push(Some(nodes.push(Node { outputs: vec![value], ..node })));
    }

    let recv = |at: Endpoint| fed.index(at).and_then(|feed| feeds[feed]).map(|node| Endpoint { node, index: 0 });
    let value = |at: Endpoint| recv(at).unwrap_or(at);
    // Whoever waits for a placeholder that is fed waits for its value instead.
    let placeholders: HashSet<NodeId> =
        pruned.feeds.iter().map(|at| at.node).filter(|id| fed.satisfies(nodes, *id)).collect();
    let moment = |id: NodeId| match placeholders.contains(&id) {
        true => value(Endpoint { node: id, index: 0 }).node,
        false => id,
    };
    for &id in &pruned.nodes {
        let node = nodes.node(id);
        let inputs: Vec<Endpoint> = node.inputs.iter().map(|&at| value(at)).collect();
        let control_inputs: Vec<NodeId> = node.control_inputs.iter().map(|&id| moment(id)).collect();
        if inputs != node.inputs || control_inputs != node.control_inputs {
            let node = nodes.node_mut(id);
            (node.inputs, node.control_inputs) = (inputs, control_inputs);
        }
    }

    let mut sends: BTreeMap<Endpoint, NodeId> = BTreeMap::new();
    let mut fetches = Vec::with_capacity(pruned.fetches.len());
    for &at in &pruned.fetches {
        let send = match sends.get(&at) {
            Some(&send) => send,
            None => {
                let mut node = end(nodes, registry, ("_Send", "_send_"), at, client)?;
                node.attrs.set("T", nodes.output(at).dtype);
                nodes.push(Node { inputs: vec![at], ref_inputs: vec![false], ..node })
            }
        };
        sends.insert(at, send);
        fetches.push(send);
    }
    let targets = pruned.targets.iter().map(|&id| moment(id)).chain(sends.values().copied()).collect();
    let mut needed = std::mem::take(&mut pruned.nodes);
    needed.extend(feeds.iter().flatten().copied().chain(sends.into_values()));
    needed.sort_unstable();
    *pruned = Pruned { nodes: needed, targets, ..Pruned::default() };
    Ok(ClientEnds { feeds, fetches })
}

/// TensorFlow's servers refuse to fetch what is fed; a local session returns the fed value.
fn refuse_fed_fetches(nodes: &Nodes, pruned: &Pruned) -> Result<()> {
    match pruned.fetches.iter().find(|at| pruned.feeds.contains(at)) {
        Some(&at) => {
            let name = nodes.endpoint_name(at);
            Err(Error::invalid_argument(format!("Endpoint \"{name}\" is both fed and fetched.")))
        }
        None => Ok(()),
    }
}

/// One end of a transfer with the client; its value's dtype and its edges are still missing.
fn end(
    nodes: &Nodes,
    registry: &OpRegistry,
    (op, prefix): (&str, &str),
    at: Endpoint,
    client: &DeviceInfo,
) -> Result<Node> {
    let name = format!("{prefix}{}_{}", nodes.node(at.node).name, at.index);
    if nodes.find(&name).is_some() {
        return Err(Error::invalid_argument(format!("the graph has a node '{name}', a name that masters use")));
    }
    let mut attrs = Attrs::default();
    attrs.set("tensor_name", nodes.endpoint_name(at));
    attrs.set("send_device", client.name.to_string());
    attrs.set("recv_device", client.name.to_string());
    // The wire has no unsigned attribute: the same bits as a signed number.
    attrs.set("send_device_incarnation", client.incarnation as i64);
    attrs.set("client_terminated", true);
    Ok(Node {
        name: name.into(),
        def: *registry.find(op)?.0,
        inputs: Vec::new(),
        control_inputs: Vec::new(),
        attrs,
        device: client.name.spec(),
        outputs: Vec::new(),
        ref_inputs: Vec::new(),
        source: None,
        device_source: None,
        unknown: None,
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::testing::{Kernels, devices, graph, registry};
    use crate::{Granularity, PartitionOptions, PlaceOptions, Request, partition, place, prune};

    /// The run with client ends: the graph, what is needed of it, the ends.
    fn with_ends(g: &crate::Graph, request: &Request, client: &DeviceInfo) -> Result<(Nodes, Pruned, ClientEnds)> {
        let mut nodes = g.snapshot();
        let mut pruned = prune(&nodes, request)?;
        let ends = add_client_ends(&mut nodes, &mut pruned, registry(), client)?;
        Ok((nodes, pruned, ends))
    }

    /// The step of the specification's transcript: `v` and `up` on ps, `y = read + x` on worker, which is the master.
    #[test]
    fn a_step_across_two_tasks_is_cut_as_tensorflow_does() {
        let g = graph();
        let x = g.device("/job:worker", || g.op("Placeholder").name("x").out());
        let v = g.device("/job:ps", || g.op("Var").name("v").out());
        let read = g.device("/job:ps", || g.op("Identity").name("read").input(v).out());
        let y = g.device("/job:worker", || g.op("Add").name("y").input(read).input(x).out());
        let up = g.device("/job:ps", || g.op("Assign").name("up").input(v).input(y).out());
        let fetches = vec![y.endpoint(), up.endpoint(), y.endpoint()];
        let request = Request { feeds: vec![x.endpoint()], fetches, targets: vec![x.operation().id()] };
        let on = devices("/job:ps/cpu:0 /job:worker/cpu:0");
        let (nodes, pruned, ends) = with_ends(&g, &request, &on[1]).unwrap();
        assert_eq!(ends.fetches[0], ends.fetches[2]);
        let options = PlaceOptions { client_device: 1, ..PlaceOptions::default() };
        let placed = place(&nodes, &pruned.nodes, &on, &Kernels, &HashMap::new(), &options).unwrap();
        let options = PartitionOptions { granularity: Granularity::Task, ..PartitionOptions::default() };
        let mut counter = 0;
        let mut fresh = || {
            counter += 1;
            counter - 1
        };
        let parts = partition(&placed, &pruned, registry(), &options, &mut fresh).unwrap();
        let lines = |nodes: &Nodes| -> Vec<String> {
            let line = |(_, node): (NodeId, &std::sync::Arc<Node>)| {
                let inputs: Vec<String> = node.inputs.iter().map(|&at| nodes.endpoint_name(at)).collect();
                let key = node.attrs.str("tensor_name").unwrap_or("");
                format!("{} {}({}) {key}", node.name, node.op(), inputs.join(", ")).trim().to_owned()
            };
            nodes.iter().map(line).collect()
        };
        assert_eq!(
            lines(&parts[0].nodes),
            [
                "v Var()",
                "read Identity(v:0)",
                "read_S0 _Send(read:0) edge_0_read",
                "y_S3 _Recv() edge_1_y",
                "up Assign(v:0, y_S3:0)",
                "up_S4 _Send(up:0) edge_2_up",
            ]
        );
        assert_eq!(
            lines(&parts[1].nodes),
            [
                "read_S1 _Recv() edge_0_read",
                "_recv_x_0 _Recv() x:0",
                "y Add(read_S1:0, _recv_x_0:0)",
                "y_S2 _Send(y:0) edge_1_y",
                "_send_y_0 _Send(y:0) y:0",
                "up_S5 _Recv() edge_2_up",
                "_send_up_0 _Send(up_S5:0) up:0",
            ]
        );
        let recv = nodes.node(ends.feeds[0].unwrap());
        assert_eq!(recv.attrs.bool("client_terminated"), Ok(true));
        assert_eq!(recv.attrs.str("send_device"), Ok("/job:worker/replica:0/task:0/device:CPU:0"));
        assert_eq!(recv.attrs.str("recv_device"), Ok("/job:worker/replica:0/task:0/device:CPU:0"));
        assert_eq!(recv.attrs.int("send_device_incarnation"), Ok(2));
    }

    #[test]
    fn what_waits_for_a_fed_placeholder_waits_for_its_value() {
        let g = graph();
        let x = g.op("Placeholder").name("x").out();
        let end = g.op("NoOp").name("end").control_input(x.operation()).build();
        let request = Request { feeds: vec![x.endpoint()], targets: vec![end.id()], ..Request::default() };
        let (nodes, _, ends) = with_ends(&g, &request, &devices("/cpu:0")[0]).unwrap();
        assert_eq!(nodes.node(end.id()).control_inputs, [ends.feeds[0].unwrap()]);
    }

    #[test]
    fn fed_and_fetched_is_refused() {
        let g = graph();
        let x = g.op("Placeholder").name("x").out().endpoint();
        let request = Request { feeds: vec![x], fetches: vec![x], targets: vec![] };
        let error = with_ends(&g, &request, &devices("/cpu:0")[0]).err().unwrap();
        assert_eq!(error.message(), "Endpoint \"x:0\" is both fed and fetched.");
    }

    #[test]
    fn a_feed_that_nothing_needs_has_no_end() {
        let g = graph();
        let x = g.op("Placeholder").name("x").out();
        let y = g.op("Placeholder").name("y").out();
        let z = g.op("Neg").input(y).out();
        let request = Request { feeds: vec![x.endpoint(), y.endpoint()], fetches: vec![z.endpoint()], targets: vec![] };
        let (nodes, pruned, ends) = with_ends(&g, &request, &devices("/cpu:0")[0]).unwrap();
        assert!(ends.feeds[0].is_none() && ends.feeds[1].is_some());
        let names: Vec<&str> = pruned.nodes.iter().map(|id| &*nodes.node(*id).name).collect();
        assert_eq!(names, ["Neg", "_recv_y_0", "_send_Neg_0"]);
    }
}
