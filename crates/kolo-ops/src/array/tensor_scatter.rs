//! A tensor with slices changed at coordinates: TensorScatterUpdate, Add, Sub, Min, Max, and ScatterNdNonAliasingAdd, which is the
//! addition under an older name. A slice that occurs twice is changed twice, in order.

use half::{bf16, f16};
use kolo_core::{Error, Result, Tensor};
use kolo_device::cpu::looking;
use kolo_graph::{Grad, Gradient, GradientFn, HalfSafety, InferCtx, OpDef, Operation, Output};

use super::cast::cast;
use super::elements::{Item, Job, build, product};
use super::fill::zeros_like;
use super::gather_nd::{gather_nd, rows, slices_shape};
use crate::math::binary::first;
use crate::math::compare::equal;
use crate::math::number::Number;
use crate::memory::Scratch;
use crate::op::{Gpu, KernelDef, Op, cpu_any, cpu_kernels};
use crate::{Cost, KernelCtx};

macro_rules! builders {
    ($($function:ident, $op:literal, $doc:literal;)*) => {
        $(#[doc = $doc]
        #[track_caller]
        pub fn $function<'g>(x: Output<'g>, indices: Output<'g>, updates: Output<'g>) -> Output<'g> {
            x.graph().op($op).inputs([x, indices, updates]).out()
        })*
    };
}

builders! {
    tensor_scatter_update, "TensorScatterUpdate", "`x` with `updates` in place of the slices at the coordinates `indices`.";
    tensor_scatter_add, "TensorScatterAdd", "`x` with `updates` added to the slices at the coordinates `indices`.";
    tensor_scatter_sub, "TensorScatterSub", "`x` with `updates` subtracted from the slices at the coordinates `indices`.";
    tensor_scatter_min, "TensorScatterMin", "`x` with the smaller of slices at the coordinates `indices` and `updates`.";
    tensor_scatter_max, "TensorScatterMax", "`x` with the larger of slices at the coordinates `indices` and `updates`.";
}

const ANY: &str = "(tensor:T, indices:Tindices, updates:T) -> (output:T) ; T:type, Tindices:type{int32,int64}";

pub(crate) static TENSOR_SCATTER_UPDATE: Op = scatter(
    "TensorScatterUpdate",
    "(tensor:T, indices:Tindices, updates:T) -> (output:T) ; T:type, Tindices:type{int16,int32,int64,uint16}",
    &[cpu_any(replace)],
    |op, dy| {
        let (indices, dy) = (op.input(1), first(dy)?);
        let kept = tensor_scatter_update(dy, indices, zeros_like(op.input(2)));
        three(kept, gather_nd(dy, as_coordinates(indices)))
    },
);
pub(crate) static TENSOR_SCATTER_ADD: Op = scatter("TensorScatterAdd", ANY, ADD, |op, dy| {
    let dy = first(dy)?;
    three(dy, gather_nd(dy, op.input(1)))
});
pub(crate) static TENSOR_SCATTER_SUB: Op = scatter("TensorScatterSub", ANY, SUB, |op, dy| {
    let dy = first(dy)?;
    three(dy, -gather_nd(dy, op.input(1)))
});
pub(crate) static TENSOR_SCATTER_MIN: Op = scatter("TensorScatterMin", ANY, MIN, extreme_gradient);
pub(crate) static TENSOR_SCATTER_MAX: Op = scatter("TensorScatterMax", ANY, MAX, extreme_gradient);
pub(crate) static SCATTER_ND_NON_ALIASING_ADD: Op = scatter(
    "ScatterNdNonAliasingAdd",
    "(input:T, indices:Tindices, updates:T) -> (output:T) ; T:type{num,bool}, Tindices:type{int32,int64}",
    NON_ALIASING,
    |op, dy| {
        let dy = first(dy)?;
        three(dy, gather_nd(dy, op.input(1)))
    },
);

