//! `Select` and `SelectV2`: from one tensor where a condition holds, from another elsewhere. `Where`: the places at which
//! it holds.

use kolo_core::{DType, Element, ElementVisitor, Error, PartialShape, Result, Shape, Tensor};
use kolo_device::cpu::{IntraPool, looking, pool, stop_if_asked, vectorize};
use kolo_graph::{
    Elements, Elementwise, Grad, Gradient, HalfSafety, HostRule, InferCtx, IntoOutput, OpDef, Operation, Output,
};
use num_traits::{PrimInt, WrappingSub};

use super::broadcast::{broadcast_view, summed_to_input};
use super::elements::{Item, Job, build, product};
use super::fill::zeros_like;
use super::strided_slice::read_view;
use crate::cuda::map::{Expression, map_to, run};
use crate::cuda::{PLAIN, gpu};
use crate::math::binary::first;
use crate::math::elementwise::broadcast_shape;
use crate::op::{Gpu, Op, cpu_any, gpu_kernel};
use crate::{Cost, KernelCtx, Value};

/// `a` where `condition` holds and `b` elsewhere; all three broadcast.
#[track_caller]
pub fn select<'g>(condition: Output<'g>, a: Output<'g>, b: Output<'g>) -> Output<'g> {
    condition.graph().op("SelectV2").inputs([condition, a, b]).out()
}

/// The coordinates of the elements of `condition` that are true (or not zero), one row each.
#[track_caller]
pub fn where_true(condition: Output<'_>) -> Output<'_> {
    condition.graph().op("Where").input(condition).out()
}

pub(crate) static SELECT: Op = Op {
    def: OpDef {
        name: "Select",
        signature: "(condition:bool, t:T, e:T) -> (output:T) ; T:type",
        shape: infer_select,
        gradient: Gradient::Rule(|op, dy| {
            let dy = first(dy)?;
            let zeros = zeros_like(dy);
            let choose = |a, b| op.graph().op("Select").inputs([op.input(0), a, b]).out();
            Ok(vec![None, Some(choose(dy, zeros).into()), Some(choose(zeros, dy).into())])
        }),
        host: HostRule::SmallIntegers,
        half: HalfSafety::Neutral,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward_select)],
    gpu: Gpu::Kernels(&[gpu_kernel("T", PLAIN, select_on_gpu)]),
    cost: Cost::Elements,
};

pub(crate) static SELECT_V2: Op = Op {
    def: OpDef {
        name: "SelectV2",
        signature: "(condition:bool, t:T, e:T) -> (output:T) ; T:type",
        shape: |ctx| {
            let both = ctx.input(1).broadcast(ctx.input(2))?;
            Ok(vec![ctx.input(0).broadcast(&both)?])
        },
        gradient: Gradient::Rule(gradient_v2),
        elementwise: Some(Elementwise::new("x0 ? x1 : x2", Elements::Plain)),
        half: HalfSafety::Neutral,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward_select_v2)],
    gpu: Gpu::Kernels(&[gpu_kernel("T", PLAIN, select_v2_on_gpu)]),
    cost: Cost::Elements,
};

pub(crate) static WHERE: Op = Op {
    def: OpDef {
        name: "Where",
        signature: "(input:T) -> (index:int64) ; T:type{num,bool}=bool",
        shape: |ctx| Ok(vec![PartialShape::new(&[None, ctx.input(0).rank()])]),
        gradient: Gradient::None("indices are integers"),
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward_where)],
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

fn infer_select(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let data = ctx.input(1).merge(ctx.input(2))?;
    let condition = ctx.input(0);
    match condition.rank() {
        Some(0) | None => Ok(vec![data]),
        Some(1) => {
            // One for each row, or one for each element of vectors; either way the first sizes agree.
            if let Some(dims) = data.dims() {
                let first = dims.first().copied().ok_or_else(|| mismatch(condition, &data))?;
                condition.merge(&PartialShape::new(&[first])).map_err(|_| mismatch(condition, &data))?;
            }
            Ok(vec![data])
        }
        Some(_) => Ok(vec![data.merge(condition).map_err(|_| mismatch(condition, &data))?]),
    }
}

fn mismatch(condition: &PartialShape, data: &PartialShape) -> Error {
    Error::invalid_argument(format!(
        "the condition of a Select must be a scalar, a vector as long as the first dimension, or of the same shape; found \
         {condition} for {data}"
    ))
}

