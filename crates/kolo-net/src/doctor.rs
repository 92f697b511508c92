//! Diagnoses a stuck cluster: collects a report from every task, follows the chain of waiting tasks, and describes the
//! root cause in one sentence. A step that waits at a queue, an accumulator or a barrier waits for another step to deliver
//! there: the chain goes on with a task that does not respond, or else with a step that has something of its own to do. Links
//! are measured from here (`links.rs`), so that a slow peer has a name.

mod links;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kolo_core::{Code, Error, Result};
use tokio::task::JoinSet;

use crate::client::connect::client_runtime;
use crate::cluster::ClusterSpec;
use crate::task::peers::TaskName;
use crate::task::services::WorkerService as _;
use crate::task::worker::report::FULL_JOURNAL;
use crate::transport::grpc;
use crate::transport::tls::Security;
use crate::wire::proto::{KoloReportRequest, KoloReportResponse, MasteredStep, StepReport, WaitReport};

pub use links::Link;

/// The report of one task.
pub struct TaskReport {
    /// The task.
    pub task: TaskName,
    /// Its report, or why there is none.
    pub report: Result<KoloReportResponse>,
    /// The link to it, if that was measured.
    pub link: Option<Link>,
}

impl TaskReport {
    /// `worker:1`
    pub fn short_name(&self) -> String {
        self.task.short()
    }
}

/// The diagnosis of one step.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// The step.
    pub step_id: i64,
    /// The step's age, as the largest that any task reports.
    pub age: Duration,
    /// The task that the others wait for.
    pub root: String,
    /// The tasks that wait for it, directly or not.
    pub waiting: Vec<String>,
    /// A tensor of the root that another task waits for; empty if there is none.
    pub tensor: String,
    /// True if the step only waits for work: its root waits at a queue, and no other task needs a tensor from it.
    pub is_idle: bool,
    /// The diagnosis in one sentence.
    pub text: String,
}

/// Options of [`examine`].
#[derive(Clone, Debug)]
pub struct Options {
    /// Authenticates to the tasks.
    pub security: Security,
    /// Steps younger than this are ignored.
    pub overdue: Duration,
    /// The timeout of a task's report.
    pub deadline: Duration,
}

/// The result of [`examine`].
pub struct Examination {
    /// The report of each task, in the cluster's order.
    pub tasks: Vec<TaskReport>,
    /// Steps that are overdue, and why.
    pub findings: Vec<Finding>,
    /// Tasks that were started with another cluster, and where it differs.
    pub differences: Vec<String>,
    /// Tasks behind a slow link, and what was measured.
    pub slow: Vec<String>,
}

impl Examination {
    /// The number of tasks that do not respond, have another cluster or are behind a slow link, and of steps that are stuck.
    pub fn n_problems(&self) -> usize {
        let silent = self.tasks.iter().filter(|task| task.report.is_err()).count();
        let stuck = self.findings.iter().filter(|finding| !finding.is_idle).count();
        silent + stuck + self.differences.len() + self.slow.len()
    }
}

