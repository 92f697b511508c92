//! `BiasAdd`: a vector added along the channels. `BiasAddGrad`: the sum over everything but the channels.

use half::{bf16, f16};
use kolo_core::{Error, PartialShape, Result, Shape};
use kolo_device::cpu::{pool, vectorize};
use kolo_graph::{
    AttrValue, Elements, Elementwise, Gradient, HalfSafety, Literal, OpDef, Operation, Output, ShapesFit, SplitRule,
};
use smallvec::SmallVec;

use crate::cuda::NUMBERS;
use crate::cuda::map::{Expression, map_to};
use crate::cuda::reduce::{SUM, reduced};
use crate::math::binary::first;
use crate::math::number::Number;
use crate::nn::channels::{Channels, channel_axis, is_nchw};
use crate::nn::rows::{piece_of_run, rows_per_fill, rows_per_task};
use crate::op::{Gpu, KernelDef, Op, cpu_kernels, gpu_kernel};
use crate::{Cost, KernelCtx, Value};

/// `value` with `bias` added along its last dimension.
#[track_caller]
pub fn bias_add<'g>(value: Output<'g>, bias: Output<'g>) -> Output<'g> {
    value.graph().op("BiasAdd").input(value).input(bias).out()
}

/// `value`, whose dimension 1 are the channels, with `bias` added along that.
#[track_caller]
pub fn bias_add_nchw<'g>(value: Output<'g>, bias: Output<'g>) -> Output<'g> {
    value.graph().op("BiasAdd").input(value).input(bias).attr("data_format", "NCHW").out()
}

const FORWARD_KERNELS: &[KernelDef] = cpu_kernels!(forward: f32, f64, i32, i64, u64; f16, bf16, i8, i16, u8, u16, u32);

pub(crate) static BIAS_ADD: Op = Op {
    def: OpDef {
        name: "BiasAdd",
        signature: "(value:T, bias:T) -> (output:T) ; T:type{num}, data_format:string{NHWC|NCHW}=\"NHWC\"",
        shape: |ctx| {
            let nchw = is_nchw(ctx.attrs())?;
            let (value, bias) = (ctx.input_of_rank_at_least(0, if nchw { 3 } else { 2 })?, ctx.input_of_rank(1, 1)?);
            let Some(rank) = value.rank() else { return Ok(vec![PartialShape::unknown()]) };
            // The channels are as many as the biases, if either is known.
            let axis = channel_axis(rank, nchw);
            let mut known = vec![None; rank];
            known[axis] = bias.dim(0);
            value.merge(&PartialShape::new(&known)).map(|shape| vec![shape]).map_err(|_| mismatch(&bias, value))
        },
        gradient: Gradient::Rule(|op, dy| {
            let dy = first(dy)?;
            let format = format(op);
            let bias = op.graph().op("BiasAddGrad").input(dy).attr("data_format", format.as_str()).out();
            Ok(vec![Some(dy.into()), Some(bias.into())])
        }),
        elementwise: Some(
            Elementwise::new("x0 + x1", Elements::Numbers)
                .shapes(ShapesFit::Bias)
                .unless("data_format", Literal::Str("NCHW")),
        ),
        half: HalfSafety::Safe,
        ..OpDef::BASE
    },
    kernels: FORWARD_KERNELS,
    gpu: Gpu::Kernels(&[gpu_kernel("T", NUMBERS, forward_on_gpu)]),
    cost: Cost::Elements,
};

pub(crate) static BIAS_ADD_V1: Op = Op {
    def: OpDef {
        name: "BiasAddV1",
        signature: "(value:T, bias:T) -> (output:T) ; T:type{num}",
        gradient: Gradient::Rule(|op, dy| {
            let dy = first(dy)?;
            Ok(vec![Some(dy.into()), Some(op.graph().op("BiasAddGrad").input(dy).out().into())])
        }),
        ..BIAS_ADD.def
    },
    kernels: FORWARD_KERNELS,
    gpu: Gpu::Kernels(&[gpu_kernel("T", NUMBERS, forward_on_gpu)]),
    cost: Cost::Elements,
};

