//! A group of processes on one host that exchange data through a shared file in memory.
//!
//! Communication is a series of [`Round`]s, which every rank goes through in the same order. In a round a rank writes to a buffer of
//! its own, publishes it, and reads what others have published, in this round and in the one before:
//!
//! ```text
//! begin ─► write own buffer ─► publish ─► wait for others ─► read theirs ─► (next round)
//!             └ and read what others published in the round before ┘
//! ```
//!
//! There is no barrier at the end of a round. Each rank has four buffers, which rounds use in turn (`ring.rs`), and
//! [`SharedGroup::begin`] waits until nobody reads the one that the new round is about to overwrite. In most collectives every rank
//! has seen that already, and `begin` touches no shared memory. Since what was published may be read one round later, a long
//! vector goes through in pieces with a single meeting for each, and a rank need not wait there for one that is half a piece behind.
//!
//! How far a rank is, is a `Flag` on cache lines of its own: the number of rounds that it has published. A rank that waits spins for
//! some microseconds, then gives up its core to others in turns (there may be more ranks than cores), and then sleeps. It wakes up
//! now and then to look whether it should stop, and whether the other process is still there.

mod board;
mod flag;
mod member;
mod record;
mod ring;
mod round;
#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::mem::size_of;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kolo_core::{Error, Result};

use self::flag::{Flag, reached};
use self::member::{Member, Watch};
use self::ring::{N_BUFFERS, before_writing, buffer_of, published};
use crate::SharedMap;

pub use self::board::{BoardOf, RankBoard};
pub use self::member::Condition;
pub use self::record::{Activity, CALL_BYTES, CallNote, RECORDED_CALLS, RankNote, RankRecord, now};
pub use self::round::{Meeting, Published, Round};

/// What [`flag`] is built on.
mod sync {
    pub(super) use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
    use std::time::Duration;

    /// Sleeps while `word` is `expected`, for `at_most`.
    pub(super) fn futex_wait(word: &AtomicU32, expected: u32, at_most: Duration) {
        let time = libc::timespec {
            tv_sec: at_most.as_secs().min(3600) as libc::time_t,
            tv_nsec: libc::c_long::from(at_most.subsec_nanos()),
        };
        // SAFETY: the word and the time outlive the call, which only reads them. A wrong result is a wake-up for no reason, which
        // callers expect.
        unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, expected, &raw const time) };
    }

    /// Wakes all who sleep on `word`, in any process.
    pub(super) fn futex_wake(word: &AtomicU32) {
        // SAFETY: the word is only an address here: nothing is written to it.
        unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, libc::c_int::MAX) };
    }
}

/// The most ranks of a group on one host.
pub const MAX_RANKS: usize = 256;

/// The alignment of every buffer.
const ALIGNMENT: usize = 4096;

/// How long a rank spins before it gives up its core, if there is a core for each rank.
const SPIN: Duration = Duration::from_micros(30);

/// How long it lets others run, in turns, before it sleeps.
const YIELD: Duration = Duration::from_micros(200);

/// How often a sleeping rank looks whether it should stop.
const SLEEP: Duration = Duration::from_millis(20);

/// At the start of the file.
#[repr(C, align(128))]
struct Header {
    magic: AtomicU64,
    n_ranks: AtomicU32,
    /// 1 + the rank that ended the group, or 0. On a board of one rank, that rank.
    ended_by: AtomicU32,
    buffer_bytes: AtomicU64,
    /// On a board of one rank, the name of its group.
    group: [AtomicU64; 2],
    /// Bytes of `reason`, or 0 while there is none.
    reason_bytes: AtomicU32,
    /// Why the group was ended, in words.
    reason: [AtomicU8; MAX_REASON],
}

/// A longer reason is cut off.
const MAX_REASON: usize = 1000;

const MAGIC: u64 = u64::from_le_bytes(*b"kologrp2");

/// This process's end of a group.
pub struct SharedGroup {
    map: SharedMap,
    rank: usize,
    n_ranks: usize,
    buffer_bytes: usize,
    /// The number of the round that is next.
    round: u64,
    /// What each rank's flag was last seen at.
    seen: Vec<Cell<u32>>,
    spins: bool,
    /// To learn that a rank's process has ended.
    watches: Vec<Watch>,
    /// What its ranks are called in errors, if they are some of a larger group.
    names: Vec<usize>,
}

