//! `kolo train`: recipes that train a model, from one command.

pub mod child;
mod cluster;
mod curve;
mod ending;
mod gpu;
pub mod job;
mod launch;
mod options;
mod progress;
pub mod ranks;
mod recipe;
mod recipes;
mod run;
mod strategy;

use std::path::PathBuf;

use crate::{DType, Result};
use clap::{Subcommand, ValueEnum};

use self::options::Common;

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
  kolo train mnist --strategy mirrored              the same on all GPUs; also: parameter-server, central-storage, ...
  kolo train mnist --ranks 2                        two processes that exchange gradients among themselves
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

impl Args {
    fn common(&self) -> &Common {
        match &self.recipe {
            Recipe::Mnist(args) => &args.common,
            Recipe::Cifar(args) => &args.common,
            Recipe::Lm(args) => &args.common,
            Recipe::Resnet50(args) => &args.common,
            Recipe::Linear(args) => &args.common,
        }
    }

    /// An error if a flag's value makes no sense, whatever the recipe.
    pub fn check(&self) -> Result<()> {
        self.common().check()
    }
}

/// Trains.
pub fn run(args: &Args) -> Result<()> {
    args.check()?;
    let common = &args.common().with_strategy();
    if common.cluster.is_launcher() {
        return cluster::launch(common);
    }
    if let Some(seat) = common.cluster.ps_seat()? {
        return cluster::keep_variables(common, &seat);
    }
    let recipe: Box<dyn recipe::Recipe> = match &args.recipe {
        Recipe::Mnist(args) => Box::new(recipes::Pictures::mnist(args)?),
        Recipe::Cifar(args) => Box::new(recipes::Pictures::cifar(args)?),
        Recipe::Lm(args) if args.model == Language::Gpt2 => Box::new(recipes::Gpt2::new(args)?),
        Recipe::Lm(args) => Box::new(recipes::Characters::new(args)?),
        Recipe::Resnet50(args) => Box::new(recipes::Resnet::new(args)?),
        Recipe::Linear(_) => Box::new(recipes::Line),
    };
    match common.ranks.ranks {
        Some(n) => run::launch(common, &*recipe, n),
        None => run::run(common, &*recipe),
    }
}
