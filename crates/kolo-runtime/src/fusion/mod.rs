//! Fusion: nodes that together need less work or fewer passes over memory are put together before a part is compiled.
//!
//! | what, on a GPU | becomes |
//! | --- | --- |
//! | `MatMul`, `BiasAdd`, perhaps `Relu` | a product with an epilogue |
//! | `MatMul`, perhaps `BiasAdd`, the sum with a value of its size, perhaps `Relu` | a product on top of that value |
//! | `BiasAdd`, `Relu`, `MaxPool`, and their gradients | one pass over the images each |
//! | `MaxPoolGrad`, `ReluGrad` | one pass over the images |
//! | `KoloLayerNormGrad`, and what is added to its gradient | one pass over the rows |
//! | a cross entropy, and its backprop times the gradient of the loss | one kernel |
//! | a tree of elementwise ops, broadcasts and casts among them | one generated kernel |
//! | an elementwise op, or a tree, and the `BiasAddGrad` of its value | one generated kernel |
//! | a large `MatMul`, and gradient descent along it at a constant rate | a product on top of the variable |
//! | an optimizer's updates of many variables, and casts of their gradients | a few launches |
//!
//! | what, on a CPU | becomes |
//! | --- | --- |
//! | `MatMul`, the bias of its columns, perhaps `Relu` or `Sigmoid` | a product with an epilogue |
//! | `MatMul`, `ResourceApplyGradientDescent` | a product that is subtracted from the variable |
//!
//! A node disappears only if nobody outside of what it becomes part of sees its value. What is made has the name of the last of
//! its nodes. The graph is not changed: this is one part of one plan.

use std::collections::{HashMap, HashSet};

use kolo_core::DeviceName;
use kolo_graph::{AttrValue, Attrs, Endpoint, Flow, Node, NodeId, Nodes, OutputInfo, Partition};
use kolo_ops::{Op, find_kernel};

mod cpu;
mod layers;
mod pools;
mod trees;
mod updates;

/// A part with fewer nodes that computes the same, if there may be one. `device` is what it is for.
pub(crate) fn fuse(partition: &Partition, device: &DeviceName) -> Option<Partition> {
    // On a CPU all begins with a product, and most parts are not worth a copy.
    if &*device.kind != "GPU" && !partition.nodes.iter().any(|(_, node)| node.op() == "MatMul") {
        return None;
    }
    let passes: &[fn(&mut Work<'_>, &Uses)] = match &*device.kind {
        "GPU" => &[
            |work, uses| work.residuals(uses),
            |work, uses| work.products(uses),
            |work, uses| work.biased_pools(uses),
            |work, uses| work.pools(uses),
            |work, uses| work.losses(uses),
            |work, uses| work.norms(uses),
            |work, uses| work.trees(uses),
            |work, uses| work.bias_gradients(uses),
            |work, uses| work.product_updates(uses),
            |work, uses| work.updates(uses),
        ],
        _ => &[|work, uses| work.dense_layers(uses), |work, uses| work.descents(uses)],
    };
    let mut work = Work {
        nodes: partition.nodes.iter().map(|(_, node)| Some(Node::clone(node))).collect(),
        fetches: partition.fetches.clone(),
        moved: HashMap::new(),
        device,
    };
    for pass in passes {
        let uses = work.uses();
        pass(&mut work, &uses);
    }
    work.finish(partition)
}

struct Work<'a> {
    /// By number; those that became part of another are gone.
    nodes: Vec<Option<Node>>,
    fetches: Vec<(usize, Endpoint)>,
    /// What nodes that are gone became part of.
    moved: HashMap<NodeId, NodeId>,
    device: &'a DeviceName,
}

/// Who uses what.
struct Uses {
    data: HashMap<Endpoint, Vec<NodeId>>,
    /// Nodes that others wait for without taking a value.
    control: HashSet<NodeId>,
    fetched: HashSet<Endpoint>,
}

impl Uses {
    /// The only node that takes this output, if nothing else needs the output or its node.
    fn sole_user(&self, at: Endpoint) -> Option<NodeId> {
        match self.data.get(&at).map(Vec::as_slice) {
            Some(&[user]) if !self.fetched.contains(&at) && !self.control.contains(&at.node) => Some(user),
            _ => None,
        }
    }
}

