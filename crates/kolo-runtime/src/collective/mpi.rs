//! A transport between the processes of `mpirun`, over whatever network its library knows.
//!
//! A message goes in parts of at most [`PART`] bytes, of which a few are under way at a time; both ends know its length, so both cut it
//! alike. MPI has no message that a rank has failed, so ranks send each other notices, with a tag of their own: that one has ended the
//! group, and why, or that it is done. A process that dies ends the job: its launcher ends the others.

use std::collections::VecDeque;
use std::ops::Range;
use std::path::Path;
use std::time::{Duration, Instant};

use kolo_core::{Error, Result};
use kolo_device::mpi::{MpiEnd, MpiKind, Receiving, Sending};
use kolo_device::shared_group::WaitLimits;
use parking_lot::Mutex;

use super::transport::{Incoming, Outgoing, Transport};

/// The most bytes of a message that MPI gets at once. They are copied, since they are its own until it is done.
const PART: usize = 1 << 20;

/// How many parts are under way to, and from, each rank.
const WINDOW: usize = 4;

/// What ranks exchange.
const DATA: u16 = 1;
/// What a rank says to all others.
const NOTICE: u16 = 2;
const NOTICE_BYTES: usize = 1024;

/// How long a rank asks again and again, if there is a core for each rank of its host.
const SPIN: Duration = Duration::from_micros(60);

/// How long it lets others run in turns, before it sleeps.
const YIELD: Duration = Duration::from_micros(200);

/// How long it sleeps at a time: nothing wakes it.
const SLEEP: Duration = Duration::from_micros(100);

/// What a rank has sent before it left arrives within this time.
const LAST_WORDS: Duration = Duration::from_millis(300);

/// How long the others may take to leave after this rank.
const LEAVE: Duration = Duration::from_secs(60);

/// One rank's end of the ranks that `mpirun` has started.
pub struct MpiRanks {
    rank: usize,
    n_ranks: usize,
    state: Mutex<MpiState>,
    spins: bool,
    n_bytes_sent: u64,
}

struct MpiState {
    end: MpiEnd,
    ended: Option<Error>,
    /// When it was noticed that a rank had left.
    left: Vec<Option<Instant>>,
    /// Notices that are on their way.
    notices: Vec<Sending>,
    /// Memory of messages that are done.
    spare: Vec<Vec<u8>>,
}

/// What a rank says to all others.
enum Notice {
    Ended { by: usize, why: String },
    Left { rank: usize },
}

impl Notice {
    fn bytes(&self) -> Vec<u8> {
        let (kind, rank, text) = match self {
            Notice::Ended { by, why } => (0, *by, why.as_str()),
            Notice::Left { rank } => (1, *rank, ""),
        };
        let mut bytes = vec![kind];
        bytes.extend((rank as u32).to_le_bytes());
        bytes.extend(text.as_bytes());
        bytes.resize(NOTICE_BYTES, 0);
        bytes
    }

    fn read(bytes: &[u8; NOTICE_BYTES]) -> Notice {
        let [kind, a, b, c, d, text @ ..] = bytes;
        let rank = u32::from_le_bytes([*a, *b, *c, *d]) as usize;
        match kind {
            1 => Notice::Left { rank },
            _ => {
                let why = String::from_utf8_lossy(text);
                Notice::Ended { by: rank, why: why.trim_end_matches(['\0', char::REPLACEMENT_CHARACTER]).to_owned() }
            }
        }
    }
}

impl MpiRanks {
    /// Joins the ranks that `mpirun` has started, `n_here` of them on this host. `library` names its library, if it is not where
    /// libraries usually are.
    pub fn join(kind: MpiKind, library: Option<&Path>, n_here: usize) -> Result<MpiRanks> {
        let end = MpiEnd::join(kind, library)?;
        let (rank, n_ranks) = (end.rank(), end.n_ranks());
        tracing::debug!(target: "kolo::collective", "rank {rank} of {n_ranks} over MPI: {}", end.version());
        let left = vec![None; n_ranks];
        let state = MpiState { end, ended: None, left, notices: Vec::new(), spare: Vec::new() };
        let n_cores = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(MpiRanks { rank, n_ranks, state: Mutex::new(state), spins: n_here <= n_cores, n_bytes_sent: 0 })
    }
}

