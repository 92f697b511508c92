//! One worker: serves its own task, or finds it served already, and trains through it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use crate::cluster::Replicas;
use crate::tls::Security;
use crate::train::hooks::{CheckpointSaver, StopAtStep};
use crate::train::{MonitoredTrainingSession, SaverBuilder, Scaffold, StepReport, global_step, not_finite, number};
use crate::{Code, Connect as _, Error, Graph, Result, Server, ServerConfig, Session, SessionConfig};
use serde_json::json;

use super::{Role, TaskLocation, ended};
use crate::cli::print;
use crate::cli::serve::file_access;
use crate::cli::train::child;
use crate::cli::train::curve::Curve;
use crate::cli::train::ending::{Ending, LogFolder, WorkerEnding, weights_checksum};
use crate::cli::train::job::{Job, stop_on_ctrl_c};
use crate::cli::train::options::Common;
use crate::cli::train::progress::View;

/// Trains as one of several workers.
pub fn run<'g>(graph: &'g Graph, common: &Common, job: Job<'g>, role: &Role, updates: &Replicas) -> Result<()> {
    let began = Instant::now();
    let stop = stop_on_ctrl_c();
    if common.cluster.with_parent {
        drop(child::end_with_parent(stop.clone()));
    }
    let security = common.cluster.security.read()?;
    let own_config = common.session_config()?;
    // Ends with this function.
    let server = match &role.location {
        TaskLocation::Here(cluster) => {
            let config = server_config(common, &security, own_config.clone())?;
            Some(Server::new(cluster, &role.job, role.index, config)?)
        }
        TaskLocation::At(_) => None,
    };
    let target = match (&role.location, &server) {
        (TaskLocation::At(target), _) => target.clone(),
        (TaskLocation::Here(_), server) => server.as_ref().map(Server::target).unwrap_or_default(),
    };
    let config = role.seat().session_config(&own_config);
    let connect =
        move |graph: &Graph| Session::connect_secured(&target, graph, config.clone(), &security).map(Arc::new);
    let open = connect.clone();

    let last = job.last_step.unwrap_or(i64::MAX);
    let mut builder = MonitoredTrainingSession::new(graph)
        .source(open)
        .is_chief(role.is_chief())
        .count_steps(None)
        .save_summaries(None)
        .save_checkpoint(None)
        .hook(StopAtStep::last(last));
    builder = builder.boxed_hook(match common.shares_batches(role)? {
        true => updates.lockstep_hook(graph, role.is_chief())?,
        false => updates.hook(graph, role.is_chief())?,
    });
    if let (Some(dir), true) = (&common.checkpoint_dir, role.is_chief()) {
        let saver = SaverBuilder::new(graph).max_to_keep(common.keep).build()?;
        builder = builder
            .checkpoint_dir(dir)
            .scaffold(Scaffold::new().saver(saver))
            .chief_only_hook(CheckpointSaver::new(dir, common.checkpoint_every));
    }
    // The chief speaks for all: its losses are the curve.
    let logdir = common.logdir.as_deref().filter(|_| role.is_chief());
    let log = logdir.map(|dir| LogFolder::new(dir, graph, common.log_every)).transpose()?;
    let mut session = builder.build()?;
    let step = global_step(graph).ok_or_else(|| Error::internal("the model counts no steps"))?;
    let view = View::choose(common.json);
    let mut worker = Progress { n_own: 0, last_loss: None, window: (Instant::now(), 0), view, role, last };
    worker.begin(session.global_step().unwrap_or(0))?;
    let mut curve = Curve { label: "loss", points: Vec::new() };
    let mut batches = job.train.batches()?;
    let model = &job.model;
    // Metrics cost time, and only the log shows them.
    let watched = if log.is_some() { model.metrics() } else { &[] };
    let mut fetches = vec![model.loss(), step.read()];
    fetches.extend(watched.iter().map(|(_, value)| *value));
    let mut before = Instant::now();
    while !session.should_stop() && !stop.load(Ordering::Relaxed) {
        let Some(batch) = batches.next() else { break };
        let batch = batch?;
        let (epoch, index, n_samples) = (batch.epoch, batch.index, batch.len());
        let feeds: Vec<_> =
            model.inputs().iter().copied().zip(batch.tensors).chain(model.train_feeds().iter().cloned()).collect();
        let values = match session.run(&fetches, &feeds, &[model.train_op()]) {
            // The chief has ended the training while this step waited for the others.
            Err(error) if error.code() == Code::OutOfRange && !role.is_chief() => break,
            values => values?,
        };
        let at = values[1].scalar_value::<i64>()?;
        let loss = number(&values[0])?;
        if !loss.is_finite() {
            return Err(not_finite(loss, at));
        }
        let is_due = worker.stepped(at, loss, common.log_every)?;
        let now = Instant::now();
        if role.is_chief() {
            curve.points.push((at as f64, loss));
        }
        if let Some(log) = log.as_ref().filter(|_| is_due) {
            let metrics = values[2..].iter().map(number).collect::<Result<Vec<_>>>()?;
            let report = StepReport {
                step: at,
                epoch,
                batch: index,
                batches_per_epoch: job.train.batches_per_epoch(),
                loss,
                metrics: &metrics,
                names: watched,
                n_samples,
                took: now - before,
            };
            log.add(&report);
        }
        before = now;
    }
    let trained_s = began.elapsed().as_secs_f64();
    let was_stopped = stop.load(Ordering::Relaxed);
    session.close()?;
    let tell_ps = || match role.ends_ps {
        true => ended::tell(role.n_ps, role.replica, &connect),
        false => Ok(()),
    };
    if !role.is_chief() && view != View::Json {
        return tell_ps();
    }
    // The session ends with its hooks, so the last look at the weights is a session of its own.
    let session = connect(graph)?;
    let is_whole = role.is_chief() && !was_stopped;
    let ending = Ending {
        step: session.fetch(step.read())?.scalar_value::<i64>()?,
        trained_s,
        tested: job.test.as_ref().filter(|_| is_whole).map(|test| model.evaluate(&session, test)).transpose()?,
        text: job.closing.as_ref().filter(|_| is_whole).map(|closing| closing.text(&session)).transpose()?,
        took_s: began.elapsed().as_secs_f64(),
        cost: worker.last_loss,
        was_stopped,
        worker: Some(WorkerEnding { task: role.replica, own_steps: worker.n_own }),
        n_ranks: None,
        exchange: None,
    };
    if let Some(log) = &log {
        log.finish(&ending, &curve)?;
    }
    let weights = match view {
        View::Json => weights_checksum(graph, &session)?,
        View::Bar | View::Lines => 0,
    };
    tell_ps()?;
    match view {
        View::Json => ending.print_json(weights),
        View::Bar | View::Lines => ending.print_lines(common, view, &curve),
    }
}

