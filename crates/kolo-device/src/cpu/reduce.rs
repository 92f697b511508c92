//! Sums (and the like) over vectors of several ranks, element by element.
//!
//! The order is fixed: vectors are combined in a balanced tree over their ranks, `((0 + 1) + (2 + 3)) + …`. It depends on the
//! number of ranks alone, so a sum has the same bits however the work is cut, and in whatever order vectors arrive; and a power
//! of two of ranks continues the tree that each of them may have summed its own parts in. Halves are summed as floats and
//! rounded once.

use std::ops::Range;

use bytemuck::Pod;
use half::{bf16, f16};
use kolo_core::{DType, Error, Result};

use super::halves::{from_half, to_half};
use super::vectorize_256;

/// How elements of several ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// Their sum; integers wrap around.
    Sum,
    /// Their sum, divided by the number of ranks.
    Mean,
    /// The smallest; NaN if one is.
    Min,
    /// The largest; NaN if one is.
    Max,
    /// Their product; integers wrap around.
    Prod,
}

impl ReduceOp {
    /// All of them.
    pub const ALL: [ReduceOp; 5] = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Min, ReduceOp::Max, ReduceOp::Prod];

    /// `sum`, `mean`, …
    pub fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Mean => "mean",
            ReduceOp::Min => "min",
            ReduceOp::Max => "max",
            ReduceOp::Prod => "prod",
        }
    }

    /// The op of this name.
    pub fn parse(name: &str) -> Result<ReduceOp> {
        ReduceOp::ALL.into_iter().find(|op| op.name() == name).ok_or_else(|| {
            let names = ReduceOp::ALL.map(ReduceOp::name).join(", ");
            Error::invalid_argument(format!("there is no reduction '{name}', but {names}"))
        })
    }
}

/// An expression for the type `$T` of the elements of a dtype.
macro_rules! for_type {
    ($dtype:expr, $T:ident => $body:expr) => {
        for_type!(@ $dtype, $T, $body, F32 f32, F64 f64, F16 f16, BF16 bf16, I8 i8, I16 i16, I32 i32, I64 i64, U8 u8, U16 u16,
            U32 u32, U64 u64)
    };
    (@ $dtype:expr, $T:ident, $body:expr, $($name:ident $ty:ty),*) => {
        match $dtype {
            $(DType::$name => {
                type $T = $ty;
                $body
            })*
            other => Err(no_arithmetic(other)),
        }
    };
}

/// Combines the vectors of all ranks into `out`. All have the same length; an error if not, or if `dtype` has no arithmetic.
pub fn reduce(dtype: DType, op: ReduceOp, sources: &[&[u8]], out: &mut [u8]) -> Result<()> {
    if sources.is_empty() || sources.iter().any(|source| source.len() != out.len()) {
        return Err(Error::internal("vectors of different lengths are not reduced"));
    }
    for_type!(dtype, T => reduce_as::<T>(op, Sources { before: sources, own: false, after: &[] }, out))
}

/// As [`reduce`], in place: `own` is the vector of the rank after those of `before` and before those of `after`, and becomes the
/// result.
pub fn reduce_in_place(dtype: DType, op: ReduceOp, before: &[&[u8]], own: &mut [u8], after: &[&[u8]]) -> Result<()> {
    if before.iter().chain(after).any(|source| source.len() != own.len()) {
        return Err(Error::internal("vectors of different lengths are not reduced"));
    }
    for_type!(dtype, T => reduce_as::<T>(op, Sources { before, own: true, after }, own))
}

