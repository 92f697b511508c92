//! A group whose collectives run beside everything else: on a thread of its own, in the order in which they were begun.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;
use std::time::Instant;

use kolo_core::{Error, Result};
use kolo_ops::collective::{CollectiveCall, CollectiveDone, CollectiveGroup};
use parking_lot::Mutex;

use super::Communicator;

/// One rank's end of a group, for the nodes of graphs and whoever does not want to wait. Dropping it stops what is under way.
pub struct Group {
    rank: usize,
    n_ranks: usize,
    queue: Option<Mutex<Sender<Queued>>>,
    stop: Arc<AtomicBool>,
    /// When the first call was begun since this was taken.
    first_begun: Mutex<Option<Instant>>,
    thread: Option<JoinHandle<()>>,
}

type Queued = (CollectiveCall, CollectiveDone);

impl Group {
    /// Takes a communicator over.
    pub fn new(communicator: Communicator) -> Result<Arc<Group>> {
        let (rank, n_ranks, stop) = (communicator.rank(), communicator.n_ranks(), communicator.stop_flag());
        let (sender, queue) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name(format!("kolo-rank-{rank}"))
            .spawn(move || serve(communicator, &queue))
            .map_err(|error| Error::resource_exhausted(format!("no thread for collectives: {error}")))?;
        Ok(Arc::new(Group {
            rank,
            n_ranks,
            queue: Some(Mutex::new(sender)),
            stop,
            first_begun: Mutex::new(None),
            thread: Some(thread),
        }))
    }

    /// When the first call was begun since this was last asked: how far a rank comes by itself before it needs the others.
    pub fn take_first_begun(&self) -> Option<Instant> {
        self.first_begun.lock().take()
    }
}

fn serve(mut communicator: Communicator, queue: &Receiver<Queued>) {
    while let Ok((call, done)) = queue.recv() {
        done(communicator.run(call));
    }
}

impl CollectiveGroup for Group {
    fn rank(&self) -> usize {
        self.rank
    }

    fn n_ranks(&self) -> usize {
        self.n_ranks
    }

    fn start(&self, call: CollectiveCall, done: CollectiveDone) {
        self.first_begun.lock().get_or_insert_with(Instant::now);
        let refused = match &self.queue {
            Some(queue) => queue.lock().send((call, done)).err().map(|refused| refused.0.1),
            None => Some(done),
        };
        if let Some(done) = refused {
            done(Err(Error::internal("the thread of a group has ended")));
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.queue = None;
        // The thread itself may drop the last handle, at the end of a call.
        if let Some(thread) = self.thread.take().filter(|thread| thread.thread().id() != std::thread::current().id()) {
            // A panic there has ended the calls that it was about.
            let _ = thread.join();
        }
    }
}
