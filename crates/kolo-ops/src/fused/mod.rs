//! Ops that stand for several. The runtime makes them when it plans a step, where one kernel that does the work of many is
//! faster; no program asks for them. [`DENSE`] and [`DESCENT`] are for CPUs, all others for GPUs. Where such an op is
//! a form of another one, that one's GPU kernels are its own too.

use kolo_graph::{Effects, Gradient, OpDef};

use crate::cuda::FLOATS;
use crate::op::gpu_kernel;
use crate::{Cost, Gpu, Op};

pub(crate) mod apply_all;
mod dense;
mod descent;
pub(crate) mod map;
mod matmul;
pub mod program;

pub use apply_all::APPLY_ALL;
pub use dense::DENSE;
pub use descent::DESCENT;
pub use map::{MAP, MAP_AND_SUM};
pub use matmul::{APPLY_PRODUCT, MAT_MUL, MAT_MUL_ADD};

/// The ops of this area.
pub static OPS: &[&Op] = &[
    &APPLY_ALL,
    &APPLY_PRODUCT,
    &BIAS_RELU_POOL,
    &BIAS_RELU_POOL_GRAD,
    &CROSS_ENTROPY,
    &DENSE,
    &DESCENT,
    &LAYER_NORM_GRAD,
    &MAP,
    &MAP_AND_SUM,
    &MAT_MUL,
    &MAT_MUL_ADD,
    &MAX_POOL_GRAD_RELU,
    &SEGMENT,
    &SPARSE_CROSS_ENTROPY,
];

const MADE_LATE: Gradient = Gradient::Refused("it is made when a step is planned; differentiate before");

const fn fused(name: &'static str, signature: &'static str, cost: Cost) -> Op {
    Op { def: OpDef { name, signature, gradient: MADE_LATE, ..OpDef::BASE }, kernels: &[], gpu: Gpu::Unstated, cost }
}

/// `SoftmaxCrossEntropyWithLogits`, whose backprop is multiplied by the gradient of the loss at once.
pub static CROSS_ENTROPY: Op = fused(
    "_KoloFusedCrossEntropy",
    "(features:T, labels:T, weights:T) -> (loss:T, backprop:T) ; T:type",
    Cost::Elements,
)
.gpu(&[gpu_kernel("T", FLOATS, crate::nn::cross_entropy::gpu::dense)]);

/// `KoloLayerNormGrad`, and what is added to its first output.
pub static LAYER_NORM_GRAD: Op = fused(
    "_KoloFusedLayerNormGrad",
    "(dy:T, x:T, scale:T, plus:T) -> (dx:T, dscale:T, doffset:T) ; T:type, epsilon:float=9.99999974737875e-06",
    Cost::Elements,
)
.gpu(&[gpu_kernel("T", FLOATS, crate::nn::layer_norm::gpu::backward)]);

/// As [`CROSS_ENTROPY`], with class numbers for labels.
pub static SPARSE_CROSS_ENTROPY: Op = fused(
    "_KoloFusedSparseCrossEntropy",
    "(features:T, labels:Tlabels, weights:T) -> (loss:T, backprop:T) ; T:type, Tlabels:type",
    Cost::Elements,
)
.gpu(&[gpu_kernel("T", FLOATS, crate::nn::cross_entropy::gpu::sparse)]);

/// `MaxPoolGrad` of the output of a `Relu`, and then that one's gradient.
pub static MAX_POOL_GRAD_RELU: Op = fused(
    "_KoloFusedMaxPoolGradRelu",
    "(orig_input:T, orig_output:T, grad:T) -> (output:T) ; ksize:list(int)>=4, strides:list(int)>=4, \
     padding:string{SAME|VALID|EXPLICIT}, explicit_paddings:list(int)=[], data_format:string{NHWC|NCHW}=\"NHWC\", T:type",
    Cost::Elements,
)
.gpu(&[gpu_kernel("T", FLOATS, |ctx| crate::nn::pool::gpu::max_backward(ctx, true))]);

/// `BiasAdd`, `Relu` and `MaxPool`.
pub static BIAS_RELU_POOL: Op = fused(
    "_KoloFusedBiasReluPool",
    "(input:T, bias:T) -> (output:T) ; ksize:list(int)>=4, strides:list(int)>=4, \
     padding:string{SAME|VALID|EXPLICIT}, explicit_paddings:list(int)=[], data_format:string{NHWC|NCHW}=\"NHWC\", T:type",
    Cost::Elements,
)
.gpu(&[gpu_kernel("T", FLOATS, crate::nn::pool::gpu::biased_forward)]);

/// The gradients of [`BIAS_RELU_POOL`] with respect to its inputs.
pub static BIAS_RELU_POOL_GRAD: Op = fused(
    "_KoloFusedBiasReluPoolGrad",
    "(orig_input:T, bias:T, orig_output:T, grad:T) -> (output:T, bias_grad:T) ; ksize:list(int)>=4, \
     strides:list(int)>=4, padding:string{SAME|VALID|EXPLICIT}, explicit_paddings:list(int)=[], \
     data_format:string{NHWC|NCHW}=\"NHWC\", T:type",
    Cost::Elements,
)
.gpu(&[gpu_kernel("T", FLOATS, crate::nn::pool::gpu::biased_backward)]);

/// Many nodes that are captured together, as one node of a plan that cannot be captured whole. The executor runs it.
pub static SEGMENT: Op = Op {
    def: OpDef {
        stateful: true,
        effects: Effects::Outside,
        ..fused(
            "_KoloSegment",
            "(inputs:list(Tin)) -> (outputs:list(Tout)) ; Tin:list(type)>=0, Tout:list(type)>=0",
            Cost::Heavy,
        )
        .def
    },
    kernels: &[],
    gpu: Gpu::Never("the executor runs it"),
    cost: Cost::Heavy,
};
