//! The gradients of some elementwise functions as ops of their own, in terms of the result `y`: SqrtGrad, RsqrtGrad,
//! ReciprocalGrad, InvGrad, TanhGrad, SigmoidGrad. They are differentiable again.

use half::{bf16, f16};
use kolo_core::{Error, Result};
use kolo_graph::{
    Elements, Elementwise, Grad, Gradient, GradientFn, HalfSafety, OpDef, Operation, Output, ShapesFit, shape_fns,
};

use crate::math::binary::first;
use crate::math::elementwise::{expression_kernels, zip};
use crate::math::number::Real;
use crate::op::{Gpu, KernelDef, Op};
use crate::{Cost, KernelCtx};

/// `dy / 2y`.
pub(crate) static SQRT_GRAD: Op = gradient_op("SqrtGrad", SQRT_KERNELS, |op, dz| {
    let each = first(dz)? / op.input(0);
    both(-(each * op.output(0)), each * 0.5)
})
.elementwise(Elementwise::new("x1 * (W)0.5 / x0", Elements::Floats).shapes(ShapesFit::Same))
.half(HalfSafety::Wide);
/// `−dy · y³ / 2`.
pub(crate) static RSQRT_GRAD: Op = gradient_op("RsqrtGrad", RSQRT_KERNELS, |op, dz| {
    let (y, dy, dz) = (op.input(0), op.input(1), first(dz)?);
    both(dz * dy * (y * y * -1.5), again(op, dz))
})
.elementwise(Elementwise::new("x1 * (W)-0.5 * (x0 * x0 * x0)", Elements::Floats).shapes(ShapesFit::Same))
.half(HalfSafety::Wide);
/// `−dy · y²`.
pub(crate) static RECIPROCAL_GRAD: Op = gradient_op("ReciprocalGrad", RECIPROCAL_KERNELS, reciprocal_gradient)
    .elementwise(Elementwise::new("-x1 * (x0 * x0)", Elements::Floats).shapes(ShapesFit::Same))
    .half(HalfSafety::Wide);
/// `−dy · y²`.
pub(crate) static INV_GRAD: Op = gradient_op("InvGrad", RECIPROCAL_KERNELS, reciprocal_gradient)
    .elementwise(Elementwise::new("-x1 * (x0 * x0)", Elements::Floats).shapes(ShapesFit::Same))
    .half(HalfSafety::Wide);
/// `dy · (1 − y²)`.
pub(crate) static TANH_GRAD: Op = gradient_op("TanhGrad", TANH_KERNELS, |op, dz| {
    let (y, dy, dz) = (op.input(0), op.input(1), first(dz)?);
    both(dz * dy * (y * -2.0), again(op, dz))
})
.elementwise(Elementwise::new("x1 * ((W)1 - x0 * x0)", Elements::Floats).shapes(ShapesFit::Same))
.half(HalfSafety::Safe);
/// `dy · y · (1 − y)`.
pub(crate) static SIGMOID_GRAD: Op = gradient_op("SigmoidGrad", SIGMOID_KERNELS, |op, dz| {
    let (y, dy, dz) = (op.input(0), op.input(1), first(dz)?);
    both(dz * dy * (1.0 - y * 2.0), again(op, dz))
})
.elementwise(Elementwise::new("x1 * x0 * ((W)1 - x0)", Elements::Floats).shapes(ShapesFit::Same))
.half(HalfSafety::Safe);

const fn gradient_op(name: &'static str, kernels: &'static [KernelDef], gradient: GradientFn) -> Op {
    Op {
        def: OpDef {
            name,
            signature: "(y:T, dy:T) -> (z:T) ; T:type{bfloat16,half,float,double,complex64,complex128}",
            shape: shape_fns::all_same,
            gradient: Gradient::Rule(gradient),
            ..OpDef::BASE
        },
        kernels,
        gpu: Gpu::Unstated,
        cost: Cost::Elements,
    }
}

fn reciprocal_gradient<'g>(op: Operation<'g>, dz: &[Option<Output<'g>>]) -> Result<Vec<Option<Grad<'g>>>> {
    let (y, dy, dz) = (op.input(0), op.input(1), first(dz)?);
    both(dz * dy * (y * -2.0), again(op, dz))
}

/// The op is linear in `dy`, so with respect to it the gradient is the op itself.
fn again<'g>(op: Operation<'g>, dz: Output<'g>) -> Output<'g> {
    op.graph().op(op.op()).input(op.input(0)).input(dz).out()
}

fn both<'g>(first: Output<'g>, second: Output<'g>) -> Result<Vec<Option<Grad<'g>>>> {
    Ok(vec![Some(first.into()), Some(second.into())])
}

/// As [`zip`], for two inputs of the same shape.
fn zip_same<T: Real>(ctx: &mut KernelCtx<'_>, ns: f64, f: impl Fn(T, T) -> T + Sync + Copy) -> Result<()> {
    let (a, b) = (ctx.input(0)?.shape(), ctx.input(1)?.shape());
    if a != b {
        return Err(Error::invalid_argument(format!("y has shape {a}, dy has shape {b}")));
    }
    zip(ctx, ns, f)
}

expression_kernels! {
    SQRT_KERNELS, sqrt_kernel: Real, zip_same(0.4), |y, dy| dy * T::from_f64(0.5) / y, (f32, f64; f16, bf16);
    RSQRT_KERNELS, rsqrt_kernel: Real, zip_same(0.4), |y, dy| dy * T::from_f64(-0.5) * (y * y * y), (f32, f64; f16, bf16);
    RECIPROCAL_KERNELS, reciprocal_kernel: Real, zip_same(0.4), |y, dy| dy * T::from_f64(-1.0) * (y * y), (f32, f64; f16, bf16);
    TANH_KERNELS, tanh_kernel: Real, zip_same(0.4), |y, dy| dy * (T::from_f64(1.0) - y * y), (f32, f64; f16, bf16);
    SIGMOID_KERNELS, sigmoid_kernel: Real, zip_same(0.4), |y, dy| dy * y * (T::from_f64(1.0) - y), (f32, f64; f16, bf16);
}

#[cfg(test)]
mod tests {
    use half::f16;

    use crate::testing::{check_op, wavy};

    #[test]
    fn values() {
        check_op("SqrtGrad").input([2.0f32, 0.5]).input([1.0f32, 3.0]).gives([0.25f32, 3.0]);
        check_op("RsqrtGrad").input([2.0f32]).input([3.0f32]).gives([-12.0f32]);
        check_op("ReciprocalGrad").input([3.0f64]).input([2.0f64]).gives([-18.0f64]);
        check_op("InvGrad").input([3.0f32]).input([2.0f32]).gives([-18.0f32]);
        check_op("TanhGrad").input([0.5f32]).input([4.0f32]).gives([3.0f32]);
        check_op("SigmoidGrad").input([0.25f32]).input([4.0f32]).gives([0.75f32]);
        check_op("SigmoidGrad").input(f16::from_f32(0.25)).input(f16::from_f32(4.0)).gives(f16::from_f32(0.75));
        check_op("TanhGrad").input([0.5f32]).input([1.0f32, 2.0]).fails("not compatible");
    }

    #[test]
    fn they_are_differentiable_again() {
        for op in ["SqrtGrad", "RsqrtGrad", "ReciprocalGrad", "InvGrad", "TanhGrad", "SigmoidGrad"] {
            check_op(op).input(wavy([4], 1)).input(wavy([4], 2)).gradient();
        }
    }
}
