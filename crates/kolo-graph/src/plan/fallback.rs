//! What soft placement costs: how many nodes are not where they asked to be, what that makes move, and how long it takes.
//!
//! The placement is compared with the one that was asked for, in which every node that fell back, and every node that had
//! to be with it, is on the device it missed. The difference of what moves between devices, and of the times of nodes that
//! were measured on both types of device, is the price.

use std::collections::BTreeMap;
use std::fmt;

use kolo_core::{DType, DeviceName, DeviceSpec};

use crate::plan::cost::output_bytes;
use crate::{CostModel, DeviceInfo, Endpoint, NodeId, Nodes, Placed};

/// What nodes that are not where they were pinned cost in a step that runs all of them.
///
/// `{}` prints `12 ops fell back, +3.1 ms a step: 38000000 bytes more move between devices (link speeds are assumed)`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FallbackCost {
    /// How many nodes are not where they were pinned.
    pub n_nodes: usize,
    /// How many bytes more move between devices; fewer if negative.
    pub n_bytes: i64,
    /// How many values move whose size is not known; they are not in `n_bytes`.
    pub n_unknown: usize,
    /// How much longer a step takes, in seconds.
    pub seconds: f64,
    /// Whether the speeds of all links that count were measured.
    pub links_measured: bool,
    /// Of how many nodes the time was measured both where they are and where they asked to be.
    pub n_measured: usize,
}

/// Prices the nodes of a placement that fell back; `placed` says where a node is.
pub fn price_fallbacks<'p>(
    nodes: &Nodes,
    devices: &[DeviceInfo],
    placed: &dyn Fn(NodeId) -> Option<&'p Placed>,
    costs: &CostModel,
) -> FallbackCost {
    let mut cost = FallbackCost { links_measured: true, ..FallbackCost::default() };
    let mut fact = BTreeMap::new();
    let mut wish = BTreeMap::new();
    for (id, node) in nodes.iter() {
        let Some(at) = placed(id) else { continue };
        let here = &devices[at.device].name;
        let there = at.missed.as_ref().map(|spec| missed_device(spec, here, devices));
        cost.n_nodes += usize::from(at.rule.is_fallback());
        if let Some(there) = &there
            && let (Some(now), Some(then)) = (costs.seconds(node, here), costs.seconds(node, there))
        {
            cost.n_measured += 1;
            cost.seconds += now - then;
        }
        fact.insert(id, here.clone());
        wish.insert(id, there.unwrap_or_else(|| here.clone()));
    }
    if cost.n_nodes == 0 {
        return FallbackCost::default();
    }
    for (places, sign) in [(&fact, 1), (&wish, -1)] {
        for (at, to) in moves(nodes, places) {
            let from = &places[&at.node];
            let n_bytes = output_bytes(nodes.output(at));
            match n_bytes.and_then(|n| i64::try_from(n).ok()) {
                Some(n) => cost.n_bytes = cost.n_bytes.saturating_add(sign * n),
                None => cost.n_unknown += usize::from(sign == 1),
            }
            cost.seconds += sign as f64 * costs.transfer_seconds(from, &to, n_bytes.or(Some(0)));
            cost.links_measured &= costs.link(from, &to).1;
        }
    }
    cost
}

/// The values that move, each once for every device it goes to. References and handles stay where they are.
fn moves(nodes: &Nodes, places: &BTreeMap<NodeId, DeviceName>) -> Vec<(Endpoint, DeviceName)> {
    let mut moves = Vec::new();
    for (&id, to) in places {
        for &at in &nodes.node(id).inputs {
            let moves_there = places.get(&at.node).is_some_and(|from| from != to);
            if moves_there && nodes.output(at).dtype != DType::Resource {
                moves.push((at, to.clone()));
            }
        }
    }
    moves.sort();
    moves.dedup();
    moves
}

