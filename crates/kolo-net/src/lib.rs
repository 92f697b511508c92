//! Clusters: tasks that speak TensorFlow's own protocol to each other and to their clients.
//!
//! `proto/` holds the messages, `services.rs` what a task does for others, as two traits. A trait object is a task of this
//! process or, through a connection, of another one; whoever calls it need not know.

pub mod limits;
pub mod proto;
pub mod services;
pub mod tensor_wire;
