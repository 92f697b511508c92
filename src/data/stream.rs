//! Batches of samples that come one by one.
//!
//! Places in a stream are found by reading up to them: the same samples in the same order pass through the same shuffle
//! buffer, so what comes after a restored position is what would have come anyway. That takes as long as reading does.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use kolo_core::{DType, Error, Result, Shape, Tensor};

use super::batches::{Batch, Source, Span, SpanOrder, cut_spans, no_such_place};
use super::column::{Recipe, Rows, Spare};
use super::dataset::{Dataset, Origin};
use super::order::{Position, Random};

/// Opens a stream at its first sample.
pub(crate) type OpenStream = Arc<dyn Fn() -> Result<Samples> + Send + Sync>;

/// Samples, one by one.
pub(crate) type Samples = Box<dyn Iterator<Item = Result<Vec<Tensor>>> + Send>;

/// Makes batches of a data set whose samples come one by one.
pub(crate) struct StreamSource {
    plan: Arc<Dataset>,
    position: Position,
    /// The epoch that is being read, at `position`.
    epoch: Option<Epoch>,
    spares: Vec<Spare>,
}

/// One pass over the stream: this worker's samples in the order in which they are handed out.
struct Epoch {
    samples: Samples,
    /// The number of the next sample of the stream, this worker's or not.
    next: u64,
    /// Samples that wait to be drawn, if the stream is shuffled.
    buffer: Vec<Vec<Tensor>>,
    random: Random,
    /// Samples that were drawn to see whether there are any.
    peeked: VecDeque<Vec<Tensor>>,
}

impl StreamSource {
    pub(crate) fn new(plan: Arc<Dataset>) -> StreamSource {
        let position = Position { seed: plan.seed.unwrap_or(0), ..Position::default() };
        StreamSource { plan, position, epoch: None, spares: Vec::new() }
    }

    fn has_epoch(&self, epoch: u64) -> bool {
        self.plan.epochs.is_none_or(|epochs| epoch < epochs)
    }

    /// The epoch at the current position, opened if it is not.
    fn epoch(&mut self) -> Result<&mut Epoch> {
        if self.epoch.is_none() {
            let Origin::Stream(open) = &self.plan.origin else {
                return Err(Error::internal("samples in memory are not a stream"));
            };
            let Position { epoch, sample, seed } = self.position;
            let samples = open().map_err(|error| error.context(format_args!("opening epoch {epoch}")))?;
            let random = Random::new(seed, epoch);
            let mut opened = Epoch { samples, next: 0, buffer: Vec::new(), random, peeked: VecDeque::new() };
            for before in 0..sample {
                if opened.draw(&self.plan)?.is_none() {
                    return Err(no_such_place(self.position, before));
                }
            }
            self.epoch = Some(opened);
        }
        self.epoch.as_mut().ok_or_else(|| Error::internal("the epoch was opened above"))
    }

    /// Takes up to `n` samples of the current epoch.
    fn take(&mut self, n: usize, rows: &mut Vec<Vec<Tensor>>) -> Result<Span> {
        let plan = self.plan.clone();
        let Position { epoch, sample: start, seed } = self.position;
        let reader = self.epoch()?;
        let mut end = start;
        for _ in 0..n {
            match reader.draw(&plan)? {
                Some(sample) => rows.push(sample),
                None => break,
            }
            end += 1;
        }
        self.position.sample = end;
        let order = plan.seed.map_or(SpanOrder::Stored, |_| SpanOrder::Drawn { seed });
        Ok(Span { epoch, order, shard: plan.shard, start, end })
    }

    /// True if this epoch has no further batch.
    fn is_at_end(&mut self) -> Result<bool> {
        let plan = self.plan.clone();
        let needed = if plan.drop_remainder && !plan.across_epochs { plan.batch } else { 1 };
        let epoch = self.epoch()?;
        while epoch.peeked.len() < needed {
            match epoch.draw_new(&plan)? {
                Some(sample) => epoch.peeked.push_back(sample),
                None => return Ok(true),
            }
        }
        Ok(false)
    }

    fn start_next_epoch(&mut self) {
        self.position.epoch = self.position.epoch.saturating_add(1);
        self.position.sample = 0;
        self.epoch = None;
    }

    /// The columns of a batch: those of its rows that are this rank's.
    fn assemble(&mut self, rows: &[Vec<Tensor>], own: Range<usize>) -> Result<Vec<Tensor>> {
        let n_columns = rows.first().map_or(0, Vec::len);
        if self.plan.recipes.len() > n_columns {
            let last = self.plan.recipes.len() - 1;
            return Err(Error::invalid_argument(format!(
                "there is no column {last}; a sample has {n_columns}, from 0"
            )));
        }
        self.spares.resize_with(n_columns, Spare::default);
        let mut tensors = Vec::with_capacity(n_columns);
        for (i, spare) in self.spares.iter_mut().enumerate() {
            let column = stack(rows, i, own.clone()).map_err(|error| error.context(format_args!("column {i}")))?;
            let plain = Recipe::default();
            let recipe = self.plan.recipes.get(i).unwrap_or(&plain);
            let made = recipe.make(&column, Rows::Span(0, own.len()), spare);
            tensors.push(made.map_err(|error| error.context(format_args!("column {i}")))?);
        }
        self.plan.maps.iter().try_fold(tensors, |tensors, map| map(tensors))
    }
}

