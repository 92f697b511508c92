//! The loops of all reductions.
//!
//! The input is seen as a nest of kept and reduced dimensions, neighbours of one kind merged. What remains is one of two
//! cases, by the kind of the innermost dimension:
//!
//! ```text
//! reduced   each output is made of whole runs of the input: lanes side by side, runs joined
//! kept      each output row is made of whole rows of the input: added up column by column
//! ```
//!
//! Long reductions are cut into parts of a size that depends on the shape alone, and sums grow as trees: errors stay
//! small and results are the same bit for bit, however many threads there are.

use std::ops::Range;

use kolo_core::Element;
use kolo_device::cpu::stream::is_streamed;
use kolo_device::cpu::{IntraPool, pool};
use smallvec::SmallVec;

use crate::math::elementwise::lanes;

/// How values of type `T` are brought together.
pub(crate) trait Reducer<T: Element>: Copy + Sync {
    /// What is carried along.
    type Acc: Copy + Send + Sync;
    /// Whether the reduction of a single value is that value.
    const KEEPS_ONE: bool = true;
    /// The value of nothing.
    const START: Self::Acc;
    /// Takes one value in.
    fn step(acc: Self::Acc, x: T) -> Self::Acc;
    /// Brings two parts together.
    fn join(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    /// The result over `n` values.
    fn finish(acc: Self::Acc, n: usize) -> T;
    /// Whether this value decides the result, whatever the others are. It need not be heeded by the next two, which
    /// makes them quicker.
    #[inline(always)]
    fn decides(_x: T) -> bool {
        false
    }
    /// As `step`, for one of many accumulators side by side.
    #[inline(always)]
    fn lane_step(acc: Self::Acc, x: T) -> Self::Acc {
        Self::step(acc, x)
    }
    /// As `join`, for two of them.
    #[inline(always)]
    fn lane_join(a: Self::Acc, b: Self::Acc) -> Self::Acc {
        Self::join(a, b)
    }
}

/// Accumulators side by side in a run: as many as two of the widest vectors hold.
const LANES: usize = 32;
/// A run up to this length is reduced by one loop; longer ones are halved first.
const LEAF: usize = 2048;
/// Elements that one part of a cut reduction reads, about.
const PART: usize = 32 * 1024;
/// Columns that are added up together.
const COLUMNS: usize = 256;
/// Rows that are added up before their sum joins the rest.
const ROWS: usize = 128;

/// Elements that one task reads of `input`; it is made of whole parts, so that results do not depend on it.
fn task_len<T>(pool: &IntraPool, input: &[T]) -> usize {
    let n_bytes = size_of_val(input);
    if is_streamed(n_bytes) { pool.stretch(n_bytes) / size_of::<T>().max(1) } else { pool::grain(0.2) }
}

/// Dimensions with their steps in the input, outermost first.
#[derive(Default)]
struct Steps(SmallVec<[(usize, usize); 4]>);

impl Steps {
    fn count(&self) -> usize {
        self.0.iter().map(|&(n, _)| n).product()
    }

    /// Where element `i` of these dimensions lies.
    #[inline]
    fn offset(&self, mut i: usize) -> usize {
        if let [(_, step)] = self.0[..] {
            return i * step;
        }
        let mut offset = 0;
        for &(n, step) in self.0.iter().rev() {
            offset += i % n * step;
            i /= n;
        }
        offset
    }
}

/// A reduction of an input of one shape over some of its dimensions. No size is zero.
pub(crate) struct Reduction {
    /// Kept dimensions, without the run.
    kept: Steps,
    /// Reduced dimensions, without the run.
    reduced: Steps,
    /// The innermost dimension, side by side in memory.
    run: usize,
    run_is_reduced: bool,
}

impl Reduction {
    /// Of an input with these sizes, none of them zero, over the dimensions for which `is_reduced` holds.
    pub(crate) fn new(dims: &[usize], is_reduced: &[bool]) -> Reduction {
        let mut merged: SmallVec<[(usize, usize, bool); 4]> = SmallVec::new();
        let mut step = 1;
        for (&n, &reduced) in dims.iter().zip(is_reduced).rev() {
            match merged.last_mut() {
                _ if n == 1 => {}
                Some((m, _, kind)) if *kind == reduced => *m *= n,
                _ => merged.push((n, step, reduced)),
            }
            step *= n;
        }
        let (run, run_is_reduced) = match merged.first() {
            Some(&(n, _, reduced)) => (n, reduced),
            None => (1, false),
        };
        let of_kind = |wanted: bool| {
            Steps(merged.iter().skip(1).rev().filter(|dim| dim.2 == wanted).map(|&(n, step, _)| (n, step)).collect())
        };
        Reduction { kept: of_kind(false), reduced: of_kind(true), run, run_is_reduced }
    }

