//! Starts the processes of a cluster on this machine, reports their progress, and ends them.

use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use crate::{Error, Result};

use super::ClusterFlags;
use super::view::ClusterView;
use crate::cli::train::job::stop_on_ctrl_c;
use crate::cli::train::options::Common;

/// How long a process has to end after it was asked to.
const GRACE: Duration = Duration::from_secs(10);

/// An event of a child process.
pub enum Said {
    /// A line of its standard output.
    Out(usize, String),
    /// A line of its standard error.
    Err(usize, String),
}

/// A process, ended when this is dropped.
struct Process {
    label: String,
    child: Child,
}

impl Drop for Process {
    fn drop(&mut self) {
        // Closing its standard input asks it to end; what does not is killed.
        drop(self.child.stdin.take());
        let asked = Instant::now();
        while asked.elapsed() < GRACE {
            match self.child.try_wait() {
                Ok(Some(_)) => return,
                Ok(None) => std::thread::sleep(Duration::from_millis(10)),
                Err(_) => break,
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts `--ps` parameter servers and `--workers` workers with the flags of this process, and waits for them.
pub fn launch(common: &Common) -> Result<()> {
    let flags = &common.cluster;
    let (n_ps, n_workers) = (flags.ps.unwrap_or(1), flags.workers.unwrap_or(1));
    if n_ps == 0 || n_workers == 0 || n_ps + n_workers > 512 {
        return Err(Error::invalid_argument("--ps and --workers must be at least 1, and 512 together at most"));
    }
    let stop = stop_on_ctrl_c();
    let cluster = format!("ps={};worker={}", free_addresses(n_ps)?, free_addresses(n_workers)?);
    let program = std::env::current_exe().map_err(|error| Error::internal(format!("who am I? {error}")))?;
    let (sender, said) = mpsc::channel();
    let mut processes = Vec::with_capacity(n_ps + n_workers);
    for task in 0..n_ps {
        let mut command = Command::new(&program);
        command.args(server_flags(flags, &cluster, task));
        processes.push(start(command, format!("ps {task}"), processes.len(), &sender)?);
    }
    for task in 0..n_workers {
        let mut command = Command::new(&program);
        command.args(own_flags()).args(["--json", "--with-parent", "--cluster", &cluster, "--task", &task.to_string()]);
        processes.push(start(command, format!("worker {task}"), processes.len(), &sender)?);
    }
    drop(sender);
    let labels: Vec<String> = processes.iter().map(|process| process.label.clone()).collect();
    let mut view = ClusterView::new(common.json, labels, n_workers, common.checkpoint_dir.is_some());
    let mut failed = None;
    loop {
        match said.recv_timeout(Duration::from_millis(50)) {
            Ok(said) => view.show(said)?,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
        if stop.load(std::sync::atomic::Ordering::Relaxed) {
            break;
        }
        let (servers, workers) = processes.split_at_mut(n_ps);
        for process in servers.iter_mut() {
            if let Some(status) = ended(process)? {
                failed = failed.or_else(|| Some(format!("{} ended early: {status}", process.label)));
            }
        }
        let statuses = workers.iter_mut().map(|process| Ok((process.label.clone(), ended(process)?)));
        let statuses = statuses.collect::<Result<Vec<_>>>()?;
        for (label, status) in &statuses {
            if let Some(status) = status.filter(|status| !status.success()) {
                failed = failed.or_else(|| Some(format!("{label} failed: {status}")));
            }
        }
        if failed.is_some() || statuses.iter().all(|(_, status)| status.is_some()) {
            break;
        }
    }
    // The workers end first, all at once, since the chief saves what is on the parameter servers; their last words are
    // still shown.
    let mut workers = processes.split_off(n_ps);
    workers.iter_mut().for_each(|worker| drop(worker.child.stdin.take()));
    drop(workers);
    drop(processes);
    while let Ok(said) = said.recv_timeout(Duration::from_secs(1)) {
        view.show(said)?;
    }
    view.end()?;
    match failed {
        Some(why) => Err(Error::aborted(why)),
        None => Ok(()),
    }
}

fn ended(process: &mut Process) -> Result<Option<ExitStatus>> {
    process.child.try_wait().map_err(|error| Error::internal(format!("{}: {error}", process.label)))
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

/// The flags of this process that its workers share.
fn own_flags() -> Vec<String> {
    let mut flags = Vec::new();
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--ps" | "--workers" => drop(args.next()),
            "--json" => {}
            other if other.starts_with("--ps=") || other.starts_with("--workers=") => {}
            _ => flags.push(arg),
        }
    }
    flags
}

fn start(mut command: Command, label: String, index: usize, said: &Sender<Said>) -> Result<Process> {
    // A terminal's Ctrl-C is for this process, which ends the others in order.
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = spawned.map_err(|error| Error::unavailable(format!("{label} could not be started: {error}")))?;
    let (out, err) = (child.stdout.take(), child.stderr.take());
    let process = Process { label, child };
    read_lines(out, said.clone(), move |line| Said::Out(index, line))?;
    read_lines(err, said.clone(), move |line| Said::Err(index, line))?;
    Ok(process)
}

/// Passes lines on until the process closes its end.
fn read_lines(
    from: Option<impl Read + Send + 'static>,
    said: Sender<Said>,
    make: impl Fn(String) -> Said + Send + 'static,
) -> Result<()> {
    let Some(from) = from else { return Ok(()) };
    let read = move || {
        for line in BufReader::new(from).lines().map_while(std::io::Result::ok) {
            if said.send(make(line)).is_err() {
                return;
            }
        }
    };
    let started = std::thread::Builder::new().name("kolo-output".to_owned()).spawn(read);
    started.map(drop).map_err(|error| Error::resource_exhausted(format!("no thread: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameter_servers_share_memory_only_if_they_may() {
        let has = |flags: &ClusterFlags| server_flags(flags, "ps=a:1", 0).contains(&"--no-shared-memory".to_owned());
        let flags = ClusterFlags::default();
        assert!(!has(&flags));
        assert!(has(&ClusterFlags { no_shared_memory: true, ..flags }));
    }
}
