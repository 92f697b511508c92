//! `.meta` files and SavedModels: a graph with what a program needs to go on with it.

use std::collections::BTreeMap;

use super::{GraphDef, TensorShapeProto};

/// `tensorflow.SavedModel`: graphs that share their variables, told apart by tags.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SavedModelDef {
    /// The version of this message; 1 is the only one.
    #[prost(int64, tag = "1")]
    pub saved_model_schema_version: i64,
    /// The graphs.
    #[prost(message, repeated, tag = "2")]
    pub meta_graphs: Vec<MetaGraphDef>,
}

/// `tensorflow.MetaGraphDef`, without the objects of TensorFlow 2.
#[derive(Clone, PartialEq, prost::Message)]
pub struct MetaGraphDef {
    /// Who wrote it.
    #[prost(message, optional, tag = "1")]
    pub meta_info_def: Option<MetaInfoDef>,
    /// The graph.
    #[prost(message, optional, tag = "2")]
    pub graph_def: Option<GraphDef>,
    /// How to save and restore its variables.
    #[prost(message, optional, tag = "3")]
    pub saver_def: Option<SaverDef>,
    /// Variables, summaries, and other lists by name.
    #[prost(btree_map = "string, message", tag = "4")]
    pub collection_def: BTreeMap<String, CollectionDef>,
    /// What the graph can be asked for, by name.
    #[prost(btree_map = "string, message", tag = "5")]
    pub signature_def: BTreeMap<String, SignatureDef>,
    /// Files that come with it.
    #[prost(message, repeated, tag = "6")]
    pub asset_file_def: Vec<AssetFileDef>,
}

/// `tensorflow.SignatureDef`: tensors to feed and to fetch, under names for people.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SignatureDef {
    /// What to feed.
    #[prost(btree_map = "string, message", tag = "1")]
    pub inputs: BTreeMap<String, TensorInfo>,
    /// What to fetch.
    #[prost(btree_map = "string, message", tag = "2")]
    pub outputs: BTreeMap<String, TensorInfo>,
    /// What it is for, such as `tensorflow/serving/predict`.
    #[prost(string, tag = "3")]
    pub method_name: String,
}

/// `tensorflow.TensorInfo`: a tensor of a graph. Sparse and composite tensors have no name.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TensorInfo {
    /// `x:0`.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Its element type.
    #[prost(int32, tag = "2")]
    pub dtype: i32,
    /// Its shape, as far as it is known.
    #[prost(message, optional, tag = "3")]
    pub tensor_shape: Option<TensorShapeProto>,
}

/// `tensorflow.AssetFileDef`: a file, and the tensor that holds its path.
#[derive(Clone, PartialEq, prost::Message)]
pub struct AssetFileDef {
    /// The tensor to feed with the path.
    #[prost(message, optional, tag = "1")]
    pub tensor_info: Option<TensorInfo>,
    /// The name in the folder `assets`.
    #[prost(string, tag = "2")]
    pub filename: String,
}

/// `tensorflow.MetaGraphDef.MetaInfoDef`, without the list of ops.
#[derive(Clone, PartialEq, prost::Message)]
pub struct MetaInfoDef {
    /// A name that the user gave.
    #[prost(string, tag = "1")]
    pub meta_graph_version: String,
    /// What a loader may choose by.
    #[prost(string, repeated, tag = "4")]
    pub tags: Vec<String>,
    /// The version of TensorFlow that wrote it.
    #[prost(string, tag = "5")]
    pub tensorflow_version: String,
    /// Its commit.
    #[prost(string, tag = "6")]
    pub tensorflow_git_version: String,
    /// Attributes that equal their defaults are left out.
    #[prost(bool, tag = "7")]
    pub stripped_default_attrs: bool,
}