/// Divides a sum that was made in steps by the number of ranks, as [`ReduceOp::Mean`] does at its end.
pub fn divide(dtype: DType, sum: &mut [u8], n_ranks: usize) -> Result<()> {
    for_type!(dtype, T => {
        let sum = bytemuck::try_cast_slice_mut::<u8, T>(sum).map_err(unaligned)?;
        match T::reciprocal(n_ranks) {
            Some(factor) => each(sum, #[inline(always)] |x| T::combine(ReduceOp::Prod, x, factor)),
            None => each(sum, #[inline(always)] |x| T::divide(x, n_ranks)),
        }
        Ok(())
    })
}

fn each<T: Reduced>(values: &mut [T], change: impl Fn(T::Wide) -> T::Wide) {
    vectorize_256(
        #[inline(always)]
        || values.iter_mut().for_each(|x| *x = T::narrow(change(x.widen()))),
    );
}

/// Whether partial results have more bits than the dtype, so that a reduction in steps rounds more often than one at once.
pub fn is_widened(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}

fn unaligned<E>(_: E) -> Error {
    Error::internal("vectors to reduce are not aligned to their elements")
}

/// An error if [`reduce`] has no arithmetic for `dtype`.
pub fn check_reducible(dtype: DType) -> Result<()> {
    match dtype {
        DType::F32 | DType::F64 | DType::F16 | DType::BF16 => Ok(()),
        DType::I8 | DType::I16 | DType::I32 | DType::I64 => Ok(()),
        DType::U8 | DType::U16 | DType::U32 | DType::U64 => Ok(()),
        other => Err(no_arithmetic(other)),
    }
}

fn no_arithmetic(dtype: DType) -> Error {
    Error::invalid_argument(format!("{dtype} cannot be reduced: it has no arithmetic"))
}

/// Elements that are combined as `Wide`.
trait Reduced: Pod {
    type Wide: Copy + Default;
    fn widen(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;
    fn combine(op: ReduceOp, a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn divide(sum: Self::Wide, n: usize) -> Self::Wide;
    /// What to multiply by instead of dividing by `n`, if that gives the same bits: it takes a fraction of the time.
    fn reciprocal(n: usize) -> Option<Self::Wide>;
}

macro_rules! float {
    ($ty:ty, $wide:ty, $widen:expr, $narrow:expr) => {
        impl Reduced for $ty {
            type Wide = $wide;

            #[inline(always)]
            fn widen(self) -> $wide {
                $widen(self)
            }

            #[inline(always)]
            fn narrow(wide: $wide) -> $ty {
                $narrow(wide)
            }

            #[inline(always)]
            fn combine(op: ReduceOp, a: $wide, b: $wide) -> $wide {
                match op {
                    ReduceOp::Sum | ReduceOp::Mean => a + b,
                    ReduceOp::Prod => a * b,
                    // A NaN on either side is kept.
                    ReduceOp::Min => {
                        if a < b || a.is_nan() {
                            a
                        } else {
                            b
                        }
                    }
                    ReduceOp::Max => {
                        if a > b || a.is_nan() {
                            a
                        } else {
                            b
                        }
                    }
                }
            }

            #[inline(always)]
            fn divide(sum: $wide, n: usize) -> $wide {
                sum / n as $wide
            }

            #[inline(always)]
            fn reciprocal(n: usize) -> Option<$wide> {
                // That of a power of two is exact.
                n.is_power_of_two().then(|| 1.0 / n as $wide)
            }
        }
    };
}

float!(f32, f32, |x| x, |x| x);
float!(f64, f64, |x| x, |x| x);
float!(f16, f32, from_half, to_half);
float!(bf16, f32, bf16::to_f32, bf16::from_f32);

macro_rules! integers {
    ($($ty:ty)*) => {
        $(impl Reduced for $ty {
            type Wide = $ty;

            #[inline(always)]
            fn widen(self) -> $ty {
                self
            }

            #[inline(always)]
            fn narrow(wide: $ty) -> $ty {
                wide
            }

            #[inline(always)]
            fn combine(op: ReduceOp, a: $ty, b: $ty) -> $ty {
                match op {
                    ReduceOp::Sum | ReduceOp::Mean => a.wrapping_add(b),
                    ReduceOp::Prod => a.wrapping_mul(b),
                    ReduceOp::Min => a.min(b),
                    ReduceOp::Max => a.max(b),
                }
            }

            #[inline(always)]
            fn divide(sum: $ty, n: usize) -> $ty {
                // Towards zero, as TensorFlow's integer mean. A number of ranks that the type cannot hold divides to zero.
                <$ty>::try_from(n).map_or(0, |n| sum / n)
            }

            #[inline(always)]
            fn reciprocal(_: usize) -> Option<$ty> {
                None
            }
        })*
    };
}

integers!(i8 i16 i32 i64 u8 u16 u32 u64);

/// Elements that are combined at a time: what a level of the tree keeps stays in the nearest cache.
const BLOCK: usize = 512;

/// The vectors of all ranks, in their order.
#[derive(Clone, Copy)]
struct Sources<'s, T> {
    before: &'s [&'s [T]],
    /// There is one more between them: what the destination holds.
    own: bool,
    after: &'s [&'s [T]],
}

fn reduce_as<T: Reduced>(op: ReduceOp, sources: Sources<'_, u8>, out: &mut [u8]) -> Result<()> {
    let out = bytemuck::try_cast_slice_mut::<u8, T>(out).map_err(unaligned)?;
    let (before, after) = (cast::<T>(sources.before)?, cast::<T>(sources.after)?);
    let sources = Sources { before: &before, own: sources.own, after: &after };
    let n = before.len() + usize::from(sources.own) + after.len();
    // Each op is a loop of its own, which the compiler can vectorise.
    macro_rules! blocks {
        ($op:ident, $finish:expr) => {
            blocks(
                sources,
                out,
                #[inline(always)]
                |a, b| T::combine(ReduceOp::$op, a, b),
                #[inline(always)]
                $finish,
            )
        };
    }
    match (op, T::reciprocal(n)) {
        (ReduceOp::Sum, _) => blocks!(Sum, |sum| sum),
        (ReduceOp::Mean, Some(factor)) => blocks!(Sum, |sum| T::combine(ReduceOp::Prod, sum, factor)),
        (ReduceOp::Mean, None) => blocks!(Sum, |sum| T::divide(sum, n)),
        (ReduceOp::Min, _) => blocks!(Min, |least| least),
        (ReduceOp::Max, _) => blocks!(Max, |most| most),
        (ReduceOp::Prod, _) => blocks!(Prod, |product| product),
    }
    Ok(())
}

fn cast<'s, T: Reduced>(sources: &[&'s [u8]]) -> Result<Vec<&'s [T]>> {
    sources.iter().map(|source| bytemuck::try_cast_slice::<u8, T>(source).map_err(unaligned)).collect()
}

