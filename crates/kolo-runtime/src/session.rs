//! The local session: plans a graph over the devices of this process and runs it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use kolo_core::{DType, Error, PartialShape, Result, Tensor};
use kolo_device::{DeviceAttributes, MemoryStats};
use kolo_graph::{CostModel, Endpoint, Graph, NodeId, Nodes, Operation, Output};
use kolo_ops::CancelToken;
use parking_lot::{Mutex, RwLock};
use smallvec::SmallVec;

use crate::config::{RunOptions, SessionConfig};
use crate::devices::{Devices, stop_text};
use crate::executor::plan::{KernelCache, PartPlan};
use crate::executor::step::Step;
use crate::layout::Layout;
use crate::planner::{PlacementReport, Planner};
use crate::trace::StepTrace;

/// Runs a graph on the devices of this process. Many threads may use one session at once.
pub struct Session {
    /// What the nodes below come from. Taken before any other lock.
    pub(crate) layout: Mutex<Layout>,
    /// The nodes under the placement rules and moves.
    pub(crate) nodes: RwLock<Nodes>,
    pub(crate) devices: Arc<Devices>,
    pub(crate) planner: Mutex<Planner>,
    kernels: KernelCache,
    pub(crate) plans: RwLock<HashMap<Signature, Arc<RunPlan>>>,
    config: SessionConfig,
    pub(crate) active: Mutex<Vec<(u64, Weak<Step>)>>,
    next_step: AtomicU64,
    closed: AtomicBool,
}

/// Feeds, fetches and targets of a run, packed into numbers.
pub(crate) type Signature = SmallVec<[u64; 8]>;

/// A signature, compiled.
pub(crate) struct RunPlan {
    pub parts: Vec<Arc<PartPlan>>,
    pub feeds: Vec<FeedInfo>,
    pub n_fetches: usize,
    /// Fetches that are feeds: `(fetch, feed)`.
    pub echoes: Vec<(usize, usize)>,
    /// Nothing needs to run: the fetches are constants and feeds.
    pub is_constant: bool,
    /// Set when what it would run has moved to another device.
    pub is_stale: AtomicBool,
}

/// What a feed must look like.
pub(crate) struct FeedInfo {
    pub name: String,
    pub dtype: DType,
    pub shape: PartialShape,
}

/// What a run tells besides its results.
#[derive(Clone, Debug, Default)]
pub struct RunMetadata {
    /// Every node's run, if [`RunOptions::trace`] asked for it.
    pub trace: StepTrace,
    /// The step's number.
    pub step_id: u64,
}

/// What to run, as numbers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wanted {
    pub feeds: SmallVec<[Endpoint; 4]>,
    pub fetches: SmallVec<[Endpoint; 4]>,
    pub targets: SmallVec<[NodeId; 4]>,
}

