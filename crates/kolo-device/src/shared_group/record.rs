//! What a rank does and did last, in memory that others can read whatever has become of its process: stopped, stuck or dead.
//!
//! A rank alone writes its record (over TCP, its peers copy what it tells them), and anybody reads it. All fields are atomics, so a
//! reader sees values that were written, perhaps not all from the same moment; a call is read whole or not at all, by its number,
//! which is 0 while it is written. Times are of a clock that all processes of a host share.

use std::sync::OnceLock;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering::Relaxed, fence};

use super::member::{Condition, condition_of, own_namespace};

/// How many calls are kept.
pub const RECORDED_CALLS: usize = 16;

/// The most bytes by which a call says what it is.
pub const CALL_BYTES: usize = 256;

/// What a rank is busy with. While it is in a collective, it is both: a step computes beside its collectives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activity {
    /// Something that nobody has said.
    #[default]
    Other = 0,
    /// It computes a step.
    Computing = 1,
    /// It waits for the data of a step.
    Input = 2,
    /// It writes a checkpoint.
    Saving = 3,
    /// It tests the model.
    Evaluating = 4,
    /// It prepares a training: initial values, what is restored, what is compiled.
    Preparing = 5,
    /// It has ended its training.
    Ended = 6,
}

impl Activity {
    const ALL: [Activity; 7] = [
        Activity::Other,
        Activity::Computing,
        Activity::Input,
        Activity::Saving,
        Activity::Evaluating,
        Activity::Preparing,
        Activity::Ended,
    ];

    /// That of a number, which may come from anywhere.
    pub fn from_number(number: u32) -> Activity {
        Activity::ALL.get(number as usize).copied().unwrap_or_default()
    }
}

/// A rank's record, in shared memory.
#[repr(C, align(128))]
pub struct RankRecord {
    pid: AtomicU32,
    activity: AtomicU32,
    namespace: AtomicU64,
    host: AtomicU64,
    born: AtomicU64,
    since: AtomicU64,
    /// -1 if nobody has said.
    step: AtomicI64,
    n_begun: AtomicU64,
    n_done: AtomicU64,
    /// 1 + the rank, or 0.
    waits_for: AtomicU32,
    waits_since: AtomicU64,
    /// For a copy: when it was made.
    heard: AtomicU64,
    calls: [CallRecord; RECORDED_CALLS],
}

#[repr(C)]
struct CallRecord {
    /// 1 + the number, or 0.
    number: AtomicU64,
    step: AtomicI64,
    begun: AtomicU64,
    /// 0 while it is under way.
    finished: AtomicU64,
    what: [AtomicU64; CALL_BYTES / 8],
}

/// A record as it was at some moment. Times are nanoseconds of [`now`]; 0 is never.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankNote {
    /// The process, 0 if none has joined.
    pub pid: u32,
    /// The namespace of its number.
    pub namespace: u64,
    /// Its host.
    pub host: u64,
    /// When the process was started, in a unit of the system.
    pub born: u64,
    /// What it is busy with.
    pub activity: Activity,
    /// Since when.
    pub since: u64,
    /// The step that it is in.
    pub step: Option<i64>,
    /// How many calls it has begun.
    pub n_begun: u64,
    /// How many of them have ended.
    pub n_done: u64,
    /// Which rank it waits for in a call, and since when.
    pub waits_for: Option<(usize, u64)>,
    /// For what a peer has told: when.
    pub heard: u64,
    /// Its last calls, the oldest first.
    pub calls: Vec<CallNote>,
}

/// A call of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallNote {
    /// Which call of the group it is, from 0.
    pub number: u64,
    /// In which step.
    pub step: Option<i64>,
    /// When it began.
    pub begun: u64,
    /// When it ended, if it has.
    pub finished: Option<u64>,
    /// What it says of itself.
    pub what: Vec<u8>,
}

/// Nanoseconds on a clock of this host. It is cheap to read, and goes on every few milliseconds.
pub fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes to `time`, which outlives it. The clock exists on every Linux; if it did not, the time would be 0.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

impl RankRecord {
    /// This process has this record from now on.
    pub fn adopt(&self) {
        self.namespace.store(own_namespace(), Relaxed);
        self.host.store(own_host(), Relaxed);
        self.born.store(born(std::process::id()).unwrap_or(0), Relaxed);
        self.step.store(-1, Relaxed);
        self.note(Activity::Other);
        self.pid.store(std::process::id(), Release);
    }