/// Each side gets the gradient where it was chosen, summed where it was repeated.
fn gradient_v2<'g>(op: Operation<'g>, dy: &[Option<Output<'g>>]) -> Result<Vec<Option<Grad<'g>>>> {
    let (graph, dy) = (op.graph(), first(dy)?);
    let zero = 0.0f32.into_output(graph, dy.dtype());
    let [a, b] = [select(op.input(0), dy, zero), select(op.input(0), zero, dy)];
    Ok(vec![None, Some(summed_to_input(op, 1, a).into()), Some(summed_to_input(op, 2, b).into())])
}

fn forward_select(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (condition, a, b) = (ctx.input(0)?, ctx.input(1)?, ctx.input(2)?);
    if a.shape() != b.shape() {
        return Err(Error::invalid_argument(format!(
            "'then' and 'else' must have the same size.  but received: {} vs. {}",
            a.shape(),
            b.shape()
        )));
    }
    if condition.shape().rank() == 0 {
        let side = if ctx.scalar::<bool>(0)? { 1 } else { 2 };
        return ctx.forward(side, 0);
    }
    let by_row = condition.shape().rank() == 1 && a.shape().first() == condition.shape().first();
    if !by_row && condition.shape() != a.shape() {
        return Err(mismatch(&condition.shape().into(), &a.shape().into()));
    }
    let per_condition = if by_row { product(&a.shape()[1..]) } else { 1 };
    let out = choose(ctx, condition, a, b, a.shape().clone(), per_condition)?;
    ctx.set_output(0, out);
    Ok(())
}

fn forward_select_v2(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (condition, a, b) = (ctx.input(0)?, ctx.input(1)?, ctx.input(2)?);
    let shape = broadcast_shape(condition.shape(), &broadcast_shape(a.shape(), b.shape())?)?;
    if condition.n_elements() == 1 {
        let side = if ctx.scalar::<bool>(0)? { 1 } else { 2 };
        if ctx.input(side)?.n_elements() == shape.n_elements() {
            let out = ctx.take_input(side)?.reshaped(shape)?;
            ctx.set_output(0, out);
            return Ok(());
        }
    }
    // Single values need no copies; anything else that is smaller than the result is repeated first.
    let widen = |tensor: &Tensor| -> Result<Tensor> {
        if tensor.n_elements() == shape.n_elements() || tensor.n_elements() == 1 {
            return Ok(tensor.clone());
        }
        read_view(ctx, tensor, &broadcast_view(tensor.shape(), &shape), shape.clone())
    };
    let condition = if condition.n_elements() == shape.n_elements() {
        condition.clone()
    } else {
        read_view(ctx, condition, &broadcast_view(condition.shape(), &shape), shape.clone())?
    };
    let out = choose(ctx, &condition, &widen(a)?, &widen(b)?, shape, 1)?;
    ctx.set_output(0, out);
    Ok(())
}

fn choose(
    ctx: &KernelCtx<'_>,
    condition: &Tensor,
    a: &Tensor,
    b: &Tensor,
    shape: Shape,
    per_condition: usize,
) -> Result<Tensor> {
    // As bytes: a slice of `bool` would be looked through for other values first.
    let condition = condition.host_bytes()?;
    if per_condition == 1
        && let Some(out) = blended(ctx, condition, a, b, &shape)?
    {
        return Ok(out);
    }
    let job = Choose { pool: ctx.pool(), condition, per_condition };
    build(ctx, a.dtype(), shape, &[a, b], job)
}

/// Elements of numbers chosen one by one: both sides are read and one of them kept, which vectors can do.
fn blended(ctx: &KernelCtx<'_>, condition: &[u8], a: &Tensor, b: &Tensor, shape: &Shape) -> Result<Option<Tensor>> {
    match a.dtype().size() {
        Some(1) => blend::<u8>(ctx, condition, a, b, shape),
        Some(2) => blend::<u16>(ctx, condition, a, b, shape),
        Some(4) => blend::<u32>(ctx, condition, a, b, shape),
        Some(8) => blend::<u64>(ctx, condition, a, b, shape),
        _ => Ok(None),
    }
}

fn blend<E: bytemuck::Pod + Default + PrimInt + WrappingSub + From<bool> + Send + Sync>(
    ctx: &KernelCtx<'_>,
    condition: &[u8],
    a: &Tensor,
    b: &Tensor,
    shape: &Shape,
) -> Result<Option<Tensor>> {
    let mut out = ctx.allocate(a.dtype(), shape.clone())?;
    fn side<E: bytemuck::Pod>(tensor: &Tensor) -> Result<Option<&[E]>> {
        Ok(bytemuck::try_cast_slice(tensor.host_bytes()?).ok())
    }
    let n = shape.n_elements();
    {
        let (Some(a), Some(b)) = (side::<E>(a)?, side::<E>(b)?) else { return Ok(None) };
        let Ok(out) = bytemuck::try_cast_slice_mut::<u8, E>(out.host_bytes_mut()?) else { return Ok(None) };
        if condition.len() != n || [a, b].iter().any(|side| side.len() != n && side.len() != 1) {
            return Ok(None);
        }
        let chunk = pool::fill_grain::<E>(n, 0.3);
        ctx.pool().fill_chunks(out, chunk, &|i, out| {
            let range = i * chunk..i * chunk + out.len();
            let condition = &condition[range.clone()];
            match (a.len() == n, b.len() == n) {
                (true, true) => choose_between(out, condition, &a[range.clone()], &b[range.clone()]),
                (true, false) => choose_or(out, condition, 1, &a[range.clone()], b[0]),
                (false, true) => choose_or(out, condition, 0, &b[range.clone()], a[0]),
                (false, false) => {
                    let (a, b) = (a[0], b[0]);
                    out.iter_mut().zip(condition).for_each(|(y, &c)| *y = if c != 0 { a } else { b });
                }
            }
        });
    }
    Ok(Some(out))
}

/// Both sides are masked and joined: a plain choice between two elements becomes one between two addresses, which vectors can
/// only follow one by one.
fn choose_between<E: PrimInt + WrappingSub + From<bool>>(out: &mut [E], condition: &[u8], a: &[E], b: &[E]) {
    vectorize(
        #[inline(always)]
        || {
            for (((y, &c), &a), &b) in out.iter_mut().zip(condition).zip(a).zip(b) {
                let mask = E::zero().wrapping_sub(&<E as From<bool>>::from(c != 0));
                *y = (a & mask) | (b & !mask);
            }
        },
    );
}

/// `side` where the condition is `when` (0 or 1), else `other`.
fn choose_or<E: Copy>(out: &mut [E], condition: &[u8], when: u8, side: &[E], other: E) {
    vectorize(
        #[inline(always)]
        || {
            for ((y, &c), &x) in out.iter_mut().zip(condition).zip(side) {
                *y = if (c != 0) == (when != 0) { x } else { other };
            }
        },
    );
}

/// Takes runs of `per_condition` elements from one input or the other; an input may be a single value.
struct Choose<'a> {
    pool: &'a IntraPool,
    condition: &'a [u8],
    per_condition: usize,
}

