//! The queue of runs: so many at a time, each a process on cores of its own and under a limit of memory.
//!
//! A run ends by itself, or because it is asked to (its standard input closes): at a rung of --halving, of which it keeps a checkpoint, or when
//! the sweep is stopped. One that needs too much memory is killed.

use std::collections::VecDeque;
use std::fs::File;
use std::io::Write as _;
use std::process::{Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use kolo_device::cpu::topology::{allowed_cores, bind_to_cores};
use serde_json::{Value, json};

use super::record::{Folder, Plan, Run, State};
use super::{Args, flags, halving};
use crate::cli::train::child::{Process, Said, start};
use crate::cli::train::job::stop_on_ctrl_c;
use crate::cli::{machine, print};
use crate::{Error, Result};

/// How often runs report between two rungs. The score of a rung is the mean of the losses of the half before it.
const REPORTS: u64 = 10;

/// How long the last words of a process that has ended may take to arrive.
const LAST_WORDS: Duration = Duration::from_secs(5);

const LOOK: Duration = Duration::from_millis(50);

/// What runs may use.
pub struct Limits {
    /// The cores of each of the runs at a time; none if they share all.
    slots: Vec<Vec<usize>>,
    memory: Option<u64>,
}

impl Limits {
    pub fn new(parallel: usize, cores: Option<usize>, memory: Option<u64>) -> Result<Limits> {
        const MAX_PARALLEL: usize = 512;
        if parallel == 0 || parallel > MAX_PARALLEL {
            return Err(Error::invalid_argument(format!("--parallel {parallel}: give 1 to {MAX_PARALLEL}")));
        }
        let allowed = allowed_cores();
        let n = allowed.as_ref().map_or(0, Vec::len);
        let share = match cores {
            Some(0) => return Err(Error::invalid_argument("--cores 0: a run needs at least 1")),
            Some(_) if allowed.is_none() => {
                return Err(Error::unimplemented("--cores: this system does not say which cores there are"));
            }
            Some(share) if share.saturating_mul(parallel) > n => {
                return Err(Error::invalid_argument(format!(
                    "--parallel {parallel} with --cores {share} needs {} cores, and this process may use {n}",
                    share.saturating_mul(parallel)
                )));
            }
            Some(share) => share,
            // More runs than cores share them all.
            None => n / parallel,
        };
        let allowed = allowed.unwrap_or_default();
        let slot = |i: usize| allowed.iter().skip(i * share).take(share).copied().collect();
        let memory = match (memory, available_memory()) {
            (Some(limit), Some(available)) if limit > available => {
                return Err(Error::invalid_argument(format!(
                    "--memory {}: only {} are available, so no run could start",
                    size(limit),
                    size(available)
                )));
            }
            (Some(_), None) => {
                return Err(Error::unimplemented("--memory: this system does not say how much memory is available"));
            }
            (memory, _) => memory,
        };
        Ok(Limits { slots: (0..parallel).map(slot).collect(), memory })
    }
}

/// A run that is under way.
struct Running {
    run: usize,
    slot: usize,
    process: Process,
    started: Instant,
    log: File,
    /// The step at which it is asked to pause.
    rung: Option<u64>,
    /// Step and loss, as it reported them.
    reports: Vec<(u64, f64)>,
    result: Option<Value>,
    last_error: Option<String>,
    is_asked: bool,
    /// Why it was killed.
    killed: Option<String>,
    ended: Option<(ExitStatus, Instant)>,
}

pub struct Queue<'a> {
    args: &'a Args,
    plan: &'a Plan,
    limits: Limits,
    running: Vec<Running>,
    sender: Sender<Said>,
    said: Receiver<Said>,
    stop: Arc<AtomicBool>,
}

