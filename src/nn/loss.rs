//! Losses: how far predictions are from labels.

use kolo_graph::{IntoOutput, Output, Variable};

use super::layer::{as_matrix, last_dim};
use crate::ops;

/// What becomes of the losses of the elements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// They stay as they are.
    None,
    /// Their sum.
    Sum,
    /// Their mean.
    #[default]
    Mean,
}

impl Reduction {
    /// Applies it.
    #[track_caller]
    pub fn apply(self, losses: Output<'_>) -> Output<'_> {
        match self {
            Reduction::None => losses,
            Reduction::Sum => ops::sum_all(losses),
            Reduction::Mean => ops::mean_all(losses),
        }
    }
}

/// The mean of `losses` in which each counts as much as its weight; 0 if all weights are 0. Weights of 0 and 1 leave padding
/// out.
#[track_caller]
pub fn weighted_mean<'g>(losses: Output<'g>, weights: Output<'g>) -> Output<'g> {
    ops::div_no_nan(ops::sum_all(losses * weights), ops::sum_all(weights))
}

/// The cross entropy between class numbers and the softmax of logits, `[…, classes]` of any rank.
#[track_caller]
pub fn sparse_softmax_cross_entropy<'g>(logits: Output<'g>, labels: Output<'g>, reduction: Reduction) -> Output<'g> {
    logits.graph().name_scope("sparse_softmax_cross_entropy", || {
        let Some((flat, _)) = rows(logits) else { return Output::invalid(logits.graph()) };
        let flat_labels = if labels.shape().rank() == Some(1) { labels } else { ops::reshape(labels, &[-1i64]) };
        let losses = ops::sparse_softmax_cross_entropy(flat, flat_labels);
        finish(losses, logits, labels, reduction)
    })
}

/// As [`sparse_softmax_cross_entropy`], for many classes and low precision: losses are `float` whatever the logits are, and the
/// gradient needs no memory beside theirs. An op of our own, which TensorFlow does not have.
#[track_caller]
pub fn class_loss<'g>(logits: Output<'g>, labels: Output<'g>, reduction: Reduction) -> Output<'g> {
    logits.graph().name_scope("class_loss", || {
        let Some((flat, _)) = rows(logits) else { return Output::invalid(logits.graph()) };
        let flat_labels = if labels.shape().rank() == Some(1) { labels } else { ops::reshape(labels, &[-1i64]) };
        finish(ops::class_loss(flat, flat_labels), logits, labels, reduction)
    })
}

/// The cross entropy between distributions over classes and the softmax of logits, both `[…, classes]`.
#[track_caller]
pub fn softmax_cross_entropy<'g>(logits: Output<'g>, labels: Output<'g>, reduction: Reduction) -> Output<'g> {
    logits.graph().name_scope("softmax_cross_entropy", || {
        let (Some((flat, classes)), true) = (rows(logits), labels.is_valid()) else {
            return Output::invalid(logits.graph());
        };
        let losses = ops::softmax_cross_entropy(flat, as_matrix(labels, classes));
        let one = ops::slice_at(labels, &[ops::At::Rest, ops::At::Index(0)]);
        finish(losses, logits, one, reduction)
    })
}

/// Class numbers as distributions over `classes`: `1 − smoothing` on the class, the rest spread evenly over all.
#[track_caller]
pub fn smoothed_labels<'g>(labels: Output<'g>, classes: usize, smoothing: f32) -> Output<'g> {
    let graph = labels.graph();
    let even = smoothing / classes.max(1) as f32;
    ops::one_hot(labels, classes as i32, graph.constant(1.0 - smoothing + even), even)
}

/// Logits as `[rows, classes]`, and how many classes there are.
#[track_caller]
fn rows(logits: Output<'_>) -> Option<(Output<'_>, usize)> {
    let classes = last_dim(logits, "cross entropy", "")?;
    Some((as_matrix(logits, classes), classes))
}

/// Reduces the losses of rows, or gives them the shape that they had in `labels`.
#[track_caller]
fn finish<'g>(losses: Output<'g>, logits: Output<'g>, labels: Output<'g>, reduction: Reduction) -> Output<'g> {
    match (reduction, logits.shape().rank()) {
        (Reduction::None, Some(2)) => losses,
        (Reduction::None, _) => ops::reshape(losses, ops::shape(labels)),
        (reduction, _) => reduction.apply(losses),
    }
}

/// The cross entropy between labels, 0 to 1, and the sigmoid of logits, elementwise: `max(x, 0) − x·z + log(1 + exp(−|x|))`.
#[track_caller]
pub fn sigmoid_cross_entropy<'g>(logits: Output<'g>, labels: Output<'g>, reduction: Reduction) -> Output<'g> {
    logits.graph().name_scope("sigmoid_cross_entropy", || {
        let losses = ops::relu(logits) - logits * labels + ops::softplus(-ops::abs(logits));
        reduction.apply(losses)
    })
}

/// `(prediction − label)²`, elementwise.
#[track_caller]
pub fn mean_squared_error<'g>(predictions: Output<'g>, labels: Output<'g>, reduction: Reduction) -> Output<'g> {
    reduction.apply(ops::squared_difference(predictions, labels))
}

/// `|prediction − label|`, elementwise.
#[track_caller]
pub fn absolute_error<'g>(predictions: Output<'g>, labels: Output<'g>, reduction: Reduction) -> Output<'g> {
    reduction.apply(ops::abs(predictions - labels))
}

