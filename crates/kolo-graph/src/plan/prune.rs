//! Prune: keeps the nodes that a run needs. A feed replaces one output, so it cuts the edges out of that output and
//! leaves the node's other outputs alone.
//!
//! Relies on edges that exist; promises that what it returns has no cycle except through the `NextIteration` → `Merge`
//! edges of loops, so that the stages after it can walk the nodes in order.

use std::collections::HashMap;

use kolo_core::{Error, Result};

use crate::op::unknown::with_nearest;
use crate::rewrite::order::topological_order;
use crate::wire::functions::{CALL_MARK, is_call};
use crate::{Endpoint, Flow, Node, NodeId, Nodes, OpRegistry, Work};

/// What a run asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Request {
    /// Outputs whose values the caller gives.
    pub feeds: Vec<Endpoint>,
    /// Outputs whose values the caller wants; one may be asked for twice.
    pub fetches: Vec<Endpoint>,
    /// Nodes that should run, whatever they give.
    pub targets: Vec<NodeId>,
}

/// The nodes a run needs, feeds cutting edges.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pruned {
    /// The nodes, sorted.
    pub nodes: Vec<NodeId>,
    /// As in the request.
    pub feeds: Vec<Endpoint>,
    /// As in the request.
    pub fetches: Vec<Endpoint>,
    /// As in the request.
    pub targets: Vec<NodeId>,
}

impl Pruned {
    /// Which feed gives the value of this output, if one does. A fetch of a fed output is answered with it.
    pub fn feed_of(&self, at: Endpoint) -> Option<usize> {
        self.feeds.iter().position(|&feed| feed == at)
    }

    /// Whether the run needs this node.
    pub fn contains(&self, id: NodeId) -> bool {
        self.nodes.binary_search(&id).is_ok()
    }
}

/// The nodes that `request` needs. `InvalidArgument` if it asks for nothing, feeds an output twice, fetches from an op
/// without outputs, feeds an output that is used as a reference, or meets a cycle outside of loops; `NotFound` if it
/// names a node that is not in the graph.
pub fn prune(nodes: &Nodes, request: &Request) -> Result<Pruned> {
    if request.fetches.is_empty() && request.targets.is_empty() {
        return Err(Error::invalid_argument("Must specify at least one target to fetch or execute."));
    }
    let feeds = Feeds::new(nodes, &request.feeds)?;
    let mut wanted = Vec::new();
    for &at in &request.fetches {
        check_endpoint(nodes, at, "fetch")?;
        if !feeds.has(at) {
            wanted.push(at.node);
        }
    }
    for &id in &request.targets {
        check_node(nodes, id, "target")?;
        if !feeds.satisfies(nodes, id) {
            wanted.push(id);
        }
    }

    let mut needed = vec![false; nodes.len()];
    while let Some(id) = wanted.pop() {
        if std::mem::replace(&mut needed[id.index()], true) {
            continue;
        }
        let node = nodes.node(id);
        for (i, &at) in node.inputs.iter().enumerate() {
            if !feeds.has(at) {
                wanted.push(at.node);
            } else if node.ref_inputs.get(i).copied().unwrap_or(false) {
                return Err(Error::invalid_argument(format!(
                    "'{}' is fed, but {} takes it as a reference to a variable, which a fed value is not",
                    nodes.endpoint_name(at),
                    node.describe()
                )));
            }
        }
        wanted.extend(node.control_inputs.iter().filter(|&&control| !feeds.satisfies(nodes, control)));
    }
    let needed: Vec<NodeId> = nodes.iter().map(|(id, _)| id).filter(|id| needed[id.index()]).collect();
    if let Some(call) = needed.iter().map(|&id| nodes.node(id)).find(|node| is_call(node.op())) {
        return Err(Error::unimplemented(format!(
            "{} calls functions and was not written out as plain nodes; import the graph with Calls::Lower",
            call.describe()
        )));
    }
    if let Err(cycle) = needed_order(nodes, &needed, &feeds) {
        return Err(describe_cycle(nodes, &cycle));
    }
    Ok(Pruned {
        nodes: needed,
        feeds: request.feeds.clone(),
        fetches: request.fetches.clone(),
        targets: request.targets.clone(),
    })
}

