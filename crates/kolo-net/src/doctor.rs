//! Says what a cluster waits for: asks all tasks, follows who waits for whom, and puts the root into one sentence.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kolo_core::{Error, Result};

use crate::peers::TaskName;
use crate::proto::{KoloReportResponse, StepReport, WaitReport};

/// What one task answered.
pub struct TaskReport {
    /// The task.
    pub task: TaskName,
    /// Its answer, or why there is none.
    pub report: Result<KoloReportResponse>,
}

/// What is wrong with one step.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// The step.
    pub step_id: i64,
    /// How long the task that has known it longest has done so.
    pub age: Duration,
    /// The task that the others wait for.
    pub root: String,
    /// The tasks that wait for it, directly or not.
    pub waiting: Vec<String>,
    /// In words.
    pub text: String,
}

/// The steps that have waited for at least `overdue`, the oldest first.
pub fn diagnose(reports: &[TaskReport], overdue: Duration) -> Vec<Finding> {
    let mut steps: BTreeMap<i64, BTreeMap<String, &StepReport>> = BTreeMap::new();
    for TaskReport { task, report } in reports {
        for step in report.iter().flat_map(|report| &report.step) {
            steps.entry(step.step_id).or_default().insert(task.to_string(), step);
        }
    }
    let mut findings: Vec<Finding> = steps
        .iter()
        .filter_map(|(&step_id, tasks)| {
            let age = tasks.values().map(|step| step.age_ms).max().map(Duration::from_millis)?;
            (age >= overdue).then(|| explain(step_id, age, tasks, reports))
        })
        .collect();
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.age));
    findings
}

/// Follows the waits of one step to the task that waits for nobody.
fn explain(step_id: i64, age: Duration, tasks: &BTreeMap<String, &StepReport>, reports: &[TaskReport]) -> Finding {
    // Who waits for whom. A task that says nothing may still be waited for.
    let mut edges: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (task, step) in tasks {
        for wait in &step.wait {
            let (from, to) = match wait.for_task.is_empty() {
                true => (task.as_str(), wait.from_task.as_str()),
                false => (wait.for_task.as_str(), task.as_str()),
            };
            if !to.is_empty() && from != to {
                edges.entry(from).or_default().insert(to);
            }
        }
    }
    let roots = roots(&edges, tasks);
    let root =
        roots.first().map_or_else(|| tasks.keys().next().cloned().unwrap_or_default(), |root| (*root).to_owned());
    let waiting: Vec<String> = edges.keys().filter(|task| ***task != root).map(|task| (*task).to_owned()).collect();
    let n_tasks = tasks.len().max(waiting.len() + 1);
    let why = tasks.get(root.as_str()).map_or_else(
        || absent(&root, reports),
        |step| describe(step, reports.iter().find(|report| report.task.to_string() == root)),
    );
    let text = match waiting.len() {
        0 => format!("step {step_id} on {root} ({:.1} s): {why}", age.as_secs_f64()),
        n => format!("step {step_id}: {n} of {n_tasks} tasks wait for {root} ({why})"),
    };
    Finding { step_id, age, root, waiting, text }
}

/// The tasks that others wait for and that wait for no other task; those that wait for something of their own first.
fn roots<'a>(edges: &BTreeMap<&'a str, BTreeSet<&'a str>>, tasks: &'a BTreeMap<String, &StepReport>) -> Vec<&'a str> {
    let all: BTreeSet<&str> = edges.values().flatten().copied().chain(tasks.keys().map(String::as_str)).collect();
    let mut roots: Vec<&str> = all.into_iter().filter(|task| !edges.contains_key(task)).collect();
    let n_waiting = |task: &str| edges.values().filter(|to| to.contains(task)).count();
    let has_own_wait = |task: &str| {
        tasks.get(task).is_none_or(|step| step.wait.iter().any(|wait| wait.from_task.is_empty()) || !step.has_begun)
    };
    roots.sort_by_key(|task| (std::cmp::Reverse(n_waiting(task)), !has_own_wait(task)));
    roots
}

/// What a task does about a step, in words.
fn describe(step: &StepReport, report: Option<&TaskReport>) -> String {
    let progress = report.and_then(|report| report.report.as_ref().ok()).map_or(String::new(), |report| {
        match report.last_ended_ms {
            -1 => "alive, has ended no step yet".to_owned(),
            ms => format!("alive, last progress {:.1} s ago", ms as f64 / 1e3),
        }
    });
    let own = step.wait.iter().find(|wait| wait.from_task.is_empty());
    let doing = match own {
        Some(WaitReport { node, op, lasts_ms, .. }) => {
            format!("in op {node} ({op}) for {:.1} s", *lasts_ms as f64 / 1e3)
        }
        None if !step.has_begun => "its master has not told it to run the step".to_owned(),
        None if step.n_running > 0 => format!("{} kernel(s) running", step.n_running),
        None => match step.wait.first() {
            Some(wait) => format!("waits for {} of {}", wait.tensor, wait.from_task),
            None => "has run its part".to_owned(),
        },
    };
    [progress, doing].into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join(", ")
}

/// What is known of a task that did not report the step.
fn absent(root: &str, reports: &[TaskReport]) -> String {
    match reports.iter().find(|report| report.task.to_string() == root) {
        Some(TaskReport { report: Err(error), .. }) => format!("does not answer: {}", first_line(error)),
        Some(_) => "alive, but does not know the step: it may have restarted".to_owned(),
        None => "not asked".to_owned(),
    }
}

fn first_line(error: &Error) -> String {
    error.message().lines().next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(task: u32, wait: Vec<WaitReport>) -> TaskReport {
        let step = StepReport { step_id: 4711, age_ms: 3200, has_begun: true, wait, n_running: 0 };
        let report = KoloReportResponse { step: vec![step], last_ended_ms: 3100, ..KoloReportResponse::default() };
        TaskReport { task: TaskName::new("worker", task), report: Ok(report) }
    }

    fn recv(from: u32) -> WaitReport {
        let from_task = TaskName::new("worker", from).to_string();
        WaitReport {
            node: "g_S1".into(),
            op: "_Recv".into(),
            from_task,
            tensor: "edge_1_g".into(),
            ..Default::default()
        }
    }

    #[test]
    fn the_root_of_a_chain_is_named_with_what_it_does() {
        let read =
            WaitReport { node: "input/read".into(), op: "QueueDequeueV2".into(), lasts_ms: 3100, ..Default::default() };
        let reports = [report(0, vec![recv(1)]), report(1, vec![read]), report(2, vec![recv(0)])];
        let findings = diagnose(&reports, Duration::from_secs(1));
        assert_eq!(findings.len(), 1);
        assert_eq!(
            findings[0].text,
            "step 4711: 2 of 3 tasks wait for /job:worker/replica:0/task:1 (alive, last progress 3.1 s ago, in op \
             input/read (QueueDequeueV2) for 3.1 s)"
        );
        assert!(diagnose(&reports, Duration::from_secs(10)).is_empty());
    }

    #[test]
    fn a_task_that_does_not_answer_is_the_root_if_others_wait_for_it() {
        let silent = TaskReport { task: TaskName::new("worker", 1), report: Err(Error::unavailable("refused")) };
        let findings = diagnose(&[report(0, vec![recv(1)]), silent], Duration::ZERO);
        assert_eq!(
            findings[0].text,
            "step 4711: 1 of 2 tasks wait for /job:worker/replica:0/task:1 (does not answer: refused)"
        );
    }
}
