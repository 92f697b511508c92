//! Who is still there. Each pair of ranks has a connection besides those for messages, on which a thread of each says that it is alive,
//! that it leaves, or that the group has ended, and why.
//!
//! | state | who may touch it |
//! | --- | --- |
//! | `state` | any thread, briefly; it is never held while another lock is taken |
//! | a `Control` | whoever ends the group, and the watching thread; briefly, since its socket never blocks |
//!
//! With each sign of life a rank tells what it does (`telling.rs`), which its peers write on their boards: what is known of a rank
//! outlives it.
//!
//! A peer whose connection is closed without a goodbye has died, and one that says nothing for `lost_after` is lost: both end the group.
//! A pause of this process itself, which makes all peers look silent, does not count.

use std::io::{self, IoSlice, IoSliceMut, Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kolo_core::{Error, Result};
use kolo_runtime::collective::{RankBoard, RankState};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags};

use super::stream::{Stream, wait_for};
use super::{CONNECT, telling};

/// A longer reason is cut off.
const MOST_REASON: usize = 1500;

/// Bytes of a message that says that the group has ended: its kind, who ended it, how long the reason is.
const END_HEAD: usize = 1 + 4 + 2;

/// Silence of a peer is mentioned after this time, long before it is lost.
const SILENCE: Duration = Duration::from_millis(1200);

/// The most bytes that a peer does not read before it gets no more.
const MOST_UNREAD: usize = 4 * MOST_REASON;

/// How long a rank that leaves waits for its last words to be sent.
const GOODBYE: Duration = Duration::from_millis(200);

/// What is said of a peer whose connection is closed without a goodbye.
const DIED: &str = "has died: its connection was closed";

const ALIVE: u8 = 0;
const END: u8 = 1;
const LEAVE: u8 = 2;
const TELL: u8 = 3;

/// Bytes before what a rank tells: its kind, and how long it is.
const TELL_HEAD: usize = 1 + 2;

/// What is known of a group.
pub(super) struct Watch {
    rank: usize,
    state: Mutex<WatchState>,
    /// The group has ended; `state` says why.
    has_ended: AtomicBool,
    /// What this rank and its peers do.
    board: Arc<RankBoard>,
    controls: Vec<Option<Mutex<Control>>>,
    /// Wakes the watching thread.
    wake: UnixStream,
    stops: AtomicBool,
}

struct WatchState {
    ended: Option<Error>,
    peers: Vec<PeerState>,
    /// Those that were lost before the group ended: the reason why it did.
    lost: Vec<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PeerState {
    Here,
    Left,
    Lost,
}

/// The connection to one peer.
struct Control {
    stream: Stream,
    unsent: Vec<u8>,
    heard: Vec<u8>,
}

impl Control {
    /// Sends this after what was not sent before. The watching thread sends the rest.
    fn send(&mut self, bytes: &[u8]) {
        if self.unsent.len() + bytes.len() <= MOST_UNREAD {
            self.unsent.extend(bytes);
        }
        self.flush();
    }