/// `NotFound` if `needed` has a node whose op is not in the table; names the ops that are most like it.
pub(crate) fn refuse_unknown(nodes: &Nodes, needed: &[NodeId], registry: &OpRegistry) -> Result<()> {
    let unknown = |id: &NodeId| Some((nodes.node(*id), nodes.node(*id).unknown.as_ref()?));
    let Some((node, op)) = needed.iter().find_map(unknown) else { return Ok(()) };
    let mut others: Vec<&str> = needed.iter().filter_map(unknown).map(|(_, other)| other.op.as_str()).collect();
    others.sort_unstable();
    others.dedup();
    others.retain(|other| *other != op.op);
    let error = with_nearest(op.error(node), &op.op, registry);
    Err(match others.len() {
        0 => error,
        n => error.and(format_args!("; nor are {}", listed(&others[..n.min(8)], n))),
    })
}

fn listed(shown: &[&str], n: usize) -> String {
    let names: Vec<String> = shown.iter().map(|name| format!("'{name}'")).collect();
    match n - shown.len() {
        0 => format!("{} registered", names.join(", ")),
        more => format!("{} and {more} more registered", names.join(", ")),
    }
}

/// The outputs that are fed, for fast questions.
pub(crate) struct Feeds(HashMap<Endpoint, usize>);

impl Feeds {
    pub(crate) fn new(nodes: &Nodes, feeds: &[Endpoint]) -> Result<Feeds> {
        let mut map = HashMap::with_capacity(feeds.len());
        for (i, &at) in feeds.iter().enumerate() {
            check_endpoint(nodes, at, "feed")?;
            if nodes.node(at.node).attrs.find(CALL_MARK).is_some() {
                return Err(Error::invalid_argument(format!(
                    "'{}' cannot be fed: it is an output of a call, and its consumers take it from the function's body; \
                     feed the inputs of the call, or their consumers",
                    nodes.endpoint_name(at)
                )));
            }
            if map.insert(at, i).is_some() {
                return Err(Error::invalid_argument(format!(
                    "Endpoint \"{}\" fed more than once.",
                    nodes.endpoint_name(at)
                )));
            }
        }
        Ok(Feeds(map))
    }

    /// True for an output that is fed, and for what stands for a feed among the inputs of a part.
    pub(crate) fn has(&self, at: Endpoint) -> bool {
        at.feed().is_some() || self.0.contains_key(&at)
    }

    pub(crate) fn index(&self, at: Endpoint) -> Option<usize> {
        self.0.get(&at).copied()
    }

    /// True for a placeholder that is fed: it need not run, and nothing has to wait for it. Any other node may have
    /// effects, so whoever waits for it still does.
    pub(crate) fn satisfies(&self, nodes: &Nodes, id: NodeId) -> bool {
        is_placeholder(nodes.node(id)) && self.has(Endpoint { node: id, index: 0 })
    }
}

fn is_placeholder(node: &Node) -> bool {
    node.def.work == Work::Placeholder
}

fn check_node(nodes: &Nodes, id: NodeId, role: &str) -> Result<()> {
    if id.index() < nodes.len() {
        return Ok(());
    }
    Err(Error::not_found(format!("{role}: node {id:?} is not in the graph, which has {} nodes", nodes.len())))
}

fn check_endpoint(nodes: &Nodes, at: Endpoint, role: &str) -> Result<Endpoint> {
    check_node(nodes, at.node, role)?;
    let node = nodes.node(at.node);
    let n_outputs = node.outputs.len();
    if (at.index as usize) < n_outputs {
        return Ok(at);
    }
    if let Some(unknown) = &node.unknown {
        return Err(unknown.error(node));
    }
    let name = nodes.endpoint_name(at);
    Err(Error::invalid_argument(match n_outputs {
        0 => format!(
            "{role}: Tried to {role} data for '{name}', which produces no output; run {} as a target",
            node.name
        ),
        _ => format!("{role}: output index too large in '{name}', must be < {n_outputs}"),
    }))
}

