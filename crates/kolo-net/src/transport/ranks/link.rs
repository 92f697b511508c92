//! Messages between ranks over their sockets: one thread, the caller's, reads and writes all of them as far as they go, and waits only
//! when none goes on.
//!
//! Messages have no headers: both ends know their lengths. A large one is cut into as many parts as the pair has streams.

use std::io::{self, IoSlice, IoSliceMut};
use std::ops::Range;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kolo_core::{Error, Result};
use kolo_runtime::collective::{Check, Incoming, Outgoing, RankBoard, Transport, WaitLimits};
use rustix::event::{PollFd, PollFlags};

use super::stream::{Stream, wait_for};
use super::watch::Watch;

/// Messages of at least this size go over all streams.
const STRIPED: usize = 256 << 10;

/// The most slices in one system call.
const MOST_SLICES: usize = 64;

/// How long a rank looks at its sockets again and again, if there is a core for each rank of its host.
const SPIN: Duration = Duration::from_micros(60);

/// How long it lets others run in turns, before it sleeps.
const YIELD: Duration = Duration::from_micros(150);

/// How often a sleeping rank looks whether it should stop.
const SLEEP: Duration = Duration::from_millis(10);

/// One rank's end of a group over TCP.
pub(super) struct Link {
    pub rank: usize,
    pub n_ranks: usize,
    /// Those to each rank; none to this rank itself.
    pub streams: Vec<Vec<Stream>>,
    pub watch: Arc<Watch>,
    pub watching: Option<JoinHandle<()>>,
    pub spins: bool,
    /// Bytes of messages, without what TLS puts around them.
    pub n_bytes_sent: u64,
}

/// What is under way on one stream.
struct Lane<'s, 'r> {
    peer: usize,
    stream: usize,
    sends: Vec<&'s [u8]>,
    /// The first slice that is not sent, and how much of it is.
    sent: (usize, usize),
    /// Bytes that were written.
    n_sent: u64,
    receives: Vec<Arriving<'r>>,
    received: (usize, usize),
    is_flushed: bool,
}

/// A slice of a message that arrives.
struct Arriving<'a> {
    to: &'a mut [u8],
    check: Option<&'a Check<'a>>,
}

impl Lane<'_, '_> {
    fn has_sent(&self) -> bool {
        self.sent.0 == self.sends.len() && self.is_flushed
    }

    fn has_received(&self) -> bool {
        self.received.0 == self.receives.len()
    }

    /// Writes until the socket is full; whether anything was written.
    fn send(&mut self, stream: &mut Stream) -> io::Result<bool> {
        let mut has_gone_on = false;
        while self.sent.0 < self.sends.len() {
            let (first, at) = self.sent;
            let slices: Vec<IoSlice<'_>> = self.sends[first..]
                .iter()
                .take(MOST_SLICES)
                .enumerate()
                .map(|(i, slice)| IoSlice::new(&slice[if i == 0 { at } else { 0 }..]))
                .collect();
            match stream.write(&slices) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => {
                    self.sent = advance(self.sent, n, |i| self.sends[i].len());
                    self.n_sent += n as u64;
                    has_gone_on = true;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(has_gone_on),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        if !self.is_flushed {
            self.is_flushed = stream.flush()?;
        }
        Ok(has_gone_on)
    }

    /// Reads what is there; whether anything was read, or the error of a check.
    fn receive(&mut self, stream: &mut Stream) -> io::Result<Result<bool>> {
        if self.has_received() {
            return Ok(Ok(false));
        }
        let (first, at) = self.received;
        let mut slices: Vec<IoSliceMut<'_>> = self.receives[first..]
            .iter_mut()
            .take(MOST_SLICES)
            .enumerate()
            .map(|(i, arriving)| IoSliceMut::new(&mut arriving.to[if i == 0 { at } else { 0 }..]))
            .collect();
        let n = match stream.read(&mut slices) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => n,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                return Ok(Ok(false));
            }
            Err(error) => return Err(error),
        };
        self.received = advance(self.received, n, |i| self.receives[i].to.len());
        for arrived in &self.receives[first..self.received.0] {
            if let Some(check) = arrived.check
                && let Err(error) = check(self.peer, arrived.to)
            {
                return Ok(Err(error));
            }
        }
        Ok(Ok(true))
    }
}