    /// Input elements per output element.
    pub(crate) fn n_reduced(&self) -> usize {
        self.reduced.count() * if self.run_is_reduced { self.run } else { 1 }
    }

    /// Reduces `input` into `output`.
    pub(crate) fn run<T: Element, R: Reducer<T>>(&self, pool: &IntraPool, input: &[T], output: &mut [T]) {
        self.run_by(pool, input, output, &Loops::of::<R>());
    }

    fn run_by<T: Element, A: Copy + Send + Sync>(
        &self,
        pool: &IntraPool,
        input: &[T],
        output: &mut [T],
        loops: &Loops<T, A>,
    ) {
        let n = self.n_reduced();
        let n_parts = self.n_parts();
        if n_parts == 1 {
            return self.parts(pool, input, 1, output, loops, &|accs, out| (loops.finish)(accs, n, out));
        }
        let mut partial = vec![loops.start; n_parts * output.len()];
        self.parts(pool, input, n_parts, &mut partial, loops, &|accs, out| out.copy_from_slice(accs));
        // Halve the number of parts until one is left: a tree again.
        let (width, mut left) = (output.len(), n_parts);
        while left > 1 {
            let half = left.div_ceil(2);
            let (low, high) = partial.split_at_mut(half * width);
            (loops.join_each)(low, &high[..(left - half) * width]);
            left = half;
        }
        (loops.finish)(&partial[..width], n, output);
    }

    /// Into how many parts the reduced dimensions are cut. Depends on the shape alone.
    fn n_parts(&self) -> usize {
        let rows = self.reduced.count();
        if !self.run_is_reduced {
            // Parts of at least ROWS rows, so that partial sums stay small beside the input.
            return rows.div_ceil((PART / self.run.min(PART)).max(ROWS));
        }
        if rows == 1 { self.run.div_ceil(PART) } else { rows.div_ceil((PART / self.run.min(PART)).max(1)) }
    }

    /// For every part and every output, what `emit` makes of the values that belong to them.
    fn parts<T: Element, A: Copy + Sync, U: Send>(
        &self,
        pool: &IntraPool,
        input: &[T],
        n_parts: usize,
        out: &mut [U],
        loops: &Loops<T, A>,
        emit: &(dyn Fn(&[A], &mut [U]) + Sync),
    ) {
        let rows = self.reduced.count();
        if self.run_is_reduced {
            let n_kept = self.kept.count();
            let (rows_per_part, run_per_part) =
                if rows == 1 { (1, self.run.div_ceil(n_parts)) } else { (rows.div_ceil(n_parts), self.run) };
            let per_task = (task_len(pool, input) / (rows_per_part * run_per_part).max(1)).max(1);
            let side_by_side = match (&self.kept.0[..], rows, n_parts, self.run) {
                (&[(_, step)], 1, 1, ..=LEAF) => Some(step),
                _ => None,
            };
            let of_output = |at: usize| {
                // A division would take a good part of the time of a short run.
                let (part, kept) = if n_parts == 1 { (0, at) } else { (at / n_kept, at % n_kept) };
                let base = self.kept.offset(kept);
                if rows == 1 {
                    let range = part * run_per_part..((part + 1) * run_per_part).min(self.run);
                    return loops.run(&input[base..base + self.run][range]);
                }
                let rows = part * rows_per_part..((part + 1) * rows_per_part).min(rows);
                loops.join_runs(rows, &|row| {
                    let at = base + self.reduced.offset(row);
                    loops.run(&input[at..at + self.run])
                })
            };
            pool.for_each_chunk(out, per_task, |task, out| {
                let mut accs = [loops.start; 64];
                for (i, out) in out.chunks_mut(accs.len()).enumerate() {
                    let first = task * per_task + i * accs.len();
                    let accs = &mut accs[..out.len()];
                    match side_by_side {
                        Some(step) => (loops.leaves)(&input[first * step..], self.run, step, accs),
                        None => accs.iter_mut().zip(first..).for_each(|(acc, at)| *acc = of_output(at)),
                    }
                    emit(accs, out);
                }
            });
            return;
        }
        let rows_per_part = rows.div_ceil(n_parts);
        let n_kept = self.kept.count();
        let per_task = (pool::grain(0.2) / rows_per_part.max(1)).max(16);
        pool.for_each_chunk(out, per_task, |task, out| {
            let (mut at, mut rest) = (task * per_task, out);
            while !rest.is_empty() {
                // A task may begin and end in the middle of a row of outputs.
                let (row, column) = (at / self.run, at % self.run);
                let (now, later) = rest.split_at_mut(rest.len().min(self.run - column).min(COLUMNS));
                let (part, kept) = (row / n_kept, row % n_kept);
                let first = self.kept.offset(kept) + column;
                let rows = part * rows_per_part..((part + 1) * rows_per_part).min(rows);
                let mut total = [loops.start; COLUMNS];
                let total = &mut total[..now.len()];
                (loops.columns)(&self.reduced, &input[first..], rows, total);
                emit(total, now);
                at += now.len();
                rest = later;
            }
        });
    }
}

/// The loops of one reduction. Everything around them is compiled once for each pair of types, not for each op.
struct Loops<T, A> {
    /// The value of nothing.
    start: A,
    /// See [`reduce_leaves`].
    leaves: fn(&[T], usize, usize, &mut [A]),
    /// See [`reduce_columns`].
    columns: fn(&Steps, &[T], Range<usize>, &mut [A]),
    /// See [`Reducer::join`].
    join: fn(A, A) -> A,
    /// Joins each value with another.
    join_each: fn(&mut [A], &[A]),
    /// The results of so many values each.
    finish: fn(&[A], usize, &mut [T]),
}

impl<T: Element, A: Copy> Loops<T, A> {
    fn of<R: Reducer<T, Acc = A>>() -> Loops<T, A> {
        Loops {
            start: R::START,
            leaves: reduce_leaves::<T, R>,
            columns: reduce_columns::<T, R>,
            join: R::join,
            join_each: |to, from| to.iter_mut().zip(from).for_each(|(a, &b)| *a = R::join(*a, b)),
            finish: |accs, n, out| out.iter_mut().zip(accs).for_each(|(y, &acc)| *y = R::finish(acc, n)),
        }
    }