impl MpiState {
    /// Says something to all other ranks.
    fn tell(&mut self, notice: &Notice) -> Result<()> {
        let (rank, n_ranks) = (self.end.rank(), self.end.n_ranks());
        for to in (0..n_ranks).filter(|to| *to != rank) {
            self.notices.push(self.end.send(to, NOTICE, notice.bytes())?);
        }
        Ok(())
    }

    /// Looks at what others have said, and whether what this rank has said is on its way.
    fn look(&mut self) -> Result<()> {
        while let Some(bytes) = self.end.poll::<NOTICE_BYTES>(NOTICE)? {
            match Notice::read(&bytes) {
                Notice::Left { rank } => {
                    if let Some(left) = self.left.get_mut(rank) {
                        left.get_or_insert_with(Instant::now);
                    }
                }
                Notice::Ended { by, why } => {
                    let error = || Error::aborted(format!("rank {by} has ended the group: {why}"));
                    self.ended.get_or_insert_with(error);
                }
            }
        }
        let mut error = None;
        let end = &mut self.end;
        self.notices.retain_mut(|notice| match end.sent(notice) {
            Ok(done) => done.is_none(),
            Err(bad) => {
                error.get_or_insert(bad);
                false
            }
        });
        error.map_or(Ok(()), Err)
    }

    /// An error if the rank that is waited for will not send anything any more.
    fn check(&self, peer: usize) -> Result<()> {
        if let Some(error) = &self.ended {
            return Err(error.clone());
        }
        match self.left.get(peer).copied().flatten() {
            Some(when) if when.elapsed() > LAST_WORDS => Err(Error::aborted(format!("rank {peer} has left the group"))),
            _ => Ok(()),
        }
    }
}

/// Messages to one rank.
struct Leaving<'a, 's> {
    to: usize,
    /// What is not handed over yet: a message, and bytes of it.
    parts: VecDeque<(&'a Outgoing<'s>, Range<usize>)>,
    under_way: VecDeque<Sending>,
}

/// Messages from one rank.
struct Arriving<'a, 'r> {
    from: usize,
    messages: Vec<&'a mut Incoming<'r>>,
    /// Of the messages: what is not asked for yet, and what is, in order.
    parts: VecDeque<(usize, Range<usize>)>,
    under_way: VecDeque<(usize, Range<usize>, Receiving)>,
}

impl Leaving<'_, '_> {
    fn is_done(&self) -> bool {
        self.parts.is_empty() && self.under_way.is_empty()
    }

    /// What is not handed over yet.
    fn n_bytes(&self) -> usize {
        self.parts.iter().map(|(_, of)| of.len()).sum()
    }

    fn go_on(&mut self, state: &mut MpiState) -> Result<bool> {
        let mut has_gone_on = false;
        while let Some(message) = self.under_way.front_mut() {
            let Some(spare) = state.end.sent(message)? else { break };
            self.under_way.pop_front();
            state.spare.push(spare);
            has_gone_on = true;
        }
        while self.under_way.len() < WINDOW
            && let Some((message, of)) = self.parts.pop_front()
        {
            let mut bytes = state.spare.pop().unwrap_or_default();
            bytes.clear();
            spans(message.parts.iter().map(|part| part.len()), &of)
                .for_each(|(i, span)| bytes.extend_from_slice(&message.parts[i][span]));
            self.under_way.push_back(state.end.send(self.to, DATA, bytes)?);
            has_gone_on = true;
        }
        Ok(has_gone_on)
    }
}

impl Arriving<'_, '_> {
    fn is_done(&self) -> bool {
        self.parts.is_empty() && self.under_way.is_empty()
    }

