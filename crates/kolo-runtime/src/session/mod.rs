//! The session type for users: the same whether its graph runs in this process or on the servers of a cluster.

mod layout;
pub(crate) mod local;
pub(crate) mod local_view;
pub(crate) mod remote;
pub(crate) mod task;
pub(crate) mod threads;
pub(crate) mod wanted;

use std::sync::Arc;

use kolo_core::{Error, Result, Tensor};
use kolo_device::DeviceAttributes;
use kolo_graph::{Graph, Nodes, Operation, Output};
use parking_lot::RwLock;
use smallvec::SmallVec;

use crate::config::{RunOptions, SessionConfig};
use crate::devices::Devices;
use crate::session::local::{LocalCallable, LocalPartialRun, LocalSession};
use crate::session::local_view::LocalView;
use crate::session::remote::{Remote, RemoteCallable, RemotePartialRun, RemoteSession};
use crate::session::wanted::Wanted;
use crate::trace::StepTrace;

/// Runs a graph, on the devices of this process or on those of servers. Many threads may use one session at once.
///
/// The methods here work for every session. Those that concern this process (moving nodes, resizing pools, placement,
/// memory) are behind [`Session::local`].
pub struct Session {
    backend: Backend,
}

/// Where the graph runs.
enum Backend {
    Local(Arc<LocalSession>),
    Remote(Arc<Remote>),
}

/// What a run returns besides its results.
#[derive(Clone, Debug, Default)]
pub struct RunMetadata {
    /// The trace of every node, if [`RunOptions::trace`] requested it.
    pub trace: StepTrace,
    /// The step's number.
    pub step_id: u64,
}

impl Session {
    /// A session over `graph` with default settings: one CPU device, all cores.
    pub fn new(graph: &Graph) -> Result<Session> {
        Session::with_config(graph, SessionConfig::default())
    }

    /// A session over `graph`. Nodes added later are seen after [`Session::extend`].
    pub fn with_config(graph: &Graph, config: SessionConfig) -> Result<Session> {
        let devices = Arc::new(Devices::new(&config)?);
        Session::over(graph, devices, config)
    }

    pub(crate) fn over(graph: &Graph, devices: Arc<Devices>, config: SessionConfig) -> Result<Session> {
        Ok(Session { backend: Backend::Local(Arc::new(LocalSession::new(graph, devices, config)?)) })
    }

    /// A session over `graph` that runs on the servers of `backend`. Of the configuration, the placement rules (which
    /// pin nodes before they are sent) and the timeout are applied here; the rest must be passed to the backend when
    /// it is created.
    ///
    /// Sends the graph before it returns.
    pub fn remote(graph: &Graph, backend: Arc<dyn RemoteSession>, config: SessionConfig) -> Result<Session> {
        Ok(Session { backend: Backend::Remote(Arc::new(Remote::new(graph, backend, config)?)) })
    }

    /// Whether the graph runs on servers rather than in this process.
    pub fn is_remote(&self) -> bool {
        matches!(self.backend, Backend::Remote(_))
    }

