//! `kolo train`: recipes that train a model, from one command.

mod cluster;
mod curve;
mod gpu;
mod job;
mod large;
mod options;
mod progress;

use std::path::PathBuf;

use crate::data::{self, Dataset, mnist::Split};
use crate::optim::Optimizer;
use crate::recipes::{self, Placement, train_model};
use crate::{DType, Error, PartialShape, Result};
use clap::{Subcommand, ValueEnum};

use self::job::Job;
use self::options::{Common, Kind};
use super::print;

/// Flags of `kolo train`.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    recipe: Recipe,
}

#[derive(Subcommand)]
enum Recipe {
    /// Classify handwritten digits: MNIST, which is built into this program
    #[command(after_help = "Examples:
  kolo train mnist                                  an MLP, seconds
  kolo train mnist --model lenet --epochs 5         a convolutional network
  kolo train mnist --devices cpu=2                  two towers that share every batch
  kolo train mnist --ps 1 --workers 2               a cluster of three processes on this machine
  kolo train mnist --checkpoint-dir ckpt --resume   saves; goes on where it was
  kolo train mnist --logdir log                     summaries for TensorBoard, loss.svg")]
    Mnist(Mnist),
    /// Classify small colour images: CIFAR-10, from a folder of yours
    #[command(after_help = "Example:
  kolo train cifar --data cifar-10-batches-bin      the binary version of CIFAR-10, unpacked")]
    Cifar(Cifar),
    /// Train a language model: a small transformer on the characters of Shakespeare, or GPT-2
    #[command(after_help = "Examples:
  kolo train lm                                     a minute or so, then a sample
  kolo train lm --max-steps 5000 --prompt 'ROMEO:'  longer, and asked for Romeo
  kolo train lm --model gpt2-124m --device gpu:0    GPT-2 in mixed precision, on bytes; or --data synthetic
  kolo train lm --model gpt2-124m --layers 2 --width 64 --heads 2 --context 64 --vocabulary 256   a small one, for a CPU")]
    Lm(Lm),
    /// Train ResNet-50 on synthetic images, to measure its speed
    #[command(after_help = "Examples:
  kolo train resnet50 --data synthetic --device gpu:0
  kolo train resnet50 --data synthetic --side 32 --width 8 --classes 10 --batch-size 8   a small one, for a CPU")]
    Resnet50(Resnet50),
    /// Fit a line to points: the smallest recipe, to read first
    Linear(Linear),
}

#[derive(clap::Args)]
struct Mnist {
    /// Train this network
    #[arg(long, value_enum, default_value_t = Network::Mlp)]
    model: Network,
    /// Read the four MNIST (or Fashion-MNIST) files, gzipped or not, from this folder [default: the built-in ones]
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    #[command(flatten)]
    common: Common,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Network {
    /// One hidden layer
    Mlp,
    /// Convolutions and pooling
    Lenet,
    /// A recurrent network that reads row by row
    Lstm,
}

#[derive(clap::Args)]
struct Cifar {
    /// Read data_batch_1.bin and the others from this folder
    #[arg(long, value_name = "DIR")]
    data: PathBuf,
    #[command(flatten)]
    common: Common,
}

#[derive(clap::Args)]
struct Lm {
    /// Train this model
    #[arg(long, value_enum, default_value_t = Language::Small)]
    model: Language,
    /// Train on this text, or for GPT-2 on `synthetic` tokens [default: Shakespeare]
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// Set the length of a sequence [default: 64; GPT-2: 1024]
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    /// Set the width of the model [default: 128; GPT-2: 768]
    #[arg(long, value_name = "N")]
    width: Option<usize>,
    /// Set the number of layers [default: 4; GPT-2: 12]
    #[arg(long, value_name = "N")]
    layers: Option<usize>,
    /// Set the number of attention heads per layer [default: 4; GPT-2: 12]
    #[arg(long, value_name = "N")]
    heads: Option<usize>,
    /// Set the size of GPT-2's vocabulary
    #[arg(long, default_value_t = 50304, value_name = "N")]
    vocabulary: usize,
    /// Compute GPT-2 in this type; weights are float
    #[arg(long, value_enum, default_value_t = Precision::Bf16)]
    precision: Precision,
    /// Start the sample at the end with this text
    #[arg(long, default_value = "ROMEO:\n", value_name = "TEXT")]
    prompt: String,
    /// Write this many characters at the end
    #[arg(long, default_value_t = 300, value_name = "N")]
    sample: usize,
    /// Sample at this temperature: lower is more conservative, higher more diverse
    #[arg(long, default_value_t = 0.8, value_name = "T")]
    temperature: f32,
    #[command(flatten)]
    common: Common,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Language {
    /// A transformer that learns characters in a minute
    Small,
    /// GPT-2 with 124 million weights, in mixed precision
    #[value(name = "gpt2-124m")]
    Gpt2,
}

/// What is computed in.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Precision {
    Bf16,
    F32,
}

impl Precision {
    fn dtype(self) -> DType {
        match self {
            Precision::Bf16 => DType::BF16,
            Precision::F32 => DType::F32,
        }
    }
}

#[derive(clap::Args)]
struct Resnet50 {
    /// Train on this data; only `synthetic` is supported
    #[arg(long, default_value = "synthetic", value_parser = ["synthetic"])]
    data: String,
    /// Set the height and width of the images
    #[arg(long, default_value_t = 224, value_name = "N")]
    side: usize,
    /// Set the number of classes
    #[arg(long, default_value_t = 1000, value_name = "N")]
    classes: usize,
    /// Set the number of channels of the first stage
    #[arg(long, default_value_t = 64, value_name = "N")]
    width: usize,
    /// Compute in this type; weights are float
    #[arg(long, value_enum, default_value_t = Precision::Bf16)]
    precision: Precision,
    #[command(flatten)]
    common: Common,
}

#[derive(clap::Args)]
struct Linear {
    #[command(flatten)]
    common: Common,
}

/// Trains.
pub fn run(args: &Args) -> Result<()> {
    let common = match &args.recipe {
        Recipe::Mnist(args) => &args.common,
        Recipe::Cifar(args) => &args.common,
        Recipe::Lm(args) => &args.common,
        Recipe::Resnet50(args) => &args.common,
        Recipe::Linear(args) => &args.common,
    };
    if common.cluster.is_launcher() {
        return cluster::launch(&common.cluster, common.json);
    }
    match &args.recipe {
        Recipe::Mnist(args) => mnist(args),
        Recipe::Cifar(args) => cifar(args),
        Recipe::Lm(args) if args.model == Language::Gpt2 => large::gpt2(args),
        Recipe::Lm(args) => lm(args),
        Recipe::Resnet50(args) => large::resnet50(args),
        Recipe::Linear(args) => linear(args),
    }
}

/// What differs between recipes that sort pictures.
struct Pictures<'a> {
    train: Dataset,
    test: Dataset,
    /// How many there are to train on.
    n_train: usize,
    shape: &'a [usize],
    network: recipes::mnist::Network,
    optimizer: (Kind, f64),
    batch: usize,
    epochs: u64,
}

