//! What a trainer needs that is one worker of a cluster with parameter servers: a monitored session, in which the chief initialises and the
//! others wait, and the hook of the optimizer that the workers share.

use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use kolo_core::{Code, Result, Tensor};
use kolo_graph::{Graph, Operation, Output};
use kolo_runtime::Session;

use super::{ChiefSessionCreator, MonitoredSession, SessionSource, WorkerSessionCreator};
use crate::strategy::Seat;

pub(super) struct Worker<'g> {
    graph: &'g Graph,
    session: MonitoredSession<'g>,
    source: Rc<dyn SessionSource>,
    is_chief: bool,
}

impl<'g> Worker<'g> {
    /// Opens a session whose variables have values: the chief's are restored from this folder or initialised, unless they live.
    pub fn open(
        graph: &'g Graph,
        seat: &Seat,
        source: Box<dyn SessionSource>,
        restore: Option<&Path>,
    ) -> Result<Worker<'g>> {
        let source: Rc<dyn SessionSource> = source.into();
        let opened = source.clone();
        let open = move |graph: &Graph| opened.open(graph);
        let (hooks, is_chief) = (vec![seat.hook(graph)?], seat.worker().is_chief());
        let session = match is_chief {
            true => {
                let mut creator = ChiefSessionCreator::new(graph).source(open);
                if let Some(dir) = restore {
                    creator = creator.checkpoint_dir(dir);
                }
                MonitoredSession::new(creator, hooks)?
            }
            false => MonitoredSession::new(WorkerSessionCreator::new(graph, open), hooks)?,
        };
        Ok(Worker { graph, session, source, is_chief })
    }

    /// The session in use. It is another one after a server was lost.
    pub fn session(&self) -> Result<Arc<Session>> {
        self.session.session().cloned()
    }

    /// One step; `None` if the chief has ended the training, which this step could only wait for.
    pub fn step(
        &mut self,
        fetches: &[Output<'g>],
        feeds: &[(Output<'g>, Tensor)],
        train: Operation<'g>,
    ) -> Result<Option<Vec<Tensor>>> {
        match self.session.run(fetches, feeds, &[train]) {
            Err(error) if error.code() == Code::OutOfRange && !self.is_chief => Ok(None),
            values => values.map(Some),
        }
    }

    /// The global step that the last step saw.
    pub fn global_step(&self) -> Option<i64> {
        self.session.global_step()
    }

    /// Ends the training of all workers if this is the chief, and this worker's part of it. Gives a session for a last look.
    pub fn end(&mut self) -> Result<Arc<Session>> {
        self.session.close()?;
        self.source.open(self.graph)
    }
}
