//! `ConcatV2` and `Concat`: tensors one after another along a dimension that they have. `Pack`: along a new one.
//! `ConcatOffset`: where each begins.

use kolo_core::{DType, Dim, Error, PartialShape, Result, Shape, Tensor};
use kolo_device::cpu::IntraPool;
use kolo_device::cpu::stream::{fence, is_streamed};
use kolo_graph::shape_fns::resolve_axis;
use kolo_graph::{Grad, Gradient, HalfSafety, HostRule, InferCtx, OpDef, Operation, Output};

use super::elements::{Item, Job, build, copy_units, integer, integer_tensor, integers, product};
use crate::cuda::PLAIN;
use crate::cuda::view::is_on_gpu;
use crate::math::binary::first;
use crate::op::{Gpu, Op, cpu_any, gpu_kernel};
use crate::{Cost, KernelCtx};

/// The tensors of `values` joined along dimension `axis`, counted from the end if negative.
///
/// # Panics
/// If there are no values.
#[track_caller]
pub fn concat<'g>(values: &[Output<'g>], axis: i32) -> Output<'g> {
    match values {
        [] => panic!("concat needs at least one value"),
        [value] => super::identity::identity(*value),
        [value, ..] => {
            let graph = value.graph();
            graph.op("ConcatV2").inputs(values.iter().copied()).input(graph.constant(axis)).out()
        }
    }
}

/// The tensors of `values`, all of one shape, stacked along a new dimension `axis`.
///
/// # Panics
/// If there are no values.
#[track_caller]
pub fn stack<'g>(values: &[Output<'g>], axis: i64) -> Output<'g> {
    let first = values.first().expect("stack needs at least one value");
    first.graph().op("Pack").inputs(values.iter().copied()).attr("axis", axis).out()
}

pub(crate) static CONCAT_V2: Op = Op {
    def: OpDef {
        name: "ConcatV2",
        signature: "(values:N*T, axis:Tidx) -> (output:T) ; N:int>=2, T:type, Tidx:type{int32,int64}=int32",
        shape: |ctx| infer_concat(ctx, 0, ctx.n_inputs() - 1),
        gradient: Gradient::Rule(|op, dy| {
            let n = op.n_inputs() - 1;
            concat_gradient(op, dy, 0, n)
        }),
        host: HostRule::SmallIntegers,
        half: HalfSafety::Neutral,
        host_args: &["axis"],
        ..OpDef::BASE
    },
    kernels: &[cpu_any(|ctx| forward_concat(ctx, 0, ctx.n_inputs() - 1))],
    gpu: Gpu::Kernels(&[gpu_kernel("T", PLAIN, |ctx| forward_concat(ctx, 0, ctx.n_inputs() - 1))]),
    cost: Cost::Elements,
};

pub(crate) static CONCAT: Op = Op {
    def: OpDef {
        name: "Concat",
        signature: "(concat_dim:int32, values:N*T) -> (output:T) ; N:int>=2, T:type",
        shape: |ctx| infer_concat(ctx, 1, 0),
        gradient: Gradient::Rule(|op, dy| concat_gradient(op, dy, 1, 0)),
        host: HostRule::SmallIntegers,
        half: HalfSafety::Neutral,
        host_args: &["concat_dim"],
        ..OpDef::BASE
    },
    kernels: &[cpu_any(|ctx| forward_concat(ctx, 1, 0))],
    gpu: Gpu::Kernels(&[gpu_kernel("T", PLAIN, |ctx| forward_concat(ctx, 1, 0))]),
    cost: Cost::Elements,
};

pub(crate) static CONCAT_OFFSET: Op = Op {
    def: OpDef {
        name: "ConcatOffset",
        signature: "(concat_dim:int32, shape:N*shape_type) -> (offset:N*shape_type) ; N:int>=2, \
                    shape_type:type{int32,int64}=int32",
        shape: |ctx| (1..ctx.n_inputs()).map(|i| ctx.input_of_rank(i, 1)).collect(),
        gradient: Gradient::None("offsets are integers"),
        host: HostRule::Always,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward_offset)],
    gpu: Gpu::Host,
    cost: Cost::Inline,
};

