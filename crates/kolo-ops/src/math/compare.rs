//! Comparisons of two tensors, elementwise with NumPy's broadcasting: Less, LessEqual, Greater, GreaterEqual, Equal,
//! NotEqual. NaN is unequal to everything.

use bytes::Bytes;
use half::{bf16, f16};
use kolo_core::{DType, PartialShape, Result, Shape, Tensor};
use kolo_graph::{
    Elements, Elementwise, Gradient, HalfSafety, HostRule, InferCtx, Literal, OpDef, Output, ShapeFn, shape_fns,
};

use crate::cuda::PLAIN;
use crate::cuda::elementwise::Map;
use crate::kernel::KernelInit;
use crate::math::elementwise::{Computed, Walk, broadcast_shape, collect, expression_kernels, zip};
use crate::math::number::Number;
use crate::op::{Gpu, KernelDef, KernelMaker, Op, cpu, cpu_kernels, gpu_made};
use crate::{Cost, Kernel, KernelCtx, Value};

macro_rules! builders {
    ($($function:ident, $op:literal, $doc:literal;)*) => {
        $(#[doc = $doc]
        #[track_caller]
        pub fn $function<'g>(a: Output<'g>, b: Output<'g>) -> Output<'g> {
            a.graph().op($op).input(a).input(b).out()
        })*
    };
}

builders! {
    less, "Less", "Whether `a < b`, elementwise.";
    less_equal, "LessEqual", "Whether `a <= b`, elementwise.";
    greater, "Greater", "Whether `a > b`, elementwise.";
    greater_equal, "GreaterEqual", "Whether `a >= b`, elementwise.";
    equal, "Equal", "Whether `a == b`, elementwise.";
    not_equal, "NotEqual", "Whether `a != b`, elementwise.";
}

pub(crate) static LESS: Op = comparison("Less", ORDER, shape_fns::broadcast, LESS_KERNELS)
    .host(HostRule::SmallIntegers)
    .elementwise(Elementwise::new("x0 < x1", Elements::Numbers));
pub(crate) static LESS_EQUAL: Op = comparison("LessEqual", ORDER, shape_fns::broadcast, LESS_EQUAL_KERNELS)
    .host(HostRule::SmallIntegers)
    .elementwise(Elementwise::new("x0 <= x1", Elements::Numbers));
pub(crate) static GREATER: Op = comparison("Greater", ORDER, shape_fns::broadcast, GREATER_KERNELS)
    .host(HostRule::SmallIntegers)
    .elementwise(Elementwise::new("x0 > x1", Elements::Numbers));
pub(crate) static GREATER_EQUAL: Op = comparison("GreaterEqual", ORDER, shape_fns::broadcast, GREATER_EQUAL_KERNELS)
    .host(HostRule::SmallIntegers)
    .elementwise(Elementwise::new("x0 >= x1", Elements::Numbers));
pub(crate) static EQUAL: Op = comparison("Equal", EQUALITY, equality_shape, EQUAL_KERNELS)
    .host(HostRule::SmallIntegers)
    .elementwise(Elementwise::new("x0 == x1", Elements::Plain).unless("incompatible_shape_error", Literal::Bool(false)))
    .gpu(&[gpu_made("T", PLAIN, KernelMaker::Object(|init| EqualityOnGpu::make(init, 0)))]);
pub(crate) static NOT_EQUAL: Op = comparison("NotEqual", EQUALITY, equality_shape, NOT_EQUAL_KERNELS)
    .host(HostRule::SmallIntegers)
    .elementwise(Elementwise::new("x0 != x1", Elements::Plain).unless("incompatible_shape_error", Literal::Bool(false)))
    .gpu(&[gpu_made("T", PLAIN, KernelMaker::Object(|init| EqualityOnGpu::make(init, 1)))]);

const ORDER: &str = "(x:T, y:T) -> (z:bool) ; T:type{real}";
const EQUALITY: &str = "(x:T, y:T) -> (z:bool) ; T:type, incompatible_shape_error:bool=true";

