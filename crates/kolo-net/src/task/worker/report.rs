//! A task's status report: what it is running and waiting for.

use std::time::Duration;

use kolo_ops::RendezvousKey;
use kolo_ops::comm::transfer::edge_key;

use super::Worker;
use super::step::{Activity, Step};
use crate::task::peers::TaskName;
use crate::wire::proto;

/// Stands for an op in a [`proto::WaitReport`]: the step waits for room on the disk of the journal.
pub(crate) const FULL_JOURNAL: &str = "a full journal";

/// The maximum number of waits listed for one step.
const MAX_WAITS: usize = 100;

/// How long a report waits for what devices say about steps. Those that run many small nodes answer in between.
const LOOK: Duration = Duration::from_millis(50);

pub(super) async fn report(worker: &Worker, request: proto::KoloReportRequest) -> proto::KoloReportResponse {
    let step_id = request.step_id as u64;
    let (n_ended, last_ended) = worker.steps.progress();
    let mut steps = worker.steps.all();
    steps.retain(|step| step_id == 0 || step.id == step_id);
    steps.sort_by_key(|step| step.since());
    let asked: Vec<_> = steps.iter().map(|step| step.look()).collect();
    let until = tokio::time::Instant::now() + LOOK;
    let own = worker.peers.own.to_string();
    let full = worker.full_journal();
    let mut reports = Vec::with_capacity(steps.len());
    for (step, asked) in steps.iter().zip(asked) {
        reports.push(step_report(step, asked.answer(until).await, &own, full.as_ref()));
    }
    proto::KoloReportResponse {
        step: reports,
        task: own,
        n_ended,
        last_ended_ms: last_ended.map_or(-1, |ago| millis(ago) as i64),
        n_sessions: worker.sessions.lock().len() as u64,
        up_ms: millis(worker.started.elapsed()),
        mastered: worker.peers.mastered.report(step_id),
        cluster: Some(worker.peers.cluster.to_def()),
        probe: request.probe,
    }
}

fn step_report(step: &Step, activity: Activity, own: &str, full: Option<&(Duration, String)>) -> proto::StepReport {
    let mut wait: Vec<proto::WaitReport> = Vec::new();
    for waiting in &activity.waits {
        let mut report = proto::WaitReport {
            node: waiting.node.name.to_string(),
            op: waiting.node.op().to_owned(),
            lasts_ms: millis(waiting.lasts),
            ..proto::WaitReport::default()
        };
        // A receive names the task that it waits for.
        if let Ok(edge) = edge_key(&waiting.node.attrs) {
            let key = RendezvousKey { edge, frame_iteration: Default::default() };
            report.from_task = task_of(key.part(0));
            report.tensor = key.part(3).to_owned();
        }
        wait.push(report);
    }
    for waiting in step.transfers.waits() {
        let for_task = task_of(waiting.key.part(2));
        if !waiting.is_remote && for_task != own {
            wait.push(proto::WaitReport {
                lasts_ms: millis(waiting.since.elapsed()),
                from_task: own.to_owned(),
                tensor: waiting.key.part(3).to_owned(),
                for_task,
                ..proto::WaitReport::default()
            });
        }
    }
    // Its nodes have run, and it cannot be acknowledged.
    if let Some((lasts, dir)) = full.filter(|_| step.is_begun() && wait.is_empty() && activity.n_runners == 0) {
        wait.push(proto::WaitReport {
            node: dir.clone(),
            op: FULL_JOURNAL.to_owned(),
            lasts_ms: millis(*lasts),
            ..proto::WaitReport::default()
        });
    }
    wait.sort_by_key(|wait| std::cmp::Reverse(wait.lasts_ms));
    wait.truncate(MAX_WAITS);
    proto::StepReport {
        step_id: step.id as i64,
        age_ms: millis(step.since().elapsed()),
        has_begun: step.is_begun(),
        wait,
        n_running: activity.n_runners as u32,
        n_unattended: activity.n_unattended as u32,
    }
}

fn task_of(device: &str) -> String {
    TaskName::of_device(device).map(|task| task.to_string()).unwrap_or_default()
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
