//! `Relu`: max(x, 0). `Relu6`: the same, at most 6. `LeakyRelu`: alpha · x below 0. And what their gradients are made of.

use half::{bf16, f16};
use kolo_core::Result;
use kolo_graph::{
    Elements, Elementwise, Grad, Gradient, GradientFn, HalfSafety, OpDef, Operation, Output, ShapesFit, shape_fns,
};

use crate::math::binary::first;
use crate::math::elementwise::{map, parameter, zip};
use crate::math::number::Number;
use crate::nn::same_shapes;
use crate::op::{Gpu, KernelDef, Op, cpu_kernels};
use crate::{Cost, KernelCtx};

/// `max(x, 0)`, elementwise.
#[track_caller]
pub fn relu(x: Output<'_>) -> Output<'_> {
    x.graph().op("Relu").input(x).out()
}

/// `min(max(x, 0), 6)`, elementwise.
#[track_caller]
pub fn relu6(x: Output<'_>) -> Output<'_> {
    x.graph().op("Relu6").input(x).out()
}

/// `x` above 0 and `alpha · x` below, elementwise.
#[track_caller]
pub fn leaky_relu(x: Output<'_>, alpha: f32) -> Output<'_> {
    x.graph().op("LeakyRelu").input(x).attr("alpha", alpha).out()
}

macro_rules! real_numbers {
    () => {
        "T:type{float,double,int32,uint8,int16,int8,int64,bfloat16,uint16,half,uint32,uint64}"
    };
}

pub(crate) static RELU: Op = activation(
    "Relu",
    "(features:T) -> (activations:T) ; T:type{float,double,int32,uint8,int16,int8,int64,bfloat16,uint16,half,uint32,\
     uint64,qint8}",
    |op, dy| one(grad("ReluGrad", first(dy)?, op.output(0))),
    cpu_kernels!(elementwise relu_kernel: f32, f64, i32, i64, u64; f16, bf16, i8, i16, u8, u16, u32),
)
.elementwise(Elementwise::new("x0 < (W)0 ? (W)0 : x0", Elements::Numbers))
.half(HalfSafety::Neutral);
pub(crate) static RELU_GRAD: Op = backprop(
    "ReluGrad",
    concat!("(gradients:T, features:T) -> (backprops:T) ; ", real_numbers!()),
    |op, dy| one(grad("ReluGrad", first(dy)?, op.input(1))),
    cpu_kernels!(elementwise relu_grad: f32, f64, i32, i64, u64; f16, bf16, i8, i16, u8, u16, u32),
)
.elementwise(Elementwise::new("x1 > (W)0 ? x0 : (W)0", Elements::Numbers).shapes(ShapesFit::Same))
.half(HalfSafety::Neutral);
pub(crate) static RELU6: Op = activation(
    "Relu6",
    concat!("(features:T) -> (activations:T) ; ", real_numbers!()),
    |op, dy| one(grad("Relu6Grad", first(dy)?, op.output(0))),
    cpu_kernels!(elementwise relu6_kernel: f32, f64, i32, i64, u64; f16, bf16, i8, i16, u8, u16, u32),
)
.elementwise(Elementwise::new("x0 < (W)0 ? (W)0 : (x0 > (W)6 ? (W)6 : x0)", Elements::Numbers))
.half(HalfSafety::Neutral);
pub(crate) static RELU6_GRAD: Op = backprop(
    "Relu6Grad",
    concat!("(gradients:T, features:T) -> (backprops:T) ; ", real_numbers!()),
    |op, dy| one(grad("Relu6Grad", first(dy)?, op.input(1))),
    cpu_kernels!(elementwise relu6_grad: f32, f64, i32, i64, u64; f16, bf16, i8, i16, u8, u16, u32),
)
.elementwise(Elementwise::new("(x1 > (W)0 && x1 < (W)6) ? x0 : (W)0", Elements::Numbers).shapes(ShapesFit::Same))
.half(HalfSafety::Neutral);
pub(crate) static LEAKY_RELU: Op = activation(
    "LeakyRelu",
    "(features:T) -> (activations:T) ; alpha:float=0.20000000298023224, T:type{half,bfloat16,float,double}=float",
    |op, dy| one(leaky_grad(op, first(dy)?, op.input(0))),
    cpu_kernels!(elementwise leaky_relu_kernel: f32, f64; f16, bf16),
)
.elementwise(Elementwise::new("x0 > (W)0 ? x0 : (W)p0 * x0", Elements::Floats).parameter("alpha"))
.half(HalfSafety::Safe);
pub(crate) static LEAKY_RELU_GRAD: Op = backprop(
    "LeakyReluGrad",
    "(gradients:T, features:T) -> (backprops:T) ; alpha:float=0.20000000298023224, \
     T:type{half,bfloat16,float,double}=float",
    |op, dy| one(leaky_grad(op, first(dy)?, op.input(1))),
    cpu_kernels!(elementwise leaky_relu_grad: f32, f64; f16, bf16),
)
.elementwise(
    Elementwise::new("x1 > (W)0 ? x0 : (W)p0 * x0", Elements::Floats).shapes(ShapesFit::Same).parameter("alpha"),
)
.half(HalfSafety::Safe);

/// An elementwise op with a gradient rule.
pub(crate) const fn activation(
    name: &'static str,
    signature: &'static str,
    gradient: GradientFn,
    kernels: &'static [KernelDef],
) -> Op {
    Op {
        def: OpDef {
            name,
            signature,
            shape: shape_fns::same_as_input_0,
            gradient: Gradient::Rule(gradient),
            ..OpDef::BASE
        },
        kernels,
        gpu: Gpu::Unstated,
        cost: Cost::Elements,
    }
}

/// The op that an activation's gradient is: of the gradient and of the activation's input or output.
pub(crate) const fn backprop(
    name: &'static str,
    signature: &'static str,
    gradient: GradientFn,
    kernels: &'static [KernelDef],
) -> Op {
    let op = activation(name, signature, gradient, kernels);
    Op { def: OpDef { shape: shape_fns::all_same, ..op.def }, ..op }
}

/// `op(dy, x)`.
#[track_caller]
pub(crate) fn grad<'g>(op: &str, dy: Output<'g>, x: Output<'g>) -> Output<'g> {
    dy.graph().op(op).input(dy).input(x).out()
}

fn leaky_grad<'g>(op: Operation<'g>, dy: Output<'g>, x: Output<'g>) -> Output<'g> {
    let alpha = op.attrs(|attrs| attrs.float("alpha")).unwrap_or(0.2);
    op.graph().op("LeakyReluGrad").input(dy).input(x).attr("alpha", alpha).out()
}

/// The gradient of input 0 alone: the others only choose a side, so theirs is zero almost everywhere.
fn one(dx: Output<'_>) -> Result<Vec<Option<Grad<'_>>>> {
    Ok(vec![Some(dx.into())])
}

/// About what one element costs; memory-bound loops.
const NS: f64 = 0.3;

fn relu_kernel<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    // Written so that NaN stays NaN.
    map::<T, T>(
        ctx,
        NS,
        #[inline(always)]
        |x| if x < T::ZERO { T::ZERO } else { x },
    )
}

fn relu_grad<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    same_shapes(ctx)?;
    zip::<T, T>(
        ctx,
        NS,
        #[inline(always)]
        |dy, x| if x > T::ZERO { dy } else { T::ZERO },
    )
}

