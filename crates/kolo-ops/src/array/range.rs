//! `Range`: numbers from a start in equal steps up to a limit. `LinSpace`: a given number of them between two ends.

use half::{bf16, f16};
use kolo_core::{DType, Error, PartialShape, Result, Shape, Tensor};
use kolo_device::cpu::pool;
use kolo_graph::{Gradient, Graph, HostRule, InferCtx, OpDef, Output};

use super::cast::{Source, Target};
use super::elements::integer;
use super::fill::{ones_like, zeros_like};
use crate::math::binary::first;
use crate::op::{Gpu, Op, cpu_kernels};
use crate::{Cost, KernelCtx};

/// The integers from `start` to `limit`, without the limit.
#[track_caller]
pub fn range(graph: &Graph, start: i32, limit: i32) -> Output<'_> {
    range_by(graph.constant(start), graph.constant(limit), graph.constant(1i32))
}

/// Numbers from `start` in steps of `delta` up to `limit`, without the limit. All three are scalars of one dtype.
#[track_caller]
pub fn range_by<'g>(start: Output<'g>, limit: Output<'g>, delta: Output<'g>) -> Output<'g> {
    start.graph().op("Range").inputs([start, limit, delta]).out()
}

/// `n` numbers at equal distances, the first `start` and the last `stop`.
#[track_caller]
pub fn linspace<'g>(start: Output<'g>, stop: Output<'g>, n: i32) -> Output<'g> {
    let graph = start.graph();
    graph.op("LinSpace").inputs([start, stop, graph.constant(n)]).out()
}