pub(crate) static PACK: Op = Op {
    def: OpDef {
        name: "Pack",
        signature: "(values:N*T) -> (output:T) ; N:int>=1, T:type, axis:int=0",
        shape: |ctx| {
            let shape = shape_of_all(ctx)?;
            let Some(dims) = shape.dims() else { return Ok(vec![shape]) };
            let mut dims = dims.to_vec();
            dims.insert(resolve_axis(ctx.attrs().int("axis")?, dims.len() + 1)?, Some(ctx.n_inputs()));
            Ok(vec![PartialShape::new(&dims)])
        },
        gradient: Gradient::Rule(|op, dy| {
            let axis = op.attrs(|attrs| attrs.int("axis"))?;
            let parts = op.graph().op("Unpack").input(first(dy)?).attr("num", op.n_inputs()).attr("axis", axis);
            Ok(parts.build().outputs().into_iter().map(|part| Some(part.into())).collect())
        }),
        host: HostRule::SmallIntegers,
        half: HalfSafety::Neutral,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward_pack)],
    gpu: Gpu::Kernels(&[gpu_kernel("T", PLAIN, forward_pack)]),
    cost: Cost::Elements,
};

fn shape_of_all(ctx: &InferCtx<'_>) -> Result<PartialShape> {
    (0..ctx.n_inputs()).try_fold(PartialShape::unknown(), |shape, i| shape.merge(ctx.input(i)))
}

/// Inputs from `first_value` on, but for `axis_input`, joined along the axis that `axis_input` holds.
fn infer_concat(ctx: &InferCtx<'_>, first_value: usize, axis_input: usize) -> Result<Vec<PartialShape>> {
    ctx.input_of_rank(axis_input, 0)?;
    let values = first_value..first_value + ctx.n_inputs() - 1;
    let ranked = values.clone().find_map(|i| ctx.input(i).rank());
    let Some(rank) = ranked else { return Ok(vec![PartialShape::unknown()]) };
    let axis = match ctx.constant_integers(axis_input).as_deref() {
        Some([axis]) => Some(resolve_axis(*axis, rank)?),
        _ => None,
    };
    let mut shape = PartialShape::of_rank(rank);
    let mut joined: Dim = Some(0);
    for i in values {
        let Some(axis) = axis else {
            // Only the ranks can be compared: any dimension may be the one that differs.
            ctx.input_of_rank(i, rank)?;
            continue;
        };
        let input = ctx.input_of_rank(i, rank)?;
        let mut dims: Vec<Dim> = input.dims().unwrap_or(&[]).to_vec();
        joined = joined.zip(dims[axis]).and_then(|(sum, dim)| sum.checked_add(dim));
        dims[axis] = None;
        shape = shape.merge(&PartialShape::new(&dims))?;
    }
    let mut dims: Vec<Dim> = shape.dims().unwrap_or(&[]).to_vec();
    if let Some(axis) = axis {
        dims[axis] = joined;
    }
    Ok(vec![PartialShape::new(&dims)])
}

/// Each input's gradient is its own piece of `dy`.
fn concat_gradient<'g>(
    op: Operation<'g>,
    dy: &[Option<Output<'g>>],
    first_value: usize,
    axis_input: usize,
) -> Result<Vec<Option<Grad<'g>>>> {
    let (graph, dy) = (op.graph(), first(dy)?);
    let n = op.n_inputs() - 1;
    let values = (first_value..first_value + n).map(|i| op.input(i));
    let shapes = graph.op("ShapeN").inputs(values).build().outputs();
    let axis = super::cast::cast(op.input(axis_input), DType::I32);
    let offsets = graph.op("ConcatOffset").input(axis).inputs(shapes.iter().copied()).build().outputs();
    let pieces = offsets
        .iter()
        .zip(&shapes)
        .map(|(&offset, &shape)| Some(graph.op("Slice").inputs([dy, offset, shape]).out().into()));
    let mut grads: Vec<_> = pieces.collect();
    grads.resize(n, None);
    grads.insert(axis_input, None);
    Ok(grads)
}

