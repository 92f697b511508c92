//! The walk over a message's nodes: plain nodes stay, calls are written out.

use std::collections::{BTreeMap, HashMap, HashSet};

use kolo_core::{DeviceSpec, Error, Result};
use prost::Message as _;

use super::body::Unstated;
use super::library::{AttrMap, Functions, function_attr};
use super::{CALL_MARK, is_call};
use crate::OpRegistry;
use crate::wire::proto::{AttrValue, FunctionDefLibrary, NameAttrList, NodeDef, Value};

/// What lowering has to know of the graph that the message goes into.
pub(crate) struct LowerOptions<'o> {
    /// The ops that bodies may use.
    pub registry: &'static OpRegistry,
    /// The functions that may be called.
    pub functions: &'o Functions<'o>,
    /// The library that they are in.
    pub library: &'o FunctionDefLibrary,
    /// The functions whose bodies are being written around this graph, outermost first.
    pub within: &'o [String],
    /// Whether the graph has a node of this name already.
    pub is_taken: &'o dyn Fn(&str) -> bool,
    /// Whether this output of a node of the message is replaced by one of the graph.
    pub is_mapped: &'o dyn Fn(&str, usize) -> bool,
    /// The most nodes and calls to write out.
    pub max_nodes: usize,
    /// Comes before the names of loops, which must be unique in the graph.
    pub frame_prefix: &'o str,
}

/// A message's nodes without calls: those of the message in their order, then what the calls were written out as.
pub(crate) struct Flat {
    pub nodes: Vec<NodeDef>,
    /// For each node, the number of the message's node that it comes from.
    pub from: Vec<usize>,
}

/// Writes out the calls among `nodes`; `None` if there are none.
pub(crate) fn lower(nodes: &[NodeDef], options: LowerOptions<'_>) -> Result<Option<Flat>> {
    let needs_lowering =
        |node: &NodeDef| options.functions.is_called_by(node) || matches!(&*node.op, "_Arg" | "_Retval");
    if !nodes.iter().any(needs_lowering) {
        return Ok(None);
    }
    let within = options.within.to_vec();
    let mut lowering = Lowering {
        names: nodes.iter().map(|node| node.name.clone()).collect(),
        options,
        counts: HashMap::new(),
        added: Vec::new(),
        from: Vec::new(),
        current: 0,
        stack: within,
        n_bytes: 0,
        n_written: 0,
    };
    let mut flat = Vec::with_capacity(nodes.len());
    let mut aliases = HashMap::new();
    let after_flow = lowering.after_flow(nodes);
    for (i, node) in nodes.iter().enumerate() {
        lowering.current = i;
        flat.push(match &*node.op {
            _ if lowering.options.functions.is_called_by(node) => lowering
                .top_call(node, after_flow[i], &mut aliases)
                .map_err(|error| error.with_node(&node.name, &node.op, &node.device))?,
            "_Arg" => lowered_arg(node),
            "_Retval" => NodeDef { op: "Identity".into(), attr: only(node, &["T", "_class"]), ..node.clone() },
            _ => node.clone(),
        });
    }
    let mut from: Vec<usize> = (0..nodes.len()).collect();
    from.append(&mut lowering.from);
    flat.append(&mut lowering.added);
    for node in &mut flat {
        for input in node.input.iter_mut().filter(|input| !input.starts_with('^')) {
            follow(input, &aliases);
        }
    }
    Ok(Some(Flat { nodes: flat, from }))
}

/// Outside of a function there is nobody to give the argument, except a feed.
fn lowered_arg(node: &NodeDef) -> NodeDef {
    let mut attr = only(node, &["_class"]);
    if let Some(dtype) = node.attr.get("T") {
        attr.insert("dtype".to_owned(), dtype.clone());
    }
    NodeDef { op: "Placeholder".into(), attr, ..node.clone() }
}

fn only(node: &NodeDef, names: &[&str]) -> AttrMap {
    let kept = node.attr.iter().filter(|(name, _)| names.contains(&name.as_str()));
    kept.map(|(name, value)| (name.clone(), value.clone())).collect()
}

/// Replaces the name of a call's output by that of the tensor which it is. That may be another call's output; the name
/// of a call is always right, so a chain that is too long (or goes in a circle, which import reports) may stop anywhere.
fn follow(input: &mut String, aliases: &HashMap<String, String>) {
    const MOST_STEPS: usize = 64;
    for _ in 0..MOST_STEPS {
        match aliases.get(input) {
            Some(next) => input.clone_from(next),
            None => break,
        }
    }
}

/// Where nodes are written: under which names, on which device, and what those without inputs wait for.
#[derive(Clone)]
pub(super) struct Site {
    /// Empty, or with a slash at its end.
    pub scope: String,
    pub device: String,
    /// In a branch or a loop, a node that runs when (and as often as) the branch or body does.
    pub pivot: Option<String>,
}

