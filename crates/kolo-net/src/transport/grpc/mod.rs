//! The two services over gRPC: [`serve`] answers for this process's tasks, [`GrpcPeer`] and [`GrpcMaster`] ask others.
//!
//! ```text
//!   GrpcPeer ─ link ─┐                                ┌─ server ─ dyn WorkerService
//!                    ├─ frame ═ HTTP/2 (TLS) ═ frame ─┤
//!   GrpcMaster ──────┘                                └────────── dyn MasterService
//! ```
//!
//! gRPC is thin: a message with a five-byte prefix in the body of an HTTP/2 request, and a status in the trailers of
//! the response. `frame` implements just that, on hyper. Generated code would copy each message into one buffer, twice;
//! here a tensor's bytes are passed to the socket without a copy, and are copied once on arrival, into the tensor's
//! memory.
//!
//! Dropping an [`Answer`](crate::task::services::Answer) resets the stream, which drops the handler's future at the other
//! end. Every wait has a deadline, except for the response to a call without one.

mod frame;
mod link;
mod opening;
mod options;
mod peer;
mod place;
mod server;
pub mod status;

#[cfg(test)]
mod tests;

pub(crate) use link::explain;
pub(crate) use options::set_up;
pub use options::{LinkOptions, ReceiveMemory, ServerOptions};
pub use peer::{GrpcMaster, GrpcPeer};
pub use server::serve;
pub(crate) use server::{OtherProtocol, serve_with};
