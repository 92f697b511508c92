//! Saves checkpoints as training goes on.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kolo_core::{Error, Result};
use kolo_graph::Graph;
use kolo_runtime::Session;

use crate::train::saver::check_writable;
use crate::train::{
    BackgroundSave, CreatedContext, Every, RunContext, RunValues, Saver, SessionHook, Start, Timer, read_global_step,
};

/// Hears of each checkpoint: its global step and prefix.
type Listener<'g> = dyn FnMut(i64, &str) + 'g;

/// Saves when the session begins, every so often, and when it ends.
///
/// Saving goes on in the background: the variables are taken as they are, and training waits only for that. If a save
/// fails (a full disk, say) the checkpoints before it stay, the reason is logged, and training goes on.
pub struct CheckpointSaver<'g> {
    dir: PathBuf,
    base_name: String,
    timer: Timer,
    saver: Option<Arc<Saver>>,
    listeners: Vec<Box<Listener<'g>>>,
    running: Option<(i64, BackgroundSave)>,
    saved: Option<i64>,
    n_failed: usize,
    graph: Option<&'g Graph>,
}

impl<'g> CheckpointSaver<'g> {
    /// Saves into `dir` as `model.ckpt-STEP`, with the scaffold's saver.
    pub fn new(dir: impl Into<PathBuf>, every: Every) -> CheckpointSaver<'g> {
        CheckpointSaver {
            dir: dir.into(),
            base_name: "model.ckpt".to_owned(),
            timer: Timer::new(every),
            saver: None,
            listeners: Vec::new(),
            running: None,
            saved: None,
            n_failed: 0,
            graph: None,
        }
    }

    /// What the files are called before the step.
    pub fn base_name(mut self, name: &str) -> Self {
        self.base_name = name.to_owned();
        self
    }

    /// Another saver than the scaffold's.
    pub fn saver(mut self, saver: Saver) -> Self {
        self.saver = Some(Arc::new(saver));
        self
    }

    /// Calls `listener` with the step and the prefix of each checkpoint once it is whole.
    pub fn listener(mut self, listener: impl FnMut(i64, &str) + 'g) -> Self {
        self.listeners.push(Box::new(listener));
        self
    }

    /// Begins a save, unless this step was saved already or one is still being written.
    fn begin_save(&mut self, session: &Arc<Session>, step: i64) {
        if self.saved == Some(step) {
            return;
        }
        let Some(saver) = &self.saver else { return };
        match saver.save_in_background(session, self.dir.join(&self.base_name), Some(step)) {
            Ok(save) => self.running = Some((step, save)),
            Err(error) => self.failed(step, &error),
        }
    }

    /// Takes note of a save that ended; waits for it if told to.
    fn collect(&mut self, wait: bool) {
        let Some((step, save)) = self.running.take() else { return };
        if !wait && !save.is_done() {
            self.running = Some((step, save));
            return;
        }
        match save.wait() {
            Ok(prefix) => {
                self.saved = Some(step);
                tracing::info!(target: "kolo::train", "saved checkpoint {prefix}");
                self.listeners.iter_mut().for_each(|listener| listener(step, &prefix));
            }
            Err(error) => self.failed(step, &error),
        }
    }

    fn failed(&mut self, step: i64, error: &Error) {
        self.n_failed += 1;
        tracing::error!(
            target: "kolo::train",
            "could not save a checkpoint at step {step}: {error}; training goes on, earlier checkpoints stay"
        );
    }
}

impl<'g> SessionHook<'g> for CheckpointSaver<'g> {
    fn name(&self) -> &'static str {
        "CheckpointSaver"
    }

    fn begin(&mut self, graph: &'g Graph) -> Result<()> {
        self.graph = Some(graph);
        check_writable(&self.dir)
    }

    fn after_create_session(&mut self, created: &CreatedContext<'_, 'g>) -> Result<()> {
        if self.saver.is_none() {
            self.saver = created.scaffold.saver.clone();
        }
        // A save of the lost session is over with it.
        self.collect(true);
        // A session that restored has looked at them already.
        if let (Some(saver), Start::Initialized) = (&self.saver, created.start) {
            saver.check_fits(&self.dir)?;
        }
        let step = created.step.unwrap_or(0);
        self.timer.acted(step);
        if matches!(created.start, Start::Restored { .. }) {
            self.saved = Some(step);
        }
        self.begin_save(created.session, step);
        Ok(())
    }

    fn after_run(&mut self, context: &RunContext<'_, 'g>, _values: &RunValues<'_>) -> Result<()> {
        self.collect(false);
        if self.running.is_none()
            && let Some(step) = self.timer.due_now(context)?
        {
            self.timer.acted(step);
            self.begin_save(context.session, step);
        }
        Ok(())
    }

    fn end(&mut self, session: &Arc<Session>) -> Result<()> {
        self.collect(true);
        let step = match self.graph {
            Some(graph) => read_global_step(session, graph)?.unwrap_or(0),
            None => return Ok(()),
        };
        self.begin_save(session, step);
        self.collect(true);
        match self.saved == Some(step) || self.saver.is_none() {
            true => Ok(()),
            false => Err(Error::unavailable(format!(
                "the last checkpoint, of step {step}, could not be written (see the log); {} saves failed in all",
                self.n_failed
            ))),
        }
    }

    fn budget(&self) -> Duration {
        Duration::from_millis(50)
    }
}
