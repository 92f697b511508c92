//! Batches made ahead on a thread of their own.
//!
//! The thread owns the source and leaves batches in a bounded channel. It ends when the source ends, when the consumer
//! goes away (the next send fails), or with an error, which travels to the consumer like a batch. Each batch carries the
//! position after it, so what lies in the channel never shows in the consumer's position.
//!
//! To go elsewhere, the consumer closes the channel, takes the source back from the thread, seeks, and starts again.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use kolo_core::{Error, Result};

use super::batches::{Batch, Source};
use super::order::Position;

/// A source, a thread that reads it, and what that has read.
pub(crate) struct Prefetch {
    n: usize,
    start: Position,
    state: PrefetchState,
}

enum PrefetchState {
    /// Nothing was asked for yet, or the source ended.
    Idle(Box<dyn Source>),
    Running {
        batches: Receiver<Result<Batch>>,
        thread: JoinHandle<Box<dyn Source>>,
    },
    /// The thread could not be started or was lost.
    Lost,
}

impl Prefetch {
    /// Makes up to `n` batches ahead, beginning with the first call for one.
    pub(crate) fn new(source: Box<dyn Source>, n: usize) -> Result<Prefetch> {
        const MAX: usize = 1 << 16;
        if n > MAX {
            return Err(Error::invalid_argument(format!("prefetching {n} batches; the most is {MAX}")));
        }
        Ok(Prefetch { n, start: source.start(), state: PrefetchState::Idle(source) })
    }

    fn receiver(&mut self) -> Result<&Receiver<Result<Batch>>> {
        if let PrefetchState::Idle(_) = self.state
            && let PrefetchState::Idle(source) = std::mem::replace(&mut self.state, PrefetchState::Lost)
        {
            self.state = run_ahead(source, self.n)?;
        }
        match &self.state {
            PrefetchState::Running { batches, .. } => Ok(batches),
            PrefetchState::Idle(_) | PrefetchState::Lost => Err(lost()),
        }
    }

    /// Stops the thread, if one runs, and takes the source back.
    fn stop(&mut self) -> Result<Box<dyn Source>> {
        match std::mem::replace(&mut self.state, PrefetchState::Lost) {
            PrefetchState::Idle(source) => Ok(source),
            PrefetchState::Running { batches, thread } => {
                // With nobody to receive, the thread's next send fails and it ends.
                drop(batches);
                thread.join().map_err(|_| lost())
            }
            PrefetchState::Lost => Err(lost()),
        }
    }

    fn received(&mut self, received: Option<Result<Batch>>) -> Result<Option<Batch>> {
        match received {
            Some(batch) => batch.map(Some),
            // The thread has ended, so stopping does not wait.
            None => {
                self.state = PrefetchState::Idle(self.stop()?);
                Ok(None)
            }
        }
    }
}

impl Source for Prefetch {
    fn next(&mut self) -> Result<Option<Batch>> {
        let received = self.receiver()?.recv().ok();
        self.received(received)
    }

    fn next_within(&mut self, timeout: Duration) -> Result<Option<Batch>> {
        match self.receiver()?.recv_timeout(timeout) {
            Ok(batch) => self.received(Some(batch)),
            Err(RecvTimeoutError::Disconnected) => self.received(None),
            Err(RecvTimeoutError::Timeout) => {
                Err(Error::deadline_exceeded(format!("the prefetching thread made no batch within {timeout:?}")))
            }
        }
    }

    fn seek(&mut self, position: Position) -> Result<()> {
        let mut source = self.stop()?;
        let done = source.seek(position);
        self.state = PrefetchState::Idle(source);
        done
    }

    fn start(&self) -> Position {
        self.start
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        // A thread that was lost has nothing left to wait for.
        let _ = self.stop();
    }
}

