//! The messages of `WorkerService`, which masters call, and workers that need tensors of another worker.
//!
//! `RecvTensorResponse` is in a separate file, since its fields have a fixed order.

use bytes::Bytes;
use kolo_graph::wire::proto::{GraphDef, TensorShapeProto};

use super::{
    Any, ConfigProto, CostGraphDef, DebugOptions, DeviceAttributes, DeviceLocality, GraphOptions, NamedTensorProto,
    ServerDef, StepStats,
};

/// `tensorflow.GetStatusRequest`: requests the task's status.
#[derive(Clone, PartialEq, prost::Message)]
pub struct GetStatusRequest {}

/// `tensorflow.GetStatusResponse`: the task is up.
#[derive(Clone, PartialEq, prost::Message)]
pub struct GetStatusResponse {
    /// The task's devices.
    #[prost(message, repeated, tag = "1")]
    pub device_attributes: Vec<DeviceAttributes>,
}

/// `tensorflow.CreateWorkerSessionRequest`: creates a session on a worker.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CreateWorkerSessionRequest {
    /// The session.
    #[prost(string, tag = "1")]
    pub session_handle: String,
    /// The worker's task, if the client provides the cluster.
    #[prost(message, optional, tag = "2")]
    pub server_def: Option<ServerDef>,
    /// Whether the session's variables are isolated.
    #[prost(bool, tag = "3")]
    pub isolate_session_state: bool,
    /// The devices of all tasks.
    #[prost(message, repeated, tag = "4")]
    pub cluster_device_attributes: Vec<DeviceAttributes>,
    /// The master's task, as `/job:worker/replica:0/task:0`.
    #[prost(string, tag = "5")]
    pub master_task: String,
    /// The incarnation of the master's first device.
    #[prost(int64, tag = "6")]
    pub master_incarnation: i64,
}

/// `tensorflow.CreateWorkerSessionResponse`: the session is created.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CreateWorkerSessionResponse {}

/// `tensorflow.DeleteWorkerSessionRequest`: deletes a session from a worker.
#[derive(Clone, PartialEq, prost::Message)]
pub struct DeleteWorkerSessionRequest {
    /// The session.
    #[prost(string, tag = "1")]
    pub session_handle: String,
}

/// `tensorflow.DeleteWorkerSessionResponse`: the session is deleted.
#[derive(Clone, PartialEq, prost::Message)]
pub struct DeleteWorkerSessionResponse {}

/// `tensorflow.RegisterGraphRequest`: registers a part of a graph.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RegisterGraphRequest {
    /// The session.
    #[prost(string, tag = "1")]
    pub session_handle: String,
    /// The part, with a full device name on every node.
    #[prost(message, optional, tag = "2")]
    pub graph_def: Option<GraphDef>,
    /// Unused.
    #[prost(bool, tag = "3")]
    pub has_control_flow: bool,
    /// Its optimisation options.
    #[prost(message, optional, tag = "4")]
    pub graph_options: Option<GraphOptions>,
    /// Tensors to watch.
    #[prost(message, optional, tag = "5")]
    pub debug_options: Option<DebugOptions>,
    /// Whether CreateWorkerSession was called; otherwise the default session is used.
    #[prost(bool, tag = "6")]
    pub create_worker_session_called: bool,
    /// Which graph with collectives this is a part of; 0 is none.
    #[prost(int64, tag = "7")]
    pub collective_graph_key: i64,
    /// The session's options.
    #[prost(message, optional, tag = "8")]
    pub config_proto: Option<ConfigProto>,
}

/// `tensorflow.RegisterGraphResponse`: the part is registered.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RegisterGraphResponse {
    /// Its handle.
    #[prost(string, tag = "1")]
    pub graph_handle: String,
}

/// `tensorflow.DeregisterGraphRequest`: deregisters a part of a graph.
#[derive(Clone, PartialEq, prost::Message)]
pub struct DeregisterGraphRequest {
    /// The part.
    #[prost(string, tag = "1")]
    pub graph_handle: String,
    /// The session.
    #[prost(string, tag = "2")]
    pub session_handle: String,
    /// As in RegisterGraph.
    #[prost(bool, tag = "3")]
    pub create_worker_session_called: bool,
}

/// `tensorflow.DeregisterGraphResponse`: it is deregistered.
#[derive(Clone, PartialEq, prost::Message)]
pub struct DeregisterGraphResponse {}

/// `tensorflow.CleanupAllRequest`: clears containers.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CleanupAllRequest {
    /// The containers; empty is the default one.
    #[prost(string, repeated, tag = "1")]
    pub container: Vec<String>,
}

