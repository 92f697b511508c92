//! Op signatures, written on one line and read once:
//!
//! `(inputs) -> (outputs) ; attrs`
//!
//! An argument is `name:type`, where type is a fixed dtype (`int32`), an attribute that holds a dtype (`T`), `N*T` for
//! N tensors of one dtype, `list(Ts)` for one tensor per entry of a `list(type)` attribute, and `Ref(…)` around one of
//! these for references. An attribute is `name:kind{allowed}>=minimum=default`; without a default it is required.

use kolo_core::{DType, Error, PartialShape, Result, Tensor};

use crate::AttrValue;

/// A parsed signature.
#[derive(Clone, Debug, PartialEq)]
pub struct Signature {
    /// The inputs, in order.
    pub inputs: Vec<ArgDef>,
    /// The outputs, in order.
    pub outputs: Vec<ArgDef>,
    /// The attributes, in the order written.
    pub attrs: Vec<AttrDef>,
}

/// One input or output argument; it may stand for several tensors.
#[derive(Clone, Debug, PartialEq)]
pub struct ArgDef {
    /// Its name.
    pub name: String,
    /// The dtype or dtypes.
    pub ty: ArgType,
    /// A reference to a variable, not a value.
    pub is_ref: bool,
}

/// The dtype or dtypes of an argument.
#[derive(Clone, Debug, PartialEq)]
pub enum ArgType {
    /// Always this one.
    Fixed(DType),
    /// The dtype in this attribute.
    Attr(String),
    /// As many tensors as attribute `count` says, all of one dtype.
    Repeated {
        /// The int attribute that holds the number.
        count: String,
        /// The dtype: fixed or an attribute's.
        element: Box<ArgType>,
    },
    /// One tensor for each dtype in this `list(type)` attribute.
    List(String),
}

/// One attribute.
#[derive(Clone, Debug, PartialEq)]
pub struct AttrDef {
    /// Its name.
    pub name: String,
    /// What values it takes.
    pub kind: AttrKind,
    /// A list of such values.
    pub is_list: bool,
    /// For types: those allowed. Empty: all.
    pub types: Vec<DType>,
    /// For strings: those allowed. Empty: all.
    pub strings: Vec<String>,
    /// The smallest int, or the shortest list.
    pub minimum: Option<i64>,
    /// The value when none is given.
    pub default: Option<AttrValue>,
}

/// The kinds of attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttrKind {
    /// Bytes.
    Str,
    /// An integer.
    Int,
    /// A float.
    Float,
    /// A truth value.
    Bool,
    /// A dtype.
    Type,
    /// A shape.
    Shape,
    /// A tensor.
    Tensor,
    /// A function's name.
    Func,
}

impl Signature {
    /// Reads a signature. The error names the part that is not understood.
    pub fn parse(text: &str) -> Result<Signature> {
        let bad = |why: String| Error::internal(format!("signature '{text}': {why}"));
        let (args, attrs) = text.split_once(';').unwrap_or((text, ""));
        let (inputs, outputs) = args.split_once("->").ok_or_else(|| bad("no '->'".into()))?;
        let args = |side: &str| -> Result<Vec<ArgDef>> {
            let inner = side
                .trim()
                .strip_prefix('(')
                .and_then(|side| side.strip_suffix(')'))
                .ok_or_else(|| bad(format!("'{}' is not in brackets", side.trim())))?;
            split_top(inner).into_iter().map(|arg| parse_arg(arg).map_err(bad)).collect()
        };
        Ok(Signature {
            inputs: args(inputs)?,
            outputs: args(outputs)?,
            attrs: split_top(attrs).into_iter().map(|attr| parse_attr(attr).map_err(bad)).collect::<Result<_>>()?,
        })
    }

    /// The attribute of this name.
    pub fn attr(&self, name: &str) -> Option<&AttrDef> {
        self.attrs.iter().find(|attr| attr.name == name)
    }
}

/// Splits at commas outside of brackets and quotes.
fn split_top(text: &str) -> Vec<&str> {
    let (mut parts, mut depth, mut start, mut quoted) = (Vec::new(), 0i32, 0, false);
    for (i, c) in text.char_indices() {
        match c {
            '"' => quoted = !quoted,
            _ if quoted => {}
            '(' | '{' | '[' => depth += 1,
            ')' | '}' | ']' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(text[start..i].trim());
                start = i + 1;
            }
            _ => {}
        }
    }
    parts.push(text[start..].trim());
    parts.retain(|part| !part.is_empty());
    parts
}

