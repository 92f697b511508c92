//! The steps that a task is the master of, and a periodic check for those that take too long.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::task::JoinSet;

use crate::doctor::{TaskReport, diagnose, silent};
use crate::task::peers::{Peers, TaskName};
use crate::wire::proto;

/// The timeout of a task's report.
const REPORT_DEADLINE: Duration = Duration::from_secs(1);

/// How often to check for overdue steps.
const PERIOD: Duration = Duration::from_secs(1);

/// When to log the same step again.
const REPORT_AGAIN_AFTER: Duration = Duration::from_secs(30);

/// The maximum number of steps diagnosed at once: if many are overdue, they likely have a common cause.
const MAX_REPORTED: usize = 3;

/// The steps that a task is the master of and that have not ended.
#[derive(Default)]
pub(crate) struct Mastered {
    steps: Mutex<HashMap<u64, RunningStep>>,
}

struct RunningStep {
    since: Instant,
    tasks: Vec<TaskName>,
    reported: Option<Instant>,
}

/// A step in the list, until this is dropped.
pub(crate) struct Listed {
    list: Arc<Mastered>,
    step_id: u64,
}

impl Mastered {
    /// Registers a step with parts on these tasks.
    pub fn begin(self: &Arc<Self>, step_id: u64, tasks: impl Iterator<Item = TaskName>) -> Listed {
        let running = RunningStep { since: Instant::now(), tasks: tasks.collect(), reported: None };
        self.steps.lock().insert(step_id, running);
        Listed { list: self.clone(), step_id }
    }

    /// The step `step_id`, or all steps if that is 0, as a message.
    pub fn report(&self, step_id: u64) -> Vec<proto::MasteredStep> {
        let steps = self.steps.lock();
        let wanted = steps.iter().filter(|(id, _)| step_id == 0 || **id == step_id);
        wanted
            .map(|(&id, running)| proto::MasteredStep {
                step_id: id as i64,
                age_ms: u64::try_from(running.since.elapsed().as_millis()).unwrap_or(u64::MAX),
                task: running.tasks.iter().map(ToString::to_string).collect(),
            })
            .collect()
    }

    /// The steps that are older than `age` and were not reported lately. Marks them as reported.
    fn overdue(&self, age: Duration) -> Vec<u64> {
        let mut steps = self.steps.lock();
        let is_due = |running: &RunningStep| {
            running.since.elapsed() >= age
                && running.reported.is_none_or(|reported| reported.elapsed() >= REPORT_AGAIN_AFTER)
        };
        let mut due: Vec<(&u64, &mut RunningStep)> = steps.iter_mut().filter(|(_, running)| is_due(running)).collect();
        due.sort_by_key(|(_, running)| running.since);
        due.into_iter()
            .map(|(&id, running)| {
                running.reported = Some(Instant::now());
                id
            })
            .collect()
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        self.list.steps.lock().remove(&self.step_id);
    }
}

/// Collects the reports of tasks about a step; 0 is all steps.
pub(crate) async fn ask(
    peers: &Arc<Peers>,
    tasks: impl IntoIterator<Item = TaskName>,
    step_id: u64,
) -> Vec<TaskReport> {
    let mut asking = JoinSet::new();
    // The master is always included: it knows which tasks take part.
    let tasks: BTreeSet<TaskName> = tasks.into_iter().chain([peers.own.clone()]).collect();
    for task in tasks {
        let Ok(worker) = peers.task(&task) else { continue };
        asking.spawn(async move {
            let call = worker.report(proto::KoloReportRequest { step_id: step_id as i64, probe: Vec::new() });
            let answer = tokio::time::timeout(REPORT_DEADLINE, call).await;
            TaskReport { report: answer.unwrap_or_else(|_| Err(silent(REPORT_DEADLINE))), task, link: None }
        });
    }
    let mut reports = Vec::with_capacity(asking.len());
    while let Some(report) = asking.join_next().await {
        reports.extend(report.ok());
    }
    reports
}

/// Logs what overdue steps wait for: each that has run longer than `report_after`, then again every half minute. Never
/// returns.
pub(crate) async fn watch(peers: Arc<Peers>, report_after: Duration) {
    loop {
        tokio::time::sleep(PERIOD.min(report_after.max(Duration::from_millis(10)))).await;
        let overdue = peers.mastered.overdue(report_after);
        if overdue.is_empty() {
            continue;
        }
        // All tasks and steps: what a step waits for at a queue or a barrier comes from steps of others.
        let reports = ask(&peers, peers.tasks().iter().cloned(), 0).await;
        for step_id in overdue.iter().take(MAX_REPORTED) {
            for finding in diagnose(&reports, report_after).into_iter().filter(|f| f.step_id == *step_id as i64) {
                match finding.is_idle {
                    // Many programs wait for work at a queue, so this is not a problem.
                    true => tracing::debug!(target: "kolo::doctor", "{}", finding.text),
                    false => tracing::warn!(target: "kolo::doctor", "{}", finding.text),
                }
            }
        }
        if overdue.len() > MAX_REPORTED {
            tracing::warn!(target: "kolo::doctor", "{} more steps are overdue", overdue.len() - MAX_REPORTED);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_listed_while_they_run_and_reported_once() {
        let list: Arc<Mastered> = Arc::default();
        let first = list.begin(7, [TaskName::new("ps", 0)].into_iter());
        let second = list.begin(8, [].into_iter());
        assert_eq!(list.report(0).len(), 2);
        assert_eq!(list.report(7)[0].task, ["/job:ps/replica:0/task:0"]);
        assert!(list.overdue(Duration::from_secs(3600)).is_empty());
        drop(second);
        assert_eq!(list.overdue(Duration::ZERO), [7]);
        assert!(list.overdue(Duration::ZERO).is_empty());
        drop(first);
        assert_eq!(list.report(0), []);
    }
}
