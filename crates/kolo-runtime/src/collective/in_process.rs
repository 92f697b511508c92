//! A transport between threads of one process, which counts what it carries: for tests of algorithms, and of what is built on them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use kolo_core::{Error, Result};
use kolo_device::shared_group::WaitLimits;
use parking_lot::Mutex;

use super::transport::{Incoming, Outgoing, Transport};

/// How often a rank that waits looks whether it should stop.
const LOOK: Duration = Duration::from_millis(5);

/// One rank's end of a group of threads. A message is copied into a queue of its receiver, so sending never waits.
pub struct InProcess {
    rank: usize,
    /// To and from each rank; this rank's own are never used.
    to: Vec<Sender<Vec<u8>>>,
    from: Vec<Receiver<Vec<u8>>>,
    ended: Arc<Mutex<Option<Error>>>,
    sent: Arc<SentCounts>,
}

/// What one rank has sent.
#[derive(Debug, Default)]
pub struct SentCounts {
    n_bytes: AtomicU64,
    n_messages: AtomicU64,
}

impl SentCounts {
    /// Bytes, in all.
    pub fn n_bytes(&self) -> u64 {
        self.n_bytes.load(Ordering::Relaxed)
    }

    /// Messages, in all.
    pub fn n_messages(&self) -> u64 {
        self.n_messages.load(Ordering::Relaxed)
    }
}

impl InProcess {
    /// All ranks of a new group.
    pub fn group(n_ranks: usize) -> Vec<InProcess> {
        let ended = Arc::default();
        let mut froms: Vec<Vec<Receiver<Vec<u8>>>> = (0..n_ranks).map(|_| Vec::new()).collect();
        let mut ranks = Vec::new();
        for rank in 0..n_ranks {
            let ends = froms.iter_mut().map(|from| {
                let (sender, receiver) = mpsc::channel();
                from.push(receiver);
                sender
            });
            ranks.push((rank, ends.collect::<Vec<_>>()));
        }
        let end = |((rank, to), from)| InProcess { rank, to, from, ended: Arc::clone(&ended), sent: Arc::default() };
        ranks.into_iter().zip(froms).map(end).collect()
    }

    /// Counts what this rank sends.
    pub fn sent(&self) -> Arc<SentCounts> {
        self.sent.clone()
    }

    fn receive(&self, from: usize, limits: &WaitLimits<'_>) -> Result<Vec<u8>> {
        let queue = self.from.get(from).ok_or_else(|| no_rank(from))?;
        let began = Instant::now();
        loop {
            match queue.recv_timeout(LOOK) {
                Ok(message) => return Ok(message),
                Err(RecvTimeoutError::Disconnected) => {
                    let left = || Error::aborted(format!("rank {from} has left the group"));
                    return Err(self.ended().unwrap_or_else(left));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            if let Some(error) = self.ended() {
                return Err(error);
            }
            (limits.stop)(from)?;
            if limits.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                let waited = began.elapsed().as_secs_f64();
                let text = format!("rank {} has waited {waited:.1} s for rank {from}", self.rank);
                return Err(Error::deadline_exceeded(text));
            }
        }
    }
}

fn no_rank(rank: usize) -> Error {
    Error::internal(format!("a message of rank {rank}, which does not exist"))
}

impl Transport for InProcess {
    fn rank(&self) -> usize {
        self.rank
    }

    fn n_ranks(&self) -> usize {
        self.to.len()
    }

    fn exchange(
        &mut self,
        sends: &[Outgoing<'_>],
        receives: &mut [Incoming<'_>],
        limits: &WaitLimits<'_>,
    ) -> Result<()> {
        if let Some(error) = self.ended() {
            return Err(error);
        }
        for message in sends {
            let bytes = message.parts.concat();
            self.sent.n_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            self.sent.n_messages.fetch_add(1, Ordering::Relaxed);
            // A rank that has left is missed where something is expected of it.
            let _ = self.to.get(message.to).ok_or_else(|| no_rank(message.to))?.send(bytes);
        }
        for message in receives {
            let bytes = self.receive(message.from, limits)?;
            if bytes.len() != message.n_bytes() {
                let (found, expected) = (bytes.len(), message.n_bytes());
                return Err(Error::internal(format!(
                    "rank {} sent {found} bytes where {expected} were expected",
                    message.from
                )));
            }
            let mut rest = &bytes[..];
            for part in &mut message.parts {
                let (now, later) = rest.split_at(part.len());
                part.copy_from_slice(now);
                rest = later;
            }
            message.check()?;
        }
        Ok(())
    }

    fn n_bytes_sent(&self) -> u64 {
        self.sent.n_bytes()
    }

    fn end(&self, reason: &str) {
        let error = || Error::aborted(format!("rank {} has ended the group: {reason}", self.rank));
        self.ended.lock().get_or_insert_with(error);
    }

    fn ended(&self) -> Option<Error> {
        self.ended.lock().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_in_order_and_are_counted() {
        let mut ranks = InProcess::group(3);
        let sent = ranks[0].sent();
        let (mut first, mut second) = ([0; 2], [0; 3]);
        let messages = [Outgoing { to: 2, parts: vec![&[1], &[2]] }, Outgoing { to: 2, parts: vec![&[3, 4, 5]] }];
        ranks[0].exchange(&messages, &mut [], &WaitLimits::NONE).unwrap();
        let (a, b) = second.split_at_mut(1);
        let mut receives = [
            Incoming { from: 0, parts: vec![&mut first], check: None },
            Incoming { from: 0, parts: vec![a, b], check: None },
        ];
        ranks[2].exchange(&[], &mut receives, &WaitLimits::NONE).unwrap();
        assert_eq!((first, second), ([1, 2], [3, 4, 5]));
        assert_eq!((sent.n_bytes(), sent.n_messages()), (5, 2));
    }

    #[test]
    fn waits_end_by_a_deadline_by_who_leaves_and_by_who_ends_the_group() {
        let mut ranks = InProcess::group(3);
        let receive = |rank: &mut InProcess, from, limits: &WaitLimits<'_>| {
            let mut byte = [0];
            let mut receives = [Incoming { from, parts: vec![&mut byte], check: None }];
            rank.exchange(&[], &mut receives, limits).unwrap_err().to_string()
        };
        let deadline = Some(Instant::now() + Duration::from_millis(20));
        let late = receive(&mut ranks[0], 1, &WaitLimits { deadline, ..WaitLimits::NONE });
        assert!(late.contains("rank 0 has waited 0.0 s for rank 1"), "{late}");
        let last = ranks.pop();
        drop(last);
        assert!(receive(&mut ranks[0], 2, &WaitLimits::NONE).contains("rank 2 has left the group"));
        ranks[1].end("a test");
        ranks[0].end("another one");
        assert!(receive(&mut ranks[0], 1, &WaitLimits::NONE).contains("rank 1 has ended the group: a test"));
    }
}