/// Half the square of the error up to `delta`, linear beyond it, elementwise.
#[track_caller]
pub fn huber<'g>(predictions: Output<'g>, labels: Output<'g>, delta: f64, reduction: Reduction) -> Output<'g> {
    let graph = predictions.graph();
    graph.name_scope("huber", || {
        let error = ops::abs(predictions - labels);
        let delta = delta.into_output(graph, error.dtype());
        let quadratic = ops::minimum(error, delta);
        reduction.apply(quadratic * quadratic * 0.5 + delta * (error - quadratic))
    })
}

/// `max(0, 1 − s · logit)`, elementwise, where s is 1 for a label of 1 and −1 for a label of 0.
#[track_caller]
pub fn hinge<'g>(logits: Output<'g>, labels: Output<'g>, reduction: Reduction) -> Output<'g> {
    logits.graph().name_scope("hinge", || {
        let signs = ops::cast(labels, logits.dtype()) * 2.0 - 1.0;
        reduction.apply(ops::relu(1.0 - signs * logits))
    })
}

/// `scale` times half the sum of the squares of these variables, to be added to a loss; `None` if there are none.
#[track_caller]
pub fn l2_penalty<'g>(variables: &[Variable<'g>], scale: f64) -> Option<Output<'g>> {
    penalty(variables, scale, |variable| ops::l2_loss(variable.read()))
}

/// `scale` times the sum of the magnitudes of these variables; `None` if there are none.
#[track_caller]
pub fn l1_penalty<'g>(variables: &[Variable<'g>], scale: f64) -> Option<Output<'g>> {
    penalty(variables, scale, |variable| ops::sum_all(ops::abs(variable.read())))
}

#[track_caller]
fn penalty<'g>(variables: &[Variable<'g>], scale: f64, of: impl Fn(&Variable<'g>) -> Output<'g>) -> Option<Output<'g>> {
    let graph = variables.first()?.handle().graph();
    graph.name_scope("penalty", || {
        let parts: Vec<Output<'g>> = variables.iter().map(of).collect();
        let sum = ops::add_n(&parts).map_err(|error| graph.record_error(error)).ok()?;
        Some(sum * scale)
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::nn::testing::{close, run};

    #[test]
    fn cross_entropies() {
        let g = kolo_ops::graph();
        let logits = g.constant([[2.0f32, 1.0, 0.0], [0.0, 0.0, 3.0]]);
        let labels = g.constant([0i64, 1]);
        let dense = g.constant([[1.0f32, 0.0, 0.0], [0.0, 1.0, 0.0]]);
        let smooth = smoothed_labels(labels, 3, 0.3);
        let deep = ops::reshape(logits, &[1i64, 2, 3]);
        let found = run(
            &g,
            &[
                sparse_softmax_cross_entropy(logits, labels, Reduction::None),
                softmax_cross_entropy(logits, dense, Reduction::None),
                sparse_softmax_cross_entropy(logits, labels, Reduction::Mean),
                softmax_cross_entropy(logits, smooth, Reduction::Sum),
                smooth,
                sparse_softmax_cross_entropy(deep, ops::reshape(labels, &[1i64, 2]), Reduction::None),
                softmax_cross_entropy(deep, ops::reshape(dense, &[1i64, 2, 3]), Reduction::None),
            ],
            &[],
        );
        // log(e² + e + 1) − 2 and log(2 + e³) − 0.
        let [a, b] = [0.407606f32, 3.094923];
        close(&found[0], &[a, b]);
        close(&found[1], &[a, b]);
        close(&found[2], &[(a + b) / 2.0]);
        // Log-sums 2.407606 and 3.094923; labels 0.8 and twice 0.1.
        close(&found[3], &[2.407606 - 0.8 * 2.0 - 0.1 + 3.094923 - 0.1 * 3.0]);
        close(&found[4], &[0.8, 0.1, 0.1, 0.1, 0.8, 0.1]);
        assert_eq!(found[5].shape().dims(), [1, 2]);
        close(&found[5], &[a, b]);
        assert_eq!(found[6].shape().dims(), [1, 2]);
        close(&found[6], &[a, b]);
    }

    #[test]
    fn other_losses() {
        let g = kolo_ops::graph();
        let x = g.constant([-1.0f32, 0.5, 3.0]);
        let z = g.constant([0.0f32, 1.0, 1.0]);
        let w = g.variable("w", [3.0f32, -4.0]);
        let found = run(
            &g,
            &[
                sigmoid_cross_entropy(x, z, Reduction::None),
                mean_squared_error(x, z, Reduction::Mean),
                absolute_error(x, z, Reduction::Sum),
                huber(x, z, 1.0, Reduction::None),
                hinge(x, z, Reduction::None),
                l2_penalty(&[w, w], 0.1).unwrap(),
                l1_penalty(&[w], 0.1).unwrap(),
                weighted_mean(x, g.constant([1.0f32, 0.0, 3.0])),
                weighted_mean(x, g.constant([0.0f32, 0.0, 0.0])),
            ],
            &[],
        );
        // log(1 + e^−1), log(1 + e^−0.5), log(1 + e^−3).
        close(&found[0], &[0.3132617, 0.474077, 0.0485874]);
        close(&found[1], &[(1.0 + 0.25 + 4.0) / 3.0]);
        close(&found[2], &[1.0 + 0.5 + 2.0]);
        close(&found[3], &[0.5, 0.125, 1.5]);
        close(&found[4], &[0.0, 0.5, 0.0]);
        close(&found[5], &[2.5]);
        close(&found[6], &[0.7]);
        close(&found[7], &[2.0]);
        close(&found[8], &[0.0]);
        assert!(l2_penalty(&[], 1.0).is_none());
    }
}