/// A call, with its inputs as the flat graph spells them.
pub(super) struct Call<'n> {
    pub node: &'n NodeDef,
    pub inputs: Vec<String>,
    /// The nodes it waits for.
    pub controls: Vec<String>,
}

/// What a call was written out as.
pub(super) struct Lowered {
    /// Its outputs, as inputs of others spell them.
    pub outputs: Vec<String>,
    /// What must run whether or not an output is used; it has run before any output is there.
    pub effects: Vec<String>,
    /// The nodes that have run when the call is over.
    pub done: Vec<String>,
}

/// The state of the walk.
pub(super) struct Lowering<'o> {
    pub options: LowerOptions<'o>,
    names: HashSet<String>,
    /// How often a name was asked for.
    counts: HashMap<String, u32>,
    added: Vec<NodeDef>,
    from: Vec<usize>,
    /// The message's node that is being lowered.
    current: usize,
    /// The functions whose bodies are being written, outermost first.
    pub stack: Vec<String>,
    n_bytes: usize,
    n_written: usize,
}

impl Lowering<'_> {
    /// Lowers a node of the message; returns the node that keeps its name.
    fn top_call(
        &mut self,
        node: &NodeDef,
        is_after_flow: bool,
        aliases: &mut HashMap<String, String>,
    ) -> Result<NodeDef> {
        let (controls, inputs): (Vec<&String>, Vec<&String>) =
            node.input.iter().partition(|input| input.starts_with('^'));
        let call = Call {
            node,
            inputs: inputs.into_iter().cloned().collect(),
            controls: controls.into_iter().map(|input| input.trim_start_matches('^').to_owned()).collect(),
        };
        // In a loop or a branch, nodes without inputs must wait for something that is in there.
        let pivot = call.inputs.first().filter(|_| is_after_flow).map(|tensor| node_of(tensor).to_owned());
        let site = Site { scope: format!("{}/", node.name), device: node.device.clone(), pivot };
        let lowered = self.call(&call, &site)?;
        let mut attr = only(node, &["_class"]);
        let (op, waits) = match lowered.outputs.len() {
            0 => ("NoOp", &lowered.done),
            1 => ("Identity", &lowered.effects),
            _ => {
                attr.insert(CALL_MARK.to_owned(), text(&node.op));
                for (k, output) in lowered.outputs.iter().enumerate() {
                    if (self.options.is_mapped)(&node.name, k) {
                        continue;
                    }
                    if k == 0 {
                        aliases.insert(node.name.clone(), output.clone());
                    }
                    aliases.insert(format!("{}:{k}", node.name), output.clone());
                }
                ("IdentityN", &lowered.effects)
            }
        };
        let waits = waits.iter().map(|name| format!("^{name}"));
        Ok(NodeDef {
            name: node.name.clone(),
            op: op.to_owned(),
            input: lowered.outputs.iter().cloned().chain(waits).collect(),
            device: node.device.clone(),
            attr,
            ..NodeDef::default()
        })
    }

    /// Writes out a call at `site`, whose scope is the call's own.
    pub fn call(&mut self, call: &Call<'_>, site: &Site) -> Result<Lowered> {
        let node = call.node;
        let (outputs, mut effects) = match &*node.op {
            "PartitionedCall" | "StatefulPartitionedCall" => self.plain_call(function_attr(node, "f")?, call, site)?,
            "If" | "StatelessIf" => self.branch(call, site)?,
            "Case" | "StatelessCase" => self.case(call, site)?,
            "While" | "StatelessWhile" => self.repeat(call, site)?,
            "SymbolicGradient" => {
                let function = function_attr(node, "f")?;
                match self.options.functions.gradient_of(&function.name) {
                    Some(gradient) => {
                        let gradient = NameAttrList { name: gradient.to_owned(), attr: function.attr.clone() };
                        self.plain_call(&gradient, call, site)?
                    }
                    None => self.derived_gradient(function, call, site)?,
                }
            }
            other => {
                debug_assert!(!is_call(other));
                let function = NameAttrList { name: node.op.clone(), attr: node.attr.clone() };
                self.plain_call(&function, call, site)?
            }
        };
        dedup(&mut effects);
        let mut done = effects.clone();
        done.extend(outputs.iter().map(|tensor| node_of(tensor).to_owned()));
        if done.is_empty() {
            done.extend(call.controls.iter().cloned());
            done.extend(call.inputs.iter().map(|tensor| node_of(tensor).to_owned()));
        }
        dedup(&mut done);
        Ok(Lowered { outputs, effects, done })
    }

    /// A call of one function: its body, waiting for what the call waits for.
    fn plain_call(
        &mut self,
        function: &NameAttrList,
        call: &Call<'_>,
        site: &Site,
    ) -> Result<(Vec<String>, Vec<String>)> {
        let mut inner = site.clone();
        let mut inputs = call.inputs.clone();
        if !call.controls.is_empty() {
            let gate = self.emit(site, "begin", "NoOp", Vec::new(), &call.controls, [])?;
            for (i, input) in inputs.iter_mut().enumerate() {
                let passed = self.emit(
                    site,
                    &format!("input_{i}"),
                    "Identity",
                    vec![input.clone()],
                    std::slice::from_ref(&gate),
                    [],
                )?;
                *input = passed;
            }
            inner.pivot = Some(gate);
        }
        let (mut outputs, effects) = self.inline(function, inputs, &inner, Unstated::Run)?;
        if !effects.is_empty() {
            for (i, output) in outputs.iter_mut().enumerate() {
                let name = format!("output_{i}");
                *output = self.emit(site, &name, "Identity", vec![std::mem::take(output)], &effects, [])?;
            }
        }
        Ok((outputs, effects))
    }

    /// Adds a node; returns its name, which is `name` in the site's scope unless that is taken.
    pub fn emit<const N: usize>(
        &mut self,
        site: &Site,
        name: &str,
        op: &str,
        inputs: Vec<String>,
        controls: &[String],
        attrs: [(&str, AttrValue); N],
    ) -> Result<String> {
        let name = self.unique(&format!("{}{name}", site.scope));
        let node = NodeDef {
            name: name.clone(),
            op: op.to_owned(),
            input: inputs,
            device: site.device.clone(),
            attr: attrs.into_iter().map(|(name, value)| (name.to_owned(), value)).collect::<BTreeMap<_, _>>(),
            ..NodeDef::default()
        };
        self.push(site, node, controls)?;
        Ok(name)
    }

    /// Adds a node that is complete but for its control inputs. One without any inputs waits for the site's pivot.
    pub fn push(&mut self, site: &Site, mut node: NodeDef, controls: &[String]) -> Result<()> {
        let mut waits: Vec<&String> = controls.iter().collect();
        if node.input.is_empty() && waits.is_empty() {
            waits.extend(&site.pivot);
        }
        node.input.extend(waits.into_iter().map(|name| format!("^{name}")));
        self.count(node.encoded_len())?;
        self.added.push(node);
        self.from.push(self.current);
        Ok(())
    }

    /// Counts a node or a call against the limits.
    pub fn count(&mut self, n_bytes: usize) -> Result<()> {
        /// Constants are copied with each call. Protobuf's limit for a graph.
        const MOST_BYTES: usize = i32::MAX as usize;
        self.n_written += 1;
        self.n_bytes = self.n_bytes.saturating_add(n_bytes);
        let most_nodes = self.options.max_nodes;
        if self.n_written <= most_nodes && self.n_bytes <= MOST_BYTES {
            return Ok(());
        }
        Err(Error::resource_exhausted(format!(
            "the graph has more than {most_nodes} nodes or {MOST_BYTES} bytes when its functions are written out"
        )))
    }

    /// How many more nodes may be written.
    pub fn nodes_left(&self) -> usize {
        self.options.max_nodes.saturating_sub(self.n_written)
    }

    /// A name that no other node has, like `wanted`; it is taken from now on.
    pub fn unique(&mut self, wanted: &str) -> String {
        let mut name = wanted.to_owned();
        while self.names.contains(&name) || (self.options.is_taken)(&name) {
            let count = self.counts.entry(wanted.to_owned()).or_default();
            *count += 1;
            name = format!("{wanted}_{count}");
        }
        self.names.insert(name.clone());
        name
    }
}

/// The device of a node in a body whose caller asks for `outer`: what the node leaves open is the caller's.
pub(super) fn merged_device(outer: &str, inner: &str) -> Result<String> {
    match (outer.is_empty(), inner.is_empty()) {
        (true, _) => Ok(inner.to_owned()),
        (false, true) => Ok(outer.to_owned()),
        (false, false) => Ok(DeviceSpec::parse(outer)?.overridden_by(&DeviceSpec::parse(inner)?).to_string()),
    }
}

/// The node of `node:1`.
pub(super) fn node_of(tensor: &str) -> &str {
    tensor.split(':').next().unwrap_or(tensor)
}

/// How inputs spell output `k` of a node.
pub(super) fn output(node: &str, k: usize) -> String {
    if k == 0 { node.to_owned() } else { format!("{node}:{k}") }
}

pub(super) fn dedup(names: &mut Vec<String>) {
    let mut seen = HashSet::new();
    names.retain(|name| seen.insert(name.clone()));
}

/// An attribute that holds text.
pub(super) fn text(value: &str) -> AttrValue {
    AttrValue { value: Some(Value::S(value.as_bytes().to_vec())) }
}