    /// Reduces values that lie side by side.
    fn run(&self, values: &[T]) -> A {
        if values.len() > LEAF {
            let middle = (values.len() / 2).next_multiple_of(LEAF);
            let (low, high) = values.split_at(middle);
            return (self.join)(self.run(low), self.run(high));
        }
        let mut acc = [self.start];
        (self.leaves)(values, values.len(), 0, &mut acc);
        acc[0]
    }

    /// Joins what `of` gives for each of `rows`, as a tree.
    fn join_runs(&self, rows: Range<usize>, of: &dyn Fn(usize) -> A) -> A {
        if rows.len() <= 16 {
            return rows.fold(self.start, |acc, row| (self.join)(acc, of(row)));
        }
        let middle = rows.start + rows.len() / 2;
        let low = self.join_runs(rows.start..middle, of);
        (self.join)(low, self.join_runs(middle..rows.end, of))
    }
}

/// Reduces at most [`COLUMNS`] columns, one for each of `total`, over these rows, which lie where `steps` says.
fn reduce_columns<T: Element, R: Reducer<T>>(steps: &Steps, input: &[T], rows: Range<usize>, total: &mut [R::Acc]) {
    let n = total.len();
    lanes::<T, _>(
        #[inline(always)]
        || {
            let mut row = rows.start;
            while row < rows.end {
                let end = rows.end.min(row + ROWS);
                let mut block = [R::START; COLUMNS];
                let block = &mut block[..n];
                for row in row..end {
                    let at = steps.offset(row);
                    for (acc, &x) in block.iter_mut().zip(&input[at..at + n]) {
                        *acc = R::step(*acc, x);
                    }
                }
                for (a, &b) in total.iter_mut().zip(block.iter()) {
                    *a = R::join(*a, b);
                }
                row = end;
            }
        },
    );
}

/// Reduces runs of at most [`LEAF`] values, which begin `step` apart, one for each of `accs`. All of them in one call:
/// for short runs, asking for the vectors of this processor takes longer than the sums.
fn reduce_leaves<T: Element, R: Reducer<T>>(values: &[T], run: usize, step: usize, accs: &mut [R::Acc]) {
    lanes::<T, _>(
        #[inline(always)]
        || {
            for (i, acc) in accs.iter_mut().enumerate() {
                *acc = reduce_leaf::<T, R>(&values[i * step..i * step + run]);
            }
        },
    );
}

#[inline(always)]
fn reduce_leaf<T: Element, R: Reducer<T>>(values: &[T]) -> R::Acc {
    if values.len() < LANES {
        return values.iter().fold(R::START, |acc, &x| R::step(acc, x));
    }
    let mut lanes = [R::START; LANES];
    let (blocks, rest) = values.as_chunks::<LANES>();
    for block in blocks {
        lanes = std::array::from_fn(|i| R::lane_step(lanes[i], block[i]));
    }
    if !rest.is_empty() {
        // Apart: lanes that are walked up to a length unknown to the compiler do not stay in registers.
        let mut last = [R::START; LANES];
        last.iter_mut().zip(rest).for_each(|(acc, &x)| *acc = R::lane_step(*acc, x));
        lanes = std::array::from_fn(|i| R::lane_join(lanes[i], last[i]));
    }
    halve::<_, 16>(&mut lanes, R::lane_join);
    halve::<_, 8>(&mut lanes, R::lane_join);
    halve::<_, 4>(&mut lanes, R::lane_join);
    halve::<_, 2>(&mut lanes, R::lane_join);
    halve::<_, 1>(&mut lanes, R::lane_join);
    match values.iter().fold(false, |any, &x| any | R::decides(x)) {
        true => values.iter().fold(R::START, |acc, &x| R::step(acc, x)),
        false => lanes[0],
    }
}

/// Joins lanes `N` apart. The number is known when this is compiled, so that lanes stay in registers.
#[inline(always)]
fn halve<A: Copy, const N: usize>(lanes: &mut [A; LANES], join: impl Fn(A, A) -> A) {
    for i in 0..N {
        lanes[i] = join(lanes[i], lanes[i + N]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy)]
    struct Count;
    impl Reducer<f32> for Count {
        type Acc = f32;
        const START: f32 = 0.0;
        fn step(acc: f32, x: f32) -> f32 {
            acc + x
        }
        fn join(a: f32, b: f32) -> f32 {
            a + b
        }
        fn finish(acc: f32, _: usize) -> f32 {
            acc
        }
    }

    fn check(dims: &[usize], is_reduced: &[bool]) {
        let n: usize = dims.iter().product();
        let input: Vec<f32> = (0..n).map(|i| (i * 7 % 13) as f32).collect();
        let kept: Vec<usize> = dims.iter().zip(is_reduced).map(|(&n, &r)| if r { 1 } else { n }).collect();
        let n_out: usize = kept.iter().product();
        let mut expected = vec![0.0; n_out];
        for (i, x) in input.iter().enumerate() {
            let (mut rest, mut at, mut step) = (i, 0, 1);
            for d in (0..dims.len()).rev() {
                at += if is_reduced[d] { 0 } else { rest % dims[d] * step };
                rest /= dims[d];
                step *= kept[d];
            }
            expected[at] += x;
        }
        let reduction = Reduction::new(dims, is_reduced);
        let results: Vec<Vec<f32>> = [1, 3]
            .iter()
            .map(|&n_threads| {
                let mut found = vec![-1.0; n_out];
                reduction.run::<f32, Count>(&IntraPool::new(n_threads), &input, &mut found);
                found
            })
            .collect();
        // Whole numbers, small enough for every sum to be exact.
        assert_eq!(results[0], expected, "{dims:?} {is_reduced:?}");
        assert_eq!(results[0], results[1], "{dims:?} {is_reduced:?}");
    }

    #[test]
    fn every_nest_of_kept_and_reduced_dimensions_is_walked() {
        for mask in 0..16 {
            let is_reduced: Vec<bool> = (0..4).map(|d| mask >> d & 1 == 1).collect();
            check(&[3, 5, 2, 7], &is_reduced);
            check(&[1, 33, 1, 70], &is_reduced);
            check(&[2, 1, 3000, 1], &is_reduced);
        }
        check(&[], &[]);
    }

    #[test]
    fn long_reductions_are_cut_without_gaps() {
        check(&[100_003], &[true]);
        check(&[2, 70_001], &[false, true]);
        check(&[50_001, 3], &[true, false]);
        check(&[300, 700], &[true, false]);
        check(&[40, 3, 1100], &[true, false, true]);
        check(&[700, 2, 301], &[true, true, false]);
        check(&[3, 700, 301], &[false, true, false]);
    }

    #[test]
    fn many_small_numbers_do_not_get_lost() {
        let input = vec![0.1f32; 10_000_000];
        let mut found = [0.0];
        Reduction::new(&[input.len()], &[true]).run::<f32, Count>(&IntraPool::new(1), &input, &mut found);
        assert!((found[0] - 1e6).abs() < 1.0, "{}", found[0]);
    }
}
