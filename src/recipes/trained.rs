//! From a description of a model to something a [`Trainer`](crate::train::Trainer) can train, on one device or on many.

use kolo_core::{Error, Result};
use kolo_graph::{Graph, Output};

use crate::optim::Optimizer;
use crate::parallel::{Tower, towers};
use crate::strategy::with_updates;
use crate::train::{Model, global_step_or_create};

/// Where a model computes.
#[derive(Clone, Debug, Default)]
pub struct Placement {
    /// The one device, or wherever the placer puts it.
    pub device: Option<String>,
    /// The device of each share of a batch, each with a copy of the model; empty if batches are not cut. A device may have several
    /// shares.
    pub towers: Vec<String>,
    /// Where variables are if batches are cut: if absent, on the one device of all shares, or else on the first CPU.
    pub variables_on: Option<String>,
}

/// What a recipe adds to a graph: a loss, and named metrics, all means over the batch.
pub struct Parts<'g> {
    /// What to make small.
    pub loss: Output<'g>,
    /// What else to report.
    pub metrics: Vec<(&'static str, Output<'g>)>,
}

/// Adds the model, its gradients and its updates. With towers on several devices, variables live on the first CPU, and evaluation
/// uses a copy of its own, so that it takes batches of any size.
pub fn train_model<'g>(
    graph: &'g Graph,
    placement: &Placement,
    optimizer: &dyn Optimizer,
    inputs: &[Output<'g>],
    build: impl Fn(&[Output<'g>]) -> Result<Parts<'g>>,
) -> Result<Model<'g>> {
    let step = global_step_or_create(graph)?;
    if placement.towers.is_empty() {
        let device = placement.device.as_deref().unwrap_or("");
        return graph.device(device, || {
            let parts = build(inputs)?;
            let train_op = with_updates(graph, optimizer.minimize(parts.loss, Some(step))?);
            let model = Model::new(inputs, parts.loss, train_op);
            Ok(parts.metrics.into_iter().fold(model, |model, (name, value)| model.metric(name, value)))
        });
    }
    let devices: Vec<&str> = placement.towers.iter().map(String::as_str).collect();
    let is_one_device = devices.iter().all(|device| device == &devices[0]);
    let usual = if is_one_device { devices[0] } else { "/cpu:0" };
    let variables_on = placement.variables_on.as_deref().unwrap_or(usual);
    let trained = towers(graph, &devices, variables_on, inputs, |share| {
        let parts = build(share)?;
        Ok(Tower { loss: parts.loss, metrics: parts.metrics.into_iter().map(|(_, value)| value).collect() })
    })?;
    let train_op = with_updates(graph, optimizer.apply_gradients(&trained.gradients, Some(step))?);
    let evaluate_on = if is_one_device { devices[0] } else { "" };
    let whole = graph.device(evaluate_on, || graph.share_variables("evaluation", || build(inputs)))?;
    let mut model = Model::new(inputs, trained.loss, train_op);
    if whole.metrics.len() != trained.metrics.len() {
        return Err(Error::internal("copies of one model differ in their metrics"));
    }
    let values: Vec<Output<'g>> = whole.metrics.iter().map(|(_, value)| *value).collect();
    for ((name, _), value) in whole.metrics.iter().zip(&trained.metrics) {
        model = model.metric(name, *value);
    }
    Ok(model.evaluate_with(whole.loss, &values))
}