    /// Queries and controls for a graph that runs in this process: placement, memory, threads, captures. On a remote
    /// session `FailedPrecondition`; the error says where the graph runs and what to query instead.
    pub fn local(&self) -> Result<LocalView<'_>> {
        match &self.backend {
            Backend::Local(session) => Ok(LocalView(session)),
            Backend::Remote(session) => Err(session.only_local()),
        }
    }

    /// Adds the nodes that were added to the graph since the session was created or last extended. Existing plans
    /// stay valid: graphs only grow. A node without state that new nodes pin elsewhere moves there; see
    /// [`LocalView::placement`].
    pub fn extend(&self, graph: &Graph) -> Result<()> {
        match &self.backend {
            Backend::Local(session) => session.extend(graph),
            Backend::Remote(session) => session.extend(graph),
        }
    }

    /// Computes `fetches` and runs `targets`, with `feeds` in place of what the graph would compute there.
    pub fn run(
        &self,
        fetches: &[Output<'_>],
        feeds: &[(Output<'_>, Tensor)],
        targets: &[Operation<'_>],
    ) -> Result<Vec<Tensor>> {
        self.run_with(&RunOptions::default(), fetches, feeds, targets).map(|(values, _)| values)
    }

    /// One value, with nothing fed.
    pub fn fetch(&self, output: Output<'_>) -> Result<Tensor> {
        let mut values = self.run(&[output], &[], &[])?;
        values.pop().ok_or_else(|| Error::internal("a fetch gave nothing"))
    }

    /// Runs an operation for its effects.
    pub fn run_op(&self, operation: Operation<'_>) -> Result<()> {
        self.run(&[], &[], &[operation]).map(|_| ())
    }

    /// [`Session::run`] with a time limit, a trace, or a token to cancel it.
    pub fn run_with(
        &self,
        options: &RunOptions,
        fetches: &[Output<'_>],
        feeds: &[(Output<'_>, Tensor)],
        targets: &[Operation<'_>],
    ) -> Result<(Vec<Tensor>, RunMetadata)> {
        let wanted = self.wanted(fetches, feeds.iter().map(|(output, _)| *output), targets)?;
        let values: SmallVec<[&Tensor; 4]> = feeds.iter().map(|(_, tensor)| tensor).collect();
        self.run_wanted(&wanted, &values, options)
    }

    /// [`Session::run`] by name: tensors as `x:0` (`:0` may be left out), operations by theirs.
    pub fn run_named(&self, fetches: &[&str], feeds: &[(&str, Tensor)], targets: &[&str]) -> Result<Vec<Tensor>> {
        let options = RunOptions::default();
        self.run_named_with(&options, fetches, feeds, targets).map(|(values, _)| values)
    }

    /// [`Session::run_with`] by name.
    pub fn run_named_with(
        &self,
        options: &RunOptions,
        fetches: &[&str],
        feeds: &[(&str, Tensor)],
        targets: &[&str],
    ) -> Result<(Vec<Tensor>, RunMetadata)> {
        let wanted = Wanted::named(&self.nodes().read(), fetches, feeds.iter().map(|(name, _)| *name), targets)?;
        let values: SmallVec<[&Tensor; 4]> = feeds.iter().map(|(_, tensor)| tensor).collect();
        self.run_wanted(&wanted, &values, options)
    }

    /// A run with fixed feeds, fetches and targets, compiled now: the hot path of a training loop.
    pub fn make_callable(
        self: &Arc<Self>,
        feeds: &[Output<'_>],
        fetches: &[Output<'_>],
        targets: &[Operation<'_>],
    ) -> Result<Callable> {
        let wanted = self.wanted(fetches, feeds.iter().copied(), targets)?;
        Ok(match &self.backend {
            Backend::Local(session) => Callable(AnyCallable::Local(session.make_callable(wanted)?)),
            Backend::Remote(session) => Callable(AnyCallable::Remote(session.make_callable(&wanted)?)),
        })
    }

    /// Begins a run whose feeds and fetches come in several calls.
    pub fn partial_run(
        self: &Arc<Self>,
        feeds: &[Output<'_>],
        fetches: &[Output<'_>],
        targets: &[Operation<'_>],
    ) -> Result<PartialRun> {
        let wanted = self.wanted(fetches, feeds.iter().copied(), targets)?;
        Ok(match &self.backend {
            Backend::Local(session) => PartialRun(AnyPartialRun::Local(Box::new(session.partial_run(wanted)?))),
            Backend::Remote(session) => PartialRun(AnyPartialRun::Remote(Box::new(session.partial_run(wanted)?))),
        })
    }

    /// The session's devices. Empty if the servers of a remote session cannot be reached, which is logged;
    /// [`Session::try_list_devices`] returns the error.
    pub fn list_devices(&self) -> Vec<DeviceAttributes> {
        self.try_list_devices().unwrap_or_else(|error| {
            tracing::warn!(target: "kolo::session", "the devices cannot be listed: {error}");
            Vec::new()
        })
    }

    /// [`Session::list_devices`], with the error if the servers cannot be reached.
    pub fn try_list_devices(&self) -> Result<Vec<DeviceAttributes>> {
        match &self.backend {
            Backend::Local(session) => Ok(session.list_devices()),
            Backend::Remote(session) => session.list_devices(),
        }
    }

    /// Removes the variables, queues and other resources of these containers; of all containers if none is named. If
    /// the servers of a remote session cannot be reached, that is logged; [`Session::try_reset`] returns the error.
    pub fn reset(&self, containers: &[String]) {
        if let Err(error) = self.try_reset(containers) {
            tracing::warn!(target: "kolo::session", "the containers cannot be reset: {error}");
        }
    }

    /// [`Session::reset`], with the error if the servers cannot be reached.
    pub fn try_reset(&self, containers: &[String]) -> Result<()> {
        match &self.backend {
            Backend::Local(session) => {
                session.reset(containers);
                Ok(())
            }
            Backend::Remote(session) => session.reset(containers),
        }
    }

    /// Stops the runs in flight and refuses new ones.
    pub fn close(&self) {
        match &self.backend {
            Backend::Local(session) => session.close(),
            Backend::Remote(session) => session.close(),
        }
    }

    fn nodes(&self) -> &RwLock<Nodes> {
        match &self.backend {
            Backend::Local(session) => &session.nodes,
            Backend::Remote(session) => &session.nodes,
        }
    }

    fn wanted<'g>(
        &self,
        fetches: &[Output<'g>],
        feeds: impl Iterator<Item = Output<'g>>,
        targets: &[Operation<'g>],
    ) -> Result<Wanted> {
        let n_known = self.nodes().read().len();
        Wanted::new(n_known, fetches, feeds, targets)
    }

    fn run_wanted(
        &self,
        wanted: &Wanted,
        values: &[&Tensor],
        options: &RunOptions,
    ) -> Result<(Vec<Tensor>, RunMetadata)> {
        match &self.backend {
            Backend::Local(session) => session.run(wanted, values, options),
            Backend::Remote(session) => session.run(wanted, values, options),
        }
    }
}

/// A compiled run; see [`Session::make_callable`].
#[derive(Clone)]
pub struct Callable(AnyCallable);

#[derive(Clone)]
enum AnyCallable {
    Local(LocalCallable),
    Remote(RemoteCallable),
}

impl Callable {
    /// Runs with these feeds, in the order in which they were named.
    pub fn call(&self, feeds: &[&Tensor]) -> Result<Vec<Tensor>> {
        self.call_with(&RunOptions::default(), feeds).map(|(values, _)| values)
    }

    /// [`Callable::call`] with a time limit, a trace, or a token to cancel it.
    pub fn call_with(&self, options: &RunOptions, feeds: &[&Tensor]) -> Result<(Vec<Tensor>, RunMetadata)> {
        match &self.0 {
            AnyCallable::Local(callable) => callable.call(options, feeds),
            AnyCallable::Remote(callable) => callable.call(options, feeds),
        }
    }
}

/// A run in several calls; see [`Session::partial_run`].
pub struct PartialRun(AnyPartialRun);

enum AnyPartialRun {
    Local(Box<LocalPartialRun>),
    Remote(Box<RemotePartialRun>),
}

impl PartialRun {
    /// Feeds some of the declared feeds and fetches some of the declared fetches. Each may be used once. It is an
    /// error to fetch a value that still depends on a missing feed, or to use anything that was not declared.
    pub fn run(&mut self, fetches: &[Output<'_>], feeds: &[(Output<'_>, Tensor)]) -> Result<Vec<Tensor>> {
        match &mut self.0 {
            AnyPartialRun::Local(run) => run.run(fetches, feeds),
            AnyPartialRun::Remote(run) => run.run(fetches, feeds),
        }
    }
}
