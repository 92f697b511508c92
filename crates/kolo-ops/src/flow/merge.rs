//! `Merge` and `RefMerge`: pass on the first live input, and say which it was. Where the two sides of a branch meet, and
//! where a loop's variables begin an iteration.

use kolo_core::{PartialShape, Result};
use kolo_graph::{Effects, Flow, Grad, Gradient, HostRule, InferCtx, OpDef, Operation, Output};

use crate::Cost;
use crate::cuda::PLAIN;
use crate::op::{Gpu, KernelMaker, Op, cpu_made, gpu_made};

pub(crate) static MERGE: Op = Op {
    def: OpDef {
        name: "Merge",
        signature: "(inputs:N*T) -> (output:T, value_index:int32) ; T:type, N:int>=1",
        shape,
        gradient: Gradient::Rule(gradient),
        host: HostRule::SmallIntegers,
        flow: Flow::Merge,
        host_args: &["value_index"],
        ..OpDef::BASE
    },
    kernels: &[cpu_made(KernelMaker::Executor)],
    gpu: Gpu::Kernels(&[gpu_made("T", PLAIN, KernelMaker::Executor)]),
    cost: Cost::Inline,
};

pub(crate) static REF_MERGE: Op = Op {
    def: OpDef {
        name: "RefMerge",
        signature: "(inputs:Ref(N*T)) -> (output:Ref(T), value_index:int32) ; T:type, N:int>=1",
        effects: Effects::Forwards,
        host: HostRule::OnDevice,
        host_args: &["value_index"],
        ..MERGE.def
    },
    kernels: &[cpu_made(KernelMaker::Executor)],
    gpu: Gpu::Kernels(&[gpu_made("T", PLAIN, KernelMaker::Executor)]),
    cost: Cost::Inline,
};

/// Only what holds for every input. The input that closes a loop comes later and must agree with this.
fn shape(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let mut output = ctx.input(0).clone();
    for i in 1..ctx.n_inputs() {
        output = output.relax(ctx.input(i));
    }
    Ok(vec![output, PartialShape::scalar()])
}

/// The gradient goes back to the input that was passed on; for the others it is dead. (The merges of loops are the
/// gradient rewrite's own.)
fn gradient<'g>(op: Operation<'g>, dy: &[Option<Output<'g>>]) -> Result<Vec<Option<Grad<'g>>>> {
    let Some(dy) = dy.first().copied().flatten() else { return Ok(Vec::new()) };
    let graph = op.graph();
    let side = |taken: i32| {
        let is_taken = graph.op("Equal").input(op.output(1)).input(graph.constant(taken)).out();
        graph.op("Switch").input(dy).input(is_taken).build()
    };
    if op.n_inputs() == 2 {
        let sides = side(1);
        return Ok(vec![Some(sides.output(0).into()), Some(sides.output(1).into())]);
    }
    Ok((0..op.n_inputs()).map(|i| Some(side(i as i32).output(1).into())).collect())
}

#[cfg(test)]
mod tests {
    use kolo_core::PartialShape;

    #[test]
    fn a_merge_knows_only_what_holds_for_all_inputs() {
        let g = crate::graph();
        let a = g.placeholder::<f32>("a", [2usize, 3]);
        let b = g.placeholder::<f32>("b", [2usize, 4]);
        let merge = g.op("Merge").inputs([a, b]).build();
        assert_eq!(merge.output(0).shape(), PartialShape::new(&[Some(2), None]));
        assert_eq!(merge.output(1).shape(), PartialShape::scalar());
    }
}
