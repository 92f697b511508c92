//! Strided views: which elements of a tensor, in which order. Transpositions, slices, reversals, broadcasts and tiles are
//! all one view read into a new tensor; the gradient of a slice is one written into zeros.

use kolo_device::cpu::stream::{fence, is_streamed};
use kolo_device::cpu::{IntraPool, looking_by, pool, transpose_words};
use smallvec::SmallVec;

use super::elements::{Item, copy_units, is_streamed_by_units};

/// Elements of a buffer in row-major order of `dims`: element `i` of dimension `d` lies `i · steps[d]` further.
/// Dimensions that can be walked as one are merged, so that the innermost run is as long as possible.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct View {
    /// Where element 0 lies.
    start: isize,
    /// Sizes and steps, outermost first. Never empty; sizes of 1 only if there is nothing else.
    dims: SmallVec<[(usize, isize); 4]>,
}

/// The steps of a row-major tensor.
pub(crate) fn strides(dims: &[usize]) -> SmallVec<[isize; 4]> {
    let mut steps = SmallVec::from_elem(0, dims.len());
    let mut step = 1isize;
    for (i, &dim) in dims.iter().enumerate().rev() {
        steps[i] = step;
        // Shapes with too many elements do not exist, not even beside a zero, so this cannot overflow.
        step *= dim.max(1) as isize;
    }
    steps
}

impl View {
    /// A view of these sizes and steps, outermost first. Every element must lie inside the buffer it is used with.
    pub(crate) fn new(start: usize, sizes_and_steps: impl IntoIterator<Item = (usize, isize)>) -> View {
        let all: SmallVec<[(usize, isize); 8]> = sizes_and_steps.into_iter().collect();
        let mut dims: SmallVec<[(usize, isize); 4]> = SmallVec::new();
        for &(n, step) in all.iter().rev().filter(|(n, _)| *n != 1) {
            match dims.last_mut() {
                Some((inner, inner_step)) if step == *inner_step * *inner as isize => *inner *= n,
                _ => dims.push((n, step)),
            }
        }
        if dims.is_empty() {
            dims.push((1, 1));
        }
        dims.reverse();
        View { start: start as isize, dims }
    }

    /// Where element 0 lies.
    pub(crate) fn start(&self) -> usize {
        self.start as usize
    }

    /// Sizes and steps, outermost first.
    pub(crate) fn dims(&self) -> &[(usize, isize)] {
        &self.dims
    }

    /// Whether the view is one run of neighbours, and where it begins.
    pub(crate) fn contiguous(&self) -> Option<usize> {
        match self.dims.as_slice() {
            [(1, _)] | [(_, 1)] => Some(self.start as usize),
            _ => None,
        }
    }

    /// Copies the elements that the view shows of `input` to `out`, in order. `out` must be as long as the view.
    pub(crate) fn read<E: Item>(&self, pool: &IntraPool, out: &mut [E], input: &[E]) {
        self.read_by(pool, out, input, read_transposed);
    }

    /// The same for elements of four bytes, which are turned in registers.
    pub(crate) fn read_words(&self, pool: &IntraPool, out: &mut [u32], input: &[u32]) {
        let past_caches = is_streamed(size_of_val(out));
        self.read_by(pool, out, input, |mut out, input, run, step, walk| {
            while !out.is_empty() {
                let rows = walk.rows_left().min(out.len() / run);
                let (now, later) = out.split_at_mut(rows * run);
                transpose_words(&input[walk.at as usize..], step, now, run, past_caches);
                walk.advance(rows);
                out = later;
            }
        });
    }

