//! Layer normalisation (Ba et al., 2016), composed of other ops.

use kolo_graph::Output;

/// `x` less its mean along the last dimension, over its standard deviation there, times `scale`, plus `offset`.
#[track_caller]
pub fn layer_norm<'g>(x: Output<'g>, scale: Output<'g>, offset: Output<'g>, epsilon: f64) -> Output<'g> {
    let graph = x.graph();
    graph.name_scope("layer_norm", || {
        let mean_of_rows =
            |x: Output<'g>| graph.op("Mean").input(x).input(graph.constant(vec![-1i32])).attr("keep_dims", true).out();
        let mean = mean_of_rows(x);
        let variance = mean_of_rows(graph.op("SquaredDifference").input(x).input(mean).out());
        let inverse = graph.op("Rsqrt").input(variance + epsilon).out();
        (x - mean) * inverse * scale + offset
    })
}

#[cfg(test)]
mod tests {
    use crate::testing::{assert_close, evaluate, tensor};

    #[test]
    fn rows_have_mean_zero_and_variance_one() {
        let g = crate::graph();
        let x = g.constant([[1.0f32, 3.0], [10.0, 20.0]]);
        let (scale, offset) = (g.constant([1.0f32, 2.0]), g.constant([0.0f32, 0.5]));
        let y = super::layer_norm(x, scale, offset, 0.0);
        let found = evaluate(&g, &[y], &[]).unwrap();
        assert_close(&found[0], &tensor([2, 2], [-1.0f32, 2.5, -1.0, 2.5]), 1e-5, "layer_norm");
    }
}
