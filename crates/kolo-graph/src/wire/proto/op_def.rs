//! `OpDef`, the signature of an op or a function, and the full types it may mention.

use super::{AttrValue, DtypeAndShape};

/// `tensorflow.OpDef`: a signature.
#[derive(Clone, PartialEq, prost::Message)]
pub struct OpDef {
    /// The op's or the function's name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// The inputs.
    #[prost(message, repeated, tag = "2")]
    pub input_arg: Vec<ArgDef>,
    /// The outputs.
    #[prost(message, repeated, tag = "3")]
    pub output_arg: Vec<ArgDef>,
    /// The attributes.
    #[prost(message, repeated, tag = "4")]
    pub attr: Vec<AttrDef>,
    /// One line for people.
    #[prost(string, tag = "5")]
    pub summary: String,
    /// More lines for people.
    #[prost(string, tag = "6")]
    pub description: String,
    /// Since when not to use it, if so.
    #[prost(message, optional, tag = "8")]
    pub deprecation: Option<OpDeprecation>,
    /// Whether it adds up any number of inputs of one type.
    #[prost(bool, tag = "16")]
    pub is_aggregate: bool,
    /// Whether two nodes with equal inputs may differ.
    #[prost(bool, tag = "17")]
    pub is_stateful: bool,
    /// Whether its two inputs may change places.
    #[prost(bool, tag = "18")]
    pub is_commutative: bool,
    /// Whether it takes references to variables that have no value yet.
    #[prost(bool, tag = "19")]
    pub allows_uninitialized_input: bool,
    /// For functions: names of the control outputs.
    #[prost(string, repeated, tag = "20")]
    pub control_output: Vec<String>,
    /// Whether it talks to other devices by itself.
    #[prost(bool, tag = "21")]
    pub is_distributed_communication: bool,
}

/// `tensorflow.OpDef.ArgDef`: an input or an output, standing for one tensor or several.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ArgDef {
    /// The name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Text for people.
    #[prost(string, tag = "2")]
    pub description: String,
    /// A number of [`DATA_TYPE`](super::DATA_TYPE), or 0 where an attribute says.
    #[prost(int32, tag = "3")]
    pub r#type: i32,
    /// The attribute that says the type.
    #[prost(string, tag = "4")]
    pub type_attr: String,
    /// The attribute that says how many tensors there are.
    #[prost(string, tag = "5")]
    pub number_attr: String,
    /// The attribute that says the types of all tensors.
    #[prost(string, tag = "6")]
    pub type_list_attr: String,
    /// For resources: types and shapes of what they hold.
    #[prost(message, repeated, tag = "7")]
    pub handle_data: Vec<DtypeAndShape>,
    /// Whether it is a reference to a variable.
    #[prost(bool, tag = "16")]
    pub is_ref: bool,
    /// The full type.
    #[prost(message, optional, tag = "17")]
    pub experimental_full_type: Option<FullTypeDef>,
}

/// `tensorflow.OpDef.AttrDef`: an attribute's declaration.
#[derive(Clone, PartialEq, prost::Message)]
pub struct AttrDef {
    /// The name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// `int`, `list(type)` and so on.
    #[prost(string, tag = "2")]
    pub r#type: String,
    /// The value of an attribute that a node does not give.
    #[prost(message, optional, tag = "3")]
    pub default_value: Option<AttrValue>,
    /// Text for people.
    #[prost(string, tag = "4")]
    pub description: String,
    /// Whether `minimum` counts.
    #[prost(bool, tag = "5")]
    pub has_minimum: bool,
    /// The least value of an `int`, or the least length of a list.
    #[prost(int64, tag = "6")]
    pub minimum: i64,
    /// A list of the legal values, where not all are.
    #[prost(message, optional, tag = "7")]
    pub allowed_values: Option<AttrValue>,
}

/// `tensorflow.OpDeprecation`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct OpDeprecation {
    /// The graph version since which the op must not be used.
    #[prost(int32, tag = "1")]
    pub version: i32,
    /// Why, and what to use instead.
    #[prost(string, tag = "2")]
    pub explanation: String,
}

/// `tensorflow.FullTypeDef`: a type with arguments.
#[derive(Clone, PartialEq, prost::Message)]
pub struct FullTypeDef {
    /// A number of [`FULL_TYPE_ID`](super::FULL_TYPE_ID).
    #[prost(int32, tag = "1")]
    pub type_id: i32,
    /// The arguments.
    #[prost(message, repeated, tag = "2")]
    pub args: Vec<FullTypeDef>,
    /// A literal that is part of the type.
    #[prost(oneof = "FullTypeAttr", tags = "3, 4")]
    pub attr: Option<FullTypeAttr>,
}

/// The oneof `attr` of [`FullTypeDef`].
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum FullTypeAttr {
    /// A name.
    #[prost(string, tag = "3")]
    S(String),
    /// A number.
    #[prost(int64, tag = "4")]
    I(i64),
}