/// `tensorflow.CleanupAllResponse`: they are cleared.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CleanupAllResponse {}

/// `tensorflow.ExecutorOpts`: what to record while a step runs.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ExecutorOpts {
    /// Costs.
    #[prost(bool, tag = "1")]
    pub record_costs: bool,
    /// Timing statistics.
    #[prost(bool, tag = "3")]
    pub record_timeline: bool,
    /// The graphs that ran.
    #[prost(bool, tag = "4")]
    pub record_partition_graphs: bool,
    /// Allocations, if the step runs out of memory.
    #[prost(bool, tag = "5")]
    pub report_tensor_allocations_upon_oom: bool,
}

/// `tensorflow.RunGraphRequest`: runs a part of a step.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RunGraphRequest {
    /// The part of the graph.
    #[prost(string, tag = "1")]
    pub graph_handle: String,
    /// The step.
    #[prost(int64, tag = "2")]
    pub step_id: i64,
    /// Values to put into the rendezvous first, by key.
    #[prost(message, repeated, tag = "3")]
    pub send: Vec<NamedTensorProto>,
    /// Keys of the values to return.
    #[prost(string, repeated, tag = "4")]
    pub recv_key: Vec<String>,
    /// What to record.
    #[prost(message, optional, tag = "5")]
    pub exec_opts: Option<ExecutorOpts>,
    /// Whether this is one call of several for the same step.
    #[prost(bool, tag = "6")]
    pub is_partial: bool,
    /// Whether it is the last of them.
    #[prost(bool, tag = "7")]
    pub is_last_partial_run: bool,
    /// The session.
    #[prost(string, tag = "8")]
    pub session_handle: String,
    /// Whether an error comes back in the response and not as the call's status.
    #[prost(bool, tag = "9")]
    pub store_errors_in_response_body: bool,
    /// As in RegisterGraph.
    #[prost(bool, tag = "10")]
    pub create_worker_session_called: bool,
    /// A random number; 0 is none. A repeated one is refused.
    #[prost(int64, tag = "11")]
    pub request_id: i64,
}

/// `tensorflow.RunGraphResponse`: the part has run.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RunGraphResponse {
    /// The requested values, by key.
    #[prost(message, repeated, tag = "1")]
    pub recv: Vec<NamedTensorProto>,
    /// Timing statistics, if requested.
    #[prost(message, optional, tag = "2")]
    pub step_stats: Option<StepStats>,
    /// Costs, if requested.
    #[prost(message, optional, tag = "3")]
    pub cost_graph: Option<CostGraphDef>,
    /// The graphs that ran, if requested.
    #[prost(message, repeated, tag = "4")]
    pub partition_graph: Vec<GraphDef>,
    /// The error's code, or 0.
    #[prost(int32, tag = "5")]
    pub status_code: i32,
    /// The error's text.
    #[prost(string, tag = "6")]
    pub status_error_message: String,
}

/// `tensorflow.CleanupGraphRequest`: ends a step.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CleanupGraphRequest {
    /// The step.
    #[prost(int64, tag = "1")]
    pub step_id: i64,
}

/// `tensorflow.CleanupGraphResponse`: its state is freed.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CleanupGraphResponse {}

/// `tensorflow.RecvTensorRequest`: requests a tensor of another task.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RecvTensorRequest {
    /// The step.
    #[prost(int64, tag = "1")]
    pub step_id: i64,
    /// Which tensor.
    #[prost(string, tag = "2")]
    pub rendezvous_key: String,
    /// Unused.
    #[prost(bool, tag = "3")]
    pub dma_ok: bool,
    /// Unused.
    #[prost(message, optional, tag = "4")]
    pub client_locality: Option<DeviceLocality>,
    /// Unused.
    #[prost(message, optional, tag = "5")]
    pub server_locality: Option<DeviceLocality>,
    /// For other transports than gRPC.
    #[prost(message, optional, tag = "6")]
    pub transport_options: Option<Any>,
    /// A random number; 0 is none. A repeated one is refused.
    #[prost(int64, tag = "7")]
    pub request_id: i64,
}

/// `tensorflow.MarkRecvFinishedRequest`: acknowledges a response that requires it.
#[derive(Clone, PartialEq, prost::Message)]
pub struct MarkRecvFinishedRequest {
    /// The id of the RecvTensor request.
    #[prost(int64, tag = "1")]
    pub request_id: i64,
}

/// `tensorflow.MarkRecvFinishedResponse`: the cached response is freed.
#[derive(Clone, PartialEq, prost::Message)]
pub struct MarkRecvFinishedResponse {}