/// True for the one kind of edge that may point backwards.
pub(crate) fn is_back_edge(nodes: &Nodes, from: NodeId, to: NodeId) -> bool {
    nodes.node(from).def.flow == Flow::NextIteration && nodes.node(to).def.flow == Flow::Merge
}

/// Where a node's data and control edges come from, fed ones and those that close loops left out.
pub(crate) fn forward_inputs<'a>(nodes: &'a Nodes, id: NodeId, feeds: &'a Feeds) -> impl Iterator<Item = NodeId> + 'a {
    let node = nodes.node(id);
    let data = node.inputs.iter().filter(move |&&at| !feeds.has(at) && !is_back_edge(nodes, at.node, id));
    let control = node.control_inputs.iter().copied().filter(move |&control| !feeds.satisfies(nodes, control));
    data.map(|at| at.node).chain(control)
}

/// `needed` (sorted) with every node after its inputs, otherwise in the order of their numbers; a cycle, each of whose
/// nodes needs the next, if there is one.
pub(crate) fn needed_order(nodes: &Nodes, needed: &[NodeId], feeds: &Feeds) -> Result<Vec<NodeId>, Vec<NodeId>> {
    // Nearly always so, and then there is nothing to build.
    if needed.iter().all(|&id| forward_inputs(nodes, id, feeds).all(|input| input < id)) {
        return Ok(needed.to_vec());
    }
    let position = |id: NodeId| needed.binary_search(&id).ok();
    let inputs: Vec<Vec<usize>> =
        needed.iter().map(|&id| forward_inputs(nodes, id, feeds).filter_map(position).collect()).collect();
    let ids = |order: Vec<usize>| order.into_iter().map(|i| needed[i]).collect();
    topological_order(&inputs).map(ids).map_err(ids)
}

/// The error for a cycle, each of whose nodes needs the next; shown in the direction in which values would go.
pub(crate) fn describe_cycle(nodes: &Nodes, cycle: &[NodeId]) -> Error {
    let names: Vec<String> =
        cycle.iter().chain(cycle.first()).rev().map(|&id| format!("'{}'", nodes.node(id).name)).collect();
    Error::invalid_argument(format!(
        "the graph has a cycle that is not a loop (only NextIteration to Merge may point backwards): {}",
        names.join(" -> ")
    ))
}

#[cfg(test)]
mod tests {
    use kolo_core::Code;

    use super::*;
    use crate::Graph;
    use crate::testing::{graph, while_loop};

    /// Prunes with `feeds | fetches | targets`, each a list of names, and compares the names that are left.
    fn check(g: &Graph, request: &str, expect: &str) {
        let nodes = g.snapshot();
        let pruned = prune(&nodes, &read(&nodes, request)).unwrap();
        let names: Vec<&str> = pruned.nodes.iter().map(|&id| &*nodes.node(id).name).collect();
        assert_eq!(names.join(" "), expect, "{request}");
    }

    fn check_fails(g: &Graph, request: &str, code: Code, expect: &str) {
        let nodes = g.snapshot();
        let error = prune(&nodes, &read(&nodes, request)).unwrap_err();
        assert_eq!(error.code(), code, "{error}");
        assert!(error.message().contains(expect), "{error}");
    }

    fn read(nodes: &Nodes, request: &str) -> Request {
        let mut parts = request.split('|').map(|part| part.split_whitespace());
        let mut endpoints = || -> Vec<Endpoint> {
            let part = parts.next().unwrap();
            part.map(|name| match nodes.endpoint(name) {
                Ok(at) => at,
                Err(_) => Endpoint { node: nodes.find(name).unwrap_or(NodeId(999)), index: 0 },
            })
            .collect()
        };
        let (feeds, fetches) = (endpoints(), endpoints());
        let targets = parts.next().unwrap().map(|name| nodes.require(name).unwrap()).collect();
        Request { feeds, fetches, targets }
    }

