//! What a shape function may look at: the inputs' shapes, the attributes, and values that are already constant.

use kolo_core::{DType, Dim, Error, PartialShape, Result, Tensor};

use crate::{Attrs, Endpoint, Node, Nodes, Work};

/// A node under construction, seen by its shape function.
pub struct InferCtx<'a> {
    op: &'a str,
    attrs: &'a Attrs,
    nodes: &'a Nodes,
    inputs: &'a [Endpoint],
    n_outputs: usize,
}

impl<'a> InferCtx<'a> {
    pub(crate) fn new(
        op: &'a str,
        attrs: &'a Attrs,
        nodes: &'a Nodes,
        inputs: &'a [Endpoint],
        n_outputs: usize,
    ) -> Self {
        InferCtx { op, attrs, nodes, inputs, n_outputs }
    }

    /// The op's name.
    pub fn op(&self) -> &str {
        self.op
    }

    /// The node's attributes, defaults filled in.
    pub fn attrs(&self) -> &'a Attrs {
        self.attrs
    }

    /// How many inputs there are.
    pub fn n_inputs(&self) -> usize {
        self.inputs.len()
    }

    /// How many shapes to return.
    pub fn n_outputs(&self) -> usize {
        self.n_outputs
    }

    /// The shape of an input, as far as it is known.
    pub fn input(&self, i: usize) -> &'a PartialShape {
        &self.nodes.output(self.inputs[i]).shape
    }

    /// The dtype of an input.
    pub fn input_dtype(&self, i: usize) -> DType {
        self.nodes.output(self.inputs[i]).dtype
    }

    /// The dtype and shape of what a resource input refers to, if known.
    pub fn handle(&self, i: usize) -> Option<&'a (DType, PartialShape)> {
        self.nodes.output(self.inputs[i]).handle.as_deref()
    }

    /// The node that makes an input, for ops whose outputs depend on how an object was declared.
    pub fn source(&self, i: usize) -> &'a Node {
        self.nodes.node(self.inputs[i].node)
    }

    /// An input of a known rank; an error if it has another.
    pub fn input_of_rank(&self, i: usize, rank: usize) -> Result<PartialShape> {
        self.input(i)
            .merge(&PartialShape::of_rank(rank))
            .map_err(|_| Error::invalid_argument(format!("input {i} should have rank {rank}, found {}", self.input(i))))
    }

    /// An input of at least this rank (or of unknown rank); an error if it has less.
    pub fn input_of_rank_at_least(&self, i: usize, rank: usize) -> Result<&'a PartialShape> {
        match self.input(i).rank() {
            Some(found) if found < rank => Err(Error::invalid_argument(format!(
                "input {i} should have at least rank {rank}, found {}",
                self.input(i)
            ))),
            _ => Ok(self.input(i)),
        }
    }

    /// An input's value, if it is a constant.
    pub fn constant(&self, i: usize) -> Option<&'a Tensor> {
        constant(self.nodes, self.inputs[i])
    }

    /// An integer input's values, if it is a constant.
    pub fn constant_integers(&self, i: usize) -> Option<Vec<i64>> {
        self.constant(i).and_then(|tensor| tensor.integers().ok())
    }

    /// An integer vector input read as a shape, with the parts known that can be: constants, shapes of known tensors,
    /// and packs and concatenations of those. −1 is unknown.
    pub fn constant_as_shape(&self, i: usize) -> PartialShape {
        match values_of(self.nodes, self.inputs[i], &mut MAX_VISITS.clone()) {
            Some(values) => {
                let dims: Vec<Dim> = values.into_iter().map(|v| v.and_then(|v| usize::try_from(v).ok())).collect();
                PartialShape::new(&dims)
            }
            None => match self.input(i).dim(0) {
                Some(rank) if self.input(i).rank() == Some(1) && rank <= MAX_RANK => PartialShape::of_rank(rank),
                _ => PartialShape::unknown(),
            },
        }
    }
}

/// Shapes of more dimensions than this are a mistake or an attack.
const MAX_RANK: usize = 254;

/// Shape arithmetic is small. Without a limit, a few packs of packs could ask for the same node billions of times.
const MAX_VISITS: usize = 1024;

fn constant(nodes: &Nodes, at: Endpoint) -> Option<&Tensor> {
    let node = nodes.node(at.node);
    match node.def.work {
        Work::Constant => node.attrs.tensor("value").ok(),
        _ => None,
    }
}

/// The elements of a small integer vector or scalar, `None` where unknown; `None` for all if even their number is.
/// Gives up when `visits` are used up.
fn values_of(nodes: &Nodes, at: Endpoint, visits: &mut usize) -> Option<Vec<Option<i64>>> {
    *visits = visits.checked_sub(1)?;
    let node = nodes.node(at.node);
    let mut input = |i: usize| values_of(nodes, node.inputs[i], visits);
    match node.op() {
        "Const" => {
            let tensor = node.attrs.tensor("value").ok()?;
            (tensor.n_elements() <= MAX_RANK)
                .then(|| tensor.integers().ok()?.into_iter().map(Some).collect::<Vec<_>>().into())?
        }
        "Shape" => {
            let dims = nodes.output(node.inputs[0]).shape.dims()?;
            Some(dims.iter().map(|dim| dim.map(|dim| dim as i64)).collect())
        }
        "Cast" | "Identity" => input(0),
        "Pack" => node
            .inputs
            .iter()
            .map(|&at| match values_of(nodes, at, visits) {
                Some(values) if values.len() == 1 => values[0],
                _ => None,
            })
            .map(Some)
            .collect(),
        "ConcatV2" => {
            let mut all = Vec::new();
            for i in 0..node.inputs.len() - 1 {
                all.extend(input(i)?);
            }
            Some(all)
        }
        "StridedSlice" => {
            let values = input(0)?;
            let mut one = |i: usize| -> Option<i64> {
                match input(i)?.as_slice() {
                    [value] => *value,
                    _ => None,
                }
            };
            let bits = |name: &str| node.attrs.int(name).ok().map(|mask| mask & 1 != 0);
            let plain = node.attrs.int("ellipsis_mask").ok()? == 0 && node.attrs.int("new_axis_mask").ok()? == 0;
            if !plain || one(3)? != 1 {
                return None;
            }
            let n = values.len() as i64;
            let clamp = |at: i64| (if at < 0 { at + n } else { at }).clamp(0, n) as usize;
            let begin = if bits("begin_mask")? { 0 } else { clamp(one(1)?) };
            if bits("shrink_axis_mask")? {
                return values.get(begin).map(|value| vec![*value]);
            }
            let end = if bits("end_mask")? { n as usize } else { clamp(one(2)?) };
            Some(values.get(begin..end.max(begin))?.to_vec())
        }
        _ => None,
    }
}
