//! What to read and how: the builder of a pipeline.

use std::fmt;
use std::sync::Arc;

use kolo_core::{DType, Error, Result, Shape, Tensor};

use super::batches::{Batches, Source};
use super::column::{Convert, Layout, Recipe};
use super::memory::MemorySource;
use super::order::{Shard, Slice};
use super::prefetch::Prefetch;
use super::stream::{OpenStream, StreamSource};

/// Samples, and how they become batches: shuffled, shared among workers, converted, repeated, prefetched. The order in
/// which the methods are called does not matter; a mistake is kept and returned by [`Dataset::batches`].
///
/// ```
/// use kolo::Tensor;
/// use kolo::data::Dataset;
///
/// let pixels = Tensor::from([[0u8, 51], [102, 153], [204, 255]]);
/// let labels = Tensor::from([7u8, 8, 9]);
/// let data = Dataset::new([pixels, labels]).scale(0, 1.0 / 255.0).one_hot(1, 10).batch(2, false);
///
/// let batches: Vec<_> = data.batches()?.collect::<kolo::Result<_>>()?;
/// assert_eq!(batches.len(), 2);
/// assert_eq!(batches[0].tensors[0].shape().dims(), [2, 2]);
/// assert_eq!(batches[1].tensors[1].shape().dims(), [1, 10]);
/// assert!(batches[1].is_last_of_epoch);
/// # Ok::<(), kolo::Error>(())
/// ```
#[derive(Clone)]
pub struct Dataset {
    pub(crate) origin: Origin,
    pub(crate) recipes: Vec<Recipe>,
    pub(crate) seed: Option<u64>,
    pub(crate) buffer: usize,
    pub(crate) shard: Shard,
    /// Which rows of each batch are handed out.
    pub(crate) slice: Slice,
    /// None for ever.
    pub(crate) epochs: Option<u64>,
    pub(crate) batch: usize,
    pub(crate) drop_remainder: bool,
    pub(crate) across_epochs: bool,
    pub(crate) maps: Vec<BatchMap>,
    prefetch: usize,
    error: Option<Error>,
}

/// Where samples come from.
#[derive(Clone)]
pub(crate) enum Origin {
    /// Tensors whose rows are the samples: as many in each.
    Memory { columns: Vec<Tensor>, n: u32 },
    /// An iterator, opened anew for each epoch.
    Stream(OpenStream),
}

pub(crate) type BatchMap = Arc<dyn Fn(Vec<Tensor>) -> Result<Vec<Tensor>> + Send + Sync>;

/// How many samples of a stream are mixed if [`Dataset::shuffle_buffer`] says nothing else.
const DEFAULT_BUFFER: usize = 4096;

impl Dataset {
    /// Samples in memory: row `i` of every tensor belongs to sample `i`. Nothing is copied.
    pub fn new(columns: impl IntoIterator<Item = Tensor>) -> Dataset {
        let columns: Vec<Tensor> = columns.into_iter().collect();
        let rows: Vec<Option<usize>> = columns.iter().map(|column| column.shape().first().copied()).collect();
        let n = match rows.first().copied().flatten() {
            Some(n) if rows.iter().all(|rows| *rows == Some(n)) => u32::try_from(n).map_err(|_| {
                Error::invalid_argument(format!("{n} samples are too many to hold in memory; read them as a stream"))
            }),
            _ => {
                let shapes: Vec<String> = columns.iter().map(|column| column.shape().to_string()).collect();
                Err(Error::invalid_argument(format!(
                    "the columns of a data set have as many rows each, found shapes {}",
                    if shapes.is_empty() { "of nothing".to_owned() } else { shapes.join(" ") }
                )))
            }
        };
        let recipes = vec![Recipe::default(); columns.len()];
        let error = n.as_ref().err().cloned();
        Dataset { error, recipes, ..Dataset::with(Origin::Memory { columns, n: n.unwrap_or(0) }) }
    }

    /// Samples that are windows of one list: sample `i` is `length` elements from `i * stride`, and in a second column as
    /// many from one further on, which is what a language model is to predict. Windows may overlap; none is copied until
    /// its batch is made. What does not fill a window is left out.
    pub fn windows(list: Tensor, length: usize, stride: usize) -> Dataset {
        let n_elements = list.n_elements();
        let n = match (list.shape().rank(), length, stride) {
            (1, 1.., 1..) => Ok((n_elements.saturating_sub(1).checked_sub(length)).map_or(0, |rest| rest / stride + 1)),
            _ => Err(Error::invalid_argument(format!(
                "windows of {length} elements every {stride} of a tensor of shape {}: expected a list, and numbers above 0",
                list.shape()
            ))),
        };
        let n =
            n.and_then(|n| u32::try_from(n).map_err(|_| Error::invalid_argument(format!("{n} windows are too many"))));
        let window = |start| Recipe { window: Some(Layout { start, step: stride, length }), ..Recipe::default() };
        let error = n.as_ref().err().cloned();
        let origin = Origin::Memory { columns: vec![list.clone(), list], n: n.unwrap_or(0) };
        Dataset { error, recipes: vec![window(0), window(1)], ..Dataset::with(origin) }
    }