/// Where one is in slices, `n` bytes on.
fn advance((mut i, mut at): (usize, usize), n: usize, n_bytes: impl Fn(usize) -> usize) -> (usize, usize) {
    at += n;
    // Slices are not empty, so that the last one is left when it is complete.
    while at > 0 && at >= n_bytes(i) {
        at -= n_bytes(i);
        i += 1;
    }
    (i, at)
}

/// The part of a message of `n` bytes that goes over one of so many streams.
fn stripe(n: usize, stream: usize, n_streams: usize) -> Range<usize> {
    if n < STRIPED {
        return if stream == 0 { 0..n } else { 0..0 };
    }
    let at = |stream: usize| n / n_streams * stream + (n % n_streams).min(stream);
    at(stream)..at(stream + 1)
}

impl Link {
    /// Which lanes there are, by peer and stream, and what they carry.
    fn lanes<'s, 'r>(&self, sends: &[Outgoing<'s>], receives: &mut [Incoming<'r>]) -> Result<Vec<Lane<'s, 'r>>> {
        let mut lanes: Vec<Lane<'s, 'r>> = Vec::with_capacity(self.n_ranks);
        // The lane of a rank's first stream; the others follow.
        let mut first_lanes: Vec<Option<usize>> = vec![None; self.n_ranks];
        let mut lanes_of = |lanes: &mut Vec<Lane<'s, 'r>>, peer: usize| -> Result<(usize, usize)> {
            let n_streams = self.streams.get(peer).map_or(0, Vec::len);
            if n_streams == 0 {
                return Err(Error::internal(format!("rank {} has no connection to rank {peer}", self.rank)));
            }
            let first = *first_lanes[peer].get_or_insert_with(|| {
                lanes.extend((0..n_streams).map(|stream| Lane {
                    peer,
                    stream,
                    sends: Vec::new(),
                    sent: (0, 0),
                    n_sent: 0,
                    receives: Vec::new(),
                    received: (0, 0),
                    is_flushed: true,
                }));
                lanes.len() - n_streams
            });
            Ok((first, n_streams))
        };
        for message in sends {
            let n = message.n_bytes();
            let mut parts = message.parts.iter().copied().filter(|part| !part.is_empty());
            let mut rest: &[u8] = &[];
            let (first, n_streams) = lanes_of(&mut lanes, message.to)?;
            for stream in 0..n_streams {
                let mut left = stripe(n, stream, n_streams).len();
                while left > 0 {
                    if rest.is_empty() {
                        rest = parts.next().unwrap_or_default();
                    }
                    let (now, later) = rest.split_at(left.min(rest.len()));
                    let lane = &mut lanes[first + stream];
                    lane.sends.push(now);
                    lane.is_flushed = false;
                    (rest, left) = (later, left - now.len());
                }
            }
        }
        for message in receives {
            let n = message.n_bytes();
            if message.check.is_some() && (message.parts.len() != 1 || n >= STRIPED) {
                return Err(Error::internal("a message that is checked is short and has one part"));
            }
            let mut parts = std::mem::take(&mut message.parts).into_iter().filter(|part| !part.is_empty());
            let mut rest: &mut [u8] = &mut [];
            let (first, n_streams) = lanes_of(&mut lanes, message.from)?;
            for stream in 0..n_streams {
                let mut left = stripe(n, stream, n_streams).len();
                while left > 0 {
                    if rest.is_empty() {
                        rest = parts.next().unwrap_or_default();
                    }
                    let n_now = left.min(rest.len());
                    let (now, later) = rest.split_at_mut(n_now);
                    lanes[first + stream].receives.push(Arriving { to: now, check: message.check });
                    (rest, left) = (later, left - n_now);
                }
            }
        }
        Ok(lanes)
    }

