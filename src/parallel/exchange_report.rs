//! What a training says about what its ranks have exchanged.

use std::time::Duration;

use super::ExchangedSoFar;

/// What a rank has exchanged in the steps of a training.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExchangeReport {
    /// Bytes that this rank sent in a step, losses and comparisons of weights included: the mean over the steps.
    pub bytes_per_step: f64,
    /// What it would have sent for gradients that go whole, if what a step trains is known. Gradients of rows are not counted.
    pub whole_bytes_per_step: Option<f64>,
    /// The share of the time that it was in exchanges, waiting for other ranks included. Beside backward or not: where ranks have
    /// several cores each, they compute meanwhile.
    pub share_of_time: f64,
    /// The share of that time that was hidden behind computation: all but the time from the begin of a step's last exchange, when
    /// backward is over, to its end. `None` if exchanges are made by the thread that computes, as on ranks with a single core.
    pub hidden: Option<f64>,
}

impl ExchangeReport {
    /// What was exchanged in so many steps, which took so long. Nothing is known if all of it was exchanged between GPUs.
    pub(crate) fn between(
        before: ExchangedSoFar,
        after: ExchangedSoFar,
        (n_steps, took): (u64, Duration),
        (whole_bytes_per_step, runs_beside): (Option<f64>, bool),
    ) -> Option<ExchangeReport> {
        let n_calls = after.n_calls - before.n_calls;
        let seconds = |time: fn(&ExchangedSoFar) -> Duration| (time(&after) - time(&before)).as_secs_f64();
        let (busy, exposed) = (seconds(|at| at.busy), seconds(|at| at.exposed));
        (n_steps > 0 && n_calls > 0).then(|| ExchangeReport {
            bytes_per_step: (after.sent_bytes - before.sent_bytes) as f64 / n_steps as f64,
            whole_bytes_per_step,
            share_of_time: busy / took.as_secs_f64().max(1e-9),
            hidden: runs_beside.then(|| (1.0 - exposed / busy.max(1e-9)).clamp(0.0, 1.0)),
        })
    }

    /// The share of the bytes that was saved; negative if more was sent than whole gradients.
    pub fn saved(&self) -> Option<f64> {
        self.whole_bytes_per_step.filter(|whole| *whole > 0.0).map(|whole| 1.0 - self.bytes_per_step / whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_those_between_two_moments() {
        let at = |n_calls, sent_bytes, ms: [u64; 2]| {
            let [busy, exposed] = ms.map(Duration::from_millis);
            ExchangedSoFar { n_calls, sent_bytes, busy, exposed }
        };
        let (before, after) = (at(3, 50, [10, 5]), at(13, 250, [60, 15]));
        let between = |runs_beside| {
            ExchangeReport::between(before, after, (10, Duration::from_millis(100)), (Some(80.0), runs_beside))
        };
        let wanted = ExchangeReport {
            bytes_per_step: 20.0,
            whole_bytes_per_step: Some(80.0),
            share_of_time: 0.5,
            hidden: Some(0.8),
        };
        assert_eq!(between(true), Some(wanted));
        assert_eq!(between(false), Some(ExchangeReport { hidden: None, ..wanted }));
        assert_eq!(wanted.saved(), Some(0.75));
        assert_eq!(ExchangeReport::between(before, before, (10, Duration::ZERO), (None, true)), None);
    }
}