    /// Samples that come one by one. `open` starts at the first one and is called for each epoch; it must give the same
    /// samples in the same order each time. A sample is one tensor per column, of the same dtype and shape in all samples.
    ///
    /// ```
    /// use kolo::Tensor;
    /// use kolo::data::Dataset;
    ///
    /// let squares = Dataset::stream(|| Ok((0..10).map(|i| Ok(vec![Tensor::scalar(i * i)]))));
    /// let mut batches = squares.batch(4, true).batches()?;
    /// let batch = batches.next().unwrap()?;
    /// assert_eq!(batch.tensors, [Tensor::from([0, 1, 4, 9])]);
    /// # Ok::<(), kolo::Error>(())
    /// ```
    pub fn stream<I>(open: impl Fn() -> Result<I> + Send + Sync + 'static) -> Dataset
    where
        I: Iterator<Item = Result<Vec<Tensor>>> + Send + 'static,
    {
        Dataset::with(Origin::Stream(Arc::new(move || Ok(Box::new(open()?)))))
    }

    fn with(origin: Origin) -> Dataset {
        Dataset {
            origin,
            recipes: Vec::new(),
            seed: None,
            buffer: DEFAULT_BUFFER,
            shard: Shard::WHOLE,
            slice: Slice::WHOLE,
            epochs: Some(1),
            batch: 1,
            drop_remainder: false,
            across_epochs: false,
            maps: Vec::new(),
            prefetch: 0,
            error: None,
        }
    }

    /// How many samples an epoch has, over all workers; none if that is not known before they are read.
    pub fn len(&self) -> Option<usize> {
        match &self.origin {
            Origin::Memory { n, .. } => Some(*n as usize),
            Origin::Stream(_) => None,
        }
    }

    /// True if it is known that there are no samples.
    pub fn is_empty(&self) -> bool {
        self.len() == Some(0)
    }

    /// How many batches each epoch gives this worker, where that is known.
    pub fn batches_per_epoch(&self) -> Option<usize> {
        let n = self.shard.len(self.len()?);
        match self.drop_remainder {
            true => n.checked_div(self.batch),
            false => (self.batch > 0).then(|| n.div_ceil(self.batch)),
        }
    }

    /// Another order in each epoch, all of them decided by `seed`. Samples in memory are permuted as a whole; those of a
    /// stream are drawn at random from a buffer ([`Dataset::shuffle_buffer`]).
    pub fn shuffle(mut self, seed: u64) -> Dataset {
        self.seed = Some(seed);
        self
    }

    /// How many samples of a stream are held to draw from when it is shuffled; 4096 if not said.
    pub fn shuffle_buffer(mut self, n_samples: usize) -> Dataset {
        match n_samples {
            0 => self.fail(Error::invalid_argument("a shuffle buffer of 0 samples holds nothing to draw from")),
            n => self.buffer = n,
        }
        self
    }

    /// Only the share of worker `worker` of `n_workers`. The shares of all workers make up each epoch, every sample once.
    /// All workers must use the same seed.
    pub fn shard(mut self, worker: usize, n_workers: usize) -> Dataset {
        match Shard::new(worker, n_workers) {
            Ok(shard) => self.shard = shard,
            Err(error) => self.fail(error),
        }
        self
    }

    /// Only the rows of rank `rank` of every batch, for ranks that train together: all of them go through the same batches in the
    /// same order, whatever their number, and a position in the data means the same to all. Rows are shared as equally as
    /// they can be; a batch may have none for a rank if it is smaller than there are ranks. All ranks must use the same seed.
    ///
    /// ```
    /// use kolo::Tensor;
    /// use kolo::data::Dataset;
    ///
    /// let data = Dataset::new([Tensor::from([0, 1, 2, 3, 4, 5, 6, 7])]).batch(4, true);
    /// let second = data.split_batches(1, 2).batches()?.collect::<kolo::Result<Vec<_>>>()?;
    /// assert_eq!(second[0].tensors, [Tensor::from([2, 3])]);
    /// assert_eq!(second[1].tensors, [Tensor::from([6, 7])]);
    /// # Ok::<(), kolo::Error>(())
    /// ```
    pub fn split_batches(mut self, rank: usize, n_ranks: usize) -> Dataset {
        match Slice::new(rank, n_ranks) {
            Ok(slice) => self.slice = slice,
            Err(error) => self.fail(error),
        }
        self
    }

    /// How many samples a batch has, over all ranks, and whether all batches have as many.
    pub(crate) fn batch_size(&self) -> (usize, bool) {
        (self.batch, self.drop_remainder || (self.across_epochs && self.epochs.is_none()))
    }

    /// Batches of `n` samples. The last batch of an epoch may be smaller, unless `drop_remainder` leaves it out.
    pub fn batch(mut self, n: usize, drop_remainder: bool) -> Dataset {
        if n == 0 {
            self.fail(Error::invalid_argument("a batch of 0 samples would never end an epoch"));
        }
        (self.batch, self.drop_remainder) = (n, drop_remainder);
        self
    }

    /// Fills up the last batch of an epoch with the first samples of the next one, so that all batches are full.
    pub fn across_epochs(mut self) -> Dataset {
        self.across_epochs = true;
        self
    }

    /// Goes through the samples this many times; once if not said.
    pub fn repeat(mut self, epochs: u64) -> Dataset {
        self.epochs = Some(epochs);
        self
    }

    /// Goes through the samples again and again.
    pub fn repeat_forever(mut self) -> Dataset {
        self.epochs = None;
        self
    }

    /// Passes the columns of every batch through a function. With [`Dataset::prefetch`] it runs on the prefetching thread.
    pub fn map(mut self, map: impl Fn(Vec<Tensor>) -> Result<Vec<Tensor>> + Send + Sync + 'static) -> Dataset {
        self.maps.push(Arc::new(map));
        self
    }

    /// Makes up to `n` batches ahead, on a thread of its own. The batches and [`Batches::save`] are the same as without.
    pub fn prefetch(mut self, n: usize) -> Dataset {
        self.prefetch = n;
        self
    }

    /// Column `column` as `float`, multiplied by `factor`.
    pub fn scale(self, column: usize, factor: f32) -> Dataset {
        self.convert(column, Convert::Scale { factor, offset: 0.0 })
    }

    /// Column `column` as `float`, `(x - mean) / deviation`.
    pub fn normalize(mut self, column: usize, mean: f32, deviation: f32) -> Dataset {
        let factor = deviation.recip();
        if !factor.is_finite() || !mean.is_finite() {
            self.fail(Error::invalid_argument(format!("cannot normalize by mean {mean} and deviation {deviation}")));
        }
        self.convert(column, Convert::Scale { factor, offset: -mean * factor })
    }

    /// Column `column` as another dtype: `int32`, `int64`, `float` or `double`.
    pub fn cast(self, column: usize, dtype: DType) -> Dataset {
        self.convert(column, Convert::Cast(dtype))
    }

    /// Column `column`, class numbers, as `float` rows of length `depth` with a single one.
    pub fn one_hot(self, column: usize, depth: usize) -> Dataset {
        self.convert(column, Convert::OneHot(depth))
    }

    /// Another shape for the rows of column `column`.
    pub fn reshape(mut self, column: usize, row: &[usize]) -> Dataset {
        match Shape::new(row) {
            Ok(shape) => self.recipe(column, |recipe| recipe.row = Some(shape)),
            Err(error) => self.fail(error),
        }
        self
    }

    fn convert(mut self, column: usize, convert: Convert) -> Dataset {
        self.recipe(column, |recipe| recipe.convert = convert);
        self
    }

    fn recipe(&mut self, column: usize, change: impl FnOnce(&mut Recipe)) {
        /// A stream says how many columns it has when it is read; nobody means more than these.
        const MAX_COLUMNS: usize = 1024;
        let known = matches!(self.origin, Origin::Memory { .. });
        if column >= if known { self.recipes.len() } else { MAX_COLUMNS } {
            let n = self.recipes.len();
            return self.fail(Error::invalid_argument(format!("there is no column {column}; there are {n}, from 0")));
        }
        if column >= self.recipes.len() {
            self.recipes.resize(column + 1, Recipe::default());
        }
        change(&mut self.recipes[column]);
    }

    fn fail(&mut self, error: Error) {
        self.error.get_or_insert(error);
    }

    /// Starts reading, at the first batch.
    pub fn batches(&self) -> Result<Batches> {
        if let Some(error) = &self.error {
            return Err(error.clone());
        }
        let plan = Arc::new(self.clone());
        let source: Box<dyn Source> = match &self.origin {
            Origin::Memory { .. } => Box::new(MemorySource::new(plan)?),
            Origin::Stream(_) => Box::new(StreamSource::new(plan)),
        };
        Ok(Batches::new(match self.prefetch {
            0 => source,
            n => Box::new(Prefetch::new(source, n)?),
        }))
    }

    /// All samples of this worker in one batch, converted, in the order of the first epoch: a whole test set, say.
    pub fn all(&self) -> Result<Vec<Tensor>> {
        let n = self.len().ok_or_else(|| Error::invalid_argument("a stream does not say how many samples it has"))?;
        let whole = Dataset { prefetch: 0, drop_remainder: false, batch: n.max(1), epochs: Some(1), ..self.clone() };
        match whole.batches()?.next() {
            Some(batch) => Ok(batch?.tensors),
            None => Err(Error::out_of_range("there are no samples")),
        }
    }
}

impl fmt::Debug for Dataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.origin {
            Origin::Memory { columns, n } => write!(f, "{n} samples of {} columns", columns.len())?,
            Origin::Stream(_) => f.write_str("a stream of samples")?,
        }
        write!(f, ", in batches of {}", self.batch)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_first_mistake_is_returned_when_reading_starts() {
        let says = |data: Dataset, text: &str| {
            let error = data.batches().err().unwrap();
            assert!(error.message().contains(text), "{error}");
        };
        let numbers = || Dataset::new([Tensor::from([1, 2, 3])]);
        says(Dataset::new([]), "found shapes of nothing");
        says(Dataset::new([Tensor::from([1, 2]), Tensor::from([1, 2, 3])]), "found shapes [2] [3]");
        says(Dataset::new([Tensor::scalar(1)]), "found shapes []");
        says(numbers().batch(0, false).shard(3, 2), "a batch of 0 samples");
        says(numbers().shard(3, 2), "no worker 3 among 2");
        says(numbers().split_batches(2, 2), "no rank 2 among 2");
        says(numbers().scale(1, 1.0), "there is no column 1; there are 1, from 0");
        says(numbers().reshape(0, &[2]), "rows of shape [] cannot be reshaped to [2]");
        says(numbers().normalize(0, 0.0, 0.0), "deviation 0");
        says(numbers().shuffle_buffer(0), "a shuffle buffer of 0 samples");
        says(numbers().one_hot(usize::MAX, 2), "there is no column");
    }

