//! Starts the processes of a cluster on this machine, reports their progress, and ends them.

use std::net::TcpListener;
use std::process::{Command, ExitStatus};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use crate::tls;
use crate::{Error, Result};

use super::ClusterFlags;
use super::view::ClusterView;
use crate::cli::train::child::{Process, own_flags, start};
use crate::cli::train::job::stop_on_ctrl_c;
use crate::cli::train::options::Common;

/// The exit codes of a worker that could not go on, and said why.
const OWN_ERROR: i32 = 1;
const WRONG_USAGE: i32 = 2;

/// A worker that dies is started again after a pause, which doubles from death to death, and so often at most. One that
/// worked for a while begins to count anew.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(8);
const MAX_RESTARTS: u32 = 5;
const WELL_AFTER: Duration = Duration::from_secs(60);

/// Starts `--ps` parameter servers and `--workers` workers with the flags of this process, and waits for them.
///
/// They share a random token, so that no other user of this machine can run graphs in them.
pub fn launch(common: &Common) -> Result<()> {
    let flags = &common.cluster;
    let (n_ps, n_workers) = (flags.ps.unwrap_or(1), flags.workers.unwrap_or(1));
    if n_ps == 0 || n_workers == 0 || n_ps + n_workers > 512 {
        return Err(Error::invalid_argument("--ps and --workers must be at least 1, and 512 together at most"));
    }
    let stop = stop_on_ctrl_c();
    let cluster = format!("ps={};worker={}", free_addresses(n_ps)?, free_addresses(n_workers)?);
    let program = std::env::current_exe().map_err(|error| Error::internal(format!("who am I? {error}")))?;
    let security = flags.security.read()?;
    let is_given = security.tls.is_some() || security.token.is_some();
    let is_open = security.insecure || security.insecure_loopback;
    let token = (!is_given && !is_open).then(tls::random_token).transpose()?;
    // Other users can read a process's arguments, and not its environment.
    let with_token = |command: &mut Command| {
        if let Some(token) = &token {
            command.env("KOLO_TOKEN", token.secret());
        }
    };
    let (sender, said) = mpsc::channel();
    let mut servers = Vec::with_capacity(n_ps);
    for task in 0..n_ps {
        let mut command = Command::new(&program);
        command.args(server_flags(flags, &cluster, task));
        with_token(&mut command);
        servers.push(start(command, format!("ps {task}"), task, &sender)?);
    }
    let start_worker = |task: usize| {
        let mut command = Command::new(&program);
        command.args(own_flags(&["--ps", "--workers"], &["--json"])).args([
            "--json",
            "--with-parent",
            "--cluster",
            &cluster,
            "--task",
            &task.to_string(),
        ]);
        with_token(&mut command);
        start(command, format!("worker {task}"), n_ps + task, &sender)
    };
    let mut workers = (0..n_workers).map(|task| start_worker(task).map(Worker::new)).collect::<Result<Vec<_>>>()?;
    let labels =
        servers.iter().chain(workers.iter().map(|worker| &worker.process)).map(|process| process.label.clone());
    let mut view = ClusterView::new(common.json, labels.collect(), n_workers, common.checkpoint_dir.is_some());
    let mut failed = None;
    while failed.is_none() && !workers.iter().all(|worker| worker.is_done) {
        match said.recv_timeout(Duration::from_millis(50)) {
            Ok(said) => view.show(said)?,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
        if stop.load(std::sync::atomic::Ordering::Relaxed) {
            break;
        }
        for process in &mut servers {
            if let Some(status) = process.ended()? {
                failed = failed.or_else(|| Some(format!("{} ended early: {status}", process.label)));
            }
        }
        let is_chief_done = workers.first().is_some_and(|chief| chief.is_done);
        for (task, worker) in workers.iter_mut().enumerate() {
            match worker.look(is_chief_done)? {
                Next::Nothing => {}
                Next::Say(text) => view.note(n_ps + task, &text)?,
                Next::Start => worker.process = start_worker(task)?,
                Next::GiveUp(why) => failed = failed.or(Some(why)),
            }
        }
    }
    drop(sender);
    // The workers end first, all at once, since the chief saves what is on the parameter servers; their last words are
    // still shown.
    workers.iter_mut().for_each(|worker| worker.process.ask_to_end());
    drop(workers);
    drop(servers);
    while let Ok(said) = said.recv_timeout(Duration::from_secs(1)) {
        view.show(said)?;
    }
    view.end()?;
    match failed {
        Some(why) => Err(Error::aborted(why)),
        None => Ok(()),
    }
}

/// A worker, which is started again if it dies. One that ends with an error of its own would only repeat it.
struct Worker {
    process: Process,
    started: Instant,
    /// How often it has died since it last worked for a while.
    n_deaths: u32,
    /// When it is started again.
    restart: Option<Instant>,
    is_done: bool,
}

/// What to do about a worker.
enum Next {
    Nothing,
    Say(String),
    Start,
    GiveUp(String),
}

impl Worker {
    fn new(process: Process) -> Worker {
        Worker { process, started: Instant::now(), n_deaths: 0, restart: None, is_done: false }
    }

    /// Looks after it.
    fn look(&mut self, is_chief_done: bool) -> Result<Next> {
        if self.is_done {
            return Ok(Next::Nothing);
        }
        if let Some(at) = self.restart {
            if Instant::now() < at {
                return Ok(Next::Nothing);
            }
            (self.restart, self.started) = (None, Instant::now());
            return Ok(Next::Start);
        }
        let Some(status) = self.process.ended()? else { return Ok(Next::Nothing) };
        match status.code() {
            Some(0) => self.is_done = true,
            Some(OWN_ERROR | WRONG_USAGE) => {
                return Ok(Next::GiveUp(format!("{} failed: {status}", self.process.label)));
            }
            _ => return Ok(self.died(status, is_chief_done)),
        }
        Ok(Next::Nothing)
    }

    fn died(&mut self, status: ExitStatus, is_chief_done: bool) -> Next {
        if is_chief_done {
            self.is_done = true;
            return Next::Say(format!("died ({status}) after the training had ended"));
        }
        self.n_deaths = if self.started.elapsed() > WELL_AFTER { 1 } else { self.n_deaths + 1 };
        if self.n_deaths > MAX_RESTARTS {
            let label = &self.process.label;
            return Next::GiveUp(format!("{label} died {} times in a row, at last: {status}", self.n_deaths));
        }
        let pause = (FIRST_PAUSE * (1 << (self.n_deaths - 1))).min(LONGEST_PAUSE);
        self.restart = Some(Instant::now() + pause);
        let n = self.n_deaths;
        Next::Say(format!(
            "died ({status}); the others go on. Starting it again in {pause:.1?} ({n} of {MAX_RESTARTS})"
        ))
    }
}

/// Addresses that were free a moment ago.
fn free_addresses(n: usize) -> Result<String> {
    let bound = (0..n).map(|_| TcpListener::bind("127.0.0.1:0")).collect::<std::io::Result<Vec<_>>>();
    let bound = bound.and_then(|all| all.iter().map(TcpListener::local_addr).collect::<std::io::Result<Vec<_>>>());
    let addresses = bound.map_err(|error| Error::unavailable(format!("no free ports: {error}")))?;
    Ok(addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(","))
}

/// The flags of a parameter server.
fn server_flags(flags: &ClusterFlags, cluster: &str, task: usize) -> Vec<String> {
    let task = task.to_string();
    // It keeps variables in host memory, so a GPU would only cost it memory and, shared with a worker of another process,
    // time slices of milliseconds.
    let fixed =
        ["serve", "--with-parent", "--device-count", "GPU=0", "--cluster", cluster, "--job", "ps", "--task", &task];
    let shared = flags.no_shared_memory.then_some("--no-shared-memory");
    fixed.into_iter().chain(shared).map(str::to_owned).chain(flags.security.args()).collect()
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;

    use super::*;

    #[test]
    fn parameter_servers_share_memory_only_if_they_may() {
        let has = |flags: &ClusterFlags| server_flags(flags, "ps=a:1", 0).contains(&"--no-shared-memory".to_owned());
        let flags = ClusterFlags::default();
        assert!(!has(&flags));
        assert!(has(&ClusterFlags { no_shared_memory: true, ..flags }));
    }

    #[cfg(unix)]
    #[test]
    fn a_worker_that_keeps_dying_is_given_up() {
        let child = Command::new("true").stdin(Stdio::piped()).spawn().expect("`true` can be run");
        let mut worker = Worker::new(Process::new("worker 1".to_owned(), child));
        let killed: ExitStatus = std::os::unix::process::ExitStatusExt::from_raw(9);
        let mut pauses = Vec::new();
        for _ in 0..MAX_RESTARTS {
            let now = Instant::now();
            assert!(matches!(worker.died(killed, false), Next::Say(_)));
            pauses.extend(worker.restart.take().map(|at| at - now));
        }
        assert!(pauses.len() == MAX_RESTARTS as usize && pauses.is_sorted(), "{pauses:?}");
        assert!(matches!(worker.died(killed, false), Next::GiveUp(_)));
        // One that dies when there is nothing left to do is no failure.
        assert!(matches!(worker.died(killed, true), Next::Say(_)) && worker.is_done);
    }
}
