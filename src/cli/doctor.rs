//! `kolo doctor`: finds what stuck steps wait for: in a cluster, from the report of every task; among ranks that train by
//! all-reduce, from their records (`doctor_ranks.rs`).

use std::time::{Duration, Instant};

use crate::doctor::{Examination, Options, TaskReport, examine};
use crate::{ClusterSpec, Error, Result};
use serde_json::{Value, json};

use super::security::SecurityFlags;
use super::{doctor_gpu, doctor_ranks, print, task};

/// The interval of `--watch`.
const PERIOD: Duration = Duration::from_secs(1);

/// Flags of `kolo doctor`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  kolo doctor                                       all trainings by ranks of this user on this machine; the cluster of
                                                    TF_CONFIG, if that is set
  kolo doctor --pid 4711                            the training of this process
  kolo doctor --cluster cluster.json                check once; the exit code is 1 if something is stuck
  kolo doctor --cluster cluster.json --watch        check every second
  kolo doctor gpu                                   the libraries that GPUs need")]
#[command(args_conflicts_with_subcommands = true)]
pub struct Args {
    #[command(subcommand)]
    part: Option<Part>,
    /// Check this cluster: JOB=HOST:PORT,HOST:PORT;JOB=... or a JSON file [default: $TF_CONFIG]
    #[arg(long, value_name = "TASKS")]
    cluster: Option<String>,
    /// Check the training of this process: one of its ranks, or the command that started them
    #[arg(long, value_name = "PID", conflicts_with = "cluster")]
    pid: Option<u32>,
    #[command(flatten)]
    security: SecurityFlags,
    /// Diagnose steps that are older than this, and ranks that have waited for longer
    #[arg(long, default_value_t = 1.0, value_name = "SECONDS")]
    overdue: f64,
    /// Wait this long for a task's report; ranks need not answer
    #[arg(long, default_value_t = 1.0, value_name = "SECONDS")]
    deadline: f64,
    /// Print one JSON object per check
    #[arg(long)]
    json: bool,
    /// Check every second, until Ctrl-C
    #[arg(long)]
    watch: bool,
}

/// Other checks.
#[derive(clap::Subcommand)]
enum Part {
    /// Check the libraries that GPUs need, with path and version of each. The exit code is 1 if GPUs cannot be used
    Gpu,
}

pub fn run(args: &Args) -> Result<()> {
    if let Some(Part::Gpu) = args.part {
        return doctor_gpu::run();
    }
    let seconds = |flag: &str, seconds: f64| {
        let wrong = |_| Error::invalid_argument(format!("{flag} {seconds} is not a number of seconds"));
        Duration::try_from_secs_f64(seconds).map_err(wrong)
    };
    let overdue = seconds("--overdue", args.overdue)?;
    let environment = task::environment()?;
    if is_about_ranks(args.cluster.is_some(), args.pid.is_some()) {
        return watch(args.watch, || doctor_ranks::check(args.pid, overdue, args.json, args.watch));
    }
    let cluster = task::cluster(args.cluster.as_deref(), environment.as_ref())?;
    let options = Options {
        security: args.security.read()?,
        overdue,
        deadline: seconds("--deadline", args.deadline)?.max(Duration::from_millis(10)),
    };
    let began = Instant::now();
    watch(args.watch, || {
        let examination = examine(&cluster, &options)?;
        match args.json {
            true => print(as_json(&cluster, &examination))?,
            false => {
                if args.watch {
                    print(format_args!("after {:.0} s", began.elapsed().as_secs_f64()))?;
                }
                show(&cluster, &examination)?;
            }
        }
        Ok(examination.n_problems())
    })
}

/// Whether these flags are about ranks of this machine, and not about a cluster.
pub fn is_about_ranks(has_cluster: bool, has_pid: bool) -> bool {
    has_pid || !has_cluster && std::env::var("TF_CONFIG").map_or(true, |text| text.trim().is_empty())
}

/// Checks once, or again and again. `check` returns how many problems it has found. Problems of a single check are an error.
fn watch(again: bool, mut check: impl FnMut() -> Result<usize>) -> Result<()> {
    loop {
        let looked = Instant::now();
        let n_problems = check()?;
        if !again {
            return match n_problems {
                0 => Ok(()),
                n => {
                    Err(Error::unavailable(format!("{n} of the above {} help", if n == 1 { "needs" } else { "need" })))
                }
            };
        }
        std::thread::sleep(PERIOD.saturating_sub(looked.elapsed()));
    }
}

fn show(cluster: &ClusterSpec, examination: &Examination) -> Result<()> {
    let width = examination.tasks.iter().map(|task| task.short_name().len()).max().unwrap_or(0);
    for task in &examination.tasks {
        let address = cluster.address(&task.task.job, task.task.task)?;
        print(format_args!("{:width$}  {address}  {}", task.short_name(), state(task)))?;
    }
    let findings = examination.findings.iter().map(|finding| &finding.text);
    for text in examination.differences.iter().chain(&examination.slow).chain(findings) {
        print(text)?;
    }
    if examination.n_problems() == 0 && examination.findings.is_empty() {
        print("Nothing is stuck.")?;
    }
    Ok(())
}

/// A task's state, as text.
fn state(task: &TaskReport) -> String {
    let report = match &task.report {
        Ok(report) => report,
        Err(error) => return error.message().lines().next().unwrap_or_default().to_owned(),
    };
    let progress = match u64::try_from(report.last_ended_ms) {
        Ok(ms) => format!("last progress {:.1} s ago", ms as f64 / 1e3),
        Err(_) => "has run no step yet".to_owned(),
    };
    format!(
        "alive for {:.0} s, {} steps done, {} under way, {} sessions, {progress}",
        report.up_ms as f64 / 1e3,
        report.n_ended,
        report.step.len(),
        report.n_sessions
    )
}

fn as_json(cluster: &ClusterSpec, examination: &Examination) -> Value {
    let task = |task: &TaskReport| {
        let address = cluster.address(&task.task.job, task.task.task).unwrap_or_default();
        match &task.report {
            Ok(report) => json!({
                "task": task.short_name(), "address": address, "alive": true, "up_s": report.up_ms as f64 / 1e3,
                "steps_done": report.n_ended, "steps_under_way": report.step.len(), "sessions": report.n_sessions,
                "last_progress_s": u64::try_from(report.last_ended_ms).ok().map(|ms| ms as f64 / 1e3),
                "round_trip_ms": task.link.map(|link| link.round_trip.as_secs_f64() * 1e3),
                "mbit_per_s": task.link.map(|link| link.bits_per_second / 1e6),
            }),
            Err(error) => json!({
                "task": task.short_name(), "address": address, "alive": false, "why": error.message(),
            }),
        }
    };
    let findings: Vec<Value> = examination
        .findings
        .iter()
        .map(|finding| {
            json!({
                "step": finding.step_id, "age_s": finding.age.as_secs_f64(), "root": finding.root,
                "waiting": finding.waiting, "tensor": finding.tensor, "idle": finding.is_idle, "text": finding.text,
            })
        })
        .collect();
    json!({
        "tasks": examination.tasks.iter().map(task).collect::<Vec<_>>(),
        "findings": findings,
        "differences": examination.differences,
        "slow": examination.slow,
        "healthy": examination.n_problems() == 0,
    })
}
