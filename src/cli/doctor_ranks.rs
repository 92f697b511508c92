//! `kolo doctor` for ranks that train by all-reduce: finds their trainings on this machine, and reads what each rank does from
//! memory that they share with others. No process has to answer, so it works while all of them are stuck, stopped or dead.

use std::time::Duration;

use kolo_runtime::collective::{CallState, Condition, RankFinding, RankState, Training, diagnose};
use serde_json::{Value, json};

use super::print;
use crate::{Error, Result};

/// Checks the trainings of this machine, or the one of a process, and prints what was found; the number of problems.
pub fn check(pid: Option<u32>, overdue: Duration, as_json: bool, is_watching: bool) -> Result<usize> {
    let mut trainings = Training::find_all();
    if let Some(pid) = pid {
        trainings.retain(|training| training.pids.contains(&pid));
    }
    if trainings.is_empty() && !is_watching {
        return Err(Error::invalid_argument(match pid {
            Some(pid) => format!("process {pid} is none of a training with several ranks, or is another user's"),
            None => "no training with several ranks of this user runs on this machine, and no cluster is named: say --cluster \
                     'ps=HOST:PORT;worker=HOST:PORT', or set TF_CONFIG"
                .to_owned(),
        }));
    }
    let findings: Vec<Option<RankFinding>> =
        trainings.iter().map(|training| diagnose(&training.ranks, overdue)).collect();
    let n_problems = findings.iter().flatten().count();
    match as_json {
        true => {
            let all = trainings.iter().zip(&findings);
            let all: Vec<Value> = all.map(|(training, finding)| training_json(training, finding.as_ref())).collect();
            print(json!({ "trainings": all, "healthy": n_problems == 0 }))?;
        }
        false => {
            trainings.iter().zip(&findings).try_for_each(|(training, finding)| show(training, finding.as_ref()))?
        }
    }
    Ok(n_problems)
}

fn show(training: &Training, finding: Option<&RankFinding>) -> Result<()> {
    let how = if training.shares_memory { "in shared memory" } else { "over TCP" };
    print(format_args!("{} ({} ranks {how})", command(training), training.ranks.len()))?;
    let width = training.ranks.len().saturating_sub(1).to_string().len();
    for state in &training.ranks {
        let process = state.pid.map_or(String::new(), |pid| format!("process {pid}, "));
        print(format_args!("rank {:width$}  {process}{state}", state.rank))?;
    }
    match finding {
        Some(finding) => print(&finding.text),
        None => print("Nothing is stuck."),
    }
}

/// The command line of a training, with its process.
fn command(training: &Training) -> String {
    let Some(pid) = training.pid() else { return "a training".to_owned() };
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words: Vec<String> =
        line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect();
    format!("process {pid}: {}", words.join(" ").trim())
}

fn training_json(training: &Training, finding: Option<&RankFinding>) -> Value {
    json!({
        "command": command(training),
        "pid": training.pid(),
        "pids": training.pids,
        "transport": if training.shares_memory { "shared memory" } else { "TCP" },
        "ranks": training.ranks.iter().map(rank_json).collect::<Vec<_>>(),
        "finding": finding.map(|finding| json!({
            "step": finding.step, "call": finding.call.as_ref().map(call_json), "waiting": finding.waiting,
            "roots": finding.roots, "cause": finding.cause.to_string(), "lasts_s": finding.lasts.as_secs_f64(),
            "text": finding.text,
        })),
    })
}

fn rank_json(state: &RankState) -> Value {
    let condition = match state.condition {
        Condition::Absent => "absent",
        Condition::Stopped { .. } => "stopped",
        Condition::Busy { .. } => "there",
        Condition::Gone { .. } => "gone",
        Condition::Unknown => "elsewhere",
    };
    json!({
        "rank": state.rank, "pid": state.pid, "process": condition, "step": state.step, "calls": state.n_calls,
        "activity": format!("{:?}", state.activity).to_lowercase(), "activity_s": state.lasts.as_secs_f64(),
        "call": state.call.as_ref().map(call_json), "waits_for": state.waits_for.map(|(rank, _)| rank),
        "waits_s": state.waits_for.map(|(_, lasts)| lasts.as_secs_f64()),
        "heard_s_ago": state.age.map(|age| age.as_secs_f64()),
        "last_calls": state.last_calls.iter().map(call_json).collect::<Vec<_>>(),
        "text": state.to_string(),
    })
}

fn call_json(call: &CallState) -> Value {
    json!({
        "number": call.number(), "kind": call.kind().to_string(), "name": call.name(), "step": call.step,
        "dtype": call.dtype().map(|dtype| dtype.to_string()), "elements": call.n_elements(),
        "began_s_ago": call.began.as_secs_f64(), "took_s": call.took.map(|took| took.as_secs_f64()),
    })
}
