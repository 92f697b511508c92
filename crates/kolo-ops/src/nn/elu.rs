//! `Elu`: exp(x) − 1 below 0 (Clevert et al., 2015). `Selu`: the same, scaled so that activations keep mean 0 and
//! variance 1 (Klambauer et al., 2017). Their gradients are computed from the outputs.

use half::{bf16, f16};
use kolo_core::Result;
use kolo_graph::{Elements, Elementwise, Grad, HalfSafety, IntoOutput, Operation, Output, ShapesFit};

use crate::KernelCtx;
use crate::math::binary::first;
use crate::math::elementwise::{map, zip};
use crate::nn::float::Float;
use crate::nn::relu::{activation, backprop, grad};
use crate::nn::same_shapes;
use crate::op::{Op, cpu_kernels};

/// `x` above 0 and `exp(x) − 1` below, elementwise.
#[track_caller]
pub fn elu(x: Output<'_>) -> Output<'_> {
    x.graph().op("Elu").input(x).out()
}

/// The scaled exponential linear unit, elementwise.
#[track_caller]
pub fn selu(x: Output<'_>) -> Output<'_> {
    x.graph().op("Selu").input(x).out()
}

const SCALE: f64 = 1.050_700_987_355_480_5;
const SCALE_ALPHA: f64 = 1.758_099_340_847_376_6;

pub(crate) static ELU: Op = activation(
    "Elu",
    "(features:T) -> (activations:T) ; T:type{half,bfloat16,float,double}",
    |op, dy| Ok(vec![Some(grad("EluGrad", first(dy)?, op.output(0)).into())]),
    cpu_kernels!(elementwise elu_kernel: f32, f64; f16, bf16),
)
.elementwise(Elementwise::new("x0 < (W)0 ? expm1(x0) : x0", Elements::Floats))
.half(HalfSafety::Safe);
pub(crate) static ELU_GRAD: Op = backprop(
    "EluGrad",
    "(gradients:T, outputs:T) -> (backprops:T) ; T:type{half,bfloat16,float,double}",
    |op, dy| second_order(op, "EluGrad", first(dy)?),
    cpu_kernels!(elementwise elu_grad: f32, f64; f16, bf16),
)
.elementwise(Elementwise::new("x1 < (W)0 ? x0 * (x1 + (W)1) : x0", Elements::Floats).shapes(ShapesFit::Same))
.half(HalfSafety::Safe);
pub(crate) static SELU: Op = activation(
    "Selu",
    "(features:T) -> (activations:T) ; T:type{half,bfloat16,float,double}",
    |op, dy| Ok(vec![Some(grad("SeluGrad", first(dy)?, op.output(0)).into())]),
    cpu_kernels!(elementwise selu_kernel: f32, f64; f16, bf16),
)
.elementwise(Elementwise::new(
    "x0 < (W)0 ? (W)1.7580993408473768599402175208123 * expm1(x0) : (W)1.0507009873554804934193349852946 * x0",
    Elements::Floats,
))
.half(HalfSafety::Safe);
pub(crate) static SELU_GRAD: Op = backprop(
    "SeluGrad",
    "(gradients:T, outputs:T) -> (backprops:T) ; T:type{half,bfloat16,float,double}",
    |op, dy| second_order(op, "SeluGrad", first(dy)?),
    cpu_kernels!(elementwise selu_grad: f32, f64; f16, bf16),
)
.elementwise(
    Elementwise::new(
        "x1 < (W)0 ? x0 * (x1 + (W)1.7580993408473768599402175208123) : x0 * (W)1.0507009873554804934193349852946",
        Elements::Floats,
    )
    .shapes(ShapesFit::Same),
)
.half(HalfSafety::Safe);

/// The backprop is `gradients · (outputs + c)` below 0 and does not depend on the outputs above.
fn second_order<'g>(op: Operation<'g>, name: &str, dy: Output<'g>) -> Result<Vec<Option<Grad<'g>>>> {
    let (gradients, outputs) = (op.input(0), op.input(1));
    let graph = op.graph();
    let zero = 0.0.into_output(graph, outputs.dtype());
    let below = graph.op("Less").input(outputs).input(zero).out();
    let below = graph.op("Cast").input(below).attr("DstT", dy.dtype()).out();
    Ok(vec![Some(grad(name, dy, outputs).into()), Some((dy * gradients * below).into())])
}

/// About what one element costs: an exponential.
const NS: f64 = 5.0;

fn elu_kernel<T: Float>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    map::<T, T>(ctx, NS, |x| if x < T::of(0.0) { T::exp_m1(x) } else { x })
}

fn elu_grad<T: Float>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    same_shapes(ctx)?;
    zip::<T, T>(
        ctx,
        0.3,
        #[inline(always)]
        |dy, y| {
            if y < T::of(0.0) { dy * (y + T::of(1.0)) } else { dy }
        },
    )
}

fn selu_kernel<T: Float>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    map::<T, T>(ctx, NS, |x| if x < T::of(0.0) { T::of(SCALE_ALPHA) * T::exp_m1(x) } else { T::of(SCALE) * x })
}

fn selu_grad<T: Float>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    same_shapes(ctx)?;
    zip::<T, T>(
        ctx,
        0.3,
        #[inline(always)]
        |dy, y| {
            if y < T::of(0.0) { dy * (y + T::of(SCALE_ALPHA)) } else { dy * T::of(SCALE) }
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
        let elu = [-0.95021296f32, -0.39346933, 0.0, 0.5, 7.0];
        let selu = [-1.6705687f32, -0.69175816, 0.0, 0.5253505, 7.354907];
        check_op("Elu").input(X).gives(elu);
        check_op("Selu").input(X).gives(selu);
        check_op("EluGrad").input(DY).input(elu).gives([0.049787045f32, 1.2130613, 3.0, 4.0, 5.0]);
        check_op("SeluGrad").input(DY).input(selu).gives([0.08753061f32, 2.1326823, 3.152103, 4.202804, 5.253505]);
        check_op("EluGrad").input(DY).input([1.0f32]).fails("not compatible");
    }

    #[test]
    fn gradients() {
        for op in ["Elu", "Selu"] {
            check_op(op).input(wavy([2, 5], 1)).gradient();
            check_op(&format!("{op}Grad")).input(wavy([7], 1)).input(wavy([7], 2)).gradient();
        }
    }
}
