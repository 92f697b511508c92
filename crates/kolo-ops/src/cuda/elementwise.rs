//! Elementwise ops as expressions: functions of one number and of two, comparisons, logic, activations and what their
//! gradients are made of, casts, fills, choices and sums of several tensors.

use kolo_core::{DType, Error, Result, Shape};
use kolo_graph::AttrValue;

use super::map::{Expression, map_inputs, map_to, run};
use super::{FLOATS, NUMBERS, PLAIN, Table, function, gpu, object};
use crate::kernel::KernelInit;
use crate::math::clip::check_bounds;
use crate::math::elementwise::broadcast_shape;
use crate::{Kernel, KernelCtx};

/// What an expression gives: what it takes, or a truth value.
#[derive(Clone, Copy, PartialEq)]
enum Out {
    Same,
    Truth,
}

/// Op, expression over `x0`, `x1` in the type `W`; floats only or all numbers; what it gives.
type Row = (&'static str, &'static str, &'static [DType], Out);

const ROWS: &[Row] = &[
    ("Neg", "-x0", NUMBERS, Out::Same),
    ("Abs", "(x0 < (W)0 || x0 == (W)0) ? (W)0 - x0 : x0", NUMBERS, Out::Same),
    ("Sign", "x0 > (W)0 ? (W)1 : (x0 < (W)0 ? (W)-1 : x0)", NUMBERS, Out::Same),
    ("Square", "x0 * x0", NUMBERS, Out::Same),
    ("Reciprocal", "(W)1 / x0", FLOATS, Out::Same),
    ("Inv", "(W)1 / x0", FLOATS, Out::Same),
    ("Floor", "floor(x0)", FLOATS, Out::Same),
    ("Ceil", "ceil(x0)", FLOATS, Out::Same),
    ("Round", "rint(x0)", FLOATS, Out::Same),
    ("Rint", "rint(x0)", FLOATS, Out::Same),
    ("IsNan", "x0 != x0", FLOATS, Out::Truth),
    ("IsInf", "isinf(x0)", FLOATS, Out::Truth),
    ("IsFinite", "isfinite(x0)", FLOATS, Out::Truth),
    ("Sqrt", "sqrt(x0)", FLOATS, Out::Same),
    ("Rsqrt", "(W)1 / sqrt(x0)", FLOATS, Out::Same),
    ("Exp", "exp(x0)", FLOATS, Out::Same),
    ("Expm1", "expm1(x0)", FLOATS, Out::Same),
    ("Log", "log(x0)", FLOATS, Out::Same),
    ("Log1p", "log1p(x0)", FLOATS, Out::Same),
    ("Sin", "sin(x0)", FLOATS, Out::Same),
    ("Cos", "cos(x0)", FLOATS, Out::Same),
    ("Tan", "tan(x0)", FLOATS, Out::Same),
    ("Asin", "asin(x0)", FLOATS, Out::Same),
    ("Acos", "acos(x0)", FLOATS, Out::Same),
    ("Atan", "atan(x0)", FLOATS, Out::Same),
    ("Sinh", "sinh(x0)", FLOATS, Out::Same),
    ("Cosh", "cosh(x0)", FLOATS, Out::Same),
    ("Tanh", "tanh(x0)", FLOATS, Out::Same),
    ("Sigmoid", "(W)1 / ((W)1 + exp(-x0))", FLOATS, Out::Same),
    ("Erf", "erf(x0)", FLOATS, Out::Same),
    ("Erfc", "erfc(x0)", FLOATS, Out::Same),
    ("Lgamma", "lgamma(x0)", FLOATS, Out::Same),
    ("Relu", "x0 < (W)0 ? (W)0 : x0", NUMBERS, Out::Same),
    ("Relu6", "x0 < (W)0 ? (W)0 : (x0 > (W)6 ? (W)6 : x0)", NUMBERS, Out::Same),
    ("Elu", "x0 < (W)0 ? expm1(x0) : x0", FLOATS, Out::Same),
    (
        "Selu",
        "x0 < (W)0 ? (W)1.7580993408473768599402175208123 * expm1(x0) : (W)1.0507009873554804934193349852946 * x0",
        FLOATS,
        Out::Same,
    ),
    ("Softplus", "(x0 < (W)0 ? (W)0 : x0) + log1p(exp(-fabs(x0)))", FLOATS, Out::Same),
    ("Softsign", "x0 / ((W)1 + fabs(x0))", FLOATS, Out::Same),
    ("KoloGelu", "x0 / ((W)1 + exp((W)-1.5957691216057307 * x0 * ((W)1 + (W)0.044715 * x0 * x0)))", FLOATS, Out::Same),
    ("LogicalNot", "!x0", &[], Out::Truth),
    ("LogicalAnd", "x0 && x1", &[], Out::Truth),
    ("LogicalOr", "x0 || x1", &[], Out::Truth),
    ("Add", "x0 + x1", NUMBERS, Out::Same),
    ("AddV2", "x0 + x1", NUMBERS, Out::Same),
    ("Sub", "x0 - x1", NUMBERS, Out::Same),
    ("Mul", "x0 * x1", NUMBERS, Out::Same),
    ("RealDiv", "x0 / x1", FLOATS, Out::Same),
    ("Div", "x0 / x1", FLOATS, Out::Same),
    ("DivNoNan", "x1 == (W)0 ? (W)0 : x0 / x1", FLOATS, Out::Same),
    ("FloorDiv", "floor(x0 / x1)", FLOATS, Out::Same),
    ("TruncateDiv", "trunc(x0 / x1)", FLOATS, Out::Same),
    ("Mod", "fmod(x0, x1)", FLOATS, Out::Same),
    (
        "FloorMod",
        "(fmod(x0, x1) != (W)0 && ((fmod(x0, x1) < (W)0) != (x1 < (W)0))) ? fmod(x0, x1) + x1 : fmod(x0, x1)",
        FLOATS,
        Out::Same,
    ),
    ("Pow", "pow(x0, x1)", FLOATS, Out::Same),
    ("Atan2", "atan2(x0, x1)", FLOATS, Out::Same),
    ("Maximum", "is_nan(x0) ? x0 : (is_nan(x1) ? x1 : (x0 > x1 ? x0 : x1))", NUMBERS, Out::Same),
    ("Minimum", "is_nan(x0) ? x0 : (is_nan(x1) ? x1 : (x0 < x1 ? x0 : x1))", NUMBERS, Out::Same),
    ("SquaredDifference", "(x0 - x1) * (x0 - x1)", NUMBERS, Out::Same),
    ("Less", "x0 < x1", NUMBERS, Out::Truth),
    ("LessEqual", "x0 <= x1", NUMBERS, Out::Truth),
    ("Greater", "x0 > x1", NUMBERS, Out::Truth),
    ("GreaterEqual", "x0 >= x1", NUMBERS, Out::Truth),
    ("Equal", "x0 == x1", PLAIN, Out::Truth),
    ("NotEqual", "x0 != x1", PLAIN, Out::Truth),
    ("SqrtGrad", "x1 * (W)0.5 / x0", FLOATS, Out::Same),
    ("RsqrtGrad", "x1 * (W)-0.5 * (x0 * x0 * x0)", FLOATS, Out::Same),
    ("ReciprocalGrad", "-x1 * (x0 * x0)", FLOATS, Out::Same),
    ("InvGrad", "-x1 * (x0 * x0)", FLOATS, Out::Same),
    ("TanhGrad", "x1 * ((W)1 - x0 * x0)", FLOATS, Out::Same),
    ("SigmoidGrad", "x1 * x0 * ((W)1 - x0)", FLOATS, Out::Same),
    ("ReluGrad", "x1 > (W)0 ? x0 : (W)0", NUMBERS, Out::Same),
    ("Relu6Grad", "(x1 > (W)0 && x1 < (W)6) ? x0 : (W)0", NUMBERS, Out::Same),
    ("EluGrad", "x1 < (W)0 ? x0 * (x1 + (W)1) : x0", FLOATS, Out::Same),
    (
        "SeluGrad",
        "x1 < (W)0 ? x0 * (x1 + (W)1.7580993408473768599402175208123) : x0 * (W)1.0507009873554804934193349852946",
        FLOATS,
        Out::Same,
    ),
    ("SoftplusGrad", "x0 / (exp(-x1) + (W)1)", FLOATS, Out::Same),
    ("SoftsignGrad", "x0 / (((W)1 + fabs(x1)) * ((W)1 + fabs(x1)))", FLOATS, Out::Same),
    ("KoloGeluGrad", "gelu_grad(x0, x1)", FLOATS, Out::Same),
    ("ClipByValue", "smaller(larger(x0, x1), x2)", NUMBERS, Out::Same),
    ("LeakyRelu", "x0 > (W)0 ? x0 : (W)p0 * x0", FLOATS, Out::Same),
    ("LeakyReluGrad", "x1 > (W)0 ? x0 : (W)p0 * x0", FLOATS, Out::Same),
];

pub(super) fn add(table: &mut Table) {
    for &(op, _, dtypes, _) in ROWS {
        let attr = if dtypes.is_empty() { "" } else { "T" };
        object(table, op, attr, dtypes, &[], Map::make);
    }
    function(table, "Cast", "", &[], &[], cast);
    object(table, "ZerosLike", "T", PLAIN, &[], |_| Ok(Box::new(Like(0.0))));
    object(table, "OnesLike", "T", PLAIN, &[], |_| Ok(Box::new(Like(1.0))));
    function(table, "Fill", "T", PLAIN, &["dims"], fill);
    function(table, "Select", "T", PLAIN, &[], select);
    function(table, "SelectV2", "T", PLAIN, &[], select_v2);
    function(table, "AddN", "T", NUMBERS, &[], add_n);
    function(table, "AccumulateNV2", "T", NUMBERS, &[], add_n);
    function(table, "BroadcastTo", "T", PLAIN, &["shape"], broadcast_to);
    function(table, "BiasAdd", "T", NUMBERS, &[], bias_add);
    function(table, "BiasAddV1", "T", NUMBERS, &[], bias_add);
}

/// The expression of an op, if it is one of [`ROWS`].
pub(crate) fn text(op: &str) -> Option<&'static str> {
    ROWS.iter().find(|row| row.0 == op).map(|row| row.1)
}

