//! Arithmetic: elementwise ops, matrix products, reductions.

use crate::Op;

pub mod add_n;
pub mod approximate_equal;
pub mod arg_extreme;
pub mod arithmetic;
pub mod batch_matmul;
pub mod binary;
pub mod bincount;
pub mod bitwise;
pub mod broadcast_gradient_args;
pub mod clip;
pub mod compare;
pub mod cross;
pub mod cumulate;
pub mod einsum;
pub mod elementwise;
pub mod guarded;
pub mod histogram;
pub mod logical;
pub mod matmul;
pub mod next_after;
pub mod nth_element;
pub mod number;
pub mod orthonormal;
pub mod reduce;
pub mod segment;
pub mod sparse_matmul;
pub mod special;
pub mod top_k;
pub mod transcendental;
pub mod unary;
pub mod unary_grad;

/// The ops of this area.
pub static OPS: &[&Op] = &[
    &add_n::ADD_N,
    &add_n::ACCUMULATE_N_V2,
    &approximate_equal::APPROXIMATE_EQUAL,
    &arg_extreme::ARG_MAX,
    &arg_extreme::ARG_MIN,
    &arithmetic::POW,
    &arithmetic::DIV_NO_NAN,
    &arithmetic::FLOOR_DIV,
    &arithmetic::TRUNCATE_DIV,
    &arithmetic::FLOOR_MOD,
    &arithmetic::MOD,
    &arithmetic::TRUNCATE_MOD,
    &arithmetic::ATAN2,
    &batch_matmul::BATCH_MATMUL,
    &batch_matmul::BATCH_MATMUL_V2,
    &binary::ADD,
    &binary::ADD_V2,
    &binary::SUB,
    &binary::MUL,
    &binary::REAL_DIV,
    &binary::DIV,
    &binary::MAXIMUM,
    &binary::MINIMUM,
    &binary::SQUARED_DIFFERENCE,
    &bincount::BINCOUNT,
    &bitwise::BITWISE_AND,
    &bitwise::BITWISE_OR,
    &bitwise::BITWISE_XOR,
    &bitwise::INVERT,
    &bitwise::LEFT_SHIFT,
    &bitwise::RIGHT_SHIFT,
    &bitwise::POPULATION_COUNT,
    &broadcast_gradient_args::BROADCAST_GRADIENT_ARGS,
    &clip::CLIP_BY_VALUE,
    &compare::LESS,
    &compare::LESS_EQUAL,
    &compare::GREATER,
    &compare::GREATER_EQUAL,
    &compare::EQUAL,
    &compare::NOT_EQUAL,
    &cross::CROSS,
    &cumulate::CUMSUM,
    &cumulate::CUMPROD,
    &einsum::EINSUM,
    &guarded::MUL_NO_NAN,
    &guarded::XDIVY,
    &guarded::XLOGY,
    &guarded::XLOG1PY,
    &histogram::HISTOGRAM_FIXED_WIDTH,
    &logical::LOGICAL_AND,
    &logical::LOGICAL_OR,
    &logical::LOGICAL_NOT,
    &matmul::MATMUL,
    &next_after::NEXT_AFTER,
    &nth_element::NTH_ELEMENT,
    &reduce::extreme::MAX,
    &reduce::extreme::MIN,
    &reduce::logical::ALL,
    &reduce::logical::ANY,
    &reduce::norm::EUCLIDEAN_NORM,
    &reduce::norm::L2_LOSS,
    &reduce::prod::PROD,
    &reduce::sum::SUM,
    &reduce::sum::MEAN,
    &segment::sorted::SEGMENT_SUM,
    &segment::sorted::SEGMENT_MEAN,
    &segment::sorted::SEGMENT_MAX,
    &segment::sorted::SEGMENT_MIN,
    &segment::sorted::SEGMENT_PROD,
    &segment::sorted::SPARSE_SEGMENT_SUM,
    &segment::sorted::SPARSE_SEGMENT_MEAN,
    &segment::sorted::SPARSE_SEGMENT_SQRT_N,
    &segment::sorted::SPARSE_SEGMENT_SUM_WITH_NUM_SEGMENTS,
    &segment::sorted::SPARSE_SEGMENT_MEAN_WITH_NUM_SEGMENTS,
    &segment::sorted::SPARSE_SEGMENT_SQRT_N_WITH_NUM_SEGMENTS,
    &segment::sparse_grad::SPARSE_SEGMENT_MEAN_GRAD,
    &segment::sparse_grad::SPARSE_SEGMENT_SQRT_N_GRAD,
    &segment::sparse_grad::SPARSE_SEGMENT_SUM_GRAD,
    &sparse_matmul::SPARSE_MATMUL,
    &segment::unsorted::UNSORTED_SEGMENT_SUM,
    &segment::unsorted::UNSORTED_SEGMENT_MAX,
    &segment::unsorted::UNSORTED_SEGMENT_MIN,
    &segment::unsorted::UNSORTED_SEGMENT_PROD,
    &special::ERF,
    &special::ERFC,
    &special::LGAMMA,
    &special::DIGAMMA,
    &orthonormal::KOLO_ORTHONORMAL,
    &top_k::TOP_K,
    &top_k::TOP_K_V2,
    &top_k::IN_TOP_K,
    &top_k::IN_TOP_K_V2,
    &transcendental::SQRT,
    &transcendental::RSQRT,
    &transcendental::EXP,
    &transcendental::EXPM1,
    &transcendental::LOG,
    &transcendental::LOG1P,
    &transcendental::SIN,
    &transcendental::COS,
    &transcendental::TAN,
    &transcendental::ASIN,
    &transcendental::ACOS,
    &transcendental::ATAN,
    &transcendental::ASINH,
    &transcendental::ACOSH,
    &transcendental::ATANH,
    &transcendental::SINH,
    &transcendental::COSH,
    &transcendental::TANH,
    &transcendental::SIGMOID,
    &unary::NEG,
    &unary::ABS,
    &unary::SQUARE,
    &unary::RECIPROCAL,
    &unary::INV,
    &unary::SIGN,
    &unary::FLOOR,
    &unary::CEIL,
    &unary::ROUND,
    &unary::RINT,
    &unary::IS_NAN,
    &unary::IS_INF,
    &unary::IS_FINITE,
    &unary_grad::SQRT_GRAD,
    &unary_grad::RSQRT_GRAD,
    &unary_grad::RECIPROCAL_GRAD,
    &unary_grad::INV_GRAD,
    &unary_grad::TANH_GRAD,
    &unary_grad::SIGMOID_GRAD,
];
