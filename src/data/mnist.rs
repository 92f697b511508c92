//! MNIST, and data sets in its format such as Fashion-MNIST: images of handwritten digits and what they show.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use kolo_core::{DType, Error, Result, Shape, Tensor};

use super::{Batches, Dataset, idx};

/// Images and labels to train on, and others to test with.
#[derive(Clone, Debug)]
pub struct Mnist {
    /// What to train on: 60,000 images.
    pub train: Split,
    /// What to test with: 10,000 images.
    pub test: Split,
}

/// The MNIST that is part of this program: nothing to download. It is unzipped once.
///
/// ```
/// let mut mnist = kolo::data::mnist::embedded()?.one_hot();
/// assert_eq!((mnist.train.len(), mnist.test.len()), (60_000, 10_000));
/// let (images, labels) = mnist.train.next_batch(100)?;
/// assert_eq!(images.shape().dims(), [100, 784]); // float, 0 to 1
/// assert_eq!(labels.shape().dims(), [100, 10]); // float, a single 1 in each row
/// # Ok::<(), kolo::Error>(())
/// ```
pub fn embedded() -> Result<Mnist> {
    static DECODED: OnceLock<Result<[Tensor; 4]>> = OnceLock::new();
    let [train_images, train_labels, images, labels] = DECODED.get_or_init(decode).clone()?;
    Ok(Mnist { train: Split::new(train_images, train_labels)?, test: Split::new(images, labels)? })
}

fn decode() -> Result<[Tensor; 4]> {
    // The large file takes nearly all of the time; the others are read beside it.
    std::thread::scope(|scope| {
        let others = std::thread::Builder::new().name("kolo-mnist".to_owned()).spawn_scoped(scope, || {
            let train = include_bytes!("../../data/mnist/train-labels-idx1-ubyte.gz");
            let images = include_bytes!("../../data/mnist/t10k-images-idx3-ubyte.gz");
            let labels = include_bytes!("../../data/mnist/t10k-labels-idx1-ubyte.gz");
            Ok((
                idx::read_bytes("train-labels", train)?,
                idx::read_bytes("t10k-images", images)?,
                idx::read_bytes("t10k-labels", labels)?,
            ))
        });
        let train_images = include_bytes!("../../data/mnist/train-images-idx3-ubyte.gz");
        let train_images = idx::read_bytes("train-images", train_images);
        let others = others
            .map_err(|reason| Error::resource_exhausted(format!("no thread to read MNIST: {reason}")))
            .and_then(|thread| thread.join().map_err(|_| Error::internal("reading MNIST panicked"))?);
        let (train_labels, images, labels) = others?;
        Ok([train_images?, train_labels, images, labels])
    })
}

/// The MNIST, or Fashion-MNIST, in this folder: the four files under their usual names, gzipped or not.
pub fn from_dir(dir: impl AsRef<Path>) -> Result<Mnist> {
    let dir = dir.as_ref();
    let split = |part: &str| {
        let images = find(dir, part, "images", "idx3")?;
        let labels = find(dir, part, "labels", "idx1")?;
        let context = format!("{} and {}", images.display(), labels.display());
        Split::new(idx::read(images)?, idx::read(labels)?).map_err(|error| error.context(context))
    };
    Ok(Mnist { train: split("train")?, test: split("t10k")? })
}

/// `train-images-idx3-ubyte`, with a dot instead of the second dash, and either of them with `.gz`.
fn find(dir: &Path, part: &str, what: &str, kind: &str) -> Result<PathBuf> {
    let names = ["-", "."].map(|dash| format!("{part}-{what}{dash}{kind}-ubyte"));
    let candidates = names.iter().flat_map(|name| [dir.join(name), dir.join(format!("{name}.gz"))]);
    candidates.into_iter().find(|path| path.is_file()).ok_or_else(|| {
        Error::not_found(format!(
            "{}: none of {}, {} is there, with or without .gz; the folder should hold MNIST's four files",
            dir.display(),
            names[0],
            names[1]
        ))
    })
}

impl Mnist {
    /// Labels as rows of zeros with a single one, in [`Split::next_batch`] and [`Split::dataset`].
    pub fn one_hot(mut self) -> Mnist {
        self.train.is_one_hot = true;
        self.test.is_one_hot = true;
        self
    }
}

/// Some images and their labels. A copy shares the pixels.
pub struct Split {
    /// Pixels as they are stored: `uint8[n,28,28]`, 0 for paper and 255 for ink.
    pub images: Tensor,
    /// What the images show: `uint8[n]`, 0 to 9.
    pub labels: Tensor,
    is_one_hot: bool,
    seed: u64,
    /// Where [`Split::next_batch`] is.
    batches: Option<(usize, Batches)>,
}

