//! What kernels share that move elements without looking at them: one loop serves every dtype, because an element is
//! taken for its bytes (or for a byte string).

use bytes::Bytes;
use half::{bf16, f16};
use kolo_core::{DType, Error, ResourceHandle, Result, Shape, Tensor, TensorData};
use kolo_device::cpu::stream::{fence, is_streamed, prefetch, stream};
use kolo_device::cpu::{IntraPool, pool, stop_if_asked};
use kolo_graph::{Graph, Output};
use smallvec::SmallVec;

use crate::KernelCtx;

/// An element seen from outside: something that can be copied. The default is zero, or the empty string.
pub(crate) trait Item: Clone + Default + Send + Sync {
    /// [`pool::fill_grain`] for such elements.
    fn fill_grain(n: usize, ns: f64) -> usize {
        let _ = n;
        pool::grain(ns)
    }

    /// [`IntraPool::fill_chunks`] for such elements.
    fn fill_chunks(pool: &IntraPool, out: &mut [Self], chunk: usize, f: &(dyn Fn(usize, &mut [Self]) + Sync)) {
        pool.for_each_chunk(out, chunk, f);
    }

    /// Copies past the caches, where such elements allow it.
    fn stream(to: &mut [Self], from: &[Self]) {
        to.clone_from_slice(from);
    }
}

/// Strings own memory elsewhere and are moved one by one.
impl Item for Bytes {}

/// Handles keep their objects alive.
impl Item for ResourceHandle {}

macro_rules! plain_items {
    ($($type:ty),*) => {
        $(impl Item for $type {
            fn fill_grain(n: usize, ns: f64) -> usize {
                pool::fill_grain::<$type>(n, ns)
            }

            fn fill_chunks(pool: &IntraPool, out: &mut [Self], chunk: usize, f: &(dyn Fn(usize, &mut [Self]) + Sync)) {
                pool.fill_chunks(out, chunk, f);
            }

            fn stream(to: &mut [Self], from: &[Self]) {
                stream(to, from);
            }
        })*
    };
}
plain_items!([u8; 1], [u8; 2], [u8; 4], [u8; 8], [u8; 16], u32);
plain_items!(f16, bf16, f32, f64, i8, i16, i32, i64, u8, u16, u64);

/// Bytes that are asked for ahead, where units are so short that the processor cannot tell what comes next.
const AHEAD: usize = 4 << 10;

/// Whether a result of `n_bytes` should go past the caches, and units of it may do so one by one: long ones, or whole lines.
pub(crate) fn is_streamed_by_units(n_bytes: usize, unit_bytes: usize) -> bool {
    is_streamed(n_bytes) && (unit_bytes.is_multiple_of(64) || unit_bytes >= AHEAD)
}

/// Fills `out` with copies of `input`, `unit` elements at a time: `places` gives where they begin, from a unit on. Large results go
/// past the caches, without a buffer where the units are long or whole lines of them.
pub(crate) fn copy_units<E: Item, P: Iterator<Item = usize>>(
    pool: &IntraPool,
    out: &mut [E],
    input: &[E],
    unit: usize,
    places: impl Fn(usize) -> P + Sync,
) {
    if out.is_empty() || unit == 0 {
        return;
    }
    let (n_bytes, unit_bytes) = (size_of_val(out), unit.saturating_mul(size_of::<E>()));
    if !is_streamed_by_units(n_bytes, unit_bytes) {
        // About a cache miss for every unit, and a copy.
        let per_chunk = E::fill_grain(out.len(), 0.2).div_ceil(unit + 20).max(1);
        return E::fill_chunks(pool, out, per_chunk * unit, &|task, out| {
            for (out, at) in out.chunks_mut(unit).zip(places(task * per_chunk)) {
                out.clone_from_slice(&input[at..at + out.len()]);
            }
        });
    }
    let ahead = if unit_bytes <= AHEAD / 4 { AHEAD / unit_bytes } else { 0 };
    let per_task = (pool.stretch(n_bytes) / unit_bytes).max(1);
    pool.for_each_chunk(out, per_task * unit, |task, out| {
        let (first, n) = (task * per_task, out.len().div_ceil(unit));
        let mut later = places(first + ahead.min(n)).take(if ahead > 0 { n.saturating_sub(ahead) } else { 0 });
        for (out, at) in out.chunks_mut(unit).zip(places(first)) {
            if let Some(at) = later.next() {
                prefetch(&input[at..input.len().min(at + unit)]);
            }
            E::stream(out, &input[at..at + out.len()]);
        }
        fence();
    });
}

