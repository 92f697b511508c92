//! Training: the global step, savers, summaries, sessions that recover, hooks and loops.

mod coordinator;
mod global_step;
mod meta_graph;
mod queue_runner;
mod ready;
mod safetensors;
mod saver;

pub use coordinator::Coordinator;
pub use global_step::{create_global_step, global_step, global_step_or_create};
pub use queue_runner::{QueueRunner, start_queue_runners};
pub use ready::report_uninitialized_variables;
pub use safetensors::{load_safetensors, read_safetensors, save_safetensors, write_safetensors};
pub use saver::{
    BackgroundSave, CheckpointState, Restored, SaveSlice, Saver, SaverBuilder, checkpoint_exists, checkpoint_state,
    latest_checkpoint,
};