/// When a rank stops waiting for another one.
#[derive(Clone, Copy)]
pub struct WaitLimits<'a> {
    /// Not after this.
    pub deadline: Option<Instant>,
    /// An error as soon as the wait for this rank is pointless. It is asked now and then while a rank sleeps.
    pub stop: &'a dyn Fn(usize) -> Result<()>,
}

impl WaitLimits<'_> {
    /// Waits for ever: for tests, and where the caller watches over the group.
    pub const NONE: WaitLimits<'static> = WaitLimits { deadline: None, stop: &|_| Ok(()) };
}

impl SharedGroup {
    /// Bytes of the file of a group of `n_ranks`, each with buffers of `buffer_bytes`.
    fn file_bytes(n_ranks: usize, buffer_bytes: usize) -> Option<usize> {
        let flags = Self::data_start(n_ranks);
        buffer_bytes.checked_mul(N_BUFFERS as usize)?.checked_mul(n_ranks)?.checked_add(flags)
    }

    /// Where the buffers begin.
    fn data_start(n_ranks: usize) -> usize {
        (Self::records_start(n_ranks) + n_ranks * size_of::<RankRecord>()).next_multiple_of(ALIGNMENT)
    }

    /// Where ranks record what they do.
    fn records_start(n_ranks: usize) -> usize {
        (Self::members_start(n_ranks) + n_ranks * size_of::<Member>()).next_multiple_of(128)
    }

    /// Where it is written which processes the ranks are.
    fn members_start(n_ranks: usize) -> usize {
        size_of::<Header>() + n_ranks * size_of::<Flag>()
    }

