//! The connection that a call came over, for the services that keep something for their callers: a session lives as long as
//! a connection that has used it, and a lease beyond.

use std::future::Future;
use std::sync::Arc;

tokio::task_local! {
    static CURRENT: Arc<ConnectionId>;
}

/// One connection, as long as it is open.
#[derive(Debug)]
pub(crate) struct ConnectionId(());

impl ConnectionId {
    pub fn new() -> Arc<ConnectionId> {
        Arc::new(ConnectionId(()))
    }
}

/// A call that came over this connection.
pub(crate) fn on<T>(connection: Arc<ConnectionId>, call: impl Future<Output = T>) -> impl Future<Output = T> {
    CURRENT.scope(connection, call)
}

/// The connection of the call that is being answered; `None` for a call from this process.
pub(crate) fn current() -> Option<Arc<ConnectionId>> {
    CURRENT.try_with(Arc::clone).ok()
}
