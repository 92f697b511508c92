//! Local SGD and DiLoCo: ranks train by themselves, and now and then their weights become the mean of all. The pass acts in steps that
//! are a meeting ([`super::Steps`]); in the others there is nothing to exchange.
//!
//! With an outer optimizer, what the ranks have learnt since the last meeting is a gradient of the weights that they had then:
//!
//! ```text
//! g = anchor − mean(weights);  momentum = μ · momentum + g;  anchor = anchor − rate · (g + μ · momentum);  weights = anchor
//! ```

use std::fmt;
use std::str::FromStr;

use kolo_core::{DType, Error, Result};
use kolo_graph::{
    Effects, Endpoint, Graph, Initializer, NodeId, OwnedState, Rewriter, Training, TrainingNodes, Variable,
};

use super::bucket_sizes::BucketSizes;
use super::data_parallel::{ExchangePlace, Exchanged, exchange, written_from_data};
use super::exchange::{MEETING, check_is_step};
use super::nodes::NodeAdder;

/// The outer optimizer of [`DataParallel::outer_steps`](super::DataParallel::outer_steps): Nesterov momentum. Read from text as
/// `RATE` or `RATE:MOMENTUM`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OuterStep {
    /// How much of what the ranks have learnt is taken over.
    pub rate: f64,
    /// How slowly what was learnt before fades.
    pub momentum: f64,
}

impl Default for OuterStep {
    /// A rate of 0.7 and a momentum of 0.9, as in DiLoCo.
    fn default() -> OuterStep {
        OuterStep { rate: 0.7, momentum: 0.9 }
    }
}

impl fmt::Display for OuterStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.rate, self.momentum)
    }
}

impl FromStr for OuterStep {
    type Err = Error;

    fn from_str(text: &str) -> Result<OuterStep> {
        let (rate, momentum) = text.split_once(':').unwrap_or((text, "0.9"));
        let wrong = || {
            Error::invalid_argument(format!(
                "'{text}' is no outer step: give its rate, above 0, and its momentum, from 0 to below 1, such as 0.7:0.9"
            ))
        };
        let (rate, momentum) =
            (rate.parse::<f64>().map_err(|_| wrong())?, momentum.parse::<f64>().map_err(|_| wrong())?);
        let is_fine = rate > 0.0 && rate.is_finite() && (0.0..1.0).contains(&momentum);
        if is_fine { Ok(OuterStep { rate, momentum }) } else { Err(wrong()) }
    }
}

const ANCHOR: &str = "/outer/anchor";
const MOMENTUM: &str = "/outer/momentum";

/// Whether a variable of this name is what an outer optimizer keeps.
pub(crate) fn is_of_outer_step(name: &str) -> bool {
    name.ends_with(ANCHOR) || name.ends_with(MOMENTUM)
}

impl OuterStep {
    /// Adds what the outer optimizer keeps for a variable: the weights of the last meeting, which begin as the variable does, and
    /// momentum.
    pub(super) fn add_variables<'g>(self, graph: &'g Graph, variable: Variable<'g>) -> Vec<Variable<'g>> {
        let (name, dtype) = (variable.name(), variable.dtype());
        let shape = variable.shape().known().unwrap_or_else(kolo_core::Shape::scalar);
        let initial = Initializer::Output(variable.initializer().input(1).endpoint());
        let add = |name: String, initial: Initializer| {
            graph.absolute_scope("", || {
                let builder = graph.new_variable(&name, initial).shape(shape.clone()).dtype(dtype).not_trainable();
                graph.colocate_with(variable.handle().operation(), || builder.build())
            })
        };
        vec![add(format!("{name}{ANCHOR}"), initial), add(format!("{name}{MOMENTUM}"), Initializer::Zeros)]
    }
}

