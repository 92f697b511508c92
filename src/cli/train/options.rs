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
use super::ranks::RankFlags;
use super::strategy::StrategyName;
use crate::cli::graph_file::parse_devices;

/// Flags that all recipes share.
#[derive(Clone, clap::Args)]
pub struct Common {
    /// Update the weights with this optimizer [default: the recipe's]
    #[arg(long, value_enum)]
    pub optimizer: Option<Kind>,
    /// Train with this constant learning rate [default: the recipe's, which decays towards the end]
    #[arg(long, value_name = "RATE", allow_negative_numbers = true)]
    pub lr: Option<f64>,
    /// Train with this many samples per step [default: the recipe's]
    #[arg(long, value_name = "N")]
    pub batch_size: Option<usize>,
    /// Go through the data this many times [default: the recipe's]
    #[arg(long, value_name = "N")]
    pub epochs: Option<u64>,
    /// Stop at this global step, or earlier if the data runs out
    #[arg(long, value_name = "STEP")]
    pub max_steps: Option<i64>,
    /// Train with this strategy: where variables are, and how replicas agree on an update. --batch-size is then the global batch, which
    /// they share [default: what --devices, --ranks, --ps and --workers say]
    #[arg(long, value_enum, value_name = "NAME")]
    pub strategy: Option<StrategyName>,
    /// Seed the initial weights and the order of the data
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
    /// Write summaries for TensorBoard, and the loss curve as loss.svg, to this folder; in a cluster, the chief does
    /// [default: none]
    #[arg(long, value_name = "DIR")]
    pub logdir: Option<PathBuf>,
    /// Save checkpoints to this folder; in a cluster, the chief does [default: none]
    #[arg(long, value_name = "DIR")]
    pub checkpoint_dir: Option<PathBuf>,
    /// Save after this many steps, or seconds such as 30s
    #[arg(long, default_value = "30s", value_parser = parse_every, value_name = "STEPS|SECONDS")]
    pub checkpoint_every: Every,
    /// Keep this many checkpoints; 0 keeps all
    #[arg(long, default_value_t = 5, value_name = "N")]
    pub keep: usize,
    /// Resume from the newest checkpoint in --checkpoint-dir, if there is one; a cluster always does
    #[arg(long, requires = "checkpoint_dir")]
    pub resume: bool,
    /// Compute on this device, such as /cpu:0 or gpu:0 [default: chosen by the placer]
    #[arg(long, value_name = "DEVICE", conflicts_with = "devices")]
    pub device: Option<String>,
    /// Split every batch over this many devices, such as cpu=4 [default: one device]
    #[arg(long, value_name = "KIND=N")]
    pub devices: Option<String>,
    #[command(flatten)]
    pub gpu: GpuFlags,
    /// Fail on implicit copies between devices: all but feeds, fetches and pinned Identity nodes
    #[arg(long)]
    pub deny_implicit_copies: bool,
    /// Print a line every this many steps, if the output is no terminal
    #[arg(long, default_value_t = 100, value_name = "STEPS")]
    pub log_every: u64,
    /// Print progress as JSON, one object per line
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub ranks: RankFlags,
    #[command(flatten)]
    pub cluster: ClusterFlags,
}

/// The most parts of a batch: each is a copy of the model's graph.
const MAX_PARTS: usize = 4096;

/// The most processes of `--ranks`.
const MAX_RANKS: usize = 256;

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
    /// Stochastic gradient descent
    Sgd,
    /// SGD with momentum 0.9
    Momentum,
    /// SGD with Nesterov momentum 0.9
    Nesterov,
    /// Adagrad: steps scaled down by the sum of squared gradients
    Adagrad,
    /// Adadelta: as Adagrad, with decaying averages
    Adadelta,
    /// RMSProp: steps scaled by a decaying average of squared gradients
    Rmsprop,
    /// Adam: momentum and scaled steps
    Adam,
    /// Adam with decoupled weight decay
    Adamw,
    /// Adam with a trust ratio per layer, for large batches
    Lamb,
    /// Adafactor: scaled steps with factored statistics, to save memory
    Adafactor,
    /// Follow the regularised leader
    Ftrl,
}

impl Kind {
    /// Its default learning rate, if neither the flags nor the recipe give one.
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