const fn comparison(name: &'static str, signature: &'static str, shape: ShapeFn, kernels: &'static [KernelDef]) -> Op {
    Op {
        def: OpDef {
            name,
            signature,
            shape,
            gradient: Gradient::None("a comparison is piecewise constant"),
            half: HalfSafety::Neutral,
            ..OpDef::BASE
        },
        kernels,
        gpu: Gpu::Unstated,
        cost: Cost::Elements,
    }
}

/// As a broadcast; with `incompatible_shape_error` off, shapes that do not fit compare as a whole.
fn equality_shape(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    if ctx.attrs().bool("incompatible_shape_error")? {
        return shape_fns::broadcast(ctx);
    }
    // Sizes that are not known yet may turn out not to fit.
    let known = ctx.input(0).known().is_some() && ctx.input(1).known().is_some();
    Ok(vec![match ctx.input(0).broadcast(ctx.input(1)) {
        Ok(shape) if known => shape,
        Err(_) => PartialShape::scalar(),
        Ok(_) => PartialShape::unknown(),
    }])
}

/// About what one element costs.
const NS: f64 = 0.3;

/// Sets output 0 to whether `f` holds for each pair. The truth values are written as bytes: a slice of `bool` would be looked
/// through for other bytes first.
fn compare<T: Computed>(ctx: &mut KernelCtx<'_>, ns: f64, f: impl Fn(T, T) -> bool + Sync + Copy) -> Result<()> {
    zip::<T, u8>(
        ctx,
        ns,
        #[inline(always)]
        |a, b| u8::from(f(a, b)),
    )?;
    if let Value::Tensor(bytes) = ctx.outputs[0].take() {
        ctx.set_output(0, bytes.bitcast(DType::Bool)?);
    }
    Ok(())
}

expression_kernels! {
    LESS_KERNELS, less_kernel: Number, compare(NS), |a, b| a < b,
        (f32, f64, i8, i16, i32, i64, u8, u16, u32, u64; f16, bf16);
    LESS_EQUAL_KERNELS, less_equal_kernel: Number, compare(NS), |a, b| a <= b,
        (f32, f64, i8, i16, i32, i64, u8, u16, u32, u64; f16, bf16);
    GREATER_KERNELS, greater_kernel: Number, compare(NS), |a, b| a > b,
        (f32, f64, i8, i16, i32, i64, u8, u16, u32, u64; f16, bf16);
    GREATER_EQUAL_KERNELS, greater_equal_kernel: Number, compare(NS), |a, b| a >= b,
        (f32, f64, i8, i16, i32, i64, u8, u16, u32, u64; f16, bf16);
}

/// Shapes that do not fit are unequal, if the node asks for that rather than for an error.
fn misfits(ctx: &mut KernelCtx<'_>, unequal: bool) -> Result<bool> {
    let fits = broadcast_shape(ctx.input(0)?.shape(), ctx.input(1)?.shape());
    if fits.is_ok() || ctx.attrs().bool("incompatible_shape_error")? {
        return fits.map(|_| false);
    }
    ctx.set_output(0, Tensor::scalar(unequal));
    Ok(true)
}

fn equal_kernel<T: Computed>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    if misfits(ctx, false)? {
        return Ok(());
    }
    compare::<T>(
        ctx,
        NS,
        #[inline(always)]
        |a, b| a == b,
    )
}

fn not_equal_kernel<T: Computed>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    if misfits(ctx, true)? {
        return Ok(());
    }
    compare::<T>(
        ctx,
        NS,
        #[inline(always)]
        |a, b| a != b,
    )
}

fn equal_strings(ctx: &mut KernelCtx<'_>) -> Result<()> {
    zip_strings(ctx, true)
}

fn not_equal_strings(ctx: &mut KernelCtx<'_>) -> Result<()> {
    zip_strings(ctx, false)
}

