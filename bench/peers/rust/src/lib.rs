//! What the Rust peers share: the data, the timing and the JSON line.

use std::time::{Duration, Instant};

/// Images in a batch.
pub const BATCH: usize = 100;
/// Pixels in an image.
pub const PIXELS: usize = 784;
/// Units of the hidden layer.
pub const HIDDEN: usize = 100;
/// Classes.
pub const CLASSES: usize = 10;
/// The step size of SGD.
pub const RATE: f64 = 0.01;
/// Batches that lie in memory and are fed in turn.
const BATCHES: usize = 40;

/// Random images and labels of MNIST's shape, one entry per batch.
pub fn data() -> Vec<(Vec<f32>, Vec<u32>)> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = move |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 33) % below
    };
    (0..BATCHES)
        .map(|_| {
            let images = (0..BATCH * PIXELS).map(|_| next(256) as f32 / 255.0).collect();
            let labels = (0..BATCH).map(|_| next(CLASSES as u64) as u32).collect();
            (images, labels)
        })
        .collect()
}

fn seconds(name: &str, default: f64) -> Duration {
    let value = std::env::var(name).ok().and_then(|v| v.parse().ok());
    Duration::from_secs_f64(value.unwrap_or(default))
}

/// Times `step` for the budget and prints the median time of a step. `step` is given the number of its batch.
pub fn measure(library: &str, version: &str, mut step: impl FnMut(usize)) {
    let warm_up = seconds("KOLO_BENCH_WARMUP", 0.5);
    let budget = seconds("KOLO_BENCH_BUDGET", 3.0);
    let mut batch = 0;
    let mut turn = || {
        step(batch);
        batch = (batch + 1) % BATCHES;
    };
    let start = Instant::now();
    let mut calls = 0;
    while calls < 2 || start.elapsed() < warm_up {
        turn();
        calls += 1;
    }
    let per_step = start.elapsed().as_secs_f64() / f64::from(calls);
    let per_sample = ((budget.as_secs_f64() / 30.0 / per_step) as usize).max(1);
    let (mut samples, start) = (Vec::new(), Instant::now());
    while samples.len() < 5 || start.elapsed() < budget {
        let sample = Instant::now();
        for _ in 0..per_sample {
            turn();
        }
        samples.push(1e3 * sample.elapsed().as_secs_f64() / per_sample as f64);
    }
    let mut sorted = samples.clone();
    sorted.sort_by(f64::total_cmp);
    let median = (sorted[(sorted.len() - 1) / 2] + sorted[sorted.len() / 2]) / 2.0;
    let list: Vec<String> = samples.iter().map(|x| format!("{x:.5}")).collect();
    println!(
        "{{\"bench\": \"mlp\", \"case\": \"small\", \"unit\": \"ms/step\", \"value\": {median:.5}, \
         \"better\": \"lower\", \"samples\": [{}], \"versions\": {{\"{library}\": \"{version}\"}}}}",
        list.join(", ")
    );
}
