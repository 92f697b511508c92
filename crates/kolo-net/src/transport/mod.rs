//! How messages cross the network: gRPC for everyone, Kolo's framed protocol between its own tasks, and TLS under both. Ranks of a
//! group have connections of their own.

pub(crate) mod batch;
pub(crate) mod complaints;
pub(crate) mod connection;
pub(crate) mod framed;
pub mod grpc;
pub mod ranks;
pub mod tls;
pub(crate) mod user_token;
