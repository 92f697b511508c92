//! Message to text, by way of wire bytes that prost encodes.

use bytes::Buf;
use prost::DecodeError;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};

use super::{number, quote};
use crate::wire::describe::{Described, Field, Kind, Label, Message};

/// Writes a message as text: one field a line, two spaces of indentation a level, fields in the order of their
/// numbers and map entries in the order of their keys.
///
/// ```
/// use kolo_graph::wire::{proto::VersionDef, text};
///
/// let versions = VersionDef { producer: 27, bad_consumers: vec![3, 4], ..VersionDef::default() };
/// assert_eq!(text::print(&versions), "producer: 27\nbad_consumers: 3\nbad_consumers: 4\n");
/// ```
#[must_use]
pub fn print<M: Described>(message: &M) -> String {
    let bytes = message.encode_to_vec();
    let mut printer = Printer { out: String::with_capacity(2 * bytes.len()), indent: 0 };
    // prost writes fields in the order of their numbers, and a BTreeMap in the order of its keys.
    printer.message(M::DESCRIPTION, &bytes).expect("the table fits the struct, as the tests make sure");
    printer.out
}

struct Printer {
    out: String,
    indent: usize,
}

/// A value on the wire.
#[derive(Clone, Copy)]
enum Raw<'a> {
    Varint(u64),
    Fixed32(u32),
    Fixed64(u64),
    Bytes(&'a [u8]),
}

impl Printer {
    fn message(&mut self, message: &Message, mut bytes: &[u8]) -> Result<(), Misfit> {
        while !bytes.is_empty() {
            let (number, on_wire) = decode_key(&mut bytes)?;
            let Some(field) = message.field_numbered(number) else {
                skip_field(on_wire, number, &mut bytes, DecodeContext::default())?;
                continue;
            };
            match (take(on_wire, &mut bytes)?, wire_type(field.kind)) {
                (raw, WireType::LengthDelimited) => self.value(field, raw)?,
                (Raw::Bytes(mut packed), element) => {
                    while !packed.is_empty() {
                        self.value(field, take(element, &mut packed)?)?;
                    }
                }
                (raw, _) => self.value(field, raw)?,
            }
        }
        Ok(())
    }

    /// Writes the entry of a map. Unlike other fields, a value that is a message is written even when the bytes leave
    /// it out, and so is every key and value of a proto2 map.
    fn entry(&mut self, entry: &Message, mut bytes: &[u8]) -> Result<(), Misfit> {
        let mut raws = [None, None];
        while !bytes.is_empty() {
            let (number, on_wire) = decode_key(&mut bytes)?;
            let raw = take(on_wire, &mut bytes)?;
            if let Some(at) = entry.fields.iter().position(|field| field.number == number)
                && let Some(slot) = raws.get_mut(at)
            {
                *slot = Some(raw);
            }
        }
        for (field, raw) in entry.fields.iter().zip(raws) {
            let written_anyway = field.label == Label::Optional || matches!(field.kind, Kind::Message(_));
            match raw {
                Some(raw) => self.value(field, raw)?,
                None if written_anyway => self.value(field, default(field.kind))?,
                None => {}
            }
        }
        Ok(())
    }

    fn value(&mut self, field: &Field, raw: Raw<'_>) -> Result<(), Misfit> {
        self.out.extend(std::iter::repeat_n("  ", self.indent));
        self.out.push_str(field.name);
        if let Kind::Message(inner) = field.kind {
            let Raw::Bytes(bytes) = raw else {
                return Err(Misfit);
            };
            self.out.push_str(" {\n");
            self.indent += 1;
            match field.label {
                Label::Map => self.entry(inner, bytes)?,
                Label::Single | Label::Optional | Label::Oneof(_) | Label::Repeated => {
                    self.message(inner, bytes)?;
                }
            }
            self.indent -= 1;
            self.out.extend(std::iter::repeat_n("  ", self.indent));
            self.out.push_str("}\n");
        } else {
            self.out.push_str(": ");
            scalar(field.kind, raw, &mut self.out)?;
            self.out.push('\n');
        }
        Ok(())
    }
}

