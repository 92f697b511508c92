//! Many elements at once: `TensorArrayGatherV3` and `TensorArrayScatterV3` stack and unstack them,
//! `TensorArrayConcatV3` and `TensorArraySplitV3` join and cut them along their first dimension.

use kolo_core::{Dim, Error, PartialShape, Result, Shape, Tensor};
use kolo_graph::{Effects, Gradient, InferCtx, OpDef, shape_fns};

use super::object::ArrayObject;
use super::{TensorArray, array};
use crate::math::binary::first;
use crate::op::{Gpu, Op, cpu_any};
use crate::{Cost, KernelCtx};

pub(crate) static TENSOR_ARRAY_GATHER_V3: Op = Op {
    def: OpDef {
        name: "TensorArrayGatherV3",
        signature: "(handle:resource, indices:int32, flow_in:float) -> (value:dtype) ; dtype:type, \
                    element_shape:shape=<unknown>",
        shape: stacked,
        gradient: Gradient::Rule(|op, dy| {
            let dy = first(dy)?;
            let array = TensorArray::gradient_of(op.input(0), dy.dtype(), op.input(2));
            Ok(vec![None, None, Some(array.scatter(op.input(1), dy).flow().into())])
        }),
        stateful: true,
        effects: Effects::Uses,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(gather)],
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

pub(crate) static TENSOR_ARRAY_SCATTER_V3: Op = Op {
    def: OpDef {
        name: "TensorArrayScatterV3",
        signature: "(handle:resource, indices:int32, value:T, flow_in:float) -> (flow_out:float) ; T:type",
        shape: shape_fns::scalars,
        gradient: Gradient::Rule(|op, dy| {
            let (array, flow) = TensorArray::gradient_after(op, op.input(2).dtype(), first(dy)?);
            Ok(vec![None, None, Some(array.gather(op.input(1)).into()), Some(flow.into())])
        }),
        stateful: true,
        effects: Effects::Uses,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(scatter)],
    gpu: Gpu::Missing,
    cost: Cost::Inline,
};

pub(crate) static TENSOR_ARRAY_CONCAT_V3: Op = Op {
    def: OpDef {
        name: "TensorArrayConcatV3",
        signature: "(handle:resource, flow_in:float) -> (value:dtype, lengths:int64) ; dtype:type, \
                    element_shape_except0:shape=<unknown>",
        shape: |ctx| {
            let rest = ctx.attrs().shape("element_shape_except0")?;
            Ok(vec![PartialShape::of_rank(1).concat(rest), PartialShape::of_rank(1)])
        },
        gradient: Gradient::Rule(|op, dy| {
            let Some(dy) = dy.first().copied().flatten() else { return Ok(Vec::new()) };
            let array = TensorArray::gradient_of(op.input(0), dy.dtype(), op.input(1));
            Ok(vec![None, Some(array.split(dy, op.output(1)).flow().into())])
        }),
        stateful: true,
        effects: Effects::Uses,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(concat)],
    gpu: Gpu::Missing,
    cost: Cost::Elements,
};

pub(crate) static TENSOR_ARRAY_SPLIT_V3: Op = Op {
    def: OpDef {
        name: "TensorArraySplitV3",
        signature: "(handle:resource, value:T, lengths:int64, flow_in:float) -> (flow_out:float) ; T:type",
        shape: shape_fns::scalars,
        gradient: Gradient::Rule(|op, dy| {
            let (array, flow) = TensorArray::gradient_after(op, op.input(1).dtype(), first(dy)?);
            Ok(vec![None, Some(array.concat().into()), None, Some(flow.into())])
        }),
        stateful: true,
        effects: Effects::Uses,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(split)],
    gpu: Gpu::Missing,
    cost: Cost::Inline,
};

/// As many elements as there are indices.
fn stacked(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let n: Dim = ctx.input_of_rank(1, 1)?.dim(0);
    let element = ctx.attrs().shape("element_shape")?;
    let element = ctx.handle(0).map_or(Ok(element.clone()), |(_, known)| element.merge(known))?;
    Ok(vec![PartialShape::new(&[n]).concat(&element)])
}

fn gather(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (array, indices) = (array(ctx)?, ctx.integers(1)?);
    expect_dtype(ctx, &array)?;
    let declared = ctx.attrs().shape("element_shape")?.merge(&array.element_shape()?)?;
    let tensors = indices.iter().map(|&index| array.read(ctx, index)).collect::<Result<Vec<_>>>()?;
    let element = match tensors.first() {
        Some(tensor) => tensor.shape().clone(),
        None => declared.known().ok_or_else(|| zero_size(&array, &declared))?,
    };
    if let Some(odd) = tensors.iter().position(|tensor| tensor.shape() != &element) {
        return Err(array.error(format!(
            "has inconsistent shapes.  Index 0 has shape: {element} but index {odd} has shape: {}",
            tensors[odd].shape()
        )));
    }
    let dims: Vec<usize> = std::iter::once(tensors.len()).chain(element.iter().copied()).collect();
    let value = join(ctx, &array, &tensors, Shape::new(&dims)?)?;
    ctx.set_output(0, value);
    Ok(())
}

fn scatter(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (array, indices, value) = (array(ctx)?, ctx.integers(1)?, ctx.take_input(2)?);
    let dims = value.shape().dims();
    let [n, element @ ..] = dims else {
        return Err(Error::invalid_argument("Expected value to be at least a vector, but received shape: []"));
    };
    if *n != indices.len() {
        return Err(Error::invalid_argument(format!(
            "Expected len(indices) == values.shape[0], but saw: {} vs. {n}",
            indices.len()
        )));
    }
    let element = Shape::new(element)?;
    for (i, &index) in indices.iter().enumerate() {
        array.write(ctx, index, value.rows(i, 1)?.reshaped(element.clone())?)?;
    }
    ctx.forward(3, 0)
}

fn concat(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let array = array(ctx)?;
    expect_dtype(ctx, &array)?;
    let n = array.size()?;
    let tensors = (0..n as i64).map(|index| array.read(ctx, index)).collect::<Result<Vec<_>>>()?;
    let lengths = tensors
        .iter()
        .map(|tensor| {
            tensor
                .shape()
                .first()
                .map(|&n| n as i64)
                .ok_or_else(|| array.error("Concat saw a scalar shape but requires at least vectors.".to_owned()))
        })
        .collect::<Result<Vec<i64>>>()?;
    let rest: Vec<usize> = match tensors.first() {
        Some(tensor) => tensor.shape()[1..].to_vec(),
        None => {
            let declared = ctx.attrs().shape("element_shape_except0")?;
            declared.known().ok_or_else(|| zero_size(&array, declared))?.dims().to_vec()
        }
    };
    if let Some(odd) = tensors.iter().position(|tensor| tensor.shape()[1..] != rest) {
        return Err(array.error(format!(
            "has inconsistent shapes.  Index 0 has (excepting dimension 0) shape: {rest:?} but index {odd} has: {:?}",
            &tensors[odd].shape()[1..]
        )));
    }
    let n_rows = tensors.iter().map(|tensor| tensor.shape()[0]).sum();
    let dims: Vec<usize> = std::iter::once(n_rows).chain(rest).collect();
    let value = join(ctx, &array, &tensors, Shape::new(&dims)?)?;
    ctx.set_output(0, value);
    ctx.set_output(1, Tensor::vector(lengths));
    Ok(())
}

fn split(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let (array, value, lengths) = (array(ctx)?, ctx.take_input(1)?, ctx.integers(2)?);
    let Some(&n_rows) = value.shape().first() else {
        return Err(Error::invalid_argument("Expected value to be at least a vector, but received shape: []"));
    };
    let lengths = lengths
        .iter()
        .map(|&n| usize::try_from(n).map_err(|_| Error::invalid_argument(format!("length {n} is negative"))))
        .collect::<Result<Vec<usize>>>()?;
    let total = lengths.iter().try_fold(0usize, |total, &n| total.checked_add(n));
    if total != Some(n_rows) {
        return Err(Error::invalid_argument(format!(
            "Expected sum of lengths to be equal to values.shape[0], but sum of lengths is {total:?} and value's shape is: \
             {}",
            value.shape()
        )));
    }
    let mut start = 0;
    for (i, n) in lengths.into_iter().enumerate() {
        array.write(ctx, i as i64, value.rows(start, n)?)?;
        start += n;
    }
    ctx.forward(3, 0)
}

fn expect_dtype(ctx: &KernelCtx<'_>, array: &ArrayObject) -> Result<()> {
    let expected = ctx.attrs().dtype("dtype")?;
    if array.dtype() == expected {
        return Ok(());
    }
    Err(array.error(format!("TensorArray dtype is {} but Op requested dtype {expected}.", array.dtype())))
}

fn zero_size(array: &ArrayObject, declared: &PartialShape) -> Error {
    array.error(format!(
        "has size zero, but element shape {declared} is not fully defined. Currently only static shapes are supported when \
         packing zero-size TensorArrays."
    ))
}

/// The elements of all tensors one after the other, as one tensor of `shape`.
fn join(ctx: &KernelCtx<'_>, array: &ArrayObject, tensors: &[Tensor], shape: Shape) -> Result<Tensor> {
    if array.dtype().size().is_none() {
        let mut strings = ctx.strings(shape.n_elements())?;
        for tensor in tensors {
            strings.extend_from_slice(tensor.strings()?);
        }
        return ctx.string_tensor(shape, strings);
    }
    let mut joined = ctx.allocate(array.dtype(), shape)?;
    let mut rest = joined.host_bytes_mut()?;
    for tensor in tensors {
        let bytes = tensor.host_bytes()?;
        let (piece, after) = rest.split_at_mut(bytes.len());
        piece.copy_from_slice(bytes);
        rest = after;
    }
    Ok(joined)
}
