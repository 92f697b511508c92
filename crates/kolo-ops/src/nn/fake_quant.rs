//! Values as they would come back from whole numbers of a few bits: FakeQuantWithMinMaxArgs, whose range is attributes, …Vars, whose
//! range is inputs, …VarsPerChannel, which has one for each place in the last dimension, and their gradients.
//!
//! A range is moved a little so that 0 is one of its steps (Jacob et al., 2017, section 3).

use kolo_core::{Error, PartialShape, Result, Shape, Tensor};
use kolo_graph::{Attrs, Gradient, HalfSafety, InferCtx, OpDef, ShapeFn, shape_fns};

use crate::array::elements::BETWEEN_LOOKS;
use crate::math::binary::first;
use crate::op::{Gpu, KernelDef, Op, cpu_any};
use crate::{Cost, KernelCtx};

pub(crate) static FAKE_QUANT_WITH_MIN_MAX_ARGS: Op = op(
    "FakeQuantWithMinMaxArgs",
    "(inputs:float) -> (outputs:float) ; min:float=-6.0, max:float=6.0, num_bits:int=8, narrow_range:bool=false",
    |ctx| {
        Levels::of(ctx.attrs())?;
        shape_fns::same_as_input_0(ctx)
    },
    &[cpu_any(forward_args)],
    Gradient::Rule(|op, dy| {
        let builder = op.graph().op("FakeQuantWithMinMaxArgsGradient").inputs([first(dy)?, op.input(0)]);
        let [min, max] = ["min", "max"].map(|name| op.attrs(|attrs| attrs.float(name)));
        let (bits, narrow) = op.attrs(|attrs| Ok::<_, Error>((attrs.int("num_bits")?, attrs.bool("narrow_range")?)))?;
        let dx = builder.attr("min", min?).attr("max", max?).attr("num_bits", bits).attr("narrow_range", narrow).out();
        Ok(vec![Some(dx.into())])
    }),
);
pub(crate) static FAKE_QUANT_WITH_MIN_MAX_ARGS_GRADIENT: Op = op(
    "FakeQuantWithMinMaxArgsGradient",
    "(gradients:float, inputs:float) -> (backprops:float) ; min:float=-6.0, max:float=6.0, num_bits:int=8, \
     narrow_range:bool=false",
    |ctx| {
        Levels::of(ctx.attrs())?;
        shape_fns::all_same(ctx)
    },
    &[cpu_any(backward_args)],
    AGAIN,
);
pub(crate) static FAKE_QUANT_WITH_MIN_MAX_VARS: Op = op(
    "FakeQuantWithMinMaxVars",
    "(inputs:float, min:float, max:float) -> (outputs:float) ; num_bits:int=8, narrow_range:bool=false",
    |ctx| {
        Levels::of(ctx.attrs())?;
        ctx.input_of_rank(1, 0)?;
        ctx.input_of_rank(2, 0)?;
        shape_fns::same_as_input_0(ctx)
    },
    &[cpu_any(|ctx| forward_vars(ctx, Per::Tensor))],
    Gradient::Rule(|op, dy| vars_gradient(op, first(dy)?, "FakeQuantWithMinMaxVarsGradient")),
);
pub(crate) static FAKE_QUANT_WITH_MIN_MAX_VARS_GRADIENT: Op = op(
    "FakeQuantWithMinMaxVarsGradient",
    "(gradients:float, inputs:float, min:float, max:float) -> (backprops_wrt_input:float, backprop_wrt_min:float, \
     backprop_wrt_max:float) ; num_bits:int=8, narrow_range:bool=false",
    |ctx| infer_gradient(ctx, &PartialShape::scalar()),
    &[cpu_any(|ctx| backward_vars(ctx, Per::Tensor))],
    AGAIN,
);
pub(crate) static FAKE_QUANT_WITH_MIN_MAX_VARS_PER_CHANNEL: Op = op(
    "FakeQuantWithMinMaxVarsPerChannel",
    "(inputs:float, min:float, max:float) -> (outputs:float) ; num_bits:int=8, narrow_range:bool=false",
    |ctx| {
        Levels::of(ctx.attrs())?;
        ctx.input_of_rank_at_least(0, 1)?;
        let last = ctx.input_of_rank(1, 1)?.merge(&ctx.input_of_rank(2, 1)?)?;
        last.merge(&PartialShape::new(&[ctx.input(0).dim(-1)]))?;
        shape_fns::same_as_input_0(ctx)
    },
    &[cpu_any(|ctx| forward_vars(ctx, Per::Channel))],
    Gradient::Rule(|op, dy| vars_gradient(op, first(dy)?, "FakeQuantWithMinMaxVarsPerChannelGradient")),
);
pub(crate) static FAKE_QUANT_WITH_MIN_MAX_VARS_PER_CHANNEL_GRADIENT: Op = op(
    "FakeQuantWithMinMaxVarsPerChannelGradient",
    "(gradients:float, inputs:float, min:float, max:float) -> (backprops_wrt_input:float, backprop_wrt_min:float, \
     backprop_wrt_max:float) ; num_bits:int=8, narrow_range:bool=false",
    |ctx| {
        ctx.input_of_rank_at_least(1, 1)?;
        infer_gradient(ctx, &PartialShape::new(&[ctx.input(1).dim(-1)]))
    },
    &[cpu_any(|ctx| backward_vars(ctx, Per::Channel))],
    AGAIN,
);

