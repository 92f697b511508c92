//! Data parallelism within one graph: the same model on several devices, each with its share of the batch.

use std::collections::HashMap;

use kolo_core::{DeviceSpec, Error, Result};
use kolo_graph::{Grad, Graph, IndexedSlices, Operation, Output, Variable, gradients, is_variable};
use kolo_ops::array::{concat::concat, split::split};

use crate::nn::update_ops;
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
/// A device may be named several times: it computes its shares one after the other, with the memory of one. Sums are made in a
/// fixed tree over the shares, so a batch that is cut into the same shares gives the same bits on one device, on several, and
/// on several ranks ([`DataParallel`](super::DataParallel)), as long as each has a power of two of them.
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
    let shares: Vec<Vec<Output<'g>>> =
        graph.device(variables_on, || inputs.iter().map(|input| split(*input, n, 0)).collect());
    let share = |i: usize| shares.iter().map(|parts| parts[i]).collect::<Vec<Output<'g>>>();
    let (mut per_tower, mut variables) = (Vec::new(), Vec::new());
    let mut n_updates = update_ops(graph).len();
    let all = replicate(
        graph,
        devices,
        Some(variables_on),
        |i| build(&share(i)),
        |i, tower: &Tower<'g>| {
            variables = graph.trainable_variables();
            let gradients = gradients_on(graph, devices[i], tower.loss, &variables)?;
            let made = gradients.iter().flatten().map(|gradient| match gradient {
                Grad::Dense(gradient) => gradient.operation(),
                Grad::Slices(slices) => slices.values.operation(),
            });
            // What layers keep moves on from one share to the next.
            let updates = update_ops(graph).split_off(n_updates);
            n_updates += updates.len();
            let made = made.chain(updates).collect();
            per_tower.push(gradients);
            Ok(made)
        },
    )?;
    graph.device(variables_on, || {
        let gradients = average_gradients(&variables, &per_tower)?;
        let mean = |pick: &dyn Fn(&Tower<'g>) -> Output<'g>| -> Output<'g> {
            let values: Vec<Output<'g>> = all.iter().map(pick).collect();
            sum(&values) / n as f32
        };
        let loss = mean(&|tower| tower.loss);
        let n_metrics = all.iter().map(|tower| tower.metrics.len()).min().unwrap_or(0);
        let metrics = (0..n_metrics).map(|i| mean(&|tower| tower.metrics[i])).collect();
        graph.check()?;
        Ok(Towers { loss, metrics, gradients })
    })
}

/// Describes one copy of a model for each device, and shares variables among the copies: the first copy makes them on `variables_on`, or
/// where the scopes around this one say. `after` adds what belongs to a copy, and returns what the next one on the same device waits
/// for, so that a device that is named several times needs the memory of one copy.
pub(crate) fn replicate<'g, T>(
    graph: &'g Graph,
    devices: &[&str],
    variables_on: Option<&str>,
    mut build: impl FnMut(usize) -> Result<T>,
    mut after: impl FnMut(usize, &T) -> Result<Vec<Operation<'g>>>,
) -> Result<Vec<T>> {
    let home = variables_on.map(DeviceSpec::parse).transpose()?.unwrap_or_default();
    // After it, a device has done with its last copy.
    let mut done: HashMap<&str, Operation<'g>> = HashMap::new();
    let mut copies = Vec::with_capacity(devices.len());
    for (i, &name) in devices.iter().enumerate() {
        let device = DeviceSpec::parse(name)?;
        let home = home.clone();
        let choose = move |node: &kolo_graph::Node| if is_variable(node) { home.clone() } else { device.clone() };
        let before: Vec<Operation<'g>> = done.get(name).copied().into_iter().collect();
        let copy = graph.control_dependencies(&before, || {
            graph.share_variables(&format!("tower_{i}"), || graph.device_fn(choose, || build(i)))
        })?;
        let last = after(i, &copy)?;
        if devices[i + 1..].contains(&name) {
            done.insert(name, graph.device(name, || graph.group(&format!("tower_{i}_done"), &last)));
        }
        copies.push(copy);
    }
    Ok(copies)
}

/// The gradients of a copy's loss, computed on its device.
pub(crate) fn gradients_on<'g>(
    graph: &'g Graph,
    device: &str,
    loss: Output<'g>,
    variables: &[Variable<'g>],
) -> Result<Vec<Option<Grad<'g>>>> {
    let handles: Vec<Output<'g>> = variables.iter().map(|variable| variable.handle()).collect();
    graph.device(device, || gradients(&[loss], &handles))
}

/// Averages the gradients of several towers, variable by variable. A tower without a gradient counts as zero; a variable
/// without any gradient has none. Sparse gradients stay sparse.
pub fn average_gradients<'g>(
    variables: &[Variable<'g>],
    towers: &[Vec<Option<Grad<'g>>>],
) -> Result<Vec<GradAndVar<'g>>> {
    let n = towers.len();
    variables
        .iter()
        .enumerate()
        .map(|(i, variable)| {
            let grads: Vec<Grad<'g>> = towers.iter().filter_map(|tower| tower.get(i).copied().flatten()).collect();
            Ok(GradAndVar { grad: average(&grads, n)?, variable: *variable })
        })
        .collect()
}

fn average<'g>(grads: &[Grad<'g>], n: usize) -> Result<Option<Grad<'g>>> {
    if grads.is_empty() {
        return Ok(None);
    }
    let n = n.max(1) as f32;
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
        let joined = IndexedSlices { values: concat(&values, 0) / n, indices: concat(&indices, 0), dense_shape };
        return Ok(Some(Grad::Slices(joined)));
    }
    let dense: Vec<Output<'g>> = grads.iter().map(|grad| grad.dense()).collect::<Result<_>>()?;
    Ok(Some(Grad::Dense(sum(&dense) / n)))
}

/// The sum in the tree in which ranks sum, `((0 + 1) + (2 + 3)) + …`, so that it does not matter who sums which part of it.
/// There is at least one value.
pub(crate) fn sum<'g>(values: &[Output<'g>]) -> Output<'g> {
    match values {
        [one] => *one,
        [a, b] => *a + *b,
        many => {
            let (left, right) = many.split_at(many.len().next_power_of_two() / 2);
            sum(left) + sum(right)
        }
    }
}
