//! The session that users hold: one type, whether its graph runs in this process or on the servers of a cluster.

use std::sync::Arc;

use kolo_core::{Error, Result, Tensor};
use kolo_device::{DeviceAttributes, MemoryStats};
use kolo_graph::{CostModel, Graph, Nodes, Operation, Output, PlacementRules};
use parking_lot::RwLock;
use smallvec::SmallVec;

use crate::config::{RunOptions, SessionConfig};
use crate::devices::Devices;
use crate::executor::split::CaptureReport;
use crate::local::{LocalCallable, LocalPartialRun, LocalSession};
use crate::planner::{PassReport, PlacementReport};
use crate::remote::{Remote, RemoteCallable, RemotePartialRun, RemoteSession, only_local};
use crate::threads::DeviceThreads;
use crate::trace::StepTrace;
use crate::wanted::Wanted;

/// Runs a graph, on the devices of this process or on those of servers. Many threads may use one session at once.
///
/// A few methods are about this process: they move nodes, resize pools, tell placement and memory. On a remote session they
/// return `FailedPrecondition` or nothing, since its servers decide these things.
pub struct Session {
    backend: Backend,
}

/// Where the graph runs.
enum Backend {
    Local(Arc<LocalSession>),
    Remote(Arc<Remote>),
}

/// What a run tells besides its results.
#[derive(Clone, Debug, Default)]
pub struct RunMetadata {
    /// Every node's run, if [`RunOptions::trace`] asked for it.
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

    /// A session over `graph` that runs where `backend` leads. Of the configuration, the placement rules (which pin nodes
    /// before they are sent) and the time limit count here; the rest is for the backend to pass on when it is made.
    ///
    /// Sends the graph before it returns.
    pub fn remote(graph: &Graph, backend: Arc<dyn RemoteSession>, config: SessionConfig) -> Result<Session> {
        Ok(Session { backend: Backend::Remote(Arc::new(Remote::new(graph, backend, config)?)) })
    }

    /// Whether the graph runs on servers rather than in this process.
    pub fn is_remote(&self) -> bool {
        matches!(self.backend, Backend::Remote(_))
    }

    /// Takes over the nodes that were added to the graph since the session was made or last extended. Plans that exist
    /// stay valid: graphs only grow. A node without state that new nodes pin elsewhere moves there; see
    /// [`Session::placement`].
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

    /// Where every node that was planned so far was placed, and why. Empty for a remote session: its master's log has it.
    pub fn placement(&self) -> PlacementReport {
        match &self.backend {
            Backend::Local(session) => session.placement(),
            Backend::Remote(_) => PlacementReport::default(),
        }
    }

    /// Places everything these fetches need, without running it. A remote session is placed by its master, whose log says
    /// where nodes went if [`SessionConfig::log_device_placement`] asked for it.
    pub fn explain(&self, fetches: &[&str]) -> Result<PlacementReport> {
        match &self.backend {
            Backend::Local(session) => session.explain(fetches),
            Backend::Remote(_) => Err(Error::failed_precondition(
                "explain: this session is remote, and its master places nodes; set log_device_placement, and the master's \
                 log says where they went",
            )),
        }
    }

    /// What each pass does to the graph that these fetches need, and the graph as text after the pass `after`, without
    /// running it.
    pub fn explain_passes(&self, fetches: &[&str], after: Option<&str>) -> Result<PassReport> {
        match &self.backend {
            Backend::Local(session) => session.explain_passes(fetches, after),
            Backend::Remote(_) => Err(Error::failed_precondition(
                "explain_passes: this session is remote, and its servers plan; make a local session over the same graph",
            )),
        }
    }

    /// The session's devices. None if a remote session's servers cannot be asked, which is logged;
    /// [`Session::try_list_devices`] returns the error.
    pub fn list_devices(&self) -> Vec<DeviceAttributes> {
        self.try_list_devices().unwrap_or_else(|error| {
            tracing::warn!(target: "kolo::session", "the devices cannot be listed: {error}");
            Vec::new()
        })
    }

    /// [`Session::list_devices`], with the error if servers cannot be asked.
    pub fn try_list_devices(&self) -> Result<Vec<DeviceAttributes>> {
        match &self.backend {
            Backend::Local(session) => Ok(session.list_devices()),
            Backend::Remote(session) => session.list_devices(),
        }
    }

    /// For each plan of a local session so far: how many launches its replay stands for if it was captured, or why it is not.
    /// For a plan in segments it is the sum of them; [`Session::capture_reports`] has each.
    pub fn captures(&self) -> Vec<std::result::Result<usize, String>> {
        let sum = |report: CaptureReport| {
            let (mut n, mut why) = (None, report.why_not.unwrap_or_default());
            for segment in report.segments {
                match segment {
                    Ok(launches) => n = Some(n.unwrap_or(0) + launches),
                    Err(reason) => why = reason,
                }
            }
            n.ok_or(why)
        };
        self.capture_reports().into_iter().map(sum).collect()
    }