/// `tensorflow.LoggingRequest`: records, or returns, the times of calls.
#[derive(Clone, PartialEq, prost::Message)]
pub struct LoggingRequest {
    /// Starts recording.
    #[prost(bool, tag = "1")]
    pub enable_rpc_logging: bool,
    /// Clears the records.
    #[prost(bool, tag = "2")]
    pub clear: bool,
    /// Steps whose records to return.
    #[prost(int64, repeated, tag = "3")]
    pub fetch_step_id: Vec<i64>,
    /// Stops recording.
    #[prost(bool, tag = "4")]
    pub disable_rpc_logging: bool,
}

/// `tensorflow.LabeledStepStats`: the records of one step.
#[derive(Clone, PartialEq, prost::Message)]
pub struct LabeledStepStats {
    /// The step.
    #[prost(int64, tag = "1")]
    pub step_id: i64,
    /// Its records.
    #[prost(message, optional, tag = "2")]
    pub step_stats: Option<StepStats>,
}

/// `tensorflow.LoggingResponse`: the records.
#[derive(Clone, PartialEq, prost::Message)]
pub struct LoggingResponse {
    /// By step.
    #[prost(message, repeated, tag = "1")]
    pub step: Vec<LabeledStepStats>,
}

/// `tensorflow.TraceOpts`: what to trace.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TraceOpts {
    /// Seconds.
    #[prost(double, tag = "1")]
    pub duration: f64,
    /// Steps.
    #[prost(bool, tag = "2")]
    pub use_step_profiler: bool,
    /// The operating system.
    #[prost(bool, tag = "3")]
    pub use_kernel_profiler: bool,
    /// More than the default.
    #[prost(bool, tag = "4")]
    pub use_extended_profiler: bool,
    /// GPUs.
    #[prost(bool, tag = "5")]
    pub use_gpu_profiler: bool,
    /// By samples.
    #[prost(bool, tag = "6")]
    pub use_sample_profiler: bool,
}

/// `tensorflow.TracingRequest`: traces the whole process.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TracingRequest {
    /// What to trace.
    #[prost(message, optional, tag = "1")]
    pub options: Option<TraceOpts>,
}

/// `tensorflow.TracingResponse`: empty.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TracingResponse {}

/// `tensorflow.RecvBufRequest`: requests a buffer of a collective.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RecvBufRequest {
    /// The step.
    #[prost(int64, tag = "1")]
    pub step_id: i64,
    /// The buffer's key.
    #[prost(string, tag = "2")]
    pub buf_rendezvous_key: String,
    /// Its length in bytes.
    #[prost(int64, tag = "3")]
    pub num_bytes: i64,
    /// Unused.
    #[prost(fixed64, tag = "4")]
    pub buf_ptr: u64,
    /// Unused.
    #[prost(message, optional, tag = "5")]
    pub client_locality: Option<DeviceLocality>,
    /// Unused.
    #[prost(message, optional, tag = "6")]
    pub server_locality: Option<DeviceLocality>,
    /// For other transports than gRPC.
    #[prost(message, optional, tag = "7")]
    pub transport_options: Option<Any>,
    /// The sending device.
    #[prost(string, tag = "8")]
    pub src_device: String,
    /// The receiving device.
    #[prost(string, tag = "9")]
    pub dst_device: String,
    /// A random number; 0 is none.
    #[prost(int64, tag = "10")]
    pub request_id: i64,
    /// The incarnation of the sending device.
    #[prost(uint64, tag = "11")]
    pub src_incarnation: u64,
}

/// `tensorflow.RecvBufResponse`: the buffer.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RecvBufResponse {
    /// Unused.
    #[prost(fixed64, tag = "1")]
    pub buf_ptr: u64,
    /// Its length in bytes.
    #[prost(int64, tag = "2")]
    pub num_bytes: i64,
    /// Whether the value is dead.
    #[prost(bool, tag = "3")]
    pub is_dead: bool,
    /// The bytes: a [`RecvBufRespExtra`].
    #[prost(message, optional, tag = "4")]
    pub transport_options: Option<Any>,
    /// When it was sent, in microseconds since 1970.
    #[prost(int64, tag = "5")]
    pub send_start_micros: i64,
    /// Whether MarkRecvFinished must follow.
    #[prost(bool, tag = "6")]
    pub require_ack: bool,
}

