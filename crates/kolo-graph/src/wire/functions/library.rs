//! The functions that a graph may call: found by name, with what their signatures say of arguments and attributes.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use kolo_core::{Error, Result};

use super::is_call;
use crate::op::registry::did_you_mean;
use crate::wire::proto::{ArgDef, AttrValue, FunctionDef, FunctionDefLibrary, NameAttrList, NodeDef, OpDef, Value};
use crate::{ArgType, OpRegistry};

/// Attributes by name, as messages have them.
pub(super) type AttrMap = BTreeMap<String, AttrValue>;

/// The functions of both libraries. Two different functions of one name are an error.
pub(crate) fn join(
    have: &Arc<FunctionDefLibrary>,
    new: Option<&FunctionDefLibrary>,
) -> Result<Arc<FunctionDefLibrary>> {
    let Some(new) = new.filter(|new| **new != FunctionDefLibrary::default()) else { return Ok(have.clone()) };
    let mut joined = (**have).clone();
    let mut by_name: HashMap<&str, &FunctionDef> = HashMap::new();
    for function in have.function.iter().chain(&new.function) {
        let name = name_of(function);
        if name.is_empty() {
            return Err(Error::invalid_argument("the library has a function without a name"));
        }
        match by_name.insert(name, function) {
            Some(other) if other != function => {
                return Err(Error::invalid_argument(format!(
                    "Cannot add function '{name}' because a different function with the same name already exists"
                )));
            }
            _ => {}
        }
    }
    let known: HashSet<&str> = have.function.iter().map(name_of).collect();
    joined.function.extend(new.function.iter().filter(|function| !known.contains(name_of(function))).cloned());
    joined.gradient.extend(new.gradient.iter().filter(|gradient| !have.gradient.contains(gradient)).cloned());
    let registered = new.registered_gradients.iter().filter(|new| !have.registered_gradients.contains(new));
    joined.registered_gradients.extend(registered.cloned());
    Ok(Arc::new(joined))
}

fn name_of(function: &FunctionDef) -> &str {
    function.signature.as_ref().map_or("", |signature| signature.name.as_str())
}

/// Functions by name.
pub(crate) struct Functions<'a> {
    by_name: HashMap<&'a str, (&'a OpDef, &'a FunctionDef)>,
    gradients: HashMap<&'a str, &'a str>,
}

impl<'a> Functions<'a> {
    pub(crate) fn new(library: &'a FunctionDefLibrary) -> Functions<'a> {
        let named = |function: &'a FunctionDef| {
            let signature = function.signature.as_ref()?;
            Some((signature.name.as_str(), (signature, function)))
        };
        let gradients =
            library.gradient.iter().map(|gradient| (gradient.function_name.as_str(), gradient.gradient_func.as_str()));
        Functions { by_name: library.function.iter().filter_map(named).collect(), gradients: gradients.collect() }
    }

    pub(crate) fn contains(&self, name: &str) -> bool {
        self.by_name.contains_key(name)
    }

    pub(super) fn find(&self, name: &str) -> Result<(&'a OpDef, &'a FunctionDef)> {
        self.by_name.get(name).copied().ok_or_else(|| {
            let hint = did_you_mean(name, self.by_name.keys().copied());
            Error::not_found(format!("function '{name}' is not in the graph's library{hint}"))
        })
    }

    /// The function that the library names as the gradient of `function`.
    pub(super) fn gradient_of(&self, function: &str) -> Option<&'a str> {
        self.gradients.get(function).copied()
    }

    /// Whether a node calls a function, by an attribute or by being named after it.
    pub(crate) fn is_called_by(&self, node: &NodeDef) -> bool {
        is_call(&node.op) || self.contains(&node.op)
    }
}

/// How many tensors an argument of a function stands for, given the attributes of the call.
pub(super) fn count(arg: &ArgDef, attrs: &AttrMap) -> Result<usize> {
    if !arg.number_attr.is_empty() {
        return number(&arg.number_attr, attrs);
    }
    if !arg.type_list_attr.is_empty() {
        return length(&arg.type_list_attr, attrs);
    }
    Ok(1)
}

