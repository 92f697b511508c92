//! Training: the global step, savers, summaries, sessions that recover, hooks and loops.

mod coordinator;
mod global_step;
mod queue_runner;
mod ready;
pub mod summary;

pub use coordinator::Coordinator;
pub use global_step::{create_global_step, global_step, global_step_or_create};
pub use queue_runner::{QueueRunner, start_queue_runners};
pub use ready::report_uninitialized_variables;