    /// x, init → a = Add(x, c) → (s:0, s:1) = Two(a); y = Neg(s:1) after x and init.
    fn sample() -> Graph {
        let g = graph();
        {
            let x = g.op("Placeholder").name("x").out();
            let init = g.op("NoOp").name("init").build();
            let c = g.op("Source").name("c").out();
            let a = g.op("Add").name("a").input(x).input(c).out();
            let s = g.op("Two").name("s").input(a).build();
            let y = g.op("Neg").name("y").input(s.output(1)).control_input(x.operation()).control_input(init);
            y.build();
        }
        g.check().unwrap();
        g
    }

    #[test]
    fn only_what_is_needed_stays() {
        let g = sample();
        check(&g, "|a|", "x c a");
        check(&g, "| y |", "x init c a s y");
        check(&g, "||init", "init");
        check(&g, "| a a | c", "x c a");
    }

    #[test]
    fn a_feed_replaces_one_output_not_the_node() {
        let g = sample();
        check(&g, "a | y |", "x init s y");
        check(&g, "s:1 | y |", "x init y");
        check(&g, "s:0 | y |", "x init c a s y");
        check(&g, "s:1 | y s:0 |", "x init c a s y");
    }

    #[test]
    fn nothing_waits_for_a_fed_placeholder() {
        let g = sample();
        check(&g, "x | y |", "init c a s y");
        check(&g, "x s:1 | y |", "init y");
        check(&g, "x | | x init", "init");
    }

    #[test]
    fn a_fed_output_can_be_fetched_without_its_node() {
        let g = sample();
        check(&g, "a | a |", "");
        let nodes = g.snapshot();
        let request = read(&nodes, "a | a |");
        assert_eq!(prune(&nodes, &request).unwrap().feed_of(request.fetches[0]), Some(0));
    }

    #[test]
    fn bad_requests_are_named() {
        let g = sample();
        check_fails(&g, "x||", Code::InvalidArgument, "Must specify at least one target to fetch or execute.");
        check_fails(&g, "x x|a|", Code::InvalidArgument, "Endpoint \"x:0\" fed more than once.");
        check_fails(&g, "|init|", Code::InvalidArgument, "'init:0', which produces no output");
        check_fails(&g, "init|a|", Code::InvalidArgument, "'init:0', which produces no output");
        check_fails(&g, "|nothing|", Code::NotFound, "#999 is not in the graph");
        let nodes = g.snapshot();
        let far = Endpoint { node: nodes.find("s").unwrap(), index: 2 };
        let error = prune(&nodes, &Request { fetches: vec![far], ..Request::default() }).unwrap_err();
        assert!(error.message().contains("output index too large in 's:2', must be < 2"), "{error}");
    }

    #[test]
    fn a_reference_cannot_be_fed() {
        let g = graph();
        let v = g.op("Var").name("v").out();
        let c = g.op("Source").out();
        g.op("Assign").name("assign").input(v).input(c).build();
        check(&g, "v | |v", "v");
        check_fails(&g, "v || assign", Code::InvalidArgument, "takes it as a reference");
    }

    #[test]
    fn loops_are_not_cycles_and_cycles_are_named() {
        let g = while_loop("", "");
        check(&g, "|exit|", "zero enter merge less cond switch add next exit");

        let g = graph();
        let c = g.op("Source").name("c").out();
        let a = g.op("Neg").name("a").input(c).out();
        let b = g.op("Neg").name("b").input(a).out();
        g.op("Neg").name("d").input(b).build();
        let mut nodes = g.snapshot();
        nodes.node_mut(a.operation().id()).control_inputs.push(b.operation().id());
        let error = prune(&nodes, &read(&nodes, "|d|")).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(
            error.message().ends_with("'b' -> 'a' -> 'b'") || error.message().ends_with("'a' -> 'b' -> 'a'"),
            "{error}"
        );
        // A feed that cuts the cycle makes it harmless.
        let pruned = prune(&nodes, &read(&nodes, "b | d |")).unwrap();
        assert_eq!(pruned.nodes, [nodes.find("d").unwrap()]);
    }
}
