//! What happens as a [`Trainer`] trains.

use std::time::Duration;

use kolo_core::Result;
use kolo_graph::Output;

use super::{FitReport, Trainer};

/// Whether training goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// It does.
    Continue,
    /// It ends after this step, with a checkpoint.
    Stop,
}

impl Flow {
    /// Stop if either says so.
    pub fn and(self, other: Flow) -> Flow {
        match (self, other) {
            (Flow::Continue, Flow::Continue) => Flow::Continue,
            _ => Flow::Stop,
        }
    }
}

/// One step of training.
pub struct StepReport<'a, 'g> {
    /// The global step, this one included.
    pub step: i64,
    /// The epoch, from 0.
    pub epoch: u64,
    /// The batch in its epoch, from 0.
    pub batch: u64,
    /// How many batches an epoch has, if that is known.
    pub batches_per_epoch: Option<usize>,
    /// The batch's loss.
    pub loss: f64,
    /// The batch's metrics.
    pub metrics: &'a [f64],
    pub(crate) names: &'a [(String, Output<'g>)],
    /// How many samples the batch had.
    pub n_samples: usize,
    /// Since the step before.
    pub took: Duration,
}

impl StepReport<'_, '_> {
    /// The metric of this name.
    pub fn metric(&self, name: &str) -> Option<f64> {
        let at = self.names.iter().position(|(have, _)| have == name)?;
        self.metrics.get(at).copied()
    }
}

/// The end of an epoch.
pub struct EpochReport {
    /// The epoch that ended, from 0.
    pub epoch: u64,
    /// The global step.
    pub step: i64,
    /// The loss of its last batch.
    pub loss: f64,
}

/// Takes part in [`Trainer::fit`].
pub trait Callback {
    /// Training begins, from this global step.
    fn on_begin(&mut self, _step: i64) -> Result<()> {
        Ok(())
    }

    /// A step was made.
    fn on_step(&mut self, _report: &StepReport<'_, '_>) -> Result<Flow> {
        Ok(Flow::Continue)
    }

    /// An epoch ended: the moment to evaluate.
    fn on_epoch_end(&mut self, _report: &EpochReport, _trainer: &Trainer<'_>) -> Result<Flow> {
        Ok(Flow::Continue)
    }

    /// Training ended; its last checkpoint is written.
    fn on_end(&mut self, _report: &FitReport) -> Result<()> {
        Ok(())
    }
}

/// Tells how good a trainer's model is: the smaller, the better.
type Watch<'a> = dyn FnMut(&Trainer<'_>) -> Result<f64> + 'a;

/// Stops when a value has not improved for a number of epochs.
pub struct EarlyStopping<'a> {
    watch: Box<Watch<'a>>,
    patience: u64,
    least_change: f64,
    best: f64,
    since_best: u64,
}

impl<'a> EarlyStopping<'a> {
    /// Stops when what `watch` returns at the end of an epoch has not become smaller for `patience` epochs. For a value that
    /// should grow, return its negative.
    pub fn new(patience: u64, watch: impl FnMut(&Trainer<'_>) -> Result<f64> + 'a) -> EarlyStopping<'a> {
        EarlyStopping { watch: Box::new(watch), patience, least_change: 0.0, best: f64::INFINITY, since_best: 0 }
    }

    /// A change that is not larger than this is none.
    pub fn least_change(mut self, least_change: f64) -> Self {
        self.least_change = least_change;
        self
    }

    /// The best value so far.
    pub fn best(&self) -> f64 {
        self.best
    }
}

impl Callback for EarlyStopping<'_> {
    fn on_epoch_end(&mut self, _report: &EpochReport, trainer: &Trainer<'_>) -> Result<Flow> {
        let value = (self.watch)(trainer)?;
        if value < self.best - self.least_change {
            (self.best, self.since_best) = (value, 0);
            return Ok(Flow::Continue);
        }
        self.since_best += 1;
        Ok(if self.since_best >= self.patience { Flow::Stop } else { Flow::Continue })
    }
}