fn mnist(args: &Mnist) -> Result<()> {
    let mnist = match &args.data {
        Some(dir) => data::mnist::from_dir(dir)?,
        None => data::mnist::embedded()?,
    };
    let side = |split: &Split| split.images.shape()[1..].to_vec();
    if side(&mnist.train) != [28, 28] || side(&mnist.test) != [28, 28] {
        return Err(Error::invalid_argument("--data: these networks take images of 28 by 28 pixels"));
    }
    let (network, optimizer, epochs): (recipes::mnist::Network, _, _) = match args.model {
        Network::Mlp => (recipes::mnist::mlp, (Kind::Adam, 2e-3), 10),
        Network::Lenet => (recipes::mnist::lenet, (Kind::Adam, 1e-3), 3),
        Network::Lstm => (recipes::mnist::lstm, (Kind::Adam, 4e-3), 3),
    };
    let pictures = Pictures {
        train: mnist.train.dataset(),
        test: mnist.test.dataset(),
        n_train: mnist.train.len(),
        shape: &[784],
        network,
        optimizer,
        batch: 100,
        epochs,
    };
    sort_pictures(&args.common, pictures)
}

fn cifar(args: &Cifar) -> Result<()> {
    let cifar = data::cifar::from_dir(&args.data)?;
    let pictures = Pictures {
        n_train: cifar.train.len(),
        train: cifar.train.dataset(),
        test: cifar.test.dataset(),
        shape: &[32, 32, 3],
        network: recipes::cifar::cnn,
        optimizer: (Kind::Adam, 1e-3),
        batch: 128,
        epochs: 10,
    };
    sort_pictures(&args.common, pictures)
}

fn sort_pictures(common: &Common, pictures: Pictures<'_>) -> Result<()> {
    let (batch, epochs, placement) = sizes(common, pictures.batch, pictures.epochs)?;
    let graph = crate::graph();
    graph.set_seed(common.seed as i64);
    let dims: Vec<Option<usize>> = std::iter::once(None).chain(pictures.shape.iter().map(|n| Some(*n))).collect();
    let images = graph.placeholder::<f32>("images", PartialShape::new(&dims));
    let labels = graph.placeholder::<i32>("labels", [None]);
    let n_steps = (pictures.n_train / batch.max(1)) as u64 * epochs;
    let role = common.cluster.role()?;
    let n_steps = role.as_ref().map_or(n_steps, |role| role.global_steps(n_steps));
    let optimizer = common.make_optimizer(pictures.optimizer.0, pictures.optimizer.1, n_steps, 0)?;
    let build = |optimizer: &dyn Optimizer| {
        train_model(&graph, &placement, optimizer, &[images, labels], |inputs| {
            Ok(recipes::mnist::parts((pictures.network)(inputs[0])?, inputs[1]))
        })
    };
    let train = pictures.train.shuffle(common.seed).batch(batch, true);
    let test = Some(pictures.test.batch(1000, false));
    if let Some(role) = role {
        let updates = role.optimizer(optimizer);
        let model = role.setter().apply(&graph, || build(&updates))??;
        let train = train.shard(role.task as usize, role.n_workers).repeat_forever().prefetch(6);
        let job = Job { model, train, test, epochs, unit: ("samples", 1) };
        return cluster::run(&graph, common, job, &role, &updates, n_steps);
    }
    let model = build(&*optimizer)?;
    let job = Job { model, train: train.repeat(epochs).prefetch(2), test, epochs, unit: ("samples", 1) };
    job::run(&graph, common, job).map(|_| ())
}