/// Writes a value that is not a message.
fn scalar(kind: Kind, raw: Raw<'_>, out: &mut String) -> Result<(), Misfit> {
    // Narrowing takes the low bits, as every protobuf reader does.
    let text = match (kind, raw) {
        (Kind::Bool, Raw::Varint(value)) => (value != 0).to_string(),
        (Kind::Int32, Raw::Varint(value)) => (value as i32).to_string(),
        (Kind::Int64, Raw::Varint(value)) => (value as i64).to_string(),
        (Kind::Uint32, Raw::Varint(value)) => (value as u32).to_string(),
        (Kind::Uint64, Raw::Varint(value)) => value.to_string(),
        (Kind::Fixed64, Raw::Fixed64(value)) => value.to_string(),
        (Kind::Float, Raw::Fixed32(bits)) => number::print_float(f32::from_bits(bits)),
        (Kind::Double, Raw::Fixed64(bits)) => number::print_double(f64::from_bits(bits)),
        (Kind::Enum(names), Raw::Varint(value)) => match names.name_of(value as i32) {
            Some(name) => name.to_owned(),
            None => (value as i32).to_string(),
        },
        (Kind::String | Kind::Bytes, Raw::Bytes(bytes)) => {
            out.push('"');
            quote::escape(bytes, out);
            out.push('"');
            return Ok(());
        }
        _ => return Err(Misfit),
    };
    out.push_str(&text);
    Ok(())
}

/// How values of this kind lie on the wire.
fn wire_type(kind: Kind) -> WireType {
    match kind {
        Kind::Bool | Kind::Int32 | Kind::Int64 | Kind::Uint32 | Kind::Uint64 | Kind::Enum(_) => WireType::Varint,
        Kind::Float => WireType::ThirtyTwoBit,
        Kind::Double | Kind::Fixed64 => WireType::SixtyFourBit,
        Kind::String | Kind::Bytes | Kind::Message(_) => WireType::LengthDelimited,
    }
}

/// Zero, or nothing.
fn default(kind: Kind) -> Raw<'static> {
    match wire_type(kind) {
        WireType::ThirtyTwoBit => Raw::Fixed32(0),
        WireType::SixtyFourBit => Raw::Fixed64(0),
        WireType::LengthDelimited => Raw::Bytes(&[]),
        WireType::Varint | WireType::StartGroup | WireType::EndGroup => Raw::Varint(0),
    }
}

/// Takes a value off the front of `bytes`.
fn take<'a>(wire_type: WireType, bytes: &mut &'a [u8]) -> Result<Raw<'a>, Misfit> {
    Ok(match wire_type {
        WireType::Varint => Raw::Varint(decode_varint(bytes)?),
        WireType::ThirtyTwoBit => Raw::Fixed32(bytes.try_get_u32_le().map_err(|_| Misfit)?),
        WireType::SixtyFourBit => Raw::Fixed64(bytes.try_get_u64_le().map_err(|_| Misfit)?),
        WireType::LengthDelimited => {
            let n_bytes = usize::try_from(decode_varint(bytes)?).map_err(|_| Misfit)?;
            let (value, rest) = bytes.split_at_checked(n_bytes).ok_or(Misfit)?;
            *bytes = rest;
            Raw::Bytes(value)
        }
        WireType::StartGroup | WireType::EndGroup => return Err(Misfit),
    })
}

/// The bytes are not what the table says.
#[derive(Debug)]
struct Misfit;

impl From<DecodeError> for Misfit {
    fn from(_: DecodeError) -> Self {
        Self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::proto::{AttrValue, FunctionDef, GraphDebugInfo, NodeDef, Value};

    #[test]
    fn maps_are_written_like_python() {
        let mut node = NodeDef::default();
        node.attr.insert("b".into(), AttrValue { value: Some(Value::B(false)) });
        node.attr.insert("a".into(), AttrValue::default());
        node.attr.insert(String::new(), AttrValue { value: Some(Value::Type(-7)) });
        assert_eq!(
            print(&node),
            "attr {\n  value {\n    type: -7\n  }\n}\nattr {\n  key: \"a\"\n  value {\n  }\n}\n\
             attr {\n  key: \"b\"\n  value {\n    b: false\n  }\n}\n"
        );

        let mut function = FunctionDef::default();
        function.ret.extend([("a".into(), String::new()), (String::new(), "b".into())]);
        function.resource_arg_unique_id.extend([(10, 2), (9, 0), (0, 0)]);
        assert_eq!(
            print(&function),
            "ret {\n  value: \"b\"\n}\nret {\n  key: \"a\"\n}\nresource_arg_unique_id {\n}\n\
             resource_arg_unique_id {\n  key: 9\n}\nresource_arg_unique_id {\n  key: 10\n  value: 2\n}\n"
        );

        let mut debug_info = GraphDebugInfo::default();
        debug_info.name_to_trace_id.extend([("a".into(), 0), (String::new(), 5)]);
        debug_info.frames_by_id.insert(0, Default::default());
        assert_eq!(
            print(&debug_info),
            "frames_by_id {\n  key: 0\n  value {\n  }\n}\n\
             name_to_trace_id {\n  key: \"\"\n  value: 5\n}\nname_to_trace_id {\n  key: \"a\"\n  value: 0\n}\n"
        );
    }
}