fn forward_concat(ctx: &mut KernelCtx<'_>, first_value: usize, axis_input: usize) -> Result<()> {
    let axis = ctx.input(axis_input)?;
    if axis.shape().rank() > 0 && axis.n_elements() != 1 {
        return Err(Error::invalid_argument(format!(
            "Concat dim tensor should be a scalar integer, but got shape {}",
            axis.shape()
        )));
    }
    let axis = integer(axis)?;
    let n = ctx.n_inputs() - 1;
    let values = (first_value..first_value + n).map(|i| ctx.input(i)).collect::<Result<Vec<&Tensor>>>()?;
    let shape = values[0].shape();
    let axis = resolve_axis(axis, shape.rank()).map_err(|_| {
        let rank = shape.rank();
        Error::invalid_argument(format!(
            "ConcatOp : Expected concatenating dimensions in the range [-{rank}, {rank}), but got {axis}"
        ))
    })?;
    let mut dims = shape.to_vec();
    dims[axis] = 0;
    for (i, value) in values.iter().enumerate() {
        let other = value.shape();
        let alike = other.rank() == shape.rank() && (0..shape.rank()).all(|d| d == axis || other[d] == shape[d]);
        if !alike {
            return Err(Error::invalid_argument(format!(
                "ConcatOp : Dimensions of inputs should match: shape[0] = {shape} vs. shape[{i}] = {other}"
            )));
        }
        dims[axis] = dims[axis].saturating_add(other[axis]);
    }
    let out = join(ctx, &values, Shape::new(&dims)?, product(&dims[..axis]))?;
    ctx.set_output(0, out);
    Ok(())
}

fn forward_pack(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let values = (0..ctx.n_inputs()).map(|i| ctx.input(i)).collect::<Result<Vec<&Tensor>>>()?;
    let shape = values[0].shape();
    let axis = resolve_axis(ctx.attrs().int("axis")?, shape.rank() + 1)?;
    if let Some((i, other)) = values.iter().enumerate().find(|(_, value)| value.shape() != shape) {
        return Err(Error::invalid_argument(format!(
            "Shapes of all inputs must match: values[0].shape = {shape} != values[{i}].shape = {}",
            other.shape()
        )));
    }
    let mut dims = shape.to_vec();
    dims.insert(axis, values.len());
    let shape = Shape::new(&dims)?;
    if values.len() == 1 {
        let out = ctx.take_input(0)?.reshaped(shape)?;
        ctx.set_output(0, out);
        return Ok(());
    }
    let out = join(ctx, &values, shape, product(&dims[..axis]))?;
    ctx.set_output(0, out);
    Ok(())
}

/// The values joined: `n_rows` rows, each of one piece of every value.
fn join(ctx: &KernelCtx<'_>, values: &[&Tensor], shape: Shape, n_rows: usize) -> Result<Tensor> {
    if is_on_gpu(values[0]) {
        return crate::cuda::view::join(ctx, values, shape, n_rows);
    }
    build(ctx, values[0].dtype(), shape, values, Join { pool: ctx.pool(), n_rows })
}

/// Vectors of one dtype, one after the other; there may be none.
pub(crate) fn join_vectors(ctx: &KernelCtx<'_>, dtype: DType, values: &[&Tensor]) -> Result<Tensor> {
    let n = values.iter().map(|value| value.n_elements()).sum();
    let shape = Shape::new(&[n])?;
    if values.is_empty() { ctx.allocate(dtype, shape) } else { join(ctx, values, shape, 1) }
}

struct Join<'a> {
    pool: &'a IntraPool,
    n_rows: usize,
}