fn zip_strings(ctx: &mut KernelCtx<'_>, when_equal: bool) -> Result<()> {
    if misfits(ctx, !when_equal)? {
        return Ok(());
    }
    let (a, b) = (ctx.input(0)?, ctx.input(1)?);
    let shape = broadcast_shape(a.shape(), b.shape())?;
    let walk = Walk::new(&shape, a.shape(), b.shape());
    let (left, right): (&[Bytes], &[Bytes]) = (a.strings()?, b.strings()?);
    let out = collect(ctx, shape, |i| {
        let (at_a, at_b) = walk.offsets(i / walk.run);
        let within = |moves: bool| if moves { i % walk.run } else { 0 };
        (left[at_a + within(walk.inner.0)] == right[at_b + within(walk.inner.1)]) == when_equal
    })?;
    ctx.set_output(0, out);
    Ok(())
}

const EQUAL_KERNELS: &[KernelDef] = cpu_kernels!(elementwise equal_kernel: f32, f64, i8, i16, i32, i64, u8, u16, u32, u64, bool; f16, bf16 | own cpu(DType::Str, equal_strings));
const NOT_EQUAL_KERNELS: &[KernelDef] = cpu_kernels!(elementwise not_equal_kernel: f32, f64, i8, i16, i32, i64, u8, u16, u32, u64, bool; f16, bf16 | own cpu(DType::Str, not_equal_strings));

/// `Equal` and `NotEqual`, which may compare tensors whose shapes do not fit, as a whole.
struct EqualityOnGpu {
    map: Map,
    if_shapes_differ: u8,
}

impl EqualityOnGpu {
    fn make(init: &KernelInit<'_>, if_shapes_differ: u8) -> Result<Box<dyn Kernel>> {
        Ok(Box::new(EqualityOnGpu { map: Map::new(init)?, if_shapes_differ }))
    }
}

impl Kernel for EqualityOnGpu {
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

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use kolo_core::Tensor;

    use crate::testing::{check_op, tensor};

    #[test]
    fn comparisons() {
        let (a, b) = ([1.0f32, 2.0, 3.0, f32::NAN], [2.0f32, 2.0, 2.0, f32::NAN]);
        check_op("Less").input(a).input(b).gives([true, false, false, false]);
        check_op("LessEqual").input(a).input(b).gives([true, true, false, false]);
        check_op("Greater").input(a).input(b).gives([false, false, true, false]);
        check_op("GreaterEqual").input(a).input(b).gives([false, true, true, false]);
        check_op("Equal").input(a).input(b).gives([false, true, false, false]);
        check_op("NotEqual").input(a).input(b).gives([true, false, true, true]);
        check_op("Equal").input([true, false]).input(false).gives([false, true]);
        check_op("Less").input([[1i64], [3]]).input([1i64, 2]).gives([[false, true], [false, false]]);
        check_op("Less").input([1u8, 255]).input(200u8).gives([true, false]);
        check_op("Less").input(tensor::<i32, 1>([0], [])).input(1i32).gives(tensor::<bool, 1>([0], []));
        check_op("Less").input([1.0f32, 2.0]).input([1.0f32, 2.0, 3.0]).fails("do not broadcast");
    }

    #[test]
    fn strings_are_compared_by_their_bytes() {
        let words = |words: &[&'static str]| {
            Tensor::from_strings([words.len()], words.iter().map(|w| Bytes::from_static(w.as_bytes())).collect())
                .unwrap()
        };
        check_op("Equal").input(words(&["a", "b", "c"])).input("b").gives([false, true, false]);
        check_op("NotEqual").input(words(&["a", "b"])).input(words(&["a", "c"])).gives([false, true]);
    }

    #[test]
    fn shapes_that_do_not_fit_can_be_unequal() {
        let test = |op: &str| check_op(op).input([1i32, 2]).input([1i32, 2, 3]);
        test("Equal").attr("incompatible_shape_error", false).gives(false);
        test("NotEqual").attr("incompatible_shape_error", false).gives(true);
        test("Equal").fails("do not broadcast");
        check_op("Equal").attr("incompatible_shape_error", false).input([1i32, 2]).input(1i32).gives([true, false]);
    }
}
