//! Recipes of models for a GPU: GPT-2 and ResNet-50, in mixed precision. Small ones run anywhere.

use std::path::Path;

use crate::data::{Dataset, text};
use crate::recipes::{gpt2 as language, resnet, train_model};
use crate::{Error, Result};

use super::job::{self, Job};
use super::options::{Common, Kind};
use super::{Lm, Resnet50, sizes};

/// Trains GPT-2 on a text by bytes, or on tokens that are made up.
pub fn gpt2(args: &Lm) -> Result<()> {
    let full = language::Size::gpt2_124m();
    let size = language::Size {
        vocabulary: args.vocabulary,
        context: args.context.unwrap_or(full.context),
        width: args.width.unwrap_or(full.width),
        layers: args.layers.unwrap_or(full.layers),
        heads: args.heads.unwrap_or(full.heads),
        compute: args.precision.dtype(),
    };
    size.check()?;
    let common = &args.common;
    let (batch, epochs, placement) = sizes(common, 16, 1)?;
    let n_steps = common.max_steps.map_or(200, |steps| steps.unsigned_abs());
    let (train, test) = windows(args.data.as_deref(), &size, batch, common.seed)?;
    let graph = crate::graph();
    graph.set_seed(common.seed as i64);
    let tokens = graph.placeholder::<i32>("tokens", [None, Some(size.context)]);
    let next = graph.placeholder::<i32>("next", [None, Some(size.context)]);
    let optimizer = common.make_optimizer(Kind::Adamw, 6e-4, n_steps, n_steps / 10)?;
    let model = train_model(&graph, &placement, &*optimizer, &[tokens, next], |inputs| {
        Ok(language::parts(language::logits(inputs[0], &size), inputs[1]))
    })?;
    let job = Job {
        model,
        train: train.shuffle(common.seed).batch(batch, true).repeat(epochs).prefetch(2),
        test: test.map(|test| test.batch(batch, false)),
        epochs,
        unit: ("tokens", size.context),
    };
    let limited = Common { max_steps: Some(n_steps as i64), ..common.clone() };
    job::run(&graph, &limited, job).map(|_| ())
}

/// What to train on, and what to test with.
fn windows(data: Option<&Path>, size: &language::Size, batch: usize, seed: u64) -> Result<(Dataset, Option<Dataset>)> {
    if data == Some(Path::new("synthetic")) {
        let tokens = batch.checked_mul(64).and_then(|n| n.checked_mul(size.context)).filter(|&n| n < 1 << 30);
        let tokens = tokens.ok_or_else(|| Error::invalid_argument("--batch-size and --context are too large"))?;
        return Ok((language::synthetic(tokens + 1, size, seed)?, None));
    }
    let corpus = match data {
        Some(path) => text::Corpus::from_file(path)?,
        None => text::shakespeare()?,
    };
    let corpus = text::Corpus::bytes(&corpus.text())?;
    if size.vocabulary < corpus.vocabulary().len() {
        return Err(Error::invalid_argument(format!(
            "--vocabulary {} is too small: a text by bytes has {} tokens",
            size.vocabulary,
            corpus.vocabulary().len()
        )));
    }
    let (train, test) = corpus.split(0.98)?;
    Ok((train.windows_every(size.context, (size.context / 4).max(1)), Some(test.windows(size.context))))
}

/// Trains ResNet-50.
pub fn resnet50(args: &Resnet50) -> Result<()> {
    let full = resnet::Size::resnet50();
    let (side, classes, width) = (args.side, args.classes, args.width);
    let size = resnet::Size { side, classes, width, compute: args.precision.dtype(), ..full };
    size.check()?;
    let common = &args.common;
    let (batch, epochs, placement) = sizes(common, 128, 25)?;
    let n_steps = common.max_steps.map_or(100, |steps| steps.unsigned_abs());
    let n_images = batch.checked_mul(4).filter(|n| n.saturating_mul(side * side) < 1 << 28);
    let n_images = n_images.ok_or_else(|| Error::invalid_argument("--batch-size and --side are too large"))?;
    let graph = crate::graph();
    graph.set_seed(common.seed as i64);
    let images = graph.placeholder::<f32>("images", [None, Some(side), Some(side), Some(3)]);
    let labels = graph.placeholder::<i32>("labels", [None]);
    let optimizer = common.make_optimizer(Kind::Momentum, 0.05, n_steps, n_steps / 10)?;
    let model = train_model(&graph, &placement, &*optimizer, &[images, labels], |inputs| {
        Ok(resnet::parts(resnet::logits(inputs[0], &size), inputs[1]))
    })?;
    let train = resnet::synthetic(n_images, &size, common.seed)?;
    let job = Job {
        model,
        train: train.shuffle(common.seed).batch(batch, true).repeat(epochs).prefetch(2),
        test: None,
        epochs,
        unit: ("images", 1),
    };
    let limited = Common { max_steps: Some(n_steps as i64), ..common.clone() };
    job::run(&graph, &limited, job).map(|_| ())
}