/// If the step is a meeting, makes the weights, the optimizer's slots and what else the step writes from data of one rank the mean of
/// all ranks, after everything else.
pub(super) fn average_weights(
    graph: &mut Rewriter<'_>,
    training: &Training,
    step: &TrainingNodes,
    (sizes, outer): (BucketSizes, Option<OuterStep>),
    place: ExchangePlace,
) -> Result<()> {
    let Some(meeting) = graph.find(MEETING) else { return check_is_step(graph, false) };
    let before = graph.node(meeting).map_or(Vec::new(), |node| node.control_inputs.to_vec());
    let trained: Vec<NodeId> =
        step.variables.iter().filter(|of| of.update.is_some()).filter_map(|of| of.handle).collect();
    let slots = step.variables.iter().filter(|of| of.update.is_some());
    let mut others: Vec<NodeId> = slots.flat_map(|of| of.slots.iter().map(|(_, slot)| *slot)).collect();
    for written in written_from_data(graph, training, step) {
        if !others.contains(&written.owner) && !trained.contains(&written.owner) {
            others.push(written.owner);
        }
    }
    let (mut exchanged, mut assigned) = (Vec::new(), Vec::new());
    for (is_trained, handle) in trained.iter().map(|id| (true, *id)).chain(others.iter().map(|id| (false, *id))) {
        let Some(dtype) = dtype_of(graph, handle)?.filter(|dtype| dtype.is_float()) else { continue };
        let mut add = NodeAdder::new(graph, "data_parallel/meet");
        let now = add.read(handle, dtype)?;
        before.iter().for_each(|id| add.graph.order_after(now.node, *id));
        let reader = match outer.filter(|_| is_trained) {
            None => {
                let assign = add.assign(handle, now)?;
                assigned.push(assign);
                (assign, 1)
            }
            Some(outer) => move_by(&mut add, handle, now, outer, &mut assigned)?,
        };
        let variable = add.graph.node(handle).map_or_else(|| "".into(), |node| node.name.clone());
        exchanged.push(Exchanged { value: now, readers: vec![reader], variable });
    }
    assigned.into_iter().for_each(|assign| graph.order_after(meeting, assign));
    exchange(graph, "weights", exchanged, sizes, place)
}

/// Moves a variable by the outer optimizer. Returns the input that reads the mean of its values, which is to replace `now`.
fn move_by(
    add: &mut NodeAdder<'_, '_>,
    handle: NodeId,
    now: Endpoint,
    outer: OuterStep,
    assigned: &mut Vec<NodeId>,
) -> Result<(NodeId, usize)> {
    let (name, dtype) = (add.graph.node(handle).map_or_else(|| "".into(), |node| node.name.clone()), add.dtype(now));
    let anchor = add.own_variable(&format!("{name}{ANCHOR}"))?;
    let momentum = add.own_variable(&format!("{name}{MOMENTUM}"))?;
    let (old, before) = (add.read(anchor, dtype)?, add.read(momentum, dtype)?);
    let learnt = add.op("Sub", &[old, now])?;
    let fading = add.number(outer.momentum, dtype)?;
    let rate = add.number(outer.rate, dtype)?;
    let faded = add.op("Mul", &[before, fading])?;
    let momentum_now = add.op("Add", &[faded, learnt])?;
    let ahead = add.op("Mul", &[momentum_now, fading])?;
    let ahead = add.op("Add", &[learnt, ahead])?;
    let by = add.op("Mul", &[ahead, rate])?;
    let new = add.op("Sub", &[old, by])?;
    for (variable, value) in [(momentum, momentum_now), (anchor, new), (handle, new)] {
        assigned.push(add.assign(variable, value)?);
    }
    Ok((learnt.node, 1))
}

/// The dtype of a variable that is known by a handle.
fn dtype_of(graph: &Rewriter<'_>, handle: NodeId) -> Result<Option<DType>> {
    let Some(node) = graph.node(handle) else { return Ok(None) };
    let is_handle = node.outputs.first().is_some_and(|output| output.dtype == DType::Resource);
    if node.def.effects != Effects::Owns(OwnedState::Variable) || !is_handle {
        return Err(Error::unimplemented(format!(
            "local steps: ranks cannot average {} '{}'; make it a resource variable",
            node.op(),
            node.name
        )));
    }
    node.attrs.dtype("dtype").map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outer_steps_are_read_and_written() {
        assert_eq!("0.7:0.9".parse::<OuterStep>().ok(), Some(OuterStep::default()));
        assert_eq!("1".parse::<OuterStep>().ok().map(|outer| outer.to_string()).as_deref(), Some("1:0.9"));
        for text in ["", "0", "0.7:1", "-1:0.9", "0.7:x", "inf"] {
            assert!(
                text.parse::<OuterStep>().is_err_and(|error| error.message().contains("such as 0.7:0.9")),
                "{text}"
            );
        }
    }
}
