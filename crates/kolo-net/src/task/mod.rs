//! One task of a cluster: the server, its worker and master services, and its connections to the other tasks.

mod health;
pub(crate) mod master;
pub(crate) mod overdue;
pub(crate) mod peers;
pub(crate) mod random;
pub(crate) mod request_ids;
pub(crate) mod server;
pub mod services;
pub(crate) mod worker;
