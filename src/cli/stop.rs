//! `kolo stop`: asks a training, a launch or a server of this machine to end, which saves its last checkpoint, and waits until it has.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, getuid, kill_process};
use serde_json::json;

use super::print;
use crate::{Error, Result};

/// The commands that run until their job is done.
const JOBS: [&str; 4] = ["train", "launch", "serve", "agent"];

/// Flags of `kolo stop`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  kolo stop --list       what can be stopped
  kolo stop              the only job of yours on this machine
  kolo stop --pid 4711   this one

It sends SIGTERM to the process that you have started, which ends the others in order: workers finish their step, the chief or rank 0
saves a checkpoint if there is --checkpoint-dir, and parameter servers end last. On other machines, run it there; jobs of Slurm end by
`scancel --signal=TERM`, pods by `kubectl delete`.")]
pub struct Args {
    /// Stop the job with this process
    #[arg(long, value_name = "N", conflicts_with = "list")]
    pid: Option<u32>,
    /// List the jobs of this user on this machine, and stop none
    #[arg(long)]
    list: bool,
    /// Wait this many seconds for the end
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0)]
    deadline: f64,
    /// Kill what has not ended by then, without a checkpoint
    #[arg(long)]
    kill: bool,
    /// Print one JSON object for each job
    #[arg(long)]
    json: bool,
}

/// A process that somebody has started by hand, with all that it has started.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Job {
    pid: u32,
    /// Distinguishes it from a later process with the same number.
    started: String,
    command: String,
}