pub(crate) static BIAS_ADD_GRAD: Op = Op {
    def: OpDef {
        name: "BiasAddGrad",
        signature: "(out_backprop:T) -> (output:T) ; T:type{num}, data_format:string{NHWC|NCHW}=\"NHWC\"",
        shape: |ctx| {
            let value = ctx.input_of_rank_at_least(0, 2)?;
            let axis = value.rank().map(|rank| channel_axis(rank, is_nchw(ctx.attrs()).unwrap_or(false)));
            Ok(vec![PartialShape::new(&[axis.and_then(|axis| value.dim(axis as isize))])])
        },
        gradient: Gradient::Rule(|op, dy| {
            // Every element of a channel gets the gradient of its sum.
            let (graph, x) = (op.graph(), op.input(0));
            let mut dy = first(dy)?;
            if format(op) == "NCHW" {
                let Some(rank) = x.shape().rank() else {
                    return Err(Error::unimplemented("the gradient of BiasAddGrad for NCHW needs a known rank"));
                };
                let mut dims = vec![1i32; rank];
                dims[channel_axis(rank, true)] = -1;
                dy = graph.op("Reshape").input(dy).input(graph.constant(dims)).out();
            }
            let shape = graph.op("Shape").input(x).out();
            Ok(vec![Some(graph.op("BroadcastTo").input(dy).input(shape).out().into())])
        }),
        half: HalfSafety::Safe,
        split: SplitRule::SumOfExamples,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(backward: f32, f64, i32, i64, u64; f16, bf16, i8, i16, u8, u16, u32),
    gpu: Gpu::Kernels(&[gpu_kernel("T", NUMBERS, backward_on_gpu)]),
    cost: Cost::Elements,
};

fn format(op: Operation<'_>) -> String {
    op.attrs(|attrs| attrs.str("data_format").map(str::to_owned)).unwrap_or_else(|_| "NHWC".to_owned())
}

fn mismatch(bias: &dyn std::fmt::Display, value: &dyn std::fmt::Display) -> Error {
    Error::invalid_argument(format!(
        "Must provide as many biases as the channel dimension of the input tensor: {bias} vs. {value}"
    ))
}

fn forward<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let shape = ctx.input(0)?.shape().clone();
    let view = Channels::of(&shape, is_nchw(ctx.attrs())?)?;
    let n_biases = ctx.input(1)?.shape();
    if n_biases.dims() != [view.channels] {
        return Err(mismatch(n_biases, &shape));
    }
    let (mut out, in_place) = ctx.reuse_or_allocate(0, T::DTYPE, shape)?;
    let bias = ctx.data::<T>(1)?;
    let input = if in_place { None } else { Some(ctx.data::<T>(0)?) };
    let run = view.run();
    if run > 0 {
        // Whole runs per task, rows of channels or planes of one channel; pieces of long ones, so that they stay in the first cache.
        let n = out.n_elements();
        let piece = if in_place { run } else { piece_of_run(run, pool::fill_grain::<T>(n, 0.3)) };
        let chunk = piece * if in_place { rows_per_task(0.3, piece) } else { rows_per_fill::<T>(n, 0.3, piece) };
        let per_run = run / piece;
        let each = |i: usize, out: &mut [T]| {
            let input = input.map(|input| &input[i * chunk..i * chunk + out.len()]);
            let first = i * (chunk / piece);
            let of_plane = |k: usize| bias[(first + k) / per_run % view.channels];
            let of_row = |k: usize| &bias[(first + k) % per_run * piece..][..piece];
            vectorize(
                #[inline(always)]
                || match input {
                    Some(input) => {
                        for (k, (out, input)) in out.chunks_exact_mut(piece).zip(input.chunks_exact(piece)).enumerate()
                        {
                            match view.inner {
                                1 => {
                                    for ((y, &x), &b) in out.iter_mut().zip(input).zip(of_row(k)) {
                                        *y = x.add(b);
                                    }
                                }
                                _ => {
                                    let b = of_plane(k);
                                    out.iter_mut().zip(input).for_each(|(y, &x)| *y = x.add(b));
                                }
                            }
                        }
                    }
                    None => {
                        for (k, out) in out.chunks_exact_mut(piece).enumerate() {
                            match view.inner {
                                1 => out.iter_mut().zip(of_row(k)).for_each(|(y, &b)| *y = y.add(b)),
                                _ => {
                                    let b = of_plane(k);
                                    out.iter_mut().for_each(|y| *y = y.add(b));
                                }
                            }
                        }
                    }
                },
            );
        };
        match in_place {
            true => ctx.pool().for_each_chunk(out.data_mut::<T>()?, chunk, each),
            false => ctx.pool().fill_chunks(out.data_mut::<T>()?, chunk, &each),
        }
    }
    ctx.set_output(0, out);
    Ok(())
}

