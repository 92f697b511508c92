//! The messages of `MasterService`, which a client calls.

use kolo_graph::wire::proto::GraphDef;

use super::{CallableOptions, ConfigProto, DeviceAttributes, NamedTensorProto, RunMetadata, RunOptions};
use crate::wire::tensor_wire::WireTensor;

/// `tensorflow.CreateSessionRequest`: creates a session.
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

/// `tensorflow.CreateSessionResponse`: the session is created.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CreateSessionResponse {
    /// Its handle.
    #[prost(string, tag = "1")]
    pub session_handle: String,
    /// The graph's version, to be sent with the first ExtendSession.
    #[prost(int64, tag = "2")]
    pub graph_version: i64,
}

/// `tensorflow.ExtendSessionRequest`: adds nodes to a session's graph.
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

/// `tensorflow.ExtendSessionResponse`: the nodes are added.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ExtendSessionResponse {
    /// The graph's version, to be sent with the next ExtendSession.
    #[prost(int64, tag = "4")]
    pub new_graph_version: i64,
}

/// `tensorflow.RunStepRequest`: runs a step.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RunStepRequest {
    /// The session.
    #[prost(string, tag = "1")]
    pub session_handle: String,
    /// Values, by endpoint such as `x:0`.
    #[prost(message, repeated, tag = "2")]
    pub feed: Vec<NamedTensorProto>,
    /// Endpoints to fetch.
    #[prost(string, repeated, tag = "3")]
    pub fetch: Vec<String>,
    /// Further nodes to run.
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

/// `tensorflow.RunStepResponse`: the results of a step.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RunStepResponse {
    /// The fetched values, by endpoint, in any order.
    #[prost(message, repeated, tag = "1")]
    pub tensor: Vec<NamedTensorProto>,
    /// Traces and graphs, if requested.
    #[prost(message, optional, tag = "2")]
    pub metadata: Option<RunMetadata>,
    /// The error's code, or 0.
    #[prost(int32, tag = "3")]
    pub status_code: i32,
    /// The error's text.
    #[prost(string, tag = "4")]
    pub status_error_message: String,
}

/// `tensorflow.PartialRunSetupRequest`: starts a step that is fed and fetched in parts.
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
    /// Further nodes to run.
    #[prost(string, repeated, tag = "4")]
    pub target: Vec<String>,
    /// A random number; 0 is none.
    #[prost(int64, tag = "5")]
    pub request_id: i64,
}

/// `tensorflow.PartialRunSetupResponse`: the step has started.
#[derive(Clone, PartialEq, prost::Message)]
pub struct PartialRunSetupResponse {
    /// Its handle.
    #[prost(string, tag = "1")]
    pub partial_run_handle: String,
}

/// `tensorflow.CloseSessionRequest`: closes a session and cancels its steps.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CloseSessionRequest {
    /// The session.
    #[prost(string, tag = "1")]
    pub session_handle: String,
}

/// `tensorflow.CloseSessionResponse`: the session is closed.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CloseSessionResponse {}

/// `tensorflow.ResetRequest`: closes all sessions and clears containers.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ResetRequest {
    /// The containers; empty is the default one.
    #[prost(string, repeated, tag = "1")]
    pub container: Vec<String>,
    /// The tasks to reset.
    #[prost(string, repeated, tag = "2")]
    pub device_filters: Vec<String>,
}

/// `tensorflow.ResetResponse`: they are closed and cleared.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ResetResponse {}

/// `tensorflow.ListDevicesRequest`: lists devices.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ListDevicesRequest {
    /// The session whose devices to list; empty is the server.
    #[prost(string, tag = "1")]
    pub session_handle: String,
}

/// `tensorflow.ListDevicesResponse`: the devices.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ListDevicesResponse {
    /// The server's own.
    #[prost(message, repeated, tag = "1")]
    pub local_device: Vec<DeviceAttributes>,
    /// Those of other tasks.
    #[prost(message, repeated, tag = "2")]
    pub remote_device: Vec<DeviceAttributes>,
}

/// `tensorflow.MakeCallableRequest`: makes a callable.
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

/// `tensorflow.MakeCallableResponse`: the callable is made.
#[derive(Clone, PartialEq, prost::Message)]
pub struct MakeCallableResponse {
    /// Its handle. The first is 0.
    #[prost(int64, tag = "1")]
    pub handle: i64,
}

/// `tensorflow.RunCallableRequest`: runs a callable.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RunCallableRequest {
    /// The session.
    #[prost(string, tag = "1")]
    pub session_handle: String,
    /// The step.
    #[prost(int64, tag = "2")]
    pub handle: i64,
    /// The values, in the order of the callable's options.
    #[prost(message, repeated, tag = "3")]
    pub feed: Vec<WireTensor>,
    /// A random number; 0 is none.
    #[prost(int64, tag = "4")]
    pub request_id: i64,
}

/// `tensorflow.RunCallableResponse`: the results of a step.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RunCallableResponse {
    /// The values, in the order of the callable's options.
    #[prost(message, repeated, tag = "1")]
    pub fetch: Vec<WireTensor>,
    /// Traces and graphs, if requested.
    #[prost(message, optional, tag = "2")]
    pub metadata: Option<RunMetadata>,
}

/// `tensorflow.ReleaseCallableRequest`: releases a callable.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ReleaseCallableRequest {
    /// The session.
    #[prost(string, tag = "1")]
    pub session_handle: String,
    /// The step.
    #[prost(int64, tag = "2")]
    pub handle: i64,
}

/// `tensorflow.ReleaseCallableResponse`: it is released.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ReleaseCallableResponse {}