/// A loop over elements of any type. All slices hold elements of one dtype.
pub(crate) trait Job {
    /// Fills `out`, whose contents are undefined, from `inputs`.
    fn run<E: Item>(self, out: &mut [E], inputs: &[&[E]]) -> Result<()>;
}

/// A tensor of `shape` that `job` fills from `inputs`, all of one dtype.
pub(crate) fn build(
    ctx: &KernelCtx<'_>,
    dtype: DType,
    shape: Shape,
    inputs: &[&Tensor],
    job: impl Job,
) -> Result<Tensor> {
    if dtype == DType::Str {
        let inputs = inputs.iter().map(|input| input.strings()).collect::<Result<SmallVec<[&[Bytes]; 4]>>>()?;
        let n = shape.n_elements();
        let mut out = ctx.strings(n)?;
        out.resize(n, Bytes::new());
        job.run(&mut out, &inputs)?;
        return ctx.string_tensor(shape, out);
    }
    if dtype == DType::Resource {
        let inputs =
            inputs.iter().map(|input| input.handles()).collect::<Result<SmallVec<[&[ResourceHandle]; 4]>>>()?;
        let n = shape.n_elements();
        let mut out = ctx.list(n, "handles")?;
        out.resize(n, ResourceHandle::default());
        job.run(&mut out, &inputs)?;
        return Tensor::from_handles(shape, out);
    }
    let Some(size) = dtype.size() else {
        return Err(Error::unimplemented(format!("{} does not work on {dtype}", ctx.node.op())));
    };
    let mut out = ctx.allocate(dtype, shape)?;
    // Byte arrays have no alignment to go wrong, and copying one is a single move.
    match size {
        1 => run_as::<[u8; 1]>(&mut out, inputs, job)?,
        2 => run_as::<[u8; 2]>(&mut out, inputs, job)?,
        4 => run_as::<[u8; 4]>(&mut out, inputs, job)?,
        8 => run_as::<[u8; 8]>(&mut out, inputs, job)?,
        16 => run_as::<[u8; 16]>(&mut out, inputs, job)?,
        _ => return Err(Error::internal(format!("elements of {size} bytes"))),
    }
    Ok(out)
}

fn run_as<E: Item + bytemuck::Pod>(out: &mut Tensor, inputs: &[&Tensor], job: impl Job) -> Result<()> {
    let inputs = inputs
        .iter()
        .map(|input| Ok(bytemuck::cast_slice(input.host_bytes()?)))
        .collect::<Result<SmallVec<[&[E]; 4]>>>()?;
    job.run::<E>(bytemuck::cast_slice_mut(out.host_bytes_mut()?), &inputs)
}

/// How many elements a simple loop on one thread goes through between two looks at whether its step was stopped.
pub(crate) const BETWEEN_LOOKS: usize = 1 << 14;

/// The values of an integer tensor of any width, widened: for indices, sizes, axes.
pub(crate) fn integers(tensor: &Tensor) -> Result<Vec<i64>> {
    fn widen<T: kolo_core::Element + Into<i64>>(tensor: &Tensor) -> Result<Vec<i64>> {
        let values = tensor.data::<T>()?;
        let mut wide = Vec::with_capacity(values.len());
        for values in values.chunks(BETWEEN_LOOKS) {
            stop_if_asked();
            wide.extend(values.iter().map(|&x| x.into()));
        }
        Ok(wide)
    }
    match tensor.dtype() {
        DType::I32 => widen::<i32>(tensor),
        DType::I64 => widen::<i64>(tensor),
        DType::I8 => widen::<i8>(tensor),
        DType::U8 => widen::<u8>(tensor),
        DType::I16 => widen::<i16>(tensor),
        DType::U16 => widen::<u16>(tensor),
        DType::U32 => widen::<u32>(tensor),
        _ => tensor.integers(),
    }
}

