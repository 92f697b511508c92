//! `Unique` and `UniqueWithCounts`: the different elements of a vector, in the order in which they first occur;
//! `UniqueV2` and `UniqueWithCountsV2`: the different slices along an axis. `ListDiff`: the elements that another vector
//! does not have.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::Hash;

use half::{bf16, f16};
use kolo_core::{DType, Error, PartialShape, Result, Shape, Tensor};
use kolo_device::cpu::looking;
use kolo_graph::shape_fns::resolve_axis;
use kolo_graph::{Gradient, HostRule, InferCtx, OpDef, Output};

use super::elements::{Item, Job, build, integer_tensor, integers, product};
use super::gather::pick_rows;
use crate::op::{Gpu, Op, cpu_any};
use crate::{Cost, KernelCtx};

/// The different elements of the vector `x`, and for each element of `x` which of them it is.
#[track_caller]
pub fn unique(x: Output<'_>) -> (Output<'_>, Output<'_>) {
    let op = x.graph().op("Unique").input(x).build();
    (op.output(0), op.output(1))
}

/// As [`unique`], and how often each occurs.
#[track_caller]
pub fn unique_with_counts(x: Output<'_>) -> (Output<'_>, Output<'_>, Output<'_>) {
    let op = x.graph().op("UniqueWithCounts").input(x).build();
    (op.output(0), op.output(1), op.output(2))
}

/// The different slices of `x` along dimension `axis`, and for each slice of `x` which of them it is.
#[track_caller]
pub fn unique_slices(x: Output<'_>, axis: i64) -> (Output<'_>, Output<'_>) {
    let graph = x.graph();
    let op = graph.op("UniqueV2").input(x).input(graph.constant([axis])).build();
    (op.output(0), op.output(1))
}

/// The elements of the vector `x` that are not in `y`, and where in `x` they are.
#[track_caller]
pub fn list_diff<'g>(x: Output<'g>, y: Output<'g>) -> (Output<'g>, Output<'g>) {
    let op = x.graph().op("ListDiff").inputs([x, y]).build();
    (op.output(0), op.output(1))
}

pub(crate) static UNIQUE: Op = Op {
    def: OpDef {
        name: "Unique",
        signature: "(x:T) -> (y:T, idx:out_idx) ; T:type, out_idx:type{int32,int64}=int32",
        shape: infer_unique,
        gradient: Gradient::None("which elements are different does not change smoothly"),
        host: HostRule::Always,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward_unique)],
    gpu: Gpu::Host,
    cost: Cost::Elements,
};

pub(crate) static UNIQUE_WITH_COUNTS: Op = Op {
    def: OpDef {
        name: "UniqueWithCounts",
        signature: "(x:T) -> (y:T, idx:out_idx, count:out_idx) ; T:type, out_idx:type{int32,int64}=int32",
        shape: infer_unique,
        gradient: Gradient::None("which elements are different does not change smoothly"),
        host: HostRule::Always,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward_unique)],
    gpu: Gpu::Host,
    cost: Cost::Elements,
};

pub(crate) static UNIQUE_V2: Op = Op {
    def: OpDef {
        name: "UniqueV2",
        signature: "(x:T, axis:Taxis) -> (y:T, idx:out_idx) ; T:type, Taxis:type{int32,int64}=int64, \
                    out_idx:type{int32,int64}=int32",
        shape: infer_slices,
        gradient: Gradient::None("which elements are different does not change smoothly"),
        host: HostRule::Always,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward_slices)],
    gpu: Gpu::Host,
    cost: Cost::Elements,
};

pub(crate) static UNIQUE_WITH_COUNTS_V2: Op = Op {
    def: OpDef {
        name: "UniqueWithCountsV2",
        signature: "(x:T, axis:Taxis) -> (y:T, idx:out_idx, count:out_idx) ; T:type, Taxis:type{int32,int64}=int64, \
                    out_idx:type{int32,int64}=int32",
        shape: infer_slices,
        gradient: Gradient::None("which elements are different does not change smoothly"),
        host: HostRule::Always,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward_slices)],
    gpu: Gpu::Host,
    cost: Cost::Elements,
};

