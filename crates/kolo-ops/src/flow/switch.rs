//! `Switch` and `RefSwitch`: pass their data on to one of two outputs; the other is dead. `kolo_graph::Graph::cond` and
//! `while_loop` make them.

use kolo_core::{DType, Result};
use kolo_graph::{Effects, Flow, Grad, Gradient, HostRule, OpDef, Operation, Output, shape_fns};

use crate::Cost;
use crate::cuda::PLAIN;
use crate::op::{Gpu, KernelMaker, Op, cpu_made, gpu_made};

pub(crate) static SWITCH: Op = Op {
    def: OpDef {
        name: "Switch",
        signature: "(data:T, pred:bool) -> (output_false:T, output_true:T) ; T:type",
        shape: shape_fns::same_as_input_0,
        gradient: Gradient::Rule(gradient),
        host: HostRule::SmallIntegers,
        flow: Flow::Switch,
        host_args: &["pred"],
        ..OpDef::BASE
    },
    kernels: &[cpu_made(KernelMaker::Executor)],
    gpu: Gpu::Kernels(&[gpu_made("T", PLAIN, KernelMaker::Executor)]),
    cost: Cost::Inline,
};

pub(crate) static REF_SWITCH: Op = Op {
    def: OpDef {
        name: "RefSwitch",
        signature: "(data:Ref(T), pred:bool) -> (output_false:Ref(T), output_true:Ref(T)) ; T:type",
        effects: Effects::Forwards,
        host: HostRule::OnDevice,
        allows_uninitialized_input: true,
        host_args: &["pred"],
        ..SWITCH.def
    },
    kernels: &[cpu_made(KernelMaker::Executor)],
    gpu: Gpu::Kernels(&[gpu_made("T", PLAIN, KernelMaker::Executor)]),
    cost: Cost::Inline,
};

/// The gradient of a value that goes into a branch: what comes back from the side that was taken, and zeros if that
/// side does not use it. (The switches of loops are the gradient rewrite's own.)
fn gradient<'g>(op: Operation<'g>, dy: &[Option<Output<'g>>]) -> Result<Vec<Option<Grad<'g>>>> {
    let Some(dtype) = dy.iter().flatten().map(|grad| grad.dtype()).next() else { return Ok(Vec::new()) };
    let graph = op.graph();
    let sides: Vec<Output<'g>> = (0..2)
        .map(|side| match dy.get(side).copied().flatten() {
            Some(grad) => grad,
            // Zeros that are dead unless this side was taken, so that the merge has one live input.
            None => graph.op("Switch").input(zeros(op, dtype)).input(op.input(1)).build().output(side),
        })
        .collect();
    Ok(vec![Some(graph.op("Merge").inputs(sides).out().into()), None])
}

/// Zeros as large as the data, or as the variable that the data refers to.
fn zeros(op: Operation<'_>, dtype: DType) -> Output<'_> {
    let (graph, data) = (op.graph(), op.input(0));
    let is_variable = data.dtype() == DType::Resource;
    let shape = if is_variable { data.handle().map(|(_, shape)| shape) } else { Some(data.shape()) };
    if let Some(shape) = shape.and_then(|shape| shape.known()) {
        return graph.zeros(dtype, &shape);
    }
    let value = match is_variable {
        true => graph.op("ReadVariableOp").input(data).attr("dtype", dtype).out(),
        false => data,
    };
    graph.op("ZerosLike").input(value).out()
}

#[cfg(test)]
mod tests {
    use kolo_core::PartialShape;

    #[test]
    fn both_outputs_have_the_shape_of_the_data() {
        let g = crate::graph();
        let x = g.placeholder::<f32>("x", [None, Some(3)]);
        let pred = g.placeholder::<bool>("p", PartialShape::scalar());
        let switch = g.op("Switch").input(x).input(pred).build();
        assert_eq!(switch.output(1).shape(), x.shape());
        assert!(g.op("Switch").input(x).input(x).try_build().is_err(), "a float is no predicate");
    }
}