    fn flush(&mut self) {
        while !self.unsent.is_empty() {
            match self.stream.write(&[IoSlice::new(&self.unsent)]) {
                Ok(n) => drop(self.unsent.drain(..n)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // Nobody is there to read it, which is found where the connection is read.
                Err(_) => return self.unsent.clear(),
            }
        }
        let _ = self.stream.flush();
    }

    /// What the peer has said since.
    fn listen(&mut self) -> io::Result<Vec<Said>> {
        let (mut said, mut bytes) = (Vec::new(), [0; 512]);
        loop {
            match self.stream.read(&mut [IoSliceMut::new(&mut bytes)]) {
                Ok(0) => {
                    said.push(Said::Nothing);
                    return Ok(said);
                }
                Ok(n) => self.heard.extend(&bytes[..n]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(said),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                // What it said before counts.
                Err(_) => {
                    said.push(Said::Nothing);
                    return Ok(said);
                }
            }
            while let Some((n, what)) = parse(&self.heard)? {
                self.heard.drain(..n);
                said.push(what);
            }
        }
    }
}

/// What a peer says.
#[derive(Debug, PartialEq, Eq)]
enum Said {
    Alive,
    End(usize, String),
    Leave,
    /// What it does.
    Tell(Vec<u8>),
    /// Its connection is closed.
    Nothing,
}

/// The first message in these bytes, and its length; `None` if it is not complete.
fn parse(bytes: &[u8]) -> io::Result<Option<(usize, Said)>> {
    match bytes {
        [] => Ok(None),
        [ALIVE, ..] => Ok(Some((1, Said::Alive))),
        [LEAVE, ..] => Ok(Some((1, Said::Leave))),
        [END, r0, r1, r2, r3, n0, n1, rest @ ..] => {
            let n = usize::from(u16::from_le_bytes([*n0, *n1]));
            match rest.get(..n) {
                _ if n > MOST_REASON => Err(io::ErrorKind::InvalidData.into()),
                None => Ok(None),
                Some(reason) => {
                    let by = u32::from_le_bytes([*r0, *r1, *r2, *r3]) as usize;
                    Ok(Some((END_HEAD + n, Said::End(by, String::from_utf8_lossy(reason).into_owned()))))
                }
            }
        }
        [TELL, n0, n1, rest @ ..] => {
            let n = usize::from(u16::from_le_bytes([*n0, *n1]));
            match rest.get(..n) {
                _ if n > telling::MOST_TOLD => Err(io::ErrorKind::InvalidData.into()),
                None => Ok(None),
                Some(told) => Ok(Some((TELL_HEAD + n, Said::Tell(told.to_vec())))),
            }
        }
        [END | TELL, ..] => Ok(None),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Says that a group has ended, by whom and why.
pub(super) fn end_message(by: usize, reason: &str) -> Vec<u8> {
    let reason = &reason.as_bytes()[..reason.len().min(MOST_REASON)];
    let mut bytes = vec![END];
    bytes.extend((by as u32).to_le_bytes());
    bytes.extend((reason.len() as u16).to_le_bytes());
    bytes.extend(reason);
    bytes
}

fn tell_message(told: &[u8]) -> Vec<u8> {
    let mut bytes = vec![TELL];
    bytes.extend((told.len() as u16).to_le_bytes());
    bytes.extend(told);
    bytes
}

impl Watch {
    /// Watches over peers, of which this rank has none to itself.
    pub fn start(
        rank: usize,
        streams: Vec<Option<Stream>>,
        board: Arc<RankBoard>,
        lost_after: Duration,
    ) -> Result<(Arc<Watch>, JoinHandle<()>)> {
        let failed = |error: io::Error| Error::resource_exhausted(format!("ranks cannot be watched: {error}"));
        let mut sockets = Vec::new();
        for stream in &streams {
            sockets.push(stream.as_ref().map(Stream::socket).transpose().map_err(failed)?);
        }
        let (wake, waker) = UnixStream::pair().map_err(failed)?;
        wake.set_nonblocking(true).and_then(|()| waker.set_nonblocking(true)).map_err(failed)?;
        let state =
            Mutex::new(WatchState { ended: None, peers: vec![PeerState::Here; streams.len()], lost: Vec::new() });
        let control = |stream| Mutex::new(Control { stream, unsent: Vec::new(), heard: Vec::new() });
        let watch = Arc::new(Watch {
            rank,
            state,
            has_ended: AtomicBool::new(false),
            board,
            controls: streams.into_iter().map(|stream| stream.map(control)).collect(),
            wake,
            stops: AtomicBool::new(false),
        });
        let watched = watch.clone();
        let thread = std::thread::Builder::new()
            .name("kolo-ranks".to_owned())
            .spawn(move || watched.run(&sockets, &waker, lost_after))
            .map_err(failed)?;
        Ok((watch, thread))
    }

    /// What this rank and its peers do.
    pub fn board(&self) -> &Arc<RankBoard> {
        &self.board
    }

    /// What this rank does, for its peers.
    fn told(&self) -> Vec<u8> {
        match self.board.record(self.rank) {
            Some(record) => tell_message(&telling::write(&record.read())),
            None => vec![ALIVE],
        }
    }

    /// Why the group has ended, if it has.
    pub fn ended(&self) -> Option<Error> {
        match self.has_ended.load(Ordering::Acquire) {
            true => self.state.lock().ended.clone(),
            false => None,
        }
    }

    /// The ranks whose loss has ended the group, as far as this one has noticed it by itself.
    pub fn lost(&self) -> Vec<usize> {
        self.state.lock().lost.clone()
    }

    /// Ends the group for all ranks, unless it has ended.
    pub fn end(&self, reason: &str) {
        let error = Error::aborted(format!("rank {} has ended the group: {reason}", self.rank));
        self.end_with(error, self.rank, reason);
    }

    fn end_with(&self, error: Error, by: usize, reason: &str) {
        {
            let mut state = self.state.lock();
            if state.ended.is_some() {
                return;
            }
            state.ended = Some(error);
        }
        self.has_ended.store(true, Ordering::Release);
        // The first one who learns of an end tells all: who it does not reach may be reached by others.
        let message = end_message(by, reason);
        self.controls.iter().flatten().for_each(|control| control.lock().send(&message));
    }

    /// The error for a wait for messages of a peer that has closed its connection: what it said of that, or that it died. What it
    /// said comes another way, so it may take a moment.
    pub fn why_gone(&self, peer: usize) -> Error {
        let deadline = Instant::now() + GOODBYE;
        loop {
            if let Some(error) = self.ended() {
                return error;
            }
            match self.state.lock().peers[peer] {
                PeerState::Left => return Error::aborted(format!("rank {peer} has left the group")),
                PeerState::Here if Instant::now() >= deadline => self.lose(peer, DIED),
                // Whoever has noticed it ends the group at once.
                PeerState::Here | PeerState::Lost => {}
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Says goodbye, and has the watching thread end.
    pub fn stop(&self) {
        self.stops.store(true, Ordering::Release);
        // If the buffer is full, it is awake.
        let _ = (&self.wake).write(&[0]);
    }

    fn run(&self, sockets: &[Option<TcpStream>], waker: &UnixStream, lost_after: Duration) {
        let period = lost_after / 5;
        // Who has not connected to all others yet says nothing: it is not silent before that takes too long.
        let mut heard = vec![Instant::now() + CONNECT; sockets.len()];
        let mut is_mentioned = vec![false; sockets.len()];
        // The first sign of life is due at once: who stops early is known, too.
        let (mut said, mut looked) = (Instant::now() - period, Instant::now());
        while !self.stops.load(Ordering::Acquire) {
            let peers = self.state.lock().peers.clone();
            let here = |peer: &usize| sockets[*peer].is_some() && peers[*peer] == PeerState::Here;
            let watched: Vec<usize> = (0..sockets.len()).filter(here).collect();
            let mut polled = vec![PollFd::new(waker, PollFlags::IN)];
            let sockets = watched.iter().filter_map(|peer| sockets[*peer].as_ref());
            polled.extend(sockets.map(|socket| PollFd::new(socket, PollFlags::IN)));
            let next = (said + period).saturating_duration_since(Instant::now());
            if let Err(error) = wait_for(&mut polled, next) {
                self.end(&format!("its peers cannot be watched: {error}"));
                return;
            }
            let now = Instant::now();
            if now - looked > period * 2 {
                // This thread did not run: what peers said meanwhile is still to be read.
                heard.iter_mut().for_each(|heard| *heard = now.max(*heard));
            }
            looked = now;
            let _ = { waker }.read(&mut [0; 16]);
            for &peer in &watched {
                let Some(control) = &self.controls[peer] else { continue };
                let listened = control.lock().listen();
                match listened {
                    Ok(words) if words.is_empty() => {}
                    Ok(words) => {
                        (heard[peer], is_mentioned[peer]) = (now, false);
                        words.into_iter().for_each(|word| self.hear(peer, word));
                    }
                    Err(_) => self.lose(peer, "said something that no rank says"),
                }
                let silent = now.saturating_duration_since(heard[peer]);
                if silent >= SILENCE && silent < lost_after && !std::mem::replace(&mut is_mentioned[peer], true) {
                    let (seconds, most) = (silent.as_secs_f64(), lost_after.as_secs_f64());
                    let last_known =
                        self.last_known(peer).map(|state| format!("; rank {peer} {state}")).unwrap_or_default();
                    let rank = self.rank;
                    tracing::warn!(
                        "rank {rank} has heard nothing of rank {peer} for {seconds:.1} s, and gives it up after {most:.1} s{last_known}"
                    );
                }
                if silent >= lost_after {
                    self.lose(peer, &format!("is lost: nothing was heard of it for {:.1} s", silent.as_secs_f64()));
                }
            }
            if now >= said + period {
                said = now;
                let told = self.told();
                for &peer in &watched {
                    if let Some(control) = &self.controls[peer] {
                        let mut control = control.lock();
                        match control.unsent.is_empty() {
                            true => control.send(&told),
                            false => control.flush(),
                        }
                    }
                }
            }
        }
        let deadline = Instant::now() + GOODBYE;
        for control in self.controls.iter().flatten() {
            let mut control = control.lock();
            control.send(&[LEAVE]);
            while !control.unsent.is_empty() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
                control.flush();
            }
        }
    }

    fn hear(&self, peer: usize, word: Said) {
        match word {
            Said::Alive => {}
            Said::Tell(told) => match (telling::read(&told), self.board.record(peer)) {
                (Some(note), Some(record)) => record.copy(&note),
                _ => self.lose(peer, "said something that no rank says"),
            },
            Said::Leave => {
                let mut state = self.state.lock();
                if state.peers[peer] == PeerState::Here {
                    state.peers[peer] = PeerState::Left;
                }
            }
            Said::End(by, reason) => {
                let error = Error::aborted(format!("rank {by} has ended the group: {reason}"));
                self.end_with(error, by, &reason);
            }
            Said::Nothing => {
                if self.state.lock().peers[peer] == PeerState::Here {
                    self.lose(peer, DIED);
                }
            }
        }
    }

    /// What a peer has told last.
    fn last_known(&self, peer: usize) -> Option<RankState> {
        let note = self.board.record(peer).map(|record| record.read()).filter(|note| note.pid != 0);
        note.map(|note| RankState::new(peer, note))
    }

    /// A peer is gone without a goodbye.
    fn lose(&self, peer: usize, how: &str) {
        {
            let mut state = self.state.lock();
            state.peers[peer] = PeerState::Lost;
            // After the end connections are closed in any order.
            if state.ended.is_none() {
                state.lost.push(peer);
            }
        }
        // Its process may take a moment longer to end than its connections.
        let before = self.last_known(peer).map(|state| format!("; before that: {}", state.doing()));
        let reason = format!("rank {peer} {how}{}", before.unwrap_or_default());
        self.end_with(Error::aborted(reason.clone()), self.rank, &reason);
    }
}

#[cfg(test)]
mod tests {
    use kolo_runtime::collective::{Activity, RankNote};

    use super::*;

    #[test]
    fn a_peer_is_missed_once_it_was_heard_and_not_while_it_still_connects() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let theirs = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let stream = Stream::new(listener.accept().unwrap().0, None).unwrap();
        let board = Arc::new(RankBoard::alone(2, 0, [0; 16]).unwrap());
        let streams = vec![None, Some(stream)];
        let (watch, watching) = Watch::start(0, streams, board, Duration::from_millis(50)).unwrap();
        // As long as six times that is too long for a peer that has said something.
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(watch.ended(), None);
        let note = RankNote { pid: 1, host: 1, step: Some(7), activity: Activity::Saving, ..RankNote::default() };
        (&theirs).write_all(&tell_message(&telling::write(&note))).unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        while watch.ended().is_none() && Instant::now() < deadline {
            std::thread::yield_now();
        }
        let error = watch.ended().unwrap().to_string();
        assert!(error.contains("rank 1 is lost: nothing was heard of it for 0."), "{error}");
        assert!(error.contains("; before that: saves a checkpoint in step 7"), "what it did is known: {error}");
        watch.stop();
        watching.join().unwrap();
    }

    #[test]
    fn messages_are_read_as_they_are_written() {
        let message = end_message(7, "why");
        assert_eq!(parse(&message).unwrap(), Some((message.len(), Said::End(7, "why".to_owned()))));
        for n in 0..message.len() {
            assert_eq!(parse(&message[..n]).unwrap(), None, "{n} bytes");
        }
        assert_eq!(parse(&[ALIVE, END]).unwrap(), Some((1, Said::Alive)));
        assert_eq!(parse(&[LEAVE]).unwrap(), Some((1, Said::Leave)));
        assert!(parse(&[9]).is_err());
        let told = tell_message(b"abc");
        assert_eq!(parse(&told).unwrap(), Some((told.len(), Said::Tell(b"abc".to_vec()))));
        (0..told.len()).for_each(|n| assert_eq!(parse(&told[..n]).unwrap(), None, "{n} bytes"));
        assert!(parse(&[TELL, 255, 255]).is_err(), "longer than what any rank tells");
        assert!(parse(&[END, 0, 0, 0, 0, 255, 255]).is_err(), "longer than any reason");
        let long = "x".repeat(5000);
        assert_eq!(end_message(0, &long).len(), END_HEAD + MOST_REASON);
    }
}
