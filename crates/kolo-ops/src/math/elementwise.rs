//! The loops that elementwise kernels share: one input or two, broadcast or not, in place when an input dies.
//!
//! Loops run compiled for the machine's best instruction set, and over several threads when there is enough to do.

use kolo_core::{DType, Element, Error, Result, Shape, Tensor};
use kolo_device::cpu::{pool, vectorize};
use smallvec::SmallVec;

use crate::kernel::KernelCtx;

/// Sets output 0 to `f` of every element of input 0, writing into the input if it dies here and the types agree.
/// `ns` is about what one element costs, for splitting the work.
pub fn map<T: Element, U: Element>(ctx: &mut KernelCtx<'_>, ns: f64, f: impl Fn(T) -> U + Sync + Copy) -> Result<()> {
    let shape = ctx.input(0)?.shape().clone();
    let (mut out, in_place) = ctx.reuse_or_allocate(0, U::DTYPE, shape)?;
    let pool = ctx.pool();
    let chunk = pool::grain(ns);
    if in_place {
        // T and U are one type here, since the dtypes agree.
        let values = out.data_mut::<T>()?;
        pool.for_each_chunk(values, chunk, |_, values| {
            lanes::<T, _>(
                #[inline(always)]
                || {
                    for x in values.iter_mut() {
                        *x = cast_same(f(*x));
                    }
                },
            );
        });
    } else {
        let input = ctx.data::<T>(0)?;
        pool.for_each_chunk(out.data_mut::<U>()?, chunk, |i, out| {
            let input = &input[i * chunk..i * chunk + out.len()];
            lanes::<T, _>(
                #[inline(always)]
                || {
                    for (y, x) in out.iter_mut().zip(input) {
                        *y = f(*x);
                    }
                },
            );
        });
    }
    ctx.set_output(0, out);
    Ok(())
}

/// Sets output 0 to what loops over whole slices make of input 0: `in_place` if the input dies here, `between` otherwise.
pub fn map_slices<T: Element>(
    ctx: &mut KernelCtx<'_>,
    ns: f64,
    in_place: fn(&mut [T]),
    between: fn(&[T], &mut [T]),
) -> Result<()> {
    let shape = ctx.input(0)?.shape().clone();
    let (mut out, reused) = ctx.reuse_or_allocate(0, T::DTYPE, shape)?;
    let (pool, chunk) = (ctx.pool(), pool::grain(ns));
    if reused {
        pool.for_each_chunk(out.data_mut::<T>()?, chunk, |_, values| in_place(values));
    } else {
        let input = ctx.data::<T>(0)?;
        pool.for_each_chunk(out.data_mut::<T>()?, chunk, |i, out| {
            between(&input[i * chunk..i * chunk + out.len()], out);
        });
    }
    ctx.set_output(0, out);
    Ok(())
}

/// [`vectorize`] for element types whose loops gain by it. Small integers are rare in hot loops, and halves convert one by
/// one; compiling their loops for every instruction set would cost more build time than it saves run time.
#[inline(always)]
pub(crate) fn lanes<T: Element, R>(f: impl FnOnce() -> R) -> R {
    if const { matches!(T::DTYPE, DType::F32 | DType::F64 | DType::I32 | DType::I64 | DType::Bool) } {
        vectorize(f)
    } else {
        f()
    }
}

/// Reads a value as another type that has the same dtype, and so is the same type.
#[inline(always)]
fn cast_same<U: Element, T: Element>(value: U) -> T {
    // Same dtype means same type, so the bytes fit; the compiler sees through this.
    bytemuck::checked::cast(value)
}

