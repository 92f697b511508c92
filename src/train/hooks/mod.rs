//! The hooks that come with Kolo.

mod checkpoint;
mod feed;
mod final_ops;
mod logging;
mod nan_guard;
mod profiler;
mod step_counter;
mod stop_at_step;
mod summary_saver;

pub use checkpoint::CheckpointSaver;
pub use feed::FeedFn;
pub use final_ops::{FinalOps, FinalValues};
pub use logging::Logging;
pub use nan_guard::NanGuard;
pub use profiler::Profiler;
pub use step_counter::StepCounter;
pub use stop_at_step::StopAtStep;
pub use summary_saver::SummarySaver;
