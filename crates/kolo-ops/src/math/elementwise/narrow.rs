//! Elementwise ops of narrow types, by the loops of wider ones, in blocks that stay in the first-level cache.

use std::any::Any;

use half::{bf16, f16};
use kolo_core::{DType, Element, Error, Result};
use smallvec::SmallVec;

use super::{BLOCK, MapLoop, Walk, ZipLoop, map_by, zip_by};
use crate::KernelCtx;
use crate::widened::Narrow;

/// What elementwise loops compute with: itself, and narrower types that are computed in it.
pub trait Computed: Element {
    /// Maps input 0, whose elements are of a narrower type. `U` is `Self` where the op keeps its type.
    fn map_narrow<U: Element>(ctx: &mut KernelCtx<'_>, ns: f64, each: &MapLoop<'_, Self, U>) -> Result<()>;

    /// The same for two inputs.
    fn zip_narrow<U: Element>(ctx: &mut KernelCtx<'_>, ns: f64, each: &ZipLoop<'_, Self, U>) -> Result<()>;
}

macro_rules! computed {
    ($($wide:ty: $($dtype:ident $narrow:ty),*;)*) => {
        $(impl Computed for $wide {
            #[allow(unused_variables, reason = "not every type has narrower ones")]
            fn map_narrow<U: Element>(ctx: &mut KernelCtx<'_>, ns: f64, each: &MapLoop<'_, $wide, U>) -> Result<()> {
                match ctx.input(0)?.dtype() {
                    $(DType::$dtype => map::<$narrow, U>(ctx, ns, each),)*
                    other => Err(not_computed::<$wide>(other)),
                }
            }

            #[allow(unused_variables, reason = "not every type has narrower ones")]
            fn zip_narrow<U: Element>(ctx: &mut KernelCtx<'_>, ns: f64, each: &ZipLoop<'_, $wide, U>) -> Result<()> {
                match ctx.input(0)?.dtype() {
                    $(DType::$dtype => zip::<$narrow, U>(ctx, ns, each),)*
                    other => Err(not_computed::<$wide>(other)),
                }
            }
        })*
    };
}

computed! {
    f32: F16 f16, BF16 bf16;
    i32: I8 i8, I16 i16, U8 u8, U16 u16;
    i64: U32 u32;
    f64:;
    u64:;
    bool:;
    f16:;
    bf16:;
    i8:;
    i16:;
    u8:;
    u16:;
    u32:;
}

fn not_computed<W: Element>(dtype: DType) -> Error {
    Error::internal(format!("{dtype} is not computed in {}", W::DTYPE))
}

fn map<N: Narrow, U: Element>(ctx: &mut KernelCtx<'_>, ns: f64, each: &MapLoop<'_, N::Wide, U>) -> Result<()> {
    if const { is_same(U::DTYPE, N::Wide::DTYPE) } {
        map_by::<N, N>(ctx, ns, &|input: &[N], out: &mut [N]| {
            let (mut before, mut after) = ([N::Wide::default(); BLOCK], [U::default(); BLOCK]);
            for (input, out) in input.chunks(BLOCK).zip(out.chunks_mut(BLOCK)) {
                each(widen(input, &mut before), &mut after[..out.len()]);
                narrow(&after, out);
            }
        })
    } else {
        map_by::<N, U>(ctx, ns, &|input: &[N], out: &mut [U]| {
            let mut before = [N::Wide::default(); BLOCK];
            for (input, out) in input.chunks(BLOCK).zip(out.chunks_mut(BLOCK)) {
                each(widen(input, &mut before), out);
            }
        })
    }
}

fn zip<N: Narrow, U: Element>(ctx: &mut KernelCtx<'_>, ns: f64, each: &ZipLoop<'_, N::Wide, U>) -> Result<()> {
    if const { is_same(U::DTYPE, N::Wide::DTYPE) } {
        zip_by::<N, N>(ctx, ns, None, &|out: &mut [N], left: &[N], right: &[N], walk: &Walk, first: usize| {
            let mut wide = [U::default(); BLOCK];
            in_blocks(out, left, right, walk, first, |out, left, right, flat| {
                each(&mut wide[..out.len()], left, right, flat, 0);
                narrow(&wide, out);
            });
        })
    } else {
        zip_by::<N, U>(ctx, ns, None, &|out: &mut [U], left: &[N], right: &[N], walk: &Walk, first: usize| {
            in_blocks(out, left, right, walk, first, |out, left, right, flat| each(out, left, right, flat, 0));
        })
    }
}

const fn is_same(a: DType, b: DType) -> bool {
    a as i32 == b as i32
}

/// Calls `f` with each block of the output, what it is computed from, and how to walk that.
fn in_blocks<N: Narrow, V>(
    out: &mut [V],
    left: &[N],
    right: &[N],
    walk: &Walk,
    first: usize,
    mut f: impl FnMut(&mut [V], &[N::Wide], &[N::Wide], &Walk),
) {
    let (mut wide_left, mut wide_right) = ([N::Wide::default(); BLOCK], [N::Wide::default(); BLOCK]);
    let flat = Walk { run: usize::MAX, inner: walk.inner, outer: SmallVec::new() };
    for (row, out) in out.chunks_mut(walk.run).enumerate() {
        let (at_left, at_right) = walk.offsets(first + row);
        for (block, out) in out.chunks_mut(BLOCK).enumerate() {
            // What does not move is one element.
            let part = |moves: bool, at: usize| match moves {
                true => at + block * BLOCK..at + block * BLOCK + out.len(),
                false => at..at + 1,
            };
            let left = widen(&left[part(walk.inner.0, at_left)], &mut wide_left);
            let right = widen(&right[part(walk.inner.1, at_right)], &mut wide_right);
            f(out, left, right, &flat);
        }
    }
}

