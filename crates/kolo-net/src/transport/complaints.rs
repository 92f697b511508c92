//! Rate-limits warnings about strangers, so that nobody who can reach the port can fill the log.

use std::collections::HashMap;
use std::fmt;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// How often at most a warning of one kind is logged.
const EVERY: Duration = Duration::from_secs(1);

/// When warnings of each kind were last logged, and how many were left out since.
#[derive(Default)]
pub(crate) struct Complaints(Mutex<HashMap<&'static str, (Option<Instant>, u64)>>);

impl Complaints {
    /// Logs a warning, unless one of the same kind was logged within the last second.
    pub fn warn(&self, kind: &'static str, why: impl fmt::Display) {
        match self.admit(kind, Instant::now()) {
            Some(0) => tracing::warn!("{kind}: {why}"),
            Some(n) => tracing::warn!("{kind}: {why} (and {n} more of these since the last such line)"),
            None => tracing::debug!("{kind}: {why}"),
        }
    }

    /// How many of this kind were left out before this one, if it may be logged.
    fn admit(&self, kind: &'static str, now: Instant) -> Option<u64> {
        let mut kinds = self.0.lock();
        let (last, n_left_out) = kinds.entry(kind).or_default();
        if last.is_some_and(|last| now.saturating_duration_since(last) < EVERY) {
            *n_left_out += 1;
            return None;
        }
        *last = Some(now);
        Some(std::mem::take(n_left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_flood_one_line_a_second_is_logged_and_the_rest_counted() {
        let (complaints, start) = (Complaints::default(), Instant::now());
        assert_eq!(complaints.admit("refused", start), Some(0));
        for i in 1..1000 {
            assert_eq!(complaints.admit("refused", start + Duration::from_micros(i)), None);
        }
        assert_eq!(complaints.admit("broken", start), Some(0), "another kind is not held back");
        assert_eq!(complaints.admit("refused", start + EVERY), Some(999));
    }
}
