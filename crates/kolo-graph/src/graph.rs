//! The graph: nodes joined by data and control edges.
//!
//! [`Graph`] is what a program describes. It has interior mutability, so that [`Output`] handles can be plain copies
//! that carry operators, and it is described on one thread. [`Nodes`] is the same as plain data, shared cheaply with
//! sessions and handed to planning.
//!
//! An error while describing does not interrupt the program line by line: it is kept, with the line that caused it,
//! later nodes that depend on it are skipped, and [`Graph::check`] (which every session calls) returns the first one.

use std::cell::{Ref, RefCell};
use std::collections::HashMap;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use kolo_core::{DType, DeviceSpec, Error, PartialShape, Result};

use crate::control_flow::FlowScope;
use crate::infer::InferCtx;
use crate::registry::did_you_mean;
use crate::signature::{ArgDef, ArgType, AttrDef, AttrKind};
use crate::{AttrValue, Attrs, Flow, HandleRule, OpDef, OpRegistry, Operation, Signature, VariableRecord};

/// A line of the user's program.
pub type Location = &'static std::panic::Location<'static>;

/// A node's number in its graph.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u32);

impl NodeId {
    /// Stands for a node that could not be made.
    pub(crate) const INVALID: NodeId = NodeId(u32::MAX);

    /// The number, as an index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

/// One output of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Endpoint {
    /// The node.
    pub node: NodeId,
    /// Which of its outputs.
    pub index: u32,
}

impl Endpoint {
    /// Stands for the value of feed number `feed` among the inputs of a partition's nodes: it comes from the caller of the
    /// run, not from a node.
    pub fn from_feed(feed: u32) -> Endpoint {
        Endpoint { node: NodeId::INVALID, index: feed }
    }

    /// Which feed it stands for, if it does.
    pub fn feed(self) -> Option<usize> {
        (self.node == NodeId::INVALID).then_some(self.index as usize)
    }
}

/// What is known of one output before it exists.
#[derive(Clone, Debug, PartialEq)]
pub struct OutputInfo {
    /// The element type.
    pub dtype: DType,
    /// A reference to a variable, not a value.
    pub is_ref: bool,
    /// The shape, as far as it is known.
    pub shape: PartialShape,
    /// For resource handles: what they refer to, where it is known.
    pub handle: Option<Arc<(DType, PartialShape)>>,
}

/// One operation in a graph.
#[derive(Clone)]
pub struct Node {
    /// Unique in the graph.
    pub name: Arc<str>,
    /// What it does.
    pub def: OpDef,
    /// Where its data comes from.
    pub inputs: Vec<Endpoint>,
    /// What must have run before it.
    pub control_inputs: Vec<NodeId>,
    /// Its attributes, defaults filled in.
    pub attrs: Attrs,
    /// The device it asks for; empty if it has no wish.
    pub device: DeviceSpec,
    /// What it will give.
    pub outputs: Vec<OutputInfo>,
    /// For each input, whether it is taken as a reference.
    pub ref_inputs: Vec<bool>,
    /// The line that made it, unless it was imported.
    pub source: Option<Location>,
    /// The line that asked for the device.
    pub device_source: Option<Location>,
}

impl Node {
    /// The op's name.
    pub fn op(&self) -> &'static str {
        self.def.name
    }

    /// The names of its colocation groups (`loc:@NAME` entries of `_class`).
    pub fn colocation_groups(&self) -> impl Iterator<Item = &str> {
        let list = match self.attrs.find("_class") {
            Some(AttrValue::List(values)) => values.as_slice(),
            _ => &[],
        };
        list.iter().filter_map(|value| match value {
            AttrValue::Str(text) => std::str::from_utf8(text).ok()?.strip_prefix("loc:@"),
            _ => None,
        })
    }

    /// `Op 'name'`, with the line that made it where known.
    pub fn describe(&self) -> String {
        match self.source {
            Some(line) => format!("{} '{}' ({}:{})", self.op(), self.name, line.file(), line.line()),
            None => format!("{} '{}'", self.op(), self.name),
        }
    }
}

