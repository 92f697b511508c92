//! `Estimator`: a model as functions, for those who know it from TensorFlow. The same program trains alone and distributed; which process of
//! which job it is, `TF_CONFIG` says ([`RunConfig::from_env`]).
//!
//! ```text
//! mod.rs         the model function, train, evaluate, predict
//! run_config.rs  where checkpoints are, and this process's part of the job
//! together.rs    train_and_evaluate: what a process does by its part
//! ```

mod run_config;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
mod together;

use std::path::Path;
use std::sync::Arc;

use kolo_core::{Error, PartialShape, Result, Tensor};
use kolo_graph::{Graph, Operation, Output};
use kolo_runtime::{Session, SessionConfig};

use super::trainer::join_rows;
use super::{
    Callback, Checkpoints, Evaluation, FitReport, Flow, Model, Saver, StepReport, Trainer, global_step_or_create,
    read_global_step,
};
use crate::data::Dataset;
use crate::optim::Optimizer;
use crate::parallel::ReduceOp;
use crate::strategy::{PerReplica, Scope, Strategy};

pub use run_config::{JobPart, RunConfig};
pub use together::{EvalSpec, TrainSpec, train_and_evaluate};

/// What a model function is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// A loss and how to make it small.
    Train,
    /// A loss and metrics.
    Evaluate,
    /// Predictions. There are no labels.
    Predict,
}

/// What a model function gives.
#[derive(Default)]
pub struct EstimatorSpec<'g> {
    loss: Option<Output<'g>>,
    metrics: Vec<(String, Output<'g>)>,
    predictions: Vec<(String, Output<'g>)>,
    optimizer: Option<Box<dyn Optimizer>>,
    train_op: Option<Operation<'g>>,
}

impl<'g> EstimatorSpec<'g> {
    /// Nothing yet.
    pub fn new() -> EstimatorSpec<'g> {
        EstimatorSpec::default()
    }

    /// The loss, a mean over the batch: for training and evaluation.
    #[must_use]
    pub fn loss(mut self, loss: Output<'g>) -> Self {
        self.loss = Some(loss);
        self
    }

    /// A scalar to evaluate, a mean over the batch.
    #[must_use]
    pub fn metric(mut self, name: &str, value: Output<'g>) -> Self {
        self.metrics.push((name.to_owned(), value));
        self
    }

    /// A prediction, with one row for each row of the features.
    #[must_use]
    pub fn prediction(mut self, name: &str, value: Output<'g>) -> Self {
        self.predictions.push((name.to_owned(), value));
        self
    }

    /// Trains with this optimizer, which is given the gradients of all replicas.
    #[must_use]
    pub fn minimize(mut self, optimizer: impl Optimizer + 'static) -> Self {
        self.optimizer = Some(Box::new(optimizer));
        self
    }

    /// Trains by running this operation, which should count the global step: for a single replica alone.
    #[must_use]
    pub fn train_op(mut self, operation: Operation<'g>) -> Self {
        self.train_op = Some(operation);
        self
    }
}

/// Trains, evaluates and uses a model that a function describes. Whatever it knows is in the checkpoints of its directory.
///
/// The model function is called with the features and labels of a batch (the last column of the data are the labels, all others features)
/// and what it is wanted for; under a strategy it is called once for each replica.
///
/// ```
/// use kolo::data::Dataset;
/// use kolo::optim::Sgd;
/// use kolo::train::{Estimator, EstimatorSpec, Mode, RunConfig};
/// use kolo::{Tensor, nn, ops};
///
/// # let dir = std::env::temp_dir().join(format!("kolo-estimator-doc-{}", std::process::id()));
/// let line = Estimator::new(RunConfig::local(&dir), |features, labels, mode| {
///     let y = nn::dense(features[0], 1, "line");
///     let spec = EstimatorSpec::new().prediction("y", y);
///     let Some(labels) = labels else { return Ok(spec) };
///     let spec = spec.loss(ops::mean_all(ops::square(y - labels)));
///     Ok(if mode == Mode::Train { spec.minimize(Sgd::new(0.1)) } else { spec })
/// });
/// let rows = || Dataset::new([Tensor::from([[1.0f32], [2.0]]), Tensor::from([[3.0f32], [6.0]])]).batch(2, true);
/// line.train(|| Ok(rows().repeat(100)), None)?;
/// assert!(line.evaluate(|| Ok(rows()))?.evaluation.loss < 0.01);
/// let predicted = line.predict(|| Ok(Dataset::new([Tensor::from([[10.0f32]])]).batch(1, false)))?;
/// assert_eq!(predicted[0].0, "y");
/// # std::fs::remove_dir_all(dir).ok();
/// # Ok::<(), kolo::Error>(())
/// ```
pub struct Estimator<F> {
    config: RunConfig,
    model_fn: F,
}

