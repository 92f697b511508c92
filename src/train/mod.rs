//! Training: the global step, savers, summaries, sessions that recover, hooks and loops.

mod callback;
mod coordinator;
mod creator;
mod estimator;
mod global_step;
mod hook;
pub mod hooks;
mod meta_graph;
mod monitored;
mod monitored_training;
mod own_state;
mod queue_runner;
mod ranks;
mod ready;
mod safetensors;
mod saver;
mod scaffold;
mod session_manager;
mod source;
mod step_calls;
pub mod summary;
mod supervisor;
mod trainer;
mod worker;

pub use callback::{Callback, EarlyStopping, EpochReport, Flow, StepReport};
pub use coordinator::Coordinator;
pub use creator::{ChiefSessionCreator, SessionCreator, WorkerSessionCreator};
pub use estimator::{
    Estimator, EstimatorSpec, EvalSpec, Evaluated, JobPart, Mode, RunConfig, TrainSpec, train_and_evaluate,
};
pub use global_step::{create_global_step, global_step, global_step_or_create, read_global_step};
pub use hook::{CreatedContext, Every, RunArgs, RunContext, RunValues, SessionHook, Timer};
pub use monitored::{HookTime, MonitoredSession, Recovery, SingularMonitoredSession};
pub use monitored_training::MonitoredTrainingSession;
pub use queue_runner::{QueueRunner, start_queue_runners};
pub use ranks::TrainerState;
pub use ready::report_uninitialized_variables;
pub use safetensors::{load_safetensors, read_safetensors, save_safetensors, write_safetensors};
pub use saver::{
    BackgroundSave, CheckpointState, Restored, SaveSlice, Saver, SaverBuilder, checkpoint_exists, checkpoint_state,
    latest_checkpoint,
};
pub use scaffold::{FinalScaffold, InitFn, Scaffold};
pub use session_manager::{CheckpointSource, Created, SessionManager, Start};
pub use source::SessionSource;
pub use supervisor::{Supervisor, SupervisorBuilder};
pub use trainer::{Checkpoints, Evaluation, FitReport, Model, Trainer, TrainerBuilder};
pub(crate) use trainer::{not_finite, number};
