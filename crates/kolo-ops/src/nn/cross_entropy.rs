//! `SoftmaxCrossEntropyWithLogits`: −Σ labels · log softmax(features) of each row, and its derivative by the features,
//! which is cheap to have on the way.

pub(crate) mod gpu;

use half::{bf16, f16};
use kolo_core::{Error, PartialShape, Result, Shape};
use kolo_device::cpu::vectorize;
use kolo_graph::{Grad, Gradient, HalfSafety, InferCtx, OpDef, Operation, Output, SplitRule};

use crate::cuda::FLOATS;
use crate::math::binary::reduced;
use crate::math::elementwise::{Walk, broadcast_shape};
use crate::nn::float::{Float, largest, sum_by};
use crate::nn::rows::{for_row_pairs, rows_per_task};
use crate::nn::softmax::{log_softmax, softmax, sum_of_rows};
use crate::op::{Gpu, Op, cpu_kernels, gpu_kernel};
use crate::{Cost, KernelCtx};

/// The cross entropy between each row of `labels` (probabilities) and the softmax of that row of `logits`.
#[track_caller]
pub fn softmax_cross_entropy<'g>(logits: Output<'g>, labels: Output<'g>) -> Output<'g> {
    logits.graph().op("SoftmaxCrossEntropyWithLogits").input(logits).input(labels).out()
}

