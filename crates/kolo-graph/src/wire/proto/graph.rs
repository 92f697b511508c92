//! `GraphDef` and `NodeDef`.

use std::collections::BTreeMap;

use super::{AttrValue, FullTypeDef, FunctionDefLibrary, GraphDebugInfo};

/// `tensorflow.GraphDef`: nodes, the functions they call, and the versions they need.
#[derive(Clone, PartialEq, prost::Message)]
pub struct GraphDef {
    /// The nodes, in no promised order.
    #[prost(message, repeated, tag = "1")]
    pub node: Vec<NodeDef>,
    /// The functions that nodes call by name.
    #[prost(message, optional, tag = "2")]
    pub library: Option<FunctionDefLibrary>,
    /// Deprecated: `versions.producer` from before there was `versions`.
    #[prost(int32, tag = "3")]
    pub version: i32,
    /// What wrote the graph and what may read it.
    #[prost(message, optional, tag = "4")]
    pub versions: Option<VersionDef>,
    /// Where in the user's program the nodes come from.
    #[prost(message, optional, tag = "5")]
    pub debug_info: Option<GraphDebugInfo>,
}

/// `tensorflow.NodeDef`: one node.
#[derive(Clone, PartialEq, prost::Message)]
pub struct NodeDef {
    /// The name, unique in its graph.
    #[prost(string, tag = "1")]
    pub name: String,
    /// The name of the op.
    #[prost(string, tag = "2")]
    pub op: String,
    /// `node`, `node:port`, or `^node` for a control input; control inputs come last.
    #[prost(string, repeated, tag = "3")]
    pub input: Vec<String>,
    /// A device name, possibly partial, or empty for "anywhere".
    #[prost(string, tag = "4")]
    pub device: String,
    /// Attributes by name.
    #[prost(btree_map = "string, message", tag = "5")]
    pub attr: BTreeMap<String, AttrValue>,
    /// Which nodes this one was made from, after rewriting.
    #[prost(message, optional, tag = "6")]
    pub experimental_debug_info: Option<ExperimentalDebugInfo>,
    /// The full type of the outputs.
    #[prost(message, optional, tag = "7")]
    pub experimental_type: Option<FullTypeDef>,
}

/// `tensorflow.NodeDef.ExperimentalDebugInfo`: the origin of a rewritten node.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ExperimentalDebugInfo {
    /// The nodes it was made from.
    #[prost(string, repeated, tag = "1")]
    pub original_node_names: Vec<String>,
    /// The functions those nodes were in, empty for the graph itself.
    #[prost(string, repeated, tag = "2")]
    pub original_func_names: Vec<String>,
}

/// `tensorflow.VersionDef`: who wrote some data and who may read it.
#[derive(Clone, PartialEq, prost::Message)]
pub struct VersionDef {
    /// The version of the program that wrote the data.
    #[prost(int32, tag = "1")]
    pub producer: i32,
    /// Readers older than this must refuse.
    #[prost(int32, tag = "2")]
    pub min_consumer: i32,
    /// Readers of these versions must refuse.
    #[prost(int32, repeated, tag = "3")]
    pub bad_consumers: Vec<i32>,
}