/// The nodes of a graph, as plain data, in the order they were made. Cloning shares the nodes.
#[derive(Clone, Default)]
pub struct Nodes {
    list: Vec<Arc<Node>>,
    by_name: HashMap<Arc<str>, NodeId>,
}

impl Nodes {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// The node with this number.
    pub fn node(&self, id: NodeId) -> &Arc<Node> {
        &self.list[id.index()]
    }

    /// All nodes with their numbers.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (NodeId, &Arc<Node>)> {
        self.list.iter().enumerate().map(|(i, node)| (NodeId(i as u32), node))
    }

    /// What is known of an output.
    pub fn output(&self, at: Endpoint) -> &OutputInfo {
        &self.node(at.node).outputs[at.index as usize]
    }

    /// The node of this name.
    pub fn find(&self, name: &str) -> Option<NodeId> {
        self.by_name.get(name).copied()
    }

    /// The node of this name; an error that suggests a similar one otherwise.
    pub fn require(&self, name: &str) -> Result<NodeId> {
        self.find(name).ok_or_else(|| {
            let hint = did_you_mean(name, self.by_name.keys().map(|key| &**key));
            Error::not_found(format!("node '{name}' is not in the graph{hint}"))
        })
    }

    /// Reads `name` or `name:index`.
    pub fn endpoint(&self, text: &str) -> Result<Endpoint> {
        let (name, index) = match text.rsplit_once(':') {
            Some((name, index)) if self.find(text).is_none() => (
                name,
                index
                    .parse()
                    .map_err(|_| Error::invalid_argument(format!("'{text}' is not a tensor name such as 'x:0'")))?,
            ),
            _ => (text, 0),
        };
        let node = self.require(name)?;
        let n_outputs = self.node(node).outputs.len();
        if index as usize >= n_outputs {
            return Err(Error::invalid_argument(format!(
                "'{name}' has {n_outputs} outputs, there is no '{name}:{index}'"
            )));
        }
        Ok(Endpoint { node, index })
    }

    /// `name:index`.
    pub fn endpoint_name(&self, at: Endpoint) -> String {
        format!("{}:{}", self.node(at.node).name, at.index)
    }

    /// Adds a node that is complete: inputs exist, names are unique. For rewrites.
    pub fn push(&mut self, node: Node) -> NodeId {
        let id = NodeId(self.list.len() as u32);
        self.by_name.insert(node.name.clone(), id);
        self.list.push(Arc::new(node));
        id
    }

    fn truncate(&mut self, n_nodes: usize) {
        for node in self.list.drain(n_nodes.min(self.list.len())..) {
            self.by_name.remove(&node.name);
        }
    }

    pub(crate) fn node_mut(&mut self, id: NodeId) -> &mut Node {
        Arc::make_mut(&mut self.list[id.index()])
    }
}

/// A graph under construction.
pub struct Graph {
    registry: &'static OpRegistry,
    state: RefCell<State>,
}

struct State {
    nodes: Nodes,
    /// How often a name was asked for, to find the next free suffix fast.
    name_counts: HashMap<String, u32>,
    name_scope: String,
    devices: Vec<DeviceScope>,
    control: Vec<NodeId>,
    colocation: Vec<String>,
    error: Option<Error>,
    seed: Option<i64>,
    variables: Vec<VariableRecord>,
    /// The branch or loop body that is being described, if any.
    flow: Option<Rc<dyn FlowScope>>,
    /// For nodes whose outputs live inside a loop: which one.
    loops: HashMap<NodeId, LoopId>,
    n_loops: u32,
    /// The scope of the gradients that are being added, if any.
    gradient_source: String,
}

/// A loop's number in its graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LoopId(u32);

/// Chooses a device for a node.
pub(crate) type DeviceFn = Arc<dyn Fn(&Node) -> DeviceSpec>;

enum DeviceScope {
    Spec(DeviceSpec, Location),
    Function(DeviceFn, Location),
    /// Hides the scopes around it.
    Clear,
}

