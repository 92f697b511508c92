//! `ReverseV2`: dimensions read from the far end. `ReverseSequence`: the same for the first part of one dimension, a
//! different part for every entry of a batch.

use kolo_core::{Error, PartialShape, Result};
use kolo_device::cpu::{IntraPool, pool};
use kolo_graph::shape_fns::{resolve_axis, same_as_input_0};
use kolo_graph::{Gradient, HalfSafety, HostRule, OpDef, Output};

use super::elements::{IntoInts, Item, Job, build, integers, product};
use super::strided_slice::read_view;
use super::view::{View, strides};
use crate::cuda::PLAIN;
use crate::math::binary::first;
use crate::op::{Gpu, Op, cpu_any, gpu_kernel};
use crate::{Cost, KernelCtx};

/// `x` with the dimensions `axes` reversed.
#[track_caller]
pub fn reverse<'g>(x: Output<'g>, axes: impl IntoInts<'g>) -> Output<'g> {
    let graph = x.graph();
    graph.op("ReverseV2").input(x).input(axes.into_ints(graph)).out()
}

/// `x` with the first `lengths[b]` elements along `seq_dim` reversed, for every index `b` of `batch_dim`.
#[track_caller]
pub fn reverse_sequence<'g>(x: Output<'g>, lengths: Output<'g>, seq_dim: i64, batch_dim: i64) -> Output<'g> {
    let builder = x.graph().op("ReverseSequence").inputs([x, lengths]);
    builder.attr("seq_dim", seq_dim).attr("batch_dim", batch_dim).out()
}

pub(crate) static REVERSE_V2: Op = Op {
    def: OpDef {
        name: "ReverseV2",
        signature: "(tensor:T, axis:Tidx) -> (output:T) ; Tidx:type{int32,int64}=int32, \
                    T:type{uint8,int8,uint16,int16,uint32,int32,uint64,int64,bool,bfloat16,half,float,double,complex64,\
                    complex128,string}",
        shape: |ctx| {
            ctx.input_of_rank(1, 1)?;
            if let (Some(axes), Some(rank)) = (ctx.constant_integers(1), ctx.input(0).rank()) {
                reversed(&axes, rank)?;
            }
            same_as_input_0(ctx)
        },
        gradient: Gradient::Rule(|op, dy| Ok(vec![Some(reverse(first(dy)?, op.input(1)).into()), None])),
        host: HostRule::SmallIntegers,
        half: HalfSafety::Neutral,
        host_args: &["axis"],
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward)],
    gpu: Gpu::Kernels(&[gpu_kernel("T", PLAIN, forward)]),
    cost: Cost::Elements,
};

pub(crate) static REVERSE_SEQUENCE: Op = Op {
    def: OpDef {
        name: "ReverseSequence",
        signature: "(input:T, seq_lengths:Tlen) -> (output:T) ; seq_dim:int, batch_dim:int=0, T:type, \
                    Tlen:type{int32,int64}=int64",
        shape: |ctx| {
            let lengths = ctx.input_of_rank(1, 1)?;
            if let Some(dims) = ctx.input(0).dims() {
                let (_, batch) = sequence_dims(ctx.attrs(), dims.len())?;
                lengths.merge(&PartialShape::new(&[dims[batch]]))?;
            }
            same_as_input_0(ctx)
        },
        gradient: Gradient::Rule(|op, dy| {
            let [seq, batch] = ["seq_dim", "batch_dim"].map(|name| op.attrs(|attrs| attrs.int(name)));
            Ok(vec![Some(reverse_sequence(first(dy)?, op.input(1), seq?, batch?).into()), None])
        }),
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward_sequence)],
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

/// Which dimensions are reversed.
fn reversed(axes: &[i64], rank: usize) -> Result<Vec<bool>> {
    let mut reversed = vec![false; rank];
    for (i, &axis) in axes.iter().enumerate() {
        let at = resolve_axis(axis, rank)
            .map_err(|_| Error::invalid_argument(format!("'axis'[{i}] = {axis} is out of valid range [0, {rank})")))?;
        if std::mem::replace(&mut reversed[at], true) {
            return Err(Error::invalid_argument(format!("axis {at} specified more than once.")));
        }
    }
    Ok(reversed)
}

fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let input = ctx.input(0)?;
    let shape = input.shape();
    let reversed = reversed(&integers(ctx.input(1)?)?, shape.rank())?;
    if !reversed.contains(&true) || shape.n_elements() == 0 {
        return ctx.forward(0, 0);
    }
    let steps = strides(shape);
    let start: usize = (0..shape.rank()).filter(|&i| reversed[i]).map(|i| (shape[i] - 1) * steps[i] as usize).sum();
    let walk = (0..shape.rank()).map(|i| (shape[i], if reversed[i] { -steps[i] } else { steps[i] }));
    let out = read_view(ctx, input, &View::new(start, walk), shape.clone())?;
    ctx.set_output(0, out);
    Ok(())
}

