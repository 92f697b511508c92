//! Nanoseconds per element of the slice functions, and whether `vectorize` reaches vector speed.
//!
//! `cargo run --release -p kolo-device --example vmath_bench`

use std::hint::black_box;
use std::time::{Duration, Instant};

use kolo_device::cpu::{vectorize, vmath};

// Three slices of this length fit in L1.
const N: usize = 2048;

fn main() {
    let a: Vec<f32> = (0..N).map(|i| (i % 97) as f32 * 0.05).collect();
    let b = a.clone();
    let mut c = vec![0f32; N];
    time("c = a*b + c, plain", || mul_add(&a, &b, black_box(&mut c)));
    time("c = a*b + c, vectorize", || {
        vectorize(
            #[inline(always)]
            || mul_add(&a, &b, black_box(&mut c)),
        );
    });
    time("exp, std", || c.iter_mut().zip(black_box(&a)).for_each(|(c, a)| *c = a.exp()));
    time("exp", || vmath::exp_f32_to(black_box(&a), &mut c));
    time("log", || vmath::log_f32_to(black_box(&a), &mut c));
    time("tanh", || vmath::tanh_f32_to(black_box(&a), &mut c));
    time("sigmoid", || vmath::sigmoid_f32_to(black_box(&a), &mut c));
    time("erf", || vmath::erf_f32_to(black_box(&a), &mut c));
    time("rsqrt", || vmath::rsqrt_f32_to(black_box(&a), &mut c));
    time("softmax, one row", || vmath::softmax_f32(black_box(&a), &mut c, N));
    time("sum", || {
        black_box(black_box(vmath::sum_f32(black_box(&a))));
    });
    time("dot", || {
        black_box(black_box(vmath::dot_f32(black_box(&a), &b)));
    });
    time("max", || {
        black_box(black_box(vmath::max_f32(black_box(&a))));
    });
    let rows = N / 10 * 10;
    time("softmax, rows of 10", || vmath::softmax_f32(&a[..rows], black_box(&mut c[..rows]), 10));
}

#[inline(always)]
fn mul_add(a: &[f32], b: &[f32], c: &mut [f32]) {
    for ((c, &a), &b) in c.iter_mut().zip(a).zip(b) {
        *c += a * b;
    }
}

fn time(name: &str, mut f: impl FnMut()) {
    let best = (0..20)
        .map(|_| {
            let start = Instant::now();
            (0..200).for_each(|_| f());
            start.elapsed()
        })
        .min()
        .unwrap_or(Duration::MAX);
    println!("{name:>24}  {:7.3} ns", best.as_nanos() as f64 / 200.0 / N as f64);
}
