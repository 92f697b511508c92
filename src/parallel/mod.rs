//! One model on many devices: in one process ([`towers`]), or in many ([`World`], [`DataParallel`]).

mod data_parallel;
mod towers;
mod world;

pub use data_parallel::DataParallel;
pub use kolo_runtime::collective::ReduceOp;
pub use towers::{Tower, Towers, average_gradients, towers};
pub(crate) use world::WORLD;
pub use world::{RankPlace, World};
