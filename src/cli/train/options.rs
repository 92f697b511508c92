//! Flags that all recipes share.

use std::path::PathBuf;

use crate::optim::{
    Adadelta, Adafactor, Adagrad, Adam, AdamW, Ftrl, Lamb, LearningRate, Momentum, Optimizer, RmsProp, Schedule, Sgd,
};
use crate::train::Every;
use crate::{DeviceSpec, Error, Result, SessionConfig};
use clap::ValueEnum;

use super::cluster::ClusterFlags;
use super::gpu::GpuFlags;
use crate::cli::graph_file::parse_devices;

/// Flags that all recipes share.
#[derive(Clone, clap::Args)]
pub struct Common {
    /// How the weights are updated
    #[arg(long, value_enum)]
    pub optimizer: Option<Kind>,
    /// The learning rate, kept constant; without it each recipe has its own, which falls towards the end
    #[arg(long, value_name = "RATE", allow_negative_numbers = true)]
    pub lr: Option<f64>,
    /// Samples in a step
    #[arg(long, value_name = "N")]
    pub batch_size: Option<usize>,
    /// How often to go through the data
    #[arg(long, value_name = "N")]
    pub epochs: Option<u64>,
    /// Stop at this global step, if the data does not end before
    #[arg(long, value_name = "STEP")]
    pub max_steps: Option<i64>,
    /// Initial weights and the order of the data follow from it
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
    /// Write summaries for TensorBoard, and the loss curve as loss.svg, into this folder
    #[arg(long, value_name = "DIR")]
    pub logdir: Option<PathBuf>,
    /// Save checkpoints into this folder
    #[arg(long, value_name = "DIR")]
    pub checkpoint_dir: Option<PathBuf>,
    /// How often to save: a number of steps, or seconds such as 30s
    #[arg(long, default_value = "30s", value_parser = parse_every, value_name = "STEPS|SECONDS")]
    pub checkpoint_every: Every,
    /// How many checkpoints to keep; 0 keeps all
    #[arg(long, default_value_t = 5, value_name = "N")]
    pub keep: usize,
    /// Go on from the newest checkpoint of --checkpoint-dir, if there is one
    #[arg(long, requires = "checkpoint_dir")]
    pub resume: bool,
    /// Where to compute, such as /cpu:0 or gpu:0
    #[arg(long, value_name = "DEVICE", conflicts_with = "devices")]
    pub device: Option<String>,
    /// Share every batch among so many devices, such as cpu=4
    #[arg(long, value_name = "KIND=N")]
    pub devices: Option<String>,
    #[command(flatten)]
    pub gpu: GpuFlags,
    /// Fail if a value moves between devices by itself: all but feeds, fetches and pinned Identity nodes
    #[arg(long)]
    pub deny_implicit_copies: bool,
    /// A line every so many steps, when there is no terminal
    #[arg(long, default_value_t = 100, value_name = "STEPS")]
    pub log_every: u64,
    /// One JSON object a line
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub cluster: ClusterFlags,
}

/// `100` or `30s`.
fn parse_every(text: &str) -> std::result::Result<Every, String> {
    let wrong = || format!("'{text}' is neither a number of steps, such as 100, nor seconds, such as 30s");
    match text.strip_suffix('s') {
        Some(secs) => match secs.parse::<f64>() {
            Ok(secs) if secs >= 0.0 && secs.is_finite() => Ok(Every::Secs(secs)),
            _ => Err(wrong()),
        },
        None => match text.parse::<u64>() {
            Ok(steps) if steps > 0 => Ok(Every::Steps(steps)),
            _ => Err(wrong()),
        },
    }
}

/// The optimizers by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// Plain gradient descent
    Sgd,
    /// With momentum 0.9
    Momentum,
    /// With Nesterov's momentum 0.9
    Nesterov,
    /// Steps shrink where gradients were large
    Adagrad,
    /// As Adagrad, with a fading memory and no rate of its own
    Adadelta,
    /// Steps scaled by the recent size of gradients
    Rmsprop,
    /// Momentum and scaled steps
    Adam,
    /// Adam with decoupled weight decay
    Adamw,
    /// Adam with a trust ratio per layer, for large batches
    Lamb,
    /// Scaled steps in little memory
    Adafactor,
    /// Follow the regularised leader
    Ftrl,
}

