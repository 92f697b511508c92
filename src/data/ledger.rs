//! Which samples were seen how often, over all workers and all restarts.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use kolo_core::{Error, Result};

use super::batches::{Batch, Span, SpanOrder};
use super::order::{Shard, permutation};

/// A record of the samples that were used: every worker keeps one, writes it down as text beside its checkpoint, and
/// whoever wants to know merges them. It stays small: batches that follow one another are one line.
///
/// ```
/// use kolo::Tensor;
/// use kolo::data::{Dataset, Ledger};
///
/// let data = Dataset::new([Tensor::from([0u8; 10])]).batch(2, false).shuffle(7);
/// let mut ledger = Ledger::new();
/// for worker in 0..3 {
///     for batch in data.clone().shard(worker, 3).batches()? {
///         ledger.record(&batch?);
///     }
/// }
/// let count = ledger.count(0, 10)?;
/// assert_eq!((count.never, count.once, count.twice), (0, 10, 0));
/// # Ok::<(), kolo::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ledger {
    spans: Vec<Span>,
}

/// How often the samples of an epoch were seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EpochCount {
    /// Samples that nobody saw.
    pub never: usize,
    /// Samples that were seen once, as all should be.
    pub once: usize,
    /// Samples that were seen twice.
    pub twice: usize,
    /// Samples that were seen more often.
    pub more: usize,
}

impl Ledger {
    /// An empty ledger.
    pub fn new() -> Ledger {
        Ledger::default()
    }

    /// A batch was used.
    pub fn record(&mut self, batch: &Batch) {
        batch.spans.iter().for_each(|span| self.record_span(*span));
    }

    /// These samples were used.
    pub fn record_span(&mut self, span: Span) {
        let follows = |last: &Span| {
            last.end == span.start
                && Span { start: last.start, end: span.end, ..span } == Span { end: span.end, ..*last }
        };
        match self.spans.iter_mut().rev().find(|last| follows(last)) {
            Some(last) => last.end = span.end,
            None => self.spans.push(span),
        }
    }

    /// Adds what another worker, or this one before it was restarted, has recorded.
    pub fn merge(&mut self, other: &Ledger) {
        other.spans.iter().for_each(|span| self.record_span(*span));
    }

    /// The epochs of which anything was seen.
    pub fn epochs(&self) -> Vec<u64> {
        let mut epochs: Vec<u64> = self.spans.iter().map(|span| span.epoch).collect();
        epochs.sort_unstable();
        epochs.dedup();
        epochs
    }

    /// How often each of the `n_samples` samples of an epoch was seen.
    ///
    /// # Errors
    /// If a span reaches beyond the samples, or if a stream that a buffer shuffles was read with different seeds or
    /// different numbers of workers within one epoch: which samples those were cannot be told without reading it again.
    pub fn count(&self, epoch: u64, n_samples: usize) -> Result<EpochCount> {
        let mut seen = Vec::new();
        seen.try_reserve_exact(n_samples)
            .map_err(|_| Error::resource_exhausted(format!("no memory to count {n_samples} samples")))?;
        seen.resize(n_samples, 0u8);
        let spans: Vec<&Span> = self.spans.iter().filter(|span| span.epoch == epoch && span.start < span.end).collect();
        let mut orders = BTreeMap::new();
        let drawn = |span: &Span| matches!(span.order, SpanOrder::Drawn { .. });
        if let Some(first) = spans.iter().find(|span| drawn(span)) {
            let alike = |span: &Span| span.order == first.order && span.shard.n_workers == first.shard.n_workers;
            if !spans.iter().all(|span| alike(span)) {
                return Err(Error::failed_precondition(format!(
                    "epoch {epoch} of a shuffled stream was read with different seeds or numbers of workers; which samples \
                     were seen cannot be told"
                )));
            }
        }
        for span in spans {
            if span.end > span.shard.len(n_samples) as u64 {
                return Err(Error::out_of_range(format!(
                    "the ledger has '{span}', but an epoch has {n_samples} samples"
                )));
            }
            let order: Option<&Vec<u32>> = match span.order {
                SpanOrder::Stored | SpanOrder::Drawn { .. } => None,
                SpanOrder::Permuted { seed } => {
                    let n = u32::try_from(n_samples);
                    let n = n.map_err(|_| Error::out_of_range(format!("{n_samples} samples cannot be permuted")))?;
                    Some(orders.entry(seed).or_insert_with(|| permutation(seed, epoch, n)))
                }
            };
            for i in span.start..span.end {
                let place = span.shard.place(i as usize);
                let sample = order.map_or(place, |order| order[place] as usize);
                seen[sample] = seen[sample].saturating_add(1);
            }
        }
        let times = |n: u8| seen.iter().filter(|&&count| count == n).count();
        let (never, once, twice) = (times(0), times(1), times(2));
        Ok(EpochCount { never, once, twice, more: n_samples - never - once - twice })
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Span { epoch, order, shard, start, end } = self;
        write!(f, "epoch {epoch} worker {} of {} samples {start} to {end} ", shard.worker, shard.n_workers)?;
        match order {
            SpanOrder::Stored => f.write_str("stored"),
            SpanOrder::Permuted { seed } => write!(f, "permuted {seed}"),
            SpanOrder::Drawn { seed } => write!(f, "drawn {seed}"),
        }
    }
}