/// Collects the reports of all tasks of a cluster, in parallel, and diagnoses its steps.
pub fn examine(cluster: &ClusterSpec, options: &Options) -> Result<Examination> {
    let runtime = client_runtime()?;
    let links = grpc::LinkOptions {
        tls: options.security.client_tls()?,
        credentials: options.security.credentials(),
        deadline: Some(options.deadline),
        wait_for_peer: Duration::ZERO,
        ..grpc::LinkOptions::default()
    };
    let mut asking = JoinSet::new();
    for (place, (job, task, address)) in cluster.all_tasks().enumerate() {
        let task = TaskName::new(job, task);
        let peer = grpc::GrpcPeer::new(task.to_string(), address, links.clone(), runtime.clone());
        let deadline = options.deadline;
        let ask = async move {
            let report = match peer.report(KoloReportRequest { step_id: 0, probe: Vec::new() }).await {
                Err(error) if error.code() == Code::DeadlineExceeded => Err(match peer.trouble() {
                    Some((_, why)) => Error::unavailable(format!("cannot be reached: {why}")),
                    None => silent(deadline),
                }),
                Err(error) if error.code() == Code::Unimplemented => {
                    Err(Error::unimplemented("alive, but TensorFlow's: it cannot say what it is doing"))
                }
                Err(error) if error.code() == Code::Unavailable => Err(Error::unavailable(match peer.trouble() {
                    Some((_, why)) => format!("cannot be reached: {why}"),
                    None => error.message().to_owned(),
                })),
                other => other,
            };
            let link = match &report {
                Ok(_) => Some(links::measure(&peer).await),
                Err(_) => None,
            };
            (place, TaskReport { task, report, link })
        };
        asking.spawn_on(ask, &runtime);
    }
    let mut tasks = runtime.block_on(async move {
        let mut tasks = Vec::with_capacity(asking.len());
        while let Some(task) = asking.join_next().await {
            tasks.extend(task.ok());
        }
        tasks
    });
    tasks.sort_by_key(|(place, _)| *place);
    let tasks: Vec<TaskReport> = tasks.into_iter().map(|(_, task)| task).collect();
    let differences = tasks.iter().filter_map(|task| difference(cluster, task)).collect();
    let slow = slow(&tasks);
    Ok(Examination { findings: diagnose(&tasks, options.overdue), tasks, differences, slow })
}

/// The error of a task that accepts connections and does not respond.
pub(crate) fn silent(deadline: Duration) -> Error {
    Error::deadline_exceeded(format!("does not answer (stopped or overloaded): nothing came in {deadline:?}"))
}

/// The tasks behind a slow link.
fn slow(tasks: &[TaskReport]) -> Vec<String> {
    let trouble = |task: &TaskReport| Some((task.short_name(), task.link?.trouble()?));
    let slow: Vec<(String, String)> = tasks.iter().filter_map(trouble).collect();
    let n_measured = tasks.iter().filter(|task| task.link.is_some()).count();
    let note = match slow.len() == n_measured && n_measured > 1 {
        true => " (as all tasks are: it may be the link of this machine)",
        false => "",
    };
    slow.into_iter().map(|(task, why)| format!("{task} is behind a slow link: {why}{note}")).collect()
}

/// Where a task's cluster spec differs from ours.
fn difference(cluster: &ClusterSpec, task: &TaskReport) -> Option<String> {
    let theirs = task.report.as_ref().ok()?;
    let name = task.short_name();
    if !theirs.task.is_empty() && theirs.task != task.task.to_string() {
        return Some(format!("at the address of {name} there is {}", short(&theirs.task)));
    }
    let theirs = ClusterSpec::from_def(theirs.cluster.as_ref()?).ok()?;
    let difference = cluster.first_difference(&theirs)?;
    Some(format!("{name} was started with another cluster: {difference}"))
}

/// What all tasks together report about a step.
#[derive(Default)]
struct StepKnowledge<'a> {
    /// The reports of the tasks that run a part of it.
    parts: BTreeMap<String, &'a StepReport>,
    /// Its master.
    master: Option<(String, &'a MasteredStep)>,
}