/// One of [`ROWS`].
struct Map {
    expression: Expression,
    out: Out,
    params: Vec<f32>,
    is_same_shape: bool,
}

impl Map {
    fn make(init: &KernelInit<'_>) -> Result<Box<dyn Kernel>> {
        let op = init.node.op();
        let Some(&(name, text, _, out)) = ROWS.iter().find(|row| row.0 == op) else {
            return Err(Error::internal(format!("{op} is not an elementwise op")));
        };
        let params = match init.attrs().find("alpha") {
            Some(AttrValue::Float(alpha)) if text.contains("p0") => vec![*alpha],
            _ => Vec::new(),
        };
        Ok(Box::new(Map { expression: Expression { name, text }, out, params, is_same_shape: name.ends_with("Grad") }))
    }
}

impl Kernel for Map {
    fn compute(&self, ctx: &mut KernelCtx<'_>) -> Result<()> {
        if self.is_same_shape && ctx.input(0)?.shape() != ctx.input(1)?.shape() {
            let (a, b) = (ctx.input(0)?.shape(), ctx.input(1)?.shape());
            return Err(Error::invalid_argument(format!("the inputs must have the same shape, found {a} and {b}")));
        }
        if self.expression.name == "ClipByValue" {
            check_bounds(ctx)?;
        }
        if matches!(self.expression.name, "Equal" | "NotEqual")
            && !ctx.attrs().bool("incompatible_shape_error")?
            && broadcast_shape(ctx.input(0)?.shape(), ctx.input(1)?.shape()).is_err()
        {
            // Shapes that do not fit compare as a whole.
            let mut out = ctx.allocate(DType::Bool, Shape::scalar())?;
            ctx.device.fill(&mut out, u8::from(self.expression.name == "NotEqual"))?;
            ctx.set_output(0, out);
            return Ok(());
        }
        let out = if self.out == Out::Truth { DType::Bool } else { ctx.input(0)?.dtype() };
        map_inputs(ctx, self.expression, out, &self.params)
    }
}