fn first(node: NodeId) -> Endpoint {
    Endpoint { node, index: 0 }
}

/// A node that stands for `of`, the last of which is `root`.
fn made(op: &Op, root: &Node, of: &[&Node], inputs: Vec<Endpoint>, outputs: Vec<OutputInfo>, attrs: Attrs) -> Node {
    let mut control_inputs: Vec<NodeId> = of.iter().flat_map(|node| node.control_inputs.iter().copied()).collect();
    control_inputs.sort_unstable();
    control_inputs.dedup();
    Node {
        name: root.name.clone(),
        def: op.def,
        ref_inputs: vec![false; inputs.len()],
        inputs,
        control_inputs,
        attrs,
        device: root.device.clone(),
        outputs,
        source: root.source.clone(),
        device_source: root.device_source.clone(),
    }
}

fn is_nchw(node: &Node) -> bool {
    matches!(node.attrs.find("data_format"), Some(AttrValue::Str(format)) if &format[..] == b"NCHW")
}

impl Work<'_> {
    fn uses(&self) -> Uses {
        let mut uses = Uses {
            data: HashMap::new(),
            control: HashSet::new(),
            fetched: self.fetches.iter().map(|(_, at)| *at).collect(),
        };
        for (id, node) in self.iter() {
            node.inputs.iter().for_each(|&at| uses.data.entry(at).or_default().push(id));
            uses.control.extend(node.control_inputs.iter().map(|id| self.moved_to(*id)));
        }
        uses
    }

    fn iter(&self) -> impl DoubleEndedIterator<Item = (NodeId, &Node)> {
        self.nodes.iter().enumerate().filter_map(|(i, node)| Some((NodeId(i as u32), node.as_ref()?)))
    }

    fn ids(&self) -> Vec<NodeId> {
        self.iter().map(|(id, _)| id).collect()
    }

    fn node(&self, id: NodeId) -> Option<&Node> {
        self.nodes.get(id.index())?.as_ref()
    }

    /// The node that makes an input, if it has one of these ops.
    fn maker(&self, at: Endpoint, ops: &[&str]) -> Option<&Node> {
        self.node(at.node).filter(|node| ops.contains(&node.op()))
    }

    fn moved_to(&self, id: NodeId) -> NodeId {
        let mut id = id;
        while let Some(&to) = self.moved.get(&id) {
            id = to;
        }
        id
    }

    fn remove(&mut self, id: NodeId, into: NodeId) {
        self.nodes[id.index()] = None;
        self.moved.insert(id, into);
    }

    /// Makes all that read `from` read `to`.
    fn redirect(&mut self, from: Endpoint, to: Endpoint) {
        for node in self.nodes.iter_mut().flatten() {
            node.inputs.iter_mut().filter(|at| **at == from).for_each(|at| *at = to);
        }
        self.fetches.iter_mut().filter(|(_, at)| *at == from).for_each(|(_, at)| *at = to);
    }

    /// Whether a node runs a kernel of the part's device on values alone.
    fn is_plain(&self, node: &Node) -> bool {
        node.def.flow == Flow::Plain
            && !node.ref_inputs.contains(&true)
            && !node.inputs.iter().any(|at| self.is_reference(*at))
            && find_kernel(node, self.device).is_ok_and(|kernel| kernel.device == &*self.device.kind)
    }

    /// Whether an output is a reference to a variable, or one that an `Identity` lends.
    fn is_reference(&self, at: Endpoint) -> bool {
        let Some(maker) = self.node(at.node) else { return false };
        maker.outputs.get(at.index as usize).is_some_and(|output| output.is_ref)
            || (maker.op() == "Identity" && maker.inputs.iter().any(|at| self.is_reference(*at)))
    }

    /// Whether there is a way along edges of any kind from one node to another.
    fn reaches(&self, from: NodeId, to: NodeId) -> bool {
        self.any_reaches(&[from], to)
    }

    /// Whether there is a way from any of these nodes to `to`.
    fn any_reaches(&self, from: &[NodeId], to: NodeId) -> bool {
        let (mut seen, mut open) = (HashSet::new(), vec![to]);
        while let Some(id) = open.pop() {
            let id = self.moved_to(id);
            if from.contains(&id) {
                return true;
            }
            if let Some(node) = self.node(id).filter(|_| seen.insert(id)) {
                open.extend(node.inputs.iter().map(|at| at.node));
                open.extend(&node.control_inputs);
            }
        }
        false
    }

    /// The part anew, in an order in which inputs come first; `None` if there is none, which would be a mistake of ours.
    fn finish(&self, partition: &Partition) -> Option<Partition> {
        let n = self.nodes.len();
        // Edges that close loops point backwards.
        let closes = |at: &Endpoint| self.node(at.node).is_some_and(|node| node.def.flow == Flow::NextIteration);
        let before = |node: &Node| -> Vec<usize> {
            let data = node.inputs.iter().filter(|at| at.feed().is_none() && !closes(at)).map(|at| at.node.index());
            data.chain(node.control_inputs.iter().map(|id| self.moved_to(*id).index())).collect()
        };
        let mut new_id: Vec<Option<NodeId>> = vec![None; n];
        let mut order: Vec<usize> = Vec::with_capacity(n);
        // Depth first, without recursion: a node is done when all before it are.
        let mut is_open = vec![false; n];
        for start in (0..n).filter(|&i| self.nodes[i].is_some()) {
            let mut stack = vec![start];
            while let Some(&i) = stack.last() {
                if new_id[i].is_some() {
                    stack.pop();
                    continue;
                }
                let node = self.nodes.get(i)?.as_ref()?;
                let missing: Vec<usize> = before(node)
                    .into_iter()
                    .filter(|&b| b != i && new_id.get(b).is_some_and(Option::is_none))
                    .collect();
                if missing.is_empty() {
                    new_id[i] = Some(NodeId(order.len() as u32));
                    order.push(i);
                    stack.pop();
                } else if std::mem::replace(&mut is_open[i], true) {
                    // Back at a node whose inputs were all looked at, and they are not done: a circle.
                    return None;
                } else {
                    stack.extend(missing);
                }
            }
        }
        let renamed = |id: NodeId| new_id.get(id.index()).copied().flatten();
        let mut nodes = Nodes::default();
        let mut origin = Vec::with_capacity(order.len());
        let mut feeds: Vec<(usize, Vec<(NodeId, usize)>)> = Vec::new();
        for (new, &old) in order.iter().enumerate() {
            let mut node = self.nodes[old].clone()?;
            let id = NodeId(new as u32);
            for (i, at) in node.inputs.iter_mut().enumerate() {
                match at.feed() {
                    Some(feed) => match feeds.iter_mut().find(|(number, _)| *number == feed) {
                        Some((_, to)) => to.push((id, i)),
                        None => feeds.push((feed, vec![(id, i)])),
                    },
                    None => at.node = renamed(at.node)?,
                }
            }
            let control = node.control_inputs.iter().map(|id| renamed(self.moved_to(*id)));
            let mut control: Vec<NodeId> = control.collect::<Option<_>>()?;
            control.retain(|before| *before != id);
            control.sort_unstable();
            control.dedup();
            node.control_inputs = control;
            origin.push(partition.origin.get(old).copied().flatten());
            nodes.push(node);
        }
        feeds.sort_by_key(|(feed, _)| *feed);
        let fetches =
            self.fetches.iter().map(|(fetch, at)| Some((*fetch, Endpoint { node: renamed(at.node)?, ..*at })));
        let transfers = partition.transfers.iter().map(|transfer| {
            let mut transfer = transfer.clone();
            transfer.send = renamed(transfer.send)?;
            Some(transfer)
        });
        Some(Partition {
            device: partition.device,
            nodes,
            origin,
            feeds,
            fetches: fetches.collect::<Option<_>>()?,
            transfers: transfers.collect::<Option<_>>()?,
        })
    }
}

#[cfg(test)]
mod tests;