/// `tensorflow.RecvBufRespExtra`: the bytes of a [`RecvBufResponse`].
#[derive(Clone, PartialEq, prost::Message)]
pub struct RecvBufRespExtra {
    /// In chunks, to be concatenated.
    #[prost(bytes = "bytes", repeated, tag = "1")]
    pub tensor_content: Vec<Bytes>,
}

/// `tensorflow.CompleteGroupRequest`: a device joins a group.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CompleteGroupRequest {
    /// The group.
    #[prost(int32, tag = "1")]
    pub group_key: i32,
    /// The number of devices it will have.
    #[prost(int32, tag = "2")]
    pub group_size: i32,
    /// Their type.
    #[prost(string, tag = "3")]
    pub device_type: String,
    /// The device (TensorFlow 1).
    #[prost(string, repeated, tag = "4")]
    pub device_name: Vec<String>,
    /// The kind of collective.
    #[prost(int32, tag = "5")]
    pub collective_type: i32,
    /// The device (TensorFlow 2).
    #[prost(message, optional, tag = "6")]
    pub device_attributes: Option<DeviceAttributes>,
}

/// `tensorflow.CompleteGroupResponse`: the group is complete.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CompleteGroupResponse {
    /// The group.
    #[prost(int32, tag = "1")]
    pub group_key: i32,
    /// The number of its devices.
    #[prost(int32, tag = "2")]
    pub group_size: i32,
    /// Their type.
    #[prost(string, tag = "3")]
    pub device_type: String,
    /// The number of tasks they belong to.
    #[prost(int32, tag = "4")]
    pub num_tasks: i32,
    /// The devices by rank (TensorFlow 1).
    #[prost(string, repeated, tag = "5")]
    pub device_name: Vec<String>,
    /// The task of each (TensorFlow 1).
    #[prost(string, repeated, tag = "6")]
    pub task_name: Vec<String>,
    /// A key for NCCL.
    #[prost(bytes = "bytes", tag = "7")]
    pub communicator_key: Bytes,
    /// The devices by rank (TensorFlow 2).
    #[prost(message, repeated, tag = "8")]
    pub device_attributes: Vec<DeviceAttributes>,
}

/// `tensorflow.CompleteInstanceRequest`: a device joins a collective.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CompleteInstanceRequest {
    /// The collective's name, for messages.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Its kind.
    #[prost(int32, tag = "2")]
    pub r#type: i32,
    /// The dtype's number.
    #[prost(int32, tag = "3")]
    pub data_type: i32,
    /// The shape.
    #[prost(message, optional, tag = "4")]
    pub shape: Option<TensorShapeProto>,
    /// The group.
    #[prost(int32, tag = "5")]
    pub group_key: i32,
    /// The number of its devices.
    #[prost(int32, tag = "6")]
    pub group_size: i32,
    /// The collective.
    #[prost(int32, tag = "7")]
    pub instance_key: i32,
    /// The devices' type.
    #[prost(string, tag = "8")]
    pub device_type: String,
    /// The offsets at which rings are split.
    #[prost(int32, repeated, tag = "9")]
    pub subdiv_offset: Vec<i32>,
    /// The device.
    #[prost(string, tag = "10")]
    pub device: String,
    /// Whether it is the source of a broadcast.
    #[prost(bool, tag = "11")]
    pub is_source: bool,
    /// The step.
    #[prost(int64, tag = "12")]
    pub step_id: i64,
}

/// `tensorflow.CompleteInstanceResponse`: the collective may begin.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CompleteInstanceResponse {
    /// The collective.
    #[prost(int32, tag = "1")]
    pub instance_key: i32,
    /// The source of a broadcast, or -1.
    #[prost(int32, tag = "2")]
    pub source_rank: i32,
}

/// `tensorflow.GetStepSequenceRequest`: requests ids of steps with collectives.
#[derive(Clone, PartialEq, prost::Message)]
pub struct GetStepSequenceRequest {
    /// The graphs.
    #[prost(int64, repeated, tag = "1")]
    pub graph_key: Vec<i64>,
}

/// `tensorflow.StepSequence`: the next step of a graph.
#[derive(Clone, PartialEq, prost::Message)]
pub struct StepSequence {
    /// The graph.
    #[prost(int64, tag = "1")]
    pub graph_key: i64,
    /// Its next step.
    #[prost(int64, tag = "2")]
    pub next_step_id: i64,
}

/// `tensorflow.GetStepSequenceResponse`: the step ids.
#[derive(Clone, PartialEq, prost::Message)]
pub struct GetStepSequenceResponse {
    /// By graph.
    #[prost(message, repeated, tag = "1")]
    pub step_sequence: Vec<StepSequence>,
}
