//! TensorFlow's graph messages, with TensorFlow's names and field numbers.
//!
//! The structs are what `prost-build` would make of the `.proto` files, with three choices of our own: maps are
//! `BTreeMap`s, so equal messages have equal bytes; data types are plain `i32`s, since a peer may send ones we do not
//! know; and `tensor_content` is [`bytes::Bytes`], so decoding from `Bytes` shares the buffer instead of copying it.
//! Fields not listed are skipped when decoding, as protobuf asks.

mod attr;
mod checkpoint;
mod debug_info;
mod function;
mod graph;
mod meta_graph;
mod op_def;
mod tensor;

pub use attr::{AttrValue, ListValue, NameAttrList, Value};
pub use checkpoint::{BundleEntryProto, BundleHeaderProto, CheckpointState, Extent, TensorSliceProto};
pub use debug_info::{FileLineCol, GraphDebugInfo, StackTrace};
pub use function::{ArgAttrs, FunctionDef, FunctionDefLibrary, GradientDef, RegisteredGradient};
pub use graph::{ExperimentalDebugInfo, GraphDef, NodeDef, VersionDef};
pub use meta_graph::{
    AssetFileDef, BytesList, CollectionDef, CollectionKind, FloatList, Int64List, MetaGraphDef, MetaInfoDef, NodeList,
    SaveSliceInfoDef, SavedModelDef, SaverDef, SignatureDef, TensorInfo, VariableDef,
};
pub use op_def::{ArgDef, AttrDef, FullTypeAttr, FullTypeDef, OpDef, OpDeprecation};
pub use tensor::{Dim, DtypeAndShape, ResourceHandleProto, TensorProto, TensorShapeProto, VariantTensorDataProto};

pub use crate::wire::enums::{DATA_TYPE, FULL_TYPE_ID};
