//! What TensorFlow's graph rewrites make of several ops: `_FusedMatMul`, `_FusedConv2D`, `_FusedBatchNormEx` and
//! `_UnaryOpsComposition`. No program writes them, but a worker behind a TensorFlow master is sent them.
//!
//! Each runs the kernels of the ops that it stands for, one after the other on one buffer.

use kolo_core::{DType, Error, PartialShape, Result, Shape, Tensor};
use kolo_graph::{Gradient, HalfSafety, InferCtx, OpDef, SplitRule, shape_fns};

use crate::nn::channels::{channel_axis, is_nchw};
use crate::op::{Gpu, KernelMaker, Op, cpu_on, find_op};
use crate::{Cost, KernelCtx, Value};

const WHY: &str = "rewrites make this op when gradients are there already";

pub(crate) static FUSED_MAT_MUL: Op = Op {
    def: OpDef {
        name: "_FusedMatMul",
        signature: "(a:T, b:T, args:num_args*T) -> (product:T) ; transpose_a:bool=false, transpose_b:bool=false, \
                    T:type{bfloat16,half,float}, num_args:int>=0, fused_ops:list(string)=[], \
                    epsilon:float=9.999999747378752e-05, leakyrelu_alpha:float=0.20000000298023224",
        shape: |ctx| (find_op("MatMul")?.def.shape)(ctx),
        gradient: Gradient::Refused(WHY),
        half: HalfSafety::Faster,
        split: SplitRule::Product,
        ..OpDef::BASE
    },
    kernels: &[cpu_on("T", &[DType::F32, DType::F16, DType::BF16], KernelMaker::Function(mat_mul))],
    gpu: Gpu::Missing,
    cost: Cost::Heavy,
};

pub(crate) static FUSED_CONV2D: Op = Op {
    def: OpDef {
        name: "_FusedConv2D",
        signature: "(input:T, filter:T, args:list(TArgs), host_args:num_host_args*float) -> (output:T) ; \
                    T:type{half,float,double,int8,qint8}, TArgs:list(type)>=1, num_args:int>=0, \
                    num_host_args:int>=0=0, strides:list(int), padding:string{SAME|VALID|EXPLICIT}, \
                    explicit_paddings:list(int)=[], data_format:string{NHWC|NCHW|NCHW_VECT_C}=\"NHWC\", \
                    filter_format:string{HWIO|OIHW|OIHW_VECT_I}=\"HWIO\", dilations:list(int)=[1,1,1,1], \
                    use_cudnn_on_gpu:bool=true, fused_ops:list(string)=[], epsilon:float=9.999999747378752e-05, \
                    leakyrelu_alpha:float=0.20000000298023224",
        shape: |ctx| match is_plain(ctx.attrs())? {
            true => (find_op("Conv2D")?.def.shape)(ctx),
            false => Ok(vec![PartialShape::unknown()]),
        },
        gradient: Gradient::Refused(WHY),
        half: HalfSafety::Faster,
        ..OpDef::BASE
    },
    kernels: &[cpu_on("T", &[DType::F32, DType::F16, DType::F64], KernelMaker::Function(conv2d))],
    gpu: Gpu::Missing,
    cost: Cost::Heavy,
};

