//! `AddN` and `AccumulateNV2`: the sum of many tensors of one shape, in one pass.

use half::{bf16, f16};
use kolo_core::{DType, Error, Result};
use kolo_device::cpu::pool;
use kolo_device::cpu::stream::{can_stream_by, is_streamed, stream_by};
use kolo_graph::{Elementwise, Grad, Gradient, HalfSafety, HostRule, OpDef, Operation, Output, shape_fns};

use crate::cuda::map::{COPY, Expression, run};
use crate::cuda::{NUMBERS, gpu};
use crate::math::binary::first;
use crate::math::elementwise::{FLOATS, fill_past, lanes};
use crate::math::number::Number;
use crate::op::{Gpu, KernelDef, Op, cpu_kernels, gpu_kernel};
use crate::{Cost, KernelCtx, Value};

/// The sum of `xs`, of which there is at least one, all of one shape.
#[track_caller]
pub fn add_n<'g>(xs: &[Output<'g>]) -> Result<Output<'g>> {
    let Some(x) = xs.first() else {
        return Err(Error::invalid_argument("add_n needs at least one input"));
    };
    Ok(x.graph().op("AddN").inputs(xs.iter().copied()).out())
}

pub(crate) static ADD_N: Op = Op {
    def: OpDef {
        name: "AddN",
        signature: "(inputs:N*T) -> (sum:T) ; N:int>=1, T:type{num,variant}",
        shape: shape_fns::all_same,
        gradient: Gradient::Rule(gradient),
        host: HostRule::SmallIntegers,
        elementwise: Some(Elementwise::sum()),
        half: HalfSafety::Safe,
        ..OpDef::BASE
    },
    kernels: KERNELS,
    gpu: Gpu::Kernels(&[gpu_kernel("T", NUMBERS, on_gpu)]),
    cost: Cost::Elements,
};

pub(crate) static ACCUMULATE_N_V2: Op = Op {
    def: OpDef {
        name: "AccumulateNV2",
        signature: "(inputs:N*T) -> (sum:T) ; N:int>=1, T:type{num}, shape:shape",
        shape: |ctx| Ok(vec![shape_fns::all_same(ctx)?[0].merge(ctx.attrs().shape("shape")?)?]),
        gradient: Gradient::Rule(gradient),
        half: HalfSafety::Safe,
        ..OpDef::BASE
    },
    kernels: KERNELS,
    gpu: Gpu::Kernels(&[gpu_kernel("T", NUMBERS, on_gpu)]),
    cost: Cost::Elements,
};

