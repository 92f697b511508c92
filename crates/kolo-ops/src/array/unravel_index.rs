//! `UnravelIndex`: places in a flat array as coordinates in one of several dimensions.

use kolo_core::{Dim, Error, PartialShape, Result, Shape};
use kolo_device::cpu::looking;
use kolo_graph::{Gradient, OpDef, Output};

use super::elements::{index_below, integer_tensor, integers};
use crate::op::{Gpu, Op, cpu_any};
use crate::{Cost, KernelCtx};

/// The coordinates, in an array of sizes `dims`, of the elements at `indices` of the same array laid flat: one column for each.
#[track_caller]
pub fn unravel_index<'g>(indices: Output<'g>, dims: Output<'g>) -> Output<'g> {
    indices.graph().op("UnravelIndex").inputs([indices, dims]).out()
}

pub(crate) static UNRAVEL_INDEX: Op = Op {
    def: OpDef {
        name: "UnravelIndex",
        signature: "(indices:Tidx, dims:Tidx) -> (output:Tidx) ; Tidx:type{int32,int64}=int32",
        shape: |ctx| {
            let dims = ctx.input_of_rank(1, 1)?;
            Ok(vec![match ctx.input(0).dims() {
                Some([]) => dims,
                Some([n]) => PartialShape::new(&[dims.dim(0), *n] as &[Dim]),
                Some(_) => return Err(not_a_vector(ctx.input(0))),
                None => PartialShape::unknown(),
            }])
        },
        gradient: Gradient::None("indices are whole numbers"),
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward)],
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

fn not_a_vector(shape: &dyn std::fmt::Display) -> Error {
    Error::invalid_argument(format!("The indices can only be scalar or vector, got \"{shape}\""))
}

fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (indices, dims) = (ctx.input(0)?, ctx.input(1)?);
    if indices.shape().rank() > 1 {
        return Err(not_a_vector(indices.shape()));
    }
    if dims.shape().rank() != 1 {
        return Err(Error::invalid_argument(format!("The indices can only be 1-D, got \"{}\"", dims.shape())));
    }
    let sizes = integers(dims)?;
    if let Some(i) = sizes.iter().position(|&size| size == 0) {
        return Err(Error::invalid_argument(format!(
            "Input dims cannot contain a dim of zero, but dims contains zero at index {i}"
        )));
    }
    let whole = Shape::from_signed(&sizes)?;
    let values = integers(indices)?;
    let n = values.len();
    let mut out = ctx.scratch(n * sizes.len(), 0i64, "coordinates")?;
    for (i, &value) in looking(values.iter().enumerate()) {
        let Some(mut rest) = index_below(value, whole.n_elements()) else {
            return Err(Error::invalid_argument(format!("index is out of bound as with dims: {value} in {whole}")));
        };
        for (at, &size) in whole.iter().enumerate().rev() {
            out[at * n + i] = (rest % size) as i64;
            rest /= size;
        }
    }
    let shape = if indices.shape().rank() == 0 { Shape::new(&[sizes.len()])? } else { Shape::new(&[sizes.len(), n])? };
    let out = integer_tensor(indices.dtype(), shape, out.to_vec())?;
    ctx.set_output(0, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::testing::{check_op, tensor};

    #[test]
    fn coordinates() {
        let case = check_op("UnravelIndex").input([22i32, 41, 37]).input([7i32, 6]);
        case.gives([[3i32, 6, 6], [4, 5, 1]]);
        check_op("UnravelIndex").input(1621i64).input([6i64, 7, 8, 9]).gives([3i64, 1, 4, 1]);
        let none = check_op("UnravelIndex").input(tensor::<i32, 1>([0], [])).input([2i32, 3]);
        none.gives(tensor::<i32, 2>([2, 0], []));
        check_op("UnravelIndex").input([42i32]).input([7i32, 6]).fails("out of bound");
        check_op("UnravelIndex").input([-1i32]).input([7i32, 6]).fails("out of bound");
        check_op("UnravelIndex").input([0i32]).input([7i32, 0]).fails("zero at index 1");
        check_op("UnravelIndex").input([[0i32]]).input([7i32]).fails("scalar or vector");
    }
}
