//! Checks a node that is asked for: inputs against the op's signature, attributes against their kinds; fills in what was
//! left out and infers dtypes and shapes. Errors name the op, its inputs and the line that asked.

use std::sync::Arc;

use kolo_core::{DType, DeviceSpec, Error, PartialShape, Result};

use crate::op::infer::InferCtx;
use crate::op::registry::did_you_mean;
use crate::op::signature::{ArgDef, ArgType, AttrDef, AttrKind};
use crate::op::unknown::{self, UnknownOp};
use crate::wire::tensor::dtype_from_number;
use crate::{AttrValue, Attrs, Endpoint, HandleRule, Node, NodeId, Nodes, OpRegistry, Origin, OutputInfo, Signature};

/// A node that is asked for, before it is checked.
pub(crate) struct NodeRequest {
    pub op: String,
    pub name: Option<String>,
    pub inputs: Vec<Endpoint>,
    pub control_inputs: Vec<NodeId>,
    pub attrs: Attrs,
    pub device: DeviceSpec,
    pub source: Option<Origin>,
    /// Where the device was asked for, if that is another place.
    pub device_source: Option<Origin>,
}

/// `[A-Za-z0-9.][A-Za-z0-9_./>-]*`, or with a leading `_` for nodes that rewrites add.
pub(crate) fn check_name(name: &str) -> Result<()> {
    let ok = |c: char| c.is_ascii_alphanumeric() || "_.-/>".contains(c);
    let starts_well = name.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '.' || c == '_');
    if starts_well && name.chars().all(ok) {
        return Ok(());
    }
    Err(Error::invalid_argument(format!(
        "'{name}' is not a valid node name: use letters, digits and . _ - / and begin with a letter, digit or dot"
    )))
}

/// Checks a request against its op's signature, fills in attributes, infers dtypes and shapes.
pub(crate) fn complete(registry: &OpRegistry, nodes: &Nodes, request: NodeRequest, name: String) -> Result<Node> {
    let place = |error: Error| {
        let error = error.with_node(&name, &request.op, "");
        let error = describe_inputs(nodes, &request.inputs, error);
        match &request.source {
            Some(line) => error.and(format_args!(" (at {line:#})")),
            None => error,
        }
    };
    let (def, signature) = registry.find(&request.op).map_err(place)?;
    for at in &request.inputs {
        let exists = at.node.index() < nodes.len() && (at.index as usize) < nodes.node(at.node).outputs.len();
        if !exists {
            return Err(place(Error::invalid_argument(format!("input {at:?} does not exist"))));
        }
    }
    let mut attrs = request.attrs.clone();
    let ref_inputs = bind_inputs(signature, &mut attrs, nodes, &request.inputs).map_err(place)?;
    check_attrs(signature, &mut attrs).map_err(place)?;
    let dtypes = bind_outputs(signature, &attrs).map_err(place)?;

    let mut handle = match def.handle {
        HandleRule::FromAttrs => Some(Arc::new(handle_from(&attrs, "shape").map_err(place)?)),
        HandleRule::FromElementAttrs => Some(Arc::new(handle_from(&attrs, "element_shape").map_err(place)?)),
        HandleRule::Forward => request.inputs.iter().find_map(|at| nodes.output(*at).handle.clone()),
    };
    let shapes = {
        let ctx = InferCtx::new(&request.op, &attrs, nodes, &request.inputs, dtypes.len());
        (def.shape)(&ctx).map_err(place)?
    };
    if shapes.len() != dtypes.len() {
        return Err(place(Error::internal(format!("{} shapes for {} outputs", shapes.len(), dtypes.len()))));
    }
    let outputs = dtypes
        .into_iter()
        .zip(shapes)
        .map(|((dtype, is_ref), shape)| {
            let handle = if dtype == DType::Resource { handle.take() } else { None };
            OutputInfo { dtype, is_ref, shape, handle }
        })
        .collect();
    let device_source = request.device_source.or_else(|| request.source.clone()).filter(|_| !request.device.is_empty());
    Ok(Node {
        name: name.into(),
        def: *def,
        inputs: request.inputs,
        control_inputs: request.control_inputs,
        attrs,
        device: request.device,
        outputs,
        ref_inputs,
        source: request.source,
        device_source,
        unknown: None,
    })
}

/// A node of an op that is not in the table. Its inputs are believed; of its outputs is known what an attribute lists.
pub(crate) fn unknown_node(request: NodeRequest, unknown: Arc<UnknownOp>, name: String) -> Node {
    let mut outputs: Vec<OutputInfo> = unknown.listed_outputs().iter().map(|number| unknown_output(*number)).collect();
    if outputs.is_empty() {
        // Most ops have one, and it can be asked for by name although no node of the graph reads it.
        outputs.push(unknown_output(DType::Variant as i32));
    }
    let device_source = request.device_source.or_else(|| request.source.clone()).filter(|_| !request.device.is_empty());
    Node {
        name: name.into(),
        def: unknown::DEF,
        ref_inputs: vec![false; request.inputs.len()],
        inputs: request.inputs,
        control_inputs: request.control_inputs,
        attrs: request.attrs,
        device: request.device,
        outputs,
        source: request.source,
        device_source,
        unknown: Some(unknown),
    }
}

