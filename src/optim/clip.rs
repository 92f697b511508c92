//! Clipping: gradients that are too large are shortened before they are applied.

use kolo_core::Result;
use kolo_graph::{Grad, IndexedSlices, IntoOutput, Output};

use super::GradAndVar;
use crate::ops;

/// A limit on gradients, for [`super::MinimizeOptions`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Clip {
    /// All gradients by one factor, so that together they are no longer than this.
    GlobalNorm(f64),
    /// Each gradient, so that it is no longer than this.
    Norm(f64),
    /// Each element, to within these.
    Value(f64, f64),
}

impl Clip {
    /// Limits the gradients of these variables.
    pub fn apply<'g>(self, pairs: &[GradAndVar<'g>]) -> Result<Vec<GradAndVar<'g>>> {
        let grads: Vec<Option<Grad<'g>>> = pairs.iter().map(|pair| pair.grad).collect();
        let clipped = match self {
            Clip::GlobalNorm(norm) => match clip_by_global_norm(&grads, norm)? {
                Some((clipped, _)) => clipped,
                None => grads,
            },
            Clip::Norm(norm) => grads.iter().map(|grad| grad.map(|grad| clip_by_norm(grad, norm))).collect(),
            Clip::Value(min, max) => grads.iter().map(|grad| grad.map(|grad| clip_by_value(grad, min, max))).collect(),
        };
        Ok(pairs.iter().zip(clipped).map(|(pair, grad)| GradAndVar { grad, ..*pair }).collect())
    }
}

/// The length of all gradients together, `None` if there are none. As in TensorFlow, rows that occur twice count as two.
#[track_caller]
pub fn global_norm<'g>(grads: &[Option<Grad<'g>>]) -> Result<Option<Output<'g>>> {
    let mut squares = Vec::new();
    for grad in grads.iter().flatten() {
        let values = values(*grad);
        // The sum of squares is made where the gradient is; only one number travels.
        squares.push(values.graph().colocate_with(values.operation(), || ops::l2_loss(values)));
    }
    let Some(first) = squares.first() else { return Ok(None) };
    Ok(Some(first.graph().name_scope("global_norm", || -> Result<Output<'g>> {
        let half = if squares.len() == 1 { *first } else { ops::sum_all(ops::stack(&squares, 0)) };
        Ok(ops::sqrt(half * 2.0))
    })?))
}

/// The gradients times one factor, at most 1, so that [`global_norm`] of them is at most `norm`; and what it was before.
/// Where it was not finite, the gradients become NaN rather than something that looks like a gradient. `None` if there are no
/// gradients.
#[allow(clippy::type_complexity)]
#[track_caller]
pub fn clip_by_global_norm<'g>(
    grads: &[Option<Grad<'g>>],
    norm: impl IntoOutput<'g>,
) -> Result<Option<(Vec<Option<Grad<'g>>>, Output<'g>)>> {
    let Some(found) = global_norm(grads)? else { return Ok(None) };
    let graph = found.graph();
    let clipped = graph.name_scope("clip_by_global_norm", || {
        let norm = norm.into_output(graph, found.dtype());
        let scale = norm * ops::minimum(1.0 / found, 1.0 / norm);
        let nan = f64::NAN.into_output(graph, found.dtype());
        let scale = ops::select(ops::is_finite(found), scale, nan);
        let clip =
            |grad: &Option<Grad<'g>>| grad.map(|grad| map(grad, |values| values * ops::cast(scale, values.dtype())));
        grads.iter().map(clip).collect()
    });
    Ok(Some((clipped, found)))
}

/// One gradient, shortened to `norm` if it is longer.
#[track_caller]
pub fn clip_by_norm<'g>(grad: Grad<'g>, norm: impl IntoOutput<'g>) -> Grad<'g> {
    map(grad, |values| {
        let graph = values.graph();
        graph.name_scope("clip_by_norm", || {
            let norm = norm.into_output(graph, values.dtype());
            let found = ops::sqrt(ops::sum_all(ops::square(values)));
            values * norm / ops::maximum(found, norm)
        })
    })
}

