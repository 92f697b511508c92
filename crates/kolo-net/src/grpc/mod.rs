//! The two services over gRPC: [`serve`] answers for this process's tasks, [`GrpcPeer`] and [`GrpcMaster`] ask others.
//!
//! ```text
//!   GrpcPeer ─ link ─┐                                ┌─ server ─ dyn WorkerService
//!                    ├─ frame ═ HTTP/2 (TLS) ═ frame ─┤
//!   GrpcMaster ──────┘                                └────────── dyn MasterService
//! ```
//!
//! gRPC is thin: a message behind five bytes of length in the body of an HTTP/2 request, and a status in the trailers of
//! the response. `frame` does just that, on hyper. A code generator would put each message into one buffer, twice: this
//! way a tensor's bytes are handed to the socket as they are, and are copied once on arrival, to where they stay.
//!
//! Dropping an [`Answer`](crate::services::Answer) resets the stream, which drops the handler's future at the other end.
//! Nothing here waits without a deadline, but for an answer that was asked for without one.

mod frame;
mod link;
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
