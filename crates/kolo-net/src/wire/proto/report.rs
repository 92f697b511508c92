//! `KoloReport`: what a task is doing. Kolo's own; TensorFlow's tasks do not implement it.

/// Requests a report.
#[derive(Clone, PartialEq, prost::Message)]
pub struct KoloReportRequest {
    /// Only this step; 0 is all of them.
    #[prost(int64, tag = "1")]
    pub step_id: i64,
    /// Bytes to send back, which measures the link.
    #[prost(bytes = "vec", tag = "2")]
    pub probe: Vec<u8>,
}

/// What this task is doing.
#[derive(Clone, PartialEq, prost::Message)]
pub struct KoloReportResponse {
    /// `/job:worker/replica:0/task:0`
    #[prost(string, tag = "1")]
    pub task: String,
    /// The steps that it takes part in.
    #[prost(message, repeated, tag = "2")]
    pub step: Vec<StepReport>,
    /// The number of steps that have ended here.
    #[prost(uint64, tag = "3")]
    pub n_ended: u64,
    /// How long ago the last of them ended, in milliseconds; -1 if none has.
    #[prost(int64, tag = "4")]
    pub last_ended_ms: i64,
    /// Sessions of masters that it takes part in.
    #[prost(uint64, tag = "5")]
    pub n_sessions: u64,
    /// How long the process has run, in milliseconds.
    #[prost(uint64, tag = "6")]
    pub up_ms: u64,
    /// The steps that it is the master of.
    #[prost(message, repeated, tag = "7")]
    pub mastered: Vec<MasteredStep>,
    /// Its cluster spec.
    #[prost(message, optional, tag = "8")]
    pub cluster: Option<super::ClusterDef>,
    /// The bytes of the request.
    #[prost(bytes = "vec", tag = "9")]
    pub probe: Vec<u8>,
}

/// A step as its master knows it.
#[derive(Clone, PartialEq, prost::Message)]
pub struct MasteredStep {
    /// The step.
    #[prost(int64, tag = "1")]
    pub step_id: i64,
    /// How long it has run, in milliseconds.
    #[prost(uint64, tag = "2")]
    pub age_ms: u64,
    /// The tasks that run parts of it.
    #[prost(string, repeated, tag = "3")]
    pub task: Vec<String>,
}

/// One step on one task.
#[derive(Clone, PartialEq, prost::Message)]
pub struct StepReport {
    /// The step.
    #[prost(int64, tag = "1")]
    pub step_id: i64,
    /// How long the task has had it, in milliseconds.
    #[prost(uint64, tag = "2")]
    pub age_ms: u64,
    /// Whether `RunGraph` has been received.
    #[prost(bool, tag = "3")]
    pub has_begun: bool,
    /// What its nodes wait for.
    #[prost(message, repeated, tag = "4")]
    pub wait: Vec<WaitReport>,
    /// The number of threads that run its kernels now.
    #[prost(uint32, tag = "5")]
    pub n_running: u32,
    /// The number of its nodes that are ready while no thread runs them.
    #[prost(uint32, tag = "6")]
    pub n_unattended: u32,
}

/// One wait.
#[derive(Clone, PartialEq, prost::Message)]
pub struct WaitReport {
    /// The node that waits; empty if it is another task that waits for a tensor of this one.
    #[prost(string, tag = "1")]
    pub node: String,
    /// Its op.
    #[prost(string, tag = "2")]
    pub op: String,
    /// How long it has waited, in milliseconds.
    #[prost(uint64, tag = "3")]
    pub lasts_ms: u64,
    /// The sending task, if it waits for a tensor.
    #[prost(string, tag = "4")]
    pub from_task: String,
    /// The tensor.
    #[prost(string, tag = "5")]
    pub tensor: String,
    /// The task that waits, if it is another one.
    #[prost(string, tag = "6")]
    pub for_task: String,
}
