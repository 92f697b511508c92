//! How rows are dealt out to tasks, and work that fills two outputs at once, a row of each.

use kolo_device::cpu::{IntraPool, pool};
use parking_lot::Mutex;

/// How many rows of `length` elements are worth a task when an element costs about `ns`.
pub fn rows_per_task(ns: f64, length: usize) -> usize {
    (pool::grain(ns) / length.max(1)).max(1)
}

/// The same for [`IntraPool::fill_chunks`] into a result of `n` elements.
pub fn rows_per_fill<T>(n: usize, ns: f64, length: usize) -> usize {
    (pool::fill_grain::<T>(n, ns) / length.max(1)).max(1)
}

/// The length of pieces that fill a run of `run` elements, about `most` long; the run itself if it is no longer or nothing fits.
pub fn piece_of_run(run: usize, most: usize) -> usize {
    if run <= most {
        return run;
    }
    // Whole vectors, or their ends would cost more than is gained.
    let lengths = (most / 4..=most).rev().filter(|length| *length > 0 && length.is_multiple_of(16));
    lengths.into_iter().find(|length| run.is_multiple_of(*length)).unwrap_or(run)
}

/// A part of the first output and the same rows of the second.
type Part<'a, A, B> = Mutex<Option<(&'a mut [A], &'a mut [B])>>;

/// Cuts `first` and `second` into pieces of `n_rows` rows, which have `lengths` elements, and runs `f` on each pair with
/// the number of its first row. Lengths are at least 1.
pub fn for_row_pairs<A: Send, B: Send>(
    pool: &IntraPool,
    n_rows: usize,
    lengths: (usize, usize),
    first: &mut [A],
    second: &mut [B],
    f: impl Fn(usize, &mut [A], &mut [B]) + Sync,
) {
    if first.len() <= n_rows * lengths.0 || pool.n_threads() == 1 {
        return f(0, first, second);
    }
    // Each lock is asked for once, by the task whose part it is.
    let parts: Vec<Part<'_, A, B>> = first
        .chunks_mut(n_rows * lengths.0)
        .zip(second.chunks_mut(n_rows * lengths.1))
        .map(|pair| Mutex::new(Some(pair)))
        .collect();
    pool.parallel_for(parts.len(), &|i| {
        if let Some((first, second)) = parts[i].lock().take() {
            f(i * n_rows, first, second);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_fill_their_run() {
        assert_eq!(piece_of_run(4096, 1024), 1024);
        assert_eq!(piece_of_run(3 * 720, 1024), 720);
        assert_eq!((piece_of_run(4099, 1024), piece_of_run(1000, 1024), piece_of_run(0, 8)), (4099, 1000, 0));
        assert_eq!((piece_of_run(5, 0), piece_of_run(32, 3)), (5, 32));
    }

    #[test]
    fn every_row_is_visited_once_with_its_number() {
        let pool = IntraPool::new(3);
        let (mut numbers, mut doubles) = (vec![0usize; 10], vec![0usize; 20]);
        for_row_pairs(&pool, 3, (1, 2), &mut numbers, &mut doubles, |row, numbers, doubles| {
            numbers.iter_mut().enumerate().for_each(|(i, x)| *x += row + i);
            doubles.iter_mut().enumerate().for_each(|(i, x)| *x += row * 2 + i);
        });
        assert_eq!(numbers, (0..10).collect::<Vec<_>>());
        assert_eq!(doubles, (0..20).collect::<Vec<_>>());
    }
}
