//! The messages of `MasterService`, which a client calls.

use kolo_graph::wire::proto::GraphDef;

use super::{CallableOptions, ConfigProto, DeviceAttributes, NamedTensorProto, RunMetadata, RunOptions};
use crate::tensor_wire::WireTensor;

/// `tensorflow.CreateSessionRequest`: open a session.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CreateSessionRequest {
    /// The graph so far, often empty.
    #[prost(message, optional, tag = "1")]
    pub graph_def: Option<GraphDef>,
    /// The options.
    #[prost(message, optional, tag = "2")]
    pub config: Option<ConfigProto>,
    /// The address the client used, with `grpc://`.
    #[prost(string, tag = "3")]
    pub target: String,
}

/// `tensorflow.CreateSessionResponse`: a session is open.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CreateSessionResponse {
    /// What to call it from now on.
    #[prost(string, tag = "1")]
    pub session_handle: String,
    /// To be sent with the first ExtendSession.
    #[prost(int64, tag = "2")]
    pub graph_version: i64,
}

/// `tensorflow.ExtendSessionRequest`: add nodes to a session's graph.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ExtendSessionRequest {
    /// The session.
    #[prost(string, tag = "1")]
    pub session_handle: String,
    /// The new nodes, and all functions.
    #[prost(message, optional, tag = "2")]
    pub graph_def: Option<GraphDef>,
    /// The version that they extend.
    #[prost(int64, tag = "3")]
    pub current_graph_version: i64,
}

/// `tensorflow.ExtendSessionResponse`: the nodes are there.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ExtendSessionResponse {
    /// To be sent with the next ExtendSession.
    #[prost(int64, tag = "4")]
    pub new_graph_version: i64,
}

/// `tensorflow.RunStepRequest`: run a step.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RunStepRequest {
    /// The session.
    #[prost(string, tag = "1")]
    pub session_handle: String,
    /// Values, by endpoint such as `x:0`.
    #[prost(message, repeated, tag = "2")]
    pub feed: Vec<NamedTensorProto>,
    /// Endpoints whose values are wanted.
    #[prost(string, repeated, tag = "3")]
    pub fetch: Vec<String>,
    /// Nodes to run besides.
    #[prost(string, repeated, tag = "4")]
    pub target: Vec<String>,
    /// The options.
    #[prost(message, optional, tag = "5")]
    pub options: Option<RunOptions>,
    /// The partial run that this is a part of.
    #[prost(string, tag = "6")]
    pub partial_run_handle: String,
    /// Whether an error comes back in the response and not as the call's status.
    #[prost(bool, tag = "7")]
    pub store_errors_in_response_body: bool,
    /// A random number; 0 is none. A repeated one is refused.
    #[prost(int64, tag = "8")]
    pub request_id: i64,
}

/// `tensorflow.RunStepResponse`: what the step gave.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RunStepResponse {
    /// The fetched values, by endpoint, in any order.
    #[prost(message, repeated, tag = "1")]
    pub tensor: Vec<NamedTensorProto>,
    /// Traces and graphs, if they were asked for.
    #[prost(message, optional, tag = "2")]
    pub metadata: Option<RunMetadata>,
    /// The error's code, or 0.
    #[prost(int32, tag = "3")]
    pub status_code: i32,
    /// The error's text.
    #[prost(string, tag = "4")]
    pub status_error_message: String,
}

/// `tensorflow.PartialRunSetupRequest`: begin a step that is fed and fetched in parts.
#[derive(Clone, PartialEq, prost::Message)]
pub struct PartialRunSetupRequest {
    /// The session.
    #[prost(string, tag = "1")]
    pub session_handle: String,
    /// All endpoints that will be fed.
    #[prost(string, repeated, tag = "2")]
    pub feed: Vec<String>,
    /// All endpoints that may be fetched.
    #[prost(string, repeated, tag = "3")]
    pub fetch: Vec<String>,
    /// Nodes to run besides.
    #[prost(string, repeated, tag = "4")]
    pub target: Vec<String>,
    /// A random number; 0 is none.
    #[prost(int64, tag = "5")]
    pub request_id: i64,
}

