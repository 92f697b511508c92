//! The cost policy: nodes in graph order, each on the device where it ends first.
//!
//! A device runs one node at a time, in that order; a value that changes device arrives later by what its link takes. This
//! is the greedy half of list scheduling: it balances independent chains, and keeps a chain whose values are dear to move
//! together.

use kolo_core::DeviceSpec;

use super::{Members, Placer, Policy};
use crate::NodeId;
use crate::plan::cost::output_bytes;

impl Placer<'_, '_> {
    /// Whether a pin, an earlier run or a node that it must be with says where a node goes.
    pub(super) fn has_a_place(&self, id: NodeId) -> bool {
        let root = self.sets.root(id);
        let Members { needed, others } = &self.members[&root];
        needed.len() + others.len() != 1 || !self.sets.wish(root).spec.is_empty() || self.earlier.contains_key(&id)
    }

    /// The device on which a node that is alone and asks for nothing ends first; `None` if no time is known for it.
    pub(super) fn first_to_finish(&self, id: NodeId) -> Option<usize> {
        if self.has_a_place(id) {
            return None;
        }
        let root = self.sets.root(id);
        let mut best: Option<(f64, usize)> = None;
        for device in self.candidates(root, &DeviceSpec::default()) {
            let Some(finish) = self.finish_on(id, device) else { continue };
            // Of equals the first counts, so that the same times give the same answer.
            if best.is_none_or(|(least, _)| finish < least) {
                best = Some((finish, device));
            }
        }
        best.map(|(_, device)| device)
    }

    /// When a node would end on a device, if its time there is known.
    fn finish_on(&self, id: NodeId, device: usize) -> Option<f64> {
        let seconds = self.options.costs.seconds(self.nodes.node(id), &self.devices[device].name)?;
        Some(self.free[device].max(self.inputs_there(id, device)) + seconds)
    }

    /// When all inputs of a node are on a device. What comes round a loop is not waited for.
    fn inputs_there(&self, id: NodeId, device: usize) -> f64 {
        let node = self.nodes.node(id);
        let data = node.inputs.iter().map(|at| (at.node, output_bytes(self.nodes.output(*at))));
        let control = node.control_inputs.iter().map(|&from| (from, Some(0)));
        let arrivals = data.chain(control).filter_map(|(from, n_bytes)| {
            let (from_name, to_name) = (&self.devices[self.device(from)?].name, &self.devices[device].name);
            Some(self.finish[from.index()] + self.options.costs.transfer_seconds(from_name, to_name, n_bytes))
        });
        arrivals.fold(0.0, f64::max)
    }