impl Wanted {
    fn signature(&self) -> Signature {
        const TARGET: u64 = 1 << 63;
        let pack = |at: &Endpoint| u64::from(at.node.0) << 31 | u64::from(at.index);
        let mut signature: Signature = SmallVec::new();
        signature.push((self.feeds.len() as u64) << 32 | self.fetches.len() as u64);
        signature.extend(self.feeds.iter().map(pack));
        signature.extend(self.fetches.iter().map(pack));
        signature.extend(self.targets.iter().map(|id| TARGET | u64::from(id.0)));
        signature
    }
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
        graph.check()?;
        let described = graph.snapshot();
        Ok(Session {
            nodes: RwLock::new(config.placement_rules.apply(&described)),
            layout: Mutex::new(Layout::new(described, config.placement_rules.clone())),
            planner: Mutex::new(Planner::new(devices.clone(), &config)),
            devices,
            kernels: KernelCache::default(),
            plans: RwLock::default(),
            config,
            active: Mutex::default(),
            next_step: AtomicU64::new(1),
            closed: AtomicBool::new(false),
        })
    }

    /// Takes over the nodes that were added to the graph since the session was made or last extended. Plans that exist
    /// stay valid: graphs only grow. A node without state that new nodes pin elsewhere moves there; see
    /// [`Session::placement`].
    pub fn extend(&self, graph: &Graph) -> Result<()> {
        graph.check()?;
        self.check_open()?;
        let new = graph.snapshot();
        let mut layout = self.layout.lock();
        let is_same = layout.described.iter().zip(new.iter()).all(|((_, old), (_, new))| old.name == new.name);
        if new.len() < layout.described.len() || !is_same {
            return Err(Error::invalid_argument("extend takes the session's own graph, grown; this is another one"));
        }
        let new = layout.of_grown(new);
        self.lay_out(&mut layout, new)
    }

    /// Computes `fetches` and runs `targets`, with `feeds` in place of what the graph would compute there.
    pub fn run(
        &self,
        fetches: &[Output<'_>],
        feeds: &[(Output<'_>, Tensor)],
        targets: &[Operation<'_>],
    ) -> Result<Vec<Tensor>> {
        let wanted = self.wanted(fetches, feeds.iter().map(|(output, _)| *output), targets)?;
        let plan = self.plan(&wanted)?;
        let values: SmallVec<[&Tensor; 4]> = feeds.iter().map(|(_, tensor)| tensor).collect();
        self.run_plan(&plan, &values, &RunOptions::default()).map(|(values, _)| values)
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
        let plan = self.plan(&wanted)?;
        let values: SmallVec<[&Tensor; 4]> = feeds.iter().map(|(_, tensor)| tensor).collect();
        self.run_plan(&plan, &values, options)
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
        let wanted = {
            let nodes = self.nodes.read();
            Wanted {
                feeds: feeds.iter().map(|(name, _)| nodes.endpoint(name)).collect::<Result<_>>()?,
                fetches: fetches.iter().map(|name| nodes.endpoint(name)).collect::<Result<_>>()?,
                targets: targets.iter().map(|name| nodes.require(name)).collect::<Result<_>>()?,
            }
        };
        let plan = self.plan(&wanted)?;
        let values: SmallVec<[&Tensor; 4]> = feeds.iter().map(|(_, tensor)| tensor).collect();
        self.run_plan(&plan, &values, options)
    }

    /// A run with fixed feeds, fetches and targets, compiled now: the hot path of a training loop.
    pub fn make_callable(
        self: &Arc<Self>,
        feeds: &[Output<'_>],
        fetches: &[Output<'_>],
        targets: &[Operation<'_>],
    ) -> Result<Callable> {
        let wanted = self.wanted(fetches, feeds.iter().copied(), targets)?;
        Ok(Callable { plan: self.plan(&wanted)?, session: self.clone(), wanted })
    }

    /// Begins a run whose feeds and fetches come in several calls.
    pub fn partial_run(
        self: &Arc<Self>,
        feeds: &[Output<'_>],
        fetches: &[Output<'_>],
        targets: &[Operation<'_>],
    ) -> Result<PartialRun> {
        self.check_open()?;
        let wanted = self.wanted(fetches, feeds.iter().copied(), targets)?;
        let plan = self.plan(&wanted)?;
        let step = Step::new(self.step_id(), &plan.parts, CancelToken::new(), false, true);
        self.enter(&plan, &step)?;
        let n_feeds = plan.feeds.len();
        Ok(PartialRun {
            session: self.clone(),
            values: vec![None; plan.n_fetches],
            taken: vec![false; plan.n_fetches],
            fed: vec![None; n_feeds],
            plan,
            step,
            wanted,
        })
    }

    /// Where every node that was planned so far was placed, and why.
    pub fn placement(&self) -> PlacementReport {
        self.planner.lock().report(&self.nodes.read())
    }

    /// Places everything these fetches need, without running it.
    pub fn explain(&self, fetches: &[&str]) -> Result<PlacementReport> {
        let wanted = {
            let nodes = self.nodes.read();
            let mut wanted = Wanted::default();
            for name in fetches {
                match nodes.endpoint(name) {
                    Ok(at) => wanted.fetches.push(at),
                    Err(_) => wanted.targets.push(nodes.require(name)?),
                }
            }
            wanted
        };
        self.plan(&wanted)?;
        Ok(self.placement())
    }

    /// The session's devices.
    pub fn list_devices(&self) -> Vec<DeviceAttributes> {
        self.devices.attributes()
    }

    /// How much memory a device's tensors take, by the device's place in [`Session::list_devices`].
    pub fn memory_stats(&self, device: usize) -> Option<MemoryStats> {
        self.devices.units.get(device).map(|unit| unit.device.memory_stats())
    }

    /// Measures how fast values go from device to device, for [`SessionConfig::costs`]. Copies some megabytes for each pair
    /// of device types.
    pub fn measure_links(&self, costs: &mut CostModel) -> Result<()> {
        crate::links::measure(&self.devices, costs)
    }

    /// Threads that run nodes beside callers, over all devices.
    pub fn n_inter_op_threads(&self) -> usize {
        self.devices.units.iter().map(|unit| unit.pool.n_threads()).sum()
    }

    /// Forgets the variables, queues and other objects of these containers; of all if none is named.
    pub fn reset(&self, containers: &[String]) {
        self.devices.units.iter().for_each(|unit| unit.resources.clear(containers));
    }

    /// Stops the runs in flight and refuses new ones.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        let active = std::mem::take(&mut *self.active.lock());
        for step in active.iter().filter_map(|(_, step)| step.upgrade()) {
            step.fail(Error::cancelled(stop_text()));
        }
    }

    pub(crate) fn check_open(&self) -> Result<()> {
        match self.closed.load(Ordering::Acquire) {
            false => Ok(()),
            true => Err(Error::failed_precondition("the session is closed; make a new one")),
        }
    }

    fn step_id(&self) -> u64 {
        self.next_step.fetch_add(1, Ordering::Relaxed)
    }

    fn wanted<'a, 'g: 'a>(
        &self,
        fetches: &[Output<'g>],
        feeds: impl Iterator<Item = Output<'g>>,
        targets: &[Operation<'g>],
    ) -> Result<Wanted> {
        let known = self.nodes.read().len();
        let check = |id: NodeId, what: &dyn Fn() -> String| match id.index() < known {
            true => Ok(()),
            false => Err(Error::not_found(format!(
                "'{}' is not in the session's graph; if it was added later, call session.extend(&graph)",
                what()
            ))),
        };
        let endpoint = |output: Output<'_>| {
            if !output.is_valid() {
                output.graph().check()?;
            }
            check(output.endpoint().node, &|| output.name()).map(|()| output.endpoint())
        };
        Ok(Wanted {
            feeds: feeds.map(endpoint).collect::<Result<_>>()?,
            fetches: fetches.iter().map(|output| endpoint(*output)).collect::<Result<_>>()?,
            targets: targets
                .iter()
                .map(|target| check(target.id(), &|| target.name()).map(|()| target.id()))
                .collect::<Result<_>>()?,
        })
    }

    fn plan(&self, wanted: &Wanted) -> Result<Arc<RunPlan>> {
        self.check_open()?;
        let signature = wanted.signature();
        if let Some(plan) = self.plans.read().get(&signature) {
            return Ok(plan.clone());
        }
        // Nodes that move do so under this lock: no plan with their old place is kept after it.
        let mut planner = self.planner.lock();
        let nodes = self.nodes.read().clone();
        let plan = Arc::new(planner.plan(&nodes, wanted, &self.kernels)?);
        Ok(self.plans.write().entry(signature).or_insert(plan).clone())
    }

    fn run_plan(&self, plan: &RunPlan, feeds: &[&Tensor], options: &RunOptions) -> Result<(Vec<Tensor>, RunMetadata)> {
        for (info, value) in plan.feeds.iter().zip(feeds) {
            info.check(value)?;
        }
        let mut metadata = RunMetadata { trace: StepTrace::default(), step_id: self.step_id() };
        if plan.is_constant {
            return Ok((plan.constant_fetches(feeds)?, metadata));
        }
        let step = Step::new(metadata.step_id, &plan.parts, CancelToken::new(), options.trace, false);
        self.enter(plan, &step)?;
        let registration = options.cancel.as_ref().map(|token| {
            let weak = Arc::downgrade(&step);
            let stop = Box::new(move |reason: Error| {
                if let Some(step) = weak.upgrade() {
                    step.fail(reason);
                }
            });
            (token, token.register(stop))
        });
        if let Some((_, Err((_, reason)))) = &registration {
            step.fail(reason.clone());
        }
        let deadline = options.timeout.or(self.config.operation_timeout).map(|timeout| Instant::now() + timeout);
        let numbered: SmallVec<[(usize, &Tensor); 4]> = feeds.iter().copied().enumerate().collect();
        step.feed(&numbered, false);
        step.run(deadline, &|_| false);
        if let Some((token, Ok(registration))) = registration {
            token.deregister(registration);
        }
        self.forget(step.id);
        metadata.trace.nodes = step.take_trace();
        let mut values = step.finish(plan.n_fetches)?;
        for &(fetch, feed) in &plan.echoes {
            values[fetch] = Some(feeds[feed].clone());
        }
        let missing = |i: usize| Error::internal(format!("fetch {i} was never computed"));
        let values = values.into_iter().enumerate().map(|(i, value)| value.ok_or_else(|| missing(i)));
        Ok((values.collect::<Result<_>>()?, metadata))
    }

    /// Counts a step among those in flight. A plan that went stale between its look-up and now must not run: its
    /// variables are elsewhere.
    fn enter(&self, plan: &RunPlan, step: &Arc<Step>) -> Result<()> {
        let mut active = self.active.lock();
        if plan.is_stale.load(Ordering::Relaxed) {
            return Err(Error::aborted("nodes moved to another device while this run was set up; run it again"));
        }
        active.push((step.id, Arc::downgrade(step)));
        Ok(())
    }

    fn forget(&self, step: u64) {
        let mut active = self.active.lock();
        if let Some(at) = active.iter().position(|(id, _)| *id == step) {
            active.swap_remove(at);
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.close();
    }
}

impl FeedInfo {
    fn check(&self, value: &Tensor) -> Result<()> {
        if value.dtype() != self.dtype {
            return Err(Error::invalid_argument(format!(
                "Cannot feed value of type {} for Tensor '{}', which is {}",
                value.dtype(),
                self.name,
                self.dtype
            )));
        }
        if !self.shape.admits(value.shape()) {
            return Err(Error::invalid_argument(format!(
                "Cannot feed value of shape {} for Tensor '{}', which has shape '{}'",
                value.shape(),
                self.name,
                self.shape
            )));
        }
        Ok(())
    }
}

impl RunPlan {
    /// The fetches of a run in which nothing needs to run.
    fn constant_fetches(&self, feeds: &[&Tensor]) -> Result<Vec<Tensor>> {
        let mut values: SmallVec<[Option<Tensor>; 4]> = SmallVec::from_elem(None, self.n_fetches);
        for part in &self.parts {
            for (fetch, value) in &part.fetched_constants {
                values[*fetch as usize] = Some(value.clone());
            }
        }
        for &(fetch, feed) in &self.echoes {
            values[fetch] = Some(feeds[feed].clone());
        }
        values.into_iter().map(|value| value.ok_or_else(|| Error::internal("a constant fetch is missing"))).collect()
    }
}

/// A compiled run; see [`Session::make_callable`].
#[derive(Clone)]
pub struct Callable {
    session: Arc<Session>,
    plan: Arc<RunPlan>,
    wanted: Wanted,
}

impl Callable {
    /// Runs with these feeds, in the order in which they were named.
    pub fn call(&self, feeds: &[&Tensor]) -> Result<Vec<Tensor>> {
        self.call_with(&RunOptions::default(), feeds).map(|(values, _)| values)
    }

    /// [`Callable::call`] with a time limit, a trace, or a token to cancel it.
    pub fn call_with(&self, options: &RunOptions, feeds: &[&Tensor]) -> Result<(Vec<Tensor>, RunMetadata)> {
        self.session.check_open()?;
        if feeds.len() != self.plan.feeds.len() {
            return Err(Error::invalid_argument(format!(
                "the callable takes {} feeds, found {}",
                self.plan.feeds.len(),
                feeds.len()
            )));
        }
        if self.plan.is_stale.load(Ordering::Relaxed) {
            return self.session.run_plan(&*self.session.plan(&self.wanted)?, feeds, options);
        }
        self.session.run_plan(&self.plan, feeds, options)
    }
}

/// A run in several calls; see [`Session::partial_run`].
pub struct PartialRun {
    session: Arc<Session>,
    plan: Arc<RunPlan>,
    step: Arc<Step>,
    wanted: Wanted,
    values: Vec<Option<Tensor>>,
    taken: Vec<bool>,
    fed: Vec<Option<Tensor>>,
}

impl PartialRun {
    /// Feeds some of what was announced and fetches some of it. Each may be used once. A fetch that still depends on a feed
    /// that has not come is an error, and so is anything that was not announced.
    pub fn run(&mut self, fetches: &[Output<'_>], feeds: &[(Output<'_>, Tensor)]) -> Result<Vec<Tensor>> {
        self.session.check_open()?;
        let mut wanted_now = Vec::new();
        for fetch in fetches {
            let at = self.wanted.fetches.iter().position(|at| *at == fetch.endpoint());
            match at.filter(|&at| !self.taken[at]) {
                Some(at) => wanted_now.push(at),
                None => {
                    return Err(Error::invalid_argument(format!(
                        "the fetch '{}' was not announced when the partial run began, or was taken already",
                        fetch.name()
                    )));
                }
            }
        }
        let mut fed_now = Vec::new();
        for (output, value) in feeds {
            let at = self.wanted.feeds.iter().position(|at| *at == output.endpoint());
            let Some(at) = at.filter(|&at| self.fed[at].is_none()) else {
                return Err(Error::invalid_argument(format!(
                    "the feed '{}' was not announced when the partial run began, or was fed already",
                    output.name()
                )));
            };
            self.plan.feeds[at].check(value)?;
            fed_now.push((at, value));
        }
        self.check_reachable(&wanted_now, &fed_now)?;
        for (at, value) in &fed_now {
            self.fed[*at] = Some((*value).clone());
        }
        self.step.feed(&fed_now, true);
        let computed: Vec<usize> = wanted_now
            .iter()
            .copied()
            .filter(|fetch| !self.plan.echoes.iter().any(|(echo, _)| echo == fetch))
            .collect();
        let timeout = self.session.config.operation_timeout;
        let values = &mut self.values;
        self.step.adopt_caller();
        self.step.run(timeout.map(|timeout| Instant::now() + timeout), &|step| step.has_fetched(&computed));
        if let Some(error) = self.step.error() {
            return Err(error);
        }
        self.step.collect(values)?;
        wanted_now
            .iter()
            .map(|&fetch| {
                self.taken[fetch] = true;
                let echo = self.plan.echoes.iter().find(|(echo, _)| *echo == fetch);
                let value = match echo {
                    Some((_, feed)) => self.fed[*feed].clone(),
                    None => self.values[fetch].take(),
                };
                value.ok_or_else(|| Error::internal("the fetch was never computed"))
            })
            .collect()
    }

    /// Every fetch must be computable from what has been fed by now.
    fn check_reachable(&self, fetches: &[usize], fed_now: &[(usize, &Tensor)]) -> Result<()> {
        let nodes = self.session.nodes.read();
        let is_fed = |feed: usize| self.fed[feed].is_some() || fed_now.iter().any(|(at, _)| *at == feed);
        for &fetch in fetches {
            let mut seen = std::collections::HashSet::new();
            let mut stack = vec![self.wanted.fetches[fetch]];
            while let Some(at) = stack.pop() {
                if let Some(feed) = self.wanted.feeds.iter().position(|feed| *feed == at) {
                    if !is_fed(feed) {
                        return Err(Error::invalid_argument(format!(
                            "the fetch '{}' depends on '{}', which has not been fed yet",
                            nodes.endpoint_name(self.wanted.fetches[fetch]),
                            nodes.endpoint_name(at)
                        )));
                    }
                    continue;
                }
                if seen.insert(at.node) {
                    let node = nodes.node(at.node);
                    stack.extend(node.inputs.iter().copied());
                    stack.extend(node.control_inputs.iter().map(|&node| Endpoint { node, index: 0 }));
                }
            }
        }
        Ok(())
    }
}

impl Drop for PartialRun {
    fn drop(&mut self) {
        if !self.step.is_over() {
            self.step.fail(Error::cancelled("the partial run was dropped before it was complete"));
        }
        self.session.forget(self.step.id);
    }
}
