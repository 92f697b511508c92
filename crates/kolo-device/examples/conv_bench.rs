//! GFLOP/s of the convolutions of small nets, forward and both gradients.
//!
//! `cargo run --release -p kolo-device --example conv_bench [n_threads] [part of a shape's name]`

use std::time::Duration;

use kolo_device::cpu::IntraPool;
use kolo_device::cpu::conv::{ConvShape, conv2d, conv2d_backprop_filter, conv2d_backprop_input};
use kolo_device::cpu::gemm::Epilogue;

/// Batch, input channels, size, output channels, filter, stride.
const SHAPES: [(usize, usize, usize, usize, usize, usize); 25] = [
    (64, 1, 28, 32, 5, 1),
    (100, 1, 28, 32, 5, 1),
    (64, 32, 14, 64, 5, 1),
    (100, 32, 14, 64, 5, 1),
    (32, 16, 32, 16, 3, 1),
    (32, 64, 8, 64, 3, 1),
    (8, 64, 56, 64, 3, 1),
    (1, 32, 14, 32, 3, 1),
    (8, 64, 28, 64, 3, 1),
    (1, 16, 14, 32, 5, 1),
    (8, 32, 28, 64, 5, 1),
    (4, 256, 14, 256, 3, 1),
    (16, 128, 28, 128, 3, 1),
    (16, 256, 14, 256, 3, 1),
    (32, 64, 56, 64, 3, 1),
    (32, 32, 28, 64, 5, 1),
    (1, 32, 14, 64, 1, 1),
    (8, 64, 28, 128, 1, 1),
    (32, 256, 28, 256, 1, 1),
    (1, 32, 14, 32, 3, 2),
    (8, 64, 28, 64, 3, 2),
    (32, 64, 56, 64, 3, 2),
    (1, 3, 32, 16, 7, 2),
    (4, 3, 112, 64, 7, 2),
    (16, 3, 224, 64, 7, 2),
];

fn main() {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let n_threads = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(cores);
    let wanted = std::env::args().nth(2).unwrap_or_default();
    println!("{:>24} threads   forward    filter     input", "N,C,HxW -> O, k/stride");
    for (batch, c, size, o, k, stride) in SHAPES {
        let grid = size.div_ceil(stride);
        let pad = ((grid - 1) * stride + k).saturating_sub(size) / 2;
        let shape = ConvShape {
            batch,
            input: [size, size, c],
            filter: [k, k],
            output: [grid, grid, o],
            stride: [stride, stride],
            dilation: [1, 1],
            pad_top: pad,
            pad_left: pad,
        };
        let name = format!("{batch},{c},{size}x{size} -> {o}, {k}/{stride}");
        if !name.contains(&wanted) {
            continue;
        }
        for threads in [1, n_threads] {
            let rates = rates(&IntraPool::new(threads), &shape);
            println!("{name:>24} {threads:>7} {:9.1} {:9.1} {:9.1}", rates[0], rates[1], rates[2]);
        }
    }
}

fn rates(pool: &IntraPool, shape: &ConvShape) -> [f64; 3] {
    let [mut input, mut filter, mut out] = [shape.input_len(), shape.filter_len(), shape.output_len()].map(Values::new);
    let (input, filter, out) = (input.get(), filter.get(), out.get());
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
        conv2d(pool, shape, input, filter, out, Epilogue::default()).expect("sizes fit");
    });
    let by_filter = rate(&mut || {
        conv2d_backprop_filter(pool, shape, input, out, filter).expect("sizes fit");
    });
    let by_input = rate(&mut || {
        conv2d_backprop_input(pool, shape, filter, out, input).expect("sizes fit");
    });
    [forward, by_filter, by_input]
}

/// Values that lie as a tensor's do: from a line of the caches on, in huge pages.
struct Values {
    room: Vec<f32>,
    first: usize,
    len: usize,
}

impl Values {
    fn new(len: usize) -> Values {
        const HUGE: usize = 2 << 20;
        let mut room: Vec<f32> = Vec::with_capacity(len + HUGE / size_of::<f32>());
        let first = room.as_ptr().align_offset(HUGE);
        // SAFETY: a range of the vector's own memory; the call is a wish and changes no values.
        unsafe { libc::madvise(room.as_mut_ptr().add(first).cast(), len * size_of::<f32>(), libc::MADV_HUGEPAGE) };
        room.extend((0..first + len).map(|i| (i.wrapping_sub(first) % 17) as f32 * 0.1 - 0.8));
        Values { room, first, len }
    }

    fn get(&mut self) -> &mut [f32] {
        &mut self.room[self.first..][..self.len]
    }
}

/// Wall time; for one thread its processor time, which neighbours on a shared machine disturb less.
fn now(pool: &IntraPool) -> Duration {
    let clock = if pool.n_threads() == 1 { libc::CLOCK_THREAD_CPUTIME_ID } else { libc::CLOCK_MONOTONIC };
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the clock exists on Linux and `time` is a valid place for its answer.
    unsafe { libc::clock_gettime(clock, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
