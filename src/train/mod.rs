//! Training: the global step, savers, summaries, sessions that recover, hooks and loops.

mod global_step;

pub use global_step::{create_global_step, global_step, global_step_or_create};
