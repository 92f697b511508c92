//! `InplaceUpdate`, `InplaceAdd`, `InplaceSub`: rows of a tensor replaced, added to, subtracted from. `Empty`: a tensor to begin
//! with. `DeepCopy`: a copy of one. TensorFlow's write over their input; here a tensor never changes while somebody else holds it,
//! and its memory is used again where nobody does.

use half::{bf16, f16};
use kolo_core::{Element, Error, Result, Shape};
use kolo_device::cpu::looking;
use kolo_graph::{Gradient, InferCtx, OpDef, shape_fns};

use super::elements::{Item, Job, build, integers, product};
use crate::math::number::Number;
use crate::op::{Gpu, KernelDef, Op, cpu_any, cpu_kernels};
use crate::{Cost, KernelCtx};

const ROWS: &str = "(x:T, i:int32, v:T) -> (y:T) ; T:type";

pub(crate) static INPLACE_UPDATE: Op = rows_op("InplaceUpdate", &[cpu_any(replace)]);
pub(crate) static INPLACE_ADD: Op = rows_op("InplaceAdd", ADD);
pub(crate) static INPLACE_SUB: Op = rows_op("InplaceSub", SUB);

const fn rows_op(name: &'static str, kernels: &'static [KernelDef]) -> Op {
    Op {
        def: OpDef {
            name,
            signature: ROWS,
            shape: infer,
            gradient: Gradient::None("TensorFlow takes it for a write, through which no gradient passes"),
            ..OpDef::BASE
        },
        kernels,
        gpu: Gpu::Missing,
        cost: Cost::Elements,
    }
}

pub(crate) static EMPTY: Op = Op {
    def: OpDef {
        name: "Empty",
        signature: "(shape:int32) -> (output:dtype) ; dtype:type, init:bool=false",
        shape: |ctx| {
            ctx.input_of_rank(0, 1)?;
            shape_fns::from_shape_input(ctx)
        },
        gradient: Gradient::None("the result does not depend on the values"),
        stateful: true,
        host_args: &["shape"],
        ..OpDef::BASE
    },
    // Zeros with `init` and without: nobody reads what is undefined, and a graph must not find what another left in memory.
    kernels: &[cpu_any(|ctx| {
        if ctx.input(0)?.shape().rank() != 1 {
            return Err(Error::invalid_argument(format!(
                "shape must be a vector of int32, got shape {}",
                ctx.input(0)?.shape()
            )));
        }
        let shape = Shape::from_signed(&integers(ctx.input(0)?)?)?;
        let out = ctx.allocate_zeroed(ctx.attrs().dtype("dtype")?, shape)?;
        ctx.set_output(0, out);
        Ok(())
    })],
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

pub(crate) static DEEP_COPY: Op = Op {
    def: OpDef {
        name: "DeepCopy",
        signature: "(x:T) -> (y:T) ; T:type",
        shape: shape_fns::same_as_input_0,
        gradient: Gradient::None("TensorFlow lets none pass"),
        stateful: true,
        ..OpDef::BASE
    },
    // Tensors do not change, so that sharing one is as good.
    kernels: &[cpu_any(|ctx| ctx.forward(0, 0))],
    gpu: Gpu::Missing,
    cost: Cost::Inline,
};

fn infer(ctx: &InferCtx<'_>) -> Result<Vec<kolo_core::PartialShape>> {
    ctx.input_of_rank_at_least(0, 1)?;
    shape_fns::same_as_input_0(ctx)
}

/// Which rows to change, and how long one is.
fn rows(ctx: &KernelCtx<'_>) -> Result<(usize, Vec<usize>)> {
    let (x, i, v) = (ctx.input(0)?.shape(), ctx.input(1)?, ctx.input(2)?.shape());
    if i.shape().rank() != 1 {
        return Err(Error::invalid_argument(format!("i must be a vector. {}", i.shape())));
    }
    let (Some((&n, row)), Some((&n_rows, update))) = (x.split_first(), v.split_first()) else {
        return Err(Error::invalid_argument(format!("x and v must be at least vectors. x: {x}, v: {v}")));
    };
    if x.rank() != v.rank() {
        return Err(Error::invalid_argument(format!("x and v shape doesn't match (ranks differ): {x} vs. {v}")));
    }
    if row != update {
        return Err(Error::invalid_argument(format!("x and v shape doesn't match: {x} vs. {v}")));
    }
    let indices = integers(i)?;
    if n_rows != indices.len() {
        return Err(Error::invalid_argument(format!("i and x shape doesn't match at index 0: {} vs. {v}", i.shape())));
    }
    if n == 0 && n_rows > 0 {
        return Err(Error::invalid_argument("x has no rows to change"));
    }
    // As in TensorFlow, an index beyond the end begins anew.
    Ok((product(row), indices.into_iter().map(|i| i.rem_euclid(n.max(1) as i64) as usize).collect()))
}

fn replace(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (len, rows) = rows(ctx)?;
    let (x, v) = (ctx.input(0)?, ctx.input(2)?);
    let out = build(ctx, x.dtype(), x.shape().clone(), &[x, v], Replace { len, rows })?;
    ctx.set_output(0, out);
    Ok(())
}

struct Replace {
    len: usize,
    rows: Vec<usize>,
}

impl Job for Replace {
    fn run<E: Item>(self, out: &mut [E], inputs: &[&[E]]) -> Result<()> {
        out.clone_from_slice(inputs[0]);
        if self.len > 0 {
            for (row, from) in looking(self.rows.into_iter().zip(inputs[1].chunks_exact(self.len))) {
                out[row * self.len..(row + 1) * self.len].clone_from_slice(from);
            }
        }
        Ok(())
    }
}

fn combine<T: Element>(ctx: &mut KernelCtx<'_>, f: impl Fn(T, T) -> T) -> Result<()> {
    let (len, rows) = rows(ctx)?;
    let shape = ctx.input(0)?.shape().clone();
    let (mut out, is_input) = ctx.reuse_or_allocate(0, T::DTYPE, shape)?;
    if !is_input {
        out.data_mut::<T>()?.copy_from_slice(ctx.data::<T>(0)?);
    }
    let (to, from) = (out.data_mut::<T>()?, ctx.data::<T>(2)?);
    if len > 0 {
        for (row, from) in looking(rows.into_iter().zip(from.chunks_exact(len))) {
            to[row * len..(row + 1) * len].iter_mut().zip(from).for_each(|(x, &v)| *x = f(*x, v));
        }
    }
    ctx.set_output(0, out);
    Ok(())
}

fn add<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    combine::<T>(ctx, T::add)
}