const AGAIN: Gradient = Gradient::Refused("the gradient of a gradient is not implemented here");

const fn op(
    name: &'static str,
    signature: &'static str,
    shape: ShapeFn,
    kernels: &'static [KernelDef],
    gradient: Gradient,
) -> Op {
    Op {
        def: OpDef { name, signature, shape, gradient, half: HalfSafety::Never, ..OpDef::BASE },
        kernels,
        gpu: Gpu::Missing,
        cost: Cost::Elements,
    }
}

fn vars_gradient<'g>(
    op: kolo_graph::Operation<'g>,
    dy: kolo_graph::Output<'g>,
    name: &str,
) -> Result<Vec<Option<kolo_graph::Grad<'g>>>> {
    let (bits, narrow) = op.attrs(|attrs| Ok::<_, Error>((attrs.int("num_bits")?, attrs.bool("narrow_range")?)))?;
    let builder = op.graph().op(name).inputs([dy, op.input(0), op.input(1), op.input(2)]);
    let grads = builder.attr("num_bits", bits).attr("narrow_range", narrow).build();
    Ok((0..3).map(|i| Some(grads.output(i).into())).collect())
}

fn infer_gradient(ctx: &InferCtx<'_>, range: &PartialShape) -> Result<Vec<PartialShape>> {
    Levels::of(ctx.attrs())?;
    let inputs = ctx.input(0).merge(ctx.input(1))?;
    let range = range.merge(ctx.input(2))?.merge(ctx.input(3))?;
    Ok(vec![inputs, range.clone(), range])
}

/// The whole numbers that stand for values.
struct Levels {
    least: f32,
    most: f32,
}

impl Levels {
    fn of(attrs: &Attrs) -> Result<Levels> {
        let bits = attrs.int("num_bits")?;
        if !(2..=16).contains(&bits) {
            return Err(Error::invalid_argument(format!("num_bits must be between 2 and 16, inclusive, was: {bits}")));
        }
        let least = if attrs.bool("narrow_range")? { 1.0 } else { 0.0 };
        Ok(Levels { least, most: ((1u32 << bits) - 1) as f32 })
    }

    /// The range moved so that 0 is a step.
    fn nudge(&self, min: f32, max: f32) -> Range {
        let scale = (max - min) / (self.most - self.least);
        let zero = (self.least - min / scale).clamp(self.least, self.most).round();
        Range { min: (self.least - zero) * scale, max: (self.most - zero) * scale, scale }
    }
}

/// Values from `min` to `max` in steps of `scale`.
#[derive(Clone, Copy)]
struct Range {
    min: f32,
    max: f32,
    scale: f32,
}

impl Range {
    fn round(&self, x: f32) -> f32 {
        let inverse = 1.0 / self.scale;
        let zero = (-self.min * inverse + 0.5).floor();
        let clamped = if x > self.max { self.max } else { x };
        let clamped = if clamped < self.min { self.min } else { clamped };
        ((clamped - self.min) * inverse - zero + 0.5).floor() * self.scale
    }