pub fn run(args: &Args) -> Result<()> {
    let jobs = jobs(Path::new("/proc"));
    if args.list {
        return jobs.iter().try_for_each(|job| match args.json {
            true => print(json!({ "pid": job.pid, "command": job.command })),
            false => print(format_args!("process {}: {}", job.pid, job.command)),
        });
    }
    let job = match (args.pid, &jobs[..]) {
        (Some(pid), jobs) => jobs.iter().find(|job| job.pid == pid).ok_or_else(|| {
            Error::invalid_argument(format!(
                "process {pid} is no job of yours that was started on this machine; `kolo stop --list` shows them"
            ))
        })?,
        (None, [only]) => only,
        (None, []) => {
            return Err(Error::invalid_argument("no training, launch or server of yours runs on this machine"));
        }
        (None, several) => {
            let all: Vec<String> = several.iter().map(|job| format!("{} ({})", job.pid, job.command)).collect();
            return Err(Error::invalid_argument(format!("which one? --pid is one of {}", all.join(", "))));
        }
    };
    let patience = Duration::try_from_secs_f64(args.deadline)
        .map_err(|_| Error::invalid_argument(format!("--deadline {} is not a number of seconds", args.deadline)))?;
    let began = Instant::now();
    send(job, Signal::TERM)?;
    let mut was_killed = false;
    while is_running(job) {
        if began.elapsed() >= patience && !was_killed {
            if !args.kill {
                return Err(Error::deadline_exceeded(format!(
                    "process {} has not ended in {:.0} s; it may still be saving (--deadline waits longer, --kill ends it then)",
                    job.pid,
                    patience.as_secs_f64()
                )));
            }
            send(job, Signal::KILL)?;
            was_killed = true;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let took = began.elapsed().as_secs_f64();
    match args.json {
        true => print(json!({ "pid": job.pid, "command": job.command, "killed": was_killed, "took_s": took })),
        false => {
            let how = if was_killed { "was killed" } else { "has ended" };
            print(format_args!("process {} {how} after {took:.1} s: {}", job.pid, job.command))
        }
    }
}

fn send(job: &Job, signal: Signal) -> Result<()> {
    let pid = i32::try_from(job.pid).ok().and_then(Pid::from_raw).filter(|_| is_running(job));
    let Some(pid) = pid else { return Ok(()) };
    match kill_process(pid, signal) {
        // It has ended in this moment.
        Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
        Err(error) => Err(Error::new(crate::Code::PermissionDenied, format!("process {}: {error}", job.pid))),
    }
}

fn is_running(job: &Job) -> bool {
    stat(Path::new("/proc"), job.pid).is_some_and(|stat| stat.started == job.started && stat.state != "Z")
}

/// The jobs of this user: processes of the right commands, none of whose ancestors is one.
fn jobs(proc: &Path) -> Vec<Job> {
    let uid = getuid().as_raw();
    let pids = std::fs::read_dir(proc).into_iter().flatten().flatten();
    let pids = pids.filter(|entry| entry.metadata().is_ok_and(|data| data.uid() == uid));
    let pids: Vec<u32> = pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    let mut jobs: Vec<Job> = pids.iter().filter_map(|pid| job(proc, *pid)).collect();
    jobs.sort_by_key(|job| job.pid);
    let all: Vec<u32> = jobs.iter().map(|job| job.pid).collect();
    jobs.retain(|job| {
        let mut ancestor = stat(proc, job.pid).map(|stat| stat.parent);
        // A chain that changes while it is read does not go on for ever.
        for _ in 0..64 {
            match ancestor {
                Some(pid) if all.contains(&pid) => return false,
                Some(pid) if pid > 1 => ancestor = stat(proc, pid).map(|stat| stat.parent),
                _ => break,
            }
        }
        true
    });
    jobs
}

fn job(proc: &Path, pid: u32) -> Option<Job> {
    let line = std::fs::read(proc.join(pid.to_string()).join("cmdline")).ok()?;
    let words: Vec<String> =
        line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect();
    let is_kolo = PathBuf::from(words.first()?).file_name()? == "kolo";
    let is_job = is_kolo && words.get(1).is_some_and(|command| JOBS.contains(&command.as_str()));
    let stat = stat(proc, pid).filter(|stat| is_job && stat.state != "Z")?;
    Some(Job { pid, started: stat.started, command: words.join(" ").trim().to_owned() })
}

struct Stat {
    state: String,
    parent: u32,
    started: String,
}

fn stat(proc: &Path, pid: u32) -> Option<Stat> {
    let text = std::fs::read_to_string(proc.join(pid.to_string()).join("stat")).ok()?;
    // The name in parentheses may hold anything.
    let fields: Vec<&str> = text.rsplit_once(") ")?.1.split_whitespace().collect();
    Some(Stat {
        state: (*fields.first()?).to_owned(),
        parent: fields.get(1)?.parse().ok()?,
        started: (*fields.get(19)?).to_owned(),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn only_what_somebody_started_is_a_job() {
        let proc = std::env::temp_dir().join(format!("kolo-stop-{}", std::process::id()));
        let process = |pid: u32, parent: u32, state: &str, command: &str| {
            let dir = proc.join(pid.to_string());
            std::fs::create_dir_all(&dir).unwrap();
            std::fs::write(dir.join("cmdline"), command.replace(' ', "\0")).unwrap();
            let rest = ["0"; 17].join(" ");
            std::fs::write(dir.join("stat"), format!("{pid} (a ) b) {state} {parent} {rest} {} 0", pid * 10)).unwrap();
        };
        process(10, 1, "S", "sh");
        process(11, 10, "S", "/opt/kolo launch -n 2 -- sh -c x");
        process(12, 11, "S", "sh -c x");
        process(13, 12, "S", "kolo train mnist");
        process(14, 10, "S", "kolo ops");
        process(15, 10, "R", "./kolo train linear");
        process(16, 10, "Z", "kolo train linear");
        process(17, 10, "S", "notkolo train");
        let found: Vec<(u32, String)> = jobs(&proc).into_iter().map(|job| (job.pid, job.started)).collect();
        assert_eq!(found, [(11, "110".to_owned()), (15, "150".to_owned())]);
        std::fs::remove_dir_all(&proc).unwrap();
    }
}
