//! What a pool promises.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use super::*;

#[test]
fn every_task_runs_once() {
    for n_threads in [1, 2, 3, 5] {
        let pool = IntraPool::new(n_threads);
        assert_eq!(pool.n_threads(), n_threads);
        for n_tasks in [0, 1, 2, 7, 1000] {
            let counts: Vec<_> = (0..n_tasks).map(|_| AtomicUsize::new(0)).collect();
            pool.parallel_for(n_tasks, &|i| {
                counts[i].fetch_add(1, SeqCst);
            });
            pool.parallel_for_near(n_tasks, &|i| {
                counts[i].fetch_add(1, SeqCst);
            });
            assert!(counts.iter().all(|c| c.load(SeqCst) == 2));
        }
    }
}

#[test]
fn a_task_goes_to_the_same_thread_each_time() {
    let pool = IntraPool::new(2);
    let me = std::thread::current().id();
    let deadline = Instant::now() + Duration::from_secs(20);
    for _ in 0..50 {
        let begun = AtomicUsize::new(0);
        let first_is_mine = AtomicBool::new(false);
        // No task ends before both have begun, so each thread has one.
        pool.parallel_for_near(2, &|task| {
            begun.fetch_add(1, SeqCst);
            while begun.load(SeqCst) < 2 && Instant::now() < deadline {
                std::hint::spin_loop();
            }
            if task == 0 {
                first_is_mine.store(std::thread::current().id() == me, SeqCst);
            }
        });
        assert!(first_is_mine.load(SeqCst));
    }
}

#[test]
fn chunks_cover_the_slice() {
    let pool = IntraPool::with_cores(3, Some(&[0, 1]));
    for len in [0, 1, 63, 64, 65, 1000] {
        let mut a = vec![0usize; len];
        let mut b = vec![0u8; len];
        pool.for_each_chunk(&mut a, 64, |i, part| part.fill(i + 1));
        assert!(a.iter().enumerate().all(|(i, &x)| x == i / 64 + 1));
        pool.for_each_chunk2(&mut a, &mut b, 7, |_, a, b| {
            a.iter_mut().for_each(|x| *x *= 2);
            b.fill(a[0] as u8);
        });
        assert!(a.iter().enumerate().all(|(i, &x)| x == 2 * (i / 64 + 1)));
    }
}

#[test]
fn pieces_across_blocks_are_those_at_one_place() {
    let pool = IntraPool::new(2);
    for (n_blocks, block) in [(1, 10), (3, 65), (4, 64), (2, 0)] {
        let mut data = vec![(0, 0); n_blocks * block];
        pool.for_each_chunk_across(&mut data, n_blocks, 32, |i, pieces| {
            assert_eq!(pieces.len(), n_blocks);
            pieces.iter_mut().enumerate().for_each(|(at, piece)| piece.fill((at, i)));
        });
        assert!(data.iter().enumerate().all(|(i, &x)| x == (i / block, i % block / 32)), "{n_blocks} {block}");
    }
}

#[test]
fn nested_calls_finish() {
    let pool = IntraPool::new(3);
    let total = AtomicU64::new(0);
    pool.parallel_for(20, &|_| {
        pool.parallel_for(10, &|i| {
            total.fetch_add(i as u64, SeqCst);
        });
    });
    assert_eq!(total.into_inner(), 20 * 45);
}

#[test]
fn callers_on_many_threads_finish() {
    let pool = IntraPool::new(2);
    let total = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..200 {
                    pool.parallel_for(5, &|_| {
                        total.fetch_add(1, SeqCst);
                    });
                }
            });
        }
    });
    assert_eq!(total.into_inner(), 4 * 200 * 5);
}

#[test]
fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
    let pool = IntraPool::new(2);
    for bad in [0, 57, 99] {
        let result = catch_unwind(AssertUnwindSafe(|| {
            pool.parallel_for(100, &|i| assert!(i != bad, "task {i} fails"));
        }));
        let payload = result.expect_err("the panic propagates");
        assert_eq!(payload.downcast_ref::<String>(), Some(&format!("task {bad} fails")));
    }
    let done = AtomicUsize::new(0);
    pool.parallel_for(10, &|_| {
        done.fetch_add(1, SeqCst);
    });
    assert_eq!(done.into_inner(), 10);
}

#[test]
fn a_pool_changes_size_while_it_works() {
    let pool = IntraPool::new(1);
    let total = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..300 {
                    pool.parallel_for(7, &|_| {
                        total.fetch_add(1, SeqCst);
                    });
                }
            });
        }
        for n in [3, 1, 5, 2, 0, 4] {
            assert_eq!(pool.set_threads(n), n.max(1));
            assert_eq!(pool.n_threads(), n.max(1));
            assert_eq!(
                pool.workers.crew.lock().iter().filter(|worker| !worker.handle.is_finished()).count(),
                n.max(1) - 1
            );
        }
    });
    assert_eq!(total.into_inner(), 2 * 300 * 7);
}

#[test]
fn workers_end_with_the_pool() {
    let pool = IntraPool::new(4);
    let shared = Arc::downgrade(&pool.workers.shared);
    drop(pool);
    assert!(shared.upgrade().is_none());
}

#[test]
fn a_grain_is_smaller_for_dearer_elements() {
    assert!(grain(0.1) > grain(10.0));
    assert_eq!(grain(1e9), 64);
    assert_eq!(grain(0.0) % 64, 0);
}

#[test]
fn copies_of_all_sizes_are_whole() {
    for n_threads in [1, 3] {
        let pool = IntraPool::new(n_threads);
        // On one thread; by threads that have it cached; in long ranges; each with a rest.
        for n in [0, 1, LEAST_SPLIT_COPY - 1, LEAST_SPLIT_COPY + 77, n_threads * CACHED_BYTES + 12_345] {
            let from: Vec<u8> = (0..n).map(|i| (i % 251) as u8).collect();
            let mut to = vec![0u8; n];
            pool.copy(&mut to, &from);
            assert!(to == from, "{n} bytes on {n_threads} threads");
        }
    }
}
