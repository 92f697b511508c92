//! `NthElement`: of each vector in the last dimension, the element that would be at place `n` if it were sorted.

use half::{bf16, f16};
use kolo_core::{Error, PartialShape, Result, Shape};
use kolo_device::cpu::looking;
use kolo_graph::{Gradient, HalfSafety, IntoOutput, OpDef, Output};

use crate::array::cast::cast;
use crate::array::elements::integer;
use crate::array::expand_dims::expand_dims;
use crate::math::binary::first;
use crate::math::compare::equal;
use crate::math::number::Number;
use crate::math::reduce::sum::sum;
use crate::op::{Gpu, KernelDef, Op, cpu_kernels};
use crate::{Cost, KernelCtx};

/// The `n`-th smallest element of each vector in the last dimension of `x`, counted from 0.
#[track_caller]
pub fn nth_element<'g>(x: Output<'g>, n: impl IntoOutput<'g>) -> Output<'g> {
    let graph = x.graph();
    graph.op("NthElement").input(x).input(n.into_output(graph, kolo_core::DType::I32)).out()
}

pub(crate) static NTH_ELEMENT: Op = Op {
    def: OpDef {
        name: "NthElement",
        signature: "(input:T, n:int32) -> (values:T) ; reverse:bool=false, T:type{real}",
        shape: |ctx| {
            let input = ctx.input_of_rank_at_least(0, 1)?;
            ctx.input_of_rank(1, 0)?;
            let Some([outer @ .., size]) = input.dims() else { return Ok(vec![PartialShape::unknown()]) };
            if let Some([n]) = ctx.constant_integers(1).as_deref() {
                check_place(*n, *size)?;
            }
            Ok(vec![PartialShape::new(outer)])
        },
        // Elements that are equal to the one that was found share its gradient.
        gradient: Gradient::Rule(|op, dy| {
            let dy = first(dy)?;
            let is_found = cast(equal(expand_dims(op.output(0), -1), op.input(0)), dy.dtype());
            let share = is_found / expand_dims(sum(is_found, &[-1]), -1);
            Ok(vec![Some((share * expand_dims(dy, -1)).into()), None])
        }),
        half: HalfSafety::Neutral,
        host_args: &["n"],
        ..OpDef::BASE
    },
    kernels: KERNELS,
    gpu: Gpu::Missing,
    cost: Cost::Heavy,
};

fn check_place(n: i64, size: Option<usize>) -> Result<()> {
    if n < 0 {
        return Err(Error::invalid_argument(format!("n must be non-negative, got {n}")));
    }
    match size {
        Some(size) if n >= size as i64 => {
            Err(Error::invalid_argument(format!("Input must have last dimension > n = {n} but is {size}")))
        }
        _ => Ok(()),
    }
}

fn forward<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (input, n) = (ctx.input(0)?, ctx.input(1)?);
    if n.shape().rank() != 0 {
        return Err(Error::invalid_argument(format!("N must be scalar but has rank {}", n.shape().rank())));
    }
    let n = integer(n)?;
    let Some((&size, outer)) = input.shape().split_last() else {
        return Err(Error::invalid_argument("Input must be at least rank 1 but is rank 0"));
    };
    check_place(n, Some(size))?;
    let n = n as usize;
    let reverse = ctx.attrs().bool("reverse")?;
    let mut out = ctx.allocate(T::DTYPE, Shape::new(outer)?)?;
    let mut row = ctx.scratch(size, T::ZERO, "elements of a row")?;
    for (found, values) in looking(out.data_mut::<T>()?.iter_mut().zip(input.data::<T>()?.chunks_exact(size))) {
        row.copy_from_slice(values);
        // The key is smaller for larger numbers.
        let place = if reverse { n } else { size - 1 - n };
        *found = *row.select_nth_unstable_by_key(place, |x| x.descending_key()).1;
    }
    ctx.set_output(0, out);
    Ok(())
}

const KERNELS: &[KernelDef] = cpu_kernels!(forward: f32, f64, f16, bf16, i8, i16, i32, i64, u8, u16, u32, u64);

#[cfg(test)]
mod tests {
    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn places() {
        let rows = [[3.0f32, -1.0, 2.0], [5.0, 5.0, 4.0]];
        let case = |n: i32| check_op("NthElement").input(rows).input(n);
        case(0).gives([-1.0f32, 4.0]);
        case(1).gives([2.0f32, 5.0]);
        case(0).attr("reverse", true).gives([3.0f32, 5.0]);
        case(2).attr("reverse", true).gives([-1.0f32, 4.0]);
        check_op("NthElement").input([7i8, 120, -3]).input(1i32).gives(7i8);
        check_op("NthElement").input(tensor::<i32, 2>([0, 3], [])).input(1i32).gives(tensor::<i32, 1>([0], []));
        case(3).fails("last dimension > n = 3 but is 3");
        case(-1).fails("non-negative, got -1");
        check_op("NthElement").input(1.0f32).input(0i32).fails("rank");
    }

    #[test]
    fn gradients() {
        check_op("NthElement").input(wavy([2, 4], 1)).input(1i32).gradient();
        check_op("NthElement").input(wavy([3], 1)).input(0i32).attr("reverse", true).gradient();
    }
}