/// What a worker reports of its steps.
struct Progress<'a> {
    view: View,
    role: &'a Role,
    /// The last global step.
    last: i64,
    n_own: u64,
    last_loss: Option<f64>,
    /// When the last report was, and the steps since.
    window: (Instant, u64),
}

impl Progress<'_> {
    fn begin(&self, step: i64) -> Result<()> {
        match self.view {
            View::Json => print(json!({ "event": "begin", "task": self.role.replica, "step": step, "of": self.last })),
            View::Bar | View::Lines => Ok(()),
        }
    }

    /// Counts a step, and reports it every `every` of its own. True if it did.
    fn stepped(&mut self, step: i64, loss: f64, every: u64) -> Result<bool> {
        (self.n_own, self.window.1, self.last_loss) = (self.n_own + 1, self.window.1 + 1, Some(loss));
        if !self.n_own.is_multiple_of(every.max(1)) {
            return Ok(false);
        }
        let (n_own, task) = (self.n_own, self.role.replica);
        let per_second = self.window.1 as f64 / self.window.0.elapsed().as_secs_f64().max(1e-9);
        self.window = (Instant::now(), 0);
        match self.view {
            View::Json => print(json!({
                "event": "step", "task": task, "step": step, "own_steps": n_own, "loss": loss,
                "per_second": per_second, "of": self.last,
            }))?,
            View::Bar | View::Lines => print(format_args!(
                "Step: {step}, Worker: {task}, Own steps: {n_own}, Cost: {loss:.4}, AvgTime: {:.2}ms",
                1e3 / per_second
            ))?,
        }
        Ok(true)
    }
}

/// The configuration of this task's server: devices, authentication and file access.
pub fn server_config(common: &Common, security: &Security, session: SessionConfig) -> Result<ServerConfig> {
    let files = file_access(&common.dirs()?)?;
    let shared_memory = !common.cluster.no_shared_memory;
    Ok(ServerConfig { session, files, security: security.clone(), shared_memory, ..ServerConfig::default() })
}