impl Job for Choose<'_> {
    fn run<E: Item>(self, out: &mut [E], inputs: &[&[E]]) -> Result<()> {
        let [a, b] = inputs else { return Err(Error::internal("a Select has two sides")) };
        let (n, run) = (out.len(), self.per_condition);
        let runs = pool::grain(0.5).div_ceil(run.max(1)).max(1);
        if n == 0 {
            return Ok(());
        }
        self.pool.for_each_chunk(out, runs * run, |i, out| {
            let first = i * runs;
            for (k, (out, &condition)) in out.chunks_mut(run).zip(&self.condition[first..]).enumerate() {
                let side = if condition != 0 { a } else { b };
                if side.len() == n {
                    let at = (first + k) * run;
                    out.clone_from_slice(&side[at..at + run]);
                } else {
                    out.fill(side[0].clone());
                }
            }
        });
        Ok(())
    }
}

fn forward_where(ctx: &mut KernelCtx<'_>) -> Result<()> {
    struct NotZero<'a>(&'a Tensor);
    impl ElementVisitor for NotZero<'_> {
        type Out = Vec<usize>;
        fn visit<T: Element>(self) -> Result<Vec<usize>> {
            let zero = T::default();
            const BLOCK: usize = 4096;
            let mut places = Vec::new();
            for (block, values) in self.0.data::<T>()?.chunks(BLOCK).enumerate() {
                stop_if_asked();
                let found = values.iter().enumerate().filter(|(_, x)| **x != zero);
                places.extend(found.map(|(i, _)| block * BLOCK + i));
            }
            Ok(places)
        }
    }
    let input = ctx.input(0)?;
    let places = input.dtype().visit("Where", NotZero(input))?;
    let dims = input.shape().dims();
    let mut out = ctx.allocate(kolo_core::DType::I64, Shape::new(&[places.len(), dims.len()])?)?;
    let coordinates = out.data_mut::<i64>()?;
    if !dims.is_empty() {
        for (mut place, row) in looking(places.into_iter().zip(coordinates.chunks_mut(dims.len()))) {
            for (coordinate, &dim) in row.iter_mut().zip(dims).rev() {
                *coordinate = (place % dim) as i64;
                place /= dim;
            }
        }
    }
    ctx.set_output(0, out);
    Ok(())
}

