//! Writes the body of a function in place of a call.

use std::collections::HashMap;

use kolo_core::{Error, Result};

use super::library::{AttrMap, count, outputs_of, substitute, with_defaults};
use super::lower::{Call, Lowering, Site, dedup, merged_device, node_of, output, text};
use crate::Flow;
use crate::op::registry::did_you_mean;
use crate::op::unknown::MOST_OUTPUTS;
use crate::rewrite::order::topological_order;
use crate::wire::proto::{AttrValue, FunctionDef, NameAttrList, NodeDef, OpDef, Value};

/// A body on its way into the flat graph.
struct Body {
    function: String,
    /// The tensors that each argument stands for.
    args: HashMap<String, Vec<String>>,
    /// The nodes, with the call's attributes in place.
    nodes: Vec<NodeDef>,
    index: HashMap<String, usize>,
    /// What each node became.
    made: Vec<Made>,
    /// The outputs of nodes whose op is not in the table, as far as the body reads them; see [`Body::note_output`].
    unknown_outputs: HashMap<usize, Vec<(String, usize)>>,
    /// See [`Lowering::after_flow`].
    after_flow: Vec<bool>,
}

/// What becomes of nodes that change something, in a body that does not say which of its nodes must run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unstated {
    /// They run: in a function of TensorFlow 1 that is called.
    Run,
    /// They run where an output needs them: in branches and bodies of loops, whose functions say what else must.
    AsNeeded,
}

enum Made {
    /// Nothing yet: a call that is not written out.
    Pending,
    /// A node of this name.
    Node(String),
    /// A call, or an argument: these outputs, and the nodes to wait for.
    Tensors { outputs: Vec<String>, done: Vec<String> },
}

