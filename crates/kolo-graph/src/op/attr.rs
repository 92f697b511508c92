//! Attributes: the compile-time arguments of a node.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use kolo_core::{DType, Error, PartialShape, Result, Tensor};

/// One attribute's value. Lists hold values of one kind.
#[derive(Clone, Debug, PartialEq)]
pub enum AttrValue {
    /// A byte string.
    Str(Bytes),
    /// An integer.
    Int(i64),
    /// A float.
    Float(f32),
    /// A truth value.
    Bool(bool),
    /// A dtype.
    Type(DType),
    /// A shape, possibly partial.
    Shape(PartialShape),
    /// A whole tensor, held by reference: a large constant costs no copy.
    Tensor(Tensor),
    /// Several values.
    List(Vec<AttrValue>),
    /// The name of a function; kept so that graphs survive a round trip, never called.
    Func(Arc<str>),
}

impl AttrValue {
    /// What a person calls this kind of value.
    pub fn kind(&self) -> &'static str {
        match self {
            AttrValue::Str(_) => "string",
            AttrValue::Int(_) => "int",
            AttrValue::Float(_) => "float",
            AttrValue::Bool(_) => "bool",
            AttrValue::Type(_) => "type",
            AttrValue::Shape(_) => "shape",
            AttrValue::Tensor(_) => "tensor",
            AttrValue::List(_) => "list",
            AttrValue::Func(_) => "func",
        }
    }
}

impl fmt::Display for AttrValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AttrValue::Str(text) => write!(f, "{:?}", String::from_utf8_lossy(text)),
            AttrValue::Int(value) => write!(f, "{value}"),
            AttrValue::Float(value) => write!(f, "{value:?}"),
            AttrValue::Bool(value) => write!(f, "{value}"),
            AttrValue::Type(dtype) => write!(f, "{dtype}"),
            AttrValue::Shape(shape) => write!(f, "{shape}"),
            AttrValue::Tensor(tensor) => write!(f, "{tensor:?}"),
            AttrValue::List(values) => {
                f.write_str("[")?;
                for (i, value) in values.iter().enumerate() {
                    if i > 0 {
                        f.write_str(", ")?;
                    }
                    write!(f, "{value}")?;
                }
                f.write_str("]")
            }
            AttrValue::Func(name) => write!(f, "func {name}"),
        }
    }
}

macro_rules! from {
    ($($ty:ty => |$value:ident| $expr:expr;)*) => {
        $(impl From<$ty> for AttrValue {
            fn from($value: $ty) -> AttrValue { $expr }
        })*
    };
}

from! {
    &str => |value| AttrValue::Str(Bytes::copy_from_slice(value.as_bytes()));
    String => |value| AttrValue::Str(value.into());
    i64 => |value| AttrValue::Int(value);
    i32 => |value| AttrValue::Int(value.into());
    usize => |value| AttrValue::Int(value as i64);
    f32 => |value| AttrValue::Float(value);
    bool => |value| AttrValue::Bool(value);
    DType => |value| AttrValue::Type(value);
    PartialShape => |value| AttrValue::Shape(value);
    Tensor => |value| AttrValue::Tensor(value);
}

impl<T: Into<AttrValue>> From<Vec<T>> for AttrValue {
    fn from(values: Vec<T>) -> AttrValue {
        AttrValue::List(values.into_iter().map(Into::into).collect())
    }
}

impl<T: Clone + Into<AttrValue>> From<&[T]> for AttrValue {
    fn from(values: &[T]) -> AttrValue {
        values.to_vec().into()
    }
}

/// A node's attributes, sorted by name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Attrs(Vec<(Arc<str>, AttrValue)>);

impl Attrs {
    /// The value of an attribute, if set.
    pub fn find(&self, name: &str) -> Option<&AttrValue> {
        self.0.binary_search_by(|(key, _)| (**key).cmp(name)).ok().map(|at| &self.0[at].1)
    }

    /// Sets an attribute, replacing an earlier value.
    pub fn set(&mut self, name: impl Into<Arc<str>>, value: impl Into<AttrValue>) {
        self.put(name.into(), value.into());
    }

    /// [`Attrs::set`], compiled once.
    fn put(&mut self, name: Arc<str>, value: AttrValue) {
        match self.0.binary_search_by(|(key, _)| (**key).cmp(&name)) {
            Ok(at) => self.0[at].1 = value,
            Err(at) => self.0.insert(at, (name, value)),
        }
    }

