//! Who makes a monitored session's sessions.

use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use kolo_core::{Error, Result};
use kolo_graph::Graph;
use kolo_runtime::SessionConfig;

use super::{CheckpointSource, Created, FinalScaffold, Scaffold, SessionManager, SessionSource};

/// Makes sessions that are ready to train: the first one, and another when a recoverable error lost it.
pub trait SessionCreator<'g> {
    /// The graph its sessions run.
    fn graph(&self) -> &'g Graph;

    /// Completes the scaffold. Called once, after the hooks have added what they need to the graph.
    fn finalize(&mut self) -> Result<Rc<FinalScaffold<'g>>>;

    /// A session that is ready.
    fn create_session(&mut self) -> Result<Created>;
}

/// Opens a session and initialises or restores its variables, unless they live already.
pub struct ChiefSessionCreator<'g> {
    parts: Parts<'g>,
    checkpoint: CheckpointSource,
}

impl<'g> ChiefSessionCreator<'g> {
    /// A chief over `graph`, with local sessions and no checkpoints.
    pub fn new(graph: &'g Graph) -> ChiefSessionCreator<'g> {
        ChiefSessionCreator { parts: Parts::new(graph), checkpoint: CheckpointSource::None }
    }

    /// The pieces to begin with.
    pub fn scaffold(mut self, scaffold: Scaffold<'g>) -> Self {
        self.parts.scaffold = Some(scaffold);
        self
    }

    /// Where sessions come from.
    pub fn source(mut self, source: impl SessionSource + 'g) -> Self {
        self.parts.source = Rc::new(source);
        self
    }

    /// Restores the newest whole checkpoint of this directory, if it has one.
    pub fn checkpoint_dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.checkpoint = CheckpointSource::Dir(dir.into());
        self
    }

    /// Restores this checkpoint, if it exists.
    pub fn checkpoint_file(mut self, prefix: impl Into<String>) -> Self {
        self.checkpoint = CheckpointSource::File(prefix.into());
        self
    }
}

impl<'g> SessionCreator<'g> for ChiefSessionCreator<'g> {
    fn graph(&self) -> &'g Graph {
        self.parts.graph
    }

    fn finalize(&mut self) -> Result<Rc<FinalScaffold<'g>>> {
        self.parts.finalize()
    }

    fn create_session(&mut self) -> Result<Created> {
        self.parts.manager()?.prepare_session(&self.checkpoint)
    }
}

/// Opens a session and waits until the chief has made the variables ready.
pub struct WorkerSessionCreator<'g> {
    parts: Parts<'g>,
    at_most: Duration,
}

impl<'g> WorkerSessionCreator<'g> {
    /// A worker over `graph`. It waits for half an hour at most, as TensorFlow's does.
    pub fn new(graph: &'g Graph, source: impl SessionSource + 'g) -> WorkerSessionCreator<'g> {
        let mut parts = Parts::new(graph);
        parts.source = Rc::new(source);
        WorkerSessionCreator { parts, at_most: Duration::from_secs(30 * 60) }
    }

    /// The pieces to begin with.
    pub fn scaffold(mut self, scaffold: Scaffold<'g>) -> Self {
        self.parts.scaffold = Some(scaffold);
        self
    }

    /// How long to wait for the chief.
    pub fn max_wait(mut self, at_most: Duration) -> Self {
        self.at_most = at_most;
        self
    }
}

impl<'g> SessionCreator<'g> for WorkerSessionCreator<'g> {
    fn graph(&self) -> &'g Graph {
        self.parts.graph
    }

    fn finalize(&mut self) -> Result<Rc<FinalScaffold<'g>>> {
        self.parts.finalize()
    }

    fn create_session(&mut self) -> Result<Created> {
        self.parts.manager()?.wait_for_session(self.at_most)
    }
}

/// What both creators have.
struct Parts<'g> {
    graph: &'g Graph,
    source: Rc<dyn SessionSource + 'g>,
    scaffold: Option<Scaffold<'g>>,
    complete: Option<Rc<FinalScaffold<'g>>>,
}

impl<'g> Parts<'g> {
    fn new(graph: &'g Graph) -> Parts<'g> {
        Parts { graph, source: Rc::new(SessionConfig::default()), scaffold: None, complete: None }
    }

    fn finalize(&mut self) -> Result<Rc<FinalScaffold<'g>>> {
        if self.complete.is_none() {
            let scaffold = self.scaffold.take().unwrap_or_default();
            self.complete = Some(Rc::new(scaffold.finalize(self.graph)?));
        }
        self.complete.clone().ok_or_else(|| Error::internal("a scaffold that was made is gone"))
    }

    fn manager(&mut self) -> Result<SessionManager<'g>> {
        Ok(SessionManager::new(self.graph, self.source.clone(), self.finalize()?))
    }
}