/// What [`Estimator::evaluate`] found.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluated {
    /// The global step of the checkpoint.
    pub step: i64,
    /// The loss and the metrics.
    pub evaluation: Evaluation,
}

impl<F> Estimator<F>
where
    F: for<'g> Fn(&[Output<'g>], Option<Output<'g>>, Mode) -> Result<EstimatorSpec<'g>>,
{
    /// An estimator of this model.
    pub fn new(config: RunConfig, model_fn: F) -> Estimator<F> {
        Estimator { config, model_fn }
    }

    /// Its settings.
    pub fn config(&self) -> &RunConfig {
        &self.config
    }

    /// Trains until the data ends, or the global step is `max_steps`. Goes on from the newest checkpoint of the directory, in the data as
    /// well, and leaves one.
    pub fn train(&self, input_fn: impl Fn() -> Result<Dataset>, max_steps: Option<i64>) -> Result<FitReport> {
        self.train_with(&self.config.strategy()?, &input_fn()?, max_steps)
    }

    fn train_with(&self, strategy: &Strategy, data: &Dataset, max_steps: Option<i64>) -> Result<FitReport> {
        let (g, config) = (crate::graph(), &self.config);
        g.set_seed(config.seed);
        let inputs = placeholders(&g, data)?;
        let model = strategy.scope(&g, |scope| self.trained(scope, &inputs))?;
        let dir = config.model_dir.clone();
        let checkpoints = Checkpoints { dir, every: config.save_every, keep: config.keep };
        let mut trainer = Trainer::new(&g, model).strategy(strategy).checkpoints(checkpoints).resume(true).build()?;
        let mut limit = StopAt(max_steps.unwrap_or(i64::MAX));
        let step = trainer.step()?;
        if step >= limit.0 {
            return Ok(FitReport::none(step));
        }
        trainer.fit(data, &mut [&mut limit])
    }

    /// The model for training: a copy for each replica.
    fn trained<'g>(&self, scope: &Scope<'_, 'g>, inputs: &[Output<'g>]) -> Result<Model<'g>> {
        let step = global_step_or_create(scope.graph())?;
        let shares = inputs.iter().map(|input| scope.split(*input)).collect::<Result<Vec<_>>>()?;
        let specs = scope.run(&shares, |replica| self.describe(replica.inputs(), Mode::Train))?;
        let loss = |spec: &EstimatorSpec<'g>| spec.loss.ok_or_else(|| lacks("no loss to train with", "loss(..)"));
        let losses = PerReplica::new(specs.local().iter().map(loss).collect::<Result<Vec<_>>>()?);
        let first = specs.into_local().into_iter().next();
        let first = first.ok_or_else(|| Error::internal("a strategy has replicas"))?;
        let train = match (first.optimizer, first.train_op) {
            (Some(optimizer), _) => scope.minimize_boxed(optimizer, &losses, Some(step))?,
            (None, Some(train)) if scope.strategy().mesh().n_replicas() == 1 && scope.strategy().seat().is_none() => {
                train
            }
            (None, Some(_)) => {
                return Err(Error::invalid_argument(format!(
                    "the model function gave a `train_op`, which updates from one replica's gradients alone, and strategy {} has {}; give \
                     the optimizer itself: `minimize(..)`",
                    scope.strategy().name(),
                    scope.strategy().mesh().n_replicas()
                )));
            }
            (None, None) => return Err(lacks("nothing to train with", "minimize(..)")),
        };
        Ok(Model::new(inputs, scope.reduce(ReduceOp::Mean, &losses)?, train))
    }

    /// The loss and the metrics of the newest checkpoint, over all of the data.
    pub fn evaluate(&self, input_fn: impl Fn() -> Result<Dataset>) -> Result<Evaluated> {
        let (g, data) = (crate::graph(), input_fn()?);
        let inputs = placeholders(&g, &data)?;
        let spec = self.describe(&inputs, Mode::Evaluate)?;
        let loss = spec.loss.ok_or_else(|| lacks("no loss to evaluate", "loss(..)"))?;
        let model = Model::new(&inputs, loss, g.group("no_training", &[]));
        let model = spec.metrics.iter().fold(model, |model, (name, value)| model.metric(name, *value));
        let session = self.restored(&g)?;
        let step = read_global_step(&session, &g)?.unwrap_or(0);
        Ok(Evaluated { step, evaluation: model.evaluate(&session, &data)? })
    }

    /// The predictions of the newest checkpoint, by name, for all rows of the data, whose columns are features.
    pub fn predict(&self, input_fn: impl Fn() -> Result<Dataset>) -> Result<Vec<(String, Tensor)>> {
        let (g, data) = (crate::graph(), input_fn()?);
        let inputs = placeholders(&g, &data)?;
        let spec = self.describe(&inputs, Mode::Predict)?;
        if spec.predictions.is_empty() {
            return Err(lacks("no predictions", "prediction(name, ..)"));
        }
        let (names, outputs): (Vec<String>, Vec<Output<'_>>) = spec.predictions.into_iter().unzip();
        let session = self.restored(&g)?;
        let mut parts = vec![Vec::new(); outputs.len()];
        for batch in data.batches()? {
            let feeds: Vec<_> = inputs.iter().copied().zip(batch?.tensors).collect();
            let values = session.run(&outputs, &feeds, &[])?;
            parts.iter_mut().zip(values).for_each(|(parts, value)| parts.push(value));
        }
        names.into_iter().zip(&parts).map(|(name, parts)| Ok((name, join_rows(parts)?))).collect()
    }

    fn describe<'g>(&self, inputs: &[Output<'g>], mode: Mode) -> Result<EstimatorSpec<'g>> {
        match (mode, inputs) {
            (Mode::Predict, features) => (self.model_fn)(features, None, mode),
            (Mode::Train | Mode::Evaluate, [features @ .., labels]) if !features.is_empty() => {
                (self.model_fn)(features, Some(*labels), mode)
            }
            _ => Err(Error::invalid_argument("the data needs a column of features, and labels as its last column")),
        }
    }

    /// A session with the values of the newest checkpoint.
    fn restored(&self, graph: &Graph) -> Result<Arc<Session>> {
        global_step_or_create(graph)?;
        graph.check()?;
        let saver = Saver::new(graph)?;
        let session = Arc::new(Session::with_config(graph, SessionConfig::default())?);
        let dir: &Path = &self.config.model_dir;
        match saver.restore_latest(&session, dir)? {
            Some(_) => Ok(session),
            None => Err(Error::failed_precondition(format!(
                "there is no checkpoint in {}; train the model first",
                dir.display()
            ))),
        }
    }
}