impl Kind {
    /// The rate that suits it when none is given and the recipe names none.
    pub fn usual_rate(self) -> f64 {
        match self {
            Kind::Sgd => 0.1,
            Kind::Momentum | Kind::Nesterov => 0.02,
            Kind::Adagrad => 0.02,
            Kind::Adadelta => 1.0,
            Kind::Rmsprop | Kind::Adam | Kind::Adamw => 1e-3,
            Kind::Lamb => 4e-3,
            Kind::Adafactor => 1e-2,
            Kind::Ftrl => 0.05,
        }
    }

    /// Whether a rate that falls to nothing would take the weights with it. FTRL does not step from where it is: each
    /// step makes the weights anew, as the rate times what it has added up, over the root of the sums of squares.
    fn keeps_its_rate(self) -> bool {
        matches!(self, Kind::Ftrl)
    }

    /// The optimizer itself.
    pub fn make(self, rate: LearningRate) -> Box<dyn Optimizer> {
        match self {
            Kind::Sgd => Box::new(Sgd::new(rate)),
            Kind::Momentum => Box::new(Momentum::new(rate, 0.9)),
            Kind::Nesterov => Box::new(Momentum::new(rate, 0.9).nesterov()),
            Kind::Adagrad => Box::new(Adagrad::new(rate)),
            Kind::Adadelta => Box::new(Adadelta::new(rate)),
            Kind::Rmsprop => Box::new(RmsProp::new(rate)),
            Kind::Adam => Box::new(Adam::new(rate)),
            Kind::Adamw => Box::new(AdamW::new(rate, 0.01)),
            Kind::Lamb => Box::new(Lamb::new(rate, 0.01)),
            Kind::Adafactor => Box::new(Adafactor::new(rate)),
            // Sums of squares that begin above zero make the first step forget most of the initial weights, which a network
            // with a hidden layer cannot do without.
            Kind::Ftrl => Box::new(Ftrl::new(rate).initial_accumulator(0.0)),
        }
    }
}

impl Common {
    /// The optimizer: what the flags say, else the recipe's choice, its rate falling to nothing over `n_steps` unless
    /// the optimizer cannot stand that.
    /// Without `--lr` the rate grows over the first `warm_up` steps.
    pub fn make_optimizer(
        &self,
        usual: Kind,
        usual_rate: f64,
        n_steps: u64,
        warm_up: u64,
    ) -> Result<Box<dyn Optimizer>> {
        let kind = self.optimizer.unwrap_or(usual);
        let rate = match self.lr {
            Some(rate) if rate > 0.0 && rate.is_finite() => LearningRate::from(rate),
            Some(rate) => return Err(Error::invalid_argument(format!("--lr {rate} is not a positive number"))),
            None => {
                let initial = if kind == usual { usual_rate } else { kind.usual_rate() };
                match kind.keeps_its_rate() {
                    true => LearningRate::from(initial),
                    false => LearningRate::from(Schedule::cosine(initial, n_steps).warm_up(warm_up)),
                }
            }
        };
        Ok(kind.make(rate))
    }

    /// The devices of the session.
    pub fn session_config(&self) -> Result<SessionConfig> {
        let mut config = SessionConfig {
            gpu: self.gpu.options()?,
            deny_implicit_copies: self.deny_implicit_copies,
            ..SessionConfig::default()
        };
        if let Some(device) = &self.device {
            let spec = DeviceSpec::parse(device)?;
            if spec.kind.as_deref() == Some("GPU") {
                // What has no kernel there, such as reading files, runs on the CPU. No card at all is an error.
                config.allow_soft_placement = true;
                config.device_count.insert("GPU".to_owned(), spec.id.map_or(1, |id| id as usize + 1));
            }
        }
        if let Some(devices) = &self.devices {
            let list = parse_devices(devices)?;
            list.bind(&mut config);
            // As for a single GPU.
            config.allow_soft_placement |= list.counts.contains_key("GPU");
            config.device_count.extend(list.counts);
        }
        Ok(config)
    }

    /// One device per tower; empty if the model is not to be copied.
    pub fn towers(&self) -> Result<Vec<String>> {
        let Some(devices) = &self.devices else { return Ok(Vec::new()) };
        let mut names = Vec::new();
        for (kind, n) in parse_devices(devices)?.counts {
            names.extend((0..n).map(|i| format!("/device:{kind}:{i}")));
        }
        Ok(if names.len() > 1 { names } else { Vec::new() })
    }
}
