//! The loops that elementwise kernels share: one input or two, broadcast or not, in place when an input dies.
//!
//! Loops run compiled for the machine's best instruction set, and over several threads when there is enough to do.

use std::any::Any;

use half::{bf16, f16};
use kolo_core::{DType, Element, Error, Result, Shape, Tensor};
use kolo_device::cpu::stream::{can_stream_by, fence, is_streamed, stream_by};
use kolo_device::cpu::{IntraPool, pool, vectorize, vectorize_256};
use kolo_graph::Attrs;
use smallvec::SmallVec;

use crate::kernel::KernelCtx;
use crate::nn::rows::piece_of_run;

mod narrow;
pub use narrow::Computed;

/// Floats in a cache line.
pub(crate) const FLOATS: usize = 16;

/// Elements that are moved aside at a time by loops that write over their input. They stay in the first-level cache.
const BLOCK: usize = 512;

/// The loop of an op with one input. Everything around it is compiled once for each pair of types, not for each op.
pub type MapLoop<'f, T, U> = dyn Fn(&[T], &mut [U]) + Sync + 'f;

/// The loop of an op with two inputs: the part of the output, both inputs, how to walk them, and the first row of the part.
pub type ZipLoop<'f, T, U> = dyn Fn(&mut [U], &[T], &[T], &Walk, usize) + Sync + 'f;

/// The loop of an op with two large inputs of the same shape, whose output goes past the caches.
type PastLoop<'f, T, U> = dyn Fn(&mut [U], &[T], &[T]) + Sync + 'f;