const COPY: Expression = Expression { name: "copy", text: "x0" };

fn cast(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (from, to) = (ctx.attrs().dtype("SrcT")?, ctx.attrs().dtype("DstT")?);
    if from == to {
        return ctx.forward(0, 0);
    }
    if ctx.attrs().bool("Truncate")? || super::c_type(from) == "void" || super::c_type(to) == "void" {
        return Err(Error::unimplemented(format!("Cast {from} to {to} is not supported on a GPU")));
    }
    let expression = match to {
        DType::Bool => Expression { name: "to_bool", text: "x0 != (W)0" },
        _ => Expression { name: "cast", text: "x0" },
    };
    map_inputs(ctx, expression, to, &[])
}

/// `ZerosLike` and `OnesLike`: the value.
struct Like(f32);

impl Kernel for Like {
    fn compute(&self, ctx: &mut KernelCtx<'_>) -> Result<()> {
        let (dtype, shape) = (ctx.input(0)?.dtype(), ctx.input(0)?.shape().clone());
        let mut out = ctx.allocate(dtype, shape)?;
        let constant = Expression { name: "constant", text: "(Wide<U>::type)p0" };
        match self.0 == 0.0 {
            true => ctx.device.fill(&mut out, 0)?,
            false => run(gpu(ctx)?, constant, &[], &mut out, &[self.0])?,
        }
        ctx.set_output(0, out);
        Ok(())
    }
}

