//! TensorFlow's older training helper: a session that is ready, and threads that save and summarise beside it.

use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use kolo_core::{Error, Result, Tensor};
use kolo_graph::{Graph, Operation, Output};
use kolo_runtime::{Session, SessionConfig};
use parking_lot::Mutex;

use super::summary::FileWriter;
use super::{
    CheckpointSource, Coordinator, FinalScaffold, Saver, Scaffold, SessionManager, SessionSource, global_step,
    read_global_step, start_queue_runners,
};

/// Prepares a session (the chief) or waits for one (the others), and saves checkpoints and summaries at fixed intervals
/// while the program trains.
///
/// ```no_run
/// use kolo::train::Supervisor;
/// # let g = kolo::graph();
/// # let update = g.op("NoOp").build();
/// let supervisor = Supervisor::new(&g).logdir("log").save_model_secs(60.0).build()?;
/// supervisor.managed_session(|supervisor, session| {
///     while !supervisor.should_stop() {
///         session.run_op(update)?;
///     }
///     Ok(())
/// })?;
/// # Ok::<(), kolo::Error>(())
/// ```
pub struct Supervisor<'g> {
    graph: &'g Graph,
    scaffold: Rc<FinalScaffold<'g>>,
    manager: SessionManager<'g>,
    is_chief: bool,
    logdir: Option<PathBuf>,
    options: Options,
    coordinator: Coordinator,
    writer: Option<FileWriter>,
    session: Mutex<Option<Arc<Session>>>,
}

/// What can be set before a [`Supervisor`] is made.
pub struct SupervisorBuilder<'g> {
    graph: &'g Graph,
    scaffold: Scaffold<'g>,
    source: Rc<dyn SessionSource + 'g>,
    is_chief: bool,
    logdir: Option<PathBuf>,
    options: Options,
}

struct Options {
    save_model_secs: f64,
    save_summaries_secs: f64,
    checkpoint_basename: String,
    max_wait: Duration,
    stop_grace: Duration,
}

impl<'g> SupervisorBuilder<'g> {
    /// Whether this process initialises and saves; true unless said.
    pub fn is_chief(mut self, is_chief: bool) -> Self {
        self.is_chief = is_chief;
        self
    }

    /// Where checkpoints and event files go. Without it nothing is saved.
    pub fn logdir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.logdir = Some(dir.into());
        self
    }

    /// Where sessions come from; local ones unless said.
    pub fn source(mut self, source: impl SessionSource + 'g) -> Self {
        self.source = Rc::new(source);
        self
    }

    /// Gives the variables their first values.
    pub fn init_op(mut self, operation: Operation<'g>) -> Self {
        self.scaffold = self.scaffold.init_op(operation);
        self
    }

    /// What to feed to the init op.
    pub fn init_feeds(mut self, feeds: Vec<(Output<'g>, Tensor)>) -> Self {
        self.scaffold = self.scaffold.init_feeds(feeds);
        self
    }

    /// Runs after the init op.
    pub fn init_fn(mut self, init: impl Fn(&Session) -> Result<()> + 'g) -> Self {
        self.scaffold = self.scaffold.init_fn(init);
        self
    }

    /// Names what is not ready.
    pub fn ready_op(mut self, output: Output<'g>) -> Self {
        self.scaffold = self.scaffold.ready_op(output);
        self
    }

    /// Initialises what belongs to this process.
    pub fn local_init_op(mut self, operation: Operation<'g>) -> Self {
        self.scaffold = self.scaffold.local_init_op(operation);
        self
    }

    /// A serialised summary to write every so often.
    pub fn summary_op(mut self, output: Output<'g>) -> Self {
        self.scaffold = self.scaffold.summary_op(output);
        self
    }

    /// Saves and restores.
    pub fn saver(mut self, saver: Saver) -> Self {
        self.scaffold = self.scaffold.saver(saver);
        self
    }

    /// Seconds between checkpoints, 600 unless said; 0 for none but the last.
    pub fn save_model_secs(mut self, secs: f64) -> Self {
        self.options.save_model_secs = secs;
        self
    }

    /// Seconds between summaries, 120 unless said; 0 for none.
    pub fn save_summaries_secs(mut self, secs: f64) -> Self {
        self.options.save_summaries_secs = secs;
        self
    }

    /// What checkpoints are called before the step; `model.ckpt` unless said.
    pub fn checkpoint_basename(mut self, name: &str) -> Self {
        self.options.checkpoint_basename = name.to_owned();
        self
    }

    /// How long a process that is not the chief waits for it; two hours unless said.
    pub fn max_wait(mut self, at_most: Duration) -> Self {
        self.options.max_wait = at_most;
        self
    }

    /// Completes the graph. It should not grow after this.
    pub fn build(self) -> Result<Supervisor<'g>> {
        let SupervisorBuilder { graph, scaffold, source, is_chief, logdir, options } = self;
        let scaffold = Rc::new(scaffold.finalize(graph)?);
        let writer = match (&logdir, is_chief) {
            (Some(dir), true) => {
                let writer = FileWriter::new(dir)?;
                writer.add_graph(graph)?;
                Some(writer)
            }
            _ => None,
        };
        Ok(Supervisor {
            graph,
            manager: SessionManager::new(graph, source, scaffold.clone()),
            scaffold,
            is_chief,
            logdir,
            options,
            coordinator: Coordinator::new(),
            writer,
            session: Mutex::new(None),
        })
    }
}

