//! Attribute values, to and from the wire.

use bytes::Bytes;
use kolo_core::{Error, Result};

use super::proto::{self, ListValue, NameAttrList, Value};
use super::tensor::{dtype_from_number, from_proto_within, shape_from_proto, shape_to_proto, to_proto};
use crate::{AttrDef, AttrValue};

/// Reads a value. `def` is what the op's signature says of the attribute, if it is in there: a value that is absent is an
/// empty list where a list is expected, and an error elsewhere. Tensors take what they fill from `budget`.
pub(crate) fn attr_from_proto(value: &proto::AttrValue, def: Option<&AttrDef>, budget: &mut u64) -> Result<AttrValue> {
    let value = match (&value.value, def) {
        (Some(value), _) => value,
        (None, Some(def)) if def.is_list => return Ok(AttrValue::List(Vec::new())),
        (None, _) => return Err(Error::invalid_argument("it has no value")),
    };
    Ok(match value {
        Value::List(list) => AttrValue::List(list_from_proto(list, budget)?),
        Value::S(text) => AttrValue::Str(Bytes::copy_from_slice(text)),
        Value::I(value) => AttrValue::Int(*value),
        Value::F(value) => AttrValue::Float(*value),
        Value::B(value) => AttrValue::Bool(*value),
        Value::Type(number) => AttrValue::Type(dtype_from_number(*number)?),
        Value::Shape(shape) => AttrValue::Shape(shape_from_proto(shape)?),
        Value::Tensor(tensor) => AttrValue::Tensor(from_proto_within(tensor, budget)?),
        Value::Placeholder(name) => {
            return Err(Error::invalid_argument(format!(
                "it stands for attribute '{name}' of a function, which only has a meaning in a function's body"
            )));
        }
        Value::Func(function) => func_from_proto(function)?,
    })
}

/// Writes a value. A list of several kinds, or of lists, has no form on the wire and is an error.
pub(crate) fn attr_to_proto(value: &AttrValue) -> Result<proto::AttrValue> {
    let value = match value {
        AttrValue::Str(text) => Value::S(text.to_vec()),
        AttrValue::Int(value) => Value::I(*value),
        AttrValue::Float(value) => Value::F(*value),
        AttrValue::Bool(value) => Value::B(*value),
        AttrValue::Type(dtype) => Value::Type(*dtype as i32),
        AttrValue::Shape(shape) => Value::Shape(shape_to_proto(shape)),
        AttrValue::Tensor(tensor) => Value::Tensor(Box::new(to_proto(tensor)?)),
        AttrValue::List(values) => Value::List(Box::new(list_to_proto(values)?)),
        AttrValue::Func(name) => Value::Func(func_to_proto(name)),
    };
    Ok(proto::AttrValue { value: Some(value) })
}

