//! A process together with everything that it starts: a process group, which is signalled and ends as one.

use std::io::{BufRead as _, BufReader, Read};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Sender, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use super::guard::Guard;
use crate::{Error, Result};

/// Longer lines are cut into several.
const LONGEST_LINE: usize = 64 << 10;

/// Output that comes from processes that have left the group is not waited for any longer than this.
const LAST_OUTPUT: Duration = Duration::from_secs(2);

/// So many events wait for whoever handles them; processes that say more wait with their next line.
pub const MOST_EVENTS: usize = 1024;

/// What happens to a process. `key` says which one, and which start of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A line of its output.
    Line { key: Key, is_error: bool, text: String },
    /// It has ended, and everything that it had started with it. All its lines have come before.
    Ended { key: Key, ending: Ending },
    /// Nothing more will come of a host.
    Lost { host: usize, why: String },
    /// Ports that are free on a host.
    Ports { host: usize, ports: Vec<u16> },
}

/// A start of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    pub rank: usize,
    pub attempt: u32,
}

/// How a process has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    Code(i32),
    Signal(i32),
    /// It could not be started, or its host is lost.
    Never(String),
}

impl Ending {
    fn of(status: ExitStatus) -> Ending {
        match (status.code(), status.signal()) {
            (Some(code), _) => Ending::Code(code),
            (None, Some(signal)) => Ending::Signal(signal),
            (None, None) => Ending::Never(status.to_string()),
        }
    }

    /// As shells say it.
    pub fn code(&self) -> i32 {
        match self {
            Ending::Code(code) => *code,
            Ending::Signal(signal) => 128 + signal,
            Ending::Never(_) => 1,
        }
    }
}

impl std::fmt::Display for Ending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Ending::Code(code) => write!(f, "exit code {code}"),
            Ending::Signal(_) => {
                let status = ExitStatus::from_raw(self.code() - 128);
                write!(f, "{status}")
            }
            Ending::Never(why) => f.write_str(why),
        }
    }
}

/// A running process group.
pub struct ProcessGroup {
    pid: Pid,
    /// Whether its leader has been waited for, so that its number may be another's.
    is_over: Arc<Mutex<bool>>,
}

impl ProcessGroup {
    /// Starts a command as the leader of a group. What happens to it goes to `events`.
    pub fn start(mut command: Command, key: Key, events: SyncSender<Event>, guard: Arc<Guard>) -> Result<ProcessGroup> {
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let program = command.get_program().to_string_lossy().into_owned();
        let mut child = command
            .spawn()
            .map_err(|error| Error::failed_precondition(format!("'{program}' could not be started: {error}")))?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| Error::internal("a process without a number"))?;
        guard.add(pid);
        let group = ProcessGroup { pid, is_over: Arc::default() };
        let is_over = group.is_over.clone();
        let (read, all_read) = mpsc::channel();
        if let Some(out) = child.stdout.take() {
            read_lines(out, key, false, events.clone(), read.clone())?;
        }
        if let Some(err) = child.stderr.take() {
            read_lines(err, key, true, events.clone(), read.clone())?;
        }
        drop(read);
        spawn("kolo-wait", move || {
            // The leader is looked at, and not yet waited for, so that the number of the group stays its own.
            let _ = waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT);
            // What it leaves behind has nobody who looks after it.
            let _ = kill_process_group(pid, Signal::KILL);
            guard.remove(pid);
            let deadline = Instant::now() + LAST_OUTPUT;
            // An error says that both are done.
            while let Err(mpsc::RecvTimeoutError::Timeout) =
                all_read.recv_timeout(deadline.saturating_duration_since(Instant::now()))
            {
                if Instant::now() >= deadline {
                    break;
                }
            }
            let ending = wait(child, &is_over);
            drop(events.send(Event::Ended { key, ending }));
        })?;
        Ok(group)
    }

    /// Sends a signal to all of the group. One that is over does not get it.
    pub fn signal(&self, signal: Signal) {
        let is_over = self.is_over.lock().unwrap_or_else(PoisonError::into_inner);
        if !*is_over {
            // It may have ended by itself.
            let _ = kill_process_group(self.pid, signal);
        }
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
    }
}