/// An output of an unknown op; a variant stands for a dtype that nobody has named so far.
fn unknown_output(number: i32) -> OutputInfo {
    let dtype = dtype_from_number(number).unwrap_or(DType::Variant);
    OutputInfo { dtype, is_ref: false, shape: PartialShape::unknown(), handle: None }
}

/// Notes what a consumer says of an output of an unknown op: that it exists, and its dtype if it expects a certain one.
pub(crate) fn learn_output(nodes: &mut Nodes, at: Endpoint, expected: Option<(DType, bool)>) {
    if nodes.node(at.node).unknown.is_none() || at.index >= unknown::MOST_OUTPUTS {
        return;
    }
    let node = nodes.node_mut(at.node);
    while node.outputs.len() <= at.index as usize {
        node.outputs.push(unknown_output(DType::Variant as i32));
    }
    let output = &mut node.outputs[at.index as usize];
    if let Some((dtype, is_ref)) = expected {
        if output.dtype == DType::Variant {
            output.dtype = dtype;
        }
        output.is_ref |= is_ref;
    }
}

/// For each input of a node the dtype that it must have and whether it is taken as a reference, as far as the signature and
/// the attributes say so.
pub(crate) fn expected_inputs(signature: &Signature, attrs: &Attrs) -> Vec<Option<(DType, bool)>> {
    /// More are not looked at: they take their dtypes from their sources.
    const MOST: usize = 1 << 16;
    let mut expected = Vec::new();
    for arg in &signature.inputs {
        let of = |ty: &ArgType| match ty {
            ArgType::Fixed(dtype) => Some((*dtype, arg.is_ref)),
            ArgType::Attr(name) => attrs.dtype(name).ok().map(|dtype| (dtype, arg.is_ref)),
            ArgType::Repeated { .. } | ArgType::List(_) => None,
        };
        match &arg.ty {
            ArgType::Fixed(_) | ArgType::Attr(_) => expected.push(of(&arg.ty)),
            ArgType::Repeated { count, element } => {
                let n = attrs.int(count).ok().and_then(|n| usize::try_from(n).ok());
                let Some(n) = n.filter(|n| *n <= MOST) else { break };
                expected.extend(std::iter::repeat_n(of(element), n));
            }
            ArgType::List(list) => {
                let Ok(dtypes) = attrs.dtypes(list) else { break };
                expected.extend(dtypes.into_iter().map(|dtype| Some((dtype, arg.is_ref))));
            }
        }
    }
    expected
}

/// Checks a node that a rewrite made or changed: it fits its op's signature, and what is noted of its outputs does not
/// contradict inference. Nothing is known of inputs that a caller feeds, so a node that reads one is believed, and so is one of an
/// unknown op.
pub(crate) fn infer_again(registry: &OpRegistry, nodes: &Nodes, node: &Node) -> Result<()> {
    if node.unknown.is_some() || node.inputs.iter().any(|at| at.feed().is_some()) {
        return Ok(());
    }
    let place = |error: Error| {
        let error = error.with_node(&node.name, node.op(), "");
        describe_inputs(nodes, &node.inputs, error)
    };
    let (def, signature) = registry.find(node.op()).map_err(place)?;
    let mut attrs = node.attrs.clone();
    bind_inputs(signature, &mut attrs, nodes, &node.inputs).map_err(place)?;
    check_attrs(signature, &mut attrs).map_err(place)?;
    let dtypes = bind_outputs(signature, &attrs).map_err(place)?;
    let noted: Vec<(DType, bool)> = node.outputs.iter().map(|output| (output.dtype, output.is_ref)).collect();
    if noted != dtypes {
        return Err(place(Error::internal(format!("its outputs are noted as {noted:?}, and are {dtypes:?}"))));
    }
    let ctx = InferCtx::new(node.op(), &attrs, nodes, &node.inputs, dtypes.len());
    for (output, shape) in node.outputs.iter().zip((def.shape)(&ctx).map_err(place)?) {
        output.shape.merge(&shape).map_err(|_| {
            place(Error::internal(format!("an output is noted as {}, and is inferred as {shape}", output.shape)))
        })?;
    }
    Ok(())
}

fn handle_from(attrs: &Attrs, shape: &str) -> Result<(DType, PartialShape)> {
    Ok((attrs.dtype("dtype")?, attrs.shape(shape)?.clone()))
}

