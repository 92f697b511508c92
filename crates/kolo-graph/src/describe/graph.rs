//! The graph: nodes joined by data and control edges.
//!
//! [`Graph`] is what a program describes. It has interior mutability, so that [`Output`] handles can be plain copies
//! that carry operators, and it is described on one thread. [`Nodes`] is the same as plain data, shared cheaply with
//! sessions and handed to planning.
//!
//! An error while describing does not interrupt the program line by line: it is kept, with the line that caused it,
//! later nodes that depend on it are skipped, and [`Graph::check`] (which every session calls) returns the first one.

use std::cell::{Ref, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use std::sync::Arc;

use kolo_core::{DType, DeviceSpec, Error, PartialShape, Result};

use crate::describe::control_flow::FlowScope;
use crate::describe::request::{NodeRequest, check_name, complete, learn_output, unknown_node};
use crate::grad::BackwardPass;
use crate::wire::proto::FunctionDefLibrary;
use crate::{
    AttrValue, Endpoint, Flow, Location, Node, NodeId, Nodes, OpRegistry, Operation, Output, Region, Training,
    UnknownOp, VariableRecord,
};

/// A graph under construction.
pub struct Graph {
    registry: &'static OpRegistry,
    state: RefCell<GraphContents>,
}

struct GraphContents {
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
    collections: BTreeMap<String, Vec<String>>,
    /// The name scope that variables' names leave out, while copies of a model share their variables.
    shared_scope: Option<String>,
    /// The branch or loop body that is being described, if any.
    flow: Option<Rc<dyn FlowScope>>,
    /// For nodes whose outputs live inside a loop: which one.
    loops: HashMap<NodeId, LoopId>,
    n_loops: u32,
    /// The scope of the gradients that are being added, if any.
    gradient_source: String,
    /// The node whose gradient is being added, and when what is added runs.
    gradient_of: Option<(NodeId, Region)>,
    /// What the call that is being made has added so far.
    gradient_nodes: Vec<GradientNode>,
    /// All calls so far.
    backward_passes: Vec<Arc<BackwardPass>>,
}

/// A node that gradients have added.
#[derive(Clone, Copy)]
pub(crate) struct GradientNode {
    pub id: NodeId,
    /// The node that it belongs to.
    pub forward: NodeId,
    pub region: Region,
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

impl Graph {
    /// An empty graph over these ops. Programs call `kolo::graph()`, which passes the table of all ops.
    pub fn new(registry: &'static OpRegistry) -> Graph {
        Graph {
            registry,
            state: RefCell::new(GraphContents {
                nodes: Nodes::default(),
                name_counts: HashMap::new(),
                name_scope: String::new(),
                devices: Vec::new(),
                control: Vec::new(),
                colocation: Vec::new(),
                error: None,
                seed: None,
                variables: Vec::new(),
                collections: BTreeMap::new(),
                shared_scope: None,
                flow: None,
                loops: HashMap::new(),
                n_loops: 0,
                gradient_source: String::new(),
                gradient_of: None,
                gradient_nodes: Vec::new(),
                backward_passes: Vec::new(),
            }),
        }
    }

    /// A graph that has these nodes already, as a server keeps them between two messages of a client.
    pub fn of_nodes(registry: &'static OpRegistry, nodes: Nodes) -> Graph {
        let graph = Graph::new(registry);
        graph.state.borrow_mut().nodes = nodes;
        graph
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

    /// The name scope that is open, with a slash at its end; empty at the top.
    pub fn current_scope(&self) -> String {
        self.state.borrow().name_scope.clone()
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

    /// Runs `body`; the nodes it adds belong to the gradient of `forward`.
    pub(crate) fn with_gradient_of<R>(&self, forward: NodeId, region: Region, body: impl FnOnce() -> R) -> R {
        let outer = self.state.borrow_mut().gradient_of.replace((forward, region));
        let result = body();
        self.state.borrow_mut().gradient_of = outer;
        result
    }

    /// Runs `body`, one call for gradients, and returns which nodes it added for which others. If a rule makes the call,
    /// they belong to the rule's node as well.
    pub(crate) fn noting_gradient_nodes<R>(&self, body: impl FnOnce() -> R) -> (R, Vec<GradientNode>) {
        let outer = {
            let mut state = self.state.borrow_mut();
            (state.gradient_of.take(), std::mem::take(&mut state.gradient_nodes))
        };
        let result = body();
        let mut state = self.state.borrow_mut();
        state.gradient_of = outer.0;
        let added = std::mem::replace(&mut state.gradient_nodes, outer.1);
        if let Some((forward, region)) = outer.0 {
            state.gradient_nodes.extend(added.iter().map(|node| GradientNode { id: node.id, forward, region }));
        }
        (result, added)
    }

    pub(crate) fn add_backward_pass(&self, pass: BackwardPass) {
        self.state.borrow_mut().backward_passes.push(Arc::new(pass));
    }

    /// What every call for gradients has done, in order.
    pub(crate) fn backward_passes(&self) -> Vec<Arc<BackwardPass>> {
        self.state.borrow().backward_passes.clone()
    }

    pub(crate) fn set_trainings(&self, trainings: Vec<Arc<Training>>) {
        self.state.borrow_mut().nodes.set_trainings(trainings.into());
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

    pub(crate) fn set_attr(&self, node: NodeId, attr: &str, value: impl Into<AttrValue>) {
        self.state.borrow_mut().nodes.node_mut(node).attrs.set(attr, value);
    }

    pub(crate) fn mark_local(&self, variable: &str) {
        let variables = &mut self.state.borrow_mut().variables;
        variables.iter_mut().filter(|record| record.name == variable).for_each(|record| record.local = true);
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

    /// Adds the name of a node (`loss/Mean`) or of an output (`loss/Mean:0`) to a collection, once. Collections are how
    /// parts of a program that do not know each other meet: summaries that are merged later, updates that a training step
    /// must run, queue runners. They travel with a graph's `.meta` file.
    pub fn add_to_collection(&self, collection: &str, name: &str) {
        let mut state = self.state.borrow_mut();
        let names = state.collections.entry(collection.to_owned()).or_default();
        if !names.iter().any(|have| have == name) {
            names.push(name.to_owned());
        }
    }

    /// The names in a collection, in the order they came; empty if nothing was ever added.
    pub fn collection(&self, collection: &str) -> Vec<String> {
        self.state.borrow().collections.get(collection).cloned().unwrap_or_default()
    }

    /// The names of all collections that hold something.
    pub fn collections(&self) -> Vec<String> {
        self.state.borrow().collections.keys().cloned().collect()
    }

    /// The output called `name`: `node:1`, or `node` for its first.
    pub fn output(&self, name: &str) -> Result<Output<'_>> {
        let endpoint = self.state.borrow().nodes.endpoint(name)?;
        Ok(Output::new(self, endpoint))
    }

    /// Describes one of several copies of a model that have their variables in common: nodes go into the scope `name`,
    /// variables are named as if there was no such scope, and one that exists already is used, not made again.
    pub fn share_variables<R>(&self, name: &str, body: impl FnOnce() -> R) -> R {
        self.name_scope(name, || {
            let scope = self.scoped_name("");
            let before = self.state.borrow_mut().shared_scope.replace(scope);
            let result = body();
            self.state.borrow_mut().shared_scope = before;
            result
        })
    }

    /// The name of a variable called `name` here, if copies of a model share it.
    pub(crate) fn shared_variable_name(&self, name: &str) -> Option<String> {
        let full = self.scoped_name(name);
        let state = self.state.borrow();
        let scope = state.shared_scope.as_deref()?;
        full.strip_prefix(scope).map(str::to_owned)
    }

    /// Describes something outside of the copies.
    pub(crate) fn unshared<R>(&self, body: impl FnOnce() -> R) -> R {
        let before = self.state.borrow_mut().shared_scope.take();
        let result = self.absolute_scope("", body);
        self.state.borrow_mut().shared_scope = before;
        result
    }

    pub(crate) fn add_variable(&self, record: VariableRecord) {
        self.state.borrow_mut().variables.push(record);
    }

    /// The name a node or scope called `name` would get here without a suffix; the open scope itself for `""`.
    pub fn scoped_name(&self, name: &str) -> String {
        format!("{}{name}", self.state.borrow().name_scope)
    }

    /// Notes what an importer knows of an output that a node is about to read, if it is one of an unknown op.
    pub(crate) fn learn_output(&self, at: Endpoint, expected: Option<(DType, bool)>) {
        learn_output(&mut self.state.borrow_mut().nodes, at, expected);
    }

    /// Adds a node as an importer does: exact name, no scopes. Inputs may be given later only for merges. If its op is not in
    /// the table, `unknown` is what the message says of it.
    pub(crate) fn import(&self, request: NodeRequest, unknown: Option<Arc<UnknownOp>>) -> Result<NodeId> {
        let mut state = self.state.borrow_mut();
        let name = request.name.clone().unwrap_or_default();
        check_name(&name)?;
        if state.nodes.find(&name).is_some() {
            return Err(Error::invalid_argument(format!("Duplicate node name in graph: '{name}'")));
        }
        state.name_counts.entry(name.clone()).or_insert(0);
        let node = match unknown {
            None => complete(self.registry, &state.nodes, request, name)?,
            Some(unknown) => unknown_node(request, unknown, name),
        };
        Ok(state.nodes.push(node))
    }

    /// Keeps the functions of a graph that was imported.
    pub(crate) fn set_library(&self, library: Arc<FunctionDefLibrary>) {
        self.state.borrow_mut().nodes.set_library(library);
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
            // A scope's own name, slash and all, is for the one node that stands for the scope.
            let name = match wanted.strip_suffix('/') {
                Some(scope) if state.nodes.find(scope).is_none() => scope.to_owned(),
                Some(scope) => {
                    return Err(Error::invalid_argument(format!("Duplicate node name in graph: '{scope}'")));
                }
                None => state.unique_name(&wanted),
            };
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
        self.absolute_scope(&name, || crate::describe::control_flow::prepare(self, flow.as_deref(), &mut request))
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
                node.device_source = Some(location.into());
            }
            node.device = merged;
        }
        let id = {
            let mut state = self.state.borrow_mut();
            let id = state.nodes.push(node);
            if let Some((forward, region)) = state.gradient_of {
                state.gradient_nodes.push(GradientNode { id, forward, region });
            }
            id
        };
        if let Some(flow) = flow {
            flow.core().add(self, id);
        }
        Ok(id)
    }
}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Graph of {} nodes", self.nodes().len())
    }
}

enum ScopeCall {
    Spec(DeviceSpec, Location),
    Function(DeviceFn, Location),
}

impl GraphContents {
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
        // As in TensorFlow, a name that ends in a slash is exact: a node may be called like the scope it belongs to.
        if let Some(exact) = wanted.strip_suffix('/')
            && self.nodes.find(exact).is_none()
        {
            self.name_counts.entry(exact.to_owned()).or_insert(0);
            return exact.to_owned();
        }
        let wanted = wanted.trim_end_matches('/');
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