fn gradient<'g>(op: Operation<'g>, dy: &[Option<Output<'g>>]) -> Result<Vec<Option<Grad<'g>>>> {
    Ok(vec![Some(first(dy)?.into()); op.n_inputs()])
}

const KERNELS: &[KernelDef] = cpu_kernels!(forward: f32, f64, i32, i64, u64; f16, bf16, i8, i16, u8, u16, u32);

fn forward<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let n = ctx.n_inputs();
    let shape = ctx.input(0)?.shape().clone();
    for i in 1..n {
        let other = ctx.input(i)?.shape();
        if *other != shape {
            return Err(Error::invalid_argument(format!(
                "Inputs to operation AddN must have the same size and shape. Input 0: {shape} != input {i}: {other}"
            )));
        }
    }
    if n == 1 {
        return ctx.forward(0, 0);
    }
    // The first input that dies here holds the sum. Order does not matter: a + b is b + a, and the rest follow in turn.
    let mut into = None;
    for i in 0..2 {
        if let Value::Tensor(tensor) = &mut ctx.inputs[i]
            && tensor.is_unique()
        {
            into = Some(i);
            break;
        }
    }
    let pool = ctx.pool();
    // A task reads one chunk of every input.
    let ns = 0.15 * n as f64;
    let chunk = if into.is_some() { pool::grain(ns) } else { pool::fill_grain::<T>(shape.n_elements(), ns) };
    let mut out = match into {
        Some(i) => ctx.take_input(i)?,
        None => ctx.allocate(T::DTYPE, shape)?,
    };
    let others: Vec<&[T]> = (0..n).filter(|&i| Some(i) != into).map(|i| ctx.data::<T>(i)).collect::<Result<_>>()?;
    // By `if const`, so that it is compiled for floats alone.
    if const { matches!(T::DTYPE, DType::F32) } {
        let target = out.data_mut::<T>()?;
        if into.is_none() && can_stream_by() && is_streamed(size_of_val(target)) {
            fill_past(pool, target, &|at, sum| sum_past(sum, &others, at));
            ctx.set_output(0, out);
            return Ok(());
        }
    }
    let each = |at: usize, sum: &mut [T]| {
        let (start, end) = (at * chunk, at * chunk + sum.len());
        lanes::<T, _>(
            #[inline(always)]
            || {
                // A piece of the sum stays in the first cache until all have been added to it.
                let pieces = (start..end).step_by(PIECE).map(|at| at..end.min(at + PIECE));
                for (sum, piece) in sum.chunks_mut(PIECE).zip(pieces) {
                    let mut rest = others.iter().map(|other| &other[piece.clone()]);
                    match (into, rest.next()) {
                        (None, Some(first)) => match (rest.next(), rest.next()) {
                            (Some(second), Some(third)) => {
                                for (((sum, &a), &b), &c) in sum.iter_mut().zip(first).zip(second).zip(third) {
                                    *sum = a.add(b).add(c);
                                }
                            }
                            (Some(second), None) => {
                                for ((sum, &a), &b) in sum.iter_mut().zip(first).zip(second) {
                                    *sum = a.add(b);
                                }
                            }
                            (None, _) => sum.copy_from_slice(first),
                        },
                        (Some(_), Some(first)) => add_to(sum, first),
                        (_, None) => {}
                    }
                    rest.for_each(|other| add_to(sum, other));
                }
            },
        );
    };
    match into {
        Some(_) => pool.for_each_chunk(out.data_mut::<T>()?, chunk, each),
        None => pool.fill_chunks(out.data_mut::<T>()?, chunk, &each),
    }
    ctx.set_output(0, out);
    Ok(())
}

/// Sets `sum` to that of all inputs from `start` on, past the caches.
fn sum_past<T: Number>(sum: &mut [T], inputs: &[&[T]], start: usize) {
    let line = |at: usize| {
        let mut values = [T::ZERO; FLOATS];
        for (i, input) in inputs.iter().enumerate() {
            let Some(input) = input[start + at..].first_chunk::<FLOATS>() else { break };
            for (sum, &x) in values.iter_mut().zip(input) {
                *sum = if i == 0 { x } else { sum.add(x) };
            }
        }
        values
    };
    // The first one is taken as it is: 0 + −0 would lose its sign.
    let one = |at: usize| inputs.iter().map(|input| input[start + at]).reduce(T::add).unwrap_or(T::ZERO);
    stream_by(sum, line, one);
}

/// Elements of the sum that are made at a time.
const PIECE: usize = 2048;

#[inline(always)]
fn add_to<T: Number>(sum: &mut [T], other: &[T]) {
    for (a, &b) in sum.iter_mut().zip(other) {
        *a = a.add(b);
    }
}

