//! Sessions in another process: the trait by which [`Session`](crate::Session) calls a server.
//!
//! The client's side keeps the graph: it turns outputs into names, refuses feeds of the wrong type or shape before they
//! are sent, and sends only nodes that the server does not have. Everything else (pruning, placement, running) is done
//! by the server.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kolo_core::{Error, Result, Tensor};
use kolo_device::DeviceAttributes;
use kolo_graph::{Graph, Nodes, Output, PlacementRules};
use parking_lot::{Mutex, RwLock};

use crate::config::{RunOptions, SessionConfig};
use crate::session::RunMetadata;
use crate::session::wanted::{Announced, FeedInfo, Wanted, check_n_feeds};

/// Sends the calls of one session to its server. Implemented by `kolo-net`.
///
/// Calls come from many threads at once. Each must return within its deadline (or a default of the implementation if it
/// has none) and must return soon after [`RemoteSession::close`], with `Cancelled`. Errors keep the server's code and
/// message; a server that cannot be reached is `Unavailable`.
pub trait RemoteSession: Send + Sync {
    /// The server's address, such as `grpc://10.0.0.1:2222`. For messages.
    fn target(&self) -> &str;

    /// Sends the nodes from index `first_new` on; the server has all before it. The devices of nodes are those that the
    /// program and its placement rules requested, perhaps partial.
    ///
    /// [`Session::remote`](crate::Session::remote) makes the first call, with `first_new` 0 and perhaps no nodes, so
    /// this call can create the session on the server. Calls are made one at a time; after one that failed, the next
    /// sends the same nodes again.
    fn extend(&self, nodes: &Nodes, first_new: usize) -> Result<()>;

    /// Runs a step; returns one value per fetch, in order. The trace in the metadata may be empty if none was
    /// requested.
    fn run(&self, run: &RemoteRun<'_>) -> Result<(Vec<Tensor>, RunMetadata)>;

    /// Sets up a partial run; returns the handle for its calls. Feeds and fetches are names such as `x:0`, targets such
    /// as `x`.
    fn begin_partial(&self, feeds: &[String], fetches: &[String], targets: &[String]) -> Result<String>;

    /// One call of the partial run `handle`: feeds some of the declared feeds and returns one value per fetch. Its
    /// targets are empty; declared nodes run as soon as they can.
    fn run_partial(&self, handle: &str, run: &RemoteRun<'_>) -> Result<Vec<Tensor>>;

    /// The devices that the session may use, of all tasks.
    fn list_devices(&self) -> Result<Vec<DeviceAttributes>>;

    /// Removes the variables, queues and other resources of these containers on all tasks; of all containers if none is
    /// named. As in TensorFlow, sessions that use them end.
    fn reset(&self, containers: &[String]) -> Result<()>;

    /// Closes the session on the server and stops its runs in flight; errors are ignored. Called once, and last.
    fn close(&self);
}

/// One run of a remote session.
#[derive(Clone)]
pub struct RemoteRun<'a> {
    /// Values by the name of the fed tensor, such as `x:0`. Types and shapes have been checked.
    pub feeds: &'a [(&'a str, &'a Tensor)],
    /// The tensors to return, such as `x:0`.
    pub fetches: &'a [String],
    /// The operations to run, such as `x`.
    pub targets: &'a [String],
    /// The timeout, whether to trace, and the cancellation token. The timeout is the session's, if the run has none.
    pub options: &'a RunOptions,
}

/// The client's side of a remote session.
pub(crate) struct Remote {
    backend: Arc<dyn RemoteSession>,
    /// The nodes that the server has, with the placement rules applied.
    pub nodes: RwLock<Nodes>,
    /// Locked while nodes are sent, so that they arrive in order.
    extending: Mutex<()>,
    config: SessionConfig,
    is_closed: AtomicBool,
}

impl Remote {
    pub fn new(graph: &Graph, backend: Arc<dyn RemoteSession>, config: SessionConfig) -> Result<Remote> {
        graph.check()?;
        let nodes = config.placement_rules.apply(&graph.snapshot());
        // Constructed first, so that the session is closed if extending it fails.
        let remote = Remote {
            backend,
            nodes: RwLock::default(),
            extending: Mutex::default(),
            config,
            is_closed: AtomicBool::new(false),
        };
        remote.backend.extend(&nodes, 0)?;
        *remote.nodes.write() = nodes;
        Ok(remote)
    }

    pub fn extend(&self, graph: &Graph) -> Result<()> {
        graph.check()?;
        self.check_open()?;
        let _one_at_a_time = self.extending.lock();
        let new = self.rules().apply(&graph.snapshot());
        let n_known = {
            let known = self.nodes.read();
            let is_same = known.iter().zip(new.iter()).all(|((_, old), (_, new))| old.name == new.name);
            if new.len() < known.len() || !is_same {
                return Err(Error::invalid_argument(
                    "extend takes the session's own graph, grown; this is another one",
                ));
            }
            known.len()
        };
        if new.len() > n_known {
            self.backend.extend(&new, n_known)?;
            *self.nodes.write() = new;
        }
        Ok(())
    }

    /// The error of a call that only a session in this process supports.
    pub fn only_local(&self) -> Error {
        Error::failed_precondition(format!(
            "this session runs on {}: placement, memory, threads and captures belong to its servers; ask them with `kolo \
             doctor`, set log_device_placement to have the master log where nodes go, or start the servers with the settings \
             you want",
            self.backend.target()
        ))
    }

