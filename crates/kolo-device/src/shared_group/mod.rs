//! A group of processes on one host that exchange data through a shared file in memory.
//!
//! Communication is a series of [`Round`]s, which every rank goes through in the same order. In a round a rank writes its input
//! and publishes it, reads the inputs of others, and may publish an output, which others read in turn:
//!
//! ```text
//! begin ─► write input ─► publish ─► read inputs ─► write output ─► publish ─► read outputs ─► (next round)
//! ```
//!
//! There is no barrier at the end of a round. Each rank has two buffers of each kind, which rounds use in turn, and
//! [`SharedGroup::begin`] waits until every rank has published its input of the round before: it has then finished the round
//! before that, so nobody reads the buffers that the new round is about to overwrite. In most collectives every rank has seen
//! that already, and `begin` touches no shared memory.
//!
//! How far a rank is, is a `Flag` on cache lines of its own: `2·round + 1` once the input is published, `2·round + 2` once the
//! output is. A rank that waits spins for some microseconds, then gives up its core to others in turns (there may be more ranks
//! than cores), and then sleeps. It wakes up now and then to look whether it should stop, and whether the other process is
//! still there.

mod flag;
mod member;

use std::fs::File;
use std::io;
use std::mem::size_of;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kolo_core::{Error, Result};

use self::flag::{Flag, reached};
use self::member::{Condition, Member, Watch};
use crate::SharedMap;

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

/// After this, a rank that waits looks at the process that it waits for.
const SUSPICIOUS: Duration = Duration::from_secs(1);

/// How often a sleeping rank looks whether it should stop.
const SLEEP: Duration = Duration::from_millis(20);

/// At the start of the file.
#[repr(C, align(128))]
struct Header {
    magic: AtomicU64,
    n_ranks: AtomicU32,
    /// 1 + the rank that ended the group, or 0.
    ended_by: AtomicU32,
    buffer_bytes: AtomicU64,
    /// Bytes of `reason`, or 0 while there is none.
    reason_bytes: AtomicU32,
    /// Why the group was ended, in words.
    reason: [AtomicU8; MAX_REASON],
}

/// A longer reason is cut off.
const MAX_REASON: usize = 1000;

const MAGIC: u64 = u64::from_le_bytes(*b"kologrp1");

