//! The usual monitored session, put together from a few settings.

use std::path::PathBuf;
use std::time::Duration;

use kolo_core::Result;
use kolo_graph::Graph;
use kolo_runtime::SessionConfig;

use super::hooks::{CheckpointSaver, StepCounter, SummarySaver};
use super::summary::FileWriter;
use super::{ChiefSessionCreator, Every, MonitoredSession, Scaffold, SessionHook, SessionSource, WorkerSessionCreator};

/// Makes a [`MonitoredSession`] with the usual hooks: on the chief, checkpoints every 10 minutes, summaries and the step
/// rate every 100 steps; on the others none of these.
///
/// ```
/// use kolo::optim::{Optimizer, Sgd};
/// use kolo::train::{self, MonitoredTrainingSession, hooks::StopAtStep};
///
/// let g = kolo::graph();
/// let w = g.variable("w", 5.0f32);
/// let loss = w.read() * w.read();
/// let update = Sgd::new(0.1).minimize(loss, Some(train::global_step_or_create(&g)?))?;
///
/// let mut session = MonitoredTrainingSession::new(&g).hook(StopAtStep::last(10)).build()?;
/// while !session.should_stop() {
///     session.run(&[], &[], &[update])?;
/// }
/// session.close()?;
/// # Ok::<(), kolo::Error>(())
/// ```
pub struct MonitoredTrainingSession<'g> {
    graph: &'g Graph,
    source: Box<dyn SessionSource + 'g>,
    is_chief: bool,
    checkpoint_dir: Option<PathBuf>,
    scaffold: Scaffold<'g>,
    hooks: Vec<Box<dyn SessionHook<'g> + 'g>>,
    chief_hooks: Vec<Box<dyn SessionHook<'g> + 'g>>,
    save_checkpoint: Option<Every>,
    save_summaries: Option<Every>,
    count_steps: Option<Every>,
    max_wait: Duration,
}

impl<'g> MonitoredTrainingSession<'g> {
    /// The chief of a local session over `graph`, unless told otherwise.
    pub fn new(graph: &'g Graph) -> MonitoredTrainingSession<'g> {
        MonitoredTrainingSession {
            graph,
            source: Box::new(SessionConfig::default()),
            is_chief: true,
            checkpoint_dir: None,
            scaffold: Scaffold::new(),
            hooks: Vec::new(),
            chief_hooks: Vec::new(),
            save_checkpoint: Some(Every::Secs(600.0)),
            save_summaries: Some(Every::Steps(100)),
            count_steps: Some(Every::Steps(100)),
            max_wait: Duration::from_secs(2 * 60 * 60),
        }
    }

    /// Where sessions come from.
    pub fn source(mut self, source: impl SessionSource + 'g) -> Self {
        self.source = Box::new(source);
        self
    }

    /// Whether this process initialises, restores and saves.
    pub fn is_chief(mut self, is_chief: bool) -> Self {
        self.is_chief = is_chief;
        self
    }

    /// Where checkpoints and event files go. Without it there are none.
    pub fn checkpoint_dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.checkpoint_dir = Some(dir.into());
        self
    }

    /// The pieces to begin with.
    pub fn scaffold(mut self, scaffold: Scaffold<'g>) -> Self {
        self.scaffold = scaffold;
        self
    }

    /// A hook for every process.
    pub fn hook(mut self, hook: impl SessionHook<'g> + 'g) -> Self {
        self.hooks.push(Box::new(hook));
        self
    }

    /// A hook for every process that was chosen while the program runs.
    pub fn boxed_hook(mut self, hook: Box<dyn SessionHook<'g> + 'g>) -> Self {
        self.hooks.push(hook);
        self
    }

    /// A hook for the chief only.
    pub fn chief_only_hook(mut self, hook: impl SessionHook<'g> + 'g) -> Self {
        self.chief_hooks.push(Box::new(hook));
        self
    }

    /// How often to save checkpoints; `None` for never.
    pub fn save_checkpoint(mut self, every: impl Into<Option<Every>>) -> Self {
        self.save_checkpoint = every.into();
        self
    }

    /// How often to write summaries; `None` for never.
    pub fn save_summaries(mut self, every: impl Into<Option<Every>>) -> Self {
        self.save_summaries = every.into();
        self
    }

    /// How often to log the step rate; `None` for never.
    pub fn count_steps(mut self, every: impl Into<Option<Every>>) -> Self {
        self.count_steps = every.into();
        self
    }

    /// How long a process that is not the chief waits for it.
    pub fn max_wait(mut self, at_most: Duration) -> Self {
        self.max_wait = at_most;
        self
    }

    /// Opens the session.
    pub fn build(mut self) -> Result<MonitoredSession<'g>> {
        let source = std::mem::replace(&mut self.source, Box::new(SessionConfig::default()));
        let source = move |graph: &Graph| source.open(graph);
        if !self.is_chief {
            let creator = WorkerSessionCreator::new(self.graph, source).scaffold(self.scaffold).max_wait(self.max_wait);
            return MonitoredSession::new(creator, self.hooks);
        }
        let mut hooks = self.hooks;
        hooks.append(&mut self.chief_hooks);
        let mut creator = ChiefSessionCreator::new(self.graph).source(source).scaffold(self.scaffold);
        match &self.checkpoint_dir {
            Some(dir) => {
                creator = creator.checkpoint_dir(dir);
                let writer = FileWriter::new(dir)?;
                if let Some(every) = self.count_steps {
                    hooks.push(Box::new(StepCounter::new(every).writer(writer.clone())));
                }
                if let Some(every) = self.save_summaries {
                    hooks.push(Box::new(SummarySaver::new(writer, every)));
                }
                if let Some(every) = self.save_checkpoint {
                    hooks.push(Box::new(CheckpointSaver::new(dir, every)));
                }
            }
            None => {
                if let Some(every) = self.count_steps {
                    hooks.push(Box::new(StepCounter::new(every)));
                }
            }
        }
        MonitoredSession::new(creator, hooks)
    }
}
