//! `Cumsum`, `Cumprod`: running sums and products along an axis.

use half::{bf16, f16};
use kolo_core::{Error, Result};
use kolo_device::cpu::{pool, stop_if_asked};
use kolo_graph::shape_fns::resolve_axis;
use kolo_graph::{Gradient, HalfSafety, OpDef, Operation, Output, shape_fns};

use crate::array::elements::BETWEEN_LOOKS;
use crate::math::arithmetic::div_no_nan;
use crate::math::binary::first;
use crate::math::number::Number;
use crate::op::{Gpu, KernelDef, Op, cpu_kernels};
use crate::{Cost, KernelCtx};

/// Running sums along `axis`.
#[track_caller]
pub fn cumsum(x: Output<'_>, axis: i32) -> Output<'_> {
    x.graph().op("Cumsum").input(x).input(x.graph().constant(axis)).out()
}

/// Running products along `axis`.
#[track_caller]
pub fn cumprod(x: Output<'_>, axis: i32) -> Output<'_> {
    x.graph().op("Cumprod").input(x).input(x.graph().constant(axis)).out()
}

pub(crate) static CUMSUM: Op = cumulate(
    "Cumsum",
    SUM_KERNELS,
    // What an element is added to is what comes after it.
    Gradient::Rule(|op, dy| Ok(vec![Some(back(op, first(dy)?).into()), None])),
)
.half(HalfSafety::Wide);
pub(crate) static CUMPROD: Op = cumulate(
    "Cumprod",
    PROD_KERNELS,
    // As TensorFlow's, which is 0 rather than right where x is 0.
    Gradient::Rule(|op, dy| {
        let sums = back(op, op.output(0) * first(dy)?);
        Ok(vec![Some(div_no_nan(sums, op.input(0)).into()), None])
    }),
)
.half(HalfSafety::Wide);

const fn cumulate(name: &'static str, kernels: &'static [KernelDef], gradient: Gradient) -> Op {
    Op {
        def: OpDef {
            name,
            signature: "(x:T, axis:Tidx) -> (out:T) ; \
                        exclusive:bool=false, reverse:bool=false, T:type{num}, Tidx:type{int32,int64}=int32",
            shape: shape_fns::same_as_input_0,
            gradient,
            ..OpDef::BASE
        },
        kernels,
        gpu: Gpu::Missing,
        cost: Cost::Elements,
    }
}

/// The running sums of `x` in the opposite direction.
fn back<'g>(op: Operation<'g>, x: Output<'g>) -> Output<'g> {
    let flag = |name: &str| op.attrs(|attrs| attrs.bool(name).unwrap_or(false));
    let builder = op.graph().op("Cumsum").input(x).input(op.input(1));
    builder.attr("exclusive", flag("exclusive")).attr("reverse", !flag("reverse")).out()
}

fn run<T: Number>(ctx: &mut KernelCtx<'_>, start: T, join: impl Fn(T, T) -> T + Sync) -> Result<()> {
    let shape = ctx.input(0)?.shape().clone();
    let axis = match ctx.integers(1)?.as_slice() {
        [axis] => *axis,
        _ => return Err(Error::invalid_argument("axis must be a scalar")),
    };
    let exclusive = ctx.attrs().bool("exclusive")?;
    let reverse = ctx.attrs().bool("reverse")?;
    if shape.rank() == 0 || shape.n_elements() == 0 {
        // TensorFlow leaves a scalar as it is, whatever the axis and flags.
        return ctx.forward(0, 0);
    }
    let axis = resolve_axis(axis, shape.rank())?;
    let (n, inner) = (shape[axis], shape[axis + 1..].iter().product::<usize>());
    let (mut out, in_place) = ctx.reuse_or_allocate(0, T::DTYPE, shape)?;
    if !in_place {
        ctx.pool().copy(out.host_bytes_mut()?, ctx.input(0)?.host_bytes()?);
    }
    let size = n * inner;
    let blocks_per_task = (pool::grain(1.0) / size).max(1);
    ctx.pool().for_each_chunk(out.data_mut::<T>()?, blocks_per_task * size, |_, blocks| {
        let mut sums = vec![start; inner];
        for block in blocks.chunks_exact_mut(size) {
            sums.fill(start);
            let mut step = |row: &mut [T]| {
                for (sum, y) in sums.iter_mut().zip(row) {
                    let next = join(*sum, *y);
                    *y = if exclusive { *sum } else { next };
                    *sum = next;
                }
            };
            let part = (BETWEEN_LOOKS / inner).max(1) * inner;
            match reverse {
                false => block.chunks_mut(part).for_each(|part| {
                    stop_if_asked();
                    part.chunks_exact_mut(inner).for_each(&mut step);
                }),
                true => block.rchunks_mut(part).for_each(|part| {
                    stop_if_asked();
                    part.chunks_exact_mut(inner).rev().for_each(&mut step);
                }),
            }
        }
    });
    ctx.set_output(0, out);
    Ok(())
}

fn sum_kernel<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    run::<T>(
        ctx,
        T::ZERO,
        #[inline(always)]
        |a, b| a.add(b),
    )
}

fn prod_kernel<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    run::<T>(
        ctx,
        T::ONE,
        #[inline(always)]
        |a, b| a.mul(b),
    )
}