/// A node that is asked for, before it is checked.
pub(crate) struct NodeRequest {
    pub op: String,
    pub name: Option<String>,
    pub inputs: Vec<Endpoint>,
    pub control_inputs: Vec<NodeId>,
    pub attrs: Attrs,
    pub device: DeviceSpec,
    pub source: Option<Location>,
}

impl Graph {
    /// An empty graph over these ops. Programs call `kolo::graph()`, which passes the table of all ops.
    pub fn new(registry: &'static OpRegistry) -> Graph {
        Graph {
            registry,
            state: RefCell::new(State {
                nodes: Nodes::default(),
                name_counts: HashMap::new(),
                name_scope: String::new(),
                devices: Vec::new(),
                control: Vec::new(),
                colocation: Vec::new(),
                error: None,
                seed: None,
                variables: Vec::new(),
                flow: None,
                loops: HashMap::new(),
                n_loops: 0,
                gradient_source: String::new(),
            }),
        }
    }

    /// The ops it may use.
    pub fn registry(&self) -> &'static OpRegistry {
        self.registry
    }

    /// The nodes so far. Must not be held while adding nodes.
    pub fn nodes(&self) -> Ref<'_, Nodes> {
        Ref::map(self.state.borrow(), |state| &state.nodes)
    }

    /// A copy of the nodes so far, for a session to keep.
    pub fn snapshot(&self) -> Nodes {
        self.state.borrow().nodes.clone()
    }

    /// The first error made while describing the graph, if any.
    pub fn check(&self) -> Result<()> {
        match &self.state.borrow().error {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// The first error made while describing the graph, which is then forgotten: the graph without the nodes that
    /// failed is usable again.
    pub fn take_error(&self) -> Option<Error> {
        self.state.borrow_mut().error.take()
    }

    /// Keeps an error for [`Graph::check`], unless there is one already: the first is nearest to the cause.
    pub fn record_error(&self, error: Error) {
        self.state.borrow_mut().error.get_or_insert(error);
    }

    /// The operation of this name.
    pub fn operation(&self, name: &str) -> Result<Operation<'_>> {
        let id = self.state.borrow().nodes.require(name)?;
        Ok(Operation::new(self, id))
    }

    /// Sets the seed from which random ops that come after it take theirs: the same seed and the same graph give the
    /// same values, on any devices. Without a seed they differ from run to run.
    pub fn set_seed(&self, seed: i64) {
        self.state.borrow_mut().seed = Some(seed);
    }

    /// The pair of seeds for the next random op: the graph's, and the op's own or its number.
    pub fn op_seeds(&self, op_seed: Option<i64>) -> (i64, i64) {
        let state = self.state.borrow();
        match (state.seed, op_seed) {
            (Some(seed), Some(op_seed)) => (seed, op_seed),
            (Some(seed), None) => (seed, state.nodes.len() as i64),
            (None, Some(op_seed)) => (87654321, op_seed),
            (None, None) => (0, 0),
        }
    }

    /// Runs `body`; the nodes it adds ask for `device` (`"/gpu:0"`, `"/job:ps"`; partial specs merge with the scopes
    /// around this one, the inner one winning).
    #[track_caller]
    pub fn device<R>(&self, device: &str, body: impl FnOnce() -> R) -> R {
        let location = std::panic::Location::caller();
        let spec = DeviceSpec::parse(device).unwrap_or_else(|error| {
            self.record_error(error.and(format_args!(" (at {location})")));
            DeviceSpec::default()
        });
        self.with_device(DeviceScope::Spec(spec, location), body)
    }

    /// Runs `body`; `choose` is asked for the device of every node that it adds, and a device that the node already
    /// asks for wins over the answer.
    #[track_caller]
    pub fn device_fn<R>(&self, choose: impl Fn(&Node) -> DeviceSpec + 'static, body: impl FnOnce() -> R) -> R {
        self.with_device(DeviceScope::Function(Arc::new(choose), std::panic::Location::caller()), body)
    }

    /// Runs `body` as if no device scope were around it.
    pub fn no_device<R>(&self, body: impl FnOnce() -> R) -> R {
        self.with_device(DeviceScope::Clear, body)
    }

    fn with_device<R>(&self, scope: DeviceScope, body: impl FnOnce() -> R) -> R {
        self.state.borrow_mut().devices.push(scope);
        let result = body();
        self.state.borrow_mut().devices.pop();
        result
    }

    /// Runs `body`; the names of the nodes it adds begin with `name/`, made unique by a suffix.
    pub fn name_scope<R>(&self, name: &str, body: impl FnOnce() -> R) -> R {
        let outer = {
            let mut state = self.state.borrow_mut();
            let scope = format!("{}/", state.unique_name(name));
            std::mem::replace(&mut state.name_scope, scope)
        };
        let result = body();
        self.state.borrow_mut().name_scope = outer;
        result
    }

    /// Runs `body` inside the exact scope `scope` (`""` for the top), as rewrites do that add to an earlier scope.
    pub fn absolute_scope<R>(&self, scope: &str, body: impl FnOnce() -> R) -> R {
        let scope = if scope.is_empty() || scope.ends_with('/') { scope.to_owned() } else { format!("{scope}/") };
        let outer = std::mem::replace(&mut self.state.borrow_mut().name_scope, scope);
        let result = body();
        self.state.borrow_mut().name_scope = outer;
        result
    }

    /// Runs `body`; the nodes it adds wait for these operations.
    pub fn control_dependencies<'g, R>(&'g self, operations: &[Operation<'g>], body: impl FnOnce() -> R) -> R {
        let outer = {
            let mut state = self.state.borrow_mut();
            let outer = state.control.len();
            state.control.extend(operations.iter().filter(|op| op.is_valid()).map(|op| op.id()));
            outer
        };
        let result = body();
        self.state.borrow_mut().control.truncate(outer);
        result
    }

    /// Runs `body` as if no control dependencies, branches and loops were around it.
    pub fn no_control_dependencies<R>(&self, body: impl FnOnce() -> R) -> R {
        self.with_flow(None, body)
    }

    /// Runs `body`; the nodes it adds belong to this branch or loop body. Control dependencies from outside do not
    /// apply: what the scope lets in has waited for them.
    pub(crate) fn with_flow<R>(&self, scope: Option<Rc<dyn FlowScope>>, body: impl FnOnce() -> R) -> R {
        let outer = {
            let mut state = self.state.borrow_mut();
            (std::mem::replace(&mut state.flow, scope), std::mem::take(&mut state.control))
        };
        let result = body();
        let mut state = self.state.borrow_mut();
        (state.flow, state.control) = outer;
        result
    }

    /// The branch or loop body that is being described.
    pub(crate) fn flow_scope(&self) -> Option<Rc<dyn FlowScope>> {
        self.state.borrow().flow.clone()
    }

    pub(crate) fn new_loop_id(&self) -> LoopId {
        let mut state = self.state.borrow_mut();
        state.n_loops += 1;
        LoopId(state.n_loops)
    }

    /// The loop in which this node's outputs live.
    pub(crate) fn loop_of(&self, id: NodeId) -> Option<LoopId> {
        self.state.borrow().loops.get(&id).copied()
    }

    pub(crate) fn set_loop(&self, id: NodeId, inside: Option<LoopId>) {
        let mut state = self.state.borrow_mut();
        match inside {
            Some(inside) => drop(state.loops.insert(id, inside)),
            None => drop(state.loops.remove(&id)),
        }
    }

    /// Names the call of [`crate::gradients`] that is adding nodes: ops that keep gradients aside during a step (tensor
    /// arrays) keep those of each call apart by it. Empty outside of such a call.
    pub fn gradient_source(&self) -> String {
        self.state.borrow().gradient_source.clone()
    }

    /// Runs `body`, which adds the gradients of one call, in a scope of its own.
    pub(crate) fn with_gradient_source<R>(&self, body: impl FnOnce() -> R) -> R {
        self.name_scope("gradients", || {
            let outer = {
                let mut state = self.state.borrow_mut();
                let source = state.name_scope.trim_end_matches('/').to_owned();
                std::mem::replace(&mut state.gradient_source, source)
            };
            let result = body();
            self.state.borrow_mut().gradient_source = outer;
            result
        })
    }

    /// Runs `body`; the nodes it adds go to the device of `operation`, wherever that will be. Device scopes around this
    /// one do not apply.
    pub fn colocate_with<R>(&self, operation: Operation<'_>, body: impl FnOnce() -> R) -> R {
        if !operation.is_valid() {
            return body();
        }
        let name = operation.name();
        self.state.borrow_mut().colocation.push(name);
        let result = self.with_device(DeviceScope::Clear, body);
        self.state.borrow_mut().colocation.pop();
        result
    }

    /// Makes input `input` of a `Merge` come from `source`, the `NextIteration` that closes a loop: the only kind of edge
    /// that points backwards.
    pub fn close_loop(&self, merge: NodeId, input: usize, source: Endpoint) -> Result<()> {
        let mut state = self.state.borrow_mut();
        let node = state.nodes.node(merge);
        if node.def.flow != Flow::Merge || state.nodes.node(source.node).def.flow != Flow::NextIteration {
            return Err(Error::invalid_argument(format!(
                "only a NextIteration may close a loop at a Merge, not {} at {}",
                state.nodes.node(source.node).describe(),
                node.describe()
            )));
        }
        if input >= node.inputs.len() {
            return Err(Error::invalid_argument(format!("{} has no input {input}", node.describe())));
        }
        state.nodes.node_mut(merge).inputs[input] = source;
        Ok(())
    }

    pub(crate) fn replace_output_shape(&self, at: Endpoint, shape: PartialShape) {
        self.state.borrow_mut().nodes.node_mut(at.node).outputs[at.index as usize].shape = shape;
    }

    pub(crate) fn add_control_input(&self, node: NodeId, input: NodeId) {
        let mut state = self.state.borrow_mut();
        let inputs = &mut state.nodes.node_mut(node).control_inputs;
        if !inputs.contains(&input) {
            inputs.push(input);
        }
    }

    /// Runs `read` over the variables made so far.
    pub fn variables<R>(&self, read: impl FnOnce(&[VariableRecord]) -> R) -> R {
        read(&self.state.borrow().variables)
    }

    pub(crate) fn add_variable(&self, record: VariableRecord) {
        self.state.borrow_mut().variables.push(record);
    }

    /// The name a node or scope called `name` would get here without a suffix.
    pub(crate) fn scoped_name(&self, name: &str) -> String {
        format!("{}{name}", self.state.borrow().name_scope)
    }

    /// Adds a node as an importer does: exact name, no scopes. Inputs may be given later only for merges.
    pub(crate) fn import(&self, request: NodeRequest) -> Result<NodeId> {
        let mut state = self.state.borrow_mut();
        let name = request.name.clone().unwrap_or_default();
        check_name(&name)?;
        if state.nodes.find(&name).is_some() {
            return Err(Error::invalid_argument(format!("Duplicate node name in graph: '{name}'")));
        }
        state.name_counts.entry(name.clone()).or_insert(0);
        let node = complete(self.registry, &state.nodes, request, name)?;
        Ok(state.nodes.push(node))
    }

    /// Takes back the nodes from number `n_nodes` on, as an import does that fails half way. No other node may use them.
    pub(crate) fn truncate(&self, n_nodes: usize) {
        self.state.borrow_mut().nodes.truncate(n_nodes);
    }

    /// Adds a node under the scopes that are open.
    pub(crate) fn add(&self, mut request: NodeRequest) -> Result<NodeId> {
        let (name, scopes) = {
            let mut state = self.state.borrow_mut();
            let wanted = request.name.clone().unwrap_or_else(|| request.op.clone());
            check_name(&wanted)?;
            let name = state.unique_name(&wanted);
            for i in 0..state.control.len() {
                let control = state.control[i];
                // A node need not wait for what it takes data from.
                if !request.control_inputs.contains(&control) && !request.inputs.iter().any(|at| at.node == control) {
                    request.control_inputs.push(control);
                }
            }
            if let Some(group) = state.colocation.last() {
                let mut classes = match request.attrs.find("_class") {
                    Some(AttrValue::List(classes)) => classes.clone(),
                    _ => Vec::new(),
                };
                let class = AttrValue::from(format!("loc:@{}", colocation_root(&state.nodes, group)));
                if !classes.contains(&class) {
                    classes.push(class);
                }
                request.attrs.set("_class", AttrValue::List(classes));
            }
            (name, state.device_scopes())
        };
        let flow = self.flow_scope();
        self.absolute_scope(&name, || crate::control_flow::prepare(self, flow.as_deref(), &mut request))
            .map_err(|error| error.with_node(&name, &request.op, ""))?;
        let mut node = complete(self.registry, &self.state.borrow().nodes, request, name)?;
        // Device functions see the finished node, and run without the graph borrowed: they may look at it.
        for scope in scopes {
            let (wish, location) = match scope {
                ScopeCall::Spec(spec, location) => (spec, location),
                ScopeCall::Function(choose, location) => (choose(&node), location),
            };
            let merged = wish.overridden_by(&node.device);
            if merged != node.device && node.device_source.is_none() {
                node.device_source = Some(location);
            }
            node.device = merged;
        }
        let id = self.state.borrow_mut().nodes.push(node);
        if let Some(flow) = flow {
            flow.core().add(self, id);
        }
        Ok(id)
    }
}