pub(crate) static LIST_DIFF: Op = Op {
    def: OpDef {
        name: "ListDiff",
        signature: "(x:T, y:T) -> (out:T, idx:out_idx) ; T:type, out_idx:type{int32,int64}=int32",
        shape: |ctx| {
            ctx.input_of_rank(0, 1)?;
            ctx.input_of_rank(1, 1)?;
            Ok(vec![PartialShape::of_rank(1); 2])
        },
        gradient: Gradient::None("which elements are different does not change smoothly"),
        host: HostRule::Always,
        ..OpDef::BASE
    },
    kernels: &[cpu_any(forward_list_diff)],
    gpu: Gpu::Host,
    cost: Cost::Elements,
};

fn infer_unique(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    let indices = ctx.input_of_rank(0, 1)?;
    let mut shapes = vec![PartialShape::of_rank(1); ctx.n_outputs()];
    shapes[1] = indices;
    Ok(shapes)
}

/// Along a known axis all sizes but that one stay; without an axis, `x` is a vector.
fn infer_slices(ctx: &InferCtx<'_>) -> Result<Vec<PartialShape>> {
    ctx.input_of_rank(1, 1)?;
    let mut shapes = vec![PartialShape::of_rank(1); ctx.n_outputs()];
    let axis = ctx.constant(1).and_then(|axis| integers(axis).ok());
    shapes[0] = match (ctx.input(0).dims(), axis.as_deref()) {
        (Some(dims), Some(&[axis])) => {
            let axis = resolve_axis(axis, dims.len())?;
            let mut out = dims.to_vec();
            shapes[1] = PartialShape::new(&[dims[axis]]);
            out[axis] = None;
            PartialShape::new(&out)
        }
        (_, Some([])) => {
            shapes[1] = ctx.input_of_rank(0, 1)?;
            PartialShape::of_rank(1)
        }
        (Some(dims), _) => PartialShape::of_rank(dims.len()),
        (None, _) => PartialShape::unknown(),
    };
    Ok(shapes)
}

/// What makes elements equal: their bytes, but zeros of either sign are equal and a NaN equals nothing.
#[derive(PartialEq, Eq, Hash)]
enum Key<'a> {
    Bytes(&'a [u8]),
    Zero,
    /// The how-manieth element it is, so that it stands alone.
    Nan(usize),
}

fn keys(tensor: &Tensor) -> Result<Vec<Key<'_>>> {
    if tensor.dtype() == DType::Str {
        return Ok(looking(tensor.strings()?).map(|string| Key::Bytes(string)).collect());
    }
    let size = tensor
        .dtype()
        .size()
        .ok_or_else(|| Error::unimplemented(format!("{} elements cannot be compared", tensor.dtype())))?;
    let mut keys: Vec<Key<'_>> = looking(tensor.host_bytes()?.chunks_exact(size)).map(Key::Bytes).collect();
    fn special<'a, T: kolo_core::Element + num_traits::Float>(tensor: &'a Tensor, keys: &mut [Key<'a>]) -> Result<()> {
        for (i, (x, key)) in looking(tensor.data::<T>()?.iter().zip(keys)).enumerate() {
            if x.is_nan() {
                *key = Key::Nan(i);
            } else if x.is_zero() {
                *key = Key::Zero;
            }
        }
        Ok(())
    }
    match tensor.dtype() {
        DType::F32 => special::<f32>(tensor, &mut keys)?,
        DType::F64 => special::<f64>(tensor, &mut keys)?,
        DType::F16 => special::<f16>(tensor, &mut keys)?,
        DType::BF16 => special::<bf16>(tensor, &mut keys)?,
        _ => {}
    }
    Ok(keys)
}

/// Where each different key first occurs, and which of them each is.
fn first_places<K: Hash + Eq>(keys: impl IntoIterator<Item = K>) -> (Vec<usize>, Vec<usize>) {
    let (mut firsts, mut ids) = (Vec::new(), Vec::new());
    let mut seen: HashMap<K, usize> = HashMap::new();
    for (i, key) in looking(keys).enumerate() {
        ids.push(match seen.entry(key) {
            Entry::Occupied(entry) => *entry.get(),
            Entry::Vacant(entry) => {
                firsts.push(i);
                *entry.insert(firsts.len() - 1)
            }
        });
    }
    (firsts, ids)
}

