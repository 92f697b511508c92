//! Text to message, by way of wire bytes that prost then decodes.

use std::borrow::Cow;
use std::fmt;

use bytes::BufMut;
use prost::encoding::{WireType, encode_key, encode_varint};

use super::lex::{Lexer, Token};
use super::{MAX_DEPTH, TextError, number, quote};
use crate::wire::describe::{Described, Enum, Field, Kind, Label, Message};

/// Reads a message from text.
///
/// A field given twice, two fields of one oneof, a field that the message does not have and anything that is not of
/// the field's type are errors. Of two map entries with one key the later counts.
///
/// ```
/// use kolo_graph::wire::{proto::GraphDef, text};
///
/// let graph: GraphDef = text::parse("node { name: 'x' op: \"Placeholder\" }").unwrap();
/// assert_eq!(graph.node[0].op, "Placeholder");
/// let error = text::parse::<GraphDef>("node { name: 7 }").unwrap_err();
/// assert_eq!(error.to_string(), "1:14: field `name` of tensorflow.NodeDef: expected a string, found `7`");
/// ```
pub fn parse<M: Described>(text: &str) -> Result<M, TextError> {
    parse_marked(text, None).map(|(message, _)| message)
}

/// As [`parse`], and where the messages of the outermost message's field `outer` begin, with their field `inner`.
pub(crate) fn parse_marked<M: Described>(
    text: &str,
    marks: Option<(&'static str, &'static str)>,
) -> Result<(M, Vec<Mark>), TextError> {
    let mut parser = Parser { lexer: Lexer::new(text)?, wanted: marks, marks: Vec::new() };
    let mut bytes = Vec::new();
    parser.message(M::DESCRIPTION, End::OfText, 0, &mut bytes)?;
    let message = M::decode(bytes.as_slice())
        .map_err(|error| TextError::at(text, text.len(), format!("not a message: {error}")))?;
    Ok((message, parser.marks))
}

/// Where a message begins and where one of its fields stands, as bytes of the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    pub start: usize,
    pub field: Option<usize>,
}

struct Parser<'a> {
    lexer: Lexer<'a>,
    /// The fields to mark: one of the outermost message, and one of what that holds.
    wanted: Option<(&'static str, &'static str)>,
    marks: Vec<Mark>,
}

/// What ends a message.
#[derive(Clone, Copy, PartialEq)]
enum End {
    OfText,
    Bracket(char),
}

impl<'a> Parser<'a> {
    /// Reads fields of `message` up to and including `end`, and appends their bytes.
    fn message(
        &mut self,
        message: &'static Message,
        end: End,
        depth: usize,
        out: &mut Vec<u8>,
    ) -> Result<(), TextError> {
        let mut seen = Seen { message, fields: 0 };
        loop {
            let offset = self.lexer.offset();
            let name = match (self.lexer.peek(), end) {
                (Token::Word(name), _) => name,
                (Token::End, End::OfText) => return Ok(()),
                (Token::Punct(punct), End::Bracket(close)) if punct == close => {
                    return self.lexer.advance();
                }
                (_, End::OfText) => return Err(self.lexer.expected("a field name")),
                (_, End::Bracket(close)) => {
                    return Err(self.lexer.expected(format_args!("a field name or `{close}`")));
                }
            };
            let field = message
                .field(name)
                .ok_or_else(|| self.lexer.error(offset, format!("{} has no field `{name}`", message.name)))?;
            seen.add(field).map_err(|what| self.lexer.error(offset, what))?;
            self.lexer.advance()?;
            self.field(message, field, depth, out)?;
            // One separator may follow a field; most writers leave it out.
            if !self.lexer.accept(',')? {
                self.lexer.accept(';')?;
            }
        }
    }

    /// Reads what follows a field's name: a value, or a list of values in brackets.
    fn field(
        &mut self,
        message: &'static Message,
        field: &'static Field,
        depth: usize,
        out: &mut Vec<u8>,
    ) -> Result<(), TextError> {
        let colon = self.lexer.accept(':')?;
        if !colon && !matches!(field.kind, Kind::Message(_)) {
            let what = format!("`:` after field `{}` of {}", field.name, message.name);
            return Err(self.lexer.expected(what));
        }
        if !field.is_repeated() || !self.lexer.accept('[')? {
            return self.value(message, field, depth, out);
        }
        if self.lexer.accept(']')? {
            return Ok(());
        }
        loop {
            self.value(message, field, depth, out)?;
            if self.lexer.accept(']')? {
                return Ok(());
            }
            if !self.lexer.accept(',')? {
                return Err(self.lexer.expected("`,` or `]`"));
            }
        }
    }