    /// Waits until a lane can go on, for at most `SLEEP`.
    fn sleep(&self, lanes: &[Lane<'_, '_>], limits: &WaitLimits<'_>, began: Instant) -> Result<()> {
        if let Some(error) = self.watch.ended() {
            return Err(error);
        }
        let receiving = lanes.iter().find(|lane| !lane.has_received());
        let Some(waits_for) = receiving.or_else(|| lanes.iter().find(|lane| !lane.has_sent())) else { return Ok(()) };
        (limits.stop)(waits_for.peer)?;
        let now = Instant::now();
        if limits.deadline.is_some_and(|deadline| now >= deadline) {
            let waited = (now - began).as_secs_f64();
            let (rank, peer) = (self.rank, waits_for.peer);
            return Err(Error::deadline_exceeded(format!("rank {rank} has waited {waited:.1} s for rank {peer}")));
        }
        let mut polled: Vec<PollFd<'_>> = lanes
            .iter()
            .filter(|lane| !lane.has_sent() || !lane.has_received())
            .map(|lane| {
                let mut flags = PollFlags::empty();
                flags.set(PollFlags::IN, !lane.has_received());
                flags.set(PollFlags::OUT, !lane.has_sent());
                PollFd::new(&self.streams[lane.peer][lane.stream], flags)
            })
            .collect();
        let left = limits.deadline.map_or(SLEEP, |deadline| SLEEP.min(deadline - now));
        wait_for(&mut polled, left).map_err(|error| Error::internal(format!("sockets cannot be waited for: {error}")))
    }
}

impl Transport for Link {
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
        if let Some(error) = self.watch.ended() {
            return Err(error);
        }
        let mut lanes = self.lanes(sends, receives)?;
        let began = Instant::now();
        let mut idle_since = None;
        loop {
            let (mut has_gone_on, mut is_done) = (false, true);
            for lane in &mut lanes {
                let stream = &mut self.streams[lane.peer][lane.stream];
                let step = |lane: &mut Lane<'_, '_>, stream: &mut Stream| -> io::Result<Result<bool>> {
                    let has_sent = if lane.has_sent() { false } else { lane.send(stream)? };
                    Ok(lane.receive(stream)?.map(|has_received| has_sent || has_received))
                };
                has_gone_on |= match step(lane, stream) {
                    Ok(checked) => checked?,
                    Err(_) => return Err(self.watch.why_gone(lane.peer)),
                };
                is_done &= lane.has_sent() && lane.has_received();
            }
            if is_done {
                self.n_bytes_sent += lanes.iter().map(|lane| lane.n_sent).sum::<u64>();
                return Ok(());
            }
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
                self.sleep(&lanes, limits, began)?;
            }
        }
    }

    fn n_bytes_sent(&self) -> u64 {
        self.n_bytes_sent
    }

    fn end(&self, reason: &str) {
        self.watch.end(reason);
    }

    fn ended(&self) -> Option<Error> {
        self.watch.ended()
    }

    fn board(&self) -> Option<Arc<RankBoard>> {
        Some(self.watch.board().clone())
    }
}

/// The rank leaves: it says so before its connections are closed.
impl Drop for Link {
    fn drop(&mut self) {
        self.watch.stop();
        if let Some(watching) = self.watching.take() {
            // What it panicked about is in the log.
            let _ = watching.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_message_is_cut_evenly_and_a_small_one_is_not() {
        assert_eq!([stripe(100, 0, 3), stripe(100, 1, 3)], [0..100, 0..0]);
        for n in [STRIPED, STRIPED + 1, STRIPED + 2, 10 * STRIPED + 7] {
            let parts: Vec<Range<usize>> = (0..3).map(|stream| stripe(n, stream, 3)).collect();
            assert_eq!((parts[0].start, parts[2].end), (0, n));
            assert!(parts[0].end == parts[1].start && parts[1].end == parts[2].start);
        }
    }

    #[test]
    fn slices_are_left_when_they_are_complete() {
        let n_bytes = |i: usize| [3, 1, 5][i];
        assert_eq!(advance((0, 0), 2, n_bytes), (0, 2));
        assert_eq!(advance((0, 2), 2, n_bytes), (2, 0));
        assert_eq!(advance((0, 2), 7, n_bytes), (3, 0));
    }
}