/// The device that was asked for: one that exists and lacks a kernel, or what the missing one would be called.
fn missed_device(spec: &DeviceSpec, here: &DeviceName, devices: &[DeviceInfo]) -> DeviceName {
    if let Some(found) = devices.iter().find(|device| spec.matches(&device.name)) {
        return found.name.clone();
    }
    DeviceName {
        job: spec.job.clone().unwrap_or_else(|| here.job.clone()),
        replica: spec.replica.unwrap_or(here.replica),
        task: spec.task.unwrap_or(here.task),
        kind: spec.kind.clone().unwrap_or_else(|| here.kind.clone()),
        id: spec.id.unwrap_or(0),
    }
}

impl fmt::Display for FallbackCost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ops = if self.n_nodes == 1 { "op" } else { "ops" };
        write!(f, "{} {ops} fell back, {} a step: ", self.n_nodes, signed_time(self.seconds))?;
        let direction = if self.n_bytes < 0 { "fewer" } else { "more" };
        write!(f, "{} bytes {direction} move between devices", self.n_bytes.unsigned_abs())?;
        if self.n_unknown > 0 {
            write!(f, ", and {} values of unknown size move", self.n_unknown)?;
        }
        let links = if self.links_measured { "measured" } else { "assumed" };
        write!(f, " (link speeds are {links}; op times of {} were measured on both devices)", self.n_measured)
    }
}

/// `+3.1 ms`, with a unit that leaves one to three digits before the point.
fn signed_time(seconds: f64) -> String {
    let (scale, unit) = match seconds.abs() {
        s if s >= 1.0 => (1.0, "s"),
        s if s >= 1e-3 => (1e3, "ms"),
        _ => (1e6, "µs"),
    };
    format!("{:+.1} {unit}", seconds * scale)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::testing::{Kernels, devices, graph};
    use crate::{Link, PlaceOptions, Placement, place};

    /// `a` and `b` on the GPU, and between them `neg`, which asks for the GPU and has no kernel there.
    fn price(costs: &CostModel) -> FallbackCost {
        let g = graph();
        g.device("/gpu:0", || {
            let a = g.op("Source").name("a").out();
            let neg = g.op("Neg").name("neg").input(a).out();
            g.op("Add").name("b").input(neg).input(a).build();
        });
        let nodes = g.snapshot();
        let devices = devices("/cpu:0 /gpu:0");
        let needed: Vec<NodeId> = nodes.iter().map(|(id, _)| id).collect();
        let options = PlaceOptions { placement: Placement::Soft, ..PlaceOptions::default() };
        let placed = place(&nodes, &needed, &devices, &Kernels, &HashMap::new(), &options).unwrap();
        price_fallbacks(&nodes, &devices, &|id| placed.placed(id), costs)
    }

    #[test]
    fn a_fall_back_makes_values_move_both_ways() {
        let mut costs = CostModel::default();
        let link = Link { bytes_per_second: 24e3, latency: 0.5e-3 };
        costs.set_link("CPU", "GPU", link);
        let cost = price(&costs);
        // Six floats to the CPU over an assumed link, and back over a measured one: 24 bytes are a millisecond there.
        assert_eq!((cost.n_nodes, cost.n_bytes, cost.n_unknown, cost.links_measured), (1, 48, 0, false));
        assert!((cost.seconds - (1.5e-3 + 10e-6 + 24.0 / 12e9)).abs() < 1e-12, "{cost:?}");
        costs.set_link("GPU", "CPU", link);
        costs.record("neg", "Neg", "CPU", 0.2e-3);
        costs.record("neg", "Neg", "GPU", 0.1e-3);
        let cost = price(&costs);
        assert!((cost.seconds - 3.1e-3).abs() < 1e-12, "{cost:?}");
        assert_eq!(
            cost.to_string(),
            "1 op fell back, +3.1 ms a step: 48 bytes more move between devices (link speeds are measured; op times of 1 \
             were measured on both devices)"
        );
    }

    #[test]
    fn times_read_well() {
        let times = [3.1e-3, 12e-6, -0.5e-6, 2.0, 0.0].map(signed_time);
        assert_eq!(times, ["+3.1 ms", "+12.0 µs", "-0.5 µs", "+2.0 s", "+0.0 µs"]);
    }
}
