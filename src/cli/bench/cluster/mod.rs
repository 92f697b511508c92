//! Benches of a cluster: servers in processes of their own on this machine, driven by Kolo's client.

mod servers;
mod training;

use std::time::Instant;

use crate::{Connect as _, Error, Initializer, Result, Session, ops};

use super::measure::{Better, Report};

pub use servers::Servers;
pub use training::{WorkerFlags, train};

/// `session.run` of a constant on a server.
pub fn remote_latency(report: &Report) -> Result<()> {
    let servers = Servers::start(0, 1)?;
    let g = crate::graph();
    let constant = g.constant(1.0f32);
    let session = Session::connect(&servers.target(0), &g)?;
    let mut times = Vec::new();
    report.sample(|| {
        let start = Instant::now();
        session.fetch(constant)?;
        times.push(start.elapsed().as_secs_f64() * 1e6);
        Ok(())
    })?;
    // What came first warmed the way up. Five stretches, so that there are samples of both percentiles.
    let times = &times[times.len() / 4..];
    let stretches: Vec<Vec<f64>> = times
        .chunks((times.len() / 5).max(1))
        .map(|stretch| {
            let mut sorted = stretch.to_vec();
            sorted.sort_by(f64::total_cmp);
            sorted
        })
        .collect();
    let percentile = |share: usize| -> Vec<f64> { stretches.iter().map(|s| s[(s.len() - 1) * share / 100]).collect() };
    report.print("remote-latency", "constant-p50", "us", Better::Lower, &percentile(50))?;
    report.print("remote-latency", "constant-p99", "us", Better::Lower, &percentile(99))
}

/// 64 MB from a parameter server to a worker.
pub fn transfer(report: &Report) -> Result<()> {
    const N: usize = 16_000_000;
    for (case, flags) in [("tcp", &["--no-shared-memory"][..]), ("shm", &[])] {
        let servers = Servers::start_with(1, 1, flags)?;
        let rates = transfer_rates(report, &servers, N)?;
        report.print("transfer", case, "GB/s", Better::Higher, &rates)?;
        if case == "tcp" {
            let raw = servers::raw_loopback(4 * N)? / 1e9;
            let share: Vec<f64> = rates.iter().map(|rate| rate / raw).collect();
            report.print("transfer", "tcp-of-raw", "x", Better::Higher, &share)?;
        }
    }
    Ok(())
}

/// 100 MB of parameters go to the worker, and as many bytes of updates come back.
pub fn ps_large(report: &Report) -> Result<()> {
    let rates = push_pull_rates(report, &Servers::start(1, 1)?, 4)?;
    report.print("ps-large", "push-pull", "steps/s", Better::Higher, &rates)
}

/// The cost of TLS: the same over TCP with it, or without it for comparison. The last case is the default between tasks
/// on one machine: their tensors go through shared memory, with TLS and without.
pub fn tls(report: &Report, is_plain: bool) -> Result<()> {
    const OVER_TCP: &[&str] = &["--no-shared-memory"];
    let start = |flags: &[&str]| match is_plain {
        true => Servers::start_with(1, 1, flags),
        false => Servers::start_with_tls(1, 1, flags),
    };
    for (case, n) in [("transfer-1MB", 250_000), ("transfer-64MB", 16_000_000)] {
        let rates = transfer_rates(report, &start(OVER_TCP)?, n)?;
        report.print("tls", case, "GB/s", Better::Higher, &rates)?;
    }
    for (case, n_pieces) in [("push-pull", 4), ("push-pull-1MB", 100)] {
        let rates = push_pull_rates(report, &start(OVER_TCP)?, n_pieces)?;
        report.print("tls", case, "steps/s", Better::Higher, &rates)?;
    }
    let rates = transfer_rates(report, &start(&[])?, 16_000_000)?;
    report.print("tls", "transfer-64MB-shm", "GB/s", Better::Higher, &rates)
}

/// GB/s of `n` floats from a parameter server to a worker.
fn transfer_rates(report: &Report, servers: &Servers, n: usize) -> Result<Vec<f64>> {
    let g = crate::graph();
    let value = g.device("/job:ps/task:0", || {
        let v = g.new_variable("v", Initializer::Constant(1.0)).shape([n]).build();
        v.read()
    });
    let there = g.device("/job:worker/task:0", || ops::identity(value));
    let first = g.device("/job:worker/task:0", || ops::slice(there, &[0], &[1000]));
    let init = g.global_variables_initializer();
    let session = servers.connect(&g)?;
    session.run_op(init)?;
    if session.fetch(first)?.data::<f32>()?.iter().sum::<f32>() != 1000.0 {
        return Err(Error::internal("the tensor did not arrive"));
    }
    let call = session.make_callable(&[], &[], &[there.operation()])?;
    let seconds = report.sample(|| call.call(&[]).map(drop))?;
    Ok(seconds.iter().map(|s| 4.0 * n as f64 / s / 1e9).collect())
}

/// Steps per second that read 100 MB of parameters, in `n_pieces` pieces, and send as many bytes back.
fn push_pull_rates(report: &Report, servers: &Servers, n_pieces: usize) -> Result<Vec<f64>> {
    const N: usize = 25_000_000;
    let g = crate::graph();
    let mut updates = Vec::new();
    for i in 0..n_pieces {
        let v = g.device("/job:ps/task:0", || {
            g.new_variable(&format!("v{i}"), Initializer::Constant(1.0)).shape([N / n_pieces]).build()
        });
        let value = g.device("/job:ps/task:0", || v.read());
        let gradient = g.device("/job:worker/task:0", || value * 1e-6f32);
        updates.push(g.device("/job:ps/task:0", || v.assign_sub(gradient)));
    }
    let step = g.device("/job:worker/task:0", || g.group("step", &updates));
    let init = g.global_variables_initializer();
    let session = servers.connect(&g)?;
    session.run_op(init)?;
    let call = session.make_callable(&[], &[], &[step])?;
    let seconds = report.sample(|| call.call(&[]).map(drop))?;
    Ok(seconds.iter().map(|s| 1.0 / s).collect())
}