pub(crate) static FUSED_BATCH_NORM_EX: Op = Op {
    def: OpDef {
        name: "_FusedBatchNormEx",
        signature: "(x:T, scale:U, offset:U, mean:U, variance:U, side_input:num_side_inputs*T) -> (y:T, batch_mean:U, \
                    batch_variance:U, reserve_space_1:U, reserve_space_2:U, reserve_space_3:U) ; \
                    T:type{half,float,bfloat16}, U:type{float}, epsilon:float=9.999999747378752e-05, \
                    exponential_avg_factor:float=1.0, num_side_inputs:int>=0=0, activation_mode:string=\"Identity\", \
                    data_format:string{NHWC|NCHW}=\"NHWC\", is_training:bool=true",
        shape: |ctx: &InferCtx<'_>| (find_op("FusedBatchNormV3")?.def.shape)(ctx),
        gradient: Gradient::Refused(WHY),
        half: HalfSafety::Safe,
        ..OpDef::BASE
    },
    kernels: &[cpu_on("T", &[DType::F32, DType::F16, DType::BF16], KernelMaker::Function(batch_norm))],
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

pub(crate) static UNARY_OPS_COMPOSITION: Op = Op {
    def: OpDef {
        name: "_UnaryOpsComposition",
        signature: "(x:T) -> (y:T) ; T:type{float,half,double}, op_names:list(string)",
        shape: shape_fns::same_as_input_0,
        gradient: Gradient::Refused(WHY),
        half: HalfSafety::Wide,
        ..OpDef::BASE
    },
    kernels: &[cpu_on("T", &[DType::F32, DType::F16, DType::F64], KernelMaker::Function(composition))],
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

/// What may be composed: functions of one number without attributes.
const UNARY: &[&str] = &[
    "Abs",
    "Acos",
    "Acosh",
    "Asin",
    "Asinh",
    "Atan",
    "Atanh",
    "Ceil",
    "Cos",
    "Cosh",
    "Elu",
    "Exp",
    "Expm1",
    "Floor",
    "Inv",
    "Log",
    "Log1p",
    "Neg",
    "Reciprocal",
    "Relu",
    "Relu6",
    "Rint",
    "Round",
    "Rsqrt",
    "Selu",
    "Sigmoid",
    "Sin",
    "Sinh",
    "Sqrt",
    "Square",
    "Tan",
    "Tanh",
];

/// Runs another op's kernel for this node's `T`, with this node's attributes, and returns its outputs.
fn run(ctx: &KernelCtx<'_>, op: &str, inputs: Vec<Tensor>, n_outputs: usize) -> Result<Vec<Tensor>> {
    let kernel = find_op(op)?.kernels.iter().find(|kernel| kernel.fits("CPU", ctx.attrs()));
    let Some(KernelMaker::Function(compute)) = kernel.map(|kernel| kernel.make) else {
        return Err(Error::unimplemented(format!("{op} cannot be part of {}", ctx.node.op())));
    };
    let mut inputs: Vec<Value> = inputs.into_iter().map(Value::Tensor).collect();
    let mut outputs = vec![Value::Empty; n_outputs];
    compute(&mut KernelCtx {
        node: ctx.node,
        device: ctx.device,
        step: ctx.step,
        inputs: &mut inputs,
        outputs: &mut outputs,
        frame_iteration: ctx.frame_iteration,
        is_dead: false,
    })?;
    let value = |output: Value| match output {
        Value::Tensor(tensor) => Ok(tensor),
        _ => Err(Error::internal(format!("{op} gave no value"))),
    };
    outputs.into_iter().map(value).collect()
}

/// As [`run`], for ops of one output.
fn apply(ctx: &KernelCtx<'_>, op: &str, inputs: Vec<Tensor>) -> Result<Tensor> {
    run(ctx, op, inputs, 1)?.pop().ok_or_else(|| Error::internal(format!("{op} gave no value")))
}

/// A scalar of the node's `T`.
fn number(ctx: &KernelCtx<'_>, value: f64) -> Result<Tensor> {
    Ok(match ctx.attrs().dtype("T")? {
        DType::F32 => Tensor::scalar(value as f32),
        DType::F64 => Tensor::scalar(value),
        DType::F16 => Tensor::scalar(half::f16::from_f64(value)),
        DType::BF16 => Tensor::scalar(half::bf16::from_f64(value)),
        other => return Err(Error::unimplemented(format!("{} does not work on {other}", ctx.node.op()))),
    })
}

fn activate(ctx: &KernelCtx<'_>, y: Tensor, op: &str) -> Result<Tensor> {
    match op {
        "Relu" | "Relu6" | "Elu" | "Tanh" | "Sigmoid" => apply(ctx, op, vec![y]),
        "LeakyRelu" => {
            let alpha = number(ctx, ctx.attrs().float("leakyrelu_alpha")?.into())?;
            let low = apply(ctx, "Mul", vec![y.clone(), alpha])?;
            // With alpha above 1 the smaller of the two is right, as in max(x, 0) + alpha * min(x, 0).
            let larger = ctx.attrs().float("leakyrelu_alpha")? <= 1.0;
            apply(ctx, if larger { "Maximum" } else { "Minimum" }, vec![y, low])
        }
        "GeluApproximate" => apply(ctx, "KoloGelu", vec![y]),
        "GeluExact" => {
            let scaled = apply(ctx, "Mul", vec![y.clone(), number(ctx, std::f64::consts::FRAC_1_SQRT_2)?])?;
            let gate = apply(ctx, "Erf", vec![scaled])?;
            let gate = apply(ctx, "AddV2", vec![gate, number(ctx, 1.0)?])?;
            let gate = apply(ctx, "Mul", vec![gate, number(ctx, 0.5)?])?;
            apply(ctx, "Mul", vec![y, gate])
        }
        other => Err(Error::unimplemented(format!("{} does not know the op '{other}'", ctx.node.op()))),
    }
}

/// The inputs from `first` on, each of which must have one number for every channel, under a shape that broadcasts over `y`.
fn per_channel<const N: usize>(ctx: &mut KernelCtx<'_>, first: usize, y: &Tensor, axis: usize) -> Result<[Tensor; N]> {
    let mut taken = Vec::with_capacity(N);
    let mut dims = vec![1; y.shape().rank()];
    dims[axis] = y.shape()[axis];
    let wanted = Shape::new(&dims)?;
    for i in first..first + N {
        if i >= ctx.n_inputs() {
            return Err(Error::invalid_argument(format!("{} needs {N} arguments for its ops", ctx.node.op())));
        }
        let arg = ctx.take_input(i)?;
        if arg.n_elements() != wanted.n_elements() {
            return Err(Error::invalid_argument(format!(
                "argument {} must have one number for each of {} channels, found {}",
                i - first,
                dims[axis],
                arg.shape()
            )));
        }
        taken.push(arg.reshaped(wanted.clone())?);
    }
    taken.try_into().map_err(|_| Error::internal("as many arguments as were asked for"))
}

/// Does what `fused_ops` says after the product, whose channels lie in dimension `axis`.
fn finish(ctx: &mut KernelCtx<'_>, mut y: Tensor, axis: usize) -> Result<()> {
    let attrs = ctx.attrs();
    let ops = attrs.strs("fused_ops")?;
    let (first, rest) = match ops.split_first() {
        Some((first @ (&"BiasAdd" | &"FusedBatchNorm"), rest)) => (*first, rest),
        Some((_, _)) => ("", &ops[..]),
        None => ("", &[][..]),
    };
    match first {
        "BiasAdd" => {
            let [bias] = per_channel(ctx, 2, &y, axis)?;
            y = apply(ctx, "AddV2", vec![y, bias])?;
        }
        "FusedBatchNorm" => {
            let [scale, offset, mean, variance] = per_channel(ctx, 2, &y, axis)?;
            let epsilon = number(ctx, attrs.float("epsilon")?.into())?;
            let spread = apply(ctx, "AddV2", vec![variance, epsilon])?;
            let spread = apply(ctx, "Rsqrt", vec![spread])?;
            let scale = apply(ctx, "Mul", vec![spread, scale])?;
            y = apply(ctx, "Sub", vec![y, mean])?;
            y = apply(ctx, "Mul", vec![y, scale])?;
            y = apply(ctx, "AddV2", vec![y, offset])?;
        }
        _ => {}
    }
    for op in rest {
        y = activate(ctx, y, op)?;
    }
    ctx.set_output(0, y);
    Ok(())
}

fn mat_mul(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let product = apply(ctx, "MatMul", vec![ctx.input(0)?.clone(), ctx.input(1)?.clone()])?;
    finish(ctx, product, 1)
}

/// Whether images and filter are laid out as a plain convolution's are.
fn is_plain(attrs: &kolo_graph::Attrs) -> Result<bool> {
    Ok(attrs.str("data_format")? != "NCHW_VECT_C" && attrs.str("filter_format")? == "HWIO")
}

fn conv2d(ctx: &mut KernelCtx<'_>) -> Result<()> {
    if !is_plain(ctx.attrs())? {
        return Err(Error::unimplemented("_FusedConv2D works on NHWC and NCHW with HWIO filters"));
    }
    let y = apply(ctx, "Conv2D", vec![ctx.input(0)?.clone(), ctx.input(1)?.clone()])?;
    let axis = channel_axis(4, is_nchw(ctx.attrs())?);
    finish(ctx, y, axis)
}

fn batch_norm(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let inputs = (0..5).map(|i| ctx.take_input(i)).collect::<Result<Vec<_>>>()?;
    let mut outputs = run(ctx, "FusedBatchNormV3", inputs, 6)?;
    let mut y = outputs.remove(0);
    for i in 5..ctx.n_inputs() {
        let side = ctx.take_input(i)?;
        if side.shape() != y.shape() {
            return Err(Error::invalid_argument(format!(
                "side_input must have the shape of x: {} vs {}",
                side.shape(),
                y.shape()
            )));
        }
        y = apply(ctx, "AddV2", vec![y, side])?;
    }
    y = match ctx.attrs().str("activation_mode")? {
        "Identity" => y,
        mode => activate(ctx, y, mode)?,
    };
    for (i, tensor) in std::iter::once(y).chain(outputs).enumerate() {
        ctx.set_output(i, tensor);
    }
    Ok(())
}

fn composition(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let mut y = ctx.take_input(0)?;
    for name in ctx.attrs().strs("op_names")? {
        if !UNARY.contains(&name) {
            return Err(Error::invalid_argument(format!("{name} cannot be part of _UnaryOpsComposition")));
        }
        y = apply(ctx, name, vec![y])?;
    }
    ctx.set_output(0, y);
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::{DType, Tensor};

    use crate::testing::{check_op, tensor};

    fn texts(list: &[&str]) -> Vec<String> {
        list.iter().map(|text| (*text).to_owned()).collect()
    }

    #[test]
    fn a_product_with_bias_and_activation() {
        let case = |ops: &[&str]| {
            check_op("_FusedMatMul")
                .attr("fused_ops", texts(ops))
                .attr("num_args", 1i64)
                .input([[1.0f32, -2.0], [0.5, 1.0]])
                .input([[1.0f32, 0.0], [0.0, 1.0]])
                .input([0.5f32, 1.0])
        };
        case(&["BiasAdd"]).gives([[1.5f32, -1.0], [1.0, 2.0]]);
        case(&["BiasAdd", "Relu"]).gives([[1.5f32, 0.0], [1.0, 2.0]]);
        case(&["BiasAdd", "LeakyRelu"]).gives([[1.5f32, -0.2], [1.0, 2.0]]);
        case(&["BiasAdd", "Tanh"]).gives([[0.905_148_3f32, -0.761_594_2], [0.761_594_2, 0.964_027_6]]);
        case(&["BiasAdd", "GeluExact"]).gives([[1.399_789_2f32, -0.158_655_25], [0.841_344_7, 1.954_499_7]]);
        case(&["BiasAdd", "Softmax"]).fails("does not know the op 'Softmax'");
        check_op("_FusedMatMul")
            .attr("fused_ops", texts(&["BiasAdd"]))
            .attr("num_args", 1i64)
            .input([[1.0f32]])
            .input([[1.0f32]])
            .input([0.5f32, 1.0])
            .fails("must have one number for each of 1 channels");
    }

    #[test]
    fn a_convolution_with_batch_norm() {
        let x = || tensor([1, 2, 2, 1], [1.0f32, 2.0, 3.0, 4.0]);
        check_op("_FusedConv2D")
            .attr("fused_ops", texts(&["FusedBatchNorm", "Relu"]))
            .attr("strides", vec![1i64, 1, 1, 1])
            .attr("padding", "SAME")
            .attr("num_args", 4i64)
            .attr("TArgs", vec![DType::F32; 4])
            .attr("epsilon", 0.0f32)
            .input(x())
            .input(tensor([1, 1, 1, 1], [1.0f32]))
            .input([2.0f32])
            .input([1.0f32])
            .input([2.5f32])
            .input([4.0f32])
            .gives(tensor([1, 2, 2, 1], [0.0f32, 0.5, 1.5, 2.5]));
    }

    #[test]
    fn a_batch_norm_with_another_input() {
        let x = || tensor([1, 1, 2, 1], [1.0f32, 3.0]);
        check_op("_FusedBatchNormEx")
            .attr("activation_mode", "Relu")
            .attr("epsilon", 0.0f32)
            .attr("is_training", false)
            .attr("num_side_inputs", 1i64)
            .input(x())
            .input([1.0f32])
            .input([0.0f32])
            .input([2.0f32])
            .input([1.0f32])
            .input(tensor([1, 1, 2, 1], [0.5f32, 0.5]))
            .gives_all([
                tensor([1, 1, 2, 1], [0.0f32, 1.5]),
                Tensor::from([2.0f32]),
                Tensor::from([1.0f32]),
                Tensor::from([2.0f32]),
                Tensor::from([1.0f32]),
                Tensor::scalar(0.0f32),
            ]);
    }

    #[test]
    fn functions_one_after_the_other() {
        let case = |ops: &[&str]| check_op("_UnaryOpsComposition").attr("op_names", texts(ops)).input([1.0f32, 4.0]);
        case(&["Sqrt", "Neg", "Abs", "Exp"]).gives([2.718_281_7f32, 7.389_056]);
        case(&["MatMul"]).fails("cannot be part");
    }
}
