//! Sessions that run hooks around each step, stop together with their threads, and come back after a recoverable error.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_core::{Code, Error, Result, Tensor};
use kolo_graph::{Graph, Operation, Output};
use kolo_runtime::{RunOptions, Session};
use smallvec::SmallVec;

use super::hook::{CreatedContext, RunArgs, RunContext, RunValues};
use super::{
    Coordinator, FinalScaffold, SessionCreator, SessionHook, Start, global_step, read_global_step, start_queue_runners,
};

/// How long threads may take to stop when a session ends.
const GRACE: Duration = Duration::from_secs(120);

/// How long a lost session is tried to be replaced.
const LONGEST_RECOVERY: Duration = Duration::from_secs(30 * 60);

/// A session for training: it initialises or restores by itself, runs hooks, starts queue runners, and after a
/// recoverable error (`Aborted`, `Unavailable`) opens another session and goes on.
///
/// ```
/// use kolo::optim::{Optimizer, Sgd};
/// use kolo::train::{self, ChiefSessionCreator, MonitoredSession, hooks::StopAtStep};
///
/// let g = kolo::graph();
/// let w = g.variable("w", 5.0f32);
/// let loss = w.read() * w.read();
/// let step = train::global_step_or_create(&g)?;
/// let update = Sgd::new(0.1).minimize(loss, Some(step))?;
///
/// let mut session = MonitoredSession::new(ChiefSessionCreator::new(&g), vec![Box::new(StopAtStep::last(20))])?;
/// session.drive(|session| session.run(&[], &[], &[update]).map(|_| ()))?;
/// assert_eq!(session.global_step(), Some(20));
/// # Ok::<(), kolo::Error>(())
/// ```
pub struct MonitoredSession<'g> {
    graph: &'g Graph,
    creator: Box<dyn SessionCreator<'g> + 'g>,
    scaffold: Rc<FinalScaffold<'g>>,
    hooks: Vec<HookState<'g>>,
    step_read: Option<Output<'g>>,
    recovers: bool,
    open: Option<Open>,
    last_step: Option<i64>,
    recoveries: Vec<Recovery>,
    ended: bool,
}

/// The session in use and what belongs to it.
struct Open {
    session: Arc<Session>,
    coordinator: Coordinator,
}

struct HookState<'g> {
    hook: Box<dyn SessionHook<'g> + 'g>,
    time: HookTime,
    warned: bool,
}

/// How much time a hook took.
#[derive(Clone, Debug, Default)]
pub struct HookTime {
    /// The hook's name.
    pub name: String,
    /// How often it was called around runs.
    pub calls: u64,
    /// The sum over all calls.
    pub total: Duration,
    /// The longest call.
    pub worst: Duration,
}

/// A session that was lost and replaced.
#[derive(Clone, Debug)]
pub struct Recovery {
    /// What lost it.
    pub cause: Error,
    /// How the next one got its values.
    pub start: Start,
    /// How many steps were lost, if the graph has a global step.
    pub steps_lost: Option<i64>,
}

