//! Training: the global step, savers, summaries, sessions that recover, hooks and loops.

mod global_step;
mod saver;

pub use global_step::{create_global_step, global_step, global_step_or_create};
pub use saver::{
    BackgroundSave, CheckpointState, Restored, SaveSlice, Saver, SaverBuilder, checkpoint_exists, checkpoint_state,
    latest_checkpoint,
};
