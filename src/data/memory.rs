//! Batches of samples that are in memory.

use std::sync::Arc;

use kolo_core::{Error, Result, Tensor};

use super::batches::{Batch, Source, Span, SpanOrder, cut_spans, no_such_place};
use super::column::{Rows, Spare};
use super::dataset::{Dataset, Origin};
use super::order::{Position, permutation};

/// Makes batches of a data set whose samples are rows of tensors.
pub(crate) struct MemorySource {
    plan: Arc<Dataset>,
    position: Position,
    /// The epoch's order, if it is shuffled; made when the first batch of the epoch is.
    order: Option<(Position, Vec<u32>)>,
    /// The samples of the batch that is being made.
    picked: Vec<u32>,
    spares: Vec<Spare>,
}

impl MemorySource {
    pub(crate) fn new(plan: Arc<Dataset>) -> Result<MemorySource> {
        let columns = columns(&plan)?;
        for (i, (recipe, column)) in plan.recipes.iter().zip(columns).enumerate() {
            recipe.row_shape(column).map_err(|error| error.context(format_args!("column {i}")))?;
        }
        let spares = columns.iter().map(|_| Spare::default()).collect();
        let position = Position { seed: plan.seed.unwrap_or(0), ..Position::default() };
        Ok(MemorySource { plan, position, order: None, picked: Vec::new(), spares })
    }

    fn n_samples(&self) -> usize {
        self.plan.len().unwrap_or(0)
    }

    /// How many samples of each epoch are this worker's.
    fn share(&self) -> usize {
        self.plan.shard.len(self.n_samples())
    }

    fn has_epoch(&self, epoch: u64) -> bool {
        self.plan.epochs.is_none_or(|epochs| epoch < epochs)
    }

    /// Takes up to `n` samples of the current epoch, adds them to `picked`, and says which they are.
    fn pick(&mut self, n: usize) -> Span {
        let n_samples = self.n_samples();
        let Position { epoch, sample, seed } = self.position;
        let start = sample as usize;
        let end = self.share().min(start.saturating_add(n));
        let shard = self.plan.shard;
        if self.plan.seed.is_some() {
            let this = Position { epoch, seed, sample: 0 };
            if self.order.as_ref().is_none_or(|(of, _)| *of != this) {
                self.order = Some((this, permutation(seed, epoch, n_samples as u32)));
            }
        }
        match &self.order {
            Some((_, order)) if self.plan.seed.is_some() => {
                self.picked.extend((start..end).map(|i| order[shard.place(i)]));
            }
            _ => self.picked.extend((start..end).map(|i| shard.place(i) as u32)),
        }
        self.position.sample = end as u64;
        let order = self.plan.seed.map_or(SpanOrder::Stored, |_| SpanOrder::Permuted { seed });
        Span { epoch, order, shard, start: start as u64, end: end as u64 }
    }

    fn start_next_epoch(&mut self) {
        self.position.epoch = self.position.epoch.saturating_add(1);
        self.position.sample = 0;
    }

    fn assemble(&mut self) -> Result<Vec<Tensor>> {
        let columns = columns(&self.plan)?;
        // Samples in stored order can be a view of what is stored.
        let is_span = self.plan.seed.is_none() && self.picked.windows(2).all(|pair| pair[0] + 1 == pair[1]);
        let rows = match self.picked.first() {
            Some(first) if is_span => Rows::Span(*first as usize, self.picked.len()),
            _ => Rows::Picked(&self.picked),
        };
        let mut tensors = Vec::with_capacity(columns.len());
        for (i, ((recipe, column), spare)) in self.plan.recipes.iter().zip(columns).zip(&mut self.spares).enumerate() {
            let made = recipe.make(column, rows, spare);
            tensors.push(made.map_err(|error| error.context(format_args!("column {i}")))?);
        }
        self.plan.maps.iter().try_fold(tensors, |tensors, map| map(tensors))
    }
}

