//! Writes a graph as a message.

use std::collections::HashMap;

use kolo_core::Result;

use super::{MIN_CONSUMER_VERSION, PRODUCER_VERSION};
use crate::wire::attr::attr_to_proto;
use crate::wire::proto::{FunctionDefLibrary, GraphDef, NodeDef, VersionDef};
use crate::{Endpoint, Node, Nodes, Signature};

/// What to write differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportOptions {
    /// Leave out attributes that equal their defaults. Shorter, and read by TensorFlow 2 but not by 1.15.
    pub strip_default_attrs: bool,
    /// The version to name as the writer's: ours, or that of the graph this one was made from.
    pub producer: i32,
}

impl Default for ExportOptions {
    fn default() -> ExportOptions {
        ExportOptions { strip_default_attrs: false, producer: PRODUCER_VERSION }
    }
}

/// The nodes as a message, in their own order, with the functions they came with. Constants are shared with it, not copied. An error names the node whose
/// attribute cannot be written, such as a constant that is not in the host's memory.
pub fn export(nodes: &Nodes, options: ExportOptions) -> Result<GraphDef> {
    let mut signatures: HashMap<&str, Signature> = HashMap::new();
    let mut def = GraphDef {
        versions: Some(VersionDef {
            producer: options.producer,
            min_consumer: MIN_CONSUMER_VERSION,
            bad_consumers: Vec::new(),
        }),
        library: (**nodes.library() != FunctionDefLibrary::default()).then(|| (**nodes.library()).clone()),
        ..GraphDef::default()
    };
    for (_, node) in nodes.iter() {
        let signature = match options.strip_default_attrs {
            _ if node.unknown.is_some() => None,
            true if !signatures.contains_key(node.op()) => {
                let signature = Signature::parse(node.def.signature)?;
                Some(&*signatures.entry(node.op()).or_insert(signature))
            }
            true => signatures.get(node.op()),
            false => None,
        };
        let device = node.device.to_string();
        let written = export_node(nodes, node, signature).map_err(|e| e.with_node(&node.name, node.op(), &device))?;
        def.node.push(NodeDef { device, ..written });
    }
    Ok(def)
}

/// All of a node but its device. Attributes that equal a default in `signature` are left out.
fn export_node(nodes: &Nodes, node: &Node, signature: Option<&Signature>) -> Result<NodeDef> {
    let data = node.inputs.iter().map(|&at| input_name(nodes, at));
    let control = node.control_inputs.iter().map(|&id| format!("^{}", nodes.node(id).name));
    let mut written = NodeDef {
        name: node.name.to_string(),
        op: node.op().to_owned(),
        input: data.chain(control).collect(),
        attr: node.unknown.as_ref().map(|unknown| unknown.attrs.clone()).unwrap_or_default(),
        ..NodeDef::default()
    };
    for (name, value) in node.attrs.iter() {
        let default = signature.and_then(|signature| signature.attr(name)?.default.as_ref());
        if default == Some(value) {
            continue;
        }
        let value = attr_to_proto(value).map_err(|error| error.context(format_args!("attribute '{name}'")))?;
        written.attr.insert(name.to_owned(), value);
    }
    Ok(written)
}

/// `name`, or `name:index` for any output but the first.
fn input_name(nodes: &Nodes, at: Endpoint) -> String {
    match at.index {
        0 => nodes.node(at.node).name.to_string(),
        _ => nodes.endpoint_name(at),
    }
}
