//! Trees of elementwise ops, and the sums of their values over all but the last dimension.

use std::collections::HashSet;

use kolo_core::{DType, Result};
use kolo_graph::{Attrs, Endpoint, Node, NodeId};
use kolo_ops::fused;
use kolo_ops::fused::program::{Arg, MOST_INPUTS, MOST_STEPS, Program, Step, step_of};

use super::{Work, first, is_nchw, made};

impl Work<'_, '_> {
    pub(super) fn trees(&mut self) -> Result<()> {
        let mut taken = HashSet::new();
        for root_id in self.ids().into_iter().rev() {
            if taken.contains(&root_id) || !self.is_step(root_id) {
                continue;
            }
            let group = self.tree(root_id, &taken);
            if group.len() < 2 {
                continue;
            }
            let (Some(root), Some((program, inputs, types))) = (self.node(root_id), self.program(&group)) else {
                continue;
            };
            let mut attrs = Attrs::default();
            attrs.set("Tin", types);
            attrs.set("T", root.outputs[0].dtype);
            attrs.set("program", program.to_string().as_str());
            let of: Vec<&Node> = group.iter().filter_map(|id| self.node(*id)).collect();
            let node = made(&fused::MAP, root, &of, inputs, vec![root.outputs[0].clone()], attrs);
            taken.extend(group.iter().copied());
            self.graph.replace(root_id, node);
            for id in group.into_iter().filter(|id| *id != root_id) {
                self.graph.merge(id, root_id);
            }
        }
        Ok(())
    }

    fn is_step(&self, id: NodeId) -> bool {
        self.node(id).is_some_and(|node| node.outputs.len() == 1 && step_of(node).is_some() && self.is_plain(node))
    }

    /// The nodes of the largest tree under `root` whose values have no other consumers, in topological order.
    fn tree(&self, root: NodeId, taken: &HashSet<NodeId>) -> Vec<NodeId> {
        let mut group = vec![root];
        let mut next = 0;
        while next < group.len() {
            let makers: Vec<Endpoint> = self.node(group[next]).map(|node| node.inputs.clone()).unwrap_or_default();
            next += 1;
            for at in makers {
                let id = at.node;
                let is_inside = self.graph.is_read_only_by(at, |user| group.contains(&user));
                if group.contains(&id)
                    || group.len() >= MOST_STEPS
                    || taken.contains(&id)
                    || !is_inside
                    || self.is_seen(at)
                    || !self.is_step(id)
                    || self.is_smaller(id, root)
                {
                    continue;
                }
                group.push(id);
                if self.inputs(&group).len() > MOST_INPUTS {
                    group.pop();
                } else {
                    // The last consumer of a node that was rejected before may be inside of the tree now.
                    next = 0;
                }
            }
        }
        group.sort_unstable();
        group
    }

    /// Whether a value is known to be broadcast to a larger one: computing it again for each element would not pay
    /// off.
    fn is_smaller(&self, id: NodeId, root: NodeId) -> bool {
        let shape = |id: NodeId| self.node(id).and_then(|node| Some(node.outputs[0].shape.dims()?.to_vec()));
        let (Some(small), Some(large)) = (shape(id), shape(root)) else { return false };
        small.len() != large.len() || small.iter().zip(&large).any(|(a, b)| *a == Some(1) && *b != Some(1))
    }

    /// The inputs of a group from outside, without duplicates.
    fn inputs(&self, group: &[NodeId]) -> Vec<Endpoint> {
        let mut inputs = Vec::new();
        for at in group.iter().filter_map(|id| self.node(*id)).flat_map(|node| &node.inputs) {
            if !group.contains(&at.node) && !inputs.contains(at) {
                inputs.push(*at);
            }
        }
        inputs
    }

    /// A group in topological order as a program, with its inputs and their types.
    fn program(&self, group: &[NodeId]) -> Option<(Program, Vec<Endpoint>, Vec<DType>)> {
        let inputs = self.inputs(group);
        let mut types: Vec<Option<DType>> = vec![None; inputs.len()];
        let mut steps = Vec::new();
        for id in group {
            let node = self.node(*id)?;
            let (op, parameter) = step_of(node)?;
            let mut args = Vec::new();
            for (i, at) in node.inputs.iter().enumerate() {
                args.push(match group.iter().position(|id| *id == at.node) {
                    Some(value) => Arg::Value(value),
                    None => {
                        let input = inputs.iter().position(|input| input == at)?;
                        types[input] = Some(input_type(node, i)?);
                        Arg::Input(input)
                    }
                });
            }
            steps.push(Step { op, out: node.outputs[0].dtype, parameter, args });
        }
        let types: Vec<DType> = types.into_iter().collect::<Option<_>>()?;
        Some((Program { steps, n_inputs: inputs.len() }, inputs, types))
    }

    pub(super) fn bias_gradients(&mut self) -> Result<()> {
        for sum_id in self.ids() {
            let Some(sum) = self.node(sum_id).filter(|node| node.op() == "BiasAddGrad") else { continue };
            let at = sum.inputs[0];
            if is_nchw(sum) || !sum.control_inputs.is_empty() || !self.is_plain(sum) || at.index != 0 {
                continue;
            }
            let Some(map) = self.node(at.node) else { continue };
            let is_fused = map.op() == fused::MAP.def.name;
            if !map.outputs[0].dtype.is_float() || !(is_fused || self.is_step(at.node)) {
                continue;
            }
            let (inputs, attrs) = if is_fused {
                (map.inputs.clone(), map.attrs.clone())
            } else {
                let Some((program, inputs, types)) = self.program(&[at.node]) else { continue };
                let mut attrs = Attrs::default();
                attrs.set("Tin", types);
                attrs.set("T", map.outputs[0].dtype);
                attrs.set("program", program.to_string().as_str());
                (inputs, attrs)
            };
            let outputs = vec![map.outputs[0].clone(), sum.outputs[0].clone()];
            let node = made(&fused::MAP_AND_SUM, map, &[map], inputs, outputs, attrs);
            self.graph.replace(at.node, node);
            self.graph.redirect(first(sum_id), Endpoint { node: at.node, index: 1 })?;
            self.graph.merge(sum_id, at.node);
        }
        Ok(())
    }
}

/// The element type of a step's input.
fn input_type(node: &Node, i: usize) -> Option<DType> {
    let name = match (node.op(), i) {
        ("Cast", _) => "SrcT",
        ("SelectV2", 0) | ("LogicalNot" | "LogicalAnd" | "LogicalOr", _) => return Some(DType::Bool),
        _ => "T",
    };
    node.attrs.dtype(name).ok()
}