impl Job for Join<'_> {
    fn run<E: Item>(self, mut out: &mut [E], inputs: &[&[E]]) -> Result<()> {
        if out.is_empty() {
            return Ok(());
        }
        if self.n_rows == 1 {
            for input in inputs {
                let (mine, rest) = out.split_at_mut(input.len());
                let unit = E::fill_grain(mine.len(), 0.2);
                copy_units(self.pool, mine, input, unit, |first| (first..).map(|i| i * unit));
                out = rest;
            }
            return Ok(());
        }
        // The output is not empty, so there is at least one row and one element in it.
        let row_len = out.len() / self.n_rows;
        let row = |row: usize, mut out: &mut [E], copy: fn(&mut [E], &[E])| {
            for input in inputs {
                let n = input.len() / self.n_rows;
                let (mine, rest) = out.split_at_mut(n);
                copy(mine, &input[row * n..(row + 1) * n]);
                out = rest;
            }
        };
        let n_bytes = size_of_val(out);
        let are_lines = inputs.iter().all(|input| (size_of_val(*input) / self.n_rows).is_multiple_of(64));
        if is_streamed(n_bytes) && are_lines {
            let per_task = (self.pool.stretch(n_bytes) / size_of::<E>() / row_len).max(1);
            self.pool.for_each_chunk(out, per_task * row_len, |task, out| {
                out.chunks_mut(row_len).enumerate().for_each(|(i, out)| row(task * per_task + i, out, E::stream));
                fence();
            });
            return Ok(());
        }
        let per_chunk = E::fill_grain(out.len(), 0.2).div_ceil(row_len);
        E::fill_chunks(self.pool, out, per_chunk * row_len, &|task, out| {
            let rows = out.chunks_mut(row_len).enumerate();
            rows.for_each(|(i, out)| row(task * per_chunk + i, out, <[E]>::clone_from_slice));
        });
        Ok(())
    }
}