    /// Keeps the time at which a node that was just placed ends.
    pub(super) fn note_time(&mut self, id: NodeId) {
        if self.options.policy != Policy::Cost {
            return;
        }
        let Some(device) = self.device(id) else { return };
        let start = self.inputs_there(id, device);
        self.finish[id.index()] = self.finish_on(id, device).unwrap_or(start);
        if let Some(finish) = self.finish_on(id, device) {
            self.free[device] = finish;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::sync::Arc;

    use crate::testing::{Kernels, devices, graph};
    use crate::{CostModel, Graph, Link, NodeId, PlaceOptions, Policy, Rule, place};

    /// Where each node goes, as `name=CPU:0`, with these costs.
    fn placed(g: &Graph, on: &str, costs: &CostModel) -> Vec<(String, String, Rule)> {
        let nodes = g.snapshot();
        let needed: Vec<NodeId> = nodes.iter().map(|(id, _)| id).collect();
        let options = PlaceOptions { policy: Policy::Cost, costs: Arc::new(costs.clone()), ..PlaceOptions::default() };
        let placed = place(&nodes, &needed, &devices(on), &Kernels, &HashMap::new(), &options).unwrap();
        let row = |(id, node): (NodeId, &Arc<crate::Node>)| {
            let name = &placed.device_of(id).unwrap().name;
            (node.name.to_string(), format!("{}:{}", name.kind, name.id), placed.placed(id).unwrap().rule)
        };
        nodes.iter().map(row).collect()
    }

    fn device<'a>(rows: &'a [(String, String, Rule)], name: &str) -> (&'a str, Rule) {
        rows.iter().find(|row| row.0 == name).map(|row| (row.1.as_str(), row.2)).unwrap()
    }

    /// Two chains of `n` nodes from sources of their own, which meet in a sum.
    fn chains(n: usize) -> Graph {
        let g = graph();
        let chain = |name: &str| {
            let mut x = g.op("Source").name(&format!("{name}/x")).out();
            for i in 0..n {
                x = g.op("Neg").name(&format!("{name}/{i}")).input(x).out();
            }
            x
        };
        let (a, b) = (chain("a"), chain("b"));
        g.op("Add").name("sum").input(a).input(b).build();
        g
    }

    fn costs(g: &Graph, seconds: f64, link: Link) -> CostModel {
        let mut costs = CostModel::default();
        costs.set_link("CPU", "CPU", link);
        for (_, node) in g.snapshot().iter().filter(|(_, node)| node.op() != "Source") {
            costs.record(&node.name, node.op(), "CPU", seconds);
        }
        costs
    }

    const CHEAP: Link = Link { bytes_per_second: 1e9, latency: 1e-6 };

    #[test]
    fn independent_heavy_chains_are_balanced() {
        let g = chains(4);
        let rows = placed(&g, "/cpu:0 /cpu:1", &costs(&g, 1e-3, CHEAP));
        for i in 0..4 {
            assert_eq!(device(&rows, &format!("a/{i}")), ("CPU:0", Rule::Cost));
            assert_eq!(device(&rows, &format!("b/{i}")), ("CPU:1", Rule::Cost));
        }
        // Sources are made where they are used.
        assert_eq!(device(&rows, "a/x"), ("CPU:0", Rule::FollowsConsumers));
        assert_eq!(device(&rows, "b/x"), ("CPU:1", Rule::FollowsConsumers));
    }

    #[test]
    fn a_chain_whose_values_are_dear_to_move_stays_together() {
        let g = graph();
        let x = g.device("/cpu:1", || g.op("Source").name("x").out());
        let y = g.op("Neg").name("y").input(x).out();
        g.op("Neg").name("z").input(y).build();
        // A second node of the same input could run at once elsewhere, if its 24 bytes did not take a second.
        g.op("Neg").name("w").input(x).build();
        let slow = Link { bytes_per_second: 24.0, latency: 0.0 };
        let rows = placed(&g, "/cpu:0 /cpu:1", &costs(&g, 1e-3, slow));
        for name in ["x", "y", "z", "w"] {
            assert_eq!(device(&rows, name).0, "CPU:1", "{name}");
        }
        let fast = placed(&g, "/cpu:0 /cpu:1", &costs(&g, 1e-3, CHEAP));
        assert_eq!(device(&fast, "y").0, "CPU:1");
        assert_eq!(device(&fast, "w").0, "CPU:0", "with a fast link it is worth it");
    }

    #[test]
    fn what_was_not_measured_is_placed_by_the_simple_rules() {
        let g = chains(2);
        let rows = placed(&g, "/cpu:0 /cpu:1 /gpu:0", &CostModel::default());
        assert_eq!(device(&rows, "a/0"), ("CPU:0", Rule::Cpu));
        assert_eq!(device(&rows, "sum"), ("GPU:0", Rule::Accelerator));
        let some = CostModel::parse("node a/0 Neg CPU 1 1\nnode b/0 Neg CPU 1 1\nnode a/1 Other CPU 1 1", "c").unwrap();
        let rows = placed(&g, "/cpu:0 /cpu:1 /gpu:0", &some);
        assert_eq!((device(&rows, "a/0").0, device(&rows, "b/0").0), ("CPU:0", "CPU:1"));
        assert_eq!(device(&rows, "a/1"), ("CPU:0", Rule::Cpu));
    }

    #[test]
    fn pins_and_shared_devices_are_kept() {
        let g = graph();
        let v = g.device("/cpu:1", || g.op("Var").name("v").out());
        let x = g.device("/cpu:1", || g.op("Source").name("x").out());
        g.op("Assign").name("w").input(v).input(x).build();
        g.device("/cpu:1", || g.op("Neg").name("n").input(x).build());
        let mut costs = costs(&g, 1.0, CHEAP);
        costs.record("w", "Assign", "CPU", 1.0);
        let rows = placed(&g, "/cpu:0 /cpu:1", &costs);
        assert_eq!(device(&rows, "w").0, "CPU:1");
        assert_eq!(device(&rows, "n"), ("CPU:1", Rule::Pinned));
    }
}