/// The steps that have waited for at least `overdue`, the oldest first.
pub fn diagnose(reports: &[TaskReport], overdue: Duration) -> Vec<Finding> {
    let mut steps: BTreeMap<i64, StepKnowledge<'_>> = BTreeMap::new();
    for TaskReport { task, report, .. } in reports {
        let Ok(report) = report else { continue };
        for step in &report.step {
            steps.entry(step.step_id).or_default().parts.insert(task.to_string(), step);
        }
        for step in &report.mastered {
            steps.entry(step.step_id).or_default().master = Some((task.to_string(), step));
        }
    }
    let mut findings: Vec<(Finding, Option<MeetingPoint>)> = steps
        .iter()
        .filter_map(|(&step_id, known)| {
            let ages = known.parts.values().map(|step| step.age_ms);
            let age = ages.chain(known.master.iter().map(|(_, step)| step.age_ms)).max().map(Duration::from_millis)?;
            Some(explain(step_id, age, known, reports))
        })
        .collect();
    findings.retain(|(finding, _)| finding.age >= overdue);
    // What others wait for at a meeting point is what has something else to wait for, or to do, and for as long.
    let busy: Vec<Finding> =
        findings.iter().filter(|(_, meeting)| meeting.is_none()).map(|(finding, _)| finding.clone()).collect();
    let mut findings: Vec<Finding> = findings
        .into_iter()
        .map(|(finding, meeting)| match meeting {
            Some(meeting) => follow(finding, &meeting, &busy, reports),
            None => finding,
        })
        .collect();
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.age));
    findings
}

/// Where a step waits for other steps: a node at a queue, an accumulator or a barrier.
struct MeetingPoint {
    node: String,
    op: String,
    lasts: Duration,
}

impl MeetingPoint {
    /// `None` if the node waits for something else.
    fn of(wait: &WaitReport) -> Option<MeetingPoint> {
        let is_meeting = ["Queue", "Accumulator", "Barrier", "Stage"].iter().any(|word| wait.op.contains(word));
        let lasts = Duration::from_millis(wait.lasts_ms);
        is_meeting.then(|| MeetingPoint { node: wait.node.clone(), op: wait.op.clone(), lasts })
    }
}

/// Goes on from a step that waits at a meeting point: to the tasks that do not respond, or else to the oldest step that has
/// not come to one.
fn follow(finding: Finding, meeting: &MeetingPoint, busy: &[Finding], reports: &[TaskReport]) -> Finding {
    let silent: Vec<(String, String)> = reports.iter().filter_map(silence).collect();
    let step_id = finding.step_id;
    let busy = busy.iter().filter(|other| other.step_id != step_id).max_by_key(|other| other.age);
    let (root, culprit) = match (silent.first(), busy) {
        (Some((first, _)), _) => {
            let all: Vec<String> = silent.iter().map(|(task, why)| format!("{} ({why})", short(task))).collect();
            (first.clone(), all.join(" and "))
        }
        (None, Some(other)) => (other.root.clone(), format!("{}, where {}", short(&other.root), other.text)),
        (None, None) => return finding,
    };
    let MeetingPoint { node, op, lasts } = meeting;
    let at = short(&finding.root);
    let mut waiting = finding.waiting;
    if finding.root != root && !waiting.contains(&finding.root) {
        waiting.push(finding.root);
    }
    waiting.retain(|task| *task != root);
    let lasts = lasts.as_secs_f64();
    let text = format!(
        "step {step_id} waits in {node} ({op}) on {at} for {lasts:.1} s, to which this has not delivered: {culprit}"
    );
    Finding { root, waiting, is_idle: false, text, ..finding }
}

/// A task that does not respond, and how; not one that only cannot report.
fn silence(report: &TaskReport) -> Option<(String, String)> {
    let error = report.report.as_ref().err()?;
    (error.code() != Code::Unimplemented).then(|| (report.task.to_string(), first_line(error)))
}