pub(crate) static RANGE: Op = Op {
    def: OpDef {
        name: "Range",
        signature: "(start:Tidx, limit:Tidx, delta:Tidx) -> (output:Tidx) ; \
                    Tidx:type{bfloat16,half,float,double,int8,int16,int32,int64,uint16,uint32,uint64}=int32",
        shape: infer_range,
        gradient: Gradient::None("the number of elements depends on the ends"),
        host: HostRule::SmallIntegers,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!("Tidx", forward_range: bf16, f16, f32, f64, i8, i16, i32, i64, u16, u32),
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

pub(crate) static LIN_SPACE: Op = Op {
    def: OpDef {
        name: "LinSpace",
        signature: "(start:T, stop:T, num:Tidx) -> (output:T) ; T:type{bfloat16,half,float,double}, \
                    Tidx:type{int32,int64}=int32",
        shape: |ctx| {
            (0..3).try_for_each(|i| ctx.input_of_rank(i, 0).map(drop))?;
            let n = match ctx.constant_integers(2).as_deref() {
                Some([n]) => Some(check_number(*n)?),
                _ => None,
            };
            Ok(vec![PartialShape::new(&[n])])
        },
        // Element i is (1 − t) start + t stop, with t from 0 to 1.
        gradient: Gradient::Rule(|op, dy| {
            let (graph, dy) = (op.graph(), first(dy)?);
            let (zero, one) = (zeros_like(op.input(0)), ones_like(op.input(0)));
            let t = graph.op("LinSpace").inputs([zero, one, op.input(2)]).out();
            let sum = |x| graph.op("Sum").inputs([x, graph.constant([0i32])]).out();
            Ok(vec![Some(sum(dy * (one - t)).into()), Some(sum(dy * t).into()), None])
        }),
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(forward_linspace: bf16, f16, f32, f64),
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

fn infer_range(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    (0..3).try_for_each(|i| ctx.input_of_rank(i, 0).map(drop))?;
    let (Some(start), Some(limit), Some(delta)) = (ctx.constant(0), ctx.constant(1), ctx.constant(2)) else {
        return Ok(vec![PartialShape::of_rank(1)]);
    };
    let [start, limit, delta] = [Number::of(start)?, Number::of(limit)?, Number::of(delta)?];
    Ok(vec![PartialShape::new(&[Some(n_steps(ctx.input_dtype(0), start, limit, delta)?)])])
}

/// A number in the widest type of its kind.
#[derive(Clone, Copy)]
enum Number {
    Int(i128),
    Float(f64),
}

impl Number {
    fn of(tensor: &Tensor) -> Result<Number> {
        match tensor.dtype() {
            DType::F32 => Ok(Number::Float(tensor.scalar_value::<f32>()?.into())),
            DType::F64 => Ok(Number::Float(tensor.scalar_value::<f64>()?)),
            DType::F16 => Ok(Number::Float(tensor.scalar_value::<f16>()?.to_f64())),
            DType::BF16 => Ok(Number::Float(tensor.scalar_value::<bf16>()?.to_f64())),
            _ => Ok(Number::Int(integer(tensor)?.into())),
        }
    }

    fn float(self) -> f64 {
        match self {
            Number::Int(value) => value as f64,
            Number::Float(value) => value,
        }
    }
}

impl std::fmt::Display for Number {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Number::Int(value) => value.fmt(f),
            Number::Float(value) => value.fmt(f),
        }
    }
}

/// How many steps of `delta` begin before `limit`, as far as the dtype can tell: 0.3 is three steps of 0.1 in `float`,
/// though a closer look would find a little more.
fn n_steps(dtype: DType, start: Number, limit: Number, delta: Number) -> Result<usize> {
    let invalid = |text: String| Err(Error::invalid_argument(text));
    let (from, to, by) = (start.float(), limit.float(), delta.float());
    if by == 0.0 {
        return invalid(format!("Requires delta != 0: {delta}"));
    }
    if by > 0.0 && from > to {
        return invalid(format!("Requires start <= limit when delta > 0: {start}/{limit}"));
    }
    if by < 0.0 && from < to {
        return invalid(format!("Requires start >= limit when delta < 0: {start}/{limit}"));
    }
    let n = match (start, limit, delta) {
        (Number::Int(start), Number::Int(limit), Number::Int(delta)) => {
            usize::try_from((limit - start).unsigned_abs().div_ceil(delta.unsigned_abs())).ok()
        }
        _ => {
            let round = |x: f64| match dtype {
                DType::F32 => f64::from(x as f32),
                DType::F16 => f16::from_f64(x).to_f64(),
                DType::BF16 => bf16::from_f64(x).to_f64(),
                _ => x,
            };
            let n = round(round(to - from) / by).abs().ceil();
            // NaN fails the comparison too.
            (n < isize::MAX as f64).then_some(n as usize)
        }
    };
    n.map_or_else(|| invalid(format!("a range from {start} to {limit} by {delta} has no size")), Ok)
}

fn fill_steps<T: Send>(ctx: &KernelCtx<'_>, values: &mut [T], step: impl Fn(usize) -> T + Sync) {
    let chunk = pool::grain(1.0);
    ctx.pool().for_each_chunk(values, chunk, |task, values| {
        values.iter_mut().enumerate().for_each(|(i, y)| *y = step(task * chunk + i));
    });
}

fn forward_range<T: Source + Target>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let [start, limit, delta] = [Number::of(ctx.input(0)?)?, Number::of(ctx.input(1)?)?, Number::of(ctx.input(2)?)?];
    let mut out = ctx.allocate(T::DTYPE, Shape::new(&[n_steps(T::DTYPE, start, limit, delta)?])?)?;
    let values = out.data_mut::<T>()?;
    match (start, delta) {
        // All elements lie between the ends, so they fit.
        (Number::Int(start), Number::Int(delta)) => {
            fill_steps(ctx, values, |i| T::of((start + i as i128 * delta) as i64));
        }
        _ => {
            let (start, delta) = (start.float(), delta.float());
            fill_steps(ctx, values, |i| T::of(start + i as f64 * delta));
        }
    }
    ctx.set_output(0, out);
    Ok(())
}

fn check_number(n: i64) -> Result<usize> {
    usize::try_from(n).ok().filter(|&n| n > 0).ok_or_else(|| Error::invalid_argument(format!("Requires num > 0: {n}")))
}

fn forward_linspace<T: Source + Target>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (start, stop) = (ctx.scalar::<T>(0)?, ctx.scalar::<T>(1)?);
    let n = check_number(integer(ctx.input(2)?)?)?;
    let mut out = ctx.allocate(T::DTYPE, Shape::new(&[n])?)?;
    let values = out.data_mut::<T>()?;
    let (first, last) = (start.to_f64(), stop.to_f64());
    // With a single element there is no step, and it is the start.
    let step = (last - first) / (n.max(2) - 1) as f64;
    fill_steps(ctx, values, |i| T::of(first + i as f64 * step));
    if n > 1 {
        values[n - 1] = stop;
    }
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::Element;

    use super::*;
    use crate::testing::{check_op, tensor};

    fn check<T: Element>(start: T, limit: T, delta: T, expected: impl Into<Tensor>) {
        check_op("Range").input(start).input(limit).input(delta).gives(expected);
    }

    #[test]
    fn range() {
        check(3i32, 18, 3, [3i32, 6, 9, 12, 15]);
        check(3i64, -2, -2, [3i64, 1, -1]);
        check(0.0f32, 1.0, 0.3, [0.0f32, 0.3, 0.6, 0.9]);
        check(0.0f32, 0.3, 0.1, [0.0f32, 0.1, 0.2]);
        check(5u16, 5, 1, tensor::<u16, 1>([0], []));
        check(i64::MIN, i64::MAX, i64::MAX, [i64::MIN, -1, i64::MAX - 1]);
        check(f16::from_f32(1.0), f16::from_f32(2.0), f16::from_f32(0.5), [1.0, 1.5].map(f16::from_f32));
        check(100i8, -100, -100, [100i8, 0]);
    }

    #[test]
    fn bad_ranges_are_named() {
        let case = |start: i32, limit: i32, delta: i32| check_op("Range").input(start).input(limit).input(delta);
        case(0, 5, 0).fails("Requires delta != 0: 0");
        case(5, 3, 1).fails("Requires start <= limit when delta > 0: 5/3");
        case(3, 5, -1).fails("Requires start >= limit when delta < 0: 3/5");
        check_op("Range").input(0.0f32).input(f32::INFINITY).input(1.0f32).fails("has no size");
        check_op("Range").input(0.0f32).input(1.0f32).input(f32::NAN).fails("has no size");
        check_op("Range").input([0i32]).input(1i32).input(1i32).fails("rank 0");
    }

    #[test]
    fn linspace() {
        let case = |n: i32| check_op("LinSpace").input(0.0f32).input(1.0f32).input(n);
        case(4).gives([0.0f32, 0.333_333_34, 0.666_666_7, 1.0]);
        case(1).gives([0.0f32]);
        case(2).gives([0.0f32, 1.0]);
        case(0).fails("Requires num > 0: 0");
        check_op("LinSpace").input(5.0f64).input(-5.0f64).input(3i64).gives([5.0f64, 0.0, -5.0]);
        check_op("LinSpace").input(0.5f32).input(2.0f32).input(4i32).gradient();
        check_op("LinSpace").input(0.5f32).input(2.0f32).input(1i32).gradient();
    }
}
