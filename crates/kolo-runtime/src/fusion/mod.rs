//! Fusion: passes that replace nodes of a part by one node that needs less work, or fewer passes over memory.
//!
//! | what, on a GPU | becomes |
//! | --- | --- |
//! | `MatMul`, `BiasAdd`, perhaps `Relu` | a product with an epilogue |
//! | `MatMul`, perhaps `BiasAdd`, the sum with a value of its size, perhaps `Relu` | a product that adds to that
//! value |
//! | `BiasAdd`, `Relu`, `MaxPool`, and their gradients | one pass over the images each |
//! | `MaxPoolGrad`, `ReluGrad` | one pass over the images |
//! | `KoloLayerNormGrad`, and the terms that are added to its gradient | one pass over the rows |
//! | a cross entropy, and its backprop times the gradient of the loss | one kernel |
//! | a tree of elementwise ops, broadcasts and casts among them | one generated kernel |
//! | an elementwise op, or a tree, and the `BiasAddGrad` of its value | one generated kernel |
//! | a large `MatMul`, and gradient descent along it at a constant rate | a product that adds to the variable |
//! | an optimizer's updates of many variables, and casts of their gradients | a few launches |
//!
//! | what, on a CPU | becomes |
//! | --- | --- |
//! | `MatMul`, the bias of its columns, perhaps `Relu` or `Sigmoid` | a product with an epilogue |
//! | `MatMul`, `ResourceApplyGradientDescent` | a product that is subtracted from the variable |
//!
//! A node is removed only if its value is not used outside of the fused node. The fused node has the name of the last
//! of its nodes. The graph is not changed: fusion works on one part of one plan.

use kolo_core::{DeviceName, Result};
use kolo_graph::rewrite::fused_node;
use kolo_graph::{
    AttrValue, Attrs, Endpoint, Flow, Node, NodeId, OutputInfo, Pass, PassContext, PassRecord, Rewriter, Stage,
};
use kolo_ops::{Op, find_kernel};

mod cpu;
mod layers;
mod pools;
mod trees;
mod updates;

/// The passes of this folder, in order.
pub fn passes() -> Vec<Pass> {
    let on_gpu = |name, why, run: fn(&mut Work<'_, '_>) -> Result<()>| fusing(name, "GPU", why, run);
    let on_cpu = |name, why, run: fn(&mut Work<'_, '_>) -> Result<()>| fusing(name, "CPU", why, run);
    vec![
        on_cpu("dense-layers", "a product, its bias and activation are one pass over its output", |work| {
            work.dense_layers()
        }),
        on_cpu("descents", "a gradient that is only subtracted from a small variable is never written down", |work| {
            work.descents()
        }),
        on_gpu(
            "residuals",
            "a product is added to what is there; before 'products', which would take its bias",
            |work| work.residuals(),
        ),
        on_gpu("products", "bias and activation in the epilogue of a product", |work| work.products()),
        on_gpu(
            "biased-pools",
            "bias, activation, pooling and their gradients: one pass over the images each",
            |work| work.biased_pools(),
        ),
        on_gpu("pools", "the gradient of a pool and of the activation before it: one pass", |work| work.pools()),
        on_gpu("losses", "a cross entropy and its scaled gradient in one kernel", |work| work.losses()),
        on_gpu("norms", "what is added to the gradient of a norm is added while it is written", |work| work.norms()),
        on_gpu("trees", "elementwise ops in one generated kernel; after all that have kernels of their own", |work| {
            work.trees()
        }),
        on_gpu("bias-gradients", "the sums of what an elementwise kernel writes come with it; needs 'trees'", |work| {
            work.bias_gradients()
        }),
        on_gpu("product-updates", "gradient descent along a large product is added while it is computed", |work| {
            work.product_updates()
        }),
        on_gpu(
            "updates",
            "the updates of all variables in a few launches; last, so that it sees what is left",
            |work| work.updates(),
        ),
    ]
}

/// A pass over the parts of one kind of device. A part that it cannot fuse is left unchanged.
fn fusing(name: &'static str, kind: &'static str, why: &'static str, run: fn(&mut Work<'_, '_>) -> Result<()>) -> Pass {
    let fuse = move |graph: &mut Rewriter<'_>, context: &PassContext<'_>| match context.device {
        Some(device) => run(&mut Work { graph, device }),
        None => Ok(()),
    };
    Pass::new(name, Stage::Part, why, fuse).on_kind(kind).optional()
}

/// Logs passes that failed: these are bugs that only cost speed.
pub(crate) fn log_undone(log: &[PassRecord]) {
    for record in log {
        if let (Some(why), Some(device)) = (&record.undone, &record.device) {
            tracing::warn!(target: "kolo::passes", "pass '{}' was undone on {device}: {why}", record.pass);
        }
    }
}

/// A part that is fused.
struct Work<'a, 'r> {
    graph: &'a mut Rewriter<'r>,
    device: &'a DeviceName,
}

fn first(node: NodeId) -> Endpoint {
    Endpoint { node, index: 0 }
}

/// A node that replaces `of`, the last of which is `root`.
fn made(op: &Op, root: &Node, of: &[&Node], inputs: Vec<Endpoint>, outputs: Vec<OutputInfo>, attrs: Attrs) -> Node {
    fused_node(&op.def, root, of, inputs, outputs, attrs)
}

fn is_nchw(node: &Node) -> bool {
    matches!(node.attrs.find("data_format"), Some(AttrValue::Str(format)) if &format[..] == b"NCHW")
}

impl Work<'_, '_> {
    fn ids(&self) -> Vec<NodeId> {
        self.graph.ids()
    }

    fn node(&self, id: NodeId) -> Option<&Node> {
        self.graph.node(id).map(|node| &**node)
    }

    /// The node that computes an input, if it has one of these ops.
    fn maker(&self, at: Endpoint, ops: &[&str]) -> Option<&Node> {
        self.node(at.node).filter(|node| ops.contains(&node.op()))
    }

    fn sole_user(&self, at: Endpoint) -> Option<NodeId> {
        self.graph.sole_reader(at)
    }

    /// The nodes that read an output, once for each input.
    fn users(&self, at: Endpoint) -> Vec<NodeId> {
        self.graph.readers(at).into_iter().map(|(reader, _)| reader).collect()
    }

    /// Whether this output is fetched, or its node has control outputs.
    fn is_seen(&self, at: Endpoint) -> bool {
        self.graph.is_fetched(at) || !self.graph.waiters(at.node).is_empty()
    }

    /// Whether a node runs a kernel of the part's device on plain values.
    fn is_plain(&self, node: &Node) -> bool {
        node.def.flow == Flow::Plain
            && !node.ref_inputs.contains(&true)
            && !node.inputs.iter().any(|at| self.is_reference(*at))
            && find_kernel(node, self.device).is_ok_and(|kernel| kernel.device == &*self.device.kind)
    }

    /// Whether an output is a reference to a variable, perhaps passed on by an `Identity`.
    fn is_reference(&self, at: Endpoint) -> bool {
        let Some(maker) = self.node(at.node) else { return false };
        maker.outputs.get(at.index as usize).is_some_and(|output| output.is_ref)
            || maker.passed_on().is_some_and(|at| self.is_reference(at))
    }

    /// Whether there is a path along edges of any kind from one node to another.
    fn reaches(&self, from: NodeId, to: NodeId) -> bool {
        self.graph.reaches(&[from], to)
    }
}

#[cfg(test)]
mod tests;