    /// Reads one value and appends it with its key.
    fn value(
        &mut self,
        message: &'static Message,
        field: &'static Field,
        depth: usize,
        out: &mut Vec<u8>,
    ) -> Result<(), TextError> {
        let offset = self.lexer.offset();
        match (depth, self.wanted) {
            (0, Some((outer, _))) if field.name == outer => self.marks.push(Mark { start: offset, field: None }),
            (1, Some((_, inner))) if field.name == inner => {
                if let Some(mark) = self.marks.last_mut() {
                    mark.field = Some(offset);
                }
            }
            _ => {}
        }
        let error = |lexer: &Lexer<'_>, expected: &str, found: &dyn fmt::Display| {
            let field = field.name;
            let what = format!("field `{field}` of {}: expected {expected}, found {found}", message.name);
            lexer.error(offset, what)
        };
        if let Kind::Message(inner) = field.kind {
            let close = match self.lexer.peek() {
                Token::Punct('{') => '}',
                Token::Punct('<') => '>',
                other => return Err(error(&self.lexer, "`{`", &other)),
            };
            if depth == MAX_DEPTH {
                let what = format!("messages nest more than {MAX_DEPTH} deep");
                return Err(self.lexer.error(offset, what));
            }
            self.lexer.advance()?;
            let mut bytes = Vec::new();
            self.message(inner, End::Bracket(close), depth + 1, &mut bytes)?;
            put_bytes(field.number, &bytes, out);
            return Ok(());
        }
        let scalar = self.scalar()?;
        put_scalar(field, &scalar, out).map_err(|expected| error(&self.lexer, &expected, &scalar))
    }

    /// Reads a number, a word or some strings. Anything else is left where it is, for the caller to complain about.
    fn scalar(&mut self) -> Result<Scalar<'a>, TextError> {
        let negative = self.lexer.accept('-')?;
        let mut scalar = Scalar { negative, token: self.lexer.peek(), bytes: Vec::new() };
        match scalar.token {
            Token::Word(_) | Token::Number(_) => self.lexer.advance()?,
            Token::Quoted(_) => {
                // Adjacent strings are one.
                while let Token::Quoted(inner) = self.lexer.peek() {
                    quote::unescape(inner, &mut scalar.bytes)
                        .map_err(|(at, what)| self.lexer.error(self.lexer.offset() + 1 + at, what))?;
                    self.lexer.advance()?;
                }
            }
            Token::Punct(_) | Token::End => {}
        }
        Ok(scalar)
    }
}

/// A value that is not a message.
struct Scalar<'a> {
    negative: bool,
    token: Token<'a>,
    /// What the token stands for, with all strings that follow, where it is a string.
    bytes: Vec<u8>,
}

impl fmt::Display for Scalar<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", if self.negative { "minus " } else { "" }, self.token)
    }
}

impl Scalar<'_> {
    /// The value as an integer type, if it is one.
    fn integer<T: TryFrom<i128>>(&self) -> Option<T> {
        let Token::Number(digits) = self.token else {
            return None;
        };
        let value = i128::from(number::parse_integer(digits)?);
        T::try_from(if self.negative { -value } else { value }).ok()
    }

    fn float(&self) -> Option<f64> {
        let value = match self.token {
            Token::Number(digits) => number::parse_float(digits)?,
            Token::Word(word) => number::parse_float_word(word)?,
            Token::Quoted(_) | Token::Punct(_) | Token::End => return None,
        };
        Some(if self.negative { -value } else { value })
    }

    fn bool(&self) -> Option<bool> {
        match self.token {
            Token::Word("true" | "True" | "t") if !self.negative => Some(true),
            Token::Word("false" | "False" | "f") if !self.negative => Some(false),
            _ => match self.integer::<u8>()? {
                0 => Some(false),
                1 => Some(true),
                _ => None,
            },
        }
    }

    fn enum_number(&self, names: &Enum) -> Option<i32> {
        match self.token {
            Token::Word(name) if !self.negative => names.number_of(name),
            _ => self.integer(),
        }
    }

    fn bytes(&self) -> Option<&[u8]> {
        (matches!(self.token, Token::Quoted(_)) && !self.negative).then_some(&self.bytes)
    }
}

