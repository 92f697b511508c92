//! Opens sessions that are ready to train: the chief initialises or restores, the others wait.

use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_core::{Code, Error, Result};
use kolo_graph::Graph;
use kolo_runtime::Session;

use super::ready::missing_variables;
use super::{FinalScaffold, SessionSource, checkpoint_exists, global_step, read_global_step};

/// How a session came to its variables' values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Start {
    /// They were alive: nothing was restored or initialised.
    Attached,
    /// They came from this checkpoint.
    Restored {
        /// Its prefix.
        checkpoint: String,
    },
    /// They were initialised.
    Initialized,
}

/// A session that is ready, and how it came to be.
pub struct Created {
    /// The session.
    pub session: Arc<Session>,
    /// How its variables got their values.
    pub start: Start,
    /// The global step it begins from, if the graph has one.
    pub step: Option<i64>,
}

/// Opens sessions over a graph and makes them ready.
///
/// Unlike TensorFlow's, a chief that comes back looks at the variables first. If all have values it attaches to them; only
/// when state was lost does it restore or initialise, so the global step of a cluster that stayed alive never decreases.
pub struct SessionManager<'g> {
    graph: &'g Graph,
    source: Rc<dyn SessionSource + 'g>,
    scaffold: Rc<FinalScaffold<'g>>,
}

