//! Input: readers of files, and the pipeline that batches, shuffles and prefetches samples.
//!
//! ```
//! let mnist = kolo::data::mnist::embedded()?;
//! let data = mnist.train.dataset().shuffle(7).batch(100, true).repeat(2).prefetch(2);
//! for batch in data.batches()?.take(3) {
//!     let batch = batch?;
//!     assert_eq!(batch.tensors[0].shape().dims(), [100, 784]); // images, float from 0 to 1
//!     assert_eq!(batch.tensors[1].shape().dims(), [100]); // labels, int32
//! }
//! # Ok::<(), kolo::Error>(())
//! ```
//!
//! A [`Dataset`] says what to read and how; [`Dataset::batches`] starts reading. [`Batches::save`] and
//! [`Batches::restore`] let a job that was stopped go on with the very batches it would have seen, and a [`Ledger`] tells
//! which samples were seen once, twice or never.
//!
//! | to read | use |
//! | --- | --- |
//! | MNIST, Fashion-MNIST; other IDX files | [`mnist`]; [`idx`] |
//! | CIFAR-10, binary version | [`cifar`] |
//! | TFRecord; `tf.train.Example` in it | [`record`]; [`example`] |
//! | `.npy`, `.npz` | [`npy`] |
//! | tables | [`csv`] |
//! | text, by characters or bytes | [`text`] |

mod batches;
pub mod cifar;
mod column;
pub mod csv;
mod dataset;
pub mod example;
mod file;
pub mod idx;
mod ledger;
mod memory;
pub mod mnist;
pub mod npy;
mod order;
mod prefetch;
pub mod record;
mod stream;
pub mod text;

pub(crate) use file::io_error;

pub use batches::{Batch, Batches, Span, SpanOrder};
pub use dataset::Dataset;
pub use ledger::{EpochCount, Ledger};
pub(crate) use order::Random;
pub use order::{Position, Shard};
