//! Layers of neural networks: activations, losses, convolutions, pooling, normalisation.

use kolo_core::{Error, Result};

use crate::{KernelCtx, Op};

pub mod attention;
pub mod avg_pool;
pub mod batch_norm;
pub mod batch_norm_global;
pub mod bias_add;
pub(crate) mod channels;
pub mod class_loss;
pub mod conv2d;
pub mod conv3d;
pub mod cross_entropy;
pub mod depthwise_conv2d;
pub mod dropout;
pub mod elu;
pub mod fake_quant;
pub(crate) mod float;
pub mod fused;
pub mod gelu;
pub mod layer_norm;
pub(crate) mod layout;
pub mod lrn;
pub mod max_pool;
pub(crate) mod pool;
pub mod relu;
pub mod resize;
pub(crate) mod rows;
pub mod softmax;
pub mod softplus;
pub mod sparse_cross_entropy;
pub(crate) mod window;

/// The ops of this area.
pub static OPS: &[&Op] = &[
    &attention::ATTENTION,
    &attention::ATTENTION_GRAD,
    &avg_pool::AVG_POOL,
    &avg_pool::AVG_POOL_GRAD,
    &batch_norm_global::BATCH_NORM_WITH_GLOBAL_NORMALIZATION,
    &batch_norm_global::BATCH_NORM_WITH_GLOBAL_NORMALIZATION_GRAD,
    &batch_norm::FUSED_BATCH_NORM,
    &batch_norm::FUSED_BATCH_NORM_GRAD,
    &batch_norm::FUSED_BATCH_NORM_GRAD_V2,
    &batch_norm::FUSED_BATCH_NORM_GRAD_V3,
    &batch_norm::FUSED_BATCH_NORM_V2,
    &batch_norm::FUSED_BATCH_NORM_V3,
    &bias_add::BIAS_ADD,
    &bias_add::BIAS_ADD_GRAD,
    &bias_add::BIAS_ADD_V1,
    &class_loss::CLASS_LOSS,
    &class_loss::CLASS_LOSS_GRAD,
    &conv2d::CONV2D,
    &conv3d::CONV3D,
    &conv3d::CONV3D_BACKPROP_FILTER_V2,
    &conv3d::CONV3D_BACKPROP_INPUT_V2,
    &conv2d::CONV2D_BACKPROP_FILTER,
    &conv2d::CONV2D_BACKPROP_INPUT,
    &cross_entropy::SOFTMAX_CROSS_ENTROPY_WITH_LOGITS,
    &depthwise_conv2d::DEPTHWISE_CONV2D_NATIVE,
    &depthwise_conv2d::DEPTHWISE_CONV2D_NATIVE_BACKPROP_FILTER,
    &depthwise_conv2d::DEPTHWISE_CONV2D_NATIVE_BACKPROP_INPUT,
    &elu::ELU,
    &elu::ELU_GRAD,
    &elu::SELU,
    &elu::SELU_GRAD,
    &fused::FUSED_BATCH_NORM_EX,
    &fused::FUSED_CONV2D,
    &fused::FUSED_MAT_MUL,
    &fused::UNARY_OPS_COMPOSITION,
    &fake_quant::FAKE_QUANT_WITH_MIN_MAX_ARGS,
    &fake_quant::FAKE_QUANT_WITH_MIN_MAX_ARGS_GRADIENT,
    &fake_quant::FAKE_QUANT_WITH_MIN_MAX_VARS,
    &fake_quant::FAKE_QUANT_WITH_MIN_MAX_VARS_GRADIENT,
    &fake_quant::FAKE_QUANT_WITH_MIN_MAX_VARS_PER_CHANNEL,
    &fake_quant::FAKE_QUANT_WITH_MIN_MAX_VARS_PER_CHANNEL_GRADIENT,
    &gelu::GELU,
    &gelu::GELU_GRAD,
    &layer_norm::LAYER_NORM,
    &layer_norm::LAYER_NORM_GRAD,
    &lrn::LRN,
    &lrn::LRN_GRAD,
    &max_pool::MAX_POOL,
    &max_pool::MAX_POOL_GRAD,
    &max_pool::MAX_POOL_GRAD_V2,
    &max_pool::MAX_POOL_V2,
    &relu::LEAKY_RELU,
    &relu::LEAKY_RELU_GRAD,
    &relu::RELU,
    &relu::RELU6,
    &relu::RELU6_GRAD,
    &relu::RELU_GRAD,
    &resize::RESIZE_BILINEAR,
    &resize::RESIZE_BILINEAR_GRAD,
    &resize::RESIZE_NEAREST_NEIGHBOR,
    &resize::RESIZE_NEAREST_NEIGHBOR_GRAD,
    &softmax::LOG_SOFTMAX,
    &softmax::SOFTMAX,
    &softplus::SOFTPLUS,
    &softplus::SOFTPLUS_GRAD,
    &softplus::SOFTSIGN,
    &softplus::SOFTSIGN_GRAD,
    &sparse_cross_entropy::SPARSE_SOFTMAX_CROSS_ENTROPY_WITH_LOGITS,
];

/// An error unless inputs 0 and 1 have one shape.
pub(crate) fn same_shapes(ctx: &KernelCtx<'_>) -> Result<()> {
    let (a, b) = (ctx.input(0)?.shape(), ctx.input(1)?.shape());
    match a == b {
        true => Ok(()),
        false => Err(Error::invalid_argument(format!("shapes {a} and {b} are not compatible"))),
    }
}