fn lacks(what: &str, cure: &str) -> Error {
    Error::invalid_argument(format!("the model function gave {what}; say `EstimatorSpec::{cure}`"))
}

/// A placeholder for each column of the data, with the dtype and the row of its first batch.
fn placeholders<'g>(graph: &'g Graph, data: &Dataset) -> Result<Vec<Output<'g>>> {
    let first = data.clone().prefetch(0).batches()?.next();
    let first = first.ok_or_else(|| Error::invalid_argument("the input function gave data without a batch"))??;
    let column = |(i, tensor): (usize, &Tensor)| {
        let row = tensor.shape().iter().skip(1).map(|n| Some(*n));
        let shape = PartialShape::new(&std::iter::once(None).chain(row).collect::<Vec<_>>());
        let name = format!("input_{i}");
        graph.op("Placeholder").name(&name).attr("dtype", tensor.dtype()).attr("shape", shape).out()
    };
    let columns = first.tensors.iter().enumerate().map(column).collect();
    graph.check()?;
    Ok(columns)
}

/// Stops at a global step.
struct StopAt(i64);

impl Callback for StopAt {
    fn on_step(&mut self, report: &StepReport<'_, '_>) -> Result<Flow> {
        Ok(if report.step >= self.0 { Flow::Stop } else { Flow::Continue })
    }
}