/// Elementwise kernels of one expression each, and their tables:
///
/// ```text
/// SQRT_KERNELS, sqrt_kernel: Real, map(0.5), |x| Float::sqrt(x), (f32, f64; f16, bf16);
/// ```
///
/// defines `sqrt_kernel<T: Real>`, which calls `map` (or `zip`, or what else takes a closure over elements) with the cost of an
/// element in nanoseconds, and the table of its kernels for these types, written as in [`crate::op::cpu_kernels`].
macro_rules! expression_kernels {
    ($($table:ident, $function:ident: $bound:ident, $run:ident($ns:expr), |$($x:ident),+| $body:expr, ($($types:tt)*);)*) => {
        $(fn $function<T: $bound>(ctx: &mut $crate::KernelCtx<'_>) -> kolo_core::Result<()> {
            $run(ctx, $ns, #[inline(always)] |$($x: T),+| $body)
        }
        const $table: &[$crate::op::KernelDef] = $crate::op::cpu_kernels!(elementwise $function: $($types)*);)*
    };
}
pub(crate) use expression_kernels;

/// The attribute that is the parameter of an expression, rounded to the type `T` of the values as TensorFlow does, whatever
/// type they are computed in.
pub(crate) fn parameter(attrs: &Attrs, name: &str) -> Result<f32> {
    let value = attrs.float(name)?;
    Ok(match attrs.dtype("T") {
        Ok(DType::F16) => f16::from_f32(value).to_f32(),
        Ok(DType::BF16) => bf16::from_f32(value).to_f32(),
        _ => value,
    })
}

/// Sets output 0 to `f` of every element of input 0, writing into the input if it dies here and the types agree.
/// `ns` is about what one element costs, for splitting the work.
pub fn map<T: Computed, U: Element>(ctx: &mut KernelCtx<'_>, ns: f64, f: impl Fn(T) -> U + Sync + Copy) -> Result<()> {
    let each = move |input: &[T], out: &mut [U]| {
        lanes::<T, _>(
            #[inline(always)]
            || {
                for (y, x) in out.iter_mut().zip(input) {
                    *y = f(*x);
                }
            },
        );
    };
    if ctx.input(0)?.dtype() != T::DTYPE {
        return T::map_narrow::<U>(ctx, ns, &each);
    }
    map_by(ctx, ns, &each)
}

fn map_by<T: Element, U: Element>(ctx: &mut KernelCtx<'_>, ns: f64, each: &MapLoop<'_, T, U>) -> Result<()> {
    let shape = ctx.input(0)?.shape().clone();
    let (mut out, in_place) = ctx.reuse_or_allocate(0, U::DTYPE, shape)?;
    let pool = ctx.pool();
    if in_place {
        pool.for_each_chunk(out.data_mut::<U>()?, pool::grain(ns), |_, values| {
            over_itself(values, |_, before, after| each(before, after));
        });
    } else {
        let input = ctx.data::<T>(0)?;
        let chunk = pool::fill_grain::<U>(input.len(), ns);
        pool.fill_chunks(out.data_mut::<U>()?, chunk, &|i, out| each(&input[i * chunk..i * chunk + out.len()], out));
    }
    ctx.set_output(0, out);
    Ok(())
}

/// Calls `f` with pieces of `values`: where each begins, what was in it, and where its new content goes. `T` and `U` are
/// one type: the dtypes agree, or nobody would write over an input.
fn over_itself<T: Element, U: Element>(values: &mut [U], f: impl Fn(usize, &[T], &mut [U])) {
    let mut aside = [U::default(); BLOCK];
    for (i, block) in values.chunks_mut(BLOCK).enumerate() {
        aside[..block.len()].copy_from_slice(block);
        if let Some(before) = (&aside as &dyn Any).downcast_ref::<[T; BLOCK]>() {
            f(i * BLOCK, &before[..block.len()], block);
        }
    }
}

/// Sets output 0 to what loops over whole slices make of input 0: `in_place` if the input dies here, `between` otherwise.
pub fn map_slices<T: Computed>(
    ctx: &mut KernelCtx<'_>,
    ns: f64,
    in_place: fn(&mut [T]),
    between: fn(&[T], &mut [T]),
) -> Result<()> {
    if ctx.input(0)?.dtype() != T::DTYPE {
        return T::map_narrow::<T>(ctx, ns, &between);
    }
    let shape = ctx.input(0)?.shape().clone();
    let (mut out, reused) = ctx.reuse_or_allocate(0, T::DTYPE, shape)?;
    let pool = ctx.pool();
    if reused {
        pool.for_each_chunk(out.data_mut::<T>()?, pool::grain(ns), |_, values| in_place(values));
    } else {
        let input = ctx.data::<T>(0)?;
        let chunk = pool::fill_grain::<T>(input.len(), ns);
        pool.fill_chunks(out.data_mut::<T>()?, chunk, &|i, out| {
            between(&input[i * chunk..i * chunk + out.len()], out);
        });
    }
    ctx.set_output(0, out);
    Ok(())
}

/// [`vectorize`] for element types whose loops gain by it: for every instruction set where training spends its time, for one
/// more than the plain one where it might. Other types are rare in loops of their own; compiling those several times would cost
/// more build time than it saves run time.
#[inline(always)]
pub(crate) fn lanes<T: Element, R>(f: impl FnOnce() -> R) -> R {
    // By `if const`, so that only one of them is compiled.
    if const { matches!(T::DTYPE, DType::F32) } {
        vectorize(f)
    } else if const { matches!(T::DTYPE, DType::F64 | DType::I32 | DType::I64 | DType::Bool) } {
        vectorize_256(f)
    } else {
        f()
    }
}

/// Sets output 0 to `f` of inputs 0 and 1, broadcast against each other.
pub fn zip<T: Computed, U: Element>(
    ctx: &mut KernelCtx<'_>,
    ns: f64,
    f: impl Fn(T, T) -> U + Sync + Copy,
) -> Result<()> {
    let each = move |out: &mut [U], left: &[T], right: &[T], walk: &Walk, first: usize| {
        // One choice of instructions for all rows: they are often short.
        lanes::<T, _>(
            #[inline(always)]
            || {
                for (row, out) in out.chunks_mut(walk.run).enumerate() {
                    let (at_a, at_b) = walk.offsets(first + row);
                    run(out, &left[at_a..], walk.inner.0, &right[at_b..], walk.inner.1, f);
                }
            },
        );
    };
    let (left, right) = (ctx.input(0)?, ctx.input(1)?);
    if left.dtype() != T::DTYPE {
        return T::zip_narrow::<U>(ctx, ns, &each);
    }
    if left.shape().rank() + right.shape().rank() == 0 {
        let value = f(left.scalar_value::<T>()?, right.scalar_value::<T>()?);
        ctx.set_output(0, Tensor::scalar(value));
        return Ok(());
    }
    let past = |out: &mut [U], left: &[T], right: &[T]| {
        let line = |at: usize| {
            let mut values = [U::default(); FLOATS];
            if let (Some(left), Some(right)) = (left[at..].first_chunk::<FLOATS>(), right[at..].first_chunk::<FLOATS>())
            {
                for ((y, &a), &b) in values.iter_mut().zip(left).zip(right) {
                    *y = f(a, b);
                }
            }
            values
        };
        stream_by(out, line, |i| f(left[i], right[i]));
    };
    // By `if const`, so that it is compiled for floats alone.
    let past: Option<&PastLoop<'_, T, U>> = if const { matches!((T::DTYPE, U::DTYPE), (DType::F32, DType::F32)) } {
        can_stream_by().then_some(&past)
    } else {
        None
    };
    zip_by(ctx, ns, past, &each)
}