    fn rules(&self) -> &PlacementRules {
        &self.config.placement_rules
    }

    pub fn run(&self, wanted: &Wanted, values: &[&Tensor], options: &RunOptions) -> Result<(Vec<Tensor>, RunMetadata)> {
        self.check_open()?;
        self.run_names(&Names::new(&self.nodes.read(), wanted), values, options)
    }

    fn run_names(&self, names: &Names, values: &[&Tensor], options: &RunOptions) -> Result<(Vec<Tensor>, RunMetadata)> {
        self.check_open()?;
        let mut feeds = Vec::with_capacity(values.len());
        for (info, value) in names.feeds.iter().zip(values) {
            info.check(value)?;
            feeds.push((info.name.as_str(), *value));
        }
        let options = self.with_limit(options);
        let run = RemoteRun { feeds: &feeds, fetches: &names.fetches, targets: &names.targets, options: &options };
        let (values, metadata) = self.backend.run(&run)?;
        Ok((check_n_values(values, names.fetches.len())?, metadata))
    }

    /// Applies the session's timeout to runs without one.
    fn with_limit(&self, options: &RunOptions) -> RunOptions {
        RunOptions { timeout: options.timeout.or(self.config.operation_timeout), ..options.clone() }
    }

    pub fn make_callable(self: &Arc<Self>, wanted: &Wanted) -> Result<RemoteCallable> {
        self.check_open()?;
        Ok(RemoteCallable { names: Arc::new(Names::new(&self.nodes.read(), wanted)), session: self.clone() })
    }

    pub fn partial_run(self: &Arc<Self>, wanted: Wanted) -> Result<RemotePartialRun> {
        self.check_open()?;
        let names = Names::new(&self.nodes.read(), &wanted);
        let feeds: Vec<String> = names.feeds.iter().map(|info| info.name.clone()).collect();
        let handle = self.backend.begin_partial(&feeds, &names.fetches, &names.targets)?;
        Ok(RemotePartialRun { session: self.clone(), announced: Announced::new(wanted), names, handle })
    }

    pub fn list_devices(&self) -> Result<Vec<DeviceAttributes>> {
        self.check_open()?;
        self.backend.list_devices()
    }

    pub fn reset(&self, containers: &[String]) -> Result<()> {
        self.check_open()?;
        self.backend.reset(containers)
    }

    pub fn close(&self) {
        if !self.is_closed.swap(true, Ordering::AcqRel) {
            self.backend.close();
        }
    }

    fn check_open(&self) -> Result<()> {
        match self.is_closed.load(Ordering::Acquire) {
            false => Ok(()),
            true => Err(Error::failed_precondition("the session is closed; make a new one")),
        }
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.close();
    }
}

fn check_n_values(values: Vec<Tensor>, n_fetches: usize) -> Result<Vec<Tensor>> {
    match values.len() == n_fetches {
        true => Ok(values),
        false => Err(Error::internal(format!("the server gave {} values for {n_fetches} fetches", values.len()))),
    }
}

/// The feeds, fetches and targets of a run, by name.
struct Names {
    feeds: Vec<FeedInfo>,
    fetches: Vec<String>,
    targets: Vec<String>,
}

impl Names {
    fn new(nodes: &Nodes, wanted: &Wanted) -> Names {
        Names {
            feeds: wanted.feed_infos(nodes),
            fetches: wanted.fetches.iter().map(|&at| nodes.endpoint_name(at)).collect(),
            targets: wanted.targets.iter().map(|&id| nodes.node(id).name.to_string()).collect(),
        }
    }
}

/// A run with fixed names.
#[derive(Clone)]
pub(crate) struct RemoteCallable {
    session: Arc<Remote>,
    names: Arc<Names>,
}

impl RemoteCallable {
    pub fn call(&self, options: &RunOptions, values: &[&Tensor]) -> Result<(Vec<Tensor>, RunMetadata)> {
        self.session.check_open()?;
        check_n_feeds(self.names.feeds.len(), values.len())?;
        self.session.run_names(&self.names, values, options)
    }
}

/// A partial run under its handle.
pub(crate) struct RemotePartialRun {
    session: Arc<Remote>,
    announced: Announced,
    names: Names,
    handle: String,
}

impl RemotePartialRun {
    pub fn run(&mut self, fetches: &[Output<'_>], feeds: &[(Output<'_>, Tensor)]) -> Result<Vec<Tensor>> {
        self.session.check_open()?;
        let admitted = self.announced.admit(&self.session.nodes.read(), &self.names.feeds, fetches, feeds)?;
        let feeds: Vec<(&str, &Tensor)> =
            admitted.feeds.iter().map(|&(at, value)| (self.names.feeds[at].name.as_str(), value)).collect();
        let fetches: Vec<String> = admitted.fetches.iter().map(|&at| self.names.fetches[at].clone()).collect();
        let options = self.session.with_limit(&RunOptions::default());
        // Feeds count as used even if the call fails: the server may have received them.
        self.announced.feed(&admitted);
        let run = RemoteRun { feeds: &feeds, fetches: &fetches, targets: &[], options: &options };
        let values = self.session.backend.run_partial(&self.handle, &run)?;
        self.announced.take(&admitted);
        check_n_values(values, fetches.len())
    }
}
