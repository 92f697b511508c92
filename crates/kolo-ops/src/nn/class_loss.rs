//! `KoloClassLoss`: the cross entropy between class numbers and the softmax of logits, for many classes and low precision. An op
//! of our own: losses are floats whatever the logits are, and the gradient is computed when it is wanted, on GPUs and of
//! floats in the memory of the logits, where `SparseSoftmaxCrossEntropyWithLogits` keeps a second tensor of their size and scales it later.

mod gpu;

use half::{bf16, f16};
use kolo_core::{DType, Error, PartialShape, Result, Shape};
use kolo_device::cpu::vectorize;
use kolo_graph::{Gradient, HalfSafety, OpDef, Output, SplitRule};

use crate::math::binary::first;
use crate::nn::float::{Float, largest, sum_by};
use crate::nn::rows::{for_row_pairs, rows_per_task};
use crate::nn::sparse_cross_entropy::{classes, different_rows};
use crate::op::{Gpu, Op, cpu_kernels, gpu_kernel};
use crate::{Cost, KernelCtx};

/// The cross entropy between each row's label (a class number) and the softmax of that row of `logits`, in float.
#[track_caller]
pub fn class_loss<'g>(logits: Output<'g>, labels: Output<'g>) -> Output<'g> {
    logits.graph().op("KoloClassLoss").input(logits).input(labels).out()
}