fn zip_by<T: Element, U: Element>(
    ctx: &mut KernelCtx<'_>,
    ns: f64,
    past: Option<&PastLoop<'_, T, U>>,
    each: &ZipLoop<'_, T, U>,
) -> Result<()> {
    let (a, b) = (ctx.input(0)?.shape().clone(), ctx.input(1)?.shape().clone());
    if a == b {
        return zip_flat(ctx, ns, a, (true, true), past, each);
    }
    let shape = broadcast_shape(&a, &b)?;
    if b.n_elements() == 1 && a.n_elements() == shape.n_elements() {
        return zip_flat(ctx, ns, shape, (true, false), None, each);
    }
    if a.n_elements() == 1 && b.n_elements() == shape.n_elements() {
        return zip_flat(ctx, ns, shape, (false, true), None, each);
    }
    let (pool, mut walk) = (ctx.pool(), Walk::new(&shape, &a, &b));
    walk.cut(pool::fill_grain::<U>(shape.n_elements(), ns));
    let mut out = ctx.allocate(U::DTYPE, shape)?;
    let (left, right) = (ctx.data::<T>(0)?, ctx.data::<T>(1)?);
    // Whole runs of the innermost dimension per task, so that a run is never cut.
    let rows_per_chunk = pool::fill_grain::<U>(out.n_elements(), ns).div_ceil(walk.run).max(1);
    pool.fill_chunks(out.data_mut::<U>()?, rows_per_chunk * walk.run, &|i, out| {
        each(out, left, right, &walk, i * rows_per_chunk);
    });
    ctx.set_output(0, out);
    Ok(())
}

/// [`zip`] of inputs that are walked from end to end, or stay at their only element, as `moves` says of each. `shape` is
/// that of the one that moves but for sizes of 1.
fn zip_flat<T: Element, U: Element>(
    ctx: &mut KernelCtx<'_>,
    ns: f64,
    shape: Shape,
    moves: (bool, bool),
    past: Option<&PastLoop<'_, T, U>>,
    each: &ZipLoop<'_, T, U>,
) -> Result<()> {
    let (pool, chunk) = (ctx.pool(), pool::grain(ns));
    let walk = Walk { run: usize::MAX, inner: moves, outer: SmallVec::new() };
    let (mut out, mut reused) = (None, [false; 2]);
    for (i, moves) in [moves.0, moves.1].into_iter().enumerate() {
        if moves && !reused.contains(&true) {
            let input = ctx.take_input(i)?.reshaped(shape.clone())?;
            ctx.inputs[i] = crate::Value::Tensor(input);
            let (tensor, is_input) = ctx.reuse_or_allocate(i, U::DTYPE, shape.clone())?;
            (out, reused[i]) = (Some(tensor), is_input);
        }
    }
    let Some(mut out) = out else { return Err(Error::internal("one of two inputs moves")) };
    let target = out.data_mut::<U>()?;
    match reused {
        [true, _] => {
            let right = ctx.data::<T>(1)?;
            pool.for_each_chunk(target, chunk, |i, values| {
                over_itself(values, |at, left, out| each(out, left, piece(right, moves.1, i * chunk + at), &walk, 0));
            });
        }
        [_, true] => {
            let left = ctx.data::<T>(0)?;
            pool.for_each_chunk(target, chunk, |i, values| {
                over_itself(values, |at, right, out| each(out, piece(left, moves.0, i * chunk + at), right, &walk, 0));
            });
        }
        _ => {
            let (left, right) = (ctx.data::<T>(0)?, ctx.data::<T>(1)?);
            if let Some(past) = past.filter(|_| is_streamed(size_of_val(target))) {
                fill_past(pool, target, &|at, out| past(out, &left[at..], &right[at..]));
                ctx.set_output(0, out);
                return Ok(());
            }
            let chunk = pool::fill_grain::<U>(target.len(), ns);
            pool.fill_chunks(target, chunk, &|i, out| {
                each(out, piece(left, moves.0, i * chunk), piece(right, moves.1, i * chunk), &walk, 0);
            });
        }
    }
    ctx.set_output(0, out);
    Ok(())
}

/// Calls `f` with long pieces of `target`, and where each begins; `f` stores past the caches.
pub(crate) fn fill_past<U: Element>(pool: &IntraPool, target: &mut [U], f: &(dyn Fn(usize, &mut [U]) + Sync)) {
    let chunk = (pool.stretch(size_of_val(target)) / size_of::<U>().max(1)).max(1);
    pool.for_each_chunk(target, chunk, |i, out| {
        f(i * chunk, out);
        fence();
    });
}

/// The part of an input from `at` on, or all of one that stays where it is.
fn piece<T>(values: &[T], moves: bool, at: usize) -> &[T] {
    if moves { &values[at..] } else { values }
}