/// `tensorflow.SaverDef`: the ops of a saver, and how many checkpoints it keeps.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SaverDef {
    /// The tensor to feed with the prefix.
    #[prost(string, tag = "1")]
    pub filename_tensor_name: String,
    /// The tensor to fetch in order to save.
    #[prost(string, tag = "2")]
    pub save_tensor_name: String,
    /// The operation to run in order to restore.
    #[prost(string, tag = "3")]
    pub restore_op_name: String,
    /// How many checkpoints to keep; 0 is all.
    #[prost(int32, tag = "4")]
    pub max_to_keep: i32,
    /// One file per device.
    #[prost(bool, tag = "5")]
    pub sharded: bool,
    /// One checkpoint for every so many hours is kept for ever.
    #[prost(float, tag = "6")]
    pub keep_checkpoint_every_n_hours: f32,
    /// The format; 2 is the tensor bundle.
    #[prost(int32, tag = "7")]
    pub version: i32,
}

/// `tensorflow.CollectionDef`: one list.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CollectionDef {
    /// What is in it; nothing for a kind that we do not know.
    #[prost(oneof = "CollectionKind", tags = "1, 2, 3, 4")]
    pub kind: Option<CollectionKind>,
}

/// The kinds of lists.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum CollectionKind {
    /// Names of nodes (`n`) and tensors (`n:0`).
    #[prost(message, tag = "1")]
    NodeList(NodeList),
    /// Messages as bytes, such as [`VariableDef`]s.
    #[prost(message, tag = "2")]
    BytesList(BytesList),
    /// Numbers.
    #[prost(message, tag = "3")]
    Int64List(Int64List),
    /// Numbers.
    #[prost(message, tag = "4")]
    FloatList(FloatList),
}

/// `tensorflow.CollectionDef.NodeList`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct NodeList {
    /// The names.
    #[prost(string, repeated, tag = "1")]
    pub value: Vec<String>,
}

/// `tensorflow.CollectionDef.BytesList`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct BytesList {
    /// The messages.
    #[prost(bytes = "vec", repeated, tag = "1")]
    pub value: Vec<Vec<u8>>,
}

/// `tensorflow.CollectionDef.Int64List`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Int64List {
    /// The numbers.
    #[prost(int64, repeated, tag = "1")]
    pub value: Vec<i64>,
}

/// `tensorflow.CollectionDef.FloatList`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct FloatList {
    /// The numbers.
    #[prost(float, repeated, tag = "1")]
    pub value: Vec<f32>,
}

/// `tensorflow.VariableDef`: the nodes that make up a variable.
#[derive(Clone, PartialEq, prost::Message)]
pub struct VariableDef {
    /// The handle or reference: `w:0`.
    #[prost(string, tag = "1")]
    pub variable_name: String,
    /// The operation that assigns the initial value.
    #[prost(string, tag = "2")]
    pub initializer_name: String,
    /// The value as read once per step.
    #[prost(string, tag = "3")]
    pub snapshot_name: String,
    /// Which part of a larger tensor it is.
    #[prost(message, optional, tag = "4")]
    pub save_slice_info_def: Option<SaveSliceInfoDef>,
    /// A handle, not a reference.
    #[prost(bool, tag = "5")]
    pub is_resource: bool,
    /// The initial value.
    #[prost(string, tag = "6")]
    pub initial_value_name: String,
    /// Trained by optimizers.
    #[prost(bool, tag = "7")]
    pub trainable: bool,
    /// When replicas agree on it; 0 leaves it open.
    #[prost(int32, tag = "8")]
    pub synchronization: i32,
    /// How replicas agree on it; 0 is not at all.
    #[prost(int32, tag = "9")]
    pub aggregation: i32,
}

/// `tensorflow.SaveSliceInfoDef`: a part of a larger tensor.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SaveSliceInfoDef {
    /// The name of the whole.
    #[prost(string, tag = "1")]
    pub full_name: String,
    /// The shape of the whole.
    #[prost(int64, repeated, tag = "2")]
    pub full_shape: Vec<i64>,
    /// Where the part begins.
    #[prost(int64, repeated, tag = "3")]
    pub var_offset: Vec<i64>,
    /// The shape of the part.
    #[prost(int64, repeated, tag = "4")]
    pub var_shape: Vec<i64>,
}
