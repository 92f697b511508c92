//! `--strategy`: one word for how a recipe is trained. It fills in the flags that it implies and decides what the batch of `--batch-size`
//! is: the global one.

use crate::cuda::discover;
use crate::strategy::Mesh;
use crate::{Error, Result};
use clap::ValueEnum;
use serde_json::json;

use super::cluster::Role;
use super::options::Common;
use super::progress::View;
use crate::cli::print;

/// The strategies by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StrategyName {
    /// One device, of --device
    OneDevice,
    /// A replica on each of --devices [default: all GPUs]; variables on the first
    Mirrored,
    /// The processes of --ranks or another launcher, each with a copy of the variables, on each of --devices
    #[value(alias = "collective-all-reduce")]
    MultiWorkerMirrored,
    /// Workers, with variables on parameter servers; --async unless --sync or --hybrid [default: --ps 1 --workers 2]
    ParameterServer,
    /// A replica on each of --devices [default: all GPUs]; variables in the host's memory
    CentralStorage,
}

impl StrategyName {
    fn word(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

impl Common {
    /// With the flags that the strategy implies where they are not given.
    pub fn with_strategy(&self) -> Common {
        let mut common = self.clone();
        match self.strategy {
            Some(StrategyName::Mirrored | StrategyName::CentralStorage) if self.devices.is_none() => {
                let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
                let n = discover(visible.as_deref()).gpus.iter().filter(|gpu| gpu.visible.is_some()).count();
                common.devices = Some(if n == 0 { "cpu=1".to_owned() } else { format!("gpu={n}") });
            }
            Some(StrategyName::ParameterServer) => {
                let cluster = &mut common.cluster;
                if cluster.cluster.is_none() && cluster.target.is_none() {
                    cluster.ps = cluster.ps.or(Some(1));
                    cluster.workers = cluster.workers.or(Some(2));
                }
            }
            _ => {}
        }
        common
    }

    /// Where variables are, if the strategy says so: on the first of the devices, or in the host's memory.
    pub fn variables_on(&self, towers: &[String]) -> Option<String> {
        match self.strategy? {
            StrategyName::Mirrored | StrategyName::MultiWorkerMirrored => towers.first().cloned(),
            StrategyName::CentralStorage => Some("/cpu:0".to_owned()),
            StrategyName::OneDevice | StrategyName::ParameterServer => None,
        }
    }

    /// Whether workers share the batches of `--batch-size`: with a strategy whose updates are those of all.
    pub fn shares_batches(&self, role: &Role) -> Result<bool> {
        let shares = self.strategy.is_some() && role.seat().is_in_sync();
        let (n, batch) = (role.n_workers, self.batch_size);
        match batch.filter(|batch| shares && !batch.is_multiple_of(n)) {
            None => Ok(shares),
            Some(batch) => Err(Error::invalid_argument(format!(
                "--batch-size {batch} is the global batch and cannot be shared equally by {n} workers; try {}",
                batch.next_multiple_of(n)
            ))),
        }
    }

    /// Says what becomes of the global batch.
    pub fn announce_strategy(&self, mesh: &Mesh, n_in_sync: usize, batch: usize) -> Result<()> {
        let Some(name) = self.strategy else { return Ok(()) };
        let text = mesh.describe(&name.word(), n_in_sync, batch);
        match View::choose(self.json) {
            View::Json => print(json!({
                "event": "strategy", "name": name.word(), "text": text, "global_batch": batch, "replicas_in_sync": n_in_sync,
                "processes": mesh.n_processes, "devices": mesh.devices.len(),
            })),
            View::Bar | View::Lines => print(text),
        }
    }
}