/// One run of the innermost dimensions: each side either moves along or stays at one element.
#[inline(always)]
fn run<T: Element, U: Element>(
    out: &mut [U],
    a: &[T],
    a_moves: bool,
    b: &[T],
    b_moves: bool,
    f: impl Fn(T, T) -> U + Copy,
) {
    let n = out.len();
    match (a_moves, b_moves) {
        (true, true) => {
            for ((y, &a), &b) in out.iter_mut().zip(&a[..n]).zip(&b[..n]) {
                *y = f(a, b);
            }
        }
        (true, false) => {
            let b = b[0];
            for (y, &a) in out.iter_mut().zip(&a[..n]) {
                *y = f(a, b);
            }
        }
        (false, true) => {
            let a = a[0];
            for (y, &b) in out.iter_mut().zip(&b[..n]) {
                *y = f(a, b);
            }
        }
        (false, false) => out.fill(f(a[0], b[0])),
    }
}

/// The shape two inputs broadcast to.
pub fn broadcast_shape(a: &Shape, b: &Shape) -> Result<Shape> {
    let rank = a.rank().max(b.rank());
    let mut dims: SmallVec<[usize; 4]> = SmallVec::with_capacity(rank);
    for i in 0..rank {
        let of = |shape: &Shape| (i + shape.rank()).checked_sub(rank).map_or(1, |at| shape[at]);
        dims.push(match (of(a), of(b)) {
            (1, n) | (n, 1) => n,
            (x, y) if x == y => x,
            _ => return Err(Error::invalid_argument(format!("Incompatible shapes: {a} vs. {b}"))),
        });
    }
    Shape::new(&dims)
}

/// How to walk two broadcast inputs: runs of the innermost dimensions, and where each run begins in either.
pub struct Walk {
    /// Elements in a run.
    pub run: usize,
    /// Whether each input moves along within a run.
    pub inner: (bool, bool),
    /// Outer sizes and the steps of both inputs, outermost first.
    outer: SmallVec<[(usize, usize, usize); 4]>,
}

impl Walk {
    /// For inputs of shapes `a` and `b` that broadcast to `shape`.
    pub fn new(shape: &Shape, a: &Shape, b: &Shape) -> Walk {
        let rank = shape.rank();
        let strides = |from: &Shape| -> SmallVec<[usize; 4]> {
            let mut strides = SmallVec::from_elem(0, rank);
            let mut step = 1;
            for i in (0..from.rank()).rev() {
                let at = i + rank - from.rank();
                strides[at] = if from[i] == 1 { 0 } else { step };
                step *= from[i];
            }
            strides
        };
        let (steps_a, steps_b) = (strides(a), strides(b));
        // Merge neighbouring dimensions that both inputs walk alike.
        let mut merged: SmallVec<[(usize, usize, usize); 4]> = SmallVec::new();
        for i in (0..rank).rev().filter(|&i| shape[i] != 1) {
            let (n, sa, sb) = (shape[i], steps_a[i], steps_b[i]);
            match merged.last_mut() {
                Some((m, ta, tb)) if sa == *ta * *m && sb == *tb * *m => *m *= n,
                _ => merged.push((n, sa, sb)),
            }
        }
        let (run, inner_a, inner_b) = if merged.is_empty() { (1, 0, 0) } else { merged.remove(0) };
        merged.reverse();
        Walk { run: run.max(1), inner: (inner_a != 0, inner_b != 0), outer: merged }
    }

    /// Makes runs that are longer than `most` shorter, if some of about that length fill them.
    fn cut(&mut self, most: usize) {
        let run = piece_of_run(self.run, most);
        if run < self.run {
            let step = |moves| if moves { run } else { 0 };
            self.outer.push((self.run / run, step(self.inner.0), step(self.inner.1)));
            self.run = run;
        }
    }

    /// Where run `row` begins in each input.
    pub fn offsets(&self, mut row: usize) -> (usize, usize) {
        let (mut a, mut b) = (0, 0);
        for &(n, step_a, step_b) in self.outer.iter().rev() {
            let at = row % n;
            row /= n;
            a += at * step_a;
            b += at * step_b;
        }
        (a, b)
    }
}

/// A tensor made of `f(i)` for every element `i`, for kernels whose loops need no speed.
pub fn collect<T: Element>(ctx: &KernelCtx<'_>, shape: Shape, f: impl FnMut(usize) -> T) -> Result<Tensor> {
    let mut out = ctx.allocate(T::DTYPE, shape)?;
    let mut f = f;
    out.data_mut::<T>()?.iter_mut().enumerate().for_each(|(i, y)| *y = f(i));
    Ok(out)
}