/// This process's end of a group.
pub struct SharedGroup {
    map: SharedMap,
    rank: usize,
    n_ranks: usize,
    buffer_bytes: usize,
    /// The number of the round that is next.
    round: u64,
    /// What each rank's flag was last seen at.
    seen: Vec<u32>,
    spins: bool,
    /// To learn that a rank's process has ended.
    watches: Vec<Watch>,
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
        buffer_bytes.checked_mul(4)?.checked_mul(n_ranks)?.checked_add(flags)
    }

    /// Where the buffers begin.
    fn data_start(n_ranks: usize) -> usize {
        (Self::members_start(n_ranks) + n_ranks * size_of::<Member>()).next_multiple_of(ALIGNMENT)
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
        Ok(SharedGroup { map, rank: n_ranks, n_ranks, buffer_bytes, round: 0, seen: vec![0; n_ranks], spins, watches })
    }

    /// This process's rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks.
    pub fn n_ranks(&self) -> usize {
        self.n_ranks
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
        if self.round > 0 {
            let before = published_input(self.round - 1);
            for rank in 0..self.n_ranks {
                self.wait(rank, before, limits)?;
            }
        }
        let round = self.round;
        self.round += 1;
        Ok(Round { group: self, round })
    }

    fn check_ended(&self) -> Result<()> {
        match self.ended() {
            Some((by, why)) if by < self.n_ranks => {
                Err(Error::aborted(format!("rank {by} has ended the group: {why}")))
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
    fn wait(&mut self, rank: usize, sequence: u32, limits: &WaitLimits<'_>) -> Result<()> {
        if rank == self.rank || reached(self.seen[rank], sequence) {
            return Ok(());
        }
        let found = self.wait_for(rank, sequence, limits)?;
        self.seen[rank] = found;
        Ok(())
    }

    fn wait_for(&self, rank: usize, sequence: u32, limits: &WaitLimits<'_>) -> Result<u32> {
        let flag = self.flag(rank);
        let began = Instant::now();
        let (mut turns, mut has_looked) = (0u32, false);
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
                        _ => Err(Error::aborted(format!("rank {rank} {how}"))),
                    };
                }
                (limits.stop)(rank)?;
                if waited >= SUSPICIOUS && !has_looked {
                    has_looked = true;
                    if let condition @ Condition::Stopped { .. } = self.member(rank).condition() {
                        tracing::warn!("rank {} waits for rank {rank}, which {condition}", self.rank);
                    }
                }
                let now = Instant::now();
                if limits.deadline.is_some_and(|deadline| now >= deadline) {
                    return Err(Error::deadline_exceeded(format!(
                        "rank {} has waited {:.1} s for rank {rank}, which {}",
                        self.rank,
                        waited.as_secs_f64(),
                        self.member(rank).condition()
                    )));
                }
                let left = limits.deadline.map_or(SLEEP, |deadline| SLEEP.min(deadline - now));
                flag.sleep_below(sequence, left);
            }
        }
    }

    /// Where a buffer of a rank begins.
    fn buffer_start(&self, rank: usize, kind: BufferKind, round: u64) -> usize {
        let index = rank * 4 + kind as usize * 2 + (round % 2) as usize;
        Self::data_start(self.n_ranks) + index * self.buffer_bytes
    }

    /// A buffer of this rank, to write.
    fn own_mut(&mut self, kind: BufferKind, round: u64) -> &mut [u8] {
        let start = self.buffer_start(self.rank, kind, round);
        // SAFETY: it lies in the mapping, whose size `join` checked. Nobody else touches it: this rank has not published it in
        // this round, and everybody is done with the round that used it last (see `begin`).
        unsafe { std::slice::from_raw_parts_mut(self.map.start().add(start), self.buffer_bytes) }
    }

    /// A buffer that its rank has published, as was seen.
    fn published(&self, rank: usize, kind: BufferKind, round: u64) -> Result<&[u8]> {
        let sequence = match kind {
            BufferKind::Input => published_input(round),
            BufferKind::Output => published_output(round),
        };
        if rank != self.rank && !self.seen.get(rank).is_some_and(|seen| reached(*seen, sequence)) {
            return Err(Error::internal(format!("what rank {rank} publishes was not waited for")));
        }
        let start = self.buffer_start(rank, kind, round);
        // SAFETY: it lies in the mapping, whose size `join` checked. Its rank has published it, and writes to it again only
        // when this rank has begun the round after this one, for which the group must be borrowed anew.
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

#[derive(Clone, Copy)]
enum BufferKind {
    Input = 0,
    Output = 1,
}

/// What a flag stands at once the input of a round is published. It wraps around.
fn published_input(round: u64) -> u32 {
    (2 * round + 1) as u32
}

/// The same for the output.
fn published_output(round: u64) -> u32 {
    (2 * round + 2) as u32
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

/// A round in which this rank has not published its input yet.
#[must_use = "a round that a rank does not publish its input in keeps all others waiting"]
pub struct Round<'g> {
    group: &'g mut SharedGroup,
    round: u64,
}

impl<'g> Round<'g> {
    /// What this rank is going to publish. It has whatever contents it had.
    pub fn input(&mut self) -> &mut [u8] {
        self.group.own_mut(BufferKind::Input, self.round)
    }

    /// Publishes the input.
    pub fn publish(self) -> Inputs<'g> {
        self.group.flag(self.group.rank).raise(published_input(self.round));
        Inputs { group: self.group, round: self.round }
    }
}

/// A round in which this rank has published its input, but no output.
pub struct Inputs<'g> {
    group: &'g mut SharedGroup,
    round: u64,
}

impl<'g> Inputs<'g> {
    /// Waits for the inputs of all ranks.
    pub fn wait_all(&mut self, limits: &WaitLimits<'_>) -> Result<()> {
        (0..self.group.n_ranks).try_for_each(|rank| self.wait(rank, limits))
    }

    /// Waits for the input of a rank.
    pub fn wait(&mut self, rank: usize, limits: &WaitLimits<'_>) -> Result<()> {
        self.group.wait(rank, published_input(self.round), limits)
    }

    /// The input of a rank that was waited for.
    pub fn input(&self, rank: usize) -> Result<&[u8]> {
        self.group.published(rank, BufferKind::Input, self.round)
    }

