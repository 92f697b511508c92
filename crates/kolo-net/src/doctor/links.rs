//! How good the links to tasks are, as measured from here: round trips and throughput.

use std::time::{Duration, Instant};

use crate::task::services::WorkerService as _;
use crate::transport::grpc::GrpcPeer;
use crate::wire::proto::KoloReportRequest;

/// A step that no task has: the response is small.
const NO_STEP: i64 = -1;

/// The number of round trips that are measured, which takes a good link about a tenth of a second. Of a link that loses a
/// tenth of its packets, three in a hundred wait for a timeout; what else is lost is soon noticed by what comes after it.
const N_ROUND_TRIPS: usize = 500;

/// So many that wait are no accident. Fewer may be pauses of a task that is busy, or of this process.
const N_NO_ACCIDENT: usize = 3;

/// The bytes that are sent there and back.
const N_PROBE_BYTES: usize = 256 << 10;

/// The number of attempts to find a link fast, before it is called slow: tasks have other things to do.
const N_ATTEMPTS: usize = 3;

/// A link with less is slow: a worker that exchanges a million floats per step gets one step per second.
const LEAST_BITS_PER_SECOND: f64 = 20e6;

/// A round trip of this length, among ones that are much shorter, has waited for a packet to be sent again: timeouts of TCP
/// are at least 200 ms, to the tick of a clock.
const RETRANSMITTED: Duration = Duration::from_millis(190);

/// How long a link is measured at most.
const PATIENCE: Duration = Duration::from_secs(4);

/// A link to a task.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Link {
    /// The median of the round trips.
    pub round_trip: Duration,
    /// The longest of them.
    pub longest: Duration,
    /// Round trips that waited for a packet to be sent again.
    pub n_retransmitted: usize,
    /// The number of round trips.
    pub n_round_trips: usize,
    /// What went there and back; 0 if it did not arrive in time.
    pub bits_per_second: f64,
}

impl Link {
    /// Why the link is slow, if it is.
    pub fn trouble(&self) -> Option<String> {
        if self.n_retransmitted >= N_NO_ACCIDENT {
            return Some(format!(
                "packets are lost: {} of {} round trips took up to {:.0} ms, the others about {:.1} ms; {:.1} Mbit/s",
                self.n_retransmitted,
                self.n_round_trips,
                millis(self.longest),
                millis(self.round_trip),
                self.bits_per_second / 1e6
            ));
        }
        (self.bits_per_second < LEAST_BITS_PER_SECOND).then(|| match self.bits_per_second {
            0.0 => format!("{} KiB did not come back in time", N_PROBE_BYTES >> 10),
            bits => format!("{:.1} Mbit/s, round trip {:.1} ms", bits / 1e6, millis(self.round_trip)),
        })
    }
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Measures the link to a task that has just responded.
pub(super) async fn measure(peer: &GrpcPeer) -> Link {
    let began = Instant::now();
    let mut trips = Vec::new();
    while trips.len() < N_ROUND_TRIPS && n_retransmitted(&trips) < 2 * N_NO_ACCIDENT && began.elapsed() < PATIENCE / 2 {
        let began = Instant::now();
        // One that failed took at least so long.
        trips.push(round_trip(peer, 0).await.unwrap_or_else(|| began.elapsed()));
    }
    let n_retransmitted = n_retransmitted(&trips);
    trips.sort_unstable();
    let mut link = Link {
        round_trip: trips.get(trips.len() / 2).copied().unwrap_or_default(),
        longest: trips.last().copied().unwrap_or_default(),
        n_retransmitted,
        n_round_trips: trips.len(),
        bits_per_second: 0.0,
    };
    for _ in 0..N_ATTEMPTS {
        let left = PATIENCE.saturating_sub(began.elapsed());
        let Ok(Some(took)) = tokio::time::timeout(left, round_trip(peer, N_PROBE_BYTES)).await else { break };
        let carried = took.saturating_sub(link.round_trip).max(Duration::from_micros(1));
        link.bits_per_second = link.bits_per_second.max(2.0 * 8.0 * N_PROBE_BYTES as f64 / carried.as_secs_f64());
        if link.bits_per_second >= LEAST_BITS_PER_SECOND {
            break;
        }
    }
    link
}

fn n_retransmitted(trips: &[Duration]) -> usize {
    let shortest = trips.iter().min().copied().unwrap_or_default();
    trips.iter().filter(|&&trip| trip >= RETRANSMITTED.max(10 * shortest)).count()
}

async fn round_trip(peer: &GrpcPeer, n_bytes: usize) -> Option<Duration> {
    let began = Instant::now();
    let request = KoloReportRequest { step_id: NO_STEP, probe: vec![0x5a; n_bytes] };
    let response = peer.report(request).await.ok()?;
    (response.probe.len() == n_bytes).then(|| began.elapsed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_link_is_told_from_a_lossy_one_and_a_good_one() {
        let good = Link { round_trip: Duration::from_micros(300), bits_per_second: 3e8, ..Link::default() };
        assert_eq!(good.trouble(), None);
        let slow = Link { bits_per_second: 9.6e6, ..good };
        assert_eq!(slow.trouble().as_deref(), Some("9.6 Mbit/s, round trip 0.3 ms"));
        let lossy = Link { n_retransmitted: 4, n_round_trips: 40, longest: Duration::from_millis(412), ..good };
        let text = "packets are lost: 4 of 40 round trips took up to 412 ms, the others about 0.3 ms; 300.0 Mbit/s";
        assert_eq!(lossy.trouble().as_deref(), Some(text));
        // Two pauses are nobody's fault.
        assert_eq!(Link { n_retransmitted: 2, ..lossy }.trouble(), None);
        let ms = Duration::from_millis;
        assert_eq!(n_retransmitted(&[ms(1), ms(2), ms(210), ms(180)]), 1);
        // A link that is long, and not lossy.
        assert_eq!(n_retransmitted(&[ms(180), ms(200), ms(210)]), 0);
    }
}
