//! GFLOP/s of `gemm_f32` by shape, for one thread and for all.
//!
//! `cargo run --release -p kolo-device --example gemm_bench [n_threads] [portable|avx2|avx512]`
//!
//! A shape is timed in rounds of about 30 ms; the printed figure is the best round, since a
//! shared machine only ever makes a round slower.

use std::time::Duration;

use kolo_device::cpu::gemm::{Gemm, Op, gemm_f32_on};
use kolo_device::cpu::{IntraPool, Isa};

const SHAPES: [(usize, usize, usize, &str); 16] = [
    (64, 64, 64, "NN"),
    (256, 256, 256, "NN"),
    (512, 512, 512, "NN"),
    (1024, 1024, 1024, "NN"),
    (2048, 2048, 2048, "NN"),
    (1024, 1024, 784, "NN"),
    (100, 100, 784, "NN"),
    (784, 100, 100, "TN"),
    (100, 784, 100, "NT"),
    (100, 10, 100, "NN"),
    (100, 10, 100, "TN"),
    (100, 100, 10, "NT"),
    (1, 1024, 1024, "NN"),
    (1, 1024, 1024, "NT"),
    (8, 1024, 1024, "NN"),
    (25, 32, 78400, "TN"),
];

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let n_threads = args.first().and_then(|a| a.parse().ok()).unwrap_or(cores);
    let isa = match args.get(1).map(String::as_str) {
        Some("portable") => Isa::Portable,
        Some("avx2") => Isa::Avx2,
        _ => Isa::best(),
    };
    println!("{isa:?}, 1 and {n_threads} threads");
    println!("{:>20}  {:>8}  {:>8}", "m x n x k", "1", n_threads);
    for (m, n, k, ops) in SHAPES {
        let rates = [1, n_threads].map(|t| rate(&IntraPool::new(t), isa, (m, n, k), ops));
        let name = format!("{m}x{n}x{k} {ops}");
        println!("{name:>20}  {:8.1}  {:8.1}", rates[0], rates[1]);
    }
}

fn rate(pool: &IntraPool, isa: Isa, (m, n, k): (usize, usize, usize), ops: &str) -> f64 {
    let op = |i: usize| {
        if ops.as_bytes()[i] == b'T' { Op::Transpose } else { Op::None }
    };
    let a: Vec<f32> = (0..m * k).map(|i| (i % 17) as f32 * 0.1).collect();
    let b: Vec<f32> = (0..k * n).map(|i| (i % 13) as f32 * 0.1).collect();
    let mut c = vec![0f32; m * n];
    let flop = 2.0 * (m * n * k) as f64;
    let repeats = (3e9 / flop).clamp(1.0, 1e5) as usize;
    let best = (0..6)
        .map(|_| {
            let start = now(pool);
            for _ in 0..repeats {
                let call = Gemm::with_ops(m, n, k, (&a, op(0)), (&b, op(1)), &mut c);
                gemm_f32_on(isa, pool, call).expect("the sizes fit");
            }
            now(pool) - start
        })
        .min()
        .unwrap_or(Duration::MAX);
    flop * repeats as f64 / best.as_secs_f64() / 1e9
}

/// Wall time; for one thread its processor time, which neighbours on a shared machine disturb less.
fn now(pool: &IntraPool) -> Duration {
    let clock = if pool.n_threads() == 1 { libc::CLOCK_THREAD_CPUTIME_ID } else { libc::CLOCK_MONOTONIC };
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the clock exists on Linux and `time` is a valid place for its answer.
    unsafe { libc::clock_gettime(clock, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
