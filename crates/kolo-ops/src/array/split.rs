//! `Split` and `SplitV`: a tensor cut into pieces along a dimension. `Unpack`: the same, pieces of size 1 whose dimension
//! goes away.

use kolo_core::{Dim, Error, PartialShape, Result, Shape, Tensor};
use kolo_graph::shape_fns::resolve_axis;
use kolo_graph::{Grad, Gradient, HalfSafety, HostRule, InferCtx, OpDef, Operation, Output};

use super::elements::{IntoInts, integer, integers};
use super::strided_slice::read_view;
use super::view::{View, strides};
use crate::cuda::PLAIN;
use crate::op::{Gpu, Op, cpu_any, gpu_kernel};
use crate::{Cost, KernelCtx};

/// `x` cut into `n` equal pieces along dimension `axis`.
#[track_caller]
pub fn split(x: Output<'_>, n: usize, axis: i32) -> Vec<Output<'_>> {
    let graph = x.graph();
    graph.op("Split").input(graph.constant(axis)).input(x).attr("num_split", n).build().outputs()
}

/// `x` cut into `n` pieces of these sizes along dimension `axis`; one size may be −1, for what is left.
#[track_caller]
pub fn split_sizes<'g>(x: Output<'g>, sizes: impl IntoInts<'g>, n: usize, axis: i32) -> Vec<Output<'g>> {
    let graph = x.graph();
    let inputs = [x, sizes.into_ints(graph), graph.constant(axis)];
    graph.op("SplitV").inputs(inputs).attr("num_split", n).build().outputs()
}

/// The `n` slices of `x` along dimension `axis`, each without that dimension.
#[track_caller]
pub fn unstack(x: Output<'_>, n: usize, axis: i64) -> Vec<Output<'_>> {
    x.graph().op("Unpack").input(x).attr("num", n).attr("axis", axis).build().outputs()
}

pub(crate) static SPLIT: Op = Op {
    def: OpDef {
        name: "Split",
        signature: "(split_dim:int32, value:T) -> (output:num_split*T) ; num_split:int>=1, T:type",
        shape: infer_split,
        gradient: Gradient::Rule(|op, dy| {
            let whole = joined(op, dy, op.input(0));
            Ok(vec![None, Some(whole)])
        }),
        host: HostRule::SmallIntegers,
        half: HalfSafety::Neutral,
        host_args: &["split_dim"],
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward_split)],
    gpu: Gpu::Kernels(&[gpu_kernel("T", PLAIN, forward_split)]),
    cost: Cost::Elements,
};

pub(crate) static SPLIT_V: Op = Op {
    def: OpDef {
        name: "SplitV",
        signature: "(value:T, size_splits:Tlen, split_dim:int32) -> (output:num_split*T) ; num_split:int>=1, T:type, \
                    Tlen:type{int8,int32,int64}=int64",
        shape: infer_split_v,
        gradient: Gradient::Rule(|op, dy| {
            let whole = joined(op, dy, op.input(2));
            Ok(vec![Some(whole), None, None])
        }),
        host: HostRule::SmallIntegers,
        half: HalfSafety::Neutral,
        host_args: &["size_splits", "split_dim"],
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward_split_v)],
    gpu: Gpu::Kernels(&[gpu_kernel("T", PLAIN, forward_split_v)]),
    cost: Cost::Elements,
};

pub(crate) static UNPACK: Op = Op {
    def: OpDef {
        name: "Unpack",
        signature: "(value:T) -> (output:num*T) ; num:int>=0, T:type, axis:int=0",
        shape: |ctx| {
            let Some(dims) = ctx.input(0).dims() else { return kolo_graph::shape_fns::unknown(ctx) };
            let mut dims = dims.to_vec();
            let axis = resolve_axis(ctx.attrs().int("axis")?, dims.len())?;
            let size = dims.remove(axis);
            check_number(size.unwrap_or(ctx.n_outputs()), ctx.n_outputs())?;
            Ok(vec![PartialShape::new(&dims); ctx.n_outputs()])
        },
        gradient: Gradient::Rule(|op, dy| {
            let axis = op.attrs(|attrs| attrs.int("axis"))?;
            let parts = arrived(op, dy);
            Ok(vec![Some(op.graph().op("Pack").inputs(parts).attr("axis", axis).out().into())])
        }),
        host: HostRule::SmallIntegers,
        half: HalfSafety::Neutral,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward_unpack)],
    gpu: Gpu::Kernels(&[gpu_kernel("T", PLAIN, forward_unpack)]),
    cost: Cost::Elements,
};