fn wait(mut child: Child, is_over: &Mutex<bool>) -> Ending {
    let mut is_over = is_over.lock().unwrap_or_else(PoisonError::into_inner);
    *is_over = true;
    match child.wait() {
        Ok(status) => Ending::of(status),
        Err(error) => Ending::Never(format!("how it ended is not known: {error}")),
    }
}

/// Passes lines on until the other end is closed. `done` is dropped then.
fn read_lines(
    from: impl Read + Send + 'static,
    key: Key,
    is_error: bool,
    events: SyncSender<Event>,
    done: Sender<()>,
) -> Result<()> {
    spawn("kolo-output", move || {
        let _done = done;
        let mut from = BufReader::new(from);
        let mut line = Vec::new();
        loop {
            line.clear();
            let n = from.by_ref().take(LONGEST_LINE as u64).read_until(b'\n', &mut line);
            if !matches!(n, Ok(1..)) {
                return;
            }
            while matches!(line.last(), Some(b'\n' | b'\r')) {
                line.pop();
            }
            let text = String::from_utf8_lossy(&line).into_owned();
            if events.send(Event::Line { key, is_error, text }).is_err() {
                return;
            }
        }
    })
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
    let started = std::thread::Builder::new().name(name.to_owned()).spawn(run);
    started.map(drop).map_err(|error| Error::resource_exhausted(format!("no thread: {error}")))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const KEY: Key = Key { rank: 3, attempt: 1 };

    /// All that a shell says, and how it ends.
    fn run(script: &str, act: impl FnOnce(&ProcessGroup)) -> (Vec<String>, Ending) {
        let (sender, events) = mpsc::sync_channel(MOST_EVENTS);
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let group = ProcessGroup::start(command, KEY, sender, Arc::default()).unwrap();
        let mut lines = Vec::new();
        let mut act = Some(act);
        loop {
            match events.recv_timeout(Duration::from_secs(60)).unwrap() {
                Event::Line { key, is_error, text } => {
                    assert_eq!(key, KEY);
                    if text == "ready"
                        && let Some(act) = act.take()
                    {
                        act(&group);
                    }
                    lines.push(format!("{}{text}", if is_error { "! " } else { "" }));
                }
                Event::Ended { ending, .. } => return (lines, ending),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn lines_come_before_the_end_and_the_end_is_told() {
        let (mut lines, ending) = run("echo a; echo b >&2; printf c; exit 3", |_| {});
        lines.sort();
        assert_eq!((lines, ending.clone()), (vec!["! b".to_owned(), "a".to_owned(), "c".to_owned()], Ending::Code(3)));
        assert_eq!((ending.code(), ending.to_string()), (3, "exit code 3".to_owned()));
        let (_, ending) = run("kill -9 $$", |_| {});
        assert_eq!((ending.code(), ending.to_string()), (137, "signal: 9 (SIGKILL)".to_owned()));
        let long = run("head -c 200000 /dev/zero | tr '\\0' x", |_| {}).0;
        assert_eq!(long.iter().map(String::len).sum::<usize>(), 200_000);
        assert!(long.iter().all(|line| line.len() <= LONGEST_LINE));
    }

    #[test]
    fn what_a_process_has_started_ends_with_it() {
        // Grandchildren hold the pipes, so this would not end if they did not.
        let began = Instant::now();
        let (_, ending) = run("sleep 600 & sleep 600 & exit 0", |_| {});
        assert_eq!(ending, Ending::Code(0));
        let (_, ending) = run("sleep 600 & echo ready; wait", |group| group.signal(Signal::TERM));
        assert_eq!(ending, Ending::Signal(15));
        assert!(began.elapsed() < Duration::from_secs(60));
    }

    #[test]
    fn a_program_that_is_not_there_is_named() {
        let error = ProcessGroup::start(Command::new("/nonexistent/p"), KEY, mpsc::sync_channel(1).0, Arc::default())
            .err()
            .unwrap();
        assert!(error.to_string().contains("'/nonexistent/p' could not be started"), "{error}");
    }
}
