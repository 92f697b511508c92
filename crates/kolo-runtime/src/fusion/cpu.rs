//! Products on a CPU, fused with the operations after them.

use kolo_core::{DType, Result};
use kolo_graph::{Attrs, Endpoint, Node, NodeId};
use kolo_ops::fused;

use super::{Work, first, is_nchw, made};

/// The maximum number of elements of a variable that a product updates. The variable is locked while the product is
/// computed, and one that is larger than a core's cache gains little.
const MOST_DESCENDED: usize = 1 << 18;

impl Work<'_, '_> {
    pub(super) fn dense_layers(&mut self) -> Result<()> {
        for bias_id in self.ids() {
            let Some((at, bias)) = self.biased_product(bias_id) else { continue };
            let activated = self.sole_user(first(bias_id)).and_then(|id| {
                let node = self.node(id).filter(|node| self.is_plain(node))?;
                match node.op() {
                    "Relu" => Some((id, "relu")),
                    "Sigmoid" => Some((id, "sigmoid")),
                    _ => None,
                }
            });
            let (root_id, activation) = activated.unwrap_or((bias_id, "none"));
            let (Some(product), Some(middle), Some(root)) =
                (self.node(at.node), self.node(bias_id), self.node(root_id))
            else {
                continue;
            };
            let mut attrs = product_attrs(product);
            attrs.set("activation", activation);
            let inputs = vec![product.inputs[0], product.inputs[1], bias];
            let outputs = vec![root.outputs[0].clone()];
            let node = made(&fused::DENSE, root, &[product, middle, root], inputs, outputs, attrs);
            self.graph.replace(root_id, node);
            self.graph.merge(at.node, root_id);
            if root_id != bias_id {
                self.graph.merge(bias_id, root_id);
            }
        }
        Ok(())
    }

    /// If a node adds a bias to the columns of a product that has no other consumer: the product and the bias.
    fn biased_product(&self, id: NodeId) -> Option<(Endpoint, Endpoint)> {
        let node = self.node(id).filter(|node| self.is_plain(node))?;
        let (at, bias) = match node.op() {
            "BiasAdd" | "BiasAddV1" if !is_nchw(node) => (node.inputs[0], node.inputs[1]),
            "Add" | "AddV2" => {
                let &[left, right] = node.inputs.as_slice() else { return None };
                match self.product(left, id) {
                    Some(_) => (left, right),
                    None => (right, left),
                }
            }
            _ => return None,
        };
        let product = self.product(at, id)?;
        if !node.op().starts_with("Bias") {
            // Only if the shapes show that it is one value per column, and not a single row or column of another
            // kind.
            let maker = self.node(bias.node)?;
            let bias = &maker.outputs.get(bias.index as usize)?.shape;
            let n = product.outputs[0].shape.dim(-1)?;
            (bias.rank() == Some(1) && bias.dim(0) == Some(n)).then_some(())?;
        }
        Some((at, bias))
    }

    /// The `MatMul` of floats that computes this value, if `user` is its only consumer.
    fn product(&self, at: Endpoint, user: NodeId) -> Option<&Node> {
        let product = self.maker(at, &["MatMul"])?;
        let is_float = matches!(product.outputs[0].dtype, DType::F32 | DType::F64);
        (is_float && self.sole_user(at) == Some(user) && self.is_plain(product)).then_some(product)
    }

    pub(super) fn descents(&mut self) -> Result<()> {
        for id in self.ids() {
            let Some(update) = self.node(id).filter(|node| node.op() == "ResourceApplyGradientDescent") else {
                continue;
            };
            let &[handle, rate, at] = update.inputs.as_slice() else { continue };
            let Some(product) = self.product(at, id) else { continue };
            if product.outputs[0].shape.n_elements().is_none_or(|n| n > MOST_DESCENDED) {
                continue;
            }
            let inputs = vec![handle, rate, product.inputs[0], product.inputs[1]];
            let node = made(&fused::DESCENT, update, &[product, update], inputs, Vec::new(), product_attrs(product));
            self.graph.replace(id, node);
            self.graph.merge(at.node, id);
        }
        Ok(())
    }
}

fn product_attrs(product: &Node) -> Attrs {
    let mut attrs = Attrs::default();
    attrs.set("T", product.outputs[0].dtype);
    attrs.set("product", &*product.name);
    for name in ["transpose_a", "transpose_b"] {
        attrs.set(name, product.attrs.bool(name).unwrap_or(false));
    }
    attrs
}
