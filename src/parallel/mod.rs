//! One model on many devices: in one process ([`towers`]), or in many ([`World`], [`DataParallel`]).

mod batch_norm;
mod calls;
mod cost_file;
mod data_parallel;
mod merge_collectives;
mod mpirun;
mod slow_rank;
mod split;
mod towers;
mod weigh;
mod world;

pub(crate) use batch_norm::trains_batch_norm;
pub(crate) use cost_file::{cost_file, read_costs, write_costs};
pub use data_parallel::DataParallel;
pub(crate) use kolo_runtime::collective::Activity;
pub use kolo_runtime::collective::ReduceOp;
pub(crate) use mpirun::is_started_by_mpirun;
pub(crate) use slow_rank::SlowRankWatch;
pub use slow_rank::{RankTimes, SlowCause, SlowRank};
pub use towers::{Tower, Towers, average_gradients, towers};
pub use world::{RankPlace, World};
pub(crate) use world::{WORLD, by_dtype_and_size};
