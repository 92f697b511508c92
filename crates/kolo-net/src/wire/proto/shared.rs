//! Messages that both services use.

use std::collections::BTreeMap;

use bytes::Bytes;

use crate::wire::tensor_wire::WireTensor;

/// `tensorflow.NamedTensorProto`: a tensor and its name. In a RunStep the name is an endpoint such as `x:0`, in a
/// RunGraph the key of a rendezvous.
#[derive(Clone, PartialEq, prost::Message)]
pub struct NamedTensorProto {
    /// The name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// The tensor.
    #[prost(message, optional, tag = "2")]
    pub tensor: Option<WireTensor>,
}

/// `google.protobuf.Any`: a message of a type that only its user knows.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Any {
    /// The type, such as `type.googleapis.com/tensorflow.RecvBufRespExtra`.
    #[prost(string, tag = "1")]
    pub type_url: String,
    /// The message's bytes.
    #[prost(bytes = "bytes", tag = "2")]
    pub value: Bytes,
}

/// `tensorflow.distributed_runtime.GrpcPayloadContainer`: what TensorFlow 2 adds to an error, in the trailer
/// `grpc-status-details-bin`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct GrpcPayloadContainer {
    /// Values by type.
    #[prost(btree_map = "string, bytes", tag = "1")]
    pub payloads: BTreeMap<String, Vec<u8>>,
}