const CHOICE: Expression = Expression { name: "select", text: "x0 ? x1 : x2" };

fn select_on_gpu(ctx: &mut KernelCtx<'_>) -> Result<()> {
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
    choose_on_gpu(ctx, mask, shape)
}

fn select_v2_on_gpu(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (condition, a, b) = (ctx.input(0)?, ctx.input(1)?, ctx.input(2)?);
    let shape = broadcast_shape(condition.shape(), &broadcast_shape(a.shape(), b.shape())?)?;
    let mask = condition.clone();
    choose_on_gpu(ctx, mask, shape)
}

/// The condition is of another type than the rest, so it is read through a cast of the whole.
fn choose_on_gpu(ctx: &mut KernelCtx<'_>, mask: Tensor, shape: Shape) -> Result<()> {
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
    ctx.inputs[0] = Value::Tensor(mask);
    let expression = if dtype == DType::Bool { CHOICE } else { Expression { text: "x0 != (W)0 ? x1 : x2", ..CHOICE } };
    map_to(ctx, expression, dtype, shape, &[])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn select() {
        let case = |condition: Tensor| {
            check_op("Select").input(condition).input([[1i32, 2], [3, 4]]).input([[5i32, 6], [7, 8]])
        };
        case(Tensor::from([[true, false], [false, true]])).gives([[1i32, 6], [7, 4]]);
        case(Tensor::from([true, false])).gives([[1i32, 2], [7, 8]]);
        case(Tensor::from(false)).gives([[5i32, 6], [7, 8]]);
        case(Tensor::from([true, false, true])).fails("the condition of a Select");
        case(tensor([1, 2, 2], [true; 4])).fails("the condition of a Select");
        check_op("Select").input([true, false]).input([1i8, 2]).input([3i8, 4]).gives([1i8, 4]);
        check_op("Select").input([true]).input(1i8).input(3i8).fails("the condition of a Select");
        check_op("Select").input(true).input([1i8, 2]).input([3i8]).fails("[");
        check_op("Select").input(true).input("a").input("b").gives("a");
        let empty = || tensor::<f32, 2>([2, 0], []);
        check_op("Select").input([true, false]).input(empty()).input(empty()).gives(empty());
    }

    #[test]
    fn select_v2() {
        check_op("SelectV2").input([true, false]).input([1i32, 2]).input(0i32).gives([1i32, 0]);
        check_op("SelectV2")
            .input([[true], [false]])
            .input([1i32, 2])
            .input([[3i32, 4], [5, 6]])
            .gives([[1i32, 2], [5, 6]]);
        check_op("SelectV2").input(true).input(1.0f32).input([3.0f32, 4.0]).gives([1.0f32, 1.0]);
        check_op("SelectV2").input(false).input(1.0f32).input([3.0f32, 4.0]).gives([3.0f32, 4.0]);
        check_op("SelectV2").input([false, true]).input([1.0f32, 2.0, 3.0]).input(0.0f32).fails("[2]");
        check_op("SelectV2").input(tensor::<bool, 1>([0], [])).input(1i8).input(2i8).gives(tensor::<i8, 1>([0], []));
        let words = |list: [&'static str; 2]| Tensor::from_strings([2], list.map(Into::into).to_vec()).unwrap();
        check_op("SelectV2").input([true, false]).input(words(["a", "b"])).input("x").gives(words(["a", "x"]));
    }

    #[test]
    fn where_true() {
        check_op("Where").input([[true, false], [true, true]]).gives([[0i64, 0], [1, 0], [1, 1]]);
        check_op("Where").input([0.0f32, -0.0, f32::NAN, 2.0]).gives([[2i64], [3]]);
        check_op("Where").input([0i32, 0]).gives(tensor::<i64, 2>([0, 1], []));
        check_op("Where").input(true).gives(tensor::<i64, 2>([1, 0], []));
        check_op("Where").input(false).gives(tensor::<i64, 2>([0, 0], []));
        check_op("Where").input("a").fails("string");
    }

    #[test]
    fn gradients() {
        let both = || [wavy([2, 2], 0), wavy([2, 2], 1)];
        for condition in
            [Tensor::from([[true, false], [false, false]]), Tensor::from([true, false]), Tensor::from(true)]
        {
            let [a, b] = both();
            check_op("Select").input(condition.clone()).input(a.clone()).input(b.clone()).gradient();
            check_op("SelectV2").input(condition).input(a).input(b).gradient();
        }
        check_op("SelectV2").input([[true], [false]]).input(wavy([3], 0)).input(0.5f32).gradient();
    }
}
