//! The client's side: `Session::connect`, and a session on a server.

pub(crate) mod connect;
pub(crate) mod session;
