//! One model on many devices: in one process ([`towers`]), or in many ([`World`], [`DataParallel`]).

mod batch_norm;
mod calls;
mod cost_file;
mod data_parallel;
mod exchange;
mod exchange_report;
mod local_steps;
mod merge_collectives;
mod nodes;
mod one_bit_adam;
mod power_sgd;
mod slow_rank;
mod split;
mod top_k;
mod towers;
mod weigh;
mod world;

pub(crate) use batch_norm::trains_batch_norm;
pub(crate) use cost_file::{cost_file, read_costs, write_costs};
pub use data_parallel::DataParallel;
pub(crate) use exchange::OF_ONE_RANK;
pub use exchange::{Exchange, Steps};
pub use exchange_report::ExchangeReport;
pub(crate) use kolo_runtime::collective::Activity;
pub use kolo_runtime::collective::{ExchangedSoFar, ReduceOp};
pub use local_steps::OuterStep;
pub(crate) use local_steps::is_of_outer_step;
pub(crate) use slow_rank::SlowRankWatch;
pub use slow_rank::{RankTimes, SlowCause, SlowRank};
pub use towers::{Tower, Towers, average_gradients, towers};
pub(crate) use towers::{gradients_on, replicate, sum};
pub use weigh::mean_over_samples;
pub use world::{RankPlace, World};
pub(crate) use world::{WORLD, by_dtype_and_size};