#[inline(always)]
fn blocks<T: Reduced>(
    sources: Sources<'_, T>,
    out: &mut [T],
    combine: impl Fn(T::Wide, T::Wide) -> T::Wide + Copy,
    finish: impl Fn(T::Wide) -> T::Wide + Copy,
) {
    let Sources { before, own: has_own, after } = sources;
    match (before, has_own, after) {
        ([lower], true, []) => {
            return pair(
                out,
                lower,
                #[inline(always)]
                |own, lower| finish(combine(lower, own)),
            );
        }
        ([], true, [higher]) => {
            return pair(
                out,
                higher,
                #[inline(always)]
                |own, higher| finish(combine(own, higher)),
            );
        }
        _ => {}
    }
    let n_sources = before.len() + usize::from(has_own) + after.len();
    let mut wide = [T::Wide::default(); BLOCK];
    let mut own = [T::zeroed(); BLOCK];
    for (i, out) in out.chunks_mut(BLOCK).enumerate() {
        let (at, n) = (i * BLOCK, out.len());
        if has_own {
            own[..n].copy_from_slice(out);
        }
        let block = |rank: usize| match rank.checked_sub(before.len()) {
            None => &before[rank][at..at + n],
            Some(0) if has_own => &own[..n],
            Some(behind) => &after[behind - usize::from(has_own)][at..at + n],
        };
        tree(0..n_sources, &block, &mut wide[..n], combine);
        vectorize_256(
            #[inline(always)]
            || out.iter_mut().zip(&wide[..n]).for_each(|(out, wide)| *out = T::narrow(finish(*wide))),
        );
    }
}