const SUM_KERNELS: &[KernelDef] = cpu_kernels!(sum_kernel: f32, f64, i32, i64, u64; f16, bf16, i8, i16, u8, u16, u32);
const PROD_KERNELS: &[KernelDef] = cpu_kernels!(prod_kernel: f32, f64, i32, i64, u64; f16, bf16, i8, i16, u8, u16, u32);

#[cfg(test)]
mod tests {
    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn running_sums_and_products() {
        let x = [2.0f32, 3.0, 4.0];
        let test = |op: &str, exclusive: bool, reverse: bool| {
            check_op(op).attr("exclusive", exclusive).attr("reverse", reverse).input(x).input(0i32)
        };
        test("Cumsum", false, false).gives([2.0f32, 5.0, 9.0]);
        test("Cumsum", true, false).gives([0.0f32, 2.0, 5.0]);
        test("Cumsum", false, true).gives([9.0f32, 7.0, 4.0]);
        test("Cumsum", true, true).gives([7.0f32, 4.0, 0.0]);
        test("Cumprod", false, false).gives([2.0f32, 6.0, 24.0]);
        test("Cumprod", true, false).gives([1.0f32, 2.0, 6.0]);
        test("Cumprod", false, true).gives([24.0f32, 12.0, 4.0]);
        test("Cumprod", true, true).gives([12.0f32, 4.0, 1.0]);
    }

    #[test]
    fn along_any_axis() {
        let x = [[1i32, 2, 3], [4, 5, 6]];
        check_op("Cumsum").input(x).input(0i64).gives([[1i32, 2, 3], [5, 7, 9]]);
        check_op("Cumsum").input(x).input(-1i32).gives([[1i32, 3, 6], [4, 9, 15]]);
        check_op("Cumsum").input(3i32).input(0i32).gives(3i32);
        check_op("Cumsum").input(tensor::<f32, 2>([2, 0], [])).input(1i32).gives(tensor::<f32, 2>([2, 0], []));
        check_op("Cumsum").input(x).input(2i32).fails("axis 2 is out of range for rank 2");
    }

    #[test]
    fn many_short_rows_each_begin_anew() {
        let rows = 20_001;
        let expected: Vec<i32> = (0..rows).flat_map(|_| [1, 2, 3]).collect();
        check_op("Cumsum")
            .input(tensor([rows, 3], vec![1i32; rows * 3]))
            .input(1i32)
            .gives(tensor([rows, 3], expected));
    }

    #[test]
    fn gradients() {
        for op in ["Cumsum", "Cumprod"] {
            for exclusive in [false, true] {
                for reverse in [false, true] {
                    for axis in [0i32, 1] {
                        check_op(op)
                            .attr("exclusive", exclusive)
                            .attr("reverse", reverse)
                            .input(wavy([3, 3], 1))
                            .input(axis)
                            .gradient();
                    }
                }
            }
        }
    }
}
