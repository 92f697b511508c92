//! 1-bit Adam: after the warm-up, ranks exchange the signs of their momenta instead of gradients, and the variance stays.
//!
//! ```text
//! bound = (1 − β₁) / √(1 − β₂);  u = clip((β₁ m + (1 − β₁) g) / (√v + ε), ±bound) + unsent
//! exchanged: signs of u and its mean magnitude;  unsent = u − that
//! û = mean of all ranks;  m = û (√v + ε);  w = w − rate · √(1 − β₂ᵗ) / (1 − β₁ˢ) · û      s: this step, t: the last one of the warm-up
//! ```
//!
//! The paper exchanges m itself. One mean magnitude for a tensor then moves weights with a small variance by far too much: an input that
//! is nearly always zero has weights with a √v of nearly zero. In units of √v, all weights are alike. `bound` is the most that Adam's own
//! m / √v can be.

use kolo_core::{Error, Result};
use kolo_graph::{AttrValue, Attrs, Endpoint, NodeId, Rewriter, TrainedVariable, VariableNodes};

use super::data_parallel::{Bucket, Exchanged};
use super::exchange::unsent;
use super::nodes::NodeAdder;
use super::top_k::with_feedback;

const ADAM: &str = "ResourceApplyAdam";
const ADAM_W: &str = "ResourceApplyKoloAdamW";

/// An error unless a variable is updated by Adam from its gradient itself.
pub(super) fn check(trained: &TrainedVariable) -> Result<()> {
    match &trained.reads.values()[..] {
        [read] if [ADAM, ADAM_W].contains(&read.op) => Ok(()),
        reads => {
            let by = reads.first().map_or("something else", |read| read.op);
            Err(Error::invalid_argument(format!(
                "1-bit Adam is for the optimizers Adam and AdamW: variable '{}' is updated by {by}; choose one of them, or another way to \
                 exchange gradients",
                trained.name
            )))
        }
    }
}

/// What an update reads.
struct Adam {
    update: NodeId,
    variable: Endpoint,
    m: Endpoint,
    beta1_power: Endpoint,
    rate: Endpoint,
    beta1: Endpoint,
    beta2: Endpoint,
    decay: Option<Endpoint>,
    /// √v + ε.
    unit: Endpoint,
}

impl Adam {
    fn of(add: &mut NodeAdder<'_, '_>, exchanged: &Exchanged, variables: &[VariableNodes]) -> Result<Adam> {
        let variable = variables.iter().find(|variable| variable.name == exchanged.variable);
        let reads = variable.map_or(&[][..], |variable| variable.reads.values().as_slice());
        let [(update, _)] = exchanged.readers[..] else { return Err(between(exchanged)) };
        let node =
            add.graph.node(update).filter(|_| reads == exchanged.readers).ok_or_else(|| between(exchanged))?.clone();
        let (first, decay) = match &node.inputs[..] {
            [first @ .., _] if node.op() == ADAM => (first, None),
            [first @ .., decay, _] if node.op() == ADAM_W => (first, Some(*decay)),
            _ => return Err(between(exchanged)),
        };
        let &[variable, m, v, beta1_power, _, rate, beta1, beta2, epsilon] = first else {
            return Err(between(exchanged));
        };
        let dtype = add.dtype(exchanged.value);
        let now = add.read(v.node, dtype)?;
        let root = add.op("Sqrt", &[now])?;
        let unit = add.op("Add", &[root, epsilon])?;
        Ok(Adam { update, variable, m, beta1_power, rate, beta1, beta2, decay, unit })
    }

    /// This rank's momentum, in units of the variance.
    fn momentum(&self, add: &mut NodeAdder<'_, '_>, gradient: Endpoint) -> Result<Endpoint> {
        let dtype = add.dtype(gradient);
        let one = add.number(1.0, dtype)?;
        let old = add.read(self.m.node, dtype)?;
        let kept = add.op("Mul", &[old, self.beta1])?;
        let part = add.op("Sub", &[one, self.beta1])?;
        let new = add.op("Mul", &[gradient, part])?;
        let sum = add.op("Add", &[kept, new])?;
        let scaled = add.op("RealDiv", &[sum, self.unit])?;
        let rest = add.op("Sub", &[one, self.beta2])?;
        let rest = add.op("Sqrt", &[rest])?;
        let bound = add.op("RealDiv", &[part, rest])?;
        let below = add.op("Neg", &[bound])?;
        add.op("ClipByValue", &[scaled, below, bound])
    }

    /// Puts an update by the momentum of all ranks in the place of Adam's.
    fn update(&self, add: &mut NodeAdder<'_, '_>, momentum: Endpoint, warm_up: u64) -> Result<()> {
        let dtype = add.dtype(momentum);
        let m = add.op("Mul", &[momentum, self.unit])?;
        let mut done = vec![add.assign(self.m.node, m)?];
        let one = add.number(1.0, dtype)?;
        let n = add.number(warm_up as f64, dtype)?;
        let power = add.op("Pow", &[self.beta2, n])?;
        let second = add.op("Sub", &[one, power])?;
        let second = add.op("Sqrt", &[second])?;
        let first = add.op("Sub", &[one, self.beta1_power])?;
        let rate = add.op("Mul", &[self.rate, second])?;
        let rate = add.op("RealDiv", &[rate, first])?;
        let mut by = add.op("Mul", &[momentum, rate])?;
        if let Some(decay) = self.decay {
            let weights = add.read(self.variable.node, dtype)?;
            let part = add.op("Mul", &[self.rate, decay])?;
            let part = add.op("Mul", &[weights, part])?;
            by = add.op("Add", &[by, part])?;
        }
        let mut attrs = Attrs::default();
        attrs.set("dtype", AttrValue::Type(dtype));
        done.push(add.node("AssignSubVariableOp", &[self.variable, by], attrs)?);
        let own = add.graph.node(self.update).map_or_else(Vec::new, |node| node.control_inputs.to_vec());
        let updated = add.node("NoOp", &[], Attrs::default())?;
        for id in own.into_iter().chain(done) {
            add.graph.order_after(updated, id);
        }
        add.graph.merge(self.update, updated);
        Ok(())
    }
}

fn between(exchanged: &Exchanged) -> Error {
    Error::unimplemented(format!(
        "1-bit Adam exchanges momenta, so the gradient of '{}' has to come to its update as backward makes it; leave out clipping and \
         accumulation, or exchange gradients in another way",
        exchanged.variable
    ))
}

/// Exchanges the momenta of a bucket's variables instead of their gradients. `done` is the step, which waits for what is kept.
pub(super) fn exchange(
    graph: &mut Rewriter<'_>,
    bucket: &Bucket,
    variables: &[VariableNodes],
    warm_up: u64,
    done: Option<NodeId>,
) -> Result<()> {
    let mut add = NodeAdder::new(graph, "data_parallel/one_bit_adam");
    let (mut all, mut momenta) = (Vec::new(), Vec::new());
    for exchanged in &bucket.values {
        let adam = Adam::of(&mut add, exchanged, variables)?;
        momenta.push(adam.momentum(&mut add, exchanged.value)?);
        all.push(adam);
    }
    let names: Vec<String> = bucket.values.iter().map(|exchanged| unsent(&exchanged.variable)).collect();
    let ops = ["KoloPackSigns", "KoloUnpackSigns"];
    let means = with_feedback(graph, ops, &Attrs::default(), &momenta, (&names, bucket.dtype), done)?;
    let mut add = NodeAdder::new(graph, "data_parallel/one_bit_adam");
    all.iter().zip(means).try_for_each(|(adam, mean)| adam.update(&mut add, mean, warm_up))
}
