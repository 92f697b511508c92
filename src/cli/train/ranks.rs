//! Training by all-reduce: one command starts all ranks of this machine, each a process with a copy of the model. A process that
//! another launcher has started as a rank meets the others over TCP (`torchrun`, on several machines) or MPI (`mpirun`).
//!
//! Ranks meet in a file in memory that the launcher keeps open. With `--elastic` a rank that dies is started again (`launch.rs`).
//! Over TCP, elastic ranks find and replace each other by themselves (`parallel::Elastic`).

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use crate::parallel::{
    DataParallel, Elastic, ElasticConfig, ElasticPlace, Exchange, OuterStep, Sizes, World, addresses,
};
use crate::place::Place;
use crate::{Error, Result};

use super::child::own_flags;
use crate::cli::place::own_place;
use crate::cli::security::ServerSecurityFlags;

/// Where the ranks of a launched training find each other.
pub(super) const WORLD_VARIABLE: &str = "KOLO_WORLD";

/// Set for a rank that takes the place of one that died.
pub(super) const REPLACES_VARIABLE: &str = "KOLO_REPLACES_RANK";

/// Flags that members of a training need not have in common, with a value and without.
const OWN_VALUES: &[&str] = &[
    "--listen",
    "--join",
    "--wait-for-ranks",
    "--min",
    "--max",
    "--token-file",
    "--tls-ca",
    "--tls-cert",
    "--tls-key",
    "--logdir",
    "--checkpoint-dir",
    "--checkpoint-every",
    "--keep",
    "--log-every",
    "--gpu-memory-fraction",
];
const OWN_FLAGS: &[&str] = &["--json", "--resume", "--with-parent", "--insecure", "--insecure-loopback", "--same-user"];

/// Flags about ranks.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct RankFlags {
    /// Train with this many processes on this machine, each with an equal share of every batch; they exchange gradients among
    /// themselves, without parameter servers
    #[arg(long, value_name = "N", help_heading = "Ranks")]
    pub ranks: Option<usize>,
    /// Let ranks die and come: one that dies is started again (by --ranks, or by whoever started it) and gets its state from the others,
    /// and no step is lost
    #[arg(long, help_heading = "Ranks")]
    pub elastic: bool,
    /// Go on with as few ranks as this when some are lost, until others come [default: all have to be there]
    #[arg(long, value_name = "N", help_heading = "Ranks")]
    pub min: Option<usize>,
    /// Let in as many ranks as this over TCP [default: as many as the training begins with]
    #[arg(long, value_name = "N", help_heading = "Ranks")]
    pub max: Option<usize>,
    /// Join an elastic training that is under way, at the addresses of any of its ranks [default: $KOLO_JOIN]
    #[arg(long, value_name = "HOST:PORT,...", help_heading = "Ranks")]
    pub join: Option<String>,
    /// Listen at this address for the other ranks of an elastic training [default: $KOLO_LISTEN; for rank 0 at the start
    /// MASTER_ADDR:MASTER_PORT, for others a free port of the address towards them]
    #[arg(long, value_name = "HOST:PORT", help_heading = "Ranks")]
    pub listen: Option<String>,
    /// Wait this many seconds for other ranks when they are too few to go on, or when none is found to join [default: 60]
    #[arg(long, value_name = "SECONDS", help_heading = "Ranks")]
    pub wait_for_ranks: Option<f64>,
    /// Cut every batch into this many parts, which ranks compute one after the other: the same parts give the same weights,
    /// bit for bit, on 1, 2, 4 or 8 ranks [default: one part for each rank and device]
    #[arg(long, value_name = "N", help_heading = "Ranks")]
    pub micro_batches: Option<usize>,
    /// Compare the weights of all ranks every this many steps, and at the end; 0 compares at the end only [default: 1000]
    #[arg(long, value_name = "STEPS", help_heading = "Ranks")]
    pub check_weights_every: Option<u64>,
    /// Normalise batches by the mean and variance of all ranks' shares, not of each rank's own: for small shares
    #[arg(long, help_heading = "Ranks")]
    pub sync_batch_norm: bool,
    /// Exchange gradients in this way: whole, bf16, f16, top-k:0.01, power-sgd:4 or 1-bit-adam:200; what is smaller than whole is not
    /// exact, and pays where the link between ranks is slow [default: whole]
    #[arg(long, value_name = "HOW", help_heading = "Ranks")]
    pub exchange: Option<Exchange>,
    /// Train without exchanging gradients, and average the weights of all ranks every this many steps
    #[arg(long, value_name = "STEPS", help_heading = "Ranks")]
    pub local_steps: Option<u64>,
    /// With --local-steps, move the weights by an outer optimizer of this rate and Nesterov momentum, such as 0.7:0.9
    #[arg(long, value_name = "RATE[:MOMENTUM]", help_heading = "Ranks")]
    pub outer: Option<OuterStep>,
}