/// Adds the inputs' dtypes and shapes to an error: they are what the reader needs next.
fn describe_inputs(nodes: &Nodes, inputs: &[Endpoint], error: Error) -> Error {
    if inputs.is_empty() {
        return error;
    }
    let list: Vec<String> = inputs
        .iter()
        .take(8)
        .map(|&at| {
            let known = at.node.index() < nodes.len() && (at.index as usize) < nodes.node(at.node).outputs.len();
            match known {
                true => {
                    let info = nodes.output(at);
                    format!("{} {}{}", nodes.endpoint_name(at), info.dtype, info.shape)
                }
                false => format!("{at:?}"),
            }
        })
        .collect();
    error.and(format_args!("; inputs: {}", list.join(", ")))
}

/// Matches inputs with the signature, inferring type and count attributes that were not given. Returns which inputs are
/// taken as references.
fn bind_inputs(signature: &Signature, attrs: &mut Attrs, nodes: &Nodes, inputs: &[Endpoint]) -> Result<Vec<bool>> {
    let mut rest = inputs;
    let mut refs = Vec::with_capacity(inputs.len());
    for (i, arg) in signature.inputs.iter().enumerate() {
        let later_fixed = signature.inputs[i + 1..]
            .iter()
            .filter(|arg| !matches!(arg.ty, ArgType::Repeated { .. } | ArgType::List(_)))
            .count();
        let n = match &arg.ty {
            ArgType::Fixed(_) | ArgType::Attr(_) => 1,
            ArgType::Repeated { count, .. } => match attrs.find(count) {
                Some(_) => usize::try_from(attrs.int(count)?)
                    .map_err(|_| Error::invalid_argument(format!("attribute '{count}' is negative")))?,
                // The only list, or the first: it takes what the single arguments after it leave.
                None => {
                    let n = rest.len().saturating_sub(later_fixed);
                    attrs.set(count.as_str(), n);
                    n
                }
            },
            ArgType::List(list) => match attrs.find(list) {
                Some(_) => attrs.dtypes(list)?.len(),
                None => {
                    let n = rest.len().saturating_sub(later_fixed);
                    let dtypes: Vec<DType> = rest.iter().take(n).map(|&at| nodes.output(at).dtype).collect();
                    attrs.set(list.as_str(), dtypes);
                    n
                }
            },
        };
        if rest.len() < n {
            return Err(Error::invalid_argument(format!(
                "input '{}' is missing: {} inputs given",
                arg.name,
                inputs.len()
            )));
        }
        let (mine, others) = rest.split_at(n);
        rest = others;
        for (k, &at) in mine.iter().enumerate() {
            let found = nodes.output(at);
            let expected = expected_dtype(signature, arg, k, attrs, found.dtype)?;
            if found.dtype != expected {
                return Err(Error::invalid_argument(format!(
                    "input '{}' should be {expected}, found {} from '{}'",
                    arg.name,
                    found.dtype,
                    nodes.endpoint_name(at)
                )));
            }
            if arg.is_ref && !found.is_ref {
                return Err(Error::invalid_argument(format!(
                    "input '{}' should be a reference to a variable, '{}' is a value",
                    arg.name,
                    nodes.endpoint_name(at)
                )));
            }
            refs.push(arg.is_ref);
        }
    }
    if rest.is_empty() {
        return Ok(refs);
    }
    Err(Error::invalid_argument(format!("takes {} inputs, found {}", refs.len(), inputs.len())))
}

/// The dtype that tensor `k` of an argument must have; a type attribute that is not set yet takes `found`.
fn expected_dtype(signature: &Signature, arg: &ArgDef, k: usize, attrs: &mut Attrs, found: DType) -> Result<DType> {
    fn of(signature: &Signature, ty: &ArgType, k: usize, attrs: &mut Attrs, found: DType) -> Result<DType> {
        match ty {
            ArgType::Fixed(dtype) => Ok(*dtype),
            ArgType::Attr(name) => {
                if attrs.find(name).is_none() {
                    // A wrong guess would surface as an odd message about another input.
                    let allowed = signature.attr(name).map_or(&[][..], |attr| &attr.types);
                    if !allowed.is_empty() && !allowed.contains(&found) {
                        return Err(not_allowed(name, found, allowed));
                    }
                    attrs.set(name.as_str(), found);
                }
                attrs.dtype(name)
            }
            ArgType::Repeated { element, .. } => of(signature, element, k, attrs, found),
            ArgType::List(name) => {
                attrs.dtypes(name)?.get(k).copied().ok_or_else(|| Error::internal(format!("'{name}' is too short")))
            }
        }
    }
    of(signature, &arg.ty, k, attrs, found)
}