/// Appends a value of the field's kind with its key. The error says what was expected.
fn put_scalar(field: &Field, scalar: &Scalar<'_>, out: &mut Vec<u8>) -> Result<(), Cow<'static, str>> {
    // Negative 32-bit integers are sign-extended to 64 bits on the wire.
    let varint = match field.kind {
        Kind::Bool => u64::from(scalar.bool().ok_or("true or false")?),
        Kind::Int32 => i64::from(scalar.integer::<i32>().ok_or("an int32")?) as u64,
        Kind::Int64 => scalar.integer::<i64>().ok_or("an int64")? as u64,
        Kind::Uint32 => u64::from(scalar.integer::<u32>().ok_or("a uint32")?),
        Kind::Uint64 => scalar.integer().ok_or("a uint64")?,
        Kind::Enum(names) => {
            let number = scalar.enum_number(names);
            i64::from(number.ok_or_else(|| format!("a name or number of {}", names.name))?) as u64
        }
        Kind::Fixed64 => {
            let value = scalar.integer().ok_or("a fixed64")?;
            encode_key(field.number, WireType::SixtyFourBit, out);
            out.put_u64_le(value);
            return Ok(());
        }
        Kind::Float => {
            let value = scalar.float().ok_or("a number")?;
            encode_key(field.number, WireType::ThirtyTwoBit, out);
            out.put_f32_le(value as f32);
            return Ok(());
        }
        Kind::Double => {
            let value = scalar.float().ok_or("a number")?;
            encode_key(field.number, WireType::SixtyFourBit, out);
            out.put_f64_le(value);
            return Ok(());
        }
        Kind::String => {
            let bytes = scalar.bytes().ok_or("a string")?;
            std::str::from_utf8(bytes).map_err(|_| "a string in UTF-8")?;
            put_bytes(field.number, bytes, out);
            return Ok(());
        }
        Kind::Bytes => {
            put_bytes(field.number, scalar.bytes().ok_or("a string")?, out);
            return Ok(());
        }
        Kind::Message(_) => return Err("a message".into()),
    };
    encode_key(field.number, WireType::Varint, out);
    encode_varint(varint, out);
    Ok(())
}

/// Appends bytes with their key and length.
fn put_bytes(number: u32, bytes: &[u8], out: &mut Vec<u8>) {
    encode_key(number, WireType::LengthDelimited, out);
    encode_varint(bytes.len() as u64, out);
    out.extend_from_slice(bytes);
}

/// The fields of a message that were given so far.
struct Seen {
    message: &'static Message,
    /// Bit `i` stands for `message.fields[i]`.
    fields: u64,
}

impl Seen {
    /// Adds a field, or says why it must not be there.
    fn add(&mut self, field: &'static Field) -> Result<(), String> {
        let name = field.name;
        for (at, other) in self.message.fields.iter().enumerate() {
            let same = other.number == field.number;
            let excluded = match field.label {
                Label::Repeated | Label::Map => false,
                Label::Single | Label::Optional => same,
                Label::Oneof(_) => other.label == field.label,
            };
            if excluded && self.fields & (1 << at) != 0 {
                let of = self.message.name;
                return Err(if same {
                    format!("field `{name}` of {of} is given twice")
                } else {
                    format!("{of} has `{}` already and takes no `{name}` besides", other.name)
                });
            }
            if same {
                self.fields |= 1 << at;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::proto::{AttrValue, FullTypeDef, FunctionDef, GraphDef, NodeDef, TensorProto, Value};
    use crate::wire::text;

    #[test]
    fn every_way_to_write_a_field() {
        let plain: NodeDef = parse(
            r#"name: "ab" input: "x" input: "y"
               attr { key: "T" value { type: DT_FLOAT } } attr { key: "s" value { shape { } } }"#,
        )
        .unwrap();
        assert_eq!(plain.name, "ab");
        assert_eq!(plain.attr["T"].value, Some(Value::Type(1)));
        for text in [
            "name: 'a' # not yet\n 'b'; input: ['x', \"y\"], input: [] attr: <key: 'T' value: {type: 1};>\
             attr { value <shape: {},> key:'s'}",
            "attr: [{key: 'T' value {type: 0x1}}, <key: 's' value {shape{}}>] input: 'x' name: '\\x61b' input: 'y'",
            "attr [] attr {key: 'T' value {type: DT_INT8}} attr [{key: 'T' value {type: 01}}]\
             attr {key: 's' value {shape <>}} name: 'a''b' input: ['x'] input: ['y']",
        ] {
            assert_eq!(parse::<NodeDef>(text).unwrap(), plain, "{text}");
        }
    }

    #[test]
    fn numbers_of_every_kind() {
        let tensor: TensorProto = parse(
            "dtype: 77 float_val: [1, -1.5f, inf, - inf, 1e-3f, 1e40, nan] double_val: -Infinity double_val: .5
             int_val: [-2147483648, 0x7fffffff, 017] int64_val: -9223372036854775808
             uint64_val: 18446744073709551615 bool_val: [true, t, True, 1, false, f, False, 0]",
        )
        .unwrap();
        assert_eq!(tensor.dtype, 77);
        assert_eq!(tensor.float_val[..4], [1.0, -1.5, f32::INFINITY, f32::NEG_INFINITY]);
        assert_eq!(tensor.float_val[4..6], [1e-3, f32::INFINITY]);
        assert!(tensor.float_val[6].is_nan());
        assert_eq!(tensor.double_val, [f64::NEG_INFINITY, 0.5]);
        assert_eq!(tensor.int_val, [i32::MIN, i32::MAX, 15]);
        assert_eq!(tensor.int64_val, [i64::MIN]);
        assert_eq!(tensor.uint64_val, [u64::MAX]);
        assert_eq!(tensor.bool_val, [true, true, true, true, false, false, false, false]);
    }

    fn check_error<M: Described>(text: &str, error: &str) {
        match parse::<M>(text) {
            Ok(_) => panic!("{text} was accepted"),
            Err(found) => assert_eq!(found.to_string(), error),
        }
    }

    #[test]
    fn errors_name_place_expected_and_found() {
        check_error::<GraphDef>("node {", "1:7: expected a field name or `}`, found the end of the text");
        check_error::<GraphDef>("node <\n}", "2:1: expected a field name or `>`, found `}`");
        check_error::<GraphDef>("node {} }", "1:9: expected a field name, found `}`");
        check_error::<GraphDef>("nodes {}", "1:1: tensorflow.GraphDef has no field `nodes`");
        check_error::<GraphDef>("node: 5", "1:7: field `node` of tensorflow.GraphDef: expected `{`, found `5`");
        check_error::<GraphDef>(
            "version 5",
            "1:9: expected `:` after field `version` of tensorflow.GraphDef, found `5`",
        );
        check_error::<GraphDef>("version: 1\nversion: 1", "2:1: field `version` of tensorflow.GraphDef is given twice");
        check_error::<GraphDef>(
            "versions {} versions {}",
            "1:13: field `versions` of tensorflow.GraphDef is given twice",
        );
        check_error::<AttrValue>("i: 1 f: 2", "1:6: tensorflow.AttrValue has `i` already and takes no `f` besides");
        check_error::<TensorProto>("int_val: [1 2]", "1:13: expected `,` or `]`, found `2`");
        for (text, expected) in [
            (
                "dtype: DT_FLAOT",
                "1:8: field `dtype` of tensorflow.TensorProto: expected a name or number of tensorflow.DataType, found `DT_FLAOT`",
            ),
            (
                "int_val: 2147483648",
                "1:10: field `int_val` of tensorflow.TensorProto: expected an int32, found `2147483648`",
            ),
            ("int_val: 1.5", "1:10: field `int_val` of tensorflow.TensorProto: expected an int32, found `1.5`"),
            (
                "uint32_val: -1",
                "1:13: field `uint32_val` of tensorflow.TensorProto: expected a uint32, found minus `1`",
            ),
            ("bool_val: 2", "1:11: field `bool_val` of tensorflow.TensorProto: expected true or false, found `2`"),
            ("float_val: 0x1", "1:12: field `float_val` of tensorflow.TensorProto: expected a number, found `0x1`"),
            ("float_val: }", "1:12: field `float_val` of tensorflow.TensorProto: expected a number, found `}`"),
            (
                "float_val: -'x'",
                "1:12: field `float_val` of tensorflow.TensorProto: expected a number, found minus string `x`",
            ),
            ("string_val: x", "1:13: field `string_val` of tensorflow.TensorProto: expected a string, found `x`"),
            ("string_val: 'ab\\q'", "1:16: unknown escape"),
            (
                "version_number: [1]",
                "1:17: field `version_number` of tensorflow.TensorProto: expected an int32, found `[`",
            ),
            ("7: 1", "1:1: expected a field name, found `7`"),
        ] {
            check_error::<TensorProto>(text, expected);
        }
        check_error::<NodeDef>(
            r"name: 'x' '\377'",
            "1:7: field `name` of tensorflow.NodeDef: expected a string in UTF-8, found string `x`",
        );
        check_error::<FunctionDef>(
            "resource_arg_unique_id { key: 1 key: 2 }",
            "1:33: field `key` of map<uint32, uint32> is given twice",
        );
    }

    #[test]
    fn nesting_ends_at_the_limit() {
        let nested = |n: usize| format!("{}{}", "args {".repeat(n), "}".repeat(n));
        let deepest = parse::<FullTypeDef>(&nested(MAX_DEPTH)).unwrap();
        assert_eq!(text::print(&deepest).matches('{').count(), MAX_DEPTH);
        check_error::<FullTypeDef>(&nested(MAX_DEPTH + 1), "1:606: messages nest more than 100 deep");
        parse::<FullTypeDef>(&"args {".repeat(1_000_000)).unwrap_err();
    }
}
