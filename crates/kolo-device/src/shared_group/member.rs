//! Which process a rank of a group is, and whether it is still there.
//!
//! A process that ends, however it does, makes its pidfd readable; one that is reaped late does so, too. Process numbers mean
//! something only within one namespace: ranks in different containers are not watched.

use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};

/// A rank's process, in shared memory.
#[repr(C, align(64))]
pub(super) struct Member {
    state: AtomicU32,
    pid: AtomicU32,
    /// The namespace of its number.
    namespace: AtomicU64,
}

const ABSENT: u32 = 0;
const JOINING: u32 = 1;
const HERE: u32 = 2;
const LEFT: u32 = 3;

/// What a rank is doing that others wait for, as far as can be seen from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// It has not joined.
    Absent,
    /// Its process was stopped by a signal or a debugger.
    Stopped {
        /// The process.
        pid: u32,
    },
    /// It runs, or waits for something else.
    Busy {
        /// The process.
        pid: u32,
    },
    /// Its process has ended.
    Gone {
        /// The process that it was.
        pid: u32,
    },
    /// Its process cannot be seen from here.
    Unknown,
}

impl std::fmt::Display for Condition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Condition::Absent => f.write_str("has not joined yet"),
            Condition::Stopped { pid } => write!(f, "is stopped (`kill -CONT {pid}` lets it go on)"),
            Condition::Busy { pid } => write!(f, "is there, as process {pid}, and does something else"),
            Condition::Gone { pid } => write!(f, "has died: process {pid} has ended"),
            Condition::Unknown => f.write_str("cannot be seen from here"),
        }
    }
}

impl Member {
    /// What it is doing, if it is not gone.
    pub fn condition(&self) -> Condition {
        if self.state.load(SeqCst) != HERE {
            return Condition::Absent;
        }
        condition_of(self.pid.load(SeqCst), self.namespace.load(SeqCst))
    }

    /// This process is the rank from now on; false if there was one already.
    pub fn join(&self) -> bool {
        if self.state.compare_exchange(ABSENT, JOINING, SeqCst, SeqCst).is_err() {
            return false;
        }
        self.pid.store(std::process::id(), SeqCst);
        self.namespace.store(own_namespace(), SeqCst);
        self.state.store(HERE, SeqCst);
        true
    }

    /// Whether a process is the rank, or was.
    pub fn has_joined(&self) -> bool {
        matches!(self.state.load(SeqCst), HERE | LEFT)
    }

    /// The rank is done.
    pub fn leave(&self) {
        self.state.store(LEFT, SeqCst);
    }
}

/// Looks after one rank's process.
#[derive(Default)]
pub(super) struct Watch {
    /// Opened when the rank is first waited for. `None` if its process cannot be watched.
    process: OnceLock<Option<OwnedFd>>,
}

impl Watch {
    /// What became of a rank that is not there any more.
    pub fn gone(&self, member: &Member) -> Option<&'static str> {
        match member.state.load(SeqCst) {
            HERE => {
                let process = self.process.get_or_init(|| open(member)).as_ref()?;
                has_ended(process).then_some("has died: its process has ended")
            }
            LEFT => Some("has left the group"),
            // It has not come yet.
            _ => None,
        }
    }
}

/// What a process is doing.
pub(super) fn condition_of(pid: u32, namespace: u64) -> Condition {
    if namespace == 0 || namespace != own_namespace() {
        return Condition::Unknown;
    }
    // The state is the first letter after the name, which is in brackets and may hold anything.
    let stat = match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat,
        // It may end between the opening and the reading.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => {
            return Condition::Gone { pid };
        }
        Err(_) => return Condition::Unknown,
    };
    match stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()) {
        Some('T' | 't') => Condition::Stopped { pid },
        Some('Z' | 'X') => Condition::Gone { pid },
        Some(_) => Condition::Busy { pid },
        None => Condition::Unknown,
    }
}

pub(super) fn own_namespace() -> u64 {
    std::fs::metadata("/proc/self/ns/pid").map_or(0, |namespace| namespace.ino())
}

fn open(member: &Member) -> Option<OwnedFd> {
    let (pid, namespace) = (member.pid.load(SeqCst), member.namespace.load(SeqCst));
    if namespace == 0 || namespace != own_namespace() {
        return None;
    }
    // SAFETY: the call takes two numbers and touches no memory of ours.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0)?;
    // SAFETY: the descriptor is new, and nobody else has it.
    Some(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn has_ended(process: &OwnedFd) -> bool {
    let mut poll = libc::pollfd { fd: process.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one entry, which outlives the call; it does not wait.
    let n = unsafe { libc::poll(&raw mut poll, 1, 0) };
    n == 1 && poll.revents & libc::POLLIN != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_is_stopped_or_killed_is_noticed() {
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let member = Member { state: HERE.into(), pid: child.id().into(), namespace: own_namespace().into() };
        let watch = Watch::default();
        assert_eq!(watch.gone(&member), None);
        assert_eq!(member.condition(), Condition::Busy { pid: child.id() });
        let stop = std::process::Command::new("kill").arg("-STOP").arg(child.id().to_string()).status().unwrap();
        assert!(stop.success());
        while member.condition() != (Condition::Stopped { pid: child.id() }) {
            std::thread::yield_now();
        }
        assert!(member.condition().to_string().starts_with("is stopped (`kill -CONT"));
        child.kill().unwrap();
        while watch.gone(&member).is_none() {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(watch.gone(&member).unwrap().contains("died"));
        let elsewhere = Member { namespace: 1.into(), ..member };
        assert_eq!(Watch::default().gone(&elsewhere), None, "its number means nothing here");
    }
}
