//! What is said while a rank waits for another one in a collective, so that nothing hangs in silence.
//!
//! A process that is stopped is named after a second. One that is there is named when others wait for it for much longer than they
//! ever had to before: how long a step takes is the program's affair, but not that a rank stays behind all others.

use std::cell::Cell;
use std::time::{Duration, Instant};

use kolo_device::shared_group::{Activity, Condition};

use super::record::Recorder;
use super::signature::Signature;

/// How often a process that is waited for is looked at.
const LOOK: Duration = Duration::from_secs(1);

/// A rank that is there is waited for this long before something is said, unless waits have been much shorter so far.
const LONG: Duration = Duration::from_secs(10);

/// It is waited for this long in any case.
const SHORT: Duration = Duration::from_millis(1500);

/// A wait that is so much longer than all before is news.
const MUCH_LONGER: u32 = 10;

/// So many calls show how long waits are.
const ENOUGH_CALLS: u64 = 50;

/// How long the calls of a group have taken so far.
#[derive(Debug, Default)]
pub(super) struct PastCalls {
    n: u64,
    longest: Duration,
}

impl PastCalls {
    /// Takes note of a call that has ended well.
    pub fn add(&mut self, took: Duration) {
        self.n += 1;
        self.longest = self.longest.max(took);
    }

    /// After which time a wait is long.
    fn patience(&self) -> Duration {
        if self.n < ENOUGH_CALLS { LONG } else { (self.longest * MUCH_LONGER).clamp(SHORT, LONG) }
    }
}

/// Looks after the waits of one call.
pub(super) struct Waiting<'a> {
    recorder: &'a Recorder,
    rank: usize,
    signature: &'a Signature,
    began: Instant,
    patience: Duration,
    has_waited: Cell<bool>,
    looked: Cell<Duration>,
    named_stopped: Cell<Option<usize>>,
    has_warned: Cell<bool>,
}

impl<'a> Waiting<'a> {
    pub fn new(
        recorder: &'a Recorder,
        rank: usize,
        signature: &'a Signature,
        began: Instant,
        past: &PastCalls,
    ) -> Waiting<'a> {
        let patience = past.patience();
        let (has_waited, looked, named_stopped, has_warned) = Default::default();
        Waiting { recorder, rank, signature, began, patience, has_waited, looked, named_stopped, has_warned }
    }

    /// How long the call took, if it had to wait at all.
    pub fn took(&self) -> Duration {
        if self.has_waited.get() { self.began.elapsed() } else { Duration::ZERO }
    }

    /// This rank waits for `peer`. Called now and then while it does.
    pub fn look(&self, peer: usize) {
        self.recorder.wait_for(peer);
        self.has_waited.set(true);
        let waited = self.began.elapsed();
        if waited < self.looked.get() + LOOK {
            return;
        }
        self.looked.set(waited);
        let Some(state) = self.recorder.state(peer) else {
            if waited >= LONG && !self.has_warned.replace(true) {
                self.warn(peer, waited, "");
            }
            return;
        };
        if matches!(state.condition, Condition::Stopped { .. }) {
            if self.named_stopped.replace(Some(peer)) != Some(peer) {
                self.warn(peer, waited, &format!(": rank {peer} {state}"));
            }
            return;
        }
        // These take their time.
        let is_elsewhere = matches!(state.activity, Activity::Saving | Activity::Evaluating | Activity::Preparing);
        let patience = if is_elsewhere { LONG } else { self.patience };
        if waited >= patience && !self.has_warned.replace(true) {
            self.warn(peer, waited, &format!(": rank {peer} {state}"));
        }
    }

    fn warn(&self, peer: usize, waited: Duration, what: &str) {
        let step = self.recorder.step().map_or(String::new(), |step| format!(", in step {step}"));
        let (rank, call, waited) = (self.rank, self.signature, waited.as_secs_f64());
        tracing::warn!("rank {rank} has waited {waited:.1} s for rank {peer} in {call}{step}{what}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_long_if_those_before_were_much_shorter() {
        let mut past = PastCalls::default();
        assert_eq!(past.patience(), LONG);
        (0..ENOUGH_CALLS).for_each(|_| past.add(Duration::from_millis(20)));
        assert_eq!(past.patience(), SHORT);
        past.add(Duration::from_millis(300));
        assert_eq!(past.patience(), Duration::from_secs(3));
        past.add(Duration::from_secs(60));
        assert_eq!(past.patience(), LONG);
    }
}
