//! `BroadcastGradientArgs`: over which axes to sum the gradient of each of two inputs that were broadcast.

use kolo_core::{Element, Error, PartialShape, Result, Tensor};
use kolo_graph::{Gradient, HostRule, OpDef, Output};

use crate::op::{Gpu, Op, cpu_kernels};
use crate::{Cost, KernelCtx};

/// The axes along which inputs of shapes `a` and `b` are repeated to broadcast against each other.
#[track_caller]
pub fn broadcast_gradient_args<'g>(a: Output<'g>, b: Output<'g>) -> (Output<'g>, Output<'g>) {
    let operation = a.graph().op("BroadcastGradientArgs").input(a).input(b).build();
    (operation.output(0), operation.output(1))
}

pub(crate) static BROADCAST_GRADIENT_ARGS: Op = Op {
    def: OpDef {
        name: "BroadcastGradientArgs",
        signature: "(s0:T, s1:T) -> (r0:T, r1:T) ; T:type{int32,int64}=int32",
        shape: |ctx| {
            ctx.input_of_rank(0, 1)?;
            ctx.input_of_rank(1, 1)?;
            Ok(vec![PartialShape::of_rank(1); 2])
        },
        gradient: Gradient::None("axes are integers"),
        host: HostRule::Always,
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(forward: i32, i64),
    gpu: Gpu::Host,
    cost: Cost::Inline,
};

fn forward<T: Element + num_traits::PrimInt>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (a, b) = (ctx.integers(0)?, ctx.integers(1)?);
    let (mut sum_a, mut sum_b) = (Vec::new(), Vec::new());
    // Equal shapes need no sums, not even over sizes of 1.
    if a != b {
        let rank = a.len().max(b.len());
        for i in 0..rank {
            let of = |dims: &[i64]| (i + dims.len()).checked_sub(rank).map_or(1, |at| dims[at]);
            let axis = T::from(i).ok_or_else(|| Error::invalid_argument("too many dimensions"))?;
            match (of(&a), of(&b)) {
                (1, 1) => {
                    sum_a.push(axis);
                    sum_b.push(axis);
                }
                (x, y) if x == y => {}
                (1, _) => sum_a.push(axis),
                (_, 1) => sum_b.push(axis),
                _ => return Err(Error::invalid_argument(format!("Incompatible shapes: {a:?} vs. {b:?}"))),
            }
        }
    }
    ctx.set_output(0, Tensor::vector(sum_a));
    ctx.set_output(1, Tensor::vector(sum_b));
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::testing::check_op;

    #[track_caller]
    fn check(a: &[i32], b: &[i32], sum_a: &[i32], sum_b: &[i32]) {
        check_op("BroadcastGradientArgs").input(a).input(b).gives_all([Tensor::from(sum_a), Tensor::from(sum_b)]);
    }

    #[test]
    fn axes_to_sum_over() {
        check(&[2, 3, 5], &[1], &[], &[0, 1, 2]);
        check(&[2, 3, 5], &[5], &[], &[0, 1]);
        check(&[2, 1, 5], &[3, 1], &[1], &[0, 2]);
        check(&[3, 1], &[2, 1, 5], &[0, 2], &[1]);
        check(&[2, 0, 3, 0, 5], &[3, 0, 5], &[], &[0, 1]);
        check(&[2, 1], &[2, 1], &[], &[]);
        check(&[2, 1], &[1, 1], &[1], &[0, 1]);
        check(&[], &[], &[], &[]);
        check(&[], &[2, 3], &[0, 1], &[]);
        check_op("BroadcastGradientArgs")
            .input([2i64, 3])
            .input([3i64])
            .gives_all([Tensor::vector(Vec::<i64>::new()), Tensor::from([0i64])]);
        check_op("BroadcastGradientArgs").input([2i32]).input([3i32]).fails("Incompatible shapes: [2] vs. [3]");
    }
}
