//! Checkpoints: the entries of a tensor bundle's index, and the `checkpoint` file of a directory.

use super::{TensorShapeProto, VersionDef};

/// `tensorflow.BundleHeaderProto`: the entry under the empty key of an index.
#[derive(Clone, PartialEq, prost::Message)]
pub struct BundleHeaderProto {
    /// How many data files there are.
    #[prost(int32, tag = "1")]
    pub num_shards: i32,
    /// 0 is little, 1 is big.
    #[prost(int32, tag = "2")]
    pub endianness: i32,
    /// The version of the format.
    #[prost(message, optional, tag = "3")]
    pub version: Option<VersionDef>,
}

/// `tensorflow.BundleEntryProto`: one tensor, or one slice of one.
#[derive(Clone, PartialEq, prost::Message)]
pub struct BundleEntryProto {
    /// A number of [`DATA_TYPE`](super::DATA_TYPE).
    #[prost(int32, tag = "1")]
    pub dtype: i32,
    /// The shape; of the whole tensor if there are slices.
    #[prost(message, optional, tag = "2")]
    pub shape: Option<TensorShapeProto>,
    /// Which data file the bytes are in.
    #[prost(int32, tag = "3")]
    pub shard_id: i32,
    /// Where they begin there.
    #[prost(int64, tag = "4")]
    pub offset: i64,
    /// How many there are.
    #[prost(int64, tag = "5")]
    pub size: i64,
    /// Their masked checksum.
    #[prost(fixed32, tag = "6")]
    pub crc32c: u32,
    /// The slices that the tensor was saved in; each has an entry of its own, and this one no bytes.
    #[prost(message, repeated, tag = "7")]
    pub slices: Vec<TensorSliceProto>,
}

/// `tensorflow.TensorSliceProto`: a box in a tensor.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TensorSliceProto {
    /// One extent per dimension.
    #[prost(message, repeated, tag = "1")]
    pub extent: Vec<Extent>,
}

/// `tensorflow.TensorSliceProto.Extent`: part of one dimension.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Extent {
    /// The first index.
    #[prost(int64, tag = "1")]
    pub start: i64,
    /// How many; absent for the whole dimension.
    #[prost(int64, optional, tag = "2")]
    pub length: Option<i64>,
}

/// `tensorflow.CheckpointState`: what a directory's `checkpoint` file holds, as text.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CheckpointState {
    /// The newest checkpoint.
    #[prost(string, tag = "1")]
    pub model_checkpoint_path: String,
    /// All that are kept, oldest first.
    #[prost(string, repeated, tag = "2")]
    pub all_model_checkpoint_paths: Vec<String>,
    /// When each was written, in seconds since 1970; TensorFlow 1.x's saver does not say.
    #[prost(double, repeated, tag = "3")]
    pub all_model_checkpoint_timestamps: Vec<f64>,
    /// When the last one was written that is kept for ever.
    #[prost(double, tag = "4")]
    pub last_preserved_timestamp: f64,
}