enum ScopeCall {
    Spec(DeviceSpec, Location),
    Function(DeviceFn, Location),
}

impl State {
    /// The open device scopes, innermost first, as far as they are visible.
    fn device_scopes(&self) -> Vec<ScopeCall> {
        self.devices
            .iter()
            .rev()
            .map_while(|scope| match scope {
                DeviceScope::Spec(spec, location) => Some(ScopeCall::Spec(spec.clone(), location)),
                DeviceScope::Function(choose, location) => Some(ScopeCall::Function(choose.clone(), location)),
                DeviceScope::Clear => None,
            })
            .collect()
    }

    fn unique_name(&mut self, wanted: &str) -> String {
        let full = format!("{}{wanted}", self.name_scope);
        let mut name = full.clone();
        let mut count = self.name_counts.get(&full).copied().map_or(0, |count| count + 1);
        if count > 0 || self.nodes.find(&full).is_some() {
            count = count.max(1);
            loop {
                name = format!("{full}_{count}");
                if !self.name_counts.contains_key(&name) && self.nodes.find(&name).is_none() {
                    break;
                }
                count += 1;
            }
            self.name_counts.insert(name.clone(), 0);
        }
        self.name_counts.insert(full, count);
        name
    }
}

/// Follows the groups of a node that is itself colocated, so that chains of groups become one.
fn colocation_root(nodes: &Nodes, name: &str) -> String {
    let root = nodes.find(name).and_then(|id| nodes.node(id).colocation_groups().next().map(str::to_owned));
    root.unwrap_or_else(|| name.to_owned())
}

/// `[A-Za-z0-9.][A-Za-z0-9_.\\-/>]*`, or with a leading `_` for nodes that rewrites add.
fn check_name(name: &str) -> Result<()> {
    let ok = |c: char| c.is_ascii_alphanumeric() || "_.\\-/>".contains(c);
    let starts_well = name.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '.' || c == '_');
    if starts_well && name.chars().all(ok) {
        return Ok(());
    }
    Err(Error::invalid_argument(format!(
        "'{name}' is not a valid node name: use letters, digits and . _ - / and begin with a letter, digit or dot"
    )))
}

/// Checks a request against its op's signature, fills in attributes, infers dtypes and shapes.
fn complete(registry: &'static OpRegistry, nodes: &Nodes, request: NodeRequest, name: String) -> Result<Node> {
    let place = |error: Error| {
        let error = error.with_node(&name, &request.op, "");
        let error = describe_inputs(nodes, &request.inputs, error);
        match request.source {
            Some(line) => error.and(format_args!(" (at {line})")),
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
    let device_source = if request.device.is_empty() { None } else { request.source };
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
    })
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
