//! Making, reshaping and taking apart tensors.

use crate::Op;

pub mod bitcast;
pub mod broadcast;
pub mod bucketize;
pub mod cast;
pub mod check_numerics;
pub mod concat;
pub mod constant;
pub mod data_format;
pub mod diag;
pub mod dynamic;
pub(crate) mod elements;
pub mod ensure_shape;
pub mod expand_dims;
pub mod fill;
pub mod gather;
pub mod gather_nd;
pub mod identity;
pub mod in_place;
pub mod matrix_diag;
pub mod mirror_pad;
pub mod one_hot;
pub mod pad;
pub mod parallel_concat;
pub mod placeholder;
pub mod range;
pub mod reshape;
pub mod reverse;
pub mod roll;
pub mod search_sorted;
pub mod select;
pub mod shape;
pub mod slice;
pub mod space_to_batch;
pub mod space_to_depth;
pub mod split;
pub mod strided_slice;
pub mod tensor_scatter;
pub mod transpose;
pub mod unique;
pub mod unravel_index;
pub(crate) mod view;

pub use elements::IntoInts;

/// The ops of this area.
pub static OPS: &[&Op] = &[
    &bitcast::BITCAST,
    &broadcast::BROADCAST_ARGS,
    &broadcast::BROADCAST_TO,
    &broadcast::TILE,
    &bucketize::BUCKETIZE,
    &cast::CAST,
    &cast::HOST_CAST,
    &check_numerics::CHECK_NUMERICS,
    &concat::CONCAT,
    &concat::CONCAT_OFFSET,
    &concat::CONCAT_V2,
    &concat::PACK,
    &constant::CONST,
    &data_format::DATA_FORMAT_DIM_MAP,
    &data_format::DATA_FORMAT_VEC_PERMUTE,
    &diag::DIAG,
    &diag::DIAG_PART,
    &diag::MATRIX_BAND_PART,
    &diag::MATRIX_DIAG,
    &diag::MATRIX_DIAG_PART,
    &dynamic::DYNAMIC_PARTITION,
    &dynamic::DYNAMIC_STITCH,
    &dynamic::PARALLEL_DYNAMIC_STITCH,
    &ensure_shape::ENSURE_SHAPE,
    &expand_dims::EXPAND_DIMS,
    &expand_dims::SQUEEZE,
    &fill::FILL,
    &fill::ONES_LIKE,
    &fill::ZEROS_LIKE,
    &gather::GATHER,
    &gather::GATHER_V2,
    &gather_nd::GATHER_ND,
    &gather_nd::SCATTER_ND,
    &identity::IDENTITY,
    &identity::IDENTITY_N,
    &identity::PREVENT_GRADIENT,
    &identity::REF_IDENTITY,
    &identity::STOP_GRADIENT,
    &identity::GUARANTEE_CONST,
    &in_place::DEEP_COPY,
    &in_place::EMPTY,
    &in_place::INPLACE_ADD,
    &in_place::INPLACE_SUB,
    &in_place::INPLACE_UPDATE,
    &matrix_diag::MATRIX_DIAG_V2,
    &matrix_diag::MATRIX_DIAG_V3,
    &matrix_diag::MATRIX_DIAG_PART_V2,
    &matrix_diag::MATRIX_DIAG_PART_V3,
    &matrix_diag::MATRIX_SET_DIAG,
    &matrix_diag::MATRIX_SET_DIAG_V2,
    &matrix_diag::MATRIX_SET_DIAG_V3,
    &mirror_pad::MIRROR_PAD,
    &mirror_pad::MIRROR_PAD_GRAD,
    &one_hot::ONE_HOT,
    &pad::PAD,
    &pad::PAD_V2,
    &parallel_concat::PARALLEL_CONCAT,
    &placeholder::PLACEHOLDER,
    &placeholder::PLACEHOLDER_V2,
    &placeholder::PLACEHOLDER_WITH_DEFAULT,
    &range::LIN_SPACE,
    &range::RANGE,
    &reshape::RESHAPE,
    &reverse::REVERSE_SEQUENCE,
    &reverse::REVERSE_V2,
    &roll::ROLL,
    &search_sorted::LOWER_BOUND,
    &search_sorted::UPPER_BOUND,
    &select::SELECT,
    &select::SELECT_V2,
    &select::WHERE,
    &shape::RANK,
    &shape::SHAPE,
    &shape::SHAPE_N,
    &shape::SIZE,
    &slice::SLICE,
    &space_to_batch::BATCH_TO_SPACE_ND,
    &space_to_batch::SPACE_TO_BATCH_ND,
    &space_to_depth::DEPTH_TO_SPACE,
    &space_to_depth::SPACE_TO_DEPTH,
    &split::SPLIT,
    &split::SPLIT_V,
    &split::UNPACK,
    &strided_slice::STRIDED_SLICE,
    &strided_slice::STRIDED_SLICE_GRAD,
    &tensor_scatter::SCATTER_ND_NON_ALIASING_ADD,
    &tensor_scatter::TENSOR_SCATTER_ADD,
    &tensor_scatter::TENSOR_SCATTER_MAX,
    &tensor_scatter::TENSOR_SCATTER_MIN,
    &tensor_scatter::TENSOR_SCATTER_SUB,
    &tensor_scatter::TENSOR_SCATTER_UPDATE,
    &transpose::INVERT_PERMUTATION,
    &transpose::TRANSPOSE,
    &unique::LIST_DIFF,
    &unique::UNIQUE,
    &unique::UNIQUE_V2,
    &unique::UNIQUE_WITH_COUNTS,
    &unique::UNIQUE_WITH_COUNTS_V2,
    &unravel_index::UNRAVEL_INDEX,
];
