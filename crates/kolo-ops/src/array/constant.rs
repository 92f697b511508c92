//! `Const`: a value written into the graph. The executor hands it to its consumers before a step begins.

use kolo_core::{Error, PartialShape, Result};
use kolo_graph::{Gradient, HostRule, OpDef, Work};

use crate::cuda::PLAIN;
use crate::op::{Gpu, Op, cpu_any, gpu_kernel};
use crate::{Cost, KernelCtx};

pub(crate) static CONST: Op = Op {
    def: OpDef {
        name: "Const",
        signature: "() -> (output:dtype) ; value:tensor, dtype:type",
        shape: |ctx| {
            let value = ctx.attrs().tensor("value")?;
            let dtype = ctx.attrs().dtype("dtype")?;
            if value.dtype() != dtype {
                return Err(Error::invalid_argument(format!("dtype is {dtype}, but the value is {}", value.dtype())));
            }
            Ok(vec![PartialShape::from(value.shape())])
        },
        gradient: Gradient::None("a constant has no inputs"),
        host: HostRule::SmallIntegers,
        work: Work::Constant,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward)],
    gpu: Gpu::Kernels(&[gpu_kernel("dtype", PLAIN, on_gpu)]),
    cost: Cost::Inline,
};

fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let value = ctx.attrs().tensor("value")?.clone();
    ctx.set_output(0, value);
    Ok(())
}

fn on_gpu(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let value = ctx.attrs().tensor("value")?.clone();
    let (copy, event) = ctx.device.copy(&value, ctx.device.memory())?;
    if let Some(event) = event {
        event.wait()?;
    }
    ctx.set_output(0, copy);
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::{DType, Tensor};

    use crate::testing::check_op;

    #[test]
    fn constant() {
        let value = Tensor::from([1.0f32, 2.0]);
        check_op("Const").attr("dtype", DType::F32).attr("value", value.clone()).gives(value.clone());
        check_op("Const")
            .attr("dtype", DType::I32)
            .attr("value", value)
            .fails("dtype is int32, but the value is float");
    }
}