impl<'g> SessionManager<'g> {
    /// Sessions over `graph` from `source`, made ready with the pieces of `scaffold`.
    pub fn new(
        graph: &'g Graph,
        source: Rc<dyn SessionSource + 'g>,
        scaffold: Rc<FinalScaffold<'g>>,
    ) -> SessionManager<'g> {
        SessionManager { graph, source, scaffold }
    }

    /// The chief's way: attaches to live variables, else restores the newest whole checkpoint, else initialises.
    pub fn prepare_session(&self, checkpoint: &CheckpointSource) -> Result<Created> {
        let session = self.source.open(self.graph)?;
        let start = self.make_ready(&session, checkpoint)?;
        session.run_op(self.scaffold.local_init_op)?;
        let missing = missing_variables(&session, self.scaffold.ready_op)?;
        if !missing.is_empty() {
            return Err(Error::failed_precondition(format!(
                "the session is not ready after it was {}: no value for {}; give the scaffold an init_op that covers them, \
                 or remove the checkpoint if it is of another model",
                match &start {
                    Start::Attached => "attached to live state".to_owned(),
                    Start::Restored { checkpoint } => format!("restored from {checkpoint}"),
                    Start::Initialized => "initialised".to_owned(),
                },
                list(&missing)
            )));
        }
        let step = read_global_step(&session, self.graph)?;
        Ok(Created { session, start, step })
    }

    fn make_ready(&self, session: &Session, checkpoint: &CheckpointSource) -> Result<Start> {
        let missing = missing_variables(session, self.scaffold.ready_for_local_init_op)?;
        if missing.is_empty() && !self.graph.global_variables().is_empty() {
            tracing::info!(target: "kolo::train", "all variables have values; attached to them");
            return Ok(Start::Attached);
        }
        // What still lives tells how far the work had come before the rest was lost.
        let step_before = match global_step(self.graph) {
            Some(step) if !missing.contains(&step.name()) => read_global_step(session, self.graph)?,
            _ => None,
        };
        let start = match self.restore(session, checkpoint)? {
            Some(restored) => Start::Restored { checkpoint: restored },
            None => {
                self.initialize(session)?;
                Start::Initialized
            }
        };
        if let (Some(before), Some(now)) = (step_before, read_global_step(session, self.graph)?) {
            let how = match &start {
                Start::Restored { checkpoint } => format!("restored {checkpoint}"),
                _ => "there is no checkpoint; initialised".to_owned(),
            };
            tracing::warn!(
                target: "kolo::train",
                "lost {} steps: no value for {} at step {before}; {how}, which is step {now}",
                (before - now).max(0),
                list(&missing)
            );
        }
        Ok(start)
    }

    fn restore(&self, session: &Session, checkpoint: &CheckpointSource) -> Result<Option<String>> {
        let Some(saver) = &self.scaffold.saver else { return Ok(None) };
        match checkpoint {
            CheckpointSource::None => Ok(None),
            CheckpointSource::File(prefix) => {
                if !checkpoint_exists(prefix) {
                    return Ok(None);
                }
                saver.restore(session, prefix)?;
                Ok(Some(prefix.clone()))
            }
            CheckpointSource::Dir(dir) => Ok(saver.restore_latest(session, dir)?.map(|restored| restored.prefix)),
        }
    }

    fn initialize(&self, session: &Session) -> Result<()> {
        session.run(&[], &self.scaffold.init_feeds, &[self.scaffold.init_op])?;
        match &self.scaffold.init_fn {
            Some(init) => init(session),
            None => Ok(()),
        }
    }

    /// Attaches to live variables, or restores a checkpoint; never initialises. The flag tells whether the variables have
    /// values now.
    pub fn recover_session(&self, checkpoint: &CheckpointSource) -> Result<(Arc<Session>, bool)> {
        let session = self.source.open(self.graph)?;
        if missing_variables(&session, self.scaffold.ready_for_local_init_op)?.is_empty() {
            return Ok((session, true));
        }
        let restored = self.restore(&session, checkpoint)?.is_some();
        Ok((session, restored))
    }

    /// A worker's way: waits until the chief has made the variables ready. It looks often (after 10 ms, then less often,
    /// at least every 200 ms) and says what is missing after a second, then every ten.
    pub fn wait_for_session(&self, at_most: Duration) -> Result<Created> {
        let began = Instant::now();
        let mut pause = Duration::from_millis(10);
        let mut say_at = Duration::from_secs(1);
        let mut session = None;
        loop {
            let wait_for = match self.try_attach(&mut session) {
                Ok(missing) if missing.is_empty() => {
                    let session = session.ok_or_else(|| Error::internal("a session that was asked is gone"))?;
                    let step = read_global_step(&session, self.graph)?;
                    return Ok(Created { session, start: Start::Attached, step });
                }
                Ok(missing) => format!("the chief has given no value yet to {}", list(&missing)),
                Err(error) if is_not_ready(&error) => {
                    session = None;
                    error.to_string()
                }
                Err(error) => return Err(error),
            };
            let waited = began.elapsed();
            if waited + pause > at_most {
                return Err(Error::deadline_exceeded(format!(
                    "the session was not ready after {:.1} s: {wait_for}",
                    at_most.as_secs_f64()
                )));
            }
            if waited >= say_at {
                tracing::warn!(target: "kolo::train", "waiting for {:.0} s: {wait_for}", waited.as_secs_f64());
                say_at += Duration::from_secs(10);
            }
            std::thread::sleep(pause);
            pause = (pause * 3 / 2).min(Duration::from_millis(200));
        }
    }

    /// What is missing, after local initialisation if that was possible.
    fn try_attach(&self, session: &mut Option<Arc<Session>>) -> Result<Vec<String>> {
        let session = match session {
            Some(session) => session.clone(),
            None => session.insert(self.source.open(self.graph)?).clone(),
        };
        let missing = missing_variables(&session, self.scaffold.ready_for_local_init_op)?;
        if !missing.is_empty() {
            return Ok(missing);
        }
        session.run_op(self.scaffold.local_init_op)?;
        missing_variables(&session, self.scaffold.ready_op)
    }
}

/// Where a chief looks for a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum CheckpointSource {
    /// Nowhere: lost state is initialised.
    #[default]
    None,
    /// The newest whole one of a directory.
    Dir(PathBuf),
    /// This one, by its prefix.
    File(String),
}

/// Errors of a probe that mean "not yet".
fn is_not_ready(error: &Error) -> bool {
    matches!(error.code(), Code::FailedPrecondition | Code::Unavailable | Code::Aborted | Code::NotFound)
}

/// At most five names, and how many more there are.
fn list(names: &[String]) -> String {
    const SHOWN: usize = 5;
    let shown = names.iter().take(SHOWN).map(|name| format!("'{name}'")).collect::<Vec<_>>().join(", ");
    match names.len() {
        n if n > SHOWN => format!("{shown} and {} more", n - SHOWN),
        _ => shown,
    }
}