fn not_allowed(attr: &str, found: DType, allowed: &[DType]) -> Error {
    let names: Vec<&str> = allowed.iter().map(|dtype| dtype.name()).collect();
    Error::invalid_argument(format!("{found} is not allowed for '{attr}'; allowed are {}", names.join(", ")))
}

/// Fills in defaults; checks kinds, allowed values and minima. Attributes that begin with `_` are annotations and free.
fn check_attrs(signature: &Signature, attrs: &mut Attrs) -> Result<()> {
    for attr in &signature.attrs {
        match attrs.find(&attr.name) {
            Some(value) => check_attr(attr, value)?,
            None => match &attr.default {
                Some(default) => attrs.set(attr.name.as_str(), default.clone()),
                None => return Err(Error::invalid_argument(format!("attribute '{}' is missing", attr.name))),
            },
        }
    }
    let unknown =
        attrs.iter().map(|(name, _)| name).find(|name| !name.starts_with('_') && signature.attr(name).is_none());
    match unknown {
        Some(name) => {
            let hint = did_you_mean(name, signature.attrs.iter().map(|attr| attr.name.as_str()));
            Err(Error::invalid_argument(format!("there is no attribute '{name}'{hint}")))
        }
        None => Ok(()),
    }
}

fn check_attr(attr: &AttrDef, value: &AttrValue) -> Result<()> {
    let wrong_kind = || {
        let list = if attr.is_list { "list of " } else { "" };
        Error::invalid_argument(format!(
            "attribute '{}' should be a {list}{:?}, found {} {value}",
            attr.name,
            attr.kind,
            value.kind()
        ))
    };
    let below = |n: i64| {
        let minimum = attr.minimum.unwrap_or(i64::MIN);
        (n < minimum)
            .then(|| Error::invalid_argument(format!("attribute '{}' is {n}, the least is {minimum}", attr.name)))
    };
    let items = match (attr.is_list, value) {
        (true, AttrValue::List(items)) => {
            if let Some(error) = below(items.len() as i64) {
                return Err(error);
            }
            items.as_slice()
        }
        (true, _) | (false, AttrValue::List(_)) => return Err(wrong_kind()),
        (false, value) => std::slice::from_ref(value),
    };
    for item in items {
        match (attr.kind, item) {
            (AttrKind::Type, AttrValue::Type(dtype)) => {
                if !attr.types.is_empty() && !attr.types.contains(dtype) {
                    return Err(not_allowed(&attr.name, *dtype, &attr.types));
                }
            }
            (AttrKind::Str, AttrValue::Str(text)) => {
                if !attr.strings.is_empty() && !attr.strings.iter().any(|allowed| allowed.as_bytes() == &text[..]) {
                    return Err(Error::invalid_argument(format!(
                        "attribute '{}' is {item}; allowed are {}",
                        attr.name,
                        attr.strings.join(", ")
                    )));
                }
            }
            (AttrKind::Int, AttrValue::Int(n)) => {
                if !attr.is_list
                    && let Some(error) = below(*n)
                {
                    return Err(error);
                }
            }
            (AttrKind::Float, AttrValue::Float(_))
            | (AttrKind::Bool, AttrValue::Bool(_))
            | (AttrKind::Shape, AttrValue::Shape(_))
            | (AttrKind::Tensor, AttrValue::Tensor(_))
            | (AttrKind::Func, AttrValue::Func(_)) => {}
            _ => return Err(wrong_kind()),
        }
    }
    Ok(())
}

/// The dtype of every output, and whether it is a reference. Attributes are complete by now.
fn bind_outputs(signature: &Signature, attrs: &Attrs) -> Result<Vec<(DType, bool)>> {
    /// No op has more outputs than this; a larger count is a mistake or an attack.
    const MOST: i64 = 1 << 20;
    let mut dtypes = Vec::new();
    for arg in &signature.outputs {
        match &arg.ty {
            ArgType::Fixed(dtype) => dtypes.push((*dtype, arg.is_ref)),
            ArgType::Attr(name) => dtypes.push((attrs.dtype(name)?, arg.is_ref)),
            ArgType::List(name) => dtypes.extend(attrs.dtypes(name)?.into_iter().map(|dtype| (dtype, arg.is_ref))),
            ArgType::Repeated { count, element } => {
                let dtype = match &**element {
                    ArgType::Fixed(dtype) => *dtype,
                    ArgType::Attr(name) => attrs.dtype(name)?,
                    _ => return Err(Error::internal("a repeated list in a signature")),
                };
                let n = attrs.int(count)?;
                if !(0..=MOST).contains(&n) {
                    return Err(Error::invalid_argument(format!("attribute '{count}' is {n}, not from 0 to {MOST}")));
                }
                dtypes.extend((0..n).map(|_| (dtype, arg.is_ref)));
            }
        }
    }
    Ok(dtypes)
}