    #[test]
    fn an_epoch_knows_its_size_before_it_is_read() {
        let data = Dataset::new([Tensor::from([0u8; 10])]);
        let batches = |worker, drop| data.clone().batch(3, drop).shard(worker, 3).batches_per_epoch();
        assert_eq!((batches(0, false), batches(0, true)), (Some(2), Some(1)));
        assert_eq!((batches(1, false), batches(1, true)), (Some(1), Some(1)));
        assert_eq!(format!("{:?}", data.batch(3, true)), "10 samples of 1 columns, in batches of 3");
    }

    #[test]
    fn windows_may_overlap_and_never_reach_beyond_the_end() {
        let windows = |n: usize, length, stride| {
            let list = Tensor::from((0..n as u8).collect::<Vec<u8>>());
            Dataset::windows(list, length, stride).cast(1, DType::I32)
        };
        let two = windows(6, 3, 2).all().unwrap();
        assert_eq!(two, [Tensor::from([[0u8, 1, 2], [2, 3, 4]]), Tensor::from([[1, 2, 3], [3, 4, 5]])]);
        let counts: Vec<_> = (0..9).map(|n| windows(n, 3, 2).len().unwrap()).collect();
        assert_eq!(counts, [0, 0, 0, 0, 1, 1, 2, 2, 3]);
        for (length, stride) in [(0, 1), (1, 0)] {
            assert!(windows(5, length, stride).batches().is_err());
        }
        assert!(Dataset::windows(Tensor::from([[1, 2]]), 1, 1).batches().is_err());
    }

    #[test]
    fn all_of_it_comes_in_one_piece() {
        let data = Dataset::new([Tensor::from([1u8, 2, 3])]).scale(0, 2.0).batch(2, true).prefetch(1).repeat_forever();
        assert_eq!(data.all().unwrap(), [Tensor::from([2.0f32, 4.0, 6.0])]);
        assert!(Dataset::new([Tensor::from(Vec::<u8>::new())]).all().is_err());
    }
}
