//! Tensors, shapes and resource handles.

use bytes::Bytes;

/// `tensorflow.TensorProto`: a tensor.
///
/// The elements are either all in `tensor_content` or in the one `.._val` field for the type; a `.._val` with fewer
/// values than elements repeats its last one, and an empty one means zeros.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TensorProto {
    /// A number of [`DATA_TYPE`](super::DATA_TYPE).
    #[prost(int32, tag = "1")]
    pub dtype: i32,
    /// The shape. None is rank 0.
    #[prost(message, optional, tag = "2")]
    pub tensor_shape: Option<TensorShapeProto>,
    /// Always 0 so far.
    #[prost(int32, tag = "3")]
    pub version_number: i32,
    /// The elements in row-major order, little-endian.
    #[prost(bytes = "bytes", tag = "4")]
    pub tensor_content: Bytes,
    /// DT_FLOAT.
    #[prost(float, repeated, tag = "5")]
    pub float_val: Vec<f32>,
    /// DT_DOUBLE.
    #[prost(double, repeated, tag = "6")]
    pub double_val: Vec<f64>,
    /// DT_INT32, and every smaller integer type.
    #[prost(int32, repeated, tag = "7")]
    pub int_val: Vec<i32>,
    /// DT_STRING.
    #[prost(bytes = "bytes", repeated, tag = "8")]
    pub string_val: Vec<Bytes>,
    /// DT_COMPLEX64: real, imaginary, real, imaginary, ...
    #[prost(float, repeated, tag = "9")]
    pub scomplex_val: Vec<f32>,
    /// DT_INT64.
    #[prost(int64, repeated, tag = "10")]
    pub int64_val: Vec<i64>,
    /// DT_BOOL.
    #[prost(bool, repeated, tag = "11")]
    pub bool_val: Vec<bool>,
    /// DT_COMPLEX128: real, imaginary, real, imaginary, ...
    #[prost(double, repeated, tag = "12")]
    pub dcomplex_val: Vec<f64>,
    /// DT_HALF and DT_BFLOAT16: the 16 bits of each element.
    #[prost(int32, repeated, tag = "13")]
    pub half_val: Vec<i32>,
    /// DT_RESOURCE.
    #[prost(message, repeated, tag = "14")]
    pub resource_handle_val: Vec<ResourceHandleProto>,
    /// DT_VARIANT.
    #[prost(message, repeated, tag = "15")]
    pub variant_val: Vec<VariantTensorDataProto>,
    /// DT_UINT32.
    #[prost(uint32, repeated, tag = "16")]
    pub uint32_val: Vec<u32>,
    /// DT_UINT64.
    #[prost(uint64, repeated, tag = "17")]
    pub uint64_val: Vec<u64>,
    /// The 8-bit floating-point types: the bits of each element.
    #[prost(bytes = "bytes", tag = "18")]
    pub float8_val: Bytes,
}

/// `tensorflow.TensorShapeProto`: a shape, wholly or partly known.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TensorShapeProto {
    /// The dimensions, outermost first.
    #[prost(message, repeated, tag = "2")]
    pub dim: Vec<Dim>,
    /// Whether not even the number of dimensions is known; `dim` is then empty.
    #[prost(bool, tag = "3")]
    pub unknown_rank: bool,
}

/// `tensorflow.TensorShapeProto.Dim`: one dimension.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Dim {
    /// The number of elements, or -1 where it is not known.
    #[prost(int64, tag = "1")]
    pub size: i64,
    /// A name for people.
    #[prost(string, tag = "2")]
    pub name: String,
}

/// `tensorflow.ResourceHandleProto`: a resource, meaningful on the device that made it.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ResourceHandleProto {
    /// The device that holds the resource.
    #[prost(string, tag = "1")]
    pub device: String,
    /// The container it lives in.
    #[prost(string, tag = "2")]
    pub container: String,
    /// Its name in the container.
    #[prost(string, tag = "3")]
    pub name: String,
    /// A hash of its type.
    #[prost(uint64, tag = "4")]
    pub hash_code: u64,
    /// The type's name, for people.
    #[prost(string, tag = "5")]
    pub maybe_type_name: String,
    /// Types and shapes of what it holds.
    #[prost(message, repeated, tag = "6")]
    pub dtypes_and_shapes: Vec<DtypeAndShape>,
}

/// `tensorflow.ResourceHandleProto.DtypeAndShape`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct DtypeAndShape {
    /// A number of [`DATA_TYPE`](super::DATA_TYPE).
    #[prost(int32, tag = "1")]
    pub dtype: i32,
    /// The shape. None is rank 0.
    #[prost(message, optional, tag = "2")]
    pub shape: Option<TensorShapeProto>,
}

/// `tensorflow.VariantTensorDataProto`: a value of a type that only its registered decoder understands.
#[derive(Clone, PartialEq, prost::Message)]
pub struct VariantTensorDataProto {
    /// The type's registered name.
    #[prost(string, tag = "1")]
    pub type_name: String,
    /// The part of the value that is not tensors.
    #[prost(bytes = "vec", tag = "2")]
    pub metadata: Vec<u8>,
    /// The part that is.
    #[prost(message, repeated, tag = "3")]
    pub tensors: Vec<TensorProto>,
}