fn parse_arg(text: &str) -> Result<ArgDef, String> {
    let (name, ty) = text.split_once(':').ok_or_else(|| format!("'{text}' has no type"))?;
    let (ty, is_ref) = match ty.trim().strip_prefix("Ref(").and_then(|ty| ty.strip_suffix(')')) {
        Some(inner) => (inner, true),
        None => (ty.trim(), false),
    };
    Ok(ArgDef { name: name.trim().to_owned(), ty: parse_arg_type(ty), is_ref })
}

fn parse_arg_type(text: &str) -> ArgType {
    if let Some(list) = text.strip_prefix("list(").and_then(|text| text.strip_suffix(')')) {
        return ArgType::List(list.to_owned());
    }
    if let Some((count, element)) = text.split_once('*') {
        return ArgType::Repeated { count: count.trim().to_owned(), element: Box::new(parse_arg_type(element.trim())) };
    }
    match DType::from_name(text) {
        Ok(dtype) if dtype.name() == text => ArgType::Fixed(dtype),
        _ => ArgType::Attr(text.to_owned()),
    }
}

fn parse_attr(text: &str) -> Result<AttrDef, String> {
    let (name, rest) = text.split_once(':').ok_or_else(|| format!("attribute '{text}' has no kind"))?;
    let mut rest = rest.trim();
    let is_list = rest.starts_with("list(");
    rest = rest.strip_prefix("list(").unwrap_or(rest);
    let end = rest.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(rest.len());
    let kind = match &rest[..end] {
        "string" => AttrKind::Str,
        "int" => AttrKind::Int,
        "float" => AttrKind::Float,
        "bool" => AttrKind::Bool,
        "type" => AttrKind::Type,
        "shape" => AttrKind::Shape,
        "tensor" => AttrKind::Tensor,
        "func" => AttrKind::Func,
        other => return Err(format!("attribute '{name}' is of unknown kind '{other}'")),
    };
    rest = rest[end..].trim();
    let mut attr = AttrDef {
        name: name.trim().to_owned(),
        kind,
        is_list,
        types: Vec::new(),
        strings: Vec::new(),
        minimum: None,
        default: None,
    };
    // `list(type{…})` and `list(type){…}` are both in use.
    loop {
        if let Some(inner) = rest.strip_prefix('{') {
            let (allowed, tail) = inner.split_once('}').ok_or_else(|| format!("'{text}': no closing brace"))?;
            // Types are parted by commas; strings by commas or, as in `{SAME|VALID}`, by bars.
            for item in split_top(allowed) {
                match kind {
                    AttrKind::Type => attr.types.extend(dtypes_named(item)?),
                    _ => attr.strings.extend(item.split('|').map(|text| text.trim().trim_matches('"').to_owned())),
                }
            }
            rest = tail.trim();
        } else if let Some(tail) = rest.strip_prefix(')') {
            rest = tail.trim();
        } else if let Some(tail) = rest.strip_prefix(">=") {
            let end = tail.find(['=', ')']).unwrap_or(tail.len());
            attr.minimum = Some(tail[..end].trim().parse().map_err(|_| format!("'{text}': bad minimum"))?);
            rest = tail[end..].trim();
        } else if let Some(value) = rest.strip_prefix('=') {
            attr.default = Some(parse_default(&attr, value.trim())?);
            return Ok(attr);
        } else if rest.is_empty() {
            return Ok(attr);
        } else {
            return Err(format!("'{text}': '{rest}' is not understood"));
        }
    }
}

/// `num` stands for all numbers, `real` for those that have an order, `quantized` for integers that stand for reals.
fn dtypes_named(name: &str) -> Result<Vec<DType>, String> {
    use DType::*;
    const QUANTIZED: [DType; 5] = [QI8, QU8, QI32, QI16, QU16];
    const REAL: [DType; 12] = [F32, F64, I32, U8, I16, I8, I64, BF16, U16, F16, U32, U64];
    match name {
        "num" => Ok(REAL.into_iter().chain([Complex64, Complex128]).chain(QUANTIZED).collect()),
        "quantized" => Ok(QUANTIZED.to_vec()),
        "real" => Ok(REAL.to_vec()),
        _ => Ok(vec![DType::from_name(name).map_err(|error| error.to_string())?]),
    }
}

