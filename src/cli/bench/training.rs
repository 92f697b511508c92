//! `train-mnist`, `train-lenet`, `train-lm`: steps of the recipes with their input pipelines; `startup`: from a shell's
//! command to the first step.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

use crate::data::{self, Dataset};
use crate::optim::{AdamW, Optimizer, Sgd};
use crate::recipes::{lm, mnist};
use crate::{Error, Graph, Output, Result, Session, Tensor, nn, ops};

use super::measure::{Better, Report};

/// The classic network: 784-100-10, sigmoid, plain gradient descent, batches of 100.
pub fn train_mnist(report: &Report) -> Result<()> {
    let g = crate::graph();
    let images = g.placeholder::<f32>("images", [None, Some(784)]);
    let labels = g.placeholder::<i32>("labels", [None]);
    let hidden = nn::Dense::new(100).activation(ops::sigmoid).name("hidden").apply(images);
    let loss = mnist::parts(nn::dense(hidden, 10, "logits"), labels).loss;
    let data = data::mnist::embedded()?.train.dataset().batch(100, true);
    steps(report, "train-mnist", &g, &[images, labels], loss, &Sgd::new(0.01), data)
}

pub fn train_lenet(report: &Report) -> Result<()> {
    let g = crate::graph();
    let images = g.placeholder::<f32>("images", [None, Some(784)]);
    let labels = g.placeholder::<i32>("labels", [None]);
    let loss = mnist::parts(mnist::lenet(images)?, labels).loss;
    let data = data::mnist::embedded()?.train.dataset().batch(64, true);
    steps(report, "train-lenet", &g, &[images, labels], loss, &Sgd::new(0.01), data)
}

/// Four layers, 128 wide, four heads, 32 windows of 64 characters.
pub fn train_lm(report: &Report) -> Result<()> {
    let corpus = data::text::shakespeare()?;
    let size = lm::Size { vocabulary: corpus.vocabulary().len(), context: 64, width: 128, layers: 4, heads: 4 };
    let g = crate::graph();
    let tokens = g.placeholder::<i32>("tokens", [None, Some(size.context)]);
    let next = g.placeholder::<i32>("next", [None, Some(size.context)]);
    let loss = lm::parts(lm::transformer(tokens, &size), next).loss;
    let data = corpus.windows(size.context).batch(32, true);
    steps(report, "train-lm", &g, &[tokens, next], loss, &AdamW::new(1e-3, 0.01), data)
}

fn steps<'g>(
    report: &Report,
    bench: &str,
    g: &'g Graph,
    inputs: &[Output<'g>],
    loss: Output<'g>,
    optimizer: &dyn Optimizer,
    data: Dataset,
) -> Result<()> {
    let train = optimizer.minimize(loss, None)?;
    let init = g.global_variables_initializer();
    let session = Arc::new(Session::new(g)?);
    session.run_op(init)?;
    let call = session.make_callable(inputs, &[loss], &[train])?;
    let mut batches = data.shuffle(1).repeat_forever().prefetch(6).batches()?;
    let samples = report.sample(|| {
        let batch = batches.next().unwrap_or_else(|| Err(Error::internal("endless data ended")))?;
        let feeds: Vec<&Tensor> = batch.tensors.iter().collect();
        call.call(&feeds).map(|_| ())
    })?;
    let rates: Vec<f64> = samples.iter().map(|seconds| 1.0 / seconds).collect();
    report.print(bench, "train", "steps/s", Better::Higher, &rates)
}

/// Starts `kolo train mnist` and waits for the line of its first step.
pub fn startup(report: &Report) -> Result<()> {
    let program = std::env::current_exe().map_err(|e| Error::unavailable(format!("where is this program? {e}")))?;
    let mut samples = Vec::new();
    for _ in 0..5 {
        let began = Instant::now();
        let mut child = Command::new(&program)
            .args(["train", "mnist", "--max-steps", "1", "--log-every", "1", "--json"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|e| Error::unavailable(format!("cannot start {}: {e}", program.display())))?;
        let out = child.stdout.take().ok_or_else(|| Error::internal("a pipe that was asked for is not there"))?;
        let first = BufReader::new(out).lines().map_while(|line| line.ok()).find(|line| line.contains("\"step\""));
        samples.push(began.elapsed().as_secs_f64() * 1e3);
        child.wait().map_err(|e| Error::unavailable(format!("cannot wait for the trainer: {e}")))?;
        if first.is_none() {
            return Err(Error::internal("the trainer made no step"));
        }
    }
    report.print("startup", "first-step", "ms", Better::Lower, &samples)
}