    /// Calls `write` with this rank's output, and the inputs of all ranks, which were waited for.
    pub fn write_output<R>(&mut self, write: impl FnOnce(&mut [u8], &[&[u8]]) -> R) -> Result<R> {
        let group = &*self.group;
        let inputs = (0..group.n_ranks)
            .map(|rank| group.published(rank, BufferKind::Input, self.round))
            .collect::<Result<Vec<&[u8]>>>()?;
        let start = group.buffer_start(group.rank, BufferKind::Output, self.round);
        // SAFETY: as in `own_mut`; `&mut self` is exclusive, and the inputs are other ranges of the mapping.
        let output = unsafe { std::slice::from_raw_parts_mut(group.map.start().add(start), group.buffer_bytes) };
        Ok(write(output, &inputs))
    }

    /// Publishes the output.
    pub fn publish(self) -> Outputs<'g> {
        self.group.flag(self.group.rank).raise(published_output(self.round));
        Outputs { group: self.group, round: self.round }
    }
}

/// A round in which this rank has published its output.
pub struct Outputs<'g> {
    group: &'g mut SharedGroup,
    round: u64,
}

impl Outputs<'_> {
    /// Waits for the output of a rank, and returns it.
    pub fn wait(&mut self, rank: usize, limits: &WaitLimits<'_>) -> Result<&[u8]> {
        self.group.wait(rank, published_output(self.round), limits)?;
        self.group.published(rank, BufferKind::Output, self.round)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> File {
        SharedGroup::anonymous_file().unwrap()
    }

    /// Runs `rank` on a thread of its own for each rank.
    fn run<R: Send>(n_ranks: usize, rank: impl Fn(SharedGroup) -> R + Sync) -> Vec<R> {
        let file = file();
        SharedGroup::create(&file, n_ranks, 5000).unwrap();
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..n_ranks)
                .map(|i| {
                    let group = SharedGroup::join(&file, i).unwrap();
                    let rank = &rank;
                    scope.spawn(move || rank(group))
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn every_rank_reads_what_all_published_in_every_round() {
        for n_ranks in [1, 2, 3, 8] {
            run(n_ranks, |mut group| {
                for round in 0..500u32 {
                    let mine = group.rank() as u32 * 1000 + round;
                    let mut begun = group.begin(&WaitLimits::NONE).unwrap();
                    begun.input()[..4].copy_from_slice(&mine.to_le_bytes());
                    let mut inputs = begun.publish();
                    if round % 3 == 0 {
                        // Nobody has to wait for anybody in a round; the next one begins when it is safe.
                        continue;
                    }
                    inputs.wait_all(&WaitLimits::NONE).unwrap();
                    let number = |bytes: &[u8]| u32::from_le_bytes(bytes[..4].try_into().unwrap());
                    let sum: u32 = (0..n_ranks).map(|rank| number(inputs.input(rank).unwrap())).sum();
                    let n = n_ranks as u32;
                    assert_eq!(sum, n * (n - 1) / 2 * 1000 + n * round);
                    if round % 3 == 1 {
                        continue;
                    }
                    inputs
                        .write_output(|output, inputs| {
                            let sum = inputs.iter().map(|input| number(input)).fold(0, u32::wrapping_add);
                            output[..4].copy_from_slice(&(sum + mine).to_le_bytes());
                        })
                        .unwrap();
                    let mut outputs = inputs.publish();
                    for rank in 0..n_ranks {
                        let found = number(outputs.wait(rank, &WaitLimits::NONE).unwrap());
                        assert_eq!(found, sum + rank as u32 * 1000 + round, "round {round}, rank {rank}");
                    }
                }
            });
        }
    }

    #[test]
    fn a_rank_that_does_not_come_is_named_after_the_deadline() {
        let errors = run(2, |mut group| {
            let deadline = Some(Instant::now() + Duration::from_millis(50));
            if group.rank() == 1 {
                std::thread::sleep(Duration::from_millis(200));
                return None;
            }
            let mut inputs = group.begin(&WaitLimits::NONE).unwrap().publish();
            inputs.wait_all(&WaitLimits { deadline, ..WaitLimits::NONE }).err()
        });
        let error = errors[0].clone().unwrap().to_string();
        assert!(error.contains("rank 0 has waited 0.1 s for rank 1"), "{error}");
    }

    #[test]
    fn an_ended_group_wakes_who_waits_and_says_who_ended_it() {
        let errors = run(3, |mut group| {
            if group.rank() == 2 {
                group.end("a test");
                std::thread::sleep(Duration::from_millis(100));
                return None;
            }
            // It may be over before a round has begun.
            match group.begin(&WaitLimits::NONE) {
                Ok(begun) => begun.publish().wait_all(&WaitLimits::NONE).err(),
                Err(error) => Some(error),
            }
        });
        assert_eq!(errors.iter().flatten().count(), 2);
        for error in errors.into_iter().flatten() {
            assert!(error.to_string().contains("rank 2 has ended the group: a test"), "{error}");
        }
    }

    #[test]
    fn a_group_is_closed_from_outside_for_those_who_wait_and_those_who_come() {
        let file = file();
        SharedGroup::create(&file, 2, 1).unwrap();
        let mut first = SharedGroup::join(&file, 0).unwrap();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                let mut inputs = first.begin(&WaitLimits::NONE).unwrap().publish();
                inputs.wait_all(&WaitLimits::NONE).err().unwrap().to_string()
            });
            std::thread::sleep(Duration::from_millis(50));
            SharedGroup::close(&file, "rank 1 never came").unwrap();
            let error = waits.join().unwrap();
            assert!(error.contains("the group was closed: rank 1 never came"), "{error}");
        });
        assert!(SharedGroup::has_joined(&file, 0).unwrap() && !SharedGroup::has_joined(&file, 1).unwrap());
        let mut second = SharedGroup::join(&file, 1).unwrap();
        assert!(SharedGroup::has_joined(&file, 1).unwrap() && !SharedGroup::has_joined(&file, 2).unwrap());
        assert!(second.begin(&WaitLimits::NONE).is_err());
    }

    #[test]
    fn a_rank_that_leaves_is_missed_at_once() {
        let errors = run(2, |mut group| {
            let mut inputs = group.begin(&WaitLimits::NONE).unwrap().publish();
            if inputs.group.rank() == 1 {
                return None;
            }
            // What it published before is still there.
            inputs.wait_all(&WaitLimits::NONE).unwrap();
            let mut inputs = group.begin(&WaitLimits::NONE).unwrap().publish();
            inputs.wait_all(&WaitLimits::NONE).err()
        });
        let error = errors[0].clone().unwrap().to_string();
        assert!(error.contains("rank 1 has left the group"), "{error}");
    }

    #[test]
    fn a_rank_joins_once() {
        let file = file();
        SharedGroup::create(&file, 2, 1).unwrap();
        let first = SharedGroup::join(&file, 1).unwrap();
        let error = SharedGroup::join(&file, 1).err().unwrap().to_string();
        assert!(error.contains("rank 1 of the group has joined already"), "{error}");
        assert!(Watch::default().gone(first.member(1)).is_none(), "the first one is still there");
    }

    #[test]
    fn files_that_are_no_group_are_refused() {
        let error = |file: &File, rank| SharedGroup::join(file, rank).err().unwrap().to_string();
        let other = file();
        assert!(error(&other, 0).contains("too short"));
        other.set_len(8192).unwrap();
        assert!(error(&other, 0).contains("is not one"));
        let group = file();
        SharedGroup::create(&group, 2, 100).unwrap();
        assert!(error(&group, 2).contains("there is no rank 2 in a group of 2"));
        let map = SharedMap::open(&group, 4096).unwrap();
        header(&map).n_ranks.store(200, Ordering::Relaxed);
        assert!(error(&group, 0).contains("is damaged"));
        assert!(SharedGroup::create(&group, 0, 1).is_err() && SharedGroup::create(&group, 1, usize::MAX / 2).is_err());
    }

    #[test]
    fn what_was_not_waited_for_is_not_read() {
        run(1, |mut group| {
            assert!(group.begin(&WaitLimits::NONE).unwrap().publish().input(0).is_ok());
        });
        let file = file();
        SharedGroup::create(&file, 2, 1).unwrap();
        let mut group = SharedGroup::join(&file, 0).unwrap();
        let mut inputs = group.begin(&WaitLimits::NONE).unwrap().publish();
        assert!(inputs.input(1).is_err() && inputs.input(7).is_err());
        assert!(inputs.write_output(|_, _| ()).is_err());
    }

    #[test]
    fn sequences_wrap_around() {
        assert!(reached(5, 5) && reached(6, 5) && !reached(4, 5));
        assert!(reached(3, u32::MAX - 2) && !reached(u32::MAX - 2, 3));
        assert_eq!(published_input(1 << 31), 1);
        let flag = Flag::new();
        flag.raise(u32::MAX);
        flag.sleep_below(u32::MAX - 1, Duration::from_secs(100));
        assert_eq!(flag.sequence(), u32::MAX);
    }
}
