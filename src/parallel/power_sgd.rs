//! PowerSGD: a gradient, as a matrix A of m × n, is exchanged as a product P Qᵀ of low rank. One step of a power iteration, which begins
//! where the one of the step before ended:
//!
//! ```text
//! A = gradient + unsent;  P = mean(A Q);  P = orthonormal(P);  Q = mean(Aᵀ P);  exchanged: P Qᵀ;  unsent = A − P Qᵀ
//! ```
//!
//! Q is the same on all ranks, so it is a variable like others; what is not sent is each rank's own.

use kolo_core::{Result, Shape};
use kolo_graph::{AttrValue, Attrs, Endpoint, Graph, Initializer, NodeId, Rewriter, Variable};

use super::data_parallel::{Bucket, ExchangePlace, add_collective};
use super::exchange::{SMALLEST, unsent};
use super::nodes::NodeAdder;

/// A gradient as a matrix: its first dimension, and all others together.
fn as_matrix(dims: &[usize]) -> Option<[usize; 2]> {
    let (rows, others) = dims.split_first()?;
    (!others.is_empty()).then(|| [*rows, others.iter().product()])
}

/// Whether the factors of a gradient are smaller than it is.
pub(super) fn is_worth_it(dims: &[usize], rank: usize) -> bool {
    let Some([rows, columns]) = as_matrix(dims) else { return false };
    rows * columns >= SMALLEST && rank.saturating_mul(rows + columns) < rows * columns
}

fn factor(variable: &str) -> String {
    format!("{variable}/power_sgd")
}

/// Adds Q, which begins with random columns.
pub(super) fn add_factor<'g>(graph: &'g Graph, variable: Variable<'g>, shape: &Shape, rank: usize) -> Variable<'g> {
    let columns = as_matrix(shape.dims()).map_or(1, |[_, columns]| columns);
    let random = Initializer::Normal { mean: 0.0, stddev: 1.0 };
    graph.device("/device:CPU:0", || {
        let builder = graph.absolute_scope("", || graph.new_variable(&factor(&variable.name()), random));
        graph.absolute_scope("", || builder.shape([columns, rank]).dtype(variable.dtype()).not_trainable().build())
    })
}

/// A gradient on its way.
struct Factors {
    dims: Vec<usize>,
    own: NodeId,
    factor: NodeId,
    /// The gradient and what was left, as a matrix.
    matrix: Endpoint,
    old: Endpoint,
}

/// Puts the exchange behind the gradients of a bucket. `done` is the step, which waits for what is kept.
pub(super) fn exchange(graph: &mut Rewriter<'_>, bucket: &Bucket, done: Option<NodeId>) -> Result<()> {
    let mut add = NodeAdder::on_host(graph, "data_parallel/power_sgd")?;
    let (mut all, mut lefts) = (Vec::new(), Vec::new());
    for exchanged in &bucket.values {
        let own = add.own_variable(&unsent(&exchanged.variable))?;
        let factor = add.own_variable(&factor(&exchanged.variable))?;
        let dims = dims_of(&add, own);
        let kept = add.read(own, bucket.dtype)?;
        let sum = add.op("Add", &[exchanged.value, kept])?;
        let matrix = add.reshape(sum, &as_matrix(&dims).unwrap_or([1, 1]))?;
        let old = add.read(factor, bucket.dtype)?;
        lefts.push(product(&mut add, matrix, old, Transposed::Neither)?);
        all.push(Factors { dims, own, factor, matrix, old });
    }
    let lefts = mean(&mut add, "data_parallel/power_sgd_p", &lefts)?;
    let mut rights = Vec::new();
    let mut columns = Vec::new();
    for (of, left) in all.iter().zip(lefts) {
        let left = add.op("KoloOrthonormal", &[left])?;
        rights.push(product(&mut add, of.matrix, left, Transposed::First)?);
        columns.push(left);
    }
    let rights = mean(&mut add, "data_parallel/power_sgd_q", &rights)?;
    for (((exchanged, of), left), right) in bucket.values.iter().zip(&all).zip(columns).zip(rights) {
        let approximation = product(&mut add, left, right, Transposed::Second)?;
        let rest = add.op("Sub", &[of.matrix, approximation])?;
        let rest = add.reshape(rest, &of.dims)?;
        let mut kept = vec![add.assign(of.own, rest)?];
        // A direction in which nothing was found stays the one to look in: from zeros nothing would ever come again.
        let zero = add.number(0.0, bucket.dtype)?;
        let is_empty = add.op("Equal", &[right, zero])?;
        let next = add.op("SelectV2", &[is_empty, of.old, right])?;
        kept.push(add.assign(of.factor, next)?);
        for kept in kept {
            if let Some(done) = done {
                add.graph.order_after(done, kept);
            }
        }
        let value = add.reshape(approximation, &of.dims)?;
        add.graph.redirect_inputs(&exchanged.readers, value)?;
    }
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Transposed {
    Neither,
    First,
    Second,
}

fn product(add: &mut NodeAdder<'_, '_>, a: Endpoint, b: Endpoint, transposed: Transposed) -> Result<Endpoint> {
    let mut attrs = Attrs::default();
    attrs.set("transpose_a", AttrValue::Bool(transposed == Transposed::First));
    attrs.set("transpose_b", AttrValue::Bool(transposed == Transposed::Second));
    add.with("MatMul", &[a, b], attrs)
}

/// The means over all ranks, in one meeting.
fn mean(add: &mut NodeAdder<'_, '_>, name: &str, values: &[Endpoint]) -> Result<Vec<Endpoint>> {
    let mut attrs = Attrs::default();
    attrs.set("reduction", "mean");
    let node = add_collective(add.graph, "KoloAllReduce", name, values, attrs, ExchangePlace::Host)?;
    Ok((0..values.len() as u32).map(|index| Endpoint { node, index }).collect())
}

/// The shape of a variable that [`super::DataParallel::steps`] has added.
fn dims_of(add: &NodeAdder<'_, '_>, handle: NodeId) -> Vec<usize> {
    let shape = add.graph.node(handle).and_then(|node| node.attrs.shape("shape").ok()?.known());
    shape.map_or(Vec::new(), |shape| shape.dims().to_vec())
}