impl<'g> MonitoredSession<'g> {
    /// Opens the first session: hooks begin, the scaffold is completed, the creator makes the session ready.
    pub fn new(
        creator: impl SessionCreator<'g> + 'g,
        hooks: Vec<Box<dyn SessionHook<'g> + 'g>>,
    ) -> Result<MonitoredSession<'g>> {
        MonitoredSession::open(Box::new(creator), hooks, true)
    }

    fn open(
        mut creator: Box<dyn SessionCreator<'g> + 'g>,
        hooks: Vec<Box<dyn SessionHook<'g> + 'g>>,
        recovers: bool,
    ) -> Result<MonitoredSession<'g>> {
        let graph = creator.graph();
        let mut hooks: Vec<HookState<'g>> = hooks
            .into_iter()
            .map(|hook| HookState {
                time: HookTime { name: hook.name().to_owned(), ..HookTime::default() },
                hook,
                warned: false,
            })
            .collect();
        for state in &mut hooks {
            state.hook.begin(graph).map_err(|error| error.context(state.hook.name()))?;
        }
        let scaffold = creator.finalize()?;
        let step_read = global_step(graph).map(|step| step.read());
        let mut session = MonitoredSession {
            graph,
            creator,
            scaffold,
            hooks,
            step_read,
            recovers,
            open: None,
            last_step: None,
            recoveries: Vec::new(),
            ended: false,
        };
        session.create()?;
        Ok(session)
    }

    fn create(&mut self) -> Result<Start> {
        let created = self.creator.create_session()?;
        let coordinator = Coordinator::new();
        let open = self.open.insert(Open { session: created.session, coordinator });
        self.last_step = created.step;
        let context = CreatedContext {
            session: &open.session,
            coordinator: &open.coordinator,
            scaffold: &self.scaffold,
            start: &created.start,
            step: created.step,
        };
        for state in &mut self.hooks {
            state.hook.after_create_session(&context).map_err(|error| error.context(state.hook.name()))?;
        }
        start_queue_runners(self.graph, &open.session, &open.coordinator)?;
        Ok(created.start)
    }

    /// The graph.
    pub fn graph(&self) -> &'g Graph {
        self.graph
    }

    /// The session in use now. It changes with a recovery.
    pub fn session(&self) -> Result<&Arc<Session>> {
        self.open.as_ref().map(|open| &open.session).ok_or_else(closed)
    }

    /// The pieces it began with.
    pub fn scaffold(&self) -> &FinalScaffold<'g> {
        &self.scaffold
    }

    /// The global step, as of the last run that was looked at.
    pub fn global_step(&self) -> Option<i64> {
        self.last_step
    }

    /// Sessions that were lost and replaced so far.
    pub fn recoveries(&self) -> &[Recovery] {
        &self.recoveries
    }

    /// The time that each hook took.
    pub fn hook_times(&self) -> Vec<HookTime> {
        self.hooks.iter().map(|state| state.time.clone()).collect()
    }

    /// True when a hook, a thread or the end of the input asked to stop.
    pub fn should_stop(&self) -> bool {
        self.open.as_ref().is_none_or(|open| open.coordinator.should_stop())
    }

    /// Asks to stop.
    pub fn request_stop(&self) {
        if let Some(open) = &self.open {
            open.coordinator.request_stop();
        }
    }

    /// Runs a step with the hooks around it. A recoverable error opens another session and runs the step there.
    pub fn run(
        &mut self,
        fetches: &[Output<'g>],
        feeds: &[(Output<'g>, Tensor)],
        targets: &[Operation<'g>],
    ) -> Result<Vec<Tensor>> {
        loop {
            match self.run_once(fetches, feeds, targets) {
                Err(error) if self.recovers && matches!(error.code(), Code::Aborted | Code::Unavailable) => {
                    self.recover(error)?;
                }
                Err(error) => {
                    if let Some(open) = &self.open {
                        open.coordinator.request_stop_with(error.clone());
                        // A thread may have failed first, and this run only felt it.
                        if error.code() == Code::Cancelled
                            && let Some(first) = open.coordinator.error()
                        {
                            return Err(first);
                        }
                    }
                    return Err(error);
                }
                done => return done,
            }
        }
    }

    fn run_once(
        &mut self,
        fetches: &[Output<'g>],
        feeds: &[(Output<'g>, Tensor)],
        targets: &[Operation<'g>],
    ) -> Result<Vec<Tensor>> {
        let Open { session, coordinator } = self.open.as_ref().ok_or_else(closed)?;
        let mut context = RunContext { session, graph: self.graph, coordinator, seen: None, now: Cell::new(None) };
        let mut run = MergedRun::new(fetches, feeds);
        let step_at = self.step_read.map(|read| run.fetch(read));
        let mut wanted: SmallVec<[SmallVec<[usize; 4]>; 8]> = SmallVec::new();
        for state in &mut self.hooks {
            let args = state.timed(|hook| hook.before_run(&context))?;
            wanted.push(run.add(args, state.hook.name())?);
        }
        let options = RunOptions { trace: run.trace, ..RunOptions::default() };
        let (mut values, metadata) = session.run_with(&options, &run.fetches, &run.feeds, targets)?;
        // What hooks read before the run is old now.
        context.now.set(None);
        if let Some(at) = step_at {
            context.seen = values[at].integers()?.first().copied();
            self.last_step = context.seen;
        }
        for (state, wanted) in self.hooks.iter_mut().zip(&wanted) {
            let own: SmallVec<[Tensor; 4]> = wanted.iter().map(|at| values[*at].clone()).collect();
            state.timed(|hook| hook.after_run(&context, &RunValues { values: &own, metadata: &metadata }))?;
        }
        if let Some(now) = context.now.get() {
            self.last_step = Some(now);
        }
        values.truncate(fetches.len());
        Ok(values)
    }

    /// Opens another session after `cause` lost this one.
    fn recover(&mut self, cause: Error) -> Result<()> {
        let before = self.last_step;
        tracing::warn!(target: "kolo::train", "lost the session: {cause}; opening another one");
        self.shut(Duration::from_secs(1)).ok();
        let began = Instant::now();
        let mut pause = Duration::from_millis(50);
        let start = loop {
            let error = match self.create() {
                Ok(start) => break start,
                Err(error) => error,
            };
            self.shut(Duration::from_secs(1)).ok();
            // Whatever was lost may be lost again before it is ready, or take longer than one attempt waits.
            let is_passing = matches!(error.code(), Code::Aborted | Code::Unavailable | Code::DeadlineExceeded);
            if !is_passing || began.elapsed() >= LONGEST_RECOVERY {
                return Err(error.context(format_args!("no session could be opened after the last was lost ({cause})")));
            }
            tracing::warn!(target: "kolo::train", "no other session yet: {error}; trying again");
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_secs(1));
        };
        let steps_lost = before.zip(self.last_step).map(|(before, now)| (before - now).max(0));
        tracing::warn!(
            target: "kolo::train",
            "training goes on: {start:?}, global step {:?}, steps lost: {}",
            self.last_step,
            steps_lost.map_or("unknown".to_owned(), |n| n.to_string())
        );
        self.recoveries.push(Recovery { cause, start, steps_lost });
        Ok(())
    }

    /// Runs `body` until something asks to stop, then ends the session with its hooks. The end of the input (`OutOfRange`)
    /// is a normal end; any other error is returned, without the hooks' `end`.
    pub fn drive(&mut self, mut body: impl FnMut(&mut MonitoredSession<'g>) -> Result<()>) -> Result<()> {
        while !self.should_stop() {
            match body(self) {
                Ok(()) => {}
                Err(error) if error.code() == Code::OutOfRange => {
                    self.request_stop();
                    break;
                }
                Err(error) => {
                    self.ended = true;
                    self.shut(GRACE).ok();
                    return Err(error);
                }
            }
        }
        self.close()
    }

    /// Ends training: hooks end, threads stop, the session closes. Returns the first error among them, or the one that
    /// stopped training.
    pub fn close(&mut self) -> Result<()> {
        self.close_within(GRACE)
    }

    fn close_within(&mut self, grace: Duration) -> Result<()> {
        if std::mem::replace(&mut self.ended, true) {
            return Ok(());
        }
        let mut first = Ok(());
        if let Some(open) = &self.open {
            if open.coordinator.error().is_none() {
                for state in &mut self.hooks {
                    let ended = state.hook.end(&open.session).map_err(|error| error.context(state.hook.name()));
                    first = first.and(ended);
                }
            }
            let step = read_global_step(&open.session, self.graph).ok().flatten();
            self.last_step = step.or(self.last_step);
        }
        let shut = self.shut(grace);
        first.and(shut)
    }

    fn shut(&mut self, grace: Duration) -> Result<()> {
        let Some(open) = self.open.take() else { return Ok(()) };
        open.coordinator.request_stop();
        let joined = open.coordinator.join(grace);
        open.session.close();
        joined
    }
}

impl Drop for MonitoredSession<'_> {
    /// Closes the session, so that a program that forgot to does not lose what it trained. Not after a panic: then the
    /// hooks do not end, as after an error, because a step may be half done.
    fn drop(&mut self) {
        let grace = Duration::from_secs(5);
        let closed = match std::thread::panicking() {
            true => self.shut(grace),
            false => self.close_within(grace),
        };
        if let Err(error) = closed {
            tracing::error!(target: "kolo::train", "a session that was dropped could not be closed: {error}");
        }
    }
}

impl<'g> HookState<'g> {
    fn timed<R>(&mut self, call: impl FnOnce(&mut dyn SessionHook<'g>) -> Result<R>) -> Result<R> {
        let began = Instant::now();
        let result = call(&mut *self.hook);
        let took = began.elapsed();
        self.time.calls += 1;
        self.time.total += took;
        self.time.worst = self.time.worst.max(took);
        if took > self.hook.budget() && !std::mem::replace(&mut self.warned, true) {
            tracing::warn!(
                target: "kolo::train",
                "hook {} took {took:.1?}, more than its {:.1?}; steps wait for it (said once)",
                self.hook.name(),
                self.hook.budget()
            );
        }
        result.map_err(|error| error.context(self.hook.name()))
    }
}

/// The caller's run and the hooks' wishes, joined; what several want is fetched once.
struct MergedRun<'g> {
    fetches: SmallVec<[Output<'g>; 8]>,
    feeds: SmallVec<[(Output<'g>, Tensor); 4]>,
    trace: bool,
}

impl<'g> MergedRun<'g> {
    fn new(fetches: &[Output<'g>], feeds: &[(Output<'g>, Tensor)]) -> MergedRun<'g> {
        MergedRun { fetches: fetches.iter().copied().collect(), feeds: feeds.iter().cloned().collect(), trace: false }
    }

    /// Where the value will be.
    fn fetch(&mut self, output: Output<'g>) -> usize {
        match self.fetches.iter().position(|have| have.endpoint() == output.endpoint()) {
            Some(at) => at,
            None => {
                self.fetches.push(output);
                self.fetches.len() - 1
            }
        }
    }

    fn add(&mut self, args: RunArgs<'g>, hook: &str) -> Result<SmallVec<[usize; 4]>> {
        self.trace |= args.trace;
        for (output, value) in args.feeds {
            if self.feeds.iter().any(|(have, _)| have.endpoint() == output.endpoint()) {
                return Err(Error::invalid_argument(format!(
                    "hook {hook} feeds '{}', which is fed already in this run",
                    output.name()
                )));
            }
            self.feeds.push((output, value));
        }
        Ok(args.fetches.into_iter().map(|output| self.fetch(output)).collect())
    }
}

/// What a closed session answers.
fn closed() -> Error {
    Error::failed_precondition("the monitored session is closed")
}

/// As [`MonitoredSession`], but an error of any kind ends it: for a session that nobody else can continue. Its steps may be
/// run on [`SingularMonitoredSession::raw_session`] directly.
pub struct SingularMonitoredSession<'g>(MonitoredSession<'g>);

impl<'g> SingularMonitoredSession<'g> {
    /// Opens the session.
    pub fn new(
        creator: impl SessionCreator<'g> + 'g,
        hooks: Vec<Box<dyn SessionHook<'g> + 'g>>,
    ) -> Result<SingularMonitoredSession<'g>> {
        MonitoredSession::open(Box::new(creator), hooks, false).map(SingularMonitoredSession)
    }

    /// The session itself, without hooks.
    pub fn raw_session(&self) -> Result<&Arc<Session>> {
        self.0.session()
    }

    /// Runs a step with the hooks around it.
    pub fn run(
        &mut self,
        fetches: &[Output<'g>],
        feeds: &[(Output<'g>, Tensor)],
        targets: &[Operation<'g>],
    ) -> Result<Vec<Tensor>> {
        self.0.run(fetches, feeds, targets).map_err(|error| match error.code() {
            Code::Aborted | Code::Unavailable => {
                error.and("; a SingularMonitoredSession does not recover, a MonitoredSession does")
            }
            _ => error,
        })
    }
}

impl<'g> std::ops::Deref for SingularMonitoredSession<'g> {
    type Target = MonitoredSession<'g>;

    fn deref(&self) -> &MonitoredSession<'g> {
        &self.0
    }
}

impl SingularMonitoredSession<'_> {
    /// Ends training; see [`MonitoredSession::close`].
    pub fn close(&mut self) -> Result<()> {
        self.0.close()
    }
}
