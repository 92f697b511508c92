//! Sessions over the devices of this process: plans a graph and runs it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use kolo_core::{Error, Result, Tensor};
use kolo_device::{DeviceAttributes, MemoryStats};
use kolo_graph::{CostModel, Graph, Nodes, Output};
use kolo_ops::{CancelToken, Registration};
use parking_lot::{Mutex, RwLock};
use smallvec::SmallVec;

use crate::capture::limits::Limits;
use crate::capture::split::CaptureReport;
use crate::collective::DeviceExchanges;
use crate::compile::part::KernelCache;
use crate::compile::{CompiledPlan, RunParts};
use crate::config::{RunOptions, SessionConfig};
use crate::devices::{Devices, stop_text};
use crate::executor::step::Step;
use crate::planner::{PassReport, PlacementReport, Planner};
use crate::session::RunMetadata;
use crate::session::layout::Layout;
use crate::session::wanted::{Announced, FeedInfo, Signature, Wanted, check_n_feeds};
use crate::trace::StepTrace;

/// Runs a graph on the devices of this process; see [`crate::Session`] for what its methods promise.
pub(crate) struct LocalSession {
    /// What the nodes below are derived from. Locked before any other lock.
    pub(crate) layout: Mutex<Layout>,
    /// The nodes after placement rules and moves.
    pub(crate) nodes: RwLock<Nodes>,
    pub(crate) devices: Arc<Devices>,
    pub(crate) planner: Mutex<Planner>,
    kernels: KernelCache,
    pub(crate) plans: RwLock<HashMap<Signature, Arc<RunPlan>>>,
    config: SessionConfig,
    pub(crate) active: Mutex<Vec<(u64, InFlight)>>,
    next_step: AtomicU64,
    closed: AtomicBool,
}

/// A signature, compiled.
pub(crate) struct RunPlan {
    pub compiled: CompiledPlan,
    pub feeds: Vec<FeedInfo>,
    pub n_fetches: usize,
    /// Fetches that are also feeds: `(fetch, feed)`.
    pub echoes: Vec<(usize, usize)>,
    /// What it exchanges with other ranks between devices.
    pub exchanges: Vec<DeviceExchanges>,
    /// Nothing needs to run: the fetches are constants and feeds.
    pub is_constant: bool,
    /// Set when a node that it runs has moved to another device.
    pub is_stale: AtomicBool,
}

/// A run that has begun.
pub(crate) enum InFlight {
    /// Node by node, or in segments.
    Step(Weak<Step>),
    /// As one replay of a capture, or while it waits for other ranks.
    Waiting(Weak<CancelToken>),
}

impl InFlight {
    fn stop(&self, reason: Error) {
        match self {
            InFlight::Step(step) => step.upgrade().into_iter().for_each(|step| step.fail(reason.clone())),
            InFlight::Waiting(cancel) => cancel.upgrade().into_iter().for_each(|cancel| cancel.cancel(reason.clone())),
        }
    }
}

/// Registers a callback for the cancellation of the caller's token; unregisters it when dropped.
struct Watch<'a>(Option<(&'a CancelToken, Registration)>);

impl<'a> Watch<'a> {
    fn new(options: &'a RunOptions, stop: impl FnOnce(Error) + Send + 'static) -> Watch<'a> {
        let Some(token) = &options.cancel else { return Watch(None) };
        match token.register(Box::new(stop)) {
            Ok(registration) => Watch(Some((token, registration))),
            Err((stop, reason)) => {
                stop(reason);
                Watch(None)
            }
        }
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        if let Some((token, registration)) = self.0.take() {
            token.deregister(registration);
        }
    }
}