fn widen<'b, N: Narrow>(from: &[N], buffer: &'b mut [N::Wide; BLOCK]) -> &'b [N::Wide] {
    let to = &mut buffer[..from.len()];
    N::widen_all(from, to);
    to
}

/// `U` is the wide type of `N`.
fn narrow<N: Narrow, U: Element>(from: &[U; BLOCK], to: &mut [N]) {
    if let Some(from) = (from as &dyn Any).downcast_ref::<[N::Wide; BLOCK]>() {
        N::narrow_all(&from[..to.len()], to);
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};
    use kolo_core::{Element, Tensor};

    use crate::testing::{check_op, tensor};

    /// More than two blocks, and some.
    const COLUMNS: usize = 1100;
    const ROWS: usize = 3;

    fn matrix<T: Element>(values: &[T]) -> Tensor {
        Tensor::from_vec([ROWS, COLUMNS], values.to_vec()).unwrap()
    }

    /// `op` with a matrix and a row, a column, a number and the matrix itself gives what `f` says, on either side.
    fn check_pairs<T: Element, U: Element>(op: &str, value: impl Fn(usize) -> T, f: impl Fn(T, T) -> U) {
        let whole: Vec<T> = (0..ROWS * COLUMNS).map(&value).collect();
        let row: Vec<T> = (0..COLUMNS).map(|i| value(i * 7 + 3)).collect();
        let column: Vec<T> = (0..ROWS).map(|i| value(i + 5)).collect();
        let check = |other: Tensor, at: &dyn Fn(usize) -> T| {
            let pairs = || whole.iter().enumerate().map(|(i, &x)| (x, at(i)));
            let expected: Vec<U> = pairs().map(|(x, y)| f(x, y)).collect();
            check_op(op).input(matrix(&whole)).input(other.clone()).gives(matrix(&expected));
            let expected: Vec<U> = pairs().map(|(x, y)| f(y, x)).collect();
            check_op(op).input(other).input(matrix(&whole)).gives(matrix(&expected));
        };
        check(Tensor::from_vec([COLUMNS], row.clone()).unwrap(), &|i| row[i % COLUMNS]);
        check(Tensor::from_vec([ROWS, 1], column.clone()).unwrap(), &|i| column[i / COLUMNS]);
        check(Tensor::scalar(value(11)), &|_| value(11));
        check(matrix(&whole), &|i| whole[i]);
        check_op(op)
            .input(Tensor::scalar(value(1)))
            .input(Tensor::scalar(value(2)))
            .gives(Tensor::scalar(f(value(1), value(2))));
    }

    #[test]
    fn pairs_of_halves_are_rounded_once() {
        let half = |i: usize| f16::from_f32((i * 37 % 1009) as f32 * 0.37 - 170.0);
        check_pairs("Sub", half, |x, y| f16::from_f32(x.to_f32() - y.to_f32()));
        check_pairs("Less", half, |x, y| x < y);
        let brain = |i: usize| bf16::from_f32((i * 37 % 1009) as f32 * 0.37 - 170.0);
        check_pairs("Mul", brain, |x, y| bf16::from_f32(x.to_f32() * y.to_f32()));
    }

    #[test]
    fn single_halves_and_integers() {
        let values: Vec<f32> = (0..ROWS * COLUMNS).map(|i| (i * 37 % 1009) as f32 * 0.37 - 170.0).collect();
        let halves: Vec<f16> = values.iter().map(|&x| f16::from_f32(x)).collect();
        let expected: Vec<f16> = halves.iter().map(|x| f16::from_f32(x.to_f32().max(0.0))).collect();
        check_op("Relu").input(matrix(&halves)).gives(matrix(&expected));
        let expected: Vec<bool> = halves.iter().map(|x| x.is_nan()).collect();
        check_op("IsNan").input(matrix(&halves)).gives(matrix(&expected));
        let brains: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
        let expected: Vec<bf16> = brains.iter().map(|x| bf16::from_f32(1.0 / (1.0 + (-x.to_f32()).exp()))).collect();
        check_op("Sigmoid").tolerance(4e-3).input(matrix(&brains)).gives(matrix(&expected));
        let integers: Vec<i16> = (0..ROWS * COLUMNS).map(|i| (i * 311) as i16).collect();
        let expected: Vec<i16> = integers.iter().map(|x| x.wrapping_mul(*x)).collect();
        check_op("Square").input(matrix(&integers)).gives(matrix(&expected));
        check_op("Square").input([70_000u32, 3]).gives([70_000u32.wrapping_mul(70_000), 9]);
        check_op("Neg").input([i8::MIN, 5]).gives([i8::MIN, -5]);
        check_op("Relu").input([3_000_000_000u32]).gives([3_000_000_000u32]);
        check_op("Relu").input(tensor::<u8, 1>([0], [])).gives(tensor::<u8, 1>([0], []));
    }
}
