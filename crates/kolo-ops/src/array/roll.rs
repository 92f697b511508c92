//! `Roll`: elements move along dimensions, and those that leave at one end come back at the other.

use kolo_core::{Error, Result};
use kolo_device::cpu::{IntraPool, pool};
use kolo_graph::shape_fns::same_as_input_0;
use kolo_graph::{Gradient, HalfSafety, OpDef, Output};

use super::elements::{IntoInts, Item, Job, build, integers, product};
use super::view::strides;
use crate::math::binary::first;
use crate::op::{Gpu, Op, cpu_any};
use crate::{Cost, KernelCtx};

/// `x` moved by `shifts[i]` places along dimension `axes[i]`; a dimension that is named twice moves twice.
#[track_caller]
pub fn roll<'g>(x: Output<'g>, shifts: impl IntoInts<'g>, axes: impl IntoInts<'g>) -> Output<'g> {
    let graph = x.graph();
    graph.op("Roll").inputs([x, shifts.into_ints(graph), axes.into_ints(graph)]).out()
}

pub(crate) static ROLL: Op = Op {
    def: OpDef {
        name: "Roll",
        signature: "(input:T, shift:Tshift, axis:Taxis) -> (output:T) ; T:type, Tshift:type{int32,int64}, \
                    Taxis:type{int32,int64}",
        shape: |ctx| {
            ctx.input_of_rank_at_least(0, 1)?;
            for i in [1, 2] {
                if ctx.input(i).rank().is_some_and(|rank| rank > 1) {
                    return Err(Error::invalid_argument(format!(
                        "Shape must be at most rank 1 but is {}",
                        ctx.input(i)
                    )));
                }
            }
            same_as_input_0(ctx)
        },
        gradient: Gradient::Rule(|op, dy| {
            Ok(vec![Some(roll(first(dy)?, -op.input(1), op.input(2)).into()), None, None])
        }),
        half: HalfSafety::Neutral,
        host_args: &["shift", "axis"],
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward)],
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (input, shift, axis) = (ctx.input(0)?, ctx.input(1)?, ctx.input(2)?);
    let shape = input.shape();
    if shape.rank() == 0 {
        return Err(Error::invalid_argument("input must be 1-D or higher"));
    }
    for (name, found) in [("shift", shift), ("axis", axis)] {
        if found.shape().rank() > 1 {
            return Err(Error::invalid_argument(format!(
                "{name} must be a scalar or a 1-D vector. Found: {}",
                found.shape()
            )));
        }
    }
    if shift.shape() != axis.shape() {
        return Err(Error::invalid_argument("shift and axis must have the same size"));
    }
    let mut places = vec![0usize; shape.rank()];
    for (shift, axis) in integers(shift)?.into_iter().zip(integers(axis)?) {
        let from_start = if axis < 0 { axis.saturating_add(shape.rank() as i64) } else { axis };
        let Some(at) = usize::try_from(from_start).ok().filter(|&at| at < shape.rank()) else {
            return Err(Error::invalid_argument(format!("axis {from_start} is out of range")));
        };
        let n = shape[at].max(1);
        // Both are below n, and n · 2 elements of a byte would not fit memory.
        places[at] = (places[at] + shift.rem_euclid(n as i64) as usize) % n;
    }
    let Some(last) = places.iter().rposition(|&n| n > 0).filter(|_| shape.n_elements() > 0) else {
        return ctx.forward(0, 0);
    };
    let job = Rotate {
        pool: ctx.pool(),
        outer: shape
            .iter()
            .zip(strides(shape))
            .zip(&places)
            .take(last)
            .map(|((&n, s), &by)| (n, s as usize, by))
            .collect(),
        run: product(&shape[last..]),
        by: places[last] * product(&shape[last + 1..]),
    };
    let out = build(ctx, input.dtype(), shape.clone(), &[input], job)?;
    ctx.set_output(0, out);
    Ok(())
}

