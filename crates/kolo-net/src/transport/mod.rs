//! How messages cross the network: gRPC for everyone, Kolo's framed protocol between its own processes, and TLS under both.

pub(crate) mod batch;
pub(crate) mod complaints;
pub(crate) mod connection;
pub(crate) mod framed;
pub mod grpc;
pub mod tls;
pub(crate) mod user_token;