impl<'g> Supervisor<'g> {
    /// A supervisor over `graph`: the chief of a local session, unless told otherwise.
    #[allow(clippy::new_ret_no_self)]
    pub fn new(graph: &'g Graph) -> SupervisorBuilder<'g> {
        SupervisorBuilder {
            graph,
            scaffold: Scaffold::new(),
            source: Rc::new(SessionConfig::default()),
            is_chief: true,
            logdir: None,
            options: Options {
                save_model_secs: 600.0,
                save_summaries_secs: 120.0,
                checkpoint_basename: "model.ckpt".to_owned(),
                max_wait: Duration::from_secs(2 * 60 * 60),
                stop_grace: Duration::from_secs(120),
            },
        }
    }

    /// True if this process initialises and saves.
    pub fn is_chief(&self) -> bool {
        self.is_chief
    }

    /// Starts and stops the threads; a program's own may join them.
    pub fn coordinator(&self) -> &Coordinator {
        &self.coordinator
    }

    /// The writer of event files, on a chief with a log directory.
    pub fn summary_writer(&self) -> Option<&FileWriter> {
        self.writer.as_ref()
    }

    /// The saver, if there is anything to save.
    pub fn saver(&self) -> Option<&Saver> {
        self.scaffold.saver.as_deref()
    }

    /// A session that is ready: prepared by the chief, waited for by the others. Starts queue runners and, on the chief, the
    /// threads that save.
    pub fn prepare_or_wait_for_session(&self) -> Result<Arc<Session>> {
        let created = match self.is_chief {
            true => {
                let checkpoint = self.logdir.clone().map_or(CheckpointSource::None, CheckpointSource::Dir);
                self.manager.prepare_session(&checkpoint)?
            }
            false => self.manager.wait_for_session(self.options.max_wait)?,
        };
        let session = created.session;
        *self.session.lock() = Some(session.clone());
        start_queue_runners(self.graph, &session, &self.coordinator)?;
        if self.is_chief {
            self.start_services(&session)?;
        }
        Ok(session)
    }

    fn start_services(&self, session: &Arc<Session>) -> Result<()> {
        let step = global_step(self.graph).map(|step| step.read().name());
        if let (Some(writer), Some(summary)) = (&self.writer, self.scaffold.summary_op) {
            let (session, writer, summary) = (session.clone(), writer.clone(), summary.name());
            let step = step.clone();
            self.every("kolo-summaries", self.options.save_summaries_secs, move || {
                let names: Vec<&str> = std::iter::once(summary.as_str()).chain(step.as_deref()).collect();
                let values = session.run_named(&names, &[], &[])?;
                let at = values.get(1).and_then(|value| value.integers().ok()).and_then(|v| v.first().copied());
                writer.add_summary(&values[0], at.unwrap_or(0))
            })?;
        }
        if let (Some(dir), Some(saver)) = (&self.logdir, &self.scaffold.saver) {
            let (session, saver) = (session.clone(), saver.clone());
            let prefix = dir.join(&self.options.checkpoint_basename);
            self.every("kolo-checkpoints", self.options.save_model_secs, move || {
                let saved = step_by_name(&session, step.as_deref())
                    .and_then(|step| saver.save_in_background(&session, &prefix, step)?.wait());
                if let Err(error) = saved {
                    tracing::error!(
                        target: "kolo::train",
                        "could not save a checkpoint: {error}; training goes on, earlier checkpoints stay"
                    );
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Calls `body` every `secs` seconds on its own thread, until stopping is asked for. Nothing happens for 0 seconds.
    pub fn every(&self, name: &str, secs: f64, mut body: impl FnMut() -> Result<()> + Send + 'static) -> Result<()> {
        let Some(pause) = Duration::try_from_secs_f64(secs).ok().filter(|pause| !pause.is_zero()) else {
            return Ok(());
        };
        self.coordinator.spawn(name, move |coordinator| {
            while !coordinator.wait_for_stop(pause) {
                body()?;
            }
            Ok(())
        })
    }

    /// Prepares or waits for a session, runs `body` with it, and stops. The end of the input is a normal end.
    pub fn managed_session(&self, body: impl FnOnce(&Supervisor<'g>, &Arc<Session>) -> Result<()>) -> Result<()> {
        let session = self.prepare_or_wait_for_session()?;
        if let Err(error) = body(self, &session) {
            self.coordinator.request_stop_with(error);
        }
        self.stop()
    }

    /// True once stopping was asked for.
    pub fn should_stop(&self) -> bool {
        self.coordinator.should_stop()
    }

    /// Asks to stop.
    pub fn request_stop(&self) {
        self.coordinator.request_stop();
    }

    /// Stops the threads, saves a last checkpoint (on the chief), and closes the session. Returns the error that ended
    /// training, if one did.
    pub fn stop(&self) -> Result<()> {
        self.coordinator.request_stop();
        let joined = self.coordinator.join(self.options.stop_grace);
        let Some(session) = self.session.lock().take() else { return joined };
        let mut saved = Ok(());
        if let (true, Ok(()), Some(dir), Some(saver)) = (self.is_chief, &joined, &self.logdir, &self.scaffold.saver) {
            saved = read_global_step(&session, self.graph)
                .and_then(|step| saver.save(&session, dir.join(&self.options.checkpoint_basename), step))
                .map(|_| ());
        }
        let written = self.writer.as_ref().map_or(Ok(()), FileWriter::flush);
        session.close();
        joined.and(saved).and(written)
    }
}

fn step_by_name(session: &Session, step: Option<&str>) -> Result<Option<i64>> {
    let Some(step) = step else { return Ok(None) };
    let values = session.run_named(&[step], &[], &[])?;
    let first = values.first().ok_or_else(|| Error::internal("a fetch gave nothing"))?;
    first.integers().map(|values| values.first().copied())
}