const fn scatter(
    name: &'static str,
    signature: &'static str,
    kernels: &'static [KernelDef],
    gradient: GradientFn,
) -> Op {
    Op {
        def: OpDef {
            name,
            signature,
            shape: infer,
            gradient: Gradient::Rule(gradient),
            half: HalfSafety::Safe,
            ..OpDef::BASE
        },
        kernels,
        gpu: Gpu::Missing,
        cost: Cost::Elements,
    }
}

fn infer(ctx: &InferCtx<'_>) -> Result<Vec<kolo_core::PartialShape>> {
    let (tensor, indices) = (ctx.input(0), ctx.input_of_rank_at_least(1, 1)?);
    ctx.input(2).merge(&slices_shape(tensor, indices)?)?;
    Ok(vec![tensor.clone()])
}

fn three<'g>(tensor: Output<'g>, updates: Output<'g>) -> Result<Vec<Option<Grad<'g>>>> {
    Ok(vec![Some(tensor.into()), None, Some(updates.into())])
}

/// Indices of a type that GatherNd takes.
fn as_coordinates(indices: Output<'_>) -> Output<'_> {
    match indices.dtype() {
        kolo_core::DType::U16 => cast(indices, kolo_core::DType::I32),
        _ => indices,
    }
}

/// Those that have the value that came out share its gradient.
fn extreme_gradient<'g>(op: Operation<'g>, dy: &[Option<Output<'g>>]) -> Result<Vec<Option<Grad<'g>>>> {
    let (graph, x, indices, updates, dy) = (op.graph(), op.input(0), op.input(1), op.input(2), first(dy)?);
    let y = op.output(0);
    let is_from_x = cast(equal(x, y), dy.dtype());
    let is_from_update = cast(equal(updates, gather_nd(y, indices)), dy.dtype());
    let shape = graph.op("Shape").input(x).attr("out_type", indices.dtype()).out();
    let n = is_from_x + graph.op("ScatterNd").inputs([indices, is_from_update, shape]).out();
    three(dy * is_from_x / n, gather_nd(dy / n, indices) * is_from_update)
}

/// Which slices to change, and how long one is.
fn slices(ctx: &KernelCtx<'_>) -> Result<(usize, Scratch<usize>)> {
    let (tensor, indices, updates) = (ctx.input(0)?, ctx.input(1)?, ctx.input(2)?);
    let shape = tensor.shape();
    let (depth, rows) = rows(ctx, indices, shape, "shape")?;
    let outer = &indices.shape()[..indices.shape().rank() - 1];
    if !updates.shape().iter().eq(outer.iter().chain(&shape[depth..])) {
        return Err(Error::invalid_argument(format!(
            "Must have updates.shape = indices.shape[:batch_dim] + params_shape[slice_dim:], got updates.shape: {}, \
             indices.shape: {}, params_shape: {shape}, slice_dim: {depth}, and batch_dim: {}",
            updates.shape(),
            indices.shape(),
            outer.len()
        )));
    }
    Ok((product(&shape[depth..]), rows))
}

fn replace(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (len, rows) = slices(ctx)?;
    let (tensor, updates) = (ctx.input(0)?, ctx.input(2)?);
    let out = build(ctx, tensor.dtype(), tensor.shape().clone(), &[tensor, updates], Replace { len, rows })?;
    ctx.set_output(0, out);
    Ok(())
}

struct Replace {
    len: usize,
    rows: Scratch<usize>,
}

impl Job for Replace {
    fn run<E: Item>(self, out: &mut [E], inputs: &[&[E]]) -> Result<()> {
        out.clone_from_slice(inputs[0]);
        if self.len > 0 {
            for (&row, from) in looking(self.rows.iter().zip(inputs[1].chunks_exact(self.len))) {
                out[row * self.len..(row + 1) * self.len].clone_from_slice(from);
            }
        }
        Ok(())
    }
}

fn combine<T: kolo_core::Element>(ctx: &mut KernelCtx<'_>, f: impl Fn(T, T) -> T) -> Result<()> {
    let (len, rows) = slices(ctx)?;
    let shape = ctx.input(0)?.shape().clone();
    let (mut out, is_input): (Tensor, bool) = ctx.reuse_or_allocate(0, T::DTYPE, shape)?;
    if !is_input {
        out.data_mut::<T>()?.copy_from_slice(ctx.data::<T>(0)?);
    }
    let (to, from) = (out.data_mut::<T>()?, ctx.data::<T>(2)?);
    if len > 0 {
        for (&row, from) in looking(rows.iter().zip(from.chunks_exact(len))) {
            to[row * len..(row + 1) * len].iter_mut().zip(from).for_each(|(x, &y)| *x = f(*x, y));
        }
    }
    ctx.set_output(0, out);
    Ok(())
}

macro_rules! kernels {
    ($($table:ident, $function:ident, $f:ident;)*) => {
        $(fn $function<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
            combine::<T>(ctx, T::$f)
        }
        const $table: &[KernelDef] =
            cpu_kernels!($function: f32, f64, f16, bf16, i8, i16, i32, i64, u8, u16, u32, u64);)*
    };
}

kernels! {
    ADD, add, add;
    SUB, sub, sub;
    MIN, min, min;
    MAX, max, max;
}

const NON_ALIASING: &[KernelDef] = cpu_kernels!(
    add: f32, f64, f16, bf16, i8, i16, i32, i64, u8, u16, u32, u64
        | own crate::op::cpu(kolo_core::DType::Bool, |ctx| combine::<bool>(ctx, |a, b| a | b))
);

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn slices_change() {
        let case = |op: &str| check_op(op).input([1i32, 2, 3, 4]).input([[1i32], [3], [1]]).input([10i32, 20, -30]);
        case("TensorScatterUpdate").gives([1i32, -30, 3, 20]);
        case("TensorScatterAdd").gives([1i32, -18, 3, 24]);
        case("TensorScatterSub").gives([1i32, 22, 3, -16]);
        case("TensorScatterMin").gives([1i32, -30, 3, 4]);
        case("TensorScatterMax").gives([1i32, 10, 3, 20]);
        case("ScatterNdNonAliasingAdd").gives([1i32, -18, 3, 24]);
        check_op("TensorScatterAdd")
            .input([[1.0f32, 2.0], [3.0, 4.0]])
            .input([[1i64]])
            .input([[0.5f32, -0.5]])
            .gives([[1.0f32, 2.0], [3.5, 3.5]]);
        let words = |list: [&'static str; 2]| Tensor::from_strings([2], list.map(Into::into).to_vec()).unwrap();
        let one = Tensor::from_strings([1], vec!["c".into()]).unwrap();
        check_op("TensorScatterUpdate").input(words(["a", "b"])).input([[0i16]]).input(one).gives(words(["c", "b"]));
        check_op("ScatterNdNonAliasingAdd").input([false, true]).input([[0i32]]).input([true]).gives([true, true]);
        check_op("TensorScatterAdd")
            .input([1i32])
            .input(tensor::<i32, 2>([0, 1], []))
            .input(tensor::<i32, 1>([0], []))
            .gives([1i32]);
    }

    #[test]
    fn bad_coordinates() {
        let case = |index: i32| check_op("TensorScatterAdd").input([1i32, 2]).input([[index]]);
        case(2).input([1i32]).fails("indices[0] = [2] does not index into shape [2]");
        case(-1).input([1i32]).fails("indices[0] = [-1] does not index into shape [2]");
        case(0).input([1i32, 2]).fails("");
    }

    #[test]
    fn gradients() {
        let ops = ["Add", "Sub", "Min", "Max"].map(|verb| format!("TensorScatter{verb}"));
        for op in ops.iter().map(String::as_str).chain(["ScatterNdNonAliasingAdd"]) {
            check_op(op).input(wavy([4], 1)).input([[1i32], [3], [1]]).input(wavy([3], 2)).gradient();
            check_op(op).input(wavy([2, 2], 1)).input([[1i64]]).input(wavy([1, 2], 2)).gradient();
        }
        check_op("TensorScatterUpdate").input(wavy([4], 1)).input([[1i32], [3]]).input(wavy([2], 2)).gradient();
        check_op("TensorScatterUpdate").input(wavy([4], 1)).input([[1u16], [3]]).input(wavy([2], 2)).gradient();
    }
}
