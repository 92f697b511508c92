//! `Softplus`: log(1 + exp(x)). `Softsign`: x / (1 + |x|).

use half::{bf16, f16};
use kolo_core::Result;
use kolo_graph::{Elements, Elementwise, Gradient, HalfSafety, OpDef, Output, ShapesFit};

use crate::KernelCtx;
use crate::math::binary::first;
use crate::math::elementwise::{map, zip};
use crate::nn::float::Float;
use crate::nn::relu::{activation, backprop, grad};
use crate::nn::same_shapes;
use crate::op::{Op, cpu_kernels};

/// `log(1 + exp(x))`, elementwise.
#[track_caller]
pub fn softplus(x: Output<'_>) -> Output<'_> {
    x.graph().op("Softplus").input(x).out()
}

/// `x / (1 + |x|)`, elementwise.
#[track_caller]
pub fn softsign(x: Output<'_>) -> Output<'_> {
    x.graph().op("Softsign").input(x).out()
}

pub(crate) static SOFTPLUS: Op = activation(
    "Softplus",
    "(features:T) -> (activations:T) ; T:type{half,bfloat16,float,double}",
    |op, dy| Ok(vec![Some(grad("SoftplusGrad", first(dy)?, op.input(0)).into())]),
    cpu_kernels!(elementwise softplus_kernel: f32, f64; f16, bf16),
)
.elementwise(Elementwise::new("(x0 < (W)0 ? (W)0 : x0) + log1p(exp(-fabs(x0)))", Elements::Floats))
.half(HalfSafety::Safe);
pub(crate) static SOFTPLUS_GRAD: Op = backprop(
    "SoftplusGrad",
    "(gradients:T, features:T) -> (backprops:T) ; T:type{half,bfloat16,float,double}",
    |op, dy| {
        let (gradients, x, dy) = (op.input(0), op.input(1), first(dy)?);
        // The derivative of 1 / (1 + exp(-x)) is 1 / (exp(-x) + 2 + exp(x)).
        let exp = |x| op.graph().op("Exp").input(x).out();
        let curve = dy * gradients / (exp(-x) + 2.0 + exp(x));
        Ok(vec![Some(grad("SoftplusGrad", dy, x).into()), Some(curve.into())])
    },
    cpu_kernels!(elementwise softplus_grad: f32, f64; f16, bf16),
)
.elementwise(Elementwise::new("x0 / (exp(-x1) + (W)1)", Elements::Floats).shapes(ShapesFit::Same))
.half(HalfSafety::Safe);
pub(crate) static SOFTSIGN: Op = activation(
    "Softsign",
    "(features:T) -> (activations:T) ; T:type{half,bfloat16,float,double}",
    |op, dy| Ok(vec![Some(grad("SoftsignGrad", first(dy)?, op.input(0)).into())]),
    cpu_kernels!(elementwise softsign_kernel: f32, f64; f16, bf16),
)
.elementwise(Elementwise::new("x0 / ((W)1 + fabs(x0))", Elements::Floats))
.half(HalfSafety::Safe);
pub(crate) static SOFTSIGN_GRAD: Op = {
    let op = backprop(
        "SoftsignGrad",
        "(gradients:T, features:T) -> (backprops:T) ; T:type{half,bfloat16,float,double}",
        |_, _| Ok(Vec::new()),
        cpu_kernels!(elementwise softsign_grad: f32, f64; f16, bf16),
    )
    .elementwise(
        Elementwise::new("x0 / (((W)1 + fabs(x1)) * ((W)1 + fabs(x1)))", Elements::Floats).shapes(ShapesFit::Same),
    )
    .half(HalfSafety::Safe);
    Op { def: OpDef { gradient: Gradient::Refused("no second derivative is defined for Softsign"), ..op.def }, ..op }
};

fn softplus_kernel<T: Float>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    // max(x, 0) + log(1 + exp(−|x|)): neither end overflows.
    map::<T, T>(ctx, 10.0, |x| {
        let above = if x < T::of(0.0) { T::of(0.0) } else { x };
        above + T::ln_1p(T::exponential(-T::abs(x)))
    })
}

fn softplus_grad<T: Float>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    same_shapes(ctx)?;
    zip::<T, T>(
        ctx,
        5.0,
        #[inline(always)]
        |dy, x| dy / (T::exponential(-x) + T::of(1.0)),
    )
}

fn softsign_kernel<T: Float>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    map::<T, T>(
        ctx,
        0.5,
        #[inline(always)]
        |x| x / (T::of(1.0) + T::abs(x)),
    )
}

fn softsign_grad<T: Float>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    same_shapes(ctx)?;
    zip::<T, T>(
        ctx,
        0.5,
        #[inline(always)]
        |dy, x| {
            let below = T::of(1.0) + T::abs(x);
            dy / (below * below)
        },
    )
}

#[cfg(test)]
mod tests {
    use crate::testing::{check_op, wavy};

    const X: [f32; 5] = [-3.0, -0.5, 0.0, 0.5, 7.0];
    const DY: [f32; 5] = [1.0, 2.0, 3.0, 4.0, 5.0];

    #[test]
    fn values_are_tensorflows() {
        check_op("Softplus").input(X).gives([0.048587352f32, 0.474077, std::f32::consts::LN_2, 0.974077, 7.0009117]);
        check_op("Softplus").input([-200.0f32, 200.0, f32::NAN]).gives([0.0f32, 200.0, f32::NAN]);
        check_op("Softsign").input(X).gives([-0.75f32, -0.33333334, 0.0, 0.33333334, 0.875]);
        check_op("SoftplusGrad").input(DY).input(X).gives([0.047425874f32, 0.75508136, 1.5, 2.4898374, 4.995445]);
        check_op("SoftsignGrad").input(DY).input(X).gives([0.0625f32, 0.8888889, 3.0, 1.7777778, 0.078125]);
    }

    #[test]
    fn gradients() {
        check_op("Softplus").input(wavy([2, 5], 1)).gradient();
        check_op("Softsign").input(wavy([2, 5], 1)).gradient();
        check_op("SoftplusGrad").input(wavy([7], 1)).input(wavy([7], 2)).gradient();
    }
}
