//! Clusters: tasks that speak TensorFlow's own protocol to each other and to their clients.
//!
//! `proto/` holds the messages, `services.rs` the services of a task, as two traits. A trait object is a task of this
//! process or a connection to one of another process; callers need not know which. `worker/` and `master/` implement
//! the tasks of this process, `grpc/` and `framed/` the transports to others.

mod batch;
mod client;
pub mod cluster;
mod connect;
pub mod doctor;
mod framed;
pub mod grpc;
mod journal;
pub mod limits;
mod master;
mod overdue;
mod peers;
pub mod proto;
mod random;
mod replica;
mod request_ids;
mod server;
pub mod services;
pub mod tensor_wire;
pub mod tls;
mod worker;

pub use cluster::{ClusterSpec, TfConfig};
pub use connect::Connect;
pub use journal::Durability;
pub use peers::TaskName;
pub use server::{Server, ServerConfig};
