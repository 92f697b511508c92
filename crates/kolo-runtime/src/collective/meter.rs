//! How much a rank exchanges: what its calls send by a way that sends as little as any, and how long they take.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kolo_core::Tensor;
use kolo_ops::collective::{CollectiveCall, CollectiveKind};
use parking_lot::Mutex;

/// Counts the calls of a group through host memory.
#[derive(Default)]
pub(super) struct Meter {
    n_calls: AtomicU64,
    sent_bytes: AtomicU64,
    busy_ns: AtomicU64,
    exposed_ns: AtomicU64,
    last: Mutex<LastCall>,
}

/// When the last call was begun, and when it was over.
#[derive(Clone, Copy, Default)]
struct LastCall {
    begun: Option<Instant>,
    done: Option<Instant>,
}

/// What a rank has exchanged, since its group began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExchangedSoFar {
    /// Calls, whether they were made in graphs or not.
    pub n_calls: u64,
    /// The bytes that this rank sends in them over messages, by a way that sends as little as any. In shared memory, ranks read as much.
    pub sent_bytes: u64,
    /// How long it was in calls, waiting for others included.
    pub busy: Duration,
    /// How much of that was at the ends of steps: from the moment when the last call of a step was begun, which is when all that it
    /// needs was computed. What was before ran beside the computation.
    pub exposed: Duration,
}

impl Meter {
    pub fn count(&self, call: &CollectiveCall, n_ranks: usize) {
        self.n_calls.fetch_add(1, Ordering::Relaxed);
        self.sent_bytes.fetch_add(sent_bytes(call.kind, &call.tensors, n_ranks), Ordering::Relaxed);
        self.last.lock().begun = Some(Instant::now());
    }

    /// A call was in progress from one moment to the other.
    pub fn ended(&self, began: Instant, now: Instant) {
        add(&self.busy_ns, now - began);
        self.last.lock().done = Some(now);
    }

    /// The calls of a step are over.
    pub fn end_step(&self) {
        let last = std::mem::take(&mut *self.last.lock());
        if let (Some(begun), Some(done)) = (last.begun, last.done) {
            add(&self.exposed_ns, done.saturating_duration_since(begun));
        }
    }

    /// What was before does not count as the end of a step.
    pub fn begin_step(&self) {
        *self.last.lock() = LastCall::default();
    }

    pub fn so_far(&self) -> ExchangedSoFar {
        ExchangedSoFar {
            n_calls: self.n_calls.load(Ordering::Relaxed),
            sent_bytes: self.sent_bytes.load(Ordering::Relaxed),
            busy: Duration::from_nanos(self.busy_ns.load(Ordering::Relaxed)),
            exposed: Duration::from_nanos(self.exposed_ns.load(Ordering::Relaxed)),
        }
    }
}

fn add(to: &AtomicU64, time: Duration) {
    to.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
}

/// The mean over ranks of what each sends. Of collectives with one root, ranks send different amounts.
fn sent_bytes(kind: CollectiveKind, tensors: &[Tensor], n_ranks: usize) -> u64 {
    let bytes: usize = tensors.iter().map(|tensor| tensor.n_elements() * tensor.dtype().size().unwrap_or(0)).sum();
    let (bytes, n) = (bytes as u64, n_ranks as u64);
    let others = n - 1;
    match kind {
        CollectiveKind::AllReduce(_) => 2 * others * bytes / n,
        CollectiveKind::AllGather | CollectiveKind::AllGatherUneven => others * bytes,
        CollectiveKind::SendReceive => bytes,
        CollectiveKind::Barrier => 0,
        CollectiveKind::ReduceScatter(_)
        | CollectiveKind::Reduce(..)
        | CollectiveKind::Gather(_)
        | CollectiveKind::GatherUneven(_)
        | CollectiveKind::Broadcast(_)
        | CollectiveKind::Scatter(_)
        | CollectiveKind::ScatterUneven(_)
        | CollectiveKind::AllToAll
        | CollectiveKind::AllToAllUneven => others * bytes / n,
    }
}

#[cfg(test)]
mod tests {
    use kolo_device::cpu::reduce::ReduceOp;

    use super::*;

    /// Two calls beside each other and the computation: the last one was begun 30 ms before it was over.
    #[test]
    fn what_is_at_the_end_of_a_step_is_exposed() {
        let (meter, begin) = (Meter::default(), Instant::now());
        let at = |ms| begin + Duration::from_millis(ms);
        for _ in 0..2 {
            meter.begin_step();
            meter.ended(at(0), at(50));
            meter.last.lock().begun = Some(at(60));
            meter.ended(at(70), at(90));
            meter.end_step();
        }
        // Between steps.
        meter.ended(at(100), at(105));
        meter.begin_step();
        meter.end_step();
        let found = meter.so_far();
        assert_eq!((found.busy, found.exposed), (Duration::from_millis(145), Duration::from_millis(60)));
    }

    #[test]
    fn what_a_rank_sends_follows_from_the_collective() {
        let tensors = [Tensor::from([0.0f32; 6]), Tensor::from([0.0f32; 2])];
        let sent = |kind, n| sent_bytes(kind, &tensors, n);
        assert_eq!(sent(CollectiveKind::AllReduce(ReduceOp::Sum), 4), 48);
        assert_eq!(sent(CollectiveKind::AllGather, 4), 96);
        assert_eq!(sent(CollectiveKind::ReduceScatter(ReduceOp::Sum), 4), 24);
        assert_eq!([sent(CollectiveKind::Barrier, 4), sent(CollectiveKind::AllGather, 1)], [0, 0]);
    }
}