impl Source for MemorySource {
    fn next(&mut self) -> Result<Option<Batch>> {
        let share = self.share() as u64;
        let wanted = self.plan.batch;
        self.picked.clear();
        if share == 0 {
            return Ok(None);
        }
        let left = share - self.position.sample;
        let too_few = self.plan.drop_remainder && !self.plan.across_epochs && left < wanted as u64;
        if left == 0 || too_few {
            self.start_next_epoch();
            if too_few && share < wanted as u64 {
                return Ok(None);
            }
        }
        if !self.has_epoch(self.position.epoch) {
            return Ok(None);
        }
        let Position { epoch, sample, .. } = self.position;
        let mut spans = vec![self.pick(wanted)];
        while self.plan.across_epochs
            && self.picked.len() < wanted
            && self.has_epoch(self.position.epoch.saturating_add(1))
        {
            self.start_next_epoch();
            let missing = wanted - self.picked.len();
            spans.push(self.pick(missing));
        }
        if self.plan.across_epochs && self.plan.drop_remainder && self.picked.len() < wanted {
            return Ok(None);
        }
        let is_many_spans = spans.len() > 1;
        let own = self.plan.slice.of(self.picked.len());
        cut_spans(&mut spans, own.clone());
        self.picked.truncate(own.end);
        self.picked.drain(..own.start);
        let left = share - self.position.sample;
        let is_last = left == 0 || (self.plan.drop_remainder && !self.plan.across_epochs && left < wanted as u64);
        let tensors = self.assemble()?;
        Ok(Some(Batch {
            tensors,
            epoch,
            index: sample / wanted as u64,
            is_last_of_epoch: is_last || is_many_spans,
            spans,
            after: self.position,
        }))
    }

    fn seek(&mut self, position: Position) -> Result<()> {
        let share = self.share() as u64;
        if position.sample > share {
            return Err(no_such_place(position, share));
        }
        self.position = position;
        Ok(())
    }

    fn start(&self) -> Position {
        self.position
    }
}