    fn go_on(&mut self, state: &mut MpiState) -> Result<bool> {
        let mut has_gone_on = false;
        while self.under_way.len() < WINDOW
            && let Some((message, of)) = self.parts.pop_front()
        {
            let mut bytes = state.spare.pop().unwrap_or_default();
            bytes.resize(of.len(), 0);
            self.under_way.push_back((message, of, state.end.receive(self.from, DATA, bytes)?));
            has_gone_on = true;
        }
        while let Some((_, _, receiving)) = self.under_way.front_mut() {
            let Some(bytes) = state.end.received(receiving)? else { break };
            let Some((number, of, _)) = self.under_way.pop_front() else { break };
            let message = &mut *self.messages[number];
            let mut rest = &bytes[..];
            let lengths: Vec<usize> = message.parts.iter().map(|part| part.len()).collect();
            for (i, span) in spans(lengths.into_iter(), &of) {
                let (now, later) = rest.split_at(span.len());
                message.parts[i][span].copy_from_slice(now);
                rest = later;
            }
            if of.end == message.n_bytes() {
                message.check()?;
            }
            state.spare.push(bytes);
            has_gone_on = true;
        }
        Ok(has_gone_on)
    }
}

/// Where bytes `of` a message are: in which of its parts, and where there. `lengths` are those of the parts.
fn spans(lengths: impl Iterator<Item = usize>, of: &Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
    let of = of.clone();
    let starts = lengths.scan(0, |at, n| {
        let start = *at;
        *at += n;
        Some((start, n))
    });
    starts.enumerate().filter_map(move |(i, (start, n))| {
        let span = of.start.max(start)..of.end.min(start + n);
        (!span.is_empty()).then(|| (i, span.start - start..span.end - start))
    })
}

/// How a message is cut.
fn cut(n_bytes: usize) -> impl Iterator<Item = Range<usize>> {
    (0..n_bytes.div_ceil(PART)).map(move |i| i * PART..((i + 1) * PART).min(n_bytes))
}

impl Transport for MpiRanks {
    fn rank(&self) -> usize {
        self.rank
    }

    fn n_ranks(&self) -> usize {
        self.n_ranks
    }

