//! Products that are split along k: the parts are computed independently, each with its own C, and added in order.

use super::{
    Block, Chunk, Epilogue, IntraPool, K_CHUNK, Kernels, Layout, Left, N_TASKS, Problem, Real, SERIAL_FLOP, Scratch,
    Shared, TASK_FLOP, blocks_of, epilogue, nth_block, nth_blocks, nth_cut, vectorize,
};

/// Work from which a product is not halved.
const HALVED_FLOP: usize = 64_000_000;

/// Splits k into `splits` parts, computed independently and added in order.
///
/// # Safety
/// As for [`super::run`].
pub(super) unsafe fn run_pieces<T: Real>(pool: &IntraPool, kernels: &Kernels<T>, p: &Problem<'_, T>, splits: usize) {
    let size = p.m * p.n;
    let parts = Scratch::take::<T>(size * splits);
    let part = Shared(parts.as_ptr::<T>());
    pool.parallel_for_near(splits, &|s| {
        let k = nth_block(p.k, splits, s);
        let inner = Problem {
            accumulate: false,
            // SAFETY: the buffer has room for `splits` times `size`.
            c: unsafe { part.get().add(s * size) },
            ldc: p.n,
            epilogue: Epilogue::default(),
            ..*p
        };
        for k in blocks_of(k, K_CHUNK) {
            let first = k.start == nth_block(p.k, splits, s).start;
            let inner = Problem { accumulate: !first, ..inner };
            let chunk = Chunk { first, last: false, ..Chunk::new(kernels, &inner, 0..p.n, k) };
            // SAFETY: A and B guaranteed by the caller; this part of the buffer is this task's.
            unsafe { chunk.run_alone() }
        }
    });
    let rows = nth_blocks(p.m, (size / 16384).max(1).min(p.m));
    pool.parallel_for_near(rows.len(), &|r| {
        for i in rows[r].clone() {
            // SAFETY: row `i` of C and of every part is inside its buffer and this task's alone.
            unsafe {
                let c = std::slice::from_raw_parts_mut(p.c.add(i * p.ldc), p.n);
                for s in 0..splits {
                    let x = std::slice::from_raw_parts(part.get().add(s * size + i * p.n), p.n);
                    if s == 0 && !p.accumulate {
                        c.copy_from_slice(x);
                    } else {
                        add(c, x);
                    }
                }
                epilogue::apply(&p.epilogue, c.as_mut_ptr(), p.ldc, i..i + 1, 0..p.n);
            }
        }
    });
    parts.put_back();
}

/// The number of parts to split k into: 1 unless C has few tiles and k is long.
pub(super) fn n_pieces<T: Real>(kernels: &Kernels<T>, p: &Problem<'_, T>) -> usize {
    let tiles = p.m.div_ceil(kernels.mr) * p.n.div_ceil(kernels.nr());
    let flop = 2 * p.m * p.n * p.k;
    if flop < SERIAL_FLOP || tiles >= N_TASKS || p.k < 4 * (p.m + p.n) {
        return 1;
    }
    (flop / TASK_FLOP).min(N_TASKS).min(p.k / 256).max(1)
}

/// Whether to split k in two: each half of the threads then reads only half of A and B, and the final addition is small
/// beside that. Large products reuse their operands enough without it.
pub(crate) fn pays_to_halve<T>(p: &Problem<'_, T>) -> bool {
    let flop = 2 * p.m * p.n * p.k;
    let is_small = (2 * SERIAL_FLOP..HALVED_FLOP).contains(&flop);
    is_small && matches!(p.a, Left::Matrix(..)) && 8 * p.m * p.n <= p.k * (p.m + p.n)
}

/// Computes the product of each half of k independently, by blocks of rows, and adds the second to the first. The tasks
/// of one half are contiguous, so they go to the same threads each time and reuse those cores' caches.
///
/// # Safety
/// As for [`super::run`].
pub(super) unsafe fn run_halves<T: Real>(pool: &IntraPool, kernels: &Kernels<T>, p: &Problem<'_, T>) {
    let second = Scratch::take::<T>(p.m * p.n);
    let plain = Epilogue::default();
    let problems = [
        Problem { epilogue: plain, ..*p },
        Problem { epilogue: plain, accumulate: false, c: second.as_ptr(), ldc: p.n, ..*p },
    ];
    let halves = [0, 1].map(|half| {
        let chunk = Chunk::new(kernels, &problems[half], 0..p.n, nth_block(p.k, 2, half));
        // Rows of B are read in place: each is used by few rows of A, and packing it would take a tenth of the time.
        Chunk { first: true, n_runs: 1, pack_b: p.b_layout == Layout::Cols, ..chunk }
    });
    let packed = Scratch::take::<T>(2 * halves[0].packed_b_len());
    let b = Shared(packed.as_ptr::<T>());
    // SAFETY: the buffer has room for both halves, and the first is not shorter than the second.
    let panels = |half: usize| unsafe { b.get().add(half * halves[0].packed_b_len()) };
    let n_groups = p.n.div_ceil(2 * kernels.nr());
    pool.parallel_for_near(2 * n_groups, &|t| {
        let chunk = &halves[t / n_groups];
        let cols = nth_cut(p.n, n_groups, kernels.nr(), t % n_groups);
        // SAFETY: each task writes its own panels of its own half.
        unsafe { chunk.pack_b_panels(panels(t / n_groups), 0..chunk.k.len(), cols) };
    });
    let n_rows = p.m.div_ceil(2 * kernels.mr).min(N_TASKS / 2);
    pool.parallel_for_near(2 * n_rows, &|t| {
        let block = Block { rows: nth_block(p.m, n_rows, t % n_rows), cols: 0..p.n };
        // SAFETY: blocks do not overlap, the halves have a C each, and B is packed.
        unsafe { halves[t / n_rows].block(&block, panels(t / n_rows)) };
    });
    // SAFETY: the second half is all there.
    unsafe { add_second_half(pool, p, second.as_ptr()) };
    packed.put_back();
    second.put_back();
}

/// Adds the product of the second half of k, whose rows are contiguous, to C, which has that of the first, and finishes
/// C.
///
/// # Safety
/// C as for [`super::run`]; `second` is as large.
pub(crate) unsafe fn add_second_half<T: Real>(pool: &IntraPool, p: &Problem<'_, T>, second: *mut T) {
    let added = Shared(second);
    let n_sums = (p.m * p.n / 4096).clamp(1, p.m.min(N_TASKS));
    pool.parallel_for_near(n_sums, &|t| {
        for i in nth_block(p.m, n_sums, t) {
            // SAFETY: row `i` of C and of the second half's is inside its buffer and this task's alone.
            unsafe {
                let c = std::slice::from_raw_parts_mut(p.c.add(i * p.ldc), p.n);
                let x = std::slice::from_raw_parts(added.get().add(i * p.n), p.n);
                add(c, x);
                epilogue::apply(&p.epilogue, c.as_mut_ptr(), p.ldc, i..i + 1, 0..p.n);
            }
        }
    });
}

/// `c += x`.
pub(crate) fn add<T: Real>(c: &mut [T], x: &[T]) {
    vectorize(
        #[inline(always)]
        || c.iter_mut().zip(x).for_each(|(c, &x)| *c = c.plus(x)),
    );
}
