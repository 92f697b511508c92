//! The smallest recipe: a line through noisy points.

use kolo_core::{Result, Tensor};
use kolo_graph::Output;

use super::Parts;
use crate::data::Random;
use crate::{nn, ops};

/// Points near y = 3x + 2, the noise following from `seed`.
pub fn points(n: usize, seed: u64) -> Result<[Tensor; 2]> {
    let mut random = Random::new(seed, 0);
    let x: Vec<f32> = (0..n).map(|_| random.unit() * 2.0 - 1.0).collect();
    let y: Vec<f32> = x.iter().map(|x| 3.0 * x + 2.0 + 0.1 * (random.unit() - 0.5)).collect();
    Ok([Tensor::from_vec([n, 1], x)?, Tensor::from_vec([n, 1], y)?])
}

/// A line, `line/kernel` × x + `line/bias`, and how far it is from the points.
pub fn model<'g>(x: Output<'g>, y: Output<'g>) -> Parts<'g> {
    let error = nn::dense(x, 1, "line") - y;
    Parts { loss: ops::mean_all(ops::square(error)), metrics: vec![] }
}