/// One gradient, each element raised to `min` and lowered to `max`.
#[track_caller]
pub fn clip_by_value<'g>(grad: Grad<'g>, min: impl IntoOutput<'g>, max: impl IntoOutput<'g>) -> Grad<'g> {
    map(grad, |values| ops::clip_by_value(values, min, max))
}

fn values(grad: Grad<'_>) -> Output<'_> {
    match grad {
        Grad::Dense(output) => output,
        Grad::Slices(slices) => slices.values,
    }
}

/// The gradient with other values, added where the values are.
fn map<'g>(grad: Grad<'g>, change: impl FnOnce(Output<'g>) -> Output<'g>) -> Grad<'g> {
    let values = values(grad);
    let changed = values.graph().colocate_with(values.operation(), || change(values));
    match grad {
        Grad::Dense(_) => Grad::Dense(changed),
        Grad::Slices(slices) => Grad::Slices(IndexedSlices { values: changed, ..slices }),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use kolo_graph::Graph;
    use kolo_runtime::Session;

    use super::*;
    use crate::optim::testing::close;

    fn grads(g: &Graph) -> [Option<Grad<'_>>; 3] {
        let slices = IndexedSlices {
            values: g.constant([[12.0f32, 0.0], [0.0, 84.0]]),
            indices: g.constant([1i32, 1]),
            dense_shape: g.constant([3i32, 2]),
        };
        [Some(g.constant([3.0f32, -4.0]).into()), None, Some(Grad::Slices(slices))]
    }

    #[test]
    fn together_no_longer_than_the_norm() {
        let g = kolo_ops::graph();
        let (clipped, norm) = clip_by_global_norm(&grads(&g), 5.0).unwrap().unwrap();
        assert!(clipped[1].is_none());
        let (short, _) = clip_by_global_norm(&grads(&g), 100.0).unwrap().unwrap();
        let nan = g.constant([f32::INFINITY, 1.0]);
        let (not_finite, _) = clip_by_global_norm(&[Some(nan.into())], 5.0).unwrap().unwrap();
        let outputs = [norm, values(clipped[0].unwrap()), values(clipped[2].unwrap()), values(short[0].unwrap())];
        let session = Session::new(&g).unwrap();
        let found = session.run(&outputs, &[], &[]).unwrap();
        // tf.clip_by_global_norm of the same, TensorFlow 2.21: 85 = √(3² + 4² + 12² + 84²).
        close(&found[0], &[85.0], "norm");
        close(&found[1], &[0.1764706, -0.23529412], "dense");
        close(&found[2], &[0.7058824, 0.0, 0.0, 4.9411764], "rows");
        close(&found[3], &[3.0, -4.0], "short enough");
        let nan = session.fetch(values(not_finite[0].unwrap())).unwrap();
        assert!(nan.data::<f32>().unwrap().iter().all(|x| x.is_nan()));
        assert!(clip_by_global_norm(&[None, None], 5.0).unwrap().is_none());
    }

    #[test]
    fn each_no_longer_than_the_norm_or_the_bounds() {
        let g = kolo_ops::graph();
        let x = g.constant([3.0f32, -4.0]);
        let outputs = [
            clip_by_norm(x.into(), 2.0),
            clip_by_norm(x.into(), 50.0),
            clip_by_norm(g.constant([0.0f32, 0.0]).into(), 2.0),
            clip_by_value(x.into(), -1.0, 5.0),
        ]
        .map(values);
        let session = Session::new(&g).unwrap();
        let found = session.run(&outputs, &[], &[]).unwrap();
        for (found, expected) in found.iter().zip([[1.2, -1.6], [3.0, -4.0], [0.0, 0.0], [3.0, -1.0]]) {
            close(found, &expected, "clipped");
        }
    }
}
