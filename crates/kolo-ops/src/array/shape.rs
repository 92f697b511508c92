//! `Shape`: the sizes of a tensor's dimensions, as an integer vector.

use kolo_core::{DType, Error, PartialShape, Result, Tensor};
use kolo_graph::{Gradient, OpDef, Output};

use crate::op::{Op, cpu_any};
use crate::{Cost, KernelCtx};

/// The shape of `x`, as int32.
#[track_caller]
pub fn shape(x: Output<'_>) -> Output<'_> {
    x.graph().op("Shape").input(x).out()
}

pub(crate) static SHAPE: Op = Op {
    def: OpDef {
        name: "Shape",
        signature: "(input:T) -> (output:out_type) ; T:type, out_type:type{int32,int64}=int32",
        shape: |ctx| Ok(vec![PartialShape::new(&[ctx.input(0).rank()])]),
        gradient: Gradient::None("shapes are integers"),
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward)],
    cost: Cost::Inline,
};

fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let output = shape_tensor(ctx.input(0)?, ctx.attrs().dtype("out_type")?)?;
    ctx.set_output(0, output);
    Ok(())
}

/// The shape of a tensor as a tensor of int32 or int64.
pub(crate) fn shape_tensor(tensor: &Tensor, dtype: DType) -> Result<Tensor> {
    let dims = tensor.shape().dims();
    match dtype {
        DType::I64 => Ok(Tensor::vector(dims.iter().map(|&dim| dim as i64).collect::<Vec<_>>())),
        _ => {
            let narrow = |&dim: &usize| {
                i32::try_from(dim).map_err(|_| Error::invalid_argument(format!("size {dim} does not fit int32")))
            };
            Ok(Tensor::vector(dims.iter().map(narrow).collect::<Result<Vec<_>>>()?))
        }
    }
}

#[cfg(test)]
mod tests {
    use kolo_core::DType;

    use crate::testing::{check_op, tensor, wavy};

    #[test]
    fn shape() {
        check_op("Shape").input(wavy([2, 3], 0)).gives([2i32, 3]);
        check_op("Shape").attr("out_type", DType::I64).input(wavy([4], 0)).gives([4i64]);
        check_op("Shape").input(1.0f32).gives(tensor::<i32, 1>([0], []));
    }
}