fn vector(ctx: &KernelCtx<'_>, i: usize) -> Result<()> {
    if ctx.input(i)?.shape().rank() == 1 {
        return Ok(());
    }
    Err(Error::invalid_argument(format!("{} expects a 1D vector.", ctx.node.op().to_lowercase())))
}

fn numbers(ctx: &KernelCtx<'_>, values: Vec<usize>) -> Result<Tensor> {
    let shape = Shape::new(&[values.len()])?;
    integer_tensor(ctx.attrs().dtype("out_idx")?, shape, values.into_iter().map(|value| value as i64).collect())
}

fn forward_unique(ctx: &mut KernelCtx<'_>) -> Result<()> {
    vector(ctx, 0)?;
    let input = ctx.input(0)?;
    let (firsts, ids) = first_places(keys(input)?);
    let mut counts = vec![0; firsts.len()];
    ids.iter().for_each(|&id| counts[id] += 1);
    let shape = Shape::new(&[firsts.len()])?;
    let outputs = [pick_rows(ctx, input, &firsts, shape)?, numbers(ctx, ids)?, numbers(ctx, counts)?];
    for (i, output) in outputs.into_iter().enumerate().take(ctx.outputs.len()) {
        ctx.set_output(i, output);
    }
    Ok(())
}

fn forward_slices(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let axes = integers(ctx.input(1)?)?;
    let input = ctx.input(0)?;
    let dims = input.shape().dims();
    let axis = match axes.as_slice() {
        [] if dims.len() == 1 => 0,
        [] => return Err(Error::invalid_argument("unique expects a 1D vector.")),
        [axis] => resolve_axis(*axis, dims.len())
            .map_err(|_| Error::invalid_argument(format!("axis has to be between [0, {})", dims.len())))?,
        _ => {
            return Err(Error::invalid_argument("axis does not support input tensors larger than 1 elements"));
        }
    };
    let (n_outer, n, inner) = (product(&dims[..axis]), dims[axis], product(&dims[axis + 1..]));
    let all = keys(input)?;
    let slice = |at: usize| -> Vec<&Key<'_>> {
        (0..n_outer).flat_map(|outer| &all[(outer * n + at) * inner..(outer * n + at + 1) * inner]).collect()
    };
    let (firsts, ids) = first_places((0..n).map(slice));
    let mut counts = vec![0; firsts.len()];
    ids.iter().for_each(|&id| counts[id] += 1);
    let mut shape = dims.to_vec();
    shape[axis] = firsts.len();
    let job = PickSlices { slices: &firsts, n, inner };
    let picked = build(ctx, input.dtype(), Shape::new(&shape)?, &[input], job)?;
    let outputs = [picked, numbers(ctx, ids)?, numbers(ctx, counts)?];
    for (i, output) in outputs.into_iter().enumerate().take(ctx.outputs.len()) {
        ctx.set_output(i, output);
    }
    Ok(())
}

/// Some slices of [outer, n, inner], in order.
struct PickSlices<'a> {
    slices: &'a [usize],
    n: usize,
    inner: usize,
}

impl Job for PickSlices<'_> {
    fn run<E: Item>(self, out: &mut [E], inputs: &[&[E]]) -> Result<()> {
        if self.inner == 0 || self.slices.is_empty() {
            return Ok(());
        }
        for (i, out) in out.chunks_exact_mut(self.inner).enumerate() {
            let (outer, at) = (i / self.slices.len(), self.slices[i % self.slices.len()]);
            let from = (outer * self.n + at) * self.inner;
            out.clone_from_slice(&inputs[0][from..from + self.inner]);
        }
        Ok(())
    }
}

