//! Networks that read handwritten digits.

use kolo_core::{DType, Result};
use kolo_graph::Output;

use super::Parts;
use crate::nn::{self, LstmCell, Padding, Reduction, RnnOptions, dynamic_rnn};
use crate::ops::{self, At};

/// A network from images `float[n,784]` to ten logits.
pub type Network = for<'g> fn(Output<'g>) -> Result<Output<'g>>;

/// One hidden layer of 256 rectified units.
pub fn mlp(images: Output<'_>) -> Result<Output<'_>> {
    let hidden =
        nn::Dense::new(256).activation(nn::relu).kernel(nn::Initializer::HeUniform).name("hidden").apply(images);
    Ok(nn::dense(hidden, 10, "logits"))
}

/// Two convolutions with pooling, one hidden layer: LeNet, a little wider.
pub fn lenet(images: Output<'_>) -> Result<Output<'_>> {
    let x = ops::reshape(images, &[-1, 28, 28, 1]);
    let x = nn::Conv2d::new(32, [5, 5]).activation(nn::relu).name("conv1").apply(x);
    let x = nn::max_pool(x, [2, 2], [2, 2], Padding::Same);
    let x = nn::Conv2d::new(64, [5, 5]).activation(nn::relu).name("conv2").apply(x);
    let x = nn::max_pool(x, [2, 2], [2, 2], Padding::Same);
    let x = nn::Dense::new(512).activation(nn::relu).name("hidden").apply(nn::flatten(x));
    Ok(nn::dense(x, 10, "logits"))
}

/// An LSTM that reads an image row by row.
pub fn lstm(images: Output<'_>) -> Result<Output<'_>> {
    let rows = ops::reshape(images, &[-1, 28, 28]);
    let cell = LstmCell::new(128).build(images.graph(), 28, DType::F32);
    let read = dynamic_rnn(&cell, rows, RnnOptions::default())?;
    let last = ops::slice_at(read.outputs, &[At::All, At::Index(-1)]);
    Ok(nn::dense(last, 10, "logits"))
}

/// The loss of `logits`, and the share of images that are read right.
pub fn parts<'g>(logits: Output<'g>, labels: Output<'g>) -> Parts<'g> {
    Parts {
        loss: nn::sparse_softmax_cross_entropy(logits, labels, Reduction::Mean),
        metrics: vec![("accuracy", nn::accuracy(logits, labels))],
    }
}