fn columns(plan: &Dataset) -> Result<&[Tensor]> {
    match &plan.origin {
        Origin::Memory { columns, .. } => Ok(columns),
        Origin::Stream(_) => Err(Error::internal("a stream has no columns in memory")),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn numbers(n: u32) -> Dataset {
        Dataset::new([Tensor::from((0..n).collect::<Vec<u32>>())])
    }

    fn values(batch: &Batch) -> Vec<u32> {
        batch.tensors[0].data::<u32>().unwrap().to_vec()
    }

    fn read(data: &Dataset) -> Vec<Batch> {
        data.batches().unwrap().collect::<Result<_>>().unwrap()
    }

    #[test]
    fn epochs_end_with_a_short_batch_or_without_it() {
        let data = numbers(5).batch(2, false).repeat(2);
        let batches = read(&data);
        let sizes: Vec<_> = batches.iter().map(|b| (b.epoch, b.index, b.len(), b.is_last_of_epoch)).collect();
        assert_eq!(
            sizes,
            [(0, 0, 2, false), (0, 1, 2, false), (0, 2, 1, true), (1, 0, 2, false), (1, 1, 2, false), (1, 2, 1, true)]
        );
        assert_eq!(values(&batches[1]), [2, 3]);
        let batches = read(&numbers(5).batch(2, true).repeat(2));
        let sizes: Vec<_> = batches.iter().map(|b| (b.epoch, b.len(), b.is_last_of_epoch)).collect();
        assert_eq!(sizes, [(0, 2, false), (0, 2, true), (1, 2, false), (1, 2, true)]);
        // Fewer samples than a batch: nothing at all, rather than empty epochs for ever.
        assert!(read(&numbers(1).batch(2, true).repeat_forever()).is_empty());
        assert!(read(&numbers(0).batch(2, false).repeat_forever()).is_empty());
        assert!(read(&numbers(3).repeat(0)).is_empty());
    }

    #[test]
    fn a_batch_may_reach_into_the_next_epochs() {
        let batches = read(&numbers(3).batch(4, false).across_epochs().repeat(3));
        let all: Vec<_> = batches.iter().map(values).collect();
        assert_eq!(all, [vec![0, 1, 2, 0], vec![1, 2, 0, 1], vec![2]]);
        assert_eq!(batches[1].spans.len(), 2);
        assert!(batches.iter().all(|batch| batch.is_last_of_epoch));
        assert_eq!(read(&numbers(3).batch(4, true).across_epochs().repeat(3)).len(), 2);
        assert_eq!(values(&read(&numbers(2).batch(5, true).across_epochs().repeat(3))[0]), [0, 1, 0, 1, 0]);
    }

    #[test]
    fn shuffled_epochs_differ_and_seeds_decide() {
        let batches = |seed| read(&numbers(50).batch(50, false).shuffle(seed).repeat(2));
        let (a, b) = (batches(1), batches(2));
        assert_ne!(values(&a[0]), values(&a[1]));
        assert_ne!(values(&a[0]), values(&b[0]));
        assert_eq!(values(&a[0]), values(&batches(1)[0]));
    }

    #[test]
    fn a_place_that_is_not_there_is_refused() {
        let mut batches = numbers(10).shard(0, 2).batches().unwrap();
        let error = batches.restore(Position { sample: 6, ..Position::default() }).unwrap_err();
        assert!(error.message().contains("has 5 samples"), "{error}");
        batches.restore(Position { sample: 4, ..Position::default() }).unwrap();
        assert_eq!(values(&batches.next().unwrap().unwrap()), [8]);
        assert!(batches.next().is_none());
    }

    #[test]
    fn a_map_sees_whole_batches_and_its_errors_end_the_reading() {
        let data = numbers(4).batch(2, false).map(|mut columns| {
            if columns[0].data::<u32>()?[0] == 2 {
                return Err(Error::invalid_argument("two"));
            }
            columns.push(columns[0].clone());
            Ok(columns)
        });
        let mut batches = data.batches().unwrap();
        assert_eq!(batches.next().unwrap().unwrap().tensors.len(), 2);
        assert_eq!(batches.next().unwrap().unwrap_err().message(), "two");
        assert!(batches.next().is_none());
    }

    proptest! {
        #[test]
        fn going_on_from_a_position_is_the_same_as_never_having_stopped(
            n in 1u32..60,
            batch in 1usize..20,
            (drop, across, shuffled, seed) in any::<(bool, bool, bool, u64)>(),
            (worker, n_workers) in (0usize..3, 3usize..5),
            (stop, prefetch) in (0usize..30, 0usize..4),
        ) {
            let mut data = numbers(n).batch(batch, drop).shard(worker, n_workers).repeat(4);
            if across { data = data.across_epochs(); }
            if shuffled { data = data.shuffle(seed); }
            let expected = read(&data);
            let data = data.prefetch(prefetch);
            let mut first = data.batches().unwrap();
            let mut found: Vec<Batch> = Vec::new();
            for batch in first.by_ref().take(stop) {
                found.push(batch.unwrap());
            }
            let position = first.save().to_string().parse::<Position>().unwrap();
            drop_it(first);
            // Another process may have been started with another seed; the position knows the right one.
            let mut second = if shuffled { data.shuffle(seed ^ 1) } else { data }.batches().unwrap();
            second.restore(position).unwrap();
            for batch in second {
                found.push(batch.unwrap());
            }
            prop_assert_eq!(found.len(), expected.len());
            for (found, expected) in found.iter().zip(&expected) {
                prop_assert_eq!(values(found), values(expected));
                prop_assert_eq!(&found.spans, &expected.spans);
                prop_assert_eq!((found.epoch, found.index, found.is_last_of_epoch), (expected.epoch, expected.index, expected.is_last_of_epoch));
            }
        }

        #[test]
        fn the_rows_of_all_ranks_are_the_batch(
            n in 1u32..60, batch in 1usize..20, n_ranks in 1usize..5, (drop, across, seed) in any::<(bool, bool, u64)>(),
        ) {
            let mut data = numbers(n).batch(batch, drop).shuffle(seed).repeat(3);
            if across { data = data.across_epochs(); }
            let whole = read(&data);
            let ranks: Vec<_> = (0..n_ranks).map(|rank| read(&data.clone().split_batches(rank, n_ranks))).collect();
            for (i, whole) in whole.iter().enumerate() {
                let parts: Vec<&Batch> = ranks.iter().map(|of| &of[i]).collect();
                prop_assert_eq!(parts.iter().flat_map(|part| values(part)).collect::<Vec<_>>(), values(whole));
                prop_assert_eq!(parts.iter().map(|part| part.len()).sum::<usize>(), whole.len());
                let sizes: Vec<usize> = parts.iter().map(|part| part.len()).collect();
                prop_assert!(sizes.iter().max().unwrap() - sizes.iter().min().unwrap() <= 1);
                for part in parts {
                    prop_assert_eq!(part.len(), part.tensors[0].shape().dims()[0]);
                    prop_assert_eq!((part.after, part.is_last_of_epoch), (whole.after, whole.is_last_of_epoch));
                }
            }
            prop_assert!(ranks.iter().all(|of| of.len() == whole.len()));
        }

        #[test]
        fn workers_share_every_epoch_without_gap_or_overlap(n in 0u32..80, n_workers in 1usize..9, batch in 1usize..9, seed: u64) {
            let mut seen = vec![[0u32; 2]; n as usize];
            for worker in 0..n_workers {
                for batch in read(&numbers(n).shuffle(seed).shard(worker, n_workers).batch(batch, false).repeat(2)) {
                    for value in values(&batch) {
                        seen[value as usize][batch.epoch as usize] += 1;
                    }
                }
            }
            prop_assert!(seen.iter().all(|counts| *counts == [1, 1]));
        }
    }

    fn drop_it<T>(_: T) {}
}