fn lm(args: &Lm) -> Result<()> {
    let corpus = match &args.data {
        Some(path) => data::text::Corpus::from_file(path)?,
        None => data::text::shakespeare()?,
    };
    let size = recipes::lm::Size {
        vocabulary: corpus.vocabulary().len(),
        context: args.context.unwrap_or(64),
        width: args.width.unwrap_or(128),
        layers: args.layers.unwrap_or(4),
        heads: args.heads.unwrap_or(4),
    };
    if size.heads == 0 || !size.width.is_multiple_of(size.heads.max(1)) || size.context == 0 {
        return Err(Error::invalid_argument(format!(
            "--width {} must be a multiple of --heads {}, and --context at least 1",
            size.width, size.heads
        )));
    }
    let common = &args.common;
    let (batch, epochs, placement) = sizes(common, 32, 1)?;
    let n_steps = common.max_steps.map_or(800, |steps| steps.unsigned_abs());
    let (train, test) = corpus.split(0.95)?;
    let graph = crate::graph();
    graph.set_seed(common.seed as i64);
    let tokens = graph.placeholder::<i32>("tokens", [None, Some(size.context)]);
    let next = graph.placeholder::<i32>("next", [None, Some(size.context)]);
    let optimizer = common.make_optimizer(Kind::Adamw, 4e-3, n_steps, n_steps / 10)?;
    let model = train_model(&graph, &placement, &*optimizer, &[tokens, next], |inputs| {
        Ok(recipes::lm::parts(recipes::lm::transformer(inputs[0], &size), inputs[1]))
    })?;
    let logits = graph.share_variables("sampling", || recipes::lm::transformer(tokens, &size));
    let windows = train.windows_every(size.context, (size.context / 4).max(1));
    let job = Job {
        model,
        train: windows.shuffle(common.seed).batch(batch, true).repeat(epochs).prefetch(6),
        test: Some(test.windows(size.context).batch(64, false)),
        epochs,
        unit: ("characters", size.context),
    };
    let limited = Common { max_steps: Some(n_steps as i64), ..common.clone() };
    let trainer = job::run(&graph, &limited, job)?;
    let sampler = recipes::lm::Sampler { tokens, logits, context: size.context };
    if args.sample > 0 && !common.json {
        let vocabulary = corpus.vocabulary();
        let text = sampler.write_on(
            trainer.session(),
            vocabulary,
            &args.prompt,
            args.sample,
            args.temperature,
            common.seed,
        )?;
        print(format_args!("\n{}{text}", args.prompt))?;
    }
    Ok(())
}

fn linear(args: &Linear) -> Result<()> {
    let common = &args.common;
    let (batch, epochs, placement) = sizes(common, 20, 20)?;
    let graph = crate::graph();
    graph.set_seed(common.seed as i64);
    let x = graph.placeholder::<f32>("x", [None, Some(1)]);
    let y = graph.placeholder::<f32>("y", [None, Some(1)]);
    let optimizer = common.make_optimizer(Kind::Sgd, 0.2, 1000 / batch as u64 * epochs, 0)?;
    let model = train_model(&graph, &placement, &*optimizer, &[x, y], |inputs| {
        Ok(recipes::linear::model(inputs[0], inputs[1]))
    })?;
    let train = Dataset::new(recipes::linear::points(1000, common.seed)?);
    let job = Job {
        model,
        train: train.shuffle(common.seed).batch(batch, true).repeat(epochs),
        test: Some(Dataset::new(recipes::linear::points(100, common.seed + 1)?).batch(100, false)),
        epochs,
        unit: ("samples", 1),
    };
    let trainer = job::run(&graph, common, job)?;
    if common.json {
        return Ok(());
    }
    let value = |name: &str| trainer.session().fetch(graph.find_variable(name)?.read())?.data::<f32>().map(|v| v[0]);
    print(format_args!("y = {:.3} x + {:.3}", value("line/kernel")?, value("line/bias")?))
}

/// Batch size, epochs and devices, checked.
fn sizes(common: &Common, usual_batch: usize, usual_epochs: u64) -> Result<(usize, u64, Placement)> {
    let batch = common.batch_size.unwrap_or(usual_batch);
    if batch == 0 {
        return Err(Error::invalid_argument("--batch-size must be at least 1"));
    }
    let towers = common.towers()?;
    if !towers.is_empty() && !batch.is_multiple_of(towers.len()) {
        return Err(Error::invalid_argument(format!(
            "--batch-size {batch} cannot be shared equally by {} devices; try {}",
            towers.len(),
            batch.next_multiple_of(towers.len())
        )));
    }
    Ok((batch, common.epochs.unwrap_or(usual_epochs), Placement { device: common.device.clone(), towers }))
}