impl<'a> Queue<'a> {
    pub fn new(args: &'a Args, plan: &'a Plan, limits: Limits) -> Queue<'a> {
        let (sender, said) = mpsc::channel();
        Queue { args, plan, limits, running: Vec::new(), sender, said, stop: stop_on_ctrl_c() }
    }

    /// Makes all runs that are missing; true if it was stopped before they were done.
    pub fn run(mut self, folder: &mut Folder) -> Result<bool> {
        let mut rung = self.args.halving;
        loop {
            let goes_on = |run: &&Run| matches!(run.state, State::Waiting | State::Paused);
            let alive: Vec<usize> = folder.runs().iter().filter(goes_on).map(|run| run.number - 1).collect();
            // The last one has nobody to be compared with.
            let goal = rung.filter(|_| alive.len() > 1);
            let is_missing = |run: &usize| goal.is_none_or(|rung| folder.runs()[*run].score(rung).is_none());
            let missing: VecDeque<usize> = alive.iter().copied().filter(is_missing).collect();
            if self.make(missing, goal, folder)? {
                return Ok(true);
            }
            let Some(step) = goal else { return Ok(false) };
            let scores =
                folder.runs().iter().filter(goes_on).filter_map(|run| Some((run.number - 1, run.score(step)?)));
            let scores: Vec<(usize, f64)> = scores.collect();
            for run in halving::worse_half(&scores) {
                folder.update(run, |run| run.state = State::Halved)?;
                self.say(&folder.runs()[run], &format!("is in the worse half after {step} steps, and stops"))?;
            }
            rung = step.checked_mul(2);
        }
    }

    /// Makes these runs, up to a rung or to their ends; true if it was stopped.
    fn make(&mut self, mut waiting: VecDeque<usize>, rung: Option<u64>, folder: &mut Folder) -> Result<bool> {
        while !waiting.is_empty() || !self.running.is_empty() {
            let is_stopping = self.stop.load(Ordering::Relaxed);
            if is_stopping {
                waiting.clear();
                self.running.iter_mut().for_each(Running::ask_to_end);
            }
            while self.running.len() < self.limits.slots.len() && self.has_memory_for_another() {
                let Some(run) = waiting.pop_front() else { break };
                let running = self.start(run, rung, folder)?;
                self.running.push(running);
            }
            if let Ok(said) = self.said.recv_timeout(LOOK) {
                self.hear(said)?;
                while let Ok(said) = self.said.try_recv() {
                    self.hear(said)?;
                }
            }
            self.look(folder)?;
        }
        Ok(self.stop.load(Ordering::Relaxed))
    }

    /// The first run starts in any case: there was enough for one when the sweep began.
    fn has_memory_for_another(&self) -> bool {
        let Some(limit) = self.limits.memory else { return true };
        // What those that run may still take is not there for another one.
        let promised: u64 = self
            .running
            .iter()
            .map(|running| limit.saturating_sub(running.process.resident_bytes().unwrap_or(0)))
            .sum();
        self.running.is_empty()
            || available_memory().is_none_or(|available| available >= promised.saturating_add(limit))
    }

    fn start(&self, run: usize, rung: Option<u64>, folder: &Folder) -> Result<Running> {
        let taken: Vec<usize> = self.running.iter().map(|running| running.slot).collect();
        let slot = (0..self.limits.slots.len()).find(|slot| !taken.contains(slot));
        let slot = slot.ok_or_else(|| Error::internal("a run was started without a place for it"))?;
        let program = std::env::current_exe().map_err(|error| Error::internal(format!("who am I? {error}")))?;
        let mut command = Command::new(program);
        command.args(flags::args(&self.plan.recipe, &self.plan.common, &folder.runs()[run].point));
        command.args(["--json", "--with-parent"]);
        if let Some(first) = self.plan.halving {
            command.arg("--log-every").arg((first / REPORTS).max(1).to_string());
            command.arg("--resume").arg("--checkpoint-dir").arg(folder.path(run, "ckpt"));
            command.args(["--keep", "1", "--checkpoint-every", "3600s"]);
        }
        let path = folder.path(run, "log");
        let log = File::options()
            .create(true)
            .append(true)
            .open(&path)
            .map_err(|error| Error::failed_precondition(format!("cannot write {}: {error}", path.display())))?;
        let (label, cores, sender) = (format!("run {}", run + 1), &self.limits.slots[slot], self.sender.clone());
        // A process begins on the cores of the thread that starts it.
        let started = std::thread::scope(|scope| {
            let start = move || {
                bind_to_cores(cores);
                start(command, label, run, &sender)
            };
            scope.spawn(start).join()
        });
        let process = started.map_err(|_| Error::internal("the thread that starts a run panicked"))??;
        let started = Instant::now();
        let (reports, result, last_error, killed, ended) = (Vec::new(), None, None, None, None);
        Ok(Running {
            run,
            slot,
            process,
            started,
            log,
            rung,
            reports,
            result,
            last_error,
            is_asked: false,
            killed,
            ended,
        })
    }

    fn hear(&mut self, said: Said) -> Result<()> {
        let (run, line, is_error) = match said {
            Said::Out(run, line) => (run, line, false),
            Said::Err(run, line) => (run, line, true),
        };
        let Some(running) = self.running.iter_mut().find(|running| running.run == run) else { return Ok(()) };
        writeln!(running.log, "{line}").map_err(|error| {
            Error::failed_precondition(format!("the log of run {} cannot be written: {error}", run + 1))
        })?;
        match (is_error, serde_json::from_str::<Value>(&line)) {
            (false, Ok(event)) => running.event(event),
            (false, Err(_)) => {}
            (true, _) => running.last_error = Some(line.trim_start_matches("kolo: ").to_owned()),
        }
        Ok(())
    }

    /// Looks after all processes.
    fn look(&mut self, folder: &mut Folder) -> Result<()> {
        for running in &mut self.running {
            if running.ended.is_none() {
                running.ended = running.process.ended()?.map(|status| (status, Instant::now()));
            }
            let resident = running.process.resident_bytes();
            if let (Some(limit), Some(resident), None, None) =
                (self.limits.memory, resident, &running.ended, &running.killed)
                && resident > limit
            {
                running.killed =
                    Some(format!("it took {} of memory, more than --memory {}", size(resident), size(limit)));
                running.process.kill();
            }
        }
        while let Some(at) = self.running.iter().position(Running::is_over) {
            let running = self.running.swap_remove(at);
            self.finish(running, folder)?;
        }
        Ok(())
    }

    /// Writes down what came of a run.
    fn finish(&self, running: Running, folder: &mut Folder) -> Result<()> {
        let Running { run, rung, reports, result, last_error, killed, started, ended, .. } = running;
        let is_well = ended.is_some_and(|(status, _)| status.success()) && killed.is_none();
        let was_stopped = result.as_ref().and_then(|end| end.get("stopped")).and_then(Value::as_bool) == Some(true);
        let score = rung.and_then(|rung| score(&reports, rung, self.plan.halving.unwrap_or(rung)));
        let status = ended.map_or_else(String::new, |(status, _)| status.to_string());
        folder.update(run, |run| {
            run.took_s += started.elapsed().as_secs_f64();
            (run.state, run.error) = match (is_well, result.is_some(), was_stopped) {
                (true, true, false) => (State::Done, None),
                // Stopped before a rung, it is made again from its last checkpoint.
                (true, _, _) => (if score.is_some() { State::Paused } else { run.state }, None),
                (false, ..) => (State::Failed, Some(killed.or(last_error).unwrap_or(status))),
            };
            if let (Some(rung), Some(score), State::Paused) = (rung, score, run.state) {
                run.scores.push((rung, score));
            }
            if is_well && result.is_some() {
                run.result = result;
            }
        })?;
        let run = &folder.runs()[run];
        match (run.state, &run.error) {
            (State::Failed, Some(why)) => self.say(run, &format!("failed: {why}")),
            (State::Done, _) => {
                let measure =
                    run.measure(self.args.best).map_or("-".to_owned(), |measure| format!("{:.4}", measure.abs()));
                self.say(run, &format!("is done: {} {measure}", self.args.best.word()))
            }
            (State::Paused, _) => match (rung, score) {
                (Some(rung), Some(score)) => self.say(run, &format!("has loss {score:.4} after {rung} steps")),
                _ => Ok(()),
            },
            _ => Ok(()),
        }
    }

    fn say(&self, run: &Run, text: &str) -> Result<()> {
        match self.args.json {
            true => {
                let mut event = run.to_json();
                event["event"] = json!("run");
                print(event)
            }
            false => print(format_args!("Run {} ({}) {text}", run.number, run.flags())),
        }
    }
}