impl Source for StreamSource {
    fn next(&mut self) -> Result<Option<Batch>> {
        let (wanted, across) = (self.plan.batch, self.plan.across_epochs);
        let mut rows = Vec::new();
        // An epoch in which this worker finds less than it hands out would be read again and again.
        let mut has_given = self.position.sample > 0;
        let (mut spans, first) = loop {
            if !self.has_epoch(self.position.epoch) {
                return Ok(None);
            }
            let first = self.position;
            rows.clear();
            let span = self.take(wanted, &mut rows)?;
            let is_enough = if self.plan.drop_remainder && !across { rows.len() == wanted } else { !rows.is_empty() };
            if is_enough {
                break (vec![span], first);
            }
            if !has_given {
                return Ok(None);
            }
            has_given = false;
            self.start_next_epoch();
        };
        while across && rows.len() < wanted && self.has_epoch(self.position.epoch.saturating_add(1)) {
            self.start_next_epoch();
            spans.push(self.take(wanted - rows.len(), &mut rows)?);
        }
        if across && self.plan.drop_remainder && rows.len() < wanted {
            return Ok(None);
        }
        let is_last = spans.len() > 1 || self.is_at_end()?;
        let own = self.plan.slice.of(rows.len());
        cut_spans(&mut spans, own.clone());
        let tensors = self.assemble(&rows, own)?;
        Ok(Some(Batch {
            tensors,
            epoch: first.epoch,
            index: first.sample / wanted as u64,
            is_last_of_epoch: is_last,
            spans,
            after: self.position,
        }))
    }

    fn seek(&mut self, position: Position) -> Result<()> {
        // Whether the place exists shows when it is read up to.
        (self.position, self.epoch) = (position, None);
        Ok(())
    }

    fn start(&self) -> Position {
        self.position
    }
}

impl Epoch {
    /// This worker's next sample, in the order of this epoch.
    fn draw(&mut self, plan: &Dataset) -> Result<Option<Vec<Tensor>>> {
        match self.peeked.pop_front() {
            Some(sample) => Ok(Some(sample)),
            None => self.draw_new(plan),
        }
    }

    fn draw_new(&mut self, plan: &Dataset) -> Result<Option<Vec<Tensor>>> {
        if plan.seed.is_none() {
            return self.read(plan);
        }
        while self.buffer.len() < plan.buffer {
            match self.read(plan)? {
                Some(sample) => self.buffer.push(sample),
                None => break,
            }
        }
        Ok(match self.buffer.len() {
            0 => None,
            n => Some(self.buffer.swap_remove(self.random.below(n as u64) as usize)),
        })
    }

    /// This worker's next sample, in the order of the stream.
    fn read(&mut self, plan: &Dataset) -> Result<Option<Vec<Tensor>>> {
        loop {
            let number = self.next;
            let Some(sample) = self.samples.next() else { return Ok(None) };
            let sample = sample.map_err(|error| error.context(format_args!("sample {number}")))?;
            self.next += 1;
            if plan.shard.owns(number) {
                return Ok(Some(sample));
            }
        }
    }
}