fn forward_list_diff(ctx: &mut KernelCtx<'_>) -> Result<()> {
    vector(ctx, 0)?;
    vector(ctx, 1)?;
    let (x, y) = (ctx.input(0)?, ctx.input(1)?);
    let gone: std::collections::HashSet<Key<'_>> =
        keys(y)?.into_iter().filter(|key| !matches!(key, Key::Nan(_))).collect();
    let left: Vec<usize> = keys(x)?.iter().enumerate().filter(|(_, key)| !gone.contains(key)).map(|(i, _)| i).collect();
    let shape = Shape::new(&[left.len()])?;
    let out = pick_rows(ctx, x, &left, shape)?;
    ctx.set_output(0, out);
    let places = numbers(ctx, left)?;
    ctx.set_output(1, places);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check_op, tensor};

    #[test]
    fn unique() {
        check_op("Unique")
            .input([1i32, 1, 2, 4, 4, 4, 7, 8, 8])
            .gives_all([Tensor::from([1i32, 2, 4, 7, 8]), Tensor::from([0i32, 0, 1, 2, 2, 2, 3, 4, 4])]);
        check_op("UniqueWithCounts").attr("out_idx", DType::I64).input([5i64, 3, 5]).gives_all([
            Tensor::from([5i64, 3]),
            Tensor::from([0i64, 1, 0]),
            Tensor::from([2i64, 1]),
        ]);
        let nan = f32::NAN;
        check_op("Unique")
            .input([0.0f32, -0.0, nan, nan, 1.0])
            .gives_all([Tensor::from([0.0f32, nan, nan, 1.0]), Tensor::from([0i32, 0, 1, 2, 3])]);
        let words = |list: &[&'static str]| {
            Tensor::from_strings([list.len()], list.iter().map(|&word| word.into()).collect()).unwrap()
        };
        check_op("Unique").input(words(&["b", "a", "b"])).gives_all([words(&["b", "a"]), Tensor::from([0i32, 1, 0])]);
        check_op("Unique")
            .input(tensor::<i8, 1>([0], []))
            .gives_all([tensor::<i8, 1>([0], []), tensor::<i32, 1>([0], [])]);
        check_op("Unique").input(1i32).fails("rank 1");
    }

    #[test]
    fn slices_along_an_axis() {
        // TensorFlow's own examples.
        let x = [[1i32, 0, 0], [1, 0, 0], [2, 0, 0]];
        check_op("UniqueV2")
            .input(x)
            .input([0i64])
            .gives_all([Tensor::from([[1i32, 0, 0], [2, 0, 0]]), Tensor::from([0i32, 0, 1])]);
        check_op("UniqueV2")
            .input(x)
            .input([-1i32])
            .gives_all([Tensor::from([[1i32, 0], [1, 0], [2, 0]]), Tensor::from([0i32, 1, 1])]);
        check_op("UniqueWithCountsV2").attr("out_idx", DType::I64).input(x).input([1i64]).gives_all([
            Tensor::from([[1i32, 0], [1, 0], [2, 0]]),
            Tensor::from([0i64, 1, 1]),
            Tensor::from([1i64, 2]),
        ]);
        let none = || tensor::<i64, 1>([0], []);
        check_op("UniqueV2")
            .input([3.0f32, 3.0, 1.0])
            .input(none())
            .gives_all([Tensor::from([3.0f32, 1.0]), Tensor::from([0i32, 0, 1])]);
        check_op("UniqueV2").input(x).input(none()).fails("1");
        check_op("UniqueV2").input(x).input([2i64]).fails("2");
        check_op("UniqueV2").input(x).input([0i64, 1]).fails("larger than 1 elements");
        check_op("UniqueV2")
            .input(tensor::<f32, 2>([3, 0], []))
            .input([0i64])
            .gives_all([tensor::<f32, 2>([1, 0], []), Tensor::from([0i32, 0, 0])]);
    }

    #[test]
    fn list_diff() {
        check_op("ListDiff")
            .input([1i32, 2, 3, 2])
            .input([2i32])
            .gives_all([Tensor::from([1i32, 3]), Tensor::from([0i32, 2])]);
        check_op("ListDiff")
            .input([1.0f32])
            .input([1.0f32])
            .gives_all([tensor::<f32, 1>([0], []), tensor::<i32, 1>([0], [])]);
        check_op("ListDiff")
            .input([f64::NAN])
            .input([f64::NAN])
            .gives_all([Tensor::from([f64::NAN]), Tensor::from([0i32])]);
        check_op("ListDiff").input([[1i32]]).input([1i32]).fails("rank 1");
    }
}
