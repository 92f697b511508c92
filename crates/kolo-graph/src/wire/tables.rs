//! The tables of the messages in [`proto`](super::proto): one row per field, as protobuf's text format names them.

use super::describe::Kind::{Bool, Bytes, Double, Fixed64, Float, Int32, Int64, String, Uint32, Uint64};
use super::describe::{Described, Field, Kind, Label, Message};
use super::enums::{DATA_TYPE, FULL_TYPE_ID};
use super::proto;

/// Ties structs to their tables.
macro_rules! describe {
    ($($message:ident => $table:ident),* $(,)?) => {$(
        impl Described for proto::$message {
            const DESCRIPTION: &'static Message = &$table;
        }
    )*};
}

describe! {
    GraphDef => GRAPH_DEF,
    NodeDef => NODE_DEF,
    ExperimentalDebugInfo => EXPERIMENTAL_DEBUG_INFO,
    VersionDef => VERSION_DEF,
    AttrValue => ATTR_VALUE,
    ListValue => LIST_VALUE,
    NameAttrList => NAME_ATTR_LIST,
    TensorProto => TENSOR_PROTO,
    TensorShapeProto => TENSOR_SHAPE_PROTO,
    Dim => DIM,
    ResourceHandleProto => RESOURCE_HANDLE_PROTO,
    DtypeAndShape => DTYPE_AND_SHAPE,
    VariantTensorDataProto => VARIANT_TENSOR_DATA_PROTO,
    OpDef => OP_DEF,
    ArgDef => ARG_DEF,
    AttrDef => ATTR_DEF,
    OpDeprecation => OP_DEPRECATION,
    FullTypeDef => FULL_TYPE_DEF,
    FunctionDefLibrary => FUNCTION_DEF_LIBRARY,
    FunctionDef => FUNCTION_DEF,
    ArgAttrs => ARG_ATTRS,
    GradientDef => GRADIENT_DEF,
    RegisteredGradient => REGISTERED_GRADIENT,
    GraphDebugInfo => GRAPH_DEBUG_INFO,
    FileLineCol => FILE_LINE_COL,
    StackTrace => STACK_TRACE,
    CheckpointState => CHECKPOINT_STATE,
}

const fn field(name: &'static str, number: u32, kind: Kind, label: Label) -> Field {
    Field { name, number, kind, label }
}

const fn one(name: &'static str, number: u32, kind: Kind) -> Field {
    field(name, number, kind, Label::Single)
}

const fn opt(name: &'static str, number: u32, kind: Kind) -> Field {
    field(name, number, kind, Label::Optional)
}

const fn rep(name: &'static str, number: u32, kind: Kind) -> Field {
    field(name, number, kind, Label::Repeated)
}

const fn map(name: &'static str, number: u32, entry: &'static Message) -> Field {
    field(name, number, Kind::Message(entry), Label::Map)
}

const fn of(oneof: &'static str, name: &'static str, number: u32, kind: Kind) -> Field {
    field(name, number, kind, Label::Oneof(oneof))
}

const DTYPE: Kind = Kind::Enum(&DATA_TYPE);
const SHAPE: Kind = Kind::Message(&TENSOR_SHAPE_PROTO);

static GRAPH_DEF: Message = Message {
    name: "tensorflow.GraphDef",
    fields: &[
        rep("node", 1, Kind::Message(&NODE_DEF)),
        one("library", 2, Kind::Message(&FUNCTION_DEF_LIBRARY)),
        one("version", 3, Int32),
        one("versions", 4, Kind::Message(&VERSION_DEF)),
        one("debug_info", 5, Kind::Message(&GRAPH_DEBUG_INFO)),
    ],
};