pub(crate) static SOFTMAX_CROSS_ENTROPY_WITH_LOGITS: Op = Op {
    def: OpDef {
        name: "SoftmaxCrossEntropyWithLogits",
        signature: "(features:T, labels:T) -> (loss:T, backprop:T) ; T:type{half,bfloat16,float,double}",
        shape: infer,
        gradient: Gradient::Rule(gradient),
        half: HalfSafety::Wide,
        split: SplitRule::Rows,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(forward: f32, f64; f16, bf16),
    gpu: Gpu::Kernels(&[gpu_kernel("T", FLOATS, gpu::dense)]),
    cost: Cost::Elements,
};

fn infer(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let both = ctx.input(0).broadcast(ctx.input(1))?;
    let both = both.merge(&PartialShape::of_rank(2)).map_err(|_| not_a_matrix(&both))?;
    Ok(vec![PartialShape::new(&[both.dim(0)]), both])
}

fn not_a_matrix(shape: &dyn std::fmt::Display) -> Error {
    Error::invalid_argument(format!(
        "logits and labels must be either 2-dimensional, or broadcasted to be 2-dimensional, found {shape}"
    ))
}

fn gradient<'g>(op: Operation<'g>, dy: &[Option<Output<'g>>]) -> Result<Vec<Option<Grad<'g>>>> {
    let logits = op.input(0);
    let features = features_gradient(op, dy);
    let through_loss = dy.first().copied().flatten().map(|loss| column(loss) * -log_softmax(logits));
    // The backprop is the softmax less the labels. TensorFlow leaves this part out.
    let through_backprop = dy.get(1).copied().flatten().map(|backprop| -backprop);
    let labels = match (through_loss, through_backprop) {
        (Some(a), Some(b)) => Some(a + b),
        (a, b) => a.or(b),
    };
    // Both exist if any gradient arrives.
    match (features, labels) {
        (Some(features), Some(labels)) => reduced(op, features, labels),
        _ => Ok(Vec::new()),
    }
}

/// The gradient of the features, through the loss and, where something is computed from it, through the backprop.
pub(super) fn features_gradient<'g>(op: Operation<'g>, dy: &[Option<Output<'g>>]) -> Option<Output<'g>> {
    let through_loss = dy.first().copied().flatten().map(|loss| column(loss) * op.output(1));
    let through_backprop = dy.get(1).copied().flatten().map(|backprop| {
        let softmax = softmax(op.input(0));
        (backprop - sum_of_rows(backprop * softmax)) * softmax
    });
    match (through_loss, through_backprop) {
        (Some(a), Some(b)) => Some(a + b),
        (a, b) => a.or(b),
    }
}

/// A vector as a column.
fn column(x: Output<'_>) -> Output<'_> {
    let shape = x.graph().constant(vec![-1i32, 1]);
    x.graph().op("Reshape").input(x).input(shape).out()
}

fn forward<T: Float>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (a, b) = (ctx.input(0)?.shape().clone(), ctx.input(1)?.shape().clone());
    let shape = broadcast_shape(&a, &b).map_err(|_| {
        Error::invalid_argument(format!("logits and labels must be broadcastable: logits_size={a} labels_size={b}"))
    })?;
    let &[n_rows, n_classes] = shape.dims() else { return Err(not_a_matrix(&shape)) };
    let mut loss = ctx.allocate_zeroed(T::DTYPE, Shape::new(&[n_rows])?)?;
    let (mut backprop, in_place) = match a == shape {
        true => ctx.reuse_or_allocate(0, T::DTYPE, shape.clone())?,
        false => (ctx.allocate(T::DTYPE, shape.clone())?, false),
    };
    if !in_place {
        spread(backprop.data_mut::<T>()?, ctx.data::<T>(0)?, &shape, &a);
    }
    let mut repeated = Vec::new();
    let labels = match b == shape {
        true => ctx.data::<T>(1)?,
        false => {
            repeated.resize(shape.n_elements(), T::default());
            spread(&mut repeated, ctx.data::<T>(1)?, &shape, &b);
            &repeated
        }
    };
    if n_classes > 0 {
        let rows = rows_per_task(3.0, n_classes);
        let (loss, backprop) = (loss.data_mut::<T>()?, backprop.data_mut::<T>()?);
        for_row_pairs(ctx.pool(), rows, (1, n_classes), loss, backprop, |first, loss, backprop| {
            let labels = &labels[first * n_classes..first * n_classes + backprop.len()];
            vectorize(
                #[inline(always)]
                || several_rows(loss, backprop, labels, n_classes),
            );
        });
    }
    ctx.set_output(0, loss);
    ctx.set_output(1, backprop);
    Ok(())
}

/// The losses of rows, which hold the features before and the backprop after. The exponentials of all rows are taken in
/// one loop: with few classes, a loop per row would be too short for vectors.
#[inline(always)]
fn several_rows<T: Float>(loss: &mut [T], rows: &mut [T], labels: &[T], n_classes: usize) {
    for ((loss, row), labels) in
        loss.iter_mut().zip(rows.chunks_exact_mut(n_classes)).zip(labels.chunks_exact(n_classes))
    {
        let largest = largest(row);
        let mut sum = T::of(0.0);
        for (x, label) in row.iter_mut().zip(labels) {
            let logit = *x - largest;
            sum += *label * logit;
            *x = logit;
        }
        *loss = -sum;
    }
    rows.iter_mut().for_each(|x| *x = T::exponential(*x));
    for ((loss, row), labels) in
        loss.iter_mut().zip(rows.chunks_exact_mut(n_classes)).zip(labels.chunks_exact(n_classes))
    {
        let total = sum_by(row, |x| x);
        let weight = sum_by(labels, |label| label);
        *loss += weight * num_traits::Float::ln(total);
        let scale = T::of(1.0) / total;
        for (x, label) in row.iter_mut().zip(labels) {
            *x = *x * scale - *label;
        }
    }
}

/// Copies `from`, of shape `small`, to every place of `to`, of shape `shape`, that it is broadcast to.
fn spread<T: Float>(to: &mut [T], from: &[T], shape: &Shape, small: &Shape) {
    if small == shape {
        return to.copy_from_slice(from);
    }
    if to.is_empty() {
        return;
    }
    let walk = Walk::new(shape, small, shape);
    for (row, to) in to.chunks_mut(walk.run).enumerate() {
        let (at, _) = walk.offsets(row);
        match walk.inner.0 {
            true => to.copy_from_slice(&from[at..at + to.len()]),
            false => to.fill(from[at]),
        }
    }
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::testing::{check_op, evaluate, tensor, wavy};

    const LABELS: [f32; 6] = [0.1, 0.2, 0.7, 0.0, 1.0, 0.0];

    #[test]
    fn values_are_tensorflows() {
        check_op("SoftmaxCrossEntropyWithLogits").input(wavy([2, 3], 1)).input(tensor([2, 3], LABELS)).gives_all([
            Tensor::from([1.532042f32, 1.1536032]),
            tensor([2, 3], [0.052367277f32, 0.48421186, -0.53657913, 0.056275338, -0.68450207, 0.6282267]),
        ]);
    }

    #[test]
    fn either_side_is_broadcast() {
        check_op("SoftmaxCrossEntropyWithLogits").input(wavy([2, 3], 1)).input([[0.1f32, 0.2, 0.7]]).gives_all([
            Tensor::from([1.532042f32, 0.8438685]),
            tensor([2, 3], [0.052367277f32, 0.48421186, -0.53657913, -0.043724664, 0.11549793, -0.07177329]),
        ]);
        check_op("SoftmaxCrossEntropyWithLogits").input(wavy([1, 3], 1)).input(tensor([2, 3], LABELS)).gives_all([
            Tensor::from([1.532042f32, 0.37948772]),
            tensor([2, 3], [0.052367277f32, 0.48421186, -0.53657913, 0.15236728, -0.31578815, 0.16342089]),
        ]);
    }

    #[test]
    fn sizes_zero_large_and_wrong() {
        let empty = || tensor::<f32, 2>([0, 3], []);
        check_op("SoftmaxCrossEntropyWithLogits")
            .input(empty())
            .input(empty())
            .gives_all([Tensor::vector::<f32>(vec![]), empty()]);
        let none = || tensor::<f32, 2>([2, 0], []);
        check_op("SoftmaxCrossEntropyWithLogits").input(none()).input(none()).gives([0.0f32, 0.0]);
        check_op("SoftmaxCrossEntropyWithLogits").input([1.0f32]).input([1.0f32]).fails("2-dimensional");
        check_op("SoftmaxCrossEntropyWithLogits")
            .input(wavy([2, 3], 1))
            .input(wavy([2, 2], 1))
            .fails("do not broadcast");
        // Uniform features: the loss is log(n) whatever the label.
        let mut labels = vec![0.0f32; 300 * 50];
        (0..300).for_each(|row| labels[row * 50 + row % 50] = 1.0);
        check_op("SoftmaxCrossEntropyWithLogits")
            .input(tensor([300, 50], vec![2.5f32; 300 * 50]))
            .input(tensor([300, 50], labels))
            .gives(Tensor::from(vec![50.0f32.ln(); 300]));
    }

    #[test]
    fn gradients_of_both_inputs_through_both_outputs() {
        // Labels are probabilities: the backprop is the derivative of the loss only where they sum to 1.
        check_op("SoftmaxCrossEntropyWithLogits").input(wavy([2, 3], 1)).input(tensor([2, 3], LABELS)).gradient();
        check_op("SoftmaxCrossEntropyWithLogits").input(wavy([2, 3], 1)).input([[0.1f32, 0.2, 0.7]]).gradient();
    }

    #[test]
    fn the_loss_alone_is_differentiated_by_its_backprop() {
        let g = crate::graph();
        let (x, labels) = (g.constant(wavy([2, 3], 1)), g.constant(tensor([2, 3], LABELS)));
        let loss = super::softmax_cross_entropy(x, labels);
        let grad = kolo_graph::gradients(&[loss], &[x]).unwrap()[0].unwrap().dense().unwrap();
        let found = evaluate(&g, &[grad, loss.operation().output(1)], &[]).unwrap();
        assert_eq!(found[0], found[1]);
    }
}