fn run_ahead(mut source: Box<dyn Source>, n: usize) -> Result<PrefetchState> {
    let (sender, batches) = sync_channel(n);
    let read = move || {
        loop {
            let batch = catch_unwind(AssertUnwindSafe(|| source.next())).unwrap_or_else(|panic| Err(panicked(&*panic)));
            let is_last = batch.is_err();
            let Some(batch) = batch.transpose() else { return source };
            if sender.send(batch).is_err() || is_last {
                return source;
            }
        }
    };
    let thread = std::thread::Builder::new().name("kolo-prefetch".to_owned()).spawn(read);
    let thread =
        thread.map_err(|reason| Error::resource_exhausted(format!("no thread to prefetch batches on: {reason}")))?;
    Ok(PrefetchState::Running { batches, thread })
}

fn panicked(panic: &(dyn Any + Send)) -> Error {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message");
    Error::internal(format!("making a batch panicked: {text}"))
}

fn lost() -> Error {
    Error::internal("the prefetching thread was lost")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    use kolo_core::{Code, Tensor};

    use super::super::Dataset;
    use super::*;

    fn numbers(n: usize) -> Dataset {
        Dataset::new([Tensor::from((0..n as u32).collect::<Vec<u32>>())])
    }

    #[test]
    fn never_more_than_n_batches_ahead_and_the_thread_ends_with_its_consumer() {
        let made = Arc::new(AtomicUsize::new(0));
        let (sender, progress) = mpsc::channel();
        let counter = made.clone();
        let counted = numbers(1000).map(move |columns| {
            counter.fetch_add(1, Ordering::SeqCst);
            let _ = sender.send(());
            Ok(columns)
        });
        let mut batches = counted.prefetch(3).batches().unwrap();
        assert_eq!(made.load(Ordering::SeqCst), 0);
        batches.next().unwrap().unwrap();
        // One handed out, three in the channel, one that waits to be sent.
        (0..5).for_each(|_| progress.recv().unwrap());
        assert_eq!(batches.save().sample, 1);
        drop(batches);
        // Dropping joined the thread, so the count is final.
        assert_eq!(made.load(Ordering::SeqCst), 5);
    }

    #[test]
    fn errors_and_panics_reach_the_consumer() {
        for is_panic in [false, true] {
            let data = numbers(5).prefetch(2).map(move |columns| match columns[0].data::<u32>()? {
                [2] if is_panic => panic!("at two"),
                [2] => Err(Error::data_loss("at two")),
                _ => Ok(columns),
            });
            let mut batches = data.batches().unwrap();
            assert_eq!(batches.by_ref().take(2).filter(Result::is_ok).count(), 2);
            let error = batches.next().unwrap().unwrap_err();
            assert_eq!(error.code(), if is_panic { Code::Internal } else { Code::DataLoss });
            assert!(error.message().ends_with("at two"), "{error}");
            assert!(batches.next().is_none());
            // Going on behind the bad sample.
            batches.restore(Position { sample: 3, ..Position::default() }).unwrap();
            assert_eq!(batches.filter(Result::is_ok).count(), 2);
        }
    }

    #[test]
    fn a_late_batch_is_reported_and_not_lost() {
        let (sender, gate) = mpsc::channel::<()>();
        let gate = std::sync::Mutex::new(gate);
        let data = numbers(2).prefetch(1).map(move |columns| {
            gate.lock().unwrap().recv().map_err(|_| Error::cancelled("the test is over"))?;
            Ok(columns)
        });
        let mut batches = data.batches().unwrap();
        let late = batches.next_within(Duration::from_millis(1)).unwrap().unwrap_err();
        assert_eq!(late.code(), Code::DeadlineExceeded);
        assert!(late.message().contains("within 1ms"), "{late}");
        sender.send(()).unwrap();
        assert_eq!(batches.next().unwrap().unwrap().after.sample, 1);
        drop(sender);
        assert_eq!(batches.next().unwrap().unwrap_err().code(), Code::Cancelled);
    }

    #[test]
    fn the_number_is_bounded() {
        assert!(numbers(1).prefetch(usize::MAX).batches().is_err());
    }
}
