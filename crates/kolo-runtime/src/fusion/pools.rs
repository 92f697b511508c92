//! Pools with the bias and `Relu` before them, and their gradients.

use kolo_core::Result;
use kolo_graph::{Endpoint, NodeId};
use kolo_ops::fused;

use super::{Work, first, is_nchw, made};

impl Work<'_, '_> {
    pub(super) fn biased_pools(&mut self) -> Result<()> {
        for pool_id in self.ids() {
            let Some(pool) = self.node(pool_id).filter(|node| node.op() == "MaxPool" && !is_nchw(node)) else {
                continue;
            };
            let seen = pool.inputs[0];
            let Some(relu) = self.maker(seen, &["Relu"]) else { continue };
            let Some(bias) = self.maker(relu.inputs[0], &["BiasAdd", "BiasAddV1"]) else { continue };
            // Overlapping windows would read each element more than once.
            if pool.attrs.find("ksize") != pool.attrs.find("strides")
                || is_nchw(bias)
                || self.sole_user(relu.inputs[0]) != Some(seen.node)
                || self.is_seen(seen)
                || ![pool, relu, bias].iter().all(|node| self.is_plain(node))
            {
                continue;
            }
            let gradient = match self.users(seen).as_slice() {
                [] => continue,
                [_] => None,
                users => match self.pool_gradient(pool_id, seen, users) {
                    Some(found) => Some(found),
                    None => continue,
                },
            };
            let (bias_id, inputs) = (relu.inputs[0].node, bias.inputs.clone());
            let forward = made(
                &fused::BIAS_RELU_POOL,
                pool,
                &[bias, relu, pool],
                inputs.clone(),
                vec![pool.outputs[0].clone()],
                pool.attrs.clone(),
            );
            if let Some([pool_grad_id, relu_grad_id, sum_id]) = gradient
                && let Some(pool_grad) = self.node(pool_grad_id)
                && let Some(relu_grad) = self.node(relu_grad_id)
                && let Some(sum) = self.node(sum_id)
            {
                let outputs = vec![relu_grad.outputs[0].clone(), sum.outputs[0].clone()];
                let inputs = vec![inputs[0], inputs[1], pool_grad.inputs[1], pool_grad.inputs[2]];
                let of = [pool_grad, relu_grad];
                let attrs = pool_grad.attrs.clone();
                let node = made(&fused::BIAS_RELU_POOL_GRAD, relu_grad, &of, inputs, outputs, attrs);
                self.graph.replace(relu_grad_id, node);
                self.graph.redirect(first(sum_id), Endpoint { node: relu_grad_id, index: 1 })?;
                self.graph.merge(sum_id, relu_grad_id);
                self.graph.merge(pool_grad_id, relu_grad_id);
            }
            self.graph.replace(pool_id, forward);
            self.graph.merge(bias_id, pool_id);
            self.graph.merge(seen.node, pool_id);
        }
        Ok(())
    }

    /// The gradients of a pool, of the `Relu` before it, and of the bias before that, if the input of the pool
    /// (`seen`) has no consumers but the pool and these.
    fn pool_gradient(&self, pool: NodeId, seen: Endpoint, users: &[NodeId]) -> Option<[NodeId; 3]> {
        let with = |op: &str| users.iter().copied().find(|id| self.node(*id).is_some_and(|node| node.op() == op));
        let (pool_grad_id, relu_grad_id) = (with("MaxPoolGrad")?, with("ReluGrad")?);
        let (pool_grad, relu_grad) = (self.node(pool_grad_id)?, self.node(relu_grad_id)?);
        let sums = self.users(first(relu_grad_id));
        let sum_id = sums.iter().copied().find(|id| self.node(*id).is_some_and(|node| node.op() == "BiasAddGrad"))?;
        let sum = self.node(sum_id)?;
        let fits = users.len() == 3
            && pool_grad.inputs[0] == seen
            && pool_grad.inputs[1] == first(pool)
            && pool_grad.attrs.find("ksize") == self.node(pool)?.attrs.find("ksize")
            && pool_grad.attrs.find("strides") == self.node(pool)?.attrs.find("strides")
            && pool_grad.attrs.find("padding") == self.node(pool)?.attrs.find("padding")
            && relu_grad.inputs[0] == first(pool_grad_id)
            && relu_grad.inputs[1] == seen
            && self.sole_user(first(pool_grad_id)) == Some(relu_grad_id)
            && !is_nchw(pool_grad)
            && !is_nchw(sum)
            && sum.control_inputs.is_empty()
            && [pool_grad, relu_grad, sum].iter().all(|node| self.is_plain(node));
        fits.then_some([pool_grad_id, relu_grad_id, sum_id])
    }

    pub(super) fn pools(&mut self) -> Result<()> {
        for relu_id in self.ids() {
            let Some(relu) = self.node(relu_id).filter(|node| node.op() == "ReluGrad") else { continue };
            let at = relu.inputs[0];
            let Some(pool) = self.maker(at, &["MaxPoolGrad"]) else { continue };
            if pool.inputs[0] != relu.inputs[1]
                || self.sole_user(at) != Some(relu_id)
                || !self.is_plain(relu)
                || !self.is_plain(pool)
            {
                continue;
            }
            let outputs = vec![relu.outputs[0].clone()];
            let (inputs, attrs) = (pool.inputs.clone(), pool.attrs.clone());
            let node = made(&fused::MAX_POOL_GRAD_RELU, relu, &[pool, relu], inputs, outputs, attrs);
            self.graph.replace(relu_id, node);
            self.graph.merge(at.node, relu_id);
        }
        Ok(())
    }
}