    fn exchange(
        &mut self,
        sends: &[Outgoing<'_>],
        receives: &mut [Incoming<'_>],
        limits: &WaitLimits<'_>,
    ) -> Result<()> {
        let state = self.state.get_mut();
        if let Some(error) = &state.ended {
            return Err(error.clone());
        }
        let mut leaving: Vec<Leaving<'_, '_>> = Vec::new();
        for message in sends {
            let i = leaving.iter().position(|lane| lane.to == message.to).unwrap_or(leaving.len());
            if i == leaving.len() {
                leaving.push(Leaving { to: message.to, parts: VecDeque::new(), under_way: VecDeque::new() });
            }
            leaving[i].parts.extend(cut(message.n_bytes()).map(|of| (message, of)));
        }
        let mut arriving: Vec<Arriving<'_, '_>> = Vec::new();
        for message in receives {
            let from = message.from;
            let i = arriving.iter().position(|lane| lane.from == from).unwrap_or(arriving.len());
            if i == arriving.len() {
                let (messages, parts, under_way) = (Vec::new(), VecDeque::new(), VecDeque::new());
                arriving.push(Arriving { from, messages, parts, under_way });
            }
            let lane = &mut arriving[i];
            let number = lane.messages.len();
            lane.parts.extend(cut(message.n_bytes()).map(|of| (number, of)));
            lane.messages.push(message);
        }
        let began = Instant::now();
        let mut idle_since = None;
        loop {
            let mut has_gone_on = false;
            for lane in &mut arriving {
                has_gone_on |= lane.go_on(state)?;
            }
            for lane in &mut leaving {
                let n_left = lane.n_bytes();
                has_gone_on |= lane.go_on(state)?;
                self.n_bytes_sent += (n_left - lane.n_bytes()) as u64;
            }
            leaving.retain(|lane| !lane.is_done());
            let waits_for = arriving.iter().find(|lane| !lane.is_done()).map(|lane| lane.from);
            let Some(peer) = waits_for.or_else(|| leaving.first().map(|lane| lane.to)) else { return Ok(()) };
            if has_gone_on {
                idle_since = None;
                continue;
            }
            let waited = idle_since.get_or_insert_with(Instant::now).elapsed();
            if self.spins && waited < SPIN {
                std::hint::spin_loop();
            } else if waited < YIELD {
                std::thread::yield_now();
            } else {
                state.look()?;
                state.check(peer)?;
                (limits.stop)(peer)?;
                if limits.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                    let (rank, waited) = (self.rank, began.elapsed().as_secs_f64());
                    return Err(Error::deadline_exceeded(format!(
                        "rank {rank} has waited {waited:.1} s for rank {peer}"
                    )));
                }
                std::thread::sleep(SLEEP);
            }
        }
    }

    fn n_bytes_sent(&self) -> u64 {
        self.n_bytes_sent
    }

    fn end(&self, reason: &str) {
        let mut state = self.state.lock();
        if state.ended.is_some() {
            return;
        }
        let (by, why) = (self.rank, reason.to_owned());
        state.ended = Some(Error::aborted(format!("rank {by} has ended the group: {why}")));
        if let Err(error) = state.tell(&Notice::Ended { by, why }) {
            tracing::warn!(target: "kolo::collective", "rank {by} cannot tell the others that it has ended the group: {error}");
        }
    }

    fn ended(&self) -> Option<Error> {
        let mut state = self.state.lock();
        // What it cannot look at now, the next exchange says.
        let _ = state.look();
        state.ended.clone()
    }
}

/// The rank leaves: it says so, and waits for the others, as `MPI_Finalize` would.
impl Drop for MpiRanks {
    fn drop(&mut self) {
        let (rank, state) = (self.rank, self.state.get_mut());
        let began = Instant::now();
        let mut told = state.tell(&Notice::Left { rank });
        while told.is_ok() {
            let missing: Vec<usize> = (0..self.n_ranks).filter(|i| *i != rank && state.left[*i].is_none()).collect();
            if missing.is_empty() && state.notices.is_empty() {
                return;
            }
            if began.elapsed() > LEAVE {
                let missing: Vec<String> = missing.iter().map(usize::to_string).collect();
                let missing = missing.join(", ");
                tracing::warn!(target: "kolo::collective", "rank {rank} leaves after {LEAVE:?} without rank {missing}");
                return;
            }
            std::thread::sleep(SLEEP);
            told = state.look();
        }
        if let Err(error) = told {
            tracing::warn!(target: "kolo::collective", "rank {rank} cannot tell the others that it leaves: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ends_cut_a_message_alike() {
        assert_eq!(cut(0).count(), 0);
        assert!(cut(PART).eq(std::iter::once(0..PART)));
        assert_eq!(cut(2 * PART + 3).last(), Some(2 * PART..2 * PART + 3));
    }

    #[test]
    fn bytes_of_a_message_are_found_in_its_parts() {
        let found = |of: Range<usize>| spans([3, 0, 5, 2].into_iter(), &of).collect::<Vec<_>>();
        assert_eq!(found(0..10), [(0, 0..3), (2, 0..5), (3, 0..2)]);
        assert_eq!(found(2..4), [(0, 2..3), (2, 0..1)]);
        assert_eq!(found(9..10), [(3, 1..2)]);
        assert_eq!(found(4..4), []);
    }

    #[test]
    fn notices_say_who_and_why() {
        let read = |notice: &Notice| Notice::read(notice.bytes()[..].try_into().unwrap());
        assert!(matches!(read(&Notice::Left { rank: 70_000 }), Notice::Left { rank: 70_000 }));
        let why = "ä".repeat(2 * NOTICE_BYTES);
        let Notice::Ended { by, why: found } = read(&Notice::Ended { by: 3, why: why.clone() }) else {
            panic!("it is another notice");
        };
        assert!(by == 3 && found.len() > 900 && why.starts_with(&found), "{found}");
    }
}
