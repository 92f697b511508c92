//! What layers share: whether they train, activations, and errors that name the layer.

use kolo_core::{DType, Error, Shape};
use kolo_graph::{Graph, Initializer, Operation, Output, Variable};

/// A function that a layer applies to its result: `.activation(nn::relu)`.
pub type Activation = fn(Output<'_>) -> Output<'_>;

/// The phase of a layer that behaves differently while it trains, such as dropout: whether it trains, known while the graph is
/// described, or a scalar `bool` that is fed in each step.
#[derive(Clone, Copy, Debug)]
pub enum Phase<'g> {
    /// Whether it trains is known now.
    Known(bool),
    /// Whether it trains is fed in each step.
    Fed(Output<'g>),
}

impl From<bool> for Phase<'_> {
    fn from(training: bool) -> Self {
        Phase::Known(training)
    }
}

impl<'g> From<Output<'g>> for Phase<'g> {
    fn from(training: Output<'g>) -> Self {
        Phase::Fed(training)
    }
}

/// The collection of updates that training must run besides the optimizer's, such as those of moving averages.
pub(super) const UPDATE_OPS: &str = "update_ops";

/// The updates that layers want run with each training step (batch normalisation's moving averages):
/// `g.control_dependencies(&nn::update_ops(&g), || optimizer.minimize(loss, step))`.
pub fn update_ops(graph: &Graph) -> Vec<Operation<'_>> {
    graph.collection(UPDATE_OPS).iter().filter_map(|name| graph.operation(name).ok()).collect()
}

/// Keeps an error that names the layer, and gives an output that says so.
#[track_caller]
pub(super) fn refuse<'g>(graph: &'g Graph, layer: &str, name: &str, why: impl std::fmt::Display) -> Output<'g> {
    let line = std::panic::Location::caller();
    graph.record_error(Error::invalid_argument(format!("{layer} '{}': {why} (at {line})", graph.scoped_name(name))));
    Output::invalid(graph)
}

/// The size of the last dimension, which variables depend on; else an error is kept that names the layer.
#[track_caller]
pub(super) fn last_dim(x: Output<'_>, layer: &str, name: &str) -> Option<usize> {
    if !x.is_valid() {
        return None;
    }
    let size = x.shape().rank().filter(|&rank| rank > 0).and_then(|_| x.shape().dim(-1));
    if size.is_none() {
        refuse(
            x.graph(),
            layer,
            name,
            format_args!(
                "the last dimension of its input {x:?} is not known, but the size of its variables depends on it: give the \
                 placeholder that dimension, or reshape the input"
            ),
        );
    }
    size
}

/// A variable of a layer, in the scope that is open.
#[track_caller]
pub(super) fn weights<'g>(
    graph: &'g Graph,
    name: &str,
    dims: &[usize],
    dtype: DType,
    initial: &Initializer,
) -> Variable<'g> {
    let shape = Shape::new(dims).unwrap_or_else(|error| {
        graph.record_error(error);
        Shape::scalar()
    });
    graph.new_variable(name, initial.clone()).shape(shape).dtype(dtype).build()
}

/// The value of a variable, in another dtype if need be.
#[track_caller]
pub(super) fn read_as<'g>(variable: Variable<'g>, dtype: DType) -> Output<'g> {
    match variable.dtype() == dtype {
        true => variable.read(),
        false => crate::ops::cast(variable.read(), dtype),
    }
}

/// `x` with the last dimension as it is and all others made one, if there are more than one.
#[track_caller]
pub(super) fn as_matrix(x: Output<'_>, size: usize) -> Output<'_> {
    match x.shape().rank() {
        Some(2) => x,
        _ => crate::ops::reshape(x, &[-1, size as i64]),
    }
}

/// `matrix` with all but its last dimension as in `like`.
#[track_caller]
pub(super) fn shaped_like<'g>(matrix: Output<'g>, like: Output<'g>, size: usize) -> Output<'g> {
    if like.shape().rank() == Some(2) {
        return matrix;
    }
    let dims = like.shape().dims().map(<[_]>::to_vec).unwrap_or_default();
    let front = &dims[..dims.len().saturating_sub(1)];
    if !dims.is_empty() && front.iter().filter(|dim| dim.is_none()).count() <= 1 {
        let sizes = front.iter().map(|dim| dim.map_or(-1, |dim| dim as i64));
        return crate::ops::reshape(matrix, sizes.chain([size as i64]).collect::<Vec<_>>().as_slice());
    }
    let graph = like.graph();
    let front = crate::ops::slice_at(crate::ops::shape(like), &[crate::ops::At::Range(None, Some(-1))]);
    let last = graph.constant([size as i32]);
    crate::ops::reshape(matrix, crate::ops::concat(&[front, last], 0))
}
