//! Products with their bias and activation, losses, and norms with the terms that are added to their gradient.

use kolo_core::{DType, Result};
use kolo_graph::{Attrs, Endpoint, Node, NodeId};
use kolo_ops::fused;

use super::{Work, first, is_nchw, made};

/// Nodes that are fused into a product with an added matrix.
struct Residual {
    product: NodeId,
    bias: Option<NodeId>,
    reshape: Option<NodeId>,
    /// The matrix that the product is added to.
    plus: Endpoint,
}

impl Work<'_, '_> {
    /// The product on one side of a sum, if the sum is its only consumer.
    fn residual(&self, sum_id: NodeId, side: usize) -> Option<Residual> {
        let sum = self.node(sum_id)?;
        let (mut at, plus) = (*sum.inputs.get(side)?, *sum.inputs.get(1 - side)?);
        let output = |at: Endpoint| self.node(at.node)?.outputs.get(at.index as usize);
        // Broadcasts are not supported, and nothing is known about a feed. The number of rows may be unknown: the
        // kernel checks.
        let shape = output(plus)?.shape.dims()?.to_vec();
        if at == plus || output(at)?.shape.dims()? != shape || shape.len() < 2 || shape[1..].contains(&None) {
            return None;
        }
        let mut user = sum_id;
        let mut step = |at: Endpoint, ops: &[&str]| -> Option<NodeId> {
            let node = self.maker(at, ops).filter(|node| self.is_plain(node))?;
            (at.index == 0 && self.sole_user(at) == Some(user) && !node.inputs.is_empty()).then(|| {
                user = at.node;
                at.node
            })
        };
        let reshape = if shape.contains(&None) { None } else { step(at, &["Reshape"]) };
        if let Some(node) = reshape.and_then(|id| self.node(id)) {
            at = node.inputs[0];
        }
        let bias = step(at, &["BiasAdd", "BiasAddV1"]);
        if let Some(node) = bias.and_then(|id| self.node(id)) {
            at = node.inputs[0];
            if is_nchw(node) {
                return None;
            }
        }
        let product = step(at, &["MatMul"])?;
        let made = output(first(product))?;
        let is_float = matches!(made.dtype, DType::F32 | DType::F16 | DType::BF16);
        let is_same_width = made.shape.dims().is_some_and(|dims| dims.len() == 2 && dims.last() == shape.last());
        (is_float && is_same_width).then_some(Residual { product, bias, reshape, plus })
    }

    /// Products that are added to a value of the same size.
    pub(super) fn residuals(&mut self) -> Result<()> {
        for sum_id in self.ids() {
            let is_sum = |node: &&Node| match node.op() {
                "Add" | "AddV2" => true,
                "AddN" => node.inputs.len() == 2,
                _ => false,
            };
            if !self.node(sum_id).filter(is_sum).is_some_and(|sum| self.is_plain(sum)) {
                continue;
            }
            let found = self.residual(sum_id, 0).or_else(|| self.residual(sum_id, 1));
            let Some(Residual { product: product_id, bias, reshape, plus }) = found else { continue };
            let Some(product) = self.node(product_id) else { continue };
            let relu_id = self
                .sole_user(first(sum_id))
                .filter(|id| self.node(*id).is_some_and(|node| node.op() == "Relu" && self.is_plain(node)))
                .filter(|_| bias.is_some());
            let root_id = relu_id.unwrap_or(sum_id);
            let Some(root) = self.node(root_id) else { continue };
            let gone: Vec<NodeId> = [Some(product_id), bias, reshape, Some(sum_id)].into_iter().flatten().collect();
            let mut of: Vec<&Node> = gone.iter().filter_map(|id| self.node(*id)).collect();
            of.push(root);
            // The fused node must not depend on nodes that depend on the product.
            if of.iter().flat_map(|node| &node.control_inputs).any(|id| self.reaches(product_id, *id)) {
                continue;
            }
            let bias_at = bias.and_then(|id| self.node(id)).map(|node| node.inputs[1]);
            let mut attrs = Attrs::default();
            attrs.set("T", product.outputs[0].dtype);
            attrs.set("relu", relu_id.is_some());
            attrs.set("N", i64::from(bias_at.is_some()));
            for name in ["transpose_a", "transpose_b"] {
                attrs.set(name, product.attrs.bool(name).unwrap_or(false));
            }
            let inputs = [product.inputs[0], product.inputs[1], plus].into_iter().chain(bias_at).collect();
            let node = made(&fused::MAT_MUL_ADD, root, &of, inputs, vec![root.outputs[0].clone()], attrs);
            self.graph.replace(root_id, node);
            gone.into_iter().filter(|id| *id != root_id).for_each(|id| self.graph.merge(id, root_id));
        }
        Ok(())
    }

