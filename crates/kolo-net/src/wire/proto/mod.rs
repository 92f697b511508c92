//! The messages of TensorFlow's services, with TensorFlow's names and field numbers.
//!
//! They are written as those of [`kolo_graph::wire::proto`] are, and use them for graphs. Tensors are
//! [`WireTensor`](crate::wire::tensor_wire::WireTensor)s, which are decoded into and encoded from a tensor's memory without
//! an intermediate copy. Enums are plain `i32`s, since a newer peer may send values that we do not know. Names that
//! TensorFlow nests in other messages are flat here: `ConfigProto.Experimental` is [`ConfigExperimental`].

mod cluster;
mod config;
mod device;
mod master;
mod meet;
mod recv_tensor;
mod replica;
mod report;
mod run;
mod shared;
mod step_stats;
mod worker;

pub use cluster::*;
pub use config::*;
pub use device::*;
pub use master::*;
pub use meet::*;
pub use recv_tensor::RecvTensorResponse;
pub use replica::*;
pub use report::*;
pub use run::*;
pub use shared::*;
pub use step_stats::*;
pub use worker::*;

#[cfg(test)]
mod tests;
