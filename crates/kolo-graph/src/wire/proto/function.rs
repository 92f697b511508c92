//! The function library of a graph.

use std::collections::BTreeMap;

use super::{AttrValue, NodeDef, OpDef};

/// `tensorflow.FunctionDefLibrary`: functions and their gradients.
#[derive(Clone, PartialEq, prost::Message)]
pub struct FunctionDefLibrary {
    /// The functions.
    #[prost(message, repeated, tag = "1")]
    pub function: Vec<FunctionDef>,
    /// Which function is the gradient of which.
    #[prost(message, repeated, tag = "2")]
    pub gradient: Vec<GradientDef>,
    /// Which function is the gradient of a registered op type.
    #[prost(message, repeated, tag = "3")]
    pub registered_gradients: Vec<RegisteredGradient>,
}

/// `tensorflow.FunctionDef`: a function.
#[derive(Clone, PartialEq, prost::Message)]
pub struct FunctionDef {
    /// Name, arguments, results and attributes.
    #[prost(message, optional, tag = "1")]
    pub signature: Option<OpDef>,
    /// The body. Inputs are spelt `argument` or `node:output_name:index`.
    #[prost(message, repeated, tag = "3")]
    pub node_def: Vec<NodeDef>,
    /// Which tensor of the body each result is.
    #[prost(btree_map = "string, string", tag = "4")]
    pub ret: BTreeMap<String, String>,
    /// Attributes of the function itself.
    #[prost(btree_map = "string, message", tag = "5")]
    pub attr: BTreeMap<String, AttrValue>,
    /// Which node of the body each control output is.
    #[prost(btree_map = "string, string", tag = "6")]
    pub control_ret: BTreeMap<String, String>,
    /// Attributes of the arguments, by their index.
    #[prost(btree_map = "uint32, message", tag = "7")]
    pub arg_attr: BTreeMap<u32, ArgAttrs>,
    /// Arguments with equal numbers are the same resource.
    #[prost(btree_map = "uint32, uint32", tag = "8")]
    pub resource_arg_unique_id: BTreeMap<u32, u32>,
}

/// `tensorflow.FunctionDef.ArgAttrs`: attributes of one argument.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ArgAttrs {
    /// By name.
    #[prost(btree_map = "string, message", tag = "1")]
    pub attr: BTreeMap<String, AttrValue>,
}

/// `tensorflow.GradientDef`: a function and its gradient.
#[derive(Clone, PartialEq, prost::Message)]
pub struct GradientDef {
    /// The function.
    #[prost(string, tag = "1")]
    pub function_name: String,
    /// The function that computes its gradient.
    #[prost(string, tag = "2")]
    pub gradient_func: String,
}

/// `tensorflow.RegisteredGradient`: an op type and its gradient.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RegisteredGradient {
    /// The function that computes the gradient.
    #[prost(string, tag = "1")]
    pub gradient_func: String,
    /// The op type, as `_gradient_op_type` attributes name it.
    #[prost(string, tag = "2")]
    pub registered_op_type: String,
}
