//! How parameter servers that `TF_CONFIG` describes learn that the training has ended: on each there is a queue, into which every
//! worker puts its number when it is done.

use std::collections::BTreeSet;
use std::sync::Arc;

use kolo_ops::queue::FifoQueue;

use crate::{DType, Graph, Output, PartialShape, Result, Session, Tensor};

/// The name of the queue on each server.
const QUEUE: &str = "kolo_ended";

/// Tells `n_ps` servers that the worker with this number has ended. `connect` makes a session of the cluster.
pub fn tell(n_ps: usize, replica: usize, connect: &dyn Fn(&Graph) -> Result<Arc<Session>>) -> Result<()> {
    let g = crate::graph();
    let number = g.constant(Tensor::scalar(replica as i64));
    let all: Vec<_> = (0..n_ps)
        .map(|ps| g.device(&format!("/job:ps/task:{ps}/device:CPU:0"), || queue(&g).enqueue(&[number])))
        .collect();
    let all = g.group("all", &all);
    g.check()?;
    connect(&g)?.run_op(all)
}

/// Reads which workers have ended, on a server.
pub struct Ended<'g> {
    size: Output<'g>,
    next: Output<'g>,
    known: BTreeSet<i64>,
}

impl<'g> Ended<'g> {
    /// For the server of this index. A session of the graph is made after this.
    pub fn new(graph: &'g Graph, index: u32) -> Result<Ended<'g>> {
        let (size, next) = graph.device(&format!("/job:ps/task:{index}/device:CPU:0"), || {
            let queue = queue(graph);
            (queue.size(), queue.dequeue()[0])
        });
        graph.check()?;
        Ok(Ended { size, next, known: BTreeSet::new() })
    }

    /// The numbers of those that have ended. Does not wait.
    pub fn look(&mut self, session: &Session) -> Result<&BTreeSet<i64>> {
        for _ in 0..session.fetch(self.size)?.scalar_value::<i32>()? {
            self.known.insert(session.fetch(self.next)?.scalar_value::<i64>()?);
        }
        Ok(&self.known)
    }
}

fn queue(graph: &Graph) -> FifoQueue<'_> {
    FifoQueue::shared(graph, QUEUE, &[(DType::I64, PartialShape::scalar())], None)
}