/// Sets output 0 to `f` of inputs 0 and 1, broadcast against each other.
pub fn zip<T: Element, U: Element>(
    ctx: &mut KernelCtx<'_>,
    ns: f64,
    f: impl Fn(T, T) -> U + Sync + Copy,
) -> Result<()> {
    let (left, right) = (ctx.input(0)?, ctx.input(1)?);
    if left.shape().rank() + right.shape().rank() == 0 {
        let value = f(left.scalar_value::<T>()?, right.scalar_value::<T>()?);
        ctx.set_output(0, Tensor::scalar(value));
        return Ok(());
    }
    let (a, b) = (left.shape().clone(), right.shape().clone());
    if a == b {
        return zip_same(ctx, ns, a, f);
    }
    let shape = broadcast_shape(&a, &b)?;
    let pool = ctx.pool();
    let chunk = pool::grain(ns);
    if b.n_elements() == 1 && a.n_elements() == shape.n_elements() {
        let scalar = ctx.data::<T>(1)?[0];
        return map_to_shape(ctx, 0, ns, shape, move |x| f(x, scalar));
    }
    if a.n_elements() == 1 && b.n_elements() == shape.n_elements() {
        let scalar = ctx.data::<T>(0)?[0];
        return map_to_shape(ctx, 1, ns, shape, move |x| f(scalar, x));
    }
    let mut out = ctx.allocate(U::DTYPE, shape.clone())?;
    {
        let (left, right) = (ctx.data::<T>(0)?, ctx.data::<T>(1)?);
        let walk = Walk::new(&shape, &a, &b);
        // Whole runs of the innermost dimension per task, so that a run is never cut.
        let rows_per_chunk = chunk.div_ceil(walk.run).max(1);
        pool.for_each_chunk(out.data_mut::<U>()?, rows_per_chunk * walk.run, |i, out| {
            // One choice of instructions for all rows: they are often short.
            lanes::<T, _>(
                #[inline(always)]
                || {
                    for (row, out) in out.chunks_mut(walk.run).enumerate() {
                        let (at_a, at_b) = walk.offsets(i * rows_per_chunk + row);
                        run(out, &left[at_a..], walk.inner.0, &right[at_b..], walk.inner.1, f);
                    }
                },
            );
        });
    }
    ctx.set_output(0, out);
    Ok(())
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
        (true, true) => out.iter_mut().zip(&a[..n]).zip(&b[..n]).for_each(|((y, &a), &b)| *y = f(a, b)),
        (true, false) => {
            let b = b[0];
            out.iter_mut().zip(&a[..n]).for_each(|(y, &a)| *y = f(a, b));
        }
        (false, true) => {
            let a = a[0];
            out.iter_mut().zip(&b[..n]).for_each(|(y, &b)| *y = f(a, b));
        }
        (false, false) => out.fill(f(a[0], b[0])),
    }
}

fn zip_same<T: Element, U: Element>(
    ctx: &mut KernelCtx<'_>,
    ns: f64,
    shape: Shape,
    f: impl Fn(T, T) -> U + Sync + Copy,
) -> Result<()> {
    let pool = ctx.pool();
    let chunk = pool::grain(ns);
    let (mut out, in_left) = ctx.reuse_or_allocate(0, U::DTYPE, shape.clone())?;
    if in_left {
        let right = ctx.data::<T>(1)?;
        pool.for_each_chunk(out.data_mut::<T>()?, chunk, |i, left| {
            let right = &right[i * chunk..i * chunk + left.len()];
            lanes::<T, _>(
                #[inline(always)]
                || {
                    for (a, b) in left.iter_mut().zip(right) {
                        *a = cast_same(f(*a, *b));
                    }
                },
            );
        });
        ctx.set_output(0, out);
        return Ok(());
    }
    let (reused, in_right) = ctx.reuse_or_allocate(1, U::DTYPE, shape)?;
    out = reused;
    if in_right {
        let left = ctx.data::<T>(0)?;
        pool.for_each_chunk(out.data_mut::<T>()?, chunk, |i, right| {
            let left = &left[i * chunk..i * chunk + right.len()];
            lanes::<T, _>(
                #[inline(always)]
                || {
                    for (b, a) in right.iter_mut().zip(left) {
                        *b = cast_same(f(*a, *b));
                    }
                },
            );
        });
    } else {
        let (left, right) = (ctx.data::<T>(0)?, ctx.data::<T>(1)?);
        pool.for_each_chunk(out.data_mut::<U>()?, chunk, |i, out| {
            let (left, right) = (&left[i * chunk..i * chunk + out.len()], &right[i * chunk..i * chunk + out.len()]);
            lanes::<T, _>(
                #[inline(always)]
                || {
                    for ((y, a), b) in out.iter_mut().zip(left).zip(right) {
                        *y = f(*a, *b);
                    }
                },
            );
        });
    }
    ctx.set_output(0, out);
    Ok(())
}

/// Output 0 is `f` of every element of input `i`, under `shape` (which differs only by sizes of 1).
fn map_to_shape<T: Element, U: Element>(
    ctx: &mut KernelCtx<'_>,
    i: usize,
    ns: f64,
    shape: Shape,
    f: impl Fn(T) -> U + Sync + Copy,
) -> Result<()> {
    let input = ctx.take_input(i)?.reshaped(shape)?;
    ctx.inputs[0] = crate::Input::Tensor(input);
    map(ctx, ns, f)
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