/// Two ranks, of which one's vector becomes the result.
#[inline(always)]
fn pair<T: Reduced>(own: &mut [T], other: &[T], combine: impl Fn(T::Wide, T::Wide) -> T::Wide) {
    vectorize_256(
        #[inline(always)]
        || {
            let n = own.len().min(other.len());
            for (own, other) in own[..n].iter_mut().zip(&other[..n]) {
                *own = T::narrow(combine(own.widen(), other.widen()));
            }
        },
    );
}

/// Combines one block of some ranks.
fn tree<'s, T: Reduced>(
    ranks: Range<usize>,
    block: &impl Fn(usize) -> &'s [T],
    out: &mut [T::Wide],
    combine: impl Fn(T::Wide, T::Wide) -> T::Wide + Copy,
) {
    match ranks.len() {
        0 => {}
        1 => out.iter_mut().zip(block(ranks.start)).for_each(|(out, x)| *out = x.widen()),
        2 => {
            let (a, b) = (block(ranks.start), block(ranks.start + 1));
            vectorize_256(
                #[inline(always)]
                || {
                    let pairs = a.iter().zip(b);
                    out.iter_mut().zip(pairs).for_each(|(out, (a, b))| *out = combine(a.widen(), b.widen()));
                },
            );
        }
        many => {
            let middle = ranks.start + many.next_power_of_two() / 2;
            tree(ranks.start..middle, block, out, combine);
            let mut rest = [T::Wide::default(); BLOCK];
            let rest = &mut rest[..out.len()];
            tree(middle..ranks.end, block, rest, combine);
            vectorize_256(
                #[inline(always)]
                || out.iter_mut().zip(rest).for_each(|(out, x)| *out = combine(*out, *x)),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reduced<T: Pod>(dtype: DType, op: ReduceOp, sources: &[Vec<T>]) -> Vec<T> {
        let bytes: Vec<&[u8]> = sources.iter().map(|source| bytemuck::cast_slice(source)).collect();
        let mut out = sources[0].clone();
        reduce(dtype, op, &bytes, bytemuck::cast_slice_mut(&mut out)).unwrap();
        out
    }

    #[test]
    fn vectors_are_combined_element_by_element() {
        let sources = [vec![1.0f32, -2.0, 8.0], vec![3.0, 4.0, 0.5], vec![5.0, 0.0, 0.5]];
        assert_eq!(reduced(DType::F32, ReduceOp::Sum, &sources), [9.0, 2.0, 9.0]);
        assert_eq!(reduced(DType::F32, ReduceOp::Mean, &sources), [3.0, 2.0 / 3.0, 3.0]);
        assert_eq!(reduced(DType::F32, ReduceOp::Min, &sources), [1.0, -2.0, 0.5]);
        assert_eq!(reduced(DType::F32, ReduceOp::Max, &sources), [5.0, 4.0, 8.0]);
        assert_eq!(reduced(DType::F32, ReduceOp::Prod, &sources), [15.0, 0.0, 2.0]);
        let bytes = [vec![200u8, 1], vec![100, 2]];
        assert_eq!(reduced(DType::U8, ReduceOp::Sum, &bytes), [44, 3]);
        assert_eq!(reduced(DType::I64, ReduceOp::Mean, &[vec![-7i64], vec![0]]), [-3]);
        let halves = [vec![f16::from_f32(2048.0)], vec![f16::from_f32(1.0)], vec![f16::from_f32(1.0)]];
        assert_eq!(reduced(DType::F16, ReduceOp::Sum, &halves), [f16::from_f32(2050.0)], "rounded once");
    }

    #[test]
    fn the_order_is_a_tree_over_the_ranks() {
        let x: Vec<Vec<f32>> = (0..7).map(|i| vec![(i as f32 + 0.1).exp(); 3 * BLOCK + 7]).collect();
        let at = |i: usize| x[i][0];
        let sum = ((at(0) + at(1)) + (at(2) + at(3))) + ((at(4) + at(5)) + at(6));
        assert_eq!(reduced(DType::F32, ReduceOp::Sum, &x), vec![sum; 3 * BLOCK + 7]);
        // Two ranks that have each summed two parts get what four get.
        let two = [vec![at(0) + at(1)], vec![at(2) + at(3)]];
        let four: Vec<Vec<f32>> = (0..4).map(|i| vec![at(i)]).collect();
        assert_eq!(reduced(DType::F32, ReduceOp::Sum, &two), reduced(DType::F32, ReduceOp::Sum, &four));
    }

    #[test]
    fn a_vector_that_becomes_the_result_counts_where_its_rank_is() {
        let x: Vec<Vec<f32>> =
            (0..6).map(|i| (0..BLOCK + 9).map(|j| ((i * 77 + j) as f32).sin() * 1e3).collect()).collect();
        let bytes: Vec<&[u8]> = x.iter().map(|x| bytemuck::cast_slice(x)).collect();
        for n_ranks in 1..=6 {
            for own in 0..n_ranks {
                for op in ReduceOp::ALL {
                    let mut found = x[own].clone();
                    let (before, after) = (&bytes[..own], &bytes[own + 1..n_ranks]);
                    reduce_in_place(DType::F32, op, before, bytemuck::cast_slice_mut(&mut found), after).unwrap();
                    assert_eq!(found, reduced(DType::F32, op, &x[..n_ranks]), "{op:?}, rank {own} of {n_ranks}");
                }
            }
        }
        let mut own = [0; 8];
        assert!(reduce_in_place(DType::F32, ReduceOp::Sum, &[&[0; 4]], &mut own, &[]).is_err());
    }

    #[test]
    fn a_sum_that_was_made_in_steps_is_divided_as_a_mean_is() {
        let x = [vec![1.0f32, 5.0], vec![2.0, -7.0], vec![4.0, 0.5]];
        let mut sum = reduced(DType::F32, ReduceOp::Sum, &x);
        divide(DType::F32, bytemuck::cast_slice_mut(&mut sum), 3).unwrap();
        assert_eq!(sum, reduced(DType::F32, ReduceOp::Mean, &x));
        let mut sum = [-7i32, 300];
        divide(DType::I32, bytemuck::cast_slice_mut(&mut sum), 2).unwrap();
        assert_eq!(sum, [-3, 150]);
    }

    #[test]
    fn not_a_number_is_not_lost() {
        for sources in [[vec![f32::NAN], vec![1.0]], [vec![1.0], vec![f32::NAN]]] {
            for op in ReduceOp::ALL {
                assert!(reduced(DType::F32, op, &sources)[0].is_nan(), "{op:?}");
            }
        }
    }

    #[test]
    fn what_cannot_be_reduced_is_refused() {
        let mut out = [0u8; 8];
        let error = reduce(DType::Bool, ReduceOp::Sum, &[&[0; 8]], &mut out).unwrap_err();
        assert!(error.message().contains("bool cannot be reduced"), "{error}");
        assert!(reduce(DType::F32, ReduceOp::Sum, &[&[0; 4]], &mut out).is_err());
        assert!(reduce(DType::F32, ReduceOp::Sum, &[], &mut out).is_err());
        assert_eq!(ReduceOp::parse("max").unwrap(), ReduceOp::Max);
        assert!(ReduceOp::parse("median").unwrap_err().message().contains("sum, mean, min, max, prod"));
    }
}