/// One column of some samples as a tensor with a row for each in `own`; all of them must fit together.
pub(crate) fn stack(rows: &[Vec<Tensor>], column: usize, own: Range<usize>) -> Result<Tensor> {
    let mut cells: Vec<&Tensor> = rows.iter().filter_map(|row| row.get(column)).collect();
    let Some(&first) = cells.first().filter(|_| cells.len() == rows.len()) else {
        return Err(Error::invalid_argument("samples differ in the number of their columns"));
    };
    let (dtype, shape) = (first.dtype(), first.shape());
    if let Some(other) = cells.iter().find(|cell| cell.dtype() != dtype || cell.shape() != shape) {
        return Err(Error::invalid_argument(format!(
            "samples of a batch differ: {dtype}{shape} and {}{}; map them to one shape first",
            other.dtype(),
            other.shape()
        )));
    }
    let n_bytes = first.n_bytes();
    let stacked = Shape::new(&[&[own.len()], shape.dims()].concat())?;
    cells = cells.drain(own).collect();
    if dtype == DType::Str {
        let mut strings = Vec::with_capacity(stacked.n_elements());
        for cell in cells {
            strings.extend_from_slice(cell.strings()?);
        }
        return Tensor::from_strings(stacked, strings);
    }
    let mut tensor = Tensor::zeros(dtype, stacked)?;
    let bytes = tensor.host_bytes_mut()?;
    for (i, cell) in cells.iter().enumerate() {
        bytes[i * n_bytes..][..n_bytes].copy_from_slice(cell.host_bytes()?);
    }
    Ok(tensor)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn numbers(n: u32) -> Dataset {
        Dataset::stream(move || Ok((0..n).map(|i| Ok(vec![Tensor::scalar(i)]))))
    }

    fn values(batch: &Batch) -> Vec<u32> {
        batch.tensors[0].data::<u32>().unwrap().to_vec()
    }

    fn read(data: &Dataset) -> Vec<Batch> {
        data.batches().unwrap().collect::<Result<_>>().unwrap()
    }

    #[test]
    fn samples_are_stacked_and_converted() {
        let data = Dataset::stream(|| {
            Ok([1u8, 2, 3].into_iter().map(|i| Ok(vec![Tensor::from([i, 2 * i]), Tensor::from("x")])))
        });
        let batches = read(&data.batch(2, false).scale(0, 0.5));
        assert_eq!(batches[0].tensors[0], Tensor::from([[0.5f32, 1.0], [1.0, 2.0]]));
        assert_eq!(batches[1].tensors[1].shape().dims(), [1]);
        assert!(!batches[0].is_last_of_epoch && batches[1].is_last_of_epoch);
    }

    #[test]
    fn samples_that_do_not_fit_together_are_an_error() {
        let says = |samples: Vec<Vec<Tensor>>, text: &str| {
            let data = Dataset::stream(move || Ok(samples.clone().into_iter().map(Ok))).batch(2, false).scale(0, 1.0);
            let error = data.batches().unwrap().next().unwrap().unwrap_err();
            assert!(error.message().contains(text), "{error}");
        };
        says(vec![vec![Tensor::from([1])], vec![Tensor::from([1, 2])]], "differ: int32[1] and int32[2]");
        says(vec![vec![Tensor::from([1])], vec![]], "differ in the number of their columns");
        says(vec![vec![], vec![]], "there is no column 0; a sample has 0");
        let data = Dataset::stream(|| Ok([Ok(vec![Tensor::scalar(1)]), Err(Error::data_loss("bad"))].into_iter()));
        let errors: Vec<_> = data.batches().unwrap().filter_map(Result::err).collect();
        assert_eq!(errors.iter().map(|error| error.message()).collect::<Vec<_>>(), ["sample 1: bad"]);
    }

    #[test]
    fn a_small_buffer_mixes_near_neighbours_and_loses_none() {
        let data = numbers(100).shuffle(5).shuffle_buffer(10).batch(100, false).repeat(2);
        let batches = read(&data);
        let (a, b) = (values(&batches[0]), values(&batches[1]));
        assert_ne!(a, b);
        // A sample cannot come before it was read.
        assert!(a.iter().enumerate().all(|(place, &value)| (value as usize) < place + 10));
        let mut sorted = a;
        sorted.sort_unstable();
        assert_eq!(sorted, (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn a_stream_without_enough_samples_ends() {
        assert!(read(&numbers(0).repeat_forever()).is_empty());
        assert!(read(&numbers(1).batch(2, true).repeat_forever()).is_empty());
        assert!(read(&numbers(1).shard(1, 2).repeat_forever()).is_empty());
        let mut batches = numbers(3).batches().unwrap();
        batches.restore(Position { sample: 4, ..Position::default() }).unwrap();
        assert!(batches.next().unwrap().unwrap_err().message().contains("has 3 samples"));
    }

    proptest! {
        #[test]
        fn a_stream_gives_what_memory_gives(
            n in 0u32..40, batch in 1usize..8, worker in 0usize..2, drop: bool, across: bool, stop in 0usize..20,
        ) {
            let both = [numbers(n), Dataset::new([Tensor::from((0..n).collect::<Vec<u32>>())])];
            let both = both.map(|data| {
                let data = data.batch(batch, drop).shard(worker, 2).split_batches(worker, 2).repeat(3);
                if across { data.across_epochs() } else { data }
            });
            let show = |batch: &Batch| (values(batch), batch.epoch, batch.index, batch.is_last_of_epoch, batch.spans.clone());
            let [stream, memory] = both.each_ref().map(|data| read(data).iter().map(show).collect::<Vec<_>>());
            prop_assert_eq!(&stream, &memory);
            // Stopping and going on changes nothing, shuffled or not.
            let shuffled = both[0].clone().shuffle(3).shuffle_buffer(4);
            let expected: Vec<_> = read(&shuffled).iter().map(show).collect();
            let mut first = shuffled.batches().unwrap();
            let mut found: Vec<_> = first.by_ref().take(stop).map(|batch| show(&batch.unwrap())).collect();
            let mut second = shuffled.prefetch(2).batches().unwrap();
            second.restore(first.save()).unwrap();
            found.extend(second.map(|batch| show(&batch.unwrap())));
            prop_assert_eq!(found, expected);
        }
    }
}
