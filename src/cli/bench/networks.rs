//! `mlp` and `lenet`: training steps, fed from memory.

use std::sync::Arc;

use crate::data::mnist;
use crate::{Error, Graph, Initializer, Output, Result, Session, Tensor, gradients, ops};

use super::measure::{Better, Report};

/// Batches that are fed in turn.
pub const N_BATCHES: usize = 40;

pub fn mlp(report: &Report) -> Result<()> {
    train(report, "mlp", "small", batches(100)?, small_logits)?;
    train(report, "mlp", "mnist", mnist_batches(100, 0)?, small_logits)?;
    train(report, "mlp", "large", batches(1024)?, large_logits)?;
    train(report, "mlp", "mnist-large", mnist_batches(1024, 0)?, large_logits)
}

pub fn small_logits<'g>(g: &'g Graph, x: Output<'g>) -> Output<'g> {
    let hidden = ops::sigmoid(dense(g, x, "hidden", 784, 100));
    dense(g, hidden, "out", 100, 10)
}

fn large_logits<'g>(g: &'g Graph, x: Output<'g>) -> Output<'g> {
    let first = ops::relu(dense(g, x, "first", 784, 1024));
    let second = ops::relu(dense(g, first, "second", 1024, 1024));
    dense(g, second, "out", 1024, 10)
}

pub fn lenet(report: &Report) -> Result<()> {
    train(report, "lenet", "train", batches(64)?, lenet_logits)
}

/// Two convolutions with pooling, one hidden layer.
pub fn lenet_logits<'g>(g: &'g Graph, x: Output<'g>) -> Output<'g> {
    let images = ops::reshape(x, &[-1, 28, 28, 1]);
    let first = conv_pool(g, images, "conv1", 1, 32);
    let second = conv_pool(g, first, "conv2", 32, 64);
    let flat = ops::reshape(second, &[-1, 7 * 7 * 64]);
    let hidden = ops::relu(dense(g, flat, "fc1", 7 * 7 * 64, 512));
    dense(g, hidden, "fc2", 512, 10)
}

/// A layer with a bias.
pub fn dense<'g>(g: &'g Graph, x: Output<'g>, name: &str, n_in: usize, n_out: usize) -> Output<'g> {
    g.name_scope(name, || {
        let w = g.new_variable("w", Initializer::GlorotUniform).shape([n_in, n_out]).build();
        let b = g.new_variable("b", Initializer::Zeros).shape([n_out]).build();
        ops::bias_add(ops::matmul(x, w.read()), b.read())
    })
}

fn conv_pool<'g>(g: &'g Graph, x: Output<'g>, name: &str, n_in: usize, n_out: usize) -> Output<'g> {
    g.name_scope(name, || {
        let w = g.new_variable("w", Initializer::GlorotUniform).shape([5, 5, n_in, n_out]).build();
        let b = g.new_variable("b", Initializer::Zeros).shape([n_out]).build();
        let conv = ops::bias_add(ops::conv2d(x, w.read(), [1, 1], "SAME"), b.read());
        ops::max_pool(ops::relu(conv), [2, 2], [2, 2], "SAME")
    })
}

fn train(
    report: &Report,
    bench: &str,
    case: &str,
    batches: Vec<(Tensor, Tensor)>,
    model: impl for<'g> Fn(&'g Graph, Output<'g>) -> Output<'g>,
) -> Result<()> {
    let g = crate::graph();
    g.set_seed(1);
    let x = g.placeholder::<f32>("x", [None, Some(784)]);
    let labels = g.placeholder::<f32>("labels", [None, Some(10)]);
    let logits = model(&g, x);
    let loss = ops::mean_all(ops::softmax_cross_entropy(logits, labels));
    let variables = g.trainable_variables();
    let handles: Vec<Output<'_>> = variables.iter().map(|variable| variable.handle()).collect();
    let rate = g.constant(0.01f32);
    let mut updates = Vec::new();
    for (&handle, grad) in handles.iter().zip(gradients(&[loss], &handles)?) {
        if let Some(grad) = grad {
            updates.push(ops::apply_gradient_descent(handle, rate, grad.dense()?));
        }
    }
    let step = g.group("train", &updates);
    let init = g.global_variables_initializer();
    let session = Arc::new(Session::new(&g)?);
    session.run_op(init)?;
    let call = session.make_callable(&[x, labels], &[], &[step])?;
    let mut next = 0;
    let samples = report.sample(|| {
        let (images, labels) = &batches[next % batches.len()];
        next += 1;
        call.call(&[images, labels]).map(drop)
    })?;
    let rates: Vec<f64> = samples.iter().map(|seconds| 1.0 / seconds).collect();
    report.print(bench, case, "steps/s", Better::Higher, &rates)
}

/// Random pixels and one-hot labels, the same in every run.
pub fn batches(batch: usize) -> Result<Vec<(Tensor, Tensor)>> {
    let mut state = 1u32;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state
    };
    (0..N_BATCHES)
        .map(|_| {
            let pixels: Vec<f32> = (0..batch * 784).map(|_| (random() % 256) as f32 / 255.0).collect();
            let mut labels = vec![0.0f32; batch * 10];
            (0..batch).for_each(|row| labels[row * 10 + random() as usize % 10] = 1.0);
            Ok((Tensor::from_vec([batch, 784], pixels)?, Tensor::from_vec([batch, 10], labels)?))
        })
        .collect()
}

/// Images of MNIST in the order of the file, with one-hot labels, from batch `first` on. Four fifths of their pixels
/// are zeros.
pub fn mnist_batches(batch: usize, first: usize) -> Result<Vec<(Tensor, Tensor)>> {
    let all = mnist::embedded()?.one_hot().train.dataset().batch(batch, true).batches()?;
    let pair = |batch: Result<crate::data::Batch>| match <[Tensor; 2]>::try_from(batch?.tensors) {
        Ok([images, labels]) => Ok((images, labels)),
        Err(_) => Err(Error::internal("MNIST has images and labels")),
    };
    all.skip(first).take(N_BATCHES).map(pair).collect()
}
