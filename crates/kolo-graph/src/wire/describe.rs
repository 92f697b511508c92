//! What a protobuf message looks like: the names, numbers and kinds of its fields, as plain data.
//!
//! prost's derive knows numbers and types but not names, and the text format is all names. A [`Message`] is the
//! missing half. The text parser and printer read nothing else, and the tests hold every table against the struct it
//! describes and against TensorFlow's own descriptors.

use std::fmt;

/// A message struct with a [`Message`] table, and therefore a text form.
pub trait Described: prost::Message + Default {
    /// The table for this struct. It lists every field, with the number and the type of its `#[prost(..)]` attribute;
    /// printing a struct that its table contradicts panics.
    const DESCRIPTION: &'static Message;
}

/// A message: its full name and its fields.
pub struct Message {
    /// The full name with its package, such as `tensorflow.NodeDef`.
    pub name: &'static str,
    /// The fields, at most 64, in order of their numbers.
    pub fields: &'static [Field],
}

/// A field of a message.
#[derive(Debug)]
pub struct Field {
    /// The name, as the text format spells it.
    pub name: &'static str,
    /// The number that stands for the name on the wire.
    pub number: u32,
    /// What one value of the field is.
    pub kind: Kind,
    /// How many values there may be, and whether a default value can be told from none.
    pub label: Label,
}

/// What one value of a field is. The names are protobuf's.
#[derive(Clone, Copy)]
pub enum Kind {
    /// `true` or `false`.
    Bool,
    /// A signed integer, 32 bits; a varint on the wire, as all integers but [`Kind::Fixed64`] are.
    Int32,
    /// A signed integer, 64 bits.
    Int64,
    /// An unsigned integer, 32 bits.
    Uint32,
    /// An unsigned integer, 64 bits.
    Uint64,
    /// An unsigned integer that is always eight bytes on the wire.
    Fixed64,
    /// A float, 32 bits.
    Float,
    /// A float, 64 bits.
    Double,
    /// UTF-8.
    String,
    /// Any bytes.
    Bytes,
    /// A number of this enum, or any other `int32`.
    Enum(&'static Enum),
    /// Another message.
    Message(&'static Message),
}

/// How often a field may occur.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Label {
    /// At most one value. A scalar equal to its default is the same as an absent one (proto3).
    Single,
    /// At most one value, and a default one is still a value (proto2).
    Optional,
    /// At most one value among all fields that name the same oneof.
    Oneof(&'static str),
    /// Any number of values, in order.
    Repeated,
    /// Any number of entries: messages with the fields `key` (1) and `value` (2), no key twice.
    Map,
}

/// An enum: its full name and its values.
pub struct Enum {
    /// The full name with its package, such as `tensorflow.DataType`.
    pub name: &'static str,
    /// Names and numbers. Numbers that are not listed are still legal on the wire.
    pub values: &'static [(&'static str, i32)],
}

impl Message {
    /// The field with this name.
    #[must_use]
    pub fn field(&self, name: &str) -> Option<&'static Field> {
        self.fields.iter().find(|field| field.name == name)
    }

    /// The field with this number.
    #[must_use]
    pub fn field_numbered(&self, number: u32) -> Option<&'static Field> {
        self.fields.iter().find(|field| field.number == number)
    }
}

impl Field {
    /// Whether the field takes more than one value.
    #[must_use]
    pub fn is_repeated(&self) -> bool {
        match self.label {
            Label::Repeated | Label::Map => true,
            Label::Single | Label::Optional | Label::Oneof(_) => false,
        }
    }
}

impl Enum {
    /// The name of a number.
    #[must_use]
    pub fn name_of(&self, number: i32) -> Option<&'static str> {
        self.values.iter().find(|value| value.1 == number).map(|value| value.0)
    }

    /// The number of a name.
    #[must_use]
    pub fn number_of(&self, name: &str) -> Option<i32> {
        self.values.iter().find(|value| value.0 == name).map(|value| value.1)
    }
}

/// Messages refer to each other in circles, so only the name is shown.
impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl fmt::Debug for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The kind as a `.proto` file spells it.
impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bool => "bool",
            Self::Int32 => "int32",
            Self::Int64 => "int64",
            Self::Uint32 => "uint32",
            Self::Uint64 => "uint64",
            Self::Fixed64 => "fixed64",
            Self::Float => "float",
            Self::Double => "double",
            Self::String => "string",
            Self::Bytes => "bytes",
            Self::Enum(e) => e.name,
            Self::Message(message) => message.name,
        })
    }
}

impl fmt::Debug for Enum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}
