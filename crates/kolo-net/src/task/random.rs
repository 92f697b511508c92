//! Random numbers that need not be secret: step, request and session ids.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// A number that is not 0 and very likely unique.
pub(crate) fn random_u64() -> u64 {
    static STATE: OnceLock<(RandomState, AtomicU64)> = OnceLock::new();
    let (keys, count) = STATE.get_or_init(|| (RandomState::new(), AtomicU64::new(0)));
    let mut hasher = keys.build_hasher();
    hasher.write_u64(count.fetch_add(1, Ordering::Relaxed));
    hasher.finish().max(1)
}

/// The same, for the signed fields of requests.
pub(crate) fn random_id() -> i64 {
    random_u64() as i64
}

/// A step's id: 57 bits, as in TensorFlow, so that it is positive as a signed number.
pub(crate) fn random_step_id() -> u64 {
    (random_u64() >> 7).max(1)
}