fn parse_default(attr: &AttrDef, text: &str) -> Result<AttrValue, String> {
    if attr.is_list {
        let inner = text
            .strip_prefix('[')
            .and_then(|text| text.strip_suffix(']'))
            .ok_or_else(|| format!("default '{text}' of '{}' is not a list", attr.name))?;
        return split_top(inner)
            .into_iter()
            .map(|item| parse_scalar(attr, item))
            .collect::<Result<_, _>>()
            .map(AttrValue::List);
    }
    parse_scalar(attr, text)
}

fn parse_scalar(attr: &AttrDef, text: &str) -> Result<AttrValue, String> {
    let bad = || format!("default '{text}' of '{}' is not understood", attr.name);
    Ok(match attr.kind {
        AttrKind::Str => {
            let inner = text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).ok_or_else(bad)?;
            inner.replace("\\n", "\n").into()
        }
        AttrKind::Int => AttrValue::Int(text.parse().map_err(|_| bad())?),
        AttrKind::Float => AttrValue::Float(text.parse().map_err(|_| bad())?),
        AttrKind::Bool => AttrValue::Bool(text.parse().map_err(|_| bad())?),
        AttrKind::Type => AttrValue::Type(DType::from_name(text).map_err(|_| bad())?),
        AttrKind::Shape if text == "<unknown>" => AttrValue::Shape(PartialShape::unknown()),
        AttrKind::Shape => {
            let inner = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).ok_or_else(bad)?;
            let dims: Result<Vec<i64>, _> = split_top(inner).into_iter().map(str::parse).collect();
            let dims: Vec<_> = dims.map_err(|_| bad())?.into_iter().map(|dim| usize::try_from(dim).ok()).collect();
            AttrValue::Shape(PartialShape::new(&dims))
        }
        // Only lists of bytes are in use, such as the colour `uint8[255,0,0,255]`.
        AttrKind::Tensor => {
            let inner = text.strip_prefix("uint8[").and_then(|text| text.strip_suffix(']')).ok_or_else(bad)?;
            let bytes: Result<Vec<u8>, _> = split_top(inner).into_iter().map(str::parse).collect();
            AttrValue::Tensor(Tensor::from(bytes.map_err(|_| bad())?))
        }
        AttrKind::Func => return Err(bad()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_signature_is_read() {
        let signature = Signature::parse(
            "(ref:Ref(T), values:N*T, args:list(Ts), axis:int32) -> (out:T) ; \
             T:type{num}, N:int>=1, Ts:list(type)>=0, pad:string{\"SAME\",\"VALID\"}=\"SAME\", strides:list(int)=[1,2], \
             keep:bool=false, color:tensor=uint8[255,0], eps:float=1e-3, shape:shape=<unknown>, out_type:type{int32,int64}=int32",
        )
        .unwrap();
        assert!(signature.inputs[0].is_ref);
        assert_eq!(
            signature.inputs[1].ty,
            ArgType::Repeated { count: "N".into(), element: Box::new(ArgType::Attr("T".into())) }
        );
        assert_eq!(signature.inputs[2].ty, ArgType::List("Ts".into()));
        assert_eq!(signature.inputs[3].ty, ArgType::Fixed(DType::I32));
        let default = |name: &str| signature.attr(name).unwrap().default.clone().unwrap();
        assert_eq!(default("pad"), "SAME".into());
        assert_eq!(default("strides"), vec![1i64, 2].into());
        assert_eq!(default("eps"), AttrValue::Float(1e-3));
        assert_eq!(default("color"), AttrValue::Tensor(Tensor::from([255u8, 0])));
        assert_eq!(default("shape"), PartialShape::unknown().into());
        assert_eq!(signature.attr("N").unwrap().minimum, Some(1));
        assert!(signature.attr("T").unwrap().types.contains(&DType::F32));
    }

    #[test]
    fn allowed_strings_are_parted_by_bars_or_commas() {
        for text in ["() -> () ; pad:string{SAME|VALID}", "() -> () ; pad:string{\"SAME\",\"VALID\"}"] {
            assert_eq!(Signature::parse(text).unwrap().attr("pad").unwrap().strings, ["SAME", "VALID"]);
        }
    }

    #[test]
    fn nonsense_is_named() {
        let error = Signature::parse("(a:T) -> (b:T) ; T:tpye").unwrap_err();
        assert!(error.message().contains("unknown kind 'tpye'"), "{error}");
    }
}
