//! Ops that are not in the table. A graph may have such nodes: they are carried through, can be fed, and are written again as
//! they came. Only a run that needs one is refused.

use std::collections::BTreeMap;

use kolo_core::Error;

use super::registry::nearest;
use crate::wire::proto::{AttrValue, Value};
use crate::{Effects, Gradient, Node, OpDef, OpRegistry};

/// What a message says of a node whose op is not in the table.
#[derive(Clone, Debug, PartialEq)]
pub struct UnknownOp {
    /// The op's name.
    pub(crate) op: String,
    /// Its attributes as they came, since nobody knows what they should be.
    pub(crate) attrs: BTreeMap<String, AttrValue>,
}

/// The most outputs that are believed of such an op because something reads them: a few bytes of a message must not ask for
/// much memory.
pub(crate) const MOST_OUTPUTS: u32 = 64;

/// Takes the place of the description that is missing. Nothing may be removed or repeated that nobody knows.
pub(crate) const DEF: OpDef = OpDef {
    name: "<unknown>",
    stateful: true,
    effects: Effects::Outside,
    gradient: Gradient::Refused("the op is not in Kolo's table, so nothing is known of its gradient"),
    ..OpDef::BASE
};

impl UnknownOp {
    /// The error for a run that needs `node`, which has this op.
    pub(crate) fn error(&self, node: &Node) -> Error {
        let error = Error::not_found(format!(
            "Op type not registered '{}': Kolo has no such op, and this run needs {}; feed its outputs, fetch something that \
             does not need it, or compute it in the client",
            self.op,
            node.describe()
        ));
        error.with_node(&node.name, &self.op, &node.device.to_string())
    }

    /// The dtypes of its outputs, by number, if an attribute lists them as the ops of datasets and functions do.
    pub(crate) fn listed_outputs(&self) -> &[i32] {
        let lists = ["output_types", "Tout"].iter().filter_map(|name| self.attrs.get(*name)?.value.as_ref());
        let mut types = lists.filter_map(|value| match value {
            Value::List(list) => Some(list.r#type.as_slice()),
            _ => None,
        });
        types.next().unwrap_or_default()
    }
}

/// Adds the most similar ops of the table to an error about one that is not there.
pub(crate) fn with_nearest(error: Error, op: &str, registry: &OpRegistry) -> Error {
    match nearest(op, registry.names()).as_slice() {
        [] => error.and("; `kolo ops` lists those that there are"),
        names => error.and(format_args!("; the nearest ops are {}, and `kolo ops` lists all", names.join(", "))),
    }
}
