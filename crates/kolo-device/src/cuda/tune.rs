//! Autotuning: chooses among a library's algorithms by timing them, once for each shape.
//!
//! Timing takes longer than many uses of a shape, so it is deferred until a shape has been used a few times, and the
//! total time is bounded. Choices are cached for the whole process: from then on two sessions on one GPU compute the
//! same bits.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::{result, sys};
use kolo_core::Result;
use parking_lot::Mutex;

use super::check;
use super::device::CudaDevice;
use crate::Recording;

/// The number of calls that are timed together, so that launch overhead does not dominate small kernels.
const N_CALLS: usize = 10;
/// Calls that take longer, in seconds, are timed alone.
const LONG: f64 = 100e-6;
/// The limit on GPU time for one shape, in seconds; then the best so far is chosen.
const BUDGET: f64 = 0.2;
/// The limit on wall time for one shape, in seconds: a library loads its kernels on first use, which takes far longer
/// than running them.
const PATIENCE: f64 = 2.0;

/// The use of a shape at which it is timed. A step runs as many times before it is captured.
const TIMED_AT: u32 = 3;
/// The limit on time for all shapes together; the remaining shapes use the heuristic's first choice.
const MOST_SPENT: Duration = Duration::from_secs(60);

/// Whether `KOLO_TUNE=off`: for tools that slow kernels down a thousand times.
fn is_off() -> bool {
    static OFF: OnceLock<bool> = OnceLock::new();
    *OFF.get_or_init(|| std::env::var("KOLO_TUNE").is_ok_and(|value| value == "off"))
}

/// Microseconds spent on timing.
static SPENT: AtomicU64 = AtomicU64::new(0);

/// Adds the time until it is dropped to [`SPENT`].
pub(super) struct Spending(Instant);

impl Spending {
    pub fn begin() -> Spending {
        Spending(Instant::now())
    }
}

impl Drop for Spending {
    fn drop(&mut self) {
        let micros = u64::try_from(self.0.elapsed().as_micros()).unwrap_or(u64::MAX);
        SPENT.fetch_add(micros, Ordering::Relaxed);
    }
}

/// Cached choices, by GPU and call.
pub(super) struct Chosen<K, V>(Mutex<Option<Entries<K, V>>>);

type Entries<K, V> = HashMap<(String, K), Entry<V>>;

struct Entry<V> {
    n_uses: u32,
    choice: Option<V>,
}

impl<V> Default for Entry<V> {
    fn default() -> Entry<V> {
        Entry { n_uses: 0, choice: None }
    }
}

impl<K: Eq + Hash, V: Copy> Chosen<K, V> {
    pub const fn new() -> Chosen<K, V> {
        Chosen(Mutex::new(None))
    }

    pub fn get(&self, device: &CudaDevice, key: K) -> Option<V> {
        self.0.lock().as_ref()?.get(&(device.gpu().to_owned(), key))?.choice
    }

    /// Counts a use of a shape without a choice, and returns whether to time it now.
    pub fn is_due(&self, device: &CudaDevice, key: K) -> bool {
        let may_spend = Duration::from_micros(SPENT.load(Ordering::Relaxed)) < MOST_SPENT && !is_off();
        may_spend && self.count(device.gpu(), key)
    }

    fn count(&self, gpu: &str, key: K) -> bool {
        let mut entries = self.0.lock();
        let entry = entries.get_or_insert_default().entry((gpu.to_owned(), key)).or_default();
        entry.n_uses = entry.n_uses.saturating_add(1);
        entry.n_uses >= TIMED_AT
    }

    /// Caches a choice, unless another thread was first; returns the cached one.
    pub fn insert(&self, device: &CudaDevice, key: K, value: V) -> V {
        let mut entries = self.0.lock();
        let entry = entries.get_or_insert_default().entry((device.gpu().to_owned(), key)).or_default();
        *entry.choice.get_or_insert(value)
    }

    /// Replaces a choice that has failed.
    pub fn replace(&self, device: &CudaDevice, key: K, value: V) {
        let mut entries = self.0.lock();
        entries.get_or_insert_default().entry((device.gpu().to_owned(), key)).or_default().choice = Some(value);
    }
}

/// The fastest of `candidates`, by the GPU time of `enqueue`, and that time in seconds. Candidates that fail are
/// skipped; `None` if all fail.
pub(super) fn fastest<C: Copy>(
    device: &CudaDevice,
    candidates: &[C],
    mut enqueue: impl FnMut(C) -> Result<()>,
) -> Option<(C, f64)> {
    let start = Instant::now();
    let mut best: Option<(C, f64)> = None;
    let mut worked = 0.0;
    for (i, &candidate) in candidates.iter().enumerate() {
        if best.is_some() && (worked > BUDGET || start.elapsed().as_secs_f64() > PATIENCE) {
            tracing::debug!(target: "kolo::tune", "{i} of {} candidates were timed", candidates.len());
            break;
        }
        let Ok(seconds) = seconds(device, || enqueue(candidate)) else { continue };
        worked += seconds * if seconds > LONG { 3.0 } else { 3.0 * (N_CALLS + 1) as f64 };
        tracing::trace!(target: "kolo::tune", "candidate {i}: {:.2} us", seconds * 1e6);
        if best.is_none_or(|(_, least)| seconds < least) {
            best = Some((candidate, seconds));
        }
    }
    best
}

/// The GPU time of `enqueue`, in seconds. It is called several times.
fn seconds(device: &CudaDevice, mut enqueue: impl FnMut() -> Result<()>) -> Result<f64> {
    let once = seconds_each(device, 1, &mut enqueue)?;
    if once > LONG { Ok(once) } else { seconds_each(device, N_CALLS, &mut enqueue) }
}

fn seconds_each(device: &CudaDevice, n_calls: usize, enqueue: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
    // Captured first, so that GPU time is measured without the host's.
    let capturing = device.begin_capture()?;
    for _ in 0..n_calls {
        enqueue()?;
    }
    let captured = capturing.end()?;
    captured.replay()?;
    let (start, end) = (Timer::new()?, Timer::new()?);
    let stream = device.streams().compute.cu_stream();
    let mut least = f64::INFINITY;
    for _ in 0..2 {
        // SAFETY: events and stream are alive.
        check("recording an event", unsafe { result::event::record(start.0, stream) })?;
        captured.replay()?;
        // SAFETY: as above.
        check("recording an event", unsafe { result::event::record(end.0, stream) })?;
        // SAFETY: as above.
        check("waiting for the GPU", unsafe { result::event::synchronize(end.0) })?;
        // SAFETY: both events were recorded and have completed.
        let millis = check("reading a timer", unsafe { result::event::elapsed(start.0, end.0) })?;
        least = least.min(f64::from(millis) / 1e3 / n_calls as f64);
    }
    Ok(least)
}

/// An event with timing enabled.
struct Timer(sys::CUevent);

impl Timer {
    fn new() -> Result<Timer> {
        check("making an event", result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)).map(Timer)
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        // SAFETY: the event is ours and this is its last use. There is nothing to do about a failure.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_is_timed_when_it_comes_again() {
        let chosen: Chosen<u32, u32> = Chosen::new();
        let due = |gpu: &str, key| (0..4).map(|_| chosen.count(gpu, key)).collect::<Vec<_>>();
        assert_eq!(due("a", 1), [false, false, true, true]);
        assert_eq!(due("a", 2), [false, false, true, true]);
        assert_eq!(due("b", 1), [false, false, true, true]);
    }
}
