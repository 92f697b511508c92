//! The consumer's end of a pipeline: batches one after the other, and the place where it is.

use std::ops::Range;
use std::time::Duration;

use kolo_core::{Error, Result, Tensor};

use super::order::{Position, Shard};

/// Some samples, made ready for a step.
#[derive(Clone, Debug)]
pub struct Batch {
    /// One tensor per column, the sample being the first dimension.
    pub tensors: Vec<Tensor>,
    /// The epoch of the first sample, from 0.
    pub epoch: u64,
    /// The batch's number in its epoch, from 0. Meaningless with [`across_epochs`](super::Dataset::across_epochs).
    pub index: u64,
    /// True if the epoch ends with or within this batch: the moment to evaluate and to report.
    pub is_last_of_epoch: bool,
    /// Which samples these are, for a [`Ledger`](super::Ledger): one span, or one for each epoch it touches.
    pub spans: Vec<Span>,
    /// Where the batch after this one begins.
    pub after: Position,
}

impl Batch {
    /// How many samples it has.
    pub fn len(&self) -> usize {
        self.spans.iter().map(|span| (span.end - span.start) as usize).sum()
    }

    /// True if there are none, which a pipeline never hands out.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Samples `start .. end` of a worker's share of an epoch, in its order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Span {
    /// The epoch.
    pub epoch: u64,
    /// How the epoch is ordered.
    pub order: SpanOrder,
    /// Whose share.
    pub shard: Shard,
    /// The first sample.
    pub start: u64,
    /// The first that is not part of it.
    pub end: u64,
}

/// Keeps of these spans, one after the other, what lies in `rows`.
pub(crate) fn cut_spans(spans: &mut Vec<Span>, rows: Range<usize>) {
    let (mut before, rows) = (0, rows.start as u64..rows.end as u64);
    spans.retain_mut(|span| {
        let n = span.end - span.start;
        let at = |row: u64| span.start + row.clamp(before, before + n) - before;
        let cut = at(rows.start)..at(rows.end);
        before += n;
        (span.start, span.end) = (cut.start, cut.end);
        !cut.is_empty()
    });
}

/// The order of an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SpanOrder {
    /// As the samples are stored.
    Stored,
    /// All samples permuted by this seed.
    Permuted {
        /// The seed.
        seed: u64,
    },
    /// A worker's share of a stream drawn from a buffer by this seed.
    Drawn {
        /// The seed.
        seed: u64,
    },
}

/// What makes batches.
pub(crate) trait Source: Send {
    /// The next batch; none after the last epoch.
    fn next(&mut self) -> Result<Option<Batch>>;
    /// As [`Source::next`], giving up after a while where it waits for another thread.
    fn next_within(&mut self, _timeout: Duration) -> Result<Option<Batch>> {
        self.next()
    }
    /// Goes to a place. It is checked against the data before anything changes.
    fn seek(&mut self, position: Position) -> Result<()>;
    /// Where it starts.
    fn start(&self) -> Position;
}

/// Batches, one after the other: an iterator that knows where it is. After an error it ends; [`Batches::restore`] lets it
/// go on.
pub struct Batches {
    source: Box<dyn Source>,
    position: Position,
    is_done: bool,
}

impl Batches {
    pub(crate) fn new(source: Box<dyn Source>) -> Batches {
        Batches { position: source.start(), source, is_done: false }
    }

    /// The place after the last batch that was handed out, whatever was prefetched beyond it: to keep with a checkpoint.
    pub fn save(&self) -> Position {
        self.position
    }

    /// Goes on from a position taken earlier, here or in another process: the next batch is the one that would have come
    /// next there. The position's seed is used, not this pipeline's.
    pub fn restore(&mut self, position: Position) -> Result<()> {
        self.source.seek(position)?;
        (self.position, self.is_done) = (position, false);
        Ok(())
    }

    /// The next batch, or an error if it takes longer than `timeout` to arrive from the prefetching thread. Without
    /// prefetching, batches are made here and the limit does not apply.
    pub fn next_within(&mut self, timeout: Duration) -> Option<Result<Batch>> {
        if self.is_done {
            return None;
        }
        let batch = self.source.next_within(timeout);
        // A late batch is still to come; every other error ends the reading.
        if batch.as_ref().is_err_and(|error| error.code() == kolo_core::Code::DeadlineExceeded) {
            return batch.transpose();
        }
        self.handed_out(batch)
    }

    fn handed_out(&mut self, batch: Result<Option<Batch>>) -> Option<Result<Batch>> {
        match &batch {
            Ok(Some(batch)) => self.position = batch.after,
            Ok(None) | Err(_) => self.is_done = true,
        }
        batch.transpose()
    }
}

impl Iterator for Batches {
    type Item = Result<Batch>;

    fn next(&mut self) -> Option<Result<Batch>> {
        if self.is_done {
            return None;
        }
        let batch = self.source.next();
        self.handed_out(batch)
    }
}

impl std::fmt::Debug for Batches {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "batches at {}", self.position)
    }
}

/// Says that a position is not one of this data set.
pub(crate) fn no_such_place(position: Position, n: u64) -> Error {
    Error::out_of_range(format!(
        "there is no {position} here: this worker's share of an epoch has {n} samples; was the position taken from other \
         data, or with another number of workers?"
    ))
}