fn forward_offset(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let n = ctx.n_inputs() - 1;
    let shapes = (1..=n).map(|i| integers(ctx.input(i)?)).collect::<Result<Vec<_>>>()?;
    let axis = resolve_axis(integer(ctx.input(0)?)?, shapes[0].len())?;
    let dtype = ctx.input(1)?.dtype();
    let mut begin = 0i64;
    for (i, shape) in shapes.iter().enumerate() {
        let alike = shape.len() == shapes[0].len()
            && shape.iter().zip(&shapes[0]).enumerate().all(|(d, (a, b))| d == axis || a == b);
        if !alike {
            return Err(Error::invalid_argument(format!(
                "All dimensions except {axis} must match. Input {i} has shape {shape:?} and doesn't match input 0 with \
                 shape {:?}.",
                shapes[0]
            )));
        }
        let mut offset = vec![0; shape.len()];
        offset[axis] = begin;
        begin = begin.saturating_add(shape[axis]);
        ctx.set_output(i, integer_tensor(dtype, Shape::new(&[offset.len()])?, offset)?);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_core::Tensor;

    use crate::testing::{check_op, tensor, wavy};

    /// Large enough to go past the caches of most machines, with pieces that are whole lines of them and with odd ones.
    #[test]
    fn large_results() {
        for (a, b) in [(1024, 3072), (1001, 3003)] {
            let values = |n: usize, from: i32| tensor([1100, n], (from..).take(1100 * n).collect::<Vec<i32>>());
            let (left, right) = (values(a, 0), values(b, -5_000_000));
            let columns = check_op("ConcatV2").input(left.clone()).input(right.clone()).input(1i32).run(false).unwrap();
            let rows = left.data::<i32>().unwrap().chunks(a).zip(right.data::<i32>().unwrap().chunks(b));
            let found = columns[0].data::<i32>().unwrap().chunks(a + b);
            assert!(found.zip(rows).all(|(row, (left, right))| row[..a] == *left && row[a..] == *right));
            let parts = check_op("SplitV").input(columns[0].clone()).input([a as i64, -1]).input(1i32);
            let parts = parts.attr("num_split", 2usize).run(false).unwrap();
            assert!(parts[0] == left && parts[1] == right);
            let rows = check_op("ConcatV2").input(right.clone()).input(right.clone()).input(0i32).run(false).unwrap();
            let (found, right) = (rows[0].data::<i32>().unwrap(), right.data::<i32>().unwrap());
            assert!(found[..right.len()] == *right && found[right.len()..] == *right);
        }
    }

    #[test]
    fn concat() {
        let case = |axis: i32| {
            check_op("ConcatV2").input([[1.0f32, 2.0], [3.0, 4.0]]).input([[5.0f32, 6.0], [7.0, 8.0]]).input(axis)
        };
        case(0).gives([[1.0f32, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]);
        case(1).gives([[1.0f32, 2.0, 5.0, 6.0], [3.0, 4.0, 7.0, 8.0]]);
        case(-1).gives([[1.0f32, 2.0, 5.0, 6.0], [3.0, 4.0, 7.0, 8.0]]);
        case(2).fails("2");
        let text = |values: &[&str]| {
            Tensor::from_strings(
                [values.len()],
                values.iter().map(|v| bytes::Bytes::copy_from_slice(v.as_bytes())).collect(),
            )
            .unwrap()
        };
        check_op("ConcatV2").input(text(&["a"])).input(text(&["b", "c"])).input(0i64).gives(text(&["a", "b", "c"]));
        check_op("ConcatV2").input(tensor::<i64, 1>([0], [])).input([1i64]).input(0i32).gives([1i64]);
        check_op("Concat").input(1i32).input([[1i8], [2]]).input([[3i8, 4], [5, 6]]).gives([[1i8, 3, 4], [2, 5, 6]]);
    }

    #[test]
    fn long_concats_are_shared_among_threads() {
        let (a, b) = (vec![1.0f32; 100_000], vec![2.0f32; 50_000]);
        let whole = [a.clone(), b.clone()].concat();
        check_op("ConcatV2").input(a).input(b).input(0i32).gives(whole);
    }

    #[test]
    fn mismatches_are_named() {
        check_op("ConcatV2").input(wavy([2, 3], 0)).input(wavy([3, 2], 0)).input(0i32).fails("[");
        check_op("ConcatV2").input(1.0f32).input(2.0f32).input(0i32).fails("0");
        check_op("Pack").input([1.0f32]).input([1.0f32, 2.0]).fails("[1]");
        check_op("Pack").input([1.0f32]).attr("axis", 2i64).fails("axis 2 is out of range");
    }

    #[test]
    fn pack() {
        let case = || check_op("Pack").input([1i32, 2]).input([3i32, 4]).input([5i32, 6]);
        case().gives([[1i32, 2], [3, 4], [5, 6]]);
        case().attr("axis", 1i64).gives([[1i32, 3, 5], [2, 4, 6]]);
        case().attr("axis", -1i64).gives([[1i32, 3, 5], [2, 4, 6]]);
        check_op("Pack").input(7u8).gives([7u8]);
        check_op("Pack").input("a").input("b").gives(Tensor::from_strings([2], vec!["a".into(), "b".into()]).unwrap());
    }

    #[test]
    fn offsets() {
        check_op("ConcatOffset")
            .input(1i32)
            .input([2i32, 2, 5])
            .input([2i32, 3, 5])
            .input([2i32, 4, 5])
            .gives_all([[0i32, 0, 0], [0, 2, 0], [0, 5, 0]].map(Tensor::from));
        check_op("ConcatOffset")
            .input(-1i32)
            .input([2i64, 2])
            .input([2i64, 3])
            .gives_all([[0i64, 0], [0, 2]].map(Tensor::from));
        check_op("ConcatOffset")
            .input(0i32)
            .input([2i32, 2])
            .input([2i32, 3])
            .fails("All dimensions except 0 must match");
    }

    #[test]
    fn gradients_are_the_pieces() {
        for axis in [0, 1, -1] {
            let b = if axis == 0 { wavy([1, 3], 1) } else { wavy([2, 3], 1) };
            check_op("ConcatV2").input(wavy([2, 3], 0)).input(b.clone()).input(axis).gradient();
            check_op("Concat").input(axis).input(wavy([2, 3], 0)).input(b).gradient();
        }
        check_op("Pack").input(wavy([3], 0)).input(wavy([3], 1)).attr("axis", 1i64).gradient();
    }
}