fn on_gpu(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let n = ctx.n_inputs();
    let shape = ctx.input(0)?.shape().clone();
    for i in 1..n {
        if *ctx.input(i)?.shape() != shape {
            return Err(Error::invalid_argument(format!(
                "Inputs to operation {} must have the same size and shape.  Input 0: {shape} != input {i}: {}",
                ctx.node.name,
                ctx.input(i)?.shape()
            )));
        }
    }
    if n == 1 {
        return ctx.forward(0, 0);
    }
    const SUMS: [Expression; 3] = [
        Expression { name: "sum2", text: "x0 + x1" },
        Expression { name: "sum3", text: "x0 + x1 + x2" },
        Expression { name: "sum4", text: "x0 + x1 + x2 + x3" },
    ];
    let dtype = ctx.input(0)?.dtype();
    let (mut out, in_place) = ctx.reuse_or_allocate(0, dtype, shape)?;
    let device = gpu(ctx)?;
    // Four at a time; the first is the output itself once it holds a sum.
    let mut next = if in_place { 1 } else { 0 };
    let mut has_sum = in_place;
    while next < n {
        let mut inputs = Vec::with_capacity(4);
        if has_sum {
            inputs.push(None);
        }
        while inputs.len() < 4 && next < n {
            inputs.push(Some(ctx.input(next)?));
            next += 1;
        }
        match inputs.len() {
            1 => run(device, COPY, &inputs, &mut out, &[])?,
            k => run(device, SUMS[k - 2], &inputs, &mut out, &[])?,
        }
        has_sum = true;
    }
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::{PartialShape, Tensor};

    use crate::testing::{check_op, tensor, wavy};

    /// The order of a sum decides its last bits, so it must not depend on how the graph is walked.
    #[test]
    fn gradients_are_summed_from_the_last_described_consumer_to_the_first() {
        let g = crate::graph();
        let x = g.placeholder::<f32>("x", [2usize]);
        let [a, b, c] = ["Neg", "Exp", "Tanh"].map(|op| g.op(op).name(op).input(x).out());
        let y = c + (a + b);
        let grad = kolo_graph::gradients(&[y], &[x]).unwrap()[0].unwrap().dense().unwrap();
        let nodes = g.snapshot();
        let sum = nodes.node(grad.endpoint().node);
        let parts: Vec<&str> = sum.inputs.iter().map(|at| &*nodes.node(at.node).name).collect();
        assert_eq!(sum.op(), "AddN");
        let of = |part: &str| ["Tanh_grad", "Exp_grad", "Neg_grad"].iter().position(|scope| part.contains(scope));
        assert_eq!(parts.iter().map(|part| of(part)).collect::<Vec<_>>(), [Some(0), Some(1), Some(2)], "{parts:?}");
    }

    #[test]
    fn add_n() {
        check_op("AddN").input([1.0f32, 2.0]).gives([1.0f32, 2.0]);
        check_op("AddN").input([1.0f32, 2.0]).input([3.0f32, 4.0]).input([10.0f32, 20.0]).gives([14.0f32, 26.0]);
        check_op("AddN")
            .input(tensor::<i32, 1>([0], []))
            .input(tensor::<i32, 1>([0], []))
            .gives(tensor::<i32, 1>([0], []));
        check_op("AddN").input([1.0f32]).input([1.0f32, 2.0]).fails("not compatible");
        check_op("AccumulateNV2")
            .attr("shape", PartialShape::from([2usize]))
            .input([1i64, 2])
            .input([3i64, 4])
            .gives([4i64, 6]);
    }

    #[test]
    fn large_sums_have_no_gaps() {
        let n = 100_003;
        let x: Vec<f32> = (0..n).map(|i| (i % 1000) as f32).collect();
        let expected: Vec<f32> = x.iter().map(|x| x * 5.0).collect();
        (0..5).fold(check_op("AddN"), |test, _| test.input(x.clone())).gives(Tensor::from(expected));
    }

    /// Results of this size go past the caches.
    #[test]
    fn huge_sums_have_no_gaps() {
        let n = (16 << 18) + 21;
        let x: Vec<f32> = (0..n).map(|i| (i % 1000) as f32).collect();
        let y: Vec<f32> = (0..n).map(|i| (i % 77) as f32).collect();
        let sum = |scale: f32| -> Vec<f32> { x.iter().zip(&y).map(|(x, y)| x + scale * y).collect() };
        check_op("AddN").input(x.clone()).input(y.clone()).input(y.clone()).gives(Tensor::from(sum(2.0)));
        check_op("Add").input(x.clone()).input(y.clone()).gives(Tensor::from(sum(1.0)));
    }

    #[test]
    fn gradient() {
        check_op("AddN").input(wavy([3], 1)).input(wavy([3], 2)).input(wavy([3], 3)).gradient();
        check_op("AccumulateNV2")
            .attr("shape", PartialShape::from([3usize]))
            .input(wavy([3], 1))
            .input(wavy([3], 2))
            .gradient();
    }
}