    /// Whether decaying the rate to zero would set the weights to zero. FTRL does not update weights incrementally:
    /// each step recomputes them, as the rate times its accumulator, over the root of the sums of squares.
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
            // Sums of squares that begin above zero make the first step forget most of the initial weights, which a
            // network with a hidden layer cannot do without.
            Kind::Ftrl => Box::new(Ftrl::new(rate).initial_accumulator(0.0)),
        }
    }
}

impl Common {
    /// An error if a value makes no sense, whatever the recipe: before anything is read or started.
    pub fn check(&self) -> Result<()> {
        if self.batch_size == Some(0) {
            return Err(Error::invalid_argument("--batch-size must be at least 1"));
        }
        if self.epochs == Some(0) {
            return Err(Error::invalid_argument("--epochs 0 trains nothing; give at least 1"));
        }
        if let Some(steps) = self.max_steps.filter(|steps| *steps < 1) {
            return Err(Error::invalid_argument(format!("--max-steps {steps} trains nothing; give at least 1")));
        }
        if let Some(device) = &self.device {
            DeviceSpec::parse(device).map_err(|error| error.context("--device"))?;
        }
        if let Some(n) = self.ranks.ranks.filter(|n| *n == 0 || *n > MAX_RANKS) {
            return Err(Error::invalid_argument(format!("--ranks {n}: give 1 to {MAX_RANKS}")));
        }
        if let Some(n) = self.ranks.micro_batches.filter(|n| *n == 0 || *n > MAX_PARTS) {
            return Err(Error::invalid_argument(format!("--micro-batches {n}: give 1 to {MAX_PARTS}")));
        }
        self.ranks.check()?;
        self.cluster.mode()?;
        self.session_config().map(drop)
    }

    /// The folders that a cluster's tasks write to, made if they are missing: all that its graphs may touch.
    pub fn dirs(&self) -> Result<Vec<PathBuf>> {
        let dirs: Vec<PathBuf> = self.checkpoint_dir.iter().chain(&self.logdir).cloned().collect();
        for dir in &dirs {
            std::fs::create_dir_all(dir).map_err(|error| {
                Error::failed_precondition(format!("the folder '{}' cannot be made: {error}", dir.display()))
            })?;
        }
        Ok(dirs)
    }

    /// The optimizer of the flags, or else of the recipe. Without `--lr` its rate warms up over the first `warm_up`
    /// steps and decays to zero over `n_steps`, unless the optimizer keeps its rate.
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
                // What has no kernel there, such as reading files, runs on the CPU. No GPU at all is an error.
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

    /// The devices of this process, each with a replica of the model.
    pub fn replica_devices(&self) -> Result<Vec<String>> {
        let mut devices = Vec::new();
        if let Some(list) = &self.devices {
            for (kind, n) in parse_devices(list)?.counts {
                devices.extend((0..n).map(|i| format!("/device:{kind}:{i}")));
            }
        }
        if devices.len() < 2 {
            devices = vec![self.device.clone().unwrap_or_default()];
        }
        Ok(devices)
    }

    /// The device of each part of a batch, for one of `n_ranks`; empty if its batches are not cut.
    pub fn towers(&self, n_ranks: usize) -> Result<Vec<String>> {
        let devices = self.replica_devices()?;
        let n_devices = devices.len() * n_ranks;
        let n_parts = self.ranks.micro_batches.unwrap_or(n_devices);
        if !n_parts.is_multiple_of(n_devices) {
            return Err(Error::invalid_argument(format!(
                "--micro-batches {n_parts} cannot be shared equally by {n_ranks} ranks of {} devices; try {}",
                devices.len(),
                n_parts.next_multiple_of(n_devices)
            )));
        }
        // Neighbouring parts are on one device, so that sums do not depend on how many devices there are.
        let towers = devices.iter().flat_map(|device| std::iter::repeat_n(device.clone(), n_parts / n_devices));
        let towers: Vec<String> = towers.collect();
        // A single part goes the same way if parts or a strategy were asked for: the graph decides about the initial weights, too.
        let is_cut = towers.len() > 1 || self.ranks.micro_batches.is_some() || self.strategy.is_some();
        Ok(if is_cut { towers } else { Vec::new() })
    }
}
