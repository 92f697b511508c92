//! `Bucketize`: between which of some ascending boundaries each element lies.

use kolo_core::{Error, Result};
use kolo_device::cpu::looking;
use kolo_graph::{Attrs, Gradient, OpDef, Output, shape_fns};

use crate::math::number::Number;
use crate::op::{Gpu, Op, cpu_kernels};
use crate::{Cost, KernelCtx};

/// For each element the number of `boundaries` that are not larger. The boundaries ascend.
#[track_caller]
pub fn bucketize<'g>(x: Output<'g>, boundaries: &[f32]) -> Output<'g> {
    x.graph().op("Bucketize").input(x).attr("boundaries", boundaries).out()
}

pub(crate) static BUCKETIZE: Op = Op {
    def: OpDef {
        name: "Bucketize",
        signature: "(input:T) -> (output:int32) ; T:type{int32,int64,float,double}, boundaries:list(float)",
        shape: shape_fns::same_as_input_0,
        gradient: Gradient::None("which bucket a value is in does not change smoothly"),
        ..OpDef::BASE
    },
    kernels: cpu_kernels!(forward: f32, f64, i32, i64),
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

fn boundaries(attrs: &Attrs) -> Result<Vec<f32>> {
    let list = match attrs.find("boundaries") {
        Some(kolo_graph::AttrValue::List(values)) => values
            .iter()
            .map(|value| match value {
                kolo_graph::AttrValue::Float(value) => Ok(*value),
                other => Err(Error::invalid_argument(format!("boundaries holds {other}"))),
            })
            .collect::<Result<Vec<f32>>>()?,
        _ => return Err(Error::invalid_argument("boundaries is missing")),
    };
    if !list.is_sorted() {
        return Err(Error::invalid_argument("Expected sorted boundaries"));
    }
    Ok(list)
}

fn forward<T: Number>(ctx: &mut KernelCtx<'_>) -> Result<()> {
    // Doubles hold both sides exactly, but for the largest 64-bit integers.
    let boundaries: Vec<f64> = boundaries(ctx.attrs())?.into_iter().map(f64::from).collect();
    let mut out = ctx.allocate(kolo_core::DType::I32, ctx.input(0)?.shape().clone())?;
    let input = ctx.data::<T>(0)?;
    for (y, x) in looking(out.data_mut::<i32>()?.iter_mut().zip(input)) {
        let x = x.to_f64();
        // A NaN is below nothing, and so beyond all boundaries.
        let below = |boundary: &f64| x < *boundary;
        *y = boundaries.partition_point(|boundary| !below(boundary)) as i32;
    }
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::testing::{check_op, tensor};

    #[test]
    fn bucketize() {
        let test = || check_op("Bucketize").attr("boundaries", vec![0.0f32, 10.0, 100.0]);
        // TensorFlow's example.
        test().input([[-5i32, 10000], [150, 10], [5, 100]]).gives([[0i32, 3], [3, 2], [1, 3]]);
        test().input([-0.5f32, 0.0, 9.999, f32::NAN]).gives([0i32, 1, 1, 3]);
        test().input([10.0f64, f64::INFINITY]).gives([2i32, 3]);
        test().input(tensor::<i64, 1>([0], [])).gives(tensor::<i32, 1>([0], []));
        check_op("Bucketize").attr("boundaries", Vec::<f32>::new()).input([1i64]).gives([0i32]);
        check_op("Bucketize").attr("boundaries", vec![1.0f32, 0.0]).input([1i64]).fails("Expected sorted boundaries");
    }
}
