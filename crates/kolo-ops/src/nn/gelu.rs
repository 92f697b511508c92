//! `KoloGelu` (Hendrycks and Gimpel, 2016): `x · Φ(x)`, where Φ is the normal distribution's function, in the usual
//! approximation by a hyperbolic tangent. An op of our own: TensorFlow composes it of eight, each a pass over memory.
//!
//! `(1 + tanh u) / 2` is `1 / (1 + exp(−2u))`, so one exponential is all it takes.

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

/// `x · Φ(x)`, approximated, elementwise.
#[track_caller]
pub fn gelu(x: Output<'_>) -> Output<'_> {
    x.graph().op("KoloGelu").input(x).out()
}

pub(crate) static GELU: Op = activation(
    "KoloGelu",
    "(features:T) -> (activations:T) ; T:type{half,bfloat16,float,double}",
    |op, dy| Ok(vec![Some(grad("KoloGeluGrad", first(dy)?, op.input(0)).into())]),
    cpu_kernels!(elementwise forward: f32, f64; f16, bf16),
)
.elementwise(Elementwise::new(
    "x0 / ((W)1 + exp((W)-1.5957691216057307 * x0 * ((W)1 + (W)0.044715 * x0 * x0)))",
    Elements::Floats,
))
.half(HalfSafety::Safe);
pub(crate) static GELU_GRAD: Op = {
    let op = backprop(
        "KoloGeluGrad",
        "(gradients:T, features:T) -> (backprops:T) ; T:type{half,bfloat16,float,double}",
        |_, _| Ok(Vec::new()),
        cpu_kernels!(elementwise backward: f32, f64; f16, bf16),
    )
    .elementwise(Elementwise::new("gelu_grad(x0, x1)", Elements::Floats).shapes(ShapesFit::Same))
    .half(HalfSafety::Safe);
    Op { def: OpDef { gradient: Gradient::Refused("no second derivative is defined for KoloGelu"), ..op.def }, ..op }
};

/// `2 · √(2/π)`, and what the cube counts.
const SLOPE: f64 = 1.595_769_121_605_730_7;
const CUBE: f64 = 0.044715;

/// `1 / (1 + exp(−2u))` with `u = √(2/π) · (x + 0.044715 · x³)`.
#[inline(always)]
fn gate<T: Float>(x: T) -> T {
    let one = T::of(1.0);
    one / (one + T::exponential(-(T::of(SLOPE) * x * (one + T::of(CUBE) * x * x))))
}

fn forward<T: Float>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    map::<T, T>(
        ctx,
        2.0,
        #[inline(always)]
        |x| x * gate::<T>(x),
    )
}

fn backward<T: Float>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    same_shapes(ctx)?;
    zip::<T, T>(
        ctx,
        3.0,
        #[inline(always)]
        |dy, x| {
            let one = T::of(1.0);
            let gate = gate::<T>(x);
            let slope = T::of(SLOPE) * (one + T::of(3.0 * CUBE) * x * x);
            dy * (gate + x * gate * (one - gate) * slope)
        },
    )
}

#[cfg(test)]
mod tests {
    use crate::testing::{check_op, wavy};

    #[test]
    fn values_are_tensorflows() {
        // tf.nn.gelu(x, approximate=True).
        check_op("KoloGelu").input([-2.0f32, -0.5, 0.0, 1.0, 3.0]).gives([
            -0.04540223f32,
            -0.154286,
            0.0,
            0.841192,
            2.9963627,
        ]);
        check_op("KoloGelu").input([-1000.0f32, 1000.0, f32::NAN]).gives([0.0f32, 1000.0, f32::NAN]);
    }

    #[test]
    fn gradients() {
        check_op("KoloGelu").input(wavy([2, 5], 1)).gradient();
        check_op("KoloGeluGrad").input([2.0f32, 3.0]).input([0.0f32, 1000.0]).gives([1.0f32, 3.0]);
    }
}
