//! Data parallelism within one graph: the same model on several devices, each with its share of the batch.

use kolo_core::{DeviceSpec, Error, Result};
use kolo_graph::{Grad, Graph, IndexedSlices, Output, Variable, gradients, is_variable};
use kolo_ops::array::{concat::concat, split::split};
use kolo_ops::math::add_n::add_n;

use crate::optim::GradAndVar;

/// What one tower computes.
pub struct Tower<'g> {
    /// The mean loss over its share of the batch.
    pub loss: Output<'g>,
    /// Further scalars, means over its share.
    pub metrics: Vec<Output<'g>>,
}

/// All towers together.
pub struct Towers<'g> {
    /// The mean loss over the batch.
    pub loss: Output<'g>,
    /// The metrics, means over the batch.
    pub metrics: Vec<Output<'g>>,
    /// The averaged gradients, for `apply_gradients`.
    pub gradients: Vec<GradAndVar<'g>>,
}

/// Builds the model once per device, each on its equal share of `inputs` (cut along the first dimension, which the number of
/// devices must divide), and averages losses and gradients. Variables are made once, on `variables_on`, and shared.
///
/// ```
/// use kolo::optim::{Optimizer, Sgd};
/// use kolo::parallel::{Tower, towers};
/// use kolo::{nn, ops};
///
/// let g = kolo::graph();
/// let x = g.placeholder::<f32>("x", [None, Some(2)]);
/// let y = g.placeholder::<f32>("y", [None, Some(1)]);
/// let model = towers(&g, &["/cpu:0", "/cpu:1"], "/cpu:0", &[x, y], |inputs| {
///     let error = nn::dense(inputs[0], 1, "line") - inputs[1];
///     Ok(Tower { loss: ops::mean_all(ops::square(error)), metrics: vec![] })
/// })?;
/// let update = Sgd::new(0.1).apply_gradients(&model.gradients, None)?;
/// assert_eq!(g.trainable_variables().len(), 2); // one kernel, one bias
/// # let _ = update;
/// # Ok::<(), kolo::Error>(())
/// ```
pub fn towers<'g>(
    graph: &'g Graph,
    devices: &[&str],
    variables_on: &str,
    inputs: &[Output<'g>],
    build: impl Fn(&[Output<'g>]) -> Result<Tower<'g>>,
) -> Result<Towers<'g>> {
    let n = devices.len();
    if n == 0 {
        return Err(Error::invalid_argument("towers need at least one device"));
    }
    let home = DeviceSpec::parse(variables_on)?;
    let shares: Vec<Vec<Output<'g>>> =
        graph.device(variables_on, || inputs.iter().map(|input| split(*input, n, 0)).collect());
    let mut all = Vec::new();
    for (i, device) in devices.iter().enumerate() {
        let device = DeviceSpec::parse(device)?;
        let home = home.clone();
        let share: Vec<Output<'g>> = shares.iter().map(|parts| parts[i]).collect();
        let choose = move |node: &kolo_graph::Node| if is_variable(node) { home.clone() } else { device.clone() };
        let tower = graph.share_variables(&format!("tower_{i}"), || graph.device_fn(choose, || build(&share)))?;
        all.push(tower);
    }
    let variables = graph.trainable_variables();
    let handles: Vec<Output<'g>> = variables.iter().map(|variable| variable.handle()).collect();
    let mut per_tower = Vec::new();
    for (tower, device) in all.iter().zip(devices) {
        per_tower.push(graph.device(device, || gradients(&[tower.loss], &handles))?);
    }
    graph.device(variables_on, || {
        let gradients = average_gradients(&variables, &per_tower)?;
        let mean = |pick: &dyn Fn(&Tower<'g>) -> Output<'g>| -> Result<Output<'g>> {
            let values: Vec<Output<'g>> = all.iter().map(pick).collect();
            Ok(add_n(&values)? / n as f32)
        };
        let loss = mean(&|tower| tower.loss)?;
        let n_metrics = all.iter().map(|tower| tower.metrics.len()).min().unwrap_or(0);
        let metrics = (0..n_metrics).map(|i| mean(&|tower| tower.metrics[i])).collect::<Result<_>>()?;
        graph.check()?;
        Ok(Towers { loss, metrics, gradients })
    })
}

/// Averages the gradients of several towers, variable by variable. A tower without a gradient counts as zero; a variable
/// without any gradient has none. Sparse gradients stay sparse.
pub fn average_gradients<'g>(
    variables: &[Variable<'g>],
    towers: &[Vec<Option<Grad<'g>>>],
) -> Result<Vec<GradAndVar<'g>>> {
    let share = 1.0 / towers.len().max(1) as f32;
    variables
        .iter()
        .enumerate()
        .map(|(i, variable)| {
            let grads: Vec<Grad<'g>> = towers.iter().filter_map(|tower| tower.get(i).copied().flatten()).collect();
            Ok(GradAndVar { grad: average(&grads, share)?, variable: *variable })
        })
        .collect()
}

fn average<'g>(grads: &[Grad<'g>], share: f32) -> Result<Option<Grad<'g>>> {
    if grads.is_empty() {
        return Ok(None);
    }
    let sparse: Option<Vec<IndexedSlices<'g>>> = grads
        .iter()
        .map(|grad| match grad {
            Grad::Slices(slices) => Some(*slices),
            Grad::Dense(_) => None,
        })
        .collect();
    if let Some(slices) = sparse {
        let values: Vec<Output<'g>> = slices.iter().map(|slices| slices.values).collect();
        let indices: Vec<Output<'g>> = slices.iter().map(|slices| slices.indices).collect();
        let dense_shape = slices[0].dense_shape;
        let joined = IndexedSlices { values: concat(&values, 0) * share, indices: concat(&indices, 0), dense_shape };
        return Ok(Some(Grad::Slices(joined)));
    }
    let dense: Vec<Output<'g>> = grads.iter().map(|grad| grad.dense()).collect::<Result<_>>()?;
    Ok(Some(Grad::Dense(add_n(&dense)? * share)))
}