impl Lowering<'_> {
    /// Writes the body of `called` at `site`, with `inputs` as its arguments. Returns its outputs and what must run for
    /// its effects.
    pub fn inline(
        &mut self,
        called: &NameAttrList,
        inputs: Vec<String>,
        site: &Site,
        unstated: Unstated,
    ) -> Result<(Vec<String>, Vec<String>)> {
        /// Each level takes some of the stack of the thread that imports.
        const MOST_LEVELS: usize = 64;
        let (signature, function) = self.options.functions.find(&called.name)?;
        if self.stack.len() >= MOST_LEVELS || self.stack.contains(&called.name) {
            let shown = 8.min(self.stack.len());
            let mut path = self.stack[self.stack.len() - shown..].to_vec();
            path.push(called.name.clone());
            let what = match self.stack.contains(&called.name) {
                true => format!("function '{}' calls itself", called.name),
                false => format!("functions call each other more than {MOST_LEVELS} levels deep"),
            };
            return Err(Error::unimplemented(format!(
                "{what}: {}; Kolo writes a function's body in place of each call, which would not end; write the \
                 recursion as a loop",
                path.join(" calls ")
            )));
        }
        self.count(0)?;
        self.stack.push(called.name.clone());
        let written = self.write_body(called, (signature, function), inputs, site, unstated);
        self.stack.pop();
        // The innermost function is where the mistake is; those around it would only bury it.
        written.map_err(|error| match error.message().contains(" (in function '") {
            true => error,
            false => error.and(format_args!(" (in function '{}')", called.name)),
        })
    }

    fn write_body(
        &mut self,
        called: &NameAttrList,
        (signature, function): (&OpDef, &FunctionDef),
        inputs: Vec<String>,
        site: &Site,
        unstated: Unstated,
    ) -> Result<(Vec<String>, Vec<String>)> {
        let attrs = with_defaults(&called.attr, signature);
        let mut body = self.read_body(signature, function, &attrs, inputs, site)?;
        for i in self.body_order(&body)? {
            self.write_node(&mut body, i, site).map_err(|error| {
                let node = &body.nodes[i];
                error.with_node(&node.name, &node.op, &node.device)
            })?;
        }
        let mut outputs = Vec::new();
        for arg in &signature.output_arg {
            let from = function.ret.get(&arg.name).ok_or_else(|| {
                Error::invalid_argument(format!(
                    "function '{}' does not say what it returns as '{}'",
                    called.name, arg.name
                ))
            })?;
            let tensors = self.tensors(&body, from)?;
            let expected = count(arg, &attrs)?;
            if tensors.len() != expected {
                return Err(Error::invalid_argument(format!(
                    "function '{}' returns {} tensors as '{}', which should be {expected}",
                    called.name,
                    tensors.len(),
                    arg.name
                )));
            }
            outputs.extend(tensors);
        }
        let mut effects = Vec::new();
        for name in function.control_ret.values() {
            effects.extend(body.waits_for(name)?);
        }
        if function.control_ret.is_empty() && unstated == Unstated::Run {
            effects.extend(self.unstated_effects(&body)?);
        }
        dedup(&mut effects);
        let may_be_dead = body.nodes.iter().any(|node| self.flow_of(node) == Flow::Switch);
        if !effects.is_empty() && may_be_dead {
            // An effect in a branch that was not taken is dead, and the function goes on all the same, unless it is in
            // such a branch itself.
            let trigger = self.emit(site, "effects", "ControlTrigger", Vec::new(), &effects, [])?;
            effects = vec![trigger];
            effects.extend(site.pivot.clone());
        }
        if effects.len() > 1 {
            effects = vec![self.emit(site, "end", "NoOp", Vec::new(), &effects, [])?];
        }
        Ok((outputs, effects))
    }

    /// Gives the arguments their tensors and the plain nodes their names.
    fn read_body(
        &mut self,
        signature: &OpDef,
        function: &FunctionDef,
        attrs: &AttrMap,
        inputs: Vec<String>,
        site: &Site,
    ) -> Result<Body> {
        let n_inputs = inputs.len();
        let mut args = HashMap::new();
        let mut flat = inputs.iter();
        let mut n_expected = 0usize;
        for arg in &signature.input_arg {
            let n = count(arg, attrs)?;
            n_expected = n_expected.saturating_add(n);
            args.insert(arg.name.clone(), flat.by_ref().take(n).cloned().collect());
        }
        if n_expected != n_inputs {
            return Err(Error::invalid_argument(format!(
                "function '{}' takes {n_expected} inputs, found {n_inputs}",
                signature.name
            )));
        }
        let mut body = Body {
            function: signature.name.clone(),
            args,
            nodes: Vec::with_capacity(function.node_def.len()),
            index: HashMap::with_capacity(function.node_def.len()),
            made: Vec::with_capacity(function.node_def.len()),
            unknown_outputs: HashMap::new(),
            after_flow: self.after_flow(&function.node_def),
        };
        for (i, node) in function.node_def.iter().enumerate() {
            if body.index.insert(node.name.clone(), i).is_some() || body.args.contains_key(&node.name) {
                return Err(Error::invalid_argument(format!(
                    "function '{}' has the name '{}' twice",
                    signature.name, node.name
                )));
            }
            let attr =
                substitute(&node.attr, attrs).map_err(|error| error.with_node(&node.name, &node.op, &node.device))?;
            body.made.push(match &*node.op {
                "_Arg" => {
                    let given = match attr.get("index").and_then(|value| value.value.as_ref()) {
                        Some(Value::I(i)) => usize::try_from(*i).ok().and_then(|i| inputs.get(i)),
                        _ => None,
                    };
                    let given = given.ok_or_else(|| {
                        Error::invalid_argument(format!("'{}' is not an argument of the function", node.name))
                    })?;
                    Made::Tensors { outputs: vec![given.clone()], done: vec![node_of(given).to_owned()] }
                }
                "_Retval" => Made::Tensors { outputs: Vec::new(), done: Vec::new() },
                _ if self.options.functions.is_called_by(node) => Made::Pending,
                _ => Made::Node(self.unique(&format!("{}{}", site.scope, node.name))),
            });
            let is_unknown =
                !self.options.functions.is_called_by(node) && self.options.registry.find(&node.op).is_err();
            if is_unknown && !matches!(&*node.op, "_Arg" | "_Retval") {
                body.unknown_outputs.insert(i, Vec::new());
            }
            body.nodes.push(NodeDef { attr, ..node.clone() });
        }
        let inputs = function.node_def.iter().flat_map(|node| &node.input).chain(function.ret.values());
        inputs.for_each(|input| body.note_output(input));
        Ok(body)
    }

    /// The numbers of the body's nodes, each after what it takes; edges that close loops aside.
    fn body_order(&self, body: &Body) -> Result<Vec<usize>> {
        let flow = |node: &NodeDef| self.flow_of(node);
        let needs = |node: &NodeDef| {
            let is_merge = flow(node) == Flow::Merge;
            let sources = node.input.iter().filter_map(|input| body.index.get(node_of(input.trim_start_matches('^'))));
            sources.copied().filter(|&i| !(is_merge && flow(&body.nodes[i]) == Flow::NextIteration)).collect()
        };
        topological_order(&body.nodes.iter().map(needs).collect::<Vec<Vec<usize>>>()).map_err(|cycle| {
            let names: Vec<String> = cycle.iter().take(8).map(|&i| format!("'{}'", body.nodes[i].name)).collect();
            Error::invalid_argument(format!("function '{}' has a cycle: {}", body.function, names.join(" needs ")))
        })
    }

    /// What a node does to the control flow of a step.
    pub fn flow_of(&self, node: &NodeDef) -> Flow {
        self.options.registry.find(&node.op).map_or(Flow::Plain, |(def, _)| def.flow)
    }

    /// For each of these nodes, whether a loop or branch that is written in plain nodes leads to it.
    pub fn after_flow(&self, nodes: &[NodeDef]) -> Vec<bool> {
        let starts = |node: &NodeDef| matches!(self.flow_of(node), Flow::Enter | Flow::Switch);
        let mut open: Vec<usize> = (0..nodes.len()).filter(|&i| starts(&nodes[i])).collect();
        let mut found = vec![false; nodes.len()];
        if open.is_empty() {
            return found;
        }
        let index: HashMap<&str, usize> = nodes.iter().enumerate().map(|(i, node)| (node.name.as_str(), i)).collect();
        let mut readers: Vec<Vec<usize>> = vec![Vec::new(); nodes.len()];
        for (i, node) in nodes.iter().enumerate() {
            for input in &node.input {
                if let Some(&source) = index.get(node_of(input.trim_start_matches('^'))) {
                    readers[source].push(i);
                }
            }
        }
        while let Some(i) = open.pop() {
            if !std::mem::replace(&mut found[i], true) {
                open.extend(&readers[i]);
            }
        }
        found
    }

    fn write_node(&mut self, body: &mut Body, i: usize, site: &Site) -> Result<()> {
        let node = body.nodes[i].clone();
        if matches!(&*node.op, "_Arg" | "_Retval") {
            return Ok(());
        }
        let mut inputs = Vec::with_capacity(node.input.len());
        let mut controls = Vec::new();
        for input in &node.input {
            match input.strip_prefix('^') {
                Some(name) => controls.extend(body.waits_for(name)?),
                None => inputs.extend(self.tensors(body, input)?),
            }
        }
        dedup(&mut controls);
        let device = merged_device(&site.device, &node.device)?;
        let Made::Node(name) = &body.made[i] else {
            let scope = format!("{}/", self.unique(&format!("{}{}", site.scope, node.name)));
            let first = inputs.first().filter(|_| body.after_flow[i]).map(|tensor| node_of(tensor).to_owned());
            let inner = Site { scope, device, pivot: first.or_else(|| site.pivot.clone()) };
            let lowered = self.call(&Call { node: &node, inputs, controls }, &inner)?;
            body.made[i] = Made::Tensors { outputs: lowered.outputs, done: lowered.done };
            return Ok(());
        };
        let mut attr = node.attr.clone();
        if let Some(AttrValue { value: Some(Value::List(classes)) }) = attr.get_mut("_class") {
            classes.s = classes.s.iter().filter_map(|class| body.renamed_class(class)).collect();
        }
        if let Some(AttrValue { value: Some(Value::S(frame)) }) = attr.get("frame_name")
            && matches!(&*node.op, "Enter" | "RefEnter")
        {
            let frame = format!("{}{}{}", self.options.frame_prefix, site.scope, String::from_utf8_lossy(frame));
            attr.insert("frame_name".to_owned(), text(&frame));
        }
        let written = NodeDef { name: name.clone(), input: inputs, device, attr, ..node };
        self.push(site, written, &controls)
    }

    /// The tensors that an input of a body's node stands for: `argument`, `argument:index`, `node:output` or
    /// `node:output:index`.
    fn tensors(&self, body: &Body, input: &str) -> Result<Vec<String>> {
        let bad = |why: &str| Error::invalid_argument(format!("input '{input}' {why}"));
        let mut parts = input.split(':');
        let name = parts.next().unwrap_or_default();
        let rest: Vec<&str> = parts.collect();
        let index = |digits: &str| digits.parse::<usize>().map_err(|_| bad("does not end in a number"));
        let pick = |tensors: &[String], k: usize| {
            tensors.get(k).map(|tensor| vec![tensor.clone()]).ok_or_else(|| bad("does not exist"))
        };
        if let Some(tensors) = body.args.get(name) {
            return match rest.as_slice() {
                [] => Ok(tensors.clone()),
                [k] => pick(tensors, index(k)?),
                _ => Err(bad("is not an argument")),
            };
        }
        let Some(&i) = body.index.get(name) else {
            let known = body.index.keys().chain(body.args.keys()).map(String::as_str);
            return Err(bad(&format!("is neither an argument nor a node{}", did_you_mean(name, known))));
        };
        let (wanted, k) = match rest.as_slice() {
            // Only nodes with one output may be spelt so; older functions do.
            [] => (None, Some(0)),
            [wanted] => (Some(*wanted), None),
            [wanted, k] => (Some(*wanted), Some(index(k)?)),
            _ => return Err(bad("has too many parts")),
        };
        if let (Made::Tensors { outputs, .. }, "_Arg") = (&body.made[i], &*body.nodes[i].op) {
            return Ok(outputs.clone());
        }
        let named = match body.unknown_outputs.get(&i) {
            Some(read) => read.clone(),
            None => outputs_of(self.options.registry, self.options.functions, &body.nodes[i])?,
        };
        let (mut start, mut n) = (0usize, 0usize);
        let mut found = false;
        for (output, size) in &named {
            start += n;
            n = *size;
            if wanted.is_none_or(|wanted| wanted == output) {
                found = true;
                break;
            }
        }
        if !found {
            return Err(bad(&format!("names an output that {} does not have", body.nodes[i].op)));
        }
        let range = match k {
            Some(k) if k < n => start + k..start + k + 1,
            Some(_) => return Err(bad("does not exist")),
            None => start..start + n,
        };
        match &body.made[i] {
            Made::Node(name) => Ok(range.map(|k| output(name, k)).collect()),
            Made::Tensors { outputs, .. } => {
                outputs.get(range).map(<[String]>::to_vec).ok_or_else(|| bad("does not exist"))
            }
            Made::Pending => Err(Error::internal(format!("'{name}' is used before it is written out"))),
        }
    }

    /// Functions of TensorFlow 1 do not say which of their nodes must run. All that change something do.
    fn unstated_effects(&self, body: &Body) -> Result<Vec<String>> {
        let mut effects = Vec::new();
        for (node, made) in body.nodes.iter().zip(&body.made) {
            if let Made::Node(name) = made {
                // Whoever calls a function with an unknown op is told so: it may be one that changes something.
                let is_needed = match self.options.registry.find(&node.op) {
                    Ok((def, _)) => def.stateful && def.effects.is_seen_elsewhere(),
                    Err(_) => true,
                };
                if is_needed {
                    effects.push(name.clone());
                }
            } else if let Made::Tensors { done, .. } = made
                && (is_stateful_call(node) || self.options.functions.find(&node.op).is_ok_and(|(s, _)| s.is_stateful))
            {
                effects.extend(done.iter().cloned());
            }
        }
        Ok(effects)
    }
}