impl Running {
    fn event(&mut self, event: Value) {
        match event.get("event").and_then(Value::as_str) {
            Some("step") => {
                let step = event.get("step").and_then(Value::as_u64).unwrap_or(0);
                // What is no number any more is the worst of all.
                self.reports.push((step, event.get("loss").and_then(Value::as_f64).unwrap_or(f64::INFINITY)));
                if self.rung.is_some_and(|rung| step >= rung) {
                    self.ask_to_end();
                }
            }
            Some("end") => self.result = Some(event),
            _ => {}
        }
    }

    fn ask_to_end(&mut self) {
        if !self.is_asked {
            self.is_asked = true;
            self.process.ask_to_end();
        }
    }

    /// It has ended, and has said so unless it failed.
    fn is_over(&self) -> bool {
        let Some((status, at)) = self.ended else { return false };
        let has_said = if status.success() { self.result.is_some() } else { at.elapsed() > LAST_WORDS / 20 };
        has_said || at.elapsed() > LAST_WORDS
    }
}

/// The mean loss of the reports of the half before a rung, of `every` steps.
fn score(reports: &[(u64, f64)], rung: u64, every: u64) -> Option<f64> {
    if !reports.iter().any(|(step, _)| *step >= rung) {
        return None;
    }
    let is_counted = |(step, _): &&(u64, f64)| *step <= rung && *step > rung - every.min(rung) / 2;
    let losses: Vec<f64> = reports.iter().filter(is_counted).map(|(_, loss)| *loss).collect();
    match losses.is_empty() {
        // It reports less often than that.
        true => reports.iter().find(|(step, _)| *step >= rung).map(|(_, loss)| *loss),
        false => Some(losses.iter().sum::<f64>() / losses.len() as f64),
    }
}