fn sub<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    combine::<T>(ctx, T::sub)
}

const ADD: &[KernelDef] = cpu_kernels!(add: f32, f64, f16, bf16, i8, i16, i32, i64, u8, u16, u32, u64);
const SUB: &[KernelDef] = cpu_kernels!(sub: f32, f64, f16, bf16, i8, i16, i32, i64, u8, u16, u32, u64);

/// Ops that are stateful by TensorFlow's table alone.
#[cfg(test)]
pub(crate) const STATEFUL_BY_NAME: [&str; 3] = ["DeepCopy", "Empty", "GuaranteeConst"];

#[cfg(test)]
mod tests {
    use kolo_core::DType;

    use crate::testing::{check_op, tensor};

    #[test]
    fn rows_change() {
        let case = |op: &str| {
            check_op(op).input([[1i32, 2], [3, 4], [5, 6]]).input([2i32, -3, 2]).input([[10i32, 20], [30, 40], [1, 1]])
        };
        case("InplaceUpdate").gives([[30i32, 40], [3, 4], [1, 1]]);
        case("InplaceAdd").gives([[31i32, 42], [3, 4], [16, 27]]);
        case("InplaceSub").gives([[-29i32, -38], [3, 4], [-6, -15]]);
        check_op("InplaceAdd").input([1.0f32]).input([0i32, 0]).input([1.0f32]).fails("doesn't match");
        check_op("InplaceAdd").input([1.0f32]).input(0i32).input([1.0f32]).fails("i must be a vector");
        check_op("InplaceUpdate").input(tensor::<f32, 1>([0], [])).input([0i32]).input([1.0f32]).fails("no rows");
    }

    #[test]
    fn new_tensors() {
        check_op("Empty").attr("dtype", DType::F32).attr("init", true).input([2i32, 1]).gives([[0.0f32], [0.0]]);
        check_op("Empty").attr("dtype", DType::F32).input([-1i32]).fails("negative");
        check_op("DeepCopy").input([1i32, 2]).gives([1i32, 2]);
    }
}