impl FromStr for Span {
    type Err = Error;

    fn from_str(line: &str) -> Result<Span> {
        let wrong = || Error::invalid_argument(format!("'{line}' is not a line of a ledger"));
        let words: Vec<&str> = line.split(' ').collect();
        let number = |text: &str| text.parse::<u64>().map_err(|_| wrong());
        let (head, tail) = words.split_at_checked(9).ok_or_else(wrong)?;
        let ["epoch", epoch, "worker", worker, "of", n_workers, "samples", start, "to"] = head else {
            return Err(wrong());
        };
        let (end, order) = match tail {
            [end, "stored"] => (end, SpanOrder::Stored),
            [end, "permuted", seed] => (end, SpanOrder::Permuted { seed: number(seed)? }),
            [end, "drawn", seed] => (end, SpanOrder::Drawn { seed: number(seed)? }),
            _ => return Err(wrong()),
        };
        let small = |text: &str| text.parse::<usize>().map_err(|_| wrong());
        let shard = Shard::new(small(worker)?, small(n_workers)?)?;
        let span = Span { epoch: number(epoch)?, order, shard, start: number(start)?, end: number(end)? };
        if span.start > span.end { Err(wrong()) } else { Ok(span) }
    }
}

/// One line for each span.
impl fmt::Display for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.spans.iter().try_for_each(|span| writeln!(f, "{span}"))
    }
}

impl FromStr for Ledger {
    type Err = Error;

