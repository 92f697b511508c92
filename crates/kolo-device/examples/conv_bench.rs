//! GFLOP/s of the convolutions of small nets, forward and both gradients.
//!
//! `cargo run --release -p kolo-device --example conv_bench [n_threads] [part of a shape's name]`

use std::time::Duration;

use kolo_device::cpu::IntraPool;
use kolo_device::cpu::conv::{ConvShape, conv2d, conv2d_backprop_filter, conv2d_backprop_input};
use kolo_device::cpu::gemm::Epilogue;

/// Batch, input channels, size, output channels, filter.
const SHAPES: [(usize, usize, usize, usize, usize); 16] = [
    (64, 1, 28, 32, 5),
    (100, 1, 28, 32, 5),
    (64, 32, 14, 64, 5),
    (100, 32, 14, 64, 5),
    (32, 16, 32, 16, 3),
    (32, 64, 8, 64, 3),
    (8, 64, 56, 64, 3),
    (1, 32, 14, 32, 3),
    (8, 64, 28, 64, 3),
    (1, 16, 14, 32, 5),
    (8, 32, 28, 64, 5),
    (4, 256, 14, 256, 3),
    (16, 128, 28, 128, 3),
    (16, 256, 14, 256, 3),
    (32, 64, 56, 64, 3),
    (32, 32, 28, 64, 5),
];

fn main() {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let n_threads = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(cores);
    let wanted = std::env::args().nth(2).unwrap_or_default();
    println!("{:>22} threads   forward    filter     input", "N,C,HxW -> O, k");
    for (batch, c, size, o, k) in SHAPES {
        let shape = ConvShape {
            batch,
            input: [size, size, c],
            filter: [k, k],
            output: [size, size, o],
            stride: [1, 1],
            dilation: [1, 1],
            pad_top: k / 2,
            pad_left: k / 2,
        };
        let name = format!("{batch},{c},{size}x{size} -> {o}, {k}");
        if !name.contains(&wanted) {
            continue;
        }
        for threads in [1, n_threads] {
            let rates = rates(&IntraPool::new(threads), &shape);
            println!("{name:>22} {threads:>7} {:9.1} {:9.1} {:9.1}", rates[0], rates[1], rates[2]);
        }
    }
}

fn rates(pool: &IntraPool, shape: &ConvShape) -> [f64; 3] {
    let values = |n: usize| (0..n).map(|i| (i % 17) as f32 * 0.1 - 0.8).collect::<Vec<_>>();
    let mut input = values(shape.input_len());
    let mut filter = values(shape.filter_len());
    let mut out = values(shape.output_len());
    let taps = shape.filter[0] * shape.filter[1] * shape.input[2];
    let flop = 2.0 * (shape.output_len() * taps) as f64;
    let rate = |f: &mut dyn FnMut()| {
        let repeats = (1e9 / flop).clamp(1.0, 1e4) as usize;
        let best = (0..6)
            .map(|_| {
                let start = now(pool);
                (0..repeats).for_each(|_| f());
                now(pool) - start
            })
            .min()
            .unwrap_or(Duration::MAX);
        flop * repeats as f64 / best.as_secs_f64() / 1e9
    };
    let forward = rate(&mut || {
        conv2d(pool, shape, &input, &filter, &mut out, Epilogue::default()).expect("sizes fit");
    });
    let by_filter = rate(&mut || {
        conv2d_backprop_filter(pool, shape, &input, &out, &mut filter).expect("sizes fit");
    });
    let by_input = rate(&mut || {
        conv2d_backprop_input(pool, shape, &filter, &out, &mut input).expect("sizes fit");
    });
    [forward, by_filter, by_input]
}

/// Wall time; for one thread its processor time, which neighbours on a shared machine disturb less.
fn now(pool: &IntraPool) -> Duration {
    let clock = if pool.n_threads() == 1 { libc::CLOCK_THREAD_CPUTIME_ID } else { libc::CLOCK_MONOTONIC };
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the clock exists on Linux and `time` is a valid place for its answer.
    unsafe { libc::clock_gettime(clock, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
