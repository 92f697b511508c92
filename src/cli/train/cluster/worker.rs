//! One worker: serves its own task, or finds it served already, and trains through it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use crate::cluster::Replicas;
use crate::tls::Security;
use crate::train::hooks::{CheckpointSaver, StopAtStep};
use crate::train::{MonitoredTrainingSession, global_step};
use crate::{ClusterSpec, Connect as _, Error, Graph, Result, Server, ServerConfig, Session, SessionConfig};
use serde_json::json;

use super::{Role, TaskLocation};
use crate::cli::print;
use crate::cli::serve::file_access;
use crate::cli::train::job::{Job, stop_on_ctrl_c};
use crate::cli::train::options::Common;
use crate::cli::train::progress::View;

/// Trains as one of several workers.
pub fn run<'g>(
    graph: &'g Graph,
    common: &Common,
    job: Job<'g>,
    role: &Role,
    updates: &Replicas,
    n_steps: u64,
) -> Result<()> {
    let began = Instant::now();
    let stop = stop_on_ctrl_c();
    if common.cluster.with_parent {
        end_with_parent(stop.clone());
    }
    let security = common.cluster.security.read()?;
    // Ends with this function.
    let server = match &role.location {
        TaskLocation::Here(cluster) => {
            Some(Server::new(cluster, "worker", role.task, server_config(common, cluster, role.task, &security)?)?)
        }
        TaskLocation::At(_) => None,
    };
    let target = match (&role.location, &server) {
        (TaskLocation::At(target), _) => target.clone(),
        (TaskLocation::Here(_), server) => server.as_ref().map(Server::target).unwrap_or_default(),
    };
    let own = format!("/job:worker/task:{}", role.task);
    let config = SessionConfig { device_filters: vec!["/job:ps".to_owned(), own], ..SessionConfig::default() };
    let connect =
        move |graph: &Graph| Session::connect_secured(&target, graph, config.clone(), &security).map(Arc::new);
    let open = connect.clone();

    let last = common.max_steps.unwrap_or(i64::try_from(n_steps).unwrap_or(i64::MAX));
    let mut builder = MonitoredTrainingSession::new(graph)
        .source(open)
        .is_chief(role.is_chief())
        .count_steps(None)
        .save_summaries(None)
        .save_checkpoint(None)
        .hook(StopAtStep::last(last));
    builder = builder.boxed_hook(updates.hook(graph, role.is_chief())?);
    if let (Some(dir), true) = (&common.checkpoint_dir, role.is_chief()) {
        builder = builder.checkpoint_dir(dir).chief_only_hook(CheckpointSaver::new(dir, common.checkpoint_every));
    }
    let mut session = builder.build()?;
    let step = global_step(graph).ok_or_else(|| Error::internal("the model counts no steps"))?;
    let view = View::choose(common.json);
    let (mut n_own, mut last_loss, mut window) = (0u64, f64::NAN, (Instant::now(), 0u64));
    let mut batches = job.train.batches()?;
    let model = &job.model;
    while !session.should_stop() && !stop.load(Ordering::Relaxed) {
        let Some(batch) = batches.next() else { break };
        let feeds: Vec<_> =
            model.inputs().iter().copied().zip(batch?.tensors).chain(model.train_feeds().iter().cloned()).collect();
        let values = session.run(&[model.loss(), step.read()], &feeds, &[model.train_op()])?;
        (n_own, window.1) = (n_own + 1, window.1 + 1);
        last_loss = f64::from(values[0].scalar_value::<f32>()?);
        let at = values[1].scalar_value::<i64>()?;
        if n_own.is_multiple_of(common.log_every.max(1)) {
            let per_second = window.1 as f64 / window.0.elapsed().as_secs_f64().max(1e-9);
            window = (Instant::now(), 0);
            match view {
                View::Json => print(json!({
                    "event": "step", "task": role.task, "step": at, "own_steps": n_own, "loss": last_loss,
                    "per_second": per_second, "of": last,
                }))?,
                _ => print(format_args!(
                    "Step: {at}, Worker: {}, Own steps: {n_own}, Cost: {last_loss:.4}, AvgTime: {:.2}ms",
                    role.task,
                    1e3 / per_second
                ))?,
            }
        }
    }
    let trained = began.elapsed().as_secs_f64();
    // The session ends with its hooks, so the last look at the weights is a session of its own.
    session.close()?;
    if role.is_chief() {
        let session = connect(graph)?;
        let tested = job.test.as_ref().map(|test| model.evaluate(&session, test)).transpose()?;
        let accuracy = tested.as_ref().and_then(|t| t.metrics.iter().find(|(name, _)| name == "accuracy").map(|m| m.1));
        let at = session.fetch(step.read())?.scalar_value::<i64>()?;
        match view {
            View::Json => print(json!({
                "event": "end", "task": role.task, "step": at, "own_steps": n_own, "test_accuracy": accuracy,
                "test_loss": tested.as_ref().map(|t| t.loss), "final_cost": last_loss, "train_time_s": trained,
            }))?,
            _ => {
                if let Some(accuracy) = accuracy {
                    print(format_args!("Test-Accuracy: {:.2}%", accuracy * 100.0))?;
                }
                print(format_args!("Total Time: {trained:.2}s"))?;
                print(format_args!("Final Cost: {last_loss:.4}"))?;
            }
        }
    } else if view == View::Json {
        print(json!({
            "event": "end", "task": role.task, "own_steps": n_own, "final_cost": last_loss, "train_time_s": trained,
        }))?;
    }
    Ok(())
}

/// The configuration of this task's server: authentication and file access.
fn server_config(common: &Common, cluster: &ClusterSpec, task: u32, security: &Security) -> Result<ServerConfig> {
    if let Some(dir) = &common.checkpoint_dir {
        std::fs::create_dir_all(dir).map_err(|error| {
            Error::failed_precondition(format!("the folder '{}' cannot be made: {error}", dir.display()))
        })?;
    }
    let dirs: Vec<_> = common.checkpoint_dir.iter().cloned().collect();
    let files = file_access(&dirs, cluster, "worker", task)?;
    let shared_memory = !common.cluster.no_shared_memory;
    Ok(ServerConfig { files, security: security.clone(), shared_memory, ..ServerConfig::default() })
}

/// Sets the flag when standard input ends.
fn end_with_parent(stop: Arc<std::sync::atomic::AtomicBool>) {
    let watch = move || {
        let mut sink = std::io::sink();
        // Nothing is ever written there; it ends with the process that holds the other end.
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut sink);
        stop.store(true, Ordering::Relaxed);
    };
    if let Err(error) = std::thread::Builder::new().name("kolo-parent".to_owned()).spawn(watch) {
        tracing::warn!("the end of the starting process will not be noticed: {error}");
    }
}