/// Follows the waits of one step to the task that waits for no other, and to the meeting point where that waits.
fn explain(
    step_id: i64,
    age: Duration,
    known: &StepKnowledge<'_>,
    reports: &[TaskReport],
) -> (Finding, Option<MeetingPoint>) {
    if let Some(finding) = abandoned(step_id, age, known, reports) {
        return (finding, None);
    }
    let is_silent = |task: &str| reports.iter().any(|report| report.report.is_err() && report.task.to_string() == task);
    let edges = edges(known, reports, &is_silent);
    let root = root(&edges, known, &is_silent);
    let waiting: Vec<String> = edges.keys().filter(|task| ***task != root).map(|task| (*task).to_owned()).collect();
    let mut all: BTreeSet<&str> = edges.keys().copied().chain(edges.values().flatten().copied()).collect();
    all.extend(known.parts.keys().map(String::as_str));
    let needed = needed(&root, known);
    let part = known.parts.get(root.as_str());
    let why = part.map_or_else(
        || absent(&root, reports),
        |step| describe(step, reports.iter().find(|report| report.task.to_string() == root)),
    );
    let name = short(&root);
    let mut text = match waiting.len() {
        0 => format!("step {step_id} on {name} ({:.1} s): {why}", age.as_secs_f64()),
        n => format!("step {step_id}: {n} of {} tasks wait for {name} ({why})", all.len()),
    };
    if let Some((tensor, by, lasts)) = &needed {
        text += &format!("; {by} needs its tensor {tensor}, for {:.1} s", lasts.as_secs_f64());
    }
    let own = part.and_then(|step| step.wait.iter().find(|wait| wait.from_task.is_empty()));
    let is_idle = needed.is_none() && own.is_some_and(|wait| wait.op.contains("Queue"));
    let meeting = own.and_then(MeetingPoint::of).filter(|_| !is_silent(&root));
    let tensor = needed.map(|(tensor, ..)| tensor).unwrap_or_default();
    (Finding { step_id, age, root, waiting, tensor, is_idle, text }, meeting)
}

/// A step whose parts have nothing to do, while no task that responds is its master: the master is one of those that do not.
fn abandoned(step_id: i64, age: Duration, known: &StepKnowledge<'_>, reports: &[TaskReport]) -> Option<Finding> {
    let is_idle = |part: &StepReport| part.wait.is_empty() && part.n_running == 0 && part.n_unattended == 0;
    if known.master.is_some() || !known.parts.values().all(|part| is_idle(part)) {
        return None;
    }
    let silent: Vec<(String, String)> = reports.iter().filter_map(silence).collect();
    let (root, _) = silent.first()?.clone();
    let masters: Vec<String> = silent.iter().map(|(task, why)| format!("{} ({why})", short(task))).collect();
    let waiting: Vec<String> = known.parts.keys().cloned().collect();
    let at: Vec<String> = waiting.iter().map(|task| short(task)).collect();
    let (at, lasts, masters) = (at.join(", "), age.as_secs_f64(), masters.join(" or "));
    let text = format!("step {step_id} on {at} waits for its master for {lasts:.1} s, which is {masters}");
    Some(Finding { step_id, age, root, waiting, tensor: String::new(), is_idle: false, text })
}

/// Which task waits for which. A task that does not respond can be waited for, but its own waits are ignored: it is the
/// problem.
fn edges<'a>(
    known: &'a StepKnowledge<'_>,
    reports: &[TaskReport],
    is_silent: &impl Fn(&str) -> bool,
) -> BTreeMap<&'a str, BTreeSet<&'a str>> {
    let mut edges: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let mut add = |from: &'a str, to: &'a str| {
        if !to.is_empty() && from != to && !is_silent(from) {
            edges.entry(from).or_default().insert(to);
        }
    };
    for (task, step) in &known.parts {
        for wait in &step.wait {
            match wait.for_task.is_empty() {
                true => add(task, &wait.from_task),
                false => add(&wait.for_task, task),
            }
        }
    }
    // A master waits for all tasks that have not ended their parts.
    let Some((master, step)) = &known.master else { return edges };
    for task in &step.task {
        let answer = reports.iter().find(|report| report.task.to_string() == *task).map(|report| &report.report);
        let waits = match (known.parts.get(task), answer) {
            (Some(part), _) => !has_ended(part),
            (None, Some(Err(_))) => true,
            // It has started since the step began, so it does not have the step.
            (None, Some(Ok(report))) => report.up_ms < step.age_ms,
            (None, None) => false,
        };
        if waits {
            add(master, task);
        }
    }
    edges
}

