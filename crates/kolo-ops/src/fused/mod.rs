//! Ops that stand for several. The runtime makes them when it plans a step, where one kernel that does the work of many is
//! faster; no program asks for them. [`DENSE`] and [`DESCENT`] are for CPUs, all others for GPUs (`cuda/fused.rs` and its
//! neighbours).

use kolo_core::DType;
use kolo_graph::{Effects, Gradient, OpDef};

use crate::cuda::FLOATS;
use crate::op::{KernelMaker, gpu_kernel, gpu_made};
use crate::{Cost, Gpu, Op};

mod dense;
mod descent;
pub mod program;

pub use dense::DENSE;
pub use descent::DESCENT;

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

/// A tree of elementwise ops; see [`program::Program`].
pub static MAP: Op = fused(
    "_KoloFusedMap",
    "(inputs:list(Tin)) -> (output:T) ; Tin:list(type)>=1, T:type, program:string",
    Cost::Elements,
)
.gpu(&[gpu_made("", &[], KernelMaker::Object(crate::cuda::fused::FusedMap::make))]);

/// A tree of elementwise ops, and the sums of its value over all dimensions but the last.
pub static MAP_AND_SUM: Op = fused(
    "_KoloFusedMapAndSum",
    "(inputs:list(Tin)) -> (output:T, sums:T) ; Tin:list(type)>=1, T:type, program:string",
    Cost::Elements,
)
.gpu(&[gpu_made("", &[], KernelMaker::Object(crate::cuda::fused::FusedMapAndSum::make))]);

/// `MatMul`, `BiasAdd`, and `Relu` if there is one.
pub static MAT_MUL: Op = fused(
    "_KoloFusedMatMul",
    "(a:T, b:T, bias:T) -> (product:T) ; transpose_a:bool=false, transpose_b:bool=false, relu:bool=false, T:type",
    Cost::Heavy,
)
.gpu(&[gpu_kernel("T", FLOATS, crate::cuda::matmul::fused_matmul)]);

/// `MatMul`, `BiasAdd` if there is one, and the sum with something of the product's size: a residual connection. `Relu` if there
/// is one. The sum has the shape of `plus`, which may have the product's elements in other dimensions.
pub static MAT_MUL_ADD: Op = fused(
    "_KoloFusedMatMulAdd",
    "(a:T, b:T, plus:T, bias:N*T) -> (sum:T) ; transpose_a:bool=false, transpose_b:bool=false, relu:bool=false, \
     N:int>=0, T:type",
    Cost::Heavy,
)
.gpu(&[gpu_kernel("T", FLOATS, crate::cuda::matmul::matmul_and_sum)]);

/// `SoftmaxCrossEntropyWithLogits`, whose backprop is multiplied by the gradient of the loss at once.
pub static CROSS_ENTROPY: Op = fused(
    "_KoloFusedCrossEntropy",
    "(features:T, labels:T, weights:T) -> (loss:T, backprop:T) ; T:type",
    Cost::Elements,
)
.gpu(&[gpu_kernel("T", FLOATS, crate::cuda::rows::cross_entropy)]);

/// `KoloLayerNormGrad`, and what is added to its first output.
pub static LAYER_NORM_GRAD: Op = fused(
    "_KoloFusedLayerNormGrad",
    "(dy:T, x:T, scale:T, plus:T) -> (dx:T, dscale:T, doffset:T) ; T:type, epsilon:float=9.99999974737875e-06",
    Cost::Elements,
)
.gpu(&[gpu_kernel("T", FLOATS, crate::cuda::layer_norm::backward)]);

/// As [`CROSS_ENTROPY`], with class numbers for labels.
pub static SPARSE_CROSS_ENTROPY: Op = fused(
    "_KoloFusedSparseCrossEntropy",
    "(features:T, labels:Tlabels, weights:T) -> (loss:T, backprop:T) ; T:type, Tlabels:type",
    Cost::Elements,
)
.gpu(&[gpu_kernel("T", FLOATS, crate::cuda::rows::sparse_cross_entropy)]);

/// `MaxPoolGrad` of the output of a `Relu`, and then that one's gradient.
pub static MAX_POOL_GRAD_RELU: Op = fused(
    "_KoloFusedMaxPoolGradRelu",
    "(orig_input:T, orig_output:T, grad:T) -> (output:T) ; ksize:list(int)>=4, strides:list(int)>=4, \
     padding:string{SAME|VALID|EXPLICIT}, explicit_paddings:list(int)=[], data_format:string{NHWC|NCHW}=\"NHWC\", T:type",
    Cost::Elements,
)
.gpu(&[gpu_kernel("T", FLOATS, |ctx| crate::cuda::pool::max_backward(ctx, true))]);

/// `BiasAdd`, `Relu` and `MaxPool`.
pub static BIAS_RELU_POOL: Op = fused(
    "_KoloFusedBiasReluPool",
    "(input:T, bias:T) -> (output:T) ; ksize:list(int)>=4, strides:list(int)>=4, \
     padding:string{SAME|VALID|EXPLICIT}, explicit_paddings:list(int)=[], data_format:string{NHWC|NCHW}=\"NHWC\", T:type",
    Cost::Elements,
)
.gpu(&[gpu_kernel("T", FLOATS, crate::cuda::pool::biased_forward)]);

/// The gradients of [`BIAS_RELU_POOL`] with respect to its inputs.
pub static BIAS_RELU_POOL_GRAD: Op = fused(
    "_KoloFusedBiasReluPoolGrad",
    "(orig_input:T, bias:T, orig_output:T, grad:T) -> (output:T, bias_grad:T) ; ksize:list(int)>=4, \
     strides:list(int)>=4, padding:string{SAME|VALID|EXPLICIT}, explicit_paddings:list(int)=[], \
     data_format:string{NHWC|NCHW}=\"NHWC\", T:type",
    Cost::Elements,
)
.gpu(&[gpu_kernel("T", FLOATS, crate::cuda::pool::biased_backward)]);

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

/// `ResourceApplyGradientDescent` with a constant rate along a `MatMul`.
pub static APPLY_PRODUCT: Op = fused(
    "_KoloApplyProduct",
    "(var:resource, a:T, b:T) -> () ; transpose_a:bool=false, transpose_b:bool=false, rate:float, T:type",
    Cost::Heavy,
)
.effects(Effects::Writes)
.gpu(&[gpu_kernel("T", &[DType::F32], crate::cuda::matmul::descend)]);

/// One optimizer's dense updates of many variables: all handles (of each variable and then of its slots), the scalars that all
/// of them share, and all gradients, which may be of a narrower type. `rule` is the op of a single update, `flag` its boolean attribute.
pub static APPLY_ALL: Op = fused(
    "_KoloApplyAll",
    "(handles:M*resource, scalars:S*T, grads:N*Tgrad) -> () ; \
     rule:string, flag:bool=false, M:int>=1, S:int>=1, N:int>=1, T:type, Tgrad:type",
    Cost::Elements,
)
.effects(Effects::Writes)
.gpu(&[gpu_made("T", FLOATS, KernelMaker::Object(crate::cuda::apply_all::ApplyAll::make))]);