fn sequence_dims(attrs: &kolo_graph::Attrs, rank: usize) -> Result<(usize, usize)> {
    let seq = resolve_axis(attrs.int("seq_dim")?, rank)?;
    let batch = resolve_axis(attrs.int("batch_dim")?, rank)?;
    if seq == batch {
        return Err(Error::invalid_argument(format!("batch_dim == seq_dim == {seq}")));
    }
    Ok((seq, batch))
}

fn forward_sequence(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let input = ctx.input(0)?;
    let shape = input.shape();
    let (seq, batch) = sequence_dims(ctx.attrs(), shape.rank())?;
    let lengths = integers(ctx.input(1)?)?;
    if lengths.len() != shape[batch] {
        return Err(Error::invalid_argument(format!(
            "Length of seq_lens != input.dims({batch}), ({} vs. {})",
            lengths.len(),
            shape[batch]
        )));
    }
    for (i, &length) in lengths.iter().enumerate() {
        if length < 0 {
            return Err(Error::invalid_argument(format!("seq_lens({i}) < 0")));
        }
        if length > shape[seq] as i64 {
            return Err(Error::invalid_argument(format!("seq_lens({i}) > input.dims({seq})")));
        }
    }
    let steps = strides(shape);
    let job = ReverseParts {
        pool: ctx.pool(),
        lengths: lengths.into_iter().map(|length| length as usize).collect(),
        seq: (shape[seq], steps[seq] as usize),
        batch: (shape[batch], steps[batch] as usize),
        run: product(&shape[seq.max(batch) + 1..]),
    };
    let out = build(ctx, input.dtype(), shape.clone(), &[input], job)?;
    ctx.set_output(0, out);
    Ok(())
}

/// Moves runs of elements that have the same place in the sequence and in the batch.
struct ReverseParts<'a> {
    pool: &'a IntraPool,
    lengths: Vec<usize>,
    /// Size and step of the dimension.
    seq: (usize, usize),
    batch: (usize, usize),
    run: usize,
}

impl Job for ReverseParts<'_> {
    fn run<E: Item>(self, out: &mut [E], inputs: &[&[E]]) -> Result<()> {
        if out.is_empty() {
            return Ok(());
        }
        let run = self.run;
        let runs = pool::grain(0.5).div_ceil(run);
        self.pool.for_each_chunk(out, runs * run, |i, out| {
            for (k, out) in out.chunks_mut(run).enumerate() {
                let at = (i * runs + k) * run;
                let length = self.lengths[at / self.batch.1 % self.batch.0];
                let place = at / self.seq.1 % self.seq.0;
                // The mirror image of `place` within the first `length`.
                let from = if place < length { length - 1 - place } else { place };
                let from = at - place * self.seq.1 + from * self.seq.1;
                out.clone_from_slice(&inputs[0][from..from + run]);
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
    fn reverse() {
        let grid = || Tensor::from([[1i32, 2, 3], [4, 5, 6]]);
        let case = |axes: &[i32]| check_op("ReverseV2").input(grid()).input(axes);
        case(&[0]).gives([[4i32, 5, 6], [1, 2, 3]]);
        case(&[-1]).gives([[3i32, 2, 1], [6, 5, 4]]);
        case(&[0, 1]).gives([[6i32, 5, 4], [3, 2, 1]]);
        case(&[]).gives(grid());
        case(&[0, -2]).fails("axis 0 specified more than once.");
        case(&[2]).fails("'axis'[0] = 2 is out of valid range");
        let words = |list: [&'static str; 2]| Tensor::from_strings([2], list.map(Into::into).to_vec()).unwrap();
        check_op("ReverseV2").input(words(["a", "b"])).input([0i64]).gives(words(["b", "a"]));
        check_op("ReverseV2").input(tensor::<f32, 1>([0], [])).input([0i64]).gives(tensor::<f32, 1>([0], []));
        check_op("ReverseV2").input(wavy([2, 3], 0)).input([1i32]).gradient();
    }

    #[test]
    fn reverse_sequence() {
        let case = |lengths: [i64; 2]| {
            check_op("ReverseSequence").input([[1i32, 2, 3], [4, 5, 6]]).input(lengths).attr("seq_dim", 1i64)
        };
        case([2, 3]).gives([[2i32, 1, 3], [6, 5, 4]]);
        case([0, 1]).gives([[1i32, 2, 3], [4, 5, 6]]);
        case([2, 4]).fails("seq_lens(1) > input.dims(1)");
        case([-1, 2]).fails("seq_lens(0) < 0");
        case([1, 1]).attr("batch_dim", 1i64).fails("batch_dim == seq_dim == 1");
        check_op("ReverseSequence")
            .input(tensor([3, 2, 2], (0..12).collect::<Vec<i32>>()))
            .input([3i32, 2])
            .attr("seq_dim", 0i64)
            .attr("batch_dim", 1i64)
            .gives(tensor([3, 2, 2], [8i32, 9, 6, 7, 4, 5, 2, 3, 0, 1, 10, 11]));
        check_op("ReverseSequence").input(wavy([2, 3], 0)).input([2i32, 3]).attr("seq_dim", 1i64).gradient();
    }
}
