//! Threads that keep a queue filled.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kolo_core::{Code, Error, Result};
use kolo_graph::{Graph, Operation};
use kolo_ops::queue::QueueHandle;
use kolo_runtime::Session;

use super::Coordinator;

/// The collection of a graph's queue runners.
const COLLECTION: &str = "queue_runners";

/// Runs the enqueue operations of a queue over and over, one thread each, until the input ends or a [`Coordinator`] says
/// stop. It holds names only, so it can be sent to threads and kept in a graph's collection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueRunner {
    queue: String,
    enqueue: Vec<String>,
    close: String,
    cancel: String,
}

impl QueueRunner {
    /// A runner for `queue`. An operation given twice gets two threads.
    #[track_caller]
    pub fn new<'g>(queue: &QueueHandle<'g>, enqueue: &[Operation<'g>]) -> QueueRunner {
        QueueRunner {
            queue: queue.handle().operation().name(),
            enqueue: enqueue.iter().map(|operation| operation.name()).collect(),
            close: queue.close().name(),
            cancel: queue.close_and_cancel().name(),
        }
    }

    /// Adds it to the graph's queue runners, which training sessions start by themselves.
    pub fn add_to(&self, graph: &Graph) {
        graph.add_to_collection(COLLECTION, &self.to_string());
    }

    /// The queue runners of a graph.
    pub fn all(graph: &Graph) -> Result<Vec<QueueRunner>> {
        graph.collection(COLLECTION).iter().map(|text| text.parse()).collect()
    }

    /// Starts its threads. When the input ends (`OutOfRange`, or a closed queue) in all of them, the queue is closed, so
    /// that its consumers see the end too.
    pub fn start(&self, session: &Arc<Session>, coordinator: &Coordinator) -> Result<()> {
        let n_running = Arc::new(AtomicUsize::new(self.enqueue.len()));
        for (i, operation) in self.enqueue.iter().enumerate() {
            let (session, operation, close) = (session.clone(), operation.clone(), self.close.clone());
            let n_running = n_running.clone();
            coordinator.spawn(&format!("{}-{i}", self.queue), move |coordinator| {
                let mut outcome = Ok(());
                while !coordinator.should_stop() {
                    match session.run_named(&[], &[], &[&operation]) {
                        Ok(_) => {}
                        Err(error) if matches!(error.code(), Code::OutOfRange | Code::Cancelled) => break,
                        Err(error) => {
                            outcome = Err(error);
                            break;
                        }
                    }
                }
                if n_running.fetch_sub(1, Ordering::AcqRel) == 1 && outcome.is_ok() {
                    // The session may be closed already; then so is the queue for its consumers.
                    if let Err(error) = session.run_named(&[], &[], &[&close]) {
                        tracing::debug!("closing the queue after its last element: {error}");
                    }
                }
                outcome
            })?;
        }
        let (session, cancel) = (session.clone(), self.cancel.clone());
        coordinator.spawn(&format!("{}-stop", self.queue), move |coordinator| {
            while !coordinator.wait_for_stop(Duration::from_secs(60)) {}
            if let Err(error) = session.run_named(&[], &[], &[&cancel]) {
                tracing::debug!("cancelling the queue: {error}");
            }
            Ok(())
        })
    }
}

/// Starts all queue runners of a graph.
pub fn start_queue_runners(graph: &Graph, session: &Arc<Session>, coordinator: &Coordinator) -> Result<()> {
    QueueRunner::all(graph)?.iter().try_for_each(|runner| runner.start(session, coordinator))
}

impl fmt::Display for QueueRunner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {} {}", self.queue, self.close, self.cancel, self.enqueue.join(" "))
    }
}

impl FromStr for QueueRunner {
    type Err = Error;

    fn from_str(text: &str) -> Result<QueueRunner> {
        let mut names = text.split(' ').map(str::to_owned);
        match (names.next(), names.next(), names.next()) {
            (Some(queue), Some(close), Some(cancel)) => {
                Ok(QueueRunner { queue, close, cancel, enqueue: names.collect() })
            }
            _ => Err(Error::invalid_argument(format!(
                "'{text}' in collection '{COLLECTION}' is not a queue runner: wants queue, close and cancel operations, \
                 then enqueue operations"
            ))),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use kolo_core::{DType, PartialShape};

    #[test]
    fn a_runner_fills_its_queue_to_the_end_of_input() {
        let g = kolo_ops::graph();
        let q = QueueHandle::new(&g, "numbers", &[(DType::I64, PartialShape::scalar())], Some(2));
        let counter = g.new_variable("counter", 0i64).kind(kolo_graph::VariableKind::Reference).build();
        let next = kolo_ops::state::count_up_to::count_up_to(counter.handle(), 5);
        let runner = QueueRunner::new(&q, &[q.enqueue(&[next])]);
        runner.add_to(&g);
        assert_eq!(QueueRunner::all(&g).unwrap(), [runner]);
        let take = q.dequeue()[0];
        let init = g.global_variables_initializer();

        let session = Arc::new(Session::new(&g).unwrap());
        session.run_op(init).unwrap();
        let coordinator = Coordinator::new();
        start_queue_runners(&g, &session, &coordinator).unwrap();
        let taken: Vec<i64> = (0..5).map(|_| session.fetch(take).unwrap().scalar_value().unwrap()).collect();
        assert_eq!(taken, [0, 1, 2, 3, 4]);
        assert_eq!(session.fetch(take).unwrap_err().code(), Code::OutOfRange);
        coordinator.request_stop();
        coordinator.join(Duration::from_secs(20)).unwrap();
    }

    #[test]
    fn stopping_frees_a_runner_that_waits_at_a_full_queue() {
        let g = kolo_ops::graph();
        let q = QueueHandle::new(&g, "full", &[(DType::F32, PartialShape::scalar())], Some(1));
        let runner = QueueRunner::new(&q, &[q.enqueue(&[g.constant(1.0f32)])]);
        let session = Arc::new(Session::new(&g).unwrap());
        let coordinator = Coordinator::new();
        runner.start(&session, &coordinator).unwrap();
        coordinator.request_stop();
        coordinator.join(Duration::from_secs(20)).unwrap();
    }
}
