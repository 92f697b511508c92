//! What a trainer trains, and how it is evaluated.

use std::sync::Arc;

use kolo_core::{Error, Result, Tensor};
use kolo_graph::{Operation, Output};
use kolo_runtime::{Callable, Session};
use smallvec::SmallVec;

use super::number;
use crate::data::Dataset;

/// What a [`Trainer`](super::Trainer) trains: where the columns of a batch go, what to make small and how, and what else to watch.
#[derive(Clone)]
pub struct Model<'g> {
    pub(super) inputs: Vec<Output<'g>>,
    pub(super) loss: Output<'g>,
    pub(super) train_op: Operation<'g>,
    pub(super) metrics: Vec<(String, Output<'g>)>,
    pub(super) train_feeds: Vec<(Output<'g>, Tensor)>,
    pub(super) evaluation: Option<Vec<Output<'g>>>,
}

impl<'g> Model<'g> {
    /// A model whose `inputs` take the columns of the data, in order; whose `loss` is a scalar, the mean over the batch; and
    /// which `train_op` improves by one step. It should count the global step.
    pub fn new(inputs: &[Output<'g>], loss: Output<'g>, train_op: Operation<'g>) -> Model<'g> {
        Model {
            inputs: inputs.to_vec(),
            loss,
            train_op,
            metrics: Vec::new(),
            train_feeds: Vec::new(),
            evaluation: None,
        }
    }

    /// A further scalar to report, such as an accuracy; the mean over the batch.
    pub fn metric(mut self, name: &str, value: Output<'g>) -> Self {
        self.metrics.push((name.to_owned(), value));
        self
    }

    /// Evaluates with another loss and other metrics (as many as there are, in their order): those of a copy of the model
    /// that takes batches of any size, say.
    pub fn evaluate_with(mut self, loss: Output<'g>, metrics: &[Output<'g>]) -> Self {
        self.evaluation = Some(std::iter::once(loss).chain(metrics.iter().copied()).collect());
        self
    }

    /// Feeds this while training, and not while evaluating: a flag for dropout, say, that is false by default.
    pub fn while_training(mut self, output: Output<'g>, value: impl Into<Tensor>) -> Self {
        self.train_feeds.push((output, value.into()));
        self
    }

    /// Where the columns of a batch go.
    pub fn inputs(&self) -> &[Output<'g>] {
        &self.inputs
    }

    /// What is made small.
    pub fn loss(&self) -> Output<'g> {
        self.loss
    }

    /// One step.
    pub fn train_op(&self) -> Operation<'g> {
        self.train_op
    }

    /// Fed while training.
    pub fn train_feeds(&self) -> &[(Output<'g>, Tensor)] {
        &self.train_feeds
    }

    /// What else is watched, by name.
    pub(crate) fn metrics(&self) -> &[(String, Output<'g>)] {
        &self.metrics
    }

    /// The mean loss and metrics over `data` with the variables of `session`.
    pub fn evaluate(&self, session: &Arc<Session>, data: &Dataset) -> Result<Evaluation> {
        self.evaluation_of(self.sums(session, data)?)
    }

    /// The loss, the metrics and the number 1, each summed over the samples of `data`.
    pub(super) fn sums(&self, session: &Arc<Session>, data: &Dataset) -> Result<Vec<f64>> {
        let evaluate = session.make_callable(&self.inputs, &self.evaluated(), &[])?;
        let mut sums = vec![0.0f64; 2 + self.metrics.len()];
        for batch in data.batches()? {
            let batch = batch?;
            let values = self.run(&evaluate, &batch.tensors, &[])?;
            let values = values.iter().map(number).collect::<Result<Vec<f64>>>()?;
            sums.iter_mut()
                .zip(values.iter().chain([&1.0]))
                .for_each(|(sum, value)| *sum += value * batch.len() as f64);
        }
        Ok(sums)
    }

    pub(super) fn evaluation_of(&self, sums: Vec<f64>) -> Result<Evaluation> {
        let n_samples = sums.last().copied().unwrap_or(0.0);
        if n_samples == 0.0 {
            return Err(Error::invalid_argument("there is nothing to evaluate on: the data has no samples"));
        }
        let mean = |sum: &f64| sum / n_samples;
        let names = self.metrics.iter().map(|(name, _)| name.clone());
        let metrics = names.zip(sums[1..].iter().map(mean)).collect();
        Ok(Evaluation { loss: mean(&sums[0]), metrics, n_samples: n_samples as usize })
    }

    /// Loss and metrics as evaluation takes them.
    pub(super) fn evaluated(&self) -> Vec<Output<'g>> {
        let watched = || std::iter::once(self.loss).chain(self.metrics.iter().map(|(_, value)| *value)).collect();
        self.evaluation.clone().unwrap_or_else(watched)
    }

    pub(super) fn run(
        &self,
        callable: &Callable,
        tensors: &[Tensor],
        also: &[(Output<'g>, Tensor)],
    ) -> Result<Vec<Tensor>> {
        let wanted = self.inputs.len();
        if tensors.len() != wanted {
            return Err(Error::invalid_argument(format!(
                "the data has {} columns; the model has {wanted} inputs",
                tensors.len()
            )));
        }
        let feeds: SmallVec<[&Tensor; 4]> = tensors.iter().chain(also.iter().map(|(_, value)| value)).collect();
        callable.call(&feeds)
    }
}

/// What [`Trainer::evaluate`](super::Trainer::evaluate) found.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    /// The mean loss over all samples.
    pub loss: f64,
    /// The metrics by name, means over all samples.
    pub metrics: Vec<(String, f64)>,
    /// How many samples there were.
    pub n_samples: usize,
}
