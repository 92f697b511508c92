//! Outlining: some nodes of a graph become a graph of their own, and one node stands in their place.
//!
//! ```text
//! y = Add(Neg(Exp(x)), x)     outline([Exp, Neg])     s = _KoloSegment(x)      body:  exp = Exp(<feed 0>)
//!                                                     y = Add(s, x)                   neg = Neg(exp)
//!                                                                                     fetch 0 is neg
//! ```

use std::collections::{HashMap, HashSet};

use kolo_core::{DType, DeviceSpec, Error, Result};

use super::Rewriter;
use crate::{Attrs, Endpoint, Node, NodeId, Nodes, OpDef, OpRegistry, OutputInfo, Partition};

/// The graph that [`Rewriter::outline`] takes out. Its feeds are the inputs of the node in its place, its fetches the outputs, by
/// number.
pub struct Outlined {
    /// The node in its place.
    pub node: NodeId,
    /// The nodes, in the order in which they were given, each after what it shares with others.
    pub nodes: Nodes,
    /// For each feed, by number: the nodes and inputs that it goes to.
    pub feeds: Vec<(usize, Vec<(NodeId, usize)>)>,
    /// For each fetch, by number: the output.
    pub fetches: Vec<(usize, Endpoint)>,
}

/// Changes a part after its plan was made, for what only shows in its first runs. The part is checked as after a pass. `fresh`
/// gives numbers as for [`partition`](crate::partition).
pub fn rewrite_part<R>(
    part: &Partition,
    registry: &OpRegistry,
    fresh: &mut dyn FnMut() -> u64,
    change: impl FnOnce(&mut Rewriter<'_>) -> Result<R>,
) -> Result<(Partition, R)> {
    let mut rewriter = Rewriter::of_part(part, part.nodes.trainings(), registry, fresh);
    let result = change(&mut rewriter)?;
    rewriter.check()?;
    Ok((rewriter.into_part(part)?, result))
}

impl Rewriter<'_> {
    /// Takes `region`, which is in topological order, out of the graph, and puts a node of this op in its place. The op takes
    /// and gives lists of tensors (`Tin`, `Tout`). Nodes outside that `is_shared` accepts are copied into the new graph where
    /// it reads them, with what they read in turn, instead of being inputs; control edges from them are dropped. The caller
    /// must know that nothing outside lies between two nodes of the region; the check at the end finds a cycle otherwise.
    pub fn outline(
        &mut self,
        region: &[NodeId],
        is_shared: &dyn Fn(NodeId) -> bool,
        op: &OpDef,
        name: &str,
    ) -> Result<Outlined> {
        let is_inside: HashSet<NodeId> = region.iter().copied().collect();
        let outputs = self.outputs_of(region, &is_inside);
        let mut body = Body { nodes: Nodes::default(), copies: HashMap::new(), inputs: Vec::new(), feeds: Vec::new() };
        let mut awaited: Vec<NodeId> = Vec::new();
        for &id in region {
            let missing = || Error::invalid_argument(format!("node {id:?} is not in the graph"));
            let mut node = Node::clone(self.node(id).ok_or_else(missing)?);
            let mut fed = Vec::new();
            for (i, at) in node.inputs.iter_mut().enumerate() {
                let is_feed = at.feed().is_some();
                if !is_feed && is_inside.contains(&at.node) {
                    let missing = || Error::internal(format!("'{}' comes before its input", self.nodes.node(id).name));
                    at.node = *body.copies.get(&at.node).ok_or_else(missing)?;
                } else if !is_feed && is_shared(at.node) {
                    at.node = self.share(at.node, &mut body)?;
                } else {
                    let feed = body.feed(*at);
                    fed.push((feed, i));
                    *at = Endpoint::from_feed(feed as u32);
                }
            }
            let mut inside = Vec::new();
            for before in &node.control_inputs {
                match body.copies.get(before) {
                    Some(copy) if is_inside.contains(before) => inside.push(*copy),
                    _ if is_shared(*before) => {}
                    _ => awaited.push(*before),
                }
            }
            node.control_inputs = inside;
            let copy = body.nodes.push(node);
            body.copies.insert(id, copy);
            fed.into_iter().for_each(|(feed, i)| body.feeds[feed].1.push((copy, i)));
        }
        awaited.sort_unstable();
        awaited.dedup();
        let node = self.stand_in(region, (&body.inputs, &outputs, awaited), op, name)?;
        for (i, &at) in outputs.iter().enumerate() {
            self.redirect(at, Endpoint { node, index: i as u32 })?;
        }
        self.merge_all(region, node);
        let place = |(i, at): (usize, &Endpoint)| {
            let missing = || Error::internal("an output of a node that is not in the region");
            Ok((i, Endpoint { node: *body.copies.get(&at.node).ok_or_else(missing)?, ..*at }))
        };
        let fetches = outputs.iter().enumerate().map(place).collect::<Result<_>>()?;
        Ok(Outlined { node, nodes: body.nodes, feeds: body.feeds, fetches })
    }

    /// The outputs that are needed outside, sorted.
    fn outputs_of(&self, region: &[NodeId], is_inside: &HashSet<NodeId>) -> Vec<Endpoint> {
        let mut outputs: HashSet<Endpoint> = HashSet::new();
        outputs.extend(self.fetches.iter().map(|(_, at)| *at).filter(|at| is_inside.contains(&at.node)));
        let users = region.iter().flat_map(|id| &self.users[id.index()]).filter(|user| !is_inside.contains(user));
        for user in users {
            outputs.extend(self.nodes.node(*user).inputs.iter().filter(|at| is_inside.contains(&at.node)));
        }
        let mut outputs: Vec<Endpoint> = outputs.into_iter().collect();
        outputs.sort_unstable();
        outputs
    }

    /// The node in the place of a region.
    fn stand_in(
        &mut self,
        region: &[NodeId],
        (inputs, outputs, control_inputs): (&[Endpoint], &[Endpoint], Vec<NodeId>),
        op: &OpDef,
        name: &str,
    ) -> Result<NodeId> {
        let outputs: Vec<OutputInfo> = outputs.iter().map(|at| self.nodes.output(*at).clone()).collect();
        let mut attrs = Attrs::default();
        // Of what is fed nothing is known.
        let dtypes = |at: &Endpoint| at.feed().is_none().then(|| self.nodes.output(*at).dtype);
        if let Some(dtypes) = inputs.iter().map(dtypes).collect::<Option<Vec<DType>>>() {
            attrs.set("Tin", dtypes.as_slice());
        }
        attrs.set("Tout", outputs.iter().map(|output| output.dtype).collect::<Vec<DType>>().as_slice());
        let first = region.first().and_then(|id| self.node(*id)).cloned();
        let name = self.fresh_name(name).into();
        Ok(self.push(Node {
            name,
            def: *op,
            ref_inputs: vec![false; inputs.len()],
            inputs: inputs.to_vec(),
            control_inputs,
            attrs,
            device: first.as_ref().map_or_else(DeviceSpec::default, |node| node.device.clone()),
            outputs,
            source: first.and_then(|node| node.source.clone()),
            device_source: None,
            unknown: None,
        }))
    }

    /// The copy in a body of a node that others use too.
    fn share(&self, id: NodeId, body: &mut Body) -> Result<NodeId> {
        if let Some(&known) = body.copies.get(&id) {
            return Ok(known);
        }
        let missing = || Error::invalid_argument(format!("node {id:?} is not in the graph"));
        let mut node = Node::clone(self.node(id).ok_or_else(missing)?);
        for at in &mut node.inputs {
            at.node = self.share(at.node, body)?;
        }
        node.control_inputs.clear();
        let copy = body.nodes.push(node);
        body.copies.insert(id, copy);
        Ok(copy)
    }
}

/// A graph while it is taken out.
struct Body {
    nodes: Nodes,
    /// The copy of each node.
    copies: HashMap<NodeId, NodeId>,
    /// What it reads from outside, by number.
    inputs: Vec<Endpoint>,
    feeds: Vec<(usize, Vec<(NodeId, usize)>)>,
}

impl Body {
    /// The number of an output from outside.
    fn feed(&mut self, at: Endpoint) -> usize {
        self.inputs.iter().position(|known| *known == at).unwrap_or_else(|| {
            self.inputs.push(at);
            self.feeds.push((self.inputs.len() - 1, Vec::new()));
            self.inputs.len() - 1
        })
    }
}