    fn read_by<E: Item>(
        &self,
        pool: &IntraPool,
        out: &mut [E],
        input: &[E],
        transpose: impl Fn(&mut [E], &[E], usize, usize, &mut Walk<'_>) + Sync,
    ) {
        let (run, step) = self.run();
        if out.is_empty() || run == 0 {
            return;
        }
        let outer = self.outer();
        let transposed = step > 1 && outer.last().is_some_and(|&(_, step)| step == 1);
        if transposed {
            // Whole tiles, or most of each cache line would be fetched for nothing.
            let n_bytes = size_of_val(out);
            let stretch = if is_streamed(n_bytes) { pool.stretch(n_bytes) / size_of::<E>() } else { 0 };
            let rows = pool::grain(1.0).max(stretch).div_ceil(run).max(1).next_multiple_of(WIDE);
            return pool.for_each_chunk(out, rows * run, |i, out| {
                transpose(out, input, run, step as usize, &mut Walk::new(self.start, outer, i * rows));
            });
        }
        if step == 1 && is_streamed(size_of_val(out)) {
            let (n_bytes, run_bytes) = (size_of_val(out), run * size_of::<E>());
            if let Some((&(n, 0), inner)) = outer.split_first()
                && n <= MOST_REPEATS
                && n_bytes / n >= LEAST_REPEATED
                && run_bytes <= MOST_REPEATED_RUN
                && is_streamed_by_units(n_bytes, run_bytes)
            {
                return self.read_repeated(pool, out, input, n, inner);
            }
            return copy_units(pool, out, input, run, |row| {
                let mut walk = Walk::new(self.start, outer, row);
                std::iter::repeat_with(move || {
                    let at = walk.at as usize;
                    walk.advance(1);
                    at
                })
            });
        }
        // About one memory access each; strided ones miss the cache.
        let rows = E::fill_grain(out.len(), if step == 1 { 0.2 } else { 1.0 }).div_ceil(run).max(1);
        E::fill_chunks(pool, out, rows * run, &|i, out| {
            let mut walk = Walk::new(self.start, outer, i * rows);
            for out in out.chunks_mut(run) {
                let at = walk.at as usize;
                match step {
                    1 => out.clone_from_slice(&input[at..at + run]),
                    0 => out.fill(input[at].clone()),
                    _ => {
                        let mut at = walk.at;
                        for y in out {
                            *y = input[at as usize].clone();
                            at += step;
                        }
                    }
                }
                walk.advance(1);
            }
        });
    }

    /// Copies what the dimensions `inner` and the run within them show to each of `n` equal parts of `out`, past the caches: every run is
    /// fetched once, and stored `n` times.
    fn read_repeated<E: Item>(&self, pool: &IntraPool, out: &mut [E], input: &[E], n: usize, inner: &[(usize, isize)]) {
        let (run, _) = self.run();
        let per_task = (pool.stretch(size_of_val(out)) / (n * run * size_of::<E>())).max(1);
        pool.for_each_chunk_across(out, n, per_task * run, |task, parts| {
            let mut walk = Walk::new(self.start, inner, task * per_task);
            for first in (0..parts[0].len()).step_by(run) {
                let from = &input[walk.at as usize..][..run];
                parts.iter_mut().for_each(|part| E::stream(&mut part[first..first + run], from));
                walk.advance(1);
            }
            fence();
        });
    }

    /// Copies `input`, in order, to the elements of `out` that the view shows.
    pub(crate) fn write<E: Clone>(&self, out: &mut [E], input: &[E]) {
        let (run, step) = self.run();
        if input.is_empty() || run == 0 {
            return;
        }
        let mut walk = Walk::new(self.start, self.outer(), 0);
        for input in looking_by(run * size_of::<E>(), input.chunks(run)) {
            if step == 1 {
                let at = walk.at as usize;
                out[at..at + run].clone_from_slice(input);
            } else {
                let mut at = walk.at;
                for x in input {
                    out[at as usize] = x.clone();
                    at += step;
                }
            }
            walk.advance(1);
        }
    }

    fn run(&self) -> (usize, isize) {
        self.dims[self.dims.len() - 1]
    }

    fn outer(&self) -> &[(usize, isize)] {
        &self.dims[..self.dims.len() - 1]
    }
}

/// Parts of at least so many bytes are not found in a cache when they are wanted again; runs of at most so many are; and so many parts
/// can be written at the same time.
const LEAST_REPEATED: usize = 1 << 20;
const MOST_REPEATED_RUN: usize = 16 << 10;
const MOST_REPEATS: usize = 8;
/// Rows and columns that are read before any are written, where there are as many.
const WIDE: usize = 64;
/// A square of this many elements a side fits the first cache, in and out.
const TILE: usize = 16;

/// Rows `walk…` of a view whose neighbours in the input are neighbouring rows here: tile by tile, so that every cache
/// line that is fetched is used up.
fn read_transposed<E: Item>(mut out: &mut [E], input: &[E], run: usize, step: usize, walk: &mut Walk<'_>) {
    while !out.is_empty() {
        let rows = walk.rows_left().min(out.len() / run);
        let rows = if rows >= WIDE { WIDE } else { rows.min(TILE) };
        let (now, later) = out.split_at_mut(rows * run);
        if (rows == WIDE || rows == TILE) && const { size_of::<E>() <= 8 && !std::mem::needs_drop::<E>() } {
            match rows {
                WIDE => read_tiles::<E, WIDE>(now, input, run, step, walk.at as usize),
                _ => read_tiles::<E, TILE>(now, input, run, step, walk.at as usize),
            }
            walk.advance(rows);
            out = later;
            continue;
        }
        for column in (0..run).step_by(TILE) {
            let columns = TILE.min(run - column);
            for row in 0..rows {
                let at = walk.at as usize + row + column * step;
                let out = &mut now[row * run + column..][..columns];
                for (y, x) in out.iter_mut().zip(input[at..].iter().step_by(step)) {
                    *y = x.clone();
                }
            }
        }
        walk.advance(rows);
        out = later;
    }
}

/// `ROWS` rows, by way of a buffer: each line of the input is read once, and each line of the output written once, even
/// where many of them share a place in the cache.
fn read_tiles<E: Item, const ROWS: usize>(out: &mut [E], input: &[E], run: usize, step: usize, start: usize) {
    let mut buffer: [[E; WIDE]; ROWS] = std::array::from_fn(|_| std::array::from_fn(|_| E::default()));
    for column in (0..run).step_by(WIDE) {
        let columns = WIDE.min(run - column);
        for i in 0..columns {
            if let Some(line) = input[start + (column + i) * step..].first_chunk::<ROWS>() {
                buffer.iter_mut().zip(line).for_each(|(row, x)| row[i] = x.clone());
            }
        }
        for (row, line) in buffer.iter().enumerate() {
            out[row * run + column..][..columns].clone_from_slice(&line[..columns]);
        }
    }
}

/// A position in the outer dimensions of a view, kept as an odometer: dividing for every run would cost more than short
/// runs do.
struct Walk<'a> {
    at: isize,
    outer: &'a [(usize, isize)],
    index: SmallVec<[usize; 4]>,
}