fn has_ended(part: &StepReport) -> bool {
    part.has_begun && part.wait.is_empty() && part.n_running == 0 && part.n_unattended == 0
}

/// The task that others wait for and that waits for no other, or, if there is a cycle, one that also waits for
/// something of its own.
fn root(
    edges: &BTreeMap<&str, BTreeSet<&str>>,
    known: &StepKnowledge<'_>,
    is_silent: &impl Fn(&str) -> bool,
) -> String {
    let all: BTreeSet<&str> = edges.values().flatten().copied().chain(known.parts.keys().map(String::as_str)).collect();
    let n_waiting = |task: &str| edges.values().filter(|to| to.contains(task)).count();
    let has_own = |task: &str| {
        known.parts.get(task).is_none_or(|step| {
            step.n_running > 0 || !step.has_begun || step.wait.iter().any(|wait| wait.from_task.is_empty())
        })
    };
    let best = all.into_iter().min_by_key(|task| {
        let is_awaited = n_waiting(task) > 0;
        let stands_still = known.parts.get(*task).is_some_and(|part| part.n_unattended > 0 && part.n_running == 0);
        let is_culprit = is_awaited && (is_silent(task) || stands_still);
        (!is_culprit, edges.contains_key(task), std::cmp::Reverse(n_waiting(task)), !has_own(task))
    });
    let master = || known.master.as_ref().map(|(master, _)| master.clone()).unwrap_or_default();
    best.map_or_else(master, str::to_owned)
}

/// The tensor of a task that another one has waited for longest: its name, the waiting task, and how long.
fn needed(root: &str, known: &StepKnowledge<'_>) -> Option<(String, String, Duration)> {
    let waits = known.parts.iter().flat_map(|(task, step)| step.wait.iter().map(move |wait| (task, wait)));
    let of_root = waits.filter_map(|(task, wait)| match (wait.from_task == root, wait.for_task.is_empty()) {
        (true, true) if task != root => Some((task.as_str(), wait)),
        (true, false) if wait.for_task != root => Some((wait.for_task.as_str(), wait)),
        _ => None,
    });
    let (by, wait) = of_root.filter(|(_, wait)| !wait.tensor.is_empty()).max_by_key(|(_, wait)| wait.lasts_ms)?;
    Some((wait.tensor.clone(), short(by), Duration::from_millis(wait.lasts_ms)))
}

/// `worker:1` for `/job:worker/replica:0/task:1`.
fn short(task: &str) -> String {
    TaskName::of_device(task).map_or_else(|_| task.to_owned(), |task| task.short())
}

/// What a task is doing for a step, as text.
fn describe(step: &StepReport, report: Option<&TaskReport>) -> String {
    let progress = report.and_then(|report| report.report.as_ref().ok()).map_or(String::new(), |report| {
        match report.last_ended_ms {
            -1 => "alive, has ended no step yet".to_owned(),
            ms => format!("alive, last progress {:.1} s ago", ms as f64 / 1e3),
        }
    });
    let own = step.wait.iter().find(|wait| wait.from_task.is_empty());
    let doing = match own {
        Some(WaitReport { node, op, lasts_ms, .. }) if op == FULL_JOURNAL => {
            format!("waits for room on the disk of its journal '{node}' for {:.1} s", *lasts_ms as f64 / 1e3)
        }
        Some(WaitReport { node, op, lasts_ms, .. }) => {
            format!("in op {node} ({op}) for {:.1} s", *lasts_ms as f64 / 1e3)
        }
        None if !step.has_begun => "its master has not told it to run the step".to_owned(),
        None if step.n_unattended > 0 && step.n_running == 0 => {
            format!("{} node(s) are ready and nobody runs them, a fault of Kolo's: please report it", step.n_unattended)
        }
        None if step.n_running > 0 => format!("{} kernel(s) running", step.n_running),
        None => match step.wait.iter().find(|wait| wait.for_task.is_empty()) {
            Some(wait) => format!("waits for {} of {}", wait.tensor, short(&wait.from_task)),
            None => "has run its part".to_owned(),
        },
    };
    [progress, doing].into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join(", ")
}

