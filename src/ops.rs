//! Every function that adds an op to a graph, under one roof: `kolo::ops::matmul(a, b)`. The files of `kolo-ops` say what
//! each one does.

pub use kolo_ops::array::IntoInts;
pub use kolo_ops::array::strided_slice::At;
pub use kolo_ops::array::{
    bitcast::bitcast,
    broadcast::{broadcast_dynamic_shape, broadcast_to, tile},
    bucketize::bucketize,
    cast::cast,
    check_numerics::check_numerics,
    concat::{concat, stack},
    diag::{diag, diag_part, matrix_band_part, matrix_diag, matrix_diag_part},
    dynamic::{dynamic_partition, dynamic_stitch},
    expand_dims::{expand_dims, squeeze},
    fill::{fill, ones, ones_like, zeros, zeros_like},
    gather::{batch_gather, gather},
    gather_nd::{gather_nd, scatter_nd},
    identity::{identity, prevent_gradient, stop_gradient, tuple},
    mirror_pad::mirror_pad,
    one_hot::one_hot,
    pad::{pad, pad_with},
    placeholder::placeholder_with_default,
    range::{linspace, range, range_by},
    reshape::reshape,
    reverse::{reverse, reverse_sequence},
    select::{select, where_true},
    shape::{rank, shape, size},
    slice::slice,
    space_to_batch::{batch_to_space, space_to_batch},
    split::{split, split_sizes, unstack},
    strided_slice::slice_at,
    transpose::{invert_permutation, transpose},
    unique::{list_diff, unique, unique_slices, unique_with_counts},
};
pub use kolo_ops::flow::tensor_array::TensorArray;
pub use kolo_ops::flow::{
    assert::assert,
    print::{print, print_format, string_format},
    timestamp::timestamp,
};
pub use kolo_ops::io::{
    background::{await_save_v2, background_save_v2},
    csv::decode_csv,
    decode_raw::decode_raw,
    merge_v2_checkpoints::merge_v2_checkpoints,
    png_image::{decode_png, encode_png},
    restore_v2::restore_v2,
    save_v2::save_v2,
    sharded_filename::{sharded_filename, sharded_filespec},
    whole_file::{matching_files, read_file, write_file},
};
pub use kolo_ops::math::{
    add_n::add_n,
    arg_extreme::{argmax, argmin},
    arithmetic::{atan2, div_no_nan, floor_div, floor_mod, pow},
    batch_matmul::{batch_matmul, batch_matmul_with},
    binary::{add, maximum, minimum, squared_difference},
    bincount::bincount,
    clip::clip_by_value,
    compare::{equal, greater, greater_equal, less, less_equal, not_equal},
    cross::cross,
    cumulate::{cumprod, cumsum},
    einsum::einsum,
    histogram::histogram_fixed_width,
    logical::{logical_and, logical_not, logical_or},
    matmul::{matmul, matmul_with},
    reduce::extreme::{max, max_all, min, min_all},
    reduce::logical::{all, all_all, any, any_all},
    reduce::norm::{euclidean_norm, l2_loss},
    reduce::prod::prod,
    reduce::sum::{mean, mean_all, sum, sum_all},
    segment::sorted::{
        segment_max, segment_mean, segment_min, segment_prod, segment_sum, sparse_segment_mean, sparse_segment_sum,
    },
    segment::unsorted::{unsorted_segment_max, unsorted_segment_min, unsorted_segment_prod, unsorted_segment_sum},
    special::{digamma, erf, erfc, lgamma},
    top_k::{in_top_k, top_k},
    transcendental::{acos, asin, atan, cos, cosh, exp, expm1, log, log1p, rsqrt, sigmoid, sin, sinh, sqrt, tan, tanh},
    unary::{abs, ceil, floor, is_finite, is_inf, is_nan, neg, reciprocal, round, sign, square},
};
pub use kolo_ops::nn::{
    attention::{attention, composed_attention},
    avg_pool::avg_pool,
    batch_norm::{batch_norm_inference, batch_norm_training},
    bias_add::{bias_add, bias_add_nchw},
    class_loss::class_loss,
    conv2d::{conv2d, conv2d_explicit},
    conv3d::conv3d,
    cross_entropy::softmax_cross_entropy,
    depthwise_conv2d::depthwise_conv2d,
    dropout::dropout,
    elu::{elu, selu},
    gelu::gelu,
    layer_norm::{composed_layer_norm, layer_norm},
    lrn::lrn,
    max_pool::max_pool,
    relu::{leaky_relu, relu, relu6},
    resize::{resize_bilinear, resize_nearest},
    softmax::{log_softmax, softmax},
    softplus::{softplus, softsign},
    sparse_cross_entropy::sparse_softmax_cross_entropy,
};
pub use kolo_ops::optim::{
    adadelta::apply_adadelta,
    adagrad::{apply_adagrad, sparse_apply_adagrad},
    adam::apply_adam,
    ftrl::apply_ftrl,
    gradient_descent::apply_gradient_descent,
    momentum::{apply_momentum, sparse_apply_momentum},
    rms_prop::{apply_centered_rms_prop, apply_rms_prop},
};
pub use kolo_ops::queue::{ConditionalAccumulator, FifoQueue, QueueHandle, QueueKind, SparseConditionalAccumulator};
pub use kolo_ops::random::{
    gamma::random_gamma,
    multinomial::multinomial,
    shuffle::random_shuffle,
    standard::{random_normal, random_uniform, truncated_normal},
    stateless::{stateless_random_normal, stateless_random_uniform, stateless_truncated_normal},
    truncated::parameterized_truncated_normal,
    uniform_int::random_uniform_int,
};
pub use kolo_ops::sparse::{
    fill_empty_rows::sparse_fill_empty_rows, matmul::sparse_dense_matmul, reorder::sparse_reorder,
    to_dense::sparse_to_dense,
};
pub use kolo_ops::state::{
    count_up_to::count_up_to,
    gather::resource_gather,
    handle::{destroy_resource, var_is_initialized, variable_shape},
    read::read_variable,
    reference::is_variable_initialized,
    scatter::{scatter_add, scatter_sub, scatter_update},
    scatter_nd::{scatter_nd_add, scatter_nd_sub, scatter_nd_update},
};
pub use kolo_ops::string::{
    as_string::as_string,
    hash_bucket::string_to_hash_bucket_fast,
    join::string_join,
    length::string_length,
    reduce_join::reduce_join,
    regex::{static_regex_full_match, static_regex_replace},
    split::string_split,
    strip::{string_lower, string_strip, string_upper},
    substr::substr,
    to_number::string_to_number,
};
pub use kolo_ops::summary::{
    histogram::histogram_summary, image::image_summary, merge::merge_summary, scalar::scalar_summary,
    tensor::tensor_summary,
};
pub use kolo_ops::table::{
    access::{lookup_table_find, lookup_table_insert, lookup_table_size},
    make::{hash_table, mutable_hash_table},
};