    /// What the rank is busy with, from now on.
    pub fn note(&self, activity: Activity) {
        if self.activity.swap(activity as u32, Relaxed) != activity as u32 || self.since.load(Relaxed) == 0 {
            self.since.store(now(), Relaxed);
        }
    }

    /// The step that it begins.
    pub fn note_step(&self, step: i64, activity: Activity) {
        self.step.store(step, Relaxed);
        self.activity.store(activity as u32, Relaxed);
        self.since.store(now(), Relaxed);
    }

    /// The rank begins a call. One thread alone makes calls.
    pub fn begin_call(&self, number: u64, what: &[u8]) {
        let call = &self.calls[number as usize % RECORDED_CALLS];
        call.number.store(0, Relaxed);
        fence(Release);
        call.step.store(self.step.load(Relaxed), Relaxed);
        call.begun.store(now(), Relaxed);
        call.finished.store(0, Relaxed);
        let mut words = what.chunks(8);
        for at in &call.what {
            let mut word = [0; 8];
            let part = words.next().unwrap_or_default();
            word[..part.len()].copy_from_slice(part);
            at.store(u64::from_ne_bytes(word), Relaxed);
            // A word of zeros ends it.
            if part.is_empty() {
                break;
            }
        }
        call.number.store(number + 1, Release);
        self.n_begun.store(number + 1, Release);
    }

    /// The rank waits for another one in the call that it has begun last.
    pub fn wait_for(&self, rank: usize) {
        if self.waits_for.swap(rank as u32 + 1, Relaxed) != rank as u32 + 1 {
            self.waits_since.store(now(), Relaxed);
        }
    }

    /// The call that was begun last has ended.
    pub fn end_call(&self, number: u64) {
        self.waits_for.store(0, Relaxed);
        self.calls[number as usize % RECORDED_CALLS].finished.store(now(), Relaxed);
        self.n_done.store(number + 1, Release);
    }

    /// Writes what a peer has told of itself.
    pub fn copy(&self, note: &RankNote) {
        self.namespace.store(note.namespace, Relaxed);
        self.host.store(note.host, Relaxed);
        self.born.store(note.born, Relaxed);
        self.activity.store(note.activity as u32, Relaxed);
        self.since.store(note.since, Relaxed);
        self.step.store(note.step.unwrap_or(-1), Relaxed);
        self.heard.store(now(), Relaxed);
        for call in &note.calls {
            self.begin_call(call.number, &call.what);
            let at = &self.calls[call.number as usize % RECORDED_CALLS];
            at.step.store(call.step.unwrap_or(-1), Relaxed);
            at.begun.store(call.begun, Relaxed);
            at.finished.store(call.finished.unwrap_or(0), Relaxed);
        }
        self.n_begun.store(note.n_begun, Relaxed);
        self.n_done.store(note.n_done, Relaxed);
        self.waits_for.store(note.waits_for.map_or(0, |(rank, _)| rank as u32 + 1), Relaxed);
        self.waits_since.store(note.waits_for.map_or(0, |(_, since)| since), Relaxed);
        self.pid.store(note.pid, Release);
    }

    /// The step that the rank is in, if somebody has said so.
    pub fn step(&self) -> Option<i64> {
        Some(self.step.load(Relaxed)).filter(|step| *step >= 0)
    }

    /// How many calls the rank has begun.
    pub fn n_begun(&self) -> u64 {
        self.n_begun.load(Relaxed)
    }

    /// What it says now.
    pub fn read(&self) -> RankNote {
        let step = |step: i64| (step >= 0).then_some(step);
        let (n_begun, n_done) = (self.n_begun.load(Acquire), self.n_done.load(Acquire));
        let waits_for = (self.waits_for.load(Relaxed) as usize).checked_sub(1);
        let mut calls: Vec<CallNote> = self.calls.iter().filter_map(CallRecord::read).collect();
        calls.sort_by_key(|call| call.number);
        RankNote {
            pid: self.pid.load(Acquire),
            namespace: self.namespace.load(Relaxed),
            host: self.host.load(Relaxed),
            born: self.born.load(Relaxed),
            activity: Activity::from_number(self.activity.load(Relaxed)),
            since: self.since.load(Relaxed),
            step: step(self.step.load(Relaxed)),
            n_begun,
            n_done,
            waits_for: waits_for.map(|rank| (rank, self.waits_since.load(Relaxed))),
            heard: self.heard.load(Relaxed),
            calls,
        }
    }
}

