//! Sessions that live in another process: what [`Session`](crate::Session) asks of whoever carries its calls there.
//!
//! The client's side keeps the graph: it turns outputs into names, refuses feeds of the wrong type or shape before they
//! travel, and sends only nodes that the other side has not seen. Everything else (pruning, placement, running) is the
//! server's.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kolo_core::{Error, Result, Tensor};
use kolo_device::DeviceAttributes;
use kolo_graph::{Graph, Nodes, Output, PlacementRules};
use parking_lot::{Mutex, RwLock};

use crate::config::{RunOptions, SessionConfig};
use crate::session::RunMetadata;
use crate::wanted::{Announced, FeedInfo, Wanted, check_n_feeds};

/// Carries the calls of one session to the process where it lives. `kolo-net` implements it over gRPC.
///
/// Calls come from many threads at once. Each must return within its deadline (or within one of the implementation's own
/// where it has none) and must return soon after [`RemoteSession::close`], with `Cancelled`. Errors keep the code and the
/// message of the other side; a peer that cannot be reached is `Unavailable`.
pub trait RemoteSession: Send + Sync {
    /// Sends the nodes from number `first_new` on; the other side has all before it. The devices of nodes are what the
    /// program and its placement rules asked for, perhaps in part.
    ///
    /// [`Session::remote`](crate::Session::remote) makes the first call, with `first_new` 0 and perhaps no nodes at all, so
    /// this is also where a session can be made over there. Calls are made one at a time; after one that failed, the next
    /// sends the same nodes again.
    fn extend(&self, nodes: &Nodes, first_new: usize) -> Result<()>;

    /// Runs a step; gives one value per fetch, in their order. The trace in the metadata may be empty if none was asked for.
    fn run(&self, run: &RemoteRun<'_>) -> Result<(Vec<Tensor>, RunMetadata)>;

    /// Announces a partial run; gives the handle under which its calls are made. Feeds and fetches are names such as `x:0`,
    /// targets such as `x`.
    fn begin_partial(&self, feeds: &[String], fetches: &[String], targets: &[String]) -> Result<String>;

    /// One call of the partial run `handle`: feeds some of what was announced and gives one value per fetch. Its targets are
    /// empty; what was announced runs as soon as it can.
    fn run_partial(&self, handle: &str, run: &RemoteRun<'_>) -> Result<Vec<Tensor>>;

    /// The devices that the session may use, of all tasks.
    fn list_devices(&self) -> Result<Vec<DeviceAttributes>>;

    /// Forgets the variables, queues and other objects of these containers on all tasks; of all if none is named. As in
    /// TensorFlow, sessions that use them end.
    fn reset(&self, containers: &[String]) -> Result<()>;

    /// Ends the session over there, stops its runs in flight, and tells nobody if that fails. Called once, and last.
    fn close(&self);
}

/// One run of a remote session.
#[derive(Clone)]
pub struct RemoteRun<'a> {
    /// Values by the name of the tensor they stand for, such as `x:0`. Types and shapes have been checked.
    pub feeds: &'a [(&'a str, &'a Tensor)],
    /// The tensors to return, such as `x:0`.
    pub fetches: &'a [String],
    /// The operations to run, such as `x`.
    pub targets: &'a [String],
    /// The time limit, whether to trace, and the token that cancels. The limit is the session's, if the run has none.
    pub options: &'a RunOptions,
}

/// The client's side of a remote session.
pub(crate) struct Remote {
    backend: Arc<dyn RemoteSession>,
    /// What the other side has, under the placement rules.
    pub nodes: RwLock<Nodes>,
    /// Held while nodes are sent, so that they arrive in order.
    extending: Mutex<()>,
    config: SessionConfig,
    is_closed: AtomicBool,
}

impl Remote {
    pub fn new(graph: &Graph, backend: Arc<dyn RemoteSession>, config: SessionConfig) -> Result<Remote> {
        graph.check()?;
        let nodes = config.placement_rules.apply(&graph.snapshot());
        // Made first, so that a session that cannot take its graph is closed.
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

    /// The session's time limit counts for runs that have none.
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

/// The answer to what only a local session can do.
pub(crate) fn only_local(what: &str) -> Error {
    Error::failed_precondition(format!(
        "{what}: this session is remote, and its servers decide this; start them with the settings you want"
    ))
}

fn check_n_values(values: Vec<Tensor>, n_fetches: usize) -> Result<Vec<Tensor>> {
    match values.len() == n_fetches {
        true => Ok(values),
        false => Err(Error::internal(format!("the server gave {} values for {n_fetches} fetches", values.len()))),
    }
}

/// What to run, by name.
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
        // What was sent counts as used even if the call fails: the other side may have seen it.
        self.announced.feed(&admitted);
        let run = RemoteRun { feeds: &feeds, fetches: &fetches, targets: &[], options: &options };
        let values = self.session.backend.run_partial(&self.handle, &run)?;
        self.announced.take(&admitted);
        check_n_values(values, fetches.len())
    }
}
