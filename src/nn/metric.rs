//! Metrics: of one batch, or gathered over many by variables that belong to the process.

use kolo_core::{DType, Tensor};
use kolo_graph::{Graph, Operation, Output, Variable};

use crate::ops;

/// The part of rows in which the largest logit is that of the label, an integer.
#[track_caller]
pub fn accuracy<'g>(logits: Output<'g>, labels: Output<'g>) -> Output<'g> {
    logits.graph().name_scope("accuracy", || ops::mean_all(ops::cast(is_right(logits, labels), DType::F32)))
}

/// The part of rows in which the label is among the `k` largest logits.
#[track_caller]
pub fn top_k_accuracy<'g>(logits: Output<'g>, labels: Output<'g>, k: i64) -> Output<'g> {
    logits
        .graph()
        .name_scope("top_k_accuracy", || ops::mean_all(ops::cast(ops::in_top_k(logits, labels, k), DType::F32)))
}

#[track_caller]
fn is_right<'g>(logits: Output<'g>, labels: Output<'g>) -> Output<'g> {
    ops::equal(ops::argmax(logits, -1), ops::cast(labels, DType::I64))
}

/// A mean over all batches since [`Metric::reset`]. It is kept in local variables, `total` and `count`, which
/// `local_variables_initializer` sets to zero.
///
/// ```
/// use kolo::{Session, Tensor, nn};
///
/// let g = kolo::graph();
/// let loss = g.placeholder::<f32>("loss", kolo::PartialShape::unknown());
/// let mean = nn::mean_metric(loss, "mean_loss");
/// let init = g.local_variables_initializer();
///
/// let session = Session::new(&g)?;
/// session.run_op(init)?;
/// for batch in [vec![1.0f32, 2.0], vec![6.0]] {
///     session.run(&[mean.update], &[(loss, Tensor::vector(batch))], &[])?;
/// }
/// assert_eq!(session.fetch(mean.value)?.scalar_value::<f32>()?, 3.0);
/// # Ok::<(), kolo::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Metric<'g> {
    /// The mean so far, a `float`; 0 before the first batch.
    pub value: Output<'g>,
    /// Takes a batch in and gives the mean with it.
    pub update: Output<'g>,
    /// Begins anew.
    pub reset: Operation<'g>,
    /// The sum, and how many there were.
    pub variables: [Variable<'g>; 2],
}

/// The mean of all elements of `values`.
#[track_caller]
pub fn mean_metric<'g>(values: Output<'g>, name: &str) -> Metric<'g> {
    let graph = values.graph();
    graph.name_scope(name, || gathered(graph, values))
}

/// [`accuracy`] over many batches.
#[track_caller]
pub fn streaming_accuracy<'g>(logits: Output<'g>, labels: Output<'g>, name: &str) -> Metric<'g> {
    logits.graph().name_scope(name, || gathered(logits.graph(), is_right(logits, labels)))
}

/// [`top_k_accuracy`] over many batches.
#[track_caller]
pub fn streaming_top_k_accuracy<'g>(logits: Output<'g>, labels: Output<'g>, k: i64, name: &str) -> Metric<'g> {
    logits.graph().name_scope(name, || gathered(logits.graph(), ops::in_top_k(logits, labels, k)))
}

/// The metric, in the scope that is open. Sums are doubles, so that small batches still count after many.
#[track_caller]
fn gathered<'g>(graph: &'g Graph, values: Output<'g>) -> Metric<'g> {
    let [total, count] =
        ["total", "count"].map(|name| graph.new_variable(name, Tensor::scalar(0.0f64)).local().build());
    let values = ops::cast(values, DType::F64);
    let mean = |total: Output<'g>, count: Output<'g>| ops::cast(ops::div_no_nan(total, count), DType::F32);
    let value = graph.name_scope("value", || mean(total.read(), count.read()));
    let updates = [total.assign_add(ops::sum_all(values)), count.assign_add(ops::cast(ops::size(values), DType::F64))];
    let update = graph
        .name_scope("update", || graph.control_dependencies(&updates, || mean(total.read_now(), count.read_now())));
    let reset = graph.group("reset", &[total.initializer(), count.initializer()]);
    Metric { value, update, reset, variables: [total, count] }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use kolo_runtime::Session;

    use super::*;

    #[test]
    fn batches_add_up() {
        let g = kolo_ops::graph();
        let logits = g.placeholder::<f32>("logits", [None, Some(3)]);
        let labels = g.placeholder::<i64>("labels", [None]);
        let right = streaming_accuracy(logits, labels, "accuracy");
        let near = streaming_top_k_accuracy(logits, labels, 2, "top_2");
        let batch = [accuracy(logits, labels), top_k_accuracy(logits, labels, 2)];
        assert_eq!(right.variables.map(|variable| variable.name()), ["accuracy/total", "accuracy/count"]);
        assert!(g.global_variables().is_empty());
        let init = g.local_variables_initializer();
        let session = Session::new(&g).unwrap();
        session.run_op(init).unwrap();
        let run = |outputs: &[Output<'_>], rows: Tensor, classes: Vec<i64>| -> Vec<f32> {
            let found = session.run(outputs, &[(logits, rows), (labels, Tensor::vector(classes))], &[]).unwrap();
            found.iter().map(|value| value.scalar_value::<f32>().unwrap()).collect()
        };
        assert_eq!(session.fetch(right.value).unwrap().scalar_value::<f32>().unwrap(), 0.0);
        let first = Tensor::from([[1.0f32, 2.0, 3.0], [9.0, 2.0, 3.0], [1.0, 5.0, 3.0]]);
        let all = [right.update, near.update, batch[0], batch[1]];
        assert_eq!(run(&all, first, vec![2, 1, 2]), [1.0 / 3.0, 2.0 / 3.0, 1.0 / 3.0, 2.0 / 3.0]);
        let second = Tensor::from([[1.0f32, 2.0, 3.0]]);
        assert_eq!(run(&all, second, vec![2]), [0.5, 0.75, 1.0, 1.0]);
        session.run_op(right.reset).unwrap();
        assert_eq!(session.fetch(right.value).unwrap().scalar_value::<f32>().unwrap(), 0.0);
        assert_eq!(session.fetch(near.value).unwrap().scalar_value::<f32>().unwrap(), 0.75);
    }
}
