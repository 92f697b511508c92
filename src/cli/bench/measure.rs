//! Takes samples of a call and prints them in the form that `bench/run` reads.

use std::time::{Duration, Instant};

use crate::Result;

use crate::cli::print;

/// How long to measure, and how to print.
pub struct Report {
    json: bool,
    budget: Duration,
    warm_up: Duration,
}

/// Which direction is better.
#[derive(Clone, Copy)]
pub enum Better {
    Lower,
    Higher,
}

impl Report {
    /// Reads `KOLO_BENCH_BUDGET` and `KOLO_BENCH_WARMUP`, in seconds.
    pub fn from_environment(json: bool) -> Report {
        let seconds = |name: &str, default: f64| {
            let given = std::env::var(name).ok().and_then(|text| text.parse::<f64>().ok());
            Duration::from_secs_f64(given.filter(|s| (0.0..3600.0).contains(s)).unwrap_or(default))
        };
        Report { json, budget: seconds("KOLO_BENCH_BUDGET", 3.0), warm_up: seconds("KOLO_BENCH_WARMUP", 0.5) }
    }

    /// Whether figures are printed as JSON.
    pub fn is_json(&self) -> bool {
        self.json
    }

    /// How long to measure.
    pub fn budget(&self) -> Duration {
        self.budget
    }

    /// How long to run before that.
    pub fn warm_up(&self) -> Duration {
        self.warm_up
    }

    /// Calls `call` until the budget is used up and returns seconds per call, one figure for each of about thirty
    /// samples.
    pub fn sample(&self, mut call: impl FnMut() -> Result<()>) -> Result<Vec<f64>> {
        let start = Instant::now();
        let mut n_warm = 0u32;
        while n_warm == 0 || start.elapsed() < self.warm_up {
            call()?;
            n_warm += 1;
        }
        let per_call = start.elapsed().as_secs_f64() / f64::from(n_warm);
        let n_calls = ((self.budget.as_secs_f64() / 30.0 / per_call) as u32).max(1);
        let start = Instant::now();
        let mut samples = Vec::new();
        while samples.len() < 5 || start.elapsed() < self.budget {
            let sample = Instant::now();
            for _ in 0..n_calls {
                call()?;
            }
            samples.push(sample.elapsed().as_secs_f64() / f64::from(n_calls));
        }
        Ok(samples)
    }

    /// Prints one case.
    pub fn print(&self, bench: &str, case: &str, unit: &str, better: Better, samples: &[f64]) -> Result<()> {
        let value = median(samples);
        if !self.json {
            return print(format_args!("{bench:12} {case:18} {value:12.3} {unit}"));
        }
        let better = match better {
            Better::Lower => "lower",
            Better::Higher => "higher",
        };
        let list: Vec<String> = samples.iter().map(|sample| format!("{sample:.6}")).collect();
        print(format_args!(
            "{{\"bench\":\"{bench}\",\"case\":\"{case}\",\"unit\":\"{unit}\",\"value\":{value:.6},\"better\":\"{better}\",\
             \"samples\":[{}],\"versions\":{{\"kolo\":\"{}\"}}}}",
            list.join(","),
            env!("CARGO_PKG_VERSION")
        ))
    }
}

/// The middle value.
pub fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}