/// Every run is turned by the same number of elements; the dimensions before it say from which run it is.
struct Rotate<'a> {
    pool: &'a IntraPool,
    /// Sizes, steps and places of the dimensions before the run.
    outer: Vec<(usize, usize, usize)>,
    run: usize,
    by: usize,
}

impl Job for Rotate<'_> {
    fn run<E: Item>(self, out: &mut [E], inputs: &[&[E]]) -> Result<()> {
        let runs = pool::grain(0.5).div_ceil(self.run).max(1);
        self.pool.for_each_chunk(out, runs * self.run, |i, out| {
            for (k, out) in out.chunks_mut(self.run).enumerate() {
                let at = (i * runs + k) * self.run;
                let from: usize = self.outer.iter().map(|&(n, step, by)| (at / step % n + n - by) % n * step).sum();
                let (tail, head) = out.split_at_mut(self.by);
                let from = &inputs[0][from..from + self.run];
                let (kept, moved) = from.split_at(self.run - self.by);
                tail.clone_from_slice(moved);
                head.clone_from_slice(kept);
            }
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn elements_come_back_at_the_other_end() {
        let case = |shift: i32| check_op("Roll").input([0i32, 1, 2, 3, 4]).input(shift).input(0i32);
        case(2).gives([3i32, 4, 0, 1, 2]);
        case(-1).gives([1i32, 2, 3, 4, 0]);
        case(10).gives([0i32, 1, 2, 3, 4]);
        case(i32::MIN).gives([3i32, 4, 0, 1, 2]);
        let grid = || Tensor::from([[0i32, 1, 2], [3, 4, 5]]);
        let case = |shifts: [i64; 2], axes: [i64; 2]| check_op("Roll").input(grid()).input(shifts).input(axes);
        case([1, 1], [0, 1]).gives([[5i32, 3, 4], [2, 0, 1]]);
        case([1, 1], [1, -1]).gives([[1i32, 2, 0], [4, 5, 3]]);
        case([1, 0], [0, 1]).gives([[3i32, 4, 5], [0, 1, 2]]);
        check_op("Roll")
            .input(tensor::<f32, 2>([0, 3], []))
            .input(1i32)
            .input(0i32)
            .gives(tensor::<f32, 2>([0, 3], []));
        let words = |list: [&'static str; 3]| Tensor::from_strings([3], list.map(Into::into).to_vec()).unwrap();
        check_op("Roll").input(words(["a", "b", "c"])).input(1i32).input(0i32).gives(words(["c", "a", "b"]));
    }

    #[test]
    fn many_runs_agree_with_the_definition() {
        let (a, b, c) = (7usize, 50, 300);
        let x: Vec<i32> = (0..(a * b * c) as i32).collect();
        let expected: Vec<i32> = (0..a * b * c)
            .map(|i| {
                let (i, j, k) = (i / (b * c), i / c % b, i % c);
                x[(i + a - 3) % a * b * c + (j + b - 49) % b * c + (k + 1) % c]
            })
            .collect();
        check_op("Roll")
            .input(tensor([a, b, c], x))
            .input([3i32, 49, -1])
            .input([0i32, 1, 2])
            .gives(tensor([a, b, c], expected));
    }

    #[test]
    fn bad_arguments() {
        check_op("Roll").input(1i32).input(1i32).input(0i32).fails("");
        check_op("Roll").input([1i32]).input(1i32).input(1i32).fails("axis 1 is out of range");
        check_op("Roll").input([1i32]).input(1i32).input(-2i32).fails("axis -1 is out of range");
        check_op("Roll").input([1i32]).input([1i32]).input(0i32).fails("shift and axis must have the same size");
    }

    #[test]
    fn gradients() {
        check_op("Roll").input(wavy([3, 4], 0)).input([1i32, -1]).input([0i32, 1]).gradient();
    }
}