impl<'a> Walk<'a> {
    fn new(start: isize, outer: &'a [(usize, isize)], mut row: usize) -> Self {
        let mut index = SmallVec::from_elem(0, outer.len());
        let mut at = start;
        for (i, &(n, step)) in outer.iter().enumerate().rev() {
            index[i] = row % n;
            at += index[i] as isize * step;
            row /= n;
        }
        Walk { at, outer, index }
    }

    /// Rows until the innermost outer dimension wraps.
    fn rows_left(&self) -> usize {
        match (self.outer.last(), self.index.last()) {
            (Some((n, _)), Some(index)) => n - index,
            _ => 1,
        }
    }

    /// Moves on by `rows`, no more than [`Walk::rows_left`].
    fn advance(&mut self, rows: usize) {
        let mut rows = rows;
        for (index, &(n, step)) in self.index.iter_mut().zip(self.outer).rev() {
            *index += rows;
            self.at += rows as isize * step;
            if *index < n {
                return;
            }
            self.at -= n as isize * step;
            *index = 0;
            rows = 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads element by element, by the definition.
    fn plain(start: usize, dims: &[(usize, isize)], input: &[[u8; 4]]) -> Vec<[u8; 4]> {
        let n: usize = dims.iter().map(|(n, _)| n).product();
        (0..n)
            .map(|mut i| {
                let mut at = start as isize;
                for &(n, step) in dims.iter().rev() {
                    at += (i % n) as isize * step;
                    i /= n;
                }
                input[at as usize]
            })
            .collect()
    }

    #[test]
    fn every_kind_of_walk_agrees_with_the_definition() {
        let input: Vec<[u8; 4]> = (0..40_000u32).map(u32::to_le_bytes).collect();
        let pool = IntraPool::new(2);
        let cases: &[(usize, &[(usize, isize)])] = &[
            (0, &[(200, 200), (200, 1)]),
            (0, &[(200, 1), (200, 200)]),
            (5, &[(3, 1000), (37, 1), (19, 37)]),
            (5, &[(3, 1000), (5, 20), (37, 1), (2, 400), (19, 37)]),
            (39_999, &[(39_999, -1)]),
            (0, &[(7, 0), (11, 3)]),
            (0, &[(11, 3), (7, 0)]),
            (9, &[]),
            (9, &[(1, 5), (1, 7)]),
            (0, &[(0, 1), (3, 1)]),
            (0, &[(3, 1), (0, 1)]),
        ];
        for (start, dims) in cases {
            let expected = plain(*start, dims, &input);
            let mut out = vec![[0; 4]; expected.len()];
            View::new(*start, dims.iter().copied()).read(&pool, &mut out, &input);
            assert!(out == expected, "{start} {dims:?}");
            let words: Vec<u32> = input.iter().map(|x| u32::from_le_bytes(*x)).collect();
            let mut out = vec![0; expected.len()];
            View::new(*start, dims.iter().copied()).read_words(&pool, &mut out, &words);
            assert!(out.iter().zip(&expected).all(|(x, y)| x.to_le_bytes() == *y), "{start} {dims:?} as words");
        }
    }

    #[test]
    fn what_is_repeated_is_stored_in_every_part() {
        let input: Vec<u32> = (0..6_000).collect();
        // The last has more than one task can do.
        let inner = [vec![], vec![(7, 1), (9, 300)], vec![(3, 5)], vec![(40, 70), (23, 0)]];
        let cases = [2, 5, 1, 3].into_iter().zip(inner).zip([50, 17, 1, 512]);
        for ((n, inner), run) in cases {
            let dims = [&[(n, 0)], &inner[..], &[(run, 1)]].concat();
            let view = View { start: 11, dims: SmallVec::from_vec(dims) };
            let mut expected = vec![0; n * inner.iter().map(|(n, _)| n).product::<usize>() * run];
            let mut out = expected.clone();
            let mut walk = Walk::new(11, view.outer(), 0);
            for part in expected.chunks_mut(run) {
                part.copy_from_slice(&input[walk.at as usize..][..run]);
                walk.advance(1);
            }
            view.read_repeated(&IntraPool::new(2), &mut out, &input, n, &inner);
            assert!(out == expected, "{n} {inner:?} {run}");
        }
    }

    #[test]
    fn what_is_written_through_a_view_is_read_through_it() {
        let view = View::new(19, [(3, -6), (2, 1), (2, 3)]);
        let input: Vec<[u8; 1]> = (1..=12u8).map(|i| [i]).collect();
        let mut buffer = vec![[0; 1]; 40];
        view.write(&mut buffer, &input);
        let mut back = vec![[0; 1]; 12];
        view.read(&IntraPool::new(1), &mut back, &buffer);
        assert_eq!(back, input);
        assert_eq!(buffer.iter().filter(|x| **x != [0]).count(), 12);
    }

    #[test]
    fn whole_ranges_are_recognised() {
        assert_eq!(View::new(6, [(2, 3), (3, 1)]).contiguous(), Some(6));
        assert_eq!(View::new(6, [(2, 4), (3, 1)]).contiguous(), None);
    }
}