/// The one value of an integer tensor.
pub(crate) fn integer(tensor: &Tensor) -> Result<i64> {
    match integers(tensor)?.as_slice() {
        [value] => Ok(*value),
        _ => Err(Error::invalid_argument(format!("expected a single integer, found shape {}", tensor.shape()))),
    }
}

/// A vector or scalar of int32 or int64; an error if a value does not fit.
pub(crate) fn integer_tensor(dtype: DType, shape: Shape, values: Vec<i64>) -> Result<Tensor> {
    if dtype == DType::I64 {
        return Tensor::from_vec(shape, values);
    }
    let narrow =
        |value: i64| i32::try_from(value).map_err(|_| Error::invalid_argument(format!("{value} does not fit int32")));
    Tensor::from_vec(shape, values.into_iter().map(narrow).collect::<Result<Vec<i32>>>()?)
}

/// An index counted from 0 that must lie below `n`.
pub(crate) fn index_below(index: i64, n: usize) -> Option<usize> {
    usize::try_from(index).ok().filter(|&index| index < n)
}

/// The product of sizes that belong to one shape, and so cannot overflow.
pub(crate) fn product(dims: &[usize]) -> usize {
    dims.iter().product()
}

/// Whether a tensor's elements are shared by handles rather than copied.
pub(crate) fn is_in_buffer(tensor: &Tensor) -> bool {
    matches!(tensor.storage(), TensorData::Buffer { .. } | TensorData::Inline(_))
}

/// Numbers that can be summed, integers wrapping.
pub(crate) trait Plus: kolo_core::Element {
    /// The sum.
    fn plus(self, other: Self) -> Self;
}

macro_rules! plus {
    ($($ty:ty => |$a:ident, $b:ident| $sum:expr;)*) => {
        $(impl Plus for $ty {
            fn plus(self, other: Self) -> Self {
                let ($a, $b) = (self, other);
                $sum
            }
        })*
    };
}

plus! {
    f32 => |a, b| a + b;
    f64 => |a, b| a + b;
    half::f16 => |a, b| a + b;
    half::bf16 => |a, b| a + b;
    i8 => |a, b| a.wrapping_add(b);
    i16 => |a, b| a.wrapping_add(b);
    i32 => |a, b| a.wrapping_add(b);
    i64 => |a, b| a.wrapping_add(b);
    u8 => |a, b| a.wrapping_add(b);
    u16 => |a, b| a.wrapping_add(b);
    u32 => |a, b| a.wrapping_add(b);
    u64 => |a, b| a.wrapping_add(b);
    bool => |a, b| a | b;
}

/// Integers for a shape, a permutation, axes or indices: an output, or numbers that become a constant (int32 where they
/// fit).
pub trait IntoInts<'g> {
    /// A vector of int32 or int64.
    fn into_ints(self, graph: &'g Graph) -> Output<'g>;
}

impl<'g> IntoInts<'g> for Output<'g> {
    fn into_ints(self, _: &'g Graph) -> Output<'g> {
        self
    }
}

macro_rules! into_ints {
    ($($ty:ty),*) => {
        $(impl<'g> IntoInts<'g> for &[$ty] {
            #[track_caller]
            fn into_ints(self, graph: &'g Graph) -> Output<'g> {
                constant(graph, self.iter().map(|&value| value as i64).collect())
            }
        }
        impl<'g, const N: usize> IntoInts<'g> for &[$ty; N] {
            #[track_caller]
            fn into_ints(self, graph: &'g Graph) -> Output<'g> {
                self.as_slice().into_ints(graph)
            }
        })*
    };
}

into_ints!(i32, i64, usize);

#[track_caller]
fn constant(graph: &Graph, values: Vec<i64>) -> Output<'_> {
    match values.iter().map(|&value| i32::try_from(value).ok()).collect::<Option<Vec<i32>>>() {
        Some(narrow) => graph.constant(narrow),
        None => graph.constant(values),
    }
}