impl CallRecord {
    fn read(&self) -> Option<CallNote> {
        let number = self.number.load(Acquire);
        let step = self.step.load(Relaxed);
        let (begun, finished) = (self.begun.load(Relaxed), self.finished.load(Relaxed));
        let words = self.what.iter().map(|word| word.load(Relaxed));
        let what: Vec<u8> = words.flat_map(u64::to_ne_bytes).collect();
        fence(Acquire);
        let is_whole = self.number.load(Relaxed) == number;
        let number = number.checked_sub(1).filter(|_| is_whole)?;
        let finished = (finished != 0).then_some(finished);
        Some(CallNote { number, step: (step >= 0).then_some(step), begun, finished, what })
    }
}

impl RankNote {
    /// What has become of its process, as far as can be seen from here.
    pub fn condition(&self) -> Condition {
        match self.pid {
            0 => Condition::Absent,
            _ if self.host != own_host() => Condition::Unknown,
            pid => match condition_of(pid, self.namespace) {
                // Its number may be another process's by now.
                Condition::Gone { .. } => Condition::Gone { pid },
                _ if self.born != 0 && born(pid).is_some_and(|born| born != self.born) => Condition::Gone { pid },
                condition => condition,
            },
        }
    }
}

/// Which host this is, since it was started.
fn own_host() -> u64 {
    static HOST: OnceLock<u64> = OnceLock::new();
    *HOST.get_or_init(|| {
        use std::hash::{DefaultHasher, Hash as _, Hasher as _};
        let mut hasher = DefaultHasher::new();
        std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default().hash(&mut hasher);
        hasher.finish()
    })
}

/// When a process was started: the twentieth field after its state.
fn born(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.split(' ').nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Box<RankRecord> {
        // SAFETY: atomics may hold any bytes, zeros included, as in a mapping.
        unsafe { Box::new_zeroed().assume_init() }
    }

    #[test]
    fn what_was_written_is_read_and_calls_of_long_ago_are_dropped() {
        let record = record();
        assert_eq!(record.read().condition(), Condition::Absent);
        record.adopt();
        record.note_step(7, Activity::Input);
        for number in 0..40 {
            record.begin_call(number, format!("call {number} ").repeat(1 + number as usize % 5).as_bytes());
            if number < 39 {
                record.end_call(number);
            }
        }
        record.wait_for(3);
        let note = record.read();
        assert_eq!((note.pid, note.activity, note.step), (std::process::id(), Activity::Input, Some(7)));
        assert_eq!((note.n_begun, note.n_done, note.waits_for.map(|wait| wait.0)), (40, 39, Some(3)));
        assert_eq!(note.condition(), Condition::Busy { pid: std::process::id() });
        let numbers: Vec<u64> = note.calls.iter().map(|call| call.number).collect();
        assert_eq!(numbers, (24..40).collect::<Vec<_>>());
        assert!(note.calls[15].what.starts_with(b"call 39 call 39 "), "{:?}", note.calls[15]);
        assert_eq!(note.calls.iter().filter(|call| call.finished.is_none()).count(), 1);
        let copy = self::record();
        copy.copy(&note);
        let copied = copy.read();
        assert!(copied.heard > 0);
        assert_eq!(RankNote { heard: 0, ..copied }, note);
        record.end_call(39);
        assert_eq!(record.read().waits_for, None);
    }

    #[test]
    fn a_process_with_the_number_of_a_dead_one_is_not_taken_for_it() {
        let record = record();
        record.adopt();
        let note = record.read();
        assert_eq!(RankNote { born: note.born + 1, ..note.clone() }.condition(), Condition::Gone { pid: note.pid });
        assert_eq!(RankNote { host: note.host ^ 1, ..note.clone() }.condition(), Condition::Unknown);
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id();
        child.wait().unwrap();
        assert_eq!(RankNote { pid, ..note }.condition(), Condition::Gone { pid });
    }

    /// A reader beside a writer never sees parts of two calls.
    #[test]
    fn a_call_is_read_whole() {
        let record = record();
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for number in 0..20_000u64 {
                    record.begin_call(number, &[(number % 250) as u8 + 1; CALL_BYTES]);
                    record.end_call(number);
                }
            });
            while !writer.is_finished() {
                for call in record.read().calls {
                    let byte = (call.number % 250) as u8 + 1;
                    assert!(call.what.iter().all(|found| *found == byte), "{call:?}");
                }
            }
        });
    }
}
