//! Where training sessions come from.

use std::sync::Arc;

use kolo_core::Result;
use kolo_graph::Graph;
use kolo_runtime::{Host, Session, SessionConfig};

/// Opens sessions over a graph. Training code asks it for the first session, and for another one when the first is lost.
///
/// A [`SessionConfig`] opens a local session with devices of its own each time, so nothing outlives it but checkpoints. A
/// [`Host`] keeps its variables from one session to the next, as a server does. A closure may do anything else.
pub trait SessionSource {
    /// A session over `graph`.
    fn open(&self, graph: &Graph) -> Result<Arc<Session>>;
}

impl SessionSource for SessionConfig {
    fn open(&self, graph: &Graph) -> Result<Arc<Session>> {
        Session::with_config(graph, self.clone()).map(Arc::new)
    }
}

impl SessionSource for Host {
    fn open(&self, graph: &Graph) -> Result<Arc<Session>> {
        self.session(graph).map(Arc::new)
    }
}

impl<F: Fn(&Graph) -> Result<Arc<Session>>> SessionSource for F {
    fn open(&self, graph: &Graph) -> Result<Arc<Session>> {
        self(graph)
    }
}