/// What is known of a task that did not report the step.
fn absent(root: &str, reports: &[TaskReport]) -> String {
    match reports.iter().find(|report| report.task.to_string() == root) {
        Some(TaskReport { report: Err(error), .. }) => first_line(error),
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
        let step = StepReport { step_id: 4711, age_ms: 3200, has_begun: true, wait, ..StepReport::default() };
        let report = KoloReportResponse { step: vec![step], last_ended_ms: 3100, ..KoloReportResponse::default() };
        TaskReport { task: TaskName::new("worker", task), report: Ok(report), link: None }
    }

    fn recv(from: u32) -> WaitReport {
        let from_task = TaskName::new("worker", from).to_string();
        WaitReport {
            node: "g_S1".into(),
            op: "_Recv".into(),
            from_task,
            tensor: "edge_1_g".into(),
            lasts_ms: 3000 + u64::from(from),
            ..Default::default()
        }
    }

    fn dequeue() -> WaitReport {
        WaitReport { node: "input/read".into(), op: "QueueDequeueV2".into(), lasts_ms: 3100, ..Default::default() }
    }

    fn unheard(task: u32) -> TaskReport {
        TaskReport { task: TaskName::new("worker", task), report: Err(silent(Duration::from_secs(1))), link: None }
    }

    #[test]
    fn the_root_of_a_chain_is_named_with_what_it_does() {
        let reports = [report(0, vec![recv(1)]), report(1, vec![dequeue()]), report(2, vec![recv(0)])];
        let findings = diagnose(&reports, Duration::from_secs(1));
        assert_eq!(findings.len(), 1);
        assert_eq!(
            findings[0].text,
            "step 4711: 2 of 3 tasks wait for worker:1 (alive, last progress 3.1 s ago, in op input/read \
             (QueueDequeueV2) for 3.1 s); worker:0 needs its tensor edge_1_g, for 3.0 s"
        );
        assert!(!findings[0].is_idle);
        assert!(diagnose(&reports, Duration::from_secs(10)).is_empty());
    }

    #[test]
    fn a_task_that_does_not_answer_is_the_root_if_others_wait_for_it() {
        let findings = diagnose(&[report(0, vec![recv(1)]), unheard(1)], Duration::ZERO);
        assert_eq!(
            findings[0].text,
            "step 4711: 1 of 2 tasks wait for worker:1 (does not answer (stopped or overloaded): nothing came in 1s); \
             worker:0 needs its tensor edge_1_g, for 3.0 s"
        );
        assert_eq!(findings[0].tensor, "edge_1_g");
    }

    #[test]
    fn a_silent_task_is_the_root_even_if_it_waits_too() {
        // Worker 1 was stopped after it had requested a tensor of worker 0, which also needs one of worker 1.
        let asked = WaitReport {
            from_task: TaskName::new("worker", 0).to_string(),
            for_task: TaskName::new("worker", 1).to_string(),
            tensor: "edge_2_w".into(),
            ..Default::default()
        };
        let findings = diagnose(&[report(0, vec![recv(1), asked]), unheard(1)], Duration::ZERO);
        assert_eq!(findings[0].root, TaskName::new("worker", 1).to_string());
        assert_eq!(findings[0].waiting, [TaskName::new("worker", 0).to_string()]);
    }

    #[test]
    fn a_task_that_leaves_ready_nodes_alone_is_the_root() {
        let mut forgetful = report(1, vec![]);
        if let Ok(report) = &mut forgetful.report {
            report.step[0].n_unattended = 3;
        }
        let findings = diagnose(&[report(0, vec![recv(1)]), forgetful], Duration::ZERO);
        assert_eq!(findings[0].root, TaskName::new("worker", 1).to_string());
        assert!(findings[0].text.contains("3 node(s) are ready and nobody runs them"), "{}", findings[0].text);
    }

    #[test]
    fn a_master_waits_for_tasks_that_send_no_tensor() {
        let task = TaskName::new("worker", 1).to_string();
        let mastered = MasteredStep { step_id: 9, age_ms: 5000, task: vec![task.clone()] };
        let mastered = KoloReportResponse { mastered: vec![mastered], ..KoloReportResponse::default() };
        let master = TaskReport { task: TaskName::new("worker", 0), report: Ok(mastered), link: None };
        let findings = diagnose(&[master, unheard(1)], Duration::from_secs(1));
        assert_eq!((findings.len(), findings[0].root.as_str()), (1, task.as_str()));
        assert!(findings[0].text.starts_with("step 9: 1 of 2 tasks wait for worker:1 (does not answer"));
    }

    #[test]
    fn a_wait_at_a_meeting_point_is_followed_to_who_has_not_delivered() {
        let take = || WaitReport {
            node: "sync/take".into(),
            op: "AccumulatorTakeGradient".into(),
            lasts_ms: 3100,
            ..Default::default()
        };
        let name = |task| TaskName::new("worker", task).to_string();
        // Worker 0 is the parameter server, whose accumulator worker 1 waits for; worker 2 is stopped.
        let findings = diagnose(&[report(0, vec![take()]), report(1, vec![recv(0)]), unheard(2)], Duration::ZERO);
        assert_eq!(findings.len(), 1);
        assert_eq!((findings[0].root.clone(), findings[0].is_idle), (name(2), false));
        assert_eq!(findings[0].waiting, [name(1), name(0)]);
        let text = &findings[0].text;
        for part in ["sync/take (AccumulatorTakeGradient) on worker:0", "worker:2 (does not answer (stopped"] {
            assert!(text.contains(part), "{part} is missing in {text}");
        }
        // Nobody is silent: it is a step that still computes, on worker 2, and not one that waits at a queue, too.
        let mut computing = report(2, vec![]);
        let mut waiting = report(3, vec![dequeue()]);
        for (report, step_id) in [(&mut computing, 4712), (&mut waiting, 4713)] {
            let step = &mut report.report.as_mut().unwrap().step[0];
            (step.step_id, step.n_running) = (step_id, u32::from(step_id == 4712));
        }
        let findings = diagnose(&[report(0, vec![take()]), computing, waiting], Duration::ZERO);
        for step_id in [4711, 4713] {
            let finding = findings.iter().find(|finding| finding.step_id == step_id).unwrap();
            assert_eq!(finding.root, name(2), "{}", finding.text);
            assert!(finding.text.contains("1 kernel(s) running"), "{}", finding.text);
        }
    }

    #[test]
    fn a_step_without_anything_to_do_waits_for_a_master_that_does_not_answer() {
        let name = |task| TaskName::new("worker", task).to_string();
        let findings = diagnose(&[report(0, vec![]), unheard(1)], Duration::ZERO);
        assert_eq!((&findings[0].root, &findings[0].waiting), (&name(1), &vec![name(0)]));
        let text = &findings[0].text;
        assert!(text.contains("on worker:0 waits for its master for 3.2 s, which is worker:1 (does not ans"), "{text}");
        // If everybody responds, the step has just ended, or begun.
        let findings = diagnose(&[report(0, vec![]), report(1, vec![])], Duration::ZERO);
        assert!(findings[0].text.contains("has run its part"), "{}", findings[0].text);
    }

    #[test]
    fn waiting_at_a_queue_for_work_is_no_trouble() {
        let findings = diagnose(&[report(0, vec![dequeue()])], Duration::ZERO);
        assert!(findings[0].is_idle);
        assert!(findings[0].text.starts_with("step 4711 on worker:0 (3.2 s): alive"), "{}", findings[0].text);
    }
}
