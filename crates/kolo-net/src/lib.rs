//! Clusters: tasks that speak TensorFlow's own protocol to each other and to their clients.
//!
//! From the outside in: `cluster/` says which tasks there are, `client/` is a session on one of them, `transport/` carries
//! messages between processes, `wire/` holds the messages, `task/` is one task (its services as two traits, the server, its
//! worker and its master), `durability/` keeps variables when a task dies, `doctor` says why a step does not end. A service's
//! trait object is a task of this process or a connection to one of another process; callers need not know which.

pub mod agents;
mod client;
pub mod cluster;
pub mod doctor;
mod durability;
mod task;
mod transport;
mod wire;

pub use client::connect::Connect;
pub use cluster::{ClusterSpec, TfConfig};
pub use durability::journal::Durability;
pub use task::peers::TaskName;
pub use task::server::{Server, ServerConfig};
pub use task::services;
pub use transport::{grpc, ranks, tls};
pub use wire::{limits, proto, tensor_wire};