impl RankFlags {
    /// An error if the flags do not go together.
    pub fn check(&self) -> Result<()> {
        match (self.exchange, self.local_steps) {
            (None, None) => Ok(()),
            _ => self.data_parallel(&World::alone()?).check(),
        }
    }

    /// What the flags say about how ranks train together.
    pub fn data_parallel(&self, world: &World) -> DataParallel {
        let mut data_parallel = DataParallel::new(world);
        if self.elastic {
            data_parallel = data_parallel.atomic_updates();
        }
        if self.sync_batch_norm {
            data_parallel = data_parallel.synchronised_batch_norm();
        }
        if let Some(exchange) = self.exchange {
            data_parallel = data_parallel.exchange(exchange);
        }
        match (self.local_steps, self.outer) {
            (Some(n), Some(outer)) => data_parallel.outer_steps(n, outer),
            (Some(n), None) => data_parallel.local_steps(n),
            (None, _) => data_parallel,
        }
    }

    /// The world of this process, if a launcher has started it as a rank. Ranks that meet over TCP authenticate each other so.
    pub fn world(&self, security: &ServerSecurityFlags) -> Result<Option<World>> {
        match own_place()?.place {
            Place::Rank(_) => World::from_env_secured(&security.read()?).map(Some),
            Place::Alone | Place::Task(_) => Ok(None),
        }
    }

    /// This process's part in an elastic training. `fits` says with which numbers of ranks it can train.
    pub fn elastic(
        &self,
        security: &ServerSecurityFlags,
        fits: &dyn Fn(usize) -> Result<()>,
        stop: &Arc<AtomicBool>,
        lines: Receiver<String>,
    ) -> Result<Elastic> {
        if std::env::var_os(WORLD_VARIABLE).is_some() {
            return Ok(Elastic::launched(World::from_env()?, lines).stop_flag(stop.clone()));
        }
        let mut place = ElasticPlace::of(&|name| std::env::var(name).ok())?;
        place.listen = self.listen.clone().or(place.listen);
        if let Some(join) = &self.join {
            place.join = addresses(join);
        }
        let most = self.max.or(place.size());
        let (Some(least), Some(most)) = (self.min.or(most), most) else {
            return Err(Error::invalid_argument(
                "an elastic rank that joins others has to know how many they can be: give --min and --max as they have, or WORLD_SIZE",
            ));
        };
        let sizes = sizes(least, most, fits)?;
        let patience = match self.wait_for_ranks {
            None => Duration::from_secs(60),
            Some(seconds) if (0.1..=86400.0).contains(&seconds) => Duration::from_secs_f64(seconds),
            Some(seconds) => {
                return Err(Error::invalid_argument(format!("--wait-for-ranks {seconds}: give 0.1 to 86400 seconds")));
            }
        };
        let config = ElasticConfig {
            security: security.read()?,
            patience,
            settings: settings(least, most),
            ..place.config(sizes)?
        };
        Ok(Elastic::join_from_env(config)?.stop_flag(stop.clone()))
    }

    /// With how many of `n` ranks of this machine a training can go on.
    pub fn sizes_of(&self, n: usize, fits: &dyn Fn(usize) -> Result<()>) -> Result<Sizes> {
        sizes(self.min.unwrap_or(n), n, fits)
    }

    /// Whether this process takes the place of a rank that died.
    pub fn replaces_a_rank(&self) -> bool {
        std::env::var_os(REPLACES_VARIABLE).is_some()
    }
}

/// Whether the environment says where the other ranks of an elastic training are, to be met over TCP.
pub fn has_elastic_place() -> bool {
    let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    !is_set(WORLD_VARIABLE) && (is_set("KOLO_JOIN") || is_set("RANK"))
}

fn sizes(least: usize, most: usize, fits: &dyn Fn(usize) -> Result<()>) -> Result<Sizes> {
    let fitting: Vec<String> = (least..=most.min(4096)).filter(|n| fits(*n).is_ok()).map(|n| n.to_string()).collect();
    let why = match (&fitting[..], fits(most)) {
        ([], Err(error)) => error.message().to_owned(),
        _ => format!("batches can be shared equally by {} ranks", fitting.join(", ")),
    };
    Sizes::new(least, most, |n| fits(n).is_ok(), &why).map_err(|error| error.context("--min and --max"))
}

/// A number for what all members of a training have to agree on: their flags, but for those about the process itself.
fn settings(least: usize, most: usize) -> u64 {
    let flags: BTreeSet<String> = own_flags(OWN_VALUES, OWN_FLAGS).into_iter().collect();
    let mut hasher = DefaultHasher::new();
    (flags, least, most).hash(&mut hasher);
    hasher.finish()
}