pub(crate) static CLASS_LOSS: Op = Op {
    def: OpDef {
        name: "KoloClassLoss",
        signature: "(logits:T, labels:Tlabels) -> (loss:float, lse:float) ; T:type{half,bfloat16,float}, \
                    Tlabels:type{int32,int64}=int64",
        shape: |ctx| {
            let (logits, labels) = (ctx.input_of_rank(0, 2)?, ctx.input_of_rank(1, 1)?);
            let rows = PartialShape::new(&[logits.dim(0)]);
            let rows = rows.merge(&labels).map_err(|_| different_rows(&logits, &labels))?;
            Ok(vec![rows.clone(), rows])
        },
        gradient: Gradient::Rule(|op, dy| {
            if dy.get(1).copied().flatten().is_some() {
                return Err(Error::unimplemented("KoloClassLoss has no gradient through its second output"));
            }
            let builder = op.graph().op("KoloClassLossGrad");
            Ok(vec![Some(builder.inputs([first(dy)?, op.input(0), op.input(1), op.output(1)]).out().into())])
        }),
        // It computes and gives `float`, whatever the logits are.
        half: HalfSafety::Safe,
        split: SplitRule::Rows,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(forward; f16, bf16),
    gpu: Gpu::Kernels(&[gpu_kernel("T", gpu::TYPES, gpu::forward)]),
    cost: Cost::Elements,
};

pub(crate) static CLASS_LOSS_GRAD: Op = Op {
    def: OpDef {
        name: "KoloClassLossGrad",
        signature: "(dloss:float, logits:T, labels:Tlabels, lse:float) -> (dlogits:T) ; T:type{half,bfloat16,float}, \
                    Tlabels:type{int32,int64}=int64",
        shape: |ctx| Ok(vec![ctx.input_of_rank(1, 2)?]),
        gradient: Gradient::Refused("no second derivative is defined for KoloClassLoss"),
        half: HalfSafety::Safe,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(backward; f16, bf16),
    gpu: Gpu::Kernels(&[gpu_kernel("T", gpu::TYPES, gpu::backward)]),
    cost: Cost::Elements,
};

/// Rows and classes; the vectors at `vectors` must have one element for each row.
pub(crate) fn sizes(ctx: &KernelCtx<'_>, logits: usize, vectors: &[usize]) -> Result<(usize, usize)> {
    let shape = ctx.input(logits)?.shape();
    let &[n_rows, n_classes] = shape.dims() else {
        return Err(Error::invalid_argument(format!("logits must be 2-D, but got shape {shape}")));
    };
    for &i in vectors {
        if ctx.input(i)?.shape().dims() != [n_rows] {
            return Err(different_rows(shape, ctx.input(i)?.shape()));
        }
    }
    Ok((n_rows, n_classes))
}

fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (n_rows, n) = sizes(ctx, 0, &[1])?;
    let classes = classes(&ctx.input(1)?.integers()?, n)?;
    let rows = Shape::new(&[n_rows])?;
    let (mut loss, mut lse) = (ctx.allocate(DType::F32, rows.clone())?, ctx.allocate(DType::F32, rows)?);
    // A row without classes has no label, so there are no rows then.
    if n > 0 {
        let logits = ctx.data::<f32>(0)?;
        let (loss, lse) = (loss.data_mut::<f32>()?, lse.data_mut::<f32>()?);
        for_row_pairs(ctx.pool(), rows_per_task(2.0, n), (1, 1), loss, lse, |from, loss, lse| {
            vectorize(
                #[inline(always)]
                || {
                    let rows = logits[from * n..].chunks_exact(n).zip(&classes[from..]);
                    for ((row, &class), (loss, lse)) in rows.zip(loss.iter_mut().zip(lse)) {
                        let top = largest(row);
                        *lse = top + sum_by(row, |x: f32| (x - top).exponential()).ln();
                        *loss = *lse - row[class];
                    }
                },
            );
        });
    }
    ctx.set_output(0, loss);
    ctx.set_output(1, lse);
    Ok(())
}

fn backward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (_, n) = sizes(ctx, 1, &[0, 2, 3])?;
    let classes = classes(&ctx.input(2)?.integers()?, n)?;
    let shape = ctx.input(1)?.shape().clone();
    let (mut out, in_place) = ctx.reuse_or_allocate(1, DType::F32, shape)?;
    if !in_place {
        out.data_mut::<f32>()?.copy_from_slice(ctx.data::<f32>(1)?);
    }
    if n > 0 {
        let (dloss, lse) = (ctx.data::<f32>(0)?, ctx.data::<f32>(3)?);
        let n_rows = rows_per_task(2.0, n);
        ctx.pool().for_each_chunk(out.data_mut::<f32>()?, n_rows * n, |i, out| {
            vectorize(
                #[inline(always)]
                || {
                    for (j, row) in out.chunks_exact_mut(n).enumerate() {
                        let r = i * n_rows + j;
                        let (shift, by) = (lse[r], dloss[r]);
                        let at_label = row[classes[r]];
                        row.iter_mut().for_each(|x| *x = (*x - shift).exponential() * by);
                        row[classes[r]] = ((at_label - shift).exponential() - 1.0) * by;
                    }
                },
            );
        });
    }
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::testing::{assert_close, check_op, evaluate, tensor, wavy};

    #[test]
    fn it_is_the_sparse_cross_entropy() {
        let g = crate::graph();
        let logits = g.constant(wavy([6, 37], 1)) * 4.0;
        let labels = g.constant([0i64, 36, 5, 5, 17, 1]);
        let weights = g.constant(wavy([6], 2));
        let all = |losses: Output<'_>| {
            let losses = Output::new(&g, losses.endpoint());
            let loss = g.op("Sum").input(losses * weights).input(g.constant([0i32])).out();
            let grad = kolo_graph::gradients(&[loss], &[logits]).unwrap()[0].unwrap().dense().unwrap();
            [losses.endpoint(), grad.endpoint()]
        };
        let ours = all(class_loss(logits, labels));
        let theirs = all(crate::nn::sparse_cross_entropy::sparse_softmax_cross_entropy(logits, labels));
        let outputs: Vec<Output<'_>> = ours.into_iter().chain(theirs).map(|at| Output::new(&g, at)).collect();
        let found = evaluate(&g, &outputs, &[]).unwrap();
        assert_close(&found[0], &found[2], 1e-5, "KoloClassLoss");
        assert_close(&found[1], &found[3], 1e-5, "KoloClassLossGrad");
    }

    #[test]
    fn halves_have_losses_in_float() {
        let logits = tensor([1, 2], [bf16::from_f32(3.0), bf16::from_f32(3.0)]);
        check_op("KoloClassLoss").input(logits).input([1i64]).gives([std::f32::consts::LN_2]);
    }

    #[test]
    fn labels_must_be_classes() {
        check_op("KoloClassLoss").input(wavy([2, 3], 1)).input([0i32, 3]).fails("3");
        check_op("KoloClassLoss").input(wavy([2, 3], 1)).input([0i32]).fails("first dimension");
        let none = tensor::<f32, 2>([0, 3], []);
        check_op("KoloClassLoss").input(none).input(tensor::<i32, 1>([0], [])).gives(tensor::<f32, 1>([0], []));
    }
}
