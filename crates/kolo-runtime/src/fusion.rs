//! Fusion: on a GPU, nodes that would each start a kernel for little work are put together before a part is compiled.
//!
//! | what | becomes |
//! | --- | --- |
//! | `MatMul`, `BiasAdd`, perhaps `Relu` | a product with an epilogue |
//! | `BiasAdd`, `Relu`, `MaxPool`, and their gradients | one pass over the images each |
//! | `MaxPoolGrad`, `ReluGrad` | one pass over the images |
//! | `KoloLayerNormGrad`, and what is added to its gradient | one pass over the rows |
//! | a cross entropy, and its backprop times the gradient of the loss | one kernel |
//! | a tree of elementwise ops, broadcasts and casts among them | one generated kernel |
//! | an elementwise op, or a tree, and the `BiasAddGrad` of its value | one generated kernel |
//! | an optimizer's updates of many variables, and casts of their gradients | a few launches |
//!
//! A node disappears only if nobody outside of what it becomes part of sees its value. What is made has the name of the last of
//! its nodes. The graph is not changed: this is one part of one plan.

use std::collections::{HashMap, HashSet};

use kolo_core::{DType, DeviceName};
use kolo_graph::{AttrValue, Attrs, Endpoint, Flow, Node, NodeId, Nodes, OutputInfo, Partition};
use kolo_ops::fused::program::{Arg, MOST_INPUTS, MOST_STEPS, Program, Step, step_of};
use kolo_ops::{Op, find_kernel, fused, update_layout};

