//! `FakeQueue`: a resource handle as the older ops expect it, a reference to container and name.

use bytes::Bytes;
use kolo_core::{DType, PartialShape, Result, Tensor};
use kolo_graph::{Effects, Gradient, OpDef};

use crate::op::{Gpu, Op, cpu_any};
use crate::{Cost, KernelCtx, VariableCell};

pub(crate) static FAKE_QUEUE: Op = Op {
    def: OpDef {
        name: "FakeQueue",
        signature: "(resource:resource) -> (handle:Ref(string))",
        shape: super::make::pair,
        gradient: Gradient::None("a handle is no number"),
        stateful: true,
        effects: Effects::Forwards,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(convert)],
    gpu: Gpu::OBJECTS,
    cost: Cost::Inline,
};

fn convert(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let handle = ctx.input(0)?.resource()?;
    let text = |text: &str| Bytes::copy_from_slice(text.as_bytes());
    let pair = Tensor::from_strings([2], vec![text(&handle.container), text(&handle.name)])?;
    let cell = VariableCell::new(handle.name.clone(), DType::Str, PartialShape::from([2usize]));
    cell.assign(pair)?;
    ctx.set_reference(0, cell);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Evaluation;

    #[test]
    fn old_ops_reach_a_new_queue() {
        let g = crate::graph();
        let queue = g.op("FIFOQueueV2").attr("component_types", vec![DType::F32]).attr("shared_name", "q").out();
        let put = g.op("QueueEnqueueV2").input(queue).input(g.constant(3.0f32)).build();
        let old = g.op("FakeQueue").input(queue).out();
        assert!(old.is_ref());
        let take = g.op("QueueDequeue").input(old).attr("component_types", vec![DType::F32]).out();
        g.check().unwrap();
        let run = Evaluation::new(g.snapshot());
        run.run_targets(&[put], &[]).unwrap();
        assert_eq!(run.run(&[take], &[]).unwrap(), [Tensor::scalar(3.0f32)]);
    }
}