/// The number of the dtype of a single argument, if the signature or the call says it.
pub(super) fn dtype_number(arg: &ArgDef, attrs: &AttrMap) -> Option<i32> {
    if arg.type_attr.is_empty() {
        return Some(arg.r#type);
    }
    match attrs.get(&arg.type_attr)?.value {
        Some(Value::Type(number)) => Some(number),
        _ => None,
    }
}

/// The outputs of a node by name, and how many tensors each stands for.
pub(super) fn outputs_of(
    registry: &OpRegistry,
    functions: &Functions<'_>,
    node: &NodeDef,
) -> Result<Vec<(String, usize)>> {
    if functions.contains(&node.op) {
        let (signature, _) = functions.find(&node.op)?;
        let attrs = with_defaults(&node.attr, signature);
        return signature.output_arg.iter().map(|arg| Ok((arg.name.clone(), count(arg, &attrs)?))).collect();
    }
    let (_, signature) = registry.find(&node.op)?;
    let n = |ty: &ArgType| match ty {
        ArgType::Fixed(_) | ArgType::Attr(_) => Ok(1),
        ArgType::Repeated { count, .. } => number(count, &node.attr),
        ArgType::List(list) => length(list, &node.attr),
    };
    signature.outputs.iter().map(|arg| Ok((arg.name.clone(), n(&arg.ty)?))).collect()
}

/// The attributes of a call, with those that the function has a default for.
pub(super) fn with_defaults(attrs: &AttrMap, signature: &OpDef) -> AttrMap {
    let mut all = attrs.clone();
    for attr in &signature.attr {
        if let Some(default) = &attr.default_value {
            all.entry(attr.name.clone()).or_insert_with(|| default.clone());
        }
    }
    all
}

/// A node's attributes with the placeholders in them replaced by the attributes of the call.
pub(super) fn substitute(attrs: &AttrMap, call: &AttrMap) -> Result<AttrMap> {
    let one = |(name, value): (&String, &AttrValue)| {
        let value = substitute_value(value, call).map_err(|error| error.context(format_args!("attribute '{name}'")))?;
        Ok((name.clone(), value))
    };
    attrs.iter().map(one).collect()
}

fn substitute_value(value: &AttrValue, call: &AttrMap) -> Result<AttrValue> {
    let inner = |function: &NameAttrList| {
        Ok::<_, Error>(NameAttrList { name: function.name.clone(), attr: substitute(&function.attr, call)? })
    };
    let value = match &value.value {
        Some(Value::Placeholder(name)) => {
            return call.get(name).cloned().ok_or_else(|| {
                Error::invalid_argument(format!("it stands for attribute '{name}', which the call does not give"))
            });
        }
        Some(Value::Func(function)) => Some(Value::Func(inner(function)?)),
        Some(Value::List(list)) if !list.func.is_empty() => {
            let mut list = list.clone();
            list.func = list.func.iter().map(inner).collect::<Result<_>>()?;
            Some(Value::List(list))
        }
        other => other.clone(),
    };
    Ok(AttrValue { value })
}

/// The function that an attribute names.
pub(super) fn function_attr<'n>(node: &'n NodeDef, name: &str) -> Result<&'n NameAttrList> {
    match node.attr.get(name).and_then(|value| value.value.as_ref()) {
        Some(Value::Func(function)) => Ok(function),
        _ => Err(Error::invalid_argument(format!("attribute '{name}' should name a function"))),
    }
}

fn number(attr: &str, attrs: &AttrMap) -> Result<usize> {
    /// No op has more inputs or outputs than this; a larger count is a mistake or an attack.
    const MOST: i64 = 1 << 20;
    match attrs.get(attr).and_then(|value| value.value.as_ref()) {
        Some(Value::I(n)) if (0..=MOST).contains(n) => Ok(*n as usize),
        _ => Err(Error::invalid_argument(format!("attribute '{attr}' should be a number from 0 to {MOST}"))),
    }
}

fn length(attr: &str, attrs: &AttrMap) -> Result<usize> {
    match attrs.get(attr).map(|value| value.value.as_ref()) {
        Some(Some(Value::List(list))) => Ok(list.r#type.len()),
        // An empty list is written as a value without a kind.
        Some(None) => Ok(0),
        _ => Err(Error::invalid_argument(format!("attribute '{attr}' should be a list of types"))),
    }
}
