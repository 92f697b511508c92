//! `Placeholder` and `PlaceholderV2`: a value that must be fed. `PlaceholderWithDefault`: one that may be.

use kolo_core::{Error, Result};
use kolo_graph::{Gradient, HostRule, OpDef, Output, Work, shape_fns};

use crate::cuda::PLAIN;
use crate::op::{Gpu, Op, cpu_any, gpu_kernel};
use crate::{Cost, KernelCtx};

/// A value that may be fed, and is `input` otherwise.
#[track_caller]
pub fn placeholder_with_default<'g>(input: Output<'g>, name: &str) -> Output<'g> {
    input.graph().op("PlaceholderWithDefault").name(name).input(input).attr("shape", input.shape()).out()
}

pub(crate) static PLACEHOLDER: Op = Op {
    def: OpDef {
        name: "Placeholder",
        signature: "() -> (output:dtype) ; dtype:type, shape:shape=<unknown>",
        shape: shape_fns::from_shape_attr,
        gradient: Gradient::None("a placeholder has no inputs"),
        host: HostRule::SmallIntegers,
        work: Work::Placeholder,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(not_fed)],
    gpu: Gpu::Kernels(&[gpu_kernel("dtype", PLAIN, not_fed)]),
    cost: Cost::Inline,
};

pub(crate) static PLACEHOLDER_V2: Op = Op {
    def: OpDef {
        name: "PlaceholderV2",
        signature: "() -> (output:dtype) ; dtype:type, shape:shape",
        host: HostRule::SmallIntegers,
        ..PLACEHOLDER.def
    },
    kernels: &[cpu_any(not_fed)],
    gpu: Gpu::Kernels(&[gpu_kernel("dtype", PLAIN, not_fed)]),
    cost: Cost::Inline,
};

pub(crate) static PLACEHOLDER_WITH_DEFAULT: Op = Op {
    def: OpDef {
        name: "PlaceholderWithDefault",
        signature: "(input:dtype) -> (output:dtype) ; dtype:type, shape:shape",
        shape: shape_fns::from_shape_attr,
        gradient: Gradient::Same,
        host: HostRule::SmallIntegers,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(|ctx| ctx.forward(0, 0))],
    gpu: Gpu::Kernels(&[gpu_kernel("dtype", PLAIN, |ctx| ctx.forward(0, 0))]),
    cost: Cost::Inline,
};

fn not_fed(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (dtype, shape) = (ctx.attrs().dtype("dtype")?, ctx.attrs().shape("shape")?);
    let shape = if shape.rank().is_some() { format!(" and shape {shape}") } else { String::new() };
    Err(Error::invalid_argument(format!(
        "You must feed a value for placeholder tensor '{}' with dtype {dtype}{shape}",
        ctx.node.name
    )))
}

#[cfg(test)]
mod tests {
    use kolo_core::{DType, PartialShape};

    use crate::testing::{check_op, wavy};

    #[test]
    fn an_unfed_placeholder_is_named() {
        check_op("Placeholder")
            .attr("dtype", DType::F32)
            .attr("shape", PartialShape::new(&[None, Some(2)]))
            .fails("You must feed a value for placeholder tensor 'Placeholder' with dtype float and shape [?,2]");
        check_op("PlaceholderV2").attr("dtype", DType::F32).fails("shape");
        check_op("PlaceholderV2")
            .attr("dtype", DType::I64)
            .attr("shape", PartialShape::scalar())
            .fails("placeholder tensor 'PlaceholderV2' with dtype int64");
    }

    #[test]
    fn the_default_is_used() {
        check_op("PlaceholderWithDefault")
            .attr("shape", PartialShape::unknown())
            .input(wavy([2], 0))
            .gives(wavy([2], 0))
            .gradient();
    }
}