    pub(super) fn products(&mut self) -> Result<()> {
        for bias_id in self.ids() {
            let Some(bias) = self.node(bias_id).filter(|node| matches!(node.op(), "BiasAdd" | "BiasAddV1")) else {
                continue;
            };
            let at = bias.inputs[0];
            let Some(product) = self.maker(at, &["MatMul"]) else { continue };
            let dtype = product.outputs[0].dtype;
            if is_nchw(bias)
                || !matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
                || self.sole_user(at) != Some(bias_id)
                || !self.is_plain(bias)
                || !self.is_plain(product)
            {
                continue;
            }
            let relu_id = self
                .sole_user(first(bias_id))
                .filter(|id| self.node(*id).is_some_and(|node| node.op() == "Relu" && self.is_plain(node)));
            let root_id = relu_id.unwrap_or(bias_id);
            let Some(root) = self.node(root_id) else { continue };
            let mut attrs = Attrs::default();
            attrs.set("T", dtype);
            attrs.set("relu", relu_id.is_some());
            for name in ["transpose_a", "transpose_b"] {
                attrs.set(name, product.attrs.bool(name).unwrap_or(false));
            }
            let inputs = vec![product.inputs[0], product.inputs[1], bias.inputs[1]];
            let node =
                made(&fused::MAT_MUL, root, &[product, bias, root], inputs, vec![root.outputs[0].clone()], attrs);
            self.graph.replace(root_id, node);
            self.graph.merge(at.node, root_id);
            if root_id != bias_id {
                self.graph.merge(bias_id, root_id);
            }
        }
        Ok(())
    }

    pub(super) fn losses(&mut self) -> Result<()> {
        const LOSSES: [&str; 2] = ["SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"];
        for times_id in self.ids() {
            let Some(times) = self.node(times_id).filter(|node| node.op() == "Mul") else { continue };
            let is_backprop = |at: &&Endpoint| at.index == 1 && self.maker(**at, &LOSSES).is_some();
            let Some(&backprop) = times.inputs.iter().find(is_backprop) else { continue };
            let Some(loss) = self.node(backprop.node) else { continue };
            let others: Vec<Endpoint> = times.inputs.iter().copied().filter(|at| *at != backprop).collect();
            let &[weights] = others.as_slice() else { continue };
            let is_sole = self.users(backprop) == [times_id];
            // Weights that depend on the loss are not available before it.
            if !is_sole
                || self.graph.is_fetched(backprop)
                || !self.is_plain(times)
                || !self.is_plain(loss)
                || self.reaches(backprop.node, weights.node)
                || times.control_inputs.iter().any(|id| self.reaches(backprop.node, *id))
            {
                continue;
            }
            let op = if loss.op() == LOSSES[0] { &fused::CROSS_ENTROPY } else { &fused::SPARSE_CROSS_ENTROPY };
            let outputs = vec![loss.outputs[0].clone(), times.outputs[0].clone()];
            let inputs = vec![loss.inputs[0], loss.inputs[1], weights];
            let node = made(op, times, &[loss, times], inputs, outputs, loss.attrs.clone());
            self.graph.replace(times_id, node);
            self.graph.redirect(first(times_id), Endpoint { node: times_id, index: 1 })?;
            self.graph.redirect(first(backprop.node), first(times_id))?;
            self.graph.merge(backprop.node, times_id);
        }
        Ok(())
    }

    pub(super) fn norms(&mut self) -> Result<()> {
        for sum_id in self.ids() {
            let Some(sum) = self.node(sum_id).filter(|node| node.op() == "AddN" && node.inputs.len() == 2) else {
                continue;
            };
            let is_norm = |at: &&Endpoint| at.index == 0 && self.maker(**at, &["KoloLayerNormGrad"]).is_some();
            let Some(&dx) = sum.inputs.iter().find(is_norm) else { continue };
            let (Some(norm), Some(&plus)) = (self.node(dx.node), sum.inputs.iter().find(|at| **at != dx)) else {
                continue;
            };
            if self.sole_user(dx) != Some(sum_id)
                || !self.is_plain(sum)
                || !self.is_plain(norm)
                || self.reaches(dx.node, plus.node)
                || sum.control_inputs.iter().any(|id| self.reaches(dx.node, *id))
            {
                continue;
            }
            let outputs = vec![sum.outputs[0].clone(), norm.outputs[1].clone(), norm.outputs[2].clone()];
            let inputs = norm.inputs.iter().copied().chain([plus]).collect();
            let node = made(&fused::LAYER_NORM_GRAD, sum, &[norm, sum], inputs, outputs, norm.attrs.clone());
            self.graph.replace(sum_id, node);
            for index in [1, 2] {
                self.graph.redirect(Endpoint { node: dx.node, index }, Endpoint { node: sum_id, index })?;
            }
            self.graph.merge(dx.node, sum_id);
        }
        Ok(())
    }
}