fn backward<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let view = Channels::of(ctx.input(0)?.shape(), is_nchw(ctx.attrs())?)?;
    let mut out = ctx.allocate(T::DTYPE, Shape::new(&[view.channels])?)?;
    out.data_mut::<T>()?.copy_from_slice(&view.sums(ctx.pool(), ctx.data::<T>(0)?));
    ctx.set_output(0, out);
    Ok(())
}

fn forward_on_gpu(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (value, bias) = (ctx.input(0)?, ctx.input(1)?);
    let rank = value.shape().rank();
    let is_nchw = matches!(ctx.attrs().find("data_format"), Some(AttrValue::Str(format)) if &format[..] == b"NCHW");
    let at = if is_nchw { 1 } else { rank.wrapping_sub(1) };
    if rank < 2 || bias.shape().rank() != 1 || value.shape()[at] != bias.n_elements() {
        return Err(Error::invalid_argument(format!(
            "Must provide as many biases as the last dimension of the input tensor: {} vs. {}",
            bias.shape(),
            value.shape()
        )));
    }
    let (dtype, shape) = (value.dtype(), value.shape().clone());
    let mut dims = vec![1; rank];
    dims[at] = bias.n_elements();
    let bias = bias.clone().reshaped(Shape::new(&dims)?)?;
    ctx.inputs[1] = Value::Tensor(bias);
    map_to(ctx, Expression { name: "AddV2", text: "x0 + x1" }, dtype, shape, &[])
}

