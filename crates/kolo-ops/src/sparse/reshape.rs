//! `SparseReshape`: the coordinates of a sparse tensor's elements when its shape is another.

use kolo_core::{Error, PartialShape, Result, Tensor};
use kolo_device::cpu::looking;
use kolo_graph::{Gradient, OpDef, Output};

use crate::op::{Gpu, Op, cpu_any};
use crate::{Cost, KernelCtx};

/// The coordinates and the shape of a sparse tensor that is given another shape, in which one size may be −1.
#[track_caller]
pub fn sparse_reshape<'g>(indices: Output<'g>, shape: Output<'g>, new_shape: Output<'g>) -> [Output<'g>; 2] {
    let op = indices.graph().op("SparseReshape").inputs([indices, shape, new_shape]).build();
    [op.output(0), op.output(1)]
}

pub(crate) static SPARSE_RESHAPE: Op = Op {
    def: OpDef {
        name: "SparseReshape",
        signature: "(input_indices:int64, input_shape:int64, new_shape:int64) -> (output_indices:int64, \
                    output_shape:int64)",
        shape: |ctx| {
            let indices = ctx.input_of_rank(0, 2)?;
            ctx.input_of_rank(1, 1)?;
            let new = ctx.input_of_rank(2, 1)?;
            Ok(vec![PartialShape::new(&[indices.dim(0), new.dim(0)]), new])
        },
        gradient: Gradient::None("coordinates are whole numbers"),
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward)],
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

fn text(dims: &[i64]) -> String {
    format!("[{}]", dims.iter().map(i64::to_string).collect::<Vec<_>>().join(","))
}

/// How many elements there would be if none were missing.
fn dense_size(dims: &[i64]) -> Result<i64> {
    let product = dims.iter().try_fold(1i64, |product, &dim| if dim < 0 { None } else { product.checked_mul(dim) });
    product.ok_or_else(|| {
        Error::invalid_argument(format!(
            "a sparse tensor's shape must be non-negative and of fewer than 2^63 places: {}",
            text(dims)
        ))
    })
}

/// The new shape, with the size that was left open.
fn resolve(old: &[i64], new: &[i64]) -> Result<Vec<i64>> {
    let total = dense_size(old)?;
    let mut out = new.to_vec();
    let mut open = new.iter().enumerate().filter(|(_, dim)| **dim == -1).map(|(i, _)| i);
    if let Some(at) = open.next() {
        if let Some(other) = open.next() {
            return Err(Error::invalid_argument(format!(
                "only one output shape size may be -1, not both {at} and {other}"
            )));
        }
        out[at] = 1;
        let known = dense_size(&out)?;
        if known == 0 {
            return Err(Error::invalid_argument(
                "reshape cannot infer the missing input size for an empty tensor unless all specified input sizes are \
                 non-zero",
            ));
        }
        if total % known != 0 {
            return Err(Error::invalid_argument(format!(
                "Input to reshape is a SparseTensor with {total} dense values, but the requested shape requires a \
                 multiple of {known}. input_shape={} output_shape={}",
                text(old),
                text(new)
            )));
        }
        out[at] = total / known;
    }
    if let Some(at) = out.iter().position(|&dim| dim < 0) {
        return Err(Error::invalid_argument(format!("size {at} must be non-negative, not {}", out[at])));
    }
    let asked = dense_size(&out)?;
    if asked != total {
        return Err(Error::invalid_argument(format!(
            "Input to reshape is a tensor with {total} dense values, but the requested shape has {asked}. input_shape={} \
             output_shape={}",
            text(old),
            text(&out)
        )));
    }
    Ok(out)
}

fn forward(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (indices, old, new) = (ctx.input(0)?, ctx.input(1)?, ctx.input(2)?);
    let &[n, depth] = indices.shape().dims() else {
        return Err(Error::invalid_argument(format!(
            "Input indices should be a matrix but received shape {}",
            indices.shape()
        )));
    };
    for (name, shape) in [("Input", old), ("Target", new)] {
        if shape.shape().rank() != 1 {
            return Err(Error::invalid_argument(format!(
                "{name} shape should be a vector but received shape {}",
                shape.shape()
            )));
        }
    }
    let old = old.data::<i64>()?;
    if depth != old.len() {
        return Err(Error::invalid_argument(format!(
            "Input tensor rank must match input shape length: {depth} and {}",
            old.len()
        )));
    }
    let shape = resolve(old, new.data::<i64>()?)?;
    let width = shape.len();
    let mut out = ctx.allocate(kolo_core::DType::I64, kolo_core::Shape::new(&[n, width])?)?;
    let from = indices.data::<i64>()?;
    let to = out.data_mut::<i64>()?;
    for i in looking(0..n) {
        let row = &from[i * depth..(i + 1) * depth];
        let mut place = 0i64;
        for (d, (&at, &dim)) in row.iter().zip(old).enumerate() {
            if at < 0 || at >= dim {
                return Err(Error::invalid_argument(format!(
                    "Index {at} in dimension {d} of element {i} is out of bounds for input shape {}",
                    text(old)
                )));
            }
            place = place * dim + at;
        }
        for (to, &dim) in to[i * width..(i + 1) * width].iter_mut().zip(&shape).rev() {
            // The new shape has as many places, so none of its sizes is 0 if there is an element.
            (*to, place) = (place % dim.max(1), place / dim.max(1));
        }
    }
    ctx.set_output(0, out);
    ctx.set_output(1, Tensor::from(shape));
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::testing::{OpTest, check_op, tensor};

    fn case(new: &[i64]) -> OpTest {
        let shape = Tensor::from(new.to_vec());
        check_op("SparseReshape")
            .input([[0i64, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0], [1, 2, 3]])
            .input([2i64, 3, 6])
            .input(shape)
    }

    #[test]
    fn coordinates_follow_the_shape() {
        // TensorFlow's example.
        let out = || Tensor::from([[0i64, 0], [0, 1], [1, 2], [4, 2], [8, 1]]);
        case(&[9, -1]).gives_all([out(), Tensor::from([9i64, 4])]);
        case(&[9, 4]).gives_all([out(), Tensor::from([9i64, 4])]);
        case(&[36]).gives_all([tensor([5, 1], [0i64, 1, 6, 18, 33]), Tensor::from([36i64])]);
        check_op("SparseReshape")
            .input(tensor::<i64, 2>([0, 2], []))
            .input([0i64, 3])
            .input([0i64])
            .gives_all([tensor::<i64, 2>([0, 1], []), Tensor::from([0i64])]);
    }

    #[test]
    fn bad_shapes() {
        case(&[-1, -1]).fails("only one output shape size may be -1, not both 0 and 1");
        case(&[5, -1]).fails("requires a multiple of 5");
        case(&[5, 7]).fails("has 35");
        case(&[-2, 18]).fails("non-negative");
        case(&[0, -1]).fails("cannot infer");
        case(&[i64::MAX, 2]).fails("2^63");
        check_op("SparseReshape").input([[3i64]]).input([3i64]).input([3i64]).fails("out of bounds");
    }
}
