//! An optimizer's updates of many variables.

use std::collections::{HashMap, HashSet};

use kolo_core::{DType, Result};
use kolo_graph::{Attrs, Endpoint, Node, NodeId};
use kolo_ops::fused::program::step_of;
use kolo_ops::{find_kernel, fused, update_layout};

use super::{Work, made};

/// The number of elements of a gradient from which its memory costs more than a launch.
const LARGE: usize = 1 << 20;

impl Work<'_, '_> {
    /// The input of the cast of an update's gradient, if it is a narrower float and the cast has no other consumer.
    fn narrow_gradient(&self, id: NodeId, at: Endpoint) -> Option<(Endpoint, DType)> {
        let cast = self.maker(at, &["Cast"]).filter(|cast| self.is_plain(cast) && step_of(cast).is_some())?;
        let (from, to) = (cast.attrs.dtype("SrcT").ok()?, cast.outputs[0].dtype);
        let is_narrow = matches!(from, DType::F16 | DType::BF16) && to == DType::F32;
        (is_narrow && self.sole_user(at) == Some(id)).then(|| (cast.inputs[0], from))
    }

    /// Gradient descent along a product: the product is added to the variable while it is computed. Small products
    /// are left to the fused update of all variables.
    pub(super) fn product_updates(&mut self) -> Result<()> {
        for id in self.ids() {
            let Some(update) = self.node(id).filter(|node| node.op() == "ResourceApplyGradientDescent") else {
                continue;
            };
            let &[variable, rate, delta] = update.inputs.as_slice() else { continue };
            let rate = self.maker(rate, &["Const"]).and_then(|node| node.attrs.tensor("value").ok());
            let Some(rate) = rate.and_then(|rate| rate.scalar_value::<f32>().ok()) else { continue };
            let Some(product) = self.maker(delta, &["MatMul"]) else { continue };
            let is_large = product.outputs[0].shape.n_elements().is_some_and(|n| n >= LARGE);
            let has_kernel = find_kernel(update, self.device).is_ok_and(|kernel| kernel.device == "GPU");
            if product.outputs[0].dtype != DType::F32
                || !is_large
                || !has_kernel
                || !self.is_plain(product)
                || self.sole_user(delta) != Some(id)
            {
                continue;
            }
            let mut attrs = Attrs::default();
            attrs.set("T", DType::F32);
            attrs.set("rate", rate);
            for name in ["transpose_a", "transpose_b"] {
                attrs.set(name, product.attrs.bool(name).unwrap_or(false));
            }
            let inputs = vec![variable, product.inputs[0], product.inputs[1]];
            let node = made(&fused::APPLY_PRODUCT, update, &[product, update], inputs, Vec::new(), attrs);
            self.graph.replace(id, node);
            self.graph.merge(delta.node, id);
        }
        Ok(())
    }

    pub(super) fn updates(&mut self) -> Result<()> {
        // In the order of their first updates, and found by their key: a rate for each variable makes as many groups.
        let (mut groups, mut group_of): (Vec<Vec<NodeId>>, HashMap<String, usize>) = Default::default();
        for (id, node) in self.graph.iter() {
            let Some(layout) = update_layout(node.op()) else { continue };
            let Ok(dtype) = node.attrs.dtype("T") else { continue };
            if !find_kernel(node, self.device).is_ok_and(|kernel| kernel.device == "GPU") || !node.outputs.is_empty() {
                continue;
            }
            let flag = !layout.flag.is_empty() && node.attrs.bool(layout.flag).unwrap_or(false);
            let scalars: Vec<Endpoint> = layout.scalars.iter().map(|&i| node.inputs[i]).collect();
            let grad = self.narrow_gradient(id, node.inputs[layout.grad]).map_or(dtype, |(_, grad)| grad);
            let key = format!("{} {dtype} {grad} {flag} {scalars:?}", node.op());
            let group = *group_of.entry(key).or_insert_with(|| {
                groups.push(Vec::new());
                groups.len() - 1
            });
            groups[group].push(id);
        }
        for group in groups {
            self.update_together(&group);
        }
        Ok(())
    }

    /// Fuses updates, except those that depend on others of the group or update the same variable.
    fn update_together(&mut self, group: &[NodeId]) {
        let dependent = self.graph.dependents_among(group);
        let mut chosen: Vec<NodeId> = Vec::new();
        let mut handles: HashSet<Endpoint> = HashSet::new();
        for &id in group.iter().filter(|id| !dependent.contains(id)) {
            let Some(node) = self.node(id) else { continue };
            let Some(layout) = update_layout(node.op()) else { continue };
            let mine = &node.inputs[..layout.n_handles];
            if mine.iter().any(|at| handles.contains(at)) {
                continue;
            }
            handles.extend(mine);
            chosen.push(id);
        }
        let Some(&root_id) = chosen.last().filter(|_| chosen.len() > 1) else { return };
        let mut nodes: Vec<&Node> = chosen.iter().filter_map(|id| self.node(*id)).collect();
        let n_updates = nodes.len();
        let Some(root) = self.node(root_id) else { return };
        let Some(layout) = update_layout(root.op()) else { return };
        let Ok(dtype) = root.attrs.dtype("T") else { return };
        let mut inputs: Vec<Endpoint> =
            nodes.iter().flat_map(|node| node.inputs[..layout.n_handles].to_vec()).collect();
        let n_handles = inputs.len();
        inputs.extend(layout.scalars.iter().map(|&i| root.inputs[i]));
        let mut grad_dtype = dtype;
        let mut casts = Vec::new();
        for (id, node) in chosen.iter().zip(nodes.clone()) {
            let at = node.inputs[layout.grad];
            let Some((from, narrow)) = self.narrow_gradient(*id, at) else {
                inputs.push(at);
                continue;
            };
            inputs.push(from);
            grad_dtype = narrow;
            casts.push(at.node);
            nodes.extend(self.node(at.node));
        }
        let mut attrs = Attrs::default();
        attrs.set("rule", root.op());
        attrs.set("flag", !layout.flag.is_empty() && root.attrs.bool(layout.flag).unwrap_or(false));
        attrs.set("M", n_handles as i64);
        attrs.set("S", layout.scalars.len() as i64);
        attrs.set("N", n_updates as i64);
        attrs.set("T", dtype);
        attrs.set("Tgrad", grad_dtype);
        let node = made(&fused::APPLY_ALL, root, &nodes, inputs, Vec::new(), attrs);
        self.graph.replace(root_id, node);
        let gone: Vec<NodeId> = chosen.into_iter().filter(|id| *id != root_id).chain(casts).collect();
        self.graph.merge_all(&gone, root_id);
    }
}
