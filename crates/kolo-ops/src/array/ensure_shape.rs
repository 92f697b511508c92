//! `EnsureShape`: the same value, if its shape is the one that is expected.

use kolo_core::{Error, Result};
use kolo_graph::{Gradient, HalfSafety, HostRule, OpDef, Output};

use crate::cuda::PLAIN;
use crate::math::binary::first;
use crate::op::{Gpu, Op, cpu_any, gpu_kernel};
use crate::{Cost, KernelCtx};

/// The same value; an error in a step if its shape is not `shape`, in which unknown sizes fit all.
#[track_caller]
pub fn ensure_shape<'g>(x: Output<'g>, shape: impl Into<kolo_core::PartialShape>) -> Output<'g> {
    x.graph().op("EnsureShape").input(x).attr("shape", shape.into()).out()
}

pub(crate) static ENSURE_SHAPE: Op = Op {
    def: OpDef {
        name: "EnsureShape",
        signature: "(input:T) -> (output:T) ; shape:shape, T:type",
        shape: |ctx| Ok(vec![ctx.input(0).merge(ctx.attrs().shape("shape")?)?]),
        gradient: Gradient::Rule(|op, dy| {
            let shape = op.attrs(|attrs| attrs.shape("shape").cloned())?;
            Ok(vec![Some(ensure_shape(first(dy)?, shape).into())])
        }),
        host: HostRule::SmallIntegers,
        half: HalfSafety::Neutral,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward)],
    gpu: Gpu::Kernels(&[gpu_kernel("T", PLAIN, forward)]),
    cost: Cost::Inline,
};

fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (expected, found) = (ctx.attrs().shape("shape")?, ctx.input(0)?.shape());
    if !expected.admits(found) {
        return Err(Error::invalid_argument(format!(
            "Shape of tensor {} {found} is not compatible with expected shape {expected}.",
            ctx.node.name
        )));
    }
    ctx.forward(0, 0)
}

#[cfg(test)]
mod tests {
    use kolo_core::PartialShape;

    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn shapes() {
        let grid = || tensor([2, 3], (0..6).collect::<Vec<i32>>());
        let case = |shape: PartialShape| check_op("EnsureShape").input(grid()).attr("shape", shape);
        case(PartialShape::from([2usize, 3])).gives(grid());
        case(PartialShape::new(&[None, Some(3)])).gives(grid());
        case(PartialShape::unknown()).gives(grid());
        case(PartialShape::new(&[None, Some(2)])).fails("compatible");
        case(PartialShape::from([6usize])).fails("compatible");
        check_op("EnsureShape").input(wavy([2], 0)).attr("shape", PartialShape::new(&[None])).gradient();
    }

    #[test]
    fn a_shape_that_shows_in_the_step_is_refused_there() {
        let g = crate::graph();
        let x = g.op("Placeholder").attr("dtype", kolo_core::DType::F32).attr("shape", PartialShape::unknown()).out();
        let y = super::ensure_shape(x, PartialShape::new(&[None, Some(2)]));
        assert_eq!(y.shape().to_string(), "[?,2]");
        let run = |fed| crate::testing::evaluate(&g, &[y], &[(x, fed)]);
        run(tensor([3, 2], vec![0.0f32; 6])).unwrap();
        let error = run(tensor([2], vec![0.0f32; 2])).unwrap_err();
        assert!(error.message().contains("[2] is not compatible with expected shape [?,2]."), "{error}");
    }
}