/// A part with fewer nodes that computes the same. `device` is the GPU it is for.
pub(crate) fn fuse(partition: &Partition, device: &DeviceName) -> Partition {
    let mut work = Work {
        nodes: partition.nodes.iter().map(|(_, node)| Some(Node::clone(node))).collect(),
        fetches: partition.fetches.clone(),
        moved: HashMap::new(),
        device,
    };
    for pass in [
        Work::products,
        Work::biased_pools,
        Work::pools,
        Work::losses,
        Work::norms,
        Work::trees,
        Work::bias_gradients,
        Work::updates,
    ] {
        let uses = work.uses();
        pass(&mut work, &uses);
    }
    work.finish(partition).unwrap_or_else(|| partition.clone())
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

    /// Whether a node runs a kernel of the GPU on values alone.
    fn is_plain(&self, node: &Node) -> bool {
        node.def.flow == Flow::Plain
            && !node.ref_inputs.contains(&true)
            && !node.inputs.iter().any(|at| self.is_reference(*at))
            && find_kernel(node, self.device).is_ok_and(|kernel| kernel.device == "GPU")
    }

    /// Whether an output is a reference to a variable, or one that an `Identity` lends.
    fn is_reference(&self, at: Endpoint) -> bool {
        let Some(maker) = self.node(at.node) else { return false };
        maker.outputs.get(at.index as usize).is_some_and(|output| output.is_ref)
            || (maker.op() == "Identity" && maker.inputs.iter().any(|at| self.is_reference(*at)))
    }

    fn products(&mut self, uses: &Uses) {
        for bias_id in self.ids() {
            let Some(bias) = self.node(bias_id).filter(|node| matches!(node.op(), "BiasAdd" | "BiasAddV1")) else {
                continue;
            };
            let at = bias.inputs[0];
            let Some(product) = self.maker(at, &["MatMul"]) else { continue };
            let dtype = product.outputs[0].dtype;
            if is_nchw(bias)
                || !matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
                || uses.sole_user(at) != Some(bias_id)
                || !self.is_plain(bias)
                || !self.is_plain(product)
            {
                continue;
            }
            let relu_id = uses
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
            self.nodes[root_id.index()] = Some(node);
            self.remove(at.node, root_id);
            if root_id != bias_id {
                self.remove(bias_id, root_id);
            }
        }
    }

    fn biased_pools(&mut self, uses: &Uses) {
        for pool_id in self.ids() {
            let Some(pool) = self.node(pool_id).filter(|node| node.op() == "MaxPool" && !is_nchw(node)) else {
                continue;
            };
            let seen = pool.inputs[0];
            let Some(relu) = self.maker(seen, &["Relu"]) else { continue };
            let Some(bias) = self.maker(relu.inputs[0], &["BiasAdd", "BiasAddV1"]) else { continue };
            // Windows that overlap would look at each element more than once.
            if pool.attrs.find("ksize") != pool.attrs.find("strides")
                || is_nchw(bias)
                || uses.sole_user(relu.inputs[0]) != Some(seen.node)
                || uses.fetched.contains(&seen)
                || uses.control.contains(&seen.node)
                || ![pool, relu, bias].iter().all(|node| self.is_plain(node))
            {
                continue;
            }
            let gradient = match uses.data.get(&seen).map(Vec::as_slice) {
                Some([_]) => None,
                Some(users) => match self.pool_gradient(uses, pool_id, seen, users) {
                    Some(found) => Some(found),
                    None => continue,
                },
                None => continue,
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
                self.nodes[relu_grad_id.index()] = Some(node);
                self.redirect(first(sum_id), Endpoint { node: relu_grad_id, index: 1 });
                self.remove(sum_id, relu_grad_id);
                self.remove(pool_grad_id, relu_grad_id);
            }
            self.nodes[pool_id.index()] = Some(forward);
            self.remove(bias_id, pool_id);
            self.remove(seen.node, pool_id);
        }
    }

    /// The gradients of a pool, of the `Relu` before it, and of the bias before that, if what is pooled (`seen`) is used by
    /// nothing but the pool and these.
    fn pool_gradient(&self, uses: &Uses, pool: NodeId, seen: Endpoint, users: &[NodeId]) -> Option<[NodeId; 3]> {
        let with = |op: &str| users.iter().copied().find(|id| self.node(*id).is_some_and(|node| node.op() == op));
        let (pool_grad_id, relu_grad_id) = (with("MaxPoolGrad")?, with("ReluGrad")?);
        let (pool_grad, relu_grad) = (self.node(pool_grad_id)?, self.node(relu_grad_id)?);
        let sums = uses.data.get(&first(relu_grad_id))?;
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
            && uses.sole_user(first(pool_grad_id)) == Some(relu_grad_id)
            && !is_nchw(pool_grad)
            && !is_nchw(sum)
            && sum.control_inputs.is_empty()
            && [pool_grad, relu_grad, sum].iter().all(|node| self.is_plain(node));
        fits.then_some([pool_grad_id, relu_grad_id, sum_id])
    }

    fn pools(&mut self, uses: &Uses) {
        for relu_id in self.ids() {
            let Some(relu) = self.node(relu_id).filter(|node| node.op() == "ReluGrad") else { continue };
            let at = relu.inputs[0];
            let Some(pool) = self.maker(at, &["MaxPoolGrad"]) else { continue };
            if pool.inputs[0] != relu.inputs[1]
                || uses.sole_user(at) != Some(relu_id)
                || !self.is_plain(relu)
                || !self.is_plain(pool)
            {
                continue;
            }
            let outputs = vec![relu.outputs[0].clone()];
            let (inputs, attrs) = (pool.inputs.clone(), pool.attrs.clone());
            let node = made(&fused::MAX_POOL_GRAD_RELU, relu, &[pool, relu], inputs, outputs, attrs);
            self.nodes[relu_id.index()] = Some(node);
            self.remove(at.node, relu_id);
        }
    }

    fn losses(&mut self, uses: &Uses) {
        const LOSSES: [&str; 2] = ["SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"];
        for times_id in self.ids() {
            let Some(times) = self.node(times_id).filter(|node| node.op() == "Mul") else { continue };
            let is_backprop = |at: &&Endpoint| at.index == 1 && self.maker(**at, &LOSSES).is_some();
            let Some(&backprop) = times.inputs.iter().find(is_backprop) else { continue };
            let Some(loss) = self.node(backprop.node) else { continue };
            let others: Vec<Endpoint> = times.inputs.iter().copied().filter(|at| *at != backprop).collect();
            let &[weights] = others.as_slice() else { continue };
            let is_sole = uses.data.get(&backprop).is_some_and(|users| *users == [times_id]);
            // Weights that depend on the loss cannot be there before it.
            if !is_sole
                || uses.fetched.contains(&backprop)
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
            self.nodes[times_id.index()] = Some(node);
            self.redirect(first(times_id), Endpoint { node: times_id, index: 1 });
            self.redirect(first(backprop.node), first(times_id));
            self.remove(backprop.node, times_id);
        }
    }

    fn norms(&mut self, uses: &Uses) {
        for sum_id in self.ids() {
            let Some(sum) = self.node(sum_id).filter(|node| node.op() == "AddN" && node.inputs.len() == 2) else {
                continue;
            };
            let is_norm = |at: &&Endpoint| at.index == 0 && self.maker(**at, &["KoloLayerNormGrad"]).is_some();
            let Some(&dx) = sum.inputs.iter().find(is_norm) else { continue };
            let (Some(norm), Some(&plus)) = (self.node(dx.node), sum.inputs.iter().find(|at| **at != dx)) else {
                continue;
            };
            if uses.sole_user(dx) != Some(sum_id)
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
            self.nodes[sum_id.index()] = Some(node);
            for index in [1, 2] {
                self.redirect(Endpoint { node: dx.node, index }, Endpoint { node: sum_id, index });
            }
            self.remove(dx.node, sum_id);
        }
    }

    /// Whether there is a way along edges of any kind from one node to another.
    fn reaches(&self, from: NodeId, to: NodeId) -> bool {
        self.any_reaches(&[from], to)
    }

    fn trees(&mut self, uses: &Uses) {
        let mut taken = HashSet::new();
        for root_id in self.ids().into_iter().rev() {
            if taken.contains(&root_id) || !self.is_step(root_id) {
                continue;
            }
            let group = self.tree(root_id, uses, &taken);
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
            self.nodes[root_id.index()] = Some(node);
            for id in group.into_iter().filter(|id| *id != root_id) {
                self.remove(id, root_id);
            }
        }
    }

    fn is_step(&self, id: NodeId) -> bool {
        self.node(id).is_some_and(|node| node.outputs.len() == 1 && step_of(node).is_some() && self.is_plain(node))
    }

    /// The nodes of the largest tree under `root` whose values nobody else sees, inputs before their users.
    fn tree(&self, root: NodeId, uses: &Uses, taken: &HashSet<NodeId>) -> Vec<NodeId> {
        let mut group = vec![root];
        let mut next = 0;
        while next < group.len() {
            let makers: Vec<Endpoint> = self.node(group[next]).map(|node| node.inputs.clone()).unwrap_or_default();
            next += 1;
            for at in makers {
                let id = at.node;
                let inside = |users: &Vec<NodeId>| users.iter().all(|user| group.contains(user));
                if group.contains(&id)
                    || group.len() >= MOST_STEPS
                    || taken.contains(&id)
                    || !uses.data.get(&at).is_some_and(inside)
                    || uses.fetched.contains(&at)
                    || uses.control.contains(&id)
                    || !self.is_step(id)
                    || self.is_smaller(id, root)
                {
                    continue;
                }
                group.push(id);
                if self.inputs(&group).len() > MOST_INPUTS {
                    group.pop();
                } else {
                    // What was looked at before may have its last user inside now.
                    next = 0;
                }
            }
        }
        group.sort_unstable();
        group
    }

    /// Whether a value is known to be spread over a larger one: computing it again for each element would not pay.
    fn is_smaller(&self, id: NodeId, root: NodeId) -> bool {
        let shape = |id: NodeId| self.node(id).and_then(|node| Some(node.outputs[0].shape.dims()?.to_vec()));
        let (Some(small), Some(large)) = (shape(id), shape(root)) else { return false };
        small.len() != large.len() || small.iter().zip(&large).any(|(a, b)| *a == Some(1) && *b != Some(1))
    }

    /// What a group takes from outside, each once.
    fn inputs(&self, group: &[NodeId]) -> Vec<Endpoint> {
        let mut inputs = Vec::new();
        for at in group.iter().filter_map(|id| self.node(*id)).flat_map(|node| &node.inputs) {
            if !group.contains(&at.node) && !inputs.contains(at) {
                inputs.push(*at);
            }
        }
        inputs
    }

    /// A group in order as a program, with its inputs and their types.
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

    fn bias_gradients(&mut self, _: &Uses) {
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
            self.nodes[at.node.index()] = Some(node);
            self.redirect(first(sum_id), Endpoint { node: at.node, index: 1 });
            self.remove(sum_id, at.node);
        }
    }

    /// What the gradient of an update is cast from, if it is a narrower float that nothing else wants cast.
    fn narrow_gradient(&self, id: NodeId, at: Endpoint, uses: &Uses) -> Option<(Endpoint, DType)> {
        let cast = self.maker(at, &["Cast"]).filter(|cast| self.is_plain(cast) && step_of(cast).is_some())?;
        let (from, to) = (cast.attrs.dtype("SrcT").ok()?, cast.outputs[0].dtype);
        let is_narrow = matches!(from, DType::F16 | DType::BF16) && to == DType::F32;
        (is_narrow && uses.sole_user(at) == Some(id)).then(|| (cast.inputs[0], from))
    }

    fn updates(&mut self, uses: &Uses) {
        let mut groups: Vec<(String, Vec<NodeId>)> = Vec::new();
        for (id, node) in self.iter() {
            let Some(layout) = update_layout(node.op()) else { continue };
            let Ok(dtype) = node.attrs.dtype("T") else { continue };
            if !find_kernel(node, self.device).is_ok_and(|kernel| kernel.device == "GPU") || !node.outputs.is_empty() {
                continue;
            }
            let flag = !layout.flag.is_empty() && node.attrs.bool(layout.flag).unwrap_or(false);
            let scalars: Vec<Endpoint> = layout.scalars.iter().map(|&i| node.inputs[i]).collect();
            let grad = self.narrow_gradient(id, node.inputs[layout.grad], uses).map_or(dtype, |(_, grad)| grad);
            let key = format!("{} {dtype} {grad} {flag} {scalars:?}", node.op());
            match groups.iter_mut().find(|(other, _)| *other == key) {
                Some((_, group)) => group.push(id),
                None => groups.push((key, vec![id])),
            }
        }
        for (_, group) in groups {
            self.update_together(&group, uses);
        }
    }

    /// Puts updates together, those left out that depend on others of them or work on the same variable.
    fn update_together(&mut self, group: &[NodeId], uses: &Uses) {
        let mut chosen: Vec<NodeId> = Vec::new();
        let mut handles: HashSet<Endpoint> = HashSet::new();
        for &id in group {
            let Some(node) = self.node(id) else { continue };
            let Some(layout) = update_layout(node.op()) else { continue };
            let mine = &node.inputs[..layout.n_handles];
            if mine.iter().any(|at| handles.contains(at)) || self.any_reaches(&chosen, id) {
                continue;
            }
            handles.extend(mine);
            chosen.push(id);
        }
        // A later one may be what an earlier one waits for.
        while let Some(at) = (0..chosen.len()).find(|&i| {
            let rest: Vec<NodeId> = chosen.iter().copied().filter(|id| *id != chosen[i]).collect();
            self.any_reaches(&rest, chosen[i])
        }) {
            chosen.remove(at);
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
            let Some((from, narrow)) = self.narrow_gradient(*id, at, uses) else {
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
        self.nodes[root_id.index()] = Some(node);
        for id in chosen.into_iter().filter(|id| *id != root_id).chain(casts) {
            self.remove(id, root_id);
        }
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

/// The element type of a step's input.
fn input_type(node: &Node, i: usize) -> Option<DType> {
    let name = match (node.op(), i) {
        ("Cast", _) => "SrcT",
        ("SelectV2", 0) | ("LogicalNot" | "LogicalAnd" | "LogicalOr", _) => return Some(DType::Bool),
        _ => "T",
    };
    node.attrs.dtype(name).ok()
}

#[cfg(test)]
mod tests {
    use kolo_graph::{Graph, Operation, Output, gradients};
    use kolo_ops::math::matmul::matmul;
    use kolo_ops::math::reduce::sum::mean;
    use kolo_ops::nn::bias_add::bias_add;
    use kolo_ops::nn::cross_entropy::softmax_cross_entropy;
    use kolo_ops::nn::max_pool::max_pool;
    use kolo_ops::nn::relu::relu;
    use kolo_ops::optim::gradient_descent::apply_gradient_descent;

    use super::*;

    /// The whole graph as one part of a GPU, fused; nodes that nothing needs are in it too.
    fn fused_part(g: &Graph, fetches: &[Output<'_>]) -> Partition {
        g.check().unwrap();
        let nodes = g.snapshot();
        let fetches = fetches.iter().enumerate().map(|(i, output)| (i, output.endpoint())).collect();
        let origin = nodes.iter().map(|(id, _)| Some(id)).collect();
        let part = Partition { device: 0, nodes, origin, feeds: Vec::new(), fetches, transfers: Vec::new() };
        let fused = fuse(&part, &DeviceName::local("GPU", 0));
        for (id, node) in fused.nodes.iter() {
            let earlier = node.inputs.iter().map(|at| at.node).chain(node.control_inputs.iter().copied());
            assert!(earlier.into_iter().all(|before| before < id), "{} is before its inputs", node.name);
        }
        fused
    }

    fn count(part: &Partition, op: &str) -> usize {
        part.nodes.iter().filter(|(_, node)| node.op() == op).count()
    }

    fn program<'a>(part: &'a Partition, name: &str) -> &'a str {
        let id = part.nodes.find(name).unwrap();
        part.nodes.node(id).attrs.str("program").unwrap()
    }

    fn input<'g>(g: &'g Graph, name: &str, dims: &[usize]) -> Output<'g> {
        g.placeholder::<f32>(name, kolo_core::Shape::new(dims).unwrap())
    }

    #[test]
    fn trees_become_one_node_and_what_others_see_stays() {
        let g = kolo_ops::graph();
        let (a, b) = (input(&g, "a", &[4, 3]), input(&g, "b", &[3]));
        let seen = a * b;
        let root = g.op("Tanh").input(relu(seen + a) * seen).name("root").out();
        let part = fused_part(&g, &[root, seen]);
        assert_eq!((count(&part, "Mul"), count(&part, "_KoloFusedMap")), (1, 1));
        assert_eq!(program(&part, "root"), "AddV2,float,-,i0 i1;Relu,float,-,v0;Mul,float,-,v1 i0;Tanh,float,-,v2");
        // Nobody sees it: it goes in too, though it is used twice.
        let part = fused_part(&g, &[root]);
        assert_eq!(count(&part, "Mul"), 0);
        // A single value is not computed again for each element.
        let g = kolo_ops::graph();
        let (a, s) = (input(&g, "a", &[4, 3]), input(&g, "s", &[]));
        let root = g.op("Mul").input(a).input(g.op("Exp").input(s).out()).out();
        assert_eq!(count(&fused_part(&g, &[root]), "_KoloFusedMap"), 0);
    }

    #[test]
    fn nodes_that_others_wait_for_stay() {
        let g = kolo_ops::graph();
        let a = input(&g, "a", &[4]);
        let first = relu(a);
        let root = g.op("Neg").input(first).out();
        let after = g.control_dependencies(&[first.operation()], || g.op("NoOp").name("after").build());
        let _ = after;
        assert_eq!(count(&fused_part(&g, &[root]), "Relu"), 1);
    }

    #[test]
    fn a_training_step_of_a_dense_layer_has_few_nodes_left() {
        let g = kolo_ops::graph();
        let (x, y) = (input(&g, "x", &[8, 4]), input(&g, "y", &[8, 3]));
        let variable = |name: &str, dims: &[usize]| {
            g.variable(name, kolo_core::Tensor::zeros(DType::F32, kolo_core::Shape::new(dims).unwrap()).unwrap())
        };
        let variables = [variable("w", &[4, 5]), variable("b", &[5]), variable("v", &[5, 3]), variable("c", &[3])];
        let [w, b, v, c] = variables.map(|variable| variable.read());
        let hidden = relu(bias_add(matmul(x, w), b));
        let loss = mean(softmax_cross_entropy(bias_add(matmul(hidden, v), c), y), &[0]);
        let rate = g.constant(0.1f32);
        let grads = gradients(&[loss], &[w, b, v, c]).unwrap();
        let updates: Vec<Operation<'_>> = variables
            .iter()
            .zip(grads)
            .map(|(variable, grad)| apply_gradient_descent(variable.handle(), rate, grad.unwrap().dense().unwrap()))
            .collect();
        let train = g.control_dependencies(&updates, || g.op("NoOp").name("train").build());
        let part = fused_part(&g, &[loss]);
        assert_eq!(count(&part, "_KoloFusedMatMul"), 2);
        assert_eq!(count(&part, "_KoloFusedCrossEntropy"), 1);
        assert_eq!(count(&part, "_KoloFusedMapAndSum"), 1, "the gradient of Relu and its bias");
        assert_eq!(count(&part, "_KoloApplyAll"), 1);
        for op in ["BiasAdd", "Relu", "ReluGrad", "ResourceApplyGradientDescent", "SoftmaxCrossEntropyWithLogits"] {
            assert_eq!(count(&part, op), 0, "{op}");
        }
        let end = part.nodes.find(&train.name()).unwrap();
        let waits = &part.nodes.node(end).control_inputs;
        assert_eq!(waits.len(), 1, "for all updates at once");
        assert_eq!(part.nodes.node(waits[0]).attrs.int("N").unwrap(), 4);
    }

    #[test]
    fn updates_take_narrow_gradients_as_they_are() {
        let g = kolo_ops::graph();
        let variables = ["a", "b"].map(|name| g.variable(name, kolo_core::Tensor::zeros(DType::F32, [3]).unwrap()));
        let rate = g.constant(0.1f32);
        for (variable, name) in variables.iter().zip(["da", "db"]) {
            let narrow = g.op("Placeholder").name(name).attr("dtype", DType::BF16).out();
            let grad = g.op("Cast").input(narrow).attr("DstT", DType::F32).out();
            apply_gradient_descent(variable.handle(), rate, grad);
        }
        let part = fused_part(&g, &[]);
        let all = part.nodes.iter().find(|(_, node)| node.op() == "_KoloApplyAll").unwrap().1;
        assert_eq!(all.attrs.dtype("Tgrad").unwrap(), DType::BF16);
        assert_eq!((all.attrs.int("N").unwrap(), all.inputs.len()), (2, 5));
    }

    #[test]
    fn updates_that_depend_on_each_other_stay_apart() {
        let g = kolo_ops::graph();
        let variable = |name: &str| g.variable(name, kolo_core::Tensor::zeros(DType::F32, [3]).unwrap());
        let (a, b, c) = (variable("a"), variable("b"), variable("c"));
        let (rate, grad) = (g.constant(0.1f32), input(&g, "grad", &[3]));
        let first = apply_gradient_descent(a.handle(), rate, grad);
        let second = g.control_dependencies(&[first], || apply_gradient_descent(b.handle(), rate, b.read()));
        let again = apply_gradient_descent(a.handle(), rate, grad);
        let third = apply_gradient_descent(c.handle(), rate, grad);
        let _ = (second, again, third);
        let part = fused_part(&g, &[]);
        assert_eq!(count(&part, "_KoloApplyAll"), 1);
        assert_eq!(count(&part, "ResourceApplyGradientDescent"), 2);
    }

    #[test]
    fn what_goes_around_a_norm_is_added_in_its_gradient() {
        let g = kolo_ops::graph();
        let (x, scale, offset) = (input(&g, "x", &[4, 8]), input(&g, "scale", &[8]), input(&g, "offset", &[8]));
        let y = kolo_ops::nn::layer_norm::layer_norm(x, scale, offset, 1e-5) + x;
        let grads = gradients(&[y], &[x, scale]).unwrap();
        let fetches: Vec<Output<'_>> = grads.into_iter().map(|grad| grad.unwrap().dense().unwrap()).collect();
        let part = fused_part(&g, &fetches);
        assert_eq!((count(&part, "_KoloFusedLayerNormGrad"), count(&part, "AddN")), (1, 0));
        let at: Vec<u32> = part.fetches.iter().map(|(_, at)| at.index).collect();
        assert_eq!(at, [0, 1]);
    }

    #[test]
    fn a_pool_after_relu_takes_its_gradient_along() {
        let g = kolo_ops::graph();
        let x = input(&g, "x", &[2, 4, 4, 3]);
        let pooled = max_pool(relu(x), [2, 2], [2, 2], "SAME");
        let grad = gradients(&[pooled], &[x]).unwrap()[0].unwrap().dense().unwrap();
        let part = fused_part(&g, &[grad]);
        assert_eq!((count(&part, "_KoloFusedMaxPoolGradRelu"), count(&part, "ReluGrad")), (1, 0));
    }

    #[test]
    fn a_pool_takes_its_bias_and_relu_along_both_ways() {
        let g = kolo_ops::graph();
        let (x, b) = (input(&g, "x", &[2, 4, 4, 3]), input(&g, "b", &[3]));
        let pooled = max_pool(relu(bias_add(x, b)), [2, 2], [2, 2], "SAME");
        let grads = gradients(&[pooled], &[x, b]).unwrap();
        let grads: Vec<Output<'_>> = grads.into_iter().map(|grad| grad.unwrap().dense().unwrap()).collect();
        let part = fused_part(&g, &[pooled, grads[0], grads[1]]);
        assert_eq!((count(&part, "_KoloFusedBiasReluPool"), count(&part, "_KoloFusedBiasReluPoolGrad")), (1, 1));
        for op in ["BiasAdd", "Relu", "MaxPool", "MaxPoolGrad", "ReluGrad", "BiasAddGrad"] {
            assert_eq!(count(&part, op), 0, "{op}");
        }
        let at: Vec<i64> = part.fetches.iter().map(|(_, at)| i64::from(at.index)).collect();
        assert_eq!(at, [0, 0, 1]);
        assert_eq!(part.fetches[1].1.node, part.fetches[2].1.node);
    }

    #[test]
    fn what_is_pooled_stays_if_it_is_wanted_elsewhere() {
        let g = kolo_ops::graph();
        let (x, b) = (input(&g, "x", &[2, 4, 4, 3]), input(&g, "b", &[3]));
        let seen = relu(bias_add(x, b));
        let pooled = max_pool(seen, [2, 2], [2, 2], "SAME");
        let part = fused_part(&g, &[pooled, seen]);
        assert_eq!((count(&part, "_KoloFusedBiasReluPool"), count(&part, "MaxPool")), (0, 1));
        let g = kolo_ops::graph();
        let (x, b) = (input(&g, "x", &[2, 4, 4, 3]), input(&g, "b", &[3]));
        let overlapping = max_pool(relu(bias_add(x, b)), [3, 3], [2, 2], "SAME");
        let part = fused_part(&g, &[overlapping]);
        assert_eq!(count(&part, "_KoloFusedBiasReluPool"), 0);
    }
}