fn relu6_kernel<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let six = T::from_count(6);
    map::<T, T>(
        ctx,
        NS,
        #[inline(always)]
        move |x| {
            let x = if x < T::ZERO { T::ZERO } else { x };
            if x > six { six } else { x }
        },
    )
}

fn relu6_grad<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    same_shapes(ctx)?;
    let six = T::from_count(6);
    zip::<T, T>(
        ctx,
        NS,
        #[inline(always)]
        move |dy, x| if x > T::ZERO && x < six { dy } else { T::ZERO },
    )
}

/// Alpha as a number of the values' own type, whatever it is computed in.
fn alpha<T: Number>(ctx: &KernelCtx<'_>) -> Result<T> {
    let alpha = parameter(ctx.attrs(), "alpha")?;
    Ok(T::from_f64(f64::from(alpha)))
}

fn leaky_relu_kernel<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let alpha = alpha::<T>(ctx)?;
    map::<T, T>(
        ctx,
        NS,
        #[inline(always)]
        move |x| if x > T::ZERO { x } else { x.mul(alpha) },
    )
}

fn leaky_relu_grad<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    same_shapes(ctx)?;
    let alpha = alpha::<T>(ctx)?;
    zip::<T, T>(
        ctx,
        NS,
        #[inline(always)]
        move |dy, x| if x > T::ZERO { dy } else { dy.mul(alpha) },
    )
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::testing::{check_op, wavy};

    const X: [f32; 5] = [-3.0, -0.5, 0.0, 0.5, 7.0];
    const DY: [f32; 5] = [1.0, 2.0, 3.0, 4.0, 5.0];

    /// In halves, alpha is one of them, too.
    #[test]
    fn alpha_is_rounded_to_the_type_of_the_values() {
        use half::{bf16, f16};
        let x = [-3.0f32, -1.0, -7.0, 2.0];
        let (small, tiny) = (x.map(f16::from_f32), x.map(bf16::from_f32));
        check_op("LeakyRelu").input(small).gives([-0.599_609_4f32, -0.199_951_17, -1.399_414, 2.0].map(f16::from_f32));
        check_op("LeakyRelu").input(tiny).gives([-0.601_562_5f32, -0.200_195_3, -1.398_437_5, 2.0].map(bf16::from_f32));
        let dy = [1.0f32, 3.0, 7.0, 5.0].map(bf16::from_f32);
        let dx = [0.200_195_3f32, 0.601_562_5, 1.398_437_5, 5.0].map(bf16::from_f32);
        check_op("LeakyReluGrad").input(dy).input(tiny).gives(dx);
    }

    #[test]
    fn values() {
        check_op("Relu").input(X).gives([0.0f32, 0.0, 0.0, 0.5, 7.0]);
        check_op("Relu").input([f32::NAN, -1.0]).gives([f32::NAN, 0.0]);
        check_op("Relu").input([-3i32, 4]).gives([0i32, 4]);
        check_op("Relu").input([3u8, 4]).gives([3u8, 4]);
        check_op("Relu").input(Tensor::vector::<f32>(vec![])).gives(Tensor::vector::<f32>(vec![]));
        check_op("Relu6").input(X).gives([0.0f32, 0.0, 0.0, 0.5, 6.0]);
        check_op("LeakyRelu").input(X).gives([-0.6f32, -0.1, 0.0, 0.5, 7.0]);
        check_op("LeakyRelu").attr("alpha", 0.5f32).input(X).gives([-1.5f32, -0.25, 0.0, 0.5, 7.0]);
        check_op("ReluGrad").input(DY).input(X).gives([0.0f32, 0.0, 0.0, 4.0, 5.0]);
        check_op("Relu6Grad").input(DY).input(X).gives([0.0f32, 0.0, 0.0, 4.0, 0.0]);
        check_op("LeakyReluGrad").input(DY).input(X).gives([0.2f32, 0.4, 0.6, 4.0, 5.0]);
        check_op("ReluGrad").input(DY).input([1.0f32]).fails("not compatible");
    }

    #[test]
    fn gradients() {
        for op in ["Relu", "Relu6", "LeakyRelu"] {
            check_op(op).input(wavy([2, 5], 1)).gradient();
        }
        check_op("LeakyRelu").attr("alpha", 0.7f32).input(wavy([2, 5], 1)).gradient();
        for op in ["ReluGrad", "Relu6Grad", "LeakyReluGrad"] {
            check_op(op).input(wavy([7], 1)).input(wavy([7], 2)).gradient();
        }
    }
}
