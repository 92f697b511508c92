//! TensorFlow's V2 checkpoints: a "tensor bundle" of one index and one or more data files.
//!
//! ```text
//!   PREFIX.index                     a sorted table: "" -> header, name -> dtype, shape, where its bytes are, checksum
//!   PREFIX.data-00000-of-00002       the tensors' bytes, back to back
//!   PREFIX.data-00001-of-00002
//! ```
//!
//! [`save`] writes a bundle of one data file, [`merge`] makes one bundle of several without copying their data, and
//! [`Bundle`] reads. A tensor may be stored in slices, and any slice may be read, however it was stored. Files are written
//! under temporary names, brought to the disk, and renamed, the index last: a bundle that has an index is whole. What is
//! read is checked against its checksum, and a file's claims against its length before memory is made for them.

pub(crate) mod checksum;
mod merge;
mod reader;
mod slice;
mod table;
mod writer;

use std::path::PathBuf;

pub use checksum::Checksum;
pub use merge::{MergeOptions, merge};
pub use reader::{Bundle, StoredTensor};
pub use slice::{TensorSlice, parse_shape_and_slice};
pub use writer::{Item, save, save_within};

/// `PREFIX.index`.
pub fn index_path(prefix: &str) -> PathBuf {
    format!("{prefix}.index").into()
}

/// `PREFIX.data-00001-of-00002`.
pub fn data_path(prefix: &str, shard: usize, n_shards: usize) -> PathBuf {
    format!("{prefix}.data-{shard:05}-of-{n_shards:05}").into()
}

/// The version of the format that we write and read.
const VERSION: i32 = 1;

/// The header's bytes for a bundle of so many data files.
fn header(n_shards: usize) -> Vec<u8> {
    use kolo_graph::wire::proto::{BundleHeaderProto, VersionDef};
    use prost::Message as _;
    let version = VersionDef { producer: VERSION, ..VersionDef::default() };
    let n_shards = i32::try_from(n_shards).unwrap_or(i32::MAX);
    BundleHeaderProto { num_shards: n_shards, endianness: 0, version: Some(version) }.encode_to_vec()
}
