//! Ends process groups when the process that looks after them is killed: a small process that reads which groups there are, and kills
//! those that are left when nobody writes any more.

use std::collections::BTreeSet;
use std::io::{BufRead as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use rustix::process::{Pid, Signal, kill_process_group};

use crate::{Error, Result};

/// The command that this process runs itself as; people have no use for it.
pub const COMMAND: &str = "guard";

/// The writing end.
#[derive(Default)]
pub struct Guard {
    process: Mutex<Option<(Child, ChildStdin)>>,
}

impl Guard {
    /// Starts the process.
    pub fn start() -> Result<Guard> {
        let failed =
            |error: std::io::Error| Error::internal(format!("the process that guards others was not started: {error}"));
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        // A terminal's Ctrl-C is not for it.
        command.arg(COMMAND).process_group(0).stdin(Stdio::piped()).stdout(Stdio::null());
        let mut child = command.spawn().map_err(failed)?;
        let stdin = child.stdin.take();
        Ok(Guard { process: Mutex::new(stdin.map(|stdin| (child, stdin))) })
    }

    /// From now on a group is ended with this process.
    pub fn add(&self, group: Pid) {
        self.say('+', group);
    }

    /// A group is over. To be called while its number is still its own.
    pub fn remove(&self, group: Pid) {
        self.say('-', group);
    }

    fn say(&self, what: char, group: Pid) {
        if let Some((_, stdin)) = &mut *self.process.lock().unwrap_or_else(PoisonError::into_inner) {
            // Without it, all that is lost is what it guards against.
            let _ = writeln!(stdin, "{what}{}", group.as_raw_nonzero());
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some((mut child, stdin)) = self.process.lock().unwrap_or_else(PoisonError::into_inner).take() {
            drop(stdin);
            let _ = child.wait();
        }
    }
}

/// The process itself.
pub fn run() -> Result<()> {
    let mut groups = BTreeSet::new();
    for line in std::io::stdin().lock().lines().map_while(std::io::Result::ok) {
        match (line.strip_prefix('+'), line.strip_prefix('-')) {
            (Some(group), _) => drop(group.parse::<i32>().map(|group| groups.insert(group))),
            (_, Some(group)) => drop(group.parse::<i32>().map(|group| groups.remove(&group))),
            (None, None) => {}
        }
    }
    for group in groups.into_iter().filter_map(Pid::from_raw) {
        // It may have ended in this moment.
        let _ = kill_process_group(group, Signal::KILL);
    }
    Ok(())
}