    /// For each plan of a local session so far: what was captured of it, in how many segments, and which nodes split it.
    pub fn capture_reports(&self) -> Vec<CaptureReport> {
        self.local("capture_reports").map(|session| session.capture_reports()).unwrap_or_default()
    }

    /// How much memory a device's tensors take, by the device's place in [`Session::list_devices`]. `None` for a remote
    /// session.
    pub fn memory_stats(&self, device: usize) -> Option<MemoryStats> {
        self.local("memory_stats").ok().and_then(|session| session.memory_stats(device))
    }

    /// Measures how fast values go from device to device, for [`SessionConfig::costs`]. Copies some megabytes for each pair
    /// of device types.
    pub fn measure_links(&self, costs: &mut CostModel) -> Result<()> {
        self.local("measure_links")?.measure_links(costs)
    }

    /// Replaces the placement rules. Nodes that were placed and are pinned elsewhere now move if they keep no state, which
    /// [`Session::placement`] then shows; a node that keeps state refuses, and nothing is changed.
    pub fn set_placement_rules(&self, rules: PlacementRules) -> Result<()> {
        self.local("set_placement_rules")?.set_placement_rules(rules)
    }

    /// Moves a node to another device between runs, and with it all nodes that must share its device. A variable takes its
    /// value along. Queues and other state do not move, and nothing moves while a run is in flight.
    ///
    /// Other sessions on the same [`crate::Host`] that have used the variable do not learn of it.
    ///
    /// ```
    /// # use kolo_runtime::{Session, SessionConfig};
    /// let g = kolo_ops::graph();
    /// let v = g.device("/cpu:0", || g.variable("v", 3.0f32));
    /// let init = g.global_variables_initializer();
    /// let config = SessionConfig { device_count: [("CPU".to_owned(), 2)].into(), ..SessionConfig::default() };
    /// let session = Session::with_config(&g, config)?;
    /// session.run_op(init)?;
    /// session.move_node("v", "/cpu:1")?;
    /// assert_eq!(session.fetch(v.read())?.scalar_value::<f32>()?, 3.0);
    /// # Ok::<(), kolo_core::Error>(())
    /// ```
    pub fn move_node(&self, name: &str, device: &str) -> Result<()> {
        self.local("move_node")?.move_node(name, device)
    }

    /// Sets how many threads may run nodes of these devices at once, callers included. Steps in flight feel it when they next
    /// look for more threads; threads that are too many end when they are idle.
    ///
    /// `device` may be a full name, a partial one such as `/cpu:1`, or empty for all devices.
    pub fn set_inter_op_threads(&self, device: &str, n_threads: usize) -> Result<()> {
        self.local("set_inter_op_threads")?.set_inter_op_threads(device, n_threads)
    }

    /// Sets how many threads work inside one kernel of these devices, the one that runs the node included. Waits for the
    /// kernels that are using them now; results do not depend on the number.
    ///
    /// `device` may be a full name, a partial one such as `/cpu:1`, or empty for all devices.
    pub fn set_intra_op_threads(&self, device: &str, n_threads: usize) -> Result<()> {
        self.local("set_intra_op_threads")?.set_intra_op_threads(device, n_threads)
    }

    /// The threads of every device of this process; none for a remote session.
    pub fn threads(&self) -> Vec<DeviceThreads> {
        self.local("threads").map(|session| session.threads()).unwrap_or_default()
    }

    /// Threads that run nodes beside callers, over all devices of this process.
    pub fn n_inter_op_threads(&self) -> usize {
        self.local("n_inter_op_threads").map_or(0, |session| session.n_inter_op_threads())
    }

    /// Forgets the variables, queues and other objects of these containers; of all if none is named. If a remote session's
    /// servers cannot be told, that is logged; [`Session::try_reset`] returns the error.
    pub fn reset(&self, containers: &[String]) {
        if let Err(error) = self.try_reset(containers) {
            tracing::warn!(target: "kolo::session", "the containers cannot be reset: {error}");
        }
    }

    /// [`Session::reset`], with the error if servers cannot be told.
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

    /// The local session behind this one, if `what` can be done.
    fn local(&self, what: &str) -> Result<&LocalSession> {
        match &self.backend {
            Backend::Local(session) => Ok(session),
            Backend::Remote(_) => Err(only_local(what)),
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
    /// Feeds some of what was announced and fetches some of it. Each may be used once. A fetch that still depends on a feed
    /// that has not come is an error, and so is anything that was not announced.
    pub fn run(&mut self, fetches: &[Output<'_>], feeds: &[(Output<'_>, Tensor)]) -> Result<Vec<Tensor>> {
        match &mut self.0 {
            AnyPartialRun::Local(run) => run.run(fetches, feeds),
            AnyPartialRun::Remote(run) => run.run(fetches, feeds),
        }
    }
}