fn is_stateful_call(node: &NodeDef) -> bool {
    matches!(&*node.op, "StatefulPartitionedCall" | "If" | "While" | "Case")
}

impl Body {
    /// Notes that the body reads `node:output:index`, if the op of the node is not in the table: such outputs are numbered
    /// in the order in which the body first reads them, since nobody knows their own.
    fn note_output(&mut self, input: &str) {
        let mut parts = input.split(':');
        let node = parts.next().and_then(|name| self.index.get(name));
        let Some(outputs) = node.and_then(|i| self.unknown_outputs.get_mut(i)) else { return };
        let name = parts.next().unwrap_or_default();
        let index = parts.next().and_then(|digits| digits.parse().ok()).unwrap_or(0usize);
        let size = index.saturating_add(1).min(MOST_OUTPUTS as usize);
        match outputs.iter_mut().find(|(known, _)| known == name) {
            Some((_, known)) => *known = size.max(*known),
            None => outputs.push((name.to_owned(), size)),
        }
    }

    /// The nodes to wait for in place of `name`.
    fn waits_for(&self, name: &str) -> Result<Vec<String>> {
        if let Some(tensors) = self.args.get(name) {
            return Ok(tensors.iter().map(|tensor| node_of(tensor).to_owned()).collect());
        }
        match self.index.get(name).map(|&i| &self.made[i]) {
            Some(Made::Node(name)) => Ok(vec![name.clone()]),
            Some(Made::Tensors { done, .. }) => Ok(done.clone()),
            Some(Made::Pending) => Err(Error::internal(format!("'{name}' is waited for before it is written out"))),
            None => Err(Error::invalid_argument(format!(
                "'{name}' is waited for in function '{}', which has no such node",
                self.function
            ))),
        }
    }

    /// A colocation group under the name that its node has now; `None` if the node is nowhere.
    fn renamed_class(&self, class: &[u8]) -> Option<Vec<u8>> {
        let name = std::str::from_utf8(class).ok()?.strip_prefix("loc:@")?;
        let node = self.waits_for(name).ok()?.into_iter().next()?;
        Some(format!("loc:@{node}").into_bytes())
    }
}