impl Split {
    /// Images, `uint8[n,height,width]`, with their labels, `uint8[n]`.
    pub fn new(images: Tensor, labels: Tensor) -> Result<Split> {
        let fits = |tensor: &Tensor, rank: usize| tensor.dtype() == DType::U8 && tensor.shape().rank() == rank;
        if !fits(&images, 3) || !fits(&labels, 1) || images.shape()[0] != labels.shape()[0] {
            return Err(Error::invalid_argument(format!(
                "expected uint8[n,height,width] images and uint8[n] labels, found {}{} and {}{}",
                images.dtype(),
                images.shape(),
                labels.dtype(),
                labels.shape()
            )));
        }
        Ok(Split { images, labels, is_one_hot: false, seed: 0, batches: None })
    }

    /// How many images there are.
    pub fn len(&self) -> usize {
        self.labels.n_elements()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Two columns: the images as `float[n,784]` from 0 to 1, and the labels as `int32[n]`, or as `float[n,10]` after
    /// [`Mnist::one_hot`]. Pixels stay bytes until a batch is made.
    ///
    /// For images with a height and a width, say `dataset().reshape(0, &[28, 28, 1])`.
    pub fn dataset(&self) -> Dataset {
        let pixels = self.images.shape()[1..].iter().product();
        let data = Dataset::new([self.images.clone(), self.labels.clone()]).reshape(0, &[pixels]).scale(0, 1.0 / 255.0);
        match self.is_one_hot {
            true => data.one_hot(1, 10),
            false => data.cast(1, DType::I32),
        }
    }

    /// The first `n` images and the rest: to keep some aside for validation.
    pub fn split_at(&self, n: usize) -> Result<(Split, Split)> {
        let part = |start: usize, n: usize| {
            let part = Split::new(self.images.rows(start, n)?, self.labels.rows(start, n)?)?;
            Ok(Split { is_one_hot: self.is_one_hot, seed: self.seed, ..part })
        };
        let rest = self.len().checked_sub(n);
        let rest = rest.ok_or_else(|| Error::out_of_range(format!("there are {} images, not {n}", self.len())))?;
        Ok((part(0, n)?, part(n, rest)?))
    }

    /// The order in which [`Split::next_batch`] goes through the images; 0 if this is never called. It starts over.
    pub fn set_seed(&mut self, seed: u64) {
        self.seed = seed;
        self.batches = None;
    }

    /// The next `n` images and labels, shuffled anew in each epoch, for ever. Always `n` of them: what is left of an
    /// epoch that `n` does not divide is followed by the beginning of the next.
    pub fn next_batch(&mut self, n: usize) -> Result<(Tensor, Tensor)> {
        let batches = match &mut self.batches {
            Some((size, batches)) if *size == n => batches,
            kept => {
                let data = self.images.clone();
                let split = Split { is_one_hot: self.is_one_hot, ..Split::new(data, self.labels.clone())? };
                let mut batches =
                    split.dataset().shuffle(self.seed).batch(n, false).across_epochs().repeat_forever().batches()?;
                if let Some((_, old)) = kept {
                    batches.restore(old.save())?;
                }
                &mut kept.insert((n, batches)).1
            }
        };
        let batch = batches.next().unwrap_or_else(|| Err(Error::out_of_range("there are no images")))?;
        let [images, labels] =
            <[Tensor; 2]>::try_from(batch.tensors).map_err(|_| Error::internal("a batch of MNIST has two columns"))?;
        Ok((images, labels))
    }
}

/// A copy starts again at the beginning of its first epoch.
impl Clone for Split {
    fn clone(&self) -> Split {
        let Split { images, labels, is_one_hot, seed, batches: _ } = self;
        Split { images: images.clone(), labels: labels.clone(), is_one_hot: *is_one_hot, seed: *seed, batches: None }
    }
}

impl std::fmt::Debug for Split {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let size = Shape::new(&self.images.shape()[1..]).unwrap_or_default();
        write!(f, "{} images of {size}", self.len())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn the_embedded_data_is_mnist() {
        let mnist = embedded().unwrap();
        assert_eq!(mnist.train.images.shape().dims(), [60_000, 28, 28]);
        assert_eq!(mnist.test.images.shape().dims(), [10_000, 28, 28]);
        assert_eq!(mnist.train.labels.data::<u8>().unwrap()[..10], [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]);
        assert_eq!(mnist.test.labels.data::<u8>().unwrap()[..5], [7, 2, 1, 0, 4]);
        // The mean pixel that every MNIST tutorial states: 33.318, or 0.1307 of 255.
        let pixels = mnist.train.images.data::<u8>().unwrap();
        let sum: u64 = pixels.iter().map(|&pixel| u64::from(pixel)).sum();
        assert!((sum as f64 / pixels.len() as f64 - 33.318_421).abs() < 1e-5);
        assert!(mnist.train.labels.data::<u8>().unwrap().iter().all(|&label| label < 10));
        assert_eq!(format!("{:?}", mnist.test), "10000 images of [28,28]");
    }