static NODE_DEF: Message = Message {
    name: "tensorflow.NodeDef",
    fields: &[
        one("name", 1, String),
        one("op", 2, String),
        rep("input", 3, String),
        one("device", 4, String),
        map("attr", 5, &ATTR_ENTRY),
        one("experimental_debug_info", 6, Kind::Message(&EXPERIMENTAL_DEBUG_INFO)),
        one("experimental_type", 7, Kind::Message(&FULL_TYPE_DEF)),
    ],
};

static EXPERIMENTAL_DEBUG_INFO: Message = Message {
    name: "tensorflow.NodeDef.ExperimentalDebugInfo",
    fields: &[rep("original_node_names", 1, String), rep("original_func_names", 2, String)],
};

static VERSION_DEF: Message = Message {
    name: "tensorflow.VersionDef",
    fields: &[one("producer", 1, Int32), one("min_consumer", 2, Int32), rep("bad_consumers", 3, Int32)],
};

static ATTR_VALUE: Message = Message {
    name: "tensorflow.AttrValue",
    fields: &[
        of("value", "list", 1, Kind::Message(&LIST_VALUE)),
        of("value", "s", 2, Bytes),
        of("value", "i", 3, Int64),
        of("value", "f", 4, Float),
        of("value", "b", 5, Bool),
        of("value", "type", 6, DTYPE),
        of("value", "shape", 7, SHAPE),
        of("value", "tensor", 8, Kind::Message(&TENSOR_PROTO)),
        of("value", "placeholder", 9, String),
        of("value", "func", 10, Kind::Message(&NAME_ATTR_LIST)),
    ],
};

static LIST_VALUE: Message = Message {
    name: "tensorflow.AttrValue.ListValue",
    fields: &[
        rep("s", 2, Bytes),
        rep("i", 3, Int64),
        rep("f", 4, Float),
        rep("b", 5, Bool),
        rep("type", 6, DTYPE),
        rep("shape", 7, SHAPE),
        rep("tensor", 8, Kind::Message(&TENSOR_PROTO)),
        rep("func", 9, Kind::Message(&NAME_ATTR_LIST)),
    ],
};

static NAME_ATTR_LIST: Message =
    Message { name: "tensorflow.NameAttrList", fields: &[one("name", 1, String), map("attr", 2, &ATTR_ENTRY)] };

static TENSOR_PROTO: Message = Message {
    name: "tensorflow.TensorProto",
    fields: &[
        one("dtype", 1, DTYPE),
        one("tensor_shape", 2, SHAPE),
        one("version_number", 3, Int32),
        one("tensor_content", 4, Bytes),
        rep("float_val", 5, Float),
        rep("double_val", 6, Double),
        rep("int_val", 7, Int32),
        rep("string_val", 8, Bytes),
        rep("scomplex_val", 9, Float),
        rep("int64_val", 10, Int64),
        rep("bool_val", 11, Bool),
        rep("dcomplex_val", 12, Double),
        rep("half_val", 13, Int32),
        rep("resource_handle_val", 14, Kind::Message(&RESOURCE_HANDLE_PROTO)),
        rep("variant_val", 15, Kind::Message(&VARIANT_TENSOR_DATA_PROTO)),
        rep("uint32_val", 16, Uint32),
        rep("uint64_val", 17, Uint64),
        one("float8_val", 18, Bytes),
    ],
};

static TENSOR_SHAPE_PROTO: Message = Message {
    name: "tensorflow.TensorShapeProto",
    fields: &[rep("dim", 2, Kind::Message(&DIM)), one("unknown_rank", 3, Bool)],
};

static DIM: Message =
    Message { name: "tensorflow.TensorShapeProto.Dim", fields: &[one("size", 1, Int64), one("name", 2, String)] };

static RESOURCE_HANDLE_PROTO: Message = Message {
    name: "tensorflow.ResourceHandleProto",
    fields: &[
        one("device", 1, String),
        one("container", 2, String),
        one("name", 3, String),
        one("hash_code", 4, Uint64),
        one("maybe_type_name", 5, String),
        rep("dtypes_and_shapes", 6, Kind::Message(&DTYPE_AND_SHAPE)),
    ],
};

