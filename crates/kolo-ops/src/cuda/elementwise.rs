//! Elementwise ops as expressions: functions of one number and of two, comparisons, logic, activations and what their
//! gradients are made of, casts, fills, choices and sums of several tensors.

use kolo_core::{DType, Error, Result, Shape};
use kolo_graph::{AttrValue, Elements, ShapesFit};

use super::map::{Expression, map_inputs, map_to, run};
use super::{FLOATS, NUMBERS, PLAIN, gpu};
use crate::kernel::KernelInit;
use crate::math::clip::check_bounds;
use crate::math::elementwise::broadcast_shape;
use crate::op::{KernelDef, KernelMaker, gpu_made};
use crate::{Kernel, KernelCtx};

/// The kernels of an op that needs nothing but its expression.
pub(crate) const fn kernels(elements: Elements) -> &'static [KernelDef] {
    const MAKE: KernelMaker = KernelMaker::Object(|init| Ok(Box::new(Map::new(init)?)));
    const OF_FLOATS: &[KernelDef] = &[gpu_made("T", FLOATS, MAKE)];
    const OF_NUMBERS: &[KernelDef] = &[gpu_made("T", NUMBERS, MAKE)];
    const OF_PLAIN: &[KernelDef] = &[gpu_made("T", PLAIN, MAKE)];
    // The op has no choice of dtypes.
    const OF_TRUTHS: &[KernelDef] = &[gpu_made("", &[], MAKE)];
    match elements {
        Elements::Floats => OF_FLOATS,
        Elements::Numbers => OF_NUMBERS,
        Elements::Plain => OF_PLAIN,
        Elements::Truths => OF_TRUTHS,
    }
}

/// An op that is its expression.
struct Map {
    expression: Expression,
    out: DType,
    params: Vec<f32>,
    is_same_shape: bool,
}

impl Map {
    fn new(init: &KernelInit<'_>) -> Result<Map> {
        let (node, not_one) = (init.node, || Error::internal(format!("{} is not an elementwise op", init.node.op())));
        let elementwise = node.def.elementwise.ok_or_else(not_one)?;
        let text = elementwise.text(node.inputs.len()).ok_or_else(not_one)?;
        let out = node.outputs.first().ok_or_else(not_one)?.dtype;
        let params = match elementwise.parameter {
            Some(attr) => vec![init.attrs().float(attr)?],
            None => Vec::new(),
        };
        let is_same_shape = elementwise.shapes == ShapesFit::Same;
        Ok(Map { expression: Expression { name: node.op(), text }, out, params, is_same_shape })
    }
}

impl Kernel for Map {
    fn compute(&self, ctx: &mut KernelCtx<'_>) -> Result<()> {
        if self.is_same_shape && ctx.input(0)?.shape() != ctx.input(1)?.shape() {
            let (a, b) = (ctx.input(0)?.shape(), ctx.input(1)?.shape());
            return Err(Error::invalid_argument(format!("the inputs must have the same shape, found {a} and {b}")));
        }
        map_inputs(ctx, self.expression, self.out, &self.params)
    }
}

/// `ClipByValue`, whose bounds have shapes of their own.
pub(crate) struct Clip(Map);

impl Clip {
    pub(crate) fn make(init: &KernelInit<'_>) -> Result<Box<dyn Kernel>> {
        Ok(Box::new(Clip(Map::new(init)?)))
    }
}

impl Kernel for Clip {
    fn compute(&self, ctx: &mut KernelCtx<'_>) -> Result<()> {
        check_bounds(ctx)?;
        self.0.compute(ctx)
    }
}

/// `Equal` and `NotEqual`, which may compare tensors whose shapes do not fit, as a whole.
pub(crate) struct Equality {
    map: Map,
    if_shapes_differ: u8,
}

impl Equality {
    pub(crate) fn make(init: &KernelInit<'_>, if_shapes_differ: u8) -> Result<Box<dyn Kernel>> {
        Ok(Box::new(Equality { map: Map::new(init)?, if_shapes_differ }))
    }
}

impl Kernel for Equality {
    fn compute(&self, ctx: &mut KernelCtx<'_>) -> Result<()> {
        if !ctx.attrs().bool("incompatible_shape_error")?
            && broadcast_shape(ctx.input(0)?.shape(), ctx.input(1)?.shape()).is_err()
        {
            let mut out = ctx.allocate(DType::Bool, Shape::scalar())?;
            ctx.device.fill(&mut out, self.if_shapes_differ)?;
            ctx.set_output(0, out);
            return Ok(());
        }
        self.map.compute(ctx)
    }
}

const COPY: Expression = Expression { name: "copy", text: "x0" };

pub(crate) fn cast(ctx: &mut KernelCtx<'_>) -> Result<()> {
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
pub(crate) struct Like(pub f32);

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

pub(crate) fn fill(ctx: &mut KernelCtx<'_>) -> Result<()> {
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

pub(crate) fn broadcast_to(ctx: &mut KernelCtx<'_>) -> Result<()> {
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

pub(crate) fn select(ctx: &mut KernelCtx<'_>) -> Result<()> {
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

pub(crate) fn select_v2(ctx: &mut KernelCtx<'_>) -> Result<()> {
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

pub(crate) fn add_n(ctx: &mut KernelCtx<'_>) -> Result<()> {
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

pub(crate) fn bias_add(ctx: &mut KernelCtx<'_>) -> Result<()> {
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
        for op in crate::TABLE.iter().copied().flatten() {
            let Some(elementwise) = op.def.elementwise else { continue };
            // Sums of any number of inputs, and choices by another type, are other kernels.
            let Some((n, text)) = (1..4).find_map(|n| Some((n, elementwise.text(n as usize)?))) else { continue };
            let p = u32::from(elementwise.parameter.is_some());
            let dtypes = match elementwise.elements {
                Elements::Floats => FLOATS,
                Elements::Numbers => NUMBERS,
                Elements::Plain => PLAIN,
                Elements::Truths => &[DType::Bool],
            };
            let is_test = op.def.signature.contains("-> (z:bool)") || op.def.signature.contains("-> (y:bool)");
            for &dtype in dtypes.iter().take(5) {
                let to = if is_test { DType::Bool } else { dtype };
                let width = 16 / dtype.size().unwrap_or(16) as u32;
                let variant = n | p << 4 | width << 8;
                let key = ProgramKey { family: "map", op: op.def.name, dtypes: [Some(dtype), Some(to), None], variant };
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