    fn contains(&self, x: f32) -> bool {
        x >= self.min && x <= self.max
    }
}

/// The range of a node whose range is attributes.
fn args_range(ctx: &KernelCtx<'_>) -> Result<Range> {
    let (min, max) = (ctx.attrs().float("min")?, ctx.attrs().float("max")?);
    if min >= max || min.is_nan() || max.is_nan() {
        return Err(Error::invalid_argument(format!("min has to be smaller than max, was: {min} >= {max}")));
    }
    Ok(Levels::of(ctx.attrs())?.nudge(min, max))
}

fn forward_args(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let range = args_range(ctx)?;
    crate::math::elementwise::map::<f32, f32>(ctx, 1.0, move |x| range.round(x))
}

fn backward_args(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let range = args_range(ctx)?;
    if ctx.input(0)?.shape() != ctx.input(1)?.shape() {
        return Err(Error::invalid_argument("gradient and input must be the same size"));
    }
    // As a product, so that what is not a number stays none.
    crate::math::elementwise::zip::<f32, f32>(ctx, 0.5, move |dy, x| if range.contains(x) { dy } else { 0.0 })
}

/// What has a range of its own.
#[derive(Clone, Copy)]
enum Per {
    /// All elements together.
    Tensor,
    /// Every place in the last dimension.
    Channel,
}

/// The ranges in inputs `at` and `at + 1`, one for each channel: `None` where both ends are 0. `x` is the input they are for.
fn ranges(ctx: &KernelCtx<'_>, at: usize, x: &Tensor, per: Per) -> Result<Vec<Option<Range>>> {
    let (min, max) = (ctx.input(at)?, ctx.input(at + 1)?);
    let expected = match (per, x.shape().last()) {
        (Per::Channel, Some(&n)) => Shape::new(&[n])?,
        (Per::Channel, None) => {
            return Err(Error::invalid_argument("inputs must have a last dimension, found a scalar"));
        }
        (Per::Tensor, _) => Shape::scalar(),
    };
    for (name, found) in [("min", min.shape()), ("max", max.shape())] {
        if *found != expected {
            return Err(Error::invalid_argument(format!(
                "{name} has incorrect shape, expected {expected} was {found}"
            )));
        }
    }
    let levels = Levels::of(ctx.attrs())?;
    let pairs = min.data::<f32>()?.iter().zip(max.data::<f32>()?);
    let ranges = pairs.map(|(&min, &max)| if min == 0.0 && max == 0.0 { None } else { Some(levels.nudge(min, max)) });
    Ok(ranges.collect())
}

fn forward_vars(ctx: &mut KernelCtx<'_>, per: Per) -> Result<()> {
    let ranges = ranges(ctx, 1, ctx.input(0)?, per)?;
    let shape = ctx.input(0)?.shape().clone();
    let mut out = ctx.allocate(kolo_core::DType::F32, shape)?;
    let (n, x) = (ranges.len().max(1), ctx.data::<f32>(0)?);
    let chunk = BETWEEN_LOOKS.next_multiple_of(n);
    ctx.pool().for_each_chunk(out.data_mut::<f32>()?, chunk, |i, out| {
        for (k, y) in out.iter_mut().enumerate() {
            *y = ranges[k % n].map_or(0.0, |range| range.round(x[i * chunk + k]));
        }
    });
    ctx.set_output(0, out);
    Ok(())
}