static DTYPE_AND_SHAPE: Message = Message {
    name: "tensorflow.ResourceHandleProto.DtypeAndShape",
    fields: &[one("dtype", 1, DTYPE), one("shape", 2, SHAPE)],
};

static VARIANT_TENSOR_DATA_PROTO: Message = Message {
    name: "tensorflow.VariantTensorDataProto",
    fields: &[one("type_name", 1, String), one("metadata", 2, Bytes), rep("tensors", 3, Kind::Message(&TENSOR_PROTO))],
};

static OP_DEF: Message = Message {
    name: "tensorflow.OpDef",
    fields: &[
        one("name", 1, String),
        rep("input_arg", 2, Kind::Message(&ARG_DEF)),
        rep("output_arg", 3, Kind::Message(&ARG_DEF)),
        rep("attr", 4, Kind::Message(&ATTR_DEF)),
        one("summary", 5, String),
        one("description", 6, String),
        one("deprecation", 8, Kind::Message(&OP_DEPRECATION)),
        one("is_aggregate", 16, Bool),
        one("is_stateful", 17, Bool),
        one("is_commutative", 18, Bool),
        one("allows_uninitialized_input", 19, Bool),
        rep("control_output", 20, String),
        one("is_distributed_communication", 21, Bool),
    ],
};

static ARG_DEF: Message = Message {
    name: "tensorflow.OpDef.ArgDef",
    fields: &[
        one("name", 1, String),
        one("description", 2, String),
        one("type", 3, DTYPE),
        one("type_attr", 4, String),
        one("number_attr", 5, String),
        one("type_list_attr", 6, String),
        rep("handle_data", 7, Kind::Message(&DTYPE_AND_SHAPE)),
        one("is_ref", 16, Bool),
        one("experimental_full_type", 17, Kind::Message(&FULL_TYPE_DEF)),
    ],
};

static ATTR_DEF: Message = Message {
    name: "tensorflow.OpDef.AttrDef",
    fields: &[
        one("name", 1, String),
        one("type", 2, String),
        one("default_value", 3, Kind::Message(&ATTR_VALUE)),
        one("description", 4, String),
        one("has_minimum", 5, Bool),
        one("minimum", 6, Int64),
        one("allowed_values", 7, Kind::Message(&ATTR_VALUE)),
    ],
};

static OP_DEPRECATION: Message =
    Message { name: "tensorflow.OpDeprecation", fields: &[one("version", 1, Int32), one("explanation", 2, String)] };

static FULL_TYPE_DEF: Message = Message {
    name: "tensorflow.FullTypeDef",
    fields: &[
        one("type_id", 1, Kind::Enum(&FULL_TYPE_ID)),
        rep("args", 2, Kind::Message(&FULL_TYPE_DEF)),
        of("attr", "s", 3, String),
        of("attr", "i", 4, Int64),
    ],
};

static FUNCTION_DEF_LIBRARY: Message = Message {
    name: "tensorflow.FunctionDefLibrary",
    fields: &[
        rep("function", 1, Kind::Message(&FUNCTION_DEF)),
        rep("gradient", 2, Kind::Message(&GRADIENT_DEF)),
        rep("registered_gradients", 3, Kind::Message(&REGISTERED_GRADIENT)),
    ],
};

static FUNCTION_DEF: Message = Message {
    name: "tensorflow.FunctionDef",
    fields: &[
        one("signature", 1, Kind::Message(&OP_DEF)),
        rep("node_def", 3, Kind::Message(&NODE_DEF)),
        map("ret", 4, &STRING_ENTRY),
        map("attr", 5, &ATTR_ENTRY),
        map("control_ret", 6, &STRING_ENTRY),
        map("arg_attr", 7, &ARG_ATTR_ENTRY),
        map("resource_arg_unique_id", 8, &UNIQUE_ID_ENTRY),
    ],
};

