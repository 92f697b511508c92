//! `train_and_evaluate`: one call for all processes of a job. Each does what its part is.

use std::thread::sleep;
use std::time::{Duration, Instant};

use kolo_core::{Error, Result};
use kolo_graph::Output;

use super::{Estimator, EstimatorSpec, Evaluated, JobPart, Mode};
use crate::data::Dataset;
use crate::train::latest_checkpoint;

/// What to train on, and for how long.
pub struct TrainSpec<I> {
    input_fn: I,
    max_steps: i64,
}

impl<I: Fn() -> Result<Dataset>> TrainSpec<I> {
    /// Trains on this data until the global step is `max_steps`.
    pub fn new(input_fn: I, max_steps: i64) -> TrainSpec<I> {
        TrainSpec { input_fn, max_steps }
    }
}

/// What to evaluate on, and how often.
pub struct EvalSpec<I> {
    input_fn: I,
    every: i64,
    give_up_after: Duration,
}

impl<I: Fn() -> Result<Dataset>> EvalSpec<I> {
    /// Evaluates on this data. A process that is the whole job does so every 1000 steps and at the end.
    pub fn new(input_fn: I) -> EvalSpec<I> {
        EvalSpec { input_fn, every: 1000, give_up_after: Duration::from_secs(3600) }
    }

    /// How many steps a process that is the whole job trains between two evaluations.
    #[must_use]
    pub fn every(mut self, n_steps: i64) -> Self {
        self.every = n_steps.max(1);
        self
    }

    /// How long an evaluator waits for another checkpoint: an hour if not said.
    #[must_use]
    pub fn give_up_after(mut self, wait: Duration) -> Self {
        self.give_up_after = wait;
        self
    }
}

/// How often an evaluator looks for a checkpoint.
const LOOK: Duration = Duration::from_millis(200);

/// Does this process's part of a training. The whole job, alone: trains and evaluates in turn. A chief, a worker or a rank: trains; the
/// chief, or rank 0, evaluates at the end. An evaluator: evaluates each checkpoint until that of the last step. A parameter server: serves
/// until all that train have left. Gives what this process has evaluated, in order.
pub fn train_and_evaluate<F, T, E>(
    estimator: &Estimator<F>,
    train: &TrainSpec<T>,
    eval: &EvalSpec<E>,
) -> Result<Vec<Evaluated>>
where
    F: for<'g> Fn(&[Output<'g>], Option<Output<'g>>, Mode) -> Result<EstimatorSpec<'g>>,
    T: Fn() -> Result<Dataset>,
    E: Fn() -> Result<Dataset>,
{
    let config = estimator.config();
    match config.part() {
        JobPart::Alone => in_turn(estimator, train, eval),
        JobPart::Rank(_) | JobPart::Worker(..) => {
            let strategy = config.strategy()?;
            estimator.train_with(&strategy, &(train.input_fn)()?, Some(train.max_steps))?;
            if let JobPart::Worker(cluster, ..) = config.part() {
                config.leave(cluster, &strategy)?;
            }
            drop(strategy);
            if config.is_chief() { Ok(vec![estimator.evaluate(&eval.input_fn)?]) } else { Ok(Vec::new()) }
        }
        JobPart::Server(cluster, task) => config.serve(cluster, *task).map(|()| Vec::new()),
        JobPart::Evaluator => each_checkpoint(estimator, train.max_steps, eval),
    }
}

fn in_turn<F, T, E>(estimator: &Estimator<F>, train: &TrainSpec<T>, eval: &EvalSpec<E>) -> Result<Vec<Evaluated>>
where
    F: for<'g> Fn(&[Output<'g>], Option<Output<'g>>, Mode) -> Result<EstimatorSpec<'g>>,
    T: Fn() -> Result<Dataset>,
    E: Fn() -> Result<Dataset>,
{
    let (mut found, mut step) = (Vec::<Evaluated>::new(), 0i64);
    loop {
        let until = (step - step.rem_euclid(eval.every) + eval.every).min(train.max_steps);
        let report = estimator.train(&train.input_fn, Some(until))?;
        // A step that was made earlier than this call is where it goes on from.
        let is_new = found.last().is_none_or(|last| last.step < report.step);
        if is_new {
            found.push(estimator.evaluate(&eval.input_fn)?);
        }
        // The data may end before the last step.
        if report.step >= train.max_steps || (report.n_steps == 0 && report.step < until) {
            return Ok(found);
        }
        step = report.step;
    }
}

fn each_checkpoint<F, E>(estimator: &Estimator<F>, max_steps: i64, eval: &EvalSpec<E>) -> Result<Vec<Evaluated>>
where
    F: for<'g> Fn(&[Output<'g>], Option<Output<'g>>, Mode) -> Result<EstimatorSpec<'g>>,
    E: Fn() -> Result<Dataset>,
{
    let dir = &estimator.config().model_dir;
    let (mut found, mut last, mut since) = (Vec::<Evaluated>::new(), None, Instant::now());
    while found.last().is_none_or(|newest| newest.step < max_steps) {
        let newest = latest_checkpoint(dir)?;
        if newest.is_some() && newest != last {
            found.push(estimator.evaluate(&eval.input_fn)?);
            (last, since) = (newest, Instant::now());
            continue;
        }
        if since.elapsed() >= eval.give_up_after {
            return Err(Error::deadline_exceeded(format!(
                "the evaluator has waited {:.0?} for another checkpoint in {}; the last one was of step {}, and training ends at step \
                 {max_steps} (`EvalSpec::give_up_after` waits longer)",
                eval.give_up_after,
                dir.display(),
                found.last().map_or_else(|| "none".to_owned(), |newest| newest.step.to_string())
            )));
        }
        sleep(LOOK);
    }
    Ok(found)
}