fn list_from_proto(list: &ListValue, budget: &mut u64) -> Result<Vec<AttrValue>> {
    let ListValue { s, i, f, b, r#type, shape, tensor, func } = list;
    let lengths = [s.len(), i.len(), f.len(), b.len(), r#type.len(), shape.len(), tensor.len(), func.len()];
    if lengths.iter().filter(|&&length| length > 0).count() > 1 {
        return Err(Error::invalid_argument("it is a list of values of several kinds"));
    }
    let mut values = Vec::with_capacity(lengths.iter().sum());
    values.extend(s.iter().map(|text| AttrValue::Str(Bytes::copy_from_slice(text))));
    values.extend(i.iter().copied().map(AttrValue::Int));
    values.extend(f.iter().copied().map(AttrValue::Float));
    values.extend(b.iter().copied().map(AttrValue::Bool));
    for number in r#type {
        values.push(AttrValue::Type(dtype_from_number(*number)?));
    }
    for shape in shape {
        values.push(AttrValue::Shape(shape_from_proto(shape)?));
    }
    for tensor in tensor {
        values.push(AttrValue::Tensor(from_proto_within(tensor, budget)?));
    }
    for function in func {
        values.push(func_from_proto(function)?);
    }
    Ok(values)
}

fn list_to_proto(values: &[AttrValue]) -> Result<ListValue> {
    let mut list = ListValue::default();
    if let Some(odd) = values.iter().find(|value| value.kind() != values[0].kind()) {
        return Err(Error::invalid_argument(format!(
            "a list of {} and {} cannot be written",
            values[0].kind(),
            odd.kind()
        )));
    }
    for value in values {
        match value {
            AttrValue::Str(text) => list.s.push(text.to_vec()),
            AttrValue::Int(value) => list.i.push(*value),
            AttrValue::Float(value) => list.f.push(*value),
            AttrValue::Bool(value) => list.b.push(*value),
            AttrValue::Type(dtype) => list.r#type.push(*dtype as i32),
            AttrValue::Shape(shape) => list.shape.push(shape_to_proto(shape)),
            AttrValue::Tensor(tensor) => list.tensor.push(to_proto(tensor)?),
            AttrValue::Func(name) => list.func.push(func_to_proto(name)),
            AttrValue::List(_) => return Err(Error::invalid_argument("a list of lists cannot be written")),
        }
    }
    Ok(list)
}

/// Only the name is kept, so a function with attributes of its own would come back as another one.
fn func_from_proto(function: &NameAttrList) -> Result<AttrValue> {
    match function.attr.is_empty() {
        true => Ok(AttrValue::Func(function.name.as_str().into())),
        false => Err(Error::unimplemented(format!("function '{}' has attributes", function.name))),
    }
}

fn func_to_proto(name: &str) -> NameAttrList {
    NameAttrList { name: name.to_owned(), ..NameAttrList::default() }
}

#[cfg(test)]
mod tests {
    use kolo_core::{DType, PartialShape, Tensor};

    use super::*;
    use crate::Signature;

    fn read(value: &proto::AttrValue) -> Result<AttrValue> {
        attr_from_proto(value, None, &mut 1000)
    }

    fn proto(value: Value) -> proto::AttrValue {
        proto::AttrValue { value: Some(value) }
    }

    #[test]
    fn every_kind_comes_back_alone_and_in_a_list() {
        let kinds = [
            AttrValue::Str(Bytes::from_static(b"\xff\x00")),
            AttrValue::Int(i64::MIN),
            AttrValue::Float(-0.5),
            AttrValue::Bool(true),
            AttrValue::Type(DType::BF16),
            AttrValue::Shape(PartialShape::new(&[None, Some(0), Some(7)])),
            AttrValue::Shape(PartialShape::unknown()),
            AttrValue::Tensor(Tensor::from([[1.0f32, 2.0], [3.0, 4.0]])),
            AttrValue::Func("f".into()),
        ];
        for value in kinds {
            assert_eq!(read(&attr_to_proto(&value).unwrap()), Ok(value.clone()));
            let list = AttrValue::List(vec![value.clone(), value]);
            assert_eq!(read(&attr_to_proto(&list).unwrap()), Ok(list));
        }
        let empty = AttrValue::List(Vec::new());
        assert_eq!(attr_to_proto(&empty).unwrap(), proto(Value::List(Box::default())));
        assert_eq!(read(&proto(Value::List(Box::default()))), Ok(empty));
    }

    #[test]
    fn an_absent_value_is_an_empty_list_where_one_is_expected() {
        let signature = Signature::parse("() -> () ; list:list(int), one:int").unwrap();
        let read = |name| attr_from_proto(&proto::AttrValue::default(), signature.attr(name), &mut 0);
        assert_eq!(read("list"), Ok(AttrValue::List(Vec::new())));
        assert!(read("one").unwrap_err().message().contains("no value"));
    }

    #[test]
    fn values_without_a_meaning_are_refused() {
        let check = |value: Value, why: &str| {
            let error = read(&proto(value)).unwrap_err();
            assert!(error.message().contains(why), "{error}");
        };
        check(Value::Type(101), "DT_FLOAT_REF is the type of a reference");
        check(Value::Type(0), "the dtype is missing");
        check(Value::Type(77), "77 is not known");
        check(Value::Type(24), "DT_FLOAT8_E5M2 is not supported");
        check(Value::Placeholder("T".into()), "'T' of a function");
        let mixed = ListValue { i: vec![1], b: vec![true], ..ListValue::default() };
        check(Value::List(Box::new(mixed)), "several kinds");
        let attr = [("T".to_owned(), proto(Value::Type(1)))].into();
        check(Value::Func(NameAttrList { name: "f".into(), attr }), "function 'f' has attributes");
        assert!(attr_to_proto(&AttrValue::List(vec![AttrValue::Int(1), AttrValue::Bool(true)])).is_err());
        assert!(attr_to_proto(&AttrValue::List(vec![AttrValue::List(Vec::new())])).is_err());
    }
}