fn fill(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let dims = ctx.integers(0)?;
    let shape = shape_of(&dims)?;
    let value = ctx.input(1)?;
    if value.n_elements() != 1 {
        return Err(Error::invalid_argument(format!("value must be a scalar, found shape {}", value.shape())));
    }
    let mut out = ctx.allocate(value.dtype(), shape)?;
    run(gpu(ctx)?, COPY, &[Some(ctx.input(1)?)], &mut out, &[])?;
    ctx.set_output(0, out);
    Ok(())
}

/// A shape from the sizes in a tensor.
pub(super) fn shape_of(dims: &[i64]) -> Result<Shape> {
    let dims: Vec<usize> = dims
        .iter()
        .map(|&dim| usize::try_from(dim))
        .collect::<std::result::Result<_, _>>()
        .map_err(|_| Error::invalid_argument(format!("a size is negative in {dims:?}")))?;
    Shape::new(&dims)
}

fn broadcast_to(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let shape = shape_of(&ctx.integers(1)?)?;
    let input = ctx.input(0)?;
    if broadcast_shape(input.shape(), &shape)? != shape {
        return Err(Error::invalid_argument(format!("Incompatible shapes: {} vs. {shape}", input.shape())));
    }
    if *input.shape() == shape {
        return ctx.forward(0, 0);
    }
    let mut out = ctx.allocate(input.dtype(), shape)?;
    run(gpu(ctx)?, COPY, &[Some(ctx.input(0)?)], &mut out, &[])?;
    ctx.set_output(0, out);
    Ok(())
}

const SELECT: Expression = Expression { name: "select", text: "x0 ? x1 : x2" };

fn select(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (condition, a, b) = (ctx.input(0)?, ctx.input(1)?, ctx.input(2)?);
    if a.shape() != b.shape() {
        return Err(Error::invalid_argument(format!(
            "'then' and 'else' must have the same size.  but received: {} vs. {}",
            a.shape(),
            b.shape()
        )));
    }
    let shape = a.shape().clone();
    let by_row = condition.shape().rank() == 1 && shape.first() == condition.shape().first();
    if condition.shape().rank() != 0 && !by_row && *condition.shape() != shape {
        return Err(Error::invalid_argument(format!("the condition {} does not fit {shape}", condition.shape())));
    }
    let mut mask = condition.clone();
    if by_row {
        let mut dims = vec![1; shape.rank()];
        dims[0] = shape[0];
        mask = mask.reshaped(Shape::new(&dims)?)?;
    }
    choose(ctx, mask, shape)
}

fn select_v2(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (condition, a, b) = (ctx.input(0)?, ctx.input(1)?, ctx.input(2)?);
    let shape = broadcast_shape(condition.shape(), &broadcast_shape(a.shape(), b.shape())?)?;
    let mask = condition.clone();
    choose(ctx, mask, shape)
}

/// The condition is of another type than the rest, so it is read through a cast of the whole.
fn choose(ctx: &mut KernelCtx<'_>, mask: kolo_core::Tensor, shape: Shape) -> Result<()> {
    let dtype = ctx.input(1)?.dtype();
    let device = gpu(ctx)?;
    let mask = match dtype {
        DType::Bool => mask,
        _ => {
            let mut wide = ctx.allocate(dtype, mask.shape().clone())?;
            run(device, Expression { name: "cast", text: "x0" }, &[Some(&mask)], &mut wide, &[])?;
            wide
        }
    };
    ctx.inputs[0] = crate::Value::Tensor(mask);
    let expression = if dtype == DType::Bool { SELECT } else { Expression { text: "x0 != (W)0 ? x1 : x2", ..SELECT } };
    map_to(ctx, expression, dtype, shape, &[])
}

