//! `AttrValue`: the value of an attribute.

use std::collections::BTreeMap;

use super::{TensorProto, TensorShapeProto};

/// `tensorflow.AttrValue`: one attribute's value, or none.
#[derive(Clone, PartialEq, prost::Message)]
pub struct AttrValue {
    /// The value. `None` is what an empty message decodes to.
    #[prost(oneof = "Value", tags = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10")]
    pub value: Option<Value>,
}

/// The oneof `value` of [`AttrValue`]. The large variants are boxed, so that a map of small ones stays small.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum Value {
    /// `list(..)` of any of the others.
    #[prost(message, boxed, tag = "1")]
    List(Box<ListValue>),
    /// `string`, in any encoding or none.
    #[prost(bytes = "vec", tag = "2")]
    S(Vec<u8>),
    /// `int`.
    #[prost(int64, tag = "3")]
    I(i64),
    /// `float`.
    #[prost(float, tag = "4")]
    F(f32),
    /// `bool`.
    #[prost(bool, tag = "5")]
    B(bool),
    /// `type`: a number of [`DATA_TYPE`](super::DATA_TYPE).
    #[prost(int32, tag = "6")]
    Type(i32),
    /// `shape`.
    #[prost(message, tag = "7")]
    Shape(TensorShapeProto),
    /// `tensor`.
    #[prost(message, boxed, tag = "8")]
    Tensor(Box<TensorProto>),
    /// In a function's body: the name of the function's attribute to put here.
    #[prost(string, tag = "9")]
    Placeholder(String),
    /// `func`: a function's name and its attributes.
    #[prost(message, tag = "10")]
    Func(NameAttrList),
}

/// `tensorflow.AttrValue.ListValue`: a list. At most one field is non-empty; an empty list has none.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ListValue {
    /// `list(string)`.
    #[prost(bytes = "vec", repeated, tag = "2")]
    pub s: Vec<Vec<u8>>,
    /// `list(int)`.
    #[prost(int64, repeated, tag = "3")]
    pub i: Vec<i64>,
    /// `list(float)`.
    #[prost(float, repeated, tag = "4")]
    pub f: Vec<f32>,
    /// `list(bool)`.
    #[prost(bool, repeated, tag = "5")]
    pub b: Vec<bool>,
    /// `list(type)`: numbers of [`DATA_TYPE`](super::DATA_TYPE).
    #[prost(int32, repeated, tag = "6")]
    pub r#type: Vec<i32>,
    /// `list(shape)`.
    #[prost(message, repeated, tag = "7")]
    pub shape: Vec<TensorShapeProto>,
    /// `list(tensor)`.
    #[prost(message, repeated, tag = "8")]
    pub tensor: Vec<TensorProto>,
    /// `list(func)`.
    #[prost(message, repeated, tag = "9")]
    pub func: Vec<NameAttrList>,
}

/// `tensorflow.NameAttrList`: a function's name and the attributes to call it with.
#[derive(Clone, PartialEq, prost::Message)]
pub struct NameAttrList {
    /// The function.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Its attributes by name.
    #[prost(btree_map = "string, message", tag = "2")]
    pub attr: BTreeMap<String, AttrValue>,
}
