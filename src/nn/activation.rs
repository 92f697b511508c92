//! Activations: functions of one element, under names to pass to a layer.

use std::f64::consts::FRAC_1_SQRT_2;

use kolo_graph::Output;

use crate::ops;
pub use crate::ops::{elu, gelu, relu, relu6, selu, sigmoid, softmax, softplus, softsign, tanh};

/// `x` itself.
pub fn identity(x: Output<'_>) -> Output<'_> {
    x
}

/// `x` above 0 and a fifth of it below, elementwise; [`ops::leaky_relu`] takes another slope.
#[track_caller]
pub fn leaky_relu(x: Output<'_>) -> Output<'_> {
    ops::leaky_relu(x, 0.2)
}

/// `x · sigmoid(x)`, also called swish, elementwise.
#[track_caller]
pub fn silu(x: Output<'_>) -> Output<'_> {
    x.graph().name_scope("silu", || x * ops::sigmoid(x))
}

/// `x · Φ(x)`, where Φ is the normal distribution's function, by the error function; composed of TensorFlow's ops, where
/// [`gelu`] is one of ours.
#[track_caller]
pub fn gelu_exact(x: Output<'_>) -> Output<'_> {
    x.graph().name_scope("gelu", || x * 0.5 * (ops::erf(x * FRAC_1_SQRT_2) + 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::testing::{close, run};

    #[test]
    fn values_are_tensorflows() {
        let g = kolo_ops::graph();
        let x = g.constant([-2.0f32, -0.5, 0.0, 1.0, 3.0]);
        let found = run(&g, &[gelu(x), gelu_exact(x), silu(x), leaky_relu(x), identity(x)], &[]);
        // tf.nn.gelu(x, True), tf.nn.gelu(x), tf.nn.silu, tf.nn.leaky_relu.
        close(&found[0], &[-0.04540223, -0.154286, 0.0, 0.841192, 2.9963627]);
        close(&found[1], &[-0.045500264, -0.15426877, 0.0, 0.8413447, 2.9959502]);
        close(&found[2], &[-0.23840584, -0.18877034, 0.0, 0.7310586, 2.8577223]);
        close(&found[3], &[-0.4, -0.1, 0.0, 1.0, 3.0]);
        close(&found[4], &[-2.0, -0.5, 0.0, 1.0, 3.0]);
    }
}
