//! Short ways for a pass to add nodes to a graph.

use kolo_core::{DType, DeviceSpec, Error, Result, Tensor};
use kolo_graph::{AttrValue, Attrs, Endpoint, NodeId, Rewriter};

/// Adds nodes whose names begin alike.
pub(super) struct NodeAdder<'r, 'a> {
    pub graph: &'r mut Rewriter<'a>,
    name: &'static str,
    /// On the host, if not where their inputs are.
    host: Option<DeviceSpec>,
}

impl<'r, 'a> NodeAdder<'r, 'a> {
    /// Adds nodes where their first inputs are.
    pub fn new(graph: &'r mut Rewriter<'a>, name: &'static str) -> NodeAdder<'r, 'a> {
        NodeAdder { graph, name, host: None }
    }

    /// Adds nodes on the host.
    pub fn on_host(graph: &'r mut Rewriter<'a>, name: &'static str) -> Result<NodeAdder<'r, 'a>> {
        Ok(NodeAdder { graph, name, host: Some(DeviceSpec::parse("/device:CPU:0")?) })
    }

    /// A node.
    pub fn node(&mut self, op: &str, inputs: &[Endpoint], attrs: Attrs) -> Result<NodeId> {
        let node = self.graph.add(op, self.name, inputs, attrs)?;
        if let Some(host) = &self.host {
            self.graph.edit(node, |node| node.device = host.clone());
        }
        Ok(node)
    }

    /// The only output of a node with these attributes.
    pub fn with(&mut self, op: &str, inputs: &[Endpoint], attrs: Attrs) -> Result<Endpoint> {
        Ok(Endpoint { node: self.node(op, inputs, attrs)?, index: 0 })
    }

    /// The only output of a node.
    pub fn op(&mut self, op: &str, inputs: &[Endpoint]) -> Result<Endpoint> {
        self.with(op, inputs, Attrs::default())
    }

    /// A constant.
    pub fn constant(&mut self, value: Tensor) -> Result<Endpoint> {
        let mut attrs = Attrs::default();
        attrs.set("dtype", AttrValue::Type(value.dtype()));
        attrs.set("value", AttrValue::Tensor(value));
        self.with("Const", &[], attrs)
    }

    /// A number in a type of floats.
    pub fn number(&mut self, x: f64, dtype: DType) -> Result<Endpoint> {
        self.constant(float(x, dtype)?)
    }

    /// The same elements in another shape.
    pub fn reshape(&mut self, at: Endpoint, dims: &[usize]) -> Result<Endpoint> {
        let dims = self.constant(Tensor::vector(dims.iter().map(|dim| *dim as i64).collect::<Vec<i64>>()))?;
        self.op("Reshape", &[at, dims])
    }

    /// What an output is.
    pub fn dtype(&self, at: Endpoint) -> DType {
        self.graph.node(at.node).map_or(DType::F32, |node| node.outputs[at.index as usize].dtype)
    }

    /// The value of a variable.
    pub fn read(&mut self, handle: NodeId, dtype: DType) -> Result<Endpoint> {
        let mut attrs = Attrs::default();
        attrs.set("dtype", AttrValue::Type(dtype));
        self.with("ReadVariableOp", &[Endpoint { node: handle, index: 0 }], attrs)
    }

    /// Gives a variable a value.
    pub fn assign(&mut self, handle: NodeId, value: Endpoint) -> Result<NodeId> {
        let mut attrs = Attrs::default();
        attrs.set("dtype", AttrValue::Type(self.dtype(value)));
        self.node("AssignVariableOp", &[Endpoint { node: handle, index: 0 }, value], attrs)
    }

    /// The node of a variable that [`super::DataParallel::steps`] has added, or an error that says what was forgotten.
    pub fn own_variable(&self, name: &str) -> Result<NodeId> {
        self.graph.find(name).ok_or_else(|| {
            Error::failed_precondition(format!(
                "there is no variable '{name}', which `DataParallel::steps` adds to the graph: initialise and run what it returned, of \
                 the same `DataParallel`"
            ))
        })
    }
}

/// Attributes by their names.
pub(super) fn attrs<const N: usize>(named: [(&'static str, impl Into<AttrValue>); N]) -> Attrs {
    let mut attrs = Attrs::default();
    named.into_iter().for_each(|(name, value)| attrs.set(name, value));
    attrs
}

/// A number in a type of floats.
pub(super) fn float(x: f64, dtype: DType) -> Result<Tensor> {
    match dtype {
        DType::F32 => Ok(Tensor::scalar(x as f32)),
        DType::F64 => Ok(Tensor::scalar(x)),
        DType::F16 => Ok(Tensor::scalar(half::f16::from_f64(x))),
        DType::BF16 => Ok(Tensor::scalar(half::bf16::from_f64(x))),
        other => Err(Error::invalid_argument(format!("ranks have no mean of {other}"))),
    }
}
