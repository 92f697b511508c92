//! `SparseSoftmaxCrossEntropyWithLogits`: −log softmax(features) at each row's label, and its derivative.

use half::{bf16, f16};
use kolo_core::{Error, PartialShape, Result, Shape};
use kolo_device::cpu::vectorize;
use kolo_graph::{Gradient, HalfSafety, OpDef, Output, SplitRule};

use crate::cuda::FLOATS;
use crate::nn::cross_entropy::features_gradient;
use crate::nn::float::{Float, largest, sum_by};
use crate::nn::rows::{for_row_pairs, rows_per_task};
use crate::op::{Gpu, Op, cpu_kernels, gpu_kernel};
use crate::{Cost, KernelCtx};

/// The cross entropy between each row's label (a class number) and the softmax of that row of `logits`.
#[track_caller]
pub fn sparse_softmax_cross_entropy<'g>(logits: Output<'g>, labels: Output<'g>) -> Output<'g> {
    logits.graph().op("SparseSoftmaxCrossEntropyWithLogits").input(logits).input(labels).out()
}

pub(crate) static SPARSE_SOFTMAX_CROSS_ENTROPY_WITH_LOGITS: Op = Op {
    def: OpDef {
        name: "SparseSoftmaxCrossEntropyWithLogits",
        signature: "(features:T, labels:Tlabels) -> (loss:T, backprop:T) ; T:type{half,bfloat16,float,double}, \
                    Tlabels:type{int32,int64}=int64",
        shape: |ctx| {
            let (features, labels) = (ctx.input_of_rank(0, 2)?, ctx.input_of_rank(1, 1)?);
            let rows = PartialShape::new(&[features.dim(0)]);
            let rows = rows.merge(&labels).map_err(|_| different_rows(&features, &labels))?;
            let backprop = features.merge(&PartialShape::new(&[rows.dim(0), None]))?;
            Ok(vec![rows, backprop])
        },
        gradient: Gradient::Rule(|op, dy| Ok(vec![features_gradient(op, dy).map(Into::into)])),
        half: HalfSafety::Wide,
        split: SplitRule::Rows,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(forward: f32, f64; f16, bf16),
    gpu: Gpu::Kernels(&[gpu_kernel("T", FLOATS, super::cross_entropy::gpu::sparse)]),
    cost: Cost::Elements,
};

pub(crate) fn different_rows(logits: &dyn std::fmt::Display, labels: &dyn std::fmt::Display) -> Error {
    Error::invalid_argument(format!(
        "logits and labels must have the same first dimension, got logits shape {logits} and labels shape {labels}"
    ))
}

fn forward<T: Float>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let shape = ctx.input(0)?.shape().clone();
    let &[n_rows, n_classes] = shape.dims() else {
        return Err(Error::invalid_argument(format!("logits must be 2-D, but got shape {shape}")));
    };
    let labels = ctx.input(1)?;
    if labels.shape().dims() != [n_rows] {
        return Err(different_rows(&shape, labels.shape()));
    }
    let classes = classes(&labels.integers()?, n_classes)?;
    let mut loss = ctx.allocate(T::DTYPE, Shape::new(&[n_rows])?)?;
    let (mut backprop, in_place) = ctx.reuse_or_allocate(0, T::DTYPE, shape)?;
    if !in_place {
        backprop.data_mut::<T>()?.copy_from_slice(ctx.data::<T>(0)?);
    }
    // A row without classes has no label, so there are no rows then.
    if n_classes > 0 {
        let rows = rows_per_task(3.0, n_classes);
        let (loss, backprop) = (loss.data_mut::<T>()?, backprop.data_mut::<T>()?);
        for_row_pairs(ctx.pool(), rows, (1, n_classes), loss, backprop, |first, loss, backprop| {
            vectorize(
                #[inline(always)]
                || several_rows(loss, backprop, &classes[first..], n_classes),
            );
        });
    }
    ctx.set_output(0, loss);
    ctx.set_output(1, backprop);
    Ok(())
}

/// The labels as indices; an error that lists them if one is out of range.
pub(crate) fn classes(labels: &[i64], n_classes: usize) -> Result<Vec<usize>> {
    let class = |&label: &i64| usize::try_from(label).ok().filter(|&class| class < n_classes);
    labels
        .iter()
        .map(|label| {
            class(label).ok_or_else(|| {
                let all: Vec<String> = labels.iter().take(100).map(i64::to_string).collect();
                Error::invalid_argument(format!(
                    "Received a label value of {label} which is outside the valid range of [0, {n_classes}).  \
                     Label values: {}",
                    all.join(" ")
                ))
            })
        })
        .collect()
}

/// The losses of rows, which hold the features before and the backprop after. The exponentials of all rows are taken in
/// one loop: with few classes, a loop per row would be too short for vectors.
#[inline(always)]
fn several_rows<T: Float>(loss: &mut [T], rows: &mut [T], classes: &[usize], n_classes: usize) {
    for ((loss, row), &class) in loss.iter_mut().zip(rows.chunks_exact_mut(n_classes)).zip(classes) {
        let largest = largest(row);
        row.iter_mut().for_each(|x| *x = *x - largest);
        *loss = -row[class];
    }
    rows.iter_mut().for_each(|x| *x = T::exponential(*x));
    for ((loss, row), &class) in loss.iter_mut().zip(rows.chunks_exact_mut(n_classes)).zip(classes) {
        let total = sum_by(row, |x| x);
        *loss += num_traits::Float::ln(total);
        let scale = T::of(1.0) / total;
        row.iter_mut().for_each(|x| *x = *x * scale);
        row[class] = row[class] - T::of(1.0);
    }
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn values_are_tensorflows() {
        for labels in [Tensor::from([2i64, 0]), Tensor::from([2i32, 0])] {
            check_op("SparseSoftmaxCrossEntropyWithLogits").input(wavy([2, 3], 1)).input(labels).gives_all([
                Tensor::from([1.8114263f32, 2.8774989]),
                tensor([2, 3], [0.15236728f32, 0.68421185, -0.8365791, -0.94372463, 0.31549793, 0.6282267]),
            ]);
        }
    }

    #[test]
    fn labels_must_be_classes() {
        let check =
            |labels: Tensor| check_op("SparseSoftmaxCrossEntropyWithLogits").input(wavy([2, 3], 1)).input(labels);
        check(Tensor::from([3i64, 0]))
            .fails("Received a label value of 3 which is outside the valid range of [0, 3).  Label values: 3 0");
        check(Tensor::from([1i32, -1])).fails("Received a label value of -1");
        check(Tensor::from([1i32, 0, 1]))
            .fails("logits and labels must have the same first dimension, got logits shape [2,3] and labels shape [3]");
        check_op("SparseSoftmaxCrossEntropyWithLogits")
            .input(tensor::<f32, 2>([0, 3], []))
            .input(Tensor::vector::<i32>(vec![]))
            .gives_all([Tensor::vector::<f32>(vec![]), tensor::<f32, 2>([0, 3], [])]);
    }

    #[test]
    fn gradients_through_both_outputs() {
        check_op("SparseSoftmaxCrossEntropyWithLogits").input(wavy([2, 3], 1)).input([2i64, 0]).gradient();
    }
}