/// `tensorflow.PartialRunSetupResponse`: the step has begun.
#[derive(Clone, PartialEq, prost::Message)]
pub struct PartialRunSetupResponse {
    /// What to call it.
    #[prost(string, tag = "1")]
    pub partial_run_handle: String,
}

/// `tensorflow.CloseSessionRequest`: end a session and its steps.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CloseSessionRequest {
    /// The session.
    #[prost(string, tag = "1")]
    pub session_handle: String,
}

/// `tensorflow.CloseSessionResponse`: the session is gone.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CloseSessionResponse {}

/// `tensorflow.ResetRequest`: end all sessions and clear containers.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ResetRequest {
    /// The containers; empty is the default one.
    #[prost(string, repeated, tag = "1")]
    pub container: Vec<String>,
    /// On which tasks.
    #[prost(string, repeated, tag = "2")]
    pub device_filters: Vec<String>,
}

/// `tensorflow.ResetResponse`: they are gone.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ResetResponse {}

/// `tensorflow.ListDevicesRequest`: which devices are there?
#[derive(Clone, PartialEq, prost::Message)]
pub struct ListDevicesRequest {
    /// Those of this session; empty is those of the server.
    #[prost(string, tag = "1")]
    pub session_handle: String,
}

/// `tensorflow.ListDevicesResponse`: these are.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ListDevicesResponse {
    /// The server's own.
    #[prost(message, repeated, tag = "1")]
    pub local_device: Vec<DeviceAttributes>,
    /// Those of other tasks.
    #[prost(message, repeated, tag = "2")]
    pub remote_device: Vec<DeviceAttributes>,
}

/// `tensorflow.MakeCallableRequest`: describe a step that is to run often.
#[derive(Clone, PartialEq, prost::Message)]
pub struct MakeCallableRequest {
    /// The session.
    #[prost(string, tag = "1")]
    pub session_handle: String,
    /// The step.
    #[prost(message, optional, tag = "2")]
    pub options: Option<CallableOptions>,
    /// A random number; 0 is none.
    #[prost(int64, tag = "3")]
    pub request_id: i64,
}

/// `tensorflow.MakeCallableResponse`: the step is ready.
#[derive(Clone, PartialEq, prost::Message)]
pub struct MakeCallableResponse {
    /// What to call it. The first is 0.
    #[prost(int64, tag = "1")]
    pub handle: i64,
}

/// `tensorflow.RunCallableRequest`: run a step that was described before.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RunCallableRequest {
    /// The session.
    #[prost(string, tag = "1")]
    pub session_handle: String,
    /// The step.
    #[prost(int64, tag = "2")]
    pub handle: i64,
    /// The values, in the order of the description.
    #[prost(message, repeated, tag = "3")]
    pub feed: Vec<WireTensor>,
    /// A random number; 0 is none.
    #[prost(int64, tag = "4")]
    pub request_id: i64,
}

/// `tensorflow.RunCallableResponse`: what the step gave.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RunCallableResponse {
    /// The values, in the order of the description.
    #[prost(message, repeated, tag = "1")]
    pub fetch: Vec<WireTensor>,
    /// Traces and graphs, if they were asked for.
    #[prost(message, optional, tag = "2")]
    pub metadata: Option<RunMetadata>,
}

/// `tensorflow.ReleaseCallableRequest`: forget a step that was described before.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ReleaseCallableRequest {
    /// The session.
    #[prost(string, tag = "1")]
    pub session_handle: String,
    /// The step.
    #[prost(int64, tag = "2")]
    pub handle: i64,
}

/// `tensorflow.ReleaseCallableResponse`: it is forgotten.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ReleaseCallableResponse {}
