//! Processes that a command starts, whose output it shows, and which end with it.

use std::io::{BufRead, BufReader, Read, Write as _};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use crate::cli::machine;
use crate::{Error, Result};

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
pub struct Process {
    pub label: String,
    child: Child,
}

impl Process {
    /// A process that was started with a pipe for its standard input.
    #[cfg(test)]
    pub fn new(label: String, child: Child) -> Process {
        Process { label, child }
    }

    /// Writes a line to its standard input. One that has ended does not get it.
    pub fn tell(&mut self, line: &str) {
        if let Some(stdin) = &mut self.child.stdin {
            drop(writeln!(stdin, "{line}"));
        }
    }

    /// Ends it at once.
    pub fn kill(&mut self) {
        // One that has ended by itself meanwhile is as dead.
        drop(self.child.kill());
    }

    /// How much memory it has, if the system says so.
    pub fn resident_bytes(&self) -> Option<u64> {
        machine::process(self.child.id()).map(|process| process.memory)
    }

    /// Closes its standard input, which asks it to end.
    pub fn ask_to_end(&mut self) {
        drop(self.child.stdin.take());
    }

    /// How it has ended, if it has.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().map_err(|error| Error::internal(format!("{}: {error}", self.label)))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // What does not end by itself is killed.
        self.ask_to_end();
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

/// Starts a process whose output comes line by line, under the number `index`.
pub fn start(mut command: Command, label: String, index: usize, said: &Sender<Said>) -> Result<Process> {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = start_with_own_output(command, label)?;
    let (out, err) = (process.child.stdout.take(), process.child.stderr.take());
    read_lines(out, said.clone(), move |line| Said::Out(index, line))?;
    read_lines(err, said.clone(), move |line| Said::Err(index, line))?;
    Ok(process)
}

/// Starts a process that writes where `command` says; to where this one does, if it says nothing.
pub fn start_with_own_output(mut command: Command, label: String) -> Result<Process> {
    // A terminal's Ctrl-C is for this process, which ends the others in order.
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let spawned = command.stdin(Stdio::piped()).spawn();
    let child = spawned.map_err(|error| Error::unavailable(format!("{label} could not be started: {error}")))?;
    Ok(Process { label, child })
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

/// The flags of this process that those it starts share: all but `with_value`, which take a value, and `without`.
pub fn own_flags(with_value: &[&str], without: &[&str]) -> Vec<String> {
    let mut flags = Vec::new();
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        if with_value.contains(&arg.as_str()) {
            drop(args.next());
            continue;
        }
        let has_value = |flag: &&str| arg.strip_prefix(*flag).is_some_and(|rest| rest.starts_with('='));
        if !without.contains(&arg.as_str()) && !with_value.iter().any(has_value) {
            flags.push(arg);
        }
    }
    flags
}

/// In a process that another one has started: sets the flag when that one ends, or asks for it. What it writes comes line by line.
pub fn end_with_parent(stop: Arc<AtomicBool>) -> Receiver<String> {
    let (sender, lines) = mpsc::channel();
    let watch = move || {
        // It ends with the process that holds the other end.
        for line in std::io::stdin().lock().lines().map_while(std::io::Result::ok) {
            // Whoever does not want to hear goes on without.
            drop(sender.send(line));
        }
        stop.store(true, Ordering::Relaxed);
    };
    if let Err(error) = std::thread::Builder::new().name("kolo-parent".to_owned()).spawn(watch) {
        tracing::warn!("the end of the starting process will not be noticed: {error}");
    }
    lines
}
