//! What collectives ask of whatever carries bytes between ranks: TCP (`kolo-net`), or channels of one process.

use std::sync::Arc;

use kolo_core::{Error, Result};
use kolo_device::shared_group::{RankBoard, WaitLimits};

/// One rank's end of a group whose ranks send each other messages.
///
/// Both ends know from the call how long every message is, so messages need no headers. Between two ranks they arrive in the
/// order in which they were sent. A rank that is dropped leaves the group: who waits for it gets an error, who has its messages
/// does not.
pub trait Transport: Send {
    /// This rank.
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn n_ranks(&self) -> usize;

    /// Sends and receives messages, all at the same time, and returns when all are done. Those with one peer are sent and received
    /// in the order in which they are given. Sending may wait until the other rank receives: what ranks exchange must not depend
    /// on the transport's buffers.
    ///
    /// An error if the group has ended or a rank is gone, if a check of a message fails, or by `limits`. The group is of no use
    /// after that; the caller ends it.
    fn exchange(
        &mut self,
        sends: &[Outgoing<'_>],
        receives: &mut [Incoming<'_>],
        limits: &WaitLimits<'_>,
    ) -> Result<()>;

    /// Ends the group for all ranks: every wait returns an error that says who ended it and why, now and from now on. The first
    /// one who does is the cause.
    fn end(&self, reason: &str);

    /// The error that says why the group has ended, if it has.
    fn ended(&self) -> Option<Error>;

    /// The bytes of messages that this rank has sent so far, each counted when it goes out, and once however the transport wraps it.
    fn n_bytes_sent(&self) -> u64;

    /// Where this rank writes down what it does, and finds what others have told; none if nobody tells.
    fn board(&self) -> Option<Arc<RankBoard>> {
        None
    }
}

/// A message to another rank: `parts`, one after the other.
#[derive(Clone, Debug)]
pub struct Outgoing<'a> {
    /// The rank.
    pub to: usize,
    /// The bytes.
    pub parts: Vec<&'a [u8]>,
}

/// Looks at what a rank has sent.
pub type Check<'a> = dyn Fn(usize, &[u8]) -> Result<()> + 'a;

/// A message from another rank, which fills `parts`. They need not have the lengths of the sender's, as long as their sums agree.
pub struct Incoming<'a> {
    /// The rank.
    pub from: usize,
    /// Where the bytes go.
    pub parts: Vec<&'a mut [u8]>,
    /// Looks at a message of one part as soon as it is there, before messages behind it are complete. An error ends the exchange.
    pub check: Option<&'a Check<'a>>,
}

impl Outgoing<'_> {
    /// The length of the message.
    pub fn n_bytes(&self) -> usize {
        self.parts.iter().map(|part| part.len()).sum()
    }
}

impl Incoming<'_> {
    /// The length of the message.
    pub fn n_bytes(&self) -> usize {
        self.parts.iter().map(|part| part.len()).sum()
    }

    /// Looks at the message, which is there.
    pub fn check(&self) -> Result<()> {
        match (self.check, &self.parts[..]) {
            (Some(check), [part]) => check(self.from, part),
            (Some(_), _) => Err(Error::internal("a message that is checked has one part")),
            (None, _) => Ok(()),
        }
    }
}
