//! Handles to operations and their outputs, and the builder that adds an operation.

use std::fmt;

use kolo_core::{DType, DeviceSpec, Error, PartialShape, Result};

use crate::describe::request::NodeRequest;
use crate::{AttrValue, Attrs, Endpoint, Graph, Location, Node, NodeId, Signature};

/// One output of one operation: a value that will exist when the graph runs. A plain copy; `a * b + 2.0` adds nodes.
#[derive(Clone, Copy)]
pub struct Output<'g> {
    graph: &'g Graph,
    endpoint: Endpoint,
}

/// An operation of a graph.
#[derive(Clone, Copy)]
pub struct Operation<'g> {
    graph: &'g Graph,
    id: NodeId,
}

impl<'g> Output<'g> {
    /// The output at `endpoint` of `graph`, which must exist.
    pub fn new(graph: &'g Graph, endpoint: Endpoint) -> Output<'g> {
        Output { graph, endpoint }
    }

    /// An output that could not be made; the graph holds the reason.
    pub fn invalid(graph: &'g Graph) -> Output<'g> {
        Output { graph, endpoint: Endpoint { node: NodeId::INVALID, index: 0 } }
    }

    /// Its graph.
    pub fn graph(self) -> &'g Graph {
        self.graph
    }

    /// Where it comes from.
    pub fn endpoint(self) -> Endpoint {
        self.endpoint
    }

    /// The operation that makes it.
    pub fn operation(self) -> Operation<'g> {
        Operation { graph: self.graph, id: self.endpoint.node }
    }

    /// False if an error kept it from being made; [`Graph::check`] says which.
    pub fn is_valid(self) -> bool {
        self.endpoint.node != NodeId::INVALID
    }

    /// Its element type; `float` for an output that could not be made.
    pub fn dtype(self) -> DType {
        if self.is_valid() { self.graph.nodes().output(self.endpoint).dtype } else { DType::F32 }
    }

    /// Its shape, as far as it is known.
    pub fn shape(self) -> PartialShape {
        if self.is_valid() { self.graph.nodes().output(self.endpoint).shape.clone() } else { PartialShape::unknown() }
    }

    /// True for a reference to a variable.
    pub fn is_ref(self) -> bool {
        self.is_valid() && self.graph.nodes().output(self.endpoint).is_ref
    }

    /// What a resource handle refers to, where known.
    pub fn handle(self) -> Option<(DType, PartialShape)> {
        if !self.is_valid() {
            return None;
        }
        self.graph.nodes().output(self.endpoint).handle.as_deref().cloned()
    }

    /// `name:index`.
    pub fn name(self) -> String {
        if self.is_valid() { self.graph.nodes().endpoint_name(self.endpoint) } else { "<invalid>".to_owned() }
    }
}

impl fmt::Debug for Output<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}{}", self.name(), self.dtype(), self.shape())
    }
}

impl PartialEq for Output<'_> {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.graph, other.graph) && self.endpoint == other.endpoint
    }
}

impl<'g> Operation<'g> {
    /// The operation with this number.
    pub fn new(graph: &'g Graph, id: NodeId) -> Operation<'g> {
        Operation { graph, id }
    }

    pub(crate) fn invalid(graph: &'g Graph) -> Operation<'g> {
        Operation { graph, id: NodeId::INVALID }
    }

    /// Its graph.
    pub fn graph(self) -> &'g Graph {
        self.graph
    }

    /// Its number.
    pub fn id(self) -> NodeId {
        self.id
    }

    /// False if an error kept it from being made.
    pub fn is_valid(self) -> bool {
        self.id != NodeId::INVALID
    }

    /// Its name.
    pub fn name(self) -> String {
        if self.is_valid() { self.graph.nodes().node(self.id).name.to_string() } else { "<invalid>".to_owned() }
    }

    /// Its op; `<unknown>` if that is not in the table.
    pub fn op(self) -> &'static str {
        if self.is_valid() { self.graph.nodes().node(self.id).def.name } else { "<invalid>" }
    }

    /// How many outputs it has.
    pub fn n_outputs(self) -> usize {
        if self.is_valid() { self.graph.nodes().node(self.id).outputs.len() } else { 0 }
    }

    /// How many data inputs it has.
    pub fn n_inputs(self) -> usize {
        if self.is_valid() { self.graph.nodes().node(self.id).inputs.len() } else { 0 }
    }

