//! `Cross`: the cross product of vectors of three elements in the last dimension.

use half::{bf16, f16};
use kolo_core::{Error, PartialShape, Result};
use kolo_device::cpu::pool;
use kolo_graph::{Gradient, HalfSafety, OpDef, Output, shape_fns};

use crate::math::binary::first;
use crate::math::number::Number;
use crate::op::{Gpu, Op, cpu_kernels};
use crate::{Cost, KernelCtx};

/// The cross products of the vectors in the last dimension of `a` and `b`, which has three elements.
#[track_caller]
pub fn cross<'g>(a: Output<'g>, b: Output<'g>) -> Output<'g> {
    a.graph().op("Cross").input(a).input(b).out()
}

pub(crate) static CROSS: Op = Op {
    def: OpDef {
        name: "Cross",
        signature: "(a:T, b:T) -> (product:T) ; T:type{real}",
        shape: |ctx| {
            let shape = shape_fns::all_same(ctx)?;
            match shape[0].dim(-1) {
                Some(n) if n != 3 => Err(not_three(&shape[0])),
                _ if shape[0].rank() == Some(0) => Err(not_three(&shape[0])),
                _ => Ok(shape),
            }
        },
        gradient: Gradient::Rule(|op, dy| {
            let dy = first(dy)?;
            Ok(vec![Some(cross(op.input(1), dy).into()), Some(cross(dy, op.input(0)).into())])
        }),
        half: HalfSafety::Safe,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(forward: f32, f64, i32, i64, u64; f16, bf16, i8, i16, u8, u16, u32),
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

fn not_three(shape: &PartialShape) -> Error {
    Error::invalid_argument(format!("Cross-products are only defined for 3-element vectors, found {shape}"))
}

fn forward<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let shape = ctx.input(0)?.shape().clone();
    if *ctx.input(1)?.shape() != shape {
        let other = ctx.input(1)?.shape();
        return Err(Error::invalid_argument(format!("Both inputs must be of same shape: {shape} vs. {other}")));
    }
    if shape.last() != Some(&3) {
        return Err(not_three(&shape.into()));
    }
    let mut out = ctx.allocate(T::DTYPE, shape)?;
    let (a, b) = (ctx.data::<T>(0)?, ctx.data::<T>(1)?);
    let chunk = pool::grain(1.0).next_multiple_of(3);
    ctx.pool().for_each_chunk(out.data_mut::<T>()?, chunk, |task, out| {
        let range = task * chunk..task * chunk + out.len();
        let (a, b) = (a[range.clone()].as_chunks::<3>().0, b[range].as_chunks::<3>().0);
        for ((y, a), b) in out.as_chunks_mut::<3>().0.iter_mut().zip(a).zip(b) {
            let minor = |i: usize, j: usize| a[i].mul(b[j]).sub(a[j].mul(b[i]));
            *y = [minor(1, 2), minor(2, 0), minor(0, 1)];
        }
    });
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn products() {
        check_op("Cross").input([1.0f32, 0.0, 0.0]).input([0.0f32, 1.0, 0.0]).gives([0.0f32, 0.0, 1.0]);
        check_op("Cross")
            .input([[1i32, 2, 3], [4, 5, 6]])
            .input([[4i32, 5, 6], [1, 2, 3]])
            .gives([[-3i32, 6, -3], [3, -6, 3]]);
        check_op("Cross")
            .input(tensor::<f32, 2>([0, 3], []))
            .input(tensor::<f32, 2>([0, 3], []))
            .gives(tensor::<f32, 2>([0, 3], []));
        check_op("Cross").input([1.0f32, 2.0]).input([1.0f32, 2.0]).fails("only defined for 3-element vectors");
        check_op("Cross").input(1.0f32).input(1.0f32).fails("only defined for 3-element vectors");
    }

    #[test]
    fn gradient() {
        check_op("Cross").input(wavy([2, 3], 1)).input(wavy([2, 3], 2)).gradient();
    }
}