/// The gradient of every output, zeros where none arrived.
fn arrived<'g>(op: Operation<'g>, dy: &[Option<Output<'g>>]) -> Vec<Output<'g>> {
    let zeros = |i| super::fill::zeros_like(op.output(i));
    dy.iter().enumerate().map(|(i, grad)| grad.unwrap_or_else(|| zeros(i))).collect()
}

fn joined<'g>(op: Operation<'g>, dy: &[Option<Output<'g>>], axis: Output<'g>) -> Grad<'g> {
    let parts = arrived(op, dy);
    match parts.as_slice() {
        [part] => (*part).into(),
        _ => op.graph().op("ConcatV2").inputs(parts).input(axis).out().into(),
    }
}

fn infer_split(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    ctx.input_of_rank(0, 0)?;
    let n = ctx.n_outputs();
    let Some(dims) = ctx.input(1).dims() else { return kolo_graph::shape_fns::unknown(ctx) };
    let Some(axis) = ctx.constant_integers(0) else { return Ok(vec![PartialShape::of_rank(dims.len()); n]) };
    let mut dims = dims.to_vec();
    let axis = resolve_axis(axis.first().copied().unwrap_or(0), dims.len())?;
    dims[axis] = dims[axis].map(|size| equal_part(size, n)).transpose()?;
    Ok(vec![PartialShape::new(&dims); n])
}

fn infer_split_v(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    ctx.input_of_rank(2, 0)?;
    let n = ctx.n_outputs();
    ctx.input_of_rank(1, 1)?.merge(&PartialShape::from([n]))?;
    let Some(dims) = ctx.input(0).dims() else { return kolo_graph::shape_fns::unknown(ctx) };
    let Some(axis) = ctx.constant_integers(2) else { return Ok(vec![PartialShape::of_rank(dims.len()); n]) };
    let axis = resolve_axis(axis.first().copied().unwrap_or(0), dims.len())?;
    let sizes: Vec<Dim> = match (ctx.constant(1).map(integers), dims[axis]) {
        (Some(sizes), Some(size)) => parts(size, n, &sizes?)?.into_iter().map(Some).collect(),
        (Some(sizes), None) => sizes?.into_iter().map(|size| usize::try_from(size).ok()).collect(),
        (None, _) => vec![None; n],
    };
    let with_size = |size: Dim| {
        let mut dims = dims.to_vec();
        dims[axis] = size;
        PartialShape::new(&dims)
    };
    Ok(sizes.into_iter().map(with_size).collect())
}

fn equal_part(size: usize, n: usize) -> Result<usize> {
    if n == 0 || !size.is_multiple_of(n) {
        return Err(Error::invalid_argument(format!(
            "Number of ways to split should evenly divide the split dimension, but got {size} split into {n}"
        )));
    }
    Ok(size / n)
}

/// The sizes of the pieces, the one that is −1 worked out.
fn parts(size: usize, n: usize, sizes: &[i64]) -> Result<Vec<usize>> {
    if sizes.len() != n {
        return Err(Error::invalid_argument(format!("size_splits has {} sizes for {n} outputs", sizes.len())));
    }
    if let Some(bad) = sizes.iter().find(|&&size| size < -1) {
        return Err(Error::invalid_argument(format!("Split size can not be {bad}")));
    }
    let given = sizes.iter().filter(|&&size| size >= 0).fold(0i64, |sum, &size| sum.saturating_add(size)) as u64;
    let n_free = sizes.iter().filter(|&&size| size == -1).count();
    let fits = if n_free == 0 { given == size as u64 } else { given <= size as u64 };
    if n_free > 1 || !fits {
        return Err(Error::invalid_argument(format!(
            "Determined shape must either match input shape along split_dim exactly if fully specified, or be less than \
             the size of the input along split_dim if not fully specified.  Got: {given} of {size}"
        )));
    }
    let rest = size - given as usize;
    Ok(sizes.iter().map(|&size| if size == -1 { rest } else { size as usize }).collect())
}

fn check_number(size: usize, n: usize) -> Result<()> {
    if size == n {
        return Ok(());
    }
    Err(Error::invalid_argument(format!("Input shape axis must equal {n}, got {size}")))
}

fn forward_split(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let axis = integer(ctx.input(0)?)?;
    let value = ctx.take_input(1)?;
    let axis = resolve_axis(axis, value.shape().rank())?;
    let n = ctx.outputs.len();
    let size = equal_part(value.shape()[axis], n)?;
    cut(ctx, value, axis, &vec![size; n], true)
}

fn forward_split_v(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let axis = integer(ctx.input(2)?)?;
    let sizes = integers(ctx.input(1)?)?;
    let value = ctx.take_input(0)?;
    let axis = resolve_axis(axis, value.shape().rank())?;
    let sizes = parts(value.shape()[axis], ctx.outputs.len(), &sizes)?;
    cut(ctx, value, axis, &sizes, true)
}

fn forward_unpack(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let value = ctx.take_input(0)?;
    let axis = resolve_axis(ctx.attrs().int("axis")?, value.shape().rank())?;
    let n = ctx.outputs.len();
    check_number(value.shape()[axis], n)?;
    cut(ctx, value, axis, &vec![1; n], false)
}