/// How much memory the system could give, if it says so.
fn available_memory() -> Option<u64> {
    machine::memory().map(|memory| memory.free)
}

fn size(bytes: u64) -> String {
    match bytes as f64 / f64::from(1 << 20) {
        mib if mib >= 1024.0 => format!("{:.1}G", mib / 1024.0),
        mib => format!("{mib:.0}M"),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_score_is_the_mean_loss_of_the_half_before_the_rung() {
        let reports: Vec<(u64, f64)> = (1..=25).map(|i| (i * 10, i as f64)).collect();
        // 60, 70, .. 100
        assert_eq!(score(&reports, 100, 100), Some(8.0));
        assert_eq!(score(&reports, 200, 100), Some(18.0));
        assert_eq!(score(&reports, 300, 100), None);
        assert_eq!(score(&[(7, 3.0)], 5, 5), Some(3.0));
        assert_eq!(score(&[], 5, 5), None);
    }

    #[test]
    fn runs_at_a_time_get_cores_of_their_own_or_are_refused() {
        let n = allowed_cores().unwrap().len();
        let limits = Limits::new(n, Some(1), None).unwrap();
        let mut cores = limits.slots.concat();
        cores.dedup();
        assert_eq!((limits.slots.len(), cores.len()), (n, n));
        assert_eq!(Limits::new(1, None, None).unwrap().slots[0].len(), n);
        assert!(Limits::new(n + 1, None, None).unwrap().slots.iter().all(Vec::is_empty));
        let error = |parallel, cores, memory| Limits::new(parallel, cores, memory).err().unwrap().to_string();
        assert!(error(n, Some(2), None).contains("cores, and this process may use"));
        assert!(error(0, None, None).contains("--parallel 0") && error(1, Some(0), None).contains("--cores 0"));
        assert!(error(1, None, Some(1 << 60)).contains("are available, so no run could start"));
    }
}