    fn from_str(text: &str) -> Result<Ledger> {
        let mut ledger = Ledger::new();
        for (i, line) in text.lines().enumerate() {
            let span = line.parse::<Span>().map_err(|error| error.context(format_args!("line {}", i + 1)))?;
            ledger.record_span(span);
        }
        Ok(ledger)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use kolo_core::{Code, Tensor};
    use proptest::prelude::*;

    use super::*;
    use crate::data::Dataset;

    fn count(ledger: &Ledger, epoch: u64, n: usize) -> [usize; 4] {
        let EpochCount { never, once, twice, more } = ledger.count(epoch, n).unwrap();
        [never, once, twice, more]
    }

    fn data(n: u32) -> Dataset {
        Dataset::new([Tensor::from((0..n).collect::<Vec<u32>>())]).batch(3, false).shuffle(5)
    }

    #[test]
    fn a_restart_from_an_older_position_shows_as_samples_seen_twice() {
        let mut before = Ledger::new();
        let mut batches = data(20).repeat(2).batches().unwrap();
        batches.by_ref().take(2).for_each(|batch| before.record(&batch.unwrap()));
        let saved = batches.save();
        batches.by_ref().take(3).for_each(|batch| before.record(&batch.unwrap()));
        drop(batches);
        assert_eq!(count(&before, 0, 20), [5, 15, 0, 0]);
        // The job dies; another one goes on from what was saved, nine samples earlier.
        let mut after: Ledger = before.to_string().parse().unwrap();
        assert_eq!(after, before);
        let mut batches = data(20).repeat(2).batches().unwrap();
        batches.restore(saved).unwrap();
        batches.for_each(|batch| after.record(&batch.unwrap()));
        assert_eq!(count(&after, 0, 20), [0, 11, 9, 0]);
        assert_eq!(count(&after, 1, 20), [0, 20, 0, 0]);
        assert_eq!(count(&after, 2, 20), [20, 0, 0, 0]);
        assert_eq!(after.epochs(), [0, 1]);
        // Sixteen batches, three lines.
        assert_eq!(after.to_string().lines().count(), 3);
    }

    #[test]
    fn a_number_of_workers_that_changes_is_accounted_for() {
        let mut ledger = Ledger::new();
        // One of two workers does its share; then there are three, and all of them do theirs.
        data(10).shard(1, 2).batches().unwrap().for_each(|batch| ledger.record(&batch.unwrap()));
        assert_eq!(count(&ledger, 0, 10), [5, 5, 0, 0]);
        for worker in 0..3 {
            let mut other = Ledger::new();
            data(10).shard(worker, 3).batches().unwrap().for_each(|batch| other.record(&batch.unwrap()));
            ledger.merge(&other);
        }
        assert_eq!(count(&ledger, 0, 10), [0, 5, 5, 0]);
        let mut twice = ledger.clone();
        twice.merge(&ledger);
        assert_eq!(count(&twice, 0, 10), [0, 0, 5, 5]);
    }

    #[test]
    fn what_cannot_be_told_is_an_error() {
        let stream = |seed, n_workers| {
            let data = Dataset::stream(|| Ok((0..10).map(|i| Ok(vec![Tensor::scalar(i)])))).shuffle(seed);
            let mut ledger = Ledger::new();
            let batches = data.shard(0, n_workers).batches().unwrap();
            batches.for_each(|batch| ledger.record(&batch.unwrap()));
            ledger
        };
        let mut ledger = stream(1, 2);
        assert_eq!(count(&ledger, 0, 10), [5, 5, 0, 0]);
        ledger.merge(&stream(1, 2));
        assert_eq!(count(&ledger, 0, 10), [5, 0, 5, 0]);
        for other in [stream(2, 2), stream(1, 1)] {
            let mut mixed = ledger.clone();
            mixed.merge(&other);
            assert_eq!(mixed.count(0, 10).unwrap_err().code(), Code::FailedPrecondition);
        }
        let error = ledger.count(0, 4).unwrap_err();
        assert!(error.message().contains("but an epoch has 4 samples"), "{error}");
        for wrong in ["x", "epoch 0 worker 2 of 2 samples 0 to 1 stored", "epoch 0 worker 0 of 1 samples 2 to 1 stored"]
        {
            assert!(wrong.parse::<Ledger>().unwrap_err().message().starts_with("line 1: "));
        }
    }

    proptest! {
        #[test]
        fn all_workers_together_see_everything_once(n in 1u32..60, n_workers in 1usize..7, shuffled: bool) {
            let mut ledger = Ledger::new();
            for worker in 0..n_workers {
                let mut data = Dataset::new([Tensor::from(vec![0u8; n as usize])]).batch(4, false);
                if shuffled { data = data.shuffle(9); }
                for batch in data.shard(worker, n_workers).repeat(2).prefetch(1).batches().unwrap() {
                    ledger.record(&batch.unwrap());
                }
            }
            for epoch in 0..2 {
                prop_assert_eq!(count(&ledger, epoch, n as usize), [0, n as usize, 0, 0]);
            }
        }
    }
}