    /// A file in memory without a name, for a group of threads.
    pub fn anonymous_file() -> io::Result<File> {
        // SAFETY: the name ends in a zero, and the call touches no other memory of ours.
        let fd = unsafe { libc::memfd_create(c"kolo-group".as_ptr(), libc::MFD_CLOEXEC) };
        match fd {
            // SAFETY: the descriptor is new, and nobody else has it.
            0.. => Ok(unsafe { std::os::fd::FromRawFd::from_raw_fd(fd) }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Lays a group out in `file`, which all ranks will [`join`](SharedGroup::join). `buffer_bytes` is rounded up to whole pages.
    /// An error if there is not enough memory for it.
    pub fn create(file: &File, n_ranks: usize, buffer_bytes: usize) -> Result<()> {
        let refused = |why: String| Error::invalid_argument(format!("a group in shared memory cannot be made: {why}"));
        if n_ranks == 0 || n_ranks > MAX_RANKS {
            return Err(refused(format!("it has {n_ranks} ranks, not 1 to {MAX_RANKS}")));
        }
        let buffer_bytes = buffer_bytes.max(1).next_multiple_of(ALIGNMENT);
        let n_bytes = Self::file_bytes(n_ranks, buffer_bytes).ok_or_else(|| refused("it is too large".to_owned()))?;
        let map = SharedMap::create(file, n_bytes).map_err(|error| no_memory(&error, n_bytes))?;
        let header = header(&map);
        header.n_ranks.store(n_ranks as u32, Ordering::Relaxed);
        header.buffer_bytes.store(buffer_bytes as u64, Ordering::Relaxed);
        // Last: who finds it finds the rest.
        header.magic.store(MAGIC, Ordering::Release);
        Ok(())
    }

    /// Joins the group in `file` as `rank`. Each rank joins once.
    pub fn join(file: &File, rank: usize) -> Result<SharedGroup> {
        let mut group = Self::open(file)?;
        if rank >= group.n_ranks {
            return Err(Error::invalid_argument(format!("there is no rank {rank} in a group of {}", group.n_ranks)));
        }
        // Whoever is rank `rank` already stays it: dropping this end must not make it leave, so it is nobody's until then.
        match group.member(rank).join() {
            true => group.rank = rank,
            false => return Err(Error::already_exists(format!("rank {rank} of the group has joined already"))),
        }
        Ok(group)
    }

    /// The same end, whose errors call its ranks by these numbers: they are some of a larger group.
    pub fn with_names(mut self, names: Vec<usize>) -> SharedGroup {
        self.names = names;
        self
    }

    fn name_of(&self, rank: usize) -> usize {
        self.names.get(rank).copied().unwrap_or(rank)
    }

    /// Ends the group in `file` for all ranks, those that have not joined yet included; for somebody who is none of them.
    pub fn close(file: &File, reason: &str) -> Result<()> {
        Self::open(file)?.end(reason);
        Ok(())
    }

    /// Whether `rank` has joined the group in `file`, also if it has left since.
    pub fn has_joined(file: &File, rank: usize) -> Result<bool> {
        let group = Self::open(file)?;
        Ok(rank < group.n_ranks && group.member(rank).has_joined())
    }

    /// The group in `file`, for nobody: the rank after the last.
    fn open(file: &File) -> Result<SharedGroup> {
        let refused = |why: &str| Error::invalid_argument(format!("the file of a group in shared memory {why}"));
        let n_bytes = file.metadata().map_err(|error| refused(&format!("cannot be read: {error}")))?.len() as usize;
        if n_bytes < ALIGNMENT {
            return Err(refused("is too short"));
        }
        let map = SharedMap::open(file, n_bytes).map_err(|error| no_memory(&error, n_bytes))?;
        let header = header(&map);
        if header.magic.load(Ordering::Acquire) != MAGIC {
            return Err(refused("is not one"));
        }
        let n_ranks = header.n_ranks.load(Ordering::Relaxed) as usize;
        let buffer_bytes = header.buffer_bytes.load(Ordering::Relaxed) as usize;
        let is_sound = (1..=MAX_RANKS).contains(&n_ranks)
            && buffer_bytes.is_multiple_of(ALIGNMENT)
            && Self::file_bytes(n_ranks, buffer_bytes).is_some_and(|needed| needed <= n_bytes);
        if !is_sound {
            return Err(refused("is damaged"));
        }
        let n_cores = std::thread::available_parallelism().map_or(1, usize::from);
        let spins = n_ranks <= n_cores;
        let watches = (0..n_ranks).map(|_| Watch::default()).collect();
        Ok(SharedGroup {
            map,
            rank: n_ranks,
            n_ranks,
            buffer_bytes,
            round: 0,
            seen: vec![Cell::new(0); n_ranks],
            spins,
            watches,
            names: Vec::new(),
        })
    }

    /// This process's rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks.
    pub fn n_ranks(&self) -> usize {
        self.n_ranks
    }

    /// Whether there is a core for each rank.
    pub fn has_cores(&self) -> bool {
        self.spins
    }

    /// The most bytes that a rank can publish at once.
    pub fn buffer_bytes(&self) -> usize {
        self.buffer_bytes
    }

    /// Ends the group for all ranks: every wait, also of other processes, returns an error that says who ended it and why, now
    /// and from now on. The first one who does is the cause.
    pub fn end(&self, reason: &str) {
        let header = header(&self.map);
        if header.ended_by.compare_exchange(0, self.rank as u32 + 1, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            let bytes = &reason.as_bytes()[..reason.len().min(MAX_REASON)];
            header.reason.iter().zip(bytes).for_each(|(at, byte)| at.store(*byte, Ordering::Relaxed));
            header.reason_bytes.store(bytes.len() as u32, Ordering::SeqCst);
        }
        (0..self.n_ranks).for_each(|rank| self.flag(rank).wake());
    }

    /// The rank that has ended the group, and why; the rank after the last for somebody else.
    pub fn ended(&self) -> Option<(usize, String)> {
        let header = header(&self.map);
        let by = (header.ended_by.load(Ordering::SeqCst) as usize).checked_sub(1)?;
        let n_bytes = (header.reason_bytes.load(Ordering::SeqCst) as usize).min(MAX_REASON);
        let bytes: Vec<u8> = header.reason[..n_bytes].iter().map(|byte| byte.load(Ordering::Relaxed)).collect();
        Some((by, String::from_utf8_lossy(&bytes).into_owned()))
    }

    /// Begins a round. An error if the group has ended.
    pub fn begin(&mut self, limits: &WaitLimits<'_>) -> Result<Round<'_>> {
        self.check_ended()?;
        let round = self.round;
        if let Some(sequence) = before_writing(round) {
            (0..self.n_ranks).try_for_each(|rank| self.wait(rank, sequence, limits))?;
        }
        self.round += 1;
        Ok(Round::new(self, round))
    }

    fn check_ended(&self) -> Result<()> {
        match self.ended() {
            Some((by, why)) if by < self.n_ranks => {
                Err(Error::aborted(format!("rank {} has ended the group: {why}", self.name_of(by))))
            }
            Some((_, why)) => Err(Error::aborted(format!("the group was closed: {why}"))),
            None => Ok(()),
        }
    }

    fn member(&self, rank: usize) -> &Member {
        debug_assert!(rank < self.n_ranks);
        let at = Self::members_start(self.n_ranks) + rank * size_of::<Member>();
        // SAFETY: as for `flag`.
        unsafe { &*self.map.start().add(at).cast::<Member>() }
    }

    fn flag(&self, rank: usize) -> &Flag {
        debug_assert!(rank < self.n_ranks);
        let at = size_of::<Header>() + rank * size_of::<Flag>();
        // SAFETY: `join` checked that the mapping holds the header, a flag and a member per rank, and the buffers; these are atomics
        // that any bytes are valid for, and the mapping is aligned to a page.
        unsafe { &*self.map.start().add(at).cast::<Flag>() }
    }

    /// Waits until `rank` has come to `sequence`.
    fn wait(&self, rank: usize, sequence: u32, limits: &WaitLimits<'_>) -> Result<()> {
        let seen = &self.seen[rank];
        if rank != self.rank && !reached(seen.get(), sequence) {
            seen.set(self.wait_for(rank, sequence, limits)?);
        }
        Ok(())
    }

    fn wait_for(&self, rank: usize, sequence: u32, limits: &WaitLimits<'_>) -> Result<u32> {
        let flag = self.flag(rank);
        let began = Instant::now();
        let mut turns = 0u32;
        loop {
            let found = flag.sequence();
            if reached(found, sequence) {
                return Ok(found);
            }
            turns = turns.wrapping_add(1);
            // The clock takes longer than a look at the flag.
            if self.spins && !turns.is_multiple_of(32) {
                std::hint::spin_loop();
                continue;
            }
            let waited = began.elapsed();
            if self.spins && waited < SPIN {
                std::hint::spin_loop();
            } else if waited < YIELD {
                std::thread::yield_now();
            } else {
                self.check_ended()?;
                if let Some(how) = self.watches[rank].gone(self.member(rank)) {
                    // What it published before it went is looked at once more.
                    return match flag.sequence() {
                        found if reached(found, sequence) => Ok(found),
                        _ => Err(Error::aborted(format!("rank {} {how}", self.name_of(rank)))),
                    };
                }
                (limits.stop)(rank)?;
                let now = Instant::now();
                if limits.deadline.is_some_and(|deadline| now >= deadline) {
                    return Err(Error::deadline_exceeded(format!(
                        "rank {} has waited {:.1} s for rank {}, which {}",
                        self.name_of(self.rank),
                        waited.as_secs_f64(),
                        self.name_of(rank),
                        self.member(rank).condition()
                    )));
                }
                let left = limits.deadline.map_or(SLEEP, |deadline| SLEEP.min(deadline - now));
                flag.sleep_below(sequence, left);
            }
        }
    }

    /// Where a buffer of a rank begins.
    fn buffer_start(&self, rank: usize, round: u64) -> usize {
        let index = rank * N_BUFFERS as usize + buffer_of(round);
        Self::data_start(self.n_ranks) + index * self.buffer_bytes
    }

    /// A buffer that its rank has published, as was seen.
    fn published(&self, rank: usize, round: u64) -> Result<&[u8]> {
        if rank != self.rank && !self.seen.get(rank).is_some_and(|seen| reached(seen.get(), published(round))) {
            return Err(Error::internal(format!("what rank {rank} publishes was not waited for")));
        }
        let start = self.buffer_start(rank, round);
        // SAFETY: it lies in the mapping, whose size `join` checked. Its rank has published it, and writes to it again only
        // when this rank has begun the round after the next one (see `ring`), for which the group must be borrowed anew.
        Ok(unsafe { std::slice::from_raw_parts(self.map.start().add(start).cast_const(), self.buffer_bytes) })
    }
}

/// The rank leaves: who waits for it learns so.
impl Drop for SharedGroup {
    fn drop(&mut self) {
        if self.rank < self.n_ranks {
            self.member(self.rank).leave();
            self.flag(self.rank).wake();
        }
    }
}

fn header(map: &SharedMap) -> &Header {
    debug_assert!(map.n_bytes() >= size_of::<Header>());
    // SAFETY: callers map at least a page; the header is atomics that any bytes are valid for, and a mapping is aligned to a
    // page.
    unsafe { &*map.start().cast::<Header>() }
}

fn no_memory(error: &io::Error, n_bytes: usize) -> Error {
    Error::resource_exhausted(format!(
        "{} MiB of shared memory for a group cannot be had: {error}; is /dev/shm large enough?",
        n_bytes >> 20
    ))
}