    /// One of its outputs. An output that it does not have is kept as an error.
    pub fn output(self, index: usize) -> Output<'g> {
        if index < self.n_outputs() {
            return Output { graph: self.graph, endpoint: Endpoint { node: self.id, index: index as u32 } };
        }
        if self.is_valid() {
            self.graph.record_error(Error::invalid_argument(format!(
                "{} has {} outputs, there is no {index}",
                self.graph.nodes().node(self.id).describe(),
                self.n_outputs()
            )));
        }
        Output::invalid(self.graph)
    }

    /// All its outputs.
    pub fn outputs(self) -> Vec<Output<'g>> {
        (0..self.n_outputs()).map(|i| self.output(i)).collect()
    }

    /// Where data input `index` comes from.
    pub fn input(self, index: usize) -> Output<'g> {
        if !self.is_valid() {
            return Output::invalid(self.graph);
        }
        let endpoint = self.graph.nodes().node(self.id).inputs.get(index).copied();
        match endpoint {
            Some(endpoint) => Output { graph: self.graph, endpoint },
            None => Output::invalid(self.graph),
        }
    }

    /// Runs `read` over its attributes.
    pub fn attrs<R>(self, read: impl FnOnce(&Attrs) -> R) -> R {
        match self.is_valid() {
            true => read(&self.graph.nodes().node(self.id).attrs),
            false => read(&Attrs::default()),
        }
    }

    /// The node behind it, as plain data.
    pub fn node(self) -> Option<std::sync::Arc<Node>> {
        self.is_valid().then(|| self.graph.nodes().node(self.id).clone())
    }
}

impl fmt::Debug for Operation<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} '{}'", self.op(), self.name())
    }
}

impl Graph {
    /// Begins a new operation: `graph.op("MatMul").input(a).input(b).attr("transpose_b", true).out()`.
    #[track_caller]
    pub fn op(&self, op: &str) -> OpBuilder<'_> {
        OpBuilder {
            graph: self,
            request: NodeRequest {
                op: op.to_owned(),
                name: None,
                inputs: Vec::new(),
                control_inputs: Vec::new(),
                attrs: Attrs::default(),
                device: DeviceSpec::default(),
                source: Some(std::panic::Location::caller().into()),
                device_source: None,
            },
            poisoned: false,
        }
    }
}

/// An operation that is being put together.
#[must_use = "an operation is added by build() or out()"]
pub struct OpBuilder<'g> {
    graph: &'g Graph,
    request: NodeRequest,
    /// An input could not be made, so neither can this; the reason is kept already.
    poisoned: bool,
}

impl<'g> OpBuilder<'g> {
    /// The next data input.
    pub fn input(mut self, input: Output<'g>) -> Self {
        if !input.is_valid() {
            self.poisoned = true;
        } else if !std::ptr::eq(input.graph, self.graph) {
            self.graph.record_error(Error::invalid_argument(format!(
                "input '{}' of {} belongs to another graph",
                input.name(),
                self.request.op
            )));
            self.poisoned = true;
        }
        self.request.inputs.push(input.endpoint);
        self
    }

    /// The next data inputs, in order.
    pub fn inputs(self, inputs: impl IntoIterator<Item = Output<'g>>) -> Self {
        inputs.into_iter().fold(self, OpBuilder::input)
    }

    /// An attribute. Type and count attributes that the inputs determine need not be given.
    pub fn attr(mut self, name: &str, value: impl Into<AttrValue>) -> Self {
        self.request.attrs.set(name, value);
        self
    }

    /// The name, made unique by a suffix; the op's name otherwise. A name that ends in a slash, such as
    /// [`Graph::current_scope`], is taken as it is, without the slash: the node that stands for a scope.
    pub fn name(mut self, name: &str) -> Self {
        self.request.name = Some(name.to_owned());
        self
    }

    /// An operation that must run before this one.
    pub fn control_input(mut self, operation: Operation<'g>) -> Self {
        match operation.is_valid() {
            true => self.request.control_inputs.push(operation.id),
            false => self.poisoned = true,
        }
        self
    }

    /// A device for this operation alone.
    pub fn device(mut self, device: DeviceSpec) -> Self {
        self.request.device = device;
        self
    }

    /// The line that messages name; by default the caller of [`Graph::op`].
    pub fn location(mut self, location: Location) -> Self {
        self.request.source = Some(location.into());
        self
    }

    /// Adds the operation, or returns why it cannot be.
    pub fn try_build(self) -> Result<Operation<'g>> {
        if self.poisoned {
            self.graph.check()?;
            return Err(Error::invalid_argument("an input could not be made"));
        }
        let graph = self.graph;
        graph.add(self.request).map(|id| Operation { graph, id })
    }

    /// Adds the operation. If it cannot be, the graph keeps the reason and the result is invalid.
    pub fn build(self) -> Operation<'g> {
        let graph = self.graph;
        if self.poisoned {
            return Operation::invalid(graph);
        }
        match self.try_build() {
            Ok(operation) => operation,
            Err(error) => {
                graph.record_error(error);
                Operation::invalid(graph)
            }
        }
    }

    /// Adds the operation and returns its first output.
    pub fn out(self) -> Output<'g> {
        let operation = self.build();
        match operation.is_valid() {
            true => operation.output(0),
            false => Output::invalid(operation.graph()),
        }
    }

    /// What the op's signature is, for builders that adapt to it.
    pub fn signature(&self) -> Result<&'static Signature> {
        self.graph.registry().find(&self.request.op).map(|(_, signature)| signature)
    }
}