impl LocalSession {
    pub fn new(graph: &Graph, devices: Arc<Devices>, config: SessionConfig) -> Result<LocalSession> {
        graph.check()?;
        let described = graph.snapshot();
        Ok(LocalSession {
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

    pub fn run(&self, wanted: &Wanted, feeds: &[&Tensor], options: &RunOptions) -> Result<(Vec<Tensor>, RunMetadata)> {
        let plan = self.plan(wanted)?;
        self.run_plan(&plan, feeds, options)
    }

    pub fn make_callable(self: &Arc<Self>, wanted: Wanted) -> Result<LocalCallable> {
        Ok(LocalCallable { plan: self.plan(&wanted)?, session: self.clone(), wanted })
    }

    pub fn partial_run(self: &Arc<Self>, wanted: Wanted) -> Result<LocalPartialRun> {
        let (plan, step_id) = (self.plan(&wanted)?, self.step_id());
        let deadline = self.config.operation_timeout.map(|timeout| Instant::now() + timeout);
        self.compare_exchanges(&plan, step_id, &RunOptions::default(), deadline)?;
        let step = Step::new(step_id, &plan.compiled.parts, CancelToken::new(), false, true);
        self.enter(&plan, step.id, InFlight::Step(Arc::downgrade(&step)))?;
        Ok(LocalPartialRun {
            session: self.clone(),
            values: vec![None; plan.n_fetches],
            fed: vec![None; plan.feeds.len()],
            announced: Announced::new(wanted),
            plan,
            step,
        })
    }

    pub fn placement(&self) -> PlacementReport {
        self.planner.lock().report(&self.nodes.read())
    }

    pub fn explain(&self, fetches: &[&str]) -> Result<PlacementReport> {
        self.plan(&self.named(fetches)?)?;
        Ok(self.placement())
    }

    pub fn explain_passes(&self, fetches: &[&str], after: Option<&str>) -> Result<PassReport> {
        self.check_open()?;
        let wanted = self.named(fetches)?;
        let nodes = self.nodes.read().clone();
        self.planner.lock().explain_passes(&nodes, &wanted, after)
    }

    /// Tensors and operations by name.
    fn named(&self, fetches: &[&str]) -> Result<Wanted> {
        let nodes = self.nodes.read();
        let mut wanted = Wanted::default();
        for name in fetches {
            match nodes.endpoint(name) {
                Ok(at) => wanted.fetches.push(at),
                Err(_) => wanted.targets.push(nodes.require(name)?),
            }
        }
        Ok(wanted)
    }

    pub fn list_devices(&self) -> Vec<DeviceAttributes> {
        self.devices.attributes()
    }

    pub fn memory_stats(&self, device: usize) -> Option<MemoryStats> {
        self.devices.units.get(device).map(|unit| unit.device.memory_stats())
    }

    /// For each plan so far, what was captured of it.
    pub fn capture_reports(&self) -> Vec<CaptureReport> {
        self.plans.read().values().map(|plan| plan.compiled.report()).collect()
    }

    pub fn measure_links(&self, costs: &mut CostModel) -> Result<()> {
        crate::devices::links::measure(&self.devices, costs)
    }

    pub fn n_inter_op_threads(&self) -> usize {
        self.devices.units.iter().map(|unit| unit.pool.n_threads()).sum()
    }

    pub fn reset(&self, containers: &[String]) {
        self.devices.units.iter().for_each(|unit| unit.resources.clear(containers));
    }

    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        let active = std::mem::take(&mut *self.active.lock());
        active.iter().for_each(|(_, run)| run.stop(Error::cancelled(stop_text())));
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

    fn plan(&self, wanted: &Wanted) -> Result<Arc<RunPlan>> {
        self.check_open()?;
        let signature = wanted.signature();
        if let Some(plan) = self.plans.read().get(&signature) {
            return Ok(plan.clone());
        }
        // Nodes are moved under this lock, so no plan with their old device is cached after a move.
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
        let deadline = options.timeout.or(self.config.operation_timeout).map(|timeout| Instant::now() + timeout);
        self.compare_exchanges(plan, metadata.step_id, options, deadline)?;
        // A trace needs every node, which a replay does not show.
        let captures = plan.compiled.may_capture && !options.trace;
        if captures {
            let replayed = self.replay(plan, metadata.step_id, feeds, options, deadline);
            // Why the ranks' exchanges have ended says more than what became of the run.
            self.check_exchanges(plan)?;
            if let Some(values) = replayed? {
                return Ok((values, metadata));
            }
        }
        if captures && plan.compiled.count_run() {
            plan.compiled.split(&self.kernels);
        }
        let parts = match captures {
            true => plan.compiled.parts_to_run(),
            false => RunParts::Whole(&plan.compiled.parts),
        };
        let step = Step::new(metadata.step_id, &parts, CancelToken::new(), options.trace, false);
        self.enter(plan, step.id, InFlight::Step(Arc::downgrade(&step)))?;
        let weak = Arc::downgrade(&step);
        let watch = Watch::new(options, move |reason| {
            if let Some(step) = weak.upgrade() {
                step.fail(reason);
            }
        });
        let numbered: SmallVec<[(usize, &Tensor); 4]> = feeds.iter().copied().enumerate().collect();
        step.feed(&numbered, false);
        step.run(deadline, &|_| false);
        drop(watch);
        self.forget(step.id);
        let fetched = step.finish(plan.n_fetches);
        self.check_exchanges(plan)?;
        let fetched = fetched?;
        // Copies of fetches are part of the trace.
        metadata.trace.nodes = step.take_trace();
        Ok((plan.all_fetches(fetched, feeds)?, metadata))
    }

    /// Runs the plan as a replay, if it is captured as a whole.
    fn replay(
        &self,
        plan: &RunPlan,
        step_id: u64,
        feeds: &[&Tensor],
        options: &RunOptions,
        deadline: Option<Instant>,
    ) -> Result<Option<Vec<Tensor>>> {
        let [part] = &plan.compiled.parts[..] else { return Ok(None) };
        let cancel = CancelToken::new();
        self.enter(plan, step_id, InFlight::Waiting(Arc::downgrade(&cancel)))?;
        let token = cancel.clone();
        let watch = Watch::new(options, move |reason| token.cancel(reason));
        let new_step = || Step::new(step_id, &plan.compiled.parts, CancelToken::new(), false, false);
        let mut given: SmallVec<[Option<Tensor>; 4]> = feeds.iter().map(|feed| Some((*feed).clone())).collect();
        let fetched = plan.compiled.capture.run(part, &mut given, &new_step, &Limits::new(deadline, cancel));
        drop(watch);
        self.forget(step_id);
        let Some(fetched) = fetched? else { return Ok(None) };
        let mut values = vec![None; plan.n_fetches];
        fetched.into_iter().for_each(|(fetch, value)| values[fetch] = Some(value));
        plan.all_fetches(values, feeds).map(Some)
    }

    /// Compares what a run enqueues for exchanges between devices with what other ranks do. It waits for them, as the run itself does:
    /// until its deadline, or until it is stopped.
    fn compare_exchanges(
        &self,
        plan: &RunPlan,
        step_id: u64,
        options: &RunOptions,
        deadline: Option<Instant>,
    ) -> Result<()> {
        if plan.exchanges.is_empty() {
            return Ok(());
        }
        let cancel = CancelToken::new();
        self.enter(plan, step_id, InFlight::Waiting(Arc::downgrade(&cancel)))?;
        let token = cancel.clone();
        let watch = Watch::new(options, move |reason| token.cancel(reason));
        let compare = |exchanges: &DeviceExchanges| exchanges.compare(&self.config.groups, (&cancel, deadline));
        let compared = plan.exchanges.iter().try_for_each(compare);
        drop(watch);
        self.forget(step_id);
        compared
    }

    /// An error if exchanges between devices have ended, so that the run has computed nothing.
    fn check_exchanges(&self, plan: &RunPlan) -> Result<()> {
        plan.exchanges.iter().try_for_each(|exchanges| exchanges.check(&self.config.groups))
    }

    /// Registers a run as in flight. A plan that became stale since its look-up must not run: its variables have
    /// moved.
    fn enter(&self, plan: &RunPlan, step_id: u64, run: InFlight) -> Result<()> {
        let mut active = self.active.lock();
        // What comes after it was closed would not be stopped.
        self.check_open()?;
        if plan.is_stale.load(Ordering::Relaxed) {
            return Err(Error::aborted("nodes moved to another device while this run was set up; run it again"));
        }
        active.push((step_id, run));
        Ok(())
    }

    fn forget(&self, step: u64) {
        let mut active = self.active.lock();
        if let Some(at) = active.iter().position(|(id, _)| *id == step) {
            active.swap_remove(at);
        }
    }
}

impl Drop for LocalSession {
    fn drop(&mut self) {
        self.close();
    }
}

impl RunPlan {
    /// The computed values, together with the fetches that are feeds.
    fn all_fetches(&self, mut values: Vec<Option<Tensor>>, feeds: &[&Tensor]) -> Result<Vec<Tensor>> {
        for &(fetch, feed) in &self.echoes {
            values[fetch] = Some(feeds[feed].clone());
        }
        let missing = |i: usize| Error::internal(format!("fetch {i} was never computed"));
        values.into_iter().enumerate().map(|(i, value)| value.ok_or_else(|| missing(i))).collect()
    }

    /// The fetches of a run in which no node needs to run.
    fn constant_fetches(&self, feeds: &[&Tensor]) -> Result<Vec<Tensor>> {
        let mut values: SmallVec<[Option<Tensor>; 4]> = SmallVec::from_elem(None, self.n_fetches);
        for part in &self.compiled.parts {
            for (fetch, value) in &part.fetched_constants {
                values[*fetch as usize] = Some(part.unit.device.to_host(value)?);
            }
        }
        for &(fetch, feed) in &self.echoes {
            values[fetch] = Some(feeds[feed].clone());
        }
        values.into_iter().map(|value| value.ok_or_else(|| Error::internal("a constant fetch is missing"))).collect()
    }
}

/// A compiled run.
#[derive(Clone)]
pub(crate) struct LocalCallable {
    session: Arc<LocalSession>,
    plan: Arc<RunPlan>,
    wanted: Wanted,
}

impl LocalCallable {
    pub fn call(&self, options: &RunOptions, feeds: &[&Tensor]) -> Result<(Vec<Tensor>, RunMetadata)> {
        self.session.check_open()?;
        check_n_feeds(self.plan.feeds.len(), feeds.len())?;
        if self.plan.is_stale.load(Ordering::Relaxed) {
            return self.session.run_plan(&*self.session.plan(&self.wanted)?, feeds, options);
        }
        self.session.run_plan(&self.plan, feeds, options)
    }
}

/// A run in several calls.
pub(crate) struct LocalPartialRun {
    session: Arc<LocalSession>,
    plan: Arc<RunPlan>,
    step: Arc<Step>,
    announced: Announced,
    values: Vec<Option<Tensor>>,
    fed: Vec<Option<Tensor>>,
}

impl LocalPartialRun {
    pub fn run(&mut self, fetches: &[Output<'_>], feeds: &[(Output<'_>, Tensor)]) -> Result<Vec<Tensor>> {
        self.session.check_open()?;
        let admitted = self.announced.admit(&self.session.nodes.read(), &self.plan.feeds, fetches, feeds)?;
        self.announced.feed(&admitted);
        for (at, value) in &admitted.feeds {
            self.fed[*at] = Some((*value).clone());
        }
        self.step.feed(&admitted.feeds, true);
        let computed: Vec<usize> = admitted
            .fetches
            .iter()
            .copied()
            .filter(|fetch| !self.plan.echoes.iter().any(|(echo, _)| echo == fetch))
            .collect();
        let timeout = self.session.config.operation_timeout;
        let values = &mut self.values;
        self.step.adopt_caller();
        self.step.run(timeout.map(|timeout| Instant::now() + timeout), &|step| step.has_fetched(&computed));
        self.session.check_exchanges(&self.plan)?;
        if let Some(error) = self.step.error() {
            return Err(error);
        }
        self.step.collect(values)?;
        self.announced.take(&admitted);
        admitted
            .fetches
            .iter()
            .map(|&fetch| {
                let echo = self.plan.echoes.iter().find(|(echo, _)| *echo == fetch);
                let value = match echo {
                    Some((_, feed)) => self.fed[*feed].clone(),
                    None => self.values[fetch].take(),
                };
                value.ok_or_else(|| Error::internal("the fetch was never computed"))
            })
            .collect()
    }
}

impl Drop for LocalPartialRun {
    fn drop(&mut self) {
        if !self.step.is_over() {
            self.step.fail(Error::cancelled("the partial run was dropped before it was complete"));
        }
        self.session.forget(self.step.id);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::time::Duration;

    use kolo_core::Code;
    use kolo_ops::collective::{CollectiveCall, CollectiveDone, CollectiveGroup};

    use super::*;
    use crate::collective::{Communicator, CommunicatorOptions, Group};
    use crate::session::wanted::Wanted;

    /// A session with one fetch and one feed whose runs exchange something between devices, as a plan for GPUs does.
    fn session(group: Arc<dyn CollectiveGroup>) -> (Arc<LocalSession>, Wanted) {
        let g = kolo_ops::graph();
        let x = g.placeholder::<f32>("x", [2usize]);
        g.op("Neg").name("y").input(x).out();
        let config = SessionConfig::default();
        config.groups.insert("world", group);
        let session = LocalSession::new(&g, Arc::new(Devices::new(&config).unwrap()), config).unwrap();
        let nodes = session.nodes.read().clone();
        let wanted = Wanted::named(&nodes, &["y"], std::iter::once("x"), &[]).unwrap();
        let mut plan = session.planner.lock().plan(&nodes, &wanted, &session.kernels).unwrap();
        plan.exchanges.push(DeviceExchanges::new("world", vec!["KoloAllReduce 'y'".to_owned()]));
        session.plans.write().insert(wanted.signature(), Arc::new(plan));
        (Arc::new(session), wanted)
    }

    /// Rank 0 of two, of which the other never comes.
    fn alone() -> (Arc<LocalSession>, Wanted, Communicator) {
        let mut ends = Communicator::in_process(2, &CommunicatorOptions::default()).unwrap();
        let other = ends.pop().unwrap();
        let (session, wanted) = session(Group::new(ends.pop().unwrap()).unwrap());
        (session, wanted, other)
    }

    #[test]
    fn a_run_that_waits_for_other_ranks_to_compare_has_its_deadline() {
        let (session, wanted, _other) = alone();
        let options = RunOptions { timeout: Some(Duration::from_millis(100)), ..RunOptions::default() };
        let error = session.run(&wanted, &[&Tensor::from([1.0f32, 2.0])], &options).map(drop).unwrap_err();
        assert_eq!(error.code(), Code::DeadlineExceeded, "{error}");
        assert!(session.active.lock().is_empty());
    }

    #[test]
    fn closing_a_session_stops_a_run_that_waits_for_other_ranks_to_compare() {
        let (session, wanted, _other) = alone();
        let x = Tensor::from([1.0f32, 2.0]);
        std::thread::scope(|scope| {
            let run = scope.spawn(|| session.run(&wanted, &[&x], &RunOptions::default()).map(drop).unwrap_err());
            while session.active.lock().is_empty() {
                std::thread::yield_now();
            }
            session.close();
            let error = run.join().unwrap();
            assert_eq!(error.code(), Code::Cancelled, "{error}");
        });
    }

    /// A group of one whose devices have failed after the exchanges of a run were compared.
    struct Failing(AtomicUsize);

    impl CollectiveGroup for Failing {
        fn rank(&self) -> usize {
            0
        }

        fn n_ranks(&self) -> usize {
            1
        }

        fn start(&self, _call: CollectiveCall, done: CollectiveDone) {
            done(Err(Error::internal("one rank has nothing to exchange")));
        }

        fn health(&self) -> Result<()> {
            match self.0.fetch_add(1, Ordering::Relaxed) {
                0 => Ok(()),
                _ => Err(Error::aborted("rank 1 is gone")),
            }
        }
    }

    #[test]
    fn a_partial_run_whose_exchanges_have_ended_gives_no_values() {
        let (session, wanted) = session(Arc::new(Failing(AtomicUsize::new(0))));
        let g = kolo_ops::graph();
        let x = g.placeholder::<f32>("x", [2usize]);
        let y = g.op("Neg").name("y").input(x).out();
        let mut run = session.partial_run(wanted).unwrap();
        let error = run.run(&[y], &[(x, Tensor::from([1.0f32, 2.0]))]).unwrap_err();
        assert!(error.message().contains("rank 1 is gone"), "{error}");
    }
}
