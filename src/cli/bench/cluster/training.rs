//! `ps-async` and `ps-sync`: the small MLP on one parameter server and two workers, each worker a process.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cluster::{ReplicaDeviceSetter, SyncReplicas};
use crate::optim::{Optimizer, Sgd};
use crate::train::{MonitoredTrainingSession, global_step_or_create};
use crate::{ClusterSpec, Connect as _, Error, Initializer, Result, Server, ServerConfig, Session, SessionConfig, ops};

use super::servers::Servers;
use crate::cli::bench::measure::{Better, Report};
use crate::cli::bench::networks::{N_BATCHES, mnist_batches};

/// Parts that the measured time is cut into.
const N_WINDOWS: usize = 6;
const BATCH: usize = 100;

/// Hidden flags that a bench passes to its worker processes.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct WorkerFlags {
    #[arg(long, hide = true)]
    cluster: Option<String>,
    #[arg(long, hide = true)]
    worker: Option<u32>,
}

/// Measures, or is one of the workers that are measured.
pub fn train(report: &Report, is_sync: bool, flags: &WorkerFlags) -> Result<()> {
    if let (Some(cluster), Some(task)) = (&flags.cluster, flags.worker) {
        return worker(&ClusterSpec::parse(cluster)?, task, is_sync);
    }
    let bench = if is_sync { "ps-sync" } else { "ps-async" };
    let counts: &[usize] = if is_sync { &[2] } else { &[1, 2] };
    let mut rates = Vec::new();
    for &n_workers in counts {
        let mut servers = Servers::addresses(1, n_workers)?;
        servers.serve("ps", 0, &[])?;
        let mut workers =
            (0..n_workers).map(|task| Worker::start(bench, &servers.cluster, task)).collect::<Result<Vec<_>>>()?;
        for worker in &mut workers {
            worker.expect_line()?;
        }
        let seconds = (report.warm_up().as_secs_f64(), report.budget().as_secs_f64());
        for worker in &mut workers {
            worker.say(&format!("{} {}", seconds.0, seconds.1))?;
        }
        let mut total = vec![0.0; N_WINDOWS];
        for worker in &mut workers {
            let line = worker.expect_line()?;
            for (sum, rate) in total.iter_mut().zip(line.split_whitespace()) {
                *sum += rate.parse::<f64>().map_err(|_| Error::internal(format!("a worker said '{line}'")))?;
            }
        }
        rates.push(total);
    }
    let last = rates.last().cloned().unwrap_or_default();
    report.print(bench, "train", "steps/s", Better::Higher, &last)?;
    if let [one, two] = &rates[..] {
        let one = super::super::measure::median(one);
        let share: Vec<f64> = two.iter().map(|rate| rate / one).collect();
        report.print(bench, "of-one-worker", "x", Better::Higher, &share)?;
    }
    Ok(())
}

/// A worker process, ended with this.
struct Worker {
    child: Child,
    out: BufReader<ChildStdout>,
}

impl Worker {
    fn start(bench: &str, cluster: &str, task: usize) -> Result<Worker> {
        let program = std::env::current_exe().map_err(|error| Error::internal(error.to_string()))?;
        let mut command = Command::new(program);
        command.args(["bench", bench, "--cluster", cluster, "--worker", &task.to_string()]);
        let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = spawned.map_err(|error| Error::unavailable(format!("no worker: {error}")))?;
        match child.stdout.take() {
            Some(out) => Ok(Worker { child, out: BufReader::new(out) }),
            None => Err(Error::internal("a worker without an output")),
        }
    }

    fn say(&mut self, line: &str) -> Result<()> {
        let said = self.child.stdin.as_mut().map(|stdin| writeln!(stdin, "{line}"));
        said.transpose().map(drop).map_err(|error| Error::unavailable(format!("a worker does not listen: {error}")))
    }

    fn expect_line(&mut self) -> Result<String> {
        let mut line = String::new();
        match self.out.read_line(&mut line) {
            Ok(n) if n > 0 => Ok(line),
            _ => Err(Error::unavailable("a worker has ended")),
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn worker(cluster: &ClusterSpec, task: u32, is_sync: bool) -> Result<()> {
    let server = Server::new(cluster, "worker", task, ServerConfig::default())?;
    let n_workers = cluster.tasks("worker").count();
    let g = crate::graph();
    g.set_seed(1);
    let setter = ReplicaDeviceSetter::new(1).worker_device(&format!("/job:worker/task:{task}"));
    let sync = SyncReplicas::new(Sgd::new(0.01), n_workers);
    let plain = Sgd::new(0.01);
    let (x, y, update) = setter.apply(&g, || -> Result<_> {
        let step = global_step_or_create(&g)?;
        let x = g.placeholder::<f32>("x", [None, Some(784)]);
        let y = g.placeholder::<f32>("y", [None, Some(10)]);
        let dense = |x, name: &str, n_in, n_out| {
            g.name_scope(name, || {
                let w = g.new_variable("w", Initializer::GlorotUniform).shape([n_in, n_out]).build();
                let b = g.new_variable("b", Initializer::Zeros).shape([n_out]).build();
                ops::bias_add(ops::matmul(x, w.read()), b.read())
            })
        };
        let logits = dense(ops::sigmoid(dense(x, "hidden", 784, 100)), "out", 100, 10);
        let loss = ops::mean_all(ops::softmax_cross_entropy(logits, y));
        let optimizer: &dyn Optimizer = if is_sync { &sync } else { &plain };
        Ok((x, y, optimizer.minimize(loss, Some(step))?))
    })??;
    let filters = vec!["/job:ps".to_owned(), format!("/job:worker/task:{task}")];
    let config = SessionConfig { device_filters: filters, ..SessionConfig::default() };
    let target = server.target();
    let open = move |graph: &crate::Graph| Session::connect_with(&target, graph, config.clone()).map(Arc::new);
    let mut builder = MonitoredTrainingSession::new(&g).source(open).is_chief(task == 0).count_steps(None);
    if is_sync {
        builder = builder.hook(sync.make_session_run_hook(&g, task == 0)?);
    }
    let session = builder.build()?;
    let call = session.session()?.make_callable(&[x, y], &[], &[update])?;
    let batches = mnist_batches(BATCH, task as usize * N_BATCHES)?;
    say("ready")?;
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).map_err(|error| Error::unavailable(error.to_string()))?;
    let mut seconds = line.split_whitespace().filter_map(|text| text.parse::<f64>().ok());
    let (Some(warm_up), Some(budget)) = (seconds.next(), seconds.next()) else { return Ok(()) };
    let begin = Instant::now() + Duration::from_secs_f64(warm_up);
    let window = budget / N_WINDOWS as f64;
    let mut counts = [0u64; N_WINDOWS];
    for i in 0.. {
        let (images, labels) = &batches[i % N_BATCHES];
        call.call(&[images, labels])?;
        let Some(after) = Instant::now().checked_duration_since(begin) else { continue };
        match counts.get_mut((after.as_secs_f64() / window) as usize) {
            Some(count) => *count += 1,
            None => break,
        }
    }
    let rates: Vec<String> = counts.iter().map(|&count| (count as f64 / window).to_string()).collect();
    say(&rates.join(" "))?;
    // The others of a synchronous job wait for this one's gradients until they are through too.
    if !is_sync {
        return Ok(());
    }
    loop {
        let (images, labels) = &batches[0];
        call.call(&[images, labels])?;
    }
}

fn say(line: &str) -> Result<()> {
    crate::cli::print(line)
}