fn backward_on_gpu(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let shape = ctx.input(0)?.shape().clone();
    let is_nchw = matches!(ctx.attrs().find("data_format"), Some(AttrValue::Str(format)) if &format[..] == b"NCHW");
    if shape.rank() < 2 {
        return Err(Error::invalid_argument(format!("Input tensor must be at least 2D: {shape}")));
    }
    let at = if is_nchw { 1 } else { shape.rank() - 1 };
    let mut is_reduced: SmallVec<[bool; 8]> = SmallVec::from_elem(true, shape.rank());
    is_reduced[at] = false;
    let out = reduced(ctx, &SUM, &shape, &is_reduced, Shape::new(&[shape[at]])?)?;
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::testing::{check_op, tensor, wavy};

    /// Rows and planes that are cut in pieces, where the result goes past the caches of most machines.
    #[test]
    fn long_runs() {
        let bias: Vec<i32> = (0..4096).map(|i| i * 7).collect();
        let ones = || tensor([1030, 4096], vec![1i32; 1030 * 4096]);
        let found = check_op("BiasAdd").input(ones()).input(bias.clone()).run(false).unwrap();
        let rows = found[0].data::<i32>().unwrap().chunks(4096);
        assert!(rows.into_iter().all(|row| row.iter().zip(&bias).all(|(&x, &b)| x == b + 1)));
        let planes = ones().reshaped([103, 10, 4096].into()).unwrap();
        let planes = check_op("BiasAdd").attr("data_format", "NCHW").input(planes).input(bias[..10].to_vec());
        let found = planes.run(false).unwrap();
        let planes = found[0].data::<i32>().unwrap().chunks(4096).enumerate();
        assert!(planes.into_iter().all(|(i, plane)| plane.iter().all(|&x| x == bias[i % 10] + 1)));
        let column = tensor([1030, 1], (0..1030).collect::<Vec<i32>>());
        let sums = check_op("Mul").input(ones()).input(column).run(false).unwrap();
        let rows = sums[0].data::<i32>().unwrap().chunks(4096).enumerate();
        assert!(rows.into_iter().all(|(i, row)| row.iter().all(|&x| x == i as i32)));
        let row = check_op("Mul").input(tensor([4096], bias.clone())).input(ones()).run(false).unwrap();
        assert!(row[0].data::<i32>().unwrap().chunks(4096).all(|row| row == bias));
    }

    #[test]
    fn biases_go_along_the_channels() {
        check_op("BiasAdd")
            .input([[1.0f32, 2.0, 3.0], [4.0, 5.0, 6.0]])
            .input([10.0f32, 20.0, 30.0])
            .gives([[11.0f32, 22.0, 33.0], [14.0, 25.0, 36.0]]);
        let image = tensor([1, 2, 1, 3], [1.0f64, 2.0, 3.0, 4.0, 5.0, 6.0]);
        check_op("BiasAdd")
            .attr("data_format", "NCHW")
            .input(image.clone())
            .input([10.0f64, 20.0])
            .gives(tensor([1, 2, 1, 3], [11.0f64, 12.0, 13.0, 24.0, 25.0, 26.0]));
        check_op("BiasAddV1").input([[1i32, 2]]).input([10i32, 20]).gives([[11i32, 22]]);
        check_op("BiasAddGrad").input([[1.0f32, 2.0, 3.0], [4.0, 5.0, 6.0]]).gives([5.0f32, 7.0, 9.0]);
        check_op("BiasAddGrad").attr("data_format", "NCHW").input(image).gives([6.0f64, 15.0]);
    }

    #[test]
    fn sizes_zero_and_wrong() {
        let empty = || tensor::<f32, 2>([0, 3], []);
        check_op("BiasAdd").input(empty()).input([1.0f32, 2.0, 3.0]).gives(empty());
        check_op("BiasAddGrad").input(empty()).gives([0.0f32, 0.0, 0.0]);
        let none = || tensor::<f32, 2>([3, 0], []);
        check_op("BiasAdd").input(none()).input(Tensor::vector::<f32>(vec![])).gives(none());
        check_op("BiasAddGrad").input(none()).gives(Tensor::vector::<f32>(vec![]));
        check_op("BiasAdd").input([[1.0f32, 2.0]]).input([1.0f32]).fails("Must provide as many biases");
        check_op("BiasAdd").input([1.0f32, 2.0]).input([1.0f32]).fails("at least rank 2");
    }

    #[test]
    fn many_rows_are_summed_once_each() {
        let (rows, channels) = (10_007, 5);
        let values: Vec<f32> = (0..rows * channels).map(|i| (i % 7) as f32).collect();
        let mut expected = [0.0f32; 5];
        values.iter().enumerate().for_each(|(i, x)| expected[i % channels] += x);
        check_op("BiasAddGrad").input(tensor([rows, channels], values.clone())).gives(expected);
        let sum: f32 = values.iter().sum();
        check_op("BiasAddGrad").attr("data_format", "NCHW").input(tensor([1, 1, rows * channels], values)).gives([sum]);
    }

    #[test]
    fn gradients() {
        check_op("BiasAdd").input(wavy([2, 3, 2], 1)).input(wavy([2], 2)).gradient();
        check_op("BiasAdd").attr("data_format", "NCHW").input(wavy([2, 3, 2], 1)).input(wavy([3], 2)).gradient();
        check_op("BiasAddGrad").input(wavy([2, 3], 1)).gradient();
        check_op("BiasAddGrad").attr("data_format", "NCHW").input(wavy([2, 3, 2], 1)).gradient();
    }
}