    #[test]
    fn batches_follow_one_another_across_epochs() {
        let tiny = |n: u8| {
            let images = Tensor::from_vec([n.into(), 1, 2], (0..2 * n).collect()).unwrap();
            Split::new(images, Tensor::from((0..n).collect::<Vec<u8>>())).unwrap()
        };
        let mut split = tiny(5);
        let mut seen = Vec::new();
        for _ in 0..5 {
            let (images, labels) = split.next_batch(2).unwrap();
            assert_eq!(images.shape().dims(), [2, 2]);
            let labels = labels.data::<i32>().unwrap().to_vec();
            // Each image goes with its label.
            let first = images.data::<f32>().unwrap()[0] * 255.0;
            assert!((first - 2.0 * labels[0] as f32).abs() < 1e-4);
            seen.extend(labels);
        }
        for epoch in seen.chunks(5) {
            let mut epoch = epoch.to_vec();
            epoch.sort_unstable();
            assert_eq!(epoch, [0, 1, 2, 3, 4]);
        }
        // Another batch size goes on where the last one ended.
        let mut mixed = tiny(5);
        let mut again: Vec<i32> = Vec::new();
        for n in [1, 3, 2, 4] {
            again.extend(mixed.next_batch(n).unwrap().1.data::<i32>().unwrap());
        }
        assert_eq!(again, seen);
        let mut other = tiny(5);
        other.set_seed(1);
        let (_, labels) = other.next_batch(5).unwrap();
        assert_ne!(labels.data::<i32>().unwrap(), &seen[..5]);
        assert!(tiny(0).next_batch(2).is_err());
        assert!(tiny(3).next_batch(0).is_err());
    }

    #[test]
    fn labels_become_rows_with_one_one() {
        let images = Tensor::zeros(DType::U8, [2, 28, 28]).unwrap();
        let split = Split::new(images, Tensor::from([3u8, 9])).unwrap();
        let mut mnist = Mnist { train: split.clone(), test: split }.one_hot();
        let (_, labels) = mnist.test.next_batch(2).unwrap();
        assert_eq!(labels.shape().dims(), [2, 10]);
        assert_eq!(labels.data::<f32>().unwrap().iter().sum::<f32>(), 2.0);
        let (first, rest) = mnist.train.split_at(1).unwrap();
        assert_eq!((first.len(), rest.len()), (1, 1));
        assert_eq!(rest.labels.data::<u8>().unwrap(), [9]);
        assert!(mnist.train.split_at(3).is_err());
    }

    #[test]
    fn a_folder_may_use_either_name_and_zip_or_not() {
        let dir = std::env::temp_dir().join(format!("kolo-mnist-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let error = from_dir(&dir).unwrap_err();
        assert_eq!(error.code(), kolo_core::Code::NotFound);
        assert!(error.message().contains("train-images-idx3-ubyte, train-images.idx3-ubyte"), "{error}");
        let images = [0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 1, 10, 20];
        let labels = [0, 0, 8, 1, 0, 0, 0, 2, 7, 8];
        std::fs::write(dir.join("train-images-idx3-ubyte"), images).unwrap();
        std::fs::write(dir.join("train-labels.idx1-ubyte"), labels).unwrap();
        std::fs::write(dir.join("t10k-images.idx3-ubyte"), images).unwrap();
        let file = std::fs::File::create(dir.join("t10k-labels-idx1-ubyte.gz")).unwrap();
        let mut zipped = flate2::write::GzEncoder::new(file, flate2::Compression::fast());
        zipped.write_all(&labels).unwrap();
        zipped.finish().unwrap();
        let mnist = from_dir(&dir).unwrap();
        assert_eq!(mnist.train.images.data::<u8>().unwrap(), [10, 20]);
        assert_eq!(mnist.test.labels.data::<u8>().unwrap(), [7, 8]);
        // More labels than images.
        std::fs::write(dir.join("train-labels.idx1-ubyte"), [0, 0, 8, 1, 0, 0, 0, 1, 7]).unwrap();
        assert!(from_dir(&dir).unwrap_err().message().contains("uint8[2,1,1] and uint8[1]"));
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