fn add_n(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let n = ctx.n_inputs();
    let shape = ctx.input(0)?.shape().clone();
    for i in 1..n {
        if *ctx.input(i)?.shape() != shape {
            return Err(Error::invalid_argument(format!(
                "Inputs to operation {} must have the same size and shape.  Input 0: {shape} != input {i}: {}",
                ctx.node.name,
                ctx.input(i)?.shape()
            )));
        }
    }
    if n == 1 {
        return ctx.forward(0, 0);
    }
    const SUMS: [Expression; 3] = [
        Expression { name: "sum2", text: "x0 + x1" },
        Expression { name: "sum3", text: "x0 + x1 + x2" },
        Expression { name: "sum4", text: "x0 + x1 + x2 + x3" },
    ];
    let dtype = ctx.input(0)?.dtype();
    let (mut out, in_place) = ctx.reuse_or_allocate(0, dtype, shape)?;
    let device = gpu(ctx)?;
    // Four at a time; the first is the output itself once it holds a sum.
    let mut next = if in_place { 1 } else { 0 };
    let mut has_sum = in_place;
    while next < n {
        let mut inputs = Vec::with_capacity(4);
        if has_sum {
            inputs.push(None);
        }
        while inputs.len() < 4 && next < n {
            inputs.push(Some(ctx.input(next)?));
            next += 1;
        }
        match inputs.len() {
            1 => run(device, COPY, &inputs, &mut out, &[])?,
            k => run(device, SUMS[k - 2], &inputs, &mut out, &[])?,
        }
        has_sum = true;
    }
    ctx.set_output(0, out);
    Ok(())
}

fn bias_add(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (value, bias) = (ctx.input(0)?, ctx.input(1)?);
    let rank = value.shape().rank();
    let is_nchw = matches!(ctx.attrs().find("data_format"), Some(AttrValue::Str(format)) if &format[..] == b"NCHW");
    let at = if is_nchw { 1 } else { rank.wrapping_sub(1) };
    if rank < 2 || bias.shape().rank() != 1 || value.shape()[at] != bias.n_elements() {
        return Err(Error::invalid_argument(format!(
            "Must provide as many biases as the last dimension of the input tensor: {} vs. {}",
            bias.shape(),
            value.shape()
        )));
    }
    let (dtype, shape) = (value.dtype(), value.shape().clone());
    let mut dims = vec![1; rank];
    dims[at] = bias.n_elements();
    let bias = bias.clone().reshaped(Shape::new(&dims)?)?;
    ctx.inputs[1] = crate::Value::Tensor(bias);
    map_to(ctx, Expression { name: "AddV2", text: "x0 + x1" }, dtype, shape, &[])
}

#[cfg(test)]
mod tests {
    use kolo_device::cuda::ProgramKey;

    use super::super::map::source;
    use super::*;

    #[test]
    fn sources_compile() {
        let mut all = Vec::new();
        for &(op, text, dtypes, out) in ROWS {
            let n = (0..4).rev().find(|i| text.contains(&format!("x{i}"))).map_or(0, |i| i + 1);
            let n = if op == "KoloGeluGrad" { 2 } else { n };
            let p = u32::from(text.contains("p0"));
            let dtypes = if dtypes.is_empty() { &[DType::Bool][..] } else { dtypes };
            for &dtype in dtypes.iter().take(5) {
                let to = if out == Out::Truth { DType::Bool } else { dtype };
                let width = 16 / dtype.size().unwrap_or(16) as u32;
                let variant = n | p << 4 | width << 8;
                let key = ProgramKey { family: "map", op, dtypes: [Some(dtype), Some(to), None], variant };
                all.push((key, source(text, dtype, to, variant, 0)));
            }
        }
        let strided = 2 | 1 << 24;
        let key = ProgramKey { family: "map", op: "strided", dtypes: [Some(DType::F32), None, None], variant: strided };
        all.push((key, source("x0 + x1", DType::F32, DType::F32, strided, 3)));
        let constant = 1 << 4 | 4 << 8;
        all.push((key, source("(Wide<U>::type)p0", DType::F16, DType::F16, constant, 0)));
        super::super::tests::compiles(all);
    }
}