static ARG_ATTRS: Message = Message { name: "tensorflow.FunctionDef.ArgAttrs", fields: &[map("attr", 1, &ATTR_ENTRY)] };

static GRADIENT_DEF: Message = Message {
    name: "tensorflow.GradientDef",
    fields: &[one("function_name", 1, String), one("gradient_func", 2, String)],
};

static REGISTERED_GRADIENT: Message = Message {
    name: "tensorflow.RegisteredGradient",
    fields: &[one("gradient_func", 1, String), one("registered_op_type", 2, String)],
};

static GRAPH_DEBUG_INFO: Message = Message {
    name: "tensorflow.GraphDebugInfo",
    fields: &[
        rep("files", 1, String),
        map("traces", 2, &TRACE_BY_NAME_ENTRY),
        map("frames_by_id", 4, &FRAME_ENTRY),
        map("name_to_trace_id", 5, &TRACE_ID_ENTRY),
        map("traces_by_id", 6, &TRACE_BY_ID_ENTRY),
    ],
};

static FILE_LINE_COL: Message = Message {
    name: "tensorflow.GraphDebugInfo.FileLineCol",
    fields: &[
        opt("file_index", 1, Int32),
        opt("line", 2, Int32),
        opt("col", 3, Int32),
        opt("func", 4, String),
        opt("code", 5, String),
    ],
};

static STACK_TRACE: Message = Message {
    name: "tensorflow.GraphDebugInfo.StackTrace",
    fields: &[rep("file_line_cols", 1, Kind::Message(&FILE_LINE_COL)), rep("frame_id", 2, Fixed64)],
};

// Map entries. TensorFlow gives each map an entry type of its own; ours are shared by maps of one type.

static ATTR_ENTRY: Message = Message {
    name: "map<string, tensorflow.AttrValue>",
    fields: &[one("key", 1, String), one("value", 2, Kind::Message(&ATTR_VALUE))],
};

static STRING_ENTRY: Message =
    Message { name: "map<string, string>", fields: &[one("key", 1, String), one("value", 2, String)] };

static ARG_ATTR_ENTRY: Message = Message {
    name: "map<uint32, tensorflow.FunctionDef.ArgAttrs>",
    fields: &[one("key", 1, Uint32), one("value", 2, Kind::Message(&ARG_ATTRS))],
};

static UNIQUE_ID_ENTRY: Message =
    Message { name: "map<uint32, uint32>", fields: &[one("key", 1, Uint32), one("value", 2, Uint32)] };

static TRACE_BY_NAME_ENTRY: Message = Message {
    name: "map<string, tensorflow.GraphDebugInfo.StackTrace>",
    fields: &[opt("key", 1, String), opt("value", 2, Kind::Message(&STACK_TRACE))],
};

static FRAME_ENTRY: Message = Message {
    name: "map<fixed64, tensorflow.GraphDebugInfo.FileLineCol>",
    fields: &[opt("key", 1, Fixed64), opt("value", 2, Kind::Message(&FILE_LINE_COL))],
};

static TRACE_ID_ENTRY: Message =
    Message { name: "map<string, fixed64>", fields: &[opt("key", 1, String), opt("value", 2, Fixed64)] };

static TRACE_BY_ID_ENTRY: Message = Message {
    name: "map<fixed64, tensorflow.GraphDebugInfo.StackTrace>",
    fields: &[opt("key", 1, Fixed64), opt("value", 2, Kind::Message(&STACK_TRACE))],
};

static CHECKPOINT_STATE: Message = Message {
    name: "tensorflow.CheckpointState",
    fields: &[
        one("model_checkpoint_path", 1, String),
        rep("all_model_checkpoint_paths", 2, String),
        rep("all_model_checkpoint_timestamps", 3, Double),
        one("last_preserved_timestamp", 4, Double),
    ],
};