fn backward_vars(ctx: &mut KernelCtx<'_>, per: Per) -> Result<()> {
    let (dy, x) = (ctx.input(0)?, ctx.input(1)?);
    if dy.shape() != x.shape() {
        return Err(Error::invalid_argument("gradient and input must be the same size"));
    }
    let ranges = ranges(ctx, 2, x, per)?;
    let n = ranges.len().max(1);
    let mut dx = ctx.allocate(kolo_core::DType::F32, x.shape().clone())?;
    // In double precision, so that the order of the sum hardly matters.
    let mut sums = vec![(0.0f64, 0.0f64); ranges.len()];
    let pairs = dy.data::<f32>()?.iter().zip(x.data::<f32>()?);
    for (k, (dx, (&dy, &x))) in kolo_device::cpu::looking(dx.data_mut::<f32>()?.iter_mut().zip(pairs).enumerate()) {
        let Some(range) = ranges[k % n] else {
            *dx = dy;
            continue;
        };
        *dx = if range.contains(x) { dy } else { 0.0 };
        let (below, above) = &mut sums[k % n];
        if x < range.min {
            *below += f64::from(dy);
        }
        if x > range.max {
            *above += f64::from(dy);
        }
    }
    let shape = ctx.input(2)?.shape().clone();
    let below = Tensor::from_vec(shape.clone(), sums.iter().map(|sum| sum.0 as f32).collect())?;
    let above = Tensor::from_vec(shape, sums.iter().map(|sum| sum.1 as f32).collect())?;
    ctx.set_output(0, dx);
    ctx.set_output(1, below);
    ctx.set_output(2, above);
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::testing::{check_op, tensor};

    #[test]
    fn values_fall_on_steps() {
        // Four steps of 1 from -1 to 2: the range contains 0 already.
        let args = |op: &str| check_op(op).attr("min", -1.0f32).attr("max", 2.0f32).attr("num_bits", 2i64);
        let x = [-9.0f32, -1.0, -0.4, 0.6, 1.4, 3.0];
        args("FakeQuantWithMinMaxArgs").input(x).gives([-1.0f32, -1.0, 0.0, 1.0, 1.0, 2.0]);
        args("FakeQuantWithMinMaxArgsGradient").input([1.0f32; 6]).input(x).gives([0.0f32, 1.0, 1.0, 1.0, 1.0, 0.0]);
        // The ends are moved to -0.5 and 2.5, of which 0 is no step: to -1 and 2.
        let vars = |op: &str| check_op(op).attr("num_bits", 2i64);
        vars("FakeQuantWithMinMaxVars")
            .input(x)
            .input(-0.6f32)
            .input(2.4f32)
            .gives([-1.0f32, -1.0, 0.0, 1.0, 1.0, 2.0]);
        vars("FakeQuantWithMinMaxVars").input(x).input(0.0f32).input(0.0f32).gives([0.0f32; 6]);
        vars("FakeQuantWithMinMaxVarsGradient")
            .input([1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0])
            .input(x)
            .input(-1.0f32)
            .input(2.0f32)
            .gives_all([
                Tensor::from([0.0f32, 2.0, 3.0, 4.0, 5.0, 0.0]),
                Tensor::scalar(1.0f32),
                Tensor::scalar(6.0f32),
            ]);
    }

    #[test]
    fn channels_have_their_own_range() {
        let case = |op: &str| check_op(op).attr("num_bits", 2i64);
        let x = [[-3.0f32, 0.4], [0.6, 9.0]];
        case("FakeQuantWithMinMaxVarsPerChannel")
            .input(x)
            .input([-1.0f32, 0.0])
            .input([2.0f32, 1.5])
            .gives([[-1.0f32, 0.5], [1.0, 1.5]]);
        case("FakeQuantWithMinMaxVarsPerChannelGradient")
            .input([[1.0f32, 2.0], [3.0, 4.0]])
            .input(x)
            .input([-1.0f32, 0.0])
            .input([2.0f32, 1.5])
            .gives_all([
                Tensor::from([[0.0f32, 2.0], [3.0, 0.0]]),
                Tensor::from([1.0f32, 0.0]),
                Tensor::from([0.0f32, 4.0]),
            ]);
        let none = case("FakeQuantWithMinMaxVarsPerChannel").input(tensor::<f32, 2>([0, 1], []));
        none.input([-1.0f32]).input([1.0f32]).gives(tensor::<f32, 2>([0, 1], []));
    }

    #[test]
    fn bad_ranges() {
        check_op("FakeQuantWithMinMaxArgs").attr("min", 1.0f32).attr("max", 1.0f32).input([1.0f32]).fails("smaller");
        check_op("FakeQuantWithMinMaxArgs").attr("num_bits", 17i64).input([1.0f32]).fails("between 2 and 16");
        check_op("FakeQuantWithMinMaxVars").input([1.0f32]).input([1.0f32]).input(2.0f32).fails("");
    }
}