/// Sets output `i` to the next `sizes[i]` of `value` along `axis`, which goes away unless it is kept.
fn cut(ctx: &mut KernelCtx<'_>, value: Tensor, axis: usize, sizes: &[usize], keep_axis: bool) -> Result<()> {
    if sizes.len() == 1 && keep_axis {
        ctx.set_output(0, value);
        return Ok(());
    }
    let steps = strides(value.shape());
    let mut begin = 0;
    for (i, &size) in sizes.iter().enumerate() {
        let mut dims = value.shape().to_vec();
        dims[axis] = size;
        // An empty tensor has no element to begin at.
        let view = View::new(begin * steps[axis] as usize, dims.iter().copied().zip(steps.iter().copied()));
        if !keep_axis {
            dims.remove(axis);
        }
        let piece = read_view(ctx, &value, &view, Shape::new(&dims)?)?;
        ctx.set_output(i, piece);
        begin += size;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check_op, tensor, wavy};

    fn grid() -> Tensor {
        Tensor::from([[1i32, 2, 3, 4], [5, 6, 7, 8]])
    }

    #[test]
    fn split() {
        let case = |axis: i32, n: usize| check_op("Split").input(axis).input(grid()).attr("num_split", n);
        case(0, 2).gives_all([Tensor::from([[1i32, 2, 3, 4]]), Tensor::from([[5i32, 6, 7, 8]])]);
        case(-1, 2).gives_all([Tensor::from([[1i32, 2], [5, 6]]), Tensor::from([[3i32, 4], [7, 8]])]);
        case(0, 1).gives(grid());
        case(1, 3).fails("Number of ways to split should evenly divide the split dimension, but got 4 split into 3");
        case(2, 2).fails("axis 2 is out of range for rank 2");
        let empty = tensor::<f32, 2>([0, 2], []);
        check_op("Split").input(0i32).input(empty.clone()).attr("num_split", 2usize).gives_all([empty.clone(), empty]);
        check_op("Split").input(0i32).input(1.0f32).attr("num_split", 2usize).fails("out of range for rank 0");
    }

    #[test]
    fn split_v() {
        let case =
            |sizes: &[i64]| check_op("SplitV").input(grid()).input(sizes).input(1i32).attr("num_split", sizes.len());
        let parts =
            || [Tensor::from([[1i32], [5]]), tensor::<i32, 2>([2, 0], []), Tensor::from([[2i32, 3, 4], [6, 7, 8]])];
        case(&[1, 0, 3]).gives_all(parts());
        case(&[1, 0, -1]).gives_all(parts());
        case(&[4]).gives(grid());
        case(&[1, 2]).fails("Determined shape must");
        case(&[5, -1]).fails("Determined shape must");
        case(&[-1, -1]).fails("Determined shape must");
        case(&[-2, 6]).fails("Split size can not be -2");
        case(&[i64::MAX, i64::MAX]).fails("Determined shape must");
    }

    #[test]
    fn unpack() {
        let case = |axis: i64, n: usize| check_op("Unpack").input(grid()).attr("axis", axis).attr("num", n);
        case(0, 2).gives_all([Tensor::from([1i32, 2, 3, 4]), Tensor::from([5i32, 6, 7, 8])]);
        case(-1, 4).gives_all([[1i32, 5], [2, 6], [3, 7], [4, 8]].map(Tensor::from));
        case(0, 3).fails("Input shape axis must equal 3, got 2");
        let words = Tensor::from_strings([2], vec!["a".into(), "b".into()]).unwrap();
        check_op("Unpack").input(words).attr("num", 2usize).gives_all(["a", "b"].map(Tensor::from));
        check_op("Unpack").input(1.0f32).attr("num", 0usize).fails("out of range for rank 0");
    }

    #[test]
    fn gradients_join_the_pieces() {
        check_op("Split").input(1i32).input(wavy([2, 4], 0)).attr("num_split", 2usize).gradient();
        check_op("Split").input(1i32).input(wavy([2, 4], 0)).attr("num_split", 1usize).gradient();
        check_op("SplitV").input(wavy([5], 0)).input([2i64, 3]).input(0i32).attr("num_split", 2usize).gradient();
        check_op("Unpack").input(wavy([2, 3], 0)).attr("axis", 1i64).attr("num", 3usize).gradient();
    }

    #[test]
    fn a_piece_without_a_gradient_counts_as_zero() {
        let g = crate::graph();
        let x = g.placeholder::<f32>("x", [4usize]);
        let y = super::split(x, 2, 0)[1] * 3.0;
        let dx = kolo_graph::gradients(&[y], &[x]).unwrap()[0].unwrap().dense().unwrap();
        let found = crate::testing::evaluate(&g, &[dx], &[(x, wavy([4], 0))]).unwrap();
        assert_eq!(found, vec![Tensor::from([0.0f32, 0.0, 3.0, 3.0])]);
    }
}