    /// Removes an attribute.
    pub fn remove(&mut self, name: &str) {
        self.0.retain(|(key, _)| **key != *name);
    }

    /// All of them, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &AttrValue)> {
        self.0.iter().map(|(key, value)| (&**key, value))
    }

    fn expect<'a, T>(&'a self, name: &str, kind: &str, pick: impl Fn(&'a AttrValue) -> Option<T>) -> Result<T> {
        let value = self.find(name).ok_or_else(|| Error::invalid_argument(format!("attribute '{name}' is missing")))?;
        pick(value).ok_or_else(|| {
            Error::invalid_argument(format!("attribute '{name}' should be a {kind}, found {} {value}", value.kind()))
        })
    }

    fn expect_list<'a, T>(
        &'a self,
        name: &str,
        kind: &str,
        pick: impl Fn(&'a AttrValue) -> Option<T>,
    ) -> Result<Vec<T>> {
        self.expect(name, kind, |value| match value {
            AttrValue::List(values) => values.iter().map(&pick).collect(),
            _ => None,
        })
    }

    /// A dtype attribute.
    pub fn dtype(&self, name: &str) -> Result<DType> {
        self.expect(name, "type", as_dtype)
    }

    /// A `list(type)` attribute.
    pub fn dtypes(&self, name: &str) -> Result<Vec<DType>> {
        self.expect_list(name, "list(type)", as_dtype)
    }

    /// An integer attribute.
    pub fn int(&self, name: &str) -> Result<i64> {
        self.expect(name, "int", as_int)
    }

    /// A `list(int)` attribute.
    pub fn ints(&self, name: &str) -> Result<Vec<i64>> {
        self.expect_list(name, "list(int)", as_int)
    }

    /// A float attribute.
    pub fn float(&self, name: &str) -> Result<f32> {
        self.expect(name, "float", |value| match value {
            AttrValue::Float(value) => Some(*value),
            _ => None,
        })
    }

    /// A truth value.
    pub fn bool(&self, name: &str) -> Result<bool> {
        self.expect(name, "bool", |value| match value {
            AttrValue::Bool(value) => Some(*value),
            _ => None,
        })
    }

    /// A string attribute, as text; bytes that are not UTF-8 are an error.
    pub fn str(&self, name: &str) -> Result<&str> {
        self.expect(name, "string", as_str)
    }

    /// A `list(string)` attribute, as text.
    pub fn strs(&self, name: &str) -> Result<Vec<&str>> {
        self.expect_list(name, "list(string)", as_str)
    }

    /// A shape attribute.
    pub fn shape(&self, name: &str) -> Result<&PartialShape> {
        self.expect(name, "shape", as_shape)
    }

    /// A `list(shape)` attribute.
    pub fn shapes(&self, name: &str) -> Result<Vec<&PartialShape>> {
        self.expect_list(name, "list(shape)", as_shape)
    }

    /// A tensor attribute.
    pub fn tensor(&self, name: &str) -> Result<&Tensor> {
        self.expect(name, "tensor", |value| match value {
            AttrValue::Tensor(tensor) => Some(tensor),
            _ => None,
        })
    }
}

fn as_dtype(value: &AttrValue) -> Option<DType> {
    match value {
        AttrValue::Type(dtype) => Some(*dtype),
        _ => None,
    }
}

fn as_int(value: &AttrValue) -> Option<i64> {
    match value {
        AttrValue::Int(value) => Some(*value),
        _ => None,
    }
}

fn as_str(value: &AttrValue) -> Option<&str> {
    match value {
        AttrValue::Str(text) => std::str::from_utf8(text).ok(),
        _ => None,
    }
}

fn as_shape(value: &AttrValue) -> Option<&PartialShape> {
    match value {
        AttrValue::Shape(shape) => Some(shape),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_kind_is_named() {
        let mut attrs = Attrs::default();
        attrs.set("T", DType::F32);
        attrs.set("N", 2i64);
        attrs.set("N", 3i64);
        assert_eq!(attrs.int("N"), Ok(3));
        assert_eq!(attrs.dtype("T"), Ok(DType::F32));
        assert_eq!(
            attrs.int("T").map_err(|e| e.to_string()),
            Err("attribute 'T' should be a int, found type float".into())
        );
        assert_eq!(attrs.int("M").map_err(|e| e.to_string()), Err("attribute 'M' is missing".into()));
    }
}
