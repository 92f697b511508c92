//! `ComputeAccidentalHits`: which of the classes that were drawn are true ones.

use std::collections::HashMap;

use kolo_core::{Error, PartialShape, Result, Tensor};
use kolo_device::cpu::looking;
use kolo_graph::{Gradient, OpDef, Output};

use crate::op::{Gpu, Op, cpu_any};
use crate::{Cost, KernelCtx};

/// Where classes that were drawn are true: the row of `true_classes`, the place in `sampled`, and a weight that makes the class
/// impossible when it is added to its logit.
#[track_caller]
pub fn accidental_hits<'g>(true_classes: Output<'g>, sampled: Output<'g>, n_true: i64) -> [Output<'g>; 3] {
    let op = true_classes.graph().op("ComputeAccidentalHits").inputs([true_classes, sampled]);
    let op = op.attr("num_true", n_true).build();
    [0, 1, 2].map(|i| op.output(i))
}

pub(crate) static COMPUTE_ACCIDENTAL_HITS: Op = Op {
    def: OpDef {
        name: "ComputeAccidentalHits",
        signature: "(true_classes:int64, sampled_candidates:int64) -> (indices:int32, ids:int64, weights:float) ; \
                    num_true:int, seed:int=0, seed2:int=0",
        shape: |ctx| {
            let n_true = usize::try_from(ctx.attrs().int("num_true")?).ok();
            ctx.input_of_rank(0, 2)?.merge(&PartialShape::new(&[None, n_true]))?;
            ctx.input_of_rank(1, 1)?;
            Ok(vec![PartialShape::new(&[None]); 3])
        },
        gradient: Gradient::None("classes are whole numbers"),
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward)],
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (classes, sampled) = (ctx.input(0)?, ctx.input(1)?);
    let n_true = ctx.attrs().int("num_true")?;
    let columns = match classes.shape().dims() {
        &[_, columns] if columns as i64 == n_true => columns,
        _ => return Err(Error::invalid_argument("true_candidates must be a batch_size * num_true matrix")),
    };
    if sampled.shape().rank() != 1 {
        return Err(Error::invalid_argument(
            "sampled_candidates must be a vector, which is typically an output from CandidateSampler",
        ));
    }
    // Of a class that was drawn twice, the last.
    let places: HashMap<i64, i64> = looking(sampled.data::<i64>()?.iter().copied().zip(0..)).collect();
    let (mut rows, mut ids) = (Vec::new(), Vec::new());
    for (i, class) in looking(classes.data::<i64>()?.iter().enumerate()) {
        if let Some(&place) = places.get(class) {
            rows.push((i / columns) as i32);
            ids.push(place);
        }
    }
    let weights = vec![f32::MIN; ids.len()];
    ctx.set_output(0, Tensor::from(rows));
    ctx.set_output(1, Tensor::from(ids));
    ctx.set_output(2, Tensor::from(weights));
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::testing::check_op;

    #[test]
    fn hits() {
        check_op("ComputeAccidentalHits")
            .attr("num_true", 2i64)
            .input([[4i64, 1], [9, 4], [0, 2]])
            .input([1i64, 4, 7, 4])
            .gives_all([Tensor::from([0i32, 0, 1]), Tensor::from([3i64, 0, 3]), Tensor::from([f32::MIN; 3])]);
        let wide = check_op("ComputeAccidentalHits").attr("num_true", 1i64).input([[1i64, 2]]).input([1i64]);
        wide.fails("");
    }
}
